"""Tilted distributions p(y | f)^α N(f | m, v) by one-dimensional quadrature: the one integral of a likelihood over
function values that expectation propagation and the diagnostics share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Tilted:
    """The moments of p(y | f)^α N(f | m, v) / Z, ``(..., N)``, and how they were taken."""

    log_z: Tensor  # NaN where log p is −∞ or NaN at all nodes
    mean: Tensor  # E f
    variance: Tensor  # Var f
    nodes: Tensor  # (K, ..., N); one where log p is not finite, which does not count, is put where it is
    weights: Tensor  # of the nodes, their sum 1, (K, ..., N)
    cavity: tuple[Tensor, Tensor]  # m and v


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
    """Moments of p(y | f)^α N(f | m, v): by the trapezoidal rule around where that density is, or in panels.

    :param log_density: f at nodes, ``(K, ..., N)``, to log p(yₙ | fₙ), of the same shape.
    :param variance: v; 0 is as good as the smallest positive number.
    :param centre: a guess of the tilted mean; ``spread``: of its standard deviation.
    """
    # On the whole line the trapezoidal rule's error for a Gaussian, or a Gaussian's integral, of standard deviation s
    # is 2exp(−2π²s²/h²): at spacing h = s that is 5e-9. The nodes reach 8 standard deviations to each side, or as far
    # as balances the two errors if they are few. Each pass sets centre and spread by the moments that the pass before
    # found: a likelihood narrower than the nodes' spacing is closed in on. Where the last pass is not borne out by
    # every other of its nodes, its ends or the pass before, as with two humps of different widths, a cusp or a peak
    # many standard deviations away, all is integrated anew by adaptive Gauss-Legendre quadrature, whose nodes are more.

    def finite(f: Tensor) -> Tensor:
        return log_density(f).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)

    variance = variance.clamp(min=torch.finfo(variance.dtype).tiny)
    scale = variance.sqrt()
    spread = torch.where(spread > 0, spread, scale)
    num_nodes += 1 - num_nodes % 2  # one in the middle, so that every other one of a symmetric density's tells
    reach = min(math.sqrt(math.pi * (num_nodes - 1)), 8.0)
    steps = torch.linspace(-reach, reach, num_nodes, dtype=mean.dtype, device=mean.device)
    columns = steps.reshape(-1, *[1] * mean.dim())
    step = 2 * reach / (num_nodes - 1)
    shift = centre - mean  # from m: next to m, a small variance would be lost
    log_zs: list[Tensor] = []
    for _ in range(passes):
        away = torch.addcmul(shift, spread, columns)
        values = finite(mean + away)
        logits = power * values - 0.5 * (away / scale).square()
        peak = logits.amax(0)
        weights = (logits - peak).exp_()
        total = weights.sum(0)
        log_zs.append(peak + (total * (spread / scale)).log() + math.log(step / math.sqrt(2 * math.pi)))
        # E t and Var t of t = (f − centre)/spread.
        first = torch.tensordot(steps, weights, 1) / total
        second = torch.tensordot(steps.square(), weights, 1) / total - first.square()
        # Mass on one node: all that is known is that the density is narrower than their spacing.
        second = torch.where(second.isfinite(), second.clamp(min=(step / 8) ** 2), second)
        at = shift, spread
        shift = torch.where(first.isfinite(), shift + spread * first, shift)
        spread = spread * torch.where(second.isfinite(), second.sqrt(), step / 4)
    # The last pass against every other of its nodes and the pass before; what may be beyond its ends, and at m.
    doubt = (weights[::2].sum(0) - weights[1::2].sum(0)).abs()
    stretch = 1 + scale / (at[1] * step)
    doubt = torch.maximum(doubt, torch.maximum(weights[0], weights[-1]) * stretch) / total
    *before, log_z = log_zs[-2:]
    for other in before:
        doubt = torch.maximum(doubt, (log_z - other).abs())
    elsewhere = at[0].abs() > reach * at[1]
    far, sure = torch.stack([elsewhere.any(), (doubt <= _DOUBT).all()]).tolist()  # one look at numbers
    if far:
        there = power * finite(mean[None])[0]
        doubt = torch.where(elsewhere, torch.maximum(doubt, (there - peak).exp() * stretch / total), doubt)
        sure = bool((doubt <= _DOUBT).all())
    weights, shift, second = weights / total, at[0] + at[1] * first, second * at[1].square()
    if not sure:
        away, values, weights, log_z, shift, second = _in_panels(finite, mean, variance, at, power)
    heaviest = away.gather(0, weights.argmax(0, keepdim=True))
    nodes = mean + torch.where(values.isfinite(), away, heaviest)
    return Tilted(log_z, mean + shift, second, nodes, weights, (mean, variance))


def _in_panels(
    log_density: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, guess: tuple[Tensor, Tensor], power: float
) -> tuple[Tensor, ...]:
    """Nodes f − m, log p there, weights, log Z, E f − m and Var f, by Gauss-Legendre quadrature in panels: the panels
    with the largest error are split. About a ``guess``, a place, relative to m, and a spread, there are panels from the
    start.
    """
    like, scale = mean, variance.sqrt()
    found, own = np.polynomial.legendre.leggauss(_ORDER)
    points, rule = (torch.from_numpy(part).to(like) for part in (found, own))
    # The integrand's last two coefficients in Legendre polynomials say how well the panel's nodes follow it.
    last = np.polynomial.legendre.legvander(found, _ORDER - 1)[:, -2:] * (2 * np.arange(_ORDER - 2, _ORDER) + 1)
    tests = torch.from_numpy(last.T * own).to(like)
    column = (-1, *[1] * like.dim())

    def evaluate(left: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f − m and log p at the panels' nodes, ``(J, O, ..., N)``, and the integrand's logarithm."""
        z = left[:, None] + width[:, None] * ((points + 1) / 2).reshape(column)
        away = scale * z
        values = log_density(mean + away.flatten(0, 1)).reshape(away.shape)
        logits = power * values - 0.5 * z.square() + width.log()[:, None]
        return away, values, logits

    ends = like.new_tensor(_ENDS).reshape(column).expand(-1, *like.shape)
    near = guess[0] / scale + guess[1] / scale * like.new_tensor(_NEAR).reshape(column)
    ends = torch.cat([ends, near.nan_to_num().clamp(_ENDS[0], _ENDS[-1])]).sort(0).values
    left, width = ends[:-1], ends.diff(dim=0)
    away, values, logits = evaluate(left, width)
    for i in range(_SPLITS + 1):
        peak = logits.amax((0, 1))
        parts = (logits - peak).exp()
        mass = (parts * rule.reshape(column)).sum(1) / 2
        total = mass.sum(0)
        error = torch.stack([(parts * test.reshape(column)).sum(1).abs() for test in tests]).amax(0) / 2
        if i == _SPLITS or not (error.sum(0) > _TOLERANCE * total).any():
            break
        # The worst panels are split in four, for which the emptiest make room.
        chosen = error.topk(2, 0).indices
        kept = torch.where(torch.zeros_like(mass).scatter(0, chosen, 1.0) > 0, -1.0, mass)
        kept = kept.topk(min(len(mass) - 2, _MOST_PANELS), 0).indices
        quarter = width.gather(0, chosen) / 4
        more = left.gather(0, chosen)
        more, quarter = torch.cat([more + k * quarter for k in range(4)]), quarter.repeat(4, *[1] * like.dim())
        new = evaluate(more, quarter)
        left, width = torch.cat([left.gather(0, kept), more]), torch.cat([width.gather(0, kept), quarter])
        across = kept[:, None].expand(-1, _ORDER, *like.shape)
        away, values, logits = (torch.cat([a.gather(0, across), b]) for a, b in zip((away, values, logits), new))
    # E f − m, Var f and log ∫ p(y | f)^α N(f | m, v) df
    weights = (parts * rule.reshape(column) / 2 / total).flatten(0, 1)
    away, values = away.flatten(0, 1), values.flatten(0, 1)
    shift = (weights * away).sum(0)
    spread = (weights * (away - shift).square()).sum(0)
    log_z = peak + total.log() - 0.5 * math.log(2 * math.pi)
    return away, values, weights, log_z, shift, spread


_DOUBT = 1e-3  # of the trapezoidal rule's integral, above which panels take its place
_TOLERANCE = 1e-4  # of the panels': the true error of a smooth integrand is about its square
_ORDER = 8  # nodes of a panel
_SPLITS = 24  # of panels, at most
_MOST_PANELS = 48
_FAR = [8.0 * 2**k for k in range(9)]
_ENDS = [*(-end for end in reversed(_FAR)), -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, *_FAR]  # in units of √v, about m
_NEAR = [-8.0, -3.0, -1.0, 1.0, 3.0, 8.0]  # in units of the guessed spread, about its centre


def log_normaliser(
    at: Tilted, mean: Tensor, variance: Tensor, values: Optional[Tensor] = None, power: float = 1.0
) -> Tensor:
    """log ∫ p(y | f)^α N(f | m, v) df, ``(..., N)``, with its gradients by m and v, of the values that they had when
    the moments were taken, and by log p at the nodes, ``values``, ``(K, ..., N)``, if it has a graph.
    """
    m, v = at.cavity
    # By parts, ∂log Z/∂m = E[(f − m)/v] and ∂log Z/∂v = ½E[(f − m)²/v² − 1/v] under the tilted density; by log p at a
    # node it is α times its weight.
    slope = (at.mean - m) / v
    curve = 0.5 * (slope.square() + (at.variance / v - 1) / v)
    result = at.log_z + slope * (mean - m) + curve * (variance - v)
    if values is not None:
        change = torch.where(at.weights > 0, at.weights * (values - values.detach()), 0.0)
        result = result + power * change.sum(0)
    return result
