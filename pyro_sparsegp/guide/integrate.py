"""The points of hyperparameters and their weights (Rue, Martino and Chopin, 2009, section 6.5).

Points are draws of a normal about the mode of F(θ) ≈ log p(θ, y) whose two halves have widths of their own along each
axis of its curvature (Martins, Simpson, Lindgren and Rue, 2013); their weights are exp(F) over its density.
"""

import math
import warnings
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..program.asking import attempt
from ..program.draws import late_bar
from ..program.traces import repeatable, whole_plates
from .check import Compared, is_of_others
from .known import KnownGuide
from .nested import Optimum
from .points import Points, worth
from .runs import Priors
from .search import Search
from .start import obstacle

_STEP = 1.5  # standard deviations along an axis at which F is looked at
_WIDTHS = 0.3, 4.0  # of a half of it, of those at the mode
_WIDER = 1.2  # for tails that are longer than a normal's
_SMALL = 20.0  # effective size, below which it is told
_LEAST = 1e-6  # a weight
_TIMES = 4  # as many points as asked for, at most, until they are worth half of those


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
    nested, hyper = compared.nested, compared.hyper
    mode = nested.mode([compared.best])
    axes, lower, upper = _halves(compared, mode)
    volume = torch.linalg.slogdet(axes).logabsdet
    found, values, ratio = list[Optimum](), mode.theta.new_zeros(0), mode.theta.new_zeros(0)
    for times in range(_TIMES):
        noise, log_density = _drawn(hyper.points(num, times), lower, upper)
        tried = [nested.tried(mode.theta + axes @ eps) for eps in noise]
        found, values = found + tried, torch.cat([values, torch.stack([one.value for one in tried])])
        ratio = torch.cat([ratio, values[len(ratio) :] - log_density + volume])
        if worth(ratio.softmax(0)) >= len(noise) / 2:
            break
    if not values.isfinite().any():
        raise ValueError("integrate: the density is not finite at draws of the hyperparameters. Train longer.")
    weight, theta = torch.softmax(ratio, 0), torch.stack([one.theta for one in found])
    log_q = values - (torch.logsumexp(ratio, 0) - math.log(len(found)))
    some = [i for i, one in enumerate(weight) if one > _LEAST]
    middle = nested.tried(_medians(theta, weight))
    ends = [mode if middle is nested.none else middle, *(found[i] for i in some)]
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
    if hyper.size and points.effective_size < _SMALL:
        warnings.warn(
            f"integrate: {points}. This is few, and intervals of the hyperparameters are rough. Take more points, "
            f"num_points={4 * num}, or fewer hyperparameters: integrate is for up to some 8.",
            stacklevel=5,
        )
    return points


def _halves(compared: Compared, mode: Optimum) -> tuple[Tensor, Tensor, Tensor]:
    """Axes A about the mode, θ = θ̂ + Aε, and the widths of ε on both sides of 0."""
    nested = compared.nested
    values, turn = torch.linalg.eigh(nested.covariance(mode))
    axes, widths = turn * values.clamp(min=torch.finfo(values.dtype).tiny).sqrt(), []
    for side in (-1, 1):
        lost = [float(mode.value - nested.tried(mode.theta + side * _STEP * axis).value) for axis in axes.mT]
        # of a normal ½(k/σ)²
        widths.append([_STEP / math.sqrt(2 * max(nats, 1e-6)) for nats in lost])
    lower, upper = axes.new_tensor(widths).clamp(*_WIDTHS) * _WIDER
    return axes, lower, upper


def _drawn(uniform: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """ε of two halves of normals by numbers in (0, 1), ``(K, D)``, and its log density."""
    share = lower / (lower + upper)
    below = 0.5 * uniform / share
    above = 0.5 + 0.5 * (uniform - share) / (1 - share)
    z = torch.special.ndtri(torch.where(uniform < share, below, above))
    noise = torch.where(z < 0, lower, upper) * z
    each = -0.5 * (z.square() + math.log(2 * math.pi)) - (0.5 * (lower + upper)).log()
    return noise, each.sum(-1)


def _medians(theta: Tensor, weight: Tensor) -> Tensor:
    """Of each column."""
    order = theta.argsort(0)
    first = (weight[order].cumsum(0) < 0.5).sum(0).clamp(max=len(theta) - 1)
    return theta.gather(0, order.gather(0, first[None]))[0]
