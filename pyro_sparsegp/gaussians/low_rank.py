"""Block plus low-rank precisions by natural steps, at a cost linear in the number of blocks.

P̂ of a damped natural step is not of the form P = blockdiag(D) + BBᵀ. The P of that form of least KL[N(0, P⁻¹) ‖
N(0, P̂⁻¹)] is the maximum likelihood estimate of factor analysis for the "covariance" P̂. Sweeps of its expectation
maximisation go there (Rubin and Thayer, 1982), with expanded parameters (Liu, Rubin and Wu, 1998); they need P̂ times
few vectors, and its blocks on the diagonal. Of many coefficients P̂ is not formed, and the mean is found by conjugate
gradients. Compare SLANG (Mishkin et al., 2018), of a diagonal plus low rank.

Under another L sites keep their form: with T = blockdiag(L₀⁻¹L) D − I + BBᵀ becomes Tᵀ(D − I)T + (TᵀB)(TᵀB)ᵀ. Of D − I
only the positive part is turned, so that what is left stays positive definite.

D is a stack, ``(..., C, M, M)``, and B flat, ``(..., C·M, R)``: :class:`~.base.Stack`.
"""

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..numerics.decisions import decided
from ..numerics.linalg import (
    cholesky,
    eye_like,
    flags_kept,
    over_upper,
    plus_one,
    root_of_inverse,
    rounding,
    side_by_side,
    solve_lower,
)
from ..numerics.processes import joined, largest
from .anchors import Anchor, softened
from .base import Stack, each_times, solved
from .factors import DenseFactor, LowRankFactor
from .free import leading_directions, small_columns
from .natural import Iterate, NaturalGaussian, Parts, Stepped
from .product import Product
from .steps import Natural, Pass, Rate

_SHARE = 10  # of a matrix' rounding unit, that sums of its numbers may have lost


def above_one(matrix: Tensor, made_of: Tensor) -> tuple[Tensor, Tensor]:
    """A symmetric A, lifted to a positive definite one where rounding left none of what it is ``made_of``, and the part
    of A − I with positive eigenvalues.
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


def _root(matrix: Tensor, what: str) -> Tensor:
    """A Cholesky factor, with so much more on the diagonal that rounding leaves the matrix positive."""
    more = matrix.clone()
    more.diagonal(dim1=-2, dim2=-1).mul_(1 + rounding(matrix))
    return cholesky(more, 0.0, what)


def _lifted(matrix: Tensor, least: Tensor) -> Tensor:
    """A matrix, with this added to its diagonal, in place, where less than that is left to its being singular."""
    # Added at each step, of rate ρ, it would be in the next P̂ too, and add up to 1/ρ of it: by float32's rounding of a
    # precise level each effect's own would be as precise.
    lower = matrix.clone()
    lower.diagonal(dim1=-2, dim2=-1).sub_(least)
    short = torch.linalg.cholesky_ex(lower).info != 0
    matrix.diagonal(dim1=-2, dim2=-1).add_(least * short[..., None])
    return matrix


class Formed:
    """P̂ as one matrix, ``(..., C·M, C·M)``, which is quicker where it is small."""

    def __init__(self, stack: Stack, matrix: Tensor) -> None:
        self.stack, self.matrix = stack, matrix

    def times(self, v: Tensor) -> Tensor:
        """P̂v for flat columns v."""
        return self.matrix @ v

    def blocks(self) -> Tensor:
        """The blocks of P̂ on its diagonal."""
        return self.stack.diagonal(self.matrix)

    def solve(self, right: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """P̂⁻¹ of a wide vector, and a flag that is not 0 if P̂ has no Cholesky factor."""
        return solved(self.matrix, right)


class Products:
    """P̂ = (1 − ρ)P + ρ(I + ΦᵀΛΦ) by its products with few columns: it is never formed.

    :param blocks: D of P; ``low_rank``: B of P; ``rate``: ρ.
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
        # Pv, of each block Dv, and B(Bᵀv)
        own = each_times(self._blocks, self.stack.cut(v)).flatten(-3, -2) + self._low_rank @ (self._low_rank.mT @ v)
        return (1 - self._rate) * own + self._rate * v + joined(data)[0]

    def blocks(self) -> Tensor:
        """The blocks of P̂ on its diagonal."""
        data, low, rate = torch.zeros_like(self._blocks), self.stack.cut(self._low_rank), self._rate[..., None]
        for phi, curvature in self._rows:
            each = self.stack.cut(phi.mT)
            # ρΦ_cᵀΛΦ_c of each block
            data = data + each @ (each.mT * curvature[..., None, :, :])
        return (1 - rate) * (self._blocks + low @ low.mT) + rate * eye_like(data) + joined(data)[0]

    def solve(self, right: Tensor, blocks: Tensor, low_rank: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """P̂⁻¹ of a wide vector by conjugate gradients, without a look at how far it has come; and 0."""
        # with P⁻¹ of D and B, near P̂⁻¹: few iterations are enough
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
    """One sweep of factor analysis: D; D to be factorised, lifted where B has nearly all of a block of P̂ and what is
    left is rounding; and B. ``aims`` are the blocks of P̂ on its diagonal; ``None`` leaves D.
    """
    # β = (I + BᵀD⁻¹B)⁻¹BᵀD⁻¹, E = (I + BᵀD⁻¹B)⁻¹ + βP̂βᵀ, B ← P̂βᵀE⁻¹ and D ← blockdiag(P̂ − BβP̂), which rounding may
    # leave indefinite; then B ← BE^½, the expansion.
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


_FEW = 512  # coefficients up to which P̂ is formed
_SMALL, _SLOW = 256, 0.25  # and up to which S is, and one sweep a step does for two, at rates up to this


_KEPT = ("loc", "low_rank", "block", "gain", "seat")


class NaturalLowRank(NaturalGaussian):
    """q(w) = N(m, (blockdiag(D) + BBᵀ)⁻¹) by natural steps, each projected on that form.

    (The form: Adam, Durrande and John, 2018; the projection is factor analysis, Rubin and Thayer, 1982.)

    To see whether negative curvatures leave enough P̂ is formed. So it is where q is drawn from: it has the curvature
    E ∇²f = E ∇f(w)(w − m)ᵀP then (Stein's identity), an M x M matrix.

    Under objectives that take no natural steps m, B and a tilt A of each block, D⁻¹ = RAAᵀRᵀ, are parameters.

    :param rank: the number of columns of B; ``None`` is the size of the largest block, 0 makes independent blocks,
        whose precisions are P̂'s diagonal blocks; the mean is that of the whole P̂.
    :param base: whether D is free; else it is I.
    """

    sweeps: Optional[int] = None  # of expectation maximisation a step, where not as many as it takes

    def __init__(
        self,
        sizes: Sequence[int],
        batch_shape: Sequence[int],
        like: Tensor,
        rank: Optional[int] = None,
        base: bool = True,
        rate: Optional[Rate] = None,
    ) -> None:
        Natural.__init__(self, sizes, batch_shape, like, rate)
        self.base, self._stack = base, (stack := Stack(self.sizes))
        self.layout, self.slices = [(DenseFactor, tuple(range(len(self.sizes))))], [slice(None)]
        self._is_known = sum(self.sizes) <= _SMALL and not self.batch_shape
        square = like.new_zeros(*batch_shape, len(self.sizes), stack.size, stack.size)
        self.low_rank = torch.nn.Parameter(stack.rows(small_columns(self.sizes, batch_shape, rank, like)))
        self.rank = self.low_rank.shape[-1]
        if base:
            self.tilt = torch.nn.Parameter(square.clone())
        # D, the positive part of D − I, and L + ηsI and Z that they belong to
        more = {"anchor": like.new_zeros(0, 0), "inputs": like.new_zeros(0)}
        for name, value in ({"block": plus_one(square), "gain": square} | more).items():
            self.register_buffer(name, value)

    def hold_by_draws(self) -> None:
        """Nothing: where draws alone show curvatures these sites are held as others."""

    def anchor_of(self, features: Any, mean: object = None, rows: Optional[Tensor] = None) -> Any:
        anchor = self._anchored(features.anchors)  # of blocks on the diagonal
        if (before := self._before(features.places, features.moves)) is not None:
            values = self._stacked(features.anchors) if self.softness else anchor.kept
            anchor.move(features.places, self._stacked(features.anchors_at(before)), values)
        return anchor

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        # Older states have the parts block by block.
        joins = {"loc": side_by_side, "low_rank": self._stack.rows}
        for name in _KEPT:
            keys = [f"{prefix}{name}_{b}" for b in range(len(self.sizes))]
            parts = [state_dict.pop(key) for key in keys if key in state_dict]
            if parts:
                state_dict[prefix + name] = joins.get(name, self._squares)(parts)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _squares(self, parts: Sequence[Tensor]) -> Tensor:
        # Blocks about w had no L + ηsI where all of their size are.
        eyes = [torch.eye(n).to(parts[0]) for n in self.sizes]
        some = any(part.numel() for part in parts)
        return self._stack.squares([p if p.numel() else e for p, e in zip(parts, eyes)]) if some else parts[0]

    def start(self, anchor: object, features: Sequence[Tensor]) -> None:
        """Start P at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading directions: the level's first."""
        stack = self._stack
        small = torch.cat(stack.blocks(self.low_rank.detach()), -2)
        found, low_rank = leading_directions(features, small)
        pairs = zip(features, found.split(self.sizes, -2))
        # D = I + λΦ_cᵀΦ_c − U_cU_cᵀ
        block = stack.squares([plus_one(phi.mT @ phi - u @ u.mT) for phi, u in pairs])
        parts = stack.rows(low_rank.split(self.sizes, -2)), *above_one(block, block)
        self._put(self._kept("loc"), parts, self._anchored(anchor))

    def _anchored(self, anchor: Any) -> Anchor:
        """L + ηsI of each block as a stack, I where it is about w."""
        if isinstance(anchor, Anchor):
            return anchor
        if all(part is None for part in anchor or ()):
            return Anchor(self.anchor.new_zeros(0, 0))
        return Anchor(self._stacked([p if p is None else softened(p, self.softness, p.shape[-1:]) for p in anchor]))

    def _stacked(self, parts: Sequence[Optional[Tensor]]) -> Tensor:
        """Of blocks as a stack, with I for those about w."""
        pairs = zip(parts, self.sizes)
        return self._stack.squares([torch.eye(n).to(self.anchor) if part is None else part for part, n in pairs])

    def _iterate_at(self, anchor: Anchor) -> Iterate:
        loc, low_rank, stack = self._kept("loc"), self._kept("low_rank"), self._stack
        if not self._turns(anchor):
            return Iterate(loc, torch.zeros_like(loc), (low_rank, self.block, self.gain), anchor)
        moved, stays, columns = anchor.now - self.anchor, self._stays, stack.columns(loc)
        # T = I + L₀⁻¹(L − L₀)
        turn = plus_one(solve_lower(self.anchor, moved))
        # T⁻¹m = m − A⁻¹(A − L₀)m
        near = columns - anchor.back(each_times(moved, columns))
        # (TᵀK − KT⁻¹)m
        rest = each_times(turn.mT, each_times(stays, columns)) - each_times(stays, near)
        near, rest = (stack.narrow(part.flatten(-3)) for part in (near, rest))
        # K + Tᵀ(D − K)T
        gain = each_times(turn.mT, each_times(self.gain, turn))
        return Iterate(near, rest, (each_times(turn.mT, low_rank), stays + gain, gain), anchor)

    def _precision(self, parts: Parts) -> Tensor:
        return self._stack.dense(parts[1], parts[0].flatten(-3, -2))

    def _gram(self, parts: Parts) -> Tensor:
        whole = self._precision(parts)
        whole.diagonal(dim1=-2, dim2=-1).sub_(1)
        return whole

    @property
    def _stays(self) -> Tensor:
        return self.block - self.gain

    def _given(self, iterate: Iterate) -> Product:
        low_rank, block, _ = iterate.parts
        # with RRᵀ = D⁻¹, P = R⁻ᵀ(I + RᵀBBᵀR)R⁻¹
        tril = root_of_inverse(block, "a block of a low-rank precision")
        # RA for D⁻¹ = RAAᵀRᵀ; a natural step starts without A
        if self.has_tilt:
            tril = each_times(tril, self.tilt_matrix)
        factor = LowRankFactor(self._stack, iterate.near, each_times(tril.mT, low_rank), tril)
        factor.loc = iterate.near + factor.times(iterate.rest)
        return Product(self.sizes, [factor], [range(len(self.sizes))])

    def _untilted(self, q: Product, parts: Parts) -> Parts:
        root: Any = q.factors[0]
        block = torch.cholesky_inverse(cholesky(root.tril @ root.tril.mT, 0.0, "D⁻¹"))
        return parts[0], *above_one(block, block)

    def _nearest(self, precision: Tensor) -> Parts:
        # Without B the divergence is least where P has the blocks of P̂ on its diagonal; with B, absorb refuses.
        block = self._stack.diagonal(self._stack.spread(precision))
        return self._kept("low_rank"), *above_one(block, block)

    def _put_parts(self, parts: Parts) -> None:
        low_rank, block, gain = parts
        self._set("low_rank", low_rank)
        if self.base:  # a start makes others, too: golden regression-CoupledPrecisionIdentity
            self._buffers["block"], self._buffers["gain"] = block.to(self.block), gain.to(self.block)

    def _stepped(self, taken: Pass, parts: Parts, right: Tensor, rate: Tensor, weight: Tensor) -> Stepped:
        stack, num, cut = self._stack, sum(self.sizes), None
        target: Union[Formed, Products]
        with flags_kept() as flags:  # a step can't be taken again: what has failed is looked at here, and left out
            # whether curvatures may be negative, in any of the processes: all of them then form P̂
            signed = bool(taken.draws) or any(part.is_signed for part in taken.curvatures())
            if num > _FEW and not largest(rate.new_tensor(float(signed))) > 0:
                each = (rate / weight)[..., None, None]
                rows = [(stack.wide(part.phi), each * (2 * part.h)[..., None]) for part in taken.curvatures()]
                target = Products(stack, parts[1], parts[0].flatten(-3, -2), rate[..., None, None], rows)
            else:
                aim, cut = self._aim(taken, self._gram(parts), rate, weight)
                aim.diagonal(dim1=-2, dim2=-1).add_(1)
                target = Formed(stack, stack.spread(aim))
            # P̂'s blocks are what D + BBᵀ's shall be (Lawley, 1940)
            aims = target.blocks() if self.base else None
            near, low_rank = parts[1], parts[0].flatten(-3, -2)
            few = not self.rank or (num <= _SMALL and decided(self.last_rate <= _SLOW))  # P̂ is near P
            for _ in range(self.sweeps or (1 if few else 2)):
                block, near, low_rank = sweep(target, aims, near, low_rank)
            shift, failed = target.solve(stack.wide(right), near, low_rank, 10 if self.rank else 20)
        gain = parts[2]
        if aims is not None:
            # torch.linalg.eigh raises for what is not finite; the step is left out by its mean.
            block, gain = above_one(torch.where(block.isfinite().all(), block, parts[1]), aims)
        failed = failed + sum(flag.count_nonzero() for flag in flags)
        return (stack.cut(low_rank), block, gain), stack.narrow(shift), cut, failed
