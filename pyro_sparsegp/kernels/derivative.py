"""Functions and their partial derivatives as one process."""

from collections.abc import Callable
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.func import vmap

from ..numerics.arguments import require_codes
from ..numerics.functions import if_known
from .algebra import Kernel, kernel_by_row
from .base import PriorFunctions, second
from .stationary import Matern12

_jvp: Any = torch.func.jvp  # a function's values, and their change in a direction


class Derivative(Kernel):
    """f and its partial derivatives at inputs (x, j): f(x) for j = 0, ∂f/∂x_j(x) for j = 1, …, D.

    A Gaussian process and its derivatives are jointly Gaussian (Solak et al., 2003): with ∂₀ the identity,

        cov((x, i), (z, j)) = ∂_{x_i} ∂_{z_j} k(x, z),

    by two passes of forward mode through any k, exactly, at some four times its cost. The last column of the inputs is
    j; :meth:`at` makes them, and :meth:`of` a mean function of them. Observed slopes are rows like others, with noise
    of their own, and inducing variables may be of either kind. Functions must be differentiable: ``Matern12`` has no
    derivatives, ``Matern32`` has first ones. ``White`` adds noise to values alone.

    :param kernel: k, of D columns.
    :raises ValueError: if k is no kernel, or its diagonal depends on the other rows.
    """

    def __init__(self, kernel: object) -> None:
        kernel = kernel_by_row(kernel, "Derivative's kernel")
        if _is_rough(kernel):
            raise ValueError(f"Matern12's functions have no derivative, as in {kernel!r}: take Matern32 or smoother")
        self.parts = (kernel,)

    @property
    def kernel(self) -> Any:
        return self.parts[0]

    @staticmethod
    def at(x: Tensor, j: Union[int, Tensor] = 0) -> Tensor:
        """Inputs (x, j), ``(..., N, D + 1)``.

        :param x: ``(..., N, D)``.
        :param j: 0 for values; 1 to D for the derivative by this column. A number for all rows, or one for each.
        :raises ValueError: if x is not a matrix, or a number is not from 0 to D.
        """
        if x.dim() < 2:
            raise ValueError(f"Derivative.at's x is (..., N, D), got shape {tuple(x.shape)}: a column is x[:, None]")
        if isinstance(j, int) and not 0 <= j <= x.shape[-1]:
            raise ValueError(f"Derivative.at's j must be 0 (values) or a column, 1 to {x.shape[-1]}, got {j}")
        codes = torch.as_tensor(j, dtype=x.dtype, device=x.device).expand(x.shape[:-1])
        return torch.cat([x, codes[..., None]], -1)

    @staticmethod
    def of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function of x, ``(..., N, D)`` to ``(..., N)``, and its derivatives, as a function of (x, j)."""

        def both(inputs: Tensor) -> Tensor:
            x, along, slopes = _split(inputs)
            value, change = _jvp(function, (x,), (along,))
            return torch.where(slopes, change, value)

        return both

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        found = self._cross(x, second(x, z))
        if z is None:  # a diagonal term of k's is the values'
            x, _, slopes = _split(x)
            values = ~(slopes[..., :, None] | slopes[..., None, :])
            found = torch.where(values, self.kernel(x), 0.5 * (found + found.mT))
        return found

    def _cross(self, x: Tensor, z: Tensor) -> Tensor:
        left, along_left, slopes_left = _split(x)
        right, along_right, slopes_right = _split(z)

        def by_right(left: Tensor) -> tuple[Tensor, Tensor]:
            return _jvp(lambda right: self.kernel(left, right), (right,), (along_right,))

        # k and ∂_z k, and how they change with x: ∂_x k and ∂_x ∂_z k (Solak et al., 2003), along each row's direction
        (k, k_right), (k_left, k_both) = _jvp(by_right, (left,), (along_left,))
        columns = slopes_right[..., None, :]
        of_slopes, of_values = torch.where(columns, k_both, k_left), torch.where(columns, k_right, k)
        return torch.where(slopes_left[..., :, None], of_slopes, of_values)

    def diag(self, x: Tensor) -> Tensor:
        # N matrices of one row each; of values k has a diagonal of its own
        inner, _, slopes = _split(x)

        def one(row: Tensor) -> Tensor:
            return self._cross(row[..., None, :], row[..., None, :])[..., 0, 0]

        return torch.where(slopes, vmap(one, in_dims=-2, out_dims=-1)(x), self.kernel.diag(inner))

    def features(self, x: Tensor) -> Optional[Tensor]:
        inner, along, slopes = _split(x)
        if self.kernel.features(inner[..., :1, :]) is None:
            return None
        value, change = _jvp(self.kernel.features, (inner,), (along,))
        return torch.where(slopes[..., None], change, value)

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        # the derivative of a draw is a draw of the derivative
        return if_known(self.of, self.kernel.prior_functions(num, num_features, x[..., :-1]))

    def code_columns(self, num: int) -> frozenset[int]:
        return self.kernel.code_columns(num - 1) | {num - 1}

    def on_columns(self, num: int) -> Any:
        return self.with_parts([self.kernel.on_columns(num - 1)])

    def check_inputs(self, x: Tensor) -> None:
        what = f"j in the last column of the inputs of {self!r}"
        remedy = "0 is a value, others are derivatives by the column of that number; Derivative.at(x, j) makes inputs"
        require_codes(x[..., -1], x.shape[-1], what, remedy)
        self.kernel.check_inputs(x[..., :-1])


def _is_rough(kernel: Any) -> bool:
    return isinstance(kernel, Matern12) or any(map(_is_rough, kernel.parts))


def _split(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # x, the directions of derivatives (0 of values), and which rows are derivatives.
    x, code = inputs[..., :-1], inputs[..., -1].detach()
    columns = torch.arange(1, x.shape[-1] + 1, dtype=code.dtype, device=code.device)
    along = (code[..., None] == columns).to(x.dtype)
    # Zeros would make a derivative that does not exist a certainty. (A guide's first call names the number.)
    known = along.any(-1, keepdim=True) | (code == 0)[..., None]
    return x, torch.where(known, along, torch.nan), code != 0
