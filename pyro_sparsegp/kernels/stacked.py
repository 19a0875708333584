"""Kernels of one structure as one: their matrices in one call, instead of one call each."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.functions import broadcast_shapes
from .algebra import Kernel, Product, Scaled, Select
from .anova import Anova
from .base import as_tensor
from .stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic

_STACKED = (RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic, Anova, Product, Scaled, Select)


def structure(kernel: Any) -> Optional[tuple[Any, ...]]:
    """All that kernels must share to be stacked; ``None`` for one that can't be."""
    parts = tuple(map(structure, kernel.parts))
    if type(kernel) not in _STACKED or None in (*parts, getattr(kernel, "profile", ())):
        return None
    shapes = [getattr(getattr(kernel, name), "shape", ()) for name, dims in kernel.event_dims if dims]
    return (type(kernel), len(getattr(kernel, "dims", ())), *[(1, *shape)[-1] for shape in shapes], *parts)


def stacked(kernels: Sequence[Any], like: Tensor) -> Kernel:
    """C kernels of one :func:`structure` as one, of batch shape ``(..., C)``; it takes ``(N, D)``, or ``(C, N, D)``."""
    first = kernels[0]
    parts = [stacked(alike, like) for alike in zip(*(kernel.parts for kernel in kernels))]
    if isinstance(first, Select):
        return _Selections(kernels, parts[0])
    kind: Any = _Anovas if isinstance(first, Anova) else type(first)
    new = kind.__new__(kind)
    vars(new).update(vars(first), parts=tuple(parts))
    for name, dims in first.event_dims:
        # Hyperparameters, (...,) or (..., D), as one, (..., C) or (..., C, D).
        tensors = [as_tensor(getattr(kernel, name), like) for kernel in kernels]
        shape = broadcast_shapes((1,) * dims, *[tensor.shape for tensor in tensors])
        setattr(new, name, torch.stack([tensor.expand(shape) for tensor in tensors], -1 - dims))
    return new


# The matrices and the diagonal of one run are of the same inputs: what is made of these is found once, a fifth of the
# time of a step of ten terms of Anova.


class _Anovas(Anova):
    """Several, whose kernel lives for one run."""

    _found: Any = None
    _last: tuple[tuple[Tensor, Tensor], ...] = ()  # two inputs, and c(x) there

    def _ends(self, x: Tensor) -> Any:
        self._found = super()._ends(x) if self._found is None else self._found
        return self._found

    def _deficits(self, x: Tensor) -> Tensor:
        found = [c for of, c in self._last if of is x] or [super()._deficits(x)]
        self._last = (*self._last[-1:], (x, found[0]))
        return found[0]


class _Selections(Select):
    """k_c(x[dims_c], x'[dims_c]) for each c."""

    _last: Any = (None, None)  # the last inputs, and their columns

    def __init__(self, kernels: Sequence[Select], kernel: Kernel) -> None:
        self.parts, self.dims, self.selections = (kernel,), (), kernels

    def own_columns(self, x: Tensor) -> Tensor:
        if self._last[0] is not x:
            inputs = [x] * len(self.selections) if x.dim() == 2 else x.unbind(-3)
            self._last = x, torch.stack([one.own_columns(own) for one, own in zip(self.selections, inputs)], -3)
        return self._last[1]
