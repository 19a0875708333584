"""Blocks of equal size as one tensor, ``(..., C, M, K)``: one call in the place of C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..numerics.linalg import Unbound
from ..numerics.shapes import broadcast_shapes

__all__ = ["Groups", "each_times", "plus_each_times", "stacked", "total"]


class Groups:
    """Which blocks have the same size.

    :param sizes: of the blocks.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        members: dict[int, list[int]] = {}
        for block, size in enumerate(self.sizes):
            members.setdefault(size, []).append(block)
        self.members = [tuple(group) for group in members.values()]
        self.order = tuple(block for group in self.members for block in group)
        self._shapes = [(len(group), self.sizes[group[0]]) for group in self.members]

    def stack(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Matrices of each block, ``(..., M, K)`` or ``(..., N, M)``, as one for each group, ``(..., C, ·, ·)``."""
        return [stacked(self.of_group(blocks, group)) for group in self.members]

    def of_group(self, blocks: Sequence[Any], group: Sequence[int]) -> Sequence[Any]:
        """Those of a group's blocks: the same sequence, where it is all of them, in their order."""
        return blocks if list(group) == list(range(len(self.sizes))) else [blocks[b] for b in group]

    def columns(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Vectors of each block, ``(..., M)``, as columns, ``(..., C, M, 1)``."""
        return self.stack([block[..., None] for block in blocks])

    def unstack(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """The matrices of each block, in their order."""
        return self._in_order([whole.unbind(-3) for whole in groups])

    def _in_order(self, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        found = {block: part for group, parts in zip(self.members, groups) for block, part in zip(group, parts)}
        return [found[block] for block in range(len(self.sizes))]

    def vectors(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """The vectors of each block, of columns."""
        return self._in_order([whole[..., 0].unbind(-2) for whole in groups])

    def over(self, groups: Sequence[Tensor]) -> Tensor:
        """Stacked matrices one above the other, in the order of the groups, ``(..., ΣM, K)``."""
        if len(groups) == 1:
            return groups[0].flatten(-3, -2)
        return torch.cat([whole.flatten(-3, -2) for whole in groups], -2)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """What :meth:`over` was made of."""
        *lead, _, last = whole.shape
        if len(self._shapes) == 1:
            return [whole.view(*lead, *self._shapes[0], last)]
        parts = whole.split([num * size for num, size in self._shapes], -2)
        return [part.view(*lead, *shape, last) for part, shape in zip(parts, self._shapes)]

    def diagonal(self, whole: Tensor) -> list[Tensor]:
        """Views of the blocks on the diagonal, ``(..., C, M, M)``, of a matrix, ``(..., ΣM, ΣM)``."""
        found, start = [], 0
        for num, size in self._shapes:
            stop = start + num * size
            own = whole[..., start:stop, start:stop].view(*whole.shape[:-2], num, size, num, size)
            found.append(own.diagonal(dim1=-4, dim2=-2).movedim(-1, -3))
            start = stop
        return found


def each_times(a: Tensor, b: Tensor) -> Tensor:
    """A_cB_c of stacked matrices, ``(..., C, ·, ·)``: of small ones without a batch ``@`` takes twice as long."""
    return torch.bmm(a, b) if a.dim() == b.dim() == 3 else a @ b


def plus_each_times(more: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """C_c + A_cB_c, as :func:`each_times`."""
    return torch.baddbmm(more, a, b) if more.dim() == a.dim() == b.dim() == 3 else more + a @ b


def stacked(blocks: Sequence[Tensor]) -> Tensor:
    """Matrices, ``(..., M, K)``, as one, ``(..., C, M, K)``; leading dimensions broadcast."""
    if isinstance(blocks, Unbound):
        return blocks.whole
    if len(blocks) == 1:
        return blocks[0].unsqueeze(-3)
    if all(block.shape == blocks[0].shape for block in blocks):
        return torch.stack(list(blocks), -3)
    batch = broadcast_shapes(*[block.shape[:-2] for block in blocks])
    return torch.stack([block.expand(*batch, *block.shape[-2:]) for block in blocks], -3)


def total(groups: Sequence[Tensor]) -> Tensor:
    """The sum over all blocks, ``(..., ·, ·)``."""
    first, *rest = (whole.sum(-3) for whole in groups)
    return sum(rest, first)
