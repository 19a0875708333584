"""Objectives and algorithms."""

from .projected import ProjectedLikelihood
from .quadrature import TraceQuadrature_ELBO

__all__ = ["ProjectedLikelihood", "TraceQuadrature_ELBO"]
