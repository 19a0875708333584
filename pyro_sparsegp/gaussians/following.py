"""A Gaussian of coefficients whose sites follow hyperparameters θ.

Sites about values u = Aw stay where θ moves features. But their locations move with θ, too: where an intercept goes up,
what is left for f goes down. With m of sites that stay, the mean is m + A⁺U(θ − θ₀), and q(θ) has the width of the
posterior, and not that for a given f. A step of it by Δ at a draw θ = a + Rε is one of least mean squares on (1, ε),

    m ← m + Δ/(1 + εᵀε),   U ← U + AΔ(R⁻ᵀε)ᵀ/(1 + εᵀε),

by which the mean at θ moves by Δ. Where the mode is linear in θ, Δ is 0 for every draw. m stays the mean at θ₀: as that
at the last draw it would depend on the way there, which U would learn, with losses of up to 10⁹.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .about_values import Seen
from .drawn import DrawnGaussian
from .natural_at_rows import NaturalAtValues, times, towards
from .product import Product, Recorded
from .record import Pass

__all__ = ["Following"]


class Following(NaturalAtValues):
    """q(w | θ) by natural steps, of one factor.

    :param num: the number D of hyperparameters.
    """

    slopes: Tensor  # U, (K, D) of all blocks' values; θ₀ is the level

    def __init__(self, sizes: Sequence[int], like: Tensor, num: int) -> None:
        super().__init__(sizes, (), like)
        self.register_buffer("slopes", like.new_zeros(0, num))

    def forward(  # type: ignore[override]
        self, anchor: Optional[Tensor] = None, theta: Optional[Tensor] = None, of_theta: Optional[DrawnGaussian] = None
    ) -> Product:
        """q(w | θ).

        :param theta: θ, ``(D,)``; ``of_theta`` is q(θ).
        """
        q = super().forward(anchor, theta)
        if theta is not None and of_theta is not None and self.level.numel() and isinstance(q, Recorded):
            q.taken.base = q.taken.base._replace(regressor=of_theta.regressor(theta.detach()))
        return q

    def follow(self, theta: Tensor, slopes: Tensor) -> None:
        """Have the mean, that of θ, move with it.

        :param slopes: of the mean under the last A, ``(M, D)``.
        """
        self.level, self.slopes = theta, self._values(slopes)

    def _values(self, moves: Tensor) -> Tensor:
        """AΔ of moves of the mean, ``(M, D)``."""
        blocks = self._blocks(self.seat)
        parts = moves.split([block.shape[-1] for block in blocks])
        return torch.cat([times(block, part) for block, part in zip(blocks, parts)])

    def _shift(self, seat: Optional[Tensor], level: Optional[Tensor]) -> Any:
        """A⁺U(θ − θ₀)."""
        if seat is None or level is None or not self.level.numel():
            return 0.0
        blocks = self._blocks(seat)
        parts = (self.slopes @ (level - self.level))[:, None].split([len(block) for block in blocks])
        return torch.cat([towards(block, part, self.least) for block, part in zip(blocks, parts)])[:, 0].to(seat)

    def _seen_from(self, seat: Optional[Tensor], level: Optional[Tensor] = None) -> Seen:
        seen = super()._seen_from(seat)
        return seen._replace(near=seen.near + self._shift(seat, level))

    def _made(self, seat: Optional[Tensor], level: Optional[Tensor], known: bool) -> tuple[Product, Seen]:
        q, seen = super()._made(seat, None, known)
        q.factors[0].loc = q.factors[0].loc + self._shift(seat, level)  # with its graph
        return q, seen

    def _put(self, loc: Tensor, parts: Any, seat: Optional[Tensor], level: Optional[Tensor] = None) -> None:
        super()._put(loc - self._shift(seat, level), parts, seat)

    def step(self, taken: Pass, rate: Tensor, weight: Tensor, again: bool) -> None:
        super().step(taken, rate, weight, again)
        _, _, _, seat, theta, along = taken.base
        if along is not None and not again:  # a second particle's is no step from its own mean
            moved = self._kept("loc") + self._shift(seat, theta) - taken.base.near
            self.slopes = self.slopes + self._values(moved[:, None]) * along
            self._set("loc", self._kept("loc") - moved * (along @ (theta - self.level)))
