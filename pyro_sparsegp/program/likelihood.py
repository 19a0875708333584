"""Derivatives of log densities by function values, and their expectations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from .traces import require_again

__all__ = [
    "Expectation",
    "derivatives",
    "expand",
    "expected_derivatives",
    "mapped",
    "normal_nodes",
]


Total = Callable[[dict[str, Tensor]], Tensor]


@dataclass
class Expectation:
    """E[ℓ], a scalar, and E[ℓ'] and E[ℓ''] by each value, ``(..., N)``."""

    value: Tensor
    first: Tensor
    second: Tensor


def expand(total: Callable[[Tensor], Tensor], f: Tensor, outputs_meet: bool = True) -> Expectation:
    """A sum of terms with one input's values each, and its first and second derivatives by each value.

    :param total: f, ``(..., N)``, to a scalar.
    :param outputs_meet: whether a term may have values of several outputs; if none has, one pass does for all.
    """

    def summed(f: Tensor, weight: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first, value = torch.func.grad_and_value(total)(f)
        return (weight * first).sum(), (first, value)

    if f.dim() == 1 or not outputs_meet:
        second, (first, value) = torch.func.grad(summed, has_aux=True)(f, 1.0)
        return Expectation(value, first, second)

    def one(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        second, (first, value) = torch.func.grad(summed, has_aux=True)(f, output)
        return second * output, first, value

    each = torch.eye(f[..., 0].numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape[:-1], 1)
    seconds, firsts, values = mapped(one, each)
    return Expectation(values[0], firsts[0], seconds.sum(0))


def derivatives(total: Callable[[Tensor], Tensor], f: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivatives by each value of a sum of terms with one input's values each, ``(..., N)`` both."""
    found = expand(total, f)
    return found.first, found.second


def mapped(
    function: Callable[[Any], tuple[Tensor, ...]], stack: Any, chunk_size: Optional[int] = None
) -> tuple[Tensor, ...]:
    """A function of a tensor, or of a mapping to tensors, over their first dimension: in one run, or so many at a time,
    or in a loop for programs that :func:`torch.func.vmap` refuses.
    """
    at_once = functools.partial(torch.func.vmap(function, randomness="same", chunk_size=chunk_size), stack)
    try:
        return at_once()
    except (RuntimeError, TypeError, ValueError) as error:
        require_again(error, at_once, stack if isinstance(stack, Tensor) else next(iter(stack.values())))
        if isinstance(stack, Tensor):
            parts = [function(part) for part in stack]
        else:
            num = len(next(iter(stack.values())))
            parts = [function({key: part[k] for key, part in stack.items()}) for k in range(num)]
        return tuple(torch.stack(each) for each in zip(*parts))


def expected_derivatives(
    total: Total,
    values: Mapping[str, Tensor],
    name: str,
    weights: Tensor,
    scores: Optional[Tensor] = None,
    outputs_meet: bool = True,
) -> Expectation:
    """E[ℓ], E[ℓ'] and E[ℓ''] by the values of GP site ``name`` over K joint nodes of several GP sites.

    :param total: values of GP sites, ``(..., N)`` each, to the sum of the log densities.
    :param values: the nodes, ``(K, ..., N)`` each.
    :param weights: ``(K,)``.
    :param scores: (f − m)/v at the nodes, ``(K, ..., N)``: then E[ℓ''] is E[ℓ'(f − m)]/v (Stein, 1981), the gradient
        of the quadrature itself, which sees kinks of ℓ and needs no second derivative.
    :param outputs_meet: whether a term may have values of several outputs.
    """

    def at(node: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        def moved(f: Tensor) -> Tensor:
            return total({**node, name: f})

        if scores is None:
            found = expand(moved, node[name], outputs_meet)
            return found.value, found.first, found.second
        first, value = torch.func.grad_and_value(moved)(node[name])
        return value, first, first

    if len(weights) == 1:
        value, first, second = (part[None] for part in at({key: part[0] for key, part in values.items()}))
    else:
        value, first, second = mapped(at, dict(values))
    shaped = weights.reshape(-1, *[1] * (first.dim() - 1))
    if scores is not None:
        second = second * scores
    return Expectation((weights * value).sum(), (shaped * first).sum(0), (shaped * second).sum(0))


def normal_nodes(num_axes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Standard normal nodes, ``(K, A)``, and weights, ``(K,)``: a Gauss-Hermite grid for one or two axes, scrambled
    Sobol points in plus-minus pairs beyond. They are made once for a dtype and device, so that a step copies nothing.
    """
    return _normal_nodes(num_axes, like.dtype, like.device)


@functools.lru_cache(maxsize=32)
def _normal_nodes(num_axes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        return _new_nodes(num_axes, torch.empty(0, dtype=dtype, device=device))


def _new_nodes(num_axes: int, like: Tensor) -> tuple[Tensor, Tensor]:
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
