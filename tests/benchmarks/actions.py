"""Paper 2's experiments on actions and on SVGP's inducing points, as tables.

python tests/benchmarks/actions.py [--what policies placement scaling] [--rows 10000 40000 100000]

policies: the actions' mutual information with f (lemma S5) and their Grassmann distance from the top eigenvectors
(eq. S26) for each policy, on n = 500 uniform inputs; "sparse" before and after training by the bound.
placement: section S5.1: n = 500, d = 1 to 25, data from a Matern-3/2 prior; where SVGP's 64 inducing points go
(eq. S24) and the share of posterior in predictive variance there (eq. S25), beside the exact GP that made the data.
scaling: seconds and peak memory of a training step of ComputationAware(256) with sparse actions. The step evaluates
all pairs of rows: "linear" in the paper is said of parallel hardware.
"""

import argparse
import platform
import resource
import subprocess
import sys
import time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ComputationAware


def model(x: Tensor, y: Any = None) -> Any:
    """Regression with trainable hyperparameters."""
    length = pyro.param("length", x.new_full((x.shape[-1],), 0.5 * x.shape[-1] ** 0.5), constraint=constraints.positive)
    scale = pyro.param("scale", x.new_ones(()), constraint=constraints.positive)
    noise = pyro.param("noise", x.new_full((), 0.3), constraint=constraints.positive)
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def simulate(columns: int, num: int = 500, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Uniform inputs, targets from a Matern-3/2 process whose length scale grows with √d."""
    x = torch.rand(num, columns)
    k = kernels.Matern32(0.5 * columns**0.5)
    return x, GaussianProcess(k, x).rsample() + noise * torch.randn(num)


def train(guide: AutoSparseGP, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    """Adam, its rate falling linearly to a tenth."""
    schedule = pyro.optim.PyroLRScheduler(
        torch.optim.lr_scheduler.LinearLR,
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": rate}, "start_factor": 1.0, "end_factor": 0.1}
        | {"total_iters": epochs},
    )
    svi = pyro.infer.SVI(model, guide, schedule, TraceQuadrature_ELBO(2))
    for _ in range(epochs):
        svi.step(x, y)
        schedule.step()


def policies() -> None:
    """Lemma S5 and eq. S26."""
    print(
        "| actions | policy | mutual information (nats) | Grassmann distance to the eigenvectors |\n|---|---|---|---|"
    )
    torch.manual_seed(0)
    x, y = simulate(2)
    k, noise = kernels.Matern32(0.5 * 2**0.5), 0.1

    def fixed(x: Tensor, y: Any = None) -> Any:
        f = pyro.sample("f", GaussianProcess(k, x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    for num in (4, 16, 64):
        top = torch.linalg.eigh(k(x))[1][:, -num:]
        for policy in ("eigen", "cg", "sparse", "sparse, trained", "random"):
            pyro.clear_param_store()
            guide = AutoSparseGP(fixed, ComputationAware(num, policy.split(",")[0], tolerance=0.0))
            guide(x, y)
            if "trained" in policy:
                svi = pyro.infer.SVI(fixed, guide, pyro.optim.Adam({"lr": 0.1}), TraceQuadrature_ELBO(2))
                for _ in range(200):
                    svi.step(x, y)
            s = torch.linalg.qr(guide.posterior(x)["f"].basis.actions.matrix.detach())[0]
            information = 0.5 * torch.logdet(torch.eye(num) + s.mT @ k(x) @ s / noise**2)
            angles = torch.linalg.svdvals(s.mT @ top).clamp(max=1).acos()
            print(f"| {num} | {policy} | {information:.2f} | {angles.norm():.3f} |", flush=True)


def placement() -> None:
    """Section S5.1: eq. S24 and S25."""
    print(
        "| d | distance of Z to the data, in lengths (S24) | of uniform points | S25 at Z | S25, exact GP | noise sd |"
    )
    print("|---|---|---|---|---|---|")
    for columns in range(1, 26):
        torch.manual_seed(0)
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        x, y = simulate(columns)
        guide = AutoSparseGP(model, SVGP(64, init=lambda kernel, x, num: torch.rand(num, x.shape[-1])))
        train(guide, x, y, 300, 0.1)
        z, length = guide.gps.f.basis.inputs[0].detach(), pyro.param("length").detach()
        noise = pyro.param("noise").detach()

        def distance(a: Tensor, x: Tensor = x, length: Tensor = length) -> float:
            return float(torch.cdist(a / length, x / length).min(-1)[0].mean())

        variance = guide.posterior(z)["f"].variance.detach()
        k = kernels.Matern32(0.5 * columns**0.5)
        gain = torch.linalg.solve(k(x) + 0.01 * torch.eye(len(x)), k(x, z))
        exact = k.diag(z) - (k(x, z) * gain).sum(0)
        cells = distance(z), distance(torch.rand(64, columns)), (variance / (variance + noise**2)).mean()
        rest = (exact / (exact + 0.01)).mean(), noise
        print(f"| {columns} | " + " | ".join(f"{float(cell):.3f}" for cell in (*cells, *rest)) + " |", flush=True)


def step(rows: int) -> None:
    """One training step, its seconds and this process's peak memory."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    x = torch.rand(rows, 3)
    y = torch.sin(8 * x.sum(-1)) + 0.1 * torch.randn(rows)
    guide = AutoSparseGP(model, ComputationAware(256))
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    guide.prepare(x, y)
    start = time.perf_counter()
    svi.step(x, y)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    nanoseconds = 1e9 * seconds / rows**2
    print(f"| {rows:,} | {seconds:.1f} | {peak:.2f} | {nanoseconds:.1f} |", flush=True)


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["policies", "placement", "scaling"])
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 40_000, 100_000])
    parser.add_argument("--step", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        step(options.step)
        return
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    torch.set_default_dtype(torch.float64)
    if "policies" in options.what:
        policies()
    if "placement" in options.what:
        placement()
    if "scaling" in options.what:
        print("| N | seconds a step | peak GiB | nanoseconds a pair |\n|---|---|---|---|", flush=True)
        for rows in options.rows:  # a process each, for its peak memory
            subprocess.run([sys.executable, __file__, "--step", str(rows)], check=True)


if __name__ == "__main__":
    main()
