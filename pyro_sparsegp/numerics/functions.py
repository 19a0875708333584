"""Custom gradients, and matrices of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual


class Function(torch.autograd.Function):
    """:class:`torch.autograd.Function`, whose ``apply`` looks up the signature of ``forward`` and binds arguments to it
    at each call: here they are all given, by position. Its ``jvp`` may stand within another: torch turns forward mode
    off while it runs, and so drops what an outer ``jvp`` would know of saved tensors.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "jvp" in vars(cls):
            cls.jvp = staticmethod(_nested(cls.jvp))  # type: ignore[method-assign, assignment]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """The value, with this gradient."""
        is_plain = not torch._C._are_functorch_transforms_active()
        return super(torch.autograd.Function if is_plain else Function, cls).apply(*args)  # type: ignore[misc]


def aligned(in_dims: Sequence[Optional[int]], tensors: Sequence[Optional[Tensor]]) -> list[Optional[Tensor]]:
    """For a rule of ``vmap``: the tensors with the mapped dimension first, of size 1 where there is none, and the same
    number of dimensions; what is ``None`` stays so.
    """
    first = [t if t is None else t[None] if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, in_dims)]
    dims = max(t.dim() for t in first if t is not None)
    return [None if t is None else t.reshape(t.shape[0], *[1] * (dims - t.dim()), *t.shape[1:]) for t in first]


class _Primal:
    """A context whose saved tensors have no tangents at the level of the ``jvp`` that is computed."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        saved = self._ctx.saved_tensors
        return tuple(unpack_dual(part).primal if isinstance(part, Tensor) else part for part in saved)


def _nested(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def within(ctx: Any, *tangents: Any) -> Any:
        with _set_fwd_grad_enabled(True):
            return method(_Primal(ctx), *tangents)

    return within


def jacobian(value: Tensor, x: Tensor, along: Optional[Tensor] = None) -> Tensor:
    """∂ value / ∂x times directions, ``(K, N)``, of N values, by one way back and one through that.

    :param along: the directions, ``(K, len(x))``; by default each entry of x.
    """
    one = torch.zeros_like(value, requires_grad=True)
    (slope,) = torch.autograd.grad(value, x, one, create_graph=True)
    along = torch.eye(len(x), dtype=x.dtype, device=x.device) if along is None else along
    if not slope.requires_grad:
        return slope.new_zeros(len(along), len(value))
    return torch.autograd.grad(slope, one, along, is_grads_batched=True, create_graph=True)[0]


def depends(value: Tensor, x: Tensor) -> bool:
    """Whether x is in a value's graph."""
    return (
        value.requires_grad and torch.autograd.grad(value.sum(), x, allow_unused=True, retain_graph=True)[0] is not None
    )
