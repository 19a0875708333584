"""Sums over processes that hold a share of the data each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

__all__ = ["Workers"]


class _AllReduce(torch.autograd.Function):
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
                "ExpectationPropagation's group needs torch.distributed: run the script by torchrun and call "
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
