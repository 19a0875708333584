"""What a fit trains on, batch by batch: tensors whose rows it takes itself, or batches that come from outside.

Both know where they are, so that a fit that was cut off goes on with the batch that would have come next.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ..program.dependence import differ

__all__ = [
    "Batch",
    "Batches",
    "LoadedBatches",
    "TensorBatches",
    "as_arguments",
    "as_batches",
    "ends_of",
    "placed_arguments",
    "require_same",
    "rows_named",
    "warn_of_others",
]

_END = object()
# Samplers whose draws stand for all rows of a data set, however many they are in an epoch or a process.
_OF_ALL = (RandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass
class Batch:
    """One step's arguments.

    :param indices: the rows' numbers, where they are known and not all rows are here.
    :param num: how many rows these are.
    :param weight: how many rows they stand for among several processes.
    """

    args: tuple
    kwargs: dict[str, Any]
    indices: Optional[Tensor] = None
    num: int = 0
    weight: float = 1.0


@contextmanager
def rows_named(batch: Batch) -> Iterator[None]:
    """Errors about a batch, whose rows have an order of its own, name a row of the data that is not finite."""
    try:
        yield
    except ValueError as error:
        found = [] if batch.indices is None else _not_finite(batch, batch.indices)
        if not found:
            raise
        raise ValueError(f"{error} (A batch's rows are shuffled; in all of the data {', '.join(found)}.)") from error


def _not_finite(batch: Batch, indices: Tensor) -> list[str]:
    found = []
    for key, value in [*enumerate(batch.args), *batch.kwargs.items()]:
        if _has_rows(value) and len(value) == len(indices) and value.is_floating_point():
            rows = indices[~value.isfinite().flatten(1).all(1) if value.dim() > 1 else ~value.isfinite()]
            if len(rows):
                found.append(f"data[{key!r}] is NaN or infinite at row {int(rows.min())}")
    return found


class Batches(ABC):
    """A source of batches without end, in epochs."""

    size: Optional[int]  # rows in all, of this process; None if that is not known
    whole: bool  # whether each batch is all of the data

    @abstractmethod
    def next(self) -> Optional[Batch]:
        """The next batch; ``None`` where the data have come to an end for good."""

    @abstractmethod
    def some(self, num: int) -> Batch:
        """Some ``num`` rows that stand for all, or fewer if there are no more; what comes next stays the same."""

    @abstractmethod
    def num_batches(self, among: int) -> Optional[int]:
        """How many batches make an epoch, after :meth:`some`; ``None`` if that is not known.

        :param among: how many processes share the rows.
        """

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The place in the data, in plain Python and tensors."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the place of :meth:`get_state`."""


def as_batches(
    data: Any,
    batch_size: Optional[int],
    size: Optional[int],
    device: Optional[torch.device],
    seed: int,
    alone: bool = True,
) -> Batches:
    """Batches of ``data``, as :func:`~pyro_sparsegp.fit` takes them.

    :param alone: whether no other process has rows, too.
    :raises ValueError: naming the argument that does not fit.
    """
    if isinstance(data, (Tensor, np.ndarray, tuple, Mapping)):
        return TensorBatches(*as_arguments(data, "data"), batch_size, size, device, seed)
    if isinstance(data, list) and data and isinstance(data[0], (Tensor, np.ndarray)):
        raise ValueError(
            "data is a list of tensors, which could be batches or arguments: give a tuple (x, y) of the model's "
            "arguments, or a list of such tuples, a batch each"
        )
    if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
        raise ValueError("data is a Dataset: give a DataLoader of it, DataLoader(dataset, batch_size=1024)")
    if not isinstance(data, Iterable):
        raise ValueError(
            "data must be a tuple of the model's arguments, (x, y), a dict of them, a DataLoader or another iterable "
            f"of batches, got {type(data).__name__}"
        )
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} is for data in tensors; a {type(data).__name__} makes batches of its own"
        )
    return LoadedBatches(data, size, device, seed, alone)


def as_arguments(data: Any, argument: str) -> tuple[tuple, dict[str, Any]]:
    """A model's positional and keyword arguments out of a tensor, a tuple or list, or a dict of them."""
    if isinstance(data, Mapping):
        if not all(isinstance(key, str) for key in data):
            raise ValueError(f"{argument} has keys {list(data)}: a dict's keys are the names of the model's arguments")
        return (), dict(data)
    return (tuple(data), {}) if isinstance(data, (tuple, list)) else ((data,), {})


def placed_arguments(data: Any, argument: str, device: Optional[torch.device]) -> tuple[tuple, dict[str, Any]]:
    """As :func:`as_arguments`, arrays as tensors, on a device if one is given."""
    args, kwargs = as_arguments(data, argument)
    return tuple(_placed(arg, device) for arg in args), {key: _placed(arg, device) for key, arg in kwargs.items()}


def _placed(value: Any, device: Optional[torch.device]) -> Any:
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


def _named(args: tuple, kwargs: dict[str, Any], argument: str = "data") -> dict[str, Any]:
    """The arguments that have rows, by how the caller knows them."""
    named = {f"{argument}[{i}]": value for i, value in enumerate(args)}
    named |= {f"{argument}[{key!r}]": value for key, value in kwargs.items()}
    return {name: value for name, value in named.items() if _has_rows(value)}


def _has_rows(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


class TensorBatches(Batches):
    """Rows of tensors or arrays (memory-mapped ones too, of which no more is read), shuffled anew in each epoch.

    A batch always has ``batch_size`` rows: the remainder of each epoch's order, other rows each time, is left out.

    :param args: tensors have a row for each datum; what else is there goes to every step as it is.
    :param batch_size: rows a batch; ``None`` is all of them, in their own order.
    :param size: what the caller says of the number of rows.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        batch_size: Optional[int],
        size: Optional[int],
        device: Optional[torch.device],
        seed: int,
    ) -> None:
        rows = {name: len(value) for name, value in _named(args, kwargs).items()}
        if not rows:
            found = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
            raise ValueError(
                f"data has no tensor or array with rows, but {found}: torch.as_tensor(table.to_numpy()).float() makes "
                "a tensor of a pandas one"
            )
        self.num = next(iter(rows.values()))
        other = {key: num for key, num in rows.items() if num != self.num}
        if (batch_size is not None or size is not None) and other:
            key, num = next(iter(other.items()))
            raise ValueError(
                f"{next(iter(rows))} has {self.num} rows and {key} has {num}: tensors in data have a row for each "
                "datum. Bind others to the model, functools.partial(model, table=table), before the guide gets it."
            )
        if batch_size is not None and not 1 <= batch_size <= self.num:
            raise ValueError(f"batch_size must be between 1 and data's {self.num} rows, got {batch_size}")
        if size is not None and size != self.num:
            raise ValueError(
                f"size={size}, and data has {self.num} rows, which are taken for all: leave size out, or give batches, "
                "[(x, y)] say, of which size is the number of all rows"
            )
        self.args, self.kwargs, self.batch_size, self.device, self.seed = args, kwargs, batch_size, device, seed
        self.size, self.whole = self.num, batch_size is None
        self._epoch, self._place = 0, 0
        self._order: Optional[Tensor] = None
        self._all: Optional[Batch] = None

    def next(self) -> Optional[Batch]:
        if self.batch_size is None:
            return self.everything()
        if self._place + self.batch_size > self.num:
            self._epoch, self._place, self._order = self._epoch + 1, 0, None
        if self._order is None:
            generator = torch.Generator().manual_seed((self.seed + 1_000_003 * self._epoch) % 2**63)
            self._order = torch.randperm(self.num, generator=generator)
        rows = self._order[self._place : self._place + self.batch_size]
        self._place += self.batch_size
        return self._take(rows)

    def everything(self) -> Batch:
        """All rows, in their own order."""
        if self._all is None:  # the same tensors in each step, so that a guide knows them again
            args = tuple(_placed(value, self.device) for value in self.args)
            kwargs = {key: _placed(value, self.device) for key, value in self.kwargs.items()}
            self._all = Batch(args, kwargs, None, self.num, float(self.num))
        return self._all

    def _take(self, rows: Tensor) -> Batch:
        def of(value: Any) -> Any:
            if not _has_rows(value):
                return value
            if isinstance(value, np.ndarray):
                return _placed(np.asarray(value[rows.numpy()]), self.device)
            return _placed(value[rows.to(value.device)], self.device)

        args, kwargs = tuple(map(of, self.args)), {key: of(value) for key, value in self.kwargs.items()}
        return Batch(args, kwargs, _placed(rows, self.device), len(rows), float(self.num))

    def some(self, num: int) -> Batch:
        if num >= self.num and self.batch_size is None:
            return self.everything()
        generator = torch.Generator().manual_seed(self.seed)
        if 8 * num < self.num:  # a permutation of many rows for a few is a waste; repeats are rare, and left out
            rows = torch.randint(self.num, (num,), generator=generator).unique()
        else:
            rows = torch.randperm(self.num, generator=generator)[:num]
        return self._take(rows)

    def num_batches(self, among: int) -> Optional[int]:
        return 1 if self.batch_size is None else self.num // self.batch_size

    def get_state(self) -> dict[str, Any]:
        ends = ends_of(self.args, self.kwargs)
        return {"seed": self.seed, "epoch": self._epoch, "place": self._place, "num": self.num, "ends": ends}

    def set_state(self, state: dict[str, Any]) -> None:
        require_same("data", state.get("num"), self.num)
        warn_of_others(
            state.get("ends", {}),
            ends_of(self.args, self.kwargs),
            "the guide, the optimiser and the losses so far are those of the first: resume with the data that the fit "
            "began with, or begin anew, resume=False",
        )
        self.seed, self._epoch, self._place, self._order = state["seed"], state["epoch"], state["place"], None


class LoadedBatches(Batches):
    """Batches out of an iterable: tensors, tuples of the model's arguments or dicts of them.

    One that can be passed over once only, such as a generator, ends the fit where it ends. The source has global
    random numbers of its own, so that those of training do not depend on what it draws, and it can be replayed up to
    any batch.

    :param source: if it, or its sampler, has a method ``set_epoch``, it is told each epoch's number.
    :param size: rows in all; a first epoch that has others is warned of.
    :param alone: whether no other process has rows, too.
    """

    whole = False

    def __init__(
        self, source: Iterable, size: Optional[int], device: Optional[torch.device], seed: int, alone: bool = True
    ) -> None:
        self.source, self.device = source, device
        self._random = _seeded(seed)
        said = _rows_in_all(source)
        self.size = said if size is None else size
        self._seen: Optional[int] = 0 if alone and size not in (None, said) else None  # rows of the first epoch
        self._largest = 0  # batch among them
        self._last: Optional[int] = None  # batch's number, if the source says it
        self._rows = 1  # of the first batch
        self._epoch, self._place = 0, 0
        self._ahead: list[Batch] = []  # of a source that is passed over once
        self._stream: Optional[Iterator] = None
        self._start: Any = None  # of the random numbers at the epoch's start

    @property
    def _once(self) -> bool:
        return isinstance(self.source, Iterator)

    def _open(self) -> Iterator:
        for part in (self.source, getattr(self.source, "sampler", None)):
            told = getattr(part, "set_epoch", None)
            if told is not None:
                told(self._epoch)
        self._start = self._random, [g.get_state() for g in self._generators()]
        with self._own_random():
            return iter(self.source)

    def _pull(self, stream: Iterator) -> Any:
        """The next item, ``None`` at the end."""
        with self._own_random():
            item = next(stream, _END)
        if item is None:
            raise ValueError("a batch of data must hold tensors with rows, got NoneType")
        return None if item is _END else item

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        outside = pyro.util.get_rng_state()
        pyro.util.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = pyro.util.get_rng_state()
            pyro.util.set_rng_state(outside)

    def _rewind(self, start: Any) -> None:
        """Have random numbers come as they did from an epoch's start."""
        self._random = start[0]
        for generator, saved in zip(self._generators(), start[1]):
            generator.set_state(saved)

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(self.source, "generator", None)]
        found += [getattr(getattr(self.source, part, None), "generator", None) for part in ("sampler", "batch_sampler")]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def next(self) -> Optional[Batch]:
        self._place += 1
        if self._ahead:
            return self._ahead.pop(0)
        if self._stream is None:
            self._stream = self._open()
        item = self._pull(self._stream)
        if item is None:
            if self._once:
                return None
            self._compare()
            self._epoch, self._place = self._epoch + 1, 1
            self._stream = self._open()
            item = self._pull(self._stream)
            if item is None:
                raise ValueError("data gives no batches: it is empty, or can be passed over only once")
        batch = self._batch(item)
        if self._seen is not None:
            self._seen, self._largest = self._seen + batch.num, max(self._largest, batch.num)
            if self._place == self._last:
                self._compare()
        return batch

    def _compare(self) -> None:
        """Warn if a first epoch had other rows than ``size``, by more than a last batch left out or filled up."""
        seen, self._seen = self._seen, None
        if seen is None or self.size is None or seen == self._largest:  # one batch may stand for all
            return
        if abs(seen - self.size) >= self._largest:
            warnings.warn(
                f"size={self.size}, and an epoch of data had {seen} rows: each counts as {self.size / seen:.3g} in the "
                f"likelihood. Give size={seen}; where batches are draws that stand for {self.size} rows, all is well.",
                stacklevel=6,
            )

    def _batch(self, item: Any) -> Batch:
        args, kwargs = as_arguments(item, "a batch of data")
        args = tuple(_placed(value, self.device) for value in args)
        kwargs = {key: _placed(value, self.device) for key, value in kwargs.items()}
        num = next((len(value) for value in [*args, *kwargs.values()] if _has_rows(value)), 0)
        if not num:
            raise ValueError(f"a batch of data must hold tensors with rows, got {type(item).__name__}")
        return Batch(args, kwargs, None, num, float(num))

    def some(self, num: int) -> Batch:
        # Batches that are made as they come may be draws of the same rows, without end.
        most = None if isinstance(self.source, Sequence) else self.size
        num = num if most is None else min(num, most)
        if self._once:
            self._stream = self._stream or self._open()
            while sum(batch.num for batch in self._ahead) < num:
                item = self._pull(self._stream)
                if item is None:
                    break
                self._ahead.append(self._batch(item))
            found = self._ahead
        else:
            found, stream, before = [], self._open(), self._start
            while sum(batch.num for batch in found) < num:
                item = self._pull(stream)
                if item is None:
                    break
                found.append(self._batch(item))
            self._rewind(before)
        if not found:
            raise ValueError("data gives no batches")
        self._rows = found[0].num
        totals = itertools.accumulate(batch.num for batch in found)
        return _joined([batch for batch, total in zip(found, totals) if most is None or total <= most] or found[:1])

    def num_batches(self, among: int) -> Optional[int]:
        self._last = _length(self.source)
        if self._last is not None:
            return self._last
        return None if self.size is None else math.ceil(self.size / (among * self._rows))

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place, "start": self._start}

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._place = state["epoch"], state["place"]
        self._ahead, self._seen = [], None
        if state["start"] is None:
            return
        self._rewind(state["start"])
        self._stream = self._open()
        for i in range(self._place):
            if self._pull(self._stream) is None:
                raise ValueError(
                    f"data gave {i} batches in an epoch of which the checkpoint has seen {self._place}: give the data "
                    "that the fit began with"
                )


def _seeded(seed: int) -> dict[str, Any]:
    """The state of torch's, NumPy's and Python's random numbers under a seed."""
    return {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "random": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed % 2**32).get_state(),
    }


def _rows_in_all(source: Any) -> Optional[int]:
    """The rows that a loader's epochs go through, or stand for; ``None`` where it does not say."""
    num = _length(getattr(source, "dataset", None))
    if not isinstance(source, DataLoader):
        return num
    if source.batch_sampler is None:  # an item of the data set is a batch
        return None
    sampler = getattr(source.batch_sampler, "sampler", source.sampler)
    drawn = _length(sampler)
    if isinstance(sampler, _OF_ALL) or drawn in (None, num):
        return num
    return drawn if isinstance(sampler, (SubsetRandomSampler, Sequence)) else None


def _length(source: Any) -> Optional[int]:
    try:
        return len(source)
    except TypeError:
        return None


def _joined(batches: list[Batch]) -> Batch:
    """Several batches as one."""

    def join(values: list[Any]) -> Any:
        return torch.cat(values) if _has_rows(values[0]) else values[0]

    args = tuple(join(list(parts)) for parts in zip(*(batch.args for batch in batches)))
    kwargs = {key: join([batch.kwargs[key] for batch in batches]) for key in batches[0].kwargs}
    num = sum(batch.num for batch in batches)
    return Batch(args, kwargs, None, num, float(num))


def ends_of(args: tuple, kwargs: dict[str, Any], argument: str = "data") -> dict[str, Tensor]:
    """The first row of each argument and the last, by which other data are known."""
    ends = {name: torch.as_tensor(value[[0, -1]]) for name, value in _named(args, kwargs, argument).items()}
    return {name: value.detach().cpu() for name, value in ends.items()}


def warn_of_others(saved: dict[str, Tensor], now: dict[str, Tensor], then: str) -> None:
    """Warn if the ends of data are not those of the checkpoint; one of before has none.

    :param then: what follows where it is another data set, and what to do.
    """
    for name, value in saved.items():
        other = now.get(name)
        if other is None or value.shape != other.shape or differ(value, other).any():
            warnings.warn(
                f"checkpoint: {name} has other first or last rows than when it was written. Where that is another data "
                f"set, {then}.",
                stacklevel=6,
            )
            return


def require_same(argument: str, saved: Any, now: Any) -> None:
    """Raise if an argument has another number of rows than the checkpoint's had."""
    if saved != now:
        raise ValueError(
            f"{argument} has {now} rows, the checkpoint's had {saved}: give the {argument} that the fit began with"
        )
