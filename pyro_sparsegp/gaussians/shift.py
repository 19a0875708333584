"""A coefficient whose posterior is its prior, moved: a free mean function of known norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .product import IdentityFactor

__all__ = ["ShiftFactor"]


class ShiftFactor(IdentityFactor):
    """N(√κ, 1) over one coefficient; KL = κ/2.

    :param square: gives κ, ``(...,)``, exactly.
    :param estimate: gives an unbiased estimate of κ, for a training step; draws, and what has no gradient,
        are exact.
    :param batch_shape: the shape of κ.
    """

    def __init__(self, square: Callable[[], Tensor], estimate: Callable[[], Tensor], batch_shape: torch.Size) -> None:
        self.square, self.estimate, self.batch_shape = square, estimate, batch_shape

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        """√κ, ``(..., 1)``."""
        return self.square().sqrt()[..., None]

    def kl(self) -> Tensor:
        return 0.5 * (self.estimate() if torch.is_grad_enabled() else self.square())
