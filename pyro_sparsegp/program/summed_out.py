"""What is left of a distribution when discrete latents upstream are summed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..numerics.shapes import broadcast_shapes
from .contraction import PLATES, Factor, contract, left_over, padded, reduced, spread

__all__ = ["SummedOut"]


class SummedOut(TorchDistribution):
    """What is left of a distribution when discrete variables upstream are summed out, given the sites before.

    :param fn: with their dimensions in front of the plates'.
    :param own: log p(y | z) at y: its latents and plates, but for the value.
    :param mask: of the site.
    :param before: log p(z), log p(y₁ | z), ..., log p(yᵢ₋₁ | z).
    :param latents: the plates of each z, by its dimension.
    :param normalised: whether what came before sums to 1.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        fn: Any,
        own: Factor,
        mask: Any,
        before: Sequence[Factor],
        latents: dict[int, frozenset[Any]],
        normalised: bool,
    ) -> None:
        self.fn, self.own, self.left_out_by = fn, own, mask
        self.before, self.latents, self.normalised = before, latents, normalised
        left = contract([*before, own], latents)
        self.shared = left_over(left)  # the plates whose elements have a density each
        depth = max((-frame.dim for frame in own.plates.values() if frame.vectorized), default=0)
        super().__init__(torch.Size(fn.batch_shape[len(fn.batch_shape) - depth :]), fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution given z."""
        return self.fn.support

    @property
    def has_rsample(self) -> bool:
        """No draw of a mixture passes a gradient on."""
        return False

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y | what came before); of rows that share a z, each one's share."""

        def at_value() -> Tensor:
            return torch.as_tensor(scale_and_mask(self.fn.log_prob(value), mask=self.left_out_by))

        own = Factor(self.own.latents, self.own.plates, self.own.belongs, at_value)
        total = self._summed([*self.before, own])
        if not self.normalised:
            total = total - self._summed(self.before)
        if self.shared != frozenset(own.plates):
            total = self._shares(total)
        return total.reshape(total.shape[PLATES - len(self.batch_shape) :]).expand(self.batch_shape)

    def _summed(self, factors: Sequence[Factor]) -> Tensor:
        parts = [reduced(factor, self.shared).evaluate() for factor in contract(factors, self.latents)]
        total = sum(parts[1:], parts[0])
        return total.reshape(total.shape[total.dim() - PLATES :])

    def _shares(self, total: Tensor) -> Tensor:
        """What elements have, in equal parts at each row that is not masked."""
        plates = (*[1] * (PLATES - len(self.batch_shape)), *self.batch_shape)
        mask = self.left_out_by
        counted = mask if isinstance(mask, Tensor) else torch.ones((), dtype=torch.bool, device=total.device)
        counted = padded(counted.to(total.dtype)).expand(plates)
        rows = Factor(frozenset(), self.own.plates, self.own.belongs, lambda: counted)
        share = total / reduced(rows, self.shared).evaluate().clamp(min=1)
        return spread(share, self.own, self.shared, plates) * counted

    def _joint(self) -> Tensor:
        """log p(z, what came before), each z a dimension in front, at each element that they share."""
        if any(plates != self.shared for plates in self.latents.values()):
            raise NotImplementedError(
                "no draw, mean or variance where discrete latents stand in several sets of plates"
            )
        parts = [reduced(factor, self.shared).evaluate() for factor in self.before]
        joint = padded(sum(parts[1:], parts[0]))
        lead = broadcast_shapes(joint.shape[:-PLATES], self.fn.batch_shape[:-PLATES])
        return joint.expand(*lead, *joint.shape[-PLATES:])

    def _at_rows(self, elements: Tensor) -> Tensor:
        return spread(elements, self.own, self.shared, self.fn.batch_shape[-PLATES:])

    def _parts(self, of: Callable[[Any], Tensor], joint: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of all values of z, in front, and a property of the distribution for each."""
        plates = self.fn.batch_shape[-PLATES:]
        lead = joint.shape[:-PLATES]
        parts = of(self.fn.expand((*lead, *plates))).reshape(lead.numel(), *plates, *self.event_shape)
        return joint.flatten(0, len(lead) - 1).softmax(0), parts

    def _mean(self, of: Callable[[Any], Tensor]) -> Tensor:
        weights, parts = self._parts(of, self._joint())
        weights = self._at_rows(weights)
        return (weights.reshape(*weights.shape, *[1] * len(self.event_shape)) * parts).sum(0).reshape(self.shape())

    @property
    def mean(self) -> Tensor:
        """Σ_z p(z) E[y | z]."""
        return self._mean(lambda fn: fn.mean)

    @property
    def variance(self) -> Tensor:
        """Σ_z p(z) E[y² | z] − (Σ_z p(z) E[y | z])²."""
        return self._mean(lambda fn: fn.variance + fn.mean.square()) - self.mean.square()

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A draw of y, z drawn with it."""
        if tuple(sample_shape):
            draws = [self.sample() for _ in range(torch.Size(sample_shape).numel())]
            return torch.stack(draws).reshape(*sample_shape, *self.shape())
        weights, values = self._parts(lambda fn: fn.sample(), self._joint())
        chosen = self._at_rows(torch.distributions.Categorical(weights.movedim(0, -1)).sample())
        index = chosen.reshape(1, *chosen.shape, *[1] * len(self.event_shape)).expand(1, *values.shape[1:])
        return values.gather(0, index)[0].reshape(self.shape())

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Only to the shape that it has."""
        if torch.Size(batch_shape) != self.batch_shape:
            raise NotImplementedError("a distribution with discrete variables summed out has the shape of its plates")
        return self
