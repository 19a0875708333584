"""Networks whose outputs are the inputs of GP sites, which natural steps follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Optional
from weakref import ref

import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..process import GaussianProcess, Origin
from ..program.traces import repeatable

_ROWS, _EACH, _LEAST = 256, 4, 2  # rows that say how features move: so many at least, so many a point; below, too few


class Calls:
    """The modules that a run calls: which of them a tensor is the output of.

    Outputs are not kept: without gradients a network's hidden values go as it is done with them.

    :param keeps: whether their inputs are, which :func:`rows_to_follow` asks for.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._found: dict[int, tuple[ref[Tensor], Origin]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of the modules that are called."""

        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if torch.compiler.is_compiling():  # of the parts of a compiled module there is no tensor to be known by
                return
            if isinstance(output, Tensor) and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
                # Of nested ones the outermost is the last.
                origin = Origin(module, args[0], output.grad_fn) if self._keeps else Origin(module)
                # id() may be another tensor's once this one is gone: the weak reference tells.
                self._found[id(output)] = ref(output), origin

        before, self._found = self._found, {}
        handle = register_module_forward_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            self._found = before

    def origin(self, x: Tensor) -> Optional[Origin]:
        """What gave x in this run, if it is noted."""
        output, origin = self._found.get(id(x), (None, None))
        return origin if output is not None and output() is x else None


def rows_to_follow(process: GaussianProcess, size: int) -> Optional[tuple[Tensor, list[str]]]:
    """Rows of a network's inputs, ``(K, d)``, at which it tells how a process's inputs move, and its parameters'
    names; ``None`` if these inputs do not train, come from no network, or from one whose output at some rows may be
    another than at all, or than before.

    A network that takes no other number of rows raises an error of its own, of whatever kind.

    :param size: the number of inducing points among the outputs.
    """
    x, origin = process.x, process.origin
    if origin is None or origin.inputs is None:
        return None
    network, inputs, num = origin.network, origin.inputs, len(origin.inputs)
    own = [part for part in network.modules() if isinstance(part, PyroModule)]
    # torch.compile's is anew for each hook.
    compiled = [name for name, _ in network.named_modules() if name.endswith("_orig_mod")]
    fits = (
        x.requires_grad
        and not inputs.requires_grad
        and x.grad_fn is origin.grad_fn  # else it was written into since
        and not [*own, *compiled, *network.buffers()]
        and (inputs.dim(), x.dim(), len(x)) == (2, 2, num)
        and num >= _LEAST * size
        and not torch.distributed.is_initialized()  # processes would have other rows each
    )
    # test_networks.py::test_networks_of_their_own_kind_train_on
    with suppress(Exception), repeatable(x), torch.no_grad(), poutine.block():  # dropout draws
        some = torch.arange(0, num, -(-num // 7), device=x.device)
        tolerance = torch.finfo(x.dtype).eps ** 0.5
        if fits and torch.allclose(network(inputs[some]), x[some], tolerance, tolerance):
            return inputs[rows_kept(x, size)], origin.parameters
    return None


def rows_kept(x: Tensor, size: int) -> Tensor:
    """The numbers of rows, of all that x has, that tell how ``size`` features move."""
    return torch.linspace(0, len(x) - 1, min(len(x), max(_ROWS, _EACH * size)), device=x.device).long()
