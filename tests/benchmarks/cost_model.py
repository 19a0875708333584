"""What a step costs with inducing points in one set or in two: operations counted, and times measured.

python tests/benchmarks/cost_model.py [--sizes 128 512] [--batch 1024] [--rounds 7] [--device cuda] [--out table.md]

Counts: the cubic operations of the bound's value (paper 1, table 4, in multiples of m³ with the batch N as given),
matrix products, Cholesky factorisations and triangular solves; first for algorithm 1, not whitened, as table 4 has it,
then for what this package runs, which is whitened and needs no solves with q's covariance. A product of n × k and
k × m matrices is counted nkm, a solve with an m × m triangle and n right sides nm², a Cholesky factorisation m³, as in
the table.
ODVGP(m, 8m) takes m sampled columns of K_OO: entries of the kernel, but no further cubic operation.

Times: a training step (forward, backward, Adam) on 8-dimensional uniform inputs, Matern-3/2, a Gaussian likelihood,
everything trained. Rounds take the methods in turn; times are medians over rounds and ratios medians of each round's
ratio. On the CPU they are the process's own seconds (summed over threads: use OMP_NUM_THREADS=1), so that other jobs on
the machine hardly count.
"""

import statistics

import bench
import torch

from pyro_sparsegp import AutoSparseGP
from pyro_sparsegp.families import SVGP, OrthogonalInducing, OrthogonallyDecoupled

NUM, DIM = 20_000, 8


def single(n, m, whitened):
    """SVGP(m): products, Cholesky, solves, entries of the kernel."""
    return n * m * m, m**3, n * m * m if whitened else m**3 + 2 * n * m * m, m * m + n * m


def nested(n, m, m2, whitened):
    """SOLVE-GP(m, m2)."""
    entries = m * m + m * m2 + m2 * m2 + n * (m + m2)
    products = n * m * m + n * m2 * m2 + n * m * m2 + m * m2 * m2
    if whitened:
        return products, m**3 + m2**3, n * m * m + n * m2 * m2 + m2 * m * m, entries
    return products, m**3 + m2**3, m**3 + 2 * n * m * m + m2**3 + 2 * n * m2 * m2 + m2 * m * m, entries


def decoupled(n, m, m2, columns, whitened):
    """ODVGP(m, m2) with coefficients a and sampled columns: K_ZO a and k(x, O)a are products with a vector."""
    *cubic, entries = single(n, m, whitened)
    return *cubic, entries + n * m2 + m * m2 + columns * m2


def methods(m):
    """Each method's family, for inputs to choose from, and its counts, for a batch."""
    return {
        f"SVGP({m})": (lambda z: SVGP(z[:m]), lambda n, w: single(n, m, w)),
        f"OrthogonalInducing({m}, {m})": (
            lambda z: OrthogonalInducing(z[:m], z[m : 2 * m]),
            lambda n, w: nested(n, m, m, w),
        ),
        f"SVGP({2 * m})": (lambda z: SVGP(z[: 2 * m]), lambda n, w: single(n, 2 * m, w)),
        f"ODVGP({m}, {8 * m})": (
            lambda z: OrthogonallyDecoupled(z[:m], z[m : 9 * m], num_columns=m),
            lambda n, w: decoupled(n, m, 8 * m, m, w),
        ),
    }


def measure(m, dtype, options):
    """Milliseconds a step of each method, a value a round."""
    bench.seeded()
    x = torch.rand(NUM, DIM, dtype=getattr(torch, dtype), device=options.device)
    y = torch.sin(4 * x.sum(-1)) + 0.1 * torch.randn(NUM).to(x)
    model = bench.regression(0.7)
    steps = {
        name: bench.Training(model, AutoSparseGP(model, family(x)), x, y, batch=options.batch).step
        for name, (family, _) in methods(m).items()
    }
    return bench.interleaved(steps, options.rounds, 1, 1 if m >= 256 else 5, options.device)


def main():
    options = bench.parsed(
        __doc__, sizes=[128, 512], batch=1024, rounds=7, dtypes=["float32", "float64"], device="cpu", out=None
    )
    page = bench.Page(options.out)
    page.say(
        f"`python tests/benchmarks/cost_model.py --sizes {' '.join(map(str, options.sizes))} --batch {options.batch} "
        f"--rounds {options.rounds}`",
        "",
        f"{bench.machine(options.device)}, batch {options.batch}, {options.rounds} rounds. Counts are multiples of m³ "
        "for the bound's value (the gradient takes two to three times as many); × is relative to SVGP(2m).",
    )
    for m in options.sizes:
        page.say("", f"**m = {m}**", "")
        page.head(
            *("method", "table 4: products, Cholesky, solves", "×", "run here, whitened", "×", "kernel entries / m²"),
            *(f"{dtype}: ms, × (paper: 0.78)" for dtype in options.dtypes),
        )
        times = [measure(m, dtype, options) for dtype in options.dtypes]
        big = f"SVGP({2 * m})"
        for name, (_, count) in methods(m).items():
            cells = [name]
            for whitened in (False, True):
                *cubic, entries = count(options.batch, whitened)
                reference = sum(methods(m)[big][1](options.batch, whitened)[:3])
                cells += [", ".join(f"{c / m**3:.1f}" for c in cubic), f"{sum(cubic) / reference:.2f}"]
            each = (f"{statistics.median(t[name]):.1f}, {bench.ratio(t, name, big):.2f}" for t in times)
            page.row(*cells, f"{entries / m**2:.1f}", *each)


if __name__ == "__main__":
    main()
