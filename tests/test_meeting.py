"""Gaussian sites of function values that meet: in one Gaussian density, or in a link under which updates overshoot."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import SGPR, SVGP, AdditiveSGPR, CollapsedOrthogonal, ComputationAware, Exact, WeightSpace

from .models import maximise, observed, train

NUM, NOISE = 18, 0.3
ROUGH, SMOOTH = 1.2 * kernels.Matern12(0.7), 0.8 * kernels.Matern12(2.0)  # of well conditioned matrices
MIXING = torch.tensor([[1.0, 0.5], [-0.7, 1.2], [0.4, 0.9]], dtype=torch.float64)


def inputs():
    return torch.linspace(0, 3, NUM)[:, None] + 0.02 * torch.rand(NUM, 1)


def two_sites(x, y=None):
    """Linear coregionalisation of two GP sites."""
    g = pyro.sample("g", GaussianProcess(ROUGH, x))
    h = pyro.sample("h", GaussianProcess(SMOOTH, x, mean=lambda x: 0.3 * x[:, 0]))
    with pyro.plate("outputs", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
        return pyro.sample("y", dist.Normal(MIXING @ torch.stack([g, h]), NOISE), obs=y)


def two_outputs(x, y=None):
    """The same of two outputs of one GP site."""
    g = pyro.sample("g", GaussianProcess(ROUGH, x).expand([2]).to_event(1))
    with pyro.plate("outputs", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
        return pyro.sample("y", dist.Normal(MIXING @ g, NOISE), obs=y)


def summed_outputs(x, y=None):
    f = pyro.sample("f", GaussianProcess(ROUGH, x).expand([4]).to_event(1))
    return observed(dist.Normal(f.sum(0), NOISE), y)


def shared_site(x, y=None):
    f = pyro.sample("f", GaussianProcess(ROUGH, x))
    g = pyro.sample("g", GaussianProcess(SMOOTH, x).expand([2]).to_event(1))
    with pyro.plate("outputs", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
        return pyro.sample("y", dist.Normal(f + g, NOISE), obs=y)


# Of each model: its functions' kernels, their prior means as multiples of x, and the matrix that mixes them.
MEETINGS = {
    two_sites: ([ROUGH, SMOOTH], [0.0, 0.3], MIXING),
    two_outputs: ([ROUGH, ROUGH], [0.0, 0.0], MIXING),
    summed_outputs: ([ROUGH] * 4, [0.0] * 4, torch.ones(1, 4, dtype=torch.float64)),
    shared_site: ([ROUGH, SMOOTH, SMOOTH], [0.0] * 3, torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]).double()),
}


def mean_field(model, x, y):
    """Means, variances and the bound of the best q(f₁)q(f₂)…, dense: coordinate ascent until nothing moves."""
    functions, slopes, mixing = MEETINGS[model]
    grams = [k(x) for k in functions]
    priors = torch.stack([slope * x[:, 0] for slope in slopes])
    y = y.reshape(len(mixing), NUM)
    weights = mixing.square().sum(0) / NOISE**2
    gains = [torch.linalg.solve(torch.eye(NUM) + k * w, k) for k, w in zip(grams, weights)]
    means = priors.clone()
    for _ in range(20_000):
        before = means.clone()
        for p, (gain, prior) in enumerate(zip(gains, priors)):
            rest = y - mixing @ means + mixing[:, p, None] * (means[p] - prior)
            means[p] = prior + gain @ (mixing[:, p] @ rest) / NOISE**2
        if (means - before).abs().max() < 1e-13:
            break
    variances = torch.stack([gain.diagonal() for gain in gains])
    bound = dist.Normal(mixing @ means, NOISE).log_prob(y).sum() - 0.5 * (weights @ variances).sum()
    for k, gain, mean, prior in zip(grams, gains, means, priors):
        away = mean - prior
        trace = torch.linalg.solve(k, gain).trace()
        fit = away @ torch.linalg.solve(k, away)
        bound = bound - 0.5 * (trace + fit - NUM + torch.logdet(k) - torch.logdet(gain))
    return means, variances, float(bound)


@pytest.mark.quick("two_sites | two_outputs | shared_site")
@pytest.mark.filterwarnings("ignore:GP sites .* enter densities by their sum")
@pytest.mark.parametrize("model", MEETINGS, ids=lambda model: model.__name__)
def test_functions_that_meet_in_a_gaussian_density(model):
    """One step is at the optimum of a mean field, whatever the correlation of the functions given the data."""
    x = inputs()
    y = torch.sin(2 * x[:, 0]) + NOISE * torch.randn(len(MEETINGS[model][2]), NUM)
    y = y[0] if len(y) == 1 else y
    means, variances, bound = mean_field(model, x, y)
    guide = AutoSparseGP(model, SGPR(x, trainable=False), independent=True)
    elbo = TraceQuadrature_ELBO(2)
    assert -elbo.loss_and_grads(model, guide, x, y) == pytest.approx(bound, abs=1e-4)
    assert -elbo.loss(model, guide, x, y) == pytest.approx(bound, abs=1e-4)
    found = guide.posterior(x)
    torch.testing.assert_close(torch.cat([q.mean.reshape(-1, NUM) for q in found.values()]), means, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        torch.cat([q.variance.reshape(-1, NUM) for q in found.values()]), variances, atol=1e-6, rtol=0
    )
    own = dist.Normal(MEETINGS[model][2] @ means, NOISE).log_prob(y.reshape(-1, NUM)).sum()
    own = own - 0.5 * (MEETINGS[model][2].square().sum(0) @ variances).sum() / NOISE**2
    assert float(own - sum(q.kl.sum() for q in found.values())) == pytest.approx(bound, abs=1e-4)
    assert all(status["converged"] for status in guide.site_status.values())


def test_draws_of_functions_that_meet_are_made_at_once():
    """Sites are found anew for each draw of the noise, under vmap, too."""

    def model(x, y=None):
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.2))
        f = pyro.sample("f", GaussianProcess(SMOOTH, x).expand([3]).to_event(1))
        return observed(dist.Normal(f.sum(0), noise), y)

    x = inputs()
    guide = AutoSparseGP(model, SGPR(x, trainable=False))
    train(model, guide, x, torch.sin(2 * x[:, 0]) + NOISE * torch.randn(NUM), steps=2)
    draws = predict(model, guide, x, num_samples=40)
    mean = guide.posterior(x)["f"].mean.sum(0)
    assert (draws["f"].sum(-2).mean(0) - mean).abs().max() < 0.4


@pytest.mark.quick("gamma-10.0 | poisson-1.0")
@pytest.mark.parametrize(
    ("link", "variance", "family"),
    [
        ("poisson", 1.0, SGPR(6, trainable=False)),
        ("gamma", 1.0, SGPR(6, trainable=False)),
        ("poisson", 10.0, SGPR(6, trainable=False)),
        ("poisson", 10.0, ComputationAware(10, actions="cg")),
        ("gamma", 10.0, ComputationAware(10, actions="cg")),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, float)) else type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:.*needed a relative jitter")
def test_exponential_links_under_wide_priors(link, variance, family):
    """Where E[exp f] under the prior is out of all bounds, the losses of training are not: they fall, step by step."""
    x = torch.linspace(-2, 2, 20)[:, None]
    f = 1 + x[:, 0]
    y = torch.poisson(f.exp()) if link == "poisson" else f.exp() * (0.2 + torch.rand(20))

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(variance * kernels.Polynomial(2), x))
        with pyro.plate("data", len(x)):
            likelihood = dist.Poisson(f.exp()) if link == "poisson" else dist.Gamma(2.0, 2.0 * (-f).exp())
            return pyro.sample("y", likelihood, obs=y)

    guide = AutoSparseGP(model, family)
    elbo = TraceQuadrature_ELBO(20)
    losses = [elbo.loss_and_grads(model, guide, x, y) for _ in range(12)]
    assert all(map(math.isfinite, losses))
    assert all(after < before + 1e-6 * (1 + abs(before)) for before, after in itertools.pairwise(losses))
    assert guide.site_status["f"]["converged"]
    _, best = maximise(model, WeightSpace(natural=False), x, y, num_nodes=20, iterations=100)
    assert -losses[-1] == pytest.approx(best, abs=1e-3 if isinstance(family, SGPR) else 0.1)


@pytest.mark.parametrize("family", [pytest.param(Exact(), marks=pytest.mark.slow), SGPR(10)])
def test_kinks_far_from_the_prior_mean(family):
    """A Laplace density has a slope and no curvature there: modes of rows lead nowhere, damped updates to the best."""
    x = torch.linspace(0, 1, 30)[:, None]
    y = 20 + torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(30)

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        return observed(dist.Laplace(f, 0.1), y)

    losses = train(model, AutoSparseGP(model, family), x, y, steps=60)
    best = train(model, AutoSparseGP(model, SVGP(x)), x, y, steps=60)
    assert losses[-1] == pytest.approx(best[-1], abs=0.1)


@pytest.mark.quick("family0")
@pytest.mark.parametrize("family", [CollapsedOrthogonal(6, 6, rate=1.0), AdditiveSGPR(6, rate=1.0)])
def test_undamped_updates_of_classes_do_not_explode(family):
    x = torch.rand(60, 2)
    labels = (3 * x.mean(-1)).floor()

    def softmax(x, y=None):
        kernel = 1000.0 * kernels.RBF(0.4)[0] + 1000.0 * kernels.RBF(0.4)[1]
        f = pyro.sample("f", GaussianProcess(kernel, x).expand([2]).to_event(1))
        return observed(dist.Categorical(logits=torch.cat([f, 0 * f[:1]]).mT), y)

    for independent in (False, True):  # by steps over points of one posterior, by sites of each row
        guide = AutoSparseGP(softmax, family, independent=independent)
        elbo = TraceQuadrature_ELBO(5)
        losses = [elbo.loss_and_grads(softmax, guide, x, labels) for _ in range(15)]
        assert max(losses) == losses[0]
        assert losses[-1] < 0.6 * losses[0]
    assert guide.site_status["f"]["halved"] > 0  # which is told of
