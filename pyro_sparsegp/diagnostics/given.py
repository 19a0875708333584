"""What was given in the place of a model, a result or a tree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from pyro.infer import MCMC

from ..guide import AutoSparseGP


def guide_of(given: Any) -> Optional[AutoSparseGP]:
    """A guide, or that of an object which has one, SVI or expectation propagation."""
    guide = given if isinstance(given, AutoSparseGP) else getattr(given, "guide", None)
    return guide if isinstance(guide, AutoSparseGP) else None


def is_tree(given: Any) -> bool:
    """Whether this is a tree of groups; modules have a method of the name."""
    return isinstance(getattr(given, "children", None), Mapping)


def signature_of(model: Callable) -> Optional[inspect.Signature]:
    """A model's signature, if it has one."""
    try:
        return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return None


def require_call(function: str, order: str, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise where something else stands in the model's place, or it cannot be called with these arguments."""
    if not callable(model) or guide_of(model) is not None or isinstance(model, MCMC) or is_tree(model):
        raise ValueError(f"{function} takes the model first, {order}; got {type(model).__name__} in its place")
    signature = signature_of(model)
    try:
        _ = signature and signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{function} cannot call the model: {error}. It takes {order}") from error
