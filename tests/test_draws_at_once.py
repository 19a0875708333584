"""Draws of which each decides by its own numbers how often its sites are updated are made at once, and are right."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels, predict
from pyro_sparsegp.diagnostics import to_datatree
from pyro_sparsegp.guide.draws import items_of_draws
from pyro_sparsegp.program.asking import attempt
from pyro_sparsegp.program.draws import all_draws, in_blocks, vmapped
from pyro_sparsegp.program.handlers import Held

x = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None]
x_new = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
runs = 0


def counts(x, y=None):
    global runs
    runs += 1
    zero = x.new_zeros(())
    length = pyro.sample("length", dist.LogNormal(zero - 1.0, 0.5))
    scale = pyro.sample("scale", dist.LogNormal(zero, 0.5))
    f = pyro.sample("f", GaussianProcess(scale**2 * kernels.RBF(lengthscale=length), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Poisson(f.exp()), obs=y)


@pytest.fixture(scope="module", params=[families.SGPR(12), pytest.param(families.Exact(), marks=pytest.mark.slow)])
def fitted(request):
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    y = torch.poisson((torch.sin(6 * x[:, 0]) + 1).exp())
    guide = AutoSparseGP(counts, request.param)
    svi = pyro.infer.SVI(counts, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    for _ in range(15):
        svi.step(x, y)
    return guide, y


def test_a_draw_has_the_posterior_that_it_has_alone(fitted):
    guide, _ = fitted

    @torch.no_grad()
    def one(made):
        with Held(made):
            q = guide.run_at((x_new,), {}, draws_data=False).posteriors["f"]
        return {"mean": q.mean, "sd": q.stddev}

    items = items_of_draws(guide, 30)
    assert {name: value.shape for name, value in items.items()} == dict.fromkeys(["", "length", "scale"], (30,))
    blocks = list(in_blocks(one, items, lambda draw: 1))
    for i in range(30):
        alone = one({name: value[i] for name, value in items.items()})
        mean, sd = (torch.cat([block[name] for block in blocks])[i] for name in ("mean", "sd"))
        # an update that moves a marginal by less than 1e-4 standard deviations is none
        assert ((mean - alone["mean"]) / alone["sd"]).abs().max() < 1e-3
        torch.testing.assert_close(sd, alone["sd"], rtol=1e-3, atol=0)


def test_the_program_runs_seldom(fitted):
    global runs
    guide, y = fitted
    # One by one it ran some six times a draw.
    for ask in (lambda: predict(counts, guide, x_new), lambda: to_datatree(counts, guide, x, y, num_samples=100)):
        runs = 0
        ask()
        assert runs < 150, runs


def test_hyperparameters_that_hold_a_draw_are_those_of_q(fitted):
    guide, _ = fitted
    pyro.set_rng_seed(1)
    draws = predict(counts, guide, x_new, num_samples=1000)
    theta = torch.stack([draws["length"], draws["scale"]], -1).log()
    root = guide.together.tril.detach()
    torch.testing.assert_close(theta.mean(0), guide.together.mean.detach(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(theta.T.cov(), root @ root.T, atol=0.005, rtol=0.15)


def test_what_a_program_writes_into_is_mapped_with_it():
    """Pyro's OrderedLogistic writes probabilities into zeros: at all draws, and at all nodes, at once."""
    cuts, places = torch.tensor([-1.0, 0.5]), 2 * torch.rand(7, 40)
    classes = (torch.arange(40) % 3).long()

    def density(f):
        return dist.OrderedLogistic(f, cuts, validate_args=False).log_prob(classes)

    with attempt() as asked:
        found = vmapped(density, places, randomness="same")
    assert asked.error is None
    torch.testing.assert_close(found, torch.stack(list(map(density, places))))

    def ordered(x, y=None):
        global runs
        runs += 1
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(lengthscale=0.3), x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.OrderedLogistic(2 * f + level, cuts), obs=y)

    global runs
    guide = AutoSparseGP(ordered, families.SVGP(8), independent=True)
    svi = pyro.infer.SVI(ordered, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    svi.step(x, classes)
    for ask, most in ((lambda: svi.step(x, classes), 4), (lambda: guide.summary(num_draws=200), 10)):
        runs = 0
        ask()
        assert runs <= most, runs


SCALE = dist.LogNormal(torch.zeros((), dtype=torch.float64), 0.5)


@pytest.mark.parametrize("in_mean", [False, True])
def test_marginals_beside_latents_are_those_of_a_loop(in_mean):
    """The first draw tells whether a GP site's mean is made of latents; if it is, draws are made one by one."""

    seen = []

    def model(x, y=None):
        seen.append(x)
        level, scale = pyro.sample("level", dist.Normal(x.new_zeros(()), 2.0)), pyro.sample("scale", SCALE)
        f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.3), x, mean=scale * level if in_mean else 0.0))
        pyro.sample("y", dist.Normal(f if in_mean else f + level, 0.3).to_event(1), obs=y)

    guide = AutoSparseGP(model, families.SVGP(8))
    guide(x, torch.sin(6 * x[:, 0]) + 1)
    seen.clear()

    @torch.no_grad()
    def one(made):
        with Held(made):
            q = guide.run_at((x_new,), {}, draws_data=False, marginal=True).posteriors["f"]
        return {"mean": q.mean, "sd": q.stddev}

    items = {"": torch.arange(30), "scale": torch.linspace(0.5, 2.0, 30, dtype=x.dtype)}
    found = all_draws(one, items, lambda draw: 1)
    assert (len(seen) < 10) != in_mean
    alone = [one({name: value[i] for name, value in items.items()}) for i in range(30)]
    for name, value in found.items():
        torch.testing.assert_close(value, torch.stack([draw[name] for draw in alone]), rtol=1e-6, atol=1e-8)
