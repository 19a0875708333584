"""Gaussians over the coefficients of a basis."""

from .base import Coefficients, Gaussian, Given
from .drawn import Drawn, DrawnGaussian
from .factors import DenseFactor, DiagonalFactor, IdentityFactor, ShiftFactor
from .free import (
    BlockCholesky,
    BlockPlusLowRank,
    CholeskyIdentity,
    Diagonal,
    FullCholesky,
    Identity,
    IdentityPlusLowRank,
    ProjectedGaussian,
)
from .low_rank import NaturalLowRank
from .natural import NaturalGaussian
from .product import Continued, Product, Share, Shared, Whole, from_natural, optimal, weighted_gram
from .seats import AtRows, seen_from
from .sites import Sites
from .steps import Rate

__all__ = [
    "AtRows",
    "BlockCholesky",
    "BlockPlusLowRank",
    "CholeskyIdentity",
    "Coefficients",
    "Continued",
    "DenseFactor",
    "Diagonal",
    "DiagonalFactor",
    "Drawn",
    "DrawnGaussian",
    "FullCholesky",
    "Gaussian",
    "Given",
    "Identity",
    "IdentityFactor",
    "IdentityPlusLowRank",
    "NaturalGaussian",
    "NaturalLowRank",
    "Product",
    "ProjectedGaussian",
    "Rate",
    "Share",
    "Shared",
    "ShiftFactor",
    "Sites",
    "Whole",
    "from_natural",
    "optimal",
    "seen_from",
    "weighted_gram",
]
