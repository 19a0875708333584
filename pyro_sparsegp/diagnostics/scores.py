"""How well a posterior predicts data: log score, CRPS, PIT and interval coverage of each observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from ..distributions import Probit
from . import backend
from .draws import Draw, base_of, seeded
from .labels import Labels, attributes
from .pointwise import Reader
from .sources import Source, as_source

__all__ = ["PredictiveScores", "predictive_scores"]

_LAGS = 16  # pairs of draws for each draw, in the CRPS of a mixture


@dataclass(frozen=True)
class PredictiveScores:
    """Scores of each observation.

    :param tree: ``xarray.DataTree`` with the group ``predictive_scores``: ``log_score`` (nats, larger is better),
        ``crps`` (in the data's units, smaller is better) and ``pit``, each a value an observation.
        ``plot_ecdf_pit(scores.tree, group="predictive_scores", var_names="pit", sample_dims=[...])`` draws the last.
    :param method: "gaussian", "bernoulli" or "draws": how CRPS and PIT were found.
    :param probs: the probabilities of the central intervals.
    """

    tree: Any
    method: str
    probs: tuple[float, ...]

    @property
    def pointwise(self) -> Any:
        """The scores as an ``xarray.Dataset``."""
        return self.tree["predictive_scores"].to_dataset()

    def coverage(self, prob: float) -> float:
        """The share of observations within their central interval of that probability."""
        return float((np.abs(self.pointwise["pit"].values - 0.5) <= prob / 2).mean())

    @property
    def summary(self) -> Any:
        """Means over observations with their standard errors, a ``pandas.DataFrame``."""
        import pandas as pd

        columns = {name: self.pointwise[name].values.ravel() for name in ("log_score", "crps")}
        inside = np.abs(self.pointwise["pit"].values.ravel() - 0.5)
        columns |= {f"coverage_{100 * prob:g}%": (inside <= prob / 2).astype(float) for prob in self.probs}
        rows = {name: (values.mean(), values.std() / math.sqrt(values.size)) for name, values in columns.items()}
        return pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "se"])

    def __repr__(self) -> str:
        return f"PredictiveScores(method={self.method!r})\n{self.summary}"


def predictive_scores(
    model: Callable,
    guide: Any,
    *args: Any,
    num_samples: int = 100,
    probs: Sequence[float] = (0.5, 0.9, 0.95),
    var_name: Optional[str] = None,
    chunk_size: int = 8192,
    seed: Optional[int] = None,
    **kwargs: Any,
) -> PredictiveScores:
    """Scores of a posterior's predictions of observations: held-out ones, or the training data.

    The predictive density is p(y | data) = E_{q(θ)} ∫ p(y | f, θ) q(f | θ) df: function values are integrated in
    closed form or by quadrature, and only hyperparameters are drawn. Where the likelihood is normal with a mean linear
    in f, so that predictions are mixtures of normals, CRPS and PIT are in closed form, too (Grimit, Gneiting, Berrocal
    and Johnson, 2006, eq. 5); so they are for a Bernoulli likelihood. Otherwise they come from a draw of y for each of
    θ and f: take more samples there. The PIT of discrete data is randomised (Czado, Gneiting and Held, 2009), and with
    the PIT goes coverage: an observation is within the central interval of probability p if |PIT − ½| ≤ p/2.

    Scores are streamed over draws: memory is O(N), or O(S·N) with draws of y.

    :param model: the model.
    :param guide: a fitted guide, an object that has one, or an ``MCMC`` that has run on the training data.
    :param args: the model's arguments with observations. With as many rows as there were in training, latents under
        the data plate are taken for the training rows'.
    :param num_samples: S, draws of hyperparameters; one will do where there are none.
    :param probs: of the central intervals in the summary.
    :param var_name: the observed site, where there are several.
    """
    xr = backend.xarray()
    if not all(0 < prob < 1 for prob in probs):
        raise ValueError(f"probs must lie strictly between 0 and 1, got {list(probs)}")
    source = as_source(model, guide, args, kwargs, chunk_size=chunk_size, marginal=True)
    site = var_name or source.data[0]
    if site not in source.data or (var_name is None and len(source.data) > 1):
        raise ValueError(f"var_name must be one of the observed sites {source.data}, got {var_name!r}")
    with seeded(seed), torch.no_grad():
        scorer: Optional[_Scorer] = None
        for _ in range(num_samples):
            draw = source.draw()
            log_density = source.densities(draw).integrated[site]
            if scorer is None:
                scorer = _scorer(source, draw, site)
            scorer.add(draw, log_density.double())
        if scorer is None:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        values = scorer.finish()
    labels = Labels(None, None)
    labels.learn(draw.data)
    mask = draw.data[site]["mask"]
    dims = labels.of(site, log_density.shape)
    arrays = {name: value.cpu().numpy() for name, value in values.items()}
    # Of an observation with several outputs the density is one, CRPS and PIT are each output's.
    more = {name: [f"{site}_output_{i}" for i in range(a.ndim - len(dims))] for name, a in arrays.items()}
    dataset = labels.dataset({name: ([*dims, *more[name]], a) for name, a in arrays.items()}, sampled=False)
    if isinstance(mask, Tensor) and log_density.dim() == 1:
        dataset = dataset.isel({dims[0]: np.flatnonzero(mask.expand(log_density.shape).cpu().numpy())})
    dataset = dataset.assign_attrs(attributes(observed=site, method=scorer.method, posterior=source.name))
    return PredictiveScores(xr.DataTree.from_dict({"predictive_scores": dataset}), scorer.method, tuple(probs))


class _Scorer:
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
        """log_score, crps and pit."""
        crps, pit = self.crps_and_pit()
        return {"log_score": self.log_score - math.log(self.num), "crps": crps, "pit": pit.clamp(0, 1)}

    def crps_and_pit(self) -> tuple[Tensor, Tensor]:
        """CRPS and PIT, a value an observation."""
        raise NotImplementedError


class _Gaussian(_Scorer):
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

    def crps_and_pit(self) -> tuple[Tensor, Tensor]:
        # E|Y − y| − ½ E|Y − Y'|: of two draws from the mixture, one in S pairs has the same component.
        inner = self.own / self.num
        if self.pairs:
            inner = inner / self.num + (1 - 1 / self.num) * self.between / self.pairs
        return self.distance / self.num - 0.5 * inner, self.pit / self.num


class _Bernoulli(_Scorer):
    method = "bernoulli"

    def crps_and_pit(self) -> tuple[Tensor, Tensor]:
        observed = (self.log_score - math.log(self.num)).exp()
        one = torch.where(self.y > 0.5, observed, 1 - observed)
        uniform = torch.rand_like(one)
        pit = torch.where(self.y > 0.5, 1 - one * (1 - uniform), (1 - one) * uniform)
        return (one - self.y).square(), pit


class _Draws(_Scorer):
    method = "draws"

    def __init__(self, source: Source, y: Tensor, site: str) -> None:
        super().__init__(source, y, site)
        self.draws: list[Tensor] = []

    def add(self, draw: Draw, log_density: Tensor) -> None:
        super().add(draw, log_density)
        self.draws.append(draw.data[self.site]["fn"].sample().to(torch.get_default_dtype()))

    def crps_and_pit(self) -> tuple[Tensor, Tensor]:
        y, num = self.y, self.num
        if num < 2 or self.draws[0].shape != y.shape:
            return torch.full_like(self.log_score, torch.nan), torch.full_like(self.log_score, torch.nan)
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
        return distance / num - spread, pit


def _expected_distance(delta: Tensor, variance: Tensor) -> Tensor:
    """E|X| of X ~ N(δ, v): 2√v φ(δ/√v) + δ(2Φ(δ/√v) − 1)."""
    scale = variance.sqrt()
    z = delta / scale
    normal = dist.Normal(0.0, 1.0)
    return 2 * scale * normal.log_prob(z).exp() + delta * (2 * normal.cdf(z) - 1)


def _scorer(source: Source, draw: Draw, site: str) -> _Scorer:
    node = draw.data[site]
    y = node["value"].to(next(iter(draw.moments.values()))[0]) if draw.moments else node["value"]
    fn = base_of(node["fn"])
    while hasattr(fn, "base_dist"):  # masks and expansions
        fn = fn.base_dist
    plan = (source.reader.plans or {}).get(site)
    if plan is not None and list(plan.aligned.values()) == [True] and not node["fn"].event_shape:
        gp = plan.quadratic
        normal = isinstance(fn, torch.distributions.Normal)
        if normal and gp is not None and _is_linear(source.reader, draw, site, gp):
            return _Gaussian(source, y, site, gp)
    if isinstance(fn, (torch.distributions.Bernoulli, Probit)):
        return _Bernoulli(source, y, site)
    return _Draws(source, y, site)


def _normal_at(reader: Reader, draw: Draw, site: str, gp: str, f: Tensor) -> tuple[Tensor, Tensor]:
    fn = reader.site({**draw.held, **draw.functions, gp: f}, site)["fn"]
    return fn.mean, fn.variance


def _predictive_moments(reader: Reader, draw: Draw, site: str, gp: str) -> tuple[Tensor, Tensor]:
    h, d = draw.moments[gp]
    mean, variance = _normal_at(reader, draw, site, gp, h)
    moved, _ = _normal_at(reader, draw, site, gp, h + 1)
    return mean, variance + (moved - mean).square() * d


def _is_linear(reader: Reader, draw: Draw, site: str, gp: str) -> bool:
    h, _ = draw.moments[gp]
    points = [_normal_at(reader, draw, site, gp, h + step) for step in (-1.0, 0.0, 1.0)]
    (low, v), (middle, _), (high, w) = points
    tolerance = 1e-6 if h.dtype == torch.float64 else 1e-3
    bent = (low + high - 2 * middle).abs() > tolerance * (high - low).abs()
    return not bent.any() and torch.allclose(v, w)
