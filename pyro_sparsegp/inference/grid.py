"""A bound's terms, of a run's traces, and with GP sites at the nodes of a product grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..guide import AutoSparseGP
from ..posterior.drawing import NodeSite
from ..posterior.sparse_posterior import SparsePosterior
from ..program.dependence import COUPLED
from ..program.facts import ClosedForms
from ..program.handlers import held_trace
from ..warned import warn_once
from .axes import MAX_AXES, at_axes, quadrature_axes
from .expected import divergence, posterior_at, weighted_sum

__all__ = ["Grid", "log_density_minus_kl", "mapped", "one_by_one"]

Ran = tuple[poutine.Trace, poutine.Trace, dict[str, Tensor]]  # the model's trace, the guide's, all sites' values


class Grid:
    """One evaluation of a bound on a product grid.

    :param wrapped: the guide, or what handlers made of it.
    :param closed: the sites whose expectation is in closed form, and how all others depend on GP sites.
    """

    def __init__(
        self, guide: AutoSparseGP, wrapped: Callable, call: tuple[tuple, dict[str, Any]], closed: ClosedForms
    ) -> None:
        self.guide, self.wrapped, self.call, self.closed = guide, wrapped, call, closed
        self.structure = closed.rest
        self.axes = quadrature_axes(self.structure)
        self.num_axes = 1 + max((axis for used in self.axes.values() for axis in used), default=-1)

    def warn_of_draws(self) -> None:
        """Warn of sites that meet in so many that draws take the place of nodes."""
        without = {*self.axes, *self.structure.inner}
        drawn = [n for n, kind in self.structure.dependence.items() if kind != COUPLED and n not in without]
        if drawn:
            warn_once(
                self.guide.warned,
                "integrated by draws",
                ", ".join(drawn),
                f"GP sites {', '.join(drawn)} meet in densities of more than {MAX_AXES} function values: these are "
                "integrated by Monte Carlo, with one draw per particle. Take more, num_particles=10.",
                stacklevel=6,
            )

    def run(self, *node: Tensor) -> Ran:
        """The model's and the guide's run with GP sites at a node, by default at their means."""
        places = self._at(node) if node else dict.fromkeys([*self.axes, *self.closed.gps])
        return self.guide.at_nodes(places, self.wrapped, *self.call)

    def once(self, *node: Tensor) -> Tensor:
        """The bound's terms of one run at a node."""
        return self._total(*self.run(*node)[:2])

    def twice(self) -> Callable[..., Tensor]:
        """As :meth:`once`, of a run as it is and of the model's second: this one, all values held, sees the nodes."""
        return self.held(*self.run())

    def held(
        self, model_trace: poutine.Trace, guide_trace: poutine.Trace, values: dict[str, Tensor]
    ) -> Callable[..., Tensor]:
        """The bound's terms at a node, of the model with all other values as in a run."""
        for name in self.closed.gps:  # which are at their means, and enter other densities, too
            if name in self.structure.dependence and name not in self.axes:
                q = posterior_at(guide_trace, name)
                coupled = self.structure.dependence[name] == COUPLED
                values = values | {name: SparsePosterior.rsample(q) if coupled else q.marginals.rsample()}

        def at(*node: Tensor) -> Tensor:
            nodes = self._at(node)
            sites: dict[str, NodeSite] = {name: posterior_at(guide_trace, name) for name in nodes}
            moved = {name: site.at_nodes(nodes).rsample() for name, site in sites.items()}
            args, kwargs = self.call
            trace = held_trace(self.guide.model, values | moved, args, kwargs, model_trace)
            return self._total(trace, guide_trace, self.closed.sites)

        return at

    def _total(self, *args: Any) -> Tensor:
        return torch.as_tensor(log_density_minus_kl(*args))  # 0.0 of a model that is masked as a whole

    def _at(self, node: tuple[Tensor, ...]) -> dict[str, Any]:
        return {name: at_axes(node, used) for name, used in self.axes.items()}


def mapped(total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
    """A function's values at all nodes of a product grid, in one call."""
    for axis in range(num_axes):
        in_dims = tuple(0 if i == num_axes - 1 - axis else None for i in range(num_axes))
        total = torch.func.vmap(total, in_dims=in_dims, randomness="same")
    with pyro.validation_enabled(False):
        return total(*[nodes] * num_axes)


def one_by_one(total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
    """As :func:`mapped`, in a call for each node."""
    values = [total(*node) for node in itertools.product(nodes, repeat=num_axes)]
    return torch.stack(values).reshape([len(nodes)] * num_axes)


def log_density_minus_kl(model_trace: poutine.Trace, guide_trace: poutine.Trace, skip: Collection[str] = ()) -> Tensor:
    """The bound's terms at the traces' values, summed: log densities of what is observed, minus divergences."""
    total: Any = 0.0
    site: Any
    for name, site in model_trace.nodes.items():
        if site["type"] != "sample" or name in skip or site["mask"] is False:
            continue
        if name not in guide_trace.nodes:
            if site_is_subsample(site):
                continue
            total = total + weighted_sum(site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"]), site)
            continue
        total = total - divergence(guide_trace.nodes[name], site)
    for name, site in guide_trace.nodes.items():  # auxiliary sites of an overridden get_posterior
        if site["type"] == "sample" and name not in model_trace.nodes:
            total = total - weighted_sum(site["fn"].log_prob(site["value"]), site)
    return total
