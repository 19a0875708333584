"""Peak memory of a posterior's DataTree at N = 200,000 with 500 draws: python tests/benchmarks/diagnostics_memory.py"""

import time
import warnings

import bench
import pyro
import torch

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO
from pyro_sparsegp.diagnostics import loo_large, predictive_scores, to_datatree
from pyro_sparsegp.families import SVGP


def main():
    options = bench.parsed(__doc__, rows=200_000, draws=500, inducing=32, steps=1000, observations=200)
    pyro.set_rng_seed(0)
    inputs = torch.rand(options.rows + options.rows // 10, 2)
    seen = torch.sin(6 * inputs[:, 0]) * torch.cos(4 * inputs[:, 1]) + 0.2 * torch.randn(len(inputs))
    x, y, new_x, new_y = inputs[: options.rows], seen[: options.rows], inputs[options.rows :], seen[options.rows :]
    guide = AutoSparseGP(bench.bayesian, SVGP(options.inducing))
    guide(x[:2000], y[:2000])
    svi = pyro.infer.SVI(
        bench.bayesian,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / options.steps)}),
        TraceQuadrature_ELBO(2),
    )
    for _ in range(options.steps):
        rows = torch.randint(options.rows, (1000,))
        svi.step(x[rows], y[rows], size=options.rows)
    print(f"N = {options.rows}, S = {options.draws}, M = {options.inducing}, float32")
    print(f"trained: peak {bench.peak():.2f} GiB")
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = loo_large(bench.bayesian, guide, x, y, observations=options.observations, num_samples=options.draws)
    spent = time.perf_counter() - start
    for warning in caught:
        print(f"  {warning.category.__name__}: {warning.message}")
    print(
        f"loo_large: {spent:.0f} s, peak {bench.peak():.2f} GiB; target {found.target!r}, k-hat of p/q {found.khat:.2f}"
    )
    each = found.elpd / options.rows
    print(f"  elpd {found.elpd:.0f} ± {found.se:.0f}, subsampling {found.subsampling_se:.1f}; a row {each:.4f}")
    scores = predictive_scores(bench.bayesian, guide, new_x, new_y, num_samples=50).summary.loc["log_score"]
    print(f"  log score of {len(new_x)} new rows: {scores['mean']:.4f} ± {scores['se']:.4f} a row")
    start = time.perf_counter()
    tree = to_datatree(bench.bayesian, guide, x, y, num_samples=options.draws, seed=0)
    spent = time.perf_counter() - start
    print(f"to_datatree: {spent:.0f} s, peak {bench.peak():.2f} GiB; the tree itself {tree.nbytes / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
