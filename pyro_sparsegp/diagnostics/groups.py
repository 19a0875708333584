"""The groups of a tree: draws written into arrays, and the arrays labelled by the model's plates and arguments."""

from __future__ import annotations

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
from .given import signature_of

__all__ = ["Table", "attributes", "constant_data", "name_of", "plate_names"]

_RESERVED = ("chain", "draw", "sample", "pred_id")  # by ArviZ


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
    """Arrays by group and variable, a row a draw, allocated once and filled by blocks of draws.

    A plate names its dimension, function values have the data plate's, coefficients ``{site}_basis``, and others are
    ``{variable}_dim_{i}``.

    :param shape: how many chains, and draws of each.
    :param dtype: of all groups but ``sample_stats``.
    :param dims: names to use instead: for a variable, of all its dimensions but chain and draw.
    :param coords: coordinate values by dimension.
    :param choose: of so many rows, those of which log likelihoods are kept; others' take no memory. The logarithm of
        the mean over draws of every row's likelihood is the coordinate ``{site}_lpd``.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: str, dims: Any = None, coords: Any = None, choose: Any = None
    ) -> None:
        if dtype not in ("float16", "float32", "float64"):
            raise ValueError(f"dtype must be a floating type, 'float32' or 'float64', got {dtype!r}")
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.dims, self.coords = dict(dims or {}), {dim: np.asarray(values) for dim, values in (coords or {}).items()}
        self.choose = choose
        self.lpd: dict[str, np.ndarray] = {}
        self.arrays: dict[str, dict[str, np.ndarray]] = {}
        self.fixed: dict[str, dict[str, np.ndarray]] = {}  # of the groups that have no draws
        self.names: dict[str, list[str]] = {}  # of a variable's dimensions
        self.rows: dict[int, str] = {}  # the data plates, by size
        self.discrete: set[str] = set()  # observed sites of whole numbers: torch holds counts as floats
        self.unmasked: dict[str, np.ndarray] = {}  # rows of the sites of which masks leave some out
        self.weights: dict[str, np.ndarray] = {}  # of rows, poutine.scale's, where they are not all 1

    def learn(self, sites: Mapping[str, Any], functions: Mapping[str, Tensor]) -> None:
        """Learn names, kinds, masks and weights from one draw's observed sites and function values."""
        for name, site in sites.items():
            self.names[name] = plate_names(name, site, list(sites))
            own = f"{name}_dim_"
            # Function values and arguments of as many rows have the plate's name.
            sizes = zip(self.names[name], site["fn"].batch_shape)
            self.rows = {size: dim for dim, size in sizes if not dim.startswith(own)} | self.rows
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
            front = [f"{name}_dim_{i}" for i in range(f.dim() - 2)] + [f"{name}_output"] * (f.dim() > 1)
            self.names[name] = [*front, self.rows.get(f.shape[-1], f"{name}_dim_{f.dim() - 1}")]
            self.names[f"{name}_w"] = [*(d.replace(f"{name}_dim", f"{name}_w_dim") for d in front), f"{name}_basis"]

    def put(self, group: str, variable: str, start: int, values: Tensor) -> None:
        """Write a block of draws, ``(B, ...)``, from a row on."""
        values = values.detach()
        if variable in self.discrete and group.startswith(("posterior_predictive", "prior_predictive", "predictions")):
            values = values.long()
        if group == "log_likelihood" and variable in self.unmasked:
            values = values[:, torch.from_numpy(self.unmasked[variable]).to(values.device)]
        arrays, block = self.arrays.setdefault(group, {}), values.cpu().numpy()
        num, kind = self.shape[0] * self.shape[1], "float64" if group == "sample_stats" else self.dtype
        if variable not in arrays:
            # Zeros that nobody writes to take no memory: a row's draws lie side by side.
            array = np.zeros((*block.shape[1:], num), kind if values.is_floating_point() else block.dtype)
            arrays[variable] = np.moveaxis(array, -1, 0)
        rows: Any = ()
        if group == "log_likelihood" and self.choose is not None:
            rows = np.unravel_index(self.choose(values[0].numel()), block.shape[1:])
            # πₙ = log 1/S Σ p(yₙ | draw), a block's part after the other's.
            part = torch.logsumexp(values.double(), 0).cpu().numpy() - np.log(num)
            self.lpd[variable] = np.logaddexp(self.lpd.get(variable, -np.inf), part)
        arrays[variable][start : start + len(values)][:, *rows] = block[:, *rows]

    def fix(self, group: str, values: Mapping[str, Any]) -> None:
        """Add a group without draws; counts among observed values are integers."""
        arrays = {name: np.asarray(torch.as_tensor(value).detach().cpu()) for name, value in values.items()}
        self.fixed[group] = {n: a.astype("int64") if n in self.discrete else a for n, a in arrays.items()}

    def datasets(self, **attrs: Any) -> dict[str, Any]:
        """The groups as ``xarray.Dataset``, with these attributes."""
        groups = {
            group: {name: array.reshape(*self.shape, *array.shape[1:]) for name, array in arrays.items()}
            for group, arrays in self.arrays.items()
        }
        found = {group: self._dataset(group, arrays, ["chain", "draw"]) for group, arrays in groups.items()}
        found |= {group: self._dataset(group, arrays, []) for group, arrays in self.fixed.items() if arrays}
        return {group: dataset.assign_attrs(attributes(**attrs)) for group, dataset in found.items()}

    def _dataset(self, group: str, arrays: Mapping[str, np.ndarray], front: list[str]) -> Any:
        sizes = dict(zip(front, self.shape))
        variables = {}
        for name, array in arrays.items():
            dims = [*front, *self._names(group, name, array.shape[len(front) :])]
            # A plate's name that a variable has, or that is of other rows, gives way.
            dims = [
                dim if dim not in arrays and sizes.get(dim, size) == size else f"{name}_dim_{i - len(front)}"
                for i, (dim, size) in enumerate(zip(dims, array.shape, strict=True))
            ]
            sizes.update(zip(dims, array.shape))
            variables[name] = dims, array
        coords: dict[str, Any] = {dim: self._coordinate(dim, size) for dim, size in sizes.items()}
        for site, (dims, _) in variables.items() if group == "log_likelihood" else ():
            rows = self.unmasked.get(site, np.ones((), bool))
            if rows.ndim:
                coords[dims[-1]] = self._coordinate(dims[-1], rows.size)[rows.ravel()]
            if site in self.weights:  # which leave-one-out asks for, and travels with the rows
                coords[f"{site}_weight"] = dims[2:], self.weights[site][rows] if rows.ndim else self.weights[site]
            if site in self.lpd:
                coords[f"{site}_lpd"] = dims[2:], self.lpd[site]
        return xarray.Dataset(variables, coords=coords)

    def _names(self, group: str, name: str, shape: tuple[int, ...]) -> list[str]:
        """Names of a variable's dimensions, chain and draw apart."""
        known = list(self.dims.get(name, self.names.get(name, ())))
        if group == "log_likelihood" and name in self.unmasked:
            # The first such site has the plate's name: another's mask may leave other rows
            # (test_sites_of_one_plate_keep_rows_of_their_own).
            return known if len(known) == 1 and name == next(iter(self.unmasked)) else [f"{name}_dim_0"]
        if not shape or len(known) == len(shape):  # the log prior density of a vector has none
            return known[: len(shape)]
        if name in self.dims:
            raise ValueError(f"dims[{name!r}] names {len(known)} dimensions, {known}, the variable has shape {shape}")
        names = [f"{name}_dim_{i}" for i in range(len(shape))]
        if group.endswith("constant_data"):  # an argument of as many rows as there are data
            names[0] = self._rows(group).get(shape[0], names[0])
        return names

    def _rows(self, group: str) -> dict[int, str]:
        """The data plates by size, at new inputs those there."""
        new = self.arrays.get("predictions", {}) if group.startswith("predictions") else {}
        named = [(array.shape[-1], self.names.get(name, [""])[-1]) for name, array in new.items()]
        return self.rows | {size: dim for size, dim in named if dim in self.rows.values()}

    def _coordinate(self, dim: str, size: int) -> np.ndarray:
        """A dimension's coordinate values: those given, if they are as many (new rows may be others), or numbers."""
        given = self.coords.get(dim)
        return np.arange(size) if given is None or len(given) != size else given


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
        key: value if type(value) in (str, int, float) else json.dumps(value)
        for key, value in found.items()
        if value is not None
    }


def constant_data(
    model: Callable, args: tuple, kwargs: dict[str, Any], observed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensor arguments of the model that are not observed values, by the names of its parameters."""
    signature = signature_of(model)
    if signature is None:
        bound = {f"arg_{i}": value for i, value in enumerate(args)} | kwargs
    else:
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        parts = {f"{name}_{i}": part for i, part in enumerate(value)} if isinstance(value, (tuple, list)) else value
        flat |= {str(key): part for key, part in parts.items()} if isinstance(parts, Mapping) else {name: parts}
    tensors = {n: torch.as_tensor(v) for n, v in flat.items() if isinstance(v, (Tensor, np.ndarray))}
    return {n: v for n, v in tensors.items() if not any(_same(v, other) for other in observed.values())}


def _same(argument: Tensor, observed: Tensor) -> bool:
    """Whether an argument is what was observed, which has values in the place of NaN under a mask."""
    return argument.shape == observed.shape and bool(((argument == observed) | argument.isnan()).all())
