"""What of an observed site's data masks leave out: ``poutine.mask``'s, and a distribution's own."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .bare import masks_of
from .summed_out import SummedOut

__all__ = ["unmasked", "unmasked_rows"]


def unmasked(site: Any) -> Optional[Tensor]:
    """Which of an observed site's values no mask leaves out, in the shape of its values; ``None`` if it has no mask."""
    fn, found = site["fn"], None
    shape = fn.shape()
    if isinstance(fn, SummedOut):
        fn = fn.fn
    for mask, event_dim in masks_of(fn, site["mask"]):
        part = torch.zeros((), dtype=torch.bool, device=site["value"].device) if mask is False else mask
        if isinstance(part, Tensor):  # True is none
            part = part.reshape(part.shape + (1,) * event_dim)
            # A mask is that of all values of discrete latents, whose dimensions are in front.
            part = part[(0,) * max(part.dim() - len(shape), 0)].expand(shape)
            found = part if found is None else found & part
    return found


def unmasked_rows(site: Any) -> Optional[Tensor]:
    """Which of an observed site's log densities have such a value, in their shape; ``None`` if it has no mask."""
    found, event_dim = unmasked(site), site["fn"].event_dim
    return found.flatten(-event_dim).any(-1) if found is not None and event_dim else found
