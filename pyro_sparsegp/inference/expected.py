"""Expectations in closed form: E[log p(y | θ)] under q, where θ is an affine function of function values.

A distribution takes part that is normal, Laplace, or brings ``expected_log_prob`` (:class:`ExpectedLogProb`): which
sites of a program do is found by structure, once, by :func:`~pyro_sparsegp.program.explore.explore`. At the means of q
the program gives θ's mean, and one more run, mapped or differentiated, θ's variance, whatever the model did:

    Var θ = Σ_e (θ(m + C e) − θ(m))² over the axes e of a row's values, or diag(A Cov(f) Aᵀ) of those at several inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import kl_divergence

from ..guide import AutoSparseGP
from ..numerics.linalg import above_rounding
from ..posterior.drawing import NodeSite
from ..posterior.sparse_posterior import SparsePosterior
from ..program.declared import expectation, over_scale, parameter_of
from ..program.facts import ClosedForms
from ..program.handlers import Rerun
from ..program.mapping import mapped
from ..program.traces import RandomState, bare, sample_sites, without_event
from ..warned import warn_once


def warn_of_unused(guide: AutoSparseGP, found: ClosedForms) -> None:
    """Warn of sites whose distributions bring an expectation that is of no use.

    :raises ValueError: naming the site, if such a one is piecewise constant, so that draws would give no gradient.
    """
    for name, kind in found.unused.items():
        complaint = (
            f"site {name!r} has the distribution {kind.__name__}, which brings its own expectation over normal "
            f"{kind.normal_parameter}, but here this is not an affine function of function values, another parameter, "
            "the scale or the mask depends on them, too, or entries of one term share functions, or these a posterior"
        )
        if getattr(kind, "piecewise_constant", False):
            raise ValueError(
                f"{complaint}. It is piecewise constant, so that draws of function values would give no gradient: "
                "give it one output of a GP for each entry, scaled or shifted at most, or take a likelihood with a "
                "gradient, such as Categorical(logits=...)."
            )
        warn_once(
            guide.warned,
            "expectation not used",
            name,
            f"{complaint}: it is left unused. Write it around an affine function of f.",
            stacklevel=5,
        )


def sum_of_expectations(
    found: ClosedForms, again: Callable[[], Rerun], model_trace: poutine.Trace, guide_trace: poutine.Trace
) -> Optional[Tensor]:
    """The sum of the expectations in closed form under q's marginals, scaled and masked; of latents minus entropy.
    ``None`` if a second run was another, such as one of rows of its own.

    :param again: gives what runs the model with values moved; both traces have GP sites at their means.
    """
    sites: Any = model_trace.nodes
    posteriors = {gp: posterior_at(guide_trace, gp) for gp in found.gps}
    variances, others = {}, {}
    for name in found.rows:
        theta = parameter_of(sites[name]["fn"])
        here = [gp for gp in found.gps if _is_same(theta, sites[gp]["value"])]
        if here:  # θ is f: what trains most often runs the program once
            variances[name] = posteriors[here[0]].variance
        else:
            others[name] = bare(sites[name]["fn"])
    if others or found.functions:
        state, run = RandomState(next(iter(posteriors.values())).mean), again()
        if others:
            axes = found.of_rows.axes(torch.inf)
            variances |= _variances_by_axes(run, posteriors, axes, others)
        if found.functions:
            variances |= _variances_by_rows(run, posteriors, found.functions)
        if state.has_moved:
            return None
    total: Any = 0.0
    for name, variance in variances.items():
        site = sites[name]
        expected = expectation(site["fn"], site["value"], variance)
        if name in guide_trace.nodes:  # of a latent below f: KL[q ‖ p(· | E θ)], and what the spread of θ adds to it
            total = total - divergence(guide_trace.nodes[name], site)
            expected = expected - site["fn"].log_prob(site["value"])
        total = total + weighted_sum(expected, site)
    return total


Axes = Mapping[str, tuple[int, ...]]  # of a grid, by the GP sites that have them


def places_at(node: Sequence[Tensor] | Tensor, axes: Axes) -> dict[str, Any]:
    """A grid's node, as GP sites' standardised places: ``()``, or of several axes one an output."""
    return {
        gp: node[used[0]] if len(used) == 1 else torch.stack([node[axis] for axis in used]) for gp, used in axes.items()
    }


def values_at(posteriors: Mapping[str, NodeSite], node: Sequence[Tensor] | Tensor, axes: Axes) -> dict[str, Tensor]:
    """GP sites' values at a grid's node."""
    places = places_at(node, axes)
    return {gp: posteriors[gp].at_nodes(places).rsample() for gp in places}


def posterior_at(guide_trace: poutine.Trace, name: str) -> Any:
    """The posterior that the guide answered with at a GP site."""
    return without_event(guide_trace.nodes[name]["fn"])[0]


def divergence(guide_site: Any, model_site: Any) -> Tensor:
    """KL of a latent site's posterior from its prior, or an estimate of it from the draw, with its scale and mask."""
    q, p = guide_site["fn"], model_site["fn"]
    if q is p:  # drawn from the model
        return torch.zeros(())
    if not q.has_rsample:
        raise ValueError(
            f"site {guide_site['name']!r} has a posterior without reparameterised draws, {q}; TraceQuadrature_ELBO has "
            "no gradient for it. Use a reparameterised posterior, or enumerate and sum the site out in the model."
        )
    try:
        value = kl_divergence(q, p)
    except NotImplementedError:
        value = q.log_prob(guide_site["value"]) - p.log_prob(guide_site["value"])
    return weighted_sum(value, guide_site)


def weighted_sum(value: Tensor, site: Any) -> Tensor:
    """The sum of a site's terms, with its scale and mask."""
    return scale_and_mask(value, site["scale"], site["mask"]).sum()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, in the same memory."""
    return one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()


def _variances_by_axes(
    run: Rerun, posteriors: dict[str, NodeSite], axes: Axes, locations: dict[str, Any]
) -> dict[str, Tensor]:
    """Σ (θ(e) − θ(0))² over the axes e of standardised values t, of which a row's are an affine function.

    :param locations: by site, its distribution at t = 0.
    """
    mean = next(iter(posteriors.values())).mean
    num = 1 + max(axis for used in axes.values() for axis in used)

    def at(node: Tensor) -> tuple[Tensor, ...]:
        held = sample_sites(run(values_at(posteriors, node, axes)))
        moves = {name: parameter_of(held[name]["fn"]) - parameter_of(fn) for name, fn in locations.items()}
        return tuple(over_scale(locations[name], move).square() for name, move in moves.items())

    every = torch.eye(num, dtype=mean.dtype, device=mean.device)
    squares = at(every[0]) if num == 1 else tuple(part.sum(0) for part in mapped(at, every))
    return dict(zip(locations, squares))


def _variances_by_rows(run: Rerun, posteriors: dict[str, SparsePosterior], names: Iterable[str]) -> dict[str, Tensor]:
    """Σ over GP sites of diag(A Cov(f) Aᵀ), with A off the program by autograd; of a multivariate normal over its
    scale, L⁻¹A.
    """
    trains = torch.is_grad_enabled()  # A may have parameters
    with torch.enable_grad():
        means = {gp: posterior.mean.detach().requires_grad_() for gp, posterior in posteriors.items()}
        held = sample_sites(run(means))
        jacobians = {name: _jacobian(parameter_of(held[name]["fn"]), list(means.values()), trains) for name in names}
    found = {}
    for name, rows in jacobians.items():
        fn = bare(held[name]["fn"])
        total: Any = 0.0
        for q, row in zip(posteriors.values(), rows):
            if row is not None:
                weights = over_scale(fn, row).movedim(0, -2)
                change = q.coefficients.moments([weights @ phi for phi in q.features])[1]
                # Added up over the outputs of a process, whose functions are independent.
                prior, change = (v.reshape(-1, v.shape[-1]).sum(0) for v in (q.prior_variance_of(weights), change))
                total = total + above_rounding(prior + change, prior)
        found[name] = total.reshape(parameter_of(fn).shape)
    return found


def _jacobian(value: Tensor, by: list[Tensor], again: bool) -> tuple[Optional[Tensor], ...]:
    """∂ value / ∂ each, ``(K, ...)``; ``None`` where there is none."""
    one = torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)
    back = partial(torch.autograd.grad, value, by, retain_graph=True, create_graph=again, allow_unused=True)
    try:
        return back(one, is_grads_batched=True)
    except RuntimeError:  # of a sparse A, say, of which torch has no product with several rows at once
        return tuple(None if rows[0] is None else torch.stack(rows) for rows in zip(*map(back, one)))
