"""Families on the kernel's own finite features (Zhu, Yuchi and Xie, 2025)."""

from typing import ClassVar

from ..approximations.on_sites import ExactWeightSpaceGP
from ..bases import Basis
from ..bases.features import ExplicitFeatures
from ..gaussians import FullCholesky
from ..process import GaussianProcess
from .base import BasisFamily, FreeFormFamily, NewCoefficients, OptimalFamily, require_basis

_MOST_FOLLOWED = 256


class OnFeatures(BasisFamily):
    """A family on the kernel's own finite features."""

    def new_basis(self, process: GaussianProcess, name: str) -> ExplicitFeatures:
        phi = process.kernel.features(process.x[..., :1, :])
        if phi is None:
            raise ValueError(
                f"the kernel of site {name!r} has no finite features, {process.kernel!r}: weight space needs a kernel "
                "such as Linear or Polynomial; for others take inducing points, SVGP or SGPR."
            )
        return require_basis(ExplicitFeatures(phi.shape[-1]), name)


class WeightSpace(OnFeatures, FreeFormFamily):
    """The kernel's own features with a full covariance for any likelihood, by mini-batches.

    (Zhu, Yuchi and Xie, 2025, eq. 8 to 10.) f(x) = μ(x) + φ(x)ᵀw + r(x) with R features φ of the kernel, r of
    variance c, and q(w) = N(m, S): O(BR² + R³) per step for B rows.

    Natural steps follow features that training moves, up to 256 of them (more would take far longer than a step), by
    their values at rows of the first call: all, or max(256, 4R) random ones.

    Under a :class:`~pyro_sparsegp.kernels.DeepBasis` the variance correction is relative to the batch in a step, and
    in predictions to the training inputs that the guide has seen in one call: call it on all of them once.
    """

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        basis = super().new_basis(process, name)
        follows = self.is_natural and basis.size <= _MOST_FOLLOWED
        return ExplicitFeatures.among(process.x, basis.size) if follows else basis

    def new_coefficients(self) -> NewCoefficients:
        return FullCholesky


class ExactWeightSpace(OnFeatures, OptimalFamily):
    """The kernel's own features with the posterior that is optimal given the likelihood.

    (Zhu, Yuchi and Xie, 2025, eq. 5, 6, 11 and 12.) S⁻¹ = I + ΦᵀΛΦ, Φ the features at the N training inputs.

    A step takes O(NR²) time for R features. Beyond 32,768 rows on a CPU (a million on a GPU) these are formed in
    blocks and dropped, on the way back too, so that memory is O(N + BR) with B rows a block: a network's output must
    then depend on each row alone. Under a :class:`~pyro_sparsegp.kernels.DeepBasis` the bound is eq. 11, and
    predictions are eq. 12, from sites of variance 1/λₙ + c(xₙ). For a likelihood that is Gaussian in f these are the
    sites of ∫ p(y | f) N(f | φᵀw, c) df; for others λₙ is training's.
    """

    module: ClassVar = ExactWeightSpaceGP
