"""The sites of expectation propagation, refined from their cavities."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor

from ..gaussians.sites import Sites, update
from ..numerics.linalg import NumericalWarning, over_upper, row_squares
from ..numerics.processes import Workers
from ..numerics.rows import Objects
from ..numerics.tilted import Tilted, tilted
from ..program.terms import Terms
from ..warned import Warned, warn_once
from .cavities import Cavity, cavity_of, is_valid, log_normaliser_of, parabola
from .site_runs import SiteRun

__all__ = ["Progress", "Refinement", "State"]

_SLOWEST = 1 / 64
_NEAR = 1.0  # standard deviations by which sites near their fixed point move at most
_NEAR_IF_EXACT = 0.05  # the same where one sweep ends there


@dataclass
class State:
    """q, its cavities and tilted distributions at the sites as they are.

    :param exact: where the likelihood is Gaussian, so that the site found is exact whatever the cavity.
    :param loc: q's mean.
    :param factor: of q's precision.
    :param log_normaliser: G(q) − G(p).
    """

    cavity: Cavity
    at: Tilted
    exact: Tensor
    loc: Tensor
    factor: Tensor
    log_normaliser: Tensor


@dataclass
class Progress:
    """How the updates of one GP site's sites go.

    :param sites: how many there are; ``skipped``, ``negative`` and ``cut`` as in ``ExpectationPropagation.status``.
    :param change: the last sweep's largest move, of exact sites too, in standard deviations.
    :param far: whether sites are too far from their fixed point for a gradient that supposes them there.
    :param moved: that of sites that are not exact, at the last sweep that was kept.
    :param pace: a share of the damping, which falls where updates go astray, and the most that it grows to again.
    :param start: the sites from which the last sweep started.
    :param seen: how many data came since the running sums were made anew.
    """

    sites: Any = 0
    skipped: Any = 0
    negative: Any = 0
    cut: int = 0
    change: float = math.nan
    far: bool = False
    moved: float = math.inf
    pace: tuple[float, float] = (1.0, 1.0)
    start: Optional[tuple[Tensor, Tensor]] = None
    seen: int = 0


class Refinement:
    """Refines the sites of GP sites, and remembers how that went.

    :param damping: the weight of a new site.
    :param power: α.
    :param num_nodes: of each one-dimensional integral.
    :param warned: what was warned of.
    """

    def __init__(self, damping: float, power: float, num_nodes: int, workers: Workers, warned: Warned) -> None:
        self.damping, self.power, self.num_nodes = damping, power, num_nodes
        self.workers, self.warned = workers, warned
        self.progress: dict[str, Progress] = {}
        self.calls: dict[str, tuple[Objects, Optional[Tensor], Tensor]] = {}  # SiteRun.of's ``last``

    @torch.no_grad()
    def state(self, run: SiteRun, terms: Terms) -> State:
        """q, its cavities and tilted distributions."""
        factor, loc, pull, cavity = self._posterior(run)
        residual, prior_mean = run.residual.detach(), run.prior_mean.detach()
        mean, variance = cavity.mean + prior_mean, cavity.variance + residual

        def log_density(f: Tensor) -> Tensor:
            return terms.log_density(run.name, f) if run.name in terms else torch.zeros_like(f)

        # A tilted distribution is near where the cavity times the site was, as a factor of f rather than of φᵀw:
        # τ = αν/(1 − ανd); and where a Gaussian likelihood's is, however far from the cavity.
        left = (1 - self.power * run.sites.precision * residual).clamp(min=1e-6)
        precision = (1 / variance + self.power * run.sites.precision / left).clamp(min=0.25 / variance)
        centre = prior_mean + (cavity.mean / variance + self.power * run.sites.linear / left) / precision
        top = mean
        for _ in range(2):  # in float32 rounding far from its top hides how a parabola bends: looked at near it again
            slope, curvature = parabola(log_density, top, run.spread)
            gaussian = 1 / variance + self.power * curvature
            top = top + (self.power * slope - (top - mean) / variance) / gaussian
        known = self._of(run).moved < 0.5 and run.index is None
        at = tilted(
            log_density,
            mean,
            variance,
            torch.where(curvature > 0, top, centre),
            torch.where(curvature > 0, gaussian, precision).rsqrt(),
            self.power,
            self.num_nodes,
            passes=1 if known else 5,
        )
        small = 1e-6 if mean.dtype == torch.float64 else 1e-2
        exact = (curvature > 0) & ((at.variance * gaussian - 1).abs() < small)
        exact = exact & ((at.mean - top).abs() < small * at.variance.sqrt())
        return State(cavity, at, exact, loc, factor, log_normaliser_of(factor, loc, pull))

    def _of(self, run: SiteRun) -> Progress:
        return self.progress.setdefault(run.name, Progress())

    def _sums(self, run: SiteRun, sites: Sites) -> tuple[Tensor, Tensor]:
        """I + Σ νφφᵀ and Σ bφ of all data, with these sites of the data given."""
        module, old = run.module, run.sites
        if run.index is None:
            gram, pull = self.workers.sum(*module.sums(sites.inputs, sites.precision, sites.linear))
        elif sites is old:
            gram, pull = module.gram, module.pull
        else:
            now = module.sums(sites.inputs, sites.precision, sites.linear)
            held = module.sums(old.inputs, old.precision, old.linear)
            gram, pull = self.workers.sum(now[0] - held[0], now[1] - held[1])
            gram, pull = module.gram + gram, module.pull + pull
        return gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), pull

    def _any(self, flag: Tensor) -> bool:
        """Whether a flag is true in any process."""
        return bool(self.workers.largest(flag.any().float()))

    def _posterior(self, run: SiteRun) -> tuple[Tensor, Tensor, Tensor, Cavity]:
        """The Cholesky factor of q's precision, q's mean, their product and the cavities."""
        gram, pull = self._sums(run, run.sites)
        factor, info = torch.linalg.cholesky_ex(gram)
        if self._any(info):
            # Without the negative sites q exists: test_negative_precisions_that_outweigh_the_rest_are_cut.
            self._of(run).cut += 1
            warn_once(
                self.warned,
                "negative sites dropped",
                run.name,
                f"expectation propagation at GP site {run.name!r} dropped sites of negative precision, with which q "
                "had no covariance: the likelihood is not log-concave, and the updates may not converge. Look at "
                "ep.status; lower damping (0.1) and power (0.5) help.",
                NumericalWarning,
                stacklevel=6,
            )
            run.sites = _without_negative(run.sites)
            if run.index is not None:
                module = run.module
                kept = _without_negative(Sites(module.rows, module.precision, module.linear))
                module.precision, module.linear = kept.precision, kept.linear
                self._resum(module)
            gram, pull = self._sums(run, run.sites)
            factor = torch.linalg.cholesky(gram)
        loc = torch.cholesky_solve(pull[..., None], factor)[..., 0]
        scaled = self.power * run.sites.precision, self.power * run.sites.linear
        return factor, loc, pull, cavity_of(run.phi.detach(), run.sites.inputs, *scaled, loc, factor)

    def _resum(self, module: Any) -> None:
        sums = module.sums(module.features_of(module.rows), module.precision, module.linear)
        module.gram, module.pull = self.workers.sum(*sums)

    @torch.no_grad()
    def refine(self, run: SiteRun, state: State) -> tuple[Sites, Progress]:
        """The refined sites, damped, and how that goes: nothing is kept."""
        cavity, at, progress = state.cavity, state.at, replace(self._of(run))
        residual, (mean, spread) = run.residual.detach(), cavity.marginal
        variance = cavity.variance + residual
        slope = (at.mean - cavity.mean - run.prior_mean.detach()) / variance  # a = ∂log Z/∂m⁻
        beta = (1 - at.variance / variance) / variance
        left = (residual + cavity.variance * at.variance / variance) / variance  # 1 − v⁻β, without cancellation
        precision = beta / left / self.power
        linear = (slope + cavity.mean * beta) / left / self.power
        usable = cavity.valid & precision.isfinite() & linear.isfinite()
        old = Sites(run.phi.detach(), run.sites.precision, run.sites.linear)
        # A site with whose neighbours there is no cavity goes, if it is negative; else it stays:
        # test_cavities_without_variance_are_skipped.
        precision = torch.where(usable, precision, old.precision.clamp(min=0))
        linear = torch.where(usable, linear, torch.where(old.precision < 0, 0.0, old.linear))
        gradient = linear - precision * mean
        new = update(old, gradient, precision, (mean, spread), self.damping * progress.pace[0], math.inf)
        new = _chosen(state.exact & usable, Sites(old.inputs, precision, linear), new)
        more = precision - old.precision
        moves = (more * spread).abs().maximum((gradient - old.linear + old.precision * mean).abs() * spread.sqrt())
        either = torch.stack([moves, torch.where(state.exact, 0.0, moves)]).flatten(1)
        told = either.amax(-1) if either.shape[-1] else either.new_zeros(2)
        told = torch.cat([told, (new.precision < 0).any().reshape(1).to(told)])
        progress.change, moved, has_negative = self.workers.largest(told).tolist()
        progress.far = moved > _NEAR or progress.change > max(moved, _NEAR_IF_EXACT)
        progress.skipped, progress.sites = (~usable).sum(), run.num
        if has_negative:
            new = self._within_bounds(run, old, new)
        progress.negative = (new.precision < 0).sum()
        if self.workers.num > 1:
            counts = progress.skipped.to(moves), progress.negative.to(moves), moves.new_tensor(float(run.num))
            progress.skipped, progress.negative, progress.sites = self.workers.sum(*counts)
        return self._careful(run, new, progress, moved), progress

    def _within_bounds(self, run: SiteRun, old: Sites, new: Sites) -> Sites:
        """New sites, those that lose precision less far if else q or cavities had no covariance: of likelihoods that
        are not log-concave, test_a_likelihood_far_from_log_concave_stays_bounded.
        """
        loses = new.precision < old.precision
        for share in (1.0, 0.25, 0.0625, 0.0):
            kept = torch.where(loses, share, 1.0)
            found = Sites(
                new.inputs,
                old.precision + kept * (new.precision - old.precision),
                old.linear + kept * (new.linear - old.linear),
            )
            factor, info = torch.linalg.cholesky_ex(self._sums(run, found)[0])
            spread = row_squares(over_upper(found.inputs, factor))
            valid = is_valid(1 - self.power * found.precision * spread, spread, found.inputs).all()
            if not self._any((info != 0).any() | ~valid):
                break
        return found

    @staticmethod
    def _careful(run: SiteRun, new: Sites, progress: Progress, moved: float) -> Sites:
        """The refined sites; or, if the last sweep led astray, those from which it started, to go slower from there:
        test_student_t_with_outliers. Mini-batches, between whose visits others' sites move, go on from where they are.
        """
        pace, most = progress.pace
        astray = moved > max(2 * progress.moved, 0.5)
        if run.index is not None or not astray:
            progress.pace = min(1.1 * pace, most), most
            if run.index is None:
                kept = run.in_order(run.sites.precision), run.in_order(run.sites.linear)
                progress.start, progress.moved = kept, moved
            return new
        slower = max(0.6 * pace, _SLOWEST)
        progress.pace, progress.moved = (slower, slower), math.inf
        if progress.start is None:
            return new
        precision, linear = progress.start
        progress.start = None
        numbers = slice(None) if run.order is None else run.order
        return Sites(new.inputs, precision[..., numbers], linear[..., numbers])

    @torch.no_grad()
    def keep(self, run: SiteRun, sites: Sites, progress: Progress) -> None:
        """Have the module keep the sites of the data given."""
        self.progress[run.name] = progress
        module, anchor = run.module, None if run.anchor is None else run.anchor.detach()
        rows, precision, linear = sites.inputs, sites.precision, sites.linear
        if run.index is None:
            module.keep_all(run.in_order(rows, -2), anchor, run.in_order(precision), run.in_order(linear))
            if self.workers.num > 1:
                module.gram, module.pull = self.workers.sum(module.gram, module.pull)
            if run.given is not None:
                module.fingerprints = run.in_order(run.given[1])
                self.calls[run.name] = run.given[0], run.order, module.fingerprints
        else:
            if module.empty:
                module.make_room(run.num, rows, anchor)
            gram, pull = self.workers.sum(*module.keep_some(run.index, rows, precision, linear))
            module.gram, module.pull = module.gram + gram, module.pull + pull
            progress.seen += rows.shape[-2]
            if progress.seen >= run.num:  # rounding errors of the running sums
                progress.seen = 0
                self._resum(module)
        run.sites = sites


def _chosen(where: Tensor, one: Sites, other: Sites) -> Sites:
    precision = torch.where(where, one.precision, other.precision)
    return Sites(other.inputs, precision, torch.where(where, one.linear, other.linear))


def _without_negative(sites: Sites) -> Sites:
    return _chosen(sites.precision < 0, Sites.none(sites.inputs, sites.precision.shape[:-1]), sites)
