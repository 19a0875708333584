"""Moments of weighted draws, and how far two posteriors' are apart, in numbers and in words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_AWAY = 0.3  # standard deviations of a mean that are told
_WIDTHS = 0.75, 1 / 0.75  # ratios of standard deviations, from either side, beyond which they are told
ENDS = -1.645, 0.0, 1.645  # of a normal, in standard deviations: 5 %, the median and 95 %
_TAIL = 0.6  # standard deviations of 5 % or 95 % that are told
_SKEWED = 1.5  # third moments of more are cut to

Moments = dict[str, tuple[Tensor, Tensor]]  # by name means and variances
Widths = dict[str, tuple[Tensor, ...]]  # by name means and standard deviations, or :func:`interval`


def moments_of(values: list[Moments], weights: Tensor) -> Widths:
    """By name means and standard deviations over weighted draws of means and variances."""
    found: Widths = {}
    for name in values[0]:
        # those of a prior of Python numbers have the default dtype
        means, variances = (torch.stack(part).to(weights) for part in zip(*(each[name] for each in values)))
        mean = weights @ means
        # Var v = E Var[v | θ] + Var E[v | θ]
        found[name] = mean, (weights @ (variances + (means - mean).square())).sqrt()
    return found


def percentiles(theta: Tensor, weights: Tensor) -> Tensor:
    """The 5th, 50th and 95th of weighted draws, ``(3, D)``, by three moments, which some hundred draws know better
    (Cornish and Fisher, 1938).
    """
    mean, z = weights @ theta, theta.new_tensor(ENDS)[:, None]
    sd = (weights @ (theta - mean).square()).sqrt()
    skewness = (weights @ ((theta - mean) / sd) ** 3).nan_to_num().clamp(-_SKEWED, _SKEWED)
    return mean + sd * (z + skewness * (z.square() - 1) / 6)


def interval(ends: Tensor) -> tuple[Tensor, ...]:
    """A median, the standard deviation that a normal has whose interval from 5 % to 95 % is as long, and its ends."""
    lower, middle, upper = ends.sort(0)[0]
    return middle, (upper - lower) / (ENDS[2] - ENDS[0]), lower, upper


def beside(moves: Tensor, ratios: Tensor) -> tuple[float, float, bool]:
    """A root mean square in standard deviations, a mean ratio of widths, and whether they are told."""
    away, ratio = float(moves.detach().square().mean().sqrt()), float(ratios.detach().mean())
    return away, ratio, away > _AWAY or not _WIDTHS[0] <= ratio <= _WIDTHS[1]


def said(away: float, ratio: float, tails: Sequence[float] = ()) -> str:
    """A distance of means, or of medians and both ends, and a ratio of widths in words; none of what is near."""
    told = {
        f"the {'median' if tails else 'mean'} is {away:.1f} standard deviations off": away > _AWAY,
        f"the interval is {ratio:.1f} times too wide": ratio > _WIDTHS[1],
        f"the interval is {1 / max(ratio, 1e-3):.1f} times too narrow": ratio < _WIDTHS[0],
    }
    words = [text for text, applies in told.items() if applies]
    ends = [
        f"the {p} % quantile is {tail:.1f} standard deviations off" for p, tail in zip((5, 95), tails) if tail > _TAIL
    ]
    return ", and ".join(words or ends)


def of_argument(argument: str, given: Any, names: list[str], how: str) -> str:
    """A cause that the guide was given."""
    which = ", ".join(map(repr, names))
    remedy = f"{argument}=True" if given is True else f"{which} from {argument}="
    return f"the guide treats {which} as {how}. Remove {remedy}."
