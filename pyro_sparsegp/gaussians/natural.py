"""Gaussians over coefficients in natural parameters, stepped by natural gradients.

q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw). With the gradients g and h of minus the bound by the marginals' means and
variances, the natural gradient needs no Fisher matrix: it moves (G, r) towards the sums of the sites that they define,

    G ← G + (ρ/c)(Φᵀ2HΦ − cG),   r ← r + (ρ/c)(Φᵀ(2HΦm − g) − cr),   H = diag h,

where c is the weight of the divergence in the objective, 1 in the bound (Khan and Lin, 2017; Salimbeni, Eleftheriadis
and Hensman, 2018; Adam, Chang, Khan and Solin, 2021). At ρ = 1, for a Gaussian likelihood and all rows, that is the
optimum.

What is kept is G and the mean m. By it the step is m ← m − (ρ/c)S(Φᵀg + cm), with the S of the new G: rounding in its
factor makes another step, and none where the gradient is 0. Rounding of r would be a wrong mean, S times that of Gm,
which for precise data in float32 is more than their noise. For the same reason moves of hyperparameters are told as
m ← m + small terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor

from ..numerics.linalg import (
    cholesky,
    factorised,
    lift_to,
    on_diagonal,
    plus_one,
    root_of_inverse,
    rounding,
    side_by_side,
    solve_lower,
    turn_of,
)
from ..numerics.processes import is_shared, joined
from .about_values import AboutValues, Known, Seen
from .factors import DenseFactor, IdentityFactor
from .free import FullCholesky
from .optimal import from_natural, seen_from
from .product import Product, slices
from .stack import eye_like
from .steps import DEFAULT_RATE, Pass, Rate, cautious, recorded, softened

__all__ = ["NaturalGaussian"]

_ETA, _BY_DRAWS = 0.03, 0.3  # η, and where draws alone show curvatures


class _Base(NamedTuple):
    """G, L + ηsI, the mean's values and m of a run."""

    gram: Tensor
    seat: Optional[Tensor]
    level: Optional[Tensor]
    loc: Tensor


class NaturalGaussian(AboutValues):
    """q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw), or its best approximation by independent blocks, by natural steps.

    (Khan and Lin, 2017; Salimbeni, Eleftheriadis and Hensman, 2018; Adam, Chang, Khan and Solin, 2021.)

    G, ``(..., M, M)``, and r = (I + G)m, ``(..., M)``, are sums over the data (sites). When hyperparameters move, sites
    keep their meaning about (L + ηsI)w, with s the root mean variance of u = Lw in each block: about u where it is well
    conditioned, about w where it is not. Where the process has a constant mean that moves, they are about f = μ + Lw,
    r ← r − GL⁻¹δ for μ ← μ + δ: what f says of the data stays what it was, and the gradient by μ is that of the whole
    (else each step of μ would have to wait for q's).

    Under objectives that take no natural steps m is a parameter, and S = RAAᵀRᵀ with RRᵀ = (I + G)⁻¹ and a free lower
    triangular A, I at first, for each block.

    Three guards keep a step where its quadratic model holds. If it would leave less than half of the precision
    anywhere, for which it takes likelihoods that are not log-concave, several functions, or draws, negative curvatures
    are cut to 0. The mean moves no function value by more than three standard deviations of the prior, or half of one
    where curvatures of several functions are cut: counts of 1,000 under an exponential link would else be jumped to at
    e¹⁰⁰⁰. Gradients that are not finite change nothing.

    :param kind: the free posterior with the same layout of factors. These share the whole of G: their means are solved
        for together (a step with each one's own mean diverges where they are coupled).
    :param rate: ρ of the step (G, r) ← (1 − ρ)(G, r) + ρ(Ĝ, r̂), with (Ĝ, r̂) what the batch alone would have them
        be, in (0, 1] or a function of the number of steps taken; by default max(0.1, 1/(1 + t)), or, of a step on all
        rows, max(0.25, 1/(1 + t)).
    :param softness: η; 0 is u alone.
    """

    levelled: ClassVar[bool] = True
    gram: Tensor
    level: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        batch_shape: Sequence[int],
        like: Tensor,
        kind: Any = FullCholesky,
        rate: Rate = DEFAULT_RATE,
        softness: float = _ETA,
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate, softness)
        if not self.takes(kind):
            raise ValueError(
                "natural steps are of posteriors whose blocks each have a full covariance or the prior's; got "
                f"{getattr(kind, '__name__', kind)!r}: give the family natural=False"
            )
        self.layout = [(factor, tuple(group)) for factor, group in kind.layout(len(self.sizes))]
        num = sum(self.sizes)
        self._is_one = len(self.layout) == 1 and not batch_shape  # q has one covariance, and no copies
        self.slices = slices(self.sizes, [group for _, group in self.layout])  # the coefficients of each factor
        self.loc: Any
        self.loc = torch.nn.Parameter(like.new_zeros(*batch_shape, num))  # m
        self._new_tilt("tilt", self.loc, num)
        self.register_buffer("gram", like.new_zeros(*batch_shape, num, num))
        self.register_buffer("level", like.new_zeros(0))  # μ that they belong to, (..., M), where it moves

    @staticmethod
    def takes(kind: Any) -> bool:
        """Whether the posteriors of that kind are products of factors with a full covariance or the prior's."""
        layout = getattr(kind, "layout", None)
        return layout is not None and all(factor in (DenseFactor, IdentityFactor) for factor, _ in layout(1))

    def start(self, anchor: Optional[Tensor], features: Optional[Sequence[Tensor]]) -> None:
        if features is None:
            return
        phi = side_by_side(features)
        # I + G = I + λΦᵀΦ
        self.gram = (phi.mT @ phi).to(self.gram).expand(self.gram.shape).clone()
        self._put_seat(self._seat(anchor))

    def _put_loc(self, loc: Tensor) -> None:
        self._set("loc", loc)

    def _dense(self, seat: Optional[Tensor]) -> Seen:
        gram, near, rest = self._seen_from(seat)
        return plus_one(gram), near, rest

    def _put_dense(self, precision: Tensor) -> None:
        self.gram = precision - eye_like(precision)
        self.level = self.level.new_zeros(0)  # the mean's values now, which the next step notes

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        softness = torch.as_tensor(state_dict.pop(prefix + "softness", _ETA)).flatten()  # one for each block, once
        self.softness = round(float(softness[0]), 6)  # some were saved in float32
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        shape = (len(self.sizes),) if len(self.sizes) > 1 else ()  # a number for each block, as before
        destination[prefix + "softness"] = torch.full(shape, self.softness, dtype=torch.float64)

    def _seat(self, anchor: Optional[Tensor]) -> Optional[Tensor]:
        return None if anchor is None else softened(anchor, self.softness, self.sizes)

    def hold_by_draws(self) -> None:
        """Before any step: curvatures will be those of draws, whose noise is not small where L is. Held about u it
        would be magnified as L moves; sites are held nearer to w.
        """
        self.softness = _BY_DRAWS
        self.seat = self.seat.new_zeros(0, 0)  # a start belongs to any L

    @property
    def is_settled(self) -> bool:
        """Whether sites stay about u: a step has been taken, or curvatures will be those of draws."""
        return self.softness == _BY_DRAWS or self.steps_taken > 0

    def _turned(self, seat: Tensor) -> Seen:
        """G of the same sites under another L, and a and b with the mean a + (I + G)⁻¹b."""
        loc = self._kept("loc")
        # r ← Tᵀr with T = L₀⁻¹L is m ← T⁻¹m + S(Tᵀ − T⁻¹)m, T⁻¹m = m − L⁻¹(L − L₀)m
        gram, along = seen_from(self.gram, loc, self.seat, seat)
        near = loc - solve_lower(seat, (seat - self.seat) @ loc[..., None])[..., 0]
        return gram, near, along - near

    def _seen_from(self, seat: Optional[Tensor], level: Optional[Tensor] = None) -> Seen:
        """As :meth:`_turned`, under another mean of the process, too; b is ``None`` for 0."""
        if seat is None or not self.seat.numel():
            gram, near, rest = self.gram, self._kept("loc"), None
        else:
            gram, near, rest = self._turned(seat)
        if level is None or seat is None or not self.level.numel():
            return gram, near, rest
        # r ← r − GL⁻¹δ is m ← m − L⁻¹δ + SL⁻¹δ
        along = self._coefficients_of(seat, level - self.level)
        return gram, near - along, along if rest is None else rest + along

    def forward(self, anchor: Optional[Tensor] = None, level: Optional[Tensor] = None) -> Product:
        """q(w).

        :param anchor: L.
        :param level: values ``(..., M)`` of the process's mean where u = Lw is what f adds to it, if it may move.
        """
        seat, record = self._seat(anchor), recorded()
        held = None if seat is None else seat.detach(), None if level is None else level.detach()
        if record is not None:
            self._level_out(*held)
        by_known = record is not None and self._is_one
        seen = self._seen_from(*held) if by_known else self._seen_from(seat, level)
        try:
            q = self._by_covariance(seen, seat, level) if by_known else self._of(*seen)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # test_negative_curvatures_that_another_seat_magnifies_are_cut: beyond the prior's precision; the mean of u
            # is what it was.
            if seat is None or not seen[0].isfinite().all() or not self.seat.numel():
                raise
            with torch.no_grad():
                seen = seen[0] + lift_to(seen[0], -0.5), self._turned(seat)[1], None
            q = self._of(*seen)
        if record is None:
            return q
        loc = side_by_side([factor.loc for factor in q.factors]).detach()
        taken = record.new(self, _Base(seen[0].detach(), *held, loc))
        return Known(q.sizes, q.factors, q.groups).recorded_in(taken)

    def _coefficients_of(self, seat: Tensor, constant: Tensor) -> Tensor:
        """The coefficients of a constant, whose values at u are given."""
        return solve_lower(seat, constant[..., None])[..., 0]

    def _of(self, gram: Tensor, near: Tensor, rest: Optional[Tensor]) -> Product:
        """q(w) of this G and the mean near + (I + G)⁻¹rest."""
        q = self.of(gram, torch.zeros_like(near) if rest is None else rest)
        is_tilted = recorded() is None and (torch.is_grad_enabled() or self._is_tilted("tilt"))
        for i, own in enumerate(self.slices):
            factor = q.factors[i]
            factor.loc = factor.loc + near[..., own]
            if is_tilted and not isinstance(factor, IdentityFactor):
                root = root_of_inverse(gram[..., own, own], what="I + G of natural steps")
                q.factors[i] = DenseFactor(factor.loc, root @ self._tilt("tilt")[..., own, own])
        return q

    @torch.no_grad()
    def _level_out(self, seat: Optional[Tensor], level: Optional[Tensor] = None) -> None:
        if not self._is_tilted("tilt"):
            return
        seen = self._seen_from(seat, level)
        gram, factors = seen[0].clone(), self._of(*seen).factors
        for own, factor in zip(self.slices, factors):
            if isinstance(factor, DenseFactor):
                inverse = torch.cholesky_inverse(cholesky(factor.tril @ factor.tril.mT, 0.0, "S of natural steps"))
                gram[..., own, own] = inverse - eye_like(inverse)
        self._set("loc", side_by_side([factor.loc for factor in factors]))
        self._put(gram, seat, level)
        self._level_tilt("tilt")

    def _put(self, gram: Tensor, seat: Optional[Tensor], level: Optional[Tensor]) -> None:
        self.gram = gram.expand(self.gram.shape)
        self._put_seat(seat)
        self.level = self.level if level is None else level

    def _by_covariance(self, seen: Seen, seat: Optional[Tensor], level: Optional[Tensor]) -> Product:
        """q(w) of this G and mean that have no graph but that by L + ηsI and by the process's mean."""
        gram, before = seen[0], (self.gram, seen[1], self.seat)
        turn = None if seat is None or not self.seat.numel() else turn_of(seat)

        def root() -> Tensor:
            return root_of_inverse(gram if turn is None else seen_from(*before, seat)[0], what="I + G of natural steps")

        factor = self._known((plus_one(gram), *seen[1:]), None, turn, root)
        if seat is not None and level is not None and level.requires_grad and self.level.numel():
            # r − G(L + ηsI)⁻¹δ moves m by −(I − S)(L + ηsI)⁻¹δ: 0 here, with that derivative.
            along = self._coefficients_of(seat.detach(), level - level.detach())
            factor.loc = factor.loc - along + factor.covariance.detach() @ along
        return Product(self.sizes, [factor], [self.layout[0][1]])

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r."""
        q = from_natural(gram, pull, self.sizes, [group for _, group in self.layout])
        for i, (kind, _) in enumerate(self.layout):
            if kind is IdentityFactor:
                q.factors[i] = IdentityFactor(q.factors[i].loc)
        return q

    def step(self, taken: Pass, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        base: _Base = taken.base
        here = self._seen_from(base.seat) if again else (base.gram, base.loc, None)
        target, slope, cut = self._sums(taken, base)
        if cut is None and is_shared():
            cut = torch.zeros_like(target)  # others may have some
        target, slope, *more = joined(target, slope, *(() if cut is None else (cut,)))
        c, each = weight[..., None, None], (rate / total)[..., None, None]

        # G ← G + (ρ/c)(Φᵀ2HΦ − cG)
        def moved(target: Tensor) -> Tensor:
            return torch.mul(base.gram, -each * c).addcmul_(target, each.expand_as(target)).add_(here[0])

        new, is_cut = moved(target), None
        # Curvatures stay negative where that leaves enough: test_negative_curvature_of_heavy_tails.
        if more:
            # What is left above half of the prior's precision, and above half of the precision there is.
            eye = eye_like(target)
            left = new + 0.5 * eye, new + 0.5 * (eye - here[0])
            is_cut = sum(torch.linalg.cholesky_ex(part.nan_to_num()).info.abs() for part in left) > 0
            new = moved(torch.where(is_cut[..., None, None], target + more[0], target))
        # P⁻¹r − m of the new P and r without their difference, which rounds to nothing where P is large.
        pull = -each[..., 0] * (slope + c[..., 0] * base.loc)
        if again:
            pull = pull + (plus_one(here[0]) @ (here[1] - base.loc)[..., None])[..., 0]
            pull = pull if here[2] is None else pull + here[2]
        # With so much more on the diagonal that rounding leaves it positive: at no slope the mean stays all the same.
        precision = plus_one(new)
        diagonal = precision.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(rounding(precision) * diagonal.mean(-1, keepdim=True))
        factor, info = factorised(precision)
        loc = base.loc + cautious(torch.cholesky_solve(pull[..., None], factor)[..., 0], taken, cut=is_cut)
        # test_gradients_that_are_not_finite_change_nothing
        fine = new.sum((-2, -1)).isfinite() & loc.isfinite().all(-1) & (each[..., 0, 0] > 0) & (info == 0)
        self._set("loc", torch.where(fine[..., None], loc, here[1]))
        self._put(torch.where(fine[..., None, None], new, here[0]), base.seat, base.level)

    def _sums(self, taken: Pass, base: _Base) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Φᵀ2HΦ and Φᵀg, both with what draws say; what is to be added to the first to cut negative curvatures."""
        grams, cuts, slope = [], [], torch.zeros_like(base.loc)
        for row, grad in taken.gradients():
            # Φᵀg
            slope = slope + (row.phi.mT @ grad[..., None])[..., 0]
        for phi, h, by_covariance, is_signed in taken.curvatures():
            # Φᵀ2HΦ, twice the gradient by S
            grams.append(2 * by_covariance if by_covariance is not None else phi.mT @ (phi * (2 * h)[..., None]))
            if is_signed:
                cuts.append(phi.mT @ (phi * (-2 * h).clamp(min=0)[..., None]))
        for centred, grad in taken.drawn():
            # E ∇²f = E ∇f(w)(w − m)ᵀP (Stein's identity; Lin, Khan and Schmidt, 2019).
            one = grad[..., None] * (self._precision(base.gram) @ centred[..., None]).mT
            one = one.reshape(-1, *base.gram.shape).sum(0)
            one = 0.5 * (one + one.mT)
            grams.append(one)
            cuts.append(lift_to(one.nan_to_num(), 0.0))
            slope = slope + grad.reshape(-1, *slope.shape).sum(0)
        gram = sum(grams[1:], grams[0]) if grams else torch.zeros_like(base.gram)
        return gram.expand(base.gram.shape), slope, sum(cuts[1:], cuts[0]) if cuts else None

    def _precision(self, gram: Tensor) -> Tensor:
        """S⁻¹, of independent factors each with its own block."""
        whole = plus_one(gram)
        blocks = [whole[..., own, own] for own in self.slices]
        parts = [eye_like(b) if kind is IdentityFactor else b for (kind, _), b in zip(self.layout, blocks)]
        return on_diagonal(parts, torch.zeros_like(whole))
