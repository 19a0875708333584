"""Natural steps of sites that are about values u = Lw, and the gradient by L of the Gaussian that they make."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics.functions import Function
from ..numerics.linalg import cholesky, plus_one, side_by_side, tril_of_product, wider
from .factors import CovarianceFactor
from .product import Product
from .stack import eye_like
from .steps import KNOWN, Natural, Rate, Recorded

__all__ = ["AboutValues", "Known", "Seen", "solved"]

Seen = tuple[Tensor, Tensor, Optional[Tensor]]  # P, and a and b with the mean a + P⁻¹b; ``None`` for b = 0


class _Known(Function):
    """(P, a, b) ↦ m = a + Sb, S = P⁻¹, tr S and log|S|, unbatched, where hyperparameters move sites along with L alone;
    b is ``None`` for 0.

    P = K + TᵀAT and r = Pm = Tᵀr₀ with T = L₀⁻¹L and the part K that does not turn, I or ``stays``, have dP = DᵀA + AD
    and dr = Dᵀr for D = L⁻¹dL, so that dS = −S dP S and AS = I − KS leave two products on the way back: with V = S̄ + tI
    and the gradients S̄ by S, which is symmetric, a by the mean, t by the trace and l by log|S|,

        D̄ = −2(I − KS)VS − 2l(I − KS) − (a − KSa)mᵀ + Km(Sa)ᵀ,

    of which the lower triangle counts. It goes to the zeros of :func:`~..numerics.linalg.turn_of`; ``None`` where
    nothing moves sites.
    """

    @staticmethod
    def forward(
        precision: Tensor, near: Tensor, rest: Optional[Tensor], stays: Optional[Tensor], turn: Optional[Tensor]
    ) -> tuple[Tensor, ...]:
        upper = cholesky(precision, 0.0, "I + G of natural steps").mT  # by columns, as the library wants it
        covariance = torch.cholesky_inverse(upper, upper=True).mT
        trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        # m = a + Sb
        loc = near.clone() if rest is None else near + torch.cholesky_solve(rest[..., None], upper, upper=True)[..., 0]
        return loc, covariance, trace, -2 * upper.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output[:2])
        ctx.stays = inputs[3]  # a constant
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], by_covariance: Optional[Tensor], by_trace: Any, by_log_det: Any) -> Any:
        loc, covariance = ctx.saved_tensors
        stays = ctx.stays
        known = covariance if stays is None else covariance @ stays  # SK
        half = torch.zeros_like(covariance) if by_covariance is None else by_covariance @ covariance
        half = half if by_trace is None else half.addcmul(covariance, by_trace)  # VS
        # −(I − KS)VS
        total = tril_of_product(known, half) - half
        # −l(I − KS)
        if by_log_det is not None:
            total = torch.addcmul(total, known.mT, by_log_det)
            total.diagonal(dim1=-2, dim2=-1).sub_(by_log_det)
        # ½(Km(Sa)ᵀ − (a − KSa)mᵀ)
        if a is not None:
            along = covariance @ a
            held, moved = (loc, along) if stays is None else (stays @ loc, stays @ along)
            total = total.addr(held, along, alpha=0.5).addr(moved - a, loc, alpha=0.5)
        return None, None, None, None, 2 * total

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


class Known(Recorded, Product):
    """A recorded product; of one that is given by its S, the gradient by S is kept."""

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        factor, phi = self.factors[0], side_by_side(features)
        if not isinstance(factor, CovarianceFactor) or phi.dim() > 2:
            return super().moments(features)
        covariance = self.taken.keep(factor.covariance.view_as(factor.covariance))  # whose gradient is Φᵀ diag(h) Φ
        return self.note(phi, *factor.moments_by(phi, covariance), covariance)


class AboutValues(Natural):
    """Sums of sites that keep their meaning about u = Lw where L moves, by natural steps.

    :param softness: η; they are about (L + ηsI)w, with s the root mean variance of u = Lw in each block: about u where
        it is well conditioned, about w where it is not.
    """

    anchored: ClassVar[bool] = True
    seat: Tensor

    def __init__(
        self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rate: Rate, softness: float
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.softness = softness
        self.register_buffer("seat", like.new_zeros(0, 0))  # L + ηsI that the sums belong to

    @abstractmethod
    def _seat(self, anchor: Any) -> Optional[Tensor]:
        """L + ηsI; ``None`` where sites are about w."""

    def _put_seat(self, seat: Optional[Tensor]) -> None:
        if seat is not None:
            self._buffers["seat"] = seat.detach()

    @abstractmethod
    def _put_loc(self, loc: Tensor) -> None:
        """Take a mean, ``(..., M)``."""

    @abstractmethod
    def _dense(self, seat: Optional[Tensor]) -> Seen:
        """The same sites under another L, P as ``(..., M, M)``."""

    @abstractmethod
    def _put_dense(self, precision: Tensor) -> None:
        """Take P, ``(..., M, M)``, or the nearest to it."""

    @abstractmethod
    def _level_out(self, seat: Optional[Tensor], level: Optional[Tensor] = None) -> None:
        """Have the sums alone say what plain gradients have made of q."""

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start there. One who knows a mean knows more than a batch does: steps start at the rate of the tenth."""
        self._put_loc(loc)
        self.skip(KNOWN)

    def _known(
        self, seen: Seen, stays: Optional[Tensor], turn: Optional[Tensor], root: Callable[[], Tensor]
    ) -> CovarianceFactor:
        """N(m, S) with no graph but that by a turn of L."""
        loc, covariance, trace, log_det = _Known.apply(*seen, stays, turn)
        return CovarianceFactor(loc, covariance, trace, log_det, root)

    @torch.no_grad()
    def sums(self, anchor: Any) -> tuple[Tensor, Tensor]:
        """G = P − I and r = Pm under L; those of the prior, 0, where no step has been taken: a start is a guess."""
        seat = self._seat(anchor)
        self._level_out(seat)
        precision, near, rest = self._dense(seat)
        # r = P(a + P⁻¹b)
        pull = (precision @ near[..., None])[..., 0]
        known = float(self.steps_taken > 0)
        return known * (precision - eye_like(precision)), known * (pull if rest is None else pull + rest)

    @torch.no_grad()
    def put_sums(self, anchor: Any, gram: Tensor, pull: Tensor) -> None:
        """Have q be that of G and r under L, of more rows than a batch, or the nearest with its mean: steps go on at a
        later one's rate.
        """
        precision = plus_one((0.5 * (gram + gram.mT)).expand(*self.batch_shape, *gram.shape[-2:]))
        self._put_loc(solved(precision, pull.expand(precision.shape[:-1])))
        self._put_dense(precision)
        self._put_seat(self._seat(anchor))
        self.skip(max(KNOWN - self.steps_taken, 0))


def solved(precision: Tensor, pull: Tensor) -> Tensor:
    """P⁻¹r, in float64 where there is such."""
    factor = cholesky(precision.to(wider(precision)), 0.0, "I + G of natural steps")
    return torch.cholesky_solve(pull.to(factor)[..., None], factor)[..., 0].to(pull)
