"""A process of distributed runs: a share of the data, some steps, and what should agree; see test_distributed.py."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, fit, kernels
from pyro_sparsegp.distributions import Probit
from pyro_sparsegp.families import SVGP, CoupledPrecision, SparseEP

NUM, BATCH = 60, 20


def classification(likelihood):
    def model(x, y=None, size=None):
        length = pyro.param("length", x.new_tensor(0.8), constraint=constraints.positive)
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", likelihood(f), obs=y)

    return model


probit, logistic = classification(Probit), classification(lambda f: dist.Bernoulli(logits=f))


def rows():
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(NUM, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(NUM, generator=generator, dtype=torch.float64)
    return x, (torch.sin(2 * x[:, 0]) + 0.3 * noise > 0).double()


def share(job, rank, world):
    """A process's rows or batches: of each half, where there are two; a third and the others, where they come whole."""
    x, y = rows()
    kind, mode = job.split("-")
    if kind == "ep":
        own = torch.arange(NUM).reshape(2 if mode == "batches" else 1, world, -1)[:, rank].reshape(-1)
        return x[own], y[own]
    if mode == "whole":
        own = [slice(None)] if world == 1 else [slice(NUM // 3), slice(NUM // 3, None)]
        return x[own[rank]], y[own[rank]]
    return [(a[rank::world], b[rank::world]) for a, b in zip(x.split(BATCH), y.split(BATCH))]


def by_propagation(mode, data, z, group):
    """Two passes, by all data or in two mini-batches."""
    x, y = data
    guide = AutoSparseGP(probit, SparseEP(z, trainable=True), independent=True)
    ep = ExpectationPropagation(probit, guide, pyro.optim.Adam({"lr": 0.05}), group=group)
    losses = []
    for _ in range(2):
        if mode == "batches":
            for own in torch.arange(len(x)).reshape(2, -1):
                losses.append(ep.step(x[own], y[own], size=len(x), indices=own))
        else:
            losses.append(ep.step(x, y))
    return guide, losses, {"change": torch.tensor(ep.status["f"]["change"])}


def by_svi(mode, data, z, group):
    """Steps in a loop, or by fit."""
    pyro.set_rng_seed(1)
    family = CoupledPrecision([z], rank=2, base="block") if mode == "low rank" else SVGP(z, natural=mode != "gradients")
    guide = AutoSparseGP(logistic, replace(family, start="prior"), independent=True)
    # Of all rows, the rate's floor of steps on all of them is reached.
    size, steps = (None, 8) if mode == "whole" else (NUM, 3)
    return guide, fit(logistic, guide, data, size=size, steps=steps, group=group, progress=False).losses.tolist(), {}


def run(job, rank=0, world=1, group=None):
    """All processes start from the first one's parameters."""
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    kind, mode = job.split("-")
    z = torch.linspace(0, 4, 7)[:, None] + 0.3 * rank
    data = share(job, rank, world)
    guide, losses, more = (by_propagation if kind == "ep" else by_svi)(mode, data, z, group)
    q = guide.posterior(torch.linspace(0, 4, 5)[:, None])["f"]
    return more | {
        "losses": torch.tensor(losses),
        "mean": q.mean.detach(),
        "variance": q.variance.detach(),
        "inputs": next(v for n, v in guide.named_parameters() if "inputs" in n).detach(),
        "length": pyro.param("length").detach(),
        "scale": guide.median(torch.zeros(1, 1))["scale"].detach(),
    }


def work(rank, world, file, jobs):
    """A share of the data for each job, and its result to FILE.RANK.JOB."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        for job in jobs:
            torch.save(run(job, rank, world, torch.distributed.group.WORLD), f"{file}.{rank}.{job}")
    finally:
        torch.distributed.destroy_process_group()
