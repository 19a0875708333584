"""Blocks of coefficients as one tensor, ``(..., C, M, K)``: one call in the place of C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..numerics.linalg import Unbound, factorised, rounding


class Stack:
    """C blocks of M_b coefficients as one of C times M, the largest size; what is beyond a block's own is 0.

    Flat, ``(..., C·M, K)``, the blocks are one above the other; wide, ``(..., C·M)``, side by side.

    :param sizes: M_b.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.size = max(self.sizes, default=0)
        self.num_beyond = len(self.sizes) * self.size - sum(self.sizes)
        self._own = torch.arange(self.size) < torch.tensor(self.sizes)[:, None]
        self._index = self._own.flatten().nonzero()[:, 0]

    def own(self, like: Tensor) -> Tensor:
        """1 where a number is a block's own, else 0, ``(C, M)``."""
        # Kept where it was asked for last: no step copies it to a device.
        self._own = self._own.to(like)
        return self._own

    def rows(self, blocks: Sequence[Tensor]) -> Tensor:
        """Matrices, ``(..., M_b, K)`` a block, as ``(..., C, M, K)``."""
        if isinstance(blocks, Unbound):
            return blocks.whole
        parts = [pad(block, (0, 0, 0, more)) if (more := self.size - block.shape[-2]) else block for block in blocks]
        return torch.stack(torch.broadcast_tensors(*parts), -3)

    def squares(self, blocks: Sequence[Tensor]) -> Tensor:
        """Matrices, ``(..., M_b, M_b)`` a block, as ``(..., C, M, M)``, with 1 on the diagonal beyond a block's own."""
        if not self.num_beyond:
            return self.rows(blocks)
        whole = self.rows([pad(block, (0, self.size - block.shape[-1])) for block in blocks])
        # there q is the prior: D = I, B = 0, m = 0
        return whole + torch.diag_embed(1 - self.own(whole))

    def wide(self, x: Tensor) -> Tensor:
        """Numbers of all blocks side by side, ``(..., ΣM_b)``, as ``(..., C·M)``."""
        if not self.num_beyond:
            return x
        found = x.new_zeros(*x.shape[:-1], len(self.sizes) * self.size)
        found[..., self._index] = x
        return found

    def narrow(self, x: Tensor) -> Tensor:
        """What :meth:`wide` was made of."""
        return x[..., self._index] if self.num_beyond else x

    def cut(self, flat: Tensor) -> Tensor:
        """A flat tensor as a stack."""
        return flat.view(*flat.shape[:-2], len(self.sizes), self.size, flat.shape[-1])

    def columns(self, x: Tensor) -> Tensor:
        """A vector of all blocks, ``(..., ΣM_b)``, as ``(..., C, M, 1)``."""
        return self.wide(x).view(*x.shape[:-1], len(self.sizes), self.size, 1)

    def blocks(self, whole: Tensor, square: bool = False) -> list[Tensor]:
        """The matrices that :meth:`rows`, or :meth:`squares`, made a stack of."""
        return [part[..., :n, : n if square else None] for part, n in zip(whole.unbind(-3), self.sizes)]

    def diagonal(self, whole: Tensor) -> Tensor:
        """A view of the blocks on the diagonal, ``(..., C, M, M)``, of a matrix, ``(..., C·M, C·M)``."""
        # (C, M, C, M), of whose two C the diagonal is taken
        shape = len(self.sizes), self.size
        return whole.view(*whole.shape[:-2], *shape, *shape).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    def dense(self, blocks: Tensor, low_rank: Tensor, sign: int = 1) -> Tensor:
        """blockdiag(D) ± BBᵀ of a stack D and a flat B, ``(..., ΣM_b, ΣM_b)``."""
        whole = (sign * low_rank) @ low_rank.mT
        self.diagonal(whole).add_(blocks)
        return self.narrow(self.narrow(whole).mT).mT

    def spread(self, matrix: Tensor) -> Tensor:
        """A matrix of all coefficients, ``(..., ΣM_b, ΣM_b)``, as ``(..., C·M, C·M)``, I beyond the blocks' own."""
        if not self.num_beyond:
            return matrix
        return self.wide(self.wide(matrix).mT).mT + torch.diag_embed(1 - self.own(matrix).flatten())


def each_times(a: Tensor, b: Tensor) -> Tensor:
    """A_cB_c of stacked matrices, ``(..., C, ·, ·)``: of small ones without a batch ``@`` takes twice as long."""
    return torch.bmm(a, b) if a.dim() == b.dim() == 3 else a @ b


def eye_like(matrix: Tensor) -> Tensor:
    """I of a matrix' size."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def solved(precision: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """P⁻¹ of a vector, and a flag that is not 0 if P has no Cholesky factor. With so much more on the diagonal, in
    place, that rounding leaves it positive: at no slope the mean stays all the same.
    """
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(rounding(precision) * diagonal.mean(-1, keepdim=True))
    factor, info = factorised(precision)
    return torch.cholesky_solve(right[..., None], factor)[..., 0], info
