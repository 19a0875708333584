"""How Pyro and torch meet a guide: it answers at a program's sites, and is saved, loaded, copied and moved whole."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide.initialization import init_to_sample
from pyro.infer.autoguide.utils import helpful_support_errors
from torch import Tensor
from torch.distributions import biject_to

from ..modules import at_path, drop_stored, path_of, take_name, unique_name
from ..posterior.drawing import Site
from ..posterior.sparse_posterior import SparsePosterior
from ..process import PriorProcess
from ..program import handlers, rules, traces
from ..program.asking import answers
from ..program.data import map_tensors
from .absorb import settle
from .known import KnownGuide
from .latents import BaseMeasure, FieldLatent, condition_on_held, coupled_params
from .state import resume, saved_of


def _resume_name(guide: KnownGuide, name: str) -> bool:
    """Take the saved guide's name, if that guide is gone: a saved optimiser finds parameters by it."""
    before = guide._pyro_name
    if not take_name(guide, name):
        return False
    drop_stored(before)
    guide.core.loaded = True
    return True


class SiteMessenger(KnownGuide):
    """Pyro's mean-field guide, whose GP sites are answered by their families' modules, and others may be coupled."""

    def _get_params(self, name: str, prior: TorchDistribution) -> tuple[Tensor, Tensor]:
        """The mean and standard deviation of a latent in unconstrained space; they are made where there are none."""
        if name in self.core.joint.hyper:
            return coupled_params(self, name, prior)
        path = path_of(name)
        if (loc := at_path(self, f"locs.{path}")) is not None:
            return loc, loc if self.is_point(name) else at_path(self, f"scales.{path}")
        if isinstance(traces.bare(prior), dist.Delta):
            raise ValueError(
                f"latent site {name!r} has a Delta prior, and no posterior: write it by pyro.deterministic"
            )
        with torch.no_grad(), helpful_support_errors({"name": name, "fn": prior}):
            support: Any = prior.support
            transform = biject_to(support)
            init_loc_fn = init_to_sample if name in getattr(self.run, "from_draws", ()) else self.init_loc_fn
            # Parameters follow the data's dtype and device; the prior may be made of Python numbers.
            start = init_loc_fn({"name": name, "fn": prior}).detach().to(self.like).clone()  # the user's may be held
            if not start.isfinite().all() or not (prior.event_shape or support.check(start).all()):
                raise ValueError(f"init_loc_fn starts site {name!r} at {start}, which its prior {prior} does not allow")
            loc = self._adjust_plates(transform.inv(start), transform.domain.event_dim)
        self.set_latent(name, loc, transform.domain.event_dim)
        return self._get_params(name, prior)

    def get_posterior(self, name: str, prior: TorchDistribution) -> Any:
        """The posterior of a site, given its prior under the values drawn upstream: of GP sites a
        :class:`SparsePosterior`. Override it for others, as in Pyro.
        """
        (process, event_dim), run = traces.as_process(prior), self.run
        if process is None:
            if not run.is_new(name, prior):
                rules.require("latent", name, prior, self.trace)
                return run.kind.latent(run, name, prior)
            if name in self.core.joint.row_effects:
                run.normal[name] = prior
            return prior
        process.require_place(f"site {name!r}")
        module = run.module(name, process)
        rules.require("GP site", name, process, module, self.core.facts, run.processes)
        run.processes[name] = process
        answer = run.answer(name, process, module)
        return answer.to_event(event_dim) if isinstance(answer, SparsePosterior) else answer

    @answers
    def _pyro_sample(self, msg: Any) -> None:
        core, run = self.core, self.run
        if run.enumeration is not None:
            run.enumeration.meet(msg)
            if msg["type"] != "sample":
                return
        name = msg["name"]
        if msg["is_observed"] and not isinstance(msg["value"], Tensor):
            raise ValueError(
                f"site {name!r} observes a {type(msg['value']).__name__}, and not a tensor: give obs a tensor, "
                "torch.as_tensor(y) of an array, torch.as_tensor(y.to_numpy()) of a pandas series"
            )
        if not run.draws_data and not msg["is_observed"] and name in core.facts.data:
            msg["value"], msg["is_observed"] = handlers.stand_in(msg["fn"]), True
        super()._pyro_sample(msg)
        if isinstance(msg["fn"], FieldLatent):
            msg["infer"]["prior"] = BaseMeasure(msg["fn"].prior)
        if name in run.processes and not msg["is_observed"]:
            # In ELBOs the prior process is the base measure, of density 1.
            event_dim = msg["infer"]["prior"].event_dim - 1
            msg["infer"]["prior"] = PriorProcess.of(run.processes[name]).to_event(event_dim)

    @answers
    def _pyro_post_sample(self, msg: Any) -> None:
        super()._pyro_post_sample(msg)
        traces.fill_masked(self.trace.nodes[msg["name"]])
        is_held = msg["is_observed"] and msg["name"] in self.core.joint.field
        if is_held or (isinstance(msg["fn"], FieldLatent) and not msg["fn"].drawn):
            raise ValueError(
                f"site {msg['name']!r} is held at a value by a handler, but its posterior is one with GP sites. "
                f"Give the guide independent=({msg['name']!r},), or condition the model before it goes to AutoSparseGP."
            )
        condition_on_held(self, self.run, msg["name"])

    def get_traces(self, at_nodes: bool = False) -> tuple[poutine.Trace, poutine.Trace]:
        """The (model, guide) traces of the last call, as in :class:`~pyro.poutine.guide.GuideMessenger`.

        A GP site's density is 1 in the model's and log dq/dp in the guide's: after :meth:`eval` the difference of
        the traces' log densities is a log importance weight; in training it is right in expectation only.

        :param at_nodes: whether the objective takes expectations itself.
        :raises ValueError: if a density is piecewise constant in f, so that draws give it no gradient. In training an
            objective that is not linear in log densities, such as RenyiELBO, raises one.
        """
        model_trace, guide_trace = super().get_traces()
        if self.run is not None:  # Pyro's end of a run, which takes the values only
            return model_trace, guide_trace
        # Its gradient would be 0: test_robust_max.py::test_refused_where_it_needs_a_gradient.
        if torch.is_grad_enabled() and not at_nodes and (flat := traces.piecewise_constant(self.trace)):
            raise ValueError(
                f"site {flat[0]!r} has a piecewise constant density: draws of function values give it no gradient. "
                "Train with TraceQuadrature_ELBO; to evaluate another objective use torch.no_grad()."
            )
        if torch.is_grad_enabled() and self.training and not self.kind.has_bound:
            raise ValueError(
                "the guide's family trains by expectation propagation, and not by gradients: take "
                "ExpectationPropagation(model, guide, optim) instead of SVI, or a family such as SVGP."
            )
        site: Any
        for site in guide_trace.nodes.values():
            fn, event_dim = traces.without_event(site["fn"])
            if isinstance(fn, Site):
                site["fn"] = fn.paired().to_event(event_dim)
        # Latents that a handler around the guide gave their values.
        held = {n: site for n, site in traces.sample_sites(model_trace).items() if site["is_observed"]}
        model_trace.nodes.update(
            {n: {**site, "fn": site["infer"]["prior"]} for n, site in held.items() if "prior" in site["infer"]}
        )
        return model_trace, guide_trace

    def _save_to_state_dict(self, *args: object, **kwargs: object) -> None:
        if self.structure is not None and not self.core.loaded:
            self.kind.given_now(self, median=True)  # the sites are kept, for a guide that is loaded without the data
        super()._save_to_state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """As :func:`.state.saved_of` says; nothing before the first call."""
        return {} if self.structure is None else saved_of(self)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing: :meth:`load_state_dict` rebuilds the modules from it first."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        """Make what a saved state is to be loaded into; raise if it is of another model, or of other families."""
        if saved := state_dict.get(prefix + "_extra_state"):
            tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
            resume(self, saved, tensors)
            _resume_name(self, saved["name"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        # Its name is its own inside another module, too: two of these may hold guides under one attribute's name.
        super()._pyro_set_supermodule(self._pyro_name, context)

    def _apply(self, *args: Any, **kwargs: object) -> Any:
        like = args[0](self.like)
        if self.core.data is not None:
            if like.dtype != self.like.dtype:
                settle(self)
            self.core.data = self.core.data.mapped(args[0], self.model)
        self.like = like
        self.core.points = map_tensors(args[0], self.core.points)
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Weak references, which Pyro's store hangs on what it hands out, do not pickle.
        stored = [parameter for _, parameter in pyro.get_param_store().named_parameters()]
        for parameter in [*self.parameters(), *self.core.registered, *stored]:
            parameter.__dict__.pop("unconstrained", None)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.trace = poutine.Trace()
        # A copy is a guide of its own, with a name of its own.
        if not _resume_name(self, self._pyro_name):
            take_name(self, unique_name("AutoSparseGP"))
