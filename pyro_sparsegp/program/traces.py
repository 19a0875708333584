"""Reading runs of a user's program: its sites, their densities, their distributions under wrappers; and what handlers
such as masks and plates leave out of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.distributions import Delta, MaskedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.subsample_messenger import SubsampleMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..numerics.functions import broadcast_shapes
from ..process import GaussianProcess

WRAPPERS = (torch.distributions.Independent, MaskedDistribution, ExpandedDistribution)


def all_sites(trace: poutine.Trace) -> list[tuple[str, Any]]:
    """A trace's sites of all types, with their names."""
    return list(trace.nodes.items())


def is_free(site: Any) -> bool:
    """Whether a sample site is not observed."""
    return site["type"] == "sample" and not site["is_observed"]


def free_values(trace: poutine.Trace) -> dict[str, Tensor]:
    """The values of a trace's sample sites that are not observed, plates' row numbers among them."""
    return {name: site["value"] for name, site in all_sites(trace) if is_free(site)}


def is_observation(site: Any) -> bool:
    """Whether a site holds data, rather than a deterministic value, as those of ``poutine.reparam`` are, too."""
    if site["type"] != "sample" or not site["is_observed"] or site["infer"].get("_deterministic"):
        return False
    return not isinstance(getattr(site["fn"], "base_dist", None), Delta)


def plate_sizes(site: Any) -> dict[str, int]:
    """The numbers of all rows of the plates that enclose a site."""
    return {frame.name: int(frame.full_size or frame.size) for frame in site["cond_indep_stack"] if frame.vectorized}


def share_of(site: Any) -> float:
    """The share of all rows that the plates which enclose a site have drawn."""
    return math.prod([frame.size / frame.full_size for frame in site["cond_indep_stack"] if frame.full_size])


def grouped(trace: poutine.Trace) -> list[str]:
    """The latents that some plates of an observed site enclose, and not all."""
    sites = sample_sites(trace)
    # Such as z in "groups" beside y in "groups" and "rows"; a latent in all of y's plates is one of single data.
    plates = {name: set(plate_sizes(site)) for name, site in sites.items()}
    data = [plates[name] for name, site in sites.items() if is_observation(site)]
    return [n for n, site in sites.items() if is_free(site) and plates[n] and any(plates[n] < each for each in data)]


def piecewise_constant(trace: poutine.Trace) -> list[str]:
    """The observed sites whose distributions say that their density is piecewise constant in function values."""
    return [
        name
        for name, site in sample_sites(trace).items()
        if is_observation(site) and getattr(bare(site["fn"]), "piecewise_constant", False)
    ]


def log_densities(trace: poutine.Trace, skip: Collection[str] = (), by_entry: bool = False) -> dict[str, Tensor]:
    """The log densities, masked and scaled, of a run's sample sites but ``skip`` and those masked as a whole; of a
    guide's latents those of their priors.

    :param by_entry: with dimensions that ``.to_event`` has added up taken apart again.
    """
    found = {}
    for name, site in sample_sites(trace).items():
        if name not in skip and site["mask"] is not False:
            fn = site["infer"].get("prior", site["fn"])
            fn, event_dim = without_event(fn) if by_entry else (fn, 0)
            # They are of rows: ones more behind for the dimensions that .to_event has added.
            scale, mask = (
                part.reshape(part.shape + (1,) * event_dim) if isinstance(part, Tensor) else part
                for part in (site["scale"], site["mask"])
            )
            found[name] = torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), scale, mask))
    return found


def entries(site: Any) -> Tensor:
    """A site's log densities without scales and masks, with dimensions that ``.to_event`` has added up taken apart."""
    # A mask, of rows or of all, may be another in the next batch: test_q_waits_for_a_batch_that_is_not_masked.
    fn, _ = without_event(site["fn"])
    part = torch.as_tensor(bare(fn).log_prob(site["value"]))
    return part.expand(fn.shape()[: part.dim()])


class RandomState:
    """The state of the generators that a step draws from."""

    def __init__(self, like: Tensor) -> None:
        on_device = [torch.cuda.default_generators[like.device.index]] if like.is_cuda else []
        self.generators = [torch.default_generator, *on_device]
        self._states = list(map(torch.Generator.get_state, self.generators))

    @property
    def has_moved(self) -> bool:
        """Whether anything was drawn since."""
        return not all(map(torch.equal, self._states, map(torch.Generator.get_state, self.generators)))

    def restore(self) -> None:
        """Put the generators back."""
        for generator, state in zip(self.generators, self._states):
            generator.set_state(state)


@contextmanager
def repeatable(like: Tensor) -> Iterator[None]:
    """The same random numbers each time, and the global generator as it was."""
    state = RandomState(like)
    for generator in state.generators:  # torch.manual_seed formats the stack for each kind of device, in 1 ms
        generator.manual_seed(0)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def whole_plates() -> Iterator[None]:
    """Turn subsampling off: plates with a ``subsample_size`` take all their rows."""
    # A plate draws its indices in its constructor, from its arguments; no message can change their number.
    original = SubsampleMessenger.__init__

    @functools.wraps(original)
    def whole(self: Any, name: str, size: Any = None, subsample_size: Any = None, subsample: Any = None, *a, **k):  # type: ignore[no-untyped-def]
        original(self, name, size, subsample_size if subsample is not None else None, subsample, *a, **k)

    SubsampleMessenger.__init__ = whole  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubsampleMessenger.__init__ = original  # type: ignore[method-assign]


def sample_sites(trace: poutine.Trace) -> dict[str, Any]:
    """A trace's sample sites by name, plates' row numbers not among them."""
    sites: dict[str, Any] = dict(trace.nodes)
    return {n: site for n, site in sites.items() if site["type"] == "sample" and not site_is_subsample(site)}


def as_process(prior: Any) -> tuple[Optional[GaussianProcess], int]:
    """The GP under ``.to_event`` and the number of dimensions this added, or ``None``."""
    prior, event_dim = without_event(prior)
    return (prior, event_dim) if isinstance(prior, GaussianProcess) else (None, 0)


def without_event(fn: Any) -> tuple[Any, int]:
    """The distribution under ``.to_event`` and the number of dimensions this added."""
    event_dim = 0
    while isinstance(fn, torch.distributions.Independent):
        event_dim += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, event_dim


def bare(fn: Any) -> Any:
    """The distribution under ``.to_event``, ``.mask`` and ``.expand``; without masks, where latents are summed out."""
    while isinstance(fn, WRAPPERS):
        fn = fn.base_dist
    return fn.without_masks() if hasattr(fn, "without_masks") else fn


def unmasked(fn: Any, value: Tensor, mask: Any) -> Optional[Tensor]:
    """Which of an observed site's values no mask leaves out, in their shape; ``None`` if it has no mask.

    Masks are ``poutine.mask``'s, of whole rows, and those of the distribution under ``.to_event`` and ``.expand``, of
    single values; where discrete latents are summed out, of the distribution given these.
    """
    fn = getattr(fn, "given_discrete", fn)
    masks, parts = [(mask, fn.event_shape)], []
    while isinstance(fn, WRAPPERS):
        masks.append((getattr(fn, "_mask", None), fn.event_shape))
        fn = fn.base_dist
    for part, event in masks:
        if part is not None:
            part = torch.as_tensor(part, device=value.device)
            parts.append(part.reshape(part.shape + (1,) * len(event)))
    if not parts:
        return None
    # A mask is that of all values of discrete latents, whose dimensions are in front.
    seen = functools.reduce(torch.logical_and, [part[(0,) * max(part.dim() - value.dim(), 0)] for part in parts])
    return seen.expand(broadcast_shapes(seen.shape, value.shape))


def unmasked_rows(fn: Any, value: Tensor, mask: Any) -> Optional[Tensor]:
    """Which of an observed site's log densities have such a value, in their shape; ``None`` if it has no mask."""
    seen = unmasked(fn, value, mask)
    return seen.flatten(-fn.event_dim).any(-1) if seen is not None and fn.event_dim else seen


def filled(fn: Any, value: Any, mask: Any) -> Any:
    """An observed site's value with one of an unmasked row where it is masked and NaN.

    A mask makes such a term 0, but not its gradient, which is 0·NaN.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim() or not value.numel():
        return value  # a factor's has no numbers: test_missing.py::test_a_factor_under_a_mask
    seen = unmasked(fn, value, mask)
    if seen is None:
        return value
    shape, num = seen.shape, seen.dim() - fn.event_dim  # test_quadrature.py::TestMissing
    rows, seen = (part.expand(shape).reshape(-1, *shape[num:]) for part in (value, seen))
    # The row's number stays a tensor: nothing is read back from the device.
    # Single values of an event may be masked apart from one another, and have unmasked rows of their own.
    filler = rows.gather(0, seen.to(torch.uint8).argmax(0, keepdim=True)).nan_to_num()
    return torch.where(~seen & rows.isnan(), filler, rows).reshape(shape)


def fill_masked(site: Any) -> None:
    """As :func:`filled`, of a sample site that is observed."""
    if site["type"] == "sample" and site["is_observed"]:
        site["value"] = filled(site["fn"], site["value"], site["mask"])
