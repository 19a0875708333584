"""Kernels of functions whose mean over an interval is zero: f₀ = f − E[f | f̄] for f ~ GP(0, k) and f̄ its mean."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from .algebra import Kernel, Scaled, kernel_by_row
from .base import Scalar, as_tensor, describe, per_column, require_one, second
from .stationary import RBF, Matern32, Matern52, ProfileOfDistance, root

_ROOT = math.sqrt(math.pi / 2)


class _Profile(NamedTuple):
    """A stationary kernel g of the scaled distance a ≥ 0, and g integrated once and twice from 0."""

    root: float  # a is this many times the distance in length scales
    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]]  # g − 1, near 0 without loss of digits, and dg/ds
    once: Callable[[Tensor], Tensor]
    twice: Callable[[Tensor], Tensor]

    def lost(self, a: Tensor) -> Tensor:
        """∫₀ᵃ 1 − g, an odd function of a."""
        size = a.abs()
        near, far = size.clamp(max=_NEAR), size.clamp(min=_NEAR)
        return a.sign() * torch.where(size < _NEAR, near * self._mean(near, 0), far - self.once(far))

    def spread(self, a: Tensor) -> Tensor:
        """1 − v: the mean of 1 − g over pairs of points of an interval of length a, (2/a²)∫₀ᵃ (a − s)(1 − g(s)) ds."""
        near, far = a.clamp(max=_NEAR), a.clamp(min=_NEAR)
        return torch.where(a < _NEAR, 2 * self._mean(near, 1), 1 - 2 * self.twice(far) / far.square())

    def _mean(self, a: Tensor, power: int) -> Tensor:
        # The mean of (1 − t)ᵖ(1 − g(at)) over t in [0, 1], for a up to _NEAR, where closed forms cancel.
        nodes, weights = legendre(_NUM_NEAR, a.dtype, a.device)
        t = 0.5 + 0.5 * nodes
        return -self.value_and_slope((a[..., None] * t).square())[0] @ (weights * (1 - t) ** power)


def _rbf(s: Tensor) -> tuple[Tensor, Tensor]:
    less = torch.expm1(-0.5 * s)
    return less, -0.5 * (1 + less)


def _matern32(s: Tensor) -> tuple[Tensor, Tensor]:
    a = root(s)
    power = (-a).exp()
    return torch.addcmul(torch.expm1(-a), a, power), -0.5 * power


def _matern52(s: Tensor) -> tuple[Tensor, Tensor]:
    a = root(s)
    power = (-a).exp()
    less = torch.addcmul(torch.expm1(-a), a, power)  # which cancels before the rest is added
    return torch.addcmul(less, s, power, value=1 / 3), torch.addcmul(power, a, power) / -6


_ONE = "Anova acts on one column", "Anova(RBF(l), low, high)[2]"
_NUM_NODES = 64  # of the quadrature, for a base without a closed form
_NEAR, _NUM_NEAR = 0.5, 6  # up to this distance a rule of six nodes leaves 1e-13 of the integrals
_PROFILES: dict[type, _Profile] = {
    RBF: _Profile(
        1.0,
        _rbf,
        lambda a: _ROOT * torch.erf(a / math.sqrt(2)),
        lambda a: _ROOT * a * torch.erf(a / math.sqrt(2)) + torch.expm1(-0.5 * a.square()),
    ),
    Matern32: _Profile(
        math.sqrt(3),
        _matern32,
        lambda a: -2 * torch.expm1(-a) - a * (-a).exp(),
        lambda a: 2 * a + 3 * torch.expm1(-a) + a * (-a).exp(),
    ),
    Matern52: _Profile(
        math.sqrt(5),
        _matern52,
        lambda a: (-8 * torch.expm1(-a) - (5 * a + a.square()) * (-a).exp()) / 3,
        lambda a: (8 * a + 15 * torch.expm1(-a) + (7 * a + a.square()) * (-a).exp()) / 3,
    ),
}


@functools.lru_cache(maxsize=32)
def legendre(num: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes on [−1, 1] and weights that add up to 1; kept, so that a step copies nothing."""
    nodes, weights = np.polynomial.legendre.leggauss(num)
    with torch.inference_mode(False):  # they must serve training, too
        return torch.as_tensor(nodes).to(device, dtype), torch.as_tensor(weights / 2).to(device, dtype)


class Anova(Kernel):
    """k₀(x, x') = k(x, x') − m(x)m(x')/v: functions with mean zero over [a, b] (Adam et al., 2018, eq. 8).

    m(x) = ∫k(x, s)ds/(b − a) and v = ∬k(s, t)ds dt/(b − a)² are in closed form for :class:`RBF`, :class:`Matern32` and
    :class:`Matern52`, by Gauss-Legendre quadrature of 64 nodes for other kernels of one column, which is a kernel
    still, of functions whose quadrature is zero. It acts on one column; select it, and multiply for an interaction:

    >>> first, second = Anova(RBF(0.3), 0, 1)[0], Anova(RBF(0.3), 0, 1)[1]
    >>> kernel = first + second + first * second

    Durrande, Ginsbourger, Roustant and Carraro, 2013, "ANOVA kernels and RKHS of zero mean functions for model-based
    sensitivity analysis", eq. 12.

    :param base: k, of one column; ``Anova(v * RBF(l))`` is ``v * Anova(RBF(l))``. The prior variance of f₀ is smaller
        than that of f, by far where the length scale is long.
    :param low: a, in the units of the column: a number or ``(...,)``.
    :param high: b > a.
    :raises ValueError: for an empty interval, or a base that reads other columns than its first.
    """

    event_dims = (("low", 0), ("high", 0))

    def __new__(cls, base: object = None, low: Scalar = 0.0, high: Scalar = 1.0) -> Any:
        if isinstance(base, Scaled):  # of √v f the part with mean zero is √v f₀
            return Scaled(cls(base.kernel, low, high), base.variance)
        return super().__new__(cls)

    def __init__(self, base: Kernel, low: Scalar = 0.0, high: Scalar = 1.0) -> None:
        base = kernel_by_row(base, "Anova's base")
        if base.columns not in (None, (), (0,)):
            raise ValueError(f"Anova's base must be a kernel of one column, got {base!r}: select outside, {_ONE[1]}")
        bounds = [bound for bound in (low, high) if not isinstance(bound, Tensor)]
        if sorted(set(bounds)) != bounds or not all(map(math.isfinite, bounds)):
            raise ValueError(f"Anova needs finite bounds, low < high, got {low} and {high}")
        self.parts, self.low, self.high = (base.on_columns(1),), low, high

    @property
    def base(self) -> Kernel:
        return self.parts[0]

    @property
    def centred(self) -> Any:
        return {0: (self.low, self.high)}

    @property
    def profile(self) -> Any:
        """That of k, whose integrals are in closed form; ``None`` where they are by quadrature."""
        return _PROFILES.get(type(self.base))

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        require_one(x, *_ONE)
        other = second(x, z)
        if self.profile is None:
            # k(x, x') − m(x)m(x')/v (eq. 8)
            left, inverse = self._means(x)
            right = left if z is None else self._means(z)[0]
            return self.base(x, z) - left[..., :, None] * (right * inverse[..., None])[..., None, :]
        (inverse, *_, spread), left = self._ends(x), self._deficits(x)
        right = left if z is None else self._deficits(other)
        # Distances are differences from a point near all: those of sums far from the origin would lose digits.
        centre = other.detach().mean(-2)
        rest, v = spread.to(x), (1 - spread).to(x)
        at, others = ((part[..., 0] - centre) * inverse.to(x) for part in (x, other))
        less = ProfileOfDistance.apply(at[..., None], None if z is None else others[..., None], self.profile)[0]
        # (rest − c(xᵢ)) − (1 + c(xᵢ)/v)c(zⱼ): of rank 2
        ends_share = torch.stack([rest - left, -1 - left / v], -1) @ torch.stack([torch.ones_like(right), right], -2)
        return less + ends_share

    def diag(self, x: Tensor) -> Tensor:
        require_one(x, *_ONE)
        if self.profile is not None:
            (*_, spread), left = self._ends(x), self._deficits(x)
            # 1 − v − 2c(x) − c(x)²/v
            value = spread.to(x) - left * (2 + left / (1 - spread).to(x))
        else:
            mean, inverse = self._means(x)
            value = self.base.diag(x) - mean.square() * inverse[..., None]
        return value.clamp(min=0)  # near 0 where x says most about the mean

    def _ends(self, x: Tensor) -> tuple[Tensor, ...]:
        # In double precision, (..., 1): a of a distance of 1, of the interval's start and of its width, and 1 − v.
        length = per_column(self.base.lengthscale, x, "the lengthscale of Anova's base")  # type: ignore[attr-defined]
        inverse = self.profile.root / length.double()
        inverse = inverse[..., 0] if inverse.dim() else inverse[None]
        low, high = (as_tensor(bound, inverse)[..., None] * inverse for bound in (self.low, self.high))
        return inverse, low, high - low, self.profile.spread(high - low)

    def _deficits(self, x: Tensor) -> Tensor:
        # c(x) = m(x) − v, (..., N).
        # k₀ = (1 − v) − (1 − k(x, x')) − c(x) − c(x') − c(x)c(x')/v: for a long length scale all of k, m and v are
        # nearly 1; k₀ is made of their differences from 1, found in double precision, of N numbers only.
        inverse, low, width, spread = self._ends(x)
        since = x.double()[..., 0] * inverse - low
        return (spread - self.profile.lost(torch.stack([since, width - since])).sum(0) / width).to(x)

    def _nodes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nodes, weights = legendre(_NUM_NODES, x.dtype, x.device)
        low, high = (as_tensor(bound, x)[..., None] for bound in (self.low, self.high))
        return ((low + high) / 2 + (high - low) / 2 * nodes)[..., None], weights

    def _means(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # m(x), (..., N), and 1/v, (...,), or 0 where all functions have mean zero already.
        nodes, weights = self._nodes(x)
        v = (self.base(nodes, nodes) @ weights) @ weights
        known = v > 100 * torch.finfo(x.dtype).eps * (self.base.diag(nodes) @ weights)
        return self.base(x, nodes) @ weights, known / torch.where(known, v, 1.0)

    def check_inputs(self, x: Tensor) -> None:
        """Refuse a base without functions of mean zero but 0, such as ``Linear`` on [0, 1]."""
        super().check_inputs(x)
        nodes, least = self._nodes(x.detach())[0], 100 * torch.finfo(x.dtype).eps
        if self.profile is None and (self.diag(nodes) <= least * self.base.diag(nodes)).all():
            raise ValueError(
                f"{self!r} is identically 0: of the functions of {self.base!r}, none but 0 has mean zero over "
                f"[{describe(self.low)}, {describe(self.high)}]. For a linear effect write Anova(Polynomial(1), low, "
                "high), whose functions have an intercept, too; leave a constant outside of Anova."
            )
