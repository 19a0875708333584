"""Which entries of tensors that a program makes depend on which function values, found by NaN: structure, not slopes.

NaN · 0 is NaN, so that a time, a weight or a latent of 0, the flat side of a relu and a saturated class hide nothing of
what they multiply. A run has NaN in the rows whose number has a 1 (or a 0) in one binary place: an entry of one row is
NaN in one of each two such runs, an entry of several rows in both of some. That is 2 log₂ N runs, mapped into one.
Only a comparison with a number hides what is compared: entries that move though no NaN reaches them are taken for those
of all values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from .traces import repeatable

NONE = "none"  # no density depends on the values
ELEMENTWISE = "elementwise"  # each term has one value
DATAWISE = "datawise"  # each term has values of one input, of several outputs of a vector-valued process
COUPLED = "coupled"  # a term has values at several inputs, as of a matrix times f

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_AT_ONCE = 2**20  # values of a site in one mapped run, so that many rows take little more memory than a step of them

Values = Mapping[str, Tensor]
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

    def crosses(self, other: Owners) -> bool:
        """Whether an entry depends on values of this site and of another one that are not of one row, or output."""
        away = (self.rows != other.rows) | (self.rows < 0)
        if self.kind == other.kind == ELEMENTWISE:
            away = away | (self.outputs != other.outputs)
        return bool((away & self.touched & other.touched).any())


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
        try:
            parts = torch.func.vmap(tensors, randomness="same", chunk_size=max(_AT_ONCE // largest, 1))(stack)
        except Exception:  # the first point is the program's own: what it raises there comes again
            like = next(iter(stack.values()))
            with repeatable(like):
                each = [tensors(points[0])]
            for point in points[1:]:
                each.append(tuple(torch.full_like(part, torch.nan) for part in each[0]))
                # An error of NaN, in whatever the program calls: it depends on what was NaN.
                with suppress(Exception), repeatable(like):
                    each[-1] = tensors(point)
            parts = tuple(torch.stack(part) for part in zip(*each))
    return dict(zip(keys, parts))


@contextmanager
def kept_buffers() -> Iterator[None]:
    """Put back what modules keep of their inputs, such as batch normalisation's means, in which NaN would stay."""
    kept: list[tuple[Tensor, Tensor]] = []

    def before(module: nn.Module, args: Any) -> None:
        kept.extend((buffer, buffer.clone()) for buffer in module.buffers(recurse=False))

    handle = nn.modules.module.register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
        for buffer, value in reversed(kept):
            buffer.copy_(value)


def find_owners(
    show: Show, base: Values, steps: Values = MappingProxyType({}), moves: tuple[float, ...] = ()
) -> tuple[dict[str, dict[Any, Owners]], dict[str, dict[Any, Tensor]]]:
    """For GP sites, the owners of the entries of what ``show`` gives, and what it gives at the base and where a site
    is moved, ``(1 + moves, ...)``.

    :param base: values of all GP sites, ``(..., N)`` each; ``steps``: how far they are moved.
    :param moves: in steps.
    """
    bits = {name: (value.shape[-1] - 1).bit_length() for name, value in base.items()}
    masks = {
        name: [torch.ones_like(v, dtype=torch.bool), *codes_of(_numbers(v, bits[name]))] for name, v in base.items()
    }
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
                hidden = hidden | (_moves(first[0], value) & known & ~nan[0])
        for name, nan in zip(base, nans):
            touched = nan[0] & ~hidden
            by_row, by_output = (_owner(spelt, touched) for spelt in nan[1:].tensor_split([2 * bits[name]]))
            owners[name][key] = Owners(touched | hidden, by_row, by_output)
    return owners, moved


def _numbers(value: Tensor, bits: int) -> Tensor:
    """The number of each value, in its shape: its row's in so many binary places, its output's in those before."""
    outputs = torch.arange(value[..., 0].numel(), device=value.device).reshape(*value.shape[:-1], 1)
    return (outputs << bits) + torch.arange(value.shape[-1], device=value.device)


def codes_of(numbers: Tensor) -> list[Tensor]:
    """For each binary place, the values whose number has a 0 there, and those whose number has a 1."""
    return [(numbers >> bit) & 1 == one for bit in range(int(numbers.max()).bit_length()) for one in (0, 1)]


def _owner(nan: Tensor, touched: Tensor) -> Tensor:
    """The number that the runs' NaN spell, −1 where they spell several."""
    zeros, ones = nan[0::2], nan[1::2]
    places = torch.arange(len(ones), device=nan.device).reshape(-1, *[1] * touched.dim())
    number = (ones.long() << places).sum(0)
    return torch.where(touched & (zeros ^ ones).all(0), number, -1)


def _moves(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors differ by more than the rounding of the same values at another place in memory."""
    reach, size = _ROUNDING[one.dtype], one.abs() + other.abs()
    return ~((one == other) | ((one - other).abs() <= reach * (size + size.nan_to_num(0.0, 0.0, 0.0).mean())))
