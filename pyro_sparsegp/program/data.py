"""The data that a guide was trained on, and what a call brings of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.rows import find_permutation

__all__ = ["Relation", "TrainingData"]

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Relation:
    """What a call's tensors are to those of training; numbers and other arguments may change from call to call.

    Nothing is compared before it is asked for.

    :param known: the training data.
    """

    def __init__(self, known: TrainingData, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._known, self._call = known, (model, args, kwargs)

    @cached_property
    def _new(self) -> dict[Any, Tensor]:
        return _leaves(*self._call)

    @cached_property
    def _moved(self) -> list[Any]:
        old = self._known.leaves
        return [path for path, tensor in self._new.items() if path not in old or not old[path].is_still(tensor)]

    @property
    def fewer(self) -> bool:
        """Whether a tensor of training is not given now, such as the observations."""
        return any(path not in self._new for path in self._known.leaves)

    @cached_property
    def order(self) -> Optional[Tensor]:
        """The old rows' numbers in the new order, if these are the same rows in another."""
        if not self._moved or self.fewer:
            return None
        new, old = self._new, {path: leaf.tensor for path, leaf in self._known.leaves.items() if leaf.unchanged}
        if len({len(new[path]) for path in self._moved}) != 1 or any(path not in old for path in self._moved):
            return None
        num = len(new[self._moved[0]])
        by_row = [path for path, tensor in new.items() if path in old and len(tensor) == num]
        return find_permutation([old[path] for path in by_row], [new[path] for path in by_row])

    @property
    def others(self) -> bool:
        """Whether none of the tensors is one of training, as in another mini-batch."""
        old = self._known.leaves
        return not any(path in old and old[path].is_still(tensor) for path, tensor in self._new.items())

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
        self.leaves = {path: _Leaf(tensor) for path, tensor in _leaves(model, args, kwargs).items()}

    def mapped(self, function: Callable[[Tensor], Tensor], model: Callable) -> TrainingData:
        """These data with all tensors converted, to another dtype or device."""
        new = TrainingData(model, _mapped(function, self.args), _mapped(function, self.kwargs))
        for path, leaf in new.leaves.items():
            leaf.digits = _coarser(leaf.digits, self.leaves[path].digits)
        return new

    @property
    def overwritten(self) -> bool:
        """Whether tensors that it holds have other values than they had."""
        held = {id(tensor) for tensor in _tensors([self.args, self.kwargs])}
        return any(id(leaf.tensor) in held and not leaf.unchanged for leaf in self.leaves.values())

    @property
    def is_plain(self) -> bool:
        """Whether they are tensors, numbers and strings in lists, tuples and mappings, which every file can hold."""
        return _is_plain(self.args) and _is_plain(self.kwargs)


class _Leaf:
    """A tensor, and whether it has been written to since."""

    def __init__(self, tensor: Tensor, digits: Optional[torch.dtype] = None) -> None:
        self.tensor, self._version, self._digest = tensor, _version(tensor), _digest(tensor)
        self.digits = _coarser(tensor.dtype, digits or tensor.dtype)  # as many as it had before any conversion

    def __getstate__(self) -> tuple[Tensor, torch.dtype]:
        return self.tensor, self.digits

    def __setstate__(self, state: tuple[Tensor, torch.dtype]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a copy counts from its own start

    @property
    def unchanged(self) -> bool:
        """Whether its values are those it had; what was written to it may have left them."""
        if _version(self.tensor) != self._version and _digest(self.tensor) == self._digest:
            self._version = _version(self.tensor)
        return _version(self.tensor) == self._version

    def is_still(self, other: Tensor) -> bool:
        """Whether another tensor has these values."""
        if not self.unchanged:
            return False
        if other is self.tensor or (_place(other) == _place(self.tensor)):
            return True
        if other.shape != self.tensor.shape or other.device != self.tensor.device:
            return False
        if other.dtype != self.digits or self.tensor.dtype != self.digits:
            digits = _coarser(other.dtype, self.digits)
            return _equal(other.to(digits), self.tensor.to(digits))
        return _equal(other, self.tensor)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if one.itemsize <= other.itemsize else other


def _digest(tensor: Tensor) -> tuple[float, float]:
    """Two sums that tell values apart, and their places."""
    flat = tensor.detach().flatten().double().nan_to_num()
    places = torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64, device=flat.device).sqrt()
    return float(flat.sum()), float(flat @ places)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _leaves(model: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[Any, Tensor]:
    """The tensors with rows among a call's arguments, by the parameter's name and the path within it.

    Masks, of bools, are none of the data: they may change from step to step.
    """
    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
        tree: Any = bound.arguments
    except (TypeError, ValueError):
        tree = {"args": args, "kwargs": kwargs}
    found: dict[Any, Tensor] = {}

    def visit(item: Any, path: tuple[Any, ...]) -> None:
        if isinstance(item, Tensor):
            if item.dim() and item.dtype is not torch.bool:
                found[path] = item
        elif isinstance(item, Mapping):
            for key, part in item.items():
                visit(part, (*path, key))
        elif isinstance(item, (list, tuple)):
            for i, part in enumerate(item):
                visit(part, (*path, i))

    visit(tree, ())
    return found


def _mapped(function: Callable[[Tensor], Tensor], item: Any) -> Any:
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, dict):
        return {key: _mapped(function, part) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_mapped(function, part) for part in item)
    return item


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (dict, list, tuple)):
        for part in item.values() if isinstance(item, dict) else item:
            yield from _tensors(part)


def _is_plain(item: Any) -> bool:
    if type(item) is dict:
        return all(isinstance(key, (str, int)) and _is_plain(part) for key, part in item.items())
    if type(item) in (list, tuple):
        return all(map(_is_plain, item))
    return isinstance(item, (Tensor, *_PLAIN))
