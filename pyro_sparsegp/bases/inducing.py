"""Inducing points: the basis of values at inputs Z, in one set or in nested sets (Z, O, …).

Nested sets are the block Cholesky of their union (Shi, Titsias and Mnih, 2020, section 3.1): the first block
whitens f(Z), the second what f(O) adds to it, and so on. That is the Cholesky factor of the union, cut into
blocks, so one set and many are the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..linalg import cholesky, solve_lower
from .base import Basis, CrossFeatures

__all__ = ["InducingFeatures", "InducingPoints"]


class InducingFeatures(CrossFeatures):
    """φ(x) = L⁻¹k(Z, x) with LLᵀ = k(Z, Z), for Z the union of the sets.

    :param kernel: k, the kernel of f.
    :param z: Z, ``(M, D)``, in the full columns of the inputs.
    :param sizes: the sizes of the sets; they add up to M.
    :param factor: L, ``(..., M, M)``.
    """

    def __init__(self, kernel: Any, z: Tensor, sizes: tuple[int, ...], factor: Tensor) -> None:
        super().__init__(kernel, sizes)
        self.z, self.factor = z, factor

    def __call__(self, x: Tensor) -> list[Tensor]:
        # Φ Lᵀ = k(x, Z), solved from the right: forward and backward together make fewer transposed copies.
        phi = torch.linalg.solve_triangular(self.factor.mT, self.cross(x, self.z), upper=True, left=False)
        return list(phi.split(self.sizes, -1)) if len(self.sizes) > 1 else [phi]

    @property
    def anchor(self) -> Tensor:
        return self.factor

    def coefficients_of(self, draw: Callable) -> list[Tensor]:
        w = solve_lower(self.factor, draw(self.z)[..., None])[..., 0]
        return list(w.split(self.sizes, -1))


class InducingPoints(Basis):
    """The values of f at one or several sets of inputs.

    :param sets: inducing inputs, ``(M_b, D)`` each, or ``(M_b, d)`` in the columns that the kernel reads.
    :param trainable: whether they are parameters or stay fixed.
    :param columns: those columns, if the inputs live in them alone; ``None`` is all.
    :param width: D.
    """

    def __init__(
        self,
        sets: Sequence[Tensor],
        trainable: bool = True,
        columns: Optional[tuple[int, ...]] = None,
        width: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.sizes = tuple(z.shape[-2] for z in sets)
        self.trainable, self.columns, self.width = trainable, columns, width or sets[0].shape[-1]
        if columns is not None:  # on the device, so that a step copies nothing there
            index = torch.tensor(columns, device=sets[0].device)
            self.register_buffer("column_index", index, persistent=False)
        for i, z in enumerate(sets):
            if trainable:
                setattr(self, f"inputs_{i}", PyroParam(z.detach().clone()))
            else:
                self.register_buffer(f"inputs_{i}", z.detach().clone())

    @property
    def inputs(self) -> list[Tensor]:
        """The inducing inputs, a tensor for each set."""
        return [getattr(self, f"inputs_{i}") for i in range(len(self.sizes))]

    def _embed(self, z: Tensor) -> Tensor:
        if self.columns is None:
            return z
        # The kernel never reads the other columns; what stands there does not matter.
        full = z.new_zeros(z.shape[0], self.width)
        return full.index_copy(1, self.column_index, z)

    def forward(self, kernel: Any, jitter: Optional[float], name: str) -> InducingFeatures:
        inputs = self.inputs
        z = self._embed(inputs[0] if len(inputs) == 1 else torch.cat(inputs))
        factor = cholesky(kernel(z), jitter, f"K_ZZ of site {name!r}")
        return InducingFeatures(kernel, z, self.sizes, factor)

    def spec(self) -> dict[str, Any]:
        return {
            "kind": "inducing",
            "shapes": [list(z.shape) for z in self.inputs],
            "columns": None if self.columns is None else list(self.columns),
            "width": self.width,
        }
