"""Families for additive kernels, with a basis for each summand (Adam, Durrande and John, 2018)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional, Union

from torch import Tensor

from ..bases import Basis
from ..bases.additive import Additive
from ..bases.features import ExplicitFeatures
from ..bases.inducing import Inducing
from ..bases.initial import Initialiser
from ..gaussians import BlockCholesky, BlockPlusLowRank, Coefficients, FullCholesky, IdentityPlusLowRank, NaturalLowRank
from ..kernels.algebra import term_names
from ..numerics.arguments import require_choice, require_count
from ..numerics.functions import if_known
from ..process import GaussianProcess
from .base import FreeFormFamily, NewCoefficients, OptimalFamily, require_basis
from .inducing import OnInducingPoints

_DENSE = 96  # coefficients up to which sums in one matrix are quicker than blocks


@dataclass(frozen=True, eq=False, repr=False)
class OnTerms(OnInducingPoints):
    """A family on a basis for each summand of an additive kernel Σ_c k_c.

    A summand with finite features (a constant, a linear term) uses those; every other has inducing points of
    its own, in the columns that it reads, at most as many as there are distinct inputs in them.

    :param inducing: the number of inducing inputs of each summand, or these inputs ``(M_c, d)`` in the columns that the
        summand reads. A list has one entry per summand; entries of summands with finite features are not used.
    :param init: how inducing inputs are chosen, as in :class:`InducingFamily`; "grid" suits main effects and pairs.
    """

    inducing: Union[Inducing, Sequence[Optional[Inducing]]] = 32  # type: ignore[assignment]
    init: Union[str, Initialiser, None] = field(default="greedy", kw_only=True)

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        terms = process.kernel.terms
        wanted = self.sets(len(terms))
        if len(wanted) != len(terms):
            raise ValueError(
                f"{type(self).__name__}'s inducing lists {len(wanted)} entries, the kernel of site {name!r} has "
                f"{len(terms)} terms: {list(terms)}"
            )
        parts: list[Basis] = []
        for i, (term, inducing) in enumerate(zip(terms, wanted)):
            phi = term.features(process.x[..., :1, :])
            if phi is not None:
                parts.append(ExplicitFeatures(phi.shape[-1]))
                continue
            if inducing is None:
                raise ValueError(f"{type(self).__name__}'s inducing has no entry for term {i} of site {name!r}: {term}")
            parts.append(self.points(term, process.x, [inducing], f"{name}, term {i}", term.columns))
        return require_basis(Additive(parts, term_names(process.kernel)), name)

    def sets(self, num_terms: int = 1) -> list[Any]:
        return list(self.inducing) if isinstance(self.inducing, Sequence) else [self.inducing] * num_terms


@dataclass(frozen=True, eq=False, repr=False)
class AdditiveFamily(OnTerms, FreeFormFamily):
    """The base class of families with a basis for each summand of the kernel and a free posterior."""


class MeanFieldAdditive(AdditiveFamily):
    """Independent posteriors of the summands, S = blockdiag(S₁, …, S_C) (Saul, Hensman, Vehtari and Lawrence, 2016).

    A summand f_c has mean Φ_c m_c and variance d_c + diag(Φ_c S_c Φ_cᵀ), with Φ_c the features of its own basis and d_c
    what they leave of its prior variance. If the data hardly tell two summands apart, their intervals are too narrow.
    """

    def new_coefficients(self) -> NewCoefficients:
        return BlockCholesky

    def in_natural_steps(self) -> NewCoefficients:
        """That posterior, by natural steps; with many coefficients, at a cost linear in the number of summands."""
        blocks: NewCoefficients = partial(NaturalLowRank, rank=0, rate=self.rate)
        dense = super().in_natural_steps()

        def made(sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor) -> Coefficients:
            return (dense if sum(sizes) <= _DENSE else blocks)(sizes, batch_shape, like)

        return made


class CoupledCovariance(AdditiveFamily):
    """One full covariance S over the CM coefficients of all C summands (Adam, 2017), in O((CM)³) per step."""

    def new_coefficients(self) -> NewCoefficients:
        return FullCholesky


@dataclass(frozen=True, eq=False, repr=False)
class CoupledPrecision(AdditiveFamily):
    """Summands coupled by a low-rank term of the precision, in storage linear in their number.

    S⁻¹ = blockdiag(R₁R₁ᵀ, …, R_CR_Cᵀ) + BBᵀ with a triangular R_c for each summand and B of ``rank`` columns; S is
    never formed. Adam, Durrande and John, 2018, have S⁻¹ = I + BBᵀ (eq. 7).

    :param rank: the rank of the coupling; ``None`` is the size of the largest block.
    :param base: the precision that BBᵀ is added to. "block" (default) is free in each summand, so that the family
        contains :class:`MeanFieldAdditive`. "identity" is the prior's precision, as in the paper.
    """

    rank: Optional[int] = None
    base: str = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.base, "CoupledPrecision's base", "block", "identity")
        if_known(require_count, self.rank, "CoupledPrecision's rank")

    def new_coefficients(self) -> NewCoefficients:
        return partial(BlockPlusLowRank if self.base == "block" else IdentityPlusLowRank, rank=self.rank)

    can_step = True

    def in_natural_steps(self) -> NewCoefficients:
        return partial(NaturalLowRank, rank=self.rank, base=self.base == "block", rate=self.rate)


@dataclass(frozen=True, eq=False, repr=False)
class AdditiveSGPR(OnTerms, OptimalFamily):
    """A basis for each summand with the joint posterior that is optimal given the likelihood.

    (Adam, Durrande and John, 2018, eq. 6.) S⁻¹ = I + ΦᵀΛΦ, one matrix of all coefficients, Φ = [Φ₁ … Φ_C] and Λ the
    sites' precisions: what :class:`CoupledCovariance` tends to, in a few steps on all rows.
    """
