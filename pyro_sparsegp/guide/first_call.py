"""A guide's first call makes its parameters and learns what the model is; its first step checks them."""

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide.utils import deep_setattr
from pyro.util import check_site_shape
from torch import Tensor

from ..approximations.free import SparseGP, along_inputs
from ..approximations.on_sites import SiteGP
from ..bases.inducing import InducingPoints
from ..kernels.base import white_share
from ..modules import at_path, path_of
from ..numerics.linalg import default_jitter
from ..posterior.drawing import Site
from ..process import GaussianProcess
from ..program import checks, rules, traces
from ..program.data import TrainingData, switches_of, tensors
from ..program.enumeration import Enumeration
from ..program.explore import ClosedForms, explore
from ..program.handlers import Rerun, held_runs
from ..program.owners import stacked_runs
from ..program.parts import moved_by_rows
from .field import is_normal_prior
from .known import Core, KnownGuide, without
from .moving import moved_by
from .runs import Priors, Run, note_rows, probed, require_inputs
from .start import start

_FAR = 10  # times a jitter: data's sd is 5 % too wide there
_ROUNDING = 10  # epsilons of a kernel's variance


def initialise(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Core:
    """Make a guide's parameters, and learn how the model depends on its GP sites; raise if none can be learned."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "the guide's first call makes its parameters: call it outside of torch.inference_mode(), guide(x, y)."
        )
    given = (t.new_empty(0) for t in tensors((args, kwargs)) if t.is_floating_point())
    guide.like = next(given, torch.empty(0))
    try:
        with torch.no_grad(), poutine.block():
            try:
                run = _Setup(guide, at_medians=True).perform(args, kwargs)
            except _FlatInputsError as flat:
                guide.forget()
                run = _Setup(guide, at_medians=True, from_draws=flat.args).perform(args, kwargs)
        rules.require_sites(run.sites)
        _require_sites(run)
        _learn(guide, run, args, kwargs)
        if inner := [*guide.facts.inner]:
            guide.forget()
            with torch.no_grad(), poutine.block():
                run = _Setup(guide, at_medians=True, from_draws=run.from_draws, inner=inner).perform(args, kwargs)
            _learn(guide, run, args, kwargs)
        _warn_of_other_rows(run, args, kwargs)
        guide.kind.require(run)
        for name, module in without(guide.begun_at_data, guide.facts.inner).items():
            module.inform(run.posteriors[name].process, name)
        start(guide, run, args, kwargs)
        guide.kind.begin(guide)
        guide.core.data = TrainingData(guide.model, args, kwargs)
    except BaseException:
        guide.forget()
        raise
    return guide.core


def _learn(guide: KnownGuide, run: Run, args: tuple, kwargs: dict[str, Any]) -> None:
    """Learn of a first run what the program is."""
    held = held_runs(guide.model, run.trace, args, kwargs)
    _require_unmasked(run, held)
    # None of a latent for which an overridden get_posterior has parameters of its own.
    locs = {name: at_path(guide, f"locs.{path_of(name)}_unconstrained") for name in run.sites}
    with traces.repeatable(guide.like), poutine.block():
        facts, forms = explore(run, held, {name: loc.shape for name, loc in locs.items() if loc is not None})
    sizes = {name: run.sites[name]["value"].numel() for name in facts.data}
    guide.core = Core(facts, sizes=sizes, forms=forms, met={switches_of(guide.model, args, kwargs)})
    if guide.corrected_modules() and checks.holds_part(run.trace):
        # Plates with a subsample_size leave rows out, on which kernels' diagonals depend.
        with torch.enable_grad(), poutine.block(), traces.whole_plates():
            note_rows(Priors(guide, at_medians=True).perform(args, kwargs))
        guide.trace = run.trace


class _FlatInputsError(Exception):
    """A GP site's inputs have columns in which all rows are the same; with the names of latents to move them by."""


@dataclass(eq=False)
class _Setup(Run):
    """The first run: makes the modules."""

    from_draws: Collection[str] = ()  # latents that start at a draw from the prior, whatever init_loc_fn says
    inner: Collection[str] = ()  # GP sites whose values enter others

    def look_ahead(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.enumeration = Enumeration({})

    def is_new(self, name: str, prior: TorchDistribution) -> bool:
        return False  # before anything is learned every latent is the guide's

    def module(self, name: str, process: GaussianProcess) -> Any:
        guide, x = self.guide, process.x
        require_inputs(name, process)
        free = {n: site for n, site in traces.sample_sites(guide.trace).items() if traces.is_free(site)}
        # normal latents of several values, which inputs and weights of layers are
        normal = [n for n, site in free.items() if is_normal_prior(site["infer"].get("prior"))]
        several = [n for n in normal if free[n]["value"].numel() > 1]
        is_flat = (x == x[..., :1, :]).flatten(0, -2).all(0).any()
        if several and not self.from_draws and x.shape[-2] > 1 and is_flat:
            raise _FlatInputsError(*several)
        guide.like = x.new_empty(0)
        module = guide.family_of(name).build(process, name)
        # A kernel whose diagonal depends on the rows has a correction there that families know of.
        share = 0.0 if process.kernel.depends_on_rows else float(white_share(process.kernel, x).amax())
        if share > 0.01:
            warnings.warn(
                f"{share:.0%} of the variance of GP site {name!r} is independent noise at each row, such as a White "
                "term's. A guide cannot learn it, and its intervals for the other terms are too narrow: put noise "
                "into the likelihood, and effects of single rows into a plate of latents.",
                stacklevel=4,
            )
        deep_setattr(guide, "gps." + path_of(name), module)
        return module

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Tensor:
        """Values that differ: at equal ones the layer above would have all its inducing inputs in one place."""
        at_prior = getattr(self.guide.family_of(name), "start", "data") == "prior"
        begins = name in self.inner and isinstance(module, SparseGP) and process.x.dim() == 2 and not at_prior
        if begins and module.basis.sizes and (process.mean == process.mean[..., :1]).all():
            module.begin_at(process, name, along_inputs(process))
        posterior = self.posteriors[name] = module(process, name, Site)
        if begins:
            return posterior.mean
        variance = process.variance
        if isinstance(module, SiteGP):  # of a family that is refused if a layer stands above
            return process.mean + variance.sqrt() * torch.linspace(-1, 1, variance.shape[-1]).to(variance)
        return posterior.given(posterior.coefficients.rsample(posterior.batch_shape)).mean


def _require_sites(run: Run) -> None:
    """Raise if a first run is none that its guide can learn from."""
    guide, posteriors = run.guide, run.posteriors.keys()
    rules.require("first call", run.trace, posteriors)
    gps, latents = sorted(posteriors), [name for name, site in run.sites.items() if traces.is_free(site)]
    others = [name for name in latents if name not in gps]
    named: dict[str, tuple[Any, list[str]]] = {
        "families": (guide.by_name, gps),
        "independent_draws": (guide.independent_draws, gps),
        "independent": (guide.independent, others),
        "point_estimates": (guide.point_estimates, latents),
    }
    given = {what: (names, known) for what, (names, known) in named.items() if names is not True}
    unknown = {what: [name for name in names if name not in known] for what, (names, known) in given.items()}
    if wrong := [f"{what} names {names}" for what, names in unknown.items() if names]:
        raise ValueError(f"{wrong[0]}; the GP sites are {gps}, the other latents {others}")
    sites = {n: s for n, s in run.sites.items() if n not in posteriors}
    for name, site in sites.items() if pyro.settings.get("validate_infer") else ():
        try:
            site["log_prob"] = site["fn"].log_prob(site["value"])
        except (RuntimeError, ValueError) as error:
            why = checks.why_without_density(site, error)
            raise ValueError(f"site {name!r} has no density at its value: {why}") from error
        check_site_shape(site, float("inf"))  # type: ignore[arg-type]
        fn: Any = traces.bare(site["fn"])
        if hasattr(fn, "expected_log_prob") and traces.is_declared(fn):
            own = torch.as_tensor(fn.expected_log_prob(site["value"], torch.ones_like(traces.parameter_of(fn)))).shape
            if own != (its := fn.log_prob(site["value"]).shape):
                what = f"site {name!r}: {type(fn).__name__}'s expected_log_prob has the shape"
                raise ValueError(f"{what} {tuple(own)}, its log_prob {tuple(its)}: give a number for each datum")


def _warn_of_other_rows(run: Run, args: tuple, kwargs: dict[str, Any]) -> None:
    """Tell of what the program computes over all rows that it is given, which would be others' in a prediction."""
    guide, by_rows = run.guide, not run.guide.facts.coupled
    moved = moved_by_rows(guide.model, run.trace, run.processes, (args, kwargs), by_rows)
    if moved:
        warnings.warn(
            f"{', '.join(moved)}: what the model computes for a row depends on which other rows it is given, as in "
            "x - x.mean() or a BatchNorm that trains. So it differs in predictions and mini-batches. "
            "Compute means, ranges, ranks and codes once, from the training rows, outside of the model; instead of "
            "BatchNorm take LayerNorm, or call network.eval().",
            stacklevel=5,
        )


def closed_forms_of(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> ClosedForms:
    """Which densities have their expectation in closed form, learned anew."""
    run = probed(guide, args, kwargs)
    with traces.repeatable(guide.like), poutine.block():
        _, guide.core.forms = explore(run, held_runs(guide.model, run.trace, args, kwargs))
    return guide.core.forms


def _require_unmasked(run: Run, rerun: Rerun) -> None:
    """Raise if ``poutine.mask`` leaves out entries of a latent on which other densities depend."""
    masked = {n: s for n, s in run.sites.items() if traces.is_free(s) and s["mask"] is not None}
    every: Any = {name: traces.unmasked(site["fn"], site["value"], site["mask"]) for name, site in masked.items()}
    for name, seen in [(name, seen) for name, seen in every.items() if not seen.all()]:
        site = masked[name]
        values = {name: site["value"]}, {name: site["value"].masked_fill(~seen, math.nan)}
        shown = stacked_runs(lambda moved, name=name: traces.log_densities(rerun(moved), [name]), values)  # type: ignore[misc]
        # Of padding, on which nothing depends, the posterior is any: test_missing.py::test_a_mask_of_a_latent.
        if any((moved.isnan() & ~still.isnan()).any() for still, moved in shown.values()):
            raise ValueError(
                f"site {name!r} is a latent under a poutine.mask. For entries on which other densities depend, the "
                "mask would leave out the prior and the density of their posterior. For a flat prior of these entries "
                "mask the distribution: dist.Normal(0.0, 1.0).mask(keep)."
            )


def check_parameters(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if a parameter would not train, warn of sites that the guide does not know, and note what moves inputs."""
    probe, core, facts = probed(guide, args, kwargs), guide.core, guide.facts
    outputs = list(traces.log_densities(probe.trace, probe.posteriors).values())
    for name, q in probe.posteriors.items():  # a kernel's parameter may be in the divergence alone, a mean's in values
        outputs += [probe.values[name], q.process.kernel.diag(q.process.x), q.kl]
    free = {name for name, site in probe.sites.items() if not site["is_observed"]}
    known = {*facts.gps, *facts.latents}
    # A prediction may draw sites of its own: test_messages.py::test_a_latent_that_a_state_does_not_have.
    unknown = sorted(free - known - {*facts.data})
    if unknown:
        warnings.warn(
            f"site {unknown[0]!r} is neither a latent site that the guide knows, {sorted(known)}, nor one of its data, "
            f"{sorted(facts.data)}, so it is drawn from its prior. If you loaded the state of another model, load it "
            "into a guide of that model.",
            stacklevel=2,
        )
    _warn_of_widths(probe, held_runs(guide.model, probe.trace, args, kwargs))
    core.registered = checks.require_registered(outputs, probe.trace, (args, kwargs))
    names = [n for n, site in traces.all_sites(probe.trace) if site["type"] == "param"]
    core.own = dict.fromkeys((n for n in names if not n.startswith(f"{guide._pyro_name}.")), 0.0)
    core.moving = moved_by(guide, probe)
    # Where x is learned its range is not what it will be: inducing inputs are learned in units of 1.
    learned = [guide.module_of(name) for name, q in probe.posteriors.items() if q.process.x.requires_grad]
    parts = [part for module in learned for part in module.modules() if isinstance(part, InducingPoints)]
    for part in [part for part in parts if part.units is not None]:
        part.leave_units()
    core.checked = probe.data.keys() == {*facts.data}  # else a training call will tell


def _warn_of_widths(probe: Run, rerun: Rerun) -> None:
    """Tell of intervals that will be too narrow, of latents of single data, or too wide, of data below the jitter."""
    guide, facts = probe.guide, probe.guide.facts
    most = max(guide.core.sizes.values(), default=math.inf)
    apart = [name for name in facts.local_latents if name not in guide.joint.row_effects]
    names = [name for name in apart if facts.latents[name].numel >= most]
    # Those that may be a GP's inputs are another matter: test_messages.py::test_a_latent_of_each_datum.
    if names and not any(process.x.requires_grad for process in probe.processes.values()):
        warnings.warn(
            f"latent site {names[0]!r} has a value for each datum, and the guide treats it as independent of GP sites "
            f"{', '.join(map(repr, facts.gps))}: the intervals of both are too narrow. Integrate it out in the "
            "likelihood: add its variance to a Normal's, or use quadrature in pyro.factor.",
            stacklevel=6,
        )
    noise = {n: fn.variance for n, site in probe.data.items() if traces.is_normal(fn := traces.bare(site["fn"]))}
    for gp, process in probe.processes.items():
        parts = [part.jitter for part in probe.module(gp, process).modules() if isinstance(part, InducingPoints)]
        # a process' before a basis' own, as in InducingPoints.forward
        own = next(filter(None, [process.jitter, *parts]), default_jitter(process.x.dtype))
        jitter = max(own, _ROUNDING * torch.finfo(process.x.dtype).eps) * process.variance.mean(-1)  # of each output
        if not any((variance < _FAR * jitter.max()).any() for variance in noise.values()):
            continue
        # What it adds to data's variances: outputs may be of unlike scales.
        with torch.no_grad():
            start, moves = probe.values[gp], torch.diag_embed(jitter.sqrt().reshape(-1)).reshape(-1, *jitter.shape, 1)
            here, *there = (traces.sample_sites(rerun({gp: start + move})) for move in (0 * moves[0], *moves))
        for name, variance in noise.items():
            loc, *others = (traces.bare(sites[name]["fn"]).loc for sites in (here, *there))
            added = sum((other - loc).square() for other in others).expand(variance.shape)  # type: ignore[union-attr]
            low = variance < _FAR * added
            if low.any():
                warnings.warn(
                    f"the noise variance of site {name!r}, {variance[low].min():.1e}, is not far above the jitter and "
                    f"rounding of GP site {gp!r}'s kernel matrix, {added[low].max():.1e}: intervals at these data are "
                    "too wide. Take GaussianProcess(..., jitter=1e-12) in float64, or more noise.",
                    stacklevel=6,
                )


def explain_nan(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> str:
    """What is NaN or infinite at these arguments, for an error."""
    with torch.no_grad():
        run = probed(guide, args, kwargs)
    densities = traces.log_densities(run.trace, run.posteriors)
    values = {f"the log density of site {name!r}": density for name, density in densities.items()}
    values |= {f"the inputs of GP site {name!r}": q.process.x.sum(-1) for name, q in run.posteriors.items()}
    values |= {f"the KL divergence of GP site {name!r}": q.kl for name, q in run.posteriors.items()}
    values |= {f"parameter {name}": parameter for name, parameter in guide.named_parameters()}
    broken = {what: ~value.isfinite() for what, value in values.items() if not value.isfinite().all()}
    return "; ".join(f"{what} ({checks.which(bad)}) is not finite" for what, bad in broken.items()) or (
        "all is finite at the medians"
    )
