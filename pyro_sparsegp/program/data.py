"""The data that a guide was trained on, and what a call brings of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.rows import find_permutation

__all__ = ["Relation", "TrainingData", "first_tensor", "tensors"]

_PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


class Relation:
    """What a call's tensors are to those of training; numbers and other arguments may change from call to call.

    Nothing is compared before it is asked for.

    :param known: the training data.
    """

    def __init__(self, known: TrainingData, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._old, self._known, self._call = known.leaves, known.args, (model, args, kwargs)

    @cached_property
    def _new(self) -> dict[Any, Tensor]:
        return _with_rows(*self._call)

    @cached_property
    def _moved(self) -> list[Any]:
        old = self._old
        return [path for path, tensor in self._new.items() if path not in old or not old[path].is_still(tensor)]

    @property
    def fewer(self) -> bool:
        """Whether a tensor of training is not given now, such as the observations."""
        return not self._old.keys() <= self._new.keys()

    @cached_property
    def order(self) -> Optional[Tensor]:
        """The old rows' numbers in the new order, if these are the same rows in another."""
        if not self._moved or self.fewer:
            return None
        new, old = self._new, {path: leaf.tensor for path, leaf in self._old.items() if leaf.unchanged}
        # Rows are told apart by all tensors of their number, moved or not: test_rows_in_another_order_are_followed.
        num = len(new[self._moved[0]])
        if any(path not in old or len(new[path]) != num for path in self._moved):
            return None
        by_row = [path for path, tensor in new.items() if path in old and len(tensor) == num]
        return find_permutation([old[path] for path in by_row], [new[path] for path in by_row])

    @property
    def others(self) -> bool:
        """Whether none of the tensors is one of training, as in another mini-batch."""
        for one, other in zip(self._call[1], self._known):  # in most steps the same objects
            if one is other and isinstance(one, Tensor):
                return False
        return len(self._moved) == len(self._new)

    @property
    def inputs(self) -> bool:
        """Whether all the tensors that this call brings, perhaps not all of training's, are those of training."""
        return not self._moved or self.order is not None

    @property
    def same(self) -> bool:
        """Whether they are the same rows, perhaps in another order."""
        return self.inputs and not self.fewer


class TrainingData:
    """The arguments of a call with observations: references, no copies.

    :param model: whose parameters name the arguments.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves = {path: _Leaf(tensor) for path, tensor in _with_rows(model, args, kwargs).items()}

    def mapped(self, function: Callable[[Tensor], Tensor], model: Callable) -> TrainingData:
        """These data with all tensors converted, to another dtype or device."""
        new = TrainingData(model, _mapped(function, self.args), _mapped(function, self.kwargs))
        for path, leaf in new.leaves.items():
            leaf.dtype = _coarser(leaf.dtype, self.leaves[path].dtype)
        return new

    @property
    def overwritten(self) -> bool:
        """Whether tensors that it holds have other values than they had."""
        # A step of the same rows in other tensors has taken the place of those that were compared.
        held = {id(tensor) for tensor in tensors([self.args, self.kwargs])}
        return any(id(leaf.tensor) in held and not leaf.unchanged for leaf in self.leaves.values())

    @property
    def is_plain(self) -> bool:
        """Whether they are tensors, numbers and strings in lists, tuples and mappings, which every file can hold."""
        return _is_plain(self.args) and _is_plain(self.kwargs)


class _Leaf:
    """A tensor, and whether it has been written to since.

    :param dtype: the coarsest that it has had, in which values are compared.
    """

    def __init__(self, tensor: Tensor, dtype: Optional[torch.dtype] = None) -> None:
        self.tensor, self._seen = tensor, _version(tensor)
        self.dtype = _coarser(tensor.dtype, dtype or tensor.dtype)

    def __getstate__(self) -> tuple[Tensor, torch.dtype]:
        return self.tensor, self.dtype

    def __setstate__(self, state: tuple[Tensor, torch.dtype]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a copy counts from its own start

    @property
    def unchanged(self) -> bool:
        """Whether nothing was written to it since: torch counts writes to a tensor."""
        return _version(self.tensor) == self._seen

    def is_still(self, other: Tensor) -> bool:
        """Whether another tensor has these values."""
        own = self.tensor
        if not self.unchanged or other.shape != own.shape or other.device != own.device:
            return False
        # Views of the same numbers are not compared, which would read them back from a device.
        if (other.data_ptr(), other.stride(), other.dtype) == (own.data_ptr(), own.stride(), own.dtype):
            return True
        # After guide.float() the data in float64 are still those of training.
        dtype = _coarser(other.dtype, self.dtype)
        return torch.allclose(other.to(dtype), own.to(dtype), rtol=0, atol=0, equal_nan=True)


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return min(one, other, key=lambda dtype: dtype.itemsize)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _with_rows(model: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[Any, Tensor]:
    """The tensors with rows among a call's arguments, by the parameter's name and the path within it.

    Masks, of bools, are none of the data: they may change from step to step.
    """
    # A keyword is the argument that it names, in whatever way it is given: test_what_is_the_same.
    try:
        tree: Any = inspect.signature(model).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        tree = {"args": args, "kwargs": kwargs}
    leaves = _walk(tree)
    return {p: leaf for p, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and leaf.dtype != torch.bool}


def _walk(tree: Any) -> Iterator[tuple[tuple, Any]]:
    """What is in nested mappings, lists and tuples, each with its path."""
    if not isinstance(tree, (Mapping, list, tuple)):
        yield (), tree
        return
    for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from (((key, *path), leaf) for path, leaf in _walk(part))


def _is_plain(item: Any) -> bool:
    # What torch.load(weights_only=True) takes, by its type: a subclass of dict is not.
    if type(item) is dict:
        return all(isinstance(key, (str, int)) and _is_plain(part) for key, part in item.items())
    return all(map(_is_plain, item)) if type(item) in (list, tuple) else isinstance(item, _PLAIN)


def _mapped(function: Callable[[Tensor], Tensor], item: Any) -> Any:
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, dict):
        return {key: _mapped(function, part) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_mapped(function, part) for part in item)
    return item


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings, such as a model's arguments."""
    return [leaf for _, leaf in _walk(tree) if isinstance(leaf, Tensor)]


def first_tensor(tree: Any) -> Tensor:
    """An empty tensor of the dtype and device of the first floating point one in a tree."""
    return next((leaf.new_empty(0) for leaf in tensors(tree) if leaf.is_floating_point()), torch.empty(0))
