"""Importance weights of posterior draws, smoothed, with the k-hat that says whether they are of use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np

from .backend import FEWEST, arviz_stats, xarray
from .given import guide_of, is_tree
from .tree import to_datatree

_DENSITIES = {"vfe": "lp", "fitc": "lp_fitc", "exact": "lp_exact"}  # in sample_stats, by target


def good_k(num: int) -> float:
    """min(1 − 1/log₁₀ S, 0.7), up to which the weights of S draws may be trusted (Vehtari et al., 2024)."""
    return min(1 - 1 / np.log10(num), 0.7)


@dataclass(frozen=True)
class PSIS:
    """Pareto-smoothed importance weights of the draws of a tree.

    If k-hat is low, ``arviz_base.extract(tree, num_samples=1000, weights=np.exp(found.log_weights))`` resamples a
    posterior's draws to the target.

    :param log_weights: ``xarray.DataArray`` ``(chain, draw)``, normalised over all draws.
    :param khat: k-hat of the weights; −∞ where all are equal. A q that is too narrow may have a low one (:func:`psis`).
    :param target: what the draws are weighted towards.
    :param good_k: min(1 − 1/log₁₀ S, 0.7) for S draws, up to which the weights may be trusted.
    """

    log_weights: xarray.DataArray
    khat: float
    target: str
    good_k: float

    @property
    def khat_se(self) -> float:
        """The standard error of k-hat: another seed's differs by as much. 0.15 for 1,000 draws, 0.1 for 5,000."""
        num = self.log_weights.size
        tail = min(num / 5, 3 * num**0.5)
        # (1 + k)/√M of a maximum likelihood fit to M draws; psislw's prior, worth 10, shrinks it by M/(M + 10).
        return max(1 + self.khat, 0.0) * tail**0.5 / (tail + 10)

    @property
    def is_sure(self) -> bool:
        """Whether k-hat is known to 0.1, or is two standard errors from :attr:`good_k`."""
        return self.khat_se <= 0.1 or abs(self.khat - self.good_k) > 2 * self.khat_se

    @property
    def ess(self) -> float:
        """1/Σw², the effective number of draws."""
        return float(np.exp(-np.logaddexp.reduce(2 * self.log_weights.values.ravel())))

    def __repr__(self) -> str:
        return (
            f"PSIS(target={self.target!r}, khat={self.khat:.2f} ± {self.khat_se:.2f}, good_k={self.good_k:.2f}, "
            f"ess={self.ess:.0f} of {self.log_weights.size})"
        )


def psis(
    tree_or_model: Union[xarray.DataTree, Callable],
    *args: Any,
    target: Optional[str] = None,
    num_samples: Optional[int] = None,
    **kwargs: Any,
) -> PSIS:
    """Pareto-smoothed importance weights of a posterior's draws, and their k-hat.

    ``psis(model, guide, x, y)``, or ``psis(tree)`` of a tree made by :func:`to_datatree`. Trust the weights if
    k-hat is at most min(0.7, 1 − 1/log₁₀ S). k-hat compares q with one target only:

    * "vfe" (default): p(θ) p(w) exp Σₙ E[log p(yₙ | fₙ) | w]. It shows errors of the family and the optimiser, and is
      as cheap as a prediction. It does not show that inducing points are too few.
    * "fitc": p(θ) p(w) Πₙ ∫ p(yₙ | fₙ) p(fₙ | w) dfₙ, the target of expectation propagation.
    * "exact": p(θ) p(w) p(y | w, θ), the model itself, in O(N³). It also shows errors of the sparse approximation.

    k-hat looks only where q has draws. A q that is too narrow can have a low k-hat: in one model mean field had 0.39,
    its interval of an intercept a tenth as wide as it should be. A low k-hat says that the weights are reliable where
    q has mass. :func:`sbc`, or NUTS on part of the data, shows whether q is wide enough. Held-out coverage may not:
    in predictions f makes up for the intercept.

    (Yao, Vehtari, Simpson and Gelman, 2018; Vehtari et al., 2024.)

    :param tree_or_model: a tree made by :func:`to_datatree`; or the model, followed in ``args`` by the guide and the
        training arguments.
    :param args: the guide and the training arguments, after a model.
    :param target: "vfe", "fitc" or "exact"; by default the tree's own.
    :param num_samples: S, draws of the guide. By default 1,000. With few rows (at most 10,000) draws
        are added until k-hat's standard error is 0.1 or half of its distance from the threshold, up to 10,000 draws.
    :param kwargs: further arguments of :func:`to_datatree`.
    :raises ValueError: for MCMC draws, which need no weights, or if the tree was made for another target.
    """
    # Weights need the sums of log likelihoods alone.
    options = kwargs if is_tree(tree_or_model) else {"_pointwise": False, **kwargs}
    return weights_of(tree_of("psis", tree_or_model, args, target, num_samples, options), target)


def weights_of(tree: xarray.DataTree, target: Optional[str]) -> PSIS:
    """The weights of a tree's draws towards a target, by default its own."""
    target = target or tree.sample_stats.attrs.get("target", "vfe")
    raw = log_ratio_of(tree, target)
    smoothed, khat = _smoothed(raw.values.ravel())
    return PSIS(raw.copy(data=smoothed.reshape(raw.shape)), khat, target, good_k(raw.size))


def _smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed log weights, normalised, and k-hat, of draws' log p − log q."""
    if log_weights.size < FEWEST:
        raise ValueError(f"k-hat needs at least {FEWEST} draws, got {log_weights.size}: take more, num_samples=1000")
    psislw = arviz_stats.base.array_stats.psislw
    # Equal weights, but for rounding, have no tail to fit (test_loo_says_when_weights_fail).
    if np.ptp(log_weights) <= 1e-4:
        return np.full_like(log_weights, -np.log(log_weights.size)), -np.inf
    with np.errstate(all="ignore"):
        smoothed, khat = psislw(log_weights.max() - log_weights)  # takes log q − log p, as made for leave-one-out
    return np.asarray(smoothed, dtype=np.float64), float(np.nan_to_num(khat, nan=np.inf, posinf=np.inf))


def log_ratio_of(tree: xarray.DataTree, target: str) -> xarray.DataArray:
    """log p − log q of a tree's draws towards a target, ``(chain, draw)``."""
    stats: Any = tree.children.get("sample_stats", {})
    name = _DENSITIES[target]
    lacks = (
        ("lp", "the tree has no lp in sample_stats: make it by to_datatree with log_likelihood=True"),
        ("log_q", "the tree has no log_q: draws by MCMC are of the posterior itself and need no weights"),
        (name, f"the tree has no {name}: make it by to_datatree(..., exact=True), in O(N³) each."),
    )
    for density, why in lacks:
        if density not in stats:
            raise ValueError(why)
    bad = ~np.isfinite(stats[name].values)
    if bad.any():
        # Of a likelihood with bounded support E[log p] is −∞, its integrated density is not
        # (test_an_expected_density_that_is_infinite_is_told_of).
        raise ValueError(
            f"{name}, the log density towards the target {target!r}, is not finite in {int(bad.sum())} of {bad.size} "
            "draws: the likelihood has no density at some function values that the posterior allows. "
            + 'E[log p(y | f)] is then infinite; the target "fitc" takes integrated densities. ' * (target == "vfe")
            + "Look for data at the edge of the likelihood's support, and hyperparameters at extremes."
        )
    return stats[name] - stats["log_q"]  # of θ and w, both in float64


def tree_of(
    function: str, tree_or_model: Any, args: tuple, target: Optional[str], num: Optional[int], kwargs: dict[str, Any]
) -> xarray.DataTree:
    """A tree that was given, or one made of a model, a guide and the training arguments.

    :param num: of draws; by default 1,000, and of up to 10,000 rows more while k-hat leaves open whether to trust the
        weights.
    """
    targets = (*_DENSITIES,) if function == "psis" else ("vfe", "fitc", "none")
    if target not in (None, *targets):
        raise ValueError(f"{function}'s target must be one of {targets}, got {target!r}")
    if is_tree(tree_or_model) and "posterior" in tree_or_model.children:
        if args or kwargs or num is not None:
            raise ValueError(f"a tree takes no further arguments, got {len(args)} and {sorted(kwargs)}")
        if "sample" in tree_or_model["posterior"].sizes:
            raise ValueError('this tree has all draws along "sample": give the one with chains and draws')
        return tree_or_model
    if not args or not callable(tree_or_model) or guide_of(tree_or_model) is not None:
        raise ValueError(
            f"{function} needs the model, its guide and the training data: {function}(model, guide, x, y). Or a tree: "
            f"{function}(diagnostics.to_datatree(model, guide, x, y)). Got {type(tree_or_model).__name__} first and "
            f"{len(args)} more."
        )
    kwargs = {"exact": target == "exact", "posterior_predictive": False, **kwargs}
    for size in [1000, 4000, 10_000] if num is None else [num]:
        tree = to_datatree(tree_or_model, *args, num_samples=size, **kwargs)
        is_weighed = target != "none" and "log_q" in tree["sample_stats"]
        numbers = size * sum(part.size for part in tree.children.get("observed_data", {}).values())
        # Leave-one-out of 1,000 rows takes seconds for 1,000 draws.
        if size == num or numbers > 10_000_000 or not is_weighed or weights_of(tree, target).is_sure:
            break
    return tree
