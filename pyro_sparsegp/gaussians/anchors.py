"""Anchors: what natural parameters are about where features move, and what they are about another anchor.

With the coefficients w₀ = Tw of before for w now, sums of sites become G ← TᵀGT and r ← Tᵀr. Where w stands for values
u = Lw of functions whose meaning does not change, T = L₀⁻¹L. With A, K × M, the features at K rows and A₀ what they
were, it is the one with A₀T ≈ A,

    T = argmin ‖A₀T − A‖² + ε‖T − I‖² = I + (A₀ᵀA₀ + εI)⁻¹A₀ᵀ(A − A₀).

Of features Φ = Φ₀T + E at all N rows, and sites Λ and z, these sums err by EᵀΛE and by EᵀΛ(z − Φ₀m) where Φ₀ᵀΛE = 0, as
least squares over the rows have it: in G by the square of the change, in r by what q does not fit times the part of the
change that the features did not span. Left as they were, they would err by the whole change times what q does fit.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Optional, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics.arrow import Arrow
from ..numerics.functions import Unmapped, broadcast_shapes, if_known
from ..numerics.linalg import (
    Turn,
    cholesky,
    plus_one,
    rounding,
    row_squares,
    side_by_side,
    solve_lower,
    tril_of_product,
    wider,
)
from .base import Stack, each_times

BY_DRAWS = 0.03  # η where draws alone show curvatures, whose noise about u would be magnified as L moves


class Anchor:
    """What natural parameters are about in one run: values u = Lw, or near them where L is ill conditioned.

    :param kept: L + ηsI, ``(..., M, M)``, of :func:`softened`; what later runs know of it, with ``inputs``.
    """

    now: Tensor  # A, features at the inputs that the sums belong to; L if inducing inputs have not moved since
    has_turn = True  # whether the way back is known, :meth:`turn`: else it is autograd's
    level: Optional[Tensor] = None  # values, as of u, that f adds to, such as a constant mean's, if they may move
    log_weight: Optional[Tensor] = None  # of all data's precision, as by their noise, if it may move

    def __init__(self, kept: Tensor) -> None:
        self.kept, self.now, self.inputs = kept, kept, kept.new_zeros(0)

    @cached_property
    def detached(self) -> Self:
        """This without its graph."""
        other = copy.copy(self)
        vars(other).pop("lu", None)
        other.kept = self.kept.detach()
        other.now = other.kept if self.now is self.kept else self.now.detach()
        other.level, other.log_weight = (if_known(torch.detach, part) for part in (self.level, self.log_weight))
        return other

    def turned(self, before: Tensor, gram: Tensor, loc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """TᵀGT, and a and b with the mean a + (I + TᵀGT)⁻¹b, of what was kept, G and m."""
        gram, along = turned_sums(gram, loc, before, self.now, self.now is self.kept)
        # T⁻¹m = m − A⁻¹(A − L₀)m
        near = loc - self.back((self.now - before) @ loc[..., None])[..., 0]
        return gram, near, along - near

    def move(self, inputs: Tensor, former: Tensor, anchor: Tensor) -> None:
        """Have inputs that move, and values at the former ones of what has the values L here."""
        self.inputs = inputs.detach().flatten().clone()  # an optimiser writes to them
        self.now = former if anchor is self.kept else former + (self.kept - anchor)

    def settle(self) -> None:
        """Sums belong here by now; how values at these inputs move stays known."""
        self.now = self.now - (self.now - self.kept).detach()
        vars(self).pop("lu", None)

    @cached_property
    def lu(self) -> tuple[Tensor, ...]:
        """LU and pivots of A; none of L, where no input moves."""
        return () if self.now is self.kept else tuple(torch.linalg.lu_factor_ex(self.now)[:2])

    def back(self, x: Tensor) -> Tensor:
        """A⁻¹X, of the present values A where the sums belong to."""
        if not self.lu:
            return solve_lower(self.kept, x)
        factor, pivots = self.lu  # which lu_solve broadcasts not as others do
        shape = broadcast_shapes(pivots.shape[:-1], x.shape[:-2])
        return torch.linalg.lu_solve(factor.expand(*shape, *factor.shape[-2:]), pivots.expand(*shape, -1), x)

    def coefficients(self, values: Tensor) -> Tensor:
        """The coefficients of a function with these values u."""
        return solve_lower(self.kept, values[..., None])[..., 0]

    def turn(self) -> Tensor:
        """Zeros, or I, that have the derivative of T from here."""
        return Turn.apply(self.now, *self.detached.lu)


class AtRows(Anchor):
    """Blocks of coefficients that move by themselves: functions' values at rows, such as a network's, and latents' own.
    Sites are about Aw; in directions that A hardly has, about w.

    :param parts: A, ``(..., K, M)``, of each block, with K several times M; or a latent's L, ``(M, M)``, or the
        diagonal of that, ``(M,)``.
    :param spans: whether features span what they become, which a network's do not.
    :param by_draws: whether sums of sites have the noise of draws.
    """

    def __init__(self, parts: Sequence[Tensor], spans: bool = True, by_draws: bool = False) -> None:
        super().__init__(parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts]))
        self.shapes, self.has_turn = [part.shape for part in parts], spans
        # ε, of the mean of A₀ᵀA₀'s diagonal
        self.least = BY_DRAWS**2 if by_draws else 1e-8 if spans else 1e-4

    def blocks(self, kept: Tensor) -> list[Tensor]:
        """A of each block, of what was kept."""
        parts = kept.reshape(-1).split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def turned(self, before: Tensor, gram: Tensor, loc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept, pairs = loc, list(zip(self.blocks(before), self.blocks(self.kept)))
        # In float64 where there is such: the rounding of TᵀGT in float32 may be more than the prior's precision.
        turns = [nearest(a, b, self.least) for a, b in pairs]
        wide, loc = gram.to(turns[0]), kept.to(turns[0])
        with torch.no_grad():  # any start would do: (I + TᵀGT)⁻¹Tᵀ(I + G)m is what it leads to
            # a = m + (AᵀA + εI)⁻¹Aᵀ(A₀ − A)m, near T⁻¹m
            columns = loc[..., None].split([b.shape[-1] for _, b in pairs], -2)
            moves = [towards(b, _each([(a - b).to(m)], m), self.least) for (a, b), m in zip(pairs, columns)]
            near = (loc + torch.cat(moves, -2)[..., 0]).to(kept)
        # Tᵀ(I + G)m − (I + TᵀGT)a, by differences that are small
        along = loc[..., None] + wide @ (loc[..., None] - _each(turns, near.to(loc)[..., None]))
        rest = _each(turns, along, True)[..., 0] - near
        if isinstance(wide, Arrow):
            *common, own = turns
            whole = torch.block_diag(*[turn if turn.dim() > 1 else turn.diag() for turn in common])
            return wide.turned(whole, own).to(kept), near, rest.to(kept)
        # TᵀGT = (Tᵀ(TᵀG)ᵀ)ᵀ
        return _each(turns, _each(turns, wide, True).mT, True).to(gram), near, rest.to(kept)

    def values(self, x: Tensor) -> Tensor:
        """AX, of all blocks, ``(ΣK, n)``."""
        return _each(self.blocks(self.kept), x)

    def coefficients(self, values: Tensor) -> Tensor:
        blocks = self.blocks(self.kept)
        parts = values[..., None].split([block.shape[-2 if block.dim() > 1 else 0] for block in blocks], -2)
        found = [towards(block, part, self.least) for block, part in zip(blocks, parts)]
        return torch.cat(found, -2)[..., 0].to(values)

    def turn(self) -> Tensor:
        turns = [nearest(block.detach(), block, self.least) for block in self.blocks(self.kept)]
        return torch.block_diag(*[turn if turn.dim() > 1 else turn.diag() for turn in turns]).to(self.kept)


class FromPrecision(Unmapped):
    """m = a + P⁻¹b, S = P⁻¹, tr S and log|S|, unbatched; the gradient is that by hyperparameters which move sites along
    with L alone. It goes to ``turn``, the zeros of :meth:`Anchor.turn`, stacked where there are several blocks, or
    ``None`` where nothing moves sites.
    """

    @staticmethod
    def forward(
        precision: Tensor, near: Tensor, rest: Tensor, stays: object, turn: object, stack: Stack
    ) -> tuple[Tensor, ...]:
        upper = cholesky(precision, 0.0, "I + G of natural steps").mT  # by columns, as the library wants it
        covariance = torch.cholesky_inverse(upper, upper=True).mT
        # a + P⁻¹b
        loc = near + torch.cholesky_solve(rest[..., None], upper, upper=True)[..., 0]
        return loc, covariance, covariance.diagonal().sum(), -2 * upper.diagonal().log().sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*output[:2])
        *_, ctx.stays, turn, ctx.stack = inputs  # constants
        ctx.turned = None if turn is None else turn.shape

    # P = K + TᵀAT and r = Pm = Tᵀr₀ with a block-diagonal T = L₀⁻¹L and the part K that does not turn, I or ``stays``,
    # have dP = DᵀA + AD and dr = Dᵀr for D = L⁻¹dL, so that dS = −S dP S and AS = I − KS leave one product and the
    # blocks of another: with V = S̄ + tI and the gradients S̄ by S, which is symmetric, a by the mean, t by the trace and
    # l by log|S|, the diagonal blocks are those of
    #     D̄ = 2K(SVS + lS + ½(Sa mᵀ + m(Sa)ᵀ)) − 2VS − 2lI − a mᵀ,
    # of which the lower triangle counts where T is triangular.

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Tensor, by_covariance: Tensor, by_trace: Tensor, by_log_det: Tensor) -> Any:
        (loc, covariance), stays, stack = ctx.saved_tensors, ctx.stays, ctx.stack
        # VS with V = S̄ + tI
        half = (by_covariance @ covariance).addcmul_(covariance, by_trace)
        if stays is None:
            # SVS; in place from here on: memory that is new costs more than numbers
            own, inner, beside = covariance[None], tril_of_product(covariance, half, symmetric=True)[None], half[None]
        else:
            wide, other = stack.spread(covariance), stack.spread(half)
            own, beside, shape = stack.diagonal(wide), stack.diagonal(other), (len(stack.sizes), stack.size, -1)
            inner = wide.view(shape) @ other.mT.reshape(shape).mT
        # SVS + lS + ½(Sa mᵀ + m(Sa)ᵀ)
        m, u = stack.columns(loc), stack.columns(covariance @ a)
        inner.addcmul_(own, by_log_det).baddbmm_(u, m.mT, alpha=0.5).baddbmm_(m, u.mT, alpha=0.5)
        total = (inner if stays is None else each_times(stays, inner)).sub_(beside)
        total.diagonal(dim1=-2, dim2=-1).sub_(by_log_det)
        total.baddbmm_(stack.columns(a), m.mT, alpha=-0.5)
        return None, None, None, None, total.mul_(2).view(ctx.turned), None


def softened(anchor: Tensor, softness: float, sizes: Sequence[int]) -> Tensor:
    """L + ηsI, with s² the mean of diag(LLᵀ) over each block, whose units may be far apart."""
    # by row_squares, whose way back makes one matrix; that of a norm makes three
    if not softness:
        return anchor
    squares = row_squares(anchor).split(list(sizes), -1)
    means = side_by_side([part.mean(-1, keepdim=True).expand_as(part) for part in squares])
    return anchor + torch.diag_embed(softness * means.sqrt())


def turned_sums(
    gram: Tensor, pull: Tensor, before: Tensor, now: Optional[Tensor], lower: bool = True
) -> tuple[Tensor, Tensor]:
    """Sums of sites (G, r), ``(..., M, M)`` and ``(..., M)``, that keep their meaning about u = Lw under another L:
    (TᵀGT, Tᵀr) with T = L₀⁻¹L. If they are about w, L₀ is empty, and L is ``None``.

    :param lower: whether L is lower triangular, as L₀ is.
    """
    if now is None or not before.numel():
        return gram, pull
    # T = I + L₀⁻¹(L − L₀), which makes w there of w here, exactly where L is what it was: by rows, as its factors are.
    turn = plus_one(torch.linalg.solve_triangular(before.mT, (now - before).mT, upper=True, left=False).mT)
    # TᵀGT by blocks, of which triangles are left out, and half of what is symmetric
    turned = tril_of_product(turn, gram @ turn, symmetric=True, lower=lower)
    # Tᵀr
    return turned, (turn.mT @ pull[..., None])[..., 0]


def nearest(before: Tensor, now: Tensor, least: float) -> Tensor:
    """T, ``(..., M, M)``, with A₀T ≈ A, ``(..., K, M)``, or of diagonals, ``(M,)``; in float64 where there is such."""
    # I + (A₀ᵀA₀ + εI)⁻¹A₀ᵀ(A − A₀)
    return now.to(wider(now)) / before if now.dim() == 1 else plus_one(towards(before, now - before, least))


def _each(turns: Sequence[Tensor], x: Tensor, transposed: bool = False) -> Tensor:
    """blockdiag(T)X, ``(..., ΣM, n)``, or with Tᵀ, of matrices and diagonals."""
    pairs = zip(turns, x.split([turn.shape[-1] for turn in turns], -2))
    return torch.cat([t[:, None] * p if t.dim() == 1 else (t.mT if transposed else t) @ p for t, p in pairs], -2)


def towards(block: Tensor, right: Tensor, least: float) -> Tensor:
    """(AᵀA + εI)⁻¹AᵀX, ``(..., M, n)``, of A, ``(..., K, M)``, or a diagonal; in float64 where there is such."""
    wide = block.to(wider(block))
    if block.dim() == 1:
        return right.to(wide) / wide[:, None]
    normal = wide.mT @ wide
    shift = max(least, rounding(normal)) * normal.diagonal(dim1=-2, dim2=-1).mean(-1)
    shift = shift.clamp(min=torch.finfo(normal.dtype).eps)[..., None]  # features may all be 0
    factor = cholesky(normal + torch.diag_embed(shift.expand(normal.shape[:-1])), 0.0, "AᵀA of natural steps")
    return torch.cholesky_solve(wide.mT @ right.to(wide), factor)
