"""The one reader of likelihoods: derivatives of a program's log densities by function values, all else held.

It runs the model with every value of an earlier run held, so that it needs that run's trace, and no guide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Optional, cast

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from .declared import expectation, is_declared, parameter_of
from .dependence import DATAWISE
from .facts import Structure
from .handlers import held_trace
from .likelihood import Expectation, expand, mapped, normal_nodes
from .traces import log_densities, sample_sites

__all__ = ["DrawingReader", "Marginal", "Reader", "RefusedError", "with_priors"]

Marginal = tuple[Tensor, Tensor]  # mean and variance of a GP site's values


class Reader:
    """The log densities downstream of GP sites and their derivatives by function values, all else held.

    :param found: what is known of the model.
    :param trace: a run of the model whose values, scales and masks are held.
    :param closed: the sites after a GP site, if all of them know their expectation over its values.
    """

    def __init__(
        self,
        model: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        found: Structure,
        trace: poutine.Trace,
        closed: Collection[str] = (),
    ) -> None:
        self.model, self.args, self.kwargs, self.found, self.trace = model, args, kwargs, found, trace
        self.closed = closed

    def run(self, values: Mapping[str, Tensor]) -> poutine.Trace:
        """A run of the model with GP sites at these values."""
        return held_trace(self.model, values, self.args, self.kwargs, self.trace)

    def meeting(self, name: str) -> set[str]:
        """The GP sites that meet this one in a term of a density."""
        return {other for pair in self.found.interactions if name in pair for other in pair} - {name}

    def expect(self, name: str, marginals: Mapping[str, Marginal], at_mean: bool) -> Expectation:
        """E[ℓ], E[ℓ'] and E[ℓ''] by a GP site's values over its marginals and those of the GP sites it meets.

        :param at_mean: expand ℓ to second order at the mean, where it is exact if ℓ is quadratic.
        """
        mean, variance = marginals[name]
        if self.closed and not at_mean and (known := self._in_closed_form(name, mean, variance)) is not None:
            return known
        meeting = [other for other in marginals if other in self.meeting(name)]
        drawn = meeting if at_mean else [name, *meeting]
        widths = [self._axes(other, marginals[other][0]) for other in drawn]
        # f = m + √v ε, one axis of ε for each function; E[·] = Σₖ wₖ (·)(εₖ).
        nodes, weights = normal_nodes(sum(widths), mean, max(self.found.num_nodes, 2))  # one node has no spread
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

        def total(moved: Mapping[str, Tensor]) -> Tensor:
            trace = self.run({**held, **moved})
            # What stands before the GP site is the same for all its values.
            names = list(trace.nodes)
            skip = {*self.found.gps, *names[: names.index(name)]}
            none = moved[name].new_zeros(())
            return sum((part.sum() for part in log_densities(trace, skip).values()), none) / _scale(trace, name)

        return total

    def _in_closed_form(self, name: str, mean: Tensor, variance: Tensor) -> Optional[Expectation]:
        """The same over parameters θ = af + b of one value each: E[ℓ'] = ∂E[ℓ]/∂m and E[ℓ''] = 2∂E[ℓ]/∂v (Price, 1958);
        ``None`` where a distribution has become another, or has more than one θ for a value.
        """
        again = torch.is_grad_enabled()
        with torch.enable_grad(), pyro.validation_enabled(False):
            f, v = mean.detach().requires_grad_(), variance.detach().clamp(min=0).requires_grad_()
            trace, total = self.run({name: f}), f.new_zeros(())
            for site in (sample_sites(trace)[other] for other in self.closed):
                if not is_declared(site["fn"]) or parameter_of(site["fn"]).shape != f.shape:
                    return None
                (slope,) = torch.autograd.grad(parameter_of(site["fn"]).sum(), f, create_graph=True)
                expected = expectation(site["fn"], site["value"], slope.square() * v)
                total = total + scale_and_mask(expected, site["scale"], site["mask"]).sum()
            total = total / _scale(trace, name)
            first, by_variance = torch.autograd.grad(total, (f, v), create_graph=again)
        return Expectation(total if again else total.detach(), first, 2 * by_variance)

    def _axes(self, name: str, mean: Tensor) -> int:
        """How many axes of nodes a site's values need: outputs that meet in one term have one each."""
        return mean[..., 0].numel() if self.found.dependence.get(name) == DATAWISE else 1


class RefusedError(Exception):
    """A program can't be mapped over nodes together with what draws its latents."""


class DrawingReader(Reader):
    """Reads log densities off a run that draws the latents, by this run itself, which is mapped over the nodes.

    :param draw: that run with GP sites at values: its trace.
    """

    def __init__(
        self, draw: Callable[[Mapping[str, Tensor]], poutine.Trace], found: Structure, closed: Collection[str]
    ) -> None:
        super().__init__(draw, (), {}, found, poutine.Trace(), closed)
        self.drawn = False

    def run(self, values: Mapping[str, Tensor]) -> poutine.Trace:
        if self.drawn:  # node by node it would draw other latents at each
            raise RefusedError
        self.drawn = True
        return with_priors(self.model(values))


def with_priors(trace: poutine.Trace) -> poutine.Trace:
    """A guide's trace in which latents have the densities that the model gives them."""
    new: Any = trace.copy()
    for name, site in list(new.nodes.items()):
        new.nodes[name] = {**site, "fn": (site.get("infer") or {}).get("prior", site.get("fn"))}
    return cast(poutine.Trace, new)


def _scale(trace: poutine.Trace, name: str) -> Any:
    scale = sample_sites(trace)[name]["scale"]
    if isinstance(scale, Tensor) and scale.numel() > 1:
        raise ValueError(
            f"GP site {name!r} has a poutine.scale with {scale.numel()} values; a family whose sites are read off "
            "the likelihood takes one number: scale the likelihood's site by them, or take a family such as SVGP."
        )
    return scale


def _per_output(nodes: Tensor, like: Tensor) -> Tensor:
    """Nodes ``(K, A)`` shaped to multiply ``like``, ``(..., N)``, one axis for all outputs or one for each."""
    shape = [1] * like.dim() if nodes.shape[-1] == 1 else [*like.shape[:-1], 1]
    return nodes.reshape(len(nodes), *shape)
