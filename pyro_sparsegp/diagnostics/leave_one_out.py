"""Leave-one-out cross-validation of approximate posteriors, for ``arviz_stats.compare``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import numpy as np

from .backend import FEWEST, arviz_stats, pandas, smooth, xarray
from .given import kind_of, nothing_unmasked, require_tree
from .weights import LIMIT, log_weights_of, tree_of

__all__ = ["compare", "loo", "loo_large"]


def loo(
    tree_or_model: Union[xarray.DataTree, Callable],
    *args: Any,
    target: Optional[str] = None,
    var_name: Optional[str] = None,
    **kwargs: Any,
) -> arviz_stats.utils.ELPDData:
    """PSIS-LOO of a posterior, with the weights of its draws towards the target: an ``arviz_stats.ELPDData``.

    ``loo(tree)`` of a tree made by :func:`to_datatree`, or ``loo(model, guide, *args, num_samples=...)``. The weight
    of a draw in the leave-one-out posterior of datum n is p/q / p(yₙ | draw)^wₙ (Magnusson, Andersen, Jonasson and
    Vehtari, 2019, eq. 8), smoothed; wₙ is the row's weight (``poutine.scale``), by default 1, and the density of a row
    is counted once whatever its weight. Draws by MCMC have p/q = 1. Hyperparameters that are points are left as they
    are, for each datum left out: nothing here judges them. Nor does a low k-hat say that q is wide enough
    (:func:`psis`).

    :param tree_or_model: a tree made by :func:`to_datatree`; or the model, followed in ``args`` by the guide and the
        training arguments.
    :param args: see there.
    :param target: "vfe" or "fitc", see :func:`psis`; "none" leaves p/q out, and judges the posterior as it is. By
        default the tree's own, or "none", with a warning, if the k-hat of p/q is above 0.7.
    :param var_name: the observed site, where there are several.
    :returns: with two attributes more, ``target``, the one used, and ``khat`` of p/q (NaN for the target "none",
        −∞ of MCMC); ``warning`` is set where k-hat is above 0.7.
    """
    if target not in (None, "vfe", "fitc", "none"):
        why = "; given w the data depend on each other under it, and leave no terms to leave out" * (target == "exact")
        raise ValueError(f"loo's target must be 'vfe', 'fitc' or 'none', got {target!r}{why}")
    return _leave_out(tree_of(tree_or_model, args, target, kwargs), target, var_name, None)


def compare(
    results: Mapping[str, Union[xarray.DataTree, arviz_stats.utils.ELPDData]],
    target: Optional[str] = None,
    **kwargs: Any,
) -> pandas.DataFrame:
    """A table that compares trees, or results of :func:`loo` and :func:`loo_large`, by ``arviz_stats.compare``.

    :param results: names to trees or results.
    :param target: of :func:`loo`, for trees.
    :param kwargs: of ``arviz_stats.compare``.
    :returns: a ``pandas.DataFrame``, best first.
    :raises ValueError: where a result is neither.
    """
    if not isinstance(results, Mapping):
        raise ValueError(f"compare needs a mapping of names to trees, {{'a': tree}}, got {kind_of(results)}")
    stock = arviz_stats.compare
    elpds: dict[str, Any] = dict(results)
    for name, result in elpds.items():
        if not hasattr(result, "elpd"):
            require_tree(f"compare, for {name!r},", result)
    elpds = {name: one if hasattr(one, "elpd") else loo(one, target=target) for name, one in elpds.items()}
    return stock(elpds, **kwargs)


def loo_large(
    model: Callable,
    guide: Any,
    *args: Any,
    observations: Optional[int] = None,
    num_samples: int = 500,
    target: Optional[str] = None,
    var_name: Optional[str] = None,
    chunk_size: int = 8192,
    seed: int = 0,
    **kwargs: Any,
) -> arviz_stats.utils.ELPDData:
    """PSIS-LOO for large N: all log predictive densities, and importance sampling for a random subset of rows.

    The difference estimator, Σₙ πₙ + N/m Σ_{n in subset} (elpdₙ − πₙ) with πₙ = log mean over draws of p(yₙ | draw)
    (Magnusson, Vehtari, Jonasson and Andersen, 2020, eq. 7), by ``arviz_stats.loo_subsample``. Memory is that of the
    log likelihood, S·N numbers.

    Expect "none" for guides trained by mini-batches on large data: log p/q moves with the error of training in units
    of the posterior's spread, which falls as 1/√N. An optimal q(w) with points for hyperparameters has equal weights
    at any N (SGPR); there k-hat is low.

    :param model: the model.
    :param guide: a fitted guide, or an object that has one.
    :param args: the training arguments.
    :param observations: m; by default 400, or all of fewer.
    :param num_samples: S, draws.
    :param target: see :func:`loo`: by default the guide's own, or "none" where k-hat is above 0.7.
    :param var_name: the observed site, where there are several.
    :param chunk_size: rows whose features are held in memory at once.
    :param seed: of the draws and of the subset: with the same seed, two models are compared on the same subset.
    :returns: an ``arviz_stats.ELPDData``, with ``subsampling_se``, for :func:`compare`; ``target`` and ``khat`` as in
        :func:`loo`.
    """
    if target not in (None, "vfe", "fitc", "none"):
        raise ValueError(f"loo_large's target must be 'vfe', 'fitc' or 'none', got {target!r}")
    options = {"num_samples": num_samples, "chunk_size": chunk_size, "seed": seed, **kwargs}
    tree = tree_of(model, (guide, *args), target, options)
    rng = np.random.default_rng(seed)

    def choose(num: int) -> np.ndarray:
        m = min(400, num) if observations is None else observations
        if not 1 <= m <= num:
            raise ValueError(f"observations must be between 1 and {num}, got {m}")
        return np.sort(rng.choice(num, m, replace=False))

    return _leave_out(tree, target, var_name, choose)


def _leave_out(
    tree: xarray.DataTree, target: Optional[str], var_name: Optional[str], choose: Optional[Callable]
) -> arviz_stats.utils.ELPDData:
    """Leave-one-out of a tree: of all rows, or of those that ``choose`` takes of so many."""
    stock, stock_of_some = arviz_stats.loo, arviz_stats.loo_subsample  # which give arrays their .azstats, too
    size = tree.posterior.sizes["chain"] * tree.posterior.sizes["draw"]
    if size < FEWEST:
        raise ValueError(f"leave-one-out needs at least {FEWEST} draws, the tree has {size}")
    terms = _terms(tree, var_name)
    log_ratio, used, khat, reff = _towards(tree, target, size)
    shape = terms.shape[2:]
    subset = np.arange(terms[0, 0].size) if choose is None else choose(terms[0, 0].size)
    weights = np.broadcast_to(terms.coords.get(f"{terms.name}_weight", 1.0), shape).ravel()[subset]
    rows = terms.values.reshape(size, -1)[:, subset].astype("float64").T
    options: dict[str, Any] = {"pointwise": True, "var_name": terms.name}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        # psislw takes log q − log p: p(yₙ | draw)^wₙ q/p.
        found = arviz_stats.base.array_stats.psislw(weights[:, None] * rows - log_ratio, r_eff=reff, axis=-1)
        log_weights = np.zeros((np.prod(shape, dtype=int), size))  # rows that are not chosen take no memory
        pareto_k = np.full(len(log_weights), np.nan)
        log_weights[subset], pareto_k[subset] = found
        given = terms.copy(data=log_weights.T.reshape(terms.shape))
        khats = terms[0, 0].copy(data=pareto_k.reshape(shape))
        if choose is None:
            return _flagged(stock(tree, **options, log_weights=given, pareto_k=khats), used, khat)
        # πₙ = log 1/S Σ p(yₙ | draw), of all rows.
        lpd = terms[0, 0].copy(data=np.logaddexp.reduce(terms.values.reshape(size, *shape), dtype="float64"))
        lpd = (lpd - np.log(size)).rename(terms.name)
        rest = {"posterior": tree.posterior, "log_likelihood": tree.log_likelihood, "observed_data": lpd}
        tree = xarray.DataTree.from_dict({name: group.to_dataset() for name, group in rest.items()})
        # ArviZ's own k-hats, and its word on them, are of weights that leave out p/q and wₙ.
        warnings.filterwarnings("ignore", "Estimated shape parameter")
        options |= {"observations": subset, "reff": reff, "method": "plpd", "log_weights": given}
        result = stock_of_some(tree, **options, log_lik_fn=lambda observed, data: lpd)
    result.pareto_k = khats
    result.warning = bool((pareto_k[subset] > result.good_k).any())
    return _flagged(result, used, khat)


def _towards(tree: xarray.DataTree, target: Optional[str], size: int) -> tuple[Any, str, float, float]:
    """log p/q of the draws or 0, the target used, k-hat of p/q, and the share of draws that are independent."""
    stats = tree.children.get("sample_stats")
    if stats is not None and "log_q" in stats:
        if target == "none":
            return 0.0, "none", np.nan, 1.0
        wanted = target or stats.attrs["target"]
        log_ratio = log_weights_of(tree, wanted).values
        used, khat = _choose(log_ratio, wanted, target is not None)
        return (0.0 if used == "none" else log_ratio.ravel()), used, khat, 1.0
    if tree.posterior.sizes["chain"] == 1:  # of MCMC; stock ArviZ takes draws of one chain for independent as well
        return 0.0, "none", -np.inf, 1.0
    # Chains of MCMC are autocorrelated: the tail that is smoothed grows with 1/√r_eff.
    ess = tree.posterior.to_dataset().azstats.ess(method="mean")
    return 0.0, "none", -np.inf, np.hstack([ess[name].values.ravel() for name in ess.data_vars]).mean() / size


def _terms(tree: xarray.DataTree, var_name: Optional[str]) -> xarray.DataArray:
    """The log likelihood of one observed site.

    :raises ValueError: where the tree has none, several and no name is given, or none of its rows.
    """
    group = tree["log_likelihood"].data_vars if "log_likelihood" in tree.children else {}
    if not group or var_name not in (*group, *([None] if len(group) == 1 else [])):
        raise ValueError(
            f"loo found no log likelihood of {var_name!r} in the tree, it has {list(group)}: name one, var_name=..., "
            "or make the tree by to_datatree with log_likelihood=True, of a model with observed sites. A pyro.factor "
            "holds no observations that could be left out."
        )
    terms = group[var_name or next(iter(group))]
    if not terms.size:
        raise nothing_unmasked(str(terms.name))
    return terms


def _choose(log_weights: np.ndarray, wanted: str, asked: bool) -> tuple[str, float]:
    """The target to be used, and k-hat of the weights towards the one wanted."""
    khat = float(np.max([smooth(chain)[1] for chain in log_weights]))
    if khat <= LIMIT:
        return wanted, khat
    khat = np.inf if np.isnan(khat) else khat
    if asked:
        remedy = 'They add noise to leave-one-out; target="none" leaves them out, and judges the posterior as it is.'
    else:
        remedy = 'They are left out, as by target="none": leave-one-out judges the posterior as it is.'
    warnings.warn(
        f"the weights p/q of the draws towards {wanted!r} have k-hat {khat:.2f}, above {LIMIT}: the posterior is too "
        f"far from the target for them to mend it. {remedy}",
        stacklevel=3,
    )
    return (wanted if asked else "none"), khat


def _flagged(found: Any, used: str, khat: float) -> Any:
    if not np.isfinite(found.elpd):
        raise ValueError(
            "leave-one-out is not finite: all weight is on one draw. The posterior is too far from the target; train "
            'longer, take a richer family, or leave the weights p/q out by target="none".'
        )
    found.target, found.khat, found.approx_posterior = used, khat, used != "none"
    found.warning = bool(found.warning) or khat > LIMIT
    return found
