"""How densities depend on function values: what may be integrated one value at a time, and what may not.

Expectations under a GP's marginals are right only for densities that are sums of terms with one function value
each. Whether a user's model is of that kind is found by trying: L is such a sum exactly if, for a random subset b
of the values, L(f + bδ) + L(f + (1 − b)δ) = L(f) + L(f + δ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import Tensor

__all__ = ["COUPLED", "DATAWISE", "ELEMENTWISE", "NONE", "dependence", "group_size", "interact", "unregistered"]

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
    if all(_same(a, b) for a, b in zip(start, moved)):
        return NONE

    def separable(shape: Iterable[int]) -> bool:
        mask = torch.rand(tuple(shape), generator=generator).to(value.device) < 0.5
        part, rest = evaluate(value + mask * delta), evaluate(value + ~mask * delta)
        return all(_adds_up(*four) for four in zip(start, moved, part, rest))

    if all(separable(value.shape) for _ in range(2)):
        return ELEMENTWISE
    if value.dim() > 1 and all(separable((*[1] * (value.dim() - 1), value.shape[-1])) for _ in range(2)):
        return DATAWISE
    return COUPLED


def group_size(evaluate: Evaluate, value: Tensor, step: Tensor, sizes: Iterable[int]) -> Optional[int]:
    """The first G of ``sizes`` for which no term has values of two groups of G consecutive inputs; or ``None``.

    :param sizes: divisors of N, for f of shape ``(..., N)``.
    """
    generator = torch.Generator().manual_seed(0)
    delta, start, moved = _two_ends(evaluate, value, step, generator)

    def separable(size: int) -> bool:
        groups = torch.rand(value.shape[-1] // size, generator=generator) < 0.5
        mask = groups.to(value.device).repeat_interleave(size)
        part, rest = evaluate(value + mask * delta), evaluate(value + ~mask * delta)
        return all(_adds_up(*four) for four in zip(start, moved, part, rest))

    return next((size for size in sizes if all(separable(size) for _ in range(3))), None)


def _two_ends(
    evaluate: Evaluate, value: Tensor, step: Tensor, generator: torch.Generator
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A move δ of about ``step``, and what there is at both of its ends."""
    delta = step * (0.5 + torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device))
    for _ in range(6):
        start, moved = evaluate(value), evaluate(value + delta)
        if _finite(start, moved):
            break
        delta = delta / 4  # the model's support ended; look closer
    return delta, start, moved


def interact(evaluate: Callable[[Tensor, Tensor], list[Tensor]], f: tuple, g: tuple) -> bool:
    """Whether ``evaluate(f, g)`` is more than a sum of a function of f and one of g; each a (value, step)."""
    (f0, df), (g0, dg) = f, g
    corners = [evaluate(f0, g0), evaluate(f0 + df, g0 + dg), evaluate(f0 + df, g0), evaluate(f0, g0 + dg)]
    return not all(_adds_up(*four) for four in zip(*corners))


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 3e-4


def _finite(*groups: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for group in groups for t in group)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _adds_up(start: Tensor, moved: Tensor, part: Tensor, rest: Tensor) -> bool:
    error = (part + rest - start - moved).abs()
    size = start.abs() + moved.abs() + part.abs() + rest.abs()
    return bool(((error <= _tolerance(start.dtype) * size) | ~error.isfinite()).all())


def unregistered(outputs: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that ``outputs`` depend on and that ask for gradients, other than those ``known``."""
    known_ids = {id(tensor) for tensor in known}
    found: dict[int, Tensor] = {}
    stack: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            stack.append(output.grad_fn)
        elif output.requires_grad and id(output) not in known_ids:
            found[id(output)] = output
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known_ids:
            found[id(leaf)] = leaf
        stack.extend(parent for parent, _ in node.next_functions)
    return list(found.values())
