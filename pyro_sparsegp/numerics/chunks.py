"""Passing over many rows in chunks, whose intermediate values are dropped and made again on the way back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_PIECE = 2**21  # numbers that are made at once: what a CPU's caches like
_KEPT = 2**24  # numbers that may stay until the way back
_ROW = 2**9  # numbers that a network is taken to make of a row


def more_on(like: Tensor) -> int:
    """How many times as much as on a CPU is taken at once on a tensor's device."""
    return 1 if like.device.type == "cpu" else 32


def at_once(like: Tensor) -> int:
    """How many numbers, as of a kernel matrix, are made at once on a tensor's device."""
    return more_on(like) * _PIECE


def is_long(x: Tensor) -> bool:
    """Whether inputs ``(N, D)`` have too many rows to keep what a network makes of all of them."""
    return x.dim() == 2 and x.shape[0] * _ROW > more_on(x) * _KEPT


def pieces(num: int, like: Tensor, cost: int = _ROW) -> list[slice]:
    """Slices of ``num`` items, one after the other.

    :param like: a tensor of the device.
    :param cost: how many numbers are made for each item; by default, what a network makes of a row.
    """
    size = max(1, at_once(like) // cost)
    return [slice(start, start + size) for start in range(0, max(num, 1), size)]


def dropping(function: Callable, *args: Any) -> Any:
    """``function(*args)``, with what it makes on the way dropped, and made again on the way back."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def by_rows(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """The tensors ``(..., N)`` that ``function`` gives at inputs ``(N, D)``, evaluated in pieces if these are many."""
    if not is_long(x):
        return function(x)
    return tuple(torch.cat(part, -1) for part in zip(*(dropping(function, x[rows]) for rows in pieces(len(x), x))))


def in_chunks(function: Callable[[Tensor], Tensor], width: int) -> Callable[[Tensor], Tensor]:
    """``function``, x ↦ ``(..., N)``, evaluated in pieces of rows, where it makes ``width`` numbers a row."""
    return lambda x: in_pieces(lambda rows: function(x[..., rows, :]), x.shape[-2], width, x, -1)


def in_pieces(function: Callable[[slice], Tensor], num: int, cost: int, like: Tensor, dim: int) -> Tensor:
    """What ``function`` gives for ``num`` items by :func:`pieces`, joined along ``dim``.

    Where they make many numbers on the way these are dropped, and made again on the way back.
    """
    run = dropping if num * cost > more_on(like) * _KEPT else operator.call
    parts = [run(function, rows) for rows in pieces(num, like, cost)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
