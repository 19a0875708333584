"""What programs and runs must satisfy: tables of rules, and one pass over each. A rule raises where it is broken.

Its docstring is its reason: docs/how-to/refusals.md lists both.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.runtime import get_plates
from torch import Tensor
from torch.nn import Module

from ..numerics.functions import broadcast_shapes
from ..process import GaussianProcess
from .structure import GPSite, Structure
from .traces import is_observation, sample_sites

Rule = Callable[..., None]


def data_have_the_shape_of_their_distribution(name: str, site: dict[str, Any]) -> None:
    """Broadcasting N parameters against data of shape (N, 1) gives N² densities. Shape (1,) counts a datum N times."""
    # A number, of shape (), is taken for a constant: test_messages.py::test_one_level_for_all_rows_is_no_fault
    fn, value = site["fn"], site["value"].shape if is_observation(site) else ()
    whole, dims = tuple(fn.shape()), [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
    # In each plate, too; pyro.factor's value is empty.
    own = (1,) * (max(dims, default=0) + fn.event_dim - len(value)) * any(value) + tuple(value)
    if any(here != its and (its != 1 or len(value) < len(whole)) for here, its in zip(reversed(own), reversed(whole))):
        outputs = (
            "for P outputs in P columns let the distribution have them too, .to_event(1)",
            "or take .to_event away, or move the site out of the plate",
        )[min(fn.event_dim, len(own) - len(value), 1)]
        raise ValueError(
            f"site {name!r} observes data of shape {tuple(value)} under a distribution of shape {whole}, so that they "
            "do not meet value by value. Give one the shape of the other, such as y[:, 0] of a column y; if one value "
            f"is that of many rows, y.expand({whole}); {outputs}."
        )


def masks_are_around_data(name: str, site: dict[str, Any]) -> None:
    """Under a mask of rows, a latent's KL divergence would be counted once for each row."""
    shape, mask = torch.Size(site["fn"].batch_shape), site["mask"]
    if not site["is_observed"] and isinstance(mask, Tensor) and broadcast_shapes(shape, mask.shape) != shape:
        raise ValueError(
            f"site {name!r}, of batch shape {tuple(shape)}, is under a mask of shape {tuple(mask.shape)}: its "
            "divergence from the prior would be counted once for each row. Put the mask around the observed site "
            'alone, with poutine.mask(mask=mask): pyro.sample("y", ..., obs=y).'
        )


def plates_are_as_large_as_their_data(name: str, site: dict[str, Any]) -> None:
    """Pyro weighs each row by full_size/size. In a plate of 20, each of 60 rows would count only 20/60."""
    for frame in site["cond_indep_stack"] if is_observation(site) else ():
        if frame.full_size is not None and frame.size > frame.full_size:
            raise ValueError(
                f"site {name!r} observes {frame.size} rows in pyro.plate({frame.name!r}, {frame.full_size}, "
                f"subsample=...), whose size is {frame.full_size}: they would be weighed by "
                f"{frame.full_size}/{frame.size}. Give the plate the number of all rows, size=N."
            )


def no_latent_comes_from_obs_mask(name: str, prior: Any, trace: poutine.Trace) -> None:
    """Pyro's obs_mask= makes latents of missing data. Put poutine.mask(mask=...) around the observed site instead."""
    twin = trace.nodes.get(name.removesuffix("_unobserved") + "_observed", {})
    if name.endswith("_unobserved") and twin.get("is_observed"):
        raise ValueError(
            f"site {name!r} has what obs_mask= leaves out, which the guide does not learn: give obs= alone, under "
            "poutine.mask(mask=obs_mask). If densities depend on missing values, draw these by a pyro.sample."
        )


def latents_are_continuous(name: str, prior: Any, trace: poutine.Trace) -> None:
    """A discrete latent has no normal posterior. Sum it out, or, if it is data, pass the data."""
    if getattr(prior.support, "is_discrete", False):
        raise ValueError(
            f"site {name!r} is discrete and not observed. If it is data, the guide's first call needs them, "
            "model(x, y). If it is a latent, sum it out: infer={'enumerate': 'parallel'} in its pyro.sample."
        )


def batches_have_row_numbers(name: str, prior: Any, trace: poutine.Trace) -> None:
    """A latent in the data plate has a value for each row. Row numbers say which values belong to a batch."""
    for plate in get_plates():
        rows = trace.nodes.get(plate.name, {}).get("value")
        is_data = isinstance(rows, Tensor) and (rows.is_floating_point() or rows.dim() != 1)
        if is_data and plate.full_size not in (None, plate.size):
            raise ValueError(
                f"latent site {name!r} inside pyro.plate({plate.name!r}, subsample=...) has a value for every row: "
                "give row numbers, subsample=indices, or subsample_size=B, and index the data by plate.indices."
            )


def inputs_have_the_dtype_of_parameters(name: str, process: GaussianProcess, module: Module, *_: object) -> None:
    """Tensors of two dtypes, or on two devices, cannot be multiplied."""
    x, kept = process.x, chain(module.parameters(), module.buffers())
    own = next(filter(Tensor.is_floating_point, kept), x)
    if (own.dtype, own.device) != (x.dtype, x.device):
        raise ValueError(
            f"site {name!r} has inputs of {x.dtype} on {x.device}, the guide's parameters are {own.dtype} on "
            f"{own.device}: convert the inputs, or call guide.double(), guide.float() or guide.to(device)."
        )


def groups_of_inputs_stay(
    name: str, process: GaussianProcess, module: Module, facts: Structure, met: Mapping[str, GaussianProcess]
) -> None:
    """A value of f may depend on a group of inputs, as on an image's patches. Each call needs groups of that size."""
    groups = {n: gp.group.size for n, gp in facts.gps.items() if n in met and gp.group and gp.group.layer == name}
    num, here = process.event_shape[0], {below: met[below].event_shape[0] for below in groups}
    for below in [below for below, size in groups.items() if here[below] != num * size]:
        raise ValueError(
            f"GP site {below!r} has {here[below]} inputs and {name!r} has {num}; at the guide's first call "
            f"{groups[below]} of {below!r} went into each of {name!r}: give as many again."
        )


def columns_and_outputs_stay(name: str, process: GaussianProcess, module: Any, facts: Structure, *_: object) -> None:
    """The posterior is built for the columns and outputs of the first call. Later calls need as many."""
    x = process.x
    columns = facts.gps.get(name, GPSite()).columns or x.shape[-1]
    if (module.batch_shape, columns) != (process.batch_shape, x.shape[-1]):
        raise ValueError(
            f"GP site {name!r} has inputs of shape {tuple(x.shape)}; at the guide's first call they had {columns} "
            f"columns, not {x.shape[-1]}, and outputs the shape {tuple(module.batch_shape)}, now "
            f"{tuple(process.batch_shape)}."
        )


def there_is_a_gp_site(trace: poutine.Trace, gps: Collection[str]) -> None:
    """Without a GP site there is nothing that a family approximates."""
    if not gps:
        raise ValueError(
            "the model has no GP site to approximate: no pyro.sample(..., GaussianProcess(kernel, x)) without obs= was "
            "reached. Data need a likelihood, such as Normal(f, noise); the exact density takes another guide."
        )


def the_first_call_has_data(trace: poutine.Trace, gps: Collection[str]) -> None:
    """Without data the guide learns neither a posterior nor how densities depend on f."""
    if not any(is_observation(site) for site in sample_sites(trace).values()):
        raise ValueError(
            "the guide's first call observes nothing, so that it has no posterior yet: give it the data, guide(x, y), "
            "train it first, svi.step(x, y) or fit(model, guide, (x, y), steps=500), or load a saved state."
        )


RULES: dict[str, tuple[Rule, ...]] = {
    "first call": (there_is_a_gp_site, the_first_call_has_data),
    "latent": (no_latent_comes_from_obs_mask, latents_are_continuous, batches_have_row_numbers),
    "GP site": (inputs_have_the_dtype_of_parameters, groups_of_inputs_stay, columns_and_outputs_stay),
    "site": (data_have_the_shape_of_their_distribution, masks_are_around_data, plates_are_as_large_as_their_data),
}


def require(what: str, *of: object) -> None:
    """Raise at the first fault of something."""
    for rule in RULES[what]:
        rule(*of)


def require_sites(sites: Mapping[str, dict[str, Any]]) -> None:
    """Raise at the first fault of a run's sample sites."""
    for name, site in sites.items():
        require("site", name, site)
