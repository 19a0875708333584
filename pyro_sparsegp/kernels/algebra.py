"""Kernels made of kernels: sums, products, multiples, kernels on some of the columns; and callables as kernels."""

from __future__ import annotations

import copy
import functools
import numbers
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..numerics.linalg import side_by_side
from ..numerics.shapes import broadcast_shapes
from .base import CovarianceFunction, Explicit, Scalar, as_tensor, batch_of, describe, positive
from .draws import PriorFunctions, SourceFunctions, of_each

__all__ = ["Constant", "Foreign", "Kernel", "Product", "Scaled", "Select", "Sum", "as_kernel", "term_names"]

_NUMBERS = (int, float, numbers.Real, Tensor)  # NumPy's scalars are numbers.Real


class Kernel(CovarianceFunction):
    """A covariance function with its algebra.

    ``k1 + k2``, ``k1 * k2``, ``scalar * k`` and ``k[dims]``, which acts on the columns ``dims``, are kernels again.

    A kernel of your own is a subclass with ``__call__`` and ``diag``, see :class:`CovarianceFunction`.
    """

    def __add__(self, other: Union[Kernel, Scalar]) -> Sum:
        if not isinstance(other, _NUMBERS):
            return Sum(self, other)
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


class Foreign(Kernel):
    """A callable k(x, z), k(x) with a method ``diag`` that is no kernel of this library's, as one.

    It may declare ``batch_shape``, ``columns`` and ``features(x)``.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        return self.function(x, z)

    def diag(self, x: Tensor) -> Tensor:
        return self.function.diag(x)

    @property
    def name(self) -> Optional[str]:
        found = self._name or getattr(self.function, "name", None)
        return found if isinstance(found, str) else None

    @property
    def batch_shape(self) -> torch.Size:
        return getattr(self.function, "batch_shape", torch.Size())

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return getattr(self.function, "columns", None)

    def features(self, x: Tensor) -> Optional[Tensor]:
        return self.function.features(x) if hasattr(self.function, "features") else None

    def __repr__(self) -> str:
        return repr(self.function)


def as_kernel(value: Any, name: str) -> Kernel:
    """``value`` if it is a kernel; a callable with a method ``diag`` as one.

    :raises ValueError: naming the argument, for anything else.
    """
    if isinstance(value, Kernel):
        return value
    if not callable(value) or not callable(getattr(value, "diag", None)):
        raise ValueError(
            f"{name} must be a kernel (k(x, z), k(x) and k.diag(x)), got {type(value).__name__}; kernels.from_function "
            "makes one of functions, kernels.from_pyro and kernels.from_gpytorch adapt those libraries' modules."
        )
    return Foreign(value)


class Sum(Kernel):
    """k(x, x') = Σ_c k_c(x, x'); nested sums are flattened, ``terms`` lists the summands.

    :param kernels: k_1, …, k_C.
    """

    any_dtype = True

    def __init__(self, *kernels: Kernel) -> None:
        flat: list[Kernel] = []
        for i, kernel in enumerate(kernels):
            flat.extend(as_kernel(kernel, f"Sum's term {i}").terms)
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
        return broadcast_shapes(*(term.batch_shape for term in self._terms))

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return _union(self._terms)

    def on_columns(self, num: int) -> Kernel:
        return _changed(self, _terms=tuple(term.on_columns(num) for term in self._terms))

    def features(self, x: Tensor) -> Optional[Tensor]:
        parts = [term.features(x) for term in self._terms]
        return None if any(part is None for part in parts) else side_by_side([p for p in parts if p is not None])

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        parts = [found for term in self._terms if (found := term.explicit(x)) is not None]
        if len(parts) < len(self._terms):
            return None
        diagonal = functools.reduce(torch.add, (part.diagonal for part in parts))
        return Explicit(side_by_side([part.features for part in parts]), diagonal, _heights(parts))

    @property
    def depends_on_rows(self) -> bool:
        return any(term.depends_on_rows for term in self._terms)

    def relative_to(self, rows: Tensor) -> Kernel:
        return (
            _changed(self, _terms=tuple(term.relative_to(rows) for term in self._terms))
            if self.depends_on_rows
            else self
        )

    def check_inputs(self, x: Tensor) -> None:
        for term in self._terms:
            term.check_inputs(x)

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        x = _expand(x, self.batch_shape)
        draws = [term.prior_functions(num, num_features, x) for term in self._terms]
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
            kernel = as_kernel(kernel, f"Product's factor {i}")
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
        return broadcast_shapes(*(factor.batch_shape for factor in self.factors))

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return _union(self.factors)

    def on_columns(self, num: int) -> Kernel:
        return _changed(self, factors=tuple(factor.on_columns(num) for factor in self.factors))

    def features(self, x: Tensor) -> Optional[Tensor]:
        product: Optional[Tensor] = None
        for factor in self.factors:
            phi = factor.features(x)
            if phi is None:
                return None
            product = phi if product is None else _all_products(product, phi)
        return product

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        parts = [found for factor in self.factors if (found := factor.explicit(x)) is not None]
        if len(parts) < len(self.factors):
            return None
        phi = functools.reduce(_all_products, (part.features for part in parts))
        return Explicit(phi, functools.reduce(torch.mul, (part.diagonal for part in parts)), _heights(parts))

    @property
    def depends_on_rows(self) -> bool:
        return any(factor.depends_on_rows for factor in self.factors)

    def relative_to(self, rows: Tensor) -> Kernel:
        return (
            _changed(self, factors=tuple(factor.relative_to(rows) for factor in self.factors))
            if self.depends_on_rows
            else self
        )

    def check_inputs(self, x: Tensor) -> None:
        for factor in self.factors:
            factor.check_inputs(x)

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        # The spectral measure of a product is the convolution of the factors': add independent draws.
        total: Optional[Tensor] = None
        for factor in self.factors:
            omega = factor.frequencies(shape, x)
            if omega is None:
                return None
            total = omega if total is None else total + omega
        return total

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        # Features and frequencies leave out a diagonal term; a factor that has one has no draw.
        if any(factor.prior_functions(1, 1, x) is None for factor in self.factors):
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
        self.kernel = as_kernel(kernel, "Scaled's kernel")
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
        return self._name or self.kernel.name

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast_shapes(batch_of(self.variance, 0), self.kernel.batch_shape)

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return self.kernel.columns

    def on_columns(self, num: int) -> Kernel:
        return _changed(self, kernel=self.kernel.on_columns(num))

    def features(self, x: Tensor) -> Optional[Tensor]:
        phi = self.kernel.features(x)
        return None if phi is None else as_tensor(self.variance, x).sqrt()[..., None, None] * phi

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        found = self.kernel.explicit(x)
        if found is None:
            return None
        variance = as_tensor(self.variance, x)
        root = variance.sqrt()[..., None, None]
        return Explicit(root * found.features, variance[..., None] * found.diagonal, found.heights)

    @property
    def depends_on_rows(self) -> bool:
        return self.kernel.depends_on_rows

    def relative_to(self, rows: Tensor) -> Kernel:
        return _changed(self, kernel=self.kernel.relative_to(rows)) if self.depends_on_rows else self

    @property
    def source(self) -> Optional[Any]:
        found = self.kernel.source
        return None if found is None else Scaled(found, self.variance)

    def source_inputs(self, x: Tensor) -> Tensor:
        return self.kernel.source_inputs(x)

    def from_source(self, x: Tensor, z: Tensor) -> Tensor:
        return as_tensor(self.variance, x)[..., None, None] * self.kernel.from_source(x, z)

    def check_inputs(self, x: Tensor) -> None:
        self.kernel.check_inputs(x)

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        return self.kernel.frequencies(shape, x)

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        draw = self.kernel.prior_functions(num, num_features, _expand(x, self.batch_shape))
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
        self.kernel = as_kernel(kernel, "Select's kernel")
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
        return _changed(self, _dims=dims, kernel=self.kernel.on_columns(len(dims)))

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    def code_columns(self, num: int) -> frozenset[int]:
        dims = self._numbers(num)
        return frozenset(dims[i] for i in self.kernel.code_columns(len(dims)))

    def own_columns(self, x: Tensor) -> Tensor:
        """The columns of inputs, ``(..., N, D)``, that k₀ reads."""
        dims = self._numbers(x.shape[-1])
        if dims == tuple(range(dims[0], dims[-1] + 1)):
            return x[..., dims[0] : dims[-1] + 1]
        return torch.stack([x[..., d] for d in dims], -1)  # an index list would be copied to the device

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        return self.kernel(self.own_columns(x), None if z is None else self.own_columns(z))

    def diag(self, x: Tensor) -> Tensor:
        return self.kernel.diag(self.own_columns(x))

    @property
    def name(self) -> Optional[str]:
        return self._name or self.kernel.name

    @property
    def batch_shape(self) -> torch.Size:
        return self.kernel.batch_shape

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        if isinstance(self._dims, slice) or min(self._dims) < 0:
            return None
        inner = self.kernel.columns
        return tuple(sorted(self._dims if inner is None else (self._dims[i] for i in inner)))

    def features(self, x: Tensor) -> Optional[Tensor]:
        return self.kernel.features(self.own_columns(x))

    def explicit(self, x: Tensor) -> Optional[Explicit]:
        return self.kernel.explicit(self.own_columns(x))

    @property
    def depends_on_rows(self) -> bool:
        return self.kernel.depends_on_rows

    def relative_to(self, rows: Tensor) -> Kernel:
        return _changed(self, kernel=self.kernel.relative_to(self.own_columns(rows))) if self.depends_on_rows else self

    @property
    def source(self) -> Optional[Any]:
        return self.kernel.source

    def source_inputs(self, x: Tensor) -> Tensor:
        return self.kernel.source_inputs(self.own_columns(x))

    def from_source(self, x: Tensor, z: Tensor) -> Tensor:
        return self.kernel.from_source(self.own_columns(x), z)

    def check_inputs(self, x: Tensor) -> None:
        self.kernel.check_inputs(self.own_columns(x))

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        omega = self.kernel.frequencies(shape, self.own_columns(x))
        if omega is None:
            return None
        full = omega.new_zeros(*omega.shape[:-1], x.shape[-1])
        full[..., list(self._numbers(x.shape[-1]))] = omega
        return full

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        draw = self.kernel.prior_functions(num, num_features, self.own_columns(x))
        if draw is None:
            return None

        def sliced(x: Tensor) -> Tensor:
            return draw(self.own_columns(x))

        return SourceFunctions(sliced, draw.source) if isinstance(draw, SourceFunctions) else sliced

    def __repr__(self) -> str:
        inner = _bracketed(self.kernel, (Sum, Product, Scaled))
        return f"{inner}[{self._written}]"


class Constant(Kernel):
    """k = s: one shared random level, an intercept with prior N(0, s).

    :param variance: s > 0, ``(...,)``.
    """

    any_dtype = True

    def __init__(self, variance: Scalar = 1.0) -> None:
        self.variance = positive(variance, "Constant's variance")

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        variance = as_tensor(self.variance, x)[..., None, None]
        batch = broadcast_shapes(self.batch_shape, x.shape[:-2], () if z is None else z.shape[:-2])
        return variance.expand(*batch, x.shape[-2], (x if z is None else z).shape[-2])

    def diag(self, x: Tensor) -> Tensor:
        variance = as_tensor(self.variance, x)[..., None]
        return variance.expand(*broadcast_shapes(self.batch_shape, x.shape[:-2]), x.shape[-2])

    def features(self, x: Tensor) -> Tensor:
        root = as_tensor(self.variance, x).sqrt()[..., None, None]
        return root.expand(*broadcast_shapes(self.batch_shape, x.shape[:-2]), x.shape[-2], 1)

    @property
    def batch_shape(self) -> torch.Size:
        return batch_of(self.variance, 0)

    def _repr_arguments(self) -> str:
        return describe(self.variance)


def term_names(kernel: Any) -> tuple[str, ...]:
    """A name for each summand: its own, or its columns, "x0" or "x0:x1", or its class; numbered where they repeat."""
    found: list[str] = []
    for term in kernel.terms:
        read = term.columns
        plain = term.name or (":".join(f"x{column}" for column in read) if read is not None else _kind(term))
        count = sum(other == plain or other.startswith(f"{plain} (") for other in found)
        found.append(f"{plain} ({count + 1})" if count else plain)
    return tuple(found)


def _kind(kernel: Any) -> str:
    while isinstance(kernel, (Scaled, Select)):
        kernel = kernel.kernel
    return type(kernel.function if isinstance(kernel, Foreign) else kernel).__name__.lower()


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
    return x.expand(*broadcast_shapes(batch, x.shape[:-2]), *x.shape[-2:])


def _union(kernels: Sequence[Kernel]) -> Optional[tuple[int, ...]]:
    used: set[int] = set()
    for kernel in kernels:
        read = kernel.columns
        if read is None:
            return None
        used.update(read)
    return tuple(sorted(used))
