"""Numbers that decide which way a computation goes: read, and, where it is recorded or mapped, guarded."""

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .functions import held


@dataclass
class Decisions:
    """The way that a computation has gone.

    :param flags: where it is recorded or mapped, tensors that are true where numbers would lead another way.
    :param leader: where it is mapped by :func:`torch.func.vmap`, under which nothing can be read, what another has
        read, whose way this one goes.
    """

    flags: Optional[list[Tensor]] = None
    leader: Optional[Iterator[bool]] = None
    way: list[bool] = field(default_factory=list)
    read: list[bool] = field(default_factory=list)  # of these, what was read from tensors


_DECISIONS: ContextVar[Optional[Decisions]] = ContextVar("decisions of a step", default=None)


def deciding(decisions: Decisions) -> Any:
    """Note in ``decisions`` what is :func:`decided`."""
    return held(_DECISIONS, decisions)


def is_recorded() -> bool:
    """Whether this is part of a step that is recorded as a graph."""
    return (found := _DECISIONS.get()) is not None and found.flags is not None and found.leader is None


def decided(condition: Union[bool, Tensor], serves_both: bool = False) -> bool:
    """Whether a condition holds, read from its device. A recorded step keeps the way that this decides; where another
    computation leads, it is whether the condition held there.

    :param serves_both: whether the way where it holds is right where it does not, too.
    """
    found = _DECISIONS.get()
    if found is None:
        return bool(condition)
    if found.leader is not None:
        return _followed(found, condition, serves_both) if isinstance(condition, Tensor) else condition
    if found.flags is None or not isinstance(condition, Tensor):
        found.way.append(bool(condition))
        found.read += found.way[-1:] if isinstance(condition, Tensor) else []
        return found.way[-1]
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # which imports sympy

    with disable_proxy_modes_tracing():
        found.way.append(bool(condition))
    if not (found.way[-1] and serves_both):
        found.flags.append(~condition if found.way[-1] else condition)
    return found.way[-1]


def _followed(found: Decisions, condition: Tensor, serves_both: bool) -> bool:
    way = next(found.leader, None)  # type: ignore[arg-type]
    if not (way and serves_both):
        # One that asks for more than its leader did is on another way already.
        flag = torch.ones_like(condition, dtype=torch.bool) if way is None else condition.ne(way)
        found.flags.append(flag)  # type: ignore[union-attr]
    return bool(way)


def passed_on(value: Tensor, made: object) -> Any:
    """A tensor of a subclass, which a recording takes for the one that it was made of."""
    if is_recorded():
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        tracker: Any = get_proxy_mode().tracer.tensor_tracker  # type: ignore[union-attr]
        if value in tracker:
            tracker[made] = tracker[value]
    return made
