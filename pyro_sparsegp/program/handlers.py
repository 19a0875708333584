"""Handlers of a program's run that hold its values, hide it, or look at it ahead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.mask_messenger import MaskMessenger
from pyro.poutine.messenger import Messenger, block_messengers
from pyro.poutine.scale_messenger import ScaleMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor

from ..posterior.base import Marginals
from .traces import all_sites, as_process, is_observation, repeatable, without_event

__all__ = ["AtMeans", "Held", "is_blocked", "observes", "stand_in", "unrecorded"]


class Held(Messenger):
    """Holds sites of a guide's run at values drawn before.

    :param draws: of GP sites, the posteriors that were drawn from: they know the draw's coefficients.
    """

    def __init__(self, values: Mapping[str, Tensor], draws: Mapping[str, Marginals] = {}) -> None:
        super().__init__()
        self.values, self.draws = values, draws

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if msg["is_observed"] or name not in self.values:
            return
        msg["value"] = self.values[name]
        posterior, _ = without_event(msg["fn"])
        # Layers above ask for other values of the same function: its coefficients are those of the draw.
        if name in self.draws and isinstance(posterior, Marginals):
            posterior.repeat(self.draws[name])


class AtMeans(Messenger):
    """Holds GP sites at their prior means."""

    def _pyro_sample(self, msg: Any) -> None:
        fn, _ = as_process(msg["fn"])
        if fn is not None and not msg["is_observed"]:
            msg["value"], msg["done"] = fn.mean, True


def unrecorded(same: bool, learns: bool) -> Any:
    """Hide a run from the traces around it. Handlers that change its sites stay in force, but scales and masks where
    the data are not those that the call is about, and for the mask that leaves all out, by which Pyro's prediction says
    that it wants no densities.

    :param same: whether the run is of the call's data.
    :param learns: whether the call is a step of training.
    """
    kinds = (TraceMessenger,) if same or learns else (TraceMessenger, MaskMessenger, ScaleMessenger)
    unwanted = () if learns else (MaskMessenger,)
    return block_messengers(lambda m: isinstance(m, kinds) or (isinstance(m, unwanted) and m.mask is False))


def is_blocked(model: Callable) -> bool:
    """Whether a model was given under ``poutine.block``, which hides sites of it."""
    # Pyro's handlers wrap a model as partial(call, handler, model).
    wrapped = getattr(model, "func", None)
    while isinstance(wrapped, partial) and len(wrapped.args) > 1:
        handler, model = wrapped.args[:2]
        if isinstance(handler, BlockMessenger):
            return True
        wrapped = getattr(model, "func", None)
    return False


def stand_in(fn: Any) -> Tensor:
    """A value of a distribution where none is asked for: not a draw, which transforms such as ``torch.func.hessian``
    refuse, if there is another.
    """
    try:
        value = fn.enumerate_support(expand=False)[0] if fn.has_enumerate_support else fn.mean
    except (NotImplementedError, AttributeError):
        return fn.sample()
    return value.detach().expand(fn.shape())


def observes(
    model: Callable, rows: Optional[Collection[str]], like: Tensor, args: tuple, kwargs: dict[str, Any]
) -> bool:
    """Whether a run of the model with these arguments observes data: it is run ahead, its GP sites at their means.

    :param rows: the sites that may hold them; ``None`` is all.
    """
    with poutine.block(), pyro.validation_enabled(False), torch.no_grad(), repeatable(like), AtMeans():
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return any((rows is None or name in rows) and is_observation(site) for name, site in all_sites(trace))
