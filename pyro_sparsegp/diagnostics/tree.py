"""Posteriors as ``xarray.DataTree`` in ArviZ's schema."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import pyro
import torch
import xarray
from arviz_base import make_attrs
from torch import Tensor
from torch.utils._pytree import tree_map

from .._version import __version__
from ..guide import AutoSparseGP
from ..inference.batches import arguments_of
from ..numerics.arguments import require_count
from ..program.data import signature_of, walk
from ..program.traces import unmasked_rows
from .sources import Draws, Source, as_source, seeded

_RESERVED = ("chain", "draw", "sample", "pred_id")  # by ArviZ
_DRAWN = ("posterior", "log_prior", "sample_stats", "posterior_predictive", "predictions")
_OF_DATA = ("observed_data", "posterior_predictive", "predictions")


def to_datatree(
    model: Callable,
    guide: AutoSparseGP,
    *args: object,
    num_samples: int = 1000,
    predict: Union[Tensor, tuple, Mapping[str, Any], None] = None,
    include_f: bool = False,
    log_likelihood: bool = True,
    posterior_predictive: bool = True,
    coords: Optional[Mapping[str, Any]] = None,
    dims: Optional[Mapping[str, Sequence[str]]] = None,
    seed: Optional[int] = None,
    **kwargs: object,
) -> xarray.DataTree:
    """Posterior draws and all that ArviZ needs to judge them, as an ``xarray.DataTree``.

    Its groups are ArviZ's; ``predict`` adds ``predictions`` and ``predictions_constant_data``. ``posterior`` holds the
    hyperparameters, and for each GP site f the coefficients ``f_w`` of its basis, N(0, I) a priori. Draws have
    dimensions ``(chain, draw, ...)`` and the model's dtype; a guide is one chain, and ``xarray.concat`` joins trees.

    The log likelihood of a guide's draw (w, θ) is log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ. That of an MCMC draw (f, θ) is
    log ∫ p(yₙ | fₙ) p(fₙ | f₋ₙ, θ) dfₙ. Either is times the row's weight (``poutine.scale``). For MCMC
    ``sample_stats`` has ``diverging``; for a guide, in float64, ``log_q``, the log density of (θ, w) under q, and
    ``lp``, that under the target which the guide was trained towards (``tree.sample_stats.attrs["target"]``):

    * "vfe", of the evidence lower bound: log p(θ) p(w) + Σₙ E[log p(yₙ | fₙ) | w, θ];
    * "fitc", of expectation propagation: log p(θ) p(w) + Σₙ log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ.

    The posterior is that which the guide predicts with: of :class:`~pyro_sparsegp.families.ExactWeightSpace` under a
    variance correction its target is "fitc"; of :class:`~pyro_sparsegp.families.ComputationAware` w are the projected
    function values, whitened. Blocks of draws, of up to some 150 MB, are made by ``torch.func.vmap`` if the program
    allows it.

    :param model: the model.
    :param guide: a fitted guide, an object that has one (SVI), an ``MCMC`` that has run, or its samples.
    :param args: the model's training arguments, all rows, with observations.
    :param num_samples: draws of a guide; MCMC gives one per sample.
    :param predict: the model's arguments at new inputs, observations left out: a tensor, a tuple or a mapping.
    :param include_f: keep function values at the training inputs, ``(chain, draw, N)``.
    :param log_likelihood: whether to compute the log likelihood, and ``lp``.
    :param posterior_predictive: whether to draw posterior predictions.
    :param coords: coordinate values by dimension.
    :param dims: names of a variable's dimensions, instead of the plates' names and ``{variable}_dim_{i}``.
    :param seed: makes the draws repeatable and leaves the global generators alone.
    :param kwargs: the model's further arguments.
    :raises ValueError: where the result, the arguments or the labels do not fit.
    """
    require_count(num_samples, "num_samples")
    source, new = as_source(model, guide, args, kwargs), None if predict is None else arguments_of(predict)
    shape, blocks = source.shape or (1, num_samples), list[dict[str, dict[str, Tensor]]]()
    with seeded(seed):
        for draws in source.draws(shape[0] * shape[1], new, posterior_predictive):
            groups = {group: getattr(draws, group) for group in _DRAWN}
            groups["posterior"] |= draws.functions if include_f else {}
            if log_likelihood:
                densities = source.reader(draws.held, draws.moments)
                groups["log_likelihood"] = {site: densities.weighted[site] for site in source.data}
                if "log_q" in draws.sample_stats:  # against which weights set log p of the draws and the data
                    groups["sample_stats"]["lp"] = sum(
                        draws.log_prior.values(), densities.towards[source.attrs["target"]]
                    )
            blocks.append(tree_map(Tensor.cpu, groups))
    table = Table(source, shape, draws, dims, coords)
    found: dict[str, Any] = tree_map(lambda *parts: torch.cat(parts), *blocks)
    found["observed_data"] = observed = {name: source.sites[name]["value"] for name in source.data}
    found["constant_data"] = _constants(model, args, kwargs, observed)
    found["predictions_constant_data"] = {} if new is None else _constants(model, *new, {})
    # Of a posterior, function values that are left out may be all there is.
    filled = {group: table.dataset(group, part) for group, part in found.items() if part or group == "posterior"}
    return xarray.DataTree.from_dict(filled)


def _constants(model: Callable, args: tuple, kwargs: Mapping[str, Any], observed: Mapping[str, Tensor]) -> Any:
    """The tensors among a model's arguments, by the names of its parameters, but those that are observed values."""
    found = list(walk(signature_of(model).bind_partial(*args, **kwargs).arguments))
    # A tensor's name is the last one on the way to it, and its places in lists from there on.
    names = ("_".join(map(str, path[max(i for i, k in enumerate(path) if isinstance(k, str)) :])) for path, _ in found)
    tensors = {n: torch.as_tensor(v) for n, (_, v) in zip(names, found) if isinstance(v, (Tensor, np.ndarray))}
    # An observed value has numbers in the place of NaN under a mask.
    pairs = ((n, v, y) for n, v in tensors.items() for y in observed.values() if v.shape == y.shape)
    seen = {name for name, value, y in pairs if ((value == y) | value.isnan()).all()}
    return {name: value for name, value in tensors.items() if name not in seen}


class Table:
    """Makes datasets of groups of tensors; knows what a source's dimensions are called, and what masks leave."""

    def __init__(self, source: Source, shape: tuple[int, ...], draws: Draws, dims: Any, coords: Any) -> None:
        ours = {"creation_library": "pyro_sparsegp", "creation_library_version": __version__}
        self.shape, self.attrs = shape, make_attrs({**ours, **source.attrs}, pyro)
        self.dims, self.coords = dict(dims or {}), {dim: np.asarray(values) for dim, values in (coords or {}).items()}
        self.names: dict[Any, list[str]] = {}  # of the dimensions of a variable, or of one in a group
        self.left: dict[tuple[str, str], np.ndarray] = {}  # the rows that masks leave of log likelihoods
        self.counts: set[tuple[str, str]] = set()  # what has whole numbers: torch holds counts as floats
        rows: dict[int, str] = {}  # the data plates, by size
        for name in source.data:
            site = source.sites[name]
            self.names[name] = plate_names(name, site)
            # Function values and arguments of as many rows have the plate's name.
            sizes = zip(self.names[name], site["fn"].batch_shape)
            rows = {size: dim for dim, size in sizes if not dim.startswith(f"{name}_dim_")} | rows
            if getattr(site["fn"].support, "is_discrete", False) and (site["value"] == site["value"].round()).all():
                self.counts |= {(group, name) for group in _OF_DATA}
            seen = unmasked_rows(site["fn"], site["value"], site["mask"])
            if seen is not None and not seen.all():
                # The first such site has the plate's name: another's mask may leave other rows.
                key, first = ("log_likelihood", name), seen.dim() == 1 and not self.left
                self.names[key] = self.names[name][:1] if first else [f"{name}_dim_0"]
                self.left[key] = seen.flatten().nonzero()[:, 0].cpu().numpy()
        for name, f in draws.functions.items():
            front = [*(f"{name}_dim_{i}" for i in range(f.dim() - 3)), f"{name}_output"][: f.dim() - 2]
            self.names[name] = [*front, rows.get(f.shape[-1], f"{name}_dim_{f.dim() - 2}")]
            self.names[f"{name}_w"] = [*(d.replace(f"{name}_dim", f"{name}_w_dim") for d in front), f"{name}_basis"]
        # An argument may have as many rows as there are data, or as there are new ones.
        new = {value.shape[-1]: self.names[n][-1] for n, value in draws.predictions.items() if n in self.names}
        self.rows = {"constant_data": rows, "predictions_constant_data": rows | new}

    def dataset(self, group: str, values: Mapping[str, Tensor]) -> xarray.Dataset:
        """A group's dataset, of draws ``(S, ...)`` or of data."""
        front, num, lead = ([], 0, ()) if group.endswith("_data") else (["chain", "draw"], 1, self.shape)
        # An empty group, of function values that are left out, has its draws all the same.
        sizes, variables, coords = dict(zip(front, lead)), dict[str, Any](), dict(self.coords)
        for name, value in values.items():
            left = self.left.get((group, name))
            kept = value if left is None else value.reshape(len(value), -1)[:, left]
            array = (kept.long() if (group, name) in self.counts else kept).detach().cpu().numpy()
            shape = array.shape[num:]
            # A plate's name that a variable has, or that is of other rows, gives way.
            dims = [
                dim if dim not in values and sizes.get(dim, size) == size else f"{name}_dim_{i}"
                for i, (dim, size) in enumerate(zip(self._dims(group, name, shape), shape))
            ]
            sizes |= dict(zip(dims, shape))
            variables[name] = [*front, *dims], array.reshape(*lead, *shape)
            if left is not None:
                coords[dims[0]] = coords.get(dims[0], np.arange(value[0].numel()))[left]
        # Coordinates may be given for dimensions of other rows, such as those of new inputs.
        coords = {dim: values for dim, values in coords.items() if len(values) == sizes.get(dim)}
        places = {dim: coords.get(dim, np.arange(size)) for dim, size in sizes.items()}
        return xarray.Dataset(variables, places, self.attrs)

    def _dims(self, group: str, name: str, shape: tuple[int, ...]) -> list[str]:
        """Names of a variable's dimensions, chain and draw apart."""
        rows = self.rows.get(group, {})
        known = self.names.get((group, name), self.names.get(name, [rows[size] for size in shape[:1] if size in rows]))
        known = list(self.dims.get(name, known)) if (group, name) not in self.left else known
        if len(known) > len(shape) and not group.startswith("log_"):  # an event has one log density
            raise ValueError(f"dims[{name!r}] names {len(known)} dimensions, {known}, the variable has shape {shape}")
        return [*known, *(f"{name}_dim_{i}" for i in range(len(known), len(shape)))][: len(shape)]


def plate_names(name: str, site: dict[str, Any]) -> list[str]:
    """Names of a site's dimensions: a plate names its own, others are ``{site}_dim_{i}``."""
    batch_shape = site["fn"].batch_shape
    names = [f"{name}_dim_{i}" for i in range(len(batch_shape) + len(site["fn"].event_shape))]
    plates = {len(batch_shape) + frame.dim: frame.name for frame in site["cond_indep_stack"] if frame.vectorized}
    for place in plates.keys() & range(len(batch_shape)):
        names[place] = f"{plates[place]}_dim" if plates[place] in _RESERVED else plates[place]
    return names
