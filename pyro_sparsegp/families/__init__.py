"""The variational families by name: each a basis times a Gaussian over its coefficients.

A family is a small frozen recipe; the guide builds a module from it for each GP site at its first call.
``inducing`` is a count, chosen among that call's inputs, a tensor of inputs, or
:class:`~pyro_sparsegp.bases.InducingVariables`.
"""

from ..approximations.free import SparseGP
from .additive import AdditiveFamily, AdditiveSGPR, CoupledCovariance, CoupledPrecision, MeanFieldAdditive
from .base import BasisFamily, ExpectationFamily, Family, FreeFormFamily, OptimalFamily, SiteFamily
from .inducing import (
    SGPR,
    SVGP,
    CollapsedOrthogonal,
    ConditionalSGPR,
    Exact,
    InducingFamily,
    OrthogonalInducing,
    OrthogonallyDecoupled,
    SemiCollapsedOrthogonal,
    SparseEP,
)
from .projected import ComputationAware
from .weight_space import ExactWeightSpace, WeightSpace

__all__ = [
    "SGPR",
    "SVGP",
    "AdditiveFamily",
    "AdditiveSGPR",
    "BasisFamily",
    "CollapsedOrthogonal",
    "ComputationAware",
    "ConditionalSGPR",
    "CoupledCovariance",
    "CoupledPrecision",
    "Exact",
    "ExactWeightSpace",
    "ExpectationFamily",
    "Family",
    "FreeFormFamily",
    "InducingFamily",
    "MeanFieldAdditive",
    "OptimalFamily",
    "OrthogonalInducing",
    "OrthogonallyDecoupled",
    "SemiCollapsedOrthogonal",
    "SiteFamily",
    "SparseEP",
    "SparseGP",
    "WeightSpace",
]
