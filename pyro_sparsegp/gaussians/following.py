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
Of a single draw, which is what Pyro's own objectives have, e₀ = e₁ = e and γ₁ = γ − γ̄, with the running mean γ̄ of what
m has yet to learn.

What B should be does not change with R, and where a moves, the mean of w moves along, m ← m + BΔa, by an offset that is
kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Optional

import torch
from torch import Tensor

from ..numerics.linalg import side_by_side, sum_blocks
from ..numerics.processes import by_draws
from .base import Gaussian
from .steps import Heard, Lift, Rate, StepsOnBackward, weighed

__all__ = ["Drawn", "DrawnGaussian", "Following", "Shifted"]

_WINDOW = 10  # steps that the running mean is over


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
    :param weigh: makes a 0 of some shape, by which objectives tell the weight of log q(z).
    :param mirrors: whether it is the mirror image of the draw before, all else the same.
    """

    loc: Tensor
    root: Tensor
    noise: Tensor
    value: Tensor
    weigh: Optional[partial[Tensor]] = None
    mirrors: bool = False


def _by_pairs(heard: Heard, unit: Tensor) -> Iterator[tuple[float, Tensor, Tensor, Optional[Tensor]]]:
    """What was heard of draws: the rows' share, ε, and the gradient g; or of two that mirror each other ½(g₊ + g₋) and
    ½(g₊ − g₋), each gradient over ``unit``. With one draw alone there is no difference.
    """
    own = list(heard.draws.values())
    images = [] if heard.image is None else list(heard.image.draws.values())
    if len(images) != len(own):
        for noise, grad in own + images:
            for share, each, value in by_draws(noise, grad):
                yield share, each, value / unit, None
        return
    for (noise, grad), (opposite, other) in zip(own, images):
        half = 0.5 * (noise - opposite)  # ε, and 0 of what is held at a value
        # The two have half of the weight each.
        for share, each, value in by_draws(half, torch.stack([grad + other, grad - other])):
            yield share, each, value[0] / unit, value[1] / unit


class DrawnGaussian(StepsOnBackward):
    """q(z) = N(a, RRᵀ) over D latents, by natural steps.

    :param loc: a at the start, ``(D,)``.
    :param scale: the standard deviations at the start, ``(D,)``.
    :param rate: ρ in (0, 1], or a function of the number of steps taken; by default it rises to 0.5 in 20 steps, so
        that the coefficients that follow learn first.
    """

    loc: Tensor
    root: Tensor

    def __init__(self, loc: Tensor, scale: Tensor, rate: Rate = _rising) -> None:
        super().__init__((len(loc),), (), loc, rate)
        self.register_buffer("loc", loc.detach().clone())
        self.register_buffer("root", scale.detach().diag())

    def forward(self, noise: Tensor, mirrors: bool = False) -> Drawn:  # type: ignore[override]
        """The draw of this ε, ``(D,)``, which may mirror the one before."""
        self.settle()
        loc, root = self.loc, self.root
        value = loc + root @ noise
        if not torch.is_grad_enabled():
            return Drawn(loc, root, noise, value)
        heard = Heard(None, self.unit, mirrors=mirrors)
        value = Lift.apply(value, self.unit)

        def hear(grad: Optional[Tensor]) -> None:
            if grad is not None:
                heard.draws[id(noise)] = noise, grad.detach()
                self.note(heard)

        if value.requires_grad:
            value.register_hook(hear)
        return Drawn(loc, root, noise, value, partial(weighed, self, heard), mirrors)

    def most_by_draws(self) -> float:
        return 1.0  # its steps are bounded by themselves

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        root = self.root
        # Every latent has told the weight.
        for share, noise, by_value, apart in _by_pairs(heard, total / len(self.loc)):
            pull = _bounded(root.mT @ by_value, rate)
            self.loc = self.loc - share * (root @ pull)
            along = root * (pull if apart is None else _bounded(root.mT @ apart, rate))
            # R tril(eεᵀ): sums of the columns from each one on.
            below = along.flip(-1).cumsum(-1).flip(-1) - 0.5 * along
            change = below * (noise / (1 + noise.square().sum()))
            shrink = (change.diagonal() / root.diagonal()).amax().clamp(min=0.5)
            self.root = self.root - share * (change * (0.5 / shrink)).tril()


def _bounded(pull: Tensor, rate: float) -> Tensor:
    """ρe, of a root mean square below 1; 0 if e is not finite."""
    pull = torch.where(pull.isfinite().all(), pull, 0.0)
    return pull * (rate / (1 + pull.square().mean()).sqrt())


class Shifted(Gaussian):
    """N(m + δ, S): a Gaussian moved by δ, whose divergence is KL[N(m, S) ‖ N(0, I)] + mᵀδ + ½δᵀδ.

    :param q: N(m, S).
    :param shift: δ, a block ``(..., M_b)`` each.
    :param weigh: makes a 0 of some shape, by which objectives tell the divergence's weight.
    """

    def __init__(self, q: Gaussian, shift: Sequence[Tensor], weigh: Optional[partial[Tensor]] = None) -> None:
        self.q, self.shift, self.weigh = q, list(shift), weigh
        self.sizes, self.batch_shape, self.heard = q.sizes, q.batch_shape, q.heard

    @property
    def loc(self) -> list[Tensor]:
        return [loc + shift for loc, shift in zip(self.q.loc, self.shift)]

    def variance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self.q.variance_change(features)

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        mean, change = self.q.moments(features)
        self.key = self.q.key
        return mean + sum_blocks(features, self.shift), change

    def note_draws(self) -> None:
        self.q.note_draws()

    def cross_change(
        self, features: Sequence[Tensor], others: Sequence[Tensor], keys: tuple[Optional[int], Optional[int]]
    ) -> Tensor:
        return self.q.cross_change(features, others, keys)

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self.q.covariance_change(features)

    def covariance_times(self, v: Sequence[Tensor]) -> list[Tensor]:
        return self.q.covariance_times(v)

    def _weighed(self, value: Tensor) -> Tensor:
        return value if self.weigh is None else value + self.weigh(value.shape)

    def kl(self) -> Tensor:
        # By moments, from which a q that takes natural steps hears of the gradient δ by m.
        along, _ = self.q.moments([shift[..., None, :] for shift in self.shift])
        square = side_by_side(self.shift).square().sum(-1)
        return self._weighed(self.q.kl() + along[..., 0] + 0.5 * square)

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        return [w + shift for w, shift in zip(self.q.rsample(shape), self.shift)]

    def log_ratio(self, w: Sequence[Tensor]) -> Tensor:
        centred = [block - shift for block, shift in zip(w, self.shift)]
        further = side_by_side(w).square().sum(-1) - side_by_side(centred).square().sum(-1)
        return self._weighed(self.q.log_ratio(centred) + 0.5 * further)

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        return Shifted(self.q.marginal(blocks), [self.shift[b] for b in sorted(blocks)])

    @property
    def covariance_matrix(self) -> Tensor:
        return self.q.covariance_matrix


class Following(StepsOnBackward):
    """B, ``(..., M, D)``, of q(w | z) = N(m + B(z − a), S), by natural steps.

    :param centre: a at the start, ``(D,)``.
    :param rate: as of :class:`DrawnGaussian`.
    """

    slope: Tensor
    level: Tensor
    offset: Tensor
    centre: Tensor

    def __init__(
        self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, centre: Tensor, rate: Rate = _rising
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.register_buffer("slope", like.new_zeros(*batch_shape, sum(self.sizes), len(centre)))  # B, (..., M, D)
        self.register_buffer("offset", like.new_zeros(*batch_shape, sum(self.sizes)))
        self.register_buffer("centre", centre.detach().clone())
        self.register_buffer("level", like.new_zeros(*batch_shape, sum(self.sizes)))  # Sγ̄

    def forward(self, q: Gaussian, drawn: Drawn) -> Gaussian:  # type: ignore[override]
        """q(w | z).

        :param q: N(m, S).
        :param drawn: z.
        """
        self.settle()
        self.offset = self.offset + self.slope @ (drawn.loc - self.centre)
        self.centre = drawn.loc.clone()  # a buffer's own, since states are loaded in place
        shift = self.offset + self.slope @ (drawn.value - drawn.loc)
        if not torch.is_grad_enabled():
            return Shifted(q, shift.split(self.sizes, -1))
        heard = Heard((q, drawn.root), self.unit, mirrors=drawn.mirrors)
        shift = Lift.apply(shift, self.unit)
        noise = drawn.noise

        def hear(grad: Optional[Tensor]) -> None:
            if grad is not None:
                heard.draws[id(noise)] = noise, grad.detach()
                self.note(heard)

        if shift.requires_grad:
            shift.register_hook(hear)
        return Shifted(q, shift.split(self.sizes, -1), partial(weighed, self, heard))

    def most_by_draws(self) -> float:
        return 1.0  # a step's length is bounded by its own size

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        q, root = heard.base
        level, window = self.level, min(self.steps_taken + 1, _WINDOW)
        for share, noise, by_shift, difference in _by_pairs(heard, torch.where(total > 0, total, torch.nan)[..., None]):
            told = by_shift if difference is None else difference
            natural = side_by_side(q.covariance_times(told.split(self.sizes, -1)))
            apart = natural - level if difference is None else natural
            apart = torch.where(apart.isfinite().all(-1, keepdim=True), apart, 0.0)
            if difference is None:
                self.level = self.level + share * (apart / window)
            square = (told * natural).sum(-1, keepdim=True).nan_to_num()
            along = torch.linalg.solve_triangular(root.mT, noise[:, None], upper=True)[:, 0]
            along = along / (1 + noise.square().sum())
            self.slope = self.slope - share * ((rate / (1 + square).sqrt() * apart)[..., None] * along)
