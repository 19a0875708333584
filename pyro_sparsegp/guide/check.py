"""Whether q has converged: q(θ, x) beside the nested Laplace approximation of p(θ, x | y), at quasi-random θ.

With F(θ) ≈ log p(θ, y) and θ = a + Rε, ε ~ N(0, 1.3² I), wider than q(θ) = N(a, RRᵀ), weights of the draws give
moments: the posterior's by w ∝ exp(F(θ) + ½|ε/1.3|²), and q's by w ∝ exp(−½|ε|² + ½|ε/1.3|²). Where q(θ) is the best
normal,

    E_q[Rᵀ∇F] = 0  and  −E_q[Rᵀ∇F εᵀ] = I.

A regression of Rᵀ∇F on ε, weighted by q, has these for its constant and its slopes, so a Newton step from them, as far
as it raises the bound, says how far q's mean and width are from the best.
"""

import math
from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Optional

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from ..numerics.functions import jacobian
from ..program.asking import Unsupported, attempt
from ..program.data import map_tensors
from ..program.draws import Draw, all_draws, late_bar
from ..program.traces import bare, is_observation, repeatable, whole_plates
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
_FEW = 50  # of a latent's values whose covariance is asked for
_EXACT = 150  # rows at which GP sites' values have no basis
_ROUNDED = 0.3  # of an entry of P⁻¹ that rounding may move
_LONGER = "Train longer, at a learning rate that falls: fit(..., steps=2000) does not stop where the bound stands."
_ELSE = "call guide.integrate, or compare with NUTS."
_FULL = "SVGP", "SGPR", "Exact", "OrthogonalInducing", "CoupledCovariance"  # families of a full Gaussian


class Compared:
    """q beside the approximation, by weighted draws, and searches from several starts."""

    of_bound: Any = staticmethod(of_bound)
    num_draws = 48, 16, 128  # of the approximation: so many, and so many a hyperparameter, up to as many
    num_starts = 1  # of one search for another mode
    higher = 0.1  # nats between two modes, beyond which a higher one is told
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
        self.late = self.of_newton() if self.guide.core.points is None else {}  # a step does not move points
        return [*self.late.values(), *self.of_values(), *self.of_a_second_start(), *self.small.values()]

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
            own = {name: run.values[name].reshape(-1)[:_ROWS] for name in others}
            return {n: (value, 0 * value) for n, value in own.items()} | self._given(run) | self.of_gps(run)

        items = items_of_draws(guide, _OWN)
        every = all_draws(one, items, lambda draw: _FEATURES * sum(len(mean) for mean, _ in draw.values()))
        each: list[Moments] = [map_tensors(itemgetter(i), every) for i in range(_OWN)]
        points, ends = guide.core.points, self.loc + self.width * self.loc.new_tensor(ENDS)[:, None]
        if points is not None:
            ends = percentiles(points.theta, points.weight)
        return moments_of(each, self.loc.new_full((_OWN,), 1 / _OWN)) | self.hyper.intervals(ends)

    def _given(self, run: Any) -> Moments:
        """Means and variances given the hyperparameters, of a few normal latents whose prior mean is no other latent:
        a draw says less of them.
        """
        found = {}
        for name, prior in self.search.normal.items():
            if not isinstance(q := run.sites[name]["fn"], FieldLatent) or prior.shape().numel() > _FEW:
                continue
            fn = bare(q.prior)
            if type(fn) is dist.Normal and torch.equal(fn.loc, bare(prior).loc):
                wide = fn.scale.expand(prior.shape()).reshape(-1).square() * q.view.covariance_matrix.diagonal()
                found[name] = q.mean.detach().reshape(-1), wide.detach()
        return found

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
        for name, (mean, sd, *ends) in without(right, self.late).items():
            at, wide, *own_ends = own[name]
            if self.guide.core.points is not None:
                own_ends = ends  # more points know tails better than some hundred draws
            noise = 10 * torch.finfo(mean.dtype).eps * mean.abs()
            moves = (sd > noise) | (wide > noise)  # as the first entry of an LKJCholesky matrix does not
            if name in self.apart:
                wide, own_ends = sd, []
            away, *tails = (beside(((q - p) / sd)[moves], sd)[0] for q, p in ((at, mean), *zip(own_ends, ends)))
            if words := said(away, beside(sd, (wide / sd)[moves])[1], tails):
                lines.append(f"{name!r}: {words}, {self._cause(name, self.late)}")
        return lines

    def _cause(self, name: str, late: Collection[str]) -> str:
        """Why a posterior is off, and what to do: the first cause that there is."""
        facts, search, guide = self.guide.facts, self.search, self.guide
        normal = [*search.normal, *facts.gps]
        met = [n for n in normal if n not in {*guide.joint.hyper, *guide.joint.field}]
        apart = met if name in met and len(met) > 1 else [*search.priors, *facts.gps]
        are_apart = len(apart) > 1 and (not (self.nested.links or guide.joint.field) or (met and len(normal) > 1))
        families = {site: module.family["name"] for site, module in guide.modules_by_site().items()}
        narrow = [site for site, family in families.items() if family not in _FULL]
        is_normal = self._is_gaussian()  # each posterior is
        is_exact = is_normal and guide.kind.is_of_rows  # and found in one step
        is_integrated = guide.core.points is not None
        alone = [n for n in without(search.priors, self.apart) if guide.is_independent(n)]
        its = alone if name in facts.gps and guide.independent is not True else [name]
        beside_points = self.apart and name in {*facts.gps, *guide.joint.field, *self.apart}
        beside_alone = alone and name in {*facts.gps, *alone}
        of_small, of_apart, of_late = (", ".join(map(repr, names)) for names in (self.small, apart, late))
        causes = [
            (of_argument("point_estimates", guide.point_estimates, self.apart, "known"), beside_points),
            (of_argument("independent", guide.independent, its, "independent"), beside_alone),
            (f"the basis of {of_small} is too small. Give its family more inducing points.", self.small),
            (f"the guide treats {of_apart}, which meet in densities, as independent. Compare with NUTS.", are_apart),
            (f"training may not have brought {of_late} to the optimum. {_LONGER} If this line stays, {_ELSE}", late),
            (f"{families.get(name)} restricts the covariance of f. Take SVGP(64).", name in narrow),
            ("the noise is not far above the jitter. Take GaussianProcess(..., jitter=1e-12) in float64.", is_exact),
            (f"training has not brought {name!r} to the optimum. {_LONGER}", is_normal),
            ("weighted points miss a part of it. Give integrate more, or compare with NUTS.", is_integrated),
            (f"the posterior is far from normal: {_ELSE}", True),
        ]
        return "because " + next(cause for cause, applies in causes if applies)

    def _is_gaussian(self) -> bool:
        """Whether data are normal around linear predictors, and there are no hyperparameters."""
        data = {name for name, site in self.search.sites.items() if is_observation(site)}
        kinds = all(type(bare(self.search.sites[name]["fn"])) is dist.Normal for name in data)
        return kinds and not self.hyper.size and self.nested.links == {name: {"loc": "identity"} for name in data}

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
        """Of hyperparameters whose mean or width the bound would still move."""
        # Rᵀ∇F ≈ g − Hε: its best step is H⁻¹g, its best width H^(−½)
        first, slopes = self._regressed([self.root.mT @ found.slope for found in self.found])
        values, axes = torch.linalg.eigh(-0.5 * (slopes + slopes.mT))
        values, draws = values.clamp(min=_WIDEST**-2), self.noise[: 2 * len(first) + 8] / WIDER
        whole = axes @ (axes.mT @ first / values)
        whole = whole * (self.noise.norm(dim=-1).max() / whole.norm()).clamp(max=1.0)  # what Q is a model of

        def left(at: Tensor) -> Tensor:  # F − Q
            density = torch.stack([self.nested.tried(self.loc + self.root @ eps).value for eps in at])
            return density - at @ first + 0.5 * (at @ axes).square() @ values

        # A part of Newton's step counts if it gains half of what Q, the quadratic model of F, promises: where one draw
        # has a slope out of proportion none does (test_a_step_that_gains_nothing_is_not_told).
        for part in _PARTS:
            moved, widths = part * whole, axes * values ** (-0.5 * part)
            off = [found for found in self._beside_q(moved, widths) if found[-1] and found[0] not in self.apart]
            gain = moved @ first - 0.5 * (moved @ axes).square() @ values
            # T = AΛ^(−p/2): the entropy gains −½p log Λ, the trace ½(Λ − Λ^(1−p))
            gain = gain + 0.5 * (values - values ** (1 - part) - part * values.log()).sum()
            if not off or (left(moved + draws @ widths.mT) - left(draws)).mean() > -0.5 * gain:
                told = {name: said(away, 1 / ratio) for name, away, ratio, _ in off}
                return {name: f"{name!r}: {words}, {self._cause(name, [name])}" for name, words in told.items()}
        return {}

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
        self.call, self.late, self.small = call, {}, {}
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
