"""A Gaussian factor whose last coefficients are values that have one owner a datum."""

from collections.abc import Sequence
from typing import Union

import torch
from torch import Tensor

from ..numerics.arrow import Arrow, OneEach
from ..numerics.linalg import cholesky
from .factors import DenseFactor, Factor


class ArrowFactor(Factor):
    """N(m, P⁻¹) by an arrow P."""

    def __init__(self, loc: Tensor, precision: Arrow) -> None:
        super().__init__(loc)
        self.precision = precision

    def moments(self, phi: Union[Tensor, OneEach]) -> tuple[Tensor, Tensor]:
        """Φm and diag(Φ(S − I)Φᵀ); Φ is a tensor, or has one entry of the last block a row."""
        return phi @ self.loc, self.precision.white(phi).square().sum(0) - phi.square().sum(-1)

    def joint_moments(self, features: Sequence[OneEach]) -> tuple[Tensor, Tensor]:
        white = torch.stack([self.precision.white(phi).mT for phi in features], 1)
        compact, means = torch.stack([phi.compact for phi in features], 1), [phi @ self.loc for phi in features]
        return torch.stack(means, 1), white @ white.mT - compact @ compact.mT

    def covariance(self, phi: Tensor) -> Tensor:
        white = self.precision.white(phi)
        return white.mT @ white

    def select(self, index: Tensor) -> Factor:
        root, common = self.precision.factor.root, self.precision.common_covariance
        if int(index.max()) >= len(root):
            return super().select(index)
        covariance = common[index][:, index]
        return DenseFactor(self.loc[index], cholesky(covariance, 0.0, "the covariance of some coefficients"))

    def unscale(self, v: Tensor) -> Tensor:
        root, along, own = self.precision.factor
        common, rest = v.split([len(root), len(own)], -1)
        # vᵀPv = cᵀLLᵀc + (u + Wc)ᵀD(u + Wc)
        return torch.cat([common @ root, own.sqrt() * (rest + common @ along.mT)], -1)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self.precision.variances.sum(), -2 * self.precision.half_log_det

    def noise(self, shape: torch.Size) -> Tensor:
        return self.precision.noise(shape)
