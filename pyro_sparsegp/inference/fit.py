"""A loop over SVI or expectation propagation that arrives, can be cut off anywhere and goes on from there."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from pyro import poutine
from pyro.infer import ELBO, SVI
from pyro.optim import PyroOptim
from torch import Tensor

from ..guide import AutoSparseGP
from . import checkpoint as files
from .batches import Batch, Batches, as_batches, placed_arguments
from .distributed import SharedOptim, Workers
from .expectation import ExpectationPropagation
from .feeding import FIRST
from .fitting import Fitting, HeldOut
from .held_out import log_score
from .history import Iterates
from .quadrature import TraceQuadrature_ELBO
from .recipe import FallingAdam

__all__ = ["FitResult", "fit"]

Data = Union[Tensor, np.ndarray, tuple, Mapping[str, Any], Iterable]


@dataclass(frozen=True)
class FitResult:
    """What a fit did.

    :param steps: how many it took, those before a resumption among them.
    :param reason: why it stopped.
    :param losses: of each step, ``(steps,)``, in nats: minus the bound, or −log Z of expectation propagation.
    :param scored: the numbers of steps after which held-out data were scored, ``(K,)``.
    :param scores: their scores, ``(K,)``, larger is better.
    :param seconds: of the loop.
    :param best_state: the guide's ``state_dict`` as ``"guide"`` and the model's parameters, at the best score, or at
        the end if nothing was scored. The guide is in that state.
    :param iterates: losses and small parameters step by step.
    """

    steps: int
    reason: str
    losses: np.ndarray = field(repr=False)
    scored: np.ndarray = field(repr=False)
    scores: np.ndarray = field(repr=False)
    seconds: float
    best_state: dict[str, Any] = field(repr=False)
    iterates: Iterates = field(repr=False)

    @property
    def best_score(self) -> Optional[float]:
        """The largest held-out score."""
        return float(self.scores.max()) if len(self.scores) else None


def fit(
    model: Callable,
    guide: AutoSparseGP,
    data: Data,
    *,
    steps: Optional[int] = None,
    epochs: Optional[int] = None,
    batch_size: Optional[int] = None,
    size: Optional[int] = None,
    optim: Optional[PyroOptim] = None,
    loss: Optional[ELBO] = None,
    method: Union[SVI, ExpectationPropagation, None] = None,
    warm_start: Optional[bool] = None,
    held_out: Union[Tensor, tuple, Mapping[str, Any], None] = None,
    score: Callable[..., float] = log_score,
    score_every: int = 100,
    patience: int = 10,
    stopping: Optional[Callable[[Iterates], bool]] = None,
    checkpoint: Union[str, Path, None] = None,
    checkpoint_every: float = 60.0,
    resume: bool = False,
    history: Collection[str] = ("locs.", "scales."),
    group: Optional[Any] = None,
    device: Union[str, torch.device, None] = None,
    progress: bool = True,
) -> FitResult:
    """Fit a guide, and the model's own parameters, to data.

    It is a loop over ``svi.step(*batch, size=N)``, or ``ep.step``, and no more: a loop of one's own does the same. A
    Ctrl-C or a SIGTERM lets the step that runs come to its end and writes the checkpoint; after Ctrl-C the result so
    far is returned, after SIGTERM the process exits.

    >>> result = fit(model, guide, (x, y), batch_size=1024, steps=2000, checkpoint="fit.pt")  # doctest: +SKIP

    :param model: the guide's model. With batches it is given the number of all rows as ``size`` and the rows' numbers
        as ``indices``, each if its signature has them: ``pyro.plate("data", size or len(x), subsample=x)``.
    :param guide: an :class:`AutoSparseGP`; a fresh one sees up to 8,192 random rows at its first call.
    :param data: the model's arguments, a tuple or a dict of tensors with a row for each datum (NumPy arrays and memory
        maps too); or a ``DataLoader`` or another iterable of batches, each a tuple or a dict of arguments, of which no
        more than a batch is held in memory.
    :param steps: how many in all; 2,000 if ``epochs`` are not given either.
    :param epochs: passes over the data, in the place of ``steps``.
    :param batch_size: rows a step, drawn anew without replacement in each epoch; by default all of them.
    :param size: how many rows there are in all, for an iterable that does not say. A ``DataLoader`` of single rows
        says: its data set's, or those that a ``SubsetRandomSampler`` draws from. Another number than a first epoch has
        is warned of.
    :param optim: a Pyro optimiser; one with a schedule (``PyroLRScheduler``) takes its step after each of the fit's. By
        default Adam with rates that fall to the end of the steps, smaller ones for networks.
    :param loss: an ELBO for SVI; by default :class:`TraceQuadrature_ELBO`.
    :param method: an ``SVI`` or an :class:`ExpectationPropagation` of one's own, in the place of these two.
    :param warm_start: whether a fresh guide starts with the hyperparameters and inducing inputs that the collapsed
        bound has on a subset of rows, where that applies: one GP site, its inducing points under a free-form family, a
        Gaussian likelihood, no network in the model. By default where a step, of n rows and M points, costs four times
        one of the subset's: n M² ≥ 4 min(N, 2048) min(M, 128)².
    :param held_out: the model's arguments with other observations, scored as training goes on.
    :param score: ``score(model, guide, *held_out)``, larger is better; by default the mean log predictive density.
    :param score_every: steps from one score to the next.
    :param patience: scores without a new best, after which training stops.
    :param stopping: a callable that is given the iterates after each step and says whether to stop.
    :param checkpoint: a file for all that the fit is, written so that it is never half there; the folder must exist.
    :param checkpoint_every: seconds from one to the next; 0 is after each step.
    :param resume: whether to go on from ``checkpoint``, if that file is there: on a CPU, with the same arguments, the
        result is the same bit for bit as that of a fit that was not cut off.
    :param history: names, or beginnings of names, of the guide's small parameters that are kept step by step.
    :param group: a ``torch.distributed`` process group, under ``torchrun``: each process gives its own rows, and all
        end up with the parameters of one process with the joined batches. ``size`` of an iterable is that of all
        processes. Checkpoints are written by each process: give each its own file.
    :param device: where batches are moved.
    :param progress: whether to show a bar with the bound, the rate and the time left.
    :raises ValueError: naming the argument that does not fit.
    """
    counts = {"steps": steps, "epochs": epochs, "score_every": score_every, "patience": patience}
    counts |= {"batch_size": batch_size, "size": size}
    _require_arguments(model, guide, counts, checkpoint, checkpoint_every, resume)
    workers = Workers(group)
    method = _method(model, guide, optim, loss, method, group)
    place = None if device is None else torch.device(device)
    alone = workers.num == getattr(method, "workers", workers).num == 1
    batches = as_batches(data, batch_size, size, place, int(torch.randint(2**62, ())), alone)
    _require_rows(guide, batches, batch_size, workers)
    # A family on sites is conditioned on the rows of its first call: all of them, where it takes no batches.
    whole = guide.on_sites and not guide.takes_batches
    first = batches.some(max(FIRST, batches.size or 0) if whole else FIRST)
    total = _total(steps, epochs, batches, workers.num)
    path = None if checkpoint is None else Path(checkpoint)
    scored = None
    if held_out is not None:
        shown = placed_arguments(held_out, "held_out", place)
        _require_alike(*shown, first)
        scored = HeldOut(*shown, score, score_every, patience)
    fitting = Fitting(model, guide, method, batches, first, total, workers, scored, stopping, path, history)
    if resume and path is not None and path.exists():
        fitting.resume(files.read(path))
    else:
        fitting.begin(warm_start, batch_size)
    reason = fitting.run(checkpoint_every, progress)
    now = fitting.now
    return FitResult(
        now.step,
        reason,
        fitting.iterates.losses,
        np.array(now.scored, dtype=int),
        np.array(now.scores),
        now.seconds,
        now.best or files.parameters_state(guide, model),
        fitting.iterates,
    )


def _require_rows(guide: AutoSparseGP, batches: Batches, batch_size: Optional[int], workers: Workers) -> None:
    if guide.on_sites and not guide.takes_batches and not batches.whole:
        raise ValueError(
            f"{'batch_size' if batch_size is not None else 'data'}: the guide's family needs all rows in each step; "
            "give all data in tensors and no batch_size, or take a family such as SVGP; or ComputationAware(..., "
            "batches=True), whose guide is first called on the rows that its actions act on, guide(x[rows], y[rows])"
        )
    if guide.on_sites and workers.num > 1:
        raise ValueError("group: the guide's family needs all rows in each process; take a family such as SVGP")


def _method(
    model: Callable,
    guide: AutoSparseGP,
    optim: Optional[PyroOptim],
    loss: Optional[ELBO],
    method: Union[SVI, ExpectationPropagation, None],
    group: Optional[Any],
) -> Union[SVI, ExpectationPropagation]:
    if method is not None:
        if optim is not None or loss is not None:
            raise ValueError("method has an optimiser and a loss of its own: leave optim and loss out")
        if not isinstance(method, (SVI, ExpectationPropagation)):
            raise ValueError(f"method must be an SVI or an ExpectationPropagation, got {type(method).__name__}")
        if method.model != model or poutine.unwrap(method.guide) is not guide:
            raise ValueError("method must be of the model and the guide that fit is given")
        if group is not None and isinstance(method, ExpectationPropagation):
            raise ValueError("group: give it to ExpectationPropagation(..., group=group), which shares its own steps")
        if group is not None and not isinstance(method.optim, SharedOptim):
            raise ValueError("group: method must be an SVI with SharedOptim(optim) for its optimiser")
        return method
    if optim is not None and not isinstance(optim, PyroOptim):
        raise ValueError(
            f"optim must be a Pyro optimiser, such as pyro.optim.Adam({{'lr': 0.01}}), got {type(optim).__name__}"
        )
    if loss is not None and not isinstance(loss, ELBO):
        raise ValueError(f"loss must be an ELBO, such as TraceQuadrature_ELBO(), got {type(loss).__name__}")
    optim = FallingAdam() if optim is None else optim
    if guide.by_expectation:
        if loss is not None:
            raise ValueError("loss: the guide's family is trained by expectation propagation, which has its own")
        return ExpectationPropagation(model, guide, optim, group=group)
    return SVI(model, guide, optim if group is None else SharedOptim(optim), loss or TraceQuadrature_ELBO())


def _require_arguments(
    model: Any, guide: Any, counts: dict[str, Any], checkpoint: Any, checkpoint_every: Any, resume: bool
) -> None:
    if not isinstance(guide, AutoSparseGP):
        raise ValueError(f"guide must be an AutoSparseGP, got {type(guide).__name__}")
    if model != guide.model:
        raise ValueError("model must be the guide's own; it was given another")
    steps, epochs = counts["steps"], counts["epochs"]
    if steps is not None and epochs is not None:
        raise ValueError(f"give steps or epochs, not both: got steps={steps} and epochs={epochs}")
    for argument, number in counts.items():
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 1:
            raise ValueError(f"{argument} must be a whole number of at least 1, got {number!r}")
    if not (isinstance(checkpoint_every, (int, float)) and checkpoint_every >= 0):
        raise ValueError(f"checkpoint_every must be a number of seconds of at least 0, got {checkpoint_every!r}")
    if resume and checkpoint is None:
        raise ValueError("resume=True goes on from the file checkpoint, and none is given")
    if checkpoint is not None and not Path(checkpoint).absolute().parent.is_dir():
        raise ValueError(f"checkpoint {os.fspath(checkpoint)!r} is in a folder that does not exist")
    if checkpoint is not None and Path(checkpoint).is_dir():
        raise ValueError(f"checkpoint {os.fspath(checkpoint)!r} is a folder: name a file in it")


def _require_alike(args: tuple, kwargs: dict[str, Any], batch: Batch) -> None:
    """Raise where tensors to be scored have other columns or another dtype than those of training."""
    pairs = [(f"argument {i}", *both) for i, both in enumerate(zip(args, batch.args))]
    pairs += [(f"argument {name!r}", kwargs[name], batch.kwargs[name]) for name in kwargs if name in batch.kwargs]
    for what, given, known in pairs:
        if not (isinstance(given, Tensor) and isinstance(known, Tensor)) or not known.dim():
            continue
        if given.dtype != known.dtype or given.shape[1:] != known.shape[1:] or given.dim() != known.dim():
            raise ValueError(
                f"held_out: {what} is {given.dtype} of shape {tuple(given.shape)}, in training {known.dtype} of shape "
                f"{tuple(known.shape)}: give it the same columns and dtype."
            )


def _total(steps: Optional[int], epochs: Optional[int], batches: Batches, among: int) -> int:
    if epochs is None:
        return 2000 if steps is None else steps
    each = batches.num_batches(among)
    if each is None:
        raise ValueError("epochs: data does not say how many batches it has; give size=N, or steps")
    return epochs * each
