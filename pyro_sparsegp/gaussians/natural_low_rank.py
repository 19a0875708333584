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

from ..numerics.linalg import cholesky, flags_kept, plus_one, root_of_inverse, solve_lower
from ..numerics.processes import is_shared, joined, largest
from .factor_analysis import Columns, Formed, Products, Target, above_one, eye_like, lifted, sweep, times
from .groups import Groups, each_times, stacked
from .nearest import assembled, nearest
from .optimal import from_natural
from .precision import LowRankGaussian, leading_directions, small_columns
from .product import Product
from .steps import DEFAULT_RATE, KNOWN, Curvature, Natural, Pass, Rate, Recorded, cautious, recorded, softened

__all__ = ["NaturalLowRank"]

_FEW = 512  # coefficients up to which P̂ is formed
_SMALL, _SLOW = 256, 0.25  # and up to which one sweep a step does for two, at rates up to this
_KEPT = ("loc", "block", "low_rank", "gain", "seat")

Seats = list[Optional[Tensor]]


class _Recorded(Recorded, LowRankGaussian):
    pass


class _Seen(NamedTuple):
    """Sites under another L, stacked by the blocks' sizes: a and b with m = a + P⁻¹b, ``None`` for b = 0, D and B."""

    near: Columns
    rest: Optional[Columns]
    blocks: Columns
    low_rank: Columns


class _Base(NamedTuple):
    """Of a run: m, D and B, the L + ηsI that these belong to; V and A of :func:`sweep`, where they are there."""

    loc: Columns
    blocks: Columns
    low_rank: Columns
    seats: Optional[Seats]
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
        self._groups = Groups(self.sizes)
        low_rank = self._groups.stack(small_columns(self.sizes, batch_shape, self.rank, like))
        for i, (group, b) in enumerate(zip(self._groups.members, low_rank)):
            lead, num = (*batch_shape, len(group)), self.sizes[group[0]]
            setattr(self, f"locs_{i}", torch.nn.Parameter(like.new_zeros(*lead, num, 1)))
            setattr(self, f"low_ranks_{i}", torch.nn.Parameter(b))
            if base:
                self._new_tilt(f"tilts_{i}", like.new_zeros(*lead, 1), num)
            self.register_buffer(f"blocks_{i}", eye_like(b.mT).expand(*lead, num, num).clone())
            self.register_buffer(f"gains_{i}", like.new_zeros(*lead, num, num))  # the positive part of D - I
            self.register_buffer(f"seats_{i}", like.new_zeros(len(group), 0, 0))

    # Blocks of equal size are one tensor; states have them block by block.

    def _stacked(self, name: str) -> Columns:
        every = range(len(self._groups.members))
        if name in ("loc", "low_rank"):
            return [self._kept(f"{name}s_{i}") for i in every]
        return [self._buffers[f"{name}s_{i}"] for i in every]  # type: ignore[misc]

    def _keep(self, name: str, values: Sequence[Optional[Tensor]]) -> None:
        """Take stacked values."""
        for i, value in enumerate(values):
            if value is None:
                continue
            if name in ("loc", "low_rank"):
                self._set(f"{name}s_{i}", value)
            else:
                self._buffers[f"{name}s_{i}"] = value.detach().to(self._stacked("block")[i]).contiguous()

    def _each(self, name: str) -> list[Tensor]:
        values = [part.detach() for part in self._stacked(name)]
        return self._groups.vectors(values) if name == "loc" else self._groups.unstack(values)

    def _put_each(self, name: str, values: Sequence[Tensor]) -> None:
        values = [value.to(now).expand(now.shape) for value, now in zip(values, self._each(name))]
        self._keep(name, self._groups.columns(values) if name == "loc" else self._groups.stack(values))

    def _put_blocks(self, blocks: Columns, aims: Optional[Columns] = None) -> None:
        parts = map(above_one, blocks) if aims is None else map(above_one, blocks, aims)
        for name, values in zip(("block", "gain"), zip(*parts)):
            self._keep(name, values)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _KEPT:
            for i in range(len(self._groups.members)):
                del destination[f"{prefix}{name}s_{i}"]
            destination.update((f"{prefix}{name}_{b}", part) for b, part in enumerate(self._each(name)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in _KEPT:
            keys = [f"{prefix}{name}_{b}" for b in range(len(self.sizes))]
            if all(key in state_dict for key in keys):
                parts = [state_dict.pop(key) for key in keys]
                whole = self._groups.columns(parts) if name == "loc" else self._groups.stack(parts)
                state_dict.update((f"{prefix}{name}s_{i}", value) for i, value in enumerate(whole))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def start(self, anchor: Any, features: Optional[Sequence[Tensor]]) -> None:
        """Start P at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading directions: the level's first."""
        if features is None:
            return
        found = small = self._each("low_rank")
        if self.rank:
            found, spare = leading_directions(features, small)
            self._put_each("low_rank", [u.to(b) + b * spare[..., None, :] for u, b in zip(found, small)])
        if self.base:
            blocks = [plus_one(p.mT @ p - u @ u.mT) for p, u in zip(features, found)]
            self._put_blocks(self._groups.stack([0.5 * (d + d.mT) for d in blocks]))
        self._keep("seat", self._seats(anchor) or ())

    def _seats(self, anchor: Any) -> Optional[Seats]:
        """L + ηsI, stacked by the blocks' sizes; ``None`` where w itself has a meaning."""
        if anchor is None:
            return None
        found: Seats = []
        for group in self._groups.members:
            parts = self._groups.of_group(anchor, group)
            like = next((part for part in parts if part is not None), None)
            if like is not None and any(part is None for part in parts):
                parts = [eye_like(like) / (1 + self.softness) if part is None else part for part in parts]
            found.append(None if like is None else softened(stacked(parts), self.softness, like.shape[-1:]))
        return found

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start at that mean, at the rate of the tenth step."""
        self._put_each("loc", loc.split(self.sizes, -1))
        self.skip(KNOWN)

    def _seen_from(self, seats: Optional[Seats]) -> _Seen:
        """Pm ← TᵀPm with T = L₀⁻¹L is m ← T⁻¹m + P⁻¹(TᵀK − KT⁻¹)m, with the part K of D that is not turned."""
        near, blocks, low_rank, gains, before = (list(self._stacked(name)) for name in _KEPT)
        rest = [torch.zeros_like(m) for m in near]
        any_moved = False
        for i, (then, now) in enumerate(zip(before, seats or ())):
            if now is None or not then.numel():
                continue
            any_moved, moved, loc, gain = True, now - then, near[i], gains[i]
            turn = plus_one(solve_lower(then, moved))
            near[i] = loc - solve_lower(now, each_times(moved, loc))
            stays = blocks[i] - gain
            rest[i] = each_times(turn.mT, each_times(stays, loc)) - each_times(stays, near[i])
            low_rank[i] = each_times(turn.mT, low_rank[i])
            if self.base:
                blocks[i] = blocks[i] + (each_times(turn.mT, each_times(gain, turn)) - gain)
        return _Seen(near, rest if any_moved else None, blocks, low_rank)

    def _gaussian(self, seen: _Seen) -> LowRankGaussian:
        near, rest, blocks, low_rank = seen
        trils: Optional[Columns] = None
        if self.base:
            trils = [root_of_inverse(d, False, "a block of a low-rank precision") for d in blocks]
            names = [f"tilts_{i}" for i in range(len(blocks))]
            if recorded() is None and (torch.is_grad_enabled() or any(map(self._is_tilted, names))):
                trils = [each_times(tril, self._tilt(name)) for tril, name in zip(trils, names)]
            low_rank = [each_times(tril.mT, part) for tril, part in zip(trils, low_rank)]
        q = LowRankGaussian.of_groups(self._groups, near, low_rank, trils)
        return q if rest is None else q.with_loc([m + s for m, s in zip(near, q.covariance_times_columns(rest))])

    def forward(self, anchor: Any = None) -> LowRankGaussian:
        seats, record = self._seats(anchor), recorded()
        self._level_out(seats, record is not None)
        seen = self._seen_from(seats)
        q = self._gaussian(seen)
        if record is None:
            return q
        loc, blocks, low_rank = ([part.detach() for part in parts] for parts in (q.columns, seen.blocks, seen.low_rank))
        known = q.low_rank.detach(), q.inner.detach()
        own = None if seats is None else [None if seat is None else seat.detach() for seat in seats]
        found = _Recorded.__new__(_Recorded)
        found.__dict__.update(q.__dict__)
        return found.recorded_in(record.new(self, _Base(loc, blocks, low_rank, own, known)))

    @torch.no_grad()
    def _level_out(self, seats: Optional[Seats], wanted: bool) -> None:
        """Have D alone say what plain gradients have made of it."""
        names = [name for name in self._parameters if name.startswith("tilt")]
        if not (wanted and any(map(self._is_tilted, names))):
            return
        seen = self._seen_from(seats)
        loc, _, trils = self._gaussian(seen).parts
        self._keep("loc", loc)
        self._keep("low_rank", seen.low_rank)
        self._put_blocks([torch.cholesky_inverse(cholesky(tril @ tril.mT, 0.0, "D⁻¹")) for tril in trils or ()])
        self._keep("seat", seats or ())
        for name in names:
            self._level_tilt(name)

    @torch.no_grad()
    def sums(self, anchor: Any) -> tuple[Tensor, Tensor]:
        """P − I and Pm under L, ``(..., M, M)``; those of the prior, 0, where no step has been taken."""
        seats = self._seats(anchor)
        self._level_out(seats, True)
        near, rest, blocks, low_rank = self._seen_from(seats)
        whole = assembled(self._groups.unstack(blocks), self._groups.unstack(low_rank))
        r = whole @ torch.cat(self._groups.unstack(near), -2)
        r = r if rest is None else r + torch.cat(self._groups.unstack(rest), -2)
        known = float(self.steps_taken > 0)
        return known * (whole - eye_like(whole)), known * r[..., 0]

    @torch.no_grad()
    def put_sums(self, anchor: Any, gram: Tensor, pull: Tensor) -> None:
        """Have q be the nearest to that of G and r under L, with their mean: steps go on at a later one's rate."""
        whole = (0.5 * (gram + gram.mT) + eye_like(gram)).expand(*self.batch_shape, *gram.shape[-2:])
        loc = torch.cholesky_solve(pull.expand(whole.shape[:-1])[..., None], cholesky(whole, 0.0, "I + G"))[..., 0]
        blocks, low_rank = nearest(whole, self.sizes, self.rank, self.base)
        self._put_each("loc", loc.split(self.sizes, -1))
        self._put_each("low_rank", low_rank)
        if self.base:
            self._put_blocks(self._groups.stack(blocks))
        self._keep("seat", self._seats(anchor) or ())
        self.skip(max(KNOWN - self.steps_taken, 0))

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r, before it is brought to its form."""
        return from_natural(gram, pull, self.sizes)

    def step(self, taken: Pass, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        base: _Base = taken.base
        groups = self._groups
        each, weight = (part[..., None, None] for part in (rate / total, weight))
        kept = 1 - each * weight
        with flags_kept() as flags:  # a step can't be taken again: what has failed is looked at here, and left out
            here = self._from(base.seats) if again else base
            target = self._target(taken, here, each, kept)
            aims = target.blocks() if self.base else None
            blocks, low_rank = here.blocks, groups.over(here.low_rank)
            blocks, low_rank = sweep(groups, target, aims, blocks, low_rank, here.known)
            for _ in range(1, self.sweeps or (1 if rate <= _SLOW and sum(self.sizes) <= _SMALL else 2)):
                found = blocks if aims is None else lifted(blocks, aims)
                blocks, low_rank = sweep(groups, target, aims, found, low_rank)
            right = -each * (weight * groups.over(base.loc) + self._slope(taken))
            shift = target.solve(right, aims, blocks, low_rank, self.iterations)
        shift = cautious(shift[..., 0], taken, groups.order, target.cut)[..., None]
        loc = [m + x for m, x in zip(here.loc, groups.cut(shift))]
        low = groups.cut(low_rank)
        failed = sum(flag.count_nonzero() for flag in flags)
        size = sum(part.sum() for part in (*loc, *blocks, *low))
        fine = (0 * size == failed) & (each > 0).all()  # 0 times a number that is finite is 0
        loc, blocks, low = (
            [torch.where(fine, a, b) for a, b in zip(new, old)]
            for new, old in ((loc, here.loc), (blocks, here.blocks), (low, here.low_rank))
        )
        self._keep("loc", loc)
        self._keep("low_rank", low)
        if aims is not None:
            self._put_blocks(blocks, aims)
        self._keep("seat", base.seats or ())

    def _from(self, seats: Optional[Seats]) -> _Base:
        """What there is, under another L."""
        seen = self._seen_from(seats)
        return _Base(list(self._gaussian(seen).columns), seen.blocks, seen.low_rank, seats)

    def _target(self, taken: Pass, here: _Base, each: Tensor, kept: Tensor) -> Target:
        """P̂, formed where it is small, and where curvatures are negative or shown by draws."""
        groups, low_rank = self._groups, self._groups.over(here.low_rank)
        curved = taken.curvatures(groups.order)
        signed = bool(taken.draws) or _any_signed(curved)
        rows = [(part.phi, each * (2 * part.h)[..., None]) for part in curved]
        if not signed and sum(self.sizes) > _FEW:
            return Products(groups, here.blocks, low_rank, kept, rows)
        zero = torch.zeros_like(low_rank @ low_rank.mT)
        data = sum((phi.mT @ (phi * (h.clamp(min=0) if signed else h)) for phi, h in rows), zero)
        formed = Formed(groups, here.blocks, low_rank, kept, data)
        if signed:
            shown = each * self._curvature_by_draws(taken)
            formed.add(shown + sum(phi.mT @ (phi * h.clamp(max=0)) for phi, h in rows))
        return formed

    def _slope(self, taken: Pass) -> Tensor:
        """Φᵀg and the draws' gradients, joined over processes."""
        order, slope = self._groups.order, torch.zeros_like(self._groups.over(taken.base.loc))
        for row, grad in taken.gradients():
            slope = slope + row.beside(order).mT @ grad[..., None]
        for _, grad in taken.drawn():
            slope = slope + self._ordered(grad).reshape(-1, *slope.shape[:-1]).sum(0)[..., None]
        return joined(slope)[0]

    def _ordered(self, w: Tensor) -> Tensor:
        """A vector's blocks in the order of their sizes."""
        parts = w.split(self.sizes, -1)
        return torch.cat([parts[b] for b in self._groups.order], -1)

    def _curvature_by_draws(self, taken: Pass) -> Tensor:
        """½(C + Cᵀ) with C = Σ ∇f(w)(w − m)ᵀP over draws of q, its blocks in the order of their sizes."""
        base: _Base = taken.base
        groups, low_rank = self._groups, self._groups.over(base.low_rank)
        found = torch.zeros_like(low_rank @ low_rank.mT)
        for centred, grad in taken.drawn():
            scaled = times(groups, base.blocks, low_rank, self._ordered(centred)[..., None])
            one = self._ordered(grad)[..., None] * scaled.mT
            found = found + one.reshape(-1, *found.shape).sum(0)
        return 0.5 * (found + found.mT)


def _any_signed(curved: Sequence[Curvature]) -> bool:
    """Whether a curvature is, in any of the processes."""
    if not curved:
        return False
    signed = any(part.is_signed for part in curved)
    return bool(largest(curved[0].h.new_tensor(float(signed))) > 0) if is_shared() else signed
