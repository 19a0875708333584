"""Products of triangular and symmetric matrices by blocks, and solves whose right hand sides lie as LAPACK has them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = [
    "congruence",
    "gram",
    "mirrored",
    "over_lower",
    "over_upper",
    "solve_lower",
    "solve_upper",
    "times_lower",
    "times_upper",
    "tril_of_lower",
    "tril_of_product",
]

LARGE = 256  # from here on blocks pay
_MANY = 8  # right hand sides
_PARTS = 4

# Products by blocks leave out blocks of zeros, and half of what is symmetric: a library's triangular product costs as
# much as a full one, its symmetric product is not to be had. Operations that can be differentiated and mapped.


def _blocks(num: int) -> list[tuple[int, int]]:
    size = 64 * -(-num // (64 * _PARTS))
    return list(itertools.pairwise([*range(0, num, size), num]))


def _whole(*matrices: Tensor) -> bool:
    """Whether a product is taken as it is: of small matrices, or of several."""
    return matrices[0].shape[-1] < LARGE or any(matrix.dim() > 2 for matrix in matrices)


def times_lower(a: Tensor, lower: Tensor) -> Tensor:
    """AL, ``(..., N, M)``, for a lower triangular L, ``(..., M, M)``."""
    if _whole(lower):
        return a @ lower
    return torch.cat([a[..., i:] @ lower[i:, i:j] for i, j in _blocks(lower.shape[-1])], -1)


def times_upper(a: Tensor, lower: Tensor) -> Tensor:
    """ALᵀ, ``(..., N, M)``, for a lower triangular L, ``(..., M, M)``."""
    if _whole(lower):
        return a @ lower.mT
    return torch.cat([a[..., :j] @ lower[i:j, :j].mT for i, j in _blocks(lower.shape[-1])], -1)


def _product(a: Tensor, b: Tensor, symmetric: bool = False, lower: bool = False) -> Tensor:
    """AᵀB up to the last block on the diagonal of each row, and, if it is symmetric, beyond.

    :param lower: whether A is lower triangular, and B is, or what AᵀB needs of it is below the diagonal.
    """
    if _whole(a, b):
        return a.mT @ b
    whole = (a[:1, :1] * b[:1, :1]).new_zeros(a.shape[-1], a.shape[-1])  # mapped, where one of them is
    for i, j in _blocks(a.shape[-1]):
        first = i if lower else 0
        whole[i:j, :j] = row = a[first:, i:j].mT @ b[first:, :j]
        if symmetric:
            whole[:i, i:j] = row[:, :i].mT
    return whole


def tril_of_product(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB, ``(..., M, M)``, of which the part above the diagonal means nothing."""
    return _product(a, b)


def gram(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB, ``(..., M, M)``, where that is symmetric: of A, ``(..., N, M)``, and A with scaled rows, say."""
    return _product(a, b, symmetric=True)


def congruence(lower: Tensor, half: Tensor) -> Tensor:
    """LᵀAL, ``(..., M, M)``, for a lower triangular L and a symmetric A, of which AL is given."""
    return _product(lower, half, symmetric=True, lower=True)


def tril_of_lower(lower: Tensor, other: Tensor) -> Tensor:
    """The lower triangle of LᵀA, ``(..., M, M)``, for lower triangular L and A; what is above means nothing."""
    return _product(lower, other, lower=True)


def mirrored(lower: Tensor) -> Tensor:
    """The symmetric matrix, ``(..., M, M)``, of which this is the lower triangle; what is above means nothing."""
    tril = lower.tril()
    return tril + tril.tril(-1).mT


# LAPACK's matrices lie in memory by columns: where right hand sides do, a transposition away, no copy has to turn them.
# Those of AL⁻ᵀ do in LX = Aᵀ (1.4 to 3 times as quick as XLᵀ = A in float32 on one AMD EPYC, alike on another); many of
# L⁻¹B do in XLᵀ = Bᵀ. In LX = Aᵀ an L by rows, LAPACK's transpose, is there 1.3 to 1.9 times as quick as one by
# columns, its copy included.


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """L⁻¹B for a lower triangular L, ``(..., M, M)``, and B, ``(..., M, K)``."""
    if right.shape[-1] < _MANY:
        return torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, right.mT, upper=True, left=False).mT


def solve_upper(factor: Tensor, right: Tensor) -> Tensor:
    """L⁻ᵀB for a lower triangular L, ``(..., M, M)``, and B, ``(..., M, K)``."""
    if right.shape[-1] < _MANY:
        return torch.linalg.solve_triangular(factor.mT, right, upper=True)
    return torch.linalg.solve_triangular(factor, right.mT, upper=False, left=False).mT


def over_upper(rows: Tensor, factor: Tensor) -> Tensor:
    """AL⁻ᵀ, ``(..., N, M)``, by rows, for a lower triangular L, ``(..., M, M)``."""
    return torch.linalg.solve_triangular(factor.contiguous(), rows.mT, upper=False).mT


def over_lower(rows: Tensor, factor: Tensor) -> Tensor:
    """AL⁻¹, ``(..., N, M)``, by rows, for a lower triangular L, ``(..., M, M)``."""
    return torch.linalg.solve_triangular(factor.mT.contiguous(), rows.mT, upper=True).mT
