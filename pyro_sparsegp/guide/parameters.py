"""What a guide checks of its program after the first call: parameters that would not train, sites it does not know."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from ..bases.inducing import InducingPoints
from ..numerics.linalg import default_jitter
from ..program import checks
from ..program.declared import is_normal
from ..program.traces import bare, log_densities
from .known import Core, KnownGuide
from .runs import Run, probed


def check_parameters(guide: KnownGuide, core: Core, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if the model's sites are not those that the guide knows, or if a parameter would not train."""
    probe = probed(guide, args, kwargs)
    outputs = list(log_densities(probe.trace, probe.posteriors).values())
    for name, q in probe.posteriors.items():  # a kernel's parameter may be in the divergence alone, a mean's in values
        outputs += [probe.values[name], q.process.kernel.diag(q.process.x), q.kl]
    known = _check_known(probe)
    _warn_of_data_latents(probe)
    _warn_of_jitter(probe)
    core.registered = checks.require_registered(outputs, probe.trace, (args, kwargs))
    for name, posterior in probe.posteriors.items():
        if posterior.process.x.requires_grad:
            module = guide.module_of(name)
            # Where x is learned its range is not what it will be: inducing inputs are learned in units of 1.
            for part in [p for p in module.modules() if isinstance(p, InducingPoints) and p.units is not None]:
                part.leave_units()
            core.facts.gps[name] = module.spec()
    core.checked = known  # else a training call will tell


def _warn_of_data_latents(probe: Run) -> None:
    """Tell of latents that each datum has one of beside f; those that may be a GP's inputs are another matter."""
    found = probe.guide.facts
    most = max(found.rows.values(), default=math.inf)
    names = [name for name in found.local_latents if math.prod(found.latents[name]["shape"] or ()) >= most]
    # test_messages.py::test_a_latent_of_each_datum
    if names and not any(process.x.requires_grad for process in probe.processes.values()):
        warnings.warn(
            f"latent site {names[0]!r} has a value for each datum, and q takes it to be independent of GP sites "
            f"{', '.join(map(repr, found.gps))}: the intervals of both are too narrow. Integrate it out in the "
            "likelihood: add its variance to a Normal's, or use quadrature in pyro.factor.",
            stacklevel=6,
        )


def _warn_of_jitter(probe: Run) -> None:
    """Tell of normal data that are as precise as the jitter lets function values be."""
    noise = {n: fn.variance.min() for n, site in probe.data.items() if is_normal(fn := bare(site["fn"]))}
    for gp, process in probe.processes.items():
        parts = [part.jitter for part in probe.module(gp, process).modules() if isinstance(part, InducingPoints)]
        # a process' before a basis' own, as in InducingPoints.forward
        own = next(filter(None, [process.jitter, *parts]), default_jitter(process.x.dtype))
        jitter = own * process.variance.mean()
        names = [name for name, variance in noise.items() if variance < 10 * jitter]  # sd 5 % too wide, and more
        if names:
            warnings.warn(
                f"the noise variance of site {names[0]!r}, {noise[names[0]]:.1e}, is not far above the jitter of GP "
                f"site {gp!r}'s kernel matrix, {jitter:.1e}: intervals at these data are too wide. Take float64 and "
                "GaussianProcess(..., jitter=1e-12), or more noise.",
                stacklevel=6,
            )


def _check_known(probe: Run) -> bool:
    """After a run: raise if, at a training call, the model's sites are not those the guide was initialised or loaded
    with.

    :returns: whether it was a training call.
    """
    facts, free = probe.guide.facts, {name for name, site in probe.sites.items() if not site["is_observed"]}
    known, is_training = {*facts.gps, *facts.latents}, probe.data.keys() == facts.rows.keys()
    # test_guide.py::TestState::test_the_state_of_another_family_or_model_is_an_error
    if free != known and is_training:
        raise ValueError(
            f"the model's latent sites are {sorted(free)}, the guide knows {sorted(known)}: it was initialised, or "
            "its state saved, with another model."
        )
    # A prediction may draw sites of its own: test_messages.py::test_a_latent_that_a_state_does_not_have.
    unknown = sorted(free - known - facts.rows.keys())
    if unknown:
        warnings.warn(
            f"site {unknown[0]!r} is neither a latent site that the guide knows, {sorted(known)}, nor one of its data, "
            f"{sorted(facts.rows)}: it is drawn from its prior. If another model's state was loaded, load it into a "
            "guide of that model.",
            stacklevel=2,
        )
    return is_training


def explain_nan(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> str:
    """What is NaN or infinite at these arguments, for an error."""
    with torch.no_grad():
        run = probed(guide, args, kwargs)
    densities = log_densities(run.trace, run.posteriors)
    values = {f"the log density of site {name!r}": density for name, density in densities.items()}
    for name, q in run.posteriors.items():
        values |= {
            f"the inputs of GP site {name!r}": q.process.x.sum(-1),
            f"the KL divergence of GP site {name!r}": q.kl,
        }
    values |= {f"parameter {name}": parameter for name, parameter in guide.named_parameters()}
    broken = {what: ~value.isfinite() for what, value in values.items() if not value.isfinite().all()}
    return "; ".join(f"{what} ({checks.which(bad)}) is not finite" for what, bad in broken.items()) or (
        "all is finite at the medians"
    )
