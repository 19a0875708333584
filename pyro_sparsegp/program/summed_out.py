"""Densities without the discrete latents upstream: sums over these of products over plates, in log space."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..numerics.shapes import broadcast_shapes

__all__ = ["PLATES", "Factor", "IntractableError", "Plates", "SummedOut", "Sums", "added"]

PLATES = 4  # dimensions from the right that are left to plates
Plates = Mapping[Any, Any]  # Pyro's frames, by name and, of a plate that is iterated over, the number it is at


class IntractableError(ValueError):
    """A sum whose terms have no order in which they can be taken."""


@dataclass(frozen=True)
class Factor:
    """A log density.

    :param latents: the dimensions, from the right, of the discrete latents that it depends on.
    :param plates: those that it stands in.
    :param evaluate: gives it, the latents' dimensions in front of the plates'.
    """

    latents: frozenset[int]
    plates: Plates
    evaluate: Callable[[], Tensor]


@dataclass
class Sums:
    """Sums over discrete latents, from the innermost plates outwards (Obermeyer et al., 2019, algorithm 1).

    Pyro's own ``contract_tensor_tree`` multiplies exponentials of factors, each relative to its own maximum: where
    two disagree by 800 nats all products are 0. Here factors are added up before the one logsumexp.

    :param latents: the plates of each latent, by its dimension.
    :param numbers: by plate, the numbers by which rows of others pick its elements: z[group].
    """

    latents: dict[int, Plates]
    numbers: Mapping[Any, Sequence[Tensor]]

    def row_of(self, key: Any, plates: Plates) -> Optional[tuple[Any, Tensor]]:
        """Which of the plates has rows that belong to elements of plate ``key``, and their numbers."""
        for index in self.numbers.get(key, ()):
            for frame in plates.values():
                if frame.vectorized and frame.size == len(index):
                    return frame, index
        return None

    def contract(self, factors: Sequence[Factor]) -> list[Factor]:
        """The factors that are left when all latents are summed out.

        :raises IntractableError: if there is no order of summing.
        """
        left = list(factors)
        while dims := frozenset().union(*(factor.latents for factor in left)):
            for plates in sorted((self.latents[dim] for dim in dims), key=len, reverse=True):
                own = frozenset(dim for dim in dims if self.latents[dim].keys() == plates.keys())
                touched = [factor for factor in left if factor.latents & own]
                if all(self._can_be_reduced(factor, plates, own) for factor in touched):
                    break
            else:
                raise IntractableError
            left = [factor for factor in left if not factor.latents & own]
            left.append(_summed([self.reduced(factor, plates) for factor in touched], own, plates))
        return left

    def _can_be_reduced(self, factor: Factor, plates: Plates, own: frozenset[int]) -> bool:
        """Whether a factor's product over all other plates is of latents that stand outside of these."""
        added = [self.row_of(key, factor.plates) for key in plates if key not in factor.plates]
        gone = factor.plates.keys() - plates.keys()
        return None not in added and not any(self.latents[dim].keys() & gone for dim in factor.latents - own)

    def reduced(self, factor: Factor, plates: Plates) -> Factor:
        """Its product over all plates but these, in which its rows may stand by their numbers."""
        added = {key: self.row_of(key, factor.plates) for key in plates if key not in factor.plates}
        rows = [found[0] for found in added.values() if found]
        gone = [f for key, f in factor.plates.items() if key not in plates and f.vectorized and f not in rows]

        def evaluate() -> Tensor:
            total = padded(factor.evaluate())
            for frame in (*gone, *rows):
                total = total.expand(_with_size(total, frame.dim, frame.size))
            for frame in gone:
                total = total.sum(frame.dim, keepdim=True)
            for key, found in added.items():
                if found:
                    row, index = found
                    total = total.new_zeros(_with_size(total, row.dim, plates[key].size)).index_add(
                        row.dim, index, total
                    )
                    total = total.transpose(row.dim, plates[key].dim)
            return total

        return Factor(factor.latents, plates, evaluate)

    def at_rows(self, total: Tensor, factor: Factor, plates: Plates, shape: Sequence[int]) -> Tensor:
        """What elements of ``plates`` have, at each row of a factor, of this shape: the way back of :meth:`reduced`."""
        for key in plates:
            found = None if key in factor.plates else self.row_of(key, factor.plates)
            if found:
                row, index = found
                total = total.index_select(plates[key].dim, index).transpose(row.dim, plates[key].dim)
        return total.expand(broadcast_shapes(total.shape, tuple(shape)))


def _with_size(total: Tensor, dim: int, size: int) -> list[int]:
    shape = list(total.shape)
    shape[dim] = size
    return shape


def padded(log_density: Tensor) -> Tensor:
    """With all plates' dimensions."""
    return log_density.reshape(*[1] * max(0, PLATES - log_density.dim()), *log_density.shape)


def added(factors: Sequence[Factor]) -> Tensor:
    """The sum of factors as they are now."""
    return functools.reduce(torch.add, [factor.evaluate() for factor in factors])


def _summed(factors: Sequence[Factor], own: frozenset[int], plates: Plates) -> Factor:
    def evaluate() -> Tensor:
        return added(factors).logsumexp([-dim for dim in own], keepdim=True)

    return Factor(frozenset().union(*(factor.latents for factor in factors)) - own, plates, evaluate)


class SummedOut(TorchDistribution):
    """What is left of a distribution when discrete latents upstream are summed out, given the sites before.

    :param fn: with their dimensions in front of the plates'.
    :param own: log p(y | z) at y: its latents and plates, but for the value.
    :param mask: of the site.
    :param before: log p(z), log p(y₁ | z), ..., log p(yᵢ₋₁ | z).
    :param normalised: whether what came before sums to 1.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False  # no draw of a mixture passes a gradient on

    def __init__(self, fn: Any, own: Factor, mask: Any, before: Sequence[Factor], sums: Sums, normalised: bool) -> None:
        self.fn, self.own, self.left_out_by = fn, own, mask
        self.before, self.sums, self.normalised = before, sums, normalised
        # A site joins all that it depends on, so that one factor is left: the plates whose elements have a density.
        (left,) = sums.contract([*before, own])
        self.shared = left.plates
        depth = max((-frame.dim for frame in own.plates.values() if frame.vectorized), default=0)
        super().__init__(torch.Size(fn.batch_shape[len(fn.batch_shape) - depth :]), fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution given z."""
        return self.fn.support

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y | what came before); of rows that share a z, each one's share."""

        def at_value() -> Tensor:
            return torch.as_tensor(scale_and_mask(self.fn.log_prob(value), mask=self.left_out_by))

        total = self._summed([*self.before, Factor(self.own.latents, self.own.plates, at_value)])
        if not self.normalised:
            total = total - self._summed(self.before)
        if self.shared.keys() != self.own.plates.keys():
            total = self._shares(total)
        return total.reshape(total.shape[PLATES - len(self.batch_shape) :]).expand(self.batch_shape)

    def _summed(self, factors: Sequence[Factor]) -> Tensor:
        total = added([self.sums.reduced(factor, self.shared) for factor in self.sums.contract(factors)])
        return total.reshape(total.shape[total.dim() - PLATES :])

    def _shares(self, total: Tensor) -> Tensor:
        """What elements have, in equal parts at each row that is not masked."""
        plates = (*[1] * (PLATES - len(self.batch_shape)), *self.batch_shape)
        mask = self.left_out_by
        counted = mask if isinstance(mask, Tensor) else torch.ones((), dtype=torch.bool, device=total.device)
        counted = padded(counted.to(total.dtype)).expand(plates)
        rows = Factor(frozenset(), self.own.plates, lambda: counted)
        share = total / self.sums.reduced(rows, self.shared).evaluate().clamp(min=1)
        return self.sums.at_rows(share, self.own, self.shared, plates) * counted

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A draw of y, z drawn with it: in the plates that they share."""
        if tuple(sample_shape):
            return torch.stack([self.sample() for _ in range(torch.Size(sample_shape).numel())]).reshape(
                *sample_shape, *self.shape()
            )
        if any(plates.keys() != self.shared.keys() for plates in self.sums.latents.values()):
            raise NotImplementedError("no draw where discrete latents stand in several sets of plates")
        joint = padded(added([self.sums.reduced(factor, self.shared) for factor in self.before]))
        plates = self.fn.batch_shape[-PLATES:]
        lead = broadcast_shapes(joint.shape[:-PLATES], self.fn.batch_shape[:-PLATES])
        joint = joint.expand(*lead, *joint.shape[-PLATES:]).flatten(0, len(lead) - 1)
        chosen = torch.distributions.Categorical(logits=joint.movedim(0, -1)).sample()
        index = self.sums.at_rows(chosen, self.own, self.shared, plates)
        values = self.fn.expand((*lead, *plates)).sample().reshape(lead.numel(), *plates, *self.event_shape)
        index = index.reshape(1, *index.shape, *[1] * len(self.event_shape)).expand(1, *values.shape[1:])
        return values.gather(0, index)[0].reshape(self.shape())

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Only to the shape that it has."""
        if torch.Size(batch_shape) != self.batch_shape:
            raise NotImplementedError("a distribution with discrete variables summed out has the shape of its plates")
        return self
