"""Sums over processes that hold a share of the data each."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Optional

import torch
from torch import Tensor

from .functions import Function, setting


class _AllReduce(Function):
    """The sum over processes. What each makes of it adds up: so do the gradients by it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: object) -> Tensor:
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
    """The processes of a ``torch.distributed`` group, or this one alone."""

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

    def largest(self, value: Tensor) -> Tensor:
        """The largest of the processes' values."""
        if self.num == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, group=self.group)
        return total

    @torch.no_grad()
    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the first one's values."""
        for tensor in tensors if self.num > 1 else ():
            value = tensor.detach().contiguous()
            torch.distributed.broadcast(value, group=self.group, group_src=0)
            tensor.data.copy_(value)


def put_gradients(parameters: Sequence[Tensor], total: Callable[..., list[Tensor]]) -> None:
    """Put what processes make of the parameters' gradients together, such as :meth:`Workers.sum`, in their place."""
    gradients = total(*[torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient


# Of steps on mini-batches, whose plates scale each process's rows up to all data: the processes, this one's weight.
_sharing: ContextVar[tuple[Workers, float]] = ContextVar("sharing", default=(Workers(None), 1.0))


def sharing(group: Optional[Any], weight: float = 1.0) -> Any:
    """Steps of SVI within are of all the processes of a group together, each with rows of its own.

    :param group: a ``torch.distributed`` process group; ``None`` changes nothing.
    :param weight: how many rows this process's batch stands for, beside the others': equal ones by default.
    """
    return setting(_sharing, (Workers(group), weight))


def is_shared() -> bool:
    """Whether several processes step together here."""
    return _sharing.get()[0].num > 1


def joined(*values: Tensor) -> list[Tensor]:
    """What one process with the batches of all would have for sums over a batch's rows that plates scale up to N, as
    losses and gradients are. Outside of :func:`sharing`, the values. All processes give as many, in the same order.
    """
    # Of process r's batch the sum is s_r = c + (N/b_r) Σₙ tₙ, with the same c (a divergence) in all. With weights b_r
    # the joined batch has Σ_r b_r s_r / Σ_r b_r = c + (N/Σ_r b_r) Σₙ tₙ.
    workers, weight = _sharing.get()
    if workers.num == 1:
        return list(values)
    with torch.no_grad():
        *sums, total = workers.sum(*[weight * value for value in values], values[0].new_full((), weight))
    return [(part / total).to(value) for part, value in zip(sums, values)]


def largest(value: Tensor) -> Tensor:
    """The largest of the processes' values; outside of :func:`sharing`, the value itself."""
    return _sharing.get()[0].largest(value)


def total_share(share: float, like: Tensor) -> float:
    """The sum of the processes' shares of all rows; outside of :func:`sharing`, the share itself."""
    return float(_sharing.get()[0].sum(like.new_full((), share))[0]) if is_shared() else share


def by_draws(draw: Tensor, value: Tensor) -> list[tuple[float, Tensor, Tensor]]:
    """Of what is a nonlinear function of a draw and of a sum over rows: the draws of all processes, each once, with its
    share of the rows and the sum, :func:`joined`, over the processes that have it.
    """
    # with one seed in all of them that is one draw with all rows
    workers, weight = _sharing.get()
    if workers.num == 1:
        return [(1.0, draw, value)]
    own = torch.cat([draw.flatten(), weight * value.flatten(), value.new_full((1,), weight)])
    every = [torch.empty_like(own) for _ in range(workers.num)]
    torch.distributed.all_gather(every, own, group=workers.group)
    sums: dict[tuple[float, ...], Tensor] = {}
    for found in every:
        key = tuple(found[: draw.numel()].tolist())
        sums[key] = sums.get(key, 0) + found[draw.numel() :]
    total = float(sum(found[-1] for found in sums.values()))
    return [
        (float(found[-1]) / total, draw.new_tensor(key).view_as(draw), (found[:-1] / found[-1]).view_as(value))
        for key, found in sums.items()
    ]
