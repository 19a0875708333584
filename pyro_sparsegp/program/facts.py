"""What is known of a program: its sites, and how its densities depend on GP sites' values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..process import GaussianProcess
from .affine import DENSITY, MOVES, OTHER, THETA, Declared, Key, Values
from .declared import is_declared, is_normal, others_of, parameter_of
from .dependence import COUPLED, DATAWISE, ELEMENTWISE, NONE, Owners, find_owners, group_codes, stacked_runs
from .traces import all_sites, as_process, bare

__all__ = ["ClosedForms", "Structure", "explore"]

_LOG = "log density"


@dataclass
class Structure:
    """What the guide found out about the model at its first call, in plain Python: it travels in the state dict.

    :param gps: for each GP site, the shapes of its module.
    :param latents: for each other latent site, its event dimensions, shape and enclosing plates with sizes.
    :param rows: for each observed site, how many values it had.
    :param data_plates: plates that enclose an observed site.
    :param grouped: latents of which several data have one: some of the data's plates enclose them, and not all.
    :param dependence: for each GP site, how densities downstream depend on its values.
    :param inner: GP sites whose values enter another GP site (an inner layer of a deep GP).
    :param groups: for those whose values a layer above couples in groups of consecutive inputs (the patches of an
        image), how many make a group, and that layer.
    :param interactions: pairs of GP sites that meet in one term of a density.
    :param downstream: sites whose densities move with a GP site's values.
    :param quadratic: GP sites of families on sites whose log densities are quadratic in their values.
    :param meeting: those of them with several outputs that meet in a term.
    :param columns: for each GP site, how many columns its inputs have.
    :param coupled: latents that have one posterior, of hyperparameters.
    :param field: of each GP site and latent of the field, in order, the sizes of its blocks of coefficients.
    :param owned: latents of the field of which each datum has one value.
    :param links: of each likelihood of a field, by parameter, the link under which it is affine in it.
    :param enumerated: discrete latents, which are summed out.
    :param joint: groups of GP sites that have one posterior.
    :param crossed: pairs of them that meet in terms of densities at different inputs or outputs.
    :param network: whether the program runs a network, so that each of its runs may be long.
    :param summed: pairs of GP sites of separate posteriors that enter densities by a sum of them alone, f + cg.
    :param affine: whether values at several inputs meet in densities, and all of these are normal around affine
        functions of values.
    :param num_nodes: along an axis of quadrature in training, at which sites are read, too.
    """

    gps: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    latents: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    data_plates: list[str] = dataclasses.field(default_factory=list)
    grouped: list[str] = dataclasses.field(default_factory=list)
    dependence: dict[str, str] = dataclasses.field(default_factory=dict)
    inner: list[str] = dataclasses.field(default_factory=list)
    groups: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    interactions: list[list[str]] = dataclasses.field(default_factory=list)
    downstream: list[str] = dataclasses.field(default_factory=list)
    quadratic: list[str] = dataclasses.field(default_factory=list)
    meeting: list[str] = dataclasses.field(default_factory=list)
    columns: dict[str, int] = dataclasses.field(default_factory=dict)
    coupled: list[str] = dataclasses.field(default_factory=list)
    field: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    links: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    owned: list[str] = dataclasses.field(default_factory=list)
    enumerated: list[str] = dataclasses.field(default_factory=list)
    joint: list[list[str]] = dataclasses.field(default_factory=list)
    crossed: list[list[str]] = dataclasses.field(default_factory=list)
    network: bool = False
    summed: list[list[str]] = dataclasses.field(default_factory=list)
    affine: bool = False
    num_nodes: int = 20

    @property
    def follows_networks(self) -> bool:
        """Whether natural steps of any GP site follow a network, at rows that are kept."""
        return any("kept_rows" in spec for spec in self.gps.values())

    def group(self, name: str) -> list[str]:
        """The GP sites that have one posterior with this one, and itself."""
        return next((group for group in self.joint if name in group), [name])


@dataclass(frozen=True)
class ClosedForms:
    """Which densities have their expectation in closed form, and what is left without them; for one program.

    :param rows: observed sites that know E log p over a parameter which is an affine function of the values of one row.
    :param functions: those over a parameter that is an affine function of values at several inputs.
    :param of_rows: how the parameters of ``rows`` depend on GP sites' values.
    :param gps: the GP sites that these sites' densities depend on.
    :param rest: how all other densities do; ``whole``: how all densities do.
    :param kinds: the types of the distributions of sites in closed form.
    :param unused: sites whose distribution brings an expectation of its own that can't be used: it, and why.
    """

    rows: tuple[str, ...]
    functions: tuple[str, ...]
    of_rows: Structure
    gps: tuple[str, ...]
    rest: Structure
    whole: Structure
    kinds: dict[str, type]
    unused: dict[str, tuple[Any, str]]

    @property
    def sites(self) -> tuple[str, ...]:
        """All whose expectation is in closed form."""
        return self.rows + self.functions

    @property
    def brought(self) -> bool:
        """Whether distributions of a user's bring any of them."""
        return any(hasattr(kind, "normal_parameter") for kind in self.kinds.values())

    def hold(self, nodes: Mapping[str, Any]) -> bool:
        """Whether a run's sites have distributions of the kinds that were found."""
        return all(name in nodes and type(bare(nodes[name]["fn"])) is kind for name, kind in self.kinds.items())

    def without(self) -> ClosedForms:
        """The same program with nothing in closed form."""
        return replace(self, rows=(), functions=(), gps=(), rest=self.whole)


@torch.no_grad()
def explore(
    found: Structure,
    held: Callable[[Values], poutine.Trace],
    processes: Mapping[str, GaussianProcess],
    on_sites: Collection[str] = (),
) -> tuple[ClosedForms, dict[str, Tensor]]:
    """Fill in how densities and layers above depend on GP sites' values: by one mapped run in which some are NaN, and
    where densities are declared one whose gradient is looked at.

    :param held: runs the program with GP sites at values, all else held.
    :param processes: the GP sites' priors in some run.
    :param on_sites: the GP sites of which it is asked whether log densities are quadratic in their values.
    :returns: the densities in closed form; and all log densities at a first point, by site.
    """
    program = _Program(held, processes)
    names = program.names
    owners, moved = find_owners(program.show, program.base, program.steps, names, MOVES)
    shown = next(iter(moved.values()))[0.0]
    densities = [key for key in shown if key[0] == DENSITY]
    layers = {name: [key for key in shown if key[0].startswith("input") and key[1] != name] for name in names}
    above: dict[str, set[str]] = {}  # the layers that a GP site's values enter
    for name in names:
        above[name] = {key[1] for key in layers[name] if owners[name][key].kind != NONE}
        if above[name]:
            found.inner.append(name)
    keys = [*densities, *(key for key in shown if key[0].startswith("input"))]
    found.dependence, found.interactions = _combined(owners, keys, names)
    found.crossed = [
        [f, g]
        for f, g in found.interactions
        if g in found.group(f) and any(owners[f][key].crosses(owners[g][key]) for key in densities)
    ]
    for name in found.inner:
        if found.dependence[name] == COUPLED:
            _find_groups(found, name, program, layers[name] + densities)
    _couple_below(found, above)
    touched = {key[1] for key in densities if any(owners[name][key].touched.any() for name in names)}
    found.downstream = [key[1] for key in densities if key[1] in touched]
    found.summed = _summed(found, program)
    looked = Declared(held, program.base, program.steps, owners, moved)
    closed, unused = looked.closed(tuple(name for name in names if name not in found.inner), found.group)
    # L⁻¹θ of a multivariate normal has all values of a term in each entry.
    made_of = {site: (DENSITY if is_normal(looked.kinds[site]) else THETA, site) for site in closed}
    by_rows = [site for site in closed if all(owners[name][made_of[site]].kind != COUPLED for name in names)]
    functions = [site for site in closed if site not in by_rows]
    found.affine = COUPLED in found.dependence.values() and closed == found.downstream and not found.inner
    for name in on_sites:
        if looked.quadratic_in(name, found.downstream):
            found.quadratic.append(name)
            if found.dependence[name] == DATAWISE:
                found.meeting.append(name)
    forms = ClosedForms(
        tuple(by_rows),
        tuple(functions),
        _left(found, owners, [made_of[site] for site in by_rows]),
        tuple(name for name in names if name not in found.inner and any(looked.touching(s, [name]) for s in closed)),
        _left(found, owners, [key for key in densities if key[1] not in closed]),
        found,
        {site: type(looked.kinds[site]) for site in closed},
        unused,
    )
    return forms, {key[1]: part for key, part in shown.items() if key[0] == _LOG}


class _Program:
    """What a program shows at values of its GP sites: its densities, and the processes of layers above."""

    def __init__(self, held: Callable[[Values], poutine.Trace], processes: Mapping[str, GaussianProcess]) -> None:
        self.held, self.names = held, list(processes)
        self.rows = {name: process.x[..., [0, -1], :].detach() for name, process in processes.items()}
        generator = torch.Generator().manual_seed(0)
        self.base: Values = {}
        self.steps: Values = {}
        for name, process in processes.items():
            spread = process.variance.sqrt()
            # Off the mean, where a model may be degenerate; each value by another step, up or down.
            self.base[name] = process.mean + 0.1 * spread
            step = torch.rand(spread.shape, generator=generator, dtype=spread.dtype).to(spread.device) - 0.5
            floor = torch.where(spread > 0, spread, spread.amax().clamp(min=1e-6))
            self.steps[name] = floor * (step.sign() + step)

    def show(self, values: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """Log densities term by term; of declared ones what they are made of, too; what layers are made of."""
        trace = self.held(dict(values))
        shown: dict[Key, Tensor] = {}
        for name, site in all_sites(trace):
            if site["type"] != "sample" or name in self.names or site_is_subsample(site):
                continue
            # A mask, of rows or of all, may be another in the next batch: test_q_waits_for_a_batch_that_is_not_masked.
            if site["infer"].get("_deterministic"):
                continue
            fn = bare(site["fn"])
            shown[_LOG, name] = torch.as_tensor(fn.log_prob(site["value"]))
            if not is_declared(fn):
                shown[DENSITY, name] = shown[_LOG, name]
                continue
            # Of a piecewise constant density NaN shows nothing: the term of a declared one is what it is made of.
            others = [part for part in (*others_of(fn), site["scale"], site["value"]) if isinstance(part, Tensor)]
            shown[THETA, name] = parameter_of(fn)
            shown |= {(OTHER, name, str(i)): part for i, part in enumerate(others)}
            term = shown[_LOG, name].new_zeros(fn.batch_shape)
            for part in (shown[THETA, name], *others):
                inside = part.shape[: len(fn.batch_shape)] == fn.batch_shape
                term = term + (part.reshape(*fn.batch_shape, -1).sum(-1) if inside else part.sum())
            shown[DENSITY, name] = term
        for name in self.names if len(self.names) > 1 else ():
            process, _ = as_process(trace.nodes[name]["fn"])
            assert process is not None
            # The kernel at inputs that stay: what it is made of. Those of the run may meet in it, as in their mean.
            made_of = process.x.sum(-1), process.mean, process.variance, process.kernel(self.rows[name])
            shown |= {(f"input {i}", name): part for i, part in enumerate(made_of)}
        return shown


def _combined(
    owners: Mapping[str, Mapping[Any, Owners]], keys: Collection[Key], names: Collection[str]
) -> tuple[dict[str, str], list[list[str]]]:
    """How tensors depend on GP sites' values, and the pairs of sites that meet in an entry."""
    order = (NONE, ELEMENTWISE, DATAWISE, COUPLED)

    def of(name: str) -> list[Key]:
        return [key for key in keys if not (key[0].startswith("input") and key[1] == name)]

    kinds = {name: max((owners[name][key].kind for key in of(name)), key=order.index, default=NONE) for name in names}
    meet = []
    for f, g in itertools.combinations([name for name in names if kinds[name] != NONE], 2):
        both = [key for key in of(f) if key in of(g)]
        if any((owners[f][key].touched & owners[g][key].touched).any() for key in both):
            meet.append([f, g])
    return kinds, meet


def _left(found: Structure, owners: Mapping[str, Mapping[Any, Owners]], keys: Collection[Key]) -> Structure:
    """The structure of these tensors alone, as they depend on the GP sites that enter no other."""
    names = [name for name in owners if name not in found.inner]
    kinds, meet = _combined(owners, keys, names)
    kinds = {name: kind for name, kind in kinds.items() if kind != NONE}
    return replace(found, dependence=kinds, interactions=meet)


def _couple_below(found: Structure, above: dict[str, set[str]]) -> None:
    """Inputs that meet above an inner layer, as in sums of the layer on it, meet in that layer too."""
    coupled = {name for name in above if name not in found.inner and found.dependence[name] == COUPLED}
    for name in reversed(above):  # a layer stands before those that it enters
        if above[name] & coupled:
            coupled.add(name)
            found.dependence[name] = COUPLED


def _summed(found: Structure, program: _Program) -> list[list[str]]:
    """Pairs of GP sites of separate posteriors that enter all densities by f + cg, with one number c."""
    pairs = [pair for pair in found.interactions if pair[1] not in found.group(pair[0])]
    pairs = [pair for pair in pairs if not any(name in found.inner for name in pair)]
    if not pairs:
        return []
    double = next(iter(program.base.values())).dtype == torch.float64
    small = (1e-3 if double else 1e-2) * min(float(step.abs().mean()) for step in program.steps.values())
    # From two places: the slopes of a product have one ratio where f ∝ g.
    starts = program.base, {name: value + program.steps[name] for name, value in program.base.items()}
    points: list[Mapping[str, Tensor]] = [
        start | {name: start[name] + sign * small}
        for pair in pairs
        for name in pair
        for start in starts
        for sign in (1, -1)
    ]
    shown = [part for key, part in stacked_runs(program.show, points).items() if key[0] == _LOG]
    rows = torch.cat([part.reshape(len(points), -1) for part in shown], -1)
    # By f and by g, from both places, of each density.
    slopes = (rows[0::2] - rows[1::2]).reshape(len(pairs), 2, -1)
    return [pair for pair, (by_f, by_g) in zip(pairs, slopes) if _is_proportional(by_f, by_g, 1e-4 if double else 5e-2)]


def _is_proportional(one: Tensor, other: Tensor, tolerance: float) -> bool:
    factor = (one * other).sum() / one.square().sum()
    return bool(factor != 0 and ((other - factor * one).abs() <= tolerance * other.abs().amax()).all())


def _find_groups(found: Structure, name: str, program: _Program, keys: list[Key]) -> None:
    """See whether layers above couple a site's values only within groups, as many as one of them has inputs."""
    num = program.base[name].shape[-1]
    counts = {other: value.shape[-1] for other, value in program.base.items()}
    sizes = {num // n: other for other, n in counts.items() if 1 < n < num and num % n == 0}
    for size in sorted(sizes):
        masks = group_codes(program.base[name], size)
        points = [program.base, *(program.base | {name: program.base[name].masked_fill(m, torch.nan)} for m in masks)]
        shown = stacked_runs(program.show, points)
        nan = {key: shown[key].isnan()[1:] for key in keys}
        if not any((part[0::2] & part[1::2] & ~shown[key][0].isnan()).any() for key, part in nan.items()):
            found.groups[name] = size, sizes[size]
            return
