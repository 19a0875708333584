"""Whether a bound's nodes are enough for the densities that it integrates."""

from __future__ import annotations

import math
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..guide import AutoSparseGP
from ..program.traces import repeatable
from ..warned import warn_once

_LOOKS = {4**k for k in range(2, 16)}  # steps after which it is asked
_LEAST = 0.03  # nats that are told of


class Doubt:
    """Tells once of a bound that other numbers of nodes change, by more than a tenth of what a step gains.

    No Gauss-Hermite rule converges for a density with a kink, as of a quantile's loss: its error is some hundredths of
    a nat, and natural steps may stand still where it is larger than their gain. One that is smooth but narrow beside an
    early q has such an error, too, which goes while the steps still gain much more.
    """

    def __init__(self) -> None:
        self.steps: WeakKeyDictionary[AutoSparseGP, tuple[int, float]] = WeakKeyDictionary()

    def note(self, guide: AutoSparseGP, value: float, num: int, bound: Callable[[int], Tensor]) -> None:
        """Note a step.

        :param value: the loss before it.
        :param num: of nodes.
        :param bound: the loss after it, at so many nodes.
        """
        steps, before = self.steps.get(guide, (0, math.inf))
        self.steps[guide] = steps + 1, value
        if steps + 1 not in _LOOKS:
            return
        found = []
        for nodes in range(num, num + 4):  # errors at kinks have any sign: one difference may be small
            with torch.no_grad(), repeatable(guide.like):
                found.append(float(bound(nodes)))
        error = max(found) - min(found)
        rounding = 1e3 * torch.finfo(guide.like.dtype).eps * abs(found[0])
        if error > max(_LEAST, rounding, 0.1 * abs(before - value)):
            warn_once(
                guide.warned,
                "too few nodes",
                "",
                f"the bound changes by {error:.2g} nats with the number of nodes, {num}: a density has a kink in "
                "function values, or is far narrower than their posterior. Give its distribution an "
                "expected_log_prob, or take more nodes, TraceQuadrature_ELBO(num_nodes=200).",
                stacklevel=4,
            )
