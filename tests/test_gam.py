"""Generalised additive models as Pyro programs: the likelihood and all but the smooth terms are the user's code."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import CoupledPrecision

from .models import train

NUM, GROUPS = 250, 6


def gaussian(eta):
    return dist.Normal(eta, pyro.param("noise", eta.new_tensor(1.0), constraint=constraints.positive))


def bernoulli(eta):
    return dist.Bernoulli(logits=eta)


def poisson(eta):
    return dist.Poisson(eta.exp())


def negative_binomial(eta):
    size = pyro.param("size", eta.new_tensor(2.0), constraint=constraints.positive)
    return dist.NegativeBinomial(size, logits=eta - size.log())


def gamma(eta):
    shape = pyro.param("shape", eta.new_tensor(1.0), constraint=constraints.positive)
    return dist.Gamma(shape, shape * (-eta).exp())


LIKELIHOODS = {function.__name__: function for function in (gaussian, bernoulli, poisson, negative_binomial, gamma)}
COUNTS = (poisson, negative_binomial)
TRUE = {"noise": 0.5, "size": 4.0, "shape": 3.0}


def smooth(scale, length):
    return scale * kernels.Anova(kernels.Matern52(length), 0.0, 1.0)


def gam(likelihood):
    """Intercept, a line, a smooth term, another for each of two levels of a factor, random effects, an offset."""

    def model(x, group, exposure, y=None):
        lengths = pyro.param("lengths", 0.4 * x.new_ones(2), constraint=constraints.positive)
        scales = pyro.param("scales", x.new_ones(2), constraint=constraints.positive)
        kernel = smooth(scales[0], lengths[0])[0].named("s(a)") + (
            kernels.Categorical(2)[3] * smooth(scales[1], lengths[1])[1]
        ).named("s(b) by level")
        intercept = pyro.sample("intercept", dist.Normal(0.0, 3.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        tau = pyro.param("tau", x.new_tensor(0.5), constraint=constraints.positive)
        with pyro.plate("groups", GROUPS):
            effect = pyro.sample("effect", dist.Normal(0.0, tau))
        f = pyro.sample("f", GaussianProcess(kernel, x))
        eta = intercept + slope * x[:, 2] + effect[group] + f
        if likelihood in COUNTS:
            eta = eta + exposure.log()
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(eta), obs=y)

    return model


def effects(x):
    first = torch.sin(2 * torch.pi * x[:, 0])
    second = torch.where(x[:, 3] > 0, 1.0, -1.0) * 1.2 * (2 * x[:, 1] - 1)
    return first, second


def simulate(likelihood):
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(NUM, 4, generator=generator)
    x[:, 3] = (x[:, 3] > 0.5).double()
    group = torch.arange(NUM) % GROUPS
    exposure = 0.5 + 2 * torch.rand(NUM, generator=generator)
    effect = torch.linspace(-0.8, 0.8, GROUPS)
    eta = 0.3 + 0.7 * x[:, 2] + effect[group] + sum(effects(x))
    if likelihood in COUNTS:
        eta = eta + exposure.log()
    for name, value in TRUE.items():
        pyro.param(name, torch.tensor(value), constraint=constraints.positive)
    y = likelihood(eta).sample()
    pyro.clear_param_store()
    return x, group, exposure, effect, y


@pytest.mark.parametrize(
    "likelihood",
    # The others differ in a line of the user's: test_sites.py holds each of these likelihoods' bounds, in
    # test_iterated_sites_reach_the_optimum_of_a_free_posterior and test_sgpr_is_titsias_bound.
    [negative_binomial, *(pytest.param(f, marks=pytest.mark.slow) for f in (gaussian, bernoulli, poisson, gamma))],
)
def test_gam(likelihood):
    x, group, exposure, effect, y = simulate(likelihood)
    model = gam(likelihood)
    guide = AutoSparseGP(model, CoupledPrecision([8, 12], init="grid"))
    losses = train(model, guide, x, group, exposure, y, steps=50, lr=0.05, loss=TraceQuadrature_ELBO(6))
    assert sum(losses[-10:]) < sum(losses[:10])
    noisy = likelihood in (bernoulli,)  # the one with the least information
    with torch.no_grad():
        parts = guide.posterior(x, group, exposure)["f"].components
        assert parts.names == ("s(a)", "s(b) by level")
        for part, truth in zip(parts, effects(x)):
            error = (part.mean - truth).square().mean().sqrt()
            assert error < (0.5 if noisy else 0.25), error
            covered = ((part.mean - truth).abs() < 3 * part.stddev).double().mean()
            assert covered > 0.7, covered
    medians = guide.median(x, group, exposure)
    assert abs(medians["slope"] - 0.7) < (1.0 if noisy else 0.4)
    assert torch.corrcoef(torch.stack([medians["effect"], effect]))[0, 1] > (0.5 if noisy else 0.95)
    for name, value in TRUE.items():
        if name in pyro.get_param_store():
            assert 0.6 * value < pyro.param(name).item() < 1.6 * value
    if likelihood in COUNTS:  # twice the exposure, twice the counts
        one, two = (
            predict(model, guide, x[:20], group[:20], k * torch.ones(20), num_samples=40)["y"].mean()
            for k in (4.0, 8.0)
        )
        assert 1.8 < two / one < 2.2


def test_offsets_and_random_effects_as_kernels():
    """A plate of random effects and a Categorical kernel are the same model."""
    x, group, _, _, y = simulate(gaussian)
    x = torch.cat([x, group[:, None].double()], -1)

    def model(x, y=None):
        kernel = (
            smooth(1.0, 0.3)[0]
            + kernels.Constant(9.0)
            + kernels.Linear(9.0)[2]
            + (0.5**2 * kernels.Categorical(GROUPS))[4].named("group")
        )
        f = pyro.sample("f", GaussianProcess(kernel, x, mean=lambda x: effects(x)[1]))  # an offset
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = AutoSparseGP(model, CoupledPrecision(10))
    train(model, guide, x, y, steps=20, lr=0.1)
    part = guide.posterior(x)["f"].components["group"]
    counts = torch.bincount(group)
    at = torch.zeros(GROUPS + 1, 5)
    at[:, 4] = torch.arange(GROUPS + 1)
    part = part.at(at)
    rest = guide.posterior(x)["f"].mean - guide.posterior(x)["f"].components["group"].mean
    residual = torch.zeros(GROUPS).index_add(0, group, y - rest) / counts
    shrunk = residual * 0.25 / (0.25 + 0.25 / counts)
    assert (part.mean[:GROUPS] - shrunk).abs().max() < 0.05
    assert part.mean[GROUPS] == 0  # a new level knows nothing
    torch.testing.assert_close(part.variance[GROUPS], torch.tensor(0.25))
