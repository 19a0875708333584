"""One way to draw from any result: a guide, MCMC, or MCMC's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Optional

import numpy as np
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..predict import _Known, _samples_and_data, bare_model, divergences
from ..program.enumeration import Enumeration
from ..program.traces import as_process, is_observation, whole_plates, without_event
from .densities import DensityReader
from .draws import (
    Draw,
    GuideSource,
    Source,
    is_factor,
    leave_one_out,
    log_density_of,
    require_new,
    require_shapes,
    sites_of,
)
from .given import guide_of, kind_of, require_arguments, require_model

__all__ = ["SampleSource", "as_source", "observed_site"]


def as_source(
    model: Callable,
    result: Any,
    args: tuple,
    kwargs: dict[str, Any],
    exact: bool = False,
    chunk_size: int = 8192,
    marginal: bool = False,
) -> Source:
    """Draws from any result: a guide, an object with one (SVI, expectation propagation), MCMC, or its samples.

    :raises ValueError: where ``result`` is none of these, or belongs to another model.
    """
    require_model("diagnostics", "then the guide or the MCMC, then the model's arguments: (model, guide, x, y)", model)
    guide = guide_of(result)
    if guide is not None:
        if model != guide.model:
            raise ValueError(
                "the guide belongs to another model: give the one it was made for, to_datatree(guide.model, guide, ...)"
            )
        require_arguments("a posterior's draws", "Give the training data, (model, guide, x, y).", model, args, kwargs)
        return GuideSource(guide, args, kwargs, exact, chunk_size, marginal)
    if isinstance(result, MCMC):
        _, old = _samples_and_data(result, None)
        samples = result.get_samples(group_by_chain=True)
        if marginal:
            return SampleSource(model, samples, args, kwargs, old)
        source = SampleSource(model, samples, *((args, kwargs) if args else old))
        for chain, numbers in enumerate(divergences(result)):
            source.diverging[chain, numbers] = True
        return source
    if isinstance(result, Mapping) and result and all(isinstance(value, Tensor) for value in result.values()):
        return SampleSource(model, {name: value[None] for name, value in result.items()}, args, kwargs)
    raise ValueError(
        "the result must be an AutoSparseGP guide, an SVI or expectation propagation object that has one, a "
        f"pyro.infer.MCMC or a mapping of its samples, got {kind_of(result)}. The order is model, result, then the "
        "model's arguments. A GP site's posterior lacks the other latents: give the guide that it is from."
    )


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

    :param samples: ``(chain, draw, ...)`` each.
    :param args: the model's arguments, those of training unless others are given besides.
    :param old: the training arguments where these are others': function values are then integrated given those there.
    """

    name = "mcmc"
    joint = True

    def __init__(
        self,
        model: Callable,
        samples: Mapping[str, Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        old: Optional[tuple[tuple, dict[str, Any]]] = None,
    ) -> None:
        self.model, self.args, self.kwargs, self.old = bare_model(model), args, kwargs, old
        self.shape = next(iter(samples.values())).shape[:2]
        self.samples = {name: value.flatten(0, 1) for name, value in samples.items()}
        sites = self._run({}, nullcontext())
        seen = {name: site for name, site in sites.items() if is_observation(site) and not site_is_subsample(site)}
        self.data = [name for name, site in seen.items() if not is_factor(site)]
        self.factors = [name for name, site in seen.items() if is_factor(site)]
        if not seen:
            raise ValueError("the model observes nothing at these arguments: give the training data, (x, y)")
        self.names = [name for name, site in sites.items() if not site_is_subsample(site)]
        require_shapes({name: seen[name] for name in self.data})
        self.reader = DensityReader(self.model, args, kwargs, list(seen))
        self.diverging = np.zeros(self.shape, dtype=bool)
        self._next = 0

    def _run(self, values: dict[str, Tensor], given: Any) -> dict[str, Any]:
        """The sites of a run of the model with latents held at values, function values as a messenger answers."""
        model = poutine.condition(Enumeration()(self.model), data=values)
        with torch.no_grad(), poutine.block(), whole_plates(), given:
            return dict(sites_of(poutine.trace(model).get_trace(*self.args, **self.kwargs)))

    @torch.no_grad()
    def draw(self) -> Draw:
        s = self._next % (self.shape[0] * self.shape[1])
        self._next += 1
        sample = {name: value[s] for name, value in self.samples.items()}
        draw = Draw(diverging=torch.as_tensor(self.diverging.ravel()[s]))
        # Function values at the training inputs, unwhitened where the sampler ran on whitened ones.
        known = _Known(self.model, sample, *(self.old or (self.args, self.kwargs)))
        held = {name: value for name, value in sample.items() if name not in known.known}
        if self.old is None:
            functions = {name: f for name, (_, f, _) in known.known.items()}
            sites = self._run({**held, **functions}, nullcontext())
        else:  # latents of single rows are drawn from the model
            held = {name: value for name, value in held.items() if name not in known.local}
            sites = self._run(held, _GivenTraining(known, draw))
        draw.sites = {name: sites[name] for name in (*self.data, *self.factors)}
        for name, site in sites.items():
            if name in draw.sites:
                continue
            if name in known.known:
                draw.functions[name] = site["value"]
            else:
                draw.held[name] = site["value"]
                if not site_is_subsample(site):
                    draw.values[name] = site["value"]
            if self.old is None and not site_is_subsample(site):
                if not site["is_observed"]:
                    raise ValueError(f"the MCMC samples hold no draws of site {name!r}: they have {sorted(sample)}")
                draw.log_priors[name] = log_density_of(site["fn"], site, site["value"])
                if name in known.known:
                    draw.moments[name] = leave_one_out(without_event(site["fn"])[0], site["value"])
        return draw

    def at(self, args: tuple, kwargs: dict[str, Any], draw: Draw) -> dict[str, Tensor]:
        known = _Known(self.model, {**draw.values, **draw.functions}, self.args, self.kwargs)
        with torch.no_grad(), poutine.trace() as tracer:
            new = known.draw(args, kwargs)
        require_new(tracer.trace)
        kept = {name: value for name, value in new.items() if name not in draw.values or name in known.local}
        return {name: value for name, value in kept.items() if name not in self.factors}


class _GivenTraining(Messenger):
    """Answers at GP sites at new inputs: draws from the marginals given the function values at those of training."""

    def __init__(self, known: _Known, draw: Draw) -> None:
        super().__init__()
        self.known, self.draw = known, draw

    def _pyro_sample(self, msg: Any) -> None:
        process, _ = as_process(msg["fn"])
        if process is not None and not msg["is_observed"]:
            given = process.given(*self.known.known[msg["name"]])
            mean, variance = self.draw.moments[msg["name"]] = given.mean, given.variance.clamp(min=0)
            msg["value"] = mean + variance.sqrt() * torch.randn_like(mean)
