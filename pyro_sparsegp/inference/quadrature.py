"""An evidence lower bound with function values integrated by Gauss-Hermite quadrature."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import ELBO
from pyro.infer.util import torch_item
from pyro.util import warn_if_nan
from torch import Tensor
from torch.distributions import kl_divergence

from ..guide import AutoSparseGP, Structure
from ..structure import COUPLED, DATAWISE

__all__ = ["TraceQuadrature_ELBO", "quadrature_axes"]

_MAX_AXES = 2


def quadrature_axes(structure: Structure) -> dict[str, tuple[int, ...]]:
    """The axes of the product grid on which each GP site is integrated; a site that must be drawn is left out.

    Sites that meet in one term of a density (a mean and a log-noise) get axes of their own, sites that never
    meet share one. An inner layer of a deep GP and values that the model couples across inputs are drawn, and
    so is a group that would need more than two axes.
    """
    width = {}
    for name, kind in structure.dependence.items():
        if name in structure.inner or kind == COUPLED:
            continue
        outputs = int(np.prod(structure.gps[name]["batch_shape"], dtype=int))
        width[name] = outputs if kind == DATAWISE else 1
    meets: dict[str, set[str]] = {name: set() for name in width}
    for f, g in structure.interactions:
        if f in width and g in width:
            meets[f].add(g)
            meets[g].add(f)
    axes: dict[str, tuple[int, ...]] = {}
    for name in width:
        taken = {axis for other in meets[name] if other in axes for axis in axes[other]}
        free = (axis for axis in itertools.count() if axis not in taken)
        axes[name] = tuple(itertools.islice(free, width[name]))
    too_many = {name for name, used in axes.items() if max(used) >= _MAX_AXES}
    while True:  # a group is drawn as a whole
        spread = {other for name in too_many for other in meets[name]} - too_many
        if not spread:
            return {name: used for name, used in axes.items() if name not in too_many}
        too_many |= spread


class TraceQuadrature_ELBO(ELBO):
    """The evidence lower bound with KL terms in closed form and function values integrated by quadrature.

    ELBO = Σ E_q[log p(y | f, ·)] − Σ KL. The expectation of every downstream log density over a GP site's
    marginals N(m, v) is Gauss-Hermite quadrature at m + √v·t_k: two nodes are exact for a Gaussian likelihood.
    Two GP sites that meet in one density use the product grid; beyond two, and for an inner layer of a deep
    GP, values are drawn. The model runs once, under :func:`torch.func.vmap` over the nodes, so that it sees f
    as ``(N,)``. Other latents are one draw a particle: the bound is deterministic if there are none.

    >>> elbo = TraceQuadrature_ELBO(num_nodes=20)

    :param num_nodes: K, nodes an axis.
    :param num_particles: draws of other latents, averaged.
    """

    def __init__(self, num_nodes: int = 20, num_particles: int = 1, **kwargs: Any) -> None:
        if not isinstance(num_nodes, int) or num_nodes < 1:
            raise ValueError(f"TraceQuadrature_ELBO's num_nodes must be a whole number of at least 1, got {num_nodes}")
        if kwargs.get("vectorize_particles"):
            raise ValueError(
                "TraceQuadrature_ELBO does not take vectorize_particles=True: function values are event dimensions "
                "that become batch dimensions of the data. Use vectorize_particles=False, or more num_nodes."
            )
        super().__init__(num_particles=num_particles, **kwargs)
        self.num_nodes = num_nodes
        nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)  # for the weight exp(−t²/2)
        self._nodes = torch.from_numpy(nodes)
        self._weights = torch.from_numpy(weights / weights.sum())
        self._placed: dict[Any, tuple[Tensor, Tensor]] = {}
        self._refused: set[str] = set()

    def loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, in nats."""
        loss = torch_item(self.differentiable_loss(model, guide, *args, **kwargs))
        warn_if_nan(loss, "loss")
        return loss

    def loss_and_grads(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, in nats; its gradient is added to the parameters'."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        loss = torch_item(loss)
        warn_if_nan(loss, "loss")
        return loss

    def differentiable_loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the bound as a scalar tensor."""
        unwrapped = poutine.unwrap(guide)
        if not isinstance(unwrapped, AutoSparseGP):
            raise ValueError(f"TraceQuadrature_ELBO needs an AutoSparseGP guide, got {type(unwrapped).__name__}")
        if unwrapped.structure is None:
            with poutine.block():
                unwrapped(*args, **kwargs)
        bounds = [self._bound(unwrapped, args, kwargs) for _ in range(self.num_particles)]
        return -sum(bounds[1:], bounds[0]) / self.num_particles

    def _get_trace(self, model: Callable, guide: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError("TraceQuadrature_ELBO runs the model once for all nodes; it has no single trace")

    def _bound(self, guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        assert guide.structure is not None
        axes = quadrature_axes(guide.structure)
        drawn = [
            name
            for name in guide.structure.gps
            if name not in axes and name not in guide.structure.inner and guide.structure.dependence[name] != COUPLED
        ]
        if drawn:
            self._say_once(
                guide,
                f"GP sites {', '.join(drawn)} meet in densities of more than {_MAX_AXES} function values: these are "
                "integrated by Monte Carlo, one draw a particle, not by quadrature.",
            )
        num_axes = 1 + max((axis for used in axes.values() for axis in used), default=-1)

        def total(*node: Tensor) -> Tensor:
            nodes = {
                name: node[used[0]] if len(used) == 1 else torch.stack([node[axis] for axis in used])
                for name, used in axes.items()
            }
            return _log_density_minus_kl(*guide.at_nodes(nodes, *args, **kwargs))

        if not num_axes:
            return total()
        nodes, weights = self._rule(guide)
        values = self._at_all_nodes(guide, total, nodes, num_axes)
        for _ in range(num_axes):
            values = values @ weights
        return values

    def _rule(self, guide: AutoSparseGP) -> tuple[Tensor, Tensor]:
        like = next(guide.gps.parameters())
        key = like.dtype, like.device
        if key not in self._placed:
            self._placed[key] = self._nodes.to(like), self._weights.to(like)
        return self._placed[key]

    def _at_all_nodes(self, guide: AutoSparseGP, total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
        if guide._pyro_name not in self._refused:
            mapped = total
            for axis in range(num_axes):
                in_dims = tuple(0 if i == num_axes - 1 - axis else None for i in range(num_axes))
                mapped = torch.func.vmap(mapped, in_dims=in_dims, randomness="same")
            state = torch.get_rng_state()
            try:
                with pyro.validation_enabled(False):
                    return mapped(*[nodes] * num_axes)
            except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
                refusal = error
                torch.set_rng_state(state)
            # The model may do what vmap refuses (.item(), NumPy, a branch on f): then run it once a node.
            values = self._one_by_one(total, nodes, num_axes)
            self._refused.add(guide._pyro_name)
            self._say_once(
                guide,
                "torch.func.vmap refuses this model, which now runs once for each quadrature node, "
                f"{self.num_nodes**num_axes} times a step: {str(refusal).splitlines()[0]}",
            )
            return values
        return self._one_by_one(total, nodes, num_axes)

    def _one_by_one(self, total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
        devices = [nodes.device] if nodes.is_cuda else []
        values = []
        grid = list(itertools.product(nodes, repeat=num_axes))
        for i, node in enumerate(grid):
            if i == len(grid) - 1:  # the last run moves the generator on
                values.append(total(*node))
                continue
            with torch.random.fork_rng(devices):  # every node sees the same draws of other latents
                values.append(total(*node))
        return torch.stack(values).reshape([len(nodes)] * num_axes)

    def _say_once(self, guide: AutoSparseGP, message: str) -> None:
        if message not in guide.warned:
            guide.warned.add(message)
            warnings.warn(message, stacklevel=6)


def _log_density_minus_kl(model_trace: poutine.Trace, guide_trace: poutine.Trace) -> Tensor:
    """The bound's terms at the traces' values, summed: log densities of what is observed, minus divergences."""
    total: Any = 0.0
    site: Any
    for name, site in model_trace.nodes.items():
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            total = total + _sum(site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"]), site)
            continue
        total = total - _divergence(guide_trace.nodes[name], site)
    for name, site in guide_trace.nodes.items():  # auxiliary sites of an overridden get_posterior
        if site["type"] == "sample" and name not in model_trace.nodes:
            total = total - _sum(site["fn"].log_prob(site["value"]), site)
    return total


def _divergence(guide_site: Any, model_site: Any) -> Tensor:
    q, p = guide_site["fn"], model_site["fn"]
    if q is p:  # drawn from the model
        return torch.zeros(())
    if not q.has_rsample:
        raise ValueError(
            f"site {guide_site['name']!r} has a posterior without reparameterised draws, {q}; TraceQuadrature_ELBO has "
            "no gradient for it. Use a reparameterised posterior, or enumerate and sum the site out in the model."
        )
    try:
        divergence = kl_divergence(q, p)
    except NotImplementedError:
        divergence = q.log_prob(guide_site["value"]) - p.log_prob(guide_site["value"])
    return _sum(divergence, guide_site)


def _sum(value: Tensor, site: Any) -> Tensor:
    return scale_and_mask(value, site["scale"], site["mask"]).sum()
