"""Linear predictors of likelihoods: affine functions of a field under a link, and expectations over them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Mapping
from itertools import combinations_with_replacement, cycle, product
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..numerics.functions import depends, jacobian
from ..numerics.linalg import above_rounding
from ..program import traces
from ..program.asking import asks_program, attempt
from ..program.draws import mapped
from ..program.links import LINKS, candidates, event_dim_of, is_made_of_parameters, rebuilt
from ..program.owners import Values
from ..program.reader import normal_nodes
from ..program.traces import bare, repeatable
from .field import Layout
from .known import without

Place = tuple[str, str, int]  # a site, its parameter, and which of its numbers
Pair = tuple[Place, Place]
Links = Mapping[str, Mapping[str, str]]  # by site and parameter
Again = Callable[[Values], Mapping[str, Any]]  # the sites of the same run with GP sites' values given

_pairs = functools.partial(combinations_with_replacement, r=2)

# The link of a density whose parameters do not show its predictor: it is told in the values of a GP site.
VALUE = "value"
_AWAY = 0.37, -0.71  # of a value, from where it may be at a top of its density
_MOVED = -1.5, 3.0  # times a draw of a member, to see kinks: through its prior's mean, and out
_MOST = 16  # predictors of a datum
_MOST_POINTS = 600  # that stand for N(0, I)
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-2}  # of a log density, and of a nat


class Linked(NamedTuple):
    """How observed sites depend on a field."""

    links: dict[str, dict[str, str]]  # by site and parameter, the link under which it is affine in x
    bent: dict[str, list[str]]  # by site, the members in which it is affine under no link
    flat: list[str]  # members whose prior is flat where data are
    jumps: list[str]  # sites that move without a slope


def find_links(run: Callable[..., poutine.Trace], layout: Layout, like: Tensor) -> Linked:
    """How the observed sites of a program depend on a field.

    :param run: the program with a field at x, ``(extended,)``, and some of its sites' values given.
    """
    # It is affine if densities are those of predictors that move from one draw of x, with each member and with all, as
    # their slopes at another draw say: products have other slopes there, kinks other values, and comparisons no slope
    # that tells. At x = 0 a product of two members would stand still.
    x, base = torch.randn(2, layout.extended, generator=torch.Generator().manual_seed(0)).to(like)
    x, base, members = x.requires_grad_(), 0.5 * base, [name for name in layout.field for _ in _MOVED]
    places = base.repeat(len(members) + 1, 1)
    for place, name, factor in zip(places, members, cycle(_MOVED)):
        place[layout.rows[name]] = factor * x.detach()[layout.rows[name]]
    places[-1] = -x.detach()
    here = traces.sample_sites(run(x))
    with torch.no_grad():
        start, *ends = (traces.sample_sites(run(place)) for place in (base, *places))

    def found(name: str, of_site: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """The members in which predictors are not affine, and their links."""
        its = Predictors(here, {name: of_site}, x, layout, lambda given: run(x, given).nodes).detached()
        its.sure[name] = its.sure[name] & _are_sure(start, name, of_site)  # slopes are of here
        its.sites, its.again = start, lambda given: run(base, given).nodes
        its.eta = {place: eta.to(x) for place, eta in predictors_of(start, its.links).items()}
        tells = [False] * len(ends)
        with attempt():  # a distribution may refuse parameters that these links give
            tells = [its.tells(name, sites, its.moved(place - base)) for place, sites in zip(places, ends)]
        off = [member for member, is_told in zip(members, tells) if not is_told]
        # all of them, if only the last move, of all at once, is not told
        return list(dict.fromkeys(off if tells[-1] else off or members)), of_site

    best, jumps, total = dict[str, tuple[list[str], dict[str, str]]](), list[str](), 0.0 * x.sum()
    data = {name: site for name, site in here.items() if traces.is_observation(site)}
    for name, site in data.items():
        fn = bare(site["fn"])
        density = fn.log_prob(site["value"])
        if not depends(density, x):
            continue
        total = total + scale_and_mask(site["fn"].log_prob(site["value"]), mask=site["mask"]).sum()
        made_of = traces.parameters(fn) if fn.event_shape.numel() else {}
        moving = [key for key, part in made_of.items() if depends(part, x)]
        tried = [found(name, option) for option in _options(fn, moving, site["value"], x)]
        # What moves without a slope jumps, as by a comparison.
        still = [(key, sites[name]["fn"]) for key in made_of if key not in moving for sites in ends]
        moved = [key for key, there in still if not torch.equal(traces.parameters(there)[key], made_of[key])]
        if moved or getattr(fn, "piecewise_constant", False):
            jumps.append(name)
        # Links come first, as in mu + k f without k; then the values of f, if each datum has one.
        elif all(not layout.residuals.keys().isdisjoint(off) for off, _ in tried):
            tried += [found(name, {gp: VALUE}) for gp in _one_each(here, density, layout)[:1]]
        # Where no parameter is to be asked, densities move with these members all the same.
        (by_x,) = torch.autograd.grad(density.sum(), x, retain_graph=True)
        tried.append(([member for member, own in layout.rows.items() if by_x[own].any()], {}))
        best[name] = min(tried, key=lambda each: len(each[0]))
    (pull,) = torch.autograd.grad(total, x)
    masks = {name: traces.unmasked(here[name]["fn"], here[name]["value"], None) for name in layout.field}
    known = {name: seen.reshape(-1) for name, seen in masks.items() if seen is not None}
    # A mask of a prior leaves out values that data pull at.
    flat = [name for name, seen in known.items() if pull[layout.rows[name]][~seen].any()]
    bent = {name: off for name, (off, _) in best.items() if off}
    return Linked({name: links for name, (_, links) in without(best, bent).items() if links}, bent, flat, jumps)


def _one_each(sites: Mapping[str, Any], density: Tensor, layout: Layout) -> list[str]:
    """The GP sites that may give each datum of a density one value."""
    gps = [gp for gp, num in layout.residuals.items() if num == 1]
    values = [sites[gp]["value"] for gp in gps] + [density]
    slopes = torch.autograd.grad(density.sum(), values, retain_graph=True, allow_unused=True)
    return [gp for gp, by in zip(gps, slopes) if getattr(by, "shape", None) == density.shape]


def _are_sure(sites: Mapping[str, Any], name: str, of_site: Mapping[str, str]) -> Tensor:
    """Where rounding of parameters moves no predictor, ``(N,)``: where one saturates, as 1 − Φ(6) does in float32, it
    does.
    """
    made, signs = [_made_of(sites, name, *each) for each in of_site.items()], (-1, 1)
    ends = [[function(p.detach() + sign * torch.finfo(p.dtype).eps) for sign in signs] for p, function in made]
    return torch.cat([(high - low).abs() < _ROUNDING[low.dtype] for low, high in ends], 1).all(1)


def predictors_of(sites: Any, links: Links) -> dict[Place, Tensor]:
    """The predictors of sites in a run, ``(N,)`` each."""
    found: dict[Place, Tensor] = {}
    for name, key, link in [(name, key, link) for name, of_site in links.items() for key, link in of_site.items()]:
        part, function = _made_of(sites, name, key, link)
        found |= {(name, key, k): eta for k, eta in enumerate(function(part).mT)}
    return found


def _made_of(sites: Any, name: str, key: str, link: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What predictors of one parameter are made of in a run, ``(N, its numbers)``, and the function of it."""
    fn = bare(sites[name]["fn"])
    if link == VALUE:
        return sites[key]["value"].reshape(-1, 1), LINKS["identity"][0]
    known = traces.parameters(fn)
    if key not in known:
        raise ValueError(
            f"site {name!r} has a {type(fn).__name__} of {[*known]}, and had {[key]} at the first call. Make a new "
            "guide, and call it first with arguments that show this model."
        )
    part = known[key]
    event = part.shape[part.dim() - event_dim_of(fn, key) :]
    return part.expand(fn.batch_shape + event).reshape(-1, event.numel()), LINKS[link][0]


def _density_of(site: Any) -> Tensor:
    """Log densities of single data."""
    # with the masks of other sites that share a discrete latent: test_a_mask_beside_an_enumerated_latent
    return (site["fn"] if hasattr(site["fn"], "without_masks") else bare(site["fn"])).log_prob(site["value"])


def _options(fn: Any, moving: list[str], value: Tensor, x: Tensor) -> list[dict[str, str]]:
    """The links of parameters that move, if densities of single data can be made anew of all parameters."""
    # What is observed may move, as in obs=y - a.
    made_of, num = traces.parameters(fn), len(fn.batch_shape)
    shapes = [(made_of[key].shape, event_dim_of(fn, key)) for key in moving]
    are_rows = all(len(shape) <= num + dim < num + 2 for shape, dim in shapes)
    numbers = sum(shape[len(shape) - dim :].numel() for shape, dim in shapes)
    is_single = are_rows and 0 < numbers <= _MOST and not depends(value, x)
    links = product(*(candidates(fn, key) for key in moving))
    is_made_of = is_single and is_made_of_parameters(fn, value)
    return [dict(zip(moving, each)) for each in links] if is_made_of else []


def design(num: int, like: Tensor) -> Tensor:
    """Points that stand for N(0, I), ``(S, num)``: ±√num eₖ in axes that are turned at random, so that what is of third
    degree has its expectation over them; at most as many as :data:`_MOST_POINTS`.
    """
    axes = torch.linalg.qr(torch.randn(num, num, dtype=like.dtype, device=like.device))[0][: _MOST_POINTS // 2]
    return math.sqrt(num) * torch.cat([axes, -axes])


class Densities:
    """The log densities of some sites as functions of all x and residuals, whatever the program makes of these.

    :param run: the program's sites at values of both, ``(extended,)``.
    """

    def __init__(self, run: Callable[[Tensor], Mapping[str, Any]], names: Collection[str], layout: Layout) -> None:
        self.run, self.names, self.layout = run, names, layout

    def total(self, at: Tensor) -> Tensor:
        """Their sum, as sites scale and mask them."""
        sites = self.run(at)
        with asks_program():
            parts = [(sites[name]["fn"].log_prob(sites[name]["value"]), sites[name]) for name in self.names]
        return sum((scale_and_mask(p, s["scale"], s["mask"]).sum() for p, s in parts), at.new_zeros(()))

    def local(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Their sum ℓ at x, ``(num,)``, ∇ℓ, and −∇²ℓ by x and residuals."""
        at = self.layout.extend(x).requires_grad_()
        total = self.total(at)
        with asks_program():  # whose functions may have no second derivative
            (slope,) = torch.autograd.grad(total, at, create_graph=True)
            return total, slope[: len(x)], -jacobian(slope, at)

    def expected(self, at: Tensor) -> Tensor:
        """The mean of ℓ over points, ``(S, extended)``."""
        return mapped(lambda point: (self.total(point),), at)[0].mean()

    def local_mean(self, x: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """E ∇ℓ and −E ∇²ℓ by x ~ N(x, P⁻¹), P of the Cholesky factor ``root``."""
        with repeatable(x):
            noise = design(self.layout.extended, x)
        own, rest = noise.tensor_split([len(x)], -1)
        moved = torch.linalg.solve_triangular(root.mT, own.mT, upper=True).mT
        at = torch.cat([x + moved, rest], -1).detach().requires_grad_()
        (slopes,) = torch.autograd.grad(self.expected(at), at)
        # E ∇²ℓ = E ∇ℓ (x − m)ᵀP (Stein), which of ∇ℓ that is affine has no noise
        curvature = slopes[:, : len(x)].mT @ own @ root.mT
        return slopes[:, : len(x)].sum(0), -0.5 * (curvature + curvature.mT)


class Likelihoods:
    """Densities of single data whose parameters are linear predictors under links, all else of them as in a run."""

    def __init__(self, sites: Any, links: Links, again: Again) -> None:
        self.sites, self.links, self.again = sites, links, again

    def distribution(self, name: str, eta: Mapping[Place, Tensor]) -> Any:
        """A site's distribution of single data at predictors ``(..., N)``."""
        fn, changed = bare(self.sites[name]["fn"]), {}
        for key, link in self.links[name].items():
            each = [part for place, part in eta.items() if place[:2] == (name, key)]
            value = LINKS[link][1](torch.stack(each, -1))
            event = value.shape[-1:] * event_dim_of(fn, key)
            changed[key] = value.reshape(value.shape[:-2] + fn.batch_shape + event)
        return rebuilt(fn, changed)

    def log_prob(self, name: str, eta: Mapping[Place, Tensor]) -> Tensor:
        """A site's log densities of single data at predictors ``(..., N)``."""
        (key, link), *_ = self.links[name].items()
        if link != VALUE:
            fn = self.distribution(name, eta)
            with asks_program():
                return fn.log_prob(self.sites[name]["value"])

        def at(f: Tensor) -> tuple[Tensor]:
            return (_density_of(self.again({key: f})[name]),)

        first = eta[name, key, 0]
        return (at(first) if first.dim() == 1 else mapped(at, first))[0]

    def summed(self, of_site: Callable[[str], Tensor]) -> Tensor:
        """The sum of a term for each datum of each site, as the site scales and masks them."""
        total: Any = 0.0
        for name in self.links:
            site = self.sites[name]
            each = traces.rewrapped(site["fn"], of_site(name))
            total = total + scale_and_mask(each, site["scale"], site["mask"]).sum()
        return total

    def expected(self, eta: Mapping[Place, Tensor], covariance: Mapping[Pair, Tensor], num_nodes: int) -> Tensor:
        """E[ℓ] over normal predictors of the means η, ``(N,)``, with covariances by :attr:`pairs`, in closed form or at
        nodes of each datum's own.
        """

        def of_site(name: str) -> Tensor:
            site, links, own = self.sites[name], self.links[name], [place for place in eta if place[0] == name]
            # A closed form is of one number, as a Normal's loc is; others are at nodes beside it.
            is_vector = len(own) > len(links) or bool(bare(site["fn"]).event_shape)
            forms = {p: None if is_vector else traces.closed_form(site["fn"], p[1], links[p[1]]) for p in own}
            places = sorted(own, key=lambda place: forms[place] is not None)
            form = forms[places[-1]]
            # Densities of classes are smooth: 10 nodes along two axes, as many points as of more axes.
            num_axes, at = len(places) - (form is not None), {place: eta[place][None] for place in places}
            nodes, weights = normal_nodes(num_axes, eta[places[0]], None if is_vector else num_nodes)
            # η = η(m) + Lε with LLᵀ = C, column by column
            left = {(a, b): covariance[min(a, b, key=own.index), max(a, b, key=own.index)] for a, b in _pairs(places)}
            for k, node in enumerate(nodes.mT):
                one, *others = places[k:]
                pivot = left[one, one].sqrt()
                column = {other: left[one, other] / pivot for other in others}
                at |= {place: at[place] + part * node[:, None] for place, part in [(one, pivot), *column.items()]}
                left |= {(a, b): left[a, b] - column[a] * column[b] for a, b in _pairs(others)}
                left |= {(a, a): above_rounding(left[a, a], covariance[a, a]) for a in others}
            if form is None:
                each = self.log_prob(name, at)
            else:
                shape, made = bare(site["fn"]).batch_shape, functools.partial(self.distribution, name, at)
                last = places[-1]
                mean, variance = (v.reshape((*v.shape[:-1], *shape)) for v in (at[last], left[last, last]))
                each = form(made, site["value"], mean, variance)
            total = weights.to(each) @ each.reshape(len(each), -1)  # priors of Python numbers have the default dtype
            return total.view(each.shape[1:])

        return self.summed(of_site)


class Predictors(Likelihoods):
    """The linear predictors η = η(0) + Jx + J'√ρt of a run's likelihoods, and densities at their values.

    :param sites: of a run that is standardised by ``x``, ``(extended,)``, and that ``again`` makes anew.

    ``eta`` are the run's, ``(N,)`` by site and parameter; ``rows`` are J, ``(N, num)``, and ``residuals`` J'.
    """

    def __init__(self, sites: Any, links: Links, x: Tensor, layout: Layout, again: Again) -> None:
        super().__init__(sites, links, again)
        self.x, self.layout = x, layout
        self.eta = {place: eta.to(x) for place, eta in predictors_of(sites, links).items()}
        # One way back for all predictors; none, in a step without some of the data. Each alone would have zeros of all.
        of_sites = [torch.stack([self.eta[place] for place in self.of(name)]).flatten() for name in links]
        every = jacobian(torch.cat([x[:0], *of_sites]), x, layout.directions(x))
        along = dict(zip(self.eta, every.split([len(eta) for eta in self.eta.values()], -1)))
        for name, key in [(name, key) for name, of_site in links.items() for key in of_site if of_site[key] == VALUE]:
            # f, of which its density says how it moves with all others
            along[name, key, 0] = along[name, key, 0] + self._beside(name, key)
        parts = [part for name in links for part in layout.split([along[place] for place in self.of(name)])]
        self.rows: dict[Place, Any] = {place: rows for place, (rows, _) in zip(self.eta, parts)}
        self.residuals = {place: residuals for place, (_, residuals) in zip(self.eta, parts)}

    def _beside(self, name: str, gp: str) -> Tensor:
        """What moves of x do to a density beside its GP site's values, as moves of these, ``(K, N)``."""
        # j/g with the density's slopes j by x and g by f, where |g| is larger: at a top of it both are 0.
        found: list[tuple[Tensor, Tensor]] = []
        for away in _AWAY:
            f = (self.eta[name, gp, 0].detach() + away).requires_grad_()
            density = self.log_prob(name, {(name, gp, 0): f}) + 0 * self.x.sum()
            (slope,) = torch.autograd.grad(density.sum(), f, create_graph=True)
            by_x = jacobian(density, self.x, self.layout.directions(self.x))
            # 0 where a datum's density has no f: test_factors_that_leave_rows_out
            found.append((slope.abs(), by_x / slope.masked_fill(slope == 0, torch.inf)))
        (size, one), (its_size, other) = found
        return torch.where(size > its_size, one, other)

    def at(self, x: Tensor) -> dict[Place, Tensor]:
        """η at x, ``(num,)``."""
        return {place: (self.eta[place] + row @ x).requires_grad_() for place, row in self.rows.items()}

    def moved(self, move: Tensor) -> dict[Place, Tensor]:
        """η after a move, ``(extended,)``, of x and of residuals."""
        x, t = move.tensor_split([self.layout.num])
        return {place: self.eta[place] + row @ x + self.residuals[place] @ t for place, row in self.rows.items()}

    @functools.cached_property
    def sure(self) -> dict[str, Tensor]:
        """By site which data's predictors no rounding moves, ``(N,)``."""
        return {name: _are_sure(self.sites, name, of_site) for name, of_site in self.links.items()}

    def tells(self, name: str, sites: Mapping[str, Any], eta: Mapping[Place, Tensor]) -> bool:
        """Whether a site's densities in another run of its program follow from predictors. Data whose predictors
        rounding moves are left out, if a tenth remains.
        """
        site, here, rounding = sites[name], self.sites[name], _ROUNDING[self.x.dtype]
        one, other = _density_of(site), self.log_prob(name, eta)
        known = (self.sure[name] & _are_sure(sites, name, self.links[name])).view(one.shape)
        one = torch.where(known | (10 * known.sum() <= known.numel()), one, other)
        pairs = [(one, other)] + [(site[k], here[k]) for k in ("scale", "mask") if isinstance(site[k], Tensor)]
        return all(torch.allclose(a * 1.0, b * 1.0, rounding, rounding, equal_nan=True) for a, b in pairs)

    def detached(self) -> Predictors:
        """These without their graph."""
        other = copy.copy(self)
        other.eta = {place: eta.detach() for place, eta in self.eta.items()}
        other.rows = {place: row.detach() for place, row in self.rows.items()}
        return other

    def back(self, slopes: Mapping[Place, Tensor]) -> Tensor:
        """Σ Jᵀv, ``(num,)``, of numbers v by place."""
        return sum((slope @ self.rows[place] for place, slope in slopes.items()), self.x.new_zeros(self.layout.num))

    def covariances(self, precision: Any) -> dict[Pair, Tensor]:
        """Of each datum's predictors, by :attr:`pairs`, where x ~ N(·, P⁻¹)."""
        # J P⁻¹ J'ᵀ and what residuals add are products of one row each
        parts = {
            place: torch.cat([precision.white(rows), self.residuals[place].mT]) for place, rows in self.rows.items()
        }
        return {(one, other): (parts[one] * parts[other]).sum(0).detach() for one, other in self.pairs}

    def of(self, name: str) -> list[Place]:
        """The predictors of a site."""
        return [place for place in self.eta if place[0] == name]

    @property
    def pairs(self) -> list[Pair]:
        """Pairs of places of one site, and each with itself, the first one's before."""
        return [pair for name in self.links for pair in _pairs(self.of(name))]
