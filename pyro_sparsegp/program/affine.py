"""Parameters of distributions that are affine functions of GP sites' values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from .bare import bare
from .dependence import uneven
from .traces import RandomState, is_observation

__all__ = ["MOVES", "NORMAL", "are_normal_around_affine", "is_affine", "others_follow", "others_move", "parameter_of"]

# of which E log p is known, whatever the covariance of the location
NORMAL = (dist.Normal, dist.MultivariateNormal, dist.LowRankMultivariateNormal)
MOVES = (0.0, 1.0, -1.0, 30.0, -30.0)


def parameter_of(fn: Any) -> Tensor:
    """The parameter of which a distribution knows its expectation where it is normal: the location, or the one that
    it names.
    """
    fn = bare(fn)
    return getattr(fn, _name_of(fn))


def _name_of(fn: Any) -> str:
    return "loc" if isinstance(fn, (torch.distributions.Normal, *NORMAL)) else fn.normal_parameter


def is_affine(at: Mapping[float, Tensor]) -> bool:
    """Whether a parameter is an affine function of what was moved.

    :param at: it after so many moves, of :data:`MOVES`: of 30 deviations too, by which values that are cut off come to
        an end.
    """
    middle, one = at[0.0], at[1.0] - at[0.0]
    relative, eps = 1e-7 if middle.dtype == torch.float64 else 1e-3, torch.finfo(middle.dtype).eps
    for size, there in at.items():
        tolerance = abs(size) * relative * one.abs() + eps * (
            100 * (middle.abs() + there.abs()) + 30 * abs(size) * one.abs().mean()
        )
        if not ((there - middle - size * one).abs() <= tolerance).all():
            return False
    return True


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
    step = {}
    for gp, (f, spread) in starts.items():
        sign = (torch.rand(f.shape, generator=generator, dtype=f.dtype).to(f.device) - 0.5).sign()
        step[gp] = sign * uneven(f, spread, generator)
    state = RandomState(next(iter(step.values())))
    with torch.enable_grad():
        moving = {gp: (f + step[gp]).detach().requires_grad_() for gp, (f, _) in starts.items()}
        graph: Any = held(moving).nodes
    runs: dict[float, Any] = {
        size: graph if size == 1.0 else held({gp: f + size * step[gp] for gp, (f, _) in starts.items()}).nodes
        for size in MOVES
    }
    if state.has_moved:  # of rows that the program draws, say, which others runs have not
        return False
    moves = [(moving[gp], step[gp]) for gp in starts]
    for name in names:
        sites = {size: nodes[name] for size, nodes in runs.items()}
        if not is_observation(sites[0.0]) or any(type(bare(site["fn"])) not in NORMAL for site in sites.values()):
            return False
        follow = others_follow(graph[name]["fn"], list(moving.values()))
        if follow or any(others_move(sites[0.0], site) for site in sites.values()):
            return False
        parameters = {size: parameter_of(site["fn"]) for size, site in sites.items()}
        if not is_affine({size: parameter.detach() for size, parameter in parameters.items()}):
            return False
        if not _is_computed_affinely(parameters[1.0], (parameters[1.0] - parameters[0.0]).detach(), moves):
            return False
    return True
