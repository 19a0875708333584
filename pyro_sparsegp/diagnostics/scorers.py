"""Proper scores of one observed site, taken in draw by draw, by kind of likelihood."""

from __future__ import annotations

import math
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
    """Collects an observed site's scores over draws: the log score, and those of a kind of likelihood.

    Observations of several classes at once, which have neither an order nor a probability each, have the log score.
    """

    method = "log score"

    def __init__(self, reader: DensityReader, y: Tensor, site: str) -> None:
        self.reader, self.y, self.site = reader, y, site
        self.num = 0
        self.log_score: Any = None

    def add(self, draw: Draw, log_density: Tensor) -> None:
        """Take in one draw."""
        self.log_score = log_density if self.log_score is None else torch.logaddexp(self.log_score, log_density)
        self.num += 1

    def finish(self) -> dict[str, Tensor]:
        """``log_score`` and all others, a value an observation."""
        return {"log_score": self.log_score - math.log(self.num), **self.others()}

    def others(self) -> dict[str, Tensor]:
        """The scores that go with the log score."""
        return {}


class Gaussian(Scorer):
    """Predictions that are normal given hyperparameters: y ~ N(m, v), with m and v linear in the moments of f."""

    method = "gaussian"

    def __init__(self, reader: DensityReader, y: Tensor, site: str, gp: str) -> None:
        super().__init__(reader, y, site)
        self.gp = gp
        self.recent: list[tuple[Tensor, Tensor]] = []
        self.distance = self.pit = self.own = self.between = torch.zeros(())
        self.pairs = 0

    def add(self, draw: Draw, log_density: Tensor) -> None:
        super().add(draw, log_density)
        m, v = _predictive_moments(self.reader, draw, self.site, self.gp)
        self.distance = self.distance + _expected_distance(self.y - m, v)
        self.pit = self.pit + dist.Normal(0.0, 1.0).cdf((self.y - m) / v.sqrt())
        self.own = self.own + _expected_distance(torch.zeros_like(m), 2 * v)
        for other, spread in self.recent:
            self.between = self.between + _expected_distance(m - other, v + spread)
        self.pairs += len(self.recent)
        self.recent = [*self.recent, (m, v)][-_LAGS:]

    def others(self) -> dict[str, Tensor]:
        # E|Y − y| − ½ E|Y − Y'|: of two draws from the mixture, one in S pairs has the same component.
        inner = self.own / self.num
        if self.pairs:
            inner = inner / self.num + (1 - 1 / self.num) * self.between / self.pairs
        return {"crps": self.distance / self.num - 0.5 * inner, "pit": (self.pit / self.num).clamp(0, 1)}


class Bernoulli(Scorer):
    """Two classes: CRPS is (P(1) − y)²."""

    method = "bernoulli"

    def others(self) -> dict[str, Tensor]:
        observed = (self.log_score - math.log(self.num)).exp()
        one = torch.where(self.y > 0.5, observed, 1 - observed)
        uniform = torch.rand_like(one)
        pit = torch.where(self.y > 0.5, 1 - one * (1 - uniform), (1 - one) * uniform)
        return {"crps": (one - self.y).square(), "pit": pit.clamp(0, 1)}


class Classes(Scorer):
    """Classes 0 to K − 1, with their predictive probabilities Pₖ.

    Without an order: the Brier score Σₖ (Pₖ − 1[y = k])² (Brier, 1950), and the level of the smallest set of classes,
    the most probable first, that holds y. With one: the ranked probability score Σₖ (Fₖ − 1[y ≤ k])² over k < K − 1
    (Epstein, 1969), which is the CRPS of the class number, and the PIT. Level and PIT are randomised, so that they are
    uniform where predictions are right.
    """

    def __init__(self, reader: DensityReader, y: Tensor, site: str, num: int, ordered: bool) -> None:
        super().__init__(reader, y, site)
        self.method = "ordered" if ordered else "categorical"
        self.classes = [torch.full_like(y, k) for k in range(num)]
        self.log_probs: Any = None

    def add(self, draw: Draw, log_density: Tensor) -> None:
        super().add(draw, log_density)
        held = [{**draw.held, self.site: y} for y in self.classes]
        log_probs = torch.stack([self.reader.density(self.site, each, draw.moments) for each in held]).double()
        self.log_probs = log_probs if self.log_probs is None else torch.logaddexp(self.log_probs, log_probs)

    def others(self) -> dict[str, Tensor]:
        probs = (self.log_probs - math.log(self.num)).exp()  # (K, N)
        observed = torch.stack([self.y == k for k in self.classes]).to(probs)
        own = (probs * observed).sum(0)
        uniform = torch.rand_like(own)
        if self.method == "ordered":
            below, seen = probs.cumsum(0), observed.cumsum(0)
            pit = ((1 - seen) * probs).sum(0) + uniform * own
            return {"rps": (below - seen)[:-1].square().sum(0), "pit": pit.clamp(0, 1)}
        earlier = (observed.cumsum(0) == 0) & (probs == own)  # of equals, the first is taken for the more probable
        level = (probs * ((probs > own) | earlier)).sum(0) + uniform * own
        return {"brier": (probs - observed).square().sum(0), "set_level": level.clamp(0, 1)}


class Draws(Scorer):
    """CRPS and PIT from a draw of y for each draw of everything else."""

    method = "draws"

    def __init__(self, reader: DensityReader, y: Tensor, site: str) -> None:
        super().__init__(reader, y, site)
        self.draws: list[Tensor] = []

    def add(self, draw: Draw, log_density: Tensor) -> None:
        super().add(draw, log_density)
        self.draws.append(draw.sites[self.site]["fn"].sample().to(self.y))

    def others(self) -> dict[str, Tensor]:
        y, num = self.y, self.num
        if num < 2 or self.draws[0].shape != y.shape:
            return {name: torch.full_like(self.log_score, torch.nan) for name in ("crps", "pit")}
        below = sum((drawn < y).to(y) for drawn in self.draws)
        equal = sum((drawn == y).to(y) for drawn in self.draws)
        distance = sum((drawn - y).abs() for drawn in self.draws)
        # Σ|yᵢ − yⱼ| over pairs by ranks, some rows at a time; the fair estimate, without bias in S.
        rank = (2 * torch.arange(num, dtype=torch.float64, device=y.device) - num + 1)[:, None]
        columns = [part.flatten() for part in self.draws]
        between = torch.cat(
            [
                (rank * torch.stack(rows).sort(0).values.double()).sum(0)
                for rows in zip(*(column.split(max(1, 2**23 // num)) for column in columns))
            ]
        )
        spread = between.to(y).reshape(y.shape) / (num * (num - 1))
        pit = (below + torch.rand_like(y) * (equal + 1)) / (num + 1)
        return {"crps": distance / num - spread, "pit": pit.clamp(0, 1)}


def scorer_for(reader: DensityReader, draw: Draw, site: str, ordered: Optional[bool] = None) -> Scorer:
    """The scorer for an observed site, with as much in closed form as its likelihood allows."""
    node = draw.sites[site]
    y = node["value"].to(next(iter(draw.moments.values()))[0]) if draw.moments else node["value"]
    fn, is_single = bare(node["fn"]), not node["fn"].event_shape
    if isinstance(fn, torch.distributions.Categorical):
        has_order = isinstance(fn, OrderedLogistic) if ordered is None else ordered
        return (
            Classes(reader, node["value"], site, fn.logits.shape[-1], has_order)
            if is_single
            else Scorer(reader, y, site)
        )
    if ordered is not None:
        raise ValueError(f"ordered is for classes; the distribution of site {site!r} is {type(fn).__name__}")
    plan = (reader.plans or {}).get(site)
    gp = plan.quadratic if plan is not None and list(plan.aligned.values()) == [True] else None
    if gp is not None and is_single and isinstance(fn, torch.distributions.Normal):
        return Gaussian(reader, y, site, gp)  # a parabola in f, so that the mean is linear in it and the variance fixed
    return (Bernoulli if isinstance(fn, (torch.distributions.Bernoulli, Probit)) else Draws)(reader, y, site)


def _predictive_moments(reader: DensityReader, draw: Draw, site: str, gp: str) -> tuple[Tensor, Tensor]:
    """m(h) and v + (m(h + 1) − m(h))² d, of y ~ N(m(f), v) with m linear."""
    h, d = draw.moments[gp]
    here, moved = (reader.site({**draw.held, **draw.functions, gp: f}, site)["fn"] for f in (h, h + 1))
    return here.mean, here.variance + (moved.mean - here.mean).square() * d


def _expected_distance(delta: Tensor, variance: Tensor) -> Tensor:
    """E|X| of X ~ N(δ, v): 2√v φ(δ/√v) + δ(2Φ(δ/√v) − 1)."""
    scale = variance.sqrt()
    z = delta / scale
    normal = dist.Normal(0.0, 1.0)
    return 2 * scale * normal.log_prob(z).exp() + delta * (2 * normal.cdf(z) - 1)
