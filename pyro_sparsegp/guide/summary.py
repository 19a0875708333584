"""A table of what latents are."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Optional, Self

import torch
from torch import Tensor

from .points import Points

_MOST = 100  # rows that are printed


@dataclass(frozen=True, repr=False)
class Summary:
    """Moments and a 90 % interval of numbers, ``(n,)``, by their names."""

    names: tuple[str, ...]
    mean: Tensor
    sd: Tensor
    low: Tensor  # the 5 % quantile
    high: Tensor  # the 95 % quantile
    points: Optional[Points] = None  # which draws are from

    @classmethod
    def of(cls, draws: Mapping[str, Tensor], points: Optional[Points] = None) -> Self:
        """The summary of draws, ``(S, ...)``, by name."""
        names = [
            name + (f"[{', '.join(map(str, place))}]" if place else "")
            for name, value in draws.items()
            for place in product(*map(range, value.shape[1:]))
        ]
        if not draws:
            return cls((), *(torch.zeros(0),) * 4, points)
        values = torch.cat([value.reshape(len(value), -1) for value in draws.values()], 1)
        low, high = values.quantile(values.new_tensor([0.05, 0.95]), 0)
        mean = values.mean(0)
        sd = ((values - mean).square().sum(0) / (len(values) - 1)).sqrt()  # of one draw NaN, without torch's warning
        return cls(tuple(names), mean, sd, low, high, points)

    def __repr__(self) -> str:
        width = max(map(len, self.names), default=0)
        rows = zip(self.names, self.mean.tolist(), self.sd.tolist(), self.low.tolist(), self.high.tolist())
        lines = [" " * width + "".join(f"{head:>10}" for head in ("mean", "sd", "5%", "95%"))]
        lines += [f"{name:{width}}" + "".join(f"{number:10.3g}" for number in row) for name, *row in list(rows)[:_MOST]]
        if len(self.names) > _MOST:
            lines.append(f"... {len(self.names) - _MOST} more")
        if self.points is not None:
            lines.append(f"weighted points of hyperparameters, effective size {self.points.effective_size:.0f}")
        return "\n".join(lines)
