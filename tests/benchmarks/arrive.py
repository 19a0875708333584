"""Who arrives first: CPU seconds until the bound is within 0.02 nats a row of the best bound that was reached.

    python tests/benchmarks/arrive.py --data DIR [--sizes 64 256] [--seconds 8 20] [--sets kin40k ...] [--out arrive.md]

SVGP with M trainable points by natural steps (the default), by Adam, and GPyTorch's by its NGD, all in one process, one
after the other, one thread, float32: the same rows, batches of 1,024, points, starting values and Adam's rate of 0.03
for all that is not q; hyperparameters are parameters without priors, so that the bounds are one and the same function.
Each has so many CPU seconds, natural steps twice as many, and the best of all is what is to be reached. Bounds are of
2,048 fixed rows and scored off the clock; a first call is on it.
"""

import argparse
import itertools
import math
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

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

SETS = {
    "kin40k": "normal",
    "protein": "normal",
    "bike_hourly_raw": "normal",
    "elevators": "normal",
    "magic_gamma": "bernoulli",
    "spatial_counts_bei": "poisson",
}
BATCH, LOOKS, WITHIN, RATE, NOISE = 1024, 24, 0.02, 0.03, 0.5


class Problem:
    """Standardised rows, a likelihood, and where everything starts."""

    def __init__(self, path, num_points):
        with np.load(path, allow_pickle=False) as file:
            x, y = torch.as_tensor(file["X"]).double(), torch.as_tensor(file["y"]).double()
        self.kind = SETS[path.stem]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = x[order], y[order]
        x = x[:, x.std(0) > 0]
        x = (x - x.mean(0)) / x.std(0)
        y = (y - y.mean()) / y.std() if self.kind == "normal" else y
        self.offset = float(y.mean().log()) if self.kind == "poisson" else 0.0
        self.x, self.y = x.float(), y.float()
        self.z = self.x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:num_points]].clone()
        self.length = math.sqrt(x.shape[1])
        self.nodes = 2 if self.kind == "normal" else 20

    def batches(self):
        generator = torch.Generator().manual_seed(2)
        while True:
            for rows in torch.randperm(len(self.x), generator=generator).split(BATCH):
                if len(rows) == min(BATCH, len(self.x)):
                    yield self.x[rows], self.y[rows]

    def seen(self):
        return self.x[:2048], self.y[:2048]


class Ours:
    def __init__(self, problem, natural):
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
        self.model, self.guide = model, AutoSparseGP(model, SVGP(problem.z, natural=natural))
        self.svi = pyro.infer.SVI(model, self.guide, pyro.optim.Adam({"lr": RATE}), self.elbo)

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

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self):
                q = gpytorch.variational.NaturalVariationalDistribution(len(problem.z))
                super().__init__(gpytorch.variational.VariationalStrategy(self, problem.z, q))
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


def trace(problem, make, seconds):
    """(CPU seconds, steps, bound a row), and why it ended early."""
    begun, found, steps = time.process_time(), [], 0
    try:
        method, batches = make(), problem.batches()
        spent, marks = time.process_time() - begun, [seconds * (k / LOOKS) ** 1.5 for k in range(1, LOOKS + 1)]
        while marks:
            begun = time.process_time()
            method.step(*next(batches))
            steps += 1
            spent += time.process_time() - begun
            if spent >= marks[0]:
                marks = [mark for mark in marks if mark > spent]
                found.append((spent, steps, method.bound(*problem.seen())))
    except Exception as error:
        return found, f"{type(error).__name__} after {steps} steps"
    return found, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, nargs="+", default=[8.0, 20.0])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("arrive.md"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    names = ("natural", "Adam", "GPyTorch's NGD")
    lines = [
        "# Who arrives first",
        "",
        "Made by `python tests/benchmarks/arrive.py --data DIR"
        f" --sizes {' '.join(map(str, options.sizes))} --seconds {' '.join(f'{s:g}' for s in options.seconds)}`, one"
        " thread, one run.",
        "",
        *(__doc__ or "").strip().splitlines()[4:],
        "",
        f"CPU seconds (steps) to within {WITHIN} nats a row; where a method did not come so near in its seconds, what"
        " it lacked at the end.",
        "",
        f"| set | M | bound a row | {' | '.join(names)} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    warm = Problem(options.data / "kin40k.npz", 64)
    makes = {"natural": lambda p: Ours(p, None), "Adam": lambda p: Ours(p, False), "GPyTorch's NGD": Theirs}
    for name in names:  # the first steps of a process are slow
        trace(warm, partial(makes[name], warm), 1.0)
    for (size, seconds), name in itertools.product(zip(options.sizes, options.seconds), options.sets):
        problem = Problem(options.data / f"{name}.npz", size)
        found = {
            key: trace(problem, partial(makes[key], problem), seconds * (2 if key == "natural" else 1)) for key in names
        }
        finite = [b for rows, _ in found.values() for _, _, b in rows if math.isfinite(b)]
        best, cells = max(finite), []
        for rows, trouble in found.values():
            there = [(s, n) for s, n, b in rows if b >= best - WITHIN]
            if there:
                cells.append(f"{there[0][0]:.1f} s ({there[0][1]})")
            else:
                cells.append(trouble or f"{best - rows[-1][2]:.3f} short after {rows[-1][0]:.0f} s ({rows[-1][1]})")
        lines.append(f"| {name} | {size} | {best:.3f} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
