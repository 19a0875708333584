"""A Gaussian over coefficients w that depend on others, w | v ~ N(m − Rv, S) with v ~ N(0, I)."""

from __future__ import annotations

import torch
from torch import Tensor

from .product import DenseFactor, Factor

__all__ = ["ConditionalFactor"]


class ConditionalFactor(Factor):
    """(w, v) with w | v ~ N(m − Rv, S) and v ~ N(0, I), as under the prior: mean (m, 0), root [[L, −R], [0, I]].

    KL from N(0, I) is ½(tr S + tr RRᵀ + mᵀm − M − log|S|).

    :param head: N(m, S), S = LLᵀ.
    :param root: R, ``(..., M, M)``.
    """

    def __init__(self, head: DenseFactor, root: Tensor) -> None:
        super().__init__(torch.cat([head.loc, torch.zeros_like(head.loc)], -1))
        self.head, self.root = head, root

    def scaled(self, phi: Tensor) -> Tensor:
        first, second = phi.tensor_split(2, -1)
        return torch.cat([self.head.scaled(first), second - first @ self.root], -1)

    def scale(self, v: Tensor) -> Tensor:
        first, second = v.tensor_split(2, -1)
        return torch.cat([self.head.scale(first) - (self.root @ second[..., None])[..., 0], second], -1)

    def unscale(self, v: Tensor) -> Tensor:
        first, second = v.tensor_split(2, -1)
        return torch.cat([self.head.unscale(first + (self.root @ second[..., None])[..., 0]), second], -1)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        trace, log_det = self.head.trace_and_log_det()
        return trace + self.root.square().sum((-2, -1)) + self.head.loc.shape[-1], log_det
