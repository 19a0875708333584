"""Warnings that are given once for each site, and the error of numbers that are none."""

from __future__ import annotations

import warnings
from typing import Any

Warned = set[tuple[str, str]]  # kinds of warnings, and the sites that they were about


def warn_once(
    warned: Warned, kind: str, site: str, message: str, category: type[Warning] = UserWarning, stacklevel: int = 1
) -> None:
    """Warn, unless ``warned`` has a warning of this kind about this site.

    :param stacklevel: as of ``warnings.warn`` in the caller's place.
    """
    if (kind, site) not in warned:
        warned.add((kind, site))
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def require_number(what: str, given: Any, least: int = 1) -> None:
    """Raise unless an argument is a whole number of at least so much."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"{what} must be a whole number of at least {least}, got {given!r}")
