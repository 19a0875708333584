"""Peak memory of a posterior's DataTree at N = 200,000 with 500 draws: python tests/benchmarks/diagnostics_memory.py"""

import argparse
import resource
import time
import warnings

import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.diagnostics import loo_large, predictive_scores, to_datatree
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
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--observations", type=int, default=200)
    options = parser.parse_args()
    pyro.set_rng_seed(0)
    inputs = torch.rand(options.rows + options.rows // 10, 2)
    seen = torch.sin(6 * inputs[:, 0]) * torch.cos(4 * inputs[:, 1]) + 0.2 * torch.randn(len(inputs))
    x, y, new_x, new_y = inputs[: options.rows], seen[: options.rows], inputs[options.rows :], seen[options.rows :]
    guide = AutoSparseGP(model, SVGP(options.inducing))
    guide(x[:2000], y[:2000])
    svi = pyro.infer.SVI(
        model, guide, pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / options.steps)}), TraceQuadrature_ELBO(2)
    )
    for _ in range(options.steps):
        rows = torch.randint(options.rows, (1000,))
        svi.step(x[rows], y[rows], size=options.rows)
    print(f"N = {options.rows}, S = {options.draws}, M = {options.inducing}, float32")
    print(f"trained: peak {peak():.2f} GiB")
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = loo_large(model, guide, x, y, observations=options.observations, num_samples=options.draws)
    spent = time.perf_counter() - start
    for warning in caught:
        print(f"  {warning.category.__name__}: {warning.message}")
    print(f"loo_large: {spent:.0f} s, peak {peak():.2f} GiB; target {found.target!r}, k-hat of p/q {found.khat:.2f}")
    each = found.elpd / options.rows
    print(f"  elpd {found.elpd:.0f} ± {found.se:.0f}, subsampling {found.subsampling_se:.1f}; a row {each:.4f}")
    scores = predictive_scores(model, guide, new_x, new_y, num_samples=50).summary.loc["log_score"]
    print(f"  log score of {len(new_x)} new rows: {scores['mean']:.4f} ± {scores['se']:.4f} a row")
    start = time.perf_counter()
    tree = to_datatree(model, guide, x, y, num_samples=options.draws, seed=0)
    spent = time.perf_counter() - start
    print(f"to_datatree: {spent:.0f} s, peak {peak():.2f} GiB; the tree itself {tree.nbytes / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
