"""A process's part in a distributed run of expectation propagation; see group_worker.py."""

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, kernels
from pyro_sparsegp.distributions import Probit
from pyro_sparsegp.families import SparseEP


def model(x, y=None, size=None):
    length = pyro.param("length", x.new_tensor(0.8), constraint=constraints.positive)
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", Probit(f), obs=y)


def classes(num=64):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(num, 1, generator=generator, dtype=torch.float64)
    y = (torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(num, generator=generator, dtype=torch.float64) > 0).to(x)
    return x, y


def share(rank, world, mode):
    """A process's rows: of each half, where they come in two mini-batches."""
    x, y = classes()
    if mode == "batches":
        own = torch.arange(len(x)).reshape(2, world, -1)[:, rank].reshape(-1)
    else:
        own = torch.arange(len(x)).reshape(world, -1)[rank]
    return x[own], y[own]


def run(data, mode, group=None, start=0.0):
    """Some steps, by all data or in two mini-batches; all that should agree."""
    x, y = data
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    z = torch.linspace(0, 4, 8)[:, None] + start
    guide = AutoSparseGP(model, SparseEP(z, trainable=True))
    optim = pyro.optim.Adam({"lr": 0.05})
    options = {"gradient": "exact"} if mode == "exact" else {}
    ep = ExpectationPropagation(model, guide, optim, group=group, **options)
    losses = []
    for _ in range(2):
        if mode == "batches":
            for rows in torch.arange(len(x)).reshape(2, -1):
                losses.append(ep.step(x[rows], y[rows], size=len(x), indices=rows))
        else:
            losses.append(ep.step(x, y))
    new = torch.linspace(0, 4, 5)[:, None]
    posterior = guide.posterior(new)["f"]
    return {
        "losses": torch.tensor(losses),
        "mean": posterior.mean.detach(),
        "variance": posterior.variance.detach(),
        "inputs": guide.gps.f.basis.inputs[0].detach(),
        "length": pyro.param("length").detach(),
        "scale": guide.median(x, y)["scale"].detach(),
        "change": torch.tensor(ep.status["f"]["change"]),
    }
