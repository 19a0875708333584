"""Graphs of tensor operations, as torch.fx records them: simplified, compiled, or captured as one launch of a GPU."""

import warnings
from collections.abc import Callable
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
    """A graph without what changes no number, and with constants for what is the same in each replay."""
    nodes = graph.graph.nodes
    for node in list(nodes):
        if node.target is torch.ops.aten.detach.default and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
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


def _constant(nodes: Any) -> set[Any]:
    """The nodes that depend on no input, draw nothing, are never written to, and are not given as they are."""
    roots: dict[Any, Any] = {}  # whose memory a node shares
    written, found = set(), set[Any]()
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        is_part = node.op == "call_function" and (schema is None or schema.is_mutable or node.target.is_view)
        roots[node] = roots[node.args[0]] if is_part else node
        if node.op == "output" or getattr(schema, "is_mutable", False):
            written |= {roots[each] for each in node.all_input_nodes}
    for node in nodes:
        own, tags = node.all_input_nodes, getattr(node.target, "tags", ())
        is_made = str(node.target).split(".")[1:2] in _MADE or (own and found.issuperset(own))
        is_written = node.op != "call_function" or roots[node] in written
        found |= {node} if is_made and not is_written and torch.Tag.nondeterministic_seeded not in tags else set()
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
