"""Peak memory of a posterior's DataTree at N = 200,000 with 500 draws: python tests/benchmarks/diagnostics_memory.py"""

import argparse
import resource
import time

import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.diagnostics import loo_large, to_datatree
from pyro_sparsegp.families import SVGP


def model(x, y=None, size=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def peak():
    """Peak resident memory so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--inducing", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    pyro.set_rng_seed(0)
    x = torch.rand(options.rows, 2)
    y = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.2 * torch.randn(options.rows)
    guide = AutoSparseGP(model, SVGP(options.inducing))
    guide(x[:2000], y[:2000])
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2))
    for _ in range(options.steps):
        rows = torch.randint(options.rows, (1000,))
        svi.step(x[rows], y[rows], size=options.rows)
    print(f"N = {options.rows}, S = {options.draws}, M = {options.inducing}, float32")
    print(f"trained: peak {peak():.2f} GiB")
    start = time.perf_counter()
    found = loo_large(model, guide, x, y, observations=200, num_samples=options.draws, target="none")
    spent = time.perf_counter() - start
    print(f"loo_large: {spent:.0f} s, peak {peak():.2f} GiB; elpd {found.elpd:.0f} ± {found.subsampling_se:.1f}")
    start = time.perf_counter()
    tree = to_datatree(model, guide, x, y, num_samples=options.draws, seed=0)
    spent = time.perf_counter() - start
    print(f"to_datatree: {spent:.0f} s, peak {peak():.2f} GiB; the tree itself {tree.nbytes / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
