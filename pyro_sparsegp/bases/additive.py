"""Bases made of bases: inducing points beside a free mean function of many more (Salimbeni et al., 2018), or beside
what their posterior says of the residual at the data (Shi et al., 2020, appendix A); and one basis for each summand.

Of an additive kernel Σ_c k_c, Φ = [Φ₁ … Φ_C], so component c has mean Φ_c m_c and the residual's variances add up
(Adam, Durrande and John, 2018, section 3.2).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..gaussians.base import Gaussian
from ..kernels import Kernel
from ..kernels.algebra import term_names
from ..kernels.stacked import stacked, structure
from ..numerics.functions import broadcast_shapes, if_known, in_pieces
from ..numerics.linalg import Whitening, cholesky, eye_like, on_diagonal, over_upper, solve_lower
from .base import Basis, Component, CrossFeatures, Features, Moments
from .features import ExplicitFeatures
from .inducing import InducingFeatures, InducingPoints, features_of
from .variables import Values, Variables, between

_FLOOR = 1e-8  # of κ, in nats: where a = 0 the coefficient of the mean has no direction


class DecoupledFeatures(CrossFeatures):
    """φ of Z, and ψ(x) = c(x, O)a/√κ with c = k − φφᵀ and κ = aᵀC_OO a: the direction of one further coefficient."""

    # With t = aᵀf⊥(O)/√κ, N(0, 1) under the prior, the posterior N(√κ, 1) of t moves f by c(x, O)a, changes no variance
    # and costs κ/2 nats (Salimbeni et al., 2018). Neither K_OO nor C_OO is factorised: all is products, linear in the
    # number M₂ of points O where only some columns of K_OO are taken.

    def __init__(self, inducing: InducingFeatures, means: Variables, weights: Tensor, num_columns: int) -> None:
        super().__init__(inducing.kernel, (*inducing.sizes, 1))
        self.inducing, self.means, self.weights, self.num_columns = inducing, means, weights, num_columns
        (part,) = inducing.variables
        pull = between(self.kernel, part, means) @ weights[..., None]  # k(Z, O)a
        batch = broadcast_shapes(inducing.factor.shape[:-2], pull.shape[:-2])
        factor, pull = (matrix.expand(*batch, *matrix.shape[-2:]) for matrix in (inducing.factor, pull))
        # L⁻¹k(Z, O)a, so that c(x, O)a = k(x, O)a − φ(x)ᵀ of it
        self.pull = solve_lower(factor, pull)[..., 0]

    def moved(self, x: Tensor, phi: Tensor) -> Tensor:
        """c(x, O)a, ``(..., N)``, for φ(x) ``(..., N, M)``."""
        # k(x, O)a − φ(x)ᵀL⁻¹(k(Z, O)a)
        direct = (self.means.cross(self.cross, x) @ self.weights[..., None])[..., 0]
        return direct - (phi @ self.pull[..., None])[..., 0]

    def __call__(self, x: Tensor) -> list[Tensor]:
        blocks = self.inducing.of_summand(self.cross)(x)
        shift = self.moved(x, torch.cat(blocks, -1)) / self.square.sqrt()[..., None]
        return [*blocks, shift[..., None]]

    def marginals(self, x: Tensor, coefficients: Gaussian, known: Optional[list[Tensor]] = None) -> Moments:
        blocks = self.inducing.of_summand(self.cross)(x) if known is None else known[:-1]
        mean, change = coefficients.marginal(range(len(blocks))).moments(blocks)
        return mean + self.moved(x, torch.cat(blocks, -1)), change, self.cross.diag(x)

    def _against(self, rows: Tensor) -> Tensor:
        # Some entries of K_OO a, (..., n).
        means = self.means
        if isinstance(means, Values):
            columns = between(self.kernel, type(means)(means.z.index_select(0, rows)), means)
        else:
            columns = means.covariance(self.kernel).index_select(-2, rows)
        return (columns @ self.weights[..., None])[..., 0]

    @functools.cached_property
    def square(self) -> Tensor:
        """κ, ``(...,)``, from all of K_OO, in blocks."""
        index = torch.arange(self.means.size, device=self.weights.device)
        cost = self.means.size if isinstance(self.means, Values) else 1  # those of a user's own are formed at once
        against = in_pieces(lambda rows: self._against(index[rows]), len(index), cost, self.weights, -1)
        # κ = aᵀC_OO a = aᵀK_OO a − ‖L⁻¹k(Z, O)a‖²
        total = (self.weights * against).sum(-1)
        return (total - self.pull.square().sum(-1)).clamp(min=_FLOOR)

    def estimate(self) -> Tensor:
        """κ from ``num_columns`` random columns of K_OO, ``(...,)``: unbiased, and exact where these are all."""
        num, size = self.num_columns, self.means.size
        if num >= size:
            return self.square
        rows = torch.randperm(size, device=self.weights.device)[:num]
        drawn = (self.weights.index_select(-1, rows) * self._against(rows)).sum(-1)
        # (M₂/n) Σ aᵢ(K_OO a)ᵢ over n rows − ‖L⁻¹k(Z, O)a‖²
        return size / num * drawn - self.pull.square().sum(-1)


class ConditionalFeatures(CrossFeatures):
    """φ(x) of w, and R⁻¹Bᵀc(X, x) of s = Bᵀr(X), with RRᵀ = BᵀC_XX B: all that the posterior's density depends on."""

    # r is the residual, of covariance c = k − φφᵀ, independent of w under the prior; ``inputs`` are X, ``weights`` B.

    def __init__(self, inducing: InducingFeatures, inputs: Tensor, weights: Tensor, phi: Tensor, name: str) -> None:
        num = phi.shape[-1]
        super().__init__(inducing.kernel, (num, num))
        self.inducing, self.inputs, self.weights = inducing, inputs, weights
        self.gram = phi.mT @ weights  # ΦᵀB
        across = self._across(inputs, phi)
        square = weights.mT @ across
        # The prior's scale of w is 1: this much noise on s is nothing, and keeps R regular where r vanishes.
        noise = 100 * torch.finfo(phi.dtype).eps
        self.root = cholesky((square + square.mT) / 2 + noise * eye_like(square), 0.0, f"BᵀC_XX B of site {name!r}")
        self.known = self._both(phi, across)

    def _across(self, x: Tensor, phi: Tensor) -> Tensor:
        # c(x, X)B = k(x, X)B − φ(x)ᵀΦᵀB, (..., n, M); N²M operations at X
        z = self.inputs
        direct = in_pieces(lambda r: self.cross(x[..., r, :], z) @ self.weights, x.shape[-2], z.shape[-2], x, -2)
        return direct - phi @ self.gram

    def _both(self, phi: Tensor, across: Tensor) -> list[Tensor]:
        # c(x, X)B R⁻ᵀ
        second = over_upper(across, self.root)
        return [phi.expand(second.shape), second]

    def __call__(self, x: Tensor) -> list[Tensor]:
        (phi,) = self.inducing.of_summand(self.cross)(x)
        return self._both(phi, self._across(x, phi))


class _Alone(NamedTuple):
    """A summand's number, and its features."""

    members: Sequence[int]
    features: Any

    def each(self, given: Sequence[Any]) -> list[Sequence[Any]]:  # of what the features give, that of each summand
        return [given]

    def parts(self, terms: Sequence[Any], bases: Sequence[Any]) -> list[Features]:  # features of each summand
        return [self.features]

    def diag(self, x: Tensor) -> Tensor:  # the sum of the summands' variances
        return self.features.kernel.diag(x)


class _Stack(_Alone):
    """Summands that differ by numbers only, with features as one, at inputs ``(N, D)``."""

    def each(self, given: Sequence[Any]) -> list[Sequence[Any]]:
        return [[part] for part in given[0].unbind(-3)]

    def parts(self, terms: Sequence[Any], bases: Sequence[Any]) -> list[Features]:
        own = zip(*(matrices.unbind(-3) for matrices in self.features.whitened))
        return [InducingFeatures(terms[c], bases[c].variables(), Whitening(*w)) for c, w in zip(self.members, own)]

    def diag(self, x: Tensor) -> Tensor:
        return super().diag(x).sum(-2)


class AdditiveFeatures(Features):
    """Φ = [Φ₁ … Φ_C] for f = Σ_c f_c, of groups of summands."""

    def __init__(self, kernel: Any, bases: Sequence[Any], groups: Sequence[_Alone]) -> None:
        super().__init__(kernel, tuple(size for basis in bases for size in basis.sizes))
        self.bases, self.groups, self.moves = bases, groups, any(group.features.moves for group in groups)

    def _groups(self, x: Tensor) -> Sequence[_Alone]:
        # Those that take these inputs.
        return self.groups if x.dim() == 2 else [_Alone([c], part) for c, part in enumerate(self.parts)]

    def _in_order(self, groups: Sequence[_Alone], ask: Callable[[Any], Sequence[Any]]) -> list[Any]:
        # What features give, one entry a block, summand by summand.
        found = {c: own for group in groups for c, own in zip(group.members, group.each(ask(group.features)))}
        return [block for c in range(len(found)) for block in found[c]]

    @functools.cached_property
    def parts(self) -> list[Features]:
        """Each summand's features."""
        found = dict(itertools.chain(*(zip(g.members, g.parts(self.kernel.terms, self.bases)) for g in self.groups)))
        return [found[c] for c in range(len(found))]

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self._in_order(self._groups(x), lambda features: features(x))

    def marginals(self, x: Tensor, coefficients: Gaussian, known: Optional[list[Tensor]] = None) -> Moments:
        mean, change = coefficients.moments(self(x) if known is None else known)
        return mean, change, functools.reduce(torch.add, [group.diag(x) for group in self._groups(x)])

    @functools.cached_property
    def anchor(self) -> Any:
        return self._whole(self.anchors)

    def _whole(self, blocks: Sequence[Optional[Tensor]]) -> Any:
        """As one, with I for blocks that have none; ``None`` without any."""
        found = list(zip(self.sizes, blocks))
        given = [block for block in blocks if block is not None]
        if not given:
            return None
        like, batch = given[0], broadcast_shapes(*(block.shape[:-2] for block in given))
        own = [torch.eye(n, dtype=like.dtype, device=like.device) if a is None else a for n, a in found]
        return on_diagonal(own, like.new_zeros(*batch, sum(self.sizes), sum(self.sizes)))

    @functools.cached_property
    def places(self) -> Any:
        found = [group.features.places.reshape(-1) for group in self.groups if group.features.places is not None]
        return torch.cat(found) if found else None

    def anchor_at(self, before: Tensor) -> Tensor:
        """Of all blocks."""
        return self._whole(self.anchors_at(before))

    def anchors_at(self, before: Tensor) -> list[Optional[Tensor]]:
        """Of each block, ``None`` for those that have no places."""
        own = [group.features.places for group in self.groups if group.features.places is not None]
        former = iter(before.split([z.numel() for z in own]))

        def of(features: Any) -> list[Optional[Tensor]]:
            z = features.places
            return [None] * len(features.sizes) if z is None else features.anchors_at(next(former).view(z.shape))

        return self._in_order(self.groups, of)

    @property
    def anchors(self) -> Sequence[Optional[Tensor]]:
        return self._in_order(self.groups, lambda features: features.anchors)

    @functools.cached_property
    def ones(self) -> Any:
        """Its share of 1 for each block that has values."""
        found = [part.ones for part in self.parts]
        given = [part for part in found if part is not None]
        if not given:
            return None
        parts = [given[0].new_zeros(sum(p.sizes)) if one is None else one for p, one in zip(self.parts, found)]
        return torch.cat(parts) / len(given)

    def components(self) -> list[Component]:
        ends = itertools.accumulate(len(part.sizes) for part in self.parts)
        return [(p.kernel, p, tuple(range(end - len(p.sizes), end))) for p, end in zip(self.parts, ends)]

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        def joined(*draws: tuple[Callable, list[Tensor]]) -> tuple[Callable, list[Tensor]]:
            return lambda x: sum(f(x) for f, _ in draws), [w for _, own in draws for w in own]

        return if_known(joined, *(part.prior_functions(num, num_features, x) for part in self.parts))


class Additive(Basis):
    """A basis for each summand of the kernel, in the order of ``kernel.terms``."""

    def __init__(self, parts: Sequence[Basis], names: Sequence[str]) -> None:
        super().__init__()
        self.names, self.sizes = tuple(names), tuple(size for part in parts for size in part.sizes)
        for i, part in enumerate(parts):
            setattr(self, f"term_{i}", part)

    @property
    def parts(self) -> list[Any]:
        """The bases of the summands."""
        return [getattr(self, f"term_{i}") for i in range(len(self.names))]

    def forward(self, kernel: Kernel, jitter: Optional[float], name: str) -> AdditiveFeatures:
        terms = kernel.terms
        if (names := term_names(kernel)) != self.names:
            now, before = list(names), list(self.names)
            raise ValueError(f"the terms of site {name!r} are {now} now, and were {before}: keep their order and names")
        bases = self.parts
        groups: list[_Alone] = []
        for members, inputs in _alike(bases, terms):
            c = members[0]
            if len(members) == 1:
                groups.append(_Alone(members, bases[c](terms[c], jitter, f"{name}, term {c}")))
            else:
                values = Values(torch.stack(inputs, -3), bases[c].trainable)
                own = bases[c].jitter if jitter is None else jitter
                kernel_ = stacked([terms[c] for c in members], values.z)
                groups.append(_Stack(members, features_of(kernel_, [values], own, name)))
        return AdditiveFeatures(kernel, bases, groups)

    def spec(self) -> dict[str, Any]:
        return {"kind": "additive", "names": list(self.names), "parts": [part.spec() for part in self.parts]}


def rebuilt(spec: dict[str, Any], like: Tensor, trainable: bool, sets: Sequence[Any]) -> Any:
    """A basis of that ``spec``, its values still to be loaded; its family declares ``sets`` of inducing inputs."""
    if spec["kind"] == "additive":
        parts = [rebuilt(part, like, trainable, [own]) for part, own in zip(spec["parts"], sets)]
        return Additive(parts, spec["names"])
    if spec["kind"] == "features":
        return ExplicitFeatures(spec["size"], if_known(like.new_zeros, spec.get("rows")))  # older files have none
    return InducingPoints.rebuilt(spec, like, trainable, sets)


def _alike(bases: Sequence[Any], terms: Sequence[Any]) -> list[tuple[list[int], list[Any]]]:
    # Summands that differ by numbers only, with values at as many inputs each for a basis, and these inputs, which are
    # asked for once a run; others by themselves.
    found: dict[Any, tuple[list[int], list[Any]]] = {}
    for c, (basis, term) in enumerate(zip(bases, terms)):
        key: Any = c
        z: Any = None
        if isinstance(basis, InducingPoints) and basis.kinds == (Values,) and (shared := structure(term)) is not None:
            z = basis.variables()[0].z
            key = shared, z.shape, z.dtype, basis.jitter
        members, inputs = found.setdefault(key, ([], []))
        members.append(c)
        inputs.append(z)
    return list(found.values())
