"""Draws from any result, a guide, MCMC, or MCMC's samples; and what was given in the place of a model or a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.inspect import get_dependencies
from torch import Tensor

from ..guide import AutoSparseGP
from ..inference.batches import signature_of
from ..inference.quadrature import own_guide
from ..predict import Call, Trained, bare_model, sampled
from ..process import GaussianProcess
from ..program.enumeration import Enumeration
from ..program.traces import as_process, free_values, is_observation, sample_sites, whole_plates, without_event
from ..warned import Warned
from .densities import DensityReader, Moments
from .draws import Draws, GuideSource, Source, is_factor, log_density_of, require_shapes


def guide_of(given: Any) -> Optional[AutoSparseGP]:
    """A guide, or that of an object which has one, SVI or expectation propagation."""
    guide = given if isinstance(given, AutoSparseGP) else getattr(given, "guide", None)
    return guide if isinstance(guide, AutoSparseGP) else None


def is_tree(given: Any) -> bool:
    """Whether this is a tree of groups; modules have a method of the name."""
    return isinstance(getattr(given, "children", None), Mapping)


def require_call(function: str, order: str, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise where something else stands in the model's place, or it cannot be called with these arguments."""
    if not callable(model) or guide_of(model) is not None or isinstance(model, MCMC) or is_tree(model):
        raise ValueError(f"{function} takes the model first, {order}; got {type(model).__name__} in its place")
    try:
        signature_of(model).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{function} cannot call the model: {error}. It takes {order}") from error


def as_source(model: Callable, result: Any, args: tuple, kwargs: dict[str, Any], marginal: bool = False) -> Source:
    """Draws from any result: a guide, an object with one (SVI, expectation propagation), MCMC, or its samples.

    :raises ValueError: where ``result`` is none of these, or belongs to another model.
    """
    has_run = isinstance(result, MCMC)
    now = (args, kwargs) if args or marginal or not has_run else sampled(result, None)[1]
    order = "then the guide or the MCMC, then the training data: (model, guide, x, y)"
    require_call("a posterior's draws", order, model, *now)
    guide = guide_of(result)
    if guide is not None:
        return GuideSource(own_guide(model, guide, "this diagnostic"), args, kwargs, marginal)
    samples, old, diverging = sampled(result, None if has_run else now)
    return SampleSource(model, samples, diverging, now, old if marginal and has_run else None)


def observed_site(source: Source, var_name: Optional[str]) -> str:
    """The observed site of that name, or the only one.

    :raises ValueError: where there is none, or there are several and none is named.
    """
    if var_name in source.data or (var_name is None and len(source.data) == 1):
        return var_name or source.data[0]
    raise ValueError(
        f"var_name must be one of the observed sites {source.data}, got {var_name!r}. A pyro.factor holds no "
        "observations that could be left out or predicted."
    )


class SampleSource(Source):
    """Draws from MCMC samples of the same model, with or without :class:`~pyro_sparsegp.Whitening`.

    :param samples: ``(chain, draw, ...)`` each, and which transitions diverged, ``(chain, draw)``.
    :param now: the model's arguments.
    :param old: those of training, where these are others: function values are then integrated given those there.
    """

    name = "mcmc"
    joint = True

    def __init__(
        self, model: Callable, samples: Mapping[str, Tensor], diverging: Tensor, now: Call, old: Optional[Call]
    ) -> None:
        self.model, self.old, self.warned = bare_model(model), old, Warned()
        self.args, self.kwargs = now
        self.shape = diverging.shape
        self.samples = {name: value.flatten(0, 1) for name, value in {**samples, "": diverging}.items()}
        # Discrete latents are summed out, as they were when the sampler ran.
        with torch.no_grad(), poutine.block(), whole_plates():
            sites = sample_sites(poutine.trace(Enumeration()(self.model)).get_trace(*self.args, **self.kwargs))
        self.sites = {name: site for name, site in sites.items() if is_observation(site)}
        if not self.sites:
            raise ValueError("the model observes nothing at these arguments: give the training data, (x, y)")
        self.data = [name for name, site in self.sites.items() if not is_factor(site)]
        require_shapes({name: self.sites[name] for name in self.data})
        self.reader = DensityReader(self.model, self.args, self.kwargs, list(self.sites))

    def items(self, num: int) -> dict[str, Tensor]:
        """All samples, or the first; again from the first, where more are asked for."""
        return {n: value[torch.arange(num, device=value.device) % len(value)] for n, value in self.samples.items()}

    @torch.no_grad()
    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        sample = {name: value for name, value in item.items() if name}
        draw = Draws(stats={"diverging": item[""]})
        with poutine.block(), whole_plates():
            here = self.args, self.kwargs
            trained = Trained(Enumeration()(self.model), sample, *(self.old or here), self.warned)
            trace = trained.at(*here, marginal=True) if self.old else trained.trace
        sites, free = sample_sites(trace), free_values(trace)
        draw.simulated = {name: sites[name]["fn"].sample() for name in self.data if simulates}
        draw.values = {n: site["value"] for n, site in sites.items() if n not in self.sites}
        draw.functions = {name: draw.values.pop(name) for name in trained.known if name in draw.values}
        draw.held = {name: value for name, value in free.items() if name not in draw.functions}
        draw.moments = dict(trained.moments)
        if not self.old:
            self._note_training(sites, sample, draw)
        if new is not None:
            with poutine.block():
                trained.model = self.model  # discrete latents are drawn there, and not summed out
                at_new = trained.at(*new)
            draw.predicted = self.predictions(at_new, sample)
        return draw

    def _note_training(self, sites: Mapping[str, Any], sample: Mapping[str, Tensor], draw: Draws) -> None:
        """Latents' log prior densities, and what is integrated out of function values, at the training inputs."""
        missing = [n for n in draw.values if n not in sample and not sites[n]["is_observed"]]
        if missing:
            raise ValueError(f"the MCMC samples hold no draws of site {missing[0]!r}: they have {sorted(sample)}")
        draw.log_priors = {name: log_density_of(sites[name]) for name in (*draw.values, *draw.functions)}
        # f itself is known: a value is integrated given all others.
        draw.moments = {n: _given_others(without_event(sites[n]["fn"])[0], f) for n, f in draw.functions.items()}


def _given_others(process: GaussianProcess, f: Tensor) -> Moments:
    """Mean and variance of each function value given all others, ``(..., N)`` each, in O(N³).

    fₙ − [K⁻¹(f − μ)]ₙ / [K⁻¹]ₙₙ and 1 / [K⁻¹]ₙₙ (Rasmussen and Williams, 2006, eq. 5.12).
    """
    precision = torch.cholesky_inverse(process.scale_tril.expand(*f.shape, -1))
    variance = 1 / precision.diagonal(dim1=-2, dim2=-1)
    return f - (precision @ (f - process.mean)[..., None])[..., 0] * variance, variance


class PriorSource(Source):
    """Draws from the prior, in which observed sites are drawn anew.

    :param observed: names of the sites that hold data. By default those that do with these arguments; where
        observations are left out, those on which no other site depends.
    """

    name = "prior"
    joint = True

    def __init__(
        self, model: Callable, args: tuple, kwargs: dict[str, Any], observed: Optional[Collection[str]] = None
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        with torch.no_grad(), whole_plates(), poutine.block():
            self.sites = sample_sites(poutine.trace(model).get_trace(*args, **kwargs))
        unknown = sorted(set(observed or ()) - set(self.sites))
        if unknown:
            raise ValueError(f"observed names {unknown}, which are no sites of the model: it has {list(self.sites)}")
        seen = [name for name, site in self.sites.items() if is_observation(site) and not is_factor(site)]
        self.gps = [name for name, site in self.sites.items() if as_process(site["fn"])[0] is not None]
        self.data = list(dict.fromkeys((*seen, *(observed or ())))) or self._last()

    def _last(self) -> list[str]:
        dependencies: Any = get_dependencies(self.model, self.args, self.kwargs)["prior_dependencies"]
        upstream = {name for site, names in dependencies.items() for name in names if name != site}
        return [name for name in self.sites if name in dependencies and name not in (*upstream, *self.gps)]

    @torch.no_grad()
    def make(self, item: Mapping[str, Tensor], new: Optional[Call] = None, simulates: bool = True) -> Draws:
        with whole_plates(), poutine.block():
            trace = poutine.trace(poutine.uncondition(self.model)).get_trace(*self.args, **self.kwargs)
        values = {name: site["value"] for name, site in sample_sites(trace).items() if not is_factor(site)}
        simulated = {name: values.pop(name) for name in self.data if name in values}
        functions = {name: values.pop(name) for name in self.gps if name in values}
        return Draws(values=values, functions=functions, simulated=simulated)
