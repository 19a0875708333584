"""Pointwise log densities of the data with function values integrated out.

Given coefficients w (or all other function values) and hyperparameters, the value at one input is Gaussian,
fₙ ~ N(hₙ, dₙ). What model comparison needs is log ∫ p(yₙ | fₙ) N(fₙ | hₙ, dₙ) dfₙ: log p(yₙ | fₙ) at a *sampled* fₙ
has a variance that grows with dₙ, and importance weights made of it fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ...numerics.tilted import tilted
from ...program.dependence import differ
from ...program.likelihood import derivatives, is_quadratic, mapped, normal_nodes
from ...program.reader import per_output
from ...program.traces import held_trace, require_again, whole_plates

__all__ = ["Moments", "PointwiseDensities", "PointwiseReader"]

Moments = tuple[Tensor, Tensor]  # mean and variance of function values, (..., N) each

_NUMBERS = 2**23  # values of function nodes evaluated at once
_NODES = 32  # of an integral over one function value, at first
_MOST_NODES = 512  # of one that needs more


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
    inner: Optional[str] = None  # if none is, one of single function values, integrated adaptively
    others: list[str] = field(default_factory=list)  # at fixed nodes


class PointwiseReader:
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
        self.plans: Optional[dict[str, _Plan]] = None
        self._scales: dict[str, Any] = {}

    def __call__(self, held: Mapping[str, Tensor], functions: Mapping[str, Moments]) -> PointwiseDensities:
        """The densities at one draw.

        :param held: values of all latent sites that are not integrated, subsample sites among them.
        :param functions: h and d of the GP sites that are.
        :raises ValueError: where an integrated density is not finite, naming the site and the rows.
        """
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates():
            if self.plans is None:
                self.plans = self._learn(held, functions)
            integrated = {}
            expected = log_evidence = torch.zeros((), dtype=torch.float64)
            for name, plan in self.plans.items():
                log_density, expectation = self._site(name, plan, held, functions)
                _require_finite(name, log_density)
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
        effects: dict[str, dict[str, float]] = {name: {} for name in start}
        generator = torch.Generator().manual_seed(0)
        for gp, moments in functions.items():
            f, step = means[gp], _step(moments)
            mask = (torch.rand(f.shape, generator=generator) < 0.5).to(f.device)
            moved = self.terms({**held, **means, gp: f + step}, names)
            # A term may be flat on one side, or near the mean.
            moves = [self.terms({**held, **means, gp: f + size * step}, names) for size in (-1.0, 8.0, -8.0)]
            halves = [
                (part, self.terms({**held, **means, gp: f + size * step * part}, names))
                for part in (mask, ~mask)
                for size in (1.0, -1.0, 8.0, -8.0)
            ]
            for site, before in start.items():
                # Classes see differences of their outputs: moving all values alike may change nothing.
                after = [moved, *moves, *(half for _, half in halves)]
                if not any(differ(before, terms[site]).any() for terms in after):
                    continue
                aligned = before.shape == f.shape and not any(
                    (differ(before, half[site]) & ~part).any() for part, half in halves
                )
                plans[site].aligned[gp] = bool(aligned)
                effects[site][gp] = float((moved[site] - before).abs().nan_to_num().sum())
        for site, plan in plans.items():
            for gp, aligned in plan.aligned.items():
                total = self._total(site, gp, held, means)
                rows = start[site].shape == means[gp].shape[-1:]
                if plan.quadratic is None and (aligned or rows) and _is_separable_quadratic(total, functions[gp]):
                    plan.quadratic = gp
            single = [gp for gp, aligned in plan.aligned.items() if aligned]
            if plan.quadratic is None and single:  # the one against whose residual the density is the narrowest
                plan.inner = max(single, key=effects[site].__getitem__)
            plan.others = [gp for gp in plan.aligned if gp not in (plan.quadratic, plan.inner)]
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
        widths = [1 if plan.aligned[gp] else max(1, means[gp][..., 0].numel()) for gp in plan.others]
        nodes, weights = normal_nodes(sum(widths), next(iter(means.values())))
        values = {
            gp: functions[gp][0] + functions[gp][1].sqrt() * per_output(part, means[gp])
            for gp, part in zip(plan.others, nodes.split(widths, -1))
        }

        if plan.inner is not None:
            log_densities, expectations = self._adaptive(name, plan.inner, fixed, values, len(weights), functions)
            return _averages(log_densities, expectations, weights)

        def at(node: dict[str, Tensor]) -> Moments:
            if plan.quadratic is None:
                term = self.terms({**fixed, **node}, [name])[name]
                return term, term
            return self._closed(name, plan, {**fixed, **node}, functions[plan.quadratic])

        return _averages(*_at_nodes(at, values), weights)

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
        columns, weights = normal_nodes(1, h)
        columns, weights = (part.reshape(-1, *[1] * (h.dim() + 1)) for part in (columns, weights))

        def at(node: dict[str, Tensor]) -> Moments:
            term = self.terms({**fixed, **node}, [name])[name]
            return term, term

        parts: list[Moments] = []
        for rows in torch.arange(num).split(max(1, _NUMBERS // (_MOST_NODES * h.numel()))):
            some = {other: value[rows] for other, value in others.items()}

            def log_density(f: Tensor, some: dict[str, Tensor] = some) -> Tensor:  # (K, J, ..., N)
                beside = {other: value.expand(len(f), *value.shape).flatten(0, 1) for other, value in some.items()}
                terms, _ = _at_nodes(at, {**beside, gp: f.flatten(0, 1)})
                return terms.reshape(f.shape)

            mean, variance = (part.expand(len(rows), *part.shape) for part in (h, d))
            integrated = tilted(log_density, mean, variance, mean, variance.sqrt(), num_nodes=_NODES).log_z
            expected = (weights * log_density(mean + variance.sqrt() * columns)).sum(0)
            parts.append((integrated, expected))
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])


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
    """How far to move function values in order to see what moves with them."""
    mean, variance = moments
    size = float(variance.mean().sqrt() + 0.1 * (mean - mean.mean()).square().mean().sqrt())
    return torch.full_like(mean, size if size > 0 and math.isfinite(size) else 1e-3)


def _is_separable_quadratic(total: Callable[[Tensor], Tensor], moments: Moments) -> bool:
    """Whether a density is Σₙ of parabolas in single function values."""
    find = partial(_find_separable_quadratic, total, *moments)
    try:
        return find()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        require_again(error, find, moments[0])
        return False


def _find_separable_quadratic(total: Callable[[Tensor], Tensor], f: Tensor, variance: Tensor) -> bool:
    step = _step((f, variance))
    if not is_quadratic(total, f, step):
        return False
    if f.dim() == 1:
        return True
    slope, curvature = derivatives(total, f)  # outputs may meet in a term
    generator = torch.Generator().manual_seed(1)
    move = step * torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
    there, _ = derivatives(total, f + move)
    tolerance = 1e-6 if f.dtype == torch.float64 else 1e-3
    size = slope.abs() + (curvature * move).abs()
    return bool(((there - slope - curvature * move).abs() <= tolerance * (size + size.mean())).all())
