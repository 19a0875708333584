"""Normal likelihoods around f, whose expectation is taken in closed form, against quadrature."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

from .models import data, observed, prepared


class Other(dist.Normal):
    """The same density under a name of its own: it is integrated by quadrature."""


def plain(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.1))
    with pyro.plate("data", 200, subsample=x):
        pyro.sample("y", normal(f, noise), obs=y)


def masked(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x, mean=0.3))
    with pyro.plate("data", len(x)), pyro.poutine.mask(mask=y > 0):
        pyro.sample("y", normal(f, 0.2 + x[:, 0]), obs=torch.where(y > 0, y, torch.nan))


def several_outputs(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x).expand([2]).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros(2), 0.1).to_event(1))
    pyro.sample("y", normal(f, noise[:, None]).to_event(2), obs=torch.stack([y, -y]))


def two_sites(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(0.8), x))
    with pyro.plate("data", len(x)):
        pyro.sample("y", normal(f, 0.3), obs=y)
        pyro.sample("z", normal(g, 0.4), obs=y.square())


def noise_by_f(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    observed(normal(f, 0.3 + f.square()), y)


def noise_by_another(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(0.5), x))
    observed(normal(f, g.exp()), y)


def another_density(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", len(x)):
        pyro.sample("y", normal(f, 0.3), obs=y)
        pyro.sample("z", dist.Poisson(f.exp()), obs=y.abs().round())


def shifted(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    observed(normal(2 * f + 1, 0.3), y)


CASES = [plain, masked, several_outputs, two_sites, noise_by_f, noise_by_another, another_density, shifted]


@pytest.mark.parametrize("model", CASES)
def test_closed_form_is_quadrature(model):
    x, y = data(num=25)
    pyro.set_rng_seed(0)

    def one(x, y):
        model(normal, x, y)

    guide = None
    found = []
    for kind in (dist.Normal, Other):
        normal = kind
        pyro.set_rng_seed(1)
        if guide is None:
            guide = prepared(one, SVGP(6, natural=False), x, y, independent=True)
        guide.zero_grad()
        pyro.set_rng_seed(2)
        loss = TraceQuadrature_ELBO(12).loss_and_grads(one, guide, x, y)
        found.append((loss, [None if p.grad is None else p.grad.clone() for p in guide.parameters()]))
    (one_loss, one_grads), (other_loss, other_grads) = found
    assert one_loss == pytest.approx(other_loss, rel=1e-12)
    for a, b in zip(one_grads, other_grads):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_model_that_changes_is_integrated_again():
    x, y = data(num=25)
    factor = [1.0]

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        observed(dist.Normal(f if factor[0] == 1 else factor[0] * f, 0.3), y)

    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, SVGP(6), independent=True)
    kept = TraceQuadrature_ELBO(4)
    assert kept.loss(model, guide, x, y) == pytest.approx(TraceQuadrature_ELBO(4).loss(model, guide, x, y))
    factor[0] = 2.0
    assert kept.loss(model, guide, x, y) == pytest.approx(TraceQuadrature_ELBO(4).loss(model, guide, x, y), rel=1e-12)
