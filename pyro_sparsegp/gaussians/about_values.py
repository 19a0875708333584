"""Natural steps of sites that are about values u = Lw.

With the gradients g and h of minus the bound by the marginals' means and variances, the natural gradient needs no
Fisher matrix: it moves precision P and mean m towards the sums of the sites that they define,

    P̂ = (1 − ρ)P + ρ(I + Φᵀ2HΦ/c),   P̂(m̂ − m) = −ρ(Φᵀg/c + m),   H = diag h,

where c is the weight of the divergence in the objective, 1 in the bound (Khan and Lin, 2017; Salimbeni, Eleftheriadis
and Hensman, 2018; Adam, Chang, Khan and Solin, 2021). At ρ = 1, for a Gaussian likelihood and all rows, that is the
optimum. The mean moves by a difference, of which rounding leaves nothing where the gradient is 0; rounding of Pm would
be a wrong mean, S times that of Pm, which for precise data in float32 is more than their noise. For the same reason
moves of hyperparameters are told as m ← m + small terms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics.functions import Function
from ..numerics.linalg import cholesky, plus_one, root_of_inverse, side_by_side, tril_of_product, wider
from ..numerics.processes import is_shared, joined
from .base import Stack, each_times, eye_like
from .factors import CovarianceFactor
from .product import Product, Recorded, from_natural
from .seats import Seat
from .steps import Natural, Pass, Rate, cautious, recorded

_KNOWN = 9  # steps that sums of more than a batch count for


Parts = tuple[Tensor, ...]  # what a precision is made of


class Seen(NamedTuple):
    """Sites as they are seen from a seat: their mean a + P⁻¹b, ``(..., M)``, what P is made of, and the seat that they
    belong to.
    """

    near: Tensor
    rest: Tensor
    parts: Parts
    seat: Optional[Seat] = None


class _Known(Function):
    """m, S = P⁻¹, tr S and log|S|, unbatched, with the gradient by hyperparameters that move sites along with L alone.

    P = K + TᵀAT and r = Pm = Tᵀr₀ with a block-diagonal T = L₀⁻¹L and the part K that does not turn, I or ``stays``,
    have dP = DᵀA + AD and dr = Dᵀr for D = L⁻¹dL, so that dS = −S dP S and AS = I − KS leave one product and the blocks
    of another: with V = S̄ + tI and the gradients S̄ by S, which is symmetric, a by the mean, t by the trace and l by
    log|S|, the diagonal blocks are those of

        D̄ = 2K(SVS + lS + ½(Sa mᵀ + m(Sa)ᵀ)) − 2VS − 2lI − a mᵀ,

    of which the lower triangle counts where T is triangular. It goes to the zeros of :meth:`~.seats.Seat.turn`, stacked
    where there are several blocks; ``None`` where nothing moves sites.
    """

    @staticmethod
    def forward(
        loc: Tensor,
        covariance: Tensor,
        trace: Tensor,
        log_det: Tensor,
        stays: Optional[Tensor],
        turn: Optional[Tensor],
        stack: Stack,
    ) -> tuple[Tensor, ...]:
        return loc.view_as(loc), covariance.view_as(covariance), trace.view_as(trace), log_det.view_as(log_det)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output[:2])
        *_, ctx.stays, turn, ctx.stack = inputs  # constants
        ctx.turned = None if turn is None else turn.shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Tensor, by_covariance: Tensor, by_trace: Tensor, by_log_det: Tensor) -> Any:
        loc, covariance = ctx.saved_tensors
        stays, stack = ctx.stays, ctx.stack
        # V S with V = S̄ + tI
        half = (by_covariance @ covariance).addcmul_(covariance, by_trace)  # VS
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
        return None, None, None, None, None, total.mul_(2).view(ctx.turned), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        # which torch asks for: test_a_step_and_a_posterior_run_a_model_once
        raise ValueError("q(w) does not depend on quadrature nodes")


class AboutValues(Natural):
    """q(w) = N(m, P⁻¹) by natural steps, P − I and Pm being sums of sites that keep their meaning about u = Lw where L
    moves. They are about (L + ηsI)w, with s the root mean variance of u = Lw in each block: about u where it is well
    conditioned, about w where it is not.

    Three guards keep a step where its quadratic model holds. If it would leave less than half of the precision
    anywhere, for which it takes likelihoods that are not log-concave, several functions, or draws, negative curvatures
    are cut to 0. The mean moves no function value by more than three standard deviations of the prior, or half of one
    where curvatures of several functions are cut: counts of 1,000 under an exponential link would else be jumped to at
    e¹⁰⁰⁰. Gradients that are not finite change nothing.

    :param rate: ρ, in (0, 1] or a function of the number of steps taken; by default max(0.1, 1/(1 + t)), or, of a step
        on all rows, max(0.25, 1/(1 + t)).
    """

    softness = 0.03  # η
    loc: Any
    seat: Tensor
    _stack: Stack  # of the blocks that turn by themselves
    _stays: Any = None  # the part K of P that does not turn, as a stack; None is I
    _is_known: bool  # whether q is given by its S, which is quicker where it is small: one covariance, without copies

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rate: Rate) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.loc = torch.nn.Parameter(like.new_zeros(*batch_shape, sum(self.sizes)))  # m
        self.register_buffer("seat", like.new_zeros(0, 0))  # L + ηsI that the sums belong to

    # What P is made of.

    @abstractmethod
    def _seat(self, anchor: Any) -> Optional[Seat]:
        """What sites are about in a run; ``None`` where that is w."""

    def _turns(self, seat: Any) -> bool:
        """Whether sites belong to a seat, and so turn with this one: those of a start belong to none, and stay."""
        return seat is not None and self.seat.numel() > 0

    @abstractmethod
    def _seen_from(self, seat: Any) -> Seen:
        """The same sites from another seat, and under its level.

        Pm ← TᵀPm with T = L₀⁻¹L is m ← T⁻¹m + P⁻¹(TᵀK − KT⁻¹)m, with the part K of P that does not turn, such as I.
        """

    @abstractmethod
    def _gram(self, parts: Parts) -> Tensor:
        """G = P − I, ``(..., M, M)``."""

    def _precision(self, parts: Parts) -> Tensor:
        return plus_one(self._gram(parts))

    def _inverse(self, seen: Seen) -> tuple[Tensor, ...]:
        """m, S, tr S and log|S|, without copies."""
        return inverse_of(self._precision(seen.parts), seen.near, seen.rest)

    @abstractmethod
    def _given(self, seen: Seen) -> Product:
        """q(w) of these sites, with the graph of what they are made of and of the tilt."""

    @abstractmethod
    def _nearest(self, precision: Tensor) -> Parts:
        """What P, ``(..., M, M)``, or the nearest to it, is made of."""

    @abstractmethod
    def _untilted(self, q: Product, parts: Parts) -> Parts:
        """What the precision of a tilted q is made of, ``parts`` being that without the tilt."""

    @abstractmethod
    def _put_parts(self, parts: Parts) -> None:
        """Take what P is made of."""

    @abstractmethod
    def _precision_of_draws(self, gram: Tensor) -> Tensor:
        """S⁻¹ of the q that is drawn from."""

    @abstractmethod
    def _stepped(
        self, taken: Pass, parts: Parts, right: Tensor, rate: Tensor, weight: Tensor
    ) -> tuple[Parts, Tensor, Optional[Tensor], Tensor]:
        """What P̂ is made of; P̂⁻¹ times a vector; where negative curvatures are cut; and what is not 0 if that failed.

        :param parts: what P is made of.
        :param right: the vector.
        :param rate: ρ, as for :meth:`Natural.step`; ``weight``: c.
        """

    # How q is given.

    def forward(self, anchor: Any = None) -> Product:
        """q(w).

        :param anchor: what sites are about: L, or a seat.
        """
        seat, record = self._seat(anchor), recorded()
        held = None if seat is None else seat.detached
        if record is None:
            return self._made(seat, held, False)[0]
        # The step starts from what is given here, under the L of this run.
        if self.is_tilted:
            self._level_out(held)
        q, seen = self._made(seat, held, self._is_known and (seat is None or seat.has_turn))
        loc = side_by_side(list(map(attrgetter("loc"), q.factors)))
        base = Seen(loc.detach(), torch.zeros_like(loc), tuple(map(Tensor.detach, seen.parts)), held)
        return Recorded(q, record.new(self, base))

    def _made(self, seat: Any, held: Any, known: bool) -> tuple[Product, Seen]:
        """q(w), and the sites that it is of; where it is known, with no graph but that by the seat.

        :param held: the seat without its graph.
        """
        if not known:
            seen = self._seen_from(seat)
            return self._given(seen), seen
        seen, turn, stays = self._seen_from(held), None, None
        if self._turns(seat):
            turn, stays = seat.turn(), self._stays
        loc, covariance, trace, log_det = _Known.apply(*self._inverse(seen), stays, turn, self._stack)
        if held is not None and held.level is not None and self.level.numel():
            # r − G(L + ηsI)⁻¹δ moves m by −(I − S)(L + ηsI)⁻¹δ: 0 here, with that derivative.
            along = held.coefficients(seat.level - held.level)
            loc = loc - along + covariance.detach() @ along

        # Draws alone want a root, through a graph of its own.
        def root() -> Tensor:
            return root_of_inverse(self._precision(self._seen_from(seat).parts), "I + G of natural steps")

        factor = CovarianceFactor(loc, covariance, trace, log_det, root)
        return Product(self.sizes, [factor], [range(len(self.sizes))]), seen

    @torch.no_grad()
    def _level_out(self, seat: Optional[Seat]) -> None:
        """Have the sums alone say what plain gradients have made of a q that is tilted."""
        seen = self._seen_from(seat)
        q = self._given(seen)
        self._put(side_by_side(q.loc), self._untilted(q, seen.parts), seat)
        self._end_tilt()

    def _put(self, loc: Tensor, parts: Parts, seat: Optional[Seat]) -> None:
        self._set("loc", loc)
        self._put_parts(parts)
        if seat is not None:
            self._buffers["seat"] = seat.kept.detach()
            if seat.level is not None:
                self._buffers["level"] = seat.level.detach()

    # Steps.

    def step(self, taken: Pass, rate: Tensor, weight: Tensor, again: bool) -> None:
        base: Seen = taken.base
        loc, parts = base.near, base.parts
        # −ρ(Φᵀg/c + m)
        (slope,) = joined(taken.slope(loc))
        right = -rate[..., None] * (slope / weight[..., None] + loc)
        if again:
            # of the mean m' that other passes have led to: what is left of P'(m' − m)
            seen = self._seen_from(base.seat)
            loc, parts = side_by_side(self._given(seen).loc), seen.parts
            # (1 − ρ)P'(m' − m)
            left = (self._precision(parts) @ (loc - base.near)[..., None])[..., 0]
            right = right + (1 - rate[..., None]) * left
        new, shift, cut, failed = self._stepped(taken, parts, right, rate, weight)
        moved = base.near + cautious(shift, taken, cut)
        # test_a_step_without_a_factor_is_left_out (a P̂ that is not finite has none): 0 times a finite number is 0
        fine = (0 * moved.sum(-1) == failed) & (rate > 0)
        pairs = zip((moved, *new), (loc, *parts))
        kept = [torch.where(fine.view(fine.shape + (1,) * (b.dim() - fine.dim())), a, b) for a, b in pairs]
        self._put(kept[0], tuple(kept[1:]), base.seat)

    def _aim(self, taken: Pass, gram: Tensor, rate: Tensor, weight: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """Ĝ = P̂ − I, and where negative curvatures are cut.

        :param gram: G = P − I.
        """
        target, cut = taken.curvature(gram, lambda: self._precision_of_draws(gram))
        # All processes send as many tensors, or they would wait for each other.
        if cut is None and is_shared():
            cut = torch.zeros_like(target)
        target, *more = joined(target, *(() if cut is None else (cut,)))
        rate, each = rate[..., None, None], (2 * rate / weight)[..., None, None].expand_as(target)
        # G ← (1 − ρ)G + (ρ/c)Φᵀ2HΦ
        new = torch.mul(gram, 1 - rate).addcmul_(target, each)
        if not more:
            return new, None
        # Curvatures stay negative where that leaves enough (test_negative_curvature_of_heavy_tails): above half of the
        # prior's precision, and above half of the precision there is.
        eye = eye_like(target)
        left = new + 0.5 * eye, new + 0.5 * (eye - gram)
        is_cut = sum(torch.linalg.cholesky_ex(part.nan_to_num()).info.abs() for part in left) > 0
        return torch.where(is_cut[..., None, None], torch.addcmul(new, more[0], each), new), is_cut

    # Sums of sites for others.

    @torch.no_grad()
    def sums(self, anchor: Any) -> tuple[Tensor, Tensor]:
        """G = P − I and r = Pm under L; those of the prior, 0, where no step has been taken: a start is a guess."""
        seat = self._seat(anchor)
        if self.is_tilted:  # by plain gradients: test_rows_are_added_to_what_plain_gradients_taught
            self._level_out(seat)
            self.steps = max(self.steps, 1)
        seen = self._seen_from(seat)
        # r = P(a + P⁻¹b)
        pull = (self._precision(seen.parts) @ seen.near[..., None])[..., 0] + seen.rest
        return (self.steps > 0) * self._gram(seen.parts), (self.steps > 0) * pull

    @torch.no_grad()
    def put_sums(self, anchor: Any, gram: Tensor, pull: Tensor) -> None:
        """Have q be that of G and r under L, of more rows than a batch, or the nearest with its mean: steps go on at a
        later one's rate.
        """
        precision = plus_one((0.5 * (gram + gram.mT)).expand(*self.batch_shape, *gram.shape[-2:]))
        # in float64 where there is such
        factor = cholesky(precision.to(wider(precision)), 0.0, "I + G of natural steps")
        # m = P⁻¹r
        loc = torch.cholesky_solve(pull.expand(precision.shape[:-1]).to(factor)[..., None], factor)[..., 0]
        self._put(loc, self._nearest(precision), self._seat(anchor))
        self.steps = max(self.steps, _KNOWN)

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r, before it is brought to its form."""
        return from_natural(gram, pull, self.sizes)


def inverse_of(precision: Tensor, near: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
    """m = a + P⁻¹b, S = P⁻¹, tr S and log|S|, unbatched."""
    upper = cholesky(precision, 0.0, "I + G of natural steps").mT  # by columns, as the library wants it
    covariance = torch.cholesky_inverse(upper, upper=True).mT
    # a + P⁻¹b
    loc = near + torch.cholesky_solve(rest[..., None], upper, upper=True)[..., 0]
    return loc, covariance, covariance.diagonal().sum(), -2 * upper.diagonal().log().sum()
