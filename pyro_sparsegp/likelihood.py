"""Reading log densities off a user's model with all upstream values held."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Optional

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

__all__ = [
    "bare",
    "derivatives",
    "element_log_densities",
    "expected_derivatives",
    "fill_masked",
    "held_trace",
    "is_quadratic",
    "log_densities",
    "normal_nodes",
    "without_event",
]


def held_trace(model: Callable, values: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any]) -> poutine.Trace:
    """A run of the model with sites held at ``values``, unseen by other handlers.

    :param values: for every latent site, and for the plates' subsample sites, so that the run sees the rows that
        the values belong to.
    :returns: the trace, in which the held sites pass for observed; densities are to be had from its sites' ``fn``.
    """
    with poutine.block():
        trace = poutine.trace(poutine.condition(model, data=dict(values))).get_trace(*args, **kwargs)
    for site in trace.nodes.values():
        fill_masked(site)
    return trace


def fill_masked(site: Any) -> None:
    """Put a value of an unmasked row where an observed site is masked and NaN.

    Pyro's mask makes such a term 0, but not its gradient, which is 0·NaN.
    """
    if site["type"] != "sample" or not site["is_observed"] or not isinstance(site["mask"], Tensor):
        return
    value, mask = site["value"], site["mask"]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return
    event_dim = site["fn"].event_dim
    batch_shape = torch.broadcast_shapes(value.shape[: value.dim() - event_dim], mask.shape)
    mask = mask.expand(batch_shape)
    rows = value.expand(*batch_shape, *value.shape[value.dim() - event_dim :])
    # The row's number stays a tensor: nothing is read back from the device.
    first = mask.flatten().to(torch.uint8).argmax().reshape(1)
    filler = rows.flatten(0, len(batch_shape) - 1).index_select(0, first)[0] if batch_shape else rows
    missing = ~mask.reshape(*batch_shape, *[1] * event_dim) & value.isnan()
    site["value"] = torch.where(missing, filler.nan_to_num(), rows)


def without_event(fn: Any) -> tuple[Any, int]:
    """The distribution under ``.to_event`` and the number of dimensions this added."""
    event_dim = 0
    while isinstance(fn, torch.distributions.Independent):
        event_dim += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, event_dim


def bare(fn: Any) -> Any:
    """The distribution under ``.to_event`` and ``.mask``."""
    while isinstance(fn, (torch.distributions.Independent, MaskedDistribution)):
        fn = fn.base_dist
    return fn


Total = Callable[[dict[str, Tensor]], Tensor]


def log_densities(trace: poutine.Trace, skip: Collection[str] = ()) -> dict[str, Tensor]:
    """The log densities of a run's sample sites but ``skip``, one for each value, masked and scaled."""
    sites: Any = trace.nodes
    return {
        name: torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]))
        for name, site in sites.items()
        if site["type"] == "sample" and name not in skip and not site_is_subsample(site)
    }


def element_log_densities(trace: poutine.Trace, skip: Collection[str] = ()) -> dict[str, Tensor]:
    """As :func:`log_densities`, with dimensions that ``.to_event`` has added up taken apart again."""
    sites: Any = trace.nodes
    found = {}
    for name, site in sites.items():
        if site["type"] != "sample" or name in skip or site_is_subsample(site):
            continue
        fn, event_dim = without_event(site["fn"])
        scale, mask = (
            part.reshape(*part.shape, *[1] * event_dim) if isinstance(part, Tensor) and part.dim() else part
            for part in (site["scale"], site["mask"])
        )
        found[name] = torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), scale, mask))
    return found


def derivatives(total: Callable[[Tensor], Tensor], f: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivatives by each value of a sum of terms with one input's values each.

    :param total: f, ``(..., N)``, to a scalar.
    :returns: both ``(..., N)``.
    """
    gradient = torch.func.grad(total)
    if f.dim() == 1:
        second, first = torch.func.grad(_summed(gradient), has_aux=True)(f)
        return first, second
    # Outputs may meet in a term: a pass for each keeps the diagonal.
    seconds = []
    for output in torch.eye(f[..., 0].numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape[:-1], 1):
        second, first = torch.func.grad(_summed(gradient, output), has_aux=True)(f)
        seconds.append(second * output)
    return first, torch.stack(seconds).sum(0)


def is_quadratic(total: Callable[[Tensor], Tensor], f: Tensor, spread: Tensor) -> bool:
    """Whether a sum of terms with one input's values each is quadratic in f, with curvature wherever it has slope.

    A piecewise constant one, which has neither anywhere, is not.
    """
    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-6 if f.dtype == torch.float64 else 1e-3
    with pyro.validation_enabled(False):
        slope, curvature = derivatives(total, f)
        size = curvature.abs() + 1e-6 * curvature.abs().mean()
        if ((slope != 0) & (curvature >= 0)).any() or not (slope.any() or curvature.any()):
            return False
        for _ in range(3):  # in directions of their own for all values: outputs may meet in a term
            step = spread * torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
            slope_there, curvature_there = derivatives(total, f + step)
            expected = slope + curvature * step
            if ((curvature_there - curvature).abs() > tolerance * size).any():
                return False
            if f.dim() == 1 and ((slope_there - expected).abs() > tolerance * (slope.abs() + size * step.abs())).any():
                return False
    return True


def _summed(gradient: Callable[[Tensor], Tensor], weight: Any = 1.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def total(f: Tensor) -> tuple[Tensor, Tensor]:
        first = gradient(f)
        return (weight * first).sum(), first

    return total


def expected_derivatives(
    total: Total, values: Mapping[str, Tensor], name: str, weights: Tensor, scores: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """E[ℓ'] and E[ℓ''] by the values of GP site ``name`` over K joint nodes of several GP sites.

    :param total: values of GP sites, ``(..., N)`` each, to the sum of the log densities.
    :param values: the nodes, ``(K, ..., N)`` each.
    :param weights: ``(K,)``.
    :param scores: (f − m)/v at the nodes, ``(K, ..., N)``: then E[ℓ''] is E[ℓ'(f − m)]/v (Stein, 1981), the gradient
        of the quadrature itself, which sees kinks of ℓ and needs no second derivative.
    """

    def at(node: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        def moved(f: Tensor) -> Tensor:
            return total({**node, name: f})

        if scores is None:
            return derivatives(moved, node[name])
        first = torch.func.grad(moved)(node[name])
        return first, first

    def looped() -> tuple[Tensor, Tensor]:
        pairs = [at({key: value[k] for key, value in values.items()}) for k in range(len(weights))]
        return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])

    if len(weights) == 1:
        first, second = looped()
    else:
        try:
            first, second = torch.func.vmap(at, randomness="same")(dict(values))
        except (RuntimeError, TypeError):  # a program that vmap refuses
            first, second = looped()
    shaped = weights.reshape(-1, *[1] * (first.dim() - 1))
    if scores is not None:
        second = second * scores
    return (shaped * first).sum(0), (shaped * second).sum(0)


def normal_nodes(num_axes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Standard normal nodes, ``(K, A)``, and weights, ``(K,)``: a Gauss-Hermite grid for one or two axes, scrambled
    Sobol points in plus-minus pairs beyond.
    """
    if num_axes == 0:
        return like.new_zeros(1, 0), like.new_ones(1)
    if num_axes <= 2:
        nodes, weights = np.polynomial.hermite_e.hermegauss(20 if num_axes == 1 else 10)
        grid = torch.cartesian_prod(*[torch.from_numpy(nodes)] * num_axes).reshape(-1, num_axes)
        product = torch.cartesian_prod(*[torch.from_numpy(weights / weights.sum())] * num_axes)
        return grid.to(like), product.reshape(-1, num_axes).prod(-1).to(like)
    uniform = torch.quasirandom.SobolEngine(num_axes, scramble=True, seed=0).draw(64, dtype=torch.float64)
    half = math.sqrt(2) * torch.erfinv(2 * uniform.clamp(1e-6, 1 - 1e-6) - 1)
    points = torch.cat([half, -half])
    return points.to(like), like.new_full((len(points),), 1 / len(points))
