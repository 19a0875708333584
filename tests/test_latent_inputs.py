"""Inputs that are latents, or made of them: where they start, and what training makes of them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide.initialization import init_to_value

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import SGPR, SVGP

from .models import observed, prepared, train


def data(num=40):
    generator = torch.Generator().manual_seed(0)
    t = torch.linspace(0, 3, num)
    y = torch.stack([torch.sin(2 * t), torch.cos(2 * t), t - 1.5])
    return t, y + 0.05 * torch.randn(y.shape, generator=generator)


def gplvm(y):
    n = y.shape[-1]
    with pyro.plate("rows", n):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), x).expand([3]).to_event(1))
    with pyro.plate("outputs", 3, dim=-2), pyro.plate("data", n, dim=-1):
        pyro.sample("y", dist.Normal(f, 0.2), obs=y)


def network(x, y):
    """Two layers, each of which hides the other where it is 0."""
    first = pyro.sample("first", dist.Normal(torch.zeros(2, 4), 1.0).to_event(2))
    second = pyro.sample("second", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(1.0), torch.tanh(x @ first) @ second))
    observed(dist.Normal(f, 0.2), y)


def partly(x, y):
    """One column of the data's, one latent, and a constant one."""
    with pyro.plate("rows", len(x)):
        h = pyro.sample("h", dist.Normal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(torch.zeros(3), 0.5).to_event(1))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(length), torch.stack([x, h, torch.ones_like(x)], -1)))
    observed(dist.Normal(f, 0.2), y)


@pytest.mark.parametrize("family", [SVGP(10), SGPR(10)], ids=["SVGP", "SGPR"])
def test_latent_inputs_start_at_draws_and_train(family):
    _, y = data()
    guide = AutoSparseGP(gplvm, family)
    svi = SVI(gplvm, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(2))
    losses = [svi.step(y)]
    start = guide.locs.x.detach().clone()
    assert abs(start.std() - 1) < 0.2
    losses += [svi.step(y) for _ in range(30)]
    assert losses[-1] < losses[0] - 100


def test_layers_of_weights_start_at_draws():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    guide = prepared(network, SVGP(8), x, x[:, 0], independent=True)
    assert guide.locs.first.std() > 0.3
    assert guide.locs.second.std() > 0.3
    assert guide.locs.scale.abs() < 1e-6 + 0.13  # at its prior's mean, exp(0.5²/2)
    assert (
        next(p for n, p in guide.gps.f.named_parameters() if n.endswith("points") or p.shape == (8, 2)).std(0).min()
        > 0.05
    )


def test_only_what_enters_flat_columns_is_drawn():
    t, _ = data()
    guide = prepared(partly, SVGP(8), t, torch.sin(t), independent=True)
    assert guide.locs.h.std() > 0.5
    assert torch.equal(guide.locs.length, guide.locs.length[:1].expand(3))


def test_a_start_that_is_given_stays():
    t, y = data()
    given = torch.stack([t, t.flip(0)], -1)
    guide = prepared(gplvm, SVGP(8), y, init_loc_fn=init_to_value(values={"x": given}))
    assert torch.equal(guide.locs.x, given)
    before = given.clone()
    svi = SVI(gplvm, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(2))
    svi.step(y)
    assert torch.equal(given, before)  # the user's tensor is not what is trained
    assert not torch.equal(guide.locs.x, before)


def test_places_of_rows_in_mini_batches():
    t, y = data(60)

    def model(y):
        rows = pyro.plate("rows", 60, subsample_size=20)
        with rows:
            x = pyro.sample("x", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), x).expand([3]).to_event(1))
        with rows as i:
            pyro.sample("y", dist.Normal(f.mT, 0.2).to_event(1), obs=y.mT[i])

    guide = prepared(model, SVGP(10), y, init_loc_fn=init_to_value(values={"x": (t[:, None] - 1.5).tanh()}))
    assert guide.locs.x.shape == (60, 1)
    start = guide.locs.x.detach().clone()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(2))
    svi.step(y)
    moved = (guide.locs.x != start).all(-1)
    assert 0 < moved.sum() <= 20  # those of the batch


def one_plate(y):
    """Places and data in one plate: what data there are says which places."""
    rows = pyro.plate("rows", y.shape[-1])
    with rows:
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), x).expand([3]).to_event(1))
    with rows:
        pyro.sample("y", dist.Normal(f.mT, 0.2).to_event(1), obs=y.mT)


@pytest.mark.parametrize("family", [SVGP(10), SGPR(10)], ids=["SVGP", "SGPR"])
def test_the_training_data_are_at_the_places_learned(family):
    """Theirs alone: of other rows, though as many, nothing is known, and places are draws from the prior."""
    _, y = data()
    start = init_to_value(values={"x": torch.stack([y[0], y[2]], -1)})
    guide = AutoSparseGP(one_plate, family, init_loc_fn=start)
    train(one_plate, guide, y, steps=14, lr=0.05, loss=TraceQuadrature_ELBO(2))
    places, width = guide.locs.x.detach(), guide.scales.x.detach()
    f = guide.posterior(y)["f"]
    torch.testing.assert_close(f.process.x, places)
    assert (f.mean - y).square().mean().sqrt() < 0.5 * y.std()
    drawn = predict(one_plate, guide, y.clone(), num_samples=30)
    z = (drawn["x"] - places) / width
    assert abs(z.mean()) < 6 / z.numel() ** 0.5
    assert abs(z.square().mean() - 1) < 8 * (2 / z.numel()) ** 0.5
    assert (drawn["f"].mean(0) - y).square().mean().sqrt() < 0.5 * y.std()  # f at the draw's own places
    other = predict(one_plate, guide, y.flip(-1), num_samples=30)["x"]
    assert abs(other.square().mean() - 1) < 8 * (2 / other.numel()) ** 0.5
    assert abs((other - places).square().mean() - 1 - places.square().mean()) < 0.2
