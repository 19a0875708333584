"""Independent Gaussian factors N(m, S), S = RRᵀ, that products are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints

from ..numerics.arguments import Documented
from ..numerics.functions import Unmapped
from ..numerics.linalg import cholesky, gram, plus_one, root_of_inverse, row_squares, solve_lower, times
from .base import Stack, each_times
from .steps import is_recording


class Factor(Documented):
    """One independent N(m, S) of a :class:`Product`, over M coefficients, by a root R of S = RRᵀ.

    :param loc: m, ``(..., M)``.
    """

    root: Any  # R, triangular, ``(..., M, M)``
    upper = False  # whether it is upper triangular

    free: ClassVar[dict[str, Any]] = {}  # by name the constraint of what is free beside the mean

    def __init__(self, loc: Tensor) -> None:
        self.loc, self.batch_shape = loc, loc.shape[:-1]

    def scaled(self, phi: Tensor) -> Tensor:
        """ΦR, ``(..., N, M)``."""
        return phi @ self.root

    def unscale(self, v: Tensor) -> Tensor:
        """A vector whose square is vᵀS⁻¹v."""
        return torch.linalg.solve_triangular(self.root, v[..., None], upper=self.upper)[..., 0]

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        """tr S and log|S|."""
        # tr RRᵀ = ‖R‖², log|RRᵀ| = 2 Σ log R_mm
        return self.root.square().sum((-2, -1)), 2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def covariance(self, phi: Tensor) -> Tensor:
        """ΦSΦᵀ, ``(..., N, N)``."""
        scaled = self.scaled(phi)
        return scaled @ scaled.mT

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Φm and diag(Φ(S − I)Φᵀ)."""
        return (phi @ self.loc[..., None])[..., 0], row_squares(self.scaled(phi)) - row_squares(phi)

    def joint_moments(self, phi: Any) -> tuple[Tensor, Tensor]:
        """Φm, ``(N, K)``, and Φ(S − I)Φᵀ, ``(N, K, K)``, of K functions at each of N inputs, ``(N, K, M)``."""
        return phi @ self.loc, self.covariance(phi) - phi @ phi.mT

    @property
    def covariance_matrix(self) -> Tensor:
        """S, formed, ``(..., M, M)``."""
        return self.covariance(torch.eye(self.loc.shape[-1], dtype=self.loc.dtype, device=self.loc.device))

    def select(self, index: Tensor) -> Factor:
        """The marginal of some of the coefficients."""
        covariance = self.covariance_matrix[..., index, :][..., index]
        return DenseFactor(self.loc[..., index], cholesky(covariance, 0.0, "a marginal covariance of coefficients"))

    def kl(self) -> Tensor:
        """KL[N(m, S) ‖ N(0, I)] = ½(tr S + mᵀm − M − log|S|), in nats."""
        trace, log_det = self.trace_and_log_det()
        return 0.5 * (trace + self.loc.square().sum(-1) - self.loc.shape[-1] - log_det)

    def noise(self, shape: torch.Size) -> Tensor:
        """Draws of w − m, ``(*shape, M)``."""
        return times(self.root, torch.randn(*shape, self.loc.shape[-1], dtype=self.loc.dtype, device=self.loc.device))

    def log_ratio(self, w: Tensor) -> Tensor:
        """log N(w; m, S) − log N(w; 0, I)."""
        _, log_det = self.trace_and_log_det()
        # ½(‖w‖² − (w − m)ᵀS⁻¹(w − m) − log|S|)
        return 0.5 * (w.square().sum(-1) - self.unscale(w - self.loc).square().sum(-1) - log_det)


class _Moments(Unmapped):
    """Φm and diag(Φ(S − I)Φᵀ) of unbatched Φ; the last output, Φ(S − I), is for the way back."""

    @staticmethod
    def forward(phi: Tensor, loc: Tensor, covariance: Tensor) -> tuple[Tensor, ...]:
        scaled = (phi @ covariance).sub_(phi)
        return phi @ loc, torch.linalg.vecdot(scaled, phi), scaled

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:2], output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # a matrix of zeros for the last output

    # Autograd's own way back adds up four matrices of Φ's size; this one makes the sum in place,
    #     Φ̄ = 2 diag(c)Φ(S − I) + a mᵀ
    # for gradients a by the means and c by the variances. The gradient by S, Φᵀ diag(c) Φ, is half of a natural step's
    # sum of sites.

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], c: Optional[Tensor], _: object) -> Any:
        phi, loc, scaled = ctx.saved_tensors
        a, c = phi.new_zeros(len(phi)) if a is None else a, phi.new_zeros(len(phi)) if c is None else c
        by_covariance = gram(phi, phi * c[:, None]) if ctx.needs_input_grad[2] else None
        return ((2 * c)[:, None] * scaled).addr_(a, loc), a @ phi, by_covariance


class _JointMoments(_Moments):
    """As :class:`_Moments`, of Φ, ``(N, K, M)``: Φm and Φ(S − I)Φᵀ."""

    @staticmethod
    def forward(phi: Tensor, loc: Tensor, covariance: Tensor) -> tuple[Tensor, ...]:
        scaled = (phi.flatten(0, 1) @ covariance).view_as(phi).sub_(phi)
        return phi @ loc, scaled @ phi.mT, scaled

    # Φ̄ = (H + Hᵀ)Φ(S − I) + a mᵀ for gradients a by the means and H by the covariances, and S̄ = ½Φᵀ(H + Hᵀ)Φ.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Optional[Tensor], h: Optional[Tensor], _: object) -> Any:
        phi, loc, scaled = ctx.saved_tensors
        a = phi.new_zeros(phi.shape[:-1]) if a is None else a
        twice = phi.new_zeros(()).expand(*phi.shape[:-1], phi.shape[-2]) if h is None else h + h.mT
        by_covariance = gram(phi.flatten(0, 1), (0.5 * twice @ phi).flatten(0, 1))
        return (twice @ scaled).addcmul_(a[..., None], loc), a.flatten() @ phi.flatten(0, 1), by_covariance


class DenseFactor(Factor):
    """N(m, S) with a full covariance, S = RRᵀ, of a triangular R, ``(..., M, M)``, ``upper`` or lower."""

    free: ClassVar = {"scale_tril": constraints.lower_cholesky}

    def __init__(self, loc: Tensor, root: Tensor, upper: bool = False) -> None:
        super().__init__(loc)
        self.root, self.upper = root, upper
        # Known from the start: rows whose features are made again on the way back take the same way.
        self.is_recording = is_recording()

    @staticmethod
    def scale_of(phi: Tensor) -> Tensor:
        """What is free where S starts at (I + ΦᵀΦ)⁻¹; without rows, at the prior's."""
        return root_of_inverse(plus_one(phi.mT @ phi))

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        # In a step by S = RRᵀ, once differentiable: SGPR's takes 10 ms for 15, of 5,000 rows and 50 coefficients.
        if self.is_recording and phi.dim() == 2 and self.loc.dim() == 1:
            return _Moments.apply(phi, self.loc, self.root @ self.root.mT)[:2]
        return super().moments(phi)


class CovarianceFactor(DenseFactor):
    """N(m, S) by S itself, ``(M, M)``, tr S and log|S|, with a lower R, S = RRᵀ, where draws ask for one."""

    def __init__(
        self, loc: Tensor, matrix: Tensor, trace: Tensor, log_det: Tensor, root_of: Callable[[], Tensor]
    ) -> None:
        Factor.__init__(self, loc)
        self.matrix, self._trace, self._log_det, self._root_of = matrix, trace, log_det, root_of

    @functools.cached_property
    def root(self) -> Tensor:  # type: ignore[override]
        """R, ``(M, M)``."""
        return self._root_of()

    def covariance(self, phi: Tensor) -> Tensor:
        # whose gradient by S is symmetric, as natural steps want it
        return phi @ (0.5 * (self.matrix + self.matrix.mT)) @ phi.mT

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        if phi.dim() == 2:
            return _Moments.apply(phi, self.loc, self.matrix)[:2]
        return times(phi, self.loc), ((phi @ self.matrix - phi) * phi).sum(-1)

    def joint_moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        return _JointMoments.apply(phi, self.loc, self.matrix)[:2]

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        return self._trace, self._log_det


class DiagonalFactor(Factor):
    """N(m, S) of independent coefficients, S = diag(s²) of s, ``(..., M)``."""

    free: ClassVar = {"scale_diag": constraints.positive}

    def __init__(self, loc: Tensor, scale_diag: Tensor) -> None:
        super().__init__(loc)
        self.scale_diag = scale_diag

    @staticmethod
    def scale_of(phi: Tensor) -> Tensor:
        # s² = 1/(1 + ‖φ_m‖²), the diagonal of I + ΦᵀΦ alone
        return (1 + phi.square().sum(-2)).rsqrt()

    @property
    def root(self) -> Tensor:  # type: ignore[override]
        return torch.diag_embed(self.scale_diag)

    def scaled(self, phi: Tensor) -> Tensor:
        return phi * self.scale_diag[..., None, :]

    def unscale(self, v: Tensor) -> Tensor:
        return v / self.scale_diag

    def noise(self, shape: torch.Size) -> Tensor:
        return self.scale_diag * torch.randn(*shape, self.loc.shape[-1], dtype=self.loc.dtype, device=self.loc.device)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        # tr S = Σ s², log|S| = 2 Σ log s
        return self.scale_diag.square().sum(-1), 2 * self.scale_diag.log().sum(-1)


class IdentityFactor(DiagonalFactor):
    """N(m, I): only the mean is free, and the variance stays the prior's."""

    free: ClassVar = {}

    def __init__(self, loc: Tensor) -> None:
        Factor.__init__(self, loc)

    @property
    def scale_diag(self) -> Tensor:  # type: ignore[override]
        """s = 1."""
        return torch.ones_like(self.loc)


class ShiftFactor(IdentityFactor):
    """N(√κ, 1) over one coefficient, a free mean function of known norm; KL = κ/2.

    :param square: gives κ, ``(...,)``; ``estimate``: gives an unbiased estimate of it, for a training step.
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


class LowRankFactor(Factor):
    """N(m, S) with S⁻¹ = blockdiag((L_bL_bᵀ)⁻¹) + L⁻ᵀBBᵀL⁻¹ of stacked L and B, "block plus low rank".

    :param b: B, ``(..., C, M, R)``.
    :param tril: L, ``(..., C, M, M)``.
    """

    # B = 0 is the block-diagonal mean field, L = I eq. 7 of Adam, Durrande and John, 2018. With L_aL_aᵀ = I + BᵀB and
    # T = L_a⁻¹Bᵀ, S = L(I − TᵀT)Lᵀ: nothing of size (ΣM_b)² is formed, storage and the divergence's cost are linear in
    # the number of blocks.

    def __init__(self, stack: Stack, loc: Tensor, b: Tensor, tril: Tensor) -> None:
        super().__init__(loc)
        self.stack, self.b, self.tril = stack, b, tril
        self._flat = b.flatten(-3, -2)
        # I + BᵀB has eigenvalues of at least 1: no jitter.
        self.inner = cholesky(plus_one(self._flat.mT @ self._flat), 0.0, "I + BᵀB of a low-rank precision")
        # T = L_a⁻¹Bᵀ: (I + BBᵀ)⁻¹ = I − TᵀT (Woodbury)
        self._t = solve_lower(self.inner, self._flat.mT)  # (..., R, C·M)

    @functools.cached_property
    def low_rank(self) -> Tensor:
        """V = LTᵀ, ``(..., C·M, R)``: S = LLᵀ − VVᵀ."""
        return each_times(self.tril, self.stack.cut(self._t.mT)).flatten(-3, -2)

    def _scaled(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """ΦL of each block, ``(..., C, N, M)``, and ΦV, of a wide Φ."""
        return each_times(self.stack.cut(phi.mT).mT, self.tril), phi @ self.low_rank

    def moments(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        mean, phi = (phi @ self.loc[..., None])[..., 0], self.stack.wide(phi)
        own, coupled = self._scaled(phi)
        # diag(Φ(LLᵀ − VVᵀ − I)Φᵀ)
        return mean, row_squares(own).sum(-2) - row_squares(coupled) - row_squares(phi)

    def covariance(self, phi: Tensor) -> Tensor:
        own, coupled = self._scaled(self.stack.wide(phi))
        own = own.transpose(-3, -2).flatten(-2)
        # Φ(LLᵀ − VVᵀ)Φᵀ
        return own @ own.mT - coupled @ coupled.mT

    @property
    def covariance_matrix(self) -> Tensor:
        return self.stack.dense(each_times(self.tril, self.tril.mT), self.low_rank, -1)

    def times(self, v: Tensor) -> Tensor:
        """Sv = L(I − TᵀT)Lᵀv of a vector."""
        scaled = each_times(self.tril.mT, self.stack.columns(v)).flatten(-3, -2)
        # (I − TᵀT)Lᵀv
        scaled = scaled - self._t.mT @ (self._t @ scaled)
        return self.stack.narrow(each_times(self.tril, self.stack.cut(scaled)).flatten(-3))

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        # tr S = ‖L‖² − ‖V‖²
        trace = self.tril.square().sum((-3, -2, -1)) - self.low_rank.square().sum((-2, -1))
        own = self.tril.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
        # log|S| = 2 log|L| − log|I + BᵀB|; beyond a block's own size L is I
        log_det = 2 * (own - self.inner.diagonal(dim1=-2, dim2=-1).log().sum(-1))
        return trace - self.stack.num_beyond, log_det

    def noise(self, shape: torch.Size) -> Tensor:
        # ε + Bη has covariance P = I + BBᵀ, so v = P⁻¹(ε + Bη) has covariance P⁻¹; P⁻¹ = I − TᵀT.
        eta = torch.randn(*shape, self._flat.shape[-1], 1, dtype=self.loc.dtype, device=self.loc.device)
        noise = torch.randn(*shape, *self.tril.shape[-3:-1], 1, dtype=self.loc.dtype, device=self.loc.device)
        noise = noise.flatten(-3, -2) + self._flat @ eta
        v = noise - self._t.mT @ (self._t @ noise)
        return self.stack.narrow((self.tril @ self.stack.cut(v)).flatten(-3))

    def unscale(self, v: Tensor) -> Tensor:
        # v ← L⁻¹v: vᵀS⁻¹v = ‖v‖² + ‖Bᵀv‖²
        v = solve_lower(self.tril, self.stack.columns(v)).flatten(-3, -2)
        # [v; Bᵀv]
        return torch.cat([v, self._flat.mT @ v], -2)[..., 0]
