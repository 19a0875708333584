"""Objectives and algorithms."""

from .expectation import ExpectationPropagation
from .fit import FitResult, fit
from .fused_adam import FusedAdam
from .projected import ProjectedLikelihood
from .quadrature import TraceQuadrature_ELBO

__all__ = ["ExpectationPropagation", "FitResult", "FusedAdam", "ProjectedLikelihood", "TraceQuadrature_ELBO", "fit"]
