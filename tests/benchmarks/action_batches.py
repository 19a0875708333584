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

import argparse
import platform
import resource
import time
from typing import Any, Optional

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ComputationAware


def model(x: Tensor, y: Any = None, size: Any = None) -> Any:
    """Regression with trainable hyperparameters."""
    length = pyro.param("length", x.new_full((x.shape[-1],), 0.3), constraint=constraints.positive)
    scale = pyro.param("scale", x.new_ones(()), constraint=constraints.positive)
    noise = pyro.param("noise", x.new_full((), 0.5), constraint=constraints.positive)
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def simulated(rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and noisy values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, 2, generator=generator)
    chi2 = torch.randn(500, 3, generator=generator).square().sum(-1, keepdim=True)
    omega = torch.randn(500, 2, generator=generator) * (3 / chi2).sqrt() / 0.2
    phase = 6.2832 * torch.rand(500, generator=generator)
    weights = torch.randn(500, generator=generator) * (2 / 500) ** 0.5
    f = torch.cat([torch.cos(part @ omega.mT + phase) @ weights for part in x.split(20_000)])
    return x, f + 0.3 * torch.randn(rows, generator=generator)


def read(path: str, rows: int) -> tuple[Tensor, Tensor]:
    """So many of a file's inputs and targets, standardised."""
    with np.load(path, allow_pickle=False) as file:
        x, y = (torch.as_tensor(file[key].astype(np.float64)) for key in ("X", "y"))
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


def exact_variance(x: Tensor, x_new: Tensor) -> Tensor:
    """The exact posterior's variance at trained hyperparameters, in float64."""
    length, scale, noise = (pyro.param(name).detach().double() for name in ("length", "scale", "noise"))
    kernel = scale * kernels.Matern32(length)
    x, x_new = x.double(), x_new.double()
    root = torch.linalg.cholesky(kernel(x) + noise**2 * torch.eye(len(x), dtype=x.dtype))
    return kernel.diag(x_new) - torch.linalg.solve_triangular(root, kernel(x, x_new), upper=False).square().sum(0)


def run(
    kind: str,
    family: Any,
    first: int,
    batch: int,
    steps: int,
    x: Tensor,
    y: Tensor,
    exact: bool,
    until: Optional[float] = None,
) -> float:
    """Train, predict and print a row of the table; seconds of training.

    :param exact: whether the variance is set against the exact posterior's.
    :param until: seconds to train for, in the place of steps.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    held = min(len(x) // 10, 20_000)
    (x_new, x), (y_new, y) = (part.split([held, len(x) - held]) for part in (x, y))
    guide = AutoSparseGP(model, family)
    guide(x[:first], y[:first])
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), TraceQuadrature_ELBO(2))
    start, taken = time.perf_counter(), 0
    while taken < steps if until is None else time.perf_counter() - start < until:
        taken += 1
        if batch:
            rows = torch.randint(len(x), (batch,))
            svi.step(x[rows], y[rows], size=len(x))
        else:
            svi.step(x, y)
    trained = time.perf_counter() - start
    start = time.perf_counter()
    with torch.no_grad():
        noise = pyro.param("noise")
        means, variances = [], []
        for part in x_new.split(5_000):
            q = guide.posterior(part)["f"]
            means.append(q.mean)
            variances.append(q.variance)
        mean, variance = torch.cat(means), torch.cat(variances)
        predictive = dist.Normal(mean, (variance + noise**2).sqrt())
        error = (mean - y_new).square().mean().sqrt()
        score = -predictive.log_prob(y_new).mean()
        within = ((y_new - mean).abs() < 1.645 * predictive.stddev).float().mean()
    predicting = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cells = f"{len(x):,}", kind, str(taken), f"{trained / taken:.2f}", f"{trained:.0f}", f"{predicting:.1f}"
    scores = (
        f"{float(error):.4f}",
        f"{float(score):.4f}",
        f"{100 * float(within):.0f}",
        f"{float(variance.mean().sqrt()):.3f}",
    )
    least: Optional[float] = None
    if exact:
        least = float((variance[:1000].double() / exact_variance(x, x_new[:1000])).min())
    over = "" if least is None else f"{least:.3f}"
    print("| " + " | ".join((*cells, *scores, over, f"{peak:.2f}")) + " |", flush=True)
    return trained


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 1_000_000])
    parser.add_argument("--support", nargs="*", type=int, default=[1_000, 4_000])
    parser.add_argument("--actions", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--whole", type=int, default=10_000)
    parser.add_argument("--data", default=None)
    parser.add_argument("--no-svgp", action="store_true")
    parser.add_argument("--same-time", action="store_true")
    options = parser.parse_args()
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(
        "| rows | family | steps | seconds a step | in all | predicting | RMSE | NLL | % in 90 % | mean sd of f | "
        "least variance over exact | peak GiB |"
    )
    print("|" + 12 * "---|")
    for rows in options.rows:
        x, y = read(options.data, rows) if options.data else simulated(rows)
        exact, longest = rows <= options.whole, 0.0
        for support in options.support:
            family = ComputationAware(options.actions, batches=True)
            kind = f"ComputationAware({options.actions}), on {support:,} rows"
            longest = run(kind, family, support, options.batch, options.steps, x, y, exact)
        for until in [] if options.no_svgp else [None, longest] if options.same_time else [None]:
            kind, family = f"SVGP({options.actions})", SVGP(options.actions)
            run(kind, family, 4_000, options.batch, options.steps, x, y, exact, until)
        if exact:
            kind = f"ComputationAware({options.actions}), all rows"
            run(kind, ComputationAware(options.actions), rows, 0, options.steps, x, y, exact)


if __name__ == "__main__":
    main()
