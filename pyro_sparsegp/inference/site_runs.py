"""GP sites in one run of the model, and which of the sites of expectation propagation its data have."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Optional

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.expectation import ExpectationGP
from ..gaussians.sites import Sites
from ..guide import AutoSparseGP
from ..numerics.linalg import row_squares, side_by_side, variance_floor
from ..numerics.rows import Objects, fingerprints
from ..process import GaussianProcess
from ..program.data import tensors
from ..program.dependence import NONE
from ..program.terms import Terms
from ..program.traces import all_sites, is_observation

__all__ = ["SiteRun"]


@dataclass
class SiteRun:
    """One GP site in one run of the model, and its sites as they are.

    :param phi: Φ at the data given, ``(..., B, M)``, with its graph.
    :param residual: d, with its graph.
    :param prior_mean: μ, with its graph.
    :param spread: f's prior standard deviation.
    :param index: the row numbers of the data given; ``None`` for all.
    :param num: how many data there are.
    :param anchor: L, with its graph, where the sites are about u = Lw.
    :param sites: at the features that they are about, of the data given.
    :param order: the sites' numbers where all data are given in another order.
    :param given: all data given, by the tensors that they are, and their fingerprints, if not those of the call before.
    """

    name: str
    module: ExpectationGP
    phi: Tensor
    residual: Tensor
    prior_mean: Tensor
    spread: Tensor
    index: Optional[Tensor]
    num: int
    anchor: Optional[Tensor]
    sites: Sites
    order: Optional[Tensor]
    given: Optional[tuple[Objects, Tensor]]

    def in_order(self, values: Tensor, dim: int = -1) -> Tensor:
        """Values of all data given, in the sites' order."""
        return values if self.order is None else values.index_select(dim, self.order.argsort())

    @property
    def scale(self) -> float:
        """How many data each datum given stands for."""
        return self.num / self.phi.shape[-2]

    @classmethod
    def of(
        cls,
        name: str,
        process: GaussianProcess,
        guide: AutoSparseGP,
        terms: Terms,
        trace: poutine.Trace,
        indices: Optional[Tensor],
        call: tuple[tuple, dict[str, Any]],
        needs_all: bool,
        last: Optional[tuple[Objects, Optional[Tensor], Tensor]],
    ) -> SiteRun:
        """One GP site of a run, its sites as they are kept.

        :param last: of the last call with all data, these, their order and the fingerprints that this belongs to.
        :param needs_all: whether each call must bring all data.
        :raises ValueError: naming the site, if the rows are not the data that it has sites of, or do not say which.
        """
        scale: Any = trace.nodes[name]["scale"] if name in trace.nodes else 1.0
        if isinstance(scale, Tensor) or scale != 1:
            raise ValueError(
                f"GP site {name!r} is scaled by {scale}; expectation propagation has no prior to another power. Scale "
                "the likelihood's site alone, or the loss."
            )
        module: ExpectationGP = attrgetter(name)(guide.gps)
        assert guide.structure is not None
        features = module.basis(process.kernel, process.jitter, name)
        phi, anchor = side_by_side(features(process.x)), features.anchor
        prior = process.variance
        residual = torch.maximum(prior - row_squares(phi), variance_floor(prior))
        index, num = _rows(name, process, guide.structure.dependence[name] == NONE, terms, trace, indices)
        kept = module.precision.shape[-1]
        if kept not in (0, num):
            raise ValueError(
                f"GP site {name!r} has sites of {kept} data, this call brings {num}. For a part of the data, "
                "give the plate their full number and row numbers, pyro.plate('data', N, subsample_size=B); "
                "for other data, make a new guide."
            )
        if index is not None and needs_all:
            raise ValueError(
                'ExpectationPropagation\'s gradient="exact" needs all data in each step; this one brings '
                f'{len(index)} of {num}. Take gradient="matched" for mini-batches.'
            )
        order = given = None
        with torch.no_grad():
            if index is None:
                observed = [s["value"] for n, s in all_sites(trace) if n in guide.structure.rows and is_observation(s)]
                arguments = tensors(call)
                seen = [*(arguments or [process.x]), *observed]
                if indices is None and last and last[2] is module.fingerprints and last[0].are(seen):
                    order = last[1]  # nothing is read back from a device: test_a_family_stays_on_its_device
                else:
                    given = Objects(seen), _fingerprints(process.x, arguments, observed)
                    order = module.order_of(given[1], name) if indices is None else indices.to(process.x.device)
            sites = Sites(phi.detach(), torch.zeros_like(process.mean), torch.zeros_like(process.mean))
            if kept:
                rows, numbers = phi.detach(), order
                if index is not None:
                    module.look_from(None if anchor is None else anchor.detach())
                    rows, numbers = module.features_of(module.rows[..., index, :]), index
                each = slice(None) if numbers is None else numbers
                sites = Sites(rows, module.precision[..., each], module.linear[..., each])
        spread = prior.detach().sqrt()
        return cls(name, module, phi, residual, process.mean, spread, index, num, anchor, sites, order, given)


def _fingerprints(x: Tensor, arguments: list[Tensor], observed: list[Tensor]) -> Tensor:
    """Of all data's inputs, other arguments and observations, ``(3, N)``; 0 where there are none."""
    arguments = [argument for argument in arguments if not any(argument is y for y in observed)]
    num, none = x.shape[-2], x.new_zeros(x.shape[-2], dtype=torch.int64)
    columns = [x.movedim(-2, 0)], _along(num, arguments), _along(num, observed)
    return torch.stack([fingerprints(column) if column else none for column in columns])


def _along(num: int, values: list[Tensor]) -> list[Tensor]:
    """Those of the tensors that have so many rows, along the first dimension or else the last, rows first."""
    shaped = [value for value in values if value.dim() and num in (value.shape[0], value.shape[-1])]
    return [value if value.shape[0] == num else value.movedim(-1, 0) for value in shaped]


def _rows(
    name: str, process: GaussianProcess, is_free: bool, terms: Terms, trace: poutine.Trace, indices: Optional[Tensor]
) -> tuple[Optional[Tensor], int]:
    """The row numbers of the data given, ``None`` if these are all, and how many there are."""
    here = process.x.shape[-2]
    if not terms.plates or is_free:
        if indices is not None and not _are_numbers(indices, here, here):
            raise ValueError(
                "indices are given, but no plate holds a part of the data: say how many there are, "
                "pyro.plate('data', N, subsample=x)"
            )
        return None, here
    if len(terms.plates) > 1 or name not in terms.findings.rowwise:
        raise ValueError(
            f"the data of GP site {name!r} come in part, and not one for each of its values: a site needs all "
            "terms of its value at once. Give all data in each step."
        )
    ((plate, (size, full)),) = terms.plates.items()
    if size != here:
        raise ValueError(
            f"GP site {name!r} has {here} values, plate {plate!r} holds {size} of {full} rows: sample the process "
            "at the inputs of those rows."
        )
    if indices is None:
        indices = trace.nodes[plate]["value"] if plate in trace.nodes else None
        if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dim() != 1:
            raise ValueError(
                f"plate {plate!r} holds {size} of {full} rows and does not say which: expectation propagation "
                "keeps a site for each datum. Give their numbers, ep.step(..., indices=rows), or write "
                "plate = pyro.plate('data', N, subsample_size=B) and index the data by plate.indices."
            )
    if not _are_numbers(indices, size, full):
        raise ValueError(
            f"indices must be {size} distinct row numbers from 0 to {full - 1}, as many as the data given, got "
            f"{indices.dtype} of shape {tuple(indices.shape)}"
        )
    return indices.to(process.x.device), full


def _are_numbers(indices: Tensor, num: int, full: int) -> bool:
    """Whether these are so many distinct row numbers."""
    if indices.shape != (num,) or indices.is_floating_point() or indices.dtype == torch.bool:
        return False
    return len(indices.unique()) == num and bool(((indices >= 0) & (indices < full)).all())
