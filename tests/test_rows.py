"""Programs that compute something over the rows that they are given, which is another at other rows."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import SGPR, SVGP, Exact

from .models import observed

NOISE = 0.3


def data(num=24):
    x = torch.rand(num, 1) * 10
    return x, x[:, 0].sin() + NOISE * torch.randn(num)


def gp(x, kernel=None, mean=None):
    return pyro.sample("f", GaussianProcess(kernel or kernels.RBF(1.0), x, mean=mean))


def standardised(x, y=None, size=None):
    observed(dist.Normal(gp((x - x.mean(0)) / x.std(0)), NOISE), y, x, size)


def ranks(x, y=None, size=None):
    observed(dist.Normal(gp(x.argsort(0).argsort(0) / len(x)), NOISE), y, x, size)


def centred_mean(x, y=None, size=None):
    observed(dist.Normal(gp(x, mean=lambda z: z[..., 0] - x.mean()), NOISE), y, x, size)


def ranged(x, y=None, size=None):
    observed(dist.Normal(gp(x, kernels.RBF(x.max() - x.min())), NOISE), y, x, size)


def basis(x, y=None, size=None):
    boundary = 1.5 * x.abs().max()
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    phi = torch.sin(torch.arange(1, 4) * x / boundary)
    observed(dist.Normal(gp(x) + phi @ w, NOISE), y, x, size)


def recoded(x, y=None, size=None):
    codes = (x[:, 0] > 4).unique(return_inverse=True)[1]
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    observed(dist.Poisson((gp(x) + b[codes]).exp()), None if y is None else y.abs().round(), x, size)


def scaled_data(x, y=None, size=None):
    y = None if y is None else (y - y.mean()) / y.std()
    observed(dist.Normal(gp(x), NOISE), y, x, size)


def trend(x, y=None, size=None):
    observed(dist.Normal(gp(x) + 0.1 * torch.arange(len(x)), NOISE), y, x, size)


DEPENDENT = {
    "inputs": [standardised, ranks],
    "prior mean": [centred_mean],
    "kernel": [ranged],
    "density of site 'y'": [basis, recoded, scaled_data, trend],
}


@pytest.mark.parametrize(("what", "model"), [(what, model) for what, models in DEPENDENT.items() for model in models])
def test_what_depends_on_other_rows_is_told_once_by_name(what, model):
    x, y = data()
    guide = AutoSparseGP(model, SVGP(8))
    with pytest.warns(UserWarning, match=f"{what}.*depends on which other rows"):
        guide(x, y)
    guide(x, y)  # warnings are errors


def test_a_batch_that_the_program_draws():
    x, y = data(60)

    def model():
        rows = pyro.plate("data", 60, subsample_size=20)
        inputs = x[rows.indices] - (x[rows.indices] if own else x).mean()
        with rows:
            pass
        f = gp(inputs)
        with rows:
            pyro.sample("y", dist.Normal(f, NOISE), obs=y[rows.indices])

    own = True
    with pytest.warns(UserWarning, match="depends on which other rows"):
        AutoSparseGP(model, SVGP(8))()
    own = False
    AutoSparseGP(model, SVGP(8))()


def independent(x, y=None, weights=None, size=None):
    """Masks, groups, latents of rows, outputs, classes, columns and tables of other lengths."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(len(TABLE)), 1.0).to_event(1))
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale.mean() * kernels.RBF(1.0), x).expand([2]).to_event(1))
    g = gp_of_columns(x)
    seen = True if y is None else ~y.isnan()
    with pyro.plate("data", size or len(x), subsample=x), pyro.poutine.mask(mask=seen):
        fn = dist.Normal(torch.stack([f[0] + level[(x[:, 0] % 3).long()], f[1] + g], -1), NOISE)
        pyro.sample("y", fn.to_event(1), obs=None if y is None else torch.stack([y, y], -1))


TABLE = torch.rand(4, 2)


def gp_of_columns(x):
    return pyro.sample("g", GaussianProcess(kernels.Matern32(1.0), torch.cat([x, x.square()], -1)))


def whole(x, y=None):
    """A program of these rows alone."""
    f = gp(x)
    with pyro.plate("data", 24):
        pyro.sample("y", dist.Normal(f, NOISE), obs=y)


def noisy(x, y=None):
    observed(dist.Normal(gp(x + 0.01 * torch.randn_like(x)), NOISE), y)


def recursive(x, y=None):
    observed(dist.Normal(gp(x).cumsum(0), NOISE), y)


def flipped(x, y=None):
    observed(dist.Normal(gp(x) + gp_of_columns(x).flip(0), NOISE), y)


def in_pairs(x, y=None):
    observed(dist.Normal(gp(x)[torch.arange(len(x)) // 2] - x[:, 0], NOISE), y)


def by_mask(x, y=None):
    f = gp(x)
    with pyro.plate("data", len(x)), pyro.poutine.mask(mask=torch.arange(len(x)) != 2):
        pyro.sample("y", dist.Normal(f, NOISE), obs=y)


def first_rows(x, y=None):
    observed(dist.Normal(gp(x) + gp_of_columns(x[:4])[x[:, 0].long() % 3], NOISE), y)


@pytest.mark.parametrize("model", [independent, whole, noisy, recursive, flipped, in_pairs, first_rows, by_mask])
@pytest.mark.parametrize("num", [4, 24])
def test_what_has_rows_of_its_own_is_not_told(model, num):
    if num == 24 or model is not whole:
        x, y = data(num)
        if model is independent:
            y = y.masked_fill(torch.arange(num) % 4 == 1, torch.nan)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*independent posteriors")
            AutoSparseGP(model, SVGP(4))(x, y)


def test_tables_that_are_not_of_rows_may_have_as_many():
    x, y = data()
    table, place = torch.rand(24, 2), torch.arange(24) % 3

    def model(x, y=None, table=table, place=place, centre=x):
        with pyro.plate("places", len(table)):
            level = pyro.sample("level", dist.Normal(table[:, 0], 1.0))
        observed(dist.Normal(gp(x - centre.mean(0)) + table[place, 1] + level[place], NOISE), y)

    AutoSparseGP(model, SVGP(8))(x, y, table, place, x)
    with pytest.warns(UserWarning, match="^the inputs of GP site 'f': what the model"):
        AutoSparseGP(lambda x, y, *rest: model(x - x.mean(0), y, *rest, torch.zeros(1, 1)), SVGP(8))(x, y, table, place)


@pytest.mark.parametrize("family", [SVGP(6), SGPR(6), Exact()])
def test_only_steps_of_training_move_what_a_network_keeps(family):
    x, y = data()
    network = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))

    def model(x, y=None):
        pyro.module("network", network)
        observed(dist.Normal(gp(network(x)) + pyro.sample("b", dist.Normal(0.0, 1.0)), NOISE), y)

    def moved():
        before, own[0] = own[0], {name: value.clone() for name, value in network.state_dict().items()}
        return [name for name, value in own[0].items() if not torch.equal(value, before[name])]

    own = [{name: value.clone() for name, value in network.state_dict().items()}]
    guide, loss = AutoSparseGP(model, family), TraceQuadrature_ELBO()
    with pytest.warns(UserWarning, match="inputs of GP site 'f'"):
        guide.prepare(x, y)
    assert not moved()
    loss.loss_and_grads(model, guide, x, y)
    assert any(name.endswith("running_mean") for name in moved())
    guide.posterior(x[:5])
    guide.draw(x[:5])
    predict(model, guide, x[:5], num_samples=3)
    if not isinstance(family, SGPR):
        guide.check(x, y)
    guide.state_dict()
    loss.loss(model, guide, x, y)
    assert not moved()
