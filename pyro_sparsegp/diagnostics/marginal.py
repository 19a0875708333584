"""log p(y | w, θ) under the exact prior: what a sparse posterior's coefficients are worth without the sparse model."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import torch
from torch import Tensor

from ..numerics.linalg import plus_one
from ..posterior.sparse_posterior import SparsePosterior
from ..program.reader import expand
from .densities import DensityReader, Moments


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

    def precision_root(name: str, f: dict[str, Tensor]) -> Tensor:
        """C with CCᵀ = I + RᵀΛR at f, for one site."""
        second, root = expand(lambda value: log_density({**f, name: value}), f[name]).second, roots[name]
        return torch.linalg.cholesky(plus_one(root.mT @ ((-second).clamp(min=0)[..., None] * root)))

    with torch.no_grad(), pyro.validation_enabled(False):
        centre = _mode(values, log_density, {n: torch.zeros_like(mean) for n, mean in centres.items()})
        at_mode = values(centre)
        drawn, log_ratio = {}, torch.zeros((), dtype=torch.float64)  # log p(ε) − log q(ε)
        for name, eps in centre.items():
            factor, eta = precision_root(name, at_mode), torch.randn_like(eps)
            # ε ~ N(ε̂, (I + RᵀΛR)⁻¹): with CCᵀ = I + RᵀΛR, ε = ε̂ + C⁻ᵀη.
            drawn[name] = eps + torch.linalg.solve_triangular(factor.mT, eta[..., None], upper=True)[..., 0]
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum()
            log_ratio = log_ratio + (0.5 * (eta.square().sum() - drawn[name].square().sum()) - log_det).double()
        return log_density(values(drawn)).double() + log_ratio


def _mode(values: Callable, log_density: Callable, noise: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where p(y | f) p(ε) is the largest."""
    leaves = {name: eps.clone().requires_grad_() for name, eps in noise.items()}
    optimiser = torch.optim.LBFGS(leaves.values(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        loss = sum(0.5 * eps.square().sum() for eps in leaves.values()) - log_density(values(leaves))
        # Not by backward(), which parameters of the program would see.
        for eps, gradient in zip(leaves.values(), torch.autograd.grad(loss, list(leaves.values()))):
            eps.grad = gradient
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return {name: eps.detach() for name, eps in leaves.items()}
