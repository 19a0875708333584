"""Kernels with a finite feature map, k(x, x') = φ(x)ᵀφ(x'), and white noise.

Sparse families use these features themselves as the basis: inducing points of a kernel of rank R are
singular beyond R points. A kernel of your own needs ``features`` alone:

>>> class Trend(FeatureKernel):
...     def features(self, x):
...         return torch.cat([x, x.square()], -1)
>>> Trend()(torch.ones(2, 1)).shape
torch.Size([2, 2])
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from typing import Optional

import torch
from torch import Tensor

from ..numerics.codes import require_count
from ..numerics.linalg import row_squares, side_by_side
from ..numerics.shapes import broadcast_shapes
from .algebra import Kernel, Level
from .base import Explicit, Scalar, as_tensor, per_column, positive


class FeatureKernel(Kernel):
    """A kernel with finitely many features: k(x, x') = φ(x)ᵀφ(x'), ``features(x)`` of shape ``(..., N, R)``."""

    @abstractmethod
    def features(self, x: Tensor) -> Tensor: ...

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        phi = self.features(x)
        return phi @ (phi if z is None else self.features(z)).mT

    def diag(self, x: Tensor) -> Tensor:
        return self.features(x).square().sum(-1)

    def explicit(self, x: Tensor) -> Explicit:
        phi = self.features(x)
        return Explicit(phi, row_squares(phi) if type(self).diag is FeatureKernel.diag else self.diag(x))


class Linear(FeatureKernel):
    """A linear function through the origin: k = Σ_d v_d x_d x'_d; add :class:`Constant` for an intercept.

    :param variance: v > 0, prior variance of the slopes: a number, ``(..., 1)`` or one per column, ``(..., D)``.
    """

    event_dims = (("variance", 1),)

    def __init__(self, variance: Scalar = 1.0) -> None:
        self.variance = positive(variance, "Linear's variance")

    def features(self, x: Tensor) -> Tensor:
        return x * per_column(self.variance, x, "Linear's variance").sqrt()


class Polynomial(FeatureKernel):
    """Polynomial kernel: k = (xᵀx' + b)^p, with all monomials up to degree p as its features.

    :param degree: p, a whole number of at least 1.
    :param bias: b ≥ 0, ``(...,)``.
    """

    event_dims = (("bias", 0),)

    def __init__(self, degree: int = 2, bias: Scalar = 1.0) -> None:
        require_count(degree, "Polynomial's degree")
        if isinstance(bias, (int, float)) and bias < 0:
            raise ValueError(f"Polynomial's bias must not be negative, got {bias}")
        self.degree, self.bias = degree, bias

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        return (x @ (x if z is None else z).mT + as_tensor(self.bias, x)[..., None, None]) ** self.degree

    def diag(self, x: Tensor) -> Tensor:
        return (x.square().sum(-1) + as_tensor(self.bias, x)[..., None]) ** self.degree

    def features(self, x: Tensor) -> Tensor:
        # (xᵀx' + b)^p = (aᵀa')^p with a = (x, √b); expand the power of the inner product.
        a = side_by_side([x, as_tensor(self.bias, x).sqrt()[..., None, None]])
        columns = []
        for powers in itertools.combinations_with_replacement(range(a.shape[-1]), self.degree):
            count = math.factorial(self.degree)
            for column in set(powers):
                count //= math.factorial(powers.count(column))
            columns.append(math.sqrt(count) * functools.reduce(torch.mul, (a[..., i] for i in powers)))
        return torch.stack(columns, -1)


class RandomFourier(FeatureKernel):
    """k = (1/R) Σ_r cos ω_rᵀ(x − x')/ℓ: R random Fourier features of a stationary kernel (Rahimi and Recht, 2007).

    The frequencies are drawn once, outside the model, at unit length scale, and stay fixed:

    >>> frequencies = RandomFourier.draw(RBF, 256, dim=2)
    >>> kernel = RandomFourier(frequencies, lengthscale=0.5)

    :param frequencies: ω, ``(R, D)``.
    :param lengthscale: ℓ > 0: a number, ``(..., 1)`` or one per column, ``(..., D)``.
    """

    event_dims = (("lengthscale", 1),)

    def __init__(self, frequencies: Tensor, lengthscale: Scalar = 1.0) -> None:
        if not isinstance(frequencies, Tensor) or frequencies.dim() != 2:
            raise ValueError(
                "RandomFourier's frequencies must be a tensor (R, D), such as RandomFourier.draw(kernels.RBF, R, D)"
            )
        self.omega = frequencies
        self.lengthscale = positive(lengthscale, "RandomFourier's lengthscale")

    @staticmethod
    def draw(kernel: type, num: int, dim: int, like: Optional[Tensor] = None) -> Tensor:
        """``num`` frequencies, ``(num, dim)``, of a stationary kernel class at unit length scale.

        :raises ValueError: if ``kernel`` is not a kernel class, or has no spectral density.
        """
        known = isinstance(kernel, type) and issubclass(kernel, Kernel)
        omega = kernel().frequencies((num,), torch.empty(1, dim).to(like)) if known else None
        if omega is None:
            raise ValueError(
                "RandomFourier.draw needs the class of a stationary kernel with a spectral density, such as "
                f"kernels.RBF or kernels.Matern32, got {kernel!r}"
            )
        return omega

    def features(self, x: Tensor) -> Tensor:
        length = per_column(self.lengthscale, x, "RandomFourier's lengthscale")
        if self.omega.shape[-1] != x.shape[-1]:
            raise ValueError(
                f"RandomFourier's frequencies are for {self.omega.shape[-1]} columns, the inputs have {x.shape[-1]}"
            )
        # φ = (cos ωᵀx/ℓ, sin ωᵀx/ℓ)/√R (Rahimi and Recht, 2007)
        angle = (x / length) @ self.omega.to(x).mT
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(self.omega.shape[0])

    def diag(self, x: Tensor) -> Tensor:
        return x.new_ones(()).expand(broadcast_shapes((*self.batch_shape, 1), x.shape[:-1]))


class White(Level):
    """White noise: k(x, z) = 0 and k(x) = s·I, independent at every row.

    It has no features, so sparse families give it no coefficients and cannot learn it. Its variance s enters the bound
    as a penalty, Σs/(2σ²), and the posterior of the other terms is too narrow. Under a guide put such noise into the
    likelihood, and effects of single rows into a plate of latents.
    """

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        if z is None:
            return torch.diag_embed(self.diag(x))
        return x.new_zeros(*broadcast_shapes(self.batch_shape, x.shape[:-2], z.shape[:-2]), x.shape[-2], z.shape[-2])

    def features(self, x: Tensor) -> Tensor:
        return x.new_zeros(*broadcast_shapes(self.batch_shape, x.shape[:-2]), x.shape[-2], 0)

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> None:
        return None  # a draw must remember where it was evaluated: exact conditioning does
