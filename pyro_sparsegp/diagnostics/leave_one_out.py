"""Leave-one-out cross-validation of approximate posteriors, for ``arviz_stats.compare``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import numpy as np
import torch

from ..program.masks import unmasked_rows
from .backend import FEWEST, arviz_stats, pandas, smooth, xarray
from .draws import seeded
from .given import kind_of, nothing_unmasked, require_tree
from .groups import plate_names
from .sources import SampleSource, as_source, observed_site
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
    :param target: "vfe" or "fitc", as of :func:`psis`; "none" leaves p/q out, and judges the posterior as it is. By
        default the tree's own; but "none", with a warning, where the k-hat of p/q is above 0.7.
    :param var_name: the observed site, where there are several.
    :returns: with two attributes more, ``target``, the one used, and ``khat`` of p/q (NaN where it was not asked for,
        −∞ of MCMC); ``warning`` is set where k-hat is above 0.7.
    """
    if target not in (None, "vfe", "fitc", "none"):
        why = "; given w the data depend on each other under it, and leave no terms to leave out" * (target == "exact")
        raise ValueError(f"loo's target must be 'vfe', 'fitc' or 'none', got {target!r}{why}")
    stock = arviz_stats.loo  # which gives arrays their .azstats, too
    tree = tree_of(tree_or_model, args, target, kwargs)
    size = tree.posterior.sizes["chain"] * tree.posterior.sizes["draw"]
    if size < FEWEST:
        raise ValueError(f"leave-one-out needs at least {FEWEST} draws, the tree has {size}")
    terms = _terms(tree, var_name)
    sample_stats = tree.children.get("sample_stats")
    log_ratio: Any = 0.0
    used, khat, reff = "none", -np.inf, 1.0
    if sample_stats is not None and "log_q" in sample_stats:
        khat = np.nan
        if target != "none":
            wanted = target or sample_stats.attrs["target"]
            found = log_weights_of(tree, wanted)
            used, khat = _choose(found.values, wanted, target is not None)
            log_ratio = 0.0 if used == "none" else found
    elif tree.posterior.sizes["chain"] > 1:  # of MCMC; of one chain stock ArviZ takes draws for independent as well
        ess = tree.posterior.to_dataset().azstats.ess(method="mean")
        reff = np.hstack([ess[name].values.ravel() for name in ess.data_vars]).mean() / size
    weights = terms.coords.get(f"{terms.name}_weight", 1.0)
    with np.errstate(all="ignore"):
        # psislw takes log q − log p: p(yₙ | draw)^wₙ q/p.
        log_weights, pareto_k = (weights * terms.astype("float64") - log_ratio).azstats.psislw(
            r_eff=reff, dim=["chain", "draw"]
        )
        result = stock(tree, pointwise=True, var_name=terms.name, log_weights=log_weights, pareto_k=pareto_k)
    return _flagged(result, used, khat)


def compare(
    results: Mapping[str, Union[xarray.DataTree, arviz_stats.utils.ELPDData]],
    target: Optional[str] = None,
    **kwargs: Any,
) -> pandas.DataFrame:
    """``arviz_stats.compare`` of trees, or of what :func:`loo` and :func:`loo_large` returned, by name.

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
    """PSIS-LOO for large N: all log predictive densities by streaming, importance sampling for a random subset.

    The difference estimator, Σₙ πₙ + N/m Σ_{n in subset} (elpdₙ − πₙ) with πₙ = log mean over draws of p(yₙ | draw)
    (Magnusson, Vehtari, Jonasson and Andersen, 2020, eq. 7), by ``arviz_stats.loo_subsample``. Memory is O(N + S·m).

    Expect "none" for guides trained by mini-batches on large data: log p/q moves with the error of training in units
    of the posterior's spread, which falls as 1/√N. An optimal q(w) with points for hyperparameters has equal weights
    at any N (SGPR); there k-hat is low.

    :param model: the model.
    :param guide: a fitted guide, or an object that has one.
    :param args: the training arguments.
    :param observations: m; by default 400, or all of fewer.
    :param num_samples: S, draws.
    :param target: as of :func:`loo`: by default the guide's own, or "none" where k-hat is above 0.7.
    :param var_name: the observed site, where there are several.
    :param chunk_size: rows whose features are held in memory at once.
    :param seed: of the draws and of the subset: with the same seed, two models are compared on the same subset.
    :returns: an ``arviz_stats.ELPDData``, with ``subsampling_se``, for :func:`compare`; ``target`` and ``khat`` as of
        :func:`loo`.
    """
    stock = arviz_stats.loo_subsample
    if target not in (None, "vfe", "fitc", "none"):
        raise ValueError(f"loo_large's target must be 'vfe', 'fitc' or 'none', got {target!r}")
    if num_samples < FEWEST:
        raise ValueError(f"loo_large needs num_samples of at least {FEWEST}, got {num_samples}")
    source = as_source(model, guide, args, kwargs, False, chunk_size)
    if isinstance(source, SampleSource):
        raise ValueError("loo_large streams draws of a guide; of MCMC, whose draws hold f itself, use loo")
    name = observed_site(source, var_name)
    log_ratio = np.empty(num_samples)
    with seeded(seed):
        for s in range(num_samples):
            draw = source.draw()
            densities = source.densities(draw)
            terms = densities.integrated[name].double()
            if s == 0:
                wanted = source.target if target in (None, "none") else target
                seen = unmasked_rows(draw.sites[name])
                rows = (torch.ones_like(terms) if seen is None else seen.expand(terms.shape)).flatten().nonzero()[:, 0]
                if not len(rows):
                    raise nothing_unmasked(name)
                observations = min(400, len(rows)) if observations is None else observations
                if not 1 <= observations <= len(rows):
                    raise ValueError(f"observations must be between 1 and {len(rows)}, got {observations}")
                subset = np.sort(np.random.default_rng(seed).choice(len(rows), observations, replace=False))
                running = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=terms.device)
                chosen = np.empty((observations, num_samples))
            terms = terms.flatten()[rows]
            running = torch.logaddexp(running, terms)
            chosen[:, s] = terms[torch.from_numpy(subset).to(terms.device)].cpu().numpy()
            log_joint = source.log_joints(draw, densities)["lp_fitc" if wanted == "fitc" else "lp"]
            log_ratio[s] = float(log_joint - draw.log_q)
    used, khat = ("none", np.nan) if target == "none" else _choose(log_ratio[None], wanted, target is not None)
    scale = torch.as_tensor(source.reader.scales[name]).expand(densities.integrated[name].shape).flatten()
    weights = scale[rows.to(scale.device)].double().cpu().numpy()[subset]
    dim = plate_names(name, draw.sites[name])[0] if densities.integrated[name].dim() == 1 else "obs"
    dims, coords = ["chain", "draw", dim], {"chain": [0], "draw": np.arange(num_samples)}
    lpd = xarray.DataArray((running - np.log(num_samples)).cpu().numpy(), dims=[dim])

    def whole(values: np.ndarray) -> xarray.DataArray:
        # ArviZ reads m columns of N. The others are never written: they take no memory.
        array = np.zeros((len(rows), num_samples))
        array[subset] = values
        return xarray.DataArray(array.T[None], dims=dims, coords=coords)

    with np.errstate(all="ignore"), warnings.catch_warnings():
        # ArviZ's k-hats, and its word on them, are of weights that leave out p/q and wₙ: these take their place.
        warnings.filterwarnings("ignore", "Estimated shape parameter")
        ratio = weights[:, None] * chosen - (0.0 if used == "none" else log_ratio)
        log_weights, pareto_k = arviz_stats.base.array_stats.psislw(ratio, axis=-1)
        tree = xarray.DataTree.from_dict(
            {
                "log_likelihood": whole(chosen).to_dataset(name=name),
                "observed_data": lpd.to_dataset(name=name),
                "posterior": xarray.Dataset(coords=coords),
            }
        )
        found = stock(
            tree,
            observations=subset,
            pointwise=True,
            var_name=name,
            reff=1.0,
            method="plpd",
            log_lik_fn=lambda observed, data: lpd,
            log_weights=whole(log_weights),
        )
    found.pareto_k[{dim: subset}] = pareto_k
    found.warning, found.approx_posterior = bool((pareto_k > found.good_k).any()), used != "none"
    return _flagged(found, used, khat)


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
    found.target, found.khat = used, khat
    found.warning = bool(found.warning) or khat > LIMIT
    return found
