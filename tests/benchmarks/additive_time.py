"""A step of additive families by the number of terms, in one run.

python tests/benchmarks/additive_time.py [--terms 4 8 16 32] [--points 16] [--rounds 15] [--kernel rbf]
    [--out table.md]

A sum of RBF kernels, or of their Anova versions (--kernel anova), on a column each, some points a term, a Gaussian
likelihood and mini-batches of 500 rows, float32, one thread. Medians of CPU time over interleaved rounds.
"""

import statistics
from functools import partial

import bench
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import CoupledCovariance, CoupledPrecision, MeanFieldAdditive

ROWS, BATCH = 5000, 500
KERNELS = {"rbf": kernels.RBF, "anova": lambda length: kernels.Anova(kernels.RBF(length))}
FAMILIES = {
    "CoupledPrecision": CoupledPrecision,
    "CoupledPrecision, Adam": partial(CoupledPrecision, natural=False),
    "CoupledCovariance": CoupledCovariance,
    "CoupledCovariance, Adam": partial(CoupledCovariance, natural=False),
    "MeanFieldAdditive": MeanFieldAdditive,
}


def measure(terms, points, rounds, kind):
    """The time of a step of each, in ms."""
    bench.seeded()
    x = torch.rand(BATCH, terms)
    y = torch.sin(6 * x).sum(-1) + 0.1 * torch.randn(BATCH)

    def model(x, y):
        lengths = bench.positive("lengths", torch.full((terms,), 0.3))
        kernel = sum(KERNELS[kind](lengths[c])[c] for c in range(terms))
        f = pyro.sample("f", GaussianProcess(kernel, x))
        with pyro.plate("data", ROWS, subsample=x):
            pyro.sample("y", dist.Normal(f, bench.positive("noise", torch.tensor(0.1))), obs=y)

    def step(family):
        guide = AutoSparseGP(model, family)
        return partial(pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.005}), TraceQuadrature_ELBO()).step, x, y)

    times = bench.interleaved({name: step(family(points)) for name, family in FAMILIES.items()}, rounds, warm=3)
    return [f"{statistics.median(found):.1f}" for found in times.values()]


def main():
    options = bench.parsed(__doc__, terms=[4, 8, 16, 32], points=[16], rounds=15, kernel="rbf", out=None)
    torch.set_num_threads(1)
    asked = f"--terms {' '.join(map(str, options.terms))} --points {' '.join(map(str, options.points))}"
    asked += f" --kernel {options.kernel}" if options.kernel != "rbf" else ""
    page = bench.Page(options.out)
    page.say(
        "# A step of additive families",
        "",
        f"Made by `python tests/benchmarks/additive_time.py {asked} --rounds {options.rounds}`: "
        f"{bench.machine()}, float32, {BATCH} rows; ms of CPU time, medians.",
        "",
    )
    page.head("points a term", "terms", *(f"{name} (ms)" for name in FAMILIES))
    for points in options.points:
        for terms in options.terms:
            page.row(points, terms, *measure(terms, points, options.rounds, options.kernel))


if __name__ == "__main__":
    main()
