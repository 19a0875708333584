"""Products of independent Gaussian factors, each over one or several blocks of the coefficients, those that are optimal
for given Gaussian sites, and one Gaussian over the coefficients of several GP sites, with what each site sees of it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Optional

import torch
from torch import Tensor

from ..modules import AbstractModule
from ..numerics.arrow import OneEach
from ..numerics.functions import broadcast_shapes
from ..numerics.linalg import cholesky, eye_like, gram, on_diagonal, plus_one, side_by_side, solve_lower, total
from .arrow import ArrowFactor
from .base import Coefficients, Gaussian
from .factors import CovarianceFactor, DenseFactor, Factor
from .steps import Pass, Row


def slices(sizes: Sequence[int], groups: Sequence[Sequence[int]]) -> list[slice]:
    """The coefficients of consecutive blocks, group by group, of the sizes of all blocks."""
    edges = list(itertools.accumulate(sizes, initial=0))
    return [slice(edges[group[0]], edges[group[-1] + 1]) for group in groups]


class Product(Gaussian):
    """q(w) = Π_g N(w_g; m_g, S_g), independent factors, each over consecutive blocks.

    :param sizes: the sizes M_b of the blocks of w.
    :param factors: the factors, in order.
    :param groups: the blocks that each factor covers; together, in order, all of them.
    """

    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor], groups: Sequence[Sequence[int]]) -> None:
        self.sizes, self.factors, self.groups = tuple(sizes), list(factors), list(map(tuple, groups))
        self.batch_shape = broadcast_shapes(*map(attrgetter("batch_shape"), self.factors))

    @property
    def loc(self) -> list[Tensor]:
        return self._split([factor.loc for factor in self.factors])

    def _split(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [
            block for part, group in zip(parts, self.groups) for block in part.split([self.sizes[b] for b in group], -1)
        ]

    def _join(self, blocks: Any) -> list[Any]:
        if isinstance(blocks, OneEach) or isinstance(next(iter(blocks), None), OneEach):  # of K functions
            return [blocks]
        return [side_by_side([blocks[b] for b in group]) for group in self.groups]

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self._of_factors("moments", features)

    def joint_moments(self, features: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Φm, ``(N, K)``, and Φ(S − I)Φᵀ, ``(N, K, K)``, of K functions at each of N inputs, ``(N, K, M_b)``."""
        return self._of_factors("joint_moments", features)

    def _of_factors(self, of: str, features: Any) -> tuple[Tensor, Tensor]:
        parts = [getattr(f, of)(phi) for f, phi in zip(self.factors, self._join(features))]
        return total(map(itemgetter(0), parts)), total(map(itemgetter(1), parts))

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return total(f.covariance(phi) - phi @ phi.mT for f, phi in zip(self.factors, self._join(features)))

    def kl(self) -> Tensor:
        return total(map(methodcaller("kl"), self.factors))

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        return self._split([factor.loc + factor.noise(shape) for factor in self.factors])

    def draw(self) -> Tensor:
        return torch.cat([factor.loc + factor.noise(self.batch_shape) for factor in self.factors], -1)

    def at(self, noise: Tensor) -> Tensor:
        """m + Rε of standard normal numbers, ``(S, M)``, of one factor."""
        (factor,) = self.factors
        return factor.loc + noise @ factor.root.mT

    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        return total(f.log_ratio(part) for f, part in zip(self.factors, self._join(w)))

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        wanted, factors, groups = sorted(set(blocks)), list[Factor](), list[list[int]]()
        for factor, group in zip(self.factors, self.groups):
            kept = [b for b in group if b in wanted]
            if not kept:
                continue
            # a factor of which only some blocks are wanted is marginalised
            if len(kept) < len(group):
                rows = torch.arange(sum(self.sizes[b] for b in group), device=factor.loc.device)
                parts = rows.split([self.sizes[b] for b in group])
                factor = factor.select(torch.cat([part for b, part in zip(group, parts) if b in wanted]))
            factors.append(factor)
            groups.append(list(map(wanted.index, kept)))
        return Product([self.sizes[b] for b in wanted], factors, groups)

    @property
    def covariance_matrix(self) -> Tensor:
        blocks = [factor.covariance_matrix for factor in self.factors]
        return on_diagonal(blocks, blocks[0].new_zeros(*self.batch_shape, *[sum(self.sizes)] * 2))


class RecordedProduct(Product):
    """A product that records the marginals, draws and divergences that it gives."""

    def __init__(self, q: Product, taken: Pass) -> None:
        vars(self).update(vars(q))
        self.taken = taken

    def _of_factors(self, of: str, features: Any) -> tuple[Tensor, Tensor]:
        rows, dims = {"moments": (self.taken.rows, 2), "joint_moments": (self.taken.groups, 3)}[of]
        phi: Any = side_by_side(self._join(features))
        keep, matrix, factor = self.taken.keep, None, self.factors[0]
        if isinstance(factor, CovarianceFactor) and phi.dim() == dims:
            # Of these marginals alone, so that the gradient by S is Φᵀ diag(h) Φ: no step has to find it again.
            factor = copy.copy(factor)
            factor.matrix = matrix = keep(factor.matrix.view_as(factor.matrix))
            mean, change = getattr(factor, of)(phi)
        else:
            mean, change = super()._of_factors(of, features)
        seen = [part.detach() for part in phi] if isinstance(phi, Sequence) else phi.detach()
        rows.append(Row(seen, keep(mean), keep(change), matrix))
        return rows[-1].mean, rows[-1].change

    def note_draws(self) -> None:
        self.taken.by_draws = True

    def kl(self) -> Tensor:
        # whose gradient is c
        value = self.taken.keep(super().kl())
        self.taken.divergences.append(value)
        return value

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        return list(self._noted(side_by_side(super().rsample(shape))).split(self.sizes, -1))

    def at(self, noise: Tensor) -> Tensor:
        # of a design that has all second moments one draw's curvature is no guess
        self.taken.has_design = len(noise) >= 2 * noise.shape[-1]
        return self._noted(super().at(noise))

    def _noted(self, draws: Tensor) -> Tensor:
        w = self.taken.keep(draws.clone())
        self.taken.draws.append(((w - side_by_side(self.loc)).detach(), w))
        return w


class Continued(Product):
    """q(w) = N(m, S) after q₀(w) = N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w)/Z, which its divergence is from."""

    def __init__(self, q: Product, gram: Tensor, pull: Tensor) -> None:
        vars(self).update(vars(q))
        self.gram, self.pull = gram, pull

    def kl(self) -> Tensor:
        factor = cholesky(plus_one(self.gram), 0.0, "I + G of the rows seen before")
        white = solve_lower(factor, self.pull[..., None]).square().sum((-2, -1))
        # KL[q ‖ q₀] = KL[q ‖ N(0, I)] + E[½wᵀG₀w − r₀ᵀw] + log Z, log Z = ½r₀ᵀP₀⁻¹r₀ − ½log|P₀| with P₀ = I + G₀
        log_normaliser = 0.5 * white - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        loc = side_by_side(self.loc)
        square = (self.gram * (self.covariance_matrix + loc[..., None] * loc[..., None, :])).sum((-2, -1))
        return super().kl() + 0.5 * square - (self.pull * loc).sum(-1) + log_normaliser


def sums_of(phi: Tensor, precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """G = ΦᵀΛΦ, ``(..., M, M)``, and r = Φᵀλ(z − μ), ``(..., M)``, of Φ, ``(..., N, M)``, λ and λ(z − μ)."""
    return gram(phi, phi * precision[..., None]), (phi.mT @ linear[..., None])[..., 0]


def optimal(
    features: Sequence[Tensor],
    precision: Tensor,
    linear: Tensor,
    groups: Optional[Sequence[Sequence[int]]] = None,
    name: str = "f",
) -> Product:
    """q(w) ∝ N(w; 0, I) Πₙ N(zₙ | μₙ + φₙᵀw, 1/λₙ), or its best approximation by independent groups of blocks.

    P = I + ΦᵀΛΦ, m = P⁻¹Φᵀλ(z − μ), S = P⁻¹; of independent groups b, S_b = (P_bb)⁻¹ while m stays (Shi, Titsias and
    Mnih, 2020, eq. 28 and 29).

    :param features: Φ at the sites' inputs, a block ``(..., N, M_b)`` each.
    :param precision: λ, ``(..., N)``.
    :param linear: λ(z − μ), ``(..., N)``.
    :param groups: blocks that share a covariance; ``None`` is all of them.
    :param name: the site, for errors.
    """
    sums = sums_of(side_by_side(features), precision, linear)
    return from_natural(*sums, [block.shape[-1] for block in features], groups, name)


def from_natural(
    gram: Tensor, pull: Tensor, sizes: Sequence[int], groups: Optional[Sequence[Sequence[int]]] = None, name: str = "f"
) -> Product:
    """q(w) with precision P = I + G and Pm = r, or its best approximation by independent groups of blocks of w."""
    whole = plus_one(gram)
    what = f"I + ΦᵀΛΦ of site {name!r}"
    factor = cholesky(whole, 0.0, what)
    # m = P⁻¹r (Titsias, 2009, eq. 10; Shi et al., 2020, eq. 29)
    loc = torch.cholesky_solve(pull[..., None], factor)[..., 0]
    groups = [tuple(range(len(sizes)))] if groups is None else groups
    factors: list[Factor] = []
    for own in slices(sizes, groups):
        # The leading block of a Cholesky factor is the factor of the leading block.
        block = factor[..., own, own] if own.start == 0 else cholesky(whole[..., own, own], 0.0, what)
        # R = L⁻ᵀ of P = LLᵀ is formed: tr S wants it, and a product with it costs less than a triangular solve.
        root = torch.linalg.solve_triangular(block, eye_like(block), upper=False, left=False).mT
        factors.append(DenseFactor(loc[..., own], root, upper=True))
    return Product(sizes, factors, groups)


def numbered(numbers: Mapping[str, int]) -> dict[str, list[int]]:
    """The blocks of names that have so many each, one after another."""
    blocks = iter(range(sum(numbers.values())))
    return {name: list(itertools.islice(blocks, number)) for name, number in numbers.items()}


class JointPosterior:
    """q(w) of one run, w = (w₁, …, w_K), of several sites: their draws are parts of one.

    :param blocks: of each site, the numbers of its blocks.
    """

    def __init__(self, q: Gaussian, blocks: Mapping[str, Sequence[int]]) -> None:
        self.q, self.blocks = q, blocks
        self._w: list[Tensor] = []
        self._shape: Optional[torch.Size] = None
        self._taken: set[int] = set()
        self._counted = False

    def view(self, name: str, others: Sequence[str] = (), outputs: Sequence[int] = ()) -> Gaussian:
        """The posterior of a site's coefficients, perhaps with other sites'; the first view has the divergence.

        :param outputs: the shape of the site's functions. Each has as many of its blocks, in turn.
        """
        own, beside = list(self.blocks[name]), [block for other in others for block in self.blocks[other]]
        each, views = len(own) // math.prod(outputs), list[Gaussian]()
        for start in range(0, len(own), each):
            views.append(SiteView(self, own[start : start + each] + beside, not self._counted))
            self._counted = True
        return OfOutputs(views, outputs) if outputs else views[0]

    def draw(self, site: int, shape: torch.Size) -> list[Tensor]:
        """A draw of all coefficients for a site: the last one, unless it has had that, or is another shape."""
        if self._shape != shape or site in self._taken:
            self._w, self._shape, self._taken = self.q.rsample(shape), shape, set()
        self._taken.add(site)
        return self._w


class SiteView(Gaussian):
    """q of one site's blocks; the divergence and density of the whole are told where it ``counts``, else they are 0."""

    def __init__(self, whole: JointPosterior, blocks: Sequence[int], counts: bool) -> None:
        self.whole, self.blocks, self.counts = whole, tuple(blocks), counts
        self.sizes = tuple(whole.q.sizes[b] for b in self.blocks)
        self.batch_shape, last = whole.q.batch_shape, len(whole.q.sizes) - 1
        # without values of which each datum has one, if it asks for none: others' features are zeros
        hides = last not in self.blocks and isinstance(getattr(whole.q, "factors", [None])[-1], ArrowFactor)
        self.q = whole.q.marginal(range(last)) if hides else whole.q
        self._drawn: Optional[list[Tensor]] = None

    @property
    def loc(self) -> list[Tensor]:
        return self._own(self.whole.q.loc)

    def _own(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[b] for b in self.blocks]

    def padded(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Features of all sites' blocks, ``(..., N, M_b)`` each; others' are 0."""
        # so that moments and steps of the whole are the site's
        own, like = dict(zip(self.blocks, parts)), parts[0]
        sizes = enumerate(self.q.sizes)
        return [own[b] if b in own else like.new_zeros(*like.shape[:-1], n) for b, n in sizes]

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.q.moments(self.padded(features))

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self.q.covariance_change(self.padded(features))

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


class OfOutputs(Gaussian):
    """What a site of several functions sees of q: that of each, with blocks of the same sizes.

    :param shape: of its functions.
    """

    def __init__(self, each: Sequence[Gaussian], shape: Sequence[int]) -> None:
        self.each, self.batch_shape, self.sizes = list(each), torch.Size(shape), each[0].sizes

    def _stacked(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        return torch.stack(list(parts), dim).unflatten(dim, self.batch_shape)

    def _of_each(self, features: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        whole = [phi.expand(*self.batch_shape, *phi.shape[-2:]).flatten(0, -3) for phi in features]
        return list(zip(*whole))

    @property
    def loc(self) -> list[Tensor]:
        return [self._stacked(parts) for parts in zip(*(q.loc for q in self.each))]

    def moments(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        found = [q.moments(phi) for q, phi in zip(self.each, self._of_each(features))]
        mean, change = map(self._stacked, zip(*found))
        return mean, change

    def covariance_change(self, features: Sequence[Tensor]) -> Tensor:
        return self._stacked([q.covariance_change(phi) for q, phi in zip(self.each, self._of_each(features))])

    def kl(self) -> Tensor:
        return self._stacked([q.kl() for q in self.each])

    def rsample(self, shape: torch.Size) -> list[Tensor]:
        num = len(shape) - len(self.batch_shape)
        draws = [q.rsample(shape[:num]) for q in self.each]
        return [self._stacked(parts, num) for parts in zip(*draws)]

    def log_ratio(self, w: Sequence[Tensor], f: Optional[Tensor] = None) -> Tensor:
        num = w[0].dim() - 1 - len(self.batch_shape)
        parts = zip(*(block.flatten(num, -2).unbind(num) for block in w))
        return self._stacked([q.log_ratio(part) for q, part in zip(self.each, parts)], num)

    def marginal(self, blocks: Sequence[int]) -> Gaussian:
        return OfOutputs([q.marginal(blocks) for q in self.each], self.batch_shape)

    @property
    def covariance_matrix(self) -> Tensor:
        return self._stacked([q.covariance_matrix for q in self.each])


class JointCoefficients(AbstractModule):
    """The coefficients of several sites, in their order; each site has a number of blocks."""

    def __init__(self, coefficients: Coefficients, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self.coefficients, self.blocks = coefficients, numbered(numbers)

    def forward(self, anchor: object = None) -> JointPosterior:
        """q(w) for a run."""
        return JointPosterior(self.coefficients(anchor), self.blocks)
