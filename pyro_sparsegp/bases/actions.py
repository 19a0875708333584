"""Data projections: the matrix S of actions, whose columns project the data, Sᵀz (Wenger et al., 2024, section 4),
and the basis of Sᵀf(X) plus its noise, whitened (algorithm S2).

With site precisions Λ, actions are held as S = Λ^½T: then Sᵀ(z − μ) and D = SᵀΛ⁻¹S = TᵀT need no division by λ, and
rows with λ = 0 drop out. The posterior depends on the span of S alone (lemma S4), so nothing is lost.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..gaussians.sites import Sites
from ..numerics.functions import at_once, dropping, in_pieces
from ..numerics.linalg import cholesky, over_upper
from .base import CrossFeatures


class Actions(ABC):
    """The action matrix S of one run of the model, ``(..., N, i)``.

    :param inputs: X in the order of S's rows, ``(N, D)``.
    :param noise: D's diagonal, ``(..., i)``; actions are such that D is diagonal.
    :param target: ỹ = Sᵀ(z − μ), ``(..., i)``.
    """

    inputs: Tensor
    noise: Tensor
    target: Tensor

    @property
    @abstractmethod
    def log_gram(self) -> Tensor:
        """log|SᵀS|, ``(...,)``, over the actions other than zero."""

    @abstractmethod
    def right(self, block: Tensor) -> Tensor:
        """AS for A ``(..., B, N)`` with columns in the order of :attr:`inputs`."""

    def gram(self, kernel: Any) -> Tensor:
        """k(X, X)S, ``(..., N, i)``, with rows in the data's order."""
        return kernel_times(kernel, self.inputs, self)

    @abstractmethod
    def left(self, columns: Tensor) -> Tensor:
        """SᵀA for A ``(..., N, c)`` with rows in the data's order."""


class BlockActions(Actions):
    """Each row of S has one number other than zero (eq. 14): S = ΛT, with T's numbers free.

    :param values: T's numbers in the order of the blocks, ``(..., N)``.
    :param order: the data's rows, block after block.
    :param sizes: of the blocks; the larger ones come first.
    """

    def __init__(self, sites: Sites, values: Tensor, order: Tensor, sizes: Sequence[int]) -> None:
        self.order, self.sizes = order, list(sizes)
        self.inputs = sites.inputs.index_select(-2, order)
        precision = sites.precision.index_select(-1, order)
        self.weights = values * precision
        # D = SᵀΛ⁻¹S = TᵀΛT, diagonal: blocks have no rows in common
        noise = _sums(self.weights * values, self.sizes, -1)
        # A block without information: an action of zeros, with a noise that keeps G regular.
        self.noise = torch.where(noise > 0, noise, torch.ones_like(noise))
        # Sᵀ(z − μ) = Tᵀλ(z − μ)
        self.target = _sums(values * sites.linear.index_select(-1, order), self.sizes, -1)

    @property
    def log_gram(self) -> Tensor:
        gram = _sums(self.weights.square(), self.sizes, -1)
        return torch.where(gram > 0, gram, torch.ones_like(gram)).log().sum(-1)

    def right(self, block: Tensor) -> Tensor:
        return _sums(block * self.weights[..., None, :], self.sizes, -1)

    def left(self, columns: Tensor) -> Tensor:
        return _sums(columns.index_select(-2, self.order) * self.weights[..., None], self.sizes, -2)

    def gram(self, kernel: Any) -> Tensor:
        # k is symmetric: rows of blocks against the columns from them on give both sides of the diagonal.
        num, most, ends = self.inputs.shape[-2], at_once(self.inputs), list(itertools.accumulate(self.sizes))
        if num * num <= most or num * self.sizes[0] > 16 * most:  # all at once; or blocks so large that rows are cut
            products = kernel_times(kernel, self.inputs, self)
        else:
            above, below = [], []
            step = max(1, most // (num * self.sizes[0]))
            for first in range(0, len(ends), step):
                sizes, after = self.sizes[first : first + step], self.sizes[first + step :]
                start, stop = ends[first] - sizes[0], ends[min(first + step, len(ends)) - 1]

                def strip(x: Tensor, z: Tensor, left: Tensor, right: Tensor, sizes: Any = (sizes, after)) -> Any:
                    block = kernel(x, z)
                    side = _sums(block * right[..., None, :], sizes[0] + sizes[1], -1)
                    return side, _sums((block * left[..., None])[..., x.shape[-2] :], sizes[0], -2).mT

                rows, rest = self.inputs[start:stop], self.inputs[start:]
                side, under = dropping(strip, rows, rest, self.weights[..., start:stop], self.weights[..., start:])
                above.append(torch.nn.functional.pad(side, (first, 0)))
                below.append(torch.nn.functional.pad(under, (0, 0, stop, 0)))
            products = torch.cat(above, -2) + torch.cat(below, -1)
        return products.index_select(-2, self.order.argsort())


class DenseActions(Actions):
    """S = Λ^½T with orthonormal columns of T, or zeros.

    :param directions: T, ``(..., N, i)``.
    """

    def __init__(self, sites: Sites, directions: Tensor) -> None:
        self.inputs = sites.inputs
        root = safe_root(sites.precision)
        self.scaled = root[..., None] * directions
        self.noise = torch.ones_like(self.scaled[..., 0, :])
        # Tᵀ√λ(z − μ)
        self.target = (directions.mT @ white(sites)[..., None])[..., 0]

    @property
    def log_gram(self) -> Tensor:
        gram = self.scaled.mT @ self.scaled
        empty = gram.diagonal(dim1=-2, dim2=-1) == 0
        factor = cholesky(gram + torch.diag_embed(empty.to(gram)), 0.0, "SᵀS of actions")
        return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def right(self, block: Tensor) -> Tensor:
        return block @ self.scaled

    def left(self, columns: Tensor) -> Tensor:
        return self.scaled.mT @ columns


def safe_root(precision: Tensor) -> Tensor:
    """√λ with gradient 0 at λ = 0."""
    positive = precision > 0
    return torch.where(positive, precision, 1.0).sqrt() * positive


def white(sites: Sites) -> Tensor:
    """√λ(z − μ), 0 where λ = 0."""
    return sites.linear * inverse_root(sites.precision)


def inverse_root(precision: Tensor) -> Tensor:
    """1/√λ, 0 where λ = 0."""
    positive = precision > 0
    return torch.where(positive, precision, 1.0).rsqrt() * positive


def _sums(values: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    # Sums over consecutive blocks of a dimension, the last or the one before; equal sizes stand together.
    large = sizes[0]
    num = sizes.count(large)
    first, second = values.split([num * large, values.shape[dim] - num * large], dim)
    shapes = (num, large), (len(sizes) - num, sizes[-1])
    return torch.cat([part.unflatten(dim, shape).sum(dim) for part, shape in zip((first, second), shapes)], dim)


def kernel_times(kernel: Any, x: Tensor, actions: Actions) -> Tensor:
    """k(x, X)S, ``(..., B, i)``, by blocks of the kernel matrix."""
    z = actions.inputs
    return in_pieces(lambda rows: actions.right(kernel(x[..., rows, :], z)), x.shape[-2], z.shape[-2], x, -2)


class ProjectedFeatures(CrossFeatures):
    """ψ(x) = R⁻¹Sᵀk(X, x) with RRᵀ = SᵀKS + D, the covariance of f with h = R⁻¹(Sᵀ(f(X) − μ) + ε), h ~ N(0, I).

    :param kernel: k.
    :param actions: S.
    :param factor: R, ``(..., i, i)``.
    :param covariance: SᵀKS, ``(..., i, i)``.
    """

    def __init__(self, kernel: Any, actions: Actions, factor: Tensor, covariance: Tensor) -> None:
        super().__init__(kernel, (factor.shape[-1],))
        self.actions, self.factor, self.covariance = actions, factor, covariance

    def of(self, products: Tensor) -> list[Tensor]:
        """Φ from k(x, X)S."""
        # k(x, X)S R⁻ᵀ
        return [over_upper(products, self.factor)]

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self.of(kernel_times(self.cross, x, self.actions))


def project(kernel: Any, actions: Actions, name: str) -> tuple[ProjectedFeatures, Tensor]:
    """The basis under ``actions`` and k(x, X)S at the training inputs, ``(..., N, i)``."""
    # RRᵀ = SᵀKS + D (algorithm S2)
    products = actions.gram(kernel)
    gram = actions.left(products)
    gram = (gram + gram.mT) / 2
    factor = cholesky(gram + torch.diag_embed(actions.noise), 0.0, f"SᵀK̂S of site {name!r}")
    return ProjectedFeatures(kernel, actions, factor, gram), products
