"""Posterior draws at a model's arguments, in blocks, with all that their densities are made of; those of a guide."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional, cast

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from ..approximations.on_sites import ExactWeightSpaceGP
from ..guide import AutoSparseGP
from ..guide.runs import LARGEST_JOINT
from ..inference.expected import weighted_sum
from ..posterior.sparse_posterior import SparsePosterior
from ..predict import AtNewInputs, Call
from ..program.checks import require_sizes
from ..program.facts import COUPLED
from ..program.handlers import in_blocks
from ..program.traces import bare, free_values, is_observation, sample_sites, without_event
from .densities import DensityReader, Moments

_ROWS = 8192  # whose features are held in memory at once


@dataclass
class Draws:
    """S posterior draws: tensors by name, ``(S, ...)`` each. While one is made they are without S.

    :param values: latent sites that are no GPs.
    :param functions: each GP site's values at the inputs, ``(..., N)``.
    :param coefficients: w of each GP site with one block after the other, ``(..., M)``; none of MCMC.
    :param moments: mean and variance of each function value given the rest of the draw, where it is integrated out.
    :param held: all that a reading of the model's densities holds fixed.
    :param log_priors: the log prior density of each variable, summed.
    :param stats: ``log_q``, the log density of hyperparameters and coefficients under q; of MCMC ``diverging``.
    :param simulated: a draw of each observed site.
    :param predicted: each site at new inputs.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    functions: dict[str, Tensor] = field(default_factory=dict)
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    log_priors: dict[str, Tensor] = field(default_factory=dict)
    stats: dict[str, Tensor] = field(default_factory=dict)
    simulated: dict[str, Tensor] = field(default_factory=dict)
    predicted: dict[str, Tensor] = field(default_factory=dict)

    @property
    def log_prior(self) -> Tensor:
        """The log prior density."""
        return sum(self.log_priors.values(), torch.zeros((), dtype=torch.float64))

    def groups(self, include_f: bool) -> dict[str, dict[str, Tensor]]:
        """Their variables by group of a tree."""
        coefficients = {f"{site}_w": w for site, w in self.coefficients.items()}
        return {
            "sample_stats": dict(self.stats),
            "posterior": self.values | coefficients | (self.functions if include_f else {}),
            "log_prior": self.log_priors,
            "posterior_predictive": self.simulated,
            "predictions": self.predicted,
        }


class Source(ABC):
    """Where posterior draws at a model's arguments come from, and the densities that go with them.

    :param data: names of the observed sites.
    :param sites: the observed sites of the first run; those of ``pyro.factor``, which hold no data, among them.
    """

    name: str  # what kind of posterior this is
    shape: Optional[tuple[int, ...]] = None  # how many chains, and draws of each, if it has them
    families: Optional[dict[str, Any]] = None  # of GP sites
    target = "exact"  # what the draws are towards; of a guide it is known after the first draw
    joint = False  # whether draws take the covariance of function values
    apart = True  # whether each has features and covariances of its own
    model: Callable
    data: list[str]
    args: tuple
    kwargs: dict[str, Any]
    sites: dict[str, Any]
    reader: DensityReader

    def items(self, num: int) -> dict[str, Tensor]:
        """What draws are made of, ``(S, ...)`` each, for num draws where the source does not have them."""
        return {"": torch.arange(num)}

    @abstractmethod
    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        """One draw."""

    def draws(self, num: int = 1, new: Optional[Call] = None, simulates: bool = False) -> Iterator[Draws]:
        """Draws in blocks, the first of which is a single one.

        :param new: the model's arguments at new inputs, for ``predicted``.
        :param simulates: whether observed sites are drawn.
        """

        def numbers(draw: dict[str, Any]) -> int:
            kinds = ("functions", "coefficients", "predicted")
            rows, size, new = (sum(value.numel() for value in draw[kind].values()) for kind in kinds)
            joint = min(new, LARGEST_JOINT) + rows * self.joint
            # Features are passed over half as often as a covariance.
            return max(rows, max(min(rows, _ROWS) * size // 2, joint**2) if self.apart else 0)

        def one(item: dict[Any, Tensor]) -> dict[str, Any]:
            return vars(self.make(item, new, simulates))

        return (Draws(**parts) for parts in in_blocks(one, self.items(num), numbers))

    def predictions(self, trace: poutine.Trace, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sites of a run at new inputs but latents with the values known.

        :raises ValueError: where it was given observations.
        """
        values = {name: site for name, site in sample_sites(trace).items() if not is_factor(site)}
        seen = next((name for name, site in values.items() if is_observation(site)), None)
        if seen is not None:
            raise ValueError(
                f"predict= holds observations of site {seen!r}: give the model's arguments at new inputs without "
                "them, predict=x_new, or None in their place. predictive_scores judges predictions of data."
            )
        return {name: site["value"] for name, site in values.items() if site["value"] is not known.get(name)}


class GuideSource(Source):
    """Draws from a guide: hyperparameters and coefficients, function values given those.

    :param marginal: leave the coefficients integrated out: the moments are those of the posterior's marginals. Those of
        GP sites with one posterior are drawn all the same.
    """

    name = "variational"

    def __init__(self, guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any], marginal: bool = False) -> None:
        structure = guide.facts
        projected = [f for f, spec in structure.gps.items() if spec["basis"].get("kind") == "projection"]
        if projected and not marginal:
            raise ValueError(
                f"site {projected[0]!r} has no draws of coefficients to weigh, because the projected data fix them: "
                "use predict(model, guide, x), or predictive_scores(model, guide, x, y)."
            )
        self.guide, self.structure, self.args, self.kwargs = guide, structure, args, kwargs
        self.model = guide.model
        self.apart = guide.has_random_latents
        self.sites: dict[str, Any] = {}
        self.families = {name: spec["family"] for name, spec in structure.gps.items()}
        self.data = [name for name, num in structure.rows.items() if num]
        # Whose values the densities couple, or another GP takes for inputs: they are not integrated one by one.
        self.drawn = {*structure.inner, *(f for f, kind in structure.dependence.items() if kind == COUPLED)}
        # Given a latent of the field f has less variance than its marginal has (test_scores_of_a_field).
        self.marginal = marginal and not structure.field
        self.posteriors: dict[str, SparsePosterior] = {}  # of the last draw
        self.reader = DensityReader(guide.model, args, kwargs, [*structure.rows, *structure.downstream])

    @torch.no_grad()
    def make(self, item: Mapping[str, Tensor], new: Optional[Call], simulates: bool) -> Draws:
        draw, self.posteriors = Draws(stats={"log_q": torch.zeros((), dtype=torch.float64)}), {}
        trace, posterior_trace, sites, values = self._run(draw)
        priors, posteriors = sample_sites(trace), sample_sites(posterior_trace)
        self.sites = self.sites or {name: site for name, site in sites.items() if site["is_observed"]}
        missing = self.structure.rows.keys() - self.sites.keys()
        if missing:
            raise ValueError(
                f"site {min(missing)!r} was observed in training and is not now: give the training data, "
                "to_datatree(model, guide, x, y)."
            )
        require_shapes({name: sites[name] for name in self.data})
        draw.simulated = {name: sites[name]["fn"].sample() for name in self.data if simulates}
        draw.functions = {name: values[name] for name in self.posteriors}
        # All that densities are read at: function values are integrated, but where densities couple them.
        draw.held = {name: f for name, f in values.items() if name not in draw.moments}
        draw.values = {name: values[name] for name in sites if name in values.keys() - draw.functions.keys()}
        # Others are drawn from the model.
        learned = [name for name in draw.values if priors[name]["fn"] is not posteriors[name]["fn"]]
        for name in learned:
            draw.stats["log_q"] = draw.stats["log_q"] + log_density_of(posteriors[name])
        # Those whose densities move with f have their own terms.
        own = [name for name in learned if name not in self.structure.downstream]
        draw.log_priors |= {name: log_density_of(priors[name]) for name in own}
        # The bound's target, or expectation propagation's: a q(w) under a kernel's variance correction is optimal for
        # integrated densities, as expectation propagation's is.
        exact = [n for n, module in self.guide.modules_by_site().items() if isinstance(module, ExactWeightSpaceGP)]
        corrected = any(without_event(priors[name]["fn"])[0].kernel.depends_on_rows for name in exact)
        self.target = "fitc" if self.guide.by_expectation or corrected else "vfe"
        if new is not None:
            draw.predicted = self._predicted(draw, trace, new)
        return draw

    def _run(self, draw: Draws) -> tuple[poutine.Trace, poutine.Trace, dict[str, Any], dict[str, Tensor]]:
        """A run of the guide on the rows, as predictions are made: the model's trace, the guide's, and its own sites
        and values.

        Rows may be held-out ones, and a kernel's variance correction acts on q(w), too.
        """
        guide, messenger = self.guide, cast(Any, Messenger())
        messenger._pyro_sample = partial(self._at_training_rows, draw)
        try:
            with pyro.validation_enabled(False), poutine.block(), messenger:
                run = guide.run_at(self.args, self.kwargs, sums_out=True, joint_up_to=LARGEST_JOINT)
            require_sizes(run.sites)
            return *guide.get_traces(), sample_sites(run.trace), free_values(run.trace)
        finally:
            guide.trace = poutine.Trace()

    def _at_training_rows(self, draw: Draws, msg: Any) -> None:
        """Answers at a GP site of that run: draws coefficients, and function values given those."""
        name, q = msg["name"], without_event(msg["fn"])[0]
        if not isinstance(q, SparsePosterior):
            return
        self.posteriors[name] = q
        values = q
        if not self.marginal:
            w = q.coefficients.rsample(q.batch_shape)
            values = q.given(w)
            draw.coefficients[name] = torch.cat([block.expand(*q.batch_shape, -1) for block in w], -1)
            # w ~ N(0, I) a priori, and log q(w) = log p(w) + log q(w)/p(w).
            log_prior = -0.5 * (draw.coefficients[name].double().square() + math.log(2 * math.pi)).sum()
            draw.log_priors[f"{name}_w"] = log_prior
            draw.stats["log_q"] = draw.stats["log_q"] + log_prior + q.coefficients.log_ratio(w).double().sum()
        if name not in self.drawn:
            draw.moments[name] = values.mean, values.variance
        # Values that meet in a density are drawn jointly; others by their marginals, in O(N M).
        msg["value"] = _drawn(values, self.structure.dependence.get(name) == COUPLED)

    def _predicted(self, draw: Draws, before: poutine.Trace, new: Call) -> dict[str, Tensor]:
        """The sites of a run of the model at new inputs, given a draw and its run before."""

        def function(msg: Any, prior: Any) -> None:
            name = msg["name"]
            if name in draw.coefficients:
                q = self.posteriors[name].under(without_event(prior)[0])
                # f | w ~ N(h, ρ): jointly in O(N³), or of many rows by its marginals.
                values = q.given(draw.coefficients[name].split(list(q.coefficients.sizes), -1))
                msg["value"] = _drawn(values, values.event_shape[0] <= LARGEST_JOINT)

        with poutine.block():
            trace = AtNewInputs(before, draw.values, self.guide.warned, function).run(self.guide.model, *new)
        return self.predictions(trace, draw.values)


def _drawn(values: SparsePosterior, joint: bool) -> Tensor:
    # By randn_like, whose numbers vmap has at half the cost of those that are drawn in place, as Normal.rsample's are.
    return values.rsample() if joint else values.mean + values.stddev * torch.randn_like(values.mean)


@contextmanager
def seeded(seed: Optional[int]) -> Iterator[None]:
    """Draws from their own seed, leaving the global generators alone; with ``None``, from the global ones."""
    with torch.random.fork_rng(list(range(torch.cuda.device_count())), enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def log_density_of(site: Any) -> Tensor:
    """The log density of a site's value, summed, with the site's scale and mask."""
    return weighted_sum(torch.as_tensor(site["fn"].log_prob(site["value"])).double(), site)


def is_factor(site: Any) -> bool:
    """Whether a site is ``pyro.factor``'s: a log density of no data."""
    return isinstance(bare(site["fn"]), dist.Unit)


def require_shapes(data: Mapping[str, Any]) -> None:
    """Raise where observed values and their distribution have other shapes: densities would be of all their pairs."""
    for name, site in data.items():
        there, shape = tuple(site["value"].shape), tuple(site["fn"].shape())
        if there != shape:
            raise ValueError(
                f"site {name!r} has observations of shape {there}, its distribution has shape {shape}: each "
                f"observation would meet all values. Give observations of shape {shape}, such as y.reshape({shape})."
            )
