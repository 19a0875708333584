"""Distributions without what wraps them, ``.to_event``, ``.mask`` and ``.expand``; and what masks leave out of data."""

from __future__ import annotations

from typing import Any, Optional

import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..numerics.shapes import broadcast_shapes
from ..process import GaussianProcess

__all__ = [
    "as_process",
    "bare",
    "fill_masked",
    "sample_sites",
    "unmasked",
    "unmasked_rows",
    "without_event",
    "without_masks",
]

_WRAPPERS = (torch.distributions.Independent, MaskedDistribution, ExpandedDistribution)


def sample_sites(trace: poutine.Trace) -> dict[str, Any]:
    """A trace's sample sites by name, plates' row numbers not among them."""
    sites: dict[str, Any] = dict(trace.nodes)
    return {n: site for n, site in sites.items() if site["type"] == "sample" and not site_is_subsample(site)}


def as_process(prior: Any) -> tuple[Optional[GaussianProcess], int]:
    """The GP under ``.to_event`` and the number of dimensions this added, or ``None``."""
    prior, event_dim = without_event(prior)
    return (prior, event_dim) if isinstance(prior, GaussianProcess) else (None, 0)


def without_event(fn: Any) -> tuple[Any, int]:
    """The distribution under ``.to_event`` and the number of dimensions this added."""
    event_dim = 0
    while isinstance(fn, torch.distributions.Independent):
        event_dim += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, event_dim


def bare(fn: Any) -> Any:
    """The distribution under ``.to_event``, ``.mask`` and ``.expand``; without masks, where latents are summed out."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn.without_masks() if hasattr(fn, "without_masks") else fn


def without_masks(fn: Any) -> Any:
    """A distribution without ``.mask``, of the same shape."""
    if isinstance(fn, MaskedDistribution):
        return without_masks(fn.base_dist)
    if isinstance(fn, torch.distributions.Independent):
        return without_masks(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    return without_masks(fn.base_dist).expand(fn.batch_shape) if isinstance(fn, ExpandedDistribution) else fn


def unmasked(site: Any) -> Optional[Tensor]:
    """Which of an observed site's values no mask leaves out, in their shape; ``None`` if it has no mask.

    Masks are ``poutine.mask``'s, of whole rows, and those of the distribution under ``.to_event`` and ``.expand``, of
    single values; where discrete latents are summed out, of the distribution given these.
    """
    value, fn, seen = site["value"], site["fn"], None
    fn, mask = getattr(fn, "given_discrete", fn), site["mask"]
    while True:
        part = torch.zeros((), dtype=torch.bool, device=value.device) if mask is False else mask
        if isinstance(part, Tensor):  # True and None are none
            part = part.reshape(part.shape + (1,) * fn.event_dim)
            # A mask is that of all values of discrete latents, whose dimensions are in front.
            part = part[(0,) * max(part.dim() - value.dim(), 0)]
            seen = part if seen is None else seen & part
        if not isinstance(fn, _WRAPPERS):
            return None if seen is None else seen.expand(broadcast_shapes(seen.shape, value.shape))
        mask = fn._mask if isinstance(fn, MaskedDistribution) else None
        fn = fn.base_dist


def unmasked_rows(site: Any) -> Optional[Tensor]:
    """Which of an observed site's log densities have such a value, in their shape; ``None`` if it has no mask."""
    seen, event_dim = unmasked(site), site["fn"].event_dim
    return seen.flatten(-event_dim).any(-1) if seen is not None and event_dim else seen


def fill_masked(site: Any) -> None:
    """Put a value of an unmasked row where an observed site is masked and NaN.

    A mask makes such a term 0, but not its gradient, which is 0·NaN.
    """
    value = site["value"]
    if site["type"] != "sample" or not site["is_observed"] or not isinstance(value, Tensor):
        return
    seen = unmasked(site) if value.is_floating_point() and value.dim() else None
    if seen is not None:  # test_quadrature.py::TestMissing
        shape, num = seen.shape, seen.dim() - site["fn"].event_dim
        rows, seen = (part.expand(shape).reshape(-1, *shape[num:]) for part in (value, seen))
        # The row's number stays a tensor: nothing is read back from the device.
        # Single values of an event may be masked apart from one another, and have unmasked rows of their own.
        filler = rows.gather(0, seen.to(torch.uint8).argmax(0, keepdim=True)).nan_to_num()
        site["value"] = torch.where(~seen & rows.isnan(), filler, rows).reshape(shape)
