"""The posterior in which GP sites and normal latents have one Gaussian given the hyperparameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor, nn

from ...bases.base import Features
from ...gaussians.product import JointPosterior
from ...kernels.algebra import Sum
from ...kernels.features import FeatureKernel
from ...numerics.decisions import decided
from ...numerics.functions import depends, jacobian
from ...numerics.linalg import MAPPED, side_by_side
from ...posterior.drawing import FunctionSite, Site
from ...posterior.sparse_posterior import SparsePosterior
from ...process import GaussianProcess
from ...program import handlers, traces
from ...program.asking import Unsupported
from ...program.data import map_tensors
from ...program.structure import Structure
from ..calls import Evaluation, NewRows
from ..field import Standardised, anchor_of, run_standardised
from ..known import KnownGuide
from ..latents import part_of
from ..points import Point
from ..runs import Posteriors, Priors, Run
from .separate import Separate


class Joint(Separate):
    """One Gaussian q(x | θ) of all members, which a run for the hyperparameters gives its θ before."""

    is_marginal = False
    single = FunctionSite

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
        run.conditions = replace(run.conditions, values=run.conditions.values | values, drawn=ahead.drawn)
        if run.marginal and run.call.new and ahead.normal:
            run.with_means = _with_means(run, args, kwargs, values | {n: ahead.values[n] for n in ahead.bases})

    def whole(self, run: Priors) -> JointPosterior:
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
        self, run: Any, name: str, process: GaussianProcess, module: nn.Module, kind: type[Site]
    ) -> SparsePosterior:
        ahead: Priors = run.ahead
        alone: Any = run.settled(name, process), ahead.bases[name], ()
        process, basis, latents = run.with_means.get(name, alone)
        return kind(process, basis, ahead.whole.view(name, latents, process.batch_shape), name)

    def members(self, run: Run) -> Collection[str]:
        """The GP sites and latents that have one Gaussian."""
        return run.guide.joint.field

    def latent(self, run: Run, name: str, prior: TorchDistribution) -> Any:
        is_member = name in self.members(run)
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

    def whole(self, run: Priors) -> JointPosterior:
        return run.drawn.whole  # type: ignore[union-attr]

    def members(self, run: Run) -> Collection[str]:
        return run.drawn.whole.blocks  # type: ignore[union-attr]

    def latent(self, run: Run, name: str, prior: TorchDistribution) -> Any:
        point: Point = run.drawn  # type: ignore[assignment]
        if name not in point.shapes:
            return super().latent(run, name, prior)
        part = part_of(run, name, prior, point.shapes)
        return part.rsample() if run.at_medians else part


class _Slopes(FeatureKernel):
    """JJᵀ, of a GP site's prior mean μ + Jz that is made of latents, z ~ N(0, I) each.

    :param process: the GP site, with its graph to ``z``; its mean at its own inputs ``x`` is known.
    """

    def __init__(self, process: GaussianProcess, x: Tensor, z: list[Tensor]) -> None:
        self.process, self.x, self.z = process, x, z

    def blocks(self, x: Tensor) -> list[Tensor]:
        """J, by latent."""
        with torch.inference_mode(False), torch.enable_grad():
            # a clone has a graph, where x is of inference mode
            shape = *torch.broadcast_shapes(self.process.batch_shape, x.shape[:-2]), x.shape[-2]
            mean = self.process.mean if x is self.x else self.process.mean_at(x.clone()).expand(shape)
            found = [jacobian(mean.reshape(-1), z).mT.unflatten(0, mean.shape) for z in self.z]
        return found if torch.is_grad_enabled() else [part.detach() for part in found]

    def features(self, x: Tensor) -> Tensor:
        return side_by_side(self.blocks(x))


class _Above(Sum):
    """k + JJᵀ, which has the terms of k: effects are what f is beside its prior mean."""

    @property
    def terms(self) -> tuple[Any, ...]:
        return self.parts[:-1]


class _WithMean(Features):
    """A GP site's features and its mean's."""

    def __init__(self, basis: Features, kernel: _Above) -> None:
        self.basis, self.slopes = basis, kernel.parts[-1]
        super().__init__(kernel, basis.sizes + tuple(map(len, self.slopes.z)))

    def __call__(self, x: Tensor) -> list[Tensor]:
        return [*self.basis(x), *self.slopes.blocks(x)]

    def components(self) -> list[Any]:
        return self.basis.components()


def _with_means(
    run: Posteriors, args: tuple, kwargs: dict[str, Any], held: Mapping[str, Tensor]
) -> dict[str, tuple[GaussianProcess, Features, list[str]]]:
    """Of each GP site whose prior mean is made of latents of the field its process, features, and these latents.

    Else its variance would be that of f − μ, test_a_posterior_whose_mean_is_made_of_latents.
    """
    guide, found = run.guide, dict[str, tuple[GaussianProcess, Features, list[str]]]()
    ahead: Priors = run.ahead  # type: ignore[assignment]
    with torch.inference_mode(False), torch.enable_grad():
        # clones have a graph, where tensors are of inference mode
        given, named, known = map_tensors(Tensor.clone, (args, kwargs, held))
        z = {n: guide.like.new_zeros(fn.shape().numel(), requires_grad=True) for n, fn in ahead.normal.items()}
        sites: Any = run_standardised(guide, given, named, Standardised(guide, z, {}), known).nodes
        there: Any = {name: traces.as_process(sites[name]["fn"])[0] for name in ahead.bases}
        every = {name: [n for n in z if depends(process.mean, z[n])] for name, process in there.items()}
        made_of = {name: latents for name, latents in every.items() if latents}
    # Under torch.func.vmap no graph shows it: it is as in the draw that leads.
    is_any = torch.tensor(bool(made_of))
    if decided(is_any, serves_both=True) and MAPPED.get():
        raise Unsupported("a mean is made of latents")
    for name, latents in made_of.items():
        here = run.settled(name, ahead.processes[name])
        kernel = _Above(here.kernel, _Slopes(there[name], here.x, [z[n] for n in latents]))
        found[name] = here.with_kernel(kernel), _WithMean(ahead.bases[name], kernel), latents
    return found
