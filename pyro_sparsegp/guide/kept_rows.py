"""A few of the rows that a guide absorbed, which are absorbed anew when hyperparameters move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch
from torch import Tensor

__all__ = ["KeptRows", "joined_rows", "picked_rows", "some_of"]


@dataclass(frozen=True)
class KeptRows:
    """Rows of a model's arguments, each of all rows seen among them with the same probability (Vitter, 1985).

    :param args: the arguments of a call with these rows alone.
    :param kwargs: its keyword arguments.
    :param num: how many rows.
    :param most: how many are wanted.
    :param seen: how many rows were seen in all.
    :param sums: of each GP site, what these rows are of (G, r), and the L that these belong to.
    :param steps: of each GP site, how many steps its posterior had taken.
    """

    args: tuple
    kwargs: dict[str, Any]
    num: int
    most: int
    seen: int
    sums: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> KeptRows:
        """With all tensors converted, to another dtype or device."""
        args, kwargs = _walk(lambda part, _: function(part), (self.args, self.kwargs), (self.args, self.kwargs))
        sums = {name: tuple(map(function, parts)) for name, parts in self.sums.items()}
        return replace(self, args=args, kwargs=kwargs, sums=sums)  # type: ignore[arg-type]


def joined_rows(
    kept: Optional[KeptRows], args: tuple, kwargs: dict[str, Any], num: int
) -> tuple[tuple, dict[str, Any]]:
    """Arguments with the kept rows before ``num`` new ones.

    :raises ValueError: if an argument's rows are not its first dimension.
    """
    _walk(lambda part, _: _require_rows(part, num), (args, kwargs), (args, kwargs))
    if kept is None:
        return args, kwargs

    def join(new: Tensor, old: Any) -> Tensor:
        if not _has_rows(new, num):
            return new
        if not isinstance(old, Tensor) or old.shape[1:] != new.shape[1:]:
            raise ValueError(
                f"absorb's arguments have a tensor of shape {tuple(new.shape)} where the rows kept before have "
                f"{tuple(old.shape) if isinstance(old, Tensor) else type(old).__name__}: call it as before."
            )
        return torch.cat([old.to(new), new])

    try:
        found = _walk(join, (args, kwargs), (kept.args, kept.kwargs))
    except (IndexError, KeyError, TypeError):
        raise ValueError(
            "absorb's arguments are not those of the calls whose rows it kept: call it as before."
        ) from None
    return found


def picked_rows(args: tuple, kwargs: dict[str, Any], num: int, rows: Tensor) -> tuple[tuple, dict[str, Any]]:
    """Arguments with some of their ``num`` rows."""
    tree = args, kwargs
    return _walk(lambda part, _: part[rows.to(part.device)] if _has_rows(part, num) else part, tree, tree)


def some_of(num_kept: int, seen: int, num_new: int, most: int) -> Tensor:
    """Which to keep of kept rows, that stand for ``seen``, and of new ones after them: their numbers."""
    generator = torch.Generator().manual_seed(seen)
    size = min(most, num_kept + num_new)
    old = seen
    left = seen + num_new
    from_old = 0
    for draw in torch.rand(size, generator=generator).tolist():
        if draw * left < old:
            from_old, old = from_old + 1, old - 1
        left -= 1
    from_old = max(min(from_old, num_kept), size - num_new)
    first = torch.randperm(num_kept, generator=generator)[:from_old]
    return torch.cat([first, num_kept + torch.randperm(num_new, generator=generator)[: size - from_old]])


def _has_rows(part: Tensor, num: int) -> bool:
    return part.dim() > 0 and part.shape[0] == num


def _require_rows(part: Tensor, num: int) -> Tensor:
    if num in part.shape[1:] and not _has_rows(part, num):
        raise ValueError(
            f"absorb's memory= keeps rows of arguments, whose first dimension they are; one has the shape "
            f"{tuple(part.shape)} for {num} rows: give it transposed."
        )
    return part


def _walk(function: Callable[[Tensor, Any], Tensor], item: Any, other: Any) -> Any:
    """A tree of arguments, with a function of each tensor and of what stands in its place in another tree."""
    if isinstance(item, Tensor):
        return function(item, other)
    if isinstance(item, dict):
        return {key: _walk(function, part, other[key]) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_walk(function, part, other[i]) for i, part in enumerate(item))
    return item
