"""Compiled steps of training against the steps that they stand for, and against GPyTorch's, interleaved in one run.

python tests/benchmarks/compiled.py [--device cuda] [--rounds 15] [--inductor] [--out compiled.md]

The model and the sizes of step_time.py, an SVGP with a Matern-3/2 kernel on 8 columns and mini-batches of a Gaussian
data set, by Adam and by natural steps. Times are medians over rounds, of one thread's CPU seconds on a CPU; ratios are
medians of each round's ratio, so that a machine that slows down does so for all.
"""

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Union

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

try:
    from step_time import gpytorchs
except ImportError:
    gpytorchs = None

NUM, DIM = 100_000, 8
SIZES = [(12, 200), (128, 256), (512, 1024)]
Step = Callable[[Tensor, Tensor], float]


def ours(z: Tensor, compile: Union[bool, str], natural: bool) -> Step:
    """pyro_sparsegp, with the hyperparameters as parameters."""

    def model(x: Tensor, y: Tensor) -> None:
        scale = pyro.param("scale", z.new_ones(()), constraint=constraints.positive)
        length = pyro.param("length", z.new_full((DIM,), 0.7), constraint=constraints.positive)
        noise = pyro.param("noise", z.new_full((), 0.3), constraint=constraints.positive)
        f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
        with pyro.plate("data", NUM, subsample=x):
            pyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = AutoSparseGP(model, SVGP(z, natural=natural))
    return pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2, compile=compile)).step


def clock(device: str) -> float:
    """Seconds of this process on a CPU, seconds on a GPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(m: int, batch: int, dtype: torch.dtype, device: str, rounds: int, inductor: bool) -> list[list[str]]:
    """The rows of one size."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    data = torch.rand(NUM, DIM, dtype=dtype, device=device)
    target = torch.sin(4 * data.sum(-1)) + 0.1 * torch.randn(NUM, dtype=dtype, device=device)
    z = data[:m].clone()
    steps: dict[str, Step] = {}
    for natural in (False, True):
        how = "natural" if natural else "Adam"
        for compile in (False, True, "inductor") if inductor else (False, True):
            steps[f"{how}, {compile or 'eager'}"] = ours(z, compile, natural)
    if gpytorchs is not None:
        steps["GPyTorch"] = gpytorchs(z)
    steps = {name.replace("True", "compiled"): step for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    tracing = dict.fromkeys(steps, 0.0)
    for turn in range(rounds + 4):  # four to trace, to compile and to warm up
        for name, step in steps.items():
            rows = torch.randint(0, NUM, (batch,), device=device)
            x, y = data[rows], target[rows]
            start = clock(device)
            began = time.perf_counter()
            step(x, y)
            if turn < 4:
                tracing[name] = max(tracing[name], time.perf_counter() - began if turn else 0.0)
            else:
                times[name].append((clock(device) - start) * 1e3)
    found = []
    for name in steps:
        base = "natural, eager" if name.startswith("natural") else "Adam, eager"
        others = [base, "GPyTorch"] if "GPyTorch" in steps else [base]
        ratios = [
            ""
            if name == other or name == "GPyTorch"
            else f"{statistics.median(map(_over, times[name], times[other])):.2f}"
            for other in others
        ]
        compiled = f"{tracing[name]:.1f}" if "compiled" in name or "inductor" in name else ""
        found.append([f"{m}, {batch}", name, f"{statistics.median(times[name]):.1f}", *ratios, compiled])
    return found


def _over(a: float, b: float) -> float:
    return a / b


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", default=[f"{m},{b}" for m, b in SIZES], help="pairs M,batch")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--inductor", action="store_true", help='compile="inductor" as well, which takes minutes')
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor() or platform.machine()
    versus = ["over GPyTorch"] if gpytorchs is not None else []
    columns = ["M, batch", "step", "ms", "over eager", *versus, "slowest of the first steps (s)"]
    lines = [
        "# Compiled steps",
        "",
        "Made by `python tests/benchmarks/compiled.py"
        f"{' --inductor' if options.inductor else ''} --rounds {options.rounds}`: {name}, one thread, torch "
        f"{torch.__version__}, pyro-ppl {pyro.__version__}, {options.dtype}"
        f"{'' if versus else '; GPyTorch was not there'}. The ratios are of one run.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    print("\n".join(lines), flush=True)
    for size in options.sizes:
        m, batch = map(int, size.split(","))
        dtype = getattr(torch, options.dtype)
        for row in measure(m, batch, dtype, options.device, options.rounds, options.inductor):
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
