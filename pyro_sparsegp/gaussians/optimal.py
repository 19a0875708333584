"""The Gaussian over coefficients that is optimal for given Gaussian sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, gram, plus_one, side_by_side
from .factors import Factor, by_precision
from .product import Product, slices


def weighted_gram(phi: Tensor, weights: Tensor) -> Tensor:
    """ΦᵀΛΦ, ``(..., M, M)``.

    :param phi: Φ, ``(..., N, M)``.
    :param weights: the diagonal of Λ, ``(..., N)``.
    """
    return gram(phi, phi * weights[..., None])


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
    phi = side_by_side(features)
    # G = ΦᵀΛΦ, r = Φᵀλ(z − μ)
    gram, pull = weighted_gram(phi, precision), (phi.mT @ linear[..., None])[..., 0]
    return from_natural(gram, pull, [block.shape[-1] for block in features], groups, name)


def from_natural(
    gram: Tensor, pull: Tensor, sizes: Sequence[int], groups: Optional[Sequence[Sequence[int]]] = None, name: str = "f"
) -> Product:
    """q(w) with precision P = I + G and Pm = r, or its best approximation by independent groups of blocks.

    :param gram: G = ΦᵀΛΦ, ``(..., M, M)``.
    :param pull: r = Φᵀλ(z − μ), ``(..., M)``.
    :param sizes: the sizes of the blocks of w.
    :param groups: as in :func:`optimal`.
    :param name: the site, for errors.
    """
    whole = plus_one(gram)
    what = f"I + ΦᵀΛΦ of site {name!r}"
    factor = cholesky(whole, 0.0, what)
    # m = P⁻¹r (Titsias, 2009, eq. 10; Shi et al., 2020, eq. 29)
    loc = torch.cholesky_solve(pull[..., None], factor)[..., 0]
    groups = [tuple(range(len(sizes)))] if groups is None else groups

    def made(own: slice) -> Factor:
        # The leading block of a Cholesky factor is the factor of the leading block.
        block = factor[..., own, own] if own.start == 0 else cholesky(whole[..., own, own], 0.0, what)
        return by_precision(loc[..., own], block)

    return Product(sizes, list(map(made, slices(sizes, groups))), groups)
