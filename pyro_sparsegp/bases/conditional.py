"""The basis of a posterior whose inducing values depend on the residual at the data (Shi et al., 2020, app. A)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from ..numerics.chunks import in_pieces
from ..numerics.linalg import cholesky, over_upper, solve_lower
from .base import CrossFeatures
from .inducing import InducingFeatures

__all__ = ["ConditionalFeatures"]


class ConditionalFeatures(CrossFeatures):
    """φ(x) of w, and R⁻¹Bᵀc(X, x) of s = Bᵀr(X), with RRᵀ = BᵀC_XX B: all that the posterior's density depends on.

    r is the residual, with covariance c = k − φφᵀ, independent of w under the prior. N²M operations for R.

    :param inducing: the features of w.
    :param inputs: X, ``(N, D)``.
    :param weights: B, ``(..., N, M)``.
    :param phi: Φ at X.
    :param name: the site, for errors.
    """

    def __init__(self, inducing: InducingFeatures, inputs: Tensor, weights: Tensor, phi: Tensor, name: str) -> None:
        num = phi.shape[-1]
        super().__init__(inducing.kernel, (num, num))
        self.inducing, self.inputs, self.weights = inducing, inputs, weights
        self.gram = phi.mT @ weights  # ΦᵀB
        across = self._across(inputs, phi)
        square = weights.mT @ across
        # The prior's scale of w is 1: this much noise on s is nothing, and keeps R regular where r vanishes.
        noise = 100 * torch.finfo(phi.dtype).eps
        eye = torch.eye(num, dtype=phi.dtype, device=phi.device)
        self.root = cholesky((square + square.mT) / 2 + noise * eye, 0.0, f"BᵀC_XX B of site {name!r}")
        self.noise = noise
        self.known = self._both(phi, across)

    def _across(self, x: Tensor, phi: Tensor) -> Tensor:
        # c(x, X)B, (..., n, M).

        def product(rows: slice) -> Tensor:
            return self.cross(x[..., rows, :], self.inputs) @ self.weights

        return in_pieces(product, x.shape[-2], self.inputs.shape[-2], x, -2) - phi @ self.gram

    def _both(self, phi: Tensor, across: Tensor) -> list[Tensor]:
        second = over_upper(across, self.root)
        return [phi.expand(second.shape), second]

    def __call__(self, x: Tensor) -> list[Tensor]:
        (phi,) = self.inducing.of_summand(self.cross)(x)
        return self._both(phi, self._across(x, phi))

    def coefficients_of(self, draw: Callable) -> Optional[list[Tensor]]:
        blocks = self.inducing.coefficients_of(draw)
        if blocks is None:
            return None
        (w,) = blocks
        s = (self.weights.mT @ draw(self.inputs)[..., None])[..., 0] - (self.gram.mT @ w[..., None])[..., 0]
        s = s + self.noise**0.5 * torch.randn_like(s)
        return [w, solve_lower(self.root, s[..., None])[..., 0]]
