"""q(f | latents, data) of families on sites: the latents are drawn, and the sites read under them, before the run."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..approximations.on_sites import SiteGP
from ..gaussians.sites import KeptSites
from ..numerics.linalg import MAPPED
from ..program.checks import holds_part, require_full_batch
from ..program.data import TrainingData
from ..program.explore import explore
from ..program.handlers import held_trace, unrecorded
from ..program.reader import Expectation, Reader, scale_of, with_priors
from ..program.traces import all_sites, bare, free_values, log_densities, repeatable
from ..warned import warn_once
from .known import Core, KnownGuide, Rows
from .reading import SiteReading, negative, settle
from .runs import Conditions, UnderLatents

_SETTLED = 100  # updates of sites outside of training, at most
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
        return condition(guide, data.args, data.kwargs, known and not guide.facts.inner, False, median)


def conditions_of_call(guide: KnownGuide, rows: Rows, args: tuple, kwargs: dict[str, Any]) -> Conditions:
    """As :func:`condition`; while predicting, those of the call before unless latents are drawn anew."""
    kept = guide.kept
    if kept and not guide.has_random_latents:
        return kept[-1]
    found = condition(guide, args, kwargs, rows.same, rows.learns)
    if kept is not None:
        kept[:] = [found]
    return found


def condition(
    guide: KnownGuide, args: tuple, kwargs: dict[str, Any], same: bool, learns: bool, median: bool = False
) -> Conditions:
    """Draw the latents at the training data, and read under them the sites of families on sites.

    :param same: whether the arguments are the training data; else those are taken.
    :param learns: whether this is a step of training: modules keep the sites, gradients pass through them.
    :param median: take the latents' medians instead.
    """
    core = guide.learnt
    if not same:
        if core.data is None:
            return Conditions()
        args, kwargs = core.data.args, core.data.kwargs
    run = UnderLatents(guide, same, _reads_itself(guide), median)
    with unrecorded(same, learns), torch.set_grad_enabled(learns or run.reads):
        run.perform(args, kwargs)
    if same and guide.takes_batches and core.data is not None and holds_part(run.trace):
        return condition(guide, args, kwargs, False, learns)  # the rows it knows, as a batch of more
    if same and learns:
        core.data = core.data or TrainingData(guide.model, args, kwargs)
        core.data.args, core.data.kwargs = args, kwargs
    modules = {name: module for name, module in guide.site_modules().items() if name in run.processes}
    for name, module in modules.items():
        require_full_batch(name, module.family["name"], run.trace)
        if learns and not same and isinstance(module.sites, KeptSites):
            module.sites.progress["marginals"] = None  # those of another step
    reader = Reader(lambda f: held_trace(guide.model, f, args, kwargs, run.trace), core.facts, _closed(core, run))
    with torch.set_grad_enabled(learns):
        readings = _read(guide, reader, modules, run, learns)
    draws = {name: run.posteriors[name] for name in core.facts.inner if name in run.posteriors}
    return Conditions(_values_of(guide, run, same, learns), draws, readings, run.drawn)


def _values_of(guide: KnownGuide, run: UnderLatents, same: bool, learns: bool) -> dict[str, Tensor]:
    """The values of latents and inner layers that other runs are to have: all of them at the same rows."""
    facts, free = guide.facts, free_values(run.trace)
    shared = free.keys() if same else facts.latents.keys() - set(guide.local_latents)
    held = {n: v for n, v in free.items() if n in shared and (n in facts.inner or n not in run.processes)}
    return held if learns else {name: value.detach() for name, value in held.items()}


def _read(
    guide: KnownGuide, reader: Reader, modules: dict[str, SiteGP], run: UnderLatents, learns: bool
) -> list[SiteReading]:
    """The sites of families on sites, at a run's latents."""
    marginals = {name: (q.mean.detach(), q.variance.detach()) for name, q in run.posteriors.items()}
    if learns:
        _look_again(guide.learnt, reader, run)
    readings = [
        SiteReading.of(name, run.processes[name], module, reader.found)
        for name, module in modules.items()
        if isinstance(module.sites, KeptSites)
    ]
    if run.reads and all(reading.direct for reading in readings):
        for reading in readings:
            _read_off(reading, run, learns)
    elif readings:
        for name in modules.keys() - {reading.name for reading in readings}:  # whose sites are parameters
            with torch.no_grad():
                q = modules[name](run.processes[name], name)
            marginals[name] = q.mean, q.variance
        for reading in readings:
            if not reading.direct or reader.meeting(reading.name):
                marginals[reading.name] = reading.resume() if learns else reading.look()[1]
        settle(reader, readings, marginals, *_patience(guide, readings, learns))
    for reading in readings:  # to look at a guide does not change how it trains
        reading.release()
        if learns or reading.module.sites.empty or (reading.direct and run.at_medians):
            reading.keep()
    return readings


def _closed(core: Core, run: UnderLatents) -> Collection[str]:
    """The sites whose expectation is in closed form, if no other densities depend on the values of the one GP site."""
    forms = core.forms
    if forms is None or len(core.facts.gps) > 1 or forms.functions or forms.rest.dependence:
        return ()
    return forms.rows if forms.hold(run.trace.nodes) else ()


def _reads_itself(guide: KnownGuide) -> bool:
    """Whether the run in which latents are drawn gives all sites: each GP site's log densities are quadratic in its
    values, and none meets another or itself; not under vmap, by which predict draws: it has no torch.autograd.grad.
    """
    facts, modules = guide.facts, guide.site_modules()
    able = [name for name, m in modules.items() if facts.kinds(name)[1] and isinstance(m.sites, KeptSites)]
    return able == list(facts.gps) and not (facts.interactions or MAPPED.get())


def _read_off(reading: SiteReading, run: UnderLatents, learns: bool) -> None:
    """The sites of a quadratic ℓ by its derivatives in a run with f at the prior's mean μ: λ = −ℓ″, λ(z − μ) = ℓ′."""
    names, move = list(run.trace.nodes), run.moves[reading.name]
    with torch.enable_grad():
        parts = log_densities(with_priors(run.trace), names[: names.index(reading.name) + 1]).values()
        # A move that no density depends on has derivatives of 0.
        total = sum((part.sum() for part in parts), 0 * move.sum()) / scale_of(run.trace, reading.name)
        (first,) = torch.autograd.grad(total, move, create_graph=True)
        (second,) = torch.autograd.grad(first.sum() + 0 * move.sum(), move, create_graph=learns)
    found = Expectation(total, first, second) if learns else Expectation(*(p.detach() for p in (total, first, second)))
    reading.truncated = negative(found)
    reading.move(reading.expanded(found, torch.zeros_like(move)))
    reading.alone, reading.change = True, 0.0


def _look_again(core: Core, reader: Reader, run: UnderLatents) -> None:
    """Densities that were normal around f at the first call may not stay so: at some steps, and where distributions are
    of other kinds than before, it is asked again.
    """
    kinds = {name: type(bare(site["fn"])) for name, site in all_sites(run.trace) if site["is_observed"]}
    before, core.kinds = core.kinds, kinds
    core.looks += 1
    found = reader.found
    if not found.quadratic or before is None or (kinds == before and core.looks not in _LOOKS):
        return
    again = replace(found, inner=[], groups={}, quadratic=[])
    explore(again, reader.run, run.processes, found.quadratic)
    found.quadratic[:] = again.quadratic


def _patience(guide: KnownGuide, readings: list[SiteReading], learns: bool) -> tuple[int, float]:
    """How many updates sites get at most, and what moves, in standard deviations, are not worth one."""
    if not learns:
        return _SETTLED, 1e-4 if guide.like.dtype == torch.float64 else 1e-3
    most = max(reading.module.updates for reading in readings)
    # Under latents that are drawn anew, the sites that were kept are those of another draw.
    return (max(most, 5), 0.05) if guide.has_random_latents else (most, 0.0)
