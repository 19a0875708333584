"""A Gaussian process as a Pyro distribution, its sparse posterior, and the divergence between the two.

The only place with the marginal formula: with a basis f = μ + φᵀw + r, r ⟂ w, and any Gaussian q(w) = N(m, S),

    E f(x) = μ(x) + φ(x)ᵀm
    Cov(f(x), f(x')) = k(x, x') + φ(x)ᵀ(S − I)φ(x')
    KL[q ‖ p] = ½(tr S + mᵀm − M − log|S|), of the whole process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Optional, Union

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.poutine.runtime import am_i_wrapped, get_plates
from torch import Tensor
from torch.distributions import constraints, register_kl

from .bases.base import Features
from .kernels import base as kernel_base
from .linalg import cholesky, default_jitter, row_squares, solve_lower, sum_blocks
from .posteriors.base import Gaussian
from .sites import Sites

if TYPE_CHECKING:
    from .components import Components

__all__ = ["GaussianProcess", "PriorProcess", "SparsePosterior"]

Mean = Union[None, float, Tensor, Callable[[Tensor], Tensor]]


class GaussianProcess(TorchDistribution):
    """The values of f ~ GP(μ, k) at inputs x: N(μ(x), k(x, x)), with event shape ``(N,)``.

    ``rsample`` and ``log_prob`` are the exact multivariate normal, in O(N³), so that prior predictive sampling
    and NUTS are right; a sparse guide never calls them. ``.expand([P]).to_event(1)`` gives P independent
    outputs, with event shape ``(P, N)``.

    >>> x = torch.linspace(0, 1, 5)[:, None]
    >>> f = GaussianProcess(2.0 * kernels.Matern32(0.3), x)
    >>> f.event_shape
    torch.Size([5])

    :param kernel: a kernel, or any callable with its two methods.
    :param x: inputs, ``(N, D)``; leading batch dimensions broadcast with those of the hyperparameters.
    :param mean: μ: a callable of x that returns ``(..., N)``, a tensor ``(..., N)`` or ``()``, a number, or ``None``
        (zero).
    :param jitter: relative jitter of Cholesky factorisations; ``None`` is 1e-8 in float64 and 1e-6 in float32.
    :raises ValueError: if x is no matrix of finite floating point numbers, or mean or kernel do not fit.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True

    def __init__(
        self,
        kernel: Any,
        x: Tensor,
        mean: Mean = None,
        jitter: Optional[float] = None,
        validate_args: Optional[bool] = None,
    ) -> None:
        self.kernel = kernel_base.require_kernel(kernel, "GaussianProcess's kernel")
        self._misplaced: Optional[str] = None
        self._unfit = _unfit_inputs(x)
        if self._unfit is not None and not isinstance(x, Tensor):
            raise ValueError(f"GaussianProcess's {self._unfit}")
        self.x = x
        if jitter is not None and not (isinstance(jitter, (int, float)) and jitter >= 0):
            raise ValueError(f"GaussianProcess's jitter must be None or a number of at least 0, got {jitter!r}")
        self.jitter = jitter
        if not (mean is None or isinstance(mean, (int, float, Tensor)) or callable(mean)) or isinstance(mean, bool):
            raise ValueError(
                f"GaussianProcess's mean must be a number, a tensor, a callable of x or None, got {type(mean).__name__}"
            )
        self.mean_function = x.new_full((), mean) if isinstance(mean, (int, float)) else mean
        self._scale_tril: Optional[Tensor] = None
        if self._unfit is not None:
            self._refuse_inputs()
            super().__init__(torch.Size(), torch.Size([len(x) if x.dim() else 1]), validate_args=False)
            return
        batch_shape = torch.broadcast_shapes(kernel_base.batch_shape(kernel), x.shape[:-2])
        if isinstance(mean, Tensor) and mean.dim() > 1:
            batch_shape = torch.broadcast_shapes(batch_shape, mean.shape[:-1])
        if isinstance(mean, Tensor) and mean.dim() and mean.shape[-1] not in (1, x.shape[-2]):
            raise ValueError(
                f"GaussianProcess's mean is a tensor of shape {tuple(mean.shape)}, the inputs have {x.shape[-2]} "
                "rows; give one value a row, or a callable of x."
            )
        super().__init__(batch_shape, x.shape[-2:-1], validate_args=validate_args)
        if self._validate_args and not x.isfinite().all():
            self._unfit = f"x, of shape {tuple(x.shape)}, contains NaN or infinite values; drop or impute those rows."
            self._refuse_inputs()

    def _refuse_inputs(self) -> None:
        # Inside a Pyro program the error waits for the site, which has a name.
        if not am_i_wrapped():
            raise ValueError(f"GaussianProcess's {self._unfit}")

    @property
    def support(self) -> Any:  # type: ignore[override]
        """Real vectors."""
        return constraints.real_vector

    @property
    def mean(self) -> Tensor:
        """μ(x), ``(..., N)``."""
        return self.mean_at(self.x).expand(self._batch_shape + self._event_shape)

    @property
    def variance(self) -> Tensor:
        """k(x, x)'s diagonal, ``(..., N)``."""
        return self.kernel.diag(self.x).expand(self._batch_shape + self._event_shape)

    @property
    def covariance_matrix(self) -> Tensor:
        """k(x, x), ``(..., N, N)``."""
        return self.kernel(self.x)

    @property
    def scale_tril(self) -> Tensor:
        """Cholesky factor of k(x, x), ``(..., N, N)``; computed once."""
        if self._scale_tril is None:
            self._scale_tril = cholesky(self.kernel(self.x), self.jitter, "the prior covariance of a GaussianProcess")
        return self._scale_tril

    def mean_at(self, x: Tensor) -> Tensor:
        """μ at any inputs, broadcastable to ``(..., N)``.

        :raises ValueError: if μ was given as a tensor of values at other inputs, or its shape does not fit.
        """
        mean = self.mean_function
        if mean is None:
            return x.new_zeros(())
        if callable(mean):
            value = mean(x)
            if value.dim() and value.shape[-1] not in (1, x.shape[-2]):
                raise ValueError(
                    f"GaussianProcess's mean returned shape {tuple(value.shape)} for inputs {tuple(x.shape)}; it must "
                    f"return ({x.shape[-2]},)."
                )
            return value
        self._require_mean_at(x)
        return mean

    def _require_mean_at(self, x: Tensor) -> None:
        mean = self.mean_function
        if isinstance(mean, Tensor) and mean.dim() and mean.shape[-1] != 1 and x is not self.x:
            raise ValueError("GaussianProcess's mean is a tensor of values at other inputs; give a callable of x")

    def at(self, x: Tensor) -> GaussianProcess:
        """The same process at other inputs.

        :raises ValueError: if μ was given as values at these inputs.
        """
        self._require_mean_at(x)
        return GaussianProcess(self.kernel, x, self.mean_function, self.jitter)

    def relative_to(self, rows: Tensor) -> GaussianProcess:
        """The same process with the diagonal term that its kernel has in the company of ``rows``, ``(N₀, D)``."""
        return self.with_kernel(kernel_base.relative_to(self.kernel, rows))

    def with_kernel(self, kernel: Any) -> GaussianProcess:
        """The process at the same inputs and of the same mean, with another kernel of the same batch shape."""
        if kernel is self.kernel:
            return self
        new = copy.copy(self)
        new.kernel, new._scale_tril = kernel, None
        return new

    def given(self, x: Tensor, f: Tensor, mean: Optional[Tensor] = None) -> GaussianProcess:
        """This process conditioned on f(x) = ``f``: predictions from NUTS draws.

        μ'(·) = μ(·) + k(·, x)k(x, x)⁻¹(f − μ(x)), k'(·, ·) = k(·, ·) − k(·, x)k(x, x)⁻¹k(x, ·)
        (Rasmussen and Williams, 2006, eq. 2.19).

        :param x: inputs with known values, ``(N₀, D)``.
        :param f: the values, ``(..., N₀)``.
        :param mean: μ(x), ``(..., N₀)``, where this process has its mean as values at its own inputs.
        """
        if f.shape[-1:] != x.shape[-2:-1]:
            raise ValueError(f"given(x, f) needs one value a row: x is {tuple(x.shape)}, f is {tuple(f.shape)}")
        kernel = kernel_base.relative_to(self.kernel, x)
        factor = cholesky(kernel(x), self.jitter, "the covariance at the inputs of GaussianProcess.given")
        white = solve_lower(factor, (f - (self.mean_at(x) if mean is None else mean))[..., None])

        def conditional_mean(inputs: Tensor) -> Tensor:
            phi = solve_lower(factor, kernel(x, inputs))
            return self.mean_at(inputs) + (phi.mT @ white)[..., 0]

        conditioned = GaussianProcess(_Conditioned(kernel, x, factor), self.x, conditional_mean, self.jitter)
        return conditioned.expand(torch.broadcast_shapes(self.batch_shape, conditioned.batch_shape, f.shape[:-1]))

    def expand(self, batch_shape: Any, _instance: Optional[GaussianProcess] = None) -> GaussianProcess:
        """Independent copies with the given batch shape."""
        new = self._get_checked_instance(GaussianProcess, _instance)
        for name in ("kernel", "x", "jitter", "mean_function", "_scale_tril", "_unfit"):
            setattr(new, name, getattr(self, name))
        new._misplaced = _misplaced_in(self._event_shape[0]) or self._misplaced
        super(GaussianProcess, new).__init__(torch.Size(batch_shape), self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def require_place(self, site: Optional[str] = None) -> None:
        """Raise if this process has unfit inputs, or was sampled where its values would become ``(N, N)``.

        :raises ValueError: naming the site, what is wrong with the inputs or the plate, and the remedy.
        """
        if self._unfit is not None:
            where = "GaussianProcess's" if site is None else f"GP site {site!r}: GaussianProcess's"
            raise ValueError(f"{where} {self._unfit}")
        if self._misplaced is not None:
            where = f"site {site!r}" if site is not None else "a GaussianProcess"
            raise ValueError(f"{where} stands {self._misplaced}")

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Exact joint draws, ``(*sample_shape, ..., N)``."""
        self.require_place()
        shape = self._extended_shape(sample_shape)
        noise = torch.randn(shape, dtype=self.x.dtype, device=self.x.device)
        return self.mean + (self.scale_tril @ noise[..., None])[..., 0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Exact log density of function values ``(..., N)``, in nats."""
        self.require_place()
        if self._validate_args:
            self._validate_sample(value)
        return dist.MultivariateNormal(self.mean, scale_tril=self.scale_tril, validate_args=False).log_prob(value)

    def __repr__(self) -> str:
        return f"GaussianProcess({self.kernel!r}, x: {tuple(self.x.shape)}, batch_shape: {tuple(self.batch_shape)})"


class _Conditioned:
    """The kernel of a process given its values at x."""

    def __init__(self, kernel: Any, x: Tensor, factor: Tensor) -> None:
        self.kernel, self.x, self.factor = kernel, x, factor
        self.batch_shape = factor.shape[:-2]

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        left = solve_lower(self.factor, self.kernel(self.x, x))
        right = left if z is None else solve_lower(self.factor, self.kernel(self.x, z))
        return self.kernel(x, z) - left.mT @ right

    def diag(self, x: Tensor) -> Tensor:
        left = solve_lower(self.factor, self.kernel(self.x, x))
        return (self.kernel.diag(x) - left.square().sum(-2)).clamp(min=0)

    def __repr__(self) -> str:
        return f"{self.kernel!r} given {self.x.shape[-2]} values"


def _unfit_inputs(x: Any) -> Optional[str]:
    """What is wrong with the inputs of a process, or ``None``."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        return f"x must be a floating point tensor (N, D), got {kind}; make it one with torch.as_tensor(x).double()"
    if x.dim() < 2:
        return f"x must have shape (N, D), got {tuple(x.shape)}; for one column write x[:, None]."
    if x.shape[-2] == 0 or x.shape[-1] == 0:
        return f"x must have at least one row and one column, got {tuple(x.shape)}"
    return None


SAMPLE_PLATES = ("num_particles_vectorized", "_num_predictive_samples")


def _misplaced_in(num: int) -> Optional[str]:
    """Why the enclosing plates are no place for a process over ``num`` inputs, or ``None``."""
    for plate in get_plates():
        if plate.name in SAMPLE_PLATES:
            return SAMPLES_ARE_VECTORISED
        if plate.dim is not None and (plate.size == num > 1 or plate.size != (plate.full_size or plate.size)):
            return (
                f"inside pyro.plate({plate.name!r}): its {num} function values would be drawn anew for each of the "
                f"plate's {plate.size} rows. Sample the process before the plate and use its values inside; for "
                "independent outputs write GaussianProcess(...).expand([P]).to_event(1)."
            )
    return None


SAMPLES_ARE_VECTORISED = (
    "inside a plate over samples (vectorize_particles=True, or Predictive(parallel=True)): function values are event "
    "dimensions that become batch dimensions of the data, so this would be silently wrong. Use "
    "vectorize_particles=False and Predictive(parallel=False), or predict(model, guide, ...)."
)


class SparsePosterior(TorchDistribution):
    """The posterior of a Gaussian process under a finite basis and a Gaussian over its coefficients.

    A distribution over the values at the process's inputs x, with event shape ``(N,)``; :meth:`at` gives it at
    other inputs. ``rsample`` draws jointly correlated values. ``log_prob`` is relative to the prior process,
    log dq/dp, the only base measure that a function has: log q(w) − log p(w) at the coefficients of a draw of
    this object (kept with the last draw, as TransformedDistribution caches).

    :param process: the prior at the inputs wanted.
    :param basis: the basis under that prior's kernel.
    :param coefficients: q(w).
    :param name: the site, for errors.
    :param sites: the Gaussian sites that q(w) comes from, if it does.
    :param features: Φ at the inputs, if known already.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True

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
        self._cache: dict[str, Any] = {} if features is None else {"features": features}
        batch_shape = torch.broadcast_shapes(process.batch_shape, coefficients.batch_shape)
        super().__init__(batch_shape, process.event_shape, validate_args=False)

    @property
    def support(self) -> Any:  # type: ignore[override]
        """Real vectors."""
        return constraints.real_vector

    def _cached(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    @property
    def features(self) -> list[Tensor]:
        """Φ at the inputs, a block ``(..., N, M_b)`` for each block of coefficients."""
        return self._cached("features", lambda: self.basis(self.process.x))

    @property
    def _moments(self) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        def compute() -> tuple[Tensor, Tensor, Optional[Tensor]]:
            known = self._cache.get("features")
            return self.basis.marginals(self.process.kernel, self.process.x, self.coefficients, known)

        return self._cached("moments", compute)

    @property
    def mean(self) -> Tensor:
        """μ + Φm, ``(..., N)``."""

        def compute() -> Tensor:
            mean = self.process.mean_at(self.process.x) + self._moments[0]
            return mean.expand(self._batch_shape + self._event_shape)

        return self._cached("mean", compute)

    @property
    def variance(self) -> Tensor:
        """diag(k(x, x) + Φ(S − I)Φᵀ), ``(..., N)``, kept above rounding error."""

        def compute() -> Tensor:
            _, change, prior = self._moments
            if prior is None:
                prior = self.process.kernel.diag(self.process.x)
            variance = prior + change
            floor = 10 * torch.finfo(prior.dtype).eps * prior.detach()
            return variance.clamp(min=floor.expand(variance.shape)).expand(self._batch_shape + self._event_shape)

        return self._cached("variance", compute)

    @property
    def stddev(self) -> Tensor:
        """The square root of :attr:`variance`."""
        return self.variance.sqrt()

    @property
    def covariance_matrix(self) -> Tensor:
        """k(x, x) + Φ(S − I)Φᵀ, ``(..., N, N)``."""
        covariance = self.process.kernel(self.process.x) + self.coefficients.covariance_change(self.features)
        return covariance.expand(self._batch_shape + self._event_shape * 2)

    @property
    def marginals(self) -> dist.Normal:
        """Independent normals with this posterior's mean and variance, batch shape ``(..., N)``."""
        return dist.Normal(self.mean, self.stddev, validate_args=False)

    @property
    def mathematical_variance(self) -> Tensor:
        """The variance, ``(..., N)``, that the exact posterior given the same Gaussian sites would have.

        diag(k(x, x) − k(x, X)(k(X, X) + Λ⁻¹)⁻¹k(X, x)), in O(N³) for the N training rows with λ > 0: what more data,
        not more computation, would reduce (Wenger et al., 2024, section 2).

        :raises ValueError: if the family keeps no sites.
        """

        def compute() -> Tensor:
            if self.sites is None:
                raise ValueError(
                    f"the posterior of site {self.name!r} has no Gaussian sites to set the exact posterior against; "
                    "use a family that reads them off the model, such as ComputationAware or SGPR."
                )
            root, x, kernel = self.sites.precision.sqrt(), self.sites.inputs, self.process.kernel
            gram = root[..., None] * kernel(x) * root[..., None, :]
            eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
            factor = cholesky(gram + eye, 0.0, f"I + Λ^½KΛ^½ of site {self.name!r}")
            explained = solve_lower(factor, root[..., None] * kernel(x, self.process.x)).square().sum(-2)
            variance = kernel.diag(self.process.x) - explained
            return variance.clamp(min=0).expand(self._batch_shape + self._event_shape)

        with torch.no_grad():
            return self._cached("mathematical", compute)

    @property
    def computational_variance(self) -> Tensor:
        """The part of the variance, ``(..., N)``, that stems from limited computation (Wenger et al., 2024, section 2).

        :attr:`variance` minus :attr:`mathematical_variance`, at its cost. It is never negative for data projections;
        for inducing points it may be: those can be overconfident.
        """
        return (self.variance - self.mathematical_variance).detach()

    @property
    def kl(self) -> Tensor:
        """KL[q ‖ p] of the whole process from its prior, in nats, of the batch's shape (a scalar without one)."""
        return self._cached("kl", lambda: self.coefficients.kl().expand(self._batch_shape))

    @property
    def components(self) -> Components:
        """The posterior of each summand of the kernel, in the order of ``kernel.terms``, without the mean μ."""
        from .components import Components

        return self._cached("components", lambda: Components(self))

    def at(self, x: Tensor) -> SparsePosterior:
        """The same posterior at other inputs ``(N', D)``."""
        process = self.process.at(x).expand(self.process.batch_shape)
        return SparsePosterior(process, self.basis, self.coefficients, self.name, self.sites)

    def paths(self, num: int, num_features: int = 2048) -> Callable[[Tensor], Tensor]:
        """``num`` sample functions, x ↦ ``(num, ..., N)``, that agree with themselves wherever they are evaluated.

        By Matheron's rule (Wilson et al., 2020, eq. 8): a prior function plus φ(x)ᵀ(w − w'), where w' are that
        function's own coefficients. The prior functions of a stationary kernel are ``num_features`` random
        Fourier waves, those of a kernel with finite features exact. Where the kernel offers neither (a
        :class:`~pyro_sparsegp.kernels.Periodic` or an adapted one), values are drawn exactly, conditioned on all
        values drawn before, which costs O(n³) in the number n of points evaluated in all.
        """
        from .paths import sample_paths

        return sample_paths(self, num, num_features)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SparsePosterior:
        """Independent copies with the given batch shape."""
        return type(self)(
            self.process.expand(batch_shape),
            self.basis,
            self.coefficients,
            self.name,
            self.sites,
            self._cache.get("features"),
        )

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Joint draws of the values, ``(*sample_shape, ..., N)``, in O(N³); their coefficients are kept."""
        shape = torch.Size(sample_shape) + self._batch_shape
        w = self.coefficients.rsample(shape)
        value = self.process.mean_at(self.process.x) + sum_blocks(self.features, w)
        noise = torch.randn(shape + self._event_shape, dtype=value.dtype, device=value.device)
        value = value + (self.residual_tril @ noise[..., None])[..., 0]
        self._cache["draw"] = value, w
        return value

    def given_coefficients(self, w: list[Tensor], chunk_size: int = 8192) -> tuple[Tensor, Tensor]:
        """Mean μ + Φw and variance diag(k(x, x) − ΦΦᵀ) of the values given coefficients, ``(..., N)`` each.

        :param w: a block ``(..., M_b)`` for each block of coefficients.
        :param chunk_size: rows whose features are held in memory at once.
        """

        def moments(phi: list[Tensor], prior: Tensor) -> tuple[Tensor, Tensor]:
            explained = sum((row_squares(block) for block in phi), torch.zeros_like(prior))
            return sum_blocks(phi, w), (prior - explained).clamp(min=0)

        return self._by_rows(moments, chunk_size)

    def moments(self, chunk_size: int = 8192) -> tuple[Tensor, Tensor]:
        """:attr:`mean` and :attr:`variance`, without the features of all rows in memory at once."""

        def moments(phi: list[Tensor], prior: Tensor) -> tuple[Tensor, Tensor]:
            mean, change = self.coefficients.moments(phi)
            return mean, (prior + change).clamp(min=10 * torch.finfo(prior.dtype).eps * float(prior.max()))

        return self._by_rows(moments, chunk_size)

    def _by_rows(
        self, moments: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]], chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        x, shape = self.process.x, self._batch_shape
        means, variances = [], []
        whole = "features" in self._cache or x.shape[-2] <= chunk_size
        for rows in (x,) if whole else x.split(chunk_size, -2):
            mean, variance = moments(self.features if whole else self.basis(rows), self.process.kernel.diag(rows))
            means.append(mean.expand(shape + rows.shape[-2:-1]))
            variances.append(variance.expand(shape + rows.shape[-2:-1]))
        return self.process.mean_at(x) + torch.cat(means, -1), torch.cat(variances, -1)

    @property
    def draw(self) -> tuple[Tensor, list[Tensor]]:
        """The last joint draw, values and coefficients.

        :raises ValueError: if there was none.
        """
        if "draw" not in self._cache:
            raise ValueError(f"the posterior of site {self.name!r} has not been drawn from")
        return self._cache["draw"]

    def residual(self, like: Tensor) -> Tensor:
        """A joint draw of r ~ N(0, ρ) at the inputs, of the shape of ``like``, ``(..., N)``, in O(N³)."""
        return (self.residual_tril @ torch.randn_like(like)[..., None])[..., 0]

    @property
    def residual_tril(self) -> Tensor:
        """Cholesky factor of ρ, the residual's covariance at the inputs, ``(..., N, N)``; computed once."""

        def compute() -> Tensor:
            x, phi = self.process.x, self.features
            prior = self.process.kernel(x)
            scale = prior.detach().diagonal(dim1=-2, dim2=-1).mean(-1)
            for block in phi:
                prior = prior - block @ block.mT
            return cholesky(prior, self.process.jitter, f"the residual covariance of site {self.name!r}", scale)

        return self._cached("residual", compute)

    def log_prob(self, value: Tensor) -> Tensor:
        """log dq/dp = log q(w) − log p(w) at the coefficients of the last draw, in nats.

        :raises ValueError: for any other value, whose coefficients are not known.
        """
        drawn, w = self._cache.get("draw", (None, None))
        if drawn is not value:
            raise ValueError(
                f"log_prob of the sparse posterior of site {self.name!r} is log q(w) − log p(w) at the coefficients w "
                "of a draw; this value is not the last draw of this object, so its w is unknown."
            )
        centred = value - self.process.mean_at(self.process.x)
        return self.coefficients.log_ratio_at(w, centred).expand(value.shape[:-1])

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, x: {tuple(self.process.x.shape)}, "
            f"coefficients: {sum(self.coefficients.sizes)}, batch_shape: {tuple(self.batch_shape)})"
        )


class Site(SparsePosterior):
    """A posterior as the guide's answer at a site: joint draws.

    The draw's density is relative to the prior process, the model's is 1 in the guide's own pair of traces only:
    anyone else, who sets it against the model's exact density, is refused.
    """

    in_pair = False

    def paired(self) -> Site:
        """This answer, draws and all, as an entry of the guide's own pair of traces."""
        new = copy.copy(self)
        new.in_pair = True
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """log dq/dp at a draw, in nats.

        :raises ValueError: outside the guide's pair of traces.
        """
        self._require_pair()
        return super().log_prob(value)

    def _require_pair(self) -> None:
        if not self.in_pair:
            raise ValueError(
                f"the posterior of GP site {self.name!r} has a density relative to the prior process only, which can't "
                "be set against the model's exact one: pyro.infer.Importance, psis_diagnostic, ReweightedWakeSleep and "
                "WeighedPredictive, which run guide and model apart, do not work with this guide, nor does "
                "vectorize_particles=True. After guide.eval() "
                "and guide(*args), guide.get_traces() gives a (model, guide) pair whose log densities make importance "
                "weights."
            )


class ExpectedSite(Site):
    """A site's posterior in training where the likelihood couples function values: joint draws, log_prob = KL."""

    def log_prob(self, value: Tensor) -> Tensor:
        """KL[q ‖ p]: the expectation of the relative log density, whatever the value."""
        self._require_pair()
        return self.kl.expand(value.shape[:-1])


class MarginalSite(ExpectedSite):
    """A site's posterior in training: independent draws of its marginals, log_prob = KL."""

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Independent draws of the marginals, ``(*sample_shape, ..., N)``."""
        return self.marginals.rsample(torch.Size(sample_shape))


class GroupedSite(ExpectedSite):
    """A site's posterior in training where densities couple function values within groups of inputs, such as the
    patches of an image: draws that are joint within a group and independent between groups, log_prob = KL.
    """

    group: int

    def in_groups_of(self, size: int) -> GroupedSite:
        """This site with groups of that many consecutive inputs."""
        self.group = size
        return self

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Draws of each group's values, ``(*sample_shape, ..., N)``, in O(NG²) for groups of G."""
        shape = torch.Size(sample_shape) + self._batch_shape
        x = self._grouped(self.process.x, len(shape))
        num, size = x.shape[0], x.shape[-2]
        phi = [self._grouped(block, len(shape)) for block in self.features]
        residual = self.process.kernel(x)
        scale = residual.detach().diagonal(dim1=-2, dim2=-1).mean(-1)
        for block in phi:
            residual = residual - block @ block.mT
        # Patches that are alike, such as empty ones, leave a singular matrix with the rounding of k − ΦΦᵀ.
        jitter = 10 * default_jitter(x.dtype) if self.process.jitter is None else self.process.jitter
        tril = cholesky(residual, jitter, f"the residual covariance of site {self.name!r} in a group", scale)
        value = _each(tril, torch.randn(num, *shape, size, dtype=x.dtype, device=x.device))
        for block, w in zip(phi, self.coefficients.rsample(torch.Size((num, *shape)))):
            value = value + _each(block, w)
        return self.process.mean_at(self.process.x) + value.movedim(0, -2).flatten(-2)

    def _grouped(self, rows: Tensor, dims: int) -> Tensor:
        """``(..., N, R)`` as ``(groups, ..., G, R)``, with ``dims`` dimensions between."""
        groups = rows.unflatten(-2, (-1, self.group)).movedim(-3, 0)
        return groups.reshape(groups.shape[0], *[1] * (dims + 3 - groups.dim()), *groups.shape[1:])


def _each(matrix: Tensor, v: Tensor) -> Tensor:
    """Av, ``(groups, ..., R)``, for A ``(groups, ..., R, C)`` and v ``(groups, ..., C)``."""
    if matrix.shape[1:-2].numel() > 1:
        return (matrix @ v[..., None])[..., 0]
    # One matrix serves all outputs of a group: their values are its columns.
    columns = v.flatten(1, -2).mT if v.dim() > 2 else v[..., None]
    product = (matrix.reshape(matrix.shape[0], *matrix.shape[-2:]) @ columns).mT
    return product.reshape(*v.shape[:-1], matrix.shape[-2])


class NodeSite(ExpectedSite):
    """A site's posterior at quadrature nodes: ``rsample`` is mean + sd·node.

    :param node: standardised, ``()`` or, for one node an output, ``(P,)``.
    """

    node: Tensor

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """mean + sd·node, ``(..., N)``."""
        return self.mean + self.stddev * (self.node[..., None] if self.node.dim() else self.node)

    def at_node(self, node: Tensor) -> NodeSite:
        """This site at a node."""
        self.node = node
        return self


class PriorProcess(GaussianProcess):
    """A process as the base measure of its own posterior: ``log_prob`` is 0, for ELBOs."""

    @classmethod
    def of(cls, process: GaussianProcess) -> PriorProcess:
        """The base measure of ``process``."""
        new = cls.__new__(cls)
        new.__dict__.update(process.__dict__)
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """0, of the batch's shape."""
        return value.new_zeros(torch.broadcast_shapes(self._batch_shape, value.shape[:-1]))

    def expand(self, batch_shape: Any, _instance: Any = None) -> PriorProcess:
        """Independent copies with the given batch shape."""
        return PriorProcess.of(super().expand(batch_shape))


@register_kl(SparsePosterior, GaussianProcess)
def _kl_sparse_posterior(q: SparsePosterior, p: GaussianProcess) -> Tensor:
    return q.kl
