"""Gaussian sites: a likelihood as N(zₙ | fₙ, 1/λₙ) at the training inputs, read off the model or free.

They are held as (λ, λ(z − μ)), so that λ = 0, a masked or uninformative datum, is harmless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..modules import AbstractModule

__all__ = ["FreeSites", "KeptSites", "Sites"]


@dataclass(frozen=True)
class Sites:
    """Gaussian sites at inputs.

    :param inputs: X, ``(N, D)``.
    :param precision: λ ≥ 0, ``(..., N)``.
    :param linear: λ(z − μ), relative to the prior mean, ``(..., N)``.
    """

    inputs: Tensor
    precision: Tensor
    linear: Tensor

    @classmethod
    def none(cls, inputs: Tensor, batch_shape: Sequence[int]) -> Sites:
        """Sites of precision 0, such as those of data that nothing is known of."""
        zeros = inputs.new_zeros(*batch_shape, inputs.shape[-2])
        return cls(inputs, zeros, zeros)


_STEP = 3.0  # of one update of a site's mean, in standard deviations
_CAREFUL = 0.15  # the largest share of the rate where the curvature is cut
_REACH = 10.0  # of a site's mean from the marginal's, where data are projected


def update(
    kept: Sites,
    gradient: Tensor,
    curvature: Tensor,
    mean: Tensor,
    variance: Tensor,
    prior_mean: Tensor,
    rate: float,
    pace: float = 1.0,
) -> Sites:
    """One damped step of conjugate-computation VI (Khan and Lin, 2017, eq. 9 and 10).

    The fixed point has λ = −E[ℓ''] and λ(z − m) = E[ℓ'], expectations under the marginals N(m, v). A step that
    would move a site's pull on f by more than ``_STEP`` standard deviations is cut, which leaves the fixed point.
    Data without any pull or curvature (masked ones) are dropped at once.

    :param kept: the sites that the marginals come from.
    :param gradient: E[ℓ'].
    :param curvature: −E[ℓ''], cut at 0.
    :param prior_mean: μ at the inputs.
    :param rate: 1 is the undamped step.
    :param pace: the share of the rate that is taken.
    """
    gone = (gradient == 0) & (curvature == 0)
    # Where ℓ is not concave here, a full step jumps to and fro. Small steps have one rate at all rows, that of the
    # bound's ascent: with rates of their own they may lower it however small they are.
    careful = min(pace, _CAREFUL)
    step = rate * (careful + (pace - careful) * (curvature > 0).to(curvature))
    precision = torch.where(gone, 0.0, (1 - step) * kept.precision + step * curvature)
    pull = kept.linear - kept.precision * (mean - prior_mean.detach())  # of the kept sites at m; E[ℓ'] at the end
    size = torch.maximum(precision, precision.mean(-1, keepdim=True)) + 0.01 / variance
    limit = _STEP * variance.sqrt() * size.detach()
    change = step * (gradient - pull)
    change = change.nan_to_num(0.0).clamp(-limit, limit)
    # z stays where it is when μ moves.
    linear = torch.where(gone, 0.0, pull + change + precision * (mean - prior_mean))
    return Sites(kept.inputs, precision, linear)


def within_reach(sites: Sites, kept: Sites, mean: Tensor, variance: Tensor, prior_mean: Tensor) -> Sites:
    """Sites with precisions raised so that |z − m| ≤ ``_REACH`` √(v + 1/λ̄), their pull on f at m kept.

    Projected data are a sum of z's; as λ → 0 (negative curvature, cut), z = m + E[ℓ']/λ runs away.

    :param kept: the sites before; λ̄ is the larger mean precision, the same at the fixed point whatever the damping.
    """
    pull = sites.linear - sites.precision * (mean - prior_mean)
    typical = torch.maximum(*(part.precision.detach().mean(-1, keepdim=True) for part in (sites, kept)))
    spread = (variance + 1 / typical.clamp(min=torch.finfo(typical.dtype).tiny)).sqrt()
    precision = torch.maximum(sites.precision, pull.detach().abs() / (_REACH * spread))
    return Sites(sites.inputs, precision, pull + precision * (mean - prior_mean))


class KeptSites(AbstractModule):
    """Sites as they were read off the model at the last training step, or at the medians after it.

    :param like: a tensor of the dtype and device wanted.
    :param columns: D.
    """

    def __init__(self, like: Tensor, batch_shape: Sequence[int], columns: int) -> None:
        super().__init__()
        self.register_buffer("inputs", like.new_zeros(0, columns))
        self.register_buffer("precision", like.new_zeros(*batch_shape, 0))
        self.register_buffer("linear", like.new_zeros(*batch_shape, 0))
        self.register_buffer("truncated", torch.zeros((), dtype=torch.long, device=like.device))
        self.marginals: Optional[tuple[Tensor, Tensor]] = None  # of the posterior that these sites gave
        # Where a look at the guide left them: the precisions of training that it started from, and both terms.
        self.rest: Optional[tuple[Tensor, Tensor, Tensor]] = None
        # Of updates: a share of their rate, the last one's size in standard deviations, and how many were cut.
        self.pace, self.change, self.halved = 1.0, math.inf, 0

    @property
    def empty(self) -> bool:
        """Whether none were ever read."""
        return self.inputs.shape[0] == 0

    def forward(self) -> Sites:
        """The sites."""
        return Sites(self.inputs, self.precision, self.linear)

    def keep(self, sites: Sites, truncated: Tensor) -> None:
        """Remember sites, without their graph; nothing is copied."""
        self.inputs, self.precision, self.linear = (
            part.detach() for part in (sites.inputs, sites.precision, sites.linear)
        )
        self.truncated = truncated

    @property
    def memory(self) -> tuple[Any, ...]:
        """All that steps change, for a step that is to be taken back."""
        return self.inputs, self.precision, self.linear, self.truncated, self.progress

    @memory.setter
    def memory(self, saved: tuple[Any, ...]) -> None:
        self.inputs, self.precision, self.linear, self.truncated, self.progress = saved

    def settled(self, rows: torch.Size) -> Optional[Sites]:
        """Where a look left the sites, if training has not moved them since.

        :param rows: the shape of the sites wanted.
        """
        if self.rest is None or self.rest[0] is not self.precision or self.rest[1].shape != rows:
            return None
        return Sites(self.inputs, *self.rest[1:])

    def settle(self, sites: Sites) -> None:
        """Let the next look start where this one ended, at ``sites``."""
        self.rest = self.precision, sites.precision.detach(), sites.linear.detach()

    def reorder(self, order: Tensor) -> None:
        """Follow the data into another order of their rows."""
        self.inputs = self.inputs[order]
        self.precision, self.linear = self.precision[..., order], self.linear[..., order]
        if self.marginals is not None:
            self.marginals = self.marginals[0][..., order], self.marginals[1][..., order]

    def forget(self) -> None:
        """Be as if no sites had been read."""
        self.inputs, self.precision, self.linear = self.inputs[:0], self.precision[..., :0], self.linear[..., :0]
        self.marginals = None
        self.pace, self.change, self.halved = 1.0, math.inf, 0

    @property
    def progress(self) -> dict[str, Any]:
        """What updates go on from besides the sites: training that is to be as if it had not stopped needs it."""
        return {"marginals": self.marginals, "pace": self.pace, "change": self.change, "halved": self.halved}

    @progress.setter
    def progress(self, saved: dict[str, Any]) -> None:
        self.marginals, self.pace = saved["marginals"], saved["pace"]
        self.change, self.halved = saved["change"], saved["halved"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("inputs", "precision", "linear"):
            if prefix + name in state_dict:
                setattr(self, name, getattr(self, name).new_zeros(state_dict[prefix + name].shape))
        state_dict.pop(prefix + "corrected", None)  # of releases that kept other sites for predictions
        self.marginals = None
        super()._load_from_state_dict(state_dict, prefix, *args)


class FreeSites(AbstractModule):
    """Sites as 2N free parameters: the precision λₙ² and the linear term (Adam et al., 2018, eq. 4 and 6).

    :param inputs: X, ``(N, D)``.
    :param scale: the prior standard deviation at X; the precisions start at a hundredth of the prior's.
    """

    empty = False

    def __init__(self, inputs: Tensor, batch_shape: Sequence[int], scale: Optional[Tensor] = None) -> None:
        super().__init__()
        self.register_buffer("inputs", inputs.detach())
        shape = (*batch_shape, inputs.shape[-2])
        start = inputs.new_full(shape, 0.1)
        if scale is not None:
            start = start / scale.detach().clamp(min=1e-3)
        # λ = 0 is a saddle in this parameter: it starts away from it.
        self.root = PyroParam(start)
        self.linear = PyroParam(inputs.new_zeros(shape))

    def forward(self) -> Sites:
        """The sites."""
        root: Any = self.root
        linear: Any = self.linear
        return Sites(self.inputs, root.square(), linear)

    def reorder(self, order: Tensor) -> None:
        """Nothing: they know their own inputs."""
