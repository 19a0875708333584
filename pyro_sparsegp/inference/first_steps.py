"""Natural steps that posteriors take alone, before a first gradient reaches any parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from ..gaussians.record import Record
from ..gaussians.steps import steppers
from ..guide import AutoSparseGP
from ..numerics.processes import joined

_PASSES = 5  # at most
_STANDS = 1e-3  # of all that they have gained: where the last one changes less, they are there

Evaluation = tuple[Tensor, float, Record]


def meet(guide: AutoSparseGP, evaluate: Callable[[], Evaluation]) -> tuple[bool, Optional[Evaluation]]:
    """Bring posteriors that have taken no step to the data; a guide of which any learns by gradients is left alone.

    Under a q that has met no data, gradients of hyperparameters are hundreds of times those later, which Adam's second
    moments would remember for hundreds of steps. These passes do not count as steps: where the first that does has a
    rate of 1, as by default, q forgets all of them but where they led. Under a Gaussian likelihood one leads to the
    optimum for these data, where the bound stands still, and they end. A batch of which a mask leaves all out has
    nothing to be met: a later one is.

    :param guide: after its first call.
    :param evaluate: gives minus the bound, as a tensor and as a number, and the record of its evaluation.
    :returns: whether that is done; what was evaluated where the passes led, if that is known.
    """
    modules = steppers(guide)
    natural = all(spec["family"].get("natural") for spec in guide.facts.gps.values())
    if not natural or any(module.steps for module in modules):
        return True, None
    losses: list[float] = []
    found, met = None, False
    for _ in range(_PASSES):
        found = loss, _, record = evaluate()
        losses.append(float(joined(loss.detach())[0]))  # the same in all processes
        stands = len(losses) > 1 and abs(losses[-2] - losses[-1]) < _STANDS * abs(losses[0] - losses[-1])
        if stands or not loss.requires_grad:  # which it has not if a mask leaves all out
            break
        record.differentiate(loss)
        found = None
        met = met or _moves(record, loss)
        if not met:
            break
        record.step(guide.row_share)
    for module in modules:
        module.steps = 0
    return met, found


def _moves(record: Record, loss: Tensor) -> bool:
    """Whether the loss of any process, which has been differentiated, depends on function values."""
    most = record.largest
    return bool(joined(torch.zeros_like(loss.detach()) if most is None else most)[0] != 0)  # NaN is a pull
