"""Draws of all that a guide's posterior is made of, with their densities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Optional

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ...approximations.weight_space import ExactWeightSpaceGP
from ...gaussians import ProjectedGaussian
from ...guide import AutoSparseGP
from ...guide.conditions import Predicting
from ...numerics.linalg import solve_lower
from ...posterior.sparse_posterior import SparsePosterior
from ...process import GaussianProcess
from ...program.dependence import COUPLED
from ...program.groups import plate_sizes, warn_of_groups
from ...program.traces import as_process, bare, is_observation, whole_plates, without_event
from ..trust.marginal import log_marginal
from ..trust.pointwise import Moments, PointwiseDensities, PointwiseReader

__all__ = [
    "LARGEST_JOINT",
    "Draw",
    "GuideSource",
    "is_factor",
    "leave_one_out",
    "log_density_of",
    "require_names",
    "require_new",
    "require_shapes",
    "seeded",
    "sites_of",
]

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
    :param factors: the sites of ``pyro.factor``, which hold no data.
    :param stats: what a sampler knows of the draw.
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
    factors: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Tensor] = field(default_factory=dict)

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


def sites_of(trace: Any) -> list[tuple[str, Any]]:
    """A trace's sample sites by name."""
    return [(name, site) for name, site in trace.nodes.items() if site["type"] == "sample"]


def log_density_of(fn: Any, site: Any, value: Tensor) -> Tensor:
    """The log density of a site's value under ``fn``, summed, with the site's scale and mask."""
    return torch.as_tensor(scale_and_mask(fn.log_prob(value), site["scale"], site["mask"])).double().sum()


def is_factor(site: Any) -> bool:
    """Whether a site is ``pyro.factor``'s: a log density of no data."""
    return isinstance(bare(site["fn"]), dist.Unit)


def require_names(names: Iterable[str]) -> None:
    """Raise where a site's name would be a path in a tree of groups."""
    for name in names:
        if "/" in name:
            raise ValueError(
                f"site {name!r} has a slash in its name, which no variable of a DataTree may have: rename it in the "
                f"model, to {name.replace('/', '_')!r} say."
            )


def require_new(trace: Any) -> None:
    """Raise where a run at new inputs was given observations."""
    for name, site in sites_of(trace):
        if is_observation(site) and not site_is_subsample(site) and not is_factor(site):
            raise ValueError(
                f"predict= holds observations of site {name!r}: give the model's arguments at new inputs without them, "
                "predict=x_new, or None in their place. predictive_scores judges predictions of observed data."
            )


def require_shapes(data: Mapping[str, Any]) -> None:
    """Raise where observed values and their distribution have other shapes: densities would be of all their pairs.

    :raises ValueError: naming the site, both shapes and the remedy.
    """
    for name, site in data.items():
        there, shape = tuple(site["value"].shape), tuple(site["fn"].shape())
        if there != shape:
            raise ValueError(
                f"site {name!r} has observations of shape {there}, its distribution has shape {shape}: a density would "
                f"be taken of each with each. Give observations of shape {shape}"
                + (", say by y.squeeze(-1)." if there == (*shape, 1) else ", one for each row of the inputs.")
            )


class GuideSource:
    """Draws from a guide: hyperparameters and coefficients, function values given those.

    Of data projections, whose coefficients are known exactly, function values are drawn jointly and take the
    coefficients' place, in O(N³).

    :param exact: whether costs of O(N³) are allowed.
    :param marginal: leave the coefficients integrated out: the moments are those of the posterior's marginals. Those of
        GP sites with one posterior are drawn all the same.
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
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size must be a whole number of at least 1, got {chunk_size!r}")
        if guide.structure is None:
            raise ValueError("the guide has not been initialised: train it, or call it once with the data, guide(x, y)")
        self.guide, self.args, self.kwargs = guide, args, kwargs
        self._kept = Predicting()
        self.chunk_size = chunk_size
        self.structure = guide.structure
        self.data = [name for name, num in self.structure.rows.items() if num]
        self.factors = [name for name, num in self.structure.rows.items() if not num]  # of pyro.factor, without values
        self.drawn = {*self.structure.inner} | {f for f, kind in self.structure.dependence.items() if kind == COUPLED}
        projected = [f for f, spec in self.structure.gps.items() if spec["basis"].get("kind") == "projection"]
        if projected and not (exact or marginal):
            raise ValueError(
                f"the posterior of site {projected[0]!r} knows its coefficients, the projected data, exactly; all that "
                "is random are function values given those. Ask for joint draws of these, exact=True, in O(N³)."
            )
        marginal = marginal and not guide.structure.joint  # of sites with one posterior no marginal is by itself
        self.joint, self.exact, self.marginal = bool(projected) and not marginal, exact, marginal
        self.corrected = False  # whether a variance correction changes q(w), as the last draw showed
        self.names = [*self.structure.rows, *self.structure.latents, *self.structure.gps]
        self.reader = PointwiseReader(
            guide.model, args, kwargs, [*self.data, *self.factors, *self.structure.downstream]
        )

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
            # As predictions are made: rows may be held-out ones, and a kernel's variance correction acts on q(w), too.
            quiet = pyro.validation_enabled(False), poutine.block()
            with guide.predicting(self._kept), quiet[0], whole_plates(), quiet[1], messenger:
                guide(*self.args, **self.kwargs)
            model_trace, guide_trace = guide.get_traces()
            full_trace = guide.trace
        finally:
            guide.train(training)
            guide.trace = poutine.Trace()
        nodes: Any = full_trace.nodes
        missing = [n for n in [*self.data, *self.factors] if n not in nodes or not nodes[n]["is_observed"]]
        if missing:
            raise ValueError(
                f"site {missing[0]!r} was observed when the guide was initialised and is not now: give the training "
                "data, to_datatree(model, guide, x, y)."
            )
        require_shapes({name: nodes[name] for name in self.data})
        log_priors = dict(messenger.log_priors)
        log_q = sum(messenger.log_qs, torch.zeros((), dtype=torch.float64))
        values, held = {}, {}
        sites, priors, posteriors = (dict(sites_of(trace)) for trace in (full_trace, model_trace, guide_trace))
        for name, site in sites_of(full_trace):
            if site["is_observed"]:
                continue
            if site_is_subsample(site):
                held[name] = site["value"]
                continue
            if name in messenger.posteriors:
                if name in self.drawn:
                    held[name] = site["value"]
                continue
            values[name] = held[name] = site["value"]
            p, q = priors[name], posteriors[name]
            if p["fn"] is q["fn"]:
                continue
            if name not in self.structure.downstream:  # those have their own term
                log_priors[name] = log_density_of(p["fn"], p, site["value"])
            log_q = log_q + log_density_of(q["fn"], q, site["value"])
        self.corrected = any(self._corrects(name, priors[name]["fn"]) for name in messenger.posteriors)
        functions = {name: sites[name]["value"] for name in messenger.posteriors}
        return Draw(
            values,
            messenger.coefficients,
            functions,
            held,
            {name: moments for name, moments in messenger.moments.items() if name not in self.drawn},
            {name: sites[name] for name in self.data},
            log_priors,
            log_q,
            messenger.posteriors,
            {name: sites[name] for name in self.factors},
        )

    def _corrects(self, name: str, prior: Any) -> bool:
        module = attrgetter(name)(self.guide.gps)
        return isinstance(module, ExactWeightSpaceGP) and without_event(prior)[0].kernel.depends_on_rows

    def densities(self, draw: Draw) -> PointwiseDensities:
        """The draw's pointwise densities, function values integrated given the rest."""
        return self.reader(draw.held, draw.moments)

    def log_joint(self, draw: Draw, densities: PointwiseDensities) -> Tensor:
        """log p of the draw and the data: the variational target, or with joint draws the exact one."""
        return draw.log_prior + (
            self.reader.total({**draw.held, **draw.functions}) if self.joint else densities.expected
        )

    def log_joint_fitc(self, draw: Draw, densities: PointwiseDensities) -> Tensor:
        """log p of the draw and the data, each datum's function value integrated on its own."""
        return draw.log_prior + densities.log_evidence

    def log_joint_exact(self, draw: Draw) -> Tensor:
        """log p of the draw and the data with all function values integrated under the exact prior, in O(N³)."""
        if self.joint:
            return draw.log_prior + self.reader.total({**draw.held, **draw.functions})
        free = {name: q for name, q in draw.posteriors.items() if name not in self.drawn}
        return draw.log_prior + log_marginal(self.reader, draw.held, free, draw.moments)

    def log_joints(self, draw: Draw, densities: PointwiseDensities) -> dict[str, Tensor]:
        """By name, the targets that are set against log q in importance weights."""
        found = {"lp": self.log_joint(draw, densities)}
        if not self.joint:
            found["lp_fitc"] = self.log_joint_fitc(draw, densities)
        if self.exact:
            found["lp_exact"] = self.log_joint_exact(draw)
        return found

    def at(self, args: tuple, kwargs: dict[str, Any], draw: Draw) -> dict[str, Tensor]:
        """Every site at new inputs, given a draw's hyperparameters and coefficients."""
        with torch.no_grad(), poutine.block(), whole_plates(), _New(self, draw) as new:
            trace = poutine.trace(self.guide.model).get_trace(*args, **kwargs)
        require_new(trace)
        return {
            name: site["value"]
            for name, site in sites_of(trace)
            if not site_is_subsample(site) and name not in new.known and not is_factor(site)
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
        q = without_event(msg["fn"])[0]
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
            sites = self.draw.posteriors[name].sites
            q = self.source.guide.posterior_given(name, msg["fn"], sites, new_rows=True)
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
        elif name in self.source.structure.grouped and latents[name]["plates"] == plate_sizes(msg):
            warn_of_groups(self.source.guide.warned, name, latents[name]["plates"])
