"""Networks whose outputs are a GP's inputs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SGPR, SVGP
from pyro_sparsegp.inference.optimisers import FallingAdam

from .models import observed, restored


def data(num=150):
    x = 2 * torch.rand(num, 2) - 1
    return x, torch.sin(8 * x[:, 0] * x[:, 1]) + (x[:, 0] > 0.2) + 0.2 * torch.randn(num)


def mlp():
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def deep(network, inputs=None, mean=None):
    """A model whose inputs are the network's outputs, or made of them."""

    def model(x, y=None, size=None):
        pyro.module("network", network)
        level = pyro.param("level", torch.zeros(())) if mean else None
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), (inputs or network)(x), level))
        return observed(dist.Normal(f, pyro.param("noise", torch.tensor(0.4))), y, x, size)

    model.network = network
    return model


def trained(family, x, y, steps, seed=0, batch=None, **kwargs):
    """Losses on all rows of some steps at a rate at which features move, in batches or not."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = deep(mlp(), **kwargs)
    guide, loss = AutoSparseGP(model, family), TraceQuadrature_ELBO(2)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
    guide(x, y)
    for _ in range(steps):
        rows = torch.randperm(len(x))[:batch] if batch else slice(None)
        svi.step(x[rows], y[rows], len(x))
    return model, guide, svi, loss.loss(model, guide, x, y)


@pytest.mark.parametrize("mean", [False, True], ids=["zero mean", "learned mean"])
def test_natural_steps_keep_up_with_a_network(mean):
    """On all rows the loss is near that of the optimal q under the network."""
    x, y = data()
    *_, best = trained(SGPR(10), x, y, 30, mean=mean)
    *_, found = trained(SVGP(10), x, y, 30, mean=mean)
    assert found < best + 8


def test_natural_steps_keep_up_with_a_network_by_mini_batches():
    x, y = data()
    *_, natural = trained(SVGP(10), x, y, 40, batch=50)
    *_, gradient = trained(SVGP(10, natural=False), x, y, 40, batch=50)
    assert natural < gradient - 5


class Layer(nn.Module):
    """A network with something of its own in its forward pass."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.network, self.gate = kind, mlp(), nn.Parameter(torch.zeros(()))

    def forward(self, x, *, scale=1.0):
        h = self.network(x)
        if self.kind == "site":
            pyro.deterministic("h", h)
        if self.kind == "latent":
            h = h + pyro.sample("shift", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        return torch.eye(40) @ h if self.kind == "its rows" else scale * h


@pytest.mark.parametrize("kind", ["site", "latent", "its rows", "keyword", "written into", "compiled"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_networks_of_any_kind_train(kind):
    x, y = data(40)
    layer = Layer(kind)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)

    def inputs(x):
        if kind == "keyword":
            return layer(x, scale=1.0 + layer.gate)
        if kind == "written into":
            return layer(x).add_(layer.gate * x)
        return compiled(x) if kind == "compiled" else layer(x)

    model = deep(layer, inputs)
    guide = AutoSparseGP(model, SVGP(5), point_estimates=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    poutine.trace(guide).get_trace(x, y)
    for _ in range(2):
        svi.step(x, y)
    if kind == "site":
        assert poutine.trace(guide).get_trace(x, y).nodes["h"]["value"].shape == (40, 2)


def test_codes_that_an_embedding_takes_load():
    x, y = torch.randint(0, 4, (40, 2)), torch.randn(40)
    model = deep(nn.Sequential(nn.Embedding(4, 1), nn.Flatten()))
    guide = AutoSparseGP(model, SVGP(5))
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)).step(x, y)
    other = restored(guide, model, SVGP(5))
    torch.testing.assert_close(other.posterior(x)["f"].mean, guide.posterior(x)["f"].mean)


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
