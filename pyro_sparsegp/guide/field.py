"""All of a program that is normal given its hyperparameters, as one field x ~ N(0, I).

A GP site is f = μ + φᵀw + r, a latent with a normal prior v = loc + Lz: w and z are entries of x, in the program's
order. Given the hyperparameters θ, q(x) is one Gaussian, so that intercepts, group effects and functions keep what they
share; its sites are about Lx, whose meaning θ does not change. Each parameter of a likelihood is, under a link, an
affine function of x: its linear predictor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, Optional

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from ..approximations.optimal import ExactGP
from ..gaussians import FullCholesky, NaturalGaussian, Shared
from ..numerics.linalg import cholesky
from ..program.declared import LINKS, candidates, parameters, rebuilt, rewrapped
from ..program.dependence import COUPLED
from ..program.facts import Structure
from ..program.traces import all_sites, as_process, bare, fill_masked, is_observation, repeatable, sample_sites
from .known import KnownGuide

__all__ = [
    "LARGEST",
    "Layout",
    "Predictors",
    "Standardised",
    "anchor_of",
    "at_zero",
    "basis_of",
    "find_links",
    "hyperparameters_among",
    "is_normal_prior",
    "jacobian",
    "make_field",
    "residuals_of",
    "run_standardised",
    "slices",
    "standardised",
]

LARGEST = 2000  # entries of a field, whose covariance is dense


def is_normal_prior(prior: Any) -> bool:
    """Whether a latent's prior is normal; a subclass may have another density."""
    return type(bare(prior)) in (dist.Normal, dist.MultivariateNormal)


def standardised(prior: Any, z: Tensor) -> Tensor:
    """loc + Lz of a normal prior."""
    fn, z = bare(prior), z.reshape(z.shape[:-1] + prior.shape())
    return fn.loc + (fn.scale * z if isinstance(fn, dist.Normal) else (fn.scale_tril @ z[..., None])[..., 0])


def _scale_of(prior: Any) -> Tensor:
    """L of all values of a normal prior, ``(n, n)``."""
    fn = bare(prior)
    if isinstance(fn, dist.Normal):
        return fn.scale.expand(prior.shape()).reshape(-1).diag()
    tril = fn.scale_tril.expand(*prior.shape(), prior.shape()[-1])
    return torch.block_diag(*tril.reshape(-1, *tril.shape[-2:]))


class Layout:
    """Where entries stand in x, and in the tensor of all that a run is standardised by.

    :param field: of each GP site and normal latent, in order, the sizes of its blocks of x.
    :param residuals: of each GP site the number of standardised residuals: one, √ρ·t at all inputs, serves where no
        term depends on values at several.
    :param owned: the latents of which each datum has one value at most, such as its group's.
    """

    def __init__(
        self, field: Mapping[str, list[int]], residuals: Mapping[str, int], owned: Collection[str] = ()
    ) -> None:
        self.field, self.residuals = dict(field), dict(residuals)
        self.owned = [name for name in self.field if name in owned]
        self.sizes = [size for sizes in self.field.values() for size in sizes]
        self.num, self.extended = sum(self.sizes), sum(self.sizes) + sum(self.residuals.values())

    @property
    def numbers(self) -> dict[str, int]:
        """How many entries each member has."""
        return {name: sum(sizes) for name, sizes in self.field.items()}

    @cached_property
    def rows(self) -> dict[str, slice]:
        """The entries of each member."""
        return slices(self.numbers)

    def directions(self, like: Tensor) -> Tensor:
        """Of x: each entry that is no owned latent's; and of these 1 and k, by which the k-th one's slope is known."""
        owned = like.new_zeros(2 * len(self.owned), self.extended)
        for i, rows in enumerate(self.rows[name] for name in self.owned):
            owned[2 * i, rows] = 1.0
            owned[2 * i + 1, rows] = torch.arange(rows.stop - rows.start, device=like.device, dtype=like.dtype)
        each = torch.eye(self.extended, dtype=like.dtype, device=like.device)
        return torch.cat([*(each[rows] for rows in self._common), each[self.num :], owned])

    @property
    def _common(self) -> list[slice]:
        return [rows for name, rows in self.rows.items() if name not in self.owned]

    def common(self, like: Tensor) -> Tensor:
        """The entries of x that are no owned latent's, on a tensor's device: a list would be copied to it each time."""
        parts = [torch.arange(rows.start, rows.stop, device=like.device) for rows in self._common]
        return torch.cat(parts) if parts else torch.arange(0, device=like.device)

    def split(self, found: Tensor) -> tuple[Tensor, Tensor, list[tuple[slice, Tensor, Tensor]]]:
        """J of common entries, ``(N, K)``, and of residuals; and of owned latents the entries, which of them each datum
        has, and its slope, ``(N,)``.

        :param found: J along :meth:`directions`.
        """
        num, owned = sum(rows.stop - rows.start for rows in self._common), []
        rest = self.extended - self.num
        for name, (slope, moved) in zip(self.owned, found[num + rest :].unflatten(0, (-1, 2))):
            rows = self.rows[name]
            number = torch.where(slope == 0, 0.0, moved / slope).detach()
            owned.append((rows, number.round().long().clamp(0, rows.stop - rows.start - 1), slope))
        return found[:num].mT, found[num : num + rest].mT, owned

    def parts(self, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of ``(extended,)`` numbers those of each member, and of each GP site's residual."""
        every = x.split([*self.numbers.values(), *self.residuals.values()])
        return dict(zip(self.field, every)), dict(zip(self.residuals, every[len(self.field) :]))


def residuals_of(facts: Structure, rows: Mapping[str, int]) -> dict[str, int]:
    """How many standardised residuals GP sites of so many rows have."""
    return {name: num if facts.dependence[name] == COUPLED else 1 for name, num in rows.items()}


def slices(numbers: Mapping[str, int]) -> dict[str, slice]:
    """Where so many entries of each name stand, one after another."""
    found, start = {}, 0
    for name, number in numbers.items():
        found[name] = slice(start, start + number)
        start += number
    return found


def basis_of(guide: KnownGuide, name: str, process: Any) -> Any:
    """A GP site's basis under its kernel: of the exact family, values at the inputs."""
    module = guide.module_of(name)
    if isinstance(module, ExactGP):
        return module.features_at(process, name, process.x)[0]
    return module.basis(process.kernel, process.jitter, name)


class Standardised(Messenger):
    """Gives the members of a field values made of x, and hyperparameters values made of θ.

    :param x: by member, and ``residuals`` by GP site, standardised.
    :param theta: hyperparameters in unconstrained space.
    :param bases: of GP sites, where they are known.

    Afterwards ``log_prior`` is log p(θ) there, and ``values`` are the members' by name.
    """

    def __init__(
        self,
        guide: KnownGuide,
        x: Mapping[str, Tensor],
        residuals: Mapping[str, Tensor],
        theta: Mapping[str, Tensor] = {},
        bases: Mapping[str, Any] = {},
    ) -> None:
        super().__init__()
        self.guide, self.x, self.residuals, self.theta = guide, x, residuals, theta
        self.log_prior: Any = 0.0
        self.values: dict[str, Tensor] = {}
        self.priors: dict[str, Any] = {}
        self.features: dict[str, list[Tensor]] = {}
        self.bases: dict[str, Any] = dict(bases)

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"]:
            return
        if name in self.theta:
            transform = biject_to(fn.support)
            value = transform(self.theta[name])
            jacobian = transform.log_abs_det_jacobian(self.theta[name], value)
            self.log_prior = self.log_prior + fn.log_prob(value).sum() + jacobian.sum()
        elif name in self.x or name in self.residuals:
            process, _ = as_process(fn)
            value = self._of_process(name, process) if process is not None else standardised(fn, self.x[name])
            self.values[name] = value
        else:
            return
        self.priors[name] = fn
        msg["value"], msg["done"] = value, True

    def size_of(self, name: str) -> Tensor:
        """The sum of squared slopes of a member's values by x."""
        parts = self.features[name] if name in self.features else [_scale_of(self.priors[name])]
        return sum(part.detach().square().sum() for part in parts)  # type: ignore[return-value]

    def _of_process(self, name: str, process: Any) -> Tensor:
        """μ + φᵀw + Rt, with RRᵀ the residual's covariance; √ρ t of its variance where no term adds values up."""
        if name not in self.bases:
            self.bases[name] = basis_of(self.guide, name, process)
        basis = self.bases[name]
        blocks = self.features[name] = basis(process.x)
        x = self.x[name] if name in self.x else process.x.new_zeros(sum(phi.shape[-1] for phi in blocks))
        w = x.split([phi.shape[-1] for phi in blocks])
        value, t = process.mean + sum(phi @ part for phi, part in zip(blocks, w)), self.residuals[name]
        if len(t) > 1:
            left = process.kernel(process.x) - sum(phi @ phi.mT for phi in blocks)
            root = cholesky(left, process.jitter, f"the residual covariance of site {name!r}", process.variance.mean())
            return value + root @ t
        left = process.variance - sum(phi.square().sum(-1) for phi in blocks)
        return value + left.clamp(min=torch.finfo(left.dtype).tiny).sqrt() * t


def run_standardised(
    guide: KnownGuide,
    args: tuple,
    kwargs: dict[str, Any],
    handler: Standardised,
    values: Mapping[str, Tensor] = {},
    like: Optional[poutine.Trace] = None,
) -> poutine.Trace:
    """A run of the model with a field's members at values of x.

    :param values: of other latents, and plates' row numbers.
    :param like: a run under the handlers around this one, whose scales and masks sites get.
    """
    there: dict[str, Any] = {} if like is None else dict(like.nodes)
    with pyro.validation_enabled(False), repeatable(guide.like), poutine.block(), poutine.trace() as traced, handler:
        poutine.condition(guide.model, data=dict(values))(*args, **kwargs)
    for name, site in all_sites(traced.trace):
        if name in there:
            site["scale"], site["mask"] = there[name]["scale"], there[name]["mask"]
        fill_masked(site)
    return traced.trace


def jacobian(value: Tensor, x: Tensor, along: Optional[Tensor] = None) -> Tensor:
    """∂ value / ∂x times directions, ``(K, N)``, of N values, by one way back and one through that.

    :param along: the directions, ``(K, len(x))``; by default each entry of x.
    """
    one = torch.zeros_like(value, requires_grad=True)
    (slope,) = torch.autograd.grad(value, x, one, create_graph=True)
    along = torch.eye(len(x), dtype=x.dtype, device=x.device) if along is None else along
    if not slope.requires_grad:
        return slope.new_zeros(len(along), len(value))
    return torch.autograd.grad(slope, one, along, is_grads_batched=True, create_graph=True)[0]


# Which members a program has.


def at_zero(guide: KnownGuide, latents: Mapping[str, Tensor]) -> Standardised:
    """A handler with GP sites' entries at 0, and those of some latents as given."""
    return Standardised(guide, latents, {name: guide.like.new_zeros(1) for name in guide.facts.gps})


def hyperparameters_among(
    guide: KnownGuide, normal: Mapping[str, Any], run: Callable[[Standardised], poutine.Trace]
) -> set[str]:
    """The normal latents that kernels, scales or priors are made of, which are hyperparameters: autograd's graph shows
    it, whatever their values.
    """
    x = {name: torch.zeros(prior.shape().numel()).to(guide.like).requires_grad_() for name, prior in normal.items()}
    handler = at_zero(guide, x)
    made: list[Tensor] = []
    for name, site in sample_sites(run(handler)).items():
        fn = site["fn"]
        process, _ = as_process(fn)
        if process is not None:
            made += [process.variance, *handler.features[name]]
        elif name in normal:
            made.append(_scale_of(fn))
        elif not is_observation(site) and hasattr(fn, "arg_constraints"):
            made += parameters(fn).values()
    made = [part.sum() for part in made if part.requires_grad]
    if not made:
        return set()
    slopes = torch.autograd.grad(torch.stack(made).sum(), [x[name] for name in normal], allow_unused=True)
    return {name for name, slope in zip(normal, slopes) if slope is not None}


def find_links(
    run: Callable[[Tensor], poutine.Trace], layout: Layout, like: Tensor
) -> Optional[tuple[dict[str, dict[str, str]], list[str]]]:
    """By observed site and parameter, the link under which it is affine in x, and the latents that are owned; ``None``
    if one is not affine, or is not known.

    :param run: the program with a field at x, ``(extended,)``.
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, layout.extended, generator=generator).to(like)
    found: dict[str, dict[str, str]] = {}
    slopes: dict[tuple[str, str, str], Tensor] = {}
    for x in (torch.zeros_like(draws[0]), draws[0], -3 * draws[1]):
        x.requires_grad_()
        for name, site in sample_sites(run(x)).items():
            if not is_observation(site) or not _depends(site["fn"].log_prob(site["value"]), x):
                continue
            fn = bare(site["fn"])
            moving = _moving(fn, site["value"], x)
            for key, part in moving.items():
                able = [link for link in candidates(fn, key) if _is_affine(part, fn, x, slopes, (name, key, link))]
                if not able:
                    return None
                found.setdefault(name, {})[key] = able[0]
            if not moving:
                return None
    chosen = [slopes[name, key, link] for name, of_site in found.items() for key, link in of_site.items()]

    def is_owned(name: str, rows: slice) -> bool:
        several = name not in layout.residuals and rows.stop - rows.start > 1
        return several and all(((slope[rows] != 0).sum(0) <= 1).all() for slope in chosen)

    return found, [name for name, rows in layout.rows.items() if is_owned(name, rows)]


def _moving(fn: Any, value: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The parameters of a density of single data that depend on x: one or two, of which it can be made anew."""
    made_of = {} if fn.event_shape else parameters(fn)
    moving = {key: part for key, part in made_of.items() if _depends(part, x)}
    is_single = len(moving) <= 2 and all(part.dim() <= len(fn.batch_shape) for part in moving.values())
    return moving if is_single and _is_rebuilt(fn, value) else {}


def _is_affine(part: Tensor, fn: Any, x: Tensor, slopes: dict[Any, Tensor], place: tuple[str, str, str]) -> bool:
    """Whether a parameter under a link has the slopes that it had at other x; NaN is kept where it has not."""
    here = jacobian(LINKS[place[-1]][0](part.expand(fn.batch_shape).reshape(-1)), x).detach()
    there = slopes.setdefault(place, here)
    if not ((here - there).abs() <= (1e-6 if here.dtype == torch.float64 else 1e-2) * there.abs().amax()).all():
        slopes[place] = torch.full_like(there, torch.nan)
    return bool(slopes[place].isfinite().all())


class Predictors:
    """The linear predictors η = η(0) + Jx + J'√ρt of a run's likelihoods, and densities at values of theirs.

    :param sites: of a run that is standardised by ``x``, ``(extended,)``.
    :param links: by site and parameter.

    ``eta`` are the run's, ``(N,)`` by site and parameter; ``rows`` are J of common entries, ``residuals`` J', and
    ``owned`` the entries, owners and slopes of owned latents, as :meth:`Layout.split` has them.
    """

    def __init__(self, sites: Any, links: Mapping[str, Mapping[str, str]], x: Tensor, layout: Layout) -> None:
        self.sites, self.links = sites, links
        self.eta: dict[tuple[str, str], Tensor] = {}
        for name, of_site in links.items():
            fn, made_of = bare(sites[name]["fn"]), parameters(sites[name]["fn"])
            for key, link in of_site.items():
                self.eta[name, key] = LINKS[link][0](made_of[key].expand(fn.batch_shape).reshape(-1))
        self.rows: dict[tuple[str, str], Tensor] = {}
        self.residuals: dict[tuple[str, str], Tensor] = {}
        self.layout = layout
        self.owned: dict[tuple[str, str], list[tuple[slice, Tensor, Tensor]]] = {}
        if not self.eta:  # a step without some of the data
            return
        every = jacobian(torch.cat(list(self.eta.values())), x, layout.directions(x))
        for place, part in zip(self.eta, every.split([len(eta) for eta in self.eta.values()], -1)):
            self.rows[place], self.residuals[place], self.owned[place] = layout.split(part)

    def detached(self) -> Predictors:
        """These without their graph."""
        other = copy.copy(self)
        other.eta = {place: eta.detach() for place, eta in self.eta.items()}
        other.rows = {place: row.detach() for place, row in self.rows.items()}
        other.owned = {p: [(e, o, slope.detach()) for e, o, slope in own] for p, own in self.owned.items()}
        return other

    def dense(self, place: tuple[str, str]) -> Tensor:
        """J, ``(N, num)``."""
        own = self.rows[place]
        rows = own.new_zeros(len(own), self.layout.num).index_copy(1, self.layout.common(own), own)
        for entries, owner, slope in self.owned[place]:
            rows = rows.index_put((torch.arange(len(slope), device=slope.device), entries.start + owner), slope)
        return rows

    def distribution(self, name: str, eta: Mapping[str, Tensor]) -> Any:
        """A site's distribution of single data at predictors ``(..., N)`` by parameter."""
        shape = bare(self.sites[name]["fn"]).batch_shape
        changed = {
            key: LINKS[self.links[name][key]][1](value.reshape(value.shape[:-1] + shape)) for key, value in eta.items()
        }
        return rebuilt(self.sites[name]["fn"], changed)

    def summed(self, name: str, each: Tensor) -> Tensor:
        """The sum of a term for each datum of a site, as the site scales and masks them."""
        site = self.sites[name]
        return scale_and_mask(rewrapped(site["fn"], each), site["scale"], site["mask"]).sum()

    def log_density(self, eta: Mapping[tuple[str, str], Tensor]) -> Tensor:
        """ℓ at predictors, of all sites that depend on any."""
        total: Any = 0.0
        for name in self.links:
            own = {key: value for (site, key), value in eta.items() if site == name}
            total = total + self.summed(name, self.distribution(name, own).log_prob(self.sites[name]["value"]))
        return total


def _depends(value: Tensor, x: Tensor) -> bool:
    """Whether x is in a value's graph."""
    return (
        value.requires_grad and torch.autograd.grad(value.sum(), x, allow_unused=True, retain_graph=True)[0] is not None
    )


def _is_rebuilt(fn: Any, value: Tensor) -> bool:
    try:
        return torch.equal(rebuilt(fn, {}).log_prob(value), fn.log_prob(value))
    except (TypeError, ValueError, RuntimeError):
        return False


# Its Gaussian, and what runs of the guide take of it.


def make_field(guide: KnownGuide, field: Mapping[str, list[int]]) -> None:
    """Make q(x), in the place of the members' own posteriors."""
    sizes = [size for own in field.values() for size in own]
    made = NaturalGaussian(sizes, (), guide.like.new_zeros(1), kind=FullCholesky)
    guide.field = Shared(made, {name: len(own) for name, own in field.items()})


def anchor_of(guide: KnownGuide, bases: Mapping[str, Any], priors: Mapping[str, Any]) -> Tensor:
    """L with u = Lx, whose meaning hyperparameters do not change: values at inducing inputs, and latents' own."""
    parts: list[Tensor] = []
    for name, sizes in guide.facts.field.items():
        if name not in bases:
            parts.append(_scale_of(priors[name]))
            continue
        for size, block in zip(sizes, bases[name].anchors):
            parts.append(torch.eye(size, dtype=guide.like.dtype, device=guide.like.device) if block is None else block)
    return torch.block_diag(*parts)
