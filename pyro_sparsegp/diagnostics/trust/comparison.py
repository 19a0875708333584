"""Leave-one-out cross-validation of approximate posteriors, for ``arviz_stats.compare``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import torch

from ...program.masks import unmasked_rows
from ..export import backend
from ..export.arguments import is_tree, kind_of, require_tree
from ..export.backend import FEWEST
from ..export.draws import seeded
from ..export.labels import Labels
from ..export.samples import SampleSource
from ..export.sources import as_source, nothing_unmasked, observed_site, target_of
from .weights import LIMIT, _tree, log_weights_of

if TYPE_CHECKING:
    import arviz_stats.utils
    import pandas
    import xarray
else:
    arviz_stats = backend.Later("arviz_stats")
    pandas = backend.Later("pandas")
    xarray = backend.Later("xarray")

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
    of a draw in the leave-one-out posterior of datum n is p/q / p(yₙ | draw) (Magnusson, Andersen, Jonasson and
    Vehtari, 2019, eq. 8), smoothed. Draws by MCMC have p/q = 1. Hyperparameters that are points are left as they are,
    for each datum left out: nothing here judges them. Nor does a low k-hat say that q is wide enough (:func:`psis`).

    :param tree_or_model: a tree made by :func:`to_datatree`; or the model, followed in ``args`` by the guide and the
        training arguments.
    :param args: see there.
    :param target: "vfe" or "fitc", as of :func:`psis`; "none" leaves p/q out, and judges the posterior as it is. By
        default the tree's own; but "none", with a warning, where the k-hat of p/q is above 0.7.
    :param var_name: the observed site, where there are several.
    :returns: with two attributes more, ``target``, the one used, and ``khat`` of p/q (NaN where it was not asked for,
        −∞ of MCMC); ``warning`` is set where k-hat is above 0.7.
    """
    stats = backend.arviz_stats()
    if target not in (None, "vfe", "fitc", "none"):
        why = "; given w the data depend on each other under it, and leave no terms to leave out" * (target == "exact")
        raise ValueError(f"loo's target must be 'vfe', 'fitc' or 'none', got {target!r}{why}")
    tree = _tree(tree_or_model, args, target, kwargs)
    size = tree.posterior.sizes["chain"] * tree.posterior.sizes["draw"]
    if size < FEWEST:
        raise ValueError(f"leave-one-out needs at least {FEWEST} draws, the tree has {size}")
    _require_terms(tree, var_name)
    sample_stats = tree.children.get("sample_stats")
    approximate = sample_stats is not None and "log_q" in sample_stats
    used, khat = "none", np.nan if approximate else -np.inf
    log_weights: Any = None
    if sample_stats is not None and approximate and target != "none":
        wanted = target or sample_stats.attrs["target"]
        log_weights = log_weights_of(tree, wanted)
        used, khat = _choose(log_weights.values, wanted, target is not None)
    if used == "none":
        # r_eff of independent draws is 1; stock ArviZ estimates it from chains, of which MCMC may have one.
        independent = sample_stats is None or approximate or tree.posterior.sizes["chain"] == 1
        try:
            found = stats.loo(tree, pointwise=True, var_name=var_name, reff=1.0 if independent else None)
        except ValueError as error:
            if "tail values" not in str(error):
                raise
            of = "" if var_name is None else f" of {var_name!r}"
            raise ValueError(
                f"leaving out an observation{of} gives the largest weights, which are smoothed, all to draws "
                "that are equal: there are too few draws, or a chain stood still. Take more, num_samples=..."
            ) from error
    else:
        with np.errstate(all="ignore"):
            found = stats.loo_approximate_posterior(
                tree, log_p=log_weights, log_q=log_weights * 0.0, pointwise=True, var_name=var_name
            )
    return _flagged(found, used, khat)


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
    stats = backend.arviz_stats()
    if not isinstance(results, Mapping):
        raise ValueError(f"compare needs a mapping of names to trees, {{'a': tree}}, got {kind_of(results)}")
    for name, result in results.items():
        if not is_tree(result) and not hasattr(result, "elpd"):
            require_tree(f"compare, for {name!r},", result)
    elpds: dict[str, Any] = dict(results)
    elpds |= {name: loo(result, target=target) for name, result in elpds.items() if is_tree(result)}
    return stats.compare(elpds, **kwargs)


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
    stats, xr = backend.arviz_stats(), backend.xarray()
    if target not in (None, "vfe", "fitc", "none"):
        raise ValueError(f"loo_large's target must be 'vfe', 'fitc' or 'none', got {target!r}")
    if num_samples < FEWEST:
        raise ValueError(f"loo_large needs num_samples of at least {FEWEST}, got {num_samples}")
    source = as_source(model, guide, args, kwargs, False, chunk_size)
    if isinstance(source, SampleSource):
        raise ValueError("loo_large streams draws of a guide; of MCMC, whose draws hold f itself, use loo")
    site = observed_site(source, var_name)
    wanted = target or ""
    running: Any = None
    chosen = np.empty(0)
    labels = Labels(None, None)
    log_weights = np.empty(num_samples)
    with seeded(seed):
        for s in range(num_samples):
            draw = source.draw()
            densities = source.densities(draw)
            terms = densities.integrated[site].double()
            if running is None:
                wanted = target or target_of(source)
                labels.learn(draw.data)
                rows = _rows(draw.data[site], terms)
                if not len(rows):
                    raise nothing_unmasked(site)
                observations = min(400, len(rows)) if observations is None else observations
                if not 1 <= observations <= len(rows):
                    raise ValueError(f"observations must be between 1 and {len(rows)}, got {observations}")
                subset = np.sort(np.random.default_rng(seed).choice(len(rows), observations, replace=False))
                kept = torch.from_numpy(rows).to(terms.device)
                running = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=terms.device)
                chosen = np.empty((num_samples, observations))
            terms = terms.flatten()[kept]
            running = torch.logaddexp(running, terms)
            chosen[s] = terms[torch.from_numpy(subset).to(terms.device)].cpu().numpy()
            log_joint = source.log_joint_fitc if wanted == "fitc" else source.log_joint
            log_p = log_joint(draw, densities)
            assert draw.log_q is not None
            log_weights[s] = float(log_p - draw.log_q)
    lpd = (running - np.log(num_samples)).cpu().numpy()
    used, khat = ("none", np.nan) if target == "none" else _choose(log_weights[None], wanted, target is not None)
    # ArviZ reads m columns of the log likelihood. The others are never written: they take no memory.
    log_likelihood = np.zeros((len(rows), num_samples), dtype=np.float64)
    log_likelihood[subset] = chosen.T
    dims, coords = ["chain", "draw"], {"chain": [0], "draw": np.arange(num_samples)}
    dim = "obs" if terms.dim() != 1 else f"{site}_row"
    tree = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset({"log_weight": (dims, log_weights[None])}, coords=coords),
            "log_likelihood": xr.Dataset({site: ([*dims, dim], log_likelihood.T[None])}, coords=coords),
            "observed_data": xr.Dataset({site: ([dim], lpd)}),
        }
    )
    weights = tree.posterior["log_weight"]
    correction = {} if used == "none" else {"log_p": weights, "log_q": weights * 0.0}
    with np.errstate(all="ignore"):
        found = stats.loo_subsample(
            tree,
            observations=subset,
            pointwise=True,
            var_name=site,
            reff=1.0,
            method="plpd",
            log_lik_fn=lambda observed, data: xr.DataArray(lpd, dims=[dim]),
            **correction,
        )
    return _flagged(found, used, khat)


def _require_terms(tree: xarray.DataTree, var_name: Optional[str]) -> None:
    """Raise where a tree has no log likelihood of a site, or one that has no rows."""
    sizes: dict[Any, int] = {}
    if "log_likelihood" in tree.children:
        sizes = {name: terms.size for name, terms in tree["log_likelihood"].data_vars.items()}
    if not sizes or var_name not in (None, *sizes):
        raise ValueError(
            (f"loo found no log likelihood of {var_name!r}" if var_name else "loo found no log likelihood")
            + f" in the tree, it has {list(sizes)}: make it by to_datatree with log_likelihood=True, of a model with "
            "observed sites. A pyro.factor holds no observations that could be left out."
        )
    site = next(iter(sizes)) if len(sizes) == 1 else var_name
    if site is not None and not sizes[site]:
        raise nothing_unmasked(site)


def _choose(log_weights: np.ndarray, wanted: str, asked: bool) -> tuple[str, float]:
    """The target to be used, and k-hat of the weights towards the one wanted."""
    khat = float(np.max([backend.smooth(chain)[1] for chain in log_weights]))
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


def _rows(site: Any, terms: torch.Tensor) -> np.ndarray:
    rows = unmasked_rows(site)
    return np.arange(terms.numel()) if rows is None else np.flatnonzero(rows.expand(terms.shape).cpu().numpy())
