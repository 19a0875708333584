"""Linear predictors of likelihoods: affine functions of a field under a link, and expectations over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations_with_replacement
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..numerics.functions import depends, jacobian
from ..numerics.linalg import above_rounding
from ..program.declared import LINKS, candidates, expectation, is_declared, parameters, rebuilt, rewrapped
from ..program.handlers import mapped
from ..program.reader import normal_nodes
from ..program.traces import bare, is_observation, sample_sites
from .field import Layout, slices

Place = tuple[str, str]  # a site, and its parameter
Pair = tuple[Place, Place]
Again = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]  # the sites of the same run with GP sites' values given

# The link of a density whose parameters do not show its predictor: it is told in the values of a GP site.
VALUE = "value"
_AWAY = 0.37, -0.71  # of a value, from where it may be at a top of its density
_BENT = 1e-2  # of a log density, and of a nat
_MOVED = -1.5, 3.0  # times what a member was, to see kinks: through its prior's mean, and out
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2}  # of slopes


def find_links(
    run: Callable[[Tensor], poutine.Trace], layout: Layout, like: Tensor
) -> Optional[tuple[dict[str, dict[str, str]], list[str], list[str]]]:
    """By observed site and parameter, the link under which it is affine in x, the latents that are owned, and the
    members in which one is affine under no link; ``None`` if a density is not known.

    :param run: the program with a field at x, ``(extended,)``.
    """
    draws = torch.randn(2, layout.extended, generator=torch.Generator().manual_seed(0)).to(like)
    several = {n: num for n, num in layout.numbers.items() if n not in layout.residuals and num > 1}
    # An affine function has one slope along any direction; that by each value shows whose a datum's is.
    members = torch.block_diag(*(torch.ones(1, num) for num in [*layout.numbers.values(), *layout.residuals.values()]))
    along = torch.cat(
        [draws[1] * members.to(like), *(torch.eye(layout.extended)[layout.rows[n]].to(like) for n in several)]
    )
    runs = [(run(x.requires_grad_()), x) for x in (torch.zeros_like(draws[0]), draws[0])]

    def bent(every: Sequence[Tensor]) -> list[str]:
        """The members in which some predictors, of these slopes, are not affine."""
        return [member for member, *each in zip(layout.numbers, *every) if any(part.isnan().any() for part in each)]

    links: dict[str, dict[str, str]] = {}
    slopes: dict[str, list[Tensor]] = {}
    for name, of_site in _by_links(runs, along).items():
        best = {key: min(own, key=lambda link: int(own[link].isnan().sum())) for key, own in of_site.items()}
        links[name], slopes[name] = best, [of_site[key][link] for key, link in best.items()]
        apart = bent(slopes[name])
        if best and layout.residuals.keys().isdisjoint(apart):
            continue
        gp, slope = _in_values(runs, name, layout, along)
        others = [member for member in apart if member not in layout.residuals]
        # Links stay where f is affine without some latents, as without k in mu + k f.
        if gp and not 0 < len(others) <= len(bent([slope])):
            links[name], slopes[name] = {gp: VALUE}, [slope]
        if not links[name]:
            return None
    chosen = list(chain.from_iterable(slopes.values()))
    rows = {name: slice(own.start + len(members), own.stop + len(members)) for name, own in slices(several).items()}
    owned = [n for n, own in rows.items() if all(((slope[own] != 0).sum(0) <= 1).all() for slope in chosen)]
    return links, owned, list(dict.fromkeys([*bent(chosen), *_kinks(run, *runs[1], links, layout)]))


def _kinks(
    run: Callable[[Tensor], poutine.Trace],
    trace: poutine.Trace,
    x: Tensor,
    links: Mapping[str, Mapping[str, str]],
    layout: Layout,
) -> list[str]:
    """The members whose move, up or down, does not do to predictors what their slopes say, or moves what else densities
    are made of: kinks and comparisons have no slope that tells (test_what_bends_at_a_kink_is_no_predictor).

    :param trace: of a run at x.
    """
    pairs = [(n, own, factor) for n, own in layout.rows.items() for factor in _MOVED[: 1 + (n not in layout.residuals)]]
    moves = x.new_zeros(len(pairs), len(x))
    for move, (_, own, factor) in zip(moves, pairs):
        move[own] = (factor - 1) * x.detach()[own]
    (eta, rest), found = _shown(trace, links), list[str]()
    along = [jacobian(part, x, moves).detach() for part in eta]
    for k, (member, *_) in enumerate(pairs):
        with torch.no_grad():
            there, others = _shown(run(x.detach() + moves[k]), links)
        changes = [(b - a, slope[k]) for a, b, slope in zip(eta, there, along)]
        changes += [(b - a, torch.zeros_like(a)) for a, b in zip(rest, others)]
        if not all(_are_near(change.detach(), slope) for change, slope in changes):
            found.append(member)
    return found


def _density_of(site: Any, value: Tensor) -> Tensor:
    """Log densities of single data; with the masks of other sites that share a discrete latent
    (test_a_mask_beside_an_enumerated_latent).
    """
    return (site["fn"] if hasattr(site["fn"], "without_masks") else bare(site["fn"])).log_prob(value)


def _shown(trace: poutine.Trace, links: Mapping[str, Mapping[str, str]]) -> tuple[list[Tensor], list[Tensor]]:
    """Of sites with links the predictors, and what else their densities are made of."""
    eta, rest, sites = list[Tensor](), list[Tensor](), sample_sites(trace)
    for name, of_site in links.items():
        site, made_of = sites[name], parameters(sites[name]["fn"])
        for key, link in of_site.items():
            eta.append((sites[key]["value"] if link == VALUE else LINKS[link][0](made_of[key])).reshape(-1))
        is_hidden = VALUE in of_site.values()  # the predictor of a density is in none of its parameters
        others = [] if is_hidden else [part for key, part in made_of.items() if key not in of_site]
        parts = (*others, site["scale"], site["mask"])
        rest += [part.to(eta[0]).reshape(-1) for part in parts if isinstance(part, Tensor)]
    return eta, rest


def _are_near(one: Tensor, other: Tensor) -> bool:
    """Whether changes are equal to rounding, where they are finite."""
    known = one.isfinite() & other.isfinite()
    size = (one.abs() + other.abs())[known].sum().clamp(min=1.0)
    return bool(((one - other).abs()[known] <= _ROUNDING[one.dtype] * size).all())


def _moving(fn: Any, value: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The parameters of a density of single data that depend on x: one or two, of which it can be made anew."""
    made_of = {} if fn.event_shape else parameters(fn)
    moving = {key: part for key, part in made_of.items() if depends(part, x)}
    is_single = len(moving) <= 2 and all(part.dim() <= len(fn.batch_shape) for part in moving.values())
    with suppress(TypeError, ValueError, RuntimeError):
        if is_single and torch.equal(rebuilt(fn, {}).log_prob(value), fn.log_prob(value)):
            return moving
    return {}


def _by_links(runs: Sequence[tuple[poutine.Trace, Tensor]], along: Tensor) -> dict[str, dict[str, dict[str, Tensor]]]:
    """By observed site and parameter, slopes under each link; none where a predictor is in no parameter."""
    slopes: dict[str, dict[str, dict[str, Tensor]]] = {}
    for trace, x in runs:
        for name, site in sample_sites(trace).items():
            fn, value = bare(site["fn"]), site["value"]
            if not is_observation(site) or not depends(fn.log_prob(value), x):
                continue
            of_site = slopes.setdefault(name, {})
            for key, part in _moving(fn, value, x).items():
                for link in candidates(fn, key):
                    here = jacobian(LINKS[link][0](part.expand(fn.batch_shape).reshape(-1)), x, along)
                    _compare(here.detach(), of_site.setdefault(key, {}), link)
    return slopes


def _in_values(
    runs: Sequence[tuple[poutine.Trace, Tensor]], name: str, layout: Layout, along: Tensor
) -> tuple[Optional[str], Tensor]:
    """The GP site of which each datum of a density has one value, and the moves of it that do to the density what those
    of x do, ``(K, N)``: j/g with its slopes; NaN where these differ by x. ``None`` if there is no such site.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for trace, x in runs:
        sites: Any = trace.nodes
        density = bare(sites[name]["fn"]).log_prob(sites[name]["value"])
        values = [sites[gp]["value"] for gp in layout.residuals]
        slopes = torch.autograd.grad(density.sum(), values, retain_graph=True, allow_unused=True)
        met = {gp: slope for gp, slope in zip(layout.residuals, slopes) if slope is not None}
        if len(met) != 1 or any(layout.residuals[gp] > 1 or g.shape != density.shape for gp, g in met.items()):
            return None, x
        found.append((jacobian(density, x, along), *met.values()))  # type: ignore[arg-type]
    (one, by_one), (other, by_other) = found
    # j₁/g₁ = j₂/g₂, also where one g is next to 0
    gap, size = one * by_other - other * by_one, (one * by_other).abs() + (other * by_one).abs()
    near = gap.abs() <= _ROUNDING[size.dtype] * size.nan_to_num().amax()
    return next(iter(met)), _ratio(*found).detach().masked_fill(~near.all(1, keepdim=True), torch.nan)


def _ratio(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """j/g, where |g| is larger; 0 where a datum's density has no f: test_field.py::test_factors_that_leave_rows_out."""
    parts = [j / g.masked_fill(g == 0, torch.inf) for j, g in (one, other)]
    return torch.where(one[1].abs() > other[1].abs(), parts[0], parts[1])


def _compare(here: Tensor, slopes: dict[str, Tensor], link: str) -> None:
    """Keep slopes, ``(K, N)``, of a parameter under a link; NaN along directions that had others at another x."""
    there = slopes.setdefault(link, here)
    near = (here - there).abs() <= _ROUNDING[here.dtype] * there.nan_to_num().abs().amax()
    slopes[link] = there.masked_fill(~near.all(1, keepdim=True), torch.nan)


class Predictors:
    """The linear predictors η = η(0) + Jx + J'√ρt of a run's likelihoods, and densities at values of theirs.

    :param sites: of a run that is standardised by ``x``, ``(extended,)``.
    :param links: by site and parameter.
    :param again: makes that run anew.

    ``eta`` are the run's, ``(N,)`` by site and parameter; ``rows`` are J, ``(N, num)``, and ``residuals`` J'.
    """

    def __init__(
        self, sites: Any, links: Mapping[str, Mapping[str, str]], x: Tensor, layout: Layout, again: Again
    ) -> None:
        self.sites, self.links, self.x, self.again = sites, links, x, again
        self.eta: dict[Place, Tensor] = {}
        for name, of_site in links.items():
            fn, made_of = bare(sites[name]["fn"]), parameters(sites[name]["fn"])
            for key, link in of_site.items():
                is_hidden = link == VALUE
                part = sites[key]["value"] if is_hidden else LINKS[link][0](made_of[key].expand(fn.batch_shape))
                self.eta[name, key] = part.reshape(-1)
        self.rows: dict[Place, Tensor] = {}
        self.residuals: dict[Place, Tensor] = {}
        self.layout = layout
        self._owned: dict[Place, list[Tensor]] = {}
        # none, in a step without some of the data
        every = jacobian(torch.cat([x[:0], *self.eta.values()]), x, layout.directions(x))
        for place, part in zip(self.eta, every.split([len(eta) for eta in self.eta.values()], -1)):
            if links[place[0]][place[1]] == VALUE:
                part = part + self._beside(*place)
            self.rows[place], self.residuals[place], self._owned[place] = layout.split(part)

    def _beside(self, name: str, gp: str) -> Tensor:
        """What moves of x do to a density beside its GP site's values, as moves of these, ``(K, N)``."""
        places = [(self.eta[name, gp].detach() + away).requires_grad_() for away in _AWAY]
        return _ratio(*(self._slopes(name, gp, f) for f in places))

    def _slopes(self, name: str, gp: str, f: Tensor) -> tuple[Tensor, Tensor]:
        """Of a density by x beside its GP site's values, and by these."""
        density = self.log_prob(name, {(name, gp): f}) + 0 * self.x.sum()
        (slope,) = torch.autograd.grad(density.sum(), f, create_graph=True)
        return jacobian(density, self.x, self.layout.directions(self.x)), slope

    def at(self, x: Tensor) -> dict[Place, Tensor]:
        """η at x, ``(num,)``."""
        return {place: (self.eta[place] + row @ x).requires_grad_() for place, row in self.rows.items()}

    def bent_at(self, x: Tensor, sites: Mapping[str, Any]) -> list[str]:
        """The sites whose densities at x, ``(extended,)``, are not those of predictors that are affine.

        :param sites: of the same run at x.
        """
        move, t = (x - self.x).detach().split([self.layout.num, len(x) - self.layout.num])
        eta = {place: self.eta[place] + row @ move + self.residuals[place] @ t for place, row in self.rows.items()}
        pairs = {n: (_density_of(sites[n], sites[n]["value"]), self.log_prob(n, eta)) for n in self.links}
        return [n for n, (one, other) in pairs.items() if ((one - other).abs() > _BENT * (1 + other.abs())).any()]

    def detached(self) -> Predictors:
        """These without their graph."""
        other = copy.copy(self)
        other.eta = {place: eta.detach() for place, eta in self.eta.items()}
        other.rows = {place: row.detach() for place, row in self.rows.items()}
        return other

    def distribution(self, name: str, eta: Mapping[Place, Tensor]) -> Any:
        """A site's distribution of single data at predictors ``(..., N)``."""
        shape, changed = bare(self.sites[name]["fn"]).batch_shape, {}
        for key, link in self.links[name].items():
            value = eta[name, key]
            changed[key] = LINKS[link][1](value.reshape(value.shape[:-1] + shape))
        return rebuilt(self.sites[name]["fn"], changed)

    def log_prob(self, name: str, eta: Mapping[Place, Tensor]) -> Tensor:
        """A site's log densities of single data at predictors ``(..., N)``."""
        value, ((key, link), *_) = self.sites[name]["value"], self.links[name].items()
        if link != VALUE:
            return self.distribution(name, eta).log_prob(value)

        def at(f: Tensor) -> tuple[Tensor]:
            return (_density_of(self.again({key: f})[name], value),)

        first = eta[name, key]
        return (at(first) if first.dim() == 1 else mapped(at, first))[0]

    def summed(self, of_site: Callable[[str], Tensor]) -> Tensor:
        """The sum of a term for each datum of each site, as the site scales and masks them."""
        total = self.x.new_zeros(())
        for name in self.links:
            site = self.sites[name]
            each = rewrapped(site["fn"], of_site(name))
            total = total + scale_and_mask(each, site["scale"], site["mask"]).sum()
        return total

    def back(self, slopes: Mapping[Place, Tensor]) -> Tensor:
        """Σ Jᵀv, ``(num,)``, of numbers v by place."""
        return sum(slope @ self.rows[place] for place, slope in slopes.items())  # type: ignore[return-value]

    def columns(self, place: Place) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """J without its graph, as what products take of it: the columns that are no owned latent's, ``(N, C)``, and of
        each owned latent the column in which each datum has an entry, ``(N,)``, and these entries, ``(N, 1)``.
        """
        rows = self.rows[place].detach()
        return rows[:, self.layout.common(rows)], [(own, rows.gather(1, own[:, None])) for own in self._owned[place]]

    def covariances(self, root: Tensor) -> dict[Pair, Tensor]:
        """Of each datum's predictors where x ~ N(·, P⁻¹), by pairs of places, the first one's before.

        :param root: the Cholesky factor of P.
        """
        parts = {
            place: torch.linalg.solve_triangular(root, self.rows[place].mT, upper=False).detach() for place in self.eta
        }
        return {
            (one, other): (parts[one] * parts[other]).sum(0)
            + (self.residuals[one] * self.residuals[other]).sum(-1).detach()
            for one, other in self.pairs
        }

    @property
    def pairs(self) -> list[Pair]:
        """Pairs of places of one site, and each with itself, the first one's before."""
        return [pair for pair in combinations_with_replacement(self.eta, 2) if pair[0][0] == pair[1][0]]

    def expected(self, eta: Mapping[Place, Tensor], covariance: Mapping[Pair, Tensor], num_nodes: int) -> Tensor:
        """E[ℓ] over normal predictors, in closed form or at Gauss-Hermite nodes.

        :param eta: their means, ``(N,)``.
        :param covariance: by :attr:`pairs`.
        """
        return self.summed(lambda name: self._expected(name, eta, covariance, num_nodes))

    def _expected(
        self, name: str, eta: Mapping[Place, Tensor], covariance: Mapping[Pair, Tensor], num_nodes: int
    ) -> Tensor:
        (first, *others), site = [(name, key) for key in self.links[name]], self.sites[name]
        variance = covariance[first, first]
        if self.links[name] == {"loc": "identity"} and is_declared(site["fn"]):
            fn = self.distribution(name, eta)
            return expectation(fn, site["value"], variance.reshape(fn.batch_shape))
        nodes, weights = normal_nodes(1 + len(others), eta[first], num_nodes)
        at = {first: eta[first] + variance.sqrt() * nodes[:, :1]}
        for place in others:  # one at most
            across, own = covariance[first, place] / variance.sqrt(), covariance[place, place]
            rest = above_rounding(own - across.square(), own).sqrt()
            at[place] = eta[place] + (across * nodes[:, :1] + rest * nodes[:, 1:])
        return torch.tensordot(weights, self.log_prob(name, at), 1)

    def log_density(self, eta: Mapping[Place, Tensor]) -> Tensor:
        """ℓ at predictors, of all sites that depend on any."""
        return self.summed(lambda name: self.log_prob(name, eta))
