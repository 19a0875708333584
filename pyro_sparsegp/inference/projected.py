"""The likelihood of projected data as a training objective for computation-aware posteriors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..bases.actions import ProjectedFeatures
from ..guide import AutoSparseGP
from .expected import log_density_minus_kl, posterior_at, weighted_sum
from .quadrature import TraceQuadrature_ELBO


class ProjectedLikelihood(TraceQuadrature_ELBO):
    """An objective: log p(Sᵀy) instead of the evidence lower bound (Wenger et al., 2024, eq. 9 and lemma S2).

    −½((y − μ)ᵀS(SᵀK̂S)⁻¹Sᵀ(y − μ) + log|SᵀK̂S| − log|SᵀS| + i log 2π): the evidence of the data projected on
    orthonormalised actions. It replaces the densities of observed sites that depend on a GP; other
    observed sites and the divergences of other latents stay. It is no bound on log p(y). Wenger et al. (2024) find that
    hyperparameters trained by it generalise worse (figures S1 and S2): the default,
    :class:`~pyro_sparsegp.TraceQuadrature_ELBO`, is the better choice.

    :param num_particles: the number of draws of other latents to average over.
    :raises ValueError: at a step, naming the site, for a family without projections or a likelihood not Gaussian in f.
    """

    def __init__(self, num_particles: int = 1, **kwargs: Any) -> None:
        super().__init__(num_particles=num_particles, **kwargs)

    def _bound(self, guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        facts = guide.facts
        nodes = dict.fromkeys(facts.gps, guide.like.new_zeros(()))
        model_trace, guide_trace, _ = guide.at_nodes(nodes, wrapped, args, kwargs)
        # Σ log p(Sᵀy) of the GP sites, lemma S2, log p(y) of sites that are not after one, − Σ KL of other latents
        total = log_density_minus_kl(model_trace, guide_trace, {*facts.gps, *facts.downstream})
        for name in facts.gps:
            q = posterior_at(guide_trace, name)
            if not isinstance(q.basis, ProjectedFeatures) or name not in facts.quadratic:
                raise ValueError(
                    "ProjectedLikelihood is for GP sites of the family ComputationAware whose likelihood is Gaussian "
                    f"in the function values; site {name!r} is not. Use TraceQuadrature_ELBO."
                )
            total = total + weighted_sum(q.coefficients.log_evidence(q.basis.actions.log_gram), model_trace.nodes[name])
        return total
