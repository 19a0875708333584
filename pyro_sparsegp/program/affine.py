"""In which function values the parameters of declared densities are affine: where a closed form may be used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from torch import Tensor

from .declared import ExpectedLogProb, is_normal, parameter_of
from .dependence import Owners, kept_buffers
from .traces import bare

__all__ = ["DENSITY", "MOVES", "OTHER", "THETA", "Declared", "Key", "Values", "is_affine"]

DENSITY, THETA, OTHER = "density", "parameter", "other"  # what a program shows of a site: kinds of keys
# In prior deviations: values that are cut off come to an end by the larger ones.
MOVES = (1.0, -1.0, 30.0, -30.0)

Values = dict[str, Tensor]
Key = tuple[str, ...]


class Declared:
    """The declared densities of a program: in which GP sites' values their parameters are affine, and nothing else of
    them moves.

    :param held: runs the program with GP sites at values.
    :param base: such values; ``steps`` are how far they were moved.
    :param owners: of the entries of what the program shows, by GP site.
    :param moved: what it shows after moves, by GP site and the number of steps.
    """

    def __init__(
        self,
        held: Callable[[Values], poutine.Trace],
        base: Values,
        steps: Values,
        owners: Mapping[str, Mapping[Any, Owners]],
        moved: Mapping[str, Mapping[float, Mapping[Any, Tensor]]],
    ) -> None:
        self.held, self.base, self.steps, self.owners, self.moved = held, base, steps, owners, moved
        self.sites = [key[1] for key in next(iter(owners.values())) if key[0] == THETA]
        self.kinds: dict[str, Any] = {}
        self._slopes: dict[tuple[str, ...], dict[str, Values]] = {}

    def touching(self, site: str, names: Iterable[str]) -> list[str]:
        """Those GP sites that a site's density depends on."""
        return [name for name in names if self.owners[name][DENSITY, site].touched.any()]

    def why_not(self, site: str, names: tuple[str, ...]) -> Optional[str]:
        """Why a site's density is not declared around an affine function of these GP sites' values; or ``None``."""
        if names not in self._slopes:
            self._slopes[names] = self._at_nan(names)
        slopes = self._slopes[names].get(site)
        for name in self.touching(site, names):
            at = {move: shown[THETA, site] for move, shown in self.moved[name].items()}
            # θ = f + bf² has slopes 1 + 2bf, which NaN shows at b = 0, too; what .detach() hides they leave out.
            if slopes is None or not (is_affine(at) and _has_slope(at, (slopes[name] * self.steps[name]).sum())):
                return "this is not an affine function of function values"
            others = [key for key in self.owners[name] if key[:2] == (OTHER, site)]
            if any(self.owners[name][key].touched.any() for key in others):
                return "another of its parameters, or its scale or mask, depends on function values too"
        return None

    def _at_nan(self, names: tuple[str, ...]) -> dict[str, Values]:
        """The slopes of declared parameters, weighted and summed, by values that are NaN: none of an affine function's
        is, whose slopes are not made of its values.
        """
        leaves = {
            name: (torch.full_like(value, torch.nan) if name in names else value.clone()).requires_grad_()
            for name, value in self.base.items()
        }
        found: dict[str, Values] = {}
        values = list(leaves.values())
        try:
            with torch.enable_grad(), pyro.validation_enabled(False), kept_buffers():
                nodes: Any = self.held(leaves).nodes
                for site in self.sites:
                    self.kinds[site] = bare(nodes[site]["fn"])
                    total = _weighted(parameter_of(nodes[site]["fn"])) + 0 * sum(value.sum() for value in values)
                    found[site] = dict(zip(leaves, torch.autograd.grad(total, values, retain_graph=True)))
        except Exception:  # of a program that raises at NaN, or has no gradient: the general path will do
            return {}
        return found

    def quadratic_in(self, name: str, sites: Iterable[str]) -> bool:
        """Whether all densities of these sites that depend on a GP site are normal around affine functions of it."""
        own = [site for site in sites if self.touching(site, [name])]
        return bool(own) and all(
            site in self.sites and self.why_not(site, (name,)) is None and is_normal(self.kinds[site]) for site in own
        )

    def _of_own_functions(self, site: str, names: Iterable[str]) -> bool:
        """Whether each entry of a term of a parameter has one function, and no other entry of that term has it."""
        found, functions = [], 0
        for name in names:
            own = self.owners[name][THETA, site]
            if (own.touched & ((own.rows < 0) | (own.outputs < 0))).any():
                return False
            found.append(torch.where(own.touched, functions + own.outputs, -1))
            functions += self.base[name][..., 0].numel()  # of a GP site one for each output
        owner = torch.stack(found)
        ordered = owner.amax(0).flatten(len(self.kinds[site].batch_shape)).sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        return not (twice.any() or ((owner >= 0).sum(0) > 1).any())

    def closed(
        self, outer: tuple[str, ...], group: Callable[[str], Collection[str]]
    ) -> tuple[list[str], dict[str, tuple[Any, str]]]:
        """The sites whose expectation is in closed form; and those that bring one in vain, with the reason.

        :param outer: the GP sites that enter no other; ``group``: those of one posterior with it.
        """
        closed: list[str] = []
        unused: dict[str, tuple[Any, str]] = {}
        for site in self.sites:
            touching = self.touching(site, outer)
            if not touching:
                continue
            why = self.why_not(site, outer)
            kind: Any = self.kinds.get(site)
            several = why is None and not is_normal(kind) and parameter_of(kind).dim() > len(kind.batch_shape)
            shared = several and any(len(group(name)) > 1 for name in touching)
            if shared or (several and not self._of_own_functions(site, touching)):
                why = "entries of one term are not independent: they share functions, or these a posterior"
            if why is None:
                closed.append(site)
            elif isinstance(kind, ExpectedLogProb):
                unused[site] = type(kind), why
        return closed, unused


def _weighted(theta: Tensor) -> Tensor:
    weights = torch.linspace(1, 2, theta.numel(), dtype=theta.dtype, device=theta.device)
    return (weights * theta.reshape(-1)).sum()


def _has_slope(at: Mapping[float, Tensor], slope: Tensor) -> bool:
    """Whether a parameter's weighted sum moves by its slope along the move, which is NaN where values make it."""
    one = at[1.0] - at[0.0]
    tolerance = 1e-6 if one.dtype == torch.float64 else 1e-2
    return bool((slope - _weighted(one)).abs() <= tolerance * _weighted(one.abs()))


def is_affine(at: Mapping[float, Tensor]) -> bool:
    """Whether a parameter is an affine function of what was moved.

    :param at: it after so many moves, of :data:`MOVES`, and at 0.
    """
    middle, one = at[0.0], at[1.0] - at[0.0]
    relative, eps = 1e-7 if middle.dtype == torch.float64 else 1e-3, torch.finfo(middle.dtype).eps
    for size, there in at.items():
        tolerance = abs(size) * relative * one.abs() + eps * (
            100 * (middle.abs() + there.abs()) + 30 * abs(size) * one.abs().mean()
        )
        if not ((there - middle - size * one).abs() <= tolerance).all():
            return False
    return True
