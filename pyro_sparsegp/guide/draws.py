"""What draws from a guide are made of."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..numerics.functions import setting
from ..program import handlers, traces
from ..program.draws import all_draws
from .known import KnownGuide
from .points import PLACE
from .runs import Priors


@contextmanager
def of_draw(item: Mapping[Any, Tensor]) -> Iterator[None]:
    """A run is of the draw that is made of this item, one of :func:`items_of_draws`."""
    with setting(PLACE, item[""]), handlers.Held(item):
        yield


def items_of_draws(guide: KnownGuide, num: int) -> dict[Any, Tensor]:
    """What draws are made of: their numbers, or places among the points of hyperparameters, one in each stratum;
    and, to be held in them, the latents under which sites are read, if these are all that decides how sites are read.
    """
    core, data = guide.core, guide.core.data
    each = {"": torch.arange(num) if core.points is None else (torch.randperm(num) + torch.rand(num)) / num}
    are_all = guide.kind.is_of_rows and guide.has_random_latents and not core.facts.local_latents
    if data is None or core.points or not are_all:
        return each

    def one(_: object) -> dict[Any, Tensor]:
        with handlers.unrecorded(same=True, learns=False), traces.whole_plates():
            run = Priors(guide).perform(data.args, data.kwargs)
        return {name: run.values[name] for name in core.facts.latents if name in run.values}

    drawn = all_draws(one, each, lambda draw: sum(map(torch.numel, draw.values())))
    guide.trace = poutine.Trace()  # a mapped run's tensors cannot be copied
    return each | drawn
