"""What batches are to a model: its arguments, the number of all rows, and one step of training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.optim import PyroLRScheduler

from ..guide import AutoSparseGP
from . import checkpoint as files
from .batches import Batch, Batches, TensorBatches
from .distributed import Workers, joined, sharing
from .expectation import ExpectationPropagation

__all__ = ["FIRST", "Feed", "draws_rows", "require_scaled", "show_all_rows"]

FIRST = 8192  # rows of the guide's first call, where batches have fewer


class Feed:
    """How a batch becomes a step: what the model is given with it, and the processes that share it."""

    def __init__(self, model: Callable, batches: Batches, method: Any, workers: Workers) -> None:
        self.method, self.workers = method, workers
        self.takes = _parameters(model)
        self.whole = batches.whole and workers.num == 1
        self.size: Optional[int] = batches.size
        if workers.num > 1 and isinstance(batches, TensorBatches):
            (total,) = workers.sum(torch.tensor(float(batches.num), dtype=torch.float64))
            self.size = int(total)
        needs = "size" in self.takes and not (self.whole and self.takes["size"].default is not inspect.Parameter.empty)
        if needs and self.size is None:
            raise ValueError("size: the model takes the number of all rows, and data does not say it; give size=N")
        self._extra: dict[str, Any] = {"size": self.size} if needs else {}

    def call(self, batch: Batch) -> tuple[tuple, dict[str, Any]]:
        """The model's arguments."""
        given = list(self.takes)[: len(batch.args)]  # by their places
        more = {name: value for name, value in self._extra.items() if name not in given}
        if "indices" in self.takes and batch.indices is not None:
            more["indices"] = batch.indices
        return batch.args, {**more, **batch.kwargs}

    def step(self, batch: Batch) -> float:
        """One step of the method; the loss of all processes' batch."""
        args, kwargs = self.call(batch)
        if isinstance(self.method, ExpectationPropagation):
            if batch.indices is not None:
                kwargs["indices"] = batch.indices
            value = self.method.step(*args, **kwargs)
        else:
            with sharing(self.workers.group if self.workers.num > 1 else None, batch.weight):
                value = self.method.step(*args, **kwargs)
                if self.workers.num > 1:
                    value = float(joined(torch.tensor(value, dtype=torch.float64))[0])
        optim = getattr(self.method.optim, "optim", self.method.optim)  # that of several processes holds the user's
        if isinstance(optim, PyroLRScheduler):
            plateau = optim.pt_scheduler_constructor is torch.optim.lr_scheduler.ReduceLROnPlateau
            optim.step(*([value] if plateau else []))
        return value


def _parameters(model: Callable) -> Mapping[str, inspect.Parameter]:
    call = model.forward if isinstance(model, torch.nn.Module) else model
    return inspect.signature(call).parameters


def show_all_rows(guide: AutoSparseGP, batches: Batches, feed: Feed) -> None:
    """Show a kernel whose diagonal is relative to the training inputs all of them."""
    if isinstance(batches, TensorBatches) and batches.num > FIRST and guide.corrected_modules():
        args, kwargs = feed.call(batches.everything())
        with poutine.block():
            guide(*args, **kwargs)


def _plates(guide: AutoSparseGP, call: tuple) -> Iterator[tuple[str, Any]]:
    """The observed sites and their plates in a run that leaves random numbers as they were."""
    random = files.random_state()
    with torch.no_grad(), poutine.block():
        guide(*call[0], **call[1])
    files.set_random_state(random)
    assert guide.structure is not None
    for name in guide.structure.rows:
        site: Any = guide.trace.nodes.get(name)
        if site is not None and site["is_observed"]:
            yield name, site["cond_indep_stack"]


def draws_rows(guide: AutoSparseGP, call: tuple) -> bool:
    """Whether the model takes some of the rows that it is given, as plates with a ``subsample_size`` do."""
    return any(frame.full_size not in (None, frame.size) for _, plates in _plates(guide, call) for frame in plates)


def require_scaled(guide: AutoSparseGP, call: tuple, batch: Batch, size: Optional[int]) -> None:
    """Raise if a batch's observations are not scaled up to all rows."""
    if size is None or batch.num >= size:
        return
    for name, plates in _plates(guide, call):
        full = [frame.full_size for frame in plates if frame.size == batch.num]
        if full and size not in full:
            raise ValueError(
                f"data has {size} rows, and a batch's {batch.num} at site {name!r} are in a plate of {full[0]}: give "
                "the plate the number of all rows, def model(x, y=None, size=None) with "
                "pyro.plate('data', size or len(x), subsample=x), to which fit gives it as size"
            )
