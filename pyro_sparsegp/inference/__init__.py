"""Objectives and algorithms."""

from .expectation import ExpectationPropagation
from .fit import FitResult, fit
from .optimisers import follow_rates
from .quadrature import ProjectedLikelihood, TraceQuadrature_ELBO

__all__ = ["ExpectationPropagation", "FitResult", "ProjectedLikelihood", "TraceQuadrature_ELBO", "fit", "follow_rates"]
