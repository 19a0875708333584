"""A bound's terms: of a run's traces, with GP sites at the nodes of a product grid, and in closed form, E[log p(y | θ)]
under q where θ is an affine function of function values.

A distribution takes part that is normal, Laplace, or brings ``expected_log_prob``
(:class:`~pyro_sparsegp.distributions.ExpectedLogProb`): which sites of a program do is found by structure, once, by
:func:`~pyro_sparsegp.program.explore.explore`. Where its other parameters are made of other GP sites, it does so at
each of their nodes. At the means of q the program gives θ's mean, and one more run, mapped or differentiated, θ's
variance, whatever the model did:

    Var θ = Σ_e (θ(m + C e) − θ(m))² over the axes e of a row's values, or diag(A Cov(f) Aᵀ) of those at several inputs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import kl_divergence

from ..guide import AutoSparseGP
from ..guide.predictors import Likelihoods, Place
from ..guide.runs import AtNodes
from ..numerics.linalg import MAPPED, above_rounding
from ..posterior.sparse_posterior import SparsePosterior
from ..program import traces
from ..program.asking import asks_program, attempt
from ..program.draws import mapped
from ..program.explore import ClosedForms
from ..program.handlers import Rerun, held_runs
from ..program.reader import normal_nodes


def _variances_of(
    found: ClosedForms, run: Rerun, model_trace: poutine.Trace, guide_trace: poutine.Trace
) -> dict[str, Tensor]:
    """Var θ under q's marginals of the sites that know E[log p(y | θ)], by one more run. Both traces have GP sites at
    their means.
    """
    sites: Any = model_trace.nodes
    posteriors = {gp: posterior_at(guide_trace, gp) for gp in found.gps}
    rows, functions = ([name for name in own if name in sites] for own in (found.rows, found.functions))
    # Where θ is f, as in what trains most often, the program runs once.
    at = {_place(sites[gp]["value"]): q for gp, q in posteriors.items()}
    known = {name: at.get(_place(traces.parameter_of(sites[name]["fn"]))) for name in rows}
    variances = {name: q.variance for name, q in known.items() if q is not None}
    others = {name: traces.bare(sites[name]["fn"]) for name in rows if name not in variances}
    if others:
        variances |= _variances_by_axes(run, guide_trace, found.of_rows.axes(torch.inf), others)
    if functions:
        variances |= _variances_by_rows(run, posteriors, functions)
    return variances


def _place(value: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers are in memory; under :func:`torch.func.vmap`, which hides that, which tensor it is."""
    where = (Tensor.data_ptr, id)[MAPPED.get()]
    return value.shape, value.stride(), where(value)


def _sum_of_expectations(
    variances: Mapping[str, Tensor], model_trace: poutine.Trace, guide_trace: poutine.Trace
) -> Any:
    """The sum of the expectations in closed form, by Var θ of each site, scaled and masked; of latents minus entropy.
    Both traces have the GP sites that θ is made of at their means.
    """
    total: Any = 0.0
    guided: Any = guide_trace.nodes
    for name, variance in variances.items():
        site: Any = model_trace.nodes[name]
        expected = traces.expectation(site["fn"], site["value"], variance)
        if name in guided:  # of a latent below f: KL[q ‖ p(· | E θ)], and what the spread of θ adds to it
            total = total - divergence(guided[name], site)
            expected = expected - site["fn"].log_prob(site["value"])
        total = total + weighted_sum(expected, site)
    return total


Axes = Mapping[str, tuple[int, ...]]  # of a grid, by the GP sites that have them


def places_at(node: Sequence[Tensor] | Tensor, axes: Axes) -> dict[str, Any]:
    """A grid's node, as GP sites' standardised places: ``()``, or of several axes one an output."""
    return {
        gp: node[used[0]] if len(used) == 1 else torch.stack([node[axis] for axis in used]) for gp, used in axes.items()
    }


def values_at(guide_trace: poutine.Trace, node: Sequence[Tensor] | Tensor, axes: Axes) -> dict[str, Tensor]:
    """GP sites' values at a grid's node."""
    return {gp: posterior_at(guide_trace, gp).at_node(place).rsample() for gp, place in places_at(node, axes).items()}


def posterior_at(guide_trace: poutine.Trace, name: str) -> Any:
    """The posterior that the guide answered with at a GP site."""
    return traces.without_event(guide_trace.nodes[name]["fn"])[0]


def divergence(guide_site: dict[str, Any], model_site: dict[str, Any]) -> Tensor:
    """KL of a latent site's posterior from its prior, or an estimate of it from the draw, with its scale and mask."""
    q, p = guide_site["fn"], model_site["fn"]
    if q is p:  # drawn from the model
        return torch.zeros(())
    if not q.has_rsample:
        raise ValueError(
            f"site {guide_site['name']!r} has a posterior without reparameterised draws, {q}; TraceQuadrature_ELBO has "
            "no gradient for it. Use a reparameterised posterior, or enumerate and sum the site out in the model."
        )
    try:
        value = kl_divergence(q, p)
    except NotImplementedError:
        value = q.log_prob(guide_site["value"]) - p.log_prob(guide_site["value"])
    return weighted_sum(value, guide_site)


def weighted_sum(value: Tensor, site: dict[str, Any]) -> Tensor:
    """The sum of a site's terms, with its scale and mask."""
    return scale_and_mask(value, site["scale"], site["mask"]).sum()


def _variances_by_axes(
    run: Rerun, guide_trace: poutine.Trace, axes: Axes, locations: dict[str, Any]
) -> dict[str, Tensor]:
    """Σ (θ(e) − θ(0))² over the axes e of standardised values t, by the sites' distributions at t = 0."""
    mean = posterior_at(guide_trace, next(iter(axes))).mean
    num = 1 + max(axis for used in axes.values() for axis in used)

    def at(node: Tensor) -> tuple[Tensor, ...]:
        held = traces.sample_sites(run(values_at(guide_trace, node, axes)))
        moves = {n: traces.parameter_of(held[n]["fn"]) - traces.parameter_of(fn) for n, fn in locations.items()}
        return tuple(traces.over_scale(locations[name], move).square() for name, move in moves.items())

    every = torch.eye(num, dtype=mean.dtype, device=mean.device)
    squares = at(every[0]) if num == 1 else tuple(part.sum(0) for part in mapped(at, every))
    return dict(zip(locations, squares))


def _variances_by_rows(run: Rerun, posteriors: dict[str, SparsePosterior], names: Iterable[str]) -> dict[str, Tensor]:
    """Σ over GP sites of diag(A Cov(f) Aᵀ), with A off the program by autograd; of a multivariate normal over its
    scale, L⁻¹A.
    """
    trains = torch.is_grad_enabled()  # A may have parameters
    with torch.enable_grad():
        means = {gp: posterior.mean.detach().requires_grad_() for gp, posterior in posteriors.items()}
        held = traces.sample_sites(run(means))
        at = list(means.values())
        jacobians = {name: _jacobian(traces.parameter_of(held[name]["fn"]), at, trains) for name in names}
    found = {}
    for name, rows in jacobians.items():
        fn = traces.bare(held[name]["fn"])
        total: Any = 0.0
        for q, row in [(q, row) for q, row in zip(posteriors.values(), rows) if row is not None]:
            weights = traces.over_scale(fn, row).movedim(0, -2)
            change = q.coefficients.moments([weights @ phi for phi in q.features])[1]
            prior = (weights @ q.process.kernel(q.process.x) * weights).sum(-1)  # diag(Ak(x, x)Aᵀ)
            # Added up over the outputs of a process, whose functions are independent.
            prior, change = (v.reshape(-1, v.shape[-1]).sum(0) for v in (prior, change))
            total = total + above_rounding(prior + change, prior)
        found[name] = total.reshape(traces.parameter_of(fn).shape)
    return found


def _jacobian(value: Tensor, by: list[Tensor], again: bool) -> tuple[Optional[Tensor], ...]:
    """∂ value / ∂ each, ``(K, ...)``; ``None`` where there is none."""
    one = torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)
    back = partial(torch.autograd.grad, value, by, retain_graph=True, create_graph=again, allow_unused=True)
    with attempt(), asks_program():
        return back(one, is_grads_batched=True)
    # of a sparse A, say, of which torch has no product with several rows at once
    return tuple(None if rows[0] is None else torch.stack(rows) for rows in zip(*map(back, one)))


Ran = tuple[poutine.Trace, poutine.Trace, poutine.Trace]  # the model's, the guide's, and one with plates' row numbers


@dataclass(frozen=True)
class Inputs:
    """What a bound is evaluated at."""

    guide: AutoSparseGP
    wrapped: Callable  # the guide, or what handlers made of it
    args: tuple
    kwargs: dict[str, Any]
    num_nodes: int  # of Gauss-Hermite quadrature along an axis


class Grid:
    """One evaluation of a bound on a product grid.

    :param closed: the sites whose expectation is in closed form, and how all others depend on GP sites.
    """

    def __init__(self, inputs: Inputs, closed: ClosedForms) -> None:
        self.inputs, self.guide, self.closed = inputs, inputs.guide, closed
        self.call = inputs.wrapped, inputs.args, inputs.kwargs
        # What the guide's runs are conditioned on, where that is read ahead.
        self.given = self.guide.conditioned(*self.call) if self.guide.kind.is_of_rows else None
        self.variances: Mapping[str, Tensor] = {}  # Var θ of sites in closed form at each node

    @cached_property
    def nodes(self) -> tuple[Tensor, Tensor]:
        """Those of the product grid, ``(K ** num_axes, num_axes)``, and their weights."""
        return normal_nodes(self.closed.num_axes, self.guide.like, self.inputs.num_nodes)

    def mean(self, values: Tensor) -> Tensor:
        """Σⱼ Σₖ wⱼ wₖ ℓ(tⱼ, tₖ) of the bound's terms at the nodes."""
        # Weights add up to 1, so that what has no nodes stays.
        return values @ self.nodes[1].to(values.dtype)  # priors of Python numbers have the default dtype

    def run(self) -> Ran:
        """The model's and the guide's run with GP sites at their means."""
        return self._at(dict.fromkeys([*self.closed.axes, *self.closed.gps]))

    def _at(self, places: dict[str, Any]) -> Ran:
        return self.guide.at_nodes(AtNodes(self.guide, nodes=places), *self.call, self.given)

    def expectations(self, *ran: poutine.Trace) -> Tensor:
        """The sum of those in closed form and over single function values, whatever the node."""
        variances = _variances_of(self.closed, self.again(ran[2]), *ran[:2])
        self.variances = {name: variances.pop(name) for name in self.closed.given if name in variances}
        sites: Any = ran[0].nodes
        links, moments = dict[str, dict[str, str]](), dict[Place, tuple[Tensor, Tensor]]()
        for name in [name for name in self.closed.values if name in sites and name not in ran[1].nodes]:
            fn, own = sites[name]["fn"], self.closed.values[name]
            links[name] = {key: link for key, (_, link) in own.items()}
            if name in variances:
                mean = traces.parameter_of(fn).expand(fn.batch_shape)
                moments[name, traces.normal_parameter(fn), 0] = mean, variances.pop(name)
            marginals = {key: posterior_at(ran[1], gp) for key, (gp, _) in own.items() if gp}
            moments |= {(name, key, 0): (q.mean, q.variance) for key, q in marginals.items()}
        eta = {place: mean for place, (mean, _) in moments.items()}
        covariance = {pair: torch.zeros_like(eta[pair[0]]) for pair in combinations(eta, 2)}
        covariance |= {(place, place): variance for place, (_, variance) in moments.items()}
        over_values = Likelihoods(sites, links, lambda _: sites).expected(eta, covariance, self.inputs.num_nodes)
        return _sum_of_expectations(variances, *ran[:2]) + over_values

    def once(self, *node: Tensor) -> Tensor:
        """The bound's terms of one run at a node."""
        return log_density_minus_kl(*self._at(places_at(node, self.closed.axes))[:2])

    def again(self, whole: poutine.Trace) -> Rerun:
        """Runs the model with some values moved, all others as in a run."""
        held = held_runs(self.guide.model, whole, self.inputs.args, self.inputs.kwargs)

        def run(moved: Mapping[str, Tensor]) -> poutine.Trace:
            with pyro.validation_enabled(False):
                return held(moved)

        return run

    def held(self, *ran: poutine.Trace) -> Callable[..., Tensor]:
        """The bound's terms at a node, of the model with all other values as in a run."""
        guide_trace, again, rest = ran[1], self.again(ran[2]), self.closed.rest
        # Of those at their means that enter other densities, too, a draw stands for the expectation, as in Trace_ELBO.
        drawn = [name for name in self.closed.gps if name in rest.gps.keys() - self.closed.axes.keys()]
        posteriors = {name: posterior_at(guide_trace, name) for name in drawn}
        values = {
            name: SparsePosterior.rsample(q) if name in rest.coupled else q.marginals.rsample()
            for name, q in posteriors.items()
        }

        def at(*node: Tensor) -> Tensor:
            trace = again(values | values_at(guide_trace, node, self.closed.axes))
            known = _sum_of_expectations(self.variances, trace, guide_trace)
            return known + log_density_minus_kl(trace, guide_trace, {*self.closed.sites, *self.variances})

        return at


def log_density_minus_kl(model_trace: poutine.Trace, guide_trace: poutine.Trace, skip: Collection[str] = ()) -> Tensor:
    """The bound's terms at the traces' values, summed: log densities of what is observed, minus divergences."""
    guided: Any = guide_trace.nodes
    seen = {n: s for n, s in traces.sample_sites(model_trace).items() if n not in skip and s["mask"] is not False}
    parts = list(traces.log_densities(model_trace, {*skip, *guided}).values())
    parts += [-divergence(guided[name], site) for name, site in seen.items() if name in guided]
    # auxiliary sites of an overridden get_posterior
    parts += [-density for density in traces.log_densities(guide_trace, model_trace.nodes).values()]
    return torch.as_tensor(sum(part.sum() for part in parts))  # 0 of a model that is masked as a whole
