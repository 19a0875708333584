"""Pyro modules that can declare abstract methods and own their parameters."""

import uuid
import weakref
from abc import ABCMeta
from operator import attrgetter
from typing import Any

import pyro
from pyro.nn import PyroModule
from torch import nn

_named: weakref.WeakValueDictionary[str, PyroModule] = weakref.WeakValueDictionary()  # by take_name, and alive


def unique_name(kind: str) -> str:
    """A name under which parameters meet no others in Pyro's global store, in any process."""
    return f"{kind}_{uuid.uuid4().hex[:12]}"


def take_name(module: PyroModule, name: str) -> bool:
    """Name a module and its parts for Pyro's global store, unless another living module has taken the name.

    :returns: whether the name is the module's now.
    """
    # Of two modules of one name Pyro's store would hand both the parameters of the first.
    if _named.setdefault(name, module) is not module:
        return False
    for path, part in module.named_modules(prefix=name):
        if isinstance(part, PyroModule):
            part._pyro_name = path
    return True


def drop_stored(name: str) -> None:
    """Drop what Pyro's global store holds of a module of this name: the module has its parameters itself."""
    store = pyro.get_param_store()
    for key in [key for key in store if key.startswith(f"{name}.")]:
        del store[key]


def size_buffers(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Give a module's buffers the shapes that they have in a state about to be loaded: training says their size."""
    for name, buffer in [pair for pair in module.named_buffers(recurse=False) if prefix + pair[0] in state]:
        setattr(module, name, buffer.new_zeros(state[prefix + name].shape))


_TAKEN = {*dir(PyroModule())}


def path_of(name: str) -> str:
    """A site's name as attributes of modules, with ``_`` where these have one of that name, such as ``train``."""
    return ".".join(f"{part}_" if {part, part.rstrip("_")} & _TAKEN else part for part in name.split("."))


def at_path(module: nn.Module, path: str) -> Any:
    """What a module has under a dotted name, or ``None``."""
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None


class _Meta(type(PyroModule), ABCMeta):  # type: ignore[misc]
    pass


class AbstractModule(PyroModule, metaclass=_Meta):  # type: ignore[metaclass]
    """:class:`pyro.nn.PyroModule` and :class:`abc.ABC` in one, with a name of its own until it has a parent."""

    def __init__(self) -> None:
        super().__init__(unique_name(type(self).__name__))
