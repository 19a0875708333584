"""Natural steps beside Adam's: each command writes its section of natural.md.

python tests/benchmarks/natural.py real --data DIR    test log-likelihood against seconds
python tests/benchmarks/natural.py spikes             the largest rise of the loss on a smooth kernel

The page's other sections are of how the defaults were found, by this file at fb7d7eb.
"""

import argparse
import itertools
import math
import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

try:
    from . import jitter, paper0
except ImportError:
    import jitter
    import paper0

BATCH, POINTS = 1024, 64


def regression(x, y=None, size=None):
    """A GP with a scale for each column; latents at medians that fit standardised data."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample(
        "length", dist.LogNormal(0.5 * math.log(x.shape[-1]) * torch.ones(x.shape[-1]), 1.0).to_event(1)
    )
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def split(path, seed=0):
    """Standardised training and test rows of the first official split, or of a random tenth."""
    with np.load(path, allow_pickle=False) as z:
        x, y = torch.as_tensor(z["X"], dtype=torch.float32), torch.as_tensor(z["y"], dtype=torch.float32)
        if "test_mask_packed" in z:
            test = torch.as_tensor(
                np.unpackbits(z["test_mask_packed"], axis=0, count=int(z["n"])).astype(bool)[:, seed]
            )
        else:
            test = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.1
    keep = x[~test].std(0) > 0
    x = x[:, keep]
    x, y = (x - x[~test].mean(0)) / x[~test].std(0), (y - y[~test].mean()) / y[~test].std()
    return x[~test], y[~test], x[test], y[test]


def score(guide, x, y):
    """Mean log density of test rows, hyperparameters at their medians."""
    with torch.no_grad():
        mean, variance = guide.posterior(x)["f"].moments()
        noise = guide.median(x)["noise"]
        return dist.Normal(mean, (variance + noise**2).sqrt()).log_prob(y).mean().item()


def fitted(sets, family, seconds, lr, marks, seed=0):
    """(steps, test log-likelihood) at the marks in CPU seconds; the time of scoring is not counted."""
    x, y, test_x, test_y = sets
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    order = torch.Generator().manual_seed(seed)
    start = time.process_time()
    guide = AutoSparseGP(regression, family, point_estimates=True)
    first = torch.randperm(len(x), generator=order)[:5000]
    guide(x[first], y[first], size=len(x))
    svi = pyro.infer.SVI(regression, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO(2))
    rows, spent, steps = [], time.process_time() - start, 0
    marks = [mark for mark in marks if mark <= seconds]
    while spent < seconds:
        begun = time.process_time()
        batch = torch.randint(len(x), (BATCH,), generator=order)
        svi.step(x[batch], y[batch], size=len(x))
        steps += 1
        spent += time.process_time() - begun
        while marks and spent >= marks[0]:
            marks.pop(0)
            rows.append((steps, score(guide, test_x, test_y)))
    return rows


def run_real(options):
    marks, rows = [2.0, 4.0, 8.0], []
    families: list[tuple[str, Any]] = [("Adam", SVGP(POINTS, natural=False)), ("natural", SVGP(POINTS))]
    warm = split(options.data / "kin40k.npz")
    for _, family in families:  # the first steps of a process are slow
        fitted(warm, family, 1.0, 0.01, [])
    for name in ("kin40k", "protein", "bike"):
        sets = split(options.data / f"{name}.npz")
        for (label, family), lr in itertools.product(families, (0.01, 0.03)):
            found = fitted(sets, family, marks[-1] + 1e-6, lr, marks)
            print(name, label, lr, found, flush=True)
            rows.append([name, label, lr, *(f"{value:.3f} ({steps})" for steps, value in found)])
    text = (
        f"Mean test log-likelihood (steps) after so many CPU seconds, the first call included: SVGP({POINTS}), a "
        f"Matern-3/2 kernel with a length scale for each column, batches of {BATCH}, float32, hyperparameters as "
        "points, standardised inputs and targets, the first official split; the optimiser of all that is not q is Adam "
        "at the given rate, natural steps have the family's own.\n\n"
        + paper0.table(["set", "q by", "Adam's rate", *(f"{mark:.0f} s" for mark in marks)], rows)
    )
    write(options, "Test log-likelihood against seconds", "real --data DIR", text)


def run_spikes(options):
    rows = []
    x = torch.rand(500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + 0.5 * torch.cos(11 * x[:, 0])
    y = y + 0.1 * torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for label, family in (
        ("Adam", SVGP(20, natural=False)),
        ("natural", SVGP(20)),
    ):
        for dtype in (torch.float64, torch.float32):
            rises, ends = [], []
            for seed in range(2):
                model = jitter.regression(kernels.RBF, 0.3, 0.1, 1e-8)
                try:
                    _, losses = jitter.train(model, family, x.to(dtype), y.to(dtype), 600, 64, seed)
                except (RuntimeError, ValueError) as error:
                    print(label, dtype, str(error)[:200], flush=True)
                    continue
                rises.append((losses - losses.cummin(0).values)[30:].max().item())
                ends.append(-losses[-20:].median().item())
            failed = "" if len(ends) == 2 else f", {2 - len(ends)} of 2 failed"
            cells = (f"{max(rises):.1f}", f"{sum(ends) / len(ends):.1f}{failed}") if ends else ("", "all failed")
            print(label, dtype, cells, flush=True)
            rows.append([label, str(dtype).removeprefix("torch."), *cells])
    text = (
        "The largest rise of the loss of all rows above its lowest so far, from the 300th of 600 steps on (over two "
        "seeds), and the bound at the end (their mean), in nats: SVGP(20) with an RBF kernel on 500 rows of one input, "
        "batches of 64, Adam's rate 0.01, relative jitter 1e-8.\n\n"
        + paper0.table(["q by", "dtype", "largest rise", "bound"], rows)
    )
    write(options, "Spikes on a smooth kernel", "spikes", text)


def write(options, title, command, text):
    """Put a section in its place on the page."""
    page = options.out.read_text() if options.out.exists() else "# Natural steps\n"
    section = f"## {title}\n\nMade by `python tests/benchmarks/natural.py {command}`, one thread.\n\n{text}\n"
    found = re.search(rf"## {re.escape(title)}\n.*?(?=\n## |\Z)", page, re.DOTALL)
    page = page[: found.start()] + section + page[found.end() :] if found else f"{page.rstrip()}\n\n{section}"
    options.out.write_text(page)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["real", "spikes"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("natural.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        {"real": run_real, "spikes": run_spikes}[options.what](options)


if __name__ == "__main__":
    main()
