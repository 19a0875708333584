"""Who arrives first: CPU seconds until the bound is within 0.02 nats a row of the converged one.

    python tests/benchmarks/arrive.py --data DIR [--sizes 64 256 512] [--sets kin40k ...]

SVGP with M trainable points, Matern-3/2 with a length scale a column, batches of 1,024 (or all rows, if fewer),
float32, one thread, all in one process, one method after the other. Hyperparameters are parameters without priors, so
that all bounds are one and the same function; they start at the same values, and GPyTorch's points where ours do.

* fit: ``fit(model, AutoSparseGP(model, SVGP(M)), (x, y), batch_size=1024, steps=...)``, the choice of points
  included, in 100, 300 and 1,000 steps (``--lengths``). Rates fall to the end, so that the length matters: the quickest
  run that arrives is shown, with its length, which is known afterwards only.
* natural: ``svi.step`` from a cold start with Adam at 0.03 for all that is not q.
* the old default: ``svi.step`` with q, too, by Adam, whose rate is README's of then (f33cd76), 0.01; and at 0.03.
  Points are chosen as they were then, greedily among the first batch.
* NGD: GPyTorch's natural gradients at 0.1, as in its example, and Adam at 0.03.

The converged bound is the best that any run in the file reached, ``fit`` in most steps. After ``fit`` each of the
others runs until it is there, or for five times what ``fit`` took to be there (the old defaults) or twice (the rest),
and a little more. Bounds are of 2,048 fixed rows and scored off the clock; a first call is on it. Runs are kept in a
JSON file as they end: the same command goes on from there.
"""

import itertools
import math
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import bench
import gpytorch
import pyro
import pyro.distributions as dist
import torch
from others import Approximate, matern, optimisers, stepping

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO, fit
from pyro_sparsegp.families import SVGP

SETS = {
    "kin40k": "normal",
    "protein": "normal",
    "bike_hourly_raw": "normal",
    "elevators": "normal",
    "magic_gamma": "bernoulli",
    "spatial_counts_bei": "poisson",
}
BATCH, WITHIN, RATE, OLD, NOISE = 1024, 0.02, 0.03, 0.01, 0.5


class Problem:
    """Standardised rows, a likelihood, and where everything starts."""

    def __init__(self, path, num_points):
        self.kind, self.num_points = SETS[path.stem], num_points
        x, y = bench.read(path)
        order = bench.shuffled(len(x))
        x, y = x[order], y[order]
        x, scaled = bench.standardised(x, y, slice(None))
        offset = float(y.mean().log()) if self.kind == "poisson" else 0.0
        self.x, self.y = x.float(), (scaled if self.kind == "normal" else y).float()
        self.length = math.sqrt(x.shape[1])
        self.nodes, self.batch = 2 if self.kind == "normal" else 20, min(BATCH, len(x))
        self.likelihood = {
            "normal": None,
            "bernoulli": lambda f: dist.Bernoulli(logits=f),
            "poisson": lambda f: dist.Poisson((f + offset).exp()),
        }[self.kind]

    def batches(self):
        generator = torch.Generator().manual_seed(2)
        while True:
            for rows in torch.randperm(len(self.x), generator=generator).split(self.batch):
                if len(rows) == self.batch:
                    yield self.x[rows], self.y[rows]

    def seen(self):
        return self.x[:2048], self.y[:2048]


class Ours:
    def __init__(self, problem, rate=RATE, **options):
        bench.seeded()
        self.num, self.elbo = len(problem.x), TraceQuadrature_ELBO(problem.nodes)
        self.model = bench.regression(problem.length, NOISE, likelihood=problem.likelihood)
        self.guide = AutoSparseGP(self.model, SVGP(problem.num_points, **options))
        self.svi = pyro.infer.SVI(self.model, self.guide, pyro.optim.Adam({"lr": rate}), self.elbo)

    def step(self, x, y):
        self.svi.step(x, y, size=self.num)

    def bound(self, x, y):
        return -self.svi.evaluate_loss(x, y, size=self.num) / self.num


class Likelihood(gpytorch.likelihoods.likelihood._OneDimensionalLikelihood):
    """A distribution of f."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, f, **_):
        return self.of(f)


class Theirs:
    """As in GPyTorch's example of natural gradients, from the points that ours choose at a first call on a batch."""

    def __init__(self, problem):
        ours = Ours(problem, natural=True).guide
        ours(*next(problem.batches()), size=len(problem.x))
        torch.manual_seed(0)
        kernel = matern(problem.x.shape[1], problem.length, 1.0)
        self.model = Approximate(ours.gps.f.basis.inputs[0].detach().clone(), kernel, natural=True)
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        likelihood.noise = NOISE**2
        likelihood = Likelihood(problem.likelihood) if problem.likelihood else likelihood
        self.objective = gpytorch.mlls.VariationalELBO(likelihood, self.model, num_data=len(problem.x))
        optims = optimisers(self.model, likelihood, True, len(problem.x), RATE)
        self.step = stepping(lambda x, y: -self.objective(self.model(x), y), *optims)

    @torch.no_grad()
    def bound(self, x, y):
        return self.objective(self.model(x), y).item()


class Looks:
    """CPU seconds, steps and bound a row, ever more seldom; what looking takes is off the clock."""

    def __init__(self, bound, target=math.inf, seconds=math.inf):
        self.bound, self.target, self.seconds = bound, target, seconds
        self.found, self.steps, self.lost, self.next = [], 0, 0.0, 0.2
        self.begun = time.process_time()

    def forget(self):
        """Leave what was done just now off the clock."""
        self.begun = time.process_time()

    def after_step(self, last=False):
        """Whether to stop."""
        self.steps += 1
        now = time.process_time()
        spent = now - self.begun - self.lost
        if spent < self.next and not last:
            return False
        value = self.bound()
        self.found.append((round(spent, 3), self.steps, value))
        self.next = 1.02 * spent + 0.05
        self.lost += time.process_time() - now
        return value >= self.target or spent >= self.seconds


def by_fit(problem, steps):
    looks = Looks(lambda: ours.bound(*problem.seen()))
    ours = Ours(problem)
    fit(
        ours.model,
        ours.guide,
        (problem.x, problem.y),
        batch_size=problem.batch,
        steps=steps,
        loss=ours.elbo,
        stopping=lambda _: looks.after_step(looks.steps + 1 == steps),
        progress=False,
    )
    return {"rows": looks.found, "trouble": ""}


def by_loop(problem, make, target, seconds):
    looks = Looks(lambda: method.bound(*problem.seen()), target, seconds)
    method, batches = make(problem), problem.batches()
    if isinstance(method, Theirs):
        looks.forget()  # the choice of points
    trouble = ""
    try:
        while True:
            method.step(*next(batches))
            if looks.after_step():
                break
    except Exception as error:
        trouble = f"{type(error).__name__} after {looks.steps} steps"
    return {"rows": looks.found, "trouble": trouble}


# What is made, and how many times fit's seconds it has.
LOOPS = {
    "natural": (partial(Ours, natural=True), 2),
    "Adam, 0.01": (partial(Ours, rate=OLD, natural=False, init="greedy"), 5),
    "Adam, 0.03": (partial(Ours, natural=False, init="greedy"), 2),
    "NGD": (Theirs, 2),
}


def there(rows, target):
    """The first look at which the bound is at the target."""
    return next(((seconds, steps) for seconds, steps, bound in rows if bound >= target), None)


def quickest(runs, best):
    """Of fits by their lengths the look at which the first is there, and its length."""
    found = [(there(rows, best - WITHIN), length) for length, rows in runs.items()]
    return min(run for run in found if run[0] is not None)


def cell(rows, trouble, best):
    reached = there(rows, best - WITHIN)
    if reached is not None:
        return f"{reached[0]:.1f} s ({reached[1]})"
    if trouble or not rows:
        return trouble or "no look"
    seconds, steps, bound = rows[-1]
    return f"more than {seconds:.0f} s ({steps}; {best - bound:.3f} short)"


def ratio(mine, theirs, best):
    """Their seconds over fit's; at least so many, where they did not come so far."""
    other = there(theirs, best - WITHIN)
    return f"{other[0] / mine:.1f}" if other is not None else f"> {theirs[-1][0] / mine:.1f}" if theirs else ""


def write(kept, options):
    """The table of all that was run, and what it shows."""
    methods, others = list(LOOPS), {f"Adam, {OLD:g}": 5, "NGD": 2}
    lines = [
        "# Who arrives first",
        "",
        f"Made by `python tests/benchmarks/arrive.py --data DIR --sizes {' '.join(map(str, options.sizes))}`, "
        f"{bench.machine()}, GPyTorch {gpytorch.__version__}, one run.",
        "",
        *(__doc__ or "").strip().splitlines()[4:],
        "",
        f"CPU seconds (steps) to within {WITHIN} nats a row of the converged bound.",
        "",
        bench.row(["set", "M", "converged", "fit", *methods, *(f"{key} / fit" for key in others)]),
        bench.row(["---"] * (len(methods) + len(others) + 4)),
    ]
    holds = {key: [] for key in others}
    for size, name in itertools.product(options.sizes, options.sets):
        found = {key.removeprefix(own): run for key, run in kept.items() if key.startswith(own := f"{name} {size} ")}
        if not {*methods} < {*found}:
            continue
        best = max(bound for run in found.values() for _, _, bound in run["rows"] if math.isfinite(bound))
        fits = {key: run["rows"] for key, run in found.items() if key.isdigit()}
        if there([row for rows in fits.values() for row in rows], best - WITHIN) is None:
            continue
        (mine, number), length = quickest(fits, best)
        cells = [cell(found[key]["rows"], found[key]["trouble"], best) for key in methods]
        ratios = ["" if found[key]["trouble"] else ratio(mine, found[key]["rows"], best) for key in others]
        both = f"{mine:.1f} s ({number} of {length})"
        lines.append(bench.row([name, size, f"{best:.3f}", both, *cells, *ratios]))
        for text, (key, most) in zip(ratios, others.items()):
            holds[key].append((f"{name} ({size})", bool(text) and float(text.removeprefix("> ")) >= most))
    for key, most in others.items():
        yes, no = ([name for name, fine in holds[key] if fine is wanted] for wanted in (True, False))
        what = f"{'A fifth' if most == 5 else 'Half'} of {key}'s seconds"
        lines += ["", f"{what}: holds on {len(yes)} of {len(holds[key])}, not on {', '.join(no) or 'none'}."]
    options.out.write_text("\n".join(lines) + "\n")


def main():
    options = bench.parsed(
        __doc__,
        data=Path,
        sizes=[64, 256, 512],
        lengths=[100, 300, 1000],
        sets=list(SETS),
        runs=Path(tempfile.gettempdir(), "arrive.json"),
        out=bench.HERE / "arrive.md",
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = bench.Kept(options.runs)
    warm = Problem(options.data / "kin40k.npz", 64)
    for make, _ in LOOPS.values():  # the first steps of a process are slow
        by_loop(warm, make, math.inf, 1.0)
    for size, name in itertools.product(options.sizes, options.sets):
        problem, own = Problem(options.data / f"{name}.npz", size), f"{name} {size}"
        runs = {steps: kept.run(f"{own} {steps}", partial(by_fit, problem, steps))["rows"] for steps in options.lengths}
        every = [run["rows"] for key, run in kept.items() if key.startswith(f"{own} ")]
        best = max(bound for rows in every for _, _, bound in rows if math.isfinite(bound))
        if there([row for rows in runs.values() for row in rows], best - WITHIN) is None:
            print(f"{own}: no fit is there", flush=True)
            continue
        (seconds, _), _ = quickest(runs, best)
        for key, (make, times) in LOOPS.items():
            limit = 1.02 * times * seconds + 1
            kept.run(f"{own} {key}", partial(by_loop, problem, make, best - WITHIN, limit))
        write(kept, options)
    write(kept, options)


if __name__ == "__main__":
    main()
