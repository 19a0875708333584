"""Diagnostics: every posterior leaves as a standard ArviZ object, and says whether to trust it."""

from .calibration import sbc
from .comparison import compare, loo, loo_large
from .convergence import History, StoppingRule, add_history
from .effects import plot_effects
from .prior import prior_predictive
from .ribbons import plot_ribbon
from .scores import PredictiveScores, predictive_scores
from .tree import to_datatree, to_inference_data
from .weights import PSIS, psis, resample

__all__ = [
    "PSIS",
    "History",
    "PredictiveScores",
    "StoppingRule",
    "add_history",
    "compare",
    "loo",
    "loo_large",
    "plot_effects",
    "plot_ribbon",
    "predictive_scores",
    "prior_predictive",
    "psis",
    "resample",
    "sbc",
    "to_datatree",
    "to_inference_data",
]
