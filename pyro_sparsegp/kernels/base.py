"""The protocol of a covariance function.

A kernel is a small immutable object made of tensors, built anew in every run of the model from sampled
hyperparameters. N and M count inputs, D their columns; leading batch dimensions of the hyperparameters
broadcast: a variance is ``(...,)``, a length scale ``(..., D)``, ``(..., 1)`` or a scalar.
"""

import copy
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..numerics.arguments import Documented
from ..numerics.functions import broadcast_shapes, if_known

Scalar = Union[float, int, Tensor]
EventDims = tuple[tuple[str, int], ...]
PriorFunctions = Callable[[Tensor], Tensor]  # draws of a process as functions of inputs
_BATCH, _DEPENDS = operator.attrgetter("batch_shape"), operator.attrgetter("depends_on_rows")


def as_tensor(value: Scalar, like: Tensor) -> Tensor:
    """``value`` with the dtype and device of ``like``."""
    if isinstance(value, Tensor):
        return value.to(dtype=like.dtype, device=like.device)
    return like.new_full((), float(value))  # no copy from the host


def per_column(value: Scalar, x: Tensor, name: str) -> Tensor:
    """A hyperparameter of the columns of x, as a scalar or ``(..., 1, 1)`` or ``(..., 1, D)``."""
    value = as_tensor(value, x)
    if not value.dim():
        return value
    if value.shape[-1] not in (1, x.shape[-1]):
        have, columns = value.shape[-1], x.shape[-1]
        raise ValueError(f"{name} has {have} entries for {columns} columns of inputs: give one, or {columns}")
    return value[..., None, :]


def second(x: Tensor, z: Optional[Tensor]) -> Tensor:
    """The second inputs of k(x, z), which k(x) has not: x itself."""
    return x if z is None else z


def require_one(x: Tensor, reads: str, selected: str) -> None:
    """Refuse inputs of several columns for what ``reads`` one, with how one is ``selected``."""
    if x.shape[-1] != 1:
        raise ValueError(f"{reads}, the inputs have {x.shape[-1]}: select one, {selected}")


class CovarianceFunction(Documented, ABC):
    """A covariance function k(x, x').

    ``k(x, z)`` is the matrix of k(xₙ, zₘ), ``(..., N, M)``; ``k(x)`` the covariance of the values at x with
    themselves, ``(..., N, N)``, which alone carries a diagonal term such as that of :class:`White`;
    ``k.diag(x)`` its diagonal, ``(..., N)``. The rest has defaults.
    """

    @abstractmethod
    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor: ...

    @abstractmethod
    def diag(self, x: Tensor) -> Tensor:
        """The diagonal k(xₙ, xₙ), ``(..., N)``, at inputs ``(N, D)``."""

    name: Optional[str] = None  # what named() gave it, or the kernel that it modifies

    def named(self, name: str) -> Any:
        """The same kernel under a name. Posteriors list the terms of a sum by name.

        >>> kernel = RBF(0.3)[0].named("temperature") + 2.0 * RBF(0.5)[1].named("wind")
        >>> [term.name for term in kernel.terms]
        ['temperature', 'wind']
        """
        if len(self.terms) > 1:
            raise ValueError(f"a sum has no name of its own; name its terms one by one: {list(self.terms)}")
        new = copy.copy(self)
        new.name = str(name)
        return new

    event_dims: EventDims = ()  # of each hyperparameter, how many last dimensions are its own

    @property
    def batch_shape(self) -> torch.Size:
        """The broadcast leading batch dimensions of the hyperparameters, including those in :attr:`parts`."""
        # Asked of every process: a plain loop, since a comprehension is a call (test_runs.py, `few_files`).
        shapes: list[torch.Size] = list(map(_BATCH, self.parts))
        for name, dims in self.event_dims:
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dim() > dims:
                shapes.append(value.shape[: value.dim() - dims])
        return broadcast_shapes(*shapes)

    @property
    def terms(self) -> tuple[Any, ...]:
        """The summands of the kernel; of all but a :class:`Sum`, the kernel itself."""
        return (self,)

    any_dtype: ClassVar[bool] = True  # whether k(x) has the dtype of x, whatever that of hyperparameters
    parts: tuple[Any, ...] = ()  # the kernels of the same inputs, or of some of their columns, that this one is made of

    def with_parts(self, parts: Sequence[Any]) -> Any:
        """The kernel made of other parts; itself if they are the same objects."""
        if all(map(operator.is_, parts, self.parts)):  # in a step nothing is copied where nothing was to be resolved
            return self
        new = copy.copy(self)
        new.parts = tuple(parts)
        return new

    # The input columns the kernel reads, a tuple, or None for all of them, or where on_columns is to tell.
    columns: Any = None

    def own_columns(self, x: Tensor) -> Tensor:
        """The columns of inputs, ``(..., N, D)``, that the parts read."""
        return x

    def on_columns(self, num: int) -> Any:
        """The kernel for inputs with ``num`` columns, where slices and negative numbers of columns are resolved."""
        return self.with_parts(list(map(operator.methodcaller("on_columns", num), self.parts)))

    def code_columns(self, num: int) -> frozenset[int]:
        """The columns, of ``num``, that hold category codes: inducing inputs keep them as they are."""
        return frozenset(i for part in self.parts for i in part.code_columns(num))

    def features(self, x: Tensor) -> Optional[Tensor]:
        """Φ, ``(..., N, R)``, with k(x, z) = φ(x)ᵀφ(z) off the diagonal, or ``None`` if there is no finite Φ."""
        return None

    def explicit(self, x: Tensor) -> Optional[tuple[Tensor, Tensor]]:
        """:meth:`features` and :meth:`diag`, in one evaluation of a network, or ``None`` if there is no finite Φ."""
        return if_known(lambda phi: (phi, self.diag(x)), self.features(x))

    def check_inputs(self, x: Tensor) -> None:
        """Refuse inputs that the kernel does not take, by a ValueError. A guide calls it once, at its first call."""
        for part in self.parts:
            part.check_inputs(self.own_columns(x))

    @property
    def depends_on_rows(self) -> bool:
        """Whether the diagonal term at a row depends on which other rows are given, as that of a ``DeepBasis``."""
        return any(map(_DEPENDS, self.parts))

    def relative_to(self, rows: Tensor) -> Any:
        """The kernel, where a diagonal term max k − k(x, x) takes the maximum over ``rows``, the training inputs."""
        return self.with_parts([part.relative_to(self.own_columns(rows)) for part in self.parts])

    # The kernel of g, where f(x) = Σ_p w_p g(x_p), whose inputs are then inducing ones by default; or None. A kernel
    # that has one has source_inputs(x), x_p, (..., N, P, d), and from_source(x, z), cov(f(xₙ), g(zₘ)), (..., N, M).
    source: Any = None

    # By column the interval over which all functions have mean zero along it; None if there is none.
    centred: Any = None

    @property
    def kind(self) -> str:
        """What the kernel, or that which it modifies, is called."""
        return type(self).__name__.lower()

    @property
    def has_residual(self) -> bool:
        """Whether k(x) has a diagonal term beside what features or waves give."""
        return any(part.has_residual for part in self.parts)

    def frequencies(self, shape: Sequence[int], x: Tensor) -> Optional[Tensor]:
        """Draws of the spectral measure, ``(*shape, D)``, with k(x, z) ∝ E cos ωᵀ(x − z); ``None`` if unknown."""
        return None

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[PriorFunctions]:
        """``num`` draws of the zero-mean process as functions of inputs, x ↦ ``(num, ..., N)``.

        Exact where the kernel has finite features, otherwise by ``num_features`` random Fourier features
        (Rahimi and Recht, 2007); ``None`` if the kernel has neither, or a diagonal term: a draw of that must remember
        where it was evaluated. Draws are independent along the batch dimensions of the hyperparameters and of x.

        :param x: inputs of the right dtype, device and number of columns, ``(..., N, D)``.
        """
        if self.has_residual:
            return None
        phi = self.features(x[..., :1, :])
        if phi is not None:
            # f = φ(x)ᵀw, w ~ N(0, I)
            weights = torch.randn(num, *phi.shape[:-2], phi.shape[-1], 1, dtype=x.dtype, device=x.device)
            return lambda x: (self.features(x) @ weights)[..., 0]  # type: ignore[operator]
        batch = broadcast_shapes(self.batch_shape, x.shape[:-2])
        omega = self.frequencies((num, *batch, num_features), x)
        if omega is None:
            return None
        phase = 2 * math.pi * torch.rand(num, *batch, 1, num_features, dtype=x.dtype, device=x.device)
        weights = torch.randn(num, *batch, num_features, 1, dtype=x.dtype, device=x.device)
        amplitude = math.sqrt(2 / num_features)

        def functions(x: Tensor) -> Tensor:
            # f ≈ √(2k(x, x)/R) Σ_r w_r cos(ω_rᵀx + b_r) (Rahimi and Recht, 2007)
            waves = torch.cos(x @ omega.mT + phase) @ weights
            return amplitude * self.diag(x).sqrt() * waves[..., 0]

        return functions

    def __repr__(self) -> str:
        found: list[str] = []
        for name, argument in signature(type(self)).parameters.items():
            value = getattr(self, name, None)
            if value is not None and (value is not argument.default or name in dict(self.event_dims)):
                is_named = found and argument.default is not argument.empty
                found.append(f"{name}={describe(value)}" if is_named else describe(value))
        return f"{type(self).__name__}({', '.join(found)})"


def describe(value: object) -> str:
    """An argument for ``repr``: the number, the tensor's shape, the network's kind."""
    match value:
        case CovarianceFunction():
            return repr(value)
        case Tensor() if value.dim() or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return f"<{', '.join(map(str, value.shape))}>"
        case Tensor():
            return f"{float(value.detach()):.4g}"
    return getattr(value, "__name__", type(value).__name__) if callable(value) else repr(value)


def positive(value: Scalar, name: str) -> Scalar:
    """``value``, checked to be above zero where that costs nothing: where it is a Python number."""
    if isinstance(value, (int, float)) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


def in_any_dtype(kernel: Any) -> bool:
    """Whether k(x) has the dtype of x, whatever that of hyperparameters: of this library's own classes it is known."""
    # One derived from them may hold a network, which takes inputs of its dtype only (test_float32.py, `Mine`).
    ours = type(kernel).__module__.startswith(f"{__package__}.")
    return ours and type(kernel).any_dtype and all(map(in_any_dtype, kernel.parts))


def hyperparameters(kernel: object) -> str:
    """What numbers a kernel is made of, such as "RBF's lengthscale is nan", for an error."""
    found = []
    for label, value in vars(kernel).items():
        found += [hyperparameters(part) for part in tree_leaves(value) if isinstance(part, CovarianceFunction)]
        if isinstance(value, (float, Tensor)) and not label.startswith("_"):
            ends = (f"{float(end):.3g}" for end in torch.as_tensor(value).detach().aminmax())
            found.append(f"{type(kernel).__name__}'s {label} is {' to '.join(dict.fromkeys(ends))}")
    return ", ".join(filter(None, found))


def white_share(kernel: Any, x: Tensor) -> Tensor:
    """The share of the variance that k(x, x') lacks at x' = x, such as :class:`White`'s, at the first of the rows x."""
    row = x.reshape(-1, x.shape[-1])[:1]
    variance = kernel.diag(row)
    return (variance - kernel(row, row)[..., 0]) / variance
