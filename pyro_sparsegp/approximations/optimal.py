"""The Gaussian over coefficients that is optimal for Gaussian sites."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..bases import Basis, ExplicitFeatures, KernelFeatures
from ..gaussians import Gaussian, from_natural, optimal
from ..gaussians.sites import Sites
from ..numerics.chunks import is_long
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .memory import Held, Memory, contents
from .on_sites import SiteGP, same_rows, shapes_of_rows

__all__ = ["OptimalGP"]


class OptimalGP(SiteGP):
    """A basis with the q(w) that is optimal for the sites, perhaps block by block.

    :param blockwise: whether blocks of coefficients are independent.
    """

    def __init__(self, basis: Basis, blockwise: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.basis, self.blockwise = basis, blockwise
        self._memory = Memory()

    @property
    def in_weight_space(self) -> bool:
        """Whether the basis is the kernel's own features."""
        return isinstance(self.basis, ExplicitFeatures)

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        features = self.basis(process.kernel, process.jitter, name)
        if isinstance(features, KernelFeatures):
            return self._in_weight_space(process, name, kind, sites, features, exact)
        phi = features(sites.inputs)
        groups = [(b,) for b in range(len(phi))] if self.blockwise else None
        if exact:  # the bound's gradient by q(w) is 0 there: none has to be found
            with torch.no_grad():
                coefficients = optimal(phi, sites.precision, sites.linear, groups, name)
        else:
            coefficients = optimal(phi, sites.precision, sites.linear, groups, name)
        return kind(process, features, coefficients, name, sites, phi if same_rows(sites.inputs, process.x) else None)

    def _in_weight_space(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior],
        sites: Sites,
        features: KernelFeatures,
        exact: bool,
    ) -> SparsePosterior:
        if not is_long(sites.inputs):
            features.explicit(sites.inputs)  # with its graph, for the marginals
        with torch.set_grad_enabled(torch.is_grad_enabled() and not exact):
            sums = features.gram(sites.inputs, sites.precision, sites.linear)
            coefficients = from_natural(*sums, features.sizes, None, name)
        return kind(process, features, coefficients, name, sites)

    def predict(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior] = SparsePosterior,
        sites: Optional[Sites] = None,
    ) -> SparsePosterior:
        """The posterior at new inputs. In weight space the kernel's diagonal acts on the training data too (eq. 12):

        q(w) is the optimum for sites of variance 1/λₙ + c(xₙ). For a likelihood that is Gaussian in f they are those of
        ∫ p(y | f) N(f | φᵀw, c) df; for others λₙ is training's.
        """
        if (sites is None and self.sites.empty) or not process.kernel.depends_on_rows:
            return super().predict(process, name, kind, sites)
        sites = self.sites() if sites is None else sites

        def condition() -> tuple[Any, Optional[Gaussian]]:
            kernel = process.kernel.relative_to(sites.inputs)
            features = self.basis(kernel, process.jitter, name)
            if not isinstance(features, KernelFeatures):
                return kernel, None
            sums = features.gram(sites.inputs, sites.precision, sites.linear, absorb=True)
            return kernel, from_natural(*sums, features.sizes, None, name)

        key = contents([process.kernel, Held(sites.inputs), sites.precision, sites.linear])
        kernel, coefficients = self._memory.recall(key, condition)
        settled = process.with_kernel(kernel)
        if coefficients is None:
            return self.given(settled, name, kind, sites, False)
        return kind(settled, self.basis(kernel, process.jitter, name), coefficients, name, sites)

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        none = process.x.new_zeros((*process.batch_shape, 1))
        return self.given(process, name, kind, Sites(process.x[:1], none, none), False)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {
            "basis": self.basis.spec(),
            "batch_shape": list(self.batch_shape),
            "family": self.family,
        } | shapes_of_rows(self)
