"""Latents and parameters that are 0, which hide what they multiply: of Normal(f + bg, s), at b = 0, that g is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to, transform_to

from .traces import all_sites

__all__ = ["OffZero", "off_zero"]

_AWAY = 0.1  # in unconstrained numbers


def off_zero(values: Mapping[str, Tensor], trace: poutine.Trace) -> dict[str, Tensor]:
    """Values of a run's sites, with a small number in the place of each 0 of a latent."""
    found = dict(values)
    for name, site in all_sites(trace):
        prior = site["infer"].get("prior") if name in found and site["type"] == "sample" else None
        if prior is not None and found[name].is_floating_point():
            found[name] = _moved(found[name], biject_to, prior.support)
    return found


class OffZero(Messenger):
    """The same of parameters, but for those that ``pyro.module`` would put into the module itself."""

    def _pyro_post_param(self, msg: Any) -> None:
        if "$$$" not in msg["name"] and isinstance(msg["value"], Tensor):
            msg["value"] = _moved(msg["value"], transform_to, msg["kwargs"]["constraint"])


def _moved(value: Tensor, to: Any, support: Any) -> Tensor:
    zero = value == 0
    if not zero.any():
        return value
    transform = to(support)
    if transform.domain.event_dim or transform.codomain.event_dim:
        return value
    uneven = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
    return torch.where(zero, transform(transform.inv(value) + _AWAY * uneven), value)
