"""The guide: the only place that knows Pyro's messengers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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

from . import structure, survey
from .conditioning import correct_sites, is_corrected, observes, read_sites, repeatable, require_full_batch
from .drawing import ExpectedSite, GroupedSite, MarginalSite, NodeSite, Site
from .expectation_gp import ExpectationGP, require_refined
from .families import ExpectationFamily, Family, FreeFormFamily, SiteFamily
from .kernels import base as kernel_base
from .modules import at_path, drop_stored, take_name, unique_name
from .process import SAMPLE_PLATES, SAMPLES_ARE_VECTORISED, GaussianProcess, PriorProcess
from .registration import require_registered
from .sites import KeptSites
from .sparse_gp import SiteGP
from .sparse_posterior import SparsePosterior
from .survey import Probe, Structure
from .traces import (
    all_sites,
    as_process,
    fill_masked,
    first_tensor,
    is_free,
    is_observation,
    piecewise_constant,
    whole_plates,
    without_event,
)

__all__ = ["AutoSparseGP"]


@dataclass
class _Request:
    """What one run of the guide is for."""

    setup: bool = False  # make the modules
    predicting: bool = False  # new inputs: latents under the data plate come from the model
    values: dict[str, Tensor] = field(default_factory=dict)  # GP sites held at these values
    nodes: Optional[dict[str, Tensor]] = None  # GP sites at these standardised quadrature nodes
    reading: bool = False  # sites are read off the model
    refreshing: bool = False  # and nothing else is wanted
    processes: Optional[dict[str, GaussianProcess]] = None  # GP sites' priors are wanted, and nothing else
    seeing: bool = False  # modules take note of all the training inputs, and nothing else is wanted
    observing: Optional[bool] = None  # whether data are observed; None is not known
    posteriors: dict[str, SparsePosterior] = field(default_factory=dict)  # collected
    ahead: dict[str, Tensor] = field(default_factory=dict)  # drawn before the run gets there


class AutoSparseGP(AutoNormalMessenger):
    """A guide for a Pyro model with Gaussian process sites: a sparse variational family for each of them.

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
        self._last: Optional[tuple[tuple, dict[str, Any]]] = None  # the last training call, of families on sites
        self.warned: set[str] = set()
        self._row_counts: dict[str, tuple[int, int]] = {}  # of a GP's rows in a mini-batch, and in all the data

    # Running the model.

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every site, running the model once.

        :returns: latent, deterministic and observed sites' values by name.
        :raises ValueError: naming the site and the remedy, if the model or its data do not fit the guide.
        """
        if self._request.nodes is not None:  # at_nodes calls, perhaps through a wrapper
            return super().__call__(*args, **kwargs)
        self.prepare(*args, **kwargs)
        observing = False if self._new_rows else None
        self._require_refined(lambda: self._new_rows or not observes(self, args, kwargs))
        corrected = (is_corrected(self, name, at_path(self.gps, name)) for name in self._row_counts)
        if self._last is not None and any(corrected):
            observing = observes(self, args, kwargs) if observing is None else observing
            if not observing:
                self._refresh_sites()
        with self._requesting(_Request(reading=self.on_sites, observing=observing), self._computing_median):
            draws = super().__call__(*args, **kwargs)
        self._after_run(args, kwargs)
        return draws

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """What a first call does before it draws: initialise, and check that all parameters would train."""
        self._wake(args, kwargs)
        if torch.is_grad_enabled() and not self._checked_parameters:
            self._check_parameters(args, kwargs)
        self._check_loaded(args, kwargs)
        if not self.keeps_sites:
            self._refresh_sites()

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
        self._refresh_sites()
        with (
            self._requesting(_Request(predicting=True, observing=False), median=True) as request,
            poutine.block(),
            whole_plates(),
        ):
            super().__call__(*args, **kwargs)
        return request.posteriors

    def at_nodes(
        self, nodes: dict[str, Tensor], wrapped: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Tensor]]:
        """One run with GP sites at standardised quadrature nodes, mean + sd·node.

        :param wrapped: this guide, or what handlers such as ``poutine.scale`` made of it.
        :returns: the model's trace, the guide's, and the values of all sites, the plates' row numbers among them.
        """
        with self._requesting(_Request(nodes=nodes, reading=self.on_sites, observing=True)):
            wrapped(*args, **kwargs)
        try:
            self._after_run(args, kwargs)
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
        processes: dict[str, GaussianProcess] = {}
        with self._requesting(_Request(processes=processes), median=True):
            super().__call__(*args, **kwargs)
        self._check_rows()
        values = {
            name: torch.as_tensor(site["value"])
            for name, site in all_sites(self.trace)
            if is_free(site) and name not in processes
        }
        return processes, values, self.trace

    def draw(self, *args: Any, joint: bool = True, **kwargs: Any) -> dict[str, Tensor]:
        """One draw of every site at new inputs, for prediction: subsampling is off, latents under the data plate
        come from the model.

        :param joint: draw function values jointly, in O(N³), or independently from their marginals.
        """
        self._wake(args, kwargs)
        self._require_refined()
        self._check_loaded(args, kwargs)
        self._refresh_sites()
        training = self.training
        self.train(not joint)
        try:
            with self._requesting(_Request(predicting=True, observing=False)), poutine.block(), whole_plates():
                return super().__call__(*args, **kwargs)
        finally:
            self.train(training)

    def _after_run(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._check_rows()
        self._count_rows()
        if not self.on_sites:
            return
        for name, module in self.site_modules().items():
            require_full_batch(name, module, self.trace)
        assert self.structure is not None
        if self.keeps_sites and any(self.trace.nodes[name]["is_observed"] for name in self._rows_here()):
            self._last = args, kwargs

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
    def keeps_sites(self) -> bool:
        """Whether this run's sites are to be kept: with gradients, it is a step of training."""
        return self._request.refreshing or (torch.is_grad_enabled() and not self._computing_median)

    @property
    def posteriors_so_far(self) -> dict[str, SparsePosterior]:
        """The posteriors of GP sites that the current run has passed."""
        return self._request.posteriors

    @property
    def drawn_ahead(self) -> dict[str, Tensor]:
        """Values that the current run will take where it gets to these sites."""
        return self._request.ahead

    def look_ahead(self, name: str, prior: Any, new_rows: bool = False) -> Any:
        """The posterior of a site that the current run has not reached; of a GP site, the one of the sites kept.

        :param new_rows: whether its inputs are new, not those of training.
        """
        process, _ = as_process(prior)
        if process is None:
            return self.get_posterior(name, prior)
        module = self._module(name, process)
        if new_rows and kernel_base.depends_on_rows(process.kernel):
            return module.predict(process, name)
        return module(process, name)

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
        """For each GP site whose Gaussian sites are read off the model: how many there are, whether they are exact
        (the likelihood is Gaussian in f), and how many had negative curvature, which was cut to 0, at the last reading.
        """
        if self.structure is None:
            raise ValueError("the guide has read no sites yet: call it with the data, guide(x, y), or take an SVI step")
        self._refresh_sites()
        return {
            name: {
                "sites": module.sites.precision.numel(),
                "exact": name in self.structure.quadratic,
                "truncated": int(module.sites.truncated),
            }
            for name, module in self.site_modules().items()
            if isinstance(module.sites, KeptSites)
        }

    def site_modules(self) -> dict[str, SiteGP]:
        modules = {} if self.structure is None else {name: at_path(self.gps, name) for name in self.structure.gps}
        return {name: module for name, module in modules.items() if isinstance(module, SiteGP)}

    def _refresh_sites(self) -> None:
        """Read the sites at the parameters as they are now and the other latents' medians."""
        if self._last is None or self._request.refreshing:
            return
        args, kwargs = self._last
        self._last = None
        trace = self.trace
        try:
            with (
                torch.inference_mode(False),  # what is kept must serve training, too
                torch.no_grad(),
                repeatable(self._like),
                poutine.block(),
                self._requesting(_Request(reading=True, refreshing=True, observing=True), median=True),
            ):
                super().__call__(*args, **kwargs)
        finally:
            self.trace = trace

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
        super()._pyro_sample(msg)
        prior = None if msg["infer"] is None else msg["infer"].get("prior")
        if prior is not None:
            process, event_dim = as_process(prior)
            if process is not None:  # in ELBOs the prior process is the base measure, of density 1
                base = PriorProcess.of(process)
                msg["infer"]["prior"] = base.to_event(event_dim) if event_dim else base
            elif msg["name"] in self._request.ahead:
                msg["value"] = self._request.ahead[msg["name"]]

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
        if request.predicting and not self.training and not self._computing_median:
            self._check_size(name, process)
        if self.structure is not None and self.structure.groups:
            self._check_groups(name, process.event_shape[0])
        if module.batch_shape != process.batch_shape:
            raise ValueError(
                f"site {name!r} has batch shape {tuple(process.batch_shape)} now, {tuple(module.batch_shape)} when the "
                "guide was initialised"
            )
        if request.processes is not None:
            request.processes[name] = process
            return process.mean
        kind: type[Site] = Site
        if request.nodes is not None and name in request.nodes:
            kind = NodeSite
        elif self.training and not self._computing_median:
            kind = self._kind_of_draws(name)
        if request.seeing:
            module.see(process.x)
            return process.mean
        observing = True
        if kernel_base.depends_on_rows(process.kernel):
            observing = self._observing(name, process, module)
        if request.refreshing and isinstance(module, SiteGP):
            # Iterated sites stay: to look at a guide must not change how it trains.
            if isinstance(module.sites, KeptSites) and self.structure and name in self.structure.quadratic:
                read_sites(self, name, process, module)
            elif kernel_base.depends_on_rows(process.kernel) and is_corrected(self, name, module):
                correct_sites(self, name, process, module)
            if not self._meets(name):
                return process.mean
        if request.reading and not request.refreshing and self._is_to_read(module):
            sites = read_sites(self, name, process, module)
            quadratic = self.structure is not None and name in self.structure.quadratic
            if observing:
                exact = sites is not None and quadratic and not self._meets(name)
                posterior = module(process, name, kind, sites, exact)
            else:
                posterior = module.predict(process, name, kind)
            if sites is not None and not quadratic and self.keeps_sites:
                module.sites.marginals = posterior.mean.detach(), posterior.variance.detach()
        else:
            posterior = module(process, name, kind) if observing else module.predict(process, name, kind)
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
        if self._computing_median:
            return posterior.mean
        if isinstance(posterior, NodeSite) and request.nodes is not None:
            posterior.at_node(request.nodes[name])
        if isinstance(posterior, GroupedSite) and self.structure is not None:
            posterior.in_groups_of(self.structure.groups[name][0])
        return posterior.to_event(event_dim) if event_dim else posterior

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
            rows = self.posteriors_so_far[below].process.event_shape[0] if below in self.posteriors_so_far else None
            if above == name and rows is not None and rows != num * size:
                raise ValueError(
                    f"GP site {below!r} has {rows} inputs and {name!r} has {num}; at the guide's first call {size} of "
                    f"{below!r} went into each of {name!r}, and are drawn together. A model's structure must not "
                    "change between calls."
                )

    def _observing(self, name: str, process: GaussianProcess, module: Any) -> bool:
        """Whether this run observes data, for a kernel whose diagonal depends on the rows in training."""
        request = self._request
        if request.observing is None:
            request.observing = observes(self, *self.args_kwargs)
        if request.observing:
            if self.keeps_sites:
                module.see(process.x)
                self._row_counts[name] = process.x.shape[-2], 0
        elif module.num_seen < self._row_counts.get(name, (0, 0))[1] and name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"the kernel of GP site {name!r} has a variance correction relative to the training inputs; the guide "
                f"has seen at most {module.num_seen} of {self._row_counts[name][1]} of them in one call. Call it once "
                "with all of them, guide(x, y), before or after training.",
                stacklevel=5,
            )
        return request.observing

    def _is_to_read(self, module: Any) -> bool:
        if not isinstance(module, SiteGP) or not isinstance(module.sites, KeptSites):
            return False
        return self.keeps_sites or module.sites.empty

    def _meets(self, name: str) -> bool:
        return self.structure is not None and any(name in pair for pair in self.structure.interactions)

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

    def _check_size(self, name: str, process: GaussianProcess) -> None:
        num = process.event_shape[0]
        if num > _LARGE and name not in self.warned:
            self.warned.add(name)
            warnings.warn(
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
            kernel_base.check_inputs(process.kernel, process.x)
        except ValueError as error:
            raise ValueError(f"GP site {name!r}: {error}") from None
        module = self._family(name).build(process, name)
        self._warn_of_noise(name, process)
        deep_setattr(self, "gps." + name, module)
        return attrgetter(name)(self.gps)

    def _warn_of_noise(self, name: str, process: GaussianProcess) -> None:
        if kernel_base.depends_on_rows(process.kernel):  # a correction that families know of
            return
        share = float(kernel_base.white_share(process.kernel, process.x).amax())
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
        sizes = {plate.name: plate.full_size or plate.size for plate in get_plates()}
        return self._request.predicting or any(sizes.get(plate, size) != size for plate, size in plates.items())

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
                self._requesting(_Request(setup=True, observing=True), median=True) as request,
            ):
                super().__call__(*args, **kwargs)
            trace = self.trace
            survey.require_sites(self, trace, request.posteriors)
            self.structure = survey.describe(self, trace, request.posteriors)
            self._see_all(args, kwargs, trace, request)
            with torch.no_grad():
                first = survey.find_dependence(self.structure, lambda values: self.probe(args, kwargs, values))
                survey.find_exact_sites(self, first, args, kwargs)
            for name, posterior in first.posteriors.items():
                family = self._family(name)
                if isinstance(family, FreeFormFamily) and family.start == "data" and name not in self.structure.inner:
                    at_path(self.gps, name).inform(posterior.process, name)
            self._warn_of_joint_draws()
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        self._last = None
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
        if left_out and any(kernel_base.depends_on_rows(q.process.kernel) for q in request.posteriors.values()):
            seeing = _Request(seeing=True, observing=True)
            with torch.no_grad(), poutine.block(), whole_plates(), self._requesting(seeing, median=True):
                super().__call__(*args, **kwargs)
            self.trace = trace

    def probe(self, args: tuple, kwargs: dict[str, Any], values: dict[str, Tensor]) -> Probe:
        """Run with GP sites at ``values``, other latents at their medians and the same random numbers."""
        request = _Request(values=values, observing=True)
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
            densities = self.probe(args, kwargs, {}).densities
        bad = {name: ~density.isfinite() for name, density in densities.items()}
        kinds = {name: "NaN" if densities[name].isnan().any() else "infinite" for name in bad}
        found = [
            f"{name!r} ({int(which.sum())} of {which.numel()} values) is {kinds[name]}"
            for name, which in bad.items()
            if which.any()
        ]
        where = (
            f"the log density of site {', '.join(found)}"
            if found
            else "no log density is NaN or infinite at the medians"
        )
        broken = [name for name, parameter in self.named_parameters() if not parameter.isfinite().all()]
        return where + (f"; parameters {', '.join(broken)} are not finite" if broken else "")

    def _check_rows(self) -> None:
        assert self.structure is not None
        if "rows" in self.warned or not torch.is_grad_enabled() or not self.training:
            return
        for name, site in all_sites(self.trace):
            rows = self.structure.rows.get(name)
            if rows is None or not site["is_observed"]:
                continue
            if isinstance(site["scale"], (int, float)) and site["scale"] == 1 and site["value"].numel() < rows:
                self.warned.add("rows")
                warnings.warn(
                    f"site {name!r} observes {site['value'].numel()} values in this step, {rows} in the first, and no "
                    "plate scales them up: if this is a mini-batch, give the plate the full size, pyro.plate('data', "
                    "size=N, subsample=x) or subsample_size=B; otherwise the KL outweighs the data.",
                    stacklevel=4,
                )

    # State.

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._refresh_sites()
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._refresh_sites()  # the data stay where they are
        self._like = args[0](self._like)
        for module in self.site_modules().values():
            if isinstance(module.sites, KeptSites):
                module.sites.marginals = None
        return super()._apply(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """The :class:`Structure`, in plain Python, and the name of the guide's parameters in Pyro's store."""
        return {} if self.structure is None else {"name": self._pyro_name, **asdict(self.structure)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing: :meth:`load_state_dict` rebuilds the modules from it first."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "_extra_state")
        if saved:
            tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
            found = {key: value for key, value in saved.items() if key != "name"}
            self._rebuild(Structure(**found), tensors)
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
        self._refresh_sites()
        for parameter in self.parameters():  # weak references do not pickle
            parameter.__dict__.pop("unconstrained", None)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.trace = poutine.Trace()
        # A copy is a guide of its own, with a name of its own.
        if not self._resume_name(self._pyro_name):
            take_name(self, unique_name("AutoSparseGP"))


_LARGE = 5000  # function values whose joint draw is slow enough to be told of


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
