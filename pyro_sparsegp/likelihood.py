"""Derivatives of log densities by function values, and their expectations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np
import pyro
import torch
from torch import Tensor

__all__ = [
    "derivatives",
    "expected_derivatives",
    "is_quadratic",
    "normal_nodes",
]


Total = Callable[[dict[str, Tensor]], Tensor]


def derivatives(total: Callable[[Tensor], Tensor], f: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivatives by each value of a sum of terms with one input's values each.

    :param total: f, ``(..., N)``, to a scalar.
    :returns: both ``(..., N)``.
    """
    gradient = torch.func.grad(total)
    if f.dim() == 1:
        second, first = torch.func.grad(_summed(gradient), has_aux=True)(f)
        return first, second
    # Outputs may meet in a term: a pass for each keeps the diagonal.
    seconds = []
    for output in torch.eye(f[..., 0].numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape[:-1], 1):
        second, first = torch.func.grad(_summed(gradient, output), has_aux=True)(f)
        seconds.append(second * output)
    return first, torch.stack(seconds).sum(0)


def is_quadratic(total: Callable[[Tensor], Tensor], f: Tensor, spread: Tensor) -> bool:
    """Whether a sum of terms with one input's values each is quadratic in f, with curvature wherever it has slope.

    A piecewise constant one, which has neither anywhere, is not.
    """
    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-6 if f.dtype == torch.float64 else 1e-3
    with pyro.validation_enabled(False):
        slope, curvature = derivatives(total, f)
        size = curvature.abs() + 1e-6 * curvature.abs().mean()
        if ((slope != 0) & (curvature >= 0)).any() or not (slope.any() or curvature.any()):
            return False
        for _ in range(3):  # in directions of their own for all values: outputs may meet in a term
            step = spread * torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
            slope_there, curvature_there = derivatives(total, f + step)
            expected = slope + curvature * step
            if ((curvature_there - curvature).abs() > tolerance * size).any():
                return False
            if f.dim() == 1 and ((slope_there - expected).abs() > tolerance * (slope.abs() + size * step.abs())).any():
                return False
    return True


def _summed(gradient: Callable[[Tensor], Tensor], weight: Any = 1.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def total(f: Tensor) -> tuple[Tensor, Tensor]:
        first = gradient(f)
        return (weight * first).sum(), first

    return total


def expected_derivatives(
    total: Total, values: Mapping[str, Tensor], name: str, weights: Tensor, scores: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """E[ℓ'] and E[ℓ''] by the values of GP site ``name`` over K joint nodes of several GP sites.

    :param total: values of GP sites, ``(..., N)`` each, to the sum of the log densities.
    :param values: the nodes, ``(K, ..., N)`` each.
    :param weights: ``(K,)``.
    :param scores: (f − m)/v at the nodes, ``(K, ..., N)``: then E[ℓ''] is E[ℓ'(f − m)]/v (Stein, 1981), the gradient
        of the quadrature itself, which sees kinks of ℓ and needs no second derivative.
    """

    def at(node: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        def moved(f: Tensor) -> Tensor:
            return total({**node, name: f})

        if scores is None:
            return derivatives(moved, node[name])
        first = torch.func.grad(moved)(node[name])
        return first, first

    def looped() -> tuple[Tensor, Tensor]:
        pairs = [at({key: value[k] for key, value in values.items()}) for k in range(len(weights))]
        return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])

    if len(weights) == 1:
        first, second = looped()
    else:
        try:
            first, second = torch.func.vmap(at, randomness="same")(dict(values))
        except (RuntimeError, TypeError):  # a program that vmap refuses
            first, second = looped()
    shaped = weights.reshape(-1, *[1] * (first.dim() - 1))
    if scores is not None:
        second = second * scores
    return (shaped * first).sum(0), (shaped * second).sum(0)


def normal_nodes(num_axes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Standard normal nodes, ``(K, A)``, and weights, ``(K,)``: a Gauss-Hermite grid for one or two axes, scrambled
    Sobol points in plus-minus pairs beyond.
    """
    if num_axes == 0:
        return like.new_zeros(1, 0), like.new_ones(1)
    if num_axes <= 2:
        nodes, weights = np.polynomial.hermite_e.hermegauss(20 if num_axes == 1 else 10)
        grid = torch.cartesian_prod(*[torch.from_numpy(nodes)] * num_axes).reshape(-1, num_axes)
        product = torch.cartesian_prod(*[torch.from_numpy(weights / weights.sum())] * num_axes)
        return grid.to(like), product.reshape(-1, num_axes).prod(-1).to(like)
    uniform = torch.quasirandom.SobolEngine(num_axes, scramble=True, seed=0).draw(64, dtype=torch.float64)
    half = math.sqrt(2) * torch.erfinv(2 * uniform.clamp(1e-6, 1 - 1e-6) - 1)
    points = torch.cat([half, -half])
    return points.to(like), like.new_full((len(points),), 1 / len(points))
