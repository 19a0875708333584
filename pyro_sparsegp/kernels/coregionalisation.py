"""How outputs go together, as a kernel of their numbers."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..numerics.shapes import broadcast_shapes, shape_of
from .categorical import CodeKernel


class Coregionalisation(CodeKernel):
    """k(p, p') = (AAᵀ + diag(s²))_pp' for a column of output numbers 0, …, P − 1: low rank plus diagonal.

    Times a kernel of the inputs it is the intrinsic model of coregionalisation, f_p = Σ_q A_pq g_q + s_p h_p with
    independent functions g_q, h_p of that kernel; a sum of such products, a kernel each, is the linear model (Journel
    and Huijbregts, 1978; Bonilla, Chai and Williams, 2008). A datum is a row, its output's number in a column:

    >>> mixing = torch.tensor([[1.0], [0.5], [-0.5]])
    >>> kernel = Coregionalisation(mixing)[1]
    >>> kernel(torch.tensor([[0.3, 0.0], [0.7, 2.0]]))
    tensor([[ 1.0000, -0.5000],
            [-0.5000,  0.2500]])

    Outputs may be observed at inputs of their own; a missing value is not a row. Its features are A's columns and
    the indicators, so that sparse families are exact in it alone.

    :param mixing: A, ``(..., P, Q)``: a parameter, or sampled, from a start that is not 0.
    :param own: s, ``(..., P)``, standard deviations of what each output has by itself; none by default.
    :raises ValueError: naming the argument, if the shapes do not fit.
    """

    event_dims = (("mixing", 2), ("own", 1))
    codes, remedy = "outputs", "renumber them, or give mixing more rows"

    def __init__(self, mixing: Tensor, own: Optional[Tensor] = None) -> None:
        if not isinstance(mixing, Tensor) or mixing.dim() < 2 or not mixing.numel():
            raise ValueError(
                f"Coregionalisation's mixing must be a matrix, outputs by functions, (P, Q); got {shape_of(mixing)}"
            )
        if own is not None and (not isinstance(own, Tensor) or own.shape[-1:] != mixing.shape[-2:-1]):
            raise ValueError(
                f"Coregionalisation's own must be a standard deviation for each of {mixing.shape[-2]} outputs; got "
                f"{shape_of(own)}"
            )
        self.mixing, self.own = mixing, own

    @property
    def num_codes(self) -> int:  # type: ignore[override]
        """P."""
        return self.mixing.shape[-2]

    def features(self, x: Tensor) -> Tensor:
        rows = self.indicators(x).to(x.dtype)
        # Zeros would make an output that does not exist a certainty. (A guide's first call names the number.)
        rows = torch.where(rows.any(-1, keepdim=True), rows, torch.nan)
        shared = rows @ self.mixing.to(x)
        if self.own is None:
            return shared
        alone = rows * self.own.to(x)[..., None, :]
        shape = broadcast_shapes(shared.shape[:-1], alone.shape[:-1])
        return torch.cat([shared.expand(*shape, -1), alone.expand(*shape, -1)], -1)
