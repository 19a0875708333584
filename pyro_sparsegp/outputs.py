"""Outputs that are mixtures of functions, as values: no kernel knows of it."""

from typing import Optional

from torch import Tensor

from .numerics.arguments import require_codes
from .numerics.functions import shape_of


def mix_outputs(mixing: Tensor, shared: Tensor, output: Optional[Tensor] = None) -> Tensor:
    """Mixed outputs f_p(x_n) = Σ_q A_pq g_q(x_n): a linear model of coregionalisation, without parts of the
    outputs' own, which you may add.

    It returns all outputs at all inputs, ``(P, N)``; or with ``output`` one output per row, ``(N,)``, if outputs are
    observed at different inputs. A is any tensor, sampled or a parameter; g are values of GP sites.

    >>> import torch
    >>> A, g = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.1, 0.2, 0.3]])
    >>> mix_outputs(A, g, output=torch.tensor([0, 1, 1]))
    tensor([0.1000, 0.4000, 0.6000])

    :param mixing: A, ``(P, Q)``.
    :param shared: g at the inputs, ``(Q, N)``.
    :param output: the number of each row's output, ``(N,)`` whole numbers from 0 to P − 1.
    :raises ValueError: naming the argument, if the shapes do not fit.
    """
    tensors = isinstance(mixing, Tensor) and isinstance(shared, Tensor) and mixing.dim() == 2 <= shared.dim()
    if not tensors or shared.shape[-2] != mixing.shape[-1]:
        raise ValueError(
            f"mix_outputs takes tensors mixing (P, Q) and shared (Q, N), got {shape_of(mixing)} and {shape_of(shared)}"
        )
    if output is None:
        return mixing @ shared
    if not isinstance(output, Tensor) or output.shape != shared.shape[-1:] or output.is_floating_point():
        raise ValueError(
            f"mix_outputs' output must be a tensor of {shared.shape[-1]} whole numbers, one a row, got "
            f"{shape_of(output)}{getattr(output, 'dtype', '')}"
        )
    require_codes(output, len(mixing), "mix_outputs' output", "mixing has a row for each output")
    return (mixing[output].mT * shared).sum(-2)
