"""A program is asked once how its densities depend on GP sites' values: by NaN, by moves and by slopes."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Optional, Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import biject_to

from ..process import GaussianProcess
from .asking import asks_program, attempt
from .enumeration import Enumeration
from .handlers import Rerun
from .links import Beside, Parts, values_of
from .owners import combined, find_group, find_owners, kept_buffers
from .structure import Density, Depends, GPSite, Latent, Pair, Structure
from .traces import (
    as_process,
    bare,
    entries,
    is_declared,
    is_free,
    is_normal,
    is_observation,
    normal_parameter,
    parameter_of,
    parameters,
    plate_sizes,
    roles_beside,
    sample_sites,
    unmasked,
)

# What a program shows of a site: its log densities, in whose place a declared one has what it is made of, the parameter
# and all else; and what the process of a layer above is made of.
TERM, _THETA, _REST, _LAYER, _PART = "term", "parameter", "rest", "layer", "part "
_WEIGHTS = "its scale", "its mask"  # of a density
# In prior deviations: values that are cut off come to an end by the larger ones.
MOVES = (1.0, -1.0, 30.0, -30.0)
_AFFINE = {torch.float64: 1e-7, torch.float32: 1e-3}  # rounding of moves and slopes of affine functions

Values = dict[str, Tensor]
Key = tuple[str, str]


class Met(Protocol):
    """A run of a program, and what it met."""

    trace: poutine.Trace
    processes: dict[str, GaussianProcess]  # the priors of its GP sites
    enumeration: Optional[Enumeration]


@dataclass(frozen=True)
class ClosedForms:
    """Which densities have their expectation in closed form, and what is left without them; for one program."""

    rows: tuple[str, ...]  # sites that know E log p over a parameter: an affine function of the values of one row
    functions: tuple[str, ...]  # those whose parameter is one of values at several inputs
    given: tuple[str, ...]  # of these, those that know it at each value of other GP sites, as Laplace(f, exp(g)) does
    values: dict[str, Parts]  # by site, parameters that are a GP site's values under a link; of "", a closed form's
    of_rows: Structure  # how the parameters of ``rows`` depend on GP sites' values
    gps: tuple[str, ...]  # the GP sites that these sites' densities depend on
    rest: Structure  # how all other densities do
    kinds: dict[str, type]  # of the distributions of these sites

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """All whose expectation needs no nodes of a grid."""
        return tuple({n: n for n in (*self.rows, *self.functions, *self.values) if n not in self.given})

    @cached_property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """The axes of what is left."""
        return self.rest.axes()

    @cached_property
    def num_axes(self) -> int:
        """How many these are."""
        return 1 + max(itertools.chain(*self.axes.values()), default=-1)

    @cached_property
    def drawn(self) -> list[str]:
        """GP sites that would take more axes."""
        without = {*self.axes, *self.rest.inner, *self.rest.coupled}
        return [name for name in self.rest.gps if name not in without]

    def fit(self, seen: "ClosedForms") -> bool:
        """Whether they serve another run, which may show less, and in which those were seen."""
        met = {*seen.rest.downstream}
        pairs = (self.sites, seen.sites), (self.given, seen.given + seen.sites), (self.rows, seen.rows)
        lost = [name for own, its in pairs for name in met & ({*own} - {*its})] + [*({*seen.gps} - {*self.gps})]
        lost += [name for name in met if self.values.get(name) != seen.values.get(name)]
        return not [*lost, *self.of_rows.lacks(seen.of_rows), *self.rest.lacks(seen.rest)]

    def opened(self, facts: Structure) -> "ClosedForms":
        """None: all densities of these facts are at nodes, which serve any."""
        return replace(self, rows=(), functions=(), given=(), values={}, gps=(), kinds={}, rest=facts)

    def hold(self, nodes: Mapping[str, Any]) -> bool:
        """Whether a run's sites have distributions of the kinds that were found, and of f's shape where made of f."""
        sites = {name: bare(nodes[name]["fn"]) for name in self.kinds if name in nodes}
        pairs = [(fn, gp) for name, fn in sites.items() for gp, _ in self.values.get(name, {}).values() if gp]
        are_rows = [fn.batch_shape == nodes[gp]["value"].shape for fn, gp in pairs]
        return all([type(fn) is self.kinds[name] for name, fn in sites.items()] + are_rows)


def _met(run: Met, shapes: Mapping[str, Sequence[int]]) -> Structure:
    """The sites of a run, without how densities depend on GP sites' values."""
    sites = {n: site for n, site in sample_sites(run.trace).items() if n not in run.processes}
    role_of, summed_out = roles_beside(run.trace), run.enumeration.latents.values() if run.enumeration else ()

    def latent(plates: Mapping[str, int], site: dict[str, Any], shape: Optional[Sequence[int]]) -> Latent:
        known = () if shape is None else (tuple(shape), biject_to(site["infer"]["prior"].support).domain.event_dim)
        return Latent(role_of(plates), plates, *known)

    return Structure(
        {name: GPSite(tuple(process.batch_shape), process.x.shape[-1]) for name, process in run.processes.items()},
        {n: latent(plate_sizes(site), site, shapes.get(n)) for n, site in sites.items() if is_free(site)},
        {name: Density(type(bare(site["fn"])).__name__) for name, site in sites.items() if is_observation(site)},
        {latent.name: role_of(latent.plates) for latent in summed_out},
    )


@torch.no_grad()
def explore(run: Met, rerun: Rerun, shapes: Mapping[str, Sequence[int]] = {}) -> tuple[Structure, ClosedForms]:
    """The structure of a program, and which of its densities are in closed form: by one mapped run in which some values
    of GP sites are NaN, and where densities are declared one whose gradient is looked at.

    :param rerun: the program with values given, all else as in the run.
    :param shapes: of latents with parameters of their own, in unconstrained space.
    """
    processes, met, nodes = run.processes, _met(run, shapes), sample_sites(run.trace)
    program = Program(rerun, {name: (process.mean, process.variance) for name, process in processes.items()}, processes)
    names, owners = list(processes), program.owners
    terms, layers = ([key for key in program.first if key[0] == kind] for kind in (TERM, _LAYER))
    above = {name: {key[1] for key in layers if owners[name][key].kind != Depends.NONE} for name in names}
    inner, outer = [name for name in names if above[name]], [name for name in names if not above[name]]
    depends, meeting = combined(owners, terms + layers, names)
    coupled = [name for name in inner if depends[name] == Depends.COUPLED]
    groups = {name: find_group(program.show, program.base, name, layers + terms) for name in coupled}
    # Inputs that meet above an inner layer, as in sums of the layer on it, meet in that layer too.
    coupled = [name for name in outer if depends[name] == Depends.COUPLED]
    for name in reversed(names):  # a layer stands before those that it enters
        if above[name] & {*coupled}:
            coupled.append(name)
            depends[name] = Depends.COUPLED
    through = {site: program.touching(site, outer, _THETA) for site in program.kinds}
    known = [site for site in program.kinds if program.is_closed(site, through[site], outer)]
    closed = [site for site in known if program.touching(site, outer) == through[site]]
    # Single numbers are known at each value of what their other parameters are made of, with f itself at no node.
    apart = [site for site in met.data if site not in closed and {*program.touching(site, names)} <= {*outer}]
    values = program.values(apart, {s: {normal_parameter(program.kinds[s]): through[s]} for s in known})
    given = [site for site in known if site not in [*closed, *values] and not program.kinds[site].event_shape]
    left_open = [site for _, site in terms if site not in [*closed, *values]]
    open_to = [(_REST if site in given else TERM, site) for site in left_open]
    at_nodes = {name for kind, site in open_to for name in program.touching(site, outer, kind)}
    if any(name in at_nodes for site in given for name in through[site]):
        given, open_to = [], [(TERM, site) for site in left_open]
    known = closed + given + [site for site in known if site in values]
    flat = {site: fn for site, fn in program.kinds.items() if getattr(fn, "piecewise_constant", False)}
    for site, fn in [(site, flat[site]) for site in flat.keys() - known if program.touching(site, outer)]:
        raise ValueError(
            f"site {site!r} has the distribution {type(fn).__name__}, piecewise constant, whose expectation needs "
            f"a normal {fn.normal_parameter}. Here this is not an affine function of function values, or another "
            "parameter, the scale or the mask depends on them, too, or entries of one term share functions. Give each "
            "entry one output of a GP, scaled or shifted at most, or take a likelihood with a gradient, such as "
            "Categorical(logits=...)."
        )
    program.require_weights_of_data()
    # L⁻¹θ of a multivariate normal has all values of a term in each entry.
    made_of = {s: (TERM if is_normal(program.kinds[s]) and s in closed else _THETA, s) for s in known}
    by_rows = [site for site in known if all(owners[name][made_of[site]].kind != Depends.COUPLED for name in names)]
    touching = {site: tuple(program.touching(site, names)) for _, site in terms}

    def is_quadratic(name: str) -> bool:
        """Whether densities are normal around affine functions of a GP site's values, all else held."""
        own = [site for site, gps in touching.items() if name in gps]
        are_normal = all(is_normal(program.kinds.get(site)) for site in own)
        return bool(own) and are_normal and all(site in closed or program.is_affine(site, [name]) for site in own)

    gps = {
        name: replace(gp, depends=depends[name], is_inner=bool(above[name]), group=groups.get(name))
        for name, gp in met.gps.items()
    }
    gps |= {name: replace(gps[name], is_quadratic=is_quadratic(name)) for name in outer}
    means = tuple((f, g) for f in inner for g in above[f] if owners[f][_REST, g].kind == Depends.NONE)
    densities = {site: replace(density, gps=touching.get(site, ())) for site, density in met.densities.items()}
    densities |= {s: Density("", own, is_observed=False) for s, own in touching.items() if own and s not in densities}
    summed = _summed([pair for pair in meeting if not {*pair} & {*inner}], program) + means
    found = replace(met, gps=gps, densities=densities, meeting=meeting, summed=summed)

    def left(keys: Collection[Key]) -> Structure:
        """The structure of these tensors alone, as they depend on the GP sites that enter no other."""
        kinds, meet = combined(owners, keys, outer)
        own = {name: replace(gps[name], depends=kind) for name, kind in kinds.items() if kind != Depends.NONE}
        return replace(found, gps=own, meeting=meet, summed=())

    return found, ClosedForms(
        tuple(by_rows),
        tuple(site for site in known if site not in by_rows),
        tuple(given),
        values,
        left([made_of[site] for site in by_rows]),
        tuple(left([*made_of.values(), *((TERM, site) for site in values)]).gps),
        left(open_to),
        {site: type(bare(nodes[site]["fn"])) for site in values} | {s: type(program.kinds[s]) for s in known},
    )


class Program:
    """What a program shows at values of its GP sites, of these means and variances, and which of them it depends on.
    The GP sites' priors are given where they may be layers above others.
    """

    def __init__(
        self, rerun: Rerun, moments: Mapping[str, tuple[Tensor, Tensor]], processes: Mapping[str, GaussianProcess] = {}
    ) -> None:
        self.rerun, self.base, self.steps, generator = rerun, Values(), Values(), torch.Generator().manual_seed(0)
        for name, (mean, variance) in moments.items():
            size = variance.clamp(min=0).sqrt() + 0.1 * (mean - mean.mean()).square().mean().sqrt()
            # Off the mean, where a model may be degenerate; each value by another step, up or down.
            self.base[name] = mean + 0.1 * size
            step = torch.rand(size.shape, generator=generator, dtype=size.dtype).to(size.device) - 0.5
            self.steps[name] = size.clamp(min=1e-3) * (step.sign() + step)
        # The first and the last: a list of numbers would be copied to the device.
        self.rows = {name: torch.stack([p.x[..., 0, :], p.x[..., -1, :]], -2).detach() for name, p in processes.items()}
        self.kinds: dict[str, Any] = {}  # distributions of declared densities
        self.owners, self.moved = find_owners(self.show, self.base, self.steps, MOVES)
        self.first = {key: part[0] for key, part in self.moved[next(iter(self.base))].items()}
        self._at_nan: dict[tuple[str, ...], dict[Key, Tensor]] = {}  # slopes with these GP sites' values NaN

    def show(self, values: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """Tensors of each density and each layer above, by what they are and the site."""
        sites, shown = sample_sites(self.rerun(dict(values))), dict[Key, Tensor]()
        for name, site in sites.items():
            if name in self.base or site["infer"].get("_deterministic"):
                continue
            fn = bare(site["fn"])
            # A run that is held like another has that one's scale and mask, beside those that the program gives it.
            scale, mask = site["own"]
            weights = zip(_WEIGHTS, (scale, unmasked(site["fn"], site["value"], mask)))
            made_of = parameters(fn) | {"its value": site["value"]} | dict(weights)
            parts = {key: part for key, part in made_of.items() if isinstance(part, Tensor)}
            shown |= {(_PART + key, name): part.to(next(iter(self.base.values()))) for key, part in parts.items()}
            if not is_declared(fn):
                shown[TERM, name] = entries(site)
                continue
            # Of a piecewise constant density NaN shows nothing, and of what it is made of all.
            self.kinds[name], shown[_THETA, name] = fn, parameter_of(fn)
            rest = [part for key, part in parts.items() if key not in (normal_parameter(fn), "its mask")]
            none = shown[_THETA, name].new_zeros(fn.batch_shape)
            shown[_REST, name] = sum((_by_term(part, fn) for part in rest), none)
            shown[TERM, name] = _by_term(shown[_THETA, name], fn) + shown[_REST, name]
        for name in self.rows if len(self.rows) > 1 else ():
            process: Any = as_process(sites[name]["fn"])[0]
            with asks_program():
                # The kernel at inputs that stay: what it is made of.
                made_of = process.kernel(self.rows[name]).sum()
                rest = shown[_REST, name] = process.x.sum(-1) + process.variance + made_of
                shown[_LAYER, name] = process.mean + rest
        return shown

    def touching(self, site: str, names: Iterable[str], what: str = TERM) -> list[str]:
        """Those GP sites that a site's density depends on, or what of it is shown."""
        return [name for name in names if self.owners[name][what, site].touched.any()]

    @property
    def moving(self) -> dict[str, list[str]]:
        """By site of a density, which of its parameters, value, scale and mask depend on function values."""
        moves = [key for key in self.first if any(own[key].touched.any() for own in self.owners.values())]
        parts = [(kind.removeprefix(_PART), site) for kind, site in moves if kind.startswith(_PART)]
        return {site: [part for part, its in parts if its == site] for _, site in parts}

    def require_weights_of_data(self) -> None:
        """Raise if the program's own scale or mask of a density depends on function values."""
        for site, part in ((site, part) for site, parts in self.moving.items() for part in parts if part in _WEIGHTS):
            raise ValueError(
                f"site {site!r}: {part} depends on function values, as poutine.mask(mask=f > 0) does. Let masks and "
                "scales depend on data alone, or write the density in full, with pyro.factor and torch.where."
            )

    def values(self, sites: list[str], beside: Mapping[str, Beside]) -> dict[str, Parts]:
        """By site :func:`values_of`, where there are."""
        found, moving = dict[str, Parts](), self.moving
        leaves = {name: (value + self.steps[name]).requires_grad_() for name, value in self.base.items()}
        moves = {n: torch.stack([v + move * self.steps[n] for move in (0.0, *MOVES)]) for n, v in self.base.items()}
        with attempt(), torch.enable_grad(), pyro.validation_enabled(False), kept_buffers():
            nodes: Any = self.rerun(leaves).nodes if sites else {}
            for site, keys in [(site, moving[site]) for site in sites if site in moving]:
                moved = {(key, gp): (moves[gp], self.moved[gp][_PART + key, site]) for key in keys for gp in leaves}
                found[site] = values_of(nodes[site], keys, beside.get(site, {}), leaves, moved)
        return {site: own for site, own in found.items() if own}

    # Declared densities.

    def is_affine(self, site: str, names: Collection[str], beside: Collection[str] = ()) -> bool:
        """Whether a declared density is around an affine function of these GP sites' values, and nothing else of it
        depends on them.

        :param beside: GP sites whose values may be NaN, too, so that one run serves all densities.
        """
        # An affine function's slopes are not made of its values: θ = f + bf² has 1 + 2bf, NaN at b = 0, too.
        nan = {name: torch.full_like(self.base[name], torch.nan) for name in beside or names}
        if (key := tuple(nan)) not in self._at_nan:
            self._at_nan[key] = self.slopes(self.base | nan, self.steps, self.kinds, lambda s: parameter_of(s["fn"]))
        slopes = self._at_nan[key]
        return all(
            (name, site) in slopes
            and is_affine(self.moved[name][_THETA, site], slopes[name, site])
            and not self.owners[name][_REST, site].touched.any()
            for name in self.touching(site, names)
        )

    def slopes(
        self, values: Values, along: Values, sites: Iterable[str], part_of: Callable[[Any], Tensor]
    ) -> dict[Key, Tensor]:
        """The slopes of what each site has, entry by entry, along directions of each GP site's values: by GP site and
        site.
        """
        leaves, found = {name: value.clone().requires_grad_() for name, value in values.items()}, dict[Key, Tensor]()
        # A program that raises at NaN, or has no gradient, has no slopes: the general path will do.
        with attempt(), torch.enable_grad(), pyro.validation_enabled(False), kept_buffers():
            nodes: Any = self.rerun(leaves).nodes
            for site in sites:
                part = part_of(nodes[site]) + sum(leaf[..., :0].sum() for leaf in leaves.values())
                # vᵀJ is linear in v: its derivative by v, along a direction, is J times that.
                v = torch.zeros_like(part, requires_grad=True)
                with asks_program():  # which may have no derivative of a product of its slopes
                    backs = torch.autograd.grad(part, [*leaves.values()], v, create_graph=True)
                    for name, back in zip(leaves, backs):
                        (found[name, site],) = torch.autograd.grad(back, v, along[name], retain_graph=True)
        return found

    def is_mean(self, name: str, site: str) -> bool:
        """Whether a density is that of a Normal, whose mean is affine in a GP site's values and has one an entry."""
        known = type(self.kinds.get(site)) is dist.Normal
        return known and self.owners[name][_THETA, site].kind == Depends.ELEMENTWISE and self.is_affine(site, [name])

    def is_closed(self, site: str, through: list[str], outer: list[str]) -> bool:
        """Whether a declared density depends on function values, and its expectation over them is in closed form.

        :param through: the GP sites that its parameter is made of, of all that enter no other, ``outer``.
        """
        kind, touching = self.kinds[site], self.touching(site, through)
        theta = self.first[_THETA, site]
        # Entries of one term have to be independent, but for a normal's: each has one function, and no other has it.
        if not is_normal(kind) and theta.dim() > len(kind.batch_shape):
            owner = torch.full_like(theta, -1, dtype=torch.long)
            num, functions = torch.zeros_like(owner), 0
            for name in touching:
                own = self.owners[name][_THETA, site]
                num = num + own.touched * (1 + ((own.rows < 0) | (own.outputs < 0)).long())
                owner = torch.where(own.touched, functions + own.outputs, owner)
                functions += self.base[name][..., 0].numel()  # of a GP site one for each output
            ordered = owner.flatten(len(kind.batch_shape)).sort(-1).values
            twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            if twice.any() | (num > 1).any():
                return False
        return bool(touching) and self.is_affine(site, through, outer)


def _by_term(part: Tensor, fn: TorchDistribution) -> Tensor:
    """What a distribution is made of, added up for each of its terms."""
    inside = part.shape[: len(fn.batch_shape)] == fn.batch_shape
    return part.reshape(*fn.batch_shape, -1).sum(-1) if inside else part.sum()


def is_affine(at: Tensor, slope: Tensor) -> bool:
    """Whether a parameter, ``at`` 0 and after :data:`MOVES`, ``(1 + moves, ...)``, is an affine function of what was
    moved. Its slope along a move of 1 is NaN where made of that, and leaves out what ``.detach()`` hides.
    """
    middle, there = at[0], at[1:]
    relative, eps = _AFFINE[middle.dtype], torch.finfo(middle.dtype).eps
    sizes = at.new_tensor(MOVES).reshape(-1, *[1] * middle.dim())
    tolerance = relative * slope.abs() + 30 * eps * slope.abs().mean()
    tolerance = sizes.abs() * tolerance + 100 * eps * (middle.abs() + there.abs())
    return bool(((there - middle - sizes * slope).abs() <= tolerance).all())


def _summed(pairs: list[Pair], program: Program) -> tuple[Pair, ...]:
    """Those of these pairs of GP sites that enter all densities by f + cg, with one number c."""
    if not pairs:
        return ()
    # Where f is not in proportion to g: there the slopes of a product would have one ratio.
    place = {name: value + program.steps[name] for name, value in program.base.items()}
    ones = {name: torch.ones_like(value) for name, value in place.items()}
    sites = [site for kind, site in program.first if kind == TERM]
    slopes = program.slopes(place, ones, sites, entries)

    def is_sum(pair: Pair) -> bool:
        by_f, by_g = (torch.cat([slopes[name, site].flatten() for site in sites]) for name in pair)
        factor = (by_f * by_g).sum() / by_f.square().sum()
        return bool(((by_g - factor * by_f).abs() < _AFFINE[by_f.dtype] * by_g.abs().amax()).all())

    return tuple(filter(is_sum, pairs)) if len(slopes) == len(sites) * len(place) else ()
