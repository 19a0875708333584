"""Distributions that know E[log p(y | θ)] over a normal parameter θ: some of Pyro's, and those that bring it.

A closed form is used where θ is an affine function of function values and nothing else of the density depends on them:
:mod:`.facts` finds that out.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol, runtime_checkable

import pyro.distributions as dist
import torch
from torch import Tensor

from ..numerics.linalg import solve_lower
from .links import parameters, rewrapped
from .traces import bare

__all__ = [
    "ExpectedLogProb",
    "expectation",
    "is_declared",
    "is_normal",
    "others_of",
    "over_scale",
    "parameter_of",
]

_MULTIVARIATE = (dist.MultivariateNormal, dist.LowRankMultivariateNormal)
_WITH_LOC = (dist.Normal, *_MULTIVARIATE, dist.Laplace, dist.AsymmetricLaplace)


@runtime_checkable
class ExpectedLogProb(Protocol):
    """A distribution that knows E[log p(y | θ)] for θ ~ N(its own θ, variance), entry by entry independent.

    :cvar normal_parameter: the name of θ among its parameters, an attribute of shape ``batch_shape + (...)``.
    """

    normal_parameter: ClassVar[str]

    def expected_log_prob(self, value: Tensor, variance: Tensor) -> Tensor:
        """E[log p(value | θ)], of the shape of ``log_prob(value)``.

        :param variance: of θ's shape; 0 for entries that are constant.
        """


def is_declared(fn: Any) -> bool:
    """Whether a distribution knows its expectation over a normal parameter; a subclass may have another density."""
    return type(bare(fn)) in _WITH_LOC or isinstance(bare(fn), ExpectedLogProb)


def is_normal(fn: Any) -> bool:
    """Whether a distribution is normal around the parameter: its log density is quadratic in it."""
    return type(bare(fn)) in (dist.Normal, *_MULTIVARIATE)


def parameter_of(fn: Any) -> Tensor:
    """θ, the parameter over which a declared distribution knows its expectation."""
    fn = bare(fn)
    return getattr(fn, _name_of(fn))


def _name_of(fn: Any) -> str:
    return "loc" if type(fn) in _WITH_LOC else fn.normal_parameter


def others_of(fn: Any) -> list[Tensor]:
    """The other tensors that a declared distribution is made of."""
    fn = bare(fn)
    # A covariance matrix is looked at as it was given: its inverse is not asked for.
    made_of = vars(fn) if type(fn) in _MULTIVARIATE else parameters(fn)
    return [part for name, part in made_of.items() if name != _name_of(fn) and isinstance(part, Tensor)]


def over_scale(fn: Any, rows: Tensor) -> Tensor:
    """L⁻¹A of a multivariate normal, in whose log density L⁻¹θ has variances of its own; A of another distribution."""
    fn = bare(fn)
    if type(fn) not in _MULTIVARIATE:
        return rows
    return solve_lower(fn.scale_tril, rows.reshape(*fn.loc.shape, -1)).reshape(rows.shape)


def expectation(fn: Any, value: Tensor, variance: Tensor) -> Tensor:
    """E[log p(value | θ)] for θ ~ N(its own, variance), of the shape of ``fn.log_prob(value)``.

    :param variance: of θ; of a multivariate normal, of L⁻¹θ.
    """
    return rewrapped(fn, _expectation(bare(fn), value, variance))


def _expectation(fn: Any, value: Tensor, variance: Tensor) -> Tensor:
    if type(fn) is dist.Normal:
        return fn.log_prob(value) - variance / (2 * fn.scale.square())
    if type(fn) in _MULTIVARIATE:
        return fn.log_prob(value) - 0.5 * variance.sum(-1)
    if type(fn) is dist.Laplace:
        above, below = _one_sided(value - fn.loc, variance)
        return -(above + below) / fn.scale - (2 * fn.scale).log()
    if type(fn) is dist.AsymmetricLaplace:
        above, below = _one_sided(value - fn.loc, variance)
        left, right = fn.left_scale, fn.right_scale
        return -above / right - below / left - (left + right).log()
    return fn.expected_log_prob(value, variance)


def _one_sided(distance: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E[max(z, 0)] and E[max(−z, 0)] for z ~ N(d, v): dΦ(d/√v) + √v φ(d/√v), and that minus d."""
    spread = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
    t = distance / spread
    above = distance * torch.special.ndtr(t) + spread * (-0.5 * t.square()).exp() / math.sqrt(2 * math.pi)
    return above, above - distance
