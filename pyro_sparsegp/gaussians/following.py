"""One GP site's coefficients w by a family's own q(w), and latents v that follow them:

    q(w, v) = q(w) N(v; m − Aw, S),  A = P_vv⁻¹P_vw of the precision P = I + JᵀHJ of both.

With v = u − Aw, u ~ N(m, S) is independent of w, and a predictor J_w w + J_v v is (J_w − J_v A)w + J_v u. So w has
features less what latents explain of them, and a family keeps its blocks, its rank and its optimiser.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, eye_like, plus_one, side_by_side
from .base import Coefficients, Gaussian
from .factors import DenseFactor
from .natural import NaturalGaussian
from .product import Product
from .steps import Rate, recorded

_RATE = 0.25  # of averages over steps


class Followed(Gaussian):
    """q(w, v).

    :param own: q(w), of the blocks ``blocks``, and ``rest``: q(u), of all others.
    :param along: A.
    """

    def __init__(self, own: Product, rest: Product, blocks: Sequence[int], along: Tensor) -> None:
        self.own, self.rest, self.along, self.batch_shape = own, rest, along, torch.Size()
        others = [b for b in range(len(own.sizes) + len(rest.sizes)) if b not in blocks]
        self.groups = list(blocks), others
        self.sizes = tuple(self._merged(own.sizes, rest.sizes))

    def _merged(self, own: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """Blocks of both, in order."""
        found = dict(zip(self.groups[0], own)) | dict(zip(self.groups[1], rest))
        return [found[b] for b in sorted(found)]

    def _split(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [side_by_side([parts[b] for b in group]) for group in self.groups]

    def _features(self, features: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Features of w and of u, and what the sum of their squares is beside that of w and v, ``(N,)``."""
        w, v = self._split(features)
        seen = w - v @ self.along
        more = seen.square().sum(-1) - w.square().sum(-1)
        return list(seen.split(self.own.sizes, -1)), list(v.split(self.rest.sizes, -1)), more

    @property
    def loc(self) -> list[Tensor]:
        return self._with_v(self.own.loc, self.rest.loc)

    def _with_v(self, w: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
        v = side_by_side(u) - side_by_side(w) @ self.along.mT
        return self._merged(w, v.split(self.rest.sizes, -1))

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        w, u, more = self._features(features)
        (mean, change), (other, its) = self.own.moments(w), self.rest.moments(u)
        return mean + other, change + its + more

    def joint_moments(self, features: Sequence[Any]) -> tuple[Tensor, Tensor]:
        (w, u, _), first = self._features(features), self._split(features)[0]
        (mean, change), (other, its), seen = self.own.joint_moments(w), self.rest.joint_moments(u), side_by_side(w)
        return mean + other, change + its + seen @ seen.mT - first @ first.mT

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        (w, u, _), first = self._features(features), self._split(features)[0]
        seen = side_by_side(w)
        return self.own.covariance_change(w) + self.rest.covariance_change(u) + seen @ seen.mT - first @ first.mT

    def kl(self) -> Tensor:
        # ½E|v|² − ½E|u|², which KL[q(u) ‖ N(0, I)] has
        mean, change = self.own.moments(self.along.split(self.own.sizes, -1))
        u, _ = self.rest.moments(eye_like(self.along.mT).split(self.rest.sizes, -1))
        moved = (u - mean).square() - u.square() + change + self.along.square().sum(-1)
        return self.own.kl() + self.rest.kl() + 0.5 * moved.sum()

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        return self._with_v(self.own.rsample(shape), self.rest.rsample(shape))

    def draw(self) -> Tensor:
        parts = [q.draw().split(q.sizes, -1) for q in (self.own, self.rest)]
        return torch.cat(self._with_v(*parts), -1)

    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        own, v = self._split(w)
        u = v + own @ self.along.mT
        parts = self.own.log_ratio(own.split(self.own.sizes, -1)), self.rest.log_ratio(u.split(self.rest.sizes, -1))
        return parts[0] + parts[1] + 0.5 * (v.square().sum(-1) - u.square().sum(-1))

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        blocks, (own, _) = sorted(set(blocks)), self.groups
        if set(blocks) <= set(own):
            return self.own.marginal([own.index(b) for b in blocks])
        edges = torch.arange(sum(self.sizes), device=self.along.device).split(self.sizes)
        index = torch.cat([edges[b] for b in blocks])
        root = cholesky(self.covariance_matrix[index][:, index], 0.0, "the covariance of some coefficients")
        factor = DenseFactor(side_by_side([self.loc[b] for b in blocks]), root)
        return Product([self.sizes[b] for b in blocks], [factor], [range(len(blocks))])

    @property
    def covariance_matrix(self) -> Tensor:
        own, along = self.own.covariance_matrix, self.along
        cross = -own @ along.mT
        lower = torch.cat([cross.mT, self.rest.covariance_matrix - along @ cross], 1)
        whole = torch.cat([torch.cat([own, cross], 1), lower])
        parts = torch.arange(len(whole), device=whole.device).split([*self.own.sizes, *self.rest.sizes])
        index = torch.cat(self._merged(parts[: len(self.own.sizes)], parts[len(self.own.sizes) :]))
        return whole[index][:, index]


class Following(Coefficients):
    """q(w, v), with a family's own coefficients w, which are a GP site's module's.

    :param own: these, and ``blocks``: theirs of all blocks, of the sizes ``sizes``.
    """

    along: Tensor  # A
    known: Tensor  # P − I of v and w, (n, n + M), an average over steps

    def __init__(
        self, own: Coefficients, blocks: Sequence[int], sizes: Sequence[int], like: Tensor, rate: Optional[Rate] = None
    ) -> None:
        super().__init__(sizes, (), like)
        self.blocks, self._own = list(blocks), [own]  # no part of this module
        others = [size for b, size in enumerate(sizes) if b not in self.blocks]
        self.rest = NaturalGaussian(others, (), like, rate=rate)
        num, all_ = sum(others), sum(sizes)
        self.register_buffer("along", like.new_zeros(num, all_ - num))
        self.register_buffer("known", like.new_zeros(num, all_))

    @property
    def own(self) -> Any:
        """The family's coefficients."""
        return self._own[0]

    @property
    def places(self) -> list[Tensor]:
        """Where w and v are among all."""
        each = list(enumerate(torch.arange(self.known.shape[1], device=self.known.device).split(self.sizes)))
        return [torch.cat([p for b, p in each if (b in self.blocks) == is_own]) for is_own in (True, False)]

    def forward(self, anchor: Any = None) -> Followed:
        """q(w, v); ``anchor`` is that of w, and that of v."""
        first, second = anchor
        own = self.own(first)
        if recorded() is not None:
            self._turn(side_by_side(own.loc).detach())
        return Followed(own, self.rest(second), self.blocks, self.along)

    def settle(self, anchor: Sequence) -> None:  # type: ignore[override]
        for part, its in zip((self.own, self.rest), anchor):
            part.settle(its)

    def _turn(self, mean: Tensor) -> None:
        """Take A to what is known by now; w has this mean, and that of v stays."""
        before = self.along
        self._buffers["along"] = self._solved()
        self.rest._set("loc", self.rest._kept("loc") + (self.along - before) @ mean)

    def _solved(self) -> Tensor:
        # A = P_vv⁻¹P_vw
        num = len(self.known)
        return torch.linalg.solve(plus_one(self.known[:, :num]), self.known[:, num:])

    @torch.no_grad()
    def note(self, gram: Tensor) -> None:
        """Take note of v's rows of JᵀHJ in a step."""
        own, rest = self.places
        self._buffers["known"] = (1 - _RATE) * self.known + _RATE * gram[:, torch.cat([rest, own])]

    @torch.no_grad()
    def begin(self, anchor: Any, precision: Tensor, mean: Tensor) -> None:
        """Have q near N(m, P⁻¹), of all."""
        own, rest = self.places
        self._buffers["known"] = (precision - eye_like(precision))[rest][:, torch.cat([rest, own])]
        along, of_rest = self._solved(), precision[rest][:, rest]
        # P_ww − P_wvP_vv⁻¹P_vw = I + LLᵀ
        gram = precision[own][:, own] - along.mT @ of_rest @ along - eye_like(along)
        values, axes = torch.linalg.eigh(gram)
        shown = values.clamp(min=0).sqrt()[:, None] * axes.mT
        self.own.start(anchor[0], shown.split(self.own.sizes, -1))
        self.own.put_mean(mean[own])
        self._buffers["along"] = along
        self.rest.put_sums(anchor[1], of_rest - eye_like(of_rest), of_rest @ (mean[rest] + along @ mean[own]))
