"""What the Python of a program reads by name, beside its arguments: in closures, globals, defaults and attributes.

The program's functions are followed, and the functions, methods, objects and modules that these name. Libraries are
not, nor is what comes from ``getattr``, iterators, files or C.
"""

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_MOST = 256  # items of a container, and numbers of an array, that are looked at
_CALLED = frozenset({"__call__", "forward"})  # methods of an object that its calls do not name
_EMPTY = CellType()

Names = frozenset[str]
Part = tuple[str, Callable[[], Any], Names]  # its name, what reads it, and the attributes that are asked of it


class Same:
    """An object that is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def known(value: object) -> Any:
    """What is equal for equal numbers and strings, and else for the same object."""
    return (type(value), value) if isinstance(value, _PLAIN) else Same(value)


class Named:
    """The numbers, strings and objects that a program's Python names, by their ``places``."""

    def __init__(self, program: object) -> None:
        self.places = dict[str, Any]()
        self._reads = list[tuple[Callable[[], Any], Any]]()
        self._own = _home(program)
        self._seen = set[Any]()
        self._note("model", program, frozenset())
        self.key = frozenset(self.places.items())

    def hold(self) -> bool:
        """Whether all are what they were."""
        return all((now := read()) is value or known(now) == known(value) for read, value in self._reads)

    @property
    def buffers(self) -> list[Tensor]:
        """Of the modules among them: what networks keep of their inputs."""
        modules = [each.value for each in self.places.values() if isinstance(getattr(each, "value", None), nn.Module)]
        return list({id(buffer): buffer for module in modules for buffer in module.buffers()}.values())

    def changed(self, before: "Named") -> list[str]:
        """The places where they are others than before."""
        both = {**before.places, **self.places}
        return [place for place in both if before.places.get(place) != self.places.get(place)]

    def _note(self, place: str, value: object, names: Names) -> None:
        self.places[place] = known(value)
        if (id(value), names) in self._seen or not self._is_followed(value):
            return
        self._seen.add((id(value), names))
        for name, read, asked in self._parts(value, names):
            self._reads.append((read, part := read()))
            self._note(place + name, part, asked)

    def _is_followed(self, value: object) -> bool:
        home = _home(value)
        return home == self._own or not _is_library(home)

    def _parts(self, value: object, names: Names) -> Iterator[Part]:
        """What an object holds that is read."""
        match value:
            case Mapping() | list() | tuple() | nn.Sequential() | nn.ModuleList() | nn.ModuleDict():
                yield from _items(value, names)
            case np.ndarray():
                yield "[:]", lambda: value.reshape(-1)[:_MOST].tobytes(), names
            case functools.partial():
                yield from ((f".{n}", partial(getattr, value, n), names) for n in ("func", "args", "keywords"))
            case MethodType():
                yield ".__func__", lambda: value.__func__, names
                yield ".__self__", lambda: value.__self__, _names(value.__func__)
            case FunctionType():
                yield from _of_function(value)
            case _ if hasattr(value, "__dict__") and not isinstance(value, Tensor):
                yield from self._of_object(value, names)

    def _of_object(self, value: object, names: Names) -> Iterator[Part]:
        """Of a module, a class or an instance: the attributes of these names, and the methods that have them."""
        kinds = () if isinstance(value, ModuleType) else (value if isinstance(value, type) else type(value)).__mro__
        held = [vars(value), *(vars(value).get(name, {}) for name in ("_parameters", "_buffers", "_modules"))]
        called = {"__init__"} if isinstance(value, type) else _CALLED
        for name in names | called:
            holder = next((each for each in (*held, *map(vars, kinds)) if name in each), None)
            if holder is None:
                continue
            part = holder[name]
            # A property's, a class's or a static method's function.
            function = getattr(part, "fget", None) or getattr(part, "__func__", part)
            yield f".{name}", partial(holder.get, name), names
            if isinstance(function, FunctionType) and self._is_followed(function):
                yield f".{name}()", lambda function=function: function, names  # type: ignore[misc]
                yield "", lambda: value, _names(function)


def _items(value: object, names: Names) -> Iterator[Part]:
    held: Any = value._modules if isinstance(value, nn.Module) else value
    keys = held if isinstance(held, Mapping) else range(len(held))
    yield ".__len__()", partial(len, held), names
    yield from ((f"[{key!r}]", partial(held.__getitem__, key), names) for key, _ in zip(keys, range(_MOST)))


def _of_function(function: FunctionType) -> Iterator[Part]:
    names, around = _names(function), function.__globals__
    yield from ((f" {name}", partial(around.get, name), names) for name in _globals(function.__code__) & {*around})
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    yield from ((f" {n}", partial(getattr, c, "cell_contents", None), names) for n, c in cells if c != _EMPTY)
    own = ("__defaults__", "__kwdefaults__", *(names & {*vars(function)}))
    yield from ((f".{name}", partial(getattr, function, name, None), names) for name in own)


def _home(value: object) -> str:
    """The package that an object's code is of; none of containers."""
    if isinstance(value, (dict, list, tuple, np.ndarray, functools.partial, MethodType, nn.Sequential)):
        return ""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


@functools.cache
def _is_library(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in {"pyro_sparsegp", *sys.stdlib_module_names} or "site-packages" in file


@functools.cache
def _globals(code: CodeType) -> Names:
    """The globals that code names, and code within it."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*map(_globals, _within(code))))


@functools.cache
def _attributes(code: CodeType) -> Names:
    return frozenset(code.co_names).union(*map(_attributes, _within(code)))


def _names(function: object) -> Names:
    """All names in a function's code. Attributes are among them."""
    return _attributes(function.__code__) if isinstance(function, FunctionType) else frozenset()


def _within(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]
