"""All that wants a GPU, in one command that takes at most 25 minutes, and its page.

python tests/benchmarks/gpu.py [--data DIR] [--parts tests steps paper1 cagp] [--minutes 25] [--out gpu.md]

* tests: those marked ``cuda``;
* steps: the step table of step_time.py, against GPyTorch, pyro.contrib.gp and a hand-written step;
* paper1: the six regression sets of Shi, Titsias and Mnih (2020) at M = 1024 and 1024 + 1024, families as they come,
  beside the paper's figures; DIR holds ``<set>.npz`` with X and y, without it the part is left out;
* cagp: ComputationAware with sparse actions on 100,000 rows.

Each part has a share of the minutes and is cut there. Parts may be run one by one, where commands have limits of their
own: what a part found is kept in ``gpu.json`` beside the page, which is written anew after each. ``--device cpu
--short`` tries the command itself on small sizes in a minute or two.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor

import pyro_sparsegp

sys.path.insert(0, str(Path(__file__).parent))  # as a script has it
from paper1 import PAPER, SETS, regression, split

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ComputationAware, Family, OrthogonalInducing

HERE = Path(__file__).parent
SHARES = {"tests": 0.16, "steps": 0.24, "paper1": 0.44, "cagp": 0.16}
TITLES = {
    "tests": "Tests marked `cuda`",
    "steps": "A step of training (step_time.py)",
    "paper1": "Regression at 1024 and 1024 + 1024",
    "cagp": "ComputationAware on many rows",
}
Rows = list[list[str]]


def called(arguments: list[str], seconds: float) -> tuple[int, str]:
    """The exit status and output of another command of this interpreter, cut off after so many seconds."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=seconds, check=False
        )
        return done.returncode, done.stdout + done.stderr[-2000:]
    except subprocess.TimeoutExpired as cut:
        return 124, (cut.stdout or b"").decode() if isinstance(cut.stdout, bytes) else (cut.stdout or "")


def tests(options: argparse.Namespace, seconds: float) -> list[str]:
    """The tests on the device."""
    chosen = ["-k", "cuda", "tests/test_device.py"] if options.short else ["-m", "cuda"]
    status, text = called(["-m", "pytest", "-q", "--no-header", *chosen], seconds)
    shown = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR")) or " in " in line]
    return ["```", f"exit status {status}", *shown[-30:], "```"]


def table_of(script: str, arguments: list[str], seconds: float) -> list[str]:
    """The lines of another benchmark's tables, as far as it came."""
    status, text = called([str(HERE / script), *arguments], seconds)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return lines if not status else [*lines, "", f"Cut off or failed, exit status {status}: {text.splitlines()[-1:]}"]


def steps(options: argparse.Namespace, seconds: float) -> list[str]:
    """step_time.py's table."""
    sizes = ["16,32"] if options.short else ["128,256", "512,1024", "1024,1024"]
    rounds = "2" if options.short else "10"
    return table_of("step_time.py", ["--device", options.device, "--rounds", rounds, "--sizes", *sizes], seconds)


def synchronised(device: str) -> float:
    """The time, when all that was asked of the device is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(
    model: Callable, family: Family, x: Tensor, y: Tensor, batch: int, seconds: float, device: str
) -> tuple[AutoSparseGP, int, float]:
    """A guide trained for so many seconds; its steps, and the milliseconds of one."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family)
    guide.prepare(x, y)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    done, start = 0, synchronised(device)
    while synchronised(device) - start < seconds or done < 2:
        rows = torch.randint(len(x), (batch,), device=x.device) if batch < len(x) else slice(None)
        svi.step(x[rows], y[rows], size=len(x)) if batch < len(x) else svi.step(x, y)
        done += 1
    return guide, done, 1e3 * (synchronised(device) - start) / done


def paper1(options: argparse.Namespace, seconds: float) -> list[str]:
    """The paper's sets at its sizes, whitened and by the families' own optimisers."""
    if options.data is None:
        return ["Left out: no `--data`."]
    size = 16 if options.short else 1024
    sets = SETS[:1] if options.short else SETS
    methods: dict[str, Family] = {
        "SVGP M": SVGP(size, init="kmeans"),
        "SOLVE-GP M+M": OrthogonalInducing(size, size, init="kmeans"),
    }
    each = 0.75 * seconds / (len(sets) * len(methods))  # the rest is for k-means and predictions
    rows: Rows = []
    for place, name in enumerate(sets):
        x, y, x_test, y_test = (part.to(options.device, torch.float32) for part in split(options.data, name, 0))
        for method, family in methods.items():
            model = regression(kernels.Matern32, math.sqrt(x.shape[-1]))
            guide, done, ms = trained(model, family, x, y, 1024, each, options.device)
            with torch.no_grad():
                q = guide.posterior(x_test)["f"]
                mean, variance = q.moments()
                sd = (variance + pyro.param("noise") ** 2).sqrt()
                ll = float(torch.distributions.Normal(mean, sd).log_prob(y_test).mean())
                rmse = float((y_test - mean).square().mean().sqrt())
            theirs = PAPER[method][place]
            rows.append([name, method, str(done), f"{ms:.1f}", f"{ll:.3f}", f"{rmse:.3f}", *map(str, theirs)])
            print("|", " | ".join(rows[-1]), "|", flush=True)
    head = ["set", "family", "steps", "ms a step", "test LL", "RMSE", "paper's LL", "paper's RMSE"]
    return [f"M = {size}, {each:.0f} seconds of training each, float32, one split.", "", *table(head, rows)]


def cagp(options: argparse.Namespace, seconds: float) -> list[str]:
    """Sparse actions on 100,000 rows: milliseconds a step, memory."""
    num, actions = (2000, [8]) if options.short else (100_000, [128, 512])
    x = torch.rand(num, 4, device=options.device)
    y = torch.sin(6 * x.sum(-1)) + 0.1 * torch.randn(num, device=options.device)
    rows: Rows = []
    for count in actions:
        if options.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        model = regression(kernels.Matern32, 0.5)
        guide, done, ms = trained(
            model, ComputationAware(count), x, y, num, 0.6 * seconds / len(actions), options.device
        )
        with torch.no_grad():
            q = guide.posterior(x[:1000])["f"]
            rmse = float((q.mean - torch.sin(6 * x[:1000].sum(-1))).square().mean().sqrt())
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if options.device != "cpu" else ""
        rows.append([f"{num:,}", str(count), str(done), f"{ms:.0f}", memory, f"{rmse:.3f}"])
        print("|", " | ".join(rows[-1]), "|", flush=True)
    return table(["rows", "actions", "steps", "ms a step", "GiB at most", "RMSE of the mean from f"], rows)


def table(head: list[str], rows: Rows) -> list[str]:
    """A table's lines."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]


def write(found: dict[str, Any], out: Path) -> None:
    """The page."""
    lines = [
        "# On a GPU",
        "",
        "Made by `python tests/benchmarks/gpu.py` (its docstring says what each part is). "
        + "; ".join(sorted({part["where"] for part in found.values()}))
        + ".",
    ]
    for name in SHARES:
        if name in found:
            lines += ["", f"## {TITLES[name]}", "", *found[name]["lines"], "", f"{found[name]['seconds']:.0f} seconds."]
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the parts, each within its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--short", action="store_true", help="small sizes, to try the command")
    parser.add_argument("--out", type=Path, default=HERE / "gpu.md")
    options = parser.parse_args()
    name = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    where = f"{name}, torch {torch.__version__}, pyro_sparsegp {pyro_sparsegp.__version__}"
    kept = options.out.with_suffix(".json")
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    shares = sum(SHARES[part] for part in options.parts)
    for part in options.parts:
        seconds = 60 * options.minutes * SHARES[part] / shares
        print(f"== {part}, at most {seconds:.0f} seconds", flush=True)
        start = time.perf_counter()
        try:
            lines = globals()[part](options, seconds)
        except Exception as error:  # a part that fails is no reason to lose the others
            lines = [f"Failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        print("\n".join(lines), flush=True)
        found[part] = {"lines": lines, "seconds": time.perf_counter() - start, "where": where}
        kept.write_text(json.dumps(found))
        write(found, options.out)


if __name__ == "__main__":
    main()
