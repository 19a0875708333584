"""Low-rank coupling of blocks through the precision (Adam, Durrande and John, 2018, eq. 7).

With a factor L = blockdiag(L_b) and B of rank R, in whitened coordinates,

    S = L(I + BBᵀ)⁻¹Lᵀ,   S⁻¹ = blockdiag((L_bL_bᵀ)⁻¹) + (L⁻ᵀB)(L⁻ᵀB)ᵀ,

"block plus low rank": it contains the block-diagonal mean field (B = 0) and, at L = I, the paper's eq. 7.
With L_aL_aᵀ = I + BᵀB and T = L_a⁻¹Bᵀ, S = L(I − TᵀT)Lᵀ and log|S| = 2 log|L| − log|L_aL_aᵀ|: nothing of size
(ΣM_b)² is formed, storage and the divergence's cost are linear in the number of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Optional, Self

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from ..numerics.linalg import (
    cholesky,
    gaussian_kl,
    on_diagonal,
    plus_one,
    root_of_inverse,
    row_squares,
    side_by_side,
    solve_lower,
)
from .base import Coefficients, Gaussian
from .factors import DenseFactor
from .product import Product
from .stack import Stack, each_times

__all__ = ["BlockPlusLowRank", "IdentityPlusLowRank", "LowRankGaussian", "leading_directions", "small_columns"]


class LowRankGaussian(Gaussian):
    """N(m, S) with S = L(I + BBᵀ)⁻¹Lᵀ, L = blockdiag(L_b): storage and cost are linear in the number of blocks.

    :param loc: m, a block ``(..., M_b)`` each.
    :param b: B, a block ``(..., M_b, R)`` each.
    :param trils: L_b, ``(..., M_b, M_b)`` each, or ``None`` for the identity.
    """

    def __init__(self, loc: Sequence[Tensor], b: Sequence[Tensor], trils: Optional[Sequence[Tensor]]) -> None:
        stack = Stack([block.shape[-1] for block in loc])
        trils = (
            [torch.eye(n, dtype=x.dtype, device=x.device) for x, n in zip(b, stack.sizes)] if trils is None else trils
        )
        self._set(stack, stack.columns(loc), stack.rows(b), stack.squares(trils))

    @classmethod
    def stacked(cls, stack: Stack, loc: Tensor, b: Tensor, tril: Tensor) -> Self:
        """Of blocks that are stacked, m as columns."""
        new = cls.__new__(cls)
        new._set(stack, loc, b, tril)
        return new

    def _set(self, stack: Stack, loc: Tensor, b: Tensor, tril: Tensor) -> None:
        self.stack, self.sizes, self.batch_shape = stack, stack.sizes, loc.shape[:-3]
        self.columns, self._b, self.tril = loc, b, tril
        b = b.flatten(-3, -2)
        # I + BᵀB has eigenvalues of at least 1: no jitter.
        self.inner = cholesky(plus_one(b.mT @ b), 0.0, "I + BᵀB of a low-rank precision")
        # T = L_a⁻¹Bᵀ: (I + BBᵀ)⁻¹ = I − TᵀT (Woodbury)
        self._t = solve_lower(self.inner, b.mT)  # (..., R, C·M)

    @property
    def loc(self) -> list[Tensor]:
        return self.stack.vectors(self.columns)

    @property
    def b(self) -> list[Tensor]:
        """B, a block each."""
        return self.stack.blocks(self._b)

    @property
    def trils(self) -> list[Tensor]:
        """L, a block each."""
        return self.stack.blocks(self.tril, square=True)

    @functools.cached_property
    def low_rank(self) -> Tensor:
        """V = LTᵀ, ``(..., C·M, R)``: S = LLᵀ − VVᵀ."""
        return self._scaled(self._t.mT)

    def _scaled(self, v: Tensor) -> Tensor:
        """Lv, flat."""
        return each_times(self.tril, self.stack.cut(v)).flatten(-3, -2)

    def variance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self.moments(features)[1]

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.moments_by(side_by_side(features))

    def moments_by(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        phi = self.stack.wide(phi)
        # diag(Φ(LLᵀ − VVᵀ − I)Φᵀ), the first by one product for all blocks
        own = row_squares(each_times(self.stack.cut(phi.mT).mT, self.tril)).sum(-2)
        change = own - row_squares(phi @ self.low_rank) - row_squares(phi)
        return (phi @ self.columns.flatten(-3, -2))[..., 0], change

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        phi = self.stack.wide(side_by_side(features))
        coupled, own = phi @ self.low_rank, each_times(self.stack.cut(phi.mT).mT, self.tril)
        own = own.transpose(-3, -2).flatten(-2)
        # Φ(LLᵀ − VVᵀ − I)Φᵀ
        return own @ own.mT - coupled @ coupled.mT - phi @ phi.mT

    def covariance_times_columns(self, v: Tensor) -> Tensor:
        """L(I − TᵀT)Lᵀv, of stacked columns."""
        scaled = each_times(self.tril.mT, v).flatten(-3, -2)
        # L(I − TᵀT)Lᵀv
        return each_times(self.tril, self.stack.cut(scaled - self._t.mT @ (self._t @ scaled)))

    @functools.cached_property
    def _log_det(self) -> Tensor:
        """log|S|."""
        own = self.tril.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
        # log|S| = 2 log|L| − log|I + BᵀB|
        return 2 * (own - self.inner.diagonal(dim1=-2, dim2=-1).log().sum(-1))

    def kl(self) -> Tensor:
        # tr S = ‖L‖² − ‖V‖²
        trace = self.tril.square().sum((-3, -2, -1)) - self.low_rank.square().sum((-2, -1))
        return gaussian_kl(self.columns.flatten(-3), trace, self._log_det)

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        # ε + Bη has covariance P = I + BBᵀ, so v = P⁻¹(ε + Bη) has covariance P⁻¹; P⁻¹ = I − TᵀT.
        like, b = self.columns, self._b.flatten(-3, -2)
        eta = torch.randn(*shape, b.shape[-1], 1, dtype=like.dtype, device=like.device)
        noise = torch.randn(*shape, *like.shape[-3:], dtype=like.dtype, device=like.device).flatten(-3, -2) + b @ eta
        v = noise - self._t.mT @ (self._t @ noise)
        return self.stack.vectors(like + self.tril @ self.stack.cut(v))

    def log_ratio(self, w: Sequence[Tensor]) -> Tensor:
        block = self.stack.columns(w)
        # v = L⁻¹(w − m): (w − m)ᵀS⁻¹(w − m) = ‖v‖² + ‖Bᵀv‖²
        v = solve_lower(self.tril, block - self.columns)
        inner = self._b.flatten(-3, -2).mT @ v.flatten(-3, -2)
        squares = (block.square() - v.square()).sum((-3, -2, -1)) - inner.square().sum((-2, -1))
        return 0.5 * (squares - self._log_det)

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        chosen = sorted(blocks)
        if len(chosen) == len(self.sizes):
            return self
        if not chosen:
            return Product([], [], [])
        # S_bb = L_bL_bᵀ − V_bV_bᵀ over the chosen blocks
        parts = self.stack.blocks(self.stack.cut(self.low_rank))
        low_rank, own, loc = torch.cat([parts[b] for b in chosen], -2), self.trils, self.loc
        covariance = on_diagonal([own[b] @ own[b].mT for b in chosen], torch.zeros_like(low_rank @ low_rank.mT))
        tril = cholesky(covariance - low_rank @ low_rank.mT, 0.0, "a marginal covariance of coefficients")
        factor = DenseFactor(torch.cat([loc[b] for b in chosen], -1), tril)
        return Product([self.sizes[b] for b in chosen], [factor], [tuple(range(len(chosen)))])

    @property
    def covariance_matrix(self) -> Tensor:
        eye = torch.eye(sum(self.sizes), dtype=self.columns.dtype, device=self.columns.device)
        return eye + self.covariance_change(list(eye.split(self.sizes, -1)))


def leading_directions(features: Sequence[Tensor], small: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """U = ΦᵀP, a block ``(..., M_b, R)`` each, for R orthonormal columns P that hold the leading directions of ΦᵀΦ.

    By subspace iteration: UUᵀ is at most ΦᵀΦ, and nothing of size (ΣM_b)² is formed. The level that plain kernels share
    is the first of them.

    :param small: small random blocks of U's shape. Where the data have fewer directions than U has columns, these
        stay: at 0 they would have no gradient.
    :returns: U, with zeros there, and which columns these are, ``(..., R)``.
    """
    phi, random = side_by_side(features), torch.cat(list(small), -2).to(features[0])
    found = random
    # P ← orth(ΦΦᵀP), U = ΦᵀP
    for _ in range(5):
        found = phi.mT @ torch.linalg.qr(phi @ found)[0]  # (..., M, min(R, n))
    mixing = torch.linalg.svd(found, full_matrices=False)[2]
    found = found @ mixing.mT
    lost = found.norm(dim=-2) < random[..., : found.shape[-1]].norm(dim=-2)
    found = found * ~lost[..., None, :]
    spare = torch.cat([lost, lost.new_ones(*lost.shape[:-1], random.shape[-1] - lost.shape[-1])], -1)
    found = torch.cat([found, torch.zeros_like(random[..., found.shape[-1] :])], -1)
    return list(found.split([phi.shape[-1] for phi in features], -2)), spare


def small_columns(sizes: Sequence[int], batch_shape: Sequence[int], rank: int, like: Tensor) -> list[Tensor]:
    """Where B starts, a block ``(..., M_b, R)`` each: B = 0 is a saddle, small and random it is none."""
    scale = 0.1 / max(sum(sizes) * rank, 1) ** 0.25
    return [scale * torch.randn(*batch_shape, num, rank, dtype=like.dtype, device=like.device) for num in sizes]


class _LowRank(Coefficients):
    """Parameters of a :class:`LowRankGaussian`.

    :param rank: R, the number of columns of B; ``None`` is the size of the largest block, as in the paper.
    """

    base: bool

    def __init__(
        self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rank: Optional[int] = None
    ) -> None:
        super().__init__(sizes, batch_shape, like)
        self.sizes = tuple(sizes)
        rank = max(self.sizes) if rank is None else rank
        for i, (num, b) in enumerate(zip(self.sizes, small_columns(sizes, batch_shape, rank, like))):
            setattr(self, f"loc_{i}", PyroParam(like.new_zeros(*batch_shape, num)))
            setattr(self, f"b_{i}", PyroParam(b))
            if self.base:
                eye = torch.eye(num, dtype=like.dtype, device=like.device).expand(*batch_shape, num, num)
                setattr(self, f"scale_tril_{i}", PyroParam(eye.clone(), constraints.lower_cholesky))

    def _each(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{i}") for i in range(len(self.sizes))]

    def start(self, anchor: Optional[Tensor], features: Optional[Sequence[Tensor]]) -> None:
        """Start S⁻¹ at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading R directions of λΦᵀΦ.

        From a random start, B finds some directions very slowly, such as the level that plain kernels share. U is ΦᵀP
        for R orthonormal columns P, by subspace iteration: UUᵀ is at most ΦᵀΦ, and nothing of size (ΣM_b)² is formed.
        """
        if features is None:
            return
        small = self._each("b")
        found, spare = leading_directions(features, small)
        for i, (phi, part) in enumerate(zip(features, found)):
            if self.base:
                # (I + ΦᵀΦ − UUᵀ)⁻¹ = LLᵀ of a block, and B = LᵀU
                root = root_of_inverse(phi.mT @ phi - part @ part.mT)
                self.put(f"scale_tril_{i}", root)
                part = root.mT @ part
            self.put(f"b_{i}", part.to(small[i]) + small[i] * spare[..., None, :])

    def forward(self, anchor: Optional[Tensor] = None) -> LowRankGaussian:
        return LowRankGaussian(self._each("loc"), self._each("b"), self._each("scale_tril") if self.base else None)


class BlockPlusLowRank(_LowRank):
    """N(m, S) with S⁻¹ = blockdiag((L_bL_bᵀ)⁻¹) + L⁻ᵀBBᵀL⁻¹, block plus low rank; contains :class:`BlockCholesky`.

    L_b, lower triangular ``(..., M_b, M_b)``, and B, ``(..., M_b, R)`` a block, are free.
    """

    base = True


class IdentityPlusLowRank(_LowRank):
    """N(m, S) with S⁻¹ = I + BBᵀ, whitened (Adam, Durrande and John, 2018, eq. 7).

    B, ``(..., M_b, R)`` a block, is free. At a rank of one block's size it does not contain the mean field.
    """

    base = False
