"""What a guide's first call makes of the latents around GP sites: which are one field, which are hyperparameters, and
where they start.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, Optional

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..approximations.free import SparseGP
from ..approximations.on_sites import ExactGP, ExpectationGP, OptimalGP
from ..bases.inducing import InducingPoints
from ..gaussians import NaturalGaussian
from ..gaussians.anchors import Anchor
from ..gaussians.natural import is_full
from ..numerics.functions import depends
from ..numerics.linalg import eye_like
from ..program.asking import Unsupported, attempt
from ..program.checks import holds_part
from ..program.draws import late_bar
from ..program.handlers import held_runs
from ..program.traces import as_process, bare, whole_plates
from .field import LARGEST, anchor_of, index_of, is_normal_prior, make_field
from .known import KnownGuide, without
from .latents import couple, drop_latents
from .moving import some_of
from .nested import Nested, Optimum
from .runs import Run
from .search import ALL_ROWS, MOST_VALUES, Search

_SHIFT = 0.3  # standard deviations that a hyperparameter's own move f by, from which f follows it
_NARROWER = 0.2  # of a hyperparameter's precision, from which data's precision follows it
_FACTOR = 0.05  # a standard deviation of log factors, from which they are followed
_MODULES = SparseGP, OptimalGP, ExactGP, ExpectationGP  # that may be a part of a field
_MOST_OF_OUTPUTS = 5_000_000  # squared values at inducing points, of outputs that meet, times a datum's predictors
_DRAWN = 75  # predictors that take as long as a density without them
_DRAWS = 3  # of the prior, beside the first call's own values


def start(guide: KnownGuide, run: Run, args: tuple, kwargs: dict[str, Any]) -> None:
    """After a first run make the posterior of latents that are no GP sites, at the mode of what is known of them."""
    facts = guide.facts
    local = {name: run.sites[name]["infer"]["prior"] for name in facts.local_latents}
    # Effects of single rows join the field; latents of which inputs or scales are made do not.
    few = not holds_part(run.trace) and max(guide.core.sizes.values(), default=0) <= ALL_ROWS
    effects = [name for name, prior in local.items() if few and type(bare(prior)) is dist.Normal]
    guide.join(row_effects=tuple(effects))
    why = _start(guide, run, args, kwargs)
    guide.join(row_effects=tuple(name for name in effects if name in guide.joint.field))
    if not_one := [list(group) for group in guide.together_by_name if not {*group} <= guide.joint.field.keys()]:
        raise ValueError(
            f"GP sites {not_one[0]} can't have one posterior here. One posterior needs GP sites that enter no "
            "other, up to 2,000 coefficients, and likelihoods whose parameters are affine in f under a link, such "
            "as Normal(f + g[index], s) or Poisson((f + g).exp()). Give each site a family of its own."
        )
    if not why:
        return
    # Sites that are read off quadratic likelihoods give f its exact posterior given each draw of the latents.
    follows = guide.kind.is_of_rows and all(gp.is_quadratic for gp in facts.gps.values())
    apart = _apart(guide, run, args, kwargs)
    beside = f" and GP sites {', '.join(map(repr, facts.gps))}", ":"
    gps, of_each = ("", " of each other: where data correlate them,") if follows else beside
    if sum(run.values[name].numel() for name in apart) > follows:  # f may follow one number alone
        warnings.warn(
            f"latents {', '.join(map(repr, apart))}{gps} enter the same densities, and the guide treats them as "
            f"independent{of_each} their intervals are too narrow. Reason: {why}",
            stacklevel=6,
        )


def _apart(guide: KnownGuide, run: Run, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """The normal latents of all rows that move densities which GP sites move, too, and are not joint with these."""
    facts = guide.facts
    others = without(facts.latents, [*guide.joint.field, *guide.joint.hyper, *facts.local_latents])
    names = [n for n in others if is_normal_prior(run.sites[n]["infer"]["prior"])]
    values = {n: run.values[n].detach() for n in filter(guide.may_join, names)}
    with torch.enable_grad(), pyro.validation_enabled(False):
        moved = {name: value.requires_grad_() for name, value in values.items()}
        sites = held_runs(guide.model, run.trace, args, kwargs)(moved).nodes
        below: list[Any] = [sites[name] for name in facts.downstream if name in sites]
        densities = [site["fn"].log_prob(site["value"]) for site in below]
    return [name for name, value in moved.items() if any(depends(density, value) for density in densities)]


def _start(guide: KnownGuide, run: Run, args: tuple, kwargs: dict[str, Any]) -> Optional[str]:
    """As :func:`start`; what keeps latents apart, and what to do, if anything does and it was not told."""
    facts = guide.facts
    asked = (guide.able_to_couple or facts.meeting or facts.has_outputs_that_meet) and guide.independent is not True
    if not (asked or guide.together_by_name):
        return ""
    # Latent inputs of several outputs, as in a GPLVM, keep independent posteriors: they are many.
    if any(facts.gps[name].outputs and process.x.requires_grad for name, process in run.processes.items()):
        return ""
    if why := obstacle(guide):
        return why
    joint = guide.joint
    with torch.enable_grad(), whole_plates(), late_bar("finding the posterior mode") as bar:
        for as_they_are in (False, True):  # densities, where their predictors lead to no mode
            with attempt() as sought:
                return _find(Search(guide, run, (args, kwargs), [], bar.update, as_they_are=as_they_are))
            guide.core.joint = joint
    names = [*without(facts.latents, joint.row_effects)] or sorted({name for pair in facts.meeting for name in pair})
    why = str(sought.error).splitlines()[0].rstrip(".")
    if names:
        warnings.warn(
            f"the mode of {', '.join(map(repr, names))} was not found ({why}). Latents start where init_loc_fn says. "
            "The guide treats them, and GP sites that meet in densities, as independent, so intervals may be too "
            "narrow. Remove the cause, or give init_loc_fn a start nearer to the mode.",
            stacklevel=7,
        )
    return ""


def obstacle(guide: KnownGuide) -> str:
    """Why a guide's latents and GP sites are not one posterior, and what to do; "" if nothing is in the way."""
    if torch.distributed.is_initialized():  # processes have other rows each, at which they would find other modes
        return "several processes train. Make the guide's first step in one, and load its state."
    facts, modules = guide.facts, guide.modules_by_site()
    apart, local = without(facts.latents, guide.able_to_couple), facts.local_latents
    others = {n: m for n, m in modules.items() if type(m) not in _MODULES or m.family.get("num_columns")}
    sizes = {n: sum(m.basis.sizes) * m.batch_shape.numel() for n, m in modules.items() if n not in others}
    why = [f"values of GP site {name!r} enter another one. Compare with NUTS." for name in facts.inner]
    why += [f"latent {n!r} has a value for each row. Integrate it out in the likelihood." for n in apart if n in local]
    own = "a posterior of its own. Leave that to the guide."
    why += [f"get_posterior gives latent {n!r} {own}" for n in apart if n not in local]
    why += [f"GP site {n!r} has the family {m.family['name']}. Take SVGP(64)." for n, m in others.items()]
    much = f"coefficients. Take up to {LARGEST}, by fewer inducing points."
    why += [f"GP site {n!r} has {num} {much}" for n, num in sizes.items() if num > LARGEST]
    return next(iter(why), "")


def _find(search: Search) -> Optional[str]:
    """Take θ to the mode, and start q there; what keeps latents apart, if anything does."""
    nested, theta = search.nested(), search.hyper.of(search.held)
    if nested is None:
        return search.why
    if search.guide.search and search.hyper.size:
        # From some rows first, where an evaluation is cheap: from there it is not far to the mode of all.
        best = nested.mode(map(nested.tried, [theta, *search.hyper.draws(_DRAWS)]))
        best = nested.across(nested.beyond(best))
        some, nested = nested, search.at_rows(nested, search.most[1])
        best = best if nested is some else nested.mode([nested.tried(best.theta)])
    else:
        nested = search.at_rows(nested, search.most[1])
        best = nested.at(theta)
    if not best.value.isfinite():
        raise Unsupported("no start has a finite density")
    return _Mode(search, nested, best).start()


class _Mode:
    """A program at the mode of F, where q starts."""

    def __init__(self, search: Search, nested: Nested, best: Optimum) -> None:
        self.search, self.nested, self.best, self.layout = search, nested, best, nested.layout
        self.guide, self.facts = search.guide, search.guide.facts
        self.covariance = nested.covariance(best)
        self.theta = best.theta.clone().requires_grad_()  # which shows whether inputs move with θ
        self.found, self.handler = nested.predictors(self.theta)
        # Where the scale of a latent's prior is 0 its density is infinite: test_slopes_of_groups_whose_scale_may_be_0.
        there = self.handler.priors
        if any((there[name].stddev < 0.01 * search.priors[name].stddev).any() for name in search.given):
            raise Unsupported("a density is infinite")

    def start(self) -> Optional[str]:
        """Start q there; what keeps GP sites and latents apart, if anything does, and "" if nobody is to be told."""
        guide, facts, hyper, layout = self.guide, self.facts, self.search.hyper, self.layout
        free = set(filter(guide.may_join, facts.latents))
        joint = [name for name in hyper.rows if name in free]
        guide.join(hyper=tuple(joint))
        field = [name for name in layout.field if name in {*facts.gps, *free}]
        self._make_field(field)
        followed = [] if guide.joint.followed else joint  # by the field
        self.weights = self._weights(index_of(hyper.rows, followed, self.theta))
        intercepts = self._intercepts(followed)
        why = next((why for applies, why in self._obstacles(field, intercepts) if applies), None)
        if why is None:
            if lost := [name for name in self.own if name not in guide.joint.followed]:
                warnings.warn(
                    f"the posterior of {', '.join(map(repr, field))} is one Gaussian with a full covariance, instead "
                    f"of the family given for {', '.join(map(repr, lost))}. A family is kept only for a single GP "
                    "site of one function, beside latents of fewer than 100 values in which predictors are affine. "
                    "Give independent=True to keep families here.",
                    stacklevel=7,
                )
            self._start_field(field, intercepts)
        else:
            if {*guide.joint.factors} & {*self.own}:  # such a q(w) follows kernels alone
                warnings.warn(
                    f"the program multiplies values of GP site {self.own[0]!r} by a hyperparameter, which its family "
                    "does not follow: intervals of both are too narrow. Write it into the kernel, s**2 * kernel, or "
                    "take SVGP(64).",
                    stacklevel=7,
                )
            self._start_apart()
        self._set_others([*joint, *guide.joint.field])
        if joint:
            index = index_of(hyper.rows, joint, self.theta)
            couple(guide, self.best.theta[index], torch.linalg.cholesky(self.covariance[index][:, index]))
        return why

    def _start_apart(self) -> None:
        """Have no field, and put each q(w) that starts at data to the mode."""
        guide = self.guide
        del guide.field
        guide.join(field={}, factors={}, eliminated="", followed=())
        for name, module in guide.begun_at_data.items():
            if type(q := module.coefficients) is NaturalGaussian:
                self._put(q, q.anchor_of(self.handler.bases[name]), [name])

    def _set_others(self, joint: Collection[str]) -> None:
        """Start independent posteriors at the mode, with the variances given all other latents."""
        hyper, best, normal = self.search.hyper, self.best, self.search.normal
        others = without(self.facts.latents, joint)
        if not others:  # a run of the program less: test_a_first_step_from_the_mode_has_met_the_data
            return
        _, there = self.nested.run(best.theta, self.layout.extend(best.x))
        loc = hyper.parts(best.theta) | {name: there.values[name] for name in normal}
        alone = hyper.parts(1 / torch.linalg.inv(self.covariance).diagonal())
        given = 1 / best.precision.diagonal  # 1/Pᵢᵢ, in units of the field
        alone |= {n: there.priors[n].variance.reshape(-1).to(given) * given[self.layout.rows[n]] for n in normal}
        for name, latent in others.items():
            both, shape = (loc[name], alone[name].sqrt()), latent.shape
            mean, scale = (part.detach().reshape(shape).clone() for part in both)  # type: ignore[arg-type]
            self.guide.set_latent(name, mean, latent.event_dim, scale.to(mean))

    def _make_field(self, field: list[str]) -> None:
        """Make q(x | θ), of the prior."""
        guide, facts, inputs = self.guide, self.facts, self.search.inputs
        sizes = {name: self.layout.field[name] for name in field}
        guide.join(field=sizes, eliminated=self.layout.eliminated, factors=self._factors())
        asked = {*chain(*guide.together_by_name)}  # to have one posterior
        gps = {name: guide.module_of(name) for name in field if name in facts.gps}
        free = {n: m.coefficients for n, m in without(gps, asked).items() if isinstance(m, SparseGP)}
        # whose families have another posterior than a full Gaussian by natural steps
        self.own = [name for name, q in free.items() if not (isinstance(q, NaturalGaussian) and is_full(q))]
        # It is kept by one GP site of one function, which latents alone follow.
        others = self.layout.eliminated, self.nested.drawn, *(facts.gps[name].outputs for name in gps)
        guide.join(followed=tuple(self.own) if len(gps) == 1 < len(field) and not any(others) else ())
        make_field(guide, sizes)
        for name in without(gps, guide.joint.followed):  # their inputs at which q(x) is about their values
            rows = some_of(inputs[name].detach(), sum(sizes[name]))
            guide.field.register_buffer(f"rows_{field.index(name)}", rows)

    def _start_field(self, field: list[str], intercepts: Mapping[str, Tensor]) -> None:
        """Put q(x | θ) to the mode."""
        guide, facts, handler = self.guide, self.facts, self.handler
        links = {name: dict(links) for name, links in self.nested.links.items()}
        guide.join(links=links, drawn=tuple(self.nested.drawn))
        for name, module in guide.modules_by_site().items():
            if isinstance(module, ExactGP):  # whose values at all rows are coefficients of a basis
                module.basis = InducingPoints([self.search.inputs[name]], trainable=False)
        drop_latents(guide, [name for name in field if name not in facts.gps])
        parts = self.search.hyper.parts(self.weights).items()
        guide.join(weights={name: part.reshape(-1).tolist() for name, part in parts if part.any()})
        anchor = anchor_of(guide, handler.bases, handler.priors, self.found.sites)
        if intercepts:
            moves = torch.cat(list(intercepts.values()), -1)[index_of(self.layout.rows, field, self.theta)]
            # what they add to the values that q(x) is about, (K, V)
            guide.field.register_buffer("slopes", anchor.detached.values(moves))
            guide.join(intercepts=tuple(intercepts))
            anchor = anchor_of(guide, handler.bases, handler.priors, self.found.sites)
        if guide.joint.followed:
            guide.field.coefficients.begin(anchor, *self._given_others(field))
            return
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

    def _given_others(self, members: list[str]) -> tuple[Tensor, Tensor]:
        """P and x̂ of some members, all others held."""
        index = index_of(self.layout.rows, members, self.theta)
        return self.best.precision.parts[0][index][:, index], self.best.x[index]

    @torch.no_grad()
    def _put(self, coefficients: NaturalGaussian, anchor: Anchor, members: list[str]) -> None:
        """Put q of some members to their mode, all others held."""
        if self.layout.eliminated:
            precision = self.best.precision
            coefficients.put_sums(anchor, precision.plus(-1.0), precision @ self.best.x)  # type: ignore[arg-type]
            return
        # exp(−½ xᵀPx + xᵀPx̂) over the prior's exp(−½|x|²)
        given, x = self._given_others(members)
        # blocks of independent outputs
        shape = coefficients.batch_shape
        blocks = given.unflatten(0, (shape.numel(), -1)).unflatten(2, (shape.numel(), -1)).diagonal(dim1=0, dim2=2)
        given, x = blocks.movedim(-1, 0).reshape(*shape, *blocks.shape[:2]), x.view(*shape, -1)
        coefficients.put_sums(anchor, given - eye_like(given), (given @ x[..., None])[..., 0])

    def _weights(self, index: Tensor) -> Tensor:
        """By hyperparameters b: data's precision moves as exp(bᵀθ), where that says much of their widths."""
        by, best = self.nested.weights(self.best, self.theta, self.found), self.best
        # A P that stays takes ½b² tr(P⁻¹G)² from log|P|'s curvature by θ: test_training_keeps_the_width_of_noise.
        informed = len(best.x) - best.precision.variances.sum()
        narrows = 0.5 * by.square() * informed * self.covariance.diagonal() > _NARROWER
        return torch.zeros_like(by).index_copy(0, index, (by * narrows)[index])

    def _obstacles(self, field: list[str], intercepts: Collection[str]) -> list[tuple[Any, str]]:
        """What may keep GP sites and latents apart, whether it does, and what to say of it if latents are."""
        search, facts, modules = self.search, self.facts, self.guide.modules_by_site().values()
        classes = f"outputs that meet in a density have too many values, {len(self.best.x)}. Take fewer points."
        many = f"one posterior under Exact() takes up to {MOST_VALUES} rows. Take SVGP(64)."
        moves = f"inputs of {', '.join(facts.gps)} move, or plates take a part of the rows. Take SVGP(64)."
        meet = len(field) > len(modules) or facts.meeting or self.guide.together_by_name or facts.has_outputs_that_meet
        # an intercept of another prior, which f follows by itself on sites
        drawn = self.nested.drawn and self.guide.joint.hyper
        moved = intercepts or self.guide.joint.factors or self.weights.any() or drawn
        follows = moved and all(type(module) is SparseGP for module in modules) and not self.own
        # Values at all rows are a basis if all are here, and stay where they are.
        parts = [search.is_part, *(as_process(self.handler.priors[name])[0].x.requires_grad for name in facts.gps)]  # type: ignore[union-attr]
        # Where they have no linear predictor a step takes as many points as twice the values.
        is_drawn = self.nested.drawn and not all(gp.is_quadratic for gp in facts.gps.values())
        work = (_DRAWN if is_drawn else len(self.found.eta)) * len(self.best.x) ** 2
        return [
            (facts.has_outputs_that_meet and work > _MOST_OF_OUTPUTS, classes),
            (any(isinstance(module, ExpectationGP) for module in modules), ""),
            (search.is_exact and search.rows < search.num, many),
            (search.is_exact and any(parts), moves),
            (not (meet or follows), ""),
        ]

    def _intercepts(self, names: Collection[str]) -> dict[str, Tensor]:
        """By hyperparameters, of these, that q(x | θ) is to follow beside what its sites are about, such as an
        intercept, the moves of x, ``(num, V)``, that do to ∇ℓ what their values do, or θ.
        """
        nested, best, ways = self.nested, self.best, dict[str, int]()
        if not names:
            return {}
        pull, here = self._followed(best, self.theta)
        # Squared moves of x̂, P⁻¹∂(Jᵀ∇ℓ), by a standard deviation of θ, in those of x.
        shifts = (self.covariance @ pull * best.precision.solve(pull.mT).mT).sum(-1)
        rows = {name: nested.hyper.rows[name] for name in names}
        for name in [name for name, own in rows.items() if shifts[own].sum() > _SHIFT**2]:
            # The moves of x here and one standard deviation away: the parameter of which they change less is followed.
            away = best.theta.clone()
            away[rows[name]] += self.covariance.diagonal().sqrt()[rows[name]]
            other, there = nested.tried(away.requires_grad_()), here
            if other is not nested.none:
                _, there = self._followed(other, away)
            by_value, by_theta = ((a - b).norm() / a.norm() for a, b in zip(here[name], there[name]))
            ways[name] = int(by_theta < by_value)
        self.guide.join(unconstrained=tuple(name for name, by_theta in ways.items() if by_theta))
        return {name: here[name][way].mT for name, way in ways.items()}

    def _followed(self, best: Optimum, theta: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """As :meth:`Nested.follow`, of the sites that the field has now."""
        found, handler = self.nested.predictors(theta)
        if self.layout.eliminated:  # of which no dense T is made, and J stays
            fixed = found.detached()
            fixed.eta = found.eta
            return self.nested.follow(best, theta, fixed, torch.zeros_like(best.x), self.weights)
        index = index_of(self.layout.rows, self.guide.joint.field, theta)
        turn = torch.eye(self.layout.num).to(theta)
        turn[index[:, None], index] = anchor_of(self.guide, handler.bases, handler.priors, found.sites).turn()
        # of sites that turn with T, whose sums are TᵀGT and Tᵀr, ∂m = P⁻¹(∂Tᵀx̂ − G ∂T x̂)
        turned = turn.mT @ best.x - best.precision.plus(-1.0) @ (turn @ best.x)
        return self.nested.follow(best, theta, found, turned, self.weights)
