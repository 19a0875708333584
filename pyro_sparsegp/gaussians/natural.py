"""Full covariances by natural steps, and block plus low-rank precisions, at a cost linear in the number of blocks.

P̂ of a damped natural step is not of the form P = blockdiag(D) + BBᵀ: sweeps of :mod:`.factor_analysis` go to the best P
of that form. Of many coefficients P̂ is not formed, and the mean is found by conjugate gradients. Compare SLANG (Mishkin
et al., 2018), of a diagonal plus low rank.

Under another L sites keep their form: with T = blockdiag(L₀⁻¹L) D − I + BBᵀ becomes Tᵀ(D − I)T + (TᵀB)(TᵀB)ᵀ. Of D − I
only the positive part is turned, so that what is left stays positive definite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..numerics.linalg import (
    Unbound,
    cholesky,
    flags_kept,
    lift_to,
    on_diagonal,
    plus_one,
    root_of_inverse,
    side_by_side,
    solve_lower,
)
from ..numerics.processes import largest
from .about_values import AboutValues, Parts, Seen
from .base import Stack, each_times, eye_like, solved
from .factor_analysis import Formed, Products, above_one, sweep
from .factors import DenseFactor, IdentityFactor, LowRankFactor
from .free import FullCholesky, leading_directions, small_columns
from .product import Product, from_natural, slices
from .seats import Seat, softened
from .steps import DEFAULT_RATE, Pass, Rate

_BY_DRAWS = 0.3  # η where draws alone show curvatures


class NaturalGaussian(AboutValues):
    """q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw), or its best approximation by independent blocks, by natural steps.

    (Khan and Lin, 2017; Salimbeni, Eleftheriadis and Hensman, 2018; Adam, Chang, Khan and Solin, 2021.)

    G, ``(..., M, M)``, and r = (I + G)m, ``(..., M)``, are sums over the data (sites). Where the process has a constant
    mean that moves, they are about f = μ + Lw, r ← r − GL⁻¹δ for μ ← μ + δ: what f says of the data stays what it was,
    and the gradient by μ is that of the whole (else each step of μ would have to wait for q's).

    Under objectives that take no natural steps m is a parameter, and S = RAAᵀRᵀ with RRᵀ = (I + G)⁻¹ and a free lower
    triangular A, I at first, for each block.

    :param kind: the free posterior with the same layout of factors. These share the whole of G: their means are solved
        for together (a step with each one's own mean diverges where they are coupled).
    """

    gram: Tensor
    level: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        batch_shape: Sequence[int],
        like: Tensor,
        kind: Any = FullCholesky,
        rate: Rate = DEFAULT_RATE,
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        if not self.takes(kind):
            raise ValueError(
                "natural steps are of posteriors whose blocks each have a full covariance or the prior's; got "
                f"{getattr(kind, '__name__', kind)!r}: give the family natural=False"
            )
        self.layout = [(factor, tuple(group)) for factor, group in kind.layout(len(self.sizes))]
        self.slices = slices(self.sizes, [group for _, group in self.layout])  # the coefficients of each factor
        num = sum(self.sizes)
        self._stack, self._is_known = Stack([num]), len(self.layout) == 1 and not self.batch_shape
        self.tilt = torch.nn.Parameter(like.new_zeros(*batch_shape, num, num))
        self.register_buffer("gram", like.new_zeros(*batch_shape, num, num))
        self.register_buffer("level", like.new_zeros(0))  # μ that the sums belong to, (..., M), where it moves

    @staticmethod
    def takes(kind: Any) -> bool:
        """Whether the posteriors of that kind are products of factors with a full covariance or the prior's."""
        layout = getattr(kind, "layout", None)
        return layout is not None and all(factor in (DenseFactor, IdentityFactor) for factor, _ in layout(1))

    def start(self, anchor: Any, features: Sequence[Tensor]) -> None:
        phi, seat = side_by_side(features), self._seat(anchor)
        # I + G = I + λΦᵀΦ
        self.gram = (phi.mT @ phi).to(self.gram).expand(self.gram.shape).clone()
        if type(seat) is Seat:  # features at rows do not move before the first step, which has them with it
            self.seat = seat.kept.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        softness = torch.as_tensor(state_dict.pop(prefix + "softness", self.softness))  # one for each block, once
        self.softness = round(float(softness.flatten()[0]), 6)  # some were saved in float32
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        shape = (len(self.sizes),) if len(self.sizes) > 1 else ()  # a number for each block, as before
        destination[prefix + "softness"] = torch.full(shape, self.softness, dtype=torch.float64)

    def hold_by_draws(self) -> None:
        """Before any step: curvatures will be those of draws, whose noise is not small where L is. Held about u it
        would be magnified as L moves; sites are held nearer to w.
        """
        self.softness = _BY_DRAWS
        self.seat = self.seat.new_zeros(0, 0)  # a start belongs to any seat

    def anchor_of(self, features: Any, mean: Any = None) -> Any:
        # It follows from the first step on in which features train.
        anchor = features.anchor if self.seat.numel() or features.trains else None
        is_constant = isinstance(mean, Tensor) and mean.shape[-1:] in ((), (1,))
        moves = is_constant and (mean.requires_grad or self.level.numel())  # or did
        if anchor is not None and moves and (ones := features.ones) is not None:
            anchor = self._seat(anchor)
            anchor.level = mean * ones
        return anchor

    def _seat(self, anchor: Any) -> Any:
        return Seat(softened(anchor, self.softness, self.sizes)) if isinstance(anchor, Tensor) else anchor

    def _seen_from(self, seat: Any) -> Seen:
        loc = self._kept("loc")
        if not self._turns(seat):
            return Seen(loc, torch.zeros_like(loc), (self.gram,))
        gram, near, rest = seat.turned(self.seat, self.gram, loc)
        if seat.level is not None and self.level.numel():
            # r ← r − GL⁻¹δ is m ← m − L⁻¹δ + SL⁻¹δ
            along = seat.coefficients(seat.level - self.level)
            near, rest = near - along, rest + along
        return Seen(near, rest, (gram,))

    def _gram(self, parts: Parts) -> Tensor:
        return parts[0]

    def _made(self, seat: Any, held: Any, known: bool) -> tuple[Product, Seen]:
        try:
            return super()._made(seat, held, known)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # test_negative_curvatures_that_another_seat_magnifies_are_cut: beyond the prior's precision; the mean of u
            # is what it was.
            seen = self._seen_from(held)
            gram = seen.parts[0].detach()
            if not (self._turns(seat) and gram.isfinite().all()):
                raise
            seen = Seen(seen.near.detach(), torch.zeros_like(seen.near), (gram + lift_to(gram, -0.5),))
            return self._given(seen), seen

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        q = from_natural(gram, pull, self.sizes, [group for _, group in self.layout])
        # the mean is that of the whole; such a factor has the prior's covariance
        pairs = zip(self.layout, q.factors)
        q.factors = [IdentityFactor(f.loc) if kind is IdentityFactor else f for (kind, _), f in pairs]
        return q

    def _given(self, seen: Seen) -> Product:
        (gram,) = seen.parts
        q = self.of(gram, seen.rest)
        has_tilt = self.has_tilt
        for i, (own, factor) in enumerate(zip(self.slices, q.factors)):
            factor.loc = factor.loc + seen.near[..., own]
            # S = RAAᵀRᵀ
            if has_tilt and not isinstance(factor, IdentityFactor):
                root = root_of_inverse(plus_one(gram[..., own, own]), "I + G of natural steps")
                q.factors[i] = DenseFactor(factor.loc, root @ self.tilt_matrix[..., own, own])
        return q

    def _untilted(self, q: Product, parts: Parts) -> Parts:
        gram = parts[0].clone()
        for own, factor in zip(self.slices, q.factors):
            # G's block is S⁻¹ − I
            if isinstance(factor, DenseFactor):
                inverse = torch.cholesky_inverse(cholesky(factor.root @ factor.root.mT, 0.0, "S of natural steps"))
                gram[..., own, own] = inverse - eye_like(inverse)
        return (gram,)

    def _nearest(self, precision: Tensor) -> Parts:
        self.level = self.level.new_zeros(0)  # the mean's values now, which the next step notes
        return (precision - eye_like(precision),)

    def _put_parts(self, parts: Parts) -> None:
        self.gram = parts[0].expand(self.gram.shape)

    def _stepped(
        self, taken: Pass, parts: Parts, right: Tensor, rate: Tensor, weight: Tensor
    ) -> tuple[Parts, Tensor, Optional[Tensor], Tensor]:
        gram, cut = self._aim(taken, parts[0], rate, weight)
        shift, failed = solved(plus_one(gram), right)
        return (gram,), shift, cut, failed

    def _precision_of_draws(self, gram: Tensor) -> Tensor:
        # of independent factors each with its own block
        whole = plus_one(gram)
        blocks = [whole[..., own, own] for own in self.slices]
        parts = [eye_like(b) if kind is IdentityFactor else b for (kind, _), b in zip(self.layout, blocks)]
        return on_diagonal(parts, torch.zeros_like(whole))


_FEW = 512  # coefficients up to which P̂ is formed
_SMALL, _SLOW = 256, 0.25  # and up to which one sweep a step does for two, at rates up to this
_KEPT = ("loc", "low_rank", "block", "gain", "seat")


class NaturalLowRank(AboutValues):
    """q(w) = N(m, (blockdiag(D) + BBᵀ)⁻¹) by natural steps, each projected on that form.

    (The form: Adam, Durrande and John, 2018; the projection is factor analysis, Rubin and Thayer, 1982.)

    To see whether negative curvatures leave enough P̂ is formed. So it is where q is drawn from: it has the curvature
    E ∇²f = E ∇f(w)(w − m)ᵀP then (Stein's identity), an M x M matrix.

    Under objectives that take no natural steps m, B and a tilt A of each block, D⁻¹ = RAAᵀRᵀ, are parameters.

    :param rank: the number of columns of B; ``None`` is the size of the largest block, 0 makes independent blocks,
        whose precisions are those of P̂ on its diagonal; the mean is that of the whole P̂.
    :param base: whether D is free; else it is I.
    :param sweeps: of expectation maximisation a step; by default 2, or 1 for up to 256 coefficients at rates of at
        most 0.25, whose P̂ is near P.
    :param iterations: of conjugate gradients a step.
    """

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
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.base = base
        self.sweeps, self.iterations, self.last_rate = sweeps, iterations, 1.0
        self._stack = stack = Stack(self.sizes)
        self._is_known = sum(self.sizes) <= _FEW and not self.batch_shape
        square = like.new_zeros(*batch_shape, len(self.sizes), stack.size, stack.size)
        self.low_rank = torch.nn.Parameter(stack.rows(small_columns(self.sizes, batch_shape, rank, like)))
        self.rank = self.low_rank.shape[-1]
        if base:
            self.tilt = torch.nn.Parameter(square.clone())
        self.register_buffer("block", plus_one(square))
        self.register_buffer("gain", square)  # the positive part of D - I

    def anchor_of(self, features: Any, mean: Any = None) -> Any:
        return features.anchors  # its blocks on the diagonal, in a list

    # States have the parts block by block.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _KEPT:
            value = destination.pop(prefix + name)
            parts = [value] * len(self.sizes)
            if name == "loc":
                parts = list(value.split(self.sizes, -1))
            elif value.numel():
                parts = self._stack.blocks(value, square=name != "low_rank")
            destination.update((f"{prefix}{name}_{b}", part.contiguous()) for b, part in enumerate(parts))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        joins = {"loc": side_by_side, "low_rank": self._stack.rows}
        for name in _KEPT:
            keys = [f"{prefix}{name}_{b}" for b in range(len(self.sizes))]
            parts = [state_dict.pop(key) for key in keys if key in state_dict]
            if parts:
                state_dict[prefix + name] = joins.get(name, self._squares)(parts)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _squares(self, parts: Sequence[Tensor]) -> Tensor:
        # Blocks about w had no L + ηsI where all of their size are.
        eyes = [torch.eye(n).to(parts[0]) for n in self.sizes]
        some = any(part.numel() for part in parts)
        return self._stack.squares([p if p.numel() else e for p, e in zip(parts, eyes)]) if some else parts[0]

    def start(self, anchor: Any, features: Sequence[Tensor]) -> None:
        """Start P at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading directions: the level's first."""
        stack = self._stack
        small = torch.cat(stack.blocks(self.low_rank.detach()), -2)
        found, low_rank = leading_directions(features, small)
        pairs = zip(features, found.split(self.sizes, -2))
        # D = I + λΦ_cᵀΦ_c − U_cU_cᵀ
        block = stack.squares([plus_one(phi.mT @ phi - u @ u.mT) for phi, u in pairs])
        parts = stack.rows(low_rank.split(self.sizes, -2)), *above_one(block, block)
        self._put(self._kept("loc"), parts, self._seat(anchor))

    def _seat(self, anchor: Any) -> Optional[Seat]:
        """L + ηsI of each block as a stack, I where it is about w; ``None`` where w itself has a meaning."""
        like = None if anchor is None else next((part for part in anchor if part is not None), None)
        if like is None:
            return None
        stack = self._stack
        if isinstance(anchor, Unbound):
            return Seat(softened(anchor.whole, self.softness, (stack.size,)))
        eyes = (torch.eye(n, dtype=like.dtype, device=like.device) for n in self.sizes)
        parts = zip(anchor, eyes)
        soft = [eye if p is None else softened(p, self.softness, (len(eye),)) for p, eye in parts]
        return Seat(stack.squares(soft))

    def _seen_from(self, seat: Any) -> Seen:
        loc, low_rank, stack = self._kept("loc"), self._kept("low_rank"), self._stack
        if not self._turns(seat):
            return Seen(loc, torch.zeros_like(loc), (low_rank, self.block, self.gain))
        moved, stays, columns = seat.kept - self.seat, self._stays, stack.columns(loc)
        # T = I + L₀⁻¹(L − L₀)
        turn = plus_one(solve_lower(self.seat, moved))
        # T⁻¹m = m − L⁻¹(L − L₀)m
        near = columns - solve_lower(seat.kept, each_times(moved, columns))
        # (TᵀK − KT⁻¹)m
        rest = each_times(turn.mT, each_times(stays, columns)) - each_times(stays, near)
        near, rest = (stack.narrow(part.flatten(-3)) for part in (near, rest))
        # K + Tᵀ(D − K)T
        gain = each_times(turn.mT, each_times(self.gain, turn))
        return Seen(near, rest, (each_times(turn.mT, low_rank), stays + gain, gain))

    def _precision(self, parts: Parts) -> Tensor:
        return self._stack.dense(parts[1], parts[0].flatten(-3, -2))

    def _inverse(self, seen: Seen) -> tuple[Tensor, ...]:
        factor = self._given(seen).factors[0]
        return factor.loc, factor.covariance_matrix, *factor.trace_and_log_det()

    def _gram(self, parts: Parts) -> Tensor:
        whole = self._precision(parts)
        whole.diagonal(dim1=-2, dim2=-1).sub_(1)
        return whole

    @property
    def _stays(self) -> Tensor:
        return self.block - self.gain

    def _precision_of_draws(self, gram: Tensor) -> Tensor:
        return plus_one(gram)

    def _given(self, seen: Seen) -> Product:
        low_rank, block, _ = seen.parts
        # with RRᵀ = D⁻¹, P = R⁻ᵀ(I + RᵀBBᵀR)R⁻¹
        tril = root_of_inverse(block, "a block of a low-rank precision")
        # RA for D⁻¹ = RAAᵀRᵀ; a natural step starts without A
        if self.has_tilt:
            tril = each_times(tril, self.tilt_matrix)
        factor = LowRankFactor(self._stack, seen.near, each_times(tril.mT, low_rank), tril)
        factor.loc = seen.near + factor.times(seen.rest)
        return Product(self.sizes, [factor], [range(len(self.sizes))])

    def _untilted(self, q: Product, parts: Parts) -> Parts:
        root: Any = q.factors[0]
        block = torch.cholesky_inverse(cholesky(root.tril @ root.tril.mT, 0.0, "D⁻¹"))
        return parts[0], *above_one(block, block)

    def _nearest(self, precision: Tensor) -> Parts:
        # Without B the divergence is least where P has the blocks of P̂ on its diagonal; with B, absorb refuses.
        block = self._stack.diagonal(self._stack.spread(precision))
        return self._kept("low_rank"), *above_one(block, block)

    def _put_parts(self, parts: Parts) -> None:
        low_rank, block, gain = parts
        self._set("low_rank", low_rank)
        if self.base:  # a start makes others, too: golden regression-CoupledPrecisionIdentity
            self._buffers["block"], self._buffers["gain"] = block.to(self.block), gain.to(self.block)

    def _stepped(
        self, taken: Pass, parts: Parts, right: Tensor, rate: Tensor, weight: Tensor
    ) -> tuple[Parts, Tensor, Optional[Tensor], Tensor]:
        stack, num, cut = self._stack, sum(self.sizes), None
        target: Union[Formed, Products]
        with flags_kept() as flags:  # a step can't be taken again: what has failed is looked at here, and left out
            # whether curvatures may be negative, in any of the processes: all of them then form P̂
            signed = bool(taken.draws) or any(part.is_signed for part in taken.curvatures())
            if num > _FEW and not largest(rate.new_tensor(float(signed))) > 0:
                each = (rate / weight)[..., None, None]
                rows = [(stack.wide(part.phi), each * (2 * part.h)[..., None]) for part in taken.curvatures()]
                target = Products(stack, parts[1], parts[0].flatten(-3, -2), rate[..., None, None], rows)
            else:
                aim, cut = self._aim(taken, self._gram(parts), rate, weight)
                aim.diagonal(dim1=-2, dim2=-1).add_(1)
                target = Formed(stack, stack.spread(aim))
            # P̂'s blocks are what D + BBᵀ's shall be (Lawley, 1940)
            aims = target.blocks() if self.base else None
            near, low_rank = parts[1], parts[0].flatten(-3, -2)
            for _ in range(self.sweeps or (1 if num <= _SMALL and self.last_rate <= _SLOW else 2)):
                block, near, low_rank = sweep(target, aims, near, low_rank)
            shift, failed = target.solve(stack.wide(right), near, low_rank, self.iterations)
        gain = parts[2]
        if aims is not None:
            # torch.linalg.eigh raises for what is not finite; the step is left out by its mean.
            block, gain = above_one(torch.where(block.isfinite().all(), block, parts[1]), aims)
        failed = failed + sum(flag.count_nonzero() for flag in flags)
        return (stack.cut(low_rank), block, gain), stack.narrow(shift), cut, failed
