"""The block plus low-rank precision that is nearest to a dense one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, on_diagonal, solve_lower

__all__ = ["assembled", "nearest"]

_MOST = 50  # updates from a start
_ENOUGH = 1e-12


def assembled(blocks: Sequence[Tensor], low_rank: Sequence[Tensor]) -> Tensor:
    """blockdiag(D) + BBᵀ, ``(..., M, M)``.

    :param blocks: D, ``(..., M_b, M_b)`` each.
    :param low_rank: B's blocks of rows, ``(..., M_b, R)`` each.
    """
    b = torch.cat(list(low_rank), -2)
    return on_diagonal(blocks, b.new_zeros(*b.shape[:-1], b.shape[-2])) + b @ b.mT


def nearest(precision: Tensor, sizes: Sequence[int], rank: int, base: bool) -> tuple[list[Tensor], list[Tensor]]:
    """D and B of the P = blockdiag(D) + BBᵀ of least KL[N(0, P⁻¹) ‖ N(0, P̂⁻¹)], or one near it.

    That is factor analysis with P̂ for its covariance (Lawley, 1940): given D = RRᵀ the best B is RU(Λ − I)₊^½, with the
    leading eigenvectors U and eigenvalues Λ of R⁻¹P̂R⁻ᵀ, and where the divergence is least P has the blocks of P̂. The
    two are repeated from D = I, where a full rank is exact, and from the blocks of P̂, and the best P is taken.

    :param precision: P̂, ``(..., M, M)``.
    :param base: whether D is free; else it is I.
    """
    eyes = [torch.eye(num, dtype=precision.dtype, device=precision.device) for num in sizes]
    eyes = [eye.expand(*precision.shape[:-2], *eye.shape) for eye in eyes]
    starts = [eyes, _within(precision, sizes)] if base else [eyes]
    found: list[tuple[float, list[Tensor], list[Tensor]]] = []
    for blocks in starts:
        last = float("inf")
        for _ in range(_MOST if base else 1):
            low_rank = _leading(precision, blocks, rank)
            away = _divergence(precision, assembled(blocks, low_rank))
            found.append((away, blocks, low_rank))
            if away <= _ENOUGH or away > last - 1e-6 * abs(last):
                break
            last = away
            b = torch.cat(low_rank, -2)
            blocks = _within(precision - b @ b.mT, sizes)
    _, blocks, low_rank = min(found, key=lambda one: one[0])
    return blocks, low_rank


def _within(matrix: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The blocks on its diagonal."""
    found, start = [], 0
    for num in sizes:
        block = matrix[..., start : start + num, start : start + num]
        found.append((block + block.mT) / 2)
        start += num
    return found


def _leading(precision: Tensor, blocks: Sequence[Tensor], rank: int) -> list[Tensor]:
    sizes = [block.shape[-1] for block in blocks]
    roots = [cholesky(block, 0.0, "a block of a low-rank precision") for block in blocks]
    root = on_diagonal(roots, torch.zeros_like(precision))
    white = solve_lower(root, solve_lower(root, precision).mT)
    values, vectors = torch.linalg.eigh((white + white.mT) / 2)
    kept = min(rank, sum(sizes))
    first = values.shape[-1] - kept
    b = root @ (vectors[..., first:] * (values[..., first:] - 1).clamp(min=0).sqrt()[..., None, :])
    b = torch.nn.functional.pad(b, (0, rank - kept))
    # Columns that have nothing to do stay small, not 0, from which no step leads away.
    b = torch.where((b == 0).all(-2, keepdim=True), 1e-7 * torch.randn_like(b), b)
    return list(b.split(sizes, -2))


def _divergence(aim: Tensor, found: Tensor) -> float:
    """The largest KL[N(0, P⁻¹) ‖ N(0, P̂⁻¹)] = ½(tr P̂P⁻¹ − M + log|P| − log|P̂|) of a batch."""
    here, there = (cholesky(part, 0.0, "a precision") for part in (found, aim))
    logs = [2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) for factor in (here, there)]
    trace = solve_lower(here, there).square().sum((-2, -1))
    return float((0.5 * (trace - aim.shape[-1] + logs[0] - logs[1])).max())
