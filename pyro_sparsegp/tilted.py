"""Tilted distributions p(y | f)^α N(f | m, v) by one-dimensional quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

__all__ = ["Tilted", "log_normaliser", "normaliser_derivatives", "tilted"]

_MOST_PASSES = 30


@dataclass(frozen=True)
class Tilted:
    """The moments of p(y | f)^α N(f | m, v) / Z, and how they were taken.

    :param log_z: log Z, ``(..., N)``; NaN where log p is −∞ or NaN at all nodes.
    :param mean: E f, ``(..., N)``.
    :param variance: Var f, ``(..., N)``.
    :param nodes: ``(K, ..., N)``; a node where log p is not finite, which does not count, is put where it is.
    :param weights: of the nodes, their sum 1, ``(K, ..., N)``.
    :param cavity: m and v.
    """

    log_z: Tensor
    mean: Tensor
    variance: Tensor
    nodes: Tensor
    weights: Tensor
    cavity: tuple[Tensor, Tensor]


@torch.no_grad()
def tilted(
    log_density: Callable[[Tensor], Tensor],
    mean: Tensor,
    variance: Tensor,
    centre: Tensor,
    spread: Tensor,
    power: float = 1.0,
    num_nodes: int = 48,
    passes: int = 2,
) -> Tilted:
    """Moments of p(y | f)^α N(f | m, v) by the trapezoidal rule around where that density is.

    On the whole line that rule's error for a Gaussian, or a Gaussian's integral, of standard deviation s is
    2exp(−2π²s²/h²): at spacing h = s that is 5e-9. The nodes reach 8 standard deviations to each side, or as far as
    balances the two errors if they are few. Each pass sets centre and spread by the moments that the pass before
    found: a likelihood narrower than the nodes' spacing is closed in on, and one beyond the last node is gone after.
    Passes are added while some density is not well among its nodes.

    :param log_density: f at nodes, ``(K, ..., N)``, to log p(yₙ | fₙ), of the same shape.
    :param mean: m, ``(..., N)``.
    :param variance: v, ``(..., N)``.
    :param centre: a guess of the tilted mean, ``(..., N)``.
    :param spread: a guess of its standard deviation, ``(..., N)``.
    :param power: α.
    """
    reach = min(math.sqrt(math.pi * (num_nodes - 1)), 8.0)
    steps = torch.linspace(-reach, reach, num_nodes, dtype=mean.dtype, device=mean.device)
    columns = steps.reshape(-1, *[1] * mean.dim())
    step = 2 * reach / (num_nodes - 1)
    for i in range(_MOST_PASSES):
        nodes = torch.addcmul(centre, spread, columns)
        values = log_density(nodes).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        away = nodes - mean
        logits = torch.addcmul(power * values, away, away / variance, value=-0.5)
        peak = logits.amax(0)
        weights = (logits - peak).exp_()
        total = weights.sum(0)
        # In units of the spread, relative to the centre.
        first = torch.tensordot(steps, weights, 1) / total
        second = torch.tensordot(steps.square(), weights, 1) / total - first.square()
        aside = first.abs() > 0.5 * reach
        bad = aside | (second > max(reach / 3, 1.5) ** 2) | (second < min(step, 0.5) ** 2)
        # Mass on one node: all that is known is that the density is narrower than their spacing.
        second = torch.where(second.isfinite(), second.clamp(min=(step / 8) ** 2), second)
        at = centre, spread
        if i + 1 >= passes and not bad.any():
            break
        centre = torch.where(first.isfinite(), centre + spread * first, centre)
        ratio = torch.where(aside, 4.0, second.sqrt())
        spread = spread * torch.where(ratio.isfinite(), ratio, step / 4)
    log_z = peak + (total * at[1] * step).log() - 0.5 * (variance.log() + math.log(2 * math.pi))
    return Tilted(
        log_z,
        at[0] + at[1] * first,
        second * at[1].square(),
        torch.where(values.isfinite(), nodes, at[0]),
        weights / total,
        (mean, variance),
    )


def log_normaliser(
    at: Tilted, mean: Tensor, variance: Tensor, values: Optional[Tensor] = None, power: float = 1.0
) -> Tensor:
    """log ∫ p(y | f)^α N(f | m, v) df, ``(..., N)``, with its gradients by m, v and log p.

    With the nodes held, ∂/∂m = (E f − m)/v, ∂/∂v = ½((Var f + (E f − m)²)/v² − 1/v), and the derivative by log p at a
    node is α times its weight.

    :param mean: m, with its graph; of the value it had when the moments were taken.
    :param variance: v, likewise.
    :param values: log p at ``at.nodes``, ``(K, ..., N)``, with its graph, if it has one.
    """
    m, v = at.cavity
    slope = (at.mean - m) / v
    curve = 0.5 * (slope.square() + (at.variance / v - 1) / v)
    result = at.log_z + slope * (mean - m) + curve * (variance - v)
    if values is not None:
        change = torch.where(at.weights > 0, at.weights * (values - values.detach()), 0.0)
        result = result + power * change.sum(0)
    return result


def normaliser_derivatives(at: Tilted, log_density: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """First and second derivative of log ∫ p(y | f) N(f | m, v) df by m, ``(..., N)`` each.

    With ℓ = log p and moments of the tilted distribution they are E ℓ' and Cov(ℓ', f)/v, whose limits as v → 0 are
    ℓ'(m) and ℓ''(m). In (E f − m)/v, the same by parts, all digits would cancel there.

    :param at: of power 1.
    :param log_density: as in :func:`tilted`, differentiable.
    """
    mean, variance = at.cavity
    nodes = at.nodes.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(log_density(nodes).sum(), nodes)
    slope = torch.where(at.weights > 0, slope, 0.0)
    first = (at.weights * slope).sum(0)
    return first, (at.weights * (slope - first) * (at.nodes - mean)).sum(0) / variance
