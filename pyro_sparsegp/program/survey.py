"""What the guide finds out about a model at its first call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import biject_to, constraints

from ..modules import at_path
from ..posterior.sparse_posterior import SparsePosterior
from . import structure
from .likelihood import quadratic_kind
from .traces import (
    all_sites,
    as_process,
    bare,
    held_trace,
    is_free,
    is_left_out,
    is_observation,
    log_densities,
    piecewise_constant,
    repeatable,
)

if TYPE_CHECKING:
    from ..guide import AutoSparseGP

__all__ = [
    "Probe",
    "Structure",
    "describe",
    "find_dependence",
    "find_exact_sites",
    "require_left_out",
    "require_sites",
    "require_sizes",
    "unfit_parameter",
]

_NO_LIMIT: Any = float("inf")  # of nested plates


@dataclass
class Structure:
    """What the guide found out about the model at its first call, in plain Python: it travels in the state dict.

    :param gps: for each GP site, the shapes of its module.
    :param latents: for each other latent site, its event dimensions, shape and enclosing plates with sizes.
    :param rows: for each observed site, how many values it had.
    :param data_plates: plates that enclose an observed site.
    :param dependence: for each GP site, how densities downstream depend on its values.
    :param inner: GP sites whose values enter another GP site (an inner layer of a deep GP).
    :param groups: for those whose values a layer above couples in groups of consecutive inputs (the patches of an
        image), how many make a group, and that layer.
    :param interactions: pairs of GP sites that meet in one term of a density.
    :param downstream: sites whose densities move with a GP site's values.
    :param quadratic: GP sites of families on sites whose log densities are quadratic in their values.
    :param meeting: those of them with several outputs that meet in a term.
    :param columns: for each GP site, how many columns its inputs have.
    """

    gps: dict[str, dict[str, Any]] = field(default_factory=dict)
    latents: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    data_plates: list[str] = field(default_factory=list)
    dependence: dict[str, str] = field(default_factory=dict)
    inner: list[str] = field(default_factory=list)
    groups: dict[str, tuple[int, str]] = field(default_factory=dict)
    interactions: list[list[str]] = field(default_factory=list)
    downstream: list[str] = field(default_factory=list)
    quadratic: list[str] = field(default_factory=list)
    meeting: list[str] = field(default_factory=list)
    columns: dict[str, int] = field(default_factory=dict)


@dataclass
class Probe:
    """What a run with all latent values held fixed showed."""

    densities: dict[str, Tensor]
    posteriors: dict[str, SparsePosterior]
    values: dict[str, Tensor]

    def downstream(self, moved: Collection[str] = ()) -> list[Tensor]:
        """All the log densities, and what GP sites other than those ``moved`` make of their inputs, in order."""
        others = [q for name, q in self.posteriors.items() if name not in moved]
        return [*self.densities.values(), *(part for q in others for part in _inputs_of(q))]


def require_sites(guide: AutoSparseGP, trace: poutine.Trace, posteriors: Collection[str]) -> None:
    """Raise if a first run, in which the guide met these GP sites, is none that it can learn from."""
    if isinstance(guide.families, Mapping):
        for name in guide.families:
            if name not in posteriors:
                kind = "a site that is no Gaussian process" if name in trace.nodes else "no site of the model"
                raise ValueError(
                    f"a family is given for {name!r}, which is {kind}; the GP sites are {sorted(posteriors)}"
                )
    fixed = [name for name, site in all_sites(trace) if is_observation(site) and as_process(site["fn"])[0]]
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
    observed = [name for name, site in all_sites(trace) if is_observation(site)]
    if not observed:
        raise ValueError(
            "the guide's first call observes nothing: it learns there which sites are latent, so call it, or take "
            "the first SVI step, with the data, model(x, y)."
        )
    if not isinstance(guide.point_estimates, bool):
        unknown = [name for name in guide.point_estimates if name not in trace.nodes]
        if unknown:
            raise ValueError(f"point_estimates names {unknown}, which are no sites of the model")
    if pyro.settings.get("validate_infer"):
        for name, site in all_sites(trace):
            if site["type"] == "sample" and not site_is_subsample(site) and name not in posteriors:
                try:
                    site["log_prob"] = site["fn"].log_prob(site["value"])
                except ValueError as error:
                    raise ValueError(f"site {name!r} has no density at its value: {_why(site, error)}") from error
                check_site_shape(site, _NO_LIMIT)


def require_sizes(trace: poutine.Trace) -> None:
    """Raise if a plate holds more of a run's data than it has: it would scale them down.

    :raises ValueError: naming the site and the plate.
    """
    for name, site in all_sites(trace):
        for frame in site["cond_indep_stack"] if is_observation(site) else ():
            if frame.full_size is not None and frame.size > frame.full_size:
                raise ValueError(
                    f"site {name!r} observes {frame.size} rows in pyro.plate({frame.name!r}, {frame.full_size}, "
                    f"subsample=...), whose size is {frame.full_size}: they would be weighed by "
                    f"{frame.full_size}/{frame.size}. Give the plate the number of all rows, size=N."
                )


def unfit_parameter(guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> Optional[str]:
    """What to say of a run that failed, if a distribution has a parameter out of its support that moves with a GP
    site's values; else ``None``.
    """
    values = {name: site["value"].detach() for name, site in all_sites(guide.trace) if is_free(site)}
    gps = {name: values[name] for name, site in all_sites(guide.trace) if name in values and _is_process(site)}
    try:
        with pyro.validation_enabled(False), torch.no_grad():
            trace, moved = (
                held_trace(guide.model, values | {name: scale * f for name, f in gps.items()}, args, kwargs)
                for scale in (1.0, 0.0)
            )
    except Exception:  # the model's own error will be shown
        return None
    for name, site in all_sites(trace):
        if site["type"] != "sample" or name in gps or name not in moved.nodes or site_is_subsample(site):
            continue
        other = dict(_parameters(bare(moved.nodes[name]["fn"])))
        for label, (value, ok) in _parameters(bare(site["fn"])).items():
            if ok.all() or label not in other or _equal(value, other[label][0]):
                continue
            ranges = [f"{f!r} from {float(v.min()):.4g} to {float(v.max()):.4g}" for f, v in gps.items()]
            return (
                f"site {name!r}: {label} of its distribution {type(bare(site['fn'])).__name__} is out of its support "
                f"at {int((~ok).sum())} of {ok.numel()} values, from {float(value.min()):.4g} to "
                f"{float(value.max()):.4g}. Function values did it, of GP site {', '.join(ranges)}: when a guide "
                "starts, they have the size that the prior gives them. Give it a smaller variance or another mean, or "
                "keep the parameter in its support, such as f.exp().clamp(1e-6, 1e6)."
            )
    return None


def _is_process(site: Any) -> bool:
    prior = site["infer"].get("prior") if site["type"] == "sample" else None
    return prior is not None and as_process(prior)[0] is not None


def _parameters(fn: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """A distribution's parameters, each with where it satisfies its constraint."""
    found = {}
    for name, constraint in getattr(fn, "arg_constraints", {}).items():
        value = None if constraints.is_dependent(constraint) else getattr(fn, name, None)
        if isinstance(value, Tensor):
            found[name] = value, constraint.check(value)
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.nan_to_num().equal(other.nan_to_num())


def require_left_out(guide: AutoSparseGP, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if a density depends on values that ``obs_mask=`` leaves out: these are drawn from the model.

    :param trace: a run of the guide's.
    """
    values = {name: site["value"] for name, site in all_sites(trace) if is_free(site)}
    sites = dict(all_sites(trace))

    assert guide.structure is not None
    gps = guide.structure.gps

    def densities(moved: dict[str, Tensor]) -> dict[str, Tensor]:
        with pyro.validation_enabled(False), repeatable(guide.like):
            return log_densities(held_trace(guide.model, values | moved, args, kwargs), gps)

    for name in [name for name in sites if is_left_out(name, sites)]:
        with repeatable(guide.like):
            drawn = sites[name]["fn"].sample((2,))
        first, second = (densities({name: one}) for one in drawn)
        used = [other for other, one in first.items() if not _equal(one, second[other])]
        if used:
            raise ValueError(
                f"site {name!r} holds values that obs_mask= leaves out; they are drawn from the model, but the density "
                f"of site {used[0]!r} depends on them: they are latents with a posterior of their own. Write them as "
                "pyro.sample(name, fn) in a plate of their own, and the others as data; where values are only missing, "
                "poutine.mask(mask=obs_mask) around the site leaves them out."
            )


def _why(site: Any, error: ValueError) -> str:
    nan = site["value"].isnan()
    if nan.any():
        found = f"{int(nan.sum())} of {nan.numel()} are NaN."
        event_dim = site["fn"].event_dim
        if not event_dim:
            return f"{found} Drop those rows, or mask them: poutine.mask(mask=~y.isnan()) around the site."
        whole = "" if event_dim == 1 else f".flatten(-{event_dim})"
        rows = f"{found} Drop those rows, or mask them: poutine.mask(mask=~y.isnan(){whole}.any(-1)) around the site."
        if not isinstance(site["fn"], torch.distributions.Independent):
            return rows
        return f"{rows} To keep their other values, mask single ones: dist.Normal(...).mask(~y.isnan()).to_event(...)."
    text = str(error)
    return text if len(text) < 400 else f"{text[:300]} ... {text[-60:]}"


def describe(guide: AutoSparseGP, trace: poutine.Trace, posteriors: Mapping[str, SparsePosterior]) -> Structure:
    """The sites of a first run, in which the guide made its parameters."""
    found = Structure(gps={name: at_path(guide.gps, name).spec() for name in posteriors})
    found.columns = {name: q.process.x.shape[-1] for name, q in posteriors.items()}
    for name, site in all_sites(trace):
        if site["type"] != "sample" or site_is_subsample(site) or name in found.gps:
            continue
        plates = {
            frame.name: int(frame.full_size or frame.size) for frame in site["cond_indep_stack"] if frame.vectorized
        }
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


def find_dependence(found: Structure, run: Callable[[dict[str, Tensor]], Probe]) -> Probe:
    """Fill in how densities and layers above depend on GP sites' values.

    :param run: runs the model with these GP sites at these values, all else as it was the last time.
    :returns: what a run with none of them moved showed.
    """
    first = run({})
    spread = {name: posterior.process.variance.sqrt() for name, posterior in first.posteriors.items()}
    base: dict[str, Tensor] = {}
    for name, posterior in first.posteriors.items():  # move off the mean, where a model may be degenerate
        base[name] = posterior.mean + 0.1 * spread[name]

    def evaluate(moved: dict[str, Tensor]) -> list[Tensor]:
        return run(base | moved).downstream(moved)

    names = list(first.posteriors)
    for name in names:
        alone = partial(lambda f, value: evaluate({f: value}), name)
        found.dependence[name] = structure.dependence(alone, base[name], spread[name])
        still = run(base)
        # Outputs move apart: classes see their differences only.
        uneven = torch.arange(1, spread[name].numel() + 1).to(spread[name]).reshape(spread[name].shape).cos()
        moved = run(base | {name: base[name] + spread[name] * (1 + 0.5 * uneven)})
        if any(_differ(still.posteriors[other], moved.posteriors[other]) for other in names if other != name):
            found.inner.append(name)
            if found.dependence[name] == structure.COUPLED:
                _find_groups(found, name, base, spread[name], alone)
        for other, density in still.densities.items():
            if other not in found.downstream and not torch.equal(density, moved.densities[other]):
                found.downstream.append(other)
    for f, g in itertools.combinations(names, 2):
        both = partial(lambda f, g, a, b: evaluate({f: a, g: b}), f, g)
        if structure.interact(both, (base[f], spread[f]), (base[g], spread[g])):
            found.interactions.append([f, g])
    return first


def _find_groups(
    found: Structure,
    name: str,
    base: dict[str, Tensor],
    spread: Tensor,
    evaluate: Callable[[Tensor], list[Tensor]],
) -> None:
    """See whether layers above couple a site's values only within groups, as many as one of them has inputs."""
    num = base[name].shape[-1]
    counts = {other: f.shape[-1] for other, f in base.items()}
    sizes = {num // n: other for other, n in counts.items() if 1 < n < num and num % n == 0}
    size = structure.group_size(evaluate, base[name], spread, sorted(sizes))
    if size is not None:
        found.groups[name] = size, sizes[size]


def find_exact_sites(guide: AutoSparseGP, probe: Probe, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise where a family on sites does not fit, and see for which likelihoods its sites are exact."""
    found = guide.structure
    assert found is not None
    modules = guide.site_modules()
    for site, density in probe.densities.items() if modules or guide.by_expectation else ():
        if not density.isfinite().all():
            raise ValueError(
                f"the log density of site {site!r} is not finite at {int((~density.isfinite()).sum())} of "
                f"{density.numel()} values: look for infinite data, or data outside of the distribution's support."
            )
    for name, module in modules.items():
        kind, family = found.dependence[name], module.family["name"]
        if name in found.inner or kind == structure.COUPLED:
            why = (
                "its values enter another GP site"
                if name in found.inner
                else "its likelihood does not factorise: one term of a density depends on values at several inputs"
            )
            raise ValueError(
                f"GP site {name!r} has the family {family}, which reads Gaussian sites off the likelihood of each "
                f"value, but {why}. Take a family with a free posterior, such as SVGP or OrthogonalInducing."
            )
        posterior = probe.posteriors[name]
        others = {other: value for other, value in probe.values.items() if other != name}

        def total(f: Tensor, name: str = name, others: dict[str, Tensor] = others) -> Tensor:
            trace = held_trace(guide.model, {**others, name: f}, args, kwargs)
            parts = log_densities(trace, found.gps)
            return sum((part.sum() for part in parts.values()), f.new_zeros(()))

        flat = piecewise_constant(guide.trace)
        if flat and kind != structure.NONE:
            raise ValueError(
                f"GP site {name!r} has the family {family}, which reads Gaussian sites off the likelihood's "
                f"derivatives; the distribution of site {flat[0]!r} is piecewise constant. Take a family with a "
                "free posterior, such as SVGP or OrthogonalInducing, or Categorical(logits=...)."
            )
        spread, outputs_meet = posterior.process.variance.sqrt(), kind == structure.DATAWISE
        quadratic, meeting = quadratic_kind(total, posterior.mean, spread, outputs_meet)
        if quadratic:
            found.quadratic.append(name)
        if meeting:
            found.meeting.append(name)


def _inputs_of(posterior: SparsePosterior) -> list[Tensor]:
    """All that a posterior's marginals take from its inputs and hyperparameters, whatever q(w) is."""
    return [posterior.process.mean, posterior.process.variance, *posterior.features]


def _differ(a: SparsePosterior, b: SparsePosterior) -> bool:
    def seen(q: SparsePosterior) -> list[Tensor]:  # the features of a family that has read no sites show nothing
        return [*_inputs_of(q), q.process.kernel(q.process.x[..., :1, :], q.process.x)]

    return not all(torch.equal(one, other) for one, other in zip(seen(a), seen(b)))
