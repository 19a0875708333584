"""Noisy test functions of Bayesian optimisation: a guide as BoTorch's model beside BoTorch's own.

    python tests/benchmarks/bayesian_optimisation.py [--tasks "Branin" ...] [--models "here" ...] [--seeds 0 1 2]

Regret, best value seen without noise over the optimum, after so many measurements of noise 0.05: those first are at
random, the others by LogEI, or by qLogNEI in joint batches of three. Values are standardised before each fit. "Here" is
SGPR at all places, hyperparameters at their points under priors, 60 steps of Adam; beside it SingleTaskGP as it comes,
and places at random. Rows are printed as they are done.
"""

import statistics
import warnings

import bench
import pyro
import pyro.distributions as dist
import torch
from botorch.acquisition import LogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels
from pyro_sparsegp.families import SGPR
from pyro_sparsegp.interop.botorch import Model

NOISE = 0.05
TASKS = {  # function, first measurements, rounds, places a round
    "Branin": (Branin(), 6, 24, 1),
    "Branin in threes": (Branin(), 6, 8, 3),
    "Hartmann-6": (Hartmann(dim=6), 12, 28, 1),
}


def program(x, y=None):
    """Regression with hyperparameters of each column."""
    length = pyro.sample("length", dist.LogNormal(x.new_full(x.shape[-1:], -0.5), 0.7).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-3.0, 1.0))
    centre = pyro.sample("centre", dist.Normal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern52(length), x, mean=centre))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def ours(x, y, steps=60):
    """A guide, trained."""
    guide = AutoSparseGP(program, SGPR(x, trainable=False), point_estimates=True)
    bench.Training(program, guide, x, y, 0.1).until(steps=steps)
    return Model(program, guide)


def theirs(x, y):
    """BoTorch's, trained."""
    model = SingleTaskGP(x, y[:, None])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


MODELS = {"here": ours, "SingleTaskGP": theirs, "at random": lambda x, y: None}


def regret(fit, task, seed):
    """After all measurements of a task."""
    function, start, rounds, q = TASKS[task]
    torch.manual_seed(seed)
    bounds = torch.stack([torch.zeros(function.dim), torch.ones(function.dim)])
    low, high = function.bounds.to(torch.get_default_dtype())

    def clean(x):
        return -function(low + (high - low) * x, noise=False)

    x = torch.rand(start, function.dim)
    y = clean(x) + NOISE * torch.randn(start)
    for _ in range(rounds):
        new = next_places(fit(x, (y - y.mean()) / y.std()), x, bounds, q)
        x, y = torch.cat([x, new]), torch.cat([y, clean(new) + NOISE * torch.randn(q)])
    return -function.optimal_value - clean(x).max().item()


def next_places(model, x, bounds, q):
    """Where to measure, by the acquisition function of a fitted model."""
    if model is None:
        return torch.rand(q, bounds.shape[-1])
    if q == 1:
        best = model.posterior(x).mean.max().detach()
        acquisition = LogExpectedImprovement(model, best_f=best)
    else:
        acquisition = qLogNoisyExpectedImprovement(model, x, prune_baseline=False, cache_root=False)
    return optimize_acqf(acquisition, bounds, q=q, num_restarts=4, raw_samples=64, options={"maxiter": 30})[0]


def main():
    options, page = bench.parsed(__doc__, tasks=list(TASKS), models=list(MODELS), seeds=[0, 1, 2]), bench.Page()
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    seeds = (f"seed {seed}" for seed in options.seeds)
    page.head("task", "measurements", "model", *seeds, "median", "CPU seconds")
    for task in options.tasks:
        _, start, rounds, q = TASKS[task]
        for label in options.models:
            begin = bench.clock()
            found = [regret(MODELS[label], task, seed) for seed in options.seeds]
            cells = (f"{one:.3f}" for one in (*found, statistics.median(found)))
            page.row(task, start + rounds * q, label, *cells, f"{bench.clock() - begin:.0f}")


if __name__ == "__main__":
    main()
