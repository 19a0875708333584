"""The one place that imports ArviZ: arviz-base, arviz-stats and arviz-plots, which arviz >= 1 re-exports.

Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["FEWEST", "Later", "arviz_plots", "arviz_stats", "pyplot", "rhat", "smooth", "xarray"]

_REMEDY = 'pip install "pyro-sparsegp[diagnostics]"'


FEWEST = 25  # draws that a tail can be fitted to


def _load(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {module} ({error}): {_REMEDY}") from error


class Later:
    """A module that type hints name: it is imported when they are resolved, as by ``typing.get_type_hints``.

    :param name: the module's.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # which inspection asks any object for
            raise AttributeError(attribute)
        module = _load(self._name, "a type hint of pyro_sparsegp.diagnostics")
        if not hasattr(module, attribute):
            return _load(f"{self._name}.{attribute}", "a type hint of pyro_sparsegp.diagnostics")
        return getattr(module, attribute)


def xarray() -> Any:
    """The xarray module, with DataTree.

    :raises ImportError: naming what to install.
    """
    module = _load("xarray", "pyro_sparsegp.diagnostics")
    if not hasattr(module, "DataTree"):
        raise ImportError(f"pyro_sparsegp.diagnostics needs xarray >= 2024.10, got {module.__version__}: {_REMEDY}")
    return module


def arviz_stats() -> Any:
    """arviz-stats (0.8 or newer)."""
    return _load("arviz_stats", "leave-one-out cross-validation of an approximate posterior")


def rhat() -> Callable:
    """R̂ of arrays, by arviz-stats (0.8 or newer)."""
    return _load("arviz_stats.base", "StoppingRule, for R-hat,").array_stats.rhat


def arviz_plots() -> Any:
    """arviz-plots (0.8 or newer)."""
    return _load("arviz_plots", "a plot")


def pyplot() -> Any:
    """matplotlib.pyplot."""
    return _load("matplotlib.pyplot", "a map")


def smooth(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed log weights, normalised, and k-hat, of one vector of log p − log q.

    (Vehtari, Simpson, Gelman, Yao and Gabry, 2024.) Constant weights have k-hat −∞. What
    the draws never reach does not show: a q far too narrow may have a low k-hat.
    """
    log_weights = np.asarray(log_weights, dtype=np.float64)
    if log_weights.size < FEWEST:
        raise ValueError(f"k-hat needs at least {FEWEST} draws, got {log_weights.size}: take more, num_samples=1000")
    if np.ptp(log_weights) <= 1e-9 * max(1.0, float(np.abs(log_weights).max())):
        return np.full_like(log_weights, -np.log(log_weights.size)), -np.inf
    stats = _load("arviz_stats.base", "importance sampling")
    # takes log q − log p: as made for leave-one-out, from log likelihoods
    with np.errstate(all="ignore"):  # k-hat is NaN, which counts as too large
        smoothed, khat = stats.array_stats.psislw(log_weights.max() - log_weights)
    return np.asarray(smoothed, dtype=np.float64), float(khat)
