"""What a program must be for a guide to learn from it; and what to say where it is not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from ..numerics.shapes import broadcast_shapes
from .traces import (
    all_sites,
    as_process,
    bare,
    free_values,
    held_trace,
    is_free,
    is_left_out,
    is_observation,
    log_densities,
    repeatable,
)

__all__ = [
    "holds_part",
    "require_each_row",
    "require_finite",
    "require_full_batch",
    "require_left_out",
    "require_own_rows",
    "require_sizes",
    "require_whole",
    "unfit_parameter",
    "why_without_density",
]


def require_sizes(trace: poutine.Trace) -> None:
    """Raise if a plate holds more of a run's data than it has: it would scale them down; if data do not fit their
    distribution, are a column, or one row beside many; or if a latent is under a mask of rows.

    :raises ValueError: naming the site and the plate.
    """
    for name, site in all_sites(trace):
        fn, value = site["fn"], site["value"]
        if site["is_observed"] and value.shape != fn.batch_shape + fn.event_shape:
            require_own_rows(name, site)
        elif isinstance(site["mask"], Tensor) and is_free(site) and not site_is_subsample(site):
            _require_own_mask(name, site)
        for frame in site["cond_indep_stack"] if site["type"] == "sample" else ():
            if frame.full_size is not None and frame.size > frame.full_size and is_observation(site):
                raise ValueError(
                    f"site {name!r} observes {frame.size} rows in pyro.plate({frame.name!r}, {frame.full_size}, "
                    f"subsample=...), whose size is {frame.full_size}: they would be weighed by "
                    f"{frame.full_size}/{frame.size}. Give the plate the number of all rows, size=N."
                )


def require_full_batch(name: str, family: str, trace: poutine.Trace, batches: bool = False) -> None:
    """Raise if a run's observed sites hold a mini-batch of the data, which families on sites don't take.

    :param name: of the GP site.
    :param batches: whether it is the first call's rows alone that must be whole.

    :raises ValueError: naming the GP site, the plate and the families that take mini-batches.
    """
    for part in _parts(trace):
        if batches:
            raise ValueError(
                f"GP site {name!r} has the family {family} with batches=True, whose actions act on the rows of the "
                f"guide's first call; there {part}. Call the guide once with the rows that they are to act on, and the "
                "plate of their number, guide(x[rows], y[rows])."
            )
        raise ValueError(
            f"GP site {name!r} has the family {family}, which trains on all data at once; {part}. Give all rows, or "
            "take a family that trains by mini-batches, such as SVGP or OrthogonalInducing."
        )


def require_whole(trace: poutine.Trace) -> None:
    """Raise if a run's observed sites hold a mini-batch of a plate's rows, where each row is to count once.

    :raises ValueError: naming the site and the plate.
    """
    for part in _parts(trace):
        raise ValueError(f"absorb counts each row once, and {part}: give the plate the new rows' number, size=len(x).")


def which(bad: Tensor, what: str = "values") -> str:
    """How many are bad, and the first of them."""
    return f"{int(bad.sum())} of {bad.numel()} {what}, the first at {_first_of(bad)}"


def _first_of(bad: Tensor) -> Any:
    first = tuple(bad.nonzero()[0].tolist())
    return first[0] if len(first) == 1 else first


def require_finite(trace: poutine.Trace, observed: str) -> None:
    """Raise if data, or the inputs of a GP site, are NaN or infinite.

    :raises ValueError: naming the site and the first such row.
    """
    for name, site in all_sites(trace):
        process = as_process(site["infer"].get("prior"))[0] if site["type"] == "sample" else None
        value = site["value"] if name == observed else None if process is None else process.x
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            held = "observes" if process is None else "has inputs with"
            bad = ~value.isfinite() if process is None else ~value.isfinite().all(-1)
            where = which(bad, "values" if process is None else "rows")
            raise ValueError(
                f"site {name!r} {held} NaN or infinite numbers ({where}): drop these rows, impute them, or mask the "
                "observations, poutine.mask(mask=~y.isnan())."
            )


def holds_part(trace: poutine.Trace) -> bool:
    """Whether an observed site holds a mini-batch of a plate's rows."""
    return any(True for _ in _parts(trace))


def _parts(trace: poutine.Trace) -> Iterator[str]:
    """Which observed sites hold a mini-batch, in words."""
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or not site["is_observed"] or site_is_subsample(site):
            continue
        for frame in site["cond_indep_stack"]:
            if frame.full_size is not None and frame.size < frame.full_size:
                yield f"site {name!r} observes {frame.size} of the {frame.full_size} rows of plate {frame.name!r}"


def unfit_parameter(model: Callable, run: poutine.Trace, args: tuple, kwargs: dict[str, Any]) -> Optional[str]:
    """What to say of a guide's run that failed, if a distribution has a parameter out of its support that moves with a
    GP site's values; else ``None``.
    """
    try:
        return _unfit_parameter(model, run, args, kwargs)
    except Exception:  # the model's own error will be shown
        return None


def _unfit_parameter(model: Callable, run: poutine.Trace, args: tuple, kwargs: dict[str, Any]) -> Optional[str]:
    values = {name: value.detach() for name, value in free_values(run).items()}
    gps = {name: values[name] for name, site in all_sites(run) if name in values and _is_process(site)}
    with pyro.validation_enabled(False), torch.no_grad():
        trace, moved = (
            held_trace(model, values | {name: scale * f for name, f in gps.items()}, args, kwargs)
            for scale in (1.0, 0.0)
        )
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


def require_left_out(
    model: Callable, gps: Collection[str], like: Tensor, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raise if a density depends on values that ``obs_mask=`` leaves out: these are drawn from the model.

    :param gps: the GP sites.
    :param trace: a run of a guide's.
    """
    values = free_values(trace)
    sites = dict(all_sites(trace))

    def densities(moved: dict[str, Tensor]) -> dict[str, Tensor]:
        with pyro.validation_enabled(False), repeatable(like):
            return log_densities(held_trace(model, values | moved, args, kwargs), gps)

    for name in [name for name in sites if is_left_out(name, sites)]:
        with repeatable(like):
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


def require_own_rows(name: str, site: Any) -> None:
    """Raise if data and distribution are of different shapes, and do not fit, one row of data would be that of many, or
    they meet in more values than either has.

    :raises ValueError: naming the site, both shapes and what to write.
    """
    value, shape = site["value"], torch.Size(site["fn"].shape())
    if not site["is_observed"]:
        return
    try:
        together = broadcast_shapes(value.shape, shape)
    except ValueError:
        raise ValueError(
            f"site {name!r} observes data of shape {tuple(value.shape)} under a distribution of shape {tuple(shape)}: "
            "give it a value for each of the distribution's."
        ) from None
    if together.numel() > max(value.numel(), shape.numel()):
        column = value.dim() > 1 and value.shape[-1] == 1
        found = f"each value would meet every row, {tuple(together)} in all"
        remedy = (
            "Give a value for each row, y[:, 0] in the place of y; or for P outputs in P columns let the distribution "
            "have them too, .to_event(1)."
            if column
            else "Give the data, or the distribution's parameters, the shape of the other."
        )
    elif any(one == 1 < many for one, many in zip(reversed(value.shape), reversed(shape))):
        found = "one value would be that of many rows"
        remedy = f"Give a value for each row; if one is that of all, write y.expand({tuple(together)})."
    else:
        return
    raise ValueError(
        f"site {name!r} observes data of shape {tuple(value.shape)} under a distribution of shape {tuple(shape)}: "
        f"{found}. {remedy}"
    )


def _require_own_mask(name: str, site: Any) -> None:
    """Raise if a latent is under a mask of more rows than it has: its divergence would be counted once for each."""
    shape, mask = torch.Size(site["fn"].batch_shape), site["mask"]
    if broadcast_shapes(shape, mask.shape) != shape:
        raise ValueError(
            f"site {name!r}, of batch shape {tuple(shape)}, is under a mask of shape {tuple(mask.shape)}: its "
            "divergence from the prior would be counted once for each row. Put the mask around the observed site "
            'alone, with poutine.mask(mask=mask): pyro.sample("y", ..., obs=y).'
        )


def require_each_row(trace: poutine.Trace) -> None:
    """Raise if a site's data are not one value for each of its distribution's.

    :raises ValueError: naming the site and both shapes.
    """
    for name, site in all_sites(trace):
        if is_observation(site) and site["value"].shape != torch.Size(site["fn"].shape()):
            require_own_rows(name, site)
            raise ValueError(
                f"site {name!r} observes data of shape {tuple(site['value'].shape)} under a distribution of shape "
                f"{tuple(site['fn'].shape())}: give one value for each row."
            )


def why_without_density(site: Any, error: Exception) -> str:
    """What to say of a site that has no density at its value."""
    # A value outside of the support is no matter of its dtype (test_robust_max.py::test_labels).
    if not site["value"].is_floating_point() and isinstance(error, RuntimeError):
        return (
            f"its dtype is {site['value'].dtype}, which {type(bare(site['fn'])).__name__} does not take ({error}). "
            "Give numbers of the inputs' dtype, y.to(x.dtype)."
        )
    nan = site["value"].isnan()
    if nan.any():
        found = f"{int(nan.sum())} of {nan.numel()} are NaN, the first at {_first_of(nan)}."
        event_dim = site["fn"].event_dim
        if not event_dim:
            return f"{found} Drop those rows, or mask them: poutine.mask(mask=~y.isnan()) around the site."
        whole = "" if event_dim == 1 else f".flatten(-{event_dim})"
        rows = f"{found} Drop those rows, or mask them: poutine.mask(mask=~y.isnan(){whole}.any(-1)) around the site."
        if not isinstance(site["fn"], torch.distributions.Independent):
            return rows
        return f"{rows} To keep their other values, mask single ones: dist.Normal(...).mask(~y.isnan()).to_event(...)."
    text = str(error)
    text = text if len(text) < 400 else f"{text[:300]} ... {text[-60:]}"
    classes = isinstance(site["fn"].support, type(torch.distributions.constraints.integer_interval(0, 1)))
    return f"{text}. Classes count from 0: where they are 1, 2, ..., give y - 1." if classes else text
