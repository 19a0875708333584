"""Compiled steps of training against the steps that they stand for, GPyTorch's and GPflow's, interleaved in one run.

python tests/benchmarks/compiled.py [--device cuda] [--rounds 15] [--inductor] [--out compiled.md]

The model and the sizes of step_time.py, an SVGP with a Matern-3/2 kernel on 8 columns and mini-batches of a Gaussian
data set, by Adam and by natural steps. GPflow's step is its SVGP by Adam in a ``tf.function``, if GPflow is there
(``pip install tensorflow-cpu gpflow tf-keras``, TF_USE_LEGACY_KERAS=1). Times are medians over rounds, of one thread's
CPU seconds on a CPU; ratios are medians of each round's ratio, so that a machine that slows down does so for all.
"""

import argparse
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any, Optional

import pyro
import torch
from torch import Tensor

try:
    from .step_time import DIM, NUM, SIZES, Step, gpytorchs, ours
except ImportError:
    from step_time import DIM, NUM, SIZES, Step, gpytorchs, ours


def gpflows(z: Tensor) -> Optional[Step]:
    """GPflow's SVGP, whitened, as its documentation trains it with mini-batches; ``None`` where it is not installed."""
    try:
        import gpflow
        import tensorflow as tf
    except ImportError:
        return None
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    dtype = z.cpu().numpy().dtype
    gpflow.config.set_default_float(dtype.type)
    if z.dtype == torch.float32:
        gpflow.config.set_default_jitter(1e-5)
    kernel = gpflow.kernels.Matern32(lengthscales=[0.7] * DIM)
    model = gpflow.models.SVGP(kernel, gpflow.likelihoods.Gaussian(0.09), z.cpu().numpy(), num_data=NUM)
    optimiser = tf.optimizers.Adam(0.01)
    parameters = model.trainable_variables

    @tf.function
    def compiled(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = -model.elbo((x, y))
        optimiser.apply_gradients(zip(tape.gradient(loss, parameters), parameters))
        return loss

    def step(x: Tensor, y: Tensor) -> float:
        return float(compiled(tf.constant(x.cpu().numpy()), tf.constant(y.cpu().numpy()[:, None])))

    return step


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
        for compile in (
            False,
            True,
            *(("inductor",) if inductor else ()),
            *(("cudagraph",) if device != "cpu" else ()),
        ):
            steps[f"{how}, {compile or 'eager'}"] = ours(z, natural, compile)
    peers = {"GPyTorch": gpytorchs(z), "GPflow": gpflows(z) if device == "cpu" else None}
    steps |= {name: step for name, step in peers.items() if step is not None}
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
        ratios = [
            ""
            if name == other or name in peers or other not in times
            else f"{statistics.median(a / b for a, b in zip(times[name], times[other])):.2f}"
            for other in (base, *peers)
        ]
        compiled = f"{tracing[name]:.1f}" if base not in name and name not in peers else ""
        found.append([f"{m}, {batch}", name, f"{statistics.median(times[name]):.1f}", *ratios, compiled])
    return found


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
    columns = ["M, batch", "step", "ms", "over eager", "over GPyTorch", "over GPflow", "slowest of the first steps (s)"]
    lines = [
        "# Compiled steps",
        "",
        "Made by `python tests/benchmarks/compiled.py"
        f"{' --inductor' if options.inductor else ''} --rounds {options.rounds}`: {name}, one thread, torch "
        f"{torch.__version__}, pyro-ppl {pyro.__version__}, {options.dtype}. The ratios are of one run.",
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
