"""Data projections: the basis of Sᵀf(X) plus its noise, whitened (Wenger et al., 2024, algorithm S2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, over_upper, solve_lower
from .actions import Actions, kernel_times
from .base import CrossFeatures

__all__ = ["ProjectedFeatures", "project"]


class ProjectedFeatures(CrossFeatures):
    """ψ(x) = R⁻¹Sᵀk(X, x) with RRᵀ = SᵀKS + D, the covariance of f with h = R⁻¹(Sᵀ(f(X) − μ) + ε), h ~ N(0, I).

    :param kernel: k.
    :param actions: S.
    :param factor: R, ``(..., i, i)``.
    :param covariance: SᵀKS, ``(..., i, i)``.
    """

    def __init__(self, kernel: Any, actions: Actions, factor: Tensor, covariance: Tensor) -> None:
        super().__init__(kernel, (factor.shape[-1],))
        self.actions, self.factor, self.covariance = actions, factor, covariance

    def of(self, products: Tensor) -> list[Tensor]:
        """Φ from k(x, X)S."""
        return [over_upper(products, self.factor)]

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self.of(kernel_times(self.cross, x, self.actions))

    def coefficients_of(self, draw: Callable) -> list[Tensor]:
        # right(A) is AS for rows A, in the order of the actions' inputs.
        values = self.actions.right(draw(self.actions.inputs)[..., None, :])[..., 0, :]
        noise = self.actions.noise.sqrt() * torch.randn_like(values)
        return [solve_lower(self.factor, (values + noise)[..., None])[..., 0]]


def project(kernel: Any, actions: Actions, name: str) -> tuple[ProjectedFeatures, Tensor]:
    """The basis under ``actions`` and k(x, X)S at the training inputs, ``(..., N, i)``."""
    # RRᵀ = SᵀKS + D (algorithm S2)
    products = actions.gram(kernel)
    gram = actions.left(products)
    gram = (gram + gram.mT) / 2
    factor = cholesky(gram + torch.diag_embed(actions.noise), 0.0, f"SᵀK̂S of site {name!r}")
    return ProjectedFeatures(kernel, actions, factor, gram), products
