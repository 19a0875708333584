"""Posterior draws at a model's arguments, in blocks, with all that their densities are made of: of a guide, of MCMC."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer import MCMC
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..approximations.on_sites import ExactWeightSpaceGP
from ..guide import AutoSparseGP
from ..guide.draws import items_of_draws, of_draw
from ..guide.latents import FieldLatent
from ..guide.runs import LARGEST_JOINT
from ..inference.quadrature import own_guide
from ..inference.terms import weighted_sum
from ..posterior.sparse_posterior import SparsePosterior
from ..predict import AtNewInputs, Call, Trained, sampled
from ..program.data import signature_of
from ..program.draws import in_blocks
from ..program.enumeration import Enumeration
from ..program.rules import require_sites
from ..program.traces import bare, free_values, is_observation, sample_sites, whole_plates, without_event
from ..warned import Warned
from .densities import DensityReader, Moments

_ROWS = 8192  # whose features are held in memory at once


@dataclass
class Draws:
    """S posterior draws: tensors by name, ``(S, ...)`` each. While one is made they are without S."""

    # Latents that are no GPs; as "{site}_w" the coefficients of each GP site, one block after the other; none of MCMC.
    posterior: dict[str, Tensor] = field(default_factory=dict)
    functions: dict[str, Tensor] = field(default_factory=dict)  # each GP site's values at the inputs, (..., N)
    # Mean and variance of each function value given the rest of the draw, where it is integrated out.
    moments: dict[str, Moments] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)  # all that a reading of the model's densities holds fixed
    log_prior: dict[str, Tensor] = field(default_factory=dict)  # the log prior density of each variable, summed
    # "log_q", the log density of hyperparameters and coefficients under q; of MCMC "diverging".
    sample_stats: dict[str, Tensor] = field(default_factory=dict)
    posterior_predictive: dict[str, Tensor] = field(default_factory=dict)  # a draw of each observed site
    predictions: dict[str, Tensor] = field(default_factory=dict)  # each site at new inputs


class Source(ABC):
    """Where draws at a model's arguments come from, and the densities that go with them."""

    shape: Optional[tuple[int, ...]] = None  # how many chains, and draws of each, if it has them
    joint = True  # whether draws take the covariance of function values
    apart = True  # whether each has features and covariances of its own
    data: list[str]  # names of the observed sites
    sites: dict[str, Any]  # those of the first run; pyro.factor's, which hold no data, among them
    reader: DensityReader

    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any], **attrs: str) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        # Of datasets: what kind of posterior this is, and what its draws are towards, which is known after the first.
        self.attrs = {"model": getattr(model, "__name__", type(model).__name__), **attrs}

    def items(self, num: int) -> dict[str, Tensor]:
        """What draws are made of, ``(S, ...)`` each, for num draws where the source does not have them."""
        return {"": torch.arange(num)}

    @abstractmethod
    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        """One draw."""

    def draws(self, num: int = 1, new: Optional[Call] = None, simulates: bool = False) -> Iterator[Draws]:
        """Draws in blocks; the first block is a single draw. ``new`` arguments are for ``predictions``."""

        def numbers(draw: dict[str, Any]) -> int:
            kinds = ("functions", "posterior", "predictions")
            rows, size, new = (sum(value.numel() for value in draw[kind].values()) for kind in kinds)
            joint = min(new, LARGEST_JOINT) + rows * self.joint
            # Features are passed over half as often as a covariance.
            return max(rows, max(min(rows, _ROWS) * size // 2, joint**2) if self.apart else 0)

        @torch.no_grad()
        def one(item: dict[Any, Tensor]) -> dict[str, Any]:
            draw = self.make(item, new, simulates)
            sites = {name: self.sites[name] for name in self.data}
            shapes = [(n, tuple(site["value"].shape), tuple(site["fn"].shape())) for n, site in sites.items()]
            for name, there, shape in [found for found in shapes if found[1] != found[2]]:
                raise ValueError(
                    f"site {name!r} has observations of shape {there}, its distribution has shape {shape}: each "
                    f"observation would meet all values. Give them the shape {shape}, such as y.reshape({shape})."
                )
            return vars(draw)

        return (Draws(**parts) for parts in in_blocks(one, self.items(num), numbers))


class GuideSource(Source, Messenger):
    """Draws from a guide, of coefficients and values given those; or, if ``marginal``, with coefficients integrated."""

    def __init__(self, guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any], marginal: bool = False) -> None:
        facts = guide.facts
        families = json.dumps({name: module.family for name, module in guide.modules_by_site().items()})
        super().__init__(guide.model, args, kwargs, posterior="variational", family=families)
        self.guide, self.facts, self.sites = guide, facts, {}
        self.joint, self.apart = False, guide.has_random_latents
        self.data = [name for name, num in guide.core.sizes.items() if num]
        # Whose values the densities couple, or another GP takes for inputs: they are not integrated one by one.
        self.drawn = {*facts.inner, *facts.coupled}
        members = {*guide.joint.field} & {*facts.downstream}  # whose priors are made of function values
        self.drawn |= {*facts.gps} if members else set()
        self.read = [*facts.data, *({*facts.downstream} - members)]
        # Given a latent of the field f has less variance than its marginal has (test_scores_of_a_field).
        self.marginal = marginal and guide.kind.is_marginal and guide.core.points is None
        self.reader = DensityReader(guide.model, args, kwargs, self.read)

    def items(self, num: int) -> dict[str, Tensor]:
        return items_of_draws(self.guide, num)

    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        draw = self.draw = Draws()
        self.posteriors, self.log_q = dict[str, SparsePosterior](), dict[str, Tensor]()
        # Rows may be held-out ones, and a kernel's variance correction acts on q(w), too: as in predictions.
        with pyro.validation_enabled(False), poutine.block(), of_draw(item), self:
            run = self.guide.run_at(self.args, self.kwargs, sums_out=True, joint_up_to=LARGEST_JOINT)
        require_sites(run.sites)
        sites, values = run.sites, free_values(run.trace)
        self.sites = self.sites or {name: site for name, site in sites.items() if site["is_observed"]}
        missing = {*self.facts.data} - self.sites.keys()
        if missing:
            raise ValueError(
                f"site {min(missing)!r} was observed in training and is not now: give the training data, (x, y)"
            )
        draw.posterior_predictive = {name: sites[name]["fn"].sample() for name in self.data if simulates}
        draw.functions = {name: values[name] for name in self.posteriors}
        # All that densities are read at: function values are integrated, but where densities couple them.
        draw.held = {name: f for name, f in values.items() if name not in draw.moments}
        latents = {name: values[name] for name in sites if name in values.keys() - draw.functions.keys()}
        draw.posterior = latents | draw.posterior
        for name in latents:
            q, prior = sites[name]["fn"], sites[name]["infer"]["prior"]
            if q is not prior:  # else it is drawn from the model
                of_field = isinstance(q, FieldLatent)
                log_prior = log_density_of({**sites[name], "fn": q.prior if of_field else prior})
                # The density of a member of the field is relative to its prior.
                self.log_q[name] = log_density_of(sites[name]) + (log_prior if of_field else 0.0)
                if name not in self.read:  # those whose densities move with f have their own terms
                    draw.log_prior[name] = log_prior
        draw.sample_stats["log_q"] = sum(self.log_q.values(), torch.zeros((), dtype=torch.float64))
        # The bound's target, or expectation propagation's: a q(w) under a kernel's variance correction is optimal for
        # integrated densities, as expectation propagation's is.
        exact = [n for n, module in self.guide.modules_by_site().items() if isinstance(module, ExactWeightSpaceGP)]
        corrected = any(run.processes[name].kernel.depends_on_rows for name in exact)
        self.attrs["target"] = "fitc" if corrected or not self.guide.kind.has_bound else "vfe"
        if new is not None:
            with poutine.block():
                known = latents | (run.enumeration.draw_of(self.facts.classes) if run.enumeration else {})
                elsewhere = AtNewInputs(run.trace, known, self.guide.warned, self._at_new_inputs)
                draw.predictions = predictions(elsewhere.run(self.model, *new), latents)
        return draw

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        """Answers at a GP site of the guide's run: draws coefficients, and function values given those."""
        draw, name, q = self.draw, msg["name"], without_event(msg["fn"])[0]
        if not isinstance(q, SparsePosterior):
            return
        values = q
        if not self.marginal:
            q = q.with_density()
            w = q.coefficients.rsample(q.batch_shape)
            values = q.given(w)
            whole = torch.cat([block.expand(*q.batch_shape, -1) for block in w], -1)
            # w ~ N(0, I) a priori, and log q(w) = log p(w) + log q(w)/p(w).
            log_prior = -0.5 * (whole.double().square() + math.log(2 * math.pi)).sum()
            draw.posterior[f"{name}_w"], draw.log_prior[f"{name}_w"] = whole, log_prior
            self.log_q[name] = log_prior + q.coefficients.log_ratio(w).double().sum()
        self.posteriors[name] = q
        if name not in self.drawn:
            draw.moments[name] = values.mean, values.variance
        # Values that meet in a density are drawn jointly; others by their marginals, in O(N M).
        msg["value"] = _drawn(values, name in self.facts.coupled)

    def _at_new_inputs(self, msg: dict[str, Any], prior: TorchDistribution) -> None:
        """Answers at a GP site of the model's run at new inputs: f | w ~ N(h, ρ), of many rows by its marginals."""
        w = self.draw.posterior.get(f"{msg['name']}_w")
        if w is not None:
            q = self.posteriors[msg["name"]].under(prior)
            values = q.given(w.split(list(q.coefficients.sizes), -1))
            msg["value"] = _drawn(values, values.event_shape[0] <= LARGEST_JOINT)


def _drawn(values: SparsePosterior, joint: bool) -> Tensor:
    # By randn_like, whose numbers vmap has at half the cost of those that are drawn in place, as Normal.rsample's are.
    return values.rsample() if joint else values.mean + values.stddev * torch.randn_like(values.mean)


class SampleSource(Source):
    """Draws from MCMC samples, ``(chain, draw, ...)``; if ``old`` are training's arguments, of values given those."""

    def __init__(self, model: Callable, result: object, args: tuple, kwargs: dict[str, Any], marginal: bool) -> None:
        has_run = isinstance(result, MCMC)
        model, samples, old = sampled(model, result, None if has_run else (args, kwargs))
        super().__init__(model, args, kwargs, posterior="mcmc", target="exact")
        self.old, self.warned = old if marginal and has_run else None, Warned()
        self.shape = next(iter(samples.values())).shape[:2]
        diverging = torch.zeros(self.shape, dtype=torch.bool)
        for chain, known in enumerate(filter(None, getattr(result, "_diagnostics", []))):
            diverging[chain, list(known.get("divergences", []))] = True
        self.samples = {name: value.flatten(0, 1) for name, value in {**samples, "": diverging}.items()}
        # Discrete latents are summed out, as they were when the sampler ran.
        with torch.no_grad(), poutine.block(), whole_plates():
            sites = sample_sites(poutine.trace(Enumeration()(self.model)).get_trace(*self.args, **self.kwargs))
        self.sites = {name: site for name, site in sites.items() if is_observation(site)}
        if not self.sites:
            raise ValueError("the model observes nothing at these arguments: give the training data, (x, y)")
        self.data = [name for name, site in self.sites.items() if not is_factor(site)]
        self.reader = DensityReader(self.model, self.args, self.kwargs, list(self.sites))

    def items(self, num: int) -> dict[str, Tensor]:
        """All samples, or the first ones; if that is not enough, again from the first."""
        return {n: value[torch.arange(num, device=value.device) % len(value)] for n, value in self.samples.items()}

    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        sample = {name: value for name, value in item.items() if name}
        draw, here = Draws(sample_stats={"diverging": item[""]}), (self.args, self.kwargs)
        with poutine.block(), whole_plates():
            trained = Trained(self.model, sample, *(self.old or here), self.warned)
            trace = trained.at(*here, marginal=True) if self.old else trained.trace
        sites, free = sample_sites(trace), free_values(trace)
        draw.posterior_predictive = {name: sites[name]["fn"].sample() for name in self.data if simulates}
        draw.posterior = {n: site["value"] for n, site in sites.items() if n not in self.sites}
        draw.functions = {name: draw.posterior.pop(name) for name in trained.known if name in draw.posterior}
        draw.held = {name: value for name, value in free.items() if name not in draw.functions}
        draw.moments = dict(trained.moments)
        if not self.old:
            missing = [n for n in draw.posterior if n not in sample and not sites[n]["is_observed"]]
            if missing:
                raise ValueError(f"the MCMC samples hold no draws of site {missing[0]!r}: they have {sorted(sample)}")
            draw.log_prior = {name: log_density_of(sites[name]) for name in (*draw.posterior, *draw.functions)}
            # f itself is known: a value is integrated given all others.
            for name, f in draw.functions.items():
                process = without_event(sites[name]["fn"])[0]
                # fₙ − [K⁻¹(f − μ)]ₙ / [K⁻¹]ₙₙ and 1 / [K⁻¹]ₙₙ (Rasmussen and Williams, 2006, eq. 5.12), in O(N³).
                precision = torch.cholesky_inverse(process.scale_tril.expand(*f.shape, -1))
                variance = 1 / precision.diagonal(dim1=-2, dim2=-1)
                draw.moments[name] = f - (precision @ (f - process.mean)[..., None])[..., 0] * variance, variance
        if new is not None:
            with poutine.block():
                draw.predictions = predictions(trained.at(*new), sample)
        return draw


def as_source(model: Callable, result: object, args: tuple, kwargs: dict[str, Any], marginal: bool = False) -> Source:
    """Draws from any result: a guide, an object with one (SVI, expectation propagation), MCMC, or its samples."""
    order = "then the guide or the MCMC, then the training data: (model, guide, x, y)"
    if not callable(model) or isinstance(getattr(model, "guide", model), AutoSparseGP):
        raise ValueError(f"a diagnostic takes the model first, {order}; got {type(model).__name__} in its place")
    try:
        signature_of(model).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"a diagnostic cannot call the model: {error}. It takes {order}") from error
    guide = getattr(result, "guide", result)
    if isinstance(guide, AutoSparseGP):
        return GuideSource(own_guide(model, guide, "this diagnostic"), args, kwargs, marginal)
    return SampleSource(model, result, args, kwargs, marginal)


def predictions(trace: poutine.Trace, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sites of a run at new inputs but latents with the values known."""
    values = {name: site for name, site in sample_sites(trace).items() if not is_factor(site)}
    seen = next((name for name, site in values.items() if is_observation(site)), None)
    if seen is not None:
        raise ValueError(
            f"predict= holds observations of site {seen!r}: give the model's arguments at new inputs without "
            "them, predict=x_new, or None in their place. predictive_scores judges predictions of data."
        )
    return {name: site["value"] for name, site in values.items() if site["value"] is not known.get(name)}


@contextmanager
def seeded(seed: Optional[int]) -> Iterator[None]:
    """Draws from their own seed, leaving the global generators alone; with ``None``, from the global ones."""
    with torch.random.fork_rng(list(range(torch.cuda.device_count())), enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def log_density_of(site: dict[str, Any]) -> Tensor:
    """The log density of a site's value, summed, with the site's scale and mask."""
    return weighted_sum(torch.as_tensor(site["fn"].log_prob(site["value"])).double(), site)


def is_factor(site: dict[str, Any]) -> bool:
    """Whether a site is ``pyro.factor``'s: a log density of no data."""
    return isinstance(bare(site["fn"]), dist.Unit)
