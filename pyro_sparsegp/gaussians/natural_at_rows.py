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
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, plus_one, rounding, wider
from .natural import NaturalGaussian
from .record import Pass
from .steps import Falling

_LEAST = 1e-4  # ε, of the mean of A₀ᵀA₀'s diagonal
_LOST = 0.05  # the part of a change that features do not span, of their size, beyond which sites of before count for 0


class NaturalAtRows(NaturalGaussian):
    """q(w) by natural steps that follows features which training moves, such as a network's.

    As :class:`NaturalGaussian`, with the features A, ``(..., K, M)``, at K rows in the place of L: sites are about Aw,
    held about w in directions that A hardly has. K should be several times M. Without them, and before the first step
    in which features train, sites are about w.
    """

    _follows = False

    def start(self, anchor: Optional[Tensor], features: Optional[Sequence[Tensor]]) -> None:
        super().start(None, features)  # nothing moves before the first step, which has the features with it

    def anchor_of(self, features: Any) -> Any:
        # it follows from the first step on in which features train
        return features.anchor if self.seat.numel() or features.trains else None

    @property
    def _is_known(self) -> bool:
        return super()._is_known and not self._follows  # by a T that is not triangular the way back is autograd's

    def _seat(self, anchor: Optional[Tensor]) -> Optional[Tensor]:
        self._follows = anchor is not None
        return None if anchor is None else anchor.contiguous()

    def _turned(self, seat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = self._kept("loc")
        # In float64 where there is such: the rounding of TᵀGT in float32 may be more than the prior's precision.
        turn = nearest(self.seat, seat)
        gram, loc = self.gram.to(turn), kept.to(turn)
        with torch.no_grad():  # any start would do: (I + TᵀGT)⁻¹Tᵀ(I + G)m is what it leads to
            wide = seat.to(turn)
            # a = m + (AᵀA + εI)⁻¹Aᵀ(A₀ − A)m, near T⁻¹m
            back = wide.mT @ ((self.seat.to(turn) - wide) @ loc[..., None])
            near = (loc + torch.cholesky_solve(back, _normal(wide))[..., 0]).to(kept)
        # Tᵀ(I + G)m − (I + TᵀGT)a, by differences that are small
        along = loc + (gram @ (loc - (turn @ near.to(turn)[..., None])[..., 0])[..., None])[..., 0]
        rest = (turn.mT @ along[..., None])[..., 0] - near
        # TᵀGT
        return (turn.mT @ gram @ turn).to(self.gram), near, rest.to(kept)

    def _coefficients_of(self, seat: Tensor, constant: Tensor) -> Tensor:
        wide = seat.to(wider(seat))
        rows = constant[..., :1].to(wide).expand(*constant.shape[:-1], seat.shape[-2])
        return torch.cholesky_solve(wide.mT @ rows[..., None], _normal(wide))[..., 0].to(constant)


class NaturalAtOutputs(NaturalAtRows):
    """As :class:`NaturalAtRows`, of inducing points among the outputs of a network.

    They are few, and span less of a change than features of the network's own: where training jumps, what sites of
    before say is wrong, and under the q that remembers them it would jump on. A step's rate is at least
    ‖A₀T − A‖/‖A₀‖ over 0.05, up to 1, unless the rate was given, or curvatures are those of draws.
    """

    @classmethod
    def started(cls, q: NaturalGaussian) -> NaturalAtOutputs:
        """At the start of that q, which has taken no step."""
        new = cls(q.sizes, q.batch_shape, q.gram, rate=q.rate)
        new.layout, new.slices, new.gram = q.layout, q.slices, q.gram
        new._parameters.update(q._parameters)  # Pyro's store may have them by this name
        return new

    def anchor_of(self, features: Any) -> Any:
        return features.anchor

    def rate_of(self, passes: list[Pass], share: float) -> Any:
        """As of others, or what the last pass asks for."""
        rate, now = super().rate_of(passes, share), passes[-1].base.seat
        drawn = any(one.by_draws or one.draws for one in passes)
        if now is not None and self.seat.shape == now.shape and isinstance(self.rate, Falling) and not drawn:
            before = self.seat.to(wider(self.seat))
            size = before.square().sum().clamp(min=torch.finfo(before.dtype).tiny)
            # ‖A₀T − A‖²/‖A₀‖²
            lost = (before @ nearest(self.seat, now) - now).square().sum() / size
            rate = (lost.sqrt() / _LOST).clamp(rate, 1.0).to(now)
        return rate


def nearest(before: Tensor, now: Tensor) -> Tensor:
    """T, ``(..., M, M)``, with A₀T ≈ A; in float64 where there is such.

    :param before: A₀, ``(..., K, M)``.
    :param now: A, of that shape.
    """
    wide = before.to(wider(before))
    # I + (A₀ᵀA₀ + εI)⁻¹A₀ᵀ(A − A₀)
    return plus_one(torch.cholesky_solve(wide.mT @ (now - before).to(wide), _normal(wide)))


def _normal(wide: Tensor) -> Tensor:
    """The lower Cholesky factor of AᵀA + εI."""
    normal = wide.mT @ wide
    least = max(_LEAST, rounding(normal)) * normal.diagonal(dim1=-2, dim2=-1).mean(-1)
    least = least.clamp(min=torch.finfo(normal.dtype).eps)[..., None]  # features may all be 0
    return cholesky(normal + torch.diag_embed(least.expand(normal.shape[:-1])), 0.0, "AᵀA of natural steps")
