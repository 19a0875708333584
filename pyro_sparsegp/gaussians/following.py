"""A Gaussian of coefficients whose sites follow hyperparameters θ.

Sites about values u = Aw stay where θ moves features. But their locations move with θ, too: where an intercept goes up,
what is left for f goes down. With m of sites that stay, the mean is m + A⁺U(θ − θ₀), and q(θ) has the width of the
posterior, and not that for a given f. U is that of the mode at the start: learnt from steps, it diverged
at large rates (test_a_followed_intercept_stands_large_rates).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .about_values import Seen
from .natural_at_rows import NaturalAtValues, times, towards
from .product import Product

__all__ = ["Following"]


# ε of A⁺U, as of the mean of AᵀA's diagonal: U need not be in the span of features that moved.
_LEAST = 1e-2


class Following(NaturalAtValues):
    """q(w | θ) by natural steps, of one factor.

    :param num: the number D of hyperparameters.
    """

    slopes: Tensor  # U, (K, D) of all blocks' values; θ₀ is the level

    def __init__(self, sizes: Sequence[int], like: Tensor, num: int) -> None:
        super().__init__(sizes, (), like)
        self.register_buffer("slopes", like.new_zeros(0, num))

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
        return torch.cat([towards(block, part, _LEAST) for block, part in zip(blocks, parts)])[:, 0].to(seat)

    def _seen_from(self, seat: Optional[Tensor], level: Optional[Tensor] = None) -> Seen:
        seen = super()._seen_from(seat)
        return seen._replace(near=seen.near + self._shift(seat, level))

    def _made(self, seat: Optional[Tensor], level: Optional[Tensor], known: bool) -> tuple[Product, Seen]:
        q, seen = super()._made(seat, None, known)
        q.factors[0].loc = q.factors[0].loc + self._shift(seat, level)  # with its graph
        return q, seen

    def _put(self, loc: Tensor, parts: Any, seat: Optional[Tensor], level: Optional[Tensor] = None) -> None:
        super()._put(loc - self._shift(seat, level), parts, seat)
