"""Parameters that a density depends on and that no optimiser would be given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Optional

from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from ..posterior.base import Marginals
from .data import tensors
from .traces import all_sites

__all__ = ["Probe", "has_network", "held_parameters", "require_registered"]


@dataclass
class Probe:
    """What a guide's run with the latents at their medians showed.

    :param densities: of the sites that are no GP sites.
    """

    densities: dict[str, Tensor]
    posteriors: Mapping[str, Marginals]


def has_network(model: Callable, trace: poutine.Trace) -> bool:
    """Whether a model runs a network, by :func:`pyro.module` in a run's trace or as a module in a PyroModule."""
    # pyro.module names a network's parameters "network$$$layer.weight".
    return any("$$$" in name for name, _ in all_sites(trace)) or (
        isinstance(model, nn.Module) and any(not isinstance(part, PyroModule) for part in model.modules())
    )


def require_registered(model: Callable, run: Probe, trace: poutine.Trace, args: Any) -> None:
    """Raise, with their names, if densities or posteriors depend on parameters that SVI does not train.

    :param run: what a run of the model showed, with its graph.
    :param trace: the run's trace: its param sites are what SVI trains.
    :param args: the model's arguments, which may ask for gradients of their own.
    """
    params = [site["value"] for _, site in all_sites(trace) if site["type"] == "param"]
    # With module_local_params a plain parameter is its own: test_guide.py::test_module_local_parameters.
    known = [getattr(value, "unconstrained", lambda value=value: value)() for value in params]
    # A parameter of the kernel may be in the divergence alone, and one of the mean in the values alone.
    marginals: list[Any] = [trace.nodes[name]["value"] for name in run.posteriors]
    for q in run.posteriors.values():
        marginals += [q.process.kernel.diag(q.process.x), q.kl]
    forgotten = _leaves([*run.densities.values(), *marginals], [*known, *tensors(args)])
    if not forgotten:
        return
    sources = {
        f"the {part} of site {name!r}": source
        for name, q in run.posteriors.items()
        for part, source in (("kernel", q.process.kernel), ("mean", q.process.mean_function))
    }
    labels, paths = [], set()
    for parameter in forgotten:
        found = (
            (f"{what} in {label}", path)
            for label, source in {**sources, "the model": model}.items()
            for held, what, path in held_parameters(source)
            if held is parameter
        )
        label, path = next(found, (f"a parameter of shape {tuple(parameter.shape)}", None))
        labels.append(label)
        paths.add(path)
    # The store's parameters are those of the first network of that name; SVI trains these, and the model runs others:
    # test_deep_basis.py, "Another network is registered".
    registered = [name.split("$$$", 1) for name, site in all_sites(trace) if site["type"] == "param" and "$$$" in name]
    names = sorted({name for name, path in registered if path in paths})
    raise ValueError(
        f"these parameters would not train: {', '.join(labels)}. SVI trains "
        "what the model registers: call pyro.module('name', network) in the model, make the model a PyroModule "
        "that has the network as an attribute, or use pyro.param; freeze it with requires_grad_(False) if it "
        "should stay as it is."
        + (
            f" Another network is registered as {', '.join(map(repr, names))} in Pyro's parameter store (a notebook's "
            "cell run twice, a store loaded): call pyro.clear_param_store() before a new one trains, or "
            f"pyro.module({names[0]!r}, network, update_module_params=True) to take the stored values."
            if names
            else ""
        )
    )


def _leaves(outputs: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that outputs depend on and that ask for gradients, other than those known."""
    # A leaf that asks for a gradient stands in the graph as the variable of its AccumulateGrad, and has none itself.
    found: dict[int, Tensor] = {id(output): output for output in outputs if output.is_leaf and output.requires_grad}
    stack: list[Any] = [output.grad_fn for output in outputs]
    seen = {None}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            found |= {id(node.variable): node.variable} if hasattr(node, "variable") else {}
            stack.extend(parent for parent, _ in node.next_functions)
    for tensor in known:
        found.pop(id(tensor), None)
    return list(found.values())


def held_parameters(source: Any) -> Iterator[tuple[Tensor, str, Optional[str]]]:
    """The tensors and modules' parameters that an object holds, however deep; what each is, and its module's name."""
    # So many objects at most: a model may refer to a whole application.
    stack, seen = [source], set[int]()
    while stack and len(seen) < 10_000:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module) and "_parameters" in vars(item):  # an adapter's copy is half a module
            for name, value in item.named_parameters():
                yield value, f"{type(item).__name__}.{name}", name
        elif isinstance(item, Tensor):
            yield item, f"a parameter of shape {tuple(item.shape)}", None
        else:
            stack.extend(_parts(item))


def _parts(item: Any) -> Iterable[Any]:
    """What an object is made of; of a function, what its code mentions by name: where a forgotten network may be."""
    if isinstance(item, (list, tuple, type, ModuleType)):
        return item if isinstance(item, (list, tuple)) else ()
    if isinstance(item, Mapping):
        return item.values()
    parts = [*getattr(item, "__dict__", {}).values(), getattr(item, "__self__", None)]
    if isinstance(item, functools.partial):
        parts += [item.func, item.args, item.keywords]
    if isinstance(item, FunctionType):
        parts += [item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__]
        for cell in item.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                parts.append(cell.cell_contents)
    return parts
