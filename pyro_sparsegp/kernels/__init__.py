"""Covariance functions of tensors; see :class:`~pyro_sparsegp.kernels.base.CovarianceFunction` for the protocol."""

from .adapters import from_function, from_gpytorch, from_pyro
from .algebra import Constant, Kernel, Product, Scaled, Select, Sum
from .anova import Anova
from .derivative import Derivative
from .features import Categorical, Coregionalisation, DeepBasis, FeatureKernel, Linear, Polynomial, RandomFourier, White
from .patches import TICK, Convolutional, patch_grid, patches
from .stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic, Stationary

__all__ = [
    "RBF",
    "TICK",
    "Anova",
    "Categorical",
    "Constant",
    "Convolutional",
    "Coregionalisation",
    "DeepBasis",
    "Derivative",
    "FeatureKernel",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Polynomial",
    "Product",
    "RandomFourier",
    "RationalQuadratic",
    "Scaled",
    "Select",
    "Stationary",
    "Sum",
    "White",
    "from_function",
    "from_gpytorch",
    "from_pyro",
    "patch_grid",
    "patches",
]
