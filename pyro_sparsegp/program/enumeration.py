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
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .summed_out import PLATES, Discrete, Factor, Latent, Plates, SummedOut, depth, sizes
from .traces import as_process, sample_sites


class Enumeration(Messenger):
    """Sums discrete latents out of a run: the innermost handler around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.met = Discrete()

    @property
    def names(self) -> list[str]:
        """Of the sites that are enumerated."""
        return [latent.name for latent in self.met.latents.values()]

    def meet(self, msg: Any) -> None:
        """At a sample site: give an enumerated one all its values, and sum them out of others' distributions.

        :raises ValueError: naming the sites, where they cannot be summed out.
        """
        infer = msg["infer"] or {}
        wanted = infer.get("enumerate") == "parallel"
        # A run without such sites costs nothing; before the first of them no site depends on one.
        if site_is_subsample(msg) or infer.get("_deterministic") or not (self.met.latents or wanted):
            return
        latents = self._latents(msg)
        plates = {frame.name: frame for frame in msg["cond_indep_stack"] if frame.vectorized}
        if wanted and not msg["is_observed"] and msg["value"] is None:
            self._enumerate(msg, latents, plates)
        elif latents:
            self._require_alike(msg, latents, plates)
            # Its density given z is one more term, for sites after it.
            msg["fn"] = fn = SummedOut(msg, latents, plates, self.met)
            self.met.terms.append(fn)

    _pyro_sample = meet

    def _enumerate(self, msg: Any, latents: frozenset[int], plates: Plates) -> None:
        name, fn = msg["name"], msg["fn"]
        if not getattr(fn, "has_enumerate_support", False):
            raise ValueError(
                f"site {name!r} is to be enumerated, but {type(fn).__name__} cannot list its values: take one that can."
            )
        # Left of all plates, as in poutine.enum: the i-th site has dimension −(5 + i).
        dim = PLATES + 1 + len(self.met.latents)
        values = fn.enumerate_support(expand=False)
        values = values.reshape(len(values), *[1] * (dim - 1), *fn.event_shape)
        self._require_alike(msg, latents, plates)
        self.met.latents[dim] = Latent(name, plates, len(values), msg["scale"])
        self.met.terms.append(SummedOut(msg | {"value": values}, latents | {dim}, plates, self.met))
        # No other handler is to see it: it is no latent of this run.
        # Values that know by which numbers rows pick them: test_group_classes.py::test_groups.
        if len(plates) == 1 and not fn.event_shape:
            ((key, frame),) = plates.items()
            values = values.expand(*values.shape[:-PLATES], *sizes(plates))
            values = _noting(values, (name, frame.dim, self.met.numbers.setdefault(key, [])))
        msg["value"], msg["done"], msg["type"] = values, True, "enumerated"

    def probabilities(self) -> dict[str, Tensor]:
        """p(z | all that the run holds) of each site z, ``(..., K)``, K values last: the gradient of the log of the sum
        by log p(z).
        """
        met, factors, moves = self.met, [term.factor(True) for term in self.met.terms], list[Tensor]()
        for dim, latent in met.latents.items():
            # A factor of 1 for each value and element: its gradient is that of p(z).
            shape = latent.size, *[1] * (dim - 1 - PLATES), *sizes(latent.plates)
            moves.append(factors[0].value.new_zeros(shape).requires_grad_())
            factors.append(Factor(frozenset([dim]), latent.plates, moves[-1]))
        if not moves:
            return {}
        with torch.enable_grad():
            # ∂ log Σ_z p(z) p(data | z) / ∂ log p(z = k) = p(z = k | data), of each element of its plates.
            total = torch.stack([factor.value.sum() for factor in met.contract(factors)]).sum()
            shares = torch.autograd.grad(total, moves)
        return {
            name: share.reshape(len(share), *share.shape[share.dim() - depth(plates) :]).movedim(0, -1)
            for (name, plates, *_), share in zip(met.latents.values(), shares)
        }

    def _latents(self, msg: Any) -> frozenset[int]:
        """The dimensions of enumerated latents that a site's distribution has."""
        fn, shape = msg["fn"], msg["fn"].batch_shape
        found = [dim for dim in range(PLATES + 1, len(shape) + 1) if shape[-dim] != 1]
        # test_enumeration.py::test_what_cannot_be_summed_out
        of_gp = as_process(fn)[0] is not None and any(size > 1 for size in (*shape, *fn.event_shape)[:-PLATES])
        known = {dim: latent.size for dim, latent in self.met.latents.items()}
        if of_gp or any(shape[-dim] != known.get(dim) for dim in found):
            raise ValueError(
                f"site {msg['name']!r} has a distribution of shape {tuple(fn.shape())} where {self.names} are "
                "enumerated: their values stand along dimensions of their own, left of all plates'. Write "
                "table[z, rows], torch.where(z == 1, ...), and z[group], with the numbers on z itself, where rows pick "
                "an element of its plate; and choose among GP sites, or outputs of one, downstream of them."
            )
        return frozenset(found)

    def _require_alike(self, msg: Any, latents: frozenset[int], plates: Plates) -> None:
        """Raise if a site is not scaled as what it depends on, or it is not known on which element of a latent's plates
        each of its rows depends.
        """
        met = self.met
        for dim in latents:
            latent, there, _, scale = met.latents[dim]
            # A mixture to a power is no mixture of powers: test_what_cannot_be_summed_out, of numbers and of tensors.
            if not (torch.as_tensor(scale) == torch.as_tensor(msg["scale"])).all():
                raise ValueError(
                    f"site {msg['name']!r} is not scaled as the discrete site {latent!r}, on which it depends: put "
                    "both under the same poutine.scale. A mini-batch takes some elements of its plate, with all of "
                    "their rows."
                )
            for key, frame in there.items():
                numbers = met.numbers.get(key, [])
                if key in plates:
                    # z[index] in the plate of z itself: test_group_classes.py::test_which_groups_cannot_be_summed_out.
                    own = torch.arange(frame.size)
                    known = all(len(index) != len(own) or torch.equal(index, own.to(index)) for index in numbers)
                else:  # each row has to have picked one element
                    known = key in met.picked(there, plates) and len(numbers) == 1
                if known:
                    continue
                raise ValueError(
                    f"site {msg['name']!r} in plates {list(plates)} depends on the enumerated discrete site {latent!r} "
                    f"in plates {list(there)}: each row has to depend on one element of it. Put site {msg['name']!r} "
                    f"into these plates too, index {latent!r} by each row's number before anything else, "
                    f"{latent}[group], or sum it out in the model."
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
