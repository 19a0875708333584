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

import argparse
import itertools
import json
import math
import platform
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import gpytorch
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
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
SIZES, LENGTHS = (64, 256, 512), (100, 300, 1000)


class Problem:
    """Standardised rows, a likelihood, and where everything starts."""

    def __init__(self, path, num_points):
        with np.load(path, allow_pickle=False) as file:
            x, y = torch.as_tensor(file["X"]).double(), torch.as_tensor(file["y"]).double()
        self.path, self.kind, self.num_points = path, SETS[path.stem], num_points
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = x[order], y[order]
        x = x[:, x.std(0) > 0]
        x = (x - x.mean(0)) / x.std(0)
        y = (y - y.mean()) / y.std() if self.kind == "normal" else y
        self.offset = float(y.mean().log()) if self.kind == "poisson" else 0.0
        self.x, self.y = x.float(), y.float()
        self.length = math.sqrt(x.shape[1])
        self.nodes = 2 if self.kind == "normal" else 20
        self.batch = min(BATCH, len(x))

    def batches(self):
        generator = torch.Generator().manual_seed(2)
        while True:
            for rows in torch.randperm(len(self.x), generator=generator).split(self.batch):
                if len(rows) == self.batch:
                    yield self.x[rows], self.y[rows]

    def seen(self):
        return self.x[:2048], self.y[:2048]

    def points(self):
        """Those that our guides choose at a first call on a batch."""
        guide = Ours(self, True).guide
        guide(*next(self.batches()), size=len(self.x))
        return guide.gps.f.basis.inputs[0].detach().clone()


class Ours:
    def __init__(self, problem, natural, rate=RATE, **options):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        self.num = len(problem.x)

        def model(x, y=None, size=None):
            scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
            length = pyro.param("length", torch.full((x.shape[-1],), problem.length), constraint=constraints.positive)
            f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
            with pyro.plate("data", size or len(x), subsample=x):
                if problem.kind == "bernoulli":
                    return pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
                if problem.kind == "poisson":
                    return pyro.sample("y", dist.Poisson((f + problem.offset).exp()), obs=y)
                noise = pyro.param("noise", torch.tensor(NOISE), constraint=constraints.positive)
                return pyro.sample("y", dist.Normal(f, noise), obs=y)

        self.elbo = TraceQuadrature_ELBO(problem.nodes)
        options = options if natural is None else {"natural": natural} | options
        self.model, self.guide = model, AutoSparseGP(model, SVGP(problem.num_points, **options))
        self.svi = pyro.infer.SVI(model, self.guide, pyro.optim.Adam({"lr": rate}), self.elbo)

    def step(self, x, y):
        self.svi.step(x, y, size=self.num)

    def bound(self, x, y):
        return -self.svi.evaluate_loss(x, y, size=self.num) / self.num


class PoissonLikelihood(gpytorch.likelihoods.likelihood._OneDimensionalLikelihood):
    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, f, **_):
        return torch.distributions.Poisson((f + self.offset).exp())


class LogitLikelihood(gpytorch.likelihoods.likelihood._OneDimensionalLikelihood):
    def forward(self, f, **_):
        return torch.distributions.Bernoulli(logits=f)


class Theirs:
    """As in GPyTorch's example of natural gradients, whose rate for q is 0.1."""

    def __init__(self, problem):
        torch.manual_seed(0)
        z = problem.points()

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self):
                q = gpytorch.variational.NaturalVariationalDistribution(len(z))
                super().__init__(gpytorch.variational.VariationalStrategy(self, z, q))
                self.mean = gpytorch.means.ZeroMean()
                matern = gpytorch.kernels.MaternKernel(1.5, ard_num_dims=problem.x.shape[1])
                self.covariance = gpytorch.kernels.ScaleKernel(matern)

            def forward(self, x):
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

        self.model, num = Model(), len(problem.x)
        self.model.covariance.base_kernel.lengthscale = problem.length
        self.model.covariance.outputscale = 1.0
        self.likelihood = {
            "normal": gpytorch.likelihoods.GaussianLikelihood,
            "bernoulli": LogitLikelihood,
            "poisson": lambda: PoissonLikelihood(problem.offset),
        }[problem.kind]()
        if problem.kind == "normal":
            self.likelihood.noise = NOISE**2
        self.objective = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=num)
        self.natural = gpytorch.optim.NGD(self.model.variational_parameters(), num_data=num, lr=0.1)
        rest = [*self.model.hyperparameters(), *self.likelihood.parameters()]
        self.rest = torch.optim.Adam(rest, lr=RATE)

    def step(self, x, y):
        self.natural.zero_grad()
        self.rest.zero_grad()
        (-self.objective(self.model(x), y)).backward()
        self.natural.step()
        self.rest.step()

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
    ours = Ours(problem, None)
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
    return looks.found, ""


def by_loop(problem, make, target, seconds):
    looks = Looks(lambda: method.bound(*problem.seen()), target, seconds)
    method, batches = make(problem), problem.batches()
    if isinstance(method, Theirs):
        looks.forget()  # the choice of points
    stop = False
    try:
        while not stop:
            method.step(*next(batches))
            stop = looks.after_step()
    except Exception as error:
        return looks.found, f"{type(error).__name__} after {looks.steps} steps"
    return looks.found, ""


# What is made, and how many times fit's seconds it has.
LOOPS = {
    "natural": (lambda problem: Ours(problem, True), 2),
    "Adam, 0.01": (lambda problem: Ours(problem, False, OLD, init="greedy"), 5),
    "Adam, 0.03": (lambda problem: Ours(problem, False, init="greedy"), 2),
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


def page(kept, options):
    """The table of all that was run, and what it shows."""
    methods, others = list(LOOPS), {f"Adam, {OLD:g}": 5, "NGD": 2}
    lines = [
        "# Who arrives first",
        "",
        "Made by `python tests/benchmarks/arrive.py --data DIR"
        f" --sizes {' '.join(map(str, options.sizes))}`,"
        f" {platform.machine()}, torch {torch.__version__}, GPyTorch {gpytorch.__version__}, one run.",
        "",
        *(__doc__ or "").strip().splitlines()[4:],
        "",
        f"CPU seconds (steps) to within {WITHIN} nats a row of the converged bound.",
        "",
        f"| set | M | converged | fit | {' | '.join(methods)} | {' | '.join(f'{key} / fit' for key in others)} |",
        "|" + "---|" * (len(methods) + len(others) + 4),
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
        lines.append(f"| {name} | {size} | {best:.3f} | {both} | {' | '.join(cells)} | {' | '.join(ratios)} |")
        for text, (key, most) in zip(ratios, others.items()):
            holds[key].append((f"{name} ({size})", bool(text) and float(text.removeprefix("> ")) >= most))
    for key, most in others.items():
        yes, no = ([name for name, fine in holds[key] if fine is wanted] for wanted in (True, False))
        what = f"{'A fifth' if most == 5 else 'Half'} of {key}'s seconds"
        lines += ["", f"{what}: holds on {len(yes)} of {len(holds[key])}, not on {', '.join(no) or 'none'}."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir(), "arrive.json"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("arrive.md"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    kept = json.loads(options.runs.read_text()) if options.runs.exists() else {}

    def keep(key, run):
        """That run's rows, from the file or made now."""
        if key not in kept:
            rows, trouble = run()
            kept[key] = {"rows": rows, "trouble": trouble}
            options.runs.write_text(json.dumps(kept))
            options.out.write_text(page(kept, options))
            print(key, rows[-1:], trouble, flush=True)
        return kept[key]["rows"]

    warm = Problem(options.data / "kin40k.npz", 64)
    for make, _ in LOOPS.values():  # the first steps of a process are slow
        by_loop(warm, make, math.inf, 1.0)
    for size, name in itertools.product(options.sizes, options.sets):
        problem = Problem(options.data / f"{name}.npz", size)
        runs = {steps: keep(f"{name} {size} {steps}", partial(by_fit, problem, steps)) for steps in options.lengths}
        every = [run["rows"] for key, run in kept.items() if key.startswith(f"{name} {size} ")]
        best = max(bound for rows in every for _, _, bound in rows if math.isfinite(bound))
        if there([row for rows in runs.values() for row in rows], best - WITHIN) is None:
            print(f"{name} {size}: no fit is there", flush=True)
            continue
        (seconds, _), _ = quickest(runs, best)
        for key, (make, times) in LOOPS.items():
            limit = 1.02 * times * seconds + 1
            keep(f"{name} {size} {key}", partial(by_loop, problem, make, best - WITHIN, limit))
    options.out.write_text(page(kept, options))


if __name__ == "__main__":
    main()
