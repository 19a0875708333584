"""Symmetric matrices of an arrow's shape: C common rows and columns, and K others that meet only these.

    P = [[A, B], [Bᵀ, diag d]],  S = A − BD⁻¹Bᵀ = LLᵀ,  W = D⁻¹Bᵀ.

Latents with one value a datum, such as its group's, have such a precision. Products, solutions and the parts of P⁻¹
that a datum asks for take O(KC²), where a dense factor takes O((C + K)³).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Union

import torch
from torch import Tensor

from .decisions import decided
from .linalg import cholesky, eye_like, factorised


class OneEach:
    """Φ, ``(N, C + K)``; each row has one entry in the K last columns: its owner's.

    :param compact: ``(N, C + 1)``, these entries last; ``owner``: which of the K columns, ``(N,)``.
    """

    def __init__(self, compact: Tensor, owner: Tensor, num: int) -> None:
        self.compact, self.owner, self.num = compact, owner, num
        self.common, self.entry = compact[:, :-1], compact[:, -1]
        self.shape = torch.Size([len(compact), compact.shape[1] - 1 + num])

    def like(self, compact: Tensor) -> OneEach:
        """Another one of these owners."""
        return OneEach(compact, self.owner, self.num)

    def __matmul__(self, x: Tensor) -> Tensor:
        """Φx of a vector, or of a column."""
        if x.dim() > 1:
            return (self @ x[:, 0])[:, None]
        common, own = x.split([self.common.shape[1], self.num])
        return self.common @ common + self.entry * own.index_select(0, self.owner)

    def __rmatmul__(self, v: Tensor) -> Tensor:
        """vᵀΦ of a vector."""
        own = v.new_zeros(self.num).index_add(0, self.owner, v * self.entry)
        return torch.cat([v @ self.common, own])

    def sum(self, dim: int) -> Tensor:
        """The sums of its columns, ``dim`` 0, or of its rows."""
        return self.compact.new_ones(len(self.compact)) @ self if dim == 0 else self.compact.sum(-1)

    def __mul__(self, other: OneEach) -> OneEach:
        return self.like(self.compact * other.compact)

    def square(self) -> OneEach:
        """The squares of its entries."""
        return self.like(self.compact.square())

    def detach(self) -> OneEach:
        """This without its graph."""
        return self.like(self.compact.detach())

    def gram(self, right: Tensor) -> Arrow:
        """ΦᵀΨ of compact Ψ of the same owners, where that is symmetric, or its transpose is to be added to it."""
        # sums over each owner's rows, of its entry times those of all columns
        own = right.new_zeros(self.num, right.shape[1]).index_add(0, self.owner, right * self.entry[:, None])
        return Arrow(self.common.mT @ right[:, :-1], own[:, :-1].mT, own[:, -1])


def gram(phi: Union[OneEach, Tensor], psi: Tensor) -> Arrow:
    """ΦᵀΨ, as :meth:`OneEach.gram`."""
    return Arrow.of(phi.mT @ psi) if isinstance(phi, Tensor) else phi.gram(psi)


class Parts(NamedTuple):
    """What products with P⁻¹ are made of."""

    root: Tensor  # L, (C, C)
    along: Tensor  # W, (K, C)
    own: Tensor  # d, (K,)


class Arrow:
    """P of A, ``(C, C)``, B, ``(C, K)``, and d, ``(K,)``."""

    def __init__(self, common: Tensor, cross: Tensor, own: Tensor) -> None:
        self.parts = common, cross, own

    @classmethod
    def of(cls, matrix: Tensor) -> Arrow:
        """This matrix, as an arrow without others, K = 0."""
        return cls(matrix, matrix[:, :0], matrix.new_zeros(0))

    def __add__(self, other: Arrow) -> Arrow:
        return Arrow(*(a + b for a, b in zip(self.parts, other.parts)))

    def __mul__(self, factor: Tensor) -> Arrow:
        return Arrow(*(part * factor for part in self.parts))

    def plus(self, number: float) -> Arrow:
        """P + cI."""
        common, cross, own = self.parts
        return Arrow(common + number * eye_like(common), cross, own + number)

    def to(self, like: Tensor) -> Arrow:
        """In a tensor's dtype."""
        return Arrow(*(part.to(like) for part in self.parts))

    def __matmul__(self, x: Tensor) -> Tensor:
        common, cross, own = self.parts
        first, rest = x.split([len(common), len(own)])
        return torch.cat([common @ first + cross @ rest, cross.mT @ first + own.view(-1, *[1] * (x.dim() - 1)) * rest])

    def turned(self, turn: Tensor, own_turn: Tensor) -> Arrow:
        """TᵀPT of T = blockdiag(turn, diag own_turn)."""
        common, cross, own = self.parts
        return Arrow(turn.mT @ common @ turn, turn.mT @ cross * own_turn, own * own_turn.square())

    @cached_property
    def factor(self) -> Parts:
        """Of a positive P; else cholesky raises."""
        common, cross, own = self.parts
        along = cross.mT / own[:, None]
        schur = common - cross @ along
        # d ≤ 0 has no root: cholesky then tells
        schur = torch.where((own > 0).all(), schur, -eye_like(schur))
        return Parts(cholesky(schur, 0.0, "the Schur complement of a field's precision"), along, own)

    @property
    def diagonal(self) -> Tensor:
        """P's."""
        return torch.cat([self.parts[0].diagonal(), self.parts[2]])

    @property
    def is_positive(self) -> bool:
        """Whether P has a Cholesky factor."""
        common, cross, own = self.parts
        _, info = factorised(common - cross @ (cross.mT / own[:, None]))
        return decided((own > 0).all() & (info == 0))

    def lifted(self, least: float) -> Arrow:
        """That with the sizes of d and of S's eigenvalues in their place, and no less than a number."""
        common, cross, own = self.parts
        own = own.abs().clamp(min=least)
        along = cross.mT / own[:, None]
        values, axes = torch.linalg.eigh(common - cross @ along)
        half = axes * values.abs().clamp(min=least).sqrt()
        found = Arrow(half @ half.mT + cross @ along, cross, own)
        upper = torch.linalg.qr(half.mT).R  # of half halfᵀ, where rounding may be more than the least eigenvalue
        found.factor = Parts((upper * upper.diagonal().sign()[:, None]).mT, along, own)
        return found

    @property
    def half_log_det(self) -> Tensor:
        """½ log|P|."""
        root, _, own = self.factor
        return root.diagonal().log().sum() + 0.5 * own.log().sum()

    def solve(self, right: Tensor) -> Tensor:
        """P⁻¹ of a vector, or of columns."""
        root, along, own = self.factor
        columns = right if right.dim() > 1 else right[:, None]
        first, rest = columns.split([len(root), len(own)])
        common = torch.cholesky_solve(first - along.mT @ rest, root)
        return torch.cat([common, rest / own[:, None] - along @ common]).view_as(right)

    @cached_property
    def common_covariance(self) -> Tensor:
        """P⁻¹ of the common entries, ``(C, C)``."""
        return torch.cholesky_inverse(self.factor.root)

    @property
    def upper(self) -> Tensor:
        """R of P⁻¹ = RRᵀ, upper triangular, where K = 0."""
        return torch.linalg.solve_triangular(self.factor.root, eye_like(self.factor.root), upper=False).mT

    @property
    def variances(self) -> Tensor:
        """P⁻¹'s diagonal."""
        _, along, own = self.factor
        return torch.cat([self.common_covariance.diagonal(), 1 / own + self._white(along).square().sum(0)])

    def _white(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.root, rows.mT, upper=False)

    def white(self, phi: Union[OneEach, Tensor]) -> Tensor:
        """``(C + 1, N)``: products of two such matrices with the same owners add up to diag(ΦP⁻¹Ψᵀ); of a tensor ``(C +
        K, N)``.
        """
        root, along, own = self.factor
        if isinstance(phi, Tensor):
            common, rest = phi.split([len(root), len(own)], -1)
            return torch.cat([self._white(common - rest @ along), (rest / own.sqrt()).mT])
        left = phi.common - phi.entry[:, None] * along.index_select(0, phi.owner)
        return torch.cat([self._white(left), (phi.entry / own.index_select(0, phi.owner).sqrt())[None]])

    def covariances(self, phi: Union[OneEach, Tensor]) -> Tensor:
        """ΦP⁻¹ where Φ has entries, ``(N, C + 1)``; of a tensor where K = 0, ``(N, C)``."""
        if isinstance(phi, Tensor):
            return phi @ self.common_covariance
        _, along, own = self.factor
        rows = along.index_select(0, phi.owner)
        common = (phi.common - phi.entry[:, None] * rows) @ self.common_covariance
        return torch.cat([common, (phi.entry / own.index_select(0, phi.owner) - (common * rows).sum(-1))[:, None]], 1)

    def noise(self, shape: Sequence[int]) -> Tensor:
        """Draws of N(0, P⁻¹), ``(*shape, C + K)``."""
        root, along, own = self.factor
        eps = torch.randn(*shape, len(root) + len(own), dtype=own.dtype, device=own.device)
        # of the common entries, and of each other given those
        common = torch.linalg.solve_triangular(root.mT, eps[..., : len(root), None], upper=True)
        rest = eps[..., len(root) :] / own.sqrt() - (along @ common)[..., 0]
        return torch.cat([common[..., 0], rest], -1)
