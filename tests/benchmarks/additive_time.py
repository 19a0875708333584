"""A step of additive families by the number of terms, in one run.

python tests/benchmarks/additive_time.py [--terms 4 8 16 32] [--points 16] [--rounds 15] [--kernel rbf]
    [--out table.md]

A sum of RBF kernels, or of their Anova versions (--kernel anova), on a column each, some points a term, a Gaussian
likelihood and mini-batches of 500 rows, float32, one thread. Medians of CPU time over interleaved rounds.
"""

import argparse
import statistics
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import CoupledCovariance, CoupledPrecision, Family, MeanFieldAdditive

ROWS, BATCH = 5000, 500
KERNELS = {"rbf": kernels.RBF, "anova": lambda length: kernels.Anova(kernels.RBF(length))}


def families(points: int) -> dict[str, Family]:
    """What is compared, with so many points a term."""
    return {
        "CoupledPrecision": CoupledPrecision(points),
        "CoupledPrecision, Adam": CoupledPrecision(points, natural=False),
        "CoupledCovariance": CoupledCovariance(points),
        "CoupledCovariance, Adam": CoupledCovariance(points, natural=False),
        "MeanFieldAdditive": MeanFieldAdditive(points),
    }


def measure(terms: int, points: int, rounds: int, kind: str) -> dict[str, float]:
    """The time of a step of each, in ms."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    x = torch.rand(BATCH, terms)
    y = torch.sin(6 * x).sum(-1) + 0.1 * torch.randn(BATCH)

    def model(x: torch.Tensor, y: torch.Tensor) -> None:
        lengths = pyro.param("lengths", torch.full((terms,), 0.3), constraint=constraints.positive)
        noise = pyro.param("noise", torch.tensor(0.1), constraint=constraints.positive)
        kernel = sum(KERNELS[kind](lengths[c])[c] for c in range(terms))
        f = pyro.sample("f", GaussianProcess(kernel, x))
        with pyro.plate("data", ROWS, subsample=x):
            pyro.sample("y", dist.Normal(f, noise), obs=y)

    steps = {}
    for name, family in families(points).items():
        guide = AutoSparseGP(model, family)
        steps[name] = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.005}), TraceQuadrature_ELBO()).step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            start = time.process_time()
            step(x, y)
            if turn >= 3:
                times[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--points", type=int, nargs="*", default=[16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernel", choices=KERNELS, default="rbf")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = f"--terms {' '.join(map(str, options.terms))} --points {' '.join(map(str, options.points))}"
    asked += f" --kernel {options.kernel}" if options.kernel != "rbf" else ""
    names = list(families(1))
    lines = [
        "# A step of additive families",
        "",
        f"Made by `python tests/benchmarks/additive_time.py {asked} --rounds {options.rounds}`: one thread, "
        f"torch {torch.__version__}, float32, {BATCH} rows; ms of CPU time, medians.",
        "",
        "| points a term | terms | " + " | ".join(f"{name} (ms)" for name in names) + " |",
        "|" + "---|" * (len(names) + 2),
    ]
    print("\n".join(lines), flush=True)
    for points in options.points:
        for terms in options.terms:
            found = measure(terms, points, options.rounds, options.kernel)
            lines.append(f"| {points} | {terms} | " + " | ".join(f"{value:.1f}" for value in found.values()) + " |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
