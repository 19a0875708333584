"""Objectives and algorithms."""

from .expectation import ExpectationPropagation
from .fit import FitResult, fit
from .jit import JitTraceQuadrature_ELBO
from .optimisers import follow_rates
from .quadrature import ProjectedLikelihood, TraceQuadrature_ELBO

__all__ = [
    "ExpectationPropagation",
    "FitResult",
    "JitTraceQuadrature_ELBO",
    "ProjectedLikelihood",
    "TraceQuadrature_ELBO",
    "fit",
    "follow_rates",
]
