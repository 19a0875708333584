"""Posteriors given projections of the sites' data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..bases.actions import DenseActions
from ..bases.policies import BlockPolicy, Policy, RandomPolicy
from ..bases.projection import ProjectedFeatures, project
from ..gaussians import ProjectedGaussian
from ..gaussians.sites import Sites
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .on_sites import SiteGP, same_rows, shapes_of_rows

__all__ = ["ProjectedGP"]


class ProjectedGP(SiteGP):
    """The posterior given projections of the sites' data.

    :param policy: chooses the actions.
    :param batches: whether training brings mini-batches of other rows.
    """

    def __init__(self, policy: Policy, *args: Any, batches: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy, self.takes_batches = policy, batches

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        features, products = project(process.kernel, self.policy(process.kernel, sites, name), name)
        return self._posterior(process, name, kind, sites, features, products)

    @property
    def forgets(self) -> bool:
        return super().forgets and not isinstance(self.policy, (BlockPolicy, RandomPolicy))

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.policy.reorder(order)

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        sites = Sites.none(process.x[:1], process.batch_shape)
        actions = DenseActions(sites, sites.linear[..., None])
        return self._posterior(process, name, kind, sites, *project(process.kernel, actions, name))

    def _posterior(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior],
        sites: Sites,
        features: ProjectedFeatures,
        products: Tensor,
    ) -> SparsePosterior:
        actions = features.actions
        here = same_rows(sites.inputs, process.x)

        def values(f: Tensor) -> Tensor:
            return actions.left(f[..., None])[..., 0]

        coefficients = ProjectedGaussian(
            actions.target, features.factor, actions.noise, features.covariance, values if here else None
        )
        return kind(process, features, coefficients, name, sites, features.of(products) if here else None)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {
            "basis": {"kind": "projection"},
            "batch_shape": list(self.batch_shape),
            "family": self.family,
        } | shapes_of_rows(self)
