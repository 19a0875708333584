"""Which function values meet in densities, and so take axes of their own of a product grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ..program.dependence import COUPLED, DATAWISE
from ..program.facts import Structure

MAX_AXES = 2  # of a grid of nodes


def quadrature_axes(structure: Structure, most: Optional[int] = MAX_AXES) -> dict[str, tuple[int, ...]]:
    """The axes of the product grid on which each GP site is integrated; a site that must be drawn is left out.

    Sites that meet in one term of a density (a mean and a log-noise) get axes of their own, sites that never
    meet share one. An inner layer of a deep GP and values that the model couples across inputs are drawn, and
    so is a group that would need more axes than ``most`` (``None`` is any number). Sites of one posterior have an axis
    each.
    """
    width = {
        name: math.prod(structure.gps[name]["batch_shape"]) if kind == DATAWISE else 1
        for name, kind in structure.dependence.items()
        if name not in structure.inner and kind != COUPLED
    }
    together = [set(group) & width.keys() for group in (*structure.interactions, *structure.joint)]
    meets = {name: set[str]().union(*(group for group in together if name in group)) - {name} for name in width}
    axes: dict[str, tuple[int, ...]] = {}
    for name in width:
        taken = {axis for other in meets[name] for axis in axes.get(other, ())}
        free = (axis for axis in itertools.count() if axis not in taken)
        axes[name] = tuple(itertools.islice(free, width[name]))
    drawn = {name for name, used in axes.items() if most is not None and max(used) >= most}
    while more := set[str]().union(*(meets[name] for name in drawn)) - drawn:  # a group is drawn as a whole
        drawn |= more
    return {name: used for name, used in axes.items() if name not in drawn}


def at_axes(node: Sequence[Tensor] | Tensor, used: tuple[int, ...]) -> Tensor:
    """The part of a grid's node on a GP site's axes: a scalar, or of several one an output."""
    return node[used[0]] if len(used) == 1 else torch.stack([node[axis] for axis in used])
