"""Gaussians over coefficients whose means and scales are parameters, factor by factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..numerics.linalg import side_by_side, solve_lower
from ..numerics.shapes import broadcast_shapes
from .base import Coefficients
from .factors import DenseFactor, DiagonalFactor, Factor, IdentityFactor
from .product import Product, slices

Layout = list[tuple[type[Factor], tuple[int, ...]]]


class _Factored(Coefficients):
    """Coefficients as a product of factors; subclasses say which factor covers which blocks."""

    kind: ClassVar[type[Factor]] = DenseFactor
    later: ClassVar[Optional[type[Factor]]] = None  # of blocks after the first; None where one factor covers all

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor) -> None:
        super().__init__(sizes, batch_shape, like)
        self.sizes = tuple(sizes)
        layout = self.layout(len(self.sizes))
        self.kinds: list[Any] = [kind for kind, _ in layout]
        self.groups = [group for _, group in layout]
        for i, (kind, own) in enumerate(zip(self.kinds, self.slices)):
            # At the prior, m = 0, S = I (Shi et al., 2020, appendix G), until start says more.
            nothing = like.new_zeros(*batch_shape, 1, own.stop - own.start)
            setattr(self, f"loc_{i}", PyroParam(nothing[..., 0, :].clone()))
            if kind.scale_name is not None:
                setattr(self, f"{kind.scale_name}_{i}", PyroParam(kind.scale_of(nothing), kind.constraint))

    @property
    def slices(self) -> list[slice]:
        """The coefficients of each factor."""
        return slices(self.sizes, self.groups)

    def start(self, anchor: Optional[Tensor], features: Sequence[Tensor]) -> None:
        """Start each factor at (I + λΦᵀΦ)⁻¹ of its blocks; it was made at the prior."""
        for i, (kind, group) in enumerate(zip(self.kinds, self.groups)):
            if kind.scale_name is not None:
                # (I + λΦ_bᵀΦ_b)⁻¹
                self.put(f"{kind.scale_name}_{i}", kind.scale_of(side_by_side([features[b] for b in group])))

    @classmethod
    def layout(cls, num_blocks: int) -> Layout:
        """The factors, each with the blocks it covers."""
        if cls.later is None:
            return [(cls.kind, tuple(range(num_blocks)))]
        return [(kind, (b,)) for b, kind in zip(range(num_blocks), [cls.kind, *[cls.later] * num_blocks])]

    def forward(self, anchor: Optional[Tensor] = None) -> Product:
        # a factor's own arguments are its mean and, where it is free, its scale
        factors = [
            kind(*(getattr(self, f"{name}_{i}") for name in ("loc", kind.scale_name) if name is not None))
            for i, kind in enumerate(self.kinds)
        ]
        return Product(self.sizes, factors, self.groups)


class FullCholesky(_Factored):
    """N(m, S) with one full covariance over all blocks, S = LLᵀ: M + M(M + 1)/2 numbers (Hensman et al., 2013)."""


class BlockCholesky(_Factored):
    """N(m, S) with a full covariance within each block, none between blocks: S = blockdiag(L_bL_bᵀ)."""

    later = DenseFactor


class Diagonal(_Factored):
    """N(m, S) of independent coefficients, S = diag(s²)."""

    kind = DiagonalFactor


class Identity(_Factored):
    """N(m, I): the prior's covariance, only the mean is free."""

    kind = IdentityFactor


class CholeskyIdentity(_Factored):
    """N(m, S) with a full covariance of the first block and the prior's for the others: S = blockdiag(LLᵀ, I, …).

    As in orthogonally decoupled bases (Salimbeni, Cheng, Boots and Deisenroth, 2018).
    """

    later = IdentityFactor


class Unwhitened(Coefficients):
    """q(u_b) = N(m_b, S_b), factor by factor, for u_b = L_bb w_b: the values themselves (Shi et al., 2020, eq. 8).

    L_bb is the factor's own block on the diagonal of the anchor L. For nested sets, u₁ = f(Z), and u₂ = f⊥(O) is what
    f(O) adds to it, with prior N(0, C_OO): the paper's v⊥. Of w, this is N(L_bb⁻¹m_b, L_bb⁻¹S_bL_bb⁻ᵀ).
    A factor that keeps the prior's covariance keeps it. q moves with the hyperparameters where a whitened one would
    not; both reach the same optimum.

    :param kind: the whitened posterior with the same layout of factors.
    """

    placed: ClassVar[bool] = True

    def __init__(
        self, kind: Any, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, **kwargs: Any
    ) -> None:
        super().__init__(sizes, batch_shape, like)
        self.values = kind(sizes, batch_shape, like, **kwargs)

    def start(self, anchor: Optional[Tensor], features: Sequence[Tensor]) -> None:
        """Put q where the whitened one starts, under the first anchor L: at the prior, it is N(0, L_bbL_bbᵀ)."""
        self.values.start(anchor, features)
        for i, (factor, block) in enumerate(zip(self.values.forward().factors, self._blocks(anchor))):
            if factor.scale_name is not None:
                root = block.detach() @ factor.root  # of LSLᵀ, or the diagonal of it
                value = root if isinstance(factor, DenseFactor) else root.norm(dim=-1)
                setattr(self.values, f"{factor.scale_name}_{i}", value)

    def anchor_of(self, features: Any, mean: Any = None) -> Any:
        return features.anchor

    def _blocks(self, anchor: Optional[Tensor]) -> list[Tensor]:
        """L_bb of each factor."""
        if anchor is None:
            raise ValueError("a posterior over values needs a basis whose coefficients stand for values (an anchor)")
        return [anchor[..., own, own] for own in self.values.slices]

    def forward(self, anchor: Optional[Tensor] = None) -> Product:
        q = self.values()
        for i, (factor, block) in enumerate(zip(q.factors, self._blocks(anchor))):
            # of w = L⁻¹u: N(L⁻¹m, L⁻¹SL⁻ᵀ) (Shi et al., 2020, eq. 8)
            root, num = factor.root, block.shape[-1]
            batch = broadcast_shapes(block.shape[:-2], root.shape[:-2])
            both = torch.cat([root, factor.loc[..., None]], -1).expand(*batch, num, num + 1)
            whitened = solve_lower(block, both)  # one solve for both
            loc = whitened[..., -1]
            # N(L⁻¹m, I) where the values keep the prior's covariance LLᵀ
            is_free = factor.scale_name is not None
            q.factors[i] = DenseFactor(loc, whitened[..., :-1].tril()) if is_free else IdentityFactor(loc)
        return q
