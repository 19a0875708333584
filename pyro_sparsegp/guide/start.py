"""What a guide's first call makes of the latents around GP sites: which are one field, which are hyperparameters, and
where they start.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to
from tqdm.auto import tqdm

from ..approximations.free import SparseGP
from ..approximations.on_sites import ExactGP, ExpectationGP, OptimalGP
from ..bases import InducingPoints
from ..gaussians import NaturalGaussian
from ..numerics.functions import jacobian
from ..program.checks import holds_part
from ..program.data import map_tensors
from ..program.traces import all_sites, as_process, is_free, repeatable, whole_plates
from .field import (
    LARGEST,
    Layout,
    Standardised,
    anchor_of,
    at_zero,
    hyperparameters_among,
    is_normal_prior,
    keep_rows,
    make_field,
    residuals_of,
    run_standardised,
)
from .known import KnownGuide
from .latents import couple, drop_latents
from .nested import Nested, Optimum, units_of
from .predictors import Predictors, find_links
from .runs import Run

_MOST_ROWS = 2000  # of a start; more are taken at equal distances
_MOST_VALUES = 500  # of rows that are a basis themselves
_MOST_BESIDE = 50  # normal latents beside more of these
_BESIDE = 0.3  # in unconstrained space
ALL_ROWS = 20_000  # up to which all are taken in the end
_MOST_SLOPES = 50_000_000  # of predictors by the field
_SHIFT = 0.3  # standard deviations that a hyperparameter's own move f by, from which f follows it
_FACTOR = 0.05  # a standard deviation of log factors, from which they are followed
PATIENCE = 2.0  # seconds, after which a search shows a bar
_PLATEAU = 3.0  # functions that data inform, below which other starts are tried
_FACTORS = [10 ** (k / 2) for k in (-6, -5, -4, -3, -2, -1, 1, 2, 3, 4)]  # of these hyperparameters
_DRAWS = 3  # of the prior, beside the first call's own values


def start(guide: KnownGuide, run: Run, args: tuple, kwargs: dict[str, Any]) -> None:
    """Make the posterior of latents that are no GP sites, at the mode of what is known of them.

    :param run: the first.
    """
    facts = guide.facts
    asked = facts.able_to_couple and guide.independent is not True
    if not (asked or guide.together_by_name) or not is_open(guide):
        return
    try:
        with torch.enable_grad(), whole_plates():
            _find(Search(guide, run, args, kwargs))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if names := ", ".join(map(repr, facts.latents)):
            warnings.warn(
                f"the mode of latents {names} was not found ({str(error).splitlines()[0]}). They "
                "start where init_loc_fn says, each with an independent posterior, so intervals may be too narrow. "
                "Give init_loc_fn a nearer start.",
                stacklevel=6,
            )


def is_open(guide: KnownGuide) -> bool:
    """Whether there is a start: every latent is one of all rows, and GP sites are single functions on a basis."""
    facts = guide.facts
    # Processes have other rows each, at which they would find other modes.
    if torch.distributed.is_initialized() or facts.inner or len(facts.able_to_couple) < len(facts.latents):
        return False
    return all(
        type(module) in (SparseGP, OptimalGP, ExactGP, ExpectationGP)
        and not module.batch_shape
        and module.family.get("num_columns") is None
        and sum(module.basis.sizes) <= LARGEST
        for module in guide.modules_by_site().values()
    )


def _find(search: Search) -> None:
    """Take θ to the mode, and start q there."""
    nested, theta = search.nested(), search.theta(search.held)
    if nested is None:
        return
    moves = search.guide.search and bool(search.hyper)
    with tqdm(desc="the mode of latents", unit=" evaluations", delay=PATIENCE, leave=False) as bar:
        nested.tell = bar.update
        best = nested.mode([theta, *search.draws()]) if moves else nested.at(theta)
        if moves and not search.is_informed(nested, best.root):
            best = search.beyond(nested, best)
        some, nested = nested, search.at_rows(nested, search.most[1])
        if nested is not some:
            best = nested.mode([best.theta]) if moves else nested.at(theta)
        search.settle(nested, best)


class Search:
    """What is known of a program before θ goes to its mode.

    :param first: a run that met all sites.
    :param fixed: latents that stay where they are in that run, unless they are normal.

    Some latents are in the field, ``normal``, and all others hyperparameters, ``hyper``; ``priors`` and ``held`` are
    the latents' in that run.
    """

    def __init__(
        self, guide: KnownGuide, first: Run, args: tuple, kwargs: dict[str, Any], fixed: Collection[str] = ()
    ) -> None:
        self.guide, self.whole, self.gps = guide, (args, kwargs), list(guide.facts.gps)
        sites = dict(all_sites(first.trace))
        self.inputs = {name: process.x for name, process in first.processes.items()}
        self.order = list(sites)
        rows = next(iter(first.processes.values())).event_shape[0]
        # A plate that draws so many rows has all of them, by their numbers.
        drawn = {n: site["fn"] for n, site in sites.items() if is_free(site) and site_is_subsample(site)}
        self.plates = {name: fn.size for name, fn in drawn.items() if fn.subsample_size == rows < fn.size}
        self.num = max([rows, *self.plates.values()])
        self.priors = {name: sites[name]["infer"]["prior"] for name in guide.facts.latents}
        self.fixed, self.stay = fixed, dict[str, Tensor]()
        self.held = {name: sites[name]["value"].detach() for name in guide.facts.latents}
        exact = any(isinstance(module, ExactGP) for module in guide.modules_by_site().values())
        self.most = (_MOST_VALUES, _MOST_VALUES) if exact else (_MOST_ROWS, ALL_ROWS)  # first, and in the end
        self.is_part = holds_part(first.trace)
        self._take(self.most[0])
        if self.rows < self.num and not self._has_fewer():
            self._take(self.num)
        normal = {name: prior for name, prior in self.priors.items() if is_normal_prior(prior)}
        if normal:
            others = _without(self.held, normal)
            normal = _without(normal, hyperparameters_among(guide, normal, lambda handler: self.run(handler, others)))
        # Without a field f follows hyperparameters alone, where its sites are exact:
        # test_exact_of_many_rows_follows_an_intercept.
        beside = sum(prior.shape().numel() for prior in normal.values()) if exact and self.rows < self.num else 0
        if 0 < beside <= _MOST_BESIDE and set(self.gps) <= {*guide.facts.quadratic}:
            normal = {}
        self._split(normal)
        scales = {float(sites[name]["scale"]) for name in (*normal, *self.gps)}
        if len(scales) > 1:
            raise ValueError(f"{', '.join(map(repr, (*normal, *self.gps)))} have one posterior, and scales {scales}")

    def _split(self, normal: dict[str, Any]) -> None:
        self.normal, self.stay = normal, {name: self.held[name] for name in self.fixed if name not in normal}
        self.hyper = [name for name in self.priors if name not in normal and name not in self.stay]

    def _take(self, most: int) -> None:
        """Take so many rows at most, by a plate's numbers, or those of tensors with as many as a GP site's inputs; at
        random: equal distances would miss what alternates, test_rows_of_a_start_are_none_of_a_pattern.
        """
        self.rows = min(self.num, most)
        chosen = torch.randperm(self.num, generator=torch.Generator().manual_seed(0))[: self.rows].sort().values
        self.chosen = chosen.to(self.guide.like.device)
        held = dict.fromkeys(self.plates, self.chosen)

        def some(value: Tensor) -> Tensor:
            return value[self.chosen] if self.rows < self.num and value.dim() and len(value) == self.num else value

        given: tuple[tuple, dict[str, Any]] = self.whole if self.plates else map_tensors(some, self.whole)

        def run(handler: Standardised, values: Mapping[str, Tensor]) -> poutine.Trace:
            return run_standardised(self.guide, *given, handler, {**held, **self.stay, **values})

        self.run = run

    def nested(self) -> Optional[Nested]:
        """F of the program; ``None`` if a likelihood has no linear predictors."""
        first = {name: self._unconstrained(name, self.held[name]) for name in self.hyper}
        layout = self._layout([name for name in self.order if name in self.normal or name in self.gps])
        # Beside their start, where a hyperparameter may hide what it multiplies, as an LKJCholesky's identity does:
        # test_a_check_of_points_constant_entries_and_another_dtype.
        with repeatable(self.guide.like):
            beside = {name: value + _BESIDE * torch.randn_like(value) for name, value in first.items()}

        def at(x: Tensor) -> poutine.Trace:
            return self.run(Standardised(self.guide, *layout.parts(x), beside), {})

        linked = find_links(at, layout, self.guide.like)
        # A piecewise constant density shows no gradient: test_what_takes_sites_to_be_independent_refuses_them.
        facts = self.guide.facts
        if linked is None or not {name for name in facts.downstream if name in facts.rows} <= linked[0].keys():
            return None
        links, owned, bent = linked
        if bent:  # latents in which predictors are not affine are hyperparameters
            moved = [name for name in self.normal if name in bent]
            self._split(_without(self.normal, moved))
            return self.nested() if moved else None
        layout, shapes = Layout(layout.field, layout.residuals, owned), {name: v.shape for name, v in first.items()}
        units = units_of({name: self.priors[name] for name in self.hyper}, self.guide.like)
        return Nested(self.guide, layout, links, shapes, units, self.run)

    def at_rows(self, nested: Nested, most: int) -> Nested:
        """F at more rows, or as it is."""
        if self.rows >= min(self.num, most):
            return nested
        self._take(most)
        found = self.nested() or nested
        found.tell = nested.tell
        return found

    def theta(self, values: Mapping[str, Tensor]) -> Tensor:
        """θ of some hyperparameters' values."""
        parts = [self._unconstrained(name, values[name]).reshape(-1) for name in self.hyper]
        return torch.cat([self.guide.like.new_zeros(0), *parts])

    def draws(self, num: int = _DRAWS) -> list[Tensor]:
        """Some θ from the prior, of those that are finite."""
        with repeatable(self.guide.like):
            draws = [self.theta({name: self.priors[name].sample() for name in self.hyper}) for _ in range(num)]
        return [draw for draw in draws if draw.isfinite().all()]

    def is_informed(self, nested: Nested, root: Tensor) -> bool:
        """Whether data inform some functions of GP sites' bases, tr(I − P⁻¹); else all of them may be noise.

        :param root: of P.
        """
        index = index_of(nested.layout.rows, self.gps)
        return len(index) - float(torch.cholesky_inverse(root).diagonal()[index].sum()) > _PLATEAU

    def beyond(self, nested: Nested, best: Optimum) -> Optimum:
        """The mode beyond a plateau, if F is higher there: from θ with one positive hyperparameter times a factor that
        its prior allows. Where the others stay F is no higher: test_a_length_far_from_the_data_is_no_plateau.
        """
        found, every = [best.theta], nested.theta_of(best.theta)
        values = {name: biject_to(self.priors[name].support)(part) for name, part in every.items()}
        for name, value in values.items():
            moved = [value * factor for factor in _FACTORS if (value > 0).all()]
            found += [self.theta({**values, name: one}) for one in moved if self.priors[name].support.check(one).all()]
        end = nested.mode(found, lambda other: self.is_informed(nested, other.root))
        return max(best, end, key=lambda other: float(other.value))

    def _has_fewer(self) -> bool:
        """Whether the program has as many rows as it was given."""
        handler = at_zero(self.guide, {})
        try:
            self.run(handler, self.held)
        except (ValueError, RuntimeError, IndexError):
            return False
        return all(handler.features[name][0].shape[-2] < self.num for name in self.gps)

    def _layout(self, members: list[str]) -> Layout:
        guide, normal, rows = self.guide, self.normal, self.rows
        field = {
            name: [normal[name].shape().numel()]
            if name in normal
            else list(guide.module_of(name).basis.sizes) or [rows]
            for name in members
        }
        layout = Layout(field, residuals_of(guide.facts, dict.fromkeys(guide.facts.gps, self.num)))
        if layout.num > LARGEST or layout.extended * rows > _MOST_SLOPES:
            raise ValueError(f"{layout.extended} numbers that are normal a priori, at {rows} rows, are too many")
        return layout

    def _unconstrained(self, name: str, value: Tensor) -> Tensor:
        return biject_to(self.priors[name].support).inv(value).to(self.guide.like)

    def settle(self, nested: Nested, best: Optimum) -> None:
        """Start q at the mode."""
        guide, facts, layout = self.guide, self.guide.facts, nested.layout
        covariance = nested.covariance(best)
        free = {name for name in self.priors if not guide.is_point(name) and not guide.is_independent(name)}
        field = [name for name in layout.field if name in facts.gps or name in free]
        mode = best.theta.clone().requires_grad_()  # which shows whether inputs move with θ
        found, handler = nested.predictors(mode)
        along = torch.cat([best.x, best.x.new_zeros(layout.extended - layout.num)])[None]  # latents are affine in x
        values = [(name, handler.values[name]) for name in self.normal]
        moved = {n: value + jacobian(value.reshape(-1), found.x, along).reshape(value.shape) for n, value in values}
        loc = nested.theta_of(best.theta) | moved
        facts.coupled = joint = [name for name in self.hyper if name in free]
        intercepts = self._intercepts(nested, found, mode, best, covariance)
        field = field if self._wants_field(field, intercepts, handler) else []
        left = [name for name in self.normal if name in free and name not in field]
        if left and self.rows < self.num and any(isinstance(m, ExactGP) for m in guide.modules_by_site().values()):
            warnings.warn(
                f"latents {', '.join(map(repr, left))} have one posterior with f under Exact() up to {_MOST_VALUES} "
                f"rows, and these are {self.num}: intervals of both are too narrow. Take SVGP(64).",
                stacklevel=7,
            )
        # An independent posterior is that given all others, of these variances: of θ, and of a field in its units.
        alone = nested.theta_of(1 / torch.linalg.inv(covariance).diagonal())
        given = 1 / best.root.square().sum(-1)
        alone |= {n: handler.priors[n].variance.reshape(-1).to(given) * given[layout.rows[n]] for n in self.normal}
        for name, latent in _without(facts.latents, [*joint, *field]).items():
            mean, scale = (part.detach().reshape(latent["shape"]).clone() for part in (loc[name], alone[name].sqrt()))
            guide.set_latent(name, mean, latent["event_dim"], scale.to(mean))
        if joint:
            index = index_of(nested.entries, joint)
            root = torch.linalg.cholesky(covariance[index][:, index])
            couple(guide, torch.cat([loc[name].reshape(-1) for name in joint]), root)
        if field:
            facts.factors = self._factors(nested, found, handler, mode, covariance)
            self._start_field(field, nested, best, intercepts, found.sites, handler)
        for name, module in () if field else guide.modules_by_site().items():
            natural = isinstance(module, SparseGP) and isinstance(module.coefficients, NaturalGaussian)
            if natural and guide.family_of(name).start == "data":  # type: ignore[attr-defined]
                anchor = module.coefficients.anchor_of(handler.bases[name])
                self._put(module.coefficients, anchor, index_of(layout.rows, [name]), best)

    def _start_field(
        self,
        field: list[str],
        nested: Nested,
        best: Optimum,
        intercepts: Mapping[str, Tensor],
        sites: Mapping[str, Any],
        handler: Standardised,
    ) -> None:
        """Make q(x | θ).

        :param intercepts: as :meth:`_intercepts` has them.
        :param sites: of a run at the mode, with its handler.
        """
        guide, facts, layout = self.guide, self.guide.facts, nested.layout
        facts.field = {name: layout.field[name] for name in field}
        facts.links, facts.owned = {name: dict(links) for name, links in nested.links.items()}, list(layout.owned)
        for name, module in guide.modules_by_site().items():
            if isinstance(module, ExactGP):
                module.basis = InducingPoints([self.inputs[name]], trainable=False)
                facts.gps[name] = module.spec()
        index = index_of(layout.rows, field)
        make_field(guide, facts.field)
        keep_rows(guide, {i: self.inputs[name] for i, name in enumerate(field) if name in facts.gps})
        drop_latents(guide, [name for name in field if name not in facts.gps])
        anchor = anchor_of(guide, handler.bases, handler.priors, sites)
        if intercepts:
            slopes = anchor.detached.values(torch.cat(list(intercepts.values()), -1)[index])
            guide.field.register_buffer("slopes", slopes)  # what they add to the values that q(x) is about, (K, V)
            facts.intercepts = list(intercepts)
            anchor = anchor_of(guide, handler.bases, handler.priors, sites)
        self._put(guide.field.coefficients, anchor, index, best)

    def _factors(
        self, nested: Nested, predictors: Predictors, handler: Standardised, mode: Tensor, covariance: Tensor
    ) -> dict[str, dict[str, list[float]]]:
        """By members whose values hyperparameters multiply in the program, by some exp(bᵀθ) near the mode, and by
        hyperparameters b: what q(x | θ) is about (test_non_centred_latents_have_the_posterior_of_centred_ones).
        """
        found = dict[str, dict[str, list[float]]]()
        squares = torch.stack([predictors.rows[place].square().sum(0) for place in predictors.eta]).sum(0)
        for name, own in nested.layout.rows.items():
            size: Any = sum(part.square().sum() for part in handler.features[name])
            gain = 0.5 * (squares[own].sum() / size).log() + 0 * mode.sum()
            (slope,) = torch.autograd.grad(gain, mode, retain_graph=True, materialize_grads=True)
            if (slope @ covariance @ slope).sqrt() > _FACTOR:
                found[name] = {other: part.reshape(-1).tolist() for other, part in nested.theta_of(slope).items()}
        return found

    @torch.no_grad()
    def _put(self, coefficients: NaturalGaussian, anchor: Any, index: Tensor, best: Any) -> None:
        """Put q of some entries of x to their mode, all others held."""
        given = (best.root @ best.root.mT)[index][:, index]
        eye = torch.eye(len(index), dtype=given.dtype, device=given.device)
        coefficients.put_sums(anchor, given - eye, given @ best.x[index])

    def _wants_field(self, field: list[str], intercepts: Collection[str], handler: Standardised) -> bool:
        """Whether GP sites meet in a density, or a latent is to be joint with them, such as an intercept of another
        prior: on sites f follows it by itself. Not for EP, and of values at all rows only if these are here, and stay
        where they are: test_exact_is_no_field_of_a_batch_or_of_inputs_that_move.
        """
        gps = self.guide.modules_by_site()
        moves = any(as_process(handler.priors[name])[0].x.requires_grad for name in gps)  # type: ignore[union-attr]
        most = (ExpectationGP, ExactGP) if self.rows < self.num or self.is_part or moves else ExpectationGP
        follows = bool(intercepts) and all(type(module) is SparseGP for module in gps.values())
        meets = len(field) > len(gps) or bool(self.guide.facts.interactions or self.guide.together_by_name)
        return (meets or follows) and not any(isinstance(module, most) for module in gps.values())

    def _intercepts(
        self, nested: Nested, found: Predictors, mode: Tensor, best: Optimum, covariance: Tensor
    ) -> dict[str, Tensor]:
        """By hyperparameters that f follows where kernels stay, as an intercept, the moves of x, ``(num, V)``, that
        do to Jᵀ∇ℓ what their values do, or θ: that by which they are nearer to linear, which the facts then have.
        """
        facts, sd, moves = self.guide.facts, covariance.diagonal().sqrt(), dict[str, Tensor]()
        if not facts.coupled:
            return moves
        pull, here = nested.follow(found, mode, best)
        # Squared moves of x̂, P⁻¹∂(Jᵀ∇ℓ), by a standard deviation of θ, in those of x.
        sizes = nested.theta_of((covariance @ pull * torch.cholesky_solve(pull.mT, best.root).mT).sum(-1))
        for name in [name for name in facts.coupled if sizes[name].sum() > _SHIFT**2]:
            away, rows = best.theta.clone(), nested.entries[name]
            away[rows] += sd[rows]
            other = nested.tried(away) or best
            away = other.theta.clone().requires_grad_()
            _, there = nested.follow(nested.predictors(away)[0], away, other)
            by_value, by_theta = ((a - b).norm() / a.norm() for a, b in zip(here[name], there[name]))
            facts.unconstrained += [name] * bool(by_theta < by_value)
            moves[name] = here[name][int(by_theta < by_value)].mT
        return moves


def _without(values: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def index_of(rows: Mapping[str, slice], names: list[str]) -> Tensor:
    """The entries of some names."""
    return torch.cat([torch.arange(0), *(torch.arange(rows[name].start, rows[name].stop) for name in names)])
