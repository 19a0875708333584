"""Posteriors and priors as ``xarray.DataTree`` in ArviZ's schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Optional, Union

import torch
import xarray
from pyro import poutine
from pyro.infer.inspect import get_dependencies
from torch import Tensor

from ..inference.batches import arguments_of
from ..numerics.arguments import require_count
from ..predict import Call
from ..program.traces import as_process, is_observation, sample_sites, whole_plates
from .groups import Table
from .sources import Draws, Source, as_source, is_factor, require_call, seeded

Arguments = Union[Tensor, tuple, Mapping[str, Any]]


def to_datatree(
    model: Callable,
    guide: Any,
    *args: Any,
    num_samples: int = 1000,
    predict: Optional[Arguments] = None,
    include_f: bool = False,
    log_likelihood: bool = True,
    posterior_predictive: bool = True,
    coords: Optional[Mapping[str, Any]] = None,
    dims: Optional[Mapping[str, Sequence[str]]] = None,
    dtype: str = "float32",
    seed: Optional[int] = None,
    name: Optional[str] = None,
    **kwargs: Any,
) -> xarray.DataTree:
    """Posterior draws and all that ArviZ needs to judge them, as an ``xarray.DataTree``.

    Its groups are ``posterior``, ``posterior_predictive``, ``log_likelihood``, ``log_prior``, ``sample_stats``,
    ``observed_data`` and ``constant_data``. ``predict`` adds ``predictions`` and ``predictions_constant_data``.
    ``posterior`` holds the hyperparameters, and for each GP site f the coefficients ``f_w`` of its basis, N(0, I) a
    priori. Draws have dimensions ``(chain, draw, ...)``; a guide is one chain, and ``xarray.concat`` joins trees of
    several.

    The log likelihood of a guide's draw (w, θ) is log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ. That of an MCMC draw (f, θ) is
    log ∫ p(yₙ | fₙ) p(fₙ | f₋ₙ, θ) dfₙ. Either is times the row's weight (``poutine.scale``): leave-one-out leaves a
    row out with all of its weight. For MCMC ``sample_stats`` has ``diverging``; for a guide, in float64, ``log_q``, the
    log density of (θ, w) under q, and ``lp``, that under the target which the guide was trained towards
    (``tree.sample_stats.attrs["target"]``):

    * "vfe", of the evidence lower bound: log p(θ) p(w) + Σₙ E[log p(yₙ | fₙ) | w, θ];
    * "fitc", of expectation propagation: log p(θ) p(w) + Σₙ log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ.

    The draws are of the posterior that the guide predicts with. :class:`~pyro_sparsegp.families.ExactWeightSpace`
    predicts with another q(w) if the kernel has a variance correction. Draws are of that one; the target is "fitc".
    :class:`~pyro_sparsegp.families.ComputationAware` has no tree, because it has no draws of w to weigh. Draws
    are made in blocks, by ``torch.func.vmap`` if the program allows it. A block takes up to some 150 MB.

    :param model: the model.
    :param guide: a fitted guide, an object that has one (SVI, expectation propagation), an ``MCMC`` that has run, or
        its samples.
    :param args: the model's training arguments, all rows, with observations.
    :param num_samples: draws of a guide; MCMC gives one per sample.
    :param predict: the model's arguments at new inputs, observations left out: a tensor, a tuple or a mapping.
    :param include_f: keep function values at the training inputs, ``(chain, draw, N)``.
    :param log_likelihood: whether to compute the log likelihood, and ``lp``.
    :param posterior_predictive: whether to draw posterior predictions.
    :param coords: coordinate values by dimension.
    :param dims: names of a variable's dimensions, instead of the plates' names and ``{variable}_dim_{i}``.
    :param dtype: of all groups but ``sample_stats``.
    :param seed: makes the draws repeatable and leaves the global generators alone.
    :param name: the tree's name.
    :param kwargs: the model's further arguments.
    :raises ValueError: where the result, the arguments or the labels do not fit.
    """
    require_count(num_samples, "num_samples")
    source, new = as_source(model, guide, args, kwargs), None if predict is None else arguments_of(predict)
    shape = source.shape or (1, num_samples)
    table = Table(source, shape, dtype, dims, coords)
    table.blocks["posterior"] = {}  # with draws, though function values that are left out may be all there is
    with seeded(seed):
        for draws in source.draws(shape[0] * shape[1], new, posterior_predictive):
            groups = draws.groups(include_f)
            if log_likelihood:
                densities = source.reader(draws.held, draws.moments)
                groups["log_likelihood"] = {site: densities.weighted[site] for site in source.data}
                if "log_q" in draws.stats:  # against which importance weights set log p of the draws and the data
                    groups["sample_stats"]["lp"] = draws.log_prior + densities.towards[source.target]
            table.put(groups, draws.functions)
    if new is not None:
        table.fix_arguments("predictions_constant_data", *new, {})
    return table.tree(name)


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
    :raises ValueError: where an argument of the model is missing, or ``observed`` names what is not there.
    """
    require_count(num_samples, "num_samples")
    order = "then its arguments, with observations, which are drawn anew, or None in their place: (model, x, None)"
    require_call("prior_predictive", order, model, args, kwargs)
    with seeded(seed):
        source = _Prior(model, args, kwargs, observed or ())
        table = Table(source, (1, num_samples), dtype, dims, coords)
        for draws in source.draws(num_samples):
            groups = draws.groups(include_f)
            named = {"prior": groups["posterior"], "prior_predictive": groups["posterior_predictive"]}
            table.put(named, draws.functions)
    return table.tree(name)


class _Prior(Source):
    """Draws from the prior, in which observed sites are drawn anew."""

    joint = True

    @torch.no_grad()
    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any], observed: Collection[str]) -> None:
        super().__init__(model, args, kwargs)
        with whole_plates(), poutine.block():
            self.sites = sample_sites(poutine.trace(model).get_trace(*args, **kwargs))
        unknown = sorted(set(observed) - set(self.sites))
        if unknown:
            raise ValueError(f"observed names {unknown}, which are no sites of the model: it has {list(self.sites)}")
        seen = [name for name, site in self.sites.items() if is_observation(site) and not is_factor(site)]
        self.gps = [name for name, site in self.sites.items() if as_process(site["fn"])[0] is not None]
        self.data = list(dict.fromkeys((*seen, *observed)))
        if not self.data:  # they are the sites on which no other depends
            dependencies: Any = get_dependencies(model, args, kwargs)["prior_dependencies"]
            upstream = {name for site, names in dependencies.items() for name in names if name != site}
            self.data = [name for name in self.sites if name in dependencies and name not in (*upstream, *self.gps)]

    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        with whole_plates(), poutine.block():
            trace = poutine.trace(poutine.uncondition(self.model)).get_trace(*self.args, **self.kwargs)
        values = {name: site["value"] for name, site in sample_sites(trace).items() if not is_factor(site)}
        simulated = {name: values.pop(name) for name in self.data if name in values}
        functions = {name: values.pop(name) for name in self.gps if name in values}
        return Draws(values=values, functions=functions, simulated=simulated)
