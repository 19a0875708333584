"""The data that a guide was trained on, and what a call brings of them.

Tensors and NumPy's arrays are compared by content, in lists, tuples, mappings and dataclasses, too; other objects,
whose contents are not known, by identity. What a model keeps itself, as an attribute or in a closure, shows in what its
sites observe.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from numbers import Number
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

_PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)
_NO_DATA = (*_PLAIN[1:], Number, bytes, np.generic)  # may change from call to call, as functions may


class Relation:
    """How a call's data relate to training's. In a step that ``trains`` bools may change, too, which may be masks;
    elsewhere a posterior read off under others would not be that of training: test_what_is_no_tensor.
    """

    def __init__(self, known: TrainingData, call: tuple[Callable, tuple, dict[str, Any]], trains: bool) -> None:
        self._known, self._call, self._trains = known, call, trains

    @cached_property
    def call(self) -> TrainingData:
        """The call's data; training's own where all arguments are the same objects, as in most steps."""
        known, (model, args, kwargs) = self._known, self._call
        before, now = (*known.args, *known.kwargs.values()), (*args, *kwargs.values())
        if ([*known.kwargs], [*map(id, before)]) == ([*kwargs], [*map(id, now)]):
            return known
        return TrainingData(model, args, kwargs)

    @cached_property
    def moved(self) -> list[Any]:
        """What the call brings that is not training's, by the parameter's name and the path within it."""
        old, new = self._leaves
        return [path for path, (leaf, _) in new.items() if path not in old or not _is_still(*old[path], leaf)]

    @cached_property
    def _leaves(self) -> list[dict[Any, tuple[Any, int]]]:
        """Training's, and the call's."""
        both, hidden = (self._known.leaves, self.call.leaves), torch.bool if self._trains else ()
        return [{p: own for p, own in leaves.items() if getattr(own[0], "dtype", None) != hidden} for leaves in both]

    @property
    def fewer(self) -> bool:
        """Whether an argument of training is not given now, such as the observations."""
        return not self._leaves[0].keys() <= self._leaves[1].keys()

    @property
    def others(self) -> bool:
        """Whether no tensor has rows of training, as in another mini-batch; in another order it has."""
        old, found = self._leaves
        new = {path: leaf for path, (leaf, _) in found.items() if isinstance(leaf, Tensor)}
        if not new or new.keys() - {*self.moved}:
            return False
        num = len(next(iter(new.values())))
        alike = [(old[path][0], leaf) for path, leaf in new.items() if path in old and len(leaf) == num]
        tables = [torch.cat([t.double().reshape(len(t), -1) for t in part], 1).nan_to_num() for part in zip(*alike)]
        return not alike or not torch.equal(*(table.unique(dim=0) for table in tables))

    @property
    def inputs(self) -> bool:
        """Whether all that this call brings, perhaps not all of training's, is that of training."""
        return not self.moved

    @property
    def same(self) -> bool:
        """Whether they are the same rows."""
        return not (self.moved or self.fewer)

    @property
    def share(self) -> float:
        """How many rows the call brings for one of training, at most 1; 1 if it brings other arguments."""
        old, new = self._leaves
        paths = [path for path, (leaf, _) in new.items() if isinstance(leaf, Tensor) and old.keys() == new.keys()]
        return min([1.0, *(len(new[path][0]) / max(len(old[path][0]), 1) for path in paths)])


class NoRelation:
    """Without data of training: nothing is known of a call."""

    fewer = others = inputs = same = False
    share = 1.0
    moved = ()
    call: TrainingData  # which it has not


class TrainingData:
    """The arguments of a call with observations: references, and copies of what is written to unseen."""

    some: Optional[tuple[tuple, dict[str, Any]]] = None  # arguments with as many of their rows as a guide needs

    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = map_tensors(_kept, (args, kwargs), kinds=(Tensor, np.ndarray))
        # A keyword is the argument that it names, in whatever way it is given: test_what_is_the_same.
        found = walk(signature_of(model).bind(*self.args, **self.kwargs).arguments)
        leaves = {path: torch.from_numpy(leaf) if _is_numeric(leaf) else leaf for path, leaf in found}
        #: tensors with rows, and objects of which it is not known what they hold; with a version that writes change
        self.leaves = {
            path: (leaf, _version(leaf))
            for path, leaf in leaves.items()
            if (leaf.dim() if isinstance(leaf, Tensor) else not (isinstance(leaf, _NO_DATA) or callable(leaf)))
        }
        self.shown: dict[str, tuple[Tensor, int]] = {}

    def note(self, shown: Mapping[str, Tensor]) -> None:
        """Take note of what a model's sites show of these data, and of others that it holds itself."""
        kept = {what: _kept(value) for what, value in shown.items()}
        self.shown = {what: (value, _version(value)) for what, value in kept.items()}

    def moved(self, shown: Mapping[str, Tensor]) -> list[str]:
        """What sites show otherwise than before; nothing if data were overwritten, which a warning tells."""
        known = {} if self.overwritten else self.shown
        return [f"other {what}" for what, own in known.items() if not _is_still(*own, shown.get(what))]

    def mapped(self, function: Callable[[Tensor], Tensor], model: Callable) -> TrainingData:
        """These data with all tensors converted, to another dtype or device."""
        found = TrainingData(model, *map_tensors(function, (self.args, self.kwargs)))
        found.note({what: function(value) for what, (value, _) in self.shown.items()})
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies count writes from their own start: test_sites.py::test_copies_predict_the_same_and_train_on.
        parts = {name: state.get(name, {}).items() for name in ("leaves", "shown")}  # older files have no data shown
        self.__dict__ = state | {name: {k: (v, _version(v)) for k, (v, _) in part} for name, part in parts.items()}

    @property
    def overwritten(self) -> list[Any]:
        """The tensors that have other values than they had, by their places."""
        return [path for path, (leaf, seen) in self.leaves.items() if _version(leaf) != seen]


def switches_of(model: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[tuple, Any], ...]:
    """A call's switches by their places: arguments that are truth values, whole numbers, strings or ``None``."""
    leaves = walk(signature_of(model).bind(*args, **kwargs).arguments)
    return tuple((path, leaf) for path, leaf in leaves if isinstance(leaf, (bool, int, str, type(None))))


def signature_of(model: Callable) -> inspect.Signature:
    """The arguments that a model takes."""
    return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)


def _version(leaf: object) -> int:
    """How often torch has counted a write to a tensor."""
    return getattr(leaf, "_version", 0)


def _is_numeric(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"


def _kept(leaf: Any) -> Any:
    """A tensor or array; a copy if writes to it are not counted, as in NumPy's memory and in inference mode."""
    if _is_numeric(leaf):
        return leaf.astype(leaf.dtype.newbyteorder("="))
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    with torch.inference_mode(False):
        # torch resizes no memory that it shares.
        return leaf.detach().clone() if leaf.is_inference() or not leaf.untyped_storage().resizable() else leaf


def _is_still(own: object, seen: int, other: object) -> bool:
    """Whether another tensor has the values that one of training had, or another object is it."""
    if own is other:
        return _version(own) == seen
    if not (isinstance(own, Tensor) and isinstance(other, Tensor)):
        return False
    if (other.shape, other.device, seen) != (own.shape, own.device, _version(own)):
        return False
    # Views of the same numbers are not compared, which would read them back from a device.
    if (other.data_ptr(), other.stride(), other.dtype) == (own.data_ptr(), own.stride(), own.dtype):
        return True
    # After guide.float() the data in float64 are still those of training: test_float32.py.
    coarser = min(own.dtype, other.dtype, key=lambda dtype: (not dtype.is_floating_point, dtype.itemsize))
    own, other = own.to(coarser), other.to(coarser)
    return torch.allclose(own, other, rtol=0, atol=0, equal_nan=True)


def _is_record(item: object) -> bool:
    return is_dataclass(item) and not callable(item)


def walk(tree: Any) -> Iterator[tuple[tuple, Any]]:
    """What is in nested mappings, lists, tuples and dataclasses, each with its path."""
    parts: Any = ()
    match tree:
        case Mapping():
            parts = tree.items()
        case list() | tuple():
            parts = enumerate(tree)
        case _ if _is_record(tree):
            parts = ((field.name, getattr(tree, field.name)) for field in fields(tree))
        case _:
            yield (), tree
    for key, part in parts:
        yield from (((key, *path), leaf) for path, leaf in walk(part))


def is_plain(item: Any) -> bool:
    """Whether it is of tensors, numbers and strings in lists, tuples and mappings, which every file can hold."""
    # What torch.load(weights_only=True) takes, by its type: a subclass of dict is not.
    if type(item) is dict:
        return all(isinstance(key, (str, int)) and is_plain(part) for key, part in item.items())
    return all(map(is_plain, item)) if type(item) in (list, tuple) else isinstance(item, _PLAIN)


def map_tensors(function: Callable[..., Any], tree: Any, *alike: Any, kinds: Any = Tensor) -> Any:
    """A tree of what :func:`walk` enters with its tensors replaced by a function of them, and of tensors of trees
    alike.
    """
    of = partial(map_tensors, function, kinds=kinds)
    match tree:
        case _ if isinstance(tree, kinds):
            return function(tree, *alike)
        case Mapping() if hasattr(tree, "__or__"):  # what has none cannot be made of other parts
            changed: Any = {key: of(part, *(one[key] for one in alike)) for key, part in tree.items()}
            return tree | changed
        case list() | tuple():
            parts = map(of, tree, *alike)
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        case _ if _is_record(tree):
            tree = copy.copy(tree)
            for name in (field.name for field in fields(tree)):
                # Of a frozen one, too.
                object.__setattr__(tree, name, of(*(getattr(one, name) for one in (tree, *alike))))
    return tree


def rows_of(tree: Any, num: int, chosen: Tensor) -> Any:
    """A tree in which tensors of ``num`` rows have those that are ``chosen``."""

    def some(value: Tensor) -> Tensor:
        return value[chosen.to(value.device)] if value.shape[:1] == (num,) else value

    return map_tensors(some, tree)


def tensors(tree: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings, such as a model's arguments."""
    return [leaf for _, leaf in walk(tree) if isinstance(leaf, Tensor)]
