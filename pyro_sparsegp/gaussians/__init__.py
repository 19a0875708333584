"""Gaussians over the coefficients of a basis."""

from .anchors import AtRows
from .base import Coefficients, Gaussian
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
from .product import Product, optimal
from .sites import Sites
from .steps import Rate

__all__ = [
    "AtRows",
    "BlockCholesky",
    "BlockPlusLowRank",
    "CholeskyIdentity",
    "Coefficients",
    "Diagonal",
    "FullCholesky",
    "Gaussian",
    "Identity",
    "IdentityPlusLowRank",
    "NaturalGaussian",
    "NaturalLowRank",
    "Product",
    "ProjectedGaussian",
    "Rate",
    "Sites",
    "optimal",
]
