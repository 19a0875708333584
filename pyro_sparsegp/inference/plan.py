"""How a bound's expectations are found, chosen once for a program.

    bound = Σ E_q[log p(y | f, ·)] − Σ KL

A :class:`Plan` is of a kind of posterior; :class:`ClosedForms` and the links of a :class:`Coupling` say what it does
about each density. It is made where these are new, and a step runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import combinations_with_replacement
from typing import Any, Union

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from ..gaussians.following import Followed
from ..gaussians.product import Product
from ..gaussians.steps import recorded
from ..guide import AutoSparseGP
from ..guide.field import Layout, Standardised, require_rows_of_effects, run_standardised
from ..guide.first_call import closed_forms_of
from ..guide.predictors import Densities, Pair, Place, Predictors, design
from ..guide.runs import Priors
from ..numerics.linalg import above_rounding
from ..program.asking import Unsupported, attempt
from ..program.draws import mapped, vmapped
from ..program.explore import ClosedForms
from ..program.structure import MAX_AXES
from ..program.traces import RandomState, free_values, is_observation, repeatable
from ..warned import warn_once
from .terms import Grid, Inputs, Ran, log_density_minus_kl, weighted_sum

_LOOKS = {4**k for k in range(1, 16)}  # steps at which it is asked whether predictors are still affine where q is


class Plan(ABC):
    """How the bound of one program is found.

    :param forms: which densities have their expectation in closed form.
    """

    refused: bool = False  # whether torch.func.vmap refuses the guide's run or the program's

    def __init__(self, guide: AutoSparseGP, forms: ClosedForms) -> None:
        self.forms, self.joint = forms, guide.joint

    def __str__(self) -> str:
        """A line for each density."""
        return "\n".join(f"{name}: {self._way(name)}" for name in self.forms.rest.downstream)

    @abstractmethod
    def _way(self, name: str) -> str:
        """How a density's expectation is found, in words."""

    @abstractmethod
    def bound(self, inputs: Inputs) -> Tensor:
        """The bound there, in nats."""


def plan_of(guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> Plan:
    """The plan of a guide's program, which is made where there is none."""
    core = guide.core
    if core.plan is None or core.plan.forms is not core.forms or core.plan.joint is not guide.joint:
        forms = core.forms or closed_forms_of(guide, args, kwargs)
        apart = InClosedForm if forms.kinds else OfMarginals
        core.plan = (apart if guide.kind.is_marginal else OfPredictors)(guide, forms)
    return core.plan


def _over_predictors(links: Mapping[str, str]) -> str:
    """That expectations are over predictors, in words."""
    parts = [key if link == "identity" else f"{link} of {key}" for key, link in links.items()]
    return f"over a normal linear predictor, {' and '.join(parts)}"


class OfPredictors(Plan):
    """The bound of one joint Gaussian: over linear predictors, and over points where a density has none.

    A parameter of a likelihood is θₙ = g⁻¹(ηₙ) with η = η(0) + Jx + Σ√ρt, affine in the field's x ~ N(m, S) and in
    residuals t ~ N(0, I): ηₙ is normal with mean ηₙ(m) and variance (JSJᵀ)ₙₙ + ρₙ. J is a likelihood's features:
    natural steps are a Gaussian process's on these features. Parameters of one density (a loc and a scale) are jointly
    normal.
    """

    def _way(self, name: str) -> str:
        links = self.joint.links.get(name)
        if links is None:
            return "the mean over points of the joint posterior"
        return _over_predictors(links)

    def bound(self, inputs: Inputs) -> Tensor:
        guide, args, kwargs = inputs.guide, inputs.args, inputs.kwargs
        facts, joint, priors = guide.facts, guide.joint, Priors(guide)
        model_trace, guide_trace, whole_trace = guide.at_nodes(priors, inputs.wrapped, args, kwargs)
        require_rows_of_effects(guide, priors.normal)
        rows = {name: process.event_shape[0] for name, process in priors.processes.items()}
        whole, layout = priors.whole, Layout(joint.field, facts.residuals(rows), joint.eliminated)
        loc = torch.cat(whole.q.loc, -1).detach()
        nodes: Any = model_trace.nodes  # a handler may hold some of the latents
        held = free_values(whole_trace) | {name: nodes[name]["value"] for name in facts.latents if name in nodes}
        held = {name: value for name, value in held.items() if name not in joint.field}
        with torch.enable_grad():
            x = layout.extend(loc).requires_grad_()

            def run(given: Mapping[str, Tensor] = {}, at: Tensor = x) -> Any:
                handler = Standardised(guide, *layout.parts(at), bases=priors.bases)
                return run_standardised(guide, args, kwargs, handler, {**held, **given}, model_trace).nodes

            sites = run()
            data = [name for name in (*joint.links, *joint.drawn) if name in sites and is_observation(sites[name])]
            seen = [name for name in data if sites[name]["mask"] is not False]
            links = {name: joint.links[name] for name in seen if name in joint.links}
            found = Predictors(sites, links, x, layout, run)
            guide.core.looks += torch.is_grad_enabled()
            if torch.is_grad_enabled() and guide.core.looks in _LOOKS:
                with repeatable(x):
                    # A draw that no step is told of. Features keep their graph, which points of q are to have, too.
                    away = torch.cat([whole.q.draw(), torch.randn_like(x[layout.num :])], -1).detach()
                    _warn_of_bends(guide, found, run({}, away), found.moved(away - x))
            eta, covariance = _moments(whole.q, layout, found)  # type: ignore[arg-type]
        drawn = Densities(lambda at: run({}, at), [name for name in seen if name in joint.drawn], layout)
        first = guide_trace.nodes[next(iter(joint.field))]
        expected = found.expected(eta, covariance, inputs.num_nodes)
        if joint.followed and recorded() is not None:
            following = guide.field.coefficients
            following.note(_gram(found, expected, covariance, following.places[1]))
        total = expected - weighted_sum(whole.q.kl(), {**first, "mask": None})
        if drawn.names:
            # E ℓ over points of q, of which natural steps have E ∇ℓ and E ∇²ℓ
            own, rest = design(layout.extended, loc).tensor_split([layout.num], -1)
            total = total + drawn.expected(torch.cat([whole.q.at(own), rest], -1))  # type: ignore[attr-defined]
        # Of latents below f, E log p(c | f) takes log p(c | f)'s place.
        below = [name for name in data if name in guide_trace.nodes]
        total = total - sum(
            weighted_sum(nodes[name]["fn"].log_prob(nodes[name]["value"]), nodes[name]) for name in below
        )
        return total + log_density_minus_kl(model_trace, guide_trace, {*joint.field, *data} - {*below})


def _warn_of_bends(guide: AutoSparseGP, found: Predictors, sites: Any, eta: Mapping[Place, Tensor]) -> None:
    """Warn where another run's densities do not follow from linear predictors."""
    for name in [name for name in found.links if not found.tells(name, sites, eta)]:
        warn_once(
            guide.warned,
            "bent",
            name,
            f"densities of site {name!r} depend on {', '.join(guide.joint.field)} in another way than at the guide's "
            "first call, because of other data or a kink: the bound is wrong. Make a new guide, and call it first with "
            "these data; for a kink beside a latent give independent=True.",
            stacklevel=7,
        )


def _gram(found: Predictors, expected: Tensor, covariance: Mapping[Pair, Tensor], of: Tensor) -> Tensor:
    """Some rows of JᵀHJ with H = −E ∇²ℓ by each predictor, where that is positive."""
    total = found.x.new_zeros(len(of), found.layout.num)
    for place, rows in found.rows.items():
        # E ∇²ℓ = 2 ∂E[ℓ]/∂C
        (slope,) = torch.autograd.grad(expected, covariance[place, place], retain_graph=True, materialize_grads=True)
        total = total + rows.detach()[:, of].mT @ ((-2 * slope).clamp(min=0)[:, None] * rows.detach())
    return total


def _moments(
    q: Union[Product, Followed], layout: Layout, found: Predictors
) -> tuple[dict[Place, Tensor], dict[Pair, Tensor]]:
    """The means of the linear predictors of a run with the field at its mean, and covariances of pairs."""
    eta, covariance, loc = dict[Place, Tensor](), dict[Pair, Tensor](), found.x[: layout.num].detach()
    blocks: Any = (lambda phi: phi) if layout.eliminated else (lambda phi: phi.split(layout.sizes, -1))
    for name in found.links:
        places: Any = found.of(name)
        rows, residuals = [found.rows[place] for place in places], [found.residuals[place] for place in places]
        if len(places) > 1:
            phi, left = torch.stack([getattr(row, "compact", row) for row in rows], 1), torch.stack(residuals, 1)
            both = (phi @ phi.mT + left @ left.mT).permute(1, 2, 0)
            mean, change = q.joint_moments(rows if layout.eliminated else blocks(phi))
            means, changes = mean.unbind(-1), change.permute(1, 2, 0)
            index = combinations_with_replacement(range(len(places)), 2)
            parts = {(places[i], places[j]): (both[i, j], changes[i, j]) for i, j in index}
        else:
            mean, change = q.moments(blocks(rows[0]))
            both = rows[0].square().sum(-1) + residuals[0].square().sum(-1)
            means, parts = (mean,), {(places[0], places[0]): (both, change)}
        # η at m, whose derivative by m is that of the features' mean.
        eta |= {place: found.eta[place] - row @ loc + mean for place, row, mean in zip(places, rows, means)}
        covariance |= {pair: prior + change for pair, (prior, change) in parts.items()}
        covariance |= {(a, a): above_rounding(covariance[a, a], parts[a, a][0]) for a in places}
    return eta, covariance


class OfMarginals(Plan):
    """The bound over marginals of GP sites, at the nodes of a product grid."""

    def _way(self, name: str) -> str:
        gps, axes = self.forms.rest.densities[name].gps, self.forms.axes
        left = "in closed form by" if name in self.forms.given else "by draws of"
        ways = {left: [gp for gp in gps if gp not in axes], "at nodes of": [gp for gp in gps if gp in axes]}
        return ", ".join(f"{way} {' and '.join(names)}" for way, names in ways.items() if names)

    def bound(self, inputs: Inputs) -> Tensor:
        if self.forms.drawn:
            names = ", ".join(self.forms.drawn)
            warn_once(
                inputs.guide.warned,
                "integrated by draws",
                names,
                f"GP sites {names} meet in densities of more than {MAX_AXES} function values: these are integrated by "
                "Monte Carlo, with one draw per particle. Take more particles, num_particles=10.",
                stacklevel=6,
            )
        return self._bound(Grid(inputs, self.forms))

    def _bound(self, grid: Grid) -> Tensor:
        """The guide's run and the program's, mapped once; where torch.func.vmap refuses these, as :meth:`_held`."""
        if not self.forms.num_axes:
            return grid.once()
        state = RandomState(grid.guide.like)
        with attempt(), pyro.validation_enabled(False):
            if not self.refused:
                return grid.mean(vmapped(grid.once, *grid.nodes[0].T, randomness="same"))
        self.refused = True
        state.restore()
        return self._held(grid, grid.run())

    def _held(self, grid: Grid, ran: Ran) -> Tensor:
        """The program's run alone, with all that does not depend on nodes held, mapped or once for each node."""
        terms, state = grid.held(*ran), RandomState(grid.guide.like)
        (values,) = mapped(lambda node: (terms(*node),), grid.nodes[0])
        if state.has_moved:
            raise Unsupported("with all values held, the model drew random numbers by itself, others than before")
        return grid.mean(values)


class InClosedForm(OfMarginals):
    """The bound over marginals of GP sites: what is known of single data, and nodes for the rest."""

    def __init__(self, guide: AutoSparseGP, forms: ClosedForms) -> None:
        super().__init__(guide, forms)
        # A distribution that brings its expectation checks its labels: test_robust_max.py::test_labels.
        self.checks = any(hasattr(kind, "normal_parameter") for kind in forms.kinds.values())

    def _way(self, name: str) -> str:
        if own := self.forms.values.get(name):
            return _over_predictors({key: link for key, (_, link) in own.items()})
        return "in closed form" if name in self.forms.sites else super()._way(name)

    def _bound(self, grid: Grid) -> Tensor:
        inputs, guide, forms = grid.inputs, grid.guide, self.forms
        with nullcontext() if self.checks else dist.validation_enabled(False):
            start = RandomState(guide.like)
            ran = grid.run()
            is_alike, after = forms.hold(ran[0].nodes), RandomState(guide.like)
            total = grid.expectations(*ran) if is_alike else torch.zeros(())
        if is_alike and not after.has_moved:
            return total + self._rest(grid, ran)
        start.restore()
        # A second run was of rows of its own, say; or a density is of another kind now: it is learned anew.
        guide.core.forms = forms.opened(guide.facts) if is_alike else None
        return plan_of(guide, inputs.args, inputs.kwargs).bound(inputs)

    def _rest(self, grid: Grid, ran: Ran) -> Tensor:
        """The bound's other terms."""
        if not self.forms.rest.gps:
            return log_density_minus_kl(*ran[:2], self.forms.sites)
        # Without nodes there are draws of function values.
        return self._held(grid, ran) if self.forms.num_axes else grid.held(*ran)()
