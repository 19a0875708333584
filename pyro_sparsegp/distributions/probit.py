"""The probit likelihood."""

from __future__ import annotations

from typing import Any, ClassVar, Optional

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from ..numerics.arguments import require_codes
from ..numerics.functions import log_ndtr


class Probit(TorchDistribution):
    """y in {0, 1} with P(y = 1) = Φ(f), the standard normal's distribution function, of batch shape ``(...,)``.

    Its log density has full precision in both tails, unlike that of ``Bernoulli(probs)``, and needs no second run
    under :func:`torch.func.vmap`.

    >>> Probit(torch.tensor([-40.0, 0.0])).log_prob(torch.ones(2))
    tensor([-8.0461e+02, -6.9315e-01])

    :param f: ``(...,)``.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"f": constraints.real}
    support = constraints.boolean

    def __init__(self, f: Tensor, validate_args: Optional[bool] = None) -> None:
        self.f = torch.as_tensor(f)
        super().__init__(self.f.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """Φ(f)."""
        return torch.special.ndtr(self.f)

    @property
    def variance(self) -> Tensor:
        """Φ(f)Φ(−f)."""
        return torch.special.ndtr(self.f) * torch.special.ndtr(-self.f)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> Probit:
        """The same distribution with the given batch shape."""
        new = Probit(self.f.expand(torch.Size(batch_shape)), validate_args=False)
        new._validate_args = self._validate_args  # a plate expands, and data in it are checked, too
        return new

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Draws, 0 or 1 in f's dtype."""
        with torch.no_grad():
            return torch.bernoulli(self.mean.expand(self._extended_shape(sample_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        """log Φ((2y − 1)f); NaN if y is neither 0 nor 1, so that objectives refuse it even without validation."""
        if self._validate_args:
            require_codes(value, 2, "Probit's values", "give (y > 0).to(f) for y of -1 and 1")
            self._validate_sample(value)
        return torch.where((value == 0) | (value == 1), log_ndtr((2 * value - 1) * self.f), torch.nan)
