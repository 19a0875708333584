"""Draws from any result: a guide, MCMC, or MCMC's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..predict import Trained, are_samples, bare_model, divergences, samples_and_data
from ..process import GaussianProcess
from ..program.enumeration import Enumeration
from ..program.likelihood import mapped
from ..program.traces import is_observation, sample_sites, whole_plates, without_event
from .densities import Densities, DensityReader, Moments
from .draws import Call, Draws, GuideSource, Source, is_factor, log_density_of, require_shapes, sites_of
from .given import guide_of, kind_of, require_arguments, require_model

__all__ = ["SampleSource", "as_source", "observed_site"]


def as_source(
    model: Callable,
    result: Any,
    args: tuple,
    kwargs: dict[str, Any],
    exact: bool = False,
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
        return GuideSource(guide, args, kwargs, exact, marginal)
    if isinstance(result, MCMC):
        _, old = samples_and_data(result, None)
        args, kwargs = (args, kwargs) if args or marginal else old
        samples = result.get_samples(group_by_chain=True)
        source = SampleSource(model, samples, args, kwargs, old if marginal else (args, kwargs), marginal)
        for chain, numbers in enumerate(divergences(result)):
            source.diverging[chain, numbers] = True
        return source
    if are_samples(result):
        samples = {name: value[None] for name, value in result.items()}
        return SampleSource(model, samples, args, kwargs, (args, kwargs))
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
    :param old: the training arguments.
    :param elsewhere: whether the model's arguments are others: function values are then integrated given those there.
    """

    name = "mcmc"
    joint = True

    def __init__(
        self,
        model: Callable,
        samples: Mapping[str, Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        old: Call,
        elsewhere: bool = False,
    ) -> None:
        self.model, self.args, self.kwargs, self.old, self.elsewhere = bare_model(model), args, kwargs, old, elsewhere
        self.shape = next(iter(samples.values())).shape[:2]
        self.samples = {name: value.flatten(0, 1) for name, value in samples.items()}
        # Discrete latents are summed out, as they were when the sampler ran.
        with torch.no_grad(), poutine.block(), whole_plates():
            sites = sample_sites(poutine.trace(Enumeration()(self.model)).get_trace(*args, **kwargs))
        seen = {name: site for name, site in sites.items() if is_observation(site)}
        if not seen:
            raise ValueError("the model observes nothing at these arguments: give the training data, (x, y)")
        self.data = [name for name, site in seen.items() if not is_factor(site)]
        self.factors = [name for name, site in seen.items() if is_factor(site)]
        self.names = list(sites)
        require_shapes({name: seen[name] for name in self.data})
        self.reader = DensityReader(self.model, args, kwargs, list(seen))
        self.diverging = np.zeros(self.shape, dtype=bool)
        self.sites: dict[str, Any] = {}

    def items(self, num: int) -> dict[str, Tensor]:
        """All samples, or the first; again from the first, where more are asked for."""
        total = self.shape[0] * self.shape[1]
        rows = torch.arange(num) % total
        samples = {name: value[rows.to(value.device)] for name, value in self.samples.items()}
        return {**samples, "": torch.as_tensor(self.diverging.ravel())[rows]}

    @torch.no_grad()
    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        sample = {name: value for name, value in item.items() if name}
        draw = Draws(stats={"diverging": item[""]})
        with poutine.block(), whole_plates():
            trained = Trained(Enumeration()(self.model), sample, *self.old)
            elsewhere = trained.at(self.args, self.kwargs, marginal=True) if self.elsewhere else None
        sites = sites_of(elsewhere or trained.trace)
        self._observed(sites, draw, simulates)
        latent = {name: site for name, site in sites.items() if name not in (*self.data, *self.factors)}
        values = {name: site["value"] for name, site in latent.items()}
        draw.functions = {name: f for name, f in values.items() if name in trained.known}
        draw.held = {name: value for name, value in values.items() if name not in trained.known}
        draw.values = {name: value for name, value in draw.held.items() if not site_is_subsample(latent[name])}
        # At the inputs of training f itself is known: a value is integrated given all others.
        for name in (*draw.values, *draw.functions) if elsewhere is None else ():
            self._note_training(name, latent[name], sample, trained, draw)
        for name, moments in trained.moments.items():
            draw.means[name], draw.variances[name] = moments
        if new is not None:
            with poutine.block():
                trained.model = self.model  # discrete latents are drawn
                trace = trained.at(*new)
            draw.predicted = self.predictions(trace, {n for n in draw.values if n not in trained.local})
        return draw

    def _note_training(self, name: str, site: Any, sample: Mapping[str, Tensor], trained: Trained, draw: Draws) -> None:
        """A latent's log prior density, and what is integrated out of function values, at the training inputs."""
        if not site["is_observed"] and name not in sample and name not in trained.known:
            raise ValueError(f"the MCMC samples hold no draws of site {name!r}: they have {sorted(sample)}")
        draw.log_priors[name] = log_density_of(site["fn"], site, site["value"])
        if name in trained.known:
            trained.moments[name] = _given_others(without_event(site["fn"])[0], site["value"])

    def log_joints(self, draws: Draws, densities: Densities) -> dict[str, Tensor]:
        stack = {**draws.held, **draws.functions}
        return {"lp": draws.log_prior + mapped(lambda values: (self.reader.total(values),), stack)[0]}


def _given_others(process: GaussianProcess, f: Tensor) -> Moments:
    """Mean and variance of each function value given all others, ``(..., N)`` each, in O(N³).

    fₙ − [K⁻¹(f − μ)]ₙ / [K⁻¹]ₙₙ and 1 / [K⁻¹]ₙₙ (Rasmussen and Williams, 2006, eq. 5.12).
    """
    precision = torch.cholesky_inverse(process.scale_tril.expand(*f.shape, -1))
    variance = 1 / precision.diagonal(dim1=-2, dim2=-1)
    return f - (precision @ (f - process.mean)[..., None])[..., 0] * variance, variance
