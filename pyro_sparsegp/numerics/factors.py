"""Cholesky factors, products and solves with triangular matrices by blocks, and gradients that cost least."""

import functools
import itertools
from contextvars import ContextVar
from typing import Any, Optional

import torch
from torch import Tensor

from .functions import Function, broadcast_shapes, if_known

_LARGE = 256  # from here on blocks pay
_MANY = 8  # right hand sides
_PARTS = 4
ESCALATIONS = 4  # of a jitter, tenfold each
MAPPED: ContextVar[bool] = ContextVar("whether torch.func.vmap runs, whose caller has the flags", default=False)
_ALIASED, _ODD = 128, 8  # rows of which multiples are slow on a CPU, and how many more are not

# Products by blocks leave out blocks of zeros, and half of what is symmetric: a library's triangular product costs as
# much as a full one, its symmetric product is not to be had. Operations that can be differentiated and mapped.


def _blocks(num: int) -> list[tuple[int, int]]:
    size = 64 * -(-num // (64 * _PARTS))
    return list(itertools.pairwise([*range(0, num, size), num]))


def tril_of_product(a: Tensor, b: Tensor, symmetric: bool = False, lower: bool = False) -> Tensor:
    """AᵀB, ``(..., M, M)``, up to the last block on the diagonal of each row; what is above is filled where AᵀB is
    symmetric, else it means nothing. With ``lower`` A is lower triangular, and so is B, or all of B that is needed.
    """
    if a.shape[-1] < _LARGE or a.dim() > 2 or b.dim() > 2:
        return a.mT @ b
    whole = (a[:1, :1] * b[:1, :1]).new_zeros(a.shape[-1], a.shape[-1])  # mapped, where one of them is
    for i, j in _blocks(a.shape[-1]):
        first = i if lower else 0
        whole[i:j, :j] = row = a[first:, i:j].mT @ b[first:, :j]
        if symmetric:
            whole[:i, i:j] = row[:, :i].mT
    return whole


# AᵀB where that is symmetric: of A, (..., N, M), and A with scaled rows, say.
gram = functools.partial(tril_of_product, symmetric=True)


# LAPACK's matrices lie in memory by columns: where right hand sides do, a transposition away, no copy has to turn them.
# Those of AL⁻ᵀ do in LX = Aᵀ (1.4 to 3 times as quick as XLᵀ = A in float32 on one AMD EPYC, alike on another); many of
# L⁻¹B do in XLᵀ = Bᵀ. In LX = Aᵀ an L by rows, LAPACK's transpose, is there 1.3 to 1.9 times as quick as one by
# columns, its copy included.


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """L⁻¹B for a lower triangular L, ``(..., M, M)``, and B, ``(..., M, K)``."""
    if right.shape[-1] < _MANY:
        return torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, right.mT, upper=True, left=False).mT


def over_upper(rows: Tensor, factor: Tensor) -> Tensor:
    """AL⁻ᵀ, ``(..., N, M)``, by rows, for a lower triangular L, ``(..., M, M)``."""
    return torch.linalg.solve_triangular(factor.contiguous(), rows.mT, upper=False).mT


def over_lower(rows: Tensor, factor: Tensor) -> Tensor:
    """AL⁻¹, ``(..., N, M)``, by rows, for a lower triangular L, ``(..., M, M)``."""
    return torch.linalg.solve_triangular(factor.mT.contiguous(), rows.mT, upper=True).mT


def factorised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`torch.linalg.cholesky_ex`. A CPU's caches map columns of 128 numbers, or a multiple, to few places, where
    LAPACK takes 2 to 3 times as long: they get 8 more.
    """
    num = matrix.shape[-1]
    if num % _ALIASED or matrix.device.type != "cpu":
        return torch.linalg.cholesky_ex(matrix)
    # blockdiag(A, I), of whose factor A's is cut out
    wide = torch.nn.functional.pad(matrix, (0, _ODD, 0, _ODD))
    wide.diagonal(dim1=-2, dim2=-1)[..., num:].fill_(1)
    factor, info = torch.linalg.cholesky_ex(wide)
    return factor[..., :num, :num].mT.contiguous().mT, info


class Factor(Function):
    """(A, εs) ↦ L, with LLᵀ = A + εsI, in a dtype that may be narrower than A's, zeros, whose derivative is L⁻¹dL, and
    a flag. The gradient by those comes in that dtype: to go on in A's would cost more and add no digits.
    """

    @staticmethod
    def forward(matrix: Tensor, shift: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        shifted = matrix.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift[..., None])
        factor, info = factorised(shifted)
        # Memory of its own, that a jvp writes to: test_whitening_is_that_of_the_factor
        return factor.to(dtype), torch.zeros_like(matrix, dtype=dtype), info

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])
        ctx.wide = inputs[0].dtype
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, by_factor: Any, by_turn: Any, _: object) -> tuple[Optional[Tensor], None, None]:
        (factor,) = ctx.saved_tensors
        # Ā = ½L⁻ᵀ(P + Pᵀ)L⁻¹ with P the lower triangle of LᵀL̄, its diagonal halved (Murray, 2016, eq. 10). Without Pᵀ
        # the rounding of an antisymmetric part that is far larger would stay.
        inner = if_known(lambda grad: tril_of_product(factor, grad, lower=True), by_factor)
        parts = [part for part in (inner, by_turn) if part is not None]
        if not parts:
            return None, None, None
        lower = sum(parts[1:], parts[0]).tril()
        both = (lower + lower.tril(-1).mT).mul_(0.5)
        left = over_lower(both, factor)  # PL⁻¹, whose transpose is L⁻ᵀP
        # It is symmetric: its transpose is in the order of A's rows, which a solve's result is not.
        return torch.linalg.solve_triangular(factor, left.mT, upper=False, left=False).mT.to(ctx.wide), None, None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *_: object) -> tuple[Tensor, Tensor, None]:
        (factor,) = ctx.saved_tensors
        # L⁻¹dL = tril½(L⁻¹ dA L⁻ᵀ), tril½ the lower triangle with its diagonal halved (Murray, 2016, eq. 8).
        left = solve_lower(factor, change.to(factor))
        inner = torch.linalg.solve_triangular(factor.mT, left, upper=True, left=False)
        turn = inner.tril() - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
        return factor @ turn, turn, None

    @staticmethod
    def vmap(info: object, in_dims: Any, *inputs: Any) -> Any:
        # the mapped dimension first
        pairs = zip(inputs[:2], in_dims)
        matrix, shift = (part[None] if dim is None else part.movedim(dim, 0) for part, dim in pairs)
        matrix = matrix.expand(*broadcast_shapes(matrix.shape[:-2], shift.shape), *matrix.shape[-2:])
        found = Factor.apply(matrix, shift, inputs[2])
        # A draw that needs more jitter gets it, as alone: to draw its block anew would leave out such draws.
        for _ in range(ESCALATIONS if MAPPED.get() else 0):
            if not (failed := found[2] != 0).any():
                break
            shift = torch.where(failed, 10 * shift, shift).expand(failed.shape)
            found = Factor.apply(matrix, shift, inputs[2])
        return found, (0, 0, 0)


class Turn(Function):
    """L ↦ zeros, ``(..., M, M)``, whose derivative is L⁻¹dL, for a lower triangular L, or a full one of this LU and
    pivots: what follows from that alone has its gradient by L, L⁻ᵀ tril(grad), at the cost of one solve.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, *lu: Tensor) -> Tensor:
        return torch.zeros_like(factor)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        factor, *lu = ctx.saved_tensors
        if lu:
            return torch.linalg.lu_solve(*lu, grad, adjoint=True), None, None
        return (torch.linalg.solve_triangular(factor, grad.tril().mT, upper=False, left=False).mT,)

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *_: object) -> Tensor:
        factor, *lu = ctx.saved_tensors
        return torch.linalg.lu_solve(*lu, change) if lu else solve_lower(factor, change)


class Whitened(Function):
    """(B, L, zeros of L's) ↦ BL⁻ᵀ. The gradient by L goes to the zeros, as that by L⁻¹dL: with d(BL⁻ᵀ) = dB L⁻ᵀ −
    BL⁻ᵀ(L⁻¹dL)ᵀ neither a solve nor, on the way back through the factorisation, a product is needed for it.

    With A = LLᵀ too it is L + (B − A)L⁻ᵀ, whose rounding is that of a difference, and L where B is A.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(cross: Tensor, factor: Tensor, turn: Tensor, own: Optional[Tensor] = None) -> Tensor:
        return over_upper(cross, factor) if own is None else factor + over_upper((cross - own).to(factor), factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)
        ctx.save_for_forward(inputs[1], output)
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], None, Optional[Tensor], None]:
        factor, phi = ctx.saved_tensors
        by_cross = by_turn = None
        if ctx.needs_input_grad[0]:
            by_cross = over_lower(grad, factor).sum_to_size(ctx.shape)
        if ctx.needs_input_grad[2]:
            by_turn = tril_of_product(grad, phi).sum_to_size(factor.shape).neg_()
        return by_cross, None, by_turn, None

    @staticmethod
    def jvp(ctx: Any, dcross: Optional[Tensor], _: object, dturn: Optional[Tensor], __: object = None) -> Tensor:
        factor, phi = ctx.saved_tensors
        total = torch.zeros_like(phi)
        if dcross is not None:
            total = total + over_upper(dcross.to(factor), factor)
        return total if dturn is None else total - phi @ dturn.mT
