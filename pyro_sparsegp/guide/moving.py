"""Posteriors that stay about the data where parameters of the program, such as a network's, move inputs of GP sites."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..program.asking import attempt
from ..program.checks import graph_of
from ..program.data import TrainingData, rows_of, tensors
from ..program.traces import repeatable, whole_plates
from .known import KnownGuide
from .runs import Priors, Run

_ROWS, _EACH = 256, 4  # rows that say how features move: so many at least, so many a coefficient
_MOST = 2048  # of which these are


def some_of(x: Tensor, size: int) -> Tensor:
    """Rows of inputs, ``(..., N, D)``, that say how ``size`` features at them move."""
    num = min(x.shape[-2], max(_ROWS, _EACH * size))
    return x[..., torch.linspace(0, x.shape[-2] - 1, num, device=x.device).long(), :]


def moved_by(guide: KnownGuide, run: Run) -> dict[str, list[Tensor]]:
    """By GP sites that follow their inputs the parameters of the program that these are made of, in a run with its
    graph.
    """
    own = {id(p) for p in guide.parameters()}
    if guide.facts.inner or torch.distributed.is_initialized():  # each process has other rows
        return {}
    able = {name: process.x for name, process in run.processes.items() if guide.kind.can_follow(guide, name)}
    leaves = {n: [node.variable for node in graph_of([x]) if hasattr(node, "variable")] for n, x in able.items()}
    others = {name: [leaf for leaf in made_of if id(leaf) not in own] for name, made_of in leaves.items()}
    return {name: found for name, found in others.items() if found}


def follow(guide: KnownGuide) -> None:
    """Where parameters have moved since the last call, note where inputs of rows are now: sites are about f there."""
    # Else q would say of rows what was right of others: test_inputs_move_under_a_precise_posterior.
    if guide.core.versions != _versions(guide):
        with torch.inference_mode(False), torch.no_grad():
            _put(guide, _places(guide))


@contextmanager
def following(guide: KnownGuide) -> Iterator[None]:
    """As :func:`follow`; where a loss is differentiated, with the graph of these inputs."""
    if not torch.is_grad_enabled():
        follow(guide)
        yield
        return
    places = _places(guide)
    _put(guide, places)
    yield
    _put(guide, {name: x.detach() for name, x in places.items()})


def _places(guide: KnownGuide) -> dict[str, Tensor]:
    """Where some rows of the first call's data are, by GP site whose inputs parameters move."""
    data, guide.core.versions = guide.core.data, _versions(guide)
    if data is None:
        return {}
    if data.some is None:
        data.some = _some_rows(guide, data)
    run = _run(guide, *data.some)
    sizes = {name: guide.joint.field.get(name, guide.module_of(name).basis.sizes) for name in guide.core.moving}
    return {name: some_of(run.processes[name].x, sum(size)) for name, size in sizes.items()}


def _run(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Run:
    with repeatable(guide.like), poutine.block(), whole_plates():
        return Priors(guide, at_medians=True, draws_data=False).perform(args, kwargs)


def _some_rows(guide: KnownGuide, data: TrainingData) -> tuple[tuple, dict[str, Any]]:
    """As many rows of data as are enough; all, if the program does not take its rows from its arguments."""
    num = max((len(value) for value in tensors((data.args, data.kwargs)) if value.dim()), default=0)
    most = min(num, _MOST)
    args, kwargs = rows_of((data.args, data.kwargs), num, torch.linspace(0, num - 1, most).long())
    with attempt():
        if all(process.x.shape[-2] == most for process in _run(guide, args, kwargs).processes.values()):
            return args, kwargs
    return data.args, data.kwargs


def _versions(guide: KnownGuide) -> list[int]:
    return [leaf._version for leaves in guide.core.moving.values() for leaf in leaves]


def _put(guide: KnownGuide, places: Mapping[str, Tensor]) -> None:
    for name, x in places.items():
        guide.kind.follow(guide, name, x)
