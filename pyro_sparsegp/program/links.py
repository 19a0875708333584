"""Links, under which parameters are affine functions of a program's normal values."""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.nn.functional import pad

from .asking import asks_program, attempt
from .checks import graph_of
from .owners import Values
from .structure import MAX_AXES
from .traces import arguments_of, bare, constraints_of, parameters

# By name the link η(θ) and its inverse θ(η). A parameter that is a vector has its numbers last; those of classes are
# known by what each one's logit has over the first one's.
LINKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "identity": (lambda t: t, lambda t: t),
    "log": (torch.log, torch.exp),
    "softplus": (lambda t: t + (-torch.expm1(-t)).log(), torch.nn.functional.softplus),
    "logit": (torch.logit, torch.sigmoid),
    "probit": (torch.special.ndtri, torch.special.ndtr),
    "contrast": (lambda t: t[..., 1:] - t[..., :1], lambda t: pad(t, (1, 0))),
    "log odds": (lambda t: (t[..., 1:] / t[..., :1]).log(), lambda t: pad(t, (1, 0)).softmax(-1)),
}


def event_dim_of(fn: TorchDistribution, parameter: str) -> int:
    """The number of a parameter's dimensions within a datum."""
    support = constraints_of(fn).get(parameter, constraints.real)
    return 0 if constraints.is_dependent(support) else support.event_dim  # which may not be known


def candidates(fn: TorchDistribution, parameter: str) -> list[str]:
    """The links of a parameter's range, the most common first."""
    support = constraints_of(fn).get(parameter, constraints.real)
    known = {
        constraints.real: ["identity"] if event_dim_of(fn, parameter) == 0 else ["contrast", "identity"],
        constraints.unit_interval: ["logit", "probit"],
        constraints.simplex: ["log odds"],
        constraints.ordered_vector: ["identity"],
    }
    return known.get(getattr(support, "base_constraint", support), ["log", "softplus"])


def rebuilt(fn: Any, changed: Mapping[str, Tensor]) -> Any:
    """The distribution with other values of some parameters."""
    kind: Any = type(fn)
    # beside tensors, such as a Multinomial's total_count
    given = {**vars(fn), "validate_args": False}
    names = [name for name in arguments_of(kind) if isinstance(given.get(name), (int, float, str))]
    with asks_program():  # a subclass may be made of other arguments
        return kind(**{name: given[name] for name in names}, **{**parameters(fn), **changed})


def is_made_of_parameters(fn: Any, value: Tensor) -> bool:
    """Whether log densities can be made anew of :func:`parameters`; numbers tell whether a subclass is more."""
    with attempt(), asks_program():
        return torch.allclose(rebuilt(fn, {}).log_prob(value), fn.log_prob(value))
    return False


Parts = Mapping[str, tuple[str, str]]  # by parameter the GP site and the link
Beside = Mapping[str, Collection[str]]  # a parameter with a closed form, by name: the GP sites that it is made of
Moved = Mapping[tuple[str, str], tuple[Tensor, Tensor]]  # by parameter and GP site, both at moves: the second first


def values_of(site: dict[str, Any], keys: Collection[str], beside: Beside, leaves: Values, moved: Moved) -> Parts:
    """Of single data whose parameters are each another GP site's values under a link: these; else none.

    :param keys: what of a site depends on GP sites; ``leaves``: their values.
    """
    fn, own = bare(site["fn"]), dict.fromkeys(beside, ("", "identity"))
    for key, part in [(key, part) for key, part in parameters(fn).items() if key in {*keys} - beside.keys()]:
        alone = [gp for gp, leaf in leaves.items() if _is_alone(part, leaf) and leaf.shape == fn.batch_shape]
        tried = [(gp, link, *moved[key, gp]) for gp in alone for link in candidates(fn, key)]
        under = [
            (gp, link) for gp, link, values, parts in tried if torch.allclose(LINKS[link][1](values), parts, atol=0.0)
        ]
        own |= dict(zip([key], under))
    gps = [*chain(*beside.values()), *(gp for gp, _ in own.values())]
    is_single = own.keys() == {*keys} and not fn.event_shape and 0 < len(own) <= MAX_AXES and len({*gps}) == len(gps)
    return own if is_single and is_made_of_parameters(fn, site["value"]) else {}


def _is_alone(part: Tensor, leaf: Tensor) -> bool:
    """Whether a parameter has the shape of a leaf and is made of it by functions of one tensor, and of nothing else."""
    nodes = graph_of([part])
    made_of = [part, *(node.variable for node in nodes if hasattr(node, "variable"))][-1]
    edges, kept = [len(node.next_functions) for node in nodes], {name for node in nodes for name in dir(node)}
    # A function with rows' numbers has others at other data.
    is_chain = max(edges, default=0) < 2 and kept.isdisjoint({"_saved_index", "_saved_indices"})
    return made_of is leaf and part.shape == leaf.shape and is_chain
