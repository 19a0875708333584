"""Bases: where a function meets its finitely many coefficients."""

from .actions import Actions, ProjectedFeatures
from .additive import Additive, AdditiveFeatures
from .base import Basis, CrossFeatures, Features
from .features import ExplicitFeatures, KernelFeatures
from .fourier import FourierCoefficients
from .images import as_images, inducing_patches, random_convolution
from .inducing import InducingFeatures, InducingPoints
from .variables import InducingVariables

__all__ = [
    "Actions",
    "Additive",
    "AdditiveFeatures",
    "Basis",
    "CrossFeatures",
    "ExplicitFeatures",
    "Features",
    "FourierCoefficients",
    "InducingFeatures",
    "InducingPoints",
    "InducingVariables",
    "KernelFeatures",
    "ProjectedFeatures",
    "as_images",
    "inducing_patches",
    "random_convolution",
]
