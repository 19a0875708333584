"""Natural steps that posteriors take alone, before a first gradient reaches any parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from ..gaussians.steps import StepsOnBackward, steppers
from ..guide import AutoSparseGP
from ..numerics.processes import do_due, joined

__all__ = ["meet", "skip"]

_PASSES = 5  # at most
_STANDS = 1e-3  # of all that they have gained: where the last one changes less, they are there


Loss = tuple[Tensor, float]


def meet(guide: AutoSparseGP, evaluate: Callable[[], Loss]) -> tuple[bool, Optional[Loss]]:
    """Bring posteriors that have taken no step to the data; a guide of which any learns by gradients is left alone.

    Under a q that has met no data, gradients of hyperparameters are hundreds of times those later, which Adam's second
    moments would remember for hundreds of steps. These passes do not count as steps: where the first that does has a
    rate of 1, as by default, q forgets all of them but where they led. Under a Gaussian likelihood one leads to the
    optimum for these data, where the bound stands still, and they end. A batch of which a mask leaves all out has
    nothing to be met: a later one is.

    :param guide: after its first call.
    :param evaluate: gives minus the bound, as a tensor and as a number.
    :returns: whether that is done; minus the bound where the passes led, if it is known.
    """
    assert guide.structure is not None
    if not all(spec["family"].get("natural") for spec in guide.structure.gps.values()):
        return True, None
    modules = steppers(guide)
    for module in modules:
        module.settle()
    if any(module.steps_taken for module in modules):
        return True, None
    losses: list[float] = []
    found, met = None, False
    for _ in range(_PASSES):
        found = loss, _ = evaluate()
        losses.append(float(joined(loss.detach())[0]))  # the same in all processes
        stands = len(losses) > 1 and abs(losses[-2] - losses[-1]) < _STANDS * abs(losses[0] - losses[-1])
        if stands or not loss.requires_grad:  # which it has not if a mask leaves all out
            break
        torch.autograd.grad(loss, [module.unit for module in modules], allow_unused=True)
        found = None
        met = met or _moves(modules, loss)
        if not met:
            skip(guide)
            break
        do_due()  # where several processes come by
    for module in modules:
        module.restart()
    return met, found


def skip(guide: AutoSparseGP) -> None:
    """Leave posteriors as they are, whatever a backward pass has brought."""
    for module in steppers(guide):
        module.noted()


def _moves(modules: list[StepsOnBackward], loss: Tensor) -> bool:
    """Whether the loss of any process, which has been differentiated, depends on function values."""
    pulls = [grad.abs().amax() for module in modules for grad in module.pulls()]
    most = torch.stack(pulls).amax() if pulls else torch.zeros_like(loss.detach())
    return bool(joined(most)[0] != 0)  # NaN is a pull
