"""One Gaussian over the coefficients of several GP sites, and what each site sees of it.

With w = (w₁, …, w_K), a site's features are those of all coefficients, zero for the others', so that moments, draws and
steps of the whole are the sites'. The divergence is the whole's, counted at the site that is met first in a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..modules import AbstractModule
from .base import Coefficients, Gaussian


class Whole:
    """q(w) of one run, of which the sites' draws are parts.

    :param q: over the coefficients of all sites.
    :param blocks: of each site, the numbers of its blocks.
    """

    def __init__(self, q: Gaussian, blocks: Mapping[str, Sequence[int]]) -> None:
        self.q, self.blocks = q, blocks
        self._w: list[Tensor] = []
        self._shape: Optional[torch.Size] = None
        self._taken: set[int] = set()
        self._counted = False

    def share(self, name: str) -> Share:
        """What a site sees; the first one that asks has the divergence."""
        first, self._counted = not self._counted, True
        return Share(self, self.blocks[name], first)

    def draw(self, site: int, shape: torch.Size) -> list[Tensor]:
        """A draw of all coefficients for a site: the last one, unless it has had that, or is another shape."""
        if self._shape != shape or site in self._taken:
            self._w, self._shape, self._taken = self.q.rsample(shape), shape, set()
        self._taken.add(site)
        return self._w


class Share(Gaussian):
    """q of one site's coefficients; draws go with those of the other sites.

    :param whole: of all sites.
    :param blocks: the site's.
    :param counts: whether the divergence, and the density of a draw, of the whole are told here; else they are 0.
    """

    def __init__(self, whole: Whole, blocks: Sequence[int], counts: bool) -> None:
        self.whole, self.blocks, self.counts = whole, tuple(blocks), counts
        self.sizes = tuple(whole.q.sizes[b] for b in self.blocks)
        self.batch_shape = whole.q.batch_shape
        self._drawn: Optional[list[Tensor]] = None

    @property
    def loc(self) -> list[Tensor]:
        return self._own(self.whole.q.loc)

    def _own(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[b] for b in self.blocks]

    def padded(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Features of all sites' blocks, ``(..., N, M_b)`` each; others' are 0."""
        own, like = dict(zip(self.blocks, parts)), parts[0]
        sizes = enumerate(self.whole.q.sizes)
        return [own[b] if b in own else like.new_zeros(*like.shape[:-1], n) for b, n in sizes]

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.whole.q.moments(self.padded(features))

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self.whole.q.covariance_change(self.padded(features))

    def kl(self) -> Tensor:
        return self.whole.q.kl() if self.counts else self.loc[0].new_zeros(self.batch_shape)

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        self._drawn = self.whole.draw(self.blocks[0], shape)
        return self._own(self._drawn)

    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        if not self.counts:
            return w[0].new_zeros(w[0].shape[:-1])
        if self._drawn is None:
            raise ValueError("the density of several GP sites' coefficients is that of a draw of them all: draw first")
        return self.whole.q.log_ratio(self._drawn)

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        return self.whole.q.marginal([self.blocks[b] for b in sorted(blocks)])

    @property
    def covariance_matrix(self) -> Tensor:
        return self.whole.q.marginal(self.blocks).covariance_matrix


class Shared(AbstractModule):
    """The coefficients of several sites.

    :param coefficients: of all blocks, in the order of the sites.
    :param numbers: how many blocks each site has.
    """

    def __init__(self, coefficients: Coefficients, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self.coefficients, blocks = coefficients, iter(range(sum(numbers.values())))
        self.blocks = {name: list(itertools.islice(blocks, number)) for name, number in numbers.items()}

    def forward(self, anchor: Any = None) -> Whole:
        """q(w) for a run."""
        return Whole(self.coefficients(anchor), self.blocks)
