"""Inducing points: the basis of values at inputs Z, in one set or in nested sets (Z, O, …).

Nested sets are the block Cholesky of their union (Shi, Titsias and Mnih, 2020, section 3.1): the first block
whitens f(Z), the second what f(O) adds to it, and so on. That is the Cholesky factor of the union, so one set and
many are the same code, whatever domain each set lives in.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Optional, Union

import torch
from pyro.nn import PyroParam
from torch import Tensor

from ..kernels import Kernel
from ..kernels.base import hyperparameters
from ..numerics.functions import if_known, in_chunks
from ..numerics.linalg import PRECISE, Whitening, default_jitter, side_by_side, solve_lower, whitening
from .base import Basis, CrossFeatures
from .initial import Init, choose_inputs, given_inputs, some_distinct, those
from .variables import InducingVariables, SourceValues, Values, Variables, between, checked, freeze, widened

Inducing = Union[int, Tensor, InducingVariables]

_LAYOUT = ("columns", "width", "of_source", "jitter", "codes", "units")
_WIDENED = 3e-8  # the jitter in float32 where K_uu is found in float64


class InducingFeatures(CrossFeatures):
    """φ(x) = L⁻¹k_uf(x) with LLᵀ = K_uu, for u the union of the sets, a block of φ for each set."""

    def __init__(
        self, kernel: Any, variables: Sequence[Variables], whitened: Whitening, matrix: Optional[Tensor] = None
    ) -> None:
        super().__init__(kernel, tuple(map(attrgetter("size"), variables)))
        self.matrix: Any = matrix  # K_uu
        self.variables, self.factor, self.whitened = list(variables), whitened.factor, whitened
        self.are_values = {*map(type, variables)} == {Values}  # whether u is f(Z)
        self._wide = self._joined = _join(self.variables)
        if self.factor.dtype != getattr(self._joined[0], "z", self.factor).dtype:  # found in float64
            self._wide, self.factor = _join(widened(kernel, self.variables)), self.factor.to(self.z)
        self.anchor = self.factor
        first, *others = self._joined
        if not others and isinstance(first, Values):
            self.places, self.moves = first.z, first.moves

    def anchors_at(self, before: Tensor) -> list[Optional[Tensor]]:
        """A, with Aw the values at former inputs Z₀ of what has the values Lw at Z, of each block."""
        return self._blocks(self.anchor_at(before))

    def anchor_at(self, before: Tensor) -> Tensor:
        """L + (K_{Z₀Z} − K_ZZ)L⁻ᵀ of former inputs Z₀."""
        part: Any = self._joined[0]
        # in the dtype of K_ZZ: the difference is small, and L⁻ᵀ magnifies its rounding
        now, then, here = (type(part)(z.to(self.matrix)) for z in (part.z, before, part.z.clone()))
        cross = between(self.kernel, then, now)
        if self.kernel.has_residual:  # at the same rows, such as White's, which is no value's at others: it stays
            cross = cross + (self.matrix - between(self.kernel, here, now))
        return self.whitened.near(cross, self.matrix).to(self.factor)

    @property
    def z(self) -> Tensor:
        """Z, ``(M, D)``, where u is f(Z)."""
        return self._joined[0].z  # type: ignore[union-attr]

    def __call__(self, x: Tensor) -> list[Tensor]:
        is_own = self.are_values and self.places is x
        if is_own and self.cross is self.kernel:
            return [self.factor]  # K_ZZ L⁻ᵀ = L, but for the jitter
        # K_fu, (..., N, M); of a summand at Z itself with a diagonal term that it may have
        from_x = methodcaller("cross", self.cross, x.to(self.whitened.factor.dtype))
        ask = methodcaller("covariance", self.cross) if is_own else from_x
        cross = side_by_side([checked(ask(part), part, "cross", x.shape[-2]) for part in self._wide])
        phi = self.whitened(cross).to(x.dtype)
        return [phi] if len(self.sizes) == 1 else list(phi.split(self.sizes, -1))

    @functools.cached_property
    def ones(self) -> Any:
        return self.factor.new_ones(sum(self.sizes)) if self.are_values else None

    def prior_functions(self, num: int, num_features: int, x: Tensor) -> Optional[tuple[Callable, list[Tensor]]]:
        def with_coefficients(draw: Callable) -> tuple[Callable, list[Tensor]]:
            values = in_chunks(draw, self.z, num * num_features)
            # w' = L⁻¹f(Z)
            return draw, list(solve_lower(self.factor, values[..., None])[..., 0].split(self.sizes, -1))

        draw = self.kernel.prior_functions(num, num_features, x) if self.are_values else None
        return if_known(with_coefficients, draw)


class InducingPoints(Basis):
    """A basis of one or several sets of inducing variables: values of f, of its source, or a user's own."""

    def __init__(
        self,
        sets: Sequence[Union[Tensor, InducingVariables]],  # inputs are (M_b, D), or as the next arguments tell
        trainable: bool = True,
        columns: Optional[list[int]] = None,  # of D, those that the kernel reads, where inputs have no others
        width: Optional[int] = None,  # D
        of_source: Optional[list[bool]] = None,  # for each set, whether its inputs are those of the kernel's source
        # Relative, of K_uu, where the process has none of its own. It stays when the dtype changes, since it is part of
        # what w means: L depends on it.
        jitter: Optional[float] = None,
        codes: Collection[int] = (),  # columns, of D, in which trainable inputs stay as they are: they name something
        # Of the D columns: an optimiser moves a parameter by some rate a step, whatever the range of x.
        units: Optional[list[float]] = None,
    ) -> None:
        super().__init__()
        self.sizes = tuple([z.shape[-2] if isinstance(z, Tensor) else z.size for z in sets])
        self.trainable, self.jitter, self.columns, self.units = trainable, jitter, columns, units
        self.of_source = of_source or [False] * len(sets)
        self.codes = tuple(sorted(codes))
        first = next((z for z in sets if isinstance(z, Tensor)), torch.empty(0))
        self.width = width or first.shape[-1]
        own = columns or range(self.width)
        # On the inputs' device, so that a step copies nothing there.
        self._keep("column_index", self.columns, first, torch.int64)
        self._keep("held", [i in self.codes for i in range(self.width)], first, torch.bool)
        self._keep("unit", units and [units[c] for c in own], first, first.dtype)
        self._of_f = [isinstance(z, Tensor) and not other for z, other in zip(sets, self.of_source)]  # f(Z)
        for i, z in enumerate(sets):
            if isinstance(z, InducingVariables):
                setattr(self, f"variables_{i}", z)
            else:
                setattr(self, f"inputs_{i}", PyroParam(self._in_units(i, z.detach().clone(), torch.div)))
        if not trainable:
            freeze(self)

    def _in_units(self, i: int, z: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        # A set's inputs, divided by their units or multiplied.
        return change(z, self.unit) if self._of_f[i] and self.unit is not None else z

    def _keep(self, name: str, values: object, like: Tensor, dtype: torch.dtype) -> None:
        self.register_buffer(name, None if values is None else torch.tensor(values).to(like.device, dtype), False)

    @classmethod
    def chosen(
        cls,
        kernel: Any,
        x: Tensor,
        sets: Sequence[Inducing],
        init: Init,
        name: str,
        trainable: bool = True,
        columns: Optional[Sequence[int]] = None,
    ) -> InducingPoints:
        """The sets as a guide's first call starts them: counts are chosen among the inputs, the rest is as given."""
        width, source = x.shape[-1], kernel.source
        domain, rows = kernel, x
        if source is not None:
            some = x.detach().flatten(0, -2)
            some = some[torch.randperm(len(some), device=x.device)[:1000]]
            # Those that f reads at some random rows of x: an empty patch counts once.
            domain, rows, columns = source, some_distinct(kernel.source_inputs(some).flatten(0, -2), 100_000), None
        counts = [num for num in sets if not isinstance(num, (Tensor, InducingVariables))]
        chosen = iter(choose_inputs(domain, rows, counts, init, name, columns))
        widths = {width, rows.shape[-1], len(columns or range(width))}
        found: list[Any] = []
        for z in sets:
            if isinstance(z, InducingVariables):
                found.append(_own(z, x))
                continue
            z = given_inputs(z, x, name, widths) if isinstance(z, Tensor) else next(chosen)
            found.append(those(z, columns) if columns is not None and z.shape[-1] == width else z)
        of_source = [source is not None and not (isinstance(z, Tensor) and z.shape[-1] == width) for z in sets]
        units = _units(x, found) if trainable else None
        own = if_known(list, columns)
        basis = cls(found, trainable, own, width, of_source, None, kernel.code_columns(width), units)
        # The jitter biases the bound, so it is as small as the dtype lets it be: rounding of K_fu grows with its
        # inverse root (tests/benchmarks/jitter.md).
        variables = basis.variables()
        basis.jitter = default_jitter(x.dtype) if widened(kernel, variables) is variables else _WIDENED
        return basis

    @torch.no_grad()
    def leave_units(self) -> None:
        """Train inducing inputs in units of 1, for inputs whose range changes, such as a network's outputs."""
        for i, given in enumerate(self.inputs):
            if isinstance(given, Tensor):
                getattr(self, f"inputs_{i}").copy_(given)
        self.units = self.unit = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        # Inputs that were learned can be held from here on, and the other way round.
        held, learned = "", "_unconstrained"
        there, here = (held, learned) if self.trainable else (learned, held)
        renamed = {f"{prefix}inputs_{i}{there}": f"{prefix}inputs_{i}{here}" for i in range(len(self.sizes))}
        for name in renamed.keys() & state_dict.keys():
            state_dict[renamed[name]] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def split(self, num: int) -> tuple[InducingPoints, InducingPoints]:
        """The first ``num`` sets and the others, as bases of their own."""

        def part(sets: slice) -> InducingPoints:
            layout = self._layout() | {"of_source": self.of_source[sets]}
            return InducingPoints(self.inputs[sets], self.trainable, **layout)

        return part(slice(None, num)), part(slice(num, None))

    def _layout(self) -> dict[str, Any]:
        # What its inputs are but for their values, as the arguments of a new one.
        return {name: getattr(self, name) for name in _LAYOUT}

    @property
    def inputs(self) -> list[Any]:
        """The inducing inputs, a tensor for each set, or its :class:`InducingVariables`."""
        found = []
        for i in range(len(self.sizes)):
            z = getattr(self, f"inputs_{i}", None)
            found.append(getattr(self, f"variables_{i}") if z is None else self._in_units(i, z, torch.mul))
        return found

    def variables(self) -> list[Variables]:
        """The sets."""
        found: list[Variables] = []
        for z, is_of_f in zip(self.inputs, self._of_f):
            if not is_of_f:
                found.append(SourceValues(z, self.trainable) if isinstance(z, Tensor) else z)
                continue
            if z.shape[-1] != self.width:  # the kernel never reads the other columns: what stands there is no matter
                z = z.new_zeros(len(z), self.width).index_copy(1, self.column_index, z)
            found.append(Values(torch.where(self.held, z.detach(), z) if self.codes else z, self.trainable))
        return found

    def forward(self, kernel: Kernel, jitter: Optional[float], name: str) -> InducingFeatures:
        if any(self.of_source) and kernel.source is None:
            raise ValueError(f"the kernel of site {name!r}, {kernel!r}, has no source, but had in the first call")
        return features_of(kernel, self.variables(), self.jitter if jitter is None else jitter, name)

    def spec(self) -> dict[str, Any]:
        shapes = [list(z.shape) if isinstance(z, Tensor) else None for z in self.inputs]
        return {"kind": "inducing", "shapes": shapes, **self._layout()}

    @classmethod
    def rebuilt(
        cls, spec: dict[str, Any], like: Tensor, trainable: bool, sets: Sequence[Optional[Inducing]]
    ) -> InducingPoints:
        """A basis of the shapes of ``spec``, its values still to be loaded."""
        empty: list[Any] = [
            _own(given, like) if isinstance(given, InducingVariables) else like.new_zeros(shape)
            for given, shape in zip(sets, spec["shapes"])
        ]
        # Older states have no codes and no units; those without a jitter had that of their dtype.
        layout: dict[str, Any] = {name: spec.get(name) for name in _LAYOUT}
        layout |= {"codes": spec.get("codes", ()), "jitter": spec.get("jitter", default_jitter(like.dtype))}
        return cls(empty, trainable, **layout)


def _units(x: Tensor, sets: Sequence[Any]) -> Optional[list[float]]:
    # Of columns of x, and of inducing inputs beside it, whose range is at most a half, the power of two from it on; 1
    # of others; None if of all.
    beside = [z for z in sets if isinstance(z, Tensor) and z.shape[-1] == x.shape[-1]]
    rows = torch.cat([x.detach().flatten(0, -2), *beside]).double()
    least, largest = rows.amin(0), rows.amax(0)
    wide = (largest - least) > 1e3 * torch.finfo(x.dtype).eps * torch.maximum(least.abs(), largest.abs())
    exponents = torch.where(wide, (largest - least).log2().ceil(), 0.0).clamp(max=0.0)
    return torch.exp2(exponents).tolist() if (exponents < 0).any() else None


def features_of(kernel: Kernel, variables: list[Variables], jitter: Optional[float], name: str) -> InducingFeatures:
    """φ of inducing variables under a kernel; the jitter of K_uu is relative."""
    # Φ = K_fu L⁻ᵀ magnifies the rounding of K_uu by its condition number, that of K_fu by the root of it only.
    exact = widened(kernel, variables)
    # In predictions Φ is found in float64, too: rounding that L⁻¹ magnifies would be variance of draws, of which the
    # residual's is then below 0 (test_joint_draws_are_as_wide_as_their_marginals).
    dtype = None if exact is variables or PRECISE.get() else variables[0].z.dtype  # type: ignore[attr-defined]
    sets = _join(exact)
    lower = [[between(kernel, one, other) for other in sets[: i + 1]] for i, one in enumerate(sets)]
    rows = [[*own, *(below[i].mT for below in lower[i + 1 :])] for i, own in enumerate(lower)]
    whole = side_by_side([side_by_side(row).mT for row in rows]).mT
    scale = whole.detach().diagonal(dim1=-2, dim2=-1)[..., : exact[0].size].mean(-1)  # of the first set for all
    what = f"{'K_ZZ' if {*map(type, sets)} == {Values} else 'K_uu'} of site {name!r}"
    whitened = whitening(whole, jitter, what, scale, functools.partial(hyperparameters, kernel), dtype)
    return InducingFeatures(kernel, variables, whitened, whole)


def _own(given: InducingVariables, like: Tensor) -> InducingVariables:
    # A guide's own copy, with the dtype and device of like.
    return copy.deepcopy(given).to(dtype=like.dtype, device=like.device)


def _join(variables: Sequence[Variables]) -> list[Variables]:
    # The sets, those next to each other and of one domain as one: fewer and larger kernel matrices.
    found: list[Any] = []
    for part in variables:
        if found and isinstance(part, Values) and type(part) is type(found[-1]):
            part = type(part)(torch.cat([found.pop().z, part.z]), part.moves)
        found.append(part)
    return found
