"""Cox processes: a log-intensity GP, events, and the window's integral by quadrature (paper 3, appendix A.5)."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_sparsegp import GaussianProcess, SparsePosterior, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ExactWeightSpace, WeightSpace

from .models import maximise, one_function, trained


def cox(kernel, level=3.0):
    """A Poisson process with log-intensity f: Σ f(events) − ∫ exp f, the integral a sum over cells."""

    def model(cells, areas, events=None):
        x = cells if events is None else torch.cat([cells, events])
        f = pyro.sample("f", GaussianProcess(kernel(), x, mean=lambda x: x.new_full((len(x),), level)))
        with pyro.plate("window", len(cells)):
            pyro.factor("none_elsewhere", -areas * f[: len(cells)].exp())
        if events is not None:
            with pyro.plate("events", len(events)):
                pyro.factor("at_events", f[len(cells) :])

    return model


def cells(num, dim=1):
    """Midpoints of a grid on the unit cube, and their areas."""
    line = (torch.arange(num) + 0.5) / num
    return torch.cartesian_prod(*[line] * dim).reshape(-1, dim), torch.full((num**dim,), 1.0 / num**dim)


def simulate(rate, top, dim=1, seed=0):
    """Thinning of a homogeneous process of rate ``top`` on the unit cube."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(int(torch.poisson(torch.tensor(float(top)), generator=generator)), dim, generator=generator)
    return x[torch.rand(len(x), generator=generator) < rate(x) / top]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 4))


KERNELS = {
    "deep": lambda net: kernels.DeepBasis(net),
    "uncorrected": lambda net: kernels.DeepBasis(net, variance_correction=False),
    "fourier": lambda net: kernels.RandomFourier(torch.linspace(-4, 4, 6)[:, None]),
}


@pytest.mark.quick("deep | free-fourier")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", [WeightSpace(), ExactWeightSpace()], ids=["free", "exact"])
def test_the_bound_is_the_papers(family, kernel):
    """Σ m(events) − Σ a exp(m + v/2) − KL: quadrature of exp f against its closed form."""
    net = network()

    def build():
        pyro.module("net", net)
        return KERNELS[kernel](net)

    model = cox(build)
    events = simulate(lambda x: 40 * (1 + torch.sin(6 * x[:, 0])) / 2, 40)
    grid, areas = cells(64)
    guide = trained(model, family, grid, areas, events, steps=5)
    with torch.no_grad():
        bound = -TraceQuadrature_ELBO(20).loss(model, guide, grid, areas, events)
        process = GaussianProcess(build(), torch.cat([grid, events]), mean=lambda x: x.new_full((len(x),), 3.0))
        # The bound's posterior.
        sites = (guide.posterior(grid, areas)["f"].sites,) if family.__class__ is ExactWeightSpace else ()
        q = guide.gps.f(process, "f", SparsePosterior, *sites)
        rate = (q.mean + q.variance / 2).exp()
        closed = q.mean[64:].sum() - (areas * rate[:64]).sum() - q.kl
    assert abs(bound - closed) < 1e-8 * abs(bound)


def test_events_at_cells_are_poisson_counts():
    grid, areas = cells(40)
    counts = torch.poisson(areas * 200 * torch.sin(3 * grid[:, 0]))
    kernel = kernels.RBF(0.2)
    binned = one_function(kernel, lambda f: dist.Poisson(areas * f.exp()), mean=3.0)
    _, by_counts = maximise(binned, SVGP(grid[::4], trainable=False), grid, counts, num_nodes=20)
    events = grid.repeat_interleave(counts.long(), 0)
    _, by_events = maximise(cox(lambda: kernel), SVGP(grid[::4], trainable=False), grid, areas, events, num_nodes=20)
    constant = ((counts + 1).lgamma() - counts * areas.log()).sum()
    assert abs(by_counts + constant - by_events) < 1e-4
