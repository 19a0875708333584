"""Whether what a program makes of a row depends on which other rows it is given, as standardised inputs do."""

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from ..process import GaussianProcess
from .asking import asks_program, attempt
from .data import map_tensors, tensors
from .handlers import held_trace
from .owners import kept_buffers
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
_TRIES = 60  # choices of arguments that may be no rows'
_AWAY = 0.3  # in unconstrained space: a coefficient of 0 would hide what it multiplies


@torch.no_grad()
def moved_by_rows(
    model: Any,
    trace: poutine.Trace,
    processes: Mapping[str, GaussianProcess],
    call: tuple[tuple, dict[str, Any]],
    by_rows: bool,
) -> list[str]:
    """What a program makes otherwise of some rows, under the same values, when it is not given the others, in words;
    nothing where it does not run on them alone, or draws random numbers.

    :param trace: a run of it, and ``processes`` its GP sites' priors.
    :param by_rows: whether densities are of single function values, so that they are compared, too.
    """
    x, args = next(iter(processes.values())).x, tensors(call)
    num = x.shape[-2]
    if num < _LEAST:
        return []
    drawn = {n: s for n, s in all_sites(trace) if is_free(s) and site_is_subsample(s) and s["fn"].subsample_size == num}
    values = {name: site["value"] for name, site in drawn.items()}
    chosen = _chosen(num, [*values.values()] or args, x)
    # The dimensions of rows: of arguments by number, and of values by name.
    of_rows: dict[Any, list[int]] = {i: [0] for i, arg in enumerate(args) if not drawn and arg.shape[:1] == (num,)}
    of_rows |= {name: [0] for name in drawn}
    latents = {n: _as_one_row(s, n in processes, num) for n, s in sample_sites(trace).items() if is_free(s)}
    values |= {name: value for name, (value, _) in latents.items()}
    of_rows |= {name: dims for name, (_, dims) in latents.items()}

    def shown(cuts: Mapping[Any, list[int]]) -> dict[tuple[str, str], Tensor]:
        def cut(key: object, value: Tensor) -> Tensor:
            for dim in cuts.get(key, ()):
                value = value.index_select(dim, chosen.to(value.device))
            return value

        number = itertools.count()
        given = map_tensors(lambda arg: cut(next(number), arg), call)
        with asks_program():
            run = held_trace(model, {name: cut(name, value) for name, value in values.items()}, *given)
            return dict(_shown(sample_sites(run), processes, by_rows, chosen))

    moved: list[tuple[str, str]] = []
    # A program that is one of all rows may raise anything.
    with (
        attempt(),
        repeatable(x),
        whole_plates(),
        kept_buffers(),
        pyro.validation_enabled(False),
        warnings.catch_warnings(action="ignore"),
    ):
        state, here, there = RandomState(x), shown({}), shown(of_rows)
        moved = [] if state.has_moved else [k for k in here if k in there and _differ(here[k], there[k], num, chosen)]
        shapes = {k: part.shape for k, part in there.items()}.items()
        # What has as many rows by chance, such as a table of stations, is no rows': if whole, it moves nothing.
        others = [key for key in of_rows if moved and key not in processes]
        for whole in itertools.islice((w for k in (1, 2) for w in itertools.combinations(others, k)), _TRIES):
            with attempt():
                again = shown({key: dims for key, dims in of_rows.items() if key not in whole})
                if {k: p.shape for k, p in again.items() if k[0] not in whole}.items() <= shapes:
                    moved = [k for k in moved if k not in again or _differ(here[k], again[k], num, chosen)]
    # Inputs that move, move means and kernels.
    return [f"the {what} {name!r}" for name, what in dict(reversed(moved)).items()]


def _chosen(num: int, given: Collection[Tensor], like: Tensor) -> Tensor:
    """Some of the highest rows, none with a column's least or largest number: their mean, range, ranks and levels
    differ from all rows'.
    """
    parts = [part.reshape(num, -1).to(like).nan_to_num(0.0, 0.0, 0.0) for part in given if part.shape[:1] == (num,)]
    table = torch.cat([like.new_zeros(num, 1), *parts], 1)
    height = ((table - table.mean(0)) / table.std(0, correction=0).clamp(min=1e-6)).sum(1)
    ends = torch.cat([table[:, 1:].argmin(0), table[:, 1:].argmax(0)])
    return height.index_fill(0, ends, -torch.inf).argsort()[-_PART:].sort().values


def _as_one_row(site: dict[str, Any], is_gp: bool, num: int) -> tuple[Tensor, list[int]]:
    """A latent's value, the same in all rows, and its dimensions of rows."""
    value, dims = site["value"], [-1]
    if not is_gp:
        value, dims = _moved(site), [frame.dim - site["fn"].event_dim for frame in site["cond_indep_stack"]]
    of_rows = [dim for dim in dims if value.shape[dim] == num]
    for dim in of_rows:  # so that what takes another row's, as g.flip(0), shows nothing
        value = value.narrow(dim, -1, 1).expand_as(value)
    return value, of_rows


def _moved(site: dict[str, Any]) -> Tensor:
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


def _shown(
    sites: Mapping[str, Any], priors: Mapping[str, GaussianProcess], by_rows: bool, chosen: Tensor
) -> Iterator[Any]:
    """What a run makes of rows, by site and what it is; of a kernel that of the rows chosen, and 0 elsewhere."""
    for name, site in sites.items():
        if name in priors:
            process: Any = as_process(site["fn"])[0]
            yield (name, "inputs of GP site"), process.x
            yield (name, "prior mean of GP site"), process.mean
            x, all_x = process.x, priors[name].x
            is_whole = x.shape[-2] == all_x.shape[-2]
            rows = chosen.to(x.device) if is_whole else torch.arange(x.shape[-2], device=x.device)
            # Without a diagonal term, which may be relative to the rows given; and a network that streams its rows is
            # never given all: test_blocks_change_nothing.
            kernel = process.kernel(x.index_select(-2, rows), all_x[..., :2, :])
            zeros = kernel.new_zeros(*kernel.shape[:-2], x.shape[-2], kernel.shape[-1])
            yield (name, "kernel of GP site"), zeros.index_copy(-2, rows, kernel)
        elif by_rows and is_observation(site):
            yield (name, "density of site"), _density(site)


def _density(site: dict[str, Any]) -> Tensor:
    """Log densities of a site's rows, NaN where a mask, which may go by place, leaves some out."""
    fn, value = site["fn"], site["value"]
    found = torch.as_tensor(rewrapped(fn, bare(fn).log_prob(value), masked=False))
    seen = unmasked(fn, value, site["mask"])
    return found if seen is None else torch.where(sum_rightmost(~seen, fn.event_dim) > 0, torch.nan, found)


def _differ(here: Tensor, there: Tensor, num: int, chosen: Tensor) -> bool:
    """Whether the rows chosen of so many are others where they are alone; what has none of these is not compared."""
    dims = [dim for dim, sizes in enumerate(zip(here.shape, there.shape)) if sizes == (num, _PART)]
    if not dims or (here := here.index_select(dims[0], chosen.to(here.device))).shape != there.shape:
        return False
    size = here.abs() + here.abs().nanmean()
    return bool(((here - there).abs() > _TOLERANCE[here.dtype] * size).any())
