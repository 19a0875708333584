"""Posteriors that follow from Gaussian sites, projections of their data, or sites of expectation propagation."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor

from ..bases import Basis
from ..bases.actions import DenseActions, Policy, project
from ..bases.additive import ConditionalFeatures
from ..bases.base import Features
from ..bases.inducing import features_of
from ..bases.variables import Values
from ..gaussians import Coefficients, Gaussian, Product, ProjectedGaussian, optimal
from ..gaussians.anchors import turned_sums
from ..gaussians.factors import DenseFactor
from ..gaussians.product import from_natural, sums_of
from ..gaussians.sites import KeptSites, Sites, within_reach
from ..modules import AbstractModule, size_buffers
from ..numerics.decisions import decided
from ..numerics.functions import is_long
from ..numerics.linalg import NumericalWarning, eye_like, over_lower, sum_blocks
from ..posterior.sparse_posterior import Kind, SparsePosterior
from ..process import GaussianProcess
from ..warned import Warned, warn_once

_UNSETTLED = 0.1  # a move, in standard deviations, that is warned of


class BySites:
    """What has a posterior by Gaussian sites, and what updates of these may do."""

    slack = 0.0  # of a bound, by which an update may lower it beyond rounding

    def limited(self, sites: Sites, kept: Sites, marginals: tuple[Tensor, Tensor]) -> Sites:
        """What an update makes of sites, beside those kept before and the marginals relative to the prior's mean."""
        return sites

    def require_settled(self, change: Tensor, name: str, warned: Warned) -> None:
        """Warn where another update of sites moves a marginal by so many standard deviations, and no bound guards."""


class SiteGP(BySites, AbstractModule):
    """One site's variational module whose posterior follows from Gaussian sites.

    :param x: some inputs, ``(N, D)``, which say the dtype, the device and D.
    :param rate: the damping of updates where sites are iterated.
    :param updates: how many updates a training step makes there.
    """

    takes_batches = False  # whether steps may bring other rows than those whose sites it is conditioned on
    num_rows: Optional[int] = None  # of the training data, if parameters belong to each

    def __init__(
        self, x: Tensor, batch_shape: Sequence[int], family: dict[str, Any], rate: float = 1.0, updates: int = 1
    ) -> None:
        super().__init__()
        self.sites, self.family = KeptSites(x, batch_shape), family
        self.rate, self.updates = rate, updates
        self.batch_shape = torch.Size(batch_shape)

    def forward(
        self,
        process: GaussianProcess,
        name: str,
        kind: Kind = SparsePosterior,
        sites: Optional[Sites] = None,
        new: bool = False,
    ) -> SparsePosterior:
        """The posterior of ``process`` given sites, by default those kept; ``new`` is at other inputs than theirs."""
        if sites is None and self.sites.empty:
            return self.unread(process, name, kind)
        sites = self.sites() if sites is None else sites
        if new:
            return self.at_new_inputs(process, name, kind, sites)
        return self.given(process, name, kind, sites)

    def unread(self, process: GaussianProcess, name: str, kind: Kind) -> SparsePosterior:
        """The prior, before any sites are read."""
        return self.given(process, name, kind, Sites.none(process.x, process.batch_shape))

    def by_sites(self, process: GaussianProcess, name: str) -> Callable[[Sites], SparsePosterior]:
        """The posterior as a function of sites at the process's inputs, while they are read: no gradient passes."""
        known = self.prepared(process, name, process.x)
        return lambda sites: self.given(process, name, SparsePosterior, sites, known)

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> Any:
        """What :meth:`given` makes of sites' inputs x alone."""
        return None

    def at_new_inputs(self, process: GaussianProcess, name: str, kind: Kind, sites: Sites) -> SparsePosterior:
        """The posterior at new inputs, where a kernel's diagonal that depends on the rows is that beside the sites'."""
        # where the bound is not stationary, and q(w) has its gradient
        return self.given(process.relative_to(sites.inputs), name, kind, replace(sites, exact=False))

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        shapes = {"columns": self.sites.inputs.shape[-1], "rows": self.num_rows}
        return {"batch_shape": list(self.batch_shape), "family": self.family, **shapes}

    @abstractmethod
    def given(
        self, process: GaussianProcess, name: str, kind: Kind, sites: Sites, known: object = None
    ) -> SparsePosterior:
        """The posterior of ``process`` given ``sites``; ``known`` is :meth:`prepared` at their inputs, if it is."""


def same_rows(inputs: Tensor, x: Tensor) -> bool:
    """Whether two matrices of inputs are the same, or equal."""
    if inputs is x or inputs.shape != x.shape:
        return inputs is x
    with suppress(RuntimeError):  # of a tensor that is mapped; else nothing is read back: test_device.py
        if inputs.data_ptr() == x.data_ptr():
            return True
    return torch.equal(inputs, x)


def gradients_by(sites: Sites) -> Any:
    """Where sites are exact an optimal q(w) is where the bound is stationary: no gradient by it has to be found."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and not sites.exact)


class OptimalGP(SiteGP):
    """A basis with the q(w) that is optimal for the sites."""

    blockwise = False  # whether blocks of coefficients are independent

    def __init__(self, basis: Basis, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.basis = basis

    def given(
        self, process: GaussianProcess, name: str, kind: Kind, sites: Sites, known: Any = None
    ) -> SparsePosterior:
        features, phi = self.prepared(process, name, sites.inputs) if known is None else known
        features, phi, q = self.conditioned(features, phi, sites, name)
        return kind(process, features, q, name, sites, phi if same_rows(sites.inputs, process.x) else None)

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, Any]:
        """The basis under the process's kernel, and Φ at x."""
        features = self.basis(process.kernel, process.jitter, name)
        return features, features(x)

    def conditioned(self, features: Features, phi: Any, sites: Sites, name: str) -> tuple[Any, Any, Gaussian]:
        """The features that the posterior has, Φ of them at the sites' inputs, and q(w) given the sites."""
        # S⁻¹ = I + ΦᵀΛΦ, S⁻¹m = Φᵀλ(z − μ)
        groups = [(b,) for b in range(len(phi))] if self.blockwise else None
        with gradients_by(sites):
            return features, phi, optimal(phi, sites.precision, sites.linear, groups, name)

    def spec(self) -> dict[str, Any]:
        return {"basis": self.basis.spec(), **super().spec()}


class ExactGP(OptimalGP):
    """q(f | sites), exact: the basis is f at the sites' own inputs X, wherever these are now. As a part of a guide's
    field, the inputs are the first call's.
    """

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, Any]:
        features = features_of(process.kernel, [Values(x)], process.jitter, name)
        return features, features(x)


class BlockwiseGP(OptimalGP):
    """Nested inducing points with the independent posteriors of their sets that are optimal for the sites."""

    blockwise = True


class SemiCollapsedGP(OptimalGP):
    """Nested inducing points whose first set has the posterior that is optimal for the sites and for the other sets',
    ``others``, which are free.
    """

    def __init__(self, basis: Basis, others: Coefficients, *args: object) -> None:
        super().__init__(basis, *args)
        self.others = others

    def conditioned(self, features: Features, phi: Any, sites: Sites, name: str) -> tuple[Any, Any, Gaussian]:
        # q(w₁) ∝ N(w₁; 0, I) exp E_q(w₂)[Σₙ log N(zₙ | fₙ, 1/λₙ)]: precision I + Φ₁ᵀΛΦ₁ and mean from z − μ − Φ₂m₂
        # (Shi, Titsias and Mnih, 2020, eq. 9 and appendix C)
        others = self.others()
        with gradients_by(sites):
            linear = sites.linear - sites.precision * sum_blocks(phi[1:], others.loc)
            first = optimal(phi[:1], sites.precision, linear, None, name)
        groups = [(0,), *(tuple(block + 1 for block in group) for group in others.groups)]
        return features, phi, Product((*first.sizes, *others.sizes), [*first.factors, *others.factors], groups)


class ConditionalGP(OptimalGP):
    """Inducing points whose posterior depends on what is left of f, q(w | r) = p(w | r, z)."""

    def conditioned(self, features: Any, phi: Any, sites: Sites, name: str) -> tuple[Any, Any, Gaussian]:
        (known,) = phi
        with gradients_by(sites):
            (head,) = optimal(phi, sites.precision, sites.linear, None, name).factors
            # B = ΛΦP⁻¹: E[w | r] = m − Bᵀr(X) (Shi, Titsias and Mnih, 2020, appendix A)
            weights = sites.precision[..., None] * (known @ head.covariance_matrix)
        both = ConditionalFeatures(features, sites.inputs, weights, known, name)
        # (w, v) with w | v ~ N(m − Rv, S) and v ~ N(0, I), as under the prior: mean (m, 0), root [[S^½, −R], [0, I]]
        eye, none = eye_like(both.root).expand_as(both.root), torch.zeros_like(both.root)
        root = torch.cat([torch.cat([head.root, -both.root], -1), torch.cat([none, eye], -1)], -2)
        loc = torch.cat([head.loc, torch.zeros_like(head.loc)], -1)
        return both, both.known, Product(both.sizes, [DenseFactor(loc, root, upper=True)], [(0, 1)])


class ExactWeightSpaceGP(OptimalGP):
    """The kernel's own features with the q(w) that is optimal for the sites, from sums over blocks of rows."""

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> tuple[Any, Any]:
        features = self.basis(process.kernel, process.jitter, name)
        if not is_long(x):
            features.explicit(x)  # kept there with its graph, for the marginals; of many rows it is never whole
        return features, None

    def conditioned(self, features: Any, phi: object, sites: Sites, name: str) -> tuple[Any, Any, Gaussian]:
        with gradients_by(sites):
            gram, pull = features.gram(sites)
            return features, None, from_natural(gram, pull, features.sizes, None, name)

    def at_new_inputs(self, process: GaussianProcess, name: str, kind: Kind, sites: Sites) -> SparsePosterior:
        """The posterior at new inputs, where the kernel's diagonal acts on the training data too."""
        # q(w) is the optimum for sites of variance 1/λₙ + c(xₙ) (Zhu, Yuchi and Xie, 2025, eq. 12)
        settled = process.relative_to(sites.inputs)
        features = self.basis(settled.kernel, process.jitter, name)
        gram, pull = features.gram(sites, settled is not process)
        return kind(settled, features, from_natural(gram, pull, features.sizes, None, name), name, sites)


class ProjectedGP(SiteGP):
    """The posterior given projections of the sites' data, by a policy's actions."""

    slack = 1e-2  # sites of a free q are not quite the best for projected data: golden student-ComputationAware

    def __init__(self, policy: Policy, *args: Any, batches: bool) -> None:
        super().__init__(*args)
        self.policy, self.takes_batches = policy, batches

    def given(
        self, process: GaussianProcess, name: str, kind: Kind, sites: Sites, known: Any = None
    ) -> SparsePosterior:
        actions = self.policy(process.kernel, sites, name) if known is None else known
        features, products = project(process.kernel, actions, name)
        here = same_rows(sites.inputs, process.x)
        values = (lambda f: actions.left(f[..., None])[..., 0]) if here else None
        q = ProjectedGaussian(actions.target, features.factor, actions.noise, features.covariance, values)
        return kind(process, features, q, name, sites, features.of(products) if here else None)

    def limited(self, sites: Sites, kept: Sites, marginals: tuple[Tensor, Tensor]) -> Sites:
        return within_reach(sites, kept, marginals)

    def require_settled(self, change: Tensor, name: str, warned: Warned) -> None:
        if decided(change > _UNSETTLED):
            warn_once(
                warned,
                "unsettled",
                name,
                f"the Gaussian sites of GP site {name!r} did not settle: one more update would move a marginal by "
                f"{float(change):.2g} standard deviations, see guide.site_status. The posterior depends on where "
                "updates stopped: take a family with a free posterior, such as SVGP.",
                NumericalWarning,
                stacklevel=3,
            )

    @property
    def num_rows(self) -> Optional[int]:  # type: ignore[override]
        return self.policy.rows

    def unread(self, process: GaussianProcess, name: str, kind: Kind) -> SparsePosterior:
        sites = Sites.none(process.x[:1], process.batch_shape)
        return self.given(process, name, kind, sites, DenseActions(sites, sites.linear[..., None]))

    def spec(self) -> dict[str, Any]:
        return {"basis": {"kind": "projection"}, **super().spec()}


class ExpectationGP(AbstractModule):
    """q(w) ∝ N(w; 0, I) Πₙ exp(−½νₙ(φₙᵀw)² + bₙφₙᵀw): precision P = I + Σₙ νₙφₙφₙᵀ, Pm = Σₙ bₙφₙ."""

    # Prediction needs P and Pm alone. A site is about the row φₙ under which it was last refined, and about the
    # function itself: when hyperparameters move, u = Lw keeps its meaning, and so does υₙ = L⁻ᵀφₙ (eq. 2). What was
    # added is what is taken away, however far they have moved.

    precision: Tensor  # ν, (..., N)
    linear: Tensor  # b, (..., N)
    rows: Tensor  # υ, (..., N, M)
    gram: Tensor  # Σ νφφᵀ, (..., M, M)
    pull: Tensor  # Σ bφ, (..., M)
    anchor: Tensor  # L that gram and pull belong to, (..., M, M); empty if w keeps its meaning

    def __init__(self, basis: Basis, batch_shape: Sequence[int], like: Tensor, family: dict[str, Any]) -> None:
        super().__init__()
        self.basis, self.family = basis, family
        self.batch_shape = torch.Size(batch_shape)
        size, batch = sum(basis.sizes), tuple(batch_shape)  # type: ignore[misc]
        # First one of the guide's dtype, which others may be wider than: test_float32.py, `far_from_the_prior`.
        shapes = {"gram": (*batch, size, size), "pull": (*batch, size), "precision": (*batch, 0), "linear": (*batch, 0)}
        for buffer, shape in (shapes | {"rows": (0, size), "anchor": (0, 0)}).items():
            self.register_buffer(buffer, like.new_zeros(shape))

    @property
    def empty(self) -> bool:
        """Whether no site was ever refined."""
        return self.precision.shape[-1] == 0

    def forward(self, process: GaussianProcess, name: str, kind: Kind = SparsePosterior) -> SparsePosterior:
        """The posterior of ``process``, at its inputs and under its hyperparameters."""
        # u = Lw keeps its meaning where L moves: P − I and Pm are those of L⁻¹ now.
        features = self.basis(process.kernel, process.jitter, name)
        gram, pull = turned_sums(self.gram, self.pull, self.anchor, features.anchor)
        return kind(process, features, from_natural(gram, pull, features.sizes, None, name), name)

    def features_of(self, rows: Tensor) -> Tensor:
        """Rows υ as features φ under the L of :attr:`gram`."""
        return rows @ self.anchor if self.anchor.numel() else rows

    @torch.no_grad()
    def put(self, index: Optional[Tensor], num: int, sites: Sites, anchor: Optional[Tensor]) -> None:
        """Replace the sites of some data, or of all, by these, at features under ``anchor``. Row numbers are distinct
        and below ``num``; the sums stay.
        """
        phi, anchor = sites.inputs, sites.inputs.new_zeros(0, 0) if anchor is None else anchor
        # υ = L⁻ᵀφ: rows ΦL⁻¹
        rows = over_lower(phi, anchor) if anchor.numel() else phi
        if index is None:
            self.precision, self.linear, self.rows = sites.precision, sites.linear, rows
        else:
            if self.empty:
                self.precision = phi.new_zeros(*self.batch_shape, num)
                self.linear = torch.zeros_like(self.precision)
                self.rows = phi.new_zeros(*phi.shape[:-2], num, phi.shape[-1])
            self.rows[..., index, :] = rows
            self.precision[..., index] = sites.precision
            self.linear[..., index] = sites.linear
        self.anchor = anchor.detach()

    @torch.no_grad()
    def look_from(self, anchor: Optional[Tensor]) -> None:
        """Have :attr:`gram` and :attr:`pull` be about ``anchor``."""
        self.gram, self.pull = turned_sums(self.gram, self.pull, self.anchor, anchor)
        if anchor is not None:
            self.anchor = anchor.detach()

    def sums(self, phi: Tensor, precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
        """Σ νφφᵀ and Σ bφ, of the batch's shape."""
        # Sites found in float64 are summed in phi's dtype (test_float32.py, data far from the prior).
        gram, pull = sums_of(phi, precision.to(phi), linear.to(phi))
        return gram.expand(self.gram.shape), pull.expand(self.pull.shape)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        state_dict.pop(prefix + "fingerprints", None)  # of releases that knew rows by them
        size_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def require_refined(modules: Mapping[str, Any]) -> None:
    """Raise if a GP site's module has no sites yet: what it gives is the prior, which would pass for a posterior."""
    if empty := [name for name, module in modules.items() if isinstance(module, ExpectationGP) and module.empty]:
        raise ValueError(
            f"GP site {empty[0]!r} has the family {modules[empty[0]].family['name']}, and has taken no step yet. Take "
            "one first, ExpectationPropagation(model, guide, optim).step(x, y), or load the state of a trained guide."
        )
