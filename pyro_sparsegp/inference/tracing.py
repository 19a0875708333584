"""A computation as a graph of torch's operations, without the Python that gave rise to it."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .simplified import VALUE, is_random, operands, roots, schema_of, simplify

__all__ = ["CannotTraceError", "Graph", "flattened", "traced"]

aten = torch.ops.aten


class CannotTraceError(Exception):
    """A computation that is more than a fixed list of torch's operations; the message says why."""


@dataclasses.dataclass
class Graph:
    """A traced computation.

    :param run: the operations, a function of ``inputs``.
    :param inputs: the tensors that were there before, parameters among them, in the order that ``run`` takes them.
    :param draws: whether random numbers are among the operations; a run draws new ones.
    """

    run: GraphModule
    inputs: list[Tensor]
    draws: bool


def traced(function: Callable[[], Sequence[Tensor]]) -> Graph:
    """The operations of one call; all tensors that it meets are inputs, and nothing but the random state moves.

    :raises CannotTraceError: if values decide what is done, or random numbers are not torch's, or if a tensor that was
        there before is written to.
    """
    before = _host_random_state()
    recorder = _Recorder()
    with _InTorch(), recorder:
        found = function()
    if _host_random_state() != before:
        raise CannotTraceError("it draws random numbers by Python's random or by NumPy, which a trace would repeat")
    graph = recorder.finished(found)
    draws = any(map(is_random, graph.nodes))
    _require_pure(graph)
    _drop_idle(graph)
    constants = simplify(graph)
    _drop_unused(graph)
    _call_directly(graph)
    for node in graph.nodes:
        node.meta.clear()
    graph.lint()
    return Graph(GraphModule(torch.nn.Module(), graph), [*recorder.inputs, *constants], draws)


class _InTorch(TorchFunctionMode):
    """Refuses what takes numbers out of tensors unseen by a trace."""

    _outside = (Tensor.numpy, Tensor.__array__, Tensor.untyped_storage)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._outside:
            raise CannotTraceError(f"the numbers of a tensor leave torch, by Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Writes down every operation, after gradients and mapping have been taken apart into operations.

    All tensors are kept until the end: they are known by their identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.inputs: list[Tensor] = []
        self._nodes: dict[int, Node] = {}
        self._kept: list[Tensor] = []
        self._constant: set[int] = set()  # tensors that are made of numbers in the program alone

    def finished(self, found: Sequence[Tensor]) -> torch.fx.Graph:
        """The graph that returns these tensors."""
        self.graph.output([self.node(tensor) for tensor in found])
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node in inputs:
            first.prepend(node)
        return self.graph

    def node(self, item: Any) -> Any:
        """What stands for a tensor, or for those in lists."""
        if isinstance(item, (list, tuple)):
            return type(item)(map(self.node, item))
        if isinstance(item, torch.Generator):
            raise CannotTraceError("it draws from a generator of its own")
        if not isinstance(item, Tensor):
            return item
        if id(item) not in self._nodes:  # it was there before
            self._keep(item, self.graph.placeholder(f"given_{len(self.inputs)}"), False)
            self.inputs.append(item)
        return self._nodes[id(item)]

    def _keep(self, tensor: Tensor, node: Node, constant: bool) -> None:
        self._nodes[id(tensor)] = node
        node.meta[VALUE] = tensor
        self._kept.append(tensor)
        (self._constant.add if constant else self._constant.discard)(id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, _ = flattened([args, list(kwargs.values())])
        fresh = func is aten.lift_fresh.default  # of numbers in the program
        draws = torch.Tag.nondeterministic_seeded in func.tags
        constant = fresh or (not draws and all(id(tensor) in self._constant for tensor in given))
        what = f"(torch's {func._schema.name.removeprefix('aten::')})"
        if torch.Tag.data_dependent_output in func.tags:
            if constant:
                return func(*args, **kwargs)
            raise CannotTraceError(f"values decide what is done: a number is read from a tensor {what}")
        if torch.Tag.dynamic_output_shape in func.tags and _by_values(func, args):
            raise CannotTraceError(f"values decide shapes {what}")
        named = {key: self.node(part) for key, part in kwargs.items()}
        node = self.graph.call_function(aten.clone.default if fresh else func, self.node(args), named)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._keep(out, node, constant)
        elif isinstance(out, (list, tuple)):
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._keep(part, self.graph.call_function(operator.getitem, (node, i)), constant)
        return out


def _by_values(func: Any, args: Any) -> bool:
    """Whether an operation whose result's shape may follow from values is of that kind; indexing by numbers is not."""
    if func._schema.name != "aten::index":
        return True
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in args[1])


def _host_random_state() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()  # noqa: NPY002  # what users draw from by np.random.rand and the like
    return random.getstate(), numpy[1].tobytes(), numpy[2]


def _require_pure(graph: torch.fx.Graph) -> None:
    """Raise if a tensor is written to that was there before."""
    sources = roots(graph)
    for node in graph.nodes:
        for argument, value in operands(node):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Node) and sources[value].op == "placeholder":
                raise CannotTraceError("it writes to a tensor in place, as batch normalisation does in training")


def _drop_idle(graph: torch.fx.Graph) -> None:
    """Leave out operations that do nothing but to Python."""
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _drop_unused(graph: torch.fx.Graph) -> None:
    """Leave out what nothing comes of, but for writing and drawing."""
    for node in reversed(list(graph.nodes)):
        schema = schema_of(node)
        if node.op == "call_function" and not node.users and not is_random(node) and not (schema and schema.is_mutable):
            graph.erase_node(node)


# Operations whose arguments are the same, in the same order, in torch's Python functions: these find their kernel in
# half of the time that an overload's call takes.
_FUNCTIONS = """add addmm amax bmm cat clamp diagonal div dot exp log maximum mean mm mul mv ne neg ones_like pow rsqrt
sqrt stack sub sum tril triu transpose unsqueeze where"""
_METHODS = "add_ addr_ exp_ expand mul_ sqrt_ tril_ view zero_"
_DIRECT = {name: getattr(torch, name) for name in _FUNCTIONS.split()}
_DIRECT |= {name: getattr(Tensor, name) for name in _METHODS.split()}


def _call_directly(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        schema = schema_of(node)
        space, _, name = schema.name.partition("::") if schema else ("", "", "")
        if space == "aten":
            node.target = _DIRECT.get(name, node.target)


def flattened(item: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors in nested lists, tuples, mappings and dataclasses, and what makes the same of others."""
    if isinstance(item, Tensor):
        return [item], lambda tensors: tensors[0]
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        tensors, build = flattened(fields)
        return tensors, lambda tensors: type(item)(**build(tensors))
    if isinstance(item, Mapping):
        tensors, build = flattened(list(item.values()))
        return tensors, lambda tensors: dict(zip(item, build(tensors)))
    if not isinstance(item, (list, tuple)):
        return [], lambda tensors: item
    parts = [flattened(part) for part in item]
    sizes = [len(found) for found, _ in parts]

    def build_all(tensors: Sequence[Tensor]) -> Any:
        left = list(tensors)
        built = []
        for size, (_, build) in zip(sizes, parts):
            built.append(build(left[:size]))
            left = left[size:]
        return type(item)(built)

    return [tensor for found, _ in parts for tensor in found], build_all
