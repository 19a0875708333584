"""All of a program that is normal given its hyperparameters, as one field x ~ N(0, I).

A GP site is f = μ + φᵀw + r, a latent with a normal prior v = loc + Lz: w and z are entries of x, in the program's
order. Given the hyperparameters θ, q(x) is one Gaussian, so that intercepts, group effects and functions keep what they
share; its sites are about Lx, whose meaning θ does not change. Each parameter of a likelihood is, under a link, an
affine function of x: its linear predictor.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to
from torch.nn.functional import pad

from ..gaussians import AtRows, NaturalGaussian
from ..gaussians.following import Following
from ..gaussians.natural_arrow import NaturalArrow
from ..gaussians.product import JointCoefficients
from ..numerics.arrow import Arrow, OneEach
from ..numerics.linalg import residual_cholesky, side_by_side, sum_blocks, times
from ..program.asking import answers
from ..program.enumeration import Enumeration
from ..program.handlers import NO_RUN, trace_like
from ..program.owners import NO_VALUES, Values
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
    :param eliminated: the field's last member, if each datum has at most one value of it, such as its group's, which
        meets the common entries alone, so that P is an :class:`Arrow`.
    """

    def __init__(self, field: Mapping[str, list[int]], residuals: Mapping[str, int], eliminated: str = "") -> None:
        self.field, self.residuals, self.eliminated = dict(field), dict(residuals), eliminated
        self.sizes = [size for sizes in self.field.values() for size in sizes]
        self.numbers = {name: sum(sizes) for name, sizes in self.field.items()}
        self.rows = slices(self.numbers)  # the entries of each member
        self.num, self.extended = sum(self.sizes), sum(self.sizes) + sum(self.residuals.values())
        self.dense = self.num - self.numbers.get(eliminated, 0)

    def directions(self, like: Tensor) -> Tensor:
        """Directions of x, ``(K, extended)``, along which J is found: each common entry; of an eliminated latent two,
        with 1 and k as k-th entries: the ratio of both slopes says which value a datum has.
        """
        # A datum has one value of it, so that a direction of all its entries serves for each.
        num = self.num - self.dense
        each = torch.cat([like.new_ones(1, num), torch.arange(num, device=like.device, dtype=like.dtype)[None]])
        common, rest = torch.eye(self.extended - num, dtype=like.dtype, device=like.device).split(
            [self.dense, self.extended - self.num], 1
        )
        found = torch.cat([common, like.new_zeros(len(common), num), rest], 1)
        return torch.cat([found, pad(each, (self.dense, self.extended - self.num))]) if self.eliminated else found

    def split(self, found: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
        """J, ``(N, num)``, a tensor or :class:`OneEach`, and that of residuals, of each of some data's predictors. All
        of a datum's have one owner, unless they are of two, which does not tell.

        :param found: J along :meth:`directions`, of each.
        """
        parts = [each.tensor_split([self.dense, self.dense + self.extended - self.num]) for each in found]
        if not self.eliminated:
            return [(common.mT, rest.mT) for common, rest, _ in parts]
        # kj/j is which of its values the datum has; 0, too, where a predictor has none
        each, num = [torch.where(own[0] == 0, 0.0, own[1] / own[0]) for *_, own in parts], self.num - self.dense
        owner = torch.stack(each).detach().amax(0).round().long().clamp(0, num - 1)
        return [(OneEach(torch.cat([common, own[:1]]).mT, owner, num), rest.mT) for common, rest, own in parts]

    def nothing(self, like: Tensor) -> Arrow:
        """G = 0 of this layout."""
        own = self.num - self.dense
        return Arrow(like.new_zeros(self.dense, self.dense), like.new_zeros(self.dense, own), like.new_zeros(own))

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
    if not module.basis.sizes:
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
        self.members = {*x, *residuals}
        self.log_prior: Any = 0.0
        self.values: dict[str, Tensor] = {}
        self.priors: dict[str, Any] = {}
        self.features: dict[str, list[Tensor]] = {}
        self.bases: dict[str, Any] = dict(bases)

    @answers
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
        elif name in self.members:
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
    def sizes_of(module: Any, rows: int) -> list[int]:
        """How many entries each block of a GP site has, output by output; of values at so many rows without a basis."""
        return list(module.basis.sizes or [rows]) * module.batch_shape.numel()

    def _of_process(self, name: str, process: Any) -> Tensor:
        """μ + φᵀw + Rt, with RRᵀ the residual's covariance; √ρ t of its variance where no term adds values up."""
        if name not in self.bases:
            self.bases[name] = basis_of(self.guide, name, process)
        basis = self.bases[name]
        blocks, outputs = basis(process.x), (*process.batch_shape, -1)
        self.features[name], sizes = blocks, [phi.shape[-1] for phi in blocks]
        x = self.x.get(name, process.x.new_zeros(process.batch_shape.numel() * sum(sizes)))
        w, t = x.reshape(outputs).split(sizes, -1), self.residuals[name].reshape(outputs)
        value = process.mean + sum_blocks(blocks, w)
        if t.shape[-1] > 1:
            what = f"the residual covariance of site {name!r}"
            return value + times(residual_cholesky(process.kernel(process.x), blocks, process.jitter, what), t)
        # Values are taken one by one: their variances say all.
        left = process.variance - sum(phi.square().sum(-1) for phi in blocks)
        return value + left.clamp(min=torch.finfo(left.dtype).tiny).sqrt() * t


class AtValues(Standardised):
    """GP sites are f = μ + Lx with LLᵀ = k(X, X): their values at all inputs, without a basis."""

    @staticmethod
    def sizes_of(module: Any, rows: int) -> list[int]:
        return [rows] * module.batch_shape.numel()

    def _of_process(self, name: str, process: Any) -> Tensor:
        self.features[name], mean = [process.scale_tril], process.mean
        return mean + times(process.scale_tril, self.x.get(name, torch.zeros_like(mean)).reshape(mean.shape))


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


def require_rows_of_effects(guide: KnownGuide, priors: Mapping[str, Any]) -> None:
    """Raise if latents that have a value for each row of training have others in a run with these priors."""
    numbers = {name: prior.shape().numel() for name, prior in priors.items() if name in guide.joint.row_effects}
    if others := [name for name, num in numbers.items() if num != sum(guide.joint.field[name])]:
        raise ValueError(
            f"latent site {others[0]!r} has a value for each row of the training data, and a bound at other rows would "
            "need its posterior there. Give the training data; diagnostics.predictive_scores takes other rows."
        )


# Its Gaussian, and what runs of the guide take of it.


def make_field(guide: KnownGuide, field: Mapping[str, list[int]]) -> None:
    """Make q(x | θ), instead of the members' own posteriors."""
    joint, sizes, like = guide.joint, [size for own in field.values() for size in own], guide.like.new_zeros(1)
    numbers = {name: len(own) for name, own in field.items()}
    rates = [getattr(guide.family_of(name), "rate", None) for name in field if name in guide.facts.gps]
    rate = rates[0] if rates == rates[:1] * len(rates) else None
    made: Any
    if joint.followed:
        (own,) = joint.followed
        blocks = slices(numbers)[own]
        made = Following(guide.module_of(own).coefficients, range(blocks.start, blocks.stop), sizes, like, rate)
    else:
        made = NaturalArrow(sizes, like, rate) if joint.eliminated else NaturalGaussian(sizes, (), like, rate=rate)
    guide.field = JointCoefficients(made, numbers)


def anchor_of(guide: KnownGuide, bases: Mapping[str, Any], priors: Mapping[str, Any], sites: Mapping[str, Any]) -> Any:
    """As coefficients want it: of each member A with u = Ax, whose meaning hyperparameters and inducing inputs do not
    change: its values at some rows, and a latent's own, times what the program, in a run of these sites, multiplies
    them by.
    """
    parts: list[Tensor] = []
    for i, name in [(i, name) for i, name in enumerate(guide.joint.field) if name not in guide.joint.followed]:
        # exp(bᵀθ)A: of a non-centred latent u is what it is multiplied to
        factors = guide.joint.factors.get(name, {}).items()
        logs = [_unconstrained(sites[other]) @ guide.like.new_tensor(slopes) for other, slopes in factors]
        # priors of Python numbers are on the host, of the default dtype
        factor = sum(logs, guide.like.new_zeros(())).exp()
        if name in bases:
            at = factor * side_by_side(bases[name](getattr(guide.field, f"rows_{i}")))
            parts += at.expand(*guide.module_of(name).batch_shape, *at.shape[-2:]).reshape(-1, *at.shape[-2:])
            continue
        at = _scale_of(priors[name]).to(guide.like)
        if len(at) != sum(guide.joint.field[name]):  # of an effect of new rows
            at = at[:1].expand(sum(guide.joint.field[name]))
        parts.append(factor * at)
    anchor = AtRows(parts, by_draws=bool(guide.joint.drawn))
    if guide.joint.followed:
        (own,) = guide.joint.followed
        return guide.module_of(own).coefficients.anchor_of(bases[own]), anchor
    if weights := guide.joint.weights:
        logs = [_unconstrained(sites[name]) @ guide.like.new_tensor(slopes) for name, slopes in weights.items()]
        anchor.log_weight = sum(logs, guide.like.new_zeros(()))
    if guide.joint.intercepts:  # what they add to the values Ax: sites are about the sum, of which f is what they leave
        values = [
            _unconstrained(sites[name]) if name in guide.joint.unconstrained else sites[name]["value"].reshape(-1)
            for name in guide.joint.intercepts
        ]
        anchor.level = guide.field.slopes @ torch.cat(values).to(guide.like)
    return anchor


def _unconstrained(site: Any) -> Tensor:
    return biject_to(site["infer"].get("prior", site["fn"]).support).inv(site["value"]).reshape(-1)
