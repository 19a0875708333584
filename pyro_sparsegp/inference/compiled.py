"""Steps of training without Python: traced once, forward and backward, and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional, Union

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import block_messengers
from pyro.poutine.runtime import am_i_wrapped
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor

from ..gaussians.steps import steppers
from ..guide import AutoSparseGP
from ..numerics.linalg import flags_kept
from ..program.registration import unregistered
from ..program.traces import RandomState
from ..warned import Warned, warn_once
from .captured import Captured
from .places import Place, Places
from .tracing import CannotTraceError, Graph, flattened, traced

__all__ = ["BACKENDS", "CompiledSteps"]

BACKENDS = (False, True, "inductor", "cudagraph")
_MOST_TRACES = 16  # for one guide
_MOST_KINDS = 64  # of arguments that are told apart
_MOST_FAILURES = 3  # replays in a row that had to be taken back
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
_AGREE = {torch.float64: 1e-6, torch.float32: 3e-3}  # relative, of a loss that is the same

Loss = Callable[..., Tensor]
Backend = Union[bool, str]


class CompiledSteps:
    r"""The steps of one guide under one objective, each kind of arguments traced once.

    A kind is what a step's arguments are but for the numbers in their tensors. Its first step runs as it is: it
    initialises, checks and warns. So does its second, if it brings other rows, of which it is asked whether a plate
    scales them up. The next is traced, later ones are replayed. A replay is taken back, and the step run as it is with
    the same random numbers, where a Cholesky factorisation failed or something is not finite: so errors, escalated
    jitters and warnings are those of a step that is not compiled. The 1st, 2nd, 4th, 8th, … replay is compared with
    such a step, too.

    :param loss: the objective as a tensor, of (model, guide, \*args).
    :param backend: what runs the trace: ``True``, ``"inductor"`` or ``"cudagraph"``.
    """

    def __init__(self, loss: Loss, backend: Backend) -> None:
        self._loss, self._backend = loss, backend
        self._replays: dict[Any, _Replay] = {}
        self._met: set[Any] = set()
        self._asked: set[Any] = set()
        self._traces = self._checked = self._failures = 0
        self._off = False

    def step(
        self, model: Callable, guide: Any, bare: AutoSparseGP, args: tuple, kwargs: dict[str, Any]
    ) -> Optional[float]:
        """The loss, its gradient added to the parameters'; ``None`` if this step is to run as it is.

        :param guide: as it was given; ``bare`` is what is in its wrappers.
        """
        if self._off:
            return None
        try:
            given, kind = _kind(bare, args, kwargs)
            _require_plain_step(guide, bare, given)
            if bare.structure is None or kind not in self._met:
                if len(self._met) >= _MOST_KINDS:
                    raise CannotTraceError(
                        f"its arguments were of {_MOST_KINDS} kinds: numbers that change from step to step should be "
                        "tensors, batches of one size"
                    )
                self._met.add(kind)
                return None
            bare.prepare(*args, **kwargs)
            replay = self._replays.get(kind)
            if replay is not None and not replay.holds(bare, given):
                replay = self._replays.pop(kind)
                return None
            if replay is None:
                if kind not in self._asked:
                    self._asked.add(kind)
                    relation = bare.relation(args, kwargs)
                    if relation is not None and relation.others:
                        return None  # which asks whether a plate scales them up, as no later step will
                if self._traces >= _MOST_TRACES:
                    raise CannotTraceError(f"it was traced {_MOST_TRACES} times, and changes again")
                self._traces += 1
                replay = _Replay(self._loss, model, bare, args, kwargs, given, self._backend)
                self._replays[kind] = replay
                replay.holds(bare, given)
            if not _of_training_rows(bare, args, kwargs):
                return None
            return self._replayed(replay, model, bare, args, kwargs)
        except CannotTraceError as error:
            self._off = True
            self._replays.clear()
            _warn(bare.warned, str(error))
            return None

    def _replayed(
        self,
        replay: _Replay,
        model: Callable,
        guide: AutoSparseGP,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Optional[float]:
        state = RandomState(guide.like) if replay.draws else None
        value = replay.run()
        if value is None:
            if state is not None:
                state.restore()
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                raise CannotTraceError(
                    f"{_MOST_FAILURES} replays in a row were taken back, since a Cholesky factorisation needed more "
                    "jitter or a gradient was not finite"
                )
            return None
        self._failures = 0
        self._checked += 1
        if self._checked & (self._checked - 1) == 0:
            after = None if state is None else RandomState(guide.like)
            if state is not None:
                state.restore()
            with _quiet(guide):
                loss = self._loss(model, guide, *args, **kwargs).item()
            if abs(loss - value) > _AGREE.get(replay.dtype, 0.03) * max(abs(loss), abs(value), 1.0):
                if state is not None:
                    state.restore()
                raise CannotTraceError(
                    f"its loss is {loss:.6g} and the trace's {value:.6g}: something that the trace holds as it was, "
                    "such as a number in an object, changes from step to step; make it a tensor argument or a buffer"
                )
            if after is not None:
                after.restore()
        replay.deliver()
        return value


class _Replay:
    """One trace of a step, and what it is good for."""

    def __init__(
        self,
        loss: Loss,
        model: Callable,
        guide: AutoSparseGP,
        args: tuple,
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        backend: Backend,
    ) -> None:
        self._steppers = steppers(guide)
        for module in self._steppers:
            module.settle()
        self._objects = list(_others([args, kwargs]))
        self._structure = guide.structure
        self._guide_modules = list(guide.modules())[1:]
        self._training = [(module, module.training) for module in guide.modules()][1:]
        self._places = Places([model, *self._objects], self._guide_modules)
        heard: list[Any] = []

        def step() -> list[Tensor]:
            with poutine.block(), poutine.trace(param_only=True) as found, flags_kept() as flags, _quiet(guide):
                value = loss(model, guide, *args, **kwargs)
            self._leaves = unregistered([value], [])
            grads = torch.autograd.grad(value, self._leaves)
            names: Any = found.trace.nodes
            self._params = {name: site["value"].unconstrained() for name, site in names.items()}
            failed = sum((flag.ne(0).any() for flag in flags), torch.zeros((), dtype=torch.int64, device=value.device))
            total = torch.stack([grad.sum() for grad in grads]).sum() if grads else value.new_zeros(())
            summary = torch.stack([value.detach(), failed.to(value.dtype), total.to(value.dtype)])
            heard.extend(module.noted() for module in self._steppers)
            tensors, self._rebuild = flattened(heard)
            return [summary, *grads, *tensors]

        state = RandomState(guide.like)
        try:
            graph = traced(step)
            self._run = _runner(graph, backend)
        finally:
            state.restore()
            for module in self._steppers:
                module.noted()
        self.draws = graph.draws
        self._places.settle()
        self._take(graph.inputs, given)
        self.dtype = guide.like.dtype
        self._found: Sequence[Tensor] = ()

    def _take(self, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Note where each of the inputs is to be had in later steps."""
        mine = {id(tensor): i for i, tensor in enumerate(given)}
        leaves = {id(tensor) for tensor in self._leaves}
        self._sources: list[Any] = []  # the number of an argument, a place, or a tensor itself
        self._alike: list[tuple[int, Place]] = []  # an argument that stands in a place, too: of which it is, is unknown
        for tensor in inputs:
            place = self._places.tensors.get(id(tensor))
            if id(tensor) in mine:
                self._sources.append(mine[id(tensor)])
                if place is not None:
                    self._alike.append((mine[id(tensor)], place))
            elif id(tensor) in leaves or place is None:
                self._sources.append(tensor)
            else:
                self._sources.append(place)
        self._looks = [_look(tensor) for tensor in inputs]

    def holds(self, guide: AutoSparseGP, given: Sequence[Tensor]) -> bool:
        """Whether what was traced is what a step would do now; if so, the inputs are at hand."""
        for module in self._steppers:
            module.settle()
        store = dict(pyro.get_param_store().named_parameters())
        if any(store.get(name) is not leaf for name, leaf in self._params.items()):
            return False
        if guide.structure is not self._structure:
            return False
        if any(module.training != mode for module, mode in self._training) or not self._places.unchanged:
            return False
        if any(place.read() is not given[i] for i, place in self._alike):
            return False
        inputs = [
            source if isinstance(source, Tensor) else source.read() if isinstance(source, Place) else given[source]
            for source in self._sources
        ]
        if not all(isinstance(now, Tensor) and _look(now) == look for now, look in zip(inputs, self._looks)):
            return False
        self._inputs = inputs
        return True

    def run(self) -> Optional[float]:
        """The loss at the inputs at hand; ``None`` if it or its gradient is not fit for use."""
        with torch.no_grad():
            summary, *self._found = self._run(*self._inputs)
        self._inputs = []
        value, failed, total = summary.tolist()
        return value if not failed and math.isfinite(value) and math.isfinite(total) else None

    def deliver(self) -> None:
        """Hand out the gradients of the last run, and what it says of natural steps."""
        num = len(self._leaves)
        with torch.no_grad():
            for leaf, grad in zip(self._leaves, self._found[:num]):
                if leaf.grad is None:
                    leaf.grad = grad.clone(memory_format=torch.contiguous_format)
                else:
                    leaf.grad.add_(grad)
            if am_i_wrapped():  # by SVI, which asks which parameters there are
                for name in self._params:
                    pyro.param(name)
        for module, passes in zip(self._steppers, self._rebuild(self._found[num:])):
            for heard in passes:
                module.note(heard)
        self._found = ()


def _runner(graph: Graph, backend: Backend) -> Callable[..., Sequence[Tensor]]:
    """What runs a trace."""
    if backend == "inductor":
        return torch.compile(_reshaped(graph.run).forward, dynamic=False, options={"fallback_random": True})
    if backend == "cudagraph" and any(tensor.is_cuda for tensor in graph.inputs):
        if not all(tensor.is_cuda for tensor in graph.inputs):
            raise CannotTraceError("a CUDA graph takes no tensor of the host's: have all tensors on the GPU")
        try:
            return Captured(graph.run.forward, graph.inputs)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise CannotTraceError(f"the GPU can't capture it ({why}); compile=True replays the same trace") from error
    return graph.run.forward


def _look(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _reshaped(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph for a compiler, by whose rules a result's memory may be laid out otherwise than it was in the trace."""
    for node in graph.graph.nodes:
        if node.target is Tensor.view:
            node.target = torch.reshape
    graph.recompile()
    return graph


# The kind of a step.


def _kind(guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Tensor], Any]:
    """The tensors among a step's arguments; all that is known of them but their numbers, and of the rest."""
    given: list[Tensor] = []

    def of(item: Any) -> Any:
        if isinstance(item, Tensor):
            first = next((i for i, other in enumerate(given) if other is item), len(given))
            given.append(item)
            return first, _look(item)
        if isinstance(item, Mapping):
            return type(item), tuple((key, of(part)) for key, part in item.items())
        if isinstance(item, (list, tuple)):
            return type(item), tuple(map(of, item))
        if isinstance(item, _PLAIN):
            return type(item), item
        if hasattr(item, "__array__"):
            raise CannotTraceError(f"an argument is of type {type(item).__name__}; give it as a tensor")
        return type(item), id(item)

    found = of([args, kwargs])
    return given, (found, guide.training, torch.get_default_dtype(), torch.is_autocast_enabled())


def _others(item: Any) -> Iterator[Any]:
    """What there is among arguments besides tensors and plain values."""
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, (list, tuple)):
        for part in item:
            yield from _others(part)
    elif not isinstance(item, (Tensor, *_PLAIN)):
        yield item


def _require_plain_step(guide: Any, bare: AutoSparseGP, given: Sequence[Tensor]) -> None:
    """Raise where a step does more than a trace could hold."""
    if guide is not bare:
        raise CannotTraceError("the guide is wrapped in a handler")
    if bare.on_sites:
        raise CannotTraceError("a family on sites updates them in Python")
    if bare.structure is not None and bare.structure.coupled:
        raise CannotTraceError("latents that are coupled keep an account in Python of where they are")
    if bare.corrected_modules():
        raise CannotTraceError("the kernel's diagonal depends on the rows that the guide has seen")
    if any(tensor.requires_grad for tensor in given):
        raise CannotTraceError("an argument asks for a gradient")
    if any(type(tensor) is not Tensor for tensor in given):
        raise CannotTraceError("an argument is of a subclass of torch.Tensor")
    around: list[Any] = []

    def note(messenger: Any) -> bool:
        if not (isinstance(messenger, TraceMessenger) and messenger.param_only):
            around.append(messenger)
        return False

    with block_messengers(note):
        pass
    if around:
        raise CannotTraceError(f"a handler, {type(around[0]).__name__}, stands around the step")


def _of_training_rows(guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether latents of single rows, if there are any, are those of this step's."""
    relation = guide.relation(args, kwargs) if guide.is_about_rows else None
    return relation is None or (relation.same and relation.order is None)


# The surroundings of a step.


class _Everything(set[tuple[str, str]]):
    def __contains__(self, item: object) -> bool:
        return True


@contextmanager
def _quiet(guide: AutoSparseGP) -> Iterator[None]:
    """Nothing is warned of that a guide warns of once, nor asked on that account; the step before was asked."""
    before = guide.warned
    guide.warned = _Everything()
    try:
        with pyro.validation_enabled(False):
            yield
    finally:
        guide.warned = before


def _warn(warned: Warned, why: str) -> None:
    warn_once(
        warned,
        "not compiled",
        "",
        f"TraceQuadrature_ELBO(compile=...): this step can't be compiled, and runs as without: {why}.",
        stacklevel=5,
    )
