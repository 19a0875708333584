"""A process's part in distributed SVI; see group_worker.py."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SVGP, CoupledPrecision
from pyro_sparsegp.inference.distributed import SharedOptim, agree, sharing

NUM, BATCH = 60, 20


def model(x, y=None, size=None):
    length = pyro.param("length", x.new_tensor(0.8), constraint=constraints.positive)
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def rows():
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(NUM, 1, generator=generator, dtype=torch.float64)
    return x, (torch.sin(2 * x[:, 0]) > 0).double()


def share(rank, world, mode):
    """A process's batches, or its rows: a third of them and the others, if they come whole."""
    x, y = rows()
    if mode == "whole":
        own = [slice(None)] if world == 1 else [slice(NUM // 3), slice(NUM // 3, None)]
        return x[own[rank]], y[own[rank]]
    return [(a[rank::world], b[rank::world]) for a, b in zip(x.split(BATCH), y.split(BATCH))]


def run(data, mode, group=None, start=0.0):
    """Some steps; all that should agree."""
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    z = torch.linspace(0, 4, 7)[:, None] + start  # all start from the first process's
    family = CoupledPrecision([z], rank=2, base="block") if mode == "low rank" else SVGP(z, natural=mode != "gradients")
    guide = AutoSparseGP(model, replace(family, start="prior"), coupled=mode == "coupled")
    if mode in ("loop", "low rank", "coupled"):
        optim = pyro.optim.Adam({"lr": 0.05})
        svi = pyro.infer.SVI(model, guide, SharedOptim(optim) if group else optim, TraceQuadrature_ELBO())
        guide(*data[0], size=NUM)
        agree(guide, group)
        pyro.set_rng_seed(2)
        losses = []
        with sharing(group):
            losses = [svi.step(*batch, size=NUM) for batch in data]
        losses = losses if group is None else []  # each process's own
    else:
        # Of all rows, the rate's floor of steps on all of them is reached.
        size, steps = (None, 8) if mode == "whole" else (NUM, 3)
        result = fit(model, guide, data, size=size, steps=steps, group=group, progress=False)
        losses = result.losses.tolist()
    q = guide.posterior(torch.linspace(0, 4, 5)[:, None])["f"]
    return {
        "losses": torch.tensor(losses),
        "mean": q.mean.detach(),
        "variance": q.variance.detach(),
        "inputs": next(v for n, v in guide.named_parameters() if "inputs" in n).detach(),
        "length": pyro.param("length").detach(),
        "scale": guide.median(torch.zeros(1, 1))["scale"].detach(),
    }
