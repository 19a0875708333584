"""Test log-likelihood against seconds of fit, with and without its warm start, beside the plain loop.

python tests/benchmarks/fit_time.py DATA.npz [DATA.npz ...] [--inducing 64] [--out fit_time.md]

A file has X, (N, D), and y, (N,). Of a random order a tenth are test rows; columns and targets are standardised by the
training rows. A Matern-3/2 kernel with a length scale a column, a Gaussian likelihood, SVGP by natural steps, batches
of 1,024, float64, one thread. Seconds are of CPU time, all of it: the first call and the warm start are in them.
"""

import argparse
import platform
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SVGP


def model(x, y=None, size=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def load(path, split):
    with np.load(path, allow_pickle=False) as file:
        x, y = torch.from_numpy(file["X"]).double(), torch.from_numpy(file["y"]).double()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))
    test, train = order[: len(x) // 10], order[len(x) // 10 :]
    keep = x[train].std(0) > 0
    x = (x - x[train].mean(0))[:, keep] / x[train].std(0)[keep]
    y = (y - y[train].mean()) / y[train].std()
    return (x[train], y[train]), (x[test], y[test])


@torch.no_grad()
def log_likelihood(guide, x, y):
    """Of test rows, other latents at their medians."""
    noise = guide.median(x[:2], y[:2])["noise"]
    q = guide.posterior(x)["f"]
    return dist.Normal(q.mean, (q.variance + noise**2).sqrt()).log_prob(y).mean().item()


def fitted(train, inducing, steps, *, warm_start, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, SVGP(inducing, **options))
    began = time.process_time()
    fit(
        model,
        guide,
        train,
        batch_size=1024,
        steps=steps,
        loss=TraceQuadrature_ELBO(2),
        warm_start=warm_start,
        progress=False,
    )
    return guide, time.process_time() - began


def looped(train, inducing, steps, **options):
    """The loop that README shows first."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    (x, y), began = train, time.process_time()
    guide = AutoSparseGP(model, SVGP(inducing, **options))
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    guide(x[:8192], y[:8192], size=len(x))
    for _ in range(steps):
        rows = torch.randint(len(x), (1024,))
        svi.step(x[rows], y[rows], size=len(x))
    return guide, time.process_time() - began


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--inducing", type=int, default=64)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 100, 300, 1000])
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    lines = [
        f"M = {options.inducing}, {platform.processor() or platform.machine()}, torch {torch.__version__}, one thread.",
        "",
        "| data | steps | fit, warm start: test log-likelihood (seconds) | fit, cold | svi.step, Adam at 0.01 |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for path in options.files:
        train, test = load(path, options.split)
        for steps in options.steps:
            cells = []
            for way in (partial(fitted, warm_start=True), partial(fitted, warm_start=False), looped):
                guide, seconds = way(train, options.inducing, steps)
                cells.append(f"{log_likelihood(guide, *test):.3f} ({seconds:.1f} s)")
            lines.append(f"| {path.stem} | {steps:,} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
