"""Custom gradients."""

from __future__ import annotations

import inspect
from typing import Any

import torch

__all__ = ["Function"]


class Function(torch.autograd.Function):
    """:class:`torch.autograd.Function`, whose ``apply`` asks for the signature of ``forward`` at each call: here it is
    found once.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
