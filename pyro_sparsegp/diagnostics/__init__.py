"""Diagnostics: every posterior leaves as a standard ArviZ object, and says whether to trust it."""

try:
    from .effects import plot_effects
    from .scores import PredictiveScores, predictive_scores
    from .tree import to_datatree
    from .weights import PSIS, psis
except ModuleNotFoundError as error:
    remedy = 'pip install "pyro-sparsegp[diagnostics]"'
    raise ImportError(f"pyro_sparsegp.diagnostics needs {error.name}: {remedy}") from error

__all__ = ["PSIS", "PredictiveScores", "plot_effects", "predictive_scores", "psis", "to_datatree"]
