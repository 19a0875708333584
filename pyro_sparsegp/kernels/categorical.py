"""Levels of a factor: a random effect for each."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..numerics.codes import require_count, unknown_codes
from ..numerics.shapes import broadcast_shapes
from .algebra import Kernel
from .base import Scalar, as_tensor, positive, require_one


class Categorical(Kernel):
    """Independent effects of the levels 0, …, L − 1 of a column, with variance s: k(x, x') = s·[x = x'].

    A random intercept is ``s * Categorical(L)[column]``; ``Categorical(L)[column] * RBF(l)[other]`` is a smooth
    function of the other column for each level. Its features are the L indicators, so that sparse families are exact
    in it. Any other value is a new level: it has the prior's variance, and is equal to itself.

    :param num_levels: L.
    :param variance: s > 0, ``(...,)``.
    :raises ValueError: if L is no whole number of at least 1.
    """

    event_dims = (("variance", 0),)
    _one = "Categorical reads one column of codes", "Categorical(L)[2]"

    def __init__(self, num_levels: int, variance: Scalar = 1.0) -> None:
        require_count(num_levels, "Categorical's num_levels")
        self.num_levels, self.variance = num_levels, positive(variance, "Categorical's variance")

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        require_one(x, *self._one)
        same = x == (x if z is None else z).mT
        return as_tensor(self.variance, x)[..., None, None] * same

    def diag(self, x: Tensor) -> Tensor:
        variance = as_tensor(self.variance, x)[..., None]
        return variance.expand(broadcast_shapes(variance.shape, x.shape[:-1]))

    def features(self, x: Tensor) -> Tensor:
        require_one(x, *self._one)
        levels = torch.arange(self.num_levels, dtype=x.dtype, device=x.device)
        return as_tensor(self.variance, x).sqrt()[..., None, None] * (x == levels)

    def code_columns(self, num: int) -> frozenset[int]:
        return frozenset({0})

    def check_inputs(self, x: Tensor) -> None:
        some = unknown_codes(x.detach(), self.num_levels)
        if some:
            raise ValueError(
                f"{self!r} is for codes 0 to {self.num_levels - 1}, the training inputs have {some} in its column; "
                "recode them, or give more levels."
            )

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> None:
        return None  # a new level's effect must be remembered: exact conditioning does
