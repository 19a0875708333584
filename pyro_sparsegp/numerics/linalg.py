"""Dense linear algebra: a Cholesky factorisation that never fails in silence, and Gaussian divergences."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .functions import Function, mapped_first
from .shapes import broadcast_shapes

__all__ = [
    "NumericalWarning",
    "Unbound",
    "Whitening",
    "above_rounding",
    "cholesky",
    "congruence",
    "default_jitter",
    "factorised",
    "flags_kept",
    "gaussian_kl",
    "gram",
    "lift_to",
    "mirrored",
    "on_diagonal",
    "over_lower",
    "over_upper",
    "plus_one",
    "root_of_inverse",
    "rounding",
    "row_squares",
    "side_by_side",
    "solve_lower",
    "solve_upper",
    "sum_blocks",
    "times_lower",
    "times_upper",
    "tril_of_product",
    "turn_of",
    "variance_floor",
    "whitening",
    "wider",
]

_LARGE = 256  # from here on blocks pay
_ALIASED, _ODD = 128, 8  # rows of which multiples are slow on a CPU, and how many more are not
_MANY = 8  # right hand sides
_PARTS = 4
_ESCALATIONS = 4  # the last attempt uses 10⁴ times the first jitter


class NumericalWarning(UserWarning):
    """A result is usable, but floating point forced a change that the user should know of."""


def wider(x: Tensor) -> torch.dtype:
    """float64 for a float32 tensor on a device that has it; otherwise the tensor's own dtype."""
    return torch.float64 if x.dtype == torch.float32 and x.device.type != "mps" else x.dtype


def default_jitter(dtype: torch.dtype) -> float:
    """Relative jitter of the first Cholesky attempt: 1e-8 in float64, 1e-6 in float32."""
    return 1e-8 if dtype == torch.float64 else 1e-6


_FLAGS: ContextVar[Optional[list[Tensor]]] = ContextVar("flags of Cholesky factorisations", default=None)


@contextmanager
def flags_kept() -> Iterator[list[Tensor]]:
    """Have :func:`cholesky` try the first jitter only and leave its flag, not 0 where there is no factor, to whoever
    reads the list: nothing is read back from the device.
    """
    flags: list[Tensor] = []
    token = _FLAGS.set(flags)
    try:
        yield flags
    finally:
        _FLAGS.reset(token)


class _Factor(Function):
    # (A, εs) ↦ L, with LLᵀ = A + εsI, in a dtype that may be narrower than A's, zeros, whose derivative is L⁻¹dL, and a
    # flag. The gradient by those comes in that dtype: to go on in A's would cost more and add no digits.

    @staticmethod
    def forward(matrix: Tensor, shift: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        shifted = matrix.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift[..., None])
        factor, info = factorised(shifted)
        return factor.to(dtype), torch.zeros_like(matrix, dtype=dtype), info

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])
        ctx.wide = inputs[0].dtype
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, by_factor: Any, by_turn: Any, _: Any) -> tuple[Optional[Tensor], None, None]:
        (factor,) = ctx.saved_tensors
        # Ā = ½L⁻ᵀ(P + Pᵀ)L⁻¹ with P the lower triangle of LᵀL̄, its diagonal halved (Murray, 2016, eq. 10). Without Pᵀ
        # the rounding of an antisymmetric part that is far larger would stay.
        if by_factor is None and by_turn is None:
            return None, None, None
        inner = by_turn if by_factor is None else _tril_of_lower(factor, by_factor)
        both = mirrored(inner if by_factor is None or by_turn is None else inner + by_turn).mul_(0.5)
        left = over_lower(both, factor)  # PL⁻¹, whose transpose is L⁻ᵀP
        # It is symmetric: its transpose is in the order of A's rows, which a solve's result is not.
        return torch.linalg.solve_triangular(factor, left.mT, upper=False, left=False).mT.to(ctx.wide), None, None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        (factor,) = ctx.saved_tensors
        # L⁻¹dL = tril½(L⁻¹ dA L⁻ᵀ), tril½ the lower triangle with its diagonal halved (Murray, 2016, eq. 8).
        left = solve_lower(factor, change.to(factor))
        inner = torch.linalg.solve_triangular(factor.mT, left, upper=True, left=False)
        turn = inner.tril() - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
        return factor @ turn, turn, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, matrix: Tensor, shift: Tensor, dtype: torch.dtype) -> Any:
        matrix = matrix.movedim(in_dims[0], 0) if in_dims[0] is not None else matrix[None]
        shift = shift.movedim(in_dims[1], 0) if in_dims[1] is not None else shift[None]
        matrix = matrix.expand(*broadcast_shapes(matrix.shape[:-2], shift.shape), *matrix.shape[-2:])
        return _Factor.apply(matrix, shift, dtype), (0, 0, 0)


def rounding(matrix: Tensor) -> float:
    """A relative jitter that is as much as a matrix of this size and dtype loses by rounding, Mε."""
    return matrix.shape[-1] * torch.finfo(matrix.dtype).eps


def factorised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`torch.linalg.cholesky_ex`, of a large matrix by halves: as products, which are quicker. A CPU's caches map
    columns of 128 numbers, or a multiple, to few places, where LAPACK takes 2 to 3 times as long: they get 8 more.
    """
    num = matrix.shape[-1]
    if num < 2 * _LARGE or matrix.dim() > 2:
        if num % _ALIASED or matrix.device.type != "cpu":
            return torch.linalg.cholesky_ex(matrix)
        return _within_odd_columns(matrix)
    half = num // 2 + (0 if num // 2 % _ALIASED else _ODD)
    top, flag = factorised(matrix[:half, :half])
    side = over_upper(matrix[half:, :half], top)
    bottom, other = factorised(torch.addmm(matrix[half:, half:], side, side.mT, alpha=-1))
    factor = torch.zeros_like(matrix)
    factor[:half, :half], factor[half:, :half], factor[half:, half:] = top, side, bottom
    return factor, flag.abs() + other.abs()


def _within_odd_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`torch.linalg.cholesky_ex` of blockdiag(A, I), cut out."""
    num = matrix.shape[-1]
    wide = torch.nn.functional.pad(matrix, (0, _ODD, 0, _ODD))
    wide.diagonal(dim1=-2, dim2=-1)[..., num:] = 1
    factor, info = torch.linalg.cholesky_ex(wide)
    return factor[..., :num, :num].mT.contiguous().mT, info


class _Turn(Function):
    # Of L, only whose lower triangle has a gradient.

    @staticmethod
    def forward(factor: Tensor) -> Tensor:
        return torch.zeros_like(factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(ctx.saved_tensors[0], grad.tril().mT, upper=False, left=False).mT

    @staticmethod
    def jvp(ctx: Any, change: Tensor) -> Tensor:
        return solve_lower(ctx.saved_tensors[0], change)

    @staticmethod
    def vmap(info: Any, in_dims: Any, factor: Tensor) -> Any:
        return _Turn.apply(factor.movedim(in_dims[0], 0)), 0


def turn_of(factor: Tensor) -> Tensor:
    """Zeros, ``(..., M, M)``, whose derivative is L⁻¹dL for a lower triangular L: what follows from that alone has its
    gradient by L at the cost of one triangular solve.
    """
    return _Turn.apply(factor)


class _Whitened(Function):
    # (B, L, zeros of L's) ↦ BL⁻ᵀ. The gradient by L goes to the zeros, as that by L⁻¹dL: with d(BL⁻ᵀ) = dB L⁻ᵀ −
    # BL⁻ᵀ(L⁻¹dL)ᵀ neither a solve nor, on the way back through the factorisation, a product is needed for it.

    @staticmethod
    def forward(cross: Tensor, factor: Tensor, turn: Tensor) -> Tensor:
        return over_upper(cross, factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output)
        ctx.save_for_forward(inputs[1], output)
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], None, Optional[Tensor]]:
        factor, phi = ctx.saved_tensors
        by_cross = by_turn = None
        if ctx.needs_input_grad[0]:
            by_cross = over_lower(grad, factor).sum_to_size(ctx.shape)
        if ctx.needs_input_grad[2]:
            by_turn = tril_of_product(grad, phi).sum_to_size(factor.shape).neg_()
        return by_cross, None, by_turn

    @staticmethod
    def jvp(ctx: Any, dcross: Optional[Tensor], _: Any, dturn: Optional[Tensor]) -> Tensor:
        factor, phi = ctx.saved_tensors
        total = torch.zeros_like(phi)
        if dcross is not None:
            total = total + over_upper(dcross, factor)
        return total if dturn is None else total - phi @ dturn.mT

    @staticmethod
    def vmap(info: Any, in_dims: Any, *tensors: Tensor) -> Any:
        found = mapped_first(info, in_dims, tensors)
        dims = max(t.dim() for t in found)
        return _Whitened.apply(*(t.reshape(t.shape[0], *[1] * (dims - t.dim()), *t.shape[1:]) for t in found)), 0


class Whitening(NamedTuple):
    """L with LLᵀ = A + εsI, and B ↦ BL⁻ᵀ.

    :param factor: L, ``(..., M, M)``.
    :param turn: zeros, whose derivative is L⁻¹dL.
    """

    factor: Tensor
    turn: Tensor

    def __call__(self, cross: Tensor) -> Tensor:
        """BL⁻ᵀ, ``(..., N, M)``."""
        return _Whitened.apply(cross, self.factor, self.turn)


def whitening(
    matrix: Tensor,
    jitter: Optional[float] = None,
    what: str = "matrix",
    scale: Optional[Tensor] = None,
    made_of: Callable[[], str] = str,
    dtype: Optional[torch.dtype] = None,
) -> Whitening:
    """:func:`cholesky`, of the same arguments, for products with L⁻ᵀ: gradients through these cost least so."""
    return Whitening(*_first_that_exists(matrix, jitter, what, scale, made_of, dtype or matrix.dtype))


def cholesky(
    matrix: Tensor,
    jitter: Optional[float] = None,
    what: str = "matrix",
    scale: Optional[Tensor] = None,
    made_of: Callable[[], str] = str,
    dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """Lower Cholesky factor L of A + εsI, LLᵀ = A + εsI, with ε escalated until it exists.

    ε starts at ``jitter`` and grows tenfold, four times at most; s is ``scale``, by default the mean of A's
    diagonal, so the jitter is relative. One integer per matrix is read back to see whether the factorisation
    failed, as in :func:`torch.linalg.cholesky`; nothing else leaves the device. (Within :func:`flags_kept` none is.)

    :param matrix: symmetric, ``(..., M, M)``.
    :param jitter: relative jitter; ``None`` is :func:`default_jitter` of the dtype.
    :param what: what is factorised, for the error and the warning, such as ``"K_ZZ of site 'f'"``.
    :param scale: s, broadcastable to ``(...,)``.
    :param made_of: says, for the error of a matrix that is not finite, what it is made of.
    :param dtype: of L and of gradients through it, if it is not the matrix's.
    :returns: L, ``(..., M, M)``.
    :raises torch.linalg.LinAlgError: (a ``RuntimeError``) naming ``what``, its size and the jitters tried, or how much
        of it is NaN or infinite, which no jitter mends. The text says "input is not positive-definite", by which Pyro's
        HMC recognises a step to reject.
    """
    return _first_that_exists(matrix, jitter, what, scale, made_of, dtype)[0]


def _first_that_exists(
    matrix: Tensor,
    jitter: Optional[float],
    what: str,
    scale: Optional[Tensor],
    made_of: Callable[[], str],
    dtype: Optional[torch.dtype],
) -> list[Tensor]:
    """The factor with the first jitter for which there is one; in a dtype that is given, with what else is to be had
    at a lower cost.
    """
    first = default_jitter(matrix.dtype) if jitter is None else float(jitter)
    level = first
    for attempt in range(_ESCALATIONS + 1):
        if scale is None and (level > 0 or dtype is not None):
            diagonal = matrix.detach().diagonal(dim1=-2, dim2=-1)
            scale = diagonal.abs().mean(-1) if matrix.shape[-1] else diagonal.new_zeros(matrix.shape[:-2])
        if dtype is not None:
            assert scale is not None
            *found, info = _Factor.apply(matrix, level * scale, dtype)
        elif level > 0:
            assert scale is not None
            unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
            *found, info = torch.linalg.cholesky_ex(matrix + level * (unit * scale[..., None, None]))
        else:
            *found, info = torch.linalg.cholesky_ex(matrix) if matrix.requires_grad else factorised(matrix)
        flags = _FLAGS.get()
        if flags is not None:
            info.data_ptr()  # raises under torch.func.vmap, as a look at it would: mapped ones can't be kept
            flags.append(info)
            return found
        if not info.any():
            if attempt > 0:
                warnings.warn(
                    f"{what} ({_size(matrix)}) needed a relative jitter above {first:.0e} for its Cholesky "
                    f"factorisation; use {'' if matrix.dtype == torch.float64 else 'float64, '}fewer or better spread "
                    "points, or set jitter=.",
                    NumericalWarning,
                    stacklevel=2,
                )
            return found
        if attempt == 0 and not matrix.isfinite().all():
            raise torch.linalg.LinAlgError(_not_finite(matrix, what, made_of()))  # type: ignore[attr-defined]
        level = 10 * level if level > 0 else default_jitter(matrix.dtype)
    raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
        f"Cholesky factorisation of {what} ({_size(matrix)}) failed: the input is not positive-definite. "
        f"{_why(matrix)} Relative jitters from {first:.0e} to {level / 10:.0e} were tried."
    )


def _why(matrix: Tensor) -> str:
    """Why there is no Cholesky factor of a finite matrix, and what to do."""
    if not (matrix.diagonal(dim1=-2, dim2=-1) > 0).any():
        return (
            "No entry of its diagonal is above 0: the kernel is 0 at these inputs, where nothing is left to factorise. "
            "Look at the kernel, its variances and these inputs."
        )
    precision = "" if matrix.dtype == torch.float64 else "float64, "
    return (
        f"Its eigenvalues are too small: use {precision}fewer or better spread points, or give "
        "GaussianProcess(..., jitter=...)."
    )


def _not_finite(matrix: Tensor, what: str, made_of: str) -> str:
    return (
        f"Cholesky factorisation of {what} ({_size(matrix)}) failed: the input is not positive-definite; "
        f"{int((~matrix.isfinite()).sum())} of its {matrix.numel()} entries are NaN or infinite"
        f"{f' ({made_of})' if made_of else ''}. No jitter mends that: look for inputs and hyperparameters that are NaN "
        "or infinite, or 0, or so large or small that they over- or underflow; in training, too large a learning rate "
        "leads there."
    )


def _size(matrix: Tensor) -> str:
    return " x ".join(map(str, matrix.shape)) + f", {str(matrix.dtype).removeprefix('torch.')}"


def on_diagonal(blocks: Sequence[Tensor], whole: Tensor) -> Tensor:
    """``whole``, ``(..., M, M)``, with the blocks ``(..., M_b, M_b)`` put on its diagonal, in place."""
    start = 0
    for block in blocks:
        stop = start + block.shape[-1]
        whole[..., start:stop, start:stop] = block
        start = stop
    return whole


class Unbound(list[Tensor]):
    """The matrices of one tensor, ``(..., C, N, M)``, which stays at hand.

    :param whole: the tensor.
    """

    def __init__(self, whole: Tensor) -> None:
        super().__init__(whole.unbind(-3))
        self.whole = whole


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Matrices ``(..., N, M_b)``, or vectors, as one, ``(..., N, ΣM_b)``; leading dimensions broadcast."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts, Unbound):
        return parts.whole.transpose(-3, -2).flatten(-2)
    if any(part.shape[:-1] != parts[0].shape[:-1] for part in parts):
        shape = broadcast_shapes(*(part.shape[:-1] for part in parts))
        parts = [part.expand(*shape, part.shape[-1]) for part in parts]
    return torch.cat(list(parts), -1)


# Products by blocks, which leave out blocks of zeros: a library's triangular product costs as much as a full one, its
# symmetric product is not to be had. Operations that can be differentiated and mapped.


def _blocks(num: int) -> list[tuple[int, int]]:
    size = 64 * -(-num // (64 * _PARTS))
    return list(itertools.pairwise([*range(0, num, size), num]))


def times_lower(a: Tensor, lower: Tensor) -> Tensor:
    """AL, ``(..., N, M)``, for a lower triangular L, ``(..., M, M)``."""
    if lower.shape[-1] < _LARGE or lower.dim() > 2:
        return a @ lower
    out = (a[..., :1] * lower[0, 0]).new_empty(a.shape)  # mapped, where one of them is
    for i, j in _blocks(lower.shape[-1]):
        out[..., i:j] = a[..., i:] @ lower[i:, i:j]
    return out


def times_upper(a: Tensor, lower: Tensor) -> Tensor:
    """ALᵀ, ``(..., N, M)``, for a lower triangular L, ``(..., M, M)``."""
    if lower.shape[-1] < _LARGE or lower.dim() > 2:
        return a @ lower.mT
    out = (a[..., :1] * lower[0, 0]).new_empty(a.shape)
    for i, j in _blocks(lower.shape[-1]):
        out[..., i:j] = a[..., :j] @ lower[i:j, :j].mT
    return out


def tril_of_product(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB, ``(..., M, M)``, of which the part above the diagonal means nothing."""
    if a.shape[-1] < _LARGE or a.dim() > 2 or b.dim() > 2:
        return a.mT @ b
    out = (a[:1, :1] * b[:1, :1]).new_zeros(a.shape[-1], a.shape[-1])
    for i, j in _blocks(a.shape[-1]):
        out[i:j, :j] = a[:, i:j].mT @ b[:, :j]
    return out


def gram(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB, ``(..., M, M)``, where that is symmetric: of A, ``(..., N, M)``, and A with scaled rows, say."""
    if a.shape[-1] < _LARGE or a.dim() > 2 or b.dim() > 2:
        return a.mT @ b
    return _from_rows([a[:, i:j].mT @ b[:, :j] for i, j in _blocks(a.shape[-1])])


def congruence(lower: Tensor, half: Tensor) -> Tensor:
    """LᵀAL, ``(..., M, M)``, for a lower triangular L and a symmetric A, of which AL is given."""
    if lower.shape[-1] < _LARGE or lower.dim() > 2 or half.dim() > 2:
        return lower.mT @ half
    return _from_rows([lower[i:, i:j].mT @ half[i:, :j] for i, j in _blocks(lower.shape[-1])])


def _from_rows(rows: Sequence[Tensor]) -> Tensor:
    """The symmetric matrix of which these are the rows, each up to its last block on the diagonal."""
    num = rows[-1].shape[-1]
    whole = rows[-1].new_empty(num, num)
    for row, (i, j) in zip(rows, _blocks(num)):
        whole[i:j, :j], whole[:i, i:j] = row, row[:, :i].mT
    return whole


def mirrored(lower: Tensor) -> Tensor:
    """The symmetric matrix, ``(..., M, M)``, of which this is the lower triangle; what is above means nothing."""
    if lower.shape[-1] < _LARGE or lower.dim() > 2:
        tril = lower.tril()
        return tril + tril.tril(-1).mT
    # By blocks, since a large matrix and its transpose are not in the cache together.
    return _from_rows([torch.cat([lower[i:j, :i], mirrored(lower[i:j, i:j])], -1) for i, j in _blocks(len(lower))])


def _tril_of_lower(lower: Tensor, other: Tensor) -> Tensor:
    """The lower triangle of LᵀA, ``(..., M, M)``, for lower triangular L and A; what is above means nothing."""
    if lower.shape[-1] < _LARGE or lower.dim() > 2 or other.dim() > 2:
        return lower.mT @ other
    out = (lower[:1, :1] * other[:1, :1]).new_zeros(lower.shape)
    for i, j in _blocks(lower.shape[-1]):
        out[i:j, :j] = lower[i:, i:j].mT @ other[i:, :j]
    return out


# LAPACK's matrices lie in memory by columns: where right hand sides do, a transposition away, no copy has to turn them.
# Those of AL⁻ᵀ do in LX = Aᵀ (1.4 to 3 times as quick as XLᵀ = A in float32 on one AMD EPYC, alike on another); many of
# L⁻¹B do in XLᵀ = Bᵀ. In LX = Aᵀ an L by rows, LAPACK's transpose, is there 1.3 to 1.9 times as quick as one by
# columns, its copy included.


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """L⁻¹B for a lower triangular L, ``(..., M, M)``, and B, ``(..., M, K)``."""
    if right.shape[-1] < _MANY:
        return torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, right.mT, upper=True, left=False).mT


def solve_upper(factor: Tensor, right: Tensor) -> Tensor:
    """L⁻ᵀB for a lower triangular L, ``(..., M, M)``, and B, ``(..., M, K)``."""
    if right.shape[-1] < _MANY:
        return torch.linalg.solve_triangular(factor.mT, right, upper=True)
    return torch.linalg.solve_triangular(factor, right.mT, upper=False, left=False).mT


def over_upper(rows: Tensor, factor: Tensor) -> Tensor:
    """AL⁻ᵀ, ``(..., N, M)``, by rows, for a lower triangular L, ``(..., M, M)``."""
    return torch.linalg.solve_triangular(factor.contiguous(), rows.mT, upper=False).mT


def over_lower(rows: Tensor, factor: Tensor) -> Tensor:
    """AL⁻¹, ``(..., N, M)``, by rows, for a lower triangular L, ``(..., M, M)``."""
    return torch.linalg.solve_triangular(factor.mT.contiguous(), rows.mT, upper=True).mT


def gaussian_kl(loc: Tensor, trace: Tensor, log_det: Tensor) -> Tensor:
    """KL[N(m, S) ‖ N(0, I)] = ½(tr S + mᵀm − M − log|S|), in nats.

    :param loc: m, ``(..., M)``.
    :param trace: tr S, ``(...,)``.
    :param log_det: log|S|, ``(...,)``.
    """
    return 0.5 * (trace + loc.square().sum(-1) - loc.shape[-1] - log_det)


class _RowSquares(Function):
    # Autograd's own rule for x² makes three matrices of x's size on the way back; this makes one.

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (2 * grad)[..., None] * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, change: Tensor) -> Tensor:
        return 2 * (ctx.saved_tensors[0] * change).sum(-1)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return _RowSquares.apply(x.movedim(in_dims[0], 0)), 0


def variance_floor(prior: Tensor) -> Tensor:
    """10ε·max(kₙ, ε·max_n kₙ): what is rounding error of variances whose prior's are kₙ, ``(..., N)``.

    Above 0 where kₙ is 0, so that logarithms and square roots have finite gradients.
    """
    info = torch.finfo(prior.dtype)
    prior = prior.detach()
    if not prior.shape[-1]:
        return prior
    return 10 * info.eps * torch.maximum(prior, info.eps * prior.amax(-1, keepdim=True)).clamp(min=info.tiny / info.eps)


def above_rounding(variance: Tensor, prior: Tensor) -> Tensor:
    """Variances, ``(..., N)``, of which rounding leaves none below :func:`variance_floor` of the prior's.

    Gradients are those of the variances themselves: one at the floor still has to become smaller, where a clamp would
    say that it does not matter, and curvatures of natural steps would be 0 where the data are the most precise.
    """
    with torch.no_grad():
        lacking = (variance_floor(prior) - variance).clamp_(min=0)
    return variance + lacking


def plus_one(matrix: Tensor) -> Tensor:
    """I + A, ``(..., M, M)``, in new memory."""
    total = matrix.clone(memory_format=torch.contiguous_format)
    total.diagonal(dim1=-2, dim2=-1).add_(1)
    return total


def lift_to(matrix: Tensor, least: float) -> Tensor:
    """What a symmetric matrix lacks for no eigenvalue below a number."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (least - values).clamp_(min=0)[..., None, :]) @ vectors.mT


def row_squares(x: Tensor) -> Tensor:
    """‖xₙ‖² of the rows of ``(..., N, M)``, ``(..., N)``."""
    return _RowSquares.apply(x)


def sum_blocks(features: Sequence[Tensor], w: Sequence[Tensor]) -> Tensor:
    """Σ_b Φ_b w_b, ``(..., N)``; a zero without blocks."""
    if not features:
        return torch.zeros(())
    total = (features[0] @ w[0][..., None])[..., 0]
    for phi, block in zip(features[1:], w[1:]):
        total = total + (phi @ block[..., None])[..., 0]
    return total


def root_of_inverse(gram: Tensor, plus_one: bool = True, what: str = "I + ΦᵀΦ") -> Tensor:
    """Lower triangular L with LLᵀ = (I + G)⁻¹, for G positive semidefinite, ``(..., M, M)``: no inverse is formed.

    :param plus_one: whether it is I + G; else G itself, positive definite, is meant.
    :param what: what is factorised, for errors.
    """
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # With rows and columns reversed, I + G = CCᵀ is UUᵀ for an upper U, and (UUᵀ)⁻¹ = U⁻ᵀU⁻¹.
    whole = eye + gram if plus_one else gram
    upper = cholesky(whole.flip((-2, -1)), 0.0, what).flip((-2, -1))
    return torch.linalg.solve_triangular(upper, eye, upper=True, left=False).mT
