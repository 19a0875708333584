"""Ribbons of function-valued posteriors: by ``arviz_plots.plot_lm`` for one input, as maps for two."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Optional, Union

from ..export import backend
from ..export.arguments import require_tree

if TYPE_CHECKING:
    import arviz_plots.plot_collection
    import matplotlib.figure
    import xarray
else:
    arviz_plots = backend.Later("arviz_plots")
    matplotlib = backend.Later("matplotlib")
    xarray = backend.Later("xarray")

__all__ = ["plot_ribbon"]


def plot_ribbon(
    tree: xarray.DataTree,
    y: Optional[str] = None,
    x: Optional[str] = None,
    *,
    y_obs: Optional[str] = None,
    probs: Sequence[float] = (0.5, 0.95),
    columns: Optional[Sequence[int]] = None,
    **kwargs: Any,
) -> Union[arviz_plots.plot_collection.PlotCollection, matplotlib.figure.Figure]:
    """The posterior of a function, or of predicted data, at the inputs of ``predict=``.

    With one input it is the mean and central intervals, ``arviz_plots.plot_lm`` on the group ``predictions``; with two
    it is a map of the mean and one of the standard deviation, by matplotlib.

    :param tree: of ``to_datatree(..., predict=inputs)``.
    :param y: the variable of ``predictions``: a GP site, or an observed one; by default the first.
    :param x: the variable of ``predictions_constant_data`` with the inputs; by default the first.
    :param y_obs: the observed site that is drawn as points; by default the first, if there is one.
    :param probs: of the intervals.
    :param columns: the one or two columns of x to draw along.
    :param kwargs: of ``plot_lm``, or of matplotlib's ``tricontourf``.
    :returns: a ``PlotCollection``, or a matplotlib figure.
    :raises ValueError: where the tree has no predictions, or the inputs are not one or two.
    """
    require_tree("plot_ribbon", tree)
    groups: Any = tree  # what an index of a tree gives, a group or a variable, no type says
    for group in ("predictions", "predictions_constant_data", "constant_data"):
        if group not in tree.children:
            raise ValueError(
                f"plot_ribbon needs the group {group!r}: make the tree with to_datatree(..., predict=inputs)"
            )
    y = y or next(iter(groups["predictions"].data_vars))
    x = x or next(iter(groups["predictions_constant_data"].data_vars))
    observed = groups["observed_data"].data_vars if "observed_data" in tree.children else {}
    if y_obs is not None and y_obs not in observed:
        raise ValueError(f"y_obs must be one of {sorted(observed)}, got {y_obs!r}")
    y_obs = y_obs or next(iter(observed), None)
    if y not in groups["predictions"]:
        raise ValueError(f"y must be one of {sorted(groups['predictions'].data_vars)}, got {y!r}")
    new, old = groups["predictions_constant_data"][x], groups["constant_data"][x]
    if groups["predictions"][y].ndim != 3:
        raise ValueError(f"{y!r} has dimensions {groups['predictions'][y].dims}: choose one output, tree.isel(...)")
    if columns is None:
        columns = range(new.shape[1]) if new.ndim == 2 else [0]
    if len(columns) not in (1, 2):
        raise ValueError(f"{x!r} has {len(columns)} columns; name one or two of them, columns=[0, 1]")
    width = new.shape[1] if new.ndim == 2 else 1
    if not all(isinstance(column, Integral) and -width <= column < width for column in columns):
        raise ValueError(f"columns must be among the {width} of {x!r}, 0 to {width - 1}, got {list(columns)}")
    if new.ndim == 2:
        new, old = (part.isel({part.dims[1]: list(columns)}) for part in (new, old))
    if len(columns) == 2:
        return _maps(tree, y, new, old, kwargs)
    squeezed = {
        "predictions": groups["predictions"].to_dataset()[[y]],
        "predictions_constant_data": (new[:, 0] if new.ndim == 2 else new).to_dataset(name=x),
        "constant_data": (old[:, 0] if old.ndim == 2 else old).to_dataset(name=x),
    }
    rows = squeezed["constant_data"][x]
    points = rows * float("nan") if y_obs is None else groups["observed_data"][y_obs]  # of pyro.factor there are none
    squeezed["observed_data"] = points.to_dataset(name=y)  # plot_lm wants one name
    if y_obs is None:
        kwargs["visuals"] = {"observed_scatter": False, **(kwargs.get("visuals") or {})}
    for group, dataset in squeezed.items():  # of the column chosen
        squeezed[group] = dataset.drop_vars([name for name in dataset.coords if name not in dataset.dims])
    options = {"smooth": False, "ci_kind": "eti", "point_estimate": "mean", **kwargs}
    return backend.arviz_plots().plot_lm(
        backend.xarray().DataTree.from_dict(squeezed),
        x=x,
        y=y,
        plot_dim=new.dims[0],
        group="predictions",
        ci_prob=list(probs),
        **options,
    )


def _maps(tree: Any, y: str, new: Any, old: Any, kwargs: dict[str, Any]) -> Any:
    plt = backend.pyplot()
    draws = tree["predictions"][y]
    panels = {"mean": draws.mean(["chain", "draw"]), "standard deviation": draws.std(["chain", "draw"])}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True, sharey=True, layout="constrained")
    for axis, (title, values) in zip(axes, panels.items()):
        shown = axis.tricontourf(new[:, 0].values, new[:, 1].values, values.values, **{"levels": 20, **kwargs})
        figure.colorbar(shown, ax=axis)
        axis.plot(old[:, 0], old[:, 1], ".", color="k", ms=2, alpha=0.5)
        axis.set(title=f"{y}: {title}", xlabel=f"{new.name}[{int(new[new.dims[1]][0])}]")
    axes[0].set_ylabel(f"{new.name}[{int(new[new.dims[1]][1])}]")
    return figure
