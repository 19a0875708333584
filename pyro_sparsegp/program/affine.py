"""Parameters of distributions that are affine functions of GP sites' values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from .bare import bare
from .traces import RandomState, is_observation

__all__ = ["NORMAL", "are_normal_around_affine", "is_affine", "others_follow", "others_move", "parameter_of"]

# of which E log p is known, whatever the covariance of the location
NORMAL = (dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal)
_WIDE = 10.0  # times as far, to find where a function bends that is affine around the prior mean


def parameter_of(fn: Any) -> Tensor:
    """The parameter of which a distribution knows its expectation where it is normal: the location, or the one that
    it names.
    """
    fn = bare(fn)
    return getattr(fn, _name_of(fn))


def _name_of(fn: Any) -> str:
    return "loc" if isinstance(fn, (torch.distributions.Normal, *NORMAL)) else fn.normal_parameter


def is_affine(middle: Tensor, up: Tensor, down: Tensor, far: Tensor) -> bool:
    """Whether a parameter is an affine function of what was moved, to judge by it there and 1, −1 and 3 moves away."""
    moved, rounding = (up - down).abs(), torch.finfo(middle.dtype).eps
    tolerance = (1e-7 if middle.dtype == torch.float64 else 1e-3) * moved
    tolerance = tolerance + rounding * (100 * (middle.abs() + far.abs()) + 30 * moved.mean())
    back, beyond = (up + down - 2 * middle).abs(), (far - middle - 3 * (up - middle)).abs()
    return bool(((back <= tolerance) & (beyond <= 3 * tolerance)).all())


def others_move(before: Any, after: Any) -> bool:
    """Whether two runs differ in a site's other parameters, scale, mask or value."""

    def parts(site: Any) -> list[Any]:
        return [*_others_of(site["fn"]), site["scale"], site["mask"], site["value"]]

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        return a is b or a == b

    return not all(same(a, b) for a, b in zip(parts(before), parts(after)))


def _others_of(fn: Any) -> list[Any]:
    fn = bare(fn)
    return [getattr(fn, name) for name in fn.arg_constraints if name != _name_of(fn)]


def others_follow(fn: Any, values: list[Tensor]) -> bool:
    """Whether another parameter of a distribution moves with values, or may once parameters have moved: exp(bf) at
    b = 0.
    """
    return any(_enters(values, other) for other in _others_of(fn) if isinstance(other, Tensor))


def _enters(values: list[Tensor], result: Tensor) -> bool:
    """Whether a result moves with values, or may once parameters have moved: its slope is not 0 or is computed from
    some.
    """
    if not result.requires_grad:
        return False
    with torch.enable_grad():
        try:
            slopes = torch.autograd.grad(result.sum(), values, create_graph=True, allow_unused=True)
        except RuntimeError:  # of what can't be differentiated again, as training would
            return True
    return any(bool(slope.requires_grad or slope.any()) for slope in slopes if slope is not None)


def _is_computed_affinely(parameter: Tensor, change: Tensor, moves: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether autograd, too, has a parameter for an affine function: its slopes tell of all its change, which after
    ``.detach()`` they do not, and the values do not enter them, as they do those of f + bf², at b = 0 too.

    :param change: the parameter's, by moves.
    :param moves: values that the parameter was computed from, and how far they were moved.
    """
    values = [value for value, _ in moves]
    weights = torch.linspace(1, 2, change.numel(), dtype=change.dtype, device=change.device).reshape(change.shape)
    if not parameter.requires_grad:
        return not change.any()
    with torch.enable_grad():
        try:
            found = torch.autograd.grad((weights * parameter).sum(), values, create_graph=True, allow_unused=True)
        except RuntimeError:
            return False
        slopes = [(slope, move) for slope, (_, move) in zip(found, moves) if slope is not None]
    known = sum(((slope * move).sum() for slope, move in slopes), change.new_zeros(()))
    tolerance = 1e-6 if change.dtype == torch.float64 else 1e-2
    if (known - (weights * change).sum()).abs() > tolerance * (weights * change).abs().sum():
        return False
    return not any(_enters(values, slope) for slope, _ in slopes)


@torch.no_grad()
def are_normal_around_affine(
    names: Iterable[str],
    starts: Mapping[str, tuple[Tensor, Tensor]],
    held: Callable[[dict[str, Tensor]], poutine.Trace],
) -> bool:
    """Whether all these sites are observed and normal around an affine function of GP sites' values, A(f, g, …) + b.

    :param starts: values of each GP site, and how far they are moved.
    :param held: runs the program with GP sites at values, all else held at leaves of autograd's.
    """
    generator = torch.Generator().manual_seed(0)
    step, turned = {}, {}
    for gp, (f, spread) in starts.items():
        some = torch.where(spread > 0, spread, spread.amax().clamp(min=1e-6))
        uneven, sign = torch.rand((2, *f.shape), generator=generator, dtype=f.dtype).to(f.device)
        step[gp] = some * (0.5 + uneven)
        turned[gp] = _WIDE * step[gp] * (sign - 0.5).sign()
    state = RandomState(next(iter(step.values())))

    def at(size: float, along: dict[str, Tensor]) -> Any:
        return held({gp: f + size * along[gp] for gp, (f, _) in starts.items()}).nodes

    with torch.enable_grad():
        moving = {gp: (f + step[gp]).detach().requires_grad_() for gp, (f, _) in starts.items()}
        graph: Any = held(moving).nodes
    start, moved = at(0.0, step), [at(-1.0, step), at(3.0, step), *(at(size, turned) for size in (1.0, -1.0, 3.0))]
    if state.has_moved:  # of rows that the program draws, say, which others runs have not
        return False
    moves = [(moving[gp], step[gp]) for gp in starts]
    for name in names:
        sites = [start[name], graph[name], *(nodes[name] for nodes in moved)]
        if not is_observation(start[name]) or any(type(bare(site["fn"])) not in NORMAL for site in sites):
            return False
        follow = others_follow(graph[name]["fn"], list(moving.values()))
        if follow or any(others_move(start[name], site) for site in sites[1:]):
            return False
        middle, up, *rest = (parameter_of(site["fn"]) for site in sites)
        if not (is_affine(middle, up, *rest[:2]) and is_affine(middle, *rest[2:])):
            return False
        if not _is_computed_affinely(up, (up - middle).detach(), moves):
            return False
    return True
