"""One run of the guide: what is asked of it, how it answers at GP sites, and what it has met."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Optional, Self, Union

import pyro
from pyro import poutine
from pyro.infer.autoguide import AutoNormalMessenger
from torch import Tensor

from ..approximations.on_sites import SiteGP
from ..gaussians import Drawn, Whole
from ..posterior.drawing import GroupedSite, NodeSite, Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.enumeration import Enumeration
from ..program.handlers import Held, unrecorded
from ..program.traces import free_values, repeatable, sample_sites
from ..warned import warn_once
from .field import basis_of, field_given
from .known import KnownGuide, Rows
from .latents import FieldLatent
from .reading import SiteReading

LARGEST_JOINT = 5000  # function values whose joint draw is slow enough to be told of


@dataclass
class Conditions:
    """What a run's posteriors are conditioned on, of families on sites: drawn and read before it."""

    values: dict[str, Tensor] = field(default_factory=dict)  # of the latents
    readings: dict[str, SiteReading] = field(default_factory=dict)  # of such families, by GP site
    drawn: Optional[Drawn] = None  # the latents that are coupled


@dataclass(eq=False)
class Run(ABC):
    """One run of a guide's program: what is asked of it, and, after :meth:`perform`, what it met."""

    guide: KnownGuide  # whose modules answer
    conditions: Conditions = field(default_factory=Conditions)  # what is held in it
    rows: Rows = field(default_factory=Rows)  # that the call brings
    at_medians: bool = False  # other latents are there; else they are drawn, or held as the conditions say
    # Standardised, of the GP sites that are at quadrature nodes, None for the mean, and not drawn.
    nodes: Optional[Mapping[str, Optional[Tensor]]] = None
    draws_data: bool = True  # data that are not there are drawn; or nothing is, in their place
    sums_out: bool = True  # discrete latents are, that are enumerated; or they come from the model

    processes: dict[str, GaussianProcess] = field(init=False, default_factory=dict)  # of the GP sites it met
    posteriors: dict[str, Any] = field(init=False, default_factory=dict)
    values: dict[str, Tensor] = field(init=False, default_factory=dict)  # of all sites
    trace: poutine.Trace = field(init=False, default_factory=poutine.Trace)
    enumeration: Optional[Enumeration] = field(init=False, default=None)
    drawn: Optional[Drawn] = field(init=False, default=None)  # latents that are coupled
    parts: dict[str, Any] = field(init=False, default_factory=dict)  # of that draw, which sites are about to take

    def perform(self, args: tuple, kwargs: dict[str, Any]) -> Self:
        """Run the model once."""
        guide, core, held = self.guide, self.guide.core, self.conditions
        # Pyro's median() sets its own flag, and then calls the guide.
        self.at_medians, self.drawn = self.at_medians or guide._computing_median, self.drawn or held.drawn
        state = vars(guide)  # by the way round a Pyro module's attributes, which takes long
        before = {"run": guide.run, "_computing_median": guide._computing_median}
        state.update(run=self, _computing_median=self.at_medians)
        if self.sums_out and (core.facts.enumerated or not core.facts.gps):
            self.enumeration = Enumeration()
        try:
            with Held(held.values) if held.values else nullcontext():
                self.values = AutoNormalMessenger.__call__(guide, *args, **kwargs)
        finally:
            state.update(before)
        self.trace = guide.trace
        return self

    @cached_property
    def sites(self) -> dict[str, Any]:
        """The sample sites that it met, by name."""
        return sample_sites(self.trace)

    @cached_property
    def data(self) -> dict[str, Any]:
        """Those that hold data, of the sites that did at the first call."""
        rows = self.guide.core.facts.rows
        return {name: site for name, site in self.sites.items() if site["is_observed"] and name in rows}

    def module(self, name: str, process: GaussianProcess) -> Any:
        """The site's variational module."""
        return self.guide.module_of(name)

    @abstractmethod
    def answer(self, name: str, process: GaussianProcess, module: Any) -> Union[Tensor, SparsePosterior]:
        """The answer at a GP site: a posterior to be drawn from, or a value."""

    def settled(self, name: str, process: GaussianProcess) -> GaussianProcess:
        """A prior; at new inputs a diagonal that depends on the rows is that beside those of training."""
        module = self.guide.corrected_modules().get(name) if self.rows.new else None
        return process if module is None else module.settled(process)

    def free(self, name: str, process: GaussianProcess, module: Any, kind: type[Site]) -> Any:
        """The posterior of a free family, in groups of the inputs that a layer above couples."""
        posterior = module(self.settled(name, process), name, kind)
        if isinstance(posterior, GroupedSite):
            posterior.group, _ = self.guide.core.facts.groups[name]
        return posterior


@dataclass(eq=False)
class Priors(Run):
    """GP sites, and what else is a part of the field, at their priors' means."""

    normal: dict[str, Any] = field(init=False, default_factory=dict)  # priors of these others

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Tensor:
        return process.mean

    def latent_of_field(self, name: str, prior: Any) -> Tensor:
        """The answer at a latent of the field."""
        self.normal[name] = prior
        return prior.mean

    @cached_property
    def bases(self) -> dict[str, Any]:
        """The bases of the GP sites that it met."""
        return {name: basis_of(self.guide, name, self.settled(name, p)) for name, p in self.processes.items()}

    @cached_property
    def whole(self) -> Whole:
        """q(x) under them; made where the first member asks, so that its parameters are seen in that run."""
        missing = [name for name in self.guide.core.facts.intercepts if name not in self.sites]
        if missing:  # test_guide.py::TestState::test_the_state_of_another_family_or_model_is_an_error
            raise ValueError(
                f"the model has no latent site {missing[0]!r}: the guide was initialised, or its state saved, with "
                "another model."
            )
        return field_given(self.guide, self.bases, self.normal, self.trace.nodes)


@dataclass(eq=False)
class Posteriors(Run):
    """Posteriors to be drawn from, at the rows of a call.

    :param joint_up_to: how many function values of a site are drawn jointly.
    """

    joint_up_to: float = math.inf
    _ahead: Any = field(init=False, default=None)  # the run for the hyperparameters, where there is a field

    def perform(self, args: tuple, kwargs: dict[str, Any]) -> Self:
        """Run the model once; where there is a field, once before for the hyperparameters, under which it has its
        posterior.
        """
        if self.guide.core.facts.field:
            rows = Rows(new=self.rows.new)
            ahead = Priors(self.guide, self.conditions, rows, at_medians=self.at_medians, draws_data=False)
            # What handlers hold, they hold here: test_a_handler_may_hold_a_scale.
            with unrecorded(same=True, learns=True):
                ahead.perform(args, kwargs)
            self.drawn, self._ahead = ahead.drawn, ahead
            others = self.guide.facts.latents.keys() - ahead.normal.keys()
            values = {name: value for name, value in free_values(ahead.trace).items() if name in others}
            self.conditions = replace(self.conditions, values=self.conditions.values | values)
        return super().perform(args, kwargs)

    def latent_of_field(self, name: str, prior: Any) -> Any:
        """The answer at a latent of the field: its posterior, or a value."""
        posterior = FieldLatent(prior, self._ahead.whole.share(name))
        return posterior.mean if self.at_medians else posterior

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Union[Tensor, SparsePosterior]:
        num, guide, nodes = process.event_shape[0], self.guide, self.nodes or {}
        joint = self.at_medians or num <= self.joint_up_to
        if self.rows.new and joint and num > LARGEST_JOINT and not self.at_medians:
            warn_once(
                guide.warned,
                "large joint draw",
                name,
                f"{num} values of GP site {name!r} are drawn jointly, at O(N³) time and O(N²) memory a draw; "
                "predict(..., joint=False) draws them independently, in O(N).",
                stacklevel=3,
            )
        kind = NodeSite if name in nodes else Site if joint else guide.kind_of_draws(name)
        posterior = self.posteriors[name] = self._at(name, process, module, kind)
        if name in nodes:
            return posterior.at_node(nodes[name])
        return posterior.mean if self.at_medians else posterior

    def _at(self, name: str, process: GaussianProcess, module: Any, kind: type[Site]) -> Any:
        if self._ahead is not None:
            return kind(self.settled(name, process), self._ahead.bases[name], self._ahead.whole.share(name), name)
        if not isinstance(module, SiteGP):
            return self.free(name, process, module, kind)
        reading = self.conditions.readings.get(name)
        sites, alone = (None, False) if reading is None else (reading.sites, reading.alone)
        posterior = module(process, name, kind, sites, alone, not self.rows.same)
        if self.rows.same and self.rows.learns and reading is not None and not reading.direct:
            # where the next step goes on
            module.sites.progress["marginals"] = posterior.mean.detach(), posterior.variance.detach()
        return posterior


def probed(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Posteriors:
    """A run with the latents at their medians and the same random numbers, with its graph."""
    with repeatable(guide.like), poutine.block(), pyro.validation_enabled(False):
        return Posteriors(guide, rows=Rows(same=False), at_medians=True).perform(args, kwargs)
