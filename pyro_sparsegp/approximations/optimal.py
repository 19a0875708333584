"""The Gaussian over coefficients that is optimal for Gaussian sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ..bases import Basis, Features
from ..gaussians import optimal
from ..gaussians.sites import Sites
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .on_sites import SiteGP, same_rows, shapes_of_rows

__all__ = ["OptimalGP"]


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
        return self.under(*self.features_at(process, name, sites.inputs), process, name, kind, sites, exact)

    def by_sites(self, process: GaussianProcess, name: str) -> Callable[[Optional[Sites]], SparsePosterior]:
        features, phi = self.features_at(process, name, process.x)

        def answer(sites: Optional[Sites]) -> SparsePosterior:
            if sites is None:
                sites = Sites.none(process.x, process.batch_shape)
            return self.under(features, phi, process, name, SparsePosterior, sites, False)

        return answer

    def features_at(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, list[Tensor]]:
        """The basis under the process's kernel, and Φ at x."""
        features: Features = self.basis(process.kernel, process.jitter, name)
        return features, features(x)

    def under(
        self,
        features: Any,
        phi: list[Tensor],
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior],
        sites: Sites,
        exact: bool,
    ) -> SparsePosterior:
        """As :meth:`given`, of a basis and Φ at the sites' inputs."""
        groups = [(b,) for b in range(len(phi))] if self.blockwise else None
        # Where it is exact the bound's gradient by q(w) is 0: none has to be found.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not exact):
            coefficients = optimal(phi, sites.precision, sites.linear, groups, name)
        return kind(process, features, coefficients, name, sites, phi if same_rows(sites.inputs, process.x) else None)

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        return self.given(process, name, kind, Sites.none(process.x[:1], process.batch_shape), False)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {
            "basis": self.basis.spec(),
            "batch_shape": list(self.batch_shape),
            "family": self.family,
        } | shapes_of_rows(self)
