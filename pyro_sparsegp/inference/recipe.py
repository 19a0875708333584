"""The optimiser of a fit that was given none: Adam, with rates that fall to the end."""

from __future__ import annotations

import math
import re
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor

__all__ = ["FallingAdam", "falling"]

# Steps over which rates rise, while Adam's second moments are of few gradients.
_WARM = 3
# Share of the steps in which rates stay.
_HELD = 0.4
# Share of a rate at the end.
_LAST = 0.01
# Inducing inputs of a set from which on each takes smaller steps.
_POINTS = 256
# Share of the rate that a network's biases and other vectors take.
_NETWORK = 0.2
_INPUTS = re.compile(r"\.gps\..*\.basis\.(.*\.)?inputs_\d+$")


def falling(step: int, steps: int) -> float:
    """The share of its rate that a step takes: 1 over the first part, then by a cosine to a hundredth.

    >>> [round(falling(step, 1000), 3) for step in (0, 400, 700, 999)]
    [1.0, 1.0, 0.505, 0.01]
    """
    past = (step / max(steps, 1) - _HELD) / (1 - _HELD)
    return _LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * min(max(past, 0.0), 1.0)))


class FallingAdam(PyroOptim):
    """Adam (Kingma and Ba, 2015) whose rates stay for the first part of the steps and fall by a cosine to a hundredth.

    Noise of mini-batches moves parameters in proportion to the rate: a fit whose rate stays ends up beside the
    optimum, one whose rate falls at it (Robbins and Monro, 1951; the cosine is of Loshchilov and Hutter, 2017).

    :param lr: of all parameters, before it falls; of the M inducing inputs of a set √(256/M) of it, if there are more
        than 256. Adam's steps of each are as long as the rate whatever its gradient says, which is mostly noise of the
        batch where there are many: the features of a row are moved by the sum. A network's unit is moved by the sum
        of the steps of its n weights, which start at some 1/√n: they take 1/√n of the rate, its vectors a fifth.
    """

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(torch.optim.Adam, {"lr": lr, "betas": (0.9, 0.99)})
        self._factor = 1.0

    def at(self, step: int, steps: int) -> None:
        """Set the rates of the step with this number, of so many."""
        self._factor = min(1.0, (step + 1) / _WARM) * falling(step, steps)
        for optimiser in self.optim_objs.values():
            for group in optimiser.param_groups:
                group["lr"] = self._factor * group["initial_lr"]

    def _get_optim(self, param: Any) -> Any:
        optimiser, part = super()._get_optim(param), _of_rate(param)
        for group in optimiser.param_groups:
            # One kernel for the whole update: half the time of a parameter's step.
            group["fused"] = param.device.type in ("cpu", "cuda")
            group["initial_lr"] = part * group["lr"]
            group["lr"] = self._factor * group["initial_lr"]
        return optimiser


def _of_rate(param: Tensor) -> float:
    """The share of the rate that a parameter takes."""
    name = pyro.get_param_store().param_name(param) or ""
    if _INPUTS.search(name):
        return math.sqrt(_POINTS / max(param.shape[-2], _POINTS))
    # A number beside a network is a hyperparameter.
    if param.dim() and _is_of_network(name):
        return param[0].numel() ** -0.5 if param.dim() > 1 else _NETWORK
    return 1.0


def _is_of_network(name: str) -> bool:
    """Whether a parameter is of a module registered by :func:`pyro.module` that has weights in matrices."""
    module, registered, _ = name.partition("$$$")
    named = pyro.get_param_store().named_parameters() if registered else ()
    return any(key.startswith(module + registered) and p.dim() > 1 and len(p) > 1 for key, p in named)
