"""Functions of tensors: gradients, shapes, and chunks of many rows, whose values are made again on the way back."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Optional, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def shape_of(value: object) -> str:
    """A tensor's shape, or the class of what is none, for errors."""
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def if_known(function: Callable[..., Any], *values: object) -> Any:
    """A function of values, or ``None`` where one of these is: of what is not known nothing is."""
    return None if any(value is None for value in values) else function(*values)


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """As :func:`torch.broadcast_shapes`, whose first call imports sympy, for most of a second."""
    first = next(iter(shapes), ())
    if shapes.count(first) == len(shapes):
        return torch.Size(first)
    return torch.Size(np.broadcast_shapes(*map(tuple, shapes)))


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Have a context variable hold a value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


class Function(torch.autograd.Function):
    """:class:`torch.autograd.Function`, whose ``apply`` looks up the signature of ``forward`` and binds arguments to it
    at each call: here they are all given, by position. Its ``jvp`` may stand within another: torch turns forward mode
    off while it runs, and so drops what an outer ``jvp`` would know of saved tensors.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "jvp" not in vars(cls):
            return
        plain = cls.jvp

        def jvp(ctx: torch.autograd.function.FunctionCtx, *tangents: object) -> Any:
            with _set_fwd_grad_enabled(True):
                return plain(_Primal(ctx), *tangents)

        cls.jvp = staticmethod(jvp)  # type: ignore[method-assign, assignment]

    @classmethod
    def apply(cls, *args: object) -> Any:
        """The value, with this gradient."""
        is_plain = not torch._C._are_functorch_transforms_active()
        return super(torch.autograd.Function if is_plain else Function, cls).apply(*args)  # type: ignore[misc]


class Unmapped(Function):
    """One of what does not depend on quadrature nodes, over which likelihoods are mapped."""

    @staticmethod
    def vmap(info: object, in_dims: object, *inputs: object) -> Any:
        # which torch asks for: test_a_step_and_a_posterior_run_a_model_once
        raise ValueError("q(w) does not depend on quadrature nodes")


def aligned(in_dims: Sequence[Optional[int]], tensors: Sequence[Optional[Tensor]]) -> list[Optional[Tensor]]:
    """For a rule of ``vmap``: the tensors with the mapped dimension first, of size 1 where there is none, and the same
    number of dimensions; what is ``None`` stays so.
    """
    first = [t if t is None else t[None] if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, in_dims)]
    dims = max(t.dim() for t in first if t is not None)
    return [None if t is None else t.reshape(t.shape[0], *[1] * (dims - t.dim()), *t.shape[1:]) for t in first]


class _LogNdtr(Function):
    """log Φ(x), entry by entry: :func:`torch.special.log_ndtr`, which vmap would call once for each of what it maps."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.special.log_ndtr(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # φ/Φ = √(2/π)/erfcx(−x/√2), which is 0 beyond some 13 deviations
        (x,) = ctx.saved_tensors
        return grad * math.sqrt(2 / math.pi) / torch.special.erfcx((-x / math.sqrt(2)).clamp(min=-9.0))

    jvp = backward

    @staticmethod
    def vmap(info: object, in_dims: tuple, x: Tensor) -> Any:
        return _LogNdtr.apply(x), in_dims[0]


log_ndtr = _LogNdtr.apply


class _Primal:
    """A context whose saved tensors have no tangents at the level of the ``jvp`` that is computed."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = tuple(p if p is None else unpack_dual(p).primal for p in ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def jacobian(value: Tensor, x: Tensor, along: Optional[Tensor] = None) -> Tensor:
    """∂ value / ∂x times directions, ``(K, N)``, of N values, by one way back and one through that: along rows of
    ``(K, len(x))``, by default each entry of x.
    """
    one = torch.zeros_like(value, requires_grad=True)
    (slope,) = torch.autograd.grad(value, x, one, create_graph=True)
    along = torch.eye(len(x), dtype=x.dtype, device=x.device) if along is None else along
    # Of a value without slopes, as round gives, no number is in the graph: they are 0.
    slope, batched = slope + slope.new_zeros((), requires_grad=True), {"is_grads_batched": True, "create_graph": True}
    return torch.autograd.grad(slope, one, along, materialize_grads=True, **batched)[0].expand(len(along), -1)


def depends(value: Tensor, x: Tensor) -> bool:
    """Whether x is in a value's graph."""
    if not value.requires_grad:
        return False
    with torch.enable_grad():
        total = value.sum()
    return torch.autograd.grad(total, x, allow_unused=True, retain_graph=True)[0] is not None


_PIECE = 2**21  # numbers that are made at once: what a CPU's caches like
_KEPT = 2**24  # numbers that may stay until the way back
_ROW = 2**9  # numbers that a network is taken to make of a row


def more_on(like: Tensor) -> int:
    """How many times as much as on a CPU is taken at once on a tensor's device."""
    return 1 if like.device.type == "cpu" else 32


def at_once(like: Tensor) -> int:
    """How many numbers, a kernel matrix's for example, are made at once on a tensor's device."""
    return more_on(like) * _PIECE


def is_long(x: Tensor) -> bool:
    """Whether inputs ``(N, D)`` have too many rows to keep what a network makes of all of them."""
    return x.dim() == 2 and x.shape[0] * _ROW > more_on(x) * _KEPT


def pieces(num: int, like: Tensor, cost: int = _ROW) -> list[slice]:
    """Slices of ``num`` items, one after the other; each item takes ``cost`` numbers."""
    size = max(1, at_once(like) // cost)
    return [slice(start, start + size) for start in range(0, max(num, 1), size)]


def dropping(function: Callable, *args: object) -> Any:
    """``function(*args)``, with what it makes on the way dropped, and made again on the way back."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def by_rows(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """The tensors ``(..., N)`` that ``function`` gives at inputs ``(N, D)``, evaluated in pieces if these are many."""
    if not is_long(x):
        return function(x)
    parts = [dropping(function, x[rows]) for rows in pieces(len(x), x)]
    return tuple(torch.cat(part, -1) for part in zip(*parts))


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """``function``, x ↦ ``(..., N)``, evaluated in pieces of rows, where it makes ``width`` numbers a row."""
    return in_pieces(lambda rows: function(x[..., rows, :]), x.shape[-2], width, x, -1)


def in_pieces(function: Callable[[slice], Tensor], num: int, cost: int, like: Tensor, dim: int) -> Tensor:
    """What ``function`` gives for ``num`` items by :func:`pieces`, joined along ``dim``; many numbers that they make on
    the way are dropped, and made again on the way back.
    """
    run = dropping if num * cost > more_on(like) * _KEPT else operator.call
    parts = [run(function, rows) for rows in pieces(num, like, cost)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
