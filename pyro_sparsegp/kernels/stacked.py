"""Kernels of one structure as one: their matrices in one call, in the place of one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.shapes import broadcast_shapes
from .algebra import Kernel, Product, Scaled, Select
from .anova import Anova
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
    if isinstance(kernel, Anova):
        inner = structure(kernel.base) if kernel.in_closed_form else None
        return None if inner is None else (Anova, kernel.variance is None, inner)
    own = _OWN.get(type(kernel))
    if own is None:
        return None
    return (type(kernel), *(_width(getattr(kernel, name)) for name, dims in own.items() if dims))


def stacked(kernels: Sequence[Any], like: Tensor, columns: Optional[Sequence[Sequence[int]]] = None) -> Kernel:
    """C kernels of the same :func:`structure` as one, with their number as the last dimension of its batch.

    It takes inputs ``(N, D)`` of all of them, or ``(C, N, D)``, each one's own.

    :param like: a tensor of the dtype and device of numbers.
    :param columns: which columns each one's own inputs consist of, ``(C, N, d)``, if not all.
    """
    first = kernels[0]
    if isinstance(first, Scaled):
        inner = stacked([kernel.kernel for kernel in kernels], like, columns)
        return Scaled(inner, _stack([kernel.variance for kernel in kernels], 0, like))
    if isinstance(first, Select):
        return _Selections(kernels, stacked([kernel.kernel for kernel in kernels], like), columns)
    if isinstance(first, Product):
        return Product(*(stacked(alike, like, columns) for alike in zip(*(kernel.factors for kernel in kernels))))
    if isinstance(first, Anova):
        bounds = (_same_or_stack([getattr(kernel, name) for kernel in kernels], like) for name in ("low", "high"))
        whole = _Anovas(stacked([kernel.base for kernel in kernels], like), *bounds)
        if first.variance is not None:
            whole.variance = _stack([kernel.variance for kernel in kernels], 0, like)
        return whole
    own = {
        name: _stack([getattr(kernel, name) for kernel in kernels], dims, like)
        for name, dims in _OWN[type(first)].items()
    }
    return type(first)(**own)


def _width(value: Scalar) -> int:
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else 1


def _same_or_stack(values: Sequence[Scalar], like: Tensor) -> Scalar:
    """One number where all are that."""
    first = values[0]
    if not isinstance(first, Tensor) and all(not isinstance(value, Tensor) and value == first for value in values):
        return first
    return _stack(values, 0, like)


def _stack(values: Sequence[Scalar], own: int, like: Tensor) -> Tensor:
    """Hyperparameters, ``(...,)`` or ``(..., D)``, as one, ``(..., C)`` or ``(..., C, D)``."""
    tensors = [value if isinstance(value, Tensor) else as_tensor(value, like) for value in values]
    tensors = [tensor.reshape(1) if own and not tensor.dim() else tensor for tensor in tensors]
    shape = broadcast_shapes(*[tensor.shape for tensor in tensors])
    return torch.stack([tensor.expand(shape) for tensor in tensors], -1 - own)


class _Anovas(Anova):
    """Of one run, in which what does not depend on rows, and what the two inputs asked for last have, is found once."""

    any_dtype = True

    def __init__(self, base: Kernel, low: Scalar, high: Scalar) -> None:
        super().__init__(base, low, high)
        self._found: Any = None
        self._last: list[tuple[Tensor, Tensor]] = []

    def _ends(self, profile: Any, x: Tensor) -> Any:
        if self._found is None:
            self._found = super()._ends(profile, x)
        return self._found

    def _deficits(self, profile: Any, x: Tensor) -> Tensor:
        for of, found in self._last:
            if of is x:
                return found
        found = super()._deficits(profile, x)
        self._last = [*self._last[-1:], (x, found)]
        return found


class _Selections(Kernel):
    """k_c(x[dims_c], x'[dims_c]) for each c.

    :param columns: which columns inputs of each one's own consist of; ``None`` is all.
    """

    any_dtype = True

    def __init__(
        self, kernels: Sequence[Select], kernel: Kernel, columns: Optional[Sequence[Sequence[int]]] = None
    ) -> None:
        self.selections, self.kernel, self.places = tuple(kernels), kernel, None
        self._last: Optional[tuple[Tensor, Tensor]] = None
        if columns is not None:
            self.places = [tuple(own.index(d) for d in one.dims) for one, own in zip(kernels, columns)]

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    @property
    def batch_shape(self) -> torch.Size:
        return self.kernel.batch_shape

    def _own(self, x: Tensor) -> Tensor:
        if x.dim() > 2:
            return self._own_of(x)
        if self._last is None or self._last[0] is not x:  # kernel and diagonal are of the same inputs, one by one
            self._last = x, self._own_of(x)
        return self._last[1]

    def _own_of(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            dims = [kernel.dims for kernel in self.selections]
            first = dims[0][0]
            if dims == [(first + c,) for c in range(len(dims))]:
                return x[:, first : first + len(dims)].mT[..., None]
            return torch.stack([kernel.own_columns(x) for kernel in self.selections], -3)
        if self.places is None:
            each = x.unbind(-3)
            return torch.stack([kernel.own_columns(one) for kernel, one in zip(self.selections, each)], -3)
        if any(place != self.places[0] for place in self.places):
            both = zip(self.places, x.unbind(-3))
            return torch.stack([torch.stack([one[..., d] for d in place], -1) for place, one in both], -3)
        if self.places[0] == tuple(range(x.shape[-1])):
            return x
        return torch.stack([x[..., d] for d in self.places[0]], -1)

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
