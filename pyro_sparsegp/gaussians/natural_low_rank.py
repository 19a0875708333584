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
from .precision import LowRankGaussian, leading_directions
from .steps import KNOWN, Falling, Heard, Lift, Listening, Rate, StepsOnBackward, cautious, softened

__all__ = ["NaturalLowRank"]

Blocks = list[Tensor]


class _Listening(Listening, LowRankGaussian):
    pass


Seats = list[Optional[Tensor]]


@dataclass
class _Base:
    """Of a forward pass: m, D and B, and L + ηsI that these belong to; a block each."""

    loc: Blocks
    blocks: Blocks
    low_rank: Blocks
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
        return [getattr(self, f"{name}_{i}") for i in range(len(self.sizes))]

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
        for i, seat in enumerate(seats or ()):
            if seat is not None:
                setattr(self, f"seat_{i}", seat.detach().to(self.loc_0))

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start at that mean, at the rate of the tenth step."""
        self._put_each("loc", loc.split(self.sizes, -1))
        self.skip(KNOWN)

    def _seen_from(self, seats: Optional[Seats]) -> tuple[Optional[Blocks], Blocks, Blocks]:
        """Pm, ``None`` if m is what it was, D and B of the same sites under another L."""
        loc, blocks, low_rank = self._each("loc"), self._each("block"), self._each("low_rank")
        turns = [
            None if now is None or not before.numel() else solve_lower(before, now)
            for before, now in zip(self._each("seat"), seats or ())
        ]
        if all(turn is None for turn in turns):
            return None, blocks, low_rank
        inner = torch.stack([b.mT @ m[..., None] for b, m in zip(low_rank, loc)]).sum(0)
        pull = [d @ m[..., None] + b @ inner for d, b, m in zip(blocks, low_rank, loc)]
        for i, turn in enumerate(turns):
            if turn is not None:
                gain = getattr(self, f"gain_{i}")
                pull[i], low_rank[i] = turn.mT @ pull[i], turn.mT @ low_rank[i]
                if self.base:
                    blocks[i] = blocks[i] + (turn.mT @ gain @ turn - gain)
        return [part[..., 0] for part in pull], blocks, low_rank

    def _gaussian(self, pull: Optional[Blocks], blocks: Blocks, low_rank: Blocks) -> LowRankGaussian:
        if self.base:
            eyes = [torch.eye(d.shape[-1], dtype=d.dtype, device=d.device) for d in blocks]
            trils: Optional[Blocks] = [root_of_inverse(Lift.apply(d - eye, self.unit)) for d, eye in zip(blocks, eyes)]
            b = [tril.mT @ part for tril, part in zip(trils or (), low_rank)]
        else:
            trils, b = None, [Lift.apply(part, self.unit) for part in low_rank]
        q = LowRankGaussian([Lift.apply(m, self.unit) for m in self._each("loc")], b, trils)
        return (
            q
            if pull is None
            else LowRankGaussian(q.covariance_times([Lift.apply(part, self.unit) for part in pull]), b, trils)
        )

    def forward(self, anchor: Any = None) -> LowRankGaussian:
        self.settle()
        seats = self._seats(anchor)
        pull, blocks, low_rank = self._seen_from(seats)
        q = self._gaussian(pull, blocks, low_rank)
        if not torch.is_grad_enabled():
            return q
        here = [[part.detach() for part in parts] for parts in (q.loc, blocks, low_rank)]
        base = _Base(here[0], here[1], here[2], seats)
        return _Listening(q.loc, q.b, q.trils).heard_by(self, Heard(base, self.unit))

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        base: _Base = heard.base
        here = self._from(base.seats) if again else base
        each, kept = rate / total, 1 - rate * weight / total
        rows = heard.curved()
        phis = [row["features"] for row in rows]
        curvatures = [each[..., None] * (2 * row["by_change"]).clamp(min=0) for row in rows]
        if heard.draws:  # of their curvature nothing is known
            kept = torch.ones_like(kept)

        def times(v: Blocks) -> Blocks:
            """P̂v for columns v."""
            inner = sum(b.mT @ x for b, x in zip(here.low_rank, v))
            found = [
                kept[..., None, None] * (d @ x + b @ inner) + (1 - kept)[..., None, None] * x
                for d, b, x in zip(here.blocks, here.low_rank, v)
            ]
            data = [torch.zeros_like(x) for x in found]
            for phi, curvature in zip(phis, curvatures):
                seen = curvature[..., None] * sum(p @ x for p, x in zip(phi, v))
                data = [x + p.mT @ seen for x, p in zip(data, phi)]
            return [x + more for x, more in zip(found, joined(*data))]

        blocks, low_rank = here.blocks, here.low_rank
        aims = [_within(i, here, kept, phis, curvatures) for i in range(len(self.sizes))] if self.base else None
        for _ in range(self.sweeps):
            blocks, low_rank = _sweep(times, aims, blocks, low_rank)
        slopes = [torch.zeros_like(m) for m in base.loc]
        for row in heard.rows.values():
            if "by_mean" in row:
                g = row["by_mean"][..., None]
                slopes = [s + (p.mT @ g)[..., 0] for s, p in zip(slopes, row["features"])]
        inside = heard.weight_inside(self.batch_shape)
        for _, grad in heard.draws.values():
            parts = grad.reshape(-1, *slopes[0].shape[:-1], grad.shape[-1]).sum(0).split(self.sizes, -1)
            slopes = [s + part for s, part in zip(slopes, parts)]
        if inside is not None:
            slopes = [s - inside[..., None] * m for s, m in zip(slopes, base.loc)]
        slopes = [weight[..., None] * m + s for m, s in zip(base.loc, joined(*slopes))]
        right = [-each[..., None, None] * s[..., None] for s in slopes]
        shift = _solve(times, right, _Inverse(blocks, low_rank), self.iterations)
        whole = cautious(torch.cat([x[..., 0] for x in shift], -1), heard)
        loc = [m + x for m, x in zip(here.loc, whole.split(self.sizes, -1))]
        parts = [*loc, *blocks, *low_rank]
        fine = torch.stack([part.isfinite().all() for part in parts]).all() & (each > 0).all()
        for name, new, old in (
            ("loc", loc, here.loc),
            ("block", blocks, here.blocks),
            ("low_rank", low_rank, here.low_rank),
        ):
            self._put_each(name, [torch.where(fine, a, b) for a, b in zip(new, old)])
        if self.base:
            eyes = [torch.eye(d.shape[-1], dtype=d.dtype, device=d.device) for d in blocks]
            self._put_each("gain", [_positive(d - eye) for d, eye in zip(self._each("block"), eyes)])
        self._sit(base.seats)

    def _from(self, seats: Optional[Seats]) -> _Base:
        """What there is, under another L."""
        pull, blocks, low_rank = self._seen_from(seats)
        return _Base(self._gaussian(pull, blocks, low_rank).loc, blocks, low_rank, seats)


def _positive(matrix: Tensor) -> Tensor:
    """The part of a symmetric matrix with positive eigenvalues."""
    found = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (found.eigenvectors * found.eigenvalues.clamp(min=0)[..., None, :]) @ found.eigenvectors.mT


def _within(i: int, here: _Base, kept: Tensor, phis: Sequence[Blocks], curvatures: Sequence[Tensor]) -> Tensor:
    """A block of P̂ on its diagonal."""
    d, b = here.blocks[i], here.low_rank[i]
    eye = torch.eye(d.shape[-1], dtype=d.dtype, device=d.device)
    data = torch.zeros_like(d)
    for phi, curvature in zip(phis, curvatures):
        data = data + phi[i].mT @ (phi[i] * curvature[..., None])
    return kept[..., None, None] * (d + b @ b.mT) + (1 - kept)[..., None, None] * eye + joined(data)[0]


class _Inverse:
    """(blockdiag(D) + BBᵀ)⁻¹ = D⁻¹ − D⁻¹B(I + BᵀD⁻¹B)⁻¹BᵀD⁻¹."""

    def __init__(self, blocks: Blocks, low_rank: Blocks) -> None:
        self.roots = [cholesky(d, 0.0, "a block of a low-rank precision") for d in blocks]
        self.scaled = [torch.cholesky_solve(b, root) for b, root in zip(low_rank, self.roots)]  # D⁻¹B
        rank = low_rank[0].shape[-1]
        eye = torch.eye(rank, dtype=low_rank[0].dtype, device=low_rank[0].device)
        self.inner = cholesky(eye + sum(b.mT @ c for b, c in zip(low_rank, self.scaled)), 0.0, "I + BᵀD⁻¹B")

    def __call__(self, v: Blocks) -> Blocks:
        seen = torch.cholesky_solve(torch.as_tensor(sum(c.mT @ x for c, x in zip(self.scaled, v))), self.inner)
        return [torch.cholesky_solve(x, root) - c @ seen for x, root, c in zip(v, self.roots, self.scaled)]


def _sweep(
    times: Callable[[Blocks], Blocks], aims: Optional[Blocks], blocks: Blocks, low_rank: Blocks
) -> tuple[Blocks, Blocks]:
    """One sweep of factor analysis: β = (I + BᵀD⁻¹B)⁻¹BᵀD⁻¹, E = (I + BᵀD⁻¹B)⁻¹ + βP̂βᵀ, B ← P̂βᵀE⁻¹ and
    D ← blockdiag(P̂ − BβP̂); then B ← BE^½, the expansion.

    :param aims: the blocks of P̂ on its diagonal; ``None`` leaves D.
    """
    inverse = _Inverse(blocks, low_rank)
    beta = [torch.cholesky_solve(c.mT, inverse.inner) for c in inverse.scaled]
    seen = times([part.mT for part in beta])  # P̂βᵀ
    moment = torch.cholesky_inverse(inverse.inner) + sum(part @ p for part, p in zip(beta, seen))
    root = cholesky(0.5 * (moment + moment.mT), 0.0, "the factors' second moment")
    new = [torch.cholesky_solve(p.mT, root).mT for p in seen]
    if aims is not None:
        blocks = [aim - b @ p.mT for aim, b, p in zip(aims, new, seen)]
        blocks = [0.5 * (d + d.mT) for d in blocks]
        new = [b @ root for b in new]
    return blocks, new


def _solve(times: Callable[[Blocks], Blocks], right: Blocks, inverse: _Inverse, iterations: int) -> Blocks:
    """P̂⁻¹ of one column by preconditioned conjugate gradients, without a look at how far it has come."""

    def dot(a: Blocks, b: Blocks) -> Tensor:
        return torch.stack([(x * y).sum((-2, -1)) for x, y in zip(a, b)]).sum(0)[..., None, None]

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
