"""Where hyperparameters start: the mode and curvature of their marginal posterior, by nested Laplace approximations.

Given hyperparameters θ, in unconstrained space, the field x ~ N(0, I) is Gaussian a priori, and densities depend on it
by the linear predictors η = η(0) + Jx. With x̂(θ) the mode of ℓ(η) − ½|x|², W = −∇²ℓ and P = I + JᵀWJ there
(Rue, Martino and Chopin, 2009, eq. 3),

    log p(θ | y) ≈ F(θ) + const = log p(θ) + ℓ(η) − ½|x̂|² − ½ log|P| − ½ Σₙ ρₙWₙₙ,

the last term for GP sites' residuals of variance ρ. Where ℓ is normal in x this is the collapsed bound of Titsias
(2009). θ goes to the mode of F, and then θ ~ N(θ̂, H⁻¹) and x | θ ~ N(x̂(θ), P⁻¹) with H = −∇²F.

A density with kinks, such as Laplace's, has no curvature. There F is the best bound, log p(θ) + E[ℓ] − KL, with η and P
of q(x | θ) and W = −E[∇²ℓ].
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import constraints

from ..numerics.arrow import Arrow
from ..numerics.functions import jacobian
from ..program.asking import Unsupported, attempt
from ..program.owners import NO_VALUES, Values
from ..program.traces import all_sites, is_observation, share_of
from .field import AtValues, Layout, Standardised, index_of, slices
from .known import KnownGuide, without
from .latents import Hyperparameters
from .newton import Local, Slopes, by_derivatives, by_precision, grads, root_of
from .predictors import Densities, Links, Place, Predictors

_START = 0.03  # of a draw of x, where steps begin beside products
_NEWTON = 50  # steps of x, at most
_NEAR = 1e-10  # nats that a step of x may still gain; an error of x̂ is one of F in its first order
_EVALUATIONS = 60  # of F, at most
# Nats that a step of θ may still gain, and steps of θ by which curvature is a difference of gradients: in float32 F may
# be known to 1e-3 and its gradient to 0.1, test_float32.py::test_a_start_is_as_wide_as_that_of_float64.
_GAIN = {torch.float64: 1e-5, torch.float32: 1e-3}
_DIFFERENCE = {torch.float64: 0.005, torch.float32: 0.06}
_FAR = 0.3  # a difference on both sides, at most
_NEARER = 1.0, 0.5, 0.25, 0.125
_PLATEAU = 3.0  # functions that data inform, below which other starts are tried
_FACTORS = [10 ** (k / 2) for k in (-6, -5, -4, -3, -2, -1, 1, 2, 3, 4)]  # of these hyperparameters
_ACROSS = [(k + 0.5) / 24 for k in range(24)]  # of an interval
_LEAST = 0.1  # an eigenvalue of JᵀWJ, beside the prior's 1, from which x follows θ
_LARGEST = 600  # values whose densities are taken as they are
_Places = Callable[[constraints.Constraint, Tensor], list[Tensor]]  # of a hyperparameter, by its prior's support
_WIDEST = 1.5  # a standard deviation of a hyperparameter, by its prior's width, where F is flat


@dataclass(frozen=True)
class Optimum:
    """F at some θ."""

    theta: Tensor
    value: Tensor  # F
    slope: Tensor  # ∇F
    x: Tensor  # x̂
    precision: Arrow  # P
    left: Mapping[str, Tensor]  # ½ Σₙ ρₙWₙₙ of each GP site: what its basis leaves out, in nats


class Nested:
    """F of a program, which ``run`` runs under a handler, with some of its sites' values given."""

    def __init__(
        self,
        guide: KnownGuide,
        layout: Layout,
        links: Links,
        hyper: Hyperparameters,
        run: Callable[..., poutine.Trace],
        handler: Any = Standardised,
        drawn: Collection[str] = (),
    ) -> None:
        self.guide, self.layout, self.links, self.hyper, self._run = guide, layout, links, hyper, run
        self.handler, self.drawn = handler, drawn
        x, theta = (torch.zeros(num).to(guide.like) for num in (layout.num, hyper.size))
        self.nothing = theta.new_zeros(layout.dense, layout.dense)
        # where the program has no density
        self.none = Optimum(theta, theta.new_tensor(-torch.inf), theta, x, layout.nothing(x).plus(1.0), {})
        # x̂ and P of the last θ, at first at 0, or near it, where products stand still: far from it their factors may
        # have other signs than data say
        noise = torch.randn(layout.num, generator=torch.Generator().manual_seed(0)).to(x)
        self.start = self.last = _START * noise if drawn else x, self.none.precision
        self.weight, self.tilt = 1.0, theta  # of rows that stand for more; and of θ
        self.is_smooth: Optional[bool] = None  # whether densities have curvatures

    def run(self, theta: Tensor, x: Tensor, given: Values = NO_VALUES) -> tuple[dict[str, Any], Standardised]:
        """The sites of a run at θ and x, ``(extended,)``, with some GP sites' values ``given``, and its handler."""
        handler = self.handler(self.guide, *self.layout.parts(x), self.hyper.parts(theta))
        sites: dict[str, Any] = dict(all_sites(self._run(handler, given)))
        # A whole program may be scaled, as by poutine.scale: all is over the field's scale, so that x ~ N(0, I).
        scale = sites[next(iter(self.layout.field))]["scale"]
        handler.log_prior = handler.log_prior / scale
        # Some rows count once: in the place of all they would be data of a noise that is far smaller.
        weights = dict.fromkeys(self.guide.facts.data, self.weight)
        for name, site in sites.items():
            if is_observation(site):  # a latent that is held is one, of no rows
                site["scale"] = weights.get(name, 1.0) * site["scale"] * share_of(site) / scale
        return sites, handler

    def of_data(self, sites: Mapping[str, Any]) -> Tensor:
        """Log densities of data that have no linear predictor."""
        data = filter(is_observation, without(sites, {*self.links, *self.drawn}).values())
        seen = [site for site in data if site["mask"] is not False]
        return sum(scale_and_mask(s["fn"].log_prob(s["value"]), s["scale"], s["mask"]).sum() for s in seen)

    def predictors(self, theta: Tensor) -> tuple[Predictors, Standardised]:
        """The linear predictors at θ, and the handler of their run."""
        zero = theta.new_zeros(self.layout.extended, requires_grad=True)
        sites, handler = self.run(theta, zero)
        return Predictors(sites, self.links, zero, self.layout, lambda f: self.run(theta, zero, f)[0]), handler

    def densities(self, theta: Tensor) -> Densities:
        """Those of sites without linear predictors, at θ."""
        return Densities(lambda at: self.run(theta, at)[0], self.drawn, self.layout)

    def at(self, theta: Tensor) -> Optimum:
        """F at θ: Newton's steps lead to x̂, and the gradient is that of F through x̂(θ)."""
        theta = theta.detach().requires_grad_()
        found, handler = self.predictors(theta)
        # log p(θ), and densities in which x has no part
        total = handler.log_prior + self.tilt @ theta + self.of_data(found.sites)
        x, precision = self._newton(found, theta.detach())
        x = x.clone().requires_grad_()
        here = self._local(found, theta, x, precision)
        # x̂ is given: what F makes of x's own move by θ is added to the gradient below.
        moved = by_precision(found, here, precision)
        parts = [w @ (found.residuals[one] * found.residuals[other]) for (one, other), w in here.weights.items()]
        each = 0.5 * sum(parts, here.of_residuals)
        left = {name: each[own].sum() for name, own in slices(self.layout.residuals).items()}
        total = total + here.density - 0.5 * x.square().sum() - sum(left.values())
        total = total - precision.half_log_det - (moved - moved.detach())
        if not self.is_smooth:  # E[ℓ] has ½ tr SJᵀWJ + ½ Σ ρW by now; left are their derivatives
            total = total + 0.5 * (len(x) - precision.variances.sum()) + sum(part.detach() for part in left.values())
        # dF/dθ = ∂F/∂θ + ∂F/∂x · P⁻¹ ∂(Jᵀ∇ℓ)/∂θ.
        (by_x,) = torch.autograd.grad(total, x, retain_graph=True)
        along = precision.solve(by_x).detach()
        (by_theta,) = torch.autograd.grad(total + along @ (here.slope - x), theta)
        left = {name: part.detach() for name, part in left.items()}
        return Optimum(theta.detach(), total.detach().to(x), by_theta, x.detach(), precision, left)

    def _newton(self, found: Predictors, theta: Tensor) -> tuple[Tensor, Any]:
        """x̂ and P there."""
        found = found.detached()
        (x, root), step, best, held = self.last, None, -torch.inf, self.guide.like
        for _ in range(_NEWTON):
            here = self._local(found, theta, x, root)
            value = float(here.density.detach() - 0.5 * x.square().sum())
            if not self.is_smooth:  # the divergence of q(x) by its width
                value -= float(root.half_log_det + 0.5 * root.variances.sum())
            near = max(_NEAR, torch.finfo(x.dtype).eps * abs(value))
            # Beyond the top: half of the step. Of an infinite value every other is near.
            if step is not None and not (math.isfinite(value) and value >= best - 100 * near):
                step = 0.5 * step
                x = x - step
                continue
            # of normal densities it stays
            if not torch.equal(held, now := torch.cat([*here.weights.values(), here.matrix.diagonal()]).detach()):
                (root, is_mode), held = root_of(found, here), now
            up, gain, best = here.slope.detach() - x, value - best, value
            step = root.solve(up)
            if is_mode and float(up @ step) < near and (self.is_smooth or gain < near):
                break
            x = x + step
        else:  # P's own, where steps ended at another's
            root, is_mode = root_of(found, self._local(found, theta, x, root))
            if not is_mode:
                raise Unsupported("densities have no mode where steps ended")
        self.last = x, root
        return x, root

    def of_means(self, best: Optimum) -> tuple[Tensor, Arrow]:
        """x̂ and P after a step from ℓ's to E[ℓ]'s: a skewed posterior's mean is not its mode (van Niekerk and Rue,
        2024).
        """
        found = self.predictors(best.theta)[0].detached()
        density, slopes, weights = self._by_expectation(found, found.at(best.x), best.precision)
        slope, matrix = found.back(slopes), self.nothing
        if self.drawn:
            more, matrix = self.densities(best.theta).local_mean(best.x, best.precision.factor.root)  # which is dense
            slope = slope + more
        root, _ = root_of(found, Local(density, slope, weights, matrix, slope[:0]))
        return best.x + root.solve(slope.detach() - best.x), root

    def _local(self, found: Predictors, theta: Tensor, x: Tensor, root: Any) -> Local:
        """Densities at x; where predictors have kinks, their densities' expectations under N(x, P⁻¹)."""
        eta, nothing = found.at(x), x.new_zeros(self.layout.extended - len(x))
        if self.is_smooth is None:
            curvatures = by_derivatives(found, eta)[-1]
            self.is_smooth = all(curvatures.get((place, place), nothing).any() for place in eta)
        parts = by_derivatives(found, eta) if self.is_smooth else self._by_expectation(found, eta, root)
        here = Local(parts[0], found.back(parts[1]), parts[2], self.nothing, nothing)
        if not self.drawn:
            return here
        density, slope, matrix = self.densities(theta).local(x)
        own, rest = matrix[: len(x), : len(x)], matrix.diagonal()[len(x) :]
        return Local(here.density + density, here.slope + slope, here.weights, own, rest)

    def _by_expectation(
        self, found: Predictors, eta: Mapping[Place, Tensor], root: Any
    ) -> tuple[Tensor, Slopes, Slopes]:
        """E[ℓ] and, by theorems of Bonnet and Price, E[∇ℓ] = ∂E[ℓ]/∂η and E[∇²ℓ] = 2 ∂E[ℓ]/∂C with symmetric C."""
        spread = {pair: part.requires_grad_() for pair, part in found.covariances(root).items()}
        total = found.expected(eta, spread, self.guide.core.num_nodes)
        slopes, curvatures = grads(total, {**eta, **spread}), Slopes()
        for one, other in spread:
            part = -slopes.pop((one, other)).detach() * (2 if one == other else 1)
            curvatures[one, other] = curvatures[other, one] = part
        return total, slopes, curvatures

    def mode(self, starts: Iterable[Optimum]) -> Optimum:
        """F at θ̂, by L-BFGS from the best of some starts."""
        best = max(starts, key=attrgetter("value"), default=self.none)
        if best is self.none or not self.hyper.size:
            return best
        # L-BFGS's line search interpolates values: an infinite one would be NaN to it, a wall turns it back.
        t, lowest = (best.theta / self.hyper.units).requires_grad_(), float(best.value) - 1e4
        ahead = [best]  # what L-BFGS asks first
        optimiser = torch.optim.LBFGS(
            [t],
            max_iter=_EVALUATIONS,
            max_eval=_EVALUATIONS,
            tolerance_grad=1e-3,
            tolerance_change=_GAIN[t.dtype],
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            nonlocal best
            found = ahead.pop() if ahead else self.tried(self.hyper.units * t)
            best = max(best, found, key=attrgetter("value"))
            t.grad = -found.slope * self.hyper.units
            return -found.value.nan_to_num(neginf=lowest)

        optimiser.step(loss)
        return best

    def tried(self, theta: Tensor) -> Optimum:
        """As :meth:`at`; ``none``, whose F is −∞, where the program has no density."""
        for _ in range(2):
            with attempt():
                found = self.at(theta)
                return found if torch.cat([found.value[None], found.slope]).isfinite().all() else self.none
            # x̂ of the last θ may be a bad start: test_a_failed_search_starts_anew
            self.last = self.start
        return self.none

    def weights(self, best: Optimum, theta: Tensor, found: Predictors) -> Tensor:
        """∂ log tr JᵀWJ / ∂θ with x̂ that follows θ, and J that stays: what θ does to the precision of data."""
        if not len(theta):
            return theta.detach()
        pull = jacobian(self._local(found, theta, best.x, best.precision).slope + 0 * theta.sum(), theta).detach()
        # ∂x̂ = P⁻¹ ∂∇ℓ
        x = best.x + best.precision.solve(pull.mT) @ (theta - theta.detach())
        here, rows = self._local(found, theta, x, best.precision), found.detached().rows
        parts = [weight @ (rows[one] * rows[other]).sum(-1) for (one, other), weight in here.weights.items()]
        total: Any = sum(parts, 0 * theta.sum()) + here.matrix.diagonal().sum()
        return jacobian(total.clamp(min=1e-3).log()[None], theta).detach()[:, 0]

    def follow(
        self, best: Optimum, theta: Tensor, found: Predictors, turned: Tensor, weights: Tensor
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """By θ, ``(D, num)``, how ∇(ℓ − ½|x|²) moves at x̂ beside what ``turned`` and ``weights`` do; and by
        hyperparameter the moves m of x, ``(V, num)``, that do the same as its value does, and as θ: (P − I)m is minus
        that.

        :param found: the linear predictors at ``theta``, with their graph, as what sites do that are ``turned``.
        """
        slopes = dict[str, tuple[Tensor, Tensor]]()
        # ∂x̂ = P⁻¹ ∂∇ℓ; Pm ← exp(bᵀθ) Pm
        pull = self._local(found, theta, best.x, best.precision).slope - turned
        pull = jacobian(pull + 0 * theta.sum(), theta).detach() - torch.outer(weights, best.x)
        # JᵀWJ = P − I has no inverse where data say nothing of x: under a floor it hardly moves there.
        moves = -best.precision.plus(-1.0).lifted(_LEAST).solve(pull.mT).mT
        for name, rows in self.hyper.rows.items():
            by_theta = jacobian(found.sites[name]["value"].reshape(-1), theta).detach()[rows]
            # ∂x/∂v = (∂v/∂θ)⁺ ∂x/∂θ
            slopes[name] = torch.linalg.pinv(by_theta) @ moves[rows], moves[rows]
        return pull, slopes

    def is_informed(self, found: Optimum) -> bool:
        """Whether data inform some functions of GP sites' bases, tr(I − P⁻¹); else all of them may be noise."""
        index = index_of(self.layout.rows, self.guide.facts.gps, found.x)
        return len(index) - float(found.precision.variances[index].sum()) > _PLATEAU

    def beyond(self, best: Optimum) -> Optimum:
        """The mode beyond a plateau, if θ is on one and F is higher there: from θ with one positive hyperparameter
        times a factor that its prior allows. Where the others stay F is no higher:
        test_a_length_far_from_the_data_is_no_plateau.
        """
        if self.is_informed(best):
            return best

        def places(support: constraints.Constraint, value: Tensor) -> list[Tensor]:
            moved = [value * factor for factor in _FACTORS if (value > 0).all()]
            return [v for v in moved if support.check(v).all()]

        return self._mode_from(best, places, lambda found: (self.is_informed(found), found.value))

    def across(self, best: Optimum) -> Optimum:
        """The mode from θ with one hyperparameter of bounded support elsewhere in it, if F is higher there: that of a
        change point has many (test_the_best_of_many_modes_is_the_start).
        """

        def places(support: constraints.Constraint, value: Tensor) -> list[Tensor]:
            if not isinstance(support, constraints.interval) or value.numel() > 1:
                return []
            moved = support.lower_bound + value.new_tensor(_ACROSS) * (support.upper_bound - support.lower_bound)
            return [place.expand_as(value) for place in moved.reshape(-1)]

        return self._mode_from(best, places, attrgetter("value"))

    def _mode_from(self, best: Optimum, places: _Places, key: Callable[[Optimum], Any]) -> Optimum:
        """The mode from the best θ with one hyperparameter at other places of its support, if F is higher there."""
        priors, values = self.hyper.priors, self.hyper.values(best.theta)
        moved = ({**values, n: there} for n, value in values.items() for there in places(priors[n].support, value))
        start = max([best, *(self.tried(self.hyper.of(each)) for each in moved)], key=key)
        return best if start is best else max(best, self.mode([start]), key=attrgetter("value"))

    def covariance(self, mode: Optimum) -> Tensor:
        """H⁻¹ at the mode, by differences of gradients."""
        units, least = self.hyper.units, _DIFFERENCE[mode.theta.dtype]
        precision = self._curvature(mode, least * torch.ones_like(units), lambda move: mode)
        if units.dtype == torch.float32:  # which rounds gradients: where θ is wide, steps are, and on both sides
            far = precision.diagonal().clamp(min=1.0).rsqrt().clamp(least, _FAR)
            precision = self._curvature(mode, far, partial(self._beside, mode.theta))
        # Where F is flat, or bends upwards, as it may beside a mode or by rounding, θ is not much wider than its prior.
        widths = self.hyper.widths / units
        values, axes = torch.linalg.eigh(0.5 * (precision + precision.mT) * torch.outer(widths, widths))
        axes = self.hyper.widths[:, None] * axes
        return (axes / values.clamp(min=_WIDEST**-2)) @ axes.mT

    def _curvature(self, mode: Optimum, far: Tensor, behind: Callable[[Tensor], Optimum]) -> Tensor:
        """−∇²F in the units of θ, by F ahead of the mode and at what is ``behind`` it."""
        precision, units = far.new_zeros(len(far), len(far)), self.hyper.units
        for row, move in zip(precision, (far * units).diag()):
            before, after = behind(-move), self._beside(mode.theta, move)
            # by what θ moved between both
            row += (before.slope - after.slope) * units / ((after.theta - before.theta) / units).sum()
        return precision

    def _beside(self, theta: Tensor, move: Tensor) -> Optimum:
        """F at θ + move, or nearer to θ, where the program has no density there."""
        for part in _NEARER:
            if (found := self.tried(theta + part * move)).value.isfinite():
                return found
        raise Unsupported("its density has no slope beside the mode")


def by_values(
    guide: KnownGuide, sites: Mapping[str, Any], normal: Collection[str], hyper: Hyperparameters, run: Any
) -> Nested:
    """F of a program whose densities depend on values in any way: x are all values, and the whole Hessian is taken."""
    facts = guide.facts
    members = [name for name in sites if name in {*facts.gps, *normal}]
    layout = Layout({name: [sites[name]["value"].numel()] for name in members}, {})
    if layout.num > _LARGEST:
        raise Unsupported(f"{layout.num} values are too many for a dense matrix")
    drawn = [name for name in sites if name in {*facts.data, *facts.downstream} - {*members}]
    return Nested(guide, layout, {}, hyper, run, AtValues, drawn)
