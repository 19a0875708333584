"""A traced graph without what need not be computed again: equal operations, constants, and what changes nothing.

Numbers stay what they were, but for the sign of zero. Memory that an operation writes to is left
alone, with all that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["VALUE", "is_random", "operands", "roots", "schema_of", "simplify"]

VALUE = "value"  # of a node's meta: the tensor that it was in the trace

aten = torch.ops.aten
_SHAPED = (  # whose values follow from shapes
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.new_full.default,
)
# The number that changes nothing as the second operand; of products and sums, as either.
_NEUTRAL = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0, aten.pow.Tensor_Scalar: 1}
_EITHER = (aten.mul.Tensor, aten.add.Tensor)
_LAYOUTS = (  # which do nothing where shape and strides stay
    aten.expand.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.clone.default,
    aten.squeeze.dim,
)


def schema_of(node: Node) -> Any:
    """The schema of a node's operation, or ``None``: of inputs, and entries of several results."""
    return getattr(node.target, "_schema", None)


def operands(node: Node) -> Iterator[tuple[Any, Any]]:
    """An operation's arguments, as its schema describes them, with what it is given; ``out=`` is among them."""
    schema = schema_of(node)
    for i, argument in enumerate(schema.arguments if schema else ()):
        yield argument, node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)


def is_random(node: Node) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def roots(graph: Graph) -> dict[Node, Node]:
    """For each node the one whose memory its value is."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        found[node] = node
        schema = schema_of(node)
        if schema is None:  # an entry of several results
            if node.op == "call_function" and isinstance(node.args[0], Node):
                found[node] = found[node.args[0]]
            continue
        if any(result.alias_info is not None for result in schema.returns):
            for argument, value in operands(node):
                if argument.alias_info is not None and isinstance(value, Node):
                    found[node] = found[value]
    return found


def simplify(graph: Graph) -> list[Tensor]:
    """Simplify in place; the constants that are inputs now, after the others.

    Nodes have their tensors in ``meta[VALUE]``.
    """
    of, schemas = roots(graph), {node: schema_of(node) for node in graph.nodes}
    written = {
        of[value]
        for node in schemas
        for argument, value in operands(node)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node)
    }
    given = {node for node in graph.nodes if node.op == "placeholder"}
    at_rest = given | {node for node in graph.nodes if of[node] not in written and node.op == "call_function"}
    output = next(node for node in graph.nodes if node.op == "output")
    own = {of[node] for node in output.all_input_nodes} - given  # memory that a run gives away
    constant = _constants(graph, at_rest - given)
    equal: dict[Any, Node] = {}
    instead: dict[Node, Node] = {}  # of roots that are gone

    def root(node: Node) -> Node:
        found = of[node]
        while found in instead:
            found = instead[found]
        return found

    for node, schema in schemas.items():
        if node in given or is_random(node) or (schema and schema.is_mutable):
            continue
        if not at_rest.issuperset([node, *node.all_input_nodes]):
            continue
        if node not in constant:
            _take_number(node, constant)
        same = _unchanged(node)
        if same is None:
            same = equal.setdefault(_key(node), node)
        if same is node or (root(node) in own and root(same) in given):
            continue
        if of[node] is node:
            instead[node] = root(same)
        node.replace_all_uses_with(same)
        graph.erase_node(node)
        constant.discard(node)
    return _as_inputs(graph, constant)


def _constants(graph: Graph, at_rest: set[Node]) -> set[Node]:
    """The nodes whose values follow from numbers in the program, and shapes."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node not in at_rest or is_random(node) or not isinstance(node.meta.get(VALUE), Tensor):
            continue
        if node.target in _SHAPED or all(part in found for part in node.all_input_nodes):
            found.add(node)
    return found


def _as_inputs(graph: Graph, constant: set[Node]) -> list[Tensor]:
    """Have those constants be inputs that something other than a constant takes."""
    last: Optional[Node] = None
    for node in graph.nodes:
        last = node if node.op == "placeholder" else last
    values: list[Tensor] = []
    for node in list(graph.nodes):
        if node not in constant or all(user in constant for user in node.users):
            continue
        with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes))):
            last = graph.placeholder(f"constant_{len(values)}")
        last.meta[VALUE] = node.meta[VALUE]
        values.append(node.meta[VALUE])
        node.replace_all_uses_with(last)
    return values


def _take_number(node: Node, constant: set[Node]) -> None:
    """Put a number in the place of a constant that is the same everywhere, where that gives the same tensor."""
    if node.target not in _NEUTRAL or len(node.args) != 2 or node.kwargs:
        return
    for operand, other in (node.args[::-1], node.args)[: 2 if node.target in _EITHER else 1]:
        if operand not in constant or not isinstance(other, Node):
            continue
        value = operand.meta[VALUE]  # type: ignore[union-attr]
        if value.numel() and value.is_floating_point() and _alike(other.meta[VALUE], node.meta[VALUE]):
            first = value.reshape(-1)[0]
            if bool((value == first).all()):
                node.args = (other, first.item())
                return


def _unchanged(node: Node) -> Optional[Node]:
    """What a node's value is that of its first argument's, or of that one's, if it is."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or (node.kwargs and node.target is not aten.clone.default):
        return None
    if source.target is node.target and node.target in (aten.neg.default, aten.transpose.int):
        whole = source.args[0]
        if isinstance(whole, Node) and source.args[1:] == node.args[1:]:  # done twice
            return whole
    if not _alike(source.meta.get(VALUE), node.meta.get(VALUE)):
        return None
    if node.target in _NEUTRAL:
        number = node.args[1]
        return source if isinstance(number, (int, float)) and number == _NEUTRAL[node.target] else None
    return source if node.target in _LAYOUTS else None


def _alike(a: Any, b: Any) -> bool:
    """Whether two tensors are laid out in the same way, but for dimensions of one entry."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.device == b.device and all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride()))


def _key(node: Node) -> Any:
    """Equal for operations that give equal results."""

    def of(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item), tuple(map(of, item))
        if isinstance(item, Mapping):
            return tuple((key, of(value)) for key, value in sorted(item.items()))
        return type(item), item  # 1 is not 1.0, which promotes

    return node.target, of(node.args), of(node.kwargs)
