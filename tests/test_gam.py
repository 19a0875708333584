"""A generalised additive model as a Pyro program: offsets, lines, and random effects as kernels."""

import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import GaussianProcess, kernels
from pyro_sparsegp.families import CoupledPrecision

from .models import observed, trained

NUM, GROUPS = 250, 6


def smooth(scale, length):
    return scale * kernels.Anova(kernels.Matern52(length), 0.0, 1.0)


def effects(x):
    first = torch.sin(2 * torch.pi * x[:, 0])
    second = torch.where(x[:, 3] > 0, 1.0, -1.0) * 1.2 * (2 * x[:, 1] - 1)
    return first, second


def simulated():
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(NUM, 4, generator=generator)
    x[:, 3] = (x[:, 3] > 0.5).double()
    group = torch.arange(NUM) % GROUPS
    return x, group, 0.3 + 0.7 * x[:, 2] + torch.linspace(-0.8, 0.8, GROUPS)[group] + sum(effects(x))


def test_offsets_and_random_effects_as_kernels():
    """A plate of random effects and a Categorical kernel are the same model."""
    x, group, eta = simulated()
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
