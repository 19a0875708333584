"""Reading the Gaussian sites of families on sites off a likelihood, all latents drawn before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..approximations.projected import ProjectedGP
from ..gaussians.sites import KeptSites, Sites, update, within_reach
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.reader import Expectation, Marginal, Reader

_LARGE = 0.5  # a move, in standard deviations, that may overshoot
_SLOWEST = 1 / 256
_ATTEMPTS = 8
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
        self.pace = 1.0
        self.change = math.inf  # that the last update would have made of a marginal, in standard deviations
        self.halved = 0  # updates that were cut since they lowered the bound
        # Of passes over all rows, while the sites are read: what gives posteriors, and the last one and its marginals.
        self._answer: Optional[Callable[[Sites], SparsePosterior]] = None
        self._last: Optional[tuple[Sites, SparsePosterior, Marginal]] = None

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

    def resume(self, same: bool) -> Marginal:
        """Go on where training is: its pace, and the marginals that the last step had, if it was at the same rows."""
        if self.unread:
            return self.look()[1]
        progress = self.module.sites.progress
        progress["marginals"], self.pace = progress["marginals"] if same else None, progress["pace"]
        return progress["marginals"] or self.look()[1]

    def look(self) -> tuple[SparsePosterior, Marginal]:
        """The posterior of the sites as they are, and its marginals; the same again until there are other sites."""
        if self._last is None or self._last[0] is not self.sites:
            self._last = None  # before the next is made: of projections of data each holds a Φ of its own
            self._last = (self.sites, *self.posterior(None if self.unread else self.sites.detached()))
        return self._last[1:]

    def move(self, sites: Sites, found: Optional[tuple[SparsePosterior, Marginal]] = None) -> None:
        """Have these sites, of which the posterior and its marginals may be known."""
        self.sites, self.unread, self._last = sites, False, None if found is None else (sites, *found)

    def release(self) -> None:
        """Let go of what is as large as the data, or larger, but for the sites: they are read."""
        self._answer = self._last = None

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


def settle(
    reader: Reader, readings: Sequence[SiteReading], marginals: dict[str, Marginal], most: int, tolerance: float
) -> None:
    """Update sites until they stay, GP sites that meet one after the other, and none so that the bound falls.

    Gradients pass through the last update.

    :param marginals: of all GP sites; those of ``readings`` are kept up to date.
    :param tolerance: updates end when none moves a marginal by more than this, in standard deviations, or after
        ``most`` of them.
    """
    trained, names = torch.is_grad_enabled(), {reading.name for reading in readings}
    meets = any(not reading.direct or reader.found.neighbours(reading.name) & names for reading in readings)
    if meets and all(reading.quadratic for reading in readings) and _solve(reader, readings, marginals, tolerance):
        for reading in readings if trained else ():  # once more, for the gradient
            reading.sites = _expect(reader, reading, marginals)[1]
        return
    for i in range(most):
        for reading in readings:
            moved = _update(reader, reading, marginals, -1.0 if trained else tolerance)
            if moved and (i + 1 < most or reading is not readings[-1]):  # else nobody asks for them
                marginals[reading.name] = reading.look()[1]
        if all(reading.change <= tolerance for reading in readings):
            return


@torch.no_grad()
def _solve(reader: Reader, readings: Sequence[SiteReading], marginals: dict[str, Marginal], tolerance: float) -> bool:
    """The sites of GP sites and outputs that meet in Gaussian densities, at the optimum of a mean field: its means
    solve a linear system, by Anderson's mixing of all iterates (1965), which on linear maps is GMRES.

    :returns: whether they were found: not if the precisions of one depend on the others, as in a product of functions.
    """
    # Tight in training, too: the bound falls with the square of what is missing, times its precisions.
    tolerance = max(min(tolerance, 1e-5), _TIGHT[marginals[readings[0].name][0].dtype])
    steps: list[tuple[Tensor, Tensor]] = []  # iterates, and residuals there
    for reading, (_, first, _) in zip(readings, [_expect(reader, reading, marginals) for reading in readings]):
        reading.move(first if reading.unread else Sites(first.inputs, first.precision, reading.sites.linear))
    for _ in range(_MOST):
        marginals |= {reading.name: reading.look()[1] for reading in readings}
        found = [_expect(reader, reading, marginals) for reading in readings]
        pairs = [(reading, target) for reading, (_, target, _) in zip(readings, found)]
        if not all(torch.allclose(target.precision, reading.sites.precision, rtol=1e-6) for reading, target in pairs):
            return False
        # With b = λ(z − μ) the fixed point is b = T(b), T affine; in units of √v all rows count alike.
        variances = [marginals[reading.name][1] for reading in readings]
        sizes = [variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt() for variance in variances]
        now = torch.cat([(reading.sites.linear * size).flatten() for reading, size in zip(readings, sizes)])
        away = torch.cat([(target.linear * size).flatten() for (_, target), size in zip(pairs, sizes)]) - now
        for reading, (_, _, change) in zip(readings, found):
            reading.change = change
        if all(reading.change <= tolerance for reading in readings):
            return True
        new, steps = now + away, [*steps[-_DEPTH:], (now, away)]
        if len(steps) > 1:
            # The weights γ by which the residuals r − Σ γᵢ(r − rᵢ) are least give b + r − Σ γᵢ(b + r − bᵢ − rᵢ).
            moved = torch.stack([now - iterate for iterate, _ in steps[:-1]], -1)
            turned = torch.stack([away - residual for _, residual in steps[:-1]], -1)
            weights = torch.linalg.lstsq(turned, away[:, None], driver="gelsd" if away.device.type == "cpu" else None)
            new = new - ((moved + turned) @ weights.solution)[:, 0]
        parts = new.split([size.numel() for size in sizes])
        for (reading, target), part, size in zip(pairs, parts, sizes):
            reading.move(Sites(reading.process.x, target.precision, part.reshape(size.shape) / size))
    return False


def _update(reader: Reader, reading: SiteReading, marginals: dict[str, Marginal], least: float) -> bool:
    """Update one GP site's sites, unless they move less than ``least`` standard deviations.

    :returns: whether marginals move.
    """
    found, target, reading.change = _expect(reader, reading, marginals)
    # Negative curvatures, beyond rounding, of which sites cut to 0 are made.
    reading.truncated = (found.second > 1e-6 * found.second.abs().amax()).sum()
    if reading.direct:
        reading.move(target)
        return not reading.alone
    if reading.change <= least:
        return False
    # ℓ that is quadratic where others are held has sites that no damping brings nearer.
    rate = 1.0 if reading.quadratic else reading.module.rate
    if reading.change * rate * reading.pace <= _LARGE:
        reading.move(_proposed(reading, found, marginals[reading.name], rate))
        reading.pace = min(1.0, 1.1 * reading.pace)
    else:
        _search(reader, reading, marginals, found, rate)
    return True


def _proposed(reading: SiteReading, found: Expectation, marginal: Marginal, rate: float) -> Sites:
    """The damped update; projections of data take no sites whose z is far from the marginal."""
    relative = marginal[0] - reading.process.mean, marginal[1]
    old = reading.sites.detached()
    sites = update(old, found.first, (-found.second).clamp(min=0), relative, rate * reading.pace)
    return within_reach(sites, old, relative) if isinstance(reading.module, ProjectedGP) else sites


def _search(
    reader: Reader, reading: SiteReading, marginals: dict[str, Marginal], found: Expectation, rate: float
) -> None:
    """An update that may overshoot: as far as the bound E[ℓ] − KL does not fall."""
    name, (posterior, now) = reading.name, reading.look()
    if marginals[name] is not now:  # what was kept may be of an earlier step
        marginals[name] = now
        found, _, _ = _expect(reader, reading, marginals)
    bound = float((found.value - posterior.kl.sum()).detach())
    # The sites of a free q are not quite the best ones for projected data: golden student-ComputationAware.
    share = 1e-2 if isinstance(reading.module, ProjectedGP) else _ROUNDING[now[0].dtype]
    slack = share * (1 + abs(bound))
    if not bound > -_WIDE * now[0].numel():  # any step raises it: test_exponential_links_under_wide_priors
        reading.move(_at_modes(reader, reading, marginals))
        return
    for _ in range(_ATTEMPTS):
        sites = _proposed(reading, found, marginals[name], rate)
        moved = reading.posterior(sites.detached())
        with torch.no_grad():
            value = float(_expect(reader, reading, {**marginals, name: moved[1]})[0].value - moved[0].kl.sum())
        if value >= bound - slack:
            reading.move(sites, moved)
            reading.pace = min(1.0, 1.5 * reading.pace)
            return
        reading.halved += 1
        reading.pace = max(reading.pace / 2, _SLOWEST)


def _expect(
    reader: Reader, reading: SiteReading, marginals: Mapping[str, Marginal]
) -> tuple[Expectation, Sites, float]:
    """E[ℓ] and its derivatives, the sites that these lead to, and how far they are from those that there are."""
    name, prior_mean = reading.name, reading.process.mean
    # Where sites are ℓ itself they are the same wherever it is expanded, and marginals are not asked for.
    mean, variance = (prior_mean.detach(), torch.zeros_like(prior_mean)) if reading.alone else marginals[name]
    away = mean - prior_mean
    at_mean = reading.quadratic or reading.module.at == "mean"
    found = reader.expect(name, {**marginals, name: (mean, variance)}, at_mean)
    target = reading.expanded(found, away)
    if isinstance(reading.module, ProjectedGP) and not reading.quadratic:
        target = within_reach(target, reading.sites, (away, variance))
    return found, target, 0.0 if reading.alone else _distance(reading, target, (mean, variance))


@torch.no_grad()
def _at_modes(reader: Reader, reading: SiteReading, marginals: Mapping[str, Marginal]) -> Sites:
    """ℓ expanded at each row's own mode, or towards it, where the posterior is so wide that expectations are of its
    farthest tail, as under an exponential link.
    """
    prior_mean = reading.process.mean
    f, point, tiny = prior_mean, torch.zeros_like(prior_mean), torch.finfo(prior_mean.dtype).tiny
    low, high = torch.full_like(f, -math.inf), torch.full_like(f, math.inf)
    for i in range(_NEWTON - 1):
        found = reader.expect(reading.name, {**marginals, reading.name: (f, point)}, True)
        # f ← f − ℓ'/ℓ'' in strides that grow, by bisection where that leaves what is known to hold the mode.
        precision = (-found.second).clamp(min=tiny)
        low, high = torch.where(found.first > 0, f, low), torch.where(found.first < 0, f, high)
        stride = 2.0**i / 4
        moved = f + (found.first / precision).nan_to_num(0.0).clamp(-stride, stride)
        between = (moved > low) & (moved < high)
        f = torch.where(between | ~(low.isfinite() & high.isfinite()), moved, (low + high) / 2)
    found = reader.expect(reading.name, {**marginals, reading.name: (f, point)}, True)
    return reading.expanded(found, f - prior_mean, tiny)


@torch.no_grad()
def _distance(reading: SiteReading, target: Sites, marginal: Marginal) -> float:
    """How far sites are from others: in standard deviations of the marginals, and as a share of their precisions."""
    sites, variance, away = reading.sites, marginal[1], marginal[0] - reading.process.mean
    # Of each row alone: |Δg|√v and |Δλ|v, with g = λ(z − m).
    pull = (target.linear - target.precision * away) - (sites.linear - sites.precision * away)
    tighter = (target.precision - sites.precision).abs() * variance
    return float(torch.maximum(pull.abs() * variance.clamp(min=0).sqrt(), tighter).nan_to_num(math.inf).max())
