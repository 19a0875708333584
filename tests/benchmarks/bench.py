"""What the benchmarks share: options, data, a program, training by a clock, scores, runs that are kept, tables."""

import argparse
import itertools
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import GaussianProcess, TraceQuadrature_ELBO, kernels

HERE = Path(__file__).parent


def parsed(doc, *parts, **options):
    """The command's options, told by their defaults: a list takes several, a type is required, False is a flag.

    :param parts: what the first argument may be.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parts:
        parser.add_argument("part", choices=parts)
    for name, default in options.items():
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, type):
            how = {"type": default, "required": True}
        elif isinstance(default, list):
            how = {"nargs": "+", "type": type(default[0]), "default": default}
        else:
            how = {"type": str if default is None else type(default), "default": default}
        parser.add_argument("--" + name.replace("_", "-"), **how)
    return parser.parse_args()


# Data.


def read(path):
    """Inputs and targets of a file, in float64."""
    with np.load(path, allow_pickle=False) as file:
        return tuple(torch.as_tensor(file[key].astype(np.float64)) for key in ("X", "y"))


def official(path, split=0):
    """Which rows are for tests in a split that the file has."""
    with np.load(path, allow_pickle=False) as file:
        masks = np.unpackbits(file["test_mask_packed"], axis=0, count=int(file["n"]))
    return torch.from_numpy(masks[:, split].astype(bool))


def shuffled(num, seed=0):
    """The numbers below ``num`` in an order that the seed alone decides."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def standardised(x, y, train):
    """Both in units of their spread over training rows, without the columns that are constant there."""
    spread = x[train].std(0)
    x = ((x - x[train].mean(0)) / spread.clamp(min=1e-8))[:, spread > 1e-8]
    return x, (y - y[train].mean()) / y[train].std()


# Programs and training.


def positive(name, value):
    """A positive parameter that starts at a value."""
    return pyro.param(name, value, constraint=constraints.positive)


def regression(length, noise=0.3, ard=True, kernel=kernels.Matern32):
    """A program: one scale, a length scale a column or one of all, a normal likelihood."""

    def model(x, y=None, size=None):
        scale = positive("scale", x.new_ones(()))
        ell = positive("length", x.new_full(x.shape[-1:] if ard else (), length))
        f = pyro.sample("f", GaussianProcess(scale * kernel(ell), x))
        sd = positive("noise", x.new_full((), noise))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, sd), obs=y)

    return model


def clock(device="cpu"):
    """Seconds of the process on a CPU, which other jobs do not lengthen; else of the clock, when all is done."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def place(options, *limits, kind="run"):
    """Where a run is kept, by its limits, and by its device if that is not the CPU; nowhere without ``--keep``."""
    if not options.keep:
        return None
    Path(options.keep).mkdir(parents=True, exist_ok=True)
    parts = [*limits, *[options.device] * (options.device != "cpu")]
    return Path(
        options.keep, ", ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts) + f".{kind}"
    )


def kept(path):
    """What :func:`keep` wrote there, or nothing."""
    return torch.load(path, weights_only=False) if path and path.exists() else {}


def keep(path, state):
    """Write a run's state so that the file is the old one or the new one; nowhere without a path."""
    if path:
        torch.save(state, part := path.with_suffix(".part"))
        part.replace(path)


def tell(values):
    """A point of a curve as it comes, beside the page."""
    print(*(f"{value:.4g}" for value in values), file=sys.stderr, flush=True)


def epochs(num, batch):
    """Rows of mini-batches, epoch after epoch."""
    while True:
        yield from torch.randperm(num).split(batch)


class Training:
    """A guide in training by SVI; its clock counts steps alone.

    :param batch: rows a step; 0 is all.
    """

    def __init__(self, model, guide, x, y, rate=0.01, batch=0, nodes=2):
        self.guide, self.x, self.y, self.batch = guide, x, y, batch
        self.svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": rate}), TraceQuadrature_ELBO(nodes))
        self.seconds, self.steps = 0.0, 0

    def step(self):
        """One step, on rows at random."""
        if not self.batch:
            return self.svi.step(self.x, self.y)
        rows = torch.randint(len(self.x), (self.batch,)).to(self.x.device)
        return self.svi.step(self.x[rows], self.y[rows], size=len(self.x))

    def until(self, steps=math.inf, seconds=math.inf):
        """Train on, until so many steps or seconds have passed in all."""
        while self.steps < steps and self.seconds < seconds:
            start = clock(self.x.device)
            self.step()
            self.seconds, self.steps = self.seconds + clock(self.x.device) - start, self.steps + 1
        return self


def descending(optimiser, loss):
    """A closure of an optimiser."""

    def closure():
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def interleaved(steps, rounds, warm=2, repeats=1, device="cpu"):
    """Milliseconds of each of several steps, a value a round: they take turns, so that a slow moment slows all."""
    times = {name: [] for name in steps}
    for turn, (name, step) in itertools.product(range(rounds + warm), steps.items()):
        start = clock(device)
        for _ in range(repeats):
            step()
        if turn >= warm:
            times[name].append(1e3 * (clock(device) - start) / repeats)
    return times


def ratio(times, one, other):
    """The median of each round's ratio."""
    return statistics.median(a / b for a, b in zip(times[one], times[other]))


# Scores.


@torch.no_grad()
def predicted(guide, x):
    """Mean and variance of new observations of :func:`regression`."""
    q = guide.posterior(x)["f"]
    return q.mean, q.variance + pyro.param("noise") ** 2


def scores(mean, variance, y):
    """Mean log density, RMSE, and how often a 95 % interval covers."""
    error = y - mean
    density = -0.5 * (math.log(2 * math.pi) + variance.log() + error.square() / variance).mean()
    inside = (error.abs() < 1.959964 * variance.sqrt()).double().mean()
    return float(density), float(error.square().mean().sqrt()), float(inside)


# Pages.


class Page:
    """Lines that are printed as they come, and kept in a file if there is to be one."""

    def __init__(self, out=None):
        self.out, self.lines = out, []

    def say(self, *lines):
        self.lines += lines
        print("\n".join(lines), flush=True)
        if self.out:
            Path(self.out).write_text("\n".join(self.lines) + "\n")

    def row(self, *cells):
        self.say(row(cells))

    def head(self, *heads):
        self.say(row(heads), row(["---"] * len(heads)))


def row(cells):
    """A line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table(heads, rows):
    """A table."""
    return "\n".join(map(row, [heads, ["---"] * len(heads), *rows]))


def mean_error(values, digits=3):
    """Mean, and its standard error if there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ({statistics.stdev(values) / len(values) ** 0.5:.{digits}f})"


def machine(device="cpu"):
    """What the run was made on and with."""
    where = torch.cuda.get_device_name() if str(device).startswith("cuda") else f"{platform.machine()} CPU"
    return f"{where}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


def seeded(seed=0):
    """An empty parameter store and a seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
