"""A Pyro module that can declare abstract methods."""

from abc import ABCMeta

from pyro.nn import PyroModule

__all__ = ["AbstractModule"]


class _Meta(type(PyroModule), ABCMeta):  # type: ignore[misc]
    pass


class AbstractModule(PyroModule, metaclass=_Meta):  # type: ignore[metaclass]
    """:class:`pyro.nn.PyroModule` and :class:`abc.ABC` in one."""
