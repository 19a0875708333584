"""How densities depend on function values, by NaN: structure, not slopes.

NaN · 0 is NaN, so that a time, a weight or a latent of 0, the flat side of a relu and a saturated class hide nothing of
what they multiply. A run has NaN in the rows whose number has a 1 (or a 0) in one binary place: an entry of one row is
NaN in one of each two such runs, an entry of several rows in both of some. That is 2 log₂ N runs, mapped into one.
Only a comparison with a number hides what is compared: entries that move though no NaN reaches them are taken to depend
on all values.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Optional

import pyro
import torch
from torch import Tensor, nn

from .asking import attempt
from .draws import vmapped
from .structure import Depends, Group, Pair
from .traces import repeatable

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
    def kind(self) -> Depends:
        """How they do."""
        if not self.touched.any():
            return Depends.NONE
        if (self.rows[self.touched] < 0).any():
            return Depends.COUPLED
        return Depends.DATAWISE if (self.outputs[self.touched] < 0).any() else Depends.ELEMENTWISE


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
            parts = vmapped(tensors, stack, randomness="same", chunk_size=max(_AT_ONCE // largest, 1))
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

    def before(module: nn.Module, args: tuple) -> None:
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
        # A datum without a density, which a mask leaves out, tells nothing where others of its site do.
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
            of_rows, of_outputs = nan[1:].tensor_split([2 * bits[name]])
            owners[name][key] = Owners(touched | hidden, _spelled(of_rows, touched), _spelled(of_outputs, touched))
    return owners, moved


def _spelled(nan: Tensor, touched: Tensor) -> Tensor:
    """The binary numbers that the runs' NaN spell; −1 where in one place both digits are NaN: of several."""
    zeros, ones = nan[0::2], nan[1::2]
    places = torch.arange(len(ones), device=nan.device).reshape(-1, *[1] * touched.dim())
    return torch.where(touched & (zeros ^ ones).all(0), (ones.long() << places).sum(0), -1)


def combined(
    owners: Mapping[str, Mapping[Any, Owners]], keys: Collection[Any], names: Collection[str]
) -> tuple[dict[str, Depends], tuple[Pair, ...]]:
    """How tensors depend on GP sites' values, and the pairs of sites that meet in an entry."""
    none = Depends.NONE
    kinds = {n: max((owners[n][key].kind for key in keys), key=lambda d: d.rank, default=none) for n in names}
    return kinds, tuple(
        (f, g)
        for f, g in itertools.combinations(names, 2)
        if any((owners[f][key].touched & owners[g][key].touched).any() for key in keys)
    )


def codes_of(numbers: Tensor) -> list[Tensor]:
    """For each binary place, the values whose number has a 0 there, and those whose number has a 1."""
    return [(numbers >> bit) & 1 == one for bit in range(int(numbers.max()).bit_length()) for one in (0, 1)]


def find_group(show: Show, base: Values, name: str, keys: Collection[Any]) -> Optional[Group]:
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
            return Group(size, sizes[size])
    return None
