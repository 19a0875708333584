"""What the Python of a program reads by name, beside its arguments: in closures, globals, defaults and attributes.

Functions, methods, objects, modules and networks that the program names are followed, but no functions and classes of
libraries. What comes from ``getattr``, context variables, files or C is not seen.
"""

import dis
import functools
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn


class Items(tuple):
    """What a container of numbers and strings holds."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, Items, torch.dtype, torch.device)
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, bytearray)
_MOST = 100_000  # items of a container
_UNSEEN = {Iterator: "an iterator", torch.Generator: "a generator of random numbers"}
_CALLED = frozenset({"__call__", "forward"})  # methods of an object that its calls do not name
_OF_MODULES = frozenset(vars(PyroModule()))  # training or not, hooks, and what it holds
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
    """The numbers, strings and objects that a program's Python names, by their ``places``; those among its arguments,
    too.
    """

    def __init__(self, program: object, arguments: Mapping[Any, object] = MappingProxyType({})) -> None:
        self._arguments = {path: known(leaf) for path, leaf in arguments.items()}
        self.places = dict[str, Any]()
        self.unseen = dict[str, str]()  # places whose changes do not show, and what is there
        self._reads = dict[str, tuple[Callable[[], Any], Any]]()
        self._own = _home(program)
        self._seen = set[Any]()
        self._note("model", program, frozenset())
        asked = frozenset[str]().union(*(names for _, names in self._seen))
        for path, leaf in arguments.items():
            self._note(f"argument {path}", leaf, asked)
        self.key = frozenset(self.places.items())

    def hold(self, arguments: Mapping[Any, object] = MappingProxyType({})) -> bool:
        """Whether all are what they were."""
        if self._arguments != {path: known(leaf) for path, leaf in arguments.items()}:
            return False
        return all((now := read()) is value or known(now) == known(value) for read, value in self._reads.values())

    @property
    def tensors(self) -> list[Tensor]:
        """The dense tensors among them that are no parameters: data, and what networks keep of their inputs."""
        found = {id(each.value): each.value for each in self.places.values() if isinstance(each, Same)}
        tensors = [each for each in found.values() if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)]
        return [each for each in tensors if each.layout == torch.strided]

    def require_seen(self) -> None:
        """Refuse what changes unseen."""
        for place, what in self.unseen.items():
            raise ValueError(
                f"{name_of(place)} is {what}, and a replay would see no change of it. Give what it gives "
                "as an argument, in a tensor"
            )

    def changed(self, before: "Named") -> list[str]:
        """What is another than before, by its name."""
        both = {**before.places, **self.places}
        places = [place for place in both if before.places.get(place) != self.places.get(place)]
        return list(dict.fromkeys(name_of(place) for place in places))

    def _note(self, place: str, value: object, names: Names) -> None:
        self.places[place] = known(value)
        self.unseen.update((place, what) for kind, what in _UNSEEN.items() if isinstance(value, kind))
        if (id(value), names) in self._seen or not self._is_followed(value):
            return
        self._seen.add((id(value), names))
        for name, read, asked in self._parts(place, value, names):
            part = read()
            if name:
                self._reads[place + name] = read, part
            self._note(place + name, part, asked)

    def _is_followed(self, value: object) -> bool:
        is_code = isinstance(value, (FunctionType, type))
        return not (is_code and _home(value) != self._own and _is_library(_home(value)))

    def _parts(self, place: str, value: object, names: Names) -> Iterator[Part]:
        """What an object holds that is read."""
        match value:
            case _ if isinstance(value, _PLAIN):
                return
            case Tensor():  # whose numbers are read where they lie
                yield ".requires_grad", lambda: value.requires_grad, names
                yield ".hooks", lambda: Items(map(known, (value._backward_hooks or {}).values())), names
            case _ if isinstance(value, _CONTAINERS):
                yield from self._items(place, value, names)
            case np.ndarray():
                yield "[:]", lambda: zlib.crc32(value.tobytes()), names
            case functools.partial():
                yield from ((f".{n}", partial(getattr, value, n), names) for n in ("func", "args", "keywords"))
            case MethodType():
                yield ".__func__", lambda: value.__func__, names
                yield ".__self__", lambda: value.__self__, _names(value.__func__)
            case BuiltinMethodType():  # as the append of a list
                yield ".__self__", lambda: value.__self__, names
            case FunctionType():
                yield from _of_function(value)
            case _:
                yield from self._of_object(value, names)

    def _items(self, place: str, value: Any, names: Names) -> Iterator[Part]:
        yield ".__len__()", partial(len, value), names
        if len(value) > _MOST:
            self.unseen[place] = f"a container of {len(value)} items"
        elif not value:
            return
        elif isinstance(value, Mapping):
            yield "[:]", lambda: Items(value), names
            yield from ((f"[{key!r}]", partial(value.get, key), names) for key in value)
        elif all(isinstance(each, _PLAIN) for each in value):
            yield "[:]", lambda: Items(value), names
        else:
            yield "[:]", lambda: Items(map(known, value)), names
            yield from ((f"[{key}]", lambda each=each: each, names) for key, each in enumerate(value))  # type: ignore[misc]

    def _of_object(self, value: object, names: Names) -> Iterator[Part]:
        """Of a module, a class or an instance: the attributes of these names, and the methods that have them."""
        own: Mapping[str, Any] = getattr(value, "__dict__", {})
        kinds = () if isinstance(value, ModuleType) else (value if isinstance(value, type) else type(value)).__mro__
        if isinstance(value, nn.Module) and (id(value), _OF_MODULES) not in self._seen:
            # Of a library's, all that it holds.
            self._seen.add((id(value), _OF_MODULES))
            names |= _OF_MODULES | {*(own if _is_library(_home(value)) else ())}
        held = [own, *(own.get(name, {}) for name in ("_parameters", "_buffers", "_modules"))]
        for name in sorted(names | ({"__init__"} if isinstance(value, type) else _CALLED)):
            holder: Mapping[str, Any] = next((each for each in (*held, *map(vars, kinds)) if name in each), {})
            part = holder.get(name)
            read = partial(getattr, value) if isinstance(part, MemberDescriptorType) else partial(_get, own, holder)
            if part is not None:
                yield f".{name}", partial(read, name), names
            # A property's, a class's or a static method's function.
            function = getattr(part, "fget", None) or getattr(part, "__func__", part)
            if isinstance(function, FunctionType) and self._is_followed(function):
                yield f".{name}()", lambda function=function: function, names  # type: ignore[misc]
                yield "", lambda: value, _names(function)


def _get(own: Mapping[str, Any], holder: Mapping[str, Any], name: str) -> Any:
    """An attribute of an object, which may be its own by now, or of its class."""
    return own[name] if name in own else holder.get(name)


def name_of(place: str) -> str:
    """What a place is called in the program: a list, for one of its items."""
    return re.split(r"\[|\.__|\(\)$", place.rpartition(" ")[-1])[0]


def _of_function(function: FunctionType) -> Iterator[Part]:
    names, around = _names(function), function.__globals__
    asked = _globals(function.__code__)
    yield from ((f" {name}", partial(around.get, name), names) for name in asked & {*around})
    imported = asked - {*around} & {*sys.modules}
    yield from ((f" {name}", partial(sys.modules.get, name), names) for name in imported)
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    yield from ((f" {n}", partial(getattr, c, "cell_contents", None), names) for n, c in cells if c != _EMPTY)
    own = ("__defaults__", "__kwdefaults__", *(names & {*vars(function)}))
    yield from ((f".{name}", partial(getattr, function, name, None), names) for name in own)


def _home(value: object) -> str:
    """The package that an object's code is of."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


@functools.cache
def _is_library(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in {"pyro_sparsegp", *sys.stdlib_module_names} or "site-packages" in file


@functools.cache
def _globals(code: CodeType) -> Names:
    """The globals that code names, and code within it."""
    named = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
    own = {each.argval for each in dis.get_instructions(code) if each.opname in named}
    return frozenset(own.union(*map(_globals, _within(code))))


@functools.cache
def _attributes(code: CodeType) -> Names:
    return frozenset(code.co_names).union(*map(_attributes, _within(code)))


def _names(function: object) -> Names:
    """All names in a function's code. Attributes are among them."""
    return _attributes(function.__code__) if isinstance(function, FunctionType) else frozenset()


def _within(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]
