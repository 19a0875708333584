"""What is known of a program: its sites, and how densities depend on function values, by NaN: structure, not slopes.

NaN · 0 is NaN, so that a time, a weight or a latent of 0, the flat side of a relu and a saturated class hide nothing of
what they multiply. A run has NaN in the rows whose number has a 1 (or a 0) in one binary place: an entry of one row is
NaN in one of each two such runs, an entry of several rows in both of some. That is 2 log₂ N runs, mapped into one.
Only a comparison with a number hides what is compared: entries that move though no NaN reaches them are taken to depend
on all values.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as _field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Optional

import pyro
import torch
from torch import Tensor, nn

from .asking import attempt
from .traces import bare, repeatable

NONE = "none"  # no density depends on the values
ELEMENTWISE = "elementwise"  # each term has one value
DATAWISE = "datawise"  # each term has values of one input, of several outputs of a vector-valued process
COUPLED = "coupled"  # a term has values at several inputs, as of a matrix times f

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_AT_ONCE = 2**20  # values of a site in one mapped run, so that many rows take little more memory than a step of them

Values = Mapping[str, Tensor]
NO_VALUES: Values = MappingProxyType({})
Show = Callable[[Values], dict[Any, Tensor]]


@dataclass(frozen=True)
class Owners:
    """Which values of one GP site a tensor's entries depend on."""

    touched: Tensor  # the entries that depend on any
    rows: Tensor  # the row of the values that each of them depends on, −1 if there are several (or none)
    outputs: Tensor  # the same of the process's outputs

    @property
    def kind(self) -> str:
        """One of :data:`NONE`, :data:`ELEMENTWISE`, :data:`DATAWISE`, :data:`COUPLED`."""
        if not self.touched.any():
            return NONE
        if (self.rows[self.touched] < 0).any():
            return COUPLED
        return DATAWISE if (self.outputs[self.touched] < 0).any() else ELEMENTWISE


def stacked_runs(show: Show, points: Sequence[Values]) -> dict[Any, Tensor]:
    """What a program shows at several values of its GP sites, stacked: in one mapped run if torch allows it.

    A program that raises at NaN, such as one that factorises a matrix of function values, shows NaN there.
    """
    keys: list[Any] = []

    def tensors(values: Values) -> tuple[Tensor, ...]:
        shown = show(values)
        keys[:] = shown
        return tuple(part.detach() for part in shown.values())

    largest = max(value.numel() for value in points[0].values())
    stack = {name: torch.stack([point[name] for point in points]) for name in points[0]}
    with pyro.validation_enabled(False), torch.no_grad(), kept_buffers():
        with attempt():
            parts = torch.func.vmap(tensors, randomness="same", chunk_size=max(_AT_ONCE // largest, 1))(stack)
            return dict(zip(keys, parts))
        # The first point is the program's own: what it raises there comes again.
        like = next(iter(stack.values()))
        with repeatable(like):
            each = [tensors(points[0])]
        for point in points[1:]:
            each.append(tuple(torch.full_like(part, torch.nan) for part in each[0]))
            # An error of NaN, in whatever the program calls: it depends on what was NaN.
            with attempt(), repeatable(like):
                each[-1] = tensors(point)
        return dict(zip(keys, map(torch.stack, zip(*each))))


@contextmanager
def kept_buffers() -> Iterator[None]:
    """Leave as it was what modules keep of their inputs, such as batch normalisation's means."""
    kept: list[tuple[nn.Module, str, Tensor]] = []

    def before(module: nn.Module, args: Any) -> None:
        # Copies take the writes: those to a tensor that a graph holds would spoil its gradient.
        for name, buffer in list(module.named_buffers(recurse=False)):
            kept.append((module, name, buffer))
            module._buffers[name] = buffer.clone()

    handle = nn.modules.module.register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
        for module, name, buffer in reversed(kept):
            module._buffers[name] = buffer


def find_owners(
    show: Show, base: Values, steps: Values = NO_VALUES, moves: tuple[float, ...] = ()
) -> tuple[dict[str, dict[Any, Owners]], dict[str, dict[Any, Tensor]]]:
    """For GP sites, the owners of the entries of what ``show`` gives, and what it gives at the base, values of all GP
    sites, ``(..., N)`` each, and where a site is moved by so many steps, ``(1 + moves, ...)``.
    """
    bits = {name: (value.shape[-1] - 1).bit_length() for name, value in base.items()}
    masks = {}
    for name, value in base.items():
        # The number of each value: its row's in so many binary places, its output's in those before.
        outputs = torch.arange(value[..., 0].numel(), device=value.device).reshape(*value.shape[:-1], 1)
        numbers = (outputs << bits[name]) + torch.arange(value.shape[-1], device=value.device)
        masks[name] = [torch.ones_like(value, dtype=torch.bool), *codes_of(numbers)]
    points: list[Values] = [base]
    points += [{**base, name: base[name].masked_fill(mask, torch.nan)} for name in base for mask in masks[name]]
    points += [{**base, name: base[name] + move * steps[name]} for name in base for move in moves]
    sizes = [1, *map(len, masks.values()), *[len(moves)] * len(masks)]
    owners: dict[str, dict[Any, Owners]] = {name: {} for name in base}
    moved: dict[str, dict[Any, Tensor]] = {name: {} for name in base}
    for key, part in stacked_runs(show, points).items():
        first, *others = part.split(sizes)
        # An entry that is NaN at the start shows nothing, and one that moves without NaN hides what moves it.
        # A datum without a density, which a mask leaves out, tells nothing where others of its site do:
        # test_diagnostics_tree.py::test_densities_that_are_not_finite_are_named.
        known = ~first[0].isnan()
        hidden = ~known & ~known.any()
        nans = [there.isnan() & known for there in others[: len(masks)]]
        for name, nan, there in zip(base, nans, others[len(masks) :]):
            moved[name][key] = torch.cat([first, there])
            for value in there:
                # By more than the rounding of the same values at another place in memory.
                size = first[0].abs() + value.abs()
                reach = _ROUNDING[value.dtype] * (size + size.nan_to_num(0.0, 0.0, 0.0).mean())
                moves = ~((first[0] == value) | ((first[0] - value).abs() <= reach))
                hidden = hidden | (moves & known & ~nan[0])
        for name, nan in zip(base, nans):
            touched = nan[0] & ~hidden
            spelled = []
            for spelt in nan[1:].tensor_split([2 * bits[name]]):  # of rows, and of outputs
                # The binary number that the runs' NaN spell; −1 where in one place both digits are NaN: of several.
                zeros, ones = spelt[0::2], spelt[1::2]
                places = torch.arange(len(ones), device=nan.device).reshape(-1, *[1] * touched.dim())
                alone = touched & (zeros ^ ones).all(0)
                spelled.append(torch.where(alone, (ones.long() << places).sum(0), -1))
            owners[name][key] = Owners(touched | hidden, *spelled)
    return owners, moved


def combined(
    owners: Mapping[str, Mapping[Any, Owners]], keys: Collection[Any], names: Collection[str]
) -> tuple[dict[str, str], list[list[str]]]:
    """How tensors depend on GP sites' values, and the pairs of sites that meet in an entry."""
    order = (NONE, ELEMENTWISE, DATAWISE, COUPLED)
    kinds = {name: max((owners[name][key].kind for key in keys), key=order.index, default=NONE) for name in names}
    return kinds, [
        [f, g]
        for f, g in itertools.combinations(names, 2)
        if any((owners[f][key].touched & owners[g][key].touched).any() for key in keys)
    ]


def codes_of(numbers: Tensor) -> list[Tensor]:
    """For each binary place, the values whose number has a 0 there, and those whose number has a 1."""
    return [(numbers >> bit) & 1 == one for bit in range(int(numbers.max()).bit_length()) for one in (0, 1)]


def find_group(show: Show, base: Values, name: str, keys: Collection[Any]) -> Optional[tuple[int, str]]:
    """The size of the groups within which alone layers above couple a site's values, and the layer that has as many
    inputs as there are groups; ``None`` if there are no groups.
    """
    values = base[name]
    num, counts = values.shape[-1], {other: value.shape[-1] for other, value in base.items()}
    sizes = {num // n: other for other, n in counts.items() if 1 < n < num and num % n == 0}
    for size in sorted(sizes):
        masks = codes_of(torch.arange(num, device=values.device) // size)
        shown = stacked_runs(show, [base, *({**base, name: values.masked_fill(mask, torch.nan)} for mask in masks)])
        nan = {key: shown[key].isnan()[1:] for key in keys}
        if not any((part[0::2] & part[1::2] & ~shown[key][0].isnan()).any() for key, part in nan.items()):
            return size, sizes[size]
    return None


MAX_AXES = 2  # of a grid of nodes


@dataclass
class Structure:
    """What the guide found out about the model at its first call, in plain Python: it travels in the state dict."""

    gps: dict[str, dict[str, Any]] = _field(default_factory=dict)  # for each GP site, the shapes of its module
    latents: dict[str, dict[str, Any]] = _field(default_factory=dict)  # event dimensions, shape, plates with sizes
    rows: dict[str, int] = _field(default_factory=dict)  # for each observed site, how many values it had
    data_plates: list[str] = _field(default_factory=list)  # that enclose an observed site
    # Latents of which several data have one: some of the data's plates enclose them, and not all.
    grouped: list[str] = _field(default_factory=list)
    dependence: dict[str, str] = _field(default_factory=dict)  # how densities downstream depend on each GP site
    inner: list[str] = _field(default_factory=list)  # GP sites whose values enter another, as a deep GP's inner layers
    # Of those whose values a layer above couples in groups of consecutive inputs (the patches of an image), how many
    # make a group, and that layer.
    groups: dict[str, tuple[int, str]] = _field(default_factory=dict)
    interactions: list[list[str]] = _field(default_factory=list)  # pairs of GP sites that meet in a term of a density
    # Pairs of GP sites that enter densities by a sum of them alone, f + cg; or of f and g ~ GP(μ(f), k).
    summed: list[list[str]] = _field(default_factory=list)
    downstream: list[str] = _field(default_factory=list)  # sites whose densities move with a GP site's values
    quadratic: list[str] = _field(default_factory=list)  # GP sites on sites in whose values densities are quadratic
    columns: dict[str, int] = _field(default_factory=dict)  # of each GP site's inputs
    enumerated: list[str] = _field(default_factory=list)  # discrete latents, which are summed out
    classes: list[str] = _field(default_factory=list)  # of these the ones of groups, in no plate of the data
    coupled: list[str] = _field(default_factory=list)  # latents that have one posterior, of hyperparameters
    field: dict[str, list[int]] = _field(default_factory=dict)  # its members, in order: sizes of blocks of coefficients
    # Of each likelihood of a field, by parameter, the link under which it is affine in it.
    links: dict[str, dict[str, str]] = _field(default_factory=dict)
    drawn: list[str] = _field(default_factory=list)  # likelihoods of a field that are affine in it under no link
    # Of members of a field whose values hyperparameters multiply in the program, by exp(bᵀθ): b.
    factors: dict[str, dict[str, list[float]]] = _field(default_factory=dict)
    # Hyperparameters that the field follows, beside its kernels, such as an intercept: by their values, or in
    # unconstrained space.
    intercepts: list[str] = _field(default_factory=list)
    unconstrained: list[str] = _field(default_factory=list)
    owned: list[str] = _field(default_factory=list)  # latents of the field of which each datum has one value
    eliminated: str = ""  # the last of these, whose values are no entries of a dense covariance
    row_effects: list[str] = _field(default_factory=list)  # latents of the field that have a value for each row
    num_nodes: int = 20  # along an axis of quadrature in training, at which sites are read, too

    @cached_property
    def local_latents(self) -> list[str]:
        """The latents that have a value for each row."""
        return [name for name, latent in self.latents.items() if latent["plates"].keys() & self.data_plates]

    @property
    def able_to_couple(self) -> list[str]:
        """The latents of all rows, or of rows in the field, with no posterior by an overridden ``get_posterior``."""
        apart = {*self.local_latents} - {*self.row_effects}
        return [n for n, own in self.latents.items() if own["shape"] is not None and n not in apart]

    def neighbours(self, name: str) -> set[str]:
        """The GP sites that meet this one in a term of a density."""
        return {other for pair in self.interactions if name in pair for other in pair} - {name}

    def is_direct(self, name: str) -> bool:
        """Whether log densities are quadratic in a GP site's values, and no outputs meet in a term."""
        return name in self.quadratic and self.dependence[name] != DATAWISE

    def is_alone(self, name: str) -> bool:
        """Whether also no other GP site meets it."""
        return self.is_direct(name) and not self.neighbours(name)

    def residuals(self, rows: Mapping[str, int]) -> dict[str, int]:
        """How many standardised residuals GP sites of so many rows have."""
        return {name: num if self.dependence[name] == COUPLED else 1 for name, num in rows.items()}

    def axes(self, most: float = MAX_AXES) -> dict[str, tuple[int, ...]]:
        """The axes of the product grid on which each GP site is integrated; a site that must be drawn is left out."""
        # Sites that meet in one term of a density (a mean and a log-noise) get axes of their own, sites that never
        # meet share one. An inner layer of a deep GP and values that the model couples across inputs are drawn, and
        # so is a group that would need more axes than ``most``.
        width = {
            name: math.prod(self.gps[name]["batch_shape"]) if kind == DATAWISE else 1
            for name, kind in self.dependence.items()
            if name not in self.inner and kind != COUPLED
        }
        together = [set(group) & width.keys() for group in self.interactions]
        meets = {name: set[str]().union(*(group for group in together if name in group)) - {name} for name in width}
        axes: dict[str, tuple[int, ...]] = {}
        for name in width:
            taken = {axis for other in meets[name] for axis in axes.get(other, ())}
            free = (axis for axis in itertools.count() if axis not in taken)
            axes[name] = tuple(itertools.islice(free, width[name]))
        drawn = {name for name, used in axes.items() if max(used) >= most}
        while more := set[str]().union(*(meets[name] for name in drawn)) - drawn:  # a group is drawn as a whole
            drawn |= more
        return {name: used for name, used in axes.items() if name not in drawn}


@dataclass(frozen=True)
class ClosedForms:
    """Which densities have their expectation in closed form, and what is left without them; for one program."""

    rows: tuple[str, ...]  # sites that know E log p over a parameter: an affine function of the values of one row
    functions: tuple[str, ...]  # those whose parameter is one of values at several inputs
    of_rows: Structure  # how the parameters of ``rows`` depend on GP sites' values
    gps: tuple[str, ...]  # the GP sites that these sites' densities depend on
    rest: Structure  # how all other densities do
    kinds: dict[str, type]  # of the distributions of sites in closed form
    moving: dict[str, list[str]]  # by site, which of its parameters, scale and mask depend on function values

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """All whose expectation is in closed form."""
        return self.rows + self.functions

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
        without = {*self.axes, *self.rest.inner}
        return [name for name, kind in self.rest.dependence.items() if kind != COUPLED and name not in without]

    def hold(self, nodes: Mapping[str, Any]) -> bool:
        """Whether a run's sites have distributions of the kinds that were found."""
        return self.kinds == {name: type(bare(nodes[name]["fn"])) for name in self.kinds if name in nodes}
