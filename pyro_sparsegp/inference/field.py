"""The bound of a program whose normal values are one field: expectations over linear predictors.

A parameter of a likelihood is θₙ = g⁻¹(ηₙ) with η = η(0) + Jx + Σ√ρt, affine in the field's x ~ N(m, S) and in
residuals t ~ N(0, I): ηₙ is normal with mean ηₙ(m) and variance (JSJᵀ)ₙₙ + ρₙ. J is a likelihood's features: natural
steps are a Gaussian process's on these features. Parameters of one density (a loc and a scale) are jointly normal.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..gaussians.base import Gaussian
from ..gaussians.steps import recorded
from ..guide.field import Layout, Standardised, require_rows_of_effects, run_standardised
from ..guide.predictors import Densities, Pair, Place, Predictors, design
from ..guide.runs import Priors
from ..numerics.linalg import above_rounding
from ..program.traces import free_values, is_observation, repeatable
from ..warned import warn_once
from .expected import Inputs, log_density_minus_kl, weighted_sum

_LOOKS = {4**k for k in range(1, 16)}  # steps at which it is asked whether predictors are still affine where q is


def bound_of_field(inputs: Inputs) -> Tensor:
    """The bound at a draw of the hyperparameters."""
    guide, args, kwargs = inputs.guide, inputs.args, inputs.kwargs
    facts, joint, ahead = guide.facts, guide.joint, Priors(guide)
    model_trace, guide_trace, whole_trace = guide.at_nodes(ahead, inputs.wrapped, args, kwargs)
    require_rows_of_effects(guide, ahead.normal)
    rows = {name: process.event_shape[0] for name, process in ahead.processes.items()}
    whole, layout = ahead.whole, Layout(joint.field, facts.residuals(rows), joint.eliminated)
    loc = torch.cat(whole.q.loc, -1).detach()
    nodes: Any = model_trace.nodes  # a handler may hold some of the latents
    held = free_values(whole_trace) | {name: nodes[name]["value"] for name in facts.latents if name in nodes}
    held = {name: value for name, value in held.items() if name not in joint.field}
    with torch.enable_grad():
        x = layout.extend(loc).requires_grad_()

        def run(given: Mapping[str, Tensor] = {}, at: Tensor = x) -> Any:
            handler = Standardised(guide, *layout.parts(at), bases=ahead.bases)
            return run_standardised(guide, args, kwargs, handler, {**held, **given}, model_trace).nodes

        sites = run()
        data = [name for name in (*joint.links, *joint.drawn) if name in sites and is_observation(sites[name])]
        seen = [name for name in data if sites[name]["mask"] is not False]
        links = {name: joint.links[name] for name in seen if name in joint.links}
        found = Predictors(sites, links, x, layout, run)
        guide.core.looks += torch.is_grad_enabled()
        if torch.is_grad_enabled() and guide.core.looks in _LOOKS:
            with repeatable(x):
                # A draw that no step is told of. Features keep their graph, which points of q are to have, too:
                # test_record.py::test_a_joint_posterior_over_points_is_recorded.
                away = torch.cat([whole.q.draw(), torch.randn_like(x[layout.num :])], -1).detach()
                there, eta = run({}, away), found.moved(away - x)
                bent = [name for name in links if not found.tells(name, there, eta)]
            for name in bent:
                warn_once(
                    guide.warned,
                    "bent",
                    name,
                    f"densities of site {name!r} depend on {', '.join(joint.field)} in another way than at the guide's "
                    "first call, because of other data or a kink: the bound is wrong. Make a new guide, and call it "
                    "first with these data; for a kink beside a latent give independent=True.",
                    stacklevel=7,
                )
        eta, covariance = _moments(whole.q, layout, found)
    drawn = Densities(lambda at: run({}, at), [name for name in seen if name in joint.drawn], layout)
    first = guide_trace.nodes[next(iter(joint.field))]
    expected = found.expected(eta, covariance, inputs.num_nodes)
    if joint.followed and recorded() is not None:
        following = guide.field.coefficients
        following.note(_gram(found, expected, covariance, following.places[1]))
    total = expected - weighted_sum(whole.q.kl(), {**first, "mask": None})
    if drawn.names:
        # E ℓ over points of q, of which natural steps have E ∇ℓ and E ∇²ℓ
        own, rest = design(layout.extended, loc).tensor_split([layout.num], -1)
        total = total + drawn.expected(torch.cat([whole.q.at(own), rest], -1))  # type: ignore[attr-defined]
    # Of latents below f, E log p(c | f) takes log p(c | f)'s place.
    below = [name for name in data if name in guide_trace.nodes]
    total = total - sum(weighted_sum(nodes[name]["fn"].log_prob(nodes[name]["value"]), nodes[name]) for name in below)
    return total + log_density_minus_kl(model_trace, guide_trace, {*joint.field, *data} - {*below})


def _gram(found: Predictors, expected: Tensor, covariance: Mapping[Pair, Tensor], of: Tensor) -> Tensor:
    """Some rows of JᵀHJ with H = −E ∇²ℓ by each predictor, where that is positive."""
    total = found.x.new_zeros(len(of), found.layout.num)
    for place, rows in found.rows.items():
        # E ∇²ℓ = 2 ∂E[ℓ]/∂C
        (slope,) = torch.autograd.grad(expected, covariance[place, place], retain_graph=True)
        total = total + rows.detach()[:, of].mT @ ((-2 * slope).clamp(min=0)[:, None] * rows.detach())
    return total


def _moments(q: Gaussian, layout: Layout, found: Predictors) -> tuple[dict[Place, Tensor], dict[Pair, Tensor]]:
    """The means of the linear predictors of a run with the field at its mean, and covariances of pairs."""
    eta: dict[Place, Tensor] = {}
    marginals: dict[Place, Any] = {}  # as they are recorded
    covariance: dict[Pair, Tensor] = {}
    blocks: dict[Place, Any] = dict(found.rows)
    if not layout.eliminated:
        blocks = {place: list(features.split(layout.sizes, -1)) for place, features in found.rows.items()}
    for place, features in found.rows.items():
        mean, change = q.moments(blocks[place])
        marginals[place] = q.row
        # η at m, whose derivative by m is that of the features' mean.
        eta[place] = found.eta[place] - features @ found.x[: layout.num].detach() + mean
        prior = features.square().sum(-1) + found.residuals[place].square().sum(-1)
        covariance[place, place] = above_rounding(prior + change, prior)
    for one, other in [pair for pair in found.pairs if pair not in covariance]:
        prior = (found.rows[one] * found.rows[other]).sum(-1) + (found.residuals[one] * found.residuals[other]).sum(-1)
        change = q.cross_change(blocks[one], blocks[other], (marginals[one], marginals[other]))
        covariance[one, other] = prior + change
    return eta, covariance
