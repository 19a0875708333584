"""Is a posterior right? Importance weights of its draws, with their k-hat, and simulation-based calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

import arviz_base
import arviz_stats
import numpy as np
import pyro
import torch
import xarray
from torch import Tensor
from tqdm import tqdm

from ..numerics.arguments import require_choice, require_count
from ..predict import predict
from .groups import attributes, name_of
from .sources import PriorSource, guide_of, is_tree, require_call
from .tree import to_datatree

_DENSITIES = {"vfe": "lp", "fitc": "lp_fitc"}  # in sample_stats, by target
_FEWEST = 25  # draws that a tail can be fitted to


@dataclass(frozen=True)
class PSIS:
    """Pareto-smoothed importance weights of the draws of a tree.

    If k-hat is low, ``arviz_base.extract(tree, num_samples=1000, weights=np.exp(found.log_weights))`` resamples a
    posterior's draws to the target.

    :param log_weights: ``xarray.DataArray`` ``(chain, draw)``, normalised over all draws.
    :param khat: k-hat of the weights; −∞ where all are equal. A q that is too narrow may have a low one (:func:`psis`).
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


def psis(
    tree_or_model: Union[xarray.DataTree, Callable],
    guide: Any = None,
    *args: Any,
    target: Optional[str] = None,
    num_samples: int = 1000,
    **kwargs: Any,
) -> PSIS:
    """Pareto-smoothed importance weights of a posterior's draws, and their k-hat.

    ``psis(model, guide, x, y)``, or ``psis(tree)`` of a tree made by :func:`to_datatree`. Trust the weights if
    k-hat is at most min(0.7, 1 − 1/log₁₀ S). k-hat compares q with one target only:

    * "vfe" (default): p(θ) p(w) exp Σₙ E[log p(yₙ | fₙ) | w]. It shows errors of the family and the optimiser, and is
      as cheap as a prediction. It does not show that inducing points are too few.
    * "fitc": p(θ) p(w) Πₙ ∫ p(yₙ | fₙ) p(fₙ | w) dfₙ, the target of expectation propagation.

    k-hat looks only where q has draws. A q that is too narrow can have a low k-hat: in one model mean field had 0.39,
    its interval of an intercept a tenth as wide as it should be. A low k-hat says that the weights are reliable where
    q has mass. :func:`sbc`, or NUTS on part of the data, shows whether q is wide enough. Held-out coverage may not:
    in predictions f makes up for the intercept.

    (Yao, Vehtari, Simpson and Gelman, 2018; Vehtari et al., 2024.)

    :param tree_or_model: a tree made by :func:`to_datatree`; or the model, followed by the guide and the training
        arguments.
    :param guide: the guide, after a model.
    :param args: the training arguments, after a model.
    :param target: "vfe" or "fitc"; by default the tree's own.
    :param num_samples: S, draws of the guide.
    :param kwargs: further arguments of :func:`to_datatree`.
    :raises ValueError: for MCMC draws, which need no weights, or if a density is not finite.
    """
    tree: Any = tree_or_model
    if not is_tree(tree):  # of which the sums of log likelihoods are enough: 400 MB for 1,000 draws of 10⁵ rows
        options = {"num_samples": num_samples, "posterior_predictive": False, "_pointwise": False}
        tree = to_datatree(tree, guide, *args, **options | kwargs)
    stats: Any = tree.children.get("sample_stats", {})
    if "log_q" not in stats:
        raise ValueError("the tree has no log_q: draws by MCMC are of the posterior itself and need no weights")
    target = target or stats.attrs.get("target", "vfe")
    require_choice(target, "psis's target", *_DENSITIES)
    name = _DENSITIES[target]
    if name not in stats:
        raise ValueError(f"the tree has no {name} in sample_stats: make it by to_datatree with log_likelihood=True")
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
    ratio = stats[name] - stats["log_q"]  # of θ and w, both in float64
    smoothed, khat = _smoothed(ratio.values.ravel())
    return PSIS(ratio.copy(data=smoothed.reshape(ratio.shape)), khat, target)


def _smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed log weights, normalised, and k-hat, of draws' log p − log q."""
    if log_weights.size < _FEWEST:
        raise ValueError(f"k-hat needs at least {_FEWEST} draws, got {log_weights.size}: take more, num_samples=1000")
    # Equal weights, but for rounding, have no tail to fit (test_khat_comes_with_its_standard_error).
    if np.ptp(log_weights) <= 1e-4:
        return np.full_like(log_weights, -np.log(log_weights.size)), -np.inf
    psislw = arviz_stats.base.array_stats.psislw  # type: ignore[attr-defined]
    with np.errstate(all="ignore"):
        smoothed, khat = psislw(log_weights.max() - log_weights)  # takes log q − log p, as made for leave-one-out
    return np.asarray(smoothed, dtype=np.float64), float(np.nan_to_num(khat, nan=np.inf, posinf=np.inf))


def sbc(
    model: Callable,
    fit: Callable,
    *args: Any,
    num_simulations: int = 200,
    num_samples: int = 199,
    rows: int = 4,
    observed: Optional[Mapping[str, str]] = None,
    progress: bool = True,
    seed: int = 0,
    **kwargs: Any,
) -> xarray.DataTree:
    """Simulation-based calibration of a (model, guide) pair (Talts et al., 2018; Modrák et al., 2023).

    Each simulation draws hyperparameters, functions and data from the prior, fits, and ranks the true values among
    draws of the posterior: the ranks are uniform if posteriors are right. Overconfident ones make ∪, too wide ones ∩.

    >>> def fit(x, y):                                                     # doctest: +SKIP
    ...     guide = AutoSparseGP(model, SGPR(16))
    ...     svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(2))
    ...     for _ in range(300):
    ...         svi.step(x, y)
    ...     return guide
    >>> tree = sbc(model, fit, x)                             # doctest: +SKIP
    >>> arviz_plots.plot_ecdf_pit(tree)                                    # doctest: +SKIP

    :param model: the model, that can be called without observations, ``model(*args, **kwargs)``.
    :param fit: a function of the same arguments and the simulated data that returns a fitted guide.
    :param args: the model's arguments without observations.
    :param num_simulations: fits.
    :param num_samples: L, posterior draws of each; ranks are 0 to L.
    :param rows: how many function values are ranked, spread evenly over the rows.
    :param observed: for observed sites, the name of the argument that takes their values, if it is not the site's.
    :param progress: whether to show a progress bar.
    :param seed: simulation s has the seed ``seed + s``: trees of other seeds, from other processes, may be joined by
        ``xarray.concat`` along ``draw``.
    :returns: an ``xarray.DataTree`` with a group ``prior_sbc``: for each latent site and each GP site's values at
        ``rows``, (rank + U)/(L + 1) with U uniform, dimensions ``(chain, draw, ...)``, a draw a simulation;
        ``arviz_plots.plot_ecdf_pit(tree)`` draws it.
    :raises ValueError: where the model observes nothing, or lacks an argument for its data.
    """
    order = "then the fitting function, then the model's arguments without data: (model, fit, x)"
    require_call("sbc", order, model, args, kwargs)
    require_count(num_simulations, "num_simulations")
    require_count(num_samples, "num_samples")
    require_count(rows, "sbc's rows")
    found, names = [], dict(observed or {})
    with torch.random.fork_rng(), pyro.get_param_store().scope():  # the caller's stays as it is
        source = PriorSource(model, args, kwargs, list(names))
        for s in tqdm(range(seed, seed + num_simulations), desc="simulations", disable=not progress):
            torch.manual_seed(s)
            found.append(_ranks(source, fit, names, num_samples, rows))
    ranks = {name: np.stack([one[name] for one in found])[None] for name in found[0]}
    attrs = attributes(num_samples=num_samples, model=name_of(model))
    dataset = arviz_base.dict_to_dataset(ranks).assign_attrs(attrs)
    return xarray.DataTree.from_dict({"prior_sbc": dataset})


def _ranks(
    source: PriorSource, fit: Callable, observed: dict[str, str], num_samples: int, rows: int
) -> dict[str, np.ndarray]:
    """The normalised ranks of one simulation."""
    truth, args, kwargs = source.make({}), source.args, source.kwargs
    if not truth.simulated:
        raise ValueError(
            f"sbc found no data among the sites {list(source.sites)} that the model draws: call it with arguments that "
            "leave observations out, and name the data, observed={site: argument}"
        )
    data = {observed.get(name, name): value for name, value in truth.simulated.items()}
    pyro.clear_param_store()
    try:
        result = fit(*args, **kwargs, **data)
    except TypeError as error:
        raise ValueError(
            f"fit could not be called with the simulated data as {sorted(data)} ({error}); give observed={{site: "
            "argument}}"
        ) from error
    guide = guide_of(result)
    if guide is None:
        raise ValueError(
            "sbc's fit must be a function of the model's arguments and the data that makes, trains and returns a new "
            f"guide; {type(fit).__name__} returned {type(result).__name__}"
        )
    # At the training inputs, of the model without data: latents of single rows have no draws of theirs there.
    draws = predict(source.model, guide, *args, num_samples=num_samples, joint=False, **kwargs)
    plates = {name: {frame.name for frame in site["cond_indep_stack"]} for name, site in source.sites.items()}
    of_data = set().union(*(plates[name] for name in truth.simulated))
    # Points have no posterior at all.
    shared = [name for name in truth.values if not plates[name] & of_data and not guide.is_point(name)]
    ranks = {name: _rank(draws[name], truth.values[name]) for name in shared}
    for name, value in truth.functions.items():
        num = value.shape[-1]
        chosen = np.linspace(0, num - 1, min(rows, num)).round().astype(int)
        ranks[name] = _rank(draws[name][..., chosen], value[..., chosen])
    return ranks


def _rank(draws: Tensor, value: Tensor) -> np.ndarray:
    # (rank + U)/(L + 1), uniform on [0, 1] for continuous and discrete values alike.
    below = (draws < value).sum(0)
    return ((below + torch.rand(value.shape, device=value.device)) / (len(draws) + 1)).double().cpu().numpy()
