"""Stationary kernels: a profile g of the squared scaled distance s = Σ_d (x_d − x'_d)²/ℓ_d².

Profiles are written with their slope dg/ds, which is finite at s = 0 where the usual route through √s
gives 0·∞: values and gradients are right at coincident points, in float32 too.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.functions import Function, aligned, broadcast_shapes
from ..numerics.linalg import wider
from .algebra import Kernel
from .base import EventDims, Scalar, as_tensor, per_column, positive, second

_FEW = 16  # columns: up to here the product of inputs, even in float64, costs little beside the passes over it


def _towards(grad: Tensor, one: Tensor, other: Tensor) -> Tensor:
    # ∂/∂xₙ Σ_m g_nm ‖xₙ − z_m‖² = 2Σ_m g_nm (xₙ − z_m)
    return 2 * (grad.sum(-1, keepdim=True) * one - grad @ other).sum_to_size(one.shape)


def _moved(one: Tensor, other: Tensor, change: Tensor) -> Tensor:
    # d‖xₙ − z_m‖² = 2(xₙ − z_m)ᵀdxₙ
    return 2 * ((one * change).sum(-1, keepdim=True) - change @ other.mT)


def squared_distance(x: Tensor, z: Tensor) -> Tensor:
    """‖xₙ − zₘ‖², ``(..., N, M)``, by one matrix product; rounding may leave it slightly negative."""
    if x.shape[-1] == 1:
        return (x - z.mT).square()
    # In float32 the product would leave few digits of distances that are small beside the inputs' range.
    dtype = wider(x) if x.shape[-1] <= _FEW else x.dtype
    a, b = x.to(dtype), z.to(dtype)
    a2, b2 = a.square().sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
    left = torch.cat([a, a2, torch.ones_like(a2)], -1)  # (x, ‖x‖², 1)ᵀ(−2z, 1, ‖z‖²)
    return (left @ torch.cat([-2 * b, torch.ones_like(b2), b2], -1).mT).to(x.dtype)


def _clean(x: Tensor, z: Optional[Tensor]) -> Tensor:
    # s, not below 0; without z, of x with itself, where the diagonal is 0 and no rounding error.
    s = squared_distance(x, second(x, z))
    # Derivatives pass where rounding has left less than 0, as s has no value there (test_derivative.py, `coincident`).
    s = s + (s.clamp(min=0) - s).detach()
    return s if z is not None else s * (1 - torch.eye(s.shape[-1], dtype=s.dtype, device=s.device))


class ProfileOfDistance(Function):
    """g(s) and dg/ds of a profile's ``value_and_slope`` at s = ‖xₙ − zₘ‖², ``(..., N, M)``; without z it is x."""

    @staticmethod
    def forward(x: Tensor, z: Optional[Tensor], profile: Any) -> tuple[Tensor, Tensor]:
        s = squared_distance(x, second(x, z)).clamp_(min=0)
        if z is None:  # no rounding error stands between a row and itself
            s.diagonal(dim1=-2, dim2=-1).zero_()
        return profile.value_and_slope(s)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, z, ctx.profile = inputs
        ctx.save_for_backward(x, z, output[1])
        ctx.save_for_forward(x, z)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: object) -> tuple[Optional[Tensor], Optional[Tensor], None]:
        x, z, slope = ctx.saved_tensors
        if grad is None:
            return None, None, None
        if torch.is_grad_enabled():  # double backward wants the slope as a function of x and z
            slope = ctx.profile.value_and_slope(_clean(x, z))[1]
        if z is None:  # each pair stands twice, and ds is 0 on the diagonal
            return _towards((grad + grad.mT) * slope, x, x), None, None
        grad = grad * slope
        by_x = _towards(grad, x, z) if ctx.needs_input_grad[0] else None
        return by_x, _towards(grad.mT, z, x) if ctx.needs_input_grad[1] else None, None

    @staticmethod
    def jvp(ctx: Any, dx: Optional[Tensor], dz: Optional[Tensor], _: object) -> tuple[Tensor, None]:
        x, z = ctx.saved_tensors
        # dg(s) = dg/ds ds, in which both inputs may move
        s, (other, dz) = _clean(x, z), (x, dx) if z is None else (z, dz)
        change = torch.zeros_like(s)
        if dx is not None:
            change = change + _moved(x, other, dx)
        if dz is not None:
            change = change + _moved(other, x, dz).mT
        return change * ctx.profile.value_and_slope(s)[1], None

    @staticmethod
    def vmap(info: object, in_dims: Any, x: Tensor, z: Optional[Tensor], profile: object) -> Any:
        return ProfileOfDistance.apply(*aligned(in_dims, (x, z)), profile), (0, 0)


class Stationary(Kernel):
    """A stationary kernel k(x, x') = g(s) with s = Σ_d (x_d − x'_d)²/ℓ_d², g(0) = 1; ``v * RBF(l)`` has the variance v.

    :param lengthscale: ℓ > 0 in the units of the inputs: a number, ``(..., 1)`` or one per column, ``(..., D)``.
    """

    event_dims: EventDims = (("lengthscale", 1),)

    def __init__(self, lengthscale: Scalar = 1.0) -> None:
        self.lengthscale = positive(lengthscale, f"{type(self).__name__}'s lengthscale")

    @staticmethod
    @abstractmethod
    def value_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
        """g(s) and dg/ds by differentiable operations, in new memory or in that of s ≥ 0."""

    def scale(self, x: Tensor) -> Tensor:
        """x/ℓ, ``(..., N, D)``, of inputs or of frequencies at unit length scale."""
        return x / per_column(self.lengthscale, x, f"{type(self).__name__}'s lengthscale")

    def covariance(self, x: Tensor, z: Optional[Tensor]) -> Tensor:
        """g(s) of scaled inputs, ``(..., N, M)``; without z, of x with itself."""
        return ProfileOfDistance.apply(x, z, type(self))[0]

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        # ‖x‖² + ‖z‖² − 2xᵀz cancels least near the origin, and distances do not see a common shift; before
        # the scaling, whose rounding grows with the inputs' distance from the origin.
        centre = second(x, z).detach().mean(-2, keepdim=True)
        left = self.scale(x - centre)
        return self.covariance(left, None if z is None else self.scale(z - centre))

    def diag(self, x: Tensor) -> Tensor:
        return x.new_ones(()).expand(broadcast_shapes((*self.batch_shape, 1), x.shape[:-1]))


class RBF(Stationary):
    """Squared exponential: k = exp(−s/2), s = Σ_d (x_d − x'_d)²/ℓ_d². Its functions are infinitely smooth."""

    @staticmethod
    def value_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
        # dg/ds = −g/2
        value = s.mul_(-0.5).exp_()
        return value, -0.5 * value

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Any:
        return self.scale(torch.randn(*shape, x.shape[-1], dtype=x.dtype, device=x.device))


class _Matern(Stationary):
    """Matérn kernels share their spectral measure: Student's t with 2ν degrees of freedom."""

    twice_nu: int

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Tensor:
        # ω = n/√(χ²/2ν) with n ~ N(0, I) and χ² of 2ν degrees of freedom
        normal = torch.randn(*shape, x.shape[-1], dtype=x.dtype, device=x.device)
        chi2 = torch.randn(*shape, self.twice_nu, dtype=x.dtype, device=x.device).square().sum(-1, keepdim=True)
        return self.scale(normal * (self.twice_nu / chi2).sqrt())


class Matern12(_Matern):
    """Exponential (Ornstein-Uhlenbeck): k = exp(−√s), s = Σ_d (x_d − x'_d)²/ℓ_d². Its functions are continuous."""

    twice_nu = 1

    @staticmethod
    def value_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
        # dg/ds = −e^(−√s)/(2√s), which is not finite at 0: there the gradient is taken as 0
        apart = s > 0
        r = root(s)
        value = (-r).exp_()
        return value, torch.where(apart, -0.5 * value / r, 0.0)


class Matern32(_Matern):
    """Matérn 3/2: k = (1 + a)e^(−a), a = √(3s), s = Σ_d (x_d − x'_d)²/ℓ_d². Functions are once differentiable."""

    twice_nu = 3

    @staticmethod
    def value_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
        # dg/da da/ds = −ae^(−a) · 3/(2a)
        a = root(s.mul_(3))
        e = (-a).exp_()
        return torch.addcmul(e, a, e), -1.5 * e


class Matern52(_Matern):
    """Matérn 5/2: k = (1 + a + a²/3)e^(−a), a = √(5s), s = Σ_d (x_d − x'_d)²/ℓ_d². Functions have two derivatives."""

    twice_nu = 5

    @staticmethod
    def value_and_slope(s: Tensor) -> tuple[Tensor, Tensor]:
        # dg/da da/ds = −(a/3)(1 + a)e^(−a) · 5/(2a)
        a = root(s.mul_(5))
        e = (-a).exp_()
        slope = torch.addcmul(e, a, e)  # (1 + a)e^(−a)
        return torch.addcmul(slope, a.square(), e, value=1 / 3), (-5 / 6) * slope


def root(s: Tensor) -> Tensor:
    """√s, with a derivative of 0 at 0."""
    return s.clamp(min=torch.finfo(s.dtype).tiny).sqrt_()


class RationalQuadratic(RBF):
    """Rational quadratic: k = (1 + s/(2α))^(−α), s = Σ_d (x_d − x'_d)²/ℓ_d²: RBFs of many length scales, mixed.

    :param alpha: α > 0, ``(...,)``.
    """

    event_dims = (("lengthscale", 1), ("alpha", 0))

    def __init__(self, lengthscale: Scalar = 1.0, alpha: Scalar = 1.0) -> None:
        super().__init__(lengthscale)
        self.alpha = positive(alpha, "RationalQuadratic's alpha")

    # The profile is smooth at s = 0 and has a parameter: plain autograd serves.

    def covariance(self, x: Tensor, z: Optional[Tensor]) -> Tensor:
        s = _clean(x, z)
        # (1 + s/2α)^−α = exp(−α log1p(s/2α))
        alpha = as_tensor(self.alpha, s)[..., None, None]
        return (-alpha * (s / (2 * alpha)).log1p()).exp()

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        alpha = as_tensor(self.alpha, x)[..., None].expand(*shape)
        # exp(−τs/2) with τ ~ Gamma(α, rate α) averages to (1 + s/(2α))^(−α).
        tau = torch.distributions.Gamma(alpha, alpha).sample()
        return tau.sqrt()[..., None] * super().frequencies(shape, x)


class Periodic(Stationary):
    """Periodic functions: k = exp(−2 Σ_d sin²(π(x_d − x'_d)/p_d)/ℓ_d²), an RBF on a circle (MacKay, 1998).

    :param lengthscale: ℓ > 0, without unit: relative to a circle of radius 1.
    :param period: p > 0 in the units of the inputs, shaped like ``lengthscale``.
    """

    event_dims = (("lengthscale", 1), ("period", 1))
    value_and_slope = staticmethod(RBF.value_and_slope)  # of distances on the circle

    def __init__(self, lengthscale: Scalar = 1.0, period: Scalar = 1.0) -> None:
        super().__init__(lengthscale)
        self.period = positive(period, "Periodic's period")

    def scale(self, x: Tensor) -> Tensor:
        angle = x * (2 * math.pi / per_column(self.period, x, "Periodic's period"))
        # ‖(cos a, sin a) − (cos a', sin a')‖² = 4 sin²((a − a')/2)
        return torch.cat([super().scale(angle.cos()), super().scale(angle.sin())], -1)
