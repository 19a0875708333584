"""Computation-aware GPs beyond 1e5 rows: mini-batches of rows, actions on some of them.

python tests/benchmarks/action_batches.py [--rows 10000 1000000] [--support 1000 4000] [--actions 256] [--batch 2000]
    [--steps 60] [--data FILE.npz] [--whole 10000] [--same-time] [--no-svgp]

Simulated rows are of a function of two columns, a sum of 500 random waves of a Matern-3/2 process of length 0.2, with
noise of sd 0.3; a file has X and y, standardised here: --rows are so many of it at random, or, if it has fewer, all
and midpoints of rows that follow each other in it, as on a grid. A tenth of the rows, 20,000 at most, is held out. For
each number of rows: ComputationAware with actions on so many rows, in mini-batches (n² + nB kernel entries a step,
whatever N is), and SVGP with as many inducing points in the same batches, for as many steps and, with --same-time, for
as many seconds as the last of these; up to --whole rows also ComputationAware on all rows at once (N² entries).
Seconds are of training steps; predictions are timed apart.
"""

import time

import bench
import pyro
import torch

from pyro_sparsegp import AutoSparseGP, kernels
from pyro_sparsegp.families import SVGP, ComputationAware

MODEL = bench.regression(0.3, 0.5)


def simulated(rows):
    """Inputs and noisy values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, 2, generator=generator)
    chi2 = torch.randn(500, 3, generator=generator).square().sum(-1, keepdim=True)
    omega = torch.randn(500, 2, generator=generator) * (3 / chi2).sqrt() / 0.2
    phase = 6.2832 * torch.rand(500, generator=generator)
    weights = torch.randn(500, generator=generator) * (2 / 500) ** 0.5
    f = torch.cat([torch.cos(part @ omega.mT + phase) @ weights for part in x.split(20_000)])
    return x, f + 0.3 * torch.randn(rows, generator=generator)


def read(path, rows):
    """So many of a file's inputs and targets, standardised."""
    x, y = bench.read(path)
    y, generator = y.reshape(-1), torch.Generator().manual_seed(0)
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=generator)
    if rows > len(x):
        apart = (x[1:] - x[:-1]).norm(dim=-1)
        beside = (apart < 1.5 * apart.median()).nonzero()[:, 0]
        left = beside[torch.randperm(len(beside), generator=generator)[: rows - len(x)]]
        x, y = (torch.cat([part, (part[left] + part[left + 1]) / 2]) for part in (x, y))
        order = torch.randperm(len(x), generator=generator)
    order = order[:rows]
    return x[order].float(), y[order].float()


def exact_variance(x, x_new):
    """The exact posterior's variance at trained hyperparameters, in float64."""
    length, scale, noise = (pyro.param(name).detach().double() for name in ("length", "scale", "noise"))
    kernel = scale * kernels.Matern32(length)
    x, x_new = x.double(), x_new.double()
    root = torch.linalg.cholesky(kernel(x) + noise**2 * torch.eye(len(x), dtype=x.dtype))
    return kernel.diag(x_new) - torch.linalg.solve_triangular(root, kernel(x, x_new), upper=False).square().sum(0)


def run(page, kind, family, first, batch, x, y, exact, **until):
    """Train, predict and print a row of the table; seconds of training.

    :param exact: whether the variance is set against the exact posterior's.
    :param until: steps or seconds.
    """
    bench.seeded()
    held = min(len(x) // 10, 20_000)
    (x_new, x), (y_new, y) = (part.split([held, len(x) - held]) for part in (x, y))
    guide = AutoSparseGP(MODEL, family)
    guide(x[:first], y[:first])
    training = bench.Training(MODEL, guide, x, y, 0.03, batch).until(**until)
    start = time.perf_counter()
    mean, variance = (torch.cat(part) for part in zip(*(bench.predicted(guide, rows) for rows in x_new.split(5_000))))
    predicting = time.perf_counter() - start
    density, error, _ = bench.scores(mean, variance, y_new)
    within = ((y_new - mean).abs() < 1.645 * variance.sqrt()).float().mean()
    variance = variance - pyro.param("noise").detach() ** 2
    least = f"{float((variance[:1000].double() / exact_variance(x, x_new[:1000])).min()):.3f}" if exact else ""
    page.row(
        *(f"{len(x):,}", kind, training.steps, f"{training.seconds / training.steps:.2f}", f"{training.seconds:.0f}"),
        *(f"{predicting:.1f}", f"{error:.4f}", f"{-density:.4f}", f"{100 * float(within):.0f}"),
        *(f"{float(variance.mean().sqrt()):.3f}", least, f"{bench.peak():.2f}"),
    )
    return training.seconds


def main():
    options = bench.parsed(
        __doc__,
        **{"rows": [10_000, 1_000_000], "support": [1_000, 4_000], "actions": 256, "batch": 2_000, "steps": 60},
        **{"whole": 10_000, "data": None, "no_svgp": False, "same_time": False},
    )
    page = bench.Page()
    page.say(bench.machine(), "")
    page.head(
        *("rows", "family", "steps", "seconds a step", "in all", "predicting", "RMSE", "NLL", "% in 90 %"),
        *("mean sd of f", "least variance over exact", "peak GiB"),
    )
    for rows in options.rows:
        x, y = read(options.data, rows) if options.data else simulated(rows)
        exact, longest = rows <= options.whole, 0.0
        for support in options.support:
            family = ComputationAware(options.actions, batches=True)
            kind = f"ComputationAware({options.actions}), on {support:,} rows"
            longest = run(page, kind, family, support, options.batch, x, y, exact, steps=options.steps)
        ways = [{"steps": options.steps}, *([{"seconds": longest}] if options.same_time else [])]
        for until in [] if options.no_svgp else ways:
            kind, family = f"SVGP({options.actions})", SVGP(options.actions)
            run(page, kind, family, 4_000, options.batch, x, y, exact, **until)
        if exact:
            kind = f"ComputationAware({options.actions}), all rows"
            run(page, kind, ComputationAware(options.actions), rows, 0, x, y, exact, steps=options.steps)


if __name__ == "__main__":
    main()
