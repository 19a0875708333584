"""Draws from MCMC samples, in the form of a guide's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ...predict import _Known, bare_model
from ...process import GaussianProcess
from ...program.enumeration import Enumeration
from ...program.traces import as_process, is_observation, whole_plates
from ...whitening import unwhiten
from ..trust.pointwise import Moments, PointwiseDensities, PointwiseReader
from .draws import Draw, is_factor, leave_one_out, log_density_of, require_new, require_shapes, sites_of

__all__ = ["ConditionedSource", "SampleSource"]


class SampleSource:
    """Draws from MCMC samples of the same model, with or without :class:`~pyro_sparsegp.Whitening`.

    :param samples: ``(chain, draw, ...)`` each.
    """

    name = "mcmc"
    joint = True
    exact = True
    drawn: frozenset[str] = frozenset()

    def __init__(self, model: Callable, samples: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = bare_model(model), args, kwargs
        first = next(iter(samples.values()))
        self.shape = first.shape[:2]
        self.samples = {name: value.flatten(0, 1) for name, value in samples.items()}
        with poutine.block(), whole_plates():
            trace = poutine.trace(Enumeration()(self.model)).get_trace(*args, **kwargs)
        seen = {name: site for name, site in sites_of(trace) if is_observation(site) and not site_is_subsample(site)}
        self.data = [name for name, site in seen.items() if not is_factor(site)]
        self.factors = [name for name, site in seen.items() if is_factor(site)]
        if not seen:
            raise ValueError("the model observes nothing at these arguments: give the training data, (x, y)")
        self.names = [name for name, site in sites_of(trace) if not site_is_subsample(site)]
        require_shapes({name: seen[name] for name in self.data})
        self.reader = PointwiseReader(self.model, args, kwargs, [*self.data, *self.factors])
        self.stats: dict[str, Any] = {}  # what the sampler knows of each draw, (chain, draw) by name
        self.attributes: dict[str, Any] = {}  # and of the run
        self._next = 0

    @torch.no_grad()
    def draw(self) -> Draw:
        """The next sample."""
        s = self._next % (self.shape[0] * self.shape[1])
        self._next += 1
        hold = _Hold({name: value[s] for name, value in self.samples.items()})
        with poutine.block(), whole_plates(), hold:
            trace = poutine.trace(Enumeration()(self.model)).get_trace(*self.args, **self.kwargs)
        seen = {*self.data, *self.factors}
        values, log_priors = {}, {}
        held = {}
        for name, site in sites_of(trace):
            if name in seen:
                continue
            if site_is_subsample(site):
                held[name] = site["value"]
                continue
            log_priors[name] = log_density_of(site["fn"], site, site["value"])
            if name not in hold.processes:
                values[name] = held[name] = site["value"]
        sites = dict(sites_of(trace))
        functions = {name: sites[name]["value"] for name in hold.processes}
        moments = {name: leave_one_out(process, functions[name]) for name, process in hold.processes.items()}
        data = {name: sites[name] for name in self.data}
        factors = {name: sites[name] for name in self.factors}
        stats = {name: torch.as_tensor(stat.reshape(-1)[s]) for name, stat in self.stats.items()}
        return Draw(values, {}, functions, held, moments, data, log_priors, factors=factors, stats=stats)

    def densities(self, draw: Draw) -> PointwiseDensities:
        """The draw's pointwise densities, each function value integrated given the others."""
        return self.reader(draw.held, draw.moments)

    def log_joint(self, draw: Draw, densities: PointwiseDensities) -> Tensor:
        """log p of the draw and the data."""
        return draw.log_prior + self.reader.total({**draw.held, **draw.functions})

    def log_joints(self, draw: Draw, densities: PointwiseDensities) -> dict[str, Tensor]:
        """By name, log p of the draw and the data."""
        return {"lp": self.log_joint(draw, densities)}

    def at(self, args: tuple, kwargs: dict[str, Any], draw: Draw) -> dict[str, Tensor]:
        """Every site at new inputs, given a draw."""
        known = _Known(self.model, {**draw.values, **draw.functions}, self.args, self.kwargs)
        with torch.no_grad(), poutine.trace() as tracer:
            new = known.draw(args, kwargs)
        require_new(tracer.trace)
        kept = {name: value for name, value in new.items() if name not in draw.values or name in known.local}
        return {name: value for name, value in kept.items() if name not in self.factors}


class ConditionedSource(SampleSource):
    """Draws from MCMC samples at other data than the samples': function values are given those at the training data."""

    def __init__(
        self,
        model: Callable,
        samples: Mapping[str, Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        old_args: tuple,
        old_kwargs: dict[str, Any],
    ) -> None:
        super().__init__(model, samples, args, kwargs)
        self.old = old_args, old_kwargs

    @torch.no_grad()
    def draw(self) -> Draw:
        """The next sample, at the new data."""
        s = self._next % (self.shape[0] * self.shape[1])
        self._next += 1
        known = _Known(self.model, {name: value[s] for name, value in self.samples.items()}, *self.old)
        conditioned = _Conditioned(known)
        with poutine.block(), whole_plates(), conditioned:
            trace = poutine.trace(Enumeration()(self.model)).get_trace(*self.args, **self.kwargs)
        sites = dict(sites_of(trace))
        functions = {name: sites[name]["value"] for name in conditioned.moments}
        others = {*self.data, *self.factors, *functions}
        latent = {n: site["value"] for n, site in sites.items() if n not in others}
        data = {name: sites[name] for name in self.data}
        return Draw(latent, {}, functions, latent, conditioned.moments, data, {})


class _Conditioned(Messenger):
    """Runs the model at new data given one MCMC sample, with the marginals of function values."""

    def __init__(self, known: _Known) -> None:
        super().__init__()
        self.known = known
        self.moments: dict[str, Moments] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if msg["is_observed"] or site_is_subsample(msg):
            return
        process, _ = as_process(msg["fn"])
        if process is not None:
            given = process.given(*self.known.known[name])
            mean, variance = given.mean, given.variance.clamp(min=0)
            self.moments[name] = mean, variance
            msg["value"] = mean + variance.sqrt() * torch.randn_like(mean)
        elif name in self.known.sample and name not in self.known.local:
            msg["value"] = self.known.sample[name]


class _Hold(Messenger):
    """Holds a model's sites at one MCMC sample."""

    def __init__(self, sample: dict[str, Tensor]) -> None:
        super().__init__()
        self.sample = sample
        self.processes: dict[str, GaussianProcess] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if msg["is_observed"] or site_is_subsample(msg):
            return
        process, _ = as_process(msg["fn"])
        if process is not None:
            self.processes[name] = process
        if name in self.sample:
            msg["value"] = self.sample[name]
        elif process is not None and f"{name}_whitened" in self.sample:
            msg["value"] = unwhiten(process, self.sample[f"{name}_whitened"])
        else:
            raise ValueError(f"the MCMC samples hold no draws of site {name!r}: they have {sorted(self.sample)}")
