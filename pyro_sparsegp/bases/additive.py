"""The basis of an additive kernel Σ_c k_c: one for each summand, side by side.

Φ = [Φ₁ … Φ_C], so component c has mean Φ_c m_c and the residual's variances add up (Adam, Durrande and
John, 2018, section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..gaussians.base import Gaussian
from ..kernels.algebra import term_names
from ..kernels.stacked import stacked, structure
from ..numerics.linalg import Unbound, on_diagonal
from ..numerics.shapes import broadcast_shapes
from .base import Basis, Component, Features
from .inducing import InducingFeatures, InducingPoints, features_of
from .variables import Values

__all__ = ["Additive", "AdditiveFeatures"]


class AdditiveFeatures(Features):
    """Φ = [Φ₁ … Φ_C] for f = Σ_c f_c.

    :param kernel: Σ_c k_c.
    :param sizes: the sizes of all blocks.
    :param alone: of summands, their features under k_c.
    :param together: of summands that differ by numbers only, which they are, and the features of all of them at once.
    :param part: makes such a summand's own features, of c and its L.
    """

    def __init__(
        self,
        kernel: Any,
        sizes: tuple[int, ...],
        alone: dict[int, Features],
        together: Sequence[tuple[Sequence[int], InducingFeatures]] = (),
        part: Optional[Callable[[int, Tensor], Features]] = None,
    ) -> None:
        super().__init__(kernel, sizes)
        self.alone, self.together, self._part = alone, list(together), part

    @functools.cached_property
    def parts(self) -> list[Features]:
        """Each summand's features."""
        found = dict(self.alone)
        for members, features in self.together:
            assert self._part is not None
            found.update((c, self._part(c, factor)) for c, factor in zip(members, features.factor.unbind(-3)))
        return [found[c] for c in range(len(found))]

    def __call__(self, x: Tensor) -> list[Tensor]:
        if x.dim() != 2:
            return [block for part in self.parts for block in part(x)]
        if not self.alone and len(self.together) == 1:
            return Unbound(*self.together[0][1](x))
        found: dict[int, list[Tensor]] = {}
        for members, features in self.together:
            (phi,) = features(x)
            found.update((c, [part]) for c, part in zip(members, phi.unbind(-3)))
        found.update((c, part(x)) for c, part in self.alone.items())
        return [block for c in range(len(found)) for block in found[c]]

    def marginals(
        self, kernel: Any, x: Tensor, coefficients: Gaussian, known: Optional[list[Tensor]] = None
    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        mean, change = coefficients.moments(self(x) if known is None else known)
        return mean, change, self._diagonal(x) if kernel is self.kernel and x.dim() == 2 else None

    def _diagonal(self, x: Tensor) -> Optional[Tensor]:
        """k(x, x), ``(..., N)``; ``None`` where no summands are taken together."""
        if not self.together:
            return None
        parts = [features.kernel.diag(x).sum(-2) for _, features in self.together]
        return functools.reduce(torch.add, [*parts, *(part.kernel.diag(x) for part in self.alone.values())])

    @property
    def anchor(self) -> Optional[Tensor]:
        found = {c: part.anchor for c, part in self.alone.items()}
        for members, features in self.together:
            found.update(zip(members, features.factor.unbind(-3)))
        given = [anchor for anchor in found.values() if anchor is not None]
        if not given:
            return None
        like, batch = given[0], broadcast_shapes(*(anchor.shape[:-2] for anchor in given))
        sizes = {c: sum(part.sizes) for c, part in self.alone.items()}
        own = [
            torch.eye(sizes[c], dtype=like.dtype, device=like.device) if anchor is None else anchor
            for c, anchor in sorted(found.items(), key=lambda each: each[0])
        ]
        return on_diagonal(own, like.new_zeros(*batch, sum(self.sizes), sum(self.sizes)))

    @property
    def anchors(self) -> Sequence[Optional[Tensor]]:
        if not self.alone and len(self.together) == 1:
            return Unbound(self.together[0][1].factor)
        found: dict[int, Sequence[Optional[Tensor]]] = {c: part.anchors for c, part in self.alone.items()}
        for members, features in self.together:
            found.update((c, [factor]) for c, factor in zip(members, features.factor.unbind(-3)))
        return [anchor for c in range(len(found)) for anchor in found[c]]

    @property
    def ones(self) -> Optional[Tensor]:
        """Of the blocks that have values of theirs, each has its share of 1."""
        found = {c: part.ones for c, part in self.alone.items()}
        for members, features in self.together:
            found.update((c, features.ones) for c in members)
        given = [part for part in found.values() if part is not None]
        if not given:
            return None
        parts = [
            given[0].new_zeros(sum(self.alone[c].sizes)) if part is None else part
            for c, part in sorted(found.items(), key=lambda each: each[0])
        ]
        return torch.cat(parts) / len(given)

    def components(self) -> list[Component]:
        found: list[Component] = []
        start = 0
        for part in self.parts:
            stop = start + len(part.sizes)
            found.append((part.kernel, part, tuple(range(start, stop))))
            start = stop
        return found

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        draws = [part.prior_functions(num, num_features, x) for part in self.parts]
        if any(draw is None for draw in draws):
            return None
        functions = [draw[0] for draw in draws if draw is not None]
        return lambda x: sum(f(x) for f in functions), [w for draw in draws if draw is not None for w in draw[1]]


class Additive(Basis):
    """A basis for each summand of the kernel.

    :param parts: one basis a summand, in the order of ``kernel.terms``.
    :param names: the summands' names; empty where they are not known.
    """

    def __init__(self, parts: Sequence[Basis], names: Sequence[str] = ()) -> None:
        super().__init__()
        self.names = tuple(names)
        self.num_terms = len(parts)
        for i, part in enumerate(parts):
            setattr(self, f"term_{i}", part)

    @property
    def parts(self) -> list[Any]:
        """The bases of the summands."""
        return [getattr(self, f"term_{i}") for i in range(self.num_terms)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all blocks."""
        return tuple(size for part in self.parts for size in part.sizes)

    def forward(self, kernel: Any, jitter: Optional[float], name: str) -> AdditiveFeatures:
        terms = kernel.terms
        if len(terms) != self.num_terms:
            raise ValueError(
                f"the kernel of site {name!r} has {len(terms)} terms now, {self.num_terms} when the guide was "
                "initialised; a kernel's structure must not change between calls."
            )
        if self.names and (names := term_names(kernel)) != self.names:
            raise ValueError(
                f"the terms of the kernel of site {name!r} are {list(names)} now, and were {list(self.names)} when the "
                "guide was initialised or saved; their order and names must not change."
            )
        bases = self.parts
        together = []
        alone = dict(enumerate(terms))
        for members in _alike(bases, terms):
            features = _together([terms[c] for c in members], [bases[c] for c in members], jitter, name)
            together.append((members, features))
            for c in members:
                del alone[c]

        def part(c: int, factor: Tensor) -> Features:
            return InducingFeatures(terms[c], bases[c].variables(), [[factor]])

        found = {c: bases[c](term, jitter, f"{name}, term {c}") for c, term in alone.items()}
        sizes = tuple(size for basis in bases for size in basis.sizes)
        return AdditiveFeatures(kernel, sizes, found, together, part)

    def spec(self) -> dict[str, Any]:
        return {"kind": "additive", "names": list(self.names), "parts": [part.spec() for part in self.parts]}


def _alike(bases: Sequence[Basis], terms: Sequence[Any]) -> list[list[int]]:
    """Which summands differ by numbers only, and have values at as many inputs each for a basis."""
    found: dict[Any, list[int]] = {}
    for c, (basis, term) in enumerate(zip(bases, terms)):
        if type(basis) is not InducingPoints or len(basis.sizes) > 1 or basis.of_source[0]:
            continue
        z, shared = basis.inputs[0], structure(term)
        if isinstance(z, Tensor) and shared is not None:
            cut = basis.columns is not None and z.shape[-1] == len(basis.columns)
            found.setdefault((shared, z.shape, z.dtype, basis.jitter, cut), []).append(c)
    return [members for members in found.values() if len(members) > 1]


def _together(
    terms: Sequence[Any], bases: Sequence[InducingPoints], jitter: Optional[float], name: str
) -> InducingFeatures:
    """The features of summands that differ by numbers only, stacked."""
    inputs = [basis.inputs[0] for basis in bases]
    values = Values(torch.stack(inputs, -3))
    cut = bases[0].columns is not None and inputs[0].shape[-1] == len(bases[0].columns)
    kernel = stacked(terms, values.z, [basis.columns for basis in bases] if cut else None)  # type: ignore[misc]
    return features_of(kernel, [values], bases[0].jitter if jitter is None else jitter, name)
