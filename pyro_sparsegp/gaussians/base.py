"""Gaussians over the coefficients of a basis. They know blocks of numbers, never a kernel.

A module owns the variational parameters; calling it gives a fresh, disposable :class:`Gaussian` q(w) = N(m, S)
over blocks w_b, to be held against the prior N(0, I). A :class:`Stack` has blocks as one tensor, ``(..., C, M, K)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..modules import AbstractModule
from ..numerics.arguments import Documented
from ..numerics.linalg import factorised, rounding, row_squares, sum_blocks, total


class Gaussian(ABC):
    """q(w) = N(m, S) over coefficients w in blocks w_b, held against the prior N(0, I).

    Features Φ at N inputs are a list of blocks, ``(..., N, M_b)``; f = Φw + r with the residual r as in the prior. The
    dimensions ``...`` are a batch of independent copies.
    """

    sizes: tuple[int, ...]
    batch_shape: torch.Size

    @property
    @abstractmethod
    def loc(self) -> list[Tensor]:
        """m, a block ``(..., M_b)`` each."""

    @abstractmethod
    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Φm, and diag(Φ(S − I)Φᵀ), what the posterior changes of the prior's variance; ``(..., N)`` each."""

    def note_draws(self) -> None:  # noqa: B027, nothing is to be known by most
        """Take note that function values are drawn by the marginals given, where natural steps are to know."""

    @abstractmethod
    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        """Φ(S − I)Φᵀ, ``(..., N, N)``."""

    @abstractmethod
    def kl(self) -> Tensor:
        """KL[N(m, S) ‖ N(0, I)] in nats, of the batch's shape."""

    @abstractmethod
    def rsample(self, shape: torch.Size) -> list[Tensor]:
        """Draws of w, a block ``(*shape, M_b)`` each; ``shape`` ends in the batch's shape."""

    def draw(self) -> Tensor:
        """A draw of all, ``(..., ΣM_b)``, that no record keeps."""
        return torch.cat(self.rsample(self.batch_shape), -1)

    @abstractmethod
    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        """log dq/dp, log q(w) − log N(w; 0, I); projected data ask for f, the draw's centred values at the inputs."""

    @abstractmethod
    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        """q of some of the blocks."""

    @property
    @abstractmethod
    def covariance_matrix(self) -> Tensor:
        """S, ``(..., M, M)``, formed: for inspection and tests, no family calls it in training."""


class Given(Gaussian):
    """Coefficients that are known, w, a block ``(..., M_b)`` each; S = 0: what f has beside them is its residual."""

    def __init__(self, w: Sequence[Tensor]) -> None:
        self.w, self.sizes = list(w), tuple(block.shape[-1] for block in w)
        self.batch_shape = self.w[0].shape[:-1] if w else torch.Size()

    @property
    def loc(self) -> list[Tensor]:
        return self.w

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return sum_blocks(features, self.w), -total(map(row_squares, features))

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return -total(phi @ phi.mT for phi in features)

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
        return self.w[0].new_zeros(*self.batch_shape, *[sum(self.sizes)] * 2)


class Coefficients(Documented, AbstractModule):
    """A module that owns the parameters of a :class:`Gaussian` and builds it when called.

    :param sizes: the sizes M_b of the blocks of w; there are M = ΣM_b coefficients.
    :param batch_shape: independent copies, one for each output; ``()`` is one.
    :param like: a tensor of the dtype and device wanted.
    """

    @abstractmethod
    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor) -> None:
        super().__init__()
        self.sizes = tuple(sizes)

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter a value, in the parameter's own shape, dtype and device."""
        current = getattr(self, name)
        setattr(self, name, value.to(current).expand(current.shape))

    @torch.no_grad()
    def put_mean(self, loc: Tensor) -> None:
        """Give q this mean, ``(..., ΣM_b)``, of all blocks side by side."""
        parts: list[Any] = [part for name, part in self.named_parameters(recurse=False) if name.startswith("loc")]
        for part, value in zip(parts, loc.split([part.shape[-1] for part in parts], -1)):
            part.copy_(value.expand(part.shape))

    def start(self, anchor: Optional[Tensor], features: Sequence[Tensor]) -> None:
        """Put q where training starts, for a guide's first call.

        :param anchor: L, as for :meth:`forward`.
        :param features: √λ·Φ at inputs of that call, a block ``(..., n, M_b)`` each, for a covariance near
            (I + λΦᵀΦ)⁻¹, the prior's where they have no rows.
        """

    def anchor_of(self, features: object, mean: object = None, rows: Optional[Tensor] = None) -> Any:
        """L of a run's features, for :meth:`forward`; ``None`` where it is about w alone. Of a mean function q may
        follow a constant one.
        """
        return None

    def settle(self, anchor: object) -> None:
        """Let sums over data belong to this anchor; q stays what it is."""

    @abstractmethod
    def forward(self, anchor: Optional[Tensor] = None) -> Gaussian:
        """q(w); ``anchor`` is L, ``(..., M, M)``, of the run's :attr:`Features.anchor`, for those that want it."""


class Stack:
    """C blocks of M_b coefficients as one of C times M, the largest size; what is beyond a block's own is 0.

    Flat, ``(..., C·M, K)``, the blocks are one above the other; wide, ``(..., C·M)``, side by side.
    """

    def __new__(cls, sizes: Sequence[int] = ()) -> Stack:
        return super().__new__(_Ragged if len({*sizes}) > 1 else cls)

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.size = max(self.sizes, default=0)
        self.num_beyond = len(self.sizes) * self.size - sum(self.sizes)

    def rows(self, blocks: Sequence[Tensor]) -> Tensor:
        """Matrices, ``(..., M_b, K)`` a block, as ``(..., C, M, K)``."""
        return torch.stack(torch.broadcast_tensors(*blocks), -3)

    def squares(self, blocks: Sequence[Tensor]) -> Tensor:
        """Matrices, ``(..., M_b, M_b)`` a block, as ``(..., C, M, M)``, with 1 on the diagonal beyond a block's own."""
        return self.rows(blocks)

    def wide(self, x: Tensor) -> Tensor:
        """Numbers of all blocks side by side, ``(..., ΣM_b)``, as ``(..., C·M)``."""
        return x

    def narrow(self, x: Tensor) -> Tensor:
        """What :meth:`wide` was made of."""
        return x

    def cut(self, flat: Tensor) -> Tensor:
        """A flat tensor as a stack."""
        return flat.view(*flat.shape[:-2], len(self.sizes), self.size, flat.shape[-1])

    def columns(self, x: Tensor) -> Tensor:
        """A vector of all blocks, ``(..., ΣM_b)``, as ``(..., C, M, 1)``."""
        return self.wide(x).view(*x.shape[:-1], len(self.sizes), self.size, 1)

    def blocks(self, whole: Tensor) -> list[Tensor]:
        """The matrices that :meth:`rows` made a stack of."""
        return [part[..., :n, :] for part, n in zip(whole.unbind(-3), self.sizes)]

    def diagonal(self, whole: Tensor) -> Tensor:
        """A view of the blocks on the diagonal, ``(..., C, M, M)``, of a matrix, ``(..., C·M, C·M)``."""
        # (C, M, C, M), of whose two C the diagonal is taken
        shape = len(self.sizes), self.size
        return whole.view(*whole.shape[:-2], *shape, *shape).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    def dense(self, blocks: Tensor, low_rank: Tensor, sign: int = 1) -> Tensor:
        """blockdiag(D) ± BBᵀ of a stack D and a flat B, ``(..., ΣM_b, ΣM_b)``."""
        whole = (sign * low_rank) @ low_rank.mT
        self.diagonal(whole).add_(blocks)
        return self.narrow(self.narrow(whole).mT).mT

    def spread(self, matrix: Tensor) -> Tensor:
        """A matrix of all coefficients, ``(..., ΣM_b, ΣM_b)``, as ``(..., C·M, C·M)``, I beyond the blocks' own."""
        return matrix


class _Ragged(Stack):
    """Of blocks that are not all as large. Beyond a block's own q is the prior: D = I, B = 0, m = 0."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        own = torch.arange(self.size) < torch.tensor(self.sizes)[:, None]
        self._index, self._beyond = own.flatten().nonzero()[:, 0], ~own

    def beyond(self, like: Tensor) -> Tensor:
        """0 where a number is a block's own, else 1, ``(C, M)``."""
        self._beyond = self._beyond.to(like)  # kept where it was asked for last: no step copies it to a device
        return self._beyond

    def rows(self, blocks: Sequence[Tensor]) -> Tensor:
        return super().rows([pad(block, (0, 0, 0, self.size - block.shape[-2])) for block in blocks])

    def squares(self, blocks: Sequence[Tensor]) -> Tensor:
        whole = self.rows([pad(block, (0, self.size - block.shape[-1])) for block in blocks])
        return whole + torch.diag_embed(self.beyond(whole))

    def wide(self, x: Tensor) -> Tensor:
        found = x.new_zeros(*x.shape[:-1], len(self.sizes) * self.size)
        found[..., self._index] = x
        return found

    def narrow(self, x: Tensor) -> Tensor:
        return x[..., self._index]

    def spread(self, matrix: Tensor) -> Tensor:
        return self.wide(self.wide(matrix).mT).mT + torch.diag_embed(self.beyond(matrix).flatten())


def each_times(a: Tensor, b: Tensor) -> Tensor:
    """A_cB_c of stacked matrices, ``(..., C, ·, ·)``: of small ones without a batch ``@`` takes twice as long."""
    return torch.bmm(a, b) if a.dim() == b.dim() == 3 else a @ b


def solved(precision: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """P⁻¹ of a vector, and a flag that is not 0 if P has no Cholesky factor. With so much more on the diagonal, in
    place, that rounding leaves it positive: at no slope the mean stays all the same.
    """
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(rounding(precision) * diagonal.mean(-1, keepdim=True))
    factor, info = factorised(precision)
    return torch.cholesky_solve(right[..., None], factor)[..., 0], info
