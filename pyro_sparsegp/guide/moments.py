"""Moments of weighted draws, and how far two posteriors' are apart, in numbers and in words."""

from typing import Any

import torch
from torch import Tensor

_AWAY = 0.3  # standard deviations of a mean that are told
_WIDTHS = 0.75, 1.33  # ratios of standard deviations beyond which they are told

Moments = dict[str, tuple[Tensor, Tensor]]  # by name means and variances
Widths = dict[str, tuple[Tensor, Tensor]]  # by name means and standard deviations


def moments_of(values: list[Moments], weights: Tensor) -> Widths:
    """By name means and standard deviations over weighted draws of means and variances."""
    found = {}
    for name in values[0]:
        # those of a prior of Python numbers have the default dtype
        means, variances = (torch.stack(part).to(weights) for part in zip(*(each[name] for each in values)))
        mean = weights @ means
        # Var v = E Var[v | θ] + Var E[v | θ]
        found[name] = mean, (weights @ (variances + (means - mean).square())).sqrt()
    return found


def beside(moves: Tensor, ratios: Tensor) -> tuple[float, float, bool]:
    """A root mean square in standard deviations, a mean ratio of widths, and whether they are told."""
    away, ratio = float(moves.detach().square().mean().sqrt()), float(ratios.detach().mean())
    return away, ratio, away > _AWAY or not _WIDTHS[0] <= ratio <= _WIDTHS[1]


def said(away: float, ratio: float) -> str:
    """A distance of means and a ratio of widths in words."""
    words = [f"the mean is {away:.1f} standard deviations off"] if away > _AWAY else []
    if ratio > _WIDTHS[1]:
        words.append(f"the interval is {ratio:.1f} times too wide")
    elif ratio < _WIDTHS[0]:
        words.append(f"the interval is {1 / max(ratio, 1e-3):.1f} times too narrow")
    return ", and ".join(words)


def of_argument(argument: str, given: Any, names: list[str], how: str) -> str:
    """A cause that the guide was given."""
    which = ", ".join(map(repr, names))
    remedy = f"{argument}=True" if given is True else f"{which} from {argument}="
    return f"the guide treats {which} as {how}. Remove {remedy}."
