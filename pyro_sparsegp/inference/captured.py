"""Operations that a GPU launches by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Captured"]

_WARM = 2  # runs before the capture, in which libraries make their handles and workspaces


class Captured:
    """A function of tensors on a GPU, captured as a CUDA graph: the host launches it by one call.

    Inputs are copied to where they were when it was captured, and results from where the next run leaves its own.

    :param function: a fixed list of torch's operations, of which none waits for the device.
    :param inputs: as later runs have them, but for their numbers.
    :raises RuntimeError: if the device can't capture it.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(here)
        with torch.no_grad(), torch.cuda.stream(beside):
            for _ in range(_WARM):
                function(*self._inputs)
        here.wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._found: Sequence[Tensor] = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return [tensor.clone() for tensor in self._found]
