"""The optimal posterior over a kernel's own features, whose diagonal may be that beside the training inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..gaussians import Gaussian, from_natural
from ..gaussians.sites import Sites
from ..numerics.chunks import is_long
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .optimal import OptimalGP, gradients_unless

__all__ = ["ExactWeightSpaceGP"]


class ExactWeightSpaceGP(OptimalGP):
    """The kernel's own features with the q(w) that is optimal for the sites, from sums over blocks of rows."""

    def features_at(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, Any]:
        features = self.basis(process.kernel, process.jitter, name)
        if not is_long(x):
            features.explicit(x)  # kept there with its graph, for the marginals; of many rows it is never whole
        return features, None

    def conditioned(self, features: Any, phi: Any, sites: Sites, exact: bool, name: str) -> tuple[Any, Any, Gaussian]:
        with gradients_unless(exact):
            gram, pull = features.gram(sites.inputs, sites.precision, sites.linear)
            return features, None, from_natural(gram, pull, features.sizes, None, name)

    def at_new_inputs(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites
    ) -> SparsePosterior:
        """The posterior at new inputs, where the kernel's diagonal acts on the training data too.

        q(w) is the optimum for sites of variance 1/λₙ + c(xₙ) (Zhu, Yuchi and Xie, 2025, eq. 12). For a likelihood that
        is Gaussian in f they are those of ∫ p(y | f) N(f | φᵀw, c) df; for others λₙ is training's.
        """
        settled = process.relative_to(sites.inputs)
        features = self.basis(settled.kernel, process.jitter, name)
        gram, pull = features.gram(sites.inputs, sites.precision, sites.linear, settled is not process)
        return kind(settled, features, from_natural(gram, pull, features.sizes, None, name), name, sites)
