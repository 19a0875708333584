"""A GP site's variational module: what the guide builds from a family and calls at each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .bases import Basis
from .bases.actions import Actions, DenseActions, Policy
from .bases.projection import project
from .modules import AbstractModule
from .posteriors import Coefficients, ProjectedGaussian, optimal
from .process import GaussianProcess, SparsePosterior
from .sites import FreeSites, KeptSites, Sites

__all__ = ["OptimalGP", "ProjectedGP", "SiteGP", "SparseGP"]


class SparseGP(AbstractModule):
    """One site's variational module: a basis and a Gaussian over its coefficients.

    :param family: what was declared, :meth:`Family.declared`.
    """

    def __init__(
        self, basis: Basis, coefficients: Coefficients, batch_shape: Sequence[int], family: dict[str, Any]
    ) -> None:
        super().__init__()
        self.basis, self.coefficients, self.family = basis, coefficients, family
        self.batch_shape = torch.Size(batch_shape)

    def forward(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior] = SparsePosterior
    ) -> SparsePosterior:
        """The posterior of ``process``, at its inputs and under its hyperparameters."""
        features = self.basis(process.kernel, process.jitter, name)
        return kind(process, features, self.coefficients(), name)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family}


class SiteGP(AbstractModule):
    """One site's variational module whose posterior follows from Gaussian sites.

    :param sites: where the sites are kept, or are parameters.
    :param at: "marginals" or "mean", where sites that are iterated are read.
    :param rate: the damping of updates where sites are iterated.
    :param updates: how many updates a training step makes there.
    """

    def __init__(
        self,
        sites: Union[KeptSites, FreeSites],
        batch_shape: Sequence[int],
        family: dict[str, Any],
        at: str = "marginals",
        rate: float = 1.0,
        updates: int = 1,
    ) -> None:
        super().__init__()
        self.sites, self.family = sites, family
        self.at, self.rate, self.updates = at, rate, updates
        self.batch_shape = torch.Size(batch_shape)

    def forward(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior] = SparsePosterior,
        sites: Optional[Sites] = None,
        exact: bool = False,
    ) -> SparsePosterior:
        """The posterior of ``process`` given ``sites``, by default those kept.

        :param exact: whether the sites are the likelihood itself, so that an optimal q(w) is where the bound is
            stationary.
        """
        if sites is None and self.sites.empty:
            return self.unread(process, name, kind)
        return self.given(process, name, kind, self.sites(process) if sites is None else sites, exact)

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        """The prior, before any sites are read."""
        return self.given(process, name, kind, self.sites(process), False)

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        """The posterior of ``process`` given ``sites``."""
        raise NotImplementedError


class OptimalGP(SiteGP):
    """A basis with the q(w) that is optimal for the sites, perhaps block by block.

    :param blockwise: whether blocks of coefficients are independent.
    """

    def __init__(self, basis: Basis, blockwise: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.basis, self.blockwise = basis, blockwise

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        features = self.basis(process.kernel, process.jitter, name)
        phi = features(sites.inputs)
        groups = [(b,) for b in range(len(phi))] if self.blockwise else None
        if exact:  # the bound's gradient by q(w) is 0 there: none has to be found
            with torch.no_grad():
                coefficients = optimal(phi, sites.precision, sites.linear, groups, name)
        else:
            coefficients = optimal(phi, sites.precision, sites.linear, groups, name)
        return kind(process, features, coefficients, name, sites, phi if _same_rows(sites.inputs, process.x) else None)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family} | _rows(self)


class ProjectedGP(SiteGP):
    """The posterior given projections of the sites' data.

    :param policy: chooses the actions.
    """

    def __init__(self, policy: Policy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy = policy

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        return self._project(process, name, kind, sites, self.policy(process.kernel, sites, name))

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        none = process.x.new_zeros((*process.batch_shape, 1))
        sites = Sites(process.x[:1], none, none)
        return self._project(process, name, kind, sites, DenseActions(sites, none[..., None]))

    def _project(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior],
        sites: Sites,
        actions: Actions,
    ) -> SparsePosterior:
        features, products = project(process.kernel, actions, name)
        here = _same_rows(sites.inputs, process.x)

        def values(f: Tensor) -> Tensor:
            return actions.left(f[..., None])[..., 0]

        coefficients = ProjectedGaussian(actions.target, features.factor, actions.noise, values if here else None)
        return kind(process, features, coefficients, name, sites, features.of(products) if here else None)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": {"kind": "projection"}, "batch_shape": list(self.batch_shape), "family": self.family} | _rows(
            self
        )


def _same_rows(inputs: Tensor, x: Tensor) -> bool:
    if inputs is x or inputs.shape != x.shape:
        return inputs is x
    return inputs.data_ptr() == x.data_ptr() or torch.equal(inputs, x)


def _rows(module: SiteGP) -> dict[str, Any]:
    values = getattr(getattr(module, "policy", None), "draws", None)
    if values is None:
        values = getattr(getattr(module, "policy", None), "order", None)
    if values is None and isinstance(module.sites, FreeSites):
        values = module.sites.inputs
    rows = None if values is None else len(values)
    return {"columns": module.sites.inputs.shape[-1], "rows": rows}
