"""Posterior draws at a model's arguments, one at a time, with all that their densities are made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..approximations.weight_space import ExactWeightSpaceGP
from ..gaussians import ProjectedGaussian
from ..guide import AutoSparseGP
from ..guide.conditions import Predicting
from ..numerics.linalg import solve_lower
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.dependence import COUPLED
from ..program.groups import plate_sizes, warn_of_groups
from ..program.traces import as_process, bare, is_observation, whole_plates, without_event
from .densities import Densities, DensityReader, Moments
from .marginal import log_marginal

__all__ = [
    "LARGEST_JOINT",
    "Draw",
    "GuideSource",
    "Source",
    "is_factor",
    "leave_one_out",
    "log_density_of",
    "require_new",
    "require_shapes",
    "seeded",
    "sites_of",
]

LARGEST_JOINT = 5000  # function values that are drawn jointly without being asked twice


@dataclass
class Draw:
    """One posterior draw.

    :param values: latent sites that are no GPs.
    :param functions: each GP site's values at the inputs, ``(..., N)``.
    :param coefficients: w of each GP site with one block after the other, ``(..., M)``; none where f itself is drawn.
    :param moments: mean and variance of each function value given the rest of the draw, where it is integrated out.
    :param held: all that a reading of the model's densities holds fixed.
    :param sites: the observed sites, ``pyro.factor``'s among them, as the run left them.
    :param log_priors: the log prior density of each variable, summed.
    :param log_q: the log density of hyperparameters and coefficients, or function values, under q; ``None`` of MCMC.
    :param posteriors: of the GP sites under the draw's hyperparameters.
    :param diverging: whether a sampler's transition diverged.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    functions: dict[str, Tensor] = field(default_factory=dict)
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    sites: dict[str, Any] = field(default_factory=dict)
    log_priors: dict[str, Tensor] = field(default_factory=dict)
    log_q: Any = None
    posteriors: dict[str, SparsePosterior] = field(default_factory=dict)
    diverging: Optional[Tensor] = None

    @property
    def log_prior(self) -> Tensor:
        """The log prior density of the draw."""
        return sum(self.log_priors.values(), torch.zeros((), dtype=torch.float64))


class Source(ABC):
    """Where posterior draws at a model's arguments come from, and the densities that go with them.

    :param data: names of the observed sites.
    :param factors: names of the sites of ``pyro.factor``, which hold no data.
    :param names: of all sites.
    """

    name: str  # what kind of posterior this is
    joint: bool  # whether function values are drawn jointly, in the place of coefficients
    target = "exact"  # what the draws are towards; of a guide it is known after the first draw
    data: list[str]
    factors: list[str]
    names: list[str]
    args: tuple
    kwargs: dict[str, Any]
    reader: DensityReader

    @abstractmethod
    def draw(self) -> Draw:
        """One draw."""

    @abstractmethod
    def at(self, args: tuple, kwargs: dict[str, Any], draw: Draw) -> dict[str, Tensor]:
        """Every site at new inputs, given a draw."""

    def densities(self, draw: Draw) -> Densities:
        """The draw's pointwise densities, function values integrated given the rest."""
        return self.reader(draw.held, draw.moments)

    def log_joints(self, draw: Draw, densities: Densities) -> dict[str, Tensor]:
        """By name, log p of the draw and the data, which importance weights set against log q."""
        return {"lp": draw.log_prior + self.reader.total({**draw.held, **draw.functions})}


class GuideSource(Source):
    """Draws from a guide: hyperparameters and coefficients, function values given those.

    Of data projections, whose coefficients are known exactly, function values are drawn jointly and take the
    coefficients' place, in O(N³).

    :param exact: whether costs of O(N³) are allowed.
    :param chunk_size: rows whose features are held in memory at once.
    :param marginal: leave the coefficients integrated out: the moments are those of the posterior's marginals. Those of
        GP sites with one posterior are drawn all the same.
    """

    name = "variational"

    def __init__(
        self,
        guide: AutoSparseGP,
        args: tuple,
        kwargs: dict[str, Any],
        exact: bool = False,
        chunk_size: int = 8192,
        marginal: bool = False,
    ) -> None:
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size must be a whole number of at least 1, got {chunk_size!r}")
        structure = guide.structure
        if structure is None:
            raise ValueError("the guide has not been initialised: train it, or call it once with the data, guide(x, y)")
        self.guide, self.structure, self.args, self.kwargs = guide, structure, args, kwargs
        self.exact, self.chunk_size = exact, chunk_size
        self._kept = Predicting()
        self.data = [name for name, num in structure.rows.items() if num]
        self.factors = [name for name, num in structure.rows.items() if not num]
        self.names = [*structure.rows, *structure.latents, *structure.gps]
        # Whose values the densities couple, or another GP takes for inputs: they are not integrated one by one.
        self.drawn = {*structure.inner, *(f for f, kind in structure.dependence.items() if kind == COUPLED)}
        # Of a sum of sites with one posterior no marginal knows the variance (test_scores_of_sites_with_one_posterior).
        self.marginal = marginal and not structure.joint  # of sites with one posterior no marginal is by itself
        projected = [f for f, spec in structure.gps.items() if spec["basis"].get("kind") == "projection"]
        if projected and not (exact or marginal):
            raise ValueError(
                f"the posterior of site {projected[0]!r} knows its coefficients, the projected data, exactly; all that "
                "is random are function values given those. Ask for joint draws of these, exact=True, in O(N³)."
            )
        self.joint = bool(projected) and not self.marginal
        self.reader = DensityReader(guide.model, args, kwargs, [*self.data, *self.factors, *structure.downstream])

    @torch.no_grad()
    def draw(self) -> Draw:
        guide, training = self.guide, self.guide.training
        draw = Draw(log_q=torch.zeros((), dtype=torch.float64))
        guide.eval()
        try:
            # As predictions are made: rows may be held-out ones, and a kernel's variance correction acts on q(w), too.
            quiet = pyro.validation_enabled(False), poutine.block()
            with guide.predicting(self._kept), quiet[0], whole_plates(), quiet[1], _AtTrainingRows(self, draw):
                guide(*self.args, **self.kwargs)
            priors, posteriors = (dict(sites_of(trace)) for trace in guide.get_traces())
            sites = dict(sites_of(guide.trace))
        finally:
            guide.train(training)
            guide.trace = poutine.Trace()
        draw.sites = {name: sites[name] for name in (*self.data, *self.factors) if name in sites}
        missing = [n for n in (*self.data, *self.factors) if n not in sites or not sites[n]["is_observed"]]
        if missing:
            raise ValueError(
                f"site {missing[0]!r} was observed when the guide was initialised and is not now: give the training "
                "data, to_datatree(model, guide, x, y)."
            )
        require_shapes({name: sites[name] for name in self.data})
        for name, site in sites.items():
            if name in draw.posteriors:
                draw.functions[name] = site["value"]
            if not site["is_observed"] and (name not in draw.posteriors or name in self.drawn):
                draw.held[name] = site["value"]
            if site["is_observed"] or site_is_subsample(site) or name in draw.posteriors:
                continue
            draw.values[name] = site["value"]
            p, q = priors[name], posteriors[name]
            if p["fn"] is q["fn"]:  # drawn from the model
                continue
            if name not in self.structure.downstream:  # those have their own term
                draw.log_priors[name] = log_density_of(p["fn"], p, site["value"])
            draw.log_q = draw.log_q + log_density_of(q["fn"], q, site["value"])
        draw.moments = {name: moments for name, moments in draw.moments.items() if name not in self.drawn}
        self.target = self._target(priors)
        return draw

    def _target(self, priors: Mapping[str, Any]) -> str:
        """The bound's, or expectation propagation's: a q(w) under a kernel's variance correction is optimal for
        integrated densities, as expectation propagation's is.
        """
        if self.joint:
            return "exact"
        exact = (n for n, m in self.guide.modules_by_site().items() if isinstance(m, ExactWeightSpaceGP))
        corrected = any(without_event(priors[name]["fn"])[0].kernel.depends_on_rows for name in exact)
        return "fitc" if self.guide.by_expectation or corrected else "vfe"

    def log_joints(self, draw: Draw, densities: Densities) -> dict[str, Tensor]:
        if self.joint:
            lp = super().log_joints(draw, densities)["lp"]
            return {"lp": lp, "lp_exact": lp}
        # "vfe": log p(θ) p(w) + Σ E[log p(y | f) | w]; "fitc": the logarithm of the expectation for each datum;
        # "exact": log p(y | w) of all data together.
        found = {"lp": draw.log_prior + densities.expected, "lp_fitc": draw.log_prior + densities.log_evidence}
        if self.exact:
            free = {name: q for name, q in draw.posteriors.items() if name not in self.drawn}
            found["lp_exact"] = draw.log_prior + log_marginal(self.reader, draw.held, free, draw.moments)
        return found

    def at(self, args: tuple, kwargs: dict[str, Any], draw: Draw) -> dict[str, Tensor]:
        with torch.no_grad(), poutine.block(), whole_plates(), _AtNewRows(self, draw) as new:
            trace = poutine.trace(self.guide.model).get_trace(*args, **kwargs)
        require_new(trace)
        return {
            name: site["value"]
            for name, site in sites_of(trace)
            if not site_is_subsample(site) and name not in new.known and not is_factor(site)
        }


class _AtTrainingRows(Messenger):
    """Answers at the GP sites of a guide's run: draws coefficients, and function values given those."""

    def __init__(self, source: GuideSource, draw: Draw) -> None:
        super().__init__()
        self.source, self.draw = source, draw

    def _pyro_sample(self, msg: Any) -> None:
        q = without_event(msg["fn"])[0]
        if isinstance(q, SparsePosterior):
            self.draw.posteriors[msg["name"]] = q
            msg["value"] = self._jointly(msg["name"], q) if self.source.joint else self._by_moments(msg["name"], q)

    def _jointly(self, name: str, q: SparsePosterior) -> Tensor:
        draw, f = self.draw, q.rsample()
        # f is drawn, so that what is integrated of it is each value given all others, as of MCMC.
        draw.moments[name] = leave_one_out(q.process, f)
        self._add(name, q.process.log_prob(f).double().sum(), _exact_log_ratio(q, f))
        if not isinstance(q.coefficients, ProjectedGaussian):
            draw.coefficients[name] = torch.cat(q.draw[1], -1)
        return f

    def _by_moments(self, name: str, q: SparsePosterior) -> Tensor:
        draw, source = self.draw, self.source
        if source.marginal:
            mean, variance = q.moments(source.chunk_size)
        else:
            w = q.coefficients.rsample(q.batch_shape)
            mean, variance = q.given_coefficients(w, source.chunk_size)
            draw.coefficients[name] = torch.cat([block.expand(*q.batch_shape, -1) for block in w], -1)
            # w ~ N(0, I) a priori, and log q(w) = log p(w) + log q(w)/p(w).
            log_prior = -0.5 * (draw.coefficients[name].double().square() + math.log(2 * math.pi)).sum()
            self._add(f"{name}_w", log_prior, q.coefficients.log_ratio(w))
        draw.moments[name] = mean, variance
        # Values that meet in a density are drawn jointly; others by their marginals, in O(N M).
        if source.structure.dependence.get(name) == COUPLED:
            return q.rsample() if source.marginal else mean + q.residual(mean)
        return mean + variance.sqrt() * torch.randn_like(mean)

    def _add(self, variable: str, log_prior: Tensor, log_ratio: Tensor) -> None:
        """A variable's log p and log q/p."""
        self.draw.log_priors[variable] = log_prior
        self.draw.log_q = self.draw.log_q + log_prior + log_ratio.double().sum()


class _AtNewRows(Messenger):
    """Answers in a run of the model at new inputs, given one draw from a guide."""

    def __init__(self, source: GuideSource, draw: Draw) -> None:
        super().__init__()
        self.source, self.draw = source, draw
        self.known: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        name, structure = msg["name"], self.source.structure
        latent = structure.latents.get(name)
        if msg["is_observed"] or site_is_subsample(msg):
            return
        if name in structure.gps and as_process(msg["fn"])[0] is not None:
            msg["value"] = self._function(name, msg["fn"])
        elif latent is not None and not set(latent["plates"]) & set(structure.data_plates):
            msg["value"] = self.draw.values[name]
            self.known.add(name)
        elif latent is not None and name in structure.grouped and latent["plates"] == plate_sizes(msg):
            warn_of_groups(self.source.guide.warned, name, latent["plates"])

    def _function(self, name: str, prior: Any) -> Tensor:
        q = self.source.guide.posterior_given(name, prior, self.draw.posteriors[name].sites, new_rows=True)
        if name in self.draw.coefficients:
            w = list(self.draw.coefficients[name].split(list(q.coefficients.sizes), -1))
        else:  # projected data: nothing but the residual is random
            w = q.coefficients.rsample(q.batch_shape)
        mean, variance = q.given_coefficients(w, self.source.chunk_size)
        # f | w ~ N(h, ρ): jointly in O(N³), or of many rows by its marginals.
        if mean.shape[-1] <= LARGEST_JOINT:
            return mean + q.residual(mean)
        return mean + variance.sqrt() * torch.randn_like(mean)


def _exact_log_ratio(q: SparsePosterior, f: Tensor) -> Tensor:
    """log q(f) − log p(f) of all values at the inputs, in nats.

    With CCᵀ = k(x, x) and u = C⁻¹(f − μ), p(u) = N(0, I) and q(u) = N(C⁻¹Φm, I + A(S − I)Aᵀ), A = C⁻¹Φ: both are
    well-conditioned where k(x, x) is not.
    """
    factor, mean = q.process.scale_tril, q.process.mean
    u = solve_lower(factor, (f - mean)[..., None])[..., 0]
    centre = solve_lower(factor, (q.mean - mean)[..., None])[..., 0]
    # Cov q(u) − I = A(S − I)Aᵀ.
    change = q.coefficients.covariance_change([solve_lower(factor, block) for block in q.features])
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    root = torch.linalg.cholesky(eye + (change + change.mT) / 2)
    # log q(u) − log p(u) = ½|u|² − ½|L⁻¹(u − c)|² − log|L|, LLᵀ = Cov q(u).
    white = solve_lower(root, (u - centre)[..., None])[..., 0]
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return 0.5 * (u.square().sum(-1) - white.square().sum(-1)) - log_det


def leave_one_out(process: GaussianProcess, f: Tensor) -> Moments:
    """Mean and variance of each function value given all others, ``(..., N)`` each, in O(N³).

    fₙ − [K⁻¹(f − μ)]ₙ / [K⁻¹]ₙₙ and 1 / [K⁻¹]ₙₙ (Rasmussen and Williams, 2006, eq. 5.12).
    """
    precision = torch.cholesky_inverse(process.scale_tril.expand(*f.shape, -1))
    variance = 1 / precision.diagonal(dim1=-2, dim2=-1)
    return f - (precision @ (f - process.mean)[..., None])[..., 0] * variance, variance


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


def require_new(trace: Any) -> None:
    """Raise where a run at new inputs was given observations."""
    for name, site in sites_of(trace):
        if is_observation(site) and not site_is_subsample(site) and not is_factor(site):
            raise ValueError(
                f"predict= holds observations of site {name!r}: give the model's arguments at new inputs without them, "
                "predict=x_new, or None in their place. predictive_scores judges predictions of observed data."
            )


def require_shapes(data: Mapping[str, Any]) -> None:
    """Raise where observed values and their distribution have other shapes: densities would be of all their pairs."""
    for name, site in data.items():
        there, shape = tuple(site["value"].shape), tuple(site["fn"].shape())
        if there != shape:
            raise ValueError(
                f"site {name!r} has observations of shape {there}, its distribution has shape {shape}: a density would "
                f"be taken of each with each. Give observations of shape {shape}"
                + (", say by y.squeeze(-1)." if there == (*shape, 1) else ", one for each row of the inputs.")
            )
