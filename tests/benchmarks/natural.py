"""Natural steps beside Adam's: each command writes its section of natural.md.

python tests/benchmarks/natural.py real --data DIR    test log-likelihood against seconds
python tests/benchmarks/natural.py spikes             the largest rise of the loss on a smooth kernel
python tests/benchmarks/natural.py gap                what a low-rank coupling loses against one full covariance
python tests/benchmarks/natural.py seats --data DIR   sites about u = Lw, about w, and about (L + ηsI)w
python tests/benchmarks/natural.py floor --data DIR   the rate's floor in steps on all rows
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
from pyro_sparsegp.families import SVGP, CoupledCovariance, CoupledPrecision
from pyro_sparsegp.gaussians import Falling, LowRankGaussian, NaturalLowRank

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


def counts(x, y=None, size=None):
    """Counts of a log-linear process."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Poisson((f + level).exp()), obs=y)


def effects(x, y=None, size=None):
    """A sum of an effect of each column."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    length = pyro.sample("length", dist.LogNormal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    terms = [scale[c] * kernels.RBF(length[c])[c] for c in range(x.shape[-1])]
    f = pyro.sample("f", GaussianProcess(sum(terms[1:], terms[0]), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def classes(x, y=None, size=None):
    """A smooth kernel, whose matrix of many points is ill-conditioned."""
    scale = pyro.sample("scale", dist.LogNormal(1.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def class_score(guide, x, y):
    """Mean log probability of test rows."""
    with torch.no_grad():
        mean, variance = guide.posterior(x)["f"].moments()
        nodes, weights = np.polynomial.hermite_e.hermegauss(40)
        f = mean + variance.sqrt() * torch.as_tensor(nodes, dtype=x.dtype)[:, None]
        densities = dist.Bernoulli(logits=f).log_prob(y).exp()
        return (torch.as_tensor(weights / weights.sum(), dtype=x.dtype) @ densities).log().mean().item()


def seated(model, sets, points, eta, steps, seed):
    """A guide after so many natural steps on batches, its sites about (L + ηsI)w."""
    x, y = sets[:2]
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoSparseGP(model, SVGP(points), point_estimates=True)
    guide(x[:5000], y[:5000], size=len(x))
    q = guide.gps.f.coefficients
    q.softness, q.seat = eta, q.seat.new_zeros(0, 0)
    elbo = TraceQuadrature_ELBO(2 if model is regression else 20)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,))
        svi.step(x[batch], y[batch], size=len(x))
    return guide


def run_seats(options):
    steps, etas, rows = 300, (0.0, 0.03, 0.3, 100.0), []
    problems = {
        "kin40k, Matern-3/2, M = 256": (regression, split(options.data / "kin40k.npz"), 256, score),
        "bike, Matern-3/2, M = 256": (regression, split(options.data / "bike.npz"), 256, score),
        "banana, RBF, M = 128": (classes, labelled(options.data / "banana.npz"), 128, class_score),
    }
    for name, (model, sets, points, scored) in problems.items():
        cells = []
        for eta in etas:
            found = []
            for seed in range(2):
                try:
                    guide = seated(model, sets, points, eta, steps, seed)
                    found.append(f"{scored(guide, *sets[2:]):.3f}")
                except (RuntimeError, ValueError) as error:
                    print(name, eta, str(error)[:200], flush=True)
                    found.append("failed")
            cells.append(", ".join(found))
            print(name, eta, cells[-1], flush=True)
        rows.append([name, *cells])
    text = (
        f"Mean test log-likelihood after {steps} natural steps of SVGP(M) on batches of {BATCH}, two seeds, float32, "
        "Adam at 0.03 for all that is not q: sites keep their meaning about (L + ηsI)w when hyperparameters move, "
        "which is u at η = 0 and w where η is large. The default is 0.03: about u along well-conditioned directions, "
        "about w along others.\n\n" + paper0.table(["problem", *(f"η = {eta:g}" for eta in etas)], rows)
    )
    write(options, "What sites are about", "seats --data DIR", text)


def run_floor(options):
    floors, marks, rows = (0.1, 0.25, 0.5, 1.0), (50, 150, 400), []
    torch.set_default_dtype(torch.float64)
    problems = {
        "concrete, SVGP(64)": (regression, few(options.data / "concrete.npz", 1030, True), SVGP, 64),
        "airfoil, SVGP(64)": (regression, few(options.data / "airfoil.npz", 1503, True), SVGP, 64),
        "concrete, CoupledCovariance(10)": (
            effects,
            few(options.data / "concrete.npz", 1030, True),
            CoupledCovariance,
            10,
        ),
        "concrete, CoupledPrecision(10)": (
            effects,
            few(options.data / "concrete.npz", 1030, True),
            CoupledPrecision,
            10,
        ),
        "spatial_counts_bei, SVGP(48)": (counts, few(options.data / "spatial_counts_bei.npz", 800, False), SVGP, 48),
        "banana, SVGP(32)": (classes, few(options.data / "banana.npz", 1000, False), SVGP, 32),
    }
    for name, (model, (x, y), family, points) in problems.items():
        y = (y > y.mean()).to(y) if model is classes else y
        for floor in floors:
            losses = np.array(
                [followed(model, family(points, rate=Falling(floor)), x, y, marks, seed) for seed in range(3)]
            )
            cells = [", ".join(f"{loss:.1f}" for loss in column) for column in losses.T]
            print(name, floor, cells, flush=True)
            rows.append([name, floor, *cells])
    text = (
        "Minus the bound, nats, after so many natural steps on all rows (three seeds), at the rate max(floor, "
        "1/(1 + t)); Adam at 0.03 for all that is not q, latents drawn, float64, a mean of 16 evaluations. By default "
        "the floor is 0.25 in steps on all rows, and 0.1 in mini-batches, whose noise it averages.\n\n"
        + paper0.table(["problem", "floor", *(f"{mark} steps" for mark in marks)], rows)
    )
    write(options, "The rate's floor in steps on all rows", "floor --data DIR", text)


def few(path, most, scaled):
    """Some rows, shuffled, inputs standardised, and targets if ``scaled``."""
    with np.load(path, allow_pickle=False) as z:
        x, y = torch.as_tensor(z["X"], dtype=torch.float64), torch.as_tensor(z["y"]).double()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:most]
    x, y = x[order], y[order]
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std() if scaled else y


def followed(model, family, x, y, marks, seed):
    """Losses on all rows after so many steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoSparseGP(model, family)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), TraceQuadrature_ELBO())
    found = []
    for step in range(1, marks[-1] + 1):
        svi.step(x, y)
        if step in marks:
            with torch.random.fork_rng():
                pyro.set_rng_seed(99)
                found.append(sum(svi.evaluate_loss(x, y) for _ in range(16)) / 16)
    return found


def labelled(path):
    """As :func:`split`, of classes."""
    with np.load(path, allow_pickle=False) as z:
        x, y = torch.as_tensor(z["X"], dtype=torch.float32), torch.as_tensor(z["y"]).float()
    y = (y > y.mean()).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[len(x) // 10 :], order[: len(x) // 10]
    x = (x - x[train].mean(0)) / x[train].std(0)
    return x[train], y[train], x[test], y[test]


def run_gap(options):
    torch.set_default_dtype(torch.float64)
    num, ranks, steps, rows = 5000, [1, 4, 16], [1, 10], []
    kinds = {
        "Anova": (paper0.anova, paper0.fixed_inputs()),
        "plain": (paper0.plain, [*paper0.fixed_inputs()[:6], None]),
    }
    for (name, (make, z)), length in itertools.product(kinds.items(), (0.3, 0.8)):
        pyro.set_rng_seed(0)
        x = torch.rand(num, 6)
        kernel = make(torch.full((7,), 10.0), torch.full((8,), length))
        basis = CoupledCovariance(z).new_basis(GaussianProcess(kernel, x), "f")
        with torch.no_grad():
            phi = basis(kernel, None, "f")(x)
        joined = torch.cat(phi, -1)
        gram = joined.mT @ joined
        log_det = torch.linalg.slogdet(torch.eye(len(gram)) + gram)[1]
        nudge = 1e-12 * gram.trace() / len(gram) * torch.eye(len(gram))
        factor = list(torch.linalg.cholesky(gram + nudge).mT.split([p.shape[-1] for p in phi], -1))
        y, scale = joined @ torch.randn(len(gram)) + torch.randn(num), joined.square().sum(-1).mean().rsqrt()
        for rank in ranks:
            torch.manual_seed(0)
            module = NaturalLowRank([p.shape[-1] for p in phi], (), joined.new_zeros(()), rank=rank, rate=1.0)
            module.start(None, [scale * p for p in phi])
            begun, cells = time.process_time(), []
            for step in range(max(steps) + 1):
                q = module()
                if step in steps:
                    alone = LowRankGaussian([torch.zeros_like(m) for m in q.loc], q.b, q.trils)
                    cells.append(f"{paper0.gap(alone, factor, log_det).item():.2f}")
                mean, change = q.moments(phi)
                (0.5 * (mean - y).square().sum() + 0.5 * change.sum() + q.kl()).backward()
            print(name, length, rank, cells, flush=True)
            rows.append([name, length, rank, *cells, f"{1e3 * (time.process_time() - begun) / len(range(11)):.0f}"])
    text = (
        "As in paper0.md: what the bound of a Gaussian likelihood loses against one full covariance, in nats, N = 5000 "
        "Friedman inputs, fixed hyperparameters; here by natural steps at a rate of 1 on all rows, from the family's "
        "own start, and milliseconds a step.\n\n"
        + paper0.table(["kernel", "length scale", "rank", *(f"{n} steps" for n in steps), "ms"], rows)
    )
    write(options, "CoupledPrecision: the gap to one full covariance", "gap", text)


def write(options, title, command, text):
    """Put a section in its place on the page."""
    page = options.out.read_text() if options.out.exists() else "# Natural steps\n"
    section = f"## {title}\n\nMade by `python tests/benchmarks/natural.py {command}`, one thread.\n\n{text}\n"
    found = re.search(rf"## {re.escape(title)}\n.*?(?=\n## |\Z)", page, re.DOTALL)
    page = page[: found.start()] + section + page[found.end() :] if found else f"{page.rstrip()}\n\n{section}"
    options.out.write_text(page)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["real", "spikes", "gap", "seats", "floor"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("natural.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = {"real": run_real, "spikes": run_spikes, "gap": run_gap, "seats": run_seats, "floor": run_floor}
        runs[options.what](options)


if __name__ == "__main__":
    main()
