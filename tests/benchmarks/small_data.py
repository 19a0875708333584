"""Small data, priors on hyperparameters: seconds and test scores beside GPyTorch's exact GP, by ``--out`` as a page."""

import math
import statistics
from functools import partial

import gpytorch
import pyro
import pyro.distributions as dist
import torch
from bench import Page, clock, machine, parsed, read, scores, seeded, shuffled, standardised
from others import Exact, matern

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, fit, kernels

MARKS = (1, 10, 25, 50, 100)  # of GPyTorch's Adam steps at 0.1, and README's at 0.02
SETS = {"snelson1d": (160, 20), "concrete": (500, 200), "airfoil": (1000, 0)}  # rows, and points of SGPR
NEAR = 0.01  # nats a row from GPyTorch's last score


def model(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    lengths = pyro.sample("lengths", dist.LogNormal(0.0, 1.0).expand(x.shape[-1:]).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(lengths), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def timed(begun, step, score, marks=MARKS):
    """Seconds and minus the log score after some steps."""
    found, spent = [], 0.0
    for num in map(int.__sub__, marks, (0, *marks)):
        step(num)
        spent += clock() - begun
        found.append((spent, -score()[0]))
        begun = clock()
    return found


def exact(x, y, new, target):
    """GPyTorch's."""
    begun, likelihood = clock(), gpytorch.likelihoods.GaussianLikelihood()
    gp = Exact(x, y, matern(x.shape[-1]), likelihood).double()
    objective, optim = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp), torch.optim.Adam(gp.parameters(), 0.1)

    def step(num):
        for part in (gp, likelihood):
            part.train()
        for _ in range(num):
            optim.zero_grad()
            (-objective(gp(x), y)).backward()
            optim.step()

    def score():
        gp.eval(), likelihood.eval()
        q = likelihood(gp(new))
        return scores(q.mean.detach(), q.variance.detach(), target)

    return timed(begun, step, score)


def guided(family, way, x, y, new, target):
    """Ours."""
    seeded()
    begun, guide = clock(), AutoSparseGP(model, family)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())

    def step(num):
        for _ in range(num if way == "loop" else 0):
            svi.step(x, y)
        if way == "fit":
            fit(model, guide, (x, y), steps=num, progress=False)

    def score():
        q, noise = guide.posterior(new)["f"], guide.median(x, y)["noise"]
        return scores(q.mean.detach(), (q.variance + noise**2).detach(), target)

    return timed(begun, step, score, MARKS if way == "loop" else (MARKS[0], MARKS[-1]))


def main():
    options = parsed(__doc__, data=str, rounds=3, out=None)
    page = Page(options.out)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    page.say("# Small data", "", f"Made by `python tests/benchmarks/small_data.py --data FOLDER`, {machine()}:")
    page.say(f"CPU seconds, medians of {options.rounds} rounds, and minus the mean log density of test rows, after the")
    page.say(f"first step and after {MARKS[-1]}; and seconds to a score within {NEAR} of GPyTorch's last one, which is")
    page.say(f"looked at after {MARKS} steps; nan where it is never there. GPyTorch takes conjugate")
    page.say("gradients above 800 rows, we Cholesky factors. Asked: at most 3 times GPyTorch's seconds to the end on")
    page.say("160 and 500 rows, and at most 1.5 times to its score on 1,000.", "")
    page.head("data, rows", "method", "s, first", "score", "s, all", "score", "/ GPyTorch", "s to score", "/ GPyTorch")
    few = torch.rand(20, 1), torch.rand(20), torch.rand(5, 1), torch.rand(5)
    exact(*few), guided(families.Exact(), "loop", *few)  # imports, which the first to run would pay
    for name, (num, points) in SETS.items():
        x, y = read(f"{options.data}/{name}.npz")
        order = shuffled(len(x))
        x, y = standardised(x, y.reshape(-1), order[:num])
        data = x[order[:num]], y[order[:num]], x[order[num:]], y[order[num:]]
        ways, goal = {"GPyTorch, exact": partial(exact, *data)}, math.nan
        for family in [families.SGPR(points)] * bool(points) + [families.Exact()]:
            ways |= {f"{type(family).__name__}, {way}": partial(guided, family, way, *data) for way in ("loop", "fit")}
        rounds, base = [[run() for run in ways.values()] for _ in range(options.rounds)], None
        for way, runs in zip(ways, zip(*rounds)):
            seconds, found = (
                [statistics.median(at) for at in zip(*part)] for part in zip(*(zip(*run) for run in runs))
            )
            goal = goal if base else found[-1] + NEAR
            there = next((spent for spent, value in zip(seconds, found) if value <= goal), math.nan)
            base = base or (seconds[-1], there)
            cells = seconds[0], found[0], seconds[-1], found[-1], seconds[-1] / base[0], there, there / base[1]
            page.row(f"{name}, {num}", way, *(f"{cell:.3f}" for cell in cells))


if __name__ == "__main__":
    main()
