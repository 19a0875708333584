"""Natural steps of Gaussians over coefficients: what an objective's gradients say of them, and when they are taken.

An objective evaluates a loss within :func:`recording`, goes back through it once, and calls :meth:`Record.step`. What
Gaussians gave during the evaluation (marginals, draws, divergences) is kept as tensors of its graph, whose gradients
autograd retains: they are all that a natural step needs. Outside of that nothing is recorded and nothing moves:
Gaussians are plain functions of their parameters, which any optimiser may train.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Self, Union

import torch
from torch import Tensor

from ..numerics.linalg import side_by_side
from ..numerics.processes import joined, largest, total_share
from .base import Coefficients, Gaussian

__all__ = [
    "DEFAULT_RATE",
    "KNOWN",
    "Curvature",
    "Falling",
    "Natural",
    "Pass",
    "Rate",
    "Record",
    "Recorded",
    "Row",
    "cautious",
    "recorded",
    "recording",
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


@dataclass(eq=False)
class Row:
    """Marginals at some inputs.

    :param phi: Φ of all blocks side by side, without its graph.
    :param mean: Φm.
    :param change: diag(Φ(S − I)Φᵀ).
    :param covariance: S, if it is one of these marginals' alone: its gradient is Φᵀ diag(h) Φ.
    """

    phi: Tensor
    mean: Tensor
    change: Tensor
    covariance: Optional[Tensor] = None
    is_signed: Optional[bool] = None  # whether a curvature is negative, once that has been looked at


class Curvature(NamedTuple):
    """h, ``(..., N)``, the gradient by variances of Φw, and Φᵀ diag(h) Φ if it is known."""

    phi: Tensor
    h: Tensor
    gram: Optional[Tensor]
    is_signed: bool


@dataclass(eq=False)
class Pass:
    """What one run of the guide took of one q(w).

    :param record: of the evaluation.
    :param base: what the step starts from, of the module's own making.
    :param divergences: tensors whose gradients add up to c, the objective's weight of KL[q ‖ p].
    :param crosses: two rows, and the covariances of their functions.
    :param draws: w − m, or what stands for it, and w, ``(..., M)``.
    :param by_draws: whether marginals were drawn from, so that gradients by variances are those of single draws.
    """

    record: Record
    base: Any
    divergences: list[Tensor] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    crosses: list[tuple[Row, Row, Tensor]] = field(default_factory=list)
    draws: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    by_draws: bool = False

    def keep(self, value: Tensor) -> Tensor:
        """A tensor whose gradient is retained; one without a graph gets a leaf, so that a backward pass comes by."""
        value = value if value.requires_grad else value + self.record.zero
        self.record.tensors.append(value)
        return value

    @property
    def is_weighed(self) -> bool:
        """Whether the objective holds the divergence."""
        return any(part.grad is not None for part in self.divergences)

    def weight(self, batch_shape: torch.Size) -> Tensor:
        """c, of the batch's shape."""
        return _summed(self.divergences, batch_shape)

    def gradients(self) -> Iterator[tuple[Row, Tensor]]:
        """The rows with their gradients by means."""
        return ((row, row.mean.grad) for row in self.rows if row.mean.grad is not None)

    def drawn(self) -> Iterator[tuple[Tensor, Tensor]]:
        """w − m of each draw and the gradient by w."""
        return ((centred, w.grad) for centred, w in self.draws if w.grad is not None)

    def curvatures(self) -> list[Curvature]:
        """The gradients by variances. Those of functions that have covariances too, φ₁, …, φ_K with the gradients H,
        K × K, are turned to the axes of H, Σ_j e_jφ_j with the eigenvalues: a curvature that is positive stays so.
        """
        groups = _connected([pair for *pair, value in self.crosses if value.grad is not None])
        met = {id(row) for group in groups for row in group}
        found = [_of_row(row) for row in self.rows if row.change.grad is not None and id(row) not in met]
        for group in groups:
            found += self._turned(group)
        return found

    def _turned(self, group: list[Row]) -> list[Curvature]:
        own = [(a, b, value.grad) for a, b, value in self.crosses if a in group and value.grad is not None]
        size = own[0][2]
        assert size is not None
        hessian = size.new_zeros(*size.shape, len(group), len(group))
        for i, row in enumerate(group):
            if row.change.grad is not None:
                hessian[..., i, i] = row.change.grad
        for a, b, grad in own:
            i, j = group.index(a), group.index(b)
            # the covariance of two values stands twice in S
            hessian[..., i, j] = hessian[..., j, i] = 0.5 * grad
        # H = EΛEᵀ: ΣΣ h_jkφ_jφ_kᵀ = Σ_j λ_j(Φe_j)(Φe_j)ᵀ
        values, axes = torch.linalg.eigh(hessian.nan_to_num())
        phis = torch.stack([row.phi for row in group], -1)  # (..., N, M, K)
        turned = (phis @ axes).unbind(-1)
        return [Curvature(phi, h, None, bool((h < 0).any())) for phi, h in zip(turned, values.unbind(-1))]


def _of_row(row: Row) -> Curvature:
    h, by_covariance = row.change.grad, None if row.covariance is None else row.covariance.grad
    assert h is not None
    if row.is_signed is None:
        row.is_signed = bool(h.amin() < 0)
    return Curvature(row.phi, h, by_covariance, row.is_signed)


def _connected(pairs: Iterable[Sequence[Row]]) -> list[list[Row]]:
    """Rows that pairs connect, together."""
    groups: list[list[Row]] = []
    for pair in pairs:
        met = [group for group in groups if any(row in group for row in pair)]
        joint = list(dict.fromkeys([row for group in met for row in group] + list(pair)))
        groups = [group for group in groups if group not in met] + [joint]
    return groups


def _summed(parts: Sequence[Tensor], batch_shape: torch.Size) -> Tensor:
    grads = [part.grad for part in parts if part.grad is not None]
    grads = [grad.sum_to_size(batch_shape) if grad.dim() > len(batch_shape) else grad for grad in grads]
    return sum(grads[1:], grads[0]).expand(batch_shape)


class Record:
    """What one evaluation of an objective took of the Gaussians that take natural steps.

    :param like: a tensor of the dtype and device wanted.
    """

    def __init__(self, like: Tensor) -> None:
        self.zero = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True)
        self.tensors: list[Tensor] = []
        self._passes: dict[Natural, list[Pass]] = {}

    def new(self, module: Natural, base: Any) -> Pass:
        """A pass of a module's."""
        one = Pass(self, base)
        self._passes.setdefault(module, []).append(one)
        return one

    def retain(self) -> None:
        """Have autograd retain the gradients of the next way back."""
        for value in self.tensors:
            value.retain_grad()

    def differentiate(self, loss: Tensor) -> None:
        """Go back from a loss as far as this, and no further: no parameter's gradient is touched."""
        self.retain()
        for value, grad in zip(self.tensors, torch.autograd.grad(loss, self.tensors, allow_unused=True)):
            value.grad = grad

    @property
    def rows(self) -> list[Row]:
        """The rows that have a curvature."""
        every = (row for passes in self._passes.values() for one in passes for row in one.rows)
        return [row for row in every if row.change.grad is not None]

    @property
    def largest(self) -> Optional[Tensor]:
        """The largest gradient by means, variances and draws, 0 where no data depend on q; ``None`` without any."""
        found = []
        for one in (one for passes in self._passes.values() for one in passes):
            tensors = [w for _, w in one.draws] + [part for row in one.rows for part in (row.mean, row.change)]
            found += [part.grad.abs().amax() for part in tensors if part.grad is not None]
        return torch.stack(found).amax() if found else None

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Have each module take its step.

        :param share: of all rows, those that the evaluation was on.
        """
        for module, passes in self._passes.items():
            module.take(_whole(passes), share)


def _whole(passes: list[Pass]) -> list[Pass]:
    """The passes that hold a divergence, with what those just before have, of the same q, that do not: a layer below a
    family on sites is drawn in one run of the guide and held in the next, which has the divergence.
    """
    whole: list[Pass] = []
    for one in reversed(passes):
        if one.is_weighed:
            whole.insert(0, one)
        elif whole:
            whole[0].rows += one.rows
            whole[0].crosses += one.crosses
            whole[0].draws += one.draws
            whole[0].by_draws |= one.by_draws
    return whole


_RECORD: ContextVar[Optional[Record]] = ContextVar("record of an evaluation", default=None)


@contextmanager
def recording(like: Tensor) -> Iterator[Record]:
    """Record what Gaussians give, of a loss that is differentiated once."""
    record = Record(like)
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def recorded() -> Optional[Record]:
    """The record of the evaluation that this is part of; ``None`` where there is none, or nothing is differentiated."""
    return _RECORD.get() if torch.is_grad_enabled() else None


class Natural(Coefficients):
    """Coefficients that take natural steps by an objective's record; without one they are plain parameters.

    :param rate: ρ, a number in (0, 1], or a function of the number of steps taken.
    """

    steps: Tensor

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rate: Rate) -> None:
        super().__init__(sizes, batch_shape, like)
        self.sizes, self.batch_shape, self.rate = tuple(sizes), torch.Size(batch_shape), rate
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=like.device))
        self.share = 1.0  # of its rate that a step takes, for a loop whose rates fall
        self._count: Optional[int] = 0  # of steps, as a number here; None if it is to be read
        self._seen: dict[str, tuple[int, bool]] = {}  # of tilts their versions, and whether they were other than 0

    @property
    def steps_taken(self) -> int:
        """How many steps have been taken."""
        if self._count is None:
            self._count = int(self.steps)
        return self._count

    def next_rate(self, share: float = 0.0) -> float:
        """ρ of the next step.

        :param share: of all rows, those that it is on here.
        """
        rate = float(self.rate(self.steps_taken) if callable(self.rate) else self.rate)
        # test_the_floor_of_the_rate_is_higher_on_all_rows
        if (
            isinstance(self.rate, Falling)
            and rate < self.rate.whole
            and total_share(share, next(self.parameters())) > 0.999
        ):
            rate = self.rate.whole
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be in [0, 1], of step {self.steps_taken} it gives {rate}")
        return rate * self.share

    def most_by_draws(self) -> float:
        """The largest ρ where curvatures are those of single draws, whose noise has to be averaged out."""
        return max(0.02, 1 / (10 + self.steps_taken / 8))

    def skip(self, num: int) -> None:
        """Go on at the rate of a step so many later."""
        self.steps, self._count = self.steps + num, None

    def restart(self) -> None:
        """Count steps from here on."""
        self.steps, self._count = torch.zeros_like(self.steps), 0

    def take(self, passes: list[Pass], share: float) -> None:
        """Take one step by an objective's gradients, the mean over its passes, as its particles are."""
        if not passes:
            return
        rate = self.next_rate(share)
        for one in passes:
            # test_single_draws_of_an_inner_layer_do_not_throw_it_away
            if one.draws:
                rate = min(rate, self.most_by_draws())
            elif one.by_draws:
                rate = min(rate, _BY_MARGINALS)
        weights = joined(*[one.weight(self.batch_shape) for one in passes])
        total = sum(weights[1:], weights[0])
        for one, weight in zip(passes, weights):
            self.step(one, weight, total, rate, len(passes) > 1)
        self._count = self.steps_taken + 1
        self._buffers["steps"] = self.steps + 1  # by the way round a Pyro module's attributes

    @abstractmethod
    def step(self, taken: Pass, weight: Tensor, total: Tensor, rate: float, again: bool) -> None:
        """One step, ρ/total·(what was recorded − weight·what is there), with all processes' sums over rows joined.

        :param again: whether others of the same evaluation are taken, too.
        """

    # A tilt A = tril(raw) with the exponential of raw's diagonal, I at 0, is what plain gradients make of a root R of a
    # covariance, RA; natural steps bring it back to I.

    def _new_tilt(self, name: str, like: Tensor, num: int) -> None:
        setattr(self, name, torch.nn.Parameter(like.new_zeros(*like.shape[:-1], num, num)))

    def _tilt(self, name: str) -> Tensor:
        raw = self._kept(name)
        return raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())

    def _is_tilted(self, name: str) -> bool:
        raw: Any = self._parameters[name]
        if self._seen.get(name, (-1,))[0] != raw._version:
            self._seen[name] = raw._version, bool(raw.any())
        return self._seen[name][1]

    def _level_tilt(self, name: str) -> None:
        raw: Any = self._parameters[name]
        with torch.no_grad():
            raw.zero_()
        self._seen[name] = raw._version, False

    def _kept(self, name: str) -> Tensor:
        """A parameter; no optimiser is told of it while a record is made, or nothing is differentiated."""
        if torch.is_grad_enabled() and _RECORD.get() is None:
            return getattr(self, name)
        value: Any = self._parameters[name]
        return value.detach()

    def _set(self, name: str, value: Tensor) -> None:
        """Give a parameter a value, in memory of its own."""
        parameter: Any = self._parameters[name]
        parameter.data = value.detach().to(parameter).expand(parameter.shape).contiguous()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        unit = torch.zeros_like(self.steps, dtype=next(self.parameters()).dtype)
        destination[prefix + "unit_unconstrained"] = unit  # which earlier releases look for
        for name in [name for name, _ in self.named_buffers(recurse=False) if prefix + name in destination]:
            # A factor of LAPACK's lies by columns: test_families.py::test_contract.
            destination[prefix + name] = destination[prefix + name].contiguous()
        for name in [name for name in self._parameters if name.startswith("tilt")]:
            if not self._is_tilted(name):
                del destination[prefix + name]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._count = None
        state_dict.pop(prefix + "unit_unconstrained", None)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("tilt"):
                state_dict.setdefault(prefix + name, torch.zeros_like(parameter))
        for name, buffer in list(self.named_buffers(recurse=False)):
            key = prefix + name
            if key in state_dict and buffer.shape != state_dict[key].shape:
                setattr(self, name, buffer.new_zeros(state_dict[key].shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


def steppers(guide: torch.nn.Module) -> list[Natural]:
    """The posteriors of a guide that take natural steps."""
    return [module for module in guide.modules() if isinstance(module, Natural)]


class Recorded(Gaussian):
    """A Gaussian that records the marginals, draws and divergences that it gives.

    Its methods are put before those of a class of Gaussians, whose they call.
    """

    taken: Pass

    def recorded_in(self, taken: Pass) -> Self:
        """This Gaussian, recording there."""
        self.taken = taken
        return self

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        phi = side_by_side(features)
        return self.note(phi, *self.moments_by(phi))

    def note(
        self, phi: Tensor, mean: Tensor, change: Tensor, covariance: Optional[Tensor] = None
    ) -> tuple[Tensor, Tensor]:
        """Record marginals."""
        if covariance is not None:
            self.taken.record.tensors.append(covariance)
        self.row = Row(phi.detach(), self.taken.keep(mean), self.taken.keep(change), covariance)
        self.taken.rows.append(self.row)
        return self.row.mean, self.row.change

    def note_draws(self) -> None:
        self.taken.by_draws = True

    def cross_change(
        self, features: Sequence[Tensor], others: Sequence[Tensor], rows: tuple[Optional[Row], Optional[Row]]
    ) -> Tensor:
        value = self.taken.keep(super().cross_change(features, others, rows))
        one, other = rows
        if one is not None and other is not None:
            self.taken.crosses.append((one, other, value))
        return value

    def kl(self) -> Tensor:
        value = self.taken.keep(super().kl())  # type: ignore[safe-super]
        self.taken.divergences.append(value)
        return value

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        w = self.taken.keep(side_by_side(super().rsample(shape)).clone())  # type: ignore[safe-super]
        self.taken.draws.append(((w - side_by_side(self.loc)).detach(), w))
        return list(w.split(self.sizes, -1))


def softened(anchor: Tensor, softness: float, sizes: Sequence[int]) -> Tensor:
    """L + ηsI, with s² the mean of diag(LLᵀ) over each block, whose units may be far apart."""
    if not softness:
        return anchor.contiguous()
    parts = anchor.split(list(sizes), -2) if len(sizes) > 1 else (anchor,)
    scales = [torch.linalg.vector_norm(part, dim=(-2, -1)) * (softness / part.shape[-2] ** 0.5) for part in parts]
    each = torch.cat([s[..., None].expand(*s.shape, part.shape[-2]) for s, part in zip(scales, parts)], -1)
    return anchor + torch.diag_embed(each)


def cautious(shift: Tensor, taken: Pass, cut: Optional[Tensor] = None) -> Tensor:
    """A step of m, ``(..., M)``, shortened where it would move function values by more than three of the prior's
    deviations, or half of one where negative curvatures are cut: a slope along them meets the prior's precision alone.

    :param cut: whether they are, ``(...)``; ``None`` is nowhere. Asked for where several functions of this posterior
        meet in densities, such as a mean and its log-noise.
    """
    # |φᵀΔm|/‖φ‖ of each function value: test_counts_far_from_where_q_starts
    farthest = []
    for row in taken.rows:
        moved = (row.phi @ shift[..., None])[..., 0].abs_()
        by = torch.linalg.vector_norm(row.phi, dim=-1).clamp_(min=torch.finfo(shift.dtype).tiny)
        farthest.append((moved / by).amax(-1, keepdim=True))
    if taken.draws:  # whose inputs are not known
        farthest.append(shift.abs().amax(-1, keepdim=True))
    most = functools.reduce(torch.maximum, farthest) if farthest else torch.zeros_like(shift[..., :1])
    if cut is not None and taken.crosses:
        most = torch.where(cut[..., None], _CLOSER * most, most)
    return shift * (_FARTHEST / largest(most.clamp(min=_FARTHEST)))
