"""How well a guide predicts data that it was not trained on, for early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..guide import AutoSparseGP
from ..program.handlers import observes
from ..program.likelihood import mapped, normal_nodes
from ..program.masks import unmasked_rows
from ..program.traces import all_sites, held_trace, is_observation, repeatable, whole_plates

__all__ = ["log_score"]


@torch.no_grad()
def log_score(model: Callable, guide: AutoSparseGP, *args: Any, **kwargs: Any) -> float:
    """The mean log predictive density of the observations given, in nats; larger is better.

    (1/N) Σₙ log Σ_k w_k p(yₙ | f = m + s·z_k) with Gauss-Hermite nodes z_k of the GP sites' marginals, other latents at
    their posterior medians: a plug-in score that costs one posterior, for choosing among states of one guide.
    :func:`~pyro_sparsegp.diagnostics.predictive_scores` is over the draws of the other latents, and exact.

    :param args: the model's arguments, with observations.
    :raises ValueError: if nothing is observed.
    """
    with repeatable(guide.like), whole_plates(), pyro.validation_enabled(False):
        posteriors = guide.posterior_at_medians(*args, **kwargs)
        structure = guide.structure
        assert structure is not None
        inner, latents = structure.inner, structure.latents
        if not observes(guide.model, structure.rows, guide.like, args, kwargs):
            raise ValueError("held_out: the model observes nothing at these arguments; give the observations too")
        medians = {name: site["value"] for name, site in all_sites(guide.trace) if name in latents}
        means = {name: q.mean for name, q in posteriors.items()}
        free = {name: q for name, q in posteriors.items() if name not in inner}
        shapes = {name: q.batch_shape.numel() for name, q in free.items()}
        nodes, weights = normal_nodes(sum(shapes.values()), guide.like)

        def is_data(name: str, site: Any) -> bool:
            return name in structure.rows and is_observation(site) and not guide.is_given(name, site)

        def densities(node: Tensor) -> tuple[Tensor, ...]:
            values = dict(means)
            for (name, q), own in zip(free.items(), node.split(list(shapes.values()))):
                values[name] = q.mean + q.variance.clamp(min=0).sqrt() * own.reshape(*q.batch_shape, 1)
            trace = held_trace(model, {**medians, **values}, args, kwargs)
            return tuple(
                scale_and_mask(site["fn"].log_prob(site["value"]), 1.0, site["mask"])
                for name, site in all_sites(trace)
                if is_data(name, site)
            )

        found = mapped(densities, nodes)
        trace = held_trace(model, {**medians, **means}, args, kwargs)
        rows = [unmasked_rows(site) for name, site in all_sites(trace) if is_data(name, site)]
    scored = [(part, there) for part, there in zip(found, rows) if there is None or there.any()]
    total = 0.0 if scored else math.nan
    for part, there in scored:
        log_density = torch.logsumexp(part.reshape(len(part), -1) + weights.log()[:, None], 0)
        total += float(log_density.mean() if there is None else log_density.sum() / there.sum())
    return total if math.isfinite(total) else -math.inf
