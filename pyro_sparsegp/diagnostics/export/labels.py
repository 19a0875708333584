"""Dimension names, coordinates and attributes of ArviZ datasets, from the plates and arguments of a model."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..._version import __version__
from . import backend

__all__ = ["Labels", "attributes", "constant_data", "require_sample_dims", "with_sample_dims"]

RESERVED = ("chain", "draw", "sample", "pred_id")


class Labels:
    """Names the dimensions of a model's variables.

    A plate names its dimension; function values have the data plate's, other dimensions are ``{variable}_dim_{i}``.

    :param dims: names to use instead: for a variable, of all its dimensions but chain and draw.
    :param coords: coordinate values by dimension.
    :raises ValueError: where either is no mapping of lists, or names what ArviZ reserves.
    """

    def __init__(self, dims: Optional[Mapping[str, Sequence[str]]], coords: Optional[Mapping[str, Any]]) -> None:
        for argument, given in (("dims", dims), ("coords", coords)):
            if given is not None and not isinstance(given, Mapping):
                raise ValueError(f"{argument} must be a mapping, got {type(given).__name__}")
        for name, names in (dims or {}).items():
            if isinstance(names, str):
                raise ValueError(f"dims[{name!r}] must be a list of names, got the string {names!r}: give [{names!r}]")
        self.dims = {name: list(names) for name, names in (dims or {}).items()}
        self.coords = {name: np.asarray(values) for name, values in (coords or {}).items()}
        for name, values in self.coords.items():
            if values.ndim != 1:
                raise ValueError(f"coords[{name!r}] must be a list of values, got an array of shape {values.shape}")
        taken = {name for names in [*self.dims.values(), list(self.coords)] for name in names} & set(RESERVED)
        if taken:
            raise ValueError(f"dims and coords must not use {sorted(taken)}, which ArviZ reserves")
        self.plates: dict[str, tuple[str, ...]] = {}
        self.rows: dict[int, str] = {}

    def learn(self, sites: Mapping[str, Any]) -> None:
        """Learn dimension names from sites: those of observed ones are the data plates."""
        for name, site in sites.items():
            batch_shape = site["fn"].batch_shape
            names = [f"{name}_dim_{i}" for i in range(len(site["fn"].batch_shape) + len(site["fn"].event_shape))]
            for frame in site["cond_indep_stack"]:
                if frame.vectorized and frame.dim is not None and -frame.dim <= len(batch_shape):
                    i = len(batch_shape) + frame.dim
                    names[i] = frame.name if frame.name not in (*RESERVED, *sites) else f"{frame.name}_dim"
                    if site["is_observed"]:
                        self.rows.setdefault(batch_shape[i], names[i])
            self.plates[name] = tuple(names)

    def of(self, name: str, shape: Sequence[int], like: Optional[str] = None) -> list[str]:
        """Names of a variable's dimensions, chain and draw apart.

        :param like: the site whose plates it stands in.
        :raises ValueError: where names were given that do not fit the shape.
        """
        if name in self.dims:
            if len(self.dims[name]) != len(shape):
                raise ValueError(
                    f"dims[{name!r}] names {len(self.dims[name])} dimensions, {self.dims[name]}, the variable has "
                    f"shape {tuple(shape)}"
                )
            return self.dims[name]
        known = self.plates.get(like or name, ())
        if len(known) == len(shape):
            own = self.dims.get(like or name)
            return list(own if own and len(own) == len(shape) else known)
        return [f"{name}_dim_{i}" for i in range(len(shape))]

    def of_function(self, name: str, shape: Sequence[int]) -> list[str]:
        """Names of the dimensions of function values, ``(..., N)``."""
        if name in self.dims:
            return self.of(name, shape)
        rows = self.row_dim(shape[-1]) or f"{name}_dim_{len(shape) - 1}"
        return [*(f"{name}_output" if i == len(shape) - 2 else f"{name}_dim_{i}" for i in range(len(shape) - 1)), rows]

    def of_coefficients(self, name: str, shape: Sequence[int]) -> list[str]:
        """Names of the dimensions of coefficients, ``(..., M)``."""
        if f"{name}_w" in self.dims:
            return self.of(f"{name}_w", shape)
        front = [f"{name}_output" if i == len(shape) - 2 else f"{name}_w_dim_{i}" for i in range(len(shape) - 1)]
        return [*front, f"{name}_basis"]

    def row_dim(self, size: int) -> Optional[str]:
        """The data plate of that size, under the name that its dimension was given."""
        return self.rows.get(size)

    def dataset(
        self, variables: Mapping[str, tuple[Sequence[str], np.ndarray]], sampled: bool, strict: bool = True
    ) -> Any:
        """An ``xarray.Dataset``; with ``sampled`` all variables have chain and draw in front.

        A name that fits no more gives way to ``{variable}_dim_{i}``; with ``strict`` one that the user gave raises.
        """
        xr = backend.xarray()
        front = ["chain", "draw"] if sampled else []
        sizes: dict[str, int] = {}
        arrays = {}
        given = {dim: name for name in variables for dim in self.dims.get(name, ()) if strict}
        for name, (dims, values) in variables.items():
            dims = [*front, *dims]
            for i, (dim, size) in enumerate(zip(dims, values.shape)):
                if dim in variables or (sizes.setdefault(dim, size) != size):
                    if dim in given:
                        clash = (
                            "is a variable" if dim in variables else f"has {size} values in {name!r}, not {sizes[dim]}"
                        )
                        raise ValueError(f"dims[{given[dim]!r}] names {dim!r}, which {clash}")
                    dims[i] = f"{name}_dim_{i - len(front)}"
                    sizes[dims[i]] = size
            arrays[name] = (dims, values)
        return xr.Dataset(arrays, coords={dim: self.coordinate(dim, size) for dim, size in sizes.items()})

    def coordinate(self, dim: str, size: int) -> np.ndarray:
        """A dimension's coordinate values: those given, or its numbers.

        Rows of new inputs have the data plate's name and another number: values given are then the other rows'.
        """
        given = self.coords.get(dim)
        return np.arange(size) if given is None or len(given) != size else given

    def require_used(self, datasets: Iterable[Any], left_out: Collection[str] = ()) -> None:
        """Raise where ``dims`` or ``coords`` name what is not there, or give values that fit nowhere.

        :param datasets: all groups.
        :param left_out: names of variables that the user has chosen not to keep.
        :raises ValueError: naming them, what there is, and what was perhaps meant.
        """
        variables = set(left_out)
        sizes: dict[str, set[int]] = {}
        for dataset in datasets:
            variables |= set(dataset.data_vars)
            for dim, size in dataset.sizes.items():
                sizes.setdefault(str(dim), set()).add(size)
        not_kept = {dim for name in left_out for dim in self.dims.get(name, ())}
        known = {"dims": (variables, "variable"), "coords": (set(sizes) - set(RESERVED) | not_kept, "dimension")}
        for argument, given in (("dims", self.dims), ("coords", self.coords)):
            there, kind = known[argument]
            for name in given:
                if name not in there:
                    near = difflib.get_close_matches(name, sorted(there), 1)
                    hint = f"; did you mean {near[0]!r}?" if near else "."
                    raise ValueError(f"{argument} names {name!r}, which is no {kind}: there are {sorted(there)}{hint}")
        for dim, values in self.coords.items():
            if dim in sizes and len(values) not in sizes[dim]:
                found = " or ".join(map(str, sorted(sizes[dim])))
                raise ValueError(f"coords[{dim!r}] has {len(values)} values, the dimension has size {found}")


def require_sample_dims(sample_dims: Sequence[str]) -> None:
    """Raise where these are no names for the dimensions of draws: one, or a chain's and a draw's.

    :raises ValueError: naming what came.
    """
    if isinstance(sample_dims, str) or tuple(sample_dims) not in (("chain", "draw"), ("sample",)):
        raise ValueError(f'sample_dims must be ("chain", "draw") or ("sample",), got {sample_dims!r}')


def with_sample_dims(dataset: Any, sample_dims: Sequence[str]) -> Any:
    """A dataset whose draws have these dimensions, chain by chain where it is one."""
    if len(sample_dims) == 2 or "draw" not in dataset.dims:
        return dataset
    flat = dataset.stack({sample_dims[0]: ("chain", "draw")}, create_index=False).drop_vars(["chain", "draw"])
    return flat.assign_coords({sample_dims[0]: np.arange(flat.sizes[sample_dims[0]])}).transpose(sample_dims[0], ...)


def attributes(**more: Any) -> dict[str, Any]:
    """A dataset's attributes: who made it and when; what NetCDF cannot hold is written as JSON."""
    import pyro

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
) -> dict[str, np.ndarray]:
    """The tensor arguments of the model that are not observed values, by the names of its parameters."""
    found = {}
    for name, value in _bound(model, args, kwargs).items():
        if isinstance(value, np.ndarray):
            value = torch.as_tensor(value)
        if isinstance(value, Tensor) and not any(_same(value, other) for other in observed.values()):
            found[name] = value.detach().cpu().numpy()
    return found


def _bound(model: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        signature = inspect.signature(function)
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        bound = {f"arg_{i}": value for i, value in enumerate(args)} | kwargs
        signature = None
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind if signature is not None else None
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat |= value
        elif isinstance(value, (tuple, list)):
            flat |= {f"{name}_{i}": part for i, part in enumerate(value)}
        elif isinstance(value, Mapping):
            flat |= {str(key): part for key, part in value.items()}
        else:
            flat[name] = value
    return flat


def _same(argument: Tensor, observed: Tensor) -> bool:
    if argument.shape != observed.shape:
        return False
    return bool(((argument == observed) | argument.isnan()).all())
