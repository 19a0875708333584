"""Which rows a call brings, to a guide of which something may belong to single rows of its training data; and what
is asked at all of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import poutine

from ..program.checks import holds_part, require_full_batch
from ..program.data import TrainingData
from ..program.traces import is_free, is_observation, share_of, whole_plates
from ..warned import warn_once
from .known import KnownGuide, Rows
from .runs import Priors, Run


def rows_of(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Rows:
    """Which rows a call brings."""
    # Its tensors are compared with those of training where something belongs to single rows, and no sooner.
    relation, steps = guide.relation(args, kwargs), guide.is_training
    same, inputs = steps or not guide.on_sites, True
    if guide.core.data is not None and guide.is_about_rows:
        same, inputs = relation.same, relation.inputs
    learns = steps and (same or (guide.takes_batches and not relation.fewer))
    return Rows(same, inputs, learns, relation=relation)


def note_step(run: Run, args: tuple, kwargs: dict[str, Any]) -> float:
    """After a step of training: take note of its data, and check that they are what the guide is about.

    :returns: their share of all rows, as plates tell; 0 where there are none.
    :raises ValueError: if an objective's step, which is at nodes, brings no data.
    """
    guide, core, facts, sites = run.guide, run.guide.core, run.guide.core.facts, run.sites
    observed = {name: site for name, site in run.data.items() if not guide.is_given(name, site)}
    if not observed:
        if run.nodes is not None:
            require_data(run)
        return 0.0
    known = {*facts.gps, *facts.latents, *facts.rows}
    # A latent that training first meets now would be drawn from its prior at each step, and data be met at f's mean:
    # test_guide.py::test_refusals.
    others = {name: site for name, site in sites.items() if name not in known}
    new = [n for n, site in others.items() if (_is_prior(site) if is_free(site) else is_observation(site))]
    if new:
        raise ValueError(
            f"site {new[0]!r} is one that the guide's first call did not meet, which knows {sorted(known)}. Make a new "
            "guide, and call it first with arguments under which the model has all its latents and observations."
        )
    if not run.rows.same:
        _refuse_other_data(run, next(iter(observed)))
    core.data = core.data or TrainingData(guide.model, args, kwargs)
    # After guide.forget_data() the numbers are 0: test_data.py::test_other_data_after_the_first_are_forgotten.
    if 0 in facts.rows.values():
        facts.rows.update({name: site["value"].numel() for name, site in observed.items()})
    return share_of_rows(run)


def _is_prior(site: Any) -> bool:
    return site["fn"] is site["infer"].get("prior")


def require_data(run: Run) -> None:
    """Raise if an objective's run met no data: the model has drawn them, y=None.

    :raises ValueError: naming a site that held data at the first call.
    """
    guide, rows, sites = run.guide, run.guide.facts.rows, run.sites
    observed = [name for name, site in sites.items() if is_observation(site)]
    # Beside what is given, data that are left out, not drawn, may be another step's:
    # test_data.py::test_measurements_that_are_not_of_f_are_data.
    drawn = not observed or any(is_free(sites[name]) for name in rows if name in sites)
    # test_messages.py::test_a_later_step_without_data
    if rows and drawn and all(guide.is_given(name, sites[name]) for name in observed):
        known = ", ".join(map(repr, rows))
        raise ValueError(
            f"this step observes nothing, where the first call observed {known}. Give it the data, svi.step(x, y); "
            "predictions are predict(model, guide, x), and a loss without a step is evaluate_loss."
        )


def _refuse_other_data(run: Run, observed: str) -> None:
    """Raise if a step of training brings other data than the guide is about."""
    guide = run.guide
    # test_data.py::test_a_loss_at_other_data_leaves_the_posterior_alone
    about: list[str] = []
    for name, module in () if guide.takes_batches else guide.site_modules().items():
        require_full_batch(name, module.family["name"], run.trace)
        about.append(f"GP site {name!r} has the family {module.family['name']}, whose posterior")
    # test_data.py::test_latents_of_single_rows_are_new_at_new_rows
    local = [n for n in guide.core.facts.local_latents if n in run.sites and _is_prior(run.sites[n])]
    about += [f"latent site {name!r} has a value for each row, which" for name in local]
    if about:
        raise ValueError(
            f"{about[0]} belongs to the training data, and this call with gradients brings other rows at site "
            f"{observed!r}. To evaluate the trained guide on other data use torch.no_grad(); to train it on the same "
            "rows, keep their order; on other data, make a new guide or call guide.forget_data() first; for "
            "mini-batches take a family such as SVGP, plate = pyro.plate('data', size=N, subsample_size=B), and index "
            "the data by plate.indices."
        )


def share_of_rows(run: Run) -> float:
    """The share of all rows that a step of training has, the least of all sites that hold data; 0 if it is not known.

    Warns of a mini-batch that no plate scales up.
    """
    guide, facts, sites = run.guide, run.guide.core.facts, run.sites
    # A plate that scales rows up does so whatever handlers' scales are.
    shares = [share_of(site) for site in run.data.values()]
    least, known = min(shares, default=1.0), True
    scales = [sites[name]["scale"] for name in facts.gps if name in sites]  # of all that is scored, if that is scaled
    for (name, site), share in zip(run.data.items(), shares):
        if share < 1:
            continue
        num, before, told = site["value"].numel(), facts.rows[name], ("rows", name)
        # A handler's number may scale a batch up to the first call's rows: others are weights
        # (test_data.py::test_a_weight_of_the_data_is_no_size).
        fewer = num < before and not _equal(site["scale"] * num, before)
        # What is given has as many numbers in every step; so have data beside a batch that is scaled up. Expectation
        # propagation refuses others itself (test_data.py::test_batches_without_a_size_are_told_of).
        asked = num == before and least == 1 and not (guide.by_expectation or told in guide.warned)
        if fewer or (asked and run.rows.relation.others and not guide.is_given(name, site)):
            warn_once(
                guide.warned,
                *told,
                f"site {name!r} observes {num} values in this step, fewer or others than the {before} before, and no "
                "plate scales them up: if this is a mini-batch, give the plate the full size, pyro.plate('data', "
                "size=N, subsample=x) or subsample_size=B; otherwise the KL outweighs the data. The guide takes "
                "poutine.scale for the rows' weights.",
                stacklevel=5,
            )
        # A handler's scale is of a batch; of other numbers of rows than at first it is not known what they are.
        known = known and num == before and told not in guide.warned and _equal(site["scale"], scales[0])
    return least if known else 0.0


def _equal(one: Any, other: Any) -> bool:
    """Whether two scales are one number; tensors are not asked, which would be read back from a device."""
    return isinstance(one, (int, float)) and isinstance(other, (int, float)) and math.isclose(one, other)


# Kernels whose diagonal depends on the rows of training: which of these a guide has seen.


def show_all_rows(guide: KnownGuide, args: tuple, kwargs: dict[str, Any], trace: poutine.Trace) -> None:
    """At a first call: show them the rows that plates with a ``subsample_size`` left out."""
    modules = guide.corrected_modules()
    if modules and holds_part(trace):
        with torch.no_grad(), poutine.block(), whole_plates():
            run = Priors(guide, at_medians=True).perform(args, kwargs)
        for name, module in modules.items():
            module.see(run.processes[name].x)
        guide.trace = trace


def note_rows(run: Run) -> None:
    """After a run: take note of the rows of training, and of how many there are in all; or warn where a prediction's
    diagonal is relative to a part of them.
    """
    for name, process in run.processes.items():
        module = run.guide.corrected_modules().get(name) if process.kernel.depends_on_rows else None
        if module is None:
            continue
        if not run.rows.new and run.guide.is_training:
            module.see(process.x)
            frames = [frame for site in run.data.values() for frame in site["cond_indep_stack"]]
            sizes = [int(f.full_size) for f in frames if f.size == process.x.shape[-2] and f.full_size]
            module.num_rows = max(sizes, default=module.num_rows)
        # test_deep_basis.py::test_unseen_rows_are_told_of_and_one_call_mends_it
        elif run.rows.new and module.num_seen < module.num_rows:
            warn_once(
                run.guide.warned,
                "rows unseen",
                name,
                f"the kernel of GP site {name!r} has a variance correction relative to the training inputs, and the "
                f"guide has seen {module.num_seen} of these {module.num_rows}. Call it once with all, guide(x, y), "
                "before or after training.",
                stacklevel=4,
            )
