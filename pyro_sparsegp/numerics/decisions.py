"""Numbers that decide which way a computation goes: read, and, where it is recorded or mapped, guarded."""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Union

import torch
from torch import Tensor

from .functions import setting


class Decisions:
    """The way that a computation has gone: what was decided, and of this what was ``read`` from tensors."""

    def __init__(self) -> None:
        self.way, self.read = list[bool](), list[bool]()
        #: tensors that are true where numbers would lead another way, if nobody reads them
        self.flags = list[Tensor]()

    def decide(self, condition: Tensor, serves_both: bool) -> bool:
        """Whether a condition holds; what is noted, is in order."""
        self.way.append(bool(condition))
        self.read.append(self.way[-1])
        return self.way[-1]

    def guard(self, way: bool, other: Tensor, serves_both: bool) -> bool:
        """Have a flag where numbers would lead the ``other`` way, unless the way goes there, too."""
        if not (way and serves_both):
            self.flags.append(other)
        return way


class Traced(Decisions):
    """Of a step that is recorded as a graph, which keeps this way."""

    def decide(self, condition: Tensor, serves_both: bool) -> bool:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # which imports sympy

        with disable_proxy_modes_tracing():
            way = super().decide(condition, serves_both)
        return self.guard(way, condition.ne(way), serves_both)


class Mapped(Decisions):
    """Of a computation that is mapped by :func:`torch.func.vmap`, under which nothing can be read: it goes the way of
    another, which has read these.
    """

    def __init__(self, leader: Iterable[bool], flags: list[Tensor]) -> None:
        super().__init__()
        self.leader, self.flags = iter(leader), flags

    def decide(self, condition: Tensor, serves_both: bool) -> bool:
        way = next(self.leader, None)
        # One that asks for more than its leader did is on another way already.
        other = torch.ones_like(condition, dtype=torch.bool) if way is None else condition.ne(way)
        return self.guard(bool(way), other, serves_both)


_DECISIONS: ContextVar[Any] = ContextVar("decisions of a step", default=None)


def deciding(decisions: Decisions) -> Any:
    """Note in ``decisions`` what is :func:`decided`."""
    return setting(_DECISIONS, decisions)


def is_traced() -> bool:
    """Whether this is part of a step that is recorded as a graph."""
    return isinstance(_DECISIONS.get(), Traced)


def decided(condition: Union[bool, Tensor], serves_both: bool = False) -> bool:
    """Whether a condition holds, read from its device. A recorded step keeps the way that this decides; where another
    computation leads, it is whether the condition held there.

    :param serves_both: whether the way where it holds is right where it does not, too.
    """
    found = _DECISIONS.get()
    if found is None:
        return bool(condition)
    if isinstance(condition, Tensor):
        return found.decide(condition, serves_both)
    found.way.append(condition)
    return condition


def passed_on(value: Tensor, made: object) -> Any:
    """A tensor of a subclass, which a recording takes for the one that it was made of."""
    if is_traced():
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        tracker: Any = get_proxy_mode().tracer.tensor_tracker  # type: ignore[union-attr]
        if value in tracker:
            tracker[made] = tracker[value]
    return made
