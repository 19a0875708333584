"""Sums over discrete latents of products over plates, in log space: plated variable elimination.

A factor is a log density with a dimension for each discrete latent that it depends on, and one for each of its plates.
Latents are summed out from the innermost plates outwards (Obermeyer et al., 2019): those of one set of plates at once,

log Σ_z exp Σ_factors Σ_plates that are not z's log p,

for each element of their plates. The rows of a plate may also belong to a plate that they do not stand in, by a number
for each: z[group]. They are then added up by that number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..numerics.shapes import broadcast_shapes

__all__ = ["PLATES", "Factor", "IntractableError", "contract", "left_over", "padded", "reduced", "spread"]

PLATES = 4  # dimensions from the right that are left to plates

Key = Any  # a plate's name and, of one that is iterated over, the number it is at
Plates = Mapping[Key, Any]  # Pyro's frames


class IntractableError(ValueError):
    """A sum whose terms have no order in which they can be taken."""


@dataclass(frozen=True)
class Factor:
    """A log density.

    :param latents: the dimensions of the discrete latents it depends on, from the right.
    :param plates: those it has a dimension of.
    :param belongs: for a plate in which it does not stand, by its key: the plate whose rows belong to elements of it,
        and the number of each row's, ``(N,)``.
    :param evaluate: gives it, the latents' dimensions in front of the plates'.
    """

    latents: frozenset[int]
    plates: Plates
    belongs: Mapping[Key, tuple[Key, Tensor, Any]]
    evaluate: Callable[[], Tensor]


def padded(log_density: Tensor) -> Tensor:
    """With all plates' dimensions."""
    return log_density.reshape(*[1] * max(0, PLATES - log_density.dim()), *log_density.shape)


def contract(factors: Sequence[Factor], latents: Mapping[int, frozenset[Key]]) -> list[Factor]:
    """The factors that are left when all discrete latents are summed out.

    :param latents: the plates of each, by its dimension.
    :raises IntractableError: if there is no order of summing.
    """
    left = list(factors)
    while True:
        dims = frozenset().union(*(factor.latents for factor in left))
        if not dims:
            return left
        sets = sorted({latents[dim] for dim in dims}, key=len, reverse=True)
        for plates in sets:
            own = frozenset(dim for dim in dims if latents[dim] == plates)
            touched = [factor for factor in left if factor.latents & own]
            if all(_can_be_reduced(factor, plates, own, latents) for factor in touched):
                break
        else:
            raise IntractableError
        left = [factor for factor in left if not factor.latents & own]
        left.append(_summed([reduced(factor, plates) for factor in touched], own))


def left_over(factors: Sequence[Factor]) -> frozenset[Key]:
    """The plates that all factors have."""
    return frozenset.intersection(*(frozenset(factor.plates) for factor in factors))


def _can_be_reduced(
    factor: Factor, plates: frozenset[Key], own: frozenset[int], latents: Mapping[int, frozenset[Key]]
) -> bool:
    """Whether a factor's product over all other plates is of latents that stand outside of these."""
    if any(key not in factor.plates and key not in factor.belongs for key in plates):
        return False
    gone = set(factor.plates) - plates
    gone |= {key for key, (rows, _, _) in factor.belongs.items() if rows in gone and key not in plates}
    return not any(latents[dim] & gone for dim in factor.latents - own)


def _summed(factors: Sequence[Factor], own: frozenset[int]) -> Factor:
    dims = [-dim for dim in own]

    def evaluate() -> Tensor:
        total = factors[0].evaluate()
        for factor in factors[1:]:
            total = total + factor.evaluate()
        return total.logsumexp(dims, keepdim=True)

    found = frozenset().union(*(factor.latents for factor in factors)) - own
    plates = {key: frame for factor in factors for key, frame in factor.plates.items()}
    belongs = {key: row for factor in factors for key, row in factor.belongs.items()}
    return Factor(found, plates, belongs, evaluate)


def reduced(factor: Factor, plates: Collection[Key]) -> Factor:
    """Its product over all plates but these, in which its rows may stand by their numbers."""
    added = {key: factor.belongs[key] for key in plates if key not in factor.plates}
    by_number = {rows for rows, _, _ in added.values()}
    gone = [
        frame for key, frame in factor.plates.items() if key not in plates and key not in by_number and frame.vectorized
    ]
    if not added and len(factor.plates) == len(plates):
        return factor

    def evaluate() -> Tensor:
        total = padded(factor.evaluate())
        for frame in gone:
            total = _expanded(total, frame).sum(frame.dim, keepdim=True)
        for rows, index, frame in added.values():
            row = factor.plates[rows]
            total = _expanded(total, row)
            shape = list(total.shape)
            shape[row.dim] = frame.size
            total = total.new_zeros(shape).index_add(row.dim, index, total).transpose(row.dim, frame.dim)
        return total

    left = {key: frame for key, frame in factor.plates.items() if key in plates}
    left |= {key: frame for key, (_, _, frame) in added.items()}
    belongs = {key: row for key, row in factor.belongs.items() if row[0] in left}
    return Factor(factor.latents, left, belongs, evaluate)


def _expanded(total: Tensor, frame: Any) -> Tensor:
    """With all rows of a plate."""
    shape = list(total.shape)
    shape[frame.dim] = frame.size
    return total.expand(shape)


def spread(total: Tensor, factor: Factor, plates: Collection[Key], shape: Sequence[int]) -> Tensor:
    """What elements of ``plates`` have, at each row of a factor: the way back of :func:`reduced`.

    :param shape: of all plates' dimensions, with the factor's rows.
    """
    for key in plates:
        if key not in factor.plates:
            rows, index, frame = factor.belongs[key]
            row = factor.plates[rows]
            total = total.index_select(frame.dim, index).transpose(row.dim, frame.dim)
    return total.expand(broadcast_shapes(total.shape, tuple(shape)))
