"""Linear predictors: links under which a likelihood's parameters are affine functions of a program's normal values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor
from torch.distributions import constraints

from .traces import WRAPPERS, bare

__all__ = ["LINKS", "candidates", "parameters", "rebuilt", "rewrapped"]

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
    support = bare(fn).arg_constraints[parameter]
    if support is constraints.real or parameter == "logits":
        return ["identity"]
    if support is constraints.unit_interval:
        return ["logit", "probit"]
    return ["log", "softplus"]


def parameters(fn: Any) -> dict[str, Tensor]:
    """The tensors that a distribution of single numbers is made of, by the names that its constructor has for them."""
    fn = bare(fn)
    names = list(getattr(fn, "arg_constraints", ()))
    if "probs" in names and "logits" in names:  # one is made of the other
        names.remove("logits" if "probs" in vars(fn) else "probs")
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
    if isinstance(fn, MaskedDistribution):
        return scale_and_mask(inner, mask=fn._mask if masked else None)
    return inner.expand(fn.batch_shape)
