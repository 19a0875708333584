"""How a training step's time and a process's memory grow with rows, inducing points, terms and outputs. Makes scale.md.

python tests/benchmarks/scale.py sizes [--rounds 7] [--only rows points terms outputs]      one thread
python tests/benchmarks/scale.py cores [--rounds 7]                        two threads, and two processes by torchrun

A normal likelihood, parameters for hyperparameters, Adam and natural steps, float32, two columns (of additive kernels
one a term). Each size is a process of its own: time is the median of its steps, in CPU time; memory is what the process
grew by at its peak, its data and the guide's first call included. An exponent is the slope of the logarithms between a
size and the one before. "cores" is by the clock.
"""

import math
import multiprocessing
import os
import statistics
import subprocess
import sys
from resource import RUSAGE_SELF, getrusage

import bench
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, families, fit, kernels

MANY, POINTS = [10_000, 31_623, 100_000, 316_228, 1_000_000], [64, 128, 256, 512, 1024]
SWEEPS = {  # by what grows: sizes, the exponent that the family's docstring gives, the family, rows and rows a step
    "rows, `SVGP(64)`, all in each step": (MANY, 1, lambda n: families.SVGP(64), None, 0),
    "rows, `SVGP(64)`, 1,000 in each step": (MANY[::2], 0, lambda n: families.SVGP(64), None, 1000),
    "rows, `SGPR(64)`": (MANY, 1, lambda n: families.SGPR(64), None, 0),
    "rows, `ComputationAware(64)`": ([2500, 5000, 10_000, 20_000], 2, lambda n: families.ComputationAware(64), None, 0),
    "points, `SVGP` on 1,024 rows": (POINTS, 3, families.SVGP, 1024, 0),
    "points, `SGPR` on 10,000 rows": (POINTS, 3, families.SGPR, 10_000, 0),
    "terms, `CoupledPrecision(16)`": ([4, 8, 16, 32, 64], 1, lambda c: families.CoupledPrecision(16), 1000, 0),
    "outputs, `SVGP(64)`": ([1, 4, 16, 64], 1, lambda p: families.SVGP(64), 1000, 0),
}
AT = [(64, 1000), (256, 2000), (512, 1024)]  # inducing points, rows in each step


def additive(x, y=None):
    """A sum of one term a column."""
    lengths = bench.positive("length", x.new_full(x.shape[-1:], 0.3)).unbind()
    f = pyro.sample("f", GaussianProcess(sum(kernels.Matern32(ell)[i] for i, ell in enumerate(lengths)), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def outputs(x, y=None):
    """Independent functions, each with lengths of its own."""
    lengths = bench.positive("length", x.new_full((y.shape[-1], 2), 0.3))
    f = pyro.sample("f", GaussianProcess(kernels.Matern32(lengths), x).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f.mT, 0.3).to_event(1), obs=y)


def training(family, num, batch=0, terms=2, num_outputs=0):
    """A training of one of the three programs."""
    bench.seeded()
    x = torch.rand(num, terms)
    y = torch.sin(8 * x).sum(-1) + 0.3 * torch.randn(num)
    y = y[:, None] + 0.3 * torch.randn(num, num_outputs) if num_outputs else y
    model = outputs if num_outputs else bench.regression(0.3) if terms == 2 else additive
    return bench.Training(model, AutoSparseGP(model, family), x, y, batch=batch)


def one_size(name, size, rounds):
    """Milliseconds of a step, and megabytes that the process grew by."""
    before, (_, _, family, num, batch) = getrusage(RUSAGE_SELF).ru_maxrss, SWEEPS[name]
    more = {"terms": size} if name.startswith("terms") else {"num_outputs": size} if name.startswith("out") else {}
    run = training(family(size), num or size, batch, **more).until(2)
    milliseconds = bench.interleaved({"": run.step}, rounds)[""]
    return statistics.median(milliseconds), (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024


def sizes(page, rounds, only):
    """A table of sweeps."""
    page.head("what grows", "to", "step (ms)", "exponent", "claimed", "memory (MB)", "exponent of memory")
    for name, (steps, claim, *_) in [each for each in SWEEPS.items() if each[0].split(",")[0] in only]:
        last = None
        for size in steps:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                found = pool.apply(one_size, (name, size, rounds))
            ratios = [f / b for f, b in zip(found, last[1:])] if last else []
            grown = [f"{math.log(ratio) / math.log(size / last[0]):.2f}" for ratio in ratios] or ["", ""]
            page.row(name, size, f"{found[0]:.1f}", grown[0], claim, f"{found[1]:.0f}", grown[1])
            last = size, *found


def worker(rounds, joined):
    """What each process of torchrun does: milliseconds of a step, for each of the sizes, printed by the first."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = torch.distributed.group.WORLD if joined else None
    for m, num in AT:
        run = training(families.SVGP(m), world * num, num)
        data, how = (run.x[rank::world], run.y[rank::world]), {"batch_size": num, "group": group, "progress": False}
        for steps in (5, 20 * rounds):
            result = fit(run.svi.model, run.guide, data, steps=steps, **how)
        if not rank:
            print(1e3 * result.seconds / steps, flush=True)


def by(processes, threads, rounds, how="apart"):
    """Milliseconds of a step, by the clock, for each of the sizes."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), __file__, how]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    options = {"check": True, "stdout": subprocess.PIPE, "text": True, "env": environment}
    return map(float, subprocess.run([sys.executable, *command, "--rounds", str(rounds)], **options).stdout.split())


def cores(page, rounds, _):
    """A table of a second thread, and of a second process with as many rows again, on its own and joined."""
    heads = "M, rows a process", "1 thread (ms)", "2 threads", "2 processes apart", "2 processes joined"
    page.head(*heads, "speed of 2 threads", "rows a second, apart", "rows a second, joined")
    ways = by(1, 1, rounds), by(1, 2, rounds), by(2, 1, rounds), by(2, 1, rounds, "joined")
    for (m, num), one, threads, apart, joined in zip(AT, *ways):
        gains = one / threads, 2 * one / apart, 2 * one / joined
        page.row(f"{m}, {num}", *(f"{v:.1f}" for v in (one, threads, apart, joined)), *(f"{v:.2f}" for v in gains))


def main():
    options = bench.parsed(
        __doc__, "sizes", "cores", "apart", "joined", rounds=7, only=["rows", "points", "terms", "outputs"], out=None
    )
    if options.part in ("apart", "joined"):
        worker(options.rounds, options.part == "joined")
    else:
        page = bench.Page(options.out)
        torch.set_num_threads(1)
        page.say(f"{bench.machine()}, float32, {options.rounds} rounds", "")
        {"sizes": sizes, "cores": cores}[options.part](page, options.rounds, options.only)


if __name__ == "__main__":
    main()
