"""Likelihoods as families on sites read them: E[log p(yₙ | fₙ)] and its derivatives by each function value, all else
held, and the nodes of expectations.
"""

import functools
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..process import GaussianProcess
from .draws import mapped
from .handlers import Rerun
from .owners import find_owners
from .structure import Depends, Structure
from .traces import cut_plates, entries, expectation, log_densities, parameter_of, sample_sites, share_of

_MOST_NODES = 350  # of Gauss-Hermite quadrature: with more, numpy's weights are NaN

Owners = dict[tuple[str, str], Tensor]  # by GP site and site downstream


class Terms:
    """The log densities of a run, with all but GP values held: which of them belong to which value.

    ``owners`` are the numbers of the values that terms depend on, −1 for none. In the GP sites ``rowwise`` each term
    stands in the row of its value. Those ``known`` of an earlier run may hold here.
    """

    def __init__(
        self, run: Rerun, found: Structure, processes: dict[str, GaussianProcess], known: tuple[Owners, set[str]]
    ) -> None:
        self.run, self.means = run, {name: process.mean.detach() for name, process in processes.items()}
        trace: Any = run(self.means)
        parts = log_densities(trace, found.gps)
        shapes = {name: part.shape for name, part in parts.items() if name in found.downstream}
        # What plates leave of a site's terms because they hold some of their rows.
        self.shares = {name: share_of(trace.nodes[name]) for name in shapes}
        frames = [frame for name in shapes for frame in cut_plates(trace.nodes[name])]
        self.plates = {frame.name: (int(frame.size), int(frame.full_size)) for frame in frames}
        self.differentiable = any(parts[name].requires_grad for name in shapes)
        self.owners, self.rowwise = known
        # To find them for each mini-batch would cost a run with 2 log₂ N times its rows.
        as_before = [name in self.rowwise and shapes.get(site) == o.shape for (name, site), o in self.owners.items()]
        if {*as_before} != {True}:
            self._find(list(shapes))
        for (_, site), owner in self.owners.items():  # of a site that has others, the terms of no value
            parts[site] = torch.where(owner < 0, parts[site], 0.0)
        latents = found.latents.keys() - {site for _, site in self.owners}
        none = next(iter(processes.values())).x.new_zeros(())
        #: log densities without a GP value: of latents, and of other data.
        self.priors: Tensor = sum((part.sum() for name, part in parts.items() if name in latents), none)
        self.rest: Tensor = sum((part.sum() for name, part in parts.items() if name not in latents), none)

    def _find(self, sites: list[str]) -> None:
        """Which value each term depends on, masked or not."""

        def show(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            nodes: Any = self.run(values).nodes
            return {site: entries(nodes[site]) for site in sites}

        found = find_owners(show, self.means)[0]
        rows = {name: mean.shape[-1] for name, mean in self.means.items()}
        self.owners = {
            # Numbers of values (P, N), row by row: n + Np.
            (name, site): torch.where(own.touched, own.outputs * rows[name] + own.rows, -1)
            for name, by_site in found.items()
            for site, own in by_site.items()
            if own.touched.any()
        }
        others = {name for (name, _), owner in self.owners.items() if not _is_rowwise(owner, rows[name])}
        self.rowwise = rows.keys() - others

    def log_density(self, name: str, nodes: Tensor) -> Tensor:
        """log p(yₙ | fₙ) at nodes ``(K, ..., N)`` of GP site ``name``, of the same shape, without plates' scales."""
        owners = {site: owner for (own, site), owner in self.owners.items() if own == name}
        total = nodes.new_zeros(len(nodes), nodes[0].numel())

        def at(f: Tensor) -> tuple[Tensor, ...]:
            trace = self.run({**self.means, name: f})
            parts = log_densities(trace, trace.nodes.keys() - owners.keys())
            # A plate's scale says how many data each stands for; a site is that of one.
            return tuple(parts[site] * self.shares[site] for site in owners)

        with pyro.validation_enabled(False):
            parts = mapped(at, nodes)
        for owner, part in zip(owners.values(), parts):
            # log p(y | fₙ) = Σ of the terms that belong to fₙ.
            part = torch.where(owner < 0, 0.0, part).flatten(1).to(total.dtype)
            total = total.index_add(1, owner.clamp(min=0).flatten(), part)
        return total.reshape(nodes.shape)


def _is_rowwise(owner: Tensor, num: int) -> bool:
    """Whether terms stand, along one of their dimensions, in the rows of their values, and each has one."""
    rows, last = torch.arange(num, device=owner.device), owner.dim() - 1
    dims = [dim for dim, size in enumerate(owner.shape) if size == num and (owner >= 0).all()]
    return any((owner % num == rows.reshape(-1, *[1] * (last - dim))).all() for dim in dims)


Marginal = tuple[Tensor, Tensor]  # mean and variance of a GP site's values


class Expectation(NamedTuple):
    """E[ℓ], a scalar, and E[ℓ'] and E[ℓ''] by each value, ``(..., N)``."""

    value: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Reader:
    """The log densities downstream of GP sites and their derivatives by function values, all else held."""

    run: Rerun  # of the model with GP sites at values, all else as it was
    found: Structure  # what is known of the model
    num_nodes: int  # along an axis
    # The sites after a GP site, if all of them know their expectation over parameters of one value each.
    closed: Collection[str] = ()

    def expect(self, name: str, marginals: Mapping[str, Marginal]) -> Expectation:
        """E[ℓ], E[ℓ'] and E[ℓ''] by a GP site's values, over its marginals and the marginals of the GP sites that it
        meets.

        E[ℓ'] = ∂E[ℓ]/∂m and E[ℓ''] = 2∂E[ℓ]/∂v (Price, 1958) see kinks of ℓ, and need no second derivative of it.
        """
        # Outputs that meet in one term have an axis of nodes each.
        meeting = [other for other in marginals if other in self.found.neighbours(name)]
        meet = {other for other in (name, *meeting) if self.found.gps[other].depends == Depends.DATAWISE}
        widths = {other: marginals[other][0][..., 0].numel() if other in meet else 1 for other in (name, *meeting)}
        # f = m + √v ε, one axis of ε for each function; E[·] = Σₖ wₖ (·)(εₖ). One node has no spread.
        pairs = widths[name] if self.found.gps[name].is_quadratic else 0
        others, like = sum(widths.values()) - pairs, marginals[name][0]
        nodes, weights = normal_nodes(others, like, max(self.num_nodes, 2), pairs)
        parts = dict(zip(widths, nodes.split([*widths.values()], -1)))

        def expected(m: Tensor, v: Tensor) -> Tensor:
            if self.closed and self.found.gps[name].depends == Depends.ELEMENTWISE:
                return self._in_closed_form(name, m, v)
            stack, moments = {}, {**marginals, name: (m, v)}
            for other, part in parts.items():
                mean, variance = moments[other]
                outputs = mean.shape[:-1]
                stack[other] = mean + _spread(variance) * part.expand(-1, outputs.numel()).reshape(-1, *outputs, 1)
            held = {other: mean for other, (mean, _) in marginals.items() if other not in parts}

            def total(moved: Mapping[str, Tensor]) -> tuple[Tensor]:
                return (total_after(self.run({**held, **moved}), name, self.found.gps),)

            return weights @ mapped(total, stack)[0]

        with pyro.validation_enabled(False):
            (first, by_variance), value = torch.func.grad_and_value(expected, (0, 1))(*marginals[name])
        return Expectation(value, first, 2 * by_variance)

    def _in_closed_form(self, name: str, mean: Tensor, variance: Tensor) -> Tensor:
        """E[ℓ] over parameters θ = af + b of one value each, of variance a²v."""
        here, there = self.run({name: mean}), self.run({name: mean + _spread(variance)})
        moved, total = sample_sites(there), mean.new_zeros(())
        for other in self.closed:
            site = sample_sites(here)[other]
            move = parameter_of(moved[other]["fn"]) - parameter_of(site["fn"])
            expected = expectation(site["fn"], site["value"], move.square())
            total = total + scale_and_mask(expected, site["scale"], site["mask"]).sum()
        return total / scale_of(here, name)


def total_after(trace: poutine.Trace, name: str, gps: Collection[str]) -> Tensor:
    """ℓ, the sum of log densities after a GP site but all GP sites', as its prior meets it: under ``poutine.scale``
    that is scaled, too, on which the best q does not depend.
    """
    names, site = list(trace.nodes), sample_sites(trace)[name]
    # What stands before the GP site is the same for all its values.
    parts = log_densities(trace, {*gps, *names[: names.index(name)]})
    none: Any = site["value"].new_zeros(())
    return sum((part.sum() for part in parts.values()), none) / scale_of(trace, name)


def scale_of(trace: poutine.Trace, name: str) -> Any:
    """A GP site's ``poutine.scale``, one number."""
    scale = sample_sites(trace)[name]["scale"]
    if isinstance(scale, Tensor) and scale.numel() > 1:
        raise ValueError(
            f"GP site {name!r} has a poutine.scale with {scale.numel()} values; a family whose sites are read off "
            "the likelihood takes one number: scale the likelihood's site by them, or take a family such as SVGP."
        )
    return scale


def _spread(variance: Tensor) -> Tensor:
    """√v, whose gradient is 0 where v is."""
    positive = variance > 0
    return torch.where(positive, variance, 1.0).sqrt() * positive


def normal_nodes(num_axes: int, like: Tensor, num_nodes: Optional[int] = None, pairs: int = 0) -> tuple[Tensor, Tensor]:
    """Standard normal nodes, ``(K, pairs + num_axes)``, and weights, ``(K,)``: a Gauss-Hermite grid for one or two
    axes, by default of 20 nodes along one, 10 along two; scrambled Sobol points in plus-minus pairs beyond. ``pairs``
    are axes before these, of what is quadratic in them: two nodes on each are exact.
    """
    # Made once for a dtype and device, so that a step copies nothing.
    return _normal_nodes(num_axes, num_nodes or (20 if num_axes == 1 else 10), pairs, like.dtype, like.device)


@functools.lru_cache(maxsize=32)
def _normal_nodes(
    num_axes: int, num: int, pairs: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        if num_axes <= 2:
            if num > _MOST_NODES:
                raise ValueError(f"num_nodes must be at most {_MOST_NODES}, got {num}")
            # ∫ g(f) N(f | 0, 1) df ≈ Σₖ wₖ g(fₖ), exact for polynomials of degree 2K − 1.
            nodes, each = np.polynomial.hermite_e.hermegauss(num)
            points, products = (
                torch.tensor(list(itertools.product(part, repeat=num_axes)), dtype=torch.float64)
                for part in (nodes, each / each.sum())
            )
            weights = products.prod(-1)
        else:
            # ε = Φ⁻¹(u) = √2 erf⁻¹(2u − 1), and −ε with each ε: odd moments are 0.
            draws = torch.quasirandom.SobolEngine(num_axes, scramble=True, seed=0)
            uniform = draws.draw(max(64, 2 * num_axes), dtype=torch.float64)
            half = math.sqrt(2) * torch.erfinv(2 * uniform.clamp(1e-6, 1 - 1e-6) - 1)
            # of the second moments I: what is of third degree has its expectation
            half = math.sqrt(len(half)) * torch.linalg.qr(half).Q
            points = torch.cat([half, -half])
            weights = torch.full_like(points[:, 0], 1 / len(points))
        if pairs:
            # ±√P eₚ on each of P axes have the moments of N(0, I) up to the third.
            axes = math.sqrt(pairs) * torch.eye(pairs, dtype=torch.float64)
            both = torch.cat([axes, -axes]).repeat(len(points), 1)
            points = torch.cat([both, points.repeat_interleave(2 * pairs, 0)], -1)
            weights = weights.repeat_interleave(2 * pairs) / (2 * pairs)
        return points.to(device, dtype), weights.to(device, dtype)
