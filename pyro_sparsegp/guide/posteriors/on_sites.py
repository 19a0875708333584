"""q(f | latents, data) of families on sites: latents are drawn, and the sites read under them, before the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

from ...approximations.on_sites import SiteGP
from ...numerics.linalg import MAPPED
from ...posterior.drawing import Site
from ...posterior.sparse_posterior import SparsePosterior
from ...process import GaussianProcess
from ...program import checks, handlers, traces
from ...program.data import TrainingData
from ...program.explore import explore
from ...program.reader import Expectation, Reader, total_after
from ...program.structure import Depends, Structure
from ..calls import KINDS, Call, TrainingStep
from ..known import KnownGuide
from ..readings import Readings, SiteReading
from ..runs import Conditions, Priors, Run, require_rows, shown_by
from .separate import Separate, require_densities

_SETTLED = 100  # updates of sites outside of training, at most
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # standard deviations of a marginal that an update may move


class OnSites(Separate):
    """Posteriors that follow from Gaussian sites, read off the densities of training's rows; free ones beside them."""

    is_of_rows = True

    def takes_batches(self, guide: KnownGuide) -> bool:
        modules = guide.site_modules().values()  # before the first call there are none
        return bool(modules) and all(module.takes_batches for module in modules)

    def of_rows(self, run: Run) -> list[str]:
        modules = run.guide.site_modules().items()
        families = {name: module.family["name"] for name, module in modules if not module.takes_batches}
        for name, family in families.items():
            checks.require_full_batch(name, family, run.trace)
        return [f"GP site {name!r} has the family {family}, whose posterior" for name, family in families.items()]

    def given_now(self, guide: KnownGuide, median: bool, known: bool = False) -> Conditions:
        """Read at the training data."""
        if guide.core.data is None and not guide.has_random_latents:
            return Conditions()
        data = guide.data_for(next(iter(guide.site_modules())))
        # Sites that are kept must serve training, too: no tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad(), traces.repeatable(guide.like) if median else nullcontext():
            return self.given(guide, KINDS[known, False](), data.args, data.kwargs, median)

    def given(
        self, guide: KnownGuide, call: Call, args: tuple, kwargs: dict[str, Any], median: bool = False
    ) -> Conditions:
        """Draw the latents at the training data, or take their medians, and read the sites under them.

        :param call: of the arguments; if they are other rows, the training data are taken. In a step of training
            modules keep the sites, and gradients pass through them.
        """
        core, modules, same, learns = guide.core, guide.site_modules(), call.same, call.learns
        if not same:
            if core.data is None:
                return Conditions()
            args, kwargs = core.data.args, core.data.kwargs
        # Not under vmap, by which predict draws: it has no torch.autograd.grad.
        reads = [] if MAPPED.get() else list(filter(core.facts.is_alone, modules))
        run = _UnderLatents(guide, at_medians=median, reads=reads)
        if run.takes_points:  # asked before the gradients that reading takes, which are no step's
            run.drawn = core.points.chosen(median)  # type: ignore[union-attr]
        with handlers.unrecorded(same, learns), torch.set_grad_enabled(learns or bool(reads)):
            run.perform(args, kwargs)
        if same and core.data is not None and self.takes_batches(guide) and checks.holds_part(run.trace):
            # the rows it knows, as a batch of more
            return self.given(guide, KINDS[False, learns](call.relation, call.inputs), args, kwargs)
        name, module = next(iter(modules.items()))
        checks.require_full_batch(name, module.family["name"], run.trace)
        if isinstance(call, TrainingStep):
            core.data = call.relation.call if core.data else TrainingData(guide.model, args, kwargs)
            core.data.note(shown_by(run))
        else:
            require_rows(run, name)
        held = handlers.held_runs(guide.model, run.trace, args, kwargs)
        reader = Reader(held, core.facts, core.num_nodes, _closed_forms(run, held))
        with torch.set_grad_enabled(learns):
            readings = _read(reader, modules, run, call)
        # What other runs are to have of latents: all of it at the same rows.
        free = traces.free_values(run.trace)
        of_all = core.facts.latents.keys() - {*core.facts.local_latents}
        shared = free.keys() - run.processes.keys() if same else of_all
        values = {name: call.kept(value) for name, value in free.items() if name in shared}
        return Conditions(values, readings, run.drawn)

    def answer(
        self, run: Run, name: str, process: GaussianProcess, module: nn.Module, kind: type[Site]
    ) -> SparsePosterior:
        if not isinstance(module, SiteGP):
            return super().answer(run, name, process, module, kind)
        reading = run.conditions.readings.get(name)
        posterior = module(process, name, kind, getattr(reading, "sites", None), not run.call.same)
        if isinstance(run.call, TrainingStep) and reading is not None and not reading.direct:
            # where the next step goes on
            module.sites.progress |= {"mean": posterior.mean.detach(), "variance": posterior.variance.detach()}
        return posterior

    def require(self, run: Run) -> None:
        require_densities(run)
        remedy = "Take a family with a free posterior, such as SVGP or OrthogonalInducing"
        for name, module in run.guide.site_modules().items():
            reads = f"the family {module.family['name']}, which"
            require_separate_sites(run.guide.facts, name, reads, run.trace, remedy)


@dataclass(eq=False)
class _UnderLatents(Priors):
    """A run that draws the latents under which sites are read."""

    reads: Collection[str] = ()  # the GP sites by whose values, moves off the prior's mean, densities are derived
    moves: dict[str, Tensor] = field(init=False, default_factory=dict)

    def answer(self, name: str, process: GaussianProcess, module: nn.Module) -> Any:
        if name in self.reads:
            self.moves[name] = torch.zeros_like(process.mean, requires_grad=True)
            return process.mean + self.moves[name]
        if isinstance(module, SiteGP):
            return process.mean
        kind = self.guide.kind.kind_of_draws(self.guide, name)
        posterior = self.posteriors[name] = self.kind.answer(self, name, process, module, kind)
        return posterior.mean


def _closed_forms(run: Priors, held: handlers.Rerun) -> Collection[str]:
    """The densities after a GP site that is alone, if all have their expectations in closed form."""
    core = run.guide.core
    # A state has no closed forms; sites that are read at nodes instead would be others.
    forms = core.forms = core.forms or explore(run, held)[1]
    left = {*forms.functions, *forms.values, *forms.rest.gps}
    return forms.rows if len(core.facts.gps) == 1 and not left and forms.hold(run.trace.nodes) else ()


def _read(reader: Reader, modules: Mapping[str, SiteGP], run: _UnderLatents, call: Call) -> dict[str, SiteReading]:
    """The sites of some GP sites, at a run's latents."""
    guide, learns = run.guide, call.learns
    met = {name: process for name, process in run.processes.items() if name in modules}
    readings = {name: SiteReading(name, process, modules[name], reader) for name, process in met.items()}
    for name in run.moves:
        _read_off(readings[name], run, call)
    left = [reading for name, reading in readings.items() if name not in run.moves]
    most, tolerance = _SETTLED, _TOLERANCE[guide.like.dtype]
    if learns:
        most, tolerance = max((reading.module.updates for reading in left), default=0), 0.0
        for reading in left:
            reading.resume(call.same)
        if guide.has_random_latents:  # sites that were kept are those of another draw
            most, tolerance = max(most, 5), 0.05
    others = {name: (q.mean.detach(), q.variance.detach()) for name, q in run.posteriors.items()}
    Readings(reader, left, others).settle(most, tolerance)
    for reading in readings.values():
        if not learns:
            reading.module.require_settled(reading.change, reading.name, guide.warned)
        # To look at a guide does not change how it trains.
        reading.end(learns or reading.module.sites.empty or (reading.direct and run.at_medians))
    return readings


def _read_off(reading: SiteReading, run: _UnderLatents, call: Call) -> None:
    """The sites of a quadratic ℓ by its derivatives in a run with f at the prior's mean μ: λ = −ℓ″, λ(z − μ) = ℓ′."""
    move = run.moves[reading.name]
    with torch.enable_grad():
        # A move that no density depends on has derivatives of 0.
        total = total_after(run.trace, reading.name, run.guide.facts.gps) + 0 * move.sum()
        (first,) = torch.autograd.grad(total, move, create_graph=True)
        (second,) = torch.autograd.grad(first.sum() + 0 * move.sum(), move, create_graph=call.learns)
    reading.move(reading.expanded(Expectation(total, call.kept(first), second), torch.zeros_like(move)))
    reading.change = 0.0


def require_separate_sites(found: Structure, name: str, reads: str, trace: poutine.Trace, remedy: str) -> None:
    """Raise where a GP site's likelihood is none of single values; ``reads`` is what reads Gaussian sites there."""
    why = [f"values of GP site {layer!r} enter another GP site" for layer in found.inner]
    if found.gps[name].depends == Depends.COUPLED:
        what = "depends on values at several inputs, or a comparison, as in torch.where(f > 0, ...), hides on which"
        why.append(f"its likelihood does not factorise: one term of a density {what}")
    why += [f"the distribution of site {flat!r} is piecewise constant" for flat in traces.piecewise_constant(trace)]
    if why:
        raise ValueError(
            f"GP site {name!r} has {reads} makes a Gaussian site of each value's likelihood, but {why[0]}. {remedy}."
        )
