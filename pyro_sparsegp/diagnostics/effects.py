"""Partial-effect plots of additive models: each effect with its interval, and a rug of the inputs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import matplotlib.pyplot
import torch
from torch import Tensor

from ..numerics.arguments import refuse
from ..posterior.sparse_posterior import SparsePosterior

_CURVE, _MAP = 200, 40  # points of a curve, and along each side of a map
_SIDE = 3  # plots side by side


@torch.no_grad()
def plot_effects(
    posterior: SparsePosterior,
    names: Optional[Sequence[str]] = None,
    *,
    columns: Optional[Sequence[str]] = None,
    prob: float = 0.95,
    transform: Optional[Callable[[Tensor], Tensor]] = None,
) -> matplotlib.figure.Figure:
    """Plot the effects of a kernel's terms.

    A term of one column is a curve of its mean with a band of central marginal intervals; of a factor's codes
    (:class:`~pyro_sparsegp.kernels.Categorical`) points with intervals, of a factor and another column a curve for each
    level; of two columns a map of the mean with lines of the standard deviation. Other terms, such as constants, are
    left out. The inputs of ``posterior`` give the ranges and the rug.

    :param posterior: that of a GP site with an additive kernel, such as ``guide.posterior(x)["f"]``.
    :param names: the names of the terms to show, by default of all that can be shown.
    :param columns: names of the input columns, for the axes.
    :param prob: the probability of the intervals.
    :param transform: an increasing function of means and interval ends, such as ``torch.exp`` of a log rate.
    :returns: a matplotlib figure.
    :raises ValueError: naming a term that cannot be shown, for several outputs, or for anything but a posterior.
    """
    if not isinstance(posterior, SparsePosterior):
        raise ValueError(
            f"plot_effects needs the posterior of one GP site, got {type(posterior).__name__}: give "
            "guide.posterior(x)['f'], x being the inputs and 'f' the site"
        )
    x, parts = posterior.process.x, posterior.components
    labels = [f"x{i}" for i in range(x.shape[-1])] if columns is None else list(columns)
    able = [name for name, part in parts.items() if len(_columns(part)) in (1, 2)]
    shown = {name: parts[name] for name in (able if names is None else names)}
    wrong = next((name for name in shown if name not in able), None)
    faults = {
        f"site {posterior.name!r} has outputs {tuple(posterior.batch_shape)}: give one": posterior.batch_shape,
        f"plot_effects' prob must be between 0 and 1, got {prob}": not 0 < prob < 1,
        f"columns names {len(labels)} columns, the inputs have {x.shape[-1]}": len(labels) != x.shape[-1],
        f"plot_effects shows terms of one or two columns, not {wrong!r}": wrong,
        f"no term of site {posterior.name!r} reads one or two columns: {list(parts.names)}": not shown,
    }
    refuse(faults)
    rows, wide = -(-len(shown) // _SIDE), min(_SIDE, len(shown))
    size = 4 * wide, 3 * rows
    figure, axes = matplotlib.pyplot.subplots(rows, wide, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    # Central marginal intervals: Φ⁻¹((1 + p)/2) standard deviations to each side.
    quantile = float(torch.special.ndtri(torch.tensor((1 + prob) / 2, dtype=torch.float64)))
    effects = _Effects(x, labels, quantile, transform or (lambda value: value))
    for (name, part), axis in zip(shown.items(), axes.flat):
        axis.set_title(name)
        effects.show(axis, part)
    return figure


class _Effects(NamedTuple):
    """Effects at inputs."""

    x: Tensor
    labels: Sequence[str]
    quantile: float  # standard deviations to an interval's end
    change: Callable[[Tensor], Tensor]  # of means and ends of intervals

    def show(self, axis: Any, part: SparsePosterior) -> None:
        """The effect of one column or two: curves, one for each level of a factor; points, of a factor alone; a map."""
        columns = _columns(part)
        codes = [column for column in part.process.kernel.code_columns(self.x.shape[-1]) if column in columns][:1]
        others = [column for column in columns if column not in codes]
        if len(others) == 2:
            self._map(axis, part, *others)
            return
        read, smooth = others + codes, bool(others)
        column, of = read[0], read[1:]
        places = self._line(column, _CURVE) if smooth else self.x[:, column].unique()
        levels = itertools.product(*(self.x[:, by].unique().tolist() for by in of))  # of a factor; or one of none
        axis.set_xlabel(self.labels[column])
        for fixed in (dict(zip(of, level)) for level in levels):
            here = part.at(self._at({column: places, **fixed}))
            spread = self.quantile * here.stddev
            ends = here.mean, here.mean - spread, here.mean + spread
            at, (mean, low, high) = places.cpu().numpy(), (self.change(value).cpu().numpy() for value in ends)
            if smooth:
                label = "".join(f"{self.labels[by]} = {level:g}" for by, level in fixed.items())
                (line,) = axis.plot(at, mean, label=label)
                axis.fill_between(at, low, high, color=line.get_color(), alpha=0.25, lw=0)
            else:
                axis.errorbar(at, mean, [mean - low, high - mean], fmt="o", capsize=3)
                axis.set_xticks(at)
        if of:
            axis.legend(fontsize="small")
        if smooth:
            ticks = {"color": "k", "alpha": 0.3, "transform": axis.get_xaxis_transform()}
            axis.plot(self.x[:, column].cpu(), torch.zeros(len(self.x)), "|", **ticks)

    def _map(self, axis: Any, part: SparsePosterior, *columns: int) -> None:
        lines = [self._line(column, _MAP) for column in columns]
        grids = torch.meshgrid(*lines, indexing="ij")
        here = part.at(self._at({column: grid.flatten() for column, grid in zip(columns, grids)}))
        mean, spread = (value.reshape(_MAP, _MAP).T.cpu() for value in (self.change(here.mean), here.stddev))
        a, b = (line.cpu() for line in lines)
        axis.figure.colorbar(axis.contourf(a, b, mean, levels=15), ax=axis)
        axis.clabel(axis.contour(a, b, spread, levels=4, colors="w", linewidths=0.7), fontsize="x-small")
        axis.plot(*self.x[:, list(columns)].T.cpu(), ".", color="k", ms=1, alpha=0.3)
        axis.set(xlabel=self.labels[columns[0]], ylabel=self.labels[columns[1]])

    def _line(self, column: int, num: int) -> Tensor:
        """Places along one column, from its smallest value to its largest."""
        low, high = self.x[:, column].min(), self.x[:, column].max()
        return low + (high - low) * torch.linspace(0, 1, num, dtype=self.x.dtype, device=self.x.device)

    def _at(self, places: Mapping[int, Any]) -> Tensor:
        """Inputs at places along some columns, the others as in the first row."""
        at = self.x[:1].repeat(max(torch.as_tensor(values).numel() for values in places.values()), 1)
        for column, values in places.items():
            at[:, column] = values
        return at


def _columns(part: SparsePosterior) -> tuple[int, ...]:
    read = part.process.kernel.columns
    return tuple(range(part.process.x.shape[-1])) if read is None else read
