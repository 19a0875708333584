"""Gaussians over the coefficients of a basis."""

from .base import Coefficients, Gaussian
from .optimal import PrecisionFactor, from_natural, optimal, weighted_gram
from .precision import BlockPlusLowRank, IdentityPlusLowRank, LowRankGaussian
from .product import (
    BlockCholesky,
    CholeskyIdentity,
    DenseFactor,
    Diagonal,
    DiagonalFactor,
    FullCholesky,
    Identity,
    IdentityFactor,
    Product,
)
from .projected import ProjectedGaussian
from .shift import ShiftFactor
from .unwhitened import Unwhitened

__all__ = [
    "BlockCholesky",
    "BlockPlusLowRank",
    "CholeskyIdentity",
    "Coefficients",
    "DenseFactor",
    "Diagonal",
    "DiagonalFactor",
    "FullCholesky",
    "Gaussian",
    "Identity",
    "IdentityFactor",
    "IdentityPlusLowRank",
    "LowRankGaussian",
    "PrecisionFactor",
    "Product",
    "ProjectedGaussian",
    "ShiftFactor",
    "Unwhitened",
    "from_natural",
    "optimal",
    "weighted_gram",
]
