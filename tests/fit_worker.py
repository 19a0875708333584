"""Fits that are cut off; see test_fit.py."""

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints
from torch.utils.data import DataLoader, TensorDataset

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, fit, kernels
from pyro_sparsegp.families import SGPR, SVGP, SparseEP

STEPS = 9


def rows(num=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + 0.2 * torch.randn(num, generator=generator, dtype=torch.float64)
    return x, y


def regression(x, y=None, size=None):
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    length = pyro.param("length", lambda: torch.full((2,), 0.7), constraint=constraints.positive)
    f = pyro.sample("f", GaussianProcess(kernels.Matern32(length), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def classes(x, y=None, size=None, indices=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.4), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Bernoulli(logits=f), obs=None if y is None else (y > 0.5).double())


def deep_kernel(network):
    def model(x, y=None, size=None):
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), pyro.module("network", network)(x)))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    return model


def arguments(case):
    """The model, the guide and what fit is given, as a new process would make them."""
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(3)
    x, y = rows()
    if case == "tensors":
        return regression, AutoSparseGP(regression, SVGP(8)), (x, y), {"batch_size": 20}
    if case == "loader":
        network = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Dropout(0.2))
        model = deep_kernel(network)
        loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
        scheduled = pyro.optim.ExponentialLR(
            {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.02}, "gamma": 0.99, "last_epoch": -1}
        )
        return model, AutoSparseGP(model, SVGP(8)), loader, {"optim": scheduled}
    if case == "sites":
        return classes, AutoSparseGP(classes, SGPR(8)), {"x": x, "y": y}, {}
    guide = AutoSparseGP(classes, SparseEP(8))
    method = ExpectationPropagation(classes, guide, pyro.optim.Adam({"lr": 0.02}), damping=0.9)
    return classes, guide, (x, y), {"batch_size": 32, "method": method} if case == "EP, batches" else {}


def run(case, **keywords):
    """The fit of a case: its result, and all numbers that it ends in."""
    model, guide, data, options = arguments(case)
    result = fit(model, guide, data, steps=STEPS, progress=False, **options, **keywords)
    own = guide._pyro_name
    found = {key: value for key, value in guide.state_dict().items() if isinstance(value, torch.Tensor)}
    found |= {k: v.detach() for k, v in pyro.get_param_store().named_parameters() if not k.startswith(own)}
    found["losses"], found["random"] = torch.from_numpy(result.losses), torch.rand(3)
    return result, found
