"""Natural steps: the record of one evaluation of an objective, and coefficients that take a step by it.

A record has what Gaussians gave, as tensors whose gradients autograd retains. An objective evaluates a loss within
:func:`recording`, goes back through it once, and calls :meth:`Record.step`. The gradients by marginals, draws and
divergences are all that a natural step needs. Outside of :func:`recording` nothing is kept and nothing moves: Gaussians
are plain functions of their parameters, which any optimiser may train.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn

from ..modules import size_buffers
from ..numerics.arrow import OneEach
from ..numerics.decisions import decided
from ..numerics.functions import setting
from ..numerics.linalg import gram, lift_to
from ..numerics.processes import joined, largest, total_share
from .base import Coefficients


@dataclass(eq=False)
class Row:
    """Marginals at some inputs; of K functions that meet in densities ``(N, K)``, and covariances ``(N, K, K)``."""

    phi: Any  # Φ of all blocks side by side, without its graph: a tensor, or (K of) one entry of the last block a row
    mean: Tensor  # Φm
    change: Tensor  # diag(Φ(S − I)Φᵀ)
    covariance: Optional[Tensor] = None  # S, if it is one of these marginals' alone: its gradient is Φᵀ diag(h) Φ
    is_signed: bool = True  # whether a curvature may be negative: not, once an objective has looked


class Curvature(NamedTuple):
    """h, ``(..., N)``, the gradient by variances of Φw, and Φᵀ diag(h) Φ if it is known."""

    phi: Any
    h: Tensor
    known: Optional[Tensor]
    is_signed: bool


@dataclass(eq=False)
class Pass:
    """What one run of the guide took of one q(w)."""

    record: Record
    base: Any  # what the step starts from, of the module's own making
    divergences: list[Tensor] = field(default_factory=list)  # whose gradients add up to c, the weight of KL[q ‖ p]
    rows: list[Row] = field(default_factory=list)
    groups: list[Row] = field(default_factory=list)  # of functions that meet
    draws: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # w − m, or what stands for it, and w, (..., M)
    by_draws: bool = False  # whether marginals were drawn from: gradients by variances are those of single draws
    has_design: bool = False  # whether its draws are so many, and such, that curvatures by them are no guesses

    def keep(self, value: Tensor) -> Tensor:
        """A tensor whose gradient is retained."""
        # One without a graph gets a leaf, or no backward pass would come by.
        value = value if value.requires_grad else value + self.record.zero
        self.record.tensors.append(value)
        return value

    def weight(self, batch_shape: torch.Size) -> Tensor:
        """c, of the batch's shape."""
        num, found = len(batch_shape), self.divergences
        grads = [g.sum_to_size(batch_shape) if g.dim() > num else g for p in found if (g := p.grad) is not None]
        return sum(grads[1:], grads[0]).expand(batch_shape)

    @property
    def functions(self) -> list[tuple[Any, Optional[Tensor]]]:
        """Φ of each function at its inputs, and the gradient by its means."""
        found: list[tuple[Any, Optional[Tensor]]] = [(row.phi, row.mean.grad) for row in self.rows]
        for group in self.groups:
            each, grad = group.phi, group.mean.grad
            grads = torch.zeros_like(group.mean) if grad is None else grad
            found += zip(each, grads.mT) if isinstance(each, list) else [(each.flatten(0, 1), grads.flatten())]
        return found

    def slope(self, loc: Tensor) -> Tensor:
        """The gradient by m, ``(..., M)``, but for the divergence's: Φᵀg of all rows, and the gradients by draws."""
        # Φᵀg
        total = [
            g @ phi if isinstance(phi, OneEach) else (phi.mT @ g[..., None])[..., 0]
            for phi, g in self.functions
            if g is not None
        ]
        total += [w.grad.reshape(-1, *loc.shape).sum(0) for _, w in self.draws if w.grad is not None]
        return sum(total, torch.zeros_like(loc))

    def curvature(self, like: Tensor, precision: Callable[[], Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        """The gradient by S but for the divergence's, ``(..., M, M)`` as ``like``, ΦᵀHΦ of all rows and that by draws,
        by S⁻¹; and what is to be added to have no negative curvature in it, ``None`` where there is none.
        """
        found = self.curvatures()
        # ΦᵀHΦ, and what lacks to Φᵀ|H|₊Φ
        grams = [gram(phi, phi * h[..., None]) if known is None else known for phi, h, known, _ in found]
        cuts = [gram(phi, phi * (-h).clamp(min=0)[..., None]) for phi, h, _, is_signed in found if is_signed]
        # ½E ∇²f, with E ∇²f = E ∇f(w)(w − m)ᵀS⁻¹ (Stein's identity; Lin, Khan and Schmidt, 2019).
        shape = (-1, *like.shape[:-1])
        pairs = [(g, (precision() @ v[..., None])[..., 0]) for v, w in self.draws if (g := w.grad) is not None]
        each = [torch.einsum("s...i,s...j->...ij", g.reshape(shape), c.reshape(shape)) for g, c in pairs]
        drawn = [0.25 * (one + one.mT) for one in each]
        grams, cuts = grams + drawn, cuts + [lift_to(one.nan_to_num(), 0.0) for one in drawn]
        return sum(grams, torch.zeros_like(like)), sum(cuts[1:], cuts[0]) if cuts else None

    def curvatures(self) -> list[Curvature]:
        """The gradients by variances, and of functions that have covariances too those along :func:`_axes_of`."""
        found = [
            Curvature(row.phi, h, getattr(row.covariance, "grad", None), row.is_signed)
            for row in self.rows
            if (h := row.change.grad) is not None
        ]
        return sum((_axes_of(group) for group in self.groups if group.change.grad is not None), found)


def _axes_of(group: Row) -> list[Curvature]:
    """Curvatures of functions φ₁, …, φ_K with the gradients H, K × K a datum, by their variances and covariances: along
    the axes of H, Σ_j e_jφ_j with the eigenvalues, so that one that is positive stays so.
    """
    hessian: Any = group.change.grad
    # H = EΛEᵀ: ΣΣ h_jkφ_jφ_kᵀ = Σ_j λ_j(Φe_j)(Φe_j)ᵀ
    values, axes = torch.linalg.eigh(0.5 * (hessian + hessian.mT).nan_to_num())
    if isinstance(group.phi, list):
        turned = axes.mT @ torch.stack([phi.compact for phi in group.phi], 1)  # (N, K, C + 1)
        each = list(zip(map(group.phi[0].like, turned.unbind(1)), values.unbind(1)))
    else:
        each = [((axes.mT @ group.phi).flatten(0, 1), values.flatten())]
    known = getattr(group.covariance, "grad", None)
    return [Curvature(phi, h, known, decided((h < 0).any(), serves_both=True)) for phi, h in each]


class Record:
    """What one evaluation of an objective took of the Gaussians that take natural steps."""

    def __init__(self, like: Tensor) -> None:
        self.zero = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True)
        self.tensors: list[Tensor] = []
        self._passes: dict[Any, list[Pass]] = {}

    def new(self, module: nn.Module, base: object) -> Pass:
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
        # torch.autograd.grad leaves .grad alone
        for value, grad in zip(self.tensors, torch.autograd.grad(loss, self.tensors, allow_unused=True)):
            value.grad = grad
        for row, sign in self.signs.items():
            row.is_signed = bool(sign)

    @property
    def signs(self) -> dict[Row, Tensor]:
        """Whether a curvature is negative, of each row that has some: to be read with other numbers at one look. Where
        nobody looks, steps cut what may be negative: more work, the same step.
        """
        rows = itertools.chain(*map(attrgetter("rows"), itertools.chain(*self._passes.values())))
        return {row: (h < 0).any() for row in rows if (h := row.change.grad) is not None}

    @property
    def largest(self) -> Tensor:
        """The largest gradient by means, variances and draws, 0 where no data depend on q."""
        tensors: list[Tensor] = []
        for one in itertools.chain(*self._passes.values()):
            tensors += [w for _, w in one.draws]
            tensors += [part for row in (*one.rows, *one.groups) for part in (row.mean, row.change)]
        found = [part.grad.abs().amax() for part in tensors if part.grad is not None]
        return torch.stack([self.zero.detach(), *found]).amax()

    @torch.no_grad()
    def step(self, share: float, kind: type = object) -> None:
        """Have each module, of a kind, take its step, of an evaluation on this share of all rows."""
        for module, passes in [pair for pair in self._passes.items() if isinstance(pair[0], kind)]:
            # A run whose divergence has no gradient is not of the loss: it was made anew, or mapped.
            module.take([one for one in passes if any(part.grad is not None for part in one.divergences)], share)


_RECORD: ContextVar[Optional[Record]] = ContextVar("record of an evaluation", default=None)


def recording(like: Tensor) -> Any:
    """Record what Gaussians give, of a loss that is differentiated once."""
    return setting(_RECORD, Record(like))


def recorded() -> Optional[Record]:
    """The record of the evaluation that this is part of; ``None`` where there is none, or nothing is differentiated."""
    return _RECORD.get() if torch.is_grad_enabled() else None


def is_recording() -> bool:
    """Whether this is part of such an evaluation, differentiated or not."""
    return _RECORD.get() is not None


_OF_GROUPS = 0.7  # the largest rate where several functions meet in densities
_BY_MARGINALS = 0.1  # the largest rate where marginals are drawn from: at 1 a first draw throws an inner layer away
_FARTHEST = 3.0  # standard deviations of the prior; Newton's step for an exponential overshoots by itself
_CLOSER = 6  # times as close where negative curvatures are cut, half a deviation

Rate = Union[float, Callable[[int], float]]


@dataclass
class Tape:
    """What stands for a posterior's numbers while a step is recorded as a graph.

    :param rate: ρ, which replays read.
    """

    rate: Tensor
    moved: dict[str, Tensor] = field(default_factory=dict)  # what parameters become
    passes: list[Pass] = field(default_factory=list)  # of which it is kept whether they have draws

    def rate_of(self, passes: list[Pass], share: float) -> Tensor:
        """The rate that replays read; what theirs is found by is kept."""
        self.passes = [
            Pass(None, None, [], [], one.groups and [()], one.draws and [()], one.by_draws, one.has_design)  # type: ignore
            for one in passes
        ]
        return self.rate


class Natural(Coefficients):
    """Coefficients that take natural steps by an objective's record; without one they are plain parameters.

    Plain gradients move the mean and a tilt: of a root R of the covariance they make RA with A = tril(raw), the
    exponential of raw's diagonal on its own, I at 0. A natural step brings A back to I.

    :param rate: ρ, a number in (0, 1], or a function of the number of steps taken; by default max(0.1, 1/(1 + t)), or,
        of a step on all rows, max(0.25, 1/(1 + t)).
    """

    tape: Optional[Tape] = None  # while a step is recorded
    last_rate: Any = 1.0

    def __init__(
        self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rate: Optional[Rate] = None
    ) -> None:
        super().__init__(sizes, batch_shape, like)
        self.batch_shape, self.rate = torch.Size(batch_shape), rate
        self.loc: Any = torch.nn.Parameter(like.new_zeros(*batch_shape, sum(self.sizes)))  # m
        self.steps = 0  # that were taken
        self.share = 1.0  # of its rate that a step takes, for a loop whose rates fall
        self._looked = -1, False  # the tilt's version when it was last looked at, and whether it was other than 0

    def next_rate(self, share: float = 0.0) -> float:
        """ρ of the next step, on this share of all rows."""
        if self.rate is None:
            # What an average over all steps, then the last ones, is over is no batch's noise on all rows, but
            # hyperparameters of before: test_the_floor_of_the_rate_is_higher_on_all_rows
            floor = 0.25 if total_share(share, self._kept("loc")) > 0.999 else 0.1
            return max(floor, 1 / (1 + self.steps)) * self.share
        rate = float(self.rate(self.steps) if callable(self.rate) else self.rate)
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be in [0, 1], of step {self.steps} it gives {rate}")
        return rate * self.share

    def rate_of(self, passes: list[Pass], share: float) -> Any:
        """ρ of a step by these passes."""
        # One draw shows a curvature with all its noise, which has to be averaged out.
        of_draws = max(0.02, 1 / (10 + self.steps / 8))
        # A posterior's points show more: test_undamped_updates_of_classes_do_not_explode
        of_points = max(0.25, 1 / (1 + self.steps))
        limits = [of_points if one.has_design else of_draws for one in passes if one.draws]
        limits += [_BY_MARGINALS for one in passes if one.by_draws]
        # At 1 steps of classes may go to and fro between two posteriors, as far from the best on either side.
        limits += [_OF_GROUPS for one in passes if one.groups]
        return min([self.next_rate(share), *limits])

    def take(self, passes: list[Pass], share: float) -> None:
        """Take one step by an objective's gradients, the mean over its passes, as its particles are."""
        if not passes:
            return
        rate = self.last_rate = (self.tape or self).rate_of(passes, share)
        # c of each pass; the objective is their sum
        weights = joined(*map(methodcaller("weight", self.batch_shape), passes))
        total = sum(weights[1:], weights[0])
        parts = [rate * (weight / total) for weight in weights]
        for i, (one, weight) in enumerate(zip(passes, weights)):
            # A pass counts for ρcᵢ/Σc once those after it have been taken.
            self.step(one, parts[i] / (1 - sum(parts[i + 1 :])), weight, i > 0)
        self.steps += 1

    @abstractmethod
    def step(self, taken: Pass, rate: Tensor, weight: Tensor, again: bool) -> None:
        """One step, by the share ρ of the way to where a pass alone leads; sums over rows are of all processes.

        :param rate: ρ, and ``weight``: c, the objective's weight of the divergence, of the batch's shape.
        :param again: whether others of the same evaluation have been taken: q is not that of the pass any more.
        """

    @property
    def tilt_matrix(self) -> Tensor:
        """A."""
        raw = self._kept("tilt")
        return raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())

    @property
    def is_tilted(self) -> bool:
        """Whether A is other than I."""
        raw: Any = self._parameters.get("tilt")
        if raw is not None and self._looked[0] != raw._version:
            self._looked = raw._version, bool(raw.any())
        return raw is not None and self._looked[1]

    @property
    def has_tilt(self) -> bool:
        """Whether q is given with A, as plain parameters: to plain gradients, or once these have moved it."""
        return "tilt" in self._parameters and recorded() is None and (torch.is_grad_enabled() or self.is_tilted)

    def _end_tilt(self) -> None:
        raw: Any = self._parameters["tilt"]
        raw.data.zero_()
        self._looked = raw._version, False

    def _kept(self, name: str) -> Tensor:
        """A parameter, which no optimiser sees while a record is made, or nothing is differentiated."""
        # Pyro's param statement, by the attribute, is what hands a parameter to an optimiser.
        if torch.is_grad_enabled() and recorded() is None:
            return getattr(self, name)
        value: Any = self._parameters[name] if self.tape is None else self.tape.moved.get(name, self._parameters[name])
        return value.detach()

    def _set(self, name: str, value: Tensor) -> None:
        """Give a parameter a value, in memory of its own."""
        # By .data, so that Pyro's store and optimisers keep the parameter that they know.
        parameter: Any = self._parameters[name]
        value = value.detach().to(parameter).expand(parameter.shape).contiguous()
        if self.tape is None:
            parameter.data = value
        else:
            self.tape.moved[name] = value

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = torch.tensor(self.steps, device=next(self.parameters()).device)
        for name, value in self.named_buffers(recurse=False):
            # A factor of LAPACK's lies by columns: test_families.py::test_contract.
            destination[prefix + name] = value.contiguous()
        if not self.is_tilted:
            destination.pop(prefix + "tilt", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        self.steps = int(state_dict.pop(prefix + "steps", 0))
        state_dict.pop(prefix + "unit_unconstrained", None)
        if "tilt" in self._parameters:
            state_dict.setdefault(prefix + "tilt", torch.zeros_like(self.tilt))
        size_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def steppers(guide: torch.nn.Module) -> list[Natural]:
    """The posteriors of a guide that take natural steps."""
    return [module for module in guide.modules() if isinstance(module, Natural)]


def cautious(shift: Tensor, taken: Pass, cut: Optional[Tensor] = None) -> Tensor:
    """A step of m, ``(..., M)``, that moves no function value by more than three of the prior's deviations, or half of
    one where negative curvatures are cut and several functions of this posterior meet in densities.
    """
    # of draws inputs are not known
    most = shift.abs().amax(-1, keepdim=True) if taken.draws else torch.zeros_like(shift[..., :1])
    # |φᵀΔm|/‖φ‖ of each function value: test_counts_far_from_where_q_starts
    for phi, _ in taken.functions:
        moved = (phi @ shift[..., None])[..., 0].abs_()
        by = torch.linalg.vector_norm(getattr(phi, "compact", phi), dim=-1).clamp_(min=torch.finfo(shift.dtype).tiny)
        most = torch.maximum(most, (moved / by).amax(-1, keepdim=True))
    # Along them, such as a mean and its log-noise, a slope meets the prior's precision alone.
    if cut is not None and taken.groups:
        most = torch.where(cut[..., None], _CLOSER * most, most)
    return shift * (_FARTHEST / largest(most.clamp(min=_FARTHEST)))
