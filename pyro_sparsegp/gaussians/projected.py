"""The posterior given projections of the data, in coordinates that never factorise SᵀKS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from ..numerics.linalg import solve_lower
from .base import Given


class ProjectedGaussian(Given):
    """f given ỹ = Sᵀ(z − μ) with ỹ = u + ε, u = Sᵀ(f(X) − μ), ε ~ N(0, D) (Wenger et al., 2024, algorithm S2).

    With RRᵀ = G = SᵀKS + D, the coordinates h = R⁻¹(u + ε) are N(0, I) under the prior and a = R⁻¹ỹ under the
    posterior, whose features are ψ(x) = R⁻¹Sᵀk(X, x). The divergence is that of u, since ε is no part of f:
    with α = G⁻¹ỹ,

        KL = ½(tr(G⁻¹D) − i + αᵀ(SᵀKS)α + log|G| − log|D|).

    :param target: ỹ, ``(..., i)``.
    :param factor: R, ``(..., i, i)``.
    :param noise: D's diagonal, ``(..., i)``.
    :param covariance: SᵀKS, ``(..., i, i)``: ỹᵀα − αᵀDα would be a difference of what may be far larger.
    :param project: v ↦ Sᵀv for values at X, where the posterior is at X; else ``None``.
    """

    def __init__(
        self,
        target: Tensor,
        factor: Tensor,
        noise: Tensor,
        covariance: Tensor,
        project: Optional[Callable[[Tensor], Tensor]] = None,
    ) -> None:
        self.target, self.factor, self.noise, self.covariance, self.project = target, factor, noise, covariance, project
        self.white = solve_lower(factor, target[..., None])[..., 0]  # a
        super().__init__([self.white])

    def _log_dets(self) -> tuple[Tensor, Tensor]:
        return 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), self.noise.log().sum(-1)

    def kl(self) -> Tensor:
        # α = G⁻¹ỹ = R⁻ᵀa
        weights = torch.linalg.solve_triangular(self.factor.mT, self.white[..., None], upper=True)[..., 0]  # α
        # tr G⁻¹D = ‖R⁻¹D^½‖²
        trace = solve_lower(self.factor, torch.diag_embed(self.noise.sqrt())).square().sum((-2, -1))
        of_g, of_d = self._log_dets()
        # αᵀ(SᵀKS)α
        fit = ((self.covariance @ weights[..., None])[..., 0] * weights).sum(-1)
        return 0.5 * (trace - self.sizes[0] + fit + of_g - of_d)

    def log_evidence(self, log_gram: Tensor) -> Tensor:
        """log N(ỹ; 0, SᵀK̂S) for orthonormalised S, in nats (eq. 9): −½(ỹᵀG⁻¹ỹ + log|G| − log|SᵀS| + i log 2π).

        :param log_gram: log|SᵀS|.
        """
        of_g, _ = self._log_dets()
        return -0.5 * (self.white.square().sum(-1) + of_g - log_gram + self.sizes[0] * math.log(2 * math.pi))

    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        """log N(ỹ; u, D) − log N(ỹ; 0, G) at u = Sᵀf, for centred values f at the training inputs."""
        if self.project is None or f is None:
            raise ValueError(
                "the relative density of a computation-aware posterior is a function of the values at the training "
                "inputs; call the guide with those."
            )
        of_g, of_d = self._log_dets()
        # log N(ỹ; u, D) − log N(ỹ; 0, G)
        misfit = (self.target - self.project(f)).square() / self.noise
        return 0.5 * (self.white.square().sum(-1) + of_g - misfit.sum(-1) - of_d)
