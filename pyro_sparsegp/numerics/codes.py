"""Whole numbers that name something, classes, levels or outputs, or count; and words of which one is chosen."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def require_codes(codes: Tensor, num: int, what: str, remedy: str) -> None:
    """Refuse codes that are no whole numbers from 0 to ``num`` − 1.

    :raises ValueError: with ``what`` they are, which came, and the ``remedy``.
    """
    # NaN is none of them, and fails the first comparison; an error shows few of many.
    unknown = codes.detach()[(codes != codes.round()) | (codes < 0) | (codes >= num)][:1000]
    if unknown.numel():
        some = sorted({float(code) for code in unknown})[:5]
        raise ValueError(f"{what} must be whole numbers from 0 to {num - 1}, got {some}; {remedy}.")


def require_count(value: Any, what: str, least: int = 1, or_none: bool = False) -> None:
    """Refuse what is no whole number of at least so much.

    :raises ValueError: with ``what`` it is.
    """
    if not (or_none and value is None) and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{what} must be {'None or ' * or_none}a whole number of at least {least}, got {value!r}")


def require_share(value: Any, what: str) -> None:
    """Refuse what is no number in (0, 1].

    :raises ValueError: with ``what`` it is.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{what} must be a number in (0, 1], got {value!r}")


def require_choice(value: Any, what: str, *choices: str) -> None:
    """Refuse what is none of some words.

    :raises ValueError: with ``what`` it is.
    """
    if value not in choices:
        listed = " or ".join(f'"{word}"' for word in choices)
        raise ValueError(f"{what} must be {listed}, got {value!r}")
