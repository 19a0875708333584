"""q(w) by natural steps, with an arrow for its precision: each datum has one value of the last block."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.arrow import Arrow
from ..numerics.processes import is_shared, joined
from .anchors import Anchor
from .arrow import ArrowFactor
from .factors import DenseFactor
from .natural import Iterate, NaturalGaussian, Parts, Stepped
from .product import Product
from .steps import Natural, Pass, Rate


class NaturalArrow(NaturalGaussian):
    """q(w) ∝ N(w; 0, I) exp(rᵀw − ½wᵀGw) with G of an arrow's shape, by natural steps that take O(N C² + K C²).

    As :class:`NaturalGaussian`, of C coefficients and, in the last block, K values. Under objectives that take no
    natural steps m alone is a parameter.
    """

    common: Tensor
    cross: Tensor
    own: Tensor

    def __init__(self, sizes: Sequence[int], like: Tensor, rate: Optional[Rate] = None) -> None:
        Natural.__init__(self, sizes, (), like, rate)
        self.layout, self.slices, self._is_known = [(DenseFactor, tuple(range(len(self.sizes))))], [slice(None)], False
        num, own = sum(self.sizes[:-1]), self.sizes[-1]
        # G; and what it is about
        shapes = {"common": (num, num), "cross": (num, own), "own": (own,), "anchor": (0, 0)}
        for name, shape in [*shapes.items(), ("inputs", (0,)), ("level", (0,))]:
            self.register_buffer(name, like.new_zeros(shape))

    @property
    def gram(self) -> Arrow:  # type: ignore[override]
        """G."""
        return Arrow(self.common, self.cross, self.own)

    def _iterate_at(self, anchor: Anchor) -> Iterate:
        iterate = super()._iterate_at(anchor)
        return iterate._replace(parts=iterate.parts[0].parts)  # type: ignore[attr-defined]

    def _gram(self, parts: Parts) -> Arrow:  # type: ignore[override]
        return Arrow(*parts)

    def _precision(self, parts: Parts) -> Arrow:  # type: ignore[override]
        return Arrow(*parts).plus(1.0)

    def _given(self, iterate: Iterate) -> Product:
        precision = self._precision(iterate.parts)
        factor = ArrowFactor(iterate.near + precision.solve(iterate.rest), precision)
        return Product(self.sizes, [factor], [range(len(self.sizes))])

    def _put_parts(self, parts: Parts) -> None:
        self._buffers["common"], self._buffers["cross"], self._buffers["own"] = map(Tensor.detach, parts)

    def _stepped(self, taken: Pass, parts: Parts, right: Tensor, rate: Tensor, weight: Tensor) -> Stepped:
        found, before, each = taken.curvatures(), Arrow(*parts), 2 * rate / weight
        nothing = before * torch.zeros_like(rate)
        target = sum((phi.gram(phi.compact * h[:, None]) for phi, h, *_ in found), nothing)  # type: ignore[attr-defined]
        signed = [(phi, h) for phi, h, _, is_signed in found if is_signed]
        cuts = [phi.gram(phi.compact * (-h).clamp(min=0)[:, None]) for phi, h in signed]  # type: ignore[attr-defined]
        if cuts or is_shared():  # all processes send as many tensors
            cuts = [Arrow(*joined(*sum(cuts, nothing).parts))]
        # G ← (1 − ρ)G + (ρ/c)Φᵀ2HΦ
        new, is_cut = before * (1 - rate) + Arrow(*joined(*target.parts)) * each, None
        if cuts:
            # as NaturalGaussian, where that leaves too little
            left = new.plus(0.5), (new + before * torch.full_like(rate, -0.5)).plus(0.5)
            is_cut = rate.new_tensor(not all(part.is_positive for part in left), dtype=torch.bool)
            new = new + cuts[0] * (each * is_cut)
        precision = new.plus(1.0)
        is_positive = precision.is_positive
        shift = precision.solve(right) if is_positive else torch.zeros_like(right)
        return new.parts, shift, is_cut, rate.new_tensor(float(not is_positive))

    @torch.no_grad()
    def put_sums(self, anchor: object, gram: Any, pull: Tensor) -> None:
        """Have q be that of G, an arrow, and r under L: steps go on at a later one's rate."""
        self._put_known(gram.plus(1.0).solve(pull), gram.parts, anchor)
