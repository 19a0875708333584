"""In which function values the parameters of declared densities are affine: where a closed form may be used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from torch import Tensor

from .bare import bare
from .declared import ExpectedLogProb, is_affine, is_normal, parameter_of
from .dependence import Owners, kept_buffers
from .traces import require_again

__all__ = ["DENSITY", "OTHER", "THETA", "Declared", "Key", "Values", "closed_sites"]

DENSITY, THETA, OTHER = "density", "parameter", "other"  # what a program shows of a site: kinds of keys

Values = dict[str, Tensor]
Key = tuple[str, ...]


class Declared:
    """The declared densities of a program: in which GP sites' values their parameters are affine, and nothing else of
    them moves.
    """

    def __init__(
        self,
        held: Callable[[Values], poutine.Trace],
        base: Values,
        steps: Values,
        owners: Mapping[str, Mapping[Any, Owners]],
        moved: Mapping[str, Mapping[float, Mapping[Any, Tensor]]],
        sites: list[str],
    ) -> None:
        self.held, self.base, self.steps = held, base, steps
        self.owners, self.moved, self.sites = owners, moved, sites
        self.kinds: dict[str, Any] = {}
        self._slopes: dict[tuple[str, ...], dict[str, Values]] = {}

    def why_not(self, site: str, names: tuple[str, ...]) -> Optional[str]:
        """Why a site's density is not declared around an affine function of these GP sites' values; or ``None``."""
        theta = (THETA, site)
        touching = [name for name in names if self.owners[name][DENSITY, site].touched.any()]
        slopes = self._at_nan(names).get(site)
        for name in touching:
            at = {move: shown[theta] for move, shown in self.moved[name].items()}
            change = _weighted(at[1.0]) - _weighted(at[0.0])
            size = _weighted((at[1.0] - at[0.0]).abs())
            # θ = f + bf² has slopes 1 + 2bf, which NaN shows at b = 0, too; what .detach() hides they leave out.
            known = None if slopes is None else (slopes[name] * self.steps[name]).sum()
            tolerance = 1e-6 if change.dtype == torch.float64 else 1e-2
            if known is None or not (known - change).abs() <= tolerance * size or not is_affine(at):
                return "this is not an affine function of function values"
        if any(self.owners[name][key].touched.any() for name in touching for key in self._others(site, name)):
            return "another of its parameters, or its scale or mask, depends on function values too"
        return None

    def _others(self, site: str, name: str) -> list[Key]:
        return [key for key in self.owners[name] if key[0] == OTHER and key[1] == site]

    def _at_nan(self, names: tuple[str, ...]) -> dict[str, Values]:
        """The slopes of declared parameters, weighted and summed, by values that are NaN: none of an affine function's
        is, whose slopes are not made of its values.
        """
        if names not in self._slopes:
            leaves = {
                name: (torch.full_like(value, torch.nan) if name in names else value.clone()).requires_grad_()
                for name, value in self.base.items()
            }
            found: dict[str, Values] = {}
            run = partial(self._slopes_of, leaves)
            try:
                found = run()
            except Exception as error:  # of a program that raises at NaN, or has no gradient: the general path will do
                require_again(error, run, next(iter(leaves.values())))
            self._slopes[names] = found
        return self._slopes[names]

    def _slopes_of(self, leaves: Values) -> dict[str, Values]:
        found: dict[str, Values] = {}
        values = list(leaves.values())
        with torch.enable_grad(), pyro.validation_enabled(False), kept_buffers():
            nodes: Any = self.held(leaves).nodes
            for site in self.sites:
                self.kinds[site] = bare(nodes[site]["fn"])
                total = _weighted(parameter_of(nodes[site]["fn"]))
                slopes: Sequence[Tensor] = [torch.zeros_like(value) for value in values]
                if total.requires_grad:
                    slopes = torch.autograd.grad(
                        total, values, retain_graph=True, allow_unused=True, materialize_grads=True
                    )
                found[site] = dict(zip(leaves, slopes))
        return found

    def quadratic_in(self, name: str, sites: list[str]) -> bool:
        """Whether all these densities are normal around affine functions of a GP site's values."""
        return bool(sites) and all(
            site in self.sites and self.why_not(site, (name,)) is None and is_normal(self.kinds[site]) for site in sites
        )

    def shared(self, site: str, names: Iterable[str]) -> Optional[str]:
        """Why the entries of a term of a parameter are not independent; or ``None``."""
        functions = 0
        owner: Optional[Tensor] = None  # of each entry: its function, of which a GP site has one for each output
        for name in names:
            own = self.owners[name][THETA, site]
            if (own.touched & ((own.rows < 0) | (own.outputs < 0))).any():
                return "an entry depends on several function values"
            if owner is not None and ((owner >= 0) & own.touched).any():
                return "an entry depends on values of several GP sites"
            before = torch.full_like(own.rows, -1) if owner is None else owner
            owner = torch.where(own.touched, functions + own.outputs, before)
            functions += self.base[name][..., 0].numel()
        event_dim = 0 if owner is None else owner.dim() - len(self.kinds[site].batch_shape)
        if owner is not None and event_dim:
            ordered = owner.flatten(-event_dim).sort(-1).values
            if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
                return "entries of one term depend on one another, being values of the same function"
        return None


def closed_sites(
    inner: Collection[str], company: Callable[[str], list[str]], looked: Declared
) -> tuple[list[str], dict[str, tuple[Any, str]]]:
    """The sites whose expectation is in closed form; and those that bring one in vain, with the reason."""
    outer = tuple(name for name in looked.owners if name not in inner)
    closed: list[str] = []
    unused: dict[str, tuple[Any, str]] = {}
    for site in looked.sites:
        touching = [name for name in outer if looked.owners[name][DENSITY, site].touched.any()]
        if not touching:
            continue
        why = looked.why_not(site, outer)
        kind = looked.kinds.get(site)
        entries = None if kind is None else parameter_of(kind).dim() - len(kind.batch_shape)
        if why is None and entries and not is_normal(kind):
            why = looked.shared(site, touching)
            if why is None and any(len(company(name)) > 1 for name in touching):
                why = f"its GP sites {sorted(touching)} have one posterior, or have it with others that they meet"
        if why is None:
            closed.append(site)
        elif isinstance(kind, ExpectedLogProb):
            unused[site] = type(kind), why
    return closed, unused


def _weighted(theta: Tensor) -> Tensor:
    weights = torch.linspace(1, 2, theta.numel(), dtype=theta.dtype, device=theta.device)
    return (weights * theta.reshape(-1)).sum()
