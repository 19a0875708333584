"""Objectives and algorithms."""

from .expectation import ExpectationPropagation
from .fit import FitResult, fit
from .quadrature import ProjectedLikelihood, TraceQuadrature_ELBO

__all__ = ["ExpectationPropagation", "FitResult", "ProjectedLikelihood", "TraceQuadrature_ELBO", "fit"]
