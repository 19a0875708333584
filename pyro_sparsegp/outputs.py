"""Outputs that are mixtures of functions, as values: no kernel knows of it."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from .warned import without


@without(own="add what is an output's own to the result")
def mix_outputs(mixing: Tensor, shared: Tensor, output: Optional[Tensor] = None) -> Tensor:
    """Mixed outputs f_p(x_n) = Σ_q A_pq g_q(x_n): a linear model of coregionalisation, but for parts of its outputs'
    own, which may be added.

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
    for name, given in (("mixing", mixing), ("shared", shared), ("output", output)):
        if not isinstance(given, Tensor) and (given is not None or name != "output"):
            raise ValueError(f"mix_outputs' {name} must be a tensor, got {type(given).__name__}")
    if mixing.dim() != 2 or shared.dim() < 2 or shared.shape[-2] != mixing.shape[-1]:
        raise ValueError(
            f"mix_outputs takes mixing (P, Q) and shared (Q, N), got {tuple(mixing.shape)} and {tuple(shared.shape)}"
        )
    rows, num = mixing.shape[0], shared.shape[-1]
    if output is None:
        return mixing @ shared
    whole = output.shape == (num,) and not output.is_floating_point()
    if not whole or not ((output >= 0) & (output < rows)).all():
        raise ValueError(
            f"mix_outputs' output must be {num} whole numbers from 0 to {rows - 1}, one a row, got {output.dtype} of "
            f"shape {tuple(output.shape)}{f', up to {int(output.max())}' if whole else ''}"
        )
    return (mixing[output].mT * shared).sum(-2)
