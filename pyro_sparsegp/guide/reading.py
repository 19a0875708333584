"""Reading the Gaussian sites of families on sites off a likelihood, all latents drawn before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..approximations.on_sites import ProjectedGP
from ..gaussians.sites import KeptSites, Sites, update, within_reach
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.reader import Expectation, Marginal, Reader

_LARGE = 0.5  # a move, in standard deviations, that may overshoot
_ATTEMPTS, _SLOWEST = 8, 1 / 256  # of a search, and the least share of a rate: test_kinks
_MOST, _DEPTH = 100, 30  # iterations of a linear system, and how many of them are remembered
_WIDE = 100.0  # nats a value by which a bound is lost
_NEWTON = 20
_TIGHT = {torch.float64: 1e-6, torch.float32: 1e-3}  # standard deviations that a linear system's solution may move
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5}  # of a bound


class SiteReading:
    """The Gaussian sites of one GP site while they are read.

    :param module: a SiteGP, or what absorb has for it.
    :param reader: of the likelihood ℓ.

    ℓ may be ``quadratic`` in each value. If no outputs meet in a term it is ``direct``: one reading gives the best
    sites, the other GP sites' posteriors as they are. If no other GP sites do it is ``alone``: the sites are ℓ itself.
    """

    def __init__(self, name: str, process: GaussianProcess, module: Any, reader: Reader) -> None:
        self.name, self.process, self.module = name, process, module
        found = reader.found
        self.quadratic, self.direct, self.alone = name in found.quadratic, found.is_direct(name), found.is_alone(name)
        kept: KeptSites = module.sites
        self.unread = kept.empty or kept.inputs.shape != process.x.shape
        self.sites = Sites.none(process.x, process.batch_shape)
        if not self.unread:
            self.sites = Sites(process.x, kept.precision, kept.linear)
        self.truncated = kept.truncated  # negative curvatures, cut to 0
        self.change = math.inf  # that the last update would have made of a marginal, in standard deviations
        self.pace, self.halved = 1.0, 0  # a share of the rate; updates that were cut since they lowered the bound
        # Of passes over all rows, while the sites are read: what gives posteriors, and the last one with its marginals;
        # or these alone, where they are known from a step before.
        self._answer: Optional[Callable[[Sites], SparsePosterior]] = None
        self._last: Optional[tuple[SparsePosterior, Marginal]] = None
        self._known: Optional[Marginal] = None

    @property
    def status(self) -> dict[str, Any]:
        """As ``site_status`` of a guide has it."""
        return {
            "sites": self.sites.precision.numel(),
            "exact": self.quadratic,
            "truncated": int(self.truncated),
            "halved": self.module.sites.progress["halved"],
            "converged": self.change <= 1e-3,
        }

    def resume(self, same: bool) -> None:
        """Go on where training is: its pace, and the marginals that the last step had, if it was at the same rows."""
        if not self.unread:
            progress = self.module.sites.progress
            self.pace, self._known = progress["pace"], progress["marginals"] if same else None

    def look(self) -> tuple[SparsePosterior, Marginal]:
        """The posterior of the sites as they are, and its marginals; the same again until there are other sites."""
        self._known = None
        self._last = self._last or self.posterior(None if self.unread else self.sites.detached())
        return self._last

    @property
    def marginal(self) -> Marginal:
        """Where ℓ is expanded."""
        if self.alone:  # it is the same wherever that is
            return self.process.mean.detach(), self.process.variance.detach()
        return self._known or self.look()[1]

    def move(self, sites: Sites, found: Optional[tuple[SparsePosterior, Marginal]] = None) -> None:
        """Have these sites, of which the posterior and its marginals may be known."""
        # What was known goes before the next is made: of projections of data each holds a Φ of its own.
        self.sites, self.unread, self._known, self._last = sites, False, None, found

    def release(self) -> None:
        """Let go of what is as large as the data, or larger, but for the sites: they are read."""
        self._answer = self._last = self._known = None

    def expanded(self, found: Expectation, away: Tensor, least: float = 0.0) -> Sites:
        """The sites of ℓ expanded at function values so far from the prior's mean, of at least this precision."""
        # λ = −E[ℓ''] and λ(z − μ) = E[ℓ'] + λ(m − μ): Khan and Lin, 2017, eq. 10
        precision = (-found.second).clamp(min=least)
        return Sites(self.process.x, precision, found.first + precision * away)

    def keep(self) -> None:
        """Let the module have the sites as they are now."""
        kept = self.module.sites
        kept.keep(self.sites, self.truncated)
        kept.progress |= {"pace": self.pace, "halved": kept.progress["halved"] + self.halved}

    def posterior(self, sites: Optional[Sites]) -> tuple[SparsePosterior, Marginal]:
        """The posterior of these sites, and its marginals; ``None`` is the start, noise as large as the process around
        its mean: under the prior a likelihood that is not log-concave would be met where it is flat.
        """
        with torch.no_grad():
            if self._answer is None:
                self._answer = self.module.by_sites(self.process, self.name)
            if sites is None:
                # λ is one over the mean of the prior's variances: test_a_scale_that_grows_with_f_is_met_near_the_mean
                prior = self.process.variance
                noise = prior.mean(-1, keepdim=True).clamp(min=torch.finfo(prior.dtype).tiny).expand(prior.shape)
                sites = Sites(self.process.x, 1 / noise, torch.zeros_like(noise))
            posterior = self._answer(sites)
            return posterior, (posterior.mean, posterior.variance)


class Readings:
    """The readings of GP sites, which are updated until they stay, one after the other, and none so that the bound
    falls.

    :param others: the marginals of all other GP sites.
    """

    def __init__(self, reader: Reader, readings: Sequence[SiteReading], others: Mapping[str, Marginal]) -> None:
        self.reader, self.readings, self.others = reader, readings, others

    def settle(self, most: int, tolerance: float) -> None:
        """Update the sites. Gradients pass through the last update.

        :param tolerance: updates end when none moves a marginal by more than this, in standard deviations, or after
            ``most`` of them.
        """
        readings, trained = self.readings, torch.is_grad_enabled()
        names = {reading.name for reading in readings}
        meets = any(not reading.direct or self.reader.found.neighbours(reading.name) & names for reading in readings)
        if meets and all(reading.quadratic for reading in readings) and self._solve(tolerance):
            for reading in readings if trained else ():  # once more, for the gradient
                reading.sites = self._target(reading)[1]
            return
        # Under torch.func.vmap this raises, and draws go in a loop: as many updates for all would leave out draws that
        # need more of them, such as those of little noise, and take longer where rows are many.
        for _ in range(most):
            for reading in readings:
                self._update(reading, -1.0 if trained else tolerance)
            if all(reading.change <= tolerance for reading in readings):
                return

    def _expect(self, reading: SiteReading, marginal: Marginal) -> Expectation:
        """E[ℓ] and its derivatives under a marginal of one GP site, those of all others as they are."""
        every = {other.name: other.marginal for other in self.readings if other is not reading}
        return self.reader.expect(reading.name, {**self.others, **every, reading.name: marginal})

    def _target(self, reading: SiteReading, marginal: Optional[Marginal] = None) -> tuple[Expectation, Sites]:
        """E[ℓ] and its derivatives, and the sites that these lead to; how far these are from those that there are is
        the reading's ``change``.
        """
        mean, variance = marginal = marginal or reading.marginal
        found = self._expect(reading, marginal)
        away = mean - reading.process.mean
        target = reading.expanded(found, away)
        if isinstance(reading.module, ProjectedGP) and not reading.quadratic:
            target = within_reach(target, reading.sites, (away, variance))
        reading.change = 0.0 if reading.alone else _distance(reading.sites, target, (away, variance))
        return found, target

    def _update(self, reading: SiteReading, least: float) -> None:
        """Update one GP site's sites, unless they move less than ``least`` standard deviations."""
        found, target = self._target(reading)
        # Negative curvatures, beyond rounding, of which sites cut to 0 are made.
        reading.truncated = (found.second > 1e-6 * found.second.abs().amax()).sum()
        # ℓ that is quadratic where others are held has sites that no damping brings nearer.
        rate = 1.0 if reading.quadratic else reading.module.rate
        if reading.direct:
            reading.move(target)
        elif least < reading.change <= _LARGE / (rate * reading.pace):
            reading.move(_proposed(reading, found, reading.marginal, rate))
            reading.pace = min(1.0, 1.1 * reading.pace)
        elif reading.change > least:
            self._search(reading, found, rate)

    def _search(self, reading: SiteReading, found: Expectation, rate: float) -> None:
        """An update that may overshoot: as far as the bound E[ℓ] − KL does not fall."""
        known, (posterior, marginal) = reading.marginal, reading.look()
        if known is not marginal:  # what was kept may be of an earlier step
            found, _ = self._target(reading)
        bound = float((found.value - posterior.kl.sum()).detach())
        # The sites of a free q are not quite the best ones for projected data: golden student-ComputationAware.
        share = 1e-2 if isinstance(reading.module, ProjectedGP) else _ROUNDING[marginal[0].dtype]
        slack = share * (1 + abs(bound))
        if not bound > -_WIDE * marginal[0].numel():  # any step raises it: test_exponential_links_under_wide_priors
            reading.move(self._at_modes(reading))
            return
        for _ in range(_ATTEMPTS):
            sites = _proposed(reading, found, marginal, rate)
            moved = reading.posterior(sites.detached())
            with torch.no_grad():
                value = float(self._expect(reading, moved[1]).value - moved[0].kl.sum())
            if value >= bound - slack:
                reading.move(sites, moved)
                reading.pace = min(1.0, 1.5 * reading.pace)
                return
            reading.halved += 1
            reading.pace = max(reading.pace / 2, _SLOWEST)

    @torch.no_grad()
    def _at_modes(self, reading: SiteReading) -> Sites:
        """ℓ expanded at each row's own mode, or towards it, where the posterior is so wide that expectations are of its
        farthest tail, as under an exponential link.
        """
        prior_mean = reading.process.mean
        # Slopes and curvatures within a hundredth of the prior's deviation.
        f, near, tiny = prior_mean, 1e-4 * reading.process.variance, torch.finfo(prior_mean.dtype).tiny
        low, high = torch.full_like(f, -math.inf), torch.full_like(f, math.inf)
        for i in range(_NEWTON - 1):
            found = self._expect(reading, (f, near))
            # f ← f − ℓ'/ℓ'' in strides that grow, by bisection where that leaves what is known to hold the mode.
            precision = (-found.second).clamp(min=tiny)
            low, high = torch.where(found.first > 0, f, low), torch.where(found.first < 0, f, high)
            stride = 2.0**i / 4
            moved = f + (found.first / precision).nan_to_num(0.0).clamp(-stride, stride)
            between = (moved > low) & (moved < high)
            f = torch.where(between | ~(low.isfinite() & high.isfinite()), moved, (low + high) / 2)
        return reading.expanded(self._expect(reading, (f, near)), f - prior_mean, tiny)

    @torch.no_grad()
    def _solve(self, tolerance: float) -> bool:
        """The sites of GP sites and outputs that meet in Gaussian densities, at the optimum of a mean field: its means
        solve a linear system, by Anderson's mixing of all iterates (1965), which on linear maps is GMRES.

        :returns: whether they were found: not if the precisions of one depend on the others, as in a product of
            functions.
        """
        readings = self.readings
        # Tight in training, too: the bound falls with the square of what is missing, times its precisions.
        tolerance = max(min(tolerance, 1e-5), _TIGHT[readings[0].process.x.dtype])
        steps: list[tuple[Tensor, Tensor]] = []  # iterates, and residuals there
        for reading, (_, first) in zip(readings, [self._target(reading) for reading in readings]):
            reading.move(first if reading.unread else Sites(first.inputs, first.precision, reading.sites.linear))
        for _ in range(_MOST):
            pairs = [(reading, self._target(reading)[1]) for reading in readings]
            if not all(torch.allclose(found.precision, reading.sites.precision, rtol=1e-6) for reading, found in pairs):
                return False
            if all(reading.change <= tolerance for reading in readings):
                return True
            # With b = λ(z − μ) the fixed point is b = T(b), T affine; in units of √v all rows count alike.
            variances = [reading.marginal[1] for reading in readings]
            sizes = [variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt() for variance in variances]
            now = torch.cat([(reading.sites.linear * size).flatten() for reading, size in zip(readings, sizes)])
            away = torch.cat([(found.linear * size).flatten() for (_, found), size in zip(pairs, sizes)]) - now
            new, steps = now + away, [*steps[-_DEPTH:], (now, away)]
            if len(steps) > 1:
                # The weights γ by which the residuals r − Σ γᵢ(r − rᵢ) are least give b + r − Σ γᵢ(b + r − bᵢ − rᵢ).
                moved = torch.stack([now - iterate for iterate, _ in steps[:-1]], -1)
                turned = torch.stack([away - residual for _, residual in steps[:-1]], -1)
                driver = "gelsd" if away.device.type == "cpu" else None
                weights = torch.linalg.lstsq(turned, away[:, None], driver=driver).solution
                new = new - ((moved + turned) @ weights)[:, 0]
            for (reading, found), part, size in zip(pairs, new.split([size.numel() for size in sizes]), sizes):
                reading.move(Sites(reading.process.x, found.precision, part.reshape(size.shape) / size))
        return False


def _proposed(reading: SiteReading, found: Expectation, marginal: Marginal, rate: float) -> Sites:
    """The damped update; projections of data take no sites whose z is far from the marginal."""
    relative = marginal[0] - reading.process.mean, marginal[1]
    old = reading.sites.detached()
    sites = update(old, found.first, (-found.second).clamp(min=0), relative, rate * reading.pace)
    return within_reach(sites, old, relative) if isinstance(reading.module, ProjectedGP) else sites


@torch.no_grad()
def _distance(sites: Sites, target: Sites, marginal: Marginal) -> float:
    """How far sites are from others: in standard deviations of the marginals, and as a share of their precisions.

    :param marginal: m − μ and v.
    """
    away, variance = marginal
    # Of each row alone: |Δg|√v and |Δλ|v, with g = λ(z − m).
    pull = (target.linear - target.precision * away) - (sites.linear - sites.precision * away)
    tighter = (target.precision - sites.precision).abs() * variance
    return float(torch.maximum(pull.abs() * variance.clamp(min=0).sqrt(), tighter).nan_to_num(math.inf).max())
