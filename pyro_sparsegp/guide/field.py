"""All of a program that is normal given its hyperparameters, as one field x ~ N(0, I).

A GP site is f = μ + φᵀw + r, a latent with a normal prior v = loc + Lz: w and z are entries of x, in the program's
order. Given the hyperparameters θ, q(x) is one Gaussian, so that intercepts, group effects and functions keep what they
share; its sites are about Lx, whose meaning θ does not change. Each parameter of a likelihood is, under a link, an
affine function of x: its linear predictor.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Optional, Union

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from ..approximations.on_sites import ExactGP
from ..bases.base import Features
from ..gaussians import AtRows, NaturalGaussian
from ..gaussians.natural_arrow import NaturalArrow
from ..gaussians.product import Shared
from ..kernels import Kernel
from ..numerics.arrow import Arrow, Dense, OneEach
from ..numerics.functions import depends, jacobian
from ..numerics.linalg import plus_one, residual_cholesky, side_by_side
from ..process import GaussianProcess
from ..program.asking import answers
from ..program.enumeration import Enumeration
from ..program.facts import NO_VALUES, Values
from ..program.handlers import NO_RUN, trace_like
from ..program.traces import as_process, bare, repeatable
from .known import KnownGuide

LARGEST = 2000  # entries of a field whose covariance is dense: all but those of an eliminated latent


def is_normal_prior(prior: Any) -> bool:
    """Whether a latent's prior is normal; a subclass may have another density."""
    return type(bare(prior)) in (dist.Normal, dist.MultivariateNormal)


def standardised(prior: Any, z: Tensor) -> Tensor:
    """loc + Lz of a normal prior."""
    fn, z = bare(prior), z.reshape(z.shape[:-1] + prior.shape())
    return fn.loc + (fn.scale * z if isinstance(fn, dist.Normal) else (fn.scale_tril.to(z) @ z[..., None])[..., 0])


def _scale_of(prior: Any) -> Tensor:
    """L of all values of a normal prior, ``(n, n)``, or its diagonal, ``(n,)``."""
    fn = bare(prior)
    if isinstance(fn, dist.Normal):
        return fn.scale.expand(prior.shape()).reshape(-1)
    # Values of a plate are independent: blocks.
    tril = fn.scale_tril.expand(*prior.shape(), prior.shape()[-1])
    return torch.block_diag(*tril.reshape(-1, *tril.shape[-2:]))


class Layout:
    """Where entries stand in x, and in the tensor of all that a run is standardised by.

    :param field: of each GP site and normal latent, in order, the sizes of its blocks of x.
    :param residuals: of each GP site the number of standardised residuals: one, √ρ·t at all inputs, serves where no
        term depends on values at several.
    :param owned: the latents with at most one value a datum, such as its group's.
    :param eliminated: the one of these whose values meet the common entries alone, so that P is an :class:`Arrow`; it
        is the field's last member.
    """

    def __init__(
        self,
        field: Mapping[str, list[int]],
        residuals: Mapping[str, int],
        owned: Collection[str] = (),
        eliminated: str = "",
    ) -> None:
        self.field, self.residuals, self.eliminated = dict(field), dict(residuals), eliminated
        self.owned = [name for name in self.field if name in owned]
        self.sizes = [size for sizes in self.field.values() for size in sizes]
        self.numbers = {name: sum(sizes) for name, sizes in self.field.items()}
        self.rows = slices(self.numbers)  # the entries of each member
        self.num, self.extended = sum(self.sizes), sum(self.sizes) + sum(self.residuals.values())
        self.dense = self.num - self.numbers.get(eliminated, 0)

    def directions(self, like: Tensor) -> Tensor:
        """Directions of x: one for each common entry, and two of owned latents, 1 and k, which give the k-th one's
        slope.
        """
        # A datum has one value of an owned latent, so that a direction of all its entries serves for each.
        owned = like.new_zeros(2 * len(self.owned), self.extended)
        for i, rows in enumerate(self.rows[name] for name in self.owned):
            owned[2 * i, rows] = 1.0
            owned[2 * i + 1, rows] = torch.arange(rows.stop - rows.start, device=like.device, dtype=like.dtype)
        places = torch.cat([self.common(like), torch.arange(self.num, self.extended, device=like.device)])
        each = like.new_zeros(len(places), self.extended).scatter(1, places[:, None], 1.0)
        return torch.cat([each, owned])

    def common(self, like: Tensor) -> Tensor:
        """The entries of x that are no owned latent's."""
        return index_of(self.rows, [name for name in self.rows if name not in self.owned], like)

    def split(self, found: Tensor) -> tuple[Any, Tensor, list[Tensor]]:
        """J, ``(N, num)``, a tensor or :class:`OneEach`, that of residuals, and of each owned latent the entry that
        each datum has, ``(N,)``.

        :param found: J along :meth:`directions`.
        """
        common, places = self.common(found), torch.arange(found.shape[-1], device=found.device)
        first, rest, others = found.tensor_split([len(common), len(common) + self.extended - self.num])
        rows, owned = first.mT, list[Tensor]()
        if self.owned != [self.eliminated]:
            rows = found.new_zeros(found.shape[-1], self.dense).index_copy(1, common, rows)
        for name, (slope, moved) in zip(self.owned, others.unflatten(0, (-1, 2))):
            # kj/j is which of the latent's values the datum has
            owner = torch.where(slope == 0, 0.0, moved / slope).detach().round().long().clamp(0, self.numbers[name] - 1)
            owned.append(self.rows[name].start + owner)
            if name == self.eliminated:  # the last one
                return OneEach(torch.cat([rows, slope[:, None]], 1), owner, self.numbers[name]), rest.mT, owned
            rows = rows.index_put((places, owned[-1]), slope)
        return rows, rest.mT, owned

    def nothing(self, like: Tensor) -> Any:
        """G = 0 of this layout."""
        own = self.num - self.dense
        parts = like.new_zeros(self.dense, self.dense), like.new_zeros(self.dense, own), like.new_zeros(own)
        return Arrow(*parts) if self.eliminated else parts[0]

    def precision(self, gram: Any) -> Union[Dense, Arrow]:
        """P = I + G of this layout."""
        return gram.plus(1.0) if self.eliminated else Dense.of(plus_one(gram))

    def extend(self, x: Tensor) -> Tensor:
        """x, ``(num,)``, with residuals of 0."""
        return torch.cat([x, x.new_zeros(self.extended - self.num)])

    def parts(self, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """``(extended,)`` numbers in parts: each member's, and each GP site's residual's."""
        every = x.split([*self.numbers.values(), *self.residuals.values()])
        return dict(zip(self.field, every)), dict(zip(self.residuals, every[len(self.field) :]))


def slices(numbers: Mapping[str, int]) -> dict[str, slice]:
    """Where so many entries of each name stand, one after another."""
    found, start = {}, 0
    for name, number in numbers.items():
        found[name] = slice(start, start + number)
        start += number
    return found


def index_of(rows: Mapping[str, slice], names: Iterable[str], like: Tensor) -> Tensor:
    """The entries of some names, on a tensor's device: a list would be copied to it each time."""
    each = [torch.arange(rows[name].start, rows[name].stop, device=like.device) for name in names]
    return torch.cat([torch.arange(0, device=like.device), *each])


def basis_of(guide: KnownGuide, name: str, process: Any) -> Any:
    """A GP site's basis under its kernel: of the exact family, values at the inputs."""
    module = guide.module_of(name)
    if isinstance(module, ExactGP) and not module.basis.sizes:
        return module.prepared(process, name, process.x)[0]
    return module.basis(process.kernel, process.jitter, name)


class Standardised(Messenger):
    """Gives the members of a field values made of x, and hyperparameters values made of θ.

    :param x: by member, and ``residuals`` by GP site, standardised.
    :param theta: hyperparameters in unconstrained space.
    :param bases: of GP sites, where they are known.

    Afterwards ``log_prior`` is log p(θ) there; ``values`` are the members' by name, and ``features`` their slopes by x.
    """

    def __init__(
        self, guide: KnownGuide, x: Values, residuals: Values, theta: Values = NO_VALUES, bases: Mapping = NO_VALUES
    ) -> None:
        super().__init__()
        self.guide, self.x, self.residuals, self.theta = guide, x, residuals, theta
        self.log_prior: Any = 0.0
        self.values: dict[str, Tensor] = {}
        self.priors: dict[str, Any] = {}
        self.features: dict[str, list[Tensor]] = {}
        self.bases: dict[str, Any] = dict(bases)

    @answers()
    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"]:
            return
        if name in self.theta:
            transform = biject_to(fn.support)
            value = transform(self.theta[name]).to(self.guide.like)
            # log p(θ) = log p(v) + log |dv/dθ|
            log_prior = transform.log_abs_det_jacobian(self.theta[name], value).sum()
            # A latent below f has a density as data have.
            msg["is_observed"] = name in self.guide.facts.downstream
            log_prior = log_prior if msg["is_observed"] else log_prior + fn.log_prob(value).sum()
            self.log_prior = self.log_prior + msg["scale"] * log_prior
        elif name in self.x or name in self.residuals:
            process, _ = as_process(fn)
            if process is None:
                self.features[name], value = [_scale_of(fn)], standardised(fn, self.x[name]).to(self.guide.like)
            else:
                value = self._of_process(name, process)
            self.values[name] = value
        else:
            return
        self.priors[name] = fn
        msg["value"], msg["done"] = value, True

    @staticmethod
    def sizes_of(module: Any) -> list[int]:
        """How many entries each block of a GP site's basis has, if it has any."""
        return list(module.basis.sizes)

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
            what = f"the residual covariance of site {name!r}"
            return value + residual_cholesky(process.kernel(process.x), blocks, process.jitter, what) @ t
        # Values are taken one by one: their variances say all.
        left = process.variance - sum(phi.square().sum(-1) for phi in blocks)
        return value + left.clamp(min=torch.finfo(left.dtype).tiny).sqrt() * t


def run_standardised(
    guide: KnownGuide,
    args: tuple,
    kwargs: dict[str, Any],
    handler: Standardised,
    values: Values = NO_VALUES,
    like: poutine.Trace = NO_RUN,
) -> poutine.Trace:
    """A run of the model with a field's members at values of x, and values of other latents and plates' row numbers.

    :param like: a run under the handlers around this one, whose scales and masks sites get.
    """
    held = poutine.condition(Enumeration()(guide.model), data=dict(values))
    with pyro.validation_enabled(False), repeatable(guide.like):
        return trace_like(like, lambda: held(*args, **kwargs), handler)


# Its Gaussian, and what runs of the guide take of it.


def make_field(guide: KnownGuide, field: Mapping[str, list[int]]) -> None:
    """Make q(x | θ), instead of the members' own posteriors."""
    sizes, like = [size for own in field.values() for size in own], guide.like.new_zeros(1)
    made = NaturalArrow(sizes, like) if guide.joint.eliminated else NaturalGaussian(sizes, (), like)
    guide.field = Shared(made, {name: len(own) for name, own in field.items()})


def anchor_of(
    guide: KnownGuide, bases: Mapping[str, Any], priors: Mapping[str, Any], sites: Mapping[str, Any]
) -> AtRows:
    """Of each member A with u = Ax, whose meaning hyperparameters and inducing inputs do not change: its values at some
    rows, and a latent's own, times what the program, in a run of these sites, multiplies them by.
    """
    parts: list[Tensor] = []
    for i, name in enumerate(guide.joint.field):
        # exp(bᵀθ)A: of a non-centred latent u is what it is multiplied to
        factors = guide.joint.factors.get(name, {}).items()
        logs = [_unconstrained(sites[other]) @ guide.like.new_tensor(slopes) for other, slopes in factors]
        at = side_by_side(bases[name](getattr(guide.field, f"rows_{i}"))) if name in bases else _scale_of(priors[name])
        if name in guide.joint.row_effects and len(at) != sum(guide.joint.field[name]):  # of new rows
            at = at[:1].expand(sum(guide.joint.field[name]))
        # priors of Python numbers are on the host, of the default dtype
        parts.append(sum(logs, guide.like.new_zeros(())).exp() * at.to(guide.like))
    anchor = AtRows(parts)
    if guide.joint.intercepts:  # what they add to the values Ax: sites are about the sum, of which f is what they leave
        values = [
            _unconstrained(sites[name]) if name in guide.joint.unconstrained else sites[name]["value"].reshape(-1)
            for name in guide.joint.intercepts
        ]
        anchor.level = guide.field.slopes @ torch.cat(values).to(guide.like)
    return anchor


def _unconstrained(site: Any) -> Tensor:
    return biject_to(site["infer"].get("prior", site["fn"]).support).inv(site["value"]).reshape(-1)


class _MadeOf(Kernel):
    """k + JJᵀ, of f = μ + Jz + r where a GP site's prior mean is made of latents that are normal, z ~ N(0, I).

    :param here: the process at z = 0, and ``there`` with its graph to each latent's ``z``.
    """

    def __init__(self, here: GaussianProcess, there: GaussianProcess, z: list[Tensor]) -> None:
        self.here, self.there, self.z = here, there, z

    @property
    def terms(self) -> tuple[Any, ...]:
        return self.here.kernel.terms

    def blocks(self, x: Tensor) -> list[Tensor]:
        """J, by latent."""
        with torch.inference_mode(False), torch.enable_grad():
            # a clone has a graph, where x is of inference mode
            mean = self.there.mean if x is self.here.x else self.there.mean_at(x.clone()).expand(x.shape[:-1])
            found = [jacobian(mean.reshape(-1), z).mT.unflatten(0, mean.shape) for z in self.z]
        return found if torch.is_grad_enabled() else [part.detach() for part in found]

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        first, second = side_by_side(self.blocks(x)), side_by_side(self.blocks(x if z is None else z))
        return self.here.kernel(x, z) + first @ second.mT

    def diag(self, x: Tensor) -> Tensor:
        return self.here.kernel.diag(x) + side_by_side(self.blocks(x)).square().sum(-1)


class _WithMean(Features):
    """A GP site's features and its mean's."""

    def __init__(self, basis: Features, kernel: _MadeOf) -> None:
        super().__init__(kernel, basis.sizes + tuple(map(len, kernel.z)))
        self.basis = basis

    def __call__(self, x: Tensor) -> list[Tensor]:
        return [*self.basis(x), *self.kernel.blocks(x)]

    def components(self) -> list[Any]:
        return self.basis.components()


def with_means(
    processes: Callable[[Mapping[str, Tensor]], Mapping[str, GaussianProcess]],
    normal: Mapping[str, Tensor],
    bases: Mapping[str, Features],
) -> dict[str, tuple[GaussianProcess, Features, list[str]]]:
    """Of each GP site whose prior mean is made of latents of the field its process, features, and these latents.

    Else its variance would be that of f − μ, test_a_posterior_whose_mean_is_made_of_latents.

    :param processes: the GP sites' priors at standardised values of these latents.
    :param normal: zeros, of the shape of each latent's.
    """
    with torch.inference_mode(False), torch.enable_grad():
        z = {name: zero.clone().requires_grad_() for name, zero in normal.items()}
        there = processes(z)
        made_of = {name: [n for n in z if depends(process.mean, z[n])] for name, process in there.items()}
    here = processes(normal) if any(made_of.values()) else {}
    found = dict[str, tuple[GaussianProcess, Features, list[str]]]()
    for name, latents in made_of.items():
        if latents:
            kernel = _MadeOf(here[name], there[name], [z[latent] for latent in latents])
            found[name] = here[name].with_kernel(kernel), _WithMean(bases[name], kernel), latents
    return found
