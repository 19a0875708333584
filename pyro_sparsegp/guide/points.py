"""q(θ) as weighted points, each with its own q(x | θ), instead of one normal: hyperparameters may be skewed."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

import torch
from torch import Tensor

from ..gaussians.arrow import ArrowFactor
from ..gaussians.factors import DenseFactor
from ..gaussians.product import JointPosterior, Product, numbered
from ..numerics.arrow import Arrow

PLACE: ContextVar[Optional[Tensor]] = ContextVar("where among the weights, of sum 1, a draw's point is", default=None)


def worth(weights: Tensor) -> float:
    """1/Σw²: how many draws of one weight tell as much."""
    return float(1 / weights.square().sum())


class Point:
    """One of the points, in a run: θ, ``(D,)``, and q(x | θ) of all that is normal a priori, ``whole``."""

    def __init__(self, value: Tensor, whole: JointPosterior, log_density: Tensor, shapes: Mapping[str, Any]) -> None:
        self.value, self.whole, self.log_density, self.shapes = value, whole, log_density, shapes

    @cached_property
    def densities(self) -> Tensor:
        """log q(θ), ``(D,)``: the first entry's is that of all."""
        return torch.cat([self.log_density[None], torch.zeros_like(self.value)])[: len(self.value)]

    def density_of(self, value: Tensor, rows: slice) -> Tensor:
        """That of the point: a run after that which has drawn it holds its value."""
        return self.densities[rows]

    @property
    def noise(self) -> Tensor:
        """None: a point is not moved."""
        raise ValueError(
            "guide.integrate has made weighted points of the hyperparameters, which a handler can't hold at a value. "
            "Condition the model before it goes to AutoSparseGP."
        )


@dataclass(frozen=True)
class Points:
    """Weighted points of hyperparameters, which draws are from after :meth:`AutoSparseGP.integrate`.

    >>> guide.integrate(x, y)  # doctest: +SKIP
    200 points of length, scale, noise; effective size 143.2
    """

    shapes: dict[str, Any]  # of hyperparameters, by name, in unconstrained space
    field: dict[str, list[int]]  # of GP sites and normal latents the sizes of their blocks of x
    weight: Tensor  # (K,); the first one is the median, of weight 0
    log_density: Tensor  # log q(θ) of each
    theta: Tensor  # (K, D)
    loc: Tensor  # means of x given θ, (K, num)
    parts: list[Tensor]  # R of its covariance RRᵀ, upper triangular, (K, num, num); or what its arrow P is made of

    @property
    def effective_size(self) -> float:
        """How many points without weights would be as good."""
        return worth(self.weight)

    def __repr__(self) -> str:
        names = ", ".join(self.shapes) or "no hyperparameters"
        return f"{len(self.weight) - 1} points of {names}; effective size {self.effective_size:.1f}"

    def at(self, index: Tensor) -> Point:
        """The point of this number, ``(1,)``."""
        kept = self.log_density, self.theta, self.loc, *self.parts
        log_density, theta, loc, *parts = (part.index_select(0, index)[0] for part in kept)
        factor = DenseFactor(loc, parts[0], upper=True) if len(parts) == 1 else ArrowFactor(loc, Arrow(*parts))
        sizes = [size for own in self.field.values() for size in own]
        q = Product(sizes, [factor], [range(len(sizes))])
        blocks = numbered({name: len(own) for name, own in self.field.items()})
        return Point(theta, JointPosterior(q, blocks), log_density, self.shapes)

    def chosen(self, median: bool) -> Point:
        """The median, or one that is drawn."""
        total, place = self.weight.cumsum(0), PLACE.get()
        place = torch.rand_like(total[:1]) if place is None else place.to(total)
        # the first with a larger sum of weights
        index = (total[:, None] <= place * total[-1]).sum(0).clamp(max=len(total) - 1)
        return self.at(0 * index if median else index)
