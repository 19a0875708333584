"""Posteriors as ``xarray.DataTree`` in ArviZ's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..guide import as_process, is_observation, whole_plates
from . import backend
from .draws import LARGEST_JOINT, Draw, GuideSource, seeded, sites_of
from .labels import Labels, attributes, constant_data
from .samples import SampleSource
from .sources import Source, as_source

__all__ = ["prior_predictive", "to_datatree", "to_inference_data"]

Arguments = Union[Tensor, tuple, Mapping[str, Any]]


def to_datatree(
    model: Callable,
    guide: Any,
    *args: Any,
    num_samples: int = 1000,
    predict: Optional[Arguments] = None,
    include_f: bool = False,
    exact: bool = False,
    log_likelihood: bool = True,
    posterior_predictive: bool = True,
    coords: Optional[Mapping[str, Any]] = None,
    dims: Optional[Mapping[str, Sequence[str]]] = None,
    dtype: str = "float32",
    chunk_size: int = 8192,
    seed: Optional[int] = None,
    name: Optional[str] = None,
    **kwargs: Any,
) -> Any:
    """Posterior draws and all that ArviZ needs to judge them, as an ``xarray.DataTree``.

    Groups: ``posterior`` (hyperparameters; of each GP site f the coefficients ``f_w`` of its basis, N(0, I) a priori),
    ``posterior_predictive``, ``log_likelihood``, ``log_prior``, ``sample_stats``, ``observed_data``,
    ``constant_data`` and, with ``predict``, ``predictions`` and ``predictions_constant_data``, all with dimensions
    ``(chain, draw, ...)``. One fit is one chain: several guides of the same model, restarts, become chains.

    The log likelihood is integrated over what a draw leaves open, log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ; of MCMC, whose
    draws hold f itself, log ∫ p(yₙ | fₙ) p(fₙ | f₋ₙ, θ) dfₙ. ``sample_stats`` has ``log_q``, the log density of (θ, w)
    under the guide, and ``lp``, what is set against it in importance weights, both in float64:

    * ``lp``: log p(θ) p(w) + Σₙ E[log p(yₙ | fₙ) | w, θ], the target "vfe" that the evidence lower bound is for;
    * ``lp_fitc``: log p(θ) p(w) + Σₙ log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ, that of expectation propagation;
    * ``lp_exact``, with ``exact=True``: log p(θ) p(w) + log p(y | w, θ) under the exact prior, in O(N³).

    :class:`~pyro_sparsegp.families.ComputationAware` knows w, and is uncertain of f given w: it needs ``exact=True``,
    and then has joint draws of f in place of w, with one target, p(θ) p(f) p(y | f), and the log likelihood of MCMC.
    Memory is that of the arrays returned plus ``chunk_size`` rows of features; each draw costs one prediction of the
    training data and a few runs of the model.

    :param model: the model.
    :param guide: a fitted guide, several of them in a list, an object that has a guide (SVI, expectation
        propagation), an ``MCMC`` that has run, or its samples.
    :param args: the model's training arguments, all rows, with observations.
    :param num_samples: draws of each guide; MCMC has as many as its samples.
    :param predict: the model's arguments at new inputs, observations left out: a tensor, a tuple or a mapping.
    :param include_f: keep function values at the training inputs, ``(chain, draw, N)``; under NUTS, too.
    :param exact: whether to do what takes O(N³) a draw.
    :param log_likelihood: whether to compute it, and ``lp``.
    :param posterior_predictive: whether to draw it.
    :param coords: coordinate values by dimension.
    :param dims: names of a variable's dimensions, instead of the plates' names and ``{variable}_dim_{i}``.
    :param dtype: of all groups but ``sample_stats``.
    :param chunk_size: rows whose features are held in memory at once.
    :param seed: makes the draws repeatable and leaves the global generators alone.
    :param name: the tree's name.
    :param kwargs: the model's further arguments.
    :raises ValueError: where the result, the arguments or the labels do not fit.
    """
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples must be a whole number of at least 1, got {num_samples!r}")
    backend.xarray()
    guides = list(guide) if isinstance(guide, (list, tuple)) else [guide]
    if not guides:
        raise ValueError("to_datatree was given an empty list of guides")
    sources = [as_source(model, one, args, kwargs, exact, chunk_size) for one in guides]
    if isinstance(sources[0], SampleSource):
        if len(sources) > 1:
            raise ValueError("to_datatree takes one MCMC result, whose chains it keeps; or a list of guides")
        chains, num_samples = sources[0].shape
    else:
        chains = len(sources)
    if any(isinstance(source, SampleSource) for source in sources[1:]):
        raise ValueError("to_datatree takes a list of guides or one MCMC result, not both")
    writer = _Writer(Labels(dims, coords), (chains, num_samples), dtype)
    new = None if predict is None else _arguments(predict)
    by_expectation = isinstance(sources[0], GuideSource) and sources[0].guide.by_expectation
    target = "exact" if sources[0].joint else "fitc" if by_expectation else "vfe"
    with seeded(seed):
        for chain in range(chains):
            source = sources[chain % len(sources)]
            for s in range(num_samples):
                draw = source.draw()
                writer.at(chain, s)
                _write(writer, source, draw, include_f, log_likelihood, posterior_predictive)
                if new is not None:
                    writer.functions |= set(draw.functions)
                    for variable, value in source.at(*new, draw).items():
                        writer.put("predictions", variable, value)
    shared = {"model": _name_of(model), "posterior": sources[0].name, "family": _families(sources[0]), "name": name}
    datasets = writer.datasets(shared, {"sample_stats": {"target": target}})
    observed = {site: node["value"] for site, node in draw.data.items()}
    fixed: dict[str, dict[str, Any]] = {
        "observed_data": {site: value.detach().cpu().numpy() for site, value in observed.items()},
        "constant_data": constant_data(model, sources[0].args, sources[0].kwargs, observed),
    }
    if new is not None:
        fixed["predictions_constant_data"] = constant_data(model, *new, {})
        writer.labels.rows |= {
            size: dim
            for variable in writer.groups["predictions"]
            for dim, size in writer.row_sizes("predictions", variable)
        }
    for group, arrays in fixed.items():
        labelled = {variable: (writer.labels_of_data(variable, array), array) for variable, array in arrays.items()}
        if labelled:
            datasets[group] = writer.labels.dataset(labelled, sampled=False).assign_attrs(attributes(**shared))
    return backend.xarray().DataTree.from_dict(datasets, name=name)


def _write(
    writer: _Writer, source: Source, draw: Draw, include_f: bool, log_likelihood: bool, posterior_predictive: bool
) -> None:
    first = not writer.learned
    if first:
        writer.learn(draw)
    for variable, value in draw.values.items():
        writer.put("posterior", variable, value)
    for site, w in draw.coefficients.items():
        writer.put("posterior", f"{site}_w", w)
    if include_f:
        for site, f in draw.functions.items():
            writer.put("posterior", site, f)
    for variable, log_prior in draw.log_priors.items():
        writer.put("log_prior", variable, log_prior)
    if posterior_predictive:
        for site, node in draw.data.items():
            writer.put("posterior_predictive", site, node["fn"].sample())
    if log_likelihood:
        densities = source.densities(draw)
        for site in source.data:
            writer.put("log_likelihood", site, densities.integrated[site])
        writer.put("sample_stats", "lp", source.log_joint(draw, densities))
        if isinstance(source, GuideSource):
            if not source.joint:
                writer.put("sample_stats", "lp_fitc", source.log_joint_fitc(draw, densities))
            if source.exact:
                writer.put("sample_stats", "lp_exact", source.log_joint_exact(draw))
    if draw.log_q is not None:
        writer.put("sample_stats", "log_q", draw.log_q)


class _Writer:
    """Collects draws into preallocated arrays, ``(chain, draw, ...)``."""

    def __init__(self, labels: Labels, shape: tuple[int, int], dtype: str) -> None:
        self.labels, self.shape, self.dtype = labels, shape, np.dtype(dtype)
        self.groups: dict[str, dict[str, np.ndarray]] = {}
        self.kept: dict[str, np.ndarray] = {}  # of data sites with masked rows, those that are not
        self.functions: set[str] = set()
        self.index = (0, 0)
        self.learned = False

    def at(self, chain: int, draw: int) -> None:
        """Where the next values go."""
        self.index = chain, draw

    def learn(self, draw: Draw) -> None:
        """Learn labels, and which rows are masked, from the first draw."""
        self.learned = True
        self.functions |= set(draw.functions)
        self.labels.learn(draw.data)
        for site, node in draw.data.items():
            mask = node["mask"]
            if isinstance(mask, Tensor) and not mask.all() and len(node["fn"].batch_shape) == 1:
                self.kept[site] = np.flatnonzero(mask.expand(node["fn"].batch_shape).cpu().numpy())

    def put(self, group: str, variable: str, value: Tensor) -> None:
        """Keep one draw's value."""
        value = value.detach()
        if group == "log_likelihood" and variable in self.kept:
            value = value[torch.from_numpy(self.kept[variable]).to(value.device)]
        arrays = self.groups.setdefault(group, {})
        if variable not in arrays:
            kind = np.dtype("float64") if group == "sample_stats" else self.dtype
            if group.endswith("predictive") and not value.is_floating_point():
                kind = np.dtype("int64")
            arrays[variable] = np.empty((*self.shape, *value.shape), kind)
        elif arrays[variable].shape[2:] != value.shape:
            raise ValueError(
                f"site {variable!r} has shape {tuple(value.shape)} in one draw and {arrays[variable].shape[2:]} in "
                "another: an array of draws needs one shape."
            )
        arrays[variable][self.index] = value.cpu().numpy()

    def names(self, group: str, variable: str) -> list[str]:
        """Dimension names of a variable, chain and draw apart."""
        shape = self.groups[group][variable].shape[2:]
        if not shape:
            return []
        if variable in self.functions:
            names = self.labels.of_function(variable, shape)
            if group == "predictions" and variable not in self.labels.dims:
                names[-1] = next(iter(self.labels.rows.values()), names[-1])
            return names
        if variable.endswith("_w") and variable[:-2] in self.functions:
            return self.labels.of_coefficients(variable[:-2], shape)
        return self.labels.of(variable, shape)

    def row_sizes(self, group: str, variable: str) -> list[tuple[str, int]]:
        """Names and sizes of the data plates' dimensions of a variable."""
        pairs = zip(self.names(group, variable), self.groups[group][variable].shape[2:])
        rows = set(self.labels.rows.values())
        return [(name, size) for name, size in pairs if name in rows]

    def labels_of_data(self, variable: str, array: np.ndarray) -> list[str]:
        """Dimension names of an argument of the model, or of an observed site."""
        if variable in self.labels.plates or variable in self.labels.dims or not array.ndim:
            return self.labels.of(variable, array.shape)
        rest = [f"{variable}_dim_{i}" for i in range(1, array.ndim)]
        return [self.labels.row_dim(array.shape[0]) or f"{variable}_dim_0", *rest]

    def datasets(self, shared: dict[str, Any], own: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The groups as datasets."""
        found = {}
        chains, draws = self.shape
        if "posterior" not in self.groups and "prior_predictive" not in self.groups:  # function values only, left out
            coords = {"chain": np.arange(chains), "draw": np.arange(draws)}
            found["posterior"] = backend.xarray().Dataset(coords=coords, attrs=attributes(**shared))
        for group, arrays in self.groups.items():
            labelled = {name: (self.names(group, name), array) for name, array in arrays.items()}
            dataset = self.labels.dataset(labelled, sampled=True)
            if group == "log_likelihood":
                for site, rows in self.kept.items():
                    dim = self.names(group, site)[0]
                    dataset = dataset.assign_coords({dim: self.labels.coords.get(dim, np.arange(rows.max() + 1))[rows]})
            found[group] = dataset.assign_attrs(attributes(**shared, **own.get(group, {})))
        return found


def prior_predictive(
    model: Callable,
    *args: Any,
    num_samples: int = 500,
    include_f: bool = False,
    coords: Optional[Mapping[str, Any]] = None,
    dims: Optional[Mapping[str, Sequence[str]]] = None,
    dtype: str = "float32",
    seed: Optional[int] = None,
    name: Optional[str] = None,
    **kwargs: Any,
) -> Any:
    """Draws from the prior, as an ``xarray.DataTree`` with ``prior``, ``prior_predictive``, ``observed_data`` and
    ``constant_data``.

    Observations among the arguments are kept for comparison, and drawn anew. Function values are exact joint draws, in
    O(N³); choose some of the rows where N is beyond a few thousand.

    :raises ValueError: where N is so large that joint draws are out of the question.
    """
    backend.xarray()
    labels = Labels(dims, coords)
    writer = _Writer(labels, (1, num_samples), dtype)
    with torch.no_grad(), seeded(seed), whole_plates(), poutine.block():
        with _Sizes():
            first = poutine.trace(model).get_trace(*args, **kwargs)
        observed = {n: site for n, site in sites_of(first) if is_observation(site) and not site_is_subsample(site)}
        for s in range(num_samples):
            trace = poutine.trace(poutine.uncondition(model)).get_trace(*args, **kwargs)
            writer.at(0, s)
            for variable, site in sites_of(trace):
                if site_is_subsample(site):
                    continue
                if as_process(site["fn"])[0] is not None:
                    writer.functions.add(variable)
                    if not include_f:
                        continue
                drawn = variable in observed or site["infer"].get("was_observed", False)
                if s == 0 and drawn:
                    labels.learn({variable: {**site, "is_observed": True}})
                writer.put("prior_predictive" if drawn else "prior", variable, site["value"])
    shared = {"model": _name_of(model), "name": name}
    datasets = writer.datasets(shared, {})
    values = {n: site["value"] for n, site in observed.items()}
    fixed = {
        "observed_data": {n: value.cpu().numpy() for n, value in values.items()},
        "constant_data": constant_data(model, args, kwargs, values),
    }
    for group, arrays in fixed.items():
        labelled = {variable: (writer.labels_of_data(variable, array), array) for variable, array in arrays.items()}
        if labelled:
            datasets[group] = labels.dataset(labelled, sampled=False).assign_attrs(attributes(**shared))
    return backend.xarray().DataTree.from_dict(datasets, name=name)


class _Sizes(poutine.messenger.Messenger):
    """Refuses processes too large to be drawn from."""

    def _pyro_sample(self, msg: Any) -> None:
        process, _ = as_process(msg["fn"])
        if process is not None and process.event_shape[0] > 2 * LARGEST_JOINT:
            raise ValueError(
                f"GP site {msg['name']!r} has {process.event_shape[0]} inputs: exact draws from its prior take O(N³) "
                f"time and O(N²) memory each. Give at most {2 * LARGEST_JOINT} of the rows."
            )


def to_inference_data(tree: Any) -> Any:
    """An ``arviz.InferenceData`` of a DataTree, for arviz 0.22 and 0.23.

    :raises ImportError: where this arviz has no use for it: arviz 1 and the 0.8 packages take the DataTree itself.
    """
    return backend.inference_data(tree)


def _arguments(predict: Arguments) -> tuple[tuple, dict[str, Any]]:
    if isinstance(predict, Tensor):
        return (predict,), {}
    if isinstance(predict, Mapping):
        return (), dict(predict)
    if isinstance(predict, (tuple, list)):
        return tuple(predict), {}
    raise ValueError(
        "predict must be the model's arguments at new inputs, a tensor, a tuple or a mapping, got "
        f"{type(predict).__name__}"
    )


def _name_of(model: Callable) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _families(source: Source) -> Optional[dict[str, Any]]:
    if not isinstance(source, GuideSource):
        return None
    return {name: spec["family"] for name, spec in source.structure.gps.items()}
