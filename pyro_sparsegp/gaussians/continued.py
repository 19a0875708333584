"""A Gaussian over coefficients that continues from an earlier one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, side_by_side
from .product import Product

__all__ = ["Continued"]


class Continued(Product):
    """q(w) = N(m, S) after q₀(w) ∝ N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w): its divergence is that from q₀, P₀ = I + G₀,

    KL[q ‖ q₀] = ½(tr P₀S + (m − m₀)ᵀP₀(m − m₀) − M − log|S| − log|P₀|),   P₀m₀ = r₀.

    :param q: N(m, S).
    :param gram: G₀, ``(..., M, M)``.
    :param pull: r₀, ``(..., M)``.
    """

    def __init__(self, q: Product, gram: Tensor, pull: Tensor) -> None:
        super().__init__(q.sizes, q.factors, q.groups)
        self.gram, self.pull = gram, pull

    def kl(self) -> Tensor:
        eye = torch.eye(self.gram.shape[-1], dtype=self.gram.dtype, device=self.gram.device)
        before = self.gram + eye
        factor = cholesky(before, 0.0, "I + G of the rows seen before")
        loc = side_by_side(self.loc)
        away = loc - torch.cholesky_solve(self.pull[..., None], factor)[..., 0]
        trace = (self.gram * self.covariance_matrix).sum((-2, -1))
        square = (away * (before @ away[..., None])[..., 0]).sum(-1)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return super().kl() + 0.5 * (trace + square - loc.square().sum(-1) - log_det)
