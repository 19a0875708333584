"""A free posterior to which the sites of further rows are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..gaussians import Continued, weighted_gram
from ..gaussians.sites import KeptSites, Sites
from ..numerics.linalg import side_by_side
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .free import SparseGP
from .on_sites import SiteGP


class Absorbing(SiteGP):
    """q(w) ∝ N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w) Πₙ N(zₙ | μₙ + φₙᵀw, 1/λₙ): what rows seen before left, and new sites.

    (Bui, Nguyen and Turner, 2017.) Neither the old rows nor their sites are needed.

    :param module: of the site, whose q(w) learns by natural steps.
    :param process: the prior at the new rows.
    :param forget: the share of (G₀, r₀) that is dropped.
    """

    def __init__(self, module: SparseGP, process: GaussianProcess, name: str, forget: float) -> None:
        batch_shape: Sequence[int] = module.batch_shape
        super().__init__(KeptSites(process.x, batch_shape), batch_shape, module.family, rate=0.7)
        self.features = module.basis(process.kernel, process.jitter, name)
        if module.kept_rows is not None:
            module.hold(self.features, process)
        self.phi = self.features(process.x)
        self._free = (module,)  # in a tuple: none of its parts
        gram, pull = self._coefficients.sums(self._anchor)
        self._sums = (1 - forget) * gram, (1 - forget) * pull

    @property
    def _anchor(self) -> Any:
        return self.features.anchors if self._coefficients.by_block else self.features.anchor

    @property
    def _coefficients(self) -> Any:  # a NaturalGaussian, or a NaturalLowRank, of which no part is asked for
        return self._free[0].coefficients

    def _with(self, sites: Sites) -> tuple[Tensor, Tensor]:
        # G₀ + ΦᵀΛΦ and r₀ + Φᵀλ(z − μ)
        phi, (gram, pull) = side_by_side(self.phi), self._sums
        return gram + weighted_gram(phi, sites.precision), pull + (phi.mT @ sites.linear[..., None])[..., 0]

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        q = Continued(self._coefficients.of(*self._with(sites)), *self._sums)
        return kind(process, self.features, q, name, sites, self.phi)

    def finish(self, sites: Sites) -> None:
        """Leave the sum with the module."""
        self._coefficients.put_sums(self._anchor, *self._with(sites))
