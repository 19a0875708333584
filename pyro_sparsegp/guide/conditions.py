"""q(f | latents, data) of families on sites: the latents are drawn, and the sites read under them, before the run."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..approximations.on_sites import SiteGP
from ..numerics.linalg import MAPPED
from ..process import GaussianProcess
from ..program.checks import holds_part, require_full_batch
from ..program.data import TrainingData
from ..program.explore import explore
from ..program.handlers import held_runs, unrecorded
from ..program.reader import Expectation, Reader, total_after
from ..program.traces import free_values, repeatable
from ..warned import warn_once
from .known import Core, KnownGuide, Rows
from .reading import Readings, SiteReading
from .runs import Conditions, Priors, Run

_SETTLED = 100  # updates of sites outside of training, at most
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # standard deviations of a marginal that an update may move
_LOOKS = {8 * 4**k for k in range(16)}  # steps at which it is asked again whether densities are normal around f


def conditions_now(guide: KnownGuide, median: bool, known: bool = False) -> Conditions:
    """What prediction is conditioned on: read at the training data, for one draw of the latents or their medians.

    :param known: whether it is of those data, so that their rows' latents are to be those of the draw.
    :raises ValueError: if that takes the training data, and they were not loaded with the guide's state.
    """
    data = guide.core.data
    if not guide.on_sites or (data is None and not guide.has_random_latents):
        return Conditions()
    name = next(iter(guide.site_modules()))
    if data is None:  # test_conditioned.py::test_the_state_holds_the_data_and_says_when_it_cannot
        raise ValueError(
            f"the guide was loaded from a state without its training data, which the posterior of GP site {name!r} "
            "needs. Call the guide with them once, guide(x, y), not under torch.no_grad()."
        )
    if data.overwritten:  # test_data.py::test_data_that_are_written_to_after_training_are_told_of
        warn_once(
            guide.warned,
            "overwritten",
            "",
            f"the training data were changed in place after training, as y.mul_(2.0) does, and the posterior of GP "
            f"site {name!r} now uses the changed values. Train on copies, y.clone(), or change copies.",
            stacklevel=4,
        )
    # Sites that are kept must serve training, too: no tensors of inference mode.
    with torch.inference_mode(False), torch.no_grad(), repeatable(guide.like) if median else nullcontext():
        return condition(guide, Rows(same=known), data.args, data.kwargs, median)


@dataclass(eq=False)
class _UnderLatents(Priors):
    """The latents are drawn, for what families on sites are conditioned on.

    :param reads: the GP sites by whose values, ``moves`` off the prior's mean, its densities are to be derived.
    """

    reads: Collection[str] = ()
    moves: dict[str, Tensor] = field(init=False, default_factory=dict)

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Any:
        if name in self.reads:
            self.moves[name] = torch.zeros_like(process.mean, requires_grad=True)
            return process.mean + self.moves[name]
        if isinstance(module, SiteGP):
            return process.mean
        posterior = self.posteriors[name] = self.free(name, process, module, self.guide.kind_of_draws(name))
        return posterior.mean


def condition(guide: KnownGuide, rows: Rows, args: tuple, kwargs: dict[str, Any], median: bool = False) -> Conditions:
    """Draw the latents at the training data, and read under them the sites of families on sites.

    :param rows: of the arguments; if they are not those of training, the training data are taken. In a step of training
        modules keep the sites, and gradients pass through them.
    :param median: take the latents' medians instead.
    """
    core, same, learns = guide.core, rows.same, rows.learns
    if not same:
        if core.data is None:
            return Conditions()
        args, kwargs = core.data.args, core.data.kwargs
    # Not under vmap, by which predict draws: it has no torch.autograd.grad.
    kept = [name for name, module in guide.modules_by_site().items() if isinstance(module, SiteGP)]
    reads = [] if MAPPED.get() else list(filter(core.facts.is_alone, kept))
    run = _UnderLatents(guide, at_medians=median, reads=reads)
    with unrecorded(same, learns), torch.set_grad_enabled(learns or bool(reads)):
        run.perform(args, kwargs)
    if holds_part(run.trace):
        if same and guide.takes_batches and core.data is not None:
            return condition(guide, replace(rows, same=False), args, kwargs)  # the rows it knows, as a batch of more
        name, module = next(iter(guide.site_modules().items()))
        require_full_batch(name, module.family["name"], run.trace)
    if same and learns:
        core.data = core.data or TrainingData(guide.model, args, kwargs)
        core.data.args, core.data.kwargs = args, kwargs
    reader = Reader(held_runs(guide.model, run.trace, args, kwargs), core.facts, _closed(core, run))
    with torch.set_grad_enabled(learns):
        readings = _read(reader, kept, run, rows)
    # What other runs are to have of latents: all of it at the same rows.
    free = free_values(run.trace)
    shared = free.keys() - run.processes.keys() if same else core.facts.latents.keys() - set(core.facts.local_latents)
    held = {name: value if learns else value.detach() for name, value in free.items() if name in shared}
    return Conditions(held, readings, run.drawn)


def _read(reader: Reader, names: Collection[str], run: _UnderLatents, rows: Rows) -> dict[str, SiteReading]:
    """The sites of some GP sites, at a run's latents."""
    guide, learns, found = run.guide, rows.learns, reader.found
    if learns:  # densities that were normal around f at the first call may not stay so: at some steps it is asked again
        guide.core.looks += 1
        if found.quadratic and guide.core.looks in _LOOKS:
            again = replace(found)
            explore(again, reader.run, run.processes, found.quadratic)
            found.quadratic[:] = again.quadratic
    met = {name: process for name, process in run.processes.items() if name in names}
    readings = {name: SiteReading(name, process, guide.module_of(name), reader) for name, process in met.items()}
    left = []
    for name, reading in readings.items():
        if name in run.moves:
            _read_off(reading, run, learns)
        else:
            left.append(reading)
    if left:
        for reading in left if learns else ():
            reading.resume(rows.same)
        others = {name: (q.mean.detach(), q.variance.detach()) for name, q in run.posteriors.items()}
        Readings(reader, left, others).settle(*_patience(guide, left, learns))
    for reading in readings.values():  # to look at a guide does not change how it trains
        reading.release()
        if learns or reading.module.sites.empty or (reading.direct and run.at_medians):
            reading.keep()
    return readings


def _closed(core: Core, run: Run) -> Collection[str]:
    """The sites whose expectation is in closed form, if no other densities depend on the values of the one GP site."""
    forms = core.forms
    if forms is None or len(core.facts.gps) > 1 or forms.functions or forms.rest.dependence:
        return ()
    return forms.rows if forms.hold(run.trace.nodes) else ()


def _read_off(reading: SiteReading, run: _UnderLatents, learns: bool) -> None:
    """The sites of a quadratic ℓ by its derivatives in a run with f at the prior's mean μ: λ = −ℓ″, λ(z − μ) = ℓ′."""
    move = run.moves[reading.name]
    with torch.enable_grad():
        # A move that no density depends on has derivatives of 0.
        total = total_after(run.trace, reading.name, run.guide.facts.gps) + 0 * move.sum()
        (first,) = torch.autograd.grad(total, move, create_graph=True)
        (second,) = torch.autograd.grad(first.sum() + 0 * move.sum(), move, create_graph=learns)
    found = Expectation(total, first, second) if learns else Expectation(*(p.detach() for p in (total, first, second)))
    reading.move(reading.expanded(found, torch.zeros_like(move)))
    reading.change = 0.0


def _patience(guide: KnownGuide, readings: list[SiteReading], learns: bool) -> tuple[int, float]:
    """How many updates sites get at most, and what moves, in standard deviations, are not worth one."""
    if not learns:
        return _SETTLED, _TOLERANCE[guide.like.dtype]
    most = max(reading.module.updates for reading in readings)
    # Under latents that are drawn anew, the sites that were kept are those of another draw.
    return (max(most, 5), 0.05) if guide.has_random_latents else (most, 0.0)
