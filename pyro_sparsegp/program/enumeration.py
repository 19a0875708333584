"""Discrete latents summed out: a program's run with every value of theirs at once, and densities without them.

A site with ``infer={"enumerate": "parallel"}`` takes all its values z along a dimension of its own, left of all plates,
and leaves the run's record. Sites that depend on it get the distribution that is left when it is summed out, given the
sites before: after y₁, ..., yᵢ₋₁ that depend on z,

p(yᵢ | y₁, ..., yᵢ₋₁) = Σ_z p(z) p(y₁ | z) ... p(yᵢ | z) / Σ_z p(z) p(y₁ | z) ... p(yᵢ₋₁ | z),

for each element of z's plates: the product over i is the sum over z of the joint density. Where yᵢ stands in further
plates, or its rows pick their z by a number, p(yᵢ | z) is the product over the rows that share a z, and the density of
these rows is one number. Each of them is given an equal share of its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Optional

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .bare import as_process, fill_masked
from .chosen import Values
from .contraction import PLATES, Factor, IntractableError, Plates, contract, left_over
from .masks import unmasked_rows
from .summed_out import SummedOut

__all__ = ["Enumeration", "is_enumerated"]


def is_enumerated(site: Any) -> bool:
    """Whether a site is a discrete latent that is to be summed out."""
    infer = site["infer"] or {}
    return infer.get("enumerate") == "parallel" and not site["is_observed"] and site["value"] is None


@dataclass
class _Latent:
    """A discrete site that is summed out.

    :param plates: those it stands in.
    :param read: the numbers by which rows pick among its elements.
    """

    name: str
    plates: Plates
    num: int
    read: list[Tensor]


@dataclass
class _Group:
    """Discrete sites that meet in a site, and the log densities so far.

    :param dims: their dimensions, from the right.
    :param terms: log densities with these dimensions, to be evaluated.
    :param met: whether one is of a site that depends on them.
    """

    dims: set[int]
    scale: Any
    terms: list[Factor] = field(default_factory=list)
    met: bool = False


class Enumeration(Messenger):
    """Sums discrete latents out of a run: the innermost handler around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._latents: dict[int, _Latent] = {}  # by dimension
        self._groups: dict[int, _Group] = {}

    def __enter__(self) -> Any:
        self.names, self._latents, self._groups = [], {}, {}
        return super().__enter__()

    def meet(self, msg: Any) -> None:
        """At a sample site: give an enumerated one all its values, and sum them out of others' distributions.

        :raises ValueError: naming the sites, where they cannot be summed out.
        """
        infer = msg["infer"] or {}
        if not self.names and infer.get("enumerate") != "parallel":
            return
        if site_is_subsample(msg) or infer.get("_deterministic"):
            return
        if not is_enumerated(msg):
            self._sum_out(msg)
            return
        name, fn = msg["name"], msg["fn"]
        _require_plates(msg)
        if not getattr(fn, "has_enumerate_support", False):
            raise ValueError(
                f"site {name!r} is to be enumerated, but {type(fn).__name__} cannot list its values: take Bernoulli, "
                "Categorical or another distribution of finitely many values."
            )
        dim = PLATES + 1 + len(self.names)
        values = fn.enumerate_support(expand=False)
        values = values.reshape(len(values), *[1] * (dim - 1), *fn.event_shape)
        latent = _Latent(name, _plates(msg), len(values), [])
        self._latents[dim] = latent
        dims = self._dims(msg)
        group = self._joined(msg, dims)
        group.dims.add(dim)
        self._groups[dim] = group
        self._add(msg, [*dims, dim], group, _log_density(msg, values))
        self.names.append(name)
        # No other handler is to see it: it is no latent of this run.
        frames = [frame for frame in latent.plates.values() if frame.vectorized]
        if len(frames) == 1 and not fn.event_shape:
            shape = list(values.shape)
            shape[frames[0].dim] = frames[0].size
            values = Values.of(values.expand(shape), name, frames[0].dim, latent.read)
        msg["value"], msg["done"], msg["type"] = values, True, "enumerated"

    _pyro_sample = meet

    def forget(self) -> None:
        """Forget all but the names: what the run's sites were."""
        self._latents, self._groups = {}, {}

    def probabilities(self) -> dict[str, Tensor]:
        """p(z | all that the run holds) of each site z, ``(..., K)``, K values last.

        That is how the log of the sum moves with log p(z).
        """
        found = {}
        for group in {id(group): group for group in self._groups.values()}.values():
            with torch.no_grad():
                terms = [_held(term) for term in group.terms]
            like = terms[0].evaluate()
            moves = {}
            for dim in sorted(group.dims):
                latent = self._latents[dim]
                shape = [latent.num, *[1] * (dim - 1)]
                for frame in latent.plates.values():
                    if frame.vectorized:
                        shape[frame.dim] = frame.size
                moves[dim] = like.new_zeros(shape).requires_grad_()
                terms.append(Factor(frozenset([dim]), latent.plates, {}, partial(_itself, moves[dim])))
            latents = [self._latents[dim] for dim in sorted(group.dims)]
            terms = [replace(term, belongs=_belongs(latents, term.plates)) for term in terms]
            with torch.enable_grad():
                total = torch.stack(
                    [factor.evaluate().sum() for factor in contract(terms, self._plates_of(group))]
                ).sum()
                shares = torch.autograd.grad(total, list(moves.values()))
            for dim, share in zip(moves, shares):
                depth = max((-frame.dim for frame in self._latents[dim].plates.values() if frame.vectorized), default=0)
                share = share.reshape(len(share), *share.shape[-PLATES:]).movedim(0, -1)
                found[self._latents[dim].name] = share[(0,) * (PLATES - depth)]
        return {name: found[name] for name in self.names if name in found}

    def _sum_out(self, msg: Any) -> None:
        fn = msg["fn"]
        shape = fn.batch_shape + fn.event_shape
        if as_process(fn)[0] is not None and any(size > 1 for size in shape[:-PLATES]):
            latent = self._latents[min(self._latents)].name
            raise ValueError(
                f"GP site {msg['name']!r} depends on the discrete site {latent!r}, which is enumerated: each of its "
                "values would have a process of its own. Write these as GP sites, or outputs of one, and choose among "
                "their values downstream."
            )
        dims = self._dims(msg) if self.names else []
        if not dims:
            return
        _require_plates(msg)
        group = self._joined(msg, dims)
        normalised = not group.met
        self._add(msg, dims, group, _log_density(msg))
        group.met = True
        *before, own = group.terms
        rows = unmasked_rows({"fn": fn, "value": msg["value"], "mask": msg["mask"]})
        mask = msg["mask"] if rows is None else rows[(0,) * max(rows.dim() - PLATES, 0)]
        msg["fn"] = SummedOut(fn, own, mask, before, self._plates_of(group), normalised)

    def _dims(self, msg: Any) -> list[int]:
        """The enumerated dimensions that a site's distribution has."""
        found = []
        shape = msg["fn"].batch_shape
        for dim in range(PLATES + 1, len(shape) + 1):
            if shape[-dim] == 1:
                continue
            latent = self._latents.get(dim)
            if latent is None or shape[-dim] != latent.num:
                names = ", ".join(repr(one.name) for one in self._latents.values())
                raise ValueError(
                    f"site {msg['name']!r} has a distribution of shape {tuple(shape)} where the discrete site {names} "
                    "is enumerated: its values stand along a dimension of their own, left of all plates'. Write "
                    "table[z, rows], torch.where(z == 1, ...), and z[group], with the numbers on z itself, where rows "
                    "pick an element of its plate."
                )
            found.append(dim)
        return found

    def _add(self, msg: Any, dims: Sequence[int], group: _Group, evaluate: Callable[[], Tensor]) -> None:
        """Add a site's log density to its group's.

        :raises ValueError: naming the sites, where sums have no order.
        """
        plates = _plates(msg)
        for dim in dims:
            self._require_element(msg["name"], plates, self._latents[dim])
        latents = [self._latents[dim] for dim in sorted(group.dims)]
        terms = [*group.terms, Factor(frozenset(dims), plates, {}, evaluate)]
        group.terms = [replace(term, belongs=_belongs(latents, term.plates)) for term in terms]
        try:
            shared = left_over(contract(group.terms, self._plates_of(group)))
            if all(key in term.plates or key in term.belongs for term in group.terms for key in shared):
                return
        except IntractableError:
            pass
        raise ValueError(
            f"at site {msg['name']!r} the discrete sites {[latent.name for latent in latents]} meet, whose plates are "
            "not within one another: the sum over them has no order in which it can be taken. Put one of them into "
            "the plates of the other, or write it as a latent with a posterior of its own."
        )

    def _require_element(self, name: str, plates: Plates, latent: _Latent) -> None:
        """Raise if it is not known on which element of a latent's plates a site's rows depend."""
        here, there = ([key for key, _ in one] for one in (plates, latent.plates))
        depends = f"site {name!r} stands in plates {here} and depends on the discrete site {latent.name!r}"
        within = all(key in plates for key in latent.plates)
        if within and any(_within(latent, index) for index in latent.read):
            raise ValueError(
                f"{depends}, of whose elements rows of the same plate pick others by a number: each row can depend on "
                "its own alone where the site is enumerated. Sum it out in the model."
            )
        if within or (len(latent.read) == 1 and _row_numbers(latent, plates) is not None):
            return
        several = ", of which each row picks more than one element" if len(latent.read) > 1 else ""
        raise ValueError(
            f"{depends}{several}, which stands in {there} and is enumerated: a sum is taken for each of its elements. "
            f"Put site {name!r} into these plates too, or give each row one number of its element, "
            f"{latent.name}[group], before anything else is done with it; or sum it out in the model."
        )

    def _plates_of(self, group: _Group) -> dict[int, frozenset[Any]]:
        return {dim: frozenset(self._latents[dim].plates) for dim in group.dims}

    def _joined(self, msg: Any, dims: Sequence[int]) -> _Group:
        """The group of all discrete sites that a site depends on."""
        joined = _Group(set(), msg["scale"])
        for group in {id(self._groups[dim]): self._groups[dim] for dim in dims}.values():
            numbers = isinstance(group.scale, (int, float)) and isinstance(msg["scale"], (int, float))
            if numbers and group.scale != msg["scale"]:
                raise ValueError(
                    f"site {msg['name']!r} is scaled by {msg['scale']:g} and the discrete site "
                    f"{self._latents[min(group.dims)].name!r}, on which it depends, by {group.scale:g}: put both under "
                    "the same poutine.scale. All rows that share an element of its plate are to be there at once: in "
                    "mini-batches take some of the elements, with all of their rows."
                )
            joined.dims |= group.dims
            joined.terms += group.terms
            joined.met |= group.met
        self._groups |= dict.fromkeys(joined.dims, joined)
        return joined


def _itself(value: Tensor) -> Tensor:
    return value


def _held(term: Factor) -> Factor:
    """A factor at the number that it has now."""
    return replace(term, evaluate=partial(_itself, term.evaluate()))


def _plates(msg: Any) -> Plates:
    return {(frame.name, frame.counter): frame for frame in msg["cond_indep_stack"]}


def _row_numbers(latent: _Latent, plates: Plates) -> Optional[tuple[Any, Tensor]]:
    """Which of the plates has rows that belong to elements of a latent's plate, and their numbers."""
    for index in latent.read:
        for key, frame in plates.items():
            if key not in latent.plates and frame.vectorized and frame.size == len(index):
                return key, index
    return None


def _belongs(latents: Sequence[_Latent], plates: Plates) -> dict[Any, tuple[Any, Tensor, Any]]:
    """Of latents' plates that are none of these: whose rows belong to their elements, and by which numbers."""
    found: dict[Any, tuple[Any, Tensor, Any]] = {}
    for latent in latents:
        for key, frame in latent.plates.items():
            numbers = None if key in plates or key in found else _row_numbers(latent, plates)
            if numbers is not None:
                found[key] = (*numbers, frame)
    return found


def _within(latent: _Latent, index: Tensor) -> bool:
    """Whether numbers are those of other elements for a plate's own rows."""
    sizes = [frame.size for frame in latent.plates.values() if frame.vectorized]
    return sizes == [len(index)] and not torch.equal(index, torch.arange(len(index), device=index.device))


def _log_density(msg: Any, value: Any = None) -> Callable[[], Tensor]:
    """A site's log density given all values of the discrete ones, masked, when it has its value."""
    fn, mask, name = msg["fn"], msg["mask"], msg["name"]

    def evaluate() -> Tensor:
        site = {"type": "sample", "name": name, "is_observed": True, "fn": fn, "mask": mask}
        site["value"] = msg["value"] if value is None else value
        if value is None:
            fill_masked(site)
        return torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), 1.0, mask))

    return evaluate


def _require_plates(msg: Any) -> None:
    for frame in msg["cond_indep_stack"]:
        if frame.vectorized and -frame.dim > PLATES:
            raise ValueError(
                f"site {msg['name']!r} stands in plate {frame.name!r} at dim {frame.dim}; with enumerated sites plates "
                f"have dims of -{PLATES} to -1."
            )
