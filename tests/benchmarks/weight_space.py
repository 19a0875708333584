"""Exact weight space on many rows: time and memory of a full-batch step, and a map of 816,307 rows.

python tests/benchmarks/weight_space.py steps [--sizes 10000 31623 100000 316228 1000000] [--rank 64] [--rounds 3]
python tests/benchmarks/weight_space.py map --data DIR/prism_elevation_us.npz [--seconds 150]

A step is forward, backward and an Adam update of the bound of `ExactWeightSpace` under a corrected deep basis kernel
on 8-dimensional inputs, float32, with a network of two tanh layers. Each size runs in a process of its own; seconds
are medians over rounds, of the clock and of the process (which another job on the machine does not lengthen as much).
"Peak" is what the process takes beyond its state before the guide is made, when it has the data: as it is, and where
glibc hands freed memory back at once (MALLOC_MMAP_THRESHOLD_=65536) instead of keeping it in pieces.

The map is elevation (inputs scaled to [-1, 1], targets standardised, 70/10/20 % split): mini-batches, all rows at
once from scratch, and the exact posterior of all rows under the network that the mini-batches trained.
"""

import argparse
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import ExactWeightSpace, Family, WeightSpace


class Regression:
    """A corrected deep basis kernel with Gaussian noise."""

    def __init__(self, x: Tensor, rank: int, width: int) -> None:
        pyro.clear_param_store()
        torch.manual_seed(0)
        columns = x.shape[-1]
        self.network = nn.Sequential(
            nn.Linear(columns, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, rank)
        ).to(x)

    def __call__(self, x: Tensor, y: Optional[Tensor] = None, size: Optional[int] = None) -> Any:
        """The model."""
        pyro.module("network", self.network)
        noise = pyro.param("noise", x.new_full((), 0.1), constraint=constraints.positive)
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(self.network), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)


def trainer(model: Regression, family: Family, rate: float) -> tuple[AutoSparseGP, Any]:
    """A guide, and a step of it."""
    guide = AutoSparseGP(model, family)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": rate}), TraceQuadrature_ELBO(2))
    return guide, svi.step


def clock(x: Tensor) -> float:
    """Seconds, once the device is done."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(x: Tensor) -> float:
    """The most memory used so far, in GiB."""
    if x.is_cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def one(options: argparse.Namespace) -> None:
    """One size: first call, seconds a step, peak memory."""
    x = 2 * torch.rand(options.one, 8, device=options.device) - 1
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(len(x), device=options.device)
    model = Regression(x, options.rank, options.width)
    _, step = trainer(model, ExactWeightSpace(), 1e-3)
    before, start = peak(x), clock(x)
    step(x, y)
    first = clock(x) - start
    times, own = [], []
    for _ in range(options.rounds):
        start, cpu = clock(x), time.process_time()
        step(x, y)
        times.append(clock(x) - start)
        own.append(time.process_time() - cpu)
    print(first, statistics.median(times), statistics.median(own), peak(x) - before)


def steps(options: argparse.Namespace) -> None:
    """All sizes, and the slope."""
    if options.one:
        one(options)
        return
    print(
        f"{platform.machine()}, {options.device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"{options.rounds} rounds; r = {options.rank}, width {options.width}\n\n"
        "| N | first call and step (s) | step (s) | step, process (s) | peak (GiB) | peak, handed back (GiB) "
        "| Φ alone (GiB) |\n|---|---|---|---|---|---|---|"
    )
    points = []
    for size in options.sizes:
        command = [sys.executable, __file__, "steps", "--one", str(size), "--device", options.device]
        command += ["--rank", str(options.rank), "--width", str(options.width), "--rounds", str(options.rounds)]
        memory = []
        for setting in ({}, {"MALLOC_MMAP_THRESHOLD_": "65536"}):
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | setting)
            *found, used = (float(part) for part in out.stdout.split()[-4:])
            memory.append(used)
            if not setting:
                first, seconds, own = found
        points.append((size, seconds, own))
        print(
            f"| {size} | {first:.1f} | {seconds:.3f} | {own:.3f} | {memory[0]:.2f} | {memory[1]:.2f} "
            f"| {4 * size * options.rank / 2**30:.3f} |",
            flush=True,
        )
    logs = np.log(points)
    slopes = [np.polyfit(logs[:, 0], logs[:, column], 1)[0] for column in (1, 2)]
    print(f"\nLog-log slope of a step's time: {slopes[0]:.3f} by the clock, {slopes[1]:.3f} of the process")


def elevation(options: argparse.Namespace) -> None:
    """The map."""
    z = np.load(options.data)
    x, y = (torch.from_numpy(z[key]).double() for key in ("X", "y"))
    scale = y.std()
    x = (2 * (x - x.amin(0)) / (x.amax(0) - x.amin(0)) - 1).float().to(options.device)
    y = ((y - y.mean()) / scale).float().to(options.device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cut, end = round(0.7 * len(x)), round(0.8 * len(x))
    train, test = order[:cut], order[end:]
    x, y, new, truth = x[train], y[train], x[test], y[test]
    print(
        f"{platform.machine()}, {options.device}, {torch.get_num_threads()} thread(s); {len(x)} rows to train on, "
        f"{len(new)} to test; r = {options.rank}, width {options.width}; target's sd {scale:.0f} m\n\n"
        "| method | steps | training (s) | prediction (s) | RMSE (standardised) | RMSE (m) | NLL |\n"
        "|---|---|---|---|---|---|---|"
    )

    def report(label: str, guide: AutoSparseGP, count: int, spent: float) -> None:
        start = clock(x)
        with torch.no_grad():
            q = guide.posterior(new)["f"]
            variance = q.variance + pyro.param("noise") ** 2
            error = (truth - q.mean).square()
            nll = 0.5 * (math.log(2 * math.pi) + variance.log() + error / variance).mean()
            rmse = error.mean().sqrt().item()
        taken = clock(x) - start
        print(
            f"| {label} | {count} | {spent:.0f} | {taken:.1f} | {rmse:.4f} | {rmse * scale:.1f} | {nll:.3f} |",
            flush=True,
        )

    model = Regression(x, options.rank, options.width)
    guide, step = trainer(model, WeightSpace(), options.rate)
    guide(x, y)  # all rows, for the level of the variance correction
    spent, count = 0.0, 0
    while spent < options.seconds:
        for rows in torch.randperm(len(x), device=x.device).split(options.batch):
            start = clock(x)
            step(x[rows], y[rows], size=len(x))
            spent, count = spent + clock(x) - start, count + 1
            if spent > options.seconds:
                break
    report(f"mini-batches of {options.batch}", guide, count, spent)

    exact, _ = trainer(model, ExactWeightSpace(), options.rate)
    start = clock(x)
    exact(x, y)
    report("exact posterior, that network", exact, count, spent + clock(x) - start)

    model = Regression(x, options.rank, options.width)
    guide, step = trainer(model, ExactWeightSpace(), 3 * options.rate)
    spent, count = 0.0, 0
    while spent < options.seconds:
        start = clock(x)
        step(x, y)
        spent, count = spent + clock(x) - start, count + 1
    report("exact, all rows in each step", guide, count, spent)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(required=True)
    of_steps, of_map = what.add_parser("steps"), what.add_parser("map")
    for each in (of_steps, of_map):
        each.add_argument("--device", default="cpu")
        each.add_argument("--rank", type=int, default=64)
        each.add_argument("--width", type=int, default=64)
    of_steps.add_argument("--sizes", type=int, nargs="+", default=[10_000, 31_623, 100_000, 316_228, 1_000_000])
    of_steps.add_argument("--rounds", type=int, default=3)
    of_steps.add_argument("--one", type=int, default=0, help="this size, in this process")
    of_steps.set_defaults(run=steps)
    of_map.add_argument("--data", type=Path, required=True)
    of_map.add_argument("--seconds", type=float, default=150.0)
    of_map.add_argument("--batch", type=int, default=1024)
    of_map.add_argument("--rate", type=float, default=3e-3)
    of_map.set_defaults(run=elevation)
    options = parser.parse_args()
    pyro.enable_validation(False)
    options.run(options)


if __name__ == "__main__":
    main()
