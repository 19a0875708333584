"""The seam between functions and coefficients.

A basis module owns parameters (inducing inputs); called with a kernel it gives fresh, disposable
:class:`Features`, with which f(x) = μ(x) + φ(x)ᵀw + r(x), w ~ N(0, I), r ⟂ w. The residual's covariance is
always k − φφᵀ, so the features alone say everything.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ..kernels import base as kernel_base
from ..modules import AbstractModule

__all__ = ["Basis", "CrossFeatures", "Features", "KernelFeatures"]

Component = tuple[Any, "Features", tuple[int, ...]]


class Features(ABC):
    """φ under one kernel: ``features(x)`` gives a block ``(..., N, M_b)`` for each block of coefficients."""

    def __init__(self, kernel: Any, sizes: tuple[int, ...]) -> None:
        self.kernel, self.sizes = kernel, sizes

    @abstractmethod
    def __call__(self, x: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def components(self) -> list[Component]:
        """For each summand k_c of the kernel: k_c, the features of f_c, and the blocks of w these refer to."""

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        """``num`` draws of the prior as functions, with their coefficients w', ``(num, ..., M_b)`` a block.

        ``None`` where the kernel can draw no functions or their coefficients are not known.
        """
        return None


class CrossFeatures(Features):
    """φ from covariances with f: of the whole f, or of a summand f_c, whose own kernel these are then.

    :param cross: the covariance of this function with f; of f itself it is the kernel.
    """

    def __init__(self, kernel: Any, sizes: tuple[int, ...]) -> None:
        super().__init__(kernel, sizes)
        self.cross = kernel

    @abstractmethod
    def coefficients_of(self, draw: Callable) -> list[Tensor]:
        """The coefficients w' of a draw of f as a function, ``(num, ..., M_b)`` a block."""

    def components(self) -> list[Component]:
        found: list[Component] = []
        for term in kernel_base.terms(self.kernel):
            part = copy.copy(self)
            part.cross = term
            found.append((term, part, tuple(range(len(self.sizes)))))
        return found

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        if self.cross is not self.kernel:
            return None
        draw = kernel_base.prior_functions(self.kernel, num, num_features, x)
        return None if draw is None else (draw, self.coefficients_of(draw))


class Basis(AbstractModule):
    """A module that owns what defines φ; calling it with a kernel gives :class:`Features`."""

    @abstractmethod
    def forward(self, kernel: Any, jitter: Optional[float], name: str) -> Features:
        """φ under ``kernel``; ``name`` is the site's, for errors."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded: shapes, in plain Python."""


class KernelFeatures(Features):
    """The kernel's own finite features as the basis."""

    def __init__(self, kernel: Any, size: int) -> None:
        super().__init__(kernel, (size,) if size else ())
        self.size = size

    def __call__(self, x: Tensor) -> list[Tensor]:
        phi = kernel_base.features(self.kernel, x)
        if phi is None or phi.shape[-1] != self.size:
            have = "no" if phi is None else phi.shape[-1]
            raise ValueError(
                f"the kernel {self.kernel!r} has {have} features now, {self.size} when the guide was initialised; "
                "a kernel's structure must not change between calls."
            )
        return [phi] if self.size else []

    def components(self) -> list[Component]:
        return [(self.kernel, self, tuple(range(len(self.sizes))))]

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        if not self.sizes:
            return None  # all of it is residual, which has no finite draw
        phi = self(x[..., :1, :])[0]
        w = torch.randn(num, *phi.shape[:-2], phi.shape[-1], dtype=x.dtype, device=x.device)
        return lambda x: (self(x)[0] @ w[..., None])[..., 0], [w]
