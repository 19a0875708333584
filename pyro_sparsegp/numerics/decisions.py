"""Numbers that decide which way a step goes: read, and, where the step is recorded as a graph, guarded."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from torch import Tensor

from .functions import held


@dataclass
class Decisions:
    """The way that a step has gone.

    :param flags: where it is recorded, tensors that are true where a replay would go another way.
    """

    flags: Optional[list[Tensor]] = None
    way: list[bool] = field(default_factory=list)


_DECISIONS: ContextVar[Optional[Decisions]] = ContextVar("decisions of a step", default=None)


def deciding(decisions: Decisions) -> Any:
    """Note in ``decisions`` what is :func:`decided`."""
    return held(_DECISIONS, decisions)


def is_recorded() -> bool:
    """Whether this is part of a step that is recorded as a graph."""
    return (found := _DECISIONS.get()) is not None and found.flags is not None


def decided(condition: Union[bool, Tensor], serves_both: bool = False) -> bool:
    """Whether a condition holds, read from its device. A recorded step keeps the way that this decides.

    :param serves_both: whether the way where it holds is right where it does not, too.
    """
    found = _DECISIONS.get()
    if found is None:
        return bool(condition)
    if found.flags is None or not isinstance(condition, Tensor):
        found.way.append(bool(condition))
        return found.way[-1]
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # which imports sympy

    with disable_proxy_modes_tracing():
        found.way.append(bool(condition))
    if not (found.way[-1] and serves_both):
        found.flags.append(~condition if found.way[-1] else condition)
    return found.way[-1]


def passed_on(value: Tensor, made: Any) -> Any:
    """A tensor of a subclass, which a recording takes for the one that it was made of."""
    if is_recorded():
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        tracker: Any = get_proxy_mode().tracer.tensor_tracker  # type: ignore[union-attr]
        if value in tracker:
            tracker[made] = tracker[value]
    return made
