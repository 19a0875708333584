"""Inducing variables: what u is, in terms of f. Values of f, of a process f is made of, or a user's own functionals.

All that a basis needs of them are covariances, K_uu and K_fu (van der Wilk et al., 2020, section 3).
"""

from abc import abstractmethod
from operator import attrgetter
from typing import Any, Union

from torch import Tensor, nn

from ..kernels import Kernel
from ..kernels.base import in_any_dtype
from ..modules import AbstractModule
from ..numerics.linalg import wider


class InducingVariables(AbstractModule):
    """M linear functionals u of f in another domain: Fourier coefficients, integrals, derivatives, other sensors.

    Subclass it, say what K_uu and K_fu are, and give an object as ``inducing`` (or ``orthogonal``) to any family on
    inducing points. It is a Pyro module. Each guide trains the parameters of its own copy,
    ``guide.gps.f.basis.variables_0``.

    >>> import torch
    >>> from pyro_sparsegp import bases
    >>> class Averages(bases.InducingVariables):
    ...     '''u_m = (f(a_m) + f(b_m))/2.'''
    ...
    ...     def __init__(self, a, b):
    ...         super().__init__()
    ...         self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)
    ...
    ...     @property
    ...     def size(self):
    ...         return len(self.a)
    ...
    ...     def covariance(self, kernel):
    ...         return (self.cross(kernel, self.a) + self.cross(kernel, self.b)) / 2
    ...
    ...     def cross(self, kernel, x):
    ...         return (kernel(x, self.a) + kernel(x, self.b)) / 2
    >>> u = Averages(torch.zeros(3, 1), torch.linspace(0, 1, 3)[:, None])
    >>> u.covariance(RBF(1.0)).shape
    torch.Size([3, 3])
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """M."""

    def describe(self) -> str:
        """What a saved state must agree on: the class, M, and the other constants of u."""
        return f"{type(self).__name__}({self.size})"

    @abstractmethod
    def covariance(self, kernel: Kernel) -> Tensor:
        """K_uu, ``(..., M, M)``, under the prior's kernel."""

    @abstractmethod
    def cross(self, kernel: Kernel, x: Tensor) -> Tensor:
        """K_fu, the covariance of f(xₙ) with u_m, ``(..., N, M)``."""


class Values:
    """u = f(Z), for inputs Z, ``(M, D)``, which may be learned."""

    def __init__(self, z: Tensor, moves: bool = False) -> None:
        self.z, self.size, self.moves = z, z.shape[-2], moves

    of: Any = staticmethod(lambda kernel: kernel)  # the kernel of the function whose values they are

    def covariance(self, kernel: Kernel) -> Tensor:
        return self.of(kernel)(self.z)

    def cross(self, kernel: Kernel, x: Tensor) -> Tensor:
        return kernel(x, self.z)


class SourceValues(Values):
    """u = g(Z), for inputs of g, ``(M, d)``, where f(x) = Σ_p w_p g(x_p), such as the response to image patches."""

    of = staticmethod(attrgetter("source"))

    def cross(self, kernel: Any, x: Tensor) -> Tensor:
        return kernel.from_source(x, self.z)


Variables = Union[InducingVariables, Values]  # a set of inducing variables


def widened(kernel: Kernel, variables: list[Any]) -> list[Any]:
    """The sets with inputs in float64, where these are float32 and all kernels follow; otherwise the same list."""
    narrow = [part for part in variables if isinstance(part, Values) and wider(part.z) != part.z.dtype]
    if len(narrow) < len(variables) or not all(in_any_dtype(part.of(kernel)) for part in narrow):
        return variables
    return [type(part)(part.z.to(wider(part.z)), part.moves) for part in variables]


def checked(value: Tensor, part: Variables, method: str, rows: int) -> Tensor:
    """``value`` if it is ``(..., rows, M)``; refused, with the class and method that gave it, if not."""
    if value.dim() < 2 or value.shape[-2:] != (rows, part.size):
        name, found, wanted = type(part).__name__, tuple(value.shape), f"(..., {rows}, {part.size})"
        raise ValueError(f"{name}.{method} returned the shape {found}, expected {wanted}: its size is {part.size}")
    return value


def freeze(module: nn.Module) -> None:
    """Make a module's parameters buffers: they stay as they are."""
    for part in module.modules():
        for name in [name.removesuffix("_unconstrained") for name in part._parameters]:  # as Pyro has a PyroParam
            value = getattr(part, name).detach().clone()
            delattr(part, name)
            part.register_buffer(name, value)


def between(kernel: Kernel, first: Variables, second: Variables) -> Tensor:
    """The covariance of two sets of inducing variables, ``(..., M, M')``, or of one with itself."""
    if first is second:
        return checked(first.covariance(kernel), first, "covariance", first.size)
    if type(first) is Values:
        return second.cross(kernel, first.z)
    if type(second) is Values:
        return first.cross(kernel, second.z).mT
    if isinstance(first, SourceValues) and isinstance(second, SourceValues):
        return kernel.source(first.z, second.z)
    one, other = type(first).__name__, type(second).__name__
    raise ValueError(f"the covariance of {one} with {other} is not known: of several sets, all but one must be inputs")
