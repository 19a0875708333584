"""Draws of all that a posterior is made of, with their densities: from a guide, or from MCMC samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import MCMC
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..guide import AutoSparseGP, as_process, is_observation, whole_plates
from ..linalg import solve_lower
from ..posteriors import ProjectedGaussian
from ..predict import _bare, _Known, _samples_and_data
from ..process import GaussianProcess, SparsePosterior
from ..reparam import unwhiten
from ..structure import COUPLED
from .marginal import log_marginal
from .pointwise import Moments, PointwiseDensities, Reader

__all__ = ["Draw", "GuideSource", "SampleSource", "as_source", "seeded"]

LARGEST_JOINT = 5000  # function values that are drawn jointly without being asked twice


@dataclass
class Draw:
    """One posterior draw at the training data.

    :param values: latent sites that are no GPs.
    :param coefficients: w of each GP site with one block after the other, ``(..., M)``; none where f itself is drawn.
    :param functions: each GP site's values at the inputs, ``(..., N)``.
    :param held: all that a reading of the model holds fixed.
    :param moments: mean and variance of each function value given the rest of the draw.
    :param data: the observed sites, as the run left them.
    :param log_priors: the log prior density of each variable, summed.
    :param log_q: the log density of hyperparameters and coefficients, or function values, under q; ``None`` for MCMC.
    :param posteriors: of the GP sites under the draw's hyperparameters.
    """

    values: dict[str, Tensor]
    coefficients: dict[str, Tensor]
    functions: dict[str, Tensor]
    held: dict[str, Tensor]
    moments: dict[str, Moments]
    data: dict[str, Any]
    log_priors: dict[str, Tensor]
    log_q: Optional[Tensor] = None
    posteriors: dict[str, SparsePosterior] = field(default_factory=dict)

    @property
    def log_prior(self) -> Tensor:
        """The log prior density of the draw."""
        return sum(self.log_priors.values(), torch.zeros((), dtype=torch.float64))


@contextmanager
def seeded(seed: Optional[int]) -> Iterator[None]:
    """Draws from their own seed, leaving the global generators alone; with ``None``, from the global ones."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(list(range(torch.cuda.device_count()))):
        torch.manual_seed(seed)
        yield


def base_of(fn: Any) -> Any:
    """The distribution under ``.to_event``."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn


def _log_density(fn: Any, site: Any, value: Tensor) -> Tensor:
    return torch.as_tensor(scale_and_mask(fn.log_prob(value), site["scale"], site["mask"])).double().sum()


class GuideSource:
    """Draws from a guide: hyperparameters and coefficients, function values given those.

    Of data projections, whose coefficients are known exactly, function values are drawn jointly and take the
    coefficients' place, in O(N³).

    :param exact: whether costs of O(N³) are allowed.
    :param marginal: leave the coefficients integrated out: the moments are those of the posterior's marginals.
    :param chunk_size: rows whose features are held in memory at once.
    """

    def __init__(
        self,
        guide: AutoSparseGP,
        args: tuple,
        kwargs: dict[str, Any],
        exact: bool,
        chunk_size: int,
        marginal: bool = False,
    ) -> None:
        if guide.structure is None:
            raise ValueError("the guide has not been initialised: train it, or call it once with the data, guide(x, y)")
        self.guide, self.args, self.kwargs = guide, args, kwargs
        self.chunk_size = chunk_size
        self.structure = guide.structure
        self.data = list(self.structure.rows)
        self.drawn = {*self.structure.inner} | {f for f, kind in self.structure.dependence.items() if kind == COUPLED}
        projected = [f for f, spec in self.structure.gps.items() if spec["basis"].get("kind") == "projection"]
        if projected and not (exact or marginal):
            raise ValueError(
                f"the posterior of site {projected[0]!r} knows its coefficients, the projected data, exactly; all that "
                "is random are function values given those. Ask for joint draws of these, exact=True, in O(N³)."
            )
        self.joint, self.exact, self.marginal = bool(projected) and not marginal, exact, marginal
        self.reader = Reader(guide.model, args, kwargs, [*self.data, *self.structure.downstream])

    @property
    def name(self) -> str:
        """What kind of posterior this is."""
        return "variational"

    @torch.no_grad()
    def draw(self) -> Draw:
        """One draw."""
        guide, training = self.guide, self.guide.training
        messenger = _Coefficients(self)
        guide.eval()
        try:
            with pyro.validation_enabled(False), whole_plates(), poutine.block(), messenger:
                guide(*self.args, **self.kwargs)
            model_trace, guide_trace = guide.get_traces()
            full_trace = guide.trace
        finally:
            guide.train(training)
            guide.trace = poutine.Trace()
        missing = [name for name in self.data if not full_trace.nodes[name]["is_observed"]]
        if missing:
            raise ValueError(
                f"site {missing[0]!r} was observed when the guide was initialised and is not now: give the training "
                "data, to_datatree(model, guide, x, y)."
            )
        log_priors = dict(messenger.log_priors)
        log_q = sum(messenger.log_qs, torch.zeros((), dtype=torch.float64))
        values, held = {}, {}
        for name, site in full_trace.nodes.items():
            if site["type"] != "sample" or site["is_observed"]:
                continue
            if site_is_subsample(site):
                held[name] = site["value"]
                continue
            if name in messenger.posteriors:
                if name in self.drawn:
                    held[name] = site["value"]
                continue
            values[name] = held[name] = site["value"]
            p, q = model_trace.nodes[name], guide_trace.nodes[name]
            if p["fn"] is q["fn"]:
                continue
            if name not in self.structure.downstream:  # those have their own term
                log_priors[name] = _log_density(p["fn"], p, site["value"])
            log_q = log_q + _log_density(q["fn"], q, site["value"])
        functions = {name: full_trace.nodes[name]["value"] for name in messenger.posteriors}
        return Draw(
            values,
            messenger.coefficients,
            functions,
            held,
            {name: moments for name, moments in messenger.moments.items() if name not in self.drawn},
            {name: full_trace.nodes[name] for name in self.data},
            log_priors,
            log_q,
            messenger.posteriors,
        )

    def densities(self, draw: Draw) -> PointwiseDensities:
        """The draw's pointwise densities, function values integrated given the rest."""
        return self.reader(draw.held, draw.moments)

    def log_joint(self, draw: Draw, densities: PointwiseDensities) -> Tensor:
        """log p of the draw and the data: the variational target, or with joint draws the exact one."""
        return draw.log_prior + (self.reader.total({**draw.held, **draw.functions}) if self.joint else densities.expected)

    def log_joint_fitc(self, draw: Draw, densities: PointwiseDensities) -> Tensor:
        """log p of the draw and the data, each datum's function value integrated on its own."""
        return draw.log_prior + densities.log_evidence

    def log_joint_exact(self, draw: Draw) -> Tensor:
        """log p of the draw and the data with all function values integrated under the exact prior, in O(N³)."""
        if self.joint:
            return draw.log_prior + self.reader.total({**draw.held, **draw.functions})
        free = {name: q for name, q in draw.posteriors.items() if name not in self.drawn}
        return draw.log_prior + log_marginal(self.reader, draw.held, free, draw.moments)

    def at(self, args: tuple, kwargs: dict[str, Any], draw: Draw) -> dict[str, Tensor]:
        """Every site at new inputs, given a draw's hyperparameters and coefficients."""
        with torch.no_grad(), poutine.block(), whole_plates(), _New(self, draw) as new:
            trace = poutine.trace(self.guide.model).get_trace(*args, **kwargs)
        return _free_values(trace, new.known)


def _free_values(trace: Any, known: set[str]) -> dict[str, Tensor]:
    return {
        name: site["value"]
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site_is_subsample(site) and name not in known
    }


class _Coefficients(Messenger):
    """Draws coefficients at GP sites of a guide's run, and function values given those."""

    def __init__(self, source: GuideSource) -> None:
        super().__init__()
        self.source = source
        self.posteriors: dict[str, SparsePosterior] = {}
        self.coefficients: dict[str, Tensor] = {}
        self.moments: dict[str, Moments] = {}
        self.log_priors: dict[str, Tensor] = {}
        self.log_qs: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        q = base_of(msg["fn"])
        if not isinstance(q, SparsePosterior):
            return
        name = msg["name"]
        self.posteriors[name] = q
        if self.source.marginal:
            mean, variance = self.moments[name] = q.moments(self.source.chunk_size)
            coupled = self.source.structure.dependence.get(name) == COUPLED
            value = q.rsample() if coupled else mean + variance.sqrt() * torch.randn_like(mean)
        elif self.source.joint:
            value = q.rsample()
            self.moments[name] = leave_one_out(q.process, value)
            self.log_priors[name] = q.process.log_prob(value).double().sum()
            self.log_qs.append(self.log_priors[name] + _exact_log_ratio(q, value).double().sum())
            if not isinstance(q.coefficients, ProjectedGaussian):
                self.coefficients[name] = torch.cat(q.draw[1], -1)
        else:
            w = q.coefficients.rsample(q.batch_shape)
            mean, variance = self.moments[name] = q.given_coefficients(w, self.source.chunk_size)
            self.coefficients[name] = torch.cat([block.expand(*q.batch_shape, -1) for block in w], -1)
            log_prior = -0.5 * (self.coefficients[name].double().square() + math.log(2 * math.pi)).sum()
            self.log_priors[f"{name}_w"] = log_prior
            self.log_qs.append(log_prior + q.coefficients.log_ratio(w).double().sum())
            if self.source.structure.dependence.get(name) == COUPLED:
                value = mean + q.residual(mean)
            else:
                value = mean + variance.sqrt() * torch.randn_like(mean)
        msg["value"] = value


def _exact_log_ratio(q: SparsePosterior, f: Tensor) -> Tensor:
    """log q(f) − log p(f) of all values at the inputs, in nats.

    With CCᵀ = k(x, x) and u = C⁻¹(f − μ), p(u) = N(0, I) and q(u) = N(C⁻¹Φm, I + A(S − I)Aᵀ), A = C⁻¹Φ: both are
    well-conditioned where k(x, x) is not.
    """
    factor, mean = q.process.scale_tril, q.process.mean
    u = solve_lower(factor, (f - mean)[..., None])[..., 0]
    centre = solve_lower(factor, (q.mean - mean)[..., None])[..., 0]
    change = q.coefficients.covariance_change([solve_lower(factor, block) for block in q.features])
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    root = torch.linalg.cholesky(eye + (change + change.mT) / 2)
    white = solve_lower(root, (u - centre)[..., None])[..., 0]
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return 0.5 * (u.square().sum(-1) - white.square().sum(-1)) - log_det


def leave_one_out(process: GaussianProcess, f: Tensor) -> Moments:
    """Mean and variance of each function value given all others, ``(..., N)`` each, in O(N³).

    fₙ − [K⁻¹(f − μ)]ₙ / [K⁻¹]ₙₙ and 1 / [K⁻¹]ₙₙ (Rasmussen and Williams, 2006, eq. 5.12).
    """
    factor = process.scale_tril.expand(*f.shape, -1)
    precision = torch.cholesky_inverse(factor)
    variance = 1 / precision.diagonal(dim1=-2, dim2=-1)
    pull = (precision @ (f - process.mean)[..., None])[..., 0]
    return f - pull * variance, variance


class _New(Messenger):
    """Runs the model at new inputs given one draw from a guide."""

    def __init__(self, source: GuideSource, draw: Draw) -> None:
        super().__init__()
        self.source, self.draw = source, draw
        self.known: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if msg["is_observed"] or site_is_subsample(msg):
            return
        process, _ = as_process(msg["fn"])
        if process is not None and name in self.source.structure.gps:
            q = self.source.guide.look_ahead(name, msg["fn"])
            if name not in self.draw.coefficients:  # projected data: nothing but the residual is random
                w = q.coefficients.rsample(q.batch_shape)
            else:
                w = list(self.draw.coefficients[name].split(list(q.coefficients.sizes), -1))
            mean, variance = q.given_coefficients(w, self.source.chunk_size)
            if mean.shape[-1] <= LARGEST_JOINT:
                msg["value"] = mean + q.residual(mean)
            else:
                msg["value"] = mean + variance.sqrt() * torch.randn_like(mean)
            return
        latents = self.source.structure.latents
        if name in latents and not set(latents[name]["plates"]) & set(self.source.structure.data_plates):
            msg["value"] = self.draw.values[name]
            self.known.add(name)


class SampleSource:
    """Draws from MCMC samples of the same model, with or without :class:`~pyro_sparsegp.Whitening`.

    :param samples: ``(chain, draw, ...)`` each.
    """

    name = "mcmc"
    joint = True
    exact = True
    drawn: frozenset[str] = frozenset()

    def __init__(self, model: Callable, samples: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = _bare(model), args, kwargs
        first = next(iter(samples.values()))
        self.shape = first.shape[:2]
        self.samples = {name: value.flatten(0, 1) for name, value in samples.items()}
        with poutine.block(), whole_plates():
            trace = poutine.trace(self.model).get_trace(*args, **kwargs)
        self.data = [name for name, site in trace.nodes.items() if is_observation(site) and not site_is_subsample(site)]
        if not self.data:
            raise ValueError("the model observes nothing at these arguments: give the training data, (x, y)")
        self.reader = Reader(self.model, args, kwargs, self.data)
        self._next = 0

    @torch.no_grad()
    def draw(self) -> Draw:
        """The next sample."""
        s = self._next % (self.shape[0] * self.shape[1])
        self._next += 1
        hold = _Hold({name: value[s] for name, value in self.samples.items()})
        with poutine.block(), whole_plates(), hold:
            trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
        values, log_priors = {}, {}
        held = {}
        for name, site in trace.nodes.items():
            if site["type"] != "sample" or name in self.data:
                continue
            if site_is_subsample(site):
                held[name] = site["value"]
                continue
            log_priors[name] = _log_density(site["fn"], site, site["value"])
            if name not in hold.processes:
                values[name] = held[name] = site["value"]
        functions = {name: trace.nodes[name]["value"] for name in hold.processes}
        moments = {name: leave_one_out(process, functions[name]) for name, process in hold.processes.items()}
        data = {name: trace.nodes[name] for name in self.data}
        return Draw(values, {}, functions, held, moments, data, log_priors)

    def densities(self, draw: Draw) -> PointwiseDensities:
        """The draw's pointwise densities, each function value integrated given the others."""
        return self.reader(draw.held, draw.moments)

    def log_joint(self, draw: Draw, densities: PointwiseDensities) -> Tensor:
        """log p of the draw and the data."""
        return draw.log_prior + self.reader.total({**draw.held, **draw.functions})

    def at(self, args: tuple, kwargs: dict[str, Any], draw: Draw) -> dict[str, Tensor]:
        """Every site at new inputs, given a draw."""
        known = _Known(self.model, {**draw.values, **draw.functions}, self.args, self.kwargs)
        with torch.no_grad():
            new = known.draw(args, kwargs)
        return {name: value for name, value in new.items() if name not in draw.values or name in known.local}


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
            trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
        latent = {
            name: site["value"]
            for name, site in trace.nodes.items()
            if site["type"] == "sample" and name not in self.data and name not in conditioned.moments
        }
        functions = {name: trace.nodes[name]["value"] for name in conditioned.moments}
        data = {name: trace.nodes[name] for name in self.data}
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


Source = Union[GuideSource, SampleSource]


def as_source(
    model: Callable, result: Any, args: tuple, kwargs: dict[str, Any], exact: bool = False, chunk_size: int = 8192,
    marginal: bool = False,
) -> Source:
    """Draws from any result: a guide, an object with one (SVI, expectation propagation), MCMC, or its samples.

    :raises ValueError: where ``result`` is none of these, or belongs to another model.
    """
    if not isinstance(result, AutoSparseGP) and isinstance(getattr(result, "guide", None), AutoSparseGP):
        result = result.guide
    if isinstance(result, AutoSparseGP):
        if model is not result.model and model != result.model:
            raise ValueError(
                "the guide belongs to another model: give the one it was made for, to_datatree(guide.model, guide, ...)"
            )
        return GuideSource(result, args, kwargs, exact, chunk_size, marginal)
    if isinstance(result, MCMC):
        _, (old_args, old_kwargs) = _samples_and_data(result, None)
        samples = result.get_samples(group_by_chain=True)
        if marginal:
            return ConditionedSource(model, samples, args, kwargs, old_args, old_kwargs)
        return SampleSource(model, samples, args or old_args, kwargs if args else old_kwargs)
    if isinstance(result, Mapping) and result and all(isinstance(value, Tensor) for value in result.values()):
        return SampleSource(model, {name: value[None] for name, value in result.items()}, args, kwargs)
    raise ValueError(
        "the result must be an AutoSparseGP guide, an SVI or expectation propagation object that has one, a "
        f"pyro.infer.MCMC or a mapping of its samples, got {type(result).__name__}"
    )
