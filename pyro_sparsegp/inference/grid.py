"""A bound's terms, of a run's traces, and with GP sites at the nodes of a product grid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from pyro.distributions import Poisson
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.nn.functional import softplus

from ..guide import AutoSparseGP
from ..posterior.sparse_posterior import SparsePosterior
from ..program.checks import graph_of
from ..program.declared import parameters, rebuilt
from ..program.dependence import COUPLED
from ..program.facts import MAX_AXES, ClosedForms
from ..program.handlers import Rerun, held_trace
from ..program.traces import bare, free_values, sample_sites
from ..warned import warn_once
from .expected import divergence, places_at, posterior_at, values_at, weighted_sum

Ran = tuple[poutine.Trace, poutine.Trace, poutine.Trace]  # the model's, the guide's, and one with plates' row numbers
Elementwise = Callable[[Tensor], Tensor]
# What a program may do with function values, one by one, by the names of autograd's nodes.
_ELEMENTWISE: dict[str, Callable[[Any], Optional[Elementwise]]] = {
    "ExpandBackward0": lambda node: None,
    "ExpBackward0": lambda node: torch.exp,
    "SigmoidBackward0": lambda node: torch.sigmoid,
    "SoftplusBackward0": lambda node: lambda t: softplus(t, node._saved_beta, node._saved_threshold),
}


@dataclass
class Grid:
    """One evaluation of a bound on a product grid.

    :param wrapped: the guide, or what handlers made of it.
    :param closed: the sites whose expectation is in closed form, and how all others depend on GP sites.
    :param given: what the guide's runs are conditioned on, where that is read ahead.
    """

    guide: AutoSparseGP
    wrapped: Callable
    call: tuple[tuple, dict[str, Any]]
    closed: ClosedForms
    given: Any = None

    def run(self, *node: Tensor) -> Ran:
        """The model's and the guide's run with GP sites at a node, by default at their means."""
        places = places_at(node, self.closed.axes) if node else dict.fromkeys([*self.closed.axes, *self.closed.gps])
        return self.guide.at_nodes(places, self.wrapped, *self.call, self.given)

    def once(self, *node: Tensor) -> Tensor:
        """The bound's terms of one run at a node."""
        return log_density_minus_kl(*self.run(*node)[:2])

    def again(self, model_trace: poutine.Trace, _: poutine.Trace, whole: poutine.Trace) -> Rerun:
        """Runs the model with some values moved, all others as in a run."""

        def run(moved: Mapping[str, Tensor]) -> poutine.Trace:
            with pyro.validation_enabled(False):
                return held_trace(self.guide.model, {**free_values(whole), **moved}, *self.call, model_trace)

        return run

    def held(self, *ran: poutine.Trace) -> Callable[..., Tensor]:
        """The bound's terms at a node, of the model with all other values as in a run."""
        guide_trace, again, values = ran[1], self.again(*ran), dict[str, Tensor]()
        for name in self.closed.gps:  # which are at their means, and enter other densities, too
            # Of these a draw stands for the expectation, as in Trace_ELBO.
            if name in self.closed.rest.dependence and name not in self.closed.axes:
                q = posterior_at(guide_trace, name)
                coupled = self.closed.rest.dependence[name] == COUPLED
                values[name] = SparsePosterior.rsample(q) if coupled else q.marginals.rsample()

        def at(*node: Tensor) -> Tensor:
            trace = again(values | self._moved(guide_trace, node))
            return log_density_minus_kl(trace, guide_trace, self.closed.sites)

        return at

    def direct(self, model_trace: poutine.Trace, guide_trace: poutine.Trace, nodes: Tensor) -> Tensor:
        """The bound's terms at all nodes, ``(K,) * num_axes``, off a run with GP sites at their means. Its graph shows
        what densities make of single function values.

        :param nodes: of one axis.
        :raises ValueError: where it does not.
        """
        sites: Any = model_trace.nodes
        names = [name for name in self.closed.rest.downstream if name not in self.closed.sites]
        is_plain = all(len(used) == 1 and sites[gp]["value"].dim() == 1 for gp, used in self.closed.axes.items())
        made = {sites[gp]["value"].grad_fn: gp for gp in self.closed.axes}
        are_data = all(name in sites and name not in guide_trace.nodes for name in names)
        require_shown(
            is_plain and are_data and None not in made and self.closed.axes.keys() == self.closed.rest.dependence.keys()
        )
        found = {name: _functions(sites[name], made) for name in names}
        along = [nodes.reshape(-1, *[1] * (self.closed.num_axes - 1 - axis)) for axis in range(self.closed.num_axes)]
        values: dict[str, Tensor] = {}
        total = log_density_minus_kl(model_trace, guide_trace, {*self.closed.sites, *names})
        for name, functions in found.items():
            fn, value = sites[name]["fn"], sites[name]["value"]
            made_of: Any = functions
            gp, steps = next(iter(made_of.values()))
            if (type(fn), steps) == (Poisson, [torch.exp]):
                q = posterior_at(guide_trace, gp)
                # E[y f − exp(f)] with f ~ N(m, v): what nodes give to rounding, on a K-th of the numbers
                each = value * q.mean - (q.mean + 0.5 * q.variance).exp() - (value + 1).lgamma()
            else:
                values = values or self._moved(guide_trace, tuple(along))
                changed = {
                    key: functools.reduce(lambda t, step: step(t), steps, values[gp])
                    for key, (gp, steps) in made_of.items()
                }
                each = rebuilt(fn, changed).log_prob(value)
            total = total + scale_and_mask(each, sites[name]["scale"], sites[name]["mask"]).sum(-1)
        return total.expand([len(nodes)] * self.closed.num_axes)

    def _moved(self, guide_trace: poutine.Trace, node: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The GP sites' values at a node."""
        return values_at({name: posterior_at(guide_trace, name) for name in self.closed.axes}, node, self.closed.axes)


def warn_of_draws(guide: AutoSparseGP, drawn: Collection[str]) -> None:
    """Warn of sites that meet in so many that draws take the place of nodes."""
    names = ", ".join(drawn)
    warn_once(
        guide.warned,
        "integrated by draws",
        names,
        f"GP sites {names} meet in densities of more than {MAX_AXES} function values: these are integrated by Monte "
        "Carlo, with one draw per particle. Take more, num_particles=10.",
        stacklevel=6,
    )


def require_shown(shown: bool) -> None:
    """Raise where a run's graph does not show what densities make of function values."""
    if not shown:
        raise ValueError("the graph does not show what densities make of function values")


def _functions(site: Any, made: Mapping[Any, str]) -> dict[str, tuple[str, list[Elementwise]]]:
    """Of the parameters of a distribution of single numbers, those that are made of a GP site's values, elementwise.

    :param made: the GP sites by the nodes of autograd's graph that their values are from.
    :raises ValueError: if other things are, or the graph does not show it.
    """
    fn = site["fn"]
    found: dict[str, tuple[str, list[Elementwise]]] = {}
    # A wrapper may mask, a subclass be more than its parameters: test_a_mask_of_the_distribution_is_kept
    require_shown(not fn.event_shape and fn is bare(fn) and type(fn).__module__.startswith("pyro.distributions"))
    rest = [part for part in (site["scale"], site["mask"]) if isinstance(part, Tensor)]
    for key, part in parameters(fn).items():
        node, steps = part.grad_fn, []
        while node not in made and node is not None and node.name() in _ELEMENTWISE:
            steps.append(_ELEMENTWISE[node.name()](node))
            node = node.next_functions[0][0]
        if node in made:
            found[key] = made[node], [step for step in steps[::-1] if step]
        else:
            rest.append(part)
    require_shown(bool(found) and not made.keys() & graph_of(rest))
    return found


def on_grid(total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
    """A function's values at all nodes of a product grid, in one call."""
    for axis in range(num_axes):
        # The last axis is mapped first: it is the innermost, and the last dimension of what comes out.
        in_dims = tuple(0 if i == num_axes - 1 - axis else None for i in range(num_axes))
        total = torch.func.vmap(total, in_dims=in_dims, randomness="same")
    with pyro.validation_enabled(False):
        return total(*[nodes] * num_axes)


def one_by_one(total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
    """As :func:`on_grid`, in a call for each node."""
    values = [total(*node) for node in itertools.product(nodes, repeat=num_axes)]
    return torch.stack(values).reshape([len(nodes)] * num_axes)


def log_density_minus_kl(model_trace: poutine.Trace, guide_trace: poutine.Trace, skip: Collection[str] = ()) -> Tensor:
    """The bound's terms at the traces' values, summed: log densities of what is observed, minus divergences."""
    total: Any = 0.0
    site: Any
    for name, site in sample_sites(model_trace).items():
        if name in skip or site["mask"] is False:
            continue
        if name in guide_trace.nodes:
            total = total - divergence(guide_trace.nodes[name], site)
        else:
            total = total + weighted_sum(site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"]), site)
    for name, site in guide_trace.nodes.items():  # auxiliary sites of an overridden get_posterior
        if site["type"] == "sample" and name not in model_trace.nodes:
            total = total - weighted_sum(site["fn"].log_prob(site["value"]), site)
    return torch.as_tensor(total)  # 0.0 of a model that is masked as a whole
