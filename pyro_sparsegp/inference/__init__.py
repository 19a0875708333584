"""Objectives and algorithms."""

from .expectation import ExpectationPropagation
from .fit import FitResult, fit
from .projected import ProjectedLikelihood
from .quadrature import TraceQuadrature_ELBO

__all__ = ["ExpectationPropagation", "FitResult", "ProjectedLikelihood", "TraceQuadrature_ELBO", "fit"]
