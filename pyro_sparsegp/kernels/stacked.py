"""Kernels of one structure as one: their matrices in one call, in the place of one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.shapes import broadcast_shapes
from .algebra import Kernel, Product, Scaled, Select
from .base import Scalar, as_tensor
from .stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic

__all__ = ["stacked", "structure"]

# Of a class its hyperparameters, and how many of their last dimensions are their own.
_OWN: dict[type, dict[str, int]] = {
    RBF: {"lengthscale": 1},
    Matern12: {"lengthscale": 1},
    Matern32: {"lengthscale": 1},
    Matern52: {"lengthscale": 1},
    Periodic: {"lengthscale": 1, "period": 1},
    RationalQuadratic: {"lengthscale": 1, "alpha": 0},
}


def structure(kernel: Any) -> Optional[tuple[Any, ...]]:
    """All that kernels must share to be stacked; ``None`` for one that can't be."""
    if isinstance(kernel, (Scaled, Select)):
        inner = structure(kernel.kernel)
        return None if inner is None else (type(kernel), inner)
    if isinstance(kernel, Product):
        factors = tuple(structure(factor) for factor in kernel.factors)
        return None if None in factors else (Product, *factors)
    own = _OWN.get(type(kernel))
    if own is None:
        return None
    return (type(kernel), *(_width(getattr(kernel, name)) for name, dims in own.items() if dims))


def stacked(kernels: Sequence[Any], like: Tensor) -> Kernel:
    """C kernels of the same :func:`structure` as one, with their number as the last dimension of its batch.

    It takes inputs ``(N, D)`` of all of them, or ``(C, N, D)``, each one's own.

    :param like: a tensor of the dtype and device of numbers.
    """
    first = kernels[0]
    if isinstance(first, (Scaled, Select)):
        inner = stacked([kernel.kernel for kernel in kernels], like)
        if isinstance(first, Select):
            return _Selections(kernels, inner)
        return Scaled(inner, _stack([kernel.variance for kernel in kernels], 0, like))
    if isinstance(first, Product):
        return Product(*(stacked(alike, like) for alike in zip(*(kernel.factors for kernel in kernels))))
    own = {
        name: _stack([getattr(kernel, name) for kernel in kernels], dims, like)
        for name, dims in _OWN[type(first)].items()
    }
    return type(first)(**own)


def _width(value: Scalar) -> int:
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else 1


def _stack(values: Sequence[Scalar], own: int, like: Tensor) -> Tensor:
    """Hyperparameters, ``(...,)`` or ``(..., D)``, as one, ``(..., C)`` or ``(..., C, D)``."""
    tensors = [value if isinstance(value, Tensor) else as_tensor(value, like) for value in values]
    tensors = [tensor.reshape(1) if own and not tensor.dim() else tensor for tensor in tensors]
    shape = broadcast_shapes(*[tensor.shape for tensor in tensors])
    return torch.stack([tensor.expand(shape) for tensor in tensors], -1 - own)


class _Selections(Kernel):
    """k_c(x[dims_c], x'[dims_c]) for each c."""

    any_dtype = True

    def __init__(self, kernels: Sequence[Select], kernel: Kernel) -> None:
        self.selections, self.kernel = tuple(kernels), kernel

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    @property
    def batch_shape(self) -> torch.Size:
        return self.kernel.batch_shape

    def _own(self, x: Tensor) -> Tensor:
        each = x.unbind(-3) if x.dim() > 2 else [x] * len(self.selections)
        return torch.stack([kernel.own_columns(one) for kernel, one in zip(self.selections, each)], -3)

    @property
    def scaled(self) -> Optional[Callable[..., Tensor]]:
        """With a variance in place, where the kernels have that."""
        inner = getattr(self.kernel, "scaled", None)
        if inner is None:
            return None
        return lambda variance, x, z=None: inner(variance, self._own(x), None if z is None else self._own(z))

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        return self.kernel(self._own(x), None if z is None else self._own(z))

    def diag(self, x: Tensor) -> Tensor:
        return self.kernel.diag(self._own(x))
