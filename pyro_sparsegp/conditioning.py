"""Reading Gaussian sites off the model while the guide runs it.

The guide asks at a GP site, before the model's run is over. What the run has drawn so far is held; latents that come
later are drawn ahead, and the run takes those draws when it gets there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .likelihood import expected_derivatives, held_trace, log_densities, normal_nodes
from .process import GaussianProcess, SparsePosterior
from .sites import KeptSites, Sites, update, within_reach
from .sparse_gp import ProjectedGP, SiteGP
from .structure import DATAWISE

if TYPE_CHECKING:
    from .guide import AutoSparseGP

__all__ = ["observes", "read_sites", "repeatable", "require_full_batch"]


def require_full_batch(name: str, module: SiteGP, trace: poutine.Trace) -> None:
    """Raise if a run's observed sites hold a mini-batch of the data.

    :raises ValueError: naming the GP site, the plate and the families that take mini-batches.
    """
    for site_name, site in trace.nodes.items():
        if site["type"] != "sample" or not site["is_observed"] or site_is_subsample(site):
            continue
        for frame in site["cond_indep_stack"]:
            if frame.full_size is not None and frame.size < frame.full_size:
                raise ValueError(
                    f"GP site {name!r} has the family {module.family['name']}, which trains on all data at once; site "
                    f"{site_name!r} observes {frame.size} of the {frame.full_size} rows of plate {frame.name!r}. Give "
                    "all rows, or take a family that trains by mini-batches, such as SVGP or OrthogonalInducing."
                )


def read_sites(guide: AutoSparseGP, name: str, process: GaussianProcess, module: SiteGP) -> Optional[Sites]:
    """The sites of a GP at the current draws, or ``None`` where the run observes nothing."""
    assert guide.structure is not None
    assert isinstance(module.sites, KeptSites)
    reader = _Reader(guide, name, process, module)
    quadratic = name in guide.structure.quadratic
    kept = module.sites(process)
    if kept.inputs.shape != process.x.shape:
        if not reader.observes():
            return None
        kept = Sites(process.x, *[torch.zeros_like(process.mean)] * 2)
        module.sites.marginals = None
    kept = Sites(process.x, kept.precision, kept.linear)
    prior_mean = process.mean
    sites = kept
    truncated = torch.zeros((), dtype=torch.long, device=process.x.device)
    for i in range(1 if quadratic else module.updates):
        mean, variance = prior_mean, torch.zeros_like(prior_mean)
        if not quadratic:
            if i == 0 and module.sites.marginals is not None:
                mean, variance = module.sites.marginals
            else:
                with torch.no_grad():
                    first = i == 0 and module.sites.empty
                    posterior = module(process, name, SparsePosterior, None if first else sites)
                    mean, variance = posterior.mean, posterior.variance
        derivatives = reader.derivatives(mean, variance, quadratic or module.at == "mean", quadratic)
        if derivatives is None:
            return None
        gradient, second = derivatives
        truncated = (second > 1e-6 * second.abs().amax()).sum()  # beyond rounding
        curvature = (-second).clamp(min=0)
        if quadratic:
            sites = Sites(process.x, curvature, gradient)
        else:
            sites = update(sites, gradient, curvature, mean, variance, prior_mean, module.rate)
            if isinstance(module, ProjectedGP):
                sites = within_reach(sites, mean, variance, prior_mean)
    if guide.keeps_sites:
        module.sites.keep(sites, truncated)
    return sites


def observes(guide: AutoSparseGP) -> bool:
    """Whether the run that the guide is in will observe data: the model is run ahead, its GP sites at their means."""
    assert guide.structure is not None
    args, kwargs = guide.args_kwargs
    with poutine.block(), pyro.validation_enabled(False), torch.no_grad(), repeatable(guide.like), _AtMeans():
        trace = poutine.trace(guide.model).get_trace(*args, **kwargs)
    return any(name in guide.structure.rows and site["is_observed"] for name, site in trace.nodes.items())


@contextmanager
def repeatable(like: Tensor) -> Iterator[None]:
    """The same random numbers each time, and the global generator as it was."""
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        torch.manual_seed(0)
        yield


class _AtMeans(Messenger):
    """Holds GP sites at their prior means."""

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        while isinstance(fn, torch.distributions.Independent):
            fn = fn.base_dist
        if isinstance(fn, GaussianProcess) and not msg["is_observed"]:
            msg["value"], msg["done"] = fn.mean, True


class _Reader:
    """Evaluates the log densities downstream of one GP site with all else of a run held."""

    def __init__(self, guide: AutoSparseGP, name: str, process: GaussianProcess, module: SiteGP) -> None:
        self.guide, self.name, self.process, self.module = guide, name, process, module
        structure = guide.structure
        assert structure is not None
        self.args, self.kwargs = guide.args_kwargs
        self.values: dict[str, Tensor] = {
            other: torch.as_tensor(site["value"])
            for other, site in guide.trace.nodes.items()
            if site["type"] == "sample" and (other in structure.latents or site_is_subsample(site))
        }
        self.marginals = {
            other: (q.mean.detach(), q.stddev.detach()) for other, q in guide.posteriors_so_far.items() if other != name
        }
        missing = {*structure.latents, *structure.gps} - {name, *self.values, *self.marginals}
        if missing:
            self._draw_ahead(process.mean.detach())
        meeting = {other for pair in structure.interactions if name in pair for other in pair} - {name}
        self.meeting = [other for other in self.marginals if other in meeting]
        self.outputs = {
            other: self.marginals[other][0][..., 0].numel() if structure.dependence[other] == DATAWISE else 1
            for other in self.meeting
        }
        self.own_outputs = process.mean[..., 0].numel() if structure.dependence[name] == DATAWISE else 1

    def _draw_ahead(self, f: Tensor) -> None:
        ahead = _Ahead(self.guide, {**self.values, self.name: f}, self.marginals)
        with poutine.block(), ahead:
            self.guide.model(*self.args, **self.kwargs)
        self.values |= ahead.drawn
        self.guide.drawn_ahead.update(ahead.drawn)

    def derivatives(
        self, mean: Tensor, variance: Tensor, at_mean: bool, attached: bool
    ) -> Optional[tuple[Tensor, Tensor]]:
        """E[ℓ'] and E[ℓ''] over N(mean, variance) and the marginals of the GP sites met; ``None`` without data.

        :param at_mean: take them at the mean, as for a quadratic ℓ.
        :param attached: let gradients pass through the mean.
        """
        widths = [0 if at_mean else self.own_outputs, *self.outputs.values()]
        nodes, weights = normal_nodes(sum(widths), mean)
        parts = nodes.split(widths, -1)
        spread = torch.where(variance > 0, variance, 1.0).sqrt() * (variance > 0)
        start = mean if attached else mean.detach()
        values = {self.name: start + spread.detach() * _per_output(parts[0], mean)}
        if at_mean:
            values = {self.name: start.expand(len(weights), *start.shape)}
        for other, part in zip(self.meeting, parts[1:]):
            loc, scale = self.marginals[other]
            values[other] = loc + scale * _per_output(part, loc)
        fixed = {other: loc for other, (loc, _) in self.marginals.items() if other not in values}
        observed = False

        def total(moved: dict[str, Tensor]) -> Tensor:
            nonlocal observed
            trace, data = self._held(fixed | moved)
            observed = observed or bool(data.nodes)
            skip = {*self.guide.structure.gps, *self._upstream(trace)}  # type: ignore[union-attr]
            return sum((part.sum() for part in log_densities(trace, skip).values()), start.new_zeros(()))

        with pyro.validation_enabled(False):
            standard = None if at_mean else _per_output(parts[0], mean) / spread.detach()
            result = expected_derivatives(total, values, self.name, weights, standard)
        return result if observed else None

    def observes(self) -> bool:
        """Whether the run observes data."""
        means = {other: loc for other, (loc, _) in self.marginals.items()}
        return bool(self._held(means | {self.name: self.process.mean.detach()})[1].nodes)

    def _held(self, functions: dict[str, Tensor]) -> tuple[poutine.Trace, poutine.Trace]:
        trace = held_trace(self.guide.model, {**self.values, **functions}, self.args, self.kwargs)
        rows = self.guide.structure.rows  # type: ignore[union-attr]
        data = poutine.Trace()
        data.nodes.update({name: site for name, site in trace.nodes.items() if name in rows and site["is_observed"]})
        require_full_batch(self.name, self.module, data)
        return trace, data

    def _upstream(self, trace: poutine.Trace) -> set[str]:
        names = list(trace.nodes)
        return set(names[: names.index(self.name)]) if self.name in names else set()


def _per_output(nodes: Tensor, like: Tensor) -> Tensor:
    """Nodes ``(K, A)`` shaped to multiply ``like``, ``(..., N)``, one axis for all outputs or one for each."""
    if nodes.shape[-1] <= 1:
        return nodes.reshape(len(nodes), *[1] * like.dim()) if nodes.shape[-1] else nodes.new_zeros(len(nodes), 1)
    return nodes.reshape(len(nodes), *like.shape[:-1], 1)


class _Ahead(Messenger):
    """Runs the model on from held values, drawing what the guide has not yet drawn."""

    def __init__(self, guide: AutoSparseGP, held: dict[str, Tensor], marginals: dict[str, Any]) -> None:
        super().__init__()
        self.guide, self.held, self.marginals = guide, held, marginals
        self.drawn: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        known = {*self.held, *self.guide.structure.latents, *self.guide.structure.gps}  # type: ignore[union-attr]
        if msg["is_observed"] or name not in known:
            return
        if name in self.held:
            msg["value"] = self.held[name]
        elif name in self.marginals:
            msg["value"] = self.marginals[name][0]
        else:
            posterior = self.guide.look_ahead(name, msg["fn"])
            if isinstance(posterior, SparsePosterior):
                self.marginals[name] = posterior.mean.detach(), posterior.stddev.detach()
                msg["value"] = posterior.mean.detach()
            else:
                value = posterior if isinstance(posterior, Tensor) else _draw(posterior, msg["fn"])
                self.drawn[name] = msg["value"] = value
        msg["done"] = True


def _draw(posterior: Any, prior: Any) -> Tensor:
    if posterior.batch_shape != prior.batch_shape:
        posterior = posterior.expand(prior.batch_shape)
    return posterior.rsample() if posterior.has_rsample else posterior.sample()
