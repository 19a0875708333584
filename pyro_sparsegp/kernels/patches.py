"""Convolutional kernels: a function of an image that is made of one function of its patches."""

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.arguments import require_count
from ..numerics.functions import broadcast_shapes, in_pieces, shape_of
from .algebra import Kernel, Product, Select, as_kernel, kernel_by_row
from .base import as_tensor, second

Shape = Sequence[int]
Weights = Optional[Tensor]
_SPLITS = 4  # of a square of pairs of patches, of which the part above the diagonal is evaluated


def patch_grid(image_shape: Shape, patch_shape: Shape, stride: int = 1) -> tuple[int, int]:
    """H' and W': how many patches an image has from top to bottom and from left to right.

    :param image_shape: (H, W) or (C, H, W).
    :param patch_shape: (h, w).
    :param stride: pixels from a patch to the next.
    :raises ValueError: if these are no such numbers, or a patch is larger than the image.
    """
    _, height, width = _with_channels(image_shape, "image_shape", "(H, W) or (C, H, W)", 2, 3)
    _, h, w = _with_channels(patch_shape, "patch_shape", "(h, w)", 2)
    require_count(stride, "stride")
    if h > height or w > width:
        raise ValueError(f"patch_shape {(h, w)} is larger than the images, {(height, width)}")
    return (height - h) // stride + 1, (width - w) // stride + 1


def patches(images: Tensor, image_shape: Shape, patch_shape: Shape, stride: int = 1) -> Tensor:
    """The patches of images, ``(..., N, P, C·h·w)``, row by row.

    >>> patches(torch.rand(5, 3 * 28 * 28), (3, 28, 28), (5, 5), stride=2).shape
    torch.Size([5, 144, 75])

    :param images: ``(..., N, H·W)``, or ``(..., N, C·H·W)`` with channel after channel.
    :param image_shape: (H, W) or (C, H, W).
    :param patch_shape: (h, w); a patch has all channels.
    :param stride: pixels from a patch to the next.
    :raises ValueError: if images or patches do not fit image_shape.
    """
    patch_grid(image_shape, patch_shape, stride)
    channels, height, width = (1, *image_shape)[-3:]
    if (columns := images.shape[-1]) != (size := channels * height * width):
        raise ValueError(f"images have {columns} columns, image_shape {tuple(image_shape)} makes {size}: give as many")
    x = images.unflatten(-1, (channels, height, width))
    x = x.unfold(-2, patch_shape[0], stride).unfold(-2, patch_shape[1], stride)  # (..., C, H', W', h, w)
    return x.movedim(-5, -3).flatten(-3).flatten(-3, -2)


def _with_channels(shape: Shape, name: str, wanted: str, *lengths: int) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)) or len(shape) not in lengths:
        raise ValueError(f"{name} must be {wanted}, got {shape!r}")
    for number in shape:
        require_count(number, f"each of {name}")
    return (1, *shape)[-3:]


class Convolutional(Kernel):
    """f(x) = Σ_p w_p g(x[p]) for images x with patches x[p]; g ~ GP(0, k_g) (van der Wilk et al., 2017, section 4).

        k(x, x') = Σ_p Σ_q w_p w_q k_g(x[p], x'[q])

    The :attr:`source` of f is g, so that inducing points are patches (or images, where they have an image's size):
    cov(f(x), g(z)) = Σ_p w_p k_g(x[p], z) takes P evaluations of k_g, k(x, x) takes P²/2, the covariance of two images
    P². Where these are many they are made in pieces, and again on the way back.

    >>> kernel = Convolutional(RBF(1.0), (28, 28), (5, 5), stride=2)
    >>> kernel.diag(torch.rand(3, 784)).shape
    torch.Size([3])
    >>> kernel.from_source(torch.rand(3, 784), torch.rand(8, 25)).shape
    torch.Size([3, 8])

    :param base: k_g, a kernel on patches ``(..., C·h·w)``.
    :param image_shape: (H, W), with images as rows ``(N, H·W)``; or (C, H, W), ``(N, C·H·W)``, channel after channel.
    :param patch_shape: (h, w); a patch has all C channels.
    :param weights: w, ``(..., P)``. ``None`` is 1/P each: f, the mean response, varies at most as g does, however large
        the image; learned weights had better start there.
    :param stride: pixels from a patch to the next.
    :raises ValueError: if shapes do not fit, or the diagonal of k_g depends on the rows given.
    """

    event_dims = (("weights", 1),)

    def __init__(
        self, base: Tensor, image_shape: Shape, patch_shape: Shape, weights: Weights = None, stride: int = 1
    ) -> None:
        self.base = kernel_by_row(base, f"{type(self).__name__}'s base")
        self.grid = patch_grid(image_shape, patch_shape, stride)
        self.num_patches = math.prod(self.grid)  # P = H'W'
        self.image_shape, self.patch_shape, self.stride = tuple(image_shape), tuple(patch_shape), stride
        if weights is not None and (not isinstance(weights, Tensor) or weights.shape[-1:] != (self.num_patches,)):
            raise ValueError(
                f"{type(self).__name__}'s weights must be None or a tensor (..., {self.num_patches}), one for each of "
                f"the {self.grid[0]} x {self.grid[1]} patches, got {shape_of(weights)}"
            )
        self.weights = weights

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast_shapes(self.source.batch_shape, super().batch_shape)

    @property
    def source(self) -> Any:
        return self.base

    def source_inputs(self, x: Tensor) -> Tensor:
        return self._patches(x)

    def _patches(self, x: Tensor) -> Tensor:
        return patches(x, self.image_shape, self.patch_shape, self.stride)

    def _weights(self, like: Tensor) -> Tensor:
        if self.weights is None:
            return like.new_full((self.num_patches,), 1 / self.num_patches)
        return as_tensor(self.weights, like)

    def _towards(self, z: Tensor) -> tuple[Tensor, Tensor]:
        # What k_g reads of z, and a with cov(f(x), g(z)) = Σ_p a_p k_g(x[p], z), (..., P, 1) or (..., P, M).
        return z, self._weights(z)[..., None]

    def _pairwise(self, like: Tensor) -> Tensor:
        # W with k(x, x') = Σ_pq W_pq k_g(x[p], x'[q]), (..., P, P).
        w = self._weights(like)
        return w[..., :, None] * w[..., None, :]

    def from_source(self, x: Tensor, z: Tensor) -> Tensor:
        p, (own, a) = self._patches(x), self._towards(z)
        batch = broadcast_shapes(self.batch_shape, p.shape[:-3], z.shape[:-2])

        def covariance(rows: slice) -> Tensor:
            some = p[..., rows, :, :]
            # Σ_p a_p k_g(x[p], z), with one a for all z, or one for each
            k = self.base(some.flatten(-3, -2), own).unflatten(-2, some.shape[-3:-1])  # (..., n, P, M)
            a_ = a[..., None, :, :]
            return (a_.mT @ k)[..., 0, :] if a.shape[-1] == 1 else (a_ * k).sum(-2)

        found = in_pieces(covariance, p.shape[-3], batch.numel() * self.num_patches * z.shape[-2], x, -2)
        return found.expand(*batch, *found.shape[-2:])

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        p, q = self._patches(x), self._patches(second(x, z))
        mix, columns = self._pairwise(p), q.flatten(-3, -2)
        batch = broadcast_shapes(self.batch_shape, p.shape[:-3], q.shape[:-3])

        def covariance(rows: slice) -> Tensor:
            # Σ_p Σ_q W_pq k_g(x[p], x'[q])
            some = p[..., rows, :, :]
            k = self.base(some.flatten(-3, -2), columns).unflatten(-1, q.shape[-3:-1])
            return torch.einsum("...npmq,...pq->...nm", k.unflatten(-3, some.shape[-3:-1]), mix)

        found = in_pieces(covariance, p.shape[-3], batch.numel() * columns.shape[-2] * self.num_patches, x, -2)
        found = found.expand(*batch, *found.shape[-2:])
        if z is not None:
            return found
        # a diagonal term of k_g's is the variance's
        return found + torch.diag_embed(self.diag(x) - found.diagonal(dim1=-2, dim2=-1))

    def diag(self, x: Tensor) -> Tensor:
        # Of images as the first dimension, before the kernel's batch dimensions.
        p = self._patches(x).movedim(-3, 0)
        p = p.reshape(p.shape[0], *[1] * (len(self.batch_shape) - (p.dim() - 3)), *p.shape[1:])
        mix, num, inner = self._pairwise(p), self.num_patches, "n...pq,...pq->n..."
        size = max(16, -(-num // _SPLITS))

        def variance(images: slice) -> Tensor:
            some = p[images]
            total: Any = 0.0
            for start in range(0, num, size):  # k_g is symmetric: the blocks above the diagonal stand for those below
                own, rest = slice(start, start + size), slice(start + size, num)
                total = total + torch.einsum(inner, self.base(some[..., own, :]), mix[..., own, own])
                if rest.start < num:
                    off = self.base(some[..., own, :], some[..., rest, :])
                    total = total + 2 * torch.einsum(inner, off, mix[..., own, rest])
            return total

        cost = broadcast_shapes(self.batch_shape, p.shape[1:-2]).numel() * num**2
        return in_pieces(variance, p.shape[0], cost, p, 0).movedim(0, -1)


class TICK(Convolutional):
    """f(x) = Σ_p w_p g(x[p], l_p): the response g knows where the patch is (Dutordoir et al., 2020).

        k(x, x') = Σ_p Σ_q w_p w_q k_l(l_p, l_q) k_g(x[p], x'[q])

    The translation insensitive convolutional kernel: as the length scale of k_l grows, it becomes
    :class:`Convolutional`. A location l = (row, column) is the number of the patch from the top and from the left, in
    [0, H'] x [0, W']; an inducing patch has it in two more columns, ``(M, C·h·w + 2)``.

    >>> kernel = TICK(RBF(1.0), RBF(3.0), (28, 28), (5, 5), stride=2)
    >>> kernel.from_source(torch.rand(3, 784), torch.rand(8, 25 + 2)).shape
    torch.Size([3, 8])

    :param location: k_l, a kernel on locations; its length scale is in patches.
    :raises ValueError: as :class:`Convolutional`.
    """

    def __init__(
        self,
        base: Tensor,
        location: object,
        image_shape: Shape,
        patch_shape: Shape,
        weights: Weights = None,
        stride: int = 1,
    ) -> None:
        super().__init__(base, image_shape, patch_shape, weights, stride)
        self.location = as_kernel(location, "TICK's location")
        self.patch_size = math.prod(self.image_shape[:-2]) * math.prod(self.patch_shape)

    @property
    def source(self) -> Any:
        d = self.patch_size
        return Product(Select(self.base, slice(d)), Select(self.location, (d, d + 1)))

    def locations(self, like: Tensor) -> Tensor:
        """(row, column) of each patch, ``(P, 2)``."""
        rows, columns = (torch.arange(n, dtype=like.dtype, device=like.device) for n in self.grid)
        return torch.cartesian_prod(rows, columns)

    def source_inputs(self, x: Tensor) -> Tensor:
        p = self._patches(x)
        return torch.cat([p, self.locations(x).expand(*p.shape[:-1], 2)], -1)

    def _towards(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if z.shape[-1] != (size := self.patch_size) + 2:
            raise ValueError(f"TICK's inducing patches are (M, {size + 2}), with row and column, got {tuple(z.shape)}")
        # a_p = w_p k_l(l_p, l) of an inducing patch at l
        return z[..., :size], self._weights(z)[..., None] * self.location(self.locations(z), z[..., size:])

    def _pairwise(self, like: Tensor) -> Tensor:
        return super()._pairwise(like) * self.location(self.locations(like))
