"""Reading Gaussian sites off the model while the guide runs it.

The guide asks at a GP site, before the model's run is over. What the run has drawn so far is held; latents that come
later are drawn ahead, and the run takes those draws when it gets there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .bases import KernelFeatures
from .likelihood import expected_derivatives, normal_nodes
from .posteriors import from_natural
from .process import GaussianProcess
from .sites import KeptSites, Sites, update, within_reach
from .sparse_gp import OptimalGP, ProjectedGP, SiteGP
from .sparse_posterior import SparsePosterior
from .structure import DATAWISE, ELEMENTWISE
from .terms import InseparableError, Terms
from .tilted import normaliser_derivatives, tilted
from .traces import as_process, held_trace, log_densities

if TYPE_CHECKING:
    from .guide import AutoSparseGP

__all__ = ["correct_sites", "is_corrected", "observes", "read_sites", "repeatable", "require_full_batch"]

_MOST = 100  # updates of corrected sites
_NODES = 32  # of an integral over f given h
_AT_ONCE = 2**19  # values of f at which a likelihood is evaluated together


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


def is_corrected(guide: AutoSparseGP, name: str, module: Any) -> bool:
    """Whether a diagonal of the kernel, if it depends on the rows, gives predictions sites of their own: in weight
    space, where terms of the likelihood have one function value each and are not Gaussian in it.
    """
    found = guide.structure
    return (
        found is not None
        and isinstance(module, OptimalGP)
        and module.in_weight_space
        and name not in found.quadratic
        and found.dependence.get(name) == ELEMENTWISE
        and not any(name in pair for pair in found.interactions)
    )


@torch.no_grad()
def correct_sites(guide: AutoSparseGP, name: str, process: GaussianProcess, module: SiteGP) -> None:
    """Read the sites of the corrected prediction (paper 3, eq. 12) for a likelihood that is not Gaussian in f.

    With h = μ + φᵀw and f = h + r, r ~ N(0, c), the likelihood of a datum is t(h) = log ∫ p(y | f) N(f | h, c) df. The
    Gaussian q(w) that is optimal for the prior and Σ t(hₙ) is that of sites in h with

        λ = −E[t''(h)] and λ(z − m) = E[t'(h)] under q's h ~ N(m, v), or at h = m (``at="mean"``),

    a fixed point of the updates of :func:`read_sites`, made here until it is reached. For a Gaussian p it is
    λ = 1/(σ² + c). Kept are λ/(1 − λc) and z, the sites in f which :meth:`OptimalGP.predict` puts c into again:
    λ = (1 − E[v̂]/c)/c < 1/c, with v̂ > 0 the variance of f given h and y. Where c is 0, or one number is the density of
    several data, none are kept, and predictions take those of training.
    """
    assert isinstance(module, OptimalGP)
    assert isinstance(module.sites, KeptSites)
    module.sites.corrected = None
    x, kept = process.x, module.sites(process)
    features = module.basis(process.relative_to(x).kernel, process.jitter, name)
    if module.sites.empty or kept.inputs.shape != x.shape or not isinstance(features, KernelFeatures):
        return
    prior_mean = process.mean
    tiny = torch.finfo(prior_mean.dtype).eps

    def marginals(sums: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance, residual = features.split(x, from_natural(*sums, features.sizes, None, name))
        return prior_mean + mean, torch.maximum(variance, tiny * level), residual

    level = process.variance.amax(-1, keepdim=True)
    mean, variance, residual = marginals(features.gram(x, kept.precision, kept.linear, absorb=True))
    if not (residual > 1e3 * tiny * level).any():
        return
    reader = _Reader(guide, name, process, module)
    others = {other: loc for other, (loc, _) in reader.marginals.items()}
    try:
        with pyro.validation_enabled(False):
            args, kwargs = guide.args_kwargs
            terms = Terms(guide, {**reader.values, **others}, {name: process}, args, kwargs, module.findings)
    except InseparableError:
        return
    if name not in terms:
        return
    shrunk = 1 / (1 + kept.precision * residual)
    sites = Sites(x, kept.precision * shrunk, kept.linear * shrunk)
    noise, guess = torch.maximum(residual, tiny * level), None
    rate, last = 1.0, math.inf
    for _ in range(_MOST):
        gradient, curvature, guess = _integrated(partial(_flat, terms, name), mean, variance, noise, module.at, guess)
        known = gradient.isfinite() & curvature.isfinite()
        pull = sites.linear - sites.precision * (mean - prior_mean)
        gradient = torch.where(known, gradient, pull)
        curvature = torch.where(known, curvature, sites.precision).clamp(min=0)
        new = update(sites, gradient, curvature, mean, variance, prior_mean, rate)
        moved, variance, _ = marginals(features.gram(x, new.precision, new.linear))
        change = (new.precision - sites.precision).abs() / (new.precision + new.precision.mean(-1, keepdim=True) + tiny)
        move = float(torch.maximum(change.max(), ((moved - mean).abs() / variance.sqrt()).max()))
        mean, sites = moved, new
        if move < 10 * tiny**0.5:
            break
        rate, last = max(rate / 2, 0.1) if move > last else min(1.5 * rate, 1.0), move
    rest = (1 - sites.precision * residual).clamp(min=tiny)
    module.sites.corrected = torch.stack([sites.precision / rest, sites.linear / rest])


_Guess = tuple[Tensor, Tensor]  # f − h and the standard deviation of f, given h and y at nodes of h, (K, ..., N)


def _integrated(
    log_density: Callable[[Tensor], Tensor],
    mean: Tensor,
    variance: Tensor,
    residual: Tensor,
    at: str,
    guess: Optional[_Guess],
) -> tuple[Tensor, Tensor, _Guess]:
    """E[t'(h)] and −E[t''(h)] over h ~ N(mean, variance), or at the mean, for t(h) = log ∫ p(y | f) N(f | h, c) df.

    :param guess: what is known from the last time.
    :returns: what is to be known the next time, too.
    """
    columns, weights = normal_nodes(int(at == "marginals"), mean)
    columns = columns.sum(-1).reshape(-1, *[1] * mean.dim())
    gradient, curvature = torch.zeros_like(mean), torch.zeros_like(mean)
    found: list[_Guess] = []
    for part in torch.arange(len(weights)).split(max(_AT_ONCE // (_NODES * mean.numel()), 1)):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        nodes, h = columns[rows], mean + variance.sqrt() * columns[rows]
        shift, spread = (0.0, residual.sqrt().expand(h.shape)) if guess is None else (guess[0][rows], guess[1][rows])
        # From the width of N(h, c), four passes close in on a likelihood a hundred times as narrow.
        moments = tilted(log_density, h, residual, h + shift, spread, 1.0, _NODES, passes=4 if guess is None else 2)
        first, second = normaliser_derivatives(moments, log_density)
        if at == "marginals":  # by Stein's identity, as training's sites
            second = first * nodes / variance.sqrt()
        gradient += torch.tensordot(weights[rows], first, 1)
        curvature -= torch.tensordot(weights[rows], second, 1)
        found.append((moments.mean - h, moments.variance.sqrt()))
    centre, width = (torch.cat(parts) for parts in zip(*found))
    known = centre.isfinite() & (width > 0) & width.isfinite()
    return (
        gradient,
        curvature,
        (torch.where(known, centre, 0.0), torch.where(known, width, residual.sqrt())),
    )


def _flat(terms: Terms, name: str, f: Tensor) -> Tensor:
    return terms.log_density(name, f.flatten(0, 1)).reshape(f.shape)


def observes(guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a run of the model with these arguments observes data: it is run ahead, its GP sites at their means."""
    assert guide.structure is not None
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
        fn, _ = as_process(msg["fn"])
        if fn is not None and not msg["is_observed"]:
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
