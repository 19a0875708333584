"""Which function values meet in densities, and so take axes of their own of a product grid."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Optional

import numpy as np
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
    width = {}
    for name, kind in structure.dependence.items():
        if name in structure.inner or kind == COUPLED:
            continue
        outputs = int(np.prod(structure.gps[name]["batch_shape"], dtype=int))
        width[name] = outputs if kind == DATAWISE else 1
    meets: dict[str, set[str]] = {name: set() for name in width}
    for f, g in structure.interactions:
        if f in width and g in width:
            meets[f].add(g)
            meets[g].add(f)
    for group in structure.joint:
        for name in width.keys() & set(group):
            meets[name] |= (width.keys() & set(group)) - {name}
    axes: dict[str, tuple[int, ...]] = {}
    for name in width:
        taken = {axis for other in meets[name] if other in axes for axis in axes[other]}
        free = (axis for axis in itertools.count() if axis not in taken)
        axes[name] = tuple(itertools.islice(free, width[name]))
    too_many = {name for name, used in axes.items() if most is not None and max(used) >= most}
    while True:  # a group is drawn as a whole
        spread = {other for name in too_many for other in meets[name]} - too_many
        if not spread:
            return {name: used for name, used in axes.items() if name not in too_many}
        too_many |= spread


def at_axes(node: Sequence[Tensor] | Tensor, used: tuple[int, ...]) -> Tensor:
    """The part of a grid's node on a GP site's axes: a scalar, or of several one an output."""
    return node[used[0]] if len(used) == 1 else torch.stack([node[axis] for axis in used])
