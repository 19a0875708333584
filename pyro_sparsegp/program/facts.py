"""What is known of a program: its sites, and how its densities depend on GP sites' values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as _field
from functools import cached_property
from typing import Any

from .dependence import COUPLED, DATAWISE
from .traces import bare

MAX_AXES = 2  # of a grid of nodes


@dataclass
class Structure:
    """What the guide found out about the model at its first call, in plain Python: it travels in the state dict."""

    gps: dict[str, dict[str, Any]] = _field(default_factory=dict)  # for each GP site, the shapes of its module
    latents: dict[str, dict[str, Any]] = _field(default_factory=dict)  # event dimensions, shape, plates with sizes
    rows: dict[str, int] = _field(default_factory=dict)  # for each observed site, how many values it had
    data_plates: list[str] = _field(default_factory=list)  # that enclose an observed site
    # Latents of which several data have one: some of the data's plates enclose them, and not all.
    grouped: list[str] = _field(default_factory=list)
    dependence: dict[str, str] = _field(default_factory=dict)  # how densities downstream depend on each GP site
    inner: list[str] = _field(default_factory=list)  # GP sites whose values enter another, as a deep GP's inner layers
    # Of those whose values a layer above couples in groups of consecutive inputs (the patches of an image), how many
    # make a group, and that layer.
    groups: dict[str, tuple[int, str]] = _field(default_factory=dict)
    interactions: list[list[str]] = _field(default_factory=list)  # pairs of GP sites that meet in a term of a density
    crossed: list[list[str]] = _field(default_factory=list)  # those of one posterior, at different inputs or outputs
    # Pairs of GP sites of separate posteriors that enter densities by a sum of them alone, f + cg.
    summed: list[list[str]] = _field(default_factory=list)
    downstream: list[str] = _field(default_factory=list)  # sites whose densities move with a GP site's values
    quadratic: list[str] = _field(default_factory=list)  # GP sites on sites in whose values densities are quadratic
    columns: dict[str, int] = _field(default_factory=dict)  # of each GP site's inputs
    joint: list[list[str]] = _field(default_factory=list)  # groups of GP sites that have one posterior
    enumerated: list[str] = _field(default_factory=list)  # discrete latents, which are summed out
    coupled: list[str] = _field(default_factory=list)  # latents that have one posterior, of hyperparameters
    field: dict[str, list[int]] = _field(default_factory=dict)  # its members, in order: sizes of blocks of coefficients
    # Of each likelihood of a field, by parameter, the link under which it is affine in it.
    links: dict[str, dict[str, str]] = _field(default_factory=dict)
    # Of members of a field whose values hyperparameters multiply in the program, by exp(bᵀθ): b.
    factors: dict[str, dict[str, list[float]]] = _field(default_factory=dict)
    # Hyperparameters that the field follows, beside its kernels, such as an intercept: by their values, or in
    # unconstrained space.
    intercepts: list[str] = _field(default_factory=list)
    unconstrained: list[str] = _field(default_factory=list)
    owned: list[str] = _field(default_factory=list)  # latents of the field of which each datum has one value
    num_nodes: int = 20  # along an axis of quadrature in training, at which sites are read, too

    @property
    def follows_networks(self) -> bool:
        """Whether natural steps of any GP site follow a network, at rows that are kept."""
        return any("kept_rows" in spec for spec in self.gps.values())

    @cached_property
    def local_latents(self) -> list[str]:
        """The latents that have a value for each row."""
        return [name for name, latent in self.latents.items() if latent["plates"].keys() & self.data_plates]

    @property
    def able_to_couple(self) -> list[str]:
        """The latents whose posterior may be joint with others', in the order of the first call: those that have one
        value for all rows, and no posterior of their own by an overridden ``get_posterior``.
        """
        return [n for n, own in self.latents.items() if own["shape"] is not None and n not in self.local_latents]

    def neighbours(self, name: str) -> set[str]:
        """The GP sites that meet this one in a term of a density."""
        return {other for pair in self.interactions if name in pair for other in pair} - {name}

    def is_direct(self, name: str) -> bool:
        """Whether log densities are quadratic in a GP site's values, and no outputs meet in a term."""
        return name in self.quadratic and self.dependence[name] != DATAWISE

    def is_alone(self, name: str) -> bool:
        """Whether, besides, no other GP site meets it."""
        return self.is_direct(name) and not self.neighbours(name)

    def group(self, name: str) -> list[str]:
        """The GP sites that have one posterior with this one, and itself."""
        return next((group for group in self.joint if name in group), [name])

    def axes(self, most: float = MAX_AXES) -> dict[str, tuple[int, ...]]:
        """The axes of the product grid on which each GP site is integrated; a site that must be drawn is left out.

        Sites that meet in one term of a density (a mean and a log-noise) get axes of their own, sites that never
        meet share one. An inner layer of a deep GP and values that the model couples across inputs are drawn, and
        so is a group that would need more axes than ``most``. Sites of one posterior have an axis each.
        """
        width = {
            name: math.prod(self.gps[name]["batch_shape"]) if kind == DATAWISE else 1
            for name, kind in self.dependence.items()
            if name not in self.inner and kind != COUPLED
        }
        together = [set(group) & width.keys() for group in (*self.interactions, *self.joint)]
        meets = {name: set[str]().union(*(group for group in together if name in group)) - {name} for name in width}
        axes: dict[str, tuple[int, ...]] = {}
        for name in width:
            taken = {axis for other in meets[name] for axis in axes.get(other, ())}
            free = (axis for axis in itertools.count() if axis not in taken)
            axes[name] = tuple(itertools.islice(free, width[name]))
        drawn = {name for name, used in axes.items() if max(used) >= most}
        while more := set[str]().union(*(meets[name] for name in drawn)) - drawn:  # a group is drawn as a whole
            drawn |= more
        return {name: used for name, used in axes.items() if name not in drawn}


@dataclass(frozen=True)
class ClosedForms:
    """Which densities have their expectation in closed form, and what is left without them; for one program."""

    rows: tuple[str, ...]  # sites that know E log p over a parameter: an affine function of the values of one row
    functions: tuple[str, ...]  # those whose parameter is one of values at several inputs
    of_rows: Structure  # how the parameters of ``rows`` depend on GP sites' values
    gps: tuple[str, ...]  # the GP sites that these sites' densities depend on
    rest: Structure  # how all other densities do
    kinds: dict[str, type]  # of the distributions of sites in closed form
    unused: dict[str, Any]  # those of sites whose distribution brings an expectation that can't be used

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """All whose expectation is in closed form."""
        return self.rows + self.functions

    @cached_property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """The axes of what is left."""
        return self.rest.axes()

    @cached_property
    def num_axes(self) -> int:
        """How many these are."""
        return 1 + max(itertools.chain(*self.axes.values()), default=-1)

    @cached_property
    def drawn(self) -> list[str]:
        """GP sites that would take more axes."""
        without = {*self.axes, *self.rest.inner}
        return [name for name, kind in self.rest.dependence.items() if kind != COUPLED and name not in without]

    @cached_property
    def brought(self) -> bool:
        """Whether distributions of a user's bring any of them."""
        return any(hasattr(kind, "normal_parameter") for kind in self.kinds.values())

    def hold(self, nodes: Mapping[str, Any]) -> bool:
        """Whether a run's sites have distributions of the kinds that were found."""
        return self.kinds == {name: type(bare(nodes[name]["fn"])) for name in self.kinds if name in nodes}
