"""What a step costs with inducing points in one set or in two: operations counted, and times measured.

python tests/benchmarks/cost_model.py [--sizes 128 512] [--batch 1024] [--rounds 7] [--device cuda] [--out table.md]

Counts: the cubic operations of the bound's value (paper 1, table 4, in multiples of m³ with the batch N as given),
matrix products, Cholesky factorisations and triangular solves; first for algorithm 1, not whitened, as table 4 has it,
then for what this package runs, which is whitened and needs no solves with q's covariance. A product of n × k and k × m
matrices is counted nkm, a solve with an m × m triangle and n right sides nm², a Cholesky factorisation m³, as in the table.
ODVGP(m, 8m) takes m sampled columns of K_OO: entries of the kernel, but no further cubic operation.

Times: a training step (forward, backward, Adam) on 8-dimensional uniform inputs, Matern-3/2, a Gaussian likelihood,
everything trained. Rounds take the methods in turn; times are medians over rounds and ratios medians of each round's
ratio. On the CPU they are the process's own seconds (summed over threads: use OMP_NUM_THREADS=1), so that other jobs on
the machine hardly count.
"""

import argparse
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, Family, OrthogonalInducing, OrthogonallyDecoupled

NUM, DIM = 20_000, 8
Counts = tuple[int, int, int, int]  # products, Cholesky, solves, entries of the kernel


def single(n: int, m: int, whitened: bool) -> Counts:
    """SVGP(m)."""
    return n * m * m, m**3, n * m * m if whitened else m**3 + 2 * n * m * m, m * m + n * m


def nested(n: int, m: int, m2: int, whitened: bool) -> Counts:
    """SOLVE-GP(m, m2)."""
    entries = m * m + m * m2 + m2 * m2 + n * (m + m2)
    products = n * m * m + n * m2 * m2 + n * m * m2 + m * m2 * m2
    if whitened:
        return products, m**3 + m2**3, n * m * m + n * m2 * m2 + m2 * m * m, entries
    return products, m**3 + m2**3, m**3 + 2 * n * m * m + m2**3 + 2 * n * m2 * m2 + m2 * m * m, entries


def decoupled(n: int, m: int, m2: int, columns: int, whitened: bool) -> Counts:
    """ODVGP(m, m2) with coefficients a and sampled columns: K_ZO a and k(x, O)a are products with a vector."""
    products, cholesky, solves, entries = single(n, m, whitened)
    return products, cholesky, solves, entries + n * m2 + m * m2 + columns * m2


def methods(m: int) -> dict[str, tuple[Callable[[Tensor], Family], Callable[[int, bool], Counts]]]:
    """Each method's family for inputs to choose from, and its counts for a batch."""
    found: dict[str, tuple[Callable[[Tensor], Family], Callable[[int, bool], Counts]]] = {
        f"SVGP({m})": (lambda z: SVGP(z[:m]), lambda n, w: single(n, m, w)),
        f"OrthogonalInducing({m}, {m})": (
            lambda z: OrthogonalInducing(z[:m], z[m : 2 * m]),
            lambda n, w: nested(n, m, m, w),
        ),
        f"SVGP({2 * m})": (lambda z: SVGP(z[: 2 * m]), lambda n, w: single(n, 2 * m, w)),
    }
    if "num_columns" in {f.name for f in dataclasses.fields(OrthogonallyDecoupled)}:
        found[f"ODVGP({m}, {8 * m})"] = (
            lambda z: OrthogonallyDecoupled(z[:m], z[m : 9 * m], num_columns=m),  # type: ignore[call-arg]
            lambda n, w: decoupled(n, m, 8 * m, m, w),
        )
    return found


def step_of(family: Family, like: Tensor) -> Callable[[Tensor, Tensor], float]:
    """A training step."""

    def model(x: Tensor, y: Tensor) -> None:
        scale = pyro.param("scale", like.new_ones(()), constraint=constraints.positive)
        length = pyro.param("length", like.new_full((DIM,), 0.7), constraint=constraints.positive)
        noise = pyro.param("noise", like.new_full((), 0.3), constraint=constraints.positive)
        f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
        with pyro.plate("data", NUM, subsample=x):
            pyro.sample("y", dist.Normal(f, noise), obs=y)

    return pyro.infer.SVI(
        model, AutoSparseGP(model, family), pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)
    ).step


def measure(m: int, batch: int, dtype: torch.dtype, device: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step of each method, a value a round."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    x = torch.rand(NUM, DIM, dtype=dtype, device=device)
    y = torch.sin(4 * x.sum(-1)) + 0.1 * torch.randn(NUM, dtype=dtype, device=device)
    steps = {name: step_of(family(x), x) for name, (family, _) in methods(m).items()}
    clock = time.process_time if device == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):  # one to warm up
        for name, step in steps.items():
            rows = torch.randint(0, NUM, (batch,), device=device)
            repeats = 1 if m >= 256 else 5
            if device != "cpu":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(repeats):
                step(x[rows], y[rows])
            if device != "cpu":
                torch.cuda.synchronize()
            if turn:
                times[name].append(1e3 * (clock() - start) / repeats)
    return times


def main() -> None:
    """Count, measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[128, 512], help="m")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device != "cpu" else platform.machine()
    command = f"--sizes {' '.join(map(str, options.sizes))} --batch {options.batch} --rounds {options.rounds}"
    lines = [f"`python tests/benchmarks/cost_model.py {command}`", ""]

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    say(
        f"{where}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, batch {options.batch}, "
        f"{options.rounds} rounds. Counts are multiples of m³ for the bound's value (the gradient takes two to three "
        "times as many); × is relative to SVGP(2m)."
    )
    for m in options.sizes:
        say(f"\n**m = {m}**\n")
        heads = [f"{dtype}: ms, × (paper: 0.78)" for dtype in options.dtypes]
        say(
            "| method | table 4: products, Cholesky, solves | × | run here, whitened | × | kernel entries / m² | "
            + " | ".join(heads)
            + " |"
        )
        say("|---|---|---|---|---|---|" + "---|" * len(heads))
        times = {
            d: measure(m, options.batch, getattr(torch, d), options.device, options.rounds) for d in options.dtypes
        }
        big = f"SVGP({2 * m})"
        for name, (_, count) in methods(m).items():
            cells = [name]
            for whitened in (False, True):
                *cubic, entries = count(options.batch, whitened)
                reference = sum(methods(m)[big][1](options.batch, whitened)[:3])
                cells += [", ".join(f"{c / m**3:.1f}" for c in cubic), f"{sum(cubic) / reference:.2f}"]
            cells.append(f"{entries / m**2:.1f}")
            for dtype in options.dtypes:
                ratio = statistics.median(a / b for a, b in zip(times[dtype][name], times[dtype][big]))
                cells.append(f"{statistics.median(times[dtype][name]):.1f}, {ratio:.2f}")
            say("| " + " | ".join(cells) + " |")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
