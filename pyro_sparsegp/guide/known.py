"""What a guide knows: its families and modules, its program's facts, its data."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as _field
from itertools import filterfalse
from typing import Any, Optional, Union

import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroParam
from torch import Tensor

from ..approximations.free import SparseGP
from ..approximations.on_sites import SiteGP
from ..families import ExpectationFamily, Family
from ..gaussians.sites import KeptSites
from ..modules import at_path, path_of
from ..numerics.arguments import refuse
from ..posterior.drawing import OTHER_LATENTS
from ..program.data import NoRelation, Relation, TrainingData
from ..program.explore import ClosedForms
from ..program.handlers import is_blocked
from ..program.structure import Structure
from ..warned import Warned, warn_once
from .points import Points

Families = Union[Family, Mapping[Union[str, tuple[str, ...]], Family]]


@dataclass(frozen=True)
class Coupling:
    """Which latents have one posterior with others: hyperparameters, and the field given these."""

    hyper: tuple[str, ...] = ()  # hyperparameters, jointly normal in unconstrained space
    field: Mapping[str, list[int]] = _field(default_factory=dict)  # members, in order: sizes of blocks of coefficients
    # Of each likelihood of the field, by parameter, the link under which it is affine in it.
    links: Mapping[str, Mapping[str, str]] = _field(default_factory=dict)
    drawn: tuple[str, ...] = ()  # likelihoods that are affine in it under no link: they go by points of the field
    # Of members whose values the program multiplies by exp(bᵀθ): by hyperparameters the slopes b.
    factors: Mapping[str, Mapping[str, list[float]]] = _field(default_factory=dict)
    # Hyperparameters that the field follows, beside its kernels, such as an intercept; of these those that it follows
    # in unconstrained space.
    intercepts: tuple[str, ...] = ()
    unconstrained: tuple[str, ...] = ()
    # By hyperparameters, such as a noise, the slopes b of the logarithm of all data's precision, exp(bᵀθ).
    weights: Mapping[str, list[float]] = _field(default_factory=dict)
    followed: tuple[str, ...] = ()  # a GP site whose q is its family's own, which latents follow
    eliminated: str = ""  # a latent of which each datum has one value, and P no dense matrix
    row_effects: tuple[str, ...] = ()  # latents that have a value for each row


@dataclass
class Core:
    """What a guide has learnt at its first call, or was loaded with; and how far training has got."""

    facts: Structure = _field(default_factory=Structure)  # what is known of the program; nothing, before
    joint: Coupling = _field(default_factory=Coupling)
    sizes: dict[str, int] = _field(default_factory=dict)  # of each observed site, how many values it had; 0 if unknown
    num_nodes: int = 20  # along an axis of quadrature in training, at which sites are read, too
    forms: Optional[ClosedForms] = None  # which are in closed form; learned anew where a state was loaded
    plan: Any = None  # of these and of the kind of posterior, which an objective makes
    data: Optional[TrainingData] = None  # of the last step of training on the rows that it is about
    checked: bool = False  # whether all parameters were seen to train
    registered: list[Tensor] = _field(default_factory=list)  # the model's parameters
    own: dict[str, float] = _field(default_factory=dict)  # those in Pyro's store, with their sums in a state
    moving: dict[str, list[Tensor]] = _field(default_factory=dict)  # those that inputs of GP sites are made of
    versions: list[int] = _field(default_factory=list)  # of these at the last call
    loaded: bool = False  # whether it is from a state, and was not called since
    looks: int = 0  # how often the bound of a joint posterior was evaluated with gradients
    steps: int = 0  # of training
    met: set[Any] = _field(default_factory=set)  # the arguments that are no tensors, of steps
    points: Optional[Points] = None  # in the place of q(θ), until training goes on
    modules: dict[str, Any] = _field(default_factory=dict)  # the variational modules of GP sites


def without(values: Mapping[str, Any], names: Any) -> dict[str, Any]:
    """The values but those with these names."""
    return {name: value for name, value in values.items() if name not in names}


def _require_arguments(model: Callable, families: Mapping[Any, Any], named: Mapping[str, Any], start: object) -> None:
    """Raise if a guide's arguments are none: ``families`` by groups of names, and ``named``, names of sites."""
    blocked = (
        "AutoSparseGP's model is under poutine.block, as a part of AutoGuideList or EasyGuide is. This hides sites "
        f"that GP sites may depend on. Give it the whole model, and SVI this guide alone; {OTHER_LATENTS}."
    )
    kind = f"AutoSparseGP's model must be callable, got {type(model).__name__}"
    refuse({kind: not callable(model), blocked: is_blocked(model)})
    names = list[str]()
    for group, family in families.items():
        names += group
        if not isinstance(family, Family) or not all(isinstance(n, str) and names.count(n) == 1 for n in group):
            raise ValueError(
                "AutoSparseGP's families must be a family, such as SVGP(64) (an instance, not the class), or a mapping "
                "to families from names of GP sites, each name once; the sites of a tuple of names get one posterior. "
                f"Got {', '.join(map(repr, [*group, family]))}"
            )
    words = {f"{what} must be a collection of names, such as ({given!r},)": given for what, given in named.items()}
    faults = {why: isinstance(v, str) or not isinstance(v, (bool, Collection)) for why, v in words.items()}
    kinds = {isinstance(family, ExpectationFamily) for family in families.values()}
    faults[f"AutoSparseGP's families must all be SparseEP or none, got {[*families.values()]}"] = len(kinds) > 1
    where = "init_loc_fn says where the search begins"
    refuse({**faults, f"start must be 'mode' or None, got {start!r}; {where}": start not in ("mode", None)})


class KnownGuide(AutoNormalMessenger):
    """Pyro's mean-field guide, and what it knows of its program and its GP sites."""

    together: Any  # q(θ) of hyperparameters
    field: Any  # q(x) of all that is normal given them
    kind: Any  # of its posterior, of :mod:`.posteriors`
    at_points: Any  # that of draws at weighted points of the hyperparameters

    def __init__(
        self, model: Callable, families: Families, named: Mapping[str, Any], start: Optional[str], **options: Any
    ) -> None:
        by_name: Mapping[Any, Any] = families if isinstance(families, Mapping) else {(): families}
        by_group = {key if isinstance(key, tuple) else (key,): family for key, family in by_name.items()}
        by_expectation = any(isinstance(family, ExpectationFamily) for family in by_group.values())
        points = by_expectation if named["point_estimates"] is None else named["point_estimates"]
        _require_arguments(model, by_group, {**named, "point_estimates": points}, start)
        super().__init__(model, **options)
        self.families, self.by_group = families, by_group
        self.by_name = {name: family for group, family in by_group.items() for name in group}
        self.together_by_name = [group for group in by_group if len(group) > 1]  # GP sites that are to have one
        self.point_estimates: Any = points or ()  # names, or True for all
        self.independent_draws, self.independent = tuple(named["independent_draws"]), named["independent"] or ()
        self.search = start is not None  # whether hyperparameters start at their mode
        self.core = Core()  # what was learnt
        self.run: Any = None  # that it is on
        self.warned: Warned = set()
        self.like = torch.empty(0)  # a tensor of the guide's dtype and device

    @property
    def structure(self) -> Optional[Structure]:
        """What is known of the program, :attr:`facts`; ``None`` before the first call."""
        return self.core.facts if self.core.facts.gps else None

    @property
    def facts(self) -> Structure:
        """What is known of the program; raises before the first call."""
        facts = self.core.facts
        if not facts.gps:
            raise ValueError("the guide has not been called: call it with the data, guide(x, y), or take an SVI step")
        return facts

    @property
    def joint(self) -> Coupling:
        """Which latents have one posterior."""
        return self.core.joint

    def join(self, **parts: Any) -> None:
        """Change which latents have one posterior."""
        self.core.joint = replace(self.core.joint, **parts)

    @property
    def able_to_couple(self) -> list[str]:
        """The latents of all rows, or of rows in the field, with no posterior by an overridden ``get_posterior``."""
        able = without(self.facts.latents, {*self.facts.local_latents} - {*self.joint.row_effects})
        return [name for name, own in able.items() if own.shape is not None]

    def family_of(self, name: str) -> Family:
        """The family of a GP site."""
        family = self.by_name.get(name, self.by_group.get(()))  # () of all
        if family is None:
            raise ValueError(
                f"no family is given for GP site {name!r}; AutoSparseGP's families has {sorted(self.by_name)}. Add "
                f"{{{name!r}: SVGP(64)}}, or give one family for all GP sites."
            )
        return family

    def module_of(self, name: str) -> Any:
        """The variational module of a GP site."""
        modules = self.modules_by_site()
        if name not in modules:
            known = sorted(modules)
            raise ValueError(f"GP site {name!r} was not there when the guide was initialised; it knows {known}")
        return modules[name]

    def modules_by_site(self) -> dict[str, Any]:
        """The variational modules of GP sites."""
        core = self.core
        if not core.modules:
            core.modules.update((name, at_path(self.gps, path_of(name))) for name in core.facts.gps)
        return core.modules

    @property
    def begun_at_data(self) -> dict[str, Any]:
        """The modules of GP sites whose q(w) starts at data."""
        return {n: m for n, m in self.modules_by_site().items() if getattr(self.family_of(n), "start", "") == "data"}

    def site_modules(self) -> dict[str, SiteGP]:
        """The modules of families on sites."""
        return {name: module for name, module in self.modules_by_site().items() if isinstance(module, SiteGP)}

    @property
    def kept_sites(self) -> dict[str, KeptSites]:
        """Where sites are kept as they were read off the model, by GP site."""
        return {name: module.sites for name, module in self.site_modules().items()}

    def corrected_modules(self) -> dict[str, SparseGP]:
        """The modules of kernels whose diagonal depends on the training rows, by GP site."""
        return {name: module for name, module in self.modules_by_site().items() if getattr(module, "num_seen", 0)}

    def is_point(self, name: str) -> bool:
        """Whether a latent is fitted as a point."""
        return self.point_estimates is True or name in self.point_estimates

    def is_independent(self, name: str) -> bool:
        """Whether a latent's posterior is to be independent of all others'."""
        return self.independent is True or name in self.independent

    def may_join(self, name: str) -> bool:
        """Whether a latent's posterior may be one with others'."""
        return not (self.is_point(name) or self.is_independent(name))

    @property
    def has_random_latents(self) -> bool:
        """Whether a latent that is no GP, or a GP site that enters another, is drawn."""
        return bool([*self.facts.inner, *filterfalse(self.is_point, self.facts.latents)])

    def set_latent(self, name: str, loc: Tensor, event_dim: int, scale: Optional[Tensor] = None) -> None:
        """Make the parameters of a latent in unconstrained space: its mean and its deviation, ``init_scale``."""
        path = path_of(name)
        deep_setattr(self, "locs." + path, PyroParam(loc, event_dim=event_dim))
        if not self.is_point(name):
            scale = torch.full_like(loc, self._init_scale) if scale is None else scale
            deep_setattr(self, "scales." + path, PyroParam(scale, constraints.positive, event_dim))

    @property
    def is_about_rows(self) -> bool:
        """Whether what it knows belongs to single rows of the training data."""
        return self.kind.is_of_rows or bool(self.core.facts.local_latents + self.core.facts.classes)

    def is_given(self, name: str, site: dict[str, Any]) -> bool:
        """Whether what a site observes is a hyperparameter's value, as :func:`pyro.condition` gives it, and no data."""
        known = self.core.facts.downstream
        # It stands in no plate, and its density does not move with f.
        return bool(known) and not site["cond_indep_stack"] and name not in known

    def data_for(self, name: str) -> TrainingData:
        """The data of training, which the posterior of a site needs; raise if the guide was loaded without them."""
        data = self.core.data
        if data is None:
            raise ValueError(
                "the guide holds no training data, as when it was loaded from a state without them, and the posterior "
                f"of site {name!r} needs these. Call it with them once, guide(x, y), not under torch.no_grad()."
            )
        if data.overwritten:
            warn_once(
                self.warned,
                "overwritten",
                "",
                f"the training data were changed in place after training, as y.mul_(2.0) does, and the posterior of "
                f"site {name!r} now uses the changed values. Train on copies, y.clone(), or change copies.",
                stacklevel=5,
            )
        return data

    def relation(self, args: tuple, kwargs: dict[str, Any]) -> Relation | type[NoRelation]:
        """What a call's data have to do with the training data; a state may have none."""
        data = self.core.data
        return NoRelation if data is None else Relation(data, (self.model, args, kwargs), torch.is_grad_enabled())

    def forget(self) -> None:
        """Return to the state before the first call."""
        for name in {"gps", "locs", "scales", "together", "field"} & self._modules.keys():
            delattr(self, name)
        self.core = Core()
