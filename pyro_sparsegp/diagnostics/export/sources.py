"""One way to draw from any result: a guide, or MCMC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
from pyro.infer import MCMC
from torch import Tensor

from ...predict import _samples_and_data, chain_diagnostics, divergences
from .arguments import guide_of, is_posterior, kind_of, require_arguments, require_model
from .draws import GuideSource
from .samples import ConditionedSource, SampleSource

__all__ = ["Source", "as_source", "nothing_unmasked", "observed_site", "target_of"]

Source = Union[GuideSource, SampleSource]


def as_source(
    model: Callable,
    result: Any,
    args: tuple,
    kwargs: dict[str, Any],
    exact: bool = False,
    chunk_size: int = 8192,
    marginal: bool = False,
) -> Source:
    """Draws from any result: a guide, an object with one (SVI, expectation propagation), MCMC, or its samples.

    :raises ValueError: where ``result`` is none of these, or belongs to another model.
    """
    require_model("diagnostics", "then the guide or the MCMC, then the model's arguments: (model, guide, x, y)", model)
    guide = guide_of(result)
    if guide is not None:
        result = guide
        if model is not result.model and model != result.model:
            raise ValueError(
                "the guide belongs to another model: give the one it was made for, to_datatree(guide.model, guide, ...)"
            )
        require_arguments("a posterior's draws", "Give the training data, (model, guide, x, y).", model, args, kwargs)
        return GuideSource(result, args, kwargs, exact, chunk_size, marginal)
    if isinstance(result, MCMC):
        _, (old_args, old_kwargs) = _samples_and_data(result, None)
        samples = result.get_samples(group_by_chain=True)
        if marginal:
            return ConditionedSource(model, samples, args, kwargs, old_args, old_kwargs)
        source = SampleSource(model, samples, args or old_args, kwargs if args else old_kwargs)
        source.stats, source.attributes = sampler_stats(result, source.shape)
        return source
    if isinstance(result, Mapping) and result and all(isinstance(value, Tensor) for value in result.values()):
        return SampleSource(model, {name: value[None] for name, value in result.items()}, args, kwargs)
    raise ValueError(
        "the result must be an AutoSparseGP guide, an SVI or expectation propagation object that has one, a "
        f"pyro.infer.MCMC or a mapping of its samples, got {kind_of(result)}. The order is model, result, then the "
        "model's arguments."
        + (" A GP site's posterior lacks the other latents: give the guide that it is from." * is_posterior(result))
    )


def sampler_stats(result: MCMC, shape: Sequence[int]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What an MCMC kernel knows of its draws, ``(chain, draw)`` by name, and attributes of the whole run.

    Pyro's kernels know which diverged; :class:`~pyro_sparsegp.diagnostics.NUTS` more.
    """
    chains = chain_diagnostics(result)
    if not chains or "divergences" not in chains[0]:
        return {}, {}
    diverging = np.zeros(shape, dtype=bool)
    for chain, numbers in enumerate(divergences(result)):
        diverging[chain, numbers] = True
    kept = [chain.get("sample stats") or {} for chain in chains]
    stats = {name: np.array([one[name] for one in kept]) for name in kept[0]} | {"diverging": diverging}
    if not kept[0]:
        return stats, {}
    seconds = max(chain["ended"] for chain in chains) - min(chain["began"] for chain in chains)
    return stats, {"sampling_time": seconds, "tuning_steps": chains[0]["warm-up steps"]}


def observed_site(source: Source, var_name: Optional[str]) -> str:
    """The observed site of that name, or the only one.

    :raises ValueError: where there is none, or there are several and none is named.
    """
    if var_name in source.factors or not source.data:
        factor = var_name if var_name in source.factors else source.factors[0]
        raise ValueError(
            f"site {factor!r} is a pyro.factor: it holds no observations that could be left out or predicted. "
            + (f"The observed sites are {source.data}." if source.data else "The model has no observed sites.")
        )
    if var_name not in source.data and (var_name is not None or len(source.data) > 1):
        raise ValueError(f"var_name must be one of the observed sites {source.data}, got {var_name!r}")
    return var_name or source.data[0]


def nothing_unmasked(site: str) -> ValueError:
    """The error of scores of an observed site of which there are none."""
    return ValueError(
        f"site {site!r} has no observations: its masks leave out all rows. Name another site, var_name=..., or give "
        "the data that it is to be scored by."
    )


def target_of(source: Source) -> str:
    """What a result's own draws are towards: the bound's target, expectation propagation's or the model itself.

    A q(w) under a kernel's variance correction is optimal for integrated densities, as expectation propagation's is.
    It is known after the first draw.
    """
    if source.joint:
        return "exact"
    return "fitc" if isinstance(source, GuideSource) and (source.guide.by_expectation or source.corrected) else "vfe"
