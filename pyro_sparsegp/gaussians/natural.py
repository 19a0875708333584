"""Natural steps of sites that are about values u = Lw.

With the gradients g and h of minus the bound by the marginals' means and variances, the natural gradient needs no
Fisher matrix: it moves precision P and mean m towards the sums of the sites that they define,

    P̂ = (1 − ρ)P + ρ(I + Φᵀ2HΦ/c),   P̂(m̂ − m) = −ρ(Φᵀg/c + m),   H = diag h,

where c is the weight of the divergence in the objective, 1 in the bound (Khan and Lin, 2017; Salimbeni, Eleftheriadis
and Hensman, 2018; Adam, Chang, Khan and Solin, 2021). At ρ = 1, for a Gaussian likelihood and all rows, that is the
optimum. The mean moves by a difference: where the gradient is 0, it is 0 in spite of rounding. Rounding of Pm would be
a wrong mean, S times that of Pm, which for precise data in float32 is more than their noise. For the same reason moves
of hyperparameters are told as m ← m + small terms.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, eye_like, lift_to, on_diagonal, plus_one, root_of_inverse, side_by_side, wider
from ..numerics.processes import is_shared, joined
from .anchors import BY_DRAWS, Anchor, AtRows, FromPrecision, softened
from .base import Stack, solved
from .factors import CovarianceFactor, DenseFactor, Factor, IdentityFactor
from .free import FullCholesky
from .product import Product, RecordedProduct, slices
from .steps import Natural, Pass, Rate, cautious, recorded

_KNOWN = 9  # steps that sums of more than a batch count for

Parts = tuple[Tensor, ...]  # what a precision is made of
Stepped = tuple[Parts, Tensor, Optional[Tensor], Tensor]  # what a step makes of it: NaturalGaussian._stepped


class Iterate(NamedTuple):
    """q(w) about an anchor, with the mean a + P⁻¹b and the precision P."""

    near: Tensor  # a, ``(..., M)``
    rest: Tensor  # b
    parts: Parts  # that P is made of
    anchor: Anchor


class NaturalGaussian(Natural):
    """q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw), or its best approximation by independent blocks, by natural steps.

    (Khan and Lin, 2017; Salimbeni, Eleftheriadis and Hensman, 2018; Adam, Chang, Khan and Solin, 2021.)

    G, ``(..., M, M)``, and r = (I + G)m, ``(..., M)``, are sums over the data (sites). They are about f's values
    u = Lw at the inducing inputs of the last step, and keep that meaning where L and these inputs move. Where the
    process has a constant mean that moves, they are about f = μ + Lw,
    r ← r − GL⁻¹δ for μ ← μ + δ: what f says of the data stays what it was, and the gradient by μ is that of the whole
    (else each step of μ would have to wait for q's).

    Three guards keep a step where its quadratic model holds. Where likelihoods are not log-concave, with several
    functions, or by draws, it may leave less than half of the precision somewhere; then negative curvatures are cut to
    0. The mean moves no function value by more than three standard deviations of the prior, or half of one where
    curvatures of several functions are cut: counts of 1,000 under an exponential link would else be jumped to at e¹⁰⁰⁰.
    Gradients that are not finite change nothing.

    Under objectives that take no natural steps m is a parameter, and S = RAAᵀRᵀ with RRᵀ = (I + G)⁻¹ and a free lower
    triangular A, I at first, for each block.

    :param kind: the free posterior with the same layout of factors. These share the whole of G: their means are solved
        for together (a step with each one's own mean diverges where they are coupled).
    """

    softness = 0.0  # η: sites are about (L + ηsI)w, with s the root mean variance of u in each block
    gram: Tensor
    anchor: Tensor
    level: Tensor
    _stack: Stack  # of the blocks that turn by themselves
    _stays: Any = None  # the part K of P that does not turn, as a stack; None is I
    _is_known: bool  # whether q is given by its S, which is quicker where it is small: one covariance, without copies

    def __init__(
        self,
        sizes: Sequence[int],
        batch_shape: Sequence[int],
        like: Tensor,
        kind: Any = FullCholesky,
        rate: Optional[Rate] = None,
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.layout = [(factor, tuple(group)) for factor, group in kind.layout(len(self.sizes))]
        self.slices = slices(self.sizes, [group for _, group in self.layout])  # the coefficients of each factor
        num = sum(self.sizes)
        self._stack, self._is_known = Stack([num]), len(self.layout) == 1 and not self.batch_shape
        self.tilt = torch.nn.Parameter(like.new_zeros(*batch_shape, num, num))
        self.register_buffer("gram", like.new_zeros(*batch_shape, num, num))
        self.register_buffer("anchor", like.new_zeros(0, 0))  # L + ηsI that the sums belong to
        self.register_buffer("inputs", like.new_zeros(0))  # and Z, flat, where it is learned
        self.register_buffer("level", like.new_zeros(0))  # μ that the sums belong to, (..., M), where it moves

    def start(self, anchor: object, features: Sequence[Tensor]) -> None:
        phi, own = side_by_side(features), self._anchored(anchor)
        # I + G = I + λΦᵀΦ
        self.gram = (phi.mT @ phi).to(self.gram).expand(self.gram.shape).clone()
        if type(own) is Anchor:  # features at rows do not move before the first step, which has them with it
            self.anchor, self.inputs = own.kept.detach(), own.inputs

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        # Earlier releases had one for each block, then 0.03 for all, and no inputs; the anchor was a seat.
        softness = torch.as_tensor(state_dict.pop(prefix + "softness", 0.03))
        state_dict.setdefault(prefix + "inputs", self.inputs.new_zeros(0))
        state_dict.setdefault(prefix + "anchor", state_dict.pop(prefix + "seat", self.anchor.new_zeros(0, 0)))
        self.softness = round(float(softness.flatten()[0]), 6)  # some were saved in float32
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "softness"] = torch.tensor(self.softness, dtype=torch.float64)

    def leave_anchor(self) -> None:
        """Have the sums be about w until the next step, as a start's are."""
        self.anchor, self.inputs, self.level = (self.anchor.new_zeros(*shape) for shape in ((0, 0), (0,), (0,)))

    def hold_by_draws(self) -> None:
        """Before any step: curvatures will come from draws, whose noise about u would be magnified as L moves."""
        self.softness = BY_DRAWS
        self.leave_anchor()

    def anchor_of(self, features: Any, mean: Any = None, rows: Optional[Tensor] = None) -> Any:
        # It follows from the first step on in which features train.
        values, ones = features.anchor if self.anchor.numel() or features.trains else None, features.ones
        if rows is not None:  # inputs of data that move, which no features span that have moved
            values, ones = AtRows([side_by_side(features(rows))]), rows.new_ones(rows.shape[-2])
        if values is None:
            return None
        anchor = self._anchored(values)
        if rows is None and (before := self._before(features.places, features.moves)) is not None:
            anchor.move(features.places, features.anchor_at(before), values)
        is_constant = isinstance(mean, Tensor) and mean.shape[-1:] in ((), (1,))
        moves = is_constant and (mean.requires_grad or self.level.numel())  # or did
        if moves and ones is not None:
            anchor.level = mean * ones
        return anchor

    def _before(self, inputs: Optional[Tensor], moves: bool) -> Optional[Tensor]:
        """Inducing inputs that the sums belong to, of the shape of these, if they may be others."""
        if inputs is None or not (moves or self.inputs.numel()):  # as in a state of a family that learned them
            return None
        return (self.inputs if self.inputs.numel() else inputs.detach()).view(inputs.shape)

    # What P is made of: here G = P − I, (..., M, M).

    def _anchored(self, anchor: Any) -> Anchor:
        """What sites are about in a run."""
        if isinstance(anchor, Tensor):
            return Anchor(softened(anchor, self.softness, self.sizes))
        return anchor or Anchor(self.anchor.new_zeros(0, 0))

    def _turns(self, anchor: Anchor) -> bool:
        """Whether sites are about an anchor, and so turn with this one. A start's are about none, and stay."""
        return min(anchor.kept.numel(), self.anchor.numel()) > 0

    def _iterate_at(self, anchor: Anchor) -> Iterate:
        """The same sites about another anchor, and under its level and weight."""
        # Pm ← TᵀPm with T = L₀⁻¹L is m ← T⁻¹m + P⁻¹(TᵀK − KT⁻¹)m, with the part K of P that does not turn, such as I.
        loc = self._kept("loc")
        if not self._turns(anchor):
            return Iterate(loc, torch.zeros_like(loc), (self.gram,), anchor)
        gram, near, rest = anchor.turned(self.anchor, self.gram, loc)
        if anchor.log_weight is not None:
            # G ← cG and Pm ← cPm with the precision's factor c
            factor = (anchor.log_weight - self._buffers["log_weight"]).exp()  # type: ignore[operator]
            gram, rest = gram * factor, (factor - 1) * near + factor * rest
        if anchor.level is not None and self.level.numel():
            # r ← r − GL⁻¹δ is m ← m − L⁻¹δ + SL⁻¹δ
            along = anchor.coefficients(anchor.level - self.level)
            near, rest = near - along, rest + along
        return Iterate(near, rest, (gram,), anchor)

    def _gram(self, parts: Parts) -> Tensor:
        """G = P − I, ``(..., M, M)``."""
        return parts[0]

    def _precision(self, parts: Parts) -> Tensor:
        return plus_one(self._gram(parts))

    def _given(self, iterate: Iterate) -> Product:
        """q(w) of these sites, with the graph of what they are made of and of the tilt."""
        (gram,) = iterate.parts
        q = self.of(gram, iterate.rest)
        has_tilt = self.has_tilt
        for own, factor in zip(self.slices, q.factors):
            factor.loc = factor.loc + iterate.near[..., own]
            # S = RAAᵀRᵀ
            if has_tilt and isinstance(factor, DenseFactor):
                factor.root = factor.root @ self.tilt_matrix[..., own, own]
        return q

    def _nearest(self, precision: Tensor) -> Parts:
        """What P, ``(..., M, M)``, or the nearest to it, is made of."""
        self.level = self.level.new_zeros(0)  # the mean's values now, which the next step notes
        return (precision - eye_like(precision),)

    def _untilted(self, q: Product, parts: Parts) -> Parts:
        """What the precision of a tilted q is made of, ``parts`` being that without the tilt."""
        gram = parts[0].clone()
        for own, factor in zip(self.slices, q.factors):
            # G's block is S⁻¹ − I
            if isinstance(factor, DenseFactor):
                inverse = torch.cholesky_inverse(cholesky(factor.root @ factor.root.mT, 0.0, "S of natural steps"))
                gram[..., own, own] = inverse - eye_like(inverse)
        return (gram,)

    def _put_parts(self, parts: Parts) -> None:
        self.gram = parts[0].expand(self.gram.shape)

    def _stepped(self, taken: Pass, parts: Parts, right: Tensor, rate: Tensor, weight: Tensor) -> Stepped:
        """What P̂ is made of, of what P is; P̂⁻¹ times the vector ``right``; where negative curvatures are cut; and what
        is not 0 if that failed.
        """
        gram, cut = self._aim(taken, parts[0], rate, weight)
        shift, failed = solved(plus_one(gram), right)
        return (gram,), shift, cut, failed

    # How q is given.

    def forward(self, anchor: object = None) -> Product:
        """q(w); sites are about L, or an anchor."""
        own, record = self._anchored(anchor), recorded()
        if record is None:
            return self._made(own, False)[0]
        # The step starts from what is given here, under the L of this run.
        if self.is_tilted:
            self._level_out(own)
        q, iterate = self._made(own, self._is_known and own.has_turn)
        loc = side_by_side(q.loc)
        base = Iterate(loc.detach(), torch.zeros_like(loc), tuple(map(Tensor.detach, iterate.parts)), iterate.anchor)
        return RecordedProduct(q, record.new(self, base))

    def _made(self, anchor: Anchor, known: bool) -> tuple[Product, Iterate]:
        """q(w), and the sites that it is of; where it is known, with no graph but that by the anchor."""
        try:
            if known:
                return self._made_known(anchor, self._iterate_at(anchor.detached))
            iterate = self._iterate_at(anchor)
            return self._given(iterate), iterate
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # Negative curvatures that another anchor magnifies are cut where they are beyond the prior's precision; the
            # mean of u is what it was.
            near, _, parts, held = self._iterate_at(anchor.detached)
            gram = parts[0].detach()
            if len(parts) > 1 or not (self._turns(anchor) and gram.isfinite().all()):
                raise
            iterate = Iterate(near.detach(), torch.zeros_like(near), (gram + lift_to(gram, -0.5),), held)
            return self._given(iterate), iterate

    def _made_known(self, anchor: Anchor, iterate: Iterate) -> tuple[Product, Iterate]:
        turn = stays = None
        if self._turns(anchor):
            turn, stays = anchor.turn(), self._stays
        size: Any = 0.0
        if turn is not None and anchor.log_weight is not None:  # as T ← √c T, which takes Pm to √c Pm
            size = 0.5 * (anchor.log_weight - anchor.log_weight.detach())
            turn = turn + size * eye_like(turn)
        sites = self._precision(iterate.parts), iterate.near, iterate.rest
        loc, covariance, trace, log_det = FromPrecision.apply(*sites, stays, turn, self._stack)
        loc = loc + size * loc.detach()
        if anchor.level is not None and self.level.numel():
            # r − G(L + ηsI)⁻¹δ moves m by −(I − S)(L + ηsI)⁻¹δ: 0 here, with that derivative.
            along = iterate.anchor.coefficients(anchor.level - anchor.level.detach())
            loc = loc - along + covariance.detach() @ along

        # Draws alone want a root, through a graph of its own.
        def root() -> Tensor:
            return root_of_inverse(self._precision(self._iterate_at(anchor).parts), "I + G of natural steps")

        factor = CovarianceFactor(loc, covariance, trace, log_det, root)
        return Product(self.sizes, [factor], [range(len(self.sizes))]), iterate

    @torch.no_grad()
    def _level_out(self, anchor: Anchor) -> None:
        """Have the sums alone say what plain gradients have made of a q that is tilted, about an anchor."""
        iterate = self._iterate_at(anchor)
        q = self._given(iterate)
        self._put(side_by_side(q.loc), self._untilted(q, iterate.parts) if self.is_tilted else iterate.parts, anchor)
        if self.is_tilted:
            self._end_tilt()
        anchor.settle()

    def settle(self, anchor: object) -> None:
        if self.anchor.numel():  # those of a start belong to any
            self._level_out(self._anchored(anchor))

    def _put(self, loc: Tensor, parts: Parts, anchor: Anchor) -> None:
        self._set("loc", loc)
        self._put_parts(parts)
        self._buffers["anchor"], self._buffers["inputs"] = anchor.kept.detach(), anchor.inputs
        if anchor.level is not None:
            self._buffers["level"] = anchor.level.detach()
        if anchor.log_weight is not None:
            self._buffers["log_weight"] = anchor.log_weight.detach()

    # Steps.

    def step(self, taken: Pass, rate: Tensor, weight: Tensor, again: bool) -> None:
        base: Iterate = taken.base
        loc, parts = base.near, base.parts
        # −ρ(Φᵀg/c + m)
        (slope,) = joined(taken.slope(loc))
        right = -rate[..., None] * (slope / weight[..., None] + loc)
        if again:
            # of the mean m' that other passes have led to: what is left of P'(m' − m)
            base.anchor.settle()
            iterate = self._iterate_at(base.anchor)
            loc, parts = side_by_side(self._given(iterate).loc), iterate.parts
            # (1 − ρ)P'(m' − m)
            left = (self._precision(parts) @ (loc - base.near)[..., None])[..., 0]
            right = right + (1 - rate[..., None]) * left
        new, shift, cut, failed = self._stepped(taken, parts, right, rate, weight)
        moved = base.near + cautious(shift, taken, cut)
        # test_a_step_without_a_factor_is_left_out (a P̂ that is not finite has none): 0 times a finite number is 0
        fine = (0 * moved.sum(-1) == failed) & (rate > 0)
        pairs = zip((moved, *new), (loc, *parts))
        kept = [torch.where(fine.view(fine.shape + (1,) * (b.dim() - fine.dim())), a, b) for a, b in pairs]
        self._put(kept[0], tuple(kept[1:]), base.anchor)

    def _aim(self, taken: Pass, gram: Tensor, rate: Tensor, weight: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """Ĝ = P̂ − I of G = P − I, and where negative curvatures are cut."""

        def precision() -> Tensor:  # of the q that is drawn from, of independent factors each with its own block
            whole = plus_one(gram)
            blocks = [whole[..., own, own] for own in self.slices]
            parts = [eye_like(b) if kind is IdentityFactor else b for (kind, _), b in zip(self.layout, blocks)]
            return on_diagonal(parts, torch.zeros_like(whole))

        target, cut = taken.curvature(gram, precision)
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
    def sums(self, anchor: object) -> tuple[Tensor, Tensor]:
        """G = P − I and r = Pm under L; before the first step the prior's, 0: a start is a guess."""
        own = self._anchored(anchor)
        if self.is_tilted:  # by plain gradients: test_rows_are_added_to_what_plain_gradients_taught
            self._level_out(own)
            self.steps = max(self.steps, 1)
        iterate = self._iterate_at(own)
        # r = P(a + P⁻¹b)
        pull = (self._precision(iterate.parts) @ iterate.near[..., None])[..., 0] + iterate.rest
        return (self.steps > 0) * self._gram(iterate.parts), (self.steps > 0) * pull

    @torch.no_grad()
    def put_sums(self, anchor: object, gram: Tensor, pull: Tensor) -> None:
        """Have q be that of G and r under L, of more rows than a batch, or the nearest with its mean: steps go on at a
        later one's rate.
        """
        precision = plus_one((0.5 * (gram + gram.mT)).expand(*self.batch_shape, *gram.shape[-2:]))
        # in float64 where there is such
        factor = cholesky(precision.to(wider(precision)), 0.0, "I + G of natural steps")
        # m = P⁻¹r
        loc = torch.cholesky_solve(pull.expand(precision.shape[:-1]).to(factor)[..., None], factor)[..., 0]
        self._put_known(loc, self._nearest(precision), anchor)

    def _put_known(self, loc: Tensor, parts: Parts, anchor: object) -> None:
        self._put(loc, parts, self._anchored(anchor))
        self.steps = max(self.steps, _KNOWN)

    def of(self, gram: Tensor, pull: Tensor) -> Product:
        """q(w) of these G and r."""
        whole, what = plus_one(gram), "I + G of natural steps"
        # m = P⁻¹r is that of the whole; such a factor may have the prior's covariance
        loc = torch.cholesky_solve(pull[..., None], cholesky(whole, 0.0, what))[..., 0]
        factors: list[Factor] = []
        for (kind, _), own in zip(self.layout, self.slices):
            # The root of a known q in a step: at a seed all calls draw alike.
            root = [root_of_inverse(whole[..., own, own], what)] if kind is DenseFactor else []
            factors.append(kind(loc[..., own], *root))
        return Product(self.sizes, factors, [group for _, group in self.layout])


def is_full(coefficients: Any) -> bool:
    """Whether q(w) has one full covariance."""
    return [isinstance(factor, DenseFactor) for factor in getattr(coefficients(), "factors", ())] == [True]
