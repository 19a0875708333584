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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .summed_out import PLATES, Factor, Group, Plates, SummedOut, depth, with_size
from .traces import as_process, sample_sites


class Enumeration(Messenger):
    """Sums discrete latents out of a run: the innermost handler around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._numbers: dict[str, list[Tensor]] = {}  # by plate, those by which rows pick its elements
        self._groups: dict[int, Group] = {}  # by a latent's dimension
        self._sizes: dict[int, int] = {}

    def meet(self, msg: Any) -> None:
        """At a sample site: give an enumerated one all its values, and sum them out of others' distributions.

        :raises ValueError: naming the sites, where they cannot be summed out.
        """
        infer = msg["infer"] or {}
        wanted = infer.get("enumerate") == "parallel"
        # A run without such sites costs nothing; before the first of them no site depends on one.
        if site_is_subsample(msg) or infer.get("_deterministic") or not (self.names or wanted):
            return
        latents = self._latents(msg)
        plates = {frame.name: frame for frame in msg["cond_indep_stack"] if frame.vectorized}
        if wanted and not msg["is_observed"] and msg["value"] is None:
            self._enumerate(msg, latents, plates)
        elif latents:
            # Its density given z is one more term of the group's, for sites after it.
            group = self._joined(msg, latents, plates)
            msg["fn"] = fn = SummedOut(msg["fn"], latents, plates, msg["mask"], group)
            group.terms.append(lambda masked: fn.at(fn.filled(msg["value"]), masked))

    _pyro_sample = meet

    def _enumerate(self, msg: Any, latents: frozenset[int], plates: Plates) -> None:
        name, fn = msg["name"], msg["fn"]
        if not getattr(fn, "has_enumerate_support", False):
            raise ValueError(
                f"site {name!r} is to be enumerated, but {type(fn).__name__} cannot list its values: take one that can."
            )
        # Left of all plates, as in poutine.enum: the i-th site has dimension −(5 + i).
        dim = PLATES + 1 + len(self.names)
        values = fn.enumerate_support(expand=False)
        values = values.reshape(len(values), *[1] * (dim - 1), *fn.event_shape)
        density, no_mask = (torch.as_tensor(scale_and_mask(fn.log_prob(values), mask=m)) for m in (msg["mask"], None))
        group = self._joined(msg, latents, plates)
        self.names.append(name)
        self._groups[dim], self._sizes[dim], group.latents[dim] = group, len(values), plates
        group.terms.append(lambda masked: Factor(latents | {dim}, plates, density if masked else no_mask))
        # No other handler is to see it: it is no latent of this run.
        # Values that know by which numbers rows pick them: test_group_classes.py::test_groups.
        if len(plates) == 1 and not fn.event_shape:
            ((key, frame),) = plates.items()
            values = values.expand(with_size(values, frame.dim, frame.size))
            values = _noting(values, (name, frame.dim, self._numbers.setdefault(key, [])))
        msg["value"], msg["done"], msg["type"] = values, True, "enumerated"

    def probabilities(self) -> dict[str, Tensor]:
        """p(z | all that the run holds) of each site z, ``(..., K)``, K values last: the gradient of the log of the sum
        by log p(z).
        """
        found: dict[str, Tensor] = {}
        for group in {id(group): group for group in self._groups.values()}.values():
            factors, moves = [term(True) for term in group.terms], {}
            for dim, plates in group.latents.items():
                sizes = {frame.dim: frame.size for frame in plates.values()}
                shape = [self._sizes[dim], *[1] * (dim - 1 - PLATES), *(sizes.get(d, 1) for d in range(-PLATES, 0))]
                # A factor of 1 for each value and element: its gradient is that of p(z).
                moves[dim] = factors[0].value.new_zeros(shape).requires_grad_()
                factors.append(Factor(frozenset([dim]), plates, moves[dim]))
            with torch.enable_grad():
                # ∂ log Σ_z p(z) p(data | z) / ∂ log p(z = k) = p(z = k | data), of each element of its plates.
                total = torch.stack([factor.value.sum() for factor in group.contract(factors)]).sum()
                shares = torch.autograd.grad(total, list(moves.values()))
            for (dim, plates), share in zip(group.latents.items(), shares):
                share = share.reshape(len(share), *share.shape[share.dim() - depth(plates) :])
                found[self.names[dim - PLATES - 1]] = share.movedim(0, -1)
        return {name: found[name] for name in self.names}

    def _latents(self, msg: Any) -> frozenset[int]:
        """The dimensions of enumerated latents that a site's distribution has."""
        fn, shape = msg["fn"], msg["fn"].batch_shape
        found = [dim for dim in range(PLATES + 1, len(shape) + 1) if shape[-dim] != 1]
        # test_enumeration.py::test_what_cannot_be_summed_out
        of_gp = as_process(fn)[0] is not None and any(size > 1 for size in (*shape, *fn.event_shape)[:-PLATES])
        if of_gp or any(shape[-dim] != self._sizes.get(dim) for dim in found):
            raise ValueError(
                f"site {msg['name']!r} has a distribution of shape {tuple(fn.shape())} where {self.names} are "
                "enumerated: their values stand along dimensions of their own, left of all plates'. Write "
                "table[z, rows], torch.where(z == 1, ...), and z[group], with the numbers on z itself, where rows pick "
                "an element of its plate; and choose among GP sites, or outputs of one, downstream of them."
            )
        return frozenset(found)

    def _joined(self, msg: Any, latents: frozenset[int], plates: Plates) -> Group:
        """The group of all discrete latents that a site depends on."""
        joined = Group(self.names, self._numbers, msg["scale"])
        for group in {id(self._groups[dim]): self._groups[dim] for dim in sorted(latents)}.values():
            # A mixture to a power is no mixture of powers: test_what_cannot_be_summed_out, of numbers and of tensors.
            if not (torch.as_tensor(group.scale) == torch.as_tensor(msg["scale"])).all():
                raise ValueError(
                    f"site {msg['name']!r} is not scaled as the discrete site "
                    f"{self.names[min(group.latents) - PLATES - 1]!r}, on which it depends: put both under the same "
                    "poutine.scale. A mini-batch takes some elements of its plate, with all of their rows."
                )
            joined.latents |= group.latents
            joined.terms += group.terms
        # A product over rows is one over the elements of z's plates only if it is known which rows each has.
        for dim in latents:
            _require_element(msg["name"], plates, self.names[dim - PLATES - 1], joined.latents[dim], joined)
        self._groups |= dict.fromkeys(joined.latents, joined)
        return joined


def _require_element(name: str, plates: Plates, latent: str, there: Plates, group: Group) -> None:
    """Raise if it is not known on which element of a latent's plates each row of a site depends."""
    outside = [key for key in there if key not in plates]
    numbers = {key: group.numbers.get(key, ()) for key in there}
    # z[index] in the plate of z itself: test_group_classes.py::test_which_groups_cannot_be_summed_out.
    own = [(index, frame.size) for key, frame in there.items() for index in numbers[key] if not outside]
    picks = any(len(index) == size and not torch.equal(index, torch.arange(size).to(index)) for index, size in own)
    # A site outside of z's plates has to have picked one element for each row.
    known = group.picked(there, plates).keys() >= {*outside} and all(len(numbers[key]) == 1 for key in outside)
    if known and not picks:
        return
    raise ValueError(
        f"site {name!r} in plates {list(plates)} depends on the enumerated discrete site {latent!r} in plates "
        f"{list(there)}: each row has to depend on one element of it. Put site {name!r} into these plates too, index "
        f"{latent!r} by each row's number before anything else, {latent}[group], or sum it out in the model."
    )


class Values(Tensor):
    """All values of an enumerated latent, or a function of these alone, ``(K, 1, ..., N)``: the same for each element.

    ``z[group]`` and ``z[..., group]`` give each row the values that its element of the plate has, which are those of
    any, and note the rows' numbers: what depends on them is added up by these.

    ``picked`` is the site's name, the dimension of its plate, and the numbers so far.
    """

    picked: tuple[str, int, list[Tensor]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            given: list[Any] = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
            # A function of the values alone is the same for each element, too, as torch.where(z == 1, ...):
            # test_rows_that_share_a_class.
            is_alone = len(set(map(id, given))) == 1 and isinstance(given[0], Values)
            if is_alone and type(found) is Tensor and found.shape == given[0].shape:
                return _noting(found, given[0].picked)
            return found

    def __getitem__(self, index: Any) -> Tensor:
        index = index[1] if isinstance(index, tuple) and index[:1] == (Ellipsis,) else index
        if not isinstance(index, (int, Tensor)):
            return super().__getitem__(index)
        (site, place, read), numbers = self.picked, torch.as_tensor(index)
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
    found = values.as_subclass(Values)
    found.picked = picked
    return found


def class_probabilities(model: Callable, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The exact probabilities p(z | values, data) of each enumerated discrete site z, given a draw of all others.

    p(z = k | ·) = ∂ log Σ_z p(z) p(data | z, ·) / ∂ log p(z = k), because the derivative of a log sum by the log of
    a term is that term's share. Average over a guide's joint draws at the training rows to get the posterior's: after
    ``guide.eval()``, ``class_probabilities(model, guide(x, y), x, y)``.

    :param model: the model.
    :param values: the values of all other latents, including GP sites at the training rows; other names are ignored.
    :param args: the model's arguments, the data among them.
    :param kwargs: its keyword arguments.
    :returns: by site, ``(..., K)``: a probability for each value, in the order of the distribution's
        ``enumerate_support()``, for each element of its plates ``(...)``.
    :raises ValueError: naming a latent whose value is not given.
    """
    enumeration = Enumeration()
    held = poutine.condition(enumeration(model), data=dict(values))
    with poutine.block(), torch.no_grad():
        trace = poutine.trace(held).get_trace(*args, **kwargs)
    for name, site in sample_sites(trace).items():
        shape, wanted = site["value"].shape, site["fn"].shape()
        if not site["is_observed"] or (name in values and shape != wanted):
            what = f"shape {tuple(shape)}, its distribution {tuple(wanted)}" if site["is_observed"] else "no value"
            raise ValueError(
                f"class_probabilities: site {name!r} has {what}: give one draw of each latent that is not enumerated, "
                "at these rows, such as guide(x, y) after guide.eval()."
            )
    return enumeration.probabilities()
