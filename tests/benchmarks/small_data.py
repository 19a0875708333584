"""Small data, priors on hyperparameters: seconds and test scores beside GPyTorch's exact GP. Makes small_data.md."""

import gpytorch
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, fit, kernels

from .bench import HERE, Page, clock, machine, parsed, read, scores, seeded, shuffled, standardised
from .others import Exact, matern

STEPS = 100  # GPyTorch's Adam steps at 0.1, and README's at 0.02


def model(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    lengths = pyro.sample("lengths", dist.LogNormal(0.0, 1.0).expand(x.shape[-1:]).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(lengths), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def exact(x, y, new, target):
    """GPyTorch's: seconds, and minus the log score."""
    begun, likelihood = clock(), gpytorch.likelihoods.GaussianLikelihood()
    gp = Exact(x, y, matern(x.shape[-1]), likelihood).double()
    objective, optim = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp), torch.optim.Adam(gp.parameters(), 0.1)
    for _ in range(STEPS):
        optim.zero_grad()
        (-objective(gp(x), y)).backward()
        optim.step()
    seconds, _, _, q = clock() - begun, gp.eval(), likelihood.eval(), likelihood(gp(new))
    return seconds, -scores(q.mean.detach(), q.variance.detach(), target)[0]


def guided(family, way, x, y, new, target):
    """Ours: seconds and minus the log score after the first step, and after all."""
    seeded()
    begun, guide, found = clock(), AutoSparseGP(model, family), []
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    for steps in (1, STEPS - 1):
        for _ in range(steps if way == "loop" else 0):
            svi.step(x, y)
        if way == "fit":
            fit(model, guide, (x, y), steps=steps, progress=False)
        seconds, begun = clock() - begun, clock()
        q, noise = guide.posterior(new)["f"], guide.median(x, y)["noise"]
        found += [seconds, -scores(q.mean.detach(), (q.variance + noise**2).detach(), target)[0]]
    return found[0], found[1], found[0] + found[2], found[3]


def main():
    options, page = parsed(__doc__, data=str), Page(HERE / "small_data.md")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    page.say(
        "# Small data", "", "Made by `python -m tests.benchmarks.small_data --data FOLDER`: CPU seconds and minus the"
    )
    page.say(f"mean log density of test rows, after the first step and after {STEPS}. {machine()}.", "")
    page.head("data", "rows", "method", "s, first step", "first step", "s, all", "all")
    few = torch.rand(20, 1), torch.rand(20), torch.rand(5, 1), torch.rand(5)
    exact(*few), guided(families.Exact(), "loop", *few)  # imports, which the first to run would pay
    for name, num in (("snelson1d", 160), ("concrete", 500)):
        x, y = read(f"{options.data}/{name}.npz")
        order = shuffled(len(x))
        x, y = standardised(x, y.reshape(-1), order[:num])
        data = x[order[:num]], y[order[:num]], x[order[num:]], y[order[num:]]
        page.row(name, num, "GPyTorch, exact", "", "", *(f"{value:.3f}" for value in exact(*data)))
        for family in (families.SGPR(20 if num < 200 else 200), families.Exact()):
            for way in ("loop", "fit"):
                values = (f"{value:.3f}" for value in guided(family, way, *data))
                page.row(name, num, f"{type(family).__name__}, {way}", *values)


if __name__ == "__main__":
    main()
