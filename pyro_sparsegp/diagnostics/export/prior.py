"""Draws from the prior in ArviZ's schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from pyro import poutine
from pyro.infer.inspect import get_dependencies
from pyro.poutine.util import site_is_subsample

from ...program.traces import as_process, is_observation, whole_plates
from . import backend
from .arguments import require_arguments, require_model
from .draws import LARGEST_JOINT, seeded, sites_of
from .labels import Labels, constant_data
from .writer import Writer, name_of

if TYPE_CHECKING:
    import xarray
else:
    xarray = backend.Later("xarray")

__all__ = ["draw_prior", "prior_predictive"]


def prior_predictive(
    model: Callable,
    *args: Any,
    num_samples: int = 500,
    include_f: bool = False,
    observed: Optional[Collection[str]] = None,
    coords: Optional[Mapping[str, Any]] = None,
    dims: Optional[Mapping[str, Sequence[str]]] = None,
    dtype: str = "float32",
    seed: Optional[int] = None,
    name: Optional[str] = None,
    **kwargs: Any,
) -> xarray.DataTree:
    """Draws from the prior, as an ``xarray.DataTree`` with ``prior``, ``prior_predictive``, ``observed_data`` and
    ``constant_data``.

    Observations among the arguments are kept for comparison, and drawn anew; they may be left out. Function values are
    exact joint draws, in O(N³); choose some of the rows where N is beyond a few thousand.

    :param model: the model.
    :param args: its arguments.
    :param num_samples: how many draws.
    :param include_f: keep function values, ``(chain, draw, N)``.
    :param observed: names of the sites that hold data. By default those that do with these arguments; where
        observations are left out, those on which no other site depends.
    :param coords: coordinate values by dimension.
    :param dims: names of a variable's dimensions.
    :param dtype: of all groups.
    :param seed: makes the draws repeatable and leaves the global generators alone.
    :param name: the tree's name.
    :param kwargs: the model's further arguments.
    :raises ValueError: where an argument of the model is missing, or ``observed``, ``dims`` or ``coords`` name what is
        not there, or N is so large that joint draws are out of the question.
    """
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples must be a whole number of at least 1, got {num_samples!r}")
    if isinstance(observed, str):
        raise ValueError(f"observed must be a collection of names, got the string {observed!r}: give [{observed!r}]")
    backend.xarray()
    require_model("prior_predictive", "then its arguments: (model, x)", model)
    remedy = (
        "Give the observations, which are kept for comparison and drawn anew, or None in their place if the model "
        "passes them on as obs: model(x, None)."
    )
    require_arguments("prior_predictive", remedy, model, args, kwargs)
    shared = {"model": name_of(model), "name": name}
    writer = Writer(Labels(dims, coords), (1, num_samples), dtype)
    with seeded(seed):
        groups = draw_prior(model, args, kwargs, writer, shared, observed, include_f)
    return backend.xarray().DataTree.from_dict(groups, name=name)


@torch.no_grad()
def draw_prior(
    model: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    writer: Writer,
    shared: dict[str, Any],
    observed: Optional[Collection[str]],
    include_f: bool,
    check: bool = True,
) -> dict[str, Any]:
    """The groups of :func:`prior_predictive`.

    :param shared: attributes of all groups.
    :param check: whether the user's labels must be of these groups.
    """
    fixed: dict[str, dict[str, Any]] = {}
    with whole_plates(), poutine.block():
        with _Sizes():
            first = poutine.trace(model).get_trace(*args, **kwargs)
        values = {n: site["value"] for n, site in sites_of(first) if is_observation(site)}
        names = _data_sites(first, observed, values) if observed or values else _last_of(model, first, args, kwargs)
        for s in range(writer.shape[1]):
            trace = poutine.trace(poutine.uncondition(model)).get_trace(*args, **kwargs)
            writer.at(0, s)
            for variable, site in sites_of(trace):
                if site_is_subsample(site):
                    continue
                if as_process(site["fn"])[0] is not None:
                    writer.functions.add(variable)
                    if not include_f:
                        continue
                if s == 0 and variable in names:
                    writer.learn_kinds({variable: site})
                    writer.labels.learn({variable: {**site, "is_observed": True}})
                writer.put("prior_predictive" if variable in names else "prior", variable, site["value"])
            if not fixed:
                fixed = {
                    "observed_data": {n: writer.whole(n, value.cpu().numpy()) for n, value in values.items()},
                    "constant_data": constant_data(model, args, kwargs, values),
                }
                if check:
                    writer.check(writer.datasets(shared, {}, fixed))
    return writer.datasets(shared, {}, fixed)


def _data_sites(trace: Any, observed: Optional[Collection[str]], values: Collection[str]) -> set[str]:
    there = [name for name, site in sites_of(trace) if not site_is_subsample(site)]
    unknown = sorted(set(observed or ()) - set(there))
    if unknown:
        raise ValueError(f"observed names {unknown}, which are no sites of the model: it has {there}")
    return {*values, *(observed or ())}


def _last_of(model: Callable, trace: Any, args: tuple, kwargs: dict[str, Any]) -> set[str]:
    """Sites on which no other depends: with observations left out, these are the data."""
    dependencies: Any = get_dependencies(model, args, kwargs)["prior_dependencies"]
    upstream = {name for site, names in dependencies.items() for name in names if name != site}
    processes = {name for name, site in sites_of(trace) if as_process(site["fn"])[0] is not None}
    return set(dependencies) - upstream - processes


class _Sizes(poutine.messenger.Messenger):
    """Refuses processes too large to be drawn from."""

    def _pyro_sample(self, msg: Any) -> None:
        process, _ = as_process(msg["fn"])
        if process is not None and process.event_shape[0] > 2 * LARGEST_JOINT:
            raise ValueError(
                f"GP site {msg['name']!r} has {process.event_shape[0]} inputs: exact draws from its prior take O(N³) "
                f"time and O(N²) memory each. Give at most {2 * LARGEST_JOINT} of the rows."
            )
