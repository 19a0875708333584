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
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .bare import as_process, fill_masked
from .chosen import Values
from .masks import unmasked_rows
from .summed_out import PLATES, Factor, IntractableError, Plates, SummedOut, Sums

__all__ = ["Enumeration"]


@dataclass
class _Group:
    """Discrete sites that meet in a site, and the log densities so far.

    :param met: whether one is of a site that depends on them.
    """

    sums: Sums
    scale: Any
    terms: list[Factor] = field(default_factory=list)
    met: bool = False


class Enumeration(Messenger):
    """Sums discrete latents out of a run: the innermost handler around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.forget()

    def __enter__(self) -> Any:
        self.names = []
        self.forget()
        return super().__enter__()

    def forget(self) -> None:
        """Forget all but the names: what the run's sites were."""
        self._numbers: dict[Any, list[Tensor]] = {}  # by plate, those by which rows pick its elements
        self._groups: dict[int, _Group] = {}  # by a latent's dimension
        self._sizes: dict[int, int] = {}

    def _name(self, dim: int) -> str:
        return self.names[dim - PLATES - 1]

    def meet(self, msg: Any) -> None:
        """At a sample site: give an enumerated one all its values, and sum them out of others' distributions.

        :raises ValueError: naming the sites, where they cannot be summed out.
        """
        infer, name, fn = msg["infer"] or {}, msg["name"], msg["fn"]
        wanted = infer.get("enumerate") == "parallel"
        if site_is_subsample(msg) or infer.get("_deterministic") or not (self.names or wanted):
            return
        if not wanted or msg["is_observed"] or msg["value"] is not None:
            self._sum_out(msg)
            return
        plates = _plates(msg)
        if not getattr(fn, "has_enumerate_support", False):
            raise ValueError(
                f"site {name!r} is to be enumerated, but {type(fn).__name__} cannot list its values: take Bernoulli, "
                "Categorical or another distribution of finitely many values."
            )
        dim = PLATES + 1 + len(self.names)
        values = fn.enumerate_support(expand=False)
        values = values.reshape(len(values), *[1] * (dim - 1), *fn.event_shape)
        dims = self._dims(msg)
        self.names.append(name)
        group = self._joined(msg, dims)
        group.sums.latents[dim], self._groups[dim], self._sizes[dim] = plates, group, len(values)
        self._add(name, [*dims, dim], group, plates, _log_density(msg, values))
        # No other handler is to see it: it is no latent of this run.
        keys = [key for key, frame in plates.items() if frame.vectorized]
        if len(keys) == 1 and not fn.event_shape:
            frame, shape = plates[keys[0]], list(values.shape)
            shape[frame.dim] = frame.size
            values = Values.of(values.expand(shape), name, frame.dim, self._numbers.setdefault(keys[0], []))
        msg["value"], msg["done"], msg["type"] = values, True, "enumerated"

    _pyro_sample = meet

    def probabilities(self) -> dict[str, Tensor]:
        """p(z | all that the run holds) of each site z, ``(..., K)``, K values last: the gradient of the log of the sum
        by log p(z).
        """
        found: dict[str, Tensor] = {}
        for group in {id(group): group for group in self._groups.values()}.values():
            moves, terms = {}, list(group.terms)
            for dim, plates in group.sums.latents.items():
                shape = [self._sizes[dim], *[1] * (dim - 1)]
                for frame in plates.values():
                    if frame.vectorized:
                        shape[frame.dim] = frame.size
                moves[dim] = terms[0].evaluate().new_zeros(shape).requires_grad_()
                terms.append(Factor(frozenset([dim]), plates, moves[dim].clone))
            with torch.enable_grad():
                left = group.sums.contract(terms)
                total = torch.stack([factor.evaluate().sum() for factor in left]).sum()
                shares = torch.autograd.grad(total, list(moves.values()))
            for dim, share in zip(moves, shares):
                depth = max((-f.dim for f in group.sums.latents[dim].values() if f.vectorized), default=0)
                share = share.reshape(len(share), *share.shape[-PLATES:]).movedim(0, -1)
                found[self._name(dim)] = share[(0,) * (PLATES - depth)]
        return {name: found[name] for name in self.names if name in found}

    def _sum_out(self, msg: Any) -> None:
        fn = msg["fn"]
        if as_process(fn)[0] is not None and any(size > 1 for size in (fn.batch_shape + fn.event_shape)[:-PLATES]):
            raise ValueError(
                f"GP site {msg['name']!r} depends on the discrete site {self.names[0]!r}, which is enumerated: each of "
                "its values would have a process of its own. Write these as GP sites, or outputs of one, and choose "
                "among their values downstream."
            )
        dims = self._dims(msg)
        if not dims:
            return
        group = self._joined(msg, dims)
        before, normalised = list(group.terms), not group.met
        self._add(msg["name"], dims, group, _plates(msg), _log_density(msg))
        group.met = True
        rows = unmasked_rows({"fn": fn, "value": msg["value"], "mask": msg["mask"]})
        mask = msg["mask"] if rows is None else rows[(0,) * max(rows.dim() - PLATES, 0)]
        msg["fn"] = SummedOut(fn, group.terms[-1], mask, before, group.sums, normalised)

    def _dims(self, msg: Any) -> list[int]:
        """The enumerated dimensions that a site's distribution has."""
        shape = msg["fn"].batch_shape
        found = [dim for dim in range(PLATES + 1, len(shape) + 1) if shape[-dim] != 1]
        if any(shape[-dim] != self._sizes.get(dim) for dim in found):
            raise ValueError(
                f"site {msg['name']!r} has a distribution of shape {tuple(shape)} where {self.names} are enumerated: "
                "their values stand along dimensions of their own, left of all plates'. Write table[z, rows], "
                "torch.where(z == 1, ...), and z[group], with the numbers on z itself, where rows pick an element of "
                "its plate."
            )
        return found

    def _add(self, name: str, dims: Sequence[int], group: _Group, plates: Plates, evaluate: Callable) -> None:
        """Add a site's log density to its group's.

        :raises ValueError: naming the sites, where sums have no order.
        """
        for dim in dims:
            self._require_element(name, plates, dim, group.sums)
        group.terms.append(Factor(frozenset(dims), plates, evaluate))
        try:
            group.sums.contract(group.terms)
        except IntractableError:
            met = [self._name(dim) for dim in sorted(group.sums.latents)]
            raise ValueError(
                f"at site {name!r} the discrete sites {met} meet, whose plates are not within one another: the sum "
                "over them has no order in which it can be taken. Put one of them into the plates of the other, or "
                "write it as a latent with a posterior of its own."
            ) from None

    def _require_element(self, name: str, plates: Plates, dim: int, sums: Sums) -> None:
        """Raise if it is not known on which element of a latent's plate each row of a site depends."""
        latent, there = self._name(dim), sums.latents[dim]
        here = [key for key, _ in plates]
        depends = f"site {name!r} stands in plates {here} and depends on the discrete site {latent!r}"
        outside = [key for key in there if key not in plates]
        for key, frame in () if outside else there.items():
            for index in self._numbers.get(key, ()):
                if len(index) == frame.size and not torch.equal(index, torch.arange(frame.size, device=index.device)):
                    raise ValueError(
                        f"{depends}, of whose elements rows of the same plate pick others by a number: each row can "
                        "depend on its own alone where the site is enumerated. Sum it out in the model."
                    )
        read = [len(self._numbers.get(key, ())) for key in outside]
        if any(num != 1 or sums.row_of(key, plates) is None for num, key in zip(read, outside)):
            several = ", of which each row picks more than one element" if max(read) > 1 else ""
            raise ValueError(
                f"{depends}{several}, which stands in {[key for key, _ in there]} and is enumerated: a sum is taken "
                f"for each of its elements. Put site {name!r} into these plates too, or give each row one number of "
                f"its element, {latent}[group], before anything else is done with it; or sum it out in the model."
            )

    def _joined(self, msg: Any, dims: Sequence[int]) -> _Group:
        """The group of all discrete sites that a site depends on."""
        joined = _Group(Sums({}, self._numbers), msg["scale"])
        for group in {id(self._groups[dim]): self._groups[dim] for dim in dims}.values():
            # A mixture to a power is no mixture of powers: test_what_cannot_be_summed_out, of numbers and of tensors.
            if group.scale is not msg["scale"] and not _equal(group.scale, msg["scale"]):
                own, other = (
                    f"{s:g}" if isinstance(s, (int, float)) else "a tensor" for s in (msg["scale"], group.scale)
                )
                raise ValueError(
                    f"site {msg['name']!r} is scaled by {own} and the discrete site "
                    f"{self._name(min(group.sums.latents))!r}, on which it depends, by {other}: put both under the "
                    "same poutine.scale. All rows that share an element of its plate are to be there at once: in "
                    "mini-batches take some of the elements, with all of their rows."
                )
            joined.sums.latents |= group.sums.latents
            joined.terms += group.terms
            joined.met |= group.met
        self._groups |= dict.fromkeys(joined.sums.latents, joined)
        return joined


def _equal(one: Any, other: Any) -> bool:
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.shape == other.shape and bool((one == other).all())


def _plates(msg: Any) -> Plates:
    plates = {(frame.name, frame.counter): frame for frame in msg["cond_indep_stack"]}
    for frame in plates.values():
        if frame.vectorized and -frame.dim > PLATES:
            raise ValueError(
                f"site {msg['name']!r} stands in plate {frame.name!r} at dim {frame.dim}; with enumerated sites plates "
                f"have dims of -{PLATES} to -1."
            )
    return plates


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
