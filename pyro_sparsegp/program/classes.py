"""What data say of discrete latents that were summed out, all else given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .enumeration import Enumeration
from .traces import all_sites, is_free

__all__ = ["class_probabilities"]


def class_probabilities(model: Callable, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """p(z | values, data) of each enumerated discrete site z, exactly: for one draw of all other latents.

    For the derivative of the log of a sum over z by a term of it is that term's share: p(z = k | ·) =
    ∂ log Σ_z p(z) p(data | z, ·) / ∂ log p(z = k). Averages over a guide's joint draws at the rows of training are the
    posterior's: after ``guide.eval()``, ``class_probabilities(model, guide(x, y), x, y)``.

    :param model: the model.
    :param values: of all its other latents, GP sites at the rows of training among them; others are passed over.
    :param args: the model's arguments, the data among them.
    :param kwargs: its keyword arguments.
    :returns: by site, ``(..., K)``: a probability for each value, in the order of the distribution's
        ``enumerate_support()``, for each element of its plates ``(...)``.
    :raises ValueError: naming a latent whose value is not given.
    """
    if not all(isinstance(value, Tensor) for value in values.values()):
        raise ValueError("class_probabilities takes values of latents, tensors by name, such as a draw guide(x, y)")
    enumeration = Enumeration()
    with poutine.block(), torch.no_grad():
        held = poutine.condition(enumeration(model), data=dict(values))
        trace = poutine.trace(held).get_trace(*args, **kwargs)
    for name, site in all_sites(trace):
        if name in values and site["type"] == "sample" and site["value"].shape != site["fn"].shape():
            raise ValueError(
                f"class_probabilities: the value of site {name!r} has shape {tuple(site['value'].shape)}, its "
                f"distribution {tuple(site['fn'].shape())}: give one draw of each latent, at these rows."
            )
        if is_free(site) and not site_is_subsample(site):
            raise ValueError(
                f"class_probabilities: latent site {name!r} has no value; give one for each latent that is not "
                "enumerated, such as a draw guide(x, y) after guide.eval()."
            )
    return enumeration.probabilities()
