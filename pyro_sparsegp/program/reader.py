"""The one reader of likelihoods: derivatives of a program's log densities by function values, all else held.

It runs the model with every value of an earlier run held, so that it needs that run's trace, and no guide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from .dependence import DATAWISE
from .facts import Structure
from .likelihood import Expectation, expected_derivatives, normal_nodes
from .traces import held_trace, log_densities

__all__ = ["Marginal", "Reader", "per_output"]

Marginal = tuple[Tensor, Tensor]  # mean and variance of a GP site's values


class Reader:
    """The log densities downstream of GP sites and their derivatives by function values, all else held.

    :param found: what is known of the model.
    :param trace: a run of the model whose values, scales and masks are held.
    """

    def __init__(
        self, model: Callable, args: tuple, kwargs: dict[str, Any], found: Structure, trace: poutine.Trace
    ) -> None:
        self.model, self.args, self.kwargs, self.found, self.trace = model, args, kwargs, found, trace
        self.names = list(trace.nodes)

    def meeting(self, name: str) -> set[str]:
        """The GP sites that meet this one in a term of a density."""
        return {other for pair in self.found.interactions if name in pair for other in pair} - {name}

    def expect(self, name: str, marginals: Mapping[str, Marginal], at_mean: bool) -> Expectation:
        """E[ℓ], E[ℓ'] and E[ℓ''] by a GP site's values over its marginals and those of the GP sites it meets.

        :param at_mean: expand ℓ to second order at the mean, where it is exact if ℓ is quadratic.
        """
        mean, variance = marginals[name]
        meeting = [other for other in marginals if other in self.meeting(name)]
        axes = {other: self._axes(other, marginals[other][0]) for other in (name, *meeting)}
        if at_mean:
            axes[name] = 0
        nodes, weights = normal_nodes(sum(axes.values()), mean)
        parts = dict(zip(axes, nodes.split(list(axes.values()), -1)))
        values = {other: _spread(marginals[other], parts[other]) for other in meeting}
        values[name] = mean.expand(len(weights), *mean.shape) if at_mean else _spread((mean, variance), parts[name])
        held = {other: loc for other, (loc, _) in marginals.items() if other not in values}

        total = self._total(name, held)
        scores = None
        if not at_mean:  # 0 variance has no spread
            positive = variance > 0
            scores = per_output(parts[name], mean) / torch.where(positive, variance, 1.0).sqrt() * positive
        outputs_meet = self.found.dependence.get(name) == DATAWISE
        with pyro.validation_enabled(False):
            found = expected_derivatives(total, values, name, weights, scores, outputs_meet)
        if at_mean:
            return Expectation(found.value + 0.5 * (found.second * variance).sum(), found.first, found.second)
        return found

    def _total(self, name: str, held: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """ℓ of values, with others held, as a GP site's prior meets it: under ``poutine.scale`` that is scaled, too,
        on which the best q does not depend.
        """
        skip = {*self.found.gps, *self.names[: self.names.index(name)]}
        site: Any = self.trace.nodes[name]
        scale, none = site["scale"], site["value"].new_zeros(())
        if isinstance(scale, Tensor) and scale.numel() > 1:
            raise ValueError(
                f"GP site {name!r} has a poutine.scale with {scale.numel()} values; a family whose sites are read off "
                "the likelihood takes one number: scale the likelihood's site by them, or take a family such as SVGP."
            )

        def total(moved: Mapping[str, Tensor]) -> Tensor:
            trace = held_trace(self.model, {**held, **moved}, self.args, self.kwargs, self.trace)
            return sum((part.sum() for part in log_densities(trace, skip).values()), none) / scale

        return total

    def _axes(self, name: str, mean: Tensor) -> int:
        """How many axes of nodes a site's values need: outputs that meet in one term have one each."""
        return mean[..., 0].numel() if self.found.dependence.get(name) == DATAWISE else 1


def _spread(marginal: Marginal, nodes: Tensor) -> Tensor:
    mean, variance = marginal
    return mean + variance.clamp(min=0).sqrt() * per_output(nodes, mean)


def per_output(nodes: Tensor, like: Tensor) -> Tensor:
    """Nodes ``(K, A)`` shaped to multiply ``like``, ``(..., N)``, one axis for all outputs or one for each."""
    if nodes.shape[-1] == 1:
        return nodes.reshape(len(nodes), *[1] * like.dim())
    return nodes.reshape(len(nodes), *like.shape[:-1], 1)
