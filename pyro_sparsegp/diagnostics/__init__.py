"""Diagnostics: every posterior leaves as a standard ArviZ object, and says whether to trust it."""

from .export.prior import prior_predictive
from .export.tree import to_datatree
from .plots.effects import plot_effects
from .plots.ribbons import plot_ribbon
from .sampler import HMC, NUTS
from .trust.calibration import sbc
from .trust.comparison import compare, loo, loo_large
from .trust.convergence import History, StoppingRule, add_history
from .trust.scores import PredictiveScores, predictive_scores
from .trust.weights import PSIS, psis, resample

__all__ = [
    "HMC",
    "NUTS",
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
]
