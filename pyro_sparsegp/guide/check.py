"""Whether q has converged: q(θ, x) beside the nested Laplace approximation of p(θ, x | y), at quasi-random θ.

With F(θ) ≈ log p(θ, y) and θ = a + Rε, ε ~ N(0, 1.3² I), wider than q(θ) = N(a, RRᵀ), weights of the draws give
moments: the posterior's by w ∝ exp(F(θ) + ½|ε/1.3|²), and q's by w ∝ exp(−½|ε|² + ½|ε/1.3|²). Where q(θ) is the best
normal,

    E_q[Rᵀ∇F] = 0  and  −E_q[Rᵀ∇F εᵀ] = I.

A regression of Rᵀ∇F on ε, weighted by q, has these for its constant and its slopes, so a Newton step from them, as far
as it raises F, says how far q's mean and width are from the best, and that training is not over if it raises the bound.
"""

import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Optional

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.free import SparseGP
from ..approximations.on_sites import ExactGP, ExactWeightSpaceGP, ExpectationGP, OptimalGP
from ..gaussians.natural import is_full
from ..gaussians.steps import Natural
from ..numerics.functions import jacobian
from ..program.asking import Unsupported, attempt
from ..program.data import map_tensors
from ..program.draws import Draw, all_draws, late_bar
from ..program.handlers import Held
from ..program.traces import bare, repeatable, whole_plates
from .adaptive import WIDER, drawn, weighted
from .bounds import of_bound
from .draws import items_of_draws, of_draw
from .field import AtValues, index_of, slices
from .first_call import explain_nan
from .known import without
from .latents import FieldLatent
from .moments import ENDS, Moments, Widths, beside, moments_of, of_argument, percentiles, said
from .nested import Nested, Optimum, by_values
from .points import worth
from .runs import Posteriors, Priors, Run
from .search import ALL_ROWS, Search
from .start import obstacle

_OWN = 100  # draws of q
_STARTS = 6  # of searches for other modes
_WIDEST = 5.0  # times its own width that q's best may be
_PARTS = 1.0, 0.5, 0.25, 0.125  # of a step that are tried
_LOST = 1.0  # nats that a basis leaves out and is told of
_LEAST = 8.0  # draws that weights must be worth
_ROWS = 200  # of f that are compared
_FEATURES = 128  # a value, in a run
_APART = 3.0  # standard deviations between two modes
_EXACT = 150  # rows at which GP sites' values have no basis
_ROUNDED = 0.3  # of an entry of P⁻¹ that rounding may move
_LONGER = "Train longer, at a learning rate that falls: fit(..., steps=2000) does not stop where the bound stands."
_FULL = OptimalGP, ExactGP, ExactWeightSpaceGP, ExpectationGP  # of the best Gaussian given sites


class Compared:
    """q beside the approximation, by weighted draws, and searches from several starts."""

    of_bound: Any = staticmethod(of_bound)
    num_draws = 48, 16, 128  # of the approximation: so many, and so many a hyperparameter, up to as many
    num_starts = 1  # of one search for another mode
    higher = 0.1  # nats between two modes, beyond which a higher one is told
    is_late = False  # whether training would still move hyperparameters
    beyond = 0.77  # of the variance about a mode that another adds, 1.33² − 1, beyond which a lower one is told

    def __init__(self, guide: Any, search: Search, exact: Optional[Callable[[], Optional[Nested]]] = None) -> None:
        self.guide, self.search = guide, search
        self.nested = self._nested(exact is not None)
        self.hyper, like = self.nested.hyper, guide.like.new_zeros(0)
        self.apart = [name for name in self.search.priors if guide.is_point(name)]
        with torch.no_grad():  # a and R of q(θ)
            params = [guide._get_params(name, prior) for name, prior in self.hyper.priors.items()]
            self.loc, scale = (torch.cat([like, *(each[i].reshape(-1) for each in params)]) for i in range(2))
            self.root, places = scale.diag(), index_of(self.hyper.rows, guide.joint.hyper, scale)
            if guide.joint.hyper:
                self.root[places[:, None], places] = guide.together.tril
        # Of more rows than are taken the gradient of F is that of all at the mean of q(θ), by tilt, and its curvature
        # that of some, which count for more; x̂ moves by shift.
        self.shift = guide.like.new_zeros(())
        self.nested.weight = search.num / search.rows
        if search.rows < search.num:
            few, every = self.nested.at(self.loc), search.at_rows(self.nested, search.num).at(self.loc)
            self.nested.tilt, self.shift = every.slope - few.slope, every.x - few.x
        self.best = self.nested.at(self.loc)
        self.left = self.best.left  # in nats, what bases leave out
        if exact is not None and search.num <= _EXACT and any(self.left.values()):  # of all values nothing is
            there = exact()
            if there is not None and there.hyper.rows == self.hyper.rows:
                self.nested, self.best = there, there.at(self.loc)
        self.width = self.root.norm(dim=-1)  # of q(θ)
        points = index_of(self.hyper.rows, [name for name in self.apart if name in self.hyper.rows], scale)
        if len(points):  # q has no width
            self.root[points] = self.root[:, points] = 0.0
            width = self.nested.covariance(self.best)[points][:, points]
            self.root[points[:, None], points] = torch.linalg.cholesky(width)

    def _nested(self, in_any_way: bool) -> Nested:
        """F of a program, by linear predictors or of values in any way."""
        search, guide = self.search, self.guide
        nested = None if obstacle(guide) else search.nested()
        if nested is not None and self._is_linear(nested):
            return search.at_rows(nested, ALL_ROWS)
        if guide.facts.inner or not in_any_way:
            raise Unsupported("a likelihood has no linear predictors")
        return by_values(guide, search.sites, search.normal, search.hyper, search.run)

    def _is_linear(self, nested: Nested) -> bool:
        """Whether densities follow from the linear predictors where all members are moved at once."""
        x = torch.randn(nested.layout.extended).to(self.guide.like)
        theta = nested.hyper.of(self.search.held)
        found, there = nested.predictors(theta)[0].detached(), nested.run(theta, x)[0]
        return all(found.tells(name, there, found.moved(x)) for name in found.links)

    def of_rounding(self) -> list[str]:
        """Whether rounding is the cause of all that is wrong."""
        if float(self.best.precision.diagonal.max()) * torch.finfo(self.loc.dtype).eps <= _ROUNDED:
            return []
        names = ", ".join(map(repr, self.guide.facts.gps))
        return [f"{names}: {self.loc.dtype} is too coarse for data this precise. Give a new guide data in float64."]

    def lines(self, call: Any) -> list[str]:
        """All that is told."""
        self.call, (num, each, most) = call, self.num_draws
        self.found, self.noise = drawn(self.nested, (self.loc, self.root), min(num + each * self.hyper.size, most))
        if len(self.found) <= self.hyper.size:
            return ["the density is not finite at draws of the latents. Train longer, or give init_loc_fn a start."]
        self.small = self.of_inducing_points()
        self.moved = self.of_newton() if self.guide.core.points is None else {}  # a step does not move points
        moved = [self._line(name, words) for name, words in self.moved.items()]
        return [*moved, *self.of_values(), *self.of_a_second_start(), *self.small.values()]

    def moments(self, at: Optimum) -> Moments:
        """Means and variances of what is normal a priori at a θ."""
        (x, precision), layout = self.nested.of_means(at), self.nested.layout
        every = layout.extend(x + self.shift).requires_grad_()
        _, handler = self.nested.run(at.theta, every)
        values = {name: handler.values[name].reshape(-1)[:_ROWS] for name in layout.field}
        # Members are affine in x, residuals at its end; a prior's mean may be another member.
        slopes = jacobian(torch.cat(list(values.values())), every).mT.detach()
        by_x, left = slopes[:, : layout.num], slopes[:, layout.num :].square().sum(-1)
        variance = precision.white(by_x).square().sum(0) + left
        rows = slices({name: len(value) for name, value in values.items()})
        return {name: (values[name].detach(), variance[own]) for name, own in rows.items()}

    def of_gps(self, run: Posteriors) -> Moments:
        """Means and variances of GP sites in a run, at the rows that are compared."""
        found, search = Moments(), self.search
        for name, q in run.posteriors.items():
            rows = search.chosen if q.mean.shape[-1] == search.num else slice(None)
            found[name] = q.mean[..., rows].reshape(-1)[:_ROWS], q.variance[..., rows].reshape(-1)[:_ROWS]
        return found

    def _of_q(self) -> Widths:
        """As :func:`moments_of`, q's, by draws."""
        guide, others = self.guide, without(self.search.priors, self.hyper.rows)

        @torch.no_grad()
        def one(item: Draw) -> Draw:
            with of_draw(item):
                run = guide.run_at(*self.call, draws_data=False, joint_up_to=0, marginal=True)
            values = {n: run.values[n].reshape(-1)[:_ROWS] for n in others}
            fns = {n: fn for n in others if isinstance(fn := run.sites[n]["fn"], FieldLatent)}
            # A draw says less than q's mean given θ, which is not known where the prior's mean is another latent.
            known = [n for n, fn in fns.items() if torch.equal(bare(fn.prior).loc, bare(others[n]).loc)]
            means = values | {n: fns[n].mean.reshape(-1)[:_ROWS] for n in known}
            return {n: (means[n], (values[n] - means[n]).square()) for n in others} | self.of_gps(run)

        items = items_of_draws(guide, _OWN)
        every = all_draws(one, items, lambda draw: _FEATURES * sum(len(mean) for mean, _ in draw.values()))
        each: list[Moments] = [map_tensors(itemgetter(i), every) for i in range(_OWN)]
        points, ends = guide.core.points, self.loc + self.width * self.loc.new_tensor(ENDS)[:, None]
        if points is not None:
            ends = percentiles(points.theta, points.weight)
        return moments_of(each, self.loc.new_full((_OWN,), 1 / _OWN)) | self.hyper.intervals(ends)

    def of_values(self) -> list[str]:
        """Lines for latents and GP sites whose means or widths differ from weighted draws'."""
        least = min(_LEAST, len(self.found))
        found, ratio = weighted(self.nested, (self.loc, self.root), self.found, len(self.found) // 3 + 1, least)
        if (num := worth(weights := ratio.softmax(0))) < least:
            names = ", ".join(map(repr, self.hyper.rows))
            return [f"check cannot judge {names}: its weighted draws are worth {num:.1f}. Compare with NUTS."]
        right = moments_of([self.moments(each) for each in found], weights)
        right |= self.hyper.intervals(percentiles(torch.stack([each.theta for each in found]), weights))
        return self.differing(right, self._of_q())

    def differing(self, right: Widths, own: Widths) -> list[str]:
        """Lines for what has other means or widths in q, its ``own``."""
        lines = []
        for name, (mean, sd, *ends) in without(right, self.moved).items():
            at, wide, *own_ends = own[name]
            if self.guide.core.points is not None:
                own_ends = ends  # more points know tails better than some hundred draws
            noise = 10 * torch.finfo(mean.dtype).eps * mean.abs()
            moves = (sd > noise) | (wide > noise)  # as the first entry of an LKJCholesky matrix does not
            if name in self.apart:
                wide, own_ends = sd, []
            away, *tails = (beside(((q - p) / sd)[moves], sd)[0] for q, p in ((at, mean), *zip(own_ends, ends)))
            if words := said(away, beside(sd, (wide / sd)[moves])[1], tails):
                lines.append(self._line(name, words))
        return lines

    def _line(self, name: str, words: str) -> str:
        """How a posterior is off, why, and what to do: the first cause that there is."""
        facts, search, guide = self.guide.facts, self.search, self.guide
        apart = [n for n in (*search.normal, *facts.gps) if n not in {*guide.joint.hyper, *guide.joint.field}]
        separate = {*facts.gps} - {*guide.joint.field} | {*guide.joint.followed}  # a latent's q depends on them all
        modules = {n: guide.module_of(n) for n in facts.gps if n in separate and name in (n, *search.priors)}
        own = {site: module.coefficients for site, module in modules.items() if type(module) is SparseGP}
        narrow = [n for n, module in modules.items() if not (is_full(own[n]) if n in own else type(module) in _FULL)]
        still = [site for site, q in own.items() if self.hyper.size and not isinstance(q, Natural)]
        is_normal = not (self.hyper.size or self.nested.drawn) and all(gp.is_quadratic for gp in facts.gps.values())
        is_exact = is_normal and guide.kind.is_of_rows  # and found in one step
        alone = [n for n in without(search.priors, self.apart) if guide.is_independent(n)]
        its = alone if name in facts.gps and guide.independent is not True else [name]
        beside_points = self.apart and name in {*facts.gps, *guide.joint.field, *self.apart}
        beside_alone = alone and name in {*facts.gps, *alone}
        of_small, of_apart, of_moved, of_narrow, of_still, of_hyper = (
            ", ".join(map(repr, names)) for names in (self.small, apart, self.moved, narrow, still, self.hyper.rows)
        )
        # First what the guide was given, which training does not change; then what was measured, nats that bases leave
        # out and a step of the bound; then what q has no parameters for. What is left is that q is normal.
        causes = [
            (of_argument("point_estimates", guide.point_estimates, self.apart, "known"), beside_points),
            (of_argument("independent", guide.independent, its, "independent"), beside_alone),
            (f"the basis of {of_small} is too small. Give its family more inducing points.", self.small),
            (f"training has not brought {of_moved} to the optimum. {_LONGER}", self.is_late),
            (f"the guide treats {of_apart}, which meet in densities, as independent. Compare with NUTS.", apart[1:]),
            (f"the family of {of_narrow} restricts its covariance. Take SVGP(64).", narrow),
            (f"without natural steps {of_still} does not follow {of_hyper}. Take SVGP(64).", still),
            ("the noise is not far above the jitter. Take GaussianProcess(..., jitter=1e-12) in float64.", is_exact),
            (f"training has not brought {name!r} to the optimum. {_LONGER}", is_normal),
            ("weighted points miss a part of it. Give integrate more, or compare with NUTS.", guide.core.points),
            ("the posterior is far from normal: call guide.integrate, or compare with NUTS.", True),
        ]
        return f"{name!r}: {words}, because " + next(cause for cause, applies in causes if applies)

    def _regressed(self, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The constant and the slopes, by ε, of values at each draw."""
        # q's, over the density of the draws, ∝ exp(−½|ε/1.3|²)
        weights = torch.softmax((0.5 / WIDER**2 - 0.5) * self.noise.square().sum(-1), 0).sqrt()[:, None]
        rows = torch.cat([weights, weights * self.noise], 1)
        found = torch.linalg.lstsq(rows, weights * torch.stack(values)).solution
        return found[0], found[1:]

    def of_inducing_points(self) -> dict[str, str]:
        """What bases leave out of GP sites, in nats of the bound, and the hyperparameters that this moves."""
        lines = {}
        for name, nats in self.left.items():
            # Their means without what is left out are elsewhere by S times its slope.
            _, slopes = self._regressed([found.left[name][None] for found in self.found])
            moved = self._beside_q(slopes[:, 0], torch.eye(len(slopes)).to(slopes))
            num = sum(self.guide.modules_by_site()[name].basis.sizes)
            names = ", ".join(repr(other) for other, *_, is_off in moved if is_off)
            if nats > _LOST or names:
                lines[name] = (
                    f"{name!r}: {num} inducing points are too few. They cost about {nats:.1f} nats of the bound, and "
                    f"make the function too smooth{names and f'. They also bias {names}'}. Give the family more."
                )
        return lines

    def _beside_q(self, moved: Tensor, widths: Tensor) -> list[tuple[str, float, float, bool]]:
        """Of each hyperparameter how far N(a + Rm, RTTᵀRᵀ) is from q(θ), m and T being given."""
        sd = self.root.norm(dim=-1)
        step, wide = self.root @ moved / sd, (self.root @ widths).norm(dim=-1) / sd
        return [(name, *beside(step[rows], wide[rows])) for name, rows in self.hyper.rows.items()]

    def of_newton(self) -> dict[str, str]:
        """How far the bound would still move hyperparameters' means and widths, of the best q(x | θ)."""
        # Rᵀ∇F ≈ g − Hε: its best step is H⁻¹g, its best width H^(−½)
        first, slopes = self._regressed([self.root.mT @ found.slope for found in self.found])
        values, axes = torch.linalg.eigh(-0.5 * (slopes + slopes.mT))
        values, draws = values.clamp(min=_WIDEST**-2), self.noise[: 2 * len(first) + 8] / WIDER
        whole = axes @ (axes.mT @ first / values)
        whole = whole * (self.noise.norm(dim=-1).max() / whole.norm()).clamp(max=1.0)  # what Q is a model of

        def gains(of: Callable) -> bool:  # half of what Q promises, by what a bound is beside Q before and after
            at = torch.cat([draws, moved + draws @ widths.mT])
            left = torch.stack([of(eps) for eps in at]) - at @ first + 0.5 * (at @ axes).square() @ values
            return bool(left.unflatten(0, (2, -1)).diff(dim=0).mean() > -0.5 * gain)

        # A part of Newton's step counts if it gains half of what Q, the quadratic model of F, promises: where one draw
        # has a slope out of proportion none does (test_a_step_that_gains_nothing_is_not_told).
        for part in _PARTS:
            moved, widths = part * whole, axes * values ** (-0.5 * part)
            off = [found for found in self._beside_q(moved, widths) if found[-1] and found[0] not in self.apart]
            gain = moved @ first - 0.5 * (moved @ axes).square() @ values
            # T = AΛ^(−p/2): the entropy gains −½p log Λ, the trace ½(Λ − Λ^(1−p))
            gain = gain + 0.5 * (values - values ** (1 - part) - part * values.log()).sum()
            if not off or gains(lambda eps: self.nested.tried(self.loc + self.root @ eps).value):
                self.is_late = bool(off) and gains(self.bound)
                return {name: said(away, 1 / ratio) for name, away, ratio, _ in off}
        return {}

    def bound(self, eps: Tensor) -> Tensor:
        """The guide's own bound given θ = a + Rε, as F but for a constant."""
        guide, theta, (args, kwargs) = self.guide, self.loc + self.root @ eps, self.call
        scale = self.search.sites[next(iter(self.nested.layout.field))]["scale"]
        with attempt(), torch.no_grad(), repeatable(guide.like), Held(without(self.hyper.values(theta), self.apart)):
            loss = guide.objective(guide.core.num_nodes).differentiable_loss(guide.model, guide, *args, **kwargs)
            return -loss / scale - 0.5 * eps.square().sum()  # without log q(θ)
        return self.nested.none.value

    def of_a_second_start(self) -> list[str]:
        """Whether searches from draws of the prior end at another mode."""
        nested, draws, num = self.nested, self.hyper.draws(_STARTS), self.num_starts
        ends = [nested.mode(map(nested.tried, draws[i : i + num])) for i in range(0, len(draws), num)]
        # q may be on a plateau, where all is noise
        ends += [nested.across(self.best), nested.beyond(self.best)]
        ends = [end for end in ends if torch.linalg.solve(self.root, end.theta - self.loc).norm() > _APART]
        if not ends:
            return []
        here = nested.mode([self.best])
        # by F's widths, where q's are too narrow to tell modes apart
        width = torch.maximum(self.width, nested.covariance(here).diagonal().sqrt())
        ends = [end for end in ends if ((end.theta - here.theta) / width).norm() > _APART]
        told = [end for end in ends if end.value >= here.value + self.higher]
        told += [end for end in ends if _beyond(end, here, width).max() >= self.beyond]
        if not told:
            return []
        there = max(told, key=attrgetter("value"))
        higher = float(there.value - here.value)
        sites, _ = nested.run(there.theta, self.loc.new_zeros(nested.layout.extended))
        single = [name for name, rows in self.hyper.rows.items() if rows.stop - rows.start == 1]
        place = ", ".join(f"{name} = {float(sites[name]['value']):.3g}" for name in single)
        if higher >= self.higher:
            return [
                f"a second start found a mode that is {higher:.1f} nats higher, at {place}. Make a new guide with "
                "init_loc_fn=init_to_value(values={...}) of these."
            ]
        lower, beyond = max(-higher, 0.0), _beyond(there, here, width)
        names = ", ".join(repr(name) for name, rows in self.hyper.rows.items() if beyond[rows].max() > self.beyond)
        return [
            f"there is a second mode, {lower:.1f} nats lower, at {place}. Intervals of {names} leave it out. Compare "
            "with NUTS."
        ]


class Glance(Compared):
    """The check at the end of a fit: of GP sites at the medians of all else, and by one other search."""

    num_draws = 8, 2, 1000
    num_starts = 6
    higher = 3.0
    beyond = math.inf
    most = 12  # hyperparameters, beyond which draws and searches take longer than training may
    of_bound = staticmethod(lambda guide, args, kwargs: [])

    def lines(self, call: Any) -> list[str]:
        if self.hyper.size <= self.most:
            return super().lines(call)
        self.call, self.moved, self.small = call, {}, {}
        more = (
            f"fit compared GP sites alone: {self.hyper.size} hyperparameters are many. Call guide.check for the rest."
        )
        return [*self.of_values(), more]

    def of_values(self) -> list[str]:
        right, gps = moments_of([self.moments(self.best)], self.loc.new_ones(1)), self.guide.facts.gps
        # given the medians of latents a posterior that is read given these is narrower
        right = {n: right[n] for n in gps if not (self.search.normal and self.guide.kind.is_of_rows)}
        with torch.no_grad():
            found = self.of_gps(self.guide.run_at(*self.call, draws_data=False, at_medians=True))
        own: Widths = {name: (mean, variance.sqrt()) for name, (mean, variance) in found.items()}
        return self.differing(right, own)


def _beyond(there: Optimum, here: Optimum, width: Tensor) -> Tensor:
    """The variance of each θ between two modes, in those about one of them."""
    # p(1 − p)Δ² of modes with the shares p and 1 − p
    share = torch.sigmoid(there.value - here.value)
    return share * (1 - share) * ((there.theta - here.theta) / width).square()


def check(guide: Any, args: tuple, kwargs: dict[str, Any], kind: type[Compared] = Compared) -> list[str]:
    """A line for each latent and GP site whose posterior is wrong, with the cause and what to do."""
    with repeatable(guide.like), poutine.block(), whole_plates(), torch.enable_grad():
        run = Priors(guide, at_medians=True).perform(args, kwargs)
        if is_of_others(run, args, kwargs):
            return ["these are not the rows that the guide was trained on. Give check those, or no arguments."]
        if not all(site["value"].isfinite().all() for site in run.data.values()):
            return [f"check has no data: {explain_nan(guide, args, kwargs)}."]
        with late_bar("checking latents") as bar:
            bound = kind.of_bound(guide, args, kwargs)
            with attempt() as asked:
                search = partial(Search, guide, run, (args, kwargs), [], bar.update)
                first = search(AtValues) if obstacle(guide) else search()  # a family may have no basis
                compared = kind(guide, first, lambda: search(AtValues).nested())
                return compared.of_rounding() or bound + compared.lines((args, kwargs))
            names = ", ".join(map(repr, (*guide.facts.latents, *guide.facts.gps)))
            why = str(asked.error).splitlines()[0].rstrip(".")
            return [*bound, f"check cannot judge {names}: {why}. Compare with NUTS."]


def is_of_others(run: Run, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a run's data are not of the rows of training; more rows may be all, of mini-batches."""
    is_more = any(site["value"].numel() > run.guide.core.sizes[name] for name, site in run.data.items())
    return run.guide.relation(args, kwargs).others and not is_more
