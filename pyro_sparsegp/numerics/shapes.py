"""Shapes of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def shape_of(value: Any) -> str:
    """A tensor's shape, or the class of what is none, for errors."""
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """As :func:`torch.broadcast_shapes`, whose first call imports sympy, for most of a second."""
    if shapes and shapes.count(shapes[0]) == len(shapes):
        return torch.Size(shapes[0])
    return torch.Size(np.broadcast_shapes(*map(tuple, shapes)))
