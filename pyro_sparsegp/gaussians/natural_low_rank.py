"""Block plus low-rank precisions by natural steps, at a cost linear in the number of blocks.

The damped natural step has the precision and the mean

    P̂ = P + (ρ/c)(cI + Φᵀ2HΦ − cP),   P̂(m̂ − m) = −(ρ/c)(Φᵀg + cm),

with h cut at 0, and P̂ is not of the form P = blockdiag(D) + BBᵀ. It is never formed: the best P of that form, the one
of least KL[N(0, P⁻¹) ‖ N(0, P̂⁻¹)], is the maximum likelihood estimate of factor analysis for the "covariance" P̂, to
which sweeps of its expectation maximisation go (Rubin and Thayer, 1982), with expanded parameters (Liu, Rubin and Wu,
1998); they need P̂ times few vectors, and its blocks on the diagonal. The mean is found by conjugate gradients. Compare
SLANG (Mishkin et al., 2018), of a diagonal plus low rank.

Under another L the sums of sites, D − I + BBᵀ and Pm, keep their meaning about u, as in :mod:`.natural`, and their
form: with T = blockdiag(L₀⁻¹L) they are Tᵀ(D − I)T + (TᵀB)(TᵀB)ᵀ and TᵀPm. Of D − I only the positive part is turned,
so that what is left stays positive definite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, root_of_inverse, solve_lower
from ..numerics.processes import joined
from .groups import Groups, stacked, total
from .nearest import assembled, nearest
from .optimal import from_natural
from .precision import LowRankGaussian, leading_directions
from .product import Product
from .steps import KNOWN, Falling, Heard, Lift, Listening, Rate, StepsOnBackward, cautious, softened

__all__ = ["NaturalLowRank"]

Blocks = list[Tensor]
Columns = list[Tensor]  # of vectors, and other matrices, stacked by the blocks' sizes
Seats = list[Optional[Tensor]]


class _Listening(Listening, LowRankGaussian):
    pass


@dataclass
class _Base:
    """Of a forward pass: m, D and B, stacked by the blocks' sizes, and L + ηsI of each block that these belong to."""

    loc: Columns
    blocks: Columns
    low_rank: Columns
    seats: Optional[Seats]


class NaturalLowRank(StepsOnBackward):
    """q(w) = N(m, (blockdiag(D) + BBᵀ)⁻¹) by natural steps, each projected on that form.

    Draws give the mean their gradients and leave the precision alone.

    :param rank: the number of columns of B; ``None`` is the size of the largest block, 0 makes independent blocks,
        whose precisions are those of P̂ on its diagonal; the mean is that of the whole P̂.
    :param base: whether D is free; else it is I.
    :param rate: as in :class:`StepsOnBackward`.
    :param sweeps: of expectation maximisation a step.
    :param iterations: of conjugate gradients a step.
    :param softness: η; as in :class:`~.natural.NaturalGaussian`.
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
        rate: Rate = Falling(),
        sweeps: int = 2,
        iterations: int = 10,
        softness: float = 0.03,
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.softness = softness
        self.rank, self.base = max(self.sizes) if rank is None else rank, base
        self.sweeps, self.iterations = sweeps, iterations
        self._groups = Groups(self.sizes)
        for i, num in enumerate(self.sizes):
            eye = torch.eye(num, dtype=like.dtype, device=like.device).expand(*batch_shape, num, num)
            b = 0.1 * torch.randn(*batch_shape, num, self.rank, dtype=like.dtype, device=like.device)
            self.register_buffer(f"loc_{i}", like.new_zeros(*batch_shape, num))
            self.register_buffer(f"block_{i}", eye.clone())
            # 0 is a fixed point of the sweeps: small and random.
            self.register_buffer(f"low_rank_{i}", b / (sum(self.sizes) * self.rank) ** 0.25)
            self.register_buffer(f"gain_{i}", torch.zeros_like(eye).clone())  # the positive part of D - I
            self.register_buffer(f"seat_{i}", like.new_zeros(0, 0))

    def _each(self, name: str) -> Blocks:
        # By the way round a Pyro module's attributes, which would take as long as the algebra of small blocks.
        return [self._buffers[f"{name}_{i}"] for i in range(len(self.sizes))]  # type: ignore[misc]

    def _keep(self, name: str, values: Sequence[Tensor]) -> None:
        """Take values of the buffers' own dtype and shape."""
        self._buffers.update((f"{name}_{i}", value) for i, value in enumerate(values))

    def _put_each(self, name: str, values: Sequence[Tensor]) -> None:
        for i, value in enumerate(values):
            self.put(f"{name}_{i}", value)

    def start(self, anchor: Any, features: Optional[Sequence[Tensor]]) -> None:
        """Start P at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading directions: the level's first."""
        if features is None:
            return
        found = small = self._each("low_rank")
        if self.rank:
            found, spare = leading_directions(features, small)
            self._put_each("low_rank", [u.to(b) + b * spare[..., None, :] for u, b in zip(found, small)])
        if self.base:
            eyes = [torch.eye(phi.shape[-1], dtype=phi.dtype, device=phi.device) for phi in features]
            blocks = [e + p.mT @ p - u @ u.mT for e, p, u in zip(eyes, features, found)]
            self._put_each("block", blocks)
            self._put_each("gain", [_positive(block - e) for block, e in zip(blocks, eyes)])
        self._sit(self._seats(anchor))

    def _seats(self, anchor: Any) -> Optional[Seats]:
        """L + ηsI of each block, where w itself has no meaning."""
        return None if anchor is None else [None if part is None else softened(part, self.softness) for part in anchor]

    def _sit(self, seats: Optional[Seats]) -> None:
        like = self.loc_0
        for i, seat in enumerate(seats or ()):
            if seat is not None:
                self._buffers[f"seat_{i}"] = seat.detach().to(like)

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start at that mean, at the rate of the tenth step."""
        self._put_each("loc", loc.split(self.sizes, -1))
        self.skip(KNOWN)

    def _stacked(self, name: str) -> Columns:
        return self._groups.stack(self._each(name))

    def _turns(self, seats: Optional[Seats]) -> list[Optional[Tensor]]:
        """L₀⁻¹L of the blocks of each size; ``None`` where none of them has another L."""
        pairs = [
            (before, now) if now is not None and before.numel() else None
            for before, now in zip(self._each("seat"), seats or [None] * len(self.sizes))
        ]
        found: list[Optional[Tensor]] = []
        for group in self._groups.members:
            if all(pairs[b] is None for b in group):
                found.append(None)
                continue
            eye = torch.eye(self.sizes[group[0]], dtype=self.loc_0.dtype, device=self.loc_0.device)
            of_group = [pairs[b] or (eye, eye) for b in group]
            before, now = (stacked([pair[i] for pair in of_group]) for i in range(2))
            found.append(solve_lower(before, now))
        return found

    def _seen_from(self, seats: Optional[Seats]) -> tuple[Optional[Columns], Columns, Columns]:
        """Pm, ``None`` if m is what it was, D and B of the same sites under another L."""
        blocks, low_rank = self._stacked("block"), self._stacked("low_rank")
        turns = self._turns(seats)
        if all(turn is None for turn in turns):
            return None, blocks, low_rank
        loc, gains = self._groups.columns(self._each("loc")), self._stacked("gain")
        inner = total([b.mT @ m for b, m in zip(low_rank, loc)])[..., None, :, :]
        pull = [d @ m + b @ inner for d, b, m in zip(blocks, low_rank, loc)]
        for i, turn in enumerate(turns):
            if turn is not None:
                pull[i], low_rank[i] = turn.mT @ pull[i], turn.mT @ low_rank[i]
                if self.base:
                    blocks[i] = blocks[i] + (turn.mT @ gains[i] @ turn - gains[i])
        return pull, blocks, low_rank

    def _gaussian(self, pull: Optional[Columns], blocks: Columns, low_rank: Columns) -> LowRankGaussian:
        if self.base:
            trils: Optional[Columns] = [root_of_inverse(Lift.apply(d - _eye(d), self.unit)) for d in blocks]
            b = [tril.mT @ part for tril, part in zip(trils or (), low_rank)]
        else:
            trils, b = None, [Lift.apply(part, self.unit) for part in low_rank]
        loc = [Lift.apply(m, self.unit) for m in self._groups.columns(self._each("loc"))]
        q = LowRankGaussian.of_groups(self._groups, loc, b, trils)
        if pull is None:
            return q
        return q.with_loc(q.covariance_times_columns([Lift.apply(part, self.unit) for part in pull]))

    def forward(self, anchor: Any = None) -> LowRankGaussian:
        self.settle()
        seats = self._seats(anchor)
        pull, blocks, low_rank = self._seen_from(seats)
        q = self._gaussian(pull, blocks, low_rank)
        if not torch.is_grad_enabled():
            return q
        here = [[part.detach() for part in parts] for parts in (q.parts[0], blocks, low_rank)]
        base = _Base(here[0], here[1], here[2], seats)
        listening = _Listening.__new__(_Listening)
        listening.__dict__.update(q.__dict__)
        return listening.heard_by(self, Heard(base, self.unit))

    @torch.no_grad()
    def sums(self, anchor: Any) -> tuple[Tensor, Tensor]:
        """P − I and Pm under L, ``(..., M, M)``; those of the prior, 0, where no step has been taken."""
        self.settle()
        pull, blocks, low_rank = self._seen_from(self._seats(anchor))
        whole = assembled(self._groups.unstack(blocks), self._groups.unstack(low_rank))
        if pull is None:
            r = whole @ torch.cat(self._each("loc"), -1)[..., None]
        else:
            r = torch.cat(self._groups.unstack(pull), -2)
        known = float(self.steps_taken > 0)
        return known * (whole - _eye(whole)), known * r[..., 0]

    @torch.no_grad()
    def put_sums(self, anchor: Any, gram: Tensor, pull: Tensor) -> None:
        """Have q be the nearest to that of G and r under L, with their mean: steps go on at a later one's rate."""
        whole = (0.5 * (gram + gram.mT) + _eye(gram)).expand(*self.batch_shape, *gram.shape[-2:])
        loc = torch.cholesky_solve(pull.expand(whole.shape[:-1])[..., None], cholesky(whole, 0.0, "I + G"))[..., 0]
        blocks, low_rank = nearest(whole, self.sizes, self.rank, self.base)
        self._put_each("loc", loc.split(self.sizes, -1))
        self._put_each("block", blocks)
        self._put_each("low_rank", low_rank)
        if self.base:
            self._put_each("gain", [_positive(d - _eye(d)) for d in blocks])
        self._sit(self._seats(anchor))
        self.skip(max(KNOWN - self.steps_taken, 0))

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r, before it is brought to its form."""
        return from_natural(gram, pull, self.sizes)

    def step(self, heard: Heard, weight: Tensor, total_weight: Tensor, rate: float, again: bool) -> None:
        base: _Base = heard.base
        here = self._from(base.seats) if again else base
        each, kept = rate / total_weight, 1 - rate * weight / total_weight
        stack, columns = self._groups.stack, self._groups.columns
        rows = heard.curved()
        phis = [stack(row["features"]) for row in rows]
        curvatures = [(each[..., None] * (2 * row["by_change"]).clamp(min=0))[..., None, :, None] for row in rows]
        if heard.draws:  # of their curvature nothing is known
            kept = torch.ones_like(kept)
        each, kept, weight = (part[..., None, None, None] for part in (each, kept, weight))  # of all of a group

        def times(v: Columns) -> Columns:
            """P̂v for columns v."""
            inner = total([b.mT @ x for b, x in zip(here.low_rank, v)])[..., None, :, :]
            found = [kept * (d @ x + b @ inner) + (1 - kept) * x for d, b, x in zip(here.blocks, here.low_rank, v)]
            data = [torch.zeros_like(x) for x in found]
            for phi, curvature in zip(phis, curvatures):
                seen = curvature * total([p @ x for p, x in zip(phi, v)])[..., None, :, :]
                data = [x + p.mT @ seen for x, p in zip(data, phi)]
            return [x + more for x, more in zip(found, joined(*data))]

        blocks, low_rank = here.blocks, here.low_rank
        aims = _within(here, kept, phis, curvatures) if self.base else None
        for _ in range(self.sweeps):
            blocks, low_rank = _sweep(times, aims, blocks, low_rank)
        slopes = [torch.zeros_like(m) for m in base.loc]
        for row in heard.rows.values():
            if "by_mean" in row:
                g = row["by_mean"][..., None, :, None]
                slopes = [s + p.mT @ g for s, p in zip(slopes, stack(row["features"]))]
        inside = heard.weight_inside(self.batch_shape)
        for _, grad in heard.draws.values():
            parts = grad.reshape(-1, *self.batch_shape, grad.shape[-1]).sum(0).split(self.sizes, -1)
            slopes = [s + part for s, part in zip(slopes, columns(parts))]
        if inside is not None:
            slopes = [s - inside[..., None, None, None] * m for s, m in zip(slopes, base.loc)]
        slopes = [weight * m + s for m, s in zip(base.loc, joined(*slopes))]
        shift = _solve(times, [-each * s for s in slopes], _Inverse(blocks, low_rank), self.iterations)
        whole = cautious(torch.cat(self._groups.vectors(shift), -1), heard)
        loc = [m + x for m, x in zip(here.loc, columns(whole.split(self.sizes, -1)))]
        fine = torch.stack([part.isfinite().all() for part in (*loc, *blocks, *low_rank)]).all() & (each > 0).all()
        loc, blocks, low_rank = (
            [torch.where(fine, a, b) for a, b in zip(new, old)]
            for new, old in ((loc, here.loc), (blocks, here.blocks), (low_rank, here.low_rank))
        )
        self._keep("loc", self._groups.vectors(loc))
        self._keep("block", self._groups.unstack(blocks))
        self._keep("low_rank", self._groups.unstack(low_rank))
        if self.base:
            self._keep("gain", self._groups.unstack([_positive(d - _eye(d)) for d in blocks]))
        self._sit(base.seats)

    def _from(self, seats: Optional[Seats]) -> _Base:
        """What there is, under another L."""
        pull, blocks, low_rank = self._seen_from(seats)
        return _Base(list(self._gaussian(pull, blocks, low_rank).parts[0]), blocks, low_rank, seats)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _positive(matrix: Tensor) -> Tensor:
    """The part of a symmetric matrix with positive eigenvalues."""
    found = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (found.eigenvectors * found.eigenvalues.clamp(min=0)[..., None, :]) @ found.eigenvectors.mT


def _within(here: _Base, kept: Tensor, phis: Sequence[Columns], curvatures: Sequence[Tensor]) -> Columns:
    """The blocks of P̂ on its diagonal."""
    data = [torch.zeros_like(d) for d in here.blocks]
    for phi, curvature in zip(phis, curvatures):
        data = [x + p.mT @ (p * curvature) for x, p in zip(data, phi)]
    return [
        kept * (d + b @ b.mT) + (1 - kept) * _eye(d) + x for d, b, x in zip(here.blocks, here.low_rank, joined(*data))
    ]


class _Inverse:
    """(blockdiag(D) + BBᵀ)⁻¹ = D⁻¹ − D⁻¹B(I + BᵀD⁻¹B)⁻¹BᵀD⁻¹."""

    def __init__(self, blocks: Columns, low_rank: Columns) -> None:
        self.roots = [cholesky(d, 0.0, "a block of a low-rank precision") for d in blocks]
        self.scaled = [torch.cholesky_solve(b, root) for b, root in zip(low_rank, self.roots)]  # D⁻¹B
        gram = total([b.mT @ c for b, c in zip(low_rank, self.scaled)])
        self.inner = cholesky(_eye(gram) + gram, 0.0, "I + BᵀD⁻¹B")

    def __call__(self, v: Columns) -> Columns:
        seen = torch.cholesky_solve(total([c.mT @ x for c, x in zip(self.scaled, v)]), self.inner)[..., None, :, :]
        return [torch.cholesky_solve(x, root) - c @ seen for x, root, c in zip(v, self.roots, self.scaled)]


def _sweep(
    times: Callable[[Columns], Columns], aims: Optional[Columns], blocks: Columns, low_rank: Columns
) -> tuple[Columns, Columns]:
    """One sweep of factor analysis: β = (I + BᵀD⁻¹B)⁻¹BᵀD⁻¹, E = (I + BᵀD⁻¹B)⁻¹ + βP̂βᵀ, B ← P̂βᵀE⁻¹ and
    D ← blockdiag(P̂ − BβP̂); then B ← BE^½, the expansion.

    :param aims: the blocks of P̂ on its diagonal; ``None`` leaves D.
    """
    inverse = _Inverse(blocks, low_rank)
    beta = [torch.cholesky_solve(c.mT, inverse.inner[..., None, :, :]) for c in inverse.scaled]
    seen = times([part.mT for part in beta])  # P̂βᵀ
    moment = torch.cholesky_inverse(inverse.inner) + total([part @ p for part, p in zip(beta, seen)])
    root = cholesky(0.5 * (moment + moment.mT), 0.0, "the factors' second moment")[..., None, :, :]
    new = [torch.cholesky_solve(p.mT, root).mT for p in seen]
    if aims is not None:
        blocks = [aim - b @ p.mT for aim, b, p in zip(aims, new, seen)]
        blocks = [0.5 * (d + d.mT) for d in blocks]
        new = [b @ root for b in new]
    return blocks, new


def _solve(times: Callable[[Columns], Columns], right: Columns, inverse: _Inverse, iterations: int) -> Columns:
    """P̂⁻¹ of one column by preconditioned conjugate gradients, without a look at how far it has come."""

    def dot(a: Columns, b: Columns) -> Tensor:
        return total([(x * y).sum((-2, -1), keepdim=True) for x, y in zip(a, b)])[..., None, :, :]

    def over(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(b > 0, a / b, torch.zeros_like(a))

    x = [torch.zeros_like(part) for part in right]
    z = inverse(right)
    direction, rz = z, dot(right, z)
    for _ in range(iterations):
        moved = times(direction)
        a = over(rz, dot(direction, moved))
        x = [u + a * v for u, v in zip(x, direction)]
        right = [u - a * v for u, v in zip(right, moved)]
        z = inverse(right)
        new = dot(right, z)
        direction, rz = [u + over(new, rz) * v for u, v in zip(z, direction)], new
    return x
