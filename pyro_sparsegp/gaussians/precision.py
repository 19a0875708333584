"""Low-rank coupling of blocks through the precision (Adam, Durrande and John, 2018, eq. 7).

With a factor L = blockdiag(L_b) and B of rank R, in whitened coordinates,

    S = L(I + BBᵀ)⁻¹Lᵀ,   S⁻¹ = blockdiag((L_bL_bᵀ)⁻¹) + (L⁻ᵀB)(L⁻ᵀB)ᵀ,

"block plus low rank": it contains the block-diagonal mean field (B = 0) and, at L = I, the paper's eq. 7.
With L_aL_aᵀ = I + BᵀB and T = L_a⁻¹Bᵀ, S = L(I − TᵀT)Lᵀ and log|S| = 2 log|L| − log|L_aL_aᵀ|: nothing of size
(ΣM_b)² is formed, storage and the divergence's cost are linear in the number of blocks.
"""

from __future__ import annotations

import copy
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
    root_of_inverse,
    row_squares,
    side_by_side,
    solve_lower,
)
from .base import Coefficients, Gaussian
from .groups import Groups, each_times, total
from .product import DenseFactor, Product

__all__ = ["BlockPlusLowRank", "IdentityPlusLowRank", "LowRankGaussian", "leading_directions", "small_columns"]


def _columns(groups: Groups, phi: Tensor) -> list[Tensor]:
    """Φ of all blocks, in the order of the groups, as stacked ones, ``(..., C, N, M)``."""
    return [part.mT for part in groups.cut(phi.mT)]


class LowRankGaussian(Gaussian):
    """N(m, S) with S = L(I + BBᵀ)⁻¹Lᵀ, L = blockdiag(L_b): storage and cost are linear in the number of blocks.

    :param loc: m, a block ``(..., M_b)`` each.
    :param b: B, a block ``(..., M_b, R)`` each.
    :param trils: L_b, ``(..., M_b, M_b)`` each, or ``None`` for the identity.
    """

    def __init__(self, loc: Sequence[Tensor], b: Sequence[Tensor], trils: Optional[Sequence[Tensor]]) -> None:
        groups = Groups([block.shape[-1] for block in loc])
        self._set(groups, groups.columns(loc), groups.stack(b), None if trils is None else groups.stack(trils))

    @classmethod
    def of_groups(
        cls, groups: Groups, loc: Sequence[Tensor], b: Sequence[Tensor], trils: Optional[Sequence[Tensor]]
    ) -> Self:
        """Of blocks that are stacked by their sizes, m as columns."""
        new = cls.__new__(cls)
        new._set(groups, loc, b, trils)
        return new

    def _set(
        self, groups: Groups, loc: Sequence[Tensor], b: Sequence[Tensor], trils: Optional[Sequence[Tensor]]
    ) -> None:
        self.groups, self.sizes, self.batch_shape = groups, groups.sizes, loc[0].shape[:-3]
        self._loc, self._b, self._trils = loc, b, trils
        gram = total([part.mT @ part for part in b])
        # I + BᵀB has eigenvalues of at least 1: no jitter.
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        self.inner = cholesky(eye + gram, 0.0, "I + BᵀB of a low-rank precision")
        self._t = [solve_lower(self.inner[..., None, :, :], part.mT) for part in b]  # (..., C, R, M_b)

    def with_loc(self, loc: Sequence[Tensor]) -> Self:
        """The same covariance round another mean, columns stacked by the blocks' sizes."""
        new = copy.copy(self)
        new._loc = loc
        return new

    @property
    def parts(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Optional[Sequence[Tensor]]]:
        """What :meth:`of_groups` makes it of."""
        return self._loc, self._b, self._trils

    @property
    def loc(self) -> list[Tensor]:
        return self.groups.vectors(self._loc)

    @property
    def columns(self) -> Sequence[Tensor]:
        """m, as columns stacked by the blocks' sizes."""
        return self._loc

    @property
    def b(self) -> list[Tensor]:
        """B, a block each."""
        return self.groups.unstack(self._b)

    @property
    def trils(self) -> Optional[list[Tensor]]:
        """L, a block each."""
        return None if self._trils is None else self.groups.unstack(self._trils)

    @functools.cached_property
    def low_rank(self) -> Tensor:
        """V = LTᵀ of all blocks, ``(..., ΣM, R)``: S = LLᵀ − VVᵀ."""
        trils = self._trils
        parts = [t.mT for t in self._t] if trils is None else [tril @ t.mT for tril, t in zip(trils, self._t)]
        return self.groups.over(parts)

    def _scaled(self, phi: Sequence[Tensor]) -> Sequence[Tensor]:
        return phi if self._trils is None else [part @ tril for part, tril in zip(phi, self._trils)]

    def variance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self._moments(features)[1]

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self._moments(features)

    def _moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        phi = side_by_side(self.groups.of_group(features, self.groups.order))
        mean, change = (phi @ self.groups.over(self._loc))[..., 0], -row_squares(phi @ self.low_rank)
        if self._trils is None:
            return mean, change
        # diag(Φ(LLᵀ − I)Φᵀ) by one product for each group of blocks, Φ of its blocks stacked.
        for part, tril in zip(_columns(self.groups, phi), self._trils):
            change = change + row_squares(each_times(part, tril)).sum(-2)
        return mean, change - row_squares(phi)

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        phi = self.groups.stack(features)
        flat = _flat(phi)
        coupled = flat @ self.low_rank
        change = -coupled @ coupled.mT
        if self._trils is not None:
            v = _flat(self._scaled(phi))
            change = change + v @ v.mT - flat @ flat.mT
        return change

    def covariance_times(self, v: Sequence[Tensor]) -> list[Tensor]:
        return self.groups.vectors(self.covariance_times_columns(self.groups.columns(v)))

    def covariance_times_columns(self, v: Sequence[Tensor]) -> list[Tensor]:
        """L(I − TᵀT)Lᵀv, of columns stacked by the blocks' sizes."""
        trils = self._trils
        scaled = v if trils is None else [tril.mT @ part for tril, part in zip(trils, v)]
        inner = total([t @ part for t, part in zip(self._t, scaled)])[..., None, :, :]
        left = [part - t.mT @ inner for part, t in zip(scaled, self._t)]
        return left if trils is None else [tril @ part for tril, part in zip(trils, left)]

    @functools.cached_property
    def _log_det(self) -> Tensor:
        """log|S|."""
        log_det = -2 * self.inner.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        for tril in self._trils or ():
            log_det = log_det + 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
        return log_det

    @functools.cached_property
    def _trace(self) -> Tensor:
        """tr S."""
        trace = -self.low_rank.square().sum((-2, -1))
        if self._trils is None:
            trace = trace + sum(self.sizes)
        for tril in self._trils or ():
            trace = trace + tril.square().sum((-3, -2, -1))
        return trace

    def kl(self) -> Tensor:
        return gaussian_kl(self.groups.over(self._loc)[..., 0], self._trace, self._log_det)

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        # ε + Bη has covariance P = I + BBᵀ, so v = P⁻¹(ε + Bη) has covariance P⁻¹; P⁻¹ = I − TᵀT.
        like = self._loc[0]
        eta = torch.randn(*shape, 1, self._b[0].shape[-1], 1, dtype=like.dtype, device=like.device)
        noise = [
            torch.randn(*shape, *b.shape[-3:-1], 1, dtype=like.dtype, device=like.device) + b @ eta for b in self._b
        ]
        inner = total([t @ block for t, block in zip(self._t, noise)])[..., None, :, :]
        draws = []
        for i, (loc, t, block) in enumerate(zip(self._loc, self._t, noise)):
            v = block - t.mT @ inner
            draws.append(loc + (v if self._trils is None else self._trils[i] @ v))
        return self.groups.vectors(draws)

    def log_ratio(self, w: Sequence[Tensor]) -> Tensor:
        log_ratio, inner = -self._log_det, []
        for i, (block, loc, b) in enumerate(zip(self.groups.columns(w), self._loc, self._b)):
            v = block - loc
            if self._trils is not None:
                v = solve_lower(self._trils[i], v)
            log_ratio = log_ratio + (block.square() - v.square()).sum((-3, -2, -1))
            inner.append(b.mT @ v)
        return 0.5 * (log_ratio - total(inner).square().sum((-2, -1)))

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        chosen = sorted(blocks)
        if len(chosen) == len(self.sizes):
            return self
        if not chosen:
            return Product([], [], [])
        # S_bb = L_b(I − T_bᵀT_b)L_bᵀ = L_b(I − TᵀT)L_bᵀ over the chosen blocks.
        whole, t = self.loc, self.groups.unstack(self._t)
        roots = self.trils or [torch.eye(m.shape[-1], dtype=m.dtype, device=m.device) for m in whole]
        size = sum(self.sizes[b] for b in chosen)
        loc = torch.cat([whole[b] for b in chosen], -1)
        low_rank = torch.cat([roots[b] @ t[b].mT for b in chosen], -2)
        own = [roots[b] @ roots[b].mT for b in chosen]
        covariance = on_diagonal(own, loc.new_zeros(*self.batch_shape, size, size))
        tril = cholesky(covariance - low_rank @ low_rank.mT, 0.0, "a marginal covariance of coefficients")
        return Product([self.sizes[b] for b in chosen], [DenseFactor(loc, tril)], [tuple(range(len(chosen)))])

    @property
    def covariance_matrix(self) -> Tensor:
        eyes = torch.eye(sum(self.sizes), dtype=self._loc[0].dtype, device=self._loc[0].device)
        return eyes + self.covariance_change(list(eyes.split(self.sizes, -1)))


def _flat(phi: Sequence[Tensor]) -> Tensor:
    """Stacked features, ``(..., C, N, M)``, side by side in the order of the groups, ``(..., N, ΣM)``."""
    return side_by_side([part.transpose(-3, -2).flatten(-2) for part in phi])


def leading_directions(features: Sequence[Tensor], small: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """U = ΦᵀP, a block ``(..., M_b, R)`` each, for R orthonormal columns P that hold the leading directions of ΦᵀΦ.

    By subspace iteration: UUᵀ is at most ΦᵀΦ, and nothing of size (ΣM_b)² is formed. The level that plain kernels share
    is the first of them.

    :param small: small random blocks of U's shape. Where the data have fewer directions than U has columns, these
        stay: at 0 they would have no gradient.
    :returns: U, with zeros there, and which columns these are, ``(..., R)``.
    """
    u = [part.to(features[0]) for part in small]
    for _ in range(5):
        seen = torch.stack([phi @ part for phi, part in zip(features, u)]).sum(0)
        p = torch.linalg.qr(seen)[0]  # (..., n, R)
        u = [phi.mT @ p for phi in features]
    found = torch.cat(u, -2)
    mixing = torch.linalg.svd(found, full_matrices=False)[2]
    found = found @ mixing.mT
    random = torch.cat(list(small), -2).to(found)
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
