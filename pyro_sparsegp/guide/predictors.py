"""Linear predictors of likelihoods: affine functions of a field under a link, and expectations over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations_with_replacement, cycle
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
_MOVED = -1.5, 3.0  # times a draw of a member, to see kinks: through its prior's mean, and out
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-2}  # of the largest change of a predictor


def find_links(
    run: Callable[[Tensor], poutine.Trace], layout: Layout, like: Tensor
) -> Optional[tuple[dict[str, dict[str, str]], list[str], list[str]]]:
    """By observed site and parameter, the link under which it is affine in x, the latents that are owned, and the
    members in which one is affine under no link; ``None`` if a density is not known.

    It is affine if the move of each member from x = 0 changes it as its slopes say, which are those at a draw of x:
    products have other slopes there, kinks other changes, and comparisons no slope that tells
    (test_what_bends_at_a_kink_is_no_predictor).

    :param run: the program with a field at x, ``(extended,)``.
    """
    x = torch.randn(2, layout.extended, generator=torch.Generator().manual_seed(0)).to(like)[0].requires_grad_()
    members = [name for name in layout.field for _ in _MOVED]
    moves = x.new_zeros(len(members), layout.extended)
    for move, name, factor in zip(moves, members, cycle(_MOVED)):
        move[layout.rows[name]] = factor * x.detach()[layout.rows[name]]
    # The slope by each value shows whose a datum's is.
    several = {n: num for n, num in layout.numbers.items() if n not in layout.residuals and num > 1}
    along = torch.cat([moves, *(torch.eye(layout.extended)[layout.rows[n]].to(like) for n in several)])
    zero = torch.zeros_like(x, requires_grad=True)
    first, here = run(zero), run(x)
    with torch.no_grad():
        there = [run(move) for move in moves]
    links: dict[str, dict[str, str]] = {}
    slopes: list[Tensor] = []
    bent: list[str] = []
    for name, site in sample_sites(here).items():
        if not is_observation(site) or not depends(bare(site["fn"]).log_prob(site["value"]), x):
            continue
        known: dict[str, tuple[list[str], str, Tensor]] = {}  # by parameter: where it bends, link and slopes
        for key in _moving(bare(site["fn"]), site["value"], x):
            of_links = []
            for link in candidates(site["fn"], key):
                start, middle, *ends = (_eta(trace.nodes, name, key, link) for trace in (first, here, *there))
                slope = jacobian(middle, x, along).detach()
                off = [n for n, end, change in zip(members, ends, slope) if not _is_affine(start, end, change)]
                of_links.append((off, link, slope))
            known[key] = min(of_links, key=lambda found: len(found[0]))
        apart = {member for off, *_ in known.values() for member in off}
        if not known or not apart.isdisjoint(layout.residuals):
            gp, slope = _in_values([(first, zero), (here, x)], name, layout, along)
            off = [member for member, part in zip(members, slope) if part.isnan().any()]
            # Links stay where f is affine without some latents, as without k in mu + k f.
            if gp and not 0 < len(apart.difference(layout.residuals)) <= len({*off}):
                known = {gp: (off, VALUE, slope)}
            if not known:
                return None
        links[name] = {key: link for key, (_, link, _) in known.items()}
        slopes += [slope for *_, slope in known.values()]
        bent += [member for off, *_ in known.values() for member in off]
    for member, trace in zip(members, there):
        pairs = zip(_others(first, links), _others(trace, links))
        bent += [member for one, other in pairs if not torch.allclose(one, other, equal_nan=True)]
    rows = {n: slice(own.start + len(members), own.stop + len(members)) for n, own in slices(several).items()}
    owned = [n for n, own in rows.items() if all(((slope[own] != 0).sum(0) <= 1).all() for slope in slopes)]
    return links, owned, list(dict.fromkeys(bent))


def _eta(sites: Any, name: str, key: str, link: str) -> Tensor:
    """A predictor in a run, ``(N,)``."""
    fn = bare(sites[name]["fn"])
    part = sites[key]["value"] if link == VALUE else LINKS[link][0](parameters(fn)[key].expand(fn.batch_shape))
    return part.reshape(-1)


def _is_affine(start: Tensor, end: Tensor, slope: Tensor) -> bool:
    """Whether a predictor changes as its slope along the move says, to rounding; where it ends at infinity it may."""
    change, eps = end - start, torch.finfo(slope.dtype).eps
    size = (change.abs() + slope.abs()).nan_to_num(posinf=0.0).amax()
    near = (change - slope).abs() <= _ROUNDING[slope.dtype] * size + 100 * eps * (start.abs() + end.abs())
    return bool(near.all())


def _others(trace: poutine.Trace, links: Mapping[str, Mapping[str, str]]) -> list[Tensor]:
    """What densities are made of beside predictors."""
    found, sites = list[Tensor](), sample_sites(trace)
    for name, of_site in links.items():
        site = sites[name]
        # the predictor of a density is in none of its parameters
        made_of = {} if VALUE in of_site.values() else parameters(site["fn"])
        parts = [*(part for key, part in made_of.items() if key not in of_site), site["scale"], site["mask"]]
        found += [torch.as_tensor(part).double() for part in parts if isinstance(part, Tensor)]
    return found


def _density_of(site: Any, value: Tensor) -> Tensor:
    """Log densities of single data; with the masks of other sites that share a discrete latent
    (test_a_mask_beside_an_enumerated_latent).
    """
    return (site["fn"] if hasattr(site["fn"], "without_masks") else bare(site["fn"])).log_prob(value)


def _moving(fn: Any, value: Tensor, x: Tensor) -> list[str]:
    """The parameters of a density of single data that depend on x: one or two, of which it can be made anew."""
    made_of = {} if fn.event_shape else parameters(fn)
    moving = {key: part for key, part in made_of.items() if depends(part, x)}
    is_single = len(moving) <= 2 and all(part.dim() <= len(fn.batch_shape) for part in moving.values())
    with suppress(TypeError, ValueError, RuntimeError):
        if is_single and torch.equal(rebuilt(fn, {}).log_prob(value), fn.log_prob(value)):
            return list(moving)
    return []


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
        places = {(name, key): link for name, of_site in links.items() for key, link in of_site.items()}
        self.eta = {place: _eta(sites, *place, link) for place, link in places.items()}
        self.rows: dict[Place, Tensor] = {}
        self.residuals: dict[Place, Tensor] = {}
        self.layout = layout
        self._owned: dict[Place, list[Tensor]] = {}
        # none, in a step without some of the data
        every = jacobian(torch.cat([x[:0], *self.eta.values()]), x, layout.directions(x))
        for place, part in zip(self.eta, every.split([len(eta) for eta in self.eta.values()], -1)):
            if places[place] == VALUE:
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
