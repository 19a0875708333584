"""Natural steps that posteriors take alone, before a first gradient reaches any parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..gaussians.steps import steppers
from ..guide import AutoSparseGP
from ..numerics.processes import do_due

__all__ = ["meet"]

_PASSES = 5


def meet(guide: AutoSparseGP, loss: Callable[[], Tensor]) -> None:
    """Bring posteriors that have taken no step to the data; a guide of which any learns by gradients is left alone.

    Under a q that has met no data, gradients of hyperparameters are hundreds of times those later, which Adam's second
    moments would remember for hundreds of steps. These passes do not count as steps: where the first that does has a
    rate of 1, as by default, q forgets all of them but where they led.

    :param guide: after its first call.
    :param loss: minus the bound, evaluated anew.
    """
    assert guide.structure is not None
    if not all(spec["family"].get("natural") for spec in guide.structure.gps.values()):
        return
    modules = steppers(guide)
    for module in modules:
        module.settle()
    if any(module.steps_taken for module in modules):
        return
    for _ in range(_PASSES):
        value = loss()
        if not value.requires_grad:  # a mask leaves all out
            return
        torch.autograd.grad(value, [module.unit for module in modules], allow_unused=True)
        do_due()  # where several processes come by
    for module in modules:
        module.restart()
