"""The likelihood of projected data as a training objective for computation-aware posteriors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from pyro import poutine
from pyro.infer import ELBO
from pyro.infer.util import torch_item
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..bases import ProjectedFeatures
from ..guide import AutoSparseGP
from ..program.facts import Structure
from ..program.traces import without_event
from .expected import divergence, weighted_sum

__all__ = ["ProjectedLikelihood"]


class ProjectedLikelihood(ELBO):
    """An objective: log p(Sᵀy) instead of the evidence lower bound (Wenger et al., 2024, eq. 9 and lemma S2).

    −½((y − μ)ᵀS(SᵀK̂S)⁻¹Sᵀ(y − μ) + log|SᵀK̂S| − log|SᵀS| + i log 2π): the evidence of the data projected on
    orthonormalised actions. It replaces the densities of observed sites that depend on a GP; other
    observed sites and the divergences of other latents stay. It is no bound on log p(y). Wenger et al. (2024) find that
    hyperparameters trained by it generalise worse (figures S1 and S2): the default,
    :class:`~pyro_sparsegp.TraceQuadrature_ELBO`, is the better choice.

    :param num_particles: the number of draws of other latents to average over.
    """

    def __init__(self, num_particles: int = 1, **kwargs: Any) -> None:
        if kwargs.get("vectorize_particles"):
            raise ValueError("ProjectedLikelihood does not take vectorize_particles=True; use False")
        super().__init__(num_particles=num_particles, **kwargs)

    def loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the objective, in nats.

        :raises ValueError: if it is NaN.
        """
        return _finite(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the objective, in nats; its gradient is added to the parameters'."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        value = _finite(loss)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        return value

    def differentiable_loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the objective as a scalar tensor.

        :raises ValueError: naming the site, for a family without projections or a likelihood not Gaussian in f.
        """
        unwrapped = poutine.unwrap(guide)
        if not isinstance(unwrapped, AutoSparseGP) or model != unwrapped.model:
            raise ValueError("ProjectedLikelihood needs an AutoSparseGP guide and that guide's own model")
        unwrapped.prepare(*args, **kwargs)
        evaluate = partial(self._one, unwrapped, guide, args, kwargs)
        found = [evaluate() for _ in range(self.num_particles)]
        return -sum(found[1:], found[0]) / len(found)

    def _get_trace(self, model: Callable, guide: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError("ProjectedLikelihood has no traces to average")

    def _one(self, guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        structure = guide.structure
        assert structure is not None
        zero = guide.like.new_zeros(())
        model_trace, guide_trace, _ = guide.at_nodes(dict.fromkeys(structure.gps, zero), wrapped, args, kwargs)
        # Σ log p(Sᵀy) of the GP sites, lemma S2, log p(y) of sites that are not after one, − Σ KL of other latents
        total: Any = zero
        sites: Any = model_trace.nodes
        for name, site in sites.items():
            if site["type"] != "sample" or name in structure.downstream or site_is_subsample(site):
                continue
            if name in structure.gps:
                total = total + _evidence(name, site, guide_trace.nodes[name], structure)
            elif name in guide_trace.nodes:
                total = total - divergence(guide_trace.nodes[name], site)
            else:
                total = total + weighted_sum(site["fn"].log_prob(site["value"]), site)
        return total


def _evidence(name: str, site: Any, guide_site: Any, structure: Structure) -> Tensor:
    q, _ = without_event(guide_site["fn"])
    if not isinstance(q.basis, ProjectedFeatures) or name not in structure.quadratic:
        raise ValueError(
            "ProjectedLikelihood is for GP sites of the family ComputationAware whose likelihood is Gaussian in the "
            f"function values; site {name!r} is not. Use TraceQuadrature_ELBO."
        )
    return weighted_sum(q.coefficients.log_evidence(q.basis.actions.log_gram), site)


def _finite(loss: Tensor) -> float:
    value = torch_item(loss)
    if math.isnan(value):
        raise ValueError("the projected-data likelihood is NaN: look for NaN in the data, or too large a learning rate")
    return value
