"""Networks whose outputs are the inputs of GP sites, which natural steps follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..process import GaussianProcess, Origin
from ..program.traces import repeatable

__all__ = ["Calls", "rows_to_follow"]

_ROWS, _EACH, _LEAST = 256, 4, 2  # rows that say how features move: so many at least, so many a point; below, too few


class Calls:
    """The modules that a run calls: which of them a tensor is the output of."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Origin]] = {}  # outputs are kept, so that no other takes the id

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of the modules that are called."""

        def note(module: nn.Module, args: tuple, output: Any) -> None:
            if isinstance(output, Tensor) and len(args) == 1 and isinstance(args[0], Tensor):
                self._found[id(output)] = output, Origin(module, args[0])  # of nested ones the outermost is the last

        before, self._found = self._found, {}
        handle = register_module_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()
            self._found = before

    def origin(self, x: Tensor) -> Optional[Origin]:
        """What gave x in this run, if it is noted."""
        return self._found[id(x)][1] if id(x) in self._found else None


def rows_to_follow(process: GaussianProcess, size: int) -> Optional[Tensor]:
    """Rows of a network's inputs, ``(K, d)``, at which it tells how a process's inputs move; ``None`` if these do not
    train, come from no network, or from one whose output at some rows may be another than at all, or than before.

    :param size: the number of inducing points among the outputs.
    """
    x, origin = process.x, process.origin
    if origin is None or not x.requires_grad or origin.inputs.requires_grad:
        return None
    network, inputs = origin.network, origin.inputs
    if any(isinstance(part, PyroModule) for part in network.modules()) or next(network.buffers(), None) is not None:
        return None
    num = len(inputs)
    if inputs.dim() != 2 or x.dim() != 2 or len(x) != num or num < _LEAST * size:
        return None
    if torch.distributed.is_initialized():  # processes would have other rows each
        return None
    with repeatable(x), torch.no_grad():  # dropout draws
        some = torch.arange(0, num, -(-num // 7), device=x.device)
        alone, tolerance = network(inputs[some]), torch.finfo(x.dtype).eps ** 0.5
    if alone.shape != x[some].shape or not torch.allclose(alone, x[some], tolerance, tolerance):
        return None
    return inputs[torch.linspace(0, num - 1, min(num, max(_ROWS, _EACH * size)), device=x.device).long()]
