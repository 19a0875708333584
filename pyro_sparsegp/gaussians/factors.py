"""Independent Gaussian factors N(m, S), S = RRᵀ, that products are made of."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints

from ..numerics.functions import Function
from ..numerics.linalg import (
    cholesky,
    gaussian_kl,
    gram,
    root_of_inverse,
    row_squares,
    times,
    times_lower,
    times_upper,
    tril_of_product,
)
from .documented import Documented
from .record import recorded

__all__ = [
    "ConditionalFactor",
    "CovarianceFactor",
    "DenseFactor",
    "DiagonalFactor",
    "Factor",
    "IdentityFactor",
    "PrecisionFactor",
    "ShiftFactor",
]


class Factor(Documented, ABC):
    """One independent N(m, S) of a :class:`Product`, over M coefficients.

    :param loc: m, ``(..., M)``.
    """

    # What is free in it beside the mean: its name, its constraint, and where it starts at the prior and at data.
    scale_name: ClassVar[Optional[str]] = None
    constraint: ClassVar[Any] = None

    def __init__(self, loc: Tensor) -> None:
        self.loc, self.batch_shape = loc, loc.shape[:-1]

    @staticmethod
    def scale_of(phi: Tensor) -> Tensor:
        """What is free where S starts at (I + ΦᵀΦ)⁻¹; without rows, at the prior's."""
        raise TypeError("this factor's covariance is not free")

    @abstractmethod
    def covariance(self, phi: Tensor) -> Tensor:
        """ΦSΦᵀ, ``(..., N, N)``."""

    @abstractmethod
    def variance_change(self, phi: Tensor) -> Tensor:
        """diag(Φ(S − I)Φᵀ)."""

    @abstractmethod
    def noise(self, shape: torch.Size) -> Tensor:
        """Draws of w − m, ``(*shape, M)``."""

    @abstractmethod
    def unscale(self, v: Tensor) -> Tensor:
        """A vector whose square is vᵀS⁻¹v."""

    @abstractmethod
    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        """tr S and log|S|."""

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Φm and diag(Φ(S − I)Φᵀ)."""
        return (phi @ self.loc[..., None])[..., 0], self.variance_change(phi)

    def covariance_change(self, phi: Tensor) -> Tensor:
        """Φ(S − I)Φᵀ."""
        return self.covariance(phi) - phi @ phi.mT

    @property
    def covariance_matrix(self) -> Tensor:
        """S, formed, ``(..., M, M)``."""
        return self.covariance(self._eye)

    @property
    def _eye(self) -> Tensor:
        return torch.eye(self.loc.shape[-1], dtype=self.loc.dtype, device=self.loc.device)

    def select(self, index: Tensor) -> Factor:
        """The marginal of some of the coefficients."""
        covariance = self.covariance(self._eye[index])
        return DenseFactor(self.loc[..., index], cholesky(covariance, 0.0, "a marginal covariance of coefficients"))

    def kl(self) -> Tensor:
        """KL[N(m, S) ‖ N(0, I)]."""
        return gaussian_kl(self.loc, *self.trace_and_log_det())

    def rsample(self, shape: torch.Size) -> Tensor:
        """Draws of w, ``(*shape, M)``."""
        return self.loc + self.noise(shape)

    def log_ratio(self, w: Tensor) -> Tensor:
        """log N(w; m, S) − log N(w; 0, I)."""
        _, log_det = self.trace_and_log_det()
        # ½(‖w‖² − (w − m)ᵀS⁻¹(w − m) − log|S|)
        return 0.5 * (w.square().sum(-1) - self.unscale(w - self.loc).square().sum(-1) - log_det)


class _Rooted(Factor):
    """A factor by products with a root R of S = RRᵀ."""

    @abstractmethod
    def scaled(self, phi: Tensor) -> Tensor:
        """ΦR, ``(..., N, M)``."""

    @abstractmethod
    def scale(self, v: Tensor) -> Tensor:
        """Rv, ``(..., M)``."""

    def covariance(self, phi: Tensor) -> Tensor:
        scaled = self.scaled(phi)
        return scaled @ scaled.mT

    def variance_change(self, phi: Tensor) -> Tensor:
        return row_squares(self.scaled(phi)) - row_squares(phi)

    def noise(self, shape: torch.Size) -> Tensor:
        return self.scale(torch.randn(*shape, self.loc.shape[-1], dtype=self.loc.dtype, device=self.loc.device))

    @property
    def root(self) -> Tensor:
        """R, formed, ``(..., M, M)``."""
        return self.scaled(self._eye)


class _OfRows(Function):
    """Moments of unbatched Φ. Of its three outputs the last, for the way back, has no gradient."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.is_lower = inputs
        ctx.save_for_backward(*tensors, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # a matrix of zeros for the third output

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise ValueError("q(w) does not depend on quadrature nodes")


class _DenseMoments(_OfRows):
    """Φm and diag(Φ(RRᵀ − I)Φᵀ) of a triangular R; its gradient means nothing where R is 0.

    Autograd's own way back adds up four matrices of Φ's size; this one makes the sum in place,
    dΦ = 2 diag(c)(ΦRRᵀ − Φ) + a mᵀ for gradients a of the means and c of the variances.
    """

    @staticmethod
    def forward(phi: Tensor, loc: Tensor, root: Tensor, is_lower: bool) -> tuple[Tensor, Tensor, Tensor]:
        scaled = times_lower(phi, root) if is_lower else times_upper(phi, root.mT)
        norm = torch.linalg.vector_norm  # reads its matrix once; a square makes another
        return phi @ loc, norm(scaled, dim=-1).square_().sub_(norm(phi, dim=-1).square_()), scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], c: Optional[Tensor], _: Any) -> Any:
        phi, loc, root, scaled = ctx.saved_tensors
        a, c = (phi.new_zeros(len(phi)) if grad is None else grad for grad in (a, c))
        needs, each = ctx.needs_input_grad, (2 * c)[:, None]
        # 2 diag(c)ΦR, and times Rᵀ
        weighted = scaled * each
        by_phi = times_upper(weighted, root) if ctx.is_lower else times_lower(weighted, root.mT)
        by_phi = by_phi.addcmul_(phi, each, value=-1).addr_(a, loc)
        # dR = 2Φᵀ diag(c) ΦR, its triangle
        first, second = (phi, weighted) if ctx.is_lower else (weighted, phi)
        by_root = tril_of_product(first, second) if needs[2] else None
        by_root = by_root if ctx.is_lower or by_root is None else by_root.mT
        return by_phi, a @ phi if needs[1] else None, by_root, None


class _CovarianceMoments(_OfRows):
    """Φm and diag(Φ(S − I)Φᵀ) of a symmetric S. The gradient by S, Φᵀ diag(c) Φ, is half of a natural step's sum of
    sites.
    """

    @staticmethod
    def forward(phi: Tensor, loc: Tensor, covariance: Tensor, is_lower: bool) -> tuple[Tensor, Tensor, Tensor]:
        # Φ(S − I), of which each row meets its φ
        scaled = (phi @ covariance).sub_(phi)
        return phi @ loc, torch.linalg.vecdot(scaled, phi), scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], c: Optional[Tensor], _: Any) -> Any:
        phi, loc, _, scaled = ctx.saved_tensors
        a, c = (phi.new_zeros(len(phi)) if grad is None else grad for grad in (a, c))
        needs = ctx.needs_input_grad
        # dS = Φᵀ diag(c) Φ and dΦ = 2 diag(c)Φ(S − I) + a mᵀ
        by_covariance = gram(phi, phi * c[:, None]) if needs[2] else None
        return ((2 * c)[:, None] * scaled).addr_(a, loc), a @ phi if needs[1] else None, by_covariance, None


class DenseFactor(_Rooted):
    """N(m, S) with a full covariance, S = LLᵀ.

    :param tril: L, ``(..., M, M)``.
    """

    scale_name, constraint = "scale_tril", constraints.lower_cholesky
    is_lower: ClassVar[bool] = True  # R, rather than upper triangular
    is_recorded = False

    def __init__(self, loc: Tensor, tril: Tensor) -> None:
        super().__init__(loc)
        self.tril = tril
        # Known from the start: rows whose features are made again on the way back take the same way,
        # test_deep_basis.py::test_blocks_change_nothing.
        self.is_recorded = recorded() is not None

    @staticmethod
    def scale_of(phi: Tensor) -> Tensor:
        return root_of_inverse(phi.mT @ phi)

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
        # tr LLᵀ = ‖L‖², log|LLᵀ| = 2 Σ log L_mm
        return self.tril.square().sum((-2, -1)), 2 * self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class PrecisionFactor(DenseFactor):
    """N(m, S) by its precision, S = (LLᵀ)⁻¹, with R = L⁻ᵀ formed: tr S wants it, and a product costs less than a
    triangular solve.

    :param factor: L, ``(..., M, M)``.
    """

    is_lower = False

    def __init__(self, loc: Tensor, factor: Tensor) -> None:
        eye = torch.eye(loc.shape[-1], dtype=factor.dtype, device=factor.device)
        super().__init__(loc, torch.linalg.solve_triangular(factor, eye, upper=False, left=False).mT)
        self.factor = factor

    def unscale(self, v: Tensor) -> Tensor:
        # R⁻¹ = Lᵀ
        return times(self.factor.mT, v)


class CovarianceFactor(DenseFactor):
    """N(m, S) by S itself, with a root of it where one is asked for, as draws do.

    :param matrix: S, ``(M, M)``.
    :param trace: tr S.
    :param log_det: log|S|.
    :param root_of: gives a lower L with S = LLᵀ.
    """

    def __init__(
        self, loc: Tensor, matrix: Tensor, trace: Tensor, log_det: Tensor, root_of: Callable[[], Tensor]
    ) -> None:
        Factor.__init__(self, loc)
        self.matrix, self._trace, self._log_det, self._root_of = matrix, trace, log_det, root_of

    @functools.cached_property
    def tril(self) -> Tensor:  # type: ignore[override]
        """L, ``(M, M)``."""
        return self._root_of()

    def covariance(self, phi: Tensor) -> Tensor:
        # whose gradient by S is symmetric, as natural steps want it
        return phi @ (0.5 * (self.matrix + self.matrix.mT)) @ phi.mT

    def variance_change(self, phi: Tensor) -> Tensor:
        return self.moments_by(phi, self.matrix)[1]

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        return self.moments_by(phi, self.matrix)

    def moments_by(self, phi: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`moments` from a given S."""
        if phi.dim() == 2:
            return _CovarianceMoments.apply(phi, self.loc, matrix, True)[:2]
        return times(phi, self.loc), ((phi @ matrix - phi) * phi).sum(-1)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self._trace, self._log_det


class DiagonalFactor(_Rooted):
    """N(m, S) of independent coefficients, S = diag(s²).

    :param scale_diag: s, ``(..., M)``.
    """

    scale_name, constraint = "scale_diag", constraints.positive

    def __init__(self, loc: Tensor, scale_diag: Tensor) -> None:
        super().__init__(loc)
        self.scale_diag = scale_diag

    @staticmethod
    def scale_of(phi: Tensor) -> Tensor:
        return (1 + phi.square().sum(-2)).rsqrt()

    def scaled(self, phi: Tensor) -> Tensor:
        return phi * self.scale_diag[..., None, :]

    def scale(self, v: Tensor) -> Tensor:
        return self.scale_diag * v

    def unscale(self, v: Tensor) -> Tensor:
        return v / self.scale_diag

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self.scale_diag.square().sum(-1), 2 * self.scale_diag.log().sum(-1)

    def variance_change(self, phi: Tensor) -> Tensor:
        # Σ_m φ_m²(s_m² − 1)
        return (phi.square() @ (self.scale_diag.square() - 1)[..., None])[..., 0]

    def select(self, index: Tensor) -> Factor:
        return DiagonalFactor(self.loc[..., index], self.scale_diag[..., index])


class IdentityFactor(_Rooted):
    """N(m, I): only the mean is free, and the variance stays the prior's."""

    def scaled(self, phi: Tensor) -> Tensor:
        return phi

    def scale(self, v: Tensor) -> Tensor:
        return v

    def unscale(self, v: Tensor) -> Tensor:
        return v

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self.loc.new_full((), self.loc.shape[-1]), self.loc.new_zeros(())

    def variance_change(self, phi: Tensor) -> Tensor:
        return phi.new_zeros(phi.shape[:-1])

    def covariance_change(self, phi: Tensor) -> Tensor:
        return phi.new_zeros(*phi.shape[:-1], phi.shape[-2])

    def select(self, index: Tensor) -> Factor:
        return IdentityFactor(self.loc[..., index])


class ShiftFactor(IdentityFactor):
    """N(√κ, 1) over one coefficient, a free mean function of known norm; KL = κ/2.

    :param square: gives κ, ``(...,)``, exactly.
    :param estimate: gives an unbiased estimate of κ, for a training step; draws, and what has no gradient,
        are exact.
    :param batch_shape: the shape of κ.
    """

    def __init__(self, square: Callable[[], Tensor], estimate: Callable[[], Tensor], batch_shape: torch.Size) -> None:
        self.square, self.estimate, self.batch_shape = square, estimate, batch_shape

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        """√κ, ``(..., 1)``."""
        return self.square().sqrt()[..., None]

    def kl(self) -> Tensor:
        # ½(tr S + m² − 1 − log|S|) with S = 1 and m² = κ
        return 0.5 * (self.estimate() if torch.is_grad_enabled() else self.square())


class ConditionalFactor(_Rooted):
    """(w, v) with w | v ~ N(m − Rv, S) and v ~ N(0, I), as under the prior: mean (m, 0), root [[L, −R], [0, I]].

    KL from N(0, I) is ½(tr S + tr RRᵀ + mᵀm − M − log|S|).

    :param head: N(m, S), S = LLᵀ.
    :param root: R, ``(..., M, M)``.
    """

    def __init__(self, head: DenseFactor, root: Tensor) -> None:
        super().__init__(torch.cat([head.loc, torch.zeros_like(head.loc)], -1))
        self.head, self.coupling = head, root

    def scaled(self, phi: Tensor) -> Tensor:
        first, second = phi.tensor_split(2, -1)
        # [Φ₁L, Φ₂ − Φ₁R], Φ times [[L, −R], [0, I]]
        return torch.cat([self.head.scaled(first), second - first @ self.coupling], -1)

    def scale(self, v: Tensor) -> Tensor:
        first, second = v.tensor_split(2, -1)
        return torch.cat([self.head.scale(first) - (self.coupling @ second[..., None])[..., 0], second], -1)

    def unscale(self, v: Tensor) -> Tensor:
        first, second = v.tensor_split(2, -1)
        # L⁻¹(w + Rv) of w − m, and v itself
        return torch.cat([self.head.unscale(first + (self.coupling @ second[..., None])[..., 0]), second], -1)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        trace, log_det = self.head.trace_and_log_det()
        # tr S + tr RRᵀ + M; the determinant is that of S
        return trace + self.coupling.square().sum((-2, -1)) + self.head.loc.shape[-1], log_det
