"""Diagnostics: every posterior leaves as a standard ArviZ object, and says whether to trust it."""

from .comparison import compare, loo, loo_large
from .tree import prior_predictive, to_datatree, to_inference_data
from .weights import PSIS, psis, resample

__all__ = [
    "PSIS",
    "compare",
    "loo",
    "loo_large",
    "prior_predictive",
    "psis",
    "resample",
    "to_datatree",
    "to_inference_data",
]
