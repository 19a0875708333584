"""The variances under q of normal densities' locations that are affine functions of GP sites' values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.linalg import above_rounding, solve_lower
from ..posterior.drawing import NodeSite
from ..posterior.sparse_posterior import SparsePosterior
from ..program.affine import parameter_of
from ..program.bare import bare
from .axes import at_axes

__all__ = ["Run", "variances_by_axes", "variances_by_rows"]

Run = Callable[[dict[str, Tensor]], Any]


def variances_by_rows(run: Run, posteriors: dict[str, SparsePosterior], names: Iterable[str]) -> dict[str, Tensor]:
    """The variances under q of locations Af + b, by site: Σ over GP sites of diag(A Cov(f) Aᵀ), with A off the program
    by autograd; of a multivariate normal, those of the locations over its scale, L⁻¹(Af + b).

    :param run: gives the sites of a run with GP sites at values, all else held.
    """
    trains = torch.is_grad_enabled()  # A may have parameters
    with torch.enable_grad():
        means = {gp: posterior.mean.detach().requires_grad_() for gp, posterior in posteriors.items()}
        held = run(means)
        jacobians = {name: _jacobian(parameter_of(held[name]["fn"]), list(means.values()), trains) for name in names}
    found = {}
    for name, rows in jacobians.items():
        fn = bare(held[name]["fn"])
        weights = {gp: _over_scale(fn, row).movedim(0, -2) for gp, row in zip(means, rows) if row is not None}
        priors = {gp: posteriors[gp].prior_variance_of(row) for gp, row in weights.items()}
        parts = []
        for group in _of_one_posterior({gp: posteriors[gp] for gp in weights}):
            prior = _summed([priors[gp] for gp in group])
            variance = above_rounding(prior + _change({gp: weights[gp] for gp in group}, posteriors), prior)
            parts.append(variance.reshape(-1, variance.shape[-1]).sum(0))
        found[name] = _summed(parts).reshape(fn.loc.shape)
    return found


def _of_one_posterior(posteriors: dict[str, SparsePosterior]) -> list[list[str]]:
    """GP sites, those of one posterior together."""
    groups: dict[int, list[str]] = {}
    for gp, posterior in posteriors.items():
        share = posterior.coefficients.share
        groups.setdefault(id(posterior if share is None else share.whole), []).append(gp)
    return list(groups.values())


def _change(weights: dict[str, Tensor], posteriors: dict[str, SparsePosterior]) -> Tensor:
    """diag(Ψ(S − I)Ψᵀ) of the features Ψ = AΦ of a sum over the GP sites of one posterior."""
    features = {gp: [row @ phi for phi in posteriors[gp].features] for gp, row in weights.items()}
    first = posteriors[next(iter(weights))].coefficients
    if first.share is None:
        return first.moments(next(iter(features.values())))[1]
    padded = [posteriors[gp].coefficients.share.padded(blocks) for gp, blocks in features.items()]
    return first.share.whole.q.moments([_summed(list(blocks)) for blocks in zip(*padded)])[1]


def _summed(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


def _jacobian(value: Tensor, by: list[Tensor], again: bool) -> tuple[Optional[Tensor], ...]:
    """∂ value / ∂ each, ``(K, ...)``; ``None`` where there is none."""
    one = torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)
    back = partial(torch.autograd.grad, value, by, retain_graph=True, create_graph=again, allow_unused=True)
    try:
        return back(one, is_grads_batched=True)
    except RuntimeError:  # of a sparse A, say, of which torch has no product with several rows at once
        return tuple(None if rows[0] is None else torch.stack(rows) for rows in zip(*map(back, one)))


def _over_scale(fn: Any, rows: Tensor) -> Tensor:
    """L⁻¹A of a multivariate normal, A of another."""
    if isinstance(fn, torch.distributions.Normal):
        return rows
    return solve_lower(fn.scale_tril, rows.reshape(*fn.loc.shape, -1)).reshape(rows.shape)


def variances_by_axes(
    run: Run, posteriors: dict[str, NodeSite], axes: dict[str, tuple[int, ...]], locations: dict[str, Any]
) -> dict[str, Tensor]:
    """The variances under q of locations μ(t) by site, Σ (μ(e) − μ(0))² over the axes e of standardised t, values
    being an affine function of t; of a multivariate normal, those of L⁻¹μ.

    :param run: gives the sites of a run with GP sites at values, all else held.
    :param locations: by site, its distribution at t = 0.
    """
    found: dict[str, Tensor] = {}
    num = 1 + max(axis for used in axes.values() for axis in used)
    mean = next(iter(posteriors.values())).mean
    for one in torch.eye(num, dtype=mean.dtype, device=mean.device):
        nodes = {gp: at_axes(one, used) for gp, used in axes.items()}
        held = run({gp: posterior.at_nodes(nodes).rsample() for gp, posterior in posteriors.items()})
        for name, fn in locations.items():
            square = _over_scale(fn, parameter_of(held[name]["fn"]) - fn.loc).square()
            found[name] = found[name] + square if name in found else square
    return found
