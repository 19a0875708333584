"""Cox processes (paper 3, appendix A.5) on coal-mining disasters and on a tropical forest's trees.

python tests/benchmarks/cox.py --data DIR [--seconds 30] [--splits 5] [--plot cox.png]

DIR holds ``coal_disasters.npz`` (X: 191 dates, 1851 to 1962) and ``spatial_counts_bei.npz`` (points: 3,604 trees in
1000 m x 500 m). Each event is kept for training or for testing by a fair coin, so that both halves are Poisson
processes of half the intensity; a score is the test events' log-likelihood an event, (Σ log λ − ∫ λ)/n with λ =
E[exp f], above that of the constant intensity of the training events. The window's integral is a sum over half years,
or cells of 25 m.
"""

import math
import statistics
import time
from pathlib import Path

import bench
import numpy as np
import pyro
import torch
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, WeightSpace


class Window:
    """Events and cells, in inputs scaled to [-1, 1].

    :param events: (n, D).
    :param low: the window's lower corner.
    :param high: its upper corner.
    :param shape: cells along each input.
    """

    def __init__(self, events, low, high, shape):
        lower, upper = torch.tensor(low), torch.tensor(high)
        self.events = 2 * (events - lower) / (upper - lower) - 1
        lines = [(2 * torch.arange(num) + 1) / num - 1 for num in shape]
        self.cells = torch.cartesian_prod(*lines).reshape(-1, len(shape))
        self.shape, self.area = shape, 2.0 ** len(shape) / len(self.cells)
        self.low, self.high = low, high


def cox(kernel, level):
    """The model: log-intensity f, events, and the window's integral."""

    def model(cells, area, events=None):
        x = cells if events is None else torch.cat([cells, events])
        f = pyro.sample("f", GaussianProcess(kernel(), x, mean=lambda x: x.new_full((len(x),), level)))
        with pyro.plate("window", len(cells)):
            pyro.factor("none_elsewhere", -area * f[: len(cells)].exp())
        if events is not None:
            with pyro.plate("events", len(events)):
                pyro.factor("at_events", f[len(cells) :])

    return model


def stationary(dim):
    """Matern-3/2 with an output scale."""

    def kernel():
        length = bench.positive("length", torch.full((dim,), 0.3))
        return bench.positive("scale", torch.tensor(1.0)) * kernels.Matern32(length)

    return kernel


def deep(dim, correction):
    """A deep basis kernel of 32 features."""
    network = nn.Sequential(nn.Linear(dim, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    with torch.no_grad():
        network[0].weight.mul_(3.0)

    def kernel():
        pyro.module("network", network)
        return kernels.DeepBasis(network, correction)

    return kernel


METHODS = {
    "Matern-3/2, SVGP": (stationary, lambda m: SVGP(m)),
    "Matern-3/2, SGPR": (stationary, lambda m: SGPR(m)),
    "deep basis, WeightSpace": (lambda dim: deep(dim, True), lambda m: WeightSpace()),
    "without correction": (lambda dim: deep(dim, False), lambda m: WeightSpace()),
}


def fit(method, window, events, inducing, seconds):
    """A trained guide, and its steps."""
    pyro.clear_param_store()
    kernel, family = METHODS[method]
    model = cox(kernel(events.shape[-1]), math.log(len(events) / 2.0 ** events.shape[-1]))
    guide = AutoSparseGP(model, family(inducing))
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(20))
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        svi.step(window.cells, window.area, events)
        count += 1
    return guide, count


@torch.no_grad()
def score(guide, window, test):
    """The log-likelihood of events an event."""
    q = guide.posterior(torch.cat([window.cells, test]), window.area)["f"]
    log_rate = q.mean + q.variance / 2
    integral = window.area * log_rate[: len(window.cells)].exp().sum()
    return float((log_rate[len(window.cells) :].sum() - integral) / len(test))


@torch.no_grad()
def draw(windows, options):
    """Intensities given all events: inducing points and deep basis."""
    methods = ["Matern-3/2, SVGP", "deep basis, WeightSpace"]
    figure, axes = bench.pyplot().subplots(2, 2, figsize=(11, 6), layout="tight")
    for row, (name, (window, inducing)) in zip(axes, windows.items()):
        for axis, method in zip(row, methods):
            pyro.set_rng_seed(0)
            with torch.enable_grad():
                guide, _ = fit(method, window, window.events, inducing, options.seconds)
            q = guide.posterior(window.cells, window.area)["f"]
            mean, spread = q.mean.cpu(), 2 * q.stddev.cpu()
            events = window.events.cpu()
            unit = math.prod((high - low) / 2 for low, high in zip(window.low, window.high))
            if name == "coal":
                t = 1851 + 56 * (window.cells[:, 0].cpu() + 1)
                axis.fill_between(t, (mean - spread).exp() / unit, (mean + spread).exp() / unit, alpha=0.3, lw=0)
                axis.plot(t, (mean + spread.square() / 8).exp() / unit)
                axis.plot(1851 + 56 * (events[:, 0] + 1), torch.full((len(events),), -0.1), "|", color="0.4")
                axis.set(title=f"{method}: disasters a year", ylim=(-0.3, 7))
            else:
                rate = (mean + spread.square() / 8).exp().reshape(window.shape).mT / unit
                extent = (0, 1000, 0, 500)
                picture = axis.imshow(rate, origin="lower", extent=extent, cmap="viridis", vmin=0, vmax=0.03)
                axis.plot(500 * (events[:, 0] + 1), 250 * (events[:, 1] + 1), ".w", ms=0.6)
                axis.set(title=f"{method}: trees a square metre")
                figure.colorbar(picture, ax=axis, shrink=0.8)
    figure.savefig(options.plot, dpi=70)


def main():
    """The table, and the pictures of all events."""
    options = bench.parsed(__doc__, data=Path, seconds=10.0, splits=5, device="cpu", plot=None)
    pyro.enable_validation(False)
    torch.set_default_device(options.device)
    coal = torch.tensor(np.load(options.data / "coal_disasters.npz")["X"]).float()
    trees = torch.tensor(np.load(options.data / "spatial_counts_bei.npz")["points"]).float()
    windows = {
        "coal": (Window(coal, [1851.0], [1963.0], [224]), 20),
        "trees": (Window(trees, [0.0, 0.0], [1000.0, 500.0], [40, 20]), 100),
    }
    page = bench.Page()
    page.head("events", "method", "gain an event (nats), mean (sd) of splits", "steps")
    for name, (window, inducing) in windows.items():
        for method in METHODS:
            gains, count = [], 0
            for split in range(options.splits):
                pyro.set_rng_seed(split)
                kept = torch.rand(len(window.events)) < 0.5
                train, test = window.events[kept], window.events[~kept]
                guide, count = fit(method, window, train, inducing, options.seconds)
                constant = math.log(len(train) / 2.0 ** train.shape[-1]) - len(train) / len(test)
                gains.append(score(guide, window, test) - constant)
            spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
            page.row(f"{name} ({len(window.events)})", method, f"{statistics.mean(gains):.3f} ({spread:.3f})", count)
    if options.plot:
        draw(windows, options)


if __name__ == "__main__":
    main()
