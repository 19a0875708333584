"""Sample functions of a sparse posterior, by Matheron's rule or by exact sequential conditioning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..numerics.chunks import in_chunks
from ..numerics.linalg import cholesky, solve_lower, sum_blocks
from .base import Marginals

__all__ = ["sample_paths"]


def sample_paths(posterior: Marginals, num: int, num_features: int) -> Callable[[Tensor], Tensor]:
    """``num`` functions x ↦ ``(num, ..., N)``; see :meth:`SparsePosterior.paths`."""
    if num < 1 or num_features < 1:
        raise ValueError(f"paths needs at least one path and one feature, got {num} and {num_features}")
    process, basis, coefficients = posterior.process, posterior.basis, posterior.coefficients
    w = coefficients.rsample(torch.Size((num, *posterior.batch_shape)))
    prior = None
    if process.batch_shape == posterior.batch_shape == torch.Size():
        prior = basis.prior_functions(num, num_features, process.x)
    if prior is None:
        return _Sequential(posterior, num, w)
    function, own = prior
    # f + φᵀ(w − w') (Wilson et al., 2020, eq. 8)
    update = [a - b for a, b in zip(w, own)]

    def path(x: Tensor) -> Tensor:
        return process.at(x).mean + function(x) + sum_blocks(basis(x), update)

    return in_chunks(path, num * num_features)


class _Sequential:
    """f = μ + φᵀw + r with w fixed and r drawn given all values of r drawn before.

    An input that was asked for before, or stands twice in x, has one value: a diagonal term, which is drawn anew at
    every row, would otherwise give it several.
    """

    def __init__(self, posterior: Marginals, num: int, w: list[Tensor]) -> None:
        self.posterior, self.w = posterior, w
        self.shape = torch.Size((num, *posterior.batch_shape))
        x = posterior.process.x
        # What a diagonal is in the company of other rows, it must be wherever the paths are evaluated.
        self.kernel = posterior.process.kernel.relative_to(x)
        self.x = x[..., :0, :]
        self.phi: list[Tensor] = []
        self.factor = x.new_zeros(*posterior.batch_shape, 0, 0)
        self.noise = x.new_zeros(*self.shape, 0)
        self.values = x.new_zeros(*self.shape, 0)  # f − μ at the inputs asked for so far
        self.scale = self.kernel.diag(x).detach().mean(-1)

    def __call__(self, x: Tensor) -> Tensor:
        known = self.x.shape[-2]
        first = _first_of_equal(torch.cat([self.x, x], -2))
        fresh = first[known:] == torch.arange(known, len(first), device=x.device)
        if fresh.any():
            value = self._extend(x[..., fresh, :])
            self.values = torch.cat([self.values, value], -1)
        place = torch.cat([fresh.new_ones(known), fresh]).cumsum(0) - 1  # of each first one among the values
        return self.posterior.process.at(x).mean + self.values[..., place[first[known:]]]

    def _extend(self, x: Tensor) -> Tensor:
        # f − μ at new inputs.
        posterior, kernel = self.posterior, self.kernel
        phi = posterior.basis(x)
        new = kernel(x)
        for block in phi:
            new = new - block @ block.mT
        white = self.factor.new_zeros(*self.factor.shape[:-1], x.shape[-2])
        if self.x.shape[-2]:
            # Extend the Cholesky factor of the residual's covariance by the rows of the new inputs.
            cross = kernel(self.x, x)
            for old, block in zip(self.phi, phi):
                cross = cross - old @ block.mT
            white = solve_lower(self.factor, cross.expand(*self.factor.shape[:-1], -1))
        what = f"the residual of paths of site {posterior.name!r}"
        rest = cholesky(new - white.mT @ white, posterior.process.jitter, what, self.scale)
        fresh = torch.randn(*self.shape, x.shape[-2], dtype=x.dtype, device=x.device)
        residual = (white.mT @ self.noise[..., None] + rest @ fresh[..., None])[..., 0]
        self._remember(x, phi, white, rest, fresh)
        return sum_blocks(phi, self.w) + residual

    def _remember(self, x: Tensor, phi: list[Tensor], white: Tensor, rest: Tensor, fresh: Tensor) -> None:
        bottom = torch.cat([white.mT, rest.expand(*white.shape[:-2], -1, -1)], -1)
        self.factor = torch.cat([torch.nn.functional.pad(self.factor, (0, rest.shape[-1])), bottom], -2)
        self.noise = torch.cat([self.noise, fresh], -1)
        self.x = torch.cat([self.x, x], -2)
        self.phi = [torch.cat([old, block], -2) for old, block in zip(self.phi, phi)] if self.phi else phi


def _first_of_equal(x: Tensor) -> Tensor:
    # For each row of (..., N, D) the number of the first that is equal to it, (N,).
    _, kind = x.detach().movedim(-2, 0).flatten(1).unique(dim=0, return_inverse=True)
    numbers = torch.arange(len(kind), device=x.device)
    first = torch.full_like(numbers, len(kind)).scatter_reduce(0, kind, numbers, "amin")
    return first[kind]
