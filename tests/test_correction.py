"""Eq. 12 of paper 3 for likelihoods that are not Gaussian: the sites of log ∫ p(y | f) N(f | h, c) df."""

import copy
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, blocks, predict
from pyro_sparsegp.families import ExactWeightSpace
from pyro_sparsegp.kernels import DeepBasis
from pyro_sparsegp.tilted import normaliser_derivatives, tilted

from .models import data, train

LIKELIHOODS = {
    "bernoulli": (lambda f: dist.Bernoulli(logits=f), lambda y: (y > 0.5).double()),
    "poisson": (lambda f: dist.Poisson(f.exp()), lambda y: torch.poisson((1 + y).exp())),
}


def network(outputs=4):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs)).double()
    with torch.no_grad():
        net[2].weight.mul_(4)  # features, and with them corrections, of some size
    return net.requires_grad_(False)


def program(net, likelihood, mean=None):
    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(DeepBasis(net), x, mean))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(f), obs=y)

    return model


def correction(net, x, new):
    squares = net(x).square().sum(-1).max()
    return (squares - net(new).square().sum(-1)).clamp(min=0)


def smoothed(likelihood, y, c):
    """h to log ∫ p(y | f) N(f | h, c) df, by the trapezoidal rule on a fine grid."""
    u = torch.linspace(-9, 9, 241)[:, None, None]

    def t(h):
        values = likelihood(h + c.sqrt() * u).log_prob(y) - 0.5 * u.square()
        return values.logsumexp(0) + math.log(18 / 240 / math.sqrt(2 * math.pi))

    return t


def climb(objective, *parameters):
    optimiser = torch.optim.LBFGS(
        parameters, max_iter=300, tolerance_grad=1e-10, tolerance_change=1e-14, history_size=30,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimiser.zero_grad()
        loss = -objective()
        loss.backward()
        return loss

    optimiser.step(closure)


def best_gaussian(net, likelihood, x, y):
    """The q(w) = N(m, S) of largest Σ E[t(φᵀw)] − KL[q ‖ N(0, I)]."""
    phi = net(x)
    t = smoothed(likelihood, y, correction(net, x, x))
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(30))
    m, lower = torch.zeros(phi.shape[-1]).requires_grad_(), torch.eye(phi.shape[-1]).requires_grad_()

    def bound():
        root = lower.tril()
        h = phi @ m + (phi @ root).square().sum(-1).sqrt() * nodes[:, None]
        fit = (weights[:, None] * t(h)).sum() / weights.sum()
        kl = 0.5 * (root.square().sum() + m @ m - len(m)) - root.diagonal().abs().log().sum()
        return fit - kl

    climb(bound, m, lower)
    return m.detach(), (lower.tril() @ lower.tril().mT).detach()


def laplace(net, likelihood, x, y):
    phi = net(x)
    t = smoothed(likelihood, y, correction(net, x, x))
    w = torch.zeros(phi.shape[-1]).requires_grad_()

    def log_joint(w=w):
        return t((phi @ w)[None]).sum() - 0.5 * w @ w

    climb(log_joint, w)
    return w.detach(), torch.linalg.inv(-torch.autograd.functional.hessian(lambda w: log_joint(w), w.detach()))


@pytest.mark.parametrize(("at", "reference"), [("marginals", best_gaussian), ("mean", laplace)])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_posterior_is_the_optimum_of_the_corrected_likelihood(name, at, reference):
    net, (likelihood, outcome), (x, y) = network(), LIKELIHOODS[name], data(num=40)
    y = outcome(y)
    model = program(net, likelihood)
    guide = AutoSparseGP(model, ExactWeightSpace(at=at))
    train(model, guide, x, y, steps=5)
    before = [part.clone() for part in (guide.gps.f.sites.precision, guide.gps.f.sites.linear)]
    new = torch.cat([2 * torch.rand(6, 2), x[:3]])
    q = guide.posterior(new)["f"]
    m, s = reference(net, likelihood, x, y)
    phi, c = net(new), correction(net, x, new)
    torch.testing.assert_close(q.mean, phi @ m, atol=2e-5, rtol=0)
    torch.testing.assert_close(q.covariance_matrix, phi @ s @ phi.mT + torch.diag(c), atol=2e-5, rtol=0)
    torch.testing.assert_close(q.mathematical_variance, q.variance, atol=1e-6, rtol=0)
    # Training's sites stay, and taken for Gaussian data they would have given something else.
    sites = guide.gps.f.sites
    assert torch.equal(sites.precision, before[0])
    assert torch.equal(sites.linear, before[1])
    sites.corrected = None
    assert (guide.posterior(new)["f"].mean - q.mean).abs().max() > 2e-2


def test_sites_of_a_gaussian_are_its_own():
    """Found by the integrals, as if the likelihood were not known to be Gaussian: 1/(σ² + c), and y."""
    net, (x, y) = network(), data(num=40)
    noise = torch.linspace(0.01, 1.0, 40)  # from far narrower than the correction to as wide
    model = program(net, lambda f: dist.Normal(f, noise) if len(f) == 40 else dist.Normal(f, 1.0))
    guide = AutoSparseGP(model, ExactWeightSpace())
    guide(x, y)
    new = torch.rand(6, 2)
    exact = guide.posterior(new)["f"]
    assert guide.gps.f.sites.corrected is None
    guide.structure.quadratic.clear()
    train(model, guide, x, y, steps=1)
    q = guide.posterior(new)["f"]
    precision, linear = guide.gps.f.sites.corrected
    c = correction(net, x, x)
    in_weights = precision / (1 + precision * c)
    torch.testing.assert_close(in_weights, 1 / (noise**2 + c), rtol=1e-8, atol=0)
    torch.testing.assert_close(linear / precision, y, rtol=0, atol=1e-8)
    torch.testing.assert_close(q.mean, exact.mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(q.variance, exact.variance, rtol=0, atol=1e-8)


def test_derivatives_of_the_normaliser():
    """For probit Φ(yf): ∫ Φ(yf) N(f | m, v) df = Φ(ym/√(1 + v)), also where v nearly vanishes."""
    m = torch.linspace(-4, 4, 9)
    for v in (1e-14, 1e-6, 0.3, 9.0):
        variance = torch.full_like(m, v)
        found = normaliser_derivatives(
            tilted(torch.special.log_ndtr, m, variance, m, variance.sqrt(), num_nodes=100), torch.special.log_ndtr
        )
        at = m.clone().requires_grad_()
        (first,) = torch.autograd.grad(torch.special.log_ndtr(at / math.sqrt(1 + v)).sum(), at, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), at)
        torch.testing.assert_close(found[0], first.detach(), rtol=0, atol=1e-7)
        torch.testing.assert_close(found[1], second, rtol=0, atol=1e-7)


def test_all_ways_to_predict_take_these_sites(monkeypatch):
    net, (likelihood, outcome), (x, y) = network(), LIKELIHOODS["bernoulli"], data(num=40)
    y = outcome(y)
    model = program(net, likelihood, mean=lambda x: x[:, 0] - 1)
    guide = AutoSparseGP(model, ExactWeightSpace())
    new = torch.rand(4, 2)
    train(model, guide, x, y, steps=5)
    guide(new)  # with gradients enabled, and no look at the posterior before
    found = guide.gps.f.sites.corrected.clone()
    q = guide.posterior(new)["f"]
    assert torch.equal(guide.gps.f.sites.corrected, found)
    other = AutoSparseGP(model, ExactWeightSpace())
    other.load_state_dict(guide.state_dict())
    for again in (other, copy.deepcopy(guide)):
        torch.testing.assert_close(again.posterior(new)["f"].mean, q.mean)
    train(model, guide, x, y, steps=1)
    draws = predict(model, guide, new, num_samples=300)["f"]
    assert not torch.equal(guide.gps.f.sites.corrected, found)
    q = guide.posterior(new)["f"]
    assert ((draws.mean(0) - q.mean).abs() < 5 * q.stddev / 300**0.5).all()
    # Predictions pass over the training rows once, or not at all.
    visits = []
    plain = DeepBasis.relative_to
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(DeepBasis, "relative_to", lambda k, rows: visits.append(1) or plain(k, rows))
        for _ in range(3):
            guide.posterior(new)
    assert len(visits) <= 1
    # Many rows, in blocks.
    whole = AutoSparseGP(model, ExactWeightSpace())
    whole(x, y)
    expected = whole.posterior(new)["f"]
    monkeypatch.setattr(blocks, "_WHOLE", 16)
    monkeypatch.setattr(blocks, "_BLOCK", 8)
    streamed = AutoSparseGP(model, ExactWeightSpace())
    streamed(x, y)
    torch.testing.assert_close(streamed.posterior(new)["f"].mean, expected.mean)
    # In single precision.
    guide.float()
    net.float()
    train(model, guide, x.float(), y.float(), steps=1)
    single = guide.posterior(new.float())["f"]
    assert single.mean.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), q.mean, atol=1e-2, rtol=0)


def test_masked_rows_do_not_count():
    net, (likelihood, outcome), (x, y) = network(), LIKELIHOODS["poisson"], data(num=30)
    y = outcome(y)
    low = net(x).square().sum(-1).argsort()[:5]  # the level is that of other rows
    masked = torch.zeros(30, dtype=torch.bool).index_fill(0, low, True)
    there = program(net, likelihood)

    def missing(x, y=None):
        with pyro.poutine.mask(mask=True if y is None else ~y.isnan()):
            return there(x, y)

    new, found = torch.rand(4, 2), []
    for model, inputs, values in (
        (missing, x, y.masked_fill(masked, torch.nan)),
        (there, x[~masked], y[~masked]),
    ):
        guide = AutoSparseGP(model, ExactWeightSpace())
        train(model, guide, inputs, values, steps=3)
        found.append(guide.posterior(new)["f"])
        precision = guide.gps.f.sites.corrected[0]
    torch.testing.assert_close(found[0].mean, found[1].mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0].variance, found[1].variance, rtol=0, atol=1e-6)
    assert (precision > 0).any()


def test_terms_of_several_values_keep_trainings_sites():
    net, (x, y) = network(), data(num=30)

    def classes(x, y=None):
        f = pyro.sample("f", GaussianProcess(DeepBasis(net), x).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=f.mT), obs=y)

    def summed(x, y=None):
        f = pyro.sample("f", GaussianProcess(DeepBasis(net), x))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(0.0, 1.0), obs=None if y is None else y)
        if y is not None:
            pyro.factor("likelihood", dist.Poisson(f.exp()).log_prob(y).sum())

    for model, values in ((classes, (y > 0.5).long()), (summed, y.abs().round())):
        guide = AutoSparseGP(model, ExactWeightSpace())
        for _ in range(5):
            guide(x, values)  # a step of its sites
        assert guide.posterior(torch.rand(4, 2))["f"].mean.isfinite().all()
        assert guide.gps.f.sites.corrected is None
