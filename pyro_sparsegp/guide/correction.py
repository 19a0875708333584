"""Guides of kernels whose diagonal depends on the rows of training: which of these they have seen."""

from __future__ import annotations

from typing import Any

import torch
from pyro import poutine

from ..program.checks import holds_part
from ..program.traces import whole_plates
from ..warned import warn_once
from .known import KnownGuide
from .runs import Posteriors, Priors, Run

__all__ = ["note_rows", "show_all_rows", "warn_of_unseen"]


def show_all_rows(guide: KnownGuide, args: tuple, kwargs: dict[str, Any], trace: poutine.Trace) -> None:
    """At a first call: show them the rows that plates with a ``subsample_size`` left out."""
    modules = guide.corrected_modules()
    if modules and holds_part(trace):
        run = Priors(guide, at_medians=True)
        with torch.no_grad(), poutine.block(), whole_plates():
            run.perform(args, kwargs)
        for name, module in modules.items():
            module.see(run.processes[name].x)
        guide.trace = trace


def note_rows(guide: KnownGuide, run: Posteriors) -> None:
    """After a run: take note of the rows of training, and of how many there are in all."""
    if run.new_inputs:
        warn_of_unseen(guide, run)
    elif guide.is_training:
        sites: Any = run.trace.nodes
        frames = [frame for site in guide.facts.rows if site in sites for frame in sites[site]["cond_indep_stack"]]
        modules = {name: module for name, module in guide.corrected_modules().items() if name in run.processes}
        for name, module in modules.items():
            x = run.processes[name].x
            module.see(x)
            sizes = [int(frame.full_size) for frame in frames if frame.size == x.shape[-2] and frame.full_size]
            module.num_rows = max(sizes, default=module.num_rows)


def warn_of_unseen(guide: KnownGuide, run: Run) -> None:
    """Warn where a prediction's diagonal is relative to a part of the rows of training."""
    for name, module in guide.corrected_modules().items():
        if module.num_seen < module.num_rows and name in run.processes:
            warn_once(
                guide.warned,
                "rows unseen",
                name,
                f"the kernel of GP site {name!r} has a variance correction relative to the training inputs; the guide "
                f"has seen at most {module.num_seen} of {module.num_rows} of them in one call. Call it once with all "
                "of them, guide(x, y), before or after training.",
                stacklevel=4,
            )
