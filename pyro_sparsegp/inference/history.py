"""The loss and some parameters of a guide, step by step."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Optional

import numpy as np
import torch

__all__ = ["Iterates"]


class Iterates:
    """The loss and the parameters of a guide, a value of each a step, on the host.

    :param guide: whose parameters are kept, in unconstrained space; ``None`` for the loss alone.
    :param parameters: names, or beginnings of names, of those to keep.
    :param largest: parameters with more values than this are left out.
    :param objective: the name of −loss: by default "log_z" of a guide for expectation propagation, whose loss is no
        bound, and "elbo" of others.
    """

    def __init__(
        self,
        guide: Any = None,
        parameters: Collection[str] = ("locs.", "scales."),
        largest: int = 64,
        objective: Optional[str] = None,
    ) -> None:
        self.guide, self.parameters, self.largest = guide, tuple(parameters), largest
        self.objective = objective or ("log_z" if getattr(guide, "by_expectation", False) else "elbo")
        self._losses: list[float] = []
        self._values: dict[str, list[np.ndarray]] = {}

    def record(self, loss: float) -> float:
        """Keep a step's loss and the parameters after it; returns the loss.

        :raises ValueError: where the loss is NaN or infinite, naming the step.
        """
        if not math.isfinite(float(loss)):
            raise ValueError(
                f"the loss is {float(loss)} at step {len(self)}: training has failed there. Look for NaN or infinite "
                "data, take a smaller learning rate, or work in float64."
            )
        self._losses.append(float(loss))
        if self.guide is not None:
            kept = {
                name.removesuffix("_unconstrained"): parameter.detach()
                for name, parameter in self.guide.named_parameters()
                if name.startswith(self.parameters) and parameter.numel() <= self.largest
            }
            for name, value in _on_host(kept).items():
                # A parameter is there from the first step on, or never.
                self._values.setdefault(name, []).append(value)
        return loss

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def losses(self) -> np.ndarray:
        """The loss of each step, ``(steps,)``."""
        return np.array(self._losses)

    def window(self, num: int) -> dict[str, np.ndarray]:
        """The last ``num`` iterates, ``(num, ...)`` each."""
        return {
            self.objective: -np.array(self._losses[-num:]),
            **{name: np.stack(values[-num:]) for name, values in self._values.items()},
        }

    def recent(self, num: int = 50) -> float:
        """The mean objective of the last steps, in nats."""
        return -math.fsum(self._losses[-num:]) / max(len(self._losses[-num:]), 1)

    def get_state(self) -> dict[str, Any]:
        """All iterates, as arrays."""
        return {"losses": self.losses, "values": {name: np.stack(values) for name, values in self._values.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the iterates of :meth:`get_state`."""
        self._losses = state["losses"].tolist()
        self._values = {name: list(values) for name, values in state["values"].items()}


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies of tensors as arrays; one read of the device for each dtype there is."""
    found: dict[str, np.ndarray] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        own = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        flat = torch.cat([tensor.reshape(-1) for tensor in own.values()]).cpu().numpy()
        edges = np.cumsum([tensor.numel() for tensor in own.values()])[:-1]
        for (name, tensor), part in zip(own.items(), np.split(flat, edges)):
            found[name] = part.reshape(tuple(tensor.shape))
    return found
