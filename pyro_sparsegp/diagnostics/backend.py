"""The one place that imports ArviZ and what it stands on: when first used, with a word on what to install."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas
    import xarray

    arviz_base: Any
    arviz_stats: Any

__all__ = ["FEWEST", "arviz_base", "arviz_stats", "matplotlib", "pandas", "xarray"]

FEWEST = 25  # draws that a tail can be fitted to


class Later:
    """A module that is imported when something of it is first used, by code or by ``typing.get_type_hints``.

    :param name: the module's.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # which inspection asks any object for
            raise AttributeError(attribute)
        try:
            module = importlib.import_module(self._name)
            return getattr(module, attribute, None) or importlib.import_module(f"{self._name}.{attribute}")
        except ImportError as error:
            remedy = 'pip install "pyro-sparsegp[diagnostics]"'
            raise ImportError(f"pyro_sparsegp.diagnostics needs {self._name} ({error}): {remedy}") from error


if not TYPE_CHECKING:
    arviz_base, arviz_stats, matplotlib = Later("arviz_base"), Later("arviz_stats"), Later("matplotlib")
    pandas, xarray = Later("pandas"), Later("xarray")
