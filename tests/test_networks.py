"""Networks whose outputs are a GP's inputs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SGPR, SVGP
from pyro_sparsegp.inference.optimisers import FallingAdam

from .models import observed


def data(num=150):
    x = 2 * torch.rand(num, 2) - 1
    return x, torch.sin(8 * x[:, 0] * x[:, 1]) + (x[:, 0] > 0.2) + 0.2 * torch.randn(num)


def mlp():
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def trained(family, x, y, steps):
    """The loss after some steps at a rate at which features move."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    network = mlp()

    def model(x, y=None, size=None):
        pyro.module("network", network)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), network(x)))
        return observed(dist.Normal(f, pyro.param("noise", torch.tensor(0.4))), y, x, size)

    guide, loss = AutoSparseGP(model, family), TraceQuadrature_ELBO(2)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
    guide(x, y)
    for _ in range(steps):
        svi.step(x, y)
    return loss.loss(model, guide, x, y)


def test_natural_steps_keep_up_with_a_network():
    """On all rows the loss is near that of the optimal q under the network."""
    x, y = data()
    assert trained(SVGP(10), x, y, 30) < trained(SGPR(10), x, y, 30) + 8


def test_fit_takes_smaller_rates_for_networks():
    """Weights of n inputs 1/√n of the rate, biases a fifth; numbers beside them, and modules without such, none."""
    x, y = data(40)
    network, scales = mlp(), nn.Module()
    scales.raw = nn.Parameter(torch.ones(1, 2))
    network.log_noise = nn.Parameter(torch.tensor(-1.0))
    inputs = network[:]

    def model(x, y=None):
        pyro.module("network", network)
        pyro.module("scales", scales)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), inputs(scales.raw * x)))
        return observed(dist.Normal(f, network.log_noise.exp()), y)

    guide, optim = AutoSparseGP(model, SVGP(5)), FallingAdam(0.4)
    fit(model, guide, (x, y), steps=1, optim=optim, progress=False)
    rates = {p: one.param_groups[0]["initial_lr"] for p, one in optim.optim_objs.items()}
    found = {name: rates[p] for name, p in pyro.get_param_store().named_parameters() if p in rates}
    assert found["network$$$2.weight"] == 0.1
    assert found["network$$$2.bias"] == pytest.approx(0.08)
    assert found["scales$$$raw"] == found["network$$$log_noise"] == 0.4
