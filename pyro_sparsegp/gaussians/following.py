"""A Gaussian of other latents by natural steps, and Gaussians over coefficients whose mean follows its draws.

q(z) = N(a, RRᵀ) and q(w | z) = N(m + B(z − a), S) are a joint Gaussian of z and w: the exact posterior of a linear
Gaussian model is one, and at its own optimum neither the bound nor its gradient by a draw has noise. Given z,

    KL[q(w | z) ‖ p] = KL[N(m, S) ‖ p] + mᵀδ + ½δᵀδ,   δ = B(z − a).

One draw z = a + Rε, with the gradients of minus the bound by z, that of log q(z) in it, and by δ, γ, gives the steps

    a ← a − ρRe,   R ← R − ρ R tril½(eεᵀ)/(1 + εᵀε),   e = Rᵀ∂z,
    B ← B − ρ S(γ − γ̄)(R⁻ᵀε)ᵀ/(1 + εᵀε),

all gradients over the weight of the divergence. That is the natural gradient, whose Fisher matrix has the blocks
(RRᵀ)⁻¹ for a and RRᵀ ⊗ S⁻¹ for B (Amari, 1998), normalised as least-mean-squares filters are, so that it is stable
whatever ε is drawn; and no step is longer than ρ in that metric, a fraction of q's own deviations, however large the
gradient is: by the noise of mini-batches, or far from the optimum. The running mean γ̄ is what m has yet to learn: at
the optimum it is 0, before it would be noise to B. What B should be does not change with R, and where a moves, the
mean of w moves along, m ← m + BΔa, by an offset that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    return 0.25 * min(1.0, (step / 20) ** 2)


@dataclass(frozen=True)
class Drawn:
    """A draw z = a + Rε.

    :param loc: a, ``(D,)``.
    :param root: R, lower triangular, ``(D, D)``.
    :param noise: ε, ``(D,)``.
    :param value: z.
    :param weigh: makes a 0 of some shape, by which objectives tell the weight of log q(z).
    """

    loc: Tensor
    root: Tensor
    noise: Tensor
    value: Tensor
    weigh: Optional[partial[Tensor]] = None


class DrawnGaussian(StepsOnBackward):
    """q(z) = N(a, RRᵀ) over D latents, by natural steps.

    :param loc: a at the start, ``(D,)``.
    :param scale: the standard deviations at the start, ``(D,)``.
    :param rate: ρ in (0, 1], or a function of the number of steps taken; by default it rises to 0.25 in 20 steps, so
        that the coefficients that follow learn first.
    """

    loc: Tensor
    root: Tensor

    def __init__(self, loc: Tensor, scale: Tensor, rate: Rate = _rising) -> None:
        super().__init__((len(loc),), (), loc, rate)
        self.register_buffer("loc", loc.detach().clone())
        self.register_buffer("root", scale.detach().diag())

    def forward(self, noise: Tensor) -> Drawn:  # type: ignore[override]
        """The draw of this ε, ``(D,)``."""
        self.settle()
        loc, root = self.loc, self.root
        value = loc + root @ noise
        if not torch.is_grad_enabled():
            return Drawn(loc, root, noise, value)
        heard = Heard(None, self.unit)
        value = Lift.apply(value, self.unit)

        def hear(grad: Optional[Tensor]) -> None:
            if grad is not None:
                heard.draws[id(noise)] = noise, grad.detach()
                self.note(heard)

        if value.requires_grad:
            value.register_hook(hear)
        return Drawn(loc, root, noise, value, partial(weighed, self, heard))

    def most_by_draws(self) -> float:
        return 1.0  # its steps are bounded by themselves

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        for own, grad in heard.draws.values():
            loc, root = self.loc, self.root
            for share, noise, by_value in by_draws(own, grad):
                pull = root.mT @ (by_value * (len(loc) / total))  # every latent has told the weight
                pull = torch.where(pull.isfinite().all(), pull, 0.0)
                pull = pull * (rate / (1 + pull.square().mean()).sqrt())
                self.loc = self.loc - share * (root @ pull)
                along = root * pull
                # R tril(eεᵀ): sums of the columns from each one on.
                below = along.flip(-1).cumsum(-1).flip(-1) - 0.5 * along
                change = below * (noise / (1 + noise.square().sum()))
                shrink = (change.diagonal() / root.diagonal()).amax().clamp(min=0.5)
                self.root = self.root - share * (change * (0.5 / shrink)).tril()


class Shifted(Gaussian):
    """N(m + δ, S): a Gaussian moved by δ, whose divergence is KL[N(m, S) ‖ N(0, I)] + mᵀδ + ½δᵀδ.

    :param q: N(m, S).
    :param shift: δ, a block ``(..., M_b)`` each.
    :param weigh: makes a 0 of some shape, by which objectives tell the divergence's weight.
    """

    def __init__(self, q: Gaussian, shift: Sequence[Tensor], weigh: Optional[partial[Tensor]] = None) -> None:
        self.q, self.shift, self.weigh = q, list(shift), weigh
        self.sizes, self.batch_shape = q.sizes, q.batch_shape

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
        heard = Heard(q, self.unit)
        shift = Lift.apply(shift, self.unit)
        noise = drawn.noise
        away = torch.linalg.solve_triangular(drawn.root.mT, noise[:, None], upper=True)[:, 0]
        along = away / (1 + noise.square().sum())

        def hear(grad: Optional[Tensor]) -> None:
            if grad is not None:
                heard.draws[id(along)] = along, grad.detach()
                self.note(heard)

        if shift.requires_grad:
            shift.register_hook(hear)
        return Shifted(q, shift.split(self.sizes, -1), partial(weighed, self, heard))

    def most_by_draws(self) -> float:
        return 1.0  # a step's length is bounded by its own size

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        for own, grad in heard.draws.values():
            level, window = self.level, min(self.steps_taken + 1, _WINDOW)
            for share, along, by_shift in by_draws(own, grad):
                natural = side_by_side(heard.base.covariance_times(by_shift.split(self.sizes, -1)))
                apart = natural / total[..., None] - level
                square = (by_shift * natural).sum(-1) / total.square()
                fine = (apart.isfinite().all(-1) & (total > 0))[..., None]
                apart = torch.where(fine, apart, 0.0)
                self.level = self.level + share * (apart / window)
                step = (rate / (1 + square).sqrt())[..., None, None] * apart[..., None] * along
                self.slope = self.slope - share * step
