"""Discrete latents summed out: a program's run with all their values at once, and densities without them.

A site with ``infer={"enumerate": "parallel"}`` takes all its values z along a dimension of its own, left of all plates,
and leaves the run's record. Sites that depend on it get the distribution that is left when it is summed out, given the
sites before: after y₁, ..., yᵢ₋₁ that depend on z,

p(yᵢ | y₁, ..., yᵢ₋₁) = Σ_z p(z) p(y₁ | z) ... p(yᵢ | z) / Σ_z p(z) p(y₁ | z) ... p(yᵢ₋₁ | z),

for each element of z's plates: the product over i is the sum over z of the joint density. Where yᵢ stands in further
plates, or its rows pick their z by a number, p(yᵢ | z) is the product over the rows that share a z, and the density of
these rows is one number. Each of them is given an equal share of its logarithm.

Pyro's own ``contract_tensor_tree`` multiplies exponentials of factors, each relative to its own maximum: where two
disagree by 800 nats all products are 0. Here factors are added up before the one logsumexp.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..numerics.decisions import passed_on
from .traces import as_process, bare, filled, rewrapped, unmasked_rows

PLATES = 4  # dimensions from the right that are left to plates
Plates = Mapping[str, Any]  # Pyro's frames by name; none of a plate that is iterated over, whose sites are single ones


class Latent(NamedTuple):
    """A discrete latent, whose values have a dimension of their own."""

    name: str
    plates: Plates
    support: Tensor  # its values, (K, ...)
    scale: Any


class Factor(NamedTuple):
    """A log density."""

    latents: frozenset[int]  # the dimensions, from the right, of the discrete latents that it depends on
    plates: Plates  # those that it stands in
    value: Tensor  # the latents' dimensions in front of the plates'


class Enumeration(Messenger):
    """Sums discrete latents out of a run: the innermost handler around a model."""

    def __init__(self, known: Collection[str] = ()) -> None:
        super().__init__()
        self.known = known  # names of sites that another handler gives their values
        self.latents: dict[int, Latent] = {}  # by dimension
        self.numbers: dict[str, list[Tensor]] = {}  # by plate, of rows that pick: z[group]
        self.terms: list[SummedOut] = []  # the densities of all sites that depend on latents

    @property
    def names(self) -> list[str]:
        """Of the sites that are enumerated."""
        return [latent.name for latent in self.latents.values()]

    def meet(self, msg: Any) -> None:
        """At a sample site: give an enumerated one all its values, and sum them out of others' distributions."""
        infer, has_value = msg["infer"], msg["value"] is not None
        wanted = infer.get("enumerate") == "parallel" and not has_value and msg["name"] not in self.known
        # A run without such sites costs nothing; before the first of them no site depends on one.
        if site_is_subsample(msg) or infer.get("_deterministic") or not (self.latents or wanted):
            return
        latents = self._latents(msg)
        plates = {frame.name: frame for frame in msg["cond_indep_stack"] if frame.vectorized}
        self._require_alike(msg, latents, plates)
        if wanted:
            self._enumerate(msg, latents, plates)
        elif latents:
            # Its density given z is one more term, for sites after it.
            msg["fn"] = fn = SummedOut(msg, latents, plates, self)
            self.terms.append(fn)

    _pyro_sample = meet

    def _enumerate(self, msg: dict[str, Any], latents: frozenset[int], plates: Plates) -> None:
        name, fn = msg["name"], msg["fn"]
        if not getattr(fn, "has_enumerate_support", False):
            raise ValueError(
                f"site {name!r} is to be enumerated, but {type(fn).__name__} cannot list its values: take one that can."
            )
        # Left of all plates, as in poutine.enum: the i-th site has dimension −(5 + i).
        dim = PLATES + 1 + len(self.latents)
        support = fn.enumerate_support(expand=False)
        support = support.reshape(len(support), *fn.event_shape)
        values = support.reshape(len(support), *[1] * (dim - 1), *fn.event_shape)
        self.latents[dim] = Latent(name, plates, support, msg["scale"])
        self.terms.append(SummedOut(msg | {"value": values}, latents | {dim}, plates, self))
        # No other handler is to see it: it is no latent of this run. Its values know by which numbers rows pick them.
        if len(plates) == 1 and not fn.event_shape:
            ((key, frame),) = plates.items()
            values = values.expand(*values.shape[:-PLATES], *sizes(plates))
            values = _noting(values, (name, frame.dim, self.numbers.setdefault(key, [])))
        msg["value"], msg["done"], msg["type"] = values, True, "enumerated"

    def _latents(self, msg: dict[str, Any]) -> frozenset[int]:
        """The dimensions of enumerated latents that a site's distribution has."""
        fn, shape = msg["fn"], msg["fn"].batch_shape
        found = [dim for dim in range(PLATES + 1, len(shape) + 1) if shape[-dim] != 1]
        of_gp = as_process(fn)[0] is not None and any(size > 1 for size in (*shape, *fn.event_shape)[:-PLATES])
        known = {dim: len(latent.support) for dim, latent in self.latents.items()}
        if of_gp or any(shape[-dim] != known.get(dim) for dim in found):
            raise ValueError(
                f"site {msg['name']!r} has a distribution of shape {tuple(fn.shape())} where {self.names} are "
                "enumerated: their values stand along dimensions of their own, left of all plates'. Write "
                "torch.where(z == 1, ...), table[z, rows], or z[group], with group on z itself, if rows pick elements "
                "of z's plate. Draw all GP sites, or outputs of one, before you choose among them."
            )
        return frozenset(found)

    def _require_alike(self, msg: dict[str, Any], latents: frozenset[int], plates: Plates) -> None:
        """Raise if a site is not scaled as what it depends on, or it is not known on which element of a latent's plates
        each of its rows depends.
        """
        for dim in latents:
            latent, there, _, scale = self.latents[dim]
            # A mixture to a power is no mixture of powers: test_what_cannot_be_summed_out, of numbers and of tensors.
            if not (torch.as_tensor(scale) == torch.as_tensor(msg["scale"])).all():
                raise ValueError(
                    f"site {msg['name']!r} is not scaled as the discrete site {latent!r}, on which it depends: put "
                    "both under the same poutine.scale. A mini-batch takes some elements of its plate, with all of "
                    "their rows."
                )
            picked = self.picked(there, plates)
            if not all(self._is_known(key, frame.size, key in plates, key in picked) for key, frame in there.items()):
                raise ValueError(
                    f"site {msg['name']!r} in plates {list(plates)} depends on the enumerated discrete site {latent!r} "
                    f"in plates {list(there)}: each row has to depend on one element of it. Put site {msg['name']!r} "
                    f"into these plates too, index {latent!r} by each row's number before anything else, "
                    f"{latent}[group], or sum it out in the model."
                )

    def _is_known(self, plate: str, size: int, is_shared: bool, is_picked: bool) -> bool:
        """Whether it is known on which element of a plate a row depends that stands in it, or picks elements."""
        numbers = self.numbers.get(plate, [])
        if not is_shared:
            return is_picked and len(numbers) == 1
        # z[index] in the plate of z itself: test_group_classes.py::test_which_groups_cannot_be_summed_out.
        own = torch.arange(size)
        return all(len(index) != len(own) or torch.equal(index, own.to(index)) for index in numbers)

    # Sums of products.

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

    def contract(self, factors: Sequence[Factor]) -> tuple[list[Factor], dict[int, Factor]]:
        """The factors that are left when all latents are summed out, from the innermost plates outwards (Obermeyer et
        al., 2019, algorithm 1); raise if there is no order of summing. And, by its dimension and in this order, the
        product that each latent was summed out of.
        """
        left, totals = list(factors), dict[int, Factor]()
        names = [self.latents[dim].name for dim in sorted({dim for factor in left for dim in factor.latents})]
        while dims := frozenset().union(*(factor.latents for factor in left)):
            free = (dim for dim in dims if all(self._can_be_reduced(f, dim) for f in left if dim in f.latents))
            if (dim := next(free, None)) is None:
                raise ValueError(
                    f"the discrete sites {names} meet in a density, and their plates are not nested. Put one of them "
                    "into the plates of the other, or write it as a latent with a posterior of its own."
                )
            # Of latents in plates b inside of a, Σ_z ∏_b = ∏_b Σ_z: summed out after the product over what factors have
            # beyond its plates.
            total = self.product([factor for factor in left if dim in factor.latents], self.latents[dim].plates)
            totals[dim] = total
            # log Σ_z exp Σᵢ log φᵢ(z), in one logsumexp of the sum: test_group_classes.py::test_groups.
            summed = total._replace(latents=total.latents - {dim}, value=total.value.logsumexp(-dim, keepdim=True))
            left = [*(factor for factor in left if dim not in factor.latents), summed]
        return left, totals

    def draw(self, terms: Sequence[SummedOut]) -> dict[int, Tensor]:
        """A draw of the latents of some terms given these, by dimension: the numbers of their values."""
        totals, drawn = self.contract([term.factor(True, term.site["value"]) for term in terms])[1], dict[int, Tensor]()
        # p(z₁, z₂, ...) = p(z₁) p(z₂ | z₁) ..., with z₁ the last that was summed out: of a latent's product the latents
        # that were summed out later are left.
        for dim, total in reversed(totals.items()):
            logits = self.chosen(total.value, total.latents - {dim}, drawn, total.plates).movedim(-dim, -1)
            drawn[dim] = torch.distributions.Categorical(logits=logits).sample().reshape(sizes(total.plates))
        return drawn

    def chosen(self, value: Tensor, dims: Iterable[int], drawn: Mapping[int, Tensor], plates: Plates) -> Tensor:
        """What a tensor ``(..., *plates)`` with dimensions of latents has where these are as drawn."""
        for dim in dims:
            index = self.at_rows(drawn[dim], plates, self.latents[dim].plates)
            value = value.gather(-dim, index.expand(*value.shape[:-dim], 1, *value.shape[1 - dim :]))
        return value

    @torch.no_grad()
    def draw_of(self, names: Collection[str]) -> dict[str, Tensor]:
        """A draw of some sites given all that the run met."""
        drawn = self.draw(self.terms) if names else {}
        latents = [(latent, drawn[dim]) for dim, latent in self.latents.items() if latent.name in names]
        return {name: support[n.reshape(own_sizes(plates))] for (name, plates, support, _), n in latents}

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
            row, index = picked.get(key, (frame, torch.arange(frame.size, device=like.device)))
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


def sizes(plates: Plates, num: int = PLATES) -> list[int]:
    """Of the dimensions that are left to plates."""
    by_dim = {frame.dim: frame.size for frame in plates.values()}
    return [by_dim.get(dim, 1) for dim in range(-num, 0)]


def own_sizes(plates: Plates) -> list[int]:
    """Of the dimensions that plates take."""
    return sizes(plates, -min((frame.dim for frame in plates.values()), default=0))


class Values(Tensor):
    """All values of an enumerated latent, or a function of these alone, ``(K, 1, ..., N)``: the same for each element.

    ``z[group]`` and ``z[..., group]`` give each row the values of its element of the plate, the same for all, and note
    the rows' numbers: what depends on them is added up by these.
    """

    picked: tuple[str, int, list[Tensor]]  # the site's name, the dimension of its plate, and the numbers so far

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: Mapping = {}) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            given: list[Any] = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
            # A function of the values alone is the same for each element, too, as torch.where(z == 1, ...).
            is_alone = len(set(map(id, given))) == 1 and isinstance(given[0], Values)
            if is_alone and type(found) is Tensor and found.shape == given[0].shape:
                return _noting(found, given[0].picked)
            return found

    def __getitem__(self, index: Any) -> Tensor:
        rows = index[1] if isinstance(index, tuple) and index[:1] == (Ellipsis,) else index
        if not isinstance(rows, (int, Tensor)):
            return super().__getitem__(index)
        (site, place, read), numbers = self.picked, torch.as_tensor(rows)
        if numbers.dim() != 1 or numbers.is_floating_point() or numbers.dtype == torch.bool:
            what = f"{numbers.dtype} of shape {tuple(numbers.shape)}" if numbers.dim() else str(index)
            raise ValueError(
                f"discrete site {site!r} is enumerated, and indexed by {what}: give each row the number of "
                f"its element of the plate, whole numbers (N,), {site}[group]; or loop over pyro.plate."
            )
        # The same numbers twice are one choice: test_group_classes.py::test_groups.
        if not any(numbers is one or torch.equal(numbers, one) for one in read):
            read.append(numbers)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).index_select(place, torch.zeros_like(numbers))


def _noting(values: Tensor, picked: tuple[str, int, list[Tensor]]) -> Values:
    found = passed_on(values, values.as_subclass(Values))
    found.picked = picked
    return found


class SummedOut(TorchDistribution):
    """What is left of a site's distribution when discrete latents upstream are summed out, given the sites before.

    Of its message, with their dimensions in front of the plates'; the run has met log p(z), ..., log p(yᵢ₋₁ | z).
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False  # no draw of a mixture passes a gradient on
    masked = True

    def __init__(self, site: dict[str, Any], latents: frozenset[int], plates: Plates, run: Enumeration) -> None:
        self.site, self.given_discrete, self.site_mask = site, site["fn"], site["mask"]
        self.latents, self.plates, self.run, self.before = latents, plates, run, run.meeting(latents)
        shape, event_shape = self.given_discrete.batch_shape, self.given_discrete.event_shape
        super().__init__(shape[len(shape) - len(own_sizes(plates)) :], event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution given z."""
        return self.given_discrete.support

    def without_masks(self) -> SummedOut:
        """The same where no mask leaves anything out: what may be another in the next batch hides no structure."""
        found = copy.copy(self)
        found.masked = False
        return found

    def _seen(self, masked: bool, value: Tensor) -> Optional[Tensor]:
        """Which rows no mask leaves out; ``None`` if that is all."""
        return unmasked_rows(self.given_discrete, value, self.site_mask) if masked else None

    def factor(self, masked: bool, value: Tensor) -> Factor:
        """log p(y | z) of a value, whose masked numbers may be NaN."""
        fn = self.given_discrete
        value = filled(fn, value, self.site_mask)
        density = rewrapped(fn, bare(fn).log_prob(value), masked)
        density = torch.as_tensor(scale_and_mask(density, mask=self._seen(masked, value)))
        return Factor(self.latents, self.plates, density[(None,) * (PLATES - density.dim())])

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y | what came before); of rows that share a z, each one's share."""
        run, before = self.run, [term.factor(self.masked, term.site["value"]) for term in self.before]
        # A site joins all that it depends on, so that one factor is left, in the plates whose elements have a density.
        (left,), _ = run.contract([*before, self.factor(self.masked, value)])
        # log p(yᵢ | y₁, ..., yᵢ₋₁) = log p(y₁, ..., yᵢ) − log p(y₁, ..., yᵢ₋₁): test_enumeration.py::test_mixtures.
        total = left.value - run.product(run.contract(before)[0], left.plates).value
        if left.plates.keys() != self.plates.keys():
            # What elements have, in equal parts at each row that is not masked.
            rows = self._seen(self.masked, value)
            seen = total.new_ones(()) if rows is None else rows.to(total.dtype)
            seen = seen.expand(sizes(self.plates))
            share = total / run.product([Factor(frozenset(), self.plates, seen)], left.plates).value.clamp(min=1)
            total = run.at_rows(share, self.plates, left.plates) * seen
        return total.reshape(total.shape[total.dim() - len(self.batch_shape) :]).expand(self.batch_shape)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A draw of y, z drawn with it: given the data before; or, where several rows share a z, given all."""
        if tuple(sample_shape):
            raise NotImplementedError("a site that depends on a discrete latent has one draw at a time")
        run, fn = self.run, self.given_discrete
        alone = all(run.latents[dim].plates.keys() == self.plates.keys() for dim in self.latents)
        known = self.before if alone else run.meeting(self.latents)
        drawn = run.draw([term for term in known if term.site["value"] is not None])
        values = fn.expand((*fn.batch_shape[:-PLATES], *sizes(self.plates))).sample()
        values = values.reshape(*values.shape[: len(fn.batch_shape)], -1).movedim(-1, 0)
        return run.chosen(values, self.latents, drawn, self.plates).movedim(0, -1).reshape(self.shape())
