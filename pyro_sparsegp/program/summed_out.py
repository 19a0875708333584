"""Densities without the discrete latents upstream: sums over these of products over plates, in log space.

Pyro's own ``contract_tensor_tree`` multiplies exponentials of factors, each relative to its own maximum: where two
disagree by 800 nats all products are 0. Here factors are added up before the one logsumexp.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from .declared import rewrapped
from .traces import bare, filled, unmasked_rows

PLATES = 4  # dimensions from the right that are left to plates
Plates = Mapping[str, Any]  # Pyro's frames by name; none of a plate that is iterated over, whose sites are single ones


class Latent(NamedTuple):
    """A discrete latent, whose values have a dimension of their own."""

    name: str
    plates: Plates
    size: int  # how many values
    scale: Any


class Factor(NamedTuple):
    """A log density."""

    latents: frozenset[int]  # the dimensions, from the right, of the discrete latents that it depends on
    plates: Plates  # those that it stands in
    value: Tensor  # the latents' dimensions in front of the plates'


@dataclass
class Discrete:
    """The discrete latents of a run, and the densities of all sites that depend on them."""

    latents: dict[int, Latent] = field(default_factory=dict)  # by dimension
    numbers: dict[str, list[Tensor]] = field(default_factory=dict)  # by plate, of rows that pick: z[group]
    terms: list[SummedOut] = field(default_factory=list)

    def meeting(self, latents: frozenset[int]) -> list[SummedOut]:
        """The terms of these latents, and of others that meet them in a term."""
        found = [term for term in self.terms if term.latents & latents]
        more = latents.union(*(term.latents for term in found))
        return found if more == latents else self.meeting(more)

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
        left, names = list(factors), list[str]()
        while dims := frozenset().union(*(factor.latents for factor in left)):
            names = names or [self.latents[dim].name for dim in sorted(dims)]
            free = (dim for dim in dims if all(self._can_be_reduced(f, dim) for f in left if dim in f.latents))
            if (dim := next(free, None)) is None:
                raise ValueError(
                    f"the discrete sites {names} meet in a density, and their plates are not nested. Put one of them "
                    "into the plates of the other, or write it as a latent with a posterior of its own."
                )
            # Of latents in plates b inside of a, Σ_z ∏_b = ∏_b Σ_z: summed out after the product over what factors have
            # beyond its plates.
            total = self.product([factor for factor in left if dim in factor.latents], self.latents[dim].plates)
            # log Σ_z exp Σᵢ log φᵢ(z), in one logsumexp of the sum: test_group_classes.py::test_groups.
            summed = total._replace(latents=total.latents - {dim}, value=total.value.logsumexp(-dim, keepdim=True))
            left = [*(factor for factor in left if dim not in factor.latents), summed]
        return left

    def _can_be_reduced(self, factor: Factor, dim: int) -> bool:
        """Whether a factor's product over all plates but a latent's own is of latents that stand outside of these."""
        plates = self.latents[dim].plates
        gone = factor.plates.keys() - plates.keys()
        there = {*factor.plates, *self.picked(plates, factor.plates)}
        return plates.keys() <= there and not any(self.latents[dim].plates.keys() & gone for dim in factor.latents)

    def _elements(self, plates: Plates, rows: Plates, like: Tensor) -> Tensor:
        """The number of the element of ``plates`` that each row has, all rows in one dimension."""
        number, picked = torch.zeros(sizes(rows), dtype=torch.long, device=like.device), self.picked(plates, rows)
        for key, frame in sorted(plates.items(), key=lambda item: item[1].dim):
            row, index = picked.get(key) or (frame, torch.arange(frame.size, device=like.device))
            number = number * frame.size + index.reshape(-1, *[1] * (-row.dim - 1))
        return number.flatten()

    def product(self, factors: Sequence[Factor], plates: Plates) -> Factor:
        """The product of factors, of each over all its rows that have an element of these plates."""
        total: Any = 0.0
        for factor in factors:
            lead = factor.value.shape[:-PLATES]
            # A factor that is the same for all elements of a plate counts once for each.
            value = factor.value.expand(*lead, *sizes(factor.plates)).flatten(-PLATES)
            if factor.plates.keys() != plates.keys():
                # ∏ over the rows of an element g: Σ_n log φₙ where group[n] = g.
                empty = value.new_zeros(*lead, math.prod(sizes(plates)))
                value = empty.index_add(-1, self._elements(plates, factor.plates, value), value)
            total = total + value.unflatten(-1, sizes(plates))
        return Factor(frozenset().union(*(factor.latents for factor in factors)), plates, total)

    def at_rows(self, value: Tensor, rows: Plates, plates: Plates) -> Tensor:
        """What elements of ``plates`` have, at each row of plates ``rows``: the way back of :meth:`product`."""
        value = value.expand(*value.shape[:-PLATES], *sizes(plates)).flatten(-PLATES)
        return value[..., self._elements(plates, rows, value)].unflatten(-1, sizes(rows))


def sizes(plates: Plates) -> list[int]:
    """Of the dimensions that are left to plates."""
    by_dim = {frame.dim: frame.size for frame in plates.values()}
    return [by_dim.get(dim, 1) for dim in range(-PLATES, 0)]


def depth(plates: Plates) -> int:
    """How many dimensions from the right they take."""
    return max((-frame.dim for frame in plates.values()), default=0)


class SummedOut(TorchDistribution):
    """What is left of a site's distribution when discrete latents upstream are summed out, given the sites before.

    :param site: its message, with their dimensions in front of the plates'.
    :param latents: their dimensions.
    :param plates: that the site stands in.
    :param run: what it has met so far: log p(z), log p(y₁ | z), ..., log p(yᵢ₋₁ | z).
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False  # no draw of a mixture passes a gradient on
    masked = True

    def __init__(self, site: Any, latents: frozenset[int], plates: Plates, run: Discrete) -> None:
        self.site, self.given_discrete, self.site_mask = site, site["fn"], site["mask"]
        self.latents, self.plates, self.run, self.before = latents, plates, run, run.meeting(latents)
        shape = self.given_discrete.batch_shape
        event_shape = self.given_discrete.event_shape
        super().__init__(shape[len(shape) - depth(plates) :], event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution given z."""
        return self.given_discrete.support

    def without_masks(self) -> SummedOut:
        """The same where no mask leaves anything out: what may be another in the next batch hides no structure."""
        found = copy.copy(self)
        found.masked = False
        return found

    def factor(self, masked: bool, value: Any = None) -> Factor:
        """log p(y | z), by default of the site's value, whose masked numbers may be NaN."""
        fn, mask = self.given_discrete, self.site_mask
        value = filled(fn, self.site["value"] if value is None else value, mask)
        density = rewrapped(fn, bare(fn).log_prob(value), masked)
        density = torch.as_tensor(scale_and_mask(density, mask=unmasked_rows(fn, value, mask) if masked else None))
        return Factor(self.latents, self.plates, density[(None,) * (PLATES - density.dim())])

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y | what came before); of rows that share a z, each one's share."""
        run, before = self.run, [term.factor(self.masked) for term in self.before]
        # A site joins all that it depends on, so that one factor is left, in the plates whose elements have a density.
        (left,) = run.contract([*before, self.factor(self.masked, value)])
        # log p(yᵢ | y₁, ..., yᵢ₋₁) = log p(y₁, ..., yᵢ) − log p(y₁, ..., yᵢ₋₁): test_enumeration.py::test_mixtures.
        total = left.value - run.product(run.contract(before), left.plates).value
        if left.plates.keys() != self.plates.keys():
            # What elements have, in equal parts at each row that is not masked.
            rows = unmasked_rows(self.given_discrete, value, self.site_mask) if self.masked else None
            seen = total.new_ones(()) if rows is None else rows.to(total.dtype)
            seen = seen.expand(sizes(self.plates))
            share = total / run.product([Factor(frozenset(), self.plates, seen)], left.plates).value.clamp(min=1)
            total = run.at_rows(share, self.plates, left.plates) * seen
        return total.reshape(total.shape[total.dim() - len(self.batch_shape) :]).expand(self.batch_shape)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A draw of y, z drawn with it: in the plates that they share."""
        run, rows = self.run, sizes(self.plates)
        dims = frozenset().union(*(term.latents for term in self.before))
        shared, *others = (run.latents[dim].plates for dim in dims)
        if tuple(sample_shape) or any(plates.keys() != shared.keys() for plates in others):
            raise NotImplementedError("one draw, and none where discrete latents stand in several sets of plates")
        # z ~ p(z | y₁, ..., yᵢ₋₁), all latents at once, and then y ~ p(y | z).
        joint = run.product([term.factor(True) for term in self.before], shared).value
        lead = torch.broadcast_shapes(joint.shape[:-PLATES], self.given_discrete.batch_shape[:-PLATES])
        joint = joint.expand(*lead, *joint.shape[-PLATES:]).flatten(0, len(lead) - 1)
        chosen = torch.distributions.Categorical(logits=joint.movedim(0, -1)).sample()
        index = run.at_rows(chosen, self.plates, shared).flatten()
        values = self.given_discrete.expand((*lead, *rows)).sample().reshape(len(joint), len(index), *self.event_shape)
        return values[index, torch.arange(len(index), device=index.device)].reshape(self.shape())
