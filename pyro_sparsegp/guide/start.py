"""What a guide's first call makes of the latents around GP sites: which are one field, which are hyperparameters, and
where they start.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_mean
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to
from tqdm.auto import tqdm

from ..approximations.expectation import ExpectationGP
from ..approximations.free import SparseGP
from ..approximations.optimal import ExactGP, OptimalGP
from ..gaussians import NaturalGaussian
from ..program.traces import all_sites, is_free, repeatable
from .coupled import able_to_couple, couple, drop_latents
from .field import (
    LARGEST,
    Layout,
    Standardised,
    anchor_of,
    at_zero,
    find_links,
    hyperparameters_among,
    is_normal_prior,
    make_field,
    residuals_of,
    run_standardised,
    slices,
)
from .known import KnownGuide
from .nested import Nested, Optimum
from .runs import Run, Setup

__all__ = ["PATIENCE", "Search", "index_of", "init_to_centre", "is_open", "start"]

_MOST_ROWS = 2000  # of a start; more are taken at equal distances
_MOST_VALUES = 500  # of rows that are a basis themselves
_ALL_ROWS = 20_000  # up to which all are taken in the end
_MOST_SLOPES = 50_000_000  # of predictors by the field
_FACTOR = 0.1  # a change of squared slopes, in logs, within a standard deviation of hyperparameters
PATIENCE = 2.0  # seconds, after which a search shows a bar
_DRAWS = 3  # of the prior, beside the first call's own values


def init_to_centre(site: Any) -> Tensor:
    """A prior's mean; or its median, where the mean is not finite or beyond nine tenths of the draws, as those of
    half-Cauchy and wide log-normal priors are.
    """
    mean: Tensor = init_to_mean(site, fallback=init_to_feasible)
    fn = site["fn"]
    if fn.event_shape or not mean.is_floating_point():
        return mean
    with repeatable(mean):
        draws = fn.sample(torch.Size([199])).sort(0).values
    is_central = mean.isfinite() & (draws[19] <= mean) & (mean <= draws[-20])
    return torch.where(is_central, mean, draws[99])


def start(guide: KnownGuide, run: Setup, args: tuple, kwargs: dict[str, Any]) -> None:
    """Make the posterior of latents that are no GP sites, at the mode of what is known of them.

    :param run: the first.
    """
    facts = guide.facts
    able = able_to_couple(guide, facts)
    if not (able or facts.joint) or guide.independent is True or not is_open(guide, able):
        return
    try:
        with torch.enable_grad():
            _find(Search(guide, run, able, args, kwargs))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if able:
            warnings.warn(
                f"the mode of latents {', '.join(map(repr, able))} was not found ({str(error).splitlines()[0]}). They "
                "start where init_loc_fn says, each with an independent posterior, so intervals may be too narrow. "
                "Give init_loc_fn a nearer start.",
                stacklevel=6,
            )


def is_open(guide: KnownGuide, able: list[str]) -> bool:
    """Whether there is a start: every latent is one of all rows, and GP sites are single functions on a basis."""
    facts = guide.facts
    # Processes have other rows each, at which they would find other modes.
    if torch.distributed.is_initialized() or facts.inner or facts.enumerated or len(able) < len(facts.latents):
        return False
    return all(
        type(module) in (SparseGP, OptimalGP, ExactGP, ExpectationGP)
        and not module.batch_shape
        and module.family.get("num_columns") is None
        and sum(module.basis.sizes) <= LARGEST
        for module in guide.modules_by_site().values()
    )


def _some_rows(num: int, most: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], float]:
    """The arguments at some of many rows, and what each stands for: those of as many as the first GP site's inputs."""
    if num <= most:
        return args, kwargs, 1.0
    step = math.ceil(num / most)

    def some(value: Any) -> Any:
        return value[::step] if isinstance(value, Tensor) and value.dim() and len(value) == num else value

    few = tuple(map(some, args)), {key: some(value) for key, value in kwargs.items()}
    return (*few, num / math.ceil(num / step))


def _find(search: Search) -> None:
    """Take θ to the mode, and start q there."""
    nested, theta = search.nested(), search.theta(search.held)
    if nested is None:
        return
    moves = search.guide.search and bool(search.hyper)
    with tqdm(desc="the mode of latents", unit=" evaluations", delay=PATIENCE, leave=False) as bar:
        nested.tell = bar.update
        if moves:
            theta = nested.mode([theta, *search.draws()])
        some, nested = nested, search.at_all_rows(nested)
        if moves and nested is not some:
            theta = nested.mode([theta])
        covariance, slopes = nested.curvature(theta)
        covariance = covariance * nested.each / search.each
        search.settle(nested, theta, nested.at(theta), covariance, slopes)


class Search:
    """What is known of a program before θ goes to its mode.

    :param first: a run that met all sites.
    :param able: the latents of which some are in the field, ``normal``, and all others hyperparameters, ``hyper``.

    ``priors`` and ``held`` are the latents' in that run.
    """

    def __init__(self, guide: KnownGuide, first: Run, able: list[str], args: tuple, kwargs: dict[str, Any]) -> None:
        self.guide, self.able, self.whole, self.gps = guide, able, (args, kwargs, 1.0), list(guide.facts.gps)
        sites = dict(all_sites(first.trace))
        self.order = list(sites)
        self.num = next(iter(first.processes.values())).event_shape[0]  # of all rows
        self.priors = {name: sites[name]["infer"]["prior"] for name in able}
        self.held = {name: sites[name]["value"].detach() for name in able}
        self.plates = {n: s["value"].detach() for n, s in sites.items() if is_free(s) and site_is_subsample(s)}
        self.exact = any(isinstance(module, ExactGP) for module in guide.modules_by_site().values())
        most, self.all = (_MOST_VALUES, _MOST_VALUES) if self.exact else (_MOST_ROWS, _ALL_ROWS)
        self.args, self.kwargs, self.each = _some_rows(self.num, most, args, kwargs)
        few = self.each != 1  # whose plates have other row numbers
        self.values = {n: value for n, value in self.plates.items() if not (few and len(value) == self.num)}
        normal = {name: prior for name, prior in self.priors.items() if is_normal_prior(prior)}
        if normal:
            others = _without(self.held, normal)
            normal = _without(normal, hyperparameters_among(guide, normal, lambda handler: self._run(handler, others)))
        self.normal = normal
        self.hyper = [name for name in able if name not in normal]
        if few and not self._has_fewer(_without(self.held, normal)):
            self.args, self.kwargs, self.each = self.whole
            self.values = self.plates

    def nested(self) -> Optional[Nested]:
        """F of the program; ``None`` if a likelihood has no linear predictors."""
        first = {name: self._unconstrained(name, self.held[name]) for name in self.hyper}
        layout = self._layout([name for name in self.order if name in self.normal or name in self.gps])

        def run(x: Tensor) -> poutine.Trace:
            return self._run(Standardised(self.guide, *layout.parts(x), first), {})

        linked = find_links(run, layout, self.guide.like)
        # A piecewise constant density shows no gradient: test_what_takes_sites_to_be_independent_refuses_them.
        facts = self.guide.facts
        if linked is None or not {name for name in facts.downstream if name in facts.rows} <= linked[0].keys():
            return None
        links, owned = linked
        layout, shapes = Layout(layout.field, layout.residuals, owned), {name: v.shape for name, v in first.items()}
        # f that can meet every datum meets the copies of each: test_exact_starts_at_the_noise_of_all_rows.
        each = 1.0 if self.exact else self.each
        return Nested(self.guide, layout, links, shapes, self.values, self.args, self.kwargs, each)

    def at_all_rows(self, nested: Nested) -> Nested:
        """F at all rows, where there are few enough; else as it is."""
        if self.each == 1 or self.num > self.all:
            return nested
        self.args, self.kwargs, self.each = self.whole
        self.values = self.plates
        found = self.nested() or nested
        found.tell = nested.tell
        return found

    def theta(self, values: Mapping[str, Tensor]) -> Tensor:
        """θ of some hyperparameters' values."""
        parts = [self._unconstrained(name, values[name]).reshape(-1) for name in self.hyper]
        return torch.cat(parts) if parts else self.guide.like.new_zeros(0)

    def draws(self, num: int = _DRAWS) -> list[Tensor]:
        """Some θ from the prior, of those that are finite."""
        with repeatable(self.guide.like):
            draws = [self.theta({name: self.priors[name].sample() for name in self.hyper}) for _ in range(num)]
        return [draw for draw in draws if draw.isfinite().all()]

    def _has_fewer(self, values: Mapping[str, Tensor]) -> bool:
        """Whether the program has as many rows as it was given."""
        handler = at_zero(self.guide, {})
        try:
            self._run(handler, values)
        except (ValueError, RuntimeError, IndexError):
            return False
        return all(blocks[0].shape[-2] < self.num for blocks in handler.features.values())

    def _run(self, handler: Standardised, values: Mapping[str, Tensor]) -> poutine.Trace:
        return run_standardised(self.guide, self.args, self.kwargs, handler, {**self.values, **values})

    def _layout(self, members: list[str]) -> Layout:
        guide, normal, rows = self.guide, self.normal, round(self.num / self.each)
        field = {
            name: [normal[name].shape().numel()]
            if name in normal
            else list(guide.module_of(name).basis.sizes) or [rows]
            for name in members
        }
        layout = Layout(field, residuals_of(guide.facts, dict.fromkeys(guide.facts.gps, self.num)))
        if layout.num > LARGEST or layout.extended * self.num / self.each > _MOST_SLOPES:
            raise ValueError(f"{layout.extended} numbers that are normal a priori, at {self.num} rows, are too many")
        return layout

    def _unconstrained(self, name: str, value: Tensor) -> Tensor:
        return biject_to(self.priors[name].support).inv(value).to(self.guide.like)

    def settle(self, nested: Nested, mode: Tensor, best: Optimum, covariance: Tensor, moves: Tensor) -> None:
        """Start q at the mode.

        :param covariance: H⁻¹; ``moves``: ∂x̂/∂θ.
        """
        guide, facts, layout = self.guide, self.guide.facts, nested.layout
        free = {name for name in self.able if not guide.is_point(name) and not guide.is_independent(name)}
        field = [name for name in layout.field if name in facts.gps or name in free]
        is_field = self._wants_field(field)
        precision = self._precision(covariance, moves, best.root)
        _, handler = nested.run(mode, torch.cat([best.x, best.x.new_zeros(layout.extended - layout.num)]))
        loc = nested.theta_of(mode) | {name: handler.values[name].detach() for name in self.normal}
        joint = [name for name in self.hyper if name in free]
        rows = slices({**{n: shape.numel() for n, shape in nested.hyper.items()}, **layout.numbers})
        for name in self.able:
            if name in joint or (is_field and name in field):
                continue
            own = precision[rows[name], rows[name]].diagonal()
            latent, scale = facts.latents[name], self._scaled(name, handler, own.rsqrt())
            mean, scale = (part.detach().reshape(latent["shape"]).clone() for part in (loc[name], scale))
            guide.set_latent(name, mean, latent["event_dim"], scale)
        facts.coupled = joint
        if joint:
            index = index_of(rows, joint)
            root = torch.linalg.cholesky(covariance[index][:, index])
            couple(guide, torch.cat([loc[name].reshape(-1) for name in joint]), root)
        if is_field:
            facts.field = {name: layout.field[name] for name in field}
            facts.links, facts.owned = {name: dict(links) for name, links in nested.links.items()}, list(layout.owned)
            make_field(guide, facts.field)
            drop_latents(guide, [name for name in field if name not in facts.gps])
            anchor = anchor_of(guide, handler.bases, handler.priors)
            self._put(guide.field.coefficients, anchor, index_of(layout.rows, field), best)
            if len(mode):
                self._warn_of_factors(nested, mode, covariance)
            return
        for name, module in guide.modules_by_site().items():
            natural = isinstance(module, SparseGP) and isinstance(module.coefficients, NaturalGaussian)
            if natural and guide.family_of(name).start == "data":  # type: ignore[attr-defined]
                anchor = module.anchor(handler.bases[name])
                self._put(module.coefficients, anchor, index_of(layout.rows, [name]), best)

    def _warn_of_factors(self, nested: Nested, mode: Tensor, covariance: Tensor) -> None:
        """Warn of members whose values hyperparameters multiply: q(x | θ) is about values, whatever θ makes of them."""
        gains = []
        for theta in (mode, mode + torch.linalg.cholesky(covariance).sum(-1)):
            found, _, handler = nested.predictors(theta)
            squares = torch.stack([found.dense(place).detach().square().sum(0) for place in found.eta]).sum(0)
            gains.append({name: squares[own].sum() / handler.size_of(name) for name, own in nested.layout.rows.items()})
        names = [name for name, gain in gains[0].items() if (gains[1][name] / gain).log().abs() > _FACTOR]
        if names:
            warnings.warn(
                f"{', '.join(map(repr, names))}: hyperparameters multiply these values in the program, which q does "
                "not follow, so intervals may be wrong. Write latents centred, dist.Normal(0, scale), and a factor of "
                "a GP site into its kernel, scale**2 * kernel.",
                stacklevel=8,
            )

    @torch.no_grad()
    def _put(self, coefficients: NaturalGaussian, anchor: Any, index: Tensor, best: Any) -> None:
        """Put q of some entries of x to their mode, all others held."""
        given = (best.root @ best.root.mT)[index][:, index]
        eye = torch.eye(len(index), dtype=given.dtype, device=given.device)
        coefficients.put_sums(anchor, given - eye, given @ best.x[index])

    def _wants_field(self, field: list[str]) -> bool:
        """Whether GP sites meet in a density, or a latent is to be joint with them; not for EP and exact families."""
        gps = self.guide.modules_by_site()
        apart = any(isinstance(module, (ExpectationGP, ExactGP)) for module in gps.values())
        return (len(field) > len(gps) or bool(self.guide.facts.interactions)) and not apart

    def _precision(self, covariance: Tensor, moves: Tensor, root: Tensor) -> Tensor:
        """Of (θ, x): x | θ ~ N(x̂ + Xδ, P⁻¹) with X = ∂x̂/∂θ has [H + XᵀPX, −XᵀP; −PX, P]."""
        given = root @ root.mT
        across = given @ moves
        first = torch.linalg.inv(covariance) if len(covariance) else covariance
        above = torch.cat([first + moves.mT @ across, -across.mT], 1)
        return torch.cat([above, torch.cat([-across, given], 1)])

    def _scaled(self, name: str, handler: Standardised, z: Tensor) -> Tensor:
        prior = handler.priors[name]
        if not is_normal_prior(prior) or name in handler.theta:
            return z
        return (prior.variance.expand(prior.shape()).reshape(-1).sqrt() * z).detach()


def _without(values: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def index_of(rows: Mapping[str, slice], names: list[str]) -> Tensor:
    """The entries of some names."""
    return torch.cat([torch.arange(rows[name].start, rows[name].stop) for name in names])
