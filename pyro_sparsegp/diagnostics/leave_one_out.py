"""Leave-one-out cross-validation of approximate posteriors, for ``arviz_stats.compare``."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np

from .backend import FEWEST, arviz_stats, pandas, xarray
from .given import is_tree, nothing_unmasked
from .weights import log_ratio_of, tree_of, weights_of


def loo(
    tree_or_model: Union[xarray.DataTree, Callable],
    *args: Any,
    target: Optional[str] = None,
    var_name: Union[str, Sequence[str], None] = None,
    num_samples: Optional[int] = None,
    **kwargs: Any,
) -> arviz_stats.utils.ELPDData:
    """PSIS-LOO of a posterior, with the weights of its draws towards the target: an ``arviz_stats.ELPDData``.

    ``loo(tree)`` of a tree made by :func:`to_datatree`, or ``loo(model, guide, x, y)``. The weight of a draw in the
    leave-one-out posterior of datum n is p/q / p(yₙ | draw)^wₙ (Magnusson, Andersen, Jonasson and Vehtari, 2019,
    eq. 8), smoothed. wₙ is the row's weight (``poutine.scale``), by default 1; the density of a row counts once
    whatever its weight. Draws by MCMC have p/q = 1. Hyperparameters fitted as points are not
    fitted again without datum n. A low k-hat does not say that q is wide enough (:func:`psis`).

    :param tree_or_model: a tree made by :func:`to_datatree`; or the model, followed in ``args`` by the guide and the
        training arguments.
    :param args: the guide and the training arguments, after a model.
    :param target: "vfe" or "fitc", see :func:`psis`, by default the tree's own. "none" takes p/q = 1, and so judges
        q itself. If k-hat of p/q is above ``good_k`` of :func:`psis`, loo warns and does the same.
    :param var_name: the observed site, or several that observe the same rows: a row is then left out of all of them,
        and its density is the product over these sites. By default all.
    :param num_samples: S, draws of the guide. By default as many as :func:`psis` takes.
    :param kwargs: further arguments of :func:`to_datatree`.
    :returns: ArviZ's result, with three more attributes: the ``target`` used, and ``khat`` of p/q (NaN for the target
        "none", −∞ for MCMC) with its standard error ``khat_se``. ``warning`` is set if k-hat is too large.
    """
    tree = tree_of("loo", tree_or_model, args, target, num_samples, kwargs)
    stock = arviz_stats.loo  # which gives arrays their .azstats, too
    size = tree.posterior.sizes["chain"] * tree.posterior.sizes["draw"]
    if size < FEWEST:
        raise ValueError(f"leave-one-out needs at least {FEWEST} draws, the tree has {size}")
    sites = _sites(tree, var_name)
    name, log_densities = " + ".join(sites), [terms.reset_coords(drop=True) for terms in sites.values()]
    terms = functools.reduce(operator.add, log_densities).rename(name)
    log_ratio, used, khat, khat_se, reff = _towards(tree, target)
    shape = terms.shape[2:]
    rows = sum(  # log p(yₙ | draw)^wₙ
        np.broadcast_to(part.coords.get(f"{site}_weight", 1.0), shape).ravel() * part.values.reshape(size, -1)
        for site, part in sites.items()
    )
    groups = {"posterior": tree.posterior.to_dataset(), "log_likelihood": terms.to_dataset()}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        # psislw takes log q − log p: p(yₙ | draw)^wₙ q/p.
        # ArviZ's own weights leave out p/q and wₙ: both are given, smoothed by its psislw.
        log_weights, pareto_k = arviz_stats.base.array_stats.psislw(np.transpose(rows) - log_ratio, r_eff=reff, axis=-1)
        result = stock(
            xarray.DataTree.from_dict(groups),
            pointwise=True,
            var_name=name,
            reff=reff,
            log_weights=terms.copy(data=log_weights.T.reshape(terms.shape)),
            pareto_k=terms[0, 0].copy(data=pareto_k.reshape(shape)),
        )
    if not np.isfinite(result.elpd):
        raise ValueError(
            "leave-one-out is not finite: all weight is on one draw. The posterior is too far from the target; train "
            'longer, take a richer family, or leave the weights p/q out by target="none".'
        )
    result.target, result.khat, result.khat_se, result.approx_posterior = used, khat, khat_se, used != "none"
    result.warning = bool(result.warning) or khat > result.good_k
    return result


def compare(
    results: Mapping[str, Union[xarray.DataTree, arviz_stats.utils.ELPDData]],
    target: Optional[str] = None,
    **kwargs: Any,
) -> pandas.DataFrame:
    """A table that compares trees, or results of :func:`loo`, by ``arviz_stats.compare``.

    All rows have one estimator: if one guide's weights p/q fail, all are judged without weights.

    :param results: names to trees or results.
    :param target: of :func:`loo`, for trees.
    :param kwargs: of ``arviz_stats.compare``.
    :returns: a ``pandas.DataFrame``, best first.
    :raises ValueError: if a result is neither, or if only some results have weights.
    """
    stock, given = arviz_stats.compare, results.values() if isinstance(results, Mapping) else [results]
    wrong = next((type(one).__name__ for one in given if not (is_tree(one) or hasattr(one, "elpd"))), None)
    if wrong:
        raise ValueError(f"compare needs a mapping of names to trees or results of loo, {{'a': tree}}, got {wrong}")
    trees = {name: result for name, result in results.items() if is_tree(result)}
    elpds: dict[str, Any] = {**results, **{name: loo(tree, target=target) for name, tree in trees.items()}}
    # Weighted sums of some beside plain ones of others differ by more than the models; MCMC needs no weights.
    khats = [one.khat for one in elpds.values() if getattr(one, "target", "") == "none"]
    if not all(khat == -np.inf for khat in khats):
        elpds |= {name: loo(tree, target="none") for name, tree in trees.items() if elpds[name].target != "none"}
        weighted = [name for name, one in elpds.items() if getattr(one, "target", "none") != "none"]
        if weighted:
            raise ValueError(
                f"compare: {weighted[0]!r} was found with importance weights, another row without: give trees, or make "
                'all results by loo(..., target="none").'
            )
    return stock(elpds, **kwargs)


def _towards(tree: xarray.DataTree, target: Optional[str]) -> tuple[Any, str, float, float, float]:
    """log p/q of the draws or 0, the target used, k-hat of p/q with its error, the share of independent draws."""
    if "log_q" not in tree["sample_stats"]:  # by MCMC
        # Of several chains the tail that is smoothed grows with 1/√r_eff; of one stock ArviZ takes r_eff = 1.
        shares = [np.ones(1)]
        if tree.posterior.sizes["chain"] > 1:
            ess = tree.posterior.to_dataset().azstats.ess(method="mean", relative=True)
            shares = [share.values.ravel() for share in ess.values()]
        return 0.0, "none", -np.inf, 0.0, np.hstack(shares).mean()
    if target == "none":
        return 0.0, "none", np.nan, np.nan, 1.0
    found = weights_of(tree, target)
    if found.khat <= found.good_k:
        return log_ratio_of(tree, found.target).values.ravel(), found.target, found.khat, found.khat_se, 1.0
    warnings.warn(
        f"the weights p/q of the draws towards {found.target!r} have k-hat {found.khat:.2f} ± {found.khat_se:.2f}, "
        f"above {found.good_k:.2f}: q is too far from the target to be corrected. They are left out, as by "
        'target="none": loo judges q as it is. Train longer, or take a richer family.',
        stacklevel=3,
    )
    return 0.0, "none", found.khat, found.khat_se, 1.0


def _sites(tree: xarray.DataTree, var_name: Union[str, Sequence[str], None]) -> dict[str, xarray.DataArray]:
    """The log likelihoods of one observed site, or of several with the same rows, 0 where one has no observation.

    :raises ValueError: where the tree has none, none of its rows, or the sites have other rows.
    """
    group = tree["log_likelihood"].data_vars if "log_likelihood" in tree.children else {}
    names = [var_name] if isinstance(var_name, str) else list(var_name or group)
    if not names or not set(names) <= set(group):
        raise ValueError(
            f"loo found no log likelihood of {var_name!r} in the tree, it has {list(group)}: name one, var_name=..., "
            "or make the tree by to_datatree with log_likelihood=True, of a model with observed sites. A pyro.factor "
            "holds no observations that could be left out."
        )
    sites = {name: group[name] for name in names}
    empty = next((name for name, terms in sites.items() if not terms.size), None)
    if empty is not None:
        raise nothing_unmasked(empty)
    if len(sites) == 1:
        return sites
    plates = {tree["observed_data"][name].dims[0] for name in sites}
    if len(plates) > 1 or any(terms.ndim > 3 for terms in sites.values()):
        raise ValueError(
            f"sites {names} do not observe the same rows, which could be left out of all of them: name one, "
            "var_name=..., or several of one plate"
        )
    # Rows are numbered along the plate; a site that a mask leaves some of names its dimension itself.
    rows = [terms.rename({terms.dims[-1]: next(iter(plates))}) for terms in sites.values()]
    return dict(zip(sites, xarray.align(*rows, join="outer", fill_value=0.0)))
