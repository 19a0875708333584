"""Gaussians over the coefficients of a basis."""

from .base import Coefficients, Gaussian
from .optimal import PrecisionFactor, optimal, optimal_of
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
    "optimal",
    "optimal_of",
]
