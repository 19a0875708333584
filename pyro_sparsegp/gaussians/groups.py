"""Blocks of equal size as one tensor, ``(..., C, M, K)``: one call in the place of C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..numerics.shapes import broadcast_shapes

__all__ = ["Groups", "stacked", "total"]


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

    def stack(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Matrices of each block, ``(..., M, K)`` or ``(..., N, M)``, as one for each group, ``(..., C, ·, ·)``."""
        return [stacked([blocks[b] for b in group]) for group in self.members]

    def columns(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Vectors of each block, ``(..., M)``, as columns, ``(..., C, M, 1)``."""
        return self.stack([block[..., None] for block in blocks])

    def unstack(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """The matrices of each block, in their order."""
        found: list[Optional[Tensor]] = [None] * len(self.sizes)
        for group, whole in zip(self.members, groups):
            for block, part in zip(group, whole.unbind(-3)):
                found[block] = part
        return [part for part in found if part is not None]

    def vectors(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """The vectors of each block, of columns."""
        return [part[..., 0] for part in self.unstack(groups)]


def stacked(blocks: Sequence[Tensor]) -> Tensor:
    """Matrices, ``(..., M, K)``, as one, ``(..., C, M, K)``; leading dimensions broadcast."""
    if len(blocks) == 1:
        return blocks[0].unsqueeze(-3)
    batch = broadcast_shapes(*[block.shape[:-2] for block in blocks])
    return torch.stack([block.expand(*batch, *block.shape[-2:]) for block in blocks], -3)


def total(groups: Sequence[Tensor]) -> Tensor:
    """The sum over all blocks, ``(..., ·, ·)``."""
    first, *rest = (whole.sum(-3) for whole in groups)
    return sum(rest, first)
