"""Statements that hold exactly, or at the optimum, as tests."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import (
    SVGP,
    CoupledCovariance,
    CoupledPrecision,
    InducingFamily,
    MeanFieldAdditive,
    OrthogonalInducing,
    OrthogonallyDecoupled,
)
from pyro_sparsegp.gaussians import FullCholesky

from .models import additive, data, gaussian, maximise, observed, prepared, restored

KERNEL = 1.5 * kernels.Matern32(torch.tensor([0.4, 0.8]))
NOISE = 0.2


def evidence(x, y, kernel=KERNEL):
    return MultivariateNormal(torch.zeros(len(x)), kernel(x) + NOISE**2 * torch.eye(len(x))).log_prob(y).item()


def titsias(x, y, z, kernel=KERNEL):
    """log N(y; 0, Q + σ²I) − tr(K − Q)/(2σ²) (Titsias, 2009, eq. 9)."""
    q = kernel(x, z) @ torch.linalg.solve(kernel(z) + 1e-8 * kernel.diag(z).mean() * torch.eye(len(z)), kernel(z, x))
    fit = MultivariateNormal(torch.zeros(len(x)), q + NOISE**2 * torch.eye(len(x))).log_prob(y)
    return (fit - (kernel.diag(x).sum() - q.trace()) / (2 * NOISE**2)).item()


class OneBlock(InducingFamily):
    """Two sets under one full covariance."""

    def sets(self):
        return [Z1, Z2]

    def new_coefficients(self):
        return FullCholesky


Z1, Z2 = torch.rand(6, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)


def test_one_block_is_svgp_on_the_union():
    x = torch.rand(9, 2)
    process = GaussianProcess(KERNEL, x)
    pair, union = (f.build(process, "f") for f in (OneBlock(natural=False), SVGP(torch.cat([Z1, Z2]), natural=False)))
    noise = 0.3 * torch.randn(11), 0.3 * torch.randn(11, 11)
    for module in (pair, union):
        module.coefficients.loc_0_unconstrained.data.add_(noise[0])
        module.coefficients.scale_tril_0_unconstrained.data.add_(noise[1])
    one, other = pair(process, "f"), union(process, "f")
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(one.covariance_matrix, other.covariance_matrix)
    torch.testing.assert_close(one.kl, other.kl)


def test_identity_second_block_is_the_orthogonally_decoupled_family():
    """Salimbeni et al., 2018: mean c(x, O)a, a covariance that ignores O, and KL term ½aᵀC_OO a."""
    x = torch.rand(9, 2)
    process = GaussianProcess(KERNEL, x, jitter=1e-12)
    module = OrthogonallyDecoupled(Z1, Z2, natural=False).build(process, "f")
    solve = OrthogonalInducing(Z1, Z2, natural=False).build(process, "f")
    for name, parameter in module.named_parameters():
        if "inputs" not in name:
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
            solve.get_parameter(name).data.copy_(parameter)
    q, s = module(process, "f"), solve(process, "f")
    torch.testing.assert_close(q.covariance_matrix, s.covariance_matrix)  # S₂ = I there, at its start
    torch.testing.assert_close(q.kl, s.kl)
    alone = SVGP(Z1, natural=False).build(process, "f")
    for part in ("loc_0", "scale_tril_0"):
        getattr(alone.coefficients, part + "_unconstrained").data.copy_(
            getattr(module.coefficients, part + "_unconstrained")
        )
    first = alone(process, "f")
    torch.testing.assert_close(q.variance, first.variance)

    def c(a, b):
        return KERNEL(a, b) - KERNEL(a, Z1) @ torch.linalg.solve(KERNEL(Z1), KERNEL(Z1, b))

    factor = torch.linalg.cholesky(c(Z2, Z2))
    a = torch.linalg.solve_triangular(factor.mT, q.coefficients.loc[1][:, None], upper=True)
    torch.testing.assert_close(q.mean, first.mean + (c(x, Z2) @ a)[:, 0])
    torch.testing.assert_close(q.kl, first.kl + 0.5 * (a.mT @ c(Z2, Z2) @ a)[0, 0])


def test_solve_gp_lies_between_its_parts():
    """More points never hurt, and block-diagonal is no better than full (paper 1, section 3.3)."""
    x, y = data(num=40)
    model = gaussian(KERNEL, NOISE)
    z, o = x[:6], x[6:11]
    bounds = [
        maximise(model, family, x, y)[1]
        for family in (
            SVGP(z, trainable=False),
            OrthogonallyDecoupled(z, o, trainable=False),
            OrthogonalInducing(z, o, trainable=False),
            SVGP(torch.cat([z, o]), trainable=False),
        )
    ]
    assert bounds == sorted(bounds)
    assert bounds[2] > bounds[1] + 0.01
    assert bounds[3] < evidence(x, y)


@pytest.fixture(scope="module")
def additive_bounds():
    """Bounds on additive data with correlated inputs, by family; inducing inputs and hyperparameters fixed."""
    torch.set_default_dtype(torch.float64)
    x, y = data(num=40)
    x = torch.stack([x[:, 0], 0.7 * x[:, 0] + 0.3 * x[:, 1]], -1)
    kernel = additive(torch.tensor(1.0), torch.tensor([0.4, 0.4]))
    z = torch.linspace(0, 1, 4)[:, None]
    num = 4 + 4 + 2 + 1

    def bound(kind, iterations=40, **options):
        family = kind([z, z, None, None], trainable=False, **options)
        return maximise(gaussian(kernel, NOISE), family, x, y, iterations=iterations)[1]

    def covariance():
        guide = AutoSparseGP(gaussian(kernel, NOISE), CoupledCovariance([z, z, None, None], trainable=False))
        guide.absorb(x, y)  # its optimum
        return -TraceQuadrature_ELBO(2).loss(guide.model, guide, x, y)

    ways = {
        "mean field": lambda: bound(MeanFieldAdditive),
        "coupled": lambda: bound(CoupledPrecision),
        "full rank": lambda: bound(CoupledPrecision, 200, rank=num),
        "identity, full rank": lambda: bound(CoupledPrecision, 120, rank=num, base="identity"),
        "covariance": covariance,
        "evidence": lambda: evidence(x, y, kernel),
    }
    return functools.cache(lambda name: ways[name]())


def test_coupling_reaches_at_least_the_mean_field_bound(additive_bounds):
    assert additive_bounds("coupled") > additive_bounds("mean field")
    assert additive_bounds("covariance") > additive_bounds("mean field") + 1.0
    assert additive_bounds("covariance") < additive_bounds("evidence") + 1e-6


# A base of blocks is held against L-BFGS in test_natural.py, its algebra in test_posteriors.py.
@pytest.mark.quick("identity, full rank")
@pytest.mark.parametrize("name", ["full rank", "identity, full rank"])
def test_full_rank_precision_reaches_the_coupled_covariance(additive_bounds, name):
    assert abs(additive_bounds(name) - additive_bounds("covariance")) < 0.1


def test_mini_batches_by_quadrature_are_unbiased():
    """As below, of a likelihood that is not taken in closed form."""
    x, y = data(num=40)

    def model(x, y=None, size=None):
        observed(dist.StudentT(4.0, pyro.sample("f", GaussianProcess(KERNEL, x)), NOISE), y, x, size)

    guide = prepared(model, SVGP(6), x, y)
    full = TraceQuadrature_ELBO(6).loss(model, guide, x, y)
    parts = [TraceQuadrature_ELBO(6).loss(model, guide, x[b], y[b], size=40) for b in torch.arange(40).split(8)]
    assert math.isclose(sum(parts) / 5, full, rel_tol=1e-9)


def test_mini_batches_are_unbiased():
    """The bound on a random batch averages to the full bound, and the KL is never scaled."""
    x, y = data(num=40)
    model = gaussian(KERNEL, NOISE)
    guide, _ = maximise(model, SVGP(6), x, y, iterations=5)
    full = TraceQuadrature_ELBO(2).loss(model, guide, x, y)
    batches = torch.arange(40).split(8)
    parts = [TraceQuadrature_ELBO(2).loss(model, guide, x[b], y[b], size=40) for b in batches]
    assert math.isclose(sum(parts) / 5, full, rel_tol=1e-9)

    def by_indices(x, y):
        plate = pyro.plate("data", len(x), subsample_size=8)
        f = pyro.sample("f", GaussianProcess(KERNEL, x[plate.indices]))
        with plate:
            pyro.sample("y", dist.Normal(f, NOISE), obs=y[plate.indices])

    other = restored(guide, by_indices, SVGP(6))
    draws = torch.tensor([TraceQuadrature_ELBO(2).loss(by_indices, other, x, y) for _ in range(60)])
    assert abs(draws.mean() - full) < 5 * draws.std() / len(draws) ** 0.5
