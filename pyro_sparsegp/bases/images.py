"""Where layers of a deep convolutional Gaussian process start untrained (Shi, Titsias and Mnih, 2020, appendix G.2).

A layer is a GP over all patches of all images, its outputs the channels of the next image; the last layer's kernel is
:class:`~pyro_sparsegp.kernels.Convolutional` or :class:`~pyro_sparsegp.kernels.TICK`:

>>> def model(x, y=None, size=None):
...     rows = kernels.patches(x, (28, 28), (5, 5)).flatten(-3, -2)  # (N·576, 25)
...     g = pyro.sample("g", GaussianProcess(5.0 * kernels.RBF(5.0), rows).expand([10]).to_event(1))
...     k = kernels.TICK(5.0 * kernels.RBF(5.0), kernels.Matern32(3.0), (10, 24, 24), (4, 4), stride=2)
...     f = pyro.sample("f", GaussianProcess(k, as_images(g, len(x))).expand([10]).to_event(1))
...     with pyro.plate("data", size or len(x), subsample=x):
...         return pyro.sample("y", dist.Categorical(logits=f.mT), obs=y)
"""

import torch
from torch import Tensor

from ..kernels.patches import Shape, patch_grid, patches
from .initial import k_means, some_distinct


def as_images(values: Tensor, num: int) -> Tensor:
    """A layer's values at the patches of ``num`` images, ``(..., C, N·P)``, as images ``(..., N, C·P)``.

    The inputs of the layer are patches image after image, ``kernels.patches(...).flatten(-3, -2)``; the next
    ``image_shape`` is (C, H', W') with (H', W') the :func:`~pyro_sparsegp.kernels.patch_grid`.

    :param values: of the layer, with P patches an image.
    :param num: N.
    :raises ValueError: if ``num`` does not divide the number of values.
    """
    if values.dim() < 2 or values.shape[-1] % num:
        raise ValueError(f"as_images needs values (..., C, N·P) of {num} images, got shape {tuple(values.shape)}")
    return values.unflatten(-1, (num, -1)).movedim(-2, -3).flatten(-2)


@torch.no_grad()
def inducing_patches(
    images: Tensor, num: int, image_shape: Shape, patch_shape: Shape, stride: int = 1, locations: bool = False
) -> Tensor:
    """``num`` inducing patches, ``(num, C·h·w)``: centres of k-means on 100·``num`` patches of 1000 random images.

    :param images: ``(N, C·H·W)``.
    :param num: how many patches.
    :param image_shape: (H, W) or (C, H, W).
    :param patch_shape: (h, w).
    :param stride: pixels from a patch to the next.
    :param locations: whether to add two columns of random locations in [0, H'] x [0, W'], which
        :class:`~pyro_sparsegp.kernels.TICK` needs.
    :raises ValueError: if there are fewer than ``num`` distinct patches: equal ones, such as empty ones, count once.
    """
    grid = patch_grid(image_shape, patch_shape, stride)
    images = images[torch.randperm(len(images), device=images.device)[:1000]]
    found = some_distinct(patches(images, image_shape, patch_shape, stride).flatten(0, 1), 200 * num)[: 100 * num]
    if len(found) < num:
        raise ValueError(f"inducing_patches cannot return {num} patches: the images have {len(found)} distinct patches")
    centres = k_means(None, found, num, most=100 * num)
    if not locations:
        return centres
    edges = torch.tensor(grid, dtype=centres.dtype, device=centres.device)
    return torch.cat([centres, edges * torch.rand(num, 2, dtype=centres.dtype, device=centres.device)], -1)


@torch.no_grad()
def random_convolution(
    images: Tensor, image_shape: Shape, patch_shape: Shape, channels: int, stride: int = 1
) -> Tensor:
    """Images ``(N, C'·H'·W')`` from random filters (Glorot uniform) with C' ``channels``.

    They stand for a layer's outputs when the inducing patches of the layer above are chosen.

    :param images: ``(N, C·H·W)``.
    :param image_shape: (H, W) or (C, H, W).
    :param patch_shape: (h, w).
    :param channels: C'.
    :param stride: pixels from a patch to the next.
    """
    found = patches(images, image_shape, patch_shape, stride)
    # Of a filter, fan in is C·h·w and fan out C'·h·w.
    fans = found.shape[-1] + channels * patch_shape[0] * patch_shape[1]
    filters = (2 * torch.rand(found.shape[-1], channels).to(found) - 1) * (6 / fans) ** 0.5
    return (found @ filters).mT.flatten(-2)
