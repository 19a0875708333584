"""The Gaussian over coefficients that is optimal for Gaussian sites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..bases import Basis
from ..bases.inducing import features_of
from ..bases.variables import Values
from ..gaussians import Gaussian, from_natural, optimal
from ..gaussians.sites import Sites
from ..numerics.chunks import is_long
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .on_sites import Kind, SiteGP, same_rows


class OptimalGP(SiteGP):
    """A basis with the q(w) that is optimal for the sites."""

    blockwise = False  # whether blocks of coefficients are independent

    def __init__(self, basis: Basis, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.basis = basis

    def given(
        self, process: GaussianProcess, name: str, kind: Kind, sites: Sites, exact: bool, known: Any = None
    ) -> SparsePosterior:
        features, phi = self.prepared(process, name, sites.inputs) if known is None else known
        features, phi, q = self.conditioned(features, phi, sites, exact, name)
        return kind(process, features, q, name, sites, phi if same_rows(sites.inputs, process.x) else None)

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, Any]:
        """The basis under the process's kernel, and Φ at x."""
        features = self.basis(process.kernel, process.jitter, name)
        return features, features(x)

    def conditioned(self, features: Any, phi: Any, sites: Sites, exact: bool, name: str) -> tuple[Any, Any, Gaussian]:
        """The features that the posterior has, Φ of them at the sites' inputs, and q(w) given the sites."""
        # S⁻¹ = I + ΦᵀΛΦ, S⁻¹m = Φᵀλ(z − μ)
        groups = [(b,) for b in range(len(phi))] if self.blockwise else None
        with gradients_unless(exact):
            return features, phi, optimal(phi, sites.precision, sites.linear, groups, name)

    def spec(self) -> dict[str, Any]:
        return {"basis": self.basis.spec(), **super().spec()}


class ExactGP(OptimalGP):
    """q(f | sites), exact: the basis is f at the sites' own inputs X, wherever these are now; as a part of a guide's
    field at those of its first call.
    """

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, Any]:
        features = features_of(process.kernel, [Values(x)], process.jitter, name)
        return features, features(x)


class ExactWeightSpaceGP(OptimalGP):
    """The kernel's own features with the q(w) that is optimal for the sites, from sums over blocks of rows."""

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, Any]:
        features = self.basis(process.kernel, process.jitter, name)
        if not is_long(x):
            features.explicit(x)  # kept there with its graph, for the marginals; of many rows it is never whole
        return features, None

    def conditioned(self, features: Any, phi: Any, sites: Sites, exact: bool, name: str) -> tuple[Any, Any, Gaussian]:
        with gradients_unless(exact):
            gram, pull = features.gram(sites.inputs, sites.precision, sites.linear)
            return features, None, from_natural(gram, pull, features.sizes, None, name)

    def at_new_inputs(self, process: GaussianProcess, name: str, kind: Kind, sites: Sites) -> SparsePosterior:
        """The posterior at new inputs, where the kernel's diagonal acts on the training data too.

        q(w) is the optimum for sites of variance 1/λₙ + c(xₙ) (Zhu, Yuchi and Xie, 2025, eq. 12). For a likelihood that
        is Gaussian in f they are those of ∫ p(y | f) N(f | φᵀw, c) df; for others λₙ is training's.
        """
        settled = process.relative_to(sites.inputs)
        features = self.basis(settled.kernel, process.jitter, name)
        gram, pull = features.gram(sites.inputs, sites.precision, sites.linear, settled is not process)
        return kind(settled, features, from_natural(gram, pull, features.sizes, None, name), name, sites)


def gradients_unless(exact: bool) -> Any:
    """Where sites are exact the bound's gradient by q(w) is 0: none has to be found."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and not exact)
