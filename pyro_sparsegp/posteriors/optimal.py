"""The Gaussian over coefficients that is optimal for given Gaussian sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..linalg import cholesky, solve_lower
from .product import Factor, Product

__all__ = ["PrecisionFactor", "optimal"]


class PrecisionFactor(Factor):
    """S = (LLᵀ)⁻¹.

    :param tril: L, ``(..., M, M)``.
    """

    def __init__(self, loc: Tensor, tril: Tensor) -> None:
        super().__init__(loc)
        self.tril = tril

    def scaled(self, phi: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.tril.mT, phi, upper=True, left=False)

    def scale(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.tril.mT, v[..., None], upper=True)[..., 0]

    def unscale(self, v: Tensor) -> Tensor:
        return (self.tril.mT @ v[..., None])[..., 0]

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        eye = torch.eye(self.loc.shape[-1], dtype=self.tril.dtype, device=self.tril.device)
        log_det = -2 * self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return solve_lower(self.tril, eye).square().sum((-2, -1)), log_det


def optimal(
    features: Sequence[Tensor],
    precision: Tensor,
    linear: Tensor,
    groups: Optional[Sequence[Sequence[int]]] = None,
    name: str = "f",
) -> Product:
    """q(w) ∝ N(w; 0, I) Πₙ N(zₙ | μₙ + φₙᵀw, 1/λₙ), or its best approximation by independent groups of blocks.

    P = I + ΦᵀΛΦ, m = P⁻¹Φᵀλ(z − μ), S = P⁻¹; of independent groups b, S_b = (P_bb)⁻¹ while m stays (Shi, Titsias and
    Mnih, 2020, eq. 28 and 29).

    :param features: Φ at the sites' inputs, a block ``(..., N, M_b)`` each.
    :param precision: λ, ``(..., N)``.
    :param linear: λ(z − μ), ``(..., N)``.
    :param groups: blocks that share a covariance; ``None`` is all of them.
    :param name: the site, for errors.
    """
    sizes = [block.shape[-1] for block in features]
    phi = features[0] if len(features) == 1 else torch.cat(list(features), -1)
    eye = torch.eye(phi.shape[-1], dtype=phi.dtype, device=phi.device)
    whole = eye + phi.mT @ (phi * precision[..., None])
    what = f"I + ΦᵀΛΦ of site {name!r}"
    factor = cholesky(whole, 0.0, what)
    loc = torch.cholesky_solve((phi.mT @ linear[..., None]), factor)[..., 0]
    if groups is None or len(groups) == 1:
        return Product(sizes, [PrecisionFactor(loc, factor)], [tuple(range(len(sizes)))])
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    factors: list[Factor] = []
    for group in groups:
        start, stop = edges[group[0]], edges[group[-1] + 1]
        # The leading block of a Cholesky factor is the factor of the leading block.
        block = factor[..., :stop, :stop] if start == 0 else cholesky(whole[..., start:stop, start:stop], 0.0, what)
        factors.append(PrecisionFactor(loc[..., start:stop], block))
    return Product(sizes, factors, groups)
