"""Whitening of GP sites, so that NUTS mixes over function values."""

from __future__ import annotations

from typing import Any, Optional

import pyro
import pyro.distributions as dist
from pyro.infer.reparam.reparam import Reparam
from pyro.infer.reparam.strategies import Strategy

from .numerics.linalg import solve_lower
from .process import GaussianProcess
from .program.traces import as_process


class WhitenReparam(Reparam):
    """Reparameterises a GP site as f = μ + Lε with LLᵀ = k(x, x) and a latent site ``{name}_whitened``, ε ~ N(0, I).

    (Murray and Adams, 2010, section 3: the prior's scale no longer constrains the values.)
    """

    def apply(self, msg: Any) -> Any:
        """Replace the GP site by its whitened noise and a deterministic value."""
        name, fn, value = msg["name"], msg["fn"], msg["value"]
        process, _ = as_process(fn)
        if process is None:
            raise ValueError(f"WhitenReparam is for GP sites; site {name!r} is a {type(fn).__name__}")
        process.require_place(name)
        # Values that are given, as by a start of NUTS or by condition, have one noise, L⁻¹(f − μ).
        noise = None
        if value is not None:
            noise = solve_lower(process.scale_tril.expand(*value.shape, -1), (value - process.mean)[..., None])[..., 0]
        shape = fn.batch_shape + fn.event_shape
        white = dist.Normal(process.x.new_zeros(shape), 1.0).to_event(fn.event_dim)
        noise = pyro.sample(f"{name}_whitened", white, obs=noise, infer={"is_observed": msg["is_observed"]})
        if value is None:
            value = unwhiten(process, noise)
        return {"fn": dist.Delta(value, event_dim=fn.event_dim).mask(False), "value": value, "is_observed": True}


def unwhiten(process: GaussianProcess, noise: Any) -> Any:
    """μ + Lε, ``(..., N)``."""
    return process.mean + (process.scale_tril @ noise[..., None])[..., 0]


class Whitening(Strategy):
    """Whitens every latent GP site: ``NUTS(poutine.reparam(model, config=Whitening()))``."""

    def configure(self, msg: dict) -> Optional[Reparam]:
        """The :class:`WhitenReparam` of a latent GP site, ``None`` elsewhere."""
        return WhitenReparam() if not msg["is_observed"] and as_process(msg["fn"])[0] is not None else None
