"""Tilted distributions p(y | f)^α N(f | m, v) by one-dimensional quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tilted", "log_normaliser", "tilted"]


@dataclass(frozen=True)
class Tilted:
    """The moments of p(y | f)^α N(f | m, v) / Z, and where they were taken.

    :param log_z: log Z, ``(..., N)``; NaN where log p is −∞ or NaN at all nodes.
    :param mean: E f, ``(..., N)``.
    :param variance: Var f, ``(..., N)``.
    :param nodes: ``(K, ..., N)``; log p is finite there, or does not count.
    :param values: log p there, where it counts.
    :param counts: whether log p counts at a node, ``(K, ..., N)``.
    :param spacing: between nodes, ``(..., N)``.
    """

    log_z: Tensor
    mean: Tensor
    variance: Tensor
    nodes: Tensor
    values: Tensor
    counts: Tensor
    spacing: Tensor


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
    found: a likelihood narrower than the nodes' spacing is closed in on.

    :param log_density: f at nodes, ``(K, ..., N)``, to log p(yₙ | fₙ), of the same shape.
    :param mean: m, ``(..., N)``.
    :param variance: v, ``(..., N)``.
    :param centre: a guess of the tilted mean, ``(..., N)``.
    :param spread: a guess of its standard deviation, ``(..., N)``.
    :param power: α.
    """
    reach = min(math.sqrt(math.pi * (num_nodes - 1)), 8.0)
    offsets = torch.linspace(-reach, reach, num_nodes, dtype=mean.dtype, device=mean.device)
    offsets = offsets.reshape(-1, *[1] * mean.dim())
    step = 2 * reach / (num_nodes - 1)
    for _ in range(passes):
        spacing = step * spread
        nodes = centre + spread * offsets
        values = log_density(nodes)
        counts = values > -math.inf  # a NaN is not
        values = torch.where(counts, values, -math.inf)
        logits = power * values + _log_normal(nodes, mean, variance)
        peak = logits.amax(0)
        weights = (logits - peak).exp()
        total = weights.sum(0)
        first = (weights * (nodes - centre)).sum(0) / total
        second = (weights * (nodes - centre - first).square()).sum(0) / total
        log_z = peak + total.log() + spacing.log()
        # Mass on one node: all that is known is that the density is narrower than their spacing.
        second = torch.where(second.isfinite(), torch.maximum(second, (spacing / 8).square()), second)
        result = Tilted(log_z, centre + first, second, torch.where(counts, nodes, centre), values, counts, spacing)
        centre = torch.where(first.isfinite(), centre + first, centre)
        spread = torch.where(second > (spacing / 4).square(), second.sqrt(), spacing / 4)
    return result


def log_normaliser(values: Tensor, at: Tilted, mean: Tensor, variance: Tensor, power: float = 1.0) -> Tensor:
    """log ∫ p(y | f)^α N(f | m, v) df at nodes that are held, ``(..., N)``, with gradients by m, v and log p.

    :param values: log p at ``at.nodes``, ``(K, ..., N)``.
    """
    logits = power * values + _log_normal(at.nodes, mean, variance)
    return torch.where(at.counts, logits, -math.inf).logsumexp(0) + at.spacing.log()


def _log_normal(f: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((f - mean).square() / variance + variance.log() + math.log(2 * math.pi))
