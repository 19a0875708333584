"""Paper 1 (Shi, Titsias and Mnih, 2020) against dense float64 algebra."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_sparsegp import TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import (
    SGPR,
    CollapsedOrthogonal,
    ConditionalSGPR,
    OrthogonallyDecoupled,
    SemiCollapsedOrthogonal,
)

from .models import bernoulli, data, gaussian, lbfgs, one_function, prepared, refused

KERNEL = 1.3 * kernels.Matern32(0.3)
NOISE = 0.2
MODEL = gaussian(KERNEL, NOISE)
Z = torch.linspace(0, 2, 6).double()[:, None]
O = torch.linspace(0.1, 1.9, 5).double()[:, None]
EXACT = TraceQuadrature_ELBO(2)


@pytest.fixture
def line():
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(50, 1, generator=generator, dtype=torch.float64)
    return x, torch.sin(4 * x[:, 0]) + NOISE * torch.randn(50, generator=generator, dtype=torch.float64)


def bound(family, x, y, model=MODEL, steps=0):
    """The bound under a family, after L-BFGS if it has something to learn."""
    pyro.clear_param_store()
    guide = prepared(model, family, x, y)
    if steps:
        EXACT.loss(model, guide, x, y)
        how = {"max_iter": steps, "history_size": 30}
        lbfgs(lambda: EXACT.differentiable_loss(model, guide, x, y), guide.parameters(), **how)
    return guide, -EXACT.loss(model, guide, x, y)


def parts(x, z=Z):
    """Q_ff of Z and what it leaves, C."""
    explained = KERNEL(x, z) @ torch.linalg.solve(KERNEL(z), KERNEL(z, x))
    return explained, KERNEL(x) - explained


def normal(x, y, covariance, mean=None):
    mean = torch.zeros_like(y) if mean is None else mean
    return dist.MultivariateNormal(mean, covariance + NOISE**2 * torch.eye(len(y)).double()).log_prob(y)


def titsias(x, y, z):
    explained, rest = parts(x, z)
    return normal(x, y, explained) - rest.trace() / (2 * NOISE**2)


def check_divergence(q, num=20000):
    """The mean of log q(w) − log p(w) over draws is the divergence."""
    with torch.no_grad():
        ratios = q.coefficients.log_ratio(q.coefficients.rsample((num,)))
        assert float(ratios.mean()) == pytest.approx(float(q.kl), abs=4 * float(ratios.std()) / num**0.5)


def test_tighter_bound_is_equation_14(line):
    x, y = line
    explained, rest = parts(x)
    full = explained + NOISE**2 * torch.eye(len(x)).double()
    expected = normal(x, y, explained) - 0.5 * torch.linalg.solve(full, rest).trace()
    _, found = bound(ConditionalSGPR(Z), x, y)
    assert found == pytest.approx(float(expected), rel=1e-6)
    # Equation 15: Titsias' bound and a term that is never negative; below the evidence.
    assert expected - titsias(x, y, Z) > 1
    assert expected < normal(x, y, KERNEL(x))


def test_tighter_bound_has_the_dense_gradient(line):
    x, y = line
    log_length = torch.tensor(-1.2, requires_grad=True, dtype=torch.float64)

    def dense():
        kernel = 1.3 * kernels.Matern32(log_length.exp())
        explained = kernel(x, Z) @ torch.linalg.solve(kernel(Z) + 1.3e-8 * torch.eye(6).double(), kernel(Z, x))
        full = explained + NOISE**2 * torch.eye(len(x)).double()
        likelihood = dist.MultivariateNormal(torch.zeros_like(y), full).log_prob(y)
        return likelihood - 0.5 * torch.linalg.solve(full, kernel(x) - explained).trace()

    (expected,) = torch.autograd.grad(dense(), log_length)

    def model(x, y=None):
        length = pyro.param("log_length", torch.tensor(-1.2).double()).exp()
        return gaussian(1.3 * kernels.Matern32(length), NOISE)(x, y)

    guide = prepared(model, ConditionalSGPR(Z), x, y)
    EXACT.loss_and_grads(model, guide, x, y)
    assert float(-pyro.param("log_length").grad) == pytest.approx(float(expected), rel=1e-5)


def test_posterior_of_the_tighter_bound_is_the_dense_one(line):
    x, y = line
    guide, _ = bound(ConditionalSGPR(Z), x, y)
    new = torch.linspace(-0.5, 2.5, 15).double()[:, None]
    q = guide.posterior(new)["f"]
    # f(x*) = φ*ᵀw + r(x*), w | r ~ N(P⁻¹Φᵀ(y − r)/σ², P⁻¹), r ~ N(0, c).
    root = torch.linalg.cholesky(KERNEL(Z))
    phi, star = (torch.linalg.solve(root, KERNEL(Z, t)).T for t in (x, new))
    precision = torch.eye(6).double() + phi.T @ phi / NOISE**2
    gain = torch.linalg.solve(precision, phi.T) / NOISE**2
    of = torch.cat([new, x])
    both = torch.cat([star, phi])
    rest = KERNEL(of) - both @ both.T
    linear = torch.cat([torch.eye(15).double(), -star @ gain], 1)
    covariance = linear @ rest @ linear.T + star @ torch.linalg.solve(precision, star.T)
    assert torch.allclose(q.mean, star @ gain @ y, atol=1e-6)
    assert torch.allclose(q.covariance_matrix, covariance, atol=1e-6)
    assert torch.allclose(q.variance, covariance.diagonal(), atol=1e-6)
    drawn = q.rsample((8000,))
    assert torch.allclose(torch.cov(drawn.T), covariance, atol=0.05)
    functions = q.paths(400)(new)
    assert torch.allclose(functions.var(0), covariance.diagonal(), rtol=5 * (2 / 400) ** 0.5)
    assert ((functions.mean(0) - q.mean).abs() < 5 * q.stddev / 400**0.5).all()
    # The expectation of log dq/dp over draws is the divergence.
    check_divergence(q)


def test_exact_where_inducing_points_are_the_data(line):
    x, y = line
    _, found = bound(ConditionalSGPR(x[:20]), x[:20], y[:20])
    assert found == pytest.approx(float(normal(x[:20], y[:20], KERNEL(x[:20]))), abs=1e-3)


@pytest.mark.parametrize("covariance", ["free", "prior"])
def test_semi_collapsed_bound_is_equation_9_or_10(line, covariance):
    x, y = line
    guide, start = bound(SemiCollapsedOrthogonal(Z, O, covariance), x, y)
    assert start == pytest.approx(float(titsias(x, y, Z)), rel=1e-6)  # q(v) is the prior
    others = guide.gps.f.others
    mean = torch.randn(5).double()
    others.loc_0 = mean
    scale = torch.eye(5).double()
    if covariance == "free":
        scale = torch.linalg.cholesky(0.3 * torch.eye(5).double() + 0.1)
        others.scale_tril_0 = scale
    explained, _ = parts(x)
    between = KERNEL(O, Z) @ torch.linalg.solve(KERNEL(Z), KERNEL(Z, x))
    c_vv = KERNEL(O) - KERNEL(O, Z) @ torch.linalg.solve(KERNEL(Z), KERNEL(Z, O))
    c_vf = KERNEL(O, x) - between
    root = torch.linalg.cholesky(c_vv)
    m_v, s_v = root @ mean, root @ scale @ scale.T @ root.T
    gain = torch.linalg.solve(c_vv, c_vf)
    s_f = KERNEL(x) - explained + gain.T @ (s_v - c_vv) @ gain
    divergence = kl_divergence(dist.MultivariateNormal(m_v, s_v), dist.MultivariateNormal(torch.zeros_like(m_v), c_vv))
    expected = normal(x, y, explained, gain.T @ m_v) - s_f.trace() / (2 * NOISE**2) - divergence
    assert -EXACT.loss(MODEL, guide, x, y) == pytest.approx(float(expected), rel=1e-6)


def test_semi_collapsed_bounds_reach_the_collapsed_ones(line):
    x, y = line
    _, collapsed = bound(CollapsedOrthogonal(Z, O), x, y)
    _, free = bound(SemiCollapsedOrthogonal(Z, O, trainable=False), x, y, steps=150)
    assert free == pytest.approx(collapsed, abs=0.01)
    _, mean_only = bound(SemiCollapsedOrthogonal(Z, O, "prior", trainable=False), x, y, steps=150)
    _, decoupled = bound(OrthogonallyDecoupled(Z, O, trainable=False), x, y, steps=200)
    assert mean_only == pytest.approx(decoupled, abs=0.01)
    # Tighter than Titsias' on the same Z; below one set of all points, and the evidence.
    assert titsias(x, y, Z) < mean_only < free < titsias(x, y, torch.cat([Z, O])) < normal(x, y, KERNEL(x))


def decoupled(line, num_columns, **kwargs):
    x, y = line
    pyro.clear_param_store()
    guide = prepared(MODEL, OrthogonallyDecoupled(Z, O, num_columns=num_columns, **kwargs), x, y)
    guide.gps.f.weights = torch.randn(5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return guide


def test_decoupled_mean_and_divergence_from_coefficients(line):
    x, _ = line
    guide = decoupled(line, 2, start="prior")
    a = guide.gps.f.weights
    q = guide.posterior(x)["f"]
    project = torch.linalg.solve(KERNEL(Z), KERNEL(Z, O))
    c_xo = KERNEL(x, O) - KERNEL(x, Z) @ project
    c_oo = KERNEL(O) - KERNEL(O, Z) @ project
    assert torch.allclose(q.mean, c_xo @ a, atol=1e-6)
    assert torch.allclose(q.variance, KERNEL.diag(x), atol=1e-6)  # S is the prior's
    assert float(q.kl.detach()) == pytest.approx(float((a @ c_oo @ a).detach()) / 2, rel=1e-6)
    assert torch.allclose(q.covariance_matrix, KERNEL(x), atol=1e-6)
    drawn = q.rsample((3000,))
    assert torch.allclose(drawn.mean(0), q.mean, atol=0.1)
    assert ((q.paths(200)(x).mean(0) - q.mean).abs() < 5 * q.stddev / 200**0.5).all()
    check_divergence(q)
    assert torch.allclose(sum(part.mean for part in q.components), q.mean, atol=1e-9)


def test_sampled_columns_are_unbiased_in_value_and_gradient(line):
    x, y = line
    exact, sampled = decoupled(line, 5), decoupled(line, 2)
    gradients = []
    for guide, repeats in ((exact, 1), (sampled, 90)):
        losses, total = [], 0
        for _ in range(repeats):
            loss = EXACT.differentiable_loss(MODEL, guide, x, y)
            (gradient,) = torch.autograd.grad(loss, guide.gps.f.weights_unconstrained)
            losses.append(float(loss.detach()))
            total = total + gradient / repeats
        gradients.append((torch.tensor(losses), total))
    (value, gradient), (values, mean) = gradients
    assert float(values.mean()) == pytest.approx(float(value), abs=4 * float(values.std()) / 90**0.5)
    assert values.std() > 1e-3
    assert torch.allclose(mean, gradient, atol=0.25 * float(gradient.abs().max()))


def test_decoupled_step_never_forms_or_factorises_a_square_matrix_of_the_second_set(line, monkeypatch):
    x, y = line
    guide = prepared(MODEL, OrthogonallyDecoupled(Z, 2 * torch.rand(3000, 1).double(), num_columns=10), x, y)
    seen, call = [], kernels.Matern32.__call__

    def note(x, z):
        seen.append((len(x), len(x if z is None else z)))

    monkeypatch.setattr(kernels.Matern32, "__call__", lambda k, x, z=None: note(x, z) or call(k, x, z))
    EXACT.loss_and_grads(MODEL, guide, x, y)
    assert (10, 3000) in seen
    assert all(rows * columns <= 50 * 3000 for rows, columns in seen), seen


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="num_columns must be a whole number of at least 1, got 0"):
        OrthogonallyDecoupled(5, 5, num_columns=0)
    refused("takes one set, got 2: join them", OrthogonallyDecoupled, 5, [5, 5], num_columns=3)
    refused('covariance must be "free" or "prior", got \'identity\'', SemiCollapsedOrthogonal, 5, 5, "identity")


def test_conditional_bound_is_above_titsias_also_for_other_likelihoods():
    x, y = data(bernoulli)
    z = x[:6]
    found = []
    for family in (SGPR(z, trainable=False, updates=30), ConditionalSGPR(z, trainable=False, updates=30)):
        model = one_function(kernels.Matern32(0.3), lambda f: dist.Bernoulli(logits=f))
        pyro.clear_param_store()
        guide = prepared(model, family, x, y)
        for _ in range(3):
            loss = TraceQuadrature_ELBO(20).differentiable_loss(model, guide, x, y)
        found.append(-float(loss))
    assert found[1] > found[0] + 0.1
