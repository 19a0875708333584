"""Quantiles of a guide's posteriors, from draws; and the arguments that a summary takes where none are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..program.mapping import in_blocks
from ..warned import require_number
from .known import KnownGuide

__all__ = ["or_of_training", "quantiles_of"]


def or_of_training(guide: KnownGuide, what: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments given; if none are, the training data."""
    if args or kwargs:
        return args, kwargs
    if guide.core.data is None:
        raise ValueError(f"the guide holds no training data: give the model's arguments, guide.{what}(..., x)")
    return guide.core.data.args, guide.core.data.kwargs


@torch.no_grad()
def quantiles_of(guide: Any, levels: Any, num: int, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Quantiles of latents and of GP sites' values, ``(Q, ...)`` by site."""
    quantiles = torch.as_tensor(levels).to(guide.like)
    if not ((quantiles >= 0) & (quantiles <= 1)).all():
        raise ValueError(f"quantiles must be between 0 and 1, got {levels}")
    require_number("num_draws", num)

    def one(_: Any) -> dict[Any, Tensor]:
        values = guide.draw(*args, joint=False, **kwargs)
        return {name: values[name] for name in (*guide.facts.latents, *guide.facts.gps) if name in values}

    # 128 features a value.
    blocks = list(in_blocks(one, {"": torch.arange(num)}, lambda draw: 128 * sum(map(torch.numel, draw.values()))))
    return {name: torch.cat([block[name] for block in blocks]).quantile(quantiles, 0) for name in blocks[0]}
