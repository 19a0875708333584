"""The guide: the only place that knows Pyro's messengers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Optional, Union

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import RenyiELBO, TraceTailAdaptive_ELBO
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_mean
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.nn import PyroParam
from pyro.poutine.runtime import get_plates
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to, constraints

from ..approximations.expectation import ExpectationGP, require_refined
from ..approximations.free import SparseGP
from ..approximations.on_sites import SiteGP
from ..families import ExpectationFamily, Family, FreeFormFamily, SiteFamily
from ..gaussians.sites import KeptSites, Sites
from ..kernels.base import white_share
from ..modules import at_path, drop_stored, take_name, unique_name
from ..posterior.drawing import ExpectedSite, GroupedSite, MarginalSite, NodeSite, Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import SAMPLE_PLATES, SAMPLES_ARE_VECTORISED, GaussianProcess, PriorProcess
from ..program import structure, survey
from ..program.data import Relation, TrainingData
from ..program.registration import held_parameters, require_registered
from ..program.survey import Probe, Structure
from ..program.traces import (
    all_sites,
    as_process,
    fill_masked,
    first_tensor,
    is_free,
    is_left_out,
    is_observation,
    piecewise_constant,
    repeatable,
    settle_left_out,
    whole_plates,
    without_event,
)
from ..warned import Warned, warn_once
from .reading import Held, Reader, SiteReading, observes, require_full_batch, settle, unrecorded

__all__ = ["AutoSparseGP"]


@dataclass
class _Conditions:
    """What q(f | latents, data) of families on sites is conditioned on: drawn and read before the run that uses it.

    :param values: of the latents, and of GP sites that enter others.
    :param draws: of these GP sites, the posteriors they were drawn from.
    :param readings: of the sites of such families.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, SparsePosterior] = field(default_factory=dict)
    readings: list[SiteReading] = field(default_factory=list)

    @property
    def sites(self) -> dict[str, Sites]:
        """By GP site."""
        return {reading.name: reading.sites for reading in self.readings}


@dataclass
class _Request:
    """What one run of the guide is for."""

    setup: bool = False  # make the modules
    predicting: bool = False  # new inputs: latents under the data plate come from the model
    values: dict[str, Tensor] = field(default_factory=dict)  # GP sites held at these values
    nodes: Optional[dict[str, Tensor]] = None  # GP sites at these standardised quadrature nodes
    latents: bool = False  # the latents are drawn, for what GP sites are conditioned on
    conditions: _Conditions = field(default_factory=_Conditions)
    keep: bool = False  # a step of training: modules keep what it shows
    joint: bool = False  # a prediction: function values are drawn jointly
    marginal: bool = False  # or, where the model allows it, independently of each other
    points: bool = False  # GP sites' priors are wanted, and nothing else
    seeing: bool = False  # modules take note of all the training inputs, and nothing else is wanted
    same: bool = True  # whether the rows are those of training
    observing: bool = True  # whether they are a part of those of training, which the kernel's diagonal may depend on
    rows_known: bool = True  # whether latents under the data plate are of these rows
    processes: dict[str, GaussianProcess] = field(default_factory=dict)  # collected
    posteriors: dict[str, SparsePosterior] = field(default_factory=dict)  # collected


class AutoSparseGP(AutoNormalMessenger):
    """A guide for a Pyro model with Gaussian process sites: a sparse variational family for each of them.

    q(c, f) = q(c) Π_f q(f | c), with c the other latents, q(c) a product of normals in unconstrained space, and for
    each GP site q(f | c) the family's: under the hyperparameters in c, f = μ + φᵀw + r with a basis φ, a Gaussian q(w)
    and the residual r as in the prior. Families on sites take q(w) from the data and c, others learn one for all c.

    The model runs once a step: at each site the guide sees the prior, under the hyperparameters just drawn, and
    answers with a posterior. Other latents get Pyro's mean-field normal (override :meth:`get_posterior` for
    others) or a point estimate. The first call initialises: it finds the GP sites, places inducing inputs among
    that call's inputs, and learns how the likelihood depends on function values; call the guide once on
    representative inputs, all of them say, if the first mini-batch is smaller than the number of inducing points.

    ``guide(*args)`` draws all sites; sites that were observed at the first call and are not now (``y=None``) come
    from the model, so that ``guide(x_new)`` and :class:`~pyro.infer.Predictive` are posterior predictive.
    ``guide.train()``, the default, draws function values independently of each other, which is what a likelihood
    of single values needs; ``guide.eval()`` draws them jointly.

    Each guide owns its parameters, whatever the parameter store holds; ``state_dict`` and ``load_state_dict``
    restore everything into a freshly made guide.

    :param model: a Pyro model.
    :param families: one family for all GP sites (each gets a copy), or a mapping from site names.
    :param init_loc_fn: how other latents start, from Pyro's ``pyro.infer.autoguide.initialization``.
    :param init_scale: their initial standard deviation, in unconstrained space.
    :param point_estimates: ``True``, or names of other latents, that are fitted as points (maximum a posteriori); by
        default none is, but for families of expectation propagation, which takes points only.
    :param independent_draws: names of GP sites whose values are drawn independently of each other in training though
        the model couples them, such as those at an image's patches in a deep convolutional GP: cheaper, and a common
        practice, but what training then maximises is not quite the bound.
    :param amortized_plates: as in :class:`~pyro.infer.autoguide.AutoNormalMessenger`.
    :raises ValueError: if ``model`` or ``families`` are none, at once; at the first call, naming the site, if a family
        does not fit a site, its kernel or its likelihood.
    """

    def __init__(
        self,
        model: Callable,
        families: Union[Family, Mapping[str, Family]],
        *,
        init_loc_fn: Callable = init_to_mean(fallback=init_to_feasible),
        init_scale: float = 0.1,
        point_estimates: Union[bool, Collection[str], None] = None,
        independent_draws: Collection[str] = (),
        amortized_plates: tuple[str, ...] = (),
    ) -> None:
        if not callable(model):
            raise ValueError(f"AutoSparseGP's model must be callable, got {type(model).__name__}")
        given = families.values() if isinstance(families, Mapping) else [families]
        for family in given:
            if not isinstance(family, Family):
                hint = f"; make an instance, {family.__name__}(...)" if isinstance(family, type) else ""
                raise ValueError(
                    "AutoSparseGP's families must be a family, such as SVGP(64), or a mapping from GP site names to "
                    f"families, got {family!r}{hint}"
                )
        super().__init__(model, init_loc_fn=init_loc_fn, init_scale=init_scale, amortized_plates=amortized_plates)
        # A name of its own keeps this guide's parameters apart from all others in Pyro's global store.
        take_name(self, unique_name("AutoSparseGP"))
        self.families = families
        self.point_estimates = self.by_expectation if point_estimates is None else point_estimates
        if isinstance(independent_draws, str):
            raise ValueError(f"independent_draws must be a collection of names, such as ({independent_draws!r},)")
        self.independent_draws = tuple(independent_draws)
        self.structure: Optional[Structure] = None
        self._idle = self._request = _Request()
        self._new_rows = False
        self._checked_parameters = False
        self._loaded = False  # and not called since
        self._like = torch.empty(0)
        self.data: Optional[TrainingData] = None
        self._forgotten = False  # the training data, for others
        self.warned: Warned = set()
        self._row_counts: dict[str, tuple[int, int]] = {}  # of a GP's rows in a mini-batch, and in all the data

    # Running the model.

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every site, running the model once.

        :returns: latent, deterministic and observed sites' values by name.
        :raises ValueError: naming the site and the remedy, if the model or its data do not fit the guide.
        """
        nodes = self._request.nodes  # at_nodes calls, perhaps through a wrapper
        if nodes is None:
            self.prepare(*args, **kwargs)
        relation = self._relation(args, kwargs)
        fewer = nodes is None and relation is not None and relation.fewer
        self._require_refined(lambda: fewer or not observes(self.model, self._observed, self.like, args, kwargs))
        same, inputs, order = self._is_training or not self.on_sites, True, None
        if relation is not None and self._is_about_rows:
            same, inputs, order = relation.same, relation.inputs, relation.order
        keep = self._is_training and same
        if order is not None and keep:
            self._follow(order, args, kwargs)
        elif order is not None:  # to look at the guide is to leave its rows where they are
            inputs = False
        request = _Request(nodes=nodes, keep=keep, same=same and not self._new_rows, joint=fewer, rows_known=inputs)
        request.observing = nodes is not None or self._observing(args, kwargs)
        request.conditions = self._condition(args, kwargs, same and inputs, keep)
        with self._requesting(request, self._computing_median), self._held(request.conditions):
            draws = self._run(args, kwargs)
        self._after_run(args, kwargs, relation, same)
        return draws

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        try:
            return super().__call__(*args, **kwargs)
        except ValueError as error:
            why = survey.unfit_parameter(self, args, kwargs)
            if why is None:
                raise
            raise ValueError(why) from error

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """What a first call does before it draws: initialise, and check that all parameters would train."""
        self._wake(args, kwargs)
        if torch.is_grad_enabled() and not self._checked_parameters:
            self._check_parameters(args, kwargs)
        self._check_loaded(args, kwargs)

    @property
    def _is_training(self) -> bool:
        """Whether a call with data is a step of training: with gradients it is."""
        return torch.is_grad_enabled() and not self._computing_median

    def _relation(self, args: tuple, kwargs: dict[str, Any]) -> Optional[Relation]:
        """What a call's data are to those of training; ``None`` if a state without them was loaded."""
        return None if self.data is None else self.data.relation(self.model, args, kwargs)

    @property
    def _is_about_rows(self) -> bool:
        """Whether what it knows belongs to single rows of the training data."""
        return self.on_sites or bool(self._local_latents)

    @property
    def _local_latents(self) -> list[str]:
        return [] if self.structure is None else [n for n in self.structure.latents if not self._is_shared(n)]

    @property
    def _observed(self) -> Collection[str]:
        return () if self.structure is None else self.structure.rows

    def _observing(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call's rows are those of training, asked only where a kernel's diagonal depends on them."""
        assert self.structure is not None
        modules = [at_path(self.gps, name) for name in self.structure.gps]
        if self._new_rows or not any(module.num_seen for module in modules if isinstance(module, SparseGP)):
            return not self._new_rows
        return observes(self.model, self._observed, self.like, args, kwargs)

    def _wake(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._loaded:  # its parameters are what it was loaded with, whatever a file brought into Pyro's store
            drop_stored(self._pyro_name)
        if self.structure is None:
            self._initialise(args, kwargs)

    def _require_refined(self, predicting: Callable[[], bool] = lambda: True) -> None:
        """Raise if expectation propagation has not begun, and what a call is to give is a posterior."""
        if self.by_expectation and self.structure is not None:
            require_refined({name: at_path(self.gps, name) for name in self.structure.gps}, predicting)

    @contextmanager
    def _requesting(self, request: _Request, median: bool = False) -> Iterator[_Request]:
        before = self._request, self._computing_median
        self._request, self._computing_median = request, median
        try:
            yield request
        finally:
            self._request, self._computing_median = before

    def posterior(self, *args: Any, **kwargs: Any) -> dict[str, SparsePosterior]:
        """The posterior of each GP site at these inputs, other latents at their posterior median.

        An inner layer of a deep GP is at its posterior mean. Subsampling is off.

        :returns: by site, a :class:`SparsePosterior` with event shape ``(N,)``; P outputs are its batch.
        """
        self._wake(args, kwargs)
        self._require_refined()
        self._check_loaded(args, kwargs)
        request = _Request(predicting=True, same=False, observing=False, conditions=self._conditions_now(median=True))
        with self._requesting(request, median=True), poutine.block(), whole_plates(), self._held(request.conditions):
            super().__call__(*args, **kwargs)
        return request.posteriors

    def at_nodes(
        self, nodes: dict[str, Tensor], wrapped: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Tensor]]:
        """One run with GP sites at standardised quadrature nodes, mean + sd·node.

        :param wrapped: this guide, or what handlers such as ``poutine.scale`` made of it.
        :returns: the model's trace, the guide's, and the values of all sites, the plates' row numbers among them.
        """
        with self._requesting(_Request(nodes=nodes)):
            wrapped(*args, **kwargs)
        try:
            values = {name: site["value"] for name, site in all_sites(self.trace) if is_free(site)}
            return (*self._traces(), values)
        finally:
            self.trace = poutine.Trace()  # under vmap its tensors are of no use to others

    def priors(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[dict[str, GaussianProcess], dict[str, Tensor], poutine.Trace]:
        """One run with other latents at their points, for expectation propagation.

        :returns: the GP sites' priors under them; the values of latents and the plates' row numbers; the run's trace.
        """
        relation = self._relation(args, kwargs)
        known = relation is None or not self._local_latents or (relation.inputs and relation.order is None)
        with self._requesting(_Request(points=True, rows_known=known), median=True) as request:
            super().__call__(*args, **kwargs)
        survey.require_sizes(self.trace)
        processes = request.processes
        self._check_rows(relation)
        values = {
            name: torch.as_tensor(site["value"])
            for name, site in all_sites(self.trace)
            if is_free(site) and name not in processes
        }
        return processes, values, self.trace

    def draw(self, *args: Any, joint: bool = True, **kwargs: Any) -> dict[str, Tensor]:
        """One of :meth:`draws`."""
        return next(self.draws(1, *args, joint=joint, **kwargs))

    def draws(self, num: int, *args: Any, joint: bool = True, **kwargs: Any) -> Iterator[dict[str, Tensor]]:
        """Draws of every site at new inputs, for prediction: subsampling is off, latents under the data plate come
        from the model.

        :param num: how many.
        :param joint: draw function values jointly, in O(N³), or independently from their marginals.
        """
        self._wake(args, kwargs)
        self._require_refined()
        self._check_loaded(args, kwargs)
        conditions = None
        for _ in range(num):
            if conditions is None or self._has_random_latents:
                conditions = self._conditions_now(median=False)
            request = _Request(predicting=True, same=False, observing=False, joint=joint, conditions=conditions)
            request.marginal = not joint
            with self._requesting(request), poutine.block(), whole_plates(), self._held(conditions):
                draws = super().__call__(*args, **kwargs)
            yield draws

    def _after_run(self, args: tuple, kwargs: dict[str, Any], relation: Optional[Relation], same: bool) -> None:
        assert self.structure is not None
        survey.require_sizes(self.trace)
        observed = [name for name in self._rows_here() if self.trace.nodes[name]["is_observed"]]
        if observed and self._is_training and not same:
            self._check_other_data(observed[0])
        if observed and self._is_training and self.data is None:
            self.data = TrainingData(self.model, args, kwargs)
        if self._forgotten and observed and self._is_training:
            self._forgotten = False
            for name in observed:
                self.structure.rows[name] = torch.as_tensor(self.trace.nodes[name]["value"]).numel()
        self._check_rows(relation)
        self._count_rows()

    def _check_other_data(self, observed: str) -> None:
        """Raise if a step of training brings other data than the guide is about."""
        for name, module in self.site_modules().items():
            require_full_batch(name, module, self.trace)
            raise ValueError(
                f"GP site {name!r} has the family {module.family['name']}, whose posterior is that of all its training "
                f"data, and this call with gradients brings other rows at site {observed!r}: it would be taken for a "
                "step of training on them. To evaluate the trained guide on other data use torch.no_grad(); to train "
                "it on other data, make a new guide or call guide.forget_data() first; for mini-batches take a family "
                "such as SVGP, and pyro.plate('data', size=N, subsample=x)."
            )
        sites: Any = self.trace.nodes
        drawn = [n for n in self._local_latents if n in sites and sites[n]["fn"] is sites[n]["infer"].get("prior")]
        self._refuse_rows(drawn, f"other rows at site {observed!r} in a step of training")

    def _count_rows(self) -> None:
        for name, (rows, _) in self._row_counts.items():
            for site_name in self._rows_here():
                for frame in self.trace.nodes[site_name]["cond_indep_stack"]:
                    if frame.size == rows and frame.full_size is not None:
                        self._row_counts[name] = rows, int(frame.full_size)

    def _rows_here(self) -> list[str]:
        assert self.structure is not None
        return [name for name in self.structure.rows if name in self.trace.nodes]

    # Families on sites.

    @property
    def like(self) -> Tensor:
        """A tensor of the guide's dtype and device."""
        return next(self.parameters(), self._like)

    @property
    def on_sites(self) -> bool:
        """Whether a GP site's posterior follows from Gaussian sites, so that it needs all the data at once."""
        return any(isinstance(family, SiteFamily) for family in self.declared_families())

    @property
    def by_expectation(self) -> bool:
        """Whether a GP site has a family of expectation propagation, which :class:`ExpectationPropagation` trains."""
        return any(isinstance(family, ExpectationFamily) for family in self.declared_families())

    def declared_families(self) -> list[Family]:
        return list(self.families.values()) if isinstance(self.families, Mapping) else [self.families]

    @property
    def _has_random_latents(self) -> bool:
        """Whether a latent that is no GP, or a GP site that enters another, is drawn."""
        assert self.structure is not None
        return bool(self.structure.inner) or any(not self._is_point(name) for name in self.structure.latents)

    def _conditions_now(self, median: bool) -> _Conditions:
        """What prediction is conditioned on: read at the training data, for one draw of the latents or their medians.

        :raises ValueError: if that takes the training data, and they were not loaded with the guide's state.
        """
        if not self.on_sites:
            return _Conditions()
        if self.data is None:
            if self._has_random_latents:
                raise ValueError(
                    "the guide was loaded from a state without its training data, on which the posterior of GP site "
                    f"{next(iter(self.site_modules()))!r} given a draw of the other latents depends: call the guide "
                    "with them once, guide(x, y), not under torch.no_grad()."
                )
            return _Conditions()
        with (
            torch.inference_mode(False),  # sites that are kept must serve training, too
            torch.no_grad(),
            self._requesting(self._request, median),
            repeatable(self.like) if median else nullcontext(),
        ):
            return self._condition(self.data.args, self.data.kwargs, False, False)

    def _condition(self, args: tuple, kwargs: dict[str, Any], same: bool, keep: bool) -> _Conditions:
        """Draw the latents at the training data, and read under them the sites of families on sites.

        :param same: whether the arguments are the training data; else these are taken.
        :param keep: whether this is a step of training: modules keep the sites, gradients pass through them.
        """
        if not self.on_sites:
            return _Conditions()
        if same:
            if keep:
                self._remember(args, kwargs)
        elif self.data is None:
            return _Conditions()
        else:
            args, kwargs = self.data.args, self.data.kwargs
        assert self.structure is not None
        request = _Request(latents=True, same=same)
        with unrecorded(), self._requesting(request, self._computing_median), torch.set_grad_enabled(keep):
            super().__call__(*args, **kwargs)
        trace, processes = self.trace, request.processes
        modules = {name: module for name, module in self.site_modules().items() if name in processes}
        for name, module in modules.items():
            require_full_batch(name, module, trace)
        reader = Reader(self.model, args, kwargs, self.structure, trace)
        with torch.set_grad_enabled(keep):
            readings = self._read(reader, modules, processes, request.posteriors, keep)
        values = {
            name: site["value"]
            for name, site in all_sites(trace)
            if is_free(site) and (name in self.structure.inner or name not in processes)
        }
        draws = {name: request.posteriors[name] for name in self.structure.inner if name in request.posteriors}
        if not same:
            values = {name: value for name, value in values.items() if self._is_shared(name)}
        return _Conditions(values, draws, readings)

    def _is_shared(self, name: str) -> bool:
        """Whether a latent's value is that of all rows, those of training and others."""
        assert self.structure is not None
        latent = self.structure.latents.get(name)
        return latent is not None and not set(latent["plates"]) & set(self.structure.data_plates)

    def _read(
        self,
        reader: Reader,
        modules: dict[str, SiteGP],
        processes: dict[str, GaussianProcess],
        posteriors: dict[str, SparsePosterior],
        keep: bool,
    ) -> list[SiteReading]:
        """The sites of families on sites, at a run's latents."""
        found = reader.found
        marginals = {name: (q.mean.detach(), q.variance.detach()) for name, q in posteriors.items()}
        readings = []
        for name, module in modules.items():
            process, kept = processes[name], module.sites
            if isinstance(kept, KeptSites):
                quadratic, meeting = name in found.quadratic, name in found.meeting
                reading = SiteReading.of(name, process, module, quadratic, meeting)
                readings.append(reading)
                if not reading.direct or reader.meeting(name):
                    marginals[name] = reading.resume() if keep else reading.marginal()
            elif reader.meeting(name):
                with torch.no_grad():
                    q = module(process, name)
                marginals[name] = q.mean, q.variance
        # Under latents that are drawn anew, the sites that were kept are those of another draw.
        most = max((reading.module.updates for reading in readings), default=1)
        if not keep:
            most, tolerance = 100, 1e-4 if self.like.dtype == torch.float64 else 1e-3
        elif self._has_random_latents:
            most, tolerance = max(most, 5), 0.05
        else:
            tolerance = 0.0
        if readings:
            settle(reader, readings, marginals, most, tolerance)
        for reading in readings:  # to look at a guide does not change how it trains
            if keep or reading.module.sites.empty or (reading.direct and self._computing_median):
                reading.keep()
        return readings

    @contextmanager
    def _held(self, conditions: _Conditions) -> Iterator[None]:
        """A run with latents as they were drawn before."""
        if not conditions.values:
            yield
            return
        with Held(conditions.values, conditions.draws):
            yield

    def _remember(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Take note of the last step's arguments."""
        if self.data is None:
            self.data = TrainingData(self.model, args, kwargs)
        self.data.args, self.data.kwargs = args, kwargs

    def _follow(self, order: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Follow the training data into another order of their rows."""
        assert self.structure is not None
        self._refuse_rows(self._local_latents, "the training data with its rows in another order")
        for module in self.site_modules().values():
            module.reorder(order)
        self.data = TrainingData(self.model, args, kwargs)

    def _refuse_rows(self, local: Sequence[str], what: str) -> None:
        if local:
            raise ValueError(
                f"this call brings {what}; site {local[0]!r} has a value for each row, which belongs to the row's "
                "number. Keep the rows and their order, or write plate = pyro.plate('data', N, subsample_size=B) and "
                "index the data by plate.indices."
            )

    def forget_data(self) -> None:
        """Forget the training data: the next call with observations brings those that families on sites are about.

        Parameters stay. Families with parameters for each row (FreeSites, sparse actions) need a new guide.

        :raises ValueError: naming the GP site of such a family.
        """
        for name, module in self.site_modules().items():
            if not module.forgets:
                raise ValueError(
                    f"GP site {name!r} has the family {module.family['name']}, with parameters for each row of its "
                    "training data: make a new guide for other data."
                )
        for module in self.site_modules().values():
            module.forget()
        self.data, self._forgotten = None, True

    @property
    def posteriors_so_far(self) -> dict[str, SparsePosterior]:
        """The posteriors of GP sites that the current run has passed."""
        return self._request.posteriors

    def posterior_given(self, name: str, prior: Any, sites: Optional[Sites], new_rows: bool) -> SparsePosterior:
        """The posterior of a GP site under a prior of other inputs, given the sites of a draw.

        :param sites: of a family on sites, those the draw was conditioned on.
        :param new_rows: whether the inputs are new, not those of training.
        """
        process, _ = as_process(prior)
        if process is None:
            raise ValueError(f"site {name!r} is no GP site")
        module = self._module(name, process)
        by_rows = isinstance(module, SiteGP) or process.kernel.depends_on_rows
        answer = module.predict if new_rows and by_rows else module
        return answer(process, name, SparsePosterior, sites) if isinstance(module, SiteGP) else answer(process, name)

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Take the inputs of calls for new ones, though there be observations at them."""
        before, self._new_rows = self._new_rows, True
        try:
            yield
        finally:
            self._new_rows = before

    @property
    def site_status(self) -> dict[str, dict[str, Any]]:
        """For each GP site whose Gaussian sites are read off the model: how many there are; whether they are exact
        (the likelihood is Gaussian in f); how many had negative curvature, which was cut to 0, at the last reading;
        how many updates of training were cut since they lowered the bound; and whether those of the posterior, other
        latents at their medians, have converged: another would move no marginal by 0.001 standard deviations.
        """
        if self.structure is None:
            raise ValueError("the guide has read no sites yet: call it with the data, guide(x, y), or take an SVI step")
        return {
            reading.name: {
                "sites": reading.sites.precision.numel(),
                "exact": reading.quadratic,
                "truncated": int(reading.truncated),
                "halved": reading.module.sites.halved,
                "converged": reading.change <= 1e-3,
            }
            for reading in self._conditions_now(median=True).readings
        }

    def site_modules(self) -> dict[str, SiteGP]:
        modules = {} if self.structure is None else {name: at_path(self.gps, name) for name in self.structure.gps}
        return {name: module for name, module in modules.items() if isinstance(module, SiteGP)}

    def get_traces(self) -> tuple[poutine.Trace, poutine.Trace]:
        """The (model, guide) traces of the last call, as in :class:`~pyro.poutine.guide.GuideMessenger`.

        A GP site's density is 1 in the model's and log dq/dp in the guide's: after :meth:`eval` the difference of
        the traces' log densities is a log importance weight; in training it is right in expectation only.

        :raises ValueError: in training, under an objective that is not linear in log densities, such as RenyiELBO, or
            if a density is piecewise constant in f, so that draws give it no gradient.
        """
        asked = self._request is self._idle and torch.is_grad_enabled()  # by an objective, not by the run itself
        flat = piecewise_constant(self.trace) if asked else []
        if flat:
            raise ValueError(
                f"site {flat[0]!r} has a piecewise constant density: draws of function values give it no gradient. "
                "Train with TraceQuadrature_ELBO, which asks the distribution for its expectation; to evaluate another "
                "objective use torch.no_grad()."
            )
        return self._traces()

    def _traces(self) -> tuple[poutine.Trace, poutine.Trace]:
        if self.by_expectation and self._request is self._idle and self.training and torch.is_grad_enabled():
            raise ValueError(
                "the guide has a family of expectation propagation, whose sites no gradient trains: take "
                "ExpectationPropagation(model, guide, optim) in the place of SVI, or a family such as SVGP."
            )
        model_trace, guide_trace = super().get_traces()
        for name, site in all_sites(guide_trace):
            if isinstance(without_event(site["fn"])[0], Site):
                site["fn"] = _paired(site["fn"])
                if self.training:
                    _require_linear(name)
        return model_trace, guide_trace

    # Posteriors at sites.

    def _pyro_sample(self, msg: Any) -> None:
        if is_left_out(msg["name"], self.trace.nodes):
            settle_left_out(msg, self.trace.nodes, draw=self._request.nodes is None)
        super()._pyro_sample(msg)
        prior = None if msg["infer"] is None else msg["infer"].get("prior")
        if prior is not None:
            process, event_dim = as_process(prior)
            if process is not None:  # in ELBOs the prior process is the base measure, of density 1
                base = PriorProcess.of(process)
                msg["infer"]["prior"] = base.to_event(event_dim) if event_dim else base

    def _pyro_post_sample(self, msg: Any) -> None:
        super()._pyro_post_sample(msg)
        if msg["is_observed"]:
            fill_masked(self.trace.nodes[msg["name"]])

    def get_posterior(self, name: str, prior: Any) -> Any:
        """The posterior of a site, given its prior under the values drawn upstream.

        Override it for sites that are no GPs, as in Pyro; what it returns for GP sites is a
        :class:`SparsePosterior`.
        """
        process, event_dim = as_process(prior)
        if process is not None:
            return self._process_posterior(name, process, event_dim)
        if self.structure is not None and (name not in self.structure.latents or self._is_new(name)):
            return prior
        if getattr(prior.support, "is_discrete", False):
            raise ValueError(
                f"site {name!r} is discrete and not observed. If it is data, the guide's first call needs them, "
                "model(x, y); a discrete latent has to be summed out in the model."
            )
        self._check_local(name)
        if self._computing_median or self._is_point(name):
            return self._get_posterior_median(name, prior)
        return super().get_posterior(name, prior)

    def _process_posterior(self, name: str, process: GaussianProcess, event_dim: int) -> Any:
        if getattr(self, "_outer_plates", ()) or any(plate.name in SAMPLE_PLATES for plate in get_plates()):
            raise ValueError(f"site {name!r} stands {SAMPLES_ARE_VECTORISED}")
        process.require_place(name)
        request = self._request
        module = self._module(name, process)
        self._check_dtype(name, process, module)
        if self.structure is not None and self.structure.groups:
            self._check_groups(name, process.event_shape[0])
        self._check_columns(name, process)
        if module.batch_shape != process.batch_shape:
            raise ValueError(
                f"site {name!r} has batch shape {tuple(process.batch_shape)} now, {tuple(module.batch_shape)} when the "
                "guide was initialised"
            )
        request.processes[name] = process
        if request.seeing:
            module.see(process.x)
        if request.points or request.seeing or (request.latents and isinstance(module, SiteGP)):
            return process.mean
        posterior = self._answer(name, process, module, self._kind(name, process))
        request.posteriors[name] = posterior
        if name in request.values:
            return request.values[name]
        if request.setup and isinstance(module, SiteGP):  # of a family that is refused if a layer stands above
            line = process.x.sum(-1)
            spread = (line - line.mean()).abs().amax().clamp(min=torch.finfo(line.dtype).tiny)
            return posterior.mean + posterior.stddev * (line - line.mean()) / spread
        if request.setup:  # a smooth function for the layers above to place their inducing inputs on
            w = posterior.coefficients.rsample(posterior.batch_shape)
            return process.mean + posterior.basis.function(process.x, w)
        if self._computing_median or (request.latents and not (request.same and self._is_inner(name))):
            return posterior.mean
        if isinstance(posterior, NodeSite) and request.nodes is not None:
            posterior.at_node(request.nodes[name])
        if isinstance(posterior, GroupedSite) and self.structure is not None:
            posterior.in_groups_of(self.structure.groups[name][0])
        return posterior.to_event(event_dim) if event_dim else posterior

    def _is_inner(self, name: str) -> bool:
        return self.structure is not None and name in self.structure.inner

    def _answer(self, name: str, process: GaussianProcess, module: Any, kind: type[Site]) -> Any:
        """The posterior at a GP site of this run."""
        request = self._request
        if isinstance(module, SiteGP):
            reading = next((r for r in request.conditions.readings if r.name == name), None)
            sites = None if reading is None else reading.sites
            if not request.same:
                return module.predict(process, name, kind, sites)
            posterior = module(process, name, kind, sites, reading is not None and reading.alone)
            if request.keep and reading is not None and not reading.direct:
                module.sites.marginals = posterior.mean.detach(), posterior.variance.detach()
            return posterior
        if process.kernel.depends_on_rows and not self._sees(name, process, module):
            return module.predict(process, name, kind)
        return module(process, name, kind)

    def _kind(self, name: str, process: GaussianProcess) -> type[Site]:
        """How a site is drawn in this run."""
        request = self._request
        if request.nodes is not None and name in request.nodes:
            return NodeSite
        if self._computing_median:
            return Site
        if request.predicting:
            if request.marginal:
                return self._kind_of_draws(name)
            self._check_size(name, process)
            return Site
        if self.training and not (request.joint and process.event_shape[0] <= _LARGE):
            return self._kind_of_draws(name)
        return Site

    def _kind_of_draws(self, name: str) -> type[Site]:
        """How a site is drawn in training."""
        if self.structure is None or name in self.independent_draws:
            return MarginalSite
        if self.structure.dependence.get(name) != structure.COUPLED:
            return MarginalSite
        return GroupedSite if name in self.structure.groups else ExpectedSite

    def _check_groups(self, name: str, num: int) -> None:
        """Raise if the rows of a layer are not as many as the groups of the layers below that it couples."""
        assert self.structure is not None
        for below, (size, above) in self.structure.groups.items():
            process = self._request.processes.get(below)
            rows = None if process is None else process.event_shape[0]
            if above == name and rows is not None and rows != num * size:
                raise ValueError(
                    f"GP site {below!r} has {rows} inputs and {name!r} has {num}; at the guide's first call {size} of "
                    f"{below!r} went into each of {name!r}, and are drawn together. A model's structure must not "
                    "change between calls."
                )

    def _sees(self, name: str, process: GaussianProcess, module: Any) -> bool:
        """Whether the rows are of the training data, on which the kernel's diagonal depends; training shows them."""
        if self._request.observing:
            if self._is_training:
                module.see(process.x)
                self._row_counts[name] = process.x.shape[-2], 0
        elif module.num_seen < self._row_counts.get(name, (0, 0))[1]:
            warn_once(
                self.warned,
                "rows unseen",
                name,
                f"the kernel of GP site {name!r} has a variance correction relative to the training inputs; the guide "
                f"has seen at most {module.num_seen} of {self._row_counts[name][1]} of them in one call. Call it once "
                "with all of them, guide(x, y), before or after training.",
                stacklevel=5,
            )
        return self._request.observing

    def _check_dtype(self, name: str, process: GaussianProcess, module: Any) -> None:
        kept = module.sites.inputs if isinstance(module, SiteGP) else process.x
        kept = module.gram if isinstance(module, ExpectationGP) else kept
        own = next(module.parameters(), kept)
        if own.dtype != process.x.dtype or own.device != process.x.device:
            method = {torch.float64: "double", torch.float32: "float"}.get(process.x.dtype, f"to({process.x.dtype})")
            remedy = f"guide.{method}()" if own.device == process.x.device else f"guide.to({str(process.x.device)!r})"
            raise ValueError(
                f"site {name!r} has inputs of {process.x.dtype} on {process.x.device}, the guide's parameters are "
                f"{own.dtype} on {own.device}: convert the inputs, or call {remedy}."
            )

    def _check_columns(self, name: str, process: GaussianProcess) -> None:
        known = None if self.structure is None else self.structure.columns.get(name)
        if known not in (None, process.x.shape[-1]):
            raise ValueError(
                f"GP site {name!r} has inputs of shape {tuple(process.x.shape)}; at the guide's first call they had "
                f"{known} columns, not {process.x.shape[-1]}."
            )

    def _check_size(self, name: str, process: GaussianProcess) -> None:
        num = process.event_shape[0]
        if num > _LARGE:
            warn_once(
                self.warned,
                "large joint draw",
                name,
                f"{num} values of GP site {name!r} are drawn jointly, at O(N³) time and O(N²) memory a draw; "
                "predict(..., joint=False) draws them independently, in O(N).",
                stacklevel=4,
            )

    def _module(self, name: str, process: GaussianProcess) -> Any:
        if not self._request.setup:
            try:
                return attrgetter(name)(self.gps)
            except AttributeError:
                known = [] if self.structure is None else sorted(self.structure.gps)
                raise ValueError(
                    f"GP site {name!r} was not there when the guide was initialised; it knows {known}"
                ) from None
        try:
            process.kernel.check_inputs(process.x)
        except ValueError as error:
            raise ValueError(f"GP site {name!r}: {error}") from None
        module = self._family(name).build(process, name)
        self._warn_of_noise(name, process)
        deep_setattr(self, "gps." + name, module)
        return attrgetter(name)(self.gps)

    def _warn_of_noise(self, name: str, process: GaussianProcess) -> None:
        if process.kernel.depends_on_rows:  # a correction that families know of
            return
        share = float(white_share(process.kernel, process.x).amax())
        if share > 0.01:
            warnings.warn(
                f"{share:.0%} of the variance of GP site {name!r} is independent noise at each row, such as a White "
                "term's. A guide learns nothing of it, and its intervals for the other terms are too narrow: put noise "
                "into the likelihood, and effects of single rows into a plate of latents.",
                stacklevel=4,
            )

    def _family(self, name: str) -> Family:
        if not isinstance(self.families, Mapping):
            return self.families
        if name not in self.families:
            raise ValueError(
                f"no family is given for GP site {name!r}; AutoSparseGP's families has {sorted(self.families)}. Add "
                f"{{{name!r}: SVGP(64)}}, or give one family for all GP sites."
            )
        return self.families[name]

    # Latents that are no GPs.

    def _is_point(self, name: str) -> bool:
        points = self.point_estimates
        return points if isinstance(points, bool) else name in points

    def _is_new(self, name: str) -> bool:
        """Whether a latent under the data plate is asked for at other data than it was fitted to."""
        assert self.structure is not None
        plates = self.structure.latents[name]["plates"]
        if not any(plate in self.structure.data_plates for plate in plates):
            return False
        here = {plate.name: plate for plate in get_plates()}
        sizes = {name: plate.full_size or plate.size for name, plate in here.items()}
        if self._request.predicting or any(sizes.get(plate, size) != size for plate, size in plates.items()):
            return not self._request.latents
        # Row numbers of a plate's part say which rows they are.
        return not self._request.rows_known and all(plate.size == sizes[name] for name, plate in here.items())

    def _check_local(self, name: str) -> None:
        for plate in get_plates():
            node = self.trace.nodes.get(plate.name)
            if node is None or plate.size == (plate.full_size or plate.size):
                continue
            indices = node["value"]
            if isinstance(indices, Tensor) and (indices.is_floating_point() or indices.dim() != 1):
                raise ValueError(
                    f"latent site {name!r} inside pyro.plate({plate.name!r}, subsample=...) has a value for every row, "
                    "but the plate was given data, not row numbers: write plate = pyro.plate(..., subsample_size=B) "
                    "and index the data by plate.indices, or give subsample=indices."
                )

    def _get_params(self, name: str, prior: Any) -> tuple[Tensor, Tensor]:
        try:
            loc = attrgetter(name)(self.locs)
        except AttributeError:
            self._new_latent(name, prior)
            loc = attrgetter(name)(self.locs)
        return loc, loc if self._is_point(name) else attrgetter(name)(self.scales)

    def _new_latent(self, name: str, prior: Any) -> None:
        with torch.no_grad(), helpful_support_errors({"name": name, "fn": prior}):
            transform = biject_to(prior.support)
            event_dim = transform.domain.event_dim
            # Parameters follow the data's dtype and device; the prior may be made of Python numbers.
            start = self.init_loc_fn({"name": name, "fn": prior}).detach().to(self._like)
            loc = self._adjust_plates(transform.inv(start), event_dim)
        self._set_latent(name, loc, event_dim)

    def _set_latent(self, name: str, loc: Tensor, event_dim: int) -> None:
        deep_setattr(self, "locs." + name, PyroParam(loc, event_dim=event_dim))
        if not self._is_point(name):
            scale = torch.full_like(loc, self._init_scale)
            deep_setattr(self, "scales." + name, PyroParam(scale, constraints.positive, event_dim))

    # The first call.

    def _initialise(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "the guide's first call makes its parameters, which torch.inference_mode() forbids: call it once, "
                "guide(x, y), outside, or use torch.no_grad()."
            )
        self._like = first_tensor((args, kwargs))
        try:
            with (
                torch.no_grad(),
                poutine.block(),
                self._requesting(_Request(setup=True), median=True) as request,
            ):
                self._run(args, kwargs)
            trace = self.trace
            survey.require_sizes(trace)
            survey.require_sites(self, trace, request.posteriors)
            self.structure = survey.describe(self, trace, request.posteriors)
            self._see_all(args, kwargs, trace, request)
            with torch.no_grad():
                survey.require_left_out(self, trace, args, kwargs)
                first = survey.find_dependence(self.structure, lambda values: self.probe(args, kwargs, values))
                survey.find_exact_sites(self, first, args, kwargs)
            for name, posterior in first.posteriors.items():
                family = self._family(name)
                if isinstance(family, FreeFormFamily) and family.start == "data" and name not in self.structure.inner:
                    at_path(self.gps, name).inform(posterior.process, name)
            self.data = TrainingData(self.model, args, kwargs)
            self._warn_of_joint_draws()
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        self.data = None
        for name in ("gps", "locs", "scales"):
            if name in self._modules:
                delattr(self, name)
        self.structure = None
        self._checked_parameters = False

    def _warn_of_joint_draws(self) -> None:
        assert self.structure is not None
        coupled = [name for name in self.structure.gps if self._kind_of_draws(name) is ExpectedSite]
        if coupled:
            warnings.warn(
                f"The model couples values of the GP site{'s' if len(coupled) > 1 else ''} {', '.join(coupled)} at "
                "different inputs: they are drawn jointly, at a cost cubic in the number of inputs, and not integrated "
                "by quadrature.",
                stacklevel=4,
            )

    def _see_all(self, args: tuple, kwargs: dict[str, Any], trace: poutine.Trace, request: _Request) -> None:
        """Show modules whose kernel depends on them the rows that plates with a ``subsample_size`` left out."""
        sites: Any = trace.nodes
        frames = [frame for site in sites.values() if is_observation(site) for frame in site["cond_indep_stack"]]
        left_out = any(frame.full_size is not None and frame.size < frame.full_size for frame in frames)
        if left_out and any(q.process.kernel.depends_on_rows for q in request.posteriors.values()):
            seeing = _Request(seeing=True)
            with torch.no_grad(), poutine.block(), whole_plates(), self._requesting(seeing, median=True):
                super().__call__(*args, **kwargs)
            self.trace = trace

    def probe(self, args: tuple, kwargs: dict[str, Any], values: dict[str, Tensor]) -> Probe:
        """Run with GP sites at ``values``, other latents at their medians and the same random numbers."""
        request = _Request(values=values)
        quiet = poutine.block(), pyro.validation_enabled(False)
        with repeatable(self._like), quiet[0], quiet[1], self._requesting(request, median=True):
            super().__call__(*args, **kwargs)
        densities, fixed = {}, {}
        for name, site in all_sites(self.trace):
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            fixed[name] = site["value"]
            if name not in request.posteriors:
                fn = site["infer"].get("prior", site["fn"])
                densities[name] = torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), 1.0, site["mask"]))
        return Probe(densities, request.posteriors, fixed)

    def _check_loaded(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the parameters at the first call after a state was loaded, whatever the call is for."""
        if not self._loaded:
            return
        self._loaded = False
        if not self._checked_parameters and not torch.is_inference_mode_enabled():
            # The graph is what shows where parameters come from; what the call draws later stays as it would be.
            with torch.enable_grad(), whole_plates(), repeatable(self.like):
                self._check_parameters(args, kwargs)

    def _check_parameters(self, args: tuple, kwargs: dict[str, Any]) -> None:
        probe = self.probe(args, kwargs, {})
        self._check_known()
        require_registered(self.model, probe, self.trace, (args, kwargs))
        self._checked_parameters = True

    def _check_known(self) -> None:
        """After a run: raise if, at a training call, the model's sites are not those the guide was initialised or
        loaded with.
        """
        assert self.structure is not None
        sites = dict(all_sites(self.trace))
        if not all(name in sites and sites[name]["is_observed"] for name in self.structure.rows):
            return
        free = {name for name, site in sites.items() if is_free(site) and not site_is_subsample(site)}
        known = {*self.structure.gps, *self.structure.latents}
        if free != known:
            raise ValueError(
                f"the model's latent sites are {sorted(free)}, the guide knows {sorted(known)}: it was initialised, or "
                "its state saved, with another model."
            )

    def explain_nan(self, *args: Any, **kwargs: Any) -> str:
        """Which sites' log densities are NaN or infinite at these arguments, for an error."""
        with torch.no_grad():
            run = self.probe(args, kwargs, {})
        where = []
        for kind, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
            bad = {name: test(density) for name, density in run.densities.items()}
            found = [
                f"{name!r} ({int(part.sum())} of {part.numel()} values)" for name, part in bad.items() if part.any()
            ]
            where += [f"the log density of site {', '.join(found)} is {kind}"] if found else []
        where += [
            f"the KL divergence of GP site {name!r} is not finite"
            for name, q in run.posteriors.items()
            if not q.kl.isfinite().all()
        ]
        broken = [name for name, parameter in self.named_parameters() if not parameter.isfinite().all()]
        where += [f"parameters {', '.join(broken)} are not finite"] if broken else []
        return "; ".join(where) or "all is finite at the medians"

    def _check_rows(self, relation: Optional[Relation]) -> None:
        assert self.structure is not None
        if not torch.is_grad_enabled() or not self.training:
            return
        for name, site in all_sites(self.trace):
            rows = self.structure.rows.get(name)
            if rows is None or not site["is_observed"]:
                continue
            unscaled = isinstance(site["scale"], (int, float)) and site["scale"] == 1
            num = site["value"].numel()
            if unscaled and (num < rows or (num == rows and self._are_others(name, relation))):
                fewer = f"{num} values in this step, {rows} in the first"
                warn_once(
                    self.warned,
                    "rows",
                    name,
                    f"site {name!r} observes {fewer if num < rows else f'other {num} rows than before'}, and no plate "
                    "scales them up: if this is a mini-batch, give the plate the full size, pyro.plate('data', size=N, "
                    "subsample=x) or subsample_size=B; otherwise the KL outweighs the data.",
                    stacklevel=4,
                )

    def _are_others(self, name: str, relation: Optional[Relation]) -> bool:
        """Whether a step's rows are others than the first's, asked until it was told of."""
        asked = ("rows", name) not in self.warned and not self.by_expectation  # which refuses them itself
        return asked and relation is not None and relation.others and not relation.same

    # State.

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All that makes the guide: a freshly made one, of the same model, is this one after ``load_state_dict``.

        With a family on sites, or latents under the data plate, it holds the training data too, N(D + 1) numbers for
        the arguments (x, y): a draw from the posterior conditions on them, given a draw of the other latents. In
        memory the guide keeps the arguments of the last training call themselves, no copies. Arguments other than
        tensors, numbers, strings and lists, tuples and dictionaries of them are left out, and with them the data: then
        call the loaded guide with the data once, ``guide(x, y)``.
        """
        return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.structure is not None and not self._loaded:
            self._conditions_now(median=True)  # the sites are kept, for a guide that is loaded without the data
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._like = args[0](self._like)
        for module in self.site_modules().values():
            if isinstance(module.sites, KeptSites):
                module.sites.marginals = None
        if self.data is not None:
            self.data = self.data.mapped(args[0], self.model)
        return super()._apply(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """The :class:`Structure`, in plain Python, the name of the guide's parameters in Pyro's store, and the training
        data where prediction needs them.
        """
        if self.structure is None:
            return {}
        state: dict[str, Any] = {"name": self._pyro_name, **asdict(self.structure)}
        if self.data is not None and self._is_about_rows and self.data.is_plain:
            state["data"] = {"args": self.data.args, "kwargs": self.data.kwargs}
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing: :meth:`load_state_dict` rebuilds the modules from it first."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "_extra_state")
        if saved:
            tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
            found = {key: value for key, value in saved.items() if key not in ("name", "data")}
            self._rebuild(Structure(**found), tensors)
            self.data = None
            if "data" in saved:
                data = TrainingData(self.model, saved["data"]["args"], saved["data"]["kwargs"])
                self.data = data.mapped(partial(_placed, like=self.like), self.model)
            if "name" in saved:
                self._resume_name(saved["name"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        # Its name is its own inside another module, too: two of these may hold guides under one attribute's name.
        super()._pyro_set_supermodule(self._pyro_name, context)

    def _resume_name(self, name: str) -> bool:
        """Take the name that this guide's parameters had when they were saved, if the guide that was saved is gone: a
        saved optimiser finds them by it.
        """
        before = self._pyro_name
        if not take_name(self, name):
            return False
        drop_stored(before)
        self._loaded = True
        return True

    def _rebuild(self, saved: Structure, tensors: dict[str, Any]) -> None:
        now = self.structure
        if now is not None:
            for kind, here, there in (
                ("GP sites", now.gps, saved.gps),
                ("other latents", now.latents, saved.latents),
                ("observed sites", now.rows, saved.rows),
            ):
                if here.keys() != there.keys():
                    raise ValueError(
                        f"the saved guide's {kind} are {sorted(there)}, this guide's are {sorted(here)}: it is the "
                        "state of a guide of another model."
                    )
        if now is None or now.gps != saved.gps or now.latents != saved.latents:
            self._forget()
            for name, latent in saved.latents.items():
                if latent["shape"] is None:
                    continue
                like = tensors[f"locs.{name}_unconstrained"]
                self._set_latent(name, like.new_zeros(latent["shape"]), latent["event_dim"])
            for name, spec in saved.gps.items():
                like = next(t for key, t in tensors.items() if key.startswith(f"gps.{name}.") and t.is_floating_point())
                deep_setattr(self, "gps." + name, self._family(name).rebuild(spec, like, name))
                self._like = like
        self.structure = saved
        self._loaded, self._checked_parameters = True, False

    def __getstate__(self) -> dict[str, Any]:
        # Weak references, which Pyro's store hangs on what it hands out, do not pickle.
        for parameter in [*self.parameters(), *(held for held, *_ in held_parameters(self.model))]:
            parameter.__dict__.pop("unconstrained", None)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.trace = poutine.Trace()
        # A copy is a guide of its own, with a name of its own.
        if not self._resume_name(self._pyro_name):
            take_name(self, unique_name("AutoSparseGP"))


_LARGE = 5000  # function values whose joint draw is slow enough to be told of


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)


def _paired(fn: Any) -> Any:
    if isinstance(fn, torch.distributions.Independent):
        return dist.Independent(_paired(fn.base_dist), fn.reinterpreted_batch_ndims)
    return fn.paired()


# The code of objectives that exponentiate log densities; their loops are the callers of get_traces.
_WEIGHTED = {
    inspect.unwrap(method).__code__: objective.__name__
    for objective in (RenyiELBO, TraceTailAdaptive_ELBO)
    for method in vars(objective).values()
    if inspect.isfunction(method)
}


def _require_linear(name: str) -> None:
    frame = inspect.currentframe()
    while frame is not None:
        objective = _WEIGHTED.get(frame.f_code)
        if objective is not None:
            raise ValueError(
                f"{objective} weighs draws by their densities; in training, GP site {name!r} has independent marginal "
                "draws and the expectation of its density. Call guide.eval() first, for joint draws, or use "
                "TraceQuadrature_ELBO, Trace_ELBO or TraceMeanField_ELBO."
            )
        frame = frame.f_back
