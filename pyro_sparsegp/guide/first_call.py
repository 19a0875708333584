"""A guide's first call: its parameters are made, and it learns what the model is; GP sites that have one posterior."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.utils import deep_setattr
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import biject_to

from ..approximations.on_sites import SiteGP
from ..families import Family, FreeFormFamily
from ..gaussians.natural import NaturalGaussian
from ..kernels.base import white_share
from ..modules import at_path
from ..posterior.drawing import OTHER_LATENTS, ExpectedSite, Site
from ..process import GaussianProcess
from ..program import checks
from ..program.data import TrainingData, first_tensor
from ..program.explore import explore
from ..program.facts import COUPLED, ClosedForms, Structure
from ..program.handlers import held_runs, is_blocked
from ..program.traces import (
    all_sites,
    grouped,
    is_free,
    is_observation,
    log_densities,
    piecewise_constant,
    plate_sizes,
    repeatable,
    sample_sites,
)
from .field import is_normal_prior
from .known import Core, KnownGuide, by_groups
from .rows import show_all_rows
from .runs import Run, probed
from .start import start


def require_families(families: Any) -> None:
    """Raise if that is no family, nor a mapping from names, or groups of names, to families."""
    named, names = by_groups(families), list[str]()
    # test_guide.py::test_refusals; test_joint.py::test_names_that_are_no_groups
    for group, family in named.items():
        names += group
        if not isinstance(family, Family) or not all(isinstance(n, str) and names.count(n) == 1 for n in group):
            raise ValueError(
                "AutoSparseGP's families must be a family, such as SVGP(64) (of a class make an instance, SVGP(...)), "
                "or a mapping to families from GP site names, or tuples of names, whose sites have one posterior; each "
                f"name once. Got {', '.join(map(repr, group))}: {family!r}"
            )


def _require_one(guide: KnownGuide, found: Structure) -> None:
    """Raise where GP sites that are to have one posterior have none."""
    for group in guide.together_by_name:
        # test_joint.py::test_sites_that_can_not_have_one_posterior
        if not {*group} <= found.field.keys():
            raise ValueError(
                f"GP sites {list(group)} can't have one posterior here. That takes GP sites of one output that enter "
                "no other, up to 2,000 coefficients, and likelihoods whose parameters are affine in function values "
                "under a link, such as a Normal around f + g[index] or a Poisson of its exp. Give each site a family "
                "of its own."
            )


_FREE = "Take a family with a free posterior, such as SVGP or OrthogonalInducing"


def require_arguments(model: Any, families: Any, start: Any, **named: Any) -> None:
    """Raise if a guide's arguments are none.

    :param named: names of sites.
    :raises ValueError: naming the argument.
    """
    if not callable(model):
        raise ValueError(f"AutoSparseGP's model must be callable, got {type(model).__name__}")
    if is_blocked(model):
        raise ValueError(
            "AutoSparseGP's model is under poutine.block, as for a part of AutoGuideList or EasyGuide, and a GP site's "
            f"prior depends on what that hides. Give it the whole model, and SVI this guide alone; {OTHER_LATENTS}."
        )
    require_families(families)
    for what, names in named.items():
        if isinstance(names, str) or not isinstance(names, (bool, Collection)):
            raise ValueError(f"{what} must be a collection of names, such as ({names!r},)")
    if start not in ("mode", None):
        raise ValueError(f"start must be 'mode' or None, got {start!r}; init_loc_fn says where the search begins")


def initialise(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Core:
    """Make a guide's parameters, and learn how the model depends on its GP sites.

    :raises ValueError: naming the site and the remedy, if it is no model that the guide can learn from.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "the guide's first call makes its parameters: call it outside of torch.inference_mode(), guide(x, y)."
        )
    guide.like = first_tensor((args, kwargs))
    try:
        run = _set_up(guide, args, kwargs)
        trace = run.trace
        checks.require_sizes(run.sites)
        _require_sites(run)
        facts = _describe(run)
        facts.enumerated = run.enumeration.names  # type: ignore[union-attr]
        guide.core = Core(facts)
        show_all_rows(guide, args, kwargs, trace)
        _explore(run, facts, args, kwargs)
        for name, posterior in run.posteriors.items():
            family = guide.family_of(name)
            if isinstance(family, FreeFormFamily) and family.start == "data" and name not in facts.inner:
                guide.module_of(name).inform(posterior.process, name)
        start(guide, run, args, kwargs)
        _require_one(guide, facts)
        if not facts.field:
            _expect_joint_draws(guide)
            _warn_of_sums(facts)
        guide.core.data = TrainingData(guide.model, args, kwargs)
    except BaseException:
        guide.forget()
        raise
    return guide.core


class _FlatInputsError(Exception):
    """A GP site's inputs have columns in which all rows are the same; with the names of latents to move them by."""


@dataclass(eq=False)
class _Setup(Run):
    """The first run: makes the modules.

    :param from_draws: latents that start at a draw from the prior, whatever ``init_loc_fn`` says.
    """

    from_draws: Collection[str] = ()

    def module(self, name: str, process: GaussianProcess) -> Any:
        guide, x = self.guide, process.x
        _require_positive(guide.trace, name, process)
        if not self.from_draws and x.shape[-2] > 1 and (x == x[..., :1, :]).flatten(0, -2).all(0).any():
            free = {n: s for n, s in sample_sites(guide.trace).items() if is_free(s) and s["value"].numel() > 1}
            several = [other for other, site in free.items() if is_normal_prior(site["infer"].get("prior"))]
            if several:
                raise _FlatInputsError(*several)
        guide.like = x.new_empty(0)
        module = guide.family_of(name).build(process, name)
        # A kernel whose diagonal depends on the rows has a correction there that families know of:
        # test_guide.py::test_noise_in_the_kernel_is_told_of.
        share = 0.0 if process.kernel.depends_on_rows else float(white_share(process.kernel, x).amax())
        if share > 0.01:
            warnings.warn(
                f"{share:.0%} of the variance of GP site {name!r} is independent noise at each row, such as a White "
                "term's. A guide learns nothing of it, and its intervals for the other terms are too narrow: put noise "
                "into the likelihood, and effects of single rows into a plate of latents.",
                stacklevel=4,
            )
        deep_setattr(guide, "gps." + name, module)
        return module

    def answer(self, name: str, process: GaussianProcess, module: Any) -> Tensor:
        """Not the mean, where a layer above would have all its inducing inputs in one place."""
        posterior = self.posteriors[name] = module(process, name, Site)
        variance = process.variance
        if isinstance(module, SiteGP):  # of a family that is refused if a layer stands above
            return process.mean + variance.sqrt() * torch.linspace(-1, 1, variance.shape[-1]).to(variance)
        return posterior.given(posterior.coefficients.rsample(posterior.batch_shape)).mean


def _set_up(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> _Setup:
    """The first run. Latents start at their medians; but where all rows of a GP's inputs would then stand in one place,
    normal ones of several values, which inputs and weights of layers are, start at draws.
    """
    with torch.no_grad(), poutine.block():
        try:
            return _Setup(guide, at_medians=True).perform(args, kwargs)
        except _FlatInputsError as flat:
            guide.forget()
            from_draws = flat.args
        return _Setup(guide, at_medians=True, from_draws=from_draws).perform(args, kwargs)


def _require_sites(run: Run) -> None:
    """Raise if a first run is none that its guide can learn from."""
    guide, trace, posteriors = run.guide, run.trace, run.posteriors.keys()
    if not posteriors:
        raise ValueError(
            "the model has no GP site to approximate: no pyro.sample(..., GaussianProcess(kernel, x)) without obs= was "
            "reached. Data need a likelihood, such as Normal(f, noise); hyperparameters alone train with the exact "
            "density, by a guide without AutoSparseGP."
        )
    if not any(is_observation(site) for _, site in all_sites(trace)):
        raise ValueError(
            "the guide's first call observes nothing, so that it has no posterior yet: give it the data, guide(x, y), "
            "train it first, svi.step(x, y) or fit(model, guide, (x, y), steps=500), or load a saved state."
        )
    gps, latents = sorted(posteriors), [name for name, site in sample_sites(trace).items() if is_free(site)]
    others = [name for name in latents if name not in gps]
    named: dict[str, tuple[Any, list[str]]] = {
        "families": (guide.by_name, gps),
        "independent_draws": (guide.independent_draws, gps),
        "independent": (guide.independent, others),
        "point_estimates": (guide.point_estimates, latents),
    }
    for what, (names, known) in named.items():
        unknown = [] if isinstance(names, bool) else [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{what} names {unknown}; the GP sites are {gps}, the other latents {others}")
    sites = {n: s for n, s in sample_sites(trace).items() if n not in posteriors}
    for name, site in sites.items() if pyro.settings.get("validate_infer") else ():
        try:
            site["log_prob"] = site["fn"].log_prob(site["value"])
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"site {name!r} has no density at its value: {checks.why_without_density(site, error)}"
            ) from error
        check_site_shape(site, float("inf"))  # type: ignore[arg-type]


def _require_positive(trace: poutine.Trace, gp: str, process: GaussianProcess) -> None:
    """Raise if a kernel's length scale, period or variance is a latent whose prior allows 0 or less."""
    made_of = _hyperparameters(process.kernel)
    for name, site in sample_sites(trace).items():
        value, prior = site["value"], site["infer"].get("prior")
        place = value.untyped_storage().data_ptr()  # 0 without memory, on a pretended device: test_device.py
        what = made_of.get(place) if place and is_free(site) else None
        if what and prior and value.is_floating_point() and prior.support.check(torch.full_like(value, -1e-6)).any():
            raise ValueError(
                f"latent site {name!r} is a {what} of GP site {gp!r}, and its prior allows 0 or less. Give it a "
                f"prior on positive numbers, such as dist.LogNormal(0.0, 1.0), or take {name}.exp() for the {what}."
            )


def _hyperparameters(kernel: Any) -> dict[int, str]:
    """What must be positive in a kernel and its parts, by its place in memory: length[0] has the place of the whole."""
    own = {name: vars(kernel).get(name) for name in ("lengthscale", "period", "variance")}
    found = {value.untyped_storage().data_ptr(): name for name, value in own.items() if isinstance(value, Tensor)}
    for part in kernel.parts:
        found |= _hyperparameters(part)
    return found


def _describe(run: Run) -> Structure:
    """The sites of a first run, in which the guide made its parameters."""
    gps = {name: at_path(run.guide.gps, name).spec() for name in run.posteriors}
    columns = {name: process.x.shape[-1] for name, process in run.processes.items()}
    found = Structure(gps=gps, columns=columns, grouped=grouped(run.trace))
    for name, site in run.sites.items():
        plates = plate_sizes(site)
        if is_free(site) and name not in gps:
            latent: dict[str, Any] = {"event_dim": 0, "shape": None, "plates": plates}
            own = at_path(run.guide, f"locs.{name}_unconstrained")
            if own is not None:  # else an overridden get_posterior has parameters of its own
                event_dim = biject_to(site["infer"]["prior"].support).domain.event_dim
                latent |= {"event_dim": event_dim, "shape": list(own.shape)}
            found.latents[name] = latent
        elif is_observation(site):
            found.rows[name] = int(site["value"].numel())
            found.data_plates.extend(plate for plate in plates if plate not in found.data_plates)
    return found


def _explore(run: Run, found: Structure, args: tuple, kwargs: dict[str, Any]) -> None:
    """Learn how densities depend on GP sites' values, and raise where a family on sites does not fit."""
    guide, modules = run.guide, run.guide.site_modules()
    _learn_forms(run, found, args, kwargs)
    for site, density in log_densities(run.trace, found.gps).items() if modules or guide.by_expectation else ():
        if not density.isfinite().all():
            raise ValueError(
                f"the log density of site {site!r} is not finite at {checks.which(~density.isfinite())}: look for "
                "infinite data, or data outside of the distribution's support."
            )
    for name, module in modules.items():
        require_separate_sites(found, name, f"the family {module.family['name']}, which", run.trace, _FREE)


def closed_forms_of(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> ClosedForms:
    """Which densities have their expectation in closed form, learned anew, as where a state was loaded."""
    return _learn_forms(probed(guide, args, kwargs), replace(guide.facts), args, kwargs)


def _learn_forms(run: Run, found: Structure, args: tuple, kwargs: dict[str, Any]) -> ClosedForms:
    guide, held = run.guide, held_runs(run.guide.model, run.trace, args, kwargs)
    with repeatable(guide.like), poutine.block():
        guide.core.forms = explore(found, held, run.processes, list(guide.site_modules()))
    return guide.core.forms


def require_separate_sites(found: Structure, name: str, reads: str, trace: poutine.Trace, remedy: str) -> None:
    """Raise where a GP site's likelihood is none of single values.

    :param reads: what reads Gaussian sites there, for the error.
    """
    why = [f"values of GP site {layer!r} enter another GP site" for layer in found.inner]
    if found.dependence[name] == COUPLED:
        why.append("its likelihood does not factorise: one term of a density depends on values at several inputs")
    why += [f"the distribution of site {flat!r} is piecewise constant" for flat in piecewise_constant(trace)]
    if why:
        raise ValueError(
            f"GP site {name!r} has {reads} reads Gaussian sites off the derivatives of the likelihood of each value, "
            f"but {why[0]}. {remedy}."
        )


def _expect_joint_draws(guide: KnownGuide) -> None:
    """Have natural steps know of them, and warn."""
    coupled = [name for name in guide.facts.gps if guide.kind_of_draws(name) is ExpectedSite]
    for name in coupled:
        coefficients = getattr(guide.modules_by_site()[name], "coefficients", None)
        if isinstance(coefficients, NaturalGaussian):
            coefficients.hold_by_draws()
    forms: Any = guide.core.forms
    if coupled and (forms.rest.dependence or guide.facts.inner):  # else all is normal around affine functions of values
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
            "intervals of each are too narrow. Write one site with the sum of their kernels; or give sites of one "
            f"output one posterior, {{({group}): SVGP(64)}}.",
            stacklevel=5,
        )
