"""What a guide's first call makes of the latents around GP sites: which are one field, which are hyperparameters, and
where they start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any, Optional

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from tqdm.auto import tqdm

from ..approximations.free import SparseGP
from ..approximations.on_sites import ExactGP, ExpectationGP, OptimalGP
from ..bases.inducing import InducingPoints
from ..gaussians import NaturalGaussian
from ..numerics.functions import depends
from ..program.asking import Unsupported, attempt
from ..program.checks import holds_part
from ..program.data import map_tensors
from ..program.facts import NO_VALUES, Values
from ..program.traces import all_sites, as_process, bare, is_free, repeatable, sample_sites, whole_plates
from .field import LARGEST, Layout, Standardised, anchor_of, index_of, is_normal_prior, make_field, run_standardised
from .known import KnownGuide
from .latents import Hyperparameters, couple, drop_latents
from .nested import Nested, Optimum
from .predictors import find_links
from .runs import Run

_MOST_ROWS = 2000  # of a start; of more so many are drawn
_MOST_VALUES = 500  # of rows that are a basis themselves
_MOST_BESIDE = 50  # normal latents beside more of these
_BESIDE = 0.3  # in unconstrained space
_ELIMINATED = 100  # values of a latent, from which it is no part of a dense covariance
ALL_ROWS = 20_000  # up to which all are taken in the end
_ROWS, _EACH = 256, 4  # rows that say how features move: so many at least, so many a coefficient
_MOST_BENT = 16  # numbers of latents that predictors are not affine in, and may be given them
_MOST_SLOPES = 50_000_000  # of predictors by the field
_SHIFT = 0.3  # standard deviations that a hyperparameter's own move f by, from which f follows it
_FACTOR = 0.05  # a standard deviation of log factors, from which they are followed
PATIENCE = 2.0  # seconds, after which a search shows a bar
_Call = tuple[tuple, dict[str, Any]]  # arguments
_DRAWS = 3  # of the prior, beside the first call's own values


def start(guide: KnownGuide, run: Run, args: tuple, kwargs: dict[str, Any]) -> None:
    """After a first run make the posterior of latents that are no GP sites, at the mode of what is known of them."""
    facts = guide.facts
    local = {name: run.sites[name]["infer"]["prior"] for name in facts.local_latents}
    # Effects of single rows join the field; latents of which inputs or scales are made do not.
    few = not holds_part(run.trace) and max(facts.rows.values(), default=0) <= ALL_ROWS
    facts.row_effects = [name for name, prior in local.items() if few and type(bare(prior)) is dist.Normal]
    try:
        _start(guide, run, args, kwargs)
    finally:
        facts.row_effects = [name for name in facts.row_effects if name in facts.field]


def _start(guide: KnownGuide, run: Run, args: tuple, kwargs: dict[str, Any]) -> None:
    facts = guide.facts
    asked = (facts.able_to_couple or facts.interactions) and guide.independent is not True
    if not (asked or guide.together_by_name) or not is_open(guide):
        return
    bar = tqdm(desc="finding the posterior mode", unit=" evaluations", delay=PATIENCE, leave=False)
    with attempt() as sought, torch.enable_grad(), whole_plates(), bar:
        _find(Search(guide, run, (args, kwargs), [], bar.update))
    if sought.error is not None and facts.latents and not facts.row_effects:
        warnings.warn(
            f"the mode of latents {', '.join(map(repr, facts.latents))} was not found "
            f"({str(sought.error).splitlines()[0]}). They start where init_loc_fn says, each with an independent "
            "posterior, so intervals may be too narrow. Give init_loc_fn a nearer start.",
            stacklevel=6,
        )


def is_open(guide: KnownGuide) -> bool:
    """Whether there is a start: every latent is one of all rows, and GP sites are single functions on a basis."""
    facts = guide.facts
    # Processes have other rows each, at which they would find other modes.
    is_one = not (torch.distributed.is_initialized() or facts.inner or len(facts.able_to_couple) < len(facts.latents))
    return is_one and all(
        type(module) in (SparseGP, OptimalGP, ExactGP, ExpectationGP)
        and not module.batch_shape
        and module.family.get("num_columns") is None
        and sum(module.basis.sizes) <= LARGEST
        for module in guide.modules_by_site().values()
    )


def _find(search: Search) -> None:
    """Take θ to the mode, and start q there."""
    nested, theta = search.nested(), search.hyper.of(search.held)
    if nested is None:
        return
    if search.guide.search and search.hyper.size:
        # From some rows first, where an evaluation is cheap: from there it is not far to the mode of all.
        best = nested.mode(map(nested.tried, [theta, *search.hyper.draws(_DRAWS)]))
        best = nested.across(best if nested.is_informed(best) else nested.beyond(best))
        some, nested = nested, search.at_rows(nested, search.most[1])
        best = best if nested is some else nested.mode([nested.tried(best.theta)])
    else:
        nested = search.at_rows(nested, search.most[1])
        best = nested.at(theta)
    if not best.value.isfinite():
        raise Unsupported("no start has a finite density")
    _Mode(search, nested, best).start()


class Search:
    """What is known of a program before θ goes to its mode: which latents are in the field, ``normal``, and which are
    hyperparameters, ``hyper``.

    :param first: a run that met all sites, with the arguments ``whole``.
    :param fixed: latents that stay where they are in that run, unless they are normal.
    :param tell: called at each run.
    :param handler: what makes members of x.
    """

    def __init__(
        self,
        guide: KnownGuide,
        first: Run,
        whole: _Call,
        fixed: Collection[str],
        tell: Callable[[], Any],
        handler: Any = Standardised,
    ) -> None:
        self.guide, self.whole, self.gps, self.fixed, self.tell = guide, whole, guide.facts.gps, fixed, tell
        self.handler = handler
        self.sites = sites = dict(all_sites(first.trace))
        self.inputs = {name: process.x for name, process in first.processes.items()}
        rows = next(iter(first.processes.values())).event_shape[0]
        # A plate that draws so many rows has all of them, by their numbers.
        drawn = {n: site["fn"] for n, site in sites.items() if is_free(site) and site_is_subsample(site)}
        self.plates = {name: fn.size for name, fn in drawn.items() if fn.subsample_size == rows < fn.size}
        self.num = max([rows, *self.plates.values()])
        self.priors = {name: sites[name]["infer"]["prior"] for name in guide.facts.latents}
        self.held = {name: sites[name]["value"].detach() for name in guide.facts.latents}
        self.stay, self.kept = dict[str, Tensor](), list[str]()  # and latents that are not eliminated
        self.is_exact = any(isinstance(module, ExactGP) for module in guide.modules_by_site().values())
        self.most = (_MOST_VALUES, _MOST_VALUES) if self.is_exact else (_MOST_ROWS, ALL_ROWS)  # first, and in the end
        if guide.facts.row_effects:  # whose number is that of the rows
            self.most = ALL_ROWS, ALL_ROWS
        self.is_part = holds_part(first.trace)
        self._take(self.most[0])
        normal = self._normal()
        # Without a field f follows hyperparameters alone, where its sites are exact:
        # test_exact_of_many_rows_follows_an_intercept.
        are_few = sum(prior.shape().numel() for prior in normal.values()) <= _MOST_BESIDE
        if self.is_exact and self.rows < self.num and are_few and set(self.gps) <= {*guide.facts.quadratic}:
            normal = {}
        self._split(normal)
        scales = {float(sites[name]["scale"]) for name in (*normal, *self.gps)}
        if len(scales) > 1:
            raise Unsupported(f"{', '.join(map(repr, (*normal, *self.gps)))} have one posterior, and scales {scales}")

    def _take(self, most: int, order: Optional[Tensor] = None) -> None:
        """Take so many rows at most, by a plate's numbers, or from tensors with as many rows as a GP site's inputs: the
        first in some order, or some at random.
        """
        self.rows = min(self.num, most)
        # Equal distances would miss what alternates: test_rows_of_a_start_are_none_of_a_pattern.
        order = torch.randperm(self.num, generator=torch.Generator().manual_seed(0)) if order is None else order
        self.chosen = order[: self.rows].sort().values.to(self.guide.like.device)
        held = dict.fromkeys(self.plates, self.chosen)

        def some(value: Tensor) -> Tensor:
            return value[self.chosen] if self.rows < self.num and value.dim() and len(value) == self.num else value

        given: _Call = self.whole if self.plates else map_tensors(some, self.whole)

        def run(handler: Standardised, values: Values) -> poutine.Trace:
            self.tell()
            return run_standardised(self.guide, *given, handler, {**held, **self.stay, **values})

        self.run = run

    def _normal(self) -> dict[str, Any]:
        """The latents with normal priors, except those that a kernel, scale or prior is made of: these are
        hyperparameters.
        """
        guide = self.guide
        normal = {name: prior for name, prior in self.priors.items() if is_normal_prior(prior)}
        if not normal and self.rows == self.num:
            return normal  # a run of the program less: test_a_first_step_from_the_mode_has_met_the_data
        x = {name: torch.zeros(prior.shape().numel()).to(guide.like).requires_grad_() for name, prior in normal.items()}
        handler = self.handler(guide, x, {name: guide.like.new_zeros(1) for name in self.gps})
        are_fewer = False
        with attempt() if self.rows < self.num else nullcontext():
            sites = sample_sites(self.run(handler, _without(self.held, normal)))
            are_fewer = all(handler.features[name][0].shape[-2] < self.num for name in self.gps)
        if self.rows < self.num and not are_fewer:  # its rows are none of its arguments'
            self._take(self.num)
            return self._normal()
        # autograd's graph shows what these are made of, whatever the values: 0 hides no slope
        made = [part for parts in handler.features.values() for part in parts]
        made += [as_process(sites[name]["fn"])[0].variance for name in self.gps]  # type: ignore[union-attr]
        made += [bare(sites[n]["fn"]).log_prob(sites[n]["value"]) for n in self.priors if n not in normal]
        return {name: prior for name, prior in normal.items() if not any(depends(part, x[name]) for part in made)}

    def _split(self, normal: dict[str, Any]) -> None:
        self.normal, self.stay = normal, {name: self.held[name] for name in self.fixed if name not in normal}
        self.hyper = Hyperparameters(_without(self.priors, {*normal, *self.stay}), self.held, self.guide.like)

    def nested(self) -> Optional[Nested]:
        """F of the program; ``None`` if a likelihood has no linear predictors."""
        guide, facts, rows = self.guide, self.guide.facts, self.rows
        if not {*facts.row_effects} <= {*self.normal}:
            return None
        modules = guide.modules_by_site().items()
        sizes = {name: self.handler.sizes_of(module) or [rows] for name, module in modules}
        sizes |= {name: [prior.shape().numel()] for name, prior in self.normal.items()}
        field = {name: sizes[name] for name in self.sites if name in sizes}
        eliminated = self._eliminated()
        if eliminated:
            field[eliminated] = field.pop(eliminated)  # the last one
        owned, residuals = [eliminated] * bool(eliminated), facts.residuals(dict.fromkeys(self.gps, self.num))
        layout = Layout(field, residuals, owned, eliminated)
        numbers = layout.extended - layout.num + layout.dense
        if layout.dense > LARGEST or numbers * rows > _MOST_SLOPES:
            raise Unsupported(f"{numbers} numbers that are normal a priori, at {rows} rows, are too many")
        # Beside their start, where a hyperparameter may hide what it multiplies, as an LKJCholesky's identity does:
        # test_a_check_of_points_constant_entries_and_another_dtype.
        with repeatable(guide.like):
            first = self.hyper.parts(self.hyper.of(self.held))
            beside = {name: value + _BESIDE * torch.randn_like(value) for name, value in first.items()}

        def at(x: Tensor, given: Values = NO_VALUES) -> poutine.Trace:
            return self.run(self.handler(guide, *layout.parts(x), beside), given)

        linked = find_links(at, layout, guide.like)
        # A piecewise constant density shows no gradient: test_what_takes_sites_to_be_independent_refuses_them.
        seen = {*linked.links, *linked.bent} - {*linked.jumps}
        if eliminated and linked.bent:  # a datum may have several of its values
            self.kept.append(eliminated)
            return self.nested()
        # Given a few latents in which predictors are not affine, they may be affine in all else: these are
        # hyperparameters. Else densities are taken as they are.
        bent, normal = {name for names in linked.bent.values() for name in names} & self.normal.keys(), self.normal
        few = bent if sum(normal[name].shape().numel() for name in bent) <= _MOST_BENT else set[str]()
        if moved := few | {*linked.flat} & normal.keys():
            self._split(_without(normal, moved))
            nested = self.nested()
            if (nested is not None and not nested.drawn) or {*linked.flat} & moved:
                return nested
            self._split(normal)
        if not {*facts.downstream} - {*self.normal} <= seen or linked.flat:
            return None
        layout = Layout(field, layout.residuals, linked.owned * (not linked.bent), eliminated)
        return Nested(guide, layout, linked.links, self.hyper, self.run, self.handler, list(linked.bent))

    def _eliminated(self) -> str:
        """The latent with the most values, if each datum may have one of them, and all are in the field."""
        free = {n: p.shape().numel() for n, p in self.normal.items() if type(bare(p)) is dist.Normal}
        most = max(free, key=lambda name: free[name], default="")
        stays = most in self.kept or any(map(self.guide.is_independent, self.normal)) or {*self.fixed} & {*self.normal}
        return "" if stays or free.get(most, 0) < _ELIMINATED else most

    def at_rows(self, nested: Nested, most: int) -> Nested:
        """F at more rows, or as it is."""
        if self.rows >= min(self.num, most):
            return nested
        self._take(most, self._groups(nested) if nested.layout.eliminated and self.num > most else None)
        return self.nested() or nested

    def _groups(self, nested: Nested) -> Tensor:
        """All rows, group by group of the eliminated latent's values: few rows of each say little of their variance."""
        self._take(self.num)
        every = Nested(self.guide, nested.layout, nested.links, self.hyper, self.run, self.handler)
        rows, _ = every.predictors(self.hyper.of(self.held))
        owner = next((one.owner for one in rows.rows.values() if len(one.owner) == self.num), self.chosen)
        rank = torch.randperm(int(owner.max()) + 1, generator=torch.Generator().manual_seed(0))
        return rank.to(owner.device)[owner].argsort()


class _Mode:
    """A program at the mode of F, where q starts."""

    def __init__(self, search: Search, nested: Nested, best: Optimum) -> None:
        self.search, self.nested, self.best, self.layout = search, nested, best, nested.layout
        self.guide, self.facts = search.guide, search.guide.facts
        self.covariance = nested.covariance(best)
        self.theta = best.theta.clone().requires_grad_()  # which shows whether inputs move with θ
        self.found, self.handler = nested.predictors(self.theta)

    def start(self) -> None:
        """Start q there."""
        guide, facts, hyper, layout = self.guide, self.facts, self.search.hyper, self.layout
        free = {n for n in facts.latents if not guide.is_point(n) and not guide.is_independent(n)}
        facts.coupled = joint = [name for name in hyper.rows if name in free]
        field = [name for name in layout.field if name in {*facts.gps, *free}]
        self._make_field(field)
        intercepts = self._intercepts()
        if not self._wants_field(field, intercepts):
            del guide.field
            field, facts.field, facts.factors, facts.eliminated = [], {}, {}, ""
        left = [name for name in self.search.normal if name in free.difference(field)]
        if left and self.search.is_exact and self.search.rows < self.search.num:
            warnings.warn(
                f"latents {', '.join(map(repr, left))} have one posterior with f under Exact() up to {_MOST_VALUES} "
                f"rows, and these are {self.search.num}: intervals of both are too narrow. Take SVGP(64).",
                stacklevel=7,
            )
        self._set_others([*joint, *field])
        if joint:
            index = index_of(hyper.rows, joint, self.theta)
            couple(guide, self.best.theta[index], torch.linalg.cholesky(self.covariance[index][:, index]))
        if field:
            self._start_field(field, intercepts)
            return
        for name, q in [(n, getattr(m, "coefficients", None)) for n, m in guide.modules_by_site().items()]:
            if type(q) is NaturalGaussian and getattr(guide.family_of(name), "start", None) == "data":
                self._put(q, q.anchor_of(self.handler.bases[name]), [name])

    def _set_others(self, joint: Collection[str]) -> None:
        """Start independent posteriors at the mode, with the variances given all other latents."""
        hyper, best, normal = self.search.hyper, self.best, self.search.normal
        others = _without(self.facts.latents, joint)
        if not others:
            return
        _, there = self.nested.run(best.theta, self.layout.extend(best.x))
        loc = hyper.parts(best.theta) | {name: there.values[name] for name in normal}
        alone = hyper.parts(1 / torch.linalg.inv(self.covariance).diagonal())
        given = 1 / best.precision.diagonal  # 1/Pᵢᵢ, in units of the field
        alone |= {n: there.priors[n].variance.reshape(-1).to(given) * given[self.layout.rows[n]] for n in normal}
        for name, latent in others.items():
            mean, scale = (part.detach().reshape(latent["shape"]).clone() for part in (loc[name], alone[name].sqrt()))
            self.guide.set_latent(name, mean, latent["event_dim"], scale.to(mean))

    def _make_field(self, field: list[str]) -> None:
        """Make q(x | θ), of the prior."""
        guide, facts, inputs = self.guide, self.facts, self.search.inputs
        facts.field, facts.eliminated = {name: self.layout.field[name] for name in field}, self.layout.eliminated
        facts.factors = self._factors()
        make_field(guide, facts.field)
        for i, name in enumerate(field):
            if name in facts.gps:  # its inputs at which q(x) is about its values
                x = inputs[name].detach()
                num = min(len(x), max(_ROWS, _EACH * sum(facts.field[name])))
                guide.field.register_buffer(f"rows_{i}", x[torch.linspace(0, len(x) - 1, num, device=x.device).long()])

    def _start_field(self, field: list[str], intercepts: Mapping[str, Tensor]) -> None:
        """Put q(x | θ) to the mode."""
        guide, facts, handler = self.guide, self.facts, self.handler
        facts.links = {name: dict(links) for name, links in self.nested.links.items()}
        facts.drawn = list(self.nested.drawn)
        facts.owned = list(self.layout.owned)
        for name, module in guide.modules_by_site().items():
            if isinstance(module, ExactGP):  # whose values at all rows are coefficients of a basis
                module.basis = InducingPoints([self.search.inputs[name]], trainable=False)
                facts.gps[name] = module.spec()
        drop_latents(guide, [name for name in field if name not in facts.gps])
        anchor = anchor_of(guide, handler.bases, handler.priors, self.found.sites)
        if intercepts:
            moves = torch.cat(list(intercepts.values()), -1)[index_of(self.layout.rows, field, self.theta)]
            # what they add to the values that q(x) is about, (K, V)
            guide.field.register_buffer("slopes", anchor.detached.values(moves))
            facts.intercepts = list(intercepts)
            anchor = anchor_of(guide, handler.bases, handler.priors, self.found.sites)
        self._put(guide.field.coefficients, anchor, field)

    def _factors(self) -> dict[str, dict[str, list[float]]]:
        """By members whose values hyperparameters multiply in the program, by some exp(bᵀθ) near the mode, and by
        hyperparameters b: what q(x | θ) is about (test_non_centred_latents_have_the_posterior_of_centred_ones).
        """
        found = dict[str, dict[str, list[float]]]()
        # b = ∂ log(|J| / |Φ|) / ∂θ: predictors exp(bᵀθ)Φw have so many times the features for their slopes J
        squares: Any = sum(rows.square().sum(0) for rows in self.found.rows.values())
        for name, own in self.layout.rows.items() if self.found.rows else ():
            size: Any = sum(part.square().sum() for part in self.handler.features[name])
            gain = 0.5 * (squares[own].sum() / size).log() + 0 * self.theta.sum()
            (slope,) = torch.autograd.grad(gain, self.theta, retain_graph=True, materialize_grads=True)
            if (slope @ self.covariance @ slope).sqrt() > _FACTOR:
                parts = self.search.hyper.parts(slope)
                found[name] = {other: part.reshape(-1).tolist() for other, part in parts.items()}
        return found

    @torch.no_grad()
    def _put(self, coefficients: NaturalGaussian, anchor: Any, members: list[str]) -> None:
        """Put q of some members to their mode, all others held."""
        if self.layout.eliminated:
            precision = self.best.precision
            coefficients.put_sums(anchor, precision.gram, precision @ self.best.x)  # type: ignore[arg-type,operator]
            return
        index = index_of(self.layout.rows, members, self.theta)
        # exp(−½ xᵀPx + xᵀPx̂) over the prior's exp(−½|x|²)
        given = (self.best.root @ self.best.root.mT)[index][:, index]
        coefficients.put_sums(anchor, given - torch.eye(len(index)).to(given), given @ self.best.x[index])

    def _wants_field(self, field: list[str], intercepts: Collection[str]) -> bool:
        """Whether GP sites meet in a density, or a latent is to be joint with them."""
        search, modules = self.search, self.guide.modules_by_site().values()
        moves = any(as_process(self.handler.priors[name])[0].x.requires_grad for name in self.facts.gps)  # type: ignore[union-attr]
        # Values at all rows are a basis if all are here, and stay where they are:
        # test_exact_is_no_field_of_a_batch_or_of_inputs_that_move.
        stays = not (search.is_exact and (search.rows < search.num or search.is_part or moves))
        # an intercept of another prior, which f follows by itself on sites
        follows = bool(intercepts or (self.nested.drawn and self.facts.coupled))
        follows = follows and all(type(module) is SparseGP for module in modules)
        meets = len(field) > len(modules) or bool(self.facts.interactions or self.guide.together_by_name)
        return stays and (meets or follows) and not any(isinstance(module, ExpectationGP) for module in modules)

    def _intercepts(self) -> dict[str, Tensor]:
        """By hyperparameters that q(x | θ) is to follow beside what its sites are about, such as an intercept, the
        moves of x, ``(num, V)``, that do to ∇ℓ what their values do, or θ.
        """
        nested, best, facts, moves = self.nested, self.best, self.facts, dict[str, Tensor]()
        if not facts.coupled:
            return moves
        pull, here = self._followed(best, self.theta)
        # Squared moves of x̂, P⁻¹∂(Jᵀ∇ℓ), by a standard deviation of θ, in those of x.
        shifts = (self.covariance @ pull * best.precision.solve(pull.mT).mT).sum(-1)
        for name in facts.coupled:
            rows, away = nested.hyper.rows[name], best.theta.clone()
            if shifts[rows].sum() <= _SHIFT**2:
                continue
            # The moves of x here and one standard deviation away: the parameter of which they change less is followed.
            away[rows] += self.covariance.diagonal().sqrt()[rows]
            other, there = nested.tried(away.requires_grad_()), here
            if other is not nested.none:
                _, there = self._followed(other, away)
            by_value, by_theta = ((a - b).norm() / a.norm() for a, b in zip(here[name], there[name]))
            facts.unconstrained += [name] * bool(by_theta < by_value)
            moves[name] = here[name][int(by_theta < by_value)].mT
        return moves

    def _followed(self, best: Optimum, theta: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """As :meth:`Nested.follow`, of the sites that the field has now."""
        found, handler = self.nested.predictors(theta)
        if self.layout.eliminated:  # of which no dense T is made
            return self.nested.follow(best, theta, found, None)
        index = index_of(self.layout.rows, self.facts.field, theta)
        turn = torch.eye(self.layout.num).to(theta)
        turn[index[:, None], index] = anchor_of(self.guide, handler.bases, handler.priors, found.sites).turn()
        return self.nested.follow(best, theta, found, turn)


def _without(values: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
