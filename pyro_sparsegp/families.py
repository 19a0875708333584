"""The variational families by name: each a basis times a Gaussian over its coefficients.

A family is a small frozen recipe; the guide builds a module from it for each GP site at its first call.
``inducing`` is a count, chosen among that call's inputs, a tensor of inputs, or
:class:`~pyro_sparsegp.bases.InducingVariables`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor

from .bases import Additive, Basis, ExplicitFeatures, InducingPoints, InducingVariables
from .bases.actions import BlockPolicy, EigenPolicy, KrylovPolicy, Policy, RandomPolicy, UserPolicy
from .bases.initial import Initialiser
from .expectation_gp import ExpectationGP
from .kernels import base as kernel_base
from .orthogonal_gp import ConditionalGP, DecoupledGP, SemiCollapsedGP
from .posteriors import (
    BlockCholesky,
    BlockPlusLowRank,
    CholeskyIdentity,
    Coefficients,
    FullCholesky,
    Identity,
    IdentityPlusLowRank,
    Unwhitened,
)
from .process import GaussianProcess
from .sites import FreeSites as FreeSitesModule
from .sites import KeptSites
from .sparse_gp import OptimalGP, ProjectedGP, SparseGP

__all__ = [
    "SGPR",
    "SVGP",
    "AdditiveFamily",
    "CollapsedOrthogonal",
    "ComputationAware",
    "ConditionalSGPR",
    "CoupledCovariance",
    "CoupledPrecision",
    "ExactWeightSpace",
    "ExpectationFamily",
    "Family",
    "FreeFormFamily",
    "FreeSites",
    "InducingFamily",
    "MeanFieldAdditive",
    "OptimalFamily",
    "OrthogonalInducing",
    "OrthogonallyDecoupled",
    "SemiCollapsedOrthogonal",
    "SiteFamily",
    "SparseEP",
    "SparseGP",
    "WeightSpace",
]

Inducing = Union[int, Tensor, InducingVariables]
NewCoefficients = Callable[[Sequence[int], Sequence[int], Tensor], Coefficients]


@dataclass(frozen=True, eq=False)
class Family(ABC):
    """What the guide asks of a family: a fresh module, or one to load a state into."""

    @abstractmethod
    def build(self, process: GaussianProcess, name: str) -> Any:
        """A fresh module for a site whose prior, at the guide's first call, is ``process``.

        :raises ValueError: naming the site, where the family does not fit its inputs or kernel.
        """

    @abstractmethod
    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> Any:
        """A module of the shapes of ``spec``, its values still to be loaded."""

    def declared(self) -> dict[str, Any]:
        """The recipe in plain Python: the family's name and its numbers; of given inputs, how many there are."""

        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.shape[-2] if value.dim() > 1 else len(value)
            if isinstance(value, (list, tuple)):
                return [plain(part) for part in value]
            if isinstance(value, InducingVariables):
                return f"{type(value).__name__}({value.size})"
            return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

        numbers = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in _NOT_DECLARED}
        return {"name": type(self).__name__, **numbers}

    def rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> Any:
        """A module of the shapes of ``spec``, with the dtype and device of ``like``.

        :raises ValueError: naming the site, if ``spec`` is of another family or of other numbers.
        """
        if spec["family"] != self.declared():
            raise ValueError(
                f"the saved posterior of GP site {name!r} is {_call(spec['family'])}, this guide declares "
                f"{_call(self.declared())}; make the guide with the saved family."
            )
        return self._rebuild(spec, like, name)


_NOT_DECLARED = ("init", "trainable", "at", "rate", "updates", "tolerance")  # they change no shape


@dataclass(frozen=True, eq=False)
class BasisFamily(Family):
    """A family on a basis: it says how this starts, and how it is made again before its state is loaded."""

    @abstractmethod
    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        """The basis, initialised from the inputs and hyperparameters of a first call."""

    @abstractmethod
    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        """The basis of that ``spec``, its values still to be loaded."""


@dataclass(frozen=True, eq=False)
class FreeFormFamily(BasisFamily):
    """A recipe for :class:`SparseGP` modules: a basis, and a free posterior over its coefficients.

    A new one gives, besides its basis, the :class:`~pyro_sparsegp.posteriors.Coefficients` it takes.
    """

    @abstractmethod
    def new_coefficients(self) -> NewCoefficients:
        """The posterior over the coefficients, to be called with block sizes, batch shape and a tensor like it."""

    def build(self, process: GaussianProcess, name: str) -> SparseGP:
        module = self._assemble(self.new_basis(process, name), process.batch_shape, process.x, name)
        module.start(process, name)
        return module

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> SparseGP:
        return self._assemble(self.old_basis(spec["basis"], like), spec["batch_shape"], like, name)

    def _assemble(self, basis: Any, batch_shape: Sequence[int], like: Tensor, name: str) -> SparseGP:
        _require_basis(basis, name)
        coefficients = self.new_coefficients()(basis.sizes, batch_shape, like)
        return SparseGP(basis, coefficients, batch_shape, self.declared())


@dataclass(frozen=True, eq=False)
class OnInducingPoints(BasisFamily):
    """A family on inducing points of the whole kernel, in one or several sets.

    :param init: how counts become inputs: "greedy" (conditional variance), "kmeans", "grid" (regular, at most as many,
        for kernels of one or two columns) or a callable ``(kernel, x, num) -> (num, D)``.
    :param trainable: whether the inducing inputs are learned.
    """

    init: Union[str, Initialiser] = field(default="greedy", kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    @abstractmethod
    def sets(self) -> list[Inducing]:
        """The sets of inducing inputs, in order."""

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        _require_own_diagonal(process.kernel, name)
        return InducingPoints.chosen(process.kernel, process.x, self.sets(), self.init, name, self.trainable)

    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        return InducingPoints.rebuilt(spec, like, self.trainable, self.sets())


@dataclass(frozen=True, eq=False)
class InducingFamily(OnInducingPoints, FreeFormFamily):
    """Inducing points with a free posterior; as :class:`OnInducingPoints`.

    :param whiten: whether q is over whitened coefficients w (default) or over the values u = Lw at inducing inputs,
        the parameterisation of the papers' formulas.
    """

    whiten: bool = field(default=True, kw_only=True)

    def _assemble(self, basis: Any, batch_shape: Sequence[int], like: Tensor, name: str) -> SparseGP:
        _require_basis(basis, name)
        coefficients = self.parameterised(self.new_coefficients())(basis.sizes, batch_shape, like)
        return SparseGP(basis, coefficients, batch_shape, self.declared())

    def parameterised(self, kind: NewCoefficients) -> NewCoefficients:
        """That posterior, over w or over u."""
        return kind if self.whiten else partial(Unwhitened, kind)


@dataclass(frozen=True, eq=False)
class SVGP(InducingFamily):
    """Inducing points with a full covariance (Hensman, Fusi and Lawrence, 2013; Titsias, 2009).

    :param inducing: their number M, or the inputs ``(M, D)``.
    """

    inducing: Inducing = 64

    def sets(self) -> list[Inducing]:
        return [self.inducing]

    def new_coefficients(self) -> NewCoefficients:
        return FullCholesky


@dataclass(frozen=True, eq=False)
class OrthogonalInducing(InducingFamily):
    """SOLVE-GP: nested sets of inducing points with independent covariances (paper 1, section 3).

    Shi, Titsias and Mnih, 2020, "Sparse Orthogonal Variational Inference for Gaussian Processes", eq. 8 and 9:
    M₁ + M₂ points at a lower cost than one set of that size.

    :param inducing: the first set: a number or inputs ``(M₁, D)``.
    :param orthogonal: the second set, or a list of further sets.
    """

    inducing: Inducing = 64
    orthogonal: Union[Inducing, Sequence[Inducing]] = 64

    def sets(self) -> list[Inducing]:
        more = self.orthogonal
        return [self.inducing, *(more if isinstance(more, Sequence) else [more])]

    def new_coefficients(self) -> NewCoefficients:
        return BlockCholesky


@dataclass(frozen=True, eq=False)
class OrthogonallyDecoupled(OrthogonalInducing):
    """ODVGP: a second set of inducing points for the mean alone (Salimbeni et al., 2018; paper 1, section 3.4).

    :class:`OrthogonalInducing` with the prior's covariance for all sets but the first.

    :param num_columns: by default the second set is whitened by a Cholesky factor, in O(M₂³). With a number, its mean
        is c(x, O)a for free coefficients a instead, and the divergence ½aᵀC_OO a is estimated from that many random
        columns of K_OO a step: linear in M₂, which may then be many thousands. For one second set.
    """

    num_columns: Optional[int] = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        num = self.num_columns
        if num is not None and (isinstance(num, bool) or not isinstance(num, int) or num < 1):
            raise ValueError(
                f"OrthogonallyDecoupled's num_columns must be None or a whole number of at least 1, got {num!r}"
            )
        if num is not None and len(self.sets()) != 2:
            raise ValueError(
                f"OrthogonallyDecoupled with num_columns takes one set, got {len(self.sets()) - 1}: join them."
            )

    def new_coefficients(self) -> NewCoefficients:
        return CholeskyIdentity if self.num_columns is None else FullCholesky

    def _assemble(self, basis: Any, batch_shape: Sequence[int], like: Tensor, name: str) -> SparseGP:
        if self.num_columns is None:
            return super()._assemble(basis, batch_shape, like, name)
        first, means = basis.split(1)
        coefficients = self.parameterised(FullCholesky)(first.sizes, batch_shape, like)
        return DecoupledGP(first, means, coefficients, batch_shape, self.declared(), self.num_columns, like)

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> SparseGP:
        if self.num_columns is None:
            return super()._rebuild(spec, like, name)
        first, second = spec["basis"], spec["means"]
        both = {key: [*first[key], *second[key]] for key in ("shapes", "of_source")}
        return self._assemble(self.old_basis(first | both, like), spec["batch_shape"], like, name)


@dataclass(frozen=True, eq=False)
class AdditiveFamily(FreeFormFamily):
    """A family on a basis for each summand of an additive kernel Σ_c k_c.

    A summand with finite features (a constant, a linear term) uses those; every other has inducing points of
    its own, in the columns that it reads, at most as many as there are distinct inputs in them.

    :param inducing: a number or inputs for every summand, or a list with one entry a summand (entries of
        summands with features are not used): a number, or inputs ``(M_c, d)`` in the columns that the summand reads.
    :param init: as in :class:`InducingFamily`, summand by summand; "grid" suits main effects and pairs.
    :param trainable: whether the inducing inputs are learned.
    """

    inducing: Union[Inducing, Sequence[Optional[Inducing]]] = 32
    init: Union[str, Initialiser] = field(default="greedy", kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        terms = kernel_base.terms(process.kernel)
        wanted = self._entries(len(terms))
        if len(wanted) != len(terms):
            raise ValueError(
                f"{type(self).__name__}'s inducing lists {len(wanted)} entries, the kernel of site {name!r} has "
                f"{len(terms)} terms: {list(terms)}"
            )
        parts: list[Basis] = []
        for i, (term, inducing) in enumerate(zip(terms, wanted)):
            phi = kernel_base.features(term, process.x[..., :1, :])
            if phi is not None:
                parts.append(ExplicitFeatures(phi.shape[-1]))
                continue
            if inducing is None:
                raise ValueError(f"{type(self).__name__}'s inducing has no entry for term {i} of site {name!r}: {term}")
            _require_own_diagonal(term, f"{name}, term {i}")
            columns = kernel_base.columns(term)
            where = f"{name}, term {i}"
            parts.append(InducingPoints.chosen(term, process.x, [inducing], self.init, where, self.trainable, columns))
        return Additive(parts)

    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        wanted = self._entries(len(spec["parts"]))
        return Additive(
            [
                ExplicitFeatures(part["size"])
                if part["kind"] == "features"
                else InducingPoints.rebuilt(part, like, self.trainable, [inducing])
                for part, inducing in zip(spec["parts"], wanted)
            ]
        )

    def _entries(self, num_terms: int) -> list[Optional[Inducing]]:
        """What is asked for, for each summand."""
        return list(self.inducing) if isinstance(self.inducing, Sequence) else [self.inducing] * num_terms


@dataclass(frozen=True, eq=False)
class MeanFieldAdditive(AdditiveFamily):
    """Independent posteriors of the summands (Saul et al., 2016; paper 0, table 1)."""

    def new_coefficients(self) -> NewCoefficients:
        return BlockCholesky


@dataclass(frozen=True, eq=False)
class CoupledCovariance(AdditiveFamily):
    """One full covariance over the coefficients of all summands (Adam, 2017; paper 0, table 1)."""

    def new_coefficients(self) -> NewCoefficients:
        return FullCholesky


@dataclass(frozen=True, eq=False)
class CoupledPrecision(AdditiveFamily):
    """Summands coupled by a low-rank term of the precision (paper 0, eq. 7), in storage linear in their number.

    Adam, Durrande and John, 2018, "Scalable GAM using sparse variational Gaussian processes".

    :param rank: the rank of the coupling; ``None`` is the size of the largest block.
    :param base: what the low rank is added to: "block" (default), a free covariance of each summand, which
        contains :class:`MeanFieldAdditive`; or "identity", the prior's, which is the paper's eq. 7 and does not.
    """

    rank: Optional[int] = None
    base: str = "block"

    def __post_init__(self) -> None:
        if self.base not in ("block", "identity"):
            raise ValueError(f'CoupledPrecision\'s base must be "block" or "identity", got {self.base!r}')
        if self.rank is not None and (not isinstance(self.rank, int) or self.rank < 1):
            raise ValueError(f"CoupledPrecision's rank must be None or a whole number of at least 1, got {self.rank!r}")

    def new_coefficients(self) -> NewCoefficients:
        return partial(BlockPlusLowRank if self.base == "block" else IdentityPlusLowRank, rank=self.rank)


@dataclass(frozen=True, eq=False)
class OnFeatures(BasisFamily):
    """A family on the kernel's own finite features."""

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        phi = kernel_base.features(process.kernel, process.x[..., :1, :])
        if phi is None:
            raise ValueError(
                f"the kernel of site {name!r} has no finite features, {process.kernel!r}: weight space needs a kernel "
                "such as Linear or Polynomial; for others take inducing points, SVGP or SGPR."
            )
        return ExplicitFeatures(phi.shape[-1])

    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        return ExplicitFeatures(spec["size"])


@dataclass(frozen=True, eq=False)
class WeightSpace(OnFeatures, FreeFormFamily):
    """The kernel's own features with a full covariance (paper 3, eq. 8 to 10): any likelihood, by mini-batches.

    Under a :class:`~pyro_sparsegp.kernels.DeepBasis` a step's variance correction is relative to the batch, that of
    predictions to the training inputs that the guide has seen in one call: call it on all of them once.
    """

    def new_coefficients(self) -> NewCoefficients:
        return FullCholesky


@dataclass(frozen=True, eq=False)
class SiteFamily(Family):
    """A family whose posterior follows from Gaussian sites N(zₙ | fₙ, 1/λₙ), read off the model's likelihood.

    For likelihoods that are Gaussian in f the sites are exact and differentiable: λ = −ℓ'', λ(z − μ) = ℓ'(μ) with
    ℓₙ(f) = log p(yₙ | f). For others they are iterated by conjugate-computation VI (Khan and Lin, 2017), λ = −E[ℓ'']
    (by Stein's identity, which sees kinks; cut at 0, and the guide's ``site_status`` counts how often) and λ(z − m) =
    E[ℓ'], and kept between steps. Gradients pass through the last update only: where q is the bound's optimum this
    is the whole gradient, under data projections with a likelihood that is not Gaussian it is an approximation.

    A call with data and gradients enabled is a training step; others leave the sites alone. They train on all rows at
    once; a mini-batch raises. Prediction needs only the guide, which keeps X and the sites at the medians of the other
    latents.

    :param at: where ℓ' and ℓ'' are taken: "marginals", their expectations under q, the optimum of the bound; or
        "mean", at q's mean, which is Newton's method for Laplace's approximation.
    :param rate: the damping of these updates, in (0, 1].
    :param updates: how many updates a step makes. One will do with Adam; L-BFGS, whose line search wants a function
        of the parameters alone, needs some 20 where the likelihood is not Gaussian.
    """

    at: str = field(default="marginals", kw_only=True)
    rate: float = field(default=0.7, kw_only=True)
    updates: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.at not in ("marginals", "mean"):
            raise ValueError(f'{type(self).__name__}\'s at must be "marginals" or "mean", got {self.at!r}')
        if not (isinstance(self.rate, (int, float)) and 0 < self.rate <= 1):
            raise ValueError(f"{type(self).__name__}'s rate must be a number in (0, 1], got {self.rate!r}")
        if not isinstance(self.updates, int) or self.updates < 1:
            raise ValueError(
                f"{type(self).__name__}'s updates must be a whole number of at least 1, got {self.updates!r}"
            )


@dataclass(frozen=True, eq=False)
class OptimalFamily(SiteFamily, BasisFamily):
    """A basis with the posterior of its coefficients that is optimal for the sites."""

    blockwise: ClassVar[bool] = False  # independent blocks of coefficients

    def build(self, process: GaussianProcess, name: str) -> OptimalGP:
        _require_matrix(process, name)
        return self._assemble(self.new_basis(process, name), self.new_sites(process), process.batch_shape, name)

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> OptimalGP:
        basis = self.old_basis(spec["basis"], like)
        return self._assemble(basis, self.old_sites(spec, like), spec["batch_shape"], name)

    def new_sites(self, process: GaussianProcess) -> Union[KeptSites, FreeSitesModule]:
        """The module of the sites, for the inputs of a first call."""
        return KeptSites(process.x, process.batch_shape, process.x.shape[-1])

    def old_sites(self, spec: dict[str, Any], like: Tensor) -> Union[KeptSites, FreeSitesModule]:
        """The module of the sites of that ``spec``."""
        return KeptSites(like, spec["batch_shape"], spec["columns"])

    def _assemble(
        self, basis: Any, sites: Union[KeptSites, FreeSitesModule], batch_shape: Sequence[int], name: str
    ) -> OptimalGP:
        _require_basis(basis, name)
        return OptimalGP(basis, self.blockwise, sites, batch_shape, self.declared(), self.at, self.rate, self.updates)


@dataclass(frozen=True, eq=False)
class SGPR(OnInducingPoints, OptimalFamily):
    """Inducing points with the posterior that is optimal given the likelihood (Titsias, 2009).

    For a Gaussian likelihood the bound is Titsias' collapsed one, log N(y; μ, Q + σ²I) − tr(K − Q)/(2σ²) (eq. 9).

    :param inducing: their number M, or the inputs ``(M, D)``.
    """

    inducing: Inducing = 64

    def sets(self) -> list[Inducing]:
        return [self.inducing]


@dataclass(frozen=True, eq=False)
class CollapsedOrthogonal(SGPR):
    """SOLVE-GP with optimal independent posteriors of its sets (paper 1, eq. 27 to 30).

    :param inducing: the first set: a number or inputs ``(M₁, D)``.
    :param orthogonal: the second set, or a list of further sets.
    """

    orthogonal: Union[Inducing, Sequence[Inducing]] = 64
    blockwise: ClassVar[bool] = True

    def sets(self) -> list[Inducing]:
        more = self.orthogonal
        return [self.inducing, *(more if isinstance(more, Sequence) else [more])]


@dataclass(frozen=True, eq=False)
class SemiCollapsedOrthogonal(OnInducingPoints, OptimalFamily):
    """SOLVE-GP with the optimal posterior of the first set given free ones of the others (paper 1, eq. 9 and 10).

    For a Gaussian likelihood the bound is
    log N(y; μ + C_fv C_vv⁻¹m_v, Q_ff + σ²I) − tr(S_f⊥)/(2σ²) − KL[N(m_v, S_v) ‖ N(0, C_vv)], which is Titsias' (2009)
    where q(v) is the prior, as it starts.

    :param inducing: the first set: a number or inputs ``(M₁, D)``.
    :param orthogonal: the second set, or a list of further sets.
    :param covariance: S_v: "free" (eq. 9), or "prior", C_vv (eq. 10).
    """

    inducing: Inducing = 64
    orthogonal: Union[Inducing, Sequence[Inducing]] = 64
    covariance: str = "free"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.covariance not in ("free", "prior"):
            raise ValueError(
                f'SemiCollapsedOrthogonal\'s covariance must be "free" or "prior", got {self.covariance!r}'
            )

    def sets(self) -> list[Inducing]:
        more = self.orthogonal
        return [self.inducing, *(more if isinstance(more, Sequence) else [more])]

    def _assemble(
        self, basis: Any, sites: Union[KeptSites, FreeSitesModule], batch_shape: Sequence[int], name: str
    ) -> OptimalGP:
        _require_basis(basis, name)
        kind = BlockCholesky if self.covariance == "free" else Identity
        others = kind(basis.sizes[1:], batch_shape, sites.inputs)
        return SemiCollapsedGP(basis, others, sites, batch_shape, self.declared(), self.at, self.rate, self.updates)


@dataclass(frozen=True, eq=False)
class ConditionalSGPR(SGPR):
    """Inducing points whose posterior depends on the rest of f: the tighter bound of paper 1, appendix A.

    q(u | f⊥) = p(u | f⊥, y). For a Gaussian likelihood the bound is log N(y; μ, A) − ½tr(A⁻¹(K_ff − Q_ff)) with
    A = Q_ff + σ²I (eq. 14), which lies above Titsias' by ½tr((σ⁻²I − A⁻¹)(K_ff − Q_ff)) (eq. 15). A step
    takes O(N²M) time and, in blocks, O(NM) memory: for some ten thousands of data.

    :param inducing: their number M, or the inputs ``(M, D)``.
    """

    def _assemble(
        self, basis: Any, sites: Union[KeptSites, FreeSitesModule], batch_shape: Sequence[int], name: str
    ) -> OptimalGP:
        _require_basis(basis, name)
        return ConditionalGP(basis, sites, batch_shape, self.declared(), self.at, self.rate, self.updates)


@dataclass(frozen=True, eq=False)
class FreeSites(SGPR):
    """Inducing points with the optimal form of q and its sites as 2N free parameters (paper 0, eq. 4 and 6).

    At the optimum λₙ² = −2 ∂E[log p(yₙ | f)]/∂σₙ², with σₙ² the marginal variance; the precisions λₙ² are kept
    non-negative, which likelihoods that are not log-concave may not ask for. The bound is not concave in these
    parameters, and with N > M(M + 3)/2, all that a Gaussian over M coefficients has, they are more than
    :class:`SVGP` needs: :class:`SGPR` finds the same optimum in a few updates.

    :param inducing: the number M of inducing points, or the inputs ``(M, D)``.
    """

    def new_sites(self, process: GaussianProcess) -> FreeSitesModule:
        return FreeSitesModule(process.x, process.batch_shape, process.variance.sqrt())

    def old_sites(self, spec: dict[str, Any], like: Tensor) -> FreeSitesModule:
        return FreeSitesModule(like.new_zeros(spec["rows"], spec["columns"]), spec["batch_shape"])


@dataclass(frozen=True, eq=False)
class ExactWeightSpace(OnFeatures, OptimalFamily):
    """The kernel's own features with the posterior that is optimal given the likelihood (paper 3, eq. 5, 6 and 12).

    A step takes O(NR²) time for R features. Beyond 32,768 rows on a CPU (a million on a GPU) these are formed in
    blocks and dropped, on the way back too, so that memory is O(N + BR) with B rows a block: a network's output must
    then depend on each row alone. Under a :class:`~pyro_sparsegp.kernels.DeepBasis` the bound is that of eq. 11, and
    predictions are those of eq. 12, from the sites of log ∫ p(y | f) N(f | φᵀw, c) df: of variance σ² + c(xₙ) for a
    likelihood that is Gaussian in f, for others found anew, by integrals over two axes, at the first prediction after
    training, which takes the time of some hundred steps of training. Where terms have several function values (softmax,
    a second GP in the noise) training's sites stand for data of variance 1/λₙ, to which c is added.
    """


@dataclass(frozen=True, eq=False)
class ComputationAware(SiteFamily):
    """CaGP: the posterior given i projections Sᵀz of the data (Wenger et al., 2024, eq. 5), never overconfident.

    Mean μ + k(x, X)S(SᵀK̂S)⁻¹Sᵀ(z − μ), covariance k − k(x, X)S(SᵀK̂S)⁻¹Sᵀk(X, x) with K̂ = K + Λ⁻¹: the
    variance is that of the exact posterior plus what computation was spared. One step evaluates all N² kernel entries
    (not kept: memory is O(N·i)), and so does a posterior at new inputs.

    :param num_actions: i.
    :param actions: "sparse" (learned, one number a datum, eq. 14), "cg" (residuals of conjugate gradients), "eigen"
        (top eigenvectors), "random", or a callable ``(kernel, sites) -> S`` of shape ``(N, i)``; of a module, a
        copy trains, ``guide.gps.f.policy.policy``. Sparse and random actions belong to the rows of the first call.
    :param tolerance: of "cg": the residual, relative to the first, at which it stops.
    """

    num_actions: int = 64
    actions: Union[str, Callable] = "sparse"
    tolerance: float = field(default=1e-4, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.num_actions, bool) or not isinstance(self.num_actions, int) or self.num_actions < 1:
            raise ValueError(
                f"ComputationAware's num_actions must be a whole number of at least 1, got {self.num_actions!r}"
            )
        if not callable(self.actions) and self.actions not in _POLICIES:
            raise ValueError(
                f"ComputationAware's actions must be one of {sorted(_POLICIES)} or a callable (kernel, sites) -> S, "
                f"got {self.actions!r}"
            )

    def build(self, process: GaussianProcess, name: str) -> ProjectedGP:
        _require_matrix(process, name)
        sites = KeptSites(process.x, process.batch_shape, process.x.shape[-1])
        x, kernel = process.x.detach(), process.kernel
        if x.shape[-2] < self.num_actions:
            raise ValueError(
                f"site {name!r} asks for {self.num_actions} actions, the guide's first call has {x.shape[-2]} rows"
            )
        row = x[:1]
        if kernel_base.depends_on_rows(kernel) or not torch.allclose(
            kernel.diag(row), kernel(row, row)[..., 0], rtol=1e-4
        ):
            raise ValueError(
                f"the kernel of site {name!r} has a diagonal term, such as White or a DeepBasis' correction, which "
                "projections of data cannot tell from noise: put the noise into the likelihood, or turn the correction "
                "off."
            )
        policy = self._policy(x, process.batch_shape, None)
        return ProjectedGP(policy, sites, process.batch_shape, self.declared(), self.at, self.rate, self.updates)

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> ProjectedGP:
        sites = KeptSites(like, spec["batch_shape"], spec["columns"])
        x = like.new_zeros(spec["rows"] or self.num_actions, spec["columns"])
        order = torch.zeros(len(x), dtype=torch.long, device=like.device)
        policy = self._policy(x, spec["batch_shape"], order)
        return ProjectedGP(policy, sites, spec["batch_shape"], self.declared(), self.at, self.rate, self.updates)

    def _policy(self, x: Tensor, batch_shape: Sequence[int], order: Optional[Tensor]) -> Policy:
        if self.actions == "sparse":
            return BlockPolicy(x, self.num_actions, batch_shape, order)
        if self.actions == "cg":
            return KrylovPolicy(self.num_actions, self.tolerance)
        if self.actions == "eigen":
            return EigenPolicy(self.num_actions)
        if self.actions == "random":
            return RandomPolicy(x, self.num_actions, order is None)
        assert callable(self.actions)
        return UserPolicy(self.actions, self.num_actions)


@dataclass(frozen=True, eq=False)
class ExpectationFamily(BasisFamily):
    """A basis with the posterior of its coefficients given expectation propagation's sites.

    It trains by :class:`~pyro_sparsegp.ExpectationPropagation`; latents that are no GPs are points.
    """

    def build(self, process: GaussianProcess, name: str) -> ExpectationGP:
        _require_own_diagonal(process.kernel, name)
        return self._assemble(self.new_basis(process, name), process.batch_shape, process.x, name)

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> ExpectationGP:
        return self._assemble(self.old_basis(spec["basis"], like), spec["batch_shape"], like, name)

    def _assemble(self, basis: Any, batch_shape: Sequence[int], like: Tensor, name: str) -> ExpectationGP:
        _require_basis(basis, name)
        return ExpectationGP(basis, batch_shape, like, self.declared())


@dataclass(frozen=True, eq=False)
class SparseEP(OnInducingPoints, ExpectationFamily):
    """Inducing points with expectation propagation's posterior (Hernández-Lobato and Hernández-Lobato, 2016).

    "Scalable Gaussian Process Classification via Expectation Propagation": a Gaussian site
    exp(−½νₙ(φₙᵀw)² + bₙφₙᵀw) stands for each datum's factor ∫ p(yₙ | f) N(f | φₙᵀw, dₙ) df (paper 4, eq. 2).

    :param inducing: their number M, or the inputs ``(M, D)``.
    """

    inducing: Inducing = 64

    def sets(self) -> list[Inducing]:
        return [self.inducing]


_POLICIES = ("cg", "eigen", "random", "sparse")


def _require_own_diagonal(kernel: Any, name: str) -> None:
    if kernel_base.depends_on_rows(kernel):
        raise ValueError(
            f"the kernel of site {name!r} has a variance correction, {kernel!r}: that of inducing inputs would change "
            "with the rows given, and with it what was learned. Take WeightSpace or ExactWeightSpace, or "
            "variance_correction=False."
        )


def _require_basis(basis: Any, name: str) -> None:
    if not basis.sizes:
        raise ValueError(f"the kernel of site {name!r} is white noise alone; no basis can represent it")


def _require_matrix(process: GaussianProcess, name: str) -> None:
    if process.x.dim() != 2:
        raise ValueError(
            f"site {name!r} has inputs of shape {tuple(process.x.shape)}; a family on sites needs one matrix (N, D)"
        )


def _call(declared: dict[str, Any]) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in declared.items() if key != "name")
    return f"{declared['name']}({arguments})"
