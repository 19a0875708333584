"""The memory of an epoch of fit over rows on disk: python tests/benchmarks/fit_memory.py --rows 10000000

Rows of 8 columns are written to a temporary folder in blocks. Then a process of its own fits SVGP for one epoch, and
reports its peak resident memory: from memory maps, with batches of rows anywhere, and from an iterable that reads
blocks. Pages of a memory map count as resident while the machine has room for them, though it could drop them at any
time; they are told apart.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SVGP

COLUMNS, BLOCK = 8, 100_000


def model(x, y=None, size=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(x.new_zeros(COLUMNS), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def written(folder, rows):
    """Rows on disk, without ever holding more than a block of them."""
    generator = np.random.default_rng(0)
    with open(folder / "x", "wb") as xs, open(folder / "y", "wb") as ys:
        for start in range(0, rows, BLOCK):
            x = generator.random((min(BLOCK, rows - start), COLUMNS), dtype=np.float32)
            noise = 0.1 * generator.standard_normal(len(x), dtype=np.float32)
            (np.sin(6 * x[:, 0]) + x[:, 1] * x[:, 2] + noise).astype(np.float32).tofile(ys)
            x.tofile(xs)


class Blocks:
    """Batches out of blocks of rows that are read one after another, shuffled within."""

    def __init__(self, folder, rows, batch_size):
        self.folder, self.rows, self.batch_size = folder, rows, batch_size

    def __len__(self):
        whole, rest = divmod(self.rows, BLOCK)
        return whole * (BLOCK // self.batch_size) + rest // self.batch_size

    def __iter__(self):
        with open(self.folder / "x", "rb") as xs, open(self.folder / "y", "rb") as ys:
            for start in range(0, self.rows, BLOCK):
                num = min(BLOCK, self.rows - start)
                x = torch.from_numpy(np.fromfile(xs, np.float32, num * COLUMNS).reshape(num, COLUMNS))
                y = torch.from_numpy(np.fromfile(ys, np.float32, num))
                order = torch.randperm(num)
                for i in range(num // self.batch_size):
                    rows = order[i * self.batch_size : (i + 1) * self.batch_size]
                    yield x[rows], y[rows]


def peak():
    """Peak resident memory so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def of_files():
    """Resident memory that is pages of files now, in GiB."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    return int(next(line for line in status.read_text().splitlines() if line.startswith("RssFile")).split()[1]) / 2**20


def epoch(folder, rows, batch_size, way):
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    base, began = peak(), time.perf_counter()
    guide = AutoSparseGP(model, SVGP(32))
    options = {"epochs": 1, "loss": TraceQuadrature_ELBO(2), "progress": False}
    if way == "maps":
        x = np.memmap(folder / "x", np.float32, "r", shape=(rows, COLUMNS))
        y = np.memmap(folder / "y", np.float32, "r", shape=(rows,))
        result = fit(model, guide, (x, y), batch_size=batch_size, **options)
    else:
        result = fit(model, guide, Blocks(folder, rows, batch_size), size=rows, **options)
    print(
        f"{way}: {rows:,} rows, {result.steps:,} steps of {batch_size:,} in {time.perf_counter() - began:.0f} s; peak "
        f"{peak():.2f} GiB, of which {base:.2f} before, pages of files at the end {of_files():.2f}; bound a row "
        f"{-result.losses[-20:].mean() / rows:.3f}",
        flush=True,
    )
    return peak()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--ways", nargs="+", default=["blocks", "maps"], choices=["blocks", "maps"])
    parser.add_argument("--limit", type=float, default=2.0, help="GiB above which it fails")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.folder:  # the process that is measured
        used = epoch(options.folder, options.rows, options.batch, options.ways[0])
        sys.exit(f"more than {options.limit} GiB" if used > options.limit else 0)
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), options.rows)
        for way in options.ways:
            command = [sys.executable, __file__, "--folder", folder, "--rows", str(options.rows)]
            subprocess.run(
                [*command, "--batch", str(options.batch), "--ways", way, "--limit", str(options.limit)], check=True
            )


if __name__ == "__main__":
    main()
