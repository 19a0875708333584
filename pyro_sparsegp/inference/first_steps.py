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
_SMALL = 0.02  # of all that they have gained: what the last one does not bring is no step's worth


def meet(guide: AutoSparseGP, evaluate: Callable[[], tuple[Tensor, float]]) -> Optional[tuple[Tensor, float]]:
    """Bring posteriors that have taken no step to the data; a guide of which any learns by gradients is left alone.

    Under a q that has met no data, gradients of hyperparameters are hundreds of times those later, which Adam's second
    moments would remember for hundreds of steps. These passes do not count as steps: each has the rate of a first one,
    by default 1, as Newton's method has it, and so has the first that counts, by which q forgets all of them but where
    they led. They end at the optimum for these data, where the bound rises no more, or at the fifth.

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
    for _ in range(_PASSES):
        found = loss, _ = evaluate()
        losses.append(float(joined(loss.detach())[0]))  # the same in all processes
        rises = len(losses) == 1 or losses[-2] - losses[-1] >= _SMALL * (losses[0] - losses[-1])
        if not (rises and loss.requires_grad):  # which it has not if a mask leaves all out
            return found
        torch.autograd.grad(loss, [module.unit for module in modules], allow_unused=True)
        do_due()  # where several processes come by
        for module in modules:
            module.restart()
    return None
