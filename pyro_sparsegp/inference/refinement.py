"""One GP site in a call of expectation propagation: its sites, their cavities, and how those refine these.

Equations are from Hernández-Lobato and Hernández-Lobato, 2016, with w = L⁻¹u for the inducing values u.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.on_sites import ExpectationGP
from ..gaussians.sites import Sites, cavity_of, is_valid, update
from ..numerics import linalg
from ..numerics.tilted import log_normaliser, tilted
from ..process import GaussianProcess
from ..program.reader import Terms
from ..program.structure import Depends
from ..warned import warn_once

_SLOWEST = 1 / 64
_NEAR = 1.0  # standard deviations by which sites near their fixed point move at most
_NEAR_IF_EXACT = 0.05  # the same where one sweep ends there


@dataclass
class Progress:
    """How the updates of one GP site's sites go; counts as in ``ExpectationPropagation.status``."""

    sites: Any = 0
    skipped: Any = 0
    negative: Any = 0
    cut: int = 0
    change: float = math.nan  # the last sweep's largest move, of exact sites too, in standard deviations
    far: bool = False  # whether sites are too far from their fixed point for a gradient that supposes them there
    moved: float = math.inf  # the move of sites that are not exact, at the last sweep that was kept
    pace: float = 1.0  # a share of the damping, which falls where updates go astray
    start: Any = None  # the precisions and pulls of the sites from which the last sweep started
    seen: int = 0  # data that came since the running sums were made anew


def turned(anchor: Tensor, loc: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """T = L⁻¹L₀ of an L that moves from L₀, with w = Tw₀ for the same u, where q(w₀) is held; and 0, with the gradient
    by T of E_q log p(u).
    """
    turn = linalg.solve_lower(anchor, anchor.detach())
    # E log N(u | 0, TTᵀ) is log|T| − ½(|Tm|² + tr TSTᵀ) + a constant: eq. 6's terms of the prior.
    squares = (turn @ loc[..., None]).square().sum((-2, -1)) + linalg.over_upper(turn, factor).square().sum((-2, -1))
    value = turn.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * squares
    return turn, value - value.detach()


class SiteRun:
    """One GP site in one run of the model on all data, and its sites as they are.

    After :meth:`look`: the cavities, the tilted distributions ``at`` them, where the likelihood is Gaussian, so that
    the site found is ``exact`` whatever the cavity; the factor of q's precision, q's mean, and G(q) − G(p).
    """

    def __init__(
        self, method: Any, name: str, process: GaussianProcess, scale: object, num: int, index: Optional[Tensor] = None
    ) -> None:
        if isinstance(scale, Tensor) or scale != 1:
            raise ValueError(
                f"GP site {name!r} is under poutine.scale, {scale}, and expectation propagation cannot scale a prior. "
                "Scale the likelihood's site alone, or the loss."
            )
        self.name, self.method, self.progress = name, method, method.progress.setdefault(name, Progress())
        self.num, self.index = num, index  # of all data; the row numbers of those given, if these are not all
        module: ExpectationGP = method.guide.module_of(name)
        self.module = module
        features = module.basis(process.kernel, process.jitter, name)
        # With their graphs: Φ, (..., B, M), L where the sites are about u = Lw, and μ.
        self.phi, self.anchor, self.prior_mean = linalg.side_by_side(features(process.x)), features.anchor, process.mean
        prior = process.variance
        self.spread = prior.detach().sqrt()
        # d = k(x, x) − φφᵀ, FITC's diagonal (eq. 1)
        self.residual = torch.maximum(prior - linalg.row_squares(self.phi), linalg.variance_floor(prior))
        kept = module.precision.shape[-1]
        if kept not in (0, num):
            raise ValueError(
                f"GP site {name!r} has sites of {kept} data, this call brings {num}. For a part of the data, "
                "give the plate their full number and row numbers, pyro.plate('data', N, subsample_size=B); "
                "for other data, make a new guide."
            )
        with torch.no_grad():
            none = torch.zeros_like(process.mean)
            self.sites = self.kept_sites() if kept else Sites(self.phi.detach(), none, none)

    def kept_sites(self) -> Sites:
        """The module's sites of the data given, at the features that they are about."""
        return Sites(self.phi.detach(), self.module.precision, self.module.linear)

    # q and its cavities.

    @torch.no_grad()
    def look(self, terms: Terms) -> None:
        """Find q, its cavities and tilted distributions at the sites as they are."""
        power = self.method.power
        self._find_posterior()
        scaled = power * self.sites.precision, power * self.sites.linear
        cavity = self.cavity = cavity_of(self.phi.detach(), self.sites.inputs, *scaled, self.loc, self.factor)
        residual, prior_mean = self.residual.detach(), self.prior_mean.detach()
        mean, variance = cavity.mean + prior_mean, cavity.variance + residual

        log_density = partial(terms.log_density, self.name)
        # Z = ∫ p(y | f)^α N(f | μ + m⁻, v⁻ + d) df, of which eq. 17 is the probit's. The tilted distribution is near
        # where the cavity times the site was, as a factor of f rather than of φᵀw:
        # τ = αν/(1 − ανd); and where a Gaussian likelihood's is, however far from the cavity.
        left = (1 - power * self.sites.precision * residual).clamp(min=1e-6)
        precision = (1 / variance + power * self.sites.precision / left).clamp(min=0.25 / variance)
        centre = prior_mean + (cavity.mean / variance + power * self.sites.linear / left) / precision
        top = mean
        for _ in range(2):  # in float32 rounding far from its top hides how a parabola bends: looked at near it again
            below, here, above = log_density(torch.stack([top - self.spread, top, top + self.spread]))
            slope, curvature = (above - below) / (2 * self.spread), (2 * here - below - above) / self.spread.square()
            gaussian = 1 / variance + power * curvature
            top = top + (power * slope - (top - mean) / variance) / gaussian
        at = self.at = tilted(
            log_density,
            mean,
            variance,
            torch.where(curvature > 0, top, centre),
            torch.where(curvature > 0, gaussian, precision).rsqrt(),
            power,
            self.method.num_nodes,
            passes=1 if self.progress.moved < 0.5 else 5,  # inf, of a part
        )
        small = 1e-6 if mean.dtype == torch.float64 else 1e-2
        exact = (curvature > 0) & ((at.variance * gaussian - 1).abs() < small)
        self.exact = exact & ((at.mean - top).abs() < small * at.variance.sqrt())

    def _sums(self, sites: Sites) -> tuple[Tensor, Tensor]:
        """P − I = Σ νφφᵀ and Σ bφ of all data, with these sites of the data given."""
        return tuple(self.method.workers.sum(*self.module.sums(sites.inputs, sites.precision, sites.linear)))  # type: ignore

    def _drop_negative(self) -> None:
        self.sites = _without_negative(self.sites)

    def _find_posterior(self) -> None:
        """q's mean, the factor of its precision and its log normaliser."""
        gram, pull = self._sums(self.sites)
        self.factor, info = torch.linalg.cholesky_ex(linalg.plus_one(gram))
        if self.method.workers.largest(info.any().float()):  # of any process
            # Without the negative sites q exists: test_negative_precisions_that_outweigh_the_rest_are_cut.
            self.progress.cut += 1
            warn_once(
                self.method.guide.warned,
                "negative sites dropped",
                self.name,
                f"expectation propagation at GP site {self.name!r} dropped sites of negative precision, which left q "
                "without a covariance: the likelihood is not log-concave, and the updates may not converge. Look at "
                "ep.status; lower damping (0.1) and power (0.5) help.",
                linalg.NumericalWarning,
                stacklevel=6,
            )
            self._drop_negative()
            gram, pull = self._sums(self.sites)
            self.factor = torch.linalg.cholesky(linalg.plus_one(gram))
        # Eq. 12 and 13 in w: S = P⁻¹ and m = P⁻¹Σ bφ.
        self.loc = torch.cholesky_solve(pull[..., None], self.factor)[..., 0]
        # G(q) − G(p) = ½(mᵀPm − log|P|): eq. 27 of q less that of N(0, I)
        half_log_det = self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self.log_normaliser = 0.5 * (self.loc * pull).sum(-1) - half_log_det

    # Refined sites.

    @torch.no_grad()
    def refine(self) -> None:
        """Have the module keep the refined sites, damped, of the data given. The cavities stay as they were."""
        cavity, at, power, workers = self.cavity, self.at, self.method.power, self.method.workers
        progress, residual, (mean, spread) = self.progress, self.residual.detach(), cavity.marginal
        variance = cavity.variance + residual
        # With a = ∂log Z/∂m⁻ and β = −∂²log Z/∂m⁻², the α and α² + αa/b of eq. 18 and 19, eq. 23 reads in w
        # αν = β/(1 − v⁻β) and αb = (a + m⁻β)/(1 − v⁻β). By the tilted moments
        # a = (E f − μ − m⁻)/(v⁻ + d), β = (1 − Var f/(v⁻ + d))/(v⁻ + d)
        # and 1 − v⁻β = (d + v⁻ Var f/(v⁻ + d))/(v⁻ + d), without cancellation.
        slope = (at.mean - cavity.mean - self.prior_mean.detach()) / variance
        beta = (1 - at.variance / variance) / variance
        left = (residual + cavity.variance * at.variance / variance) / variance
        precision = beta / left / power
        linear = (slope + cavity.mean * beta) / left / power
        usable = cavity.valid & precision.isfinite() & linear.isfinite()
        old = Sites(self.phi.detach(), self.sites.precision, self.sites.linear)
        # A site with whose neighbours there is no cavity goes, if it is negative; else it stays.
        precision = torch.where(usable, precision, old.precision.clamp(min=0))
        linear = torch.where(usable, linear, torch.where(old.precision < 0, 0.0, old.linear))
        # Eq. 25, but for sites of a Gaussian likelihood, which are exact whatever the cavity: test_two_sweeps.
        gradient = linear - precision * mean
        new = update(old, gradient, precision, (mean, spread), self.method.damping * progress.pace, math.inf)
        exact = self.exact & usable
        new = Sites(old.inputs, torch.where(exact, precision, new.precision), torch.where(exact, linear, new.linear))
        more = (precision - old.precision) * spread
        moves = more.abs().maximum((gradient - old.linear + old.precision * mean).abs() * spread.sqrt())
        told = torch.stack(
            [moves.max(), torch.where(self.exact, 0.0, moves).max(), (new.precision < 0).any().to(moves)]
        )
        progress.change, moved, has_negative = workers.largest(told).tolist()
        progress.far = moved > _NEAR or progress.change > max(moved, _NEAR_IF_EXACT)
        if has_negative:
            new = self._within_bounds(old, new)
        counts = (~usable).sum(), (new.precision < 0).sum(), moves.new_full((), self.num)
        progress.skipped, progress.negative, progress.sites = workers.sum(*(count.to(moves) for count in counts))
        self.keep(self._careful(new, moved))

    def keep(self, new: Sites) -> None:
        """Have the module keep sites of the data given."""
        self.module.gram, self.module.pull = self._sums(new)
        self.module.put(self.index, self.num, new, self.anchor)
        self.sites = new

    def _within_bounds(self, old: Sites, new: Sites) -> Sites:
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
            factor, info = torch.linalg.cholesky_ex(linalg.plus_one(self._sums(found)[0]))
            spread = linalg.row_squares(linalg.over_upper(found.inputs, factor))
            valid = is_valid(1 - self.method.power * found.precision * spread, spread, found.inputs).all()
            if not self.method.workers.largest(((info != 0).any() | ~valid).float()):
                break
        return found

    def _careful(self, new: Sites, moved: float) -> Sites:
        """The refined sites; or, if the last sweep led astray, the sites that it started from, to go slower from there:
        test_student_t_with_outliers.
        """
        progress = self.progress
        if not moved > max(2 * progress.moved, 0.5):
            progress.start, progress.moved = (self.sites.precision, self.sites.linear), moved
            return new
        progress.moved, progress.pace = math.inf, max(0.6 * progress.pace, _SLOWEST)
        return Sites(new.inputs, *progress.start)

    # The objective.

    def held_features(self) -> tuple[Tensor, Any]:
        """Features under which cavities are held, and what that adds to G(q), 0, with its gradient."""
        return self.phi, 0.0

    def log_z(self, terms: Terms, train: bool) -> tuple[Tensor, Tensor]:
        """G(q) − G(p), and the sum of (log Z + G(cavity) − G(q))/α of the data given, scaled up to all.

        To ``train``, with the gradient that holds the cavities, as if q already had the tilted moments: over w for all
        data at once (eq. 4 with w instead of inducing values), over inducing values u = Lw for mini-batches (eq. 6).
        At convergence it is that of log Z_EP.
        """
        cavity, normaliser, at, power = self.cavity, self.log_normaliser, self.at, self.method.power
        mean, variance, values = cavity.mean, cavity.variance, None
        if train:
            # Eq. 4: where moments match, ∂log Z_EP/∂ξ is that of Σ log Zₙ with the cavities over w held.
            # Only φ moves: of m⁻ = φᵀμ⁻ and v⁻ = φᵀV⁻φ.
            phi, prior = self.held_features()
            normaliser = normaliser + prior
            mean = (phi * cavity.loc).sum(-1)
            variance = 2 * (phi * cavity.cov).sum(-1) - cavity.variance
            if terms.differentiable:
                values = terms.log_density(self.name, at.nodes)
        # log Z̃ₙ = log Zₙ + G(cavity) − G(q), eq. 26, over α; eq. 6 scales those of a mini-batch up.
        log_z = log_normaliser(at, mean + self.prior_mean, variance + self.residual, values, power)
        each = torch.where(cavity.valid, log_z + cavity.log_ratio, 0.0) / power
        return normaliser.sum(), self.num / self.phi.shape[-2] * each.sum()


class PartRun(SiteRun):
    """The same on a part of the data, a mini-batch, whose rows' numbers are ``index``."""

    def kept_sites(self) -> Sites:
        module, index = self.module, self.index
        module.look_from(self.anchor)
        rows = module.features_of(module.rows[..., index, :])
        return Sites(rows, module.precision[..., index], module.linear[..., index])

    def _sums(self, sites: Sites) -> tuple[Tensor, Tensor]:
        # P changes by what these sites have changed: Σ νφφᵀ of other data stays as it is.
        module, old = self.module, self.sites
        gram, pull = module.sums(sites.inputs, sites.precision, sites.linear)
        held = module.sums(old.inputs, old.precision, old.linear)
        gram, pull = self.method.workers.sum(gram - held[0], pull - held[1])
        return module.gram + gram, module.pull + pull

    def _resum(self) -> None:
        module = self.module
        sums = module.sums(module.features_of(module.rows), module.precision, module.linear)
        module.gram, module.pull = self.method.workers.sum(*sums)

    def _drop_negative(self) -> None:
        super()._drop_negative()
        module = self.module
        kept = _without_negative(Sites(module.rows, module.precision, module.linear))
        module.precision, module.linear = kept.precision, kept.linear
        self._resum()

    def _careful(self, new: Sites, moved: float) -> Sites:
        """As they are: between two visits others' sites move."""
        return new

    def keep(self, new: Sites) -> None:
        super().keep(new)
        self.progress.seen += new.inputs.shape[-2]
        if self.progress.seen >= self.num:  # rounding errors of the running sums
            self.progress.seen = 0
            self._resum()

    def held_features(self) -> tuple[Tensor, Any]:
        if self.anchor is None:
            return super().held_features()
        # The sites of other data stay where they are in u = Lw, and so do the cavities: φᵀw = φᵀL⁻¹u.
        turn, prior = turned(self.anchor, self.loc, self.factor)
        return self.phi @ turn, prior


def _without_negative(sites: Sites) -> Sites:
    linear = torch.where(sites.precision < 0, 0.0, sites.linear)
    return Sites(sites.inputs, sites.precision.clamp(min=0), linear)


def site_run(
    method: Any, name: str, process: GaussianProcess, terms: Terms, trace: poutine.Trace, indices: Optional[Tensor]
) -> SiteRun:
    """A GP site in a run of the model, on all data or a part."""
    site, is_unused = trace.nodes[name], method.guide.facts.gps[name].depends == Depends.NONE
    here = process.x.shape[-2]
    if not terms.plates or is_unused:
        if indices is not None and indices.tolist() != list(range(here)):
            raise ValueError(
                "indices are given, but no plate holds a part of the data: say how many there are, "
                "pyro.plate('data', N, subsample=x)"
            )
        return SiteRun(method, name, process, site["scale"], here)
    ((plate, (size, full)), *others) = terms.plates.items()
    if others or name not in terms.rowwise or size != here:
        raise ValueError(
            f"GP site {name!r} has {here} values, plate {plate!r} holds {size} of {full} rows, and a value has terms "
            "outside of its row of that plate: a site needs all of them at once. Sample the process at the "
            "inputs of those rows, or give all data in each step."
        )
    # Of a plate with subsample_size= the value is the rows' numbers, of one with subsample=x it is x.
    rows: Any = trace.nodes.get(plate, {"value": torch.empty(0)})["value"] if indices is None else indices
    are_numbers = rows.shape == (size,) and not rows.is_floating_point() and rows.dtype != torch.bool
    if not are_numbers or len(rows.unique()) < size or not ((rows >= 0) & (rows < full)).all():
        raise ValueError(
            f"plate {plate!r} holds {size} of {full} rows, and expectation propagation keeps a site for each datum: "
            f"indices must be {size} distinct row numbers from 0 to {full - 1}, ep.step(..., indices=rows), got "
            f"{rows.dtype} of shape {tuple(rows.shape)}; or write plate = pyro.plate('data', N, subsample_size=B) and "
            "index the data by plate.indices."
        )
    return PartRun(method, name, process, site["scale"], full, rows.to(process.x.device))
