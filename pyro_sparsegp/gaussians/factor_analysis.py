"""The best block plus low-rank precision for a P̂ that is not of that form, by sweeps of factor analysis.

The P = blockdiag(D) + BBᵀ of least KL[N(0, P⁻¹) ‖ N(0, P̂⁻¹)] is the maximum likelihood estimate of factor analysis for
the "covariance" P̂. Sweeps of its expectation maximisation go there (Rubin and Thayer, 1982), with expanded parameters
(Liu, Rubin and Wu, 1998); they need P̂ times few vectors, and its blocks on the diagonal. From a dense P̂ alone, without
a start: :mod:`.nearest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, lift_to, over_upper, rounding, solve_lower
from ..numerics.processes import joined
from .groups import Groups, each_times, plus_each_times

__all__ = [
    "Columns",
    "Formed",
    "Products",
    "Target",
    "above_one",
    "eye_like",
    "lifted",
    "sweep",
    "times",
    "times_blocks",
]

_SHARE = 10  # of a matrix' rounding unit, that sums of its numbers may have lost
Columns = list[Tensor]  # of vectors, and other matrices, stacked by the blocks' sizes


def eye_like(like: Tensor) -> Tensor:
    """I of a matrix' size."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def above_one(matrix: Tensor, made_of: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """A symmetric A, lifted to a positive definite one where rounding left none, and the part of A − I with positive
    eigenvalues.

    :param made_of: a matrix that A is what is left of, so that rounding is of its size.
    """
    matrix = 0.5 * (matrix + matrix.mT)  # eigh and a factorisation read different triangles
    values, vectors = torch.linalg.eigh(matrix)
    size = values[..., -1:] if made_of is None else made_of.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    least = (_SHARE * torch.finfo(matrix.dtype).eps * size).clamp(min=0, max=1)
    lacks = ((lowest - values).clamp(min=0)[..., None, :] for lowest in (least, 1.0))
    positive, above = (plus_each_times(matrix, vectors * lack, vectors.mT) for lack in lacks)
    above.diagonal(dim1=-2, dim2=-1).sub_(1)
    return positive, above


def times_blocks(groups: Groups, matrices: Columns, v: Tensor) -> Tensor:
    """blockdiag of stacked matrices, times columns."""
    return groups.over([each_times(matrix, part) for matrix, part in zip(matrices, groups.cut(v))])


def times(groups: Groups, blocks: Columns, low_rank: Tensor, v: Tensor) -> Tensor:
    """(blockdiag(D) + BBᵀ)v for columns v."""
    return times_blocks(groups, blocks, v) + low_rank @ (low_rank.mT @ v)


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


class Target(Protocol):
    """P̂.

    :ivar cut: whether negative curvatures were cut; ``None`` if there were none.
    """

    cut: Optional[Tensor]

    def times(self, v: Tensor) -> Tensor:
        """P̂v for columns v."""

    def blocks(self) -> Columns:
        """The blocks of P̂ on its diagonal."""

    def solve(
        self, right: Tensor, aims: Optional[Columns], blocks: Columns, low_rank: Tensor, iterations: int
    ) -> Tensor:
        """P̂⁻¹ of one column, where P = blockdiag(D) + BBᵀ of a sweep is near P̂."""


class Products:
    """P̂ by its products with few columns: it is never formed.

    :param blocks: D of P.
    :param low_rank: B of P.
    :param kept: 1 − ρ.
    :param rows: of each batch of rows Φ, and ρ·2h as a column.
    """

    cut: Optional[Tensor] = None

    def __init__(
        self, groups: Groups, blocks: Columns, low_rank: Tensor, kept: Tensor, rows: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.groups, self._blocks, self._low_rank, self._kept, self._rows = groups, blocks, low_rank, kept, rows

    def times(self, v: Tensor) -> Tensor:
        """P̂v for columns v."""
        found = self._kept * times(self.groups, self._blocks, self._low_rank, v) + (1 - self._kept) * v
        data = torch.zeros_like(found)
        for phi, curvature in self._rows:
            data = data + phi.mT @ (curvature * (phi @ v))
        return found + joined(data)[0]

    def blocks(self) -> Columns:
        """The blocks of P̂ on its diagonal."""
        data = [torch.zeros_like(d) for d in self._blocks]
        for phi, curvature in self._rows:
            each = [part.mT for part in self.groups.cut(phi.mT)]
            data = [x + p.mT @ (p * curvature[..., None, :, :]) for x, p in zip(data, each)]
        kept, low = self._kept[..., None], self.groups.cut(self._low_rank)
        return [
            kept * (d + b @ b.mT) + (1 - kept) * eye_like(d) + x for d, b, x in zip(self._blocks, low, joined(*data))
        ]

    def solve(
        self, right: Tensor, aims: Optional[Columns], blocks: Columns, low_rank: Tensor, iterations: int
    ) -> Tensor:
        """P̂⁻¹ of one column by conjugate gradients with P⁻¹ for P ≈ P̂, without a look at how far it has come."""
        inverse = Inverse(self.groups, blocks if aims is None else lifted(blocks, aims), low_rank)

        def dot(a: Tensor, b: Tensor) -> Tensor:
            return (a * b).sum((-2, -1), keepdim=True)

        def over(a: Tensor, b: Tensor) -> Tensor:
            return torch.where(b > 0, a / b, torch.zeros_like(a))

        x = torch.zeros_like(right)
        z = inverse(right)
        direction, rz = z, dot(right, z)
        for _ in range(iterations):
            moved = self.times(direction)
            a = over(rz, dot(direction, moved))
            x = x + a * direction
            right = right - a * moved
            z = inverse(right)
            new = dot(right, z)
            direction, rz = z + over(new, rz) * direction, new
        return x


class Formed:
    """P̂ as one matrix, which is quicker where it is small; as :class:`Products`.

    :param data: ρΦᵀ2HΦ.
    """

    cut: Optional[Tensor] = None

    def __init__(self, groups: Groups, blocks: Columns, low_rank: Tensor, kept: Tensor, data: Tensor) -> None:
        self.groups = groups
        (data,) = joined(data)
        scaled = kept * low_rank
        self.matrix = torch.addmm(data, scaled, low_rank.mT) if data.dim() == 2 else data + scaled @ low_rank.mT
        self._own = groups.diagonal(self.matrix)
        for own, d in zip(self._own, blocks):
            own.add_(kept[..., None] * d)
        self.matrix.diagonal(dim1=-2, dim2=-1).add_((1 - kept)[..., 0])

    def add(self, curvature: Tensor) -> None:
        """Add a symmetric matrix, or its positive part where it would leave less than half of what there is."""
        (curvature,) = joined(curvature)
        rest = (0.5 * self.matrix + curvature).nan_to_num()
        self.cut = torch.linalg.cholesky_ex(rest).info != 0
        known = curvature.nan_to_num()
        self.matrix.add_(torch.where(self.cut[..., None, None], known + lift_to(known, 0.0), curvature))

    def times(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def blocks(self) -> Columns:
        return self._own

    def solve(self, right: Tensor, *_: Any) -> Tensor:
        return torch.cholesky_solve(right, _root(self.matrix, "a precision of coefficients"))


class Inverse:
    """(blockdiag(D) + BBᵀ)⁻¹ = D⁻¹ − D⁻¹B(I + BᵀD⁻¹B)⁻¹BᵀD⁻¹."""

    def __init__(self, groups: Groups, blocks: Columns, low_rank: Tensor) -> None:
        self.groups = groups
        self.roots = [_root(d, "a block of a low-rank precision") for d in blocks]
        self.scaled = self._over_blocks(low_rank)  # D⁻¹B
        gram = low_rank.mT @ self.scaled
        gram.diagonal(dim1=-2, dim2=-1).add_(1)
        self.inner = _root(gram, "I + BᵀD⁻¹B")

    def _over_blocks(self, v: Tensor) -> Tensor:
        return self.groups.over([torch.cholesky_solve(x, root) for x, root in zip(self.groups.cut(v), self.roots)])

    def __call__(self, v: Tensor) -> Tensor:
        return self._over_blocks(v) - self.scaled @ torch.cholesky_solve(self.scaled.mT @ v, self.inner)


def sweep(
    groups: Groups,
    target: Target,
    aims: Optional[Columns],
    blocks: Columns,
    low_rank: Tensor,
    known: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Columns, Tensor]:
    """One sweep of factor analysis: β = (I + BᵀD⁻¹B)⁻¹BᵀD⁻¹, E = (I + BᵀD⁻¹B)⁻¹ + βP̂βᵀ, B ← P̂βᵀE⁻¹ and
    D ← blockdiag(P̂ − BβP̂), which rounding may leave indefinite; then B ← BE^½, the expansion.

    :param aims: the blocks of P̂ on its diagonal; ``None`` leaves D.
    :param known: V = D⁻¹BA⁻ᵀ and A, the factor of I + BᵀD⁻¹B.
    """
    if known is None:
        inverse = Inverse(groups, blocks, low_rank)
        inner = inverse.inner
    else:
        v, inner = known
    root = solve_lower(inner, eye_like(inner))  # A⁻¹
    within = root.mT @ root
    beta = inverse.scaled @ within if known is None else v @ root  # βᵀ
    seen = target.times(beta)
    moment = within + beta.mT @ seen
    moment = _lifted(moment, rounding(moment) * moment.diagonal(dim1=-2, dim2=-1))
    root = cholesky(moment, 0.0, "the factors' second moment")  # which reads the lower triangle only
    if aims is None:
        return blocks, torch.cholesky_solve(seen.mT, root).mT
    new = over_upper(seen, root)  # BE^½ = P̂βᵀE^-½, so that BβP̂ is its square
    return [aim - each_times(b, b.mT) for aim, b in zip(aims, groups.cut(new))], new


def lifted(blocks: Columns, aims: Columns) -> Columns:
    """D of a sweep, to be factorised: where B has nearly all of a block of P̂, what is left is rounding, of any sign."""
    share = _SHARE * torch.finfo(blocks[0].dtype).eps
    return [_lifted(d.clone(), share * aim.diagonal(dim1=-2, dim2=-1)) for d, aim in zip(blocks, aims)]
