"""Natural steps of a Gaussian over coefficients whose features move: its sites are about function values at some rows.

With A, K × M, the features at K rows and A₀ what they were, the coefficients there of the function that w is here are
w₀ = Tw with A₀T ≈ A,

    T = argmin ‖A₀T − A‖² + ε‖T − I‖² = I + (A₀ᵀA₀ + εI)⁻¹A₀ᵀ(A − A₀),   G ← TᵀGT,   r ← Tᵀr.

Of features Φ = Φ₀T + E at all N rows, and sites Λ and z, these sums err by EᵀΛE and by EᵀΛ(z − Φ₀m) where Φ₀ᵀΛE = 0, as
least squares over the rows have it: in G by the square of the change, in r by what q does not fit times the part of the
change that the features did not span. Left as they were, they would err by the whole change times what q does fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, rounding, wider
from .natural import NaturalGaussian
from .product import Product
from .steps import softened

__all__ = ["NaturalAtRows"]

_LEAST = 1e-4  # ε, of the mean of A₀ᵀA₀'s diagonal


class NaturalAtRows(NaturalGaussian):
    """q(w) by natural steps that follows features which training moves, such as a network's.

    As :class:`NaturalGaussian`, with the features A, ``(..., K, M)``, at K rows in the place of L: sites are about Aw,
    held about w in directions that A hardly has. K should be several times M. Without them, and before the first step
    in which features train, sites are about w.
    """

    waits: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_one = self._is_one

    def start(self, anchor: Optional[Tensor], features: Optional[Sequence[Tensor]]) -> None:
        super().start(None, features)  # nothing moves before the first step, which has the features with it

    def wants(self, features: Any) -> bool:
        """Whether it follows: it does from the first step on in which features train."""
        return bool(self.seat.numel()) or features.trains

    def forward(self, anchor: Optional[Tensor] = None, level: Optional[Tensor] = None) -> Product:
        """As :meth:`NaturalGaussian.forward`."""
        self._is_one = self._has_one and anchor is None  # by a T that is not triangular the way back is autograd's
        return super().forward(anchor, level)

    def _seat(self, anchor: Tensor) -> Tensor:
        return softened(anchor, 0.0)

    def _seen_from(self, seat: Optional[Tensor]) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        if seat is None or not self.seat.numel():
            return self.gram, self.loc, None
        # In float64 where there is such: the rounding of TᵀGT in float32 may be more than the prior's precision.
        turn = nearest(self.seat, seat)
        gram, loc = self.gram.to(turn), self.loc.to(turn)
        with torch.no_grad():  # any start would do: (I + TᵀGT)⁻¹Tᵀ(I + G)m is what it leads to
            wide = seat.to(turn)
            back = wide.mT @ ((self.seat.to(turn) - wide) @ loc[..., None])
            near = (loc + torch.cholesky_solve(back, _normal(wide))[..., 0]).to(self.loc)
        along = loc + (gram @ (loc - (turn @ near.to(turn)[..., None])[..., 0])[..., None])[..., 0]
        rest = (turn.mT @ along[..., None])[..., 0] - near
        return (turn.mT @ gram @ turn).to(self.gram), near, rest.to(self.loc)

    def seen_from(self, sums: tuple[Tensor, Tensor, Tensor], anchor: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        gram, pull, before = sums
        if anchor is None or not before.numel():
            return gram, pull
        turn = nearest(before, anchor)
        wide, along = gram.to(turn), (turn.mT @ pull.to(turn)[..., None])[..., 0]
        return (turn.mT @ wide @ turn).to(gram), along.to(pull)


def nearest(before: Tensor, now: Tensor) -> Tensor:
    """T, ``(..., M, M)``, with A₀T ≈ A; in float64 where there is such.

    :param before: A₀, ``(..., K, M)``.
    :param now: A, of that shape.
    """
    wide = before.to(wider(before))
    change = torch.cholesky_solve(wide.mT @ (now - before).to(wide), _normal(wide))
    return torch.eye(change.shape[-1], dtype=change.dtype, device=change.device) + change


def _normal(wide: Tensor) -> Tensor:
    """The lower Cholesky factor of AᵀA + εI."""
    normal = wide.mT @ wide
    least = max(_LEAST, rounding(normal)) * normal.diagonal(dim1=-2, dim2=-1).mean(-1)
    least = least.clamp(min=torch.finfo(normal.dtype).tiny)[..., None, None]
    eye = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
    return cholesky(normal + least * eye, 0.0, "AᵀA of natural steps")
