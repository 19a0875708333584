"""Free Gaussians over the values that coefficients stand for, u = Lw, instead of over w itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from ..numerics.linalg import solve_lower
from ..numerics.shapes import broadcast_shapes
from .base import Coefficients
from .product import DenseFactor, DiagonalFactor, Factor, IdentityFactor, Product

__all__ = ["Unwhitened"]


class Unwhitened(Coefficients):
    """q(u_b) = N(m_b, S_b), factor by factor, for u_b = L_bb w_b: the values themselves (Shi et al., 2020, eq. 8).

    L_bb is the factor's own block on the diagonal of the anchor L. For nested sets, u₁ = f(Z), and u₂ = f⊥(O) is what
    f(O) adds to it, with prior N(0, C_OO): the paper's v⊥. Of w, this is N(L_bb⁻¹m_b, L_bb⁻¹S_bL_bb⁻ᵀ).
    A factor that keeps the prior's covariance keeps it. q moves with the hyperparameters where a whitened one would
    not; both reach the same optimum.

    :param kind: the whitened posterior with the same layout of factors.
    """

    anchored: ClassVar[bool] = True
    placed: ClassVar[bool] = True

    def __init__(
        self, kind: Any, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, **kwargs: Any
    ) -> None:
        super().__init__(sizes, batch_shape, like)
        self.values = kind(sizes, batch_shape, like, **kwargs)

    def start(self, anchor: Optional[Tensor], features: Optional[Sequence[Tensor]]) -> None:
        """Put q where the whitened one starts, under the first anchor L: at the prior, it is N(0, L_bbL_bbᵀ)."""
        anchor = _require(anchor)
        self.values.start(anchor, features)
        for i, (kind, group) in enumerate(zip(self.values.kinds, self.values.groups)):
            block = self._block(anchor, group).detach()
            if kind is DenseFactor:
                current = getattr(self.values, f"scale_tril_{i}")
                setattr(self.values, f"scale_tril_{i}", block @ current)
            elif kind is DiagonalFactor:
                current = getattr(self.values, f"scale_diag_{i}")
                spread = (block * current[..., None, :]).square().sum(-1).sqrt()
                setattr(self.values, f"scale_diag_{i}", spread)

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Put the mean at m_b = L_bb times that of w_b."""
        anchor = _require(anchor)
        edges = [0, *itertools.accumulate(self.values.sizes)]
        parts = [
            (self._block(anchor, group) @ loc[..., edges[group[0]] : edges[group[-1] + 1], None])[..., 0]
            for group in self.values.groups
        ]
        self.values.start_mean(None, torch.cat(parts, -1))

    def _block(self, anchor: Tensor, group: Sequence[int]) -> Tensor:
        edges = [0, *itertools.accumulate(self.values.sizes)]
        rows = slice(edges[group[0]], edges[group[-1] + 1])
        return anchor[..., rows, rows]

    def forward(self, anchor: Optional[Tensor] = None) -> Product:
        anchor = _require(anchor)
        q = self.values()
        factors: list[Factor] = []
        for factor, group in zip(q.factors, q.groups):
            block = self._block(anchor, group)
            num = block.shape[-1]
            if isinstance(factor, IdentityFactor):
                factors.append(IdentityFactor(solve_lower(block, factor.loc[..., None])[..., 0]))
                continue
            root = factor.scaled(torch.eye(num, dtype=block.dtype, device=block.device))
            batch = broadcast_shapes(block.shape[:-2], root.shape[:-2])
            both = torch.cat([root, factor.loc[..., None]], -1).expand(*batch, num, num + 1)
            whitened = solve_lower(block, both)  # one solve for both
            factors.append(DenseFactor(whitened[..., -1], whitened[..., :-1].tril()))
        return Product(q.sizes, factors, q.groups)


def _require(anchor: Optional[Tensor]) -> Tensor:
    if anchor is None:
        raise ValueError("a posterior over values needs a basis whose coefficients stand for values (an anchor)")
    return anchor
