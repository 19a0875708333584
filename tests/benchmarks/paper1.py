"""Paper 1's regression experiments on this machine, scaled to a CPU, the paper's figures beside ours.

python tests/benchmarks/paper1.py --data DIR [--size 64] [--steps 1000] [--repeats 5]

The rows of tables 2, 6 and 7 are printed; the page, which has a picture and figure 2 besides, is of 0656b30. DIR holds
``<set>.npz`` with X and y. M is ``--size`` where the paper has 1024.

As in the paper: Matern-3/2 with one length scale for all columns; random splits into 64, 16 and 20 % (the 16 % are
not used: the paper does not say for what it uses them); Adam, rate 0.01, batch 1024; all parameters jointly; q starts
at the prior. What the paper does not state: inputs and targets are standardised from the training rows; the length
scale starts at √D, the variance at 1, the noise variance at 0.1; inducing inputs start at k-means centres. All methods
take the same number of steps. Scores are averages over test rows, on standardised targets.
"""

import itertools
import math
import statistics
from pathlib import Path

import bench
import pyro

from pyro_sparsegp import kernels
from pyro_sparsegp.families import SVGP, OrthogonalInducing, OrthogonallyDecoupled

SETS = ("kin40k", "protein", "keggdirected", "keggundirected", "elevators", "bike")
# Paper 1, tables 2, 6 and 7 at M = 1024: test log-likelihood and RMSE for each set, in the order of SETS.
PAPER = {
    "SVGP M": ((0.094, 0.193), (-0.963, 0.630), (0.967, 0.098), (0.678, 0.123), (-0.516, 0.398), (-0.218, 0.283)),
    "SVGP 1.5M": ((0.129, 0.182), (-0.949, 0.621), (0.944, 0.098), (0.673, 0.123), (-0.511, 0.396), (-0.203, 0.279)),
    "ODVGP M+M": ((0.137, 0.183), (-0.956, 0.625), (-0.199, 0.176), (0.105, 0.156), (-0.518, 0.397), (-0.191, 0.272)),
    "ODVGP M+8M": ((0.144, 0.180), (-0.946, 0.618), (-0.136, 0.157), (0.109, 0.157), (-0.523, 0.399), (-0.186, 0.270)),
    "SOLVE-GP M+M": ((0.187, 0.172), (-0.943, 0.618), (0.973, 0.095), (0.680, 0.123), (-0.509, 0.395), (-0.189, 0.272)),
    "SVGP 2M": ((0.137, 0.177), (-0.940, 0.615), (0.907, 0.100), (0.665, 0.124), (-0.507, 0.395), (-0.193, 0.276)),
}
WHITENED = ", whitened"


def made(family, *counts, **options):
    """A family of M points, in counts of M, which starts at the prior."""
    return lambda m, whiten: family(
        *(int(c * m) for c in counts), init="kmeans", start="prior", whiten=whiten, **dict.fromkeys(options, m)
    )


METHODS = {  # not whitened but where they say so, as in the paper
    "SVGP M": made(SVGP, 1),
    "SVGP 1.5M": made(SVGP, 1.5),
    "SVGP 2M": made(SVGP, 2),
    "SOLVE-GP M+M": made(OrthogonalInducing, 1, 1),
    "ODVGP M+M": made(OrthogonallyDecoupled, 1, 1),
    "ODVGP M+8M": made(OrthogonallyDecoupled, 1, 8, num_columns=1),
}
METHODS |= {name + WHITENED: METHODS[name] for name in list(METHODS)[:4]}


def regression(kernel, length):
    """A regression model whose kernel has one length scale."""
    return bench.regression(length, math.sqrt(0.1), ard=False, kernel=kernel)


class Fit(bench.Training):
    """On epochs of mini-batches."""

    def __init__(self, model, family, x, y, batch):
        pyro.clear_param_store()
        super().__init__(model, bench.prepared(model, family, x, y), x, y, 0.01, batch)
        self.rows = bench.epochs(len(x), batch)

    def step(self):
        rows = next(self.rows)
        return self.svi.step(self.x[rows], self.y[rows], size=len(self.x))

    def scores(self, x, y):
        """Test log-likelihood and RMSE, a row on average."""
        return bench.scores(*bench.predicted(self.guide, x), y)[:2]


def split(directory, name, repeat):
    """Training inputs and targets, test inputs and targets."""
    x, y = bench.read(directory / f"{name}.npz")
    order = bench.shuffled(len(x), repeat)
    fit, test = order[: int(0.64 * len(x))], order[int(0.8 * len(x)) :]
    x, y = bench.standardised(x, y, fit)
    return x[fit], y[fit], x[test], y[test]


def run_one(options, name, method, repeat):
    """Scores and seconds of one run."""
    x, y, x_test, y_test = split(options.data, name, repeat)
    pyro.set_rng_seed(repeat)
    family = METHODS[method](options.size, method.endswith(WHITENED))
    fit = Fit(regression(kernels.Matern32, math.sqrt(x.shape[-1])), family, x, y, 1024)
    ll, rmse = fit.until(steps=options.steps).scores(x_test, y_test)
    return {"ll": ll, "rmse": rmse, "seconds": fit.seconds}


def run(options):
    """All methods on all sets."""
    page = bench.Page()
    page.say(
        f"{bench.machine()}, float64. M = {options.size} where the paper has 1024; {options.steps} steps of batch "
        f"1024; {options.repeats} splits, standard errors in parentheses where there are several.",
        "",
    )
    page.head("set", "method", "test LL", "RMSE", "CPU ms a step", "paper at M = 1024: LL, RMSE")
    for name, method in itertools.product(options.sets, options.methods):
        results = [run_one(options, name, method, repeat) for repeat in range(options.repeats)]
        theirs = PAPER[method.removesuffix(WHITENED)][SETS.index(name)]
        paper = "" if method.endswith(WHITENED) else f"{theirs[0]:.3f}, {theirs[1]:.3f}"
        ms = statistics.median(1e3 * r["seconds"] / options.steps for r in results)
        page.row(
            name, method, *(bench.mean_error([r[key] for r in results]) for key in ("ll", "rmse")), f"{ms:.0f}", paper
        )


def main():
    run(bench.parsed(__doc__, data=Path(), size=64, steps=1000, repeats=5, sets=list(SETS), methods=list(METHODS)))


if __name__ == "__main__":
    main()
