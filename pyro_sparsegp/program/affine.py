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

__all__ = ["NORMAL", "are_normal_around_affine", "is_affine", "others_move", "parameter_of"]

NORMAL = (dist.Normal, dist.MultivariateNormal)  # of which E log p is known, whatever the covariance of the location


def parameter_of(fn: Any) -> Tensor:
    """The parameter of which a distribution knows its expectation where it is normal: the location, or the one that
    it names.
    """
    fn = bare(fn)
    return getattr(fn, _name_of(fn))


def _name_of(fn: Any) -> str:
    return "loc" if isinstance(fn, (torch.distributions.Normal, dist.MultivariateNormal)) else fn.normal_parameter


def is_affine(middle: Tensor, up: Tensor, down: Tensor, far: Tensor) -> bool:
    """Whether a parameter is an affine function of what was moved, to judge by it there and 1, −1 and 3 moves away."""
    tolerance = (1e-7 if middle.dtype == torch.float64 else 1e-3) * (up - down).abs() + 100 * torch.finfo(
        middle.dtype
    ).eps * (middle.abs() + far.abs())
    back, beyond = (up + down - 2 * middle).abs(), (far - middle - 3 * (up - middle)).abs()
    return bool(((back <= tolerance) & (beyond <= 3 * tolerance)).all())


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
    runs: list[Any] = [
        held({gp: f + size * step[gp] for gp, (f, _) in starts.items()}).nodes for size in (0.0, 1.0, -1.0, 3.0)
    ]
    if state.has_moved:  # of rows that the program draws, say, which others runs have not
        return False
    for name in names:
        sites = [nodes[name] for nodes in runs]
        if not is_observation(sites[0]) or type(bare(sites[0]["fn"])) not in NORMAL:
            return False
        if others_move(*sites[:2]) or not is_affine(*(parameter_of(site["fn"]) for site in sites)):
            return False
    return True
