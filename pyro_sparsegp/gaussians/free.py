"""Gaussians over coefficients whose parameters are free, factor by factor, or blocks that a low rank couples; and the
posterior given projections of the data, in coordinates that never factorise SᵀKS.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Optional

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from ..numerics.linalg import plus_one, root_of_inverse, side_by_side, solve_lower
from .base import Coefficients, Given, Stack
from .factors import DenseFactor, DiagonalFactor, Factor, IdentityFactor, LowRankFactor
from .product import Product, slices

Layout = list[tuple[type[Factor], tuple[int, ...]]]


class _Factored(Coefficients):
    """Coefficients as a product of factors; subclasses say which factor covers which blocks."""

    kind: ClassVar[type[Factor]] = DenseFactor
    later: ClassVar[Optional[type[Factor]]] = None  # of blocks after the first; None where one factor covers all

    def __init__(self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor) -> None:
        super().__init__(sizes, batch_shape, like)
        layout = self.layout(len(self.sizes))
        self.kinds: list[Any] = [kind for kind, _ in layout]
        self.groups = [group for _, group in layout]
        for i, (kind, own) in enumerate(zip(self.kinds, slices(self.sizes, self.groups))):
            # At the prior, m = 0, S = I (Shi et al., 2020, appendix G), until start says more.
            nothing = like.new_zeros(*batch_shape, 1, own.stop - own.start)
            setattr(self, f"loc_{i}", PyroParam(nothing[..., 0, :].clone()))
            for name, constraint in kind.free.items():
                setattr(self, f"{name}_{i}", PyroParam(kind.scale_of(nothing), constraint))

    def start(self, anchor: Optional[Tensor], features: Sequence[Tensor]) -> None:
        """Start each factor at (I + λΦᵀΦ)⁻¹ of its blocks; it was made at the prior."""
        for i, (kind, group) in enumerate(zip(self.kinds, self.groups)):
            for name in kind.free:
                # (I + λΦ_bᵀΦ_b)⁻¹
                self.put(f"{name}_{i}", kind.scale_of(side_by_side([features[b] for b in group])))

    @classmethod
    def layout(cls, num_blocks: int) -> Layout:
        """The factors, each with the blocks it covers."""
        if cls.later is None:
            return [(cls.kind, tuple(range(num_blocks)))]
        return [(kind, (b,)) for b, kind in zip(range(num_blocks), [cls.kind, *[cls.later] * num_blocks])]

    def forward(self, anchor: Optional[Tensor] = None) -> Product:
        # a factor's own arguments are its mean and, where it is free, its scale
        kinds = enumerate(self.kinds)
        factors = [kind(*(getattr(self, f"{name}_{i}") for name in ("loc", *kind.free))) for i, kind in kinds]
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


def leading_directions(features: Sequence[Tensor], small: Tensor) -> tuple[Tensor, Tensor]:
    """U = ΦᵀP, ``(..., ΣM_b, R)``, for R orthonormal columns P that hold the leading directions of ΦᵀΦ; with zeros
    where the data have fewer, and with columns of a ``small`` random U there, which at 0 would have no gradient.
    """
    phi, random = side_by_side(features), small.to(features[0])
    found = random
    # By subspace iteration, P ← orth(ΦΦᵀP), U = ΦᵀP: UUᵀ is at most ΦᵀΦ. The level that plain kernels share is the
    # first direction, which B would find very slowly from a random start.
    for _ in range(5):
        found = phi.mT @ torch.linalg.qr(phi @ found)[0]  # (..., M, min(R, n))
    mixing = torch.linalg.svd(found, full_matrices=False)[2]
    found = found @ mixing.mT
    found = found * (found.norm(dim=-2) >= random[..., : found.shape[-1]].norm(dim=-2))[..., None, :]
    found = torch.nn.functional.pad(found, (0, random.shape[-1] - found.shape[-1]))
    return found, found.to(small) + small * (found == 0).all(-2, keepdim=True)


def small_columns(sizes: Sequence[int], batch_shape: Sequence[int], rank: Optional[int], like: Tensor) -> list[Tensor]:
    """Where B starts, a block ``(..., M_b, R)`` each: B = 0 is a saddle, small and random it is none."""
    rank = max(sizes) if rank is None else rank
    scale = 0.1 / max(sum(sizes) * rank, 1) ** 0.25
    return [scale * torch.randn(*batch_shape, num, rank, dtype=like.dtype, device=like.device) for num in sizes]


class _LowRank(Coefficients):
    """Parameters of a :class:`~.factors.LowRankFactor`, S = L(I + BBᵀ)⁻¹Lᵀ.

    :param rank: R, the number of columns of B; ``None`` is the size of the largest block, as in the paper.
    """

    base: bool

    def __init__(
        self, sizes: Sequence[int], batch_shape: Sequence[int], like: Tensor, rank: Optional[int] = None
    ) -> None:
        super().__init__(sizes, batch_shape, like)
        self._stack = Stack(sizes)
        for i, (num, b) in enumerate(zip(self.sizes, small_columns(sizes, batch_shape, rank, like))):
            setattr(self, f"loc_{i}", PyroParam(like.new_zeros(*batch_shape, num)))
            setattr(self, f"b_{i}", PyroParam(b))
            if self.base:
                eye = plus_one(like.new_zeros(*batch_shape, num, num))
                setattr(self, f"scale_tril_{i}", PyroParam(eye, constraints.lower_cholesky))

    def _each(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{i}") for i in range(len(self.sizes))]

    def start(self, anchor: Optional[Tensor], features: Sequence[Tensor]) -> None:
        """Start S⁻¹ at blockdiag(I + λΦᵀΦ), with UUᵀ between the blocks, the leading R directions of λΦᵀΦ."""
        found = leading_directions(features, torch.cat(self._each("b"), -2))
        for i, (phi, u, b) in enumerate(zip(features, *(part.split(self.sizes, -2) for part in found))):
            if self.base:
                # (I + ΦᵀΦ − UUᵀ)⁻¹ = LLᵀ of a block, and B = LᵀU
                root = root_of_inverse(plus_one(phi.mT @ phi - u @ u.mT))
                self.put(f"scale_tril_{i}", root)
                b = root.mT @ u + (b - u)
            self.put(f"b_{i}", b)

    def forward(self, anchor: Optional[Tensor] = None) -> Product:
        stack, b = self._stack, self._each("b")
        trils = self._each("scale_tril") if self.base else [torch.eye(block.shape[-2]).to(block) for block in b]
        factor = LowRankFactor(stack, side_by_side(self._each("loc")), stack.rows(b), stack.squares(trils))
        return Product(self.sizes, [factor], [range(len(self.sizes))])


class BlockPlusLowRank(_LowRank):
    """N(m, S) with S⁻¹ = blockdiag((L_bL_bᵀ)⁻¹) + L⁻ᵀBBᵀL⁻¹, block plus low rank; contains :class:`BlockCholesky`.

    L_b, lower triangular ``(..., M_b, M_b)``, and B, ``(..., M_b, R)`` a block, are free.
    """

    base = True


class IdentityPlusLowRank(_LowRank):
    """N(m, S) with S⁻¹ = I + BBᵀ, whitened (Adam, Durrande and John, 2018, eq. 7).

    B, ``(..., M_b, R)`` a block, is free. At a rank of one block's size it does not contain the mean field.
    """

    base = False


class ProjectedGaussian(Given):
    """f given ỹ = Sᵀ(z − μ) with ỹ = u + ε, u = Sᵀ(f(X) − μ), ε ~ N(0, D) (Wenger et al., 2024, algorithm S2).

    With RRᵀ = G = SᵀKS + D, the coordinates h = R⁻¹(u + ε) are N(0, I) under the prior and a = R⁻¹ỹ under the
    posterior, whose features are ψ(x) = R⁻¹Sᵀk(X, x). The divergence is u's, since f has no ε: with α = G⁻¹ỹ,

        KL = ½(tr(G⁻¹D) − i + αᵀ(SᵀKS)α + log|G| − log|D|).

    :param target: ỹ, ``(..., i)``.
    :param factor: R, ``(..., i, i)``.
    :param noise: D's diagonal, ``(..., i)``.
    :param covariance: SᵀKS, ``(..., i, i)``: ỹᵀα − αᵀDα would be a difference of what may be far larger.
    :param project: v ↦ Sᵀv for values at X, where the posterior is at X; else ``None``.
    """

    def __init__(
        self,
        target: Tensor,
        factor: Tensor,
        noise: Tensor,
        covariance: Tensor,
        project: Optional[Callable[[Tensor], Tensor]] = None,
    ) -> None:
        self.target, self.factor, self.noise, self.covariance, self.project = target, factor, noise, covariance, project
        self.white = solve_lower(factor, target[..., None])[..., 0]  # a
        super().__init__([self.white])

    @property
    def root(self) -> Tensor:
        """R⁻¹D^½, lower triangular."""
        return solve_lower(self.factor, torch.diag_embed(self.noise.sqrt()))

    def of_projections(self) -> tuple[Tensor, Product]:
        """The same posterior by coefficients that have draws: B^-½, which turns ψ into their features, and q(w).

        w = B^-½R⁻¹u with B = R⁻¹SᵀKSR⁻ᵀ = I − R⁻¹DR⁻ᵀ is N(0, I) under the prior, and a = B^½w + R⁻¹ε, so that
        q(w) = N(B^½a, R⁻¹DR⁻ᵀ).
        """
        # ψᵀB⁻¹ψ and not ψᵀψ: what ψ has where B is 0 is rounding, and there q(w) is the prior.
        left, vectors = torch.linalg.eigh(self.root @ self.root.mT)
        share = 1 - left
        known = share > torch.finfo(share.dtype).eps ** 0.5
        up = vectors * torch.where(known, share, 0.0).sqrt()[..., None, :] @ vectors.mT
        down = vectors * torch.where(known, share, torch.inf).rsqrt()[..., None, :] @ vectors.mT
        return down, Product(self.sizes, [DenseFactor((up @ self.white[..., None])[..., 0], self.root)], [(0,)])

    def _log_dets(self) -> tuple[Tensor, Tensor]:
        return 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), self.noise.log().sum(-1)

    def kl(self) -> Tensor:
        # α = G⁻¹ỹ = R⁻ᵀa
        weights = torch.linalg.solve_triangular(self.factor.mT, self.white[..., None], upper=True)[..., 0]  # α
        # tr G⁻¹D = ‖R⁻¹D^½‖²
        trace = self.root.square().sum((-2, -1))
        of_g, of_d = self._log_dets()
        fit = ((self.covariance @ weights[..., None])[..., 0] * weights).sum(-1)
        return 0.5 * (trace - self.sizes[0] + fit + of_g - of_d)

    def log_evidence(self, log_gram: Tensor) -> Tensor:
        """log N(ỹ; 0, SᵀK̂S) for orthonormalised S, in nats (eq. 9), of log|SᵀS|."""
        of_g, _ = self._log_dets()
        # −½(ỹᵀG⁻¹ỹ + log|G| − log|SᵀS| + i log 2π)
        return -0.5 * (self.white.square().sum(-1) + of_g - log_gram + self.sizes[0] * math.log(2 * math.pi))

    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        """log N(ỹ; u, D) − log N(ỹ; 0, G) at u = Sᵀf, for centred values f at the training inputs."""
        if self.project is None or f is None:
            raise ValueError(
                "the relative density of a computation-aware posterior is a function of the values at the training "
                "inputs; call the guide with those."
            )
        of_g, of_d = self._log_dets()
        misfit = (self.target - self.project(f)).square() / self.noise
        return 0.5 * (self.white.square().sum(-1) + of_g - misfit.sum(-1) - of_d)
