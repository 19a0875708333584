"""Expectations that a distribution brings along: E[log p(y | θ)] for a parameter θ of independent normal entries.

A Pyro distribution takes part by :class:`ExpectedLogProb`: it names that parameter and has one more method. That θ is
normal with independent entries is found by trying, in the model as it is written: it is, if each entry is an affine
function of one function value (so transposing, indexing, scaling and adding offsets are fine) and the entries of one
term come from different outputs or GP sites. Then θ at the means of q is θ's mean, and what it changes by one standard
deviation further up is its standard deviation, whatever the model did to get there.

Normal likelihoods are taken the same way where they are all that depends on function values, E[log N(y | μ, s²)] =
log N(y | E μ, s²) − Var[μ]/2s², whatever values μ is an affine function of: f itself, since that is what trains most
often, for which the model runs once, at q's mean; several values of a row; values of several inputs, such as averages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Optional, Protocol, Union, runtime_checkable

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor

from ..guide import AutoSparseGP
from ..posterior.sparse_posterior import SparsePosterior
from ..program import dependence as dependences
from ..program.affine import (
    MOVES,
    NORMAL,
    are_normal_around_affine,
    is_affine,
    others_follow,
    others_move,
    parameter_of,
)
from ..program.facts import Structure
from ..program.registration import Probe
from ..program.traces import (
    all_sites,
    as_leaves,
    bare,
    free_values,
    held_trace,
    is_observation,
    log_densities,
    repeatable,
    without_event,
)
from ..program.zeros import OffZero
from .axes import quadrature_axes
from .locations import Run, variances_by_axes, variances_by_rows

__all__ = ["AroundValues", "AtMeans", "Brought", "Expectations", "ExpectedLogProb", "find_expectations"]

_MOST_AXES = 8  # each of which takes a run of the model


@runtime_checkable
class ExpectedLogProb(Protocol):
    """A distribution that knows E[log p(y | θ)] for θ ~ N(its own θ, variance), entry by entry independent.

    :cvar normal_parameter: the name of θ among its parameters, an attribute of shape ``batch_shape + (...)``.
    """

    normal_parameter: ClassVar[str]

    def expected_log_prob(self, value: Tensor, variance: Tensor) -> Tensor:
        """E[log p(value | θ)], of the shape of ``log_prob(value)``.

        :param variance: of θ's shape; 0 for entries that are constant.
        """


@dataclass(frozen=True)
class Expectations(ABC):
    """What was found out about one model.

    :param sites: the sites whose expectations are known.
    :param gps: the GP sites that these depend on.
    """

    sites: tuple[str, ...]
    gps: tuple[str, ...]

    def total(
        self,
        model: Callable,
        traces: tuple[poutine.Trace, poutine.Trace],
        values: dict[str, Tensor],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The sum of these sites' expectations under q's marginals, scaled and masked.

        :param traces: the model's and the guide's, GP sites at their means.
        :param values: those of all sites in them.
        """
        model_trace, guide_trace = traces

        def run(moved: dict[str, Tensor]) -> Any:
            with pyro.validation_enabled(False):
                return held_trace(model, values | moved, args, kwargs, model_trace).nodes

        sites: Any = model_trace.nodes
        total: Any = 0.0
        for name, variance in self.variances(run, sites, guide_trace).items():
            site = sites[name]
            expectation = _expectation(site["fn"], site["value"], variance)
            total = total + scale_and_mask(expectation, site["scale"], site["mask"]).sum()
        return total

    @abstractmethod
    def variances(self, run: Run, sites: Any, guide_trace: poutine.Trace) -> dict[str, Tensor]:
        """Those of the parameters under q, by site.

        :param run: gives the sites of a run with GP sites at values, all else held.
        :param sites: of the run at the means.
        """


@dataclass(frozen=True)
class Brought(Expectations):
    """Sites whose distributions bring their expectations.

    :param rest: how all other densities depend on function values; GP sites that none depends on are left out.
    """

    rest: Structure

    def variances(self, run: Run, sites: Any, guide_trace: poutine.Trace) -> dict[str, Tensor]:
        up = {}
        for name in self.gps:
            q = posterior_at(guide_trace, name)
            up[name] = q.mean + q.stddev
        moved = run(up)
        shifts = {name: parameter_of(moved[name]["fn"]) - parameter_of(sites[name]["fn"]) for name in self.sites}
        return {name: shift.square() for name, shift in shifts.items()}


@dataclass(frozen=True)
class AtMeans(Expectations):
    """Sites that are normal, around affine functions of function values: no other density depends on these."""

    def hold(self, sites: Any) -> bool:
        """Whether a run's sites are as they were found."""
        return all(name in sites and type(bare(sites[name]["fn"])) in NORMAL for name in self.sites)


@dataclass(frozen=True)
class AroundValues(AtMeans):
    """Sites that are normal around GP sites' values as they are.

    :param values: these GP sites, by site.
    """

    values: dict[str, str]

    def variances(self, run: Run, sites: Any, guide_trace: poutine.Trace) -> dict[str, Tensor]:
        found = {}
        for name, gp in self.values.items():
            found[name] = posterior_at(guide_trace, gp).variance
        return found

    def hold(self, sites: Any) -> bool:
        return all(
            name in sites and _is_normal_around(sites[name], sites[gp]["value"]) for name, gp in self.values.items()
        )


@dataclass(frozen=True)
class AroundRows(AtMeans):
    """Sites that are normal around affine functions of the values of one row.

    :param axes: which of these are independent under q once they are standardised, by GP site.
    """

    axes: dict[str, tuple[int, ...]]

    def variances(self, run: Run, sites: Any, guide_trace: poutine.Trace) -> dict[str, Tensor]:
        posteriors = {gp: posterior_at(guide_trace, gp) for gp in self.gps}
        return variances_by_axes(run, posteriors, self.axes, {name: bare(sites[name]["fn"]) for name in self.sites})


@dataclass(frozen=True)
class AroundFunctions(AtMeans):
    """Sites that are normal around affine functions of the values of several inputs."""

    def variances(self, run: Run, sites: Any, guide_trace: poutine.Trace) -> dict[str, Tensor]:
        return variances_by_rows(run, {gp: posterior_at(guide_trace, gp) for gp in self.gps}, self.sites)


def posterior_at(guide_trace: poutine.Trace, name: str) -> Any:
    """The posterior that the guide answered with at a GP site."""
    return without_event(guide_trace.nodes[name]["fn"])[0]


def joint_or_marginal_draw(q: SparsePosterior, coupled: bool) -> Tensor:
    """A draw of a site's values: joint where densities couple them, else of the marginals."""
    return SparsePosterior.rsample(q) if coupled else q.marginals.rsample()


def _is_normal_around(site: Any, f: Tensor) -> bool:
    """Whether a site is normal with a GP site's values, in their own memory, as its mean."""
    fn = bare(site["fn"])
    if type(fn) is not dist.Normal:
        return False
    loc = fn.loc
    return loc.shape == f.shape and loc.stride() == f.stride() and loc.data_ptr() == f.data_ptr()


def _expectation(fn: Any, value: Tensor, variance: Tensor) -> Tensor:
    if isinstance(fn, torch.distributions.Independent):
        return sum_rightmost(_expectation(fn.base_dist, value, variance), fn.reinterpreted_batch_ndims)
    if isinstance(fn, MaskedDistribution):
        return scale_and_mask(_expectation(fn.base_dist, value, variance), mask=fn._mask)
    if isinstance(fn, ExpandedDistribution):
        return _expectation(fn.base_dist, value, variance)
    if isinstance(fn, torch.distributions.Normal):
        return fn.log_prob(value) - variance / (2 * fn.scale.square())
    if isinstance(fn, NORMAL):
        return fn.log_prob(value) - 0.5 * variance.sum(-1)
    return fn.expected_log_prob(value, variance)


@torch.no_grad()
def find_expectations(
    guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any], warn: Callable[[str, str], None]
) -> Optional[Union[AtMeans, Brought]]:
    """The sites of a model whose distributions bring their expectations, and may be asked for them; or ``None``.

    :param warn: told, by name and in words, about sites whose parameter is not of the kind wanted: they are
        integrated as others are.
    :raises ValueError: naming the site, if such a one is piecewise constant, so that draws would give no gradient.
    """
    assert guide.structure is not None
    found = guide.structure
    if found.affine:
        return AroundFunctions(tuple(found.downstream), tuple(found.entering))
    outer = [name for name in found.gps if name not in found.inner]
    zero = guide.like.new_zeros(())
    probe = guide.probe(args, kwargs)
    candidates = [
        name
        for name, site in all_sites(guide.trace)
        if is_observation(site) and isinstance(bare(site["fn"]), ExpectedLogProb)
    ]
    if not candidates:
        return _around_values(guide, probe, args, kwargs) or _around_rows(guide, probe, args, kwargs)
    with repeatable(guide.like), poutine.block(), pyro.validation_enabled(False):
        nodes = dict.fromkeys(outer, zero)
        trace, guide_trace, values = guide.at_nodes(nodes, guide, args, kwargs)
        sites: Any = trace.nodes
        start = {name: (values[name], posterior_at(guide_trace, name).process.variance.sqrt()) for name in outer}
        run = partial(_run, guide.model, values, args, kwargs)
        owners: dict[str, set[str]] = {}
        for name in candidates:
            owning = _owning_sites(run, start, name)
            if isinstance(owning, set) and any(len(found.company(gp)) > 1 for gp in owning):
                owning = f"its GP sites {sorted(owning)} have one posterior, or have it with others that they meet"
            if isinstance(owning, set):
                owners[name] = owning
                continue
            fn = bare(sites[name]["fn"])
            complaint = (
                f"site {name!r} has the distribution {type(fn).__name__}, which brings its own expectation over normal "
                f"{fn.normal_parameter}, but here {owning}"
            )
            if getattr(fn, "piecewise_constant", False):
                raise ValueError(
                    f"{complaint}. It is piecewise constant, so that draws of function values would give no gradient: "
                    "give it one output of a GP for each entry, scaled or shifted at most, or take a likelihood with a "
                    "gradient, such as Categorical(logits=...)."
                )
            warn(name, f"{complaint}: it is integrated like any other density.")
        owners = {name: gps for name, gps in owners.items() if gps}
        if not owners:
            return None
        rest = _rest(found, run, start, set(owners))
    return Brought(tuple(owners), tuple(sorted(set().union(*owners.values()))), rest)


def _run(
    model: Callable, values: dict[str, Tensor], args: tuple, kwargs: dict[str, Any], moved: dict[str, Tensor]
) -> poutine.Trace:
    return held_trace(OffZero()(model), values | moved, args, kwargs)


def _around_values(guide: AutoSparseGP, probe: Probe, args: tuple, kwargs: dict[str, Any]) -> Optional[AtMeans]:
    """What there is to know of a model of whose densities none but normal ones around GP sites' values depend on them.

    :param probe: of the guide's last run.
    """
    found = guide.structure
    assert found is not None
    nodes: Any = guide.trace.nodes
    kinds = {name: found.dependence[name] for name in found.entering}
    if found.inner or found.interactions or found.enumerated or set(kinds.values()) != {dependences.ELEMENTWISE}:
        return None
    values: dict[str, str] = {}
    for name in found.downstream:
        owners = [gp for gp in kinds if name in nodes and _is_normal_around(nodes[name], nodes[gp]["value"])]
        if len(owners) != 1 or not is_observation(nodes[name]):
            return None
        values[name] = owners[0]
    if set(values.values()) != set(kinds):
        return None
    held = as_leaves(free_values(guide.trace))
    up = {gp: (held[gp] + probe.posteriors[gp].process.variance.sqrt()).detach().requires_grad_() for gp in kinds}
    with repeatable(guide.like), poutine.block(), pyro.validation_enabled(False), torch.enable_grad():
        moved: Any = held_trace(guide.model, held | up, args, kwargs).nodes
        if any(others_follow(moved[name]["fn"], list(up.values())) for name in values):
            return None
    if any(others_move(nodes[name], moved[name]) for name in values):
        return None
    return AroundValues(tuple(values), tuple(kinds), values)


def _around_rows(guide: AutoSparseGP, probe: Probe, args: tuple, kwargs: dict[str, Any]) -> Optional[AtMeans]:
    """What there is to know of a model of whose densities none but normal ones around affine functions of a row's
    values depend on them. A network runs once a step, not once more for each axis.

    :param probe: of the guide's last run.
    """
    found = guide.structure
    assert found is not None
    sites: Any = guide.trace.nodes
    kinds = {name: found.dependence[name] for name in found.entering}
    axes = quadrature_axes(replace(found, dependence=kinds), _MOST_AXES)
    if found.inner or found.enumerated or found.network or not kinds or set(axes) != set(kinds):
        return None
    if any(name not in sites or type(bare(sites[name]["fn"])) not in NORMAL for name in found.downstream):
        return None
    held = as_leaves(free_values(guide.trace))
    starts = {name: (held[name], probe.posteriors[name].process.variance.sqrt()) for name in kinds}
    with repeatable(guide.like), poutine.block(), pyro.validation_enabled(False):
        run = partial(_run, guide.model, held, args, kwargs)
        if not are_normal_around_affine(found.downstream, starts, run):
            return None
    return AroundRows(tuple(found.downstream), tuple(kinds), axes)


Traced = Callable[[dict[str, Tensor]], poutine.Trace]
Start = dict[str, tuple[Tensor, Tensor]]  # values and spread of each GP site


def _owning_sites(run: Traced, start: Start, name: str) -> Any:
    """The GP sites whose values the parameter of site ``name`` is made of; or why it is not normal and independent."""

    def parameter(moved: dict[str, Tensor]) -> Tensor:
        return parameter_of(run(moved).nodes[name]["fn"])

    def alone(gp: str, value: Tensor) -> dict[str, Tensor]:
        return {name: parameter({gp: value})}

    def along(size: float) -> dict[str, Tensor]:
        return {gp: f + size * step[gp] for gp, (f, _) in start.items()}

    generator = torch.Generator().manual_seed(0)
    step = {gp: dependences.uneven(f, spread, generator) for gp, (f, spread) in start.items()}
    sites: dict[float, Any] = {size: run(along(size)).nodes[name] for size in MOVES}
    base = sites[0.0]
    middle = parameter_of(base["fn"])
    if not is_affine({size: parameter_of(site["fn"]) for size, site in sites.items()}):
        return "this is not an affine function of function values"
    if others_move(base, sites[1.0]):
        return "another of its parameters, or its scale or mask, depends on function values too"
    # Independent functions (a GP site has one for each output) are numbered across sites.
    owner = torch.full(middle.shape, -1, device=middle.device)  # of each entry: its function
    owning: set[str] = set()
    functions = 0
    for gp, (f, _) in start.items():
        found = dependences.owners(partial(alone, gp), f, f + step[gp])[name]
        if found is None:
            return "an entry depends on several function values"
        moves = found >= 0
        if (moves & (owner >= 0)).any():
            return "an entry depends on values of several GP sites"
        if moves.any():
            owning.add(gp)
        rows = f.shape[-1]
        owner = torch.where(moves, functions + found // rows, owner)
        functions += f.numel() // rows
    event_dim = middle.dim() - len(bare(base["fn"]).batch_shape)
    if event_dim:
        ordered = owner.flatten(-event_dim).sort(-1).values
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            return "entries of one term depend on one another, being values of the same function"
    return owning


def _rest(found: Structure, run: Traced, start: Start, sites: set[str]) -> Structure:
    """The structure of all densities but those of ``sites``."""
    skip = sites | set(found.gps)

    def evaluate(moved: dict[str, Tensor]) -> list[Tensor]:
        return list(log_densities(run(moved), skip).values())

    def alone(gp: str, f: Tensor) -> list[Tensor]:
        return evaluate({gp: f})

    def both(f: str, g: str, a: Tensor, b: Tensor) -> list[Tensor]:
        return evaluate({f: a, g: b})

    kinds = {gp: dependences.dependence(partial(alone, gp), *start[gp]) for gp in start}
    left = {gp: kind for gp, kind in kinds.items() if kind != dependences.NONE}
    pairs = [
        [f, g]
        for f, g in found.interactions
        if f in left and g in left and dependences.interact(partial(both, f, g), start[f], start[g])
    ]
    return replace(found, dependence=left, interactions=pairs)
