"""What a program must be for a guide to learn from it; and what to say where it is not."""

import gc
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyro import poutine
from torch import Tensor, nn

from ..warned import Warned, warn_once
from .data import tensors
from .traces import all_sites, bare, cut_plates, sample_sites


@contextmanager
def require_known_indices() -> Iterator[None]:
    """Raise what to do, rather than an IndexError, where a program indexes what its arguments do not have."""
    try:
        yield
    except IndexError as error:
        raise ValueError(
            f"the model uses an index that these arguments do not have ({error}). Give its plate of data their number "
            "of rows, pyro.plate('data', len(x)), and index latents only by indices that they had in training."
        ) from error


def holds_part(trace: poutine.Trace) -> str:
    """Which observed site holds a mini-batch of a plate's rows, in words; empty if none does."""
    observed = ((name, site) for name, site in sample_sites(trace).items() if site["is_observed"])
    parts = (
        f"site {name!r} observes {frame.size} of the {frame.full_size} rows of plate {frame.name!r}"
        for name, site in observed
        for frame in cut_plates(site)
    )
    return next(parts, "")


def require_full_batch(name: str, family: str, trace: poutine.Trace) -> None:
    """Raise if a run's observed sites hold a mini-batch of the data, which families on sites don't take."""
    if part := holds_part(trace):
        raise ValueError(
            f"GP site {name!r} has the family {family}, which trains on all data at once; {part}. Give all rows, or "
            "take a family that trains by mini-batches, such as SVGP or OrthogonalInducing; ComputationAware(..., "
            "batches=True) does, first called on the rows of its actions alone, guide(x[rows], y[rows])."
        )


def which(bad: Tensor, what: str = "values") -> str:
    """How many are bad, and the first of them."""
    first = bad.nonzero()[0].tolist()
    return f"{int(bad.sum())} of {bad.numel()} {what}, the first at {first[0] if len(first) == 1 else tuple(first)}"


def why_without_density(site: dict[str, Any], error: Exception) -> str:
    """What to say of a site that has no density at its value."""
    # A value outside of the support is no matter of its dtype (test_robust_max.py::test_labels).
    if not site["value"].is_floating_point() and isinstance(error, RuntimeError):
        return (
            f"its dtype is {site['value'].dtype}, which {type(bare(site['fn'])).__name__} does not take ({error}). "
            "Give numbers of the inputs' dtype, y.to(x.dtype)."
        )
    nan = site["value"].isnan()
    if nan.any():
        return (
            f"{which(nan, 'are NaN')}. Drop those rows, or mask them around the site: poutine.mask(mask=~y.isnan()), of"
            " rows of several values poutine.mask(mask=~y.isnan().any(-1)). To keep the others of a row, mask single "
            "ones: dist.Normal(...).mask(~y.isnan()).to_event(...)."
        )
    # Those whose values are classes, not a tensor of totals, as Binomial's: test_robust_max.py::test_labels.
    classes = isinstance(getattr(site["fn"].support, "upper_bound", None), int)
    remedy = " Classes count from 0: where they are 1, 2, ..., give y - 1." if classes else ""
    return f"{textwrap.shorten(str(error), 400)}.{remedy}"


def warn_of_groups(warned: Warned, name: str, plates: Mapping[str, int]) -> None:
    """Warn that a prediction draws the latents of as many groups as there were in training from the model."""
    plate, size = next(iter(plates.items()))
    warn_once(
        warned,
        "groups",
        name,
        f"latent site {name!r} is drawn from the model, not as it was learned: its plate {plate!r} holds data, so "
        f"a prediction treats its {size} values as new groups. If they are the groups of training, "
        "give the data a plate of another name and of the same size, and leave the latent in its own.",
        stacklevel=2,
    )


def require_registered(outputs: Collection[Tensor], trace: poutine.Trace, args: tuple) -> list[Tensor]:
    """The parameters that SVI trains, a run's param sites; raise, with their names, if densities or posteriors, a run's
    ``outputs`` with their graph, depend on others. The model's arguments may ask for gradients of their own.
    """
    sites = [site["value"] for _, site in all_sites(trace) if site["type"] == "param"]
    # With module_local_params a plain parameter is its own: test_guide.py::test_module_local_parameters.
    known = [getattr(value, "unconstrained", lambda value=value: value)() for value in sites]
    # A leaf that asks for a gradient stands in the graph as the variable of its AccumulateGrad, and has none itself.
    leaves = [output for output in outputs if output.is_leaf and output.requires_grad]
    leaves += [node.variable for node in graph_of(outputs) if hasattr(node, "variable")]
    trained = {id(tensor) for tensor in (*known, *tensors(args))}
    forgotten = list({id(leaf): leaf for leaf in leaves if id(leaf) not in trained}.values())
    if not forgotten:
        return [value for value in sites if value.is_leaf]
    # Whatever holds them: a closure, a global, an object of the user's.
    modules = [held for held in gc.get_objects() if issubclass(type(held), nn.Module) and "_parameters" in vars(held)]
    places = [(f"{type(m).__name__}.{path}", held) for m in modules for path, held in m.named_parameters()]
    at = {id(held): label for label, held in sorted(places, key=lambda place: place[0].count("."))}
    found = [at.get(id(leaf), f"a parameter of shape {tuple(leaf.shape)}") for leaf in forgotten]
    raise ValueError(
        f"these parameters would not train: {', '.join(found)}. SVI trains "
        "what the model registers: call pyro.module('name', network) in the model, make the model a PyroModule "
        "that has the network as an attribute, or use pyro.param; freeze it with requires_grad_(False) if it "
        "should stay as it is. If it is registered, Pyro's store has another of that name (a notebook's cell run "
        "twice, a store loaded): call pyro.clear_param_store() before a new one trains, or "
        "pyro.module('name', network, update_module_params=True) to take the stored values."
    )


def graph_of(outputs: Iterable[Tensor]) -> list[Any]:
    """The nodes of autograd's graph that tensors are made of."""
    stack: list[Any] = [output.grad_fn for output in outputs]
    seen: dict[Any, None] = {None: None}  # a leaf's, which is no node
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(before for before, _ in node.next_functions)
    return [*seen][1:]
