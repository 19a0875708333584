"""Variational modules of Shi, Titsias and Mnih (2020) that are more than a basis times a free Gaussian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..bases import Basis, InducingPoints
from ..bases.nested import ConditionalFeatures, DecoupledFeatures
from ..gaussians import Coefficients, DenseFactor, Gaussian, Product, ShiftFactor, optimal
from ..gaussians.sites import Sites
from ..gaussians.stack import eye_like
from ..numerics.linalg import sum_blocks
from ..posterior.drawing import ExpectedSite
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .free import SparseGP
from .on_sites import OptimalGP, gradients_unless


class DecoupledGP(SparseGP):
    """Inducing points Z with a free q(w), and a mean c(x, O)a of points O.

    :param basis: Z.
    :param means: O, one set.
    :param num_columns: how many columns of K_OO a training step takes.
    """

    def __init__(
        self,
        basis: InducingPoints,
        means: InducingPoints,
        coefficients: Coefficients,
        batch_shape: Sequence[int],
        family: dict[str, Any],
        num_columns: int,
        like: Tensor,
    ) -> None:
        super().__init__(basis, coefficients, batch_shape, family)
        self.weights: Any
        self.means, self.num_columns = means, num_columns
        self.weights = PyroParam(like.new_zeros(*batch_shape, sum(means.sizes)))

    def forward(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior] = SparsePosterior
    ) -> SparsePosterior:
        inducing = self.basis(process.kernel, process.jitter, name)
        q = self.coefficients(self.coefficients.anchor_of(inducing))
        (means,) = self.means.variables()
        features = DecoupledFeatures(inducing, means, self.weights, self.num_columns)
        estimate = features.estimate if issubclass(kind, ExpectedSite) else features.square
        shift = ShiftFactor(features.square, estimate, features.pull.shape[:-1])
        whole = Product((*q.sizes, 1), [*q.factors, shift], [*q.groups, (len(q.sizes),)])
        return kind(process, features, whole, name)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return super().spec() | {"means": self.means.spec()}


class BlockwiseGP(OptimalGP):
    """Nested inducing points with the independent posteriors of their sets that are optimal for the sites."""

    blockwise = True


class SemiCollapsedGP(OptimalGP):
    """Nested inducing points whose first set has the posterior that is optimal for the sites and for the other sets'.

    q(w₁) ∝ N(w₁; 0, I) exp E_q(w₂)[Σₙ log N(zₙ | fₙ, 1/λₙ)]: precision I + Φ₁ᵀΛΦ₁ and mean from z − μ − Φ₂m₂
    (Shi, Titsias and Mnih, 2020, eq. 9 and appendix C).

    :param others: the free posterior of the other sets.
    """

    def __init__(self, basis: Basis, others: Coefficients, *args: Any, **kwargs: Any) -> None:
        super().__init__(basis, *args, **kwargs)
        self.others = others

    def conditioned(self, features: Any, phi: Any, sites: Sites, exact: bool, name: str) -> tuple[Any, Any, Gaussian]:
        others = self.others()
        with gradients_unless(exact):
            linear = sites.linear - sites.precision * sum_blocks(phi[1:], others.loc)
            first = optimal(phi[:1], sites.precision, linear, None, name)
        groups = [(0,), *(tuple(block + 1 for block in group) for group in others.groups)]
        return features, phi, Product((*first.sizes, *others.sizes), [*first.factors, *others.factors], groups)


class ConditionalGP(OptimalGP):
    """Inducing points whose posterior depends on what is left of f, q(w | r) = p(w | r, z).

    (Shi, Titsias and Mnih, 2020, appendix A.)
    """

    def conditioned(self, features: Any, phi: Any, sites: Sites, exact: bool, name: str) -> tuple[Any, Any, Gaussian]:
        (known,) = phi
        with gradients_unless(exact):
            (head,) = optimal(phi, sites.precision, sites.linear, None, name).factors
            # B = ΛΦP⁻¹: E[w | r] = m − Bᵀr(X).
            weights = sites.precision[..., None] * (known @ head.covariance_matrix)
        both = ConditionalFeatures(features, sites.inputs, weights, known, name)
        # (w, v) with w | v ~ N(m − Rv, S) and v ~ N(0, I), as under the prior: mean (m, 0), root [[S^½, −R], [0, I]]
        eye, none = eye_like(both.root).expand_as(both.root), torch.zeros_like(both.root)
        root = torch.cat([torch.cat([head.root, -both.root], -1), torch.cat([none, eye], -1)], -2)
        loc = torch.cat([head.loc, torch.zeros_like(head.loc)], -1)
        return both, both.known, Product(both.sizes, [DenseFactor(loc, root, upper=True)], [(0, 1)])
