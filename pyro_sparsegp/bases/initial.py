"""Where inducing inputs start: given, or chosen among the inputs of the guide's first call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..kernels import Kernel
from ..numerics.arguments import refuse, require_count

_PIVOTS = 2048  # points up to which a choice by the variance that is left is worth its time

Initialiser = Callable[[Any, Tensor, int], Tensor]
Init = Union[str, Initialiser, None]  # None is by the number of rows


@torch.no_grad()
def pivots(kernel: Kernel, x: Tensor, num: int, at_random: bool = False) -> Tensor:
    """``num`` rows of x, ``(N, D)``, each where the variance given the earlier ones is largest, or drawn by it."""
    # A pivoted Cholesky factorisation of k(x, x) (Fine and Scheinberg, 2001; Burt, Rasmussen and van der Wilk, 2020,
    # section 7), or a randomly pivoted one (Chen, Epperly, Tropp and Webber, 2025), in O(N·num²). Where points are too
    # few for the data, the largest variances are those of rows far from all others; draws follow their density, too.
    x = x[torch.randperm(x.shape[0], device=x.device)]
    rest = max(num - _PIVOTS, 0)  # rows that the choice does not see: none is taken twice
    few = num - rest
    some = x[rest:][: max(4096, 4 * few)]
    # With batches of hyperparameters or outputs, one set of inputs serves all: work with the mean kernel.
    remaining = _flat_mean(kernel.diag(some), 1).clone()
    exhausted = 1e-6 * remaining.max()
    noise = torch.rand_like(remaining)
    chosen = remaining.new_zeros(0, dtype=torch.int64)
    rows = x.new_zeros(few, len(some))  # R of the factorisation k ≈ RᵀR
    while (m := len(chosen)) < few and (remaining > exhausted).any():
        left = torch.where(remaining > exhausted, remaining, 0.0)
        i = torch.multinomial(left, 1) if at_random else left.argmax(0, keepdim=True)
        # R_m = (k(xᵢ, ·) − R_·iᵀR)/√(kᵢᵢ − ‖R_·i‖²)
        unexplained = _flat_mean(kernel(some[i], some), 2) - rows[:m, i].T @ rows[:m]
        rows[m] = unexplained[0] / remaining[i].sqrt()
        chosen = torch.cat([chosen, i])
        remaining = (remaining - rows[m].square()).clamp(min=0).index_fill(0, chosen, 0.0)
    # once the variance is used up, and beyond so many points, the rest are random rows
    others = noise.index_fill(0, chosen, -1.0).topk(few - len(chosen)).indices
    return torch.cat([some[chosen], some[others], x[:rest]])


def some_distinct(x: Tensor, most: int) -> Tensor:
    """The distinct rows, in random order, of at most so many of x, ``(N, D)``."""
    found = x[torch.randperm(len(x), device=x.device)[:most]].unique(dim=0)
    return found[torch.randperm(len(found), device=x.device)]


@torch.no_grad()
def k_means(kernel: Optional[Kernel], x: Tensor, num: int, most: int = 20_000) -> Tensor:
    """``num`` centres of Lloyd's k-means on standardised columns of at most max(``most``, 20·num) random rows."""
    x = x[torch.randperm(x.shape[0], device=x.device)[: max(most, 20 * num)]]
    spread = x.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    points = x / spread
    centres = points[:num].clone()
    for _ in range(25):
        nearest = torch.cdist(points, centres).argmin(1)
        counts = torch.zeros(num, dtype=x.dtype, device=x.device).index_add(0, nearest, torch.ones_like(points[:, 0]))
        totals = torch.zeros_like(centres).index_add(0, nearest, points)
        # Each to the mean of the points that are nearest to it; one that has none stays (Lloyd, 1982).
        centres = torch.where(counts[:, None] > 0, totals / counts.clamp(min=1)[:, None], centres)
    return centres * spread


def _flat_mean(value: Tensor, event_dim: int) -> Tensor:
    return value.reshape(-1, *value.shape[-event_dim:]).mean(0)


@torch.no_grad()
def regular_grid(kernel: Kernel, x: Tensor, num: int) -> Tensor:
    """At most ``num`` points of a regular grid over the range of the one or two columns that the kernel reads."""
    read = kernel.columns
    columns = range(x.shape[-1]) if read is None else read
    if len(columns) not in (1, 2):
        raise ValueError(f'init="grid" is for one or two columns, {kernel!r} reads {len(columns)}: take "pivots"')
    # A column with few distinct values has these as its axis, and leaves more points to the other axis of a pair.
    distinct = sorted(((column, x[:, column].unique()) for column in columns), key=lambda pair: len(pair[1]))
    axes: dict[int, Tensor] = {}
    for i, (column, values) in enumerate(distinct):
        size = int(num ** (1 / (len(columns) - i)))
        regular = torch.linspace(0, 1, size, dtype=x.dtype, device=x.device) if size > 1 else x.new_full((1,), 0.5)
        axes[column] = values if len(values) <= size else values[0] + (values[-1] - values[0]) * regular
        num //= len(axes[column])
    grid = torch.cartesian_prod(*[axes[column] for column in columns]).reshape(-1, len(columns))
    full = x[:1].repeat(len(grid), 1)  # the kernel does not read what stands in other columns
    full[:, list(columns)] = grid
    return full


_NAMED: dict[str, Initialiser] = {
    "greedy": pivots,
    "grid": regular_grid,
    "kmeans": k_means,
    "pivots": functools.partial(pivots, at_random=True),
}
_MANY = 1024  # rows above which points are taken to be too few for them


def choose_inputs(
    kernel: Kernel, x: Tensor, counts: Sequence[int], init: Init, name: str, columns: Optional[Sequence[int]] = None
) -> Sequence[Tensor]:
    """Sets of so many inducing inputs each, chosen together among x, ``(..., N, D)``, by the ``columns`` read."""
    rows = x.detach().flatten(0, -2)
    init = init or ("pivots" if rows.shape[0] > _MANY else "greedy")
    choose: Any = _NAMED.get(init, init)  # type: ignore[arg-type]
    if not callable(choose):
        raise ValueError(f"init must be one of {sorted(_NAMED)} or a callable of (kernel, x, num), got {init!r}")
    for num in counts:
        require_count(num, f"inducing of site {name!r} is a tensor of inputs or their number, which")
    if not counts:
        return []
    # How many rows are distinct; or some lower number that is enough, which a part of many rows may show.
    read, num = those(rows, columns), sum(counts)
    shown = len(read[:: max(1, len(read) // (4 * num + 4096))].unique(dim=0))
    distinct = shown if shown >= num else len(read.unique(dim=0))
    if columns is not None:
        counts = [min(num, distinct) for num in counts]
    if sum(counts) > distinct:
        raise ValueError(
            f"site {name!r} asks for {sum(counts)} inducing points, the guide's first call has {distinct} distinct "
            "inputs: take fewer, give them as a tensor, or first call the guide on all inputs, or on typical ones."
        )
    chosen = choose(kernel, rows, sum(counts)).to(rows)
    if init == "grid" and len(counts) == 1:  # of 30 points in two columns, 5 x 6, of 31, 5 x 6
        counts = [len(chosen)]
    if (found := tuple(chosen.shape)) != (wanted := (sum(counts), rows.shape[-1])):
        raise ValueError(f"init returned inducing inputs of shape {found} for site {name!r}, expected {wanted}")
    try:
        kernel.check_inputs(chosen)  # places between rows may be none, such as between codes of outputs
    except ValueError as error:
        raise ValueError(
            f"init={init!r} places inducing inputs of site {name!r} between rows, where the kernel has no values: "
            f'{error} Take init="pivots" or "greedy", which take rows, or give the inputs.'
        ) from None
    return chosen.split(counts)


def given_inputs(z: Tensor, like: Tensor, name: str, widths: set[int]) -> Tensor:
    """A set that was given, like ``like``; refused, naming the site, if it has no such number of columns."""
    num, has_rows = " or ".join(map(str, sorted(widths))), z.dim() == 2 and len(z) and z.shape[-1] in widths
    faults = {
        f"the inducing inputs of site {name!r} must be a tensor (M, {num}), got {tuple(z.shape)}": not has_rows,
        f"the inducing inputs of site {name!r} contain NaN or infinite values": not z.isfinite().all(),
    }
    refuse(faults)
    return z.to(like)


def those(x: Tensor, columns: Optional[Sequence[int]]) -> Tensor:
    """Some columns of x, ``(N, D)``, by default all; x itself if it has no others."""
    if columns is None or len(columns) == x.shape[-1]:
        return x
    return torch.stack([x[:, column] for column in columns], -1)  # an index would be copied to the device
