"""Hyperparameters, and other latents outside a field, jointly Gaussian in unconstrained space.

q(θ) = N(a, RRᵀ), drawn when it is first used, learned by natural steps. Latents of a field have their part of a draw of
x.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, Union

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_mean
from torch import Tensor
from torch.distributions import biject_to, register_kl

from ..gaussians.drawn import Drawn, DrawnGaussian
from ..gaussians.product import SiteView
from ..modules import path_of
from ..process import SAMPLES_ARE_VECTORISED
from ..program.traces import bare, repeatable
from .field import slices, standardised
from .known import KnownGuide
from .moments import Widths, interval
from .points import Point


class Hyperparameters:
    """θ: latents that are in no field, one after another in unconstrained space.

    :param priors: theirs in a run, by name; ``values`` are the latents' there.
    """

    def __init__(self, priors: Mapping[str, Any], values: Mapping[str, Tensor], like: Tensor) -> None:
        self.priors, self.like = dict(priors), like.new_zeros(0)
        self.shapes = {name: self._theta(name, values[name]).shape for name in self.priors}
        self.rows = slices({name: shape.numel() for name, shape in self.shapes.items()})
        self.size = sum(shape.numel() for shape in self.shapes.values())

    def _theta(self, name: str, value: Tensor) -> Tensor:
        return biject_to(self.priors[name].support).inv(value).to(self.like)

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """θ, ``(D,)``, of some values."""
        return torch.cat([self.like, *(self._theta(name, values[name]).reshape(-1) for name in self.priors)])

    def parts(self, theta: Tensor) -> dict[str, Tensor]:
        """θ by name."""
        return {name: theta[self.rows[name]].reshape(shape) for name, shape in self.shapes.items()}

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        """Of latents, at θ."""
        return {name: biject_to(self.priors[name].support)(part) for name, part in self.parts(theta).items()}

    def intervals(self, ends: Tensor) -> Widths:
        """By percentiles of θ, ``(3, D)``, what :func:`interval` says of latents: of their values, as they are read,
        where each value has one entry of θ.
        """
        found = {}
        for name, rows in self.rows.items():
            to: Any = biject_to(self.priors[name].support)
            part, is_single = ends[:, rows], not getattr(to, "base_transform", to).domain.event_dim
            part = to(part.reshape(len(ends), *self.shapes[name])) if is_single else part
            found[name] = interval(part.reshape(len(ends), -1))
        return found

    def draws(self, num: int) -> list[Tensor]:
        """Some θ from the prior, of those that are finite."""
        with repeatable(self.like):
            draws = [self.of({name: prior.sample() for name, prior in self.priors.items()}) for _ in range(num)]
        return [draw for draw in draws if draw.isfinite().all()]

    def points(self, num: int, seed: int = 0) -> Tensor:
        """Quasi-random numbers in (0, 1), ``(num, D)``; one point where there is no θ."""
        if not self.size:
            return self.like.new_zeros(1, 0)
        draws = torch.quasirandom.SobolEngine(self.size, scramble=True, seed=seed).draw(num)
        return draws.double().clamp(1e-6, 1 - 1e-6).to(self.like)

    @cached_property
    def widths(self) -> Tensor:
        """Half the width of two thirds of the prior of θ: of a normal one 0.97 standard deviations."""
        levels = self.like.new_tensor([1 / 6, 5 / 6])
        with repeatable(self.like):
            draws = {name: prior.sample(torch.Size([199])).to(self.like) for name, prior in self.priors.items()}
        ends = [self._theta(name, value).reshape(199, -1).quantile(levels, 0) for name, value in draws.items()]
        return torch.cat([self.like, *((high - low) / 2 for low, high in ends)])

    @cached_property
    def units(self) -> Tensor:
        """In which steps of θ are of the size of 1: 1, but its prior's width where values, θ itself, are of any size
        (test_an_intercept_may_have_any_unit).
        """
        parts, values = self.parts(self.widths), self.values(self.widths)
        are_values = {name: torch.equal(values[name], part) for name, part in parts.items()}
        each = [part if are_values[name] else torch.ones_like(part) for name, part in parts.items()]
        return torch.cat([self.like, *map(torch.flatten, each)])


class OfPrior(TorchDistribution):
    """A distribution that stands for a prior, which it holds."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, prior: TorchDistribution) -> None:
        self.prior = prior
        super().__init__(prior.batch_shape, prior.event_shape, validate_args=False)


class _Part(OfPrior):
    """A latent's posterior in a run: some rows z of a draw, each given those before it, under a transform."""

    has_rsample = True

    def __init__(
        self, drawn: Union[Drawn, Point], rows: slice, shape: torch.Size, name: str, prior: TorchDistribution
    ) -> None:
        super().__init__(prior)
        self.drawn: Any = drawn
        self.rows, self.sizes, self.name = rows, shape, name
        self.transform: Any = biject_to(prior.support)
        self.draw: tuple[Any, Any] = None, None  # z and its value, once asked for

    def rsample(self, sample_shape: object = torch.Size()) -> Tensor:
        if sample_shape:
            raise ValueError(f"site {self.name!r} stands {SAMPLES_ARE_VECTORISED}")
        z = self.drawn.value[self.rows].reshape(self.sizes)
        self.draw = z, self.transform(z)
        return self.draw[1]  # type: ignore[no-any-return]

    def log_prob(self, value: Tensor) -> Tensor:
        # log q(v) = log q(z) − log |dv/dz|; of its own draw ε is known
        if value is self.draw[1]:
            z, density = self.draw[0], self.drawn.densities[self.rows]
        else:
            z = self.transform.inv(value)
            density = self.drawn.density_of(z.reshape(-1), self.rows)
        total = sum_rightmost(density.reshape(self.sizes), self.transform.domain.event_dim)
        return total - self.transform.log_abs_det_jacobian(z, value)


def drop_latents(guide: KnownGuide, names: Collection[str]) -> None:
    """Drop the parameters that latents have of their own."""
    # A site's name may have dots, which make modules of it.
    for path in [f"{kind}.{path_of(name)}" for kind in ("locs", "scales") for name in names]:
        parent, _, leaf = path.rpartition(".")
        with suppress(AttributeError):  # a point has no scale
            delattr(guide.get_submodule(parent), leaf)


def couple(guide: KnownGuide, loc: Tensor, root: Tensor) -> None:
    """Make q(θ) = N(loc, root rootᵀ) of ``joint.hyper``, instead of one posterior for each."""
    drop_latents(guide, guide.joint.hyper)
    guide.together = DrawnGaussian(loc, root)


def _place(guide: KnownGuide, name: str, prior: TorchDistribution, coupled: Iterable[str]) -> tuple[slice, torch.Size]:
    """Where a latent's entries are among all, and its values' shape: in plates of one, as its prior has it."""
    latents = guide.facts.latents
    rows = slices({other: latents[other].numel for other in coupled})[name]
    known = torch.Size(latents[name].shape)  # type: ignore[arg-type]
    shape = prior.batch_shape + known[len(known) - latents[name].event_dim :]
    if shape.numel() != known.numel():
        raise ValueError(
            f"site {name!r} has the shape {tuple(shape)} here, {tuple(known)} at the guide's first call; "
            "its posterior is joint with that of other latents. Leave its plates whole, or give the guide "
            f"independent=({name!r},)."
        )
    return rows, shape


def coupled_params(guide: KnownGuide, name: str, prior: TorchDistribution) -> tuple[Tensor, Tensor]:
    """The mean of a coupled latent, and its standard deviation given those before it."""
    rows, shape = _place(guide, name, prior, guide.joint.hyper)
    return guide.together.mean[rows].reshape(shape), guide.together.tril.diagonal()[rows].reshape(shape)


def coupled_posterior(guide: KnownGuide, name: str, prior: TorchDistribution) -> Any:
    """The posterior of a coupled latent in a run: its part of the draw of all."""
    run, q = guide.run, guide.together
    run.drawn = run.drawn or q(torch.randn_like(q.mean))
    return part_of(run, name, prior, guide.joint.hyper)


def part_of(run: Any, name: str, prior: TorchDistribution, coupled: Iterable[str]) -> Any:
    """The part that one of the coupled latents has of a run's draw, or point, of all."""
    part = run.parts[name] = _Part(run.drawn, *_place(run.guide, name, prior, coupled), name, prior)
    return part


def condition_on_held(guide: KnownGuide, run: Any, name: str) -> None:
    """After the site of one of them: if a handler holds it at a value of its own, q of all others is that given it."""
    part = run.parts.pop(name, None)
    if part is None or part.draw[0] is not None or run.conditions.drawn is not None:
        return
    noise = part.drawn.noise.clone()
    # Given z the others are a + Rε still, with z's own ε fixed: R is triangular in the order of sites.
    z = part.transform.inv(guide.trace.nodes[name]["value"]).reshape(-1)
    noise[part.rows] = part.drawn.noise_of(z, part.rows).detach()
    run.drawn = guide.together(noise)


class FieldLatent(OfPrior):
    """A normal latent's posterior in a run: its part of a draw of the field."""

    has_rsample = True

    def __init__(self, prior: TorchDistribution, view: SiteView) -> None:
        super().__init__(prior)
        self.view = view
        self.drawn: list[Tensor] = []  # x, where its value is a draw of its own

    @property
    def mean(self) -> Tensor:
        """loc + Lm, which is the median, too."""
        return standardised(self.prior, torch.cat(self.view.loc, -1))

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        self.drawn = self.view.rsample(torch.Size(sample_shape))
        return standardised(self.prior, torch.cat(self.drawn, -1))

    def log_prob(self, value: Tensor) -> Tensor:
        """log dq/dp of the draw of all, where this is the member that counts it."""
        return self.spread(self.view.log_ratio(self.drawn))

    def spread(self, total: Tensor) -> Tensor:
        """A number of the whole field, an equal part of it for each element of the batch."""
        return (total / max(self.batch_shape.numel(), 1)).expand(self.batch_shape)


class BaseMeasure(OfPrior):
    """A prior that densities are relative to: it has density 1."""

    def log_prob(self, value: Tensor) -> Tensor:
        return value.new_zeros(self.batch_shape)


@register_kl(FieldLatent, BaseMeasure)
def _kl_field_latent(q: FieldLatent, p: BaseMeasure) -> Tensor:
    return q.spread(q.view.kl())


def init_to_centre(site: dict[str, Any]) -> Tensor:
    """A prior's mean; or its median, where the mean is not finite or beyond nine tenths of the draws, as for
    half-Cauchy and wide log-normal priors.
    """
    mean: Tensor = init_to_mean(site, fallback=init_to_feasible)
    fn = site["fn"]
    if bare(fn).event_shape or not mean.is_floating_point():
        return mean
    with repeatable(mean):
        # the 20th from below and from above: all but a tenth
        draws = fn.sample(torch.Size([199])).sort(0).values
    is_central = mean.isfinite() & (draws[19] <= mean) & (mean <= draws[-20])
    return torch.where(is_central, mean, draws[99])
