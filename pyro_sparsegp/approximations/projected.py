"""Posteriors given projections of the sites' data."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..bases.actions import DenseActions
from ..bases.policies import BlockPolicy, Policy, RandomPolicy, UserPolicy
from ..bases.projection import ProjectedFeatures, project
from ..gaussians import ProjectedGaussian
from ..gaussians.sites import Sites
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .memory import contents, equal
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
        self._remembered: Optional[tuple[list[Any], tuple[ProjectedFeatures, Tensor]]] = None

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        if torch.is_grad_enabled():
            self._remembered = None
            features, products = project(process.kernel, self.policy(process.kernel, sites, name), name)
        else:
            features, products = self._projected_before(process.kernel, sites, name)
        return self._posterior(process, name, kind, sites, features, products)

    def _projected_before(self, kernel: Any, sites: Sites, name: str) -> tuple[ProjectedFeatures, Tensor]:
        """The projection, which visits all pairs of rows, of the last call if nothing has changed since."""
        state = [sites.inputs, sites.precision, sites.linear, *self.policy.parameters(), *self.policy.buffers()]
        key = contents(kernel)
        if key is None or isinstance(self.policy, UserPolicy):
            return project(kernel, self.policy(kernel, sites, name), name)
        key = [*key, *(part.detach().clone() for part in state)]
        if self._remembered is None or not equal(self._remembered[0], key):
            self._remembered = key, project(kernel, self.policy(kernel, sites, name), name)
        return self._remembered[1]

    @property
    def forgets(self) -> bool:
        return super().forgets and not isinstance(self.policy, (BlockPolicy, RandomPolicy))

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.policy.reorder(order)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_remembered": None}

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        none = process.x.new_zeros((*process.batch_shape, 1))
        sites = Sites(process.x[:1], none, none)
        return self._posterior(
            process, name, kind, sites, *project(process.kernel, DenseActions(sites, none[..., None]), name)
        )

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
