"""Sums over processes that hold a share of the data each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from .functions import Function

__all__ = ["Workers", "by_draws", "do_due", "due", "is_shared", "joined", "largest", "sharing", "total_share"]


class _AllReduce(Function):
    """The sum over processes. What each makes of it adds up: so do the gradients by it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class Workers:
    """The processes of a ``torch.distributed`` group, or this one alone.

    :param group: a process group, or ``None``.
    :raises ValueError: if there is none of that kind.
    """

    def __init__(self, group: Optional[Any]) -> None:
        if group is not None and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ValueError(
                "group needs torch.distributed: run the script by torchrun and call "
                "torch.distributed.init_process_group('gloo'), or 'nccl' on GPUs, before"
            )
        self.group = group
        self.num = 1 if group is None else torch.distributed.get_world_size(group)

    def sum(self, *values: Tensor) -> list[Tensor]:
        """The sums over processes, with gradients, by one message."""
        if self.num == 1:
            return list(values)
        flat = _AllReduce.apply(torch.cat([value.reshape(-1) for value in values]), self.group)
        return [part.reshape(value.shape) for part, value in zip(flat.split([v.numel() for v in values]), values)]

    def gather(self, value: Tensor) -> list[Tensor]:
        """The processes' values, in their order."""
        if self.num == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.num)]
        torch.distributed.all_gather(found, value.contiguous(), group=self.group)
        return found

    def largest(self, value: Tensor) -> Tensor:
        """The largest of the processes' values."""
        total = value.clone()
        if self.num > 1:
            torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, group=self.group)
        return total

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Put the sums of the parameters' gradients over processes in their place."""
        if self.num == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for p, total in zip(parameters, self.sum(*gradients)):
            p.grad = total

    @torch.no_grad()
    def agree(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the first one's values."""
        if self.num == 1:
            return
        assert self.group is not None
        source = torch.distributed.get_global_rank(self.group, 0)
        for tensor in tensors:
            value = tensor.detach().contiguous()
            torch.distributed.broadcast(value, source, group=self.group)
            tensor.data.copy_(value)


# Steps on mini-batches, whose plates scale each process's rows up to all data.


@dataclass
class _Shared:
    workers: Workers
    weight: float
    due: dict[int, Callable[[], None]] = field(default_factory=dict)


_sharing: ContextVar[Optional[_Shared]] = ContextVar("sharing", default=None)


@contextmanager
def sharing(group: Optional[Any], weight: float = 1.0) -> Iterator[None]:
    """Steps of SVI within are of all the processes of a group together, each with rows of its own.

    :param group: a ``torch.distributed`` process group; ``None`` changes nothing.
    :param weight: how many rows this process's batch stands for, beside the others': equal ones by default.
    """
    token = _sharing.set(None if group is None else _Shared(Workers(group), weight))
    try:
        yield
        do_due()
    finally:
        _sharing.reset(token)


def is_shared() -> bool:
    """Whether this is within :func:`sharing`."""
    return _sharing.get() is not None


def due(key: object, task: Callable[[], None]) -> None:
    """Within :func:`sharing`, have a task that joins sums done where all processes come by, at :func:`do_due`.

    :param key: a task of the same takes its place.
    """
    found = _sharing.get()
    if found is not None:
        found.due[id(key)] = task


def do_due() -> None:
    """Do the tasks that are due, in the order in which they were named: the same in all processes."""
    found = _sharing.get()
    if found is not None:
        tasks, found.due = list(found.due.values()), {}
        for task in tasks:
            task()


@torch.no_grad()
def joined(*values: Tensor) -> list[Tensor]:
    """What one process with the batches of all would have for sums over a batch's rows that plates scale up to N.

    Of process r's batch the sum is s_r = c + (N/b_r) Σₙ tₙ, with the same c (a divergence) in all. With weights b_r
    the joined batch has Σ_r b_r s_r / Σ_r b_r = c + (N/Σ_r b_r) Σₙ tₙ. Losses, gradients and sums of sites are such.
    Outside of :func:`sharing`, the values themselves.

    :param values: of any shapes; all processes give as many, in the same order.
    """
    found = _sharing.get()
    if found is None or found.workers.num == 1:
        return list(values)
    *sums, total = found.workers.sum(*[found.weight * value for value in values], values[0].new_full((), found.weight))
    return [(part / total).to(value) for part, value in zip(sums, values)]


@torch.no_grad()
def largest(value: Tensor) -> Tensor:
    """The largest of the processes' values; outside of :func:`sharing`, the value itself."""
    found = _sharing.get()
    return value if found is None else found.workers.largest(value)


@torch.no_grad()
def total_share(share: float, like: Tensor) -> float:
    """The sum of the processes' shares of all rows; outside of :func:`sharing`, the share itself."""
    found = _sharing.get()
    if found is None or found.workers.num == 1:
        return share
    (total,) = found.workers.sum(like.new_full((), share))
    return float(total)


@torch.no_grad()
def by_draws(draw: Tensor, value: Tensor) -> list[tuple[float, Tensor, Tensor]]:
    """Of what is a nonlinear function of a draw and of a sum over rows: the draws of all processes, each once, with its
    share of the rows and the sum, :func:`joined`, over the processes that have it. With one seed in all of them that is
    one draw with all rows. Outside of :func:`sharing`, the draw and the value themselves.

    :param draw: of this process, of any shape.
    :param value: by its rows, of any shape.
    """
    found = _sharing.get()
    if found is None or found.workers.num == 1:
        return [(1.0, draw, value)]
    flat = torch.cat([draw.flatten(), value.flatten(), value.new_full((1,), found.weight)])
    sums: list[list[Tensor]] = []
    for one in found.workers.gather(flat):
        own, (of_rows, weight) = one[: draw.numel()], one[draw.numel() :].split([value.numel(), 1])
        same = next((known for known in sums if torch.equal(known[0], own)), None)
        if same is None:
            sums.append([own, weight, weight * of_rows])
        else:
            same[1], same[2] = same[1] + weight, same[2] + weight * of_rows
    total = float(sum(weight for _, weight, _ in sums))
    return [
        (float(weight) / total, own.view_as(draw), (of_rows / weight).view_as(value)) for own, weight, of_rows in sums
    ]
