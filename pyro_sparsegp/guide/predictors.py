"""Linear predictors of likelihoods: affine functions of a field under a link, and expectations over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import combinations_with_replacement
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..numerics.linalg import above_rounding
from ..program.declared import LINKS, candidates, expectation, is_declared, parameters, rebuilt, rewrapped
from ..program.reader import normal_nodes
from ..program.traces import bare, is_observation, sample_sites
from .field import Layout, slices

Place = tuple[str, str]  # a site, and its parameter
Pair = tuple[Place, Place]


def jacobian(value: Tensor, x: Tensor, along: Optional[Tensor] = None) -> Tensor:
    """∂ value / ∂x times directions, ``(K, N)``, of N values, by one way back and one through that.

    :param along: the directions, ``(K, len(x))``; by default each entry of x.
    """
    one = torch.zeros_like(value, requires_grad=True)
    (slope,) = torch.autograd.grad(value, x, one, create_graph=True)
    along = torch.eye(len(x), dtype=x.dtype, device=x.device) if along is None else along
    if not slope.requires_grad:
        return slope.new_zeros(len(along), len(value))
    return torch.autograd.grad(slope, one, along, is_grads_batched=True, create_graph=True)[0]


def find_links(
    run: Callable[[Tensor], poutine.Trace], layout: Layout, like: Tensor
) -> Optional[tuple[dict[str, dict[str, str]], list[str], list[str]]]:
    """By observed site and parameter, the link under which it is affine in x, the latents that are owned, and the
    members in which one is affine under no link; ``None`` if a density is not known.

    :param run: the program with a field at x, ``(extended,)``.
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(3, layout.extended, generator=generator).to(like)
    several = {n: num for n, num in layout.numbers.items() if n not in layout.residuals and num > 1}
    # An affine function has one slope along any direction; that by each value shows whose a datum's is.
    members = torch.block_diag(*(torch.ones(1, num) for num in [*layout.numbers.values(), *layout.residuals.values()]))
    along = torch.cat(
        [draws[2] * members.to(like), *(torch.eye(layout.extended)[layout.rows[n]].to(like) for n in several)]
    )
    slopes: dict[Place, dict[str, Tensor]] = {}
    for x in (torch.zeros_like(draws[0]), draws[0], -3 * draws[1]):
        x.requires_grad_()
        for name, site in sample_sites(run(x)).items():
            if not is_observation(site) or not _depends(site["fn"].log_prob(site["value"]), x):
                continue
            fn = bare(site["fn"])
            moving = _moving(fn, site["value"], x)
            if not moving:
                return None
            for key, part in moving.items():
                for link in candidates(fn, key):
                    _compare(part, fn, x, along, slopes.setdefault((name, key), {}), link)
    found: dict[str, dict[str, str]] = {}
    for (name, key), by_link in slopes.items():
        found.setdefault(name, {})[key] = min(by_link, key=lambda link: int(by_link[link].isnan().sum()))
    chosen = [slopes[name, key][link] for name, of_site in found.items() for key, link in of_site.items()]
    rows = {name: slice(own.start + len(members), own.stop + len(members)) for name, own in slices(several).items()}
    owned = [n for n, own in rows.items() if all(((slope[own] != 0).sum(0) <= 1).all() for slope in chosen)]
    return found, owned, [n for i, n in enumerate(layout.numbers) if any(slope[i].isnan().any() for slope in chosen)]


def _moving(fn: Any, value: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The parameters of a density of single data that depend on x: one or two, of which it can be made anew."""
    made_of = {} if fn.event_shape else parameters(fn)
    moving = {key: part for key, part in made_of.items() if _depends(part, x)}
    is_single = len(moving) <= 2 and all(part.dim() <= len(fn.batch_shape) for part in moving.values())
    return moving if is_single and _is_rebuilt(fn, value) else {}


def _compare(part: Tensor, fn: Any, x: Tensor, along: Tensor, slopes: dict[str, Tensor], link: str) -> None:
    """Keep slopes, ``(K, N)``, of a parameter under a link; NaN along directions that had others at another x."""
    here = jacobian(LINKS[link][0](part.expand(fn.batch_shape).reshape(-1)), x, along).detach()
    there = slopes.setdefault(link, here)
    near = (here - there).abs() <= (1e-6 if here.dtype == torch.float64 else 1e-2) * there.nan_to_num().abs().amax()
    slopes[link] = there.masked_fill(~near.all(1, keepdim=True), torch.nan)


class Predictors:
    """The linear predictors η = η(0) + Jx + J'√ρt of a run's likelihoods, and densities at values of theirs.

    :param sites: of a run that is standardised by ``x``, ``(extended,)``.
    :param links: by site and parameter.

    ``eta`` are the run's, ``(N,)`` by site and parameter; ``rows`` are J of common entries, ``residuals`` J', and
    ``owned`` the entries, owners and slopes of owned latents, as :meth:`Layout.split` has them.
    """

    def __init__(self, sites: Any, links: Mapping[str, Mapping[str, str]], x: Tensor, layout: Layout) -> None:
        self.sites, self.links, self.x = sites, links, x
        self.eta: dict[tuple[str, str], Tensor] = {}
        for name, of_site in links.items():
            fn, made_of = bare(sites[name]["fn"]), parameters(sites[name]["fn"])
            for key, link in of_site.items():
                self.eta[name, key] = LINKS[link][0](made_of[key].expand(fn.batch_shape).reshape(-1))
        self.rows: dict[tuple[str, str], Tensor] = {}
        self.residuals: dict[tuple[str, str], Tensor] = {}
        self.layout = layout
        self.owned: dict[tuple[str, str], list[tuple[slice, Tensor, Tensor]]] = {}
        if not self.eta:  # a step without some of the data
            return
        every = jacobian(torch.cat(list(self.eta.values())), x, layout.directions(x))
        for place, part in zip(self.eta, every.split([len(eta) for eta in self.eta.values()], -1)):
            self.rows[place], self.residuals[place], self.owned[place] = layout.split(part)

    def detached(self) -> Predictors:
        """These without their graph."""
        other = copy.copy(self)
        other.eta = {place: eta.detach() for place, eta in self.eta.items()}
        other.rows = {place: row.detach() for place, row in self.rows.items()}
        other.owned = {p: [(e, o, slope.detach()) for e, o, slope in own] for p, own in self.owned.items()}
        return other

    def dense(self, place: tuple[str, str]) -> Tensor:
        """J, ``(N, num)``."""
        own = self.rows[place]
        rows = own.new_zeros(len(own), self.layout.num).index_copy(1, self.layout.common(own), own)
        for entries, owner, slope in self.owned[place]:
            rows = rows.index_put((torch.arange(len(slope), device=slope.device), entries.start + owner), slope)
        return rows

    def distribution(self, name: str, eta: Mapping[str, Tensor]) -> Any:
        """A site's distribution of single data at predictors ``(..., N)`` by parameter."""
        shape = bare(self.sites[name]["fn"]).batch_shape
        changed = {
            key: LINKS[self.links[name][key]][1](value.reshape(value.shape[:-1] + shape)) for key, value in eta.items()
        }
        return rebuilt(self.sites[name]["fn"], changed)

    def summed(self, name: str, each: Tensor) -> Tensor:
        """The sum of a term for each datum of a site, as the site scales and masks them."""
        site = self.sites[name]
        return scale_and_mask(rewrapped(site["fn"], each), site["scale"], site["mask"]).sum()

    def covariances(self, root: Tensor) -> dict[Pair, Tensor]:
        """Of each datum's predictors where x ~ N(·, P⁻¹), by pairs of places, the first one's before.

        :param root: the Cholesky factor of P.
        """
        parts = {
            place: torch.linalg.solve_triangular(root, self.dense(place).mT, upper=False).detach() for place in self.eta
        }
        pairs = [pair for pair in combinations_with_replacement(self.eta, 2) if pair[0][0] == pair[1][0]]
        return {
            (one, other): (parts[one] * parts[other]).sum(0)
            + (self.residuals[one] * self.residuals[other]).sum(-1).detach()
            for one, other in pairs
        }

    def expected(
        self, name: str, eta: Mapping[str, Tensor], covariance: Mapping[tuple[str, str], Tensor], num_nodes: int
    ) -> Tensor:
        """The expectation of a site's log density over normal predictors, in closed form or at Gauss-Hermite nodes.

        :param eta: their means, ``(N,)`` by parameter.
        :param covariance: by pairs of parameters, the first one's before.
        """
        (first, *others), value = eta, self.sites[name]["value"]
        if not others and first == "loc" and is_declared(self.sites[name]["fn"]):
            fn = self.distribution(name, eta)
            return self.summed(name, expectation(fn, value, covariance[first, first].reshape(fn.batch_shape)))
        nodes, weights = normal_nodes(len(eta), eta[first], num_nodes)
        sd = covariance[first, first].sqrt()
        at = {first: eta[first] + sd * nodes[:, :1]}
        for key in others:  # one at most
            across, own = covariance[first, key] / sd, covariance[key, key]
            rest = above_rounding(own - across.square(), own).sqrt()
            at[key] = eta[key] + (across * nodes[:, :1] + rest * nodes[:, 1:])
        each = self.distribution(name, at).log_prob(value)
        return self.summed(name, torch.tensordot(weights, each, 1))

    def log_density(self, eta: Mapping[tuple[str, str], Tensor]) -> Tensor:
        """ℓ at predictors, of all sites that depend on any."""
        total: Any = 0.0
        for name in self.links:
            own = {key: value for (site, key), value in eta.items() if site == name}
            total = total + self.summed(name, self.distribution(name, own).log_prob(self.sites[name]["value"]))
        return total


def _depends(value: Tensor, x: Tensor) -> bool:
    """Whether x is in a value's graph."""
    return (
        value.requires_grad and torch.autograd.grad(value.sum(), x, allow_unused=True, retain_graph=True)[0] is not None
    )


def _is_rebuilt(fn: Any, value: Tensor) -> bool:
    try:
        return torch.equal(rebuilt(fn, {}).log_prob(value), fn.log_prob(value))
    except (TypeError, ValueError, RuntimeError):
        return False
