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

from ..numerics.linalg import Unbound, cholesky, flags_kept, plus_one, root_of_inverse, side_by_side, solve_lower
from ..numerics.processes import is_shared, joined, largest
from .factor_analysis import Formed, Products, above_one, assembled, lifted, nearest, sweep, times
from .optimal import from_natural
from .precision import LowRankGaussian, leading_directions, small_columns
from .product import Product
from .stack import Stack, each_times, eye_like
from .steps import DEFAULT_RATE, KNOWN, Curvature, Natural, Pass, Rate, Recorded, cautious, recorded, softened

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
    """Of a run: m and D as stacks, B flat, the L + ηsI that these belong to; V and A of :func:`sweep`, if known."""

    loc: Tensor
    block: Tensor
    low_rank: Tensor
    seat: Optional[Tensor]
    known: Optional[tuple[Tensor, Tensor]] = None


class NaturalLowRank(Natural):
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

    anchored: ClassVar[bool] = True
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
        super().__init__(sizes, batch_shape, like, rate)
        self.softness, self.base = softness, base
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
        self.register_buffer("seat", like.new_zeros(0, 0))

    def _put_block(self, block: Tensor, aims: Tensor) -> None:
        for name, value in zip(("block", "gain"), above_one(block, aims)):
            self._buffers[name] = value.to(self.block)

    def _put_seat(self, seat: Optional[Tensor]) -> None:
        if seat is not None:
            self._buffers["seat"] = seat.detach()

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

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start at that mean, at the rate of the tenth step."""
        self._set("loc", self._stack.columns(loc.split(self.sizes, -1)))
        self.skip(KNOWN)

    def _seen_from(self, seat: Optional[Tensor]) -> _Seen:
        """Pm ← TᵀPm with T = L₀⁻¹L is m ← T⁻¹m + P⁻¹(TᵀK − KT⁻¹)m, with the part K of D that is not turned."""
        loc, low_rank = self._kept("loc"), self._kept("low_rank")
        if seat is None or not self.seat.numel():
            return _Seen(loc, None, self.block, low_rank)
        moved, stays = seat - self.seat, self.block - self.gain
        turn = plus_one(solve_lower(self.seat, moved))
        near = loc - solve_lower(seat, each_times(moved, loc))
        rest = each_times(turn.mT, each_times(stays, loc)) - each_times(stays, near)
        block = stays + each_times(turn.mT, each_times(self.gain, turn))
        return _Seen(near, rest, block, each_times(turn.mT, low_rank))

    def _gaussian(self, seen: _Seen, kind: type[LowRankGaussian] = LowRankGaussian) -> Any:
        near, rest, block, low_rank = seen
        tril = root_of_inverse(block, False, "a block of a low-rank precision")
        if self.base and recorded() is None and (torch.is_grad_enabled() or self._is_tilted("tilt")):
            tril = each_times(tril, self._tilt("tilt"))
        q = kind.stacked(self._stack, near, each_times(tril.mT, low_rank), tril)
        if rest is not None:
            q.columns = near + q.covariance_times_columns(rest)
        return q

    def forward(self, anchor: Any = None) -> LowRankGaussian:
        seat, record = self._seat(anchor), recorded()
        if record is not None:
            self._level_out(seat)
        seen = self._seen_from(seat)
        if record is None:
            return self._gaussian(seen)
        q = self._gaussian(seen, _Recorded)
        known = q.low_rank.detach(), q.inner.detach()
        low_rank = seen.low_rank.detach().flatten(-3, -2)
        base = _Base(q.columns.detach(), seen.block.detach(), low_rank, None if seat is None else seat.detach(), known)
        return q.recorded_in(record.new(self, base))

    @torch.no_grad()
    def _level_out(self, seat: Optional[Tensor]) -> None:
        """Have D alone say what plain gradients have made of it."""
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

    @torch.no_grad()
    def sums(self, anchor: Any) -> tuple[Tensor, Tensor]:
        """P − I and Pm under L, ``(..., M, M)``; those of the prior, 0, where no step has been taken."""
        seat, stack = self._seat(anchor), self._stack
        self._level_out(seat)
        near, rest, block, low_rank = self._seen_from(seat)
        whole = assembled(stack.blocks(block, square=True), torch.cat(stack.blocks(low_rank), -2))
        r = (whole @ side_by_side(stack.vectors(near))[..., None])[..., 0]
        r = r if rest is None else r + side_by_side(stack.vectors(rest))
        known = float(self.steps_taken > 0)
        return known * (whole - eye_like(whole)), known * r

    @torch.no_grad()
    def put_sums(self, anchor: Any, gram: Tensor, pull: Tensor) -> None:
        """Have q be the nearest to that of G and r under L, with their mean: steps go on at a later one's rate."""
        whole = (0.5 * (gram + gram.mT) + eye_like(gram)).expand(*self.batch_shape, *gram.shape[-2:])
        loc = torch.cholesky_solve(pull.expand(whole.shape[:-1])[..., None], cholesky(whole, 0.0, "I + G"))[..., 0]
        blocks, low_rank = nearest(whole, self.sizes, self.rank, self.base)
        self._set("loc", self._stack.columns(loc.split(self.sizes, -1)))
        self._set("low_rank", self._stack.rows(low_rank.split(self.sizes, -2)))
        if self.base:
            block = self._stack.squares(blocks)
            self._put_block(block, block)
        self._put_seat(self._seat(anchor))
        self.skip(max(KNOWN - self.steps_taken, 0))

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r, before it is brought to its form."""
        return from_natural(gram, pull, self.sizes)

    def step(self, taken: Pass, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        base: _Base = taken.base
        each, weight = (part[..., None, None] for part in (rate / total, weight))
        kept, num = 1 - each * weight, sum(self.sizes)
        with flags_kept() as flags:  # a step can't be taken again: what has failed is looked at here, and left out
            here = self._from(base.seat) if again else base
            target = self._target(taken, here, each, kept)
            aims = target.blocks() if self.base else None
            block, low_rank = sweep(target, aims, here.block, here.low_rank, here.known)
            for _ in range(1, self.sweeps or (1 if rate <= _SLOW and num <= _SMALL else 2)):
                found = block if aims is None else lifted(block, aims)
                block, low_rank = sweep(target, aims, found, low_rank)
            # P̂(m̂ − m) = −(ρ/c)(Φᵀg + cm)
            right = -each * (weight * base.loc.flatten(-3, -2) + self._slope(taken))
            shift = target.solve(right, aims, block, low_rank, self.iterations)
        shift = cautious(shift[..., 0], taken, target.cut)[..., None]
        loc = here.loc + self._stack.cut(shift)
        failed = sum(flag.count_nonzero() for flag in flags)
        size = loc.sum() + block.sum() + low_rank.sum()
        fine = (0 * size == failed) & (each > 0).all()  # 0 times a number that is finite is 0
        self._set("loc", torch.where(fine, loc, here.loc))
        self._set("low_rank", self._stack.cut(torch.where(fine, low_rank, here.low_rank)))
        if aims is not None:
            self._put_block(torch.where(fine, block, here.block), aims)
        self._put_seat(base.seat)

    def _from(self, seat: Optional[Tensor]) -> _Base:
        """What there is, under another L."""
        seen = self._seen_from(seat)
        return _Base(self._gaussian(seen).columns, seen.block, seen.low_rank.flatten(-3, -2), seat)

    def _target(self, taken: Pass, here: _Base, each: Tensor, kept: Tensor) -> Any:
        """P̂, formed where it is small, and where curvatures are negative or shown by draws."""
        curved = taken.curvatures()
        signed = bool(taken.draws) or _any_signed(curved)
        rows = [(part.phi, each * (2 * part.h)[..., None]) for part in curved]
        if not signed and sum(self.sizes) > _FEW:
            return Products(self._stack, here.block, here.low_rank, kept, rows)
        zero = here.low_rank.new_zeros(*here.low_rank.shape[:-1], here.low_rank.shape[-2])
        data = sum((phi.mT @ (phi * (h.clamp(min=0) if signed else h)) for phi, h in rows), zero)
        formed = Formed(self._stack, here.block, here.low_rank, kept, data)
        if signed:
            shown = each * self._curvature_by_draws(taken)
            formed.add(shown + sum(phi.mT @ (phi * h.clamp(max=0)) for phi, h in rows))
        return formed

    def _slope(self, taken: Pass) -> Tensor:
        """Φᵀg and the draws' gradients, flat, joined over processes."""
        slope = torch.zeros_like(taken.base.loc.flatten(-3, -2))
        for row, grad in taken.gradients():
            slope = slope + row.phi.mT @ grad[..., None]
        for _, grad in taken.drawn():
            slope = slope + self._flat(grad).reshape(-1, *slope.shape).sum(0)
        return joined(slope)[0]

    def _flat(self, w: Tensor) -> Tensor:
        """A vector as a flat column."""
        return self._stack.flat([part[..., None, :] for part in w.split(self.sizes, -1)]).mT

    def _curvature_by_draws(self, taken: Pass) -> Tensor:
        """½(C + Cᵀ) with C = Σ ∇f(w)(w − m)ᵀP over draws of q: E ∇²f (Stein; Lin, Khan and Schmidt, 2019)."""
        base: _Base = taken.base
        found = torch.zeros_like(base.low_rank @ base.low_rank.mT)
        for centred, grad in taken.drawn():
            one = self._flat(grad) * times(base.block, base.low_rank, self._flat(centred)).mT
            found = found + one.reshape(-1, *found.shape).sum(0)
        return 0.5 * (found + found.mT)


def _any_signed(curved: Sequence[Curvature]) -> bool:
    """Whether a curvature is, in any of the processes."""
    if not curved:
        return False
    signed = any(part.is_signed for part in curved)
    return bool(largest(curved[0].h.new_tensor(float(signed))) > 0) if is_shared() else signed
