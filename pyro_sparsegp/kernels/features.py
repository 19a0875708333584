"""Kernels with a finite feature map, k(x, x') = φ(x)ᵀφ(x'), such as a network (Zhu, Yuchi and Xie, 2025); white noise.

Sparse families use these features themselves as the basis: inducing points of a kernel of rank R are singular beyond R.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Optional

import torch
from pyro.nn import PyroModule
from torch import Tensor

from ..numerics.arguments import require_codes, require_count
from ..numerics.functions import broadcast_shapes, by_rows, shape_of
from ..numerics.linalg import row_squares, side_by_side
from .algebra import Kernel, Level
from .base import Scalar, as_tensor, per_column, positive, require_one, second

_UNREPEATABLE = "Dropout", "BatchNorm"  # in the names of torch's classes, whatever their number of dimensions


class FeatureKernel(Kernel):
    """A kernel with finitely many features, k(x, x') = φ(x)ᵀφ(x'); your own has ``features(x)``, ``(..., N, R)``."""

    @abstractmethod
    def features(self, x: Tensor) -> Tensor: ...

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        phi = self.features(x)
        return phi @ (phi if z is None else self.features(z)).mT

    def diag(self, x: Tensor) -> Tensor:
        return self.features(x).square().sum(-1)

    def explicit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phi = self.features(x)
        return phi, row_squares(phi) if type(self).diag is FeatureKernel.diag else self.diag(x)


class Linear(FeatureKernel):
    """A linear function through the origin: k = Σ_d v_d x_d x'_d; add :class:`Constant` for an intercept.

    :param variance: v > 0, prior variance of the slopes: a number, ``(..., 1)`` or one per column, ``(..., D)``.
    """

    event_dims = (("variance", 1),)

    def __init__(self, variance: Scalar = 1.0) -> None:
        self.variance = positive(variance, "Linear's variance")

    def features(self, x: Tensor) -> Tensor:
        # φ_d = √v_d x_d
        return x * per_column(self.variance, x, "Linear's variance").sqrt()


class Polynomial(FeatureKernel):
    """Polynomial kernel: k = (xᵀx' + b)^p, with all monomials up to degree p as its features.

    :param degree: p, a whole number of at least 1.
    :param bias: b ≥ 0, ``(...,)``.
    """

    event_dims = (("bias", 0),)

    def __init__(self, degree: int = 2, bias: Scalar = 1.0) -> None:
        require_count(degree, "Polynomial's degree")
        if isinstance(bias, (int, float)) and bias < 0:
            raise ValueError(f"Polynomial's bias must not be negative, got {bias}")
        self.degree, self.bias = degree, bias

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        return (x @ second(x, z).mT + as_tensor(self.bias, x)[..., None, None]) ** self.degree

    def diag(self, x: Tensor) -> Tensor:
        return (x.square().sum(-1) + as_tensor(self.bias, x)[..., None]) ** self.degree

    def features(self, x: Tensor) -> Tensor:
        # (xᵀx' + b)^p = (aᵀa')^p with a = (x, √b); expand the power of the inner product.
        a = side_by_side([x, as_tensor(self.bias, x).sqrt()[..., None, None]])
        columns = []
        for powers in itertools.combinations_with_replacement(range(a.shape[-1]), self.degree):
            # a monomial has the root of its multinomial coefficient, p!/Π_d p_d!
            repeats = math.prod(math.factorial(powers.count(column)) for column in set(powers))
            root = math.sqrt(math.factorial(self.degree) // repeats)
            columns.append(root * functools.reduce(torch.mul, (a[..., i] for i in powers)))
        return torch.stack(columns, -1)


class RandomFourier(FeatureKernel):
    """k = (1/R) Σ_r cos ω_rᵀ(x − x')/ℓ: R random Fourier features of a stationary kernel (Rahimi and Recht, 2007).

    The frequencies are drawn once, outside the model, at unit length scale, and stay fixed:

    >>> frequencies = RandomFourier.draw(RBF, 256, dim=2)
    >>> kernel = RandomFourier(frequencies, lengthscale=0.5)

    :param frequencies: ω, ``(R, D)``.
    :param lengthscale: ℓ > 0: a number, ``(..., 1)`` or one per column, ``(..., D)``.
    """

    event_dims = (("lengthscale", 1),)

    def __init__(self, frequencies: Tensor, lengthscale: Scalar = 1.0) -> None:
        if not isinstance(frequencies, Tensor) or frequencies.dim() != 2:
            raise ValueError("RandomFourier's frequencies must be a tensor (R, D): RandomFourier.draw(RBF, R, D)")
        self.omega = frequencies
        self.lengthscale = positive(lengthscale, "RandomFourier's lengthscale")

    @staticmethod
    def draw(kernel: type, num: int, dim: int, like: Optional[Tensor] = None) -> Tensor:
        """``num`` frequencies, ``(num, dim)``, of a stationary kernel class at unit length scale.

        :raises ValueError: if ``kernel`` is not a kernel class, or has no spectral density.
        """
        known = isinstance(kernel, type) and issubclass(kernel, Kernel)
        omega = kernel().frequencies((num,), torch.empty(1, dim).to(like)) if known else None
        if omega is None:
            raise ValueError(f"RandomFourier.draw needs a class with a spectral density, such as RBF, got {kernel!r}")
        return omega

    def features(self, x: Tensor) -> Tensor:
        length = per_column(self.lengthscale, x, "RandomFourier's lengthscale")
        if (num := self.omega.shape[-1]) != x.shape[-1]:
            raise ValueError(f"RandomFourier's frequencies are for {num} columns, the inputs have {x.shape[-1]}")
        # φ = (cos ωᵀx/ℓ, sin ωᵀx/ℓ)/√R (Rahimi and Recht, 2007)
        angle = (x / length) @ self.omega.to(x).mT
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(self.omega.shape[0])


class White(Level):
    """White noise: k(x, z) = 0 and k(x) = s·I, independent at every row.

    It has no features, so sparse families cannot learn it: its variance enters the bound as a penalty, Σs/(2σ²), and
    the posterior of the other terms is too narrow. Under a guide put such noise into the likelihood, and effects of
    single rows into a plate of latents.
    """

    has_residual = True

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        if z is None:
            return torch.diag_embed(self.diag(x))
        # rows that are equal to others have values of their own
        return x.new_zeros(*broadcast_shapes(self.batch_shape, x.shape[:-2], z.shape[:-2]), x.shape[-2], z.shape[-2])

    def features(self, x: Tensor) -> Tensor:
        # of size 0: all of it is residual
        return x.new_zeros(*broadcast_shapes(self.batch_shape, x.shape[:-2]), x.shape[-2], 0)


class DeepBasis(FeatureKernel):
    """k(x, x') = φ(x)ᵀφ(x') with a network φ, (N, D) to (N, r), and a diagonal that makes the prior variance uniform.

    The variance correction (section 3.3) adds to f, or to the summand or factor that the kernel is, independent values
    of variance c(x) = maxₙ ‖φ(xₙ)‖² − ‖φ(x)‖². By itself, and in a step of training, the maximum is over the rows that
    the kernel is given; in predictions of guides and of :meth:`GaussianProcess.given` over the training inputs and the
    row itself. Without it, training tends to a kernel of rank one and vanishing uncertainty (theorem 1).

    In training the correction is the penalty Σₙ c(xₙ)/(2σ²). Features of a network as torch initialises it have uneven
    norms: at first the penalty outweighs the fit many times, and training shrinks them towards a constant and recovers
    slowly. Small initial features (the last layer times 0.1) help; r > 1 outputs that end in
    ``s * torch.nn.functional.normalize(h, dim=-1)`` with a learned s have c = 0 throughout.

    A model must register the network, ``pyro.module("net", net)``, and builds the kernel in each run. The network is
    evaluated several times a run, in parts: its output must depend on the row alone.

    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh())
    >>> kernel = DeepBasis(network)
    >>> kernel.diag(torch.rand(5, 2)).unique().numel()  # one level for all rows
    1

    :param network: a module, or any callable of tensors, (N, D) to (N, r).
    :param variance_correction: whether k has the diagonal term c.
    :raises ValueError: if the network is not callable, does not give a row of features for each row, or differs from
        call to call: dropout or batch normalisation in training mode, weights from ``PyroSample``.
    """

    any_dtype = False

    def __init__(self, network: Callable[[Tensor], Tensor], variance_correction: bool = True) -> None:
        if not callable(network) or isinstance(network, type):
            raise ValueError(f"DeepBasis's network must be a module or a callable (N, D) -> (N, r), got {network!r}")
        for name, part in getattr(network, "named_modules", tuple)():  # which a plain function has not
            kinds = [cls.__name__ for cls in type(part).__mro__]
            if part.training and any(word in kind for word in _UNREPEATABLE for kind in kinds):
                raise ValueError(
                    f"DeepBasis's network has a {type(part).__name__} in training mode at {name or 'its top'!r}, whose "
                    "output differs from call to call; call network.eval(), or use LayerNorm and weight decay."
                )
            if isinstance(part, PyroModule) and part._pyro_samples:
                raise ValueError(
                    f"DeepBasis's network draws {sorted(part._pyro_samples)} anew at each call, and a kernel calls it "
                    "several times. Draw the weights by pyro.sample in the model and give DeepBasis a function of them."
                )
        self.network, self.variance_correction = network, bool(variance_correction)
        # maxₙ ‖φ(xₙ)‖², None where it is of the rows given; nothing is below 0.
        self.level: Any = None if variance_correction else 0.0

    def features(self, x: Tensor) -> Tensor:
        phi = self.network(x)
        if not isinstance(phi, Tensor) or phi.dim() < 2 or phi.shape[:-1] != x.shape[:-1] or not phi.shape[-1]:
            found = f"shape {tuple(phi.shape)}" if isinstance(phi, Tensor) else type(phi).__name__
            wanted = (*x.shape[:-1], "r")
            raise ValueError(f"DeepBasis's network must give features of shape {wanted}; it returned {found}")
        return phi

    def explicit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phi = self.features(x)
        return phi, self._diagonal(row_squares(phi))

    def _diagonal(self, squares: Tensor) -> Tensor:
        return squares.clamp(min=squares.amax(-1, keepdim=True) if self.level is None else self.level)

    def _squares(self, x: Tensor) -> Tensor:
        return by_rows(lambda rows: (row_squares(self.features(rows)),), x)[0]

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        if z is not None:
            return super().__call__(x, z)
        phi, diagonal = self.explicit(x)
        # ΦΦᵀ + diag(max ‖φ‖² − ‖φ(xₙ)‖²) (section 3.3)
        return phi @ phi.mT + torch.diag_embed(diagonal - row_squares(phi))

    def diag(self, x: Tensor) -> Tensor:
        return self._diagonal(self._squares(x))

    @property
    def has_residual(self) -> bool:
        return self.variance_correction

    @property
    def depends_on_rows(self) -> bool:
        return self.level is None

    def relative_to(self, rows: Tensor) -> DeepBasis:
        if not self.depends_on_rows or not rows.shape[-2]:
            return self
        rows = rows.flatten(0, -2)
        with torch.no_grad():
            largest = self._squares(rows).argmax(-1, keepdim=True)  # stays on the device
        kernel = copy.copy(self)
        # The largest row alone is evaluated with its gradient, which is that of the maximum.
        kernel.level = row_squares(self.features(rows.index_select(0, largest)))[0]
        return kernel


# Of a column of codes: levels of a factor, a random effect for each; outputs, and how they go together.


class CodeKernel(FeatureKernel):
    """A kernel of one column of codes 0, …, C − 1, which inducing inputs keep as they are."""

    codes: ClassVar[str]  # what they are, for errors
    remedy: ClassVar[str]  # for data that have others
    num_codes: int  # C

    def indicators(self, x: Tensor) -> Tensor:
        """[x = c], ``(..., N, C)``."""
        return self.equal(x, torch.arange(self.num_codes, dtype=x.dtype, device=x.device))

    def equal(self, x: Tensor, codes: Tensor) -> Tensor:
        """[x = c] for codes ``(C,)`` or ``(..., 1, C)``."""
        require_one(x, f"{type(self).__name__} reads one column of {self.codes}", f"{type(self).__name__}(...)[2]")
        return x == codes

    def code_columns(self, num: int) -> frozenset[int]:
        return frozenset({0})

    def check_inputs(self, x: Tensor) -> None:
        require_codes(x, self.num_codes, f"{self.codes} in the training inputs' column of {self!r}", self.remedy)


class Categorical(Level, CodeKernel):
    """Independent effects of the levels 0, …, L − 1 of a column, with variance s: k(x, x') = s·[x = x'].

    A random intercept is ``s * Categorical(L)[column]``; ``Categorical(L)[column] * RBF(l)[other]`` is a smooth
    function of the other column for each level. Its features are the L indicators, so that sparse families are exact
    in it. Any other value is a new level: it has the prior's variance, and is equal to itself.

    :param num_levels: L.
    :raises ValueError: if L is no whole number of at least 1.
    """

    columns = None
    has_residual = True  # of a new level
    codes, remedy = "codes", "recode them, or give more levels"

    def __init__(self, num_levels: int, variance: Scalar = 1.0) -> None:
        require_count(num_levels, "Categorical's num_levels")
        super().__init__(variance)
        self.num_levels = self.num_codes = num_levels

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        # a new level is equal to itself only: k(x) has what φφᵀ lacks
        return as_tensor(self.variance, x)[..., None, None] * self.equal(x, second(x, z).mT)

    def features(self, x: Tensor) -> Tensor:
        # √s·[x = c]: all 0 for a new level, whose effect is the residual
        return as_tensor(self.variance, x).sqrt()[..., None, None] * self.indicators(x)


class Coregionalisation(CodeKernel):
    """k(p, p') = (AAᵀ + diag(s²))_pp' for a column of output numbers 0, …, P − 1: low rank plus diagonal.

    Times a kernel of the inputs it is the intrinsic model of coregionalisation, f_p = Σ_q A_pq g_q + s_p h_p with
    independent functions g_q, h_p of that kernel; a sum of such products is the linear model (Journel and Huijbregts,
    1978; Bonilla, Chai and Williams, 2008). A datum is a row, with its output's number in a column; a missing value is
    no row. Its features are A's columns and the indicators, so that sparse families are exact in it alone.

    >>> mixing = torch.tensor([[1.0], [0.5], [-0.5]])
    >>> kernel = Coregionalisation(mixing)[1]
    >>> kernel(torch.tensor([[0.3, 0.0], [0.7, 2.0]]))
    tensor([[ 1.0000, -0.5000],
            [-0.5000,  0.2500]])

    :param mixing: A, ``(..., P, Q)``: a parameter, or sampled, from a start that is not 0.
    :param own: s, ``(..., P)``, standard deviations of what each output has by itself; none by default.
    :raises ValueError: naming the argument, if the shapes do not fit.
    """

    event_dims = (("mixing", 2), ("own", 1))
    codes, remedy = "outputs", "renumber them, or give mixing more rows"

    def __init__(self, mixing: Tensor, own: Optional[Tensor] = None) -> None:
        if not isinstance(mixing, Tensor) or mixing.dim() < 2 or not mixing.numel():
            raise ValueError(f"Coregionalisation's mixing must be a matrix, (P, Q), got {shape_of(mixing)}")
        if own is not None and (not isinstance(own, Tensor) or own.shape[-1:] != mixing.shape[-2:-1]):
            num = mixing.shape[-2]
            raise ValueError(f"Coregionalisation's own must be a number for each of {num} outputs, got {shape_of(own)}")
        self.mixing, self.own, self.num_codes = mixing, own, mixing.shape[-2]

    def features(self, x: Tensor) -> Tensor:
        rows = self.indicators(x).to(x.dtype)
        # Zeros would make an output that does not exist a certainty. (A guide's first call names the number.)
        rows = torch.where(rows.any(-1, keepdim=True), rows, torch.nan)
        # φ(p) = (A_p·, s_p e_p), so that φ(p)ᵀφ(p') = (AAᵀ + diag(s²))_pp'
        shared = rows @ self.mixing.to(x)
        if self.own is None:
            return shared
        return side_by_side([shared, rows * self.own.to(x)[..., None, :]])
