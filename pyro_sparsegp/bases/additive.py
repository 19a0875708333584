"""The basis of an additive kernel Σ_c k_c: one for each summand, side by side.

Φ = [Φ₁ … Φ_C], so component c has mean Φ_c m_c and the residual's variances add up (Adam, Durrande and
John, 2018, section 3.2).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..gaussians.base import Gaussian
from ..kernels.algebra import term_names
from ..kernels.stacked import stacked, structure
from ..numerics.linalg import Unbound, Whitening, on_diagonal
from ..numerics.shapes import broadcast_shapes
from .base import Basis, Component, Features
from .features import ExplicitFeatures
from .inducing import InducingFeatures, InducingPoints, features_of
from .variables import Values


class AdditiveFeatures(Features):
    """Φ = [Φ₁ … Φ_C] for f = Σ_c f_c.

    :param kernel: Σ_c k_c.
    :param sizes: the sizes of all blocks.
    :param groups: numbers of summands, and their features: features of one summand under k_c, or stacked features of
        summands that differ by numbers only.
    :param part: makes such a summand's own features, of c, its L and zeros whose derivative is L⁻¹dL.
    """

    def __init__(
        self,
        kernel: Any,
        sizes: tuple[int, ...],
        groups: Sequence[tuple[Sequence[int], Any]],
        part: Callable[[int, Tensor, Tensor], Features],
    ) -> None:
        super().__init__(kernel, sizes)
        self.groups, self._part = groups, part
        # What is asked of summands that are all in one stack stays one tensor.
        self._stack = groups[0][1] if len(groups) == 1 and len(groups[0][0]) > 1 else None

    def _in_order(self, ask: Callable[[Any], Sequence[Any]]) -> list[Any]:
        # What features give, a list of one entry a block each, summand by summand.
        if self._stack is not None:
            return Unbound(*ask(self._stack))
        found: dict[int, Sequence[Any]] = {}
        for members, features in self.groups:
            given = ask(features)
            stacked = len(members) > 1
            found.update(zip(members, [[part] for part in given[0].unbind(-3)] if stacked else [given]))
        return [each for c in range(len(found)) for each in found[c]]

    @functools.cached_property
    def parts(self) -> list[Features]:
        """Each summand's features."""
        found: dict[int, Features] = {}
        for members, features in self.groups:
            alone = len(members) == 1
            parts = [features] if alone else map(self._part, members, *(m.unbind(-3) for m in features.whitened))
            found.update(zip(members, parts))
        return [found[c] for c in range(len(found))]

    def __call__(self, x: Tensor) -> list[Tensor]:
        if x.dim() != 2:
            return [block for part in self.parts for block in part(x)]
        return self._in_order(lambda features: features(x))

    def marginals(
        self, x: Tensor, coefficients: Gaussian, known: Optional[list[Tensor]] = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, change = coefficients.moments(self(x) if known is None else known)
        if x.dim() != 2:
            return mean, change, self.cross.diag(x)
        own = [features.kernel.diag(x) for _, features in self.groups]
        parts = [part.sum(-2) if len(members) > 1 else part for part, (members, _) in zip(own, self.groups)]
        return mean, change, functools.reduce(torch.add, parts)

    @property
    def anchor(self) -> Optional[Tensor]:
        found = list(zip(self.sizes, self.anchors))
        given = [anchor for _, anchor in found if anchor is not None]
        if not given:
            return None
        like, batch = given[0], broadcast_shapes(*(anchor.shape[:-2] for anchor in given))
        own = [torch.eye(n, dtype=like.dtype, device=like.device) if a is None else a for n, a in found]
        return on_diagonal(own, like.new_zeros(*batch, sum(self.sizes), sum(self.sizes)))

    @property
    def anchors(self) -> Sequence[Optional[Tensor]]:
        return self._in_order(lambda features: features.anchors)

    @property
    def ones(self) -> Optional[Tensor]:
        """Of the blocks that have values of theirs, each has its share of 1."""
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
        draws: list[Any] = [part.prior_functions(num, num_features, x) for part in self.parts]
        if any(draw is None for draw in draws):
            return None
        return lambda x: sum(f(x) for f, _ in draws), [w for _, own in draws for w in own]


class Additive(Basis):
    """A basis for each summand of the kernel.

    :param parts: one basis per summand, in the order of ``kernel.terms``.
    :param names: the summands' names.
    """

    def __init__(self, parts: Sequence[Basis], names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for i, part in enumerate(parts):
            setattr(self, f"term_{i}", part)

    @property
    def parts(self) -> list[Any]:
        """The bases of the summands."""
        return [getattr(self, f"term_{i}") for i in range(len(self.names))]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all blocks."""
        return tuple(size for part in self.parts for size in part.sizes)

    def forward(self, kernel: Any, jitter: Optional[float], name: str) -> AdditiveFeatures:
        terms = kernel.terms
        if (names := term_names(kernel)) != self.names:
            raise ValueError(
                f"the terms of the kernel of site {name!r} are {list(names)} now, and were {list(self.names)} when the "
                "guide was initialised or saved; their order and names must not change."
            )
        bases = self.parts

        def part(c: int, factor: Tensor, turn: Tensor) -> Features:
            return InducingFeatures(terms[c], bases[c].variables(), Whitening(factor, turn))

        groups: list[tuple[Sequence[int], Any]] = []
        for members, inputs in _alike(bases, terms):
            c = members[0]
            if len(members) == 1:
                groups.append((members, bases[c](terms[c], jitter, f"{name}, term {c}")))
            else:
                some = [terms[c] for c in members], [bases[c] for c in members]
                groups.append((members, _together(*some, inputs, jitter, name)))
        return AdditiveFeatures(kernel, self.sizes, groups, part)

    def spec(self) -> dict[str, Any]:
        return {"kind": "additive", "names": list(self.names), "parts": [part.spec() for part in self.parts]}


def rebuilt(spec: dict[str, Any], like: Tensor, trainable: bool, sets: Sequence[Any]) -> Any:
    """A basis of that ``spec``, its values still to be loaded.

    :param sets: the inducing inputs that its family declares: of each set, or of each summand.
    """
    if spec["kind"] == "additive":
        parts = [rebuilt(part, like, trainable, [own]) for part, own in zip(spec["parts"], sets)]
        return Additive(parts, spec["names"])
    if spec["kind"] == "features":
        rows = spec.get("rows")  # older files have none
        return ExplicitFeatures(spec["size"], None if rows is None else like.new_zeros(rows))
    return InducingPoints.rebuilt(spec, like, trainable, sets)


def _alike(bases: Sequence[Basis], terms: Sequence[Any]) -> list[tuple[list[int], list[Any]]]:
    # Summands that differ by numbers only, with values at as many inputs each for a basis, and these inputs, which are
    # asked for once a run; others by themselves.
    found: dict[Any, tuple[list[int], list[Any]]] = {}
    for c, (basis, term) in enumerate(zip(bases, terms)):
        key: Any = c
        z: Any = None
        if type(basis) is InducingPoints and len(basis.sizes) == 1 and not basis.of_source[0]:
            z, shared = basis.inputs[0], structure(term)
            if isinstance(z, Tensor) and shared is not None:
                key = shared, z.shape, z.dtype, basis.jitter, basis.is_cut
        members, inputs = found.setdefault(key, ([], []))
        members.append(c)
        inputs.append(z)
    return list(found.values())


def _together(
    terms: Sequence[Any], bases: Sequence[InducingPoints], inputs: list[Tensor], jitter: Optional[float], name: str
) -> InducingFeatures:
    # The features of summands that differ by numbers only, stacked.
    values = Values(torch.stack(inputs, -3))
    columns: Any = [basis.columns for basis in bases] if bases[0].is_cut else None
    jitter = bases[0].jitter if jitter is None else jitter
    return features_of(stacked(terms, values.z, columns), [values], jitter, name)
