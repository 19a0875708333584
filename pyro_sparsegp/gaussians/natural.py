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

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics.functions import Function
from ..numerics.linalg import (
    cholesky,
    factorised,
    lift_to,
    plus_one,
    root_of_inverse,
    rounding,
    side_by_side,
    solve_lower,
    tril_of_product,
    turn_of,
    wider,
)
from ..numerics.processes import is_shared, joined
from .optimal import from_natural, seen_from
from .product import CovarianceFactor, DenseFactor, FullCholesky, IdentityFactor, Product
from .steps import DEFAULT_RATE, KNOWN, Natural, Pass, Rate, Recorded, cautious, recorded, softened

__all__ = ["NaturalGaussian"]

_ETA, _BY_DRAWS = 0.03, 0.3  # η, and where draws alone show curvatures


class _Known(Function):
    """(G, a, b) ↦ m = a + Sb, S = (I + G)⁻¹, tr S and log|S|, unbatched, where hyperparameters move sites along with L
    alone; b is ``None`` for 0.

    G = TᵀG₀T and r = (I + G)m = Tᵀr₀ with T = L₀⁻¹L have dG = DᵀG + GD and dr = Dᵀr for D = L⁻¹dL, so that dS = −S dG S
    and (I + G)S = I leave two products on the way back: with V = S̄ + tI and the gradients S̄ by S, which is symmetric, a
    by the mean, t by the trace and l by log|S|,

        D̄ = −2(I − S)VS − 2l(I − S) − (a − Sa)mᵀ + m(Sa)ᵀ,

    of which the lower triangle counts. It goes to the zeros of :func:`~..numerics.linalg.turn_of`; ``None`` where
    nothing moves sites.
    """

    @staticmethod
    def forward(gram: Tensor, near: Tensor, rest: Optional[Tensor], turn: Optional[Tensor]) -> tuple[Tensor, ...]:
        upper = cholesky(plus_one(gram), 0.0, "I + G of natural steps").mT  # by columns, as the library wants it
        covariance = torch.cholesky_inverse(upper, upper=True).mT
        trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        loc = near.clone() if rest is None else near + torch.cholesky_solve(rest[..., None], upper, upper=True)[..., 0]
        return loc, covariance, trace, -2 * upper.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output[:2])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], by_covariance: Optional[Tensor], by_trace: Any, by_log_det: Any) -> Any:
        loc, covariance = ctx.saved_tensors
        half = None if by_covariance is None else by_covariance @ covariance
        if by_trace is not None:
            half = by_trace * covariance if half is None else torch.addcmul(half, covariance, by_trace)
        total = torch.zeros_like(covariance) if half is None else tril_of_product(covariance, half) - half
        if by_log_det is not None:
            total = torch.addcmul(total, covariance, by_log_det)
            total.diagonal(dim1=-2, dim2=-1).sub_(by_log_det)
        if a is not None:
            along = covariance @ a
            total = total.addr(loc, along, alpha=0.5).addr(along - a, loc, alpha=0.5)
        return None, None, None, 2 * total

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


class _Recorded(Recorded, Product):
    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        factor, phi = self.factors[0], side_by_side(features)
        if not isinstance(factor, CovarianceFactor) or phi.dim() > 2:
            return super().moments(features)
        covariance = self.taken.keep(factor.covariance.view_as(factor.covariance))  # whose gradient is Φᵀ diag(h) Φ
        return self.note(phi, *factor.moments_by(phi, covariance), covariance)


class _Base(NamedTuple):
    """G, L + ηsI, the mean's values and m of a run."""

    gram: Tensor
    seat: Optional[Tensor]
    level: Optional[Tensor]
    loc: Tensor


class NaturalGaussian(Natural):
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

    anchored: ClassVar[bool] = True
    levelled: ClassVar[bool] = True
    gram: Tensor
    seat: Tensor
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
        super().__init__(sizes, batch_shape, like, rate)
        if not self.takes(kind):
            raise ValueError(
                "natural steps are of posteriors whose blocks each have a full covariance or the prior's; got "
                f"{getattr(kind, '__name__', kind)!r}: give the family natural=False"
            )
        self.softness = softness
        self.layout = [(factor, tuple(group)) for factor, group in kind.layout(len(self.sizes))]
        num = sum(self.sizes)
        self._is_one = len(self.layout) == 1 and not batch_shape  # q has one covariance, and no copies
        self._softened_by = self.sizes  # one s for each block; a state of before may have one for all
        self.loc: Any
        self.loc = torch.nn.Parameter(like.new_zeros(*batch_shape, num))  # m
        self._new_tilt("tilt", self.loc, num)
        self.register_buffer("gram", like.new_zeros(*batch_shape, num, num))
        self.register_buffer("seat", like.new_zeros(0, 0))  # L + ηsI that gram and loc belong to
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
        self.gram = (phi.mT @ phi).to(self.gram).expand(self.gram.shape).clone()
        if anchor is not None:
            self.seat = self._seat(anchor.detach())

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start there. One who knows a mean knows more than a batch does: steps start at the rate of the tenth."""
        self._set("loc", loc)
        self.skip(KNOWN)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(prefix + "level", self.level.new_zeros(0))  # states of before it was
        softness = torch.as_tensor(state_dict.pop(prefix + "softness", _ETA)).flatten()
        self.softness = round(float(softness[0]), 6)  # some were saved in float32
        self._softened_by = self.sizes if len(softness) > 1 or len(self.sizes) == 1 else (sum(self.sizes),)
        if prefix + "pull" in state_dict:  # of releases that kept r in the place of m
            state_dict[prefix + "loc"] = _mean_of(state_dict[prefix + "gram"], state_dict.pop(prefix + "pull"))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A number, or one for each block's own s.
        shape = (len(self._softened_by),) if len(self._softened_by) > 1 else ()
        destination[prefix + "softness"] = torch.full(shape, self.softness, dtype=torch.float64)

    def _seat(self, anchor: Tensor) -> Tensor:
        return softened(anchor, self.softness, self._softened_by)

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

    def _seen_from(self, seat: Optional[Tensor]) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """G of the same sites under another L, and (a, b) with the mean a + (I + G)⁻¹b; ``None`` for b = 0.

        r ← Tᵀr with T = L₀⁻¹L is m ← T⁻¹m + S(Tᵀ − T⁻¹)m, T⁻¹m = m − L⁻¹(L − L₀)m.
        """
        loc = self._kept("loc")
        if seat is None or not self.seat.numel():
            return self.gram, loc, None
        gram, along = seen_from(self.gram, loc, self.seat, seat)
        near = loc - solve_lower(seat, (seat - self.seat) @ loc[..., None])[..., 0]
        return gram, near, along - near

    def _under(self, seat: Optional[Tensor], level: Optional[Tensor]) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """As :meth:`_seen_from`, under another mean of the process, too: r ← r − GL⁻¹δ is m ← m − L⁻¹δ + SL⁻¹δ."""
        gram, near, rest = self._seen_from(seat)
        if level is None or seat is None or not self.level.numel():
            return gram, near, rest
        along = self._coefficients_of(seat, level - self.level)
        return gram, near - along, along if rest is None else rest + along

    def forward(self, anchor: Optional[Tensor] = None, level: Optional[Tensor] = None) -> Product:
        """q(w).

        :param anchor: L.
        :param level: values ``(..., M)`` of the process's mean where u = Lw is what f adds to it, if it may move.
        """
        seat = None if anchor is None else self._seat(anchor)
        about = None if seat is None else seat.detach(), None if level is None else level.detach()
        record = recorded()
        if record is not None and self._is_tilted("tilt"):
            self._level_out(*about)
        by_known = record is not None and self._is_one
        gram, near, rest = self._under(*(about if by_known else (seat, level)))
        try:
            q = self._known(gram, near, rest, seat, level) if by_known else self._of(gram, near, rest)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # test_negative_curvatures_that_another_seat_magnifies_are_cut: beyond the prior's precision; the mean of u
            # is what it was.
            if seat is None or not gram.isfinite().all() or not self.seat.numel():
                raise
            with torch.no_grad():
                gram, near, rest = gram + lift_to(gram, -0.5), self._seen_from(seat)[1], None
            q = self._of(gram, near, rest)
        if record is None:
            return q
        loc = side_by_side([factor.loc for factor in q.factors]).detach()
        taken = record.new(self, _Base(gram.detach(), *about, loc))
        return _Recorded(q.sizes, q.factors, q.groups).recorded_in(taken)

    def _coefficients_of(self, seat: Tensor, constant: Tensor) -> Tensor:
        """The coefficients of a constant, whose values at u are given."""
        return solve_lower(seat, constant[..., None])[..., 0]

    def _of(self, gram: Tensor, near: Tensor, rest: Optional[Tensor]) -> Product:
        """q(w) of this G and the mean near + (I + G)⁻¹rest."""
        q = self.of(gram, torch.zeros_like(near) if rest is None else rest)
        sizes = [factor.loc.shape[-1] for factor in q.factors]
        is_tilted = recorded() is None and (torch.is_grad_enabled() or self._is_tilted("tilt"))
        tilt = self._tilt("tilt") if is_tilted else None
        for i, (own, part) in enumerate(zip(self._groups(), near.split(sizes, -1))):
            factor = q.factors[i]
            factor.loc = factor.loc + part
            if tilt is not None and not isinstance(factor, IdentityFactor):
                root = root_of_inverse(gram[..., own, own], what="I + G of natural steps")
                q.factors[i] = DenseFactor(factor.loc, root @ tilt[..., own, own])
        return q

    def _groups(self) -> list[slice]:
        """The coefficients of each factor."""
        edges = list(itertools.accumulate(self.sizes, initial=0))
        return [slice(edges[group[0]], edges[group[-1] + 1]) for _, group in self.layout]

    def _level_out(self, seat: Optional[Tensor], level: Optional[Tensor]) -> None:
        """Have (G, m) alone say what plain gradients have made of q."""
        with torch.no_grad():
            gram, near, rest = self._under(seat, level)
            gram, factors = gram.clone(), self._of(gram, near, rest).factors
            for own, factor in zip(self._groups(), factors):
                if isinstance(factor, DenseFactor):
                    covariance = factor.tril @ factor.tril.mT
                    inverse = torch.cholesky_inverse(cholesky(covariance, 0.0, "S of natural steps"))
                    gram[..., own, own] = inverse - torch.eye(len(inverse.mT), dtype=gram.dtype, device=gram.device)
            self._set("loc", side_by_side([factor.loc for factor in factors]))
        self.gram = gram
        self.seat = self.seat if seat is None else seat
        self.level = self.level if level is None else level
        self._level_tilt("tilt")

    def _known(
        self, gram: Tensor, near: Tensor, rest: Optional[Tensor], seat: Optional[Tensor], level: Optional[Tensor]
    ) -> Product:
        """q(w) of this G and mean that have no graph but that by L + ηsI and by the process's mean."""
        before = self.gram, near, self.seat
        turn = None if seat is None or not self.seat.numel() else turn_of(seat)

        def root() -> Tensor:
            return root_of_inverse(gram if turn is None else seen_from(*before, seat)[0], what="I + G of natural steps")

        loc, covariance, trace, log_det = _Known.apply(gram, near, rest, turn)
        if seat is not None and level is not None and level.requires_grad and self.level.numel():
            # r − G(L + ηsI)⁻¹δ moves m by −(I − S)(L + ηsI)⁻¹δ: 0 here, with that derivative.
            along = self._coefficients_of(seat.detach(), level - level.detach())
            loc = loc - along + covariance.detach() @ along
        factor = CovarianceFactor(loc, covariance, trace, log_det, root)
        return Product(self.sizes, [factor], [self.layout[0][1]])

    @torch.no_grad()
    def sums(self, anchor: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """G and r under L, ``(M, M)``; those of the prior, 0, where no step has been taken: a start is a guess."""
        seat = None if anchor is None else self._seat(anchor)
        if self._is_tilted("tilt"):
            self._level_out(seat, None)
        gram, near, rest = self._seen_from(seat)
        pull = (gram @ near[..., None])[..., 0] + near
        pull = pull if rest is None else pull + rest
        return (gram, pull) if self.steps_taken else (torch.zeros_like(gram), torch.zeros_like(pull))

    @torch.no_grad()
    def put_sums(self, anchor: Optional[Tensor], gram: Tensor, pull: Tensor) -> None:
        """Have q be that of G and r under L, of more rows than a batch: steps go on at a later one's rate."""
        self.gram = (0.5 * (gram + gram.mT)).expand(self.gram.shape).clone()
        self._set("loc", _mean_of(self.gram, pull.expand(self.loc.shape)))
        self.level = self.level.new_zeros(0)  # the mean's values now, which the next step notes
        if anchor is not None:
            self.seat = self._seat(anchor)
        self.skip(max(KNOWN - self.steps_taken, 0))

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

        def moved(target: Tensor) -> Tensor:
            return torch.mul(base.gram, -each * c).addcmul_(target, each.expand_as(target)).add_(here[0])

        new, is_cut = moved(target), None
        if more:
            # What is left above half of the prior's precision, and above half of the precision there is.
            eye = torch.eye(target.shape[-1], dtype=target.dtype, device=target.device)
            left = new + 0.5 * eye, new + 0.5 * (eye - here[0])
            is_cut = sum(torch.linalg.cholesky_ex(part.nan_to_num()).info.abs() for part in left) > 0
            new = moved(torch.where(is_cut[..., None, None], target + more[0], target))
        # P⁻¹r − m of the new P and r without their difference, which rounds to nothing where P is large.
        pull = -each[..., 0] * (slope + c[..., 0] * base.loc)
        if again:
            pull = pull + (plus_one(here[0]) @ (here[1] - base.loc)[..., None])[..., 0]
            pull = pull if here[2] is None else pull + here[2]
        factor, info = factorised(_with_factor(plus_one(new)))
        loc = base.loc + cautious(torch.cholesky_solve(pull[..., None], factor)[..., 0], taken, cut=is_cut)
        fine = new.sum((-2, -1)).isfinite() & loc.isfinite().all(-1) & (each[..., 0, 0] > 0) & (info == 0)
        self.gram = torch.where(fine[..., None, None], new, here[0]).expand(self.gram.shape)
        self._set("loc", torch.where(fine[..., None], loc, here[1]))
        self.seat = self.seat if base.seat is None else base.seat
        self.level = self.level if base.level is None else base.level

    def _sums(self, taken: Pass, base: _Base) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Φᵀ2HΦ and Φᵀg, both with what draws say; what is to be added to the first to cut negative curvatures."""
        grams, cuts, slope = [], [], torch.zeros_like(base.loc)
        for row, grad in taken.gradients():
            slope = slope + (row.phi.mT @ grad[..., None])[..., 0]
        for phi, h, by_covariance, is_signed in taken.curvatures():
            grams.append(2 * by_covariance if by_covariance is not None else phi.mT @ (phi * (2 * h)[..., None]))
            if is_signed:
                cuts.append(phi.mT @ (phi * (-2 * h).clamp(min=0)[..., None]))
        for centred, grad in taken.drawn():
            # E ∇²f = E ∇f(w)(w − m)ᵀP (Stein's identity; Lin, Khan and Schmidt, 2019).
            one = grad[..., None] * self._precision_times(plus_one(base.gram), centred)[..., None, :]
            lead = tuple(range(one.dim() - base.gram.dim()))
            one = one.sum(lead) if lead else one
            one = 0.5 * (one + one.mT)
            grams.append(one)
            cuts.append(lift_to(one.nan_to_num(), 0.0))
            slope = slope + (grad.sum(lead) if lead else grad)
        gram = sum(grams[1:], grams[0]) if grams else torch.zeros_like(base.gram)
        return gram.expand(base.gram.shape), slope, sum(cuts[1:], cuts[0]) if cuts else None

    def _precision_times(self, whole: Tensor, v: Tensor) -> Tensor:
        """S⁻¹v, of independent groups each with its own block."""
        parts = []
        for (kind, _), own in zip(self.layout, self._groups()):
            block = v[..., own]
            parts.append(block if kind is IdentityFactor else (whole[..., own, own] @ block[..., None])[..., 0])
        return torch.cat(parts, -1)


def _mean_of(gram: Tensor, pull: Tensor) -> Tensor:
    """(I + G)⁻¹r, in float64 where there is such."""
    wide = gram.to(wider(gram))
    factor = cholesky(plus_one(wide), 0.0, "I + G of natural steps")
    return torch.cholesky_solve(pull.to(wide)[..., None], factor)[..., 0].to(pull)


def _with_factor(precision: Tensor) -> Tensor:
    """A precision with so much more on its diagonal, in place, that rounding leaves it positive; where a step of the
    mean ends, at no slope, does not depend on it.
    """
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(rounding(precision) * diagonal.mean(-1, keepdim=True))
    return precision
