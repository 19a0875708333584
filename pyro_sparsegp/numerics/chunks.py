"""Passing over many rows in chunks, whose intermediate values are dropped and made again on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_WHOLE = 2**15  # rows that are taken at once; above, chunks
_CHUNK = 2**12  # rows of a chunk: what a CPU's caches like
_PIECE = 2**21  # numbers that are made at once
_KEPT = 2**24  # numbers that may stay until the way back


def more_on(like: Tensor) -> int:
    """How many times as much as on a CPU is taken at once on a tensor's device."""
    return 1 if like.device.type == "cpu" else 32


def at_once(like: Tensor) -> int:
    """How many numbers, as of a kernel matrix, are made at once on a tensor's device."""
    return more_on(like) * _PIECE


def is_long(x: Tensor) -> bool:
    """Whether inputs ``(N, D)`` have too many rows to keep what a network makes of all of them."""
    return x.dim() == 2 and x.shape[0] > more_on(x) * _WHOLE


def chunks_of(x: Tensor) -> list[slice]:
    """Slices of consecutive rows that make up ``(N, D)``: one, unless it :func:`is_long`."""
    num = x.shape[-2]
    size = more_on(x) * _CHUNK if is_long(x) else num
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def dropping(function: Callable, *args: Any) -> Any:
    """``function(*args)``, with what it makes on the way dropped, and made again on the way back."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def by_rows(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """The tensors ``(..., N)`` that ``function`` gives at inputs ``(N, D)``, evaluated in chunks if these are many."""
    slices = chunks_of(x)
    if len(slices) == 1:
        return function(x)
    return tuple(torch.cat(part, -1) for part in zip(*(dropping(function, x[rows]) for rows in slices)))


def in_chunks(function: Callable[[Tensor], Tensor], width: int) -> Callable[[Tensor], Tensor]:
    """``function``, x ↦ ``(..., N)``, evaluated in pieces of rows, where it makes ``width`` numbers a row."""
    return lambda x: in_pieces(lambda rows: function(x[..., rows, :]), x.shape[-2], width, x, -1)


def in_pieces(function: Callable[[slice], Tensor], num: int, cost: int, like: Tensor, dim: int) -> Tensor:
    """What ``function`` gives for ``num`` items, evaluated for some items at a time and joined along ``dim``.

    :param cost: how many numbers it makes on the way for each; where they are many, they are dropped, and made again
        on the way back.
    :param like: a tensor of the device.
    """
    size = max(1, at_once(like) // cost)
    drop = num * cost > more_on(like) * _KEPT
    slices = [slice(start, min(start + size, num)) for start in range(0, max(num, 1), size)]
    parts = [dropping(function, rows) if drop else function(rows) for rows in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
