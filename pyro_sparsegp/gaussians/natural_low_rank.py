"""Block plus low-rank precisions by natural steps, at a cost linear in the number of blocks.

The damped natural step has the precision and the mean

    P̂ = P + (ρ/c)(cI + Φᵀ2HΦ − cP),   P̂(m̂ − m) = −(ρ/c)(Φᵀg + cm),

and P̂ is not of the form P = blockdiag(D) + BBᵀ: sweeps of :mod:`.factor_analysis` go to the best P of that form. Of
many coefficients P̂ is not formed, and the mean is found by conjugate gradients. Compare SLANG (Mishkin et al., 2018),
of a diagonal plus low rank.

Under another L the sums of sites, D − I + BBᵀ and Pm, keep their meaning about u, as in :mod:`.natural`, and their
form: with T = blockdiag(L₀⁻¹L) they are Tᵀ(D − I)T + (TᵀB)(TᵀB)ᵀ and TᵀPm. Of D − I only the positive part is turned,
so that what is left stays positive definite. The mean that is kept is not found anew of Pm, but moved along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor

from ..numerics.functions import Function
from ..numerics.linalg import cholesky, flags_kept, root_of_inverse, solve_lower, solve_upper, turn_of
from ..numerics.processes import is_shared, joined, largest
from .factor_analysis import (
    Columns,
    Formed,
    Products,
    Target,
    above_one,
    eye_like,
    lifted,
    sweep,
    times,
    times_blocks,
)
from .groups import Groups, each_times, stacked
from .nearest import assembled, nearest
from .optimal import from_natural
from .precision import LowRankGaussian, leading_directions
from .product import Product
from .steps import DEFAULT_RATE, KNOWN, Heard, Lift, Listening, Rate, StepsOnBackward, cautious, listen, softened

__all__ = ["NaturalLowRank"]

_FEW = 512  # coefficients up to which P̂ is formed
_SMALL, _SLOW = 256, 0.25  # and up to which one sweep a step does for two, at rates up to this
_BUFFERS = ("loc", "block", "low_rank", "gain", "seat")

Blocks = list[Tensor]
Seats = list[Optional[Tensor]]


class _Listening(Listening, LowRankGaussian):
    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        phi = self.beside(features)
        if self.covariance is not None and phi.dim() == 2:
            covariance = self.covariance.view_as(self.covariance)  # whose gradient is of these rows alone
            mean, change = self.moments_by(phi, covariance)
            self.key = listen(self.module, self.heard, features, mean, change, covariance, phi)
            return mean, change
        sums: Optional[dict[str, Tensor]] = None if sum(self.sizes) > _FEW else {}
        mean, change = self.moments_beside(phi, sums)
        self.key = listen(self.module, self.heard, features, mean, change, whole=phi, sums=sums)
        return mean, change


class _MeanAndParts(Function):
    """(unit, B, r, D) ↦ m = P⁻¹r for P = blockdiag(D) + BBᵀ, and of S = P⁻¹ = RRᵀ − VVᵀ = R(I − TᵀT)Rᵀ V, tr S,
    log|S|, and the parts RᵀB, A, T and R.

    R_bR_bᵀ = D_b⁻¹, AAᵀ = I + BᵀRRᵀB, T = A⁻¹BᵀR and V = RTᵀ, with lower triangular R_b and A. On the way back, with
    tril½ the lower triangle with its diagonal halved, symm X = X + Xᵀ, u = Sm̄ and the gradients τ by tr S and λ by
    log|S|, which go V̄ ← V̄ − 2τV, R̄ ← R̄ + 2τR + V̄T and T̄ ← T̄ + V̄ᵀR,

        b̄ = [A⁻ᵀ(T̄ + (symm(tril½(AᵀĀ − T̄Tᵀ)) − 2λI)T)]ᵀ + the gradient by RᵀB itself,   r̄ = u,
        B̄ = Rb̄ − u(Bᵀm)ᵀ − m(Bᵀu)ᵀ,   D̄ = −½R(symm(tril½(Rᵀ(R̄ + Bb̄ᵀ))) + 2λI)Rᵀ − ½ symm(umᵀ),

    blocks on the diagonal. Autograd would go back through two factorisations. The unit is that of :class:`.steps.Lift`.
    """

    @staticmethod
    def forward(groups: Groups, unit: Tensor, low_rank: Tensor, pull: Tensor, *blocks: Tensor) -> tuple[Tensor, ...]:
        roots, b, inner, t, v, log_det = _parts(groups, low_rank, blocks)
        trace = -v.square().sum((-2, -1))
        for root in roots:
            trace = trace + root.square().sum((-3, -2, -1))
        return _times_covariance(groups, roots, t, pull), v, trace, log_det, b, inner, t, *roots

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.groups, _, low_rank, *_ = inputs
        m, v, _, _, _, inner, t, *roots = output
        ctx.save_for_backward(low_rank, m, v, inner, t, *roots)
        ctx.save_for_forward(low_rank, m, v, inner, t, *roots)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        groups = ctx.groups
        low_rank, m, v, inner, t, *roots = ctx.saved_tensors
        by_m, by_v, by_trace, by_log_det, by_b, by_inner, by_t, *by_roots = grads
        trace, log_det = (2 * (m.new_zeros(()) if by is None else by)[..., None] for by in (by_trace, by_log_det))
        u = torch.zeros_like(m) if by_m is None else _times_covariance(groups, roots, t, by_m)
        by_v = (0 if by_v is None else by_v) - trace[..., None] * v
        right = times_blocks(groups, [root.mT for root in roots], by_v)  # T̄ᵀ
        right = right if by_t is None else right + by_t.mT
        product = (t @ right).mT
        both = _both_halves(product if by_inner is None else product - inner.mT @ by_inner)
        both.diagonal(dim1=-2, dim2=-1).add_(log_det)
        by_own = solve_upper(inner, right.mT - both @ t).mT
        by_b = by_own if by_b is None else by_own + by_b
        by_low_rank = times_blocks(groups, roots, by_b) - u @ (m.mT @ low_rank) - m @ (u.mT @ low_rank)
        by_blocks = []
        cuts = (groups.cut(part) for part in (low_rank, by_b, by_v, t.mT, u, m))
        for root, by_root, own, by_own, by_vb, tb, left, right in zip(roots, by_roots, *cuts):
            by_root = trace[..., None, None] * root + (0 if by_root is None else by_root)
            by_root = by_root + each_times(by_vb, tb.mT) + each_times(own, by_own.mT)
            both = _both_halves(each_times(root.mT, by_root))
            both.diagonal(dim1=-2, dim2=-1).add_(log_det[..., None])
            outer = each_times(left, right.mT)
            by_blocks.append(-0.5 * (each_times(each_times(root, both), root.mT) + outer + outer.mT))
        return None, m.new_zeros(()), by_low_rank, u, *by_blocks

    @staticmethod
    def jvp(
        ctx: Any, _: Any, __: Any, dlow: Optional[Tensor], dpull: Optional[Tensor], *dblocks: Optional[Tensor]
    ) -> Any:
        groups = ctx.groups
        low_rank, m, v, inner, t, *roots = ctx.saved_tensors
        dlow = torch.zeros_like(low_rank) if dlow is None else dlow
        dpull = torch.zeros_like(m) if dpull is None else dpull
        dd = [torch.zeros_like(root) if d is None else d for d, root in zip(dblocks, roots)]
        droots = [-root @ _half(root.mT @ d @ root) for root, d in zip(roots, dd)]
        b = times_blocks(groups, [root.mT for root in roots], low_rank)
        db = times_blocks(groups, [d.mT for d in droots], low_rank) + times_blocks(
            groups, [root.mT for root in roots], dlow
        )
        right = solve_lower(inner, (db.mT @ b + b.mT @ db).mT)
        within = _half(solve_lower(inner, right.mT))
        dinner = inner @ within
        dt = solve_lower(inner, db.mT - dinner @ t)
        dv = times_blocks(groups, droots, t.mT) + times_blocks(groups, roots, dt.mT)
        dtrace = -2 * (v * dv).sum((-2, -1))
        dlog_det = -2 * within.diagonal(dim1=-2, dim2=-1).sum(-1)
        for root, d in zip(roots, droots):
            dtrace = dtrace + 2 * (root * d).sum((-3, -2, -1))
            dlog_det = dlog_det + 2 * (d / root).diagonal(dim1=-2, dim2=-1).sum((-2, -1))
        moved = times_blocks(groups, dd, m) + dlow @ (low_rank.mT @ m) + low_rank @ (dlow.mT @ m)
        return _times_covariance(groups, roots, t, dpull - moved), dv, dtrace, dlog_det, db, dinner, dt, *droots

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


class _Known(Function):
    """(near, rest, B, D) ↦ m = near + S·rest, S = (blockdiag(D) + BBᵀ)⁻¹ as one matrix, tr S, log|S|, and V and A of
    :class:`_MeanAndParts`, unbatched, where hyperparameters move sites along with L alone; rest is ``None`` for 0.

    P − K = Tᵀ(P₀ − K)T and Pm = Tᵀr₀ with T = L₀⁻¹L and a K of blocks on the diagonal have, for E = L⁻¹dL,
    dP = Eᵀ(P − K) + (P − K)E and d(Pm) = EᵀPm, and (P − K)S = I − KS, which leaves one product of matrices of all
    coefficients on the way back: with V = S̄ + tI, the gradients a by m, t by the trace and l by log|S|, and u = Sa,

        Ē = −2(VS + lI + ½amᵀ) + 2K(SVS + lS + ½(umᵀ + muᵀ)),

    of which the lower triangles of blocks on the diagonal count. It goes to the zeros of
    :func:`~..numerics.linalg.turn_of`, as in :mod:`.natural`. The unit is that of :class:`.steps.Lift`.

    :param parts: D, K and the zeros, or ``None``, of each group of blocks.
    """

    @staticmethod
    def forward(
        groups: Groups, unit: Tensor, near: Tensor, rest: Optional[Tensor], low_rank: Tensor, *parts: Optional[Tensor]
    ) -> tuple[Tensor, ...]:
        roots, _, inner, _, v, log_det = _parts(groups, low_rank, parts[::3])
        covariance = torch.mm(-v, v.mT)
        for own, root in zip(groups.diagonal(covariance), roots):
            own.add_(each_times(root, root.mT))
        trace = covariance.diagonal().sum()
        return near.clone() if rest is None else near + covariance @ rest, covariance, trace, log_det, v, inner

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.groups, *_ = inputs
        tensors = output[0], output[1], *inputs[6::3]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*output[4:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, a: Optional[Tensor], by_covariance: Optional[Tensor], by_trace: Any, by_log_det: Any, *_: Any
    ) -> Any:
        groups = ctx.groups
        loc, covariance, *kept = ctx.saved_tensors
        unit = loc.new_zeros(())
        needs = ctx.needs_input_grad[7::3]
        if not any(needs):
            return None, unit, *[None] * (3 + 3 * len(kept))
        if torch.is_grad_enabled():  # whose own gradients are to be symmetric
            covariance = 0.5 * (covariance + covariance.mT)
        half = torch.zeros_like(covariance) if by_covariance is None else by_covariance @ covariance
        half = half if by_trace is None else torch.addcmul(half, covariance, by_trace)
        log_det = unit if by_log_det is None else by_log_det
        a = torch.zeros_like(loc) if a is None else a
        wholes = covariance, half.mT, covariance @ a, a, loc
        cuts = zip(needs, kept, groups.diagonal(half), groups.diagonal(covariance), *map(groups.cut, wholes))
        found: list[Optional[Tensor]] = []
        for is_moved, k, own, s, rows, columns, u, by_loc, m in cuts:
            outer = each_times(u, m.mT)
            inner = torch.baddbmm(s * log_det, rows, columns.mT).add_(outer + outer.mT, alpha=0.5)
            by_turn = torch.baddbmm(own, k, inner, alpha=-1).baddbmm_(by_loc, m.mT, alpha=0.5)
            by_turn.diagonal(dim1=-2, dim2=-1).add_(log_det)
            found += None, None, -2 * by_turn if is_moved else None
        return None, unit, None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *changes: Optional[Tensor]) -> Any:
        groups = ctx.groups
        loc, covariance, *kept = ctx.saved_tensors
        turn = torch.zeros_like(covariance)
        for own, change in zip(groups.diagonal(turn), changes[7::3]):
            own.add_(0 if change is None else change)
        scaled, back = times_blocks(groups, kept, covariance), covariance @ turn.mT
        change = back @ scaled - back
        change = change + change.mT
        along = turn @ loc
        mean = back @ times_blocks(groups, kept, loc) + scaled.mT @ along - along
        log_det = 2 * ((scaled * turn).sum() - turn.diagonal().sum())
        return mean, change, change.diagonal().sum(), log_det, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


class _Turned(Function):
    """T ↦ Tᵀp, TᵀB and D + TᵀGT − G for a symmetric G, of which T alone has a gradient, GT(D̄ + D̄ᵀ) + pp̄ᵀ + BB̄ᵀ."""

    @staticmethod
    def forward(turn: Tensor, pull: Tensor, low_rank: Tensor, block: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
        turned, back = each_times(gain, turn), turn.mT
        return each_times(back, pull), each_times(back, low_rank), block + (each_times(back, turned) - gain), turned

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        turn, pull, low_rank, _, gain = inputs
        ctx.save_for_backward(pull, low_rank, output[3], turn, gain)
        ctx.save_for_forward(turn, pull, low_rank, gain)
        ctx.mark_non_differentiable(output[3])

    @staticmethod
    def backward(ctx: Any, by_pull: Tensor, by_low_rank: Tensor, by_block: Tensor, _: Any) -> Any:
        pull, low_rank, turned, turn, gain = ctx.saved_tensors
        if torch.is_grad_enabled():  # the output has no gradient
            turned = each_times(gain, turn)
        by_turn = each_times(turned, by_block + by_block.mT)
        by_turn = by_turn + each_times(pull, by_pull.mT) + each_times(low_rank, by_low_rank.mT)
        return by_turn, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *_: Any) -> Any:
        turn, pull, low_rank, gain = ctx.saved_tensors
        half = turn.mT @ gain @ change
        return change.mT @ pull, change.mT @ low_rank, half + half.mT, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


def _parts(
    groups: Groups, low_rank: Tensor, blocks: Sequence[Any]
) -> tuple[Columns, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """R, RᵀB, A, T, V and log|S| of :class:`_MeanAndParts`."""
    roots = [root_of_inverse(d, False, "a block of a low-rank precision") for d in blocks]
    b = times_blocks(groups, [root.mT for root in roots], low_rank)
    gram = b.mT @ b
    gram.diagonal(dim1=-2, dim2=-1).add_(1)
    inner = cholesky(gram, 0.0, "I + BᵀD⁻¹B")
    t = solve_lower(inner, b.mT)
    log_det = -2 * inner.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    for root in roots:
        log_det = log_det + 2 * root.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
    return roots, b, inner, t, times_blocks(groups, roots, t.mT), log_det


def _times_covariance(groups: Groups, roots: Columns, t: Tensor, v: Tensor) -> Tensor:
    """R(I − TᵀT)Rᵀv."""
    scaled = times_blocks(groups, [root.mT for root in roots], v)
    return times_blocks(groups, roots, scaled - t.mT @ (t @ scaled))


def _half(matrix: Tensor) -> Tensor:
    """The lower triangle, its diagonal halved."""
    lower = matrix.tril()
    lower.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    return lower


def _both_halves(matrix: Tensor) -> Tensor:
    """The lower triangle and its transpose: the matrix itself, where it is symmetric."""
    half = _half(matrix)
    return half + half.mT


class _Kept(NamedTuple):
    """What is kept of q, stacked by the blocks' sizes: m, D and B, the part of D that is turned, and the L + ηsI that
    these belong to.
    """

    loc: Columns
    blocks: Columns
    low_rank: Columns
    gains: Columns
    seats: Columns


class _Seen(NamedTuple):
    """The same sites under another L: a and b with m = a + P⁻¹b, ``None`` for b = 0, D, B, and K, the part of D that
    stays.
    """

    near: Columns
    rest: Optional[Columns]
    blocks: Columns
    low_rank: Columns
    kept: Columns


@dataclass
class _Base:
    """Of a forward pass: m, D and B, stacked by the blocks' sizes, and L + ηsI of each block that these belong to; V
    and A of :func:`sweep`, where they are there.
    """

    loc: Columns
    blocks: Columns
    low_rank: Columns
    seats: Optional[Seats]
    known: Optional[tuple[Tensor, Tensor]] = None


class NaturalLowRank(StepsOnBackward):
    """q(w) = N(m, (blockdiag(D) + BBᵀ)⁻¹) by natural steps, each projected on that form.

    (The form: Adam, Durrande and John, 2018; the projection is factor analysis, Rubin and Thayer, 1982.)

    Negative curvatures, of likelihoods that are not log-concave or as draws of function values show them by chance, are
    cut where the step would leave less than half of the precision there is; to see that P̂ is formed. So it is where q
    is drawn from: it has the curvature E ∇²f = E ∇f(w)(w − m)ᵀP then (Stein's identity), an M x M matrix.

    :param rank: the number of columns of B; ``None`` is the size of the largest block, 0 makes independent blocks,
        whose precisions are those of P̂ on its diagonal; the mean is that of the whole P̂.
    :param base: whether D is free; else it is I.
    :param rate: ρ of the step P̂ = (1 − ρ)P + ρ(I + ΦᵀΛΦ) before it is projected, in (0, 1] or a function of the number
        of steps taken; by default as of :class:`NaturalGaussian`.
    :param sweeps: of expectation maximisation a step; by default 2, or 1 for up to 256 coefficients at rates of at
        most 0.25, whose P̂ is near P.
    :param iterations: of conjugate gradients a step.
    :param softness: η, as of :class:`NaturalGaussian`.
    """

    anchored: ClassVar[bool] = True
    by_block: ClassVar[bool] = True

    def __init__(
        self,
        sizes: Sequence[int],
        batch_shape: Sequence[int],
        like: Tensor,
        rank: Optional[int] = None,
        base: bool = True,
        rate: Rate = DEFAULT_RATE,
        sweeps: Optional[int] = None,
        iterations: int = 10,
        softness: float = 0.03,
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.softness = softness
        self.rank, self.base = max(self.sizes) if rank is None else rank, base
        self.sweeps, self.iterations = sweeps, iterations
        self._groups = Groups(self.sizes)
        # 0 is a fixed point of the sweeps: small and random.
        small = [
            0.1 * torch.randn(*batch_shape, num, self.rank, dtype=like.dtype, device=like.device) for num in self.sizes
        ]
        low_rank = self._groups.stack([b / (sum(self.sizes) * self.rank) ** 0.25 for b in small])
        for i, (group, b) in enumerate(zip(self._groups.members, low_rank)):
            lead, num = (*batch_shape, len(group)), self.sizes[group[0]]
            self.register_buffer(f"locs_{i}", like.new_zeros(*lead, num, 1))
            self.register_buffer(f"blocks_{i}", eye_like(b.mT).expand(*lead, num, num).clone())
            self.register_buffer(f"low_ranks_{i}", b)
            self.register_buffer(f"gains_{i}", like.new_zeros(*lead, num, num))  # the positive part of D - I
            self.register_buffer(f"seats_{i}", like.new_zeros(len(group), 0, 0))

    # Blocks of equal size are one buffer, got by the way round a Pyro module's attributes, which would take as long as
    # the algebra of small ones; states have them block by block.

    def _stacked(self, name: str) -> Columns:
        return [self._buffers[f"{name}s_{i}"] for i in range(len(self._groups.members))]  # type: ignore[misc]

    def _keep(self, name: str, values: Columns) -> None:
        """Take stacked values of the buffers' own dtype and shapes."""
        self._buffers.update((f"{name}s_{i}", value.contiguous()) for i, value in enumerate(values))

    def _each(self, name: str) -> Blocks:
        groups = self._groups
        return groups.vectors(self._stacked(name)) if name == "loc" else groups.unstack(self._stacked(name))

    def _put_each(self, name: str, values: Sequence[Tensor]) -> None:
        values = [value.to(now).expand(now.shape) for value, now in zip(values, self._each(name))]
        self._keep(name, self._groups.columns(values) if name == "loc" else self._groups.stack(values))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _BUFFERS:
            for i in range(len(self._groups.members)):
                del destination[f"{prefix}{name}s_{i}"]
            destination.update((f"{prefix}{name}_{b}", part.detach()) for b, part in enumerate(self._each(name)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in _BUFFERS:
            keys = [f"{prefix}{name}_{b}" for b in range(len(self.sizes))]
            if all(key in state_dict for key in keys):
                parts = [state_dict.pop(key) for key in keys]
                whole = self._groups.columns(parts) if name == "loc" else self._groups.stack(parts)
                state_dict.update((f"{prefix}{name}s_{i}", value) for i, value in enumerate(whole))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _put_blocks(self, blocks: Sequence[Tensor]) -> None:
        lifted, gains = zip(*map(above_one, blocks))
        self._put_each("block", lifted)
        self._put_each("gain", gains)

    def start(self, anchor: Any, features: Optional[Sequence[Tensor]]) -> None:
        """Start P at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading directions: the level's first."""
        if features is None:
            return
        found = small = self._each("low_rank")
        if self.rank:
            found, spare = leading_directions(features, small)
            self._put_each("low_rank", [u.to(b) + b * spare[..., None, :] for u, b in zip(found, small)])
        if self.base:
            eyes = [torch.eye(phi.shape[-1], dtype=phi.dtype, device=phi.device) for phi in features]
            blocks = [e + p.mT @ p - u @ u.mT for e, p, u in zip(eyes, features, found)]
            self._put_blocks([0.5 * (d + d.mT) for d in blocks])
        self._sit(self._seats(anchor))

    def _seats(self, anchor: Any) -> Optional[Seats]:
        """L + ηsI, stacked by the blocks' sizes; ``None`` where w itself has a meaning."""
        if anchor is None:
            return None
        found: Seats = []
        for group in self._groups.members:
            parts = self._groups.of_group(anchor, group)
            if all(part is not None for part in parts):
                found.append(softened(stacked(parts), self.softness))
            else:
                found.append(self._filled([None if part is None else softened(part, self.softness) for part in parts]))
        return found

    def _filled(self, parts: Sequence[Optional[Tensor]]) -> Optional[Tensor]:
        """Matrices of equal size as one, I in the place of those that are not there; ``None`` where none is."""
        like = next((part for part in parts if part is not None and part.numel()), None)
        if like is None:
            return None
        eye = eye_like(like)
        return stacked([eye if part is None or not part.numel() else part for part in parts])

    def _sit(self, seats: Optional[Seats]) -> None:
        for i, seat in enumerate(seats or ()):
            if seat is not None:
                self._buffers[f"seats_{i}"] = seat.detach().to(self._stacked("loc")[i])

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start at that mean, at the rate of the tenth step."""
        self._put_each("loc", loc.split(self.sizes, -1))
        self.skip(KNOWN)

    def _kept(self) -> _Kept:
        return _Kept(*(self._stacked(name) for name in _BUFFERS))

    def _seen_from(self, seats: Optional[Seats], kept: Optional[_Kept] = None) -> _Seen:
        """Pm ← TᵀPm with T = L₀⁻¹L is m ← T⁻¹m + P⁻¹(TᵀK − KT⁻¹)m, with the part K of D that is not turned."""
        locs, blocks, low_rank, gains, before = map(list, self._kept() if kept is None else kept)
        near, rest = list(locs), [torch.zeros_like(m) for m in locs]
        stays = [d - gain for d, gain in zip(blocks, gains)] if self.base else []
        any_moved = False
        for i, (then, now) in enumerate(zip(before, seats or ())):
            if now is None or not then.numel():
                continue
            any_moved, moved, loc = True, now - then, near[i]
            turn = solve_lower(then, moved) + eye_like(then)
            near[i] = loc - solve_lower(now, each_times(moved, loc))
            if self.base:
                turned = _Turned.apply if turn.requires_grad else _Turned.forward
                along, low_rank[i], blocks[i], _ = turned(
                    turn, each_times(stays[i], loc), low_rank[i], blocks[i], gains[i]
                )
                rest[i] = along - each_times(stays[i], near[i])
            else:
                rest[i], low_rank[i] = turn.mT @ loc - near[i], turn.mT @ low_rank[i]
        return _Seen(near, rest if any_moved else None, blocks, low_rank, stays)

    def _gaussian(self, seen: _Seen, unit: Tensor) -> LowRankGaussian:
        near, rest, blocks, low_rank, _ = seen
        if self.base and rest is not None:
            over = self._groups.over
            parts = _MeanAndParts.apply(self._groups, unit, over(low_rank), over(rest), *blocks)
            m, v, trace, log_det, b, inner, t, *roots = parts
            loc, b, t = (self._groups.cut(part) for part in (m, b, t.mT))
            loc = [a + part for a, part in zip(near, loc)]
            t = [part.mT for part in t]
            return LowRankGaussian.of_parts(self._groups, loc, b, roots, inner, t, v, trace, log_det)
        if self.base:
            trils: Optional[Columns] = [root_of_inverse(Lift.apply(d - eye_like(d), unit)) for d in blocks]
            b = [tril.mT @ part for tril, part in zip(trils or (), low_rank)]
        else:
            trils, b = None, [Lift.apply(part, unit) for part in low_rank]
        loc = [Lift.apply(m, unit) for m in near]
        q = LowRankGaussian.of_groups(self._groups, loc, b, trils)
        if rest is None:
            return q
        return q.with_loc([m + part for m, part in zip(loc, q.covariance_times_columns(rest))])

    def _small(self, seats: Optional[Seats], unit: Tensor) -> tuple[LowRankGaussian, _Seen, tuple[Tensor, Tensor]]:
        """q(w) by S as one matrix, the sites that it is of, and V and A."""
        groups, kept = self._groups, self._kept()
        seen = self._seen_from(None if seats is None else [at if at is None else at.detach() for at in seats], kept)
        turns: Seats = [None] * len(kept.seats)
        for i, (then, now) in enumerate(zip(kept.seats, seats or ())):
            if now is not None and then.numel():
                turns[i] = turn_of(now)
        rest = None if seen.rest is None else groups.over(seen.rest)
        parts = [part for each in zip(seen.blocks, seen.kept, turns) for part in each]
        loc, covariance, trace, log_det, v, inner = _Known.apply(
            groups, unit, groups.over(seen.near), rest, groups.over(seen.low_rank), *parts
        )

        def of_parts() -> LowRankGaussian:
            return self._gaussian(self._seen_from(seats, kept), unit)

        q = LowRankGaussian.of_covariance(groups, groups.cut(loc), covariance, trace, log_det, of_parts)
        return q, seen, (v, inner)

    def forward(self, anchor: Any = None) -> LowRankGaussian:
        self.settle()
        seats, unit = self._seats(anchor), self.unit
        if not torch.is_grad_enabled():
            return self._gaussian(self._seen_from(seats), unit)
        if self.base and not self.batch_shape and sum(self.sizes) <= _SMALL:
            q, seen, known = self._small(seats, unit)
        else:
            seen = self._seen_from(seats)
            q = self._gaussian(seen, unit)
            known = q.low_rank.detach(), q.inner.detach()
        loc, blocks, low_rank = ([part.detach() for part in parts] for parts in (q.columns, seen.blocks, seen.low_rank))
        listening = _Listening.__new__(_Listening)
        listening.__dict__.update(q.__dict__)
        return listening.heard_by(self, Heard(_Base(loc, blocks, low_rank, seats, known), unit))

    @torch.no_grad()
    def sums(self, anchor: Any) -> tuple[Tensor, Tensor]:
        """P − I and Pm under L, ``(..., M, M)``; those of the prior, 0, where no step has been taken."""
        self.settle()
        near, rest, blocks, low_rank, _ = self._seen_from(self._seats(anchor))
        whole = assembled(self._groups.unstack(blocks), self._groups.unstack(low_rank))
        r = whole @ torch.cat(self._groups.unstack(near), -2)
        r = r if rest is None else r + torch.cat(self._groups.unstack(rest), -2)
        known = float(self.steps_taken > 0)
        return known * (whole - eye_like(whole)), known * r[..., 0]

    @torch.no_grad()
    def put_sums(self, anchor: Any, gram: Tensor, pull: Tensor) -> None:
        """Have q be the nearest to that of G and r under L, with their mean: steps go on at a later one's rate."""
        whole = (0.5 * (gram + gram.mT) + eye_like(gram)).expand(*self.batch_shape, *gram.shape[-2:])
        loc = torch.cholesky_solve(pull.expand(whole.shape[:-1])[..., None], cholesky(whole, 0.0, "I + G"))[..., 0]
        blocks, low_rank = nearest(whole, self.sizes, self.rank, self.base)
        self._put_each("loc", loc.split(self.sizes, -1))
        self._put_each("low_rank", low_rank)
        if self.base:
            self._put_blocks(blocks)
        self._sit(self._seats(anchor))
        self.skip(max(KNOWN - self.steps_taken, 0))

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r, before it is brought to its form."""
        return from_natural(gram, pull, self.sizes)

    def step(self, heard: Heard, weight: Tensor, total_weight: Tensor, rate: float, again: bool) -> None:
        base: _Base = heard.base
        groups = self._groups
        inside = heard.weight_inside(self.batch_shape)
        own = weight if inside is None else weight - inside  # the draws' gradients have the rest
        each, weight, own = (part[..., None, None] for part in (rate / total_weight, weight, own))
        kept = 1 - each * own
        with flags_kept() as flags:  # a step can't be taken again: what has failed is looked at here, and left out
            here = self._from(base.seats) if again else base
            target = self._target(heard, here, each, kept)
            aims = target.blocks() if self.base else None
            blocks, low_rank = here.blocks, groups.over(here.low_rank)
            blocks, low_rank = sweep(groups, target, aims, blocks, low_rank, here.known)
            for _ in range(1, self.sweeps or (1 if rate <= _SLOW and sum(self.sizes) <= _SMALL else 2)):
                found = blocks if aims is None else lifted(blocks, aims)
                blocks, low_rank = sweep(groups, target, aims, found, low_rank)
            right = -each * (weight * groups.over(base.loc) + self._slope(heard, inside))
            shift = target.solve(right, aims, blocks, low_rank, self.iterations)
        shift = cautious(shift[..., 0], heard, groups.order, target.cut)[..., None]
        loc = [m + x for m, x in zip(here.loc, groups.cut(shift))]
        low = groups.cut(low_rank)
        failed = sum(flag.count_nonzero() for flag in flags)
        size = sum(part.sum() for part in (*loc, *blocks, *low))
        fine = (0 * size == failed) & (each > 0).all()  # 0 times a number that is finite is 0
        loc, blocks, low = (
            [torch.where(fine, a, b) for a, b in zip(new, old)]
            for new, old in ((loc, here.loc), (blocks, here.blocks), (low, here.low_rank))
        )
        self._keep("loc", loc)
        self._keep("low_rank", low)
        if aims is not None:
            blocks, gains = map(list, zip(*map(above_one, blocks, aims)))
            self._keep("block", blocks)
            self._keep("gain", gains)
        self._sit(base.seats)

    def _target(self, heard: Heard, here: _Base, each: Tensor, kept: Tensor) -> Target:
        """P̂, formed where it is small, and where curvatures are negative or shown by draws."""
        groups, low_rank = self._groups, self._groups.over(here.low_rank)
        curved = heard.curved()
        signed = bool(heard.draws) or _any_signed(curved)
        if not signed and sum(self.sizes) <= _FEW:
            grams = [row["by_covariance"] if "by_covariance" in row else self._gram(heard, row) for row in curved]
            data = 2 * each * sum(grams[1:], grams[0]) if grams else torch.zeros_like(low_rank @ low_rank.mT)
            return Formed(groups, here.blocks, low_rank, kept, data)
        rows = [(heard.whole(row, groups.order), each * (2 * row["by_change"])[..., None]) for row in curved]
        if not signed:
            return Products(groups, here.blocks, low_rank, kept, rows)
        data = sum(
            (phi.mT @ (phi * curvature.clamp(min=0)) for phi, curvature in rows),
            torch.zeros_like(low_rank @ low_rank.mT),
        )
        formed = Formed(groups, here.blocks, low_rank, kept, data)
        shown = each * self._curvature_by_draws(heard)
        formed.add(shown + sum(phi.mT @ (phi * curvature.clamp(max=0)) for phi, curvature in rows))
        return formed

    def _slope(self, heard: Heard, inside: Optional[Tensor]) -> Tensor:
        """Φᵀg and the draws' gradients without the prior's that they hold, joined over processes."""
        order, before = self._groups.order, self._groups.over(heard.base.loc)
        found = [
            row["by_loc"] if "by_loc" in row else heard.whole(row, order).mT @ row["by_mean"][..., None]
            for row in heard.rows.values()
            if "by_mean" in row
        ]
        slope = sum(found[1:], found[0]) if found else torch.zeros_like(before)
        for _, grad in heard.draws.values():
            slope = slope + self._ordered(grad).reshape(-1, *slope.shape[:-1]).sum(0)[..., None]
        return joined(slope if inside is None else slope - inside[..., None, None] * before)[0]

    def _gram(self, heard: Heard, row: dict[str, Any]) -> Tensor:
        """ΦᵀHΦ."""
        phi = heard.whole(row, self._groups.order)
        return phi.mT @ (phi * row["by_change"][..., None])

    def _ordered(self, w: Tensor) -> Tensor:
        """A vector's blocks in the order of their sizes."""
        parts = w.split(self.sizes, -1)
        return torch.cat([parts[b] for b in self._groups.order], -1)

    def _curvature_by_draws(self, heard: Heard) -> Tensor:
        """½(C + Cᵀ) with C = Σ ∇f(w)(w − m)ᵀP over draws of q, its blocks in the order of their sizes."""
        base: _Base = heard.base
        groups, low_rank = self._groups, self._groups.over(base.low_rank)
        found = torch.zeros_like(low_rank @ low_rank.mT)
        for centred, grad in heard.draws.values():
            scaled = times(groups, base.blocks, low_rank, self._ordered(centred)[..., None])
            one = self._ordered(grad)[..., None] * scaled.mT
            found = found + one.reshape(-1, *found.shape).sum(0)
        return 0.5 * (found + found.mT)

    def _from(self, seats: Optional[Seats]) -> _Base:
        """What there is, under another L."""
        seen = self._seen_from(seats)
        return _Base(list(self._gaussian(seen, self.unit).columns), seen.blocks, seen.low_rank, seats)


def _any_signed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a row's curvatures are, in any of the processes."""
    if not rows:
        return False
    signed = any(row["signed"] for row in rows)
    return bool(largest(rows[0]["by_change"].new_tensor(float(signed))) > 0) if is_shared() else signed
