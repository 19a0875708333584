"""Graphs of tensor operations, as torch.fx records them: simplified, compiled, or captured as one launch of a GPU."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import compress
from typing import Any

import torch
from torch import Tensor

Graph = Callable[..., list[Tensor]]
_LARGEST = 2**20  # numbers of a constant
_KINDS = ("zeros", "ones", "full")
# What depends on no numbers of a tensor, in lists.
_MADE = [[name] for kind in _KINDS for name in (kind, f"{kind}_like", f"new_{kind}")]
_MADE += [["eye"], ["arange"], ["scalar_tensor"], ["lift_fresh_copy"]]


@torch.no_grad()
def simplified(graph: Any, inputs: list[Tensor]) -> Any:
    """A graph without what changes no number, with constants for what is the same in each replay, and in which nothing
    is computed twice.
    """
    nodes = graph.graph.nodes
    for node in list(nodes):
        if node.target is torch.ops.aten.detach.default and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
    first: dict[Any, Any] = {}
    for node in _pure(nodes):
        known = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if known is not node:
            node.replace_all_uses_with(known)
    graph.graph.eliminate_dead_code()
    run = _Constants(graph, _constant(nodes))
    run.run(*inputs)
    for i, (node, value) in enumerate(run.values.items()):
        graph.register_buffer(f"constant_{i}", value)
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(graph.graph.get_attr(f"constant_{i}"))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def require_known_sizes(graph: Any) -> None:
    """Raise if it follows from what is given how many elements a tensor has, as in ``y[seen]``."""
    for node in graph.graph.nodes:
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            is_index = node.target is torch.ops.aten.index.Tensor  # by whole numbers it has as many as these
            parts = [part for part in node.all_input_nodes if part.op != "get_attr"]
            if any(not is_index or part.meta["val"].dtype == torch.bool for part in parts):
                raise ValueError("data say how many values there are, as in y[seen]: give poutine.mask what is seen")


def _pure(nodes: Any) -> list[Any]:
    """The operations that draw nothing, read no memory that is written to, and whose own is neither that nor given."""
    roots: dict[Any, Any] = {}  # whose memory a node shares
    written, given = set[Any](), set[Any]()
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        is_part = node.op == "call_function" and (schema is None or schema.is_mutable or node.target.is_view)
        roots[node] = roots[node.args[0]] if is_part else node
        of_inputs = {roots[each] for each in node.all_input_nodes}
        written |= of_inputs if getattr(schema, "is_mutable", False) else set()
        given |= of_inputs if node.op == "output" else set()
    return [
        node
        for node in nodes
        if node.op == "call_function"
        and not {roots[node]} & given
        and written.isdisjoint(roots[each] for each in [node, *node.all_input_nodes])
        and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
    ]


def _constant(nodes: Any) -> set[Any]:
    """The operations that depend on no input."""
    found = set[Any]()
    for node in _pure(nodes):
        own = node.all_input_nodes
        is_made = str(node.target).split(".")[1:2] in _MADE or (own and found.issuperset(own))
        found |= {node} if is_made else set()
    return found


class _Constants(torch.fx.Interpreter):
    """A run of a graph that keeps its constants, of those that other nodes use."""

    def __init__(self, graph: Any, nodes: set[Any]) -> None:
        super().__init__(graph)
        self.constant, self.values = nodes, dict[Any, Tensor]()

    def run_node(self, node: Any) -> Any:
        value = super().run_node(node)
        is_used = node in self.constant and not self.constant.issuperset(node.users)
        if is_used and isinstance(value, Tensor) and value.numel() <= _LARGEST:
            self.values[node] = value
        return value


@torch.no_grad()
def quickened(graph: Any, inputs: list[Tensor]) -> Any:
    """A graph whose operations are called by their names in Python, where that gives the same numbers: PyTorch finds
    these in half of the time that it takes for operations of a graph.
    """
    _Names(graph).run(*inputs)
    graph.recompile()
    return graph


class _Names(torch.fx.Interpreter):
    """A run of a graph that calls operations by their names, and has these in the graph."""

    def run_node(self, node: Any) -> Any:
        schema, name = getattr(node.target, "_schema", None), (*str(node.target).split(".")[1:2], "")[0]
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        args = args[:1] and (args[0].clone() if getattr(schema, "is_mutable", False) else args[0], *args[1:])
        value = super().run_node(node)
        if schema is None or not args or torch.Tag.nondeterministic_seeded in node.target.tags:
            return value
        for op, owner in (("call_function", torch), ("call_method", Tensor)):
            function = getattr(owner, name, None)
            with suppress(TypeError, RuntimeError):  # of a name for other arguments
                if function and _are_equal(function(*args, **kwargs), value):
                    node.op, node.target = op, function if owner is torch else name
                    break
        return value


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        alike = isinstance(one, Tensor) and (one.shape, one.stride()) == (other.shape, other.stride())
        return alike and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return len(one) == len(other) and all(map(_are_equal, one, other))


@torch.no_grad()
def compiled(graph: Any, inputs: list[Tensor]) -> Graph:
    """A graph that PyTorch's inductor has compiled; it draws from the same generators."""
    import torch._inductor  # which takes long

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about its own code
        return torch._inductor.compile(graph, [value.detach() for value in inputs], {"fallback_random": True})


def is_capturable(graph: Any, inputs: list[Tensor]) -> bool:
    """Whether all of a graph's numbers that change are on a GPU."""
    # What a host computes is not captured; constants are none of its work.
    made = [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    return all(value.is_cuda for value in [*inputs, *(value for value in made if isinstance(value, Tensor))])


@torch.no_grad()
def captured(run: Graph, inputs: list[Tensor]) -> Graph:
    """A function of tensors on a GPU as one launch. Parameters are read, and written to, where they lie."""
    static = [value.detach() if value.requires_grad else value.clone() for value in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries make their workspaces in a first call
        run(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*static)

    def replay(*now: Tensor) -> list[Tensor]:
        moved = [kept.data_ptr() != value.data_ptr() for kept, value in zip(static, now)]
        torch._foreach_copy_(list(compress(static, moved)), list(compress(now, moved)))
        graph.replay()
        return [value.clone() for value in found]  # which the next replay writes over

    return replay
