"""Computation-aware GPs (paper 2) against dense algebra, and its statements as tests."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, ProjectedLikelihood, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.bases import actions as policies
from pyro_sparsegp.families import SGPR, SVGP, ComputationAware
from pyro_sparsegp.gaussians import ProjectedGaussian
from pyro_sparsegp.numerics import functions as chunks

from .models import (
    assert_alike,
    bernoulli,
    conditional,
    data,
    gaussian,
    observed,
    prepared,
    refused,
    regression,
    train,
    trained,
)
from .test_theorems import KERNEL, NOISE, evidence

POLICIES = ("sparse", "cg", "eigen", "random")


def fitted(x, y, family, model=None):
    """A guide that has read the data."""
    return prepared(model or gaussian(KERNEL, NOISE), family, x, y)


def matrix_of(q):
    """S, ``(N, i)``."""
    return q.basis.actions.left(torch.eye(len(q.basis.actions.inputs))).mT


def given(matrix):
    """The family of fixed actions."""
    return ComputationAware(matrix.shape[1], lambda kernel, sites: matrix)


def nll(x, y, s, mean=0.0):
    """Eq. 9 and lemma S2 in dense algebra: minus the projected-data log likelihood."""
    g = s.mT @ (KERNEL(x) + NOISE**2 * torch.eye(len(x))) @ s
    target = s.mT @ (y - mean)
    fit = target @ torch.linalg.solve(g, target)
    return (0.5 * (fit + g.logdet() - (s.mT @ s).logdet() + s.shape[1] * math.log(2 * math.pi))).item()


def loss_11(x, y, s):
    """Eq. 11 in dense algebra: minus the bound."""
    n, i = s.shape
    k = KERNEL(x)
    g = s.mT @ (k + NOISE**2 * torch.eye(n)) @ s
    v = torch.linalg.solve(g, s.mT @ y)
    mean = k @ s @ v
    variance = k - k @ s @ torch.linalg.solve(g, s.mT @ k)
    terms = ((y - mean).square().sum() + variance.trace()) / NOISE**2
    terms = terms + (n - i) * math.log(NOISE**2) + n * math.log(2 * math.pi) + v @ s.mT @ k @ s @ v
    terms = terms - torch.linalg.solve(g, s.mT @ k @ s).trace() + g.logdet() - (s.mT @ s).logdet()
    return 0.5 * terms.item()


@pytest.mark.parametrize("policy", POLICIES)
def test_bound_and_posterior_are_the_papers(policy):
    x, y = data(num=45)
    new = torch.rand(8, 2)
    guide = fitted(x, y, ComputationAware(7, policy))  # 45 = 7·6 + 3: blocks of two sizes
    if policy == "sparse":
        guide.gps.f.policy.values_unconstrained.data.add_(torch.rand(45))
    q = guide.posterior(new)["f"]
    s = matrix_of(q)
    assert s.shape == (45, 7)
    if policy == "sparse":
        assert ((s != 0).sum(-1) == 1).all()
        assert sorted((s != 0).sum(0).tolist()) == [6] * 4 + [7] * 3
    loss = TraceQuadrature_ELBO(2).loss(guide.model, guide, x, y)
    assert abs(loss - loss_11(x, y, s)) < 1e-8 * abs(loss)
    projected = ProjectedLikelihood().loss(guide.model, guide, x, y)
    assert abs(projected - nll(x, y, s)) < 1e-8 * abs(projected)
    # Eq. 5.
    c = s @ torch.linalg.solve(s.mT @ (KERNEL(x) + NOISE**2 * torch.eye(45)) @ s, s.mT)
    torch.testing.assert_close(q.mean, KERNEL(new, x) @ c @ y)
    covariance = KERNEL(new) - KERNEL(new, x) @ c @ KERNEL(x, new)
    torch.testing.assert_close(q.covariance_matrix, covariance)
    torch.testing.assert_close(q.variance, covariance.diagonal())


@pytest.mark.parametrize("policy", POLICIES)
def test_never_overconfident_and_exact_with_all_actions(policy):
    x, y = data(num=45)
    new = torch.cat([torch.rand(40, 2), x[:10], 5 + torch.rand(5, 2)])
    mean, covariance = conditional(KERNEL, x, y, NOISE, new)
    for num in (1, 5, 20):
        q = fitted(x, y, ComputationAware(num, policy)).posterior(new)["f"]
        assert (q.variance >= covariance.diagonal() - 1e-9).all()
        torch.testing.assert_close(q.mathematical_variance, covariance.diagonal(), atol=1e-9, rtol=1e-7)
        assert (q.computational_variance >= -1e-9).all()
        assert q.computational_variance.max() > 1e-3
    guide = fitted(x, y, ComputationAware(45, policy, tolerance=0.0))
    assert abs(TraceQuadrature_ELBO(2).loss(guide.model, guide, x, y) + evidence(x, y)) < 1e-6
    q = guide.posterior(new)["f"]
    torch.testing.assert_close(q.mean, mean, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(q.covariance_matrix, covariance, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("policy", [*POLICIES, "user"])
def test_variance_falls_along_nested_spans(policy):
    x, y = data(num=64)
    new = torch.rand(30, 2)
    draws = torch.randn(64, 16)
    variances = []
    for num in (2, 4, 8, 16):
        family = given(draws[:, :num]) if policy == "user" else ComputationAware(num, policy)
        guide = fitted(x, y, family)
        if policy == "random":  # columns of one draw
            guide.gps.f.policy.draws = draws[:, :num]
        variances.append(guide.posterior(new)["f"].variance)
    for wide, narrow in itertools.pairwise(variances):
        assert (narrow <= wide + 1e-10).all()
        assert narrow.sum() < wide.sum() - 1e-3


def test_other_inputs_keep_the_sites():
    x, y = data(num=20)
    guide, new = fitted(x, y, ComputationAware(8)), torch.rand(5, 2)
    found, expected = guide.posterior(x)["f"].at(new), guide.posterior(new)["f"]
    torch.testing.assert_close(found.mathematical_variance, expected.mathematical_variance)
    torch.testing.assert_close(found.computational_variance, expected.computational_variance)
    torch.testing.assert_close(found.variance, expected.variance)


def test_blocks_of_twice_as_many_are_halves():
    x = torch.rand(64, 3)
    coarse, fine = policies.local_blocks(x, 8).reshape(8, 8), policies.local_blocks(x, 16).reshape(16, 4)
    sets = [set(block.tolist()) for block in coarse]
    assert all(any(set(block.tolist()) <= one for one in sets) for block in fine)
    spread = torch.stack([x[block].var(0).sum() for block in coarse]).mean()
    assert spread < 0.4 * x.var(0).sum()  # neighbours
    assert sorted(policies.local_blocks(torch.rand(17, 2), 5).tolist()) == list(range(17))


def test_cg_actions_are_residuals_of_conjugate_gradients():
    """Algorithm S1 with residual actions, iteratively; its span is the Krylov space of section S3.1."""
    x, y = data(num=40)
    khat = KERNEL(x) + NOISE**2 * torch.eye(40)
    num = 6
    q = fitted(x, y, ComputationAware(num, "cg")).posterior(x)["f"]
    precision, v, residuals = torch.zeros(40, 40), torch.zeros(40), []
    for _ in range(num):
        residual = y - khat @ v
        action = residual
        z = khat @ action
        d = action - precision @ z
        eta = z @ d
        precision = precision + d[:, None] * d / eta
        v = v + d * (action @ residual) / eta
        residuals.append(residual)
    torch.testing.assert_close(q.mean, KERNEL(x) @ v, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(q.covariance_matrix, KERNEL(x) - KERNEL(x) @ precision @ KERNEL(x), atol=1e-8, rtol=1e-5)
    krylov = torch.stack([torch.linalg.matrix_power(khat, j) @ y for j in range(num)], -1)
    for other in (torch.stack(residuals, -1), krylov / krylov.norm(dim=0)):
        a, b = torch.linalg.qr(matrix_of(q))[0], torch.linalg.qr(other)[0]
        assert torch.linalg.svdvals(a.mT @ b).min() > 1 - 1e-6


def test_cg_stops_at_its_tolerance():
    x, y = data(num=200)
    khat = KERNEL(x) + NOISE**2 * torch.eye(200)
    for tolerance in (1e-1, 1e-2, 1e-4):
        q = fitted(x, y, ComputationAware(200, "cg", tolerance=tolerance)).posterior(x)["f"]
        s = matrix_of(q)
        used = int((s != 0).any(0).sum())
        s = s[:, :used]
        residuals = []
        for num in (used - 1, used):
            part = s[:, :num]
            residuals.append(
                (y - khat @ part @ torch.linalg.solve(part.mT @ khat @ part, part.mT @ y)).norm() / y.norm()
            )
        assert residuals[1] <= tolerance < residuals[0]


def test_eigenvectors_of_many_rows(monkeypatch):
    x, y = data(num=120)
    exact_vectors = matrix_of(fitted(x, y, ComputationAware(10, "eigen")).posterior(x)["f"])
    monkeypatch.setattr(policies, "_EXACT", 50)
    monkeypatch.setattr(policies, "_WHOLE", 50)
    monkeypatch.setattr(chunks, "_PIECE", 1000)
    iterated = matrix_of(fitted(x, y, ComputationAware(10, "eigen")).posterior(x)["f"])
    a, b = torch.linalg.qr(exact_vectors)[0], torch.linalg.qr(iterated)[0]
    assert torch.linalg.svdvals(a.mT @ b).min() > 0.999


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_the_kernel_change_nothing(policy, monkeypatch):
    """Values and gradients with kernel blocks dropped and recomputed are those without."""
    x, y = data(num=50)

    def gradients():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoSparseGP(learned, ComputationAware(6, policy))
        loss = TraceQuadrature_ELBO(2).loss_and_grads(learned, guide, x, y)
        own = [p.grad for p in guide.parameters()]
        return [torch.tensor(loss), *own, *(p.grad for _, p in pyro.get_param_store().named_parameters())]

    whole = gradients()
    monkeypatch.setattr(chunks, "_PIECE", 50 * 7)
    monkeypatch.setattr(chunks, "_KEPT", 10)
    for a, b in zip(whole, gradients()):
        torch.testing.assert_close(a, b)


def learned(x, y=None):
    length = pyro.param("length", torch.tensor([0.4, 0.8]), constraint=constraints.positive)
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    noise = pyro.param("noise", torch.tensor(NOISE), constraint=constraints.positive)
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    return observed(dist.Normal(f, noise), y)


def test_sparse_gradients_are_finite_differences():
    x, y = data(num=30)
    guide = AutoSparseGP(learned, ComputationAware(5))
    elbo = TraceQuadrature_ELBO(2)
    guide(x, y)
    values = guide.gps.f.policy.values_unconstrained
    values.data.add_(0.3 * torch.randn(30))
    elbo.loss_and_grads(learned, guide, x, y)
    leaves = {"values": values, **dict(pyro.get_param_store().named_parameters())}
    for leaf in (leaves[name] for name in ("values", "length", "scale", "noise")):
        gradient = leaf.grad.flatten()
        for index in range(min(3, leaf.numel())):
            ends = []
            for step in (1e-5, -1e-5):
                leaf.data.view(-1)[index] += step
                ends.append(elbo.loss(learned, guide, x, y))
                leaf.data.view(-1)[index] -= step
            assert abs(gradient[index] - (ends[0] - ends[1]) / 2e-5) < 1e-4 * max(1, abs(gradient[index]))


def test_projected_likelihood_keeps_other_terms_and_refuses_other_families():
    x, y = data(num=30)

    def model(x, y=None, z=None):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        pyro.sample("z", dist.Normal(level, 0.1), obs=z)
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        return observed(dist.Normal(f, NOISE), y)

    s = torch.randn(30, 4)
    guide = AutoSparseGP(model, given(s), point_estimates=True)
    loss = ProjectedLikelihood().loss(model, guide, x, y, torch.tensor(0.2))
    level = guide.median(x, y, torch.tensor(0.2))["level"]
    rest = dist.Normal(level, 0.1).log_prob(torch.tensor(0.2)) + dist.Normal(0.0, 1.0).log_prob(level)
    assert abs(loss - (nll(x, y, s) - rest.item())) < 1e-8
    loss = ProjectedLikelihood().loss
    for family in (SVGP(5), SGPR(5)):
        other = AutoSparseGP(regression, family)
        refused(r"family ComputationAware.*site 'f' is not", loss, regression, other, x, y)
    x, y = data(bernoulli, 30)
    guide = AutoSparseGP(bernoulli, ComputationAware(5))
    refused("Gaussian in the function values", loss, bernoulli, guide, x, y)


def test_trainable_policy_of_ones_own():
    x, y = data(num=40)

    class Locations(torch.nn.Module):
        """Soft averages around learned places."""

        def __init__(self):
            super().__init__()
            self.places = torch.nn.Parameter(x[:6].clone())

        def forward(self, kernel, sites):
            return torch.exp(-20 * torch.cdist(sites.inputs, self.places).square())

    policy = Locations()
    guide = AutoSparseGP(learned, ComputationAware(6, policy))
    before = policy.places.detach().clone()
    losses = train(learned, guide, x, y, steps=50)
    assert losses[-1] < losses[0]
    assert any("places" in name for name, _ in guide.named_parameters())
    assert (guide.gps.f.policy.policy.places - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (lambda: ComputationAware(0), "num_actions must be a whole number"),
        (lambda: ComputationAware(5, "best"), r"actions must be one of \['cg', 'eigen', 'random', 'sparse'\]"),
        (lambda: ComputationAware(31), "site 'f' asks for 31 actions, the guide's first call has 30 rows"),
        (lambda: ComputationAware(5, lambda k, s: torch.ones(3, 5)), r"must be a tensor \(30, 5\), got \(3, 5\)"),
        (lambda: ComputationAware(5, lambda k, s: torch.full((30, 5), torch.nan)), "contain NaN"),
    ],
)
def test_bad_arguments(family, message):
    x, y = data(num=30)
    refused(message, lambda: fitted(x, y, family()))


def test_other_numbers_of_rows():
    x, y = data(num=30)
    guide = fitted(x, y, ComputationAware(5))
    refused(r"ComputationAware.*brings other rows at site 'y'.*forget_data", guide, x[:20], y[:20])
    refused("'f' has the family ComputationAware, with parameters for each row", guide.forget_data)
    guide = fitted(x, y, ComputationAware(5, "cg"))
    guide.forget_data()
    guide(x[:20], y[:20])
    assert guide.gps.f.sites.inputs.shape == (20, 2)


def test_components_and_paths():
    x, y = data(num=40)
    kernel = kernels.RBF(0.5)[0] + 0.5 * kernels.Matern32(0.4)[1] + kernels.Constant(1.0)
    q = fitted(x, y, ComputationAware(8), gaussian(kernel, NOISE)).posterior(torch.rand(6, 2))["f"]
    assert len(q.components) == 3
    torch.testing.assert_close(sum(part.mean for part in q.components), q.mean)
    s = matrix_of(q)
    c = s @ torch.linalg.solve(s.mT @ (kernel(x) + NOISE**2 * torch.eye(40)) @ s, s.mT)
    new = q.process.x
    for term, part in zip(kernel.terms, q.components):
        torch.testing.assert_close(part.mean, term(new, x) @ c @ y)
        torch.testing.assert_close(part.variance, (term(new) - term(new, x) @ c @ term(x, new)).diagonal())
    draws = q.paths(4000, 32)(new)  # each of its own waves
    torch.testing.assert_close(draws.mean(0), q.mean, atol=0.08, rtol=0)
    torch.testing.assert_close(draws.T.cov(), q.covariance_matrix, atol=0.08, rtol=0.1)
    joint = q.rsample((4000,))
    torch.testing.assert_close(joint.T.cov(), q.covariance_matrix, atol=0.08, rtol=0.1)


def test_dependent_actions_span_what_they_span():
    x, y = data(num=30)
    s = torch.randn(30, 3)
    doubled = torch.cat([s[:, :1], 2 * s[:, :1], s[:, 1:], s.sum(-1, keepdim=True), 0 * s[:, :1]], -1)
    one, other = fitted(x, y, given(s)), fitted(x, y, given(doubled))
    assert_alike(one.posterior(x)["f"], other.posterior(x)["f"])
    losses = [TraceQuadrature_ELBO(2).loss(g.model, g, x, y) for g in (one, other)]
    assert abs(losses[0] - losses[1]) < 1e-8
    nothing = fitted(x, y, given(0 * s)).posterior(x)["f"]
    torch.testing.assert_close(nothing.variance, nothing.process.variance)


def test_the_divergence_of_projections_that_say_nothing_is_0():
    # ỹᵀα − αᵀDα, of numbers of 1e16 each, would leave anything.
    target, noise = torch.tensor([1e8, -3e7], dtype=torch.float64), torch.tensor([3e-1, 7.0], dtype=torch.float64)
    q = ProjectedGaussian(target, noise.sqrt().diag(), noise, torch.zeros(2, 2, dtype=torch.float64))
    assert abs(float(q.kl())) < 1e-12


def test_an_action_of_zeros_is_named():
    x, y = data(num=20)

    def policy(kernel, sites):
        return torch.eye(20)[:, :4] * torch.tensor([1.0, 1.0, 0.0, 1.0])

    message = r"gradient is not.*actions that are 0 or depend on one another"
    refused(message, trained, regression, ComputationAware(4, policy), x, y, steps=1)
