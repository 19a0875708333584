"""The Gaussian sites of families on sites while they are read off a model's densities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

import torch
from torch import Tensor

from ..gaussians.sites import KeptSites, Sites, update
from ..numerics.decisions import decided
from ..numerics.linalg import MAPPED
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
    """The Gaussian sites of one GP site while they are read; its module is a SiteGP, or what absorb has for it.

    The likelihood ℓ may be ``quadratic`` in each value. If no outputs meet in a term it is ``direct``: one reading
    gives the best sites, others' posteriors as they are. If no other GP sites do it is ``alone``: sites are ℓ itself.
    """

    def __init__(self, name: str, process: GaussianProcess, module: Any, reader: Reader) -> None:
        self.name, self.process, self.module = name, process, module
        found = reader.found
        self.quadratic, self.direct = found.gps[name].is_quadratic, found.gps[name].is_direct
        self.alone = found.is_alone(name)
        # ℓ that is quadratic where others are held has sites that no damping brings nearer.
        self.rate = 1.0 if self.quadratic else module.rate
        kept: KeptSites = module.sites
        self.unread = kept.inputs.shape != process.x.shape
        known = Sites(process.x, kept.precision, kept.linear)
        self.sites = Sites.none(process.x, process.batch_shape) if self.unread else known
        self.truncated = kept.truncated  # negative curvatures, cut to 0
        self.change: Any = math.inf  # that the last update would have made of a marginal, in standard deviations
        self.moves = torch.zeros_like(self.sites.precision)[None]  # of that update, each row's
        # A share of the rate; updates that were cut since they lowered the bound.
        self.pace, self.halved = torch.ones_like(kept.progress["pace"]), 0
        # Of a pass over all rows: the posterior of the sites as they are, with its marginals.
        self._found: Optional[SparsePosterior] = None
        self._at: Optional[Marginal] = None

    def resume(self, same: bool) -> None:
        """Go on where training is: its pace, and the marginals that the last step had, if it was at the same rows."""
        progress = self.module.sites.progress
        if not self.unread:
            known = progress["mean"], progress["variance"]
            self.pace = torch.as_tensor(progress["pace"])
            self._at = known if same and known[0] is not None else None

    @torch.no_grad()
    def look(self) -> tuple[SparsePosterior, Marginal]:
        """The posterior of the sites as they are, and its marginals; the same again until there are other sites."""
        if self._found is None:
            start = self.sites.detached()
            if self.unread:
                # Noise as large as the process around its mean: under the prior a likelihood that is not log-concave
                # would be met where it is flat (test_a_scale_that_grows_with_f_is_met_near_the_mean).
                prior = self.process.variance
                noise = prior.mean(-1, keepdim=True).clamp(min=torch.finfo(prior.dtype).tiny).expand(prior.shape)
                start = Sites(self.process.x, 1 / noise, torch.zeros_like(noise))
            self._found, self._at = self.posterior(start)
        return self._found, self._at  # type: ignore[return-value]

    @property
    def marginal(self) -> Marginal:
        """Where ℓ is expanded."""
        if self.alone:  # it is the same wherever that is
            return self.process.mean.detach(), self.process.variance.detach()
        return self._at or self.look()[1]

    def move(self, sites: Sites, found: Optional[SparsePosterior] = None, at: Optional[Marginal] = None) -> None:
        """Have these sites; their posterior and its marginals may be known."""
        # What was known goes before the next is made: of projections of data each holds a Φ of its own.
        self.sites, self.unread, self._found, self._at = sites, False, found, at

    def expanded(self, found: Expectation, away: Tensor, least: float = 0.0) -> Sites:
        """The sites of ℓ expanded at function values so far from the prior's mean, of at least this precision."""
        # λ = −E[ℓ''] and λ(z − μ) = E[ℓ'] + λ(m − μ): Khan and Lin, 2017, eq. 10
        precision = (-found.second).clamp(min=least)
        return Sites(self.process.x, precision, found.first + precision * away, self.alone)

    def damped(self, found: Expectation) -> Sites:
        """A damped update, as far as the module takes it."""
        (mean, variance), old = self.marginal, self.sites.detached()
        relative = mean - self.process.mean, variance
        sites = update(old, found.first, (-found.second).clamp(min=0), relative, self.rate * self.pace)
        return self.module.limited(sites, old, relative)

    def end(self, keeps: bool) -> None:
        """Let go of what is larger than the sites, which are read; the module may keep them."""
        self._found = self._at = None
        vars(self).pop("_answer", None)
        kept = self.module.sites
        # What torch.func makes is of its transform, and nothing after it: test_forward_mode.py::test_posteriors.
        if keeps and not torch._C._are_functorch_transforms_active():
            kept.keep(self.sites, self.truncated)
            kept.progress |= {"pace": self.pace, "halved": kept.progress["halved"] + self.halved}

    @cached_property
    def _answer(self) -> Callable[[Sites], SparsePosterior]:
        """What gives posteriors, of a pass over all rows."""
        return self.module.by_sites(self.process, self.name)  # type: ignore[no-any-return]

    @torch.no_grad()
    def posterior(self, sites: Sites) -> tuple[SparsePosterior, Marginal]:
        """The posterior of these sites, and its marginals."""
        posterior = self._answer(sites)
        return posterior, (posterior.mean, posterior.variance)


@dataclass(eq=False)
class Readings:
    """Readings of GP sites, which are updated one after the other, and none so that the bound falls."""

    reader: Reader
    readings: Sequence[SiteReading]
    others: Mapping[str, Marginal]  # of all other GP sites

    def settle(self, most: int, tolerance: float) -> None:
        """Update the sites until none moves a marginal by more standard deviations, or ``most`` times."""
        # Gradients pass through the last update.
        readings = self.readings
        names = {reading.name for reading in readings}
        meets = any(not reading.direct or self.reader.found.neighbours(reading.name) & names for reading in readings)
        if meets and all(reading.quadratic for reading in readings) and self._solve(tolerance):
            for reading in readings:  # once more, for the gradient
                reading.sites = self._target(reading)[1]
            return
        for left in reversed(range(most)):
            for reading in readings:
                self._update(reading, tolerance)
            # Draws that are made at once all have as many updates as one needs; a recorded step is a plain one.
            if left and not any(decided(reading.change > tolerance, MAPPED.get()) for reading in readings):
                return

    def _expect(self, reading: SiteReading, marginal: Marginal) -> Expectation:
        """E[ℓ] and its derivatives under a marginal of one GP site; other sites' marginals stay."""
        every = {other.name: other.marginal for other in self.readings if other is not reading}
        return self.reader.expect(reading.name, {**self.others, **every, reading.name: marginal})

    def _target(self, reading: SiteReading) -> tuple[Expectation, Sites]:
        """E[ℓ] and its derivatives, and the sites that these lead to, a ``change`` from those that there are."""
        mean, variance = marginal = reading.marginal
        found = self._expect(reading, marginal)
        away, old = mean - reading.process.mean, reading.sites
        target = reading.expanded(found, away)
        if not reading.quadratic:
            target = reading.module.limited(target, old, (away, variance))
        if reading.alone:
            reading.change = 0.0
            return found, target
        with torch.no_grad():
            # Δg √v and Δλ v, of each row alone, with g = λ(z − m)
            pull = (target.linear - target.precision * away) - (old.linear - old.precision * away)
            tighter = (target.precision - old.precision) * variance
            reading.moves = torch.stack([pull * variance.clamp(min=0).sqrt(), tighter])
            reading.change = reading.moves.abs().nan_to_num(math.inf).max()
        return found, target

    def _update(self, reading: SiteReading, least: float) -> None:
        """Update one GP site's sites, unless they move less than ``least`` standard deviations outside of training."""
        before, trained, (found, target) = reading.moves, torch.is_grad_enabled(), self._target(reading)
        if not trained:  # an update that takes back the last one overshot
            reading.pace = torch.where((reading.moves * before).sum() < 0, reading.pace / 2, reading.pace)
        # Negative curvatures, beyond rounding, of which sites cut to 0 are made.
        reading.truncated = (found.second > 1e-6 * found.second.abs().amax()).sum()
        if reading.direct:
            reading.move(target)
        elif trained or decided(reading.change > least, MAPPED.get()):
            if decided(reading.change <= _LARGE / (reading.rate * reading.pace)):
                reading.move(reading.damped(found))
                reading.pace = (1.1 * reading.pace).clamp(max=1.0)
            else:
                self._search(reading, found)

    def _search(self, reading: SiteReading, found: Expectation) -> None:
        """An update that may overshoot: as far as the bound E[ℓ] − KL does not fall."""
        known, (posterior, marginal) = reading.marginal, reading.look()
        if known is not marginal:  # what was kept may be of an earlier step
            found, _ = self._target(reading)
        bound = (found.value - posterior.kl.sum()).detach()
        slack = max(reading.module.slack, _ROUNDING[marginal[0].dtype]) * (1 + bound.abs())
        # Where the bound is lost, modes of rows raise it (test_exponential_links_under_wide_priors), but not by kinks.
        is_far = not decided(bound > -_WIDE * marginal[0].numel())
        for attempt in range(_ATTEMPTS):
            by_modes = is_far and not attempt
            sites = self._at_modes(reading) if by_modes else reading.damped(found)
            moved = reading.posterior(sites.detached())
            with torch.no_grad():
                value = self._expect(reading, moved[1]).value - moved[0].kl.sum()
            if decided((value >= bound + (slack if by_modes else -slack)) | ~bound.isfinite()):
                reading.move(sites, *moved)
                reading.pace = (1.5 * reading.pace).clamp(max=1.0)
                return
            reading.halved += 1
            reading.pace = (reading.pace / 2).clamp(min=_SLOWEST)

    @torch.no_grad()
    def _at_modes(self, reading: SiteReading) -> Sites:
        """ℓ expanded at each row's own mode, or towards it."""
        # Under an exponential link expectations under a wide posterior are of its farthest tail.
        mean, variance = reading.process.mean, reading.process.variance
        f, reach, tiny = mean, 1 + variance.sqrt() / 4, torch.finfo(mean.dtype).tiny
        near = 1e-4 * variance  # slopes and curvatures within a hundredth of the prior's deviation
        for _ in range(_NEWTON):
            found = self._expect(reading, (f, near))
            # f ← f − ℓ'/ℓ''
            move = (found.first / (-found.second).clamp(min=tiny)).nan_to_num(0.0)
            f = f + move.clamp(-reach, reach)
        return reading.expanded(self._expect(reading, (f, near)), f - mean, tiny)

    @torch.no_grad()
    def _solve(self, tolerance: float) -> bool:
        """Find the sites of GP sites and outputs that meet in Gaussian densities, at the optimum of a mean field.

        :returns: whether they were: not if the precisions of one depend on the others, as in a product of functions.
        """
        # Its means solve a linear system, by Anderson's mixing of all iterates (1965), which on linear maps is GMRES.
        readings = self.readings
        # Tight in training, too: the bound falls with the square of what is missing, times its precisions.
        tolerance = max(min(tolerance, 1e-5), _TIGHT[readings[0].process.x.dtype])
        steps: list[tuple[Tensor, Tensor]] = []  # residuals of iterates, and where they lead
        for reading, (_, first) in zip(readings, [self._target(reading) for reading in readings]):
            reading.move(Sites(first.inputs, first.precision, reading.sites.linear))
        for _ in range(_MOST):
            pairs = [(reading, self._target(reading)[1]) for reading in readings]
            near = [torch.isclose(found.precision, own.sites.precision, rtol=1e-6).all() for own, found in pairs]
            if not all(map(decided, near)):
                return False
            if all(decided(reading.change <= tolerance) for reading in readings):
                return True
            # b = λ(z − μ) has the fixed point b = T(b), T affine; in units of √v all rows count alike.
            sizes = torch.cat([reading.marginal[1].flatten() for reading in readings])
            sizes = sizes.clamp(min=torch.finfo(sizes.dtype).tiny).sqrt()
            now = torch.cat([reading.sites.linear.flatten() for reading in readings]) * sizes
            new = torch.cat([found.linear.flatten() for _, found in pairs]) * sizes
            steps = [*steps[-_DEPTH:], (new - now, new)]
            if len(steps) > 1:
                # The weights γ by which the residuals r − Σ γᵢ(r − rᵢ) are least give T(b) − Σ γᵢ(T(b) − T(bᵢ)).
                turned, moved = (torch.stack([part[-1] - each for each in part[:-1]], -1) for part in zip(*steps))
                new = new - moved @ (torch.linalg.pinv(turned) @ (new - now))
            parts = (new / sizes).split([found.linear.numel() for _, found in pairs])
            for (reading, found), part in zip(pairs, parts):
                reading.move(Sites(found.inputs, found.precision, part.reshape(found.linear.shape)))
        return False
