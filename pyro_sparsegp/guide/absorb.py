"""Rows that arrive after training: their sites are added to a guide's posteriors, without the rows seen before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Optional

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.absorbing import Absorbing
from ..approximations.expectation import ExpectationGP
from ..approximations.on_sites import SiteGP
from ..gaussians import NaturalGaussian, NaturalLowRank
from ..program.checks import require_each_row, require_whole
from ..program.facts import Structure, explore
from ..program.reader import Reader
from ..program.traces import (
    all_sites,
    free_values,
    held_trace,
    is_observation,
    piecewise_constant,
    repeatable,
    whole_plates,
)
from .first_call import require_separate_sites
from .kept_rows import KeptRows, joined_rows, picked_rows, some_of
from .reading import SiteReading, settle
from .runs import Priors
from .state import Saved

__all__ = ["absorb", "relearn"]

_MOST = 200  # updates of sites


def absorb(guide: Saved, args: tuple, kwargs: dict[str, Any], forget: float, memory: Optional[int]) -> None:
    """As :meth:`AutoSparseGP.absorb`, of a guide that has been called."""
    if not (isinstance(forget, (int, float)) and 0 <= forget <= 1):
        raise ValueError(f"absorb's forget is a share of what was learned, in [0, 1], got {forget!r}")
    kept = guide.memory
    most = memory if memory is not None else 0 if kept is None else kept.most
    if not isinstance(most, int) or most < 0:
        raise ValueError(f"absorb's memory is a number of rows to keep, got {memory!r}")
    if most and forget:
        raise ValueError(
            "absorb takes forget= or memory=, not both: rows that are kept count as much as ever. Leave out one of "
            "them, or drop the rows, memory=0."
        )
    _require_sums(guide)
    if not most:
        _add(guide, args, kwargs, forget, None)
        guide.memory = None
        return
    _require_part(guide)
    num = _count_rows(guide, args, kwargs)
    args, kwargs = joined_rows(kept, args, kwargs, num)
    num_kept, seen = (0, 0) if kept is None else (kept.num, kept.seen)
    modules, readings = _add(guide, args, kwargs, 0.0, kept)
    _keep(guide, args, kwargs, num_kept + num, some_of(num_kept, seen, num, most), most, seen + num, modules, readings)


def relearn(guide: Saved, step: Callable[..., Any], num: int) -> list[Any]:
    """As :meth:`AutoSparseGP.relearn`."""
    kept = guide.memory
    if kept is None:
        raise ValueError("relearn takes steps on rows that absorb has kept: absorb(x, y, memory=100) first.")
    if not isinstance(num, int) or num < 0:
        raise ValueError(f"relearn's num_steps must be a whole number, got {num!r}")
    _require_part(guide)
    losses = []
    for _ in range(num):
        losses.append(step(*kept.args, **kept.kwargs))
        for module in guide.modules_by_site().values():
            module.coefficients.noted()  # and no step is taken
    modules, readings = _add(guide, kept.args, kept.kwargs, 0.0, kept)
    _keep(guide, kept.args, kept.kwargs, kept.num, torch.arange(kept.num), kept.most, kept.seen, modules, readings)
    return losses


def _add(
    guide: Saved, args: tuple, kwargs: dict[str, Any], forget: float, kept: Optional[KeptRows]
) -> tuple[dict[str, Absorbing], list[SiteReading]]:
    """Add rows' sites to the sums, those of the kept ones in the place of what these were."""
    assert guide.structure is not None
    run = Priors()
    with torch.inference_mode(False), torch.no_grad(), repeatable(guide.like), poutine.block(), whole_plates():
        guide.perform(run, args, kwargs)
        trace = guide.trace
        if not any(is_observation(site) for _, site in all_sites(trace)):
            raise ValueError("absorb is given no observations: call it as the model with the new data, absorb(x, y).")
        require_whole(trace)
        require_each_row(trace)
        found = _facts(guide, run, args, kwargs, trace)
        less = {} if kept is None else kept.sums
        modules = {
            name: Absorbing(guide.modules_by_site()[name], process, name, forget, less.get(name))
            for name, process in run.processes.items()
        }
        readings = [SiteReading.of(name, run.processes[name], module, found) for name, module in modules.items()]
        marginals = {reading.name: reading.marginal() for reading in readings}
        reader = Reader(guide.model, args, kwargs, found, trace)
        tolerance = 1e-7 if guide.like.dtype == torch.float64 else 1e-3
        settle(reader, readings, marginals, _MOST, tolerance)
        for reading in readings:
            if not (reading.sites.precision.isfinite().all() and reading.sites.linear.isfinite().all()):
                raise ValueError(
                    f"GP site {reading.name!r}: what the new rows say of it is not finite; nothing of them was "
                    "absorbed. Look for NaN or infinite values, or data outside of the likelihood's support."
                )
        for reading in readings:
            modules[reading.name].finish(reading.sites)
            if not reading.direct and not reading.change <= 1e-2:
                warnings.warn(
                    f"the sites of GP site {reading.name!r} did not settle: another update would move a marginal by "
                    f"{reading.change:.2g} standard deviations. Absorb fewer rows at a time.",
                    stacklevel=4,
                )
    return modules, readings


def _keep(
    guide: Saved,
    args: tuple,
    kwargs: dict[str, Any],
    num: int,
    rows: Tensor,
    most: int,
    seen: int,
    modules: dict[str, Absorbing],
    readings: list[SiteReading],
) -> None:
    """Remember some of ``num`` rows, and what they are of the sums."""
    with torch.no_grad():
        some = picked_rows(args, kwargs, num, rows)
        sums = {r.name: modules[r.name].part(r.sites, rows.to(guide.like.device)) for r in readings}
    steps = {name: guide.modules_by_site()[name].coefficients.steps_taken for name in sums}
    guide.memory = KeptRows(*some, len(rows), most, seen, sums, steps)


def _count_rows(guide: Saved, args: tuple, kwargs: dict[str, Any]) -> int:
    """How many rows a call has."""
    run = Priors()
    with torch.no_grad(), repeatable(guide.like), poutine.block(), whole_plates():
        guide.perform(run, args, kwargs)
    sizes = {name: process.event_shape[0] for name, process in run.processes.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"absorb's memory= keeps rows that all GP sites have a value for; they have {sizes} values.")
    return next(iter(sizes.values()))


def _require_part(guide: Saved) -> None:
    """Raise if it is not known which part of a posterior is that of the kept rows."""
    for name, module in guide.modules_by_site().items():
        if not isinstance(module.coefficients, NaturalGaussian):
            raise ValueError(
                f"absorb's memory= takes the rows that it keeps out of the sums again; GP site {name!r} has the family "
                f"{module.family['name']}, whose q(w) is brought to a form that is no sum: take CoupledCovariance or "
                "SVGP, or absorb without memory=."
            )
        module.coefficients.settle()
        if guide.memory is not None and guide.memory.steps[name] != module.coefficients.steps_taken:
            raise ValueError(
                f"steps of training have moved the posterior of GP site {name!r} since rows were absorbed, so that the "
                "part of the rows that were kept is not known. To learn hyperparameters on, guide.relearn(svi.step, "
                "20) takes steps that leave q's sums; absorb(..., memory=0) forgets the rows."
            )


def _require_sums(guide: Saved) -> None:
    """Raise where what the guide learned is no sum over rows."""
    assert guide.structure is not None
    for what, names in (("a value for each row", guide.local_latents), ("a joint q", guide.structure.coupled)):
        if names:
            raise ValueError(
                f"absorb adds rows to the posteriors of GP sites, all else held; latent site {names[0]!r} has {what}. "
                "Train on old and new rows together."
            )
    for group in guide.structure.joint:
        raise ValueError(f"absorb: GP sites {group} have one posterior; train on old and new rows together.")
    for name, module in guide.modules_by_site().items():
        family, take = module.family["name"], "SVGP or OrthogonalInducing"
        if isinstance(module, SiteGP):
            why = (
                "whose posterior follows from all its data, which it keeps: give it old and new rows together, "
                "guide.forget_data() and then guide(x, y)"
            )
        elif isinstance(module, ExpectationGP):
            why = "which keeps a site for each row: go on with ExpectationPropagation on old and new rows together"
        elif not isinstance(module.coefficients, (NaturalGaussian, NaturalLowRank)):
            why = "whose q(w) is learned as parameters, natural=False: train on old and new rows together"
            take = "the same with natural=True"
        else:
            continue
        raise ValueError(f"absorb: GP site {name!r} has the family {family}, {why}; or take {take}.")


def _facts(guide: Saved, run: Priors, args: tuple, kwargs: dict[str, Any], trace: poutine.Trace) -> Structure:
    """How the densities of the new rows depend on GP sites' values."""
    assert guide.structure is not None
    found = Structure(gps=guide.structure.gps, enumerated=guide.structure.enumerated)
    values = free_values(trace)

    def held(moved: dict[str, Tensor]) -> poutine.Trace:
        return held_trace(guide.model, values | moved, args, kwargs)

    flat = piecewise_constant(trace)
    explore(found, held, run.processes, [] if flat else list(run.processes))
    remedy = "Train on old and new rows together"
    for name in run.processes:
        require_separate_sites(found, name, "rows to absorb, of which absorb", flat, remedy)
    return found
