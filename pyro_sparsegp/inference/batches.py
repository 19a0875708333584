"""What a fit trains on: tensors whose rows it shuffles itself, or the batches of a ``DataLoader``."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import length_hint
from typing import Any, Optional, Union

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ..numerics.arguments import refuse
from ..program.data import map_tensors, tensors

Device = Union[str, torch.device, None]


@dataclass
class Batch:
    """One step's arguments."""

    args: tuple
    kwargs: dict[str, Any]
    weight: float  # how many rows they stand for among several processes
    indices: Optional[Tensor] = None  # the rows' numbers, where the fit drew them


def as_batches(
    data: object, batch_size: Optional[int], size: Optional[int], device: Device, seed: int
) -> Union[TensorBatches, LoadedBatches]:
    """Batches of ``data``, as :func:`~pyro_sparsegp.fit` takes them."""
    if isinstance(data, (Tensor, np.ndarray, tuple, Mapping)):
        return TensorBatches(*arguments_of(data), batch_size, size, device, seed)
    # A list of tensors could be (x, y) or batches of x.
    listed = isinstance(data, list) and any(isinstance(value, (Tensor, np.ndarray)) for value in data[:1])
    kind, repeats = type(data).__name__, isinstance(data, Iterable) and not isinstance(data, Iterator)
    faults = {
        "data must be a tuple of the model's arguments, (x, y), or a dict of them; or batches of these that can be "
        f"passed over again, as DataLoader(dataset, batch_size=1024); got {kind}": listed or not repeats,
        f"batch_size={batch_size} is for data in tensors; {kind} makes its own batches": batch_size is not None,
    }
    refuse(faults)
    return LoadedBatches(data, size, device, seed)  # type: ignore[arg-type]


def arguments_of(data: object) -> tuple[tuple, dict[str, Any]]:
    """A model's positional and keyword arguments out of a tensor, a tuple or list, or a dict of them; arrays, which may
    be memory maps, as tensors that share their memory.
    """

    def of(value: object) -> Any:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if isinstance(data, Mapping):
            return (), {key: of(value) for key, value in data.items()}
        return tuple(map(of, data if isinstance(data, (tuple, list)) else (data,))), {}


def _rows(*arguments: object) -> list[int]:
    """How many rows the tensors that have any have."""
    return [len(value) for value in tensors(arguments) if value.dim()]


@dataclass
class TensorBatches:
    """Rows of tensors or arrays (of memory maps, no more than a batch is read), shuffled anew in each epoch.

    A batch always has ``batch_size`` rows: the remainder of each epoch's order, other rows each time, is left out.
    Without a size it is all of them, in their own order. What has no rows goes to every step as it is.
    """

    args: tuple
    kwargs: dict[str, Any]
    batch_size: Optional[int]
    size: Optional[int]
    device: Device
    seed: int

    def __post_init__(self) -> None:
        rows, size = _rows(self.args, self.kwargs), self.batch_size
        fits = size is None or min(rows, default=0) == max(rows, default=0) >= size
        faults = {
            "data has no tensor or array with rows. torch.as_tensor(table.to_numpy()) makes one of a table; a model "
            "that holds its data itself is trained by svi.step()": not rows,
            f"batch_size={size} needs tensors with one row per datum, and {size} rows or more; data's have {rows}. "
            "Bind other tensors to the model, functools.partial(model, table=table).": not fits,
        }
        refuse(faults)
        self.num, self.size, self.whole = rows[0], self.size or rows[0], size is None

    def __len__(self) -> int:
        return 1 if self.batch_size is None else self.num // self.batch_size

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from one on."""
        if self.batch_size is None:
            yield from [self.everything][start:]
            return
        rows = self._order(number)[: len(self) * self.batch_size]
        yield from map(self._take, rows.split(self.batch_size)[start:])

    @cached_property
    def everything(self) -> Batch:
        """All rows, in their own order."""
        # The same tensors in each step: by their identity a guide knows the data again.
        args, kwargs = map_tensors(lambda value: value.to(self.device), (self.args, self.kwargs))
        return Batch(args, kwargs, self.num)

    def first(self, num: int) -> Batch:
        """Rows for a guide's first call: so many random ones, or all."""
        return self.everything if num >= self.num else self._take(self._order(0)[:num])

    def _order(self, number: int) -> Tensor:
        # By the epoch's number alone: a fit that is resumed within an epoch goes on in the same order.
        return torch.randperm(self.num, generator=torch.Generator().manual_seed(self.seed + number))

    def _take(self, rows: Tensor) -> Batch:
        def of(value: Tensor) -> Tensor:
            return (value[rows.to(value.device)] if value.dim() else value).to(self.device)

        args, kwargs = map_tensors(of, (self.args, self.kwargs))
        return Batch(args, kwargs, self.num, rows.to(self.device))


class LoadedBatches:
    """Batches out of a ``DataLoader`` or another iterable: tensors, tuples of the model's arguments or dicts of them.

    An epoch draws its order from random numbers of its own, seeded by its number, so that it can be passed over again
    up to any batch. A method ``set_epoch`` of the source or its sampler is told it.
    There are ``size`` rows in all; by default as many as the loader's data set has.
    """

    whole, num, batch_size = False, 0, None  # how many rows there are here is not known

    def __init__(self, source: Iterable, size: Optional[int], device: Device, seed: int) -> None:
        self.source, self.size, self.device, self.seed = source, size, device, seed
        self.sampler: Any = getattr(source, "sampler", None)
        # Where a data set's items are batches themselves, it does not say how many rows there are.
        if size is None and isinstance(source, DataLoader) and source.batch_sampler is not None:
            self.sampler = getattr(source.batch_sampler, "sampler", self.sampler)
            num = length_hint(source.dataset, 0)
            drawn = length_hint(self.sampler, num)
            # Rows drawn with weights stand for all, those of a subset for themselves: only the caller knows.
            if drawn != num and not isinstance(self.sampler, DistributedSampler):
                raise ValueError(
                    f"size: data draws {drawn} of {num} rows in an epoch. Give the number of all rows that they "
                    "stand for, fit(..., size=N)"
                )
            self.size = num or None

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from one on."""
        seed = (self.seed + number) % 2**32
        for part in (self.source, self.sampler):
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)  # type: ignore[union-attr]
            getattr(part, "set_epoch", id)(number)
        state = pyro.util.get_rng_state()
        pyro.set_rng_seed(seed)
        stream = iter(self.source)
        # Loaders draw an epoch's order with its first batch.
        first = deque(islice(stream, max(start, 1)), maxlen=1)
        pyro.util.set_rng_state(state)
        if not first:
            raise ValueError("data gives no batches")
        for item in stream if start else chain(first, stream):
            args, kwargs = map_tensors(lambda value: value.to(self.device), arguments_of(item))
            num = next(iter(_rows(args, kwargs)), 0)
            if not num:
                raise ValueError(f"a batch of data must hold tensors with rows, got {type(item).__name__}")
            yield Batch(args, kwargs, num)

    def first(self, num: int) -> Batch:
        """Rows for a guide's first call: the first batches with so many, and no more than there are in all."""
        found: list[Batch] = []
        rows, most = 0.0, math.inf if self.size is None else self.size
        for batch in self.epoch(0):
            # A source without end gives the same rows again.
            if rows >= num or (found and rows + batch.weight > most):
                break
            found.append(batch)
            rows += batch.weight
        args, kwargs = map_tensors(
            lambda *parts: torch.cat(parts) if parts[0].dim() else parts[0],
            *((batch.args, batch.kwargs) for batch in found),
        )
        return Batch(args, kwargs, rows)
