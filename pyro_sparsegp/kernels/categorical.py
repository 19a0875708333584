"""Kernels of a column of codes: levels of a factor, a random effect for each; outputs, and how they go together."""

from __future__ import annotations

from typing import ClassVar, Optional

import torch
from torch import Tensor

from ..numerics.arguments import require_codes, require_count
from ..numerics.functions import shape_of
from ..numerics.linalg import side_by_side
from .algebra import Level
from .base import Scalar, as_tensor, require_one
from .features import FeatureKernel


class CodeKernel(FeatureKernel):
    """A kernel of one column of codes 0, …, C − 1, which inducing inputs keep as they are.

    :param codes: what they are, for errors; ``remedy`` is for data that have others.
    """

    codes: ClassVar[str]
    remedy: ClassVar[str]
    num_codes: int

    def indicators(self, x: Tensor) -> Tensor:
        """[x = c], ``(..., N, C)``."""
        require_one(x, f"{type(self).__name__} reads one column of {self.codes}", f"{type(self).__name__}(...)[2]")
        return x == torch.arange(self.num_codes, dtype=x.dtype, device=x.device)

    def code_columns(self, num: int) -> frozenset[int]:
        return frozenset({0})

    def check_inputs(self, x: Tensor) -> None:
        require_codes(x, self.num_codes, f"{self.codes} in the training inputs' column of {self!r}", self.remedy)


class Categorical(Level, CodeKernel):
    """Independent effects of the levels 0, …, L − 1 of a column, with variance s: k(x, x') = s·[x = x'].

    A random intercept is ``s * Categorical(L)[column]``; ``Categorical(L)[column] * RBF(l)[other]`` is a smooth
    function of the other column for each level. Its features are the L indicators, so that sparse families are exact
    in it. Any other value is a new level: it has the prior's variance, and is equal to itself.

    :param num_levels: L.
    :raises ValueError: if L is no whole number of at least 1.
    """

    columns = None
    has_residual = True  # of a new level
    codes, remedy = "codes", "recode them, or give more levels"

    def __init__(self, num_levels: int, variance: Scalar = 1.0) -> None:
        require_count(num_levels, "Categorical's num_levels")
        super().__init__(variance)
        self.num_levels = self.num_codes = num_levels

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        require_one(x, "Categorical reads one column of codes", "Categorical(...)[2]")
        same = x == (x if z is None else z).mT
        return as_tensor(self.variance, x)[..., None, None] * same

    def features(self, x: Tensor) -> Tensor:
        # √s·[x = c]: all 0 for a new level, whose effect is the residual
        return as_tensor(self.variance, x).sqrt()[..., None, None] * self.indicators(x)


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
        # φ(p) = (A_p·, s_p e_p), so that φ(p)ᵀφ(p') = (AAᵀ + diag(s²))_pp'
        shared = rows @ self.mixing.to(x)
        if self.own is None:
            return shared
        return side_by_side([shared, rows * self.own.to(x)[..., None, :]])
