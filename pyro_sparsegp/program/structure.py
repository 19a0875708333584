"""What a program is, as a guide's first call finds it: a frozen value, which says how GP sites meet in densities.

>>> print(Structure({"f": GPSite((), 1, Depends.ELEMENTWISE)}, densities={"y": Density("Poisson", ("f",))}))
GP site f: 1 output of 1 column; each density depends on one value.
Observed site y: Poisson of f.
"""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import field as _field
from functools import cached_property
from typing import Any, Optional, get_args, get_type_hints

Pair = tuple[str, str]
MAX_AXES = 2  # of a grid of nodes


class Depends(enum.StrEnum):
    """How the terms of densities depend on the values of a GP site."""

    NONE = "none"
    ELEMENTWISE = "elementwise"  # each term has one value
    DATAWISE = "datawise"  # each term has values of one input, of several outputs
    COUPLED = "coupled"  # a term has values at several inputs, as of a matrix times f

    @property
    def rank(self) -> int:
        """Its place in this order, in which each includes those before."""
        return [*Depends].index(self)


class Role(enum.StrEnum):
    """Of how many rows of the data one value of a latent is, by the plates that enclose both."""

    ALL = "all"
    GROUP = "group"  # in some of the plates of a density, and not all
    ROW = "row"


_ROLES = {Role.ALL: "", Role.GROUP: ", one for each group of rows", Role.ROW: ", one for each row"}
_DEPENDS = {
    Depends.NONE: "no density depends on it",
    Depends.ELEMENTWISE: "each density depends on one value",
    Depends.DATAWISE: "densities depend on several outputs at one input",
    Depends.COUPLED: "densities depend on values at several inputs",
}


def _counted(num: Optional[int], word: str) -> str:
    """A number of things, in words."""
    return f"{num} {word}" if num == 1 else f"{num} {word}s"


@dataclass(frozen=True)
class Group:
    """So many consecutive inputs, such as the patches of an image, whose values one input of a layer above takes."""

    size: int
    layer: str


@dataclass(frozen=True)
class GPSite:
    """A sample site with a Gaussian process."""

    outputs: tuple[int, ...] = ()  # the batch shape: (P,) of P outputs
    columns: Optional[int] = None  # of its inputs, if known
    depends: Depends = Depends.NONE  # how densities do on its values
    is_inner: bool = False  # whether its values enter another GP site, as those of a deep GP's inner layer
    is_quadratic: bool = False  # whether log densities are quadratic in its values, all else held
    group: Optional[Group] = None  # of an inner layer, whose values are coupled within groups alone

    @property
    def is_direct(self) -> bool:
        """Whether log densities are quadratic in its values, and no outputs meet in a term."""
        return self.is_quadratic and self.depends != Depends.DATAWISE

    def __str__(self) -> str:
        num = math.prod(self.outputs)
        words = f"{_counted(num, 'output')} of {_counted(self.columns, 'column')}"
        words += "; it enters another GP site" if self.is_inner else ""
        return f"{words}; {_DEPENDS[self.depends]}{'; log densities are quadratic' if self.is_quadratic else ''}"


@dataclass(frozen=True)
class Latent:
    """A latent site that is no GP, with a value that is not summed out."""

    role: Role = Role.ALL
    plates: Mapping[str, int] = _field(default_factory=dict)  # that enclose it, with their sizes
    shape: Optional[tuple[int, ...]] = None  # in unconstrained space; none where an overridden get_posterior answers
    event_dim: int = 0  # of this

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape or ())

    def __str__(self) -> str:
        plates = " and ".join(f"{name} ({size})" for name, size in self.plates.items())
        return f"{_counted(self.numel, 'number')}{plates and f' in plate {plates}'}{_ROLES[self.role]}"


@dataclass(frozen=True)
class Density:
    """An observed site, or a latent whose prior is made of values of GP sites."""

    distribution: str = ""  # its name, if known
    gps: tuple[str, ...] = ()  # on whose values it depends
    is_observed: bool = True

    def __str__(self) -> str:
        return self.distribution + (f" of {' and '.join(self.gps)}" if self.gps else "")


def _sites(kind: str, are: Callable[[Any], object]) -> cached_property[tuple[str, ...]]:
    """The names of sites of one kind that are so."""
    return cached_property(lambda found: tuple(name for name, own in getattr(found, kind).items() if are(own)))


@dataclass(frozen=True)
class Structure:
    """The sites of a program, by name, and how its densities depend on GP sites' values."""

    gps: Mapping[str, GPSite] = _field(default_factory=dict)
    latents: Mapping[str, Latent] = _field(default_factory=dict)
    densities: Mapping[str, Density] = _field(default_factory=dict)
    discrete: Mapping[str, Role] = _field(default_factory=dict)  # latents that are summed out
    meeting: tuple[Pair, ...] = ()  # pairs of GP sites that meet in a term of a density
    # Pairs of GP sites that enter densities by a sum of them alone, f + cg; or of f and g ~ GP(μ(f), k).
    summed: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        names = [*self.gps, *self.latents, *self.discrete]
        pairs = {*itertools.chain(*self.meeting, *self.summed)}
        groups = [name for name, gp in self.gps.items() if gp.group and not gp.is_inner]
        if len(names) > len({*names}) or groups or not pairs <= self.gps.keys():
            raise ValueError("a latent site is of one kind, pairs are of GP sites, and groups of inner ones")

    def to_json(self) -> str:
        """As text, which :meth:`from_json` reads: what a state holds."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Structure:
        """The structure that :meth:`to_json` wrote."""
        return _built(cls, json.loads(text))

    def __str__(self) -> str:
        lines = [f"GP site {name}: {gp}" for name, gp in self.gps.items()]
        lines += [f"Latent {name}: {latent}" for name, latent in self.latents.items()]
        lines += [f"Discrete latent {name}: summed out{_ROLES[role]}" for name, role in self.discrete.items()]
        lines += [f"Observed site {name}: {own}" for name, own in self.densities.items() if own.is_observed]
        lines += [f"GP sites {f} and {g} meet in a density" for f, g in self.meeting]
        return "\n".join(f"{line}." for line in lines)

    #: The observed sites.
    data = _sites("densities", lambda density: density.is_observed)
    #: The sites whose densities move with a GP site's values.
    downstream = _sites("densities", lambda density: density.gps)
    #: The GP sites whose values enter another.
    inner = _sites("gps", lambda gp: gp.is_inner)
    #: The GP sites whose values at several inputs meet in a term.
    coupled = _sites("gps", lambda gp: gp.depends == Depends.COUPLED)
    #: The latents that have a value for each row, or for groups of rows whose plate holds them.
    local_latents = _sites("latents", lambda latent: latent.role != Role.ALL)
    #: The discrete latents in no plate of the data, such as the classes of known groups.
    classes = _sites("discrete", lambda role: role == Role.ALL)

    # How densities depend on GP sites.

    @property
    def has_outputs_that_meet(self) -> bool:
        """Whether a term of a density has several outputs of one GP site."""
        return any(gp.depends == Depends.DATAWISE for gp in self.gps.values())

    def neighbours(self, name: str) -> set[str]:
        """The GP sites that meet this one in a term of a density."""
        return {other for pair in self.meeting if name in pair for other in pair} - {name}

    def is_alone(self, name: str) -> bool:
        """Whether log densities are quadratic in each value of a GP site, and no other value meets it."""
        return self.gps[name].is_direct and not self.neighbours(name)

    def residuals(self, rows: Mapping[str, int]) -> dict[str, int]:
        """How many standardised residuals GP sites of so many rows have."""
        each = {name: num if name in self.coupled else 1 for name, num in rows.items()}
        return {name: num * math.prod(self.gps[name].outputs) for name, num in each.items()}

    def axes(self, most: float = MAX_AXES) -> dict[str, tuple[int, ...]]:
        """The axes of the product grid on which each GP site is integrated; a site that must be drawn is left out."""
        # Sites that meet in one term of a density (a mean and a log-noise) get axes of their own, sites that never
        # meet share one. An inner layer of a deep GP and values that the model couples across inputs are drawn, and
        # so is a group that would need more axes than ``most``.
        width = {
            name: math.prod(gp.outputs) if gp.depends == Depends.DATAWISE else 1
            for name, gp in self.gps.items()
            if not gp.is_inner and gp.depends != Depends.COUPLED
        }
        meets = {name: self.neighbours(name) & width.keys() for name in width}
        axes: dict[str, tuple[int, ...]] = {}
        for name in width:
            taken = {axis for other in meets[name] for axis in axes.get(other, ())}
            free = (axis for axis in itertools.count() if axis not in taken)
            axes[name] = tuple(itertools.islice(free, width[name]))
        drawn = {name for name, used in axes.items() if max(used) >= most}
        while more := set[str]().union(*(meets[name] for name in drawn)) - drawn:  # a group is drawn as a whole
            drawn |= more
        return {name: used for name, used in axes.items() if name not in drawn}

    # Another run.

    def bent(self, seen: Structure) -> Structure:
        """This structure, of GP sites in whose values densities are quadratic in another run, too."""
        met = {name: own for name, own in seen.gps.items() if own.depends != Depends.NONE}
        bent = {name for name, own in met.items() if not own.is_quadratic}
        return replace(self, gps={**self.gps, **{n: replace(self.gps[n], is_quadratic=False) for n in bent}})

    def lacks(self, seen: Structure) -> list[str]:
        """What a run shows that this structure has not, in words. A batch may show less."""
        differ = sorted(seen.latents.keys() ^ self.latents.keys()) if seen.data == self.data else ()
        why = [f"there is {'no' if name in self.latents else 'a'} latent site {name!r}" for name in differ]
        both = [(repr(name), gp, self.gps.get(name, GPSite())) for name, gp in seen.gps.items()]
        why += [f"{_DEPENDS[gp.depends]} of GP site {n}" for n, gp, own in both if gp.depends.rank > own.depends.rank]
        why += [
            f"values of GP site {name} enter another GP site" for name, gp, own in both if gp.is_inner > own.is_inner
        ]
        return why + [
            f"GP sites {f!r} and {g!r} meet in a density" for f, g in seen.meeting if g not in self.neighbours(f)
        ]

    def has_others(self, seen: Structure) -> list[str]:
        """The observed sites with another distribution in a run, in words."""
        pairs = [(name, own, self.densities.get(name, own)) for name, own in seen.densities.items() if own.is_observed]
        pairs = [(name, own, was) for name, own, was in pairs if was.distribution not in ("", own.distribution)]
        return [f"site {name!r} has a {own.distribution}, and had a {was.distribution}" for name, own, was in pairs]


def _built(kind: Any, value: object) -> Any:
    """A value of a type of this module, of what JSON made of it."""
    first, *more = get_args(kind) or (kind,)
    match value:
        case dict() if kind in (first, Optional[first]):
            return first(**{key: _built(get_type_hints(first)[key], part) for key, part in value.items()})
        case dict():  # a mapping by names
            return {key: _built(more[0], part) for key, part in value.items()}
        case list():
            return tuple(_built(first, part) for part in value)
    return None if value is None else first(value)
