"""Newton's steps of x: slopes, curvatures and precisions of densities by their predictors."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.arrow import Arrow, gram
from .predictors import Place, Predictors

Slopes = dict[Any, Tensor]  # by places, or pairs of them


class Local(NamedTuple):
    """Densities around some x, or their expectations."""

    density: Tensor  # ℓ
    slope: Tensor  # ∇ℓ by x
    weights: Slopes  # W, −∇²ℓ by pairs of a datum's predictors
    matrix: Tensor  # −∇²ℓ by common entries of x, (C, C), of densities without predictors
    of_residuals: Tensor  # and by each residual


def root_of(found: Predictors, here: Local) -> tuple[Arrow, bool]:
    """P, or what takes its place, and whether it is P itself."""
    precision = gram_of(found, here).plus(1.0)
    # Where ℓ is not log-concave negative curvatures count by their size: no step is longer than the model holds.
    return (precision, True) if precision.is_positive else (precision.lifted(0.5), False)


def grads(value: Tensor, by: Mapping[Any, Tensor]) -> Slopes:
    """The gradients of a number by predictors, if there are any, with their graph; 0 by those it does not have."""
    options: Any = {"create_graph": True, "materialize_grads": True}
    return dict(zip(by, torch.autograd.grad(value, [*by.values()], **options))) if by else {}


def by_derivatives(found: Predictors, eta: Mapping[Place, Tensor]) -> tuple[Tensor, Slopes, Slopes]:
    """ℓ, its slopes by predictors, and minus its curvatures by pairs of a datum's predictors."""
    density = found.summed(lambda name: found.log_prob(name, eta))
    slopes = grads(density, eta)
    curvatures: Slopes = {}
    for one, slope in slopes.items():
        own = found.of(one[0])
        if slope.requires_grad:  # a datum's slopes depend on its own predictors: their sum has them all apart
            second = torch.autograd.grad(slope.sum(), [eta[p] for p in own], create_graph=True, allow_unused=True)
            curvatures |= {(one, place): -part for place, part in zip(own, second) if part is not None}
    return density, slopes, curvatures


def by_precision(found: Predictors, here: Local, precision: Arrow) -> Tensor:
    """A number with the derivatives of ½ log|P|, ½ tr(C ∂P), where C = P⁻¹: no factor is differentiated."""
    total: Any = 0.5 * (precision.common_covariance * here.matrix).sum()
    # JC, where J has entries
    along = {place: precision.covariances(rows.detach()) for place, rows in found.rows.items()}
    for (one, other), weight in here.weights.items():
        # W is symmetric, so that tr(C ∂(JᵀWJ)) = 2 tr(CJᵀW ∂J) + tr(JCJᵀ ∂W)
        each = (along[one] * getattr(found.rows[other], "compact", found.rows[other])).sum(-1)
        total = total + weight.detach() @ each + 0.5 * weight @ each.detach()
    return total


def gram_of(found: Predictors, here: Local) -> Arrow:
    """G = JᵀWJ = P − I, and what other densities add to it, without its graph."""
    _, *others = found.layout.nothing(here.matrix).parts
    total, rows = Arrow(here.matrix.detach(), *others), found.detached().rows
    for one, phi in rows.items():  # Σ_j J_jᵀ(Σ_k W_jk J_k)
        pairs = [(rows[b], weight.detach()) for (a, b), weight in here.weights.items() if a == one]
        parts = [getattr(other, "compact", other) * weight[:, None] for other, weight in pairs]
        psi: Any = sum(parts, 0 * getattr(phi, "compact", phi))
        total = total + gram(phi, psi)
    return total
