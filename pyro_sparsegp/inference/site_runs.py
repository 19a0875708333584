"""Which data a call of expectation propagation brings, and the sites that these have."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Optional

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.expectation import ExpectationGP
from ..gaussians.sites import Sites
from ..guide import AutoSparseGP
from ..numerics.linalg import row_squares, side_by_side, variance_floor
from ..numerics.rows import fingerprints
from ..process import GaussianProcess
from ..program.data import tensors
from ..program.dependence import NONE
from ..program.terms import Terms
from ..program.traces import all_sites, is_observation
from .refinement import Progress, SiteRun


def site_run(
    method: Any,
    name: str,
    process: GaussianProcess,
    terms: Terms,
    trace: poutine.Trace,
    call: tuple[tuple, dict[str, Any]],
    indices: Optional[Tensor],
) -> SiteRun:
    """One GP site of a run, its sites as they are kept.

    :raises ValueError: naming the site, if the rows are not the data that it has sites of, or do not say which.
    """
    guide: AutoSparseGP = method.guide
    scale: Any = trace.nodes[name]["scale"] if name in trace.nodes else 1.0
    if isinstance(scale, Tensor) or scale != 1:
        raise ValueError(
            f"GP site {name!r} is scaled by {scale}; expectation propagation has no prior to another power. Scale "
            "the likelihood's site alone, or the loss."
        )
    module: ExpectationGP = attrgetter(name)(guide.gps)
    features = module.basis(process.kernel, process.jitter, name)
    phi, anchor = side_by_side(features(process.x)), features.anchor
    prior = process.variance
    # d = k(x, x) − φφᵀ, FITC's diagonal (eq. 1)
    residual = torch.maximum(prior - row_squares(phi), variance_floor(prior))
    index, num = _rows(name, process, guide.facts.dependence[name] == NONE, terms, trace, indices)
    kept = module.precision.shape[-1]
    if kept not in (0, num):
        raise ValueError(
            f"GP site {name!r} has sites of {kept} data, this call brings {num}. For a part of the data, "
            "give the plate their full number and row numbers, pyro.plate('data', N, subsample_size=B); "
            "for other data, make a new guide."
        )
    relation, given = guide.relation(*call), None
    with torch.no_grad():
        # Where these are the same tensors nothing is read back from a device: test_a_family_stays_on_its_device.
        if index is None and not (kept and relation is not None and relation.known):
            observed = [s["value"] for n, s in all_sites(trace) if n in guide.facts.rows and is_observation(s)]
            given = _fingerprints(process.x, tensors(call), observed)
            module.require_data(given, name)
        sites = Sites(phi.detach(), torch.zeros_like(process.mean), torch.zeros_like(process.mean))
        if kept and index is None:
            sites = Sites(phi.detach(), module.precision, module.linear)
        elif kept:
            module.look_from(None if anchor is None else anchor.detach())
            rows = module.features_of(module.rows[..., index, :])
            sites = Sites(rows, module.precision[..., index], module.linear[..., index])
    progress, spread = method.progress.setdefault(name, Progress()), prior.detach().sqrt()
    rest = residual, process.mean, spread, index, num, anchor, sites, given
    return SiteRun(name, method, progress, module, phi, *rest)


def _fingerprints(x: Tensor, arguments: list[Tensor], observed: list[Tensor]) -> Tensor:
    """Of all data's inputs, other arguments and observations, ``(3, N)``; 0 where there are none."""
    arguments = [argument for argument in arguments if not any(argument is y for y in observed)]
    num, none = x.shape[-2], x.new_zeros(x.shape[-2], dtype=torch.int64)
    columns = [x.movedim(-2, 0)], _along(num, arguments), _along(num, observed)
    return torch.stack([fingerprints(column) if column else none for column in columns])


def _along(num: int, values: list[Tensor]) -> list[Tensor]:
    """Those of the tensors that have so many rows, along the first dimension or else the last, rows first."""
    shaped = [value for value in values if value.dim() and num in (value.shape[0], value.shape[-1])]
    return [value if value.shape[0] == num else value.movedim(-1, 0) for value in shaped]


def _rows(
    name: str, process: GaussianProcess, is_free: bool, terms: Terms, trace: poutine.Trace, indices: Optional[Tensor]
) -> tuple[Optional[Tensor], int]:
    """The row numbers of the data given, ``None`` if these are all, and how many there are."""
    here = process.x.shape[-2]
    if not terms.plates or is_free:
        if indices is not None and indices.tolist() != list(range(here)):
            raise ValueError(
                "indices are given, but no plate holds a part of the data: say how many there are, "
                "pyro.plate('data', N, subsample=x)"
            )
        return None, here
    ((plate, (size, full)), *others) = terms.plates.items()
    if others or name not in terms.rowwise or size != here:
        raise ValueError(
            f"GP site {name!r} has {here} values, plate {plate!r} holds {size} of {full} rows, and not all terms of a "
            "value stand in its row of that plate alone: a site needs all of them at once. Sample the process at the "
            "inputs of those rows, or give all data in each step."
        )
    if indices is None:
        indices = trace.nodes[plate]["value"] if plate in trace.nodes else None
        if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dim() != 1:
            raise ValueError(
                f"plate {plate!r} holds {size} of {full} rows and does not say which: expectation propagation "
                "keeps a site for each datum. Give their numbers, ep.step(..., indices=rows), or write "
                "plate = pyro.plate('data', N, subsample_size=B) and index the data by plate.indices."
            )
    whole = indices.shape == (size,) and not indices.is_floating_point() and indices.dtype != torch.bool
    if not whole or len(indices.unique()) < size or not ((indices >= 0) & (indices < full)).all():
        raise ValueError(
            f"indices must be {size} distinct row numbers from 0 to {full - 1}, as many as the data given, got "
            f"{indices.dtype} of shape {tuple(indices.shape)}"
        )
    return indices.to(process.x.device), full
