"""Whether an optimisation has converged: its history as an ArviZ group, and a stopping rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np

from ...inference.fit import FitResult
from ...inference.history import Iterates
from ..export import backend
from ..export.arguments import kind_of, require_tree
from ..export.labels import attributes

if TYPE_CHECKING:
    import xarray
else:
    xarray = backend.Later("xarray")

__all__ = ["History", "StoppingRule", "add_history"]


class History(Iterates):
    """The loss and the parameters of a guide, step by step.

    ``history.record(svi.step(x, y))`` after each step; :meth:`to_datatree` makes a group ``vi_history`` of it, whose
    draws are iterates: ``arviz_stats.rhat(tree, group="vi_history")`` over several runs, ``arviz_stats.mcse`` of the
    averaged iterates, ``arviz_plots.plot_trace`` and the rest then apply (Dhaka et al., 2020, section 3).

    :param guide: whose parameters are kept, in unconstrained space; or an object that has one, SVI or expectation
        propagation; ``None`` for the loss alone.
    :param parameters: names, or beginnings of names, of those to keep: by default the hyperparameters' posterior.
    :param largest: parameters with more values than this are left out.
    :param objective: the name of −loss: by default "log_z" of a guide for expectation propagation, whose loss is no
        bound, and "elbo" of others.
    """

    def __init__(
        self,
        guide: Any = None,
        parameters: Collection[str] = ("locs.", "scales."),
        largest: int = 64,
        objective: Optional[str] = None,
    ) -> None:
        if isinstance(parameters, str):
            raise ValueError(f"History's parameters must be a collection of names, got the string {parameters!r}")
        guide = getattr(guide, "guide", guide)
        if guide is not None and not callable(getattr(guide, "named_parameters", None)):
            raise ValueError(
                f"History needs a guide, whose parameters it keeps, or None for the loss alone; got {kind_of(guide)}"
            )
        super().__init__(guide, parameters, largest, objective)

    def to_datatree(self, name: Optional[str] = None) -> xarray.DataTree:
        """The group ``vi_history`` as an ``xarray.DataTree``."""
        return backend.xarray().DataTree.from_dict({"vi_history": _group([self], None)}, name=name)


Runs = Union[Iterates, FitResult]


def add_history(
    tree: xarray.DataTree, histories: Union[Runs, Sequence[Runs]], window: Optional[int] = None
) -> xarray.DataTree:
    """A tree with a group ``vi_history``: a chain for each run, in the order of the tree's chains.

    :param tree: of :func:`to_datatree`.
    :param histories: a :class:`History`, or the result of :func:`~pyro_sparsegp.fit`; or several.
    :param window: the last so many iterates; all, or as many as the shortest run has, if not given.
    """
    require_tree("add_history", tree)
    given = [histories] if isinstance(histories, (Iterates, FitResult)) else list(histories)
    runs = [run.iterates if isinstance(run, FitResult) else run for run in given]
    for run in runs:
        if not isinstance(run, Iterates):
            raise ValueError(
                f"add_history needs a History, or several, got {kind_of(run)}: history.record(svi.step(x, y)) after "
                "each step makes one"
            )
    new = tree.copy()
    new["vi_history"] = backend.xarray().DataTree(_group(runs, window))
    return new


def _group(runs: Sequence[Iterates], window: Optional[int]) -> Any:
    if not runs or min(map(len, runs)) == 0:
        raise ValueError("the history is empty: history.record(svi.step(...)) after each step")
    if len({run.objective for run in runs}) > 1:
        raise ValueError(f"the runs have different objectives, {[run.objective for run in runs]}: add them apart")
    num = min(map(len, runs)) if window is None else window
    if num > min(map(len, runs)):
        raise ValueError(f"window is {num}, the shortest run has {min(map(len, runs))} steps")
    parts = [run.window(num) for run in runs]
    variables = {}
    for name in parts[0]:
        stacked = np.stack([part[name] for part in parts])
        variables[name] = (["chain", "draw", *(f"{name}_dim_{i}" for i in range(stacked.ndim - 2))], stacked)
    last = len(runs[0])
    coords = {"chain": np.arange(len(runs)), "draw": np.arange(last - num, last)}
    return backend.xarray().Dataset(variables, coords=coords, attrs=attributes(draws="iterates of the optimiser"))


_CONFIDENCE = 1.64  # standard errors, of a probability of 0.95 on one side
_RISE = 0.3  # of the objective over what is looked at, in standard deviations of its noise


@dataclass(frozen=True)
class _Line:
    """A line fitted to a series, and how well it is known.

    :param rise: of the line, from the first value to the last.
    :param noise: the standard deviation of what is left.
    :param time: the integrated autocorrelation time of what is left, at least 1.
    :param num: of values.
    """

    rise: float
    noise: float
    time: float
    num: int

    @property
    def noise_of_mean(self) -> float:
        """The standard error of the mean."""
        return self.noise * math.sqrt(self.time / self.num)

    @property
    def error(self) -> float:
        """The standard error of the rise."""
        return math.sqrt(12) * self.noise_of_mean

    @classmethod
    def fit(cls, values: np.ndarray) -> _Line:
        num = len(values)
        place = np.linspace(-0.5, 0.5, num)
        centred = values - values.mean()
        rise = float((place * centred).sum() / np.square(place).sum())
        left = centred - rise * place
        power = np.abs(np.fft.rfft(left, 2 * num)) ** 2
        covariance = np.fft.irfft(power)[:num]
        if not covariance[0] > 0:
            return cls(rise, 0.0, 1.0, num)
        # Summed up to five times the sum itself (Sokal, 1997).
        times = 2 * np.cumsum(covariance / covariance[0]) - 1
        enough = np.arange(num) >= 5 * times
        time = float(times[enough.argmax()] if enough.any() else times.max())
        return cls(rise, math.sqrt(np.square(left).mean()), max(time, 1.0), num)


class StoppingRule:
    """Says when to stop: the last iterates are stationary, or the objective has stopped to move.

    Over a window of iterates, split in halves as if two chains (Dhaka et al., 2020, section 3), noisy optimisation
    rests when R̂ of what is watched is at most ``rhat`` at ``patience`` looks in a row, and the objective (the bound;
    log Z of expectation propagation) has no trend beside its noise. R̂ alone takes a slow rise in much noise for rest.
    The trend is the slope of a line fitted to at least two windows, and to as many more iterates as it takes to tell
    a rise of 0.3 standard deviations of the noise from none, its standard error allowing for autocorrelation: some 800
    iterates of independent noise, more in proportion to its autocorrelation time. The rule stops when that rise, with
    1.64 standard errors added, is at most 0.3 standard deviations; a slower one is not told from rest.

    A deterministic optimisation rests when the mean objective of the window's halves differs by at most ``tolerance``
    nats, again with 1.64 standard errors added. R̂ of *parameters* asks for more than that of the objective: their
    iterates wander at a rest that the objective has reached long before.

    >>> from pyro_sparsegp.diagnostics import History, StoppingRule
    >>> history, converged = History(), StoppingRule(window=50)
    >>> for step in range(1000):
    ...     loss = history.record(3 + 0.5**step)
    ...     if converged(history):
    ...         break
    >>> step < 100
    True

    :param window: the number of iterates looked at.
    :param rhat: the largest R̂ at rest.
    :param tolerance: in nats.
    :param patience: looks in a row, a tenth of the window apart.
    :param watch: names, or beginnings of names, in the history: "elbo", "log_z", "locs."; by default the objective.
    :raises ValueError: where the history has nothing of what is watched, or an iterate is NaN or infinite.
    :raises ImportError: without arviz-stats (0.8 or newer), which R̂ is from.
    """

    def __init__(
        self,
        window: int = 400,
        rhat: float = 1.02,
        tolerance: float = 0.01,
        patience: int = 3,
        watch: Optional[Collection[str]] = None,
    ) -> None:
        if isinstance(watch, str):
            raise ValueError(f"StoppingRule's watch must be a collection of names, got the string {watch!r}")
        if window < 20 or window % 2:
            raise ValueError(f"StoppingRule's window must be an even number of at least 20, got {window}")
        backend.rhat()
        self.window, self.rhat, self.tolerance = window, rhat, tolerance
        self.patience, self.watch, self._calm = patience, tuple(watch or ()), 0
        self.reason: Optional[str] = None

    def __call__(self, history: Iterates) -> bool:
        """Whether to stop now; :attr:`reason` then says why."""
        if not isinstance(history, Iterates):
            raise ValueError(
                f"StoppingRule looks at a History, got {kind_of(history)}: history.record(svi.step(x, y)) after each "
                "step makes one"
            )
        if len(history) < self.window or len(history) % (self.window // 10):
            return False
        iterates = history.window(self.window)
        self._require_finite(iterates, len(history))
        halves = np.split(iterates[history.objective], 2)
        change = halves[1].mean() - halves[0].mean()
        line = _Line.fit(iterates[history.objective])
        if abs(change) + _CONFIDENCE * 2 * line.noise_of_mean <= self.tolerance:
            self.reason = f"{history.objective} changed by {change:.2g} nats over {self.window} steps"
            return True
        names = self.watch or (history.objective,)
        watched = {name: values for name, values in iterates.items() if name.startswith(names)}
        if not watched:
            raise ValueError(f"StoppingRule watches {list(names)}, of which the history has none: {list(iterates)}")
        worst = self.largest_rhat(watched)
        self._calm = self._calm + 1 if worst <= self.rhat else 0
        if self._calm < self.patience:
            return False
        trend = self._trend(history)
        if trend is None or trend.rise + _CONFIDENCE * trend.error > _RISE * trend.noise:
            return False
        self.reason = (
            f"R-hat of the last {self.window} iterates is {worst:.3f}, and {history.objective} rose by "
            f"{trend.rise:.2g} ± {trend.error:.2g} nats over {trend.num} steps, beside noise of {trend.noise:.2g}"
        )
        return True

    def _trend(self, history: Iterates) -> Optional[_Line]:
        """The objective's, over as many iterates as can tell a rise from noise; ``None`` if there are too few."""
        num = 2 * self.window
        while num <= len(history):
            line = _Line.fit(history.window(num)[history.objective])
            if _CONFIDENCE * line.error <= 0.75 * _RISE * line.noise:
                return line
            num += num // 2
        return None

    @staticmethod
    def _require_finite(iterates: dict[str, np.ndarray], steps: int) -> None:
        for name, values in iterates.items():
            bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
            if bad.any():
                step = steps - len(values) + int(bad.argmax())
                raise ValueError(
                    f"{name!r} is NaN or infinite at step {step}: training has failed there, it is no rest"
                )

    @staticmethod
    def largest_rhat(iterates: dict[str, np.ndarray]) -> float:
        """The largest R̂ of all values' iterates, their first and second half taken as chains."""
        rhat = backend.rhat()
        largest = -np.inf
        for values in iterates.values():
            columns = values.reshape(2, len(values) // 2, -1)
            columns = columns[..., np.ptp(columns, axis=(0, 1)) > 0]
            if columns.size:
                found = rhat(columns, chain_axis=0, draw_axis=1)
                largest = max(largest, float(np.max(found)))
        return largest
