"""The sites of expectation propagation, refined from their cavities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..approximations.expectation import ExpectationGP
from ..numerics.linalg import NumericalWarning, cholesky, over_upper, row_squares
from ..numerics.tilted import Tilted, tilted
from ..program.terms import Terms
from ..warned import Warned, warn_once
from .cavities import Cavity, cavity_of, is_valid, log_normaliser_of, parabola
from .distributed import Workers
from .site_runs import SiteRun

__all__ = ["Move", "NoFactorError", "Pace", "Refinement", "State", "Status"]


class NoFactorError(Exception):
    """A matrix that runs of GP sites are made of has no Cholesky factor with the first jitter."""


@dataclass
class State:
    """q, its cavities and tilted distributions at the sites as they are."""

    cavity: Cavity
    at: Tilted
    gaussian: Tensor  # where the likelihood is one, so that the site found is exact whatever the cavity
    loc: Tensor  # q's mean
    factor: Tensor  # of q's precision
    log_normaliser: Tensor  # G(q) − G(p)


@dataclass
class Move:
    """Where sites are refined to, damped, and what is to be known of that.

    :param more: what is added to their precisions.
    :param shift: to their linear terms.
    :param sizes: of each datum's move, in standard deviations, ``(B,)``; 0 where its site is exact.
    :param told: the largest in any process of: whether precisions become negative, the sizes, and those of the data's
        last visits.
    """

    more: Tensor
    shift: Tensor
    sizes: Tensor
    told: Tensor


_SLOWEST = 1 / 64


@dataclass
class Pace:
    """A share of the damping's ρ, which falls where updates go astray: with likelihoods that are not log-concave.

    :param change: the last sweep's largest move, and the sites from which it started.
    :param moves: of each datum's site at its last visit in a mini-batch.
    """

    now: float = 1.0
    ceiling: float = 1.0
    change: float = math.inf
    start: Optional[tuple[Tensor, Tensor]] = None
    moves: Optional[Tensor] = None


@dataclass
class Status:
    """Of one GP site's last sweep; in tensors, read when asked for."""

    sites: Any = 0
    skipped: Any = 0
    negative: Any = 0
    cut: int = 0
    cuts_seen: int = 0
    change: Any = math.nan


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
        self.paces: dict[str, Pace] = {}
        self.status: dict[str, Status] = {}
        self.seen: dict[str, int] = {}  # data since the running sums were made anew
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def state(self, run: SiteRun, terms: Terms, keep: bool) -> State:
        """q, its cavities and tilted distributions.

        :param keep: whether sites are going to be refined: those without which cavities exist are weakened.
        """
        for share in (0.5, 0.5, 0.5, 0.0, None):
            factor, loc, pull, cavity, invalid = self._posterior(run)
            # Other data's negative sites have grown since these were refined.
            if not keep or share is None or not invalid:
                break
            self.status.setdefault(run.name, Status()).cut += 1
            self._weaken(run, share)
        variance = cavity.variance + run.residual.detach()
        # The likelihood as the last tilted distribution showed it, and the cavity: near the tilted distribution.
        weight, tilt = self._seen_factor(run)
        precision = (1 / variance + weight).clamp(min=0.25 / variance)
        centre = (cavity.mean / variance + tilt) / precision

        def log_density(f: Tensor) -> Tensor:
            return terms.log_density(run.name, f) if run.name in terms else torch.zeros_like(f)

        prior_mean = run.prior_mean.detach()
        mean = cavity.mean + prior_mean
        slope, curvature, gaussian = parabola(log_density, mean, run.spread)
        exact = 1 / variance + self.power * curvature
        at = tilted(
            log_density,
            mean,
            variance,
            torch.where(gaussian, mean + self.power * slope / exact, centre + prior_mean),
            torch.where(gaussian, exact, precision).rsqrt(),
            self.power,
            self.num_nodes,
            self._passes(run),
        )
        found = 1 / at.variance - 1 / variance
        drawn = (at.mean - prior_mean) / at.variance - cavity.mean / variance
        usable = found.isfinite() & drawn.isfinite()
        if keep:
            self._remember_factor(run, torch.where(usable, found, 0.0), torch.where(usable, drawn, 0.0))
        return State(cavity, at, gaussian, loc, factor, log_normaliser_of(factor, loc, pull))

    def _passes(self, run: SiteRun) -> int:
        """How often an integral's nodes are placed: as many times as they may have to close in."""
        if run.index is not None:
            return 5
        if run.name not in self.factors:
            return 7
        return 1 if self.paces.setdefault(run.name, Pace()).change < 0.5 else 3

    def _seen_factor(self, run: SiteRun) -> tuple[Tensor, Tensor]:
        """The Gaussian factors of f − μ that tilted distributions were to their cavities; 0 at first."""
        if run.name not in self.factors:
            none = torch.zeros_like(run.prior_mean)
            return none, none
        weight, tilt = self.factors[run.name]
        return run.as_given(weight), run.as_given(tilt)

    def _remember_factor(self, run: SiteRun, *factor: Tensor) -> None:
        if run.index is None:
            self.factors[run.name] = run.in_order(factor[0]), run.in_order(factor[1])
            return
        if run.name not in self.factors:
            none = run.prior_mean.new_zeros(*run.prior_mean.shape[:-1], run.num)
            self.factors[run.name] = none, none.clone()
        for kept, new in zip(self.factors[run.name], factor):
            kept[..., run.index] = new

    def _posterior(self, run: SiteRun) -> tuple[Tensor, Tensor, Tensor, Cavity, bool]:
        """The Cholesky factor of q's precision, q's mean, their product, the cavities, and whether some are none.

        :raises NoFactorError: if the run itself is not fit.
        """
        module = run.module
        if run.index is None:
            gram, pull = self.workers.sum(*module.sums(run.rows, run.precision, run.linear))
        else:
            gram, pull = module.gram, module.pull
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        factor, info = torch.linalg.cholesky_ex(gram + eye)
        loc, cavity = self._cavities(run, factor, pull)
        failed, invalid, *unfit = self._which(info, ~cavity.valid, *run.flags)
        if any(unfit):
            raise NoFactorError
        if failed:
            # Negative precisions of some sites outweigh the rest: without these sites q exists.
            self.status.setdefault(run.name, Status()).cut += 1
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
            gram, pull = self._weaken(run, 0.0)
            factor = cholesky(gram + eye, 0.0, f"q's precision at site {run.name!r}")
            loc, cavity = self._cavities(run, factor, pull)
            (invalid,) = self._which(~cavity.valid)
        return factor, loc, pull, cavity, invalid

    def _cavities(self, run: SiteRun, factor: Tensor, pull: Tensor) -> tuple[Tensor, Cavity]:
        """q's mean, and the cavities."""
        loc = torch.cholesky_solve(pull[..., None], factor)[..., 0]
        sites = self.power * run.precision, self.power * run.linear
        return loc, cavity_of(run.phi.detach(), run.rows, *sites, loc, factor)

    def _weaken(self, run: SiteRun, share: float) -> tuple[Tensor, Tensor]:
        """Leave this share of all sites of negative precision; Σ νφφᵀ and Σ bφ then."""
        module = run.module
        run.precision, run.linear = _less_negative(run.precision, run.linear, share)
        if run.index is None:
            gram, pull = self.workers.sum(*module.sums(run.rows, run.precision, run.linear))
            return gram, pull
        module.precision, module.linear = _less_negative(module.precision, module.linear, share)
        return self._resum(module)

    def _resum(self, module: ExpectationGP) -> tuple[Tensor, Tensor]:
        phi = module.features_of(module.rows)
        module.gram, module.pull = self.workers.sum(*module.sums(phi, module.precision, module.linear))
        return module.gram, module.pull

    @torch.no_grad()
    def propose(self, run: SiteRun, state: State) -> Move:
        """The refined sites, damped: nothing is read back."""
        cavity, at = state.cavity, state.at
        residual = run.residual.detach()
        variance = cavity.variance + residual
        slope = (at.mean - cavity.mean - run.prior_mean.detach()) / variance  # ∂log Z/∂m
        beta = (1 - at.variance / variance) / variance
        left = (residual + cavity.variance * at.variance / variance) / variance  # 1 − v⁻β, without cancellation
        precision = beta / left / self.power
        linear = (slope + cavity.mean * beta) / left / self.power
        usable = cavity.valid & precision.isfinite() & linear.isfinite()
        more = torch.where(usable, precision - run.precision, 0.0)
        shift = torch.where(usable, linear - run.linear, 0.0)
        mean, spread = cavity.marginal[0], cavity.marginal[1].clamp(min=0).sqrt()
        pace = self.paces.setdefault(run.name, Pace())
        # Each site by itself may at most double its marginal's variance, and move its mean by 3 standard deviations.
        tiny = torch.finfo(spread.dtype).tiny
        down = (-more * spread.square()).clamp(min=tiny)
        far = ((shift - more * mean) * spread).abs() - 3 * more * spread.square()
        rate = (self.damping * pace.now * torch.ones_like(more)).minimum(0.5 / down)
        rate = rate.minimum(3 / far.clamp(min=tiny))
        rate = torch.where(state.gaussian & usable, 1.0, rate)
        status = self.status.setdefault(run.name, Status())
        status.sites = run.num
        status.skipped = (~usable).sum()
        moves = torch.maximum((more * spread.square()).abs(), ((shift - more * mean) * spread).abs())
        status.change = self.workers.largest(_most(moves))
        # Sites that are exact may move by as much as they like.
        moves = torch.where(state.gaussian, 0.0, moves).reshape(-1, moves.shape[-1]).amax(0)
        more, shift = rate * more, rate * shift
        told = [(run.precision + more < 0).any().to(moves), _most(moves)]
        if run.index is not None:
            if pace.moves is None or pace.moves.shape[-1] != run.num:
                pace.moves = moves.new_full((run.num,), math.inf)
            told.append(pace.moves[run.index].amax())
        return Move(more, shift, moves, self.workers.largest(torch.stack(told)))

    @torch.no_grad()
    def accept(self, run: SiteRun, move: Move, told: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The sites to be kept.

        :param told: the numbers of the move's.
        """
        has_negative, change, *visited = told
        more, shift, sizes = move.more, move.shift, move.sizes
        new = self._valid(run, more, shift) if has_negative else (run.precision + more, run.linear + shift)
        status = self.status[run.name]
        status.negative = (new[0] < 0).sum()
        if self.workers.num > 1:
            counts = status.skipped.to(sizes), status.negative.to(sizes), sizes.new_tensor(float(run.num))
            status.skipped, status.negative, status.sites = self.workers.sum(*counts)
        before = visited[0] if visited else self.paces[run.name].change
        return self._careful(run, *new, sizes, change, before, cut=status.cut > status.cuts_seen)

    @torch.no_grad()
    def _valid(self, run: SiteRun, more: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The sites moved by ``more`` and ``shift``, those that lose precision less far if else q or the cavities of
        the data given had no covariance.
        """
        phi = run.phi.detach()
        held, _ = run.module.sums(run.rows, run.precision, run.linear)
        share = more.new_ones(*more.shape[:-1], 1)
        for _ in range(8):
            step = torch.where(more < 0, share, 1.0)
            precision, linear = run.precision + step * more, run.linear + step * shift
            gram, _ = run.module.sums(phi, precision, linear)
            if run.index is None:
                (gram,) = self.workers.sum(gram)
            else:
                gram = run.module.gram + self.workers.sum(gram - held)[0]
            eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            factor, info = torch.linalg.cholesky_ex(gram + eye)
            spread = row_squares(over_upper(phi, factor))
            ok = (info == 0)[..., None] & is_valid(1 - self.power * precision * spread, spread, phi).all(-1, True)
            if not any(self._which(~ok)):
                break
            share = torch.where(ok, share, share / 4)
        else:
            up = more.clamp(min=0)
            return run.precision + up, run.linear + torch.where(more < 0, 0.0, shift)
        return precision, linear

    def _which(self, *flags: Tensor) -> list[bool]:
        """Of each of some flags, whether any is true in any process; at one look at numbers."""
        found = self.workers.largest(torch.stack([flag.any() for flag in flags]).float())
        return [bool(value) for value in found.tolist()]

    def _careful(
        self, run: SiteRun, precision: Tensor, linear: Tensor, moves: Tensor, change: float, before: float, cut: bool
    ) -> tuple[Tensor, Tensor]:
        """The refined sites; or, if the last sweep led astray, those from which it started, to go slower from there.

        Mini-batches, whose data have others' visits since their own last one, go on from where they are.

        :param moves: of each site given, ``(B,)``.
        :param change: the largest of them, in any process.
        :param before: that of the last sweep, or of these data's last visits.
        """
        pace, status = self.paces[run.name], self.status[run.name]
        start, status.cuts_seen = pace.start, status.cut
        if run.index is not None:
            assert pace.moves is not None
            pace.moves[run.index] = moves
        astray = cut or change > max(2 * before, 0.5)
        if start is not None and astray and run.index is None:
            pace.ceiling = pace.now = max(0.6 * pace.now, _SLOWEST)
            pace.start, pace.change = None, math.inf
            return run.as_given(start[0]), run.as_given(start[1])
        slower = cut or (astray and run.index is not None)
        pace.now = max(0.6 * pace.now, _SLOWEST) if slower else min(1.1 * pace.now, pace.ceiling)
        if run.index is not None:
            pace.start, pace.change = None, math.inf
        elif not astray:
            pace.start, pace.change = (run.in_order(run.precision), run.in_order(run.linear)), change
        return precision, linear

    @torch.no_grad()
    def keep(self, run: SiteRun, precision: Tensor, linear: Tensor) -> None:
        """Have the module keep the sites of the data given."""
        module, rows = run.module, run.phi.detach()
        anchor = None if run.anchor is None else run.anchor.detach()
        if run.index is None:
            module.keep_all(run.in_order(rows, -2), anchor, run.in_order(precision), run.in_order(linear))
            if self.workers.num > 1:
                module.gram, module.pull = self.workers.sum(module.gram, module.pull)
        else:
            if module.empty:
                module.make_room(run.num, rows, anchor)
            gram, pull = self.workers.sum(*module.keep_some(run.index, rows, precision, linear))
            module.gram, module.pull = module.gram + gram, module.pull + pull
            self.seen[run.name] = self.seen.get(run.name, 0) + rows.shape[-2]
            if self.seen[run.name] >= run.num:  # rounding errors of the running sums
                self.seen[run.name] = 0
                self._resum(module)
        run.rows, run.precision, run.linear = rows, precision, linear


def _most(moves: Tensor) -> Tensor:
    return moves.amax() if moves.numel() else moves.sum()


def _less_negative(precision: Tensor, linear: Tensor, share: float) -> tuple[Tensor, Tensor]:
    left = torch.where(precision < 0, share, 1.0)
    return left * precision, left * linear
