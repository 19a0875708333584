"""Objectives and algorithms."""

from .quadrature import TraceQuadrature_ELBO

__all__ = ["TraceQuadrature_ELBO"]
