"""The evidence lower bound by steps that are recorded, and the guards beside these."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from traceback import extract_tb
from typing import Any, Optional
from weakref import WeakKeyDictionary

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from ..guide import AutoSparseGP
from ..numerics.decisions import Decisions, deciding
from ..numerics.processes import is_shared
from ..program.data import walk
from ..program.names import Named, Same
from ..program.traces import RandomState
from .optimisers import FallingAdam
from .quadrature import TraceQuadrature_ELBO, own_guide
from .record import Recording, record

_AFTER = 3  # steps of one kind, of which the last is recorded
_MOST = 8  # recordings of a guide, those that were given up among them, and changes by its program
_REMEMBERED = 64  # kinds of steps
_PATIENCE = 8  # replays that end as plain steps, and are more than half of all, before a recording is given up
_CURE = "Give what changes as an argument, in a tensor"
# Of frames in these files a message names none.
_LIBRARIES = (*torch.__path__, *pyro.__path__, str(Path(__file__).parents[1]))


class JitTraceQuadrature_ELBO(TraceQuadrature_ELBO):
    """:class:`~pyro_sparsegp.TraceQuadrature_ELBO` whose steps are recorded as graphs and replayed.

    >>> svi = SVI(model, guide, optim, JitTraceQuadrature_ELBO())  # doctest: +SKIP

    The third step of a kind is recorded: the loss, its gradients and the natural steps, without the program's Python.
    Replays have the losses of plain steps, to the last bit, in about half of the time. Each combination of
    shapes, dtypes, devices, modes of training, arguments that are no tensors, and of what the program's functions name
    (numbers, strings and objects in closures, globals and attributes) is a recording; there are at most eight. Where a
    factorisation fails or the loss is not finite, the plain step is taken.

    A program that changes what it names, such as a count of its calls, is not recorded, nor one that asks an iterator
    or reads a tensor's numbers, by ``if f.max() > 1`` or ``x.item()``: a warning says where, and steps are plain. For
    what names do not show, steps 1, 2, 4, 8, … after a recording, and the last one of ``fit``, are taken plainly, too,
    and compared. If the program has changed, all further steps are plain, and a warning says so.

    :param num_nodes: K, the number of quadrature nodes per axis.
    :param num_particles: the number of draws of other latents to average over.
    :param compile: whether graphs are compiled by PyTorch's inductor. On a CPU this takes a C++ compiler, and ten to
        thirty seconds. Losses are then equal up to rounding. If a compiled step gives other numbers than the graph, a
        warning says so, and the graph is replayed.
    """

    def __init__(self, num_nodes: int = 20, num_particles: int = 1, *, compile: bool = False, **kwargs: object) -> None:
        super().__init__(num_nodes, num_particles, **kwargs)
        self.compile = compile
        self.optim: Optional[FallingAdam] = None  # whose steps are recorded, too: fit's
        self.compares = False  # whether the next step is compared, as fit's last
        self._recordings: WeakKeyDictionary[AutoSparseGP, Recordings] = WeakKeyDictionary()

    def loss_and_grads(self, model: Callable, guide: Callable, *args: object, **kwargs: object) -> float:
        """Minus the bound, in nats; its gradient is added to the parameters'."""
        step = Step(self, own_guide(model, guide, "JitTraceQuadrature_ELBO"), guide, args, kwargs)
        recordings = self._recordings.setdefault(step.guide, Recordings(self.compile))
        return step.plain() if recordings.why or not step.can_be_recorded() else recordings.step(step)


@dataclass
class Step:
    """A call of an objective for a loss and gradients."""

    elbo: JitTraceQuadrature_ELBO
    guide: AutoSparseGP
    wrapped: Any  # the guide within handlers
    args: tuple
    kwargs: dict[str, Any]

    def plain(self) -> float:
        """The loss of a plain step."""
        return super(JitTraceQuadrature_ELBO, self.elbo).loss_and_grads(
            self.guide.model, self.wrapped, *self.args, **self.kwargs
        )

    def loss(self) -> Tensor:
        """As a tensor."""
        return self.elbo._minus_bound(self.guide, self.wrapped, self.args, self.kwargs)

    def can_be_recorded(self) -> bool:
        """Whether steps on such data, under these handlers and in these modes, may be recorded."""
        known, guide, data = self.elbo._known.get(self.guide), self.guide, self.guide.core.data
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")
        # What other handlers do is not known; those of SVI.step note parameters.
        others = [each for each in _PYRO_STACK if not getattr(each, "param_only", False)]
        # What belongs to rows belongs to those of training: plain steps compare others with them.
        is_known = data is not None and not data.overwritten and guide.relation(self.args, self.kwargs).call is data
        is_plain = any(modes) or others or is_shared() or not torch.is_grad_enabled()
        return known is not None and known.is_warm and (is_known or not guide.is_about_rows) and not is_plain

    def key(self, named: Named) -> Any:
        """What the graph depends on but tensors' numbers."""
        places: dict[int, int] = {}  # a tensor may stand at several

        def kind(leaf: Tensor) -> Any:
            place = places.setdefault(id(leaf), len(places))
            return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, place

        core, plan, modes = self.guide.core, self.guide.core.plan, (self.guide.training, torch.get_default_dtype())
        parts = tuple((path, kind(leaf)) for path, leaf in self.leaves if isinstance(leaf, Tensor))
        return parts, modes, Same(self.wrapped), Same(core), Same(plan), named.key, getattr(plan, "refused", None)

    @cached_property
    def leaves(self) -> list[tuple[tuple, Any]]:
        """The arguments, by their places."""
        return list(walk((self.args, self.kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for _, leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def others(self) -> dict[tuple, Any]:
        """The arguments that are no tensors."""
        return {path: leaf for path, leaf in self.leaves if not isinstance(leaf, Tensor)}


@dataclass
class Recordings:
    """The recordings of a guide's steps, by their keys and the way that their numbers decide."""

    compile: bool
    found: dict[Any, Recording] = field(default_factory=dict)
    seen: dict[Any, int] = field(default_factory=dict)
    made: int = 0  # how many recordings there were
    changes: int = 0  # how many plain steps have changed what the program names
    named: Any = None  # what the program named before this step
    way: tuple[bool, ...] = ()  # of the last plain step
    why: str = ""  # steps are plain from now on

    def step(self, step: Step) -> float:
        """Take a step: the loss."""
        if self.named is None or not self.named.hold(step.others):
            self.named = Named(step.guide.model, step.others)
        key = step.key(self.named), self.way
        recording = self.found.get(key)
        if recording is None or not recording.fits():
            self.found.pop(key, None)
            return self._first(step, key)
        state = RandomState(step.guide.like)
        # Looks at numbers that steps only use are at powers of two, too.
        looks = range(step.guide.core.looks + 1, step.guide.core.looks + 1 + recording.looks)
        is_due = step.elbo.compares or any(number & (number - 1) == 0 for number in (recording.steps + 1, *looks))
        limit = step.elbo._known[step.guide].most if recording.share > 0.999 else math.inf
        replay = recording.run(step.tensors, limit, not is_due)
        if is_due:
            return self._compared(step, recording, replay, state)
        if replay.failed:
            state.restore()
            if recording.failures > max(_PATIENCE, recording.steps / 2):  # most of its replays fail
                self.found.pop(key)
                self.seen[key] = -_PATIENCE * recording.steps
            return self._plain(step)[0]
        recording.take(replay)
        # An optimiser is given the parameters that it sees.
        sites = {} if recording.update.params else recording.sites
        for handler, (name, site) in product(_PYRO_STACK, sites.items()):
            handler.trace.add_node(name, **site)  # type: ignore[attr-defined]
        with poutine.block():
            step.elbo._note(replay.loss, step.guide, step.wrapped, step.args, step.kwargs)
        return replay.loss

    def _plain(self, step: Step) -> tuple[float, Mapping[str, Any]]:
        """A plain step, which shows the next one's way: its loss, and the sites of parameters."""
        with poutine.trace(param_only=True) as capture, deciding(decisions := Decisions()):
            loss = step.plain()
        self.way = tuple(decisions.way)
        return loss, capture.trace.nodes

    def _first(self, step: Step, key: Any) -> float:
        """A plain step, which is recorded if it is the third of its kind."""
        if len(self.seen) > _REMEMBERED:
            self.seen.clear()
        self.seen[key] = self.seen.get(key, 0) + 1
        loss, sites = self._plain(step)
        has_changed = self._has_changed(step)
        if self.seen[key] < _AFTER or self.made >= _MOST or self.way != key[1] or has_changed:
            return loss
        state = RandomState(step.guide.like)
        held = [(each, each.clone()) for each in self.named.tensors]
        try:
            self.named.require_seen()
            how = self.compile, step.elbo.optim
            self.found[key] = record(step.loss, step.guide, sites, step.tensors, *how)
            self.made += 1
        except Exception as error:  # of whatever the program does
            with torch.no_grad():
                # Versions do not count what batch_norm writes.
                moved = [pair for pair in held if not torch.equal(*(each.nan_to_num() for each in pair))]
                _ = [each.copy_(before) for each, before in moved]
            self._end(f"a step cannot be recorded: {_place_of(error)}")
        finally:
            state.restore()
        return loss

    def _compared(self, step: Step, recording: Recording, replay: Any, state: RandomState) -> float:
        """A plain step from the same random state, to which the recorded one has to be equal."""
        after, leaves = RandomState(step.guide.like), recording.leaves
        state.restore()
        before = [0.0 if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        loss, _ = self._plain(step)
        if self._has_changed(step) or replay.failed:
            return loss
        pairs = list(zip(replay.state, (slot.value for slot in recording.moving)))
        pairs += [(old + new, p.grad) for new, old, p in zip(replay.grads, before, leaves)]
        rounding = torch.finfo(step.guide.like.dtype).eps ** 0.5
        is_near = abs(replay.loss - loss) <= rounding * (1 + abs(loss))
        if after.has_moved or not is_near or not all(_alike(*pair, rounding) for pair in pairs):
            self._end(
                f"a recorded step has the loss {replay.loss:.8g}, the plain one {loss:.8g}, or their gradients or "
                "random numbers differ: the model's Python has changed since it was recorded"
            )
        return loss

    def _has_changed(self, step: Step) -> bool:
        """Whether the program has changed what it names, as a replay would not. If this goes on, recording ends."""
        if self.named.hold(step.others):
            return False
        self.changes += 1
        if self.changes > _MOST:  # more than a cache is filled
            names = ", ".join(Named(step.guide.model, step.others).changed(self.named)[:3])
            self._end(f"a step cannot be recorded: when it is called, the model changes {names}. {_CURE}")
        return True

    def _end(self, why: str) -> None:
        self.why = why
        self.found.clear()
        warnings.warn(f"JitTraceQuadrature_ELBO: {why}. All further steps are plain ones.", UserWarning, stacklevel=6)


def _alike(one: Tensor, other: Any, share: float) -> bool:
    """Whether two results are equal up to rounding."""
    alike = other is not None and one.shape == other.shape
    return alike and bool((1.0 * (one - other)).detach().norm() <= share * (1 + (1.0 * other).detach().norm()))


def _place_of(error: BaseException) -> str:
    """Why a program could not be recorded, and the line of it if one is known."""
    what = str(error).partition(" - erroring")[0].partition("\n")[0]
    if "aten._local_scalar_dense" in what:
        what = "the model reads a tensor's number"
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    return what + "".join(f", in {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames[-1:])
