"""Proper scores of one observed site, by kind of likelihood, from what each draw says of it."""

from __future__ import annotations

from typing import Any, Optional

import pyro.distributions as dist
import torch
from pyro.distributions import OrderedLogistic
from torch import Tensor

from ..distributions.probit import Probit
from ..program.traces import bare
from .densities import DensityReader
from .draws import Draw

__all__ = ["Scorer", "scorer_for"]

_LAGS = 16  # pairs of draws for each draw, in the CRPS of a mixture


class Scorer:
    """What a kind of likelihood asks of each draw, and the scores beside the log score that follow.

    Observations of several classes at once, which have neither an order nor a probability each, have none.
    """

    method = "log score"

    def __init__(self, reader: DensityReader, y: Tensor, site: str) -> None:
        self.reader, self.y, self.site = reader, y, site

    def read(self, draw: Draw) -> tuple[Tensor, ...]:
        """What is kept of one draw."""
        return ()

    def scores(self, log_score: Tensor, *kept: Tensor) -> dict[str, Tensor]:
        """The scores, a value an observation.

        :param kept: what was read, ``(S, ...)`` each.
        """
        return {}


class Gaussian(Scorer):
    """Predictions that are normal given hyperparameters: y ~ N(m(f), v) with m linear, f ~ N(h, d)."""

    method = "gaussian"

    def read(self, draw: Draw) -> tuple[Tensor, ...]:
        ((gp, (h, d)),) = [(gp, draw.moments[gp]) for gp in self.reader.plans[self.site].aligned]
        here, moved = (self.reader.site({**draw.held, **draw.functions, gp: f}, self.site)["fn"] for f in (h, h + 1))
        return here.mean, here.variance + (moved.mean - here.mean).square() * d

    def scores(self, log_score: Tensor, *kept: Tensor) -> dict[str, Tensor]:
        m, v = kept
        pit = dist.Normal(m, v.sqrt()).cdf(self.y).mean(0)
        # E|Y − y| − ½ E|Y − Y'|: of two draws from the mixture, one in S pairs has the same component.
        inner = _expected_distance(torch.zeros_like(m), 2 * v).mean(0)
        lags = range(1, min(_LAGS + 1, len(m)))
        if lags:
            # Pairs of draws that are no more than some lags apart stand for all pairs: O(S) and not O(S²).
            between = sum(_expected_distance(m[lag:] - m[:-lag], v[lag:] + v[:-lag]).sum(0) for lag in lags)
            inner = inner / len(m) + (1 - 1 / len(m)) * between / sum(len(m) - lag for lag in lags)
        return {"crps": _expected_distance(self.y - m, v).mean(0) - 0.5 * inner, "pit": pit.clamp(0, 1)}


class Bernoulli(Scorer):
    """Two classes: CRPS is (P(1) − y)²."""

    method = "bernoulli"

    def scores(self, log_score: Tensor, *kept: Tensor) -> dict[str, Tensor]:
        # log_score is that of the class that was observed.
        one = torch.where(self.y > 0.5, log_score.exp(), 1 - log_score.exp())
        uniform = torch.rand_like(one)
        pit = torch.where(self.y > 0.5, 1 - one * (1 - uniform), (1 - one) * uniform)
        return {"crps": (one - self.y).square(), "pit": pit.clamp(0, 1)}


class Classes(Scorer):
    """Classes 0 to K − 1, with their predictive probabilities Pₖ.

    Without an order: the Brier score Σₖ (Pₖ − 1[y = k])² (Brier, 1950), and the level of the smallest set of classes,
    the most probable first, that holds y. Level and PIT are randomised, so that they are uniform where predictions are
    right.
    """

    method = "categorical"

    def read(self, draw: Draw) -> tuple[Tensor, ...]:
        fn = bare(draw.sites[self.site]["fn"])
        held = [{**draw.held, self.site: torch.full_like(self.y, k)} for k in range(fn.logits.shape[-1])]
        return (torch.stack([self.reader.density(self.site, each, draw.moments) for each in held]).double().exp(),)

    def scores(self, log_score: Tensor, *kept: Tensor) -> dict[str, Tensor]:
        probs = kept[0].mean(0)  # (K, N)
        observed = torch.stack([self.y == k for k in range(len(probs))]).to(probs)
        own = (probs * observed).sum(0)
        return self._of(probs, observed, own, torch.rand_like(own) * own)

    def _of(self, probs: Tensor, observed: Tensor, own: Tensor, part: Tensor) -> dict[str, Tensor]:
        earlier = (observed.cumsum(0) == 0) & (probs == own)  # of equals, the first is taken for the more probable
        level = (probs * ((probs > own) | earlier)).sum(0) + part
        return {"brier": (probs - observed).square().sum(0), "set_level": level.clamp(0, 1)}


class Ordered(Classes):
    """Classes with an order: the ranked probability score Σₖ (Fₖ − 1[y ≤ k])² over k < K − 1 (Epstein, 1969), which is
    the CRPS of the class number, and the PIT.
    """

    method = "ordered"

    def _of(self, probs: Tensor, observed: Tensor, own: Tensor, part: Tensor) -> dict[str, Tensor]:
        below, seen = probs.cumsum(0), observed.cumsum(0)
        pit = ((1 - seen) * probs).sum(0) + part
        return {"rps": (below - seen)[:-1].square().sum(0), "pit": pit.clamp(0, 1)}


class Draws(Scorer):
    """CRPS and PIT from a draw of y for each draw of everything else."""

    method = "draws"

    def read(self, draw: Draw) -> tuple[Tensor, ...]:
        return (draw.sites[self.site]["fn"].sample().to(self.y),)

    def scores(self, log_score: Tensor, *kept: Tensor) -> dict[str, Tensor]:
        y, drawn = self.y, kept[0]
        num = len(drawn)
        if num < 2 or drawn[0].shape != y.shape:
            return {name: torch.full_like(log_score, torch.nan) for name in ("crps", "pit")}
        # Σ|yᵢ − yⱼ| over pairs by ranks; the fair estimate, without bias in S.
        rank = (2 * torch.arange(num).to(y) - num + 1).reshape(-1, *[1] * y.dim())
        spread = (rank * drawn.sort(0).values).sum(0) / (num * (num - 1))
        below, equal = (drawn < y).sum(0), (drawn == y).sum(0)
        pit = (below + torch.rand_like(y) * (equal + 1)) / (num + 1)
        return {"crps": (drawn - y).abs().mean(0) - spread, "pit": pit.clamp(0, 1)}


def scorer_for(reader: DensityReader, draw: Draw, site: str, ordered: Optional[bool] = None) -> Scorer:
    """The scorer for an observed site, with as much in closed form as its likelihood allows."""
    node: Any = draw.sites[site]
    fn, is_single = bare(node["fn"]), not node["fn"].event_shape
    y = node["value"].to(next(iter(draw.moments.values()))[0]) if draw.moments else node["value"]
    if isinstance(fn, torch.distributions.Categorical):
        # OrderedLogistic is a Categorical whose classes have an order.
        has_order = isinstance(fn, OrderedLogistic) if ordered is None else ordered
        kind: type[Scorer] = (Ordered if has_order else Classes) if is_single else Scorer
        return kind(reader, node["value"], site)
    if ordered is not None:
        raise ValueError(f"ordered is for classes; the distribution of site {site!r} is {type(fn).__name__}")
    # A parabola in f: then the mean is linear in it, and the variance does not depend on it.
    plan = reader.plans[site]
    if (
        plan.quadratic
        and list(plan.aligned.values()) == [True]
        and is_single
        and isinstance(fn, torch.distributions.Normal)
    ):
        return Gaussian(reader, y, site)
    return (Bernoulli if isinstance(fn, (torch.distributions.Bernoulli, Probit)) else Draws)(reader, y, site)


def _expected_distance(delta: Tensor, variance: Tensor) -> Tensor:
    """E|X| of X ~ N(δ, v): 2√v φ(δ/√v) + δ(2Φ(δ/√v) − 1)."""
    scale = variance.sqrt()
    z = delta / scale
    normal = dist.Normal(0.0, 1.0)
    return 2 * scale * normal.log_prob(z).exp() + delta * (2 * normal.cdf(z) - 1)
