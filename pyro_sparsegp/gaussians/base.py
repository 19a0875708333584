"""Gaussians over the coefficients of a basis. They know blocks of numbers, never a kernel.

A module owns the variational parameters; calling it gives a fresh, disposable :class:`Gaussian` q(w) = N(m, S)
over blocks w_b, to be held against the prior N(0, I).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from ..modules import AbstractModule
from ..numerics.documented import Documented
from ..numerics.linalg import row_squares, sum_blocks


class Gaussian(ABC):
    """q(w) = N(m, S) over coefficients w in blocks w_b, held against the prior N(0, I).

    Features Φ at N inputs are a list of blocks, ``(..., N, M_b)``; f = Φw + r with the residual r as in the prior. The
    dimensions ``...`` are a batch of independent copies.
    """

    sizes: tuple[int, ...]
    batch_shape: torch.Size
    row: Any = None  # the last marginals given, where natural steps record them

    @property
    @abstractmethod
    def loc(self) -> list[Tensor]:
        """m, a block ``(..., M_b)`` each."""

    @abstractmethod
    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Φm, and diag(Φ(S − I)Φᵀ), what the posterior changes of the prior's variance; ``(..., N)`` each."""

    def note_draws(self) -> None:  # noqa: B027, nothing is to be known by most
        """Take note that function values are drawn by the marginals given, where natural steps are to know."""

    def cross_change(self, features: Sequence[Tensor], others: Sequence[Tensor], rows: tuple[Any, Any]) -> Tensor:
        """diag(Φ(S − I)Ψᵀ), ``(..., N)``, of two matrices with as many rows.

        :param rows: of the two matrices' marginals, as they were recorded.
        """
        # ¼(‖φ + ψ‖² − ‖φ − ψ‖²) in the metric S − I
        pairs = list(zip(features, others))
        _, both = self.moments([phi + psi for phi, psi in pairs])
        return (both - self.moments([phi - psi for phi, psi in pairs])[1]) / 4

    @abstractmethod
    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        """Φ(S − I)Φᵀ, ``(..., N, N)``."""

    @abstractmethod
    def kl(self) -> Tensor:
        """KL[N(m, S) ‖ N(0, I)] in nats, of the batch's shape."""

    @abstractmethod
    def rsample(self, shape: torch.Size) -> list[Tensor]:
        """Draws of w, a block ``(*shape, M_b)`` each; ``shape`` ends in the batch's shape."""

    @abstractmethod
    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        """log dq/dp, log q(w) − log N(w; 0, I).

        :param f: the centred values at the process's inputs of the draw that w are of, which projected data ask for.
        """

    @abstractmethod
    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        """q of some of the blocks."""

    @property
    @abstractmethod
    def covariance_matrix(self) -> Tensor:
        """S, ``(..., M, M)``, formed: for inspection and tests, no family calls it in training."""


class Given(Gaussian):
    """Coefficients that are known, S = 0: what f has beside them is its residual, as in the prior.

    :param w: a block ``(..., M_b)`` each.
    """

    def __init__(self, w: Sequence[Tensor]) -> None:
        self.w, self.sizes = list(w), tuple(block.shape[-1] for block in w)
        self.batch_shape = self.w[0].shape[:-1] if w else torch.Size()

    @property
    def loc(self) -> list[Tensor]:
        return self.w

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return sum_blocks(features, self.w), -sum(map(row_squares, features), torch.zeros(()))

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return -sum((phi @ phi.mT for phi in features), torch.zeros(()))

    def kl(self) -> Tensor:
        raise ValueError("coefficients that are known have no density")

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        return [block.expand(*shape, -1) for block in self.w]

    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        return self.kl()

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        return Given([self.w[b] for b in sorted(blocks)])

    @property
    def covariance_matrix(self) -> Tensor:
        """Zero."""
        num = sum(self.sizes)
        return self.w[0].new_zeros(*self.batch_shape, num, num)


class Coefficients(Documented, AbstractModule):
    """A module that owns the parameters of a :class:`Gaussian` and builds it when called.

    :param sizes: the sizes M_b of the blocks of w; there are M = ΣM_b coefficients.
    :param batch_shape: independent copies, one for each output; ``()`` is one.
    :param like: a tensor of the dtype and device wanted.
    """

    @abstractmethod
    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor) -> None:
        super().__init__()

    placed: ClassVar[bool] = False  # whether where it is before any data depends on L

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter a value, in the parameter's own shape, dtype and device."""
        # Pyro's attribute sets the unconstrained parameter.
        current = getattr(self, name)
        setattr(self, name, value.to(current).expand(current.shape))

    def start(self, anchor: Optional[Tensor], features: Sequence[Tensor]) -> None:
        """Put q where training starts, for a guide's first call.

        :param anchor: L, as for :meth:`forward`.
        :param features: √λ·Φ at inputs of that call, a block ``(..., n, M_b)`` each, for a covariance near
            (I + λΦᵀΦ)⁻¹, the prior's where they have no rows.
        """

    def anchor_of(self, features: Any, mean: Any = None) -> Any:
        """L of a run's features, as :meth:`forward` wants it; ``None`` where it is about w alone.

        :param mean: the process's mean function, where q is to follow a constant one.
        """
        return None

    @abstractmethod
    def forward(self, anchor: Optional[Tensor] = None) -> Gaussian:
        """q(w); ``anchor`` is L, ``(..., M, M)``, of the run's :attr:`Features.anchor`, for those that want it."""
