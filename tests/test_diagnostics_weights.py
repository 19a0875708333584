"""Importance weights, leave-one-out and scores against dense references."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.distributions import Probit
from pyro_sparsegp.families import SGPR, SVGP, SparseEP, WeightSpace

from .models import (
    FAMILIES,
    additive,
    bernoulli,
    data,
    gaussian,
    hermite,
    heteroscedastic,
    maximise,
    observed,
    one_function,
    poisson,
    prepared,
    refused,
    regression,
    train,
    trained,
)

xr = pytest.importorskip("xarray")
stats = pytest.importorskip("arviz_stats")
arviz_base = pytest.importorskip("arviz_base")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
as_source = pytest.importorskip("pyro_sparsegp.diagnostics.sources").as_source

KERNEL = kernels.RBF(0.1)
NOISE = 0.17


def smooth_data(num=200, noise=NOISE):
    x = torch.rand(num, 1)
    return x, GaussianProcess(KERNEL, x).sample() + noise * torch.randn(num)


def on_a_grid(num, x, y, model=None):
    z = torch.linspace(0.02, 0.98, num)[:, None]
    return prepared(gaussian(KERNEL, NOISE) if model is None else model, SGPR(z, trainable=False), x, y)


def exact_loo(x, y, kernel=KERNEL, noise=NOISE):
    precision = torch.linalg.inv(kernel(x) + noise**2 * torch.eye(len(x)))
    variance = 1 / precision.diagonal()
    return dist.Normal(y - (precision @ y) * variance, variance.sqrt()).log_prob(y)


# ArviZ's own warning, on what the tests look at in other ways.
pytestmark = pytest.mark.filterwarnings("ignore:Estimated shape parameter")


def test_weights_mend_hyperparameters():
    """Draws anew by the weights: a mean-field posterior of the length becomes the exact one."""

    def model(x, y=None):
        length = pyro.sample("length", dist.LogNormal(-2.0, 0.7))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x))
        observed(dist.Normal(f, NOISE), y)

    x, y = smooth_data(20)
    guide = prepared(model, SGPR(x, trainable=False), x, y, init_scale=0.3, independent=True)
    with torch.no_grad():  # off centre, but wide enough
        guide.locs.length_unconstrained.fill_(-2.2)
        guide.scales.length_unconstrained.fill_(-0.9)
    tree = diagnostics.to_datatree(model, guide, x, y, num_samples=300, seed=1, posterior_predictive=False)
    found = diagnostics.psis(tree)
    assert found.khat < 0.7
    new = arviz_base.extract(tree, num_samples=300, weights=np.exp(found.log_weights), random_seed=0)
    grid = torch.linspace(-5, 1, 200)
    covariance = torch.stack([kernels.RBF(v.exp())(x) for v in grid]) + NOISE**2 * torch.eye(20)
    log_density = dist.MultivariateNormal(torch.zeros(20), covariance).log_prob(y)
    log_posterior = log_density + dist.Normal(-2.0, 0.7).log_prob(grid)
    share = torch.softmax(log_posterior, 0)
    mean, sd = (share * grid).sum(), (share * (grid - (share * grid).sum()).square()).sum().sqrt()
    draws = np.log(new["length"].values)
    assert abs(draws.mean() - mean) < 0.25 * sd + 0.02
    assert abs(draws.std() / sd - 1) < 0.25
    before = np.log(tree.posterior["length"].values)
    assert abs(before.std() - sd) > 3 * abs(draws.std() - sd)


def test_psis_refuses():
    x, y = smooth_data(20)
    guide = on_a_grid(6, x, y)
    tree = diagnostics.to_datatree(guide.model, guide, x, y, num_samples=25, posterior_predictive=False)
    refused("at least 25", diagnostics.psis, tree.isel(draw=slice(20)))
    without = diagnostics.to_datatree(guide.model, guide, x, y, num_samples=5, log_likelihood=False)
    refused("log_likelihood=True", diagnostics.psis, without)
    samples = {"f": GaussianProcess(KERNEL, x).sample((5,))}  # and nothing else: the posterior group is empty
    mcmc = diagnostics.to_datatree(guide.model, samples, x, y)
    refused("need no weights", diagnostics.psis, mcmc)


def towards_target(tree):
    return stats.loo_approximate_posterior(tree, tree.sample_stats["lp"], tree.sample_stats["log_q"], pointwise=True)


def test_leave_one_out_is_the_exact_processes():
    """With inducing points at all distinct places, stock ArviZ's is the exact GP's, point by point."""
    x, y = smooth_data(60)
    guide = on_a_grid(16, x, y)
    tree = diagnostics.to_datatree(guide.model, guide, x, y, num_samples=600, posterior_predictive=False)
    for found in (towards_target(tree), stats.loo(tree, pointwise=True, reff=1.0)):  # p/q is 1 here
        np.testing.assert_allclose(found.elpd_i.values, exact_loo(x, y), atol=0.9)
        assert abs(found.elpd - float(exact_loo(x, y).sum())) < 1.8


@pytest.mark.parametrize("weight", [4.0, 0.25, "rows"])
def test_weights_of_rows(weight):
    """Of ``poutine.scale``: each row is left out to the power of its weight, and predicted to it, as of an exact GP
    whose noise has the variance σ²/wₙ, of which p(y | f)^w is a multiple.
    """
    kernel, x, _ = kernels.RBF(0.4), *smooth_data(40)
    y = torch.sin(6 * x[:, 0]) + NOISE * torch.randn(40)
    w = torch.linspace(0.25, 4, 40) if weight == "rows" else torch.full((40,), weight)

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernel, x))
        with pyro.plate("data", len(x)), poutine.scale(scale=w):
            pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = on_a_grid(20, x, y, model)
    precision = torch.linalg.inv(kernel(x) + torch.diag(NOISE**2 / w))
    mean, variance = y - precision @ y / precision.diagonal(), 1 / precision.diagonal()
    multiple = 0.5 * ((1 - w) * np.log(2 * np.pi * NOISE**2) - w.log())
    exact = float((dist.Normal(mean, variance.sqrt()).log_prob(y) + multiple).sum())
    tree = diagnostics.to_datatree(model, guide, x, y, num_samples=400, posterior_predictive=False, seed=0)
    assert diagnostics.psis(tree).khat < 0.5
    samples = {"f": guide.posterior(x)["f"].rsample((400,)).detach()}  # as MCMC would have them: q is exact here
    for found in (towards_target(tree), stats.loo(diagnostics.to_datatree(model, samples, x, y), reff=1.0)):
        assert abs(found.elpd - exact) < 0.7


def test_khat_comes_with_its_standard_error():
    """Of log-normal weights: the error is that of k-hat over seeds. Equal ones, but for rounding, have no tail."""

    def psis(num, spread=1.7):
        ratio = xr.DataArray(spread * torch.randn(1, num).numpy(), dims=["chain", "draw"], coords={"chain": [0]})
        stats = xr.Dataset({"lp": ratio, "log_q": 0 * ratio})
        return diagnostics.psis(xr.DataTree.from_dict({"posterior": xr.Dataset(), "sample_stats": stats}))

    found = [psis(400) for _ in range(200)]
    assert np.std([one.khat for one in found]) == pytest.approx(np.mean([one.khat_se for one in found]), rel=0.15)
    assert found[0].good_k == pytest.approx(1 - 1 / np.log10(400))
    equal = psis(50, 1e-6)
    assert (equal.khat, equal.ess) == (-np.inf, pytest.approx(50))


def test_an_expected_density_that_is_infinite_is_told_of():
    """A likelihood with bounded support: E[log p] is −∞, the integrated density is not."""

    model = one_function(KERNEL, lambda f: dist.Uniform(f - 3, f + 3, validate_args=False))
    x, y = smooth_data(10)
    guide = prepared(model, SVGP(2), x, y)
    tree = diagnostics.to_datatree(model, guide, x, y, num_samples=30)
    assert np.isfinite(tree.log_likelihood["y"]).all()
    refused(r"lp, .*'vfe', is not finite in 30 of 30 draws.*expectation propagation", diagnostics.psis, tree)


def normal_mixture_crps(means, sds, y):
    """CRPS of an equal mixture of normals by numerical integration of (F − 1[y ≤ t])²."""
    t = torch.linspace(-12, 12, 20_001)
    cdf = dist.Normal(means[:, None], sds[:, None]).cdf(t).mean(0)
    return torch.trapezoid((cdf - (t >= y).double()).square(), t)


def test_scores_of_a_gaussian_likelihood_are_closed_form():
    x, y = smooth_data(60)
    guide = on_a_grid(12, x, y)
    new, seen = smooth_data(50)
    found = diagnostics.predictive_scores(guide.model, guide, new, seen, num_samples=1)
    assert found.method == "gaussian"
    q = guide.posterior(new)["f"]
    predictive = dist.Normal(q.mean, (q.variance + NOISE**2).sqrt())
    np.testing.assert_allclose(found.pointwise["log_score"], predictive.log_prob(seen).detach(), atol=1e-6)
    np.testing.assert_allclose(found.pointwise["pit"], predictive.cdf(seen).detach(), atol=1e-6)
    crps = [normal_mixture_crps(m[None], s[None], v) for m, s, v in zip(predictive.loc, predictive.scale, seen)]
    np.testing.assert_allclose(found.pointwise["crps"], torch.stack(crps).detach(), atol=2e-3)


def test_scores_of_mixtures_are_those_of_the_mixture(monkeypatch):
    """Of draws of hyperparameters: each has a normal, and the scores are the equal mixture's, by integration."""
    from pyro_sparsegp.diagnostics.densities import DensityReader

    x, y = data(num=50)
    guide = AutoSparseGP(regression, SVGP(10), init_scale=0.3, independent=True)
    train(regression, guide, x, y, steps=20, lr=0.05)
    new, seen = data(num=10, seed=4)
    normals, read = [], DensityReader._widened
    monkeypatch.setattr(DensityReader, "_widened", lambda *args: normals.append(read(*args)) or normals[-1])
    found = diagnostics.predictive_scores(regression, guide, new, seen, num_samples=12)
    assert found.method == "gaussian"
    means, sds = torch.cat([m for *_, m, _ in normals]), torch.cat([v.sqrt() for *_, v in normals])
    assert means.std(0).min() > 0.01  # they differ
    each = dist.Normal(means, sds)
    crps = [normal_mixture_crps(m, s, v) for m, s, v in zip(means.mT, sds.mT, seen)]
    np.testing.assert_allclose(found.pointwise["crps"], torch.stack(crps), atol=2e-3)
    np.testing.assert_allclose(found.pointwise["pit"], each.cdf(seen).mean(0), atol=1e-6)
    log_score = torch.logsumexp(each.log_prob(seen), 0) - np.log(12)
    np.testing.assert_allclose(found.pointwise["log_score"], log_score, atol=1e-6)


def test_scores_by_draws_are_those_of_the_distribution():
    from pyro_sparsegp.diagnostics.scores import _of_draws

    y = torch.linspace(-2, 2, 5)
    found = _of_draws(y, 0.3 + 0.7 * torch.randn(4000, 5))
    crps = [normal_mixture_crps(torch.tensor([0.3]), torch.tensor([0.7]), v) for v in y]
    np.testing.assert_allclose(found["crps"], torch.stack(crps), atol=0.05)
    np.testing.assert_allclose(found["pit"], dist.Normal(0.3, 0.7).cdf(y), atol=0.03)
    few = torch.randn(3, 5)  # the estimate without bias: over pairs of different draws
    between = sum((few[i] - few[j]).abs() for i in range(3) for j in range(i)) / 3
    expected = (few - y).abs().mean(0) - 0.5 * between
    np.testing.assert_allclose(_of_draws(y, few)["crps"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "method"), [(bernoulli, "bernoulli"), (poisson, "draws"), (heteroscedastic, "draws")]
)
def test_scores_of_other_likelihoods(model, method):
    x, y = data(model, num=50)
    guide = trained(model, SVGP(10), x, y, steps=10, lr=0.15, loss=TraceQuadrature_ELBO(5))
    new, seen = data(model, num=120, seed=7)
    found = diagnostics.predictive_scores(model, guide, new, seen, num_samples=5)
    assert found.method == method
    assert np.isfinite(found.pointwise["log_score"]).all()
    assert (found.pointwise["crps"] >= -1e-9).all()
    assert 0.85 < found.coverage(0.95) <= 1
    assert list(found.summary.index) == ["log_score", "crps", "coverage_50%", "coverage_90%", "coverage_95%"]
    if method == "draws":  # of one draw there is no coverage
        one = diagnostics.predictive_scores(model, guide, new, seen, num_samples=1)
        assert np.isnan([one.coverage(0.9), one.summary["mean"]["coverage_90%"]]).all()
    if model is bernoulli:
        p = np.exp(found.pointwise["log_score"].values)
        np.testing.assert_allclose(found.pointwise["crps"].values, (1 - p) ** 2, atol=1e-9)


OTHERS = {"SparseEP": SparseEP(12), "WeightSpace": WeightSpace()}


# One family of each kind of posterior.
@pytest.mark.parametrize("name", ["SVGP", "CoupledPrecision", "ComputationAwareCG", "SparseEP", "WeightSpace"])
def test_coverage_of_every_family(name):
    """On a draw from the prior, with the true hyperparameters: 95 % intervals cover 93 to 97 % of new observations."""
    covered = []
    for seed in range(2):
        pyro.set_rng_seed(seed)
        x = torch.rand(1100, 2)
        if name.endswith("WeightSpace"):  # for finite features
            kernel = kernels.RandomFourier(kernels.RandomFourier.draw(kernels.RBF, 20, 2), torch.tensor([0.3, 0.4]))
        else:
            kernel = additive(1.0, torch.tensor([0.6, 0.8]))
        y = GaussianProcess(kernel, x).sample() + 0.4 * torch.randn(1100)
        model, family = gaussian(kernel, 0.4), {**FAMILIES, **OTHERS}[name]
        guide = prepared(model, family, x[:100], y[:100])
        if name == "SparseEP":
            ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.0}), damping=1.0)
            for _ in range(3):
                ep.sweep(x[:100], y[:100])
        elif getattr(family, "is_natural", False):
            train(model, guide, x[:100], y[:100], steps=8, lr=0.01)
        elif any(True for _ in guide.parameters()):
            maximise(model, guide, x[:100], y[:100], iterations=50)
        covered.append(diagnostics.predictive_scores(model, guide, x[100:], y[100:], num_samples=1).coverage(0.95))
    assert 0.93 <= np.mean(covered) <= 0.97, covered


def test_scores_of_mcmc_samples_at_new_data():
    from pyro.infer import MCMC, NUTS

    x, y = smooth_data(15)
    model = gaussian(KERNEL, NOISE)
    mcmc = MCMC(NUTS(model), num_samples=3, warmup_steps=2, disable_progbar=True)
    mcmc.run(x, y)
    new, seen = smooth_data(20)
    found = diagnostics.predictive_scores(model, mcmc, new, seen, num_samples=3)
    f = mcmc.get_samples()["f"]
    given = [GaussianProcess(KERNEL, new).given(x, value) for value in f]
    densities = torch.stack([dist.Normal(g.mean, (g.variance + NOISE**2).sqrt()).log_prob(seen) for g in given])
    np.testing.assert_allclose(found.pointwise["log_score"], torch.logsumexp(densities, 0) - np.log(3), atol=1e-5)


@pytest.mark.quick("1-Probit | 3-<lambda>")
@pytest.mark.parametrize("likelihood", [lambda f: dist.Bernoulli(logits=f), Probit])
@pytest.mark.parametrize(("num", "outputs"), [(6, 3), (5, 1), (5, 2)])
def test_scores_of_several_classes_a_row(likelihood, num, outputs):
    """CRPS and PIT of two classes are each output's, of its own marginal; the log score is the row's."""

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(2.0 * KERNEL, x).expand([outputs]).to_event(1))
        observed(likelihood(f.mT).to_event(1), y)

    x, y = torch.rand(30, 2), (torch.rand(30, outputs) < 0.5).double()
    guide = trained(model, SVGP(12), x, y, steps=20, lr=0.1)
    with torch.no_grad():
        q = guide.posterior(x[:num])["f"]
    nodes, weights = hermite(60)
    f = q.mean.mT[..., None] + q.stddev.mT[..., None] * nodes
    one = likelihood(f).log_prob(torch.ones_like(f)).exp() @ weights
    found = diagnostics.predictive_scores(model, guide, x[:num], y[:num])
    assert found.method == "bernoulli"
    # Three outputs are integrated at 128 points.
    np.testing.assert_allclose(found.pointwise["crps"], (one - y[:num]).square(), atol=1e-4 if outputs < 3 else 1e-2)
    own = torch.where(y[:num] > 0.5, one, 1 - one).log().sum(-1)
    np.testing.assert_allclose(found.pointwise["log_score"], own, atol=3e-4 if outputs < 3 else 3e-2)
    assert found.pointwise["pit"].shape == (num, outputs)
    whole = diagnostics.predictive_scores(model, guide, x, y, seed=0)
    assert whole.coverage(0.95) > 0.8
