"""Gaussian processes in Pyro: a GP is one ``pyro.sample`` site, its variational family a guide you swap."""

from . import families, kernels
from ._version import __version__
from .guide import AutoSparseGP
from .inference import ExpectationPropagation, ProjectedLikelihood, TraceQuadrature_ELBO
from .linalg import NumericalWarning
from .predict import predict
from .process import GaussianProcess, SparsePosterior
from .reparam import Whitening, WhitenReparam

__all__ = [
    "AutoSparseGP",
    "ExpectationPropagation",
    "GaussianProcess",
    "NumericalWarning",
    "ProjectedLikelihood",
    "SparsePosterior",
    "TraceQuadrature_ELBO",
    "WhitenReparam",
    "Whitening",
    "__version__",
    "families",
    "kernels",
    "predict",
]
