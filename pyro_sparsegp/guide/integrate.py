"""The points of hyperparameters and their weights (Rue, Martino and Chopin, 2009, section 6.5).

Points are draws of normals about the mode of F(θ) ≈ log p(θ, y), and then about what all before weigh, until they are
worth half of ``num`` (:mod:`~pyro_sparsegp.guide.adaptive`); their weights are exp(F) over their density.
"""

import warnings
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..program.asking import attempt
from ..program.draws import late_bar
from ..program.traces import repeatable, whole_plates
from .adaptive import drawn, weighted
from .check import Compared, is_of_others
from .known import KnownGuide
from .points import Points
from .runs import Priors
from .search import Search
from .start import obstacle

_SMALL = 20.0  # effective size, below which it is told
_LEAST = 1e-6  # a weight


def integrate(guide: KnownGuide, args: tuple, kwargs: dict[str, Any], num: int) -> Points:
    """So many weighted points."""
    if why := obstacle(guide):
        raise ValueError(f"integrate needs latents and GP sites that share one posterior, and {why}")
    with repeatable(guide.like), poutine.block(), whole_plates(), torch.enable_grad(), late_bar("points") as bar:
        run = Priors(guide, at_medians=True).perform(args, kwargs)
        if is_of_others(run, args, kwargs):
            raise ValueError("integrate: these are not the rows that the guide was trained on. Give it those, or none.")
        fixed = list(filter(guide.is_point, guide.able_to_couple))
        with attempt() as asked:
            compared = Compared(guide, Search(guide, run, (args, kwargs), fixed, bar.update))
        if asked.error is not None:
            raise ValueError(f"integrate: there is no nested Laplace approximation ({asked.error}).") from asked.error
        return _weighted(compared, num)


def _weighted(compared: Compared, num: int) -> Points:
    nested, hyper, normal = compared.nested, compared.hyper, (compared.loc, compared.root)
    found, _ = drawn(nested, normal, max(num // 2, hyper.size + 1))
    if not found:
        raise ValueError("integrate: the density is not finite at draws of the hyperparameters. Train longer.")
    found, ratio = weighted(nested, normal, found, len(found), len(found))
    weight, theta = ratio.softmax(0), torch.stack([one.theta for one in found])
    log_q = torch.stack([one.value for one in found]) - ratio.logsumexp(0)
    some = [i for i, one in enumerate(weight) if one > _LEAST]
    middle = nested.tried(_medians(theta, weight))
    ends = [compared.best if middle is nested.none else middle, *(found[i] for i in some)]
    means, precisions = zip(*(nested.of_means(one) for one in ends))
    parts = zip(*(one.parts if nested.layout.eliminated else [one.upper] for one in precisions))
    points = Points(
        {name: list(shape) for name, shape in hyper.shapes.items()},
        {name: list(sizes) for name, sizes in nested.layout.field.items()},
        torch.cat([weight.new_zeros(1), weight[some] / weight[some].sum()]),
        torch.cat([log_q.new_zeros(1), log_q[some]]),
        torch.stack([one.theta for one in ends]),
        torch.stack(list(means)) + compared.shift,
        [torch.stack(each) for each in parts],
    )
    if points.effective_size < min(_SMALL, len(found)):
        warnings.warn(
            f"integrate: {points}. This is few, and intervals of the hyperparameters are rough. Take more points, "
            f"num_points={4 * num}, or fewer hyperparameters: integrate is for up to some 8.",
            stacklevel=5,
        )
    return points


def _medians(theta: Tensor, weight: Tensor) -> Tensor:
    """Of each column."""
    order = theta.argsort(0)
    first = (weight[order].cumsum(0) < 0.5).sum(0).clamp(max=len(theta) - 1)
    return theta.gather(0, order.gather(0, first[None]))[0]
