"""Passing over many rows in blocks, whose intermediate values are dropped and made again on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["blocks_of", "by_rows", "dropping", "in_blocks", "in_pieces", "is_long"]

_WHOLE = 2**15  # rows that are taken at once; above, blocks
_NUMBERS = 2**24  # that the waves of one block of a sample function take
_BLOCK = 2**12  # rows of a block: what a CPU's caches like; a GPU takes 32 times that
_PIECE = 2**21  # numbers that are made at once; a GPU takes 32 times that, too
_KEPT = 2**24  # numbers that may stay until the way back


def is_long(x: Tensor) -> bool:
    """Whether inputs ``(N, D)`` have too many rows to keep what a network makes of all of them."""
    return x.dim() == 2 and x.shape[0] > (_WHOLE if x.device.type == "cpu" else 32 * _WHOLE)


def blocks_of(x: Tensor) -> list[slice]:
    """Slices of consecutive rows that make up ``(N, D)``: one, unless it :func:`is_long`."""
    num = x.shape[-2]
    size = (_BLOCK if x.device.type == "cpu" else 32 * _BLOCK) if is_long(x) else num
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def dropping(function: Callable, *args: Any) -> Any:
    """``function(*args)``, with what it makes on the way dropped, and made again on the way back."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def by_rows(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """The tensors ``(..., N)`` that ``function`` gives at inputs ``(N, D)``, evaluated in blocks if these are many."""
    slices = blocks_of(x)
    if len(slices) == 1:
        return function(x)
    if torch.is_grad_enabled():
        parts = [dropping(function, x[rows]) for rows in slices]
        return tuple(torch.cat(part, -1) for part in zip(*parts))
    # Small results that stay would break up the memory that the next block could have used again.
    whole: Optional[tuple[Tensor, ...]] = None
    for rows in slices:
        found = function(x[rows])
        if whole is None:
            whole = tuple(part.new_empty(*part.shape[:-1], x.shape[0]) for part in found)
        for part, into in zip(found, whole):
            into[..., rows] = part
        del found, part
    assert whole is not None
    return whole


def in_blocks(function: Callable[[Tensor], Tensor], width: int) -> Callable[[Tensor], Tensor]:
    """``function``, x ↦ ``(..., N)``, evaluated in blocks of rows, where it makes ``width`` numbers a row."""
    rows = max(1, _NUMBERS // width)

    def by_blocks(x: Tensor) -> Tensor:
        return function(x) if x.shape[-2] <= rows else torch.cat([function(part) for part in x.split(rows, -2)], -1)

    return by_blocks


def in_pieces(function: Callable[[slice], Tensor], num: int, cost: int, like: Tensor, dim: int) -> Tensor:
    """What ``function`` gives for ``num`` items, evaluated for some items at a time and joined along ``dim``.

    :param cost: how many numbers it makes on the way for each; where they are many, they are dropped, and made again
        on the way back.
    :param like: a tensor of the device.
    """
    more = 1 if like.device.type == "cpu" else 32
    size = max(1, more * _PIECE // cost)
    drop = num * cost > more * _KEPT
    slices = [slice(start, min(start + size, num)) for start in range(0, num, size)]
    parts = [dropping(function, rows) if drop else function(rows) for rows in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
