"""Simulation-based calibration: are a guide's posteriors right on average over the prior?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import arviz_base
import numpy as np
import pyro
import torch
import xarray
from torch import Tensor
from tqdm import tqdm

from ..numerics.codes import require_count
from ..predict import predict
from .groups import attributes, name_of
from .sources import PriorSource, guide_of, require_call


def sbc(
    model: Callable,
    fit: Callable,
    *args: Any,
    num_simulations: int = 200,
    num_samples: int = 199,
    rows: int = 4,
    observed: Optional[Mapping[str, str]] = None,
    progress: bool = True,
    seed: int = 0,
    **kwargs: Any,
) -> xarray.DataTree:
    """Simulation-based calibration of a (model, guide) pair (Talts et al., 2018; Modrák et al., 2023).

    Each simulation draws hyperparameters, functions and data from the prior, fits, and ranks the true values among
    draws of the posterior: the ranks are uniform if posteriors are right. Overconfident ones make ∪, too wide ones ∩.

    >>> def fit(x, y):                                                     # doctest: +SKIP
    ...     guide = AutoSparseGP(model, SGPR(16))
    ...     svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(2))
    ...     for _ in range(300):
    ...         svi.step(x, y)
    ...     return guide
    >>> tree = sbc(model, fit, x)                             # doctest: +SKIP
    >>> arviz_plots.plot_ecdf_pit(tree)                                    # doctest: +SKIP

    :param model: the model, that can be called without observations, ``model(*args, **kwargs)``.
    :param fit: a function of the same arguments and the simulated data that returns a fitted guide.
    :param args: the model's arguments without observations.
    :param num_simulations: fits.
    :param num_samples: L, posterior draws of each; ranks are 0 to L.
    :param rows: how many function values are ranked, spread evenly over the rows.
    :param observed: for observed sites, the name of the argument that takes their values, if it is not the site's.
    :param progress: whether to show a progress bar.
    :param seed: simulation s has the seed ``seed + s``: trees of other seeds, from other processes, may be joined by
        ``xarray.concat`` along ``draw``.
    :returns: an ``xarray.DataTree`` with a group ``prior_sbc``: for each latent site and each GP site's values at
        ``rows``, (rank + U)/(L + 1) with U uniform, dimensions ``(chain, draw, ...)``, a draw a simulation;
        ``arviz_plots.plot_ecdf_pit(tree)`` draws it.
    :raises ValueError: where the model observes nothing, or lacks an argument for its data.
    """
    order = "then the fitting function, then the model's arguments without data: (model, fit, x)"
    require_call("sbc", order, model, args, kwargs)
    require_count(num_simulations, "num_simulations")
    require_count(num_samples, "num_samples")
    require_count(rows, "sbc's rows")
    found, names = [], dict(observed or {})
    with torch.random.fork_rng(), pyro.get_param_store().scope():  # the caller's stays as it is
        source = PriorSource(model, args, kwargs, list(names))
        for s in tqdm(range(seed, seed + num_simulations), desc="simulations", disable=not progress):
            torch.manual_seed(s)
            found.append(_ranks(source, fit, names, num_samples, rows))
    ranks = {name: np.stack([one[name] for one in found])[None] for name in found[0]}
    attrs = attributes(num_samples=num_samples, model=name_of(model))
    dataset = arviz_base.dict_to_dataset(ranks).assign_attrs(attrs)
    return xarray.DataTree.from_dict({"prior_sbc": dataset})


def _ranks(
    source: PriorSource, fit: Callable, observed: dict[str, str], num_samples: int, rows: int
) -> dict[str, np.ndarray]:
    """The normalised ranks of one simulation."""
    truth, args, kwargs = source.make({}), source.args, source.kwargs
    if not truth.simulated:
        raise ValueError(
            f"sbc found no data among the sites {list(source.sites)} that the model draws: call it with arguments that "
            "leave observations out, and name the data, observed={site: argument}"
        )
    data = {observed.get(name, name): value for name, value in truth.simulated.items()}
    pyro.clear_param_store()
    try:
        result = fit(*args, **kwargs, **data)
    except TypeError as error:
        raise ValueError(
            f"fit could not be called with the simulated data as {sorted(data)} ({error}); give observed={{site: "
            "argument}}"
        ) from error
    guide = guide_of(result)
    if guide is None:
        raise ValueError(
            "sbc's fit must be a function of the model's arguments and the data that makes, trains and returns a new "
            f"guide; {type(fit).__name__} returned {type(result).__name__}"
        )
    # At the training inputs, of the model without data: latents of single rows have no draws of theirs there.
    draws = predict(source.model, guide, *args, num_samples=num_samples, joint=False, **kwargs)
    plates = {name: {frame.name for frame in site["cond_indep_stack"]} for name, site in source.sites.items()}
    of_data = set().union(*(plates[name] for name in truth.simulated))
    # Points have no posterior at all.
    shared = [name for name in truth.values if not plates[name] & of_data and not guide.is_point(name)]
    ranks = {name: _rank(draws[name], truth.values[name]) for name in shared}
    for name, value in truth.functions.items():
        num = value.shape[-1]
        chosen = np.linspace(0, num - 1, min(rows, num)).round().astype(int)
        ranks[name] = _rank(draws[name][..., chosen], value[..., chosen])
    return ranks


def _rank(draws: Tensor, value: Tensor) -> np.ndarray:
    # (rank + U)/(L + 1), uniform on [0, 1] for continuous and discrete values alike.
    below = (draws < value).sum(0)
    return ((below + torch.rand(value.shape, device=value.device)) / (len(draws) + 1)).double().cpu().numpy()
