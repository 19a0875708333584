"""Numbers by which rows of data are known again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each row, the same for equal rows, and else, but by a chance of 2⁻⁶⁴, another: int64, ``(N,)``.

    Numbers that are the same in float64 are equal, whatever their dtypes.

    :param tensors: rows along the first dimension, side by side.
    """
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        for column in tensor.detach().reshape(len(tensor), tensor[:1].numel()).mT:
            column = column.double() + 0.0  # of −0, 0
            bits = torch.where(column.isnan(), torch.nan, column).view(torch.int64)
            total = _mixed(total * 31 + bits)
    return total


def _mixed(bits: Tensor) -> Tensor:
    # All bits spread over all bits (Steele, Lea and Flood, 2014, SplitMix): floats end in zeros.
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))
