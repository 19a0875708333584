"""How well a posterior predicts data: proper scores, PIT and coverage of each observation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import arviz_base
import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import torch
import xarray
from torch import Tensor

from ..distributions.probit import Probit
from ..guide import AutoSparseGP
from ..numerics.arguments import require_count
from ..program.traces import bare, unmasked, unmasked_rows
from .densities import DensityReader
from .sources import as_source, seeded
from .tree import plate_names

_LAGS = 16  # pairs of draws for each draw, in the CRPS of a mixture


@dataclass(frozen=True)
class PredictiveScores:
    """Scores of each observation.

    :param tree: ``xarray.DataTree`` with the group ``predictive_scores``: ``log_score`` (nats, larger is better),
        ``crps`` (in the data's units, smaller is better) and ``pit``, each a value an observation; of classes
        ``log_score`` alone. ArviZ's ``plot_ecdf_pit`` draws the PIT.
    :param method: "gaussian", "bernoulli", "draws" or "log score": how they were found.
    :param probs: the probabilities of the central intervals.
    """

    tree: xarray.DataTree
    method: str
    probs: tuple[float, ...]

    @property
    def pointwise(self) -> xarray.Dataset:
        """The scores as an ``xarray.Dataset``."""
        return self.tree["predictive_scores"].to_dataset()

    def coverage(self, prob: float) -> float:
        """The share of observations within their central interval of that probability."""
        return float(self._within(prob).mean())

    def _within(self, prob: float) -> xarray.DataArray:
        """1 where a central interval of a probability holds an observation, 0 elsewhere; NaN where there is no PIT."""
        if "pit" not in self.pointwise:
            raise ValueError(f"there are no intervals of these observations, only {list(self.pointwise.data_vars)}")
        pit = self.pointwise["pit"]
        return (abs(2 * pit - 1) <= prob).where(pit.notnull())

    @property
    def summary(self) -> pandas.DataFrame:
        """Means over observations with their standard errors, a ``pandas.DataFrame``."""
        columns = {name: self.pointwise[name] for name in ("log_score", "crps") if name in self.pointwise}
        if "pit" in self.pointwise:
            columns |= {f"coverage_{100 * prob:g}%": self._within(prob) for prob in self.probs}
        # What a mask leaves out is NaN, which does not count.
        rows = {name: (float(part.mean()), float(part.std() / part.count() ** 0.5)) for name, part in columns.items()}
        return pandas.DataFrame.from_dict(rows, orient="index", columns=["mean", "se"])

    def __repr__(self) -> str:
        return f"PredictiveScores(method={self.method!r})\n{self.summary}"


def predictive_scores(
    model: Callable,
    guide: AutoSparseGP,
    *args: object,
    num_samples: int = 100,
    probs: Sequence[float] = (0.5, 0.9, 0.95),
    var_name: Optional[str] = None,
    seed: Optional[int] = None,
    **kwargs: object,
) -> PredictiveScores:
    """Scores of a posterior's predictions of observations: held-out ones, or the training data.

    The predictive density is p(y | data) = E_{q(θ)} ∫ p(y | f, θ) q(f | θ) df: function values are integrated in
    closed form or by quadrature, and only the other latents are drawn. CRPS and PIT are in closed form for a Bernoulli
    likelihood, and for a normal one with a mean linear in f, whose predictions are mixtures of normals (Grimit,
    Gneiting, Berrocal and Johnson, 2006, eq. 5). Classes (``Categorical``) have log scores alone. For other likelihoods
    CRPS and PIT come from one draw of y for each draw of θ and f: take more samples there.

    The PIT of discrete data is randomised (Czado, Gneiting and Held, 2009). An observation is within the central
    interval of probability p if abs(PIT − ½) ≤ p/2. Masked rows are dropped, masked outputs NaN. Memory is O(S·N).

    :param model: the model.
    :param guide: a fitted guide, an object that has one, or an ``MCMC`` that has run on the training data.
    :param args: the model's arguments with observations. Latents under the data plate are the training rows' where the
        inputs are theirs, and drawn from the model elsewhere.
    :param num_samples: S, draws of hyperparameters, and of GP sites with one posterior; one will do without either.
    :param probs: the probabilities of the central intervals in the summary.
    :param var_name: the observed site, where there are several.
    :param seed: makes the draws repeatable and leaves the global generators alone.
    :param kwargs: the model's further arguments.
    :raises ValueError: where the guide or the arguments do not fit.
    """
    if not all(0 < prob < 1 for prob in probs):
        raise ValueError(f"probs must lie strictly between 0 and 1, got {list(probs)}")
    require_count(num_samples, "num_samples")
    source = as_source(model, guide, args, kwargs, marginal=True)
    named = [name for name in source.data if var_name in (None, name)]
    if len(named) != 1:
        raise ValueError(
            f"var_name must be one of the observed sites {source.data}, got {var_name!r}; pyro.factor observes nothing"
        )
    (site,) = named
    log_densities, kept = [], []
    with seeded(seed), torch.no_grad():
        for draws in source.draws(num_samples, simulates=True):
            densities = source.reader(draws.held, draws.moments)
            log_densities.append(densities.integrated[site].double())
            method, scored = _method(source.reader, source.sites[site])
            part = densities.normals[site] if method == "gaussian" else (draws.posterior_predictive[site] * 1.0,)
            if method == "bernoulli":
                has_outputs = bool(source.sites[site]["fn"].event_shape)
                read = source.reader.entries(site, draws.held, draws.moments) if has_outputs else log_densities[-1]
                part = (read.double(),)
            kept.append(part)
        node, parts = source.sites[site], [torch.cat(part) for part in zip(*kept)]
        # log p(y | data) = log (1/S) Σₛ ∫ p(y | f, θₛ) q(f | θₛ) df
        log_score = torch.logsumexp(torch.cat(log_densities), 0) - math.log(num_samples)
        scores = {"log_score": log_score, **scored(node["value"].to(parts[0]), *parts)}
    of = node["fn"], node["value"], node["mask"]
    seen = {mask.shape: mask for mask in (unmasked(*of), unmasked_rows(*of)) if mask is not None}
    if not all(mask.any() for mask in seen.values()):
        raise ValueError(
            f"site {site!r} has no observations: its masks leave out all rows. Name another site, var_name=..., or "
            "give the data that it is to be scored by."
        )
    scores = {name: score.where(seen[score.shape], torch.nan) if seen else score for name, score in scores.items()}
    # Of an observation with several outputs the density is one, CRPS and PIT are each output's.
    arrays, dims = {name: value.cpu().numpy() for name, value in scores.items()}, plate_names(site, node)
    labels: Any = {"dims": dict.fromkeys(arrays, dims), "sample_dims": [], "skip_event_dims": True}
    attrs = {**source.attrs, "observed": site, "method": method}
    dataset = arviz_base.dict_to_dataset(arrays, attrs=attrs, inference_library=pyro, **labels)
    if log_score.dim() == 1:  # an observation each, of which the masked ones are left out
        dataset = dataset.isel({dims[0]: np.flatnonzero(dataset["log_score"].notnull())})
    return PredictiveScores(xarray.DataTree.from_dict({"predictive_scores": dataset}), method, tuple(probs))


def _method(reader: DensityReader, node: dict[str, Any]) -> tuple[str, Callable[..., dict[str, Tensor]]]:
    """How a site is scored: a name, and a function of data and of normal predictions, log densities or draws."""
    fn, plan = bare(node["fn"]), reader.plans[node["name"]]
    if isinstance(fn, torch.distributions.Categorical):
        return "log score", lambda *_: {}
    if isinstance(fn, (torch.distributions.Bernoulli, Probit)):
        return "bernoulli", _of_two_classes
    alone = bool(plan.quadratic) and plan.aligned == dict.fromkeys(plan.quadratic, True)
    return ("gaussian", _of_normals) if alone and not node["fn"].event_shape else ("draws", _of_draws)


def _of_normals(y: Tensor, m: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Scores of an equal mixture of N(m, v), ``(S, ...)`` each."""
    pit = dist.Normal(m, v.sqrt()).cdf(y).mean(0)
    # E|Y − y| − ½ E|Y − Y'|: of two draws from the mixture, one in S pairs has the same component.
    inner = _expected_distance(torch.zeros_like(m), 2 * v).mean(0)
    lags = range(1, min(_LAGS + 1, len(m)))  # none of one draw
    # Pairs of draws that are no more than some lags apart stand for all pairs: O(S) and not O(S²).
    between = sum(_expected_distance(m[lag:] - m[:-lag], v[lag:] + v[:-lag]).sum(0) for lag in lags)
    inner = inner / len(m) + (1 - 1 / len(m)) * between / max(sum(len(m) - lag for lag in lags), 1)
    return {"crps": _expected_distance(y - m, v).mean(0) - 0.5 * inner, "pit": pit.clamp(0, 1)}


def _of_two_classes(y: Tensor, log_densities: Tensor) -> dict[str, Tensor]:
    """CRPS is (P(1) − y)², from log densities, ``(S, ...)``, of the class that was observed."""
    own = log_densities.exp().mean(0)
    one = torch.where(y > 0.5, own, 1 - own)
    # P(Y < y) + uP(Y = y) with u uniform, which is uniform itself if P is right (Czado, Gneiting and Held, 2009).
    below = (1 - one) * (y > 0.5)
    return {"crps": (one - y).square(), "pit": (below + own * torch.rand_like(own)).clamp(0, 1)}


def _of_draws(y: Tensor, drawn: Tensor) -> dict[str, Tensor]:
    """CRPS and PIT from draws of y, ``(S, ...)``."""
    num = len(drawn)
    if num < 2 or drawn[0].shape != y.shape:
        return {name: torch.full_like(y, torch.nan) for name in ("crps", "pit")}
    # Σ|yᵢ − yⱼ| over pairs by ranks; the fair estimate, without bias in S.
    rank = (2 * torch.arange(num).to(y) - num + 1).reshape(-1, *[1] * y.dim())
    spread = (rank * drawn.sort(0).values).sum(0) / (num * (num - 1))
    below, equal = (drawn < y).sum(0), (drawn == y).sum(0)
    pit = (below + torch.rand_like(y) * (equal + 1)) / (num + 1)
    return {"crps": (drawn - y).abs().mean(0) - spread, "pit": pit.clamp(0, 1)}


def _expected_distance(delta: Tensor, variance: Tensor) -> Tensor:
    """E|X| of X ~ N(δ, v): 2√v φ(δ/√v) + δ(2Φ(δ/√v) − 1)."""
    scale = variance.sqrt()
    z = delta / scale
    normal = dist.Normal(0.0, 1.0)
    return 2 * scale * normal.log_prob(z).exp() + delta * (2 * normal.cdf(z) - 1)
