"""Draws of hyperparameters that a posterior weighs, of normals that go to where it is: adaptive importance sampling
(Cornuet, Marin, Mira and Robert, 2012).
"""

import math

import torch
from torch import Tensor

from .nested import Nested, Optimum
from .points import worth

WIDER, _WIDEST = 1.3, 1.6  # than a normal, the first draws and later ones, which tails are known by
_FEWEST, _ROUNDS = 2, 5  # of later draws, at least, since a tail that is missed has no weight, and at most
_SOFTER = 0.8  # the power of weights, which is taken until enough draws count

Normal = tuple[Tensor, Tensor]  # a mean, and a root of a covariance
Found = tuple[list[Optimum], Tensor]  # F at draws of θ, and what belongs to each


def drawn(nested: Nested, normal: Normal, num: int, times: int = 0, wider: float = WIDER) -> Found:
    """F at draws of θ, a + Rε, with a density, and ε, ``wider`` than a normal's; others after so many ``times``."""
    (loc, root), noise = normal, wider * torch.special.ndtri(nested.hyper.points(num, times))
    tried = [nested.tried(loc + root @ eps) for eps in noise]
    kept = [found is not nested.none for found in tried]
    return [found for found in tried if found is not nested.none], noise[kept]


def weighted(nested: Nested, first: Normal, found: list[Optimum], more: int, enough: float) -> Found:
    """F at draws of θ, and how far it is above the logarithm of the density of all of them together: at those ``found``
    of a first normal, then at ``more`` of one about the mode, and of others about what all before weigh, until they are
    worth ``enough``. The second's softmax has weights that make draws the posterior's, logsumexp is log ∫ exp F dθ.
    """
    normals = [(first[0], WIDER * first[1], len(found))]
    while True:
        theta = torch.stack([each.theta for each in found])
        # Σ_k n_k N(θ; a_k, R_kR_kᵀ), whichever normal a draw is of
        apart = [torch.linalg.solve_triangular(R, (theta - a).mT, upper=False).square().sum(0) for a, R, _ in normals]
        logs = [math.log(num) - R.diagonal().log().sum() - 0.5 * each for each, (_, R, num) in zip(apart, normals)]
        density = torch.stack(logs).logsumexp(0) - 0.5 * theta.shape[1] * math.log(2 * math.pi)
        ratio = torch.stack([each.value for each in found]) - density
        fewest = min(_FEWEST, 2 * theta.shape[1])  # without hyperparameters all draws are one
        if len(normals) > (fewest if worth(ratio.softmax(0)) >= enough else _ROUNDS):
            return found, ratio
        if len(normals) == 1:
            mode = nested.mode([nested.tried(first[0])])
            loc, root = mode.theta, torch.linalg.cholesky(nested.covariance(mode))
        else:
            loc, root = _about(theta, ratio)
        found = found + drawn(nested, (loc, root), more, len(normals), _WIDEST)[0]
        normals.append((loc, _WIDEST * root, more))


def _about(theta: Tensor, ratio: Tensor) -> Normal:
    """A normal about draws with these logarithms of weights."""
    num, size = theta.shape
    each = ((_SOFTER**power * ratio).softmax(0) for power in range(200))  # the last ones are equal
    weights = next(found for found in each if worth(found) > min(3 * size + 5, num / 2))
    loc = weights @ theta
    covariance = (theta - loc).mT @ (weights[:, None] * (theta - loc))
    # few draws show too small a covariance along some axis
    return loc, torch.linalg.cholesky(covariance + size / worth(weights) * covariance.diagonal().diag())
