"""One run of the guide: what is asked of it, how it answers at GP sites, and what it met."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Optional, Self, Union

import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn

from ..gaussians.drawn import Drawn
from ..gaussians.product import JointPosterior
from ..numerics.decisions import is_traced
from ..posterior.drawing import NodeSite, Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program import checks, handlers, traces
from ..program.asking import asks_program
from ..program.data import TrainingData
from ..program.enumeration import Enumeration
from ..program.owners import kept_buffers
from ..program.structure import Role
from ..warned import warn_once
from .calls import Call, Evaluation
from .field import basis_of
from .known import KnownGuide
from .latents import FieldLatent
from .points import Point

LARGEST_JOINT = 5000  # function values that are drawn jointly where no density asks for it


@dataclass
class Conditions:
    """What a run's posteriors are conditioned on, of families on sites: drawn and read before it."""

    values: dict[str, Tensor] = field(default_factory=dict)  # of the latents
    readings: dict[str, Any] = field(default_factory=dict)  # of GP sites that have such a family
    drawn: Union[Drawn, Point, None] = None  # the latents that are coupled


@dataclass(eq=False)
class Run(ABC):
    """One run of a guide's program: what is asked of it, and, after :meth:`perform`, what it met."""

    guide: KnownGuide  # whose modules answer
    conditions: Conditions = field(default_factory=Conditions)  # what is held in it
    call: Call = field(default_factory=Evaluation)  # what it is about
    at_medians: bool = False  # other latents are there; else they are drawn, or held as the conditions say
    draws_data: bool = True  # data that are not given are drawn; or another value stands in for them
    sums_out: bool = True  # enumerated discrete latents are summed out; or the model draws them
    is_objectives: bool = False  # an objective asks for it, which takes expectations itself

    processes: dict[str, GaussianProcess] = field(init=False, default_factory=dict)  # of the GP sites it met
    posteriors: dict[str, Any] = field(init=False, default_factory=dict)
    normal: dict[str, Any] = field(init=False, default_factory=dict)  # priors of the field's latents, of new rows, too
    values: dict[str, Tensor] = field(init=False, default_factory=dict)  # of all sites
    trace: poutine.Trace = field(init=False, default_factory=poutine.Trace)
    enumeration: Optional[Enumeration] = field(init=False, default=None)
    drawn: Union[Drawn, Point, None] = field(init=False, default=None)  # latents that are coupled
    parts: dict[str, Any] = field(init=False, default_factory=dict)  # of that draw, whose sites are not yet met
    kind: Any = field(init=False, default=None)  # of posterior, :attr:`AutoSparseGP.kind` or that at points
    latent_of_field: ClassVar[Any]  # the answer at a latent of the field, which a first run does not know

    @checks.require_known_indices()
    def perform(self, args: tuple, kwargs: dict[str, Any]) -> Self:
        """Run the model once."""
        guide, core = self.guide, self.guide.core
        self.drawn = self.drawn or self.conditions.drawn
        if self.takes_points and self.drawn is None:
            self.drawn = core.points.chosen(self.at_medians)  # type: ignore[union-attr]
        self.kind = guide.at_points if isinstance(self.drawn, Point) else guide.kind
        self.look_ahead(args, kwargs)
        before, held = guide.run, self.conditions
        guide.run = self
        if self.sums_out and core.facts.discrete:
            self.enumeration = Enumeration(held.values)
        try:
            # Only a step of training moves what modules keep of their inputs.
            kept = nullcontext() if self.call.learns else kept_buffers()
            with kept, handlers.Held(held.values), asks_program():
                self.values = AutoNormalMessenger.__call__(guide, *args, **kwargs)
        finally:
            guide.run = before
        self.trace = guide.trace
        return self

    def look_ahead(self, args: tuple, kwargs: dict[str, Any]) -> None:  # noqa: B027, posteriors alone have to
        """What is to be known before the model runs."""

    @property
    def takes_points(self) -> bool:
        """Whether hyperparameters are from weighted points: in draws and predictions, not in a step or its loss."""
        is_step = self.is_objectives or (torch.is_grad_enabled() and not self.call.new)
        return self.guide.core.points is not None and not is_step

    @cached_property
    def sites(self) -> dict[str, Any]:
        """The sample sites that it met, by name."""
        return traces.sample_sites(self.trace)

    @cached_property
    def data(self) -> dict[str, Any]:
        """Those that hold data, of the sites that did at the first call."""
        known = self.guide.core.facts.data
        return {name: site for name, site in self.sites.items() if site["is_observed"] and name in known}

    def is_new(self, name: str, prior: TorchDistribution) -> bool:
        """Whether a latent is none of the guide's, or under the data plate and at other data than there were."""
        own = self.guide.core.facts.latents.get(name)
        if own is None:
            classes = self.conditions.values  # of groups, which are held
            if name in classes:
                _require_sizes(name, tuple(classes[name].shape), tuple(prior.shape()))
            return True
        here = {plate.name: plate.full_size or plate.size for plate in get_plates()}
        sizes = {plate: here.get(plate, size) for plate, size in own.plates.items()}
        if own.role == Role.ALL:
            _require_sizes(name, own.plates, sizes)
            return False
        if sizes != own.plates:
            return True
        is_part = any(plate.size != here[plate.name] for plate in get_plates())
        if self.call.inputs or (is_part and not self.call.new):  # row numbers of a part say which rows they are
            return False
        if own.role == Role.GROUP:
            checks.warn_of_groups(self.guide.warned, name, own.plates)
        return True

    def module(self, name: str, process: GaussianProcess) -> Any:
        """The site's variational module."""
        if self.call.new:
            require_inputs(name, process)
        return self.guide.module_of(name)

    @abstractmethod
    def answer(self, name: str, process: GaussianProcess, module: nn.Module) -> Union[Tensor, SparsePosterior]:
        """The answer at a GP site: a posterior to be drawn from, or a value."""

    def settled(self, name: str, process: GaussianProcess) -> GaussianProcess:
        """A prior; at new inputs a diagonal that depends on the rows is that beside training's rows."""
        module = self.guide.corrected_modules().get(name) if self.call.new else None
        return process if module is None else module.settled(process)


@dataclass(eq=False)
class Priors(Run):
    """GP sites, and what else is a part of the field, at their priors' means."""

    def answer(self, name: str, process: GaussianProcess, module: nn.Module) -> Tensor:
        return process.mean

    def latent_of_field(self, name: str, prior: TorchDistribution) -> Tensor:
        self.normal[name] = prior
        return prior.mean

    @cached_property
    def bases(self) -> dict[str, Any]:
        """The bases of the GP sites that it met."""
        return {name: basis_of(self.guide, name, self.settled(name, p)) for name, p in self.processes.items()}

    @cached_property
    def whole(self) -> JointPosterior:
        """q(x) under them; made where the first member asks, so that its parameters are seen in that run."""
        return self.kind.whole(self)


@dataclass(eq=False)
class Posteriors(Run):
    """Posteriors to be drawn from, at the rows of a call."""

    joint_up_to: float = math.inf  # how many function values of a site are drawn jointly
    marginal: bool = False  # posteriors are given hyperparameters alone, not draws of latents in their prior means
    of_latents: bool = False  # latents alone are asked for: GP sites, which none is made of, are at their priors' means
    ahead: Optional[Priors] = field(init=False, default=None)  # the run for the hyperparameters of a joint posterior
    # By GP site whose prior mean is made of members: its process, features and these.
    with_means: dict[str, Any] = field(init=False, default_factory=dict)

    def look_ahead(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.kind.before(self, args, kwargs)

    def latent_of_field(self, name: str, prior: TorchDistribution) -> Any:
        posterior = FieldLatent(prior, self.ahead.whole.view(name))  # type: ignore[arg-type,union-attr]
        return posterior.mean if self.at_medians else posterior

    def answer(self, name: str, process: GaussianProcess, module: nn.Module) -> Union[Tensor, SparsePosterior]:
        if self.of_latents:
            return process.mean
        joint = process.event_shape[0] <= self.joint_up_to
        kind = Site if joint else self.kind.kind_of_draws(self.guide, name)
        posterior = self.posteriors[name] = self.kind.answer(self, name, process, module, kind)
        return posterior.mean if self.at_medians else posterior


@dataclass(eq=False)
class AtNodes(Posteriors):
    """Some GP sites are at quadrature nodes and not drawn: standardised, ``None`` for the mean."""

    nodes: Mapping[str, Optional[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.joint_up_to = 0 if self.guide.training else math.inf

    def answer(self, name: str, process: GaussianProcess, module: nn.Module) -> Union[Tensor, SparsePosterior]:
        if name not in self.nodes:
            return super().answer(name, process, module)
        posterior = self.posteriors[name] = self.kind.answer(self, name, process, module, NodeSite)
        return posterior.at_node(self.nodes[name])


def _require_sizes(name: str, learned: object, here: object) -> None:
    """Raise where values of other groups would be taken: test_known_groups.py."""
    if learned != here:
        raise ValueError(
            f"latent site {name!r} was learned in plates of the sizes {learned}, here {here}. Give plates of those "
            "sizes; or put the data into the latent's own plate, so that new groups' values come from the model."
        )


def require_inputs(name: str, process: GaussianProcess) -> None:
    """Raise if inputs are none of a GP site's kernel, such as an output's number that is none."""
    try:
        process.kernel.check_inputs(process.x)
    except ValueError as error:
        raise ValueError(f"GP site {name!r}: {error}") from None


@torch.no_grad()
def with_classes(guide: KnownGuide, conditions: Conditions) -> Conditions:
    """Conditions with a draw of the classes of groups, given the rows of training and a draw of all else there."""
    facts = guide.core.facts
    if not facts.classes:
        return conditions
    data, run = guide.data_for(facts.classes[0]), Posteriors(guide, conditions)
    with handlers.unrecorded(same=False, learns=False), traces.whole_plates():
        run.perform(data.args, data.kwargs)
    require_rows(run, facts.classes[0])
    # Those of hyperparameters and classes go together. f there and here are apart, as q has no draw of both.
    kept = facts.latents.keys() - {*guide.joint.field, *facts.local_latents}
    values = {name: run.values[name] for name in kept if name in run.values}
    classes = run.enumeration.draw_of(facts.classes)  # type: ignore[union-attr]
    return replace(conditions, values=conditions.values | values | classes, drawn=run.drawn)


def probed(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Posteriors:
    """A run with the latents at their medians and the same random numbers, with its graph."""
    with traces.repeatable(guide.like), poutine.block(), pyro.validation_enabled(False):
        return Posteriors(guide, call=Call(), at_medians=True).perform(args, kwargs)


def note_step(run: Run, args: tuple, kwargs: dict[str, Any]) -> float:
    """After a step of training: check that its data are what the guide is about; their share of all rows."""
    guide, core, facts, sites = run.guide, run.guide.core, run.guide.core.facts, run.sites
    observed = {name: site for name, site in run.data.items() if not guide.is_given(name, site)}
    if not observed:
        if run.is_objectives:
            require_data(run)
        return 0.0
    known = {*facts.gps, *facts.latents, *facts.data}
    # A latent that is met first now would be drawn from its prior, and data met at f's mean: test_refusals.
    others = {name: site for name, site in sites.items() if name not in known}
    new = [n for n, s in others.items() if (_is_prior(s) if traces.is_free(s) else traces.is_observation(s))]
    if new:
        raise ValueError(
            f"the guide's first call did not meet site {new[0]!r}; the guide knows {sorted(known)}. Make a new "
            "guide, and call it first with arguments under which the model has all its latents and observations."
        )
    if not run.call.same:
        _refuse_other_data(run, next(iter(observed)))
        core.data = None if facts.classes else core.data  # classes are given the rows of the last step
    core.data, core.points = core.data or TrainingData(guide.model, args, kwargs), None
    # After guide.forget_data() the numbers are 0: test_data.py::test_other_data_after_the_first_are_forgotten.
    if 0 in core.sizes.values():
        core.sizes.update({name: site["value"].numel() for name, site in observed.items()})
    return share_of_rows(run)


def _is_prior(site: dict[str, Any]) -> bool:
    return site["fn"] is site["infer"].get("prior")


def require_data(run: Run) -> None:
    """Raise if an objective's run met no data: the model has drawn them, y=None."""
    guide, rows, sites = run.guide, run.guide.facts.data, run.sites
    observed = [name for name, site in sites.items() if traces.is_observation(site)]
    # Beside what is given, data that are left out, not drawn, may be another step's.
    drawn = not observed or any(traces.is_free(sites[name]) for name in rows if name in sites)
    if rows and drawn and all(guide.is_given(name, sites[name]) for name in observed):
        known = ", ".join(map(repr, rows))
        raise ValueError(
            f"this step observes nothing, but the first call observed {known}. Give it the data, svi.step(x, y). For "
            "predictions call predict(model, guide, x), and for a loss without a step svi.evaluate_loss(x, y)."
        )


def shown_by(run: Run) -> dict[str, Tensor]:
    """The data and the inputs of GP sites that a run met, if they are made of no parameters and no other GP site."""
    found = {f"values of site {name!r}": site["value"] for name, site in run.data.items()}
    found |= {f"inputs of site {n!r}": process.x for n, process in run.processes.items() if not run.guide.facts.inner}
    return {what: value for what, value in found.items() if not value.requires_grad}


def require_rows(run: Run, name: str) -> None:
    """Raise if a run with the arguments of training, for the posterior of a site, met no data, or other data."""
    guide, known = run.guide, run.guide.data_for(name)
    if moved := ["nothing"] if guide.facts.data and not run.data else known.moved(shown_by(run)):
        raise ValueError(
            f"the posterior of site {name!r} belongs to the training data, and the model, run with the arguments of "
            f"training, now observes {' and '.join(moved)}: it holds its data itself, and they were changed. Pass the "
            "data as arguments, model(x, y=None); or keep this model, and make a new one for other data."
        )


def _refuse_other_data(run: Run, observed: str) -> None:
    """Raise if a step of training brings other data than the guide is about."""
    guide, about = run.guide, run.guide.kind.of_rows(run)
    local = [n for n in guide.core.facts.local_latents if n in run.sites and _is_prior(run.sites[n])]
    about += [f"latent site {name!r} has a value for each row, which" for name in local]
    if about:
        moved = sorted({path[0] for path in run.call.relation.moved})
        raise ValueError(
            f"{about[0]} belongs to the training data, and this call with gradients brings other rows at site "
            f"{observed!r}, in arguments {moved} (objects other than tensors, arrays and dataclasses of these are told "
            "by identity). To evaluate other data use torch.no_grad(). To train on the same rows, keep their order; on "
            "others, make a new guide or call guide.forget_data() first. For mini-batches take a family such as SVGP, "
            "plate = pyro.plate('data', size=N, subsample_size=B), and index the data by plate.indices."
        )


def share_of_rows(run: Run) -> float:
    """The share of all rows that a step has, the least of all sites, 0 if unknown; warns where no plate scales up."""
    guide, facts, sites = run.guide, run.guide.core.facts, run.sites
    # A plate that scales rows up does so whatever handlers' scales are.
    shares = {name: traces.share_of(site) for name, site in run.data.items()}
    least, known = min(shares.values(), default=1.0), True
    scales = [sites[name]["scale"] for name in facts.gps if name in sites]  # of all that is scored, if that is scaled
    for name, site in [(name, site) for name, site in run.data.items() if shares[name] == 1]:
        num, before, told = site["value"].numel(), guide.core.sizes[name], ("rows", name)
        # A handler's number may scale a batch up to the first call's rows: others are weights.
        fewer = num < before and not _equal(site["scale"] * num, before)
        # What is given has as many numbers in every step; so have data beside a batch that is scaled up. Expectation
        # propagation refuses others itself (test_data.py::test_batches_without_a_size_are_told_of).
        asked = num == before and least == 1 and guide.kind.has_bound and told not in guide.warned
        if fewer or (asked and not (is_traced() or guide.is_given(name, site)) and run.call.relation.others):
            warn_once(
                guide.warned,
                *told,
                f"site {name!r} observes {num} values in this step, fewer or others than the {before} before, and no "
                "plate scales them up: the KL outweighs the data. Give a mini-batch's plate size=N and subsample=x or "
                "subsample_size=B. poutine.scale does not do it: it weighs rows.",
                stacklevel=5,
            )
        # A handler's scale is of a batch; of other numbers of rows than at first it is not known what they are.
        known = known and num == before and told not in guide.warned and _equal(site["scale"], scales[0])
    return least if known else 0.0


def _equal(one: object, other: object) -> bool:
    """Whether two scales are one number; tensors are not asked, which would be read back from a device."""
    return isinstance(one, (int, float)) and isinstance(other, (int, float)) and math.isclose(one, other)


def note_rows(run: Run) -> None:
    """After a run: note the rows that kernels' diagonals depend on, or warn where training has more of them."""
    guide, corrected = run.guide, run.guide.corrected_modules()
    for name in [name for name in corrected if name in run.processes]:
        process, module = run.processes[name], corrected[name]
        if not run.call.new and torch.is_grad_enabled():
            module.see(process.x)
            frames = [frame for site in run.data.values() for frame in site["cond_indep_stack"]]
            sizes = [int(f.full_size) for f in frames if f.size == process.x.shape[-2] and f.full_size]
            module.num_rows = max(sizes, default=module.num_rows)
        elif run.call.new and module.num_seen < module.num_rows:
            warn_once(
                guide.warned,
                "rows unseen",
                name,
                f"GP site {name!r} has a variance correction relative to the training inputs, and the guide has seen "
                f"{module.num_seen} of these {module.num_rows}. Call guide(x, y) with all, before or after training.",
                stacklevel=4,
            )
