"""Whether what a program makes of a row depends on which other rows it is given, as standardised inputs do."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from .asking import asks_program, attempt
from .data import map_tensors, tensors
from .facts import kept_buffers
from .handlers import held_trace
from .traces import (
    RandomState,
    all_sites,
    as_process,
    bare,
    is_free,
    is_observation,
    repeatable,
    rewrapped,
    sample_sites,
    unmasked,
    whole_plates,
)

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # relative, of what has the same rows
_PART, _LEAST = 3, 5  # rows that are compared, of so many at least
_AWAY = 0.3  # in unconstrained space: a coefficient of 0 would hide what it multiplies


@torch.no_grad()
def moved_by_rows(
    model: Any, trace: poutine.Trace, names: Collection[str], call: tuple[tuple, dict[str, Any]], by_rows: bool
) -> list[str]:
    """What a program makes otherwise of some rows, under the same values, when it is not given the others, in words;
    nothing where it does not run on them alone, or draws random numbers.

    :param trace: a run of it, and ``names`` its GP sites.
    :param by_rows: whether densities are of single function values, so that they are compared, too.
    """
    sites, x = sample_sites(trace), tensors(trace.nodes[next(iter(names))]["value"])[0]
    num = x.shape[-1]
    if num < _LEAST:
        return []
    drawn = {n: s for n, s in all_sites(trace) if is_free(s) and site_is_subsample(s) and s["fn"].subsample_size == num}
    chosen = _chosen(num, [s["value"] for s in drawn.values()] or tensors(call), x)

    def cut(value: Tensor, dim: int = 0) -> Tensor:
        return value.index_select(dim, chosen) if value.dim() and value.shape[dim] == num else value

    values = {name: site["value"] for name, site in drawn.items()}
    part: dict[str, Tensor] = {name: cut(value) for name, value in values.items()}
    for name, site in sites.items():
        if is_free(site):
            values[name] = part[name] = site["value"] if name in names else _moved(site)
            frames = [frame.dim - site["fn"].event_dim for frame in site["cond_indep_stack"]]
            for dim in [-1] if name in names else frames:
                part[name] = cut(part[name], dim)
    # A program that is one of all rows may raise anything.
    with (
        attempt(),
        repeatable(x),
        whole_plates(),
        kept_buffers(),
        pyro.validation_enabled(False),
        warnings.catch_warnings(action="ignore"),
    ):
        state, given = RandomState(x), call if drawn else map_tensors(cut, call)
        with asks_program():
            here, there = (sample_sites(held_trace(model, v, *c)) for v, c in ((values, call), (part, given)))
        if not state.has_moved:
            return list(_compared(here, there, names, chosen, by_rows))
    return []


def _chosen(num: int, given: Collection[Tensor], like: Tensor) -> Tensor:
    """Some of the highest rows, none with a column's least or largest number: their mean, range, ranks and levels
    differ from all rows'.
    """
    parts = [part.reshape(num, -1).to(like).nan_to_num(0.0, 0.0, 0.0) for part in given if part.shape[:1] == (num,)]
    table = torch.cat([like.new_zeros(num, 1), *parts], 1)
    height = ((table - table.mean(0)) / table.std(0).clamp(min=1e-6)).sum(1)
    ends = torch.cat([table[:, 1:].argmin(0), table[:, 1:].argmax(0)])
    return height.index_fill(0, ends, -torch.inf).argsort()[-_PART:].sort().values


def _moved(site: Any) -> Tensor:
    """A latent's value, moved, each entry by another step."""
    value, support = site["value"], site["infer"].get("prior", site["fn"]).support
    if support.is_discrete:
        return value
    with attempt(), asks_program():
        transform = biject_to(support)
        theta = transform.inv(value)
        steps = torch.arange(theta.numel(), device=theta.device).reshape(theta.shape)
        return transform(theta + _AWAY / (1 + steps))
    return value


def _compared(here: Mapping[str, Any], there: Mapping[str, Any], names: Any, chosen: Tensor, by_rows: bool) -> Iterator:
    one: Any
    other: Any
    for name, site in here.items():
        if name in names:
            one, other = (as_process(sites[name]["fn"])[0] for sites in (here, there))
            if _differ(one.x, other.x, chosen, -2):
                yield f"the inputs of GP site {name!r}"
                continue
            if _differ(one.mean, other.mean, chosen, -1):
                yield f"the prior mean of GP site {name!r}"
            # At few rows, and without a diagonal term, which may be relative to those given.
            some, first = other.x, other.x[..., :1, :]
            with asks_program():
                parts = [process.kernel(some, first) for process in (one, other)]
            if _differ(*parts, torch.arange(_PART), -2):
                yield f"the kernel of GP site {name!r}"
        elif by_rows and is_observation(site):
            with asks_program():
                one, other = _density(site), _density(there[name])
            dims = [dim for dim, sizes in enumerate(zip(one.shape, other.shape)) if len({*sizes}) > 1]
            if len(dims) == 1 and _differ(one, other, chosen, dims[0]):
                yield f"the density of site {name!r}"


def _density(site: Any) -> Tensor:
    """Log densities of a site's rows, 0 where a mask leaves some out."""
    fn, value = site["fn"], site["value"]
    found = torch.as_tensor(rewrapped(fn, bare(fn).log_prob(value), masked=False))
    seen = unmasked(fn, value, site["mask"])
    if seen is None:
        return found
    return torch.where(seen.flatten(-fn.event_dim).all(-1) if fn.event_dim else seen, found, 0.0)


def _differ(here: Tensor, there: Tensor, chosen: Tensor, dim: int) -> bool:
    here = here.index_select(dim, chosen.to(here.device))
    size = here.abs() + here.abs().mean()
    return here.shape == there.shape and not bool(((here - there).abs() <= _TOLERANCE[here.dtype] * size).all())
