"""The protocol of a covariance function and its algebra.

A kernel is a small immutable object made of tensors, built anew in every run of the model from sampled
hyperparameters. N and M count inputs, D their columns; leading batch dimensions of the hyperparameters
broadcast: a variance is ``(...,)``, a length scale ``(..., D)``, ``(..., 1)`` or a scalar.
"""

from __future__ import annotations

import copy
import functools
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..numerics.linalg import side_by_side

__all__ = ["Explicit", "Kernel", "Product", "Scaled", "Select", "Sum"]

Scalar = Union[float, int, Tensor]
PriorFunctions = Callable[[Tensor], Tensor]
_NUMBERS = (int, float, numbers.Real, Tensor)  # NumPy's scalars are numbers.Real


def as_tensor(value: Scalar, like: Tensor) -> Tensor:
    """``value`` with the dtype and device of ``like``."""
    if isinstance(value, Tensor):
        return value.to(dtype=like.dtype, device=like.device)
    return like.new_full((), float(value))  # no copy from the host


def batch_of(value: Scalar, event_dim: int) -> torch.Size:
    """The leading batch dimensions of a hyperparameter whose last ``event_dim`` dimensions are its own."""
    if not isinstance(value, Tensor) or value.dim() <= event_dim:
        return torch.Size()
    return value.shape[: value.dim() - event_dim]


def per_column(value: Scalar, x: Tensor, name: str) -> Tensor:
    """A hyperparameter of the columns of x, as a scalar or ``(..., 1, 1)`` or ``(..., 1, D)``."""
    value = as_tensor(value, x)
    if not value.dim():
        return value
    if value.shape[-1] not in (1, x.shape[-1]):
        raise ValueError(
            f"{name} has {value.shape[-1]} entries in its last dimension, the inputs have {x.shape[-1]} columns; "
            f"give one number, shape () or (..., 1), or one per column, (..., {x.shape[-1]})."
        )
    return value[..., None, :]


class SourceFunctions:
    """Draws of f as functions, x ↦ ``(num, ..., N)``, where f is made of the values of g, with the draws of g."""

    def __init__(self, f: PriorFunctions, source: PriorFunctions) -> None:
        self.f, self.source = f, source

    def __call__(self, x: Tensor) -> Tensor:
        return self.f(x)


def of_each(change: Callable[[PriorFunctions], PriorFunctions], draw: PriorFunctions) -> PriorFunctions:
    """``change(draw)``; of draws that have a source, both changed."""
    if isinstance(draw, SourceFunctions):
        return SourceFunctions(change(draw.f), change(draw.source))
    return change(draw)


class Explicit(NamedTuple):
    """What a kernel with finite features is at inputs, in one evaluation of these.

    :param features: Φ, ``(..., N, R)``.
    :param diagonal: of k(x), ``(..., N)``: ‖φ‖² and any diagonal term.
    :param heights: for each part whose diagonal depends on the other rows, what it takes the maximum of, ``(..., N)``.
    """

    features: Tensor
    diagonal: Tensor
    heights: tuple[Tensor, ...] = ()


class Kernel(ABC):
    """A covariance function k(x, x').

    ``k(x, z)`` is the matrix of k(xₙ, zₘ), ``(..., N, M)``; ``k(x)`` the covariance of the values at x with
    themselves, ``(..., N, N)``, which alone carries a diagonal term such as that of :class:`White`;
    ``k.diag(x)`` its diagonal, ``(..., N)``. ``k1 + k2``, ``k1 * k2``, ``scalar * k`` and ``k[dims]`` (acts on
    the columns ``dims``) are kernels again. A subclass gives ``__call__`` and ``diag``; the rest has defaults.
    """

    @abstractmethod
    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor: ...

    @abstractmethod
    def diag(self, x: Tensor) -> Tensor:
        """The diagonal k(xₙ, xₙ), ``(..., N)``, at inputs ``(N, D)``."""

    _name: Optional[str] = None

    @property
    def name(self) -> Optional[str]:
        """What :meth:`named` gave it, or ``None``."""
        return self._name

    def named(self, name: str) -> Kernel:
        """The same kernel under a name, by which posteriors know it as a term of a sum.

        >>> kernel = RBF(0.3)[0].named("temperature") + 2.0 * RBF(0.5)[1].named("wind")
        >>> [term.name for term in kernel.terms]
        ['temperature', 'wind']
        """
        if len(self.terms) > 1:
            raise ValueError(f"a sum has no name of its own; name its terms one by one: {list(self.terms)}")
        new = copy.copy(self)
        new._name = str(name)
        return new

    @property
    def batch_shape(self) -> torch.Size:
        """The broadcast leading batch dimensions of the hyperparameters."""
        return torch.Size()

    @property
    def terms(self) -> tuple[Kernel, ...]:
        """The summands of the kernel; of all but a :class:`Sum`, the kernel itself."""
        return (self,)

    any_dtype: ClassVar[bool] = (
        False  # whether k(x) has the dtype of x, whatever that of hyperparameters; not inherited
    )

    @property
    def parts(self) -> tuple[Kernel, ...]:
        """The kernels that this one is made of; of most, none."""
        return ()

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        """The input columns the kernel reads, or ``None`` for all of them, or where :meth:`on_columns` is to tell."""
        return None

    def on_columns(self, num: int) -> Kernel:
        """The kernel for inputs of ``num`` columns, in which ``k[2:]`` and ``k[-1]`` have numbers."""
        return self

    def features(self, x: Tensor) -> Optional[Tensor]:
        """Φ, ``(..., N, R)``, with k(x, z) = φ(x)ᵀφ(z) off the diagonal, or ``None`` if there is no finite Φ."""
        return None

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        """:meth:`features` and :meth:`diag` together, or ``None`` if there is no finite Φ."""
        phi = self.features(x)
        return None if phi is None else Explicit(phi, self.diag(x))

    def check_inputs(self, x: Tensor) -> None:  # noqa: B027
        """Refuse training inputs that the kernel can't mean; asked once, at a guide's first call. By default none.

        :raises ValueError: saying what is wrong with them.
        """

    @property
    def depends_on_rows(self) -> bool:
        """Whether the diagonal term at a row depends on which other rows are given, as that of a ``DeepBasis``."""
        return False

    def relative_to(self, rows: Tensor) -> Kernel:
        """The kernel with the diagonal term that it has in the company of ``rows``, ``(N, D)``, the training inputs."""
        return self

    @property
    def source(self) -> Optional[Any]:
        """The kernel of g, where f(x) = Σ_p w_p g(x_p) is made of the values of another process; else ``None``.

        Inducing inputs are then by default those of g, such as the patches of an image. A kernel that has a source
        gives :meth:`source_inputs` and :meth:`from_source`, too.
        """
        return None

    def source_inputs(self, x: Tensor) -> Tensor:
        """The inputs x_p of g that f reads at x, ``(..., N, P, d)``."""
        raise TypeError(f"{self!r} has no source")

    def from_source(self, x: Tensor, z: Tensor) -> Tensor:
        """cov(f(xₙ), g(zₘ)), ``(..., N, M)``, for inputs z of g, ``(M, d)``."""
        raise TypeError(f"{self!r} has no source")

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        """Draws of the spectral measure, ``(*shape, D)``, with k(x, z) ∝ E cos ωᵀ(x − z); ``None`` if unknown."""
        return None

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        """``num`` draws of the zero-mean process as functions of inputs, x ↦ ``(num, ..., N)``.

        Exact where the kernel has finite features, otherwise by ``num_features`` random Fourier features
        (Rahimi and Recht, 2007); ``None`` if the kernel has neither. The batch dimensions are those of the
        hyperparameters and of x, with independent draws along each.

        :param x: inputs of the right dtype, device and number of columns, ``(..., N, D)``.
        """
        phi = self.features(x[..., :1, :])
        if phi is not None:
            weights = torch.randn(num, *phi.shape[:-2], phi.shape[-1], 1, dtype=x.dtype, device=x.device)
            return lambda x: (_features(self, x) @ weights)[..., 0]
        batch = torch.broadcast_shapes(self.batch_shape, x.shape[:-2])
        omega = self.frequencies((num, *batch, num_features), x)
        if omega is None:
            return None
        phase = 2 * math.pi * torch.rand(num, *batch, 1, num_features, dtype=x.dtype, device=x.device)
        weights = torch.randn(num, *batch, num_features, 1, dtype=x.dtype, device=x.device)
        amplitude = math.sqrt(2 / num_features)

        def functions(x: Tensor) -> Tensor:
            waves = torch.cos(x @ omega.mT + phase) @ weights
            return amplitude * self.diag(x).sqrt() * waves[..., 0]

        return functions

    def __add__(self, other: Union[Kernel, Scalar]) -> Sum:
        if not isinstance(other, _NUMBERS):
            return Sum(self, other)
        from .features import Constant

        return Sum(self, Constant(other))

    def __radd__(self, other: Union[Kernel, Scalar]) -> Kernel:  # type: ignore[misc]
        return self if isinstance(other, int) and other == 0 else self + other  # sum(kernels) starts at 0

    def __mul__(self, other: Union[Kernel, Scalar]) -> Kernel:
        if not isinstance(other, _NUMBERS):
            return Product(self, other)
        return Sum(*(Scaled(term, other) for term in self.terms)) if len(self.terms) > 1 else Scaled(self, other)

    __rmul__ = __mul__

    def __getitem__(self, dims: Union[int, slice, Sequence[int]]) -> Kernel:
        if len(self.terms) > 1:
            return Sum(*(Select(term, dims) for term in self.terms))
        return Select(self, dims)

    def __iter__(self) -> Any:  # k[dims] would otherwise make every kernel an endless sequence
        raise TypeError(f"{type(self).__name__} is not iterable; a sum's summands are kernel.terms")

    def _repr_arguments(self) -> str:
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._repr_arguments()})"


def _features(kernel: Kernel, x: Tensor) -> Tensor:
    phi = kernel.features(x)
    if phi is None:
        raise RuntimeError(f"{kernel!r} has features at some inputs but not at others")
    return phi


def describe(value: Any) -> str:
    """A hyperparameter for ``repr``: the number, or the tensor's shape."""
    if isinstance(value, Tensor):
        return f"<{', '.join(map(str, value.shape))}>" if value.dim() else "<>"
    return repr(value)


def require_kernel(value: Any, name: str) -> Any:
    """``value`` if it can act as a kernel: callable, with a method ``diag``."""
    if not callable(value) or not callable(getattr(value, "diag", None)):
        raise ValueError(
            f"{name} must be a kernel (k(x, z), k(x) and k.diag(x)), got {type(value).__name__}; kernels.from_function "
            "makes one of functions, kernels.from_pyro and kernels.from_gpytorch adapt those libraries' modules."
        )
    return value


class Sum(Kernel):
    """k(x, x') = Σ_c k_c(x, x'); nested sums are flattened, ``terms`` lists the summands.

    :param kernels: k_1, …, k_C.
    """

    any_dtype = True

    def __init__(self, *kernels: Kernel) -> None:
        flat: list[Kernel] = []
        for i, kernel in enumerate(kernels):
            flat.extend(getattr(require_kernel(kernel, f"Sum's term {i}"), "terms", (kernel,)))
        if not flat:
            raise ValueError("Sum needs at least one kernel, got none")
        self._terms = tuple(flat)

    @property
    def terms(self) -> tuple[Kernel, ...]:
        return self._terms

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return self._terms

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        total = self._terms[0](x, z)
        for term in self._terms[1:]:
            total = total + term(x, z)
        return total

    def diag(self, x: Tensor) -> Tensor:
        total = self._terms[0].diag(x)
        for term in self._terms[1:]:
            total = total + term.diag(x)
        return total

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(*(batch_shape(term) for term in self._terms))

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return _union(self._terms)

    def on_columns(self, num: int) -> Kernel:
        return _changed(self, _terms=tuple(on_columns(term, num) for term in self._terms))

    def features(self, x: Tensor) -> Optional[Tensor]:
        parts = [features(term, x) for term in self._terms]
        return None if any(part is None for part in parts) else side_by_side([p for p in parts if p is not None])

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        parts = [found for term in self._terms if (found := explicit(term, x)) is not None]
        if len(parts) < len(self._terms):
            return None
        diagonal = functools.reduce(torch.add, (part.diagonal for part in parts))
        return Explicit(side_by_side([part.features for part in parts]), diagonal, _heights(parts))

    @property
    def depends_on_rows(self) -> bool:
        return any(depends_on_rows(term) for term in self._terms)

    def relative_to(self, rows: Tensor) -> Sum:
        return Sum(*(relative_to(term, rows) for term in self._terms)) if self.depends_on_rows else self

    def check_inputs(self, x: Tensor) -> None:
        for term in self._terms:
            check_inputs(term, x)

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        x = _expand(x, self.batch_shape)
        draws = [prior_functions(term, num, num_features, x) for term in self._terms]
        if any(draw is None for draw in draws):
            return None

        def functions(x: Tensor) -> Tensor:
            total = draws[0](x)  # type: ignore[misc]
            for draw in draws[1:]:
                total = total + draw(x)  # type: ignore[misc]
            return total

        return functions

    def __repr__(self) -> str:
        return " + ".join(map(repr, self._terms))


class Product(Kernel):
    """k(x, x') = Π_c k_c(x, x'); an interaction where the factors read different columns.

    :param kernels: k_1, …, k_C.
    """

    any_dtype = True

    def __init__(self, *kernels: Kernel) -> None:
        flat: list[Kernel] = []
        for i, kernel in enumerate(kernels):
            require_kernel(kernel, f"Product's factor {i}")
            flat.extend(kernel.factors if isinstance(kernel, Product) else (kernel,))
        if not flat:
            raise ValueError("Product needs at least one kernel, got none")
        self.factors: tuple[Kernel, ...] = tuple(flat)

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return self.factors

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        total = self.factors[0](x, z)
        for factor in self.factors[1:]:
            total = total * factor(x, z)
        return total

    def diag(self, x: Tensor) -> Tensor:
        total = self.factors[0].diag(x)
        for factor in self.factors[1:]:
            total = total * factor.diag(x)
        return total

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(*(batch_shape(factor) for factor in self.factors))

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return _union(self.factors)

    def on_columns(self, num: int) -> Kernel:
        return _changed(self, factors=tuple(on_columns(factor, num) for factor in self.factors))

    def features(self, x: Tensor) -> Optional[Tensor]:
        product: Optional[Tensor] = None
        for factor in self.factors:
            phi = features(factor, x)
            if phi is None:
                return None
            product = phi if product is None else _all_products(product, phi)
        return product

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        parts = [found for factor in self.factors if (found := explicit(factor, x)) is not None]
        if len(parts) < len(self.factors):
            return None
        phi = functools.reduce(_all_products, (part.features for part in parts))
        return Explicit(phi, functools.reduce(torch.mul, (part.diagonal for part in parts)), _heights(parts))

    @property
    def depends_on_rows(self) -> bool:
        return any(depends_on_rows(factor) for factor in self.factors)

    def relative_to(self, rows: Tensor) -> Product:
        return Product(*(relative_to(factor, rows) for factor in self.factors)) if self.depends_on_rows else self

    def check_inputs(self, x: Tensor) -> None:
        for factor in self.factors:
            check_inputs(factor, x)

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        # The spectral measure of a product is the convolution of the factors': add independent draws.
        total: Optional[Tensor] = None
        for factor in self.factors:
            omega = factor.frequencies(shape, x) if isinstance(factor, Kernel) else None
            if omega is None:
                return None
            total = omega if total is None else total + omega
        return total

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        # Features and frequencies leave out a diagonal term; a factor that has one has no draw.
        if any(prior_functions(factor, 1, 1, x) is None for factor in self.factors):
            return None
        return super().prior_functions(num, num_features, x)

    def __repr__(self) -> str:
        return " * ".join(_bracketed(factor, Sum) for factor in self.factors)


class Scaled(Kernel):
    """k(x, x') = s·k₀(x, x'); ``s * k`` makes it.

    :param kernel: k₀.
    :param variance: s > 0, ``(...,)``.
    """

    any_dtype = True

    def __init__(self, kernel: Kernel, variance: Scalar) -> None:
        self.kernel = require_kernel(kernel, "Scaled's kernel")
        self.variance = positive(variance, "the variance that scales a kernel")

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        variance = as_tensor(self.variance, x)[..., None, None]
        scaled = getattr(self.kernel, "scaled", None)  # a kernel may have a cheaper way than a product
        return variance * self.kernel(x, z) if scaled is None else scaled(variance, x, z)

    def diag(self, x: Tensor) -> Tensor:
        return as_tensor(self.variance, x)[..., None] * self.kernel.diag(x)

    @property
    def name(self) -> Optional[str]:
        return self._name or name(self.kernel)

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(batch_of(self.variance, 0), batch_shape(self.kernel))

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return columns(self.kernel)

    def on_columns(self, num: int) -> Kernel:
        return _changed(self, kernel=on_columns(self.kernel, num))

    def features(self, x: Tensor) -> Optional[Tensor]:
        phi = features(self.kernel, x)
        return None if phi is None else as_tensor(self.variance, x).sqrt()[..., None, None] * phi

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        found = explicit(self.kernel, x)
        if found is None:
            return None
        variance = as_tensor(self.variance, x)
        root = variance.sqrt()[..., None, None]
        return Explicit(root * found.features, variance[..., None] * found.diagonal, found.heights)

    @property
    def depends_on_rows(self) -> bool:
        return depends_on_rows(self.kernel)

    def relative_to(self, rows: Tensor) -> Scaled:
        return Scaled(relative_to(self.kernel, rows), self.variance) if self.depends_on_rows else self

    @property
    def source(self) -> Optional[Any]:
        found = source(self.kernel)
        return None if found is None else Scaled(found, self.variance)

    def source_inputs(self, x: Tensor) -> Tensor:
        return self.kernel.source_inputs(x)

    def from_source(self, x: Tensor, z: Tensor) -> Tensor:
        return as_tensor(self.variance, x)[..., None, None] * self.kernel.from_source(x, z)

    def check_inputs(self, x: Tensor) -> None:
        check_inputs(self.kernel, x)

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        return self.kernel.frequencies(shape, x) if isinstance(self.kernel, Kernel) else None

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        draw = prior_functions(self.kernel, num, num_features, _expand(x, self.batch_shape))
        if draw is None:
            return None

        def scaled(draw: PriorFunctions) -> PriorFunctions:
            return lambda x: as_tensor(self.variance, x).sqrt()[..., None] * draw(x)

        return of_each(scaled, draw)

    def __repr__(self) -> str:
        return f"{describe(self.variance)} * {_bracketed(self.kernel, Sum)}"


class Select(Kernel):
    """k(x, x') = k₀(x[dims], x'[dims]): the kernel k₀ on some columns of the inputs.

    :param kernel: k₀.
    :param dims: a column's number, several, or a slice; what counts from the end, ``k[-1]`` or ``k[2:]``, has numbers
        once there are inputs.
    """

    any_dtype = True

    def __init__(self, kernel: Kernel, dims: Union[int, slice, Sequence[int]]) -> None:
        self.kernel = require_kernel(kernel, "Select's kernel")
        if isinstance(dims, slice) and dims.stop is not None and min(dims.stop, dims.start or 0) >= 0:
            dims = range(dims.stop)[dims]
        if not isinstance(dims, slice):
            dims = (int(dims),) if isinstance(dims, (int, numbers.Integral)) else tuple(int(d) for d in dims)
            if not dims or len(set(dims)) < len(dims):
                raise ValueError(f"k[dims] needs distinct column numbers, got {dims}")
        self._dims: Union[slice, tuple[int, ...]] = dims

    @property
    def dims(self) -> tuple[int, ...]:
        """The columns' numbers.

        :raises ValueError: where they are not known before the inputs are.
        """
        if isinstance(self._dims, slice) or min(self._dims) < 0:
            raise ValueError(f"the columns of k[{self._written}] have numbers once there are inputs: k.on_columns(D)")
        return self._dims

    def _numbers(self, num: int) -> tuple[int, ...]:
        """The numbers of the columns, of ``num``."""
        dims = self._dims
        found = tuple(range(num)[dims]) if isinstance(dims, slice) else tuple(d + num * (d < 0) for d in dims)
        if not found or len(set(found)) < len(found):
            raise ValueError(f"k[{self._written}] needs distinct columns, of the inputs' {num} it reads {found}")
        for dim in found:
            if not 0 <= dim < num:
                raise ValueError(f"k[{self._written}] reads column {dim}, the inputs have {num}")
        return found

    @property
    def _written(self) -> str:
        dims = self._dims
        if not isinstance(dims, slice):
            return ", ".join(map(str, dims))
        parts = [dims.start, dims.stop, *([] if dims.step is None else [dims.step])]
        return ":".join("" if part is None else str(part) for part in parts)

    def on_columns(self, num: int) -> Kernel:
        dims = self._numbers(num)
        return _changed(self, _dims=dims, kernel=on_columns(self.kernel, len(dims)))

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    def _slice(self, x: Tensor) -> Tensor:
        dims = self._numbers(x.shape[-1])
        if dims == tuple(range(dims[0], dims[-1] + 1)):
            return x[..., dims[0] : dims[-1] + 1]
        return torch.stack([x[..., d] for d in dims], -1)  # an index list would be copied to the device

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        return self.kernel(self._slice(x), None if z is None else self._slice(z))

    def diag(self, x: Tensor) -> Tensor:
        return self.kernel.diag(self._slice(x))

    @property
    def name(self) -> Optional[str]:
        return self._name or name(self.kernel)

    @property
    def batch_shape(self) -> torch.Size:
        return batch_shape(self.kernel)

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        if isinstance(self._dims, slice) or min(self._dims) < 0:
            return None
        inner = columns(self.kernel)
        return tuple(sorted(self._dims if inner is None else (self._dims[i] for i in inner)))

    def features(self, x: Tensor) -> Optional[Tensor]:
        return features(self.kernel, self._slice(x))

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        return explicit(self.kernel, self._slice(x))

    @property
    def depends_on_rows(self) -> bool:
        return depends_on_rows(self.kernel)

    def relative_to(self, rows: Tensor) -> Select:
        return Select(relative_to(self.kernel, self._slice(rows)), self._dims) if self.depends_on_rows else self

    @property
    def source(self) -> Optional[Any]:
        return source(self.kernel)

    def source_inputs(self, x: Tensor) -> Tensor:
        return self.kernel.source_inputs(self._slice(x))

    def from_source(self, x: Tensor, z: Tensor) -> Tensor:
        return self.kernel.from_source(self._slice(x), z)

    def check_inputs(self, x: Tensor) -> None:
        check_inputs(self.kernel, self._slice(x))

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        omega = self.kernel.frequencies(shape, self._slice(x)) if isinstance(self.kernel, Kernel) else None
        if omega is None:
            return None
        full = omega.new_zeros(*omega.shape[:-1], x.shape[-1])
        full[..., list(self._numbers(x.shape[-1]))] = omega
        return full

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        draw = prior_functions(self.kernel, num, num_features, self._slice(x))
        if draw is None:
            return None

        def sliced(x: Tensor) -> Tensor:
            return draw(self._slice(x))

        return SourceFunctions(sliced, draw.source) if isinstance(draw, SourceFunctions) else sliced

    def __repr__(self) -> str:
        inner = _bracketed(self.kernel, (Sum, Product, Scaled))
        return f"{inner}[{self._written}]"


def positive(value: Scalar, name: str) -> Scalar:
    """``value``, checked to be above zero where that costs nothing: where it is a Python number."""
    if isinstance(value, (int, float)) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


def _changed(kernel: Kernel, /, **parts: Any) -> Kernel:
    """The kernel with other parts; itself if they are the same."""
    if all(_is(getattr(kernel, name), part) for name, part in parts.items()):
        return kernel
    new = copy.copy(kernel)
    vars(new).update(parts)
    return new


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is, one, other))
    return one is other or (isinstance(one, int) and one == other)


def _bracketed(kernel: Kernel, types: Any) -> str:
    return f"({kernel!r})" if isinstance(kernel, types) else repr(kernel)


def _all_products(a: Tensor, b: Tensor) -> Tensor:
    # The features of a product are all products of the factors' features.
    return (a[..., :, None] * b[..., None, :]).flatten(-2)


def _heights(parts: Sequence[Explicit]) -> tuple[Tensor, ...]:
    return tuple(height for part in parts for height in part.heights)


def _expand(x: Tensor, batch: torch.Size) -> Tensor:
    return x.expand(*torch.broadcast_shapes(batch, x.shape[:-2]), *x.shape[-2:])


def _union(kernels: Sequence[Kernel]) -> Optional[tuple[int, ...]]:
    used: set[int] = set()
    for kernel in kernels:
        read = columns(kernel)
        if read is None:
            return None
        used.update(read)
    return tuple(sorted(used))


# Any callable with a method ``diag`` is a kernel; these read what only our own classes declare.


def batch_shape(kernel: Any) -> torch.Size:
    """The kernel's batch shape; empty for a callable that declares none."""
    return getattr(kernel, "batch_shape", torch.Size())


def columns(kernel: Any) -> Optional[tuple[int, ...]]:
    """The columns the kernel reads; all for a callable that declares none."""
    return getattr(kernel, "columns", None)


def features(kernel: Any, x: Tensor) -> Optional[Tensor]:
    """The kernel's finite features at x; none for a callable that declares none."""
    return kernel.features(x) if hasattr(kernel, "features") else None


def explicit(kernel: Any, x: Tensor) -> Optional[Explicit]:
    """The kernel's features and diagonal at x; ``None`` for a callable that declares no features."""
    if hasattr(kernel, "explicit"):
        return kernel.explicit(x)
    phi = features(kernel, x)
    return None if phi is None else Explicit(phi, kernel.diag(x))


def depends_on_rows(kernel: Any) -> bool:
    """Whether the kernel's diagonal term at a row depends on the other rows; not for a callable that does not say."""
    return getattr(kernel, "depends_on_rows", False)


def white_share(kernel: Any, x: Tensor) -> Tensor:
    """The share of the variance that k(x, x') lacks at x' = x, such as :class:`White`'s, at the first of the rows x."""
    row = x.reshape(-1, x.shape[-1])[:1]
    variance = kernel.diag(row)
    return (variance - kernel(row, row)[..., 0]) / variance


def on_columns(kernel: Any, num: int) -> Any:
    """The kernel for inputs of ``num`` columns; itself for a callable that does not say."""
    return kernel.on_columns(num) if hasattr(kernel, "on_columns") else kernel


def relative_to(kernel: Any, rows: Tensor) -> Any:
    """The kernel in the company of ``rows``; itself for a callable that does not depend on them."""
    return kernel.relative_to(rows) if depends_on_rows(kernel) else kernel


def check_inputs(kernel: Any, x: Tensor) -> None:
    """Let the kernel refuse training inputs; a callable that does not say takes all."""
    if hasattr(kernel, "check_inputs"):
        kernel.check_inputs(x)


def in_any_dtype(kernel: Any) -> bool:
    """Whether k(x) has the dtype of x, whatever that of hyperparameters.

    The kernel's own class must say so: one derived from it may hold a network, which takes inputs of its dtype only.
    """
    return bool(vars(type(kernel)).get("any_dtype")) and all(map(in_any_dtype, kernel.parts))


def source(kernel: Any) -> Optional[Any]:
    """The kernel of the process that f is made of; ``None`` for a callable that declares none."""
    return getattr(kernel, "source", None)


def prior_functions(kernel: Any, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
    """Draws of the kernel's process as functions; none for a callable that declares none."""
    return kernel.prior_functions(num, num_features, x) if hasattr(kernel, "prior_functions") else None


def hyperparameters(kernel: Any) -> str:
    """What numbers a kernel is made of, such as "RBF's lengthscale is nan", for an error."""
    found = []
    for label, value in getattr(kernel, "__dict__", {}).items():
        if isinstance(value, (Kernel, tuple)):
            parts = value if isinstance(value, tuple) else (value,)
            found += [text for part in parts if isinstance(part, Kernel) and (text := hyperparameters(part))]
        elif isinstance(value, (float, Tensor)) and not label.startswith("_"):
            low, high = (float(end) for end in torch.as_tensor(value).detach().aminmax())
            found.append(
                f"{type(kernel).__name__}'s {label} is {f'{low:.3g} to {high:.3g}' if low < high else f'{low:.3g}'}"
            )
    return ", ".join(found)


def terms(kernel: Any) -> tuple[Any, ...]:
    """The kernel's summands; itself for a callable that declares none."""
    return getattr(kernel, "terms", (kernel,))


def name(kernel: Any) -> Optional[str]:
    """The kernel's name; none for a callable that declares none."""
    found = getattr(kernel, "name", None)
    return found if isinstance(found, str) else None


def term_names(kernel: Any) -> tuple[str, ...]:
    """A name for each summand: its own, or its columns, "x0" or "x0:x1", or its class; numbered where they repeat."""
    found: list[str] = []
    for term in terms(kernel):
        read = columns(term)
        plain = name(term) or (":".join(f"x{column}" for column in read) if read is not None else _kind(term))
        count = sum(other == plain or other.startswith(f"{plain} (") for other in found)
        found.append(f"{plain} ({count + 1})" if count else plain)
    return tuple(found)


def _kind(kernel: Any) -> str:
    while isinstance(kernel, (Scaled, Select)):
        kernel = kernel.kernel
    return type(kernel).__name__.lower()
