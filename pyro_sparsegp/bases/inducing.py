"""Inducing points: the basis of values at inputs Z, in one set or in nested sets (Z, O, …).

Nested sets are the block Cholesky of their union (Shi, Titsias and Mnih, 2020, section 3.1): the first block
whitens f(Z), the second what f(O) adds to it, and so on. That is the Cholesky factor of the union, so one set and
many are the same code, whatever domain each set lives in.
"""

from __future__ import annotations

import copy
import functools
import itertools
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

_LAYOUT = ("columns", "width", "jitter", "codes", "units")
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
        is_own = self.places is x
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
        sets: Sequence[Union[Tensor, Variables]],  # a tensor is inputs of f, (M_b, D), or as the next arguments tell
        trainable: bool = True,
        columns: Optional[list[int]] = None,  # of D, those that the kernel reads, where inputs have no others
        width: Optional[int] = None,  # D
        # Relative, of K_uu, where the process has none of its own. It stays when the dtype changes, since it is part of
        # what w means: L depends on it.
        jitter: Optional[float] = None,
        codes: Collection[int] = (),  # columns, of D, in which trainable inputs stay as they are: they name something
        # Of the D columns: an optimiser moves a parameter by some rate a step, whatever the range of x.
        units: Optional[list[float]] = None,
    ) -> None:
        super().__init__()
        parts: list[Any] = [Values(z) if isinstance(z, Tensor) else z for z in sets]
        self.kinds, self.sizes = tuple(map(type, parts)), tuple([part.size for part in parts])
        self.trainable, self.jitter, self.columns, self.units = trainable, jitter, columns, units
        self.codes = tuple(sorted(codes))
        first = next((part.z for part in parts if isinstance(part, Values)), torch.empty(0))
        self.width = width or first.shape[-1]
        own = columns or range(self.width)
        # On the inputs' device, so that a step copies nothing there.
        self._keep("column_index", self.columns, first, torch.int64)
        self._keep("held", [i in self.codes for i in range(self.width)], first, torch.bool)
        self._keep("unit", units and [units[c] for c in own], first, first.dtype)
        self.names: list[str] = []
        for i, part in enumerate(parts):
            name, kept = f"variables_{i}", part
            if isinstance(part, Values):
                name, kept = f"inputs_{i}", PyroParam(self._in_units(type(part), part.z.detach().clone(), torch.div))
            setattr(self, name, kept)
            self.names.append(name)
        if not trainable:
            freeze(self)

    def _in_units(self, kind: type, z: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
        # A set's inputs, divided by their units or multiplied.
        return change(z, self.unit) if kind is Values and self.unit is not None else z

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
        domain, rows, kind = kernel, x, Values
        if source is not None:
            some = x.detach().flatten(0, -2)
            some = some[torch.randperm(len(some), device=x.device)[:1000]]
            # Those that f reads at some random rows of x: an empty patch counts once.
            domain, rows = source, some_distinct(kernel.source_inputs(some).flatten(0, -2), 100_000)
            columns, kind = None, SourceValues
        counts = [num for num in sets if not isinstance(num, (Tensor, InducingVariables))]
        chosen = iter(choose_inputs(domain, rows, counts, init, name, columns))
        widths = {width, rows.shape[-1], len(columns or range(width))}
        found: list[Variables] = []
        for given in sets:
            if isinstance(given, InducingVariables):
                found.append(_own(given, x))
            elif isinstance(given, Tensor):
                z = given_inputs(given, x, name, widths)
                found.append((Values if z.shape[-1] == width else kind)(those(z, columns)))
            else:
                found.append(kind(those(next(chosen), columns)))
        units = _units(x, found) if trainable else None
        basis = cls(found, trainable, if_known(list, columns), width, None, kernel.code_columns(width), units)
        # The jitter biases the bound, so it is as small as the dtype lets it be: rounding of K_fu grows with its
        # inverse root (tests/benchmarks/jitter.md).
        variables = basis.variables()
        basis.jitter = default_jitter(x.dtype) if widened(kernel, variables) is variables else _WIDENED
        return basis

    @torch.no_grad()
    def leave_units(self) -> None:
        """Train inducing inputs in units of 1, for inputs whose range changes, such as a network's outputs."""
        for name, given in zip(self.names, self.inputs):
            if isinstance(given, Tensor):
                getattr(self, name).copy_(given)
        self.units = self.unit = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        # Inputs that were learned can be held from here on, and the other way round.
        held, learned = "", "_unconstrained"
        there, here = (held, learned) if self.trainable else (learned, held)
        renamed = {f"{prefix}{name}{there}": f"{prefix}{name}{here}" for name in self.names}
        for name in renamed.keys() & state_dict.keys():
            state_dict[renamed[name]] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def split(self, num: int) -> tuple[InducingPoints, InducingPoints]:
        """The first ``num`` sets and the others, as bases of their own."""

        def part(sets: slice) -> InducingPoints:
            return InducingPoints(self._parts()[sets], self.trainable, **self._layout())

        return part(slice(None, num)), part(slice(num, None))

    def _layout(self) -> dict[str, Any]:
        # What its inputs are but for their values, as the arguments of a new one.
        return {name: getattr(self, name) for name in _LAYOUT}

    @property
    def inputs(self) -> list[Any]:
        """The inducing inputs, a tensor for each set, or its :class:`InducingVariables`."""
        return [self._in_units(kind, getattr(self, n), torch.mul) for n, kind in zip(self.names, self.kinds)]

    def variables(self) -> list[Variables]:
        """The sets."""
        return [self._whole(part.z) if type(part) is Values else part for part in self._parts()]

    def _parts(self) -> list[Any]:
        # The sets, with inputs as they are kept.
        pairs = zip(self.kinds, self.inputs)
        return [kind(z, self.trainable) if issubclass(kind, Values) else z for kind, z in pairs]

    def _whole(self, z: Tensor) -> Values:
        # f's values at inputs of all columns.
        if z.shape[-1] != self.width:  # the kernel never reads the other columns: what stands there is no matter
            z = z.new_zeros(len(z), self.width).index_copy(1, self.column_index, z)
        return Values(torch.where(self.held, z.detach(), z) if self.codes else z, self.trainable)

    def forward(self, kernel: Kernel, jitter: Optional[float], name: str) -> InducingFeatures:
        if SourceValues in self.kinds and kernel.source is None:
            raise ValueError(f"the kernel of site {name!r}, {kernel!r}, has no source, but had in the first call")
        return features_of(kernel, self.variables(), self.jitter if jitter is None else jitter, name)

    def spec(self) -> dict[str, Any]:
        shapes = [list(z.shape) if isinstance(z, Tensor) else None for z in self.inputs]
        of_source = [kind is SourceValues for kind in self.kinds]
        return {"kind": "inducing", "shapes": shapes, "of_source": of_source, **self._layout()}

    @classmethod
    def rebuilt(
        cls, spec: dict[str, Any], like: Tensor, trainable: bool, sets: Sequence[Optional[Inducing]]
    ) -> InducingPoints:
        """A basis of the shapes of ``spec``, its values still to be loaded."""
        empty = [
            _own(given, like)
            if isinstance(given, InducingVariables)
            else (Values, SourceValues)[is_of_source](like.new_zeros(shape))
            for given, shape, is_of_source in zip(sets, spec["shapes"], spec.get("of_source", itertools.repeat(False)))
        ]
        # Older states have fewer of these; those without a jitter had that of their dtype.
        layout: dict[str, Any] = {name: spec.get(name) for name in _LAYOUT}
        layout |= {"codes": spec.get("codes", ()), "jitter": spec.get("jitter", default_jitter(like.dtype))}
        return cls(empty, trainable, **layout)


def _units(x: Tensor, sets: Sequence[Any]) -> Optional[list[float]]:
    # Of columns of x, and of inducing inputs beside it, whose range is at most a half, the power of two from it on; 1
    # of others; None if of all.
    beside = [part.z for part in sets if isinstance(part, Values) and part.z.shape[-1] == x.shape[-1]]
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
