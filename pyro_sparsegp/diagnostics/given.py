"""What was given in the place of a model, a result or a tree, and what to give instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from pyro.infer import MCMC

from ..guide import AutoSparseGP
from ..posterior.sparse_posterior import SparsePosterior

__all__ = [
    "guide_of",
    "is_tree",
    "kind_of",
    "nothing_unmasked",
    "refuse_left",
    "require_arguments",
    "require_model",
    "require_tree",
    "signature_of",
]

_LEFT = {  # since 0.1.0: what took the place of arguments
    "chunk_size": "leave it out: blocks of rows and of draws are as large as memory allows",
    "ordered": 'classes have log scores; of pyro.deterministic("probs", ...) in the model predict gives the '
    "probabilities that other scores are made of",
    "processes": "join simulations of other seeds, each in a process of its own: xarray.concat([a, b], dim='draw')",
    "sample_dims": "stack the groups, tree.map_over_datasets(lambda group: "
    'group.stack(sample=["chain", "draw"]) if "draw" in group.dims else group)',
}


def refuse_left(function: str, kwargs: Mapping[str, Any]) -> None:
    """Raise where the model's further arguments hold one that a function had."""
    for name in kwargs.keys() & _LEFT.keys():
        raise ValueError(f"{function} takes no {name}=: {_LEFT[name]}")


def guide_of(given: Any) -> Optional[AutoSparseGP]:
    """A guide, or that of an object which has one, SVI or expectation propagation."""
    guide = given if isinstance(given, AutoSparseGP) else getattr(given, "guide", None)
    return guide if isinstance(guide, AutoSparseGP) else None


def is_tree(given: Any) -> bool:
    """Whether this is a tree of groups; modules have a method of the name."""
    return isinstance(getattr(given, "children", None), Mapping)


def kind_of(given: Any) -> str:
    """In words, for an error."""
    kinds = (
        (isinstance(given, SparsePosterior), f"the posterior of GP site {getattr(given, 'name', '')!r}"),
        (isinstance(given, AutoSparseGP), "a guide"),
        (guide_of(given) is not None, f"a guide's {type(given).__name__} object"),
        (is_tree(given), "a DataTree"),
        (True, type(given).__name__),
    )
    return next(words for is_this, words in kinds if is_this)


def require_model(function: str, order: str, model: Any) -> None:
    """Raise where something else stands in the model's place; a guide can be called as a model can."""
    if not callable(model) or guide_of(model) is not None or isinstance(model, MCMC) or is_tree(model):
        raise ValueError(f"{function} takes the model first, {order}; got {kind_of(model)} in its place")


def signature_of(model: Callable) -> Optional[inspect.Signature]:
    """A model's signature, if it has one."""
    try:
        return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return None


def require_arguments(function: str, remedy: str, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise where the model cannot be called with these arguments."""
    signature = signature_of(model)
    try:
        _ = signature and signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{function} cannot call the model: {error}. {remedy}") from error


def require_tree(function: str, given: Any) -> None:
    """Raise where something else stands in a tree's place."""
    if not is_tree(given):
        raise ValueError(
            f"{function} needs a tree, such as diagnostics.to_datatree(model, guide, x, y), got {kind_of(given)}"
        )


def nothing_unmasked(site: str) -> ValueError:
    """The error of scores of an observed site of which there are none."""
    return ValueError(
        f"site {site!r} has no observations: its masks leave out all rows. Name another site, var_name=..., or give "
        "the data that it is to be scored by."
    )
