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

_LOST = 0.05  # the part of a change that features do not span, of their size, beyond which sites of before count for 0


class NaturalAtRows(NaturalGaussian):
    """q(w) by natural steps that follows features which training moves, such as a network's.

    As :class:`NaturalGaussian`, with the features A, ``(..., K, M)``, at K rows in the place of L: sites are about Aw,
    held about w in directions that A hardly has. K should be several times M. Without them, and before the first step
    in which features train, sites are about w.
    """

    least = 1e-4  # ε, of the mean of A₀ᵀA₀'s diagonal
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

    def _blocks(self, seat: Tensor) -> list[Tensor]:
        """A of each block of coefficients that move by themselves."""
        return [seat]

    def _turned(self, seat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept, before, now = self._kept("loc"), self._blocks(self.seat), self._blocks(seat)
        # In float64 where there is such: the rounding of TᵀGT in float32 may be more than the prior's precision.
        turns = [nearest(a, b, self.least) for a, b in zip(before, now)]
        gram, loc = self.gram.to(turns[0]), kept.to(turns[0])
        with torch.no_grad():  # any start would do: (I + TᵀGT)⁻¹Tᵀ(I + G)m is what it leads to
            # a = m + (AᵀA + εI)⁻¹Aᵀ(A₀ − A)m, near T⁻¹m
            columns = loc[..., None].split([block.shape[-1] for block in now], -2)
            moves = [towards(b, times((a - b).to(m), m), self.least) for a, b, m in zip(before, now, columns)]
            near = (loc + torch.cat(moves, -2)[..., 0]).to(kept)
        # Tᵀ(I + G)m − (I + TᵀGT)a, by differences that are small
        along = loc[..., None] + gram @ (loc[..., None] - _each(turns, near.to(loc)[..., None]))
        rest = _each(turns, along, True)[..., 0] - near
        # TᵀGT = (Tᵀ(TᵀG)ᵀ)ᵀ
        return _each(turns, _each(turns, gram, True).mT, True).to(self.gram), near, rest.to(kept)

    def _coefficients_of(self, seat: Tensor, constant: Tensor) -> Tensor:
        wide = seat.to(wider(seat))
        rows = constant[..., :1].to(wide).expand(*constant.shape[:-1], seat.shape[-2])
        return towards(wide, rows[..., None], self.least)[..., 0].to(constant)


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
            lost = (before @ nearest(self.seat, now, self.least) - now).square().sum() / size
            rate = (lost.sqrt() / _LOST).clamp(rate, 1.0).to(now)
        return rate


class NaturalAtValues(NaturalAtRows):
    """As :class:`NaturalAtRows`, of several blocks: sites are about the values of functions at rows of data, and about
    latents' own, which neither hyperparameters nor inducing inputs change.

    An anchor is A, ``(K, M)``, of each block; or a latent's L, ``(M, M)``, or the diagonal of that, ``(M,)``.
    """

    least = 1e-8
    _shapes: Sequence[torch.Size] = ()

    def _seat(self, anchor: Sequence[Tensor]) -> Tensor:
        self._shapes = [block.shape for block in anchor]
        return torch.cat([block.reshape(-1) for block in anchor])

    def _blocks(self, seat: Tensor) -> list[Tensor]:
        parts = seat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    def _coefficients_of(self, seat: Tensor, constant: Tensor) -> Tensor:
        blocks = self._blocks(seat)
        parts = constant[:, None].split([len(block) for block in blocks])
        return torch.cat([towards(block, part, self.least) for block, part in zip(blocks, parts)])[:, 0].to(constant)

    def _turn_of(self, seat: Tensor) -> Tensor:
        turns = [nearest(block.detach(), block, self.least) for block in self._blocks(seat)]
        return torch.block_diag(*[turn if turn.dim() > 1 else turn.diag() for turn in turns]).to(seat)


def nearest(before: Tensor, now: Tensor, least: float) -> Tensor:
    """T, ``(..., M, M)``, with A₀T ≈ A, or the diagonal of that; in float64 where there is such.

    :param before: A₀, ``(..., K, M)``, or a diagonal, ``(M,)``.
    :param now: A, of that shape.
    :param least: ε.
    """
    # I + (A₀ᵀA₀ + εI)⁻¹A₀ᵀ(A − A₀)
    return now.to(wider(now)) / before if now.dim() == 1 else plus_one(towards(before, now - before, least))


def times(block: Tensor, x: Tensor) -> Tensor:
    """AX, ``(..., K, n)``, of A or a diagonal."""
    return block[:, None] * x if block.dim() == 1 else block @ x


def _each(turns: Sequence[Tensor], x: Tensor, transposed: bool = False) -> Tensor:
    """blockdiag(T)X, ``(..., ΣM, n)``, or with Tᵀ."""
    parts = x.split([turn.shape[-1] for turn in turns], -2)
    return torch.cat([times(t.mT if transposed and t.dim() > 1 else t, part) for t, part in zip(turns, parts)], -2)


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
