"""One process of a distributed run of expectation propagation; see test_distributed.py.

python tests/ep_worker.py RANK WORLD FILE MODE: a share of the data, and the end result to FILE.RANK.
"""

import sys

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


def run(x, y, mode, group=None, start=0.0):
    """Some steps, by all data or in two mini-batches; all that should agree."""
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    z = torch.linspace(0, 4, 8)[:, None] + start
    guide = AutoSparseGP(model, SparseEP(z))
    optim = pyro.optim.Adam({"lr": 0.05})
    options = {"gradient": "exact"} if mode == "exact" else {}
    ep = ExpectationPropagation(model, guide, optim, group=group, **options)
    losses = []
    for _ in range(6):
        if mode == "batches":
            for rows in torch.arange(len(x)).reshape(2, -1):
                losses.append(ep.step(x[rows], y[rows], size=len(x), indices=rows))
        else:
            losses.append(ep.step(x, y))
    new = torch.linspace(0, 4, 5)[:, None]
    posterior = guide.posterior(new)["f"]
    return {
        "losses": losses,
        "mean": posterior.mean.detach(),
        "variance": posterior.variance.detach(),
        "inputs": guide.gps.f.basis.inputs[0].detach(),
        "length": pyro.param("length").detach(),
        "scale": guide.median(x, y)["scale"].detach(),
        "status": ep.status,
    }


if __name__ == "__main__":
    rank, world, file, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    x, y = classes()
    if mode == "batches":  # rank r has a share of each half
        halves = torch.arange(len(x)).reshape(2, world, -1)
        share = halves[:, rank].reshape(-1)
    else:
        share = torch.arange(len(x)).reshape(world, -1)[rank]
    # All start from the first process's parameters.
    result = run(x[share], y[share], mode, torch.distributed.group.WORLD, start=0.3 * rank)
    torch.save(result, f"{file}.{rank}")
    torch.distributed.destroy_process_group()
