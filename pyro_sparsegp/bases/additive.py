"""The basis of an additive kernel Σ_c k_c: one for each summand, side by side.

Φ = [Φ₁ … Φ_C], so component c has mean Φ_c m_c and the residual's variances add up (Adam, Durrande and
John, 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..kernels.algebra import term_names
from ..kernels.stacked import stacked, structure
from ..numerics.shapes import broadcast_shapes
from .base import Basis, Component, Features
from .inducing import InducingFeatures, InducingPoints, features_of
from .variables import Values

__all__ = ["Additive", "AdditiveFeatures"]


class AdditiveFeatures(Features):
    """Φ = [Φ₁ … Φ_C] for f = Σ_c f_c.

    :param kernel: Σ_c k_c.
    :param parts: of each summand, its features under k_c.
    :param together: of summands that differ by numbers only, which they are, and the features of all of them at once.
    """

    def __init__(
        self, kernel: Any, parts: Sequence[Features], together: Sequence[tuple[Sequence[int], Features]] = ()
    ) -> None:
        super().__init__(kernel, tuple(size for part in parts for size in part.sizes))
        self.parts, self.together = list(parts), list(together)

    def __call__(self, x: Tensor) -> list[Tensor]:
        found: dict[int, list[Tensor]] = {}
        for members, features in self.together if x.dim() == 2 else ():
            (phi,) = features(x)
            found.update((c, [part]) for c, part in zip(members, phi.unbind(-3)))
        return [block for c, part in enumerate(self.parts) for block in (found[c] if c in found else part(x))]

    @property
    def anchor(self) -> Optional[Tensor]:
        parts = [part.anchor for part in self.parts]
        like = next((anchor for anchor in parts if anchor is not None), None)
        if like is None:
            return None
        batch = broadcast_shapes(*(anchor.shape[:-2] for anchor in parts if anchor is not None))
        whole = like.new_zeros(*batch, sum(self.sizes), sum(self.sizes))
        start = 0
        for part, anchor in zip(self.parts, parts):
            stop = start + sum(part.sizes)
            own = torch.eye(stop - start, dtype=like.dtype, device=like.device) if anchor is None else anchor
            whole[..., start:stop, start:stop] = own
            start = stop
        return whole

    @property
    def anchors(self) -> list[Optional[Tensor]]:
        return [anchor for part in self.parts for anchor in part.anchors]

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
        parts: dict[int, Features] = {}
        together = []
        for members in _alike(bases, terms):
            features = _together([terms[c] for c in members], [bases[c] for c in members], jitter, name)
            together.append((members, features))
            for c, z, factor in zip(members, features.z.unbind(-3), features.factor.unbind(-3)):
                parts[c] = InducingFeatures(terms[c], [Values(z)], [[factor]])
        for c, (part, term) in enumerate(zip(bases, terms)):
            if c not in parts:
                parts[c] = part(term, jitter, f"{name}, term {c}")
        return AdditiveFeatures(kernel, [parts[c] for c in range(len(terms))], together)

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
            found.setdefault((shared, z.shape, z.dtype, basis.jitter), []).append(c)
    return [members for members in found.values() if len(members) > 1]


def _together(
    terms: Sequence[Any], bases: Sequence[InducingPoints], jitter: Optional[float], name: str
) -> InducingFeatures:
    """The features of summands that differ by numbers only, stacked."""
    sets: list[Any] = [basis.variables()[0] for basis in bases]
    values = Values(torch.stack([part.z for part in sets], -3))
    kernel = stacked(terms, values.z)
    return features_of(kernel, [values], bases[0].jitter if jitter is None else jitter, name)
