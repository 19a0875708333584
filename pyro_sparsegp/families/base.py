"""The recipes that families share: what the guide asks of them, and how modules are put together."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Optional, Self

from torch import Tensor

from ..approximations.free import SparseGP
from ..approximations.on_sites import ExpectationGP, OptimalGP
from ..bases import Basis, InducingVariables
from ..bases.additive import rebuilt
from ..gaussians import Coefficients, NaturalGaussian, Rate
from ..gaussians.factors import DenseFactor, IdentityFactor
from ..numerics.arguments import Documented, refuse, require_choice, require_count, require_share
from ..numerics.functions import if_known
from ..process import GaussianProcess

NewCoefficients = Callable[[Sequence[int], Sequence[int], Tensor], Coefficients]


@dataclass(frozen=True, eq=False, repr=False)
class Family(Documented, ABC):
    """The interface of a family: it makes a new module, or one to load a state into."""

    @abstractmethod
    def build(self, process: GaussianProcess, name: str) -> Any:
        """A fresh module for a site of this prior, at the guide's first call; a ValueError where it does not fit."""

    @abstractmethod
    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> Any:
        """A module of the shapes of ``spec``, its values still to be loaded."""

    def declared(self) -> dict[str, Any]:
        """The recipe in plain Python: the family's name and its numbers. Given inputs are replaced by their number."""
        return self._without(lambda f: f.name in _NOT_DECLARED)

    def __repr__(self) -> str:
        # The call that makes it, but for defaults.
        return _call(self._without(lambda f: getattr(self, f.name) is f.default))

    def _without(self, skip: Callable[[Any], bool]) -> dict[str, Any]:
        known = sorted(fields(self), key=lambda f: bool(f.kw_only))  # a base class's keywords come last
        return {"name": type(self).__name__} | {f.name: _plain(getattr(self, f.name)) for f in known if not skip(f)}

    def rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> Any:
        """A module of the shapes of ``spec``, as ``like``; a ValueError if ``spec`` is another family's."""
        # Until 2026 families had whiten=True, too, and the other choice, which has left.
        saved = {key: value for key, value in spec["family"].items() if (key, value) != ("whiten", True)}
        if saved != self.declared():
            raise ValueError(
                f"the saved posterior of GP site {name!r} is {_call(saved)}, this guide declares "
                f"{_call(self.declared())}. Make the guide with the saved family, in an earlier release if need be."
            )
        return self._rebuild(spec, like, name)


# They change no shape; whether q is natural is told where it is.
_NOT_DECLARED = ("init", "trainable", "start", "natural", "rate", "updates", "tolerance", "batches")


class BasisFamily(Family):
    """A family on a basis: it says how this starts, and how it is made again before its state is loaded."""

    trainable = False  # whether inducing inputs are learned

    @property
    def is_natural(self) -> bool:
        """Whether q(w) learns by natural gradients."""
        return False

    @abstractmethod
    def new_basis(self, process: GaussianProcess, name: str) -> Basis:
        """The basis, initialised from the inputs and hyperparameters of a first call."""

    def sets(self, num_terms: int = 1) -> list[Any]:
        """The inducing inputs that it declares, of each set, or of each of a kernel's terms."""
        return [0]

    def old_basis(self, spec: dict[str, Any], like: Tensor) -> Basis:
        """The basis of that ``spec``, its values still to be loaded."""
        # A basis of one's own is made anew by its family: tutorials/write_your_own.py.
        return rebuilt(spec, like, self.trainable, self.sets(len(spec.get("parts", ()))))

    @abstractmethod
    def on_basis(self, basis: object, batch_shape: Sequence[int], x: Tensor) -> Any:
        """The module of a basis, for inputs x."""

    def build(self, process: GaussianProcess, name: str) -> Any:
        return self.on_basis(self.new_basis(process, name), process.batch_shape, process.x)

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> Any:
        x = like.new_zeros(spec.get("rows") or 0, spec.get("columns", 0))  # of families on sites
        return self.on_basis(self.old_basis(spec["basis"], like), spec["batch_shape"], x)


@dataclass(frozen=True, eq=False, repr=False)
class FreeFormFamily(BasisFamily):
    """A recipe for :class:`SparseGP` modules: a basis, and a free posterior over its coefficients.

    A subclass names its basis and the :class:`~pyro_sparsegp.gaussians.Coefficients` it takes.

    :param start: where the covariance of q(w) starts. "data", the default, is its posterior if each row of the first
        call has noise of the prior's mean variance k̄: (I + ΦᵀΦ/k̄)⁻¹; and an inner layer of a deep GP starts
        at the principal components of its inputs, with a tenth of the prior's deviations. "prior" starts at the prior,
        as in the papers, and as the mean does; it takes more steps.
    :param natural: whether q(w) learns by natural gradients (Khan and Lin, 2017; Adam, Chang, Khan and Solin, 2021),
        one step in each ``svi.step`` under :class:`~pyro_sparsegp.TraceQuadrature_ELBO`; by default if the family can.
        ``False`` leaves q's mean and scale to the optimiser.
    :param rate: the size ρ of natural steps in (0, 1], or a function of the step's number t. With ρ = 1 a step takes q
        to the optimum for the batch alone. The default is max(0.1, 1/(1 + t)), or max(0.25, 1/(1 + t)) in steps on all
        rows, and at most 0.1 where function values are drawn.
    """

    start: str = field(default="data", kw_only=True)
    natural: Optional[bool] = field(default=None, kw_only=True)
    rate: Optional[Rate] = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        kind = type(self).__name__
        is_idle = self.rate is not None and not self.is_natural
        faults = {
            f"{kind}'s natural must be True, False or None, got {self.natural!r}": self.natural
            not in (None, True, False),
            f"{kind}'s rate is that of natural steps, which it does not take; leave rate out": is_idle,
            f"{kind}'s natural steps are of posteriors whose blocks each have a full covariance or the prior's, which "
            "its coefficients have not: leave natural out": self.natural is True and not self.can_step,
        }
        refuse(faults)
        if not callable(self.rate):
            if_known(require_share, self.rate, f"{kind}'s rate")
        require_choice(self.start, f"{kind}'s start", "data", "prior")

    @property
    def can_step(self) -> bool:
        """Whether it can learn q(w) by natural steps: of factors with a full covariance or the prior's."""
        layout = getattr(self.new_coefficients(), "layout", None)
        return layout is not None and all(factor in (DenseFactor, IdentityFactor) for factor, _ in layout(1))

    @property
    def is_natural(self) -> bool:
        return self.can_step if self.natural is None else self.natural

    @abstractmethod
    def new_coefficients(self) -> NewCoefficients:
        """The class or function that makes the posterior of w from block sizes, a batch shape and a tensor like it."""

    def declared(self) -> dict[str, Any]:
        # States from before there was a choice have none.
        return super().declared() | ({"natural": True} if self.is_natural else {})

    def rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> SparseGP:
        """As :meth:`Family.rebuild`; q is learned on as the saved one was, by natural gradients or others."""
        saved = self.learning(spec["family"].get("natural", False))
        return super(FreeFormFamily, saved).rebuild(spec, like, name)

    def learning(self, natural: bool) -> Self:
        """This family, whose q(w) learns by natural gradients, or as parameters."""
        other = copy.copy(self)  # not dataclasses.replace, which asks a subclass's __init__ for the fields
        object.__setattr__(other, "natural", natural)
        return other

    def chosen_coefficients(self) -> NewCoefficients:
        """The posterior over the coefficients as it is learned, by gradients or by natural gradients."""
        return self.in_natural_steps() if self.is_natural else self.new_coefficients()

    def in_natural_steps(self) -> NewCoefficients:
        """The posterior of w that :meth:`new_coefficients` makes, learned by natural steps."""
        return partial(NaturalGaussian, kind=self.new_coefficients(), rate=self.rate)

    def build(self, process: GaussianProcess, name: str) -> SparseGP:
        module = super().build(process, name)
        if process.kernel.depends_on_rows:
            module.see(process.x)
        return module

    def on_basis(self, basis: Any, batch_shape: Sequence[int], x: Tensor) -> SparseGP:
        coefficients = self.chosen_coefficients()(basis.sizes, batch_shape, x)
        return SparseGP(basis, coefficients, batch_shape, self.declared())


@dataclass(frozen=True, eq=False, repr=False)
class SiteFamily(Family):
    """A family whose posterior follows from Gaussian sites N(zₙ | fₙ, 1/λₙ), read off the model's likelihood.

    For likelihoods that are Gaussian in f the sites are exact and differentiable: λ = −ℓ'', λ(z − μ) = ℓ'(μ) with
    ℓₙ(f) = log p(yₙ | f). For others they are iterated by conjugate-computation VI (Khan and Lin, 2017), λ = −E[ℓ'']
    (by Stein's identity, which sees kinks; cut at 0, and the guide's ``site_status`` counts how often) and λ(z − m) =
    E[ℓ'], and kept between steps. Gradients pass through the last update only: where q is the bound's optimum this
    is the whole gradient, under data projections with a likelihood that is not Gaussian it is an approximation.

    A call with data and gradients enabled is a training step, on all rows; others leave the sites alone. With other
    latents c the posterior is q(c) q(f | c, data): each draw of c has its own sites, read off the model at the training
    data, which the guide refers to and its state holds.

    :param rate: the step size of the sites' updates in (0, 1].
    :param updates: the number of updates per step. One is enough with Adam. L-BFGS, whose line search needs a function
        of the parameters alone, needs some 20 where the likelihood is not Gaussian.
    """

    rate: float = field(default=0.7, kw_only=True)
    updates: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        require_share(self.rate, f"{type(self).__name__}'s rate")
        require_count(self.updates, f"{type(self).__name__}'s updates")


class OptimalFamily(SiteFamily, BasisFamily):
    """A basis with the posterior of its coefficients that is optimal for the sites."""

    module: ClassVar[type[OptimalGP]] = OptimalGP

    def build(self, process: GaussianProcess, name: str) -> OptimalGP:
        require_matrix(process, name)
        return super().build(process, name)

    def on_basis(self, basis: Any, batch_shape: Sequence[int], x: Tensor, *more: object) -> OptimalGP:
        return self.module(basis, *more, x, batch_shape, self.declared(), self.rate, self.updates)


class ExpectationFamily(BasisFamily):
    """A basis with the posterior of its coefficients given expectation propagation's sites.

    It trains by :class:`~pyro_sparsegp.ExpectationPropagation`; latents that are no GPs are points.
    """

    def on_basis(self, basis: Any, batch_shape: Sequence[int], x: Tensor) -> ExpectationGP:
        return ExpectationGP(basis, batch_shape, x, self.declared())


def require_basis(basis: Any, name: str) -> Any:
    """A basis, refused if it has no coefficients."""
    if not basis.sizes:
        raise ValueError(f"the kernel of site {name!r} is white noise alone; no basis can represent it")
    return basis


def require_matrix(process: GaussianProcess, name: str) -> None:
    """Refuse inputs that are no matrix."""
    if process.x.dim() != 2:
        raise ValueError(
            f"site {name!r} has inputs of shape {tuple(process.x.shape)}; a family on sites needs one matrix (N, D)"
        )


def _plain(value: object) -> Any:
    match value:
        case Tensor():
            return len(value)
        case list() | tuple():
            return [_plain(part) for part in value]
        case InducingVariables():
            return value.describe()
        case int() | float() | str() | None:
            return value
    return type(value).__name__


def _call(declared: dict[str, Any]) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in declared.items() if key != "name")
    return f"{declared['name']}({arguments})"
