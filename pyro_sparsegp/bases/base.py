"""The seam between functions and coefficients.

A basis module owns parameters (inducing inputs); called with a kernel it gives fresh, disposable
:class:`Features`, with which f(x) = μ(x) + φ(x)ᵀw + r(x), w ~ N(0, I), r ⟂ w. The residual's covariance is
always k − φφᵀ, so the features alone say everything.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Optional, Self

from torch import Tensor

from ..gaussians.base import Gaussian
from ..kernels import Kernel
from ..modules import AbstractModule
from ..numerics.arguments import Documented

Component = tuple[Any, "Features", tuple[int, ...]]
Moments = tuple[Tensor, Tensor, Tensor]  # Φm, diag(Φ(S − I)Φᵀ) and the function's prior variance, (..., N) each


class Features(Documented, ABC):
    """φ under one kernel: ``features(x)`` gives a block ``(..., N, M_b)`` for each block of coefficients.

    :param kernel: the kernel that the features belong to.
    :param sizes: M_b, the number of coefficients of each block.
    """

    def __init__(self, kernel: Any, sizes: tuple[int, ...]) -> None:
        self.kernel, self.sizes = kernel, sizes
        self.cross = kernel  # the covariance of this function with f; of f itself it is the kernel

    trains: Any = True  # whether the features may move with parameters or latents

    @abstractmethod
    def __call__(self, x: Tensor) -> list[Tensor]: ...

    def marginals(self, x: Tensor, coefficients: Gaussian, known: Optional[list[Tensor]] = None) -> Moments:
        """Φm, diag(Φ(S − I)Φᵀ) and the function's prior variance, ``(..., N)`` each.

        :param known: Φ at x, if it is known.
        """
        return (*coefficients.moments(self(x) if known is None else known), self.cross.diag(x))

    # L, lower triangular, (..., M, M), if u = Lw has a meaning that hyperparameters do not change, such as f's values
    # at inducing inputs; of features that are followed AtRows; None if w itself has such a meaning.
    anchor: Any = None

    @property
    def anchors(self) -> list[Optional[Tensor]]:
        """L's blocks on the diagonal, ``(..., M_b, M_b)`` for each block of coefficients, or ``None``."""
        return self._blocks(self.anchor)

    def _blocks(self, whole: Optional[Tensor]) -> list[Optional[Tensor]]:
        if whole is None:
            return [None] * len(self.sizes)
        edges = list(itertools.accumulate(self.sizes, initial=0))
        return [whole[..., a:b, a:b] for a, b in itertools.pairwise(edges)]

    places: Optional[Tensor] = None  # Z, if u is values at inputs
    moves = False  # whether these are learned

    # u, (M,), with L⁻¹u the coefficients of the function 1, or near them; None where it is not known
    ones: Any = None

    def components(self) -> list[Component]:
        """For each summand k_c of the kernel, by default one: k_c, the features of f_c, and their blocks of w."""
        return [(self.kernel, self, tuple(range(len(self.sizes))))]

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        """``num`` draws of the prior as functions, with their coefficients w', ``(num, ..., M_b)`` a block.

        ``None`` where the kernel can draw no functions or their coefficients are not known.
        """
        return None


class CrossFeatures(Features):
    """φ from covariances with f: of the whole f, or of a summand f_c, whose own kernel these are then."""

    def of_summand(self, cross: object) -> Self:
        """The same coefficients' features of another function, whose covariance with f is ``cross``."""
        part = copy.copy(self)
        part.cross = cross
        return part

    def components(self) -> list[Component]:
        blocks = tuple(range(len(self.sizes)))
        return [(term, self.of_summand(term), blocks) for term in self.kernel.terms]


class Basis(AbstractModule):
    """A module that owns what defines φ; calling it with a kernel gives :class:`Features`."""

    @abstractmethod
    def forward(self, kernel: Kernel, jitter: Optional[float], name: str) -> Features:
        """φ under ``kernel``; ``name`` is the site's, for errors."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The shapes in plain Python that make a new module for a saved state."""
