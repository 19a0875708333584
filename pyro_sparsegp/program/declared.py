"""Distributions: what they are made of, links of their parameters, and which know E[log p(y | θ)] over a normal θ.

A closed form is used where θ is an affine function of function values and nothing else of the density depends on them:
:mod:`.explore` finds that out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor
from torch.distributions import constraints

from ..distributions import ExpectedLogProb
from ..numerics.linalg import solve_lower
from .traces import WRAPPERS, bare

_MULTIVARIATE = (dist.MultivariateNormal, dist.LowRankMultivariateNormal)
_WITH_LOC = (dist.Normal, *_MULTIVARIATE, dist.Laplace, dist.AsymmetricLaplace)


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
    inner = bare(fn)
    if type(inner) is dist.Normal:
        found = inner.log_prob(value) - variance / (2 * inner.scale.square())
    elif type(inner) in _MULTIVARIATE:
        found = inner.log_prob(value) - 0.5 * variance.sum(-1)
    elif type(inner) in (dist.Laplace, dist.AsymmetricLaplace):
        # E[max(z, 0)] and E[max(−z, 0)] for z ~ N(d, v): dΦ(d/√v) + √v φ(d/√v), and that minus d.
        distance, spread = value - inner.loc, variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
        t = distance / spread
        above = distance * torch.special.ndtr(t) + spread * (-0.5 * t.square()).exp() / math.sqrt(2 * math.pi)
        left, right = getattr(inner, "left_scale", inner.scale), getattr(inner, "right_scale", inner.scale)
        found = -above / right - (above - distance) / left - (left + right).log()
    else:
        found = inner.expected_log_prob(value, variance)
    return rewrapped(fn, found)


# Linear predictors: links under which parameters are affine functions of a program's normal values.

# By name the link η(θ) and its inverse θ(η).
LINKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "identity": (lambda t: t, lambda t: t),
    "log": (torch.log, torch.exp),
    "softplus": (lambda t: t + (-torch.expm1(-t)).log(), torch.nn.functional.softplus),
    "logit": (torch.logit, torch.sigmoid),
    "probit": (torch.special.ndtri, torch.special.ndtr),
}


def candidates(fn: Any, parameter: str) -> list[str]:
    """The links of a parameter's range, the most common first."""
    support = constraints.real if parameter == "logits" else bare(fn).arg_constraints[parameter]
    return {constraints.real: ["identity"], constraints.unit_interval: ["logit", "probit"]}.get(
        support, ["log", "softplus"]
    )


def parameters(fn: Any) -> dict[str, Tensor]:
    """The tensors that a distribution of single numbers is made of, by the names that its constructor has for them."""
    fn = bare(fn)
    names = list(getattr(fn, "arg_constraints", ()))
    for one, other in (("probs", "logits"), ("gate", "gate_logits")):  # one is made of the other
        if one in names and other in names:
            names.remove(other if one in vars(fn) else one)
    found = {name: getattr(fn, name, None) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def rebuilt(fn: Any, changed: Mapping[str, Tensor]) -> Any:
    """The distribution under its wrappers, with other values of some parameters."""
    return type(bare(fn))(**{**parameters(fn), **changed}, validate_args=False)


def rewrapped(fn: Any, value: Tensor, masked: bool = True) -> Tensor:
    """A term for each single number of the distribution under ``fn``'s wrappers, as ``fn.log_prob`` has them.

    :param masked: whether ``.mask`` leaves terms out.
    """
    if not isinstance(fn, WRAPPERS):
        return value
    inner = rewrapped(fn.base_dist, value, masked)
    if isinstance(fn, torch.distributions.Independent):
        return sum_rightmost(inner, fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.MaskedDistribution):
        return scale_and_mask(inner, mask=fn._mask if masked else None)
    return inner.expand(fn.batch_shape)
