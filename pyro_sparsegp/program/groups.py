"""Latents of groups of data, of which a prediction does not say whether they are the groups of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro import poutine
from pyro.poutine.util import site_is_subsample

from ..warned import Warned, warn_once
from .traces import all_sites, is_free, is_observation

__all__ = ["grouped", "plate_sizes", "warn_of_groups"]


def plate_sizes(site: Any) -> dict[str, int]:
    """The numbers of all rows of the plates that enclose a site."""
    return {frame.name: int(frame.full_size or frame.size) for frame in site["cond_indep_stack"] if frame.vectorized}


def grouped(trace: poutine.Trace) -> list[str]:
    """The latents that some plates of an observed site enclose, and not all."""
    data = [set(plate_sizes(site)) for _, site in all_sites(trace) if is_observation(site)]
    latents = [(name, site) for name, site in all_sites(trace) if is_free(site) and not site_is_subsample(site)]
    found = {name: set(plate_sizes(site)) for name, site in latents}
    return [name for name, plates in found.items() if plates and any(plates < others for others in data)]


def warn_of_groups(warned: Warned, name: str, plates: Mapping[str, int]) -> None:
    """Warn that a prediction draws the latents of as many groups as there were in training from the model."""
    plate, size = next(iter(plates.items()))
    warn_once(
        warned,
        "groups",
        name,
        f"latent site {name!r} is drawn from the model, not as it was learned: its plate {plate!r} holds data, so that "
        f"in a prediction its {size} values are taken for those of new groups. Where the groups are those of training "
        "give the data a plate of another name and of the same size, and leave the latent in its own.",
        stacklevel=2,
    )
