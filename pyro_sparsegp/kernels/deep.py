"""Deep basis kernels: a network as the finite feature map of a kernel (Zhu, Yuchi and Xie, 2025)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Optional

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from ..numerics.chunks import by_rows
from ..numerics.linalg import row_squares
from .base import Explicit, PriorFunctions
from .features import FeatureKernel


class DeepBasis(FeatureKernel):
    """k(x, x') = φ(x)ᵀφ(x') with a network φ, (N, D) to (N, r), and a diagonal that makes the prior variance uniform.

    The variance correction (section 3.3) adds independent values of variance

        c(x) = maxₙ ‖φ(xₙ)‖² − ‖φ(x)‖² ≥ 0

    to f. By itself, and in a step of training, the maximum is over the rows that the kernel is given; its gradient is
    that of the largest row. ``relative_to(rows)`` is the kernel of prediction: the maximum is over those rows,
    evaluated now, and the row itself. Guides and :meth:`GaussianProcess.given` call it with the training inputs.
    Without the correction, training tends to a kernel of rank one and vanishing uncertainty (theorem 1).

    In training the correction is the penalty Σₙ c(xₙ)/(2σ²). A network as torch initialises it has features of uneven
    norm, and the penalty at first outweighs the fit many times: training shrinks the features towards a constant and
    recovers slowly. Small initial features (the last layer times 0.1) help; a network of r > 1 outputs that ends in
    ``s * torch.nn.functional.normalize(h, dim=-1)`` with a learned s has c = 0 throughout.

    In a model the network must be registered, ``pyro.module("net", net)``, and the kernel is built in each run. It is
    evaluated several times a run, in parts: its output must depend on the row alone. Sums, products, scaled
    and column-selecting kernels carry the diagonal along: a summand or factor is corrected by itself. A kernel of
    your own with other features is a :class:`FeatureKernel`.

    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh())
    >>> kernel = DeepBasis(network)
    >>> kernel.diag(torch.rand(5, 2)).unique().numel()  # one level for all rows
    1

    :param network: a module, or any callable of tensors, (N, D) to (N, r).
    :param variance_correction: whether k has the diagonal term c.
    :raises ValueError: if the network is not callable, does not give one row of features for each row, or has layers in
        training mode (dropout, batch normalisation) or weights (``PyroSample``) that differ from call to call.
    """

    any_dtype = False

    def __init__(self, network: Callable[[Tensor], Tensor], variance_correction: bool = True) -> None:
        if not callable(network) or isinstance(network, type):
            raise ValueError(f"DeepBasis's network must be a module or a callable (N, D) -> (N, r), got {network!r}")
        if isinstance(network, nn.Module):
            _require_repeatable(network)
        self.network, self.variance_correction = network, bool(variance_correction)
        # maxₙ ‖φ(xₙ)‖², None where it is of the rows given; nothing is below 0.
        self.level: Any = None if variance_correction else 0.0

    def features(self, x: Tensor) -> Tensor:
        phi = self.network(x)
        if not isinstance(phi, Tensor) or phi.dim() < 2 or phi.shape[:-1] != x.shape[:-1] or not phi.shape[-1]:
            found = f"shape {tuple(phi.shape)}" if isinstance(phi, Tensor) else type(phi).__name__
            raise ValueError(
                f"DeepBasis's network must turn inputs of shape {tuple(x.shape)} into features of shape "
                f"{(*x.shape[:-1], 'r')}, one row for each row; it returned {found}"
            )
        return phi

    def explicit(self, x: Tensor) -> Explicit:
        phi = self.features(x)
        return Explicit(phi, self._diagonal(row_squares(phi)))

    def _diagonal(self, squares: Tensor) -> Tensor:
        return squares.clamp(min=squares.amax(-1, keepdim=True) if self.level is None else self.level)

    def _squares(self, x: Tensor) -> Tensor:
        return by_rows(lambda rows: (row_squares(self.features(rows)),), x)[0]

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        phi = self.features(x)
        if z is not None:
            return phi @ self.features(z).mT
        squares = row_squares(phi)
        # ΦΦᵀ + diag(max ‖φ‖² − ‖φ(xₙ)‖²) (section 3.3)
        return phi @ phi.mT + torch.diag_embed(self._diagonal(squares) - squares)

    def diag(self, x: Tensor) -> Tensor:
        return self._diagonal(self._squares(x))

    @property
    def depends_on_rows(self) -> bool:
        return self.level is None

    def relative_to(self, rows: Tensor) -> DeepBasis:
        if not self.depends_on_rows or not rows.shape[-2]:
            return self
        rows = rows.flatten(0, -2)
        with torch.no_grad():
            largest = self._squares(rows).argmax(-1, keepdim=True)  # stays on the device
        kernel = copy.copy(self)
        # The largest row alone is evaluated with its gradient.
        kernel.level = row_squares(self.features(rows.index_select(0, largest)))[0]
        return kernel

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        # With a diagonal term a draw must remember where it was evaluated: exact conditioning does.
        return None if self.variance_correction else super().prior_functions(num, num_features, x)


_UNREPEATABLE = "Dropout", "BatchNorm"  # in the names of torch's classes, whatever their number of dimensions


def _require_repeatable(network: nn.Module) -> None:
    for name, part in network.named_modules():
        kinds = [cls.__name__ for cls in type(part).__mro__]
        if part.training and any(word in kind for word in _UNREPEATABLE for kind in kinds):
            raise ValueError(
                f"DeepBasis's network has a {type(part).__name__} in training mode at {name or 'its top'!r}, whose "
                "output differs from call to call; call network.eval(), or use LayerNorm and weight decay."
            )
        if isinstance(part, PyroModule) and part._pyro_samples:
            raise ValueError(
                f"DeepBasis's network draws {sorted(part._pyro_samples)} anew at each call, and a kernel calls it "
                "several times. Draw the weights by pyro.sample in the model and give DeepBasis a function of them."
            )
