"""Networks whose outputs are a GP's inputs: natural steps follow them."""

import copy
import pickle
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SGPR, SVGP, OrthogonalInducing
from pyro_sparsegp.guide.known import Calls
from pyro_sparsegp.inference.optimisers import FallingAdam

from .models import assert_alike, observed, restored, train


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
    """On all rows the loss is that of the optimal q under the network; sites about u are far behind."""
    x, y = data()
    *_, best = trained(SGPR(10), x, y, 30, mean=mean)
    *_, found = trained(SVGP(10), x, y, 30, mean=mean)
    assert found < best + 3


def test_natural_steps_keep_up_with_a_network_by_mini_batches():
    x, y = data()
    *_, natural = trained(SVGP(10), x, y, 40, batch=50)
    *_, gradient = trained(SVGP(10, natural=False), x, y, 40, batch=50)
    assert natural < gradient - 15


def in_the_way(kind):
    network = mlp()
    if kind == "frozen":
        return network.requires_grad_(False), network
    if kind == "part":
        return network, lambda x: network(x)[:, :1]
    if kind == "dropout":
        network = nn.Sequential(network, nn.Dropout(0.1))
    elif kind == "buffers":
        network = nn.Sequential(network, nn.BatchNorm1d(2))
    return network, network


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["plain", "frozen", "part", "dropout", "buffers"])
def test_what_is_followed(kind):
    """A module that trains, whose output is the inputs and the same at each call."""
    x, y = data(40)
    network, inputs = in_the_way(kind)
    model = deep(network, inputs)
    guide = AutoSparseGP(model, SVGP(5))
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)).step(x, y)
    assert (guide.gps.f.kept_rows is not None) == (kind == "plain")
    assert ("kept_rows" in guide.structure.gps["f"]) == (kind == "plain")


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
def test_networks_of_their_own_kind_train_on(kind):
    """Where a network can't be called at other rows, or would say something else there, it isn't."""
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
    assert ("kept_rows" in guide.structure.gps["f"]) == (kind == "site")
    if kind == "site":
        assert poutine.trace(guide).get_trace(x, y).nodes["h"]["value"].shape == (40, 2)


def test_hidden_values_go_without_gradients():
    x, y = data(40)
    hidden = []

    class Watched(nn.Tanh):
        def forward(self, x):
            hidden.append(weakref.ref(x))
            assert sum(there() is not None for there in hidden) < 3
            return super().forward(x)

    network = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(2, 2), Watched())], nn.Linear(2, 2))
    model = deep(network)
    guide = AutoSparseGP(model, SVGP(5))
    with torch.no_grad():
        guide(x, y)
    guide.calls = Calls()
    hidden.clear()
    with torch.no_grad():
        guide.posterior(x)


def test_codes_that_an_embedding_takes_load():
    x, y = torch.randint(0, 4, (40, 2)), torch.randn(40)
    model = deep(nn.Sequential(nn.Embedding(4, 1), nn.Flatten()))
    guide = AutoSparseGP(model, SVGP(5))
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)).step(x, y)
    assert guide.gps.f.kept_rows.dtype == torch.int64
    other = restored(guide, model, SVGP(5))
    torch.testing.assert_close(other.posterior(x)["f"].mean, guide.posterior(x)["f"].mean)


@pytest.mark.parametrize("family", [SVGP(6), OrthogonalInducing(4, 3)], ids=["svgp", "orthogonal"])
def test_states_and_copies_follow_on(family):
    x, y = data(60)
    model, guide, *_ = trained(family, x, y, 5)
    new = torch.rand(4, 2)
    expected = guide.posterior(new)["f"]
    other = AutoSparseGP(model, family)
    other.load_state_dict(pickle.loads(pickle.dumps(guide.state_dict())))
    for found in (other, copy.deepcopy(guide)):
        q = found.posterior(new)["f"]
        assert_alike(q, expected)
    with torch.no_grad():  # which features at the rows tell of
        for weight in model.network.parameters():
            weight.mul_(1.1)
    found = [part.posterior(new)["f"] for part in (guide, other)]
    torch.testing.assert_close(found[0].mean, found[1].mean)
    assert (found[0].mean - expected.mean).abs().max() > 1e-3


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


def test_a_part_of_the_network_is_not_taken_for_it():
    """Trained by a network of raw rows, asked by its part of scaled ones: what is kept are the raw rows."""

    class Scaled(nn.Module):
        def forward(self, x):
            return x / 100

    x, y = data()
    part = mlp()
    whole, way = nn.Sequential(Scaled(), part), {}
    model = deep(whole, inputs=lambda x: way.get("inputs", whole)(x))
    guide = AutoSparseGP(model, SVGP(20))
    train(model, guide, 100 * x, y, steps=60, lr=0.02, loss=TraceQuadrature_ELBO(2))
    expected = guide.posterior(100 * x)["f"]
    way["inputs"] = lambda x: part(x / 100)
    found = guide.posterior(100 * x)["f"]
    assert guide.gps.f.kept_rows is not None
    assert ((found.mean - expected.mean) / expected.stddev).abs().max() < 0.5  # a step's, where T is I
