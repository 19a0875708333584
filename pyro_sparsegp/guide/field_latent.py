"""Latents of a field as Pyro's sites: each one's part of a draw of x, and the priors that densities are relative to."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributions import register_kl

from ..gaussians import Share
from .coupled import OfPrior
from .field import standardised


class FieldLatent(OfPrior):
    """A normal latent's posterior in a run: its part of a draw of the field."""

    has_rsample = True

    def __init__(self, prior: Any, share: Share) -> None:
        super().__init__(prior)
        self.share = share
        self.drawn: Optional[list[Tensor]] = None  # x, where its value is a draw of its own

    @property
    def mean(self) -> Tensor:
        """loc + Lm."""
        return standardised(self.prior, torch.cat(self.share.loc, -1))

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        self.drawn = self.share.rsample(torch.Size(sample_shape))
        return standardised(self.prior, torch.cat(self.drawn, -1))

    def log_prob(self, value: Tensor) -> Tensor:
        """log dq/dp of the draw of all, where this is the member that counts it, spread over the batch."""
        return self._spread(self.share.log_ratio(self.drawn or []))

    def kl(self) -> Tensor:
        """The divergence of the whole field, where this is the member that counts it."""
        return self._spread(self.share.kl())

    def _spread(self, total: Tensor) -> Tensor:
        return (total / max(self.batch_shape.numel(), 1)).expand(self.batch_shape)


class BaseMeasure(OfPrior):
    """A prior that densities are relative to: it has density 1."""

    def log_prob(self, value: Tensor) -> Tensor:
        return value.new_zeros(self.batch_shape)


@register_kl(FieldLatent, BaseMeasure)
def _kl_field_latent(q: FieldLatent, p: BaseMeasure) -> Tensor:
    return q.kl()
