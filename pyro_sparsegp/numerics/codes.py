"""Whole numbers that name something: classes, levels, outputs."""

from __future__ import annotations

from torch import Tensor

__all__ = ["require_codes", "unknown_codes"]


def unknown_codes(codes: Tensor, num: int) -> list[float]:
    """Some of the codes that are no whole numbers from 0 to ``num`` − 1, at most five; empty if there are none."""
    unknown = (codes != codes.round()) | (codes < 0) | (codes >= num)
    return sorted({float(code) for code in codes[unknown].flatten()[:1000]})[:5]


def require_codes(codes: Tensor, num: int, what: str, remedy: str) -> None:
    """Refuse codes that are no whole numbers from 0 to ``num`` − 1.

    :raises ValueError: with ``what`` they are, which came, and the ``remedy``.
    """
    some = unknown_codes(codes.detach(), num)
    if some:
        raise ValueError(f"{what} must be whole numbers from 0 to {num - 1}, got {some}; {remedy}.")
