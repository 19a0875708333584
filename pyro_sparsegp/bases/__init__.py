"""Bases: where a function meets its finitely many coefficients."""

from .base import Basis, CrossFeatures, Features
from .fourier import FourierCoefficients
from .images import as_images, inducing_patches, random_convolution
from .variables import InducingVariables

__all__ = [
    "Basis",
    "CrossFeatures",
    "Features",
    "FourierCoefficients",
    "InducingVariables",
    "as_images",
    "inducing_patches",
    "random_convolution",
]
