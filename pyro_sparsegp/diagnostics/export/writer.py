"""Draws collected into arrays, and the arrays into labelled groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...program.masks import unmasked_rows
from . import backend
from .draws import Draw
from .labels import Labels, attributes

__all__ = ["Writer", "name_of"]


class Writer:
    """Collects draws into preallocated arrays, ``(chain, draw, ...)``."""

    def __init__(self, labels: Labels, shape: tuple[int, int], dtype: str) -> None:
        self.labels, self.shape, self.dtype = labels, shape, _floating(dtype)
        self.groups: dict[str, dict[str, np.ndarray]] = {}
        self.kept: dict[str, np.ndarray] = {}  # of sites with masked rows, which are not
        self.functions: set[str] = set()
        self.discrete: set[str] = set()  # observed sites whose values are whole numbers, of whatever type
        self.index = (0, 0)
        self.learned = False

    def at(self, chain: int, draw: int) -> None:
        """Where the next values go."""
        self.index = chain, draw

    def learn(self, draw: Draw) -> None:
        """Learn labels, and which rows are masked, from the first draw."""
        self.learned = True
        self.functions |= set(draw.functions)
        self.labels.learn({**draw.data, **draw.factors})  # whose plates name dimensions, too
        self.learn_kinds(draw.data)
        for site, node in draw.data.items():
            rows = unmasked_rows(node)
            if rows is not None and rows.dim() and not rows.all():
                self.kept[site] = rows.cpu().numpy()

    def learn_kinds(self, sites: Mapping[str, Any]) -> None:
        """Learn which of the observed sites are of whole numbers: torch holds counts as floats, ArviZ as integers."""
        for name, site in sites.items():
            fn, value = site["fn"], site["value"]
            if getattr(fn.support, "is_discrete", False) and bool((value == value.round()).all()):
                self.discrete.add(name)

    def whole(self, name: str, array: np.ndarray) -> np.ndarray:
        """An observed site's values, counts as integers."""
        return array.astype("int64") if name in self.discrete else array

    def put(self, group: str, variable: str, value: Tensor) -> None:
        """Keep one draw's value."""
        value = value.detach()
        if group == "log_likelihood" and variable in self.kept:
            value = value[torch.from_numpy(self.kept[variable]).to(value.device)]
        arrays = self.groups.setdefault(group, {})
        if variable not in arrays:
            kind = np.dtype("float64") if group == "sample_stats" else self.dtype
            if group == "sample_stats" and not value.is_floating_point():
                kind = np.dtype("bool" if value.dtype is torch.bool else "int64")
            of_data = group.endswith("predictive") or (group == "predictions" and variable in self.discrete)
            if of_data and (variable in self.discrete or not value.is_floating_point()):
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
        if group == "log_likelihood" and variable in self.kept and self.kept[variable].ndim > 1:
            return [f"{variable}_dim_0"]  # of several plates' data those that are left are in no array of their own
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

    def datasets(
        self, shared: dict[str, Any], own: dict[str, dict[str, Any]], fixed: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """The groups as datasets.

        :param shared: attributes of all groups.
        :param own: attributes of single groups.
        :param fixed: arrays without draws, by group.
        """
        found = {}
        chains, draws = self.shape
        if "posterior" not in self.groups and "prior_predictive" not in self.groups:  # function values only, left out
            coords = {"chain": np.arange(chains), "draw": np.arange(draws)}
            found["posterior"] = backend.xarray().Dataset(coords=coords, attrs=attributes(**shared))
        for group, arrays in self.groups.items():
            labelled = {name: (self.names(group, name), array) for name, array in arrays.items()}
            if group == "log_likelihood" and self.kept:
                dataset = self._without_masked_rows(labelled)
            else:
                dataset = self.labels.dataset(labelled, sampled=True)
            found[group] = dataset.assign_attrs(attributes(**shared, **own.get(group, {})))
        if "predictions" in self.groups:
            self.labels.rows |= {
                size: dim for name in self.groups["predictions"] for dim, size in self.row_sizes("predictions", name)
            }
        for group, arrays in fixed.items():
            labelled = {name: (self.labels_of_data(name, array), array) for name, array in arrays.items()}
            if labelled:
                found[group] = self.labels.dataset(labelled, sampled=False).assign_attrs(attributes(**shared))
        return found

    def _without_masked_rows(self, labelled: dict[str, tuple[list[str], np.ndarray]]) -> Any:
        holds: dict[str, Any] = {}  # which rows a dimension has: sites keep rows of their own
        for site, (dims, array) in labelled.items():
            rows = self.kept[site].tolist() if site in self.kept else None
            if len(dims) == 1 and holds.setdefault(dims[0], rows) != rows:
                labelled[site] = [f"{site}_dim_0"], array
        dataset = self.labels.dataset(labelled, sampled=True, strict=False)
        for site, rows in self.kept.items():
            dim = str(dataset[site].dims[-1])
            dataset = dataset.assign_coords({dim: self.labels.coordinate(dim, rows.size)[rows.ravel()]})
        return dataset

    def check(self, datasets: dict[str, Any]) -> None:
        """Raise where the user's labels name what is not there.

        :raises ValueError: naming it.
        """
        self.labels.require_used(datasets.values(), left_out=self.functions)


def _floating(dtype: Any) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.kind != "f":
        raise ValueError(f"dtype must be a floating type, 'float32' or 'float64', got {dtype!r}")
    return found


def name_of(model: Callable) -> str:
    """A model's name."""
    return getattr(model, "__name__", type(model).__name__)
