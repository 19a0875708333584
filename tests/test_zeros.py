"""A first call at which a latent or a parameter is 0 sees what it multiplies."""

from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

ROWS = 20


def data():
    x = torch.linspace(0, 1, ROWS, dtype=torch.float64)[:, None]
    return x, torch.poisson((1 + torch.sin(6 * x[:, 0])).exp(), generator=torch.Generator().manual_seed(0))


def of_a_latent(like):
    return pyro.sample("gain", dist.Normal(torch.zeros((), dtype=like.dtype), 1.0))


def of_a_parameter(like):
    return pyro.param("gain", torch.zeros((), dtype=like.dtype))


def of_a_bounded_one(like):
    return pyro.param("gain", torch.zeros((), dtype=like.dtype), constraint=constraints.interval(-0.01, 0.01))


@pytest.mark.parametrize("gain", [of_a_latent, of_a_parameter, of_a_bounded_one])
@pytest.mark.parametrize("kind", ["second site", "all rows"])
def test_dependence_is_that_at_other_values(gain, kind):
    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        if kind == "second site":
            g = pyro.sample("g", GaussianProcess(kernels.RBF(0.2), x))
            rate = (f + gain(x) * g).exp()
        else:
            rate = (f + gain(x) * f.cumsum(-1)).exp()
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    guide = AutoSparseGP(model, SVGP(6))
    with nullcontext() if kind == "second site" else pytest.warns(UserWarning, match="couples values"):
        guide(*data())
    if kind == "second site":
        assert guide.structure.dependence == {"f": "elementwise", "g": "elementwise"}
        assert guide.structure.interactions == [["f", "g"]]
    else:
        assert guide.structure.dependence == {"f": "coupled"}
    if gain is not of_a_latent:
        assert pyro.param("gain") == 0


@pytest.mark.filterwarnings("ignore:GP sites .* enter densities by their sum")
def test_a_random_gain_of_a_second_site_trains():
    """Its loss ended as NaN: both sites were taken for one direction of the nodes."""

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        g = pyro.sample("g", GaussianProcess(kernels.RBF(0.2), x))
        rate = (f + of_a_latent(x) * g).exp()
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    guide = AutoSparseGP(model, SVGP(ROWS))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), TraceQuadrature_ELBO(num_nodes=8))
    losses = [svi.step(*data()) for _ in range(100)]
    assert max(losses) < 50  # 41.5 at the end
