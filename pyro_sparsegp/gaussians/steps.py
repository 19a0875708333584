"""Coefficients that take natural steps: what a forward pass gives notes the gradients that a backward pass brings.

A pass of the guide hands out a Gaussian whose marginals Φm and diag(ΦSΦᵀ), draws and divergence carry hooks. What these
hear of a differentiated objective is all that a natural step needs, so that no second run of the model is made and any
objective that holds the divergence will do.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any, Optional, Self, Union

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..numerics.functions import Function
from ..numerics.linalg import side_by_side
from ..numerics.processes import due, joined, largest, total_share
from .base import Coefficients, Gaussian

__all__ = [
    "DEFAULT_RATE",
    "KNOWN",
    "AscentError",
    "Falling",
    "Heard",
    "Lift",
    "Listening",
    "Rate",
    "StepsOnBackward",
    "cautious",
    "listen",
    "read_with_signs",
    "rows_heard",
    "running",
    "shares_of",
    "softened",
    "steppers",
]

KNOWN = 9  # steps that a start with a known mean counts for
_BY_MARGINALS = 0.1  # the largest rate where marginals are drawn from: at 1 a first draw throws an inner layer away
_FARTHEST = 3.0  # standard deviations of the prior; Newton's step for an exponential overshoots by itself
_CLOSER = 6  # times as close where negative curvatures are cut, half a deviation

Rate = Union[float, Callable[[int], float]]


@dataclass(frozen=True)
class Falling:
    """The rate of step t = 0, 1, …: ρ = max(least, most/(1 + t)), an average over all steps, then the last 1/least.

    :param least: the floor, in (0, 1].
    :param most: of the first step, in (0, 1].
    :param whole: the floor of steps on all rows, in [0, 1], where it is the larger one: what is averaged over is no
        batch's noise there, but hyperparameters of before.
    """

    least: float = 0.1
    most: float = 1.0
    whole: float = 0.0

    def __call__(self, step: int) -> float:
        return max(self.least, self.most / (1 + step))


DEFAULT_RATE = Falling(whole=0.25)


class Lift(Function):
    """x, which now asks for a gradient on behalf of a parameter that gets none: so a backward pass comes by here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, unit: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, change: Tensor, _: Any) -> Tensor:
        return change.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


@dataclass
class Heard:
    """What one forward pass gave, and what a backward pass through it says; a later one of the same takes its place.

    :param base: what the step starts from, of the module's own making.
    :param unit: the module's parameter that gets no gradient.
    :param weights: c, the gradients of the objective by the divergence.
    :param inner: those whose divergence is in the draws' gradients already.
    :param rows: of each call of moments its features, and the gradients by_mean and by_change; and by_loc, Φᵀg, and
        by_covariance, ΦᵀHΦ, where these are made in any case; and signed, whether a curvature is negative, once that
        has been looked at.
    :param crosses: of pairs of them the keys, the features of both, and the gradient by their covariances.
    :param draws: of each draw w − m and the gradient by w, ``(..., M)``.
    :param by_draws: whether marginals were drawn from, so that gradients by variances are those of single draws.
    :param share: of all rows, those that the pass was on, as plates tell.
    :param mirrors: whether the pass was at the mirror image of the draw before, all else the same.
    :param image: what the next pass says, if it was at the mirror image of this one's draw.
    """

    base: Any
    unit: Tensor
    weights: dict[int, Tensor] = field(default_factory=dict)
    inner: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    crosses: dict[int, dict[str, Any]] = field(default_factory=dict)
    draws: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    by_draws: bool = False
    share: float = 0.0
    mirrors: bool = False
    image: Optional[Heard] = None
    number: int = field(default_factory=itertools.count().__next__)  # of the forward pass

    def __post_init__(self) -> None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise ValueError(
                "q of a guide's GP site learns by natural steps, which torch.jit does not trace: q would never "
                "move. Take TraceQuadrature_ELBO, or give the family natural=False."
            )

    def whole(self, row: dict[str, Any], order: Optional[Sequence[int]] = None) -> Tensor:
        """A row's Φ, all blocks side by side, in their own or another order: made once."""
        if "whole" not in row:
            features = row["features"] if order is None else [row["features"][b] for b in order]
            row["whole"] = side_by_side(features) if len(features) > 1 else features[0]
        return row["whole"]

    def weight(self, batch_shape: torch.Size) -> Tensor:
        """c, of the batch's shape."""
        own = _summed([*self.weights.values(), *self.inner.values()], batch_shape)
        return own if self.image is None else own + self.image.weight(batch_shape)

    def curved(self) -> list[dict[str, Any]]:
        """The rows with gradients by variances, and whether curvatures are signed. Those of functions that have
        covariances too, φ₁, …, φ_K with the gradients H, K × K, are turned to the axes of H, Σ_j e_jφ_j with the
        eigenvalues: a curvature that is positive stays so.
        """
        alone = {}
        for key, row in self.rows.items():
            if "by_change" in row:
                alone[key] = row
        turned: list[dict[str, Any]] = []
        for group in _connected([cross["keys"] for cross in self.crosses.values()]) if self.crosses else ():
            own = [cross for cross in self.crosses.values() if cross["keys"][0] in group]
            features = {key: phi for cross in own for key, phi in zip(cross["keys"], cross["features"])}
            keys = list(features)
            size = own[0]["by_change"]
            hessian = size.new_zeros(*size.shape, len(keys), len(keys))
            for i, key in enumerate(keys):
                if key in alone:
                    hessian[..., i, i] = alone.pop(key)["by_change"]
            for cross in own:
                i, j = (keys.index(key) for key in cross["keys"])
                hessian[..., i, j] = hessian[..., j, i] = 0.5 * cross["by_change"]
            values, axes = torch.linalg.eigh(hessian.nan_to_num())
            for k in range(len(keys)):
                parts = [[axes[..., i, k, None] * phi for phi in features[key]] for i, key in enumerate(keys)]
                turned.append({"features": [sum(blocks) for blocks in zip(*parts)], "by_change": values[..., k]})
        curved = [*alone.values(), *turned]
        read_with_signs([], curved)
        return curved

    def weight_inside(self, batch_shape: torch.Size) -> Optional[Tensor]:
        """The part of c whose divergence is in the draws' gradients already."""
        return _summed(list(self.inner.values()), batch_shape) if self.inner else None


def _whole(heard: list[Heard]) -> list[Heard]:
    """The passes that hold a divergence, with what was heard of those just before, of the same q, that do not: a layer
    below a family on sites is drawn in one run of the guide and held in the next, which has the divergence. One at the
    mirror image of the draw before goes with that.
    """
    whole: list[Heard] = []
    for one in sorted(heard, key=attrgetter("number"), reverse=True):
        if one.weights or one.inner:
            if whole and whole[0].mirrors and not one.mirrors:
                one.image = whole.pop(0)
            whole.insert(0, one)
        elif whole:
            whole[0].rows.update(one.rows)
            whole[0].crosses.update(one.crosses)
            whole[0].draws.update(one.draws)
            whole[0].by_draws |= one.by_draws
    return whole


def rows_heard(guide: torch.nn.Module) -> list[dict[str, Any]]:
    """The rows of all passes for which a guide's posteriors are to take a step."""
    rows: list[dict[str, Any]] = []
    for module in guide.modules():
        if isinstance(module, StepsOnBackward):
            for heard in module._heard.values():
                rows.extend(heard.rows.values())
    return rows


def read_with_signs(numbers: list[Tensor], rows: Iterable[dict[str, Any]]) -> list[float]:
    """Some numbers, ``()`` each, read at one look with the signs of rows' curvatures that are not known yet."""
    unknown, signs = [], []
    for row in rows:
        if "by_change" in row and "signed" not in row:
            unknown.append(row)
            signs.append((row["by_change"] < 0).any())
    if not (numbers or signs):
        return []
    found: list[float] = torch.stack([*numbers, *signs]).tolist()
    for row, signed in zip(unknown, found[len(numbers) :]):
        row["signed"] = bool(signed)
    return found[: len(numbers)]


def _connected(pairs: Sequence[tuple[int, int]]) -> list[set[int]]:
    """Keys that pairs connect, together."""
    groups: list[set[int]] = []
    for pair in pairs:
        met = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in met] + [set(pair).union(*met)]
    return groups


def _summed(parts: Sequence[Tensor], batch_shape: torch.Size) -> Tensor:
    total: Any = 0
    for part in parts:
        total = total + (part.sum_to_size(batch_shape) if part.dim() > len(batch_shape) else part)
    return total.expand(batch_shape)


class AscentError(ValueError):
    """An objective goes up where natural steps go down."""


class StepsOnBackward(Coefficients):
    """Coefficients that take a step when a backward pass through them has brought the gradients of minus a bound.

    The step is taken when q is asked for next, or the state: one for each backward pass of an objective that holds the
    divergence; passes before it, such as particles, are averaged. Others, such as a prediction's or one without
    gradients, leave the state alone. An optimiser that evaluates its objective several times a step, such as L-BFGS,
    wants a function that stays the same; here each evaluation moves q. With a rate of 1 and a Gaussian likelihood on
    all rows q is at the optimum given the hyperparameters of the evaluation before, so that the second of two at the
    same ones is that function; other rates are refused there.

    :param rate: ρ, a number in (0, 1], or a function of the number of steps taken.
    """

    steps: Tensor
    _is_of_a_loss = False  # as the first step has shown: a look at numbers

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rate: Rate) -> None:
        super().__init__(sizes, batch_shape, like)
        self.sizes, self.batch_shape, self.rate = tuple(sizes), torch.Size(batch_shape), rate
        self.unit: Any
        self.unit = PyroParam(like.new_zeros(()))  # stays 0: q depends on a parameter, which objectives look for
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=like.device))
        self.share = 1.0  # of its rate that a step takes, for a loop whose rates fall
        self._count: Optional[int] = 0  # of steps, as a number here; None if it is to be read
        self._heard: dict[int, Heard] = {}

    def note(self, heard: Heard) -> None:
        """Have a step taken for a pass that was differentiated."""
        if id(heard) not in self._heard:
            self._heard[id(heard)] = heard
            due(self, self.settle)  # by several processes at once

    @property
    def steps_taken(self) -> int:
        """How many steps have been taken."""
        if self._count is None:
            self._count = int(self.steps)
        return self._count

    def noted(self) -> list[Heard]:
        """What is noted, which is now another's to :meth:`note`: no step is taken for it here."""
        noted, self._heard = list(self._heard.values()), {}
        return noted

    def pulls(self) -> Iterator[Tensor]:
        """The gradients by means, variances and draws in what is noted: all are 0 where no data depend on q."""
        for heard in self._heard.values():
            for row in heard.rows.values():
                yield from (row[name] for name in ("by_mean", "by_change") if name in row)
            yield from (grad for _, grad in heard.draws.values())

    def next_rate(self, share: float = 0.0) -> float:
        """ρ of the next step.

        :param share: of all rows, those that it is on here.
        """
        rate = float(self.rate(self.steps_taken) if callable(self.rate) else self.rate)
        if isinstance(self.rate, Falling) and rate < self.rate.whole and total_share(share, self.unit) > 0.999:
            rate = self.rate.whole
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be in [0, 1], of step {self.steps_taken} it gives {rate}")
        return rate * self.share

    def most_by_draws(self) -> float:
        """The largest ρ where curvatures are those of single draws, whose noise has to be averaged out."""
        return max(0.02, 1 / (10 + self.steps_taken / 8))

    def skip(self, num: int) -> None:
        """Go on at the rate of a step so many later."""
        self.steps = self.steps + num
        self._count = None

    def restart(self) -> None:
        """Count steps from here on, those that are due taken."""
        self.settle()
        self.steps = torch.zeros_like(self.steps)
        self._count = 0

    def settle(self) -> None:
        """Take the steps that are due.

        :raises ValueError: within a step of L-BFGS, unless the rate is 1; if the first is of plus the bound.
        """
        if not self._heard:
            return
        share = 1.0
        for heard in self._heard.values():
            share = min(share, heard.share)
        rate = self.next_rate(share)  # which may be refused: what was heard stays
        if (callable(self.rate) or rate != 1) and running(_LBFGS):
            raise ValueError(
                "torch.optim.LBFGS evaluates its objective several times a step, and after each q of a guide's GP "
                "site takes a natural step of its own, so that no two are of one function. Give the family "
                "natural=False; or rate=1.0, a line search, and a closure that evaluates the loss and its gradients "
                "twice, on all rows (five times where the likelihood is not Gaussian)."
            )
        passes = _whole(list(self._heard.values()))
        self._heard = {}
        if not passes:
            return
        with torch.inference_mode(False), torch.no_grad():
            for heard in passes:
                if heard.draws:
                    rate = min(rate, self.most_by_draws())
                elif heard.by_draws:
                    rate = min(rate, _BY_MARGINALS)
            weights = joined(*[heard.weight(self.batch_shape) for heard in passes])
            total = sum(weights[1:], weights[0])
            if not self._is_of_a_loss and bool((total < 0).any()):
                raise AscentError(
                    "the objective holds minus the divergence of a GP site's q, as the bound does: natural steps are "
                    "those of minus the bound, a loss. Differentiate that, TraceQuadrature_ELBO()(model, guide), with "
                    "an optimiser that minimises, no maximize=True; or give the family natural=False."
                )
            self._is_of_a_loss = True
            for heard, weight in zip(passes, weights):
                self.step(heard, weight, total, rate, len(passes) > 1)
            self._buffers["steps"] = self.steps + 1  # by the way round a Pyro module's attributes
            assert self._count is not None
            self._count += 1

    @abstractmethod
    def step(self, heard: Heard, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        """One step, ρ/total·(what was heard − weight·what is there), with the sums over rows of all processes joined.

        :param again: whether others of the same backward pass have been taken since the forward pass.
        """

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


_LBFGS = [inspect.unwrap(torch.optim.LBFGS.step).__code__]


def running(codes: Iterable[CodeType]) -> Optional[CodeType]:
    """The one of some functions' codes that calls this, the innermost; ``None`` if none does."""
    known = set(map(id, codes))  # two are compared, and hashed, instruction by instruction
    frame = inspect.currentframe()
    while frame is not None:
        if id(frame.f_code) in known:
            return frame.f_code
        frame = frame.f_back
    return None


def steppers(guide: torch.nn.Module) -> list[StepsOnBackward]:
    """The posteriors of a guide that take natural steps."""
    return [module for module in guide.modules() if isinstance(module, StepsOnBackward)]


class Listening(Gaussian):
    """A Gaussian that notes the gradients by the marginals that it gives, by its draws and by its divergence.

    Its methods are put before those of a class of Gaussians, whose they call.
    """

    heard: Heard
    module: StepsOnBackward

    def heard_by(self, module: StepsOnBackward, heard: Heard) -> Self:
        """This Gaussian, with gradients noted in ``heard`` and told to ``module``."""
        self.module, self.heard = module, heard
        return self

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        mean, change = super().moments(features)
        self.key = listen(self.module, self.heard, features, mean, change)
        return mean, change

    def note_draws(self) -> None:
        self.heard.by_draws = True

    def cross_change(
        self, features: Sequence[Tensor], others: Sequence[Tensor], keys: tuple[Optional[int], Optional[int]]
    ) -> Tensor:
        value = super().cross_change(features, others, keys)
        cross = {"keys": keys, "features": [[phi.detach() for phi in parts] for parts in (features, others)]}

        def hear(grad: Optional[Tensor]) -> None:
            if grad is not None:
                self.heard.crosses[id(cross)] = cross | {"by_change": grad.detach()}
                self.module.note(self.heard)

        if value.requires_grad:
            value.register_hook(hear)
        return value

    def kl(self) -> Tensor:
        return super().kl() + weighed(self.module, self.heard, self.batch_shape)  # type: ignore[safe-super]

    def log_ratio(self, w: Sequence[Tensor]) -> Tensor:
        found = super().log_ratio(w)  # type: ignore[safe-super]
        return found + weighed(self.module, self.heard, found.shape, inner=True)

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        w = side_by_side(super().rsample(shape)).clone()  # type: ignore[safe-super]
        centred = (w - side_by_side(self.loc)).detach()

        def hear(grad: Optional[Tensor]) -> None:
            if grad is not None:
                self.heard.draws[id(centred)] = centred, grad.detach()
                self.module.note(self.heard)

        if w.requires_grad:
            w.register_hook(hear)
        return list(w.split(self.sizes, -1))


def listen(
    module: StepsOnBackward,
    heard: Heard,
    features: Sequence[Tensor],
    mean: Tensor,
    change: Tensor,
    covariance: Optional[Tensor] = None,
    whole: Optional[Tensor] = None,
    sums: Optional[dict[str, Tensor]] = None,
) -> int:
    """Note the gradients by Φm and diag(Φ(S − I)Φᵀ), and by S, if this S is of these alone; their key among what is
    heard.

    :param whole: Φ of all blocks side by side, if it is there.
    :param sums: to which the way back adds sums over these rows.
    """
    row: dict[str, Any] = {} if sums is None else sums
    if whole is None:
        row["features"] = [phi.detach() for phi in features]
    else:
        row["whole"] = whole.detach()

    def hear(name: str, grad: Optional[Tensor]) -> None:
        if grad is None:
            return
        row[name] = grad.detach()
        row.pop("signed", None)  # of a pass before through the same graph
        heard.rows[id(row)] = row
        module.note(heard)

    if covariance is not None and covariance.requires_grad:
        covariance.register_hook(lambda grad: row.update(by_covariance=grad.detach()))
    for name, value in (("by_mean", mean), ("by_change", change)):
        if value.requires_grad:
            value.register_hook(partial(hear, name))
    return id(row)


def weighed(module: StepsOnBackward, heard: Heard, shape: torch.Size, inner: bool = False) -> Tensor:
    """0, by which the objective's gradient is the weight of what it is added to."""
    zero = Lift.apply(torch.zeros_like(heard.unit).expand(shape), heard.unit)
    place = heard.inner if inner else heard.weights
    key = id(zero)

    def hear(grad: Optional[Tensor]) -> None:
        if grad is not None:
            place[key] = grad.detach()
            module.note(heard)

    if zero.requires_grad:
        zero.register_hook(hear)
    return zero


def softened(anchor: Tensor, softness: float, shares: Optional[Tensor] = None) -> Tensor:
    """L + ηsI, s² the mean of diag(LLᵀ), by rows, as a state is read: in another order products round otherwise.

    :param shares: of :func:`shares_of`: s² is the mean of each block on the diagonal, whose units may be far apart.
    """
    if not softness:
        return anchor.contiguous()
    if shares is None:
        return _Softened.apply(anchor, softness)
    return _SoftenedByBlock.apply(anchor, softness, shares.to(anchor))


def shares_of(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Columns of norm 1, ``(ΣM, C)``, each the same number at one block's coefficients."""
    return torch.block_diag(*[like.new_full((num, 1), num**-0.5) for num in sizes])


class _Softened(Function):
    # One node, and one matrix either way.

    generate_vmap_rule = True

    @staticmethod
    def forward(anchor: Tensor, softness: float) -> Tensor:
        scale = torch.linalg.vector_norm(anchor, dim=(-2, -1)) * (softness / anchor.shape[-1] ** 0.5)
        total = anchor.clone(memory_format=torch.contiguous_format)
        total.diagonal(dim1=-2, dim2=-1).add_(scale[..., None])
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        anchor, ctx.softness = inputs
        ctx.save_for_backward(anchor)
        ctx.save_for_forward(anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (anchor,) = ctx.saved_tensors
        norm = torch.linalg.vector_norm(anchor, dim=(-2, -1)) * (anchor.shape[-1] ** 0.5 / ctx.softness)
        return torch.addcmul(grad, anchor, (grad.diagonal(dim1=-2, dim2=-1).sum(-1) / norm)[..., None, None]), None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, _: Any) -> Tensor:
        (anchor,) = ctx.saved_tensors
        norm = torch.linalg.vector_norm(anchor, dim=(-2, -1)) * (anchor.shape[-1] ** 0.5 / ctx.softness)
        scale = (anchor * change).sum((-2, -1)) / norm
        eye = torch.eye(anchor.shape[-1], dtype=anchor.dtype, device=anchor.device)
        return change + scale[..., None, None] * eye


class _SoftenedByBlock(Function):
    # As _Softened, with the mean of each block.

    generate_vmap_rule = True

    @staticmethod
    def forward(anchor: Tensor, softness: float, shares: Tensor) -> Tensor:
        total = anchor.clone(memory_format=torch.contiguous_format)
        total.diagonal(dim1=-2, dim2=-1).add_(_sizes(anchor, shares), alpha=softness)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        anchor, ctx.softness, shares = inputs
        ctx.save_for_backward(anchor, shares)
        ctx.save_for_forward(anchor, shares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        anchor, shares = ctx.saved_tensors
        each = (grad.diagonal(dim1=-2, dim2=-1) / _sizes(anchor, shares)) @ shares @ (ctx.softness * shares).mT
        return torch.addcmul(grad, anchor, each[..., None]), None, None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *_: Any) -> Tensor:
        anchor, shares = ctx.saved_tensors
        each = (anchor * change).sum(-1) @ shares @ (ctx.softness * shares).mT / _sizes(anchor, shares)
        eye = torch.eye(anchor.shape[-1], dtype=anchor.dtype, device=anchor.device)
        return change + each[..., None] * eye


def _sizes(anchor: Tensor, shares: Tensor) -> Tensor:
    """s of each coefficient's block, ``(..., M)``."""
    return (torch.linalg.vector_norm(anchor, dim=-1).square() @ shares @ shares.mT).sqrt()


def cautious(
    shift: Tensor, heard: Heard, order: Optional[Sequence[int]] = None, cut: Optional[Tensor] = None
) -> Tensor:
    """A step of m, ``(..., M)``, shortened where it would move function values by more than three of the prior's
    deviations, or half of one where negative curvatures are cut: a slope along them meets the prior's precision alone.

    :param order: of the blocks, where it is not their own.
    :param cut: whether they are, ``(...)``; ``None`` is nowhere. Asked for where several functions of this posterior
        meet in densities, such as a mean and its log-noise.
    """
    farthest = []
    for row in heard.rows.values():
        phi = row["whole"] if "whole" in row else heard.whole(row, order)
        moved = (phi @ shift[..., None])[..., 0].abs_()
        by = torch.linalg.vector_norm(phi, dim=-1).clamp_(min=torch.finfo(phi.dtype).tiny)
        farthest.append((moved / by).amax(-1, keepdim=True))
    if heard.draws:  # whose inputs are not known
        farthest.append(shift.abs().amax(-1, keepdim=True))
    most = functools.reduce(torch.maximum, farthest) if farthest else torch.zeros_like(shift[..., :1])
    if cut is not None and heard.crosses:
        most = torch.where(cut[..., None], _CLOSER * most, most)
    return shift * (_FARTHEST / largest(most.clamp(min=_FARTHEST)))
