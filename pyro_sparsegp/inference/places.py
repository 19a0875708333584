"""Where a program finds the tensors and numbers that are not its arguments: in closures, globals, attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Union

import torch
from torch import Tensor, nn

from ..kernels import Kernel

__all__ = ["Place", "Places"]

_PACKAGE = __name__.partition(".")[0]
_MOST = 3000  # places
_LIBRARIES = {"torch", "pyro", "numpy", "builtins", "typing", "collections", "functools", "math", "warnings", _PACKAGE}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_GONE = object()


class Place:
    """One entry of a dictionary or a list, or the content of a closure's cell."""

    __slots__ = ("container", "key")

    def __init__(self, container: Any, key: Any) -> None:
        self.container, self.key = container, key

    def read(self) -> Any:
        """What stands there now."""
        try:
            return self.container.cell_contents if self.key is None else self.container[self.key]
        except (KeyError, IndexError, ValueError):
            return _GONE


class Places:
    """What programs hold, as it is now.

    Code of libraries is not looked into, nor are attributes of this library's guides but their tensors.

    :param programs: functions, callables and modules, which are followed into closures, the globals that their code
        names, attributes, lists and mappings.
    :param modules: those of whose tensors only is wanted.
    """

    def __init__(self, programs: Iterable[Any], modules: Iterable[nn.Module] = ()) -> None:
        self.tensors: dict[int, Place] = {}
        self._others: list[tuple[Place, Any]] = []
        seen: set[int] = set()
        stack = list(programs)
        for module in modules:
            self._note_all(module._buffers, list(module._buffers), [])
            self._note_all(module._parameters, list(module._parameters), [])
        while stack and len(self._others) + len(self.tensors) < _MOST:
            item = stack.pop()
            if id(item) in seen or not _is_looked_into(item):
                continue
            seen.add(id(item))
            for container, keys in _within(item):
                self._note_all(container, keys, stack)

    def _note_all(self, container: Any, keys: Iterable[Any], stack: list[Any]) -> None:
        for key in keys:
            place = Place(container, key)
            value = place.read()
            if isinstance(value, Tensor):
                self.tensors.setdefault(id(value), place)
            elif value is not _GONE:
                self._others.append((place, value))
                stack.append(value)

    def settle(self) -> None:
        """Leave out what has changed since: a count of runs, the last one's trace."""
        self._others = [(place, value) for place, value in self._others if _same(place.read(), value)]

    @property
    def unchanged(self) -> bool:
        """Whether everything but the tensors is as it was."""
        return all(_same(place.read(), value) for place, value in self._others)


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, _PLAIN) and now == before)


def _is_looked_into(item: Any) -> bool:
    if isinstance(item, (*_PLAIN, Tensor, ModuleType)):
        return False
    if isinstance(item, (list, tuple, dict, partial, MethodType)):
        return True
    if isinstance(item, (FunctionType, type)):
        return (item.__module__ or "builtins").partition(".")[0] not in _LIBRARIES
    homes = [kind.__module__ for kind in type(item).__mro__]
    if any(home.startswith((f"{_PACKAGE}.guide", f"{_PACKAGE}.inference")) for home in homes):
        return False
    if isinstance(item, (nn.Module, torch.distributions.Distribution, Kernel)):
        return True
    return homes[0].partition(".")[0] not in _LIBRARIES


def _within(item: Any) -> Iterator[tuple[Any, Union[list[Any], tuple[None]]]]:
    """Containers of an item's parts, with their keys; of closures the cells, with ``None``."""
    if isinstance(item, dict):
        yield item, list(item)
    elif isinstance(item, (list, tuple)):
        yield item, list(range(min(len(item), _MOST)))
    elif isinstance(item, partial):
        yield from _parts([item.func, item.args, item.keywords])
    elif isinstance(item, MethodType):
        yield from _parts([item.__func__, item.__self__])
    elif isinstance(item, FunctionType):
        cells: tuple[CellType, ...] = item.__closure__ or ()
        for cell in cells:
            yield cell, (None,)
        yield from _parts([item.__defaults__, item.__kwdefaults__, getattr(item, "__wrapped__", None)])
        yield item.__globals__, [name for name in _names(item.__code__) if name in item.__globals__]
    else:
        held = getattr(item, "__dict__", None)
        if isinstance(held, Mapping):
            hooks = isinstance(item, nn.Module)
            yield held, [key for key in held if not (hooks and key.endswith("_hooks"))]
        if not isinstance(item, type):
            yield from _parts([type(item)])


def _parts(items: list[Any]) -> Iterator[tuple[list[Any], list[int]]]:
    yield items, list(range(len(items)))


def _names(code: Any) -> list[str]:
    """The names that code, and the functions defined in it, look up outside."""
    found = list(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            found += _names(constant)
    return found
