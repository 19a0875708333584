"""Distributions without what wraps them: ``.to_event``, ``.mask`` and ``.expand``."""

from __future__ import annotations

from typing import Any, Optional

import torch
from pyro.distributions import MaskedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..numerics.shapes import broadcast_shapes
from ..process import GaussianProcess

__all__ = ["as_process", "bare", "fill_masked", "masks_of", "without_event"]

_WRAPPERS = (torch.distributions.Independent, MaskedDistribution, ExpandedDistribution)


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
    """The distribution under ``.to_event``, ``.mask`` and ``.expand``."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


def masks_of(fn: Any, mask: Any) -> list[tuple[Any, int]]:
    """A site's masks, each with the number of dimensions of the single values that it is of: that of its handlers,
    ``None`` too, and those of the distribution under ``.to_event`` and ``.expand``.
    """
    found = [(mask, fn.event_dim)]
    while isinstance(fn, _WRAPPERS):
        mask = fn._mask if isinstance(fn, MaskedDistribution) else None
        fn = fn.base_dist
        found.append((mask, fn.event_dim))
    return found


def fill_masked(site: Any) -> None:
    """Put a value of an unmasked row where an observed site is masked and NaN.

    A mask makes such a term 0, but not its gradient, which is 0·NaN. It may be ``poutine.mask``'s, of whole rows, or
    ``.mask``'s under ``.to_event``, of single values.
    """
    if site["type"] != "sample" or not site["is_observed"] or site_is_subsample(site):
        return
    if not isinstance(site["value"], Tensor) or not site["value"].is_floating_point():
        return
    for mask, event_dim in masks_of(site["fn"], site["mask"]):
        if isinstance(mask, Tensor):
            site["value"] = _filled(site["value"], mask, event_dim)


def _filled(value: Tensor, mask: Tensor, event_dim: int) -> Tensor:
    batch_shape = broadcast_shapes(value.shape[: value.dim() - event_dim], mask.shape)
    mask = mask.expand(batch_shape)
    rows = value.expand((*batch_shape, *value.shape[value.dim() - event_dim :]))
    # The row's number stays a tensor: nothing is read back from the device.
    first = mask.flatten().to(torch.uint8).argmax().reshape(1)
    filler = rows.flatten(0, len(batch_shape) - 1).index_select(0, first)[0] if batch_shape else rows
    missing = ~mask.reshape((*batch_shape, *[1] * event_dim)) & value.isnan()
    return torch.where(missing, filler.nan_to_num(), rows)
