"""A training loop over SVI or expectation propagation, with mini-batches, and checkpoints to go on from."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, SVI
from pyro.optim import PyroLRScheduler, PyroOptim
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..gaussians.steps import steppers
from ..guide import AutoSparseGP
from ..guide.check import Glance, check
from ..numerics.arguments import refuse, require_choice, require_count
from ..numerics.functions import if_known, setting
from ..numerics.processes import Workers, sharing
from ..program.data import TrainingData, signature_of
from ..program.draws import SHOWN
from .batches import Batch, LoadedBatches, TensorBatches, as_batches
from .checkpoints import read, write
from .expectation import ExpectationPropagation
from .jit import JitTraceQuadrature_ELBO
from .losses import fall_of, fell
from .optimisers import PLATEAU, FallingAdam, agree, falling, follow_rates, share_rates, shared_step
from .quadrature import TraceQuadrature_ELBO, own_guide

_STANDS = 0.1  # nats by which the loss still falls from a quarter of the steps to the next
_LOOK = 100  # steps between looks whether it stands
_STEPS = 2000  # at most, where none are given
_INTERRUPTED = "interrupted"
_LONG = 500  # steps, from which they are recorded
_CHECKED = 100  # steps, from which latents are checked at the end
_FIRST = 8192  # rows of the guide's first call, by which it places inducing inputs, where batches have fewer
_WHERE = ("losses", "seconds", "epoch", "place")  # a fit has got to


@dataclass(frozen=True)
class FitResult:
    """The result of a fit.

    :param steps: the number of steps, including steps before a resumption.
    :param reason: why it stopped.
    :param losses: the loss of each step, ``(steps,)``, in nats: minus the bound, or −log Z of expectation propagation.
    :param seconds: the time of the loop.
    :param notes: whether the loss still fell, what ``guide.check`` finds, and whether seeds matter; a line each.
    """

    steps: int
    reason: str
    losses: np.ndarray = field(repr=False)
    seconds: float
    notes: tuple[str, ...] = ()


def fit(
    model: Callable,
    guide: AutoSparseGP,
    data: Union[Tensor, np.ndarray, tuple, Mapping[str, Any], Iterable],
    *,
    steps: Optional[int] = None,
    epochs: Optional[int] = None,
    batch_size: Optional[int] = None,
    size: Optional[int] = None,
    optim: Optional[PyroOptim] = None,
    loss: Optional[ELBO] = None,
    jit: Union[bool, str] = "auto",
    method: Union[SVI, ExpectationPropagation, None] = None,
    stopping: Optional[Callable[[list[float]], bool]] = None,
    checkpoint: Union[str, Path, None] = None,
    checkpoint_every: float = 60.0,
    resume: bool = False,
    group: Optional[Any] = None,
    device: Union[str, torch.device, None] = None,
    progress: bool = True,
) -> FitResult:
    """Fit a guide, and the model's own parameters, to data.

    It loops over ``svi.step(*batch, size=N)`` or ``ep.step``, as your own loop would. Ctrl-C ends after the current
    step, writes the checkpoint and returns the result so far.

    >>> result = fit(model, guide, (x, y), batch_size=1024, steps=2000)  # doctest: +SKIP

    :param model: the guide's model. If its signature has ``size``, it gets the number of all rows, for
        ``pyro.plate("data", size or len(x), subsample=x)``. If it has ``indices``, it gets the indices of the rows.
    :param guide: an :class:`AutoSparseGP`; a fresh one sees up to 8,192 random rows at its first call.
    :param data: the model's arguments, a tuple or a dict of tensors, NumPy arrays or memory maps with a row for each
        datum. Or a ``DataLoader`` or another iterable of such batches, one at a time in memory.
    :param steps: the number of steps. By default the learning rate falls, and training ends, once the bound stops
        rising, and after 2,000 steps at most.
    :param epochs: passes over the data, instead of ``steps``.
    :param batch_size: rows per step, without replacement within an epoch; by default all rows.
    :param size: the number of all rows, summed over processes. Needed only if ``data`` have no length.
    :param optim: a Pyro optimiser. The schedule of a ``PyroLRScheduler`` advances after each step. The
        default is Adam with a falling step size, which is smaller for networks.
    :param loss: an ELBO for SVI; by default :class:`TraceQuadrature_ELBO`.
    :param jit: whether the default loss is :class:`JitTraceQuadrature_ELBO`, which records steps with their Adam and
        replays them. "auto" records fits of 500 steps or more, which save more than the second that it costs.
    :param method: an ``SVI`` or an :class:`ExpectationPropagation` of your own, instead of ``optim`` and ``loss``.
    :param stopping: a function of the losses so far that returns whether to stop; called after each step.
    :param checkpoint: a file for the state of the fit, replaced in one operation; its folder must exist.
    :param checkpoint_every: seconds between checkpoints; 0 writes one after each step.
    :param resume: whether to continue from ``checkpoint``, if that file exists. On a CPU, with the same arguments, the
        result equals an uninterrupted fit's, bit for bit.
    :param group: a ``torch.distributed`` process group, under ``torchrun``: each process gives its own rows. The
        result is that of one process with the batches joined. Give each process its own checkpoint file.
    :param device: the device that batches are moved to.
    :param progress: whether to show bars and print the notes.
    :raises ValueError: naming the argument that does not fit.
    """
    own = own_guide(model, guide, "fit")
    faults = {
        "fit takes the guide itself: give SVI one under handlers, fit(..., method=SVI(...))": own is not guide,
        "resume=True continues from the file checkpoint, and none is given": resume and checkpoint is None,
        f"give steps or epochs, not both: got steps={steps} and epochs={epochs}": None not in (steps, epochs),
    }
    refuse(faults)
    if_known(require_count, steps, "steps")
    if_known(require_count, epochs, "epochs")
    if_known(require_count, batch_size, "batch_size")
    require_choice(jit, "fit's jit", "auto", True, False)
    batches = as_batches(data, batch_size, size, device, int(torch.randint(2**62, ())))
    total = (_STEPS if steps is None else steps) if epochs is None else epochs * len(batches)
    kinds: dict[Any, type[ELBO]] = {True: JitTraceQuadrature_ELBO, False: TraceQuadrature_ELBO}
    kinds["auto"] = kinds[total >= _LONG]
    method = _method(guide, optim, loss, method, group, kinds[jit])
    path = if_known(Path, checkpoint)
    settles = steps is None and epochs is None and stopping is None
    loop = _Loop(model, guide, method, batches, total, Workers(group), stopping, path, settles)
    with setting(SHOWN, progress):
        if resume and path is not None and path.exists():
            loop.resume(path)
        else:
            loop.begin()
        reason = loop.run(checkpoint_every)
        notes = [] if reason == _INTERRUPTED else loop.notes()  # who interrupts does not want to wait for a check
    for line in notes if progress else ():
        tqdm.write(line)
    return FitResult(len(loop.losses), reason, np.array(loop.losses), loop.seconds, tuple(notes))


def _method(
    guide: AutoSparseGP, optim: Optional[PyroOptim], loss: Optional[ELBO], method: Any, group: object, kind: type[ELBO]
) -> Union[SVI, ExpectationPropagation]:
    """What takes the steps."""
    if method is None:
        optim = FallingAdam() if optim is None else optim
        if not guide.kind.has_bound:
            return ExpectationPropagation(guide.model, guide, optim, group=group)
        loss = loss or kind()
        if isinstance(loss, JitTraceQuadrature_ELBO) and isinstance(optim, FallingAdam):
            loss.optim = optim
        return SVI(guide.model, guide, optim, loss)
    if (optim, loss) != (None, None):
        raise ValueError("method has an optimiser and a loss of its own: leave optim and loss out")
    if own_guide(method.model, method.guide, "fit's method") is not guide:
        raise ValueError("method must be of the model and the guide that fit is given")
    return method


@dataclass
class _Loop:
    """A fit: one step of the method after the other until there is a reason to stop."""

    model: Callable
    guide: AutoSparseGP
    method: Union[SVI, ExpectationPropagation]
    batches: Union[TensorBatches, LoadedBatches]
    total: int
    workers: Workers
    stopping: Optional[Callable[[list[float]], bool]]
    path: Optional[Path]
    settles: bool  # whether the number of steps follows the bound
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    epoch: int = 0
    place: int = 0

    def __post_init__(self) -> None:
        guide, batches, model = self.guide, self.batches, self.model
        if not guide.kind.takes_batches(guide) and (not batches.whole or self.workers.num > 1):
            raise ValueError(
                "batch_size, data and group: the guide's family needs all rows in each step; give all data in tensors, "
                "or take SVGP; or ComputationAware(..., batches=True), first called on its rows, guide(x[r], y[r])"
            )
        self.optim, self.ended = self.method.optim, f"all {self.total} steps were taken"
        self.takes = signature_of(model).parameters
        self.size = batches.size
        if self.workers.num > 1 and batches.num:
            self.size = int(self.workers.sum(torch.tensor(float(batches.num), dtype=torch.float64))[0])
        if "size" in self.takes and self.size is None:
            raise ValueError("size: the model takes the number of all rows, and data does not say it; give size=N")

    def call(self, batch: Batch) -> tuple[tuple, dict[str, Any]]:
        """The model's arguments."""
        more, left = {"size": self.size, "indices": batch.indices}, list(self.takes)[len(batch.args) :]
        return batch.args, {n: value for n, value in more.items() if n in left and value is not None} | batch.kwargs

    def _first(self) -> Batch:
        # A family on sites is conditioned on the rows of its first call: all of them, where it takes no batches. Others
        # tell by as many rows as a step's whether a plate scales these up.
        on_all = not self.guide.kind.takes_batches(self.guide)
        return self.batches.first(max(_FIRST, (self.batches.size if on_all else self.batches.batch_size) or 0))

    def begin(self) -> None:
        """A guide's first call, on rows that stand for all."""
        (args, kwargs), batches = self.call(self._first()), self.batches
        with poutine.block():
            self.guide.prepare(*args, **kwargs)
            if batches.num > _FIRST and self.guide.corrected_modules():
                # Their diagonal is relative to all training inputs: test_a_deep_basis_has_seen_all_rows.
                args, kwargs = self.call(batches.first(batches.num))
                self.guide(*args, **kwargs)
        agree(self.guide, self.workers)

    # Checkpoints.

    def _mark(self) -> dict[str, Any]:
        """What a checkpoint and the fit that goes on from it have alike."""
        name, batches = getattr(self.optim.pt_optim_constructor, "__name__", ""), self.batches
        return {"optimiser": name, "rows": batches.size, "batch_size": batches.batch_size}

    def keep(self) -> None:
        """Write the checkpoint, if there is a file for it: all that this fit is."""
        if self.path is None:
            return
        guide, model, store = self.guide, self.model, pyro.get_param_store().get_state()
        own, cuda = f"{guide._pyro_name}.", torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        params = {name: value.detach() for name, value in store["params"].items() if not name.startswith(own)}
        state = {
            "random": (pyro.util.get_rng_state(), cuda),
            "guide": guide.state_dict(),
            "parameters": {name: (value, store["constraints"][name]) for name, value in params.items()},
            "model": model.state_dict() if isinstance(model, nn.Module) else None,
            # A guide's name is another in each process: its place is taken by "".
            "optim": {str(name).replace(own, ".", 1): value for name, value in self.optim.get_state().items()},
            "expectation": getattr(self.method, "progress", None),
            "sites": {name: sites.progress for name, sites in guide.kept_sites.items()},
            "share": max((module.share for module in steppers(guide)), default=1.0),
            "seed": self.batches.seed,
            "mark": self._mark(),
        }
        write(state | {name: getattr(self, name) for name in _WHERE}, self.path)

    def resume(self, path: Path) -> None:
        """Go on from the checkpoint."""
        state, guide, optim = read(path, self._mark()), self.guide, self.optim
        vars(self).update({name: state[name] for name in _WHERE})
        self.batches.seed = state["seed"]
        # The guide's parameters first, which a call then gives to Pyro's store under the names that the optimiser asks
        # for; by its first call the model registers what is to be loaded.
        guide.load_state_dict(state["guide"])
        guide.core.own = {}  # which are loaded below
        args, kwargs = self.call(self._first())
        with poutine.block(), torch.no_grad():
            guide.prepare(*args, **kwargs)
        guide.core.data = guide.core.data or TrainingData(self.model, args, kwargs)
        if isinstance(self.model, nn.Module):
            self.model.load_state_dict(state["model"])
        store, own = pyro.get_param_store(), f"{guide._pyro_name}."
        for name, (value, constraint) in state["parameters"].items():
            known: Any = store.setdefault(name, torch.distributions.transform_to(constraint)(value), constraint)
            # In place: a network's own parameters are in the store.
            known.unconstrained().data.copy_(value)
        optim.optim_objs.clear()
        optim.grad_clip.clear()
        optim.set_state({own + n[1:] if n.startswith(".") else n: value for n, value in state["optim"].items()})
        if isinstance(self.method, ExpectationPropagation):
            self.method.progress = state["expectation"]
        for name, sites in guide.kept_sites.items():
            sites.progress |= {key: value for key, value in state["sites"][name].items() if key in sites.progress}
        share_rates(guide, state.get("share", 1.0))  # older files have none
        pyro.util.set_rng_state(state["random"][0])
        torch.cuda.set_rng_state_all(state["random"][1])  # of no device, if none was in use

    # Steps.

    def run(self, checkpoint_every: float) -> str:
        """Take the steps; why it stopped."""
        began, written, why = time.monotonic() - self.seconds, time.monotonic(), ""
        bar = tqdm(total=self.total, initial=len(self.losses), disable=not SHOWN.get(), unit="step", desc="fit")
        try:
            with _interrupts() as interrupts, bar:
                stream = self._stream()
                for step in range(len(self.losses) + 1):  # of a fit that is resumed
                    self._settle(step)
                self._set_rates()
                while len(self.losses) < self.total and not why:
                    self.losses.append(self._step(next(stream)))
                    self._settle(len(self.losses))
                    bar.total = self.total
                    # Before the checkpoint, which has them for the next step: test_resumed_as_if_never_cut_off.
                    self._set_rates()
                    self.seconds = time.monotonic() - began
                    bar.update()
                    bar.set_postfix_str(f"loss {np.mean(self.losses[-50:]):.5g}", refresh=False)
                    why = self._why_to_stop(interrupts)
                    if why or time.monotonic() - written >= checkpoint_every or len(self.losses) == self.total:
                        self.keep()
                        written = time.monotonic()
        finally:
            share_rates(self.guide, 1.0)  # natural steps' own rates after it, whatever ended the steps
        return why or self.ended

    def _why_to_stop(self, interrupts: list[int]) -> str:
        """Why no step is to follow, if one could."""
        says_so = self.stopping is not None and self.stopping(self.losses)
        whys: dict[str, Any] = {_INTERRUPTED: interrupts, "the stopping rule says so": says_so}
        # What stops one process stops all, which else would wait for its gradients for ever.
        of_any = self.workers.largest(self.guide.like.new_tensor(float(any(whys.values()))))
        return next((why for why, applies in {**whys, "another process stopped": of_any}.items() if applies), "")

    def _settle(self, step: int) -> None:
        """Where the bound stands after so many steps, have rates fall from here, to the end of training."""
        if self.settles and step % _LOOK == 0 and 3 * _LOOK <= step <= PLATEAU * self.total:
            seen = self.losses[step - step // 4 * 2 : step]
            if fall_of(np.array(seen).reshape(2, -1)) <= _STANDS:
                self.total, self.ended = math.ceil(step / PLATEAU), "the bound stands"

    def notes(self) -> list[str]:
        """What still moves, and what other seeds may end at, a line each."""
        last, found = self.total // 10, list[str]()
        if len(self.losses) >= 2 * last > 2:
            found += fell(np.array(self.losses[-2 * last :]).reshape(2, last), self.size or 0)
        if self.batches.whole and self.workers.num == 1 and self.total >= _CHECKED:
            found += check(self.guide, *self.call(next(self.batches.epoch(0))), Glance)
        if inner := self.guide.facts.inner:
            found.append(
                f"inner layers ({', '.join(inner)}) have several modes: fits from other seeds end at other losses. Fit "
                "with several seeds, and keep the guide with the highest bound."
            )
        return found

    def _stream(self) -> Iterator[Batch]:
        """Batches without end, from the place that the fit has reached."""
        while True:
            for batch in self.batches.epoch(self.epoch, self.place):
                # Before its step: a checkpoint that is written after the step goes on with the next batch.
                self.place += 1
                yield batch
            self.epoch, self.place = self.epoch + 1, 0

    def _set_rates(self) -> None:
        if isinstance(loss := getattr(self.method, "loss", None), JitTraceQuadrature_ELBO):
            loss.compares = len(self.losses) + 1 == self.total
        if isinstance(self.optim, FallingAdam):
            self.optim.at(len(self.losses), self.total)
            # At a rate ρ, q's mean is √(N/B · ρ/2) of its deviations beside the optimum.
            if not self.batches.whole:
                share_rates(self.guide, falling(len(self.losses), self.total))
        else:
            follow_rates(self.guide, self.optim)

    def _step(self, batch: Batch) -> float:
        """One step of the method; the loss of all processes' batch."""
        args, kwargs = self.call(batch)
        if isinstance(self.method, ExpectationPropagation):
            value = self.method.step(*args, **kwargs | {"indices": batch.indices})
        elif self.workers.num == 1:
            value = self.method.step(*args, **kwargs)
        else:
            with sharing(self.workers.group, batch.weight):
                value = shared_step(self.method, *args, **kwargs)
        if not math.isfinite(value):
            raise ValueError(
                f"the loss is {value} at step {len(self.losses)}: training has failed there. Look for NaN or infinite "
                "data, take a smaller learning rate, or work in float64."
            )
        if isinstance(self.optim, PyroLRScheduler):
            schedules = self.optim.optim_objs.values()
            plateau = any(isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) for one in schedules)
            self.optim.step(*([value] if plateau else []))
        return value


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A Ctrl-C is noted in this list, so that no step is cut in two; a second one raises KeyboardInterrupt at once."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
