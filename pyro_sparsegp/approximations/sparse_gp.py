"""A GP site's variational module: what the guide builds from a family and calls at each run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from pyro import poutine
from torch import Tensor

from ..bases import Basis, ExplicitFeatures, KernelFeatures
from ..bases.actions import BlockPolicy, DenseActions, Policy, RandomPolicy, UserPolicy
from ..bases.projection import ProjectedFeatures, project
from ..gaussians import Coefficients, Gaussian, ProjectedGaussian, from_natural, optimal
from ..gaussians.sites import FreeSites, KeptSites, Sites
from ..kernels import base as kernel_base
from ..modules import AbstractModule
from ..numerics.chunks import is_long
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .memory import Held, Memory, contents, equal

__all__ = ["OptimalGP", "ProjectedGP", "SiteGP", "SparseGP", "same_rows"]


_ROWS = 4096  # enough to show where posteriors start


class SparseGP(AbstractModule):
    """One site's variational module: a basis and a Gaussian over its coefficients.

    What a guide holds for a GP site of a free family: ``guide.gps.f``.

    :param basis: gives the features φ under a kernel.
    :param coefficients: q(w) = N(m, S).
    :param batch_shape: of the process, ``(P,)`` for P outputs.
    :param family: what was declared, :meth:`Family.declared`.
    """

    rows: Optional[Tensor]  # inputs of training, where the kernel's diagonal depends on them

    def __init__(
        self, basis: Basis, coefficients: Coefficients, batch_shape: Sequence[int], family: dict[str, Any]
    ) -> None:
        super().__init__()
        self.basis, self.coefficients, self.family = basis, coefficients, family
        self.batch_shape = torch.Size(batch_shape)
        self.register_buffer("rows", None)
        self._memory = Memory()

    def forward(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior] = SparsePosterior
    ) -> SparsePosterior:
        """The posterior of ``process``, at its inputs and under its hyperparameters."""
        features = self.basis(process.kernel, process.jitter, name)
        anchor = features.anchor if self.coefficients.anchored else None
        return kind(process, features, self.coefficients(anchor), name)

    def start(self, process: GaussianProcess, name: str) -> None:
        """Take note of what a guide's first call shows."""
        if self.coefficients.anchored:
            with torch.no_grad():  # not a call, which Pyro would take for one before the guide has the module
                self.coefficients.start(self.basis.forward(process.kernel, process.jitter, name).anchor, None)
        if kernel_base.depends_on_rows(process.kernel):
            self.see(process.x)

    def inform(self, process: GaussianProcess, name: str) -> None:
        """Start the covariance of q(w) at what noise as large as the process would leave of it at these inputs."""
        with torch.no_grad(), poutine.block():
            features = self.basis(process.kernel, process.jitter, name)
            step = -(-process.x.shape[-2] // _ROWS)
            x = process.x[..., ::step, :]
            noise = process.kernel.diag(x).mean(-1).clamp(min=torch.finfo(x.dtype).tiny)
            root = (step / noise).sqrt()[..., None, None]
            # In float64: the gram matrices of millions of rows have the condition of their number.
            self.coefficients.start(features.anchor, [(root * phi).double() for phi in features(x)])

    def predict(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior] = SparsePosterior
    ) -> SparsePosterior:
        """The posterior at new inputs, where the kernel's diagonal is that in the company of the training inputs."""
        rows = self.rows
        if rows is not None and kernel_base.depends_on_rows(process.kernel):
            key = contents([process.kernel, Held(rows)])
            kernel = self._memory.recall(key, lambda: kernel_base.relative_to(process.kernel, rows))
            process = process.with_kernel(kernel)
        return self(process, name, kind)

    @property
    def num_seen(self) -> int:
        """How many inputs of training it knows."""
        return 0 if self.rows is None else self.rows.shape[-2]

    def see(self, x: Tensor) -> None:
        """Take note of inputs of training, for a kernel whose diagonal depends on them: most rows count, then last."""
        if self.rows is None or x.shape[-2] >= self.rows.shape[-2]:
            x.data_ptr()  # raises under torch.func.vmap, whose tensors can't be kept: the run is then made outside
            self.rows = x.detach()

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rows = state_dict.get(prefix + "rows")
        self.rows = None if rows is None else torch.empty_like(rows, device=_device(self))
        super()._load_from_state_dict(state_dict, prefix, *args)


class SiteGP(AbstractModule):
    """One site's variational module whose posterior follows from Gaussian sites.

    :param sites: where the sites are kept, or are parameters.
    :param at: "marginals" or "mean", where sites that are iterated are read.
    :param rate: the damping of updates where sites are iterated.
    :param updates: how many updates a training step makes there.
    """

    def __init__(
        self,
        sites: Union[KeptSites, FreeSites],
        batch_shape: Sequence[int],
        family: dict[str, Any],
        at: str = "marginals",
        rate: float = 1.0,
        updates: int = 1,
    ) -> None:
        super().__init__()
        self.sites, self.family = sites, family
        self.at, self.rate, self.updates = at, rate, updates
        self.batch_shape = torch.Size(batch_shape)

    def forward(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior] = SparsePosterior,
        sites: Optional[Sites] = None,
        exact: bool = False,
    ) -> SparsePosterior:
        """The posterior of ``process`` given ``sites``, by default those kept.

        :param exact: whether the sites are the likelihood itself, so that an optimal q(w) is where the bound is
            stationary.
        """
        if sites is None and self.sites.empty:
            return self.unread(process, name, kind)
        return self.given(process, name, kind, self.sites(process) if sites is None else sites, exact)

    def predict(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior] = SparsePosterior,
        sites: Optional[Sites] = None,
    ) -> SparsePosterior:
        """The posterior at new inputs, where the kernel's diagonal is that in the company of the sites' inputs."""
        if sites is None and self.sites.empty:
            return self(process, name, kind)
        sites = self.sites(process) if sites is None else sites
        return self(process.relative_to(sites.inputs), name, kind, sites)

    def reorder(self, order: Tensor) -> None:
        """Follow the data into another order: row n is what row ``order[n]`` was."""
        self.sites.reorder(order)

    @property
    def num_seen(self) -> int:
        """How many inputs of training it knows."""
        return self.sites.inputs.shape[-2]

    @property
    def forgets(self) -> bool:
        """Whether it may be given other training data: it has no parameters for each row."""
        return isinstance(self.sites, KeptSites)

    def forget(self) -> None:
        """Forget what was read off the training data."""
        if isinstance(self.sites, KeptSites):
            self.sites.forget()

    def see(self, x: Tensor) -> None:
        """Nothing: the sites know the inputs of training."""

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        """The prior, before any sites are read."""
        return self.given(process, name, kind, self.sites(process), False)

    @abstractmethod
    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        """The posterior of ``process`` given ``sites``."""


class OptimalGP(SiteGP):
    """A basis with the q(w) that is optimal for the sites, perhaps block by block.

    :param blockwise: whether blocks of coefficients are independent.
    """

    def __init__(self, basis: Basis, blockwise: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.basis, self.blockwise = basis, blockwise
        self._memory = Memory()

    @property
    def in_weight_space(self) -> bool:
        """Whether the basis is the kernel's own features."""
        return isinstance(self.basis, ExplicitFeatures)

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        features = self.basis(process.kernel, process.jitter, name)
        if isinstance(features, KernelFeatures):
            return self._in_weight_space(process, name, kind, sites, features, exact)
        phi = features(sites.inputs)
        groups = [(b,) for b in range(len(phi))] if self.blockwise else None
        if exact:  # the bound's gradient by q(w) is 0 there: none has to be found
            with torch.no_grad():
                coefficients = optimal(phi, sites.precision, sites.linear, groups, name)
        else:
            coefficients = optimal(phi, sites.precision, sites.linear, groups, name)
        return kind(process, features, coefficients, name, sites, phi if same_rows(sites.inputs, process.x) else None)

    def _in_weight_space(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior],
        sites: Sites,
        features: KernelFeatures,
        exact: bool,
    ) -> SparsePosterior:
        if not is_long(sites.inputs):
            features.explicit(sites.inputs)  # with its graph, for the marginals
        with torch.set_grad_enabled(torch.is_grad_enabled() and not exact):
            sums = features.gram(sites.inputs, sites.precision, sites.linear)
            coefficients = from_natural(*sums, features.sizes, None, name)
        return kind(process, features, coefficients, name, sites)

    def predict(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior] = SparsePosterior,
        sites: Optional[Sites] = None,
    ) -> SparsePosterior:
        """The posterior at new inputs. In weight space the kernel's diagonal acts on the training data too (eq. 12):

        q(w) is the optimum for sites of variance 1/λₙ + c(xₙ). For a likelihood that is Gaussian in f they are those of
        ∫ p(y | f) N(f | φᵀw, c) df; for others λₙ is training's.
        """
        if (sites is None and self.sites.empty) or not kernel_base.depends_on_rows(process.kernel):
            return super().predict(process, name, kind, sites)
        sites = self.sites(process) if sites is None else sites

        def condition() -> tuple[Any, Optional[Gaussian]]:
            kernel = kernel_base.relative_to(process.kernel, sites.inputs)
            features = self.basis(kernel, process.jitter, name)
            if not isinstance(features, KernelFeatures):
                return kernel, None
            sums = features.gram(sites.inputs, sites.precision, sites.linear, absorb=True)
            return kernel, from_natural(*sums, features.sizes, None, name)

        key = contents([process.kernel, Held(sites.inputs), sites.precision, sites.linear])
        kernel, coefficients = self._memory.recall(key, condition)
        settled = process.with_kernel(kernel)
        if coefficients is None:
            return self.given(settled, name, kind, sites, False)
        return kind(settled, self.basis(kernel, process.jitter, name), coefficients, name, sites)

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        none = process.x.new_zeros((*process.batch_shape, 1))
        return self.given(process, name, kind, Sites(process.x[:1], none, none), False)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family} | _rows(self)


class ProjectedGP(SiteGP):
    """The posterior given projections of the sites' data.

    :param policy: chooses the actions.
    """

    def __init__(self, policy: Policy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy = policy
        self._remembered: Optional[tuple[list[Any], tuple[ProjectedFeatures, Tensor]]] = None

    def given(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior], sites: Sites, exact: bool
    ) -> SparsePosterior:
        if torch.is_grad_enabled():
            self._remembered = None
            features, products = project(process.kernel, self.policy(process.kernel, sites, name), name)
        else:
            features, products = self._projected_before(process.kernel, sites, name)
        return self._posterior(process, name, kind, sites, features, products)

    def _projected_before(self, kernel: Any, sites: Sites, name: str) -> tuple[ProjectedFeatures, Tensor]:
        """The projection, which visits all pairs of rows, of the last call if nothing has changed since."""
        state = [sites.inputs, sites.precision, sites.linear, *self.policy.parameters(), *self.policy.buffers()]
        key = contents(kernel)
        if key is None or isinstance(self.policy, UserPolicy):
            return project(kernel, self.policy(kernel, sites, name), name)
        key = [*key, *(part.detach().clone() for part in state)]
        if self._remembered is None or not equal(self._remembered[0], key):
            self._remembered = key, project(kernel, self.policy(kernel, sites, name), name)
        return self._remembered[1]

    @property
    def forgets(self) -> bool:
        return super().forgets and not isinstance(self.policy, (BlockPolicy, RandomPolicy))

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.policy.reorder(order)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_remembered": None}

    def unread(self, process: GaussianProcess, name: str, kind: type[SparsePosterior]) -> SparsePosterior:
        none = process.x.new_zeros((*process.batch_shape, 1))
        sites = Sites(process.x[:1], none, none)
        return self._posterior(
            process, name, kind, sites, *project(process.kernel, DenseActions(sites, none[..., None]), name)
        )

    def _posterior(
        self,
        process: GaussianProcess,
        name: str,
        kind: type[SparsePosterior],
        sites: Sites,
        features: ProjectedFeatures,
        products: Tensor,
    ) -> SparsePosterior:
        actions = features.actions
        here = same_rows(sites.inputs, process.x)

        def values(f: Tensor) -> Tensor:
            return actions.left(f[..., None])[..., 0]

        coefficients = ProjectedGaussian(actions.target, features.factor, actions.noise, values if here else None)
        return kind(process, features, coefficients, name, sites, features.of(products) if here else None)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": {"kind": "projection"}, "batch_shape": list(self.batch_shape), "family": self.family} | _rows(
            self
        )


def _device(module: AbstractModule) -> torch.device:
    return next(module.parameters()).device


def same_rows(inputs: Tensor, x: Tensor) -> bool:
    """Whether two matrices of inputs are the same, or equal."""
    if inputs is x or inputs.shape != x.shape:
        return inputs is x
    return inputs.data_ptr() == x.data_ptr() or torch.equal(inputs, x)


def _rows(module: SiteGP) -> dict[str, Any]:
    values = getattr(getattr(module, "policy", None), "draws", None)
    if values is None:
        values = getattr(getattr(module, "policy", None), "order", None)
    if values is None and isinstance(module.sites, FreeSites):
        values = module.sites.inputs
    rows = None if values is None else len(values)
    return {"columns": module.sites.inputs.shape[-1], "rows": rows}
