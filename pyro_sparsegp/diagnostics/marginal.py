"""log p(y | w, θ) under the exact prior: what a sparse posterior's coefficients are worth without the sparse model."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor

from ..posterior.sparse_posterior import SparsePosterior
from ..program.likelihood import derivatives
from .densities import DensityReader, Moments

__all__ = ["log_marginal"]

_STEPS = 12
_HALVINGS = 6


def log_marginal(
    reader: DensityReader,
    held: dict[str, Tensor],
    posteriors: dict[str, SparsePosterior],
    moments: dict[str, Moments],
) -> Tensor:
    """log ∫ p(y | f) p(f | w, θ) df at one draw's coefficients, of all data together, in O(N³).

    With f = h + Rε, RRᵀ = ρ(x, x), ε ~ N(0, I): ε is drawn once from N(ε̂, (I + RᵀΛR)⁻¹) at the mode ε̂ of the
    integrand, Λ = −ℓ'' there, and the value is p(y | f)p(ε)/q(ε). For a likelihood that is Gaussian in f it does not
    depend on ε and is exact; else it is unbiased as a density, which is what importance weights need (Andrieu and
    Roberts, 2009).

    :param held: values of all else.
    :param moments: h and d of the GP sites.
    """
    with torch.no_grad(), pyro.validation_enabled(False):
        return _Integral(reader, held, posteriors, moments).estimate()


class _Integral:
    def __init__(self, reader: DensityReader, held: dict[str, Tensor], posteriors: Any, moments: Any) -> None:
        self.reader, self.held = reader, held
        self.centres = {name: mean for name, (mean, _) in moments.items()}
        self.roots = {name: posteriors[name].residual_tril for name in moments}

    def values(self, noise: dict[str, Tensor]) -> dict[str, Tensor]:
        """f = h + Rε of each GP site."""
        return {n: self.centres[n] + (self.roots[n] @ noise[n][..., None])[..., 0] for n in noise}

    def log_density(self, values: dict[str, Tensor]) -> Tensor:
        return self.reader.total({**self.held, **values})

    def newton(self, name: str, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Where one site's ε has its largest density under a parabola at these values, and the root of I + RᵀΛR."""
        first, second = derivatives(lambda f: self.log_density({**values, name: f}), values[name])
        root, precision = self.roots[name], (-second).clamp(min=0)
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        factor = torch.linalg.cholesky(eye + root.mT @ (precision[..., None] * root))
        pull = first + precision * (values[name] - self.centres[name])
        return torch.cholesky_solve(root.mT @ pull[..., None], factor)[..., 0], factor

    def mode(self) -> dict[str, Tensor]:
        """Newton's iteration, its steps halved until the density grows."""

        def objective(noise: dict[str, Tensor]) -> Tensor:
            return self.log_density(self.values(noise)) - sum(0.5 * part.square().sum() for part in noise.values())

        noise = {name: torch.zeros_like(centre) for name, centre in self.centres.items()}
        best = objective(noise)
        for _ in range(_STEPS):
            values = self.values(noise)
            target = {name: self.newton(name, values)[0] for name in noise}
            for halving in range(_HALVINGS):
                moved = {n: eps + (target[n] - eps) * 0.5**halving for n, eps in noise.items()}
                value = objective(moved)
                if value > best:
                    break
            else:
                return noise
            gain, best, noise = value - best, value, moved
            if gain < 1e-6 * (1 + best.abs()):
                return noise
        return noise

    def estimate(self) -> Tensor:
        """log p(y | f) + log p(ε) − log q(ε) at one ε."""
        centre = self.mode()
        at_mode = self.values(centre)
        drawn, log_ratio = {}, torch.zeros((), dtype=torch.float64)
        for name, eps in centre.items():
            factor, eta = self.newton(name, at_mode)[1], torch.randn_like(eps)
            drawn[name] = eps + torch.linalg.solve_triangular(factor.mT, eta[..., None], upper=True)[..., 0]
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum()
            log_ratio = log_ratio + (0.5 * (eta.square().sum() - drawn[name].square().sum()) - log_det).double()
        return self.log_density(self.values(drawn)).double() + log_ratio
