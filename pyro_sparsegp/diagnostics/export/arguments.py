"""What was given in the place of a model, a guide, a posterior or a tree, and what to give instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from pyro.infer import MCMC

from ...guide import AutoSparseGP
from ...posterior.sparse_posterior import SparsePosterior

__all__ = [
    "guide_of",
    "is_posterior",
    "is_tree",
    "kind_of",
    "require_arguments",
    "require_model",
    "require_posterior",
    "require_tree",
]


def guide_of(given: Any) -> Optional[AutoSparseGP]:
    """A guide, or that of an object which has one, SVI or expectation propagation."""
    guide = given if isinstance(given, AutoSparseGP) else getattr(given, "guide", None)
    return guide if isinstance(guide, AutoSparseGP) else None


def is_tree(given: Any) -> bool:
    """Whether this is a tree of groups; modules have a method of the name."""
    return isinstance(getattr(given, "children", None), Mapping)


def _is_posteriors(given: Any) -> bool:
    return isinstance(given, Mapping) and any(isinstance(value, SparsePosterior) for value in given.values())


def is_posterior(given: Any) -> bool:
    """Whether this is a GP site's posterior, or what ``guide.posterior`` returns."""
    return isinstance(given, SparsePosterior) or _is_posteriors(given)


def kind_of(given: Any) -> str:
    """In words, for an error."""
    if isinstance(given, AutoSparseGP):
        return "a guide"
    if guide_of(given) is not None:
        return f"a guide's {type(given).__name__} object"
    if isinstance(given, SparsePosterior):
        return f"the posterior of GP site {given.name!r}"
    if _is_posteriors(given):
        return f"a mapping of posteriors of the sites {sorted(given)}"
    return "a DataTree" if is_tree(given) else f"{type(given).__name__}"


def require_model(function: str, order: str, model: Any) -> None:
    """Raise where something else stands in the model's place; a guide can be called as a model can."""
    if callable(model) and guide_of(model) is None and not isinstance(model, MCMC) and not is_tree(model):
        return
    raise ValueError(f"{function} takes the model first, {order}; got {kind_of(model)} in its place")


def require_arguments(function: str, remedy: str, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise where the model cannot be called with these arguments."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):  # a callable without one
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{function} cannot call the model: {error}. {remedy}") from error


def require_tree(function: str, given: Any) -> None:
    """Raise where something else stands in a tree's place."""
    if not is_tree(given):
        raise ValueError(
            f"{function} needs a tree, such as diagnostics.to_datatree(model, guide, x, y), got {kind_of(given)}"
        )
    if "posterior" in given.children and "sample" in given["posterior"].sizes:
        raise ValueError(
            f'{function} needs a tree with chains and draws; this one has all draws along "sample". Make it by '
            "to_datatree without sample_dims=, and another with them for stock ArviZ."
        )


def require_posterior(function: str, given: Any) -> None:
    """Raise where something else stands in the place of one GP site's posterior."""
    if isinstance(given, SparsePosterior):
        return
    guide = guide_of(given)
    if guide is not None:
        sites = [] if guide.structure is None else list(guide.structure.gps)
        whose = "" if guide is given else "its "
        remedy = f"give {whose}guide.posterior(x)[{sites[0] if sites else 'f'!r}], x being the inputs"
    elif _is_posteriors(given):
        remedy = f"give one of them, such as posteriors[{next(iter(given))!r}]"
    else:
        remedy = "give guide.posterior(x)['f'], x being the inputs and 'f' the site"
    raise ValueError(f"{function} needs the posterior of one GP site, got {kind_of(given)}: {remedy}")
