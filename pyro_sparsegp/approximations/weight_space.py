"""Posteriors over a kernel's own features, whose diagonal may be that in the company of the training inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from ..bases import ExplicitFeatures, KernelFeatures
from ..gaussians import Drawn, Share, from_natural
from ..gaussians.sites import Sites
from ..numerics.chunks import is_long
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .free import SparseGP
from .on_sites import SiteGP
from .optimal import OptimalGP

__all__ = ["ExactWeightSpaceGP", "WeightSpaceGP", "elsewhere", "has_features"]


class WeightSpaceGP(SparseGP):
    """The kernel's own features with a free Gaussian over their coefficients."""

    rows: Optional[Tensor]  # inputs of training, where the kernel's diagonal depends on them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("rows", None)
        self.num_rows = 0  # inputs of training in all, where a plate tells

    def start(self, process: GaussianProcess, name: str) -> None:
        super().start(process, name)
        if process.kernel.depends_on_rows:
            self.see(process.x)

    @property
    def num_seen(self) -> int:
        """How many inputs of training it knows."""
        return 0 if self.rows is None else self.rows.shape[-2]

    def see(self, x: Tensor) -> None:
        """Take note of inputs of training, for a kernel whose diagonal depends on them: most rows count, then last."""
        if self.rows is None or x.shape[-2] >= self.rows.shape[-2]:
            x.data_ptr()  # raises under torch.func.vmap, whose tensors can't be kept: the run is then made outside
            self.rows = x.detach()

    def predict(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior] = SparsePosterior,
        drawn: Optional[Drawn] = None,
        share: Optional[Share] = None,
    ) -> SparsePosterior:
        """The posterior at new inputs, where the kernel's diagonal is that in the company of the training inputs."""
        if self.rows is not None:
            process = process.relative_to(self.rows)
        return self(process, name, kind, drawn, share)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rows = state_dict.get(prefix + "rows")
        self.rows = None if rows is None else torch.empty_like(rows, device=next(self.parameters(), rows).device)
        self.num_rows = int(state_dict.pop(prefix + "num_rows", 0))  # older files have none
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.num_rows:
            destination[prefix + "num_rows"] = torch.tensor(self.num_rows)


class ExactWeightSpaceGP(OptimalGP):
    """The kernel's own features with the q(w) that is optimal for the sites, from sums over blocks of rows."""

    def features_at(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, list[Tensor]]:
        features = self.basis(process.kernel, process.jitter, name)
        # Kept there with its graph, for the marginals; of many rows it is never whole.
        return features, [] if is_long(x) else [features.explicit(x).features]

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
        with torch.set_grad_enabled(torch.is_grad_enabled() and not exact):
            return self._from_sums(process, name, kind, sites, features)

    def _from_sums(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior],
        sites: Sites,
        features: KernelFeatures,
        absorb: bool = False,
    ) -> SparsePosterior:
        sums = features.gram(sites.inputs, sites.precision, sites.linear, absorb)
        return kind(process, features, from_natural(*sums, features.sizes, None, name), name, sites)

    def predict(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior] = SparsePosterior,
        sites: Optional[Sites] = None,
    ) -> SparsePosterior:
        """The posterior at new inputs, where the kernel's diagonal acts on the training data too.

        q(w) is the optimum for sites of variance 1/λₙ + c(xₙ) (Zhu, Yuchi and Xie, 2025, eq. 12). For a likelihood that
        is Gaussian in f they are those of ∫ p(y | f) N(f | φᵀw, c) df; for others λₙ is training's.
        """
        if (sites is None and self.sites.empty) or not process.kernel.depends_on_rows:
            return self(process, name, kind, sites)
        sites = self.sites() if sites is None else sites
        settled = process.relative_to(sites.inputs)
        features = self.basis(settled.kernel, process.jitter, name)
        return self._from_sums(settled, name, kind, sites, features, absorb=True)


def has_features(basis: Any) -> bool:
    """Whether a basis is, or has for a term, a kernel's own features."""
    return isinstance(basis, ExplicitFeatures) or any(has_features(part) for part in getattr(basis, "parts", ()))


def elsewhere(module: Any) -> Callable[..., Any]:
    """How a GP site's module answers at new inputs: where the kernel's diagonal depends on the rows of training, it is
    that in their company.
    """
    if isinstance(module, (WeightSpaceGP, ExactWeightSpaceGP)):
        return module.predict
    return partial(_beside_sites, module) if isinstance(module, SiteGP) else module


def _beside_sites(
    module: SiteGP,
    process: GaussianProcess,
    name: str,
    kind: type[SparsePosterior] = SparsePosterior,
    sites: Optional[Sites] = None,
) -> SparsePosterior:
    if sites is None and module.sites.empty:
        return module(process, name, kind)
    sites = module.sites() if sites is None else sites
    return module(process.relative_to(sites.inputs), name, kind, sites)
