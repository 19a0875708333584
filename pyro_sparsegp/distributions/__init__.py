"""Likelihoods that Gaussian processes are used with and that Pyro lacks, and what one of a user's own may bring."""

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from .probit import Probit
from .robust_max import RobustMax

__all__ = ["ExpectedLogProb", "Probit", "RobustMax"]


@runtime_checkable
class ExpectedLogProb(Protocol):
    """A distribution that knows E[log p(y | θ)] for θ ~ N(its own θ, variance), entry by entry independent.

    :cvar normal_parameter: the name of θ among its parameters, an attribute of shape ``batch_shape + (...)``.
    """

    normal_parameter: ClassVar[str]

    def expected_log_prob(self, value: Tensor, variance: Tensor) -> Tensor:
        """E[log p(value | θ)], of the shape of ``log_prob(value)``.

        :param variance: of θ's shape; 0 for entries that are constant.
        """
