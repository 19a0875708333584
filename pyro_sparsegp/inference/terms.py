"""A likelihood read one function value at a time: log p(yₙ | fₙ) of a user's model, for each n."""

from __future__ import annotations

from typing import Any, Optional

import pyro
import torch
from torch import Tensor

from ..guide import AutoSparseGP
from ..likelihood import held_trace, log_densities
from ..process import GaussianProcess

__all__ = ["Terms"]


class Terms:
    """The log densities of a run, with all but GP values held: which of them belong to which value.

    :param values: of all latents and of the plates' row numbers.
    :param processes: the GP sites' priors in that run.
    :param like: those of an earlier run of the model: what was found out about it need not be found again.
    """

    def __init__(
        self,
        guide: AutoSparseGP,
        values: dict[str, Tensor],
        processes: dict[str, GaussianProcess],
        args: tuple,
        kwargs: dict[str, Any],
        like: Optional[Terms] = None,
    ) -> None:
        assert guide.structure is not None
        self.structure, self.model, self.args, self.kwargs = guide.structure, guide.model, args, kwargs
        self.looped: bool = like is not None and like.looped  # vmap has refused this model
        self.values = values | {name: process.mean.detach() for name, process in processes.items()}
        trace = held_trace(self.model, self.values, args, kwargs)
        parts = log_densities(trace, self.structure.gps)
        downstream = [name for name in parts if name in self.structure.downstream]
        self.factors = {name: _subsampling(trace.nodes[name]) for name in downstream}
        self.plates = {
            frame.name: (int(frame.size), int(frame.full_size))
            for name in downstream
            for frame in trace.nodes[name]["cond_indep_stack"]
            if frame.full_size is not None and frame.size < frame.full_size
        }
        self.differentiable = any(parts[name].requires_grad for name in downstream)
        self._owners: dict[str, dict[str, Optional[Tensor]]] = {}
        for name in processes if downstream else ():
            known = like._owners[name] if like is not None and name in like._owners and like.aligned(name) else None
            if known is not None and all(parts[site].shape == self.values[name].shape for site in known):
                self._owners[name] = known
            else:
                self._owners[name] = self._find_owners(name, processes[name], downstream)
        owned = {site for owners in self._owners.values() for site in owners}
        zero = guide.like.new_zeros(())
        #: log densities without a GP value: of latents, and of other data.
        self.priors: Tensor = zero
        self.rest: Tensor = zero
        for name, part in parts.items():
            if name in self.structure.latents and name not in owned:
                self.priors = self.priors + part.sum()
            elif name not in owned:
                self.rest = self.rest + part.sum()
        for owners in self._owners.values():
            for site, owner in owners.items():
                if owner is not None:
                    self.rest = self.rest + parts[site][owner < 0].sum()

    def __contains__(self, name: str) -> bool:
        return bool(self._owners.get(name))

    def aligned(self, name: str) -> bool:
        """Whether each term's place is that of its value, so that values of some rows have all their terms."""
        return all(owner is None for owner in self._owners[name].values())

    def log_density(self, name: str, nodes: Tensor) -> Tensor:
        """log p(yₙ | fₙ) at nodes ``(K, ..., N)`` of GP site ``name``, of the same shape, without plates' scales."""
        owners = self._owners[name]

        def at(f: Tensor) -> dict[str, Tensor]:
            return self._parts(name, f, owners)

        with pyro.validation_enabled(False):
            parts = None
            if not self.looped:
                try:
                    parts = torch.func.vmap(at, randomness="same")(nodes)
                except (RuntimeError, TypeError):
                    self.looped = True
            if parts is None:
                each = [at(node) for node in nodes]
                parts = {site: torch.stack([part[site] for part in each]) for site in owners}
        total = nodes.new_zeros(())
        for site, part in parts.items():
            owner = owners[site]
            if owner is None:
                total = total + part
            else:
                flat = nodes.new_zeros(len(nodes), nodes[0].numel())
                kept = owner >= 0
                flat = flat.index_add(1, owner[kept], part[:, kept].to(flat.dtype))
                total = total + flat.reshape(nodes.shape)
        return total.expand(nodes.shape)

    def _parts(self, name: str, f: Tensor, sites: Any) -> dict[str, Tensor]:
        trace = held_trace(self.model, self.values | {name: f}, self.args, self.kwargs)
        skip = [site for site in trace.nodes if site not in sites]
        return {site: part / self.factors[site] for site, part in log_densities(trace, skip).items()}

    @torch.no_grad()
    def _find_owners(self, name: str, process: GaussianProcess, sites: list[str]) -> dict[str, Optional[Tensor]]:
        """For each site that f reaches, the number of the value that each term depends on, −1 for none; ``None``
        where the numbers are the places.
        """
        f, spread = self.values[name], process.variance.sqrt()
        numbers = torch.arange(f.numel(), device=f.device).reshape(f.shape)

        def at(value: Tensor) -> dict[str, Tensor]:
            return self._parts(name, value, sites)

        owners: dict[str, Tensor] = {}
        with pyro.validation_enabled(False):
            base = at(f)
            for step in (spread, -spread, 0.1 * spread):  # a term may be flat on one side
                moved = at(f + step)
                changed = {site: _differ(moved[site], base[site]) for site in sites}
                found = {
                    site: torch.zeros(part.shape, dtype=torch.long, device=f.device) for site, part in base.items()
                }
                for bit in range(max(f.numel() - 1, 1).bit_length()):
                    part = at(torch.where((numbers >> bit) & 1 == 1, f + step, f))
                    for site in sites:
                        found[site] |= _differ(part[site], base[site]).long() << bit
                for site in sites:
                    found[site] = torch.where(
                        changed[site], found[site], owners.get(site, torch.full_like(found[site], -1))
                    )
                    owners[site] = found[site]
                if all((owner >= 0).all() for owner in owners.values()):
                    break
        own: dict[str, Optional[Tensor]] = {}
        for site, owner in owners.items():
            if (owner < 0).all():
                continue
            in_place = owner.shape == f.shape and ((owner == numbers) | (owner < 0)).all()
            own[site] = None if in_place else owner
        return own


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def _subsampling(site: Any) -> float:
    """What plates scale a site's terms by because they hold some of their rows."""
    factor = 1.0
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.size:
            factor *= frame.full_size / frame.size
    return factor
