"""Warnings that are given once for each site, and the error of arguments that a function has no more."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
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


def without(**instead: str) -> Callable[[Callable], Any]:
    """A decorator for a function that some arguments have left: given, they raise, with what to do ``instead``."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & instead.keys():
                where = function.__qualname__.removesuffix(".__init__")
                raise ValueError(f"{name}= was removed from {where}: {instead[name]}.")
            return function(*args, **kwargs)

        return call

    return decorate
