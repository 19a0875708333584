"""A generalised additive model as a Pyro program: the likelihood and all but the smooth terms are the user's code."""

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import CoupledPrecision

from .models import observed, train, trained

NUM, GROUPS, SIZE = 250, 6, 4.0


def smooth(scale, length):
    return scale * kernels.Anova(kernels.Matern52(length), 0.0, 1.0)


def negative_binomial(eta, size):
    return dist.NegativeBinomial(size, logits=eta - size.log())


def gam(x, group, exposure, y=None):
    """Intercept, a line, a smooth term, another for each of two levels of a factor, random effects, an offset."""
    lengths = pyro.param("lengths", 0.4 * x.new_ones(2), constraint=constraints.positive)
    scales = pyro.param("scales", x.new_ones(2), constraint=constraints.positive)
    by_level = kernels.Categorical(2)[3] * smooth(scales[1], lengths[1])[1]
    kernel = smooth(scales[0], lengths[0])[0].named("s(a)") + by_level.named("s(b) by level")
    intercept = pyro.sample("intercept", dist.Normal(0.0, 3.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
    tau = pyro.param("tau", x.new_tensor(0.5), constraint=constraints.positive)
    size = pyro.param("size", x.new_tensor(2.0), constraint=constraints.positive)
    with pyro.plate("groups", GROUPS):
        effect = pyro.sample("effect", dist.Normal(0.0, tau))
    f = pyro.sample("f", GaussianProcess(kernel, x))
    eta = intercept + slope * x[:, 2] + effect[group] + f + exposure.log()
    return observed(negative_binomial(eta, size), y)


def effects(x):
    first = torch.sin(2 * torch.pi * x[:, 0])
    second = torch.where(x[:, 3] > 0, 1.0, -1.0) * 1.2 * (2 * x[:, 1] - 1)
    return first, second


def simulated():
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(NUM, 4, generator=generator)
    x[:, 3] = (x[:, 3] > 0.5).double()
    group = torch.arange(NUM) % GROUPS
    exposure = 0.5 + 2 * torch.rand(NUM, generator=generator)
    effect = torch.linspace(-0.8, 0.8, GROUPS)
    return x, group, exposure, effect, 0.3 + 0.7 * x[:, 2] + effect[group] + sum(effects(x))


def test_gam():
    # Other likelihoods differ in a line of the user's: test_sites.py holds their bounds, in
    # test_iterated_sites_reach_the_optimum_of_a_free_posterior and test_sgpr_is_titsias_bound.
    x, group, exposure, effect, eta = simulated()
    y = negative_binomial(eta + exposure.log(), torch.tensor(SIZE)).sample()
    guide = AutoSparseGP(gam, CoupledPrecision([8, 12], init="grid"))
    losses = train(gam, guide, x, group, exposure, y, steps=50, lr=0.05, loss=TraceQuadrature_ELBO(6))
    assert sum(losses[-10:]) < sum(losses[:10])
    with torch.no_grad():
        parts = guide.posterior(x, group, exposure)["f"].components
        assert parts.names == ("s(a)", "s(b) by level")
        for part, truth in zip(parts, effects(x)):
            assert (part.mean - truth).square().mean().sqrt() < 0.25
            assert ((part.mean - truth).abs() < 3 * part.stddev).double().mean() > 0.7
    medians = guide.median(x, group, exposure)
    assert abs(medians["slope"] - 0.7) < 0.4
    assert torch.corrcoef(torch.stack([medians["effect"], effect]))[0, 1] > 0.95
    assert 0.6 * SIZE < pyro.param("size").item() < 1.6 * SIZE
    # Twice the exposure, twice the counts.
    one, two = (
        predict(gam, guide, x[:20], group[:20], k * torch.ones(20), num_samples=40)["y"].mean() for k in (4.0, 8.0)
    )
    assert 1.8 < two / one < 2.2


def test_offsets_and_random_effects_as_kernels():
    """A plate of random effects and a Categorical kernel are the same model."""
    x, group, _, _, eta = simulated()
    y = eta + 0.5 * torch.randn(NUM)
    x = torch.cat([x, group[:, None].double()], -1)

    def model(x, y=None):
        groups = (0.5**2 * kernels.Categorical(GROUPS))[4].named("group")
        kernel = smooth(1.0, 0.3)[0] + kernels.Constant(9.0) + kernels.Linear(9.0)[2] + groups
        f = pyro.sample("f", GaussianProcess(kernel, x, mean=lambda x: effects(x)[1]))  # an offset
        return observed(dist.Normal(f, 0.5), y)

    guide = trained(model, CoupledPrecision(10), x, y, steps=20, lr=0.1)
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
