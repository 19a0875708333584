"""q(f | latents, data) of families on sites: latents are drawn, and the sites read under them, before the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..approximations.on_sites import ProjectedGP, SiteGP
from ..gaussians.sites import KeptSites, Sites, update, within_reach
from ..numerics.decisions import decided
from ..numerics.linalg import MAPPED
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program import checks, handlers, traces
from ..program.data import TrainingData
from ..program.explore import explore
from ..program.reader import Expectation, Marginal, Reader, total_after
from .calls import BatchStep, Call, Evaluation
from .known import KnownGuide
from .runs import Conditions, Priors, require_rows, shown_by

_SETTLED = 100  # updates of sites outside of training, at most
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # standard deviations of a marginal that an update may move
_LOOKS = {8 * 4**k for k in range(16)}  # steps at which it is asked again whether densities are normal around f
_LARGE = 0.5  # a move, in standard deviations, that may overshoot
_ATTEMPTS, _SLOWEST = 8, 1 / 256  # of a search, and the least share of a rate: test_kinks
_MOST, _DEPTH = 100, 30  # iterations of a linear system, and how many of them are remembered
_WIDE = 100.0  # nats a value by which a bound is lost
_NEWTON = 20
_TIGHT = {torch.float64: 1e-6, torch.float32: 1e-3}  # standard deviations that a linear system's solution may move
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5}  # of a bound


def conditions_now(guide: KnownGuide, median: bool, known: bool = False) -> Conditions:
    """What prediction is conditioned on: read at the training data, for one draw of the latents or their medians.

    :param known: whether the draw is of those data, so that their rows' latents are the draw's.
    """
    if not guide.on_sites or (guide.core.data is None and not guide.has_random_latents):
        return Conditions()
    data = guide.data_for(next(iter(guide.site_modules())))
    # Sites that are kept must serve training, too: no tensors of inference mode.
    with torch.inference_mode(False), torch.no_grad(), traces.repeatable(guide.like) if median else nullcontext():
        return condition(guide, Evaluation() if known else Call(), data.args, data.kwargs, median)


@dataclass(eq=False)
class _UnderLatents(Priors):
    """The latents are drawn, for what families on sites are conditioned on."""

    reads: Collection[str] = ()  # the GP sites by whose values, moves off the prior's mean, densities are derived
    moves: dict[str, Tensor] = field(init=False, default_factory=dict)

    def answer(self, name: str, process: GaussianProcess, module: nn.Module) -> Any:
        if name in self.reads:
            self.moves[name] = torch.zeros_like(process.mean, requires_grad=True)
            return process.mean + self.moves[name]
        if isinstance(module, SiteGP):
            return process.mean
        posterior = self.posteriors[name] = self.free(name, process, module, self.guide.kind_of_draws(name))
        return posterior.mean


def condition(guide: KnownGuide, call: Call, args: tuple, kwargs: dict[str, Any], median: bool = False) -> Conditions:
    """Draw the latents at the training data, or take their medians, and read the sites of families on sites under them.

    :param call: of the arguments; if they are other rows, the training data are taken. In a step of training modules
        keep the sites, and gradients pass through them.
    """
    core, modules, same, learns = guide.core, guide.site_modules(), call.same, call.learns
    if not same:
        if core.data is None:
            return Conditions()
        args, kwargs = core.data.args, core.data.kwargs
    # Not under vmap, by which predict draws: it has no torch.autograd.grad.
    reads = [] if MAPPED.get() else list(filter(core.facts.is_alone, modules))
    run = _UnderLatents(guide, at_medians=median, reads=reads)
    if run.takes_points:  # asked before the gradients that reading takes, which are no step's
        run.drawn = core.points.chosen(median)  # type: ignore[union-attr]
    with handlers.unrecorded(same, learns), torch.set_grad_enabled(learns or bool(reads)):
        run.perform(args, kwargs)
    if same and core.data is not None and guide.takes_batches and checks.holds_part(run.trace):
        batch = (BatchStep if learns else Call)(call.relation, call.inputs)
        return condition(guide, batch, args, kwargs)  # the rows it knows, as a batch of more
    name, module = next(iter(modules.items()))
    checks.require_full_batch(name, module.family["name"], run.trace)
    if same and learns:
        core.data = call.relation.call if core.data else TrainingData(guide.model, args, kwargs)
        core.data.note(shown_by(run))
    else:
        require_rows(run, name)
    held = handlers.held_runs(guide.model, run.trace, args, kwargs)
    closed = _closed_forms(run, held) if len(core.facts.gps) == 1 else ()
    reader = Reader(held, core.facts, core.num_nodes, closed)
    with torch.set_grad_enabled(learns):
        readings = _read(reader, modules, run, call)
    # What other runs are to have of latents: all of it at the same rows.
    free = traces.free_values(run.trace)
    shared = free.keys() - run.processes.keys() if same else core.facts.latents.keys() - set(core.facts.local_latents)
    values = {name: value if learns else value.detach() for name, value in free.items() if name in shared}
    return Conditions(values, readings, run.drawn)


def _closed_forms(run: Priors, held: handlers.Rerun) -> Collection[str]:
    """The densities after the one GP site, if expectations of all over its values are in closed form."""
    core = run.guide.core
    # A state has no closed forms; sites that are read at nodes instead would be others.
    forms = core.forms = core.forms or explore(run, held)[1]
    is_whole = not (forms.functions or forms.rest.gps) and forms.hold(run.trace.nodes)
    return forms.rows if is_whole else ()


def _read(reader: Reader, modules: Mapping[str, SiteGP], run: _UnderLatents, call: Call) -> dict[str, SiteReading]:
    """The sites of some GP sites, at a run's latents."""
    guide, learns = run.guide, call.learns
    if learns:  # densities that were normal around f at the first call may not stay so: at some steps it is asked again
        guide.core.looks += 1
        if guide.core.looks in _LOOKS and any(gp.is_quadratic for gp in reader.found.gps.values()):
            again, _ = explore(run, reader.run)
            guide.core.facts = reader.found.bent(again)
            reader = replace(reader, found=guide.core.facts)
    met = {name: process for name, process in run.processes.items() if name in modules}
    readings = {name: SiteReading(name, process, modules[name], reader) for name, process in met.items()}
    for name in run.moves:
        _read_off(readings[name], run, learns)
    left = [reading for name, reading in readings.items() if name not in run.moves]
    if left:
        most, tolerance = _SETTLED, _TOLERANCE[guide.like.dtype]
        if learns:
            most, tolerance = max(reading.module.updates for reading in left), 0.0
            for reading in left:
                reading.resume(call.same)
            if guide.has_random_latents:  # sites that were kept are those of another draw
                most, tolerance = max(most, 5), 0.05
        others = {name: (q.mean.detach(), q.variance.detach()) for name, q in run.posteriors.items()}
        Readings(reader, left, others).settle(most, tolerance)
        projected = [reading for reading in left if isinstance(reading.module, ProjectedGP) and not learns]
        for reading in projected:  # of others the bound is a guard
            reading.module.require_settled(reading.change, reading.name, guide.warned)
    for reading in readings.values():
        # To look at a guide does not change how it trains.
        reading.end(learns or reading.module.sites.empty or (reading.direct and run.at_medians))
    return readings


def _read_off(reading: SiteReading, run: _UnderLatents, learns: bool) -> None:
    """The sites of a quadratic ℓ by its derivatives in a run with f at the prior's mean μ: λ = −ℓ″, λ(z − μ) = ℓ′."""
    move = run.moves[reading.name]
    with torch.enable_grad():
        # A move that no density depends on has derivatives of 0.
        total = total_after(run.trace, reading.name, run.guide.facts.gps) + 0 * move.sum()
        (first,) = torch.autograd.grad(total, move, create_graph=True)
        (second,) = torch.autograd.grad(first.sum() + 0 * move.sum(), move, create_graph=learns)
    first = first if learns else first.detach()
    reading.move(reading.expanded(Expectation(total, first, second), torch.zeros_like(move)))
    reading.change = 0.0


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
        self.unread = kept.empty or kept.inputs.shape != process.x.shape
        known = Sites(process.x, kept.precision, kept.linear)
        self.sites = Sites.none(process.x, process.batch_shape) if self.unread else known
        self.truncated = kept.truncated  # negative curvatures, cut to 0
        self.change: Any = math.inf  # that the last update would have made of a marginal, in standard deviations
        self.moves: Any = None  # of that update, each row's
        # A share of the rate; updates that were cut since they lowered the bound.
        self.pace, self.halved = torch.ones_like(kept.progress["pace"]), 0
        # Of passes over all rows: what gives posteriors of sites, and the last one, if it was made, with its marginals.
        self._answer: Optional[Callable[[Sites], SparsePosterior]] = None
        self._last: Any = None

    def resume(self, same: bool) -> None:
        """Go on where training is: its pace, and the marginals that the last step had, if it was at the same rows."""
        progress = self.module.sites.progress
        if not self.unread:
            known = progress["mean"], progress["variance"]
            self.pace = torch.as_tensor(progress["pace"])
            self._last = (None, known) if same and known[0] is not None else None

    @torch.no_grad()
    def look(self) -> tuple[SparsePosterior, Marginal]:
        """The posterior of the sites as they are, and its marginals; the same again until there are other sites."""
        if self._last is None or self._last[0] is None:
            start = self.sites.detached()
            if self.unread:
                # Noise as large as the process around its mean: under the prior a likelihood that is not log-concave
                # would be met where it is flat (test_a_scale_that_grows_with_f_is_met_near_the_mean).
                prior = self.process.variance
                noise = prior.mean(-1, keepdim=True).clamp(min=torch.finfo(prior.dtype).tiny).expand(prior.shape)
                start = Sites(self.process.x, 1 / noise, torch.zeros_like(noise))
            self._last = self.posterior(start)
        return self._last

    @property
    def marginal(self) -> Marginal:
        """Where ℓ is expanded."""
        if self.alone:  # it is the same wherever that is
            return self.process.mean.detach(), self.process.variance.detach()
        return (self._last or self.look())[1]

    def move(self, sites: Sites, found: Optional[tuple[SparsePosterior, Marginal]] = None) -> None:
        """Have these sites; their posterior and its marginals may be known."""
        # What was known goes before the next is made: of projections of data each holds a Φ of its own.
        self.sites, self.unread, self._last = sites, False, found

    def expanded(self, found: Expectation, away: Tensor, least: float = 0.0) -> Sites:
        """The sites of ℓ expanded at function values so far from the prior's mean, of at least this precision."""
        # λ = −E[ℓ''] and λ(z − μ) = E[ℓ'] + λ(m − μ): Khan and Lin, 2017, eq. 10
        precision = (-found.second).clamp(min=least)
        return Sites(self.process.x, precision, found.first + precision * away, self.alone)

    def damped(self, found: Expectation) -> Sites:
        """A damped update; projections of data take no sites whose z is far from the marginal."""
        (mean, variance), old = self.marginal, self.sites.detached()
        relative = mean - self.process.mean, variance
        sites = update(old, found.first, (-found.second).clamp(min=0), relative, self.rate * self.pace)
        return within_reach(sites, old, relative) if isinstance(self.module, ProjectedGP) else sites

    def end(self, keeps: bool) -> None:
        """Let go of what is larger than the sites, which are read; the module may keep them."""
        self._answer = self._last = None
        kept = self.module.sites
        # What torch.func makes is of its transform, and nothing after it: test_forward_mode.py::test_posteriors.
        if keeps and not torch._C._are_functorch_transforms_active():
            kept.keep(self.sites, self.truncated)
            kept.progress |= {"pace": self.pace, "halved": kept.progress["halved"] + self.halved}

    @torch.no_grad()
    def posterior(self, sites: Sites) -> tuple[SparsePosterior, Marginal]:
        """The posterior of these sites, and its marginals."""
        if self._answer is None:
            self._answer = self.module.by_sites(self.process, self.name)
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
        readings, trained = self.readings, torch.is_grad_enabled()
        names = {reading.name for reading in readings}
        meets = any(not reading.direct or self.reader.found.neighbours(reading.name) & names for reading in readings)
        if meets and all(reading.quadratic for reading in readings) and self._solve(tolerance):
            for reading in readings if trained else ():  # once more, for the gradient
                reading.sites = self._target(reading)[1]
            return
        for left in reversed(range(most)):
            for reading in readings:
                self._update(reading, -1.0 if trained else tolerance)
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
        if isinstance(reading.module, ProjectedGP) and not reading.quadratic:
            target = within_reach(target, old, (away, variance))
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
        """Update one GP site's sites, unless they move less than ``least`` standard deviations."""
        before, (found, target) = reading.moves, self._target(reading)
        if least >= 0 and before is not None:  # outside of training: an update that takes back the last one overshot
            reading.pace = torch.where((reading.moves * before).sum() < 0, reading.pace / 2, reading.pace)
        # Negative curvatures, beyond rounding, of which sites cut to 0 are made.
        reading.truncated = (found.second > 1e-6 * found.second.abs().amax()).sum()
        if reading.direct:
            reading.move(target)
        elif least < 0 or decided(reading.change > least, MAPPED.get()):
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
        # The sites of a free q are not quite the best ones for projected data: golden student-ComputationAware.
        share = 1e-2 if isinstance(reading.module, ProjectedGP) else _ROUNDING[marginal[0].dtype]
        slack = share * (1 + bound.abs())
        # Where the bound is lost, modes of rows raise it (test_exponential_links_under_wide_priors), but not by kinks.
        is_far = not decided(bound > -_WIDE * marginal[0].numel())
        for attempt in range(_ATTEMPTS):
            by_modes = is_far and not attempt
            sites = self._at_modes(reading) if by_modes else reading.damped(found)
            moved = reading.posterior(sites.detached())
            with torch.no_grad():
                value = self._expect(reading, moved[1]).value - moved[0].kl.sum()
            if decided((value >= bound + (slack if by_modes else -slack)) | ~bound.isfinite()):
                reading.move(sites, moved)
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
                driver = "gelsd" if now.device.type == "cpu" else None
                residual = (new - now)[:, None]  # a matrix: vmap takes stacked vectors for one
                new = new - (moved @ torch.linalg.lstsq(turned, residual, driver=driver).solution)[:, 0]
            parts = (new / sizes).split([found.linear.numel() for _, found in pairs])
            for (reading, found), part in zip(pairs, parts):
                reading.move(Sites(found.inputs, found.precision, part.reshape(found.linear.shape)))
        return False
