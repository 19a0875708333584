"""Diagnostics: every posterior leaves as a standard ArviZ object, and says whether to trust it."""

from .comparison import compare, loo, loo_large
from .scores import PredictiveScores, predictive_scores
from .tree import prior_predictive, to_datatree, to_inference_data
from .weights import PSIS, psis, resample

__all__ = [
    "PSIS",
    "PredictiveScores",
    "compare",
    "loo",
    "loo_large",
    "predictive_scores",
    "prior_predictive",
    "psis",
    "resample",
    "to_datatree",
    "to_inference_data",
]
