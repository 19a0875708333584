"""Latents of groups whose plate holds data: what a prediction makes of them is told, and there is another way."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels, predict
from pyro_sparsegp.diagnostics import predictive_scores, to_datatree
from pyro_sparsegp.families import SGPR, SVGP

from .models import observed, prepared, refused, train

MESSAGE = "latent site 'a' is drawn from the model, not as it was learned: its plate 'groups' holds data"


def panel(data_plate):
    """Series of several groups, each with its level."""

    def program(t, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.4), t))
        groups = pyro.plate("groups", 3, dim=-2)
        with groups:
            a = pyro.sample("a", dist.Normal(0.0, 2.0))
        series = groups if data_plate == "groups" else pyro.plate(data_plate, 3, dim=-2)
        with series, pyro.plate("time", len(t), dim=-1):
            return pyro.sample("y", dist.Normal(a + f, 0.2), obs=y)

    return program


def data():
    t = torch.linspace(0, 1, 6)[:, None]
    return t, torch.tensor([[-3.0], [0.0], [3.0]]) + torch.sin(6 * t[:, 0])


def test_groups_in_the_plate_of_data_are_told_of():
    t, y = data()
    guide = AutoSparseGP(panel("groups"), SGPR(t))
    train(guide.model, guide, t, y, steps=2)
    predict(guide.model, guide, t, y, num_samples=2)  # of the data of training: as it was learned
    with pytest.warns(UserWarning, match=MESSAGE):
        predict(guide.model, guide, t[:4], num_samples=2)
    predict(guide.model, guide, t, num_samples=2)  # once
    guide.warned.clear()
    with pytest.warns(UserWarning, match=MESSAGE):
        to_datatree(guide.model, guide, t, y, predict=t[:4], num_samples=2)
    mcmc = MCMC(NUTS(panel("groups")), num_samples=2, warmup_steps=2, disable_progbar=True)
    mcmc.run(t, y)
    with pytest.warns(UserWarning, match=MESSAGE):
        predict(panel("groups"), mcmc, t[:4])


def test_a_plate_of_another_name_has_the_groups_known():
    t, y = data()
    guide = AutoSparseGP(panel("series"), SGPR(t))
    train(guide.model, guide, t, y, steps=40, lr=0.2)
    level = predict(guide.model, guide, t[:4], num_samples=20)["a"]
    assert (level.mean(0)[:, 0] - torch.tensor([-3.0, 0.0, 3.0])).abs().max() < 1


def test_groups_of_another_number_are_refused():
    t, y = data()

    def program(t, group, num, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.4), t))
        with pyro.plate("groups", num):
            a = pyro.sample("a", dist.Normal(0.0, 2.0))
        return observed(dist.Normal(f + a[group], 0.2), y)

    group = torch.arange(6) % 3
    guide = prepared(program, SVGP(t), t, group, 3, y[0])
    refused(r"site 'a' was learned in plates of the sizes \{'groups': 3\}", predict, program, guide, t, group, 4)


@pytest.mark.parametrize("plate", ["groups", "series"])
def test_groups_are_of_the_field_and_so_are_latents_of_rows(plate):
    """Effects of single rows join like any other plate's: test_arrow.py has what they give."""
    t, y = data()
    guide = AutoSparseGP(panel(plate), SVGP(t))
    guide(t, y)
    assert set(guide.joint.field) == {"a", "f"}


def levels(x, group, y=None):
    with pyro.plate("groups", 2):
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
    observed(dist.Normal(f + a[group], 0.1), y)


def means(x, group, y=None):
    with pyro.plate("groups", 2):
        a = pyro.sample("a", dist.LogNormal(0.0, 0.5))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x, mean=a[group]))
    observed(dist.Normal(f, 0.1), y)


def outliers(x, group, y=None):
    with pyro.plate("groups", 2):
        a = pyro.sample("a", dist.LogNormal(-1.0, 0.5))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.1), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(f, torch.where(z == 1, 3.0, a[group])), obs=y)


@pytest.mark.quick("family0 | levels | means")
@pytest.mark.parametrize("model", [levels, means, outliers])
@pytest.mark.parametrize("family", [SVGP(6), SGPR(6)])
def test_an_unknown_group_is_told_of_by_every_call(model, family):
    x, group, y = torch.rand(20, 1), torch.arange(20) % 2, torch.randn(20)
    guide = AutoSparseGP(model, family)
    train(model, guide, x, group, y, steps=2)
    new, seen = (x[:3], torch.tensor([0, 1, 2])), y[:3]
    calls = [lambda: predict(model, guide, *new), lambda: predict(lambda *a: model(*a), guide, *new)]
    calls += [partial(call, *new) for call in (guide, guide.posterior, guide.draw, guide.median)]
    calls += [partial(call, *new, seen) for call in (guide, guide.draw)] + [lambda: guide.quantiles(0.5, *new)]
    calls += [lambda: predictive_scores(model, guide, *new, seen)]
    calls += [lambda: to_datatree(model, guide, x, group, y, num_samples=2, predict=new)]
    for call in calls:
        refused("uses an index that these arguments do not have.*only by indices that they had in training", call)
