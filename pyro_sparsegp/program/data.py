"""The data that a guide was trained on, and what a call brings of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


class Relation:
    """What a call's tensors are to those of training; numbers and other arguments may change from call to call."""

    def __init__(self, known: TrainingData, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._known, self._call = known, (model, args, kwargs)

    @cached_property
    def _new(self) -> dict[Any, Tensor]:
        return _with_rows(*self._call)

    @cached_property
    def _moved(self) -> list[Any]:
        old = self._known.leaves
        return [path for path, tensor in self._new.items() if path not in old or not _is_still(*old[path], tensor)]

    @property
    def fewer(self) -> bool:
        """Whether a tensor of training is not given now, such as the observations."""
        return not self._known.leaves.keys() <= self._new.keys()

    @property
    def others(self) -> bool:
        """Whether no tensor has rows of training, as in another mini-batch; in another order it has."""
        # In most steps they are the same objects.
        same = any(one is other and isinstance(one, Tensor) for one, other in zip(self._call[1], self._known.args))
        if same or not 0 < len(self._moved) == len(self._new):
            return False
        old, num = self._known.leaves, len(next(iter(self._new.values())))
        alike = [(old[path][0], new) for path, new in self._new.items() if path in old and len(new) == num]
        tables = [torch.cat([t.double().reshape(len(t), -1) for t in part], 1).nan_to_num() for part in zip(*alike)]
        return not alike or not torch.equal(*(table.unique(dim=0) for table in tables))

    @property
    def inputs(self) -> bool:
        """Whether all the tensors that this call brings, perhaps not all of training's, are those of training."""
        return not self._moved

    @property
    def same(self) -> bool:
        """Whether they are the same rows."""
        return self.inputs and not self.fewer


class NoRelation:
    """That to data of training of which there are none: nothing is known of a call."""

    fewer = others = inputs = same = False


class TrainingData:
    """The arguments of a call with observations: references, no copies.

    :param model: whose parameters name the arguments.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves = {path: (tensor, _version(tensor)) for path, tensor in _with_rows(model, args, kwargs).items()}

    def mapped(self, function: Callable[[Tensor], Tensor], model: Callable) -> TrainingData:
        """These data with all tensors converted, to another dtype or device."""
        return TrainingData(model, *map_tensors(function, (self.args, self.kwargs)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies count writes from their own start: test_sites.py::test_copies_predict_the_same_and_train_on.
        leaves = {path: (tensor, _version(tensor)) for path, (tensor, _) in state["leaves"].items()}
        self.__dict__ = state | {"leaves": leaves}

    @property
    def overwritten(self) -> bool:
        """Whether tensors that it holds have other values than they had."""
        # A step of the same rows in other tensors has taken the place of those that were compared.
        held = {id(tensor) for tensor in tensors([self.args, self.kwargs])}
        return any(id(tensor) in held and _version(tensor) != seen for tensor, seen in self.leaves.values())

    @property
    def is_plain(self) -> bool:
        """Whether they are tensors, numbers and strings in lists, tuples and mappings, which every file can hold."""
        return _is_plain(self.args) and _is_plain(self.kwargs)


def _is_still(own: Tensor, seen: int, other: Tensor) -> bool:
    """Whether another tensor has the values that one of training had."""
    if _version(own) != seen or other.shape != own.shape or other.device != own.device:
        return False
    # Views of the same numbers are not compared, which would read them back from a device.
    if (other.data_ptr(), other.stride(), other.dtype) == (own.data_ptr(), own.stride(), own.dtype):
        return True
    # After guide.float() the data in float64 are still those of training: test_float32.py.
    coarser = min(own.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return torch.allclose(other.to(coarser), own.to(coarser), rtol=0, atol=0, equal_nan=True)


def _version(tensor: Tensor) -> int:
    """How often torch has counted a write to a tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _with_rows(model: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[Any, Tensor]:
    """The tensors with rows among a call's arguments, by the parameter's name and the path within it.

    Masks, of bools, are none of the data: they may change from step to step.
    """
    # A keyword is the argument that it names, in whatever way it is given: test_what_is_the_same.
    leaves = _walk(inspect.signature(model).bind(*args, **kwargs).arguments)
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


def map_tensors(function: Callable[..., Tensor], tree: Any, *alike: Any) -> Any:
    """A tree of mappings, lists and tuples with its tensors replaced by a function of them, and of those of others."""
    if isinstance(tree, Tensor):
        return function(tree, *alike)
    if isinstance(tree, dict):
        parts: Any = {key: map_tensors(function, part, *(one[key] for one in alike)) for key, part in tree.items()}
        return copy.copy(tree) | parts
    if isinstance(tree, (list, tuple)):
        parts = [map_tensors(function, *same) for same in zip(tree, *alike)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings, such as a model's arguments."""
    return [leaf for _, leaf in _walk(tree) if isinstance(leaf, Tensor)]


def first_tensor(tree: Any) -> Tensor:
    """An empty tensor of the dtype and device of the first floating point one in a tree."""
    return next((leaf.new_empty(0) for leaf in tensors(tree) if leaf.is_floating_point()), torch.empty(0))
