"""Inducing points beside a free mean function of many more (Salimbeni et al., 2018), or beside what their posterior
says of the residual at the data (Shi et al., 2020, appendix A).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from ..gaussians.base import Gaussian
from ..numerics.chunks import in_pieces
from ..numerics.linalg import cholesky, over_upper, solve_lower
from ..numerics.shapes import broadcast_shapes
from .base import CrossFeatures
from .inducing import InducingFeatures
from .variables import Values, Variables, between

_FLOOR = 1e-8  # of κ, in nats: where a = 0 the coefficient of the mean has no direction


class DecoupledFeatures(CrossFeatures):
    """φ of Z, and ψ(x) = c(x, O)a/√κ with c = k − φφᵀ and κ = aᵀC_OO a: the direction of one further coefficient.

    With t = aᵀf⊥(O)/√κ, N(0, 1) under the prior, the posterior N(√κ, 1) of t moves f by c(x, O)a, changes no variance
    and costs κ/2 nats. Neither K_OO nor C_OO is factorised: c(x, O)a = k(x, O)a − φ(x)ᵀL⁻¹(k(Z, O)a) and
    κ = aᵀK_OO a − ‖L⁻¹k(Z, O)a‖² are products, linear in the number M₂ of points O where only some columns of K_OO are
    taken.

    :param inducing: the features of Z.
    :param means: O.
    :param weights: a, ``(..., M₂)``.
    :param num_columns: how many columns of K_OO :meth:`estimate` draws.
    """

    def __init__(self, inducing: InducingFeatures, means: Variables, weights: Tensor, num_columns: int) -> None:
        super().__init__(inducing.kernel, (*inducing.sizes, 1))
        self.inducing, self.means, self.weights, self.num_columns = inducing, means, weights, num_columns
        (part,) = inducing.variables
        pull = between(self.kernel, part, means) @ weights[..., None]  # k(Z, O)a
        batch = broadcast_shapes(inducing.factor.shape[:-2], pull.shape[:-2])
        factor, pull = (matrix.expand(*batch, *matrix.shape[-2:]) for matrix in (inducing.factor, pull))
        # L⁻¹k(Z, O)a, so that c(x, O)a = k(x, O)a − φ(x)ᵀ of it
        self.pull = solve_lower(factor, pull)[..., 0]
        self._square: Optional[Tensor] = None

    def moved(self, x: Tensor, phi: Tensor) -> Tensor:
        """c(x, O)a, ``(..., N)``, for φ(x) ``(..., N, M)``."""
        # k(x, O)a − φ(x)ᵀL⁻¹(k(Z, O)a)
        direct = (self.means.cross(self.cross, x) @ self.weights[..., None])[..., 0]
        return direct - (phi @ self.pull[..., None])[..., 0]

    def __call__(self, x: Tensor) -> list[Tensor]:
        blocks = self.inducing.of_summand(self.cross)(x)
        shift = self.moved(x, torch.cat(blocks, -1)) / self.square().sqrt()[..., None]
        return [*blocks, shift[..., None]]

    def marginals(
        self, x: Tensor, coefficients: Gaussian, known: Optional[list[Tensor]] = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = self.inducing.of_summand(self.cross)(x) if known is None else known[:-1]
        mean, change = coefficients.marginal(range(len(blocks))).moments(blocks)
        return mean + self.moved(x, torch.cat(blocks, -1)), change, self.cross.diag(x)

    def coefficients_of(self, draw: Callable) -> Optional[list[Tensor]]:
        blocks, values = self.inducing.coefficients_of(draw), self.means.of(draw)
        if blocks is None or values is None:
            return None
        t = (values * self.weights).sum(-1) - (torch.cat(blocks, -1) * self.pull).sum(-1)
        return [*blocks, (t / self.square().sqrt())[..., None]]

    def _against(self, rows: Tensor) -> Tensor:
        # Some entries of K_OO a, (..., n).
        means = self.means
        if isinstance(means, Values):
            columns = type(means)(means.z.index_select(0, rows)).between(self.kernel, means)
        else:
            columns = means.covariance(self.kernel).index_select(-2, rows)
        return (columns @ self.weights[..., None])[..., 0]

    def square(self) -> Tensor:
        """κ, ``(...,)``, from all of K_OO, in blocks; computed once."""
        if self._square is None:
            index = torch.arange(self.means.size, device=self.weights.device)
            whole = not isinstance(self.means, Values)  # formed at once
            cost = 1 if whole else self.means.size
            against = in_pieces(lambda rows: self._against(index[rows]), len(index), cost, self.weights, -1)
            # κ = aᵀC_OO a = aᵀK_OO a − ‖L⁻¹k(Z, O)a‖²
            total = (self.weights * against).sum(-1)
            self._square = (total - self.pull.square().sum(-1)).clamp(min=_FLOOR)
        return self._square

    def estimate(self) -> Tensor:
        """κ from ``num_columns`` random columns of K_OO, ``(...,)``: unbiased, and exact where these are all."""
        num, size = self.num_columns, self.means.size
        if num >= size:
            return self.square()
        rows = torch.randperm(size, device=self.weights.device)[:num]
        drawn = (self.weights.index_select(-1, rows) * self._against(rows)).sum(-1)
        # (M₂/n) Σ aᵢ(K_OO a)ᵢ over n rows − ‖L⁻¹k(Z, O)a‖²
        return size / num * drawn - self.pull.square().sum(-1)


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
        # BᵀC_XX B
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
        # c(x, X)B R⁻ᵀ
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
        # s = Bᵀr(X) = Bᵀf(X) − (ΦᵀB)ᵀw
        s = (self.weights.mT @ draw(self.inputs)[..., None])[..., 0] - (self.gram.mT @ w[..., None])[..., 0]
        s = s + self.noise**0.5 * torch.randn_like(s)
        return [w, solve_lower(self.root, s[..., None])[..., 0]]
