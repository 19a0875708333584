"""Gaussian sites: a likelihood as N(zₙ | fₙ, 1/λₙ) at the training inputs, read off the model.

They are held as (λ, λ(z − μ)), so that λ = 0, a masked or uninformative datum, is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor

from ..modules import AbstractModule, size_buffers
from ..numerics.linalg import over_lower, over_upper, wider


@dataclass(frozen=True)
class Sites:
    """Gaussian sites at inputs.

    :param inputs: X, ``(N, D)``.
    :param precision: λ ≥ 0, ``(..., N)``.
    :param linear: λ(z − μ), relative to the prior mean, ``(..., N)``.
    :param exact: whether they are the likelihood itself, wherever it is expanded.
    """

    inputs: Tensor
    precision: Tensor
    linear: Tensor
    exact: bool = False

    @classmethod
    def none(cls, inputs: Tensor, batch_shape: Sequence[int]) -> Sites:
        """Sites of precision 0, for data that nothing is known of."""
        zeros = inputs.new_zeros(*batch_shape, inputs.shape[-2])
        return cls(inputs, zeros, zeros)

    def detached(self) -> Sites:
        """These at the same inputs, without their graph."""
        return Sites(self.inputs, self.precision.detach(), self.linear.detach())


_FARTHEST = 3.0  # that one update moves a pull, in standard deviations
_CAREFUL = 0.105  # the largest rate where a curvature is cut
_WIDEST = 4.0  # a cavity's variance, over the prior's
_REACH = 10.0  # of a site's mean from the marginal's, where data are projected


def update(
    sites: Sites,
    gradient: Tensor,
    curvature: Tensor,
    marginals: tuple[Tensor, Tensor],
    rate: Union[float, Tensor],
    farthest: float = _FARTHEST,
) -> Sites:
    """One damped step of Gaussian sites towards λ = h and λ(z − m) = g, their pull on f at the marginal's mean m.

    :param gradient: g, ``(..., N)``; ``curvature``: h, 0 where a negative one is cut.
    :param marginals: m − μ and v; the graph of μ is the prior mean's: z stays where it is when μ moves.
    :param farthest: that a pull moves, in standard deviations of the mean.
    """
    # Of conjugate-computation VI (Khan and Lin, 2017, eq. 9 and 10) g = E[ℓ'] and h = −E[ℓ''] under the marginals; of
    # expectation propagation they are the tilted distribution's factor to the cavity. No guard moves the fixed point.
    away, variance = marginals
    centre, variance = away.detach(), variance.clamp(min=torch.finfo(variance.dtype).tiny)
    # A datum without pull or curvature is masked, and dropped at once: test_a_mask_that_changes_drops_what_was_seen.
    gone = (gradient == 0) & (curvature == 0)
    # Where ℓ is not concave a full step jumps to and fro, and with rates of their own small ones may lower the bound.
    careful = rate.clamp(max=_CAREFUL) if isinstance(rate, Tensor) else min(rate, _CAREFUL)
    step = rate + (careful - rate) * (curvature == 0).to(curvature)
    # λ ← (1 − ρ)λ + ρh
    precision = torch.where(gone, 0.0, (1 - step) * sites.precision + step * curvature)
    # λ(z − m), the sites' own pull at the mean
    pull = sites.linear - sites.precision * centre
    # Counts far from the prior would throw means to where expectations overflow (tilted moments do not).
    size = torch.maximum(precision, precision.mean(-1, keepdim=True)) + 0.01 / variance
    limit = farthest * variance.sqrt() * size.detach()
    change = (step * (gradient - pull)).nan_to_num(0.0).clamp(-limit, limit)
    # λ(z − μ) from the pull at m
    return Sites(sites.inputs, precision, torch.where(gone, 0.0, pull + change + precision * away))


def within_reach(sites: Sites, kept: Sites, marginals: tuple[Tensor, Tensor]) -> Sites:
    """Sites with precisions raised so that |z − m| ≤ ``_REACH`` √(v + 1/λ̄), their pull on f at m kept."""
    # Projected data are a sum of z's; as λ → 0 (negative curvature, cut), z = m + g/λ runs away. λ̄ is the larger mean
    # precision, these sites' or those kept before: the same at the fixed point whatever the damping.
    away, variance = marginals
    # |z − m| = |pull|/λ
    pull = sites.linear - sites.precision * away
    typical = torch.maximum(*(part.precision.detach().mean(-1, keepdim=True) for part in (sites, kept)))
    spread = (variance + 1 / typical.clamp(min=torch.finfo(typical.dtype).tiny)).sqrt()
    precision = torch.maximum(sites.precision, pull.detach().abs() / (_REACH * spread))
    return Sites(sites.inputs, precision, pull + precision * away)


@dataclass
class Cavity:
    """Marginals of φᵀw under the cavities, (..., B), and what they are made of."""

    mean: Tensor
    variance: Tensor
    log_ratio: Tensor  # G(cavity) − G(q)
    valid: Tensor  # whether the variance is positive
    loc: Tensor  # the cavities' means of w, (..., B, M)
    cov: Tensor  # their covariances of w and φᵀw, (..., B, M)
    marginal: tuple[Tensor, Tensor]  # q's mean and variance


def cavity_of(phi: Tensor, rows: Tensor, precision: Tensor, linear: Tensor, loc: Tensor, factor: Tensor) -> Cavity:
    """Marginals of φᵀw under q(w) without one site each, exp(−½ν(φ̂ᵀw)² + bφ̂ᵀw) with rows φ̂.

    With S = P⁻¹ and e = 1 − νφ̂ᵀSφ̂, V⁻ = S + νSφ̂φ̂ᵀS/e, μ⁻ = V⁻(Pm − bφ̂) and G(cavity) − G(q) =
    ½(−log e + (ν(φ̂ᵀm)² − 2bφ̂ᵀm + b²φ̂ᵀSφ̂)/e). Under a power α, ``precision`` is αν and ``linear`` αb, ``(..., N)``;
    ``loc`` is m, ``(..., M)``, ``factor`` the lower Cholesky factor of P.
    """
    # Eq. 14 and 15 in w, where υ is φ̂ and Σ is S.
    solved = over_lower(over_upper(rows, factor), factor)  # Sφ̂
    spread, centre = (solved * rows).sum(-1), (rows @ loc[..., None])[..., 0]
    left = 1 - precision * spread
    valid = is_valid(left, spread, rows)
    left = torch.where(valid, left, 1.0)
    cov = over_lower(over_upper(phi, factor), factor)
    across, spread_here, centre_here = (solved * phi).sum(-1), (cov * phi).sum(-1), (phi @ loc[..., None])[..., 0]
    # μ⁻ = m + (ν(φ̂ᵀm − bφ̂ᵀSφ̂)/e − b)Sφ̂
    shift = precision * (centre - linear * spread) / left - linear
    # Eq. 29
    quadratic = precision * centre.square() - 2 * linear * centre + linear.square() * spread
    return Cavity(
        mean=centre_here + shift * across,
        variance=spread_here + precision * across.square() / left,
        log_ratio=0.5 * (quadratic / left - left.log()),
        valid=valid,
        loc=loc[..., None, :] + shift[..., None] * solved,
        cov=cov + (precision * across / left)[..., None] * solved,
        marginal=(centre_here, spread_here),
    )


def is_valid(left: Tensor, spread: Tensor, rows: Tensor) -> Tensor:
    """Whether cavities, of variance φ̂ᵀSφ̂/e, have one that is positive and not far above the prior's."""
    # It exceeds the prior's only by negative sites of other data; without bounds it goes to infinity.
    rounding = 1000 * torch.finfo(left.dtype).eps
    return (left > rounding) & (spread <= _WIDEST * rows.square().sum(-1) * left)


class KeptSites(AbstractModule):
    """Sites as they were read off the model at the last training step, or at the medians after it. Some inputs,
    ``(N, D)``, say the dtype, the device and D.
    """

    def __init__(self, inputs: Tensor, batch_shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("inputs", inputs.new_zeros(0, inputs.shape[-1]))
        for name in ("precision", "linear"):
            self.register_buffer(name, inputs.new_zeros(*batch_shape, 0))
        self.register_buffer("truncated", torch.zeros((), dtype=torch.long, device=inputs.device))
        self.start_over()

    def start_over(self) -> None:
        """Forget the marginals of the posterior that these sites gave, updates' share of their rate, and how many were
        cut.
        """
        pace = self.precision.new_ones((), dtype=wider(self.precision))
        self.progress: dict[str, Any] = {"mean": None, "variance": None, "pace": pace, "halved": self.truncated * 0}

    @property
    def empty(self) -> bool:
        """Whether none were ever read."""
        return self.inputs.shape[0] == 0

    def forward(self) -> Sites:
        """The sites."""
        return Sites(self.inputs, self.precision, self.linear)

    def keep(self, sites: Sites, truncated: Tensor) -> None:
        """Remember sites, without their graph; nothing is copied."""
        # A posterior of before keeps its own: these are replaced, not written to.
        kept, self.inputs = sites.detached(), sites.inputs.detach()
        self.precision, self.linear, self.truncated = kept.precision, kept.linear, truncated

    @property
    def memory(self) -> tuple[Any, ...]:
        """All that steps change, for a step that is to be taken back."""
        return self.inputs, self.precision, self.linear, self.truncated, dict(self.progress)

    @memory.setter
    def memory(self, saved: tuple[Any, ...]) -> None:
        self.inputs, self.precision, self.linear, self.truncated, self.progress = saved

    def _apply(self, function: Callable, *args: object, **kwargs: object) -> Any:
        moved = {name: function(self.progress[name]) for name in ("pace", "halved")}
        self.progress |= {"mean": None, "variance": None, **moved}
        return super()._apply(function, *args, **kwargs)

    def forget(self) -> None:
        """Be as if no sites had been read."""
        self.inputs, self.precision, self.linear = self.inputs[:0], self.precision[..., :0], self.linear[..., :0]
        self.start_over()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        size_buffers(self, state_dict, prefix)
        state_dict.pop(prefix + "corrected", None)  # of releases that kept other sites for predictions
        self.progress |= {"mean": None, "variance": None}
        super()._load_from_state_dict(state_dict, prefix, *args)
