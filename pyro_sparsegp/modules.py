"""Pyro modules that can declare abstract methods and own their parameters."""

import uuid
from abc import ABCMeta
from operator import attrgetter
from typing import Any

from pyro.nn import PyroModule

__all__ = ["AbstractModule", "at_path", "unique_name"]


def unique_name(kind: str) -> str:
    """A name under which parameters meet no others in Pyro's global store, in any process."""
    return f"{kind}_{uuid.uuid4().hex[:12]}"


def at_path(module: Any, path: str) -> Any:
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
