"""Importance weights of a guide's draws, with their k-hat."""

from dataclasses import dataclass
from typing import Any

import arviz_stats
import numpy as np
import xarray

from ..numerics.arguments import refuse


@dataclass(frozen=True)
class PSIS:
    """Pareto-smoothed importance weights of the draws of a tree.

    ``arviz_base.extract(tree, num_samples=1000, weights=np.exp(found.log_weights))`` draws from the target.

    :param log_weights: ``xarray.DataArray`` ``(chain, draw)``, normalised over all draws.
    :param khat: k-hat of the weights (:func:`psis`); −∞ where all are equal.
    :param target: what the draws are weighted towards.
    """

    log_weights: xarray.DataArray
    khat: float
    target: str

    @property
    def good_k(self) -> float:
        """min(1 − 1/log₁₀ S, 0.7), up to which the weights of S draws may be trusted (Vehtari et al., 2024)."""
        return min(1 - 1 / np.log10(self.log_weights.size), 0.7)

    @property
    def khat_se(self) -> float:
        """The standard error of k-hat: another seed's differs by as much. 0.15 for 1,000 draws, 0.1 for 5,000."""
        num = self.log_weights.size
        tail = min(num / 5, 3 * num**0.5)
        # (1 + k)/√M of a maximum likelihood fit to M draws; psislw's prior, worth 10, shrinks it by M/(M + 10).
        return max(1 + self.khat, 0.0) * tail**0.5 / (tail + 10)

    @property
    def ess(self) -> float:
        """1/Σw², the effective number of draws."""
        return float(np.exp(-np.logaddexp.reduce(2 * self.log_weights.values.ravel())))

    def __repr__(self) -> str:
        return (
            f"PSIS(target={self.target!r}, khat={self.khat:.2f} ± {self.khat_se:.2f}, good_k={self.good_k:.2f}, "
            f"ess={self.ess:.0f} of {self.log_weights.size})"
        )


def psis(tree: xarray.DataTree) -> PSIS:
    """Pareto-smoothed importance weights of a posterior's draws, and their k-hat.

    Trust the weights if k-hat is at most min(0.7, 1 − 1/log₁₀ S). It compares q with the target that the guide was
    trained towards (:func:`to_datatree`). It shows errors of the family and the optimiser, and not whether inducing
    points are too few.

    k-hat looks only where q has draws: a q that is too narrow can have a low one (mean field had 0.39 with a tenth of
    an intercept's interval). Simulation-based calibration, or NUTS on part of the data, shows whether q is wide enough.
    Held-out coverage may not: in predictions f makes up for the intercept.

    (Yao, Vehtari, Simpson and Gelman, 2018; Vehtari et al., 2024.)

    :param tree: made by :func:`to_datatree`, of a guide.
    :raises ValueError: for MCMC draws, which need no weights, or if a density is not finite.
    """
    if not isinstance(tree, xarray.DataTree):
        raise ValueError(f"psis takes a tree, psis(to_datatree(model, guide, x, y)), got {type(tree).__name__}")
    stats: Any = tree.children.get("sample_stats", {})
    faults = {
        "the tree has no log_q: draws by MCMC are of the posterior itself and need no weights": "log_q" not in stats,
        "the tree has no lp in sample_stats: make it by to_datatree with log_likelihood=True": "lp" not in stats,
    }
    refuse(faults)
    target, bad = stats.attrs.get("target", "vfe"), ~np.isfinite(stats["lp"].values)
    ratio = stats["lp"] - stats["log_q"]  # of θ and w, both in float64
    # Of a likelihood with bounded support E[log p] is −∞, its integrated density is not.
    remedy = "E[log p(y | f)] is then infinite: train by expectation propagation. " if target == "vfe" else ""
    faults = {
        f"lp, the log density towards the target {target!r}, is not finite in {int(bad.sum())} of {bad.size} "
        f"draws: the likelihood has no density at some function values that the posterior allows. {remedy}"
        "Look for data at the edge of the likelihood's support, and hyperparameters at extremes.": bad.any(),
        # Fewer have no tail that a distribution could be fitted to.
        f"k-hat needs at least 25 draws, got {ratio.size}: take more, num_samples=1000": ratio.size < 25,
    }
    refuse(faults)
    log_weights, khat = ratio.values.ravel(), -np.inf
    # Equal weights, but for rounding, have no tail to fit (test_khat_comes_with_its_standard_error).
    if np.ptp(log_weights) <= 1e-4:
        smoothed = np.full_like(log_weights, -np.log(log_weights.size))
    else:
        psislw = arviz_stats.base.array_stats.psislw  # type: ignore[attr-defined]
        with np.errstate(all="ignore"):
            smoothed, khat = psislw(log_weights.max() - log_weights)  # takes log q − log p, as made for leave-one-out
    smoothed = np.asarray(smoothed, dtype=np.float64).reshape(ratio.shape)
    return PSIS(ratio.copy(data=smoothed), np.inf if np.isnan(khat) else float(khat), target)
