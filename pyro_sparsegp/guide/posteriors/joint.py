"""The posterior in which GP sites and normal latents have one Gaussian given the hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from pyro.distributions import TorchDistribution
from torch import Tensor, nn

from ...bases.base import Features
from ...gaussians.product import Whole
from ...posterior.drawing import FunctionSite, Site
from ...posterior.sparse_posterior import SparsePosterior
from ...process import GaussianProcess
from ...program import handlers, traces
from ...program.data import map_tensors
from ...program.structure import Structure
from ..calls import Evaluation, NewRows
from ..field import Standardised, anchor_of, run_standardised, with_means
from ..known import KnownGuide
from ..latents import posterior_at_point
from ..points import Point
from ..runs import Posteriors, Priors, Run
from .separate import Separate


class Joint(Separate):
    """One Gaussian q(x | θ) of all members, which a run for the hyperparameters gives its θ before."""

    is_marginal = False
    single = FunctionSite

    def members(self, guide: KnownGuide) -> str:
        return f"one Gaussian given the others: {', '.join(guide.joint.field)}"

    def before(self, run: Posteriors, args: tuple, kwargs: dict[str, Any]) -> None:
        guide, call = run.guide, NewRows() if run.call.new else Evaluation()
        ahead = Priors(guide, run.conditions, call, at_medians=run.at_medians, draws_data=False)
        ahead.drawn = run.drawn
        # What handlers hold, they hold here: test_a_handler_may_hold_a_scale.
        with handlers.unrecorded(same=True, learns=True):
            ahead.perform(args, kwargs)
        run.drawn, run.ahead = ahead.drawn, ahead
        others = guide.facts.latents.keys() - ahead.normal.keys()
        values = {name: value for name, value in traces.free_values(ahead.trace).items() if name in others}
        run.conditions = replace(run.conditions, values=run.conditions.values | values)
        if run.marginal and run.call.new and ahead.normal:
            held = values | {name: ahead.values[name] for name in ahead.bases}

            def processes(z: Mapping[str, Tensor]) -> dict[str, GaussianProcess]:
                # clones have a graph, where tensors are of inference mode
                given, named, known = map_tensors(Tensor.clone, (args, kwargs, held))
                sites = run_standardised(guide, given, named, Standardised(guide, z, {}), known).nodes
                return {n: run.settled(n, traces.as_process(sites[n]["fn"])[0]) for n in ahead.bases}  # type: ignore

            zeros = {name: guide.like.new_zeros(fn.shape().numel()) for name, fn in ahead.normal.items()}
            run.with_means = with_means(processes, zeros, ahead.bases)

    def whole(self, run: Priors) -> Whole:
        """q(x | θ) at the hyperparameters of a run."""
        joint = run.guide.joint
        read = [*joint.field, *joint.intercepts, *joint.weights, *chain(*joint.factors.values())]
        missing = [name for name in read if name not in run.sites]
        if missing:
            raise ValueError(
                f"there is no latent site {missing[0]!r}: the guide was made, or its state saved, with another model."
            )
        return run.guide.field(anchor_of(run.guide, run.bases, run.normal, run.trace.nodes))

    def answer(
        self, run: Posteriors, name: str, process: GaussianProcess, module: nn.Module, kind: type[Site]
    ) -> SparsePosterior:
        ahead: Priors = run.ahead  # type: ignore[assignment]
        alone: Any = run.settled(name, process), ahead.bases[name], ()
        process, basis, latents = run.with_means.get(name, alone)
        return kind(process, basis, ahead.whole.share(name, latents, process.batch_shape), name)

    def latent(self, run: Run, name: str, prior: TorchDistribution) -> Any:
        is_member = name in run.guide.joint.field
        return run.latent_of_field(name, prior) if is_member else super().latent(run, name, prior)

    def sums_of(self, run: Priors, name: str, features: Features) -> tuple[Any, Any]:
        """Those of the field, whose one member this site is; what it follows is at its median."""
        return run.guide.field.coefficients, anchor_of(run.guide, run.bases, run.normal, run.sites)

    def can_follow(self, guide: KnownGuide, name: str) -> bool:
        return name not in guide.joint.followed

    def follow(self, guide: KnownGuide, name: str, x: Tensor) -> None:
        rows = f"rows_{[*guide.joint.field].index(name)}"
        if getattr(guide.field, rows).shape == x.shape:
            setattr(guide.field, rows, x)

    def lacks(self, guide: KnownGuide, seen: Structure) -> list[str]:
        # its terms are made for the distributions that it met
        return super().lacks(guide, seen) + guide.facts.has_others(seen)

    def begin(self, guide: KnownGuide) -> None:
        """Nothing: whatever meets is joint."""


class AtPoints(Joint):
    """One Gaussian for each of the weighted points of hyperparameters that :meth:`AutoSparseGP.integrate` makes."""

    def whole(self, run: Priors) -> Whole:
        return run.drawn.whole  # type: ignore[union-attr]

    def latent(self, run: Run, name: str, prior: TorchDistribution) -> Any:
        point: Point = run.drawn  # type: ignore[assignment]
        if name in point.whole.blocks:
            return run.latent_of_field(name, prior)
        if name in point.shapes:
            return posterior_at_point(run, point, name, prior)
        return super().latent(run, name, prior)
