"""Diagnostics: every posterior leaves as a standard ArviZ object, and says whether to trust it."""

from typing import Any

from .calibration import sbc
from .effects import plot_effects
from .leave_one_out import compare, loo
from .scores import PredictiveScores, predictive_scores
from .tree import prior_predictive, to_datatree
from .weights import PSIS, psis

__all__ = [
    "PSIS",
    "PredictiveScores",
    "compare",
    "loo",
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
    "loo_large": "loo(model, guide, x, y, num_samples=100), whose memory is draws times rows, or predictive_scores",
    "plot_ribbon": 'arviz_plots.plot_lm(tree, group="predictions", ...), or guide.posterior(x_new)["f"] and matplotlib',
    "resample": "arviz_base.extract(tree, num_samples=..., weights=np.exp(psis(tree).log_weights))",
}


def __getattr__(name: str) -> Any:
    if name in _LEFT:
        raise ImportError(f"pyro_sparsegp.diagnostics has no {name} any more. In its place: {_LEFT[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
