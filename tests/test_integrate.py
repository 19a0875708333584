"""Weighted points of skewed hyperparameters, against dense grids."""

import copy
import functools
import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, diagnostics, families, kernels, predict
from pyro_sparsegp.guide.bounds import of_bound
from pyro_sparsegp.inference.jit import JitTraceQuadrature_ELBO

from .models import observed, prepared, refused, restored, train

GROUPS, EACH = 5, 6
N = GROUPS * EACH
GROUP = torch.arange(N) % GROUPS
X = torch.linspace(0, 1, N, dtype=torch.float64)[:, None]
ONE_HOT = torch.nn.functional.one_hot(GROUP, GROUPS).double()


def _model(x, group, y=None):
    tau = pyro.sample("tau", dist.HalfNormal(3.0))
    noise = pyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(0.0, tau))
    f = pyro.sample("f", GaussianProcess(0.5 * kernels.RBF(0.4), x, jitter=1e-8))
    observed(dist.Normal(mu + a[group] + f, noise), y)


def _alone(x, y=None):
    """f and its hyperparameters, without a field."""
    s = pyro.sample("s", dist.HalfNormal(2.0))
    length = pyro.sample("length", dist.LogNormal(-0.7, 0.5))
    f = pyro.sample("f", GaussianProcess(s**2 * kernels.RBF(length), x, jitter=1e-8))
    observed(dist.Normal(f, 0.6), y)


def _data(size=1.0):
    generator = torch.Generator().manual_seed(3)
    effects = torch.tensor([-1.0, 0.2, 0.9, 0.1, -0.4], dtype=X.dtype)
    return torch.sin(4 * X[:, 0]) + size * effects[GROUP] + 0.5 * torch.randn(N, generator=generator, dtype=X.dtype)


def _grid(y, covariance, priors, *logs):
    """Of two positive hyperparameters of a normal density of the data the weights of a grid, and for each its mean,
    standard deviation and quantiles.
    """
    first, second = torch.meshgrid(*(log.exp() for log in logs), indexing="ij")
    each = torch.stack([covariance(a, b) for a, b in zip(first.flatten(), second.flatten())])
    density = dist.MultivariateNormal(torch.zeros(N), each).log_prob(y).view(first.shape)
    # p(θ) dθ on a grid of logarithms
    density = density + priors[0].log_prob(first) + priors[1].log_prob(second) + first.log() + second.log()
    weight, moments = density.flatten().softmax(0).view(first.shape), []
    for i, values in enumerate(log.exp() for log in logs):
        w = weight.sum(1 - i)
        mean, cdf = w @ values, w.cumsum(0)
        quantiles = torch.stack([values[(cdf < level).sum()] for level in (0.1, 0.5, 0.9)])
        moments.append((mean, (w @ (values - mean).square()).sqrt(), quantiles))
    return weight.flatten(), each, moments


def _mixed(y, weight, each, cross, prior):
    """Mean and standard deviation, over the grid, of what has this covariance with the data, and this variance."""
    some = weight > 1e-6
    gain = torch.linalg.solve(each[some], cross if cross.dim() == 2 else cross[some])
    mean, variance = (
        gain.mT @ _data(),
        (prior if prior.dim() < 2 else prior[some]) - ((cross if cross.dim() == 2 else cross[some]) * gain).sum(-2),
    )
    first, second = weight[some] @ mean, weight[some] @ (variance + mean.square())
    return first, (second - first.square()).sqrt()


@functools.cache
def _groups():
    """A guide of groups, its points, the dense reference, and an interval before."""

    def covariance(tau, noise):
        return 0.5 * kernels.RBF(0.4)(X) + 4.0 + tau**2 * ONE_HOT @ ONE_HOT.T + noise**2 * torch.eye(N)

    priors = dist.HalfNormal(3.0), dist.LogNormal(-0.5, 0.5)
    weight, each, moments = _grid(
        _data(), covariance, priors, torch.linspace(-5, 2.6, 140), torch.linspace(-1.6, 0.4, 50)
    )
    mu = _mixed(_data(), weight, each, torch.full((N, 1), 4.0), torch.tensor(4.0))
    pyro.set_rng_seed(0)
    guide = prepared(_model, families.SVGP(12, trainable=False), X, GROUP, _data())
    train(_model, guide, X, GROUP, _data(), steps=30)
    before = guide.quantiles([0.1, 0.9], X, GROUP, num_draws=600)["tau"]
    return guide, guide.integrate(X, GROUP, _data()), (moments, mu), before


def test_points_are_those_of_a_dense_grid():
    guide, points, (moments, mu), before = _groups()
    w = points.weight
    assert w[0] == 0
    assert w.sum().item() == pytest.approx(1)
    assert points.effective_size > 60
    assert repr(points) == f"{len(w) - 1} points of tau, noise; effective size {points.effective_size:.1f}"
    for values, (mean, sd, quantiles) in zip(points.theta.exp().mT, moments):
        own = w @ values
        assert own.item() == pytest.approx(mean.item(), abs=0.08 * sd.item())
        assert (w @ (values - own).square()).sqrt().item() == pytest.approx(sd.item(), rel=0.06)
        assert values[0].item() == pytest.approx(quantiles[1].item(), abs=0.12 * sd.item())
    # One normal of log tau has no such tail.
    whole = moments[0][2]
    assert (before[1] - before[0]).item() < 0.9 * (whole[2] - whole[0]).item()
    draws = predict(_model, guide, X, GROUP, num_samples=600, joint=False)
    drawn = torch.isclose(draws["tau"].reshape(-1, 1), points.theta[1:, 0].exp(), 1e-9).sum(0)
    assert (drawn - 600 * w[1:]).abs().max() <= 2
    assert draws["mu"].mean().item() == pytest.approx(mu[0].item(), abs=0.1 * mu[1].item())
    assert draws["mu"].std().item() == pytest.approx(mu[1].item(), rel=0.06)
    quantiles = guide.quantiles([0.1, 0.5, 0.9], X, GROUP, num_draws=1000)["tau"]
    torch.testing.assert_close(quantiles, whole, rtol=0.1, atol=0.02)
    assert guide.median(X, GROUP)["tau"].item() == pytest.approx(whole[1].item(), rel=0.08)


def test_a_tail_that_no_axis_of_the_mode_leads_to():
    """Tools of ten islands (Kline and Boyd, 2010): 95 % of etasq was 0.43 for NUTS's 0.58, at any number of points."""
    tools = torch.tensor([13, 22, 24, 43, 33, 19, 40, 28, 55, 71.0])
    people = torch.tensor([1100, 1500, 3600, 4791, 7400, 8000, 9200, 13000, 17500, 275000.0])
    east = torch.tensor([-0.05, 0.13, 0.13, -0.16, 0.05, -0.1, 0.19, -0.01, -0.14, -0.04])
    north = torch.tensor([-1.26, -0.8, -0.68, 1.5, -1.17, -0.57, 1.31, 0.14, -1.62, 3.14])
    up = torch.tensor([-0.31, -0.38, -0.09, 3.1, -1.58, 1.63, 1.6, 2.12, -2.18, -3.9])
    places, rates = torch.stack([east, north, up], -1), {"a": 1.0, "b": 1.0, "etasq": 2.0, "rhosq": 0.5}

    def model(y=None):
        a, b, etasq, rhosq = (pyro.sample(n, dist.Exponential(r)) for n, r in rates.items())
        f = pyro.sample("f", GaussianProcess(etasq * kernels.RBF((2 * rhosq).rsqrt()), places))
        observed(dist.Poisson(a * people**b * f.exp()), y)

    points = prepared(model, families.SVGP(10), tools).integrate()
    etasq, order = points.theta[:, 2].exp(), points.theta[:, 2].argsort()
    upper = etasq[order][(points.weight[order].cumsum(0) < 0.95).sum()]
    assert (points.weight @ etasq).item() == pytest.approx(0.207, abs=0.03)
    assert upper.item() == pytest.approx(0.577, rel=0.15)


def test_trees_have_the_points_and_their_density():
    guide, _, (moments, _), _ = _groups()
    tree = diagnostics.to_datatree(_model, guide, X, GROUP, _data(), num_samples=1000)
    assert tree["posterior"]["tau"].values.std() == pytest.approx(moments[0][1].item(), rel=0.12)
    # log q is the posterior's, so that weights are nearly equal.
    weights = diagnostics.psis(tree)
    assert weights.khat < 0.5
    assert weights.ess > 900


def test_a_state_and_a_copy_hold_the_points_and_a_step_ends_them():
    guide, points, *_ = _groups()
    torch.save(guide.state_dict(), kept := io.BytesIO())
    kept.seek(0)
    other = AutoSparseGP(_model, families.SVGP(12, trainable=False))
    other.load_state_dict(torch.load(kept, weights_only=True))
    for one in (other, restored(guide, _model, families.SVGP(12, trainable=False)), copy.deepcopy(guide)):
        assert repr(one.core.points) == repr(points)
        torch.testing.assert_close(one.posterior(X, GROUP)["f"].variance, guide.posterior(X, GROUP)["f"].variance)
    assert other.float().core.points.theta.dtype == torch.float32
    other.double().core.points.theta.add_(2)
    with torch.no_grad():
        TraceQuadrature_ELBO().loss(_model, other, X, GROUP, _data())
    assert of_bound(other, (X, GROUP, _data()), {}) == []  # which is of the normal q(θ), as a loss is
    assert other.core.points is not None
    svi = SVI(_model, other, pyro.optim.Adam({"lr": 0.01}), JitTraceQuadrature_ELBO())
    for number in range(12):
        other.core.points = points if number in (0, 11) else None
        svi.step(X, GROUP, _data())  # the last one is a replay
        assert other.core.points is None


@pytest.mark.quick("free")
@pytest.mark.parametrize("family", [families.SVGP(15, trainable=False), families.Exact()], ids=["free", "on sites"])
def test_hyperparameters_beside_f_alone(family):
    pyro.set_rng_seed(0)
    guide = prepared(_alone, family, X, _data(0.0))
    assert not guide.joint.field
    train(_alone, guide, X, _data(0.0), steps=30)
    with torch.no_grad():
        before = TraceQuadrature_ELBO(num_particles=20).loss(_alone, guide, X, _data(0.0))
    points = guide.integrate()
    with torch.no_grad():  # a loss takes the normal q(θ)
        after = TraceQuadrature_ELBO(num_particles=20).loss(_alone, guide, X, _data(0.0))
    assert after == pytest.approx(before, abs=1.0)

    def prior(s, length):
        return s**2 * kernels.RBF(length)(X)

    logs = torch.linspace(-4, 2.2, 90), torch.linspace(-3.5, 1.5, 70)
    weight, each, moments = _grid(
        _data(0.0),
        lambda s, length: prior(s, length) + 0.36 * torch.eye(N),
        (dist.HalfNormal(2.0), dist.LogNormal(-0.7, 0.5)),
        *logs,
    )
    for values, (mean, sd, _) in zip(points.theta.exp().mT, moments):
        own = points.weight @ values
        assert own.item() == pytest.approx(mean.item(), abs=0.1 * sd.item())
        assert (points.weight @ (values - own).square()).sqrt().item() == pytest.approx(sd.item(), rel=0.08)
    low, high = guide.quantiles([0.16, 0.84], X, num_draws=2000)["f"]
    k = each - 0.36 * torch.eye(N)
    _, sd = _mixed(_data(0.0), weight, each, k, k.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close((high - low) / 2, sd, rtol=0.12, atol=0.0)


def test_draws_by_pyro_are_of_points_which_are_not_held():
    guide, points, *_ = _groups()
    with torch.no_grad():
        draws = Predictive(_model, guide=guide, num_samples=20)(X, GROUP)
    drawn = torch.stack([draws["tau"].reshape(20), draws["noise"].reshape(20)], -1)
    away = (drawn[:, None] - points.theta.exp()).abs().amax(-1).amin(-1)
    assert away.max() < 1e-8
    with poutine.condition(data={"tau": torch.tensor(1.0)}):
        refused("Condition the model", guide.draw, X, GROUP)


def test_what_has_no_approximation_is_refused_and_few_points_are_told():
    def per_row(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        with pyro.plate("data", len(x)):
            scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
            pyro.sample("y", dist.Normal(f, scale.rsqrt()), obs=y)

    with pytest.warns(UserWarning, match="independent of GP sites"):
        guide = prepared(per_row, families.SVGP(8), X, _data())
    refused("has a value for each row. Integrate it out", guide.integrate, X, _data())

    def many(x, y=None):
        scales = pyro.sample("scales", dist.HalfCauchy(torch.ones(9)).to_event(1))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        observed(dist.Normal(f, scales.prod()), y)

    guide = prepared(many, families.SVGP(8), X, _data())
    guide.together.loc.data -= 1.0  # where the mode's draws alone weigh
    with pytest.warns(UserWarning, match="num_points=48"):
        assert guide.integrate(X, _data(), num_points=12).effective_size < 13


def test_only_the_rows_of_training_are_integrated():
    def model(x, y=None):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        return observed(dist.Normal(f, scale), y)

    guide = prepared(model, families.SVGP(8), X, _data())
    refused("not the rows", guide.integrate, X + 0.1, _data() + 1.0)
    refused("give it the training arguments", guide.integrate, X)
    refused("give it the training arguments", guide.check, X)
    for ask in (guide.integrate, guide.check):
        refused(r"got ndarray: torch.as_tensor\(x\)\.double\(\) is one\Z", ask, X.numpy(), _data().numpy())


def test_a_program_without_hyperparameters_has_one_point():
    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        return observed(dist.Normal(f, 0.3), y)

    guide = prepared(model, families.SVGP(8, rate=1.0), X, _data())
    pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO()).step(X, _data())
    before = guide.posterior(X)["f"]
    assert len(guide.integrate().theta) == 2  # the median, and it
    after = guide.posterior(X)["f"]
    torch.testing.assert_close((after.mean, after.variance), (before.mean, before.variance))
