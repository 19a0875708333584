"""Draws of a kernel's process as functions of inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["PriorFunctions", "SourceFunctions", "of_each"]

PriorFunctions = Callable[[Tensor], Tensor]


class SourceFunctions:
    """Draws of f as functions, x ↦ ``(num, ..., N)``, where f is made of the values of g, with the draws of g."""

    def __init__(self, f: PriorFunctions, source: PriorFunctions) -> None:
        self.f, self.source = f, source

    def __call__(self, x: Tensor) -> Tensor:
        return self.f(x)


def of_each(change: Callable[[PriorFunctions], PriorFunctions], draw: PriorFunctions) -> PriorFunctions:
    """``change(draw)``; of draws that have a source, both changed."""
    if isinstance(draw, SourceFunctions):
        return SourceFunctions(change(draw.f), change(draw.source))
    return change(draw)
