"""GP sites in one run of the model, and which of the sites of expectation propagation its data have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Optional

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.expectation import ExpectationGP
from ..guide import AutoSparseGP
from ..numerics.linalg import row_squares, variance_floor
from ..numerics.rows import Objects, fingerprints
from ..process import GaussianProcess
from ..program.dependence import NONE
from ..program.terms import Findings, Terms
from ..program.traces import all_sites, is_observation, tensors

__all__ = ["SiteRun", "SiteRuns"]


@dataclass
class SiteRun:
    """One GP site in one run of the model, and its sites as they are."""

    name: str
    module: ExpectationGP
    phi: Tensor  # Φ at the data given, (..., B, M), with its graph
    residual: Tensor  # d, with its graph
    prior_mean: Tensor  # μ, with its graph
    spread: Tensor  # f's prior standard deviation
    index: Optional[Tensor]  # the row numbers of the data given; None for all
    num: int  # how many data there are
    rows: Tensor  # the features that the sites are about
    anchor: Optional[Tensor]  # L, with its graph, where the sites are about u = Lw
    precision: Tensor
    linear: Tensor
    order: Optional[Tensor] = None  # the sites' numbers where all data are given in another order
    data: Optional[tuple[Objects, Tensor]] = None  # all data given, if not those of the call before, and fingerprints
    flags: Sequence[Tensor] = ()  # of Cholesky factorisations that runs are made of, to be looked at with this one's

    @property
    def numbers(self) -> Optional[Tensor]:
        """The sites' numbers of the data given; ``None`` if it is all in their order."""
        return self.order if self.index is None else self.index

    def in_order(self, values: Tensor, dim: int = -1) -> Tensor:
        """Values of all data given, in the sites' order."""
        return values if self.order is None else values.index_select(dim, self.order.argsort())

    def as_given(self, values: Tensor) -> Tensor:
        """Values of sites, of the data given and in their order."""
        return (values if self.numbers is None else values[..., self.numbers]).to(self.precision)

    @property
    def scale(self) -> float:
        """How many data each datum given stands for."""
        return self.num / self.phi.shape[-2]


class SiteRuns:
    """Reads GP sites in runs of a guide's model.

    :param needs_all: whether each call must bring all data.
    """

    def __init__(self, guide: AutoSparseGP, needs_all: bool) -> None:
        self.guide, self.needs_all = guide, needs_all
        self.findings = Findings()
        # The last call with all data: their order, and the fingerprints that it is relative to.
        self._calls: dict[str, tuple[Objects, Optional[Tensor], Tensor]] = {}

    def read(
        self,
        name: str,
        process: GaussianProcess,
        terms: Terms,
        trace: poutine.Trace,
        indices: Optional[Tensor],
        call: tuple[tuple, dict[str, Any]],
    ) -> SiteRun:
        """One GP site of a run, its sites as they are kept.

        :raises ValueError: naming the site, if the rows are not the data that it has sites of, or do not say which.
        """
        scale: Any = trace.nodes[name]["scale"] if name in trace.nodes else 1.0
        if isinstance(scale, Tensor) or scale != 1:
            raise ValueError(
                f"GP site {name!r} is scaled by {scale}; expectation propagation has no prior to another power. Scale "
                "the likelihood's site alone, or the loss."
            )
        module: ExpectationGP = attrgetter(name)(self.guide.gps)
        features = module.basis(process.kernel, process.jitter, name)
        blocks, anchor = features(process.x), features.anchor
        phi = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
        prior = process.variance
        residual = torch.maximum(prior - row_squares(phi), variance_floor(prior))
        index, num = self._rows(name, process, terms, trace, indices)
        order = data = None
        with torch.no_grad():
            kept = module.precision.shape[-1]
            if kept not in (0, num):
                raise ValueError(
                    f"GP site {name!r} has sites of {kept} data, this call brings {num}. For a part of the data, "
                    "give the plate their full number and row numbers, pyro.plate('data', N, subsample_size=B); "
                    "for other data, make a new guide."
                )
            none = torch.zeros_like(process.mean)
            rows, precision, linear = phi.detach(), none, none
            if index is None:
                order, data = self._order(name, process, trace, indices, call)
                if kept:
                    precision, linear = module.precision, module.linear
                    if order is not None:
                        precision, linear = precision[..., order], linear[..., order]
            else:
                if self.needs_all:
                    raise ValueError(
                        'ExpectationPropagation\'s gradient="exact" needs all data in each step; this one brings '
                        f'{len(index)} of {num}. Take gradient="matched" for mini-batches.'
                    )
                if kept:
                    module.look_from(None if anchor is None else anchor.detach())
                    rows = module.features_of(module.rows[..., index, :])
                    precision, linear = module.precision[..., index], module.linear[..., index]
        return SiteRun(
            name,
            module,
            phi,
            residual,
            process.mean,
            prior.detach().sqrt(),
            index,
            num,
            rows,
            anchor,
            precision,
            linear,
            order,
            data,
        )

    def known(self, run: SiteRun) -> None:
        """Take note of all data given, once their sites are kept."""
        if run.data is not None:
            run.module.fingerprints = run.in_order(run.data[1])
            self._calls[run.name] = run.data[0], run.order, run.module.fingerprints

    def _order(
        self,
        name: str,
        process: GaussianProcess,
        trace: poutine.Trace,
        indices: Optional[Tensor],
        call: tuple[tuple, dict[str, Any]],
    ) -> tuple[Optional[Tensor], Optional[tuple[Objects, Tensor]]]:
        """The sites' numbers of all data in the order given, ``None`` if it is theirs; and the data, if they are not
        the last call's, with their fingerprints.
        """
        module, num = attrgetter(name)(self.guide.gps), process.x.shape[-2]
        assert self.guide.structure is not None
        known = self.guide.structure.rows
        observed = [site["value"] for other, site in all_sites(trace) if other in known and is_observation(site)]
        arguments = tensors(call)
        seen = [*arguments, *observed] if arguments else [process.x, *observed]
        last = self._calls.get(name)
        if indices is None and last is not None and last[2] is module.fingerprints and last[0].are(seen):
            return last[1], None
        columns = [
            [process.x.movedim(-2, 0)],
            _along(num, [a for a in arguments if not any(a is y for y in observed)]),
            _along(num, observed),
        ]
        none = process.x.new_zeros(num, dtype=torch.int64)
        found = torch.stack([fingerprints(column) if column else none for column in columns])
        order = module.order_of(found, name) if indices is None else indices.to(none.device)
        return order, (Objects(seen), found)

    def _rows(
        self, name: str, process: GaussianProcess, terms: Terms, trace: poutine.Trace, indices: Optional[Tensor]
    ) -> tuple[Optional[Tensor], int]:
        """The row numbers of the data given, ``None`` if these are all, and how many there are."""
        here = process.x.shape[-2]
        assert self.guide.structure is not None
        if not terms.plates or self.guide.structure.dependence[name] == NONE:
            if indices is not None and not _is_order(indices, here):
                raise ValueError(
                    "indices are given, but no plate holds a part of the data: say how many there are, "
                    "pyro.plate('data', N, subsample=x)"
                )
            return None, here
        if len(terms.plates) > 1 or name not in self.findings.rowwise:
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
        elif indices.shape != (size,) or indices.is_floating_point() or indices.dtype == torch.bool:
            raise ValueError(
                f"indices must be {size} row numbers, as many as the data given, got {indices.dtype} of shape "
                f"{tuple(indices.shape)}"
            )
        elif len(indices.unique()) < size or int(indices.min()) < 0 or int(indices.max()) >= full:
            raise ValueError(f"indices must be distinct row numbers from 0 to {full - 1}")
        return indices.to(process.x.device), full


def _is_order(indices: Tensor, num: int) -> bool:
    """Whether these are all the numbers from 0, each once."""
    numbers = torch.arange(num, device=indices.device)
    return indices.shape == (num,) and torch.equal(indices.sort().values.to(numbers), numbers)


def _along(num: int, values: list[Tensor]) -> list[Tensor]:
    """Those of the tensors that have so many rows, along the first dimension or else the last, rows first."""
    shaped = [value for value in values if value.dim() and num in (value.shape[0], value.shape[-1])]
    return [value if value.shape[0] == num else value.movedim(-1, 0) for value in shaped]
