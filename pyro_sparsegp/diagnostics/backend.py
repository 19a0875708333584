"""The one place that imports ArviZ and what it stands on: when first used, with a word on what to install."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas
    import xarray

    arviz_stats: Any

__all__ = ["FEWEST", "arviz_stats", "matplotlib", "pandas", "smooth", "xarray"]

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
        name = self._name
        try:
            module = importlib.import_module(name)
            if hasattr(module, attribute):
                return getattr(module, attribute)
            name = f"{name}.{attribute}"
            return importlib.import_module(name)
        except ImportError as error:
            remedy = 'pip install "pyro-sparsegp[diagnostics]"'
            raise ImportError(f"pyro_sparsegp.diagnostics needs {name} ({error}): {remedy}") from error


if not TYPE_CHECKING:
    arviz_stats, matplotlib = Later("arviz_stats"), Later("matplotlib")
    pandas, xarray = Later("pandas"), Later("xarray")


def smooth(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed log weights, normalised, and k-hat, of one vector of log p − log q.

    (Vehtari, Simpson, Gelman, Yao and Gabry, 2024.) Constant weights have k-hat −∞. What
    the draws never reach does not show: a q far too narrow may have a low k-hat.
    """
    log_weights = np.asarray(log_weights, dtype=np.float64)
    if log_weights.size < FEWEST:
        raise ValueError(f"k-hat needs at least {FEWEST} draws, got {log_weights.size}: take more, num_samples=1000")
    psislw = arviz_stats.base.array_stats.psislw
    # Equal weights, but for rounding, have no tail to fit (test_loo_says_when_weights_fail).
    if np.ptp(log_weights) <= 1e-4:
        return np.full_like(log_weights, -np.log(log_weights.size)), -np.inf
    with np.errstate(all="ignore"):  # k-hat is NaN, which counts as too large
        smoothed, khat = psislw(log_weights.max() - log_weights)  # takes log q − log p, as made for leave-one-out
    return np.asarray(smoothed, dtype=np.float64), float(khat)
