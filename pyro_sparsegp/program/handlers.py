"""Handlers of a program's run that hold its values, hide it, or look at it ahead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.mask_messenger import MaskMessenger
from pyro.poutine.messenger import Messenger, block_messengers
from pyro.poutine.scale_messenger import ScaleMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor

from .enumeration import Enumeration
from .traces import all_sites, as_process, fill_masked, is_observation, repeatable, sample_sites

NO_RUN = poutine.Trace()  # which has met no site


class Held(Messenger):
    """Holds sites of a guide's run at values drawn before."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]


class _Holding(Messenger):
    """Holds sites at values; they pass for observed.

    :param values: of sites, whatever data the model has there.
    :param free: of those that the model leaves free.
    """

    def __init__(self, values: Mapping[str, Tensor], free: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.free = values, free

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        # Data stay what they are, unless they are among the values: DensityReader.density asks at others.
        values = self.values if name in self.values or msg["is_observed"] else self.free
        if name in values:
            msg["value"], msg["is_observed"] = values[name], True


def held_trace(
    model: Callable, values: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any], like: poutine.Trace = NO_RUN
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
    free = {name: site["value"] for name, site in all_sites(like) if site["type"] == "sample"}
    trace = trace_like(like, lambda: Enumeration()(model)(*args, **kwargs), _Holding(values, free))
    for name, site in sample_sites(trace).items():
        if not site["is_observed"]:
            raise ValueError(
                f"site {name!r} has no value when the model's densities are read: a handler around this call, such as "
                "poutine.reparam, changes which sites there are. Wrap the model in it before it goes to AutoSparseGP."
            )
    return trace


def trace_like(like: poutine.Trace, run: Callable[[], Any], handler: Messenger) -> poutine.Trace:
    """The trace of a run that other handlers do not see; its sites get the scales and masks of another run, under the
    handlers around this one.
    """
    there: dict[str, Any] = dict(like.nodes)
    with poutine.block(), poutine.trace() as tracer, handler:
        run()
    for name, site in sample_sites(tracer.trace).items():
        # test_conditioned.py::test_handlers_around_are_seen_as_the_objective_sees_them
        if name in there:
            site["scale"], site["mask"] = there[name]["scale"], there[name]["mask"]
        fill_masked(site)
    return tracer.trace


# A program's run with some values moved, all others held.
Rerun = Callable[[Mapping[str, Tensor]], poutine.Trace]


def held_runs(model: Callable, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any]) -> Rerun:
    """Runs of a program with the values given, all else as it was in a run."""
    return lambda moved: held_trace(model, moved, args, kwargs, trace)


def unrecorded(same: bool, learns: bool) -> Any:
    """Hide a run from the traces around it. Handlers that change its sites stay in force, but scales and masks where
    the data are not those that the call is about, and for the mask that leaves all out, by which Pyro's prediction says
    that it wants no densities.

    :param same: whether the run is of the call's data.
    :param learns: whether the call is a step of training.
    """
    kinds = (TraceMessenger,) if same or learns else (TraceMessenger, MaskMessenger, ScaleMessenger)

    def hides(m: Any) -> bool:
        sees_sites = isinstance(m, kinds) and not getattr(m, "param_only", False)  # optimisers see parameters
        return sees_sites or (not learns and isinstance(m, MaskMessenger) and m.mask is False)

    return block_messengers(hides)


def is_blocked(model: Callable) -> bool:
    """Whether a model was given under ``poutine.block``, which hides sites of it."""
    match getattr(model, "func", None):
        case partial(args=(handler, inner, *_)):  # as Pyro's handlers wrap a model
            return isinstance(handler, BlockMessenger) or is_blocked(inner)
    return False


def stand_in(fn: Any) -> Tensor:
    """A value of a distribution where none is asked for: not a draw, which transforms such as ``torch.func.hessian``
    refuse, if there is another.
    """
    try:
        value = fn.enumerate_support(expand=False)[0] if fn.has_enumerate_support else fn.mean
    except (NotImplementedError, AttributeError):
        return fn.sample()
    return value.detach().expand(fn.shape())


def observes(model: Callable, rows: Collection[str], like: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a run of the model with these arguments has data at ``rows``: it is run ahead, its GP sites at means."""

    def value_of(site: Any) -> Tensor:
        return site["fn"].mean if as_process(site["fn"])[0] else site["fn"]().to(like.device)

    with poutine.block(), pyro.validation_enabled(False), torch.no_grad(), repeatable(like), InitMessenger(value_of):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return any(name in rows and is_observation(site) for name, site in all_sites(trace))
