"""Pointwise log densities of the data with function values integrated out.

Given coefficients w (or all other function values) and hyperparameters, the value at one input is Gaussian,
fₙ ~ N(hₙ, dₙ). What model comparison needs is log ∫ p(yₙ | fₙ) N(fₙ | hₙ, dₙ) dfₙ: log p(yₙ | fₙ) at a *sampled* fₙ
has a variance that grows with dₙ, and importance weights made of it fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..numerics.tilted import tilted
from ..program.dependence import differ
from ..program.likelihood import mapped, normal_nodes
from ..program.traces import held_trace, require_again, whole_plates

__all__ = ["Densities", "DensityReader", "Moments"]

Moments = tuple[Tensor, Tensor]  # mean and variance of function values, (..., N) each

_NUMBERS = 2**23  # values of function nodes evaluated at once
_NODES = 32  # of an integral over one function value, at first
_MOST_NODES = 512  # of one that needs more


@dataclass
class Densities:
    """One draw's densities.

    :param integrated: log ∫ p(y | f) N(f | h, d) df of each site read, a value a datum.
    :param expected: Σ E_{N(h, d)}[log p] of all of them, scaled.
    :param log_evidence: Σ log ∫ p(y | f) N(f | h, d) df of all of them, scaled.
    """

    integrated: dict[str, Tensor]
    expected: Tensor
    log_evidence: Tensor


@dataclass
class _Plan:
    """How one site's densities depend on function values."""

    aligned: dict[str, bool] = field(default_factory=dict)  # of each GP site: a term a value, in the same place
    quadratic: Optional[str] = None  # a GP site integrated in closed form
    inner: Optional[str] = None  # if none is, one of single function values, integrated adaptively
    others: list[str] = field(default_factory=list)  # at fixed nodes


class DensityReader:
    """Reads a model's densities at draws of all that is not integrated out.

    A GP site in which the density is quadratic is integrated in closed form (a Gaussian likelihood; the mean of a
    heteroscedastic one). Otherwise, where single values of a GP site enter terms of their own, it is integrated as in
    expectation propagation (:func:`~pyro_sparsegp.numerics.tilted.tilted`), so that a likelihood much narrower than
    the residual does no harm: such a one takes some 450 numbers a row at a time, others 33. Both are done at each node
    of what else moves the density: Gauss-Hermite grids of one or two values, 128 Sobol points of more.

    :param model: the model.
    :param sites: names of the sites whose densities are read: data, and latents whose densities move with f.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any], sites: Sequence[str]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.sites = list(dict.fromkeys(sites))
        self.plans: dict[str, _Plan] = {}  # found at the first draw
        self.scales: dict[str, Any] = {}  # of poutine.scale, by site

    def __call__(self, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> Densities:
        """The densities at one draw.

        :param held: values of all latent sites that are not integrated, subsample sites among them.
        :param functions: h and d of the GP sites that are.
        :raises ValueError: where an integrated density is not finite, naming the site and the rows.
        """
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates():
            if not self.plans:
                self.plans = self._learn(held, functions)
            integrated = {}
            expected = log_evidence = torch.zeros((), dtype=torch.float64)
            for name, plan in self.plans.items():
                log_density, expectation = self._site(name, plan, held, functions)
                _require_finite(name, log_density)
                integrated[name] = log_density
                expected = expected + (self.scales[name] * expectation).double().sum()
                log_evidence = log_evidence + (self.scales[name] * log_density).double().sum()
        return Densities(integrated, expected, log_evidence)

    def density(self, name: str, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> Tensor:
        """One site's integrated densities; ``held`` may name another value of it."""
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates():
            return self._site(name, self.plans[name], held, functions)[0]

    def total(self, values: Mapping[str, Tensor]) -> Tensor:
        """The sum of all log densities read, scaled, at values of all latent sites."""
        with whole_plates():
            terms = self._terms(values, self.sites)
        return sum(((self.scales[name] * term).sum() for name, term in terms.items()), torch.zeros(()))

    def site(self, values: Mapping[str, Tensor], name: str) -> Any:
        """A site of a run of the model at values of all latent sites."""
        with whole_plates(), pyro.validation_enabled(False):
            return held_trace(self.model, values, self.args, self.kwargs).nodes[name]

    def _terms(self, values: Mapping[str, Tensor], only: Sequence[str]) -> dict[str, Tensor]:
        """Log densities of some sites, unscaled, 0 where they are masked."""
        sites: Any = held_trace(self.model, values, self.args, self.kwargs).nodes
        found = {}
        for name, site in sites.items():
            if site["type"] == "sample" and not site_is_subsample(site) and name in only:
                found[name] = torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), 1.0, site["mask"]))
                self.scales[name] = site["scale"]
        return found

    def _learn(self, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> dict[str, _Plan]:
        """Find which densities depend on which function values: NaN among these shows, as NaN · 0 is NaN."""
        means = {gp: mean for gp, (mean, _) in functions.items()}
        start = self._terms({**held, **means}, self.sites)
        plans = {name: _Plan() for name in start}
        generator = torch.Generator().manual_seed(0)
        for gp, f in means.items():
            # Two halves of the values, each set to NaN: a term of another place than its value shows in one of them.
            half = (torch.rand(f.shape, generator=generator) < 0.5).to(f.device)
            halves = [
                (part, self._terms({**held, **means, gp: f.masked_fill(part, torch.nan)}, self.sites))
                for part in (half, ~half)
            ]
            for site, before in start.items():
                # A comparison, as of RobustMax, makes no NaN of it, but another value
                # (test_predictive_scores_see_the_same_probabilities).
                moves = [(part, differ(before, terms[site])) for part, terms in halves]
                if any(moved.any() for _, moved in moves):
                    own = before.shape == f.shape and not any((moved & ~part).any() for part, moved in moves)
                    plans[site].aligned[gp] = own
        for site, plan in plans.items():
            single = [gp for gp, aligned in plan.aligned.items() if aligned]
            for gp in plan.aligned:
                by_row = start[site].shape == means[gp].shape[-1:]
                if plan.quadratic is None and (gp in single or by_row):
                    plan.quadratic = gp if self._is_quadratic(site, gp, {**held, **means}, functions[gp]) else None
            if plan.quadratic is None and single:  # the one against whose residual the density is the narrowest
                steps = {
                    gp: self._terms({**held, **means, gp: means[gp] + _step(functions[gp])}, [site])[site]
                    for gp in (single if len(single) > 1 else ())
                }
                change = {gp: float((terms - start[site]).abs().nan_to_num().sum()) for gp, terms in steps.items()}
                plan.inner = max(single, key=lambda gp: change.get(gp, 0.0))
            plan.others = [gp for gp in plan.aligned if gp not in (plan.quadratic, plan.inner)]
        return plans

    def _is_quadratic(self, site: str, gp: str, values: Mapping[str, Tensor], moments: Moments) -> bool:
        """Whether each term is a sum of parabolas in single values of a GP site, curved wherever it slopes."""
        f, generator = moments[0], torch.Generator().manual_seed(0)

        def term(f: Tensor) -> Tensor:
            return self._terms({**values, gp: f}, [site])[site]

        try:
            value, slope, curvature = _expanded(term, f)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # a program without derivatives
            require_again(error, lambda: _expanded(term, f), f)
            return False
        # A straight or a rising parabola has no Gaussian; a flat density has nothing to integrate.
        if ((slope != 0) & (curvature >= 0)).any() or not curvature.any():
            return False
        for size in (1.0, 1.0, 8.0):
            move = size * _step(moments) * torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
            parts = torch.stack([slope * move, 0.5 * curvature * move.square()])
            change, most = parts.sum(0), parts.abs().sum(0)
            if change.shape != value.shape:  # outputs that add up in one term
                change, most = (part.reshape(-1, part.shape[-1]).sum(0) for part in (change, most))
            there = term(f + move)
            reach = (1e-6 if f.dtype == torch.float64 else 1e-3) * (most + most.mean())
            # Of large terms that change little no more is known than their rounding.
            reach = reach + 8 * torch.finfo(f.dtype).eps * (value.abs() + there.abs())
            if not ((there - value - change).abs() <= reach).all():
                return False
        return True

    # One site's densities.

    def _site(self, name: str, plan: _Plan, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> Moments:
        """log ∫ p N(f | h, d) df and E[log p], a value a datum."""
        means = {gp: mean for gp, (mean, _) in functions.items()}
        fixed = {**held, **{gp: mean for gp, mean in means.items() if gp not in plan.aligned}}
        if not plan.aligned:
            term = self._terms(fixed, [name])[name]
            return term, term
        widths = [1 if plan.aligned[gp] else max(1, means[gp][..., 0].numel()) for gp in plan.others]
        nodes, weights = normal_nodes(sum(widths), next(iter(means.values())))
        values = {}
        for gp, part in zip(plan.others, nodes.split(widths, -1)):  # an axis for all outputs, or one for each
            h, d = functions[gp]
            shape = [1] * h.dim() if part.shape[-1] == 1 else [*h.shape[:-1], 1]
            values[gp] = h + d.sqrt() * part.reshape(-1, *shape)

        if plan.inner is not None:
            return _averages(*self._adaptive(name, plan.inner, fixed, values, len(weights), functions), weights)

        def at(node: dict[str, Tensor]) -> Moments:
            if plan.quadratic is not None:
                return self._closed(name, plan.quadratic, {**fixed, **node}, functions[plan.quadratic])
            term = self._terms({**fixed, **node}, [name])[name]
            return term, term

        return _averages(*_at_nodes(at, values), weights)

    def _closed(self, name: str, gp: str, fixed: Mapping[str, Tensor], moments: Moments) -> Moments:
        # ℓ(f) = ℓ + ℓ'(f − h) − ½λ(f − h)²: log ∫ exp ℓ N(f | h, d) df = ℓ − ½ log(1 + λd) + ½ ℓ'²d/(1 + λd).
        h, d = moments
        value, first, second = _expanded(lambda f: self._terms({**fixed, gp: f}, [name])[name], h)
        precision = (-second).clamp(min=0)
        gain = 1 + precision * d
        change = 0.5 * (first.square() * d / gain - gain.log())
        spread = -0.5 * precision * d
        if change.shape != value.shape:  # outputs that add up in one term
            change, spread = (part.reshape(-1, part.shape[-1]).sum(0) for part in (change, spread))
        return value + change, value + spread

    def _adaptive(
        self,
        name: str,
        gp: str,
        fixed: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        num: int,
        functions: Mapping[str, Moments],
    ) -> Moments:
        """As :meth:`_site`, at each of the nodes ``(J, ..., N)`` of other GP sites: ``(J, ..., N)`` each."""
        h, d = functions[gp]
        columns, weights = (part.reshape(-1, *[1] * (h.dim() + 1)) for part in normal_nodes(1, h))

        def at(node: dict[str, Tensor]) -> Moments:
            term = self._terms({**fixed, **node}, [name])[name]
            return term, term

        parts: list[Moments] = []
        for rows in torch.arange(num).split(max(1, _NUMBERS // (_MOST_NODES * h.numel()))):
            some = {other: value[rows] for other, value in others.items()}

            def log_density(f: Tensor, some: dict[str, Tensor] = some) -> Tensor:  # (K, J, ..., N)
                beside = {other: value.expand(len(f), *value.shape).flatten(0, 1) for other, value in some.items()}
                return _at_nodes(at, {**beside, gp: f.flatten(0, 1)})[0].reshape(f.shape)

            mean, variance = (part.expand(len(rows), *part.shape) for part in (h, d))
            # log Z of p(y | f) N(f | h, d) as expectation propagation takes it; E[log p] by the bound's nodes.
            integrated = tilted(log_density, mean, variance, mean, variance.sqrt(), num_nodes=_NODES).log_z
            parts.append((integrated, (weights * log_density(mean + variance.sqrt() * columns)).sum(0)))
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])


def _expanded(term: Callable[[Tensor], Tensor], f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Terms, and their sum's first and second derivatives by each value, where no term has products of values."""

    def slope(f: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first, value = torch.func.grad(lambda f: ((t := term(f)).sum(), t), has_aux=True)(f)
        return first.sum(), (first, value)

    second, (first, value) = torch.func.grad(slope, has_aux=True)(f)
    return value, first, second


def _averages(log_densities: Tensor, expectations: Tensor, weights: Tensor) -> Moments:
    """Of exponentials and of expectations over nodes, ``(J, ..., N)``, with these weights."""
    shaped = weights.reshape(-1, *[1] * (log_densities.dim() - 1)).to(log_densities)
    return torch.logsumexp(log_densities + shaped.log(), 0), (shaped * expectations).sum(0)


def _require_finite(name: str, log_density: Tensor) -> None:
    bad = ~log_density.isfinite()
    if not bad.any():
        return
    rows = bad.reshape(-1, bad.shape[-1]).any(0) if bad.dim() else bad.reshape(1)
    found = rows.nonzero()[:, 0].tolist()
    raise ValueError(
        f"site {name!r} has integrated log densities that are not finite in rows "
        f"[{', '.join(map(str, found[:10]))}{', ...' if len(found) > 10 else ''}] ({len(found)} of {len(rows)}): at no "
        "function value that the posterior allows has the likelihood a density there. Look for NaN in the data (leave "
        "missing rows out with poutine.mask), data outside of the likelihood's support, or hyperparameters at extremes."
    )


def _at_nodes(at: Callable, values: dict[str, Tensor]) -> Moments:
    """``at`` at each of K joint nodes, ``(K, ..., N)`` a GP site; by vmap where the model allows it."""
    if not values:
        log_density, expectation = at({})
        return log_density[None], expectation[None]
    size = max(value[0].numel() for value in values.values())
    log_density, expectation = mapped(at, values, max(1, _NUMBERS // size))
    return log_density, expectation


def _step(moments: Moments) -> Tensor:
    """How far to move function values in order to see how a density changes."""
    mean, variance = moments
    size = float(variance.mean().sqrt() + 0.1 * (mean - mean.mean()).square().mean().sqrt())
    return torch.full_like(mean, size if size > 0 and math.isfinite(size) else 1e-3)
