"""How densities depend on function values: what may be integrated one value at a time, and what may not.

Expectations under a GP's marginals are right only for densities that are sums of terms with one function value
each. Whether a user's model is of that kind is found by trying: L is such a sum exactly if, for a random subset b
of the values, L(f + bδ) + L(f + (1 − b)δ) = L(f) + L(f + δ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Optional

import torch
from torch import Tensor

__all__ = [
    "COUPLED",
    "DATAWISE",
    "ELEMENTWISE",
    "NONE",
    "adds_up",
    "dependence",
    "differ",
    "finite",
    "group_size",
    "interact",
    "owners",
    "same",
    "uneven",
]

NONE = "none"  # nothing downstream depends on the values
ELEMENTWISE = "elementwise"  # sums of terms with one value each
DATAWISE = "datawise"  # sums of terms with one input each, but several outputs of a vector-valued process
COUPLED = "coupled"  # terms with several inputs' values, such as a matrix times f

Evaluate = Callable[[Tensor], list[Tensor]]


def dependence(evaluate: Evaluate, value: Tensor, step: Tensor) -> str:
    """How the tensors ``evaluate(f)`` depend on f, ``(..., N)``, around ``value``, moved by about ``step``.

    :returns: one of :data:`NONE`, :data:`ELEMENTWISE`, :data:`DATAWISE`, :data:`COUPLED`.
    """
    generator = torch.Generator().manual_seed(0)
    delta, start, moved = _two_ends(evaluate, value, step, generator)
    if all(same(a, b) for a, b in zip(start, moved)):
        return NONE

    def separable(shape: Iterable[int]) -> bool:
        mask = torch.rand(tuple(shape), generator=generator).to(value.device) < 0.5
        part, rest = evaluate(value + mask * delta), evaluate(value + ~mask * delta)
        return all(adds_up(*four) for four in zip(start, moved, part, rest))

    if all(separable(value.shape) for _ in range(2)):
        return ELEMENTWISE
    if value.dim() > 1 and all(separable((*[1] * (value.dim() - 1), value.shape[-1])) for _ in range(2)):
        return DATAWISE
    return COUPLED


def group_size(
    evaluate: Callable[[list[Tensor]], list[Tensor]], value: Tensor, step: Tensor, sizes: Iterable[int]
) -> Optional[int]:
    """The first G of ``sizes`` for which no term has values of two groups of G consecutive inputs; or ``None``.

    :param evaluate: takes several values of f, ``(..., N)``, and stacks what there is at each.
    :param sizes: divisors of N.
    """
    generator = torch.Generator().manual_seed(0)
    points, places = [value, value + step], {}
    for size in sizes:
        places[size] = len(points)
        for _ in range(3):
            groups = torch.rand(value.shape[-1] // size, generator=generator) < 0.5
            mask = groups.to(value.device).repeat_interleave(size)
            points += [value + mask * step, value + ~mask * step]
    if not places:
        return None
    outputs = evaluate(points)

    def separable(first: int) -> bool:
        halves = range(first, first + 6, 2)
        return all(adds_up(out[0], out[1], out[part], out[part + 1]) for out in outputs for part in halves)

    return next((size for size, first in places.items() if separable(first)), None)


def _two_ends(
    evaluate: Evaluate, value: Tensor, step: Tensor, generator: torch.Generator
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A move δ of about ``step``, and what there is at both of its ends."""
    delta = step * (0.5 + torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device))
    for _ in range(6):
        start, moved = evaluate(value), evaluate(value + delta)
        if finite(start, moved):
            break
        delta = delta / 4  # the model's support ended; look closer
    return delta, start, moved


def interact(evaluate: Callable[[Tensor, Tensor], list[Tensor]], f: tuple, g: tuple) -> bool:
    """Whether ``evaluate(f, g)`` is more than a sum of a function of f and one of g; each a (value, step)."""
    (f0, df), (g0, dg) = f, g
    corners = [evaluate(f0, g0), evaluate(f0 + df, g0 + dg), evaluate(f0 + df, g0), evaluate(f0, g0 + dg)]
    return not all(adds_up(*four) for four in zip(*corners))


def owners(
    evaluate: Callable[[Tensor], Mapping[str, Tensor]], value: Tensor, moved: Tensor
) -> dict[str, Optional[Tensor]]:
    """For each entry of the tensors ``evaluate(f)``, the number of the one value of f that it depends on.

    Found by moving halves of the values, those with a 1 in one place of their binary number and the others: 2 log₂ N
    evaluations.

    :param moved: where each value moves to from ``value``, ``(..., N)`` both.
    :returns: −1 for an entry that does not move; ``None`` for a tensor that has an entry of several values.
    """
    numbers = torch.arange(value.numel(), device=value.device).reshape(value.shape)
    start, end = evaluate(value), evaluate(moved)
    found: dict[str, Optional[Tensor]] = {key: torch.zeros_like(part, dtype=torch.long) for key, part in start.items()}
    for bit in range(max(value.numel() - 1, 1).bit_length()):
        chosen = (numbers >> bit) & 1 == 1
        these, others = evaluate(torch.where(chosen, moved, value)), evaluate(torch.where(chosen, value, moved))
        for key, so_far in found.items():
            on, off = differ(these[key], start[key]), differ(others[key], start[key])
            found[key] = None if so_far is None or (on & off).any() else so_far | (on.long() << bit)
    return {
        key: None if owner is None else torch.where(differ(end[key], start[key]), owner, -1)
        for key, owner in found.items()
    }


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 3e-4


def finite(*groups: list[Tensor]) -> bool:
    """Whether all tensors of all groups are."""
    return all(bool(t.isfinite().all()) for group in groups for t in group)


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are not the same; NaN is the same as NaN."""
    return (a != b) & ~(a.isnan() & b.isnan())


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, but for the rounding of the same values at another place in memory."""
    if a.shape != b.shape:
        return False
    size = a.abs() + b.abs()
    rounding = 64 * torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    reach = rounding * (size + size.nan_to_num(0.0, 0.0, 0.0).mean())
    return not (differ(a, b) & ~((a - b).abs() <= reach)).any()


def adds_up(start: Tensor, moved: Tensor, part: Tensor, rest: Tensor) -> bool:
    """Whether two parts of a move change as much as the whole does."""
    error = (part + rest - start - moved).abs()
    size = start.abs() + moved.abs() + part.abs() + rest.abs()
    return bool(((error <= _tolerance(start.dtype) * size) | ~error.isfinite()).all())


def uneven(value: Tensor, spread: Tensor, generator: torch.Generator) -> Tensor:
    """How far each of a GP site's values is moved: 0.5 to 1.5 times its deviation, or the largest one where it is 0."""
    floor = torch.where(spread > 0, spread, spread.amax().clamp(min=1e-6))
    return floor * (0.5 + torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device))
