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

from ..likelihood import derivatives, is_quadratic, normal_nodes
from ..traces import held_trace, whole_plates

__all__ = ["Moments", "PointwiseDensities", "Reader"]

Moments = tuple[Tensor, Tensor]  # mean and variance of function values, (..., N) each

_NUMBERS = 2**23  # values of function nodes evaluated at once
_PASSES = 3  # of adaptive quadrature
_SHRINKAGE = 9.0  # of the variance, at most, in one of them


@dataclass
class PointwiseDensities:
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

    aligned: dict[str, bool]  # of each GP site that moves it: a term a value, in the same place
    quadratic: Optional[str] = None  # a GP site integrated in closed form
    others: list[str] = field(default_factory=list)  # by quadrature


class Reader:
    """Reads a model's densities at draws of all that is not integrated out.

    A GP site in which the density is quadratic is integrated in closed form (a Gaussian likelihood; the mean of a
    heteroscedastic one). Otherwise a density of one function value is integrated by Gauss-Hermite quadrature that is
    centred and scaled on the integrand (Naylor and Smith, 1982), so that a likelihood much narrower than the
    residual does no harm; one of two values by a product grid; of more, by 128 Sobol points.

    :param model: the model.
    :param sites: names of the sites whose densities are read: data, and latents whose densities move with f.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: dict[str, Any], sites: Sequence[str]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.sites = list(dict.fromkeys(sites))
        self.plans: Optional[dict[str, _Plan]] = None
        self._scales: dict[str, Any] = {}

    def __call__(self, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> PointwiseDensities:
        """The densities at one draw.

        :param held: values of all latent sites that are not integrated, subsample sites among them.
        :param functions: h and d of the GP sites that are.
        """
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates():
            if self.plans is None:
                self.plans = self._learn(held, functions)
            integrated = {}
            expected = log_evidence = torch.zeros((), dtype=torch.float64)
            for name, plan in self.plans.items():
                log_density, expectation = self._site(name, plan, held, functions)
                integrated[name] = log_density
                expected = expected + (self._scales[name] * expectation).double().sum()
                log_evidence = log_evidence + (self._scales[name] * log_density).double().sum()
        return PointwiseDensities(integrated, expected, log_evidence)

    def density(self, name: str, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> Tensor:
        """One site's integrated densities; ``held`` may name another value of it."""
        assert self.plans is not None
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates():
            return self._site(name, self.plans[name], held, functions)[0]

    def total(self, values: Mapping[str, Tensor]) -> Tensor:
        """The sum of all log densities read, scaled, at values of all latent sites."""
        with whole_plates():
            terms = self.terms(values, self.sites)
        return sum((self._scales[name] * term.sum() for name, term in terms.items()), torch.zeros(()))

    def terms(self, values: Mapping[str, Tensor], only: Sequence[str]) -> dict[str, Tensor]:
        """Log densities of some sites, unscaled, 0 where they are masked."""
        trace = held_trace(self.model, values, self.args, self.kwargs)
        found = {}
        sites: Any = trace.nodes
        for name, site in sites.items():
            if site["type"] != "sample" or site_is_subsample(site) or name not in only:
                continue
            found[name] = torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), 1.0, site["mask"]))
            self._scales[name] = site["scale"]
        return found

    def site(self, values: Mapping[str, Tensor], name: str) -> Any:
        """A site of a run of the model at values of all latent sites."""
        with whole_plates(), pyro.validation_enabled(False):
            return held_trace(self.model, values, self.args, self.kwargs).nodes[name]

    # What depends on what, found by trying.

    def _learn(self, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> dict[str, _Plan]:
        means = {name: mean for name, (mean, _) in functions.items()}
        names = self.sites
        start = self.terms({**held, **means}, names)
        plans = {name: _Plan({}) for name in start}
        generator = torch.Generator().manual_seed(0)
        for gp, moments in functions.items():
            f, step = means[gp], _step(moments)
            mask = (torch.rand(f.shape, generator=generator) < 0.5).to(f.device)
            moved = self.terms({**held, **means, gp: f + step}, names)
            halves = [self.terms({**held, **means, gp: f + step * part}, names) for part in (mask, ~mask)]
            for site, before in start.items():
                # Classes see differences of their outputs: moving all values alike may change nothing.
                if not any(_changed(before, after[site]).any() for after in (moved, *halves)):
                    continue
                aligned = before.shape == f.shape and not any(
                    (_changed(before, half[site]) & ~part).any() for half, part in zip(halves, (mask, ~mask))
                )
                plans[site].aligned[gp] = bool(aligned)
        for site, plan in plans.items():
            for gp, aligned in plan.aligned.items():
                total = self._total(site, gp, held, means)
                rows = start[site].shape == means[gp].shape[-1:]
                if plan.quadratic is None and (aligned or rows) and _is_separable_quadratic(total, functions[gp]):
                    plan.quadratic = gp
            plan.others = [gp for gp in plan.aligned if gp != plan.quadratic]
        return plans

    def _total(
        self, site: str, gp: str, held: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> Callable[[Tensor], Tensor]:
        return lambda f: self.terms({**held, **others, gp: f}, [site])[site].sum()

    # One site's densities.

    def _site(self, name: str, plan: _Plan, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> Moments:
        """log ∫ p N(f | h, d) df and E[log p], a value a datum."""
        means = {gp: mean for gp, (mean, _) in functions.items()}
        fixed = {**held, **{gp: mean for gp, mean in means.items() if gp not in plan.aligned}}
        if not plan.aligned:
            term = self.terms(fixed, [name])[name]
            return term, term
        if plan.quadratic is None and len(plan.others) == 1 and plan.aligned[plan.others[0]]:
            return self._adaptive(name, plan.others[0], fixed, functions[plan.others[0]])
        widths = [1 if plan.aligned[gp] else max(1, means[gp][..., 0].numel()) for gp in plan.others]
        nodes, weights = normal_nodes(sum(widths), next(iter(means.values())))
        values = {
            gp: functions[gp][0] + functions[gp][1].sqrt() * _per_output(part, means[gp])
            for gp, part in zip(plan.others, nodes.split(widths, -1))
        }

        def at(node: dict[str, Tensor]) -> Moments:
            if plan.quadratic is None:
                term = self.terms({**fixed, **node}, [name])[name]
                return term, term
            return self._closed(name, plan, {**fixed, **node}, functions[plan.quadratic])

        log_densities, expectations = _at_nodes(at, values, len(weights))
        shaped = weights.reshape(-1, *[1] * (log_densities.dim() - 1)).to(log_densities)
        return torch.logsumexp(log_densities + shaped.log(), 0), (shaped * expectations).sum(0)

    def _closed(self, name: str, plan: _Plan, fixed: Mapping[str, Tensor], moments: Moments) -> Moments:
        # ℓ(f) = ℓ + ℓ'(f − h) − ½λ(f − h)²: log ∫ exp ℓ N(f | h, d) df = ℓ − ½ log(1 + λd) + ½ ℓ'²d/(1 + λd).
        gp = plan.quadratic
        assert gp is not None
        h, d = moments

        def term(f: Tensor) -> Tensor:
            return self.terms({**fixed, gp: f}, [name])[name]

        if plan.aligned[gp]:  # a term a value: the sum's second derivative is each term's own

            def slope(f: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                first, value = torch.func.grad(lambda f: ((t := term(f)).sum(), t), has_aux=True)(f)
                return first.sum(), (first, value)

            second, (first, value) = torch.func.grad(slope, has_aux=True)(h)
        else:
            value = term(h)
            first, second = derivatives(lambda f: term(f).sum(), h)
        precision = (-second).clamp(min=0)
        gain = 1 + precision * d
        change = 0.5 * (first.square() * d / gain - gain.log())
        spread = -0.5 * precision * d
        if change.shape != value.shape:  # outputs that add up in one term
            change, spread = (part.reshape(-1, part.shape[-1]).sum(0) for part in (change, spread))
        return value + change, value + spread

    def _adaptive(self, name: str, gp: str, fixed: Mapping[str, Tensor], moments: Moments) -> Moments:
        h, d = moments
        nodes, weights = normal_nodes(1, h)
        shape = (-1, *[1] * h.dim())
        t, log_weights = nodes[:, 0].reshape(shape), weights.log().reshape(shape)
        floor = torch.finfo(d.dtype).tiny
        variance = d.clamp(min=floor)
        m, v = h, variance
        expectation = log_density = h

        def at(node: dict[str, Tensor]) -> Moments:
            term = self.terms({**fixed, **node}, [name])[name]
            return term, term

        for i in range(_PASSES):
            f = m + v.sqrt() * t
            terms, _ = _at_nodes(at, {gp: f}, len(weights))
            if i == 0:
                expectation = (log_weights.exp() * terms).sum(0)
            # importance weights of N(h, d) over N(m, v) at the nodes
            ratio = 0.5 * ((v / variance).log() + t.square() - (f - h).square() / variance)
            log_joint = terms + ratio + log_weights
            log_density = torch.logsumexp(log_joint, 0)
            share = (log_joint - log_density).exp()
            mean = (share * f).sum(0)
            spread = (share * (f - mean).square()).sum(0)
            m, v = mean, torch.minimum(torch.maximum(spread, v / _SHRINKAGE), variance)
        return log_density, expectation


def _at_nodes(at: Callable, values: dict[str, Tensor], num: int) -> Moments:
    """``at`` at each of K joint nodes, ``(K, ..., N)`` a GP site; by vmap where the model allows it."""
    if not values:
        log_density, expectation = at({})
        return log_density[None], expectation[None]
    size = max(value[0].numel() for value in values.values())
    try:
        return torch.func.vmap(at, randomness="same", chunk_size=max(1, _NUMBERS // size))(values)
    except (RuntimeError, TypeError, ValueError):  # a program that vmap refuses
        pairs = [at({gp: value[k] for gp, value in values.items()}) for k in range(num)]
        return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


def _per_output(nodes: Tensor, like: Tensor) -> Tensor:
    """Nodes ``(K, A)`` shaped to multiply ``like``, ``(..., N)``: one axis for all outputs or one for each."""
    if nodes.shape[-1] == 1:
        return nodes.reshape(len(nodes), *[1] * like.dim())
    return nodes.reshape(len(nodes), *like.shape[:-1], 1)


def _step(moments: Moments) -> Tensor:
    """How far to move function values in order to see what moves with them."""
    mean, variance = moments
    size = float(variance.mean().sqrt() + 0.1 * (mean - mean.mean()).square().mean().sqrt())
    return torch.full_like(mean, size if size > 0 and math.isfinite(size) else 1e-3)


def _changed(before: Tensor, after: Tensor) -> Tensor:
    return (before != after) & ~(before.isnan() & after.isnan())


def _is_separable_quadratic(total: Callable[[Tensor], Tensor], moments: Moments) -> bool:
    """Whether a density is Σₙ of parabolas in single function values."""
    f, step = moments[0], _step(moments)
    try:
        if not is_quadratic(total, f, step):
            return False
        if f.dim() == 1:
            return True
        slope, curvature = derivatives(total, f)  # outputs may meet in a term
        generator = torch.Generator().manual_seed(1)
        move = step * torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
        there, _ = derivatives(total, f + move)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    tolerance = 1e-6 if f.dtype == torch.float64 else 1e-3
    size = slope.abs() + (curvature * move).abs()
    return bool(((there - slope - curvature * move).abs() <= tolerance * (size + size.mean())).all())
