"""Gaussian processes in Pyro: a GP is one ``pyro.sample`` site, its variational family one argument of the guide."""

from importlib import import_module
from typing import Any

from . import families, kernels
from ._version import __version__
from .guide import AutoSparseGP
from .inference import (
    ExpectationPropagation,
    FitResult,
    JitTraceQuadrature_ELBO,
    ProjectedLikelihood,
    TraceQuadrature_ELBO,
    fit,
    follow_rates,
)
from .numerics.linalg import NumericalWarning
from .outputs import mix_outputs
from .posterior.sparse_posterior import SparsePosterior
from .predict import Whitening, WhitenReparam, predict
from .process import GaussianProcess
from .program.handlers import class_probabilities

__all__ = [
    "AutoSparseGP",
    "ExpectationPropagation",
    "FitResult",
    "GaussianProcess",
    "JitTraceQuadrature_ELBO",
    "NumericalWarning",
    "ProjectedLikelihood",
    "SparsePosterior",
    "TraceQuadrature_ELBO",
    "WhitenReparam",
    "Whitening",
    "__version__",
    "class_probabilities",
    "families",
    "fit",
    "follow_rates",
    "kernels",
    "mix_outputs",
    "predict",
]


def __getattr__(name: str) -> Any:
    if name == "diagnostics":  # imported when it is first used
        return import_module(".diagnostics", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
