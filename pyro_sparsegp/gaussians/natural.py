"""Gaussians over coefficients in natural parameters, stepped by natural gradients.

q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw). With the gradients g and h of minus the bound by the marginals' means and variances,
the natural gradient needs no Fisher matrix: it moves (G, r) towards the sums of the sites that they define,

    G ← G + (ρ/c)(Φᵀ2HΦ − cG),   r ← r + (ρ/c)(Φᵀ(2HΦm − g) − cr),   H = diag h,

where c is the weight of the divergence in the objective, 1 in the bound (Khan and Lin, 2017; Salimbeni, Eleftheriadis and
Hensman, 2018; Adam, Chang, Khan and Solin, 2021). At ρ = 1, for a Gaussian likelihood and all rows, that is the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Optional, Union

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..numerics.linalg import root_of_inverse, side_by_side, solve_lower
from .base import Coefficients
from .optimal import from_natural
from .product import DenseFactor, FullCholesky, IdentityFactor, Product

__all__ = ["Falling", "Heard", "Listening", "NaturalGaussian", "Rate", "StepsOnBackward"]

_FARTHEST = 3.0  # standard deviations of the prior; Newton's step for an exponential overshoots by itself

Rate = Union[float, Callable[[int], float]]


@dataclass(frozen=True)
class Falling:
    """The rate of step t = 0, 1, …: ρ = max(least, most/(1 + t)), an average over all steps that turns into one over the
    last 1/least.
    """

    least: float = 0.1
    most: float = 1.0

    def __call__(self, step: int) -> float:
        return max(self.least, self.most / (1 + step))


class _Lift(torch.autograd.Function):
    """x, which now asks for a gradient on behalf of a parameter that gets none: so a backward pass comes by here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, unit: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


class _MeanAndRoot(torch.autograd.Function):
    """(G, r) ↦ m = Sr and a lower R with RRᵀ = S = (I + G)⁻¹, unbatched; the way back in three products.

    dR = −R tril½(RᵀdG R), so Ḡ = −½R(B + Bᵀ)Rᵀ − ½(Sa mᵀ + m (Sa)ᵀ) with B the lower triangle of RᵀR̄, its diagonal
    halved, and a the gradient by m; r̄ = Sa. (Autograd goes back through a Cholesky factor and an inverse.)
    """

    @staticmethod
    def forward(gram: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        root = root_of_inverse(gram)
        return root @ (root.mT @ pull), root

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_loc: Tensor, by_root: Tensor) -> tuple[Tensor, Tensor]:
        loc, root = ctx.saved_tensors
        by_pull = root @ (root.mT @ by_loc)
        inner = (root.mT @ by_root).tril_()
        inner.diagonal().mul_(0.5)
        both = (root @ (inner + inner.mT)) @ root.mT
        outer = torch.outer(by_pull, loc)
        return -0.5 * (both + outer + outer.mT), by_pull

    @staticmethod
    def vmap(info: Any, in_dims: Any, gram: Tensor, pull: Tensor) -> Any:
        raise ValueError("q(w) in natural parameters does not depend on quadrature nodes")


@dataclass
class Heard:
    """What one forward pass gave, and what a backward pass through it says; a later one of the same takes its place.

    :param base: what the step starts from, of the module's own making.
    :param unit: the module's parameter that gets no gradient.
    :param weights: c, the gradients of the objective by the divergence.
    :param inner: those whose divergence is in the draws' gradients already.
    :param rows: of each call of moments its features, and the gradients by_mean and by_change.
    :param draws: of each draw w − m and the gradient by w, ``(..., M)``.
    """

    base: Any
    unit: Tensor
    weights: dict[int, Tensor] = field(default_factory=dict)
    inner: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    draws: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def weight(self, batch_shape: torch.Size) -> Tensor:
        """c, of the batch's shape."""
        return _summed([*self.weights.values(), *self.inner.values()], batch_shape)

    def weight_inside(self, batch_shape: torch.Size) -> Optional[Tensor]:
        """The part of c whose divergence is in the draws' gradients already."""
        return _summed(list(self.inner.values()), batch_shape) if self.inner else None


def _summed(parts: Sequence[Tensor], batch_shape: torch.Size) -> Tensor:
    total = torch.zeros(batch_shape, dtype=parts[0].dtype, device=parts[0].device)
    for part in parts:
        total = total + (part.sum_to_size(batch_shape) if part.dim() > len(batch_shape) else part)
    return total


class StepsOnBackward(Coefficients):
    """Coefficients that take a step when a backward pass through them has brought the gradients of minus a bound.

    The step is taken when q is asked for next, or the state: one for each forward pass whose objective held the
    divergence and was differentiated. Others, such as a prediction's or one without gradients, leave the state alone. For
    an optimiser that evaluates its objective several times a step, each of them is a step of q's.

    :param rate: ρ, a number in (0, 1], or a function of the number of steps taken.
    """

    steps: Tensor

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rate: Rate) -> None:
        super().__init__(sizes, batch_shape, like)
        self.sizes, self.batch_shape, self.rate = tuple(sizes), torch.Size(batch_shape), rate
        self.unit: Any
        self.unit = PyroParam(like.new_zeros(()))  # stays 0: q depends on a parameter, which objectives look for
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=like.device))
        self._count: Optional[int] = 0  # of steps, as a number here; None if it is to be read
        self._heard: dict[int, Heard] = {}

    def note(self, heard: Heard) -> None:
        """Have a step taken for a pass that was differentiated."""
        self._heard[id(heard)] = heard

    def next_rate(self) -> float:
        """ρ of the next step."""
        if self._count is None:
            self._count = int(self.steps)
        return float(self.rate(self._count)) if callable(self.rate) else float(self.rate)

    def settle(self) -> None:
        """Take the steps that are due."""
        if not self._heard:
            return
        passes = [heard for heard in self._heard.values() if heard.weights or heard.inner]
        self._heard = {}
        if not passes:
            return
        with torch.inference_mode(False), torch.no_grad():
            rate = self.next_rate()
            weights = [heard.weight(self.batch_shape) for heard in passes]
            total = sum(weights[1:], weights[0])
            for heard, weight in zip(passes, weights):
                self.step(heard, weight, total, rate, len(passes) > 1)
            self.steps = self.steps + 1
            assert self._count is not None
            self._count += 1

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        """One step, ρ/total·(what was heard − weight·what is there).

        :param again: whether others of the same backward pass have been taken since the forward pass.
        """
        raise NotImplementedError

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._heard, self._count = {}, None
        for name, buffer in list(self.named_buffers(recurse=False)):
            key = prefix + name
            if key in state_dict and buffer.shape != state_dict[key].shape:
                setattr(self, name, buffer.new_zeros(state_dict[key].shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return super().__getstate__()


class Listening(Product):
    """A :class:`Product` that notes the gradients by the marginals that it gives, by its draws and by its divergence.

    :param heard: where.
    :param module: who is told.
    """

    def __init__(self, q: Product, heard: Heard, module: StepsOnBackward) -> None:
        super().__init__(q.sizes, q.factors, q.groups)
        self.heard, self.module = heard, module

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        mean, change = super().moments(features)
        listen(self.module, self.heard, features, mean, change)
        return mean, change

    def kl(self) -> Tensor:
        return super().kl() + weighed(self.module, self.heard, self.batch_shape)

    def log_ratio(self, w: Sequence[Tensor]) -> Tensor:
        found = super().log_ratio(w)
        return found + weighed(self.module, self.heard, found.shape, inner=True)

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        w = side_by_side(super().rsample(shape)).clone()
        centred = (w - side_by_side(self.loc)).detach()

        def hear(grad: Optional[Tensor]) -> None:
            if grad is not None:
                self.heard.draws[id(centred)] = centred, grad.detach()
                self.module.note(self.heard)

        if w.requires_grad:
            w.register_hook(hear)
        return list(w.split(self.sizes, -1))


def listen(module: StepsOnBackward, heard: Heard, features: Sequence[Tensor], mean: Tensor, change: Tensor) -> None:
    """Note the gradients by Φm and diag(Φ(S − I)Φᵀ)."""
    row: dict[str, Any] = {"features": [phi.detach() for phi in features]}

    def hear(name: str, grad: Optional[Tensor]) -> None:
        if grad is None:
            return
        row[name] = grad.detach()
        heard.rows[id(row)] = row
        module.note(heard)

    for name, value in (("by_mean", mean), ("by_change", change)):
        if value.requires_grad:
            value.register_hook(partial(hear, name))


def weighed(module: StepsOnBackward, heard: Heard, shape: torch.Size, inner: bool = False) -> Tensor:
    """0, by which the objective's gradient is the weight of what it is added to."""
    zero = _Lift.apply(torch.zeros_like(heard.unit).expand(shape), heard.unit)
    place = heard.inner if inner else heard.weights
    key = id(zero)

    def hear(grad: Optional[Tensor]) -> None:
        if grad is not None:
            place[key] = grad.detach()
            module.note(heard)

    if zero.requires_grad:
        zero.register_hook(hear)
    return zero


@dataclass
class _Base:
    gram: Tensor
    pull: Tensor
    seat: Optional[Tensor]
    loc: Tensor


class NaturalGaussian(StepsOnBackward):
    """q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw), or its best approximation by independent groups of blocks, by natural steps.

    G, ``(..., M, M)``, and r, ``(..., M)``, are sums over the data (sites), and buffers: no optimiser sees them, gradients
    of hyperparameters pass through q. When these move, w = Vᵀ... sites keep their meaning about v = (L + ηsI)w, with s the
    root mean variance of u = Lw: about u where u is well conditioned, about w where it is not. η = 0 is u alone.

    Three guards keep a step where its quadratic model holds. If it would leave less than half of the precision anywhere,
    for which it takes likelihoods that are not log-concave, or draws, negative curvatures are cut to 0. The mean moves no
    function value by more than three standard deviations of the prior: counts of 1,000 under an exponential link would
    else be jumped to at e¹⁰⁰⁰. Gradients that are not finite change nothing.

    :param kind: the free posterior with the same layout of factors. These share the whole of G: their means are solved for
        together (a step with each one's own mean diverges where they are coupled).
    :param rate: as in :class:`StepsOnBackward`.
    :param softness: η.
    """

    anchored: ClassVar[bool] = True
    gram: Tensor
    pull: Tensor
    seat: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        batch_shape: Sequence[int],
        like: Tensor,
        kind: Any = FullCholesky,
        rate: Rate = Falling(),
        softness: float = 0.03,
    ) -> None:
        super().__init__(sizes, batch_shape, like, rate)
        self.softness = softness
        self.layout = [(factor, tuple(group)) for factor, group in kind.layout(len(self.sizes))]
        num = sum(self.sizes)
        self.register_buffer("gram", like.new_zeros(*batch_shape, num, num))
        self.register_buffer("pull", like.new_zeros(*batch_shape, num))
        self.register_buffer("seat", like.new_zeros(0, 0))  # L + ηsI that gram and pull belong to

    def start(self, anchor: Optional[Tensor], features: Optional[Sequence[Tensor]]) -> None:
        if features is None:
            return
        phi = side_by_side(features)
        self.gram = (phi.mT @ phi).to(self.gram).expand(self.gram.shape).clone()
        if anchor is not None:
            self.seat = self._seat(anchor.detach())

    def _seat(self, anchor: Tensor) -> Tensor:
        """L + ηsI, s² the mean of diag(LLᵀ)."""
        if not self.softness:
            return anchor
        size = anchor.shape[-1]
        scale = (anchor.square().sum((-2, -1)) / size).sqrt()
        eye = torch.eye(size, dtype=anchor.dtype, device=anchor.device)
        return anchor + (self.softness * scale)[..., None, None] * eye

    def _seen_from(self, seat: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """G and r of the same sites under another L."""
        if seat is None or not self.seat.numel():
            return self.gram, self.pull
        turn = solve_lower(self.seat, seat)  # w there is this times w here
        gram = turn.mT @ self.gram @ turn
        return gram, (turn.mT @ self.pull[..., None])[..., 0]

    def forward(self, anchor: Optional[Tensor] = None) -> Product:
        self.settle()
        unit = self.unit
        seat = None if anchor is None else self._seat(anchor)
        gram, pull = self._seen_from(seat)
        base = gram.detach(), pull.detach(), None if seat is None else seat.detach()
        gram = _Lift.apply(gram, unit)
        q = self._gaussian(gram, pull)
        if not torch.is_grad_enabled():
            return q
        return Listening(q, Heard(_Base(*base, side_by_side(q.loc).detach()), unit), self)

    def _gaussian(self, gram: Tensor, pull: Tensor) -> Product:
        if len(self.layout) == 1 and gram.dim() == 2 and pull.dim() == 1:
            return Product(self.sizes, [DenseFactor(*_MeanAndRoot.apply(gram, pull))], [self.layout[0][1]])
        q = from_natural(gram, pull, self.sizes, [group for _, group in self.layout])
        for i, (kind, _) in enumerate(self.layout):
            if kind is IdentityFactor:
                q.factors[i] = IdentityFactor(q.factors[i].loc)
        return q

    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        base: _Base = heard.base
        here = self._seen_from(base.seat) if again else (base.gram, base.pull)
        target, slope, cut = self._sums(heard, base)
        c, each = weight, rate / total
        eye = torch.eye(target.shape[-1], dtype=target.dtype, device=target.device)

        def moved(target: Tensor) -> Tensor:
            new = here[0] + each[..., None, None] * (target - c[..., None, None] * base.gram)
            return 0.5 * (new + new.mT)

        new = moved(target)
        if cut is not None:
            # What is left above half of the prior's precision, and above half of the precision there is.
            rest = new + 0.5 * eye, new + 0.5 * (eye - here[0])
            short = sum(torch.linalg.cholesky_ex(part.nan_to_num()).info.abs() for part in rest)
            target = torch.where((short > 0)[..., None, None], target + cut, target)
            new = moved(target)
        pull = (target @ base.loc[..., None])[..., 0] - slope
        pull = here[1] + each[..., None] * (pull - c[..., None] * base.pull)
        factor, info = torch.linalg.cholesky_ex(new.nan_to_num() + eye)
        shift = self._cautious(torch.cholesky_solve(pull[..., None], factor)[..., 0] - base.loc, heard)
        pull = ((new + eye) @ (base.loc + shift)[..., None])[..., 0]
        fine = new.isfinite().all(-1).all(-1) & pull.isfinite().all(-1) & (each > 0) & (info == 0)
        self.gram = torch.where(fine[..., None, None], new, here[0]).expand(self.gram.shape)
        self.pull = torch.where(fine[..., None], pull, here[1]).expand(self.pull.shape)
        if base.seat is not None:
            self.seat = base.seat

    def _cautious(self, shift: Tensor, heard: Heard) -> Tensor:
        """A step of m, shortened where it would move function values by more than three of the prior's deviations."""
        for row in heard.rows.values():
            phi = side_by_side(row["features"])
            moved = (phi @ shift[..., None])[..., 0].abs()
            most = (moved / phi.square().sum(-1).sqrt().clamp(min=torch.finfo(phi.dtype).tiny)).amax(-1, keepdim=True)
            shift = shift * (_FARTHEST / most.clamp(min=_FARTHEST))
        return shift

    def _sums(self, heard: Heard, base: _Base) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Φᵀ2HΦ and Φᵀg, both with what draws say; what is to be added to the first to cut negative curvatures."""
        gram, slope = torch.zeros_like(base.gram), torch.zeros_like(base.loc)
        cut: Optional[Tensor] = None
        for row in heard.rows.values():
            phi = side_by_side(row["features"])
            if "by_mean" in row:
                slope = slope + (phi.mT @ row["by_mean"][..., None])[..., 0]
            if "by_change" in row:
                curvature = 2 * row["by_change"]
                gram = gram + phi.mT @ (phi * curvature[..., None])
                if (curvature < 0).any():
                    more = phi.mT @ (phi * (-curvature).clamp(min=0)[..., None])
                    cut = more if cut is None else cut + more
        for centred, grad in heard.draws.values():
            # E ∇²f = E ∇f(w)(w − m)ᵀP (Stein's identity; Lin, Khan and Schmidt, 2019).
            whole = base.gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            one = grad[..., None] * self._precision_times(whole, centred)[..., None, :]
            lead = tuple(range(one.dim() - gram.dim()))
            one = one.sum(lead) if lead else one
            one = 0.5 * (one + one.mT)
            gram, slope = gram + one, slope + (grad.sum(lead) if lead else grad)
            worst = torch.linalg.eigh(one.nan_to_num())
            more = (worst.eigenvectors * (-worst.eigenvalues).clamp(min=0)[..., None, :]) @ worst.eigenvectors.mT
            cut = more if cut is None else cut + more
        inside = heard.weight_inside(self.batch_shape)
        if inside is not None:  # the divergence's own, of which the step knows
            gram, slope = gram + inside[..., None, None] * base.gram, slope - inside[..., None] * base.loc
        return gram, slope, cut

    def _precision_times(self, whole: Tensor, v: Tensor) -> Tensor:
        """S⁻¹v, of independent groups each with its own block."""
        edges = list(itertools.accumulate(self.sizes, initial=0))
        parts = []
        for kind, group in self.layout:
            own = slice(edges[group[0]], edges[group[-1] + 1])
            block = v[..., own]
            parts.append(block if kind is IdentityFactor else (whole[..., own, own] @ block[..., None])[..., 0])
        return torch.cat(parts, -1)
