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
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

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
from .steps import (
    DEFAULT_RATE,
    KNOWN,
    Heard,
    Lift,
    Listening,
    Rate,
    StepsOnBackward,
    cautious,
    listen,
    shares_of,
    softened,
)

__all__ = ["NaturalGaussian"]


_ETA, _BY_DRAWS = 0.03, 0.3  # η, and where draws alone show curvatures


class _Root(Function):
    """G ↦ a lower R with RRᵀ = S = (I + G)⁻¹, unbatched; the way back in three products.

    dR = −R tril½(RᵀdG R), so Ḡ = −½R(B + Bᵀ)Rᵀ with B the lower triangle of RᵀR̄, its diagonal halved. (Autograd goes
    back through a Cholesky factor and an inverse.)
    """

    @staticmethod
    def forward(gram: Tensor) -> Tensor:
        return root_of_inverse(gram, what="I + G of natural steps")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, dgram: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        inner = root.mT @ dgram @ root
        return -root @ (inner.tril() - 0.5 * torch.diag_embed(inner.diagonal()))

    @staticmethod
    def backward(ctx: Any, by_root: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        inner = (root.mT @ by_root).tril_()
        inner.diagonal().mul_(0.5)
        return -0.5 * ((root @ (inner + inner.mT)) @ root.mT)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gram: Tensor) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


class _Known(Function):
    """(G, a, b) ↦ m = a + Sb, S = (I + G)⁻¹, tr S and log|S|, unbatched, where hyperparameters move sites along with L
    alone; b is ``None`` for 0.

    G = TᵀG₀T and r = (I + G)m = Tᵀr₀ with T = L₀⁻¹L have dG = DᵀG + GD and dr = Dᵀr for D = L⁻¹dL, so that dS = −S dG S
    and (I + G)S = I leave two products on the way back: with V = S̄ + tI and the gradients S̄ by S, which is symmetric, a
    by the mean, t by the trace and l by log|S|,

        D̄ = −2(I − S)VS − 2l(I − S) − (a − Sa)mᵀ + m(Sa)ᵀ,

    of which the lower triangle counts. (By G and r, and then through TᵀG₀T, T and L, it would be six.) It goes to the
    zeros of :func:`~..numerics.linalg.turn_of`; ``None`` where nothing moves sites. The last argument is that of
    :class:`Lift`.
    """

    @staticmethod
    def forward(
        gram: Tensor, near: Tensor, rest: Optional[Tensor], turn: Optional[Tensor], unit: Tensor
    ) -> tuple[Tensor, ...]:
        upper = cholesky(plus_one(gram), 0.0, "I + G of natural steps").mT  # by columns, as the library wants it
        covariance = torch.cholesky_inverse(upper, upper=True).mT
        trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        loc = near.clone() if rest is None else near + torch.cholesky_solve(rest[..., None], upper, upper=True)[..., 0]
        return loc, covariance, trace, -2 * upper.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output[:2])
        ctx.save_for_forward(*output[:2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Optional[Tensor], by_covariance: Optional[Tensor], by_trace: Any, by_log_det: Any) -> Any:
        loc, covariance = ctx.saved_tensors
        unit = loc.new_zeros(())
        if not ctx.needs_input_grad[3]:
            return None, None, None, None, unit
        if torch.is_grad_enabled():  # whose own gradients are to be symmetric
            covariance = 0.5 * (covariance + covariance.mT)
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
        return None, None, None, 2 * total, unit

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, ___: Any, turn: Optional[Tensor], ____: Any) -> tuple[Tensor, ...]:
        loc, covariance = ctx.saved_tensors
        if turn is None:
            zero = loc.new_zeros(())
            return torch.zeros_like(loc), torch.zeros_like(covariance), zero, zero
        moved = turn @ covariance - turn  # −D(I − S)
        half = covariance @ turn.mT
        change = half @ covariance - half
        change = change + change.mT
        mean = half @ loc + covariance @ (turn @ loc) - turn @ loc
        trace = change.diagonal(dim1=-2, dim2=-1).sum(-1)
        return mean, change, trace, 2 * moved.diagonal(dim1=-2, dim2=-1).sum(-1)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


class _Listening(Listening, Product):
    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        factor, phi = self.factors[0], side_by_side(features)
        if not isinstance(factor, CovarianceFactor) or phi.dim() > 2:
            return super().moments(features)
        covariance = factor.covariance.view_as(factor.covariance)  # whose gradient is of these rows alone
        mean, change = factor.moments_by(phi, covariance)
        self.key = listen(self.module, self.heard, [phi], mean, change, covariance)
        return mean, change


@dataclass
class _Base:
    """G, L + ηsI, the mean's values and m of a forward pass."""

    gram: Tensor
    seat: Optional[Tensor]
    level: Optional[Tensor]
    loc: Tensor


class NaturalGaussian(StepsOnBackward):
    """q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw), or its best approximation by independent blocks, by natural steps.

    (Khan and Lin, 2017; Salimbeni, Eleftheriadis and Hensman, 2018; Adam, Chang, Khan and Solin, 2021.)

    G, ``(..., M, M)``, and r = (I + G)m, ``(..., M)``, are sums over the data (sites). G and m are buffers: no
    optimiser sees them, and gradients of hyperparameters pass through q. When these move, sites keep their meaning
    about (L + ηsI)w, with s the root mean variance of u = Lw in each block: about u where it is well conditioned, about
    w where it is not. Where the process has a constant mean that moves, they are about f = μ + Lw, r ← r − GL⁻¹δ for
    μ ← μ + δ: what f says of the data stays what it was, and the gradient by μ is that of the whole (else each step of
    μ would have to wait for q's).

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
    loc: Tensor
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
        self.register_buffer("gram", like.new_zeros(*batch_shape, num, num))
        self.register_buffer("loc", like.new_zeros(*batch_shape, num))  # m
        self.register_buffer("seat", like.new_zeros(0, 0))  # L + ηsI that gram and loc belong to
        self.register_buffer("level", like.new_zeros(0))  # μ that they belong to, (..., M), where it moves
        self.shares: Optional[Tensor]
        self.register_buffer("shares", self._shares(), persistent=False)

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
        self.put("loc", loc)
        self.skip(KNOWN)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(prefix + "level", self.level.new_zeros(0))  # states of before it was
        softness = torch.as_tensor(state_dict.pop(prefix + "softness", _ETA)).flatten()
        self.softness = round(float(softness[0]), 6)  # some were saved in float32
        self.shares = self._shares() if len(softness) > 1 else None  # one of releases with one s for all blocks
        if prefix + "pull" in state_dict:  # of releases that kept r in the place of m
            state_dict[prefix + "loc"] = _mean_of(state_dict[prefix + "gram"], state_dict.pop(prefix + "pull"))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        shape = () if self.shares is None else (len(self.sizes),)  # a number, or one for each block's own s
        destination[prefix + "softness"] = torch.full(shape, self.softness, dtype=torch.float64)

    def _shares(self) -> Optional[Tensor]:
        return shares_of(self.sizes, self.loc) if len(self.sizes) > 1 else None

    def _seat(self, anchor: Tensor) -> Tensor:
        return softened(anchor, self.softness, self.shares)

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
        if seat is None or not self.seat.numel():
            return self.gram, self.loc, None
        gram, along = seen_from(self.gram, self.loc, self.seat, seat)
        near = self.loc - solve_lower(seat, (seat - self.seat) @ self.loc[..., None])[..., 0]
        return gram, near, along - near

    def forward(self, anchor: Optional[Tensor] = None, level: Optional[Tensor] = None) -> Product:
        """q(w).

        :param anchor: L.
        :param level: values ``(..., M)`` of the process's mean where u = Lw is what f adds to it, if it may move.
        """
        self.settle()
        seat = None if anchor is None else self._seat(anchor)
        gram, near, rest = self._seen_from(seat if seat is None or not self._is_one else seat.detach())
        if level is not None and seat is not None and self.level.numel():
            # r ← r − GL⁻¹δ is m ← m − L⁻¹δ + SL⁻¹δ.
            at = (seat.detach(), level.detach()) if self._is_one else (seat, level)
            along = self._coefficients_of(at[0], at[1] - self.level)
            near, rest = near - along, along if rest is None else rest + along
        try:
            return self._told(gram, near, rest, seat, level, moved=True)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            if seat is None or not gram.isfinite().all() or not self.seat.numel():
                raise
            # Another L has magnified negative curvatures beyond the prior's precision: these are cut, and the mean of u
            # is what it was.
            with torch.no_grad():
                gram, near = gram + lift_to(gram, -0.5), self._seen_from(seat)[1]
            return self._told(gram, near, None, seat, level)

    def _coefficients_of(self, seat: Tensor, constant: Tensor) -> Tensor:
        """The coefficients of a constant, whose values at u are given."""
        return solve_lower(seat, constant[..., None])[..., 0]

    def _told(
        self,
        gram: Tensor,
        near: Tensor,
        rest: Optional[Tensor],
        seat: Optional[Tensor],
        level: Optional[Tensor],
        moved: bool = False,
    ) -> Product:
        """What a forward pass gives; ``moved`` says whether G and m came along with L and the mean."""
        about = None if seat is None else seat.detach(), None if level is None else level.detach()
        if self._is_one:
            q = self._one(gram, near, rest, *((seat, level) if moved else (None, None)))
        else:
            q = self._with_mean(Lift.apply(gram, self.unit), near, rest)
        if not torch.is_grad_enabled():
            return q
        heard = Heard(_Base(gram.detach(), *about, side_by_side([f.loc for f in q.factors]).detach()), self.unit)
        return _Listening(q.sizes, q.factors, q.groups).heard_by(self, heard)

    def _with_mean(self, gram: Tensor, near: Tensor, rest: Optional[Tensor]) -> Product:
        """q(w) of this G and the mean near + (I + G)⁻¹rest."""
        q = self.of(gram, torch.zeros_like(near) if rest is None else rest)
        sizes = [factor.loc.shape[-1] for factor in q.factors]
        for factor, part in zip(q.factors, near.split(sizes, -1)):
            factor.loc = factor.loc + part
        return q

    def _one(
        self, gram: Tensor, near: Tensor, rest: Optional[Tensor], seat: Optional[Tensor], level: Optional[Tensor]
    ) -> Product:
        """q(w) of this G and mean that have no graph but that by L + ηsI and by the process's mean."""
        before = self.gram, self.loc, self.seat
        turn = None if seat is None or not self.seat.numel() else turn_of(seat)

        def root() -> Tensor:
            moved = gram if turn is None else seen_from(*before, seat)[0]
            return _Root.apply(Lift.apply(moved, self.unit))

        loc, covariance, trace, log_det = _Known.apply(gram, near, rest, turn, self.unit)
        if seat is not None and level is not None and level.requires_grad and self.level.numel():
            # r − G(L + ηsI)⁻¹δ moves m by −(I − S)(L + ηsI)⁻¹δ: 0 here, with that derivative.
            along = self._coefficients_of(seat.detach(), level - level.detach())
            loc = loc - along + covariance.detach() @ along
        factor = CovarianceFactor(loc, covariance, trace, log_det, root)
        return Product(self.sizes, [factor], [self.layout[0][1]])

    @torch.no_grad()
    def sums(self, anchor: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """G and r under L, ``(M, M)``; those of the prior, 0, where no step has been taken: a start is a guess."""
        self.settle()
        gram, near, rest = self._seen_from(None if anchor is None else self._seat(anchor))
        pull = (gram @ near[..., None])[..., 0] + near
        pull = pull if rest is None else pull + rest
        return (gram, pull) if self.steps_taken else (torch.zeros_like(gram), torch.zeros_like(pull))

    def seen_from(self, sums: tuple[Tensor, Tensor, Tensor], anchor: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """Parts of (G, r) that belong to another L, which comes with them, as they are under L."""
        return seen_from(*sums, None if anchor is None else self._seat(anchor))

    @torch.no_grad()
    def put_sums(self, anchor: Optional[Tensor], gram: Tensor, pull: Tensor) -> None:
        """Have q be that of G and r under L, of more rows than a batch: steps go on at a later one's rate."""
        self.gram = (0.5 * (gram + gram.mT)).expand(self.gram.shape).clone()
        self.loc = _mean_of(self.gram, pull.expand(self.loc.shape))
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

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        base: _Base = heard.base
        here = self._seen_from(base.seat) if again else (base.gram, base.loc, None)
        target, slope, cut = self._sums(heard, base)
        if cut is None and is_shared():
            cut = torch.zeros_like(target)  # others may have some
        target, slope, *more = joined(target, slope, *(() if cut is None else (cut,)))
        cut = more[0] if more else None
        c, each = weight[..., None, None], (rate / total)[..., None, None]

        def moved(target: Tensor) -> Tensor:
            return torch.mul(base.gram, -each * c).addcmul_(target, each.expand_as(target)).add_(here[0])

        new = moved(target)
        is_cut = None
        if cut is not None:
            # What is left above half of the prior's precision, and above half of the precision there is.
            eye = torch.eye(target.shape[-1], dtype=target.dtype, device=target.device)
            rest = new + 0.5 * eye, new + 0.5 * (eye - here[0])
            short = sum(torch.linalg.cholesky_ex(part.nan_to_num()).info.abs() for part in rest)
            is_cut = short > 0
            target = torch.where(is_cut[..., None, None], target + cut, target)
            new = moved(target)
        # P⁻¹r − m of the new P and r without their difference, which rounds to nothing where P is large.
        pull = -each[..., 0] * (slope + c[..., 0] * base.loc)
        if again:
            pull = pull + (plus_one(here[0]) @ (here[1] - base.loc)[..., None])[..., 0]
            pull = pull if here[2] is None else pull + here[2]
        factor, info = factorised(_with_factor(plus_one(new)))
        loc = base.loc + cautious(torch.cholesky_solve(pull[..., None], factor)[..., 0], heard, cut=is_cut)
        fine = new.sum((-2, -1)).isfinite() & loc.isfinite().all(-1) & (each[..., 0, 0] > 0) & (info == 0)
        self.gram = torch.where(fine[..., None, None], new, here[0]).expand(self.gram.shape)
        self.loc = torch.where(fine[..., None], loc, here[1]).expand(self.loc.shape)
        if base.seat is not None:
            self.seat = base.seat
        if base.level is not None:
            self.level = base.level

    def _sums(self, heard: Heard, base: _Base) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Φᵀ2HΦ and Φᵀg, both with what draws say; what is to be added to the first to cut negative curvatures."""
        grams, slope = [], torch.zeros_like(base.loc)
        cut: Optional[Tensor] = None
        for row in heard.rows.values():
            if "by_mean" in row:
                phi = heard.whole(row)
                slope = slope + (phi.mT @ row["by_mean"][..., None])[..., 0]
        for row in heard.curved():
            phi = row["whole"] if "whole" in row else heard.whole(row)
            curvature = 2 * row["by_change"]
            grams.append(2 * row["by_covariance"] if "by_covariance" in row else phi.mT @ (phi * curvature[..., None]))
            if row["signed"]:
                more = phi.mT @ (phi * (-curvature).clamp(min=0)[..., None])
                cut = more if cut is None else cut + more
        for centred, grad in heard.draws.values():
            # E ∇²f = E ∇f(w)(w − m)ᵀP (Stein's identity; Lin, Khan and Schmidt, 2019).
            whole = plus_one(base.gram)
            one = grad[..., None] * self._precision_times(whole, centred)[..., None, :]
            lead = tuple(range(one.dim() - base.gram.dim()))
            one = one.sum(lead) if lead else one
            one = 0.5 * (one + one.mT)
            grams.append(one)
            slope = slope + (grad.sum(lead) if lead else grad)
            more = lift_to(one.nan_to_num(), 0.0)
            cut = more if cut is None else cut + more
        inside = heard.weight_inside(self.batch_shape)
        if inside is not None:  # the divergence's own, of which the step knows
            grams.append(inside[..., None, None] * self._of_groups(base.gram))
            slope = slope - inside[..., None] * base.loc
        gram = sum(grams[1:], grams[0]) if grams else torch.zeros_like(base.gram)
        return gram.expand(base.gram.shape), slope, cut

    def _of_groups(self, gram: Tensor) -> Tensor:
        """What of G is in the precision of q: the blocks of independent groups that have a covariance of their own."""
        if [kind for kind, _ in self.layout] == [DenseFactor]:
            return gram
        found, edges = torch.zeros_like(gram), list(itertools.accumulate(self.sizes, initial=0))
        for kind, group in self.layout:
            own = slice(edges[group[0]], edges[group[-1] + 1])
            if kind is not IdentityFactor:
                found[..., own, own] = gram[..., own, own]
        return found

    def _precision_times(self, whole: Tensor, v: Tensor) -> Tensor:
        """S⁻¹v, of independent groups each with its own block."""
        edges = list(itertools.accumulate(self.sizes, initial=0))
        parts = []
        for kind, group in self.layout:
            own = slice(edges[group[0]], edges[group[-1] + 1])
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
