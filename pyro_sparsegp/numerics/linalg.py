"""Dense linear algebra: a Cholesky factorisation that never fails in silence, and Gaussian divergences."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .factors import ESCALATIONS, Factor, Whitened
from .factors import MAPPED as MAPPED
from .factors import Turn as Turn
from .factors import factorised as factorised
from .factors import gram as gram
from .factors import over_lower as over_lower
from .factors import over_upper as over_upper
from .factors import solve_lower as solve_lower
from .factors import tril_of_product as tril_of_product
from .functions import broadcast_shapes, setting


class NumericalWarning(UserWarning):
    """A result is usable, but floating point arithmetic forced a change to it."""


def wider(x: Tensor) -> torch.dtype:
    """float64 for a float32 tensor on a device that has it; otherwise the tensor's own dtype."""
    return torch.float64 if x.dtype == torch.float32 and x.device.type != "mps" else x.dtype


def default_jitter(dtype: torch.dtype) -> float:
    """Relative jitter of the first Cholesky attempt: 1e-8 in float64, 1e-6 in float32."""
    return 1e-8 if dtype == torch.float64 else 1e-6


_FLAGS: ContextVar[Optional[list[Tensor]]] = ContextVar("flags of Cholesky factorisations", default=None)
# For predictions, whose draws need them so.
PRECISE: ContextVar[bool] = ContextVar("whether features in float32 are found in float64", default=False)


def flags_kept() -> Any:
    """Have :func:`cholesky` try one jitter and leave its flag, not 0 if it failed: nothing is read from the device."""
    return setting(_FLAGS, [])


def rounding(matrix: Tensor) -> float:
    """A relative jitter that is as much as a matrix of this size and dtype loses by rounding, Mε."""
    return matrix.shape[-1] * torch.finfo(matrix.dtype).eps


class Whitening(NamedTuple):
    """L, ``(..., M, M)``, with LLᵀ = A + εsI, and B ↦ BL⁻ᵀ."""

    factor: Tensor
    turn: Tensor  # zeros, whose derivative is L⁻¹dL

    def __call__(self, cross: Tensor) -> Tensor:
        """BL⁻ᵀ, ``(..., N, M)``."""
        return Whitened.apply(cross, self.factor, self.turn)

    def near(self, cross: Tensor, own: Tensor) -> Tensor:
        """L + (B − A)L⁻ᵀ, ``(..., M, M)``, of A and a B near to it."""
        return Whitened.apply(cross, self.factor, self.turn, own.detach())


def cholesky(matrix: Tensor, jitter: Optional[float] = None, *arguments: Any, **options: Any) -> Tensor:
    """The factor L of :func:`whitening`, of the same arguments."""
    # Natural steps factorise small matrices without a gradient: the custom function takes ten times as long for those.
    if jitter == 0 and not matrix.requires_grad:
        factor, info = factorised(matrix)
        if _left(info) or not info.any():
            return factor
    return whitening(matrix, jitter, *arguments, **options).factor


def residual_cholesky(
    prior: Tensor, features: Sequence[Tensor], jitter: Optional[float], what: str, **options: object
) -> Tensor:
    """The factor of ρ = k − ΦΦᵀ, the residual's covariance at N inputs, ``(..., N, N)``. The jitter is relative to the
    mean of k's diagonal, unless a scale is given; by default it covers what the difference loses of k.
    """
    if jitter is None:
        # Rounding adds up along rows of the factor and columns of Φ.
        terms = max(prior.shape[-1], sum(phi.shape[-1] for phi in features))
        jitter = max(default_jitter(prior.dtype), terms * torch.finfo(prior.dtype).eps)
    options = {"scale": prior.detach().diagonal(dim1=-2, dim2=-1).mean(-1)} | options
    left = functools.reduce(lambda left, phi: left - phi @ phi.mT, features, prior)
    # At a basis' own inputs ΦΦᵀ has its jitter, too, and ρ is minus that: test_exact_draws_at_its_own_rows.
    return cholesky(left, 2 * jitter, what, **options)


def whitening(
    matrix: Tensor,
    jitter: Optional[float] = None,
    what: str = "matrix",
    scale: Optional[Tensor] = None,
    made_of: Callable[[], str] = str,
    dtype: Optional[torch.dtype] = None,
) -> Whitening:
    """Lower Cholesky factor L of A + εsI, LLᵀ = A + εsI, with ε escalated until it exists, and B ↦ BL⁻ᵀ.

    ε starts at ``jitter`` and grows tenfold, four times at most; s is ``scale``, by default the mean of A's
    diagonal, so the jitter is relative. One integer per matrix is read back to see whether it failed, as in
    :func:`torch.linalg.cholesky`; nothing else leaves the device. (Within :func:`flags_kept` none is.)

    :param matrix: symmetric, ``(..., M, M)``.
    :param jitter: relative jitter; ``None`` is :func:`default_jitter` of the dtype.
    :param what: what is factorised, for the error and the warning, such as ``"K_ZZ of site 'f'"``.
    :param scale: s, broadcastable to ``(...,)``.
    :param made_of: says, for the error of a matrix that is not finite, what it is made of.
    :param dtype: of L and of gradients through it, if it is not the matrix's.
    :raises torch.linalg.LinAlgError: (a ``RuntimeError``) naming ``what``, its size and the jitters tried, or how much
        of it is NaN or infinite, which no jitter mends. The text says "input is not positive-definite": Pyro's HMC
        rejects a step by these words.
    """
    size = " x ".join(map(str, matrix.shape)) + f", {str(matrix.dtype).removeprefix('torch.')}"
    level = first = default_jitter(matrix.dtype) if jitter is None else float(jitter)
    scale = matrix.detach().diagonal(dim1=-2, dim2=-1).abs().mean(-1) if scale is None else scale
    for attempt in range(ESCALATIONS + 1):
        factor, turn, info = Factor.apply(matrix, level * scale, dtype or matrix.dtype)
        is_left = _left(info)
        if is_left and MAPPED.get():  # A GPU's samplers stop at NaN: test_a_failed_factor_under_vmap_is_finite.
            factor = torch.where(info[..., None, None] == 0, factor, eye_like(factor))
        if is_left or not info.any():
            if attempt > 0:
                warnings.warn(
                    f"{what} ({size}) needed a relative jitter above {first:.0e} for its Cholesky factorisation: its "
                    f"inputs are close for this kernel. Use {_remedy(matrix)}, or set jitter=.",
                    NumericalWarning,
                    stacklevel=2,
                )
            return Whitening(factor, turn)
        level = 10 * level if level > 0 else default_jitter(matrix.dtype)
        if not matrix.isfinite().all():
            break
    raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
        f"Cholesky factorisation of {what} ({size}) failed: the input is not positive-definite. "
        f"{_why(matrix, made_of(), f'Relative jitters from {first:.0e} to {level / 10:.0e} were tried.')}"
    )


def _left(info: Tensor) -> bool:
    """Whether a flag is left within :func:`flags_kept`, to be looked at there."""
    if (flags := _FLAGS.get()) is not None:
        _ = MAPPED.get() or info.data_ptr()  # raises under torch.func.vmap, as a look at it would
        flags.append(info)
    return flags is not None


def _why(matrix: Tensor, made_of: str, tried: str) -> str:
    """Why there is no Cholesky factor, and what to do."""
    bad = ~matrix.isfinite()
    if bad.any():
        return (
            f"{int(bad.sum())} of its {matrix.numel()} entries are NaN or infinite{made_of and f' ({made_of})'}. "
            "No jitter mends that: look for inputs and hyperparameters that are NaN or infinite, or 0, or so large or "
            "small that they over- or underflow; in training, too large a learning rate leads there."
        )
    if not (matrix.diagonal(dim1=-2, dim2=-1) > 0).any():
        return (
            "No entry of its diagonal is above 0: the kernel is 0 at these inputs, where nothing is left to factorise. "
            "Look at the kernel, its variances and these inputs. If a latent with the prior median 0 makes the kernel, "
            f"give the guide init_loc_fn=init_to_sample. {tried}"
        )
    return f"Its eigenvalues are too small: use {_remedy(matrix)}, or GaussianProcess(..., jitter=...). {tried}"


def _remedy(matrix: Tensor) -> str:
    """What makes a covariance less singular, whether its inputs are data or inducing points."""
    precision = "" if matrix.dtype == torch.float64 else "float64, "
    return f"{precision}a rougher kernel, or, of inducing points, fewer or better spread ones"


def on_diagonal(blocks: Sequence[Tensor], whole: Tensor) -> Tensor:
    """``whole``, ``(..., M, M)``, with the blocks ``(..., M_b, M_b)`` put on its diagonal, in place."""
    stop = 0
    for block in blocks:
        start, stop = stop, stop + block.shape[-1]
        whole[..., start:stop, start:stop] = block
    return whole


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Matrices ``(..., N, M_b)``, or vectors, as one, ``(..., N, ΣM_b)``; leading dimensions broadcast."""
    if len(parts) == 1:
        return parts[0]
    if any(part.shape[:-1] != parts[0].shape[:-1] for part in parts):
        shape = broadcast_shapes(*(part.shape[:-1] for part in parts))
        parts = [part.expand(*shape, part.shape[-1]) for part in parts]
    return torch.cat(list(parts), -1)


def variance_floor(prior: Tensor) -> Tensor:
    """10ε·max(kₙ, ε·max_n kₙ): what is rounding error of variances whose prior's are kₙ, ``(..., N)``."""
    # above 0 where kₙ is 0, so that logarithms and square roots have finite gradients
    info = torch.finfo(prior.dtype)
    prior = prior.detach()
    return 10 * info.eps * torch.maximum(prior, info.eps * prior.amax(-1, keepdim=True)).clamp(min=info.tiny / info.eps)


def above_rounding(variance: Tensor, prior: Tensor) -> Tensor:
    """Variances, ``(..., N)``, none below :func:`variance_floor` of the prior's through rounding."""
    # Gradients are those of the variances themselves: one at the floor still has to become smaller, where a clamp would
    # say that it does not matter, and curvatures of natural steps would be 0 where the data are the most precise.
    with torch.no_grad():
        lacking = (variance_floor(prior) - variance).clamp_(min=0)
    return variance + lacking


def eye_like(matrix: Tensor) -> Tensor:
    """I of a matrix' size."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


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
    # Autograd's rule for x² makes three matrices on the way back, that for x·x two.
    return (x * x).sum(-1)


def times(matrix: Tensor, v: Tensor) -> Tensor:
    """Av, ``(..., N)``, for A, ``(..., N, M)``, and v, ``(..., M)``; vectors with more dimensions before these, such as
    draws, are the columns of one product.
    """
    more = v.dim() + 1 - matrix.dim()
    if more < 1:
        return (matrix @ v[..., None])[..., 0]
    columns = v.flatten(0, more - 1).movedim(0, -1)
    return (matrix @ columns).movedim(-1, 0).unflatten(0, v.shape[:more])


def total(values: Iterable[Tensor]) -> Tensor:
    """Their sum; a zero without any."""
    return functools.reduce(torch.add, values) if (values := list(values)) else torch.zeros(())


def sum_blocks(features: Sequence[Tensor], w: Sequence[Tensor]) -> Tensor:
    """Σ_b Φ_b w_b, ``(..., N)``."""
    return total(map(times, features, w))


def root_of_inverse(matrix: Tensor, what: str = "I + ΦᵀΦ") -> Tensor:
    """Lower triangular L with LLᵀ = A⁻¹, for A positive definite, ``(..., M, M)``: no inverse is formed."""
    # With rows and columns reversed, A = CCᵀ is UUᵀ for an upper U, and (UUᵀ)⁻¹ = U⁻ᵀU⁻¹.
    upper = cholesky(matrix.flip((-2, -1)), 0.0, what).flip((-2, -1))
    return torch.linalg.solve_triangular(upper, eye_like(upper), upper=True, left=False).mT
