"""Coefficients that take natural steps: how far these go, how many there were, and what plain gradients leave."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..modules import size_buffers
from ..numerics.processes import joined, largest, total_share
from .base import Coefficients
from .record import Pass, recorded

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


class Natural(Coefficients):
    """Coefficients that take natural steps by an objective's record; without one they are plain parameters.

    Plain gradients move the mean and a tilt: of a root R of the covariance they make RA with A = tril(raw), the
    exponential of raw's diagonal on its own, I at 0. A natural step brings A back to I.

    :param rate: ρ, a number in (0, 1], or a function of the number of steps taken.
    """

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rate: Rate) -> None:
        super().__init__(sizes, batch_shape, like)
        self.sizes, self.batch_shape, self.rate = tuple(sizes), torch.Size(batch_shape), rate
        self.steps = 0  # that were taken
        self.share = 1.0  # of its rate that a step takes, for a loop whose rates fall
        self._looked = -1, False  # the tilt's version when it was last looked at, and whether it was other than 0

    def next_rate(self, share: float = 0.0) -> float:
        """ρ of the next step.

        :param share: of all rows, those that it is on here.
        """
        rate = float(self.rate(self.steps) if callable(self.rate) else self.rate)
        # All rows have no noise to average out, so that the floor may be higher there:
        # test_the_floor_of_the_rate_is_higher_on_all_rows
        floor = getattr(self.rate, "whole", rate)
        if rate < floor and total_share(share, self._kept("loc")) > 0.999:
            rate = floor
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be in [0, 1], of step {self.steps} it gives {rate}")
        return rate * self.share

    def rate_of(self, passes: list[Pass], share: float) -> Any:
        """ρ of a step by these passes."""
        rate = self.next_rate(share)
        # One draw shows a curvature with all its noise, which has to be averaged out:
        # test_single_draws_of_an_inner_layer_do_not_throw_it_away
        if any(map(attrgetter("draws"), passes)):
            rate = min(rate, max(0.02, 1 / (10 + self.steps / 8)))
        if any(map(attrgetter("by_draws"), passes)):
            rate = min(rate, _BY_MARGINALS)
        return rate

    def take(self, passes: list[Pass], share: float) -> None:
        """Take one step by an objective's gradients, the mean over its passes, as its particles are."""
        if not passes:
            return
        rate = self.last_rate = self.rate_of(passes, share)
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

        :param rate: ρ, of the batch's shape.
        :param weight: c, the objective's weight of the divergence, of that shape.
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

    @torch.no_grad()
    def _end_tilt(self) -> None:
        raw: Any = self._parameters["tilt"]
        raw.zero_()
        self._looked = raw._version, False

    def _kept(self, name: str) -> Tensor:
        """A parameter; no optimiser is told of it while a record is made, or nothing is differentiated."""
        # Pyro's param statement, by the attribute, is what hands a parameter to an optimiser.
        if torch.is_grad_enabled() and recorded() is None:
            return getattr(self, name)
        value: Any = self._parameters[name]
        return value.detach()

    def _set(self, name: str, value: Tensor) -> None:
        """Give a parameter a value, in memory of its own."""
        # By .data, so that Pyro's store and optimisers keep the parameter that they know.
        parameter: Any = self._parameters[name]
        parameter.data = value.detach().to(parameter).expand(parameter.shape).contiguous()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        like = next(self.parameters())
        destination[prefix + "unit_unconstrained"] = like.new_zeros(())  # which earlier releases look for
        destination[prefix + "steps"] = torch.tensor(self.steps, device=like.device)
        for name, value in self.named_buffers(recurse=False):
            # A factor of LAPACK's lies by columns: test_families.py::test_contract.
            destination[prefix + name] = value.contiguous()
        if not self.is_tilted:
            destination.pop(prefix + "tilt", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
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
    """A step of m, ``(..., M)``, shortened where it would move function values by more than three of the prior's
    deviations, or half of one where negative curvatures are cut: a slope along them meets the prior's precision alone.

    :param cut: whether they are, ``(...)``; ``None`` is nowhere. Asked for where several functions of this posterior
        meet in densities, such as a mean and its log-noise.
    """
    # of draws inputs are not known
    most = shift.abs().amax(-1, keepdim=True) if taken.draws else torch.zeros_like(shift[..., :1])
    # |φᵀΔm|/‖φ‖ of each function value: test_counts_far_from_where_q_starts
    for row in taken.rows:
        moved = (row.phi @ shift[..., None])[..., 0].abs_()
        by = torch.linalg.vector_norm(row.phi, dim=-1).clamp_(min=torch.finfo(shift.dtype).tiny)
        most = torch.maximum(most, (moved / by).amax(-1, keepdim=True))
    # test_a_mean_and_its_noise_do_not_diverge
    if cut is not None and taken.crosses:
        most = torch.where(cut[..., None], _CLOSER * most, most)
    return shift * (_FARTHEST / largest(most.clamp(min=_FARTHEST)))
