"""Data projections: the matrix S of actions, whose columns project the data, Sᵀz (Wenger et al., 2024, section 4),
and the basis of Sᵀf(X) plus its noise, whitened (algorithm S2).

With site precisions Λ, actions are held as S = Λ^½T: then Sᵀ(z − μ) and D = SᵀΛ⁻¹S = TᵀT need no division by λ, and
rows with λ = 0 drop out. The posterior depends on the span of S alone (lemma S4), so nothing is lost.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..gaussians.sites import Sites
from ..kernels import Kernel
from ..modules import AbstractModule
from ..numerics.decisions import decided
from ..numerics.functions import at_once, broadcast_shapes, dropping, in_pieces, shape_of
from ..numerics.linalg import cholesky, over_upper
from .base import CrossFeatures

_WHOLE = 2**29  # numbers in a kernel matrix that is kept while a policy runs: 2 GiB in float32
_EXACT = 3000  # rows up to which eigenvectors come from a dense decomposition
_LOOK = 8  # iterations between looks at whether conjugate gradients are done


class Actions(ABC):
    """The action matrix S of one run of the model, ``(..., N, i)``."""

    inputs: Tensor  # X in the order of S's rows
    noise: Tensor  # D's diagonal, (..., i); actions are such that D is diagonal
    target: Tensor  # ỹ = Sᵀ(z − μ), (..., i)

    @property
    @abstractmethod
    def log_gram(self) -> Tensor:
        """log|SᵀS|, ``(...,)``, over the actions other than zero."""

    @abstractmethod
    def right(self, block: Tensor) -> Tensor:
        """AS for A ``(..., B, N)`` with columns in the order of :attr:`inputs`."""

    def gram(self, kernel: Kernel) -> Tensor:
        """k(X, X)S, ``(..., N, i)``, with rows in the data's order."""
        return kernel_times(kernel, self.inputs, self)

    @abstractmethod
    def left(self, columns: Tensor) -> Tensor:
        """SᵀA for A ``(..., N, c)`` with rows in the data's order."""


class BlockActions(Actions):
    """Each row of S has one number other than zero (eq. 14): S = ΛT, with T's numbers free, block after block."""

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

    def gram(self, kernel: Kernel) -> Tensor:
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
    """S = Λ^½T with orthonormal columns of T, ``(..., N, i)``, or zeros."""

    def __init__(self, sites: Sites, directions: Tensor) -> None:
        self.inputs = sites.inputs
        root = safe_power(sites.precision, 0.5)
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


def safe_power(precision: Tensor, power: float) -> Tensor:
    """λᵖ, and 0 with gradient 0 at λ = 0."""
    positive = precision > 0
    return torch.where(positive, precision, 1.0) ** power * positive


def white(sites: Sites) -> Tensor:
    """√λ(z − μ), 0 where λ = 0."""
    return sites.linear * safe_power(sites.precision, -0.5)


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
    """ψ(x) = R⁻¹Sᵀk(X, x) with RRᵀ = SᵀKS + D, the covariance of f with h = R⁻¹(Sᵀ(f(X) − μ) + ε), h ~ N(0, I)."""

    def __init__(self, kernel: Kernel, actions: Actions, factor: Tensor, covariance: Tensor) -> None:
        super().__init__(kernel, (factor.shape[-1],))
        self.actions, self.factor, self.covariance = actions, factor, covariance

        self.turn: Optional[Tensor] = None  # T, of the features ψT

    def of(self, products: Tensor) -> list[Tensor]:
        """Φ from k(x, X)S."""
        # k(x, X)S R⁻ᵀ
        psi = over_upper(products, self.factor)
        return [psi if self.turn is None else psi @ self.turn]

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self.of(kernel_times(self.cross, x, self.actions))


def project(kernel: Kernel, actions: Actions, name: str) -> tuple[ProjectedFeatures, Tensor]:
    """The basis under ``actions`` and k(x, X)S at the training inputs, ``(..., N, i)``."""
    # RRᵀ = SᵀKS + D (algorithm S2)
    products = actions.gram(kernel)
    gram = actions.left(products)
    gram = (gram + gram.mT) / 2
    factor = cholesky(gram + torch.diag_embed(actions.noise), 0.0, f"SᵀK̂S of site {name!r}")
    return ProjectedFeatures(kernel, actions, factor, gram), products


class Policy(AbstractModule):
    """Chooses so many actions for a kernel and sites."""

    rows: Optional[int] = None  # of the data that its actions belong to; any, if they are made anew

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num

    def forward(self, kernel: Kernel, sites: Sites, name: str) -> Actions:
        """The actions of a run."""
        if self.rows not in (None, rows := sites.inputs.shape[-2]):
            raise ValueError(f"actions of site {name!r} are for {self.rows} rows, got {rows}: make a new guide")
        return self.actions(kernel, sites, name)

    def actions(self, kernel: Kernel, sites: Sites, name: str) -> Actions:
        """Those at rows that they belong to: constants of the step, whose gradient is that at fixed actions."""
        with torch.no_grad():
            directions = self.directions(kernel, sites)
        return DenseActions(sites, directions)

    def directions(self, kernel: Kernel, sites: Sites) -> Tensor:
        """T, ``(..., N, i)``: orthonormal columns, or zeros."""
        raise NotImplementedError


class BlockPolicy(Policy):
    """Learned block-sparse actions, CaGP-Opt (eq. 14): one number for each datum of the first call."""

    def __init__(self, inputs: Tensor, num: int, batch_shape: Sequence[int]) -> None:
        super().__init__(num)
        self.rows = inputs.shape[-2]
        self.register_buffer("order", local_blocks(inputs, num))
        # T = 1, so S = Λ: an action starts as the average of its block's data, weighted by precision
        self.values: Any = PyroParam(inputs.new_ones(*batch_shape, self.rows))

    def actions(self, kernel: Kernel, sites: Sites, name: str) -> BlockActions:
        return BlockActions(sites, self.values, self.order, _sizes(len(self.order), self.num))


class KrylovPolicy(Policy):
    """Residual actions, which conjugate gradients take (CaGP-CG; algorithm S1, section S3.1)."""

    # Lanczos with full reorthogonalisation on I + Λ^½KΛ^½ from Λ^½(z − μ): the span of the residuals, which for equal λ
    # is that of conjugate gradients on K̂.

    def __init__(self, num: int, tolerance: float) -> None:
        super().__init__(num)
        self.tolerance = tolerance

    def directions(self, kernel: Kernel, sites: Sites) -> Tensor:
        multiply = _whitened(kernel, sites)
        start = white(sites)
        shape = broadcast_shapes(start.shape, multiply(start[..., None])[..., 0].shape)
        start = start.expand(shape)
        first = start.norm(dim=-1, keepdim=True)
        # Data at the prior mean leave no residual to start from.
        start = torch.where(first > 0, start, safe_power(sites.precision, 0.5).expand(shape))
        first = start.norm(dim=-1, keepdim=True)
        tiny = torch.finfo(start.dtype).tiny
        chosen = start.new_zeros(*shape, min(self.num, shape[-1]))
        q = start / first.clamp(min=tiny)
        pivot, residual, beta = torch.ones_like(first), first, torch.zeros_like(first)
        live = first > tiny
        for j in range(chosen.shape[-1]):
            chosen[..., j] = torch.where(live, q, 0.0)
            # Aq and qᵀAq for A = I + Λ^½KΛ^½, the next diagonal of the tridiagonal QᵀAQ
            product = q + multiply(q[..., None])[..., 0]
            alpha = (q * product).sum(-1, keepdim=True)
            # The pivots of the tridiagonal matrix give the residual's norm, β|ζ|.
            pivot = alpha - beta.square() / pivot
            zeta = residual / pivot
            for _ in range(2):  # reorthogonalise twice: once is not enough
                product = product - (chosen @ (chosen.mT @ product[..., None]))[..., 0]
            beta = product.norm(dim=-1, keepdim=True)
            residual = -beta * zeta
            live = live & (residual.abs() > self.tolerance * first)
            if j % _LOOK == _LOOK - 1 and not decided(live.any(), serves_both=True):  # a device waits for this look
                break
            q = product / beta.clamp(min=tiny)
        return chosen


class EigenPolicy(Policy):
    """The top eigenvectors of Λ^½KΛ^½, the actions of least posterior entropy (lemma S5)."""

    def directions(self, kernel: Kernel, sites: Sites) -> Tensor:
        multiply = _whitened(kernel, sites)
        rows = sites.inputs.shape[-2]
        num = min(self.num, rows)
        if rows <= _EXACT:
            eye = torch.eye(rows, dtype=sites.inputs.dtype, device=sites.inputs.device)
            matrix = multiply(eye)
            return torch.linalg.eigh((matrix + matrix.mT) / 2)[1][..., -num:]
        generator = torch.Generator().manual_seed(0)
        wide = min(num + 8, rows)
        basis = torch.randn(rows, wide, generator=generator).to(sites.inputs)
        # Q ← qr(AQ): each pass favours an eigenvector by its eigenvalue; of a decaying spectrum six are nearly exact
        for _ in range(6):
            basis = torch.linalg.qr(multiply(basis))[0]
        # Rayleigh and Ritz: eigenvectors of QᵀAQ
        _, rotation = torch.linalg.eigh(basis.mT @ multiply(basis))
        return (basis @ rotation)[..., -num:]


class RandomPolicy(Policy):
    """Normal random actions, drawn once."""

    def __init__(self, inputs: Tensor, num: int) -> None:
        super().__init__(num)
        self.rows = inputs.shape[-2]
        self.register_buffer("draws", torch.randn(self.rows, min(num, self.rows)).to(inputs))

    def directions(self, kernel: Kernel, sites: Sites) -> Tensor:
        return _orthonormal(self.draws, sites.precision)


class UserPolicy(Policy):
    """Actions from a callable ``(kernel, sites) -> S``, ``(..., N, i)``; if it is a module, a copy of it trains."""

    def __init__(self, policy: Callable[[Any, Sites], Tensor], num: int) -> None:
        super().__init__(num)
        # each guide owns its parameters
        self.policy = copy.deepcopy(policy) if isinstance(policy, torch.nn.Module) else policy

    def actions(self, kernel: Kernel, sites: Sites, name: str) -> DenseActions:
        matrix = self.policy(kernel, sites)
        rows = sites.inputs.shape[-2]
        if not isinstance(matrix, Tensor) or matrix.dim() < 2 or matrix.shape[-2:] != (rows, self.num):
            raise ValueError(f"actions of site {name!r} must be a tensor ({rows}, {self.num}), got {shape_of(matrix)}")
        if not matrix.isfinite().all():
            raise ValueError(f"the actions of site {name!r} contain NaN or infinite values")
        return DenseActions(sites, _orthonormal(matrix, sites.precision))


def _orthonormal(matrix: Tensor, precision: Tensor) -> Tensor:
    # Orthonormal columns with the span of Λ^-½S, over the rows with λ > 0.
    scaled = safe_power(precision, -0.5)[..., None] * matrix
    directions, triangle = torch.linalg.qr(scaled)
    pivots = triangle.diagonal(dim1=-2, dim2=-1).abs()
    level = matrix.shape[-2] * torch.finfo(pivots.dtype).eps
    if (pivots > level * pivots.amax(-1, keepdim=True)).all():
        return directions
    # Dependent columns: Q is padded with directions that nobody asked for.
    left, values, _ = torch.linalg.svd(scaled, full_matrices=False)
    least = level * values.amax(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    return left * (values > least)[..., None, :]


def _whitened(kernel: Any, sites: Sites) -> Callable[[Tensor], Tensor]:
    # V ↦ Λ^½KΛ^½V, (..., N, c), in blocks of rows; a small matrix is formed once.
    root, x = safe_power(sites.precision, 0.5)[..., None], sites.inputs
    num = x.shape[-2]
    if num * num <= _WHOLE:
        matrix = kernel(x, x)
        return lambda v: root * (matrix @ (root * v))
    return lambda v: root * in_pieces(lambda rows: kernel(x[..., rows, :], x) @ (root * v), num, num, x, -2)


def _sizes(rows: int, num: int) -> list[int]:
    small, more = divmod(rows, num)
    return [small + 1] * more + [small] * (num - more)


def local_blocks(x: Tensor, num: int) -> Tensor:
    """An order of the rows of x, ``(N, D)``, whose ``num`` consecutive blocks hold neighbours, as in a k-d tree."""
    x = x.detach()
    scaled = (x - x.mean(0)) / x.std(0, correction=0).clamp(min=torch.finfo(x.dtype).eps)
    return _halved(scaled.cpu(), torch.arange(len(x)), _sizes(len(x), num)).to(x.device)


def _halved(points: Tensor, rows: Tensor, sizes: list[int]) -> Tensor:
    if len(sizes) == 1:
        return rows
    values = points[rows]
    widest = int((values.amax(0) - values.amin(0)).argmax())
    rows = rows[values[:, widest].argsort(stable=True)]
    half = (len(sizes) + 1) // 2
    parts = rows.tensor_split([sum(sizes[:half])])
    return torch.cat([_halved(points, *part) for part in zip(parts, (sizes[:half], sizes[half:]))])
