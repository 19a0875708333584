"""Sample functions of a sparse posterior, by Matheron's rule or by exact sequential conditioning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..numerics.chunks import in_chunks
from ..numerics.linalg import default_jitter, residual_cholesky, sum_blocks, times


def sample_paths(posterior: Any, num: int, num_features: int) -> Callable[[Tensor], Tensor]:
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

    def __init__(self, posterior: Any, num: int, w: list[Tensor]) -> None:
        self.posterior, self.w = posterior, w
        process, shape = posterior.process, (num, *posterior.batch_shape, 0)
        # What a diagonal is in the company of other rows, it must be wherever the paths are evaluated.
        self.kernel = process.kernel.relative_to(process.x)
        self.scale = self.kernel.diag(process.x).detach().mean(-1)
        self.jitter = default_jitter(process.x.dtype) if process.jitter is None else process.jitter
        self.x, self.noise, self.values = process.x[..., :0, :], process.x.new_zeros(shape), process.x.new_zeros(shape)

    def __call__(self, x: Tensor) -> Tensor:
        known, process = self.x.shape[-2], self.posterior.process
        first = _first_of_equal(torch.cat([self.x, x], -2))
        fresh = first[known:] == torch.arange(known, len(first), device=x.device)
        if fresh.any():
            self.x = torch.cat([self.x, x[..., fresh, :]], -2)
            drawn = torch.randn(*self.noise.shape[:-1], self.x.shape[-2] - known, dtype=x.dtype, device=x.device)
            self.noise = torch.cat([self.noise, drawn], -1)
            phi = self.posterior.basis(self.x)
            what = f"the residual of paths of site {self.posterior.name!r}"
            # The leading rows of a Cholesky factor are those of before, at the same jitter: so are the values there.
            tril = residual_cholesky(self.kernel(self.x), phi, self.jitter, what, self.scale)
            value = sum_blocks(phi, self.w) + times(tril, self.noise)
            self.values = torch.cat([self.values, value[..., known:]], -1)  # f − μ at the inputs asked for so far
        place = torch.cat([fresh.new_ones(known), fresh]).cumsum(0) - 1  # of each first one among the values
        return process.at(x).mean + self.values[..., place[first[known:]]]


def _first_of_equal(x: Tensor) -> Tensor:
    # For each row of (..., N, D) the number of the first that is equal to it, (N,).
    _, kind = x.detach().movedim(-2, 0).flatten(1).unique(dim=0, return_inverse=True)
    numbers = torch.arange(len(kind), device=x.device)
    return torch.full_like(numbers, len(kind)).scatter_reduce(0, kind, numbers, "amin")[kind]
