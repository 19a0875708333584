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
from .likelihood import Expectation, expand, mapped, normal_nodes
from .traces import held_trace, log_densities, sample_sites

__all__ = ["Marginal", "Reader"]

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

    def meeting(self, name: str) -> set[str]:
        """The GP sites that meet this one in a term of a density."""
        return {other for pair in self.found.interactions if name in pair for other in pair} - {name}

    def expect(self, name: str, marginals: Mapping[str, Marginal], at_mean: bool) -> Expectation:
        """E[ℓ], E[ℓ'] and E[ℓ''] by a GP site's values over its marginals and those of the GP sites it meets.

        :param at_mean: expand ℓ to second order at the mean, where it is exact if ℓ is quadratic.
        """
        mean, variance = marginals[name]
        meeting = [other for other in marginals if other in self.meeting(name)]
        drawn = meeting if at_mean else [name, *meeting]
        widths = [self._axes(other, marginals[other][0]) for other in drawn]
        # f = m + √v ε, one axis of ε for each function; E[·] = Σₖ wₖ (·)(εₖ).
        nodes, weights = normal_nodes(sum(widths), mean)
        parts = {other: _per_output(part, marginals[other][0]) for other, part in zip(drawn, nodes.split(widths, -1))}
        values = {
            other: m + v.clamp(min=0).sqrt() * parts[other] for other, (m, v) in marginals.items() if other in parts
        }
        values.setdefault(name, mean.expand(len(weights), *mean.shape))
        total = self._total(name, {other: m for other, (m, _) in marginals.items() if other not in values})
        outputs_meet = self.found.dependence.get(name) == DATAWISE

        def at(node: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            def moved(f: Tensor) -> Tensor:
                return total({**node, name: f})

            # A quadratic ℓ is known from its value, slope and curvature at one point.
            if at_mean:
                found = expand(moved, node[name], outputs_meet)
                return found.value, found.first, found.second
            first, value = torch.func.grad_and_value(moved)(node[name])
            return value, first, first

        with pyro.validation_enabled(False):
            if len(weights) == 1:
                each = tuple(part[None] for part in at({key: part[0] for key, part in values.items()}))
            else:
                each = mapped(at, values)
        value, first, second = each
        if not at_mean:
            # E[ℓ''] = E[ℓ'(f − m)]/v (Stein, 1981), the gradient of the quadrature itself, sees kinks of ℓ and needs no
            # second derivative; 0 variance has no spread.
            positive = variance > 0
            second = second * parts[name] / torch.where(positive, variance, 1.0).sqrt() * positive
        shaped = weights.reshape(-1, *[1] * mean.dim())
        found = Expectation((weights * value).sum(), (shaped * first).sum(0), (shaped * second).sum(0))
        if at_mean:  # E[ℓ] = ℓ(m) + ½ℓ''v
            found.value = found.value + 0.5 * (found.second * variance).sum()
        return found

    def _total(self, name: str, held: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """ℓ of values, with others held, as a GP site's prior meets it: under ``poutine.scale`` that is scaled, too,
        on which the best q does not depend.
        """
        names, site = list(self.trace.nodes), sample_sites(self.trace)[name]
        # What stands before the GP site is the same for all its values.
        skip = {*self.found.gps, *names[: names.index(name)]}
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


def _per_output(nodes: Tensor, like: Tensor) -> Tensor:
    """Nodes ``(K, A)`` shaped to multiply ``like``, ``(..., N)``, one axis for all outputs or one for each."""
    shape = [1] * like.dim() if nodes.shape[-1] == 1 else [*like.shape[:-1], 1]
    return nodes.reshape(len(nodes), *shape)
