"""What a step does about expectations: of each density, by what way its own is found, chosen once for a program.

    bound = Σ E_q[log p(y | f, ·)] − Σ KL

A :class:`Plan` is made where a structure is new, of closed forms, links and the kind of posterior; a step runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..guide import AutoSparseGP
from ..guide.first_call import closed_forms_of
from ..guide.posteriors.joint import Joint
from ..program.asking import Unsupported, attempt
from ..program.draws import mapped, vmapped
from ..program.explore import ClosedForms
from ..program.structure import MAX_AXES
from ..program.traces import RandomState
from ..warned import warn_once
from .expected import Grid, Inputs, Ran, log_density_minus_kl, require_shown
from .field import bound_of_field


class Plan(ABC):
    """How the bound of one program is found.

    :param forms: which densities have their expectation in closed form.
    """

    way: int = 0  # in which terms are found at all nodes, of those of OfMarginals.ways

    def __init__(self, guide: AutoSparseGP, forms: ClosedForms) -> None:
        self.forms, self.joint = forms, guide.joint

    def __str__(self) -> str:
        """A line for each density."""
        return "\n".join(f"{name}: {self._way(name)}" for name in self.forms.rest.downstream)

    def is_of(self, guide: AutoSparseGP) -> bool:
        """Whether it is a plan of what the guide knows now."""
        return guide.core.forms is self.forms and guide.joint is self.joint

    @abstractmethod
    def _way(self, name: str) -> str:
        """How a density's expectation is found, in words."""

    @abstractmethod
    def bound(self, inputs: Inputs) -> Tensor:
        """The bound there, in nats."""


def plan_of(guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """The plan of a guide's program, which is made where there is none."""
    core = guide.core
    if core.plan is None or not core.plan.is_of(guide):
        forms = core.forms or closed_forms_of(guide, args, kwargs)
        apart = InClosedForm if forms.rows + forms.functions else OfMarginals
        core.plan = (OfPredictors if isinstance(guide.q, Joint) else apart)(guide, forms)
    return core.plan


class OfPredictors(Plan):
    """The bound of one joint Gaussian: over linear predictors, and over points where a density has none."""

    def _way(self, name: str) -> str:
        links = self.joint.links.get(name)
        if links is None:
            return "the mean over points of the joint posterior"
        parts = [key if link == "identity" else f"{link} of {key}" for key, link in links.items()]
        return f"over a normal linear predictor, {' and '.join(parts)}"

    def bound(self, inputs: Inputs) -> Tensor:
        return bound_of_field(inputs)


AtMeans = Callable[[], Ran]  # a run with GP sites at their means


def _shown(grid: Grid, run: AtMeans) -> Tensor:
    """A step's graph may show all."""
    require_shown(torch.is_grad_enabled())
    with dist.validation_enabled(False):
        return grid.direct(*run()[:2])


def _mapped(grid: Grid, run: AtMeans) -> Tensor:
    """The guide's run and the program's, mapped once."""
    with pyro.validation_enabled(False):
        return grid.mean(vmapped(grid.once, *grid.nodes[0].T, randomness="same"))


def _held(grid: Grid, run: AtMeans) -> Tensor:
    """The program's run alone, with all that does not depend on nodes held, mapped or once for each node."""
    terms, state = grid.held(*run()), RandomState(grid.guide.like)
    (values,) = mapped(lambda node: (terms(*node),), grid.nodes[0])
    if state.has_moved:
        raise Unsupported("with all values held, the model drew random numbers by itself, others than before")
    return grid.mean(values)


class OfMarginals(Plan):
    """The bound over marginals of GP sites, at the nodes of a product grid."""

    # What finds the mean over nodes, each where those before do not: torch.func.vmap refuses some programs.
    ways: tuple[Callable[[Grid, AtMeans], Tensor], ...] = (_shown, _mapped, _held)

    def _way(self, name: str) -> str:
        gps, axes = self.forms.rest.densities[name].gps, self.forms.axes
        left = "in closed form by" if name in self.forms.given else "by draws of"
        ways = {left: [gp for gp in gps if gp not in axes], "at nodes of": [gp for gp in gps if gp in axes]}
        return ", ".join(f"{way} {' and '.join(names)}" for way, names in ways.items() if names)

    def bound(self, inputs: Inputs) -> Tensor:
        if self.forms.drawn:
            names = ", ".join(self.forms.drawn)
            warn_once(
                inputs.guide.warned,
                "integrated by draws",
                names,
                f"GP sites {names} meet in densities of more than {MAX_AXES} function values: these are integrated by "
                "Monte Carlo, with one draw per particle. Take more particles, num_particles=10.",
                stacklevel=6,
            )
        return self._bound(Grid(inputs, self.forms))

    def _bound(self, grid: Grid) -> Tensor:
        return self._at_nodes(grid, grid.run) if self.forms.num_axes else grid.once()

    def _at_nodes(self, grid: Grid, run: AtMeans) -> Tensor:
        """Terms summed over nodes."""
        *ways, last = self.ways[self.way :]
        for way in ways:
            state = RandomState(grid.guide.like)
            with attempt():
                return way(grid, run)
            state.restore()
            if torch.is_grad_enabled():  # else a graph shows nothing, and a step's may
                self.way += 1
        return last(grid, run)


class InClosedForm(OfMarginals):
    """The bound over marginals of GP sites: closed forms where there are, and nodes for the rest."""

    ways = (_shown, _held)

    def __init__(self, guide: AutoSparseGP, forms: ClosedForms) -> None:
        super().__init__(guide, forms)
        # A distribution that brings its expectation checks its labels: test_robust_max.py::test_labels.
        self.checks = any(hasattr(kind, "normal_parameter") for kind in forms.kinds.values())

    def _way(self, name: str) -> str:
        return "in closed form" if name in self.forms.sites else super()._way(name)

    def _bound(self, grid: Grid) -> Tensor:
        inputs, guide, forms = grid.inputs, grid.guide, self.forms
        with nullcontext() if self.checks else dist.validation_enabled(False):
            start = RandomState(guide.like)
            ran = grid.run()
            is_alike, after = forms.hold(ran[0].nodes), RandomState(guide.like)
            total = grid.expectations(*ran) if is_alike else torch.zeros(())
        if is_alike and not after.has_moved:
            return total + self._rest(grid, ran)
        start.restore()
        # A second run was of rows of its own, say; or a density is of another kind now: it is learned anew.
        guide.core.forms = forms.opened(guide.facts) if is_alike else None
        return plan_of(guide, inputs.args, inputs.kwargs).bound(inputs)

    def _rest(self, grid: Grid, ran: Ran) -> Tensor:
        """The bound's other terms."""
        if not self.forms.rest.gps:
            return log_density_minus_kl(*ran[:2], self.forms.sites)
        # Without nodes there are draws of function values.
        return self._at_nodes(grid, lambda: ran) if self.forms.num_axes else grid.held(*ran)()
