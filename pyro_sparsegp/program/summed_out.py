"""Densities without the discrete latents upstream: sums over these of products over plates, in log space.

Pyro's own ``contract_tensor_tree`` multiplies exponentials of factors, each relative to its own maximum: where two
disagree by 800 nats all products are 0. Here factors are added up before the one logsumexp.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..numerics.shapes import broadcast_shapes
from .declared import rewrapped
from .traces import bare, filled, unmasked_rows

PLATES = 4  # dimensions from the right that are left to plates
Plates = Mapping[str, Any]  # Pyro's frames by name; none of a plate that is iterated over, whose sites are single ones


class Factor(NamedTuple):
    """A log density."""

    latents: frozenset[int]  # the dimensions, from the right, of the discrete latents that it depends on
    plates: Plates  # those that it stands in
    value: Tensor  # the latents' dimensions in front of the plates'


@dataclass
class Group:
    """Discrete latents that meet in a site, and the log densities of all sites that depend on them."""

    names: Sequence[str]  # of all discrete latents, those of other groups too, in the order of their dimensions
    numbers: Mapping[str, Sequence[Tensor]]  # by plate, those by which rows of others pick its elements: z[group]
    scale: Any  # of them all
    latents: dict[int, Plates] = field(default_factory=dict)  # the plates of each, by its dimension
    # They give the log densities so far, with what masks leave out or without masks.
    terms: list[Callable[[bool], Factor]] = field(default_factory=list)

    def picked(self, plates: Iterable[str], rows: Plates) -> dict[str, tuple[Any, Tensor]]:
        """By plate that is not among ``rows``, which of these has rows that pick its elements, and their numbers."""
        pairs = [
            (key, (frame, index))
            for key in plates
            for index in self.numbers.get(key, ())
            for frame in rows.values()
            if key not in rows and frame.size == len(index)
        ]
        return dict(reversed(pairs))  # the first of each

    def contract(self, factors: Sequence[Factor]) -> list[Factor]:
        """The factors that are left when all latents are summed out, from the innermost plates outwards (Obermeyer et
        al., 2019, algorithm 1).

        :raises ValueError: naming the latents, if there is no order of summing.
        """
        dims = frozenset().union(*(factor.latents for factor in factors))
        if not dims:
            return list(factors)
        # Of latents in plates b inside of a, Σ_z ∏_b = ∏_b Σ_z: those in the most plates are summed out first, each
        # after the product over what its factors have beyond these plates.
        for plates in sorted((self.latents[dim] for dim in dims), key=len, reverse=True):
            own = frozenset(dim for dim in dims if self.latents[dim].keys() == plates.keys())
            touched = [factor for factor in factors if factor.latents & own]
            if all(self._can_be_reduced(factor, plates, own) for factor in touched):
                total = self.product(touched, plates)
                # log Σ_z exp Σᵢ log φᵢ(z), in one logsumexp of the sum: test_group_classes.py::test_groups.
                summed = total.value.logsumexp([-dim for dim in own], keepdim=True)
                left = [factor for factor in factors if not factor.latents & own]
                return self.contract([*left, Factor(total.latents - own, plates, summed)])
        raise ValueError(
            f"the discrete sites {[self.names[dim - PLATES - 1] for dim in sorted(self.latents)]} meet in a "
            "density, and their plates are not nested. Put one of them into the plates of the other, or write "
            "it as a latent with a posterior of its own."
        )

    def _can_be_reduced(self, factor: Factor, plates: Plates, own: frozenset[int]) -> bool:
        """Whether a factor's product over all other plates is of latents that stand outside of these."""
        gone = factor.plates.keys() - plates.keys()
        there = {*factor.plates, *self.picked(plates, factor.plates)}
        return plates.keys() <= there and not any(self.latents[dim].keys() & gone for dim in factor.latents - own)

    def product(self, factors: Sequence[Factor], plates: Plates) -> Factor:
        """The product of factors, of each over all plates but these, in which its rows may stand by their numbers."""
        total: Any = 0.0
        for factor in factors:
            value = padded(factor.value)
            found = self.picked(plates, factor.plates)
            rows = [row for row, _ in found.values()]
            gone = [f for key, f in factor.plates.items() if key not in plates and f not in rows]
            # A factor that is the same for all elements of a plate counts once for each.
            for frame in (*gone, *rows):
                value = value.expand(with_size(value, frame.dim, frame.size))
            for frame in gone:
                value = value.sum(frame.dim, keepdim=True)
            for key, (row, index) in found.items():
                # ∏ over the rows of a group: Σ_n log φₙ where group[n] = g.
                empty = value.new_zeros(with_size(value, row.dim, plates[key].size))
                value = empty.index_add(row.dim, index, value).transpose(row.dim, plates[key].dim)
            total = total + value
        return Factor(frozenset().union(*(factor.latents for factor in factors)), plates, total)

    def at_rows(self, value: Tensor, rows: Plates, plates: Plates, shape: Sequence[int]) -> Tensor:
        """What elements of ``plates`` have, at each row of plates ``rows``: the way back of :meth:`product`."""
        for key, (row, index) in self.picked(plates, rows).items():
            value = value.index_select(plates[key].dim, index).transpose(row.dim, plates[key].dim)
        return value.expand(broadcast_shapes(value.shape, tuple(shape)))


def with_size(value: Tensor, dim: int, size: int) -> list[int]:
    """The shape of a tensor with one size changed."""
    shape = list(value.shape)
    shape[dim] = size
    return shape


def depth(plates: Plates) -> int:
    """How many dimensions from the right they take."""
    return max((-frame.dim for frame in plates.values()), default=0)


def padded(value: Tensor) -> Tensor:
    """With all plates' dimensions."""
    return value.reshape(*[1] * max(0, PLATES - value.dim()), *value.shape)


class SummedOut(TorchDistribution):
    """What is left of a distribution when discrete latents upstream are summed out, given the sites before.

    :param fn: with their dimensions in front of the plates'.
    :param latents: their dimensions.
    :param plates: that the site stands in.
    :param mask: of the site.
    :param group: of the latents, with log p(z), log p(y₁ | z), ..., log p(yᵢ₋₁ | z) as they are now.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False  # no draw of a mixture passes a gradient on
    masked = True

    def __init__(self, fn: Any, latents: frozenset[int], plates: Plates, mask: Any, group: Group) -> None:
        self.given_discrete, self.latents, self.plates, self.site_mask = fn, latents, plates, mask
        self.group, self.before = group, list(group.terms)
        batch_shape = fn.batch_shape[len(fn.batch_shape) - depth(plates) :]
        super().__init__(torch.Size(batch_shape), fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution given z."""
        return self.given_discrete.support

    def without_masks(self) -> SummedOut:
        """The same where no mask leaves anything out: what may be another in the next batch hides no structure."""
        found = copy.copy(self)
        found.masked = False
        return found

    def at(self, value: Tensor, masked: bool) -> Factor:
        """log p(y | z)."""
        fn = self.given_discrete
        density = rewrapped(fn, bare(fn).log_prob(value), masked)
        return Factor(
            self.latents,
            self.plates,
            scale_and_mask(density, mask=unmasked_rows(self.given_discrete, value, self.site_mask) if masked else None),
        )

    def filled(self, value: Tensor) -> Tensor:
        """A value with numbers where masked ones are NaN."""
        return filled(self.given_discrete, value, self.site_mask)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y | what came before); of rows that share a z, each one's share."""
        group, before = self.group, [term(self.masked) for term in self.before]
        # A site joins all that it depends on, so that one factor is left, in the plates whose elements have a density.
        (left,) = group.contract([*before, self.at(value, self.masked)])
        total = left.value
        # log p(yᵢ | y₁, ..., yᵢ₋₁) = log p(y₁, ..., yᵢ) − log p(y₁, ..., yᵢ₋₁): test_enumeration.py::test_mixtures.
        total = total - group.product(group.contract(before), left.plates).value
        total = total.reshape(total.shape[total.dim() - PLATES :])
        plates = (*[1] * (PLATES - len(self.batch_shape)), *self.batch_shape)
        if left.plates.keys() != self.plates.keys():
            # What elements have, in equal parts at each row that is not masked.
            rows = unmasked_rows(self.given_discrete, value, self.site_mask) if self.masked else None
            seen = total.new_ones(plates) if rows is None else padded(rows.to(total.dtype)).expand(plates)
            share = total / group.product([Factor(frozenset(), self.plates, seen)], left.plates).value.clamp(min=1)
            total = group.at_rows(share, self.plates, left.plates, plates) * seen
        return total.reshape(total.shape[PLATES - len(self.batch_shape) :]).expand(self.batch_shape)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A draw of y, z drawn with it: in the plates that they share."""
        shared = next(iter(self.group.latents.values()))
        if tuple(sample_shape) or any(plates.keys() != shared.keys() for plates in self.group.latents.values()):
            raise NotImplementedError("one draw, and none where discrete latents stand in several sets of plates")
        # z ~ p(z | y₁, ..., yᵢ₋₁), all latents at once, and then y ~ p(y | z).
        joint = self.group.product([term(True) for term in self.before], shared).value
        plates = padded(torch.empty(self.batch_shape)).shape
        lead = broadcast_shapes(joint.shape[:-PLATES], self.given_discrete.batch_shape[:-PLATES])
        joint = joint.expand(*lead, *joint.shape[-PLATES:]).flatten(0, len(lead) - 1)
        chosen = torch.distributions.Categorical(logits=joint.movedim(0, -1)).sample()
        index = self.group.at_rows(chosen, self.plates, shared, plates)
        values = self.given_discrete.expand((*lead, *plates)).sample().reshape(-1, *plates, *self.event_shape)
        index = index.reshape(1, *index.shape, *[1] * len(self.event_shape)).expand(1, *values.shape[1:])
        return values.gather(0, index)[0].reshape(self.shape())
