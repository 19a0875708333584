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

__all__ = ["MOVES", "NORMAL", "are_normal_around_affine", "is_affine", "others_move", "parameter_of"]

MOVES = (0.0, 1.0, -1.0, 30.0, -30.0)
NORMAL = (dist.Normal, dist.MultivariateNormal)  # of which E log p is known, whatever the covariance of the location


def parameter_of(fn: Any) -> Tensor:
    """The parameter of which a distribution knows its expectation where it is normal: the location, or the one that
    it names.
    """
    fn = bare(fn)
    return getattr(fn, _name_of(fn))


def _name_of(fn: Any) -> str:
    return "loc" if isinstance(fn, (torch.distributions.Normal, dist.MultivariateNormal)) else fn.normal_parameter


def is_affine(at: Mapping[float, Tensor]) -> bool:
    """Whether a parameter is an affine function of what was moved.

    :param at: it after so many moves, of :data:`MOVES`: of 30 deviations too, by which values that are cut off come to
        an end.
    """
    middle, one = at[0.0], at[1.0] - at[0.0]
    relative, eps = 1e-7 if middle.dtype == torch.float64 else 1e-3, torch.finfo(middle.dtype).eps
    for size, there in at.items():
        tolerance = abs(size) * relative * one.abs() + 100 * eps * (middle.abs() + there.abs())
        if not ((there - middle - size * one).abs() <= tolerance).all():
            return False
    return True


def others_move(before: Any, after: Any) -> bool:
    """Whether two runs differ in a site's other parameters, scale, mask or value."""

    def parts(site: Any) -> list[Any]:
        fn = bare(site["fn"])
        names = [name for name in fn.arg_constraints if name != _name_of(fn)]
        return [*(getattr(fn, name) for name in names), site["scale"], site["mask"], site["value"]]

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        return a is b or a == b

    return not all(same(a, b) for a, b in zip(parts(before), parts(after)))


def are_normal_around_affine(
    names: Iterable[str],
    starts: Mapping[str, tuple[Tensor, Tensor]],
    held: Callable[[dict[str, Tensor]], poutine.Trace],
) -> bool:
    """Whether all these sites are observed and normal around an affine function of GP sites' values, A(f, g, …) + b.

    :param starts: values of each GP site, and how far they are moved.
    :param held: runs the program with GP sites at values, all else held.
    """
    generator = torch.Generator().manual_seed(0)
    step = {}
    for gp, (f, spread) in starts.items():
        some = torch.where(spread > 0, spread, spread.amax().clamp(min=1e-6))
        step[gp] = some * (0.5 + torch.rand(f.shape, generator=generator, dtype=f.dtype).to(f.device))
    state = RandomState(next(iter(step.values())))
    runs: dict[float, Any] = {
        size: held({gp: f + size * step[gp] for gp, (f, _) in starts.items()}).nodes for size in MOVES
    }
    if state.has_moved:  # of rows that the program draws, say, which others runs have not
        return False
    for name in names:
        sites = {size: nodes[name] for size, nodes in runs.items()}
        if not is_observation(sites[0.0]) or type(bare(sites[0.0]["fn"])) not in NORMAL:
            return False
        if any(others_move(sites[0.0], site) for site in sites.values()):
            return False
        if not is_affine({size: parameter_of(site["fn"]) for size, site in sites.items()}):
            return False
    return True
