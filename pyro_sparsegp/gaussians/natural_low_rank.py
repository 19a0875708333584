"""Block plus low-rank precisions by natural steps, at a cost linear in the number of blocks.

The damped natural step has the precision and the mean

    P̂ = P + (ρ/c)(cI + Φᵀ2HΦ − cP),   P̂(m̂ − m) = −(ρ/c)(Φᵀg + cm),

and P̂ is not of the form P = blockdiag(D) + BBᵀ: sweeps of :mod:`.factor_analysis` go to the best P of that form. Of
many coefficients P̂ is not formed, and the mean is found by conjugate gradients. Compare SLANG (Mishkin et al., 2018),
of a diagonal plus low rank.

Under another L the sums of sites, D − I + BBᵀ and Pm, keep their meaning about u, as in :mod:`.natural`, and their
form: with T = blockdiag(L₀⁻¹L) they are Tᵀ(D − I)T + (TᵀB)(TᵀB)ᵀ and TᵀPm. Of D − I only the positive part is turned,
so that what is left stays positive definite. The mean that is kept is not found anew of Pm, but moved along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor

from ..numerics.linalg import Unbound, cholesky, flags_kept, plus_one, root_of_inverse, solve_lower, turn_of
from ..numerics.processes import is_shared, joined, largest
from .about_values import AboutValues, Known, Seen
from .base import Gaussian
from .factor_analysis import Formed, Products, above_one, lifted, nearest, sweep, times
from .optimal import from_natural
from .precision import LowRankGaussian, leading_directions, small_columns
from .product import Product
from .stack import Stack, each_times
from .steps import DEFAULT_RATE, Curvature, Pass, Rate, Recorded, cautious, recorded, softened

__all__ = ["NaturalLowRank"]

_FEW = 512  # coefficients up to which P̂ is formed
_SMALL, _SLOW = 256, 0.25  # and up to which one sweep a step does for two, at rates up to this
_KEPT = ("loc", "low_rank", "block", "gain", "seat")


class _Recorded(Recorded, LowRankGaussian):
    pass


class _Seen(NamedTuple):
    """Sites under another L, as stacks: a and b with m = a + P⁻¹b, ``None`` for b = 0, D and B."""

    near: Tensor
    rest: Optional[Tensor]
    block: Tensor
    low_rank: Tensor


class _Base(NamedTuple):
    """Of a run: m and D as stacks, B flat, the L + ηsI that these belong to."""

    loc: Tensor
    block: Tensor
    low_rank: Tensor
    seat: Optional[Tensor]


class NaturalLowRank(AboutValues):
    """q(w) = N(m, (blockdiag(D) + BBᵀ)⁻¹) by natural steps, each projected on that form.

    (The form: Adam, Durrande and John, 2018; the projection is factor analysis, Rubin and Thayer, 1982.)

    Negative curvatures, of likelihoods that are not log-concave or as draws of function values show them by chance, are
    cut where the step would leave less than half of the precision there is; to see that P̂ is formed. So it is where q
    is drawn from: it has the curvature E ∇²f = E ∇f(w)(w − m)ᵀP then (Stein's identity), an M x M matrix.

    Under objectives that take no natural steps m, B and a tilt A of each block, D⁻¹ = RAAᵀRᵀ, are parameters.

    :param rank: the number of columns of B; ``None`` is the size of the largest block, 0 makes independent blocks,
        whose precisions are those of P̂ on its diagonal; the mean is that of the whole P̂.
    :param base: whether D is free; else it is I.
    :param rate: ρ of the step P̂ = (1 − ρ)P + ρ(I + ΦᵀΛΦ) before it is projected, in (0, 1] or a function of the number
        of steps taken; by default as of :class:`NaturalGaussian`.
    :param sweeps: of expectation maximisation a step; by default 2, or 1 for up to 256 coefficients at rates of at
        most 0.25, whose P̂ is near P.
    :param iterations: of conjugate gradients a step.
    :param softness: η, as of :class:`NaturalGaussian`.
    """

    by_block: ClassVar[bool] = True

    def __init__(
        self,
        sizes: Sequence[int],
        batch_shape: Sequence[int],
        like: Tensor,
        rank: Optional[int] = None,
        base: bool = True,
        rate: Rate = DEFAULT_RATE,
        sweeps: Optional[int] = None,
        iterations: int = 10,
        softness: float = 0.03,
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate, softness)
        self.base = base
        self.rank = max(self.sizes) if rank is None else rank
        self.sweeps, self.iterations = sweeps, iterations
        self._stack = stack = Stack(self.sizes)
        shape = (*batch_shape, len(self.sizes), stack.size)
        self.loc: Any
        self.loc = torch.nn.Parameter(like.new_zeros(*shape, 1))
        self.low_rank = torch.nn.Parameter(stack.rows(small_columns(self.sizes, batch_shape, self.rank, like)))
        if base:
            self._new_tilt("tilt", self.loc[..., 0], stack.size)
        self.register_buffer("block", plus_one(like.new_zeros(*shape, stack.size)))
        self.register_buffer("gain", like.new_zeros(*shape, stack.size))  # the positive part of D - I

    def _put_block(self, block: Tensor, aims: Tensor) -> None:
        for name, value in zip(("block", "gain"), above_one(block, aims)):
            self._buffers[name] = value.to(self.block)

    def _put_loc(self, loc: Tensor) -> None:
        self._set("loc", self._stack.cut(self._stack.wide(loc)[..., None]))

    # States have the parts block by block.

    def _blocks(self, name: str, value: Tensor) -> list[Tensor]:
        if name == "loc":
            return self._stack.vectors(value)
        if name == "seat" and not value.numel():
            return [value] * len(self.sizes)
        return self._stack.blocks(value, square=name != "low_rank")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _KEPT:
            parts = self._blocks(name, destination.pop(prefix + name))
            destination.update((f"{prefix}{name}_{b}", part.contiguous()) for b, part in enumerate(parts))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in _KEPT:
            keys = [f"{prefix}{name}_{b}" for b in range(len(self.sizes))]
            if any(key not in state_dict for key in keys):
                continue
            parts = [state_dict.pop(key) for key in keys]
            if name == "loc":
                value = self._stack.columns(parts)
            elif name == "low_rank":
                value = self._stack.rows(parts)
            elif any(part.numel() for part in parts):
                # Blocks about w had no L + ηsI where all of their size are.
                eyes = [torch.eye(n).to(parts[0]) for n in self.sizes]
                value = self._stack.squares([part if part.numel() else eye for part, eye in zip(parts, eyes)])
            else:
                value = self.seat.new_zeros(0, 0)
            state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def start(self, anchor: Any, features: Optional[Sequence[Tensor]]) -> None:
        """Start P at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading directions: the level's first."""
        if features is None:
            return
        stack, small = self._stack, self._blocks("low_rank", self.low_rank.detach())
        found = small
        if self.rank:
            found, spare = leading_directions(features, small)
            self._set("low_rank", stack.rows([u.to(b) + b * spare[..., None, :] for u, b in zip(found, small)]))
        if self.base:
            block = stack.squares([plus_one(p.mT @ p - u @ u.mT) for p, u in zip(features, found)])
            self._put_block(block, block)
        self._put_seat(self._seat(anchor))

    def _seat(self, anchor: Any) -> Optional[Tensor]:
        """L + ηsI of each block as a stack, I where it is about w; ``None`` where w itself has a meaning."""
        like = None if anchor is None else next((part for part in anchor if part is not None), None)
        if like is None:
            return None
        if isinstance(anchor, Unbound):
            return softened(anchor.whole, self.softness, (self._stack.size,))
        eyes = [torch.eye(n, dtype=like.dtype, device=like.device) for n in self.sizes]
        parts = zip(anchor, eyes)
        return self._stack.squares([eye if a is None else softened(a, self.softness, (len(eye),)) for a, eye in parts])

    def _seen_from(self, seat: Optional[Tensor]) -> _Seen:
        """Pm ← TᵀPm with T = L₀⁻¹L is m ← T⁻¹m + P⁻¹(TᵀK − KT⁻¹)m, with the part K of D that is not turned."""
        loc, low_rank = self._kept("loc"), self._kept("low_rank")
        if seat is None or not self.seat.numel():
            return _Seen(loc, None, self.block, low_rank)
        moved, stays = seat - self.seat, self.block - self.gain
        turn = plus_one(solve_lower(self.seat, moved))
        # T⁻¹m = m − L⁻¹(L − L₀)m
        near = loc - solve_lower(seat, each_times(moved, loc))
        # (TᵀK − KT⁻¹)m
        rest = each_times(turn.mT, each_times(stays, loc)) - each_times(stays, near)
        # K + Tᵀ(D − K)T
        block = stays + each_times(turn.mT, each_times(self.gain, turn))
        return _Seen(near, rest, block, each_times(turn.mT, low_rank))

    def _gaussian(self, seen: _Seen, kind: type[LowRankGaussian] = LowRankGaussian) -> Any:
        near, rest, block, low_rank = seen
        # with RRᵀ = D⁻¹, P = R⁻ᵀ(I + RᵀBBᵀR)R⁻¹
        tril = root_of_inverse(block, False, "a block of a low-rank precision")
        if self.base and recorded() is None and (torch.is_grad_enabled() or self._is_tilted("tilt")):
            tril = each_times(tril, self._tilt("tilt"))
        q = kind.stacked(self._stack, near, each_times(tril.mT, low_rank), tril)
        if rest is not None:
            q.columns = near + q.covariance_times_columns(rest)
        return q

    def forward(self, anchor: Any = None) -> Gaussian:
        seat, record = self._seat(anchor), recorded()
        if record is None:
            return self._gaussian(self._seen_from(seat))
        held = None if seat is None else seat.detach()
        self._level_out(held)
        q: Any
        if sum(self.sizes) <= _FEW and not self.batch_shape:
            seen = self._seen_from(held)
            q, loc = self._by_covariance(seen, seat)
        else:
            seen = self._seen_from(seat)
            q = self._gaussian(seen, _Recorded)
            loc = q.columns.detach()
        base = _Base(loc, seen.block.detach(), seen.low_rank.detach().flatten(-3, -2), held)
        return q.recorded_in(record.new(self, base))

    def _by_covariance(self, seen: _Seen, seat: Optional[Tensor]) -> tuple[Known, Tensor]:
        """q(w) by S, which is quicker where it is small, with no graph but that by L + ηsI; and m as a stack."""
        stack, turn, stays = self._stack, None, None
        if seat is not None and self.seat.numel():
            turn, stays = stack.dense(turn_of(seat)), stack.dense(self.block - self.gain)

        def root() -> Tensor:
            return root_of_inverse(self._dense(seat)[0], False, "a low-rank precision")

        factor = self._known(self._dense_of(seen), stays, turn, root)
        loc = stack.cut(stack.wide(factor.loc.detach())[..., None])
        return Known(self.sizes, [factor], [range(len(self.sizes))]), loc

    def _dense_of(self, seen: _Seen) -> Seen:
        near, rest = (None if part is None else self._stack.narrow(part.flatten(-3)) for part in (seen.near, seen.rest))
        assert near is not None
        return self._stack.dense(seen.block, seen.low_rank.flatten(-3, -2)), near, rest

    def _dense(self, seat: Optional[Tensor]) -> Seen:
        return self._dense_of(self._seen_from(seat))

    def _put_dense(self, precision: Tensor) -> None:
        blocks, low_rank = nearest(precision, self.sizes, self.rank, self.base)
        self._set("low_rank", self._stack.rows(low_rank.split(self.sizes, -2)))
        if self.base:
            block = self._stack.squares(blocks)
            self._put_block(block, block)

    @torch.no_grad()
    def _level_out(self, seat: Optional[Tensor], level: Optional[Tensor] = None) -> None:
        if not (self.base and self._is_tilted("tilt")):
            return
        seen = self._seen_from(seat)
        q = self._gaussian(seen)
        block = torch.cholesky_inverse(cholesky(q.tril @ q.tril.mT, 0.0, "D⁻¹"))
        self._set("loc", q.columns)
        self._set("low_rank", seen.low_rank)
        self._put_block(block, block)
        self._put_seat(seat)
        self._level_tilt("tilt")

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r, before it is brought to its form."""
        return from_natural(gram, pull, self.sizes)

    def step(self, taken: Pass, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        base: _Base = taken.base
        stack, (each, weight) = self._stack, (part[..., None, None] for part in (rate / total, weight))
        kept, num = 1 - each * weight, sum(self.sizes)
        with flags_kept() as flags:  # a step can't be taken again: what has failed is looked at here, and left out
            here = self._from(base.seat) if again else base
            target = self._target(taken, here, each, kept)
            aims = target.blocks() if self.base else None
            block, low_rank = sweep(target, aims, here.block, here.low_rank)
            for _ in range(1, self.sweeps or (1 if rate <= _SLOW and num <= _SMALL else 2)):
                found = block if aims is None else lifted(block, aims)
                block, low_rank = sweep(target, aims, found, low_rank)
            # P̂(m̂ − m) = −(ρ/c)(Φᵀg + cm)
            right = -each * (weight * base.loc.flatten(-3, -2) + stack.wide(self._slope(taken))[..., None])
            shift = target.solve(right, aims, block, low_rank, self.iterations)
        shift = stack.wide(cautious(stack.narrow(shift[..., 0]), taken, target.cut))
        loc = here.loc + stack.cut(shift[..., None])
        failed = sum(flag.count_nonzero() for flag in flags)
        size = loc.sum() + block.sum() + low_rank.sum()
        # test_a_step_without_a_factor_is_left_out
        fine = (0 * size == failed) & (each > 0).all()  # 0 times a number that is finite is 0
        self._set("loc", torch.where(fine, loc, here.loc))
        self._set("low_rank", stack.cut(torch.where(fine, low_rank, here.low_rank)))
        if aims is not None:
            self._put_block(torch.where(fine, block, here.block), aims)
        self._put_seat(base.seat)

    def _from(self, seat: Optional[Tensor]) -> _Base:
        """What there is, under another L."""
        seen = self._seen_from(seat)
        return _Base(self._gaussian(seen).columns, seen.block, seen.low_rank.flatten(-3, -2), seat)

    def _target(self, taken: Pass, here: _Base, each: Tensor, kept: Tensor) -> Any:
        """P̂, formed where it is small, and where curvatures are negative or shown by draws."""
        curved, stack = taken.curvatures(), self._stack
        signed = bool(taken.draws) or _any_signed(curved)
        if not signed and sum(self.sizes) > _FEW:
            rows = [(stack.wide(part.phi), each * (2 * part.h)[..., None]) for part in curved]
            return Products(stack, here.block, here.low_rank, kept, rows)
        zero = here.low_rank.new_zeros(*here.low_rank.shape[:-1], here.low_rank.shape[-2])
        data, negative = zero, each * self._curvature_by_draws(taken) if signed else zero
        for phi, h, gram, _ in curved:
            if signed or gram is None:
                phi, h = stack.wide(phi), each * (2 * h)[..., None]
                # ρΦᵀ2HΦ, of positive curvatures alone where there are others
                data = data + phi.mT @ (phi * (h.clamp(min=0) if signed else h))
                negative = negative + phi.mT @ (phi * h.clamp(max=0)) if signed else negative
            else:
                data = data + 2 * each * stack.wide(stack.wide(gram).mT)
        formed = Formed(stack, here.block, here.low_rank, kept, data)
        if signed:
            formed.add(negative)
        return formed

    def _slope(self, taken: Pass) -> Tensor:
        """Φᵀg and the draws' gradients, joined over processes."""
        slope = self._stack.narrow(torch.zeros_like(taken.base.loc.flatten(-3)))
        for row, grad in taken.gradients():
            slope = slope + (row.phi.mT @ grad[..., None])[..., 0]
        for _, grad in taken.drawn():
            slope = slope + grad.reshape(-1, *slope.shape).sum(0)
        return joined(slope)[0]

    def _curvature_by_draws(self, taken: Pass) -> Tensor:
        """½(C + Cᵀ) with C = Σ ∇f(w)(w − m)ᵀP over draws of q: E ∇²f (Stein; Lin, Khan and Schmidt, 2019)."""
        base: _Base = taken.base
        found = torch.zeros_like(base.low_rank @ base.low_rank.mT)
        for draw in taken.drawn():
            centred, grad = (self._stack.wide(part)[..., None] for part in draw)
            one = grad * times(base.block, base.low_rank, centred).mT
            found = found + one.reshape(-1, *found.shape).sum(0)
        return 0.5 * (found + found.mT)


def _any_signed(curved: Sequence[Curvature]) -> bool:
    """Whether a curvature is, in any of the processes."""
    if not curved:
        return False
    signed = any(part.is_signed for part in curved)
    return bool(largest(curved[0].h.new_tensor(float(signed))) > 0) if is_shared() else signed
