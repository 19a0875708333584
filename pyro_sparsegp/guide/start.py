"""What a guide's first call makes of the latents around GP sites: which are one field, which are hyperparameters, and
where they start.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_mean
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from ..approximations.expectation import ExpectationGP
from ..approximations.free import SparseGP
from ..approximations.optimal import OptimalGP
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
from .nested import Nested
from .runs import Setup

__all__ = ["init_to_centre", "start"]

_MOST_ROWS = 2000  # of a start; more are taken at equal distances
_ALL_ROWS = 20_000  # up to which all are taken in the end
_MOST_SLOPES = 50_000_000  # of predictors by the field
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
    if not (able or facts.joint) or not _is_open(guide, able):
        return
    found = _Start(guide, run, able, (args, kwargs, 1.0), *_some_rows(run, args, kwargs))
    try:
        with torch.enable_grad():
            found.find()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if not able:
            return
        warnings.warn(
            f"the mode of latents {', '.join(map(repr, able))} was not found ({str(error).splitlines()[0]}). They "
            "start where init_loc_fn says, each with a posterior of its own, so intervals may be too narrow. Give "
            "init_loc_fn a start that is nearer.",
            stacklevel=6,
        )


def _is_open(guide: KnownGuide, able: list[str]) -> bool:
    """Whether there is a start: every latent is one of all rows, and GP sites are single functions on a basis."""
    facts = guide.facts
    # Processes have other rows each, at which they would find other modes.
    apart = torch.distributed.is_initialized() or guide.independent is True
    if apart or facts.inner or facts.enumerated or len(able) < len(facts.latents):
        return False
    return all(
        type(module) in (SparseGP, OptimalGP, ExpectationGP)
        and not module.batch_shape
        and module.family.get("num_columns") is None
        and sum(module.basis.sizes) <= LARGEST
        for module in guide.modules_by_site().values()
    )


def _some_rows(run: Setup, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], float]:
    """The arguments at some of many rows, and what each stands for: those of as many as the first GP site's inputs."""
    num = next(iter(run.processes.values())).event_shape[0]
    if num <= _MOST_ROWS:
        return args, kwargs, 1.0
    step = math.ceil(num / _MOST_ROWS)

    def some(value: Any) -> Any:
        return value[::step] if isinstance(value, Tensor) and value.dim() and len(value) == num else value

    few = tuple(map(some, args)), {key: some(value) for key, value in kwargs.items()}
    return (*few, num / math.ceil(num / step))


@dataclass
class _Start:
    """A start on its way.

    :param able: the latents.
    :param whole: the arguments, and 1; then those at some rows, and ``each``.
    :param each: what a row of these arguments stands for.
    """

    guide: KnownGuide
    first: Setup
    able: list[str]
    whole: tuple[tuple, dict[str, Any], float]
    args: tuple
    kwargs: dict[str, Any]
    each: float

    @property
    def num(self) -> int:
        """The number of all rows."""
        return next(iter(self.first.processes.values())).event_shape[0]

    def find(self) -> None:
        guide, facts, sites = self.guide, self.guide.facts, dict(all_sites(self.first.trace))
        priors = {name: sites[name]["infer"]["prior"] for name in self.able}
        plates = {n: s["value"].detach() for n, s in sites.items() if is_free(s) and site_is_subsample(s)}
        few = self.each != 1  # whose plates have other row numbers
        self.values = {n: value for n, value in plates.items() if not (few and len(value) == self.num)}
        held = {name: sites[name]["value"].detach() for name in self.able}
        gps = list(facts.gps)
        normal = {name: prior for name, prior in priors.items() if is_normal_prior(prior)}
        if normal:
            made_of = hyperparameters_among(guide, normal, lambda handler: self._run(handler, _without(held, normal)))
            normal = _without(normal, made_of)
        hyper = [name for name in self.able if name not in normal]
        if few and not self._has_fewer(_without(held, normal)):
            self.args, self.kwargs, self.each, self.values = *self.whole, plates
        members = [name for name in [*self.first.trace.nodes] if name in normal or name in gps]
        layout = self._layout(members, normal)
        first = {name: self._unconstrained(priors[name], held[name]) for name in hyper}
        shapes = {name: raw.shape for name, raw in first.items()}
        linked = self._links(layout, first)
        # A piecewise constant density shows no gradient: test_what_takes_sites_to_be_independent_refuses_them.
        if linked is None or not {name for name in facts.downstream if name in facts.rows} <= linked[0].keys():
            return
        links, owned = linked
        layout = Layout(layout.field, layout.residuals, owned)
        nested = Nested(guide, layout, links, shapes, self.values, self.args, self.kwargs, self.each)
        theta = self._flat(hyper, priors, held)
        starts = [theta, *self._prior_draws(hyper, priors)] if hyper else [theta]
        mode = nested.mode(starts) if hyper else theta
        if self.each > 1 and self.num <= _ALL_ROWS:  # from there on all rows
            self.args, self.kwargs, self.each = self.whole
            nested = Nested(guide, layout, links, shapes, plates, self.args, self.kwargs)
            mode = nested.mode([mode]) if hyper else mode
        covariance, moves = nested.curvature(mode)
        best = nested.at(mode)
        self._settle(nested, mode, best, covariance, moves, list(normal), hyper)

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

    def _layout(self, members: list[str], normal: Mapping[str, Any]) -> Layout:
        guide = self.guide
        field = {
            name: [normal[name].shape().numel()] if name in normal else list(guide.module_of(name).basis.sizes)
            for name in members
        }
        layout = Layout(field, residuals_of(guide.facts, dict.fromkeys(guide.facts.gps, self.num)))
        if layout.num > LARGEST or layout.extended * self.num / self.each > _MOST_SLOPES:
            raise ValueError(f"{layout.extended} numbers that are normal a priori, at {self.num} rows, are too many")
        return layout

    def _unconstrained(self, prior: Any, value: Tensor) -> Tensor:
        return biject_to(prior.support).inv(value).to(self.guide.like)

    def _flat(self, names: list[str], priors: Mapping[str, Any], values: Mapping[str, Tensor]) -> Tensor:
        parts = [self._unconstrained(priors[name], values[name]).reshape(-1) for name in names]
        return torch.cat(parts) if parts else self.guide.like.new_zeros(0)

    def _prior_draws(self, names: list[str], priors: Mapping[str, Any]) -> list[Tensor]:
        with repeatable(self.guide.like):
            draws = [self._flat(names, priors, {n: priors[n].sample() for n in names}) for _ in range(_DRAWS)]
        return [draw for draw in draws if draw.isfinite().all()]

    def _settle(
        self,
        nested: Nested,
        mode: Tensor,
        best: Any,
        covariance: Tensor,
        moves: Tensor,
        normal: list[str],
        hyper: list[str],
    ) -> None:
        guide, facts, layout = self.guide, self.guide.facts, nested.layout
        free = {name for name in self.able if not guide.is_point(name) and not guide.is_independent(name)}
        field = [name for name in layout.field if name in facts.gps or name in free]
        is_field = self._wants_field(field)
        precision = self._precision(covariance, moves, best.root)
        _, handler = nested.run(mode, torch.cat([best.x, best.x.new_zeros(layout.extended - layout.num)]))
        loc = nested.theta_of(mode) | {name: handler.values[name].detach() for name in normal}
        joint = [name for name in hyper if name in free]
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
            index = _index(rows, joint)
            root = torch.linalg.cholesky(covariance[index][:, index])
            couple(guide, torch.cat([loc[name].reshape(-1) for name in joint]), root)
        if is_field:
            facts.field = {name: layout.field[name] for name in field}
            facts.links, facts.owned = {name: dict(links) for name, links in nested.links.items()}, list(layout.owned)
            make_field(guide, facts.field)
            drop_latents(guide, [name for name in field if name not in facts.gps])
            anchor = anchor_of(guide, handler.bases, handler.priors)
            self._put(guide.field.coefficients, anchor, _index(layout.rows, field), best)
            return
        for name, module in guide.modules_by_site().items():
            natural = isinstance(module, SparseGP) and isinstance(module.coefficients, NaturalGaussian)
            if natural and guide.family_of(name).start == "data":  # type: ignore[attr-defined]
                anchor = module.anchor(handler.bases[name])
                self._put(module.coefficients, anchor, _index(layout.rows, [name]), best)

    @torch.no_grad()
    def _put(self, coefficients: NaturalGaussian, anchor: Any, index: Tensor, best: Any) -> None:
        """Put q of some entries of x to their mode, all others held."""
        given = (best.root @ best.root.mT)[index][:, index]
        eye = torch.eye(len(index), dtype=given.dtype, device=given.device)
        coefficients.put_sums(anchor, given - eye, given @ best.x[index])

    def _wants_field(self, field: list[str]) -> bool:
        """Whether GP sites meet in a density, or a latent is to be joint with them; not in expectation propagation."""
        gps = self.guide.modules_by_site()
        expectation = any(isinstance(module, ExpectationGP) for module in gps.values())
        return (len(field) > len(gps) or bool(self.guide.facts.interactions)) and not expectation

    def _links(self, layout: Layout, theta: Mapping[str, Tensor]) -> Any:
        def run(x: Tensor) -> poutine.Trace:
            return self._run(Standardised(self.guide, *layout.parts(x), theta), {})

        return find_links(run, layout, self.guide.like)

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


def _index(rows: Mapping[str, slice], names: list[str]) -> Tensor:
    return torch.cat([torch.arange(rows[name].start, rows[name].stop) for name in names])
