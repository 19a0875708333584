"""Products of independent Gaussian factors, each over one or several blocks of the coefficients."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Optional

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints

from ..numerics.functions import Function
from ..numerics.linalg import (
    cholesky,
    gaussian_kl,
    gram,
    on_diagonal,
    root_of_inverse,
    row_squares,
    side_by_side,
    times,
    times_lower,
    times_upper,
    tril_of_product,
)
from ..numerics.shapes import broadcast_shapes
from .base import Coefficients, Gaussian
from .documented import Documented
from .steps import recorded

__all__ = [
    "BlockCholesky",
    "CholeskyIdentity",
    "CovarianceFactor",
    "DenseFactor",
    "Diagonal",
    "DiagonalFactor",
    "Factor",
    "FullCholesky",
    "Identity",
    "IdentityFactor",
    "Product",
]


class Factor(Documented, ABC):
    """One independent N(m, S) of a :class:`Product`, over M coefficients.

    :param loc: m, ``(..., M)``.
    """

    def __init__(self, loc: Tensor) -> None:
        self.loc, self.batch_shape = loc, loc.shape[:-1]

    @abstractmethod
    def scaled(self, phi: Tensor) -> Tensor:
        """ΦR with S = RRᵀ, ``(..., N, M)``."""

    @abstractmethod
    def unscale(self, v: Tensor) -> Tensor:
        """R⁻¹v, ``(..., M)``."""

    @abstractmethod
    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        """tr S and log|S|."""

    def variance_change(self, phi: Tensor) -> Tensor:
        """diag(Φ(S − I)Φᵀ)."""
        return row_squares(self.scaled(phi)) - row_squares(phi)

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Φm and diag(Φ(S − I)Φᵀ)."""
        return (phi @ self.loc[..., None])[..., 0], self.variance_change(phi)

    def covariance_change(self, phi: Tensor) -> Tensor:
        """Φ(S − I)Φᵀ."""
        scaled = self.scaled(phi)
        return scaled @ scaled.mT - phi @ phi.mT

    def select(self, index: Tensor) -> Factor:
        """The marginal of some of the coefficients."""
        rows = self.scaled(torch.eye(self.loc.shape[-1], dtype=self.loc.dtype, device=self.loc.device))[..., index, :]
        return DenseFactor(self.loc[..., index], cholesky(rows @ rows.mT, 0.0, "a marginal covariance of coefficients"))

    def kl(self) -> Tensor:
        """KL[N(m, S) ‖ N(0, I)]."""
        return gaussian_kl(self.loc, *self.trace_and_log_det())

    def rsample(self, shape: torch.Size) -> Tensor:
        """m + Rε, ``(*shape, M)``."""
        noise = torch.randn(*shape, self.loc.shape[-1], dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale(noise)

    @abstractmethod
    def scale(self, v: Tensor) -> Tensor:
        """Rv, ``(..., M)``."""

    def log_ratio(self, w: Tensor) -> Tensor:
        """log N(w; m, S) − log N(w; 0, I)."""
        _, log_det = self.trace_and_log_det()
        return 0.5 * (w.square().sum(-1) - self.unscale(w - self.loc).square().sum(-1) - log_det)


class _DenseMoments(Function):
    """Φm and diag(Φ(RRᵀ − I)Φᵀ) of unbatched Φ, m and a triangular R; its gradient means nothing where R is 0.

    Autograd's own way back adds up four matrices of Φ's size; this one makes the sum in place,
    dΦ = 2 diag(c)(ΦRRᵀ − Φ) + a mᵀ for gradients a of the means and c of the variances.
    """

    @staticmethod
    def forward(phi: Tensor, loc: Tensor, root: Tensor, is_lower: bool) -> tuple[Tensor, Tensor, Tensor]:
        scaled = times_lower(phi, root) if is_lower else times_upper(phi, root.mT)
        norm = torch.linalg.vector_norm  # reads its matrix once; a square makes another
        return phi @ loc, norm(scaled, dim=-1).square_().sub_(norm(phi, dim=-1).square_()), scaled

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.is_lower = inputs
        ctx.save_for_backward(*tensors, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # a matrix of zeros for the third output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], c: Optional[Tensor], _: Any) -> Any:
        phi, loc, root, scaled = ctx.saved_tensors
        a, c = (phi.new_zeros(len(phi)) if grad is None else grad for grad in (a, c))
        needs, each = ctx.needs_input_grad, (2 * c)[:, None]
        by_loc = a @ phi if needs[1] else None
        weighted = scaled * each
        by_phi = times_upper(weighted, root) if ctx.is_lower else times_lower(weighted, root.mT)
        by_phi = by_phi.addcmul_(phi, each, value=-1).addr_(a, loc)
        if not needs[2]:
            return by_phi, by_loc, None, None
        if ctx.is_lower:
            return by_phi, by_loc, tril_of_product(phi, weighted), None
        return by_phi, by_loc, tril_of_product(weighted, phi).mT, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise ValueError("q(w) does not depend on quadrature nodes")


class _CovarianceMoments(Function):
    """Φm and diag(Φ(S − I)Φᵀ) of unbatched Φ, m and a symmetric S. The gradient by S, Φᵀ diag(c) Φ, is half of a
    natural step's sum of sites.
    """

    @staticmethod
    def forward(phi: Tensor, loc: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled = (phi @ covariance).sub_(phi)
        return phi @ loc, torch.linalg.vecdot(scaled, phi), scaled

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # a matrix of zeros for the third output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], c: Optional[Tensor], _: Any) -> Any:
        phi, loc, _, scaled = ctx.saved_tensors
        a, c = (phi.new_zeros(len(phi)) if grad is None else grad for grad in (a, c))
        needs = ctx.needs_input_grad
        by_loc, by_covariance = a @ phi if needs[1] else None, gram(phi, phi * c[:, None]) if needs[2] else None
        return ((2 * c)[:, None] * scaled).addr_(a, loc), by_loc, by_covariance

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise ValueError("q(w) does not depend on quadrature nodes")


class DenseFactor(Factor):
    """N(m, S) with a full covariance, S = LLᵀ.

    :param tril: L, ``(..., M, M)``.
    """

    is_lower: ClassVar[bool] = True  # L, rather than upper triangular

    def __init__(self, loc: Tensor, tril: Tensor) -> None:
        super().__init__(loc)
        self.tril = tril
        # Known from the start: rows whose features are made again on the way back take the same way,
        # test_deep_basis.py::test_blocks_change_nothing.
        self.is_recorded = recorded() is not None

    def scaled(self, phi: Tensor) -> Tensor:
        return phi @ self.tril

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_recorded and phi.dim() == 2 and self.loc.dim() == 1:
            return _DenseMoments.apply(phi, self.loc, self.tril, self.is_lower)[:2]
        return super().moments(phi)

    def scale(self, v: Tensor) -> Tensor:
        return times(self.tril, v)

    def unscale(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.tril, v[..., None], upper=False)[..., 0]

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self.tril.square().sum((-2, -1)), 2 * self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class CovarianceFactor(DenseFactor):
    """N(m, S) by S itself, with a root of it where one is asked for, as draws do.

    :param covariance: S, ``(M, M)``.
    :param trace: tr S.
    :param log_det: log|S|.
    :param root: gives a lower L with S = LLᵀ.
    """

    def __init__(
        self, loc: Tensor, covariance: Tensor, trace: Tensor, log_det: Tensor, root: Callable[[], Tensor]
    ) -> None:
        Factor.__init__(self, loc)
        self.covariance, self._trace, self._log_det, self._root = covariance, trace, log_det, root

    @functools.cached_property
    def tril(self) -> Tensor:  # type: ignore[override]
        """L, ``(M, M)``."""
        return self._root()

    def moments_by(self, phi: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`moments` of Φ, ``(N, M)``, from a given S."""
        return _CovarianceMoments.apply(phi, self.loc, covariance)[:2]

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self._trace, self._log_det


class DiagonalFactor(Factor):
    """N(m, S) of independent coefficients, S = diag(s²).

    :param scale_diag: s, ``(..., M)``.
    """

    def __init__(self, loc: Tensor, scale_diag: Tensor) -> None:
        super().__init__(loc)
        self.scale_diag = scale_diag

    def scaled(self, phi: Tensor) -> Tensor:
        return phi * self.scale_diag[..., None, :]

    def scale(self, v: Tensor) -> Tensor:
        return self.scale_diag * v

    def unscale(self, v: Tensor) -> Tensor:
        return v / self.scale_diag

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self.scale_diag.square().sum(-1), 2 * self.scale_diag.log().sum(-1)

    def variance_change(self, phi: Tensor) -> Tensor:
        return (phi.square() @ (self.scale_diag.square() - 1)[..., None])[..., 0]

    def select(self, index: Tensor) -> Factor:
        return DiagonalFactor(self.loc[..., index], self.scale_diag[..., index])


class IdentityFactor(Factor):
    """N(m, I): only the mean is free, and the variance stays the prior's."""

    def scaled(self, phi: Tensor) -> Tensor:
        return phi

    def scale(self, v: Tensor) -> Tensor:
        return v

    def unscale(self, v: Tensor) -> Tensor:
        return v

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        num = self.loc.shape[-1]
        return self.loc.new_full((), num), self.loc.new_zeros(())

    def variance_change(self, phi: Tensor) -> Tensor:
        return phi.new_zeros(phi.shape[:-1])

    def covariance_change(self, phi: Tensor) -> Tensor:
        return phi.new_zeros(*phi.shape[:-1], phi.shape[-2])

    def select(self, index: Tensor) -> Factor:
        return IdentityFactor(self.loc[..., index])


class Product(Gaussian):
    """q(w) = Π_g N(w_g; m_g, S_g), independent factors, each over consecutive blocks.

    :param sizes: the sizes M_b of the blocks of w.
    :param factors: the factors, in order.
    :param groups: the blocks that each factor covers; together, in order, all of them.
    """

    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor], groups: Sequence[Sequence[int]]) -> None:
        self.sizes, self.factors, self.groups = tuple(sizes), list(factors), list(map(tuple, groups))
        first, *others = self.factors or (None,)
        self.batch_shape = torch.Size() if first is None else first.batch_shape
        for factor in others:
            self.batch_shape = broadcast_shapes(self.batch_shape, factor.batch_shape)

    @property
    def loc(self) -> list[Tensor]:
        return self._split([factor.loc for factor in self.factors])

    def _split(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if len(self.sizes) == 1:
            return list(parts)
        return [
            block for part, group in zip(parts, self.groups) for block in part.split([self.sizes[b] for b in group], -1)
        ]

    def _join(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        return list(blocks) if len(blocks) == 1 else _joined(blocks, self.groups)

    def mean(self, features: Sequence[Tensor]) -> Tensor:
        return _sum((phi @ f.loc[..., None])[..., 0] for f, phi in zip(self.factors, self._join(features)))

    def variance_change(self, features: Sequence[Tensor]) -> Tensor:
        return _sum(f.variance_change(phi) for f, phi in zip(self.factors, self._join(features)))

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self._moments(self._join(features))

    def moments_by(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        return self._moments(phi.split([sum(self.sizes[b] for b in group) for group in self.groups], -1))

    def _moments(self, joined: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        parts = [f.moments(phi) for f, phi in zip(self.factors, joined)]
        means, changes = zip(*parts) if parts else ((), ())
        return _sum(means), _sum(changes)

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return _sum(f.covariance_change(phi) for f, phi in zip(self.factors, self._join(features)))

    def covariance_times(self, v: Sequence[Tensor]) -> list[Tensor]:
        parts = zip(self.factors, self._join(v))
        return self._split([factor.scale(factor.scaled(part[..., None, :])[..., 0, :]) for factor, part in parts])

    def kl(self) -> Tensor:
        return _sum([factor.kl() for factor in self.factors])

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        return self._split([factor.rsample(shape) for factor in self.factors])

    def log_ratio(self, w: Sequence[Tensor]) -> Tensor:
        return _sum(f.log_ratio(part) for f, part in zip(self.factors, self._join(w)))

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        wanted = set(blocks)
        factors: list[Factor] = []
        groups: list[list[int]] = []
        count = itertools.count()
        for factor, group in zip(self.factors, self.groups):
            kept = [b for b in group if b in wanted]
            if not kept:
                continue
            if len(kept) < len(group):
                edges = list(itertools.accumulate((self.sizes[b] for b in group), initial=0))
                rows = [torch.arange(edges[i], edges[i + 1]) for i, b in enumerate(group) if b in wanted]
                factor = factor.select(torch.cat(rows).to(factor.loc.device))
            factors.append(factor)
            groups.append([next(count) for _ in kept])
        return Product([self.sizes[b] for b in sorted(wanted)], factors, groups)

    @property
    def covariance_matrix(self) -> Tensor:
        blocks = []
        for factor in self.factors:
            root = factor.scaled(torch.eye(factor.loc.shape[-1], dtype=factor.loc.dtype, device=factor.loc.device))
            blocks.append(root @ root.mT)
        num = sum(self.sizes)
        total = self.factors[0].loc.new_zeros(*self.batch_shape, num, num) if self.factors else torch.zeros(0, 0)
        return on_diagonal(blocks, total)


def _joined(blocks: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """The blocks of each group, side by side."""
    return [side_by_side([blocks[b] for b in group]) for group in groups]


def _sum(values: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values) if (values := list(values)) else torch.zeros(())


class _Factored(Coefficients):
    """Coefficients as a product of factors; subclasses say which factor covers which blocks."""

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor) -> None:
        super().__init__(sizes, batch_shape, like)
        self.sizes = tuple(sizes)
        self.kinds: list[type[Factor]] = []
        self.groups: list[tuple[int, ...]] = []
        for i, (kind, group) in enumerate(self.layout(len(self.sizes))):
            num = sum(self.sizes[b] for b in group)
            self.kinds.append(kind)
            self.groups.append(tuple(group))
            # At the prior, m = 0, S = I (Shi et al., 2020, appendix G), until start says more.
            setattr(self, f"loc_{i}", PyroParam(like.new_zeros(*batch_shape, num)))
            if kind is DenseFactor:
                eye = torch.eye(num, dtype=like.dtype, device=like.device).expand(*batch_shape, num, num)
                setattr(self, f"scale_tril_{i}", PyroParam(eye.clone(), constraints.lower_cholesky))
            elif kind is DiagonalFactor:
                setattr(self, f"scale_diag_{i}", PyroParam(like.new_ones(*batch_shape, num), constraints.positive))

    def start(self, anchor: Optional[Tensor], features: Optional[Sequence[Tensor]]) -> None:
        """Start each factor at (I + λΦᵀΦ)⁻¹ of its blocks; it was made at the prior."""
        if features is None:
            return
        for i, (kind, own) in enumerate(zip(self.kinds, _joined(features, self.groups))):
            if kind is DenseFactor:
                self.put(f"scale_tril_{i}", root_of_inverse(own.mT @ own))
            elif kind is DiagonalFactor:
                self.put(f"scale_diag_{i}", (1 + own.square().sum(-2)).rsqrt())

    def start_mean(self, anchor: Optional[Tensor], loc: Tensor) -> None:
        """Start each factor at the mean of its blocks."""
        for i, own in enumerate(_joined(loc.split(self.sizes, -1), self.groups)):
            self.put(f"loc_{i}", own)

    @staticmethod
    def layout(num_blocks: int) -> list[tuple[type[Factor], tuple[int, ...]]]:
        """The factors, each with the blocks it covers."""
        raise TypeError("subclasses say which factor covers which blocks")

    def forward(self, anchor: Optional[Tensor] = None) -> Product:
        factors: list[Factor] = []
        for i, kind in enumerate(self.kinds):
            loc = getattr(self, f"loc_{i}")
            if kind is DenseFactor:
                factors.append(DenseFactor(loc, getattr(self, f"scale_tril_{i}")))
            elif kind is DiagonalFactor:
                factors.append(DiagonalFactor(loc, getattr(self, f"scale_diag_{i}")))
            else:
                factors.append(IdentityFactor(loc))
        return Product(self.sizes, factors, self.groups)


class FullCholesky(_Factored):
    """N(m, S) with one full covariance over all blocks, S = LLᵀ: M + M(M + 1)/2 numbers (Hensman et al., 2013)."""

    @staticmethod
    def layout(num_blocks: int) -> list[tuple[type[Factor], tuple[int, ...]]]:
        return [(DenseFactor, tuple(range(num_blocks)))]


class BlockCholesky(_Factored):
    """N(m, S) with a full covariance within each block, none between blocks: S = blockdiag(L_bL_bᵀ)."""

    @staticmethod
    def layout(num_blocks: int) -> list[tuple[type[Factor], tuple[int, ...]]]:
        return [(DenseFactor, (b,)) for b in range(num_blocks)]


class Diagonal(_Factored):
    """N(m, S) of independent coefficients, S = diag(s²)."""

    @staticmethod
    def layout(num_blocks: int) -> list[tuple[type[Factor], tuple[int, ...]]]:
        return [(DiagonalFactor, tuple(range(num_blocks)))]


class Identity(_Factored):
    """N(m, I): the prior's covariance, only the mean is free."""

    @staticmethod
    def layout(num_blocks: int) -> list[tuple[type[Factor], tuple[int, ...]]]:
        return [(IdentityFactor, tuple(range(num_blocks)))]


class CholeskyIdentity(_Factored):
    """N(m, S) with a full covariance of the first block and the prior's for the others: S = blockdiag(LLᵀ, I, …).

    As in orthogonally decoupled bases (Salimbeni, Cheng, Boots and Deisenroth, 2018).
    """

    @staticmethod
    def layout(num_blocks: int) -> list[tuple[type[Factor], tuple[int, ...]]]:
        return [(DenseFactor, (0,)), *((IdentityFactor, (b,)) for b in range(1, num_blocks))]
