"""The posterior of a Gaussian process under a sparse variational family, and its sample functions.

The only place with the marginal formula: with a basis f = μ + φᵀw + r, r ⟂ w, and any Gaussian q(w) = N(m, S),

    E f(x) = μ(x) + φ(x)ᵀm
    Cov(f(x), f(x')) = k(x, x') + φ(x)ᵀ(S − I)φ(x')
    KL[q ‖ p] = ½(tr S + mᵀm − M − log|S|), of the whole process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Optional

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints, register_kl

from ..bases.base import Features
from ..gaussians.base import Gaussian, Given
from ..gaussians.free import ProjectedGaussian
from ..gaussians.sites import Sites
from ..kernels import Kernel
from ..kernels.base import hyperparameters
from ..numerics.functions import broadcast_shapes, by_rows, in_chunks
from ..numerics.linalg import (
    above_rounding,
    cholesky,
    default_jitter,
    plus_one,
    residual_cholesky,
    row_squares,
    solve_lower,
    sum_blocks,
    times,
)
from ..process import GaussianProcess
from .components import Components


class SparsePosterior(TorchDistribution):
    """The posterior of a Gaussian process under a finite basis and a Gaussian over its coefficients.

    A distribution over the values at the process's inputs x, with event shape ``(N,)``; :meth:`at` gives it at
    other inputs. ``rsample`` draws values jointly. A function has no Lebesgue density: ``log_prob``, of the last draw
    alone, is relative to the prior process, log dq/dp = log q(w) − log p(w).

    :param process: the prior at the inputs.
    :param basis: the basis under that prior's kernel.
    :param coefficients: q(w).
    :param name: the site, for errors.
    :param sites: q(w)'s Gaussian likelihood terms, if any.
    :param features: Φ at the inputs, if known already.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True
    support = constraints.real_vector
    _draw: tuple[Any, Any] = (None, None)  # the last one, and its coefficients

    def __init__(
        self,
        process: GaussianProcess,
        basis: Features,
        coefficients: Gaussian,
        name: str = "f",
        sites: Optional[Sites] = None,
        features: Optional[list[Tensor]] = None,
    ) -> None:
        self.process, self.basis, self.coefficients, self.name = process, basis, coefficients, name
        self.sites = sites
        if features is not None:
            self.features = features
        batch_shape = broadcast_shapes(process.batch_shape, coefficients.batch_shape)
        super().__init__(batch_shape, process.event_shape, validate_args=False)

    @cached_property
    def features(self) -> list[Tensor]:
        """Φ at the inputs, a block ``(..., N, M_b)`` for each block of coefficients."""
        return self.basis(self.process.x)

    @cached_property
    def _moments(self) -> tuple[Tensor, ...]:
        """Φm, diag(Φ(S − I)Φᵀ) and the kernel's diagonal, ``(..., N)`` each."""
        x, known = self.process.x, vars(self).get("features")
        at = partial(self.basis.marginals, coefficients=self.coefficients, known=known)
        # Without a graph the features of many rows are never in memory at once. A diagonal that depends on the rows
        # is that in the company of all of them.
        whole = known is not None or torch.is_grad_enabled() or self.process.kernel.depends_on_rows
        found = at(x) if whole else by_rows(at, x)
        return tuple([part.expand(self._batch_shape + self._event_shape) for part in found])

    @cached_property
    def mean(self) -> Tensor:
        """μ + Φm, ``(..., N)``."""
        return self.process.mean_at(self.process.x) + self._moments[0]

    @cached_property
    def variance(self) -> Tensor:
        """diag(k(x, x) + Φ(S − I)Φᵀ), ``(..., N)``, kept above rounding error; given coefficients it may be 0."""
        _, change, prior = self._moments
        # Features that leave nothing of f beside w: test_finite_features_leave_no_residual
        known = type(self.coefficients) is Given
        return (prior + change).clamp(min=0) if known else above_rounding(prior + change, prior)

    @property
    def stddev(self) -> Tensor:
        """The square root of :attr:`variance`."""
        return self.variance.sqrt()

    @property
    def covariance_matrix(self) -> Tensor:
        """k(x, x) + Φ(S − I)Φᵀ, ``(..., N, N)``."""
        # ρ + ΦSΦᵀ with ρ = k − ΦΦᵀ
        covariance = self.process.kernel(self.process.x) + self.coefficients.covariance_change(self.features)
        return covariance.expand(self._batch_shape + self._event_shape * 2)

    @property
    def marginals(self) -> dist.Normal:
        """Independent normals with this posterior's mean and variance, batch shape ``(..., N)``."""
        return dist.Normal(self.mean, self.stddev, validate_args=False)

    @cached_property
    @torch.no_grad()
    def mathematical_variance(self) -> Tensor:
        """The variance, ``(..., N)``, that the exact posterior given the same Gaussian sites would have.

        diag(k(x, x) − k(x, X)(k(X, X) + Λ⁻¹)⁻¹k(X, x)), in O(N³) for the N training rows with λ > 0: what more data,
        not more computation, would reduce (Wenger et al., 2024, section 2).

        :raises ValueError: if the family keeps no sites.
        """
        if self.sites is None:
            raise ValueError(f"site {self.name!r} has no Gaussian sites: take a family on sites, such as SGPR")
        root, x, kernel = self.sites.precision.sqrt(), self.sites.inputs, self.process.kernel
        # k − k(·, X)Λ^½(I + Λ^½KΛ^½)⁻¹Λ^½k(X, ·): no division by a λ of 0
        gram = root[..., None] * kernel(x) * root[..., None, :]
        factor = cholesky(plus_one(gram), 0.0, f"I + Λ^½KΛ^½ of site {self.name!r}")
        explained = solve_lower(factor, root[..., None] * kernel(x, self.process.x)).square().sum(-2)
        variance = kernel.diag(self.process.x) - explained
        return variance.clamp(min=0).expand(self._batch_shape + self._event_shape)

    @property
    def computational_variance(self) -> Tensor:
        """The part of the variance, ``(..., N)``, that stems from limited computation (Wenger et al., 2024, section 2).

        :attr:`variance` minus :attr:`mathematical_variance`, at its cost. It is never negative for data projections;
        for inducing points it may be: those can be overconfident.
        """
        return (self.variance - self.mathematical_variance).detach()

    @cached_property
    def kl(self) -> Tensor:
        """KL[q ‖ p] of the whole process from its prior, in nats, of the batch's shape (a scalar without one)."""
        return self.coefficients.kl().expand(self._batch_shape)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> SparsePosterior:
        """Independent copies with the given batch shape."""
        process, known = self.process.expand(batch_shape), vars(self).get("features")
        return type(self)(process, self.basis, self.coefficients, self.name, self.sites, known)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Joint draws of the values, ``(*sample_shape, ..., N)``, in O(N³); their coefficients are kept."""
        shape = torch.Size(sample_shape) + self._batch_shape
        w = self.coefficients.rsample(shape)
        value = self.process.mean_at(self.process.x) + sum_blocks(self.features, w)
        noise = torch.randn(shape + self._event_shape, dtype=value.dtype, device=value.device)
        # f = μ + Φw + Rε with RRᵀ = ρ
        value = value + times(self.residual_tril, noise)
        self._draw = value, w
        return value

    def given(self, w: Sequence[Tensor]) -> SparsePosterior:
        """The posterior given coefficients, N(μ + Φw, ρ).

        :param w: a block ``(..., M_b)`` for each block of coefficients.
        """
        return SparsePosterior(self.process, self.basis, Given(w), self.name, self.sites, vars(self).get("features"))

    def with_density(self) -> SparsePosterior:
        """The same posterior by coefficients that have draws and a density: itself, but of projected data."""
        if not isinstance(self.coefficients, ProjectedGaussian):
            return self
        basis: Any = copy.copy(self.basis)
        basis.turn, q = self.coefficients.of_projections()
        known = [psi @ basis.turn for psi in self.features] if "features" in vars(self) else None
        return SparsePosterior(self.process, basis, q, self.name, self.sites, known)

    @cached_property
    def residual_tril(self) -> Tensor:
        """Cholesky factor of ρ, the residual's covariance at the inputs, ``(..., N, N)``."""
        prior, what = self.process.kernel(self.process.x), f"the residual covariance of site {self.name!r}"
        made_of = partial(hyperparameters, self.process.kernel)
        root = residual_cholesky(prior, self.features, self.process.jitter, what, made_of=made_of)
        # Jitter may be far more than what is left of a value, as under Exact in float32: each value keeps its variance.
        left = prior.diagonal(dim1=-2, dim2=-1) - sum(phi.square().sum(-1) for phi in self.features)
        return root * (left.clamp(min=torch.finfo(root.dtype).tiny) / row_squares(root)).sqrt()[..., None]

    def log_prob(self, value: Tensor) -> Tensor:
        """log dq/dp = log q(w) − log p(w) at the coefficients of the last draw, in nats.

        :raises ValueError: for any other value, whose coefficients are not known.
        """
        drawn, w = self._draw
        if drawn is not value:
            raise ValueError(f"log_prob of site {self.name!r} is known for the last draw; this is not the last draw")
        centred = value - self.process.mean_at(self.process.x)
        return self.coefficients.log_ratio(w, centred).expand(value.shape[:-1])

    @cached_property
    def components(self) -> Components:
        """The posterior of each summand of the kernel, in the order of ``kernel.terms``, without the mean μ."""
        return Components(self)

    def part(self, term: Kernel, basis: Features, blocks: Sequence[int], x: Tensor) -> SparsePosterior:
        """The posterior of a summand of the kernel at inputs x.

        :param basis: of the summand, for these blocks of w.
        """
        prior = GaussianProcess(term, x, None, self.process.jitter, validate_args=False).expand(self._batch_shape)
        return SparsePosterior(prior, basis, self.coefficients.marginal(blocks), self.name)

    def at(self, x: Tensor) -> SparsePosterior:
        """The same posterior at other inputs ``(N', D)``.

        :raises ValueError: naming the site, if they are not a matrix of finite numbers of the posterior's dtype.
        """
        here = self.process.x
        if not isinstance(x, Tensor) or x.dim() != here.dim() or x.dtype != here.dtype:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            own = f"{here.dtype} of shape {tuple(here.shape)}"
            raise ValueError(f"the posterior of site {self.name!r} got inputs {got}; its own are {own}")
        try:
            process = self.process.at(x).expand(self.process.batch_shape)
        except ValueError as error:
            raise ValueError(f"the posterior of site {self.name!r}: {error}") from None
        return self.under(process)

    def under(self, process: GaussianProcess) -> SparsePosterior:
        """The same posterior at another process's inputs, with its mean."""
        process = process.with_kernel(self.process.kernel)  # whose diagonal may be that beside rows of training
        return SparsePosterior(process, self.basis, self.coefficients, self.name, self.sites)

    def paths(self, num: int, num_features: int = 2048) -> Callable[[Tensor], Tensor]:
        """``num`` sample functions, x ↦ ``(num, ..., N)``: the same input gives the same value at every call.

        By Matheron's rule (Wilson et al., 2020, eq. 8): a prior function plus φ(x)ᵀ(w − w'), where w' are that
        function's own coefficients. The prior functions of a stationary kernel are ``num_features`` random Fourier
        waves; a kernel with finite features has exact ones. Of other kernels (``Periodic``, ``Anova``, adapted ones)
        values are drawn exactly, given all drawn before, in O(n³) for the n points of all calls.
        """
        if num < 1 or num_features < 1:
            raise ValueError(f"paths needs at least one path and one feature, got {num} and {num_features}")
        process, w = self.process, self.coefficients.rsample(torch.Size((num, *self.batch_shape)))
        prior = None if self.batch_shape else self.basis.prior_functions(num, num_features, process.x)
        if prior is None:
            return _Sequential(self, num, w)
        function, own = prior
        # f + φᵀ(w − w') (Wilson et al., 2020, eq. 8)
        update = [a - b for a, b in zip(w, own)]

        def path(x: Tensor) -> Tensor:
            return process.at(x).mean + function(x) + sum_blocks(self.basis(x), update)

        return lambda x: in_chunks(path, process.at(x).x, num * num_features)  # at raises unless (N, D)

    def __repr__(self) -> str:
        kind, x, num = type(self).__name__, tuple(self.process.x.shape), sum(self.coefficients.sizes)
        return f"{kind}({self.name!r}, x: {x}, coefficients: {num}, batch_shape: {tuple(self.batch_shape)})"


Kind = type[SparsePosterior]


@register_kl(SparsePosterior, GaussianProcess)
def _kl_sparse_posterior(q: SparsePosterior, p: GaussianProcess) -> Tensor:
    return q.kl


class _Sequential:
    """f = μ + φᵀw + r with w fixed and r drawn given all values of r drawn before."""

    def __init__(self, posterior: Any, num: int, w: list[Tensor]) -> None:
        self.posterior, self.w = posterior, w
        process, shape = posterior.process, (num, *posterior.batch_shape, 0)
        # What a diagonal is in the company of other rows, it must be wherever the paths are evaluated.
        self.kernel = process.kernel.relative_to(process.x)
        self.scale = self.kernel.diag(process.x).detach().mean(-1)
        self.jitter = default_jitter(process.x.dtype) if process.jitter is None else process.jitter
        self.x, self.noise, self.values = process.x[..., :0, :], process.x.new_zeros(shape), process.x.new_zeros(shape)

    def __call__(self, x: Tensor) -> Tensor:
        known, mean = self.x.shape[-2], self.posterior.process.at(x).mean
        # An input that was asked for before, or stands twice in x, has one value: a diagonal term, which is drawn anew
        # at every row, would otherwise give it several.
        _, kind = torch.cat([self.x, x], -2).detach().movedim(-2, 0).flatten(1).unique(dim=0, return_inverse=True)
        numbers = torch.arange(len(kind), device=x.device)
        first = torch.full_like(numbers, len(kind)).scatter_reduce(0, kind, numbers, "amin")[kind]
        fresh = first[known:] == numbers[known:]
        if fresh.any():
            self.x = torch.cat([self.x, x[..., fresh, :]], -2)
            drawn = torch.randn(*self.noise.shape[:-1], self.x.shape[-2] - known, dtype=x.dtype, device=x.device)
            self.noise = torch.cat([self.noise, drawn], -1)
            phi = self.posterior.basis(self.x)
            what = f"the residual of paths of site {self.posterior.name!r}"
            # The leading rows of a Cholesky factor are those of before, at the same jitter: so are the values there.
            tril = residual_cholesky(self.kernel(self.x), phi, self.jitter, what, scale=self.scale)
            value = sum_blocks(phi, self.w) + times(tril, self.noise)
            self.values = torch.cat([self.values, value[..., known:]], -1)  # f − μ at the inputs asked for so far
        place = torch.cat([fresh.new_ones(known), fresh]).cumsum(0) - 1  # of each first one among the values
        return mean + self.values[..., place[first[known:]]]
