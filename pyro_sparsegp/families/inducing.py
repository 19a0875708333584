"""Families on one set of inducing points, and on nested sets of them (Shi, Titsias and Mnih, 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, Union

from torch import Tensor

from ..approximations.free import DecoupledGP, SparseGP
from ..approximations.on_sites import BlockwiseGP, ConditionalGP, ExactGP, OptimalGP, SemiCollapsedGP
from ..bases import Basis
from ..bases.inducing import Inducing, InducingPoints
from ..bases.initial import Initialiser
from ..gaussians import BlockCholesky, CholeskyIdentity, FullCholesky, Identity
from ..kernels import Kernel
from ..numerics.arguments import require_choice, require_count
from ..numerics.functions import if_known
from ..process import GaussianProcess
from .base import BasisFamily, ExpectationFamily, FreeFormFamily, NewCoefficients, OptimalFamily

_MOST = 4000  # rows that Exact takes: a step takes some five times N³ operations


@dataclass(frozen=True, eq=False, repr=False)
class OnInducingPoints(BasisFamily):
    """A family on inducing points of the whole kernel, in one or several sets.

    :param inducing: their number M, or the inputs ``(M, D)``, or :class:`~pyro_sparsegp.bases.InducingVariables`.
    :param init: how M inducing inputs are chosen. "greedy", the default up to 1024 rows, takes the rows of largest
        conditional variance. "pivots", the default above, draws rows by that variance. Others are "kmeans", "grid"
        (regular, at most M, for kernels of one or two columns) and a callable ``(kernel, x, num) -> (num, D)``.
    :param trainable: whether the inducing inputs are learned. By default they are, except under :class:`SparseEP`.
    """

    inducing: Inducing = 64
    init: Union[str, Initialiser, None] = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def sets(self, num_terms: int = 1) -> list[Any]:
        return [self.inducing]

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        return self.points(process.kernel, process.x, self.sets(), name)

    def points(
        self, kernel: Kernel, x: Tensor, sets: Sequence[Inducing], name: str, columns: Optional[Sequence[int]] = None
    ) -> InducingPoints:
        """The inducing points of a kernel at the inputs of a first call, in the columns that it reads."""
        if kernel.depends_on_rows:
            raise ValueError(
                f"the kernel of site {name!r} has a variance correction, {kernel!r}, which would change the inducing "
                "values with every batch. Take WeightSpace or ExactWeightSpace, or variance_correction=False."
            )
        return InducingPoints.chosen(kernel, x, sets, self.init, name, self.trainable, columns)


@dataclass(frozen=True, eq=False, repr=False)
class InducingFamily(OnInducingPoints, FreeFormFamily):
    """The base class of families with inducing points and a free posterior."""


class SVGP(InducingFamily):
    """Inducing points with a full covariance (Hensman, Fusi and Lawrence, 2013; Titsias, 2009).

    q(f) has mean μ + Φm and covariance k − ΦΦᵀ + ΦSΦᵀ. Here LLᵀ = K_ZZ and Φ = K_XZ L⁻ᵀ; m and S = RRᵀ are free, with
    R lower triangular. It takes any likelihood and mini-batches; a step on B rows costs O(BM² + M³).

    :raises ValueError: at the guide's first call, if that has fewer than M distinct inputs.
    """

    def new_coefficients(self) -> NewCoefficients:
        return FullCholesky


@dataclass(frozen=True, eq=False, repr=False)
class SGPR(OnInducingPoints, OptimalFamily):
    """Inducing points with the posterior that is optimal given the likelihood (Titsias, 2009).

    For a Gaussian likelihood the bound is Titsias' collapsed one, log N(y; μ, Q + σ²I) − tr(K − Q)/(2σ²) (eq. 9),
    with Q = ΦΦᵀ = K_XZ K_ZZ⁻¹ K_ZX and noise variance σ². A step takes O(NM² + M³), on all N rows.
    """


class Exact(OptimalFamily):
    """No inducing points: the posterior of the whole process given all N rows, in O(N³) per step; up to 4,000 rows.

    For a likelihood that is Gaussian in f the bound is log p(y) itself (Rasmussen and Williams, 2006, eq. 2.30); for
    others q is the Gaussian of all N function values that is optimal (Opper and Archambeau, 2009), by sites:
    S⁻¹ = K⁻¹ + Λ. Every other family approximates it.
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
class SparseEP(OnInducingPoints, ExpectationFamily):
    """Inducing points with expectation propagation's posterior (Hernández-Lobato and Hernández-Lobato, 2016).

    A Gaussian site exp(−½νₙ(φₙᵀw)² + bₙφₙᵀw) stands for each datum's factor ∫ p(yₙ | f) N(f | φₙᵀw, dₙ) df (eq. 2).

    Inducing inputs stay where they start, but for ``trainable=True``, as in the paper: the objective is no bound, and
    they overfit it, as they do FITC's (Bauer, van der Wilk and Rasmussen, 2016).
    """

    trainable: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False, repr=False)
class OnNestedPoints(OnInducingPoints):
    """A family on nested sets of inducing points.

    :param inducing: the first set: a number or inputs ``(M₁, D)``.
    :param orthogonal: the second set, or a list of further sets.
    """

    orthogonal: Union[Inducing, Sequence[Inducing]] = 64

    def sets(self, num_terms: int = 1) -> list[Any]:
        more = self.orthogonal
        return [self.inducing, *(more if isinstance(more, Sequence) else [more])]


@dataclass(frozen=True, eq=False, repr=False)
class OrthogonalInducing(OnNestedPoints, InducingFamily):
    """SOLVE-GP: nested sets of inducing points with independent covariances.

    Shi, Titsias and Mnih, 2020, "Sparse Orthogonal Variational Inference for Gaussian Processes", eq. 8 and 9:
    M₁ + M₂ points at a lower cost than one set of that size. With L₁L₁ᵀ = K_ZZ, A = L₁⁻¹K_ZO and L₂L₂ᵀ = K_OO − AᵀA the
    features are φ = [L₁⁻¹k_Z ; L₂⁻¹(k_O − AᵀL₁⁻¹k_Z)], and q(w) = N(m₁, S₁) N(m₂, S₂); further sets likewise.
    """

    def new_coefficients(self) -> NewCoefficients:
        return BlockCholesky


@dataclass(frozen=True, eq=False, repr=False)
class OrthogonallyDecoupled(OrthogonalInducing):
    """ODVGP: a second set of inducing points for the mean alone.

    (Salimbeni, Cheng, Boots and Deisenroth, 2018; Shi, Titsias and Mnih, 2020, section 3.4.)
    :class:`OrthogonalInducing` with the prior's covariance for all sets but the first.

    :param num_columns: by default the second set is whitened by a Cholesky factor, in O(M₂³). With a number, its mean
        is c(x, O)a for free coefficients a instead, and the divergence ½aᵀC_OO a is estimated from that many random
        columns of K_OO a step: linear in M₂, of many thousands. For one second set; natural steps would take C_OO⁻¹.
    """

    num_columns: Optional[int] = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        num, sets = self.num_columns, len(self.sets()) - 1
        if_known(require_count, num, "OrthogonallyDecoupled's num_columns")
        if num is not None and (self.natural or sets != 1):
            raise ValueError(
                f"OrthogonallyDecoupled with num_columns takes one set, got {sets}: join them; and no natural steps, "
                f"got natural={self.natural}: gradients train its mean, so leave natural or num_columns out."
            )
        super().__post_init__()

    @property
    def can_step(self) -> bool:
        return self.num_columns is None

    def declared(self) -> dict[str, Any]:
        found = super().declared()  # how many columns a step takes is no part of what was learned
        return found if self.num_columns is None else found | {"num_columns": "some"}

    def new_coefficients(self) -> NewCoefficients:
        return CholeskyIdentity if self.num_columns is None else FullCholesky

    def on_basis(self, basis: Any, batch_shape: Sequence[int], x: Tensor) -> SparseGP:
        if self.num_columns is None:
            return super().on_basis(basis, batch_shape, x)
        first, means = basis.split(1)
        coefficients = self.chosen_coefficients()(first.sizes, batch_shape, x)
        return DecoupledGP(first, means, coefficients, batch_shape, self.declared(), self.num_columns, x)

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> SparseGP:
        basis, means = spec["basis"], spec.get("means", {})
        both = {key: [*basis[key], *means[key]] for key in ("shapes", "of_source") if means}
        return super()._rebuild(spec | {"basis": basis | both}, like, name)


@dataclass(frozen=True, eq=False, repr=False)
class CollapsedOrthogonal(OnNestedPoints, SGPR):
    """SOLVE-GP with optimal independent posteriors of its sets (Shi, Titsias and Mnih, 2020, eq. 27 to 30).

    Each S_b is the inverse of its own block of P = I + ΦᵀΛΦ; m solves the whole system, Pm = ΦᵀΛ(z − μ).
    """

    module: ClassVar = BlockwiseGP


@dataclass(frozen=True, eq=False, repr=False)
class SemiCollapsedOrthogonal(OnNestedPoints, OptimalFamily):
    """SOLVE-GP with the optimal posterior of the first set given free ones of the others.

    (Shi, Titsias and Mnih, 2020, eq. 9 and 10.) For a Gaussian likelihood the bound is
    log N(y; μ + C_fv C_vv⁻¹m_v, Q_ff + σ²I) − tr(S_f⊥)/(2σ²) − KL[N(m_v, S_v) ‖ N(0, C_vv)], which is Titsias' (2009)
    where q(v) is the prior, as it starts.

    :param covariance: S_v: "free" (eq. 9), or "prior", C_vv (eq. 10).
    """

    covariance: str = "free"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.covariance, "SemiCollapsedOrthogonal's covariance", "free", "prior")

    module: ClassVar = SemiCollapsedGP

    def on_basis(self, basis: Any, batch_shape: Sequence[int], x: Tensor, *more: object) -> OptimalGP:
        kind = BlockCholesky if self.covariance == "free" else Identity
        return super().on_basis(basis, batch_shape, x, kind(basis.sizes[1:], batch_shape, x))


class ConditionalSGPR(SGPR):
    """Inducing points whose posterior depends on the rest of f (Shi, Titsias and Mnih, 2020, appendix A).

    q(u | f⊥) = p(u | f⊥, y). For a Gaussian likelihood the bound is log N(y; μ, A) − ½tr(A⁻¹(K_ff − Q_ff)) with
    A = Q_ff + σ²I (eq. 14), above Titsias' by ½tr((σ⁻²I − A⁻¹)(K_ff − Q_ff)) (eq. 15). A step takes O(N²M) time and, in
    blocks, O(NM) memory: for some ten thousands of data.
    """

    module: ClassVar = ConditionalGP
