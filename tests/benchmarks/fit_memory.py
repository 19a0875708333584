"""The memory of an epoch of fit over rows on disk: python tests/benchmarks/fit_memory.py --rows 10000000

Rows of 8 columns are written to a temporary folder in blocks. Then a process of its own fits SVGP for one epoch, and
reports its peak resident memory: from memory maps, with batches of rows anywhere, and from an iterable that reads
blocks. Pages of a memory map count as resident while the machine has room for them, though it could drop them at any
time; they are told apart.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
import numpy as np
import pyro
import torch

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO, fit
from pyro_sparsegp.families import SVGP

COLUMNS, BLOCK = 8, 100_000


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


def epoch(folder, rows, batch_size, way):
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    base, began = bench.peak(), time.perf_counter()
    guide = AutoSparseGP(bench.bayesian, SVGP(32))
    options = {"epochs": 1, "loss": TraceQuadrature_ELBO(2), "progress": False}
    if way == "maps":
        x = np.memmap(folder / "x", np.float32, "r", shape=(rows, COLUMNS))
        y = np.memmap(folder / "y", np.float32, "r", shape=(rows,))
        result = fit(bench.bayesian, guide, (x, y), batch_size=batch_size, **options)
    else:
        result = fit(bench.bayesian, guide, Blocks(folder, rows, batch_size), size=rows, **options)
    print(
        f"{way}: {rows:,} rows, {result.steps:,} steps of {batch_size:,} in {time.perf_counter() - began:.0f} s; peak "
        f"{bench.peak():.2f} GiB, of which {base:.2f} before, pages of files at the end {bench.of_files():.2f}; bound "
        f"a row {-result.losses[-20:].mean() / rows:.3f}",
        flush=True,
    )
    return bench.peak()


def main():
    ways = ["blocks", "maps"]
    options = bench.parsed(__doc__, rows=10_000_000, batch=4096, ways=ways, limit=2.0, folder=None)
    if options.folder:  # the process that is measured
        used = epoch(Path(options.folder), options.rows, options.batch, options.ways[0])
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
