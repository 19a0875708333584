"""A guide that answers at GP sites: which module, what is checked there, and what a run collects."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Optional, Union

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import RenyiELBO, TraceTailAdaptive_ELBO
from pyro.infer.autoguide.utils import deep_setattr
from pyro.poutine.runtime import get_plates
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..approximations.expectation import ExpectationGP, require_refined
from ..approximations.free import SparseGP
from ..approximations.on_sites import SiteGP
from ..families import ExpectationFamily, Family, SiteFamily
from ..gaussians import Share
from ..gaussians.steps import running
from ..kernels.base import white_share
from ..modules import at_path
from ..posterior.drawing import OTHER_LATENTS, ExpectedSite, FunctionSite, GroupedSite, MarginalSite, Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import SAMPLE_PLATES, SAMPLES_ARE_VECTORISED, GaussianProcess, PriorProcess
from ..program.checks import unfit_parameter
from ..program.dependence import COUPLED
from ..program.enumeration import Enumeration
from ..program.facts import Structure
from ..program.handlers import is_blocked, stand_in
from ..program.registration import Probe
from ..program.traces import (
    LEFT_OUT,
    all_sites,
    as_process,
    fill_masked,
    is_left_out,
    piecewise_constant,
    repeatable,
    settle_left_out,
    without_event,
)
from ..warned import Warned
from .coupled import CoupledLatents
from .joint import Families, by_name, require_families, shared
from .networks import Calls
from .runs import Met, ProbeRun, Run, require_inputs

__all__ = ["GPSites"]


class GPSites(CoupledLatents):
    """A guide whose GP sites are answered by their families' modules, as the run it is on has it."""

    def __init__(
        self,
        model: Callable,
        families: Families,
        point_estimates: Union[bool, Collection[str], None],
        independent_draws: Collection[str],
        coupled: Union[bool, Collection[str]],
        **kwargs: Any,
    ) -> None:
        if not callable(model):
            raise ValueError(f"AutoSparseGP's model must be callable, got {type(model).__name__}")
        if is_blocked(model):
            raise ValueError(
                "AutoSparseGP's model is under poutine.block, as for a part of AutoGuideList or EasyGuide: a GP site's "
                "posterior is made of its prior, which depends on the sites hidden there. Give AutoSparseGP the whole "
                f"model, and SVI this guide alone; {OTHER_LATENTS}."
            )
        require_families(families)
        if isinstance(independent_draws, str):
            raise ValueError(f"independent_draws must be a collection of names, such as ({independent_draws!r},)")
        if isinstance(coupled, str) or not isinstance(coupled, (bool, Collection)):
            raise ValueError(f"coupled must be True or a collection of names, such as ({coupled!r},)")
        super().__init__(model, **kwargs)
        self.coupled = coupled if isinstance(coupled, bool) else tuple(coupled)
        self._parts = {}
        self.families = families
        self.by_name = by_name(families)
        given = self.declared_families()
        # Whether a GP site's posterior follows from Gaussian sites, so that it needs all the data at once.
        self.on_sites = any(isinstance(family, SiteFamily) for family in given)
        # Whether a GP site has a family of expectation propagation, which ExpectationPropagation trains.
        self.by_expectation = any(isinstance(family, ExpectationFamily) for family in given)
        self.point_estimates = self.by_expectation if point_estimates is None else point_estimates
        self.independent_draws = tuple(independent_draws)
        self.warned: Warned = set()
        self._idle = self._run
        self.calls: Optional[Calls] = None  # of networks, where they are to be known
        self._enumeration: Optional[Enumeration] = None

    # Families.

    def declared_families(self) -> list[Family]:
        """Those given."""
        return list(self.families.values()) if isinstance(self.families, Mapping) else [self.families]

    def family_of(self, name: str) -> Family:
        """The family of a GP site."""
        if not isinstance(self.families, Mapping):
            return self.families
        if name not in self.by_name:
            raise ValueError(
                f"no family is given for GP site {name!r}; AutoSparseGP's families has {sorted(self.by_name)}. Add "
                f"{{{name!r}: SVGP(64)}}, or give one family for all GP sites."
            )
        return self.by_name[name]

    def modules_by_site(self) -> dict[str, Any]:
        """The variational modules of GP sites."""
        return {} if self.structure is None else {name: at_path(self.gps, name) for name in self.structure.gps}

    def site_modules(self) -> dict[str, SiteGP]:
        """Those of families on sites."""
        return {name: module for name, module in self.modules_by_site().items() if isinstance(module, SiteGP)}

    def corrected_modules(self) -> dict[str, SparseGP]:
        """Those of kernels whose diagonal depends on the rows of training, some of which they have seen."""
        modules = self.modules_by_site()
        return {name: module for name, module in modules.items() if isinstance(module, SparseGP) and module.num_seen}

    def build(self, name: str, process: GaussianProcess) -> Any:
        """Make the module of a GP site."""
        require_inputs(name, process)
        module = self.family_of(name).build(process, name)
        _warn_of_noise(name, process)
        deep_setattr(self, "gps." + name, module)
        return attrgetter(name)(self.gps)

    @property
    def takes_batches(self) -> bool:
        """Whether steps may bring other rows than those that all GP sites on sites are conditioned on."""
        modules = self.site_modules().values()
        return bool(modules) and all(module.takes_batches for module in modules)

    def join(self, found: Structure, priors: Optional[Mapping[str, GaussianProcess]] = None) -> None:
        """Have groups of GP sites have one posterior, in the place of each one's own.

        :param priors: of a first call, at which these posteriors start; ``None`` if a state is to be loaded.
        """
        for i, group in enumerate(found.joint):
            whole = shared(self.by_name[group[0]], {name: at_path(self.gps, name) for name in group}, priors)
            deep_setattr(self, f"joints.group_{i}", whole)

    def _share(self, name: str) -> Optional[Share]:
        """What this run has of the posterior of several sites, if this is one of them."""
        for i, group in enumerate([] if self.structure is None else self.structure.joint):
            if name in group:
                if i not in self._run.wholes:
                    self._run.wholes[i] = at_path(self, f"joints.group_{i}")(self.drawn())
                return self._run.wholes[i].share(name)
        return None

    def require_refined(self, predicting: Callable[[], bool] = lambda: True) -> None:
        """Raise if expectation propagation has not begun, and what a call is to give is a posterior."""
        if self.by_expectation and self.structure is not None:
            require_refined(self.modules_by_site(), predicting)

    # Runs.

    @contextmanager
    def on(self, run: Run, median: bool) -> Iterator[Run]:
        """Be on a run, latents at their medians or not."""
        before = self._run, self._computing_median
        self._run, self._computing_median = run, median
        try:
            yield run
        finally:
            self._run, self._computing_median = before

    def perform(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Run the model once."""
        noting = nullcontext() if self.calls is None else self.calls.noted()
        with self.on(run, run.at_medians or self._computing_median), noting:
            sums_out = run.sums_out and (self.structure is None or self.structure.enumerated)
            self._enumeration = Enumeration() if sums_out else None
            try:
                return super().__call__(*args, **kwargs)
            finally:
                if self._enumeration is not None:
                    self._enumeration.forget()

    def perform_explained(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """As :meth:`perform`; an error of the model's own that function values caused says so."""
        try:
            return self.perform(run, args, kwargs)
        except ValueError as error:
            why = unfit_parameter(self.model, self.trace, args, kwargs)
            if why is None:
                raise
            raise ValueError(why) from error

    def probe(self, args: tuple, kwargs: dict[str, Any], kind: type[ProbeRun] = ProbeRun) -> Probe:
        """Run with the latents at their medians, and the same random numbers."""
        run = kind()
        quiet = poutine.block(), pyro.validation_enabled(False)
        noting = nullcontext() if self.calls is None else self.calls.noted()
        with repeatable(self._like), quiet[0], quiet[1], self.on(run, median=True), noting:
            self._enumeration = Enumeration()
            super().__call__(*args, **kwargs)
        densities = {}
        for name, site in all_sites(self.trace):
            if site["type"] == "sample" and not site_is_subsample(site) and name not in run.posteriors:
                fn = site["infer"].get("prior", site["fn"])
                densities[name] = torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), 1.0, site["mask"]))
        return Probe(densities, run.posteriors)

    # At sites.

    @property
    def enumerated(self) -> list[str]:
        """The discrete latents that the last run summed out."""
        return [] if self._enumeration is None else self._enumeration.names

    def _pyro_sample(self, msg: Any) -> None:
        if self._enumeration is not None:
            self._enumeration.meet(msg)
            if msg["type"] != "sample":
                return
        if msg["name"].endswith(LEFT_OUT) and is_left_out(msg["name"], self.trace.nodes):
            settle_left_out(msg, self.trace.nodes, draw=self._run.draws_left_out)
        if msg["is_observed"] and not isinstance(msg["value"], Tensor):
            raise ValueError(
                f"site {msg['name']!r} observes a {type(msg['value']).__name__}, and not a tensor: give obs a tensor, "
                "torch.as_tensor(y) of an array, torch.as_tensor(y.to_numpy()) of a pandas series"
            )
        rows = {} if self.structure is None or self._run.draws_data else self.structure.rows
        if not msg["is_observed"] and msg["name"] in rows:
            msg["value"], msg["is_observed"] = stand_in(msg["fn"]), True
        super()._pyro_sample(msg)
        if msg["name"] in self._run.processes and not msg["is_observed"]:
            # In ELBOs the prior process is the base measure, of density 1.
            process, event_dim = as_process(msg["infer"]["prior"])
            assert process is not None
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
        if process is None:
            return super().get_posterior(name, prior)
        if getattr(self, "_outer_plates", ()) or any(plate.name in SAMPLE_PLATES for plate in get_plates()):
            raise ValueError(f"site {name!r} stands {SAMPLES_ARE_VECTORISED}")
        process.require_place(name)
        if self.calls is not None:
            process.origin = self.calls.origin(process.x)
        module = self._run.module(name, process, self._find)
        self._check(name, process, module)
        answer = self._run.meet(self._met(name, process, module), self._computing_median)
        return answer.to_event(event_dim) if event_dim and isinstance(answer, SparsePosterior) else answer

    def _met(self, name: str, process: GaussianProcess, module: Any) -> Met:
        found = self.structure
        if found is None:
            return Met(name, process, module, MarginalSite, False, 1)
        group, _ = found.groups.get(name, (1, ""))
        drawn = self.drawn() if isinstance(module, SparseGP) else None
        company = found.company(name) if found.joint and found.meets_by_rows(name) else ()
        inner = name in found.inner
        draws, share = self.kind_of_draws(name), self._share(name)
        return Met(name, process, module, draws, inner, group, drawn, share, company, self.trace)

    def kind_of_draws(self, name: str) -> type[Site]:
        """How a site is drawn in training."""
        assert self.structure is not None
        if name in self.independent_draws or self.structure.dependence.get(name) != COUPLED:
            across = self.structure.joint and not self.structure.meets_by_rows(name)
            return FunctionSite if across else MarginalSite
        return GroupedSite if name in self.structure.groups else ExpectedSite

    def _find(self, name: str) -> Any:
        try:
            return attrgetter(name)(self.gps)
        except AttributeError:
            known = [] if self.structure is None else sorted(self.structure.gps)
            raise ValueError(
                f"GP site {name!r} was not there when the guide was initialised; it knows {known}"
            ) from None

    def _check(self, name: str, process: GaussianProcess, module: Any) -> None:
        """Raise if a GP site is not as the guide knows it."""
        _check_dtype(name, process, module)
        if self.structure is not None:
            self._check_groups(name, process.event_shape[0])
            known = self.structure.columns.get(name)
            if known not in (None, process.x.shape[-1]):
                raise ValueError(
                    f"GP site {name!r} has inputs of shape {tuple(process.x.shape)}; at the guide's first call they "
                    f"had {known} columns, not {process.x.shape[-1]}."
                )
        if module.batch_shape != process.batch_shape:
            raise ValueError(
                f"site {name!r} has batch shape {tuple(process.batch_shape)} now, {tuple(module.batch_shape)} when the "
                "guide was initialised"
            )

    def _check_groups(self, name: str, num: int) -> None:
        """Raise if the rows of a layer are not as many as the groups of the layers below that it couples."""
        assert self.structure is not None
        for below, (size, above) in self.structure.groups.items():
            process = self._run.processes.get(below)
            rows = None if process is None else process.event_shape[0]
            if above == name and rows is not None and rows != num * size:
                raise ValueError(
                    f"GP site {below!r} has {rows} inputs and {name!r} has {num}; at the guide's first call {size} of "
                    f"{below!r} went into each of {name!r}, and are drawn together. A model's structure must not "
                    "change between calls."
                )

    # Traces.

    def get_traces(self) -> tuple[poutine.Trace, poutine.Trace]:
        """The (model, guide) traces of the last call, as in :class:`~pyro.poutine.guide.GuideMessenger`.

        A GP site's density is 1 in the model's and log dq/dp in the guide's: after :meth:`eval` the difference of
        the traces' log densities is a log importance weight; in training it is right in expectation only.

        :raises ValueError: in training, under an objective that is not linear in log densities, such as RenyiELBO, or
            if a density is piecewise constant in f, so that draws give it no gradient.
        """
        if self._run is not self._idle:  # Pyro's end of a run, which takes the values only
            return super().get_traces()
        flat = piecewise_constant(self.trace) if torch.is_grad_enabled() else []
        if flat:
            raise ValueError(
                f"site {flat[0]!r} has a piecewise constant density: draws of function values give it no gradient. "
                "Train with TraceQuadrature_ELBO, which asks the distribution for its expectation; to evaluate "
                "another objective use torch.no_grad()."
            )
        model_trace, guide_trace = self.traces()
        answered = [name for name, site in all_sites(guide_trace) if isinstance(without_event(site["fn"])[0], Site)]
        if self.training and answered:
            _require_linear(answered[0])
        return model_trace, guide_trace

    def traces(self) -> tuple[poutine.Trace, poutine.Trace]:
        """As :meth:`get_traces`, for objectives that know what these densities are."""
        if self.by_expectation and self.training and torch.is_grad_enabled():
            raise ValueError(
                "the guide has a family of expectation propagation, whose sites no gradient trains: take "
                "ExpectationPropagation(model, guide, optim) in the place of SVI, or a family such as SVGP."
            )
        model_trace, guide_trace = super().get_traces()
        site: Any
        for site in guide_trace.nodes.values():
            if isinstance(without_event(site["fn"])[0], Site):
                site["fn"] = _paired(site["fn"])
        for name, site in list(model_trace.nodes.items()):
            if site["type"] == "sample" and site["is_observed"] and "prior" in site["infer"]:
                # A latent that a handler around the guide gave its value.
                model_trace.nodes[name] = {**site, "fn": site["infer"]["prior"]}
        return model_trace, guide_trace


def _check_dtype(name: str, process: GaussianProcess, module: Any) -> None:
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


def _warn_of_noise(name: str, process: GaussianProcess) -> None:
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
    code = running(_WEIGHTED)
    if code is not None:
        raise ValueError(
            f"{_WEIGHTED[code]} weighs draws by their densities; in training, GP site {name!r} has independent "
            "marginal draws and the expectation of its density. Call guide.eval() first, for joint draws, or use "
            "TraceQuadrature_ELBO, Trace_ELBO or TraceMeanField_ELBO."
        )
