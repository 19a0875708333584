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
from typing import Optional

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from ..numerics.linalg import cholesky, plus_one, root_of_inverse, row_squares, side_by_side, solve_lower
from .base import Coefficients
from .factors import Factor
from .product import Product
from .stack import Stack, each_times


class LowRankFactor(Factor):
    """N(m, S) with S = L(I + BBᵀ)⁻¹Lᵀ of stacked L and B.

    :param b: B, ``(..., C, M, R)``.
    :param tril: L, ``(..., C, M, M)``.
    """

    def __init__(self, stack: Stack, loc: Tensor, b: Tensor, tril: Tensor) -> None:
        super().__init__(loc)
        self.stack, self.b, self.tril = stack, b, tril
        self._flat = b.flatten(-3, -2)
        # I + BᵀB has eigenvalues of at least 1: no jitter.
        self.inner = cholesky(plus_one(self._flat.mT @ self._flat), 0.0, "I + BᵀB of a low-rank precision")
        # T = L_a⁻¹Bᵀ: (I + BBᵀ)⁻¹ = I − TᵀT (Woodbury)
        self._t = solve_lower(self.inner, self._flat.mT)  # (..., R, C·M)

    @functools.cached_property
    def low_rank(self) -> Tensor:
        """V = LTᵀ, ``(..., C·M, R)``: S = LLᵀ − VVᵀ."""
        return each_times(self.tril, self.stack.cut(self._t.mT)).flatten(-3, -2)

    def _scaled(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """ΦL of each block, ``(..., C, N, M)``, and ΦV, of a wide Φ."""
        return each_times(self.stack.cut(phi.mT).mT, self.tril), phi @ self.low_rank

    def variance_change(self, phi: Tensor) -> Tensor:
        phi = self.stack.wide(phi)
        own, coupled = self._scaled(phi)
        # diag(Φ(LLᵀ − VVᵀ − I)Φᵀ)
        return row_squares(own).sum(-2) - row_squares(coupled) - row_squares(phi)

    def covariance(self, phi: Tensor) -> Tensor:
        own, coupled = self._scaled(self.stack.wide(phi))
        own = own.transpose(-3, -2).flatten(-2)
        # Φ(LLᵀ − VVᵀ)Φᵀ
        return own @ own.mT - coupled @ coupled.mT

    @property
    def covariance_matrix(self) -> Tensor:
        return self.stack.dense(each_times(self.tril, self.tril.mT), self.low_rank, -1)

    def times(self, v: Tensor) -> Tensor:
        """Sv = L(I − TᵀT)Lᵀv of a vector."""
        scaled = each_times(self.tril.mT, self.stack.columns(v)).flatten(-3, -2)
        # (I − TᵀT)Lᵀv
        scaled = scaled - self._t.mT @ (self._t @ scaled)
        return self.stack.narrow(each_times(self.tril, self.stack.cut(scaled)).flatten(-3))

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        # tr S = ‖L‖² − ‖V‖²
        trace = self.tril.square().sum((-3, -2, -1)) - self.low_rank.square().sum((-2, -1))
        own = self.tril.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
        # log|S| = 2 log|L| − log|I + BᵀB|; beyond a block's own size L is I
        log_det = 2 * (own - self.inner.diagonal(dim1=-2, dim2=-1).log().sum(-1))
        return trace - self.stack.num_beyond, log_det

    def noise(self, shape: torch.Size) -> Tensor:
        # ε + Bη has covariance P = I + BBᵀ, so v = P⁻¹(ε + Bη) has covariance P⁻¹; P⁻¹ = I − TᵀT.
        eta = torch.randn(*shape, self._flat.shape[-1], 1, dtype=self.loc.dtype, device=self.loc.device)
        noise = torch.randn(*shape, *self.tril.shape[-3:-1], 1, dtype=self.loc.dtype, device=self.loc.device)
        noise = noise.flatten(-3, -2) + self._flat @ eta
        v = noise - self._t.mT @ (self._t @ noise)
        return self.stack.narrow((self.tril @ self.stack.cut(v)).flatten(-3))

    def unscale(self, v: Tensor) -> Tensor:
        # v ← L⁻¹v: vᵀS⁻¹v = ‖v‖² + ‖Bᵀv‖²
        v = solve_lower(self.tril, self.stack.columns(v)).flatten(-3, -2)
        # [v; Bᵀv]
        return torch.cat([v, self._flat.mT @ v], -2)[..., 0]


class LowRankGaussian(Product):
    """N(m, S) with S = L(I + BBᵀ)⁻¹Lᵀ.

    :param loc: m, a block ``(..., M_b)`` each.
    :param b: B, a block ``(..., M_b, R)`` each.
    :param trils: L_b, ``(..., M_b, M_b)`` each, or ``None`` for the identity.
    """

    def __init__(self, loc: Sequence[Tensor], b: Sequence[Tensor], trils: Optional[Sequence[Tensor]]) -> None:
        stack = Stack([block.shape[-1] for block in loc])
        trils = [torch.eye(block.shape[-2]).to(block) for block in b] if trils is None else trils
        factor = LowRankFactor(stack, side_by_side(loc), stack.rows(b), stack.squares(trils))
        super().__init__(stack.sizes, [factor], [range(len(stack.sizes))])


def leading_directions(features: Sequence[Tensor], small: Tensor) -> tuple[Tensor, Tensor]:
    """U = ΦᵀP, ``(..., ΣM_b, R)``, for R orthonormal columns P that hold the leading directions of ΦᵀΦ.

    By subspace iteration: UUᵀ is at most ΦᵀΦ. The level that plain kernels share is the first of them, which B would
    find very slowly from a random start.

    :param small: a small random U. Where the data have fewer directions than U has columns, its columns stay: at 0 they
        would have no gradient.
    :returns: U, with zeros there; and with these columns.
    """
    phi, random = side_by_side(features), small.to(features[0])
    found = random
    # P ← orth(ΦΦᵀP), U = ΦᵀP
    for _ in range(5):
        found = phi.mT @ torch.linalg.qr(phi @ found)[0]  # (..., M, min(R, n))
    mixing = torch.linalg.svd(found, full_matrices=False)[2]
    found = found @ mixing.mT
    found = found * (found.norm(dim=-2) >= random[..., : found.shape[-1]].norm(dim=-2))[..., None, :]
    found = torch.nn.functional.pad(found, (0, random.shape[-1] - found.shape[-1]))
    return found, found.to(small) + small * (found == 0).all(-2, keepdim=True)


def small_columns(sizes: Sequence[int], batch_shape: Sequence[int], rank: Optional[int], like: Tensor) -> list[Tensor]:
    """Where B starts, a block ``(..., M_b, R)`` each: B = 0 is a saddle, small and random it is none.

    :param rank: R; ``None`` is the size of the largest block.
    """
    rank = max(sizes) if rank is None else rank
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
        for i, (num, b) in enumerate(zip(self.sizes, small_columns(sizes, batch_shape, rank, like))):
            setattr(self, f"loc_{i}", PyroParam(like.new_zeros(*batch_shape, num)))
            setattr(self, f"b_{i}", PyroParam(b))
            if self.base:
                eye = torch.eye(num, dtype=like.dtype, device=like.device).expand(*batch_shape, num, num)
                setattr(self, f"scale_tril_{i}", PyroParam(eye.clone(), constraints.lower_cholesky))

    def _each(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{i}") for i in range(len(self.sizes))]

    def start(self, anchor: Optional[Tensor], features: Sequence[Tensor]) -> None:
        """Start S⁻¹ at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading R directions of λΦᵀΦ."""
        found = zip(
            *(part.split(self.sizes, -2) for part in leading_directions(features, torch.cat(self._each("b"), -2)))
        )
        for i, (phi, (u, b)) in enumerate(zip(features, found)):
            if self.base:
                # (I + ΦᵀΦ − UUᵀ)⁻¹ = LLᵀ of a block, and B = LᵀU
                root = root_of_inverse(phi.mT @ phi - u @ u.mT)
                self.put(f"scale_tril_{i}", root)
                b = root.mT @ u + (b - u)
            self.put(f"b_{i}", b)

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
