"""What is known of a program: its sites, and how its densities depend on GP sites' values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..process import GaussianProcess
from .affine import are_normal_around_affine
from .dependence import COUPLED, DATAWISE, ELEMENTWISE, NONE, adds_up, finite, group_size, same, uneven
from .likelihood import mapped
from .traces import as_process, log_densities

__all__ = ["Structure", "explore"]

_DENSITY = "density"
_CLOSER = 6  # times that moves are cut to a quarter where they leave the densities' support
_AT_ONCE = 2**20  # values of a site in one mapped run, so that many rows take little more memory than a step of them


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
    :param coupled: latents whose draws free posteriors follow.
    :param enumerated: discrete latents, which are summed out.
    :param joint: groups of GP sites that have one posterior.
    :param crossed: pairs of them that meet in terms of densities at different inputs or outputs.
    :param network: whether the program runs a network, so that each of its runs may be long.
    :param summed: pairs of GP sites of separate posteriors that enter densities by a sum of them alone, f + cg.
    :param affine: whether values at several inputs meet in densities, and all of these are normal around affine
        functions of values.
    """

    gps: dict[str, dict[str, Any]] = field(default_factory=dict)
    latents: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    data_plates: list[str] = field(default_factory=list)
    grouped: list[str] = field(default_factory=list)
    dependence: dict[str, str] = field(default_factory=dict)
    inner: list[str] = field(default_factory=list)
    groups: dict[str, tuple[int, str]] = field(default_factory=dict)
    interactions: list[list[str]] = field(default_factory=list)
    downstream: list[str] = field(default_factory=list)
    quadratic: list[str] = field(default_factory=list)
    meeting: list[str] = field(default_factory=list)
    columns: dict[str, int] = field(default_factory=dict)
    coupled: list[str] = field(default_factory=list)
    enumerated: list[str] = field(default_factory=list)
    joint: list[list[str]] = field(default_factory=list)
    crossed: list[list[str]] = field(default_factory=list)
    network: bool = False
    summed: list[list[str]] = field(default_factory=list)
    affine: bool = False

    @property
    def entering(self) -> list[str]:
        """The GP sites whose values densities depend on."""
        return [name for name, kind in self.dependence.items() if kind != NONE]

    @property
    def follows_networks(self) -> bool:
        """Whether natural steps of any GP site follow a network, at rows that are kept."""
        return any("kept_rows" in spec for spec in self.gps.values())

    def company(self, name: str) -> list[str]:
        """A GP site and the sites of its posterior that its values meet in densities, in the order of the group."""
        group = next((group for group in self.joint if name in group), [name])
        found, reached = {name}, [name]
        while reached:
            site = reached.pop()
            more = {other for pair in self.interactions if site in pair for other in pair if other in group} - found
            found |= more
            reached += more
        return [other for other in group if other in found]

    def meets_by_rows(self, name: str) -> bool:
        """Whether the values of one row, of a GP site and of its company, are all that meets in a term."""
        if not self.joint:
            return True
        company = self.company(name)
        alone = len(company) == 1
        return alone or not (
            any(self.dependence[other] == COUPLED for other in company)
            or any(f in company and g in company for f, g in self.crossed)
        )


Values = dict[str, Tensor]


@torch.no_grad()
def explore(
    found: Structure,
    held: Callable[[Values], poutine.Trace],
    processes: Mapping[str, GaussianProcess],
    slopes: Collection[str],
) -> dict[str, Tensor]:
    """Fill in how densities and layers above depend on GP sites' values, by trying: all moves in one mapped run.

    :param held: runs the program with GP sites at values, all else held.
    :param processes: the GP sites' priors in some run.
    :param slopes: the GP sites of which it is asked whether log densities are quadratic in their values.
    :returns: the log densities at the start, by site.
    """
    starts = {}
    above: dict[str, set[str]] = {}  # the layers that a GP site's values enter
    for name, process in processes.items():  # off the mean, where a model may be degenerate
        spread = process.variance.sqrt()
        starts[name] = process.mean + 0.1 * spread, spread
    program = _Program(held, processes, slopes)
    size = 1.0
    for _ in range(_CLOSER):
        moves = _Moves(starts, slopes, size)
        outputs, gradients = program.at(moves.points)
        if finite(*([part[moves.whole[name]] for part in outputs.values()] for name in starts)):
            break
        size /= 4  # the model's support ended; look closer
    densities = {name: part for (kind, name), part in outputs.items() if kind == _DENSITY}
    for name in starts:
        seen = _without(outputs, name)
        found.dependence[name] = moves.kind(name, list(seen.values()))
        whole = moves.whole[name]
        moved = {key for key, part in seen.items() if not same(part[0], part[whole])}
        above[name] = {layer for kind, layer in moved if kind != _DENSITY}
        if above[name]:
            found.inner.append(name)
            if found.dependence[name] == COUPLED:
                _find_groups(found, name, starts, moves, program)
        found.downstream += [o for o in densities if (_DENSITY, o) in moved and o not in found.downstream]
    _couple_below(found, above)
    for f, g in itertools.combinations(starts, 2):
        both = _without(outputs, f, g).values()
        corners = 0, moves.both[f, g], moves.whole[f], moves.whole[g]
        if not all(adds_up(*(part[corner] for corner in corners)) for part in both):
            found.interactions.append([f, g])
    found.crossed = _crossed(found, moves, program)
    found.summed = _summed(found, moves, program)
    if COUPLED in found.dependence.values() and not (found.inner or found.enumerated or slopes):
        found.affine = are_normal_around_affine(found.downstream, starts, held)
    for name in slopes:
        quadratic, meeting = moves.quadratic(name, gradients[name])
        if quadratic:
            found.quadratic.append(name)
        if meeting:
            found.meeting.append(name)
    return {name: part[0] for name, part in densities.items()}


def _couple_below(found: Structure, above: dict[str, set[str]]) -> None:
    """Inputs that meet above an inner layer, as in sums of the layer on it, meet in that layer too."""
    coupled = {name for name in above if name not in found.inner and found.dependence[name] == COUPLED}
    for name in reversed(above):  # a layer stands before those that it enters
        if above[name] & coupled:
            coupled.add(name)
            found.dependence[name] = COUPLED


def _without(outputs: dict[tuple[str, str], Tensor], *names: str) -> dict[tuple[str, str], Tensor]:
    """Outputs but for what these GP sites are made of."""
    return {(kind, name): part for (kind, name), part in outputs.items() if kind == _DENSITY or name not in names}


class _Program:
    """What a program shows at values of its GP sites: its densities, and the processes of layers above."""

    def __init__(
        self, held: Callable[[Values], poutine.Trace], processes: Mapping[str, GaussianProcess], slopes: Collection[str]
    ) -> None:
        self.held, self.names, self.slopes = held, list(processes), slopes
        self.rows = {name: process.x[..., :1, :].detach() for name, process in processes.items()}
        self.keys: list[tuple[str, str]] = []

    def at(self, points: list[Values]) -> tuple[dict[tuple[str, str], Tensor], Values]:
        """Outputs at points, by kind and name, and the gradients of the sum of all log densities, stacked."""
        stack = {name: torch.stack([point[name] for point in points]) for name in self.names}
        with pyro.validation_enabled(False):
            parts = mapped(self._one, stack, max(_AT_ONCE // max(part[0].numel() for part in stack.values()), 1))
        outputs, gradients = parts[: len(self.keys)], parts[len(self.keys) :]
        return dict(zip(self.keys, outputs)), dict(zip(self.slopes, gradients))

    def slopes_at(self, point: Values) -> Values:
        """The gradients of the sum of all log densities by the GP sites' values."""
        moving = {name: value.detach().requires_grad_() for name, value in point.items()}
        with torch.enable_grad(), pyro.validation_enabled(False):
            total, _ = self._show(moving)
            if not total.requires_grad:  # of steps, as of the largest of several functions
                return {name: torch.zeros_like(value) for name, value in point.items()}
            found = torch.autograd.grad(total, list(moving.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(moving, found))

    def _one(self, values: Values) -> tuple[Tensor, ...]:
        if not self.slopes:
            return self._show(values)[1]
        moving = {name: values[name] for name in self.slopes}
        with torch.enable_grad():
            try:
                gradients, shown = torch.func.grad(lambda moved: self._show({**values, **moved}), has_aux=True)(moving)
            except RuntimeError as error:
                if "setup_context" not in str(error):
                    raise
                raise ValueError(
                    f"GP site {next(iter(self.slopes))!r} has a family that reads Gaussian sites off the likelihood's "
                    "derivatives, and the model uses a torch.autograd.Function without setup_context, as DiscreteHMM "
                    "does, which torch.func does not differentiate. Take a family with a free posterior, such as SVGP."
                ) from error
        return (*shown, *(gradients[name] for name in self.slopes))

    def _show(self, values: Values) -> tuple[Tensor, tuple[Tensor, ...]]:
        trace = self.held(values)
        densities = log_densities(trace, self.names)
        shown = {(_DENSITY, name): part for name, part in densities.items()}
        for name in self.names if len(self.names) > 1 else ():
            process, _ = as_process(trace.nodes[name]["fn"])
            assert process is not None
            x = process.x
            with torch.no_grad():  # kernels of many rows drop what they make, which no transform for gradients allows
                seen = x, process.mean, process.variance, process.kernel(self.rows[name], x)
            shown |= {(f"input {i}", name): part for i, part in enumerate(seen)}
        self.keys = list(shown)
        total = sum((part.sum() for part in densities.values()), next(iter(values.values())).new_zeros(()))
        return total, tuple(part.detach() for part in shown.values())


class _Moves:
    """Where GP sites' values are moved to: point 0 is the start; each site moves as a whole, and in two parts."""

    def __init__(self, starts: Mapping[str, tuple[Tensor, Tensor]], slopes: Collection[str], size: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.base = {name: value for name, (value, _) in starts.items()}
        self.points: list[Values] = [dict(self.base)]
        self.step: Values = {}
        self.whole: dict[str, int] = {}
        self.both: dict[tuple[str, str], int] = {}
        self.parts: dict[str, list[tuple[str, int, int]]] = {}
        self.along: dict[str, tuple[int, int, int]] = {}
        self.single: dict[str, list[int]] = {}
        for name, (value, spread) in starts.items():
            self.step[name] = size * uneven(value, spread, generator)
            self.whole[name] = self._add({name: value + self.step[name]})
            self.parts[name] = []
            for kind, shape in ((ELEMENTWISE, value.shape), (DATAWISE, (*[1] * (value.dim() - 1), value.shape[-1]))):
                for _ in range(2 if kind == ELEMENTWISE or value.dim() > 1 else 0):
                    mask = (torch.rand(tuple(shape), generator=generator) < 0.5).to(value.device)
                    part, rest = (self._add({name: value + m * self.step[name]}) for m in (mask, ~mask))
                    self.parts[name].append((kind, part, rest))
        for f, g in itertools.combinations(starts, 2):
            self.both[f, g] = self._add({name: self.base[name] + self.step[name] for name in (f, g)})
        for name in slopes:
            self._add_directions(name, generator)

    def _add(self, values: Values) -> int:
        self.points.append(self.base | values)
        return len(self.points) - 1

    def _add_directions(self, name: str, generator: torch.Generator) -> None:
        value, step = self.base[name], self.step[name]
        other = step * (torch.rand(step.shape, generator=generator, dtype=step.dtype).to(step.device) - 0.5).sign()
        back, turned = (self._add({name: value + move}) for move in (-1.7 * step, other))
        self.along[name] = back, turned, self._add({name: value + step + other})
        outputs = value[..., 0].numel()
        one = torch.eye(outputs, dtype=value.dtype, device=value.device).reshape(outputs, *value.shape[:-1], 1)
        self.single[name] = [self._add({name: value + part * step}) for part in one]

    def kind(self, name: str, outputs: list[Tensor]) -> str:
        """How outputs, ``(points, ...)`` each, depend on a site's values."""
        whole = self.whole[name]
        if all(same(part[0], part[whole]) for part in outputs):
            return NONE
        for kind in (ELEMENTWISE, DATAWISE):
            halves = [(part, rest) for of, part, rest in self.parts[name] if of == kind]
            fits = [adds_up(out[0], out[whole], out[part], out[rest]) for out in outputs for part, rest in halves]
            if halves and all(fits):
                return kind
        return COUPLED

    def quadratic(self, name: str, slope: Tensor) -> tuple[bool, bool]:
        """Whether log densities whose gradient is ``slope`` at the points, ``(points, ..., N)``, are quadratic in a
        site's values, with curvature wherever they have slope; and whether several outputs meet in a term.
        """
        step, here = self.step[name], slope[0]
        back, turned, both = self.along[name]
        tolerance = 1e-6 if slope.dtype == torch.float64 else 1e-3
        # Moving one output shows the curvature by its own values.
        own = torch.stack([slope[place] - here for place in self.single[name]])
        outputs = len(own)
        own = own.reshape(outputs, outputs, -1).diagonal().mT.reshape(here.shape)
        curvature = own / step
        if ((here != 0) & (curvature >= 0)).any() or not (here.any() or curvature.any()):
            return False, False
        there, opposite, other, together = (slope[place] - here for place in (self.whole[name], back, turned, both))
        size = here.abs() + own.abs() + there.abs() + other.abs() + 1e-6 * own.abs().mean()

        def differ(one: Tensor, two: Tensor) -> bool:
            return bool(((one - two).abs() > tolerance * size).any())

        if differ(opposite, -1.7 * there) or differ(together, there + other):
            return False, False
        return True, differ(there, own)


def _crossed(found: Structure, moves: _Moves, program: _Program) -> list[list[str]]:
    """Pairs of GP sites of one posterior that meet in terms of densities with values of different rows."""
    pairs = [pair for pair in found.interactions if any(set(pair) <= set(group) for group in found.joint)]
    alike = [pair for pair in pairs if moves.base[pair[0]].shape == moves.base[pair[1]].shape]
    if not alike:
        return pairs
    generator = torch.Generator().manual_seed(0)
    points: list[Values] = [moves.base]
    for f, g in alike:
        value = moves.base[f]
        single = all(found.dependence[name] == ELEMENTWISE for name in (f, g))
        shape = value.shape if single else (*[1] * (value.dim() - 1), value.shape[-1])
        for _ in range(3):
            mask = (torch.rand(tuple(shape), generator=generator) < 0.5).to(value.device)
            one, other = {f: value + mask * moves.step[f]}, {g: moves.base[g] + ~mask * moves.step[g]}
            points += [moves.base | one | other, moves.base | one, moves.base | other]
    outputs, _ = program.at(points)
    shown = [part for (kind, _), part in outputs.items() if kind == _DENSITY]
    crossed = [pair for pair in pairs if pair not in alike]
    for i, pair in enumerate(alike):
        corners = [(9 * i + 3 * k + 1, 9 * i + 3 * k + 2, 9 * i + 3 * k + 3) for k in range(3)]
        if not all(adds_up(part[0], *(part[c] for c in three)) for part in shown for three in corners):
            crossed.append(pair)
    return crossed


def _summed(found: Structure, moves: _Moves, program: _Program) -> list[list[str]]:
    """Pairs of GP sites of separate posteriors that enter all densities by f + cg, with one number c."""
    pairs = [
        pair
        for pair in found.interactions
        if moves.base[pair[0]].shape == moves.base[pair[1]].shape
        and not any(set(pair) <= set(group) for group in found.joint)
    ]
    if not pairs:
        return []
    slopes = program.slopes_at(moves.base)
    weights = [_ratio(slopes[g], slopes[f]) for f, g in pairs]
    # A move of g by s is one of f by cs, from two places: the slopes of a product have one ratio where f ∝ g.
    points = [moves.base]
    for (f, g), weight in zip(pairs, weights):
        step = torch.minimum(moves.step[f], moves.step[g]) / max(abs(weight), 1.0)
        for start in (moves.base, moves.points[moves.both[f, g]]):
            points += [start | {f: start[f] + weight * step}, start | {g: start[g] + step}]
    outputs, _ = program.at(points)
    summed = []
    for i, (pair, weight) in enumerate(zip(pairs, weights)):
        moved = [(4 * i + 1, 4 * i + 2), (4 * i + 3, 4 * i + 4)]
        parts = _without(outputs, *pair).values()
        if weight and all(adds_up(part[0], part[by_f], part[by_g], part[0]) for part in parts for by_f, by_g in moved):
            summed.append(pair)
    return summed


def _ratio(slope: Tensor, other: Tensor) -> float:
    """The number that slopes are times others, if it is one; else 0."""
    ratio = (slope * other).sum() / other.square().sum()
    tolerance = 1e-6 if slope.dtype == torch.float64 else 1e-3
    fits = (slope - ratio * other).abs() <= tolerance * (slope.abs() + other.abs().mean())
    return float(torch.where(fits.all() & ratio.isfinite(), ratio, 0.0))


def _find_groups(
    found: Structure, name: str, starts: Mapping[str, tuple[Tensor, Tensor]], moves: _Moves, program: _Program
) -> None:
    """See whether layers above couple a site's values only within groups, as many as one of them has inputs."""
    value = starts[name][0]
    num = value.shape[-1]
    counts = {other: f.shape[-1] for other, (f, _) in starts.items()}
    sizes = {num // n: other for other, n in counts.items() if 1 < n < num and num % n == 0}

    def evaluate(points: list[Tensor]) -> list[Tensor]:
        outputs, _ = program.at([moves.base | {name: point} for point in points])
        return list(_without(outputs, name).values())

    size = group_size(evaluate, value, moves.step[name], sorted(sizes))
    if size is not None:
        found.groups[name] = size, sizes[size]
