"""Bases: where a function meets its finitely many coefficients."""

from .actions import Actions
from .additive import Additive, AdditiveFeatures
from .base import Basis, Features
from .features import ExplicitFeatures, KernelFeatures
from .fourier import FourierCoefficients
from .inducing import InducingFeatures, InducingPoints
from .initial import greedy_variance, k_means, regular_grid
from .projection import ProjectedFeatures
from .variables import InducingVariables

__all__ = [
    "Actions",
    "Additive",
    "AdditiveFeatures",
    "Basis",
    "ExplicitFeatures",
    "Features",
    "FourierCoefficients",
    "InducingFeatures",
    "InducingPoints",
    "InducingVariables",
    "KernelFeatures",
    "ProjectedFeatures",
    "greedy_variance",
    "k_means",
    "regular_grid",
]
