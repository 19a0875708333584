"""Handlers of a program's run that hold its values, hide it, look at it ahead, or map it over many values."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.mask_messenger import MaskMessenger
from pyro.poutine.messenger import Messenger, block_messengers
from pyro.poutine.scale_messenger import ScaleMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor

from .asking import asks_program
from .checks import require_known_indices
from .enumeration import PLATES, Enumeration, Factor, own_sizes, sizes
from .owners import kept_buffers
from .traces import (
    all_sites,
    as_process,
    fill_masked,
    free_values,
    is_observation,
    repeatable,
    sample_sites,
    whole_plates,
)

NO_RUN = poutine.Trace()  # which has met no site


class Held(Messenger):
    """Holds sites that have no data at values; if these are taken ``as_data``, sites pass for observed."""

    def __init__(self, values: Mapping[str, Tensor], as_data: bool = False) -> None:
        super().__init__()
        self.values, self.as_data = values, as_data

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"], msg["is_observed"] = self.values[msg["name"]], self.as_data


def held_trace(
    model: Callable, values: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any], like: poutine.Trace = NO_RUN
) -> poutine.Trace:
    """A run of the model with sites held at ``values``, unseen by other handlers: they pass for observed. Discrete
    sites that are enumerated are not in it; a site that would be drawn raises.

    ``like`` is a run under the handlers around this one: its values are held too, and sites get its scales and masks.
    Held are all latents, and plates' rows, so that the run sees those that the values belong to.
    """
    free = {name: site["value"] for name, site in all_sites(like) if site["type"] == "sample"}
    # Data stay what they are, unless they are among the values: DensityReader.density asks at others.
    held = poutine.condition(Enumeration({**values, **free})(model), data=dict(values))
    trace = trace_like(like, lambda: held(*args, **kwargs), Held(free, as_data=True))
    if drawn := [name for name, site in sample_sites(trace).items() if not site["is_observed"]]:
        raise ValueError(
            f"site {drawn[0]!r} has no value when the model's densities are read: a handler around this call, such as "
            "poutine.reparam, changes which sites there are. Wrap the model in it before it goes to AutoSparseGP."
        )
    return trace


def trace_like(like: poutine.Trace, run: Callable[[], Any], handler: Messenger) -> poutine.Trace:
    """The trace of a run that other handlers do not see; its sites get the scales and masks of another run, under the
    handlers around this one.
    """
    there: dict[str, Any] = dict(like.nodes)
    with poutine.block(), poutine.trace() as tracer, asks_program(), handler, kept_buffers():
        run()
    for name, site in sample_sites(tracer.trace).items():
        site["own"] = site["scale"], site["mask"]
        if name in there:
            site["scale"], site["mask"] = there[name]["scale"], there[name]["mask"]
        fill_masked(site)
    return tracer.trace


# A program's run with some values moved, all others held.
Rerun = Callable[[Mapping[str, Tensor]], poutine.Trace]


def held_runs(model: Callable, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any]) -> Rerun:
    """Runs of a program with the values given, all else as it was in a run."""
    return lambda moved: held_trace(model, moved, args, kwargs, trace)


def given_data(
    model: Callable, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any], known: Collection[str]
) -> dict[str, Tensor]:
    """If a run met data, draws given these of its discrete latents that are summed out in training, and values of all
    sites under them; nothing, if it met none. Those that are ``known`` stay.
    """
    sites, free = sample_sites(trace), free_values(trace)
    drawn = [n for n in free if n in sites and sites[n]["infer"].get("enumerate") == "parallel" and n not in known]
    if not drawn or not any(map(is_observation, sites.values())):
        return {}
    values, summed = {name: value for name, value in free.items() if name not in drawn}, Enumeration()
    with whole_plates(), poutine.block(), Held(values):
        poutine.trace(summed(model)).get_trace(*args, **kwargs)
        with Held(summed.draw_of(drawn)):
            again = sample_sites(poutine.trace(model).get_trace(*args, **kwargs))
    return {name: site["value"] for name, site in again.items()}


def class_probabilities(
    model: Callable, values: Mapping[str, Tensor], *args: object, **kwargs: object
) -> dict[str, Tensor]:
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
    factors, moves = [term.factor(True, term.site["value"]) for term in enumeration.terms], list[Tensor]()
    for dim, latent in enumeration.latents.items():
        # A factor of 1 for each value and element: its gradient is that of p(z).
        shape = len(latent.support), *[1] * (dim - 1 - PLATES), *sizes(latent.plates)
        moves.append(factors[0].value.new_zeros(shape).requires_grad_())
        factors.append(Factor(frozenset([dim]), latent.plates, moves[-1]))
    if not moves:
        return {}
    with torch.enable_grad():
        total = torch.stack([factor.value.sum() for factor in enumeration.contract(factors)[0]]).sum()
    return {
        name: share.reshape(len(share), *own_sizes(plates)).movedim(0, -1)
        for (name, plates, *_), share in zip(enumeration.latents.values(), torch.autograd.grad(total, moves))
    }


def unrecorded(same: bool, learns: bool) -> Any:
    """Hide a run from the traces around it. Handlers that change its sites stay in force, but scales and masks where
    its data are not the ``same`` that the call is about, and for the mask that leaves all out: with it Pyro's
    prediction says that it needs no densities.
    """
    kinds = (TraceMessenger,) if same or learns else (TraceMessenger, MaskMessenger, ScaleMessenger)

    def hides(m: object) -> bool:
        sees_sites = isinstance(m, kinds) and not getattr(m, "param_only", False)  # optimisers see parameters
        return sees_sites or (not learns and isinstance(m, MaskMessenger) and m.mask is False)

    return block_messengers(hides)


def is_blocked(model: Callable) -> bool:
    """Whether a model was given under ``poutine.block``, which hides sites of it."""
    match getattr(model, "func", None):
        case partial(args=(handler, inner, *_)):  # as Pyro's handlers wrap a model
            return isinstance(handler, BlockMessenger) or is_blocked(inner)
    return False


def stand_in(fn: TorchDistribution) -> Tensor:
    """A value of a distribution where any will do: not a draw, which transforms such as ``torch.func.hessian`` refuse,
    if there is another.
    """
    try:
        value = fn.enumerate_support(expand=False)[0] if fn.has_enumerate_support else fn.mean
    except (NotImplementedError, AttributeError):
        return fn.sample()
    return value.detach().expand(fn.shape())


@require_known_indices()
def observes(model: Callable, rows: Collection[str], like: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a run of the model with these arguments has data at ``rows``: it is run ahead, its GP sites at means."""

    def value_of(site: dict[str, Any]) -> Tensor:
        return site["fn"].mean if as_process(site["fn"])[0] else site["fn"]().to(like.device)

    with (
        poutine.block(),
        pyro.validation_enabled(False),
        torch.no_grad(),
        repeatable(like),
        InitMessenger(value_of),
        kept_buffers(),
        poutine.trace() as tracer,  # which, around a function, would write the sites behind an error's message
    ):
        model(*args, **kwargs)
    return any(name in rows and is_observation(site) for name, site in all_sites(tracer.trace))
