"""What one run of the guide is for, and how it answers at GP sites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor

from ..approximations.on_sites import SiteGP
from ..gaussians import Drawn, Share, Whole
from ..posterior.drawing import GroupedSite, NodeSite, RowSite, Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from .reading import SiteReading

__all__ = ["LARGEST_JOINT", "Conditions", "Draw", "Look", "Met", "Priors", "ProbeRun", "Run", "Setup", "Train"]

LARGEST_JOINT = 5000  # function values whose joint draw is slow enough to be told of


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

    def free(self, kind: type[Site], new_rows: bool = False) -> Any:
        """The posterior, of a free family."""
        give = self.module.predict if new_rows else self.module
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
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, SparsePosterior] = field(default_factory=dict)
    readings: list[SiteReading] = field(default_factory=list)
    drawn: Optional[Drawn] = None

    def of(self, name: str) -> Optional[SiteReading]:
        """The reading of one GP site."""
        return next((reading for reading in self.readings if reading.name == name), None)


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
        # A smooth function for the layers above to place their inducing inputs on.
        w = posterior.coefficients.rsample(posterior.batch_shape)
        return process.mean + posterior.basis.function(process.x, w)


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
    """A call: posteriors to be drawn from, or at quadrature nodes.

    :param nodes: standardised, of these GP sites; ``None`` is the mean.
    :param conditions: of families on sites.
    :param same: whether the rows are those of training.
    :param keep: whether it is a step of training: modules keep what it shows.
    :param joint_up_to: how many function values of a site are drawn jointly.
    :param rows_known: whether latents of single rows are of these rows.
    :param observing: whether the rows are a part of those of training, on which a kernel's diagonal may depend.
    :param sums_out: whether data are there, of which discrete latents are summed out.
    """

    def __init__(
        self,
        nodes: Optional[Mapping[str, Optional[Tensor]]] = None,
        conditions: Optional[Conditions] = None,
        same: bool = True,
        keep: bool = False,
        joint_up_to: float = 0,
        rows_known: bool = True,
        observing: bool = True,
        sums_out: bool = True,
    ) -> None:
        super().__init__()
        self.sums_out = sums_out
        self.nodes = nodes or {}
        self.draws_left_out = nodes is None  # type: ignore[misc]
        self.conditions = conditions or Conditions()
        self.given(self.conditions)
        self.same, self.keep, self.joint_up_to = same, keep, joint_up_to
        self.rows_known, self.observing = rows_known, observing

    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        name = site.name
        joint = median or site.process.event_shape[0] <= self.joint_up_to
        kind = NodeSite if name in self.nodes else Site if joint else site.draws
        posterior = self.posteriors[name] = self.beside(site, self._posterior(site, kind))
        if isinstance(posterior, NodeSite):
            return posterior.at_node(self.nodes[name])
        return posterior.mean if median else _in_groups(posterior, site)

    def _posterior(self, site: Met, kind: type[Site]) -> Any:
        process, name, module = site.process, site.name, site.module
        if not isinstance(module, SiteGP):
            return site.free(kind, process.kernel.depends_on_rows and not self.observing)
        reading = self.conditions.of(name)
        sites = None if reading is None else reading.sites
        if not self.same:
            return module.predict(process, name, kind, sites)
        posterior = module(process, name, kind, sites, reading is not None and reading.alone)
        if self.keep and reading is not None and not reading.direct:
            module.sites.marginals = posterior.mean.detach(), posterior.variance.detach()
        return posterior


class ProbeRun(Train):
    """A run that is to show what sites depend on, latents at their medians: means alone, to fewer digits."""

    def answer(self, site: Met, median: bool) -> Union[Tensor, SparsePosterior]:
        posterior = self.posteriors[site.name] = self._posterior(site, Site)
        return site.process.mean + posterior.basis.mean(site.process.x, posterior.coefficients)


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
        process, name, module = site.process, site.name, site.module
        kind = Site if median or self.joint else site.draws
        if not median and self.joint and process.event_shape[0] > LARGEST_JOINT:
            self.warn(name, process.event_shape[0])
        if isinstance(module, SiteGP):
            reading = self.conditions.of(name)
            posterior = module.predict(process, name, kind, None if reading is None else reading.sites)
        else:
            posterior = self.beside(site, site.free(kind, process.kernel.depends_on_rows))
        self.posteriors[name] = posterior
        return posterior.mean if median else _in_groups(posterior, site)

    def is_of_new_rows(self, differ: bool, whole: bool) -> bool:
        return differ or not self.rows_known


def _in_groups(posterior: Any, site: Met) -> Any:
    return posterior.in_groups_of(site.group) if isinstance(posterior, GroupedSite) else posterior
