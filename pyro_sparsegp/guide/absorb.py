"""Rows that arrive after training: their sites are added to a guide's posteriors, without the rows seen before."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from pyro import poutine

from ..approximations.absorbing import Absorbing
from ..approximations.expectation import ExpectationGP
from ..approximations.on_sites import SiteGP
from ..gaussians import NaturalGaussian, NaturalLowRank
from ..program.checks import require_sizes, require_whole
from ..program.explore import explore
from ..program.facts import Structure
from ..program.handlers import held_trace
from ..program.reader import Reader
from ..program.traces import (
    all_sites,
    is_observation,
    piecewise_constant,
    repeatable,
    whole_plates,
)
from .first_call import require_separate_sites
from .known import KnownGuide
from .reading import SiteReading, settle
from .runs import Priors, held_runs

__all__ = ["absorb"]

_MOST = 200  # updates of sites


def absorb(guide: KnownGuide, args: tuple, kwargs: dict[str, Any], forget: float) -> None:
    """As :meth:`AutoSparseGP.absorb`, of a guide that has been called."""
    if not (isinstance(forget, (int, float)) and 0 <= forget <= 1):
        raise ValueError(f"absorb's forget is a share of what was learned, in [0, 1], got {forget!r}")
    _require_sums(guide)
    run = Priors(guide, at_medians=True)
    with torch.inference_mode(False), torch.no_grad(), repeatable(guide.like), poutine.block(), whole_plates():
        run.perform(args, kwargs)
        trace = run.trace
        if not any(is_observation(site) for _, site in all_sites(trace)):
            raise ValueError("absorb is given no observations: give it the new data, guide.absorb(x, y).")
        require_whole(trace)
        require_sizes(trace, each_row=True)
        found = _facts(guide, run, args, kwargs, trace)
        # With q ∝ N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w) for a prior, new rows have sites as all rows have under SGPR.
        modules = {
            name: Absorbing(guide.modules_by_site()[name], process, name, forget)
            for name, process in run.processes.items()
        }
        readings = [SiteReading.of(name, run.processes[name], module, found) for name, module in modules.items()]
        marginals = {reading.name: reading.look()[1] for reading in readings}
        reader = Reader(lambda values: held_trace(guide.model, values, args, kwargs, trace), found)
        tolerance = 1e-7 if guide.like.dtype == torch.float64 else 1e-3
        settle(reader, readings, marginals, _MOST, tolerance)
        for reading in readings:
            if not (reading.sites.precision.isfinite().all() and reading.sites.linear.isfinite().all()):
                raise ValueError(
                    f"GP site {reading.name!r}: derivatives of the new rows' densities are not finite. No row was "
                    "absorbed. Look for NaN or infinite values, or data outside of the likelihood's support."
                )
        for reading in readings:
            modules[reading.name].finish(reading.sites)
            if not reading.direct and not reading.change <= 1e-2:
                warnings.warn(
                    f"the sites of GP site {reading.name!r} did not converge: another update would move a marginal by "
                    f"{reading.change:.2g} standard deviations. Absorb fewer rows at a time.",
                    stacklevel=4,
                )


def _require_sums(guide: KnownGuide) -> None:
    """Raise where what the guide learned is no sum over rows."""
    facts = guide.facts
    beside = [name for name in facts.latents if name in facts.field or name in guide.local_latents]
    if beside:
        raise ValueError(
            f"absorb updates GP sites alone, and latent site {beside[0]!r} has a value for each row, or one posterior "
            "with them. Train on old and new rows together."
        )
    joint = [*facts.joint, list(facts.field)][0]
    if joint:
        raise ValueError(f"absorb: GP sites {joint} have one posterior; train on old and new rows together.")
    for name, module in guide.modules_by_site().items():
        if isinstance(module, SiteGP):
            why = "whose posterior follows from all its data: give it old and new rows together, guide.forget_data() "
            why += "and then guide(x, y); or take SVGP or OrthogonalInducing"
        elif isinstance(module, ExpectationGP):
            why = "which keeps a site for each row: go on with ExpectationPropagation on old and new rows together"
        elif not isinstance(module.coefficients, (NaturalGaussian, NaturalLowRank)):
            why = "whose q(w) is learned as parameters, natural=False: train on old and new rows together; or take "
            why += "natural=True"
        else:
            continue
        raise ValueError(f"absorb: GP site {name!r} has the family {module.family['name']}, {why}.")


def _facts(guide: KnownGuide, run: Priors, args: tuple, kwargs: dict[str, Any], trace: poutine.Trace) -> Structure:
    """How the densities of the new rows depend on GP sites' values."""
    found = Structure(gps=guide.facts.gps, enumerated=guide.facts.enumerated, num_nodes=guide.facts.num_nodes)
    flat = piecewise_constant(trace)
    held = held_runs(guide.model, trace, args, kwargs)
    explore(found, held, run.processes, [] if flat else list(run.processes))
    for name in run.processes:
        reads = "rows to absorb, of which absorb"
        require_separate_sites(found, name, reads, flat, "Train on old and new rows together")
    return found
