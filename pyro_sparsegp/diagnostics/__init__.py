"""Diagnostics: every posterior leaves as a standard ArviZ object, and says whether to trust it."""

from typing import Any

try:
    from .calibration import PSIS, psis, sbc
    from .effects import plot_effects
    from .scores import PredictiveScores, predictive_scores
    from .tree import prior_predictive, to_datatree
except ModuleNotFoundError as error:
    remedy = 'pip install "pyro-sparsegp[diagnostics]"'
    raise ImportError(f"pyro_sparsegp.diagnostics needs {error.name}: {remedy}") from error

__all__ = [
    "PSIS",
    "PredictiveScores",
    "plot_effects",
    "predictive_scores",
    "prior_predictive",
    "psis",
    "sbc",
    "to_datatree",
]

_LOSSES = 'keep the losses in a list; arviz_base.from_dict({"vi_history": {"elbo": [[-loss for loss in losses]]}})'
_LEFT = {
    "HMC": "pyro.infer.HMC, whose draws to_datatree and arviz_stats take",
    "History": _LOSSES,
    "NUTS": "pyro.infer.NUTS, whose draws to_datatree and arviz_stats take",
    "StoppingRule": "fit(stopping=...) takes any function of the losses; arviz_stats.rhat looks at iterates",
    "add_history": f'{_LOSSES}["vi_history"] is a group for tree["vi_history"]',
    "compare": "arviz_stats.compare({name: to_datatree(...)})",
    "loo": "arviz_stats.loo(to_datatree(model, guide, x, y)), or arviz_stats.loo_approximate_posterior(tree, "
    "tree.sample_stats.lp, tree.sample_stats.log_q) towards the target of psis",
    "loo_large": "arviz_stats.loo(to_datatree(model, guide, x, y, num_samples=100)), or predictive_scores",
    "plot_ribbon": 'arviz_plots.plot_lm(tree, group="predictions", ...), or guide.posterior(x_new)["f"] and matplotlib',
    "resample": "arviz_base.extract(tree, num_samples=..., weights=np.exp(psis(tree).log_weights))",
}


def __getattr__(name: str) -> Any:
    if name in _LEFT:
        raise ImportError(f"pyro_sparsegp.diagnostics has no {name} any more. In its place: {_LEFT[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
