"""Latents of groups of data, of which a prediction does not say whether they are the groups of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro import poutine

from ..warned import Warned, warn_once
from .traces import is_free, is_observation, sample_sites

__all__ = ["grouped", "plate_sizes", "warn_of_groups"]


def plate_sizes(site: Any) -> dict[str, int]:
    """The numbers of all rows of the plates that enclose a site."""
    return {frame.name: int(frame.full_size or frame.size) for frame in site["cond_indep_stack"] if frame.vectorized}


def grouped(trace: poutine.Trace) -> list[str]:
    """The latents that some plates of an observed site enclose, and not all."""
    sites = sample_sites(trace)
    # Such as z in "groups" beside y in "groups" and "rows"; a latent in all of y's plates is one of single data.
    plates = {name: set(plate_sizes(site)) for name, site in sites.items()}
    data = [plates[name] for name, site in sites.items() if is_observation(site)]
    return [n for n, site in sites.items() if is_free(site) and plates[n] and any(plates[n] < each for each in data)]


def warn_of_groups(warned: Warned, name: str, plates: Mapping[str, int]) -> None:
    """Warn that a prediction draws the latents of as many groups as there were in training from the model."""
    plate, size = next(iter(plates.items()))
    warn_once(
        warned,
        "groups",
        name,
        f"latent site {name!r} is drawn from the model, not as it was learned: its plate {plate!r} holds data, so "
        f"a prediction takes its {size} values for new groups. If they are the groups of training, "
        "give the data a plate of another name and of the same size, and leave the latent in its own.",
        stacklevel=2,
    )
