"""Cavities of expectation propagation, and how its prior moves with inducing values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics.linalg import over_lower, over_upper, solve_lower

_WIDEST = 4.0  # a cavity's variance, over the prior's


@dataclass
class Cavity:
    """Marginals of φᵀw under the cavities, (..., B), and what they are made of."""

    mean: Tensor
    variance: Tensor
    log_ratio: Tensor  # G(cavity) − G(q)
    valid: Tensor  # whether the variance is positive
    loc: Tensor  # the cavities' means of w, (..., B, M)
    cov: Tensor  # their covariances of w and φᵀw, (..., B, M)
    marginal: tuple[Tensor, Tensor]  # q's mean and variance


def cavity_of(phi: Tensor, rows: Tensor, precision: Tensor, linear: Tensor, loc: Tensor, factor: Tensor) -> Cavity:
    """Marginals of φᵀw under q(w) without one site each, exp(−½ν(φ̂ᵀw)² + bφ̂ᵀw) with rows φ̂.

    With S = P⁻¹ and e = 1 − νφ̂ᵀSφ̂, V⁻ = S + νSφ̂φ̂ᵀS/e, μ⁻ = V⁻(Pm − bφ̂) and G(cavity) − G(q) =
    ½(−log e + (ν(φ̂ᵀm)² − 2bφ̂ᵀm + b²φ̂ᵀSφ̂)/e).

    :param precision: ν, ``(..., N)``; under a power α, αν.
    :param linear: b, ``(..., N)``, likewise.
    :param loc: m, ``(..., M)``.
    :param factor: the lower Cholesky factor of P.
    """
    # Eq. 14 and 15 in w, where υ is φ̂ and Σ is S.
    solved = over_lower(over_upper(rows, factor), factor)  # Sφ̂
    spread, centre = (solved * rows).sum(-1), (rows @ loc[..., None])[..., 0]
    left = 1 - precision * spread
    valid = is_valid(left, spread, rows)
    left = torch.where(valid, left, 1.0)
    cov = over_lower(over_upper(phi, factor), factor)
    across, spread_here, centre_here = (solved * phi).sum(-1), (cov * phi).sum(-1), (phi @ loc[..., None])[..., 0]
    # μ⁻ = m + (ν(φ̂ᵀm − bφ̂ᵀSφ̂)/e − b)Sφ̂
    shift = precision * (centre - linear * spread) / left - linear
    # Eq. 29
    quadratic = precision * centre.square() - 2 * linear * centre + linear.square() * spread
    return Cavity(
        mean=centre_here + shift * across,
        variance=spread_here + precision * across.square() / left,
        log_ratio=0.5 * (quadratic / left - left.log()),
        valid=valid,
        loc=loc[..., None, :] + shift[..., None] * solved,
        cov=cov + (precision * across / left)[..., None] * solved,
        marginal=(centre_here, spread_here),
    )


def is_valid(left: Tensor, spread: Tensor, rows: Tensor) -> Tensor:
    """Whether cavities, of variance φ̂ᵀSφ̂/e, have one that is positive and not far above the prior's."""
    # It exceeds the prior's only by negative sites of other data; without bounds it goes to infinity.
    rounding = 1000 * torch.finfo(left.dtype).eps
    return (left > rounding) & (spread <= _WIDEST * rows.square().sum(-1) * left)


def turned(anchor: Tensor, loc: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """T = L⁻¹L₀ of an L that moves from L₀, with w = Tw₀ for the same u, where q(w₀) is held; and 0, with the gradient
    by T of E_q log p(u).
    """
    turn = solve_lower(anchor, anchor.detach())
    # E log N(u | 0, TTᵀ) is log|T| − ½(|Tm|² + tr TSTᵀ) + a constant: eq. 6's terms of the prior.
    inverse = solve_lower(factor, torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device))
    squares = (turn @ loc[..., None]).square().sum((-2, -1)) + (turn @ inverse.mT).square().sum((-2, -1))
    value = turn.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * squares
    return turn, value - value.detach()
