"""Parameters of distributions that are affine functions of GP sites' values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .bare import bare

__all__ = ["is_affine", "others_move", "parameter_of"]


def parameter_of(fn: Any) -> Tensor:
    """The parameter of which a distribution knows its expectation where it is normal: the location, or the one that
    it names.
    """
    fn = bare(fn)
    return getattr(fn, _name_of(fn))


def _name_of(fn: Any) -> str:
    return "loc" if isinstance(fn, torch.distributions.Normal) else fn.normal_parameter


def is_affine(middle: Tensor, along: Callable[[float], Tensor]) -> bool:
    """Whether a parameter is an affine function of what was moved.

    :param middle: it before.
    :param along: it after so many times one move.
    """
    up, down, far = (along(size) for size in (1.0, -1.0, 3.0))
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
