"""Families on one set of inducing points."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Union

from ..approximations.on_sites import ExactGP
from ..bases import Basis, InducingPoints
from ..bases.inducing import Inducing
from ..bases.initial import Initialiser
from ..gaussians import FullCholesky, Unwhitened
from ..process import GaussianProcess
from .base import (
    BasisFamily,
    ExpectationFamily,
    FreeFormFamily,
    NewCoefficients,
    OptimalFamily,
    WithFreeSites,
    require_own_diagonal,
)

_MOST = 4000  # rows that Exact takes: a step takes some five times N³ operations


@dataclass(frozen=True, eq=False, repr=False)
class OnInducingPoints(BasisFamily):
    """A family on inducing points of the whole kernel, in one or several sets.

    :param init: how M inducing inputs are chosen. "greedy", the default up to 1024 rows, takes the rows of largest
        conditional variance. "pivots", the default above, draws rows by that variance. Others are "kmeans", "grid"
        (regular, at most M, for kernels of one or two columns) and a callable ``(kernel, x, num) -> (num, D)``.
    :param trainable: whether the inducing inputs are learned. By default they are, except under :class:`SparseEP`.
    """

    init: Union[str, Initialiser, None] = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def sets(self, num_terms: int = 1) -> list[Any]:
        return [self.inducing]  # type: ignore[attr-defined]

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        require_own_diagonal(process.kernel, name)
        basis = InducingPoints.chosen(process.kernel, process.x, self.sets(), self.init, name, self.trainable)
        return basis.ordered(process.kernel) if self.is_natural else basis


@dataclass(frozen=True, eq=False, repr=False)
class InducingFamily(OnInducingPoints, FreeFormFamily):
    """The base class of families with inducing points and a free posterior.

    :param whiten: whether q's parameters describe whitened coefficients w (default), or the values u = Lw at inducing
        inputs as in the papers' formulas. It matters only with ``natural=False``: natural steps are the same in both.
    """

    whiten: bool = field(default=True, kw_only=True)

    def chosen_coefficients(self) -> NewCoefficients:
        found = super().chosen_coefficients()
        return found if self.whiten or self.is_natural else partial(Unwhitened, found)


@dataclass(frozen=True, eq=False, repr=False)
class SVGP(InducingFamily):
    """Inducing points with a full covariance (Hensman, Fusi and Lawrence, 2013; Titsias, 2009).

    q(f) has mean μ + Φm and covariance k − ΦΦᵀ + ΦSΦᵀ. Here LLᵀ = K_ZZ and Φ = K_XZ L⁻ᵀ; m and S = RRᵀ are free, with
    R lower triangular. It takes any likelihood and mini-batches; a step on B rows costs O(BM² + M³).

    :param inducing: their number M, or the inputs ``(M, D)``, or
        :class:`~pyro_sparsegp.bases.InducingVariables`.
    :raises ValueError: at the guide's first call, if that has fewer than M distinct inputs.
    """

    inducing: Inducing = 64

    def new_coefficients(self) -> NewCoefficients:
        return FullCholesky


@dataclass(frozen=True, eq=False, repr=False)
class SGPR(OnInducingPoints, OptimalFamily):
    """Inducing points with the posterior that is optimal given the likelihood (Titsias, 2009).

    For a Gaussian likelihood the bound is Titsias' collapsed one, log N(y; μ, Q + σ²I) − tr(K − Q)/(2σ²) (eq. 9),
    with Q = ΦΦᵀ = K_XZ K_ZZ⁻¹ K_ZX and noise variance σ². A step takes O(NM² + M³), on all N rows.

    :param inducing: their number M, or the inputs ``(M, D)``.
    """

    inducing: Inducing = 64


@dataclass(frozen=True, eq=False, repr=False)
class Exact(OptimalFamily):
    """No inducing points: the posterior of the whole process given all N rows, in O(N³) per step; up to 4,000 rows.

    For a likelihood that is Gaussian in f the bound is log p(y) itself (Rasmussen and Williams, 2006, eq. 2.30); for
    others q is the Gaussian of all N function values that is optimal (Opper and Archambeau, 2009), by sites:
    S⁻¹ = K⁻¹ + Λ. Every other family approximates it.

    :raises ValueError: at a first call on more rows, naming families for these.
    """

    module: ClassVar = ExactGP

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        if process.x.shape[-2] > _MOST:
            raise ValueError(
                f"site {name!r} has {process.x.shape[-2]} rows; Exact, O(N³) per step, is for up to {_MOST}: take "
                "SVGP, by mini-batches, or ComputationAware."
            )
        return InducingPoints([])  # which are the rows of each call


@dataclass(frozen=True, eq=False, repr=False)
class FreeSites(WithFreeSites, SGPR):
    """Inducing points with the optimal form of q and its sites as 2N free parameters.

    (Adam, Durrande and John, 2018, eq. 4 and 6.) S⁻¹ = I + ΦᵀΛΦ with Λ = diag(λₙ²), m = SΦᵀb, for free λ and b.

    At the optimum λₙ² = −2 ∂E[log p(yₙ | f)]/∂σₙ², with σₙ² the marginal variance; the precisions λₙ² are kept
    non-negative, which likelihoods that are not log-concave may violate. The bound is not concave in these
    parameters, and with N > M(M + 3)/2, all that a Gaussian over M coefficients has, they are more than
    :class:`SVGP` needs: :class:`SGPR` finds the same optimum in a few updates.
    """


@dataclass(frozen=True, eq=False, repr=False)
class SparseEP(OnInducingPoints, ExpectationFamily):
    """Inducing points with expectation propagation's posterior (Hernández-Lobato and Hernández-Lobato, 2016).

    "Scalable Gaussian Process Classification via Expectation Propagation": a Gaussian site
    exp(−½νₙ(φₙᵀw)² + bₙφₙᵀw) stands for each datum's factor ∫ p(yₙ | f) N(f | φₙᵀw, dₙ) df (eq. 2).

    Its objective is no bound: inducing inputs that are trained by it overfit it, as they do FITC's (Bauer, van der Wilk
    and Rasmussen, 2016). So they stay where they start, unless ``trainable=True`` is given, as the paper has them.

    :param inducing: their number M, or the inputs ``(M, D)``.
    """

    inducing: Inducing = 64
    trainable: bool = field(default=False, kw_only=True)
