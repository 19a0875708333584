"""Reading log densities off a user's model with all upstream values held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

__all__ = ["fill_masked", "held_trace"]


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
