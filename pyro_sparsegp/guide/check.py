"""Whether q has converged: q(θ, x) beside the nested Laplace approximation of p(θ, x | y), at quasi-random θ.

With F(θ) ≈ log p(θ, y) and θ = a + Rε, ε ~ N(0, 1.3² I), wider than q(θ) = N(a, RRᵀ), weights of the draws give moments
of the posterior, w ∝ exp(F(θ) + ½|ε/1.3|²), and those of q, w ∝ exp(−½|ε|² + ½|ε/1.3|²). Where q(θ) is the best normal,

    E_q[Rᵀ∇F] = 0  and  −E_q[Rᵀ∇F εᵀ] = I.

A regression of Rᵀ∇F on ε, weighted by q, has these for its constant and its slopes, so a Newton step from them, as far
as it raises the bound, says how far q's mean and width are from the best.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from tqdm.auto import tqdm

from ..program.asking import Unsupported, attempt
from ..program.traces import repeatable, whole_plates
from .conditions import conditions_now
from .field import anchor_of, index_of, slices
from .first_call import explain_nan
from .known import KnownGuide
from .nested import Optimum
from .runs import Posteriors, Priors, Rows
from .start import ALL_ROWS, PATIENCE, Search, is_open

_DRAWS = 128
_STARTS = 6  # of searches for other modes
_WIDER = 1.3
_WIDEST = 5.0  # times its own width that q's best may be
_PARTS = 1.0, 0.5, 0.25, 0.125  # of a step that are tried
_LOST = 1.0  # nats that a basis leaves out and is told of
_AWAY = 0.3  # standard deviations of a mean that are told
_WIDTHS = 0.75, 1.33  # ratios of standard deviations beyond which they are told
_LEAST = 8.0  # draws that weights must be worth
_ROWS = 200  # of f that are compared
_NATS = 3.0  # between two modes, within which a lower one is told, and beyond which a fit tells of a higher one
_APART = 3.0  # standard deviations between two modes
_Moments = dict[str, tuple[Tensor, ...]]  # by name means and variances, the approximation's and q's


def check(guide: KnownGuide, args: tuple, kwargs: dict[str, Any], whole: bool = True) -> list[str]:
    """A line for each latent that has not converged, with what to do.

    :param whole: whether weighted draws are asked too, and every other start; else Newton's step, and the best start.
    """
    facts, able = guide.facts, guide.facts.able_to_couple
    apart = ", ".join(repr(name) for name in able if name not in {*facts.coupled, *facts.field})
    held = apart and f"q takes {apart} to be independent of f: intervals may be too narrow. "
    names = ", ".join(map(repr, able))
    beyond = [f"latents {names} can't be checked here. {held}Look at diagnostics.psis(tree), or compare with NUTS."]
    if not is_open(guide):
        return beyond if able else []
    with repeatable(guide.like), poutine.block(), whole_plates(), torch.enable_grad():
        run = Priors(guide, at_medians=True).perform(args, kwargs)
        data = {name: site["value"] for name, site in run.data.items()}
        is_more = any(value.numel() > facts.rows[name] for name, value in data.items())
        if guide.relation(args, kwargs).others and not is_more:
            return ["these are other rows than the guide was trained on. Give check those, or no arguments."]
        if not all(value.isfinite().all() for value in data.values()):
            return [f"latents can't be checked here: {explain_nan(guide, args, kwargs)}."]
        bar = tqdm(desc="checking latents", unit=" evaluations", delay=PATIENCE, leave=False)
        points = list(filter(guide.is_point, able))
        with attempt() as asked:
            compared = Compared(guide, Search(guide, run, (args, kwargs), points, bar.update))
        if asked.error is not None:  # too many numbers, or a program that has no density there
            return beyond
        with bar:
            return compared.lines(args, kwargs, whole)


class Compared:
    """q beside the approximation."""

    def __init__(self, guide: KnownGuide, search: Search) -> None:
        some, like = search.nested(), guide.like.new_zeros(0)
        if some is None:
            raise Unsupported("a likelihood has no linear predictors")
        self.guide, self.search, self.nested = guide, search, search.at_rows(some, ALL_ROWS)
        self.hyper, coupled = self.nested.hyper, guide.facts.coupled
        with torch.no_grad():  # a and R of q(θ)
            params = [guide._get_params(name, prior) for name, prior in self.hyper.priors.items()]
            self.loc, scale = (torch.cat([like, *(each[i].reshape(-1) for each in params)]) for i in range(2))
            self.root, places = scale.diag(), index_of(self.hyper.rows, coupled, scale)
            if coupled:
                self.root[places[:, None], places] = guide.together.tril
        # Of more rows than are taken the gradient of F is that of all at the mean of q(θ), by tilt, and its curvature
        # that of some, which count for more; x̂ moves by shift.
        self.nested.weight, self.shift = search.num / search.rows, guide.like.new_zeros(())
        if search.rows < search.num:
            few, every = self.nested.at(self.loc), search.at_rows(some, search.num).at(self.loc)
            self.nested.tilt, self.shift = every.slope - few.slope, every.x - few.x
        self.best = self.nested.at(self.loc)

    def lines(self, args: tuple, kwargs: dict[str, Any], whole: bool) -> list[str]:
        """All that is told."""
        self.at_draws(_DRAWS if whole else 2 * self.hyper.size + 8, whole)
        if len(self.found) <= self.hyper.size:
            return ["the density is not finite at draws of the latents. Train longer, or give init_loc_fn a start."]
        late = self.of_newton()
        more = (self.of_draws(bool(late)) if whole else []) + self.of_a_second_start(whole)
        return late + more + self.of_functions(args, kwargs) + self.of_inducing_points()

    def at_draws(self, num: int, meets: bool) -> None:
        """At draws of θ, a + Rε, with a density: ε, F, and moments of all values, the approximation's and q's."""
        noise = self.loc.new_zeros(1, 0)
        if self.hyper.size:
            # ε = 1.3 Φ⁻¹(u), of a Sobol sequence u
            uniform = torch.quasirandom.SobolEngine(self.hyper.size, scramble=True, seed=0).draw(num)
            noise = _WIDER * torch.special.ndtri(uniform.double().clamp(1e-6, 1 - 1e-6)).to(self.loc)
        tried = [self.nested.tried(self.loc + self.root @ eps) for eps in noise]
        self.found = [found for found in tried if found is not self.nested.none]
        self.noise = noise[[found is not self.nested.none for found in tried]]
        self.seen = [self._moments(found, *self.nested.of_means(found)) for found in self.found if meets]

    def _moments(self, at: Optimum, x: Tensor, precision: Any, apart: Mapping[str, Any] = {}) -> _Moments:
        """Of all values at a θ means and variances, the approximation's and q's; ``apart`` are posteriors of GP sites
        that are no part of the field.
        """
        layout, guide = self.nested.layout, self.guide
        every = layout.extend(x + self.shift).requires_grad_()
        sites, handler = self.nested.run(at.theta, every)
        values = {name: handler.values[name].reshape(-1)[:_ROWS] for name in layout.field}
        # Members are affine in x, residuals at its end; a prior's mean may be another member.
        slopes = _rows_of_jacobian(torch.cat(list(values.values())), every)
        own = {name: sites[name]["value"].reshape(-1) for name in self.hyper.rows}
        found: _Moments = {name: (value, 0 * value) * 2 for name, value in own.items()}
        places = index_of(layout.rows, guide.facts.field, x)
        if guide.facts.field:
            q = guide.field(anchor_of(guide, handler.bases, handler.priors, sites)).q
            move = torch.cat(q.loc, -1) - every[places]
        for name, rows in slices({name: len(value) for name, value in values.items()}).items():
            mean, by_x, left = values[name], slopes[rows, : layout.num], slopes[rows, layout.num :].square().sum(-1)
            here = mean, precision.white(by_x).square().sum(0) + left
            if name in guide.facts.field:
                along = by_x[:, places]
                change = q.moments(list(along.split(q.sizes, -1)))[1]
                found[name] = (*here, mean + along @ move, along.square().sum(-1) + change + left)
            elif name in apart:
                some = self.search.chosen[:_ROWS]
                found[name] = (*here, apart[name].mean[some], apart[name].variance[some])
            elif name in self.search.normal and not guide.is_point(name):
                loc, scale = guide._get_params(name, self.search.priors[name])
                found[name] = (*here, loc.reshape(-1)[:_ROWS], scale.reshape(-1)[:_ROWS].square())
        return {name: tuple(part.detach() for part in parts) for name, parts in found.items()}

    def of_functions(self, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        """Of GP sites that are no part of a field, at medians of the hyperparameters."""
        guide = self.guide
        if not (apart := [name for name in guide.facts.gps if name not in guide.facts.field]):
            return []
        new = Rows(same=False, inputs=False, new=True)
        with torch.no_grad():
            run = Posteriors(guide, conditions_now(guide, median=True), new, at_medians=True).perform(args, kwargs)
        found = self._moments(self.best, self.best.x, self.best.precision, run.posteriors)
        alone = self.loc.new_ones(1)
        return self._beside_draws([{name: found[name] for name in apart}], (alone, alone), "the best", True)

    def of_draws(self, late: bool) -> list[str]:
        """Of latents and GP sites whose means or widths are not those of weighted draws; ``late`` says whether that of
        a hyperparameter is told of by now.
        """
        weights, num = self._weights(), len(self.found)
        worth = float(1 / weights[0].square().sum())
        if worth < min(_LEAST, num):
            names = ", ".join(map(repr, self.hyper.rows))
            return [
                f"{names}: {num} weighted draws have effective size {worth:.1f}, so q is far from the posterior. "
                + ("Train longer." if late else "Compare with NUTS.")
            ]
        best = f"that of {num} weighted draws (effective size {worth:.0f})"
        return self._beside_draws(self.seen, weights, best, late)

    def _beside_draws(self, seen: list[_Moments], weights: tuple[Tensor, ...], best: str, late: bool) -> list[str]:
        lines = []
        for name in seen[0]:
            mean, sd, own, its = moments_of([values[name] for values in seen], *weights)
            least = 10 * torch.finfo(mean.dtype).eps * mean.abs()
            moves = (sd > least) | (its > least)  # as the first entry of an LKJCholesky matrix does not
            away, ratio, is_off = _beside(((own - mean) / sd)[moves], (its / sd)[moves])
            if is_off:
                advice = self._advice(name, late)
                lines.append(f"{name!r}: mean {away:.1f} sd off, sd {ratio:.2f} times {best}. {advice}")
        return lines

    def _advice(self, name: str, late: bool) -> str:
        facts, search = self.guide.facts, self.search
        if name in search.priors.keys() - {*facts.coupled, *facts.field}:
            if not self.guide.is_independent(name):
                return f"Under this family {name!r} is independent of f: take SVGP or SGPR."
            return ("Train longer, or drop" if late else "Drop") + " independent=, or this name from it."
        apart = search.normal.keys() - facts.field.keys()
        given = [name for name in search.priors if self.guide.is_point(name) or name in apart]
        if given:
            return f"Its q is given {', '.join(map(repr, given))}: drop point_estimates= or independent=, or that name."
        return "Train longer." if late else "Weigh draws by diagnostics.psis, or take NUTS."

    def _weights(self) -> tuple[Tensor, ...]:
        """Those of the posterior, and of q: over the density of the draws, ∝ exp(−½|ε/1.3|²)."""
        square = 0.5 * self.noise.square().sum(-1)
        weights = torch.stack([torch.stack([found.value for found in self.found]), -square]) + square / _WIDER**2
        return torch.softmax(weights, -1).unbind()

    def _regressed(self, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The constant and the slopes, by ε, of values at each draw."""
        weights = self._weights()[1].sqrt()[:, None]
        rows = torch.cat([weights, weights * self.noise], 1)
        found = torch.linalg.lstsq(rows, weights * torch.stack(values)).solution
        return found[0], found[1:]

    def of_inducing_points(self) -> list[str]:
        """What bases leave out of GP sites, in nats of the bound, and the hyperparameters that this moves."""
        lines = []
        for name, nats in self.best.left.items():
            # Their means without what is left out are elsewhere by S times its slope.
            _, slopes = self._regressed([found.left[name][None] for found in self.found])
            moved = self._beside_q(slopes[:, 0], torch.eye(len(slopes)).to(slopes))
            names = ", ".join(repr(other) for other, *_, is_off in moved if is_off)
            if nats > _LOST or names:
                lines.append(
                    f"{name!r}: its basis of {self.nested.layout.numbers[name]} functions leaves out {nats:.1f} nats, "
                    f"which makes the learned function too smooth{names and f', and moves {names}'}. Give its family "
                    "more inducing points."
                )
        return lines

    def _beside_q(self, moved: Tensor, widths: Tensor) -> list[tuple[str, float, float, bool]]:
        """Of each hyperparameter how far N(a + Rm, RTTᵀRᵀ) is from q(θ), m and T being given."""
        sd = self.root.norm(dim=-1)
        step, wide = self.root @ moved / sd, (self.root @ widths).norm(dim=-1) / sd
        return [(name, *_beside(step[rows], wide[rows])) for name, rows in self.hyper.rows.items()]

    def of_newton(self) -> list[str]:
        """Of hyperparameters whose mean or width the bound would still move."""
        # Rᵀ∇F ≈ g − Hε: its best step is H⁻¹g, its best width H^(−½)
        first, slopes = self._regressed([self.root.mT @ found.slope for found in self.found])
        values, axes = torch.linalg.eigh(-0.5 * (slopes + slopes.mT))
        values, draws = values.clamp(min=_WIDEST**-2), self.noise[: 2 * len(first) + 8] / _WIDER
        whole = axes @ (axes.mT @ first / values)
        whole = whole * (self.noise.norm(dim=-1).max() / whole.norm()).clamp(max=1.0)  # what Q is a model of

        def left(at: Tensor) -> Tensor:  # F − Q
            density = torch.stack([self.nested.tried(self.loc + self.root @ eps).value for eps in at])
            return density - at @ first + 0.5 * (at @ axes).square() @ values

        # A part of Newton's step counts if it gains half of what Q, the quadratic model of F, promises: where one draw
        # has a slope out of proportion none does (test_a_step_that_gains_nothing_is_not_told).
        for part in _PARTS:
            moved, widths = part * whole, axes * values ** (-0.5 * part)
            off = [found for found in self._beside_q(moved, widths) if found[-1]]
            gain = moved @ first - 0.5 * (moved @ axes).square() @ values
            # T = AΛ^(−p/2): the entropy gains −½p log Λ, the trace ½(Λ − Λ^(1−p))
            gain = gain + 0.5 * (values - values ** (1 - part) - part * values.log()).sum()
            if not off or (left(moved + draws @ widths.mT) - left(draws)).mean() > -0.5 * gain:
                return [
                    f"{name!r} has not converged: the best mean is {away:.1f} sd away, and the best width {ratio:.2f} "
                    f"times its own. {self._advice(name, True)}"
                    for name, away, ratio, _ in off
                ]
        return []

    def of_a_second_start(self, whole: bool) -> list[str]:
        """Whether searches from each of some draws of the prior, or from the best, end at another mode."""
        nested, draws = self.nested, self.hyper.draws(_STARTS)
        if not self.hyper.size:
            return []
        starts = [[draw] for draw in draws] if whole else [draws]
        ends = [nested.mode(map(nested.tried, some)) for some in starts]
        if not nested.is_informed(self.best):  # q may be on a plateau, where all is noise
            ends.append(nested.beyond(self.best))
        if not self._far(ends, self.loc) or (here := nested.mode([nested.tried(self.loc)])) is nested.none:
            return []
        there = max(self._far(ends, here.theta), key=lambda end: float(end.value), default=here)
        higher = float(there.value - here.value)
        if there is here or higher < (-_NATS if whole else _NATS):
            return []
        sites, _ = nested.run(there.theta, self.loc.new_zeros(nested.layout.extended))
        single = [name for name, rows in self.hyper.rows.items() if rows.stop - rows.start == 1]
        place = ", ".join(f"{name} = {float(sites[name]['value']):.3g}" for name in single)
        if higher > 0:
            return [
                f"a second start ended elsewhere, {higher:.1f} nats higher, at {place}. Make a new guide with "
                "init_loc_fn=init_to_value(values={...}) of these."
            ]
        return [f"there is a second mode, {-higher:.1f} nats lower, at {place}. Intervals are about one of them."]

    def _far(self, ends: list[Optimum], here: Tensor) -> list[Optimum]:
        """Ends that are apart from here."""
        # |R⁻¹(θ − here)|
        far = [torch.linalg.solve_triangular(self.root, (end.theta - here)[:, None], upper=False) for end in ends]
        return [end for end, move in zip(ends, far) if end is not self.nested.none and move.norm() > _APART]


def moments_of(values: list[tuple[Tensor, ...]], weights: Tensor, by_q: Tensor) -> tuple[Tensor, ...]:
    """Means and standard deviations over weighted draws, the approximation's and q's."""
    means, variances, own, its = map(torch.stack, zip(*values))
    mean, q_mean = weights @ means, by_q @ own
    # Var v = E Var[v | θ] + Var E[v | θ]
    sd = (weights @ (variances + (means - mean).square())).sqrt()
    return mean, sd, q_mean, (by_q @ (its + (own - q_mean).square())).sqrt()


def _beside(moves: Tensor, ratios: Tensor) -> tuple[float, float, bool]:
    """A root mean square in standard deviations, a mean ratio of widths, and whether they are told."""
    away, ratio = float(moves.detach().square().mean().sqrt()), float(ratios.detach().mean())
    return away, ratio, away > _AWAY or not _WIDTHS[0] <= ratio <= _WIDTHS[1]


def _rows_of_jacobian(values: Tensor, x: Tensor) -> Tensor:
    """∂ values / ∂x, ``(N, len(x))``."""
    eye = torch.eye(len(values)).to(values)
    return torch.autograd.grad(values, x, eye, is_grads_batched=True, materialize_grads=True)[0]
