"""A likelihood read one function value at a time: log p(yₙ | fₙ) of a user's model, for each n."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from ..process import GaussianProcess
from .dependence import find_owners
from .facts import Structure
from .handlers import Rerun
from .mapping import mapped
from .traces import entries, log_densities, share_of

Owners = dict[tuple[str, str], Tensor]  # by GP site and site downstream


class Terms:
    """The log densities of a run, with all but GP values held: which of them belong to which value.

    ``owners`` are the numbers of the values that terms depend on, −1 for none;
    ``rowwise`` the GP sites of which each term stands in the row of its value.

    :param found: what is known of the model.
    :param processes: the GP sites' priors in that run.
    :param known: ``owners`` and ``rowwise`` of an earlier run, which may hold here.
    """

    def __init__(
        self, run: Rerun, found: Structure, processes: dict[str, GaussianProcess], known: tuple[Owners, set[str]]
    ) -> None:
        self.run, self.means = run, {name: process.mean.detach() for name, process in processes.items()}
        trace: Any = run(self.means)
        parts = log_densities(trace, found.gps, by_entry=True)
        shapes = {name: part.shape for name, part in parts.items() if name in found.downstream}
        # What plates leave of a site's terms because they hold some of their rows.
        self.shares = {name: share_of(trace.nodes[name]) for name in shapes}
        frames = [frame for name in shapes for frame in trace.nodes[name]["cond_indep_stack"]]
        # Of plates that have drawn some of their rows.
        frames = [frame for frame in frames if frame.size < (frame.full_size or 0)]
        self.plates = {frame.name: (int(frame.size), int(frame.full_size)) for frame in frames}
        self.differentiable = any(parts[name].requires_grad for name in shapes)
        self.owners, self.rowwise = known
        # To find them for each mini-batch would cost a run with 2 log₂ N times its rows.
        as_before = [name in self.rowwise and shapes.get(site) == o.shape for (name, site), o in self.owners.items()]
        if not as_before or not all(as_before):
            self._find(list(shapes))
        for (_, site), owner in self.owners.items():  # of a site that has others, the terms of no value
            parts[site] = torch.where(owner < 0, parts[site], 0.0)
        latents = found.latents.keys() - {site for _, site in self.owners}
        none = next(iter(processes.values())).x.new_zeros(())
        #: log densities without a GP value: of latents, and of other data.
        self.priors: Tensor = sum((part.sum() for name, part in parts.items() if name in latents), none)
        self.rest: Tensor = sum((part.sum() for name, part in parts.items() if name not in latents), none)

    def _find(self, sites: list[str]) -> None:
        """Which value each term depends on, masked or not."""

        def show(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            nodes: Any = self.run(values).nodes
            return {site: entries(nodes[site]) for site in sites}

        found = find_owners(show, self.means)[0] if sites else {}
        rows = {name: mean.shape[-1] for name, mean in self.means.items()}
        self.owners = {
            # Numbers of values (P, N), row by row: n + Np.
            (name, site): torch.where(own.touched, own.outputs * rows[name] + own.rows, -1)
            for name, by_site in found.items()
            for site, own in by_site.items()
            if own.touched.any()
        }
        self.rowwise = {*rows} - {name for (name, _), owner in self.owners.items() if not _rowwise(owner, rows[name])}

    def __contains__(self, name: str) -> bool:
        return any(name == own for own, _ in self.owners)

    def log_density(self, name: str, nodes: Tensor) -> Tensor:
        """log p(yₙ | fₙ) at nodes ``(K, ..., N)`` of GP site ``name``, of the same shape, without plates' scales."""
        owners = {site: owner for (own, site), owner in self.owners.items() if own == name}

        def at(f: Tensor) -> tuple[Tensor, ...]:
            trace = self.run({**self.means, name: f})
            parts = log_densities(trace, trace.nodes.keys() - owners.keys(), by_entry=True)
            # A plate's scale says how many data each stands for; a site is that of one.
            return tuple(parts[site] * self.shares[site] for site in owners)

        with pyro.validation_enabled(False):
            parts = mapped(at, nodes)
        total = nodes.new_zeros(len(nodes), nodes[0].numel())
        for owner, part in zip(owners.values(), parts):
            # log p(y | fₙ) = Σ of the terms that belong to fₙ.
            part = torch.where(owner < 0, 0.0, part).flatten(1).to(total.dtype)
            total = total.index_add(1, owner.clamp(min=0).flatten(), part)
        return total.reshape(nodes.shape)


def _rowwise(owner: Tensor, rows: int) -> bool:
    """Whether terms stand, along one of their dimensions, in the rows of their values, and each has one."""
    places = torch.arange(rows, device=owner.device)
    return not (owner < 0).any() and any(
        size == rows and bool((owner % rows == places.reshape(-1, *[1] * (owner.dim() - dim - 1))).all())
        for dim, size in enumerate(owner.shape)
    )
