"""Log densities as functions of function values: their derivatives, and nodes to take expectations at."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor

__all__ = ["Expectation", "expand", "mapped", "normal_nodes"]


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

    def of(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The gradient of the weighted sum of slopes, a Hessian times a vector, gives all ℓ'' of an output at once:
        # Σₙ oₙℓ'ₙ has the derivatives oₙℓ''ₙ by the values of the output o, where each term has one of these.
        def weighted(f: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            first, value = torch.func.grad_and_value(total)(f)
            return (output * first).sum(), (first, value)

        second, (first, value) = torch.func.grad(weighted, has_aux=True)(f)
        return value, first, second * output

    num = f[..., 0].numel() if outputs_meet else 1
    if num == 1:
        return Expectation(*of(torch.ones_like(f)))
    each = torch.eye(num, dtype=f.dtype, device=f.device).reshape(-1, *f.shape[:-1], 1)
    values, firsts, seconds = mapped(of, each)
    return Expectation(values[0], firsts[0], seconds.sum(0))


def mapped(
    function: Callable[[Any], tuple[Tensor, ...]],
    stack: Union[Tensor, Mapping[str, Tensor]],
    chunk_size: Optional[int] = None,
) -> tuple[Tensor, ...]:
    """A function of a tensor, or of a mapping to tensors, over their first dimension: in one run, or so many at a time,
    or in a loop for programs that :func:`torch.func.vmap` refuses.
    """
    try:
        return torch.func.vmap(function, randomness="same", chunk_size=chunk_size)(stack)
    except (RuntimeError, TypeError, ValueError):
        each = stack if isinstance(stack, Tensor) else [dict(zip(stack, item)) for item in zip(*stack.values())]
        return tuple(map(torch.stack, zip(*map(function, each))))


def normal_nodes(num_axes: int, like: Tensor, num_nodes: Optional[int] = None) -> tuple[Tensor, Tensor]:
    """Standard normal nodes, ``(K, A)``, and weights, ``(K,)``: a Gauss-Hermite grid for one or two axes, scrambled
    Sobol points in plus-minus pairs beyond. They are made once for a dtype and device, so that a step copies nothing.

    :param num_nodes: of the grid along each axis; by default 20 along one axis, 10 along two.
    """
    return _normal_nodes(num_axes, num_nodes or (20 if num_axes == 1 else 10), like.dtype, like.device)


@functools.lru_cache(maxsize=32)
def _normal_nodes(num_axes: int, num: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        if num_axes == 0:
            return torch.zeros(1, 0, dtype=dtype, device=device), torch.ones(1, dtype=dtype, device=device)
        if num_axes <= 2:
            nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(num))
            # ∫ g(f) N(f | 0, 1) df ≈ Σₖ wₖ g(fₖ), exact for polynomials of degree 2K − 1.
            points, products = (
                torch.cartesian_prod(*[part] * num_axes).reshape(-1, num_axes)
                for part in (nodes, weights / weights.sum())
            )
            weights = products.prod(-1)
        else:
            # ε = Φ⁻¹(u) = √2 erf⁻¹(2u − 1), and −ε with each ε: odd moments are 0.
            uniform = torch.quasirandom.SobolEngine(num_axes, scramble=True, seed=0).draw(64, dtype=torch.float64)
            half = math.sqrt(2) * torch.erfinv(2 * uniform.clamp(1e-6, 1 - 1e-6) - 1)
            points, weights = torch.cat([half, -half]), half.new_full((128,), 1 / 128)
        return points.to(device, dtype), weights.to(device, dtype)
