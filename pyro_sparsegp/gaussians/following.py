"""A Gaussian of other latents by natural steps, and Gaussians over coefficients whose mean follows its draws.

q(z) = N(a, RRᵀ) and q(w | z) = N(m + B(z − a), S) are a joint Gaussian of z and w: the exact posterior of a linear
Gaussian model is one, and at its own optimum neither the bound nor its gradient by a draw has noise. Given z,

    KL[q(w | z) ‖ p] = KL[N(m, S) ‖ p] + mᵀδ + ½δᵀδ,   δ = B(z − a).

Two draws z = a ± Rε at the same rows, with the gradients of minus the bound by z, those of log q(z) in them, and by δ,
give the steps

    a ← a − ρRe₀,   R ← R − ρ R tril½(e₁εᵀ)/(1 + εᵀε),   B ← B − ρ Sγ₁(R⁻ᵀε)ᵀ/(1 + εᵀε),

with e = Rᵀ∂z, γ = ∂δ, e₀ = ½(e₊ + e₋), e₁ = ½(e₊ − e₋) and γ₁ = ½(γ₊ − γ₋), all over the weight of the divergence. That
is the natural gradient, whose Fisher matrix has the blocks (RRᵀ)⁻¹ for a and RRᵀ ⊗ S⁻¹ for B (Amari, 1998), normalised
as least-mean-squares filters are, so that it is stable whatever ε is drawn; and no step is longer than ρ in that
metric, a fraction of q's own deviations, however large the gradient is.

Where a batch of rows would have the means is, but for noise, in the sums alone (antithetic variates; Hammersley and
Morton, 1956). In a single draw it would be most of the gradients by R and B, too, and of the size by which their steps
are shortened: R would be as narrow as it is right for a B that has yet to be learned, and too narrow for B to be seen.

What B should be does not change with R, and where a moves, the mean of w moves along, m ← m + BΔa, by an offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.linalg import side_by_side, sum_blocks
from ..numerics.processes import by_draws
from .base import Gaussian
from .steps import Natural, Pass, Rate, recorded

__all__ = ["Drawn", "DrawnGaussian", "Following", "Shifted"]


def _rising(step: int) -> float:
    """ρ of step t: m and S learn first."""
    return 0.5 * min(1.0, (step / 20) ** 2)


@dataclass(frozen=True)
class Drawn:
    """A draw z = a + Rε.

    :param loc: a, ``(D,)``.
    :param root: R, lower triangular, ``(D, D)``.
    :param noise: ε, ``(D,)``.
    :param value: z.
    :param taken: where the weight of log q(z) is recorded.
    """

    loc: Tensor
    root: Tensor
    noise: Tensor
    value: Tensor
    taken: Optional[Pass] = None

    def weighed(self, value: Tensor) -> Tensor:
        """A part of log q(z), of which natural steps want the weight."""
        return _weighed(self.taken, value)


def _weighed(taken: Optional[Pass], value: Tensor) -> Tensor:
    if taken is None:
        return value
    value = taken.keep(value.clone())
    taken.divergences.append(value)
    return value


def _by_pairs(taken: Pass, unit: Tensor) -> Iterator[tuple[float, Tensor, Tensor, Tensor]]:
    """What is recorded of draws that mirror each other: the rows' share, ε, and of each one's gradient over ``unit``
    ½(g₊ + g₋) and ½(g₊ − g₋).
    """
    assert taken.image is not None
    for (noise, grad), (opposite, other) in zip(taken.drawn(), taken.image.drawn()):
        half = 0.5 * (noise - opposite)  # ε, and 0 of what is held at a value
        # The two have half of the weight each.
        for share, each, value in by_draws(half, torch.stack([grad + other, grad - other])):
            yield share, each, value[0] / unit, value[1] / unit


class DrawnGaussian(Natural):
    """q(z) = N(a, RRᵀ) over D latents, by natural steps; else a and a tilt A are parameters, with the root RA.

    :param loc: a at the start, ``(D,)``.
    :param scale: the standard deviations at the start, ``(D,)``.
    :param rate: ρ in (0, 1], or a function of the number of steps taken; by default it rises to 0.5 in 20 steps, so
        that the coefficients that follow learn first.
    """

    root: Tensor

    def __init__(self, loc: Tensor, scale: Tensor, rate: Rate = _rising) -> None:
        super().__init__((len(loc),), (), loc, rate)
        self.loc: Any
        self.loc = torch.nn.Parameter(loc.detach().clone())
        self._new_tilt("tilt", self.loc, len(loc))
        self.register_buffer("root", scale.detach().diag())

    @property
    def mean(self) -> Tensor:
        """a, ``(D,)``."""
        return self._kept("loc")

    @property
    def tril(self) -> Tensor:
        """R, ``(D, D)``."""
        is_tilted = self._is_tilted("tilt") or (torch.is_grad_enabled() and recorded() is None)
        return self.root @ self._tilt("tilt") if is_tilted else self.root

    def start_at(self, rows: slice, value: Tensor) -> None:
        """Start some latents there."""
        self.loc.data[rows] = value.detach().flatten().to(self.loc)

    def forward(self, noise: Tensor, mirrors: bool = False) -> Drawn:  # type: ignore[override]
        """The draw of this ε, ``(D,)``, which may mirror the one before."""
        record = recorded()
        if record is not None and self._is_tilted("tilt"):
            self.root = self.tril.detach()
            self._level_tilt("tilt")
        loc, root = self.mean, self.tril
        value = loc + root @ noise
        if record is None:
            return Drawn(loc, root, noise, value)
        taken = record.new(self, None, mirrors)
        value = taken.keep(value)
        taken.draws.append((noise, value))
        return Drawn(loc, root, noise, value, taken)

    def most_by_draws(self) -> float:
        return 1.0  # its steps are bounded by themselves

    def step(self, taken: Pass, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        root, loc = self.root, self.loc.data
        # Every latent has told the weight.
        for share, noise, by_value, apart in _by_pairs(taken, total / len(loc)):
            loc = loc - share * (root @ _bounded(root.mT @ by_value, rate))
            along = root * _bounded(root.mT @ apart, rate)
            # R tril(eεᵀ): sums of the columns from each one on.
            below = along.flip(-1).cumsum(-1).flip(-1) - 0.5 * along
            change = below * (noise / (1 + noise.square().sum()))
            shrink = (change.diagonal() / root.diagonal()).amax().clamp(min=0.5)
            self.root = self.root - share * (change * (0.5 / shrink)).tril()
        self._set("loc", loc)


def _bounded(pull: Tensor, rate: float) -> Tensor:
    """ρe, of a root mean square below 1; 0 if e is not finite."""
    pull = torch.where(pull.isfinite().all(), pull, 0.0)
    return pull * (rate / (1 + pull.square().mean()).sqrt())


class Shifted(Gaussian):
    """N(m + δ, S): a Gaussian moved by δ, whose divergence is KL[N(m, S) ‖ N(0, I)] + mᵀδ + ½δᵀδ.

    :param q: N(m, S).
    :param shift: δ, a block ``(..., M_b)`` each.
    :param taken: where the divergence's weight is recorded.
    """

    def __init__(self, q: Gaussian, shift: Sequence[Tensor], taken: Optional[Pass] = None) -> None:
        self.q, self.shift, self.taken = q, list(shift), taken
        self.sizes, self.batch_shape = q.sizes, q.batch_shape

    @property
    def loc(self) -> list[Tensor]:
        return [loc + shift for loc, shift in zip(self.q.loc, self.shift)]

    def variance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self.q.variance_change(features)

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        mean, change = self.q.moments(features)
        self.row = self.q.row
        return mean + sum_blocks(features, self.shift), change

    def note_draws(self) -> None:
        self.q.note_draws()

    def cross_change(self, features: Sequence[Tensor], others: Sequence[Tensor], rows: tuple[Any, Any]) -> Tensor:
        return self.q.cross_change(features, others, rows)

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self.q.covariance_change(features)

    def covariance_times(self, v: Sequence[Tensor]) -> list[Tensor]:
        return self.q.covariance_times(v)

    def kl(self) -> Tensor:
        # By moments, by which the gradient δ by m is recorded.
        along, _ = self.q.moments([shift[..., None, :] for shift in self.shift])
        square = side_by_side(self.shift).square().sum(-1)
        return _weighed(self.taken, self.q.kl() + along[..., 0] + 0.5 * square)

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        return [w + shift for w, shift in zip(self.q.rsample(shape), self.shift)]

    def log_ratio(self, w: Sequence[Tensor]) -> Tensor:
        centred = [block - shift for block, shift in zip(w, self.shift)]
        further = side_by_side(w).square().sum(-1) - side_by_side(centred).square().sum(-1)
        return _weighed(self.taken, self.q.log_ratio(centred) + 0.5 * further)

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        return Shifted(self.q.marginal(blocks), [self.shift[b] for b in sorted(blocks)])

    @property
    def covariance_matrix(self) -> Tensor:
        return self.q.covariance_matrix


class Following(Natural):
    """B, ``(..., M, D)``, of q(w | z) = N(m + B(z − a), S), by natural steps.

    :param centre: a at the start, ``(D,)``.
    :param rate: as of :class:`DrawnGaussian`.
    """

    offset: Tensor
    centre: Tensor

    def __init__(
        self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, centre: Tensor, rate: Rate = _rising
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        num = sum(self.sizes)
        self.slope: Any
        self.slope = torch.nn.Parameter(like.new_zeros(*batch_shape, num, len(centre)))  # B, (..., M, D)
        self.register_buffer("offset", like.new_zeros(*batch_shape, num))  # of the mean, where a was
        self.register_buffer("centre", centre.detach().clone())  # where a was
        self.register_buffer("level", like.new_zeros(*batch_shape, num))  # of releases that drew once

    def forward(self, q: Gaussian, drawn: Drawn) -> Gaussian:  # type: ignore[override]
        """q(w | z).

        :param q: N(m, S).
        :param drawn: z.
        """
        shift = self.offset + self._kept("slope") @ (drawn.value - self.centre)
        record = recorded()
        if record is None or drawn.taken is None:
            return Shifted(q, shift.split(self.sizes, -1))
        taken = record.new(self, (q, drawn), drawn.taken.mirrors)
        shift = taken.keep(shift)
        taken.draws.append((drawn.noise, shift))
        return Shifted(q, shift.split(self.sizes, -1), taken)

    def most_by_draws(self) -> float:
        return 1.0  # a step's length is bounded by its own size

    def step(self, taken: Pass, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        q, drawn = taken.base
        slope = self.slope.data
        self.offset, self.centre = self.offset + slope @ (drawn.loc - self.centre), drawn.loc.clone()
        for share, noise, _, told in _by_pairs(taken, torch.where(total > 0, total, torch.nan)[..., None]):
            natural = side_by_side(q.covariance_times(told.split(self.sizes, -1)))
            natural = torch.where(natural.isfinite().all(-1, keepdim=True), natural, 0.0)
            square = (told * natural).sum(-1, keepdim=True).nan_to_num()
            along = torch.linalg.solve_triangular(drawn.root.mT, noise[:, None], upper=True)[:, 0]
            along = along / (1 + noise.square().sum())
            slope = slope - share * ((rate / (1 + square).sqrt() * natural)[..., None] * along)
        self._set("slope", slope)
