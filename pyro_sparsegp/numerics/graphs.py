"""Graphs of tensor operations, as torch.fx records them: simplified, compiled, or captured as one launch of a GPU."""

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

Graph = Callable[..., list[Tensor]]
_LARGEST = 2**20  # numbers of a constant
_LINALG: Any = vars(torch._C)["_linalg"]
# What depends on no numbers of a tensor.
_MADE = [name for kind in ("zeros", "ones", "full") for name in (f"{kind}_like", f"new_{kind}")] + ["lift_fresh_copy"]
# What gives its argument, of the same layout.
_VIEWS = "detach", "alias", "view", "expand", "slice", "reshape", "_unsafe_view"
# What takes a tensor for its number.
_OF_TWO = "add", "sub", "mul", "div", "rsub", "eq", "ne", "gt", "lt", "add_", "sub_", "mul_", "div_"


@torch.no_grad()
def simplified(graph: Any, inputs: list[Tensor]) -> Any:
    """A graph without what changes no number, with constants for what is the same in each replay, and in which nothing
    is computed twice.
    """
    nodes = graph.graph.nodes
    for node in _copies(nodes):
        node.replace_all_uses_with(node.all_input_nodes[0])
    for node in nodes:
        if node.target is torch.ops.aten._to_copy.default and node.all_input_nodes:  # what it has is no change
            given = node.all_input_nodes[0].meta["val"]
            node.kwargs = {k: v for k, v in node.kwargs.items() if getattr(given, k, None) != v}
    first: dict[Any, Any] = {}
    for node in _pure(nodes):
        known = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if known is not node:
            node.replace_all_uses_with(known)
    _drop_unused(graph.graph)
    run = _Constants(graph)
    run.run(*inputs)
    kept = [node for node, value in run.values.items() if isinstance(value, Tensor) and value.numel() <= _LARGEST]
    for i, node in enumerate(node for node in kept if {*node.users} - run.values.keys()):
        graph.register_buffer(f"constant_{i}", run.values[node])
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(graph.graph.get_attr(f"constant_{i}"))
    _drop_unused(graph.graph)
    return graph


def _drop_unused(graph: torch.fx.Graph) -> None:
    """Drop operations that nobody uses, draw nothing and write nothing: PyTorch 2.4's own way would drop all unused."""
    for node in reversed(graph.nodes):
        kept = node.users, node.is_impure(), _written(node), _is_draw(node)
        if not any(kept):
            graph.erase_node(node)


def _copies(nodes: Iterable[Node]) -> list[Node]:
    """The operations that give their first argument to the bit: its memory, or a copy where neither is written to."""
    by_one = {node for node in _pure(nodes) if _name(node) in ("pow", "mul", "div") and node.args[1:] in [(1,), (1.0,)]}
    (*_, end) = nodes  # the output, which copies that are given stay for
    inner = [node for node in nodes if (_name(node) in _VIEWS or node in by_one) and end not in node.users]
    return [node for node in inner if _are_alike(node.meta.get("val"), node.args[0].meta.get("val"))]  # type: ignore[union-attr]


def _name(node: Node) -> str:
    """An operation's name without its overload, ``add`` of ``aten.add.Tensor``, or nothing."""
    return (*str(node.target).split(".")[1:2], "")[0]


def _are_alike(one: object, other: object) -> bool:
    """Whether two are tensors of the same layout."""
    layouts = [(x.shape, x.stride(), x.dtype) for x in (one, other) if isinstance(x, Tensor)]
    return len(layouts) == 2 and layouts[0] == layouts[1]


def require_known_sizes(graph: Any) -> None:
    """Raise if it follows from what is given how many elements a tensor has, as in ``y[seen]``."""
    for node in graph.graph.nodes:
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            is_index = node.target is torch.ops.aten.index.Tensor  # by whole numbers it has as many as these
            parts = [part for part in node.all_input_nodes if part.op != "get_attr"]
            if any(not is_index or part.meta["val"].dtype == torch.bool for part in parts):
                raise ValueError("data say how many values there are, as in y[seen]: give poutine.mask what is seen")


def _pure(nodes: Iterable[Node]) -> list[Node]:
    """The operations that draw nothing, read no memory that is written to, and whose own is neither that nor given."""
    roots: dict[Any, Any] = {}  # whose memory a node shares
    written = set[Any]()
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        is_part = node.op == "call_function" and (schema is None or schema.is_mutable or node.target.is_view)  # type: ignore[union-attr]
        roots[node] = roots[node.args[0]] if is_part else node
        written |= {roots[each] for each in _written(node)}
    given = {roots[each] for each in node.all_input_nodes}  # of the last one, the output
    return [
        node
        for node in nodes
        if node.op == "call_function"
        and not {roots[node]} & given
        and written.isdisjoint(roots[each] for each in [node, *node.all_input_nodes])
        and not _is_draw(node)
    ]


def _is_draw(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _written(node: Node) -> list[Any]:
    """The arguments that an operation writes to."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = [*zip(arguments, node.args), *((one, node.kwargs.get(one.name)) for one in arguments)]
    is_write = [(getattr(one.alias_info, "is_write", False), value) for one, value in given]
    return [each for writes, value in is_write if writes for each in tree_leaves(value) if each is not None]


class _Constants(torch.fx.Interpreter):
    """A run of a graph that keeps what depends on no input."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self.pure, self.values = {*_pure(graph.graph.nodes)}, dict[Node, Any]()

    def run_node(self, node: Node) -> Any:
        value, own = super().run_node(node), node.all_input_nodes
        if node in self.pure and (_name(node) in _MADE or self.values.keys() >= {*own}):
            self.values[node] = value
        return value


@torch.no_grad()
def quickened(graph: Any, inputs: list[Tensor]) -> Any:
    """A graph whose operations are called by their names in Python, with tensors for numbers, where that gives the same
    to the bit: PyTorch finds these in half of the time that it takes for operations of a graph.
    """
    _Names(graph).run(*inputs)
    graph.recompile()
    graph.__dict__.update(graph.named_buffers())  # where Python looks first
    return graph


class _Names(torch.fx.Interpreter):
    """A run of a graph that calls operations by their names, and has these in the graph."""

    def run_node(self, node: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        name, changes = _name(node), _written(node)
        # draws are none of those that are tried, nor is what writes elsewhere than to its first argument
        if not (hasattr(node.target, "tags") and args and changes in ([], [node.args[0]])) or _is_draw(node):
            return super().run_node(node)
        first = args[0].clone() if changes else args[0]
        value = super().run_node(node)

        def is_same(function: Any, *more: object) -> bool:
            given = first.clone() if changes else first
            with suppress(TypeError, RuntimeError):  # of a name for other arguments
                found = function(given, *more, **kwargs)
                return (changes or (found is given) == (value is given)) and _are_equal(found, value, not changes)
            return False

        for owner, own in ((torch, name), (_LINALG, name), (Tensor, {"_to_copy": "to"}.get(name, name))):
            if (function := getattr(owner, own, None)) and is_same(function, *args[1:]):
                node.op, node.target = ("call_method", own) if owner is Tensor else ("call_function", function)
                self._with_tensor(node, function, first, is_same, *args[1:])
                break
        return value

    def _with_tensor(self, node: Node, function: Callable, like: Tensor, is_same: Callable, *more: Any) -> None:
        """Give an operation its number as a tensor, which a CPU's kernels need not convert."""
        is_number = [*map(type, more)] in ([int], [float])
        if is_number and getattr(function, "__name__", "") in _OF_TWO and like.device.type == "cpu":
            number = torch.tensor(more[0], dtype=like.dtype)
            if is_same(function, number):
                name = f"number_{more[0]}_{like.dtype}".translate(str.maketrans(".-+", "_mp"))
                self.module.register_buffer(name, number)
                with node.graph.inserting_before(node):
                    node.args = (node.args[0], node.graph.get_attr(name))


def _are_equal(one: Any, other: Any, in_layout: bool = True) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    are_alike = len(ones) == len(others) and (not in_layout or all(map(_are_alike, ones, others)))
    return are_alike and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ones, others))


@torch.no_grad()
def compiled(graph: Any, inputs: list[Tensor]) -> Graph:
    """A graph that PyTorch's inductor has compiled; it draws from the same generators."""
    import torch._inductor  # which takes long

    # On a CPU kernels are called from C++: calls from Python take a fifth of a step.
    options = {"fallback_random": True, "cpp_wrapper": not any(value.is_cuda for value in inputs)}
    log = logging.getLogger("torch._inductor.ir")  # which tells of each operation that C++ calls by its name
    (*nodes, end), level = graph.graph.nodes, log.level
    (found,) = end.args
    # Inductor would leave out a draw that nothing reads, and the draws after it would be others.
    end.args = ([*found, *(node for node in nodes if _is_draw(node) and not node.users)],)
    graph.recompile()
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about its own code
            run = torch._inductor.compile(graph, [value.detach() for value in inputs], options)
    finally:
        log.setLevel(level)
        end.args = (found,)
        graph.recompile()
    return lambda *now: run(*now)[: len(found)]


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
