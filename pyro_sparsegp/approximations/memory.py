"""Remembering what was computed, for as long as all that it was computed from is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..kernels import Kernel

__all__ = ["Held", "Memory", "contents", "equal"]

_PACKAGE = __name__.partition(".")[0]
_OF_MODULES = set(vars(nn.Module()))


class Held:
    """A large tensor to compare by identity and version, instead of by a copy of its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, None if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Held) and self.tensor is other.tensor
        return same and self.version is not None and self.version == other.version  # type: ignore[union-attr,attr-defined]

    __hash__ = None  # type: ignore[assignment]


def contents(item: Any) -> Optional[list[Any]]:
    """All the numbers and tensors that a kernel of ours is made of, its networks' too; ``None`` if there is more."""
    if isinstance(item, Tensor):
        return [item.detach().clone()]
    if item is None or isinstance(item, (bool, int, float, str, Held)):
        return [item]
    if isinstance(item, nn.Module):
        return _of_module(item)
    if isinstance(item, Kernel) and type(item).__module__.startswith(_PACKAGE):
        item = [type(item).__qualname__, *vars(item).values()]
    if not isinstance(item, (list, tuple)):
        return None
    found: list[Any] = [len(item)]
    for part in item:
        inner = contents(part)
        if inner is None:
            return None
        found.extend(inner)
    return found


def _of_module(module: nn.Module) -> Optional[list[Any]]:
    # Layers that come with torch are functions of their tensors and plain attributes. Of other modules, which may look
    # anywhere, we can't know.
    if not type(module).__module__.startswith("torch.nn."):
        return None
    values = vars(module)
    if any(values[name] for name in values if name.endswith("_hooks")):
        return None
    own = [value for name, value in values.items() if name not in _OF_MODULES]
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return contents([type(module).__qualname__, module.training, own, tensors, list(module._modules.values())])


def equal(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists of :func:`contents` are the same."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or not torch.equal(a, b):
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True


class Memory:
    """The last result of a computation; copies of it are empty."""

    def __init__(self) -> None:
        self._last: Optional[tuple[list[Any], Any]] = None

    def recall(self, key: Optional[list[Any]], compute: Callable[[], Any]) -> Any:
        """The last result, if it had the same key; with gradients, or without a key, it is computed and not kept."""
        if key is None or torch.is_grad_enabled():
            self._last = None
            return compute()
        if self._last is None or not equal(self._last[0], key):
            self._last = key, compute()
        return self._last[1]

    def __deepcopy__(self, memo: Any) -> Memory:
        return Memory()

    def __reduce__(self) -> Any:
        return Memory, ()
