"""The best block plus low-rank precision for a P̂ that is not of that form, by sweeps of factor analysis.

The P = blockdiag(D) + BBᵀ of least KL[N(0, P⁻¹) ‖ N(0, P̂⁻¹)] is the maximum likelihood estimate of factor analysis for
the "covariance" P̂. Sweeps of its expectation maximisation go there (Rubin and Thayer, 1982), with expanded parameters
(Liu, Rubin and Wu, 1998); they need P̂ times few vectors, and its blocks on the diagonal.

D is a stack, ``(..., C, M, M)``, and B flat, ``(..., C·M, R)``: :class:`~.base.Stack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, over_upper, plus_one, rounding, solve_lower
from ..numerics.processes import joined
from .base import Stack, each_times, eye_like, solved

_SHARE = 10  # of a matrix' rounding unit, that sums of its numbers may have lost


def above_one(matrix: Tensor, made_of: Tensor) -> tuple[Tensor, Tensor]:
    """A symmetric A, lifted to a positive definite one where rounding left none, and the part of A − I with positive
    eigenvalues.

    :param made_of: a matrix that A is what is left of, so that rounding is of its size.
    """
    matrix = 0.5 * (matrix + matrix.mT)  # eigh and a factorisation read different triangles
    values, vectors = torch.linalg.eigh(matrix)
    size = made_of.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    least = (_SHARE * torch.finfo(matrix.dtype).eps * size).clamp(min=0, max=1)
    # A + Σ (least − λ)₊vvᵀ, and the same to 1
    positive, above = (
        matrix + each_times(vectors * (lowest - values).clamp(min=0)[..., None, :], vectors.mT)
        for lowest in (least, torch.ones_like(least))
    )
    above.diagonal(dim1=-2, dim2=-1).sub_(1)
    return positive, above


def times(blocks: Tensor, low_rank: Tensor, v: Tensor) -> Tensor:
    """(blockdiag(D) + BBᵀ)v for flat columns v."""
    # Dv of each block, and B(Bᵀv)
    own = each_times(blocks, v.view(*v.shape[:-2], *blocks.shape[-3:-1], v.shape[-1])).flatten(-3, -2)
    return own + low_rank @ (low_rank.mT @ v)


def _root(matrix: Tensor, what: str) -> Tensor:
    """A Cholesky factor, with so much more on the diagonal that rounding leaves the matrix positive."""
    more = matrix.clone()
    more.diagonal(dim1=-2, dim2=-1).mul_(1 + rounding(matrix))
    return cholesky(more, 0.0, what)


def _lifted(matrix: Tensor, least: Tensor) -> Tensor:
    """A matrix, with this added to its diagonal, in place, where less than that is left to its being singular.

    Added at each step, of rate ρ, it would be in the next P̂ too, and add up to 1/ρ of it: by float32's rounding of a
    precise level each effect's own would be as precise.
    """
    lower = matrix.clone()
    lower.diagonal(dim1=-2, dim2=-1).sub_(least)
    short = torch.linalg.cholesky_ex(lower).info != 0
    matrix.diagonal(dim1=-2, dim2=-1).add_(least * short[..., None])
    return matrix


class Formed:
    """P̂ as one matrix, which is quicker where it is small.

    :param matrix: P̂, ``(..., C·M, C·M)``.
    """

    def __init__(self, stack: Stack, matrix: Tensor) -> None:
        self.stack, self.matrix = stack, matrix

    def times(self, v: Tensor) -> Tensor:
        """P̂v for flat columns v."""
        return self.matrix @ v

    def blocks(self) -> Tensor:
        """The blocks of P̂ on its diagonal."""
        return self.stack.diagonal(self.matrix)

    def solve(self, right: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """P̂⁻¹ of a wide vector, and a flag that is not 0 if P̂ has no Cholesky factor."""
        return solved(self.matrix, right)


class Products:
    """P̂ = (1 − ρ)P + ρ(I + ΦᵀΛΦ) by its products with few columns: it is never formed.

    :param blocks: D of P.
    :param low_rank: B of P.
    :param rate: ρ.
    :param rows: of each batch of rows Φ, flat, and ρλ as a column.
    """

    def __init__(
        self, stack: Stack, blocks: Tensor, low_rank: Tensor, rate: Tensor, rows: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.stack, self._blocks, self._low_rank, self._rate, self._rows = stack, blocks, low_rank, rate, rows

    def times(self, v: Tensor) -> Tensor:
        """P̂v for flat columns v."""
        # ρΦᵀΛΦv
        data = sum((phi.mT @ (curvature * (phi @ v)) for phi, curvature in self._rows), torch.zeros_like(v))
        return (1 - self._rate) * times(self._blocks, self._low_rank, v) + self._rate * v + joined(data)[0]

    def blocks(self) -> Tensor:
        """The blocks of P̂ on its diagonal."""
        data, low, rate = torch.zeros_like(self._blocks), self.stack.cut(self._low_rank), self._rate[..., None]
        for phi, curvature in self._rows:
            each = self.stack.cut(phi.mT)
            # ρΦ_cᵀΛΦ_c of each block
            data = data + each @ (each.mT * curvature[..., None, :, :])
        return (1 - rate) * (self._blocks + low @ low.mT) + rate * eye_like(data) + joined(data)[0]

    def solve(self, right: Tensor, blocks: Tensor, low_rank: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """P̂⁻¹ of a wide vector by conjugate gradients with P⁻¹ for P ≈ P̂, without a look at how far it has come; and 0.

        :param blocks: D of a P that is near P̂, positive definite.
        :param low_rank: B of it.
        """
        # P⁻¹, near P̂⁻¹: few iterations are enough
        inverse = _Inverse(self.stack, blocks, low_rank)

        def dot(a: Tensor, b: Tensor) -> Tensor:
            return (a * b).sum((-2, -1), keepdim=True)

        def over(a: Tensor, b: Tensor) -> Tensor:
            return torch.where(b > 0, a / b, 0.0)

        # Hestenes and Stiefel (1952), with P⁻¹ before each residual
        right = right[..., None]
        x, z = torch.zeros_like(right), inverse(right)
        direction, rz = z, dot(right, z)
        for _ in range(iterations):
            moved = self.times(direction)
            a = over(rz, dot(direction, moved))
            x, right = x + a * direction, right - a * moved
            z = inverse(right)
            new = dot(right, z)
            direction, rz = z + over(new, rz) * direction, new
        return x[..., 0], torch.zeros_like(rz[..., 0, 0])


class _Inverse:
    """(blockdiag(D) + BBᵀ)⁻¹ = D⁻¹ − D⁻¹B(I + BᵀD⁻¹B)⁻¹BᵀD⁻¹."""

    def __init__(self, stack: Stack, blocks: Tensor, low_rank: Tensor) -> None:
        self._stack, self._root = stack, _root(blocks, "a block of a low-rank precision")
        self.scaled = self._over_blocks(low_rank)  # D⁻¹B
        # I + BᵀD⁻¹B
        self.inner = _root(plus_one(low_rank.mT @ self.scaled), "I + BᵀD⁻¹B")

    def _over_blocks(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(self._stack.cut(v), self._root).flatten(-3, -2)

    def __call__(self, v: Tensor) -> Tensor:
        # D⁻¹v − D⁻¹B(I + BᵀD⁻¹B)⁻¹(D⁻¹B)ᵀv
        return self._over_blocks(v) - self.scaled @ torch.cholesky_solve(self.scaled.mT @ v, self.inner)


def sweep(
    target: Union[Formed, Products], aims: Optional[Tensor], blocks: Tensor, low_rank: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One sweep of factor analysis: β = (I + BᵀD⁻¹B)⁻¹BᵀD⁻¹, E = (I + BᵀD⁻¹B)⁻¹ + βP̂βᵀ, B ← P̂βᵀE⁻¹ and
    D ← blockdiag(P̂ − BβP̂), which rounding may leave indefinite; then B ← BE^½, the expansion.

    :param target: P̂.
    :param aims: the blocks of P̂ on its diagonal; ``None`` leaves D.
    :returns: D; D to be factorised, lifted where B has nearly all of a block of P̂ and what is left is rounding; and B.
    """
    inverse = _Inverse(target.stack, blocks, low_rank)
    root = solve_lower(inverse.inner, eye_like(inverse.inner))
    # β and E of the factors given the rest (Rubin and Thayer, 1982)
    within = root.mT @ root  # (I + BᵀD⁻¹B)⁻¹
    beta = inverse.scaled @ within  # βᵀ
    seen = target.times(beta)
    # E = (I + BᵀD⁻¹B)⁻¹ + βP̂βᵀ
    moment = within + beta.mT @ seen
    moment = _lifted(moment, rounding(moment) * moment.diagonal(dim1=-2, dim2=-1))
    root = cholesky(moment, 0.0, "the factors' second moment")  # which reads the lower triangle only
    # B ← P̂βᵀE⁻¹, by which D = I is not expanded
    if aims is None:
        return blocks, blocks, torch.cholesky_solve(seen.mT, root).mT
    new = over_upper(seen, root)  # BE^½ = P̂βᵀE^-½, so that BβP̂ is its square
    own = target.stack.cut(new)
    left = aims - each_times(own, own.mT)
    return left, _lifted(left.clone(), _SHARE * torch.finfo(left.dtype).eps * aims.diagonal(dim1=-2, dim2=-1)), new
