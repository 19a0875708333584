"""A Gaussian process as a Pyro distribution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar, Optional, Union

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.poutine.runtime import get_plates
from torch import Tensor
from torch.distributions import constraints

from .kernels import Kernel
from .kernels.algebra import Foreign, as_kernel
from .kernels.base import hyperparameters
from .numerics.functions import broadcast_shapes
from .numerics.linalg import cholesky, solve_lower, times

Mean = Union[None, float, Tensor, Callable[[Tensor], Tensor]]
Jitter = Optional[float]


class GaussianProcess(TorchDistribution):
    """The values of f ~ GP(μ, k) at inputs x: N(μ(x), k(x, x)), with event shape ``(N,)``.

    ``rsample`` and ``log_prob`` are the exact multivariate normal, in O(N³), so that prior predictive sampling
    and NUTS are right; a sparse guide never calls them. ``.expand([P]).to_event(1)`` gives P independent
    outputs, with event shape ``(P, N)``.

    >>> x = torch.linspace(0, 1, 5)[:, None]
    >>> f = GaussianProcess(2.0 * kernels.Matern32(0.3), x)
    >>> f.event_shape
    torch.Size([5])

    :param kernel: a kernel, or a callable with a kernel's two methods ``k(x, z)`` and ``k.diag(x)``.
    :param x: inputs, ``(N, D)``; leading batch dimensions broadcast with the hyperparameters'.
    :param mean: μ: ``None`` (zero), a number, a tensor ``(..., N)`` or ``()``, or a callable of x that returns
        ``(..., N)``.
    :param jitter: relative jitter of Cholesky factorisations; ``None`` is 1e-8 in float64 and 1e-6 in float32. For
        inducing points in float32 it is 3e-8 if the kernel computes K_ZZ in float64, as the library's kernels do. The
        jitter stays when the dtype of a guide changes.
    :raises ValueError: if x is not a matrix of finite floating point numbers, or mean or kernel do not fit.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True
    support = constraints.real_vector

    def __init__(
        self, kernel: Kernel, x: Tensor, mean: Mean = None, jitter: Jitter = None, validate_args: Optional[bool] = None
    ) -> None:
        _require_inputs(x)
        self.kernel = as_kernel(kernel, "GaussianProcess's kernel").on_columns(x.shape[-1])
        self.x, self.jitter = x, jitter
        self.mean_function: Any = mean
        self._misplaced: Optional[str] = None
        if jitter is not None and not (isinstance(jitter, (int, float)) and jitter >= 0):
            raise ValueError(f"GaussianProcess's jitter must be None or a number of at least 0, got {jitter!r}")
        batch_shape = broadcast_shapes(self.kernel.batch_shape, x.shape[:-2])
        if isinstance(mean, (int, float)):
            self.mean_function = x.new_full((), mean)
        elif isinstance(mean, Tensor):
            if x.shape[-2] > 1:  # a single row's column is as good as a value
                _require_rows(mean, x, batch_shape, "is")
            batch_shape = broadcast_shapes(batch_shape, mean.shape[:-1])
        elif not (mean is None or callable(mean)):
            got = type(mean).__name__
            raise ValueError(f"GaussianProcess's mean must be a number, a tensor, a callable of x or None, got {got}")
        super().__init__(batch_shape, x.shape[-2:-1], validate_args=validate_args)
        # A look at numbers, for which a GPU waits; probes of dependence, which have NaN in x, turn validation off.
        if self._validate_args and not x.isfinite().all():
            shape = tuple(x.shape)
            raise ValueError(f"GaussianProcess's x, of shape {shape}, contains NaN or infinities: drop or impute rows")

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

    @cached_property
    def scale_tril(self) -> Tensor:
        """Cholesky factor of k(x, x), ``(..., N, N)``; computed once."""
        what, made_of = "the prior covariance of a GaussianProcess", partial(hyperparameters, self.kernel)
        return cholesky(self.kernel(self.x), self.jitter, what, made_of=made_of)

    def mean_at(self, x: Tensor) -> Tensor:
        """μ at any inputs, broadcastable to ``(..., N)``.

        :raises ValueError: if μ was given as a tensor of values at other inputs, or its shape does not fit.
        """
        mean = self.mean_function
        if callable(mean):
            value = mean(x)
            _require_rows(value, x, self._batch_shape, "returned")
            return value
        self._require_mean_at(x)
        return x.new_zeros(()) if mean is None else mean

    def _require_mean_at(self, x: Tensor) -> None:
        mean = self.mean_function
        if isinstance(mean, Tensor) and mean.dim() and mean.shape[-1] != 1 and x is not self.x:
            raise ValueError("GaussianProcess's mean is a tensor of values at other inputs; give a callable of x")

    def at(self, x: Tensor) -> GaussianProcess:
        """The same process at other inputs. Raises a ValueError if the columns differ or μ is unknown there."""
        self.require_columns(x)
        self._require_mean_at(x)
        return GaussianProcess(self.kernel, x, self.mean_function, self.jitter)

    def require_columns(self, x: Tensor) -> None:
        """Raise a ValueError if other inputs have another number of columns than this process's."""
        if x.shape[-1:] != self.x.shape[-1:]:
            own = self.x.shape[-1]
            raise ValueError(f"inputs of shape {tuple(x.shape)} for a process whose own have {own} columns, (N, {own})")

    def relative_to(self, rows: Tensor) -> GaussianProcess:
        """The same process, where a diagonal term max k − k(x, x) of its kernel takes the maximum over ``rows``."""
        return self.with_kernel(self.kernel.relative_to(rows))

    def with_kernel(self, kernel: Kernel) -> GaussianProcess:
        """The process with the same inputs and mean and another kernel of the same batch shape."""
        if kernel is self.kernel:
            return self
        new = copy.copy(self)
        new.kernel = kernel
        new.__dict__.pop("scale_tril", None)
        return new

    def given(self, x: Tensor, f: Tensor, mean: Optional[Tensor] = None) -> GaussianProcess:
        """This process conditioned on f(x) = ``f``: predictions from NUTS draws.

        μ'(·) = μ(·) + k(·, x)k(x, x)⁻¹(f − μ(x)), k'(·, ·) = k(·, ·) − k(·, x)k(x, x)⁻¹k(x, ·)
        (Rasmussen and Williams, 2006, eq. 2.19).

        :param x: inputs with known values, ``(N₀, D)``.
        :param f: the values, ``(..., N₀)``.
        :param mean: μ(x), ``(..., N₀)``, needed if this process's mean is a tensor of values.
        """
        if f.shape[-1:] != x.shape[-2:-1]:
            raise ValueError(f"given(x, f) needs one value a row: x is {tuple(x.shape)}, f is {tuple(f.shape)}")
        self.require_columns(x)
        # A diagonal max k − k(x, x) is that of the known rows, wherever the process is asked for.
        kernel = self.kernel.relative_to(x)
        factor = cholesky(kernel(x), self.jitter, "the covariance at the inputs of GaussianProcess.given")
        white = solve_lower(factor, (f - (self.mean_at(x) if mean is None else mean))[..., None])

        def known(inputs: Tensor) -> Tensor:
            return solve_lower(factor, kernel(x, inputs))

        # all is made of L⁻¹k(x, ·) with LLᵀ = k(x, x)
        def conditional_mean(inputs: Tensor) -> Tensor:
            return self.mean_at(inputs) + (known(inputs).mT @ white)[..., 0]

        def covariance(left: Tensor, right: Optional[Tensor] = None) -> Tensor:
            phi = known(left)
            return kernel(left, right) - phi.mT @ (phi if right is None else known(right))

        def variance(inputs: Tensor) -> Tensor:
            # 0 at the known inputs, but for rounding of either sign.
            return (kernel.diag(inputs) - known(inputs).square().sum(-2)).clamp(min=0)

        left = Foreign(covariance, variance, kernel)
        conditioned = GaussianProcess(left, self.x, conditional_mean, self.jitter)
        return conditioned.expand(broadcast_shapes(self.batch_shape, white.shape[:-2]))

    def expand(self, batch_shape: torch.Size, _instance: Optional[GaussianProcess] = None) -> GaussianProcess:
        """Independent copies with the given batch shape."""
        new = self._get_checked_instance(GaussianProcess, _instance)
        vars(new).update(vars(self))  # the factor with it, if there is one: copies share it
        new._misplaced = _misplaced_in(self._event_shape[0]) or self._misplaced
        super(GaussianProcess, new).__init__(torch.Size(batch_shape), self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def require_place(self, what: str = "a GaussianProcess") -> None:
        """Raise a ValueError if this process is inside a plate of rows."""
        if self._misplaced is not None:
            raise ValueError(f"{what} stands {self._misplaced}")

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Exact joint draws, ``(*sample_shape, ..., N)``."""
        self.require_place()
        shape = self._extended_shape(sample_shape)
        noise = torch.randn(shape, dtype=self.x.dtype, device=self.x.device)
        # f = μ + Lε with LLᵀ = k(x, x)
        return self.mean + times(self.scale_tril, noise)

    def log_prob(self, value: Tensor) -> Tensor:
        """Exact log density of function values ``(..., N)``, in nats."""
        self.require_place()
        if self._validate_args:
            self._validate_sample(value)
        return dist.MultivariateNormal(self.mean, scale_tril=self.scale_tril, validate_args=False).log_prob(value)

    def __repr__(self) -> str:
        return f"GaussianProcess({self.kernel!r}, x: {tuple(self.x.shape)}, batch_shape: {tuple(self.batch_shape)})"


def _require_inputs(x: object) -> None:
    what = "GaussianProcess's x must"
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{what} be a float32 or float64 tensor (N, D), got {kind}: torch.as_tensor(x).double() is one"
        )
    if x.dim() < 2 or not x.shape[-1] or not x.shape[-2]:
        raise ValueError(f"{what} have shape (N, D), got {tuple(x.shape)}: at least one row; a column is x[:, None]")


def _require_rows(mean: Tensor, x: Tensor, batch_shape: torch.Size, came: str) -> None:
    """Raise if a mean's values are not one a row of x: in a column, (N, 1), they would broadcast to (N, N)."""
    num = x.shape[-2]
    column = mean.shape[-2:] == (num, 1) and batch_shape[-1:] != x.shape[-2:-1]
    if column or mean.shape[-1:] not in ((), (1,), (num,)):
        raise ValueError(
            f"GaussianProcess's mean {came} {'a column' if column else 'a tensor'}, of shape {tuple(mean.shape)}, for "
            f"inputs {tuple(x.shape)}: give one value a row, ({num},), such as mean[..., 0] of a column."
        )


def _misplaced_in(num: int) -> Optional[str]:
    """Why the enclosing plates are no place for a process over ``num`` inputs, or ``None``."""
    for plate in get_plates():
        if plate.name in ("num_particles_vectorized", "_num_predictive_samples"):  # Pyro's own, over draws
            return SAMPLES_ARE_VECTORISED
        if plate.dim is not None and (plate.size == num > 1 or plate.full_size not in (None, plate.size)):
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
        return value.new_zeros(broadcast_shapes(self._batch_shape, value.shape[:-1]))
