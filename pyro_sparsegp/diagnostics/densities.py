"""Pointwise log densities of the data with function values integrated out.

Given coefficients w (or all other function values) and hyperparameters, fₙ ~ N(hₙ, dₙ). What model comparison needs is
log ∫ p(yₙ | fₙ) N(fₙ | hₙ, dₙ) dfₙ: importance weights made of log p(yₙ | fₙ) at a *sampled* fₙ fail.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from ..numerics.tilted import tilted
from ..program.draws import mapped
from ..program.explore import TERM, Program
from ..program.handlers import held_trace
from ..program.owners import Owners
from ..program.reader import normal_nodes
from ..program.traces import bare, entries, expectation, parameter_of, rewrapped, whole_plates

Moments = tuple[Tensor, Tensor]  # mean and variance of function values, (..., N) each
Values = Mapping[str, Tensor]

_DEVIATION = "sd "  # before the names of values that are integrated in closed form: their standard deviations
_NUMBERS = 2**23  # values of function nodes evaluated at once
_NODES = 32  # of an integral over one function value, at first
_MOST_NODES = 512  # of one that needs more


@dataclass
class Densities:
    """The densities of S draws."""

    integrated: dict[str, Tensor]  # log ∫ p(y | f) N(f | h, d) df of each site read, (S, ...), a value a datum
    weighted: dict[str, Tensor]  # these times the rows' weights, which scales are, as all plates are whole
    # log p of all sites, weighted, (S,), by target: "vfe", Σ E[log p] under N(h, d), "fitc", Σ of the integrated ones.
    towards: dict[str, Tensor]
    normals: dict[str, tuple[Tensor, ...]]  # mean and variance of y, where it is normal with f integrated out


@dataclass
class _Plan:
    """How one site's densities depend on function values."""

    aligned: dict[str, bool] = field(default_factory=dict)  # of each GP site: a term a value, in the same place
    quadratic: list[str] = field(default_factory=list)  # GP sites integrated in closed form
    inner: Optional[str] = None  # if none is, one of single function values, integrated adaptively
    others: list[str] = field(default_factory=list)  # at fixed nodes


def _masked(site: dict[str, Any]) -> Tensor:
    """A site's log densities, 0 where masked."""
    return torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), mask=site["mask"]))


class DensityReader:
    """Reads a model's densities at draws of all that is not integrated out.

    GP sites in which the density is quadratic are integrated in closed form. Else one whose single values enter terms
    of their own is integrated as in expectation propagation (:func:`~pyro_sparsegp.numerics.tilted.tilted`), so that
    a likelihood much narrower than the residual does no harm. Both are done at each node of what else moves the
    density: Gauss-Hermite grids of one or two values, 128 Sobol points of more.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any], sites: Sequence[str]) -> None:
        self.model, self.call = model, (args, kwargs)
        self.sites = sites  # that are read: data, and latents whose densities move with f
        self.plans: dict[str, _Plan] = {}  # found at the first draw
        self.scales: dict[str, Any] = {}  # of poutine.scale, by site

    def __call__(self, held: Values, functions: Mapping[str, Moments]) -> Densities:
        """The densities at S draws: sites ``held`` at values, and h and d of GP sites to integrate, ``(S, ..., N)``."""
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates():
            if not self.plans:
                first = {gp: (mean[0], variance[0]) for gp, (mean, variance) in functions.items()}
                self._learn({name: value[0] for name, value in held.items()}, first)
            found = {name: self._site(name, held, functions) for name in self.plans}
        for name, (log_density, *_) in found.items():
            bad = ~log_density.isfinite()
            bad = bad.reshape(-1, bad.shape[-1] if bad.dim() > 1 else 1).any(0)
            if bad.any():
                raise ValueError(
                    f"site {name!r} has integrated log densities that are not finite in {int(bad.sum())} of {len(bad)} "
                    f"rows, such as rows {bad.nonzero()[:10, 0].tolist()}: their likelihood is 0 at all function "
                    "values of the posterior. Look for NaN in the data (leave missing rows out with poutine.mask), "
                    "data outside of the likelihood's support, or extreme hyperparameters."
                )
        integrated = {name: parts[0] for name, parts in found.items()}
        weighted = {name: self.scales[name] * part for name, part in integrated.items()}
        expected = {name: self.scales[name] * parts[1] for name, parts in found.items()}
        none = torch.zeros((), dtype=torch.float64)
        towards = {
            target: sum((part.double().reshape(len(part), -1).sum(-1) for part in parts.values()), none)
            for target, parts in (("vfe", expected), ("fitc", weighted))
        }
        return Densities(integrated, weighted, towards, {name: parts[2:] for name, parts in found.items()})

    def entries(self, name: str, held: Values, functions: Mapping[str, Moments]) -> Tensor:
        """log ∫ p(y | f) N(f | h, d) df of each independent entry of an event, ``(S, ..., P)``, masked ones too.

        To follow a call, which has found how the site's densities depend on function values.
        """
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates():
            return self._site(name, held, functions, entries)[0]

    def _sites(self, values: Values, only: Sequence[str]) -> dict[str, Any]:
        """Some sites of a run at these values, those that it has."""
        sites: Any = held_trace(self.model, values, *self.call).nodes
        kept = {name: sites[name] for name in only if name in sites}
        self.scales = {name: site["scale"] for name, site in kept.items()} | self.scales
        return kept

    def _learn(self, held: Values, functions: Mapping[str, Moments]) -> None:
        """Find which densities depend on which function values, and how: by NaN among these, and by moving them."""
        means = {gp: mean for gp, (mean, _) in functions.items()}
        sites = self._sites({**held, **means}, self.sites)
        self.plans = {name: _Plan() for name in sites}
        if not means:
            return
        program = Program(lambda f: held_trace(self.model, {**held, **f}, *self.call), functions)
        for name, plan in self.plans.items():
            touching, is_one = program.touching(name, means), not sites[name]["fn"].event_shape
            places = {gp: _in_place(program.owners[gp][TERM, name], means[gp].shape) for gp in touching}
            plan.aligned = {gp: is_one and place for gp, place in places.items()}
            means_of = [gp for gp in touching if program.is_mean(gp, name)]
            # All of a sum, of which any may have the wide residual: test_a_sum_is_one_normal.
            plan.quadratic = means_of if program.is_affine(name, means_of) else means_of[:1]
            single = [gp for gp in touching if plan.aligned[gp] and not plan.quadratic]
            # The one against whose residual the density is the narrowest: others are at fixed nodes.
            changes = {gp: program.moved[gp][TERM, name][1] - program.moved[gp][TERM, name][0] for gp in single}
            plan.inner = max(single, key=lambda gp: float(changes[gp].abs().nan_to_num().sum()), default=None)
            plan.others = [gp for gp in touching if gp not in (*plan.quadratic, plan.inner)]

    def _site(
        self, name: str, held: Values, functions: Mapping[str, Moments], density: Callable[[Any], Tensor] = _masked
    ) -> tuple[Tensor, ...]:
        """log ∫ p N(f | h, d) df and E[log p], ``(S, ...)`` each, a value a datum; of a normal its moments."""
        plan = self.plans[name]
        means = {gp: mean for gp, (mean, _) in functions.items()}
        # An axis of nodes for all outputs of a GP site, if its terms have single values of it, or one for each.
        widths = [1 if plan.aligned[gp] else max(1, means[gp][0, ..., 0].numel()) for gp in plan.others]
        like = next(value for value in (*means.values(), *held.values()) if value.is_floating_point())
        nodes, weights = normal_nodes(sum(widths), like)
        size = max(value[0].numel() for value in (*means.values(), *held.values()))
        size *= len(nodes) * (_MOST_NODES if plan.inner else 1)
        blocks = torch.arange(len(like)).split(max(1, _NUMBERS // size))
        if len(blocks) > 1:
            some = [{gp: (h[rows], d[rows]) for gp, (h, d) in functions.items()} for rows in blocks]
            given = [{key: value[rows] for key, value in held.items()} for rows in blocks]
            found = [self._site(name, *part, density) for part in zip(given, some)]
            return tuple(torch.cat(parts) for parts in zip(*found))
        stack = {key: value.expand(len(nodes), *value.shape) for key, value in {**held, **means}.items()}
        for gp, part in zip(plan.others, nodes.split(widths, -1)):
            h, d = functions[gp]
            outputs = h.shape[1:-1]
            stack[gp] = h + d.sqrt() * part.expand(-1, outputs.numel()).reshape(-1, 1, *outputs, 1)
        # Nodes are put before draws in one dimension, (J·S, ...) for J nodes, so that one mapped run has all.
        flat = {key: value.flatten(0, 1) for key, value in stack.items()}
        spread = {gp: functions[gp][1].expand_as(stack[gp]).flatten(0, 1) for gp in (*plan.quadratic, plan.inner) if gp}
        if plan.quadratic:
            parts = self._widened(name, flat, spread)
        elif plan.inner:
            parts = self._adaptive(name, flat, plan.inner, spread[plan.inner])
        else:  # nothing is left to integrate: ℓ is its own expectation
            parts = (self._at(name, flat, density),) * 2
        log_densities, expectations = (part.reshape(len(nodes), -1, *part.shape[1:]) for part in parts[:2])
        shaped = weights.reshape(-1, *[1] * (log_densities.dim() - 1)).to(log_densities)
        # log Σⱼ wⱼ exp ℓⱼ and Σⱼ wⱼ E[ℓ]ⱼ over the nodes of what else moves the density.
        return torch.logsumexp(log_densities + shaped.log(), 0), (shaped * expectations).sum(0), *parts[2:]

    def _at(self, name: str, stack: Values, density: Callable[[Any], Tensor] = _masked) -> Tensor:
        """A site's log densities at each of stacked values, unscaled; by vmap where it can be."""
        return mapped(lambda values: (density(self._sites(values, [name])[name]),), stack)[0]

    def _widened(self, name: str, stack: Values, variances: Values) -> tuple[Tensor, ...]:
        """The density of y ~ N(θ, σ²) with θ = Σ af + b integrated, E[log p], and y's mean and variance."""

        def at(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
            site = self._sites(values, [name])[name]
            fn, y = bare(site["fn"]), site["value"]
            # θ has the variance Σ a²d, y the variance σ² + Σ a²d.
            apart = ({**values, gp: values[gp] + values[_DEVIATION + gp]} for gp in variances)
            moved = (parameter_of(self._sites(other, [name])[name]["fn"]) - fn.loc for other in apart)
            variance = sum(move.square() for move in moved)
            total = fn.scale.square() + variance
            density = dist.Normal(fn.loc, total.sqrt(), validate_args=False).log_prob(y)
            parts = rewrapped(site["fn"], density), expectation(site["fn"], y, variance)
            masked = (torch.as_tensor(scale_and_mask(part, mask=site["mask"])) for part in parts)
            return *masked, fn.loc.expand(total.shape), total

        return mapped(at, {**stack, **{_DEVIATION + gp: d.sqrt() for gp, d in variances.items()}})

    def _adaptive(self, name: str, stack: Values, gp: str, d: Tensor) -> tuple[Tensor, ...]:
        """log Z of p(y | f) N(f | h, d) as expectation propagation takes it; E[log p] by the bound's nodes."""
        h, (columns, weights) = stack[gp], (part.reshape(-1, *[1] * d.dim()) for part in normal_nodes(1, d))

        def log_density(f: Tensor) -> Tensor:  # (K, S, ..., N)
            beside = {key: value.expand(len(f), *value.shape).flatten(0, 1) for key, value in stack.items()}
            return self._at(name, {**beside, gp: f.flatten(0, 1)}).reshape(f.shape)

        # Its nodes follow a likelihood far narrower than N(h, d) (test_likelihoods_narrow_against_q).
        integrated = tilted(log_density, h, d, h, d.sqrt(), num_nodes=_NODES).log_z
        return integrated, (weights * log_density(h + d.sqrt() * columns)).sum(0)


def _in_place(own: Owners, shape: torch.Size) -> bool:
    """Whether terms have the shape of values, ``(..., N)``, and each stands where its value does."""
    numbers = torch.arange(shape.numel(), device=own.rows.device).reshape(shape)
    return own.touched.shape == shape and bool((own.rows + own.outputs * shape[-1] == numbers)[own.touched].all())
