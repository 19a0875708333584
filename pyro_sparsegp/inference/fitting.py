"""The loop of a fit: where it is, when it stops, and what it takes to go on."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from pyro import poutine
from pyro.infer import SVI
from tqdm.auto import tqdm

from ..gaussians.steps import steppers
from ..guide import AutoSparseGP
from . import checkpoint as files
from .batches import Batch, Batches, ends_of, require_same, rows_named, warn_of_others
from .distributed import Workers, agree
from .expectation import ExpectationPropagation
from .feeding import Feed, draws_rows, require_scaled, show_all_rows
from .history import Iterates
from .interrupts import Interrupts
from .recipe import FallingAdam, share
from .warm_start import pays, warm

__all__ = ["Fitting", "HeldOut", "Progress"]


@dataclass
class Progress:
    """Where a fit is."""

    step: int = 0
    seconds: float = 0.0
    scored: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best: Optional[dict[str, Any]] = None
    far: bool = False  # whether hyperparameters may have been far off at first


@dataclass(frozen=True)
class HeldOut:
    """Data to score as training goes on.

    :param args: the model's arguments, with ``kwargs``.
    :param score: ``score(model, guide, *args, **kwargs)``.
    :param every: steps from one score to the next.
    :param patience: scores without a new best, after which training stops.
    """

    args: tuple
    kwargs: dict[str, Any]
    score: Callable[..., float]
    every: int
    patience: int

    def get_state(self) -> dict[str, Any]:
        """What these data are known by."""
        rows = [len(value) for value in (*self.args, *self.kwargs.values()) if getattr(value, "shape", ())]
        return {"num": rows[0] if rows else 0, "ends": ends_of(self.args, self.kwargs, "held_out")}

    def require_same(self, state: dict[str, Any]) -> None:
        """Raise, or warn, where :meth:`get_state` was of other data, whose scores would be one history with these."""
        now = self.get_state()
        require_same("held_out", state["num"], now["num"])
        warn_of_others(
            state["ends"],
            now["ends"],
            "scores so far, by which the best state is chosen, are those of the first: resume with the held_out that "
            "the fit began with",
        )


class Fitting:
    """A fit: one step after the other until there is a reason to stop.

    :param method: takes a step.
    :param batches: of the data.
    :param first: rows for the guide's first call.
    :param total: how many steps.
    :param held_out: data to score, if any.
    :param stopping: whether the iterates say to stop.
    :param path: of the checkpoint.
    """

    def __init__(
        self,
        model: Callable,
        guide: AutoSparseGP,
        method: Union[SVI, ExpectationPropagation],
        batches: Batches,
        first: Batch,
        total: int,
        workers: Workers,
        held_out: Optional[HeldOut],
        stopping: Optional[Callable[[Iterates], bool]],
        path: Optional[Path],
        history: Any,
    ) -> None:
        self.model, self.guide, self.method, self.batches, self.total = model, guide, method, batches, total
        self.workers, self.held_out, self.stopping, self.path = workers, held_out, stopping, path
        self.first = first
        self.feed = Feed(model, batches, method, workers)
        self.now, self.iterates = Progress(), Iterates(guide, history)
        optim = getattr(method.optim, "optim", method.optim)
        self.recipe = optim if isinstance(optim, FallingAdam) else None
        self._by_parts = not batches.whole  # whether steps are on some of the rows

    def begin(self, warm_start: Optional[bool], batch_size: Optional[int]) -> None:
        """A guide's first call on the first rows, and its warm start."""
        guide, first, fresh = self.guide, self.first, self.guide.structure is None
        args, kwargs = self.feed.call(first)
        with poutine.block(), rows_named(first):
            guide.prepare(*args, **kwargs)
        rows = first.num
        if not self.batches.whole:
            show_all_rows(guide, self.batches, self.feed)
            few = self.batches.some(batch_size or 1)
            with rows_named(few):
                require_scaled(guide, self.feed.call(few), few, self.feed.size)
            rows = few.num
        if warm_start is None:
            warm_start = pays(guide, rows, first.num)
        if warm_start and fresh and isinstance(self.method, SVI):
            fresh = not warm(self.model, guide, first, self.feed.takes, self.feed.size)
        self.now.far = fresh
        if self.workers.num > 1:
            _require_shared(guide)
            agree(guide, self.workers.group)

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        args, kwargs = self.feed.call(self.first)
        files.prepare(saved, self.guide, args, kwargs)
        try:
            self._restore(saved)
        except KeyError as error:
            raise ValueError(
                f"checkpoint: it is of a fit with another kind of data or optimiser, and has no {error}; give fit what "
                "it began with."
            ) from error

    def _restore(self, saved: dict[str, Any]) -> None:
        self.now = Progress(**saved["progress"])
        if self.held_out is None:  # else a state that was the best while there was one would be put back at the end
            self.now.scored, self.now.scores, self.now.best = [], [], None
        elif saved.get("held_out") is not None:  # checkpoints of before do not say
            self.held_out.require_same(saved["held_out"])
        self.iterates.set_state(saved["iterates"])
        _set_rule(self.stopping, saved["stopping"])
        self.batches.set_state(saved["batches"])
        files.restore(saved, self.guide, self.model, self.method)

    def keep(self) -> None:
        """Write the checkpoint."""
        if self.path is None:
            return
        state = files.snapshot(self.guide, self.model, self.method)
        state |= {
            "progress": vars(self.now),
            "iterates": self.iterates.get_state(),
            "stopping": _rule_state(self.stopping),
            "batches": self.batches.get_state(),
            "held_out": None if self.held_out is None else self.held_out.get_state(),
        }
        files.write(state, self.path)

    def run(self, checkpoint_every: float, progress: bool) -> str:
        """Take the steps.

        :returns: why it stopped.
        """
        now, reason = self.now, ""
        began, written, kept = time.monotonic() - now.seconds, time.monotonic(), now.step
        bar = tqdm(total=self.total, initial=now.step, disable=not progress, unit="step", desc="fit")
        with Interrupts() as interrupts, bar, self._rates():
            while not reason:
                reason = self._step(bar)
                taken = not reason
                if taken:
                    reason = self._why_stop(interrupts)
                now.seconds = time.monotonic() - began
                if taken and (reason or time.monotonic() - written >= checkpoint_every):
                    self.keep()
                    written, kept = time.monotonic(), now.step
            if now.step > kept:
                self.keep()
            if interrupts.signal == signal.SIGTERM:
                raise SystemExit(128 + signal.SIGTERM)
        if self.held_out is not None and not interrupts.signal and (not now.scored or now.scored[-1] != now.step):
            self._score(self.held_out)
        if now.best is not None:
            files.load_parameters(now.best, self.guide, self.model)
        return reason

    def _step(self, bar: Any) -> str:
        """Take a step; or why there is none."""
        now = self.now
        if now.step >= self.total:
            return f"all {self.total} steps were taken"
        batch = self.batches.next()
        if batch is None:
            return f"the data came to their end after {now.step} steps"
        with rows_named(batch):
            value = self.feed.step(batch)
        now.step += 1
        self.iterates.record(value)
        self._set_rate()
        bar.update()
        bar.set_postfix_str(f"{self.iterates.objective} {self.iterates.recent():.5g}", refresh=False)
        return ""

    @contextmanager
    def _rates(self) -> Iterator[None]:
        """The steps' rates, and natural steps' own again after them, whatever ends them."""
        alone = self.workers.num == 1  # else each has a part of what comes whole
        if alone and self.recipe is not None and not self._by_parts and steppers(self.guide):
            self._by_parts = draws_rows(self.guide, self.feed.call(self.first))
        self._set_rate()
        try:
            yield
        finally:
            self._share(1.0)

    def _set_rate(self) -> None:
        if self.recipe is None:
            return
        self.recipe.at(self.now.step, self.total, self.now.far)
        if self._by_parts:  # q, too, is beside the optimum by the noise of its last batches
            self._share(share(self.now.step, self.total))

    def _share(self, part: float) -> None:
        for module in steppers(self.guide):
            module.settle()  # the step that is due, at its own rate
            module.share = part

    def _why_stop(self, interrupts: Interrupts) -> str:
        """Why the step that was taken is the last, if it is."""
        reason, held_out = "", self.held_out
        if held_out is not None and self.now.step % held_out.every == 0 and self._score(held_out):
            reason = f"the held-out score has not risen for {held_out.patience} scores"
        if self.stopping is not None and self.stopping(self.iterates):
            reason = getattr(self.stopping, "reason", None) or "the stopping rule says so"
        if interrupts.signal is not None:
            reason = f"interrupted by {signal.Signals(interrupts.signal).name}"
        if self.workers.num > 1:  # all of them, or none
            reason = _common(self.workers, self.guide, reason)
        return reason

    def _score(self, held_out: HeldOut) -> bool:
        """Score the held-out data; whether patience has come to its end."""
        now = self.now
        found = held_out.score(self.model, self.guide, *held_out.args, **held_out.kwargs)
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"score must return a number, got {type(found).__name__}: {error}") from error
        if not math.isfinite(value):
            warnings.warn(
                f"held_out: its score is {value} at step {now.step}, where no state is better than another; look for "
                "NaN in it, or rows to which the model gives no density.",
                stacklevel=2,
            )
        if not now.scores or value > max(now.scores):
            now.best = files.parameters_state(self.guide, self.model)
        now.scored.append(now.step)
        now.scores.append(value)
        return len(now.scores) - 1 - int(np.argmax(now.scores)) >= held_out.patience


def _require_shared(guide: AutoSparseGP) -> None:
    """Raise for latents that are one process's rows' own."""
    assert guide.structure is not None
    local = [name for name, latent in guide.structure.latents.items() if set(latent["plates"])]
    if local:
        raise ValueError(
            f"group: latent site {local[0]!r} stands in a plate: processes share parameters, which would mix its values"
        )


def _common(workers: Workers, guide: AutoSparseGP, reason: str) -> str:
    """A reason to stop that any process has, for all."""
    flag = workers.largest(guide.like.new_tensor(float(bool(reason))))
    return reason or ("another process stopped" if float(flag) else "")


def _rule_state(rule: Any) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, type(None))
    return {key: value for key, value in getattr(rule, "__dict__", {}).items() if isinstance(value, plain)}


def _set_rule(rule: Any, state: dict[str, Any]) -> None:
    if hasattr(rule, "__dict__"):
        vars(rule).update(state)
