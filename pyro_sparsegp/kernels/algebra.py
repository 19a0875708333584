"""Kernels made of kernels: sums, products, multiples, kernels on some of the columns; and callables as kernels."""

from __future__ import annotations

import copy
import functools
import itertools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..numerics.functions import broadcast_shapes, if_known
from ..numerics.linalg import side_by_side
from .base import CovarianceFunction, PriorFunctions, Scalar, as_tensor, describe, positive, second

_NUMBERS = (int, float, numbers.Real, Tensor)  # NumPy's scalars are numbers.Real


class Kernel(CovarianceFunction):
    """A covariance function with its algebra.

    ``k1 + k2``, ``k1 * k2``, ``scalar * k`` and ``k[dims]``, which acts on the columns ``dims``, are kernels again. A
    kernel of your own is a subclass with ``__call__`` and ``diag``, see :class:`CovarianceFunction`.
    """

    def __add__(self, other: Union[Kernel, Scalar]) -> Sum:
        return Sum(self, Constant(other) if isinstance(other, _NUMBERS) else other)

    def __radd__(self, other: Union[Kernel, Scalar]) -> Kernel:  # type: ignore[misc]
        return self if isinstance(other, int) and other == 0 else self + other  # sum(kernels) starts at 0

    def __mul__(self, other: Union[Kernel, Scalar]) -> Kernel:
        return self._each(Scaled, other) if isinstance(other, _NUMBERS) else Product(self, other)

    __rmul__ = __mul__

    def __getitem__(self, dims: Union[int, slice, Sequence[int]]) -> Kernel:
        return self._each(Select, dims)

    def _each(self, kind: Callable[..., Kernel], argument: object) -> Kernel:
        """The sum of what terms become."""
        first, *others = (kind(term, argument) for term in self.terms)
        return Sum(first, *others) if others else first

    def __iter__(self) -> Any:  # k[dims] would otherwise make every kernel an endless sequence
        raise TypeError(f"{type(self).__name__} is not iterable; a sum's summands are kernel.terms")


class Foreign(Kernel):
    """Functions of tensors, k(x, z) and its diagonal, as a kernel ``of`` something that may declare a batch shape."""

    any_dtype = False

    def __init__(self, function: Callable[..., Tensor], variance: Callable[[Tensor], Tensor], of: object) -> None:
        self.function, self.variance, self.of = function, variance, of

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        return self.function(x, z)

    def diag(self, x: Tensor) -> Tensor:
        return self.variance(x)

    @property
    def batch_shape(self) -> torch.Size:
        return getattr(self.of, "batch_shape", torch.Size())

    @property
    def kind(self) -> str:
        return type(self.of).__name__.lower()

    def __repr__(self) -> str:
        return describe(self.of)


def kernel_by_row(value: object, name: str) -> Kernel:
    """As :func:`as_kernel`, of one whose diagonal is by row."""
    kernel = as_kernel(value, name)
    if kernel.depends_on_rows:
        raise ValueError(f"{name} has a variance correction, {value!r}: write variance_correction=False")
    return kernel


def as_kernel(value: Any, name: str) -> Kernel:
    """``value`` as a kernel: it is one, or a callable with a ``diag``."""
    if isinstance(value, Kernel):
        return value
    if not callable(value) or not callable(getattr(value, "diag", None)):
        raise ValueError(
            f"{name} must be a kernel (k(x, z), k(x) and k.diag(x)), got {type(value).__name__}; kernels.from_function "
            "makes one of functions, kernels.from_pyro and kernels.from_gpytorch adapt those libraries' modules."
        )
    return Foreign(value, value.diag, value)


class Compound(Kernel):
    """A kernel made of others, :attr:`parts`, by a rule for their matrices and diagonals and one for their features."""

    join: Any = staticmethod(torch.add)  # of two matrices or diagonals

    def __init__(self, parts: Sequence[Any], what: str) -> None:
        self.parts = tuple(map(as_kernel, parts, map(what.format, range(len(parts)))))
        if not parts:
            raise ValueError(f"{type(self).__name__} needs at least one kernel, got none")

    def combine(self, values: Sequence[Tensor], dims: int) -> Tensor:
        """The kernel's matrix (2 ``dims`` of rows) or diagonal (1) from those that its parts have."""
        return functools.reduce(self.join, values)

    def combine_features(self, features: Sequence[Tensor]) -> Tensor:
        """The kernel's features from its parts' features, ``(..., N, R_c)``."""
        # φ(x)ᵀφ(x') = Σ_c φ_c(x)ᵀφ_c(x')
        return side_by_side(features)

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        x, z = self.own_columns(x), if_known(self.own_columns, z)
        return self.combine([part(x, z) for part in self.parts], 2)

    def diag(self, x: Tensor) -> Tensor:
        x = self.own_columns(x)
        return self.combine([part.diag(x) for part in self.parts], 1)

    def features(self, x: Tensor) -> Optional[Tensor]:
        return if_known(operator.itemgetter(0), self.explicit(x))

    def explicit(self, x: Tensor) -> Optional[tuple[Tensor, Tensor]]:
        x = self.own_columns(x)

        def joined(*found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            features, diagonals = zip(*found)
            return self.combine_features(features), self.combine(diagonals, 1)

        return if_known(joined, *(part.explicit(x) for part in self.parts))

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        return if_known(lambda *read: tuple(sorted({*itertools.chain(*read)})), *(part.columns for part in self.parts))


class Sum(Compound):
    """A sum of kernels, Σ_c k_c(x, x'). Nested sums are flattened; ``terms`` lists the summands.

    :param kernels: k_1, …, k_C.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__(kernels, "Sum's term {}")
        self.parts = tuple(term for kernel in self.parts for term in kernel.terms)

    @property
    def terms(self) -> tuple[Kernel, ...]:
        return self.parts

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        x = x.expand(*broadcast_shapes(self.batch_shape, x.shape[:-2]), *x.shape[-2:])  # which terms may lack
        draws = (term.prior_functions(num, num_features, x) for term in self.terms)
        return if_known(lambda *draws: lambda x: sum(f(x) for f in draws), *draws)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


class Product(Compound):
    """A product of kernels, Π_c k_c(x, x'): an interaction where the factors read different columns.

    :param kernels: k_1, …, k_C.
    """

    join = staticmethod(torch.mul)

    @property
    def centred(self) -> Any:
        boxes = [part.centred for part in self.parts]
        merged = if_known(lambda *boxes: functools.reduce(operator.or_, boxes), *boxes)
        # a product of two factors of one column has a mean: no interval is its own
        return merged if merged is not None and len(merged) == sum(map(len, boxes)) else None

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__(kernels, "Product's factor {}")
        self.parts = tuple(f for k in self.parts for f in (k.parts if isinstance(k, Product) else [k]))

    def combine_features(self, features: Sequence[Tensor]) -> Tensor:
        # φ(x)ᵀφ(x') = Π_c φ_c(x)ᵀφ_c(x') for φ all products of the factors' features.
        return functools.reduce(lambda a, b: (a[..., :, None] * b[..., None, :]).flatten(-2), features)

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        # The spectral measure of a product is the convolution of the factors': add independent draws.
        return if_known(lambda *omega: sum(omega), *(factor.frequencies(shape, x) for factor in self.parts))

    def __repr__(self) -> str:
        return " * ".join(_bracketed(factor, Sum) for factor in self.parts)


class _Modified(Compound):
    """A kernel made of one other, k₀, whose name and source it has."""

    def __init__(self, kernel: object, what: str) -> None:
        super().__init__([kernel], what)
        self.name = self.kernel.name

    @property
    def kernel(self) -> Any:
        return self.parts[0]

    @property
    def kind(self) -> str:
        return self.kernel.kind

    @property
    def centred(self) -> Any:
        return self.kernel.centred

    @property
    def source(self) -> Optional[Any]:
        return self.kernel.source

    def source_inputs(self, x: Tensor) -> Tensor:
        return self.kernel.source_inputs(self.own_columns(x))

    def from_source(self, x: Tensor, z: Tensor) -> Tensor:
        return self.combine([self.kernel.from_source(self.own_columns(x), z)], 2)

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        return self.kernel.frequencies(shape, self.own_columns(x))


class Scaled(_Modified):
    """A scaled kernel, s·k₀(x, x'), written ``s * k``: s is a variance.

    :param kernel: k₀.
    :param variance: s > 0, ``(...,)``.
    """

    event_dims = (("variance", 0),)

    def __init__(self, kernel: Kernel, variance: Scalar) -> None:
        super().__init__(kernel, "Scaled's kernel")
        self.variance = positive(variance, "the variance that scales a kernel")

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        # What Compound's way gives, in one call for its five: most kernels of a step are scaled (test_runs.py).
        return as_tensor(self.variance, x)[..., None, None] * self.parts[0](x, z)

    def combine(self, values: Sequence[Tensor], dims: int) -> Tensor:
        variance = as_tensor(self.variance, values[0])
        return variance[(..., *[None] * dims)] * values[0]

    def combine_features(self, features: Sequence[Tensor]) -> Tensor:
        # (√s φ(x))ᵀ(√s φ(x')) = s φ(x)ᵀφ(x')
        return as_tensor(self.variance, features[0]).sqrt()[..., None, None] * features[0]

    @property
    def source(self) -> Optional[Any]:
        return if_known(lambda source: Scaled(source, self.variance), self.kernel.source)

    def __repr__(self) -> str:
        return f"{describe(self.variance)} * {_bracketed(self.kernel, Sum)}"


class Select(_Modified):
    """A kernel k₀ on some columns of the inputs, k₀(x[dims], x'[dims]), written ``k[dims]``.

    :param kernel: k₀.
    :param dims: a column's number, several, or a slice; what counts from the end, ``k[-1]`` or ``k[2:]``, has numbers
        once there are inputs.
    """

    def __init__(self, kernel: Kernel, dims: Union[int, slice, Sequence[int]]) -> None:
        super().__init__(kernel, "Select's kernel")
        if isinstance(dims, slice) and dims.stop is not None and min(dims.stop, dims.start or 0) >= 0:
            # inputs of fewer columns are refused: a slice would read those that are there
            dims = range(dims.stop)[dims]
        if not isinstance(dims, slice):
            dims = tuple(map(int, [dims] if isinstance(dims, (int, numbers.Integral)) else dims))
        self.dims: Any = dims

    def _numbers(self, num: int) -> tuple[int, ...]:
        # The numbers of the columns, of num.
        dims = self.dims
        found = tuple(range(num)[dims]) if isinstance(dims, slice) else tuple(d + num * (d < 0) for d in dims)
        if not 0 < len(found) == len({*found} & {*range(num)}):
            raise ValueError(f"{self!r} needs distinct columns of the inputs' {num}, it reads {found}")
        return found

    def on_columns(self, num: int) -> Kernel:
        dims = self._numbers(num)
        new = self if dims == self.dims else copy.copy(self)
        new.dims = dims
        return new.with_parts([self.kernel.on_columns(len(dims))])

    def code_columns(self, num: int) -> frozenset[int]:
        dims = self._numbers(num)
        return frozenset(dims[i] for i in self.kernel.code_columns(len(dims)))

    def own_columns(self, x: Tensor) -> Tensor:
        dims = self._numbers(x.shape[-1])
        if dims == tuple(range(dims[0], dims[-1] + 1)):
            return x[..., dims[0] : dims[-1] + 1]
        return torch.stack([x[..., d] for d in dims], -1)  # an index list would be copied to the device

    @property
    def centred(self) -> Any:
        # a column of k₀ has another number outside of k₀[dims]
        return if_known(lambda boxes: {self.dims[column]: box for column, box in boxes.items()}, self.kernel.centred)

    @property
    def columns(self) -> Optional[tuple[int, ...]]:
        dims, inner = self.dims, self.kernel.columns
        if isinstance(dims, slice) or min(dims, default=0) < 0:
            return None
        return tuple(sorted(dims if inner is None else (dims[i] for i in inner)))

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        def of_all(omega: Tensor) -> Tensor:
            # ωᵀx of the columns that k₀ reads is that of all, with 0 for the others
            full = omega.new_zeros(*omega.shape[:-1], x.shape[-1])
            full[..., list(self._numbers(x.shape[-1]))] = omega
            return full

        return if_known(of_all, super().frequencies(shape, x))

    def __repr__(self) -> str:
        dims: Any = self.dims
        if isinstance(dims, slice):
            written = f"{dims.start}:{dims.stop}:{dims.step}".replace("None", "").removesuffix(":")
        else:
            written = ", ".join(map(str, dims))
        return f"{_bracketed(self.kernel, (Sum, Product, Scaled))}[{written}]"


class Level(Kernel):
    """A kernel of one variance, k(x, x) = s, and no other hyperparameter.

    :param variance: s > 0, ``(...,)``.
    """

    event_dims = (("variance", 0),)
    columns: Any = ()

    def __init__(self, variance: Scalar = 1.0) -> None:
        self.variance = positive(variance, f"{type(self).__name__}'s variance")

    def diag(self, x: Tensor) -> Tensor:
        variance = as_tensor(self.variance, x)[..., None]
        return variance.expand(broadcast_shapes(variance.shape, x.shape[:-1]))


class Constant(Level):
    """Constant kernel: k = s, one shared random level, an intercept with prior N(0, s)."""

    centred: Any = {}  # noqa: RUF012, along no column

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        z = second(x, z)
        batch = broadcast_shapes(self.batch_shape, x.shape[:-2], z.shape[:-2])
        return as_tensor(self.variance, x)[..., None, None].expand(*batch, x.shape[-2], z.shape[-2])

    def features(self, x: Tensor) -> Tensor:
        return self.diag(x).sqrt()[..., None]


def term_names(kernel: Any) -> tuple[str, ...]:
    """A name for each summand: its own, or its columns, "x0" or "x0:x1", or its class; numbered where they repeat."""
    found: list[str] = []
    for term in kernel.terms:
        plain = term.name or ":".join(f"x{column}" for column in term.columns or ()) or term.kind
        count = sum(plain in (other, other.rpartition(" (")[0]) for other in found)
        found.append(f"{plain} ({count + 1})" if count else plain)
    return tuple(found)


def _bracketed(kernel: Kernel, types: Any) -> str:
    return f"({kernel!r})" if isinstance(kernel, types) else repr(kernel)
