"""Where inducing inputs start: given, or chosen among the inputs of the guide's first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

__all__ = ["Initialiser", "choose_inputs", "greedy_variance", "k_means"]

Initialiser = Callable[[Any, Tensor, int], Tensor]


@torch.no_grad()
def greedy_variance(kernel: Any, x: Tensor, num: int) -> Tensor:
    """``num`` rows of x, ``(N, D)``, each where the variance given the earlier ones is largest.

    A pivoted Cholesky factorisation of k(x, x) (Fine and Scheinberg, 2001; Burt, Rasmussen and van der Wilk,
    2020, section 7), in O(N·num²) on at most max(4096, 4·num) random rows. Once the variance is used up, which
    a smooth kernel does soon, the rest are random rows.
    """
    x = x[torch.randperm(x.shape[0], device=x.device)[: max(4096, 4 * num)]]
    # With batches of hyperparameters or outputs, one set of inputs serves all: work with the mean kernel.
    remaining = _flat_mean(kernel.diag(x), 1).clone()
    exhausted = 1e-6 * remaining.max()
    noise = torch.rand_like(remaining)
    chosen: list[Tensor] = []
    rows = x.new_zeros(num, x.shape[0])
    taken = torch.zeros_like(remaining, dtype=torch.bool)
    for m in range(num):
        # Scores stay on the device: used-up rows rank by noise below all others, taken ones last.
        score = torch.where(remaining > exhausted, 1 + remaining, noise).masked_fill(taken, -1.0)
        i = score.argmax()
        chosen.append(x[i])
        taken = taken | (torch.arange(x.shape[0], device=x.device) == i)
        column = _flat_mean(kernel(x[i][None], x), 2)[0]
        row = (column - rows[:m].T @ rows[:m, i]) / remaining[i].clamp(min=exhausted).sqrt()
        rows[m] = row
        remaining = (remaining - row.square()).clamp(min=0)
    return torch.stack(chosen)


@torch.no_grad()
def k_means(kernel: Any, x: Tensor, num: int, num_iterations: int = 25, most: int = 20_000) -> Tensor:
    """``num`` centres of Lloyd's k-means on standardised columns of at most max(20,000, 20·num) random rows.

    :param most: in the place of these 20,000.
    """
    x = x[torch.randperm(x.shape[0], device=x.device)[: max(most, 20 * num)]]
    spread = x.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    points = x / spread
    centres = points[:num].clone()
    for _ in range(num_iterations):
        nearest = torch.cdist(points, centres).argmin(1)
        counts = torch.zeros(num, dtype=x.dtype, device=x.device).index_add(0, nearest, torch.ones_like(points[:, 0]))
        totals = torch.zeros_like(centres).index_add(0, nearest, points)
        centres = torch.where(counts[:, None] > 0, totals / counts.clamp(min=1)[:, None], centres)
    return centres * spread


def _flat_mean(value: Tensor, event_dim: int) -> Tensor:
    return value.flatten(0, -event_dim - 1).mean(0) if value.dim() > event_dim else value


_NAMED: dict[str, Initialiser] = {"greedy": greedy_variance, "kmeans": k_means}


def choose_inputs(
    kernel: Any,
    x: Tensor,
    sets: Sequence[Union[int, Tensor]],
    init: Union[str, Initialiser],
    name: str,
    columns: Optional[tuple[int, ...]] = None,
) -> list[Tensor]:
    """The sets of inducing inputs: those given as they are, those counted chosen together among x.

    :param kernel: the kernel they are for.
    :param x: inputs, ``(..., N, D)``.
    :param sets: a number or inputs for each set.
    :param init: "greedy", "kmeans" or a callable (kernel, x, num) -> ``(num, D)``.
    :param name: the site, for errors.
    :param columns: keep only these columns, the ones that the kernel reads, and at most one point a distinct row.
    :raises ValueError: naming the site, if there are fewer distinct inputs than points, or shapes do not fit.
    """
    if not callable(init) and init not in _NAMED:
        raise ValueError(
            f"init must be one of {sorted(_NAMED)} or a callable (kernel, x, num) -> (num, D), got {init!r}"
        )
    rows = x.detach().flatten(0, -2)
    for given in sets:
        _check(given, rows, name, columns)
    wanted = [0 if isinstance(given, Tensor) else int(given) for given in sets]
    chosen = rows[:0]
    if sum(wanted):
        distinct = (rows if columns is None else rows[:, list(columns)]).unique(dim=0).shape[0]
        if columns is not None:
            wanted = [min(num, distinct) for num in wanted]
        if sum(wanted) > distinct:
            raise ValueError(
                f"site {name!r} asks for {sum(wanted)} inducing points, the guide's first call has {distinct} distinct "
                "inputs: ask for fewer, give the inputs as a tensor, or first call the guide once on representative "
                "inputs, all of them say."
            )
        chosen = (init if callable(init) else _NAMED[init])(kernel, rows, sum(wanted)).to(rows)
        if chosen.shape != (sum(wanted), rows.shape[-1]):
            raise ValueError(
                f"init returned inducing inputs of shape {tuple(chosen.shape)} for site {name!r}, expected "
                f"{(sum(wanted), rows.shape[-1])}"
            )
    free = iter(chosen.split([num for num in wanted if num]) if sum(wanted) else [])
    found = [given.to(rows) if isinstance(given, Tensor) else next(free) for given in sets]
    if columns is None:
        return found
    return [z[:, list(columns)] if z.shape[-1] == rows.shape[-1] != len(columns) else z for z in found]


def _check(given: Any, rows: Tensor, name: str, columns: Optional[tuple[int, ...]]) -> None:
    if isinstance(given, Tensor):
        widths = {rows.shape[-1]} if columns is None else {rows.shape[-1], len(columns)}
        if given.dim() != 2 or given.shape[-1] not in widths or not given.shape[0]:
            raise ValueError(
                f"the inducing inputs of site {name!r} must be a tensor (M, {' or '.join(map(str, sorted(widths)))}), "
                f"got {tuple(given.shape)}"
            )
        if not given.isfinite().all():
            raise ValueError(f"the inducing inputs of site {name!r} contain NaN or infinite values")
    elif isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"site {name!r} needs a number of inducing points of at least 1 or a tensor, got {given!r}")
