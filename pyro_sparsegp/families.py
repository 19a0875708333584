"""The variational families by name: each a basis times a Gaussian over its coefficients.

A family is a small frozen recipe; the guide builds a module from it for each GP site at its first call.
``inducing`` is a count, chosen among that call's inputs, or a tensor of inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .bases import Additive, Basis, ExplicitFeatures, InducingPoints
from .bases.initial import Initialiser, choose_inputs
from .kernels import base as kernel_base
from .modules import AbstractModule
from .posteriors import (
    BlockCholesky,
    BlockPlusLowRank,
    CholeskyIdentity,
    Coefficients,
    FullCholesky,
    IdentityPlusLowRank,
)
from .process import GaussianProcess, SparsePosterior

__all__ = [
    "SVGP",
    "AdditiveFamily",
    "CoupledCovariance",
    "CoupledPrecision",
    "Family",
    "InducingFamily",
    "MeanFieldAdditive",
    "OrthogonalInducing",
    "OrthogonallyDecoupled",
    "SparseGP",
]

Inducing = Union[int, Tensor]
NewCoefficients = Callable[[Sequence[int], Sequence[int], Tensor], Coefficients]


class SparseGP(AbstractModule):
    """One site's variational module: a basis and a Gaussian over its coefficients.

    :param family: what was declared, :meth:`Family.declared`.
    """

    def __init__(
        self, basis: Basis, coefficients: Coefficients, batch_shape: Sequence[int], family: dict[str, Any]
    ) -> None:
        super().__init__()
        self.basis, self.coefficients, self.family = basis, coefficients, family
        self.batch_shape = torch.Size(batch_shape)

    def forward(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior] = SparsePosterior
    ) -> SparsePosterior:
        """The posterior of ``process``, at its inputs and under its hyperparameters."""
        features = self.basis(process.kernel, process.jitter, name)
        return kind(process, features, self.coefficients(), name)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family}


@dataclass(frozen=True, eq=False)
class Family(ABC):
    """A recipe for :class:`SparseGP` modules: a basis, and a posterior over its coefficients.

    A new family says how its basis starts (:meth:`new_basis`), how it is made again before its state is loaded
    (:meth:`old_basis`), and which :class:`~pyro_sparsegp.posteriors.Coefficients` it takes.
    """

    @abstractmethod
    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        """The basis, initialised from the inputs and hyperparameters of a first call."""

    @abstractmethod
    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        """The basis of that ``spec``, its values still to be loaded."""

    @abstractmethod
    def new_coefficients(self) -> NewCoefficients:
        """The posterior over the coefficients, to be called with block sizes, batch shape and a tensor like it."""

    def build(self, process: GaussianProcess, name: str) -> SparseGP:
        """A fresh module for a site whose prior, at the guide's first call, is ``process``.

        :raises ValueError: naming the site, where the family does not fit its inputs or kernel.
        """
        return self._assemble(self.new_basis(process, name), process.batch_shape, process.x, name)

    def declared(self) -> dict[str, Any]:
        """The recipe in plain Python: the family's name and its numbers; of given inputs, how many there are."""

        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.shape[-2] if value.dim() > 1 else len(value)
            if isinstance(value, (list, tuple)):
                return [plain(part) for part in value]
            return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

        numbers = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("init", "trainable")}
        return {"name": type(self).__name__, **numbers}

    def rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> SparseGP:
        """A module of the shapes of ``spec``, with the dtype and device of ``like``.

        :raises ValueError: naming the site, if ``spec`` is of another family or of other numbers.
        """
        if spec["family"] != self.declared():
            raise ValueError(
                f"the saved posterior of GP site {name!r} is {_call(spec['family'])}, this guide declares "
                f"{_call(self.declared())}; make the guide with the saved family."
            )
        return self._assemble(self.old_basis(spec["basis"], like), spec["batch_shape"], like, name)

    def _assemble(self, basis: Any, batch_shape: Sequence[int], like: Tensor, name: str) -> SparseGP:
        if not basis.sizes:
            raise ValueError(f"the kernel of site {name!r} is white noise alone; no basis can represent it")
        coefficients = self.new_coefficients()(basis.sizes, batch_shape, like)
        return SparseGP(basis, coefficients, batch_shape, self.declared())


@dataclass(frozen=True, eq=False)
class InducingFamily(Family):
    """A family on inducing points of the whole kernel, in one or several sets.

    :param init: how counts become inputs: "greedy" (conditional variance), "kmeans", or a callable
        ``(kernel, x, num) -> (num, D)``.
    :param trainable: whether the inducing inputs are learned.
    """

    init: Union[str, Initialiser] = field(default="greedy", kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    @abstractmethod
    def sets(self) -> list[Inducing]:
        """The sets of inducing inputs, in order."""

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        return InducingPoints(choose_inputs(process.kernel, process.x, self.sets(), self.init, name), self.trainable)

    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        return _old_inducing(spec, like, self.trainable)


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
    """

    def new_coefficients(self) -> NewCoefficients:
        return CholeskyIdentity


@dataclass(frozen=True, eq=False)
class AdditiveFamily(Family):
    """A family on a basis for each summand of an additive kernel Σ_c k_c.

    A summand with finite features (a constant, a linear term) uses those; every other has inducing points of
    its own, in the columns that it reads, at most as many as there are distinct inputs in them.

    :param inducing: a number or inputs for every summand, or a list with one entry a summand (entries of
        summands with features are not used).
    :param init: as in :class:`InducingFamily`.
    :param trainable: whether the inducing inputs are learned.
    """

    inducing: Union[Inducing, Sequence[Optional[Inducing]]] = 32
    init: Union[str, Initialiser] = field(default="greedy", kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        terms = kernel_base.terms(process.kernel)
        wanted = list(self.inducing) if isinstance(self.inducing, Sequence) else [self.inducing] * len(terms)
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
            columns = kernel_base.columns(term)
            chosen = choose_inputs(term, process.x, [inducing], self.init, f"{name}, term {i}", columns)
            parts.append(InducingPoints(chosen, self.trainable, columns, process.x.shape[-1]))
        return Additive(parts)

    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        return Additive(
            [
                ExplicitFeatures(part["size"])
                if part["kind"] == "features"
                else _old_inducing(part, like, self.trainable)
                for part in spec["parts"]
            ]
        )


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


def _call(declared: dict[str, Any]) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in declared.items() if key != "name")
    return f"{declared['name']}({arguments})"


def _old_inducing(spec: dict[str, Any], like: Tensor, trainable: bool) -> InducingPoints:
    columns = None if spec["columns"] is None else tuple(spec["columns"])
    return InducingPoints([like.new_zeros(shape) for shape in spec["shapes"]], trainable, columns, spec["width"])
