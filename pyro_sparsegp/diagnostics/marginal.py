"""log p(y | w, θ) under the exact prior: what a sparse posterior's coefficients are worth without the sparse model."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import torch
from torch import Tensor

from ..posterior.sparse_posterior import SparsePosterior
from ..program.reader import expand
from .densities import DensityReader, Moments

__all__ = ["log_marginal"]

_STEPS = 12
_HALVINGS = 6


def log_marginal(
    reader: DensityReader, held: dict[str, Tensor], posteriors: dict[str, SparsePosterior], moments: dict[str, Moments]
) -> Tensor:
    """log ∫ p(y | f) p(f | w, θ) df at one draw's coefficients, of all data together, in O(N³).

    With f = h + Rε, RRᵀ = ρ(x, x), ε ~ N(0, I): ε is drawn once from N(ε̂, (I + RᵀΛR)⁻¹) at the mode ε̂ of the
    integrand, Λ = −ℓ'' there, and the value is p(y | f)p(ε)/q(ε). For a likelihood that is Gaussian in f it does not
    depend on ε and is exact; else it is unbiased as a density, which is what importance weights need (Andrieu and
    Roberts, 2009).

    :param held: values of all else.
    :param moments: h and d of the GP sites.
    """
    centres = {name: mean for name, (mean, _) in moments.items()}
    roots = {name: posteriors[name].residual_tril for name in moments}

    def values(noise: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: centres[n] + (roots[n] @ noise[n][..., None])[..., 0] for n in noise}

    def log_density(f: dict[str, Tensor]) -> Tensor:
        return reader.total({**held, **f})

    def newton(name: str, f: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Where one site's ε has its largest density under a parabola at f, and the root of I + RᵀΛR."""
        at = expand(lambda value: log_density({**f, name: value}), f[name])
        root, precision = roots[name], (-at.second).clamp(min=0)
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        factor = torch.linalg.cholesky(eye + root.mT @ (precision[..., None] * root))
        # Newton on ε: (I + RᵀΛR) ε = Rᵀ(ℓ' + Λ(f − h)).
        pull = at.first + precision * (f[name] - centres[name])
        return torch.cholesky_solve(root.mT @ pull[..., None], factor)[..., 0], factor

    with torch.no_grad(), pyro.validation_enabled(False):
        centre = _mode(values, log_density, newton, {n: torch.zeros_like(mean) for n, mean in centres.items()})
        at_mode = values(centre)
        drawn, log_ratio = {}, torch.zeros((), dtype=torch.float64)  # log p(ε) − log q(ε)
        for name, eps in centre.items():
            factor, eta = newton(name, at_mode)[1], torch.randn_like(eps)
            # ε ~ N(ε̂, (I + RᵀΛR)⁻¹): with CCᵀ = I + RᵀΛR, ε = ε̂ + C⁻ᵀη.
            drawn[name] = eps + torch.linalg.solve_triangular(factor.mT, eta[..., None], upper=True)[..., 0]
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum()
            log_ratio = log_ratio + (0.5 * (eta.square().sum() - drawn[name].square().sum()) - log_det).double()
        return log_density(values(drawn)).double() + log_ratio


def _mode(values: Callable, log_density: Callable, newton: Callable, noise: dict[str, Tensor]) -> dict[str, Tensor]:
    """Newton's iteration for the largest p(y | f) p(ε), its steps halved until that grows."""

    def objective(noise: dict[str, Tensor]) -> Tensor:
        return log_density(values(noise)) - sum(0.5 * part.square().sum() for part in noise.values())

    best = objective(noise)
    for _ in range(_STEPS):
        f = values(noise)
        target = {name: newton(name, f)[0] for name in noise}
        shares = (0.5**halving for halving in range(_HALVINGS))
        moves = ({n: eps + (target[n] - eps) * share for n, eps in noise.items()} for share in shares)
        moved, value = next(((m, v) for m in moves if (v := objective(m)) > best), (noise, best))
        gain, best, noise = value - best, value, moved
        if gain < 1e-6 * (1 + best.abs()):
            break
    return noise
