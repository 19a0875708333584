"""The objective beside draws of q: an objective may take densities for others than a program has."""

import math
from typing import Any

import torch
from pyro import poutine

from ..program.draws import Draw, all_draws

_BOUNDS, _ERRORS = 64, 3.5  # bounds that are compared, by so many standard errors
_JOINT = 2000  # rows whose values are drawn jointly
_NUMBERS = 1000  # at a row: features, or values at nodes
_NATS = 1.0  # that are not told of


def of_bound(guide: Any, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """Whether the bound by joint draws of q is the objective's."""
    facts, rows = guide.facts, max(guide.core.sizes.values())
    if not guide.kind.has_bound or guide.corrected_modules() or rows > _JOINT:
        return []
    objective, was = guide.objective(guide.core.num_nodes), (guide.training, guide.core.points)

    def by_objective(_: Draw) -> Draw:
        return {"": -objective.differentiable_loss(guide.model, guide, *args, **kwargs)}

    def by_draws(_: Draw) -> Draw:
        guide(*args, **kwargs)
        model, its = guide.get_traces()
        return {"": model.log_prob_sum() - its.log_prob_sum()}

    with torch.no_grad():
        objective.loss(guide.model, guide, *args, **kwargs)  # raises where it is not finite
        items = {"": torch.arange(_BOUNDS)}
        said = all_draws(by_objective, items, lambda _: rows * _NUMBERS)[""].cpu()
        try:
            vars(guide)["training"], guide.core.points = False, None  # a loss is of the normal q(θ)
            found = all_draws(by_draws, items, lambda _: rows * max(rows, _NUMBERS))[""].cpu()
        finally:
            (vars(guide)["training"], guide.core.points), guide.trace = was, poutine.Trace()
    error = math.sqrt(float(found.var() + said.var()) / _BOUNDS)
    if abs(found.mean() - said.mean()) < _NATS + _ERRORS * error:
        return []
    names = ", ".join(map(repr, guide.joint.field or facts.gps))
    others = [name for name in guide.joint.field if name not in facts.gps]
    remedy = f"Give the guide independent={tuple(others)}" if others else "Compare with NUTS"
    return [
        f"{names}: the bound is {found.mean():.0f} nats by draws of the posterior, and {said.mean():.0f} by the "
        f"objective, because densities do not have the form that the guide found at its first call. {remedy}."
    ]
