"""Natural steps that posteriors take alone, before a first gradient reaches any parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from ..gaussians.steps import steppers
from ..guide import AutoSparseGP
from ..numerics.processes import do_due, joined

__all__ = ["meet"]

_PASSES = 5  # at most
_SMALL = 0.02  # of all that they have gained: where the last one changes less, they are there


def meet(guide: AutoSparseGP, evaluate: Callable[[], tuple[Tensor, float]]) -> Optional[tuple[Tensor, float]]:
    """Bring posteriors that have taken no step to the data; a guide of which any learns by gradients is left alone.

    Under a q that has met no data, gradients of hyperparameters are hundreds of times those later, which Adam's second
    moments would remember for hundreds of steps. These passes do not count as steps: each has the rate of a first one,
    by default 1, as Newton's method has it, and so has the first that counts, by which q forgets all of them but where
    they led. They end at the optimum for these data, where the bound stands still, or at the fifth. By draws, of
    latents or of function values, it never does, and rates fall, so that steps average over them.

    :param guide: after its first call.
    :param evaluate: gives minus the bound, as a tensor and as a number.
    :returns: that of where they led, if it is known.
    """
    assert guide.structure is not None
    if not all(spec["family"].get("natural") for spec in guide.structure.gps.values()):
        return None
    modules = steppers(guide)
    for module in modules:
        module.settle()
    if any(module.steps_taken for module in modules):
        return None
    losses: list[float] = []
    by_draws = guide.has_random_latents
    for _ in range(_PASSES):
        found = loss, _ = evaluate()
        losses.append(float(joined(loss.detach())[0]))  # the same in all processes
        stands = len(losses) > 1 and abs(losses[-2] - losses[-1]) < _SMALL * abs(losses[0] - losses[-1])
        if (stands and not by_draws) or not loss.requires_grad:  # which it has not if a mask leaves all out
            return found
        torch.autograd.grad(loss, [module.unit for module in modules], allow_unused=True)
        by_draws = by_draws or any(module.hears_draws for module in modules)
        do_due()  # where several processes come by
        if not by_draws:
            for module in modules:
                module.restart()
    for module in modules:
        module.restart()
    return None
