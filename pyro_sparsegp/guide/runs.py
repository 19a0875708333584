"""What one run of the guide is for, and how it answers at GP sites."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, Union

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..approximations.on_sites import SiteGP, same_rows
from ..approximations.weight_space import elsewhere
from ..gaussians import Drawn, Share, Whole
from ..posterior.drawing import GroupedSite, NodeSite, RowSite, Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.data import Relation
from ..program.traces import without_event
from .reading import SiteReading

__all__ = [
    "LARGEST_JOINT",
    "AtNodes",
    "BySite",
    "Conditions",
    "Draw",
    "Look",
    "Met",
    "NumbersRun",
    "Priors",
    "ProbeRun",
    "Rows",
    "Run",
    "Setup",
    "Train",
    "require_inputs",
]

_WAVES = 16  # of a function that stands for a prior's draw at many rows
LARGEST_JOINT = 5000  # function values whose joint draw is slow enough to be told of


class BySite(dict[str, SparsePosterior]):
    """Posteriors by GP site, which say what there is where another is asked for."""

    def __missing__(self, name: str) -> SparsePosterior:
        raise KeyError(f"{name!r} is no GP site of the model: the posteriors are those of {sorted(self)}")


@dataclass(frozen=True)
class Met:
    """A GP site as a run meets it.

    :param module: its variational module.
    :param draws: how training draws it, as the densities downstream allow.
    :param inner: its values enter another GP site.
    :param group: how many consecutive values a layer above couples.
    :param drawn: the latents that a free posterior follows.
    :param share: of a posterior of several sites, what this run has of it.
    :param company: the sites of that posterior that its values meet, row by row.
    :param before: what the run has met so far.
    """

    name: str
    process: GaussianProcess
    module: Any
    draws: type[Site]
    inner: bool
    group: int
    drawn: Optional[Drawn] = None
    share: Optional[Share] = None
    company: Sequence[str] = ()
    before: poutine.Trace = field(default_factory=poutine.Trace)

    @property
    def is_fixed(self) -> bool:
        """Whether its prior is the same in all runs under these conditions: it can depend on nothing that was drawn."""
        sites: Any = self.before.nodes
        return self.share is None and all(
            site["is_observed"] or site_is_subsample(site) or _is_function_or_point(site["fn"])
            for site in sites.values()
            if site["type"] == "sample"
        )

    def free(self, kind: type[Site], new_rows: bool = False) -> Any:
        """The posterior, of a free family."""
        give = elsewhere(self.module) if new_rows else self.module
        if self.share is not None:
            posterior = give(self.process, self.name, kind, self.drawn, self.share)
            _ = posterior.features  # that covariances with other sites ask for, too
            return posterior
        if self.drawn is None:
            return give(self.process, self.name, kind)
        return give(self.process, self.name, kind, self.drawn)


@dataclass
class Conditions:
    """What q(f | latents, data) of families on sites is conditioned on: drawn and read before the run that uses it.

    :param values: of the latents, and of GP sites that enter others.
    :param draws: of these GP sites, the posteriors they were drawn from.
    :param readings: of the sites of such families.
    :param drawn: the latents that are coupled.
    :param posteriors: at the inputs of a run before, of the GP sites that no draw changes.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, SparsePosterior] = field(default_factory=dict)
    readings: list[SiteReading] = field(default_factory=list)
    drawn: Optional[Drawn] = None
    posteriors: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str) -> Optional[SiteReading]:
        """The reading of one GP site."""
        return next((reading for reading in self.readings if reading.name == name), None)

    def elsewhere(self, site: Met, kind: type[Site]) -> Any:
        """A site's posterior at other inputs than those of training, made once for all runs that share it."""
        known = self.posteriors.get(site.name)
        if type(known) is kind and same_rows(known.process.x, site.process.x):
            return known
        if isinstance(site.module, SiteGP):
            reading = self.of(site.name)
            sites = None if reading is None else reading.sites
            posterior = elsewhere(site.module)(site.process, site.name, kind, sites)
        else:
            posterior = site.free(kind, new_rows=True)
        if not torch.is_grad_enabled() and site.is_fixed:
            self.posteriors[site.name] = posterior
        return posterior


@dataclass(frozen=True)
class Rows:
    """Which rows a call brings, to a guide of which something may belong to single rows of the training data.

    :param same: they are those of training, with their observations.
    :param inputs: their inputs are, in the guide's order: latents of single rows are of these rows.
    :param keep: they are a step of training of those that q is conditioned on, which modules keep.
    :param batch: they are a step of training of others: gradients pass through the sites that q is conditioned on.
    :param relation: what the call's tensors are to those of training.
    """

    same: bool = True
    inputs: bool = True
    keep: bool = False
    batch: bool = False
    relation: Optional[Relation] = None

    @property
    def fewer(self) -> bool:
        """Whether tensors of training are not given, such as the observations."""
        return self.relation is not None and self.relation.fewer


class Run(ABC):
    """One run of the guide: its GP sites' priors and posteriors are collected by name."""

    at_medians: ClassVar[bool] = False
    draws_data: bool = True  # that are not there; or nothing is drawn in their place
    draws_left_out: ClassVar[bool] = True  # values that obs_mask= leaves out come from the model
    sums_out: bool = True  # discrete latents that are enumerated; or they come from the model
    rows_known: bool = True  # latents of single rows are of the rows that a plate holds

    def __init__(self) -> None:
        self.processes: dict[str, GaussianProcess] = {}
        self.posteriors: dict[str, SparsePosterior] = {}
        self.wholes: dict[int, Whole] = {}  # posteriors of several sites
        self.drawn: Optional[Drawn] = None  # latents that are coupled
        self.held = False  # whether that was given

    def given(self, conditions: Conditions) -> None:
        """Take what was drawn before."""
        self.drawn, self.held = conditions.drawn, conditions.drawn is not None

    def module(self, name: str, process: GaussianProcess, find: Callable[[str], Any]) -> Any:
        """The site's variational module."""
        return find(name)

    def meet(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        """The answer at a GP site: a posterior to be drawn from, or a value.

        :param median: whether latents are at their medians.
        """
        self.processes[site.name] = site.process
        return self.answer(site, median)

    @abstractmethod
    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        """As :meth:`meet`."""

    def beside(self, site: Met, posterior: Any) -> Any:
        """A posterior by rows, beside those of its company that this run has met."""
        if isinstance(posterior, RowSite) and site.company:
            met = {name: q for name, q in self.posteriors.items() if name in site.company and name != site.name}
            return posterior.next_to(met.values())
        return posterior

    def is_of_new_rows(self, differ: bool, whole: bool) -> bool:
        """Whether latents of single rows come from the model.

        :param differ: their plates have other sizes than in training.
        :param whole: they hold all of their rows.
        """
        return differ or (whole and not self.rows_known)


class Setup(Run):
    """The first run: makes the modules.

    :param build: the site's family's, of its name and its process.
    """

    at_medians = True

    def __init__(self, build: Callable[[str, GaussianProcess], Any]) -> None:
        super().__init__()
        self.build = build

    def module(self, name: str, process: GaussianProcess, find: Callable[[str], Any]) -> Any:
        return self.build(name, process)

    def answer(self, site: Met, median: bool) -> Tensor:
        process = site.process
        posterior = self.posteriors[site.name] = site.module(process, site.name, Site)
        if isinstance(site.module, SiteGP):  # of a family that is refused if a layer stands above
            line = process.x.sum(-1)
            spread = (line - line.mean()).abs().amax().clamp(min=torch.finfo(line.dtype).tiny)
            stddev = process.kernel.diag(process.x).sqrt()  # no site is read yet: this is the prior
            return process.mean + stddev * (line - line.mean()) / spread
        return process.mean + _smooth(posterior)


class Priors(Run):
    """GP sites' priors are wanted, other latents at their points, and nothing else.

    :param rows_known: whether latents of single rows are of these rows.
    """

    at_medians = True

    def __init__(self, rows_known: bool = True) -> None:
        super().__init__()
        self.rows_known = rows_known

    def answer(self, site: Met, median: bool) -> Tensor:
        return site.process.mean


class Draw(Run):
    """The latents are drawn, for what families on sites are conditioned on.

    :param same: whether inner layers are drawn, too, being at the rows of training.
    """

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.same = same

    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        if isinstance(site.module, SiteGP):
            return site.process.mean
        kind = Site if median else site.draws
        posterior = self.posteriors[site.name] = site.free(kind)
        return _in_groups(posterior, site) if self.same and site.inner and not median else posterior.mean

    def is_of_new_rows(self, differ: bool, whole: bool) -> bool:
        return False


class Train(Run):
    """A call: posteriors to be drawn from.

    :param rows: that it brings.
    :param conditions: of families on sites.
    :param joint_up_to: how many function values of a site are drawn jointly.
    :param observing: whether the rows are a part of those of training, on which a kernel's diagonal may depend.
    :param sums_out: whether data are there, of which discrete latents are summed out.
    """

    def __init__(
        self,
        rows: Optional[Rows] = None,
        conditions: Optional[Conditions] = None,
        joint_up_to: float = 0,
        observing: bool = True,
        sums_out: bool = True,
    ) -> None:
        super().__init__()
        self.rows, self.conditions = rows or Rows(), conditions or Conditions()
        self.given(self.conditions)
        self.rows_known = self.rows.inputs
        self.joint_up_to, self.observing, self.sums_out = joint_up_to, observing, sums_out

    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        joint = median or site.process.event_shape[0] <= self.joint_up_to
        posterior = self.beside(site, self._posterior(site, Site if joint else site.draws))
        self.posteriors[site.name] = posterior
        return posterior.mean if median else _in_groups(posterior, site)

    def _posterior(self, site: Met, kind: type[Site]) -> Any:
        process, name, module = site.process, site.name, site.module
        is_free = not isinstance(module, SiteGP)
        if not self.observing or not (is_free or self.rows.same):
            return self.conditions.elsewhere(site, kind)
        if is_free:
            return site.free(kind)
        reading = self.conditions.of(name)
        sites = None if reading is None else reading.sites
        posterior = module(process, name, kind, sites, reading is not None and reading.alone)
        if self.rows.keep and reading is not None and not reading.direct:
            module.sites.marginals = posterior.mean.detach(), posterior.variance.detach()
        return posterior


class AtNodes(Train):
    """A call of the quadrature: GP sites at nodes, or at their means, where densities of data are wanted.

    :param nodes: standardised, of these GP sites; ``None`` is the mean. Others are drawn.
    :param rows: that it brings.
    :param conditions: of families on sites.
    :param all_joint: whether others' function values are drawn jointly.
    """

    draws_left_out = False

    def __init__(
        self, nodes: Mapping[str, Optional[Tensor]], rows: Rows, conditions: Conditions, all_joint: bool
    ) -> None:
        super().__init__(rows, conditions, math.inf if all_joint else 0)
        self.nodes = nodes

    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        if site.name not in self.nodes:
            return super().answer(site, median)
        posterior = self.posteriors[site.name] = self.beside(site, self._posterior(site, NodeSite))
        return posterior.at_nodes(self.nodes)


class ProbeRun(Train):
    """A run that is to show what sites depend on, latents at their medians: means alone, to fewer digits."""

    most: float = 4096  # rows at which they are computed, about; others have the mean of one before them

    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        process = site.process
        posterior = self.posteriors[site.name] = self.posterior_of(site)
        num = process.x.shape[-2]
        step = max(math.ceil(num / self.most), 1)
        mean = posterior.basis.mean(process.x[..., ::step, :], posterior.coefficients)
        if step > 1:
            mean = mean[..., torch.arange(num, device=mean.device) // step]
        return process.mean + mean

    def posterior_of(self, site: Met) -> Any:
        """A posterior that depends on all that the site's depends on, but for the data."""
        if isinstance(site.module, SiteGP):
            return site.module.unread(site.process, site.name, Site)
        return self._posterior(site, Site)


class NumbersRun(ProbeRun):
    """A run that is to show the numbers of all rows, latents at their medians: means alone, to fewer digits."""

    most = math.inf

    def posterior_of(self, site: Met) -> Any:
        """The posterior."""
        return self._posterior(site, Site)


class Look(Run):
    """Posteriors at inputs, for prediction: latents of single rows come from the model, unless they are of these rows.

    :param conditions: of families on sites.
    :param rows_known: whether the rows are those of training, with their observations.
    :param joint: function values are drawn jointly; or, where the model allows it, independently.
    :param warn: told of large joint draws, by the site's name and their number.
    :param draws_data: whether data at the new inputs are asked for.
    """

    sums_out = False

    def __init__(
        self,
        conditions: Conditions,
        joint: bool = True,
        warn: Callable[[str, int], None] = lambda name, num: None,
        draws_data: bool = True,
        rows_known: bool = False,
    ) -> None:
        super().__init__()
        self.draws_data, self.rows_known = draws_data, rows_known
        self.conditions, self.joint, self.warn = conditions, joint, warn
        self.given(conditions)

    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        require_inputs(site.name, site.process)
        kind = Site if median or self.joint else site.draws
        num = site.process.event_shape[0]
        if not median and self.joint and num > LARGEST_JOINT:
            self.warn(site.name, num)
        posterior = self.posteriors[site.name] = self.beside(site, self.conditions.elsewhere(site, kind))
        return posterior.mean if median else _in_groups(posterior, site)

    def is_of_new_rows(self, differ: bool, whole: bool) -> bool:
        return differ or not self.rows_known


def _in_groups(posterior: Any, site: Met) -> Any:
    return posterior.in_groups_of(site.group) if isinstance(posterior, GroupedSite) else posterior


def require_inputs(name: str, process: GaussianProcess) -> None:
    """Raise for inputs that the kernel has no values at, such as an output's number that is none.

    :raises ValueError: naming the site.
    """
    try:
        process.kernel.check_inputs(process.x)
    except ValueError as error:
        raise ValueError(f"GP site {name!r}: {error}") from None


def _smooth(posterior: SparsePosterior) -> Tensor:
    """A function like those of a prior, for the layers above to place their inducing inputs on."""
    process, shape = posterior.process, posterior.batch_shape
    kernel, x = process.kernel, process.x
    if x.shape[-2] > ProbeRun.most and x.dim() == 2 and not kernel.batch_shape:
        waves = kernel.prior_functions(shape.numel(), _WAVES, x[:1])
        if waves is not None:
            return waves(x).reshape(*shape, -1)
    return posterior.basis.function(x, posterior.coefficients.rsample(shape))


def _is_function_or_point(fn: Any) -> bool:
    return isinstance(without_event(fn)[0], (SparsePosterior, dist.Delta))
