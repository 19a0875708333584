"""Proper scores of one observed site, taken in draw by draw, by kind of likelihood."""

from __future__ import annotations

import math
from typing import Any, Optional

import pyro.distributions as dist
import torch
from pyro.distributions import OrderedLogistic
from torch import Tensor

from ...distributions.probit import Probit
from ...program.traces import bare
from ..export.draws import Draw
from ..export.sources import Source
from .pointwise import PointwiseReader

__all__ = ["Scorer", "scorer_for"]

_LAGS = 16  # pairs of draws for each draw, in the CRPS of a mixture


class Scorer:
    """Collects an observed site's scores over draws."""

    method: str

    def __init__(self, source: Source, y: Tensor, site: str) -> None:
        self.source, self.y, self.site = source, y, site
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


class LogScore(Scorer):
    """Observations of several classes at once, which have neither an order nor a probability each."""

    method = "log score"


class Gaussian(Scorer):
    """Predictions that are normal given hyperparameters: y ~ N(m, v), with m and v linear in the moments of f."""

    method = "gaussian"

    def __init__(self, source: Source, y: Tensor, site: str, gp: str) -> None:
        super().__init__(source, y, site)
        self.gp = gp
        self.recent: list[tuple[Tensor, Tensor]] = []
        self.distance = self.pit = self.own = self.between = torch.zeros(())
        self.pairs = 0

    def add(self, draw: Draw, log_density: Tensor) -> None:
        super().add(draw, log_density)
        m, v = _predictive_moments(self.source.reader, draw, self.site, self.gp)
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

    def __init__(self, source: Source, node: Any, site: str, num: int, ordered: bool) -> None:
        super().__init__(source, node["value"], site)
        self.method = "ordered" if ordered else "categorical"
        self.classes = [torch.full_like(node["value"], k) for k in range(num)]
        self.log_probs: Any = None

    def add(self, draw: Draw, log_density: Tensor) -> None:
        super().add(draw, log_density)
        reader = self.source.reader
        log_probs = torch.stack(
            [reader.density(self.site, {**draw.held, self.site: y}, draw.moments) for y in self.classes]
        ).double()
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

    def __init__(self, source: Source, y: Tensor, site: str) -> None:
        super().__init__(source, y, site)
        self.draws: list[Tensor] = []

    def add(self, draw: Draw, log_density: Tensor) -> None:
        super().add(draw, log_density)
        self.draws.append(draw.data[self.site]["fn"].sample().to(self.y))

    def others(self) -> dict[str, Tensor]:
        y, num = self.y, self.num
        if num < 2 or self.draws[0].shape != y.shape:
            return {name: torch.full_like(self.log_score, torch.nan) for name in ("crps", "pit")}
        below = equal = distance = torch.zeros_like(y)
        for drawn in self.draws:
            below, equal = below + (drawn < y), equal + (drawn == y)
            distance = distance + (drawn - y).abs()
        # Σ|yᵢ − yⱼ| over pairs by ranks, some rows at a time; the fair estimate, without bias in S.
        rank = 2 * torch.arange(num, dtype=torch.float64) - num + 1
        columns = [part.flatten() for part in self.draws]
        between = torch.empty(y.numel(), dtype=torch.float64)
        size = max(1, 2**23 // num)
        for start in range(0, y.numel(), size):
            ordered = torch.stack([part[start : start + size] for part in columns]).sort(0).values.double()
            between[start : start + size] = (rank[:, None].to(ordered) * ordered).sum(0).cpu()
        spread = between.to(y).reshape(y.shape) / (num * (num - 1))
        pit = (below + torch.rand_like(y) * (equal + 1)) / (num + 1)
        return {"crps": distance / num - spread, "pit": pit.clamp(0, 1)}


def _expected_distance(delta: Tensor, variance: Tensor) -> Tensor:
    """E|X| of X ~ N(δ, v): 2√v φ(δ/√v) + δ(2Φ(δ/√v) − 1)."""
    scale = variance.sqrt()
    z = delta / scale
    normal = dist.Normal(0.0, 1.0)
    return 2 * scale * normal.log_prob(z).exp() + delta * (2 * normal.cdf(z) - 1)


def scorer_for(source: Source, draw: Draw, site: str, ordered: Optional[bool] = None) -> Scorer:
    """The scorer for an observed site, with as much in closed form as its likelihood allows."""
    node = draw.data[site]
    y = node["value"].to(next(iter(draw.moments.values()))[0]) if draw.moments else node["value"]
    fn = bare(node["fn"])
    if isinstance(fn, torch.distributions.Categorical):
        if node["fn"].event_shape:
            return LogScore(source, y, site)
        has_order = isinstance(fn, OrderedLogistic) if ordered is None else ordered
        return Classes(source, node, site, fn.logits.shape[-1], has_order)
    if ordered is not None:
        raise ValueError(f"ordered is for classes; the distribution of site {site!r} is {type(fn).__name__}")
    plan = (source.reader.plans or {}).get(site)
    if plan is not None and list(plan.aligned.values()) == [True] and not node["fn"].event_shape:
        gp = plan.quadratic
        normal = isinstance(fn, torch.distributions.Normal)
        if normal and gp is not None and _is_linear(source.reader, draw, site, gp):
            return Gaussian(source, y, site, gp)
    if isinstance(fn, (torch.distributions.Bernoulli, Probit)):
        return Bernoulli(source, y, site)
    return Draws(source, y, site)


def _normal_at(reader: PointwiseReader, draw: Draw, site: str, gp: str, f: Tensor) -> tuple[Tensor, Tensor]:
    fn = reader.site({**draw.held, **draw.functions, gp: f}, site)["fn"]
    return fn.mean, fn.variance


def _predictive_moments(reader: PointwiseReader, draw: Draw, site: str, gp: str) -> tuple[Tensor, Tensor]:
    h, d = draw.moments[gp]
    mean, variance = _normal_at(reader, draw, site, gp, h)
    moved, _ = _normal_at(reader, draw, site, gp, h + 1)
    return mean, variance + (moved - mean).square() * d


def _is_linear(reader: PointwiseReader, draw: Draw, site: str, gp: str) -> bool:
    h, _ = draw.moments[gp]
    points = [_normal_at(reader, draw, site, gp, h + step) for step in (-1.0, 0.0, 1.0)]
    (low, v), (middle, _), (high, w) = points
    tolerance = 1e-6 if h.dtype == torch.float64 else 1e-3
    bent = (low + high - 2 * middle).abs() > tolerance * (high - low).abs()
    return not bent.any() and torch.allclose(v, w)
