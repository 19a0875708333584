"""Which rows a call brings, to a guide of which something may belong to single rows of its training data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional, Union

import torch
from pyro.poutine.util import site_is_subsample

from ..program.checks import require_full_batch
from ..program.data import Relation, TrainingData
from ..program.traces import all_sites, is_free, is_observation
from ..warned import warn_once
from .known import KnownGuide, Rows
from .runs import Posteriors, Priors

__all__ = ["are_known_rows", "note_step", "require_data", "rows_of", "warn_of_batches"]


def rows_of(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Rows:
    """Which rows a call brings. In a step of training the guide follows its data into another order."""
    relation, steps = guide.relation(args, kwargs), guide.is_training
    if relation is None or not guide.is_about_rows:
        same, inputs = steps or not guide.on_sites, True
    elif relation.order is None:
        same, inputs = relation.same, relation.inputs
    elif guide.takes_batches:  # a batch of them: what q is conditioned on stays as it is
        same = inputs = False
    else:  # to look at the guide is to leave its rows where they are
        same, inputs = True, steps
        if steps:
            _refuse_rows(guide.local_latents, "the training data with its rows in another order")
            for module in guide.site_modules().values():
                module.reorder(relation.order)
            guide.learnt.data = TrainingData(guide.model, args, kwargs)
    rows = Rows(same, inputs, steps and same, relation)
    return replace(rows, learns=True) if steps and not same and guide.takes_batches and not rows.fewer else rows


def are_known_rows(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call brings all the data of training, row by row, where latents have a value for each row."""
    relation = guide.relation(args, kwargs) if guide.local_latents else None
    return relation is not None and relation.same and relation.order is None


def note_step(guide: KnownGuide, run: Union[Posteriors, Priors], args: tuple, kwargs: dict[str, Any]) -> float:
    """After a step of training: take note of its data, and check that they are what the guide is about.

    :returns: their share of all rows, as plates tell; 0 where there are none.
    :raises ValueError: if an objective's step, which is at nodes, brings no data.
    """
    core, sites, rows = guide.learnt, dict(all_sites(run.trace)), run.rows
    facts = core.facts
    seen = [name for name in facts.rows if name in sites and sites[name]["is_observed"]]
    observed = [name for name in seen if not guide.is_given(name, sites[name])]
    if observed:
        known = {*facts.gps, *facts.latents, *facts.rows}
        # What the guide has no posterior of is drawn from its prior: a latent that training first meets now would
        # never learn, test_guide.py::test_a_latent_that_a_later_step_meets_first_is_an_error.
        new = [n for n, site in sites.items() if n not in known and is_free(site) and _is_prior(site)]
        if new:
            raise ValueError(
                f"site {new[0]!r} is a latent that the guide's first call did not meet, so that it has no posterior of "
                f"it: it knows {sorted(known)}. Make a new guide of the model that has it, or call the guide first "
                "with arguments with which the model meets all its latents."
            )
        if not rows.same:
            _refuse_other_data(guide, run, observed[0])
        if core.data is None:
            core.data = TrainingData(guide.model, args, kwargs)
        if core.forgotten:
            core.forgotten = False
            for name in observed:
                facts.rows[name] = torch.as_tensor(sites[name]["value"]).numel()
    elif run.nodes is not None:
        require_data(guide)
    share = warn_of_batches(guide, rows.relation)
    return share if observed else 0.0


def _is_prior(site: Any) -> bool:
    return not site_is_subsample(site) and site["fn"] is site["infer"].get("prior")


def require_data(guide: KnownGuide) -> None:
    """Raise if an objective's run met no data: the model has drawn them, y=None.

    :raises ValueError: naming a site that held data at the first call.
    """
    facts, nodes = guide.facts, guide.trace.nodes
    seen = [name for name, site in all_sites(guide.trace) if is_observation(site)]
    given = [name for name in seen if guide.is_given(name, nodes[name])]
    # Beside what is given, data that are left out, not drawn, may be another step's.
    left = any(name in nodes for name in facts.rows if name not in given)
    if facts.rows and given == seen and (not given or left):
        known = ", ".join(map(repr, facts.rows))
        raise ValueError(
            f"this step observes nothing, where the first call observed {known}: it would "
            "train towards the prior. Give it the data, svi.step(x, y); predictions are predict(model, guide, x), "
            "and a loss without a step is evaluate_loss."
        )


def _refuse_other_data(guide: KnownGuide, run: Union[Posteriors, Priors], observed: str) -> None:
    """Raise if a step of training brings other data than the guide is about."""
    for name, module in () if guide.takes_batches else guide.site_modules().items():
        require_full_batch(name, module.family["name"], run.trace)
        raise ValueError(
            f"GP site {name!r} has the family {module.family['name']}, whose posterior is that of all its training "
            f"data, and this call with gradients brings other rows at site {observed!r}: it would be taken for a "
            "step of training on them. To evaluate the trained guide on other data use torch.no_grad(); to train "
            "it on other data, make a new guide or call guide.forget_data() first; for mini-batches take a family "
            "such as SVGP, and pyro.plate('data', size=N, subsample=x)."
        )
    sites: Any = run.trace.nodes
    drawn = [n for n in guide.local_latents if n in sites and sites[n]["fn"] is sites[n]["infer"].get("prior")]
    _refuse_rows(drawn, f"other rows at site {observed!r} in a step of training")


def _refuse_rows(local: Sequence[str], what: str) -> None:
    if local:
        raise ValueError(
            f"this call brings {what}; site {local[0]!r} has a value for each row, which belongs to the row's "
            "number. Keep the rows and their order, or write plate = pyro.plate('data', N, subsample_size=B) and "
            "index the data by plate.indices."
        )


def warn_of_batches(guide: KnownGuide, relation: Optional[Relation]) -> float:
    """Warn if a step's rows are a mini-batch that no plate scales up.

    :returns: in training, their share of all rows, the least of all sites that hold data.
    """
    if not torch.is_grad_enabled() or not guide.training:
        return 0.0
    facts, core = guide.facts, guide.learnt
    least, scale, known, unscaled = 1.0, 1.0, True, {}
    for name, site in all_sites(guide.trace):
        if name in facts.gps:
            scale = site["scale"]  # of all that is scored, if that is scaled
        elif name in facts.rows and site["is_observed"]:
            # A plate that scales rows up does so whatever handlers' scales are.
            share = _share_of(site["cond_indep_stack"])
            least = min(least, share)
            if share == 1:
                unscaled[name] = site
    for name, site in unscaled.items():
        num, rows = site["value"].numel(), facts.rows[name]
        # What is given has as many numbers in every step; so have data beside a batch that is scaled up.
        others = num == rows and least == 1 and _are_others(guide, name, relation)
        if num < rows or (others and not guide.is_given(name, site)):
            core.unscaled.add(name)
            _warn_of_rows(guide, name, site["scale"], num, rows)
        # A handler's scale is of a batch; of other numbers of rows than at first it is not known what they are.
        known = known and num == rows and name not in core.unscaled and _equal(site["scale"], scale)
    return least if known else 0.0


def _share_of(frames: Sequence[Any]) -> float:
    """The share of all rows that a plate has drawn, 1 where none has."""
    for frame in frames:
        if frame.full_size not in (None, frame.size):
            return float(frame.size / frame.full_size)
    return 1.0


def _warn_of_rows(guide: KnownGuide, name: str, scale: Any, num: int, rows: int) -> None:
    """Warn of a mini-batch, unless a handler's number scales it up to the first call's rows: others are weights."""
    is_number = isinstance(scale, (int, float))
    if num < rows and is_number and math.isclose(scale * num, rows):
        return
    fewer = f"{num} values in this step, {rows} in the first"
    warn_once(
        guide.warned,
        "rows",
        name,
        f"site {name!r} observes {fewer if num < rows else f'other {num} rows than before'}, and no plate "
        "scales them up: if this is a mini-batch, give the plate the full size, pyro.plate('data', size=N, "
        "subsample=x) or subsample_size=B; otherwise the KL outweighs the data."
        + ("" if is_number and scale == 1 else " What poutine.scale gives is taken for a weight of the rows."),
        stacklevel=6,
    )


def _are_others(guide: KnownGuide, name: str, relation: Optional[Relation]) -> bool:
    """Whether a step's rows are others than the first's, asked until it was told of."""
    asked = ("rows", name) not in guide.warned and not guide.by_expectation  # which refuses them itself
    return asked and relation is not None and relation.others and not relation.same


def _equal(one: Any, other: Any) -> bool:
    """Whether two scales are one number; tensors are not asked, which would be read back from a device."""
    return isinstance(one, (int, float)) and isinstance(other, (int, float)) and math.isclose(one, other)
