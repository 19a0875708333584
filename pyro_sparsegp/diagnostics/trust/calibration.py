"""Simulation-based calibration: are a guide's posteriors right on average over the prior?"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from tqdm import tqdm

from ...guide import AutoSparseGP
from ...predict import predict
from ...program.traces import as_process, is_observation, whole_plates
from ..export import backend
from ..export.arguments import guide_of, kind_of, require_arguments, require_model
from ..export.draws import sites_of
from ..export.labels import Labels, attributes

if TYPE_CHECKING:
    import xarray
else:
    xarray = backend.Later("xarray")

__all__ = ["sbc"]

_State = tuple[Callable, Callable, tuple, dict[str, Any], dict[str, str], int, tuple[int, ...], int]
_state: list[_State] = []  # of a worker process


def sbc(
    model: Callable,
    fit: Callable,
    *args: Any,
    num_simulations: int = 200,
    num_samples: int = 199,
    rows: Union[int, Sequence[int]] = 4,
    observed: Optional[Mapping[str, str]] = None,
    processes: int = 1,
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
    >>> tree = sbc(model, fit, x, processes=2)                             # doctest: +SKIP
    >>> arviz_plots.plot_ecdf_pit(tree)                                    # doctest: +SKIP

    :param model: the model, that can be called without observations, ``model(*args, **kwargs)``.
    :param fit: a function of the same arguments and the simulated data that returns a fitted guide.
    :param args: the model's arguments without observations.
    :param num_simulations: fits.
    :param num_samples: L, posterior draws of each; ranks are 0 to L.
    :param rows: of function values, those ranked: so many rows spread evenly, or row numbers.
    :param observed: for observed sites, the name of the argument that takes their values, if it is not the site's.
    :param processes: how many fits run at once, one thread each. Processes are forked: the model and ``fit`` may be any
        functions, and must leave CUDA alone.
    :param progress: whether to show a progress bar.
    :param seed: simulation s has the seed ``seed + s``, whatever the number of processes.
    :returns: an ``xarray.DataTree`` with a group ``prior_sbc``: for each latent site and each GP site's values at
        ``rows``, (rank + U)/(L + 1) with U uniform, dimensions ``(chain, draw, ...)``, a draw a simulation;
        ``arviz_plots.plot_ecdf_pit(tree)`` draws it.
    :raises ValueError: where the model observes nothing, or lacks an argument for its data.
    """
    require_model("sbc", "then the fitting function, then the model's arguments without data: (model, fit, x)", model)
    if not callable(fit) or guide_of(fit) is not None:
        raise ValueError(
            "sbc's fit must be a function of the model's arguments and the data that makes and trains a new guide, got "
            f"{kind_of(fit)}"
        )
    require_arguments("sbc", "It is called without observations; the order is (model, fit, x).", model, args, kwargs)
    if num_simulations < 1 or num_samples < 1 or processes < 1:
        raise ValueError(
            "sbc needs num_simulations, num_samples and processes of at least 1, got "
            f"{num_simulations}, {num_samples} and {processes}"
        )
    if (isinstance(rows, int) and rows < 1) or (not isinstance(rows, int) and not len(rows)):
        raise ValueError(f"sbc's rows must be how many, at least 1, or a sequence of row numbers, got {rows!r}")
    backend.xarray()
    chosen = (rows,) if isinstance(rows, int) else tuple(rows)
    state = (model, fit, args, kwargs, dict(observed or {}), num_samples, chosen, -1 if isinstance(rows, int) else 0)
    bar = tqdm(total=num_simulations, desc="simulations", disable=not progress)
    found: list[dict[str, np.ndarray]] = [{}] * num_simulations
    seeds = [seed + s for s in range(num_simulations)]
    with bar if progress else nullcontext():
        if processes == 1:
            _start(state)
            try:
                with torch.random.fork_rng(), pyro.get_param_store().scope():  # the caller's stays as it is
                    for s, one in enumerate(map(_simulate, seeds)):
                        found[s] = one
                        bar.update()
            finally:
                _state.clear()
        else:
            context = multiprocessing.get_context("fork")
            _start(state)  # a forked process inherits it: nothing has to be pickled
            try:
                with ProcessPoolExecutor(processes, mp_context=context, initializer=_single_thread) as pool:
                    jobs = {pool.submit(_simulate, one): s for s, one in enumerate(seeds)}
                    for job in as_completed(jobs):
                        found[jobs[job]] = job.result()
                        bar.update()
            finally:
                _state.clear()
    labels = Labels(None, None)
    arrays = {name: np.stack([one[name] for one in found])[None] for name in found[0]}
    named = {name: ([f"{name}_dim_{i}" for i in range(a.ndim - 2)], a) for name, a in arrays.items()}
    dataset = labels.dataset(named, sampled=True)
    dataset = dataset.assign_attrs(attributes(num_samples=num_samples, model=getattr(model, "__name__", "model")))
    return backend.xarray().DataTree.from_dict({"prior_sbc": dataset})


def _start(state: _State) -> None:
    _state[:] = [state]


def _single_thread() -> None:
    torch.set_num_threads(1)


def _simulate(seed: int) -> dict[str, np.ndarray]:
    """The normalised ranks of one simulation."""
    model, fit, args, kwargs, observed, num_samples, rows, evenly = _state[0]
    torch.manual_seed(seed)
    with torch.no_grad(), whole_plates():
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    truth: dict[str, Tensor] = {}
    functions: dict[str, Tensor] = {}
    data: dict[str, Tensor] = {}
    plates = set()
    last = None
    for name, site in sites_of(trace):
        if site_is_subsample(site) or is_observation(site):
            continue
        if as_process(site["fn"])[0] is not None:
            functions[name] = site["value"]
        else:
            truth[name] = site["value"]
            last = name
    # The data are the sites that the guide will know as observed; until then, those named, or the last one.
    names = list(observed) or ([last] if last is not None else [])
    for name in names:
        if name not in truth:
            raise ValueError(f"observed names {name!r}, which is no site of the model: it has {sorted(truth)}")
        data[observed.get(name, name)] = truth.pop(name)
        plates |= {frame.name for frame in trace.nodes[name]["cond_indep_stack"]}
    if not data:
        raise ValueError(
            "the model has no site that could be data: call sbc with arguments that leave observations out"
        )
    pyro.clear_param_store()
    try:
        guide = fit(*args, **kwargs, **data)
    except TypeError as error:
        raise ValueError(
            f"fit could not be called with the simulated data as {sorted(data)} ({error}); give observed={{site: "
            "argument}}"
        ) from error
    guide = getattr(guide, "guide", guide)  # of an ExpectationPropagation, say
    if not isinstance(guide, AutoSparseGP):
        raise ValueError(f"sbc's fit must return a fitted AutoSparseGP guide, got {kind_of(guide)}")
    for name in list(truth):  # latents of single data have no posterior at new inputs, points have none at all
        frames = {frame.name for frame in trace.nodes[name]["cond_indep_stack"]}
        points = guide.point_estimates
        if frames & plates or points is True or (not isinstance(points, bool) and name in points):
            truth.pop(name)
    draws = predict(model, guide, *args, num_samples=num_samples, joint=False, **kwargs)
    ranks = {name: _rank(draws[name], value) for name, value in truth.items()}
    for name, value in functions.items():
        num = value.shape[-1]
        if not evenly and not all(-num <= row < num for row in rows):
            raise ValueError(f"sbc's rows must be row numbers of site {name!r}, 0 to {num - 1}, got {list(rows)}")
        which = list(np.linspace(0, num - 1, min(rows[0], num)).round().astype(int)) if evenly else list(rows)
        ranks[name] = _rank(draws[name][..., which], value[..., which])
    return ranks


def _rank(draws: Tensor, value: Tensor) -> np.ndarray:
    below = (draws < value).sum(0)
    return ((below + torch.rand(value.shape, device=value.device)) / (len(draws) + 1)).double().cpu().numpy()
