"""Gaussians over coefficients with full covariances, by natural steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, lift_to, on_diagonal, plus_one, root_of_inverse, side_by_side
from .about_values import AboutValues, Parts, Seen
from .factors import DenseFactor, IdentityFactor
from .free import FullCholesky
from .product import Product, from_natural, slices
from .record import Pass
from .seats import AtOutputs, Seat, softened
from .stack import Stack, eye_like, solved
from .steps import DEFAULT_RATE, Falling, Rate

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
        self.leave_seat()

    def leave_seat(self) -> None:
        """Before any step: a start belongs to any seat."""
        self.seat = self.seat.new_zeros(0, 0)

    @property
    def is_settled(self) -> bool:
        """Whether sites stay about u: a step has been taken, or curvatures will be those of draws."""
        return self.softness == _BY_DRAWS or self.steps > 0

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

    def rate_of(self, passes: list[Pass], share: float) -> Any:
        """As of others, or what outputs of a network that moved ask for."""
        rate, seat = super().rate_of(passes, share), passes[-1].base.seat
        if isinstance(seat, AtOutputs) and self.seat.numel() and isinstance(self.rate, Falling):
            drawn = any(one.by_draws or one.draws for one in passes)
            rate = rate if drawn else seat.lost(self.seat).clamp(rate, 1.0)
        return rate

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
