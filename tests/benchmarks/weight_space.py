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

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels
from pyro_sparsegp.families import ExactWeightSpace, WeightSpace


def regression(x, rank, width):
    """A program with a corrected deep basis kernel and Gaussian noise."""
    bench.seeded()
    layers = nn.Linear(x.shape[-1], width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, rank)
    network = nn.Sequential(*layers).to(x)

    def model(x, y=None, size=None):
        pyro.module("network", network)
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(network), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, bench.positive("noise", x.new_full((), 0.1))), obs=y)

    return model


def wall(x):
    """Seconds, once the device is done."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(x):
    """The most memory used so far, in GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if x.is_cuda else bench.peak()


def one(options):
    """One size: first call, seconds a step, peak memory."""
    x = 2 * torch.rand(options.one, 8, device=options.device) - 1
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(len(x), device=options.device)
    model = regression(x, options.rank, options.width)
    training = bench.Training(model, AutoSparseGP(model, ExactWeightSpace()), x, y, 1e-3)
    before, times = peak(x), []
    for _ in range(options.rounds + 1):
        start, cpu = wall(x), time.process_time()
        training.step()
        times.append((wall(x) - start, time.process_time() - cpu))
    print(times[0][0], *(statistics.median(each) for each in zip(*times[1:])), peak(x) - before)


def steps(options):
    """All sizes, and the slope."""
    if options.one:
        one(options)
        return
    page, points = bench.Page(), []
    page.say(f"{bench.machine(options.device)}, {options.rounds} rounds; r = {options.rank}, width {options.width}", "")
    page.head(
        *("N", "first call and step (s)", "step (s)", "step, process (s)", "peak (GiB)", "peak, handed back (GiB)"),
        "Φ alone (GiB)",
    )
    for size in options.sizes:
        command = [sys.executable, __file__, "steps", "--one", str(size), "--device", options.device]
        command += ["--rank", str(options.rank), "--width", str(options.width), "--rounds", str(options.rounds)]
        found = []
        for setting in ({}, {"MALLOC_MMAP_THRESHOLD_": "65536"}):
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | setting)
            found.append([float(part) for part in out.stdout.split()[-4:]])
        (first, seconds, own, kept), (*_, back) = found
        points.append((size, seconds, own))
        cells = f"{first:.1f}", f"{seconds:.3f}", f"{own:.3f}", f"{kept:.2f}", f"{back:.2f}"
        page.row(size, *cells, f"{4 * size * options.rank / 2**30:.3f}")
    logs = np.log(points)
    slopes = [np.polyfit(logs[:, 0], logs[:, column], 1)[0] for column in (1, 2)]
    page.say("", f"Log-log slope of a step's time: {slopes[0]:.3f} by the clock, {slopes[1]:.3f} of the process")


def elevation(options):
    """The map."""
    x, y = bench.read(options.data)
    scale = y.std()
    x = (2 * (x - x.amin(0)) / (x.amax(0) - x.amin(0)) - 1).float().to(options.device)
    y = ((y - y.mean()) / scale).float().to(options.device)
    order = bench.shuffled(len(x))
    train, test = order[: round(0.7 * len(x))], order[round(0.8 * len(x)) :]
    x, y, new, truth = x[train], y[train], x[test], y[test]
    page = bench.Page()
    page.say(
        f"{bench.machine(options.device)}; {len(x)} rows to train on, {len(new)} to test; r = {options.rank}, width "
        f"{options.width}; target's sd {scale:.0f} m",
        "",
    )
    page.head("method", "steps", "training (s)", "prediction (s)", "RMSE (standardised)", "RMSE (m)", "NLL")

    def report(label, guide, count, spent):
        start = wall(x)
        density, rmse, _ = bench.scores(*bench.predicted(guide, new), truth)
        taken = f"{wall(x) - start:.1f}"
        page.row(label, count, f"{spent:.0f}", taken, f"{rmse:.4f}", f"{rmse * scale:.1f}", f"{-density:.3f}")

    def trained(model, family, rate, batch):
        guide = AutoSparseGP(model, family)
        guide(x, y)  # all rows, for the level of the variance correction
        return bench.Training(model, guide, x, y, rate, batch).until(seconds=options.seconds)

    model = regression(x, options.rank, options.width)
    batches = trained(model, WeightSpace(), options.rate, options.batch)
    report(f"mini-batches of {options.batch}", batches.guide, batches.steps, batches.seconds)
    exact, start = AutoSparseGP(model, ExactWeightSpace()), bench.clock(x.device)
    exact(x, y)
    spent = batches.seconds + bench.clock(x.device) - start
    report("exact posterior, that network", exact, batches.steps, spent)
    whole = trained(regression(x, options.rank, options.width), ExactWeightSpace(), 3 * options.rate, 0)
    report("exact, all rows in each step", whole.guide, whole.steps, whole.seconds)


def main():
    options = bench.parsed(
        __doc__,
        *("steps", "map"),
        data=Path(),
        device="cpu",
        rank=64,
        width=64,
        sizes=[10_000, 31_623, 100_000, 316_228, 1_000_000],
        rounds=3,
        one=0,  # this size, in this process
        seconds=150.0,
        batch=1024,
        rate=3e-3,
    )
    pyro.enable_validation(False)
    {"steps": steps, "map": elevation}[options.part](options)


if __name__ == "__main__":
    main()
