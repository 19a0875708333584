"""The bound of a program whose normal values are one field: expectations over linear predictors.

A parameter of a likelihood is θₙ = g⁻¹(ηₙ) with η = η(0) + Jx + Σ√ρt, affine in the field's x ~ N(m, S) and in
residuals t ~ N(0, I): ηₙ is normal with mean ηₙ(m) and variance (JSJᵀ)ₙₙ + ρₙ. J is a likelihood's features, by which
natural steps are those of a Gaussian process on them. Parameters of one density (a loc and a scale) are jointly normal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..guide import AutoSparseGP
from ..guide.field import Layout, Standardised, residuals_of, run_standardised
from ..guide.predictors import Place, Predictors
from ..guide.runs import Priors
from ..numerics.linalg import above_rounding
from ..program.traces import free_values, is_observation
from .expected import weighted_sum
from .grid import log_density_minus_kl


def bound_of_field(
    guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any], num_nodes: int
) -> Tensor:
    """The bound at a draw of the hyperparameters.

    :param num_nodes: of Gauss-Hermite quadrature, along an axis.
    """
    facts = guide.facts
    ahead = Priors(guide)
    model_trace, guide_trace, whole_trace = guide.at_nodes({}, wrapped, args, kwargs, ahead=ahead)
    rows = {name: process.event_shape[0] for name, process in ahead.processes.items()}
    whole, layout = ahead.whole, Layout(facts.field, residuals_of(facts, rows), facts.owned)
    loc = torch.cat(whole.q.loc, -1).detach()
    nodes: Any = model_trace.nodes  # a handler may hold some of the latents
    held = free_values(whole_trace) | {name: nodes[name]["value"] for name in facts.latents if name in nodes}
    held = {name: value for name, value in held.items() if name not in facts.field}
    with torch.enable_grad():
        x = torch.cat([loc, loc.new_zeros(layout.extended - layout.num)]).requires_grad_()

        def run(given: Mapping[str, torch.Tensor] = {}) -> Any:
            handler = Standardised(guide, *layout.parts(x), bases=ahead.bases)
            return run_standardised(guide, args, kwargs, handler, {**held, **given}, model_trace).nodes

        sites = run()
        links = {name: own for name, own in facts.links.items() if name in sites and is_observation(sites[name])}
        found = Predictors(sites, links, x, layout, run)
        moments = _moments(whole.q, layout, found, x)
    first = guide_trace.nodes[next(iter(facts.field))]
    total = -weighted_sum(whole.q.kl(), {**first, "mask": None})
    for name in links:
        if sites[name]["mask"] is not False:
            own = {key: moments[name, key] for key in links[name]}
            covariance = _covariance(whole.q, own)
            total = total + found.expected(name, {key: one[0] for key, one in own.items()}, covariance, num_nodes)
    total = total + log_density_minus_kl(model_trace, guide_trace, {*facts.field, *links})
    return total if torch.is_grad_enabled() else total.detach()


def _moments(q: Any, layout: Layout, found: Predictors, x: Tensor) -> dict[Place, tuple[Tensor, Tensor, Any, Any]]:
    """The means and variances of the linear predictors of a run with the field at its mean, their features and rows.

    :param x: what that run was standardised by.
    """
    at = {}
    for place in found.eta:
        features, residual = found.rows[place], found.residuals[place]
        blocks = list(features.split(layout.sizes, -1))
        mean, change = q.moments(blocks)
        prior = features.square().sum(-1) + residual.square().sum(-1)
        # η at m, whose derivative by m is that of the features' mean.
        here = found.eta[place] - features @ x[: layout.num].detach() + mean
        at[place] = here, above_rounding(prior + change, prior), blocks, q.row
    return at


def _covariance(q: Any, moments: dict[str, tuple[Tensor, Tensor, Any, Any]]) -> dict[tuple[str, str], Tensor]:
    """By pairs of the parameters of one density, one or two."""
    found = {(key, key): variance for key, (_, variance, *_) in moments.items()}
    for one, other in itertools.combinations(moments, 2):
        (*_, blocks, row), (*_, others, its) = moments[one], moments[other]
        prior = sum((phi * psi).sum(-1) for phi, psi in zip(blocks, others))
        found[one, other] = prior + q.cross_change(blocks, others, (row, its))
    return found
