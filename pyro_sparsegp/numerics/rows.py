"""Recognising rows of data that come in another order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

__all__ = ["Objects", "find_permutation", "fingerprints"]

_Rows = Union[Tensor, Sequence[Tensor]]


class Objects:
    """Tensors to be known again as the objects they are, unchanged since, without a look at their values."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._seen = None
        if not any(tensor.is_inference() for tensor in tensors):  # which do not count their versions
            self._seen = [(weakref.ref(tensor), tensor._version) for tensor in tensors]

    def __getstate__(self) -> dict[str, Any]:
        return {"_seen": None}  # copies are other objects

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are they."""
        if self._seen is None or len(tensors) != len(self._seen):
            return False
        return all(
            seen() is tensor and not tensor.is_inference() and version == tensor._version
            for (seen, version), tensor in zip(self._seen, tensors)
        )


def find_permutation(old: _Rows, new: _Rows) -> Optional[Tensor]:
    """The order in which ``new`` brings the rows of ``old``: p with ``new = old[p]``, or ``None`` if they are others.

    Rows are equal if all their values are, to the last bit; NaN equals NaN and 0 equals −0. Rows that occur repeatedly
    are interchangeable and keep their order, so that p is 0, ..., N − 1 for the same rows in the same order. Takes
    O(N log N + ND) time and O(N) memory: by 64-bit hashes of the rows, and then a comparison.

    :param old: rows along the first dimension, ``(N, ...)``; or several such tensors, side by side, so that of rows
        alike in one of them those belong together that are alike in all.
    :param new: likewise, of the same shapes. Devices may differ.
    :returns: p, ``(N,)``, on the device of ``new``.
    """
    old, new = _as_list(old), _as_list(new)
    if [a.shape for a in old] != [b.shape for b in new]:
        return None
    with torch.no_grad():
        before = [a.to(b.device) for a, b in zip(old, new)]
        one, order = torch.sort(fingerprints(before), stable=True)
        two, other = torch.sort(fingerprints(new), stable=True)
        if not torch.equal(one, two):
            return None
        permutation = torch.empty_like(order)
        permutation[other] = order
        same = all(_equal(a[permutation], b) for a, b in zip(before, new))
    return permutation if same else None


def _as_list(rows: _Rows) -> list[Tensor]:
    return [rows] if isinstance(rows, Tensor) else list(rows)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        one, other = one.double(), other.double()
    return torch.equal(one, other) or bool(torch.where(one.isnan(), other.isnan(), one == other).all())


def fingerprints(rows: _Rows) -> Tensor:
    """A number for each row, the same for equal rows, and else, but by a chance of 2⁻⁶⁴, another: int64, ``(N,)``.

    Numbers that are the same in float64 are equal, whatever their dtypes.
    """
    tensors = _as_list(rows)
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
