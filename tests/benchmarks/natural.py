"""Natural steps beside Adam's: test log-likelihood against seconds, the table of that section of natural.md.

python tests/benchmarks/natural.py --data DIR

The page's other sections are of how the defaults were found, by this file at fb7d7eb.
"""

import itertools
import math
import warnings
from pathlib import Path

import bench
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels
from pyro_sparsegp.families import SVGP

BATCH, POINTS = 1024, 64


def regression(x, y=None, size=None):
    """A GP with a scale for each column; latents at medians that fit standardised data."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    medians = 0.5 * math.log(x.shape[-1]) * torch.ones(x.shape[-1])
    length = pyro.sample("length", dist.LogNormal(medians, 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def split(path):
    """Standardised training and test rows of the first official split."""
    (x, y), test = bench.read(path), bench.official(path)
    x, y = (part.float() for part in bench.standardised(x, y, ~test))
    return x[~test], y[~test], x[test], y[test]


@torch.no_grad()
def score(guide, x, y):
    """Mean log density of test rows, hyperparameters at their medians."""
    mean, variance = guide.posterior(x)["f"].moments()
    return bench.scores(mean, variance + guide.median(x)["noise"] ** 2, y)[0]


def fitted(sets, family, lr, marks):
    """(steps, test log-likelihood) at the marks in CPU seconds; the time of scoring is not counted."""
    x, y, test_x, test_y = sets
    bench.seeded()
    order = torch.Generator().manual_seed(0)
    start = bench.clock()
    guide = AutoSparseGP(regression, family, point_estimates=True)
    first = torch.randperm(len(x), generator=order)[:5000]
    guide(x[first], y[first], size=len(x))
    training = bench.Training(regression, guide, x, y, lr, BATCH, generator=order)
    training.seconds = bench.clock() - start
    return [(training.until(seconds=mark).steps, score(guide, test_x, test_y)) for mark in marks]


def main():
    options = bench.parsed(__doc__, data=Path, sets=["kin40k", "protein", "bike"], marks=[2.0, 4.0, 8.0])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, families = [], {"Adam": SVGP(POINTS, natural=False), "natural": SVGP(POINTS)}
    for family in families.values():  # the first steps of a process are slow
        fitted(split(options.data / "kin40k.npz"), family, 0.01, [1.0])
    for name in options.sets:
        sets = split(options.data / f"{name}.npz")
        for (label, family), lr in itertools.product(families.items(), (0.01, 0.03)):
            found = fitted(sets, family, lr, options.marks)
            print(name, label, lr, found, flush=True)
            rows.append([name, label, lr, *(f"{value:.3f} ({steps})" for steps, value in found)])
    print(
        f"Mean test log-likelihood (steps) after so many CPU seconds, the first call included: SVGP({POINTS}), a "
        f"Matern-3/2 kernel with a length scale for each column, batches of {BATCH}, float32, hyperparameters as "
        "points, standardised inputs and targets, the first official split; the optimiser of all that is not q is Adam "
        "at the given rate, natural steps have the family's own.\n\n"
        + bench.table(["set", "q by", "Adam's rate", *(f"{mark:.0f} s" for mark in options.marks)], rows)
    )


if __name__ == "__main__":
    main()
