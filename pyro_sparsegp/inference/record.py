"""A step of training as a graph of tensor operations, which is recorded once and replayed.

A step is a function of data, parameters, the guide's state and the rates of natural steps. It gives the loss, gradients
and the new state, and a flag: a factorisation failed, a gradient is not finite, or a number that is read in the step
would lead another way. Random numbers are operations: a replay draws from the same generators as a plain step.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Optional

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch.utils._python_dispatch import TorchDispatchMode

from ..gaussians.sites import KeptSites
from ..gaussians.steps import Natural, Tape, recording, steppers
from ..guide import AutoSparseGP
from ..numerics.decisions import Traced, decided, deciding
from ..numerics.graphs import Graph, captured, compiled, is_capturable, quickened, require_known_sizes, simplified
from ..numerics.linalg import flags_kept
from ..program.traces import RandomState
from .optimisers import FallingAdam, update_of

_ROUGH = 50.0  # times what rounding of inputs does to a number, in which compiled code may be off


class Layouts(TorchDispatchMode):
    """Makes tensors without memory: make_fx notes by one what each tensor is."""

    shape_env = None

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        return func(*args, **kwargs | {"device": "meta"})


@dataclass(frozen=True)
class Slot:
    """A place of a guide's state, whose tensor steps replace: one of a dictionary of a module's."""

    owner: Any
    kind: str
    name: str

    @property
    def value(self) -> Any:
        return self.owner.__dict__[self.kind][self.name]

    @property
    def recorded(self) -> Any:
        """What it has become while a step is recorded."""
        tape = getattr(self.owner, "tape", None)
        return self.value if tape is None else tape.moved.get(self.name, self.value)

    def put(self, value: Tensor) -> None:
        if isinstance(self.value, nn.Parameter):  # which optimisers and Pyro's store know
            self.value.data = value
        else:
            self.owner.__dict__[self.kind][self.name] = value


def slots_of(guide: nn.Module) -> list[Slot]:
    """The state of a guide: buffers, how updates of sites go, and parameters that take natural steps."""
    more = {Natural: ["_parameters"], KeptSites: ["progress"]}
    return [
        Slot(module, kind, name)
        for module in guide.modules()
        for kind in ["_buffers", *(kind for known, own in more.items() if isinstance(module, known) for kind in own)]
        for name in vars(module)[kind]
    ]


class Replay(NamedTuple):
    """What a replay gives."""

    loss: float
    failed: bool
    grads: list[Tensor]
    state: list[Tensor]


@dataclass
class Recording:
    """A step as a graph of the tensors of a call, parameters, state and rates."""

    guide: AutoSparseGP
    sites: dict[str, Any]  # of parameters, as Pyro's handlers see them
    params: list[Tensor]
    slots: list[Slot]
    tapes: dict[Natural, Tape]
    limit: Tensor  # above which a loss is none of a step's
    graph: Any = None
    exact: Any = None  # the graph that plain steps are compared with: compiled code rounds in another order
    update: Any = None  # of parameters, if the optimiser is within
    leaves: Any = ()  # the parameters that have gradients
    moving: Any = ()  # the slots that a step changes
    looks: int = 0  # of the guide's, that a step adds
    share: float = 0.0  # of all rows
    steps: int = 0  # that it was asked for; of these
    replays: int = 0  # those that it took, neither compared with plain ones
    failures: int = 0  # nor left to them

    def __post_init__(self) -> None:
        self.own = list(self.guide.parameters())
        self.kinds = self._kinds()

    def _kinds(self) -> list[Any]:
        """What is known of parameters and state but their numbers."""
        free = [parameter.requires_grad for parameter in self.own]
        return [*free, *(getattr(slot.value, "shape", None) for slot in self.slots)]

    def fits(self) -> bool:
        """Whether parameters and state are what they were, but for their numbers."""
        stored = dict(pyro.get_param_store().named_parameters())
        names = all(stored.get(name) is p for p, name in zip(self.params, self.sites))
        is_tilted = any(module.is_tilted for module in self.tapes)
        return names and self._kinds() == self.kinds and not is_tilted and self.update.fits()

    def inputs(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the graph takes: tensors, each once."""
        for module, tape in self.tapes.items():
            tape.rate.fill_(module.rate_of(tape.passes, self.share))
        state, rates = [slot.value for slot in self.slots], [tape.rate for tape in self.tapes.values()]
        every = [*tensors, *self.params, *state, *rates, self.limit]
        return list({id(value): value for value in every if value is not None}.values())

    @torch.no_grad()
    def run(self, tensors: list[Tensor], limit: float, takes: bool) -> Replay:
        """What the step gives; whether it is to be taken, if it does not fail, an optimiser within is told."""
        self.update.begin(takes)
        self.limit.fill_(limit)
        self.steps += 1
        num = len(self.leaves)
        try:
            read, *found = (self.graph if takes else self.exact)(*self.inputs(tensors))
            loss, failed = read.tolist()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # as of an inverse, where a factor is none
            loss, failed, found = math.nan, True, []
        self.failures += bool(failed)
        return Replay(loss, bool(failed), found[:num], found[num:])

    @torch.no_grad()
    def take(self, replay: Replay) -> None:
        """Have the guide and the gradients be what the step gave."""
        self.replays += 1
        for slot, value in zip(self.moving, replay.state):
            slot.put(value)
        # An optimiser within has taken those that it knows.
        for leaf, grad in list(zip(self.leaves, replay.grads))[len(self.update.params) :]:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        for module, tape in self.tapes.items():
            module.steps += bool(tape.passes)
        self.guide.core.looks += self.looks
        self.guide.core.points, self.guide.core.versions = None, []  # as training does; it may count no version
        self.guide.row_share = self.share


def record(
    loss_of: Callable[[], Tensor],
    guide: AutoSparseGP,
    sites: Mapping[str, Any],
    tensors: list[Tensor],
    compile: bool,
    optim: Optional[FallingAdam],
) -> Recording:
    """Record a step, which changes nothing but random generators.

    :param loss_of: the loss of the tensors of a call; ``sites``: of parameters, as a plain step has met them.
    :param compile: by inductor; ``optim``: whose steps are taken within, where it can be.
    """
    # which import sympy
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    params = [site["value"].unconstrained() for site in sites.values()]
    free = [p for p in params if p.requires_grad]
    zero = torch.zeros((), dtype=guide.like.dtype, device=guide.like.device)
    tapes = {module: Tape(zero.clone()) for module in steppers(guide)}
    known = {name: _stand_in(site, leaf) for (name, site), leaf in zip(sites.items(), params)}
    found = Recording(guide, known, params, slots_of(guide), tapes, zero.clone())
    before, looks, refused = [slot.value for slot in found.slots], guide.core.looks, guide.core.plan.refused
    counts = {module: (module.steps, module.last_rate) for module in tapes}

    def step(*_: Tensor) -> list[Tensor]:
        decisions, quiet = Traced(), (pyro.validation_enabled(False), dist.validation_enabled(False))
        with torch.enable_grad(), quiet[0], quiet[1], poutine.block(), deciding(decisions), flags_kept() as flags:
            with recording(guide.like) as record:
                loss = loss_of()
            record.retain()
            grads = torch.autograd.grad(loss, [*record.tensors, *free], allow_unused=True)
            for value, grad in zip(record.tensors, grads):
                value.grad = grad
            for row, sign in record.signs.items():
                row.is_signed = decided(sign, serves_both=True)
            record.step(guide.row_share)
        pairs = [(p, grad) for p, grad in zip(free, grads[len(record.tensors) :]) if grad is not None]
        moved = [(slot, new) for slot, old in zip(found.slots, before) if (new := slot.recorded) is not old]
        found.leaves, found.moving = [p for p, _ in pairs], [slot for slot, _ in moved]
        broken = ~torch.stack([loss.detach(), *(grad.sum() for _, grad in pairs)]).sum().isfinite()
        noted: list[Tensor] = [*flags, *decisions.flags, broken, loss > found.limit]
        failed = torch.cat([flag.reshape(-1).to(loss.device) != 0 for flag in noted]).any()
        read = torch.stack([loss.detach(), failed.to(loss)])
        return [read, *(grad for _, grad in pairs), *(new for _, new in moved)]

    for module, tape in tapes.items():
        module.tape = tape
    try:
        inputs = found.inputs(tensors)
        # By itself make_fx makes a mode for each tensor. Fake ones, which a GPU and inductor want, are slow to make.
        mode = {("cpu", False): Layouts}.get((zero.device.type, compile), FakeTensorMode)
        with tracing(TracingContext(mode())):  # type: ignore[arg-type]
            graph = make_fx(step)(*inputs)
    finally:
        for module in tapes:
            (module.steps, module.last_rate), module.tape = counts[module], None
        for slot, value in zip(found.slots, before):
            slot.owner.__dict__[slot.kind][slot.name] = value
        found.looks, guide.core.looks = guide.core.looks - looks, looks
        guide.core.plan.refused = refused  # plain steps may be mapped where what cannot be recorded is not
    found.share = guide.row_share
    read = [*inputs, *(getattr(graph, n.target) for n in graph.graph.nodes if n.op == "get_attr")]
    versions = [getattr(value, "_version", 0) for value in read]
    graph = simplified(graph, inputs)
    if versions != [getattr(value, "_version", 0) for value in read]:
        raise ValueError("the program writes to a tensor in place, as BatchNorm does")
    require_known_sizes(graph)
    found.update = update_of(optim, found.leaves, zero)

    def taking(run: Graph, *inputs: Tensor) -> list[Tensor]:
        read, *more = run(*inputs)
        found.update(more[: len(found.leaves)], read[1])
        return [read, *more]

    found.update.begin(False)
    made = compiled(graph, inputs) if compile else None
    graph = quickened(graph, inputs)
    found.graph = found.exact = partial(taking, graph.forward)
    if made is not None and are_alike(found.exact, fast := partial(taking, made), inputs):
        found.graph = fast
    elif is_capturable(graph, inputs):
        with suppress(RuntimeError):  # of an operation that no CUDA graph takes: replays go one by one
            found.graph = found.exact = captured(found.graph, inputs)
    return found


@torch.no_grad()
def are_alike(exact: Graph, fast: Graph, inputs: list[Tensor]) -> bool:
    """Whether compiled code gives what the graph gives, up to rounding; a warning says if it does not."""
    # inductor is wrong in a gradient of additive families: test_a_compiled_step_is_that_of_plain_steps_up_to_rounding
    state, eps = RandomState(inputs[-1]), torch.finfo(inputs[-1].dtype).eps

    def run(graph: Graph, at: list[Tensor]) -> list[Tensor]:
        state.restore()
        return [1.0 * value for value in graph(*at)]

    # What rounding does: every other number moves by some of its last digits.
    odd = [torch.arange(x.numel(), device=x.device).view(x.shape) % 2 for x in inputs]
    moved = [x * (1 + 4 * eps * each).to(x.dtype) for x, each in zip(inputs, odd)]
    found, rounded, given = run(exact, inputs), run(exact, moved), run(fast, inputs)
    bounds = [_ROUGH * (near - value).norm() + eps**0.5 * (1 + value.norm()) for value, near in zip(found, rounded)]
    if all((value - other).norm() <= most for value, other, most in zip(found, given, bounds)):
        return True
    warnings.warn("inductor's code gives other numbers than the graph. Steps are replayed without it.", stacklevel=2)
    return False


def _stand_in(site: dict[str, Any], leaf: Tensor) -> Any:
    """A parameter's site, with what optimisers ask of it alone."""
    value: Any = site["value"].detach()
    value.unconstrained = weakref.ref(leaf)
    return {**site, "value": value}
