"""What draws from a guide are made of."""

from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..program import handlers, traces
from ..program.draws import all_draws
from .known import KnownGuide
from .runs import Priors


def items_of_draws(guide: KnownGuide, num: int) -> dict[Any, Tensor]:
    """What draws are made of: their numbers, and, to be held in them, the latents under which sites are read, if these
    are all that decides how sites are read.
    """
    core, data, each = guide.core, guide.core.data, {"": torch.arange(num)}
    are_more = core.facts.local_latents or core.points
    if data is None or are_more or not (guide.q.is_of_rows and guide.has_random_latents):
        return each

    def one(_: object) -> dict[Any, Tensor]:
        with handlers.unrecorded(same=True, learns=False), traces.whole_plates():
            run = Priors(guide).perform(data.args, data.kwargs)
        return {name: run.values[name] for name in core.facts.latents if name in run.values}

    drawn = all_draws(one, each, lambda draw: sum(map(torch.numel, draw.values())))
    guide.trace = poutine.Trace()  # a mapped run's tensors cannot be copied
    return each | drawn
