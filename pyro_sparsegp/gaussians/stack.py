"""Blocks of coefficients as one tensor, ``(..., C, M, K)``: one call in the place of C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..numerics.linalg import Unbound

__all__ = ["Stack", "each_times", "eye_like"]


class Stack:
    """C blocks of M_b coefficients as one of C times M, the largest size; what is beyond a block's own is 0.

    Flat, ``(..., C·M, K)``, the blocks are one above the other.

    :param sizes: M_b.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.size = max(self.sizes, default=0)
        self.is_even = len(set(self.sizes)) < 2
        self._index = torch.cat([torch.arange(n) + self.size * b for b, n in enumerate(self.sizes)])

    def rows(self, blocks: Sequence[Tensor]) -> Tensor:
        """Matrices, ``(..., M_b, K)`` a block, as ``(..., C, M, K)``."""
        return _stacked(blocks, lambda block: (0, 0, 0, self.size - block.shape[-2]))

    def columns(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors, ``(..., M_b)`` a block, as ``(..., C, M, 1)``."""
        return self.rows([v[..., None] for v in vectors])

    def squares(self, blocks: Sequence[Tensor]) -> Tensor:
        """Matrices, ``(..., M_b, M_b)`` a block, as ``(..., C, M, M)``, with 1 on the diagonal beyond a block's own."""
        whole = _stacked(blocks, lambda block: (0, self.size - block.shape[-1]) * 2)
        if self.is_even:
            return whole
        # there q is the prior: D = I, B = 0, m = 0
        beyond = torch.arange(self.size) >= torch.tensor(self.sizes)[:, None]
        return whole + torch.diag_embed(beyond.to(whole))

    def wide(self, x: Tensor) -> Tensor:
        """Numbers of all blocks side by side, ``(..., ΣM_b)``, as ``(..., C·M)``."""
        if self.is_even:
            return x
        found = x.new_zeros(*x.shape[:-1], len(self.sizes) * self.size)
        found[..., self._index] = x
        return found

    def narrow(self, x: Tensor) -> Tensor:
        """What :meth:`wide` was made of."""
        return x if self.is_even else x[..., self._index]

    def cut(self, flat: Tensor) -> Tensor:
        """A flat tensor as a stack."""
        return flat.view(*flat.shape[:-2], len(self.sizes), self.size, flat.shape[-1])

    def blocks(self, whole: Tensor, square: bool = False) -> list[Tensor]:
        """The matrices that :meth:`rows`, or :meth:`squares`, made a stack of."""
        return [part[..., :n, : n if square else None] for part, n in zip(whole.unbind(-3), self.sizes)]

    def vectors(self, columns: Tensor) -> list[Tensor]:
        """The vectors that :meth:`columns` made a stack of."""
        return [part[..., :n] for part, n in zip(columns[..., 0].unbind(-2), self.sizes)]

    def diagonal(self, whole: Tensor) -> Tensor:
        """A view of the blocks on the diagonal, ``(..., C, M, M)``, of a matrix, ``(..., C·M, C·M)``."""
        shape = len(self.sizes), self.size
        return whole.view(*whole.shape[:-2], *shape, *shape).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    def dense(self, blocks: Tensor, low_rank: Optional[Tensor] = None) -> Tensor:
        """blockdiag(D) + BBᵀ of a stack D and a flat B, ``(..., ΣM_b, ΣM_b)``."""
        size = len(self.sizes) * self.size
        whole = blocks.new_zeros(*blocks.shape[:-3], size, size) if low_rank is None else low_rank @ low_rank.mT
        self.diagonal(whole).add_(blocks)
        return self.narrow(self.narrow(whole).mT).mT


def _stacked(blocks: Sequence[Tensor], beyond: Any) -> Tensor:
    if isinstance(blocks, Unbound):
        return blocks.whole
    padded = [pad(block, more) if any(more := beyond(block)) else block for block in blocks]
    return torch.stack(torch.broadcast_tensors(*padded), -3)


def each_times(a: Tensor, b: Tensor) -> Tensor:
    """A_cB_c of stacked matrices, ``(..., C, ·, ·)``: of small ones without a batch ``@`` takes twice as long."""
    return torch.bmm(a, b) if a.dim() == b.dim() == 3 else a @ b


def eye_like(matrix: Tensor) -> Tensor:
    """I of a matrix' size."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
