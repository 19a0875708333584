"""A basis with a free Gaussian over its coefficients."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.nn import PyroParam
from torch import Tensor

from ..bases import Basis
from ..bases.additive import DecoupledFeatures
from ..bases.inducing import InducingPoints
from ..gaussians import Coefficients, Product
from ..gaussians.anchors import towards
from ..gaussians.factors import ShiftFactor
from ..modules import AbstractModule
from ..numerics.linalg import side_by_side
from ..posterior.drawing import ExpectedSite
from ..posterior.sparse_posterior import Kind, SparsePosterior
from ..process import GaussianProcess

_ROWS = 4096  # enough to show where posteriors start


class SparseGP(AbstractModule):
    """One site's variational module, ``guide.gps.f``: a basis and a Gaussian over its coefficients.

    :param basis: gives the features φ under a kernel.
    :param coefficients: q(w) = N(m, S).
    :param batch_shape: of the process, ``(P,)`` for P outputs.
    :param family: what was declared, :meth:`Family.declared`.
    """

    rows: Optional[Tensor]  # inputs of training, where the kernel's diagonal depends on them
    places: Optional[Tensor]  # those of some rows, where parameters of the program move them

    def __init__(
        self, basis: Basis, coefficients: Coefficients, batch_shape: Sequence[int], family: dict[str, Any]
    ) -> None:
        super().__init__()
        self.basis, self.coefficients, self.family = basis, coefficients, family
        self.batch_shape = torch.Size(batch_shape)
        self.num_rows = 0  # inputs of training in all, where a plate tells
        self.register_buffer("rows", None)
        self.register_buffer("places", None)

    def forward(self, process: GaussianProcess, name: str, kind: Kind = SparsePosterior) -> SparsePosterior:
        """The posterior of ``process``, at its inputs and under its hyperparameters."""
        features = self.features_for(process, name)
        anchor = self.anchor_of(features, process.mean_function)
        return kind(process, features, self.coefficients(anchor), name)

    def anchor_of(self, features: Any, mean: object = None) -> Any:
        """What q(w) is about."""
        return self.coefficients.anchor_of(features, mean, self.places)

    def follow(self, places: Tensor) -> None:
        """Have q(w) be about f at these inputs of data, which parameters of the program move."""
        if getattr(self.places, "shape", None) != places.shape:  # as once other data have come
            self.coefficients.leave_anchor()
        self.places = places

    def settled(self, process: GaussianProcess) -> GaussianProcess:
        """The process at new inputs, where a kernel's diagonal that depends on the rows is that beside training's."""
        return process if self.rows is None else process.relative_to(self.rows)

    @property
    def num_seen(self) -> int:
        """How many inputs of training it knows, of those that the kernel's diagonal depends on."""
        return 0 if self.rows is None else self.rows.shape[-2]

    def see(self, x: Tensor) -> None:
        """Take note of inputs of training, for a kernel whose diagonal depends on them: most rows count, then last."""
        if x.shape[-2] >= self.num_seen:
            x.data_ptr()  # raises under torch.func.vmap, whose tensors can't be kept: the run is then made outside
            self.rows = x.detach()

    def features_for(self, process: GaussianProcess, name: str) -> Any:
        """φ under the process's kernel."""
        return self.basis(process.kernel, process.jitter, name)

    def inform(self, process: GaussianProcess, name: str) -> None:
        """Start the covariance of q(w) at what noise as large as the process would leave of it at these inputs."""
        with torch.no_grad(), poutine.block():
            features = self.features_for(process, name)
            step = -(-process.x.shape[-2] // _ROWS)
            x = process.x[..., ::step, :]
            noise = process.kernel.diag(x).mean(-1).clamp(min=torch.finfo(x.dtype).tiny)
            root = (step / noise).sqrt()[..., None, None]  # √λ
            # In float64: the gram matrices of millions of rows have the condition of their number.
            shown = [(root * phi).double() for phi in features(x)]
            self.coefficients.start(self.coefficients.anchor_of(features), shown)

    @torch.no_grad()
    def begin_at(self, process: GaussianProcess, name: str, values: Tensor) -> None:
        """Start q near a function with these values, ``(..., N)``, at the process' inputs."""
        with poutine.block():
            features = self.features_for(process, name)
            phi = side_by_side(features(process.x))
            # S = (I + 99I)⁻¹, a tenth of the prior's deviations
            shown = (99**0.5 * torch.eye(phi.shape[-1]).to(phi)).split(features.sizes, -1)
            self.coefficients.start(self.coefficients.anchor_of(features), shown)
            self.coefficients.put_mean(towards(phi, (values - process.mean)[..., None], 1e-4)[..., 0])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        for name in ("rows", "places"):
            value = state_dict.get(prefix + name)
            own = None if value is None else torch.empty_like(value, device=next(self.parameters(), value).device)
            self._buffers[name] = own
        self.num_rows = int(state_dict.pop(prefix + "num_rows", 0))  # older files have none
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.num_rows:
            destination[prefix + "num_rows"] = torch.tensor(self.num_rows)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family}


class DecoupledGP(SparseGP):
    """Inducing points Z, ``basis``, with a free q(w), and a mean c(x, O)a of one set of points O, ``means``.

    :param num_columns: how many columns of K_OO a training step takes.
    """

    def __init__(
        self,
        basis: InducingPoints,
        means: InducingPoints,
        coefficients: Coefficients,
        batch_shape: Sequence[int],
        family: dict[str, Any],
        num_columns: int,
        like: Tensor,
    ) -> None:
        super().__init__(basis, coefficients, batch_shape, family)
        self.means, self.num_columns = means, num_columns
        self.weights: Any = PyroParam(like.new_zeros(*batch_shape, sum(means.sizes)))

    def forward(self, process: GaussianProcess, name: str, kind: Kind = SparsePosterior) -> SparsePosterior:
        inducing = self.basis(process.kernel, process.jitter, name)
        q = self.coefficients(self.coefficients.anchor_of(inducing))
        (means,) = self.means.variables()
        features = DecoupledFeatures(inducing, means, self.weights, self.num_columns)
        square = partial(getattr, features, "square")
        estimate = features.estimate if issubclass(kind, ExpectedSite) else square
        shift = ShiftFactor(square, estimate, features.pull.shape[:-1])
        whole = Product((*q.sizes, 1), [*q.factors, shift], [*q.groups, (len(q.sizes),)])
        return kind(process, features, whole, name)

    def spec(self) -> dict[str, Any]:
        return super().spec() | {"means": self.means.spec()}


def along_inputs(process: GaussianProcess) -> Tensor:
    """Where an inner layer starts (Salimbeni and Deisenroth, 2017): its outputs, ``(..., N)``, are the principal
    components of the inputs, ``(N, D)``, with the prior's mean and deviations; further ones are cosines of these.
    """
    # A draw of the prior says by chance what the layer above can tell apart: test_layers_start_at_their_inputs.
    centred = process.x - process.x.mean(0)
    spread, axes = torch.linalg.eigh(centred.mT @ centred / len(centred))
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    kept = spread >= 1e-6 * spread[-1]
    parts = (centred @ axes[:, kept] * spread[kept].clamp(min=torch.finfo(spread.dtype).tiny).rsqrt()).flip(-1).mT
    times = range(process.batch_shape.numel())
    more = [(i // len(parts) * parts[i % len(parts)]).cos() for i in times[len(parts) :]]
    found = [*parts, *more][: len(times)]
    return process.mean + process.variance.sqrt() * torch.stack(found).reshape(*process.batch_shape, -1)
