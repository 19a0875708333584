"""Reading the Gaussian sites of families on sites off a likelihood, all latents drawn before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional, Union

import torch
from torch import Tensor

from ..approximations.on_sites import SiteGP
from ..approximations.projected import ProjectedGP
from ..gaussians.sites import KeptSites, Sites, update, within_reach
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.facts import Structure
from ..program.likelihood import Expectation
from ..program.reader import Marginal, Reader

__all__ = ["SiteReading", "settle"]

_LARGE = 0.5  # a move, in standard deviations, that may overshoot
_SMALL = 0.02  # one that will not, however it compares with the last
_SLOWEST = 1 / 256
_ATTEMPTS = 8
_MOST, _DEPTH = 100, 30  # iterations of a linear system, and how many of them are remembered
_WIDE = 100.0  # nats a value by which a bound is lost
_NEWTON = 20
_PATIENCE = 10  # updates that bring sites no closer to a fixed point


@dataclass
class SiteReading:
    """The Gaussian sites of one GP site while they are read.

    :param quadratic: ℓ is quadratic in each value, so that one reading gives the sites, whatever the marginals, unless
        several outputs meet in a term.
    :param sites: as they are.
    :param truncated: how many had a negative curvature, cut to 0.
    :param unread: none were read yet.
    :param change: how far the last update would have moved a marginal, in standard deviations.
    :param halved: how many updates were cut since they lowered the bound.
    """

    name: str
    process: GaussianProcess
    module: SiteGP
    quadratic: bool
    meeting: bool
    sites: Sites
    truncated: Tensor
    unread: bool = True
    pace: float = 1.0
    change: float = math.inf
    halved: int = 0
    stuck: bool = False  # no update raises the bound
    alone: bool = False  # the sites are the likelihood itself
    # Of passes over all rows, while the sites are read: what gives posteriors, the last one and its marginals, and the
    # last expectation and the marginals that it is at. All are without gradients.
    answer: Optional[Callable[[Optional[Sites]], SparsePosterior]] = None
    last: Optional[tuple[Sites, SparsePosterior, Marginal]] = None
    expected: Optional[tuple[Mapping[str, Marginal], bool, Expectation]] = None

    @classmethod
    def of(cls, name: str, process: GaussianProcess, module: SiteGP, found: Structure) -> SiteReading:
        """The sites that a module has kept, to be read anew.

        :param found: what is known of the model.
        """
        kept = module.sites
        assert isinstance(kept, KeptSites)
        unread = kept.empty or kept.inputs.shape != process.x.shape
        zeros = torch.zeros_like(process.mean)
        sites = Sites(process.x, zeros, zeros) if unread else Sites(process.x, kept.precision, kept.linear)
        quadratic, meeting = name in found.quadratic, name in found.meeting
        return cls(name, process, module, quadratic, meeting, sites, kept.truncated, unread)

    def resume(self) -> Marginal:
        """Go on where training is: its pace, and the marginals that the last step had."""
        kept = self.module.sites
        assert isinstance(kept, KeptSites)
        if not self.unread:
            self.pace, self.change = kept.progress["pace"], kept.progress["change"]
            if kept.progress["marginals"] is not None:
                return kept.progress["marginals"]
        return self.marginal()

    def marginal(self) -> Marginal:
        """The marginals of the sites as they are."""
        return self.look()[1]

    def look(self) -> tuple[SparsePosterior, Marginal]:
        """The posterior of the sites as they are, and its marginals; the same again until there are other sites."""
        if self.last is None or self.last[0] is not self.sites:
            self.last = None  # before the next is made: of projections of data each holds a Φ of its own
            self.last = (self.sites, *self.posterior(None if self.unread else _detached(self.sites)))
        return self.last[1:]

    def move(self, sites: Sites, posterior: SparsePosterior, marginal: Marginal) -> None:
        """Have these sites, whose posterior is known."""
        self.sites, self.unread, self.last = sites, False, (sites, posterior, marginal)

    def release(self) -> None:
        """Let go of what is as large as the data, or larger, but for the sites: they are read."""
        self.answer = self.last = self.expected = None

    @property
    def at_mean(self) -> bool:
        """Whether ℓ is expanded at the mean, rather than integrated."""
        return self.quadratic or self.module.at == "mean"

    def expanded(self, found: Expectation, away: Tensor, least: float = 0.0) -> Sites:
        """The sites of ℓ expanded at function values so far from the prior's mean, of at least this precision."""
        precision = (-found.second).clamp(min=least)
        return Sites(self.process.x, precision, found.first + precision * away)

    def held(self, sites: Sites, marginal: Marginal) -> Sites:
        """Sites as the posterior takes them: projections of data take none whose z is far from the marginal."""
        if not isinstance(self.module, ProjectedGP):
            return sites
        return within_reach(sites, self.sites, (marginal[0] - self.process.mean, marginal[1]))

    def keep(self) -> None:
        """Let the module have the sites as they are now."""
        kept = self.module.sites
        assert isinstance(kept, KeptSites)
        kept.keep(self.sites, self.truncated)
        kept.progress |= {"pace": self.pace, "change": self.change, "halved": kept.progress["halved"] + self.halved}

    @property
    def direct(self) -> bool:
        """Whether one reading gives the best sites, the other GP sites' posteriors as they are."""
        return self.quadratic and not self.meeting

    def posterior(self, sites: Optional[Sites]) -> tuple[SparsePosterior, Marginal]:
        """The posterior of these sites, and its marginals; ``None`` is the start, noise as large as the process around
        its mean: under the prior a likelihood that is not log-concave would be met where it is flat.
        """
        with torch.no_grad():
            if self.answer is None:
                self.answer = self.module.by_sites(self.process, self.name)
            if sites is None:
                prior = self.answer(None).variance
                noise = prior.mean(-1, keepdim=True).clamp(min=torch.finfo(prior.dtype).tiny).expand(prior.shape)
                sites = Sites(self.process.x, 1 / noise, torch.zeros_like(noise))
            posterior = self.answer(sites)
            return posterior, (posterior.mean, posterior.variance)


def settle(
    reader: Reader,
    readings: Sequence[SiteReading],
    marginals: dict[str, Marginal],
    most: int,
    tolerance: float,
) -> None:
    """Update sites until they stay, GP sites that meet one after the other, and none so that the bound falls.

    Gradients pass through the last update.

    :param marginals: of all GP sites; those of ``readings`` are kept up to date.
    :param most: how many updates at most.
    :param tolerance: updates end when none moves a marginal by more than this, in standard deviations.
    """
    trained = torch.is_grad_enabled()
    if all(reading.direct and not _meets_another(reader, reading, readings) for reading in readings):
        most = 1
    elif all(reading.quadratic for reading in readings) and _solve(reader, readings, marginals, tolerance):
        for reading in readings if trained else ():  # once more, for the gradient
            reading.sites = _target(reader, reading, marginals)
        return
    best, patience = math.inf, _PATIENCE
    for i in range(most):
        last = i + 1 == most
        with torch.set_grad_enabled(trained and last):
            for reading in readings:
                _update(reader, reading, marginals, not last or reading is not readings[-1], trained or tolerance)
        change = max(reading.change for reading in readings)
        best, patience = (change, _PATIENCE) if change < 0.95 * best else (best, patience - 1)
        if not last and (patience == 0 or all(r.change <= tolerance or r.stuck for r in readings)):
            for reading in readings if trained else ():  # once more, for the gradient
                _update(reader, reading, marginals, reading is not readings[-1], trained)
            return


@torch.no_grad()
def _solve(reader: Reader, readings: Sequence[SiteReading], marginals: dict[str, Marginal], tolerance: float) -> bool:
    """The sites of GP sites and outputs that meet in Gaussian densities, at the optimum of a mean field.

    Its precisions are constants, and its means solve a linear system: that of the fixed point, by Anderson's mixing of
    all iterates (1965), which on linear maps is GMRES.

    :returns: whether they were found: not if the precisions of one depend on the others, as in a product of functions.
    """
    # Tight in training, too: the bound falls with the square of what is missing, times its precisions.
    tolerance = max(min(tolerance, 1e-5), 1e-6 if marginals[readings[0].name][0].dtype == torch.float64 else 1e-3)
    iterates: list[Tensor] = []
    residuals: list[Tensor] = []
    precisions: list[Tensor] = []
    for reading in readings:
        target = _target(reader, reading, marginals)
        reading.sites = Sites(
            target.inputs, target.precision, target.linear if reading.unread else reading.sites.linear
        )
        reading.unread = False
        precisions.append(target.precision)
    for _ in range(_MOST):
        for reading in readings:
            marginals[reading.name] = reading.marginal()
        targets = [_target(reader, reading, marginals) for reading in readings]
        if not all(torch.allclose(target.precision, p, rtol=1e-6) for target, p in zip(targets, precisions)):
            return False
        sizes = [marginals[reading.name][1].clamp(min=0).sqrt() for reading in readings]
        now = torch.cat([(r.sites.linear * size).flatten() for r, size in zip(readings, sizes)])
        away = torch.cat([(target.linear * size).flatten() for target, size in zip(targets, sizes)]) - now
        change = float(away.abs().max())
        for reading in readings:
            reading.change = change
        if change <= tolerance:
            return True
        iterates, residuals = [*iterates[-_DEPTH:], now], [*residuals[-_DEPTH:], away]
        new = now + away
        if len(iterates) > 1:
            moved = torch.stack([now - one for one in iterates[:-1]], -1)
            turned = torch.stack([away - one for one in residuals[:-1]], -1)
            weights = torch.linalg.lstsq(turned, away[:, None], driver="gelsd" if away.device.type == "cpu" else None)
            new = new - ((moved + turned) @ weights.solution)[:, 0]
        parts = new.split([reading.sites.linear.numel() for reading in readings])
        for reading, part, size, target in zip(readings, parts, sizes, targets):
            linear = part.reshape(size.shape) / size.clamp(min=torch.finfo(size.dtype).tiny)
            reading.sites = Sites(reading.process.x, target.precision, linear)
    return False


def _target(reader: Reader, reading: SiteReading, marginals: Mapping[str, Marginal]) -> Sites:
    """The sites that a quadratic ℓ has where the marginals are."""
    prior_mean = reading.process.mean
    mean, variance = (prior_mean, torch.zeros_like(prior_mean)) if reading.direct else marginals[reading.name]
    found = reader.expect(reading.name, {**marginals, reading.name: (mean, variance)}, True)
    reading.truncated = _negative(found)
    return reading.expanded(found, mean - prior_mean)


def _meets_another(reader: Reader, reading: SiteReading, readings: Sequence[SiteReading]) -> bool:
    return bool(reader.meeting(reading.name) & {other.name for other in readings})


def _update(
    reader: Reader, reading: SiteReading, marginals: dict[str, Marginal], show: bool, always: Union[bool, float]
) -> None:
    """Update one GP site's sites.

    :param show: whether its marginals are asked for later.
    :param always: whether to move however little; or what moves, in standard deviations, are not worth it.
    """
    if reading.direct:
        _read_at_once(reader, reading, marginals, show)
        return
    prior_mean = reading.process.mean
    mean, variance = marginals[reading.name]
    before = reading.change
    found, reading.change = _aimed(reader, reading, marginals)
    full = 1.0 if reading.quadratic else reading.module.rate

    def proposed() -> Sites:
        curvature = (-found.second).clamp(min=0)
        away = mean - prior_mean
        sites = update(reading.sites, found.first, curvature, (away, variance), full * reading.pace)
        return reading.held(sites, (mean, variance))

    reading.truncated = _negative(found)
    if always is not True and reading.change <= always:
        return
    step = reading.change * full * reading.pace
    if step <= _SMALL or (step <= _LARGE and reading.change <= 1.05 * before):
        reading.sites, reading.unread, reading.pace = proposed(), False, min(1.0, 1.1 * reading.pace)
        if show:
            marginals[reading.name] = reading.marginal()
        return
    # The update may overshoot. What was kept may be of an earlier step: look at the posterior as it is now.
    posterior, now = reading.look()
    if marginals[reading.name] is not now:
        mean, variance = marginals[reading.name] = now
        found = _expect(reader, reading, marginals)
    start, bound = reading.sites, float((found.value - posterior.kl.sum()).detach())
    slack = (1e-6 if mean.dtype == torch.float64 else 1e-5) * (1 + abs(bound))
    if isinstance(reading.module, ProjectedGP):  # the sites of a free q are not quite the best ones for projected data
        slack = 0.01 * (1 + abs(bound))
    lost = not bound > -_WIDE * mean.numel()  # so far off that any step raises the bound
    for _ in range(_ATTEMPTS):
        sites = _at_modes(reader, reading, marginals) if lost else proposed()
        posterior, now = reading.posterior(_detached(sites))
        moved = {**marginals, reading.name: now}
        with torch.no_grad():
            value = float(_expect(reader, reading, moved).value - posterior.kl.sum())
        if value >= (0.9 * bound if lost else bound - slack) or not math.isfinite(bound):
            reading.move(sites, posterior, now)
            marginals[reading.name] = now
            reading.pace = min(1.0, 1.5 * reading.pace)
            return
        if not lost:
            reading.halved += 1
            reading.pace = max(reading.pace / 2, _SLOWEST)
        lost = False
    reading.sites, reading.stuck = start, True


def _read_at_once(reader: Reader, reading: SiteReading, marginals: dict[str, Marginal], show: bool) -> None:
    """The sites of a quadratic ℓ: the same wherever it is expanded."""
    sites = _target(reader, reading, marginals)
    reading.alone, reading.change = not reader.meeting(reading.name), 0.0
    if not reading.alone:
        mean, variance = marginals[reading.name]
        reading.change = float(_distance(reading.sites, sites, mean, variance, reading.process.mean))
    reading.sites, reading.unread = sites, False
    if show and not reading.alone:
        marginals[reading.name] = reading.marginal()


def _aimed(reader: Reader, reading: SiteReading, marginals: Mapping[str, Marginal]) -> tuple[Expectation, float]:
    """As :func:`_expect`, and how far sites are from those that it leads to, at one look at numbers."""
    mean, variance = marginals[reading.name]
    prior_mean = reading.process.mean
    for at_mean in (reading.at_mean, True):
        found = _expect_at(reader, reading, marginals, at_mean)
        target = reading.held(reading.expanded(found, mean - prior_mean), (mean, variance))
        away = _distance(reading.sites, target, mean, variance, prior_mean)
        change, fit = torch.stack([away, found.value.detach().isfinite().to(away)]).tolist()
        if fit or at_mean:
            break
    return found, change


def _expect(reader: Reader, reading: SiteReading, marginals: Mapping[str, Marginal]) -> Expectation:
    found = _expect_at(reader, reading, marginals, reading.at_mean)
    if reading.at_mean or bool(found.value.isfinite()):
        return found
    return _expect_at(reader, reading, marginals, True)  # expectations overflow where the prior is wide


def _expect_at(reader: Reader, reading: SiteReading, marginals: Mapping[str, Marginal], at_mean: bool) -> Expectation:
    trained = torch.is_grad_enabled()
    if reading.expected is not None and not trained:  # the next update begins where the last attempt was
        where, how, found = reading.expected
        if how == at_mean and all(where.get(name) is marginal for name, marginal in marginals.items()):
            return found
    detached = {name: (mean.detach(), variance.detach()) for name, (mean, variance) in marginals.items()}
    found = reader.expect(reading.name, detached, at_mean)
    reading.expected = None if trained else (dict(marginals), at_mean, found)
    return found


@torch.no_grad()
def _at_modes(reader: Reader, reading: SiteReading, marginals: Mapping[str, Marginal]) -> Sites:
    """ℓ expanded at each row's own mode, or towards it: by Newton's method, kept between what has proved too low and
    too high, in strides that grow until both are known.

    Where the posterior is so wide that expectations are of its farthest tail, as under an exponential link.
    """
    prior_mean = reading.process.mean
    f, point, tiny = prior_mean, torch.zeros_like(prior_mean), torch.finfo(prior_mean.dtype).tiny
    low, high = torch.full_like(f, -math.inf), torch.full_like(f, math.inf)
    for i in range(_NEWTON):
        found = reader.expect(reading.name, {**marginals, reading.name: (f, point)}, True)
        if i + 1 == _NEWTON:
            break
        precision = (-found.second).clamp(min=tiny)
        low, high = torch.where(found.first > 0, f, low), torch.where(found.first < 0, f, high)
        stride = 2.0**i / 4
        moved = f + (found.first / precision).nan_to_num(0.0).clamp(-stride, stride)
        between = (moved > low) & (moved < high)
        f = torch.where(between | ~(low.isfinite() & high.isfinite()), moved, (low + high) / 2)
    return reading.expanded(found, f - prior_mean, tiny)


def _negative(found: Expectation) -> Tensor:
    return (found.second > 1e-6 * found.second.abs().amax()).sum()  # beyond rounding


@torch.no_grad()
def _distance(sites: Sites, target: Sites, mean: Tensor, variance: Tensor, prior_mean: Tensor) -> Tensor:
    """How far sites are from others, each by itself: in standard deviations of the marginals' means, and as a share of
    their precisions.
    """
    away = mean - prior_mean
    pull = (target.linear - target.precision * away) - (sites.linear - sites.precision * away)
    tighter = (target.precision - sites.precision).abs() * variance
    return torch.maximum(pull.abs() * variance.clamp(min=0).sqrt(), tighter).nan_to_num(math.inf).max()


def _detached(sites: Sites) -> Sites:
    return Sites(sites.inputs, sites.precision.detach(), sites.linear.detach())
