"""A likelihood read one function value at a time: log p(yₙ | fₙ) of a user's model, for each n."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import pyro
import torch
from torch import Tensor

from ..process import GaussianProcess
from .bare import bare, without_event
from .dependence import find_owners
from .facts import Structure
from .traces import element_log_densities, held_trace, require_again

__all__ = ["Findings", "InseparableError", "Terms"]


class InseparableError(ValueError):
    """One number is the log density of several function values."""


@dataclass
class Findings:
    """What was found out about a model's terms in one run and holds in others.

    :param owners: by GP site and site downstream, the number of the value that each term depends on, −1 for none;
        ``None`` where the numbers are the places.
    :param rowwise: GP sites of which each term stands in the row of its value.
    :param looped: vmap has refused the model.
    """

    owners: dict[str, dict[str, Optional[Tensor]]] = field(default_factory=dict)
    rowwise: set[str] = field(default_factory=set)
    looped: bool = False


class Terms:
    """The log densities of a run, with all but GP values held: which of them belong to which value.

    :param found: what is known of the model.
    :param values: of all latents and of the plates' row numbers.
    :param processes: the GP sites' priors in that run.
    :param findings: of earlier runs.
    :raises InseparableError: naming the site, if one number is the log density of several values.
    """

    def __init__(
        self,
        model: Callable,
        found: Structure,
        values: dict[str, Tensor],
        processes: dict[str, GaussianProcess],
        args: tuple,
        kwargs: dict[str, Any],
        findings: Findings,
    ) -> None:
        self.structure, self.model, self.args, self.kwargs = found, model, args, kwargs
        self.findings = findings
        self.values = values | {name: process.mean.detach() for name, process in processes.items()}
        trace = held_trace(self.model, self.values, args, kwargs)
        parts = element_log_densities(trace, self.structure.gps)
        downstream = [name for name in parts if name in self.structure.downstream]
        self.factors = {name: _subsampling(trace.nodes[name]) for name in downstream}
        self.plates = {
            frame.name: (int(frame.size), int(frame.full_size))
            for name in downstream
            for frame in trace.nodes[name]["cond_indep_stack"]
            if frame.full_size is not None and frame.size < frame.full_size
        }
        self.differentiable = any(parts[name].requires_grad for name in downstream)
        shapes = {name: parts[name].shape for name in downstream}
        if not self._known(shapes):
            self._find(processes, downstream)
        zero = next(iter(processes.values())).x.new_zeros(())
        #: log densities without a GP value: of latents, and of other data.
        self.priors: Tensor = zero
        self.rest: Tensor = zero
        for name, part in parts.items():
            free = [owners[name] for owners in findings.owners.values() if name in owners]
            if not free and name in self.structure.latents:
                self.priors = self.priors + part.sum()
            elif not free:
                self.rest = self.rest + part.sum()
            elif all(owner is not None for owner in free):
                unowned = torch.stack([owner < 0 for owner in free if owner is not None]).all(0)
                self.rest = self.rest + torch.where(unowned, part, 0.0).sum()

    def _known(self, shapes: dict[str, torch.Size]) -> bool:
        """Whether what was found holds for terms of these shapes: where they stand in rows of their values."""
        found = self.findings
        if not found.owners or found.rowwise != set(found.owners):
            return False
        return all(
            site in shapes and shapes[site] == (self.values[name].shape if owner is None else owner.shape)
            for name, owners in found.owners.items()
            for site, owner in owners.items()
        )

    def _find(self, processes: dict[str, GaussianProcess], downstream: list[str]) -> None:
        found = self.findings
        every = self._owners(processes, downstream) if downstream else {}
        found.owners, found.rowwise = {}, set()
        for name, owners in every.items():
            shape = self.values[name].shape
            numbers = torch.arange(shape.numel(), device=self.values[name].device).reshape(shape)
            own: dict[str, Optional[Tensor]] = {}
            for site, owner in owners.items():
                if (owner < 0).all():
                    continue
                shared = any((others[site] >= 0).any() for other, others in every.items() if other != name)
                # A term without a value may stand in its row, if it is nobody else's.
                in_place = owner.shape == shape and bool(((owner == numbers) | ((owner < 0) & (not shared))).all())
                own[site] = None if in_place else owner
            found.owners[name] = own
            if all(owner is None or _rowwise(owner, shape[-1]) for owner in own.values()):
                found.rowwise.add(name)

    def __contains__(self, name: str) -> bool:
        return bool(self.findings.owners.get(name))

    def log_density(self, name: str, nodes: Tensor) -> Tensor:
        """log p(yₙ | fₙ) at nodes ``(K, ..., N)`` of GP site ``name``, of the same shape, without plates' scales."""
        owners = self.findings.owners[name]

        def at(f: Tensor) -> dict[str, Tensor]:
            return self._parts(name, f, owners)

        with pyro.validation_enabled(False):
            parts = None
            if not self.findings.looped:
                at_once = functools.partial(torch.func.vmap(at, randomness="same"), nodes)
                try:
                    parts = at_once()
                except (RuntimeError, TypeError) as error:
                    require_again(error, at_once, nodes)
                    self.findings.looped = True
            if parts is None:
                each = [at(node) for node in nodes]
                parts = {site: torch.stack([part[site] for part in each]) for site in owners}
        found: list[Tensor] = []
        for site, part in parts.items():
            owner = owners[site]
            if owner is None:
                found.append(part)
            else:
                flat = nodes.new_zeros(len(nodes), nodes[0].numel())
                kept = owner >= 0
                flat = flat.index_add(1, owner[kept], part[:, kept].to(flat.dtype))
                found.append(flat.reshape(nodes.shape))
        return functools.reduce(torch.add, found).expand(nodes.shape).to(nodes.dtype)

    def _parts(self, name: str, f: Tensor, sites: Any) -> dict[str, Tensor]:
        trace = held_trace(self.model, self.values | {name: f}, self.args, self.kwargs)
        skip = [site for site in trace.nodes if site not in sites]
        parts = element_log_densities(trace, skip)
        return {site: part if self.factors[site] == 1 else part / self.factors[site] for site, part in parts.items()}

    def _owners(self, processes: dict[str, GaussianProcess], sites: list[str]) -> dict[str, dict[str, Tensor]]:
        """By GP site and site, the number of the value that each term depends on, masked or not, −1 for none."""

        def show(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            trace = held_trace(self.model, {**self.values, **values}, self.args, self.kwargs)
            fns = {site: without_event(trace.nodes[site]["fn"])[0] for site in sites}
            parts = {site: bare(fn).log_prob(trace.nodes[site]["value"]) for site, fn in fns.items()}
            return {site: part.expand(fns[site].shape()[: part.dim()]) for site, part in parts.items()}

        base = {name: self.values[name] for name in processes}
        steps = {name: process.variance.sqrt().detach() for name, process in processes.items()}
        found, _ = find_owners(show, base, steps, list(processes), ())
        owners: dict[str, dict[str, Tensor]] = {}
        for name, by_site in found.items():
            owners[name] = {}
            for site, own in by_site.items():
                if (own.touched & ((own.rows < 0) | (own.outputs < 0))).any():
                    raise InseparableError(
                        f"site {site!r} has one log density for several values of GP site {name!r}: "
                        "expectation propagation needs one for each. Use a distribution of single values, in "
                        "a plate or with .to_event, or take SVI with TraceQuadrature_ELBO."
                    )
                owners[name][site] = torch.where(own.touched, own.outputs * base[name].shape[-1] + own.rows, -1)
        return owners


def _rowwise(owner: Tensor, rows: int) -> bool:
    """Whether terms stand, along one of their dimensions, in the rows of their values, and each has one."""
    if (owner < 0).any():
        return False
    places = torch.arange(rows, device=owner.device)
    return any(
        size == rows and bool((owner % rows == places.reshape(-1, *[1] * (owner.dim() - dim - 1))).all())
        for dim, size in enumerate(owner.shape)
    )


def _subsampling(site: Any) -> float:
    """What plates scale a site's terms by because they hold some of their rows."""
    factor = 1.0
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.size:
            factor *= frame.full_size / frame.size
    return factor
