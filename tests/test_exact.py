"""Exact: the posterior of all function values, against dense algebra."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import Exact, SiteFamily

from .models import gaussian, observed, one_function, refused, trained

X = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]
NEW = torch.tensor([[-0.2], [0.33], [1.5]], dtype=torch.float64)


@pytest.mark.parametrize(
    "kernel",
    [2.0 * kernels.RBF(0.3), kernels.Matern32(0.2) + kernels.Constant(), kernels.Linear() * kernels.RBF(1.0)],
)
def test_a_gaussian_likelihood_has_the_evidence_and_the_exact_posterior(kernel):
    y = torch.sin(6 * X[:, 0]) + 0.1 * torch.randn(25, dtype=torch.float64)
    model = gaussian(kernel, 0.1, mean=0.5, jitter=1e-13)
    guide = AutoSparseGP(model, Exact())
    loss = TraceQuadrature_ELBO().loss(model, guide, X, y)
    total = kernel(X) + 0.01 * torch.eye(25, dtype=torch.float64)
    evidence = dist.MultivariateNormal(X.new_full((25,), 0.5), total).log_prob(y)
    assert math.isclose(loss, -evidence, rel_tol=1e-8)
    q = guide.posterior(NEW)["f"]
    cross = torch.linalg.solve(total, kernel(X, NEW)).mT
    torch.testing.assert_close(q.mean, 0.5 + cross @ (y - 0.5), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(q.covariance_matrix, kernel(NEW) - cross @ kernel(X, NEW), rtol=1e-7, atol=1e-9)
    here = guide.posterior(X)["f"]
    exact = kernel(X) - kernel(X) @ torch.linalg.solve(total, kernel(X))
    torch.testing.assert_close(here.covariance_matrix, exact, rtol=1e-6, atol=1e-9)


def test_another_likelihood_has_the_optimal_gaussian():
    # For Poisson(exp f): m = μ + K(y − r), S⁻¹ = K⁻¹ + diag(r) with r = E exp f = exp(m + diag(S)/2).
    kernel, y = 0.5 * kernels.RBF(0.3), torch.poisson((1 + torch.sin(6 * X[:, 0])).exp())
    model = one_function(kernel, lambda f: dist.Poisson(f.exp()), mean=1.0)
    guide = AutoSparseGP(model, Exact(updates=20))
    for _ in range(5):
        TraceQuadrature_ELBO().loss_and_grads(model, guide, X, y)
    q, k = guide.posterior(X)["f"], kernel(X)
    rate = (q.mean + q.variance / 2).exp()
    torch.testing.assert_close(q.mean, 1 + k @ (y - rate), rtol=1e-6, atol=1e-6)
    s = k - k @ torch.linalg.solve(k + torch.diag(1 / rate), k)
    torch.testing.assert_close(q.covariance_matrix, s, rtol=1e-6, atol=1e-7)


def test_inputs_that_move_stay_all_rows():
    torch.manual_seed(0)
    y = torch.sin(6 * X[:, 0])
    warp = torch.nn.Linear(1, 1, dtype=torch.float64)

    def model(x, y=None):
        pyro.module("warp", warp)
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.5), warp(x), jitter=1e-13))
        observed(dist.Normal(f, 0.2), y)

    guide = trained(model, Exact(), X, y, steps=5)
    with torch.no_grad():
        covariance = kernels.Matern32(0.5)(warp(X)) + 0.04 * torch.eye(25, dtype=torch.float64)
    evidence = dist.MultivariateNormal(torch.zeros(25, dtype=torch.float64), covariance).log_prob(y)
    assert math.isclose(TraceQuadrature_ELBO().loss(model, guide, X, y), -evidence, rel_tol=1e-8)


def test_more_rows_are_for_other_families():
    assert issubclass(Exact, SiteFamily)
    model, x = gaussian(kernels.RBF(0.3)), torch.rand(4001, 1)
    refused(r"site 'f' has 4001 rows.*SVGP.*ComputationAware", lambda: AutoSparseGP(model, Exact())(x, x[:, 0]))
