"""Objectives and algorithms."""

from .expectation import ExpectationPropagation
from .projected import ProjectedLikelihood
from .quadrature import TraceQuadrature_ELBO

__all__ = ["ExpectationPropagation", "ProjectedLikelihood", "TraceQuadrature_ELBO"]
