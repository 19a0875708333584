"""What a first run says of a program's latents: which are normal and which hyperparameters, at so many rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Optional

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..approximations.on_sites import ExactGP
from ..numerics.functions import depends
from ..program.asking import Unsupported, attempt
from ..program.checks import holds_part
from ..program.data import rows_of
from ..program.owners import NO_VALUES, Values
from ..program.traces import all_sites, as_process, bare, is_free, repeatable, sample_sites
from .field import LARGEST, Layout, Standardised, is_normal_prior, run_standardised
from .known import KnownGuide, without
from .latents import Hyperparameters
from .nested import Nested
from .predictors import Linked, find_links
from .runs import Run

_MOST_ROWS = 2000  # of a start; of more so many are drawn
MOST_VALUES = 500  # of rows that are a basis themselves
_MOST_BESIDE = 50  # normal latents beside more of these
_BESIDE = 0.3  # in unconstrained space
_ELIMINATED = 100  # values of a latent, from which it is no part of a dense covariance
ALL_ROWS = 20_000  # up to which all are taken in the end
_MOST_BENT = 16  # numbers of latents that predictors are not affine in, and may be given them
_MOST_SLOPES = 50_000_000  # of predictors by the field
_Call = tuple[tuple, dict[str, Any]]  # arguments


class Search:
    """What is known of a program before θ goes to its mode: which latents are in the field, ``normal``, and which are
    hyperparameters, ``hyper``.

    :param first: a run that met all sites, with the arguments ``whole``.
    :param fixed: latents that are no hyperparameters: they stay as in that run, unless they are normal.
    :param tell: called at each run.
    :param handler: what makes members of x.
    :param as_they_are: whether densities are taken without their linear predictors.
    """

    def __init__(
        self,
        guide: KnownGuide,
        first: Run,
        whole: _Call,
        fixed: Collection[str],
        tell: Callable[[], Any],
        handler: Any = Standardised,
        as_they_are: bool = False,
    ) -> None:
        self.guide, self.whole, self.gps, self.fixed, self.tell = guide, whole, guide.facts.gps, fixed, tell
        self.handler, self.as_they_are = handler, as_they_are
        self.sites = sites = dict(all_sites(first.trace))
        self.inputs = {name: process.x for name, process in first.processes.items()}
        rows = next(iter(first.processes.values())).event_shape[0]
        # A plate that draws so many rows has all of them, by their numbers.
        drawn = {n: site["fn"] for n, site in sites.items() if is_free(site) and site_is_subsample(site)}
        self.plates = {name: fn.size for name, fn in drawn.items() if fn.subsample_size == rows < fn.size}
        self.num = max([rows, *self.plates.values()])
        # Equal distances would miss what alternates: test_rows_of_a_start_are_none_of_a_pattern.
        self.order = torch.randperm(self.num, generator=torch.Generator().manual_seed(0))
        self.priors = {name: sites[name]["infer"]["prior"] for name in guide.facts.latents}
        self.held = {name: sites[name]["value"].detach() for name in guide.facts.latents}
        self.stay, self.eliminated_from = dict[str, Tensor](), float(_ELIMINATED)
        self.given, self.why = set[str](), ""  # what predictors are affine given; why there is no F, and what to do
        self.is_exact = any(isinstance(module, ExactGP) for module in guide.modules_by_site().values())
        self.most = (MOST_VALUES, MOST_VALUES) if self.is_exact else (_MOST_ROWS, ALL_ROWS)  # first, and in the end
        if guide.joint.row_effects:  # whose number is that of the rows
            self.most = ALL_ROWS, ALL_ROWS
        self.is_part = holds_part(first.trace)
        self._take(self.most[0])
        if self.rows < self.num and not self._takes_rows():
            self._take(self.num)
        # what a trained guide has for hyperparameters stays so: random points of another search may show it otherwise
        normal = without(self._normal(), guide.joint.hyper)
        # Without a field f follows hyperparameters alone, where its sites are exact.
        are_few = sum(prior.shape().numel() for prior in normal.values()) <= _MOST_BESIDE
        if self.is_exact and self.rows < self.num and are_few and all(gp.is_quadratic for gp in self.gps.values()):
            normal = {}
        self._split(normal)
        scales = {float(sites[name]["scale"]) for name in (*normal, *self.gps)}
        if len(scales) > 1:
            names, weights = ", ".join(map(repr, (*normal, *self.gps))), " and ".join(map(str, sorted(scales)))
            raise Unsupported(
                f"{names} have one posterior, and poutine.scale weighs them by {weights}: scale the data alone, or all"
            )

    def _take(self, most: int) -> None:
        """Take so many rows at most, the first in order, by a plate's numbers, or from tensors with as many rows as a
        GP site's inputs.
        """
        self.rows = min(self.num, most)
        self.chosen = self.order[: self.rows].sort().values.to(self.guide.like.device)
        held = dict.fromkeys(self.plates, self.chosen)
        given: _Call = self.whole if self.plates else rows_of(self.whole, self.num, self.chosen)

        def run(handler: Standardised, values: Values) -> poutine.Trace:
            self.tell()
            return run_standardised(self.guide, *given, handler, {**held, **self.stay, **values})

        self.run = run

    def _at_prior(self, x: Values, held: Values) -> tuple[Standardised, dict[str, Any]]:
        """A run with GP sites at their priors' means and latents at x, and other latents held; and its handler."""
        numbers = self.guide.facts.residuals(dict.fromkeys(self.gps, 1))
        handler = self.handler(self.guide, x, {name: self.guide.like.new_zeros(num) for name, num in numbers.items()})
        return handler, sample_sites(self.run(handler, held))

    def _takes_rows(self) -> bool:
        """Whether the program takes its rows from its arguments, or by a plate's numbers."""
        with attempt():
            handler, _ = self._at_prior(NO_VALUES, self.held)
            return all(handler.features[name][0].shape[-2] < self.num for name in self.gps)
        return False

    def _normal(self) -> dict[str, Any]:
        """The latents with normal priors, except those that a kernel, scale or prior is made of: these are
        hyperparameters.
        """
        guide = self.guide
        normal = {name: prior for name, prior in self.priors.items() if is_normal_prior(prior)}
        if not normal:
            return normal  # a run of the program less: test_a_first_step_from_the_mode_has_met_the_data
        x = {n: guide.like.new_zeros(prior.shape().numel(), requires_grad=True) for n, prior in normal.items()}
        handler, sites = self._at_prior(x, without(self.held, normal))
        # autograd's graph shows what these are made of, whatever the values: 0 hides no slope
        made = [part for parts in handler.features.values() for part in parts]
        made += [as_process(sites[name]["fn"])[0].variance for name in self.gps]  # type: ignore[union-attr]
        made += [bare(sites[n]["fn"]).log_prob(sites[n]["value"]) for n in self.priors if n not in normal]
        return {name: prior for name, prior in normal.items() if not any(depends(part, x[name]) for part in made)}

    def _split(self, normal: dict[str, Any]) -> None:
        self.normal, self.stay = normal, {name: self.held[name] for name in self.fixed if name not in normal}
        self.hyper = Hyperparameters(without(self.priors, {*normal, *self.stay}), self.held, self.guide.like)

    def nested(self) -> Optional[Nested]:
        """F of the program; ``None`` if a likelihood has no linear predictors."""
        guide, facts, rows = self.guide, self.guide.facts, self.rows
        modules = guide.modules_by_site().items()
        sizes = {name: self.handler.sizes_of(module, rows) for name, module in modules}
        sizes |= {name: [prior.shape().numel()] for name, prior in self.normal.items()}
        eliminated = self._eliminated()
        members = sorted((name for name in self.sites if name in sizes), key=lambda name: name == eliminated)
        field = {name: sizes[name] for name in members}  # an eliminated one is the last
        layout = Layout(field, facts.residuals(dict.fromkeys(self.gps, self.num)), eliminated)
        numbers = layout.extended - layout.num + layout.dense
        if layout.dense > LARGEST or numbers * rows > _MOST_SLOPES:
            raise Unsupported(f"{numbers} numbers that are normal a priori, at {rows} rows, are too many")
        # Beside their start, where a hyperparameter may hide what it multiplies, as an LKJCholesky's identity does.
        with repeatable(guide.like):
            first = self.hyper.parts(self.hyper.of(self.held))
            beside = {name: value + _BESIDE * torch.randn_like(value) for name, value in first.items()}

        def at(x: Tensor, given: Values = NO_VALUES) -> poutine.Trace:
            return self.run(self.handler(guide, *layout.parts(x), beside), given)

        linked = self._linked(at, layout)
        # A piecewise constant density shows no gradient: test_what_takes_sites_to_be_independent_refuses_them.
        seen = {*linked.links, *linked.bent} - {*linked.jumps}
        if eliminated and linked.bent:  # a datum may have several of its values
            self.eliminated_from = math.inf
            return self.nested()
        # Given a few latents in which predictors are not affine, they may be affine in all else: these are
        # hyperparameters. Else densities are taken as they are.
        bent, normal = {name for names in linked.bent.values() for name in names} & self.normal.keys(), self.normal
        few = bent if sum(normal[name].shape().numel() for name in bent) <= _MOST_BENT else set[str]()
        if moved := few | {*linked.flat} & normal.keys():
            self._split(without(normal, moved))
            nested = self.nested()
            if (nested is not None and not nested.drawn) or {*linked.flat} & moved:
                self.given = few
                return nested
            self._split(normal)
        unseen = sorted({*facts.downstream} - {*self.normal} - seen)
        effects = without(dict.fromkeys(guide.joint.row_effects), self.normal)
        made = "scales or inputs are made of {!r}, of single rows. Integrate it out in the likelihood."
        why = [made.format(name) for name in effects]
        why += [f"the density of site {name!r} jumps. Take one with slopes." for name in unseen]
        why += [f"the prior of {name!r} is flat. Give it a density." for name in linked.flat]
        if why:
            self.why = why[0]
            return None
        return Nested(guide, layout, linked.links, self.hyper, self.run, self.handler, list(linked.bent))

    def _linked(self, at: Callable[..., poutine.Trace], layout: Layout) -> Linked:
        """How densities depend on the field: as the guide knows it, of the same members, or found at random points."""
        joint = self.guide.joint
        if joint.field.keys() != layout.field.keys():
            linked = find_links(at, layout, self.guide.like)
            bent = {name: linked.bent.get(name, []) for name in {**linked.links, **linked.bent}}
            return Linked({}, bent, linked.flat, linked.jumps) if self.as_they_are else linked
        # Random points may be where densities are flat: test_a_saturated_probability_is_as_the_guide_knows_it.
        links = {name: dict(of_site) for name, of_site in joint.links.items()}
        return Linked(links, {name: [] for name in joint.drawn}, [], [])

    def _eliminated(self) -> str:
        """The latent with the most values, if each datum may have one of them, and all are in the field."""
        free = {n: p.shape().numel() for n, p in self.normal.items() if type(bare(p)) is dist.Normal}
        many = {name: num for name, num in free.items() if num >= self.eliminated_from}
        able = {*filter(self.guide.may_join, self.normal)} - {*self.fixed}
        return max(many, key=lambda name: many[name], default="") if able == self.normal.keys() else ""

    def at_rows(self, nested: Nested, most: int) -> Nested:
        """F at more rows, or as it is."""
        if self.rows >= min(self.num, most):
            return nested
        if nested.layout.eliminated and self.num > most:
            self.order = self._groups(nested)
        self._take(most)
        return self.nested() or nested

    def _groups(self, nested: Nested) -> Tensor:
        """All rows, group by group of the eliminated latent's values: few rows of each say little of their variance."""
        self._take(self.num)
        every = Nested(self.guide, nested.layout, nested.links, self.hyper, self.run, self.handler)
        rows, _ = every.predictors(self.hyper.of(self.held))
        owner = next((one.owner for one in rows.rows.values() if len(one.owner) == self.num), self.chosen)
        rank = torch.randperm(int(owner.max()) + 1, generator=torch.Generator().manual_seed(0))
        return rank.to(owner.device)[owner].argsort()
