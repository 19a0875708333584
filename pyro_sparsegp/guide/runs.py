"""One run of the guide: what is asked of it, how it answers at GP sites, and what it has met."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Optional, Union

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..approximations.on_sites import SiteGP
from ..gaussians import Drawn, Part, Shared, Whole
from ..posterior.drawing import GroupedSite, NodeSite, RowSite, Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.checks import Probe
from ..program.dependence import NONE
from ..program.enumeration import Enumeration
from ..program.handlers import Held, held_trace, unrecorded
from ..program.traces import all_sites, free_values, repeatable
from ..warned import warn_once
from .field import basis_of, field_given
from .field_latent import FieldLatent
from .known import KnownGuide, Rows, require_inputs
from .reading import SiteReading

_WAVES = 16  # of a function that stands for a prior's draw at many rows
_MANY = 4096  # rows, of which means are computed at some only where they show what depends on what
LARGEST_JOINT = 5000  # function values whose joint draw is slow enough to be told of


@dataclass
class Conditions:
    """What a run's posteriors are conditioned on, of families on sites: drawn and read before it.

    :param values: of the latents, and of GP sites that enter others.
    :param draws: of these GP sites, the posteriors they were drawn from.
    :param readings: of the sites of such families.
    :param drawn: the latents that are coupled.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, SparsePosterior] = field(default_factory=dict)
    readings: list[SiteReading] = field(default_factory=list)
    drawn: Optional[Drawn] = None

    def of(self, name: str) -> Optional[SiteReading]:
        """The reading of one GP site."""
        return next((reading for reading in self.readings if reading.name == name), None)


class BySite(dict[str, SparsePosterior]):
    """A dict of posteriors; a missing key raises KeyError listing the GP sites."""

    def __missing__(self, name: str) -> SparsePosterior:
        raise KeyError(f"{name!r} is no GP site of the model; its GP sites are {sorted(self)}")


class Run(ABC):
    """One run of a guide's program.

    :param guide: whose modules answer.
    :param conditions: what is held in it.

    After :meth:`perform`, ``processes`` and ``posteriors`` are those of the GP sites it met, by name, ``values`` those
    of all sites, and ``trace`` is its trace.
    """

    at_medians = False  # other latents; else they are drawn, or held as the conditions say
    draws_data = True  # that are not there; or nothing is drawn in their place
    draws_left_out = True  # values that obs_mask= leaves out come from the model
    sums_out = True  # discrete latents that are enumerated; or they come from the model
    own_rows = True  # latents of single rows are those of the rows that a plate holds; or they come from the model
    is_prediction = False  # at new inputs
    takes_field = False  # that its answers are made of
    new_inputs = False  # its rows are not those of training

    def __init__(self, guide: KnownGuide, conditions: Optional[Conditions] = None) -> None:
        self.guide, self.conditions = guide, conditions or Conditions()
        self.processes: dict[str, GaussianProcess] = {}
        self.posteriors: dict[str, Any] = {}
        self.drawn = self.conditions.drawn  # latents that are coupled
        self.enumeration: Optional[Enumeration] = None
        self.trace = poutine.Trace()
        self.values: dict[str, Tensor] = {}
        self.parts: dict[str, Any] = {}  # of that draw, which sites are about to take
        self._wholes: dict[Shared, Whole] = {}  # posteriors of several sites
        self._ahead: Optional[Priors] = None
        self._field: Optional[Whole] = None

    def perform(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Run the model once."""
        if self.takes_field and self.guide.core.facts.field:
            self._meet_field(args, kwargs)
        guide, held = self.guide, self.conditions
        self.at_medians = self.at_medians or guide._computing_median
        state = vars(guide)  # by the way round a Pyro module's attributes, which takes long
        before = {"run": guide.run, "_computing_median": guide._computing_median}
        state.update(run=self, _computing_median=self.at_medians)
        if self.sums_out and (not guide.core.known or guide.core.facts.enumerated):
            self.enumeration = Enumeration()
        calls = guide.core.calls
        try:
            with (
                nullcontext() if calls is None else calls.noted(),
                Held(held.values, held.draws) if held.values else nullcontext(),
            ):
                draws: dict[str, Tensor] = AutoNormalMessenger.__call__(guide, *args, **kwargs)
        finally:
            state.update(before)
            if self.enumeration is not None:
                self.enumeration.forget()
        self.trace, self.values = guide.trace, draws
        return draws

    def _meet_field(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Draw the hyperparameters ahead, under which a field has its posterior."""
        ahead = Priors(self.guide, self.conditions, self.at_medians)
        ahead.draws_data, ahead.new_inputs = False, self.new_inputs
        with unrecorded(same=True, learns=True):  # what handlers hold, they hold here: test_a_handler_may_hold_a_scale
            ahead.perform(args, kwargs)
        self.drawn, self._ahead = ahead.drawn, ahead
        values = {name: value for name, value in free_values(ahead.trace).items() if name in ahead.others}
        self.conditions = replace(self.conditions, values={**self.conditions.values, **values})

    @property
    def field(self) -> Optional[Whole]:
        """q(x) of this run; made where the first member asks, so that its parameters are seen in the run."""
        if self._field is None and self._ahead is not None:
            self._field = self._ahead.whole()
        return self._field

    def latent_of_field(self, name: str, prior: Any) -> Any:
        """The answer at a latent of the field: its posterior, or a value."""
        if self.field is None:
            return prior.mean
        posterior = FieldLatent(prior, self.field.share(name))
        return posterior.mean if self.at_medians else posterior

    def at_site(self, name: str, process: GaussianProcess, module: Any) -> Union[Tensor, SparsePosterior]:
        """The answer at a GP site: a posterior to be drawn from, or a value."""
        self.processes[name] = process
        return self.answer(name, process, module)

    @abstractmethod
    def answer(self, name: str, process: GaussianProcess, module: Any) -> Union[Tensor, SparsePosterior]:
        """As :meth:`at_site`."""

    def module(self, name: str, process: GaussianProcess) -> Any:
        """The site's variational module."""
        return self.guide.module_of(name)

    def is_of_new_rows(self, differ: bool, whole: bool) -> bool:
        """Whether latents of single rows come from the model.

        :param differ: their plates have other sizes than in training.
        :param whole: they hold all of their rows; row numbers of a part say which rows they are.
        """
        return differ or (not self.own_rows and (whole or self.is_prediction))

    # Posteriors.

    def settled(self, name: str, process: GaussianProcess) -> GaussianProcess:
        """A prior; at new inputs a diagonal that depends on the rows is that beside those of training."""
        module = self.guide.corrected_modules().get(name) if self.new_inputs else None
        return process if module is None else module.settled(process)

    def kind(self, name: str, joint: bool) -> type[Site]:
        """How a site is drawn."""
        return Site if joint else self.guide.kind_of_draws(name)

    def free(self, name: str, process: GaussianProcess, module: Any, kind: type[Site]) -> Any:
        """The posterior of a free family."""
        process = self.settled(name, process)
        if self.field is not None and name in self.guide.facts.field:
            assert self._ahead is not None
            return kind(process, self._ahead.bases[name], self.field.share(name), name)
        own = getattr(module, "coefficients", None)
        if not isinstance(own, Part):
            return module(process, name, kind)
        if own.shared not in self._wholes:
            self._wholes[own.shared] = own.shared()
        posterior = module(process, name, kind, self._wholes[own.shared].share(name))
        _ = posterior.features  # that covariances with other sites ask for, too
        return posterior

    def drawn_from(self, name: str, posterior: Any) -> Any:
        """A posterior as it is drawn from: by rows beside those it meets, in groups of the inputs that a layer above
        couples.
        """
        facts = self.guide.facts
        if isinstance(posterior, GroupedSite):
            posterior.group, _ = facts.groups[name]
        if facts.joint and isinstance(posterior, RowSite):
            # What no density depends on has no node: test_one_run_has_the_bound_of_a_mapped_one
            group = [other for other in facts.group(name) if facts.dependence[other] != NONE]
            met = [other for other in group if name in group and other in self.posteriors and other != name]
            posterior.beside = [self.posteriors[other] for other in met]
        return posterior


class Setup(Run):
    """The first run: makes the modules.

    :param build: gives the site's, of its name and its process.
    """

    at_medians = True

    def __init__(self, guide: KnownGuide, build: Callable[[str, GaussianProcess], Any]) -> None:
        super().__init__(guide)
        self.build = build

    def module(self, name: str, process: GaussianProcess) -> Any:
        return self.build(name, process)

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Tensor:
        posterior = self.posteriors[name] = module(process, name, Site)
        if isinstance(module, SiteGP):  # of a family that is refused if a layer stands above
            variance = process.variance
            return process.mean + variance.sqrt() * torch.linspace(-1, 1, variance.shape[-1]).to(variance)
        return process.mean + _smooth(posterior)


class Priors(Run):
    """GP sites, and what else is a part of the field, at their priors' means; other latents are drawn, or at medians.

    :param at_medians: which of the two.
    :param own_rows: whether latents of single rows are of these rows.
    """

    rows = Rows()  # that a step of training brings
    nodes: Any = None  # of such a step

    def __init__(
        self,
        guide: KnownGuide,
        conditions: Optional[Conditions] = None,
        at_medians: bool = False,
        own_rows: bool = True,
    ) -> None:
        super().__init__(guide, conditions)
        self.at_medians, self.own_rows = at_medians, own_rows
        self.normal: dict[str, Any] = {}

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Tensor:
        return process.mean

    def latent_of_field(self, name: str, prior: Any) -> Tensor:
        self.normal[name] = prior
        return prior.mean

    @cached_property
    def bases(self) -> dict[str, Any]:
        """The bases of the GP sites that it met."""
        return {name: basis_of(self.guide, name, self.settled(name, p)) for name, p in self.processes.items()}

    def whole(self) -> Whole:
        """q(x) under them."""
        return field_given(self.guide, self.bases, self.normal, self.trace.nodes)

    @property
    def others(self) -> list[str]:
        """The latents that are no part of the field."""
        return [name for name in self.guide.facts.latents if name not in self.normal]


class UnderLatents(Run):
    """The latents are drawn, for what families on sites are conditioned on.

    :param same: whether inner layers are drawn, too, being at the rows of training.
    :param reads: whether its densities are to be derived by GP sites' values, ``moves`` off the prior's mean.
    """

    def __init__(self, guide: KnownGuide, same: bool, reads: bool, at_medians: bool) -> None:
        super().__init__(guide)
        self.same, self.reads, self.at_medians = same, reads, at_medians
        self.moves: dict[str, Tensor] = {}

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Union[Tensor, SparsePosterior]:
        if isinstance(module, SiteGP):
            if not self.reads:
                return process.mean
            self.moves[name] = torch.zeros_like(process.mean, requires_grad=True)
            return process.mean + self.moves[name]
        posterior = self.posteriors[name] = self.free(name, process, module, self.kind(name, self.at_medians))
        draws = self.same and name in self.guide.facts.inner and not self.at_medians
        return self.drawn_from(name, posterior) if draws else posterior.mean

    def is_of_new_rows(self, differ: bool, whole: bool) -> bool:
        return False


class Posteriors(Run):
    """Posteriors to be drawn from, at the rows of a call or, for prediction, at new inputs.

    :param conditions: of families on sites.
    :param rows: that the call brings; ``None`` is a prediction.
    :param joint_up_to: how many function values of a site are drawn jointly.
    :param nodes: standardised, of the GP sites that are at quadrature nodes, ``None`` for the mean, and not drawn.
    :param new_inputs: whether its rows are not to be taken for those of training.
    """

    takes_field = True

    def __init__(
        self,
        guide: KnownGuide,
        conditions: Conditions,
        rows: Optional[Rows] = None,
        joint_up_to: float = math.inf,
        nodes: Optional[Mapping[str, Optional[Tensor]]] = None,
        new_inputs: bool = False,
    ) -> None:
        super().__init__(guide, conditions)
        self.rows = Rows(same=False, inputs=False) if rows is None else rows
        self.nodes, self.joint_up_to = nodes, joint_up_to
        self.is_prediction = rows is None
        self.new_inputs = new_inputs or self.is_prediction
        self.own_rows = self.rows.inputs
        self.draws_left_out, self.sums_out = nodes is None, not self.is_prediction

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Union[Tensor, SparsePosterior]:
        if self.nodes is not None and name in self.nodes:
            posterior = self.posteriors[name] = self.drawn_from(name, self._at(name, process, module, NodeSite))
            return posterior.at_nodes(self.nodes)
        median, num = self.at_medians, process.event_shape[0]
        joint = median or num <= self.joint_up_to
        if self.is_prediction:
            require_inputs(name, process)
            if joint and not median and num > LARGEST_JOINT:
                self._warn_of_size(name, num)
        posterior = self.drawn_from(name, self._at(name, process, module, self.kind(name, joint)))
        self.posteriors[name] = posterior
        return posterior.mean if median else posterior

    def _at(self, name: str, process: GaussianProcess, module: Any, kind: type[Site]) -> Any:
        if self.field is not None or not isinstance(module, SiteGP):
            return self.free(name, process, module, kind)
        reading = self.conditions.of(name)
        sites, alone = (None, False) if reading is None else (reading.sites, reading.alone)
        if self.new_inputs or not self.rows.same:
            return module.predict(process, name, kind, sites)
        posterior = module(process, name, kind, sites, alone)
        if self.rows.learns and reading is not None and not reading.direct:
            reading.note(posterior)
        return posterior

    def _warn_of_size(self, name: str, num: int) -> None:
        warn_once(
            self.guide.warned,
            "large joint draw",
            name,
            f"{num} values of GP site {name!r} are drawn jointly, at O(N³) time and O(N²) memory a draw; "
            "predict(..., joint=False) draws them independently, in O(N).",
            stacklevel=4,
        )


def held_runs(model: Callable, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any]) -> Callable:
    """Runs a program with GP sites at the values given, all else as it was in a run."""
    values = {name: value.detach() for name, value in free_values(trace).items()}
    return lambda moved: held_trace(model, values | moved, args, kwargs)


def probed(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Probe:
    """A run with the latents at their medians and the same random numbers, with its graph."""
    run = Posteriors(guide, Conditions(), Rows(same=False))
    run.at_medians = True
    with repeatable(guide.like), poutine.block(), pyro.validation_enabled(False):
        run.perform(args, kwargs)
    densities = {}
    for name, site in all_sites(run.trace):
        if site["type"] == "sample" and not site_is_subsample(site) and name not in run.posteriors:
            fn = site["infer"].get("prior", site["fn"])
            densities[name] = torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), 1.0, site["mask"]))
    return Probe(densities, run.posteriors)


def _smooth(posterior: SparsePosterior) -> Tensor:
    """A function like those of a prior, for the layers above to place their inducing inputs on."""
    process, shape = posterior.process, posterior.batch_shape
    kernel, x = process.kernel, process.x
    if x.shape[-2] > _MANY and x.dim() == 2 and not kernel.batch_shape:
        waves = kernel.prior_functions(shape.numel(), _WAVES, x[:1])
        if waves is not None:
            return waves(x).reshape(*shape, -1)
    return posterior.basis.function(x, posterior.coefficients.rsample(shape))
