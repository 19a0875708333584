"""Leave-one-out cross-validation of approximate posteriors, for ``arviz_stats.compare``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import numpy as np

from .backend import FEWEST, arviz_stats, pandas, smooth, xarray
from .given import kind_of, nothing_unmasked, refuse_left, require_tree
from .weights import good_k, log_weights_of, tree_of

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
        default the tree's own, or "none", with a warning, if the k-hat of p/q is above ``good_k`` of :func:`psis`.
    :param var_name: the observed site, where there are several.
    :returns: with two attributes more, ``target``, the one used, and ``khat`` of p/q (NaN for the target "none",
        −∞ of MCMC); ``warning`` is set where k-hat is too large.
    """
    _require_target("loo", target)
    return _leave_out(tree_of(tree_or_model, args, target, kwargs), target, var_name, None)


def compare(
    results: Mapping[str, Union[xarray.DataTree, arviz_stats.utils.ELPDData]],
    target: Optional[str] = None,
    **kwargs: Any,
) -> pandas.DataFrame:
    """A table that compares trees, or results of :func:`loo` and :func:`loo_large`, by ``arviz_stats.compare``.

    :param results: names to trees or results.
    :param target: of :func:`loo`, for trees; where one's weights fail, all are judged by "none".
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
    trees = {name: one for name, one in elpds.items() if not hasattr(one, "elpd")}
    elpds |= {name: loo(tree, target=target) for name, tree in trees.items()}
    # One estimator for all rows: weighted sums of some beside plain ones of others differ by more than the models.
    if any(getattr(found, "target", "") == "none" and found.khat > found.good_k for found in elpds.values()):
        elpds |= {name: loo(tree, target="none") for name, tree in trees.items()}
    return stock(elpds, **kwargs)


def _require_target(function: str, target: Optional[str]) -> None:
    if target not in (None, "vfe", "fitc", "none"):
        why = "; given w the data depend on each other under it, and leave no terms to leave out" * (target == "exact")
        raise ValueError(f"{function}'s target must be 'vfe', 'fitc' or 'none', got {target!r}{why}")


def loo_large(
    model: Callable,
    guide: Any,
    *args: Any,
    observations: Optional[int] = None,
    num_samples: int = 500,
    target: Optional[str] = None,
    var_name: Optional[str] = None,
    seed: int = 0,
    **kwargs: Any,
) -> arviz_stats.utils.ELPDData:
    """PSIS-LOO for large N: all log predictive densities, and importance sampling for a random subset of rows.

    The difference estimator, Σₙ πₙ + N/m Σ_{n in subset} (elpdₙ − πₙ) with πₙ = log mean over draws of p(yₙ | draw)
    (Magnusson, Vehtari, Jonasson and Andersen, 2020, eq. 7), by ``arviz_stats.loo_subsample``. Memory is that of S·m
    numbers and of a block of draws.

    Expect "none" for guides trained by mini-batches on large data: log p/q moves with the error of training in units
    of the posterior's spread, which falls as 1/√N. An optimal q(w) with points for hyperparameters has equal weights
    at any N (SGPR); there k-hat is low.

    :param model: the model.
    :param guide: a fitted guide, or an object that has one.
    :param args: the training arguments.
    :param observations: m; by default 400, or all of fewer.
    :param num_samples: S, draws.
    :param target: see :func:`loo`: by default the guide's own, or "none" where k-hat is too large.
    :param var_name: the observed site, where there are several.
    :param seed: of the draws and of the subset: with the same seed, two models are compared on the same subset.
    :returns: an ``arviz_stats.ELPDData``, with ``subsampling_se``, for :func:`compare`; ``target`` and ``khat`` as in
        :func:`loo`.
    """
    refuse_left("loo_large", kwargs)
    _require_target("loo_large", target)

    def choose(num: int) -> np.ndarray:
        m = min(400, num) if observations is None else observations
        if not 1 <= m <= num:
            raise ValueError(f"observations must be between 1 and {num}, got {m}")
        return np.sort(np.random.default_rng(seed).choice(num, m, replace=False))

    options = {"num_samples": num_samples, "seed": seed, "_choose": choose, **kwargs}
    return _leave_out(tree_of(model, (guide, *args), target, options), target, var_name, choose)


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
    shape, num = terms.shape[2:], terms[0, 0].size
    subset = np.arange(num) if choose is None else choose(num)
    weights = np.broadcast_to(terms.coords.get(f"{terms.name}_weight", 1.0), shape).ravel()[subset]
    rows = terms.values.reshape(size, -1)[:, subset].astype("float64").T
    log_weights = np.zeros((num, size))  # rows that are not chosen take no memory
    pareto_k = np.full(num, np.nan)
    options: dict[str, Any] = {"pointwise": True, "var_name": terms.name}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        # psislw takes log q − log p: p(yₙ | draw)^wₙ q/p.
        found = arviz_stats.base.array_stats.psislw(weights[:, None] * rows - log_ratio, r_eff=reff, axis=-1)
        log_weights[subset], pareto_k[subset] = found
        given = terms.copy(data=log_weights.T.reshape(terms.shape))
        khats = terms[0, 0].copy(data=pareto_k.reshape(shape))
        if choose is None:
            result = stock(tree, **options, log_weights=given, pareto_k=khats)
        else:
            # πₙ = log 1/S Σ p(yₙ | draw), of all rows.
            lpd = terms[0, 0].copy(data=terms.coords[f"{terms.name}_lpd"].values).rename(terms.name)
            rest = {"posterior": tree.posterior, "log_likelihood": tree.log_likelihood, "observed_data": lpd}
            tree = xarray.DataTree.from_dict({name: group.to_dataset() for name, group in rest.items()})
            # ArviZ's own k-hats, and its word on them, are of weights that leave out p/q and wₙ.
            warnings.filterwarnings("ignore", "Estimated shape parameter")
            options |= {"observations": subset, "reff": reff, "method": "plpd", "log_weights": given}
            result = stock_of_some(tree, **options, log_lik_fn=lambda observed, data: lpd)
            result.pareto_k, result.warning = khats, bool((pareto_k[subset] > result.good_k).any())
    if not np.isfinite(result.elpd):
        raise ValueError(
            "leave-one-out is not finite: all weight is on one draw. The posterior is too far from the target; train "
            'longer, take a richer family, or leave the weights p/q out by target="none".'
        )
    result.target, result.khat, result.approx_posterior = used, khat, used != "none"
    result.warning = bool(result.warning) or khat > result.good_k
    return result


def _towards(tree: xarray.DataTree, target: Optional[str], size: int) -> tuple[Any, str, float, float]:
    """log p/q of the draws or 0, the target used, k-hat of p/q, and the share of draws that are independent."""
    stats = tree["sample_stats"]
    if "log_q" in stats:
        if target == "none":
            return 0.0, "none", np.nan, 1.0
        wanted = target or stats.attrs["target"]
        log_ratio = log_weights_of(tree, wanted).values
        khat = float(
            np.nan_to_num(np.max([smooth(chain)[1] for chain in log_ratio]), nan=np.inf, posinf=np.inf, neginf=-np.inf)
        )
        if khat > good_k(log_ratio.shape[1]):
            _warn(wanted, khat, good_k(log_ratio.shape[1]), target is not None)
            wanted = target or "none"
        return (0.0 if wanted == "none" else log_ratio.ravel()), wanted, khat, 1.0
    reff = 1.0  # of one chain of MCMC stock ArviZ takes the draws for independent as well
    if tree.posterior.sizes["chain"] > 1:  # they are autocorrelated: the tail that is smoothed grows with 1/√r_eff
        ess = tree.posterior.to_dataset().azstats.ess(method="mean")
        reff = np.hstack([ess[name].values.ravel() for name in ess.data_vars]).mean() / size
    return 0.0, "none", -np.inf, reff


def _warn(wanted: str, khat: float, limit: float, asked: bool) -> None:
    """Tell of weights that are not to be relied on."""
    remedy = 'They are left out, as by target="none": leave-one-out judges the posterior as it is.'
    if asked:
        remedy = 'They add noise to leave-one-out; target="none" leaves them out, and judges the posterior as it is.'
    warnings.warn(
        f"the weights p/q of the draws towards {wanted!r} have k-hat {khat:.2f}, above {limit:.2f}: the posterior is "
        f"too far from the target for them to mend it. {remedy}",
        stacklevel=4,
    )


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
