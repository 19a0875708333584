"""What a step does about expectations: of each density, by what way its own is found, chosen once for a program.

    bound = Σ E_q[log p(y | f, ·)] − Σ KL

A :class:`Plan` is made where a structure is new, of closed forms, links and the kind of posterior; a step runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, Optional

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
from ..program.reader import normal_nodes
from ..program.structure import MAX_AXES
from ..program.traces import RandomState
from ..warned import warn_once
from .expected import Grid, Inputs, Ran, log_density_minus_kl, require_shown
from .field import bound_of_field


class Plan(ABC):
    """How the bound of one program is found.

    :param forms: which densities have their expectation in closed form.
    """

    way: int = 0  # in which terms are found at all nodes, of those that OfMarginals has

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
        core.plan = _PLANS.get(type(guide.q), OfMarginals)(guide, forms)
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


class OfMarginals(Plan):
    """The bound over marginals of GP sites: closed forms where there are, and a product grid of nodes for the rest."""

    def __init__(self, guide: AutoSparseGP, forms: ClosedForms) -> None:
        super().__init__(guide, forms)
        # A distribution that brings its expectation checks its labels: test_robust_max.py::test_labels.
        self.checks = any(hasattr(kind, "normal_parameter") for kind in forms.kinds.values())

    def _way(self, name: str) -> str:
        if name in self.forms.sites:
            return "in closed form"
        gps, axes = self.forms.rest.densities[name].gps, self.forms.axes
        left = "in closed form by" if name in self.forms.given else "by draws of"
        ways = {left: [gp for gp in gps if gp not in axes], "at nodes of": [gp for gp in gps if gp in axes]}
        return ", ".join(f"{way} {' and '.join(names)}" for way, names in ways.items() if names)

    def bound(self, inputs: Inputs) -> Tensor:
        guide, forms = inputs.guide, self.forms
        if forms.drawn:
            names = ", ".join(forms.drawn)
            warn_once(
                guide.warned,
                "integrated by draws",
                names,
                f"GP sites {names} meet in densities of more than {MAX_AXES} function values: these are integrated by "
                "Monte Carlo, with one draw per particle. Take more particles, num_particles=10.",
                stacklevel=6,
            )
        grid = Grid(inputs, forms)
        if not forms.rows + forms.functions:
            return self._rest(grid, None)
        with nullcontext() if self.checks else dist.validation_enabled(False):
            start = RandomState(guide.like)
            ran = grid.run()
            is_alike = forms.hold(ran[0].nodes)
            total = grid.expectations(*ran) if is_alike else None
        if total is not None:
            return total + self._rest(grid, ran)
        start.restore()
        # A second run was of rows of its own, say; or a density is of another kind now: it is learned anew.
        guide.core.forms = forms.opened(guide.facts) if is_alike else None
        return plan_of(guide, inputs.args, inputs.kwargs).bound(inputs)

    def _rest(self, grid: Grid, ran: Optional[Ran]) -> Tensor:
        """The bound's other terms, summed over the product grid: Σⱼ Σₖ wⱼ wₖ ℓ(tⱼ, tₖ)."""
        if not self.forms.rest.gps:
            return log_density_minus_kl(*(ran or grid.run())[:2], self.forms.sites)
        if not self.forms.num_axes:  # there are draws of function values
            return grid.once() if ran is None else grid.held(*ran)()
        # Weights add up to 1, so that what has no nodes stays.
        nodes, weights = normal_nodes(self.forms.num_axes, grid.guide.like, grid.inputs.num_nodes)
        values = self._values(grid, ran, nodes)
        return values @ weights.to(values.dtype)  # priors of Python numbers have the default dtype

    def _values(self, grid: Grid, ran: Optional[Ran], nodes: Tensor) -> Tensor:
        """The bound's terms at the product grid's nodes, ``(K ** num_axes, num_axes)``."""
        # A step's graph may show all, by Grid.direct. Else the program runs once, mapped. torch.func.vmap refuses some:
        # where it does so before f, the guide's run and the program's are apart, and only this one is mapped, with all
        # that does not depend on nodes held; where after f, it runs once for each node.
        like = grid.guide.like

        def direct() -> Tensor:
            require_shown(torch.is_grad_enabled())
            with dist.validation_enabled(False):
                return grid.direct(*(ran or grid.run())[:2])

        def once() -> Tensor:
            with pyro.validation_enabled(False):
                return vmapped(grid.once, *nodes.T, randomness="same")

        def held() -> Tensor:
            terms, state = grid.held(*(ran or grid.run())), RandomState(like)
            (values,) = mapped(lambda node: (terms(*node),), nodes)
            if state.has_moved:
                raise Unsupported("with all values held, the model drew random numbers by itself, others than before")
            return values

        ways = [direct, held] if ran else [direct, once, held]
        for way in range(self.way, len(ways) - 1):
            state = RandomState(like)
            with attempt():
                return ways[way]()
            state.restore()
            if torch.is_grad_enabled():  # else a graph shows nothing, and a step's may
                self.way = way + 1
        return held()


_PLANS: dict[type, type[Plan]] = {Joint: OfPredictors}
