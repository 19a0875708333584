"""Posteriors in which each GP site has its family's, and each normal latent its own."""

from __future__ import annotations

import warnings
from typing import Any

from pyro.distributions import TorchDistribution
from pyro.infer.autoguide import AutoNormalMessenger
from torch import Tensor, nn

from ...bases.base import Features
from ...gaussians import NaturalGaussian
from ...posterior.drawing import ExpectedSite, GroupedSite, MarginalSite, Site
from ...posterior.sparse_posterior import SparsePosterior
from ...process import GaussianProcess
from ...program import checks, traces
from ...program.structure import Depends, Structure
from ..calls import Call
from ..known import KnownGuide
from ..latents import coupled_posterior
from ..runs import Conditions, Posteriors, Priors, Run


class Separate:
    """What every kind of posterior is asked, and how it answers where GP sites are independent given the latents."""

    has_bound = True  # whether its objective is a bound, which draws estimate and gradients raise
    is_of_rows = False  # whether it belongs to single rows of the training data
    is_marginal = True  # whether variances of a GP site are given the latents
    single: type[Site] = MarginalSite  # how values are drawn that densities take one by one

    def describe(self, guide: KnownGuide) -> str:
        """Which functions and latents have one Gaussian, and how others are distributed."""
        joint = guide.joint
        apart = [name for name in guide.facts.latents if name not in {*joint.field, *joint.hyper}]
        kinds = {
            "jointly normal": list(joint.hyper),
            "independent": [name for name in apart if not guide.is_point(name)],
            "points": [name for name in apart if guide.is_point(name)],
        }
        others = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
        whole = f"given the others: {', '.join(joint.field)}" if joint.field else f"each: {', '.join(guide.facts.gps)}"
        return f"one Gaussian {whole}\n{'; '.join(others) or 'no other latents'}"

    # Calls.

    def takes_batches(self, guide: KnownGuide) -> bool:
        """Whether a step may bring other rows than those that it belongs to."""
        return not self.is_of_rows

    def of_rows(self, run: Run) -> list[str]:
        """What of it belongs to training's rows, in words, for a step that brings others."""
        return []

    def given(
        self, guide: KnownGuide, call: Call, args: tuple, kwargs: dict[str, object], median: bool = False
    ) -> Conditions:
        """What posteriors are conditioned on, drawn and read at these arguments before their run."""
        return Conditions()

    def given_now(self, guide: KnownGuide, median: bool, known: bool = False) -> Conditions:
        """What prediction is conditioned on, for one draw of the latents or their medians.

        :param known: whether it predicts at training's rows, which have the latents of rows that this draw has.
        """
        return Conditions()

    # A run.

    def before(self, run: Posteriors, args: tuple, kwargs: dict[str, Any]) -> None:
        """What is to be known before a run, by a run of its own."""

    def kind_of_draws(self, guide: KnownGuide, name: str) -> type[Site]:
        """How a GP site is drawn in training."""
        gp = guide.facts.gps[name]
        # A term of single values needs no joint draw of all, which takes O(N³).
        if gp.depends != Depends.COUPLED or name in guide.independent_draws:
            return self.single
        return GroupedSite if gp.group else ExpectedSite

    def answer(
        self, run: Run, name: str, process: GaussianProcess, module: nn.Module, kind: type[Site]
    ) -> SparsePosterior:
        """The posterior of a GP site, in groups of the inputs that a layer above couples."""
        posterior = module(run.settled(name, process), name, kind)
        if isinstance(posterior, GroupedSite):
            posterior.group = run.guide.facts.gps[name].group.size  # type: ignore[union-attr]
        return posterior  # type: ignore[no-any-return]

    def latent(self, run: Run, name: str, prior: TorchDistribution) -> Any:
        """The posterior of a latent that is no GP site, or its median: its own, or its part of a draw of several."""
        guide = run.guide
        if run.at_medians or guide.is_point(name):
            return guide._get_posterior_median(name, prior)
        if name in guide.joint.hyper:
            return coupled_posterior(guide, name, prior)
        return AutoNormalMessenger.get_posterior(guide, name, prior)

    def sums_of(self, run: Priors, name: str, features: Features) -> tuple[Any, Any]:
        """The coefficients that keep a GP site's sums over rows, and what these are about."""
        module = run.guide.module_of(name)
        return module.coefficients, module.anchor_of(features)

    def can_follow(self, guide: KnownGuide, name: str) -> bool:
        """Whether it stays about a GP site's values at rows whose inputs parameters of the program move."""
        return type(getattr(guide.module_of(name), "coefficients", None)) is NaturalGaussian

    def follow(self, guide: KnownGuide, name: str, x: Tensor) -> None:
        """Be about the values at these inputs of the rows."""
        guide.module_of(name).follow(x)

    # What the program is to be.

    def require(self, run: Run) -> None:
        """Raise where a first run shows that it does not fit."""

    def lacks(self, guide: KnownGuide, seen: Structure) -> list[str]:
        """What a program shows that it does not know of, in words."""
        return guide.facts.lacks(seen)

    def begin(self, guide: KnownGuide) -> None:
        """After a first call: have natural steps know of joint draws, and warn of GP sites that are not joint."""
        facts = guide.facts
        for name, module in guide.modules_by_site().items():
            coefficients = getattr(module, "coefficients", None)
            if isinstance(coefficients, NaturalGaussian) and self.kind_of_draws(guide, name) is ExpectedSite:
                coefficients.hold_by_draws()
        for below, above in [pair for pair in facts.summed if pair[0] in facts.inner]:
            warnings.warn(
                f"the prior mean of GP site {above!r} is made of values of GP site {below!r}, and the guide treats "
                "what each adds as independent: the intervals of both are too narrow. Replace "
                f"{above!r} by that mean plus the values of a GP site of mean 0.",
                stacklevel=6,
            )
        pairs = [pair for pair in facts.summed if pair[0] not in facts.inner]
        summed = ", ".join(repr(name) for name in facts.gps if any(name in pair for pair in pairs))
        if summed:
            warnings.warn(
                f"GP sites {summed} enter densities by their sum, weighted or not, and have independent posteriors: "
                "the intervals of each are too narrow. Write one site with the sum of their kernels; or give sites of "
                f"one output one posterior, {{({summed}): SVGP(64)}}.",
                stacklevel=6,
            )


class ByExpectation(Separate):
    """Posteriors of expectation propagation, where latents are points."""

    has_bound = False

    def require(self, run: Run) -> None:
        require_densities(run)


def require_densities(run: Run) -> None:
    """Raise where log densities are not finite at a first run's values."""
    for site, density in traces.log_densities(run.trace, run.guide.facts.gps).items():
        bad: Tensor = ~density.isfinite()
        if bad.any():
            raise ValueError(
                f"the log density of site {site!r} is not finite at {checks.which(bad)}: look for "
                "infinite data, or data outside of the distribution's support."
            )
