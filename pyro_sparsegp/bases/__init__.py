"""Bases: where a function meets its finitely many coefficients."""

from .additive import Additive, AdditiveFeatures, ExplicitFeatures
from .base import Basis, Features, KernelFeatures
from .inducing import InducingFeatures, InducingPoints
from .initial import greedy_variance, k_means

__all__ = [
    "Additive",
    "AdditiveFeatures",
    "Basis",
    "ExplicitFeatures",
    "Features",
    "InducingFeatures",
    "InducingPoints",
    "KernelFeatures",
    "greedy_variance",
    "k_means",
]
