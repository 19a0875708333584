"""The kernel's own finite features as a basis, passed over in blocks where there are many rows.

With N rows, R features and B rows a block, a pass takes O(NR²) time and O(N + BR + R²) memory, gradients included:
what a block needs on the way back is made again there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..gaussians.anchors import AtRows
from ..gaussians.base import Gaussian
from ..gaussians.product import sums_of
from ..gaussians.sites import Sites
from ..kernels import Kernel
from ..numerics.functions import by_rows, dropping, if_known, is_long, pieces
from ..numerics.linalg import row_squares
from .base import Basis, Component, Features, Moments

_ROWS, _EACH = 256, 4  # rows that say how features move: so many at least, and so many a feature


class ExplicitFeatures(Basis):
    """The kernel's own R features; no parameters. R = 0 for a term that is all residual, such as white noise."""

    rows: Optional[Tensor]  # inputs (K, D); f's values there keep their meaning while features move

    def __init__(self, size: int, rows: Optional[Tensor] = None) -> None:
        super().__init__()
        self.size, self.sizes = size, (size,) if size else ()
        self.register_buffer("rows", if_known(lambda x: x.detach().clone(), rows))

    @classmethod
    def among(cls, x: Tensor, size: int) -> ExplicitFeatures:
        """Features that are followed at some random rows of x, ``(..., N, D)``, or at all where these are few."""
        num, most = x.shape[-2], max(_ROWS, _EACH * size)
        return cls(size, x if num <= most else x[..., torch.randperm(num, device=x.device)[:most], :])

    def forward(self, kernel: Kernel, jitter: Optional[float], name: str) -> KernelFeatures:
        return KernelFeatures(kernel, self.sizes, self.rows)

    def spec(self) -> dict[str, Any]:
        return {"kind": "features", "size": self.size, "rows": if_known(lambda x: list(x.shape), self.rows)}


class KernelFeatures(Features):
    """The kernel's own finite features, k(x, z) = φ(x)ᵀφ(z), in one block or, of R = 0, none."""

    def __init__(self, kernel: Any, sizes: tuple[int, ...], rows: Optional[Tensor] = None) -> None:
        super().__init__(kernel, sizes)
        self.size, self.rows = sum(sizes), rows
        self._known: Any = (None, None)  # the last inputs, and what explicit gave there

    def explicit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Φ and the kernel's diagonal at x; kept for the next call at the same x."""
        if self._known[0] is not x:
            self._known = x, self._explicit(self.kernel, x)
        return self._known[1]

    def _explicit(self, kernel: Kernel, x: Tensor) -> tuple[Tensor, Tensor]:
        found = kernel.explicit(x)
        if found is None or found[0].shape[-1] != self.size:
            have = "no" if found is None else found[0].shape[-1]
            raise ValueError(f"{self.kernel!r} has {have} features now, {self.size} in the first call: keep as many")
        return found

    def __call__(self, x: Tensor) -> list[Tensor]:
        return [self.explicit(x)[0]] if self.size else []

    @functools.cached_property
    def anchor(self) -> Any:
        if self.rows is None:
            return None
        # by blocks of rows, as all that a network makes: test_blocks_change_nothing
        phi = by_rows(lambda rows: (self._explicit(self.kernel, rows)[0].mT,), self.rows)[0].mT
        return AtRows([phi], spans=False)

    @functools.cached_property
    def trains(self) -> bool:
        """Whether the features are of parameters or latents with a gradient, as one row's show."""
        return self.rows is not None and self._explicit(self.kernel, self.rows[..., :1, :])[0].requires_grad

    def gram(self, sites: Sites, absorb: bool = False) -> tuple[Tensor, Tensor]:
        """ΦᵀΛΦ, ``(..., R, R)``, and Φᵀλ(z − μ), ``(..., R)``, of sites, which may ``absorb`` the residual as noise."""

        def sums(found: tuple[Tensor, Tensor], precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
            phi, diagonal = found
            if absorb:
                # 1/(1/λ + c) = λ/(1 + λc) with c = k(x, x) − ‖φ‖² (Zhu, Yuchi and Xie, 2025, eq. 12)
                residual = (diagonal - row_squares(phi)).clamp(min=0)
                shrunk = 1 / (1 + precision * residual)
                precision, linear = precision * shrunk, linear * shrunk
            # ΦᵀΛΦ and Φᵀλ(z − μ)
            return sums_of(phi, precision, linear)

        x = sites.inputs
        if not is_long(x):
            return sums(self.explicit(x), sites.precision, sites.linear)

        def of(rows: slice) -> tuple[Tensor, Tensor]:
            return sums(self._explicit(self.kernel, x[rows]), sites.precision[..., rows], sites.linear[..., rows])

        totals: Any = (0, 0)
        for rows in pieces(len(x), x):
            gram, right = dropping(of, rows)
            totals = totals[0] + gram, totals[1] + right
        return totals

    def marginals(self, x: Tensor, coefficients: Gaussian, known: Optional[list[Tensor]] = None) -> Moments:
        if not self.size:
            return super().marginals(x, coefficients, known)
        # a diagonal that depends on the rows is that in the company of all
        settled = self.kernel.relative_to(x) if is_long(x) else self.kernel

        def moments(rows: Tensor) -> Moments:
            phi, diagonal = self.explicit(x) if rows is x else self._explicit(settled, rows)
            return (*coefficients.moments([phi]), diagonal)

        return by_rows(moments, x)  # type: ignore[return-value]

    def components(self) -> list[Component]:
        terms = self.kernel.terms
        if len(terms) == 1:
            return super().components()
        return [part for i in range(len(terms)) for part in _TermFeatures(terms, i, self.sizes).components()]

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        if self.kernel.has_residual:
            return None
        phi = self(x[..., :1, :])[0]
        w = torch.randn(num, *phi.shape[:-2], phi.shape[-1], dtype=x.dtype, device=x.device)
        return lambda x: (self(x)[0] @ w[..., None])[..., 0], [w]


class _TermFeatures(Features):
    """The features of one summand, at their place among all features, with zeros for the others."""

    def __init__(self, terms: Sequence[Any], index: int, sizes: tuple[int, ...]) -> None:
        super().__init__(terms[index], sizes)
        self.terms, self.index = terms, index

    def __call__(self, x: Tensor) -> list[Tensor]:
        phi, before = self.kernel.features(x), self.terms[: self.index]
        start = sum(term.features(x[..., :1, :]).shape[-1] for term in before)
        whole = phi.new_zeros(*phi.shape[:-1], sum(self.sizes))
        whole[..., start : start + phi.shape[-1]] = phi
        return [whole]
