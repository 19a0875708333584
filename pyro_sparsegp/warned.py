"""Warnings that are given once for each site."""

import warnings

Warned = set[tuple[str, str]]  # kinds of warnings, and the sites that they were about


def warn_once(
    warned: Warned, kind: str, site: str, message: str, category: type[Warning] = UserWarning, stacklevel: int = 1
) -> None:
    """Warn, unless ``warned`` has a warning of this kind about this site.

    :param stacklevel: as ``warnings.warn`` in the caller's place would take it.
    """
    if (kind, site) not in warned:
        warned.add((kind, site))
        warnings.warn(message, category, stacklevel=stacklevel + 1)
