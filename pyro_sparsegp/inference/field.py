"""The bound of a program whose normal values are one field: expectations over linear predictors.

A parameter of a likelihood is θₙ = g⁻¹(ηₙ) with η = η(0) + Jx + Σ√ρt, affine in the field's x ~ N(m, S) and in
residuals t ~ N(0, I): ηₙ is normal with mean ηₙ(m) and variance (JSJᵀ)ₙₙ + ρₙ. J is a likelihood's features, by which
natural steps are those of a Gaussian process on them. Parameters of one density (a loc and a scale) are jointly normal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..guide import AutoSparseGP
from ..guide.field import Layout, Predictors, Standardised, residuals_of, run_standardised
from ..guide.runs import Priors
from ..numerics.linalg import above_rounding
from ..program.declared import expectation, is_declared
from ..program.traces import free_values, is_observation, sample_sites
from .expected import divergence, weighted_sum

__all__ = ["bound_of_field"]


def bound_of_field(
    guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any], rule: tuple[Tensor, Tensor]
) -> Tensor:
    """The bound at a draw of the hyperparameters.

    :param rule: nodes and weights of Gauss-Hermite quadrature.
    """
    facts = guide.facts
    ahead = Priors(guide)
    model_trace, guide_trace, whole_trace = guide.at_nodes({}, wrapped, args, kwargs, ahead)
    rows = {name: process.event_shape[0] for name, process in ahead.processes.items()}
    whole, layout = ahead.whole(), Layout(facts.field, residuals_of(facts, rows), facts.owned)
    loc = torch.cat(whole.q.loc, -1).detach()
    nodes: Any = model_trace.nodes  # a handler may hold some of the latents
    held = free_values(whole_trace) | {name: nodes[name]["value"] for name in facts.latents if name in nodes}
    held = {name: value for name, value in held.items() if name not in facts.field}
    with torch.enable_grad():
        x = torch.cat([loc, loc.new_zeros(layout.extended - layout.num)]).requires_grad_()
        handler = Standardised(guide, *layout.parts(x), bases=ahead.bases)
        sites: Any = run_standardised(guide, args, kwargs, handler, held, model_trace).nodes
        links = {name: own for name, own in facts.links.items() if name in sites and is_observation(sites[name])}
        expected = _Expected(whole.q, layout, Predictors(sites, links, x, layout), x)
    first = guide_trace.nodes[next(iter(facts.field))]
    total = -weighted_sum(whole.q.kl(), {**first, "mask": None})
    for name, site in sample_sites(model_trace).items():
        if name in facts.field or site["mask"] is False or site_is_subsample(site):
            continue
        if name in links:
            total = total + expected.of(name, rule)
        elif name in guide_trace.nodes:
            total = total - divergence(guide_trace.nodes[name], site)
        else:
            total = total + weighted_sum(sites[name]["fn"].log_prob(sites[name]["value"]), sites[name])
    return total if torch.is_grad_enabled() else total.detach()


class _Expected:
    """Expectations over the linear predictors of a run with the field at its mean.

    :param x: what that run was standardised by.
    """

    def __init__(self, q: Any, layout: Layout, found: Predictors, x: Tensor) -> None:
        self.q, self.found = q, found
        self.at: dict[tuple[str, str], tuple[Tensor, Tensor, list[Tensor], Any]] = {}
        for place in found.eta:
            features, residual = found.dense(place), found.residuals[place]
            blocks = list(features.split(layout.sizes, -1))
            mean, change = q.moments(blocks)
            prior = features.square().sum(-1) + residual.square().sum(-1)
            # η at m, whose derivative by m is that of the features' mean.
            here = found.eta[place] - features @ x[: layout.num].detach() + mean
            self.at[place] = here, above_rounding(prior + change, prior), blocks, q.row

    def of(self, name: str, rule: tuple[Tensor, Tensor]) -> Tensor:
        """The expectation of a site's log density, scaled, masked and summed."""
        found, keys = self.found, list(self.found.links[name])
        value = found.sites[name]["value"]
        if keys == ["loc"] and is_declared(found.sites[name]["fn"]):
            mean, variance, *_ = self.at[name, "loc"]
            fn = found.distribution(name, {"loc": mean})
            return found.summed(name, expectation(fn, value, variance.reshape(fn.batch_shape)))
        nodes, weights = rule
        grid = torch.cartesian_prod(*[torch.arange(len(nodes), device=nodes.device)] * len(keys)).reshape(-1, len(keys))
        eta = {}
        for key, roots in zip(keys, self._roots(name, keys)):
            moves = sum(root * nodes[grid[:, j], None] for j, root in enumerate(roots))
            eta[key] = self.at[name, key][0] + moves
        each = found.distribution(name, eta).log_prob(value)
        return found.summed(name, torch.tensordot(weights[grid].prod(-1), each, 1))

    def _roots(self, name: str, keys: list[str]) -> list[list[Tensor]]:
        """The rows of the Cholesky factor of the covariance of each datum's predictors."""
        _, variance, blocks, row = self.at[name, keys[0]]
        first = variance.sqrt()
        if len(keys) == 1:
            return [[first]]
        _, other, others, its = self.at[name, keys[1]]
        prior = sum((phi * psi).sum(-1) for phi, psi in zip(blocks, others))
        across = (prior + self.q.cross_change(blocks, others, (row, its))) / first
        return [[first], [across, above_rounding(other - across.square(), other).sqrt()]]
