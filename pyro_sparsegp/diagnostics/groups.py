"""The groups of a tree: draws written into arrays, and the arrays labelled by the model's plates and arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from .._version import __version__
from ..program.bare import unmasked_rows
from .backend import xarray

__all__ = ["Table", "attributes", "constant_data", "name_of", "plate_names"]

_RESERVED = ("chain", "draw", "sample", "pred_id")


def plate_names(name: str, site: Any, sites: Sequence[str] = ()) -> list[str]:
    """Names of a site's dimensions: a plate names its own, others are ``{site}_dim_{i}``.

    :param sites: names that variables have, and dimensions may not.
    """
    batch_shape = site["fn"].batch_shape
    names = [f"{name}_dim_{i}" for i in range(len(batch_shape) + len(site["fn"].event_shape))]
    for frame in site["cond_indep_stack"]:
        if frame.vectorized and frame.dim is not None and -frame.dim <= len(batch_shape):
            taken = frame.name in (*_RESERVED, name, *sites)
            names[len(batch_shape) + frame.dim] = f"{frame.name}_dim" if taken else frame.name
    return names


class Table:
    """Arrays ``(chain, draw, ...)`` by group and variable, allocated once and filled draw by draw.

    A plate names its dimension, function values have the data plate's, coefficients ``{site}_basis``, and others are
    ``{variable}_dim_{i}``.

    :param shape: how many chains, and draws of each.
    :param dtype: of all groups but ``sample_stats``.
    :param dims: names to use instead: for a variable, of all its dimensions but chain and draw.
    :param coords: coordinate values by dimension.
    :raises ValueError: where these are of other types, or name what ArviZ reserves.
    """

    def __init__(self, shape: tuple[int, int], dtype: str, dims: Any = None, coords: Any = None) -> None:
        for argument, given in (("dims", dims or {}), ("coords", coords or {})):
            lists = given.values() if isinstance(given, Mapping) else [""]
            if any(isinstance(names, str) or np.ndim(names) != 1 for names in lists):
                raise ValueError(f"{argument} must be a mapping from names to lists, got {given!r}")
        self.dims, self.coords = dict(dims or {}), {dim: np.asarray(values) for dim, values in (coords or {}).items()}
        taken = {name for names in (*self.dims.values(), self.coords) for name in names} & set(_RESERVED)
        if taken:
            raise ValueError(f"dims and coords must not use {sorted(taken)}, which ArviZ reserves")
        if dtype not in ("float16", "float32", "float64"):
            raise ValueError(f"dtype must be a floating type, 'float32' or 'float64', got {dtype!r}")
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.arrays: dict[str, dict[str, np.ndarray]] = {}
        self.fixed: dict[str, dict[str, np.ndarray]] = {}  # of the groups that have no draws
        self.names: dict[str, list[str]] = {}  # of a variable's dimensions
        self.rows: dict[int, str] = {}  # the data plates, by size
        self.functions: set[str] = set()
        self.discrete: set[str] = set()  # observed sites of whole numbers: torch holds counts as floats
        self.unmasked: dict[str, np.ndarray] = {}  # rows of the sites of which masks leave some out
        self.weights: dict[str, np.ndarray] = {}  # of rows, poutine.scale's, where they are not all 1

    def learn(self, sites: Mapping[str, Any], functions: Mapping[str, Tensor]) -> None:
        """Learn names, kinds, masks and weights from one draw's observed sites and function values."""
        for name, site in sites.items():
            self.names[name] = plate_names(name, site, list(sites))
            for dim, size in zip(self.names[name], site["fn"].batch_shape):
                if not dim.startswith(f"{name}_dim_"):
                    # Function values and arguments of as many rows have the plate's name.
                    self.rows.setdefault(size, dim)
            value, rows = site["value"], unmasked_rows(site)
            if getattr(site["fn"].support, "is_discrete", False) and bool((value == value.round()).all()):
                self.discrete.add(name)
            if rows is not None and rows.dim() and not rows.all():
                self.unmasked[name] = rows.cpu().numpy()
            # All plates are whole here, so that what scale there is are weights.
            scale = torch.as_tensor(site["scale"]).detach().cpu()
            if (scale != 1).any():
                self.weights[name] = scale.expand(site["fn"].batch_shape).numpy()
        for name, f in functions.items():
            self.functions.add(name)
            front = [f"{name}_dim_{i}" for i in range(f.dim() - 2)] + [f"{name}_output"] * (f.dim() > 1)
            self.names[name] = [*front, self.rows.get(f.shape[-1], f"{name}_dim_{f.dim() - 1}")]
            self.names[f"{name}_w"] = [*(d.replace(f"{name}_dim", f"{name}_w_dim") for d in front), f"{name}_basis"]

    def put(self, group: str, variable: str, index: tuple[int, int], value: Tensor) -> None:
        """Write one draw's value."""
        value = value.detach()
        # torch holds counts as floats, ArviZ as integers.
        if variable in self.discrete and group.startswith(("posterior_predictive", "prior_predictive", "predictions")):
            value = value.long()
        if group == "log_likelihood" and variable in self.unmasked:
            value = value[torch.from_numpy(self.unmasked[variable]).to(value.device)]
        arrays = self.arrays.setdefault(group, {})
        if variable not in arrays:
            kind = np.dtype("float64") if group == "sample_stats" else self.dtype
            kind = kind if value.is_floating_point() else value.cpu().numpy().dtype
            arrays[variable] = np.empty((*self.shape, *value.shape), kind)
        arrays[variable][index] = value.cpu().numpy()

    def fix(self, group: str, values: Mapping[str, Any]) -> None:
        """Add a group without draws; counts among observed values are integers."""
        arrays = {name: np.asarray(torch.as_tensor(value).detach().cpu()) for name, value in values.items()}
        self.fixed[group] = {n: a.astype("int64") if n in self.discrete else a for n, a in arrays.items()}

    def datasets(self, **attrs: Any) -> dict[str, Any]:
        """The groups as ``xarray.Dataset``, with these attributes."""
        found = {group: self._dataset(group, arrays) for group, arrays in self.arrays.items()}
        found |= {group: self._dataset(group, arrays) for group, arrays in self.fixed.items() if arrays}
        return {group: dataset.assign_attrs(attributes(**attrs)) for group, dataset in found.items()}

    def _dataset(self, group: str, arrays: Mapping[str, np.ndarray]) -> Any:
        front = ["chain", "draw"] if group in self.arrays else []
        sizes = dict(zip(front, self.shape))
        variables = {}
        for name, array in arrays.items():
            dims = [*front, *self._names(group, name, array.shape[len(front) :])]
            for i, (dim, size) in enumerate(zip(dims, array.shape)):
                if dim in arrays or sizes.setdefault(dim, size) != size:  # a plate's name that is taken, or fewer rows
                    dims[i] = f"{name}_dim_{i - len(front)}"
                    sizes[dims[i]] = size
            variables[name] = dims, array
        coords: dict[str, Any] = {dim: self._coordinate(dim, size) for dim, size in sizes.items()}
        for site, (dims, _) in variables.items() if group == "log_likelihood" else ():
            rows, weights = self.unmasked.get(site), self.weights.get(site)
            if rows is not None:
                coords[dims[-1]] = self._coordinate(dims[-1], rows.size)[rows.ravel()]
                weights = None if weights is None else weights[rows]
            if weights is not None:  # which leave-one-out asks for, and travels with the rows
                coords[f"{site}_weight"] = dims[2:], weights
        return xarray.Dataset(variables, coords=coords)

    def _names(self, group: str, name: str, shape: tuple[int, ...]) -> list[str]:
        """Names of a variable's dimensions, chain and draw apart."""
        known = list(self.dims.get(name, self.names.get(name, ())))
        if group == "log_likelihood" and name in self.unmasked:
            return known if len(known) == 1 and self._has_same_rows(name) else [f"{name}_dim_0"]
        if not shape:  # as the log prior density of a vector has none
            return []
        if len(known) == len(shape):
            if group == "predictions" and name in self.functions and name not in self.dims and self.rows:
                known[-1] = next(iter(self.rows.values()))
            return known
        if name in self.dims:
            raise ValueError(f"dims[{name!r}] names {len(known)} dimensions, {known}, the variable has shape {shape}")
        names = [f"{name}_dim_{i}" for i in range(len(shape))]
        if group.endswith("constant_data"):  # an argument of as many rows as there are data
            names[0] = self._rows(group).get(shape[0], names[0])
        return names

    def _has_same_rows(self, name: str) -> bool:
        """Whether masks leave the rows that they leave of the first site with this dimension
        (test_sites_of_one_plate_keep_rows_of_their_own).
        """
        first = next(n for n in self.arrays["log_likelihood"] if self.names[n] == self.names[name])
        return first in self.unmasked and np.array_equal(self.unmasked[first], self.unmasked[name])

    def _rows(self, group: str) -> dict[int, str]:
        """The data plates by size, at new inputs those there."""
        if not group.startswith("predictions"):
            return self.rows
        shapes = {n: a.shape[2:] for n, a in self.arrays["predictions"].items()}
        pairs = [pair for n, shape in shapes.items() for pair in zip(shape, self._names("predictions", n, shape))]
        return self.rows | {size: dim for size, dim in pairs if dim in self.rows.values()}

    def _coordinate(self, dim: str, size: int) -> np.ndarray:
        """A dimension's coordinate values: those given, if they are as many (new rows may be others), or numbers."""
        given = self.coords.get(dim)
        return np.arange(size) if given is None or len(given) != size else given

    def require_used(self, datasets: Mapping[str, Any]) -> None:
        """Raise where ``dims`` or ``coords`` name what is not there, or give values that fit nowhere.

        :raises ValueError: naming them, and what there is.
        """
        variables = self.functions.union(*(dataset.data_vars for dataset in datasets.values()))
        dimensions = {dim for dims in self.dims.values() for dim in dims}.union(*(d.sizes for d in datasets.values()))
        for argument, given, there in (("dims", self.dims, variables), ("coords", self.coords, dimensions)):
            for name in given:
                if name not in there:
                    raise ValueError(f"{argument} names {name!r}, which the tree does not have: it has {sorted(there)}")
        for dim, values in self.coords.items():
            sizes = {dataset.sizes[dim] for dataset in datasets.values() if dim in dataset.sizes}
            if sizes and len(values) not in sizes:
                raise ValueError(f"coords[{dim!r}] has {len(values)} values, the dimension has size {sorted(sizes)}")


def name_of(model: Callable) -> str:
    """A model's name."""
    return getattr(model, "__name__", type(model).__name__)


def attributes(**more: Any) -> dict[str, Any]:
    """A dataset's attributes: who made it and when; what NetCDF cannot hold is written as JSON."""
    found = {
        "created_at": datetime.now(UTC).isoformat(),
        "creation_library": "pyro_sparsegp",
        "creation_library_version": __version__,
        "inference_library": "pyro-ppl",
        "inference_library_version": pyro.__version__,
        **more,
    }
    return {
        key: value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else json.dumps(value)
        for key, value in found.items()
        if value is not None
    }


def constant_data(
    model: Callable, args: tuple, kwargs: dict[str, Any], observed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensor arguments of the model that are not observed values, by the names of its parameters."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
        more = next((n for n, p in signature.parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), "")
        bound |= bound.pop(more, {})
    except (TypeError, ValueError):  # a callable without a signature
        bound = {f"arg_{i}": value for i, value in enumerate(args)} | kwargs
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, (tuple, list)):
            flat |= {f"{name}_{i}": part for i, part in enumerate(value)}
        elif isinstance(value, Mapping):
            flat |= {str(key): part for key, part in value.items()}
        else:
            flat[name] = value
    tensors = {n: torch.as_tensor(v) for n, v in flat.items() if isinstance(v, (Tensor, np.ndarray))}
    return {n: v for n, v in tensors.items() if not any(_same(v, other) for other in observed.values())}


def _same(argument: Tensor, observed: Tensor) -> bool:
    """Whether an argument is what was observed, which has values in the place of NaN under a mask."""
    return argument.shape == observed.shape and bool(((argument == observed) | argument.isnan()).all())
