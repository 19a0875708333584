"""Reading log densities off a user's model with all upstream values held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyro import poutine
from torch import Tensor

__all__ = ["held_trace"]


def held_trace(model: Callable, values: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any]) -> poutine.Trace:
    """A run of the model with sites held at ``values``, unseen by other handlers.

    :param values: for every latent site, and for the plates' subsample sites, so that the run sees the rows that
        the values belong to.
    :returns: the trace, in which the held sites pass for observed; densities are to be had from its sites' ``fn``.
    """
    with poutine.block():
        return poutine.trace(poutine.condition(model, data=dict(values))).get_trace(*args, **kwargs)
