"""Kernels of functions whose mean over an interval is zero: the terms of an analysis of variance (Durrande et
al., 2013; Adam et al., 2018, eq. 8).

f₀ = f − E[f | f̄] for f ~ GP(0, k) and f̄ its mean over [a, b], so f₀ is f given f̄ = 0. Products of such kernels on
different columns are interactions that have zero mean along each column (Durrande et al., 2013).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from ..numerics.functions import Function
from ..numerics.shapes import broadcast_shapes
from .algebra import Constant, Kernel, Product, Scaled, Select, as_kernel
from .base import Explicit, Scalar, as_tensor, batch_of, describe, per_column
from .draws import PriorFunctions
from .stationary import RBF, Matern12, Matern32, Matern52

__all__ = ["Anova", "centred_on"]

_ROOT = math.sqrt(math.pi / 2)


class _Profile(NamedTuple):
    """A stationary kernel g of the scaled distance a ≥ 0: g − 1 and −dg/da, and g integrated once and twice from 0.

    :param root: a is this many times the distance in length scales.
    :param parts: takes a of either sign, of which −dg/da is odd.
    :param taylor: coefficients of a, a², … in g, for a < ``_SMALL``.
    """

    root: float
    parts: Callable[[Tensor], tuple[Tensor, Tensor]]
    once: Callable[[Tensor], Tensor]
    twice: Callable[[Tensor], Tensor]
    taylor: tuple[float, ...]

    def lost(self, a: Tensor) -> Tensor:
        """∫₀ᵃ 1 − g, an odd function of a."""
        return _Sloped.apply(a, self.lost_value, self.lost_slope)

    def spread(self, a: Tensor) -> Tensor:
        """1 − v: the mean of 1 − g over pairs of points of an interval of length a."""
        return _Sloped.apply(a, self.spread_value, self.spread_slope)

    def lost_value(self, a: Tensor) -> Tensor:
        """As :meth:`lost`, by plain operations."""
        size = a.abs()
        series = size * _series(tuple(-c / (k + 1) for k, c in enumerate(self.taylor, 1)), size)
        return a.sign() * torch.where(size < _SMALL, series, size - self.once(size))

    def lost_slope(self, a: Tensor) -> Tensor:
        """1 − g(|a|)."""
        return -self.parts(a)[0]

    def spread_value(self, a: Tensor) -> Tensor:
        """As :meth:`spread`, by plain operations."""
        series = _series(tuple(-2 * c / ((k + 1) * (k + 2)) for k, c in enumerate(self.taylor, 1)), a)
        return torch.where(a < _SMALL, series, 1 - 2 * self.twice(a) / a.square())

    def spread_slope(self, a: Tensor) -> Tensor:
        """Of 1 − v = (2/a²)∫₀ᵃ (a − s)(1 − g(s)) ds, (2/a)(∫₀ᵃ (1 − g)/a − (1 − v))."""
        return 2 / a * (self.lost(a) / a - self.spread(a))


class _Sloped(Function):
    """A function whose slope is known, in the place of that of a series and of a cancellation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
        return value(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, _, ctx.slope = inputs
        ctx.save_for_backward(a)
        ctx.save_for_forward(a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (a,) = ctx.saved_tensors
        return grad * ctx.slope(a), None, None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *_: Any) -> Tensor:
        (a,) = ctx.saved_tensors
        return change * ctx.slope(a)


def _series(coefficients: tuple[float, ...], a: Tensor) -> Tensor:
    """Σ_k c_k aᵏ from k = 1, where a is small; elsewhere some number."""
    small = a.clamp(max=_SMALL)[..., None].expand(*a.shape, len(coefficients))
    return small.cumprod(-1) @ _table(coefficients, a.dtype, a.device)  # ten times as quick as powers


@functools.lru_cache(maxsize=32)
def _table(coefficients: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept, so that a step copies nothing; made outside of inference mode, as it must serve training, too."""
    with torch.inference_mode(False):
        return torch.tensor(coefficients, dtype=dtype, device=device)


def _exponential(polynomial: Callable[[int], float]) -> tuple[float, ...]:
    return tuple((-1) ** k * polynomial(k) / math.factorial(k) for k in range(1, _ORDER + 1))


def _rbf(a: Tensor) -> tuple[Tensor, Tensor]:
    less = torch.expm1(-0.5 * a.square())
    return less, torch.addcmul(a, a, less)


def _matern12(a: Tensor) -> tuple[Tensor, Tensor]:
    less = torch.expm1(-a.abs())
    return less, a.sign() * (1 + less)


def _matern32(a: Tensor) -> tuple[Tensor, Tensor]:
    size = a.abs()
    power = (-size).exp()
    return torch.addcmul(torch.expm1(-size), size, power), a * power


def _matern52(a: Tensor) -> tuple[Tensor, Tensor]:
    size = a.abs()
    power = (-size).exp()
    less = torch.addcmul(torch.expm1(-size), size, power)  # which cancels before the rest is added
    third = a * power / 3
    return torch.addcmul(less, a, third), torch.addcmul(third, size, third)


_SMALL, _ORDER = 0.2, 11
_PROFILES: dict[type, _Profile] = {
    RBF: _Profile(
        1.0,
        _rbf,
        lambda a: _ROOT * torch.erf(a / math.sqrt(2)),
        lambda a: _ROOT * a * torch.erf(a / math.sqrt(2)) + torch.expm1(-0.5 * a.square()),
        tuple(0.0 if k % 2 else (-0.5) ** (k // 2) / math.factorial(k // 2) for k in range(1, _ORDER + 1)),
    ),
    Matern12: _Profile(
        1.0,
        _matern12,
        lambda a: -torch.expm1(-a),
        lambda a: a + torch.expm1(-a),
        _exponential(lambda k: 1.0),
    ),
    Matern32: _Profile(
        math.sqrt(3),
        _matern32,
        lambda a: -2 * torch.expm1(-a) - a * (-a).exp(),
        lambda a: 2 * a + 3 * torch.expm1(-a) + a * (-a).exp(),
        _exponential(lambda k: 1.0 - k),
    ),
    Matern52: _Profile(
        math.sqrt(5),
        _matern52,
        lambda a: (-8 * torch.expm1(-a) - (5 * a + a.square()) * (-a).exp()) / 3,
        lambda a: (8 * a + 15 * torch.expm1(-a) + (7 * a + a.square()) * (-a).exp()) / 3,
        _exponential(lambda k: 1.0 - k + k * (k - 1) / 3),
    ),
}


class _Matrix(Function):
    """p_i + q_i r_j − (1 − g(|a_ij|)) with a_ij = (x_i − z_j)/unit, and −dg/da: one node of the graph, and few passes
    over matrices either way.

    :param inverse: 1/unit, ``(..., 1)``; x, p and q are ``(..., N)``, z and r ``(..., M)``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, z: Tensor, inverse: Tensor, p: Tensor, q: Tensor, r: Tensor, profile: _Profile
    ) -> tuple[Tensor, Tensor]:
        less, slope = profile.parts((x[..., :, None] - z[..., None, :]) * inverse[..., None])
        return torch.addcmul(less + p[..., None], q[..., None], r[..., None, :]), slope

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.profile = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.save_for_forward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor], _: Any) -> Any:
        if grad is None:
            return (None,) * 7
        x, z, inverse, p, q, r, slope = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward wants the slope as a function of x, z and the unit
            slope = ctx.profile.parts((x[..., :, None] - z[..., None, :]) * inverse[..., None])[1]
        turned = grad * slope
        rows, columns = turned.sum(-1), turned.sum(-2)
        by_inverse = (columns * z).sum(-1, keepdim=True) - (rows * x).sum(-1, keepdim=True)
        found = (
            -inverse * rows,
            inverse * columns,
            by_inverse,
            grad.sum(-1),
            (grad @ r[..., None])[..., 0],
            (grad.mT @ q[..., None])[..., 0],
        )
        return *(by.sum_to_size(one.shape) for by, one in zip(found, (x, z, inverse, p, q, r))), None

    @staticmethod
    def jvp(ctx: Any, *changes: Optional[Tensor]) -> tuple[Tensor, None]:
        *tensors, slope = ctx.saved_tensors
        dx, dz, dinverse, dp, dq, dr = (torch.zeros_like(t) if d is None else d for t, d in zip(tensors, changes))
        x, z, inverse, _, q, r = tensors
        slope = ctx.profile.parts((x[..., :, None] - z[..., None, :]) * inverse[..., None])[1]
        change = (dx[..., :, None] - dz[..., None, :]) * inverse[..., None]
        change = change + (x[..., :, None] - z[..., None, :]) * dinverse[..., None]
        by_ends = dp[..., None] + dq[..., None] * r[..., None, :] + q[..., None] * dr[..., None, :]
        return by_ends - slope * change, None


@functools.lru_cache(maxsize=32)
def _legendre(num: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes on [−1, 1] and weights that add up to 1; kept, so that a step copies nothing."""
    nodes, weights = np.polynomial.legendre.leggauss(num)
    with torch.inference_mode(False):  # they must serve training, too
        return torch.as_tensor(nodes).to(device, dtype), torch.as_tensor(weights / 2).to(device, dtype)


class _Ends(NamedTuple):
    """In double precision, ``(..., 1)``: a of a distance of 1, of the interval's start and of its width, and 1 − v."""

    inverse: Tensor
    low: Tensor
    width: Tensor
    spread: Tensor


class Anova(Kernel):
    """k₀(x, x') = k(x, x') − m(x)m(x')/v: functions with mean zero over [a, b] (Adam et al., 2018, eq. 8).

    m(x) = ∫k(x, s)ds/(b − a) and v = ∬k(s, t)ds dt/(b − a)² are in closed form for :class:`RBF`, :class:`Matern12`,
    :class:`Matern32` and :class:`Matern52`, by Gauss-Legendre quadrature for other kernels of one column. A quadrature
    of few nodes is still a kernel, of functions whose quadrature is zero. A base with finite features keeps them,
    projected. It acts on one column; select it, and multiply for an interaction:

    >>> main = Anova(RBF(0.3), 0, 1)[0] + Anova(RBF(0.3), 0, 1)[1]
    >>> both = Anova(RBF(0.3), 0, 1)[0] * Anova(RBF(0.3), 0, 1)[1]

    Durrande, Ginsbourger, Roustant and Carraro, 2013, "ANOVA kernels and RKHS of zero mean functions for model-based
    sensitivity analysis", eq. 12.

    :param base: k, a kernel of one column; a variance factor stays one, ``Anova(v * RBF(l))`` is ``v * Anova(RBF(l))``.
        The prior variance of f₀ is smaller than that of f, by far where the length scale is long.
    :param low: a, in the units of the column: a number or ``(...,)``.
    :param high: b > a.
    :param num_nodes: of the quadrature, for a base without a closed form.
    :raises ValueError: for an empty interval, or a base that reads other columns than its first.
    """

    any_dtype = True

    def __init__(self, base: Kernel, low: Scalar = 0.0, high: Scalar = 1.0, num_nodes: int = 64) -> None:
        base = as_kernel(base, "Anova's base")
        if base.columns not in (None, (0,)):
            raise ValueError(
                f"Anova's base must be a kernel of one column, got {base!r}: select the column outside, "
                "Anova(RBF(l), low, high)[2], and write interactions as products."
            )
        base = base.on_columns(1)
        if base.depends_on_rows:
            raise ValueError(f"Anova's base must not have a diagonal that depends on the rows given, as {base!r} has")
        for bound, value in (("low", low), ("high", high)):
            if not isinstance(value, Tensor) and not math.isfinite(value):
                raise ValueError(f"Anova's {bound} must be finite, got {value}")
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not low < high:
            raise ValueError(f"Anova needs low < high, got {low} and {high}")
        if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
            raise ValueError(f"Anova's num_nodes must be a whole number of at least 1, got {num_nodes!r}")
        self.variance: Optional[Scalar] = None
        while isinstance(base, Scaled):
            self.variance = base.variance if self.variance is None else self.variance * base.variance
            base = base.kernel
        self.base, self.low, self.high, self.num_nodes = base, low, high, num_nodes

    @property
    def in_closed_form(self) -> bool:
        """Whether its integrals are."""
        return type(self.base) in _PROFILES

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        _require_one(x)
        profile = _PROFILES.get(type(self.base))
        if profile is None:
            value = self._by_quadrature(x, z)
        else:
            other = x if z is None else z
            ends, left = self._ends(profile, x), self._deficits(profile, x)
            right = left if z is None else self._deficits(profile, other)
            centre = other.detach().mean(-2)  # whose distances are differences: sums of them keep their digits
            rest, v = ends.spread.to(x), (1 - ends.spread).to(x)
            at, others = x[..., 0] - centre, other[..., 0] - centre
            value = _Matrix.apply(at, others, ends.inverse.to(x), rest - left, -1 - left / v, right, profile)[0]
        return value if self.variance is None else as_tensor(self.variance, x)[..., None, None] * value

    def diag(self, x: Tensor) -> Tensor:
        _require_one(x)
        profile = _PROFILES.get(type(self.base))
        if profile is None:
            mean, inverse = self._means(x)
            value = self.base.diag(x) - mean.square() * inverse[..., None]
        else:
            ends, left = self._ends(profile, x), self._deficits(profile, x)
            value = ends.spread.to(x) - left * (2 + left / (1 - ends.spread).to(x))
        value = value.clamp(min=0)  # near 0 where x says most about the mean
        return value if self.variance is None else as_tensor(self.variance, x)[..., None] * value

    def _bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return as_tensor(self.low, x)[..., None], as_tensor(self.high, x)[..., None]

    def _ends(self, profile: _Profile, x: Tensor) -> _Ends:
        length = per_column(self.base.lengthscale, x, "the lengthscale of Anova's base")  # type: ignore[attr-defined]
        inverse = profile.root / length.double()
        inverse = inverse[..., 0] if inverse.dim() else inverse[None]
        low, high = (bound * inverse for bound in self._bounds(x.double()))
        return _Ends(inverse, low, high - low, profile.spread(high - low))

    def _deficits(self, profile: _Profile, x: Tensor) -> Tensor:
        """c(x) = m(x) − v, ``(..., N)``.

        k₀ = (1 − v) − (1 − k(x, x')) − c(x) − c(x') − c(x)c(x')/v: for a long length scale all of k, m and v are nearly
        1, and their differences from 1 are what k₀ is made of. They are found in double precision, of N numbers only.
        """
        inverse, low, width, spread = self._ends(profile, x)
        since = x.double()[..., 0] * inverse - low
        return (spread - profile.lost(torch.stack([since, width - since])).sum(0) / width).to(x)

    def _nodes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nodes, weights = _legendre(self.num_nodes, x.dtype, x.device)
        low, high = self._bounds(x)
        return ((low + high) / 2 + (high - low) / 2 * nodes)[..., None], weights

    def _means(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m(x), ``(..., N)``, and 1/v, ``(...,)``, or 0 where all functions have mean zero already."""
        phi = self.base.features(x)
        if phi is not None:
            towards, inverse = self._mean_feature(x)
            return (phi @ towards[..., None])[..., 0], inverse
        nodes, weights = self._nodes(x)
        v = (self.base(nodes, nodes) @ weights) @ weights
        known = v > 100 * torch.finfo(x.dtype).eps * (self.base.diag(nodes) @ weights)
        return self.base(x, nodes) @ weights, known / torch.where(known, v, 1.0)

    def _mean_feature(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """u, the mean of the base's features φ, ``(..., R)``, and 1/‖u‖² or 0: m(x) = uᵀφ(x), v = ‖u‖²."""
        nodes, weights = self._nodes(x)
        phi = self.base.features(nodes)
        assert phi is not None
        towards = weights @ phi
        v = towards.square().sum(-1)
        known = v > (100 * torch.finfo(x.dtype).eps) ** 2 * (phi.square().sum(-1) @ weights)
        return towards, known / torch.where(known, v, 1.0)

    def _by_quadrature(self, x: Tensor, z: Optional[Tensor]) -> Tensor:
        left, inverse = self._means(x)
        right = left if z is None else self._means(z)[0]
        return self.base(x, z) - left[..., :, None] * (right * inverse[..., None])[..., None, :]

    @property
    def batch_shape(self) -> torch.Size:
        own = (batch_of(value, 0) for value in (self.variance, self.low, self.high) if value is not None)
        return broadcast_shapes(self.base.batch_shape, *own)

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return (self.base,)

    def check_inputs(self, x: Tensor) -> None:
        """Refuse a base of which nothing is left.

        :raises ValueError: if no function of the base but 0 has mean zero, as of ``Linear`` on [0, 1].
        """
        self.base.check_inputs(x)
        nodes, _ = self._nodes(x.detach())
        phi, left = (
            self.base.features(nodes),
            Anova(self.base, self.low, self.high, self.num_nodes).features(nodes),
        )
        if phi is None or left is None:
            return
        if left.square().amax() <= (100 * torch.finfo(x.dtype).eps) ** 2 * phi.square().amax():
            raise ValueError(
                f"{self!r} is identically 0: of the functions of {self.base!r}, none but 0 has mean zero over "
                f"[{describe(self.low)}, {describe(self.high)}]. For a linear effect write Anova(Polynomial(1), low, "
                "high), whose functions have an intercept, too; leave a constant outside of Anova."
            )

    def features(self, x: Tensor) -> Optional[Tensor]:
        found = self._projected(x)
        return None if found is None else found[0]

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        found = self._projected(x)
        if found is None:
            return None
        phi, taken = found
        diagonal = (self.base.diag(x) - taken).clamp(min=0)
        return Explicit(phi, diagonal if self.variance is None else as_tensor(self.variance, x)[..., None] * diagonal)

    def _projected(self, x: Tensor) -> Optional[tuple[Tensor, Tensor]]:
        """Features φ − u(uᵀφ)/‖u‖², and m(x)²/v."""
        _require_one(x)
        phi = self.base.features(x)
        if phi is None:
            return None
        towards, inverse = self._mean_feature(x)
        mean = (phi @ towards[..., None])[..., 0]
        share = mean * inverse[..., None]
        phi = phi - share[..., None] * towards[..., None, :]
        if self.variance is not None:
            phi = as_tensor(self.variance, x).sqrt()[..., None, None] * phi
        return phi, mean * share

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        if self.base.prior_functions(1, 1, x) is None:
            return None  # features and frequencies leave out a diagonal term
        if self.base.features(x[..., :1, :]) is not None:
            return super().prior_functions(num, num_features, x)
        profile = _PROFILES.get(type(self.base))
        batch = broadcast_shapes(self.batch_shape, x.shape[:-2])
        omega = None if profile is None else self.base.frequencies((num, *batch, num_features), x)
        if profile is None or omega is None:
            return None
        phase = 2 * math.pi * torch.rand(num, *batch, num_features, 1, dtype=x.dtype, device=x.device)
        weights = torch.randn(num, *batch, num_features, 1, dtype=x.dtype, device=x.device)
        weights = weights * math.sqrt(2 / num_features)
        low, high = (bound[..., None] for bound in self._bounds(x))
        # The mean of cos(ωs + φ) over the interval, in closed form: cos at the centre times sin(h)/h, h = ω(b − a)/2.
        reach = torch.sinc(omega * (high - low) / (2 * math.pi))
        mean = (torch.cos(omega * (low + high) / 2 + phase) * reach * weights).sum((-2, -1))

        def functions(x: Tensor) -> Tensor:
            left, v = self._deficits(profile, x), (1 - self._ends(profile, x).spread).to(x)
            waves = (torch.cos(x @ omega.mT + phase.mT) @ weights)[..., 0]
            value = waves - (1 + left / v) * mean[..., None]
            return value if self.variance is None else as_tensor(self.variance, x).sqrt()[..., None] * value

        return functions

    def _repr_arguments(self) -> str:
        base = repr(self.base) if self.variance is None else f"{describe(self.variance)} * {self.base!r}"
        return f"{base}, {describe(self.low)}, {describe(self.high)}"


def _require_one(x: Tensor) -> None:
    if x.shape[-1] != 1:
        raise ValueError(
            f"Anova acts on one column, the inputs have {x.shape[-1]}: select one, Anova(RBF(l), low, high)[2]"
        )


def centred_on(kernel: Any) -> Optional[dict[int, tuple[Scalar, Scalar]]]:
    """The intervals, by column, over which all functions of a kernel have mean zero along each column.

    Empty for a constant; ``None`` where the kernel is no product of :class:`Anova` kernels on different columns.
    """
    if isinstance(kernel, Scaled):
        return centred_on(kernel.kernel)
    if isinstance(kernel, Anova):
        return {0: (kernel.low, kernel.high)}
    if isinstance(kernel, Select):
        inner = centred_on(kernel.kernel)
        return None if inner is None else {kernel.dims[column]: bounds for column, bounds in inner.items()}
    if isinstance(kernel, Product):
        found: dict[int, tuple[Scalar, Scalar]] = {}
        for factor in kernel.factors:
            inner = centred_on(factor)
            if inner is None or found.keys() & inner.keys():
                return None
            found |= inner
        return found
    return {} if isinstance(kernel, Constant) else None
