"""Reading runs of a user's model: what its sites are, and their densities with all upstream values held."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import Tensor

from .bare import as_process, bare, fill_masked, sample_sites, without_event
from .enumeration import Enumeration

__all__ = [
    "LEFT_OUT",
    "RandomState",
    "all_sites",
    "as_process",
    "bare",
    "fill_masked",
    "free_values",
    "held_trace",
    "is_free",
    "is_left_out",
    "is_observation",
    "log_densities",
    "piecewise_constant",
    "repeatable",
    "sample_sites",
    "settle_left_out",
    "whole_plates",
    "without_event",
]

LEFT_OUT = "_unobserved"  # how the names of sites end whose values obs_mask= leaves out


def all_sites(trace: poutine.Trace) -> list[tuple[str, Any]]:
    """A trace's sites of all types, with their names."""
    return list(trace.nodes.items())


def is_free(site: Any) -> bool:
    """Whether a sample site is not observed."""
    return site["type"] == "sample" and not site["is_observed"]


def free_values(trace: poutine.Trace) -> dict[str, Tensor]:
    """The values of a trace's sample sites that are not observed, plates' row numbers among them."""
    return {name: site["value"] for name, site in all_sites(trace) if is_free(site)}


def is_observation(site: Any) -> bool:
    """Whether a site holds data, rather than a deterministic value."""
    return site["type"] == "sample" and site["is_observed"] and not site["infer"].get("_deterministic")


def is_left_out(name: str, nodes: Mapping[str, Any]) -> bool:
    """Whether a site holds the values that ``obs_mask=`` leaves out: Pyro makes y_observed and y_unobserved of y."""
    twin = nodes.get(name.removesuffix(LEFT_OUT) + "_observed") if name.endswith(LEFT_OUT) else None
    return twin is not None and twin["is_observed"] and isinstance(twin["mask"], Tensor)


def settle_left_out(site: Any, nodes: Mapping[str, Any], draw: bool) -> None:
    """Make such values neither latents nor data: given f they have the density p(y | f), which integrates to 1.

    :param draw: draw them from the model; or take any, the observed ones, where no density depends on them.
    """
    # A handler may have given them values, as MCMC's samples or condition do.
    if site["value"] is None:
        twin = site["name"].removesuffix(LEFT_OUT) + "_observed"
        site["value"] = site["fn"]() if draw else nodes[twin]["value"]
    site["is_observed"], site["mask"] = True, False
    site["infer"] = {**(site["infer"] or {}), "_deterministic": True}


def piecewise_constant(trace: poutine.Trace) -> list[str]:
    """The observed sites whose distributions say that their density is piecewise constant in function values."""
    return [
        name
        for name, site in sample_sites(trace).items()
        if is_observation(site) and getattr(bare(site["fn"]), "piecewise_constant", False)
    ]


class _Holding(Messenger):
    """Holds sites at values; they pass for observed.

    :param values: of sites, whatever data the model has there.
    :param free: of those that the model leaves free.
    """

    def __init__(self, values: Mapping[str, Tensor], free: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.free = values, free
        self.nodes: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        self.nodes[name] = msg
        # Data stay what they are, unless they are among the values: DensityReader.density asks at others.
        values = self.values if name in self.values or msg["is_observed"] else self.free
        if name in values:
            msg["value"], msg["is_observed"] = values[name], True
        if is_left_out(name, self.nodes):
            settle_left_out(msg, self.nodes, draw=False)


def held_trace(
    model: Callable,
    values: Mapping[str, Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    like: Optional[poutine.Trace] = None,
) -> poutine.Trace:
    """A run of the model with sites held at ``values``, unseen by other handlers.

    :param values: for every latent site, and for the plates' subsample sites, so that the run sees the rows that
        the values belong to.
    :param like: a run under the handlers around this one, whose values are held besides, and whose scales and masks
        sites get.
    :returns: the trace, in which the held sites pass for observed; densities are to be had from its sites' ``fn``.
        Discrete sites that are enumerated are not in it: others' densities are summed over them.
    :raises ValueError: naming a site that would be drawn.
    """
    there: dict[str, Any] = {} if like is None else dict(like.nodes)
    free = {name: site["value"] for name, site in there.items() if site["type"] == "sample"}
    with poutine.block(), poutine.trace() as tracer, _Holding(values, free):
        Enumeration()(model)(*args, **kwargs)
    trace = tracer.trace
    for name, site in sample_sites(trace).items():
        if is_free(site):
            raise ValueError(
                f"site {name!r} has no value when the model's densities are read: a handler around this call, such as "
                "poutine.reparam, changes which sites there are. Wrap the model in it before it goes to AutoSparseGP."
            )
        # test_conditioned.py::test_handlers_around_are_seen_as_the_objective_sees_them
        if name in there:
            site["scale"], site["mask"] = there[name]["scale"], there[name]["mask"]
        fill_masked(site)
    return trace


def log_densities(trace: poutine.Trace, skip: Collection[str] = (), by_entry: bool = False) -> dict[str, Tensor]:
    """The log densities, masked and scaled, of a run's sample sites but ``skip`` and those masked as a whole.

    :param by_entry: with dimensions that ``.to_event`` has added up taken apart again.
    """
    found = {}
    for name, site in sample_sites(trace).items():
        if name not in skip and site["mask"] is not False:
            fn, event_dim = without_event(site["fn"]) if by_entry else (site["fn"], 0)
            # They are of rows: ones more behind for the dimensions that .to_event has added.
            scale, mask = (
                part.reshape(*part.shape, *[1] * event_dim) if isinstance(part, Tensor) and part.dim() else part
                for part in (site["scale"], site["mask"])
            )
            found[name] = torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), scale, mask))
    return found


class RandomState:
    """The state of the generators that a step draws from."""

    def __init__(self, like: Tensor) -> None:
        on_device = [torch.cuda.default_generators[like.device.index]] if like.is_cuda else []
        self.generators = [torch.default_generator, *on_device]
        self._states = [generator.get_state() for generator in self.generators]

    @property
    def has_moved(self) -> bool:
        """Whether anything was drawn since."""
        return not all(torch.equal(state, g.get_state()) for state, g in zip(self._states, self.generators))

    def restore(self) -> None:
        """Put the generators back."""
        for generator, state in zip(self.generators, self._states):
            generator.set_state(state)


@contextmanager
def repeatable(like: Tensor) -> Iterator[None]:
    """The same random numbers each time, and the global generator as it was."""
    state = RandomState(like)
    for generator in state.generators:  # torch.manual_seed formats the stack for each kind of device, in 1 ms
        generator.manual_seed(0)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def whole_plates() -> Iterator[None]:
    """Turn subsampling off: plates with a ``subsample_size`` take all their rows."""
    # A plate draws its indices in its constructor, from its arguments; no message can change their number.
    original = SubsampleMessenger.__init__

    @functools.wraps(original)
    def whole(self: Any, name: str, size: Any = None, subsample_size: Any = None, subsample: Any = None, *a, **k):  # type: ignore[no-untyped-def]
        original(self, name, size, subsample_size if subsample is not None else None, subsample, *a, **k)

    SubsampleMessenger.__init__ = whole  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubsampleMessenger.__init__ = original  # type: ignore[method-assign]
