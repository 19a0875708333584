"""Newton's steps of x: slopes, curvatures and precisions of densities by their predictors."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from ..numerics.arrow import Arrow, Dense
from ..numerics.linalg import plus_one
from .predictors import Place, Predictors

Slopes = dict[Any, Tensor]  # by places, or pairs of them


class Local(NamedTuple):
    """Densities around some x, or their expectations."""

    density: Tensor  # ℓ
    slope: Tensor  # ∇ℓ by x
    weights: Slopes  # W, −∇²ℓ by pairs of a datum's predictors
    matrix: Tensor  # −∇²ℓ by x of densities without predictors, (num, num); (0, 0) if there are none
    of_residuals: Tensor  # and by each residual


def root_of(found: Predictors, here: Local) -> tuple[Any, bool]:
    """P, or what takes its place, and whether it is P itself."""
    gram = gram_of(found, here)
    if isinstance(gram, Arrow):
        whole = gram.plus(1.0)
        by_size = {pair: part.abs() for pair, part in here.weights.items() if pair[0] == pair[1]}
        other = here._replace(weights=by_size)
        return (whole, True) if whole.is_positive else (gram_of(found, other).plus(1.0), False)  # type: ignore[union-attr]
    precision = plus_one(gram)
    root, info = torch.linalg.cholesky_ex(precision)
    if not info:
        return Dense(root), True
    # Where ℓ is not log-concave negative curvatures count by their size: no step is longer than the model holds.
    values, axes = torch.linalg.eigh(precision)
    return Dense(torch.linalg.cholesky((axes * values.abs().clamp(min=0.5)) @ axes.mT)), False


def grads(value: Tensor, by: Mapping[Any, Tensor]) -> Slopes:
    """The gradients of a number, with their graph."""
    # without predictors, of sites that have none, there is nothing to ask for
    return dict(zip(by, torch.autograd.grad(value, [*by.values()], create_graph=True))) if by else {}


def by_derivatives(found: Predictors, eta: Mapping[Place, Tensor]) -> tuple[Tensor, Slopes, Slopes]:
    """ℓ, its slopes by predictors, and minus its curvatures by pairs of a datum's predictors."""
    density = found.summed(lambda name: found.log_prob(name, eta))
    slopes = grads(density, eta)
    curvatures: Slopes = {}
    for one, slope in slopes.items():
        own = [place for place in eta if place[0] == one[0]]
        if slope.requires_grad:  # a datum's slopes depend on its own predictors: their sum has them all apart
            second = torch.autograd.grad(slope.sum(), [eta[p] for p in own], create_graph=True, allow_unused=True)
            curvatures |= {(one, place): -part for place, part in zip(own, second) if part is not None}
    return density, slopes, curvatures


def by_precision(found: Predictors, here: Local, precision: Union[Dense, Arrow]) -> Tensor:
    """A number with the derivatives of ½ log|P|, ½ tr(C ∂P), where C = P⁻¹: no factor is differentiated."""
    total: Any = found.x.new_zeros(())
    if len(here.matrix):
        total = 0.5 * (precision.covariance * here.matrix).sum()  # type: ignore[union-attr]
    # JC, where J has entries
    along = {place: precision.covariances(rows.detach()) for place, rows in found.rows.items()}
    for (one, other), weight in here.weights.items():
        # W is symmetric, so that tr(C ∂(JᵀWJ)) = 2 tr(CJᵀW ∂J) + tr(JCJᵀ ∂W)
        each = (along[one] * getattr(found.rows[other], "compact", found.rows[other])).sum(-1)
        total = total + weight.detach() @ each + 0.5 * weight @ each.detach()
    return total


def gram_of(found: Predictors, here: Local) -> Union[Tensor, Arrow]:
    """G = JᵀWJ = P − I, and what other densities add to it, without its graph."""
    total = found.layout.nothing(found.x.detach())
    if len(here.matrix):
        total = here.matrix.detach().clone()
    for (one, other), weight in here.weights.items():
        first, second = found.rows[one].detach(), found.rows[other].detach()
        if isinstance(total, Arrow):
            total = total + first.gram(weight.detach(), second)
        else:
            total = total + first.mT @ (weight.detach()[:, None] * second)
    return total
