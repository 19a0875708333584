"""Posteriors given projections of the sites' data."""

from __future__ import annotations

from typing import Any, Optional

from ..bases.actions import DenseActions, project
from ..bases.policies import Policy
from ..gaussians import ProjectedGaussian
from ..gaussians.sites import Sites
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .on_sites import Kind, SiteGP, same_rows


class ProjectedGP(SiteGP):
    """The posterior given projections of the sites' data.

    :param policy: chooses the actions.
    :param batches: whether training brings mini-batches of other rows.
    """

    def __init__(self, policy: Policy, *args: Any, batches: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy, self.takes_batches = policy, batches

    def given(
        self, process: GaussianProcess, name: str, kind: Kind, sites: Sites, exact: bool, known: Any = None
    ) -> SparsePosterior:
        actions = self.policy(process.kernel, sites, name) if known is None else known
        features, products = project(process.kernel, actions, name)
        here = same_rows(sites.inputs, process.x)
        values = (lambda f: actions.left(f[..., None])[..., 0]) if here else None
        q = ProjectedGaussian(actions.target, features.factor, actions.noise, features.covariance, values)
        return kind(process, features, q, name, sites, features.of(products) if here else None)

    @property
    def num_rows(self) -> Optional[int]:
        return self.policy.rows

    def unread(self, process: GaussianProcess, name: str, kind: Kind) -> SparsePosterior:
        sites = Sites.none(process.x[:1], process.batch_shape)
        return self.given(process, name, kind, sites, False, DenseActions(sites, sites.linear[..., None]))

    def spec(self) -> dict[str, Any]:
        return {"basis": {"kind": "projection"}, **super().spec()}
