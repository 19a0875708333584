"""A guide's first call: its parameters are made, and it learns what the model is."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import biject_to

from ..families import FreeFormFamily
from ..gaussians.natural import NaturalGaussian
from ..modules import at_path
from ..posterior.drawing import OTHER_LATENTS, ExpectedSite
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program import checks
from ..program.data import TrainingData, first_tensor, rows_of, sized_plates
from ..program.dependence import COUPLED, NONE
from ..program.explore import explore
from ..program.facts import ClosedForms, Structure
from ..program.handlers import is_blocked
from ..program.traces import (
    all_sites,
    as_process,
    grouped,
    is_free,
    is_observation,
    piecewise_constant,
    plate_sizes,
    repeatable,
    sample_sites,
)
from .field import is_normal_prior
from .joint import join, require_by_rows, require_families, require_joint
from .known import Core, KnownGuide
from .rows import show_all_rows
from .runs import Setup, held_runs, probed
from .start import start

_FREE = "Take a family with a free posterior, such as SVGP or OrthogonalInducing"
_NO_LIMIT: Any = float("inf")  # of nested plates


def require_arguments(model: Any, families: Any, independent_draws: Any, independent: Any, start: Any) -> None:
    """Raise if a guide's arguments are none.

    :raises ValueError: naming the argument.
    """
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
    if isinstance(independent, str) or not isinstance(independent, (bool, Collection)):
        raise ValueError(f"independent must be True or a collection of names, such as ({independent!r},)")
    if start not in ("mode", None):
        raise ValueError(f"start must be 'mode' or None, got {start!r}; init_loc_fn says where the search begins")


def initialise(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Core:
    """Make a guide's parameters, and learn how the model depends on its GP sites.

    :raises ValueError: naming the site and the remedy, if it is no model that the guide can learn from.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "the guide's first call makes its parameters, which torch.inference_mode() forbids: call it once, "
            "guide(x, y), outside, or use torch.no_grad()."
        )
    guide.like = first_tensor((args, kwargs))
    try:
        run = _set_up(guide, args, kwargs)
        trace = run.trace
        checks.require_sizes(trace)
        _require_sites(guide, trace, run.posteriors)
        facts = _describe(guide, trace, run.posteriors)
        facts.sized = sized_plates(trace, rows_of(guide.model, args, kwargs))
        facts.enumerated = [] if run.enumeration is None else run.enumeration.names
        facts.joint = guide.groups
        guide.core = Core(facts, True)
        show_all_rows(guide, args, kwargs, trace)
        checks.require_left_out(guide.model, facts.gps, trace, args, kwargs)
        _explore(guide, facts, args, kwargs, trace, run.posteriors)
        require_joint(facts, run.processes)
        for name, posterior in run.posteriors.items():
            family = guide.family_of(name)
            if isinstance(family, FreeFormFamily) and family.start == "data" and name not in facts.inner:
                guide.module_of(name).inform(posterior.process, name)
        join(guide, facts, run.processes)
        start(guide, run, args, kwargs)
        require_by_rows(facts)
        if not facts.field:
            _expect_joint_draws(guide)
            _warn_of_sums(facts)
        guide.core.data = TrainingData(guide.model, args, kwargs)
    except BaseException:
        guide.forget()
        raise
    return guide.core


class _FlatInputsError(Exception):
    """A GP site's inputs have columns in which all rows are the same."""


def _set_up(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Setup:
    """The first run. Latents start at their medians; but where all rows of a GP's inputs would then stand in one place,
    normal ones of several values, which inputs and weights of layers are, start at draws.
    """
    several: list[str] = []

    def build(name: str, process: GaussianProcess) -> Any:
        _require_positive(guide.trace, {name: process})
        x = process.x
        if not guide.from_draws and x.shape[-2] > 1 and (x == x[..., :1, :]).flatten(0, -2).all(0).any():
            for other, site in sample_sites(guide.trace).items():
                if is_free(site) and site["value"].numel() > 1 and is_normal_prior(site["infer"].get("prior")):
                    several.append(other)
            if several:
                raise _FlatInputsError
        return guide.build(name, process)

    with torch.no_grad(), poutine.block():
        run = Setup(guide, build)
        try:
            run.perform(args, kwargs)
        except _FlatInputsError:
            guide.forget()
            guide.from_draws = several
            run = Setup(guide, build)
            run.perform(args, kwargs)
            guide.from_draws = ()
    return run


def _require_sites(guide: KnownGuide, trace: poutine.Trace, posteriors: Collection[str]) -> None:
    """Raise if a first run, in which the guide met these GP sites, is none that it can learn from."""
    for name in guide.by_name:
        if name not in posteriors:
            kind = "a site that is no Gaussian process" if name in trace.nodes else "no site of the model"
            raise ValueError(f"a family is given for {name!r}, which is {kind}; the GP sites are {sorted(posteriors)}")
    observed = [(name, site) for name, site in all_sites(trace) if is_observation(site)]
    fixed = [name for name, site in observed if as_process(site["fn"])[0]]
    if not posteriors and fixed:
        raise ValueError(
            f"GP site {fixed[0]!r} is observed: it has no posterior to approximate. Add a likelihood, such as "
            "Normal(f, noise), and leave obs= out of the GP site; or train hyperparameters with the exact density, "
            "by a guide without AutoSparseGP."
        )
    if not posteriors:
        raise ValueError("the model has no GP site: no pyro.sample(..., GaussianProcess(kernel, x)) was reached")
    unknown = [name for name in guide.independent_draws if name not in posteriors]
    if unknown:
        raise ValueError(f"independent_draws names {unknown}; the GP sites are {sorted(posteriors)}")
    if not observed:
        raise ValueError(
            "the guide's first call observes nothing, so it cannot tell which sites are latent: call it, or take the "
            "first SVI step, with the data, guide(x, y)."
        )
    for what, known in (("independent", trace.nodes.keys() - posteriors), ("point_estimates", trace.nodes.keys())):
        names = getattr(guide, what)
        unknown = [] if isinstance(names, bool) else [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{what} names {unknown}, which are no latents of the model")
    if pyro.settings.get("validate_infer"):
        _require_densities(trace, posteriors)


def _require_positive(trace: poutine.Trace, processes: Mapping[str, GaussianProcess]) -> None:
    """Raise if a kernel's length scale, period or variance is a latent whose prior allows 0 or less."""
    signed = {}
    for name, site in sample_sites(trace).items():
        prior, value = site["infer"].get("prior"), site["value"]
        if is_free(site) and name not in processes and prior is not None and value.is_floating_point():
            # A part of it, length[0] say, has the storage of the whole.
            place = value.untyped_storage().data_ptr()
            signed[place] = name if prior.support.check(torch.full_like(value, -1e-6)).any() else None
    signed.pop(0, None)  # tensors without memory are at no place
    for gp, process in processes.items():
        for what, value in _hyperparameters(process.kernel):
            bad = signed.get(value.untyped_storage().data_ptr())
            if bad is not None:
                raise ValueError(
                    f"latent site {bad!r} is a {what} of GP site {gp!r}, and its prior allows 0 or less. Give it a "
                    f"prior on positive numbers, such as dist.LogNormal(0.0, 1.0), or take {bad}.exp() for the {what}."
                )


def _hyperparameters(kernel: Any) -> Iterator[tuple[str, Tensor]]:
    """What must be positive in a kernel and its parts."""
    for name in ("lengthscale", "period", "variance"):
        value = vars(kernel).get(name)
        if isinstance(value, Tensor):
            yield name, value
    for part in kernel.parts:
        yield from _hyperparameters(part)


def _require_densities(trace: poutine.Trace, posteriors: Collection[str]) -> None:
    for name, site in all_sites(trace):
        if site["type"] == "sample" and not site_is_subsample(site) and name not in posteriors:
            try:
                site["log_prob"] = site["fn"].log_prob(site["value"])
            except (RuntimeError, ValueError) as error:
                if isinstance(error, RuntimeError) and site["value"].is_floating_point():
                    raise
                why = checks.why_without_density(site, error)
                raise ValueError(f"site {name!r} has no density at its value: {why}") from error
            checks.require_own_rows(name, site)
            check_site_shape(site, _NO_LIMIT)


def _describe(guide: KnownGuide, trace: poutine.Trace, posteriors: Mapping[str, SparsePosterior]) -> Structure:
    """The sites of a first run, in which the guide made its parameters."""
    found = Structure(gps={name: at_path(guide.gps, name).spec() for name in posteriors})
    found.columns = {name: q.process.x.shape[-1] for name, q in posteriors.items()}
    found.grouped = grouped(trace)
    for name, site in all_sites(trace):
        if site["type"] != "sample" or site_is_subsample(site) or name in found.gps:
            continue
        plates = plate_sizes(site)
        if not site["is_observed"]:
            own = at_path(guide, f"locs.{name}_unconstrained")
            if own is not None:
                event_dim = biject_to(site["infer"]["prior"].support).domain.event_dim
                latent = {"event_dim": event_dim, "shape": list(own.shape)}
            else:  # an overridden get_posterior has parameters of its own
                latent = {"event_dim": 0, "shape": None}
            found.latents[name] = latent | {"plates": plates}
        elif is_observation(site):
            found.rows[name] = int(site["value"].numel())
            found.data_plates.extend(plate for plate in plates if plate not in found.data_plates)
    return found


def _explore(
    guide: KnownGuide,
    found: Structure,
    args: tuple,
    kwargs: dict[str, Any],
    trace: poutine.Trace,
    posteriors: Mapping[str, SparsePosterior],
) -> None:
    """Learn how densities depend on GP sites' values, and raise where a family on sites does not fit."""
    processes = {name: posterior.process for name, posterior in posteriors.items()}
    modules = guide.site_modules()
    flat = piecewise_constant(trace)
    with repeatable(guide.like):
        held = held_runs(guide.model, trace, args, kwargs)
        guide.learnt.forms, densities = explore(found, held, processes, [] if flat else list(modules))
    if modules or guide.by_expectation:
        for site, density in densities.items():
            if not density.isfinite().all():
                raise ValueError(
                    f"the log density of site {site!r} is not finite at {int((~density.isfinite()).sum())} of "
                    f"{density.numel()} values: look for infinite data, or data outside of the distribution's support."
                )
    for name, module in modules.items():
        require_separate_sites(found, name, f"the family {module.family['name']}, which", flat, _FREE)


def closed_forms_of(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> ClosedForms:
    """Which densities have their expectation in closed form: learned anew where a state was loaded."""
    core = guide.learnt
    if core.forms is None:
        posteriors = probed(guide, args, kwargs).posteriors
        processes = {name: posterior.process for name, posterior in posteriors.items()}
        again = replace(core.facts, inner=[], groups={}, quadratic=[])
        with repeatable(guide.like), poutine.block():
            core.forms, _ = explore(again, held_runs(guide.model, guide.trace, args, kwargs), processes)
    return core.forms


def require_separate_sites(found: Structure, name: str, reads: str, flat: list[str], remedy: str) -> None:
    """Raise where a GP site's likelihood is none of single values.

    :param reads: what reads Gaussian sites there, for the error.
    """
    kind = found.dependence[name]
    if name in found.inner or kind == COUPLED:
        why = (
            "its values enter another GP site"
            if name in found.inner
            else "its likelihood does not factorise: one term of a density depends on values at several inputs"
        )
        raise ValueError(
            f"GP site {name!r} has {reads} reads Gaussian sites off the likelihood of each value, but {why}. {remedy}."
        )
    if flat and kind != NONE:
        raise ValueError(
            f"GP site {name!r} has {reads} reads Gaussian sites off the likelihood's derivatives; the distribution of "
            f"site {flat[0]!r} is piecewise constant. {remedy}, or Categorical(logits=...)."
        )


def _expect_joint_draws(guide: KnownGuide) -> None:
    """Have natural steps know of them, and warn."""
    coupled = [name for name in guide.facts.gps if guide.kind_of_draws(name) is ExpectedSite]
    for name in coupled:
        coefficients = getattr(guide.modules_by_site()[name], "coefficients", None)
        if isinstance(coefficients, NaturalGaussian):
            coefficients.hold_by_draws()
    if coupled and not guide.facts.affine:
        warnings.warn(
            f"The model couples values of the GP site{'s' if len(coupled) > 1 else ''} {', '.join(coupled)} at "
            "different inputs: they are drawn jointly, in O(N³), and not integrated by quadrature. If a pyro.factor "
            "adds up terms of rows, give it one term for each row, in a plate.",
            stacklevel=5,
        )


def _warn_of_sums(found: Structure) -> None:
    names = [name for name in found.gps if any(name in pair for pair in found.summed)]
    if names:
        group = ", ".join(map(repr, names))
        warnings.warn(
            f"GP sites {group} enter densities by their sum, weighted or not, and have independent posteriors: the "
            "intervals of each are too narrow. Give them one posterior, "
            f"{{({group}): CoupledPrecision(32)}}, or write one site with the sum of their kernels.",
            stacklevel=5,
        )
