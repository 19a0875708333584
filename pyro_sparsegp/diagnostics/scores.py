"""How well a posterior predicts data: proper scores, PIT and coverage of each observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..program.bare import unmasked, unmasked_rows
from .backend import pandas, xarray
from .draws import seeded
from .given import nothing_unmasked
from .groups import attributes, plate_names
from .scorers import scorer_for
from .sources import as_source, observed_site

__all__ = ["PredictiveScores", "predictive_scores"]

_SCORES = ("log_score", "crps", "rps", "brier")


@dataclass(frozen=True)
class PredictiveScores:
    """Scores of each observation.

    :param tree: ``xarray.DataTree`` with the group ``predictive_scores``: ``log_score`` (nats, larger is better),
        ``crps`` (in the data's units, smaller is better) and ``pit``, each a value an observation. Ordered classes have
        ``rps``, the ranked probability score, in place of ``crps``; classes without an order have ``brier``, the Brier
        score from 0 to 2, and in place of ``pit`` ``set_level``, the probability of the smallest set of classes, the
        most probable first, that holds the observation.
        ``plot_ecdf_pit(scores.tree, group="predictive_scores", var_names="pit", sample_dims=[...])`` draws the PIT.
    :param method: "gaussian", "bernoulli", "ordered", "categorical", "draws" or "log score": how they were found.
    :param probs: the probabilities of the central intervals, or sets of classes.
    """

    tree: xarray.DataTree
    method: str
    probs: tuple[float, ...]

    @property
    def pointwise(self) -> xarray.Dataset:
        """The scores as an ``xarray.Dataset``."""
        return self.tree["predictive_scores"].to_dataset()

    def _of(self, name: str) -> np.ndarray:
        """A score of what was observed: what a mask leaves out is NaN."""
        values = self.pointwise[name].values
        return values[~np.isnan(values)] if np.isfinite(values).any() else values

    def coverage(self, prob: float) -> float:
        """The share of observations within their central interval, or set of classes, of that probability."""
        kind = next((name for name in ("set_level", "pit") if name in self.pointwise), None)
        if kind is None:
            raise ValueError(f"there are no intervals of these observations, only {list(self.pointwise.data_vars)}")
        return float(self._within(kind, prob).mean())

    def _within(self, kind: str, prob: float) -> np.ndarray:
        """1 where the smallest interval or set that holds an observation has at most a probability, 0 elsewhere."""
        levels = self._of(kind) if kind == "set_level" else 2 * np.abs(self._of(kind) - 0.5)
        return np.where(np.isnan(levels), np.nan, levels <= prob)

    @property
    def summary(self) -> pandas.DataFrame:
        """Means over observations with their standard errors, a ``pandas.DataFrame``."""
        columns = {name: self._of(name) for name in _SCORES if name in self.pointwise}
        for kind in {"set_level", "pit"} & set(self.pointwise):
            columns |= {f"coverage_{100 * prob:g}%": self._within(kind, prob) for prob in self.probs}
        rows = {name: (values.mean(), values.std() / math.sqrt(values.size)) for name, values in columns.items()}
        return pandas.DataFrame.from_dict(rows, orient="index", columns=["mean", "se"])

    def __repr__(self) -> str:
        return f"PredictiveScores(method={self.method!r})\n{self.summary}"


def predictive_scores(
    model: Callable,
    guide: Any,
    *args: Any,
    num_samples: int = 100,
    probs: Sequence[float] = (0.5, 0.9, 0.95),
    var_name: Optional[str] = None,
    ordered: Optional[bool] = None,
    chunk_size: int = 8192,
    seed: Optional[int] = None,
    **kwargs: Any,
) -> PredictiveScores:
    """Scores of a posterior's predictions of observations: held-out ones, or the training data.

    The predictive density is p(y | data) = E_{q(θ)} ∫ p(y | f, θ) q(f | θ) df: function values are integrated in
    closed form or by quadrature, and only hyperparameters are drawn. Where the likelihood is normal with a mean linear
    in f, so that predictions are mixtures of normals, CRPS and PIT are in closed form, too (Grimit, Gneiting, Berrocal
    and Johnson, 2006, eq. 5); so they are for a Bernoulli likelihood. Classes (``Categorical``) have predictive
    probabilities, and of these the ranked probability score where they are ordered (Epstein, 1969), the Brier score
    where they are not (Brier, 1950). Otherwise scores come from a draw of y for each of θ and f: take more samples
    there.

    The PIT of discrete data is randomised (Czado, Gneiting and Held, 2009), and with the PIT goes coverage: an
    observation is within the central interval of probability p if abs(PIT − ½) ≤ p/2. Classes without an order have
    sets in place of intervals. What a mask leaves out has no score: rows are dropped, single outputs are NaN.

    Memory is O(S·N).

    :param model: the model.
    :param guide: a fitted guide, an object that has one, or an ``MCMC`` that has run on the training data.
    :param args: the model's arguments with observations. Latents under the data plate are the training rows' where the
        inputs are theirs, and drawn from the model elsewhere.
    :param num_samples: S, draws of hyperparameters, and of coefficients of GP sites with one posterior; one will do
        where there are neither.
    :param probs: of the central intervals in the summary.
    :param var_name: the observed site, where there are several.
    :param ordered: whether classes have an order; by default only under ``OrderedLogistic``.
    :param chunk_size: rows whose features are held in memory at once.
    :param seed: makes the draws repeatable and leaves the global generators alone.
    :param kwargs: the model's further arguments.
    :raises ValueError: where the guide or the arguments do not fit.
    """
    if not all(0 < prob < 1 for prob in probs):
        raise ValueError(f"probs must lie strictly between 0 and 1, got {list(probs)}")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    source = as_source(model, guide, args, kwargs, chunk_size=chunk_size, marginal=True)
    site = observed_site(source, var_name)
    log_densities, kept = [], []
    with seeded(seed), torch.no_grad():
        for s in range(num_samples):
            draw = source.draw()
            log_densities.append(source.densities(draw).integrated[site].double())
            if s == 0:
                scorer = scorer_for(source.reader, draw, site, ordered)
            kept.append(scorer.read(draw))
        log_score = torch.logsumexp(torch.stack(log_densities), 0) - math.log(num_samples)
        others = scorer.scores(log_score, *(torch.stack(parts) for parts in zip(*kept)))
    values = _where_observed({"log_score": log_score, **others}, draw.sites[site])
    known = plate_names(site, draw.sites[site])
    # Of an observation with several outputs the density is one, CRPS and PIT are each output's.
    dims = known if len(known) == log_score.dim() else [f"{site}_dim_{i}" for i in range(log_score.dim())]
    more = [f"{site}_output_{i}" for i in range(draw.sites[site]["value"].dim() - len(dims))]
    arrays = {name: value.cpu().numpy() for name, value in values.items()}
    coords = {dim: np.arange(size) for dim, size in zip(dims, log_score.shape)}
    dataset = xarray.Dataset({name: ([*dims, *more][: a.ndim], a) for name, a in arrays.items()}, coords=coords)
    if len(dims) == 1:  # an observation each, of which the masked ones are left out
        dataset = dataset.isel({dims[0]: np.flatnonzero(dataset["log_score"].notnull())})
    dataset = dataset.assign_attrs(attributes(observed=site, method=scorer.method, posterior=source.name))
    return PredictiveScores(xarray.DataTree.from_dict({"predictive_scores": dataset}), scorer.method, tuple(probs))


def _where_observed(scores: dict[str, Tensor], node: Any) -> dict[str, Tensor]:
    """Scores with NaN where a mask leaves out what was to be predicted.

    :raises ValueError: where it leaves out all.
    """
    values, rows = unmasked(node), unmasked_rows(node)
    if values is None or rows is None:
        return scores
    if not rows.any():
        raise nothing_unmasked(node["name"])
    return {
        name: score.where(rows if score.shape == rows.shape else values, torch.nan) for name, score in scores.items()
    }
