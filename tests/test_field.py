"""One field of GP sites and normal latents, and hyperparameters that start at their mode, against dense references."""

import copy
import math
import re
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide.initialization import init_to_value
from pyro.infer.reparam import LocScaleReparam
from torch.distributions import ExpTransform, constraints

from pyro_sparsegp import (
    AutoSparseGP,
    GaussianProcess,
    TraceQuadrature_ELBO,
    diagnostics,
    families,
    fit,
    kernels,
    predict,
)
from pyro_sparsegp.gaussians.drawn import DrawnGaussian
from pyro_sparsegp.gaussians.steps import recording
from pyro_sparsegp.guide import search, start
from pyro_sparsegp.guide.adaptive import drawn
from pyro_sparsegp.guide.check import Compared, Glance, check
from pyro_sparsegp.guide.field import Layout, run_standardised
from pyro_sparsegp.guide.latents import Hyperparameters, init_to_centre
from pyro_sparsegp.guide.moments import moments_of
from pyro_sparsegp.guide.nested import Nested
from pyro_sparsegp.guide.predictors import Predictors
from pyro_sparsegp.program.traces import expectation

from .models import conditional, draws_of, observed, prepared, refused, restored

N, GROUPS, NOISE = 24, 3, 0.4


def _data():
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, N)[:, None]
    group = torch.arange(N) % GROUPS
    effects = torch.tensor([-0.8, 0.3, 0.9])
    y = torch.sin(5 * x[:, 0]) + 1.2 + effects[group] + NOISE * torch.randn(N, generator=generator)
    return x, group, y


def _linear(after=False):
    def levels():
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", GROUPS):
            return c, pyro.sample("g", dist.Normal(0.5 * c, 1.0))  # a prior's mean may be another's value

    def model(x, group, y=None):
        c, g = levels() if not after else (None, None)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(lengthscale=0.4), x, jitter=1e-8))
        if after:
            c, g = levels()
        observed(dist.Normal(f + c + g[group], NOISE), y)

    return model


def _exact(x, group, y):
    """The joint posterior of c, the groups and f, and the evidence."""
    levels = torch.cat([torch.ones(N, 1), torch.nn.functional.one_hot(group, GROUPS).double()], 1)
    down = torch.eye(1 + GROUPS)
    down[1:, 0] = 0.5
    prior = down @ torch.diag(torch.tensor([4.0] + [1.0] * GROUPS)) @ down.T
    joint = torch.block_diag(prior, kernels.RBF(lengthscale=0.4)(x))
    to_data = torch.cat([levels, torch.eye(N)], 1)
    evidence = to_data @ joint @ to_data.T + NOISE**2 * torch.eye(N)
    gain = torch.linalg.solve(evidence, to_data @ joint).T
    log_evidence = dist.MultivariateNormal(torch.zeros(N), evidence).log_prob(y)
    return gain @ y, joint - gain @ to_data @ joint, log_evidence, to_data


def _step(model, family, data, steps=1, lr=0.02, **kwargs):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family, **kwargs)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO())
    return guide, [svi.step(*data) for _ in range(steps)]


FAMILIES = [
    families.SVGP(14, trainable=False),
    families.SGPR(14, trainable=False),
    families.OrthogonalInducing(8, 6, trainable=False),
    families.CoupledPrecision(14, trainable=False),
    families.Exact(),
]


@pytest.mark.parametrize(
    ("family", "after"),
    [(FAMILIES[0], False), (FAMILIES[0], True), *((family, i == 1) for i, family in enumerate(FAMILIES[1:]))],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_the_first_step_of_a_linear_gaussian_model_is_at_its_evidence(family, after):
    data = x, group, _ = _data()
    mean, covariance, log_evidence, to_data = _exact(*data)
    guide, losses = _step(_linear(after), family, data, 3)
    assert set(guide.joint.field) == {"c", "g", "f"}
    # a low rank takes a step to be exact
    assert losses[0] == pytest.approx(-log_evidence.item(), abs=0.05 if guide.joint.followed else 2e-3)
    torch.testing.assert_close(-torch.tensor(losses[1:]), log_evidence.expand(2), rtol=0.0, atol=2e-3)
    q = guide.posterior(x, group)["f"]
    torch.testing.assert_close(q.mean.detach(), mean[4:], rtol=0.0, atol=2e-3)
    torch.testing.assert_close(q.variance.detach(), covariance.diagonal()[4:], rtol=0.01, atol=0.0)
    torch.testing.assert_close(guide.median(*data)["c"], mean[0], rtol=0.0, atol=2e-3)
    draws = predict(guide.model, guide, x, group, num_samples=300, joint=False)
    level = draws["f"] + draws["c"].reshape(-1, 1) + draws["g"].reshape(300, GROUPS)[:, group]
    sd = (to_data @ covariance @ to_data.T).diagonal().sqrt()
    torch.testing.assert_close(level.std(0), sd, rtol=0.25, atol=0.0)
    for name, exact in (("c", covariance[0, 0]), ("f", covariance[4, 4])):
        assert draws[name].reshape(300, -1)[:, 0].std().item() == pytest.approx(exact.sqrt().item(), rel=0.2)


def _counts(x, group, y=None, _likelihood=dist.Poisson):
    s = pyro.sample("s", dist.LogNormal(-1.0, 0.7))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    mu = pyro.sample("mu", dist.Normal(1.0, 2.0))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(0.0, tau))
    f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.4), x, jitter=1e-8))
    observed(_likelihood((mu + a[group] + f).exp()), y)


def _mixed(rate):
    """Poisson densities whose parameters do not show the linear predictor."""
    return dist.MixtureSameFamily(dist.Categorical(torch.ones(1)), dist.Poisson(rate[..., None]))


def _count_data():
    x, group, y = _data()
    return x, group, torch.poisson(y.exp().clamp(max=20), generator=torch.Generator().manual_seed(1))


def _dense_laplace(x, group, y, s, tau):
    """log p(y | s, tau) by Laplace's approximation over the predictor's own N values, of which it is a density too."""
    one_hot = torch.nn.functional.one_hot(group, GROUPS).double()
    prior = s * kernels.RBF(0.4)(x) + 1e-8 * torch.eye(N) + 4.0 + tau**2 * one_hot @ one_hot.T
    eta = torch.full((N,), 1.0)
    for _ in range(100):
        rate = eta.exp()
        inner = torch.eye(N) + prior * rate
        eta = 1.0 + prior @ torch.linalg.solve(torch.eye(N) + rate[:, None] * prior, rate * (eta - 1) + y - rate)
    density = dist.Poisson(eta.exp()).log_prob(y).sum() - 0.5 * (eta - 1) @ torch.linalg.solve(prior, eta - 1)
    return density - 0.5 * torch.linalg.slogdet(inner)[1]


def _nested(guide, data):
    layout = Layout(guide.joint.field, {"f": 1})
    priors = dict.fromkeys(guide.joint.hyper, dist.LogNormal(0.0, 1.0))
    hyper = Hyperparameters(priors, dict.fromkeys(priors, torch.tensor(1.0)), guide.like)
    return Nested(guide, layout, guide.joint.links, hyper, partial(run_standardised, guide, data, {}))


def test_scores_of_a_field():
    """An intercept that is drawn and f integrated over its marginal would count their covariance as noise."""
    data, model = _data(), _linear()
    guide, _ = _step(model, families.SVGP(14, trainable=False), data)
    mean, covariance, _, to_data = _exact(*data)
    sd = ((to_data @ covariance * to_data).sum(-1) + NOISE**2).sqrt()
    exact = dist.Normal(to_data @ mean, sd).log_prob(data[-1]).mean().item()
    scores = diagnostics.predictive_scores(model, guide, *data, num_samples=400, seed=0)
    assert scores.summary.loc["log_score", "mean"] == pytest.approx(exact, abs=0.01)


def test_nested_laplace_is_the_dense_one_and_its_gradient_its_own():
    data = _count_data()
    guide, _ = _step(_counts, families.SVGP(N, trainable=False), data)
    assert guide.joint.hyper == ("s", "tau")
    nested, theta = _nested(guide, data), torch.tensor([-0.7, -0.3])
    found = nested.at(theta)
    s, tau = theta.exp()
    prior = dist.LogNormal(-1.0, 0.7).log_prob(s) + dist.HalfNormal(1.0).log_prob(tau) + theta.sum()
    assert found.value.item() == pytest.approx((_dense_laplace(*data, s, tau) + prior).item(), abs=2e-4)
    for i, move in enumerate(1e-4 * torch.eye(2)):
        slope = (nested.at(theta + move).value - nested.at(theta - move).value) / 2e-4
        assert found.slope[i].item() == pytest.approx(slope.item(), abs=2e-4)


def test_hyperparameters_start_at_the_mode_with_its_curvature():
    data = _count_data()
    guide = AutoSparseGP(_counts, families.SVGP(N, trainable=False))
    guide(*data)
    nested, mode = _nested(guide, data), guide.together.loc.detach()
    assert nested.at(mode).slope.abs().max() < 0.02
    root = guide.together.root
    value = [nested.at(mode + 0.3 * move).value for move in (torch.zeros(2), *root.T, *-root.T)]
    for up, down in ((1, 3), (2, 4)):  # F falls by half of a deviation's square
        assert (value[0] - 0.5 * (value[up] + value[down])).item() == pytest.approx(0.045, rel=0.1)


def _mean_and_noise(x, y=None, _both=0.0):
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    c = pyro.sample("c", dist.Normal(-1.0, 1.0))
    f = pyro.sample("f", GaussianProcess(s * kernels.Matern52(0.5), x))
    g = pyro.sample("g", GaussianProcess(0.5 * kernels.Matern52(0.5), x, mean=c))
    observed(dist.Normal(f, (g + _both * f).exp()), y)


def _noisy_data():
    generator = torch.Generator().manual_seed(2)
    x = torch.linspace(0, 1, 40)[:, None]
    return x, torch.sin(6 * x[:, 0]) + (x[:, 0] - 1.5).exp() * torch.randn(40, generator=generator)


@pytest.mark.parametrize(("model", "data"), [(_counts, _count_data), (_mean_and_noise, _noisy_data)])
def test_gradients_are_those_of_the_loss(model, data):
    data = data()
    # Hyperparameters move features, kernels and q(x), which is about values: each once.
    guide, _ = _step(model, families.SVGP(8), data, 3)
    loc = guide.together.loc

    def loss():
        pyro.set_rng_seed(3)
        return TraceQuadrature_ELBO().differentiable_loss(model, guide, *data)

    for parameter in (loc, guide.field.coefficients.loc):
        (slope,) = torch.autograd.grad(loss(), parameter)
        for i in range(len(parameter))[:2]:
            ends = []
            for sign in (1e-5, -1e-5):
                parameter.data[i] += sign
                ends.append(loss().item())
                parameter.data[i] -= sign
            assert slope[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-4)


def test_two_predictors_are_integrated_together():
    # Against draws of the same q; f is in both predictors, and so is what its basis leaves out.
    data, model = _noisy_data(), partial(_mean_and_noise, _both=0.7)
    guide, _ = _step(model, families.SVGP(1), data)
    assert guide.joint.links == {"y": {"loc": "identity", "scale": "log"}}
    pyro.set_rng_seed(0)
    with torch.no_grad():
        exact = torch.tensor([TraceQuadrature_ELBO().loss(model, guide, *data) for _ in range(20)]).mean()
        drawn = torch.tensor([Trace_ELBO().loss(model, guide, *data) for _ in range(200)])
    assert exact.item() == pytest.approx(drawn.mean().item(), abs=4 * drawn.std().item() / 200**0.5 + 0.3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_mean_and_its_noise_do_not_diverge(seed):
    x, y = _noisy_data()
    y = y + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(seed))
    losses = torch.tensor(_step(_mean_and_noise, families.SVGP(8), (x, y), 60)[1])
    assert losses[-20:].mean() < losses[0] + 1
    assert (losses < losses[0] + 6).all()


def test_steps_of_hyperparameters_are_natural_gradients():
    torch.manual_seed(0)
    root = torch.tensor([[2.0, 0.0], [0.5, 1.0]])
    q = DrawnGaussian(torch.randn(2), root, rate=0.1)
    loc, noise = q.loc.detach().clone(), torch.randn(2)
    curved = torch.diag(torch.tensor([1.0, 3.0]))
    with recording(loc) as record:
        drawn = q(noise)
        loss = 0.5 * (drawn.value - loc) @ curved @ (drawn.value - loc) + drawn.densities_of(noise).sum()
    record.differentiate(loss)
    record.step(1.0)
    pull = root.T @ curved @ root @ noise
    outer = torch.outer(pull, noise)
    half = outer.tril(-1) + 0.5 * outer.diagonal().diag()
    change = root @ half / (1 + noise.square().sum())
    size = (change.diagonal() / root.diagonal()).square().max()
    torch.testing.assert_close(q.root, root - 0.1 * change / (1 + size).sqrt())
    torch.testing.assert_close(q.loc.data, loc - root @ pull * 0.1 / (1 + pull.square().mean()).sqrt())


def test_mini_batches_keep_the_widths_of_all_rows():
    data = _data()

    def model(x, group, y):
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", GROUPS):
            g = pyro.sample("g", dist.Normal(0.5 * c, 1.0))
        plate = pyro.plate("data", N, subsample_size=12)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(lengthscale=0.4), x[plate.indices], jitter=1e-8))
        with plate as rows:
            pyro.sample("y", dist.Normal(f + c + g[group[rows]], NOISE), obs=y[rows])

    guide, _ = _step(model, families.SVGP(12, trainable=False), data, 60)
    pyro.set_rng_seed(0)
    draws = draws_of(guide, "c", *data)
    assert draws.std().item() == pytest.approx(_exact(*data)[1][0, 0].sqrt().item(), rel=0.2)


def test_q_follows_what_hyperparameters_and_inducing_inputs_move():
    """Held about u, or w, its bound is hundreds of nats below the best where these move by a step or a deviation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 1, generator=generator)
    data = x, torch.sin(6 * x[:, 0]) + 2 + 0.5 * torch.randn(2000, generator=generator)

    def model(x, y):
        mu, length = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("length", dist.LogNormal(-1.0, 1.0))
        f = pyro.sample("f", GaussianProcess(2 * kernels.RBF(length), x))
        observed(dist.Normal(mu + f, 0.5), y)

    guide, _ = _step(model, families.SVGP(12), data, 0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO())
    for _ in range(2):
        svi.step(*data)  # Adam moves all inducing inputs by its rate
        nested, mode = _nested(guide, data), guide.together.mean.detach()
        for move in (-1.0, 0.0, 1.0):
            theta = mode + move * guide.together.tril[0].detach()
            with poutine.condition(data={"length": theta.exp()[0]}):
                loss = TraceQuadrature_ELBO().loss(model, guide, *data)
            assert nested.at(theta).value - theta[0] + loss == pytest.approx(0.0, abs=0.5)


def test_rows_of_a_first_batch_count_once():
    """Each in the place of a hundred would be data of a tenth of the noise."""
    x, _, y = _data()

    def model(x, y, size):
        s, noise = pyro.sample("s", dist.LogNormal(0.0, 1.0)), pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.4), x))
        observed(dist.Normal(1.0 + f, noise), y, x, size)

    guides = [AutoSparseGP(model, families.SVGP(6)) for _ in range(2)]
    for guide, size in zip(guides, (N, 100 * N)):
        guide(x, y, size)
    for one, other in zip(*(guide.together.state_dict().values() for guide in guides)):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.0)


def test_what_is_held_by_a_handler_is_refused_by_name():
    data = _data()
    guide, _ = _step(_linear(), families.SVGP(8), data)
    for call in (guide, partial(TraceQuadrature_ELBO().loss, guide.model, guide)):
        with (
            poutine.condition(data={"c": torch.tensor(3.0)}),
            pytest.raises(ValueError, match=r"site 'c'.*independent"),
        ):
            call(*data)
    held = AutoSparseGP(_linear(), families.SVGP(8), independent=("c",))
    held(*data)
    assert set(held.joint.field) == {"g", "f"}
    with poutine.condition(data={"c": torch.tensor(3.0)}):
        assert held(*data)["c"] == 3


def test_a_handler_may_hold_a_scale():
    data = _count_data()
    guide, _ = _step(_counts, families.SVGP(8), data)
    with poutine.condition(data={"s": torch.tensor(3.0)}), torch.no_grad():
        sites = poutine.trace(guide).get_trace(*data).nodes
    assert sites["s"]["value"] == 3.0
    torch.testing.assert_close(sites["f"]["fn"].process.variance, torch.full((N,), 3.0))
    explained = sites["f"]["fn"].features[0].square().sum(-1)  # of a basis under that scale
    torch.testing.assert_close(explained, torch.full((N,), 3.0), atol=0.01, rtol=0.0)


def test_a_scale_of_one_prior_beside_f_is_named():
    def model(x, y=None):
        with poutine.scale(scale=0.5):
            a = pyro.sample("a", dist.Normal(0.0, 2.0))
        observed(dist.Normal(a + pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x)), 0.3), y)

    with pytest.warns(UserWarning, match=r"poutine.scale weighs them by 0.5 and 1.0: scale the data alone, or all"):
        AutoSparseGP(model, families.SVGP(6))(torch.rand(9, 1), torch.randn(9))


def test_independent_latents_have_posteriors_of_their_own(monkeypatch):
    data = _data()
    guide, losses = _step(_linear(), families.SVGP(8), data, independent=True)
    assert guide.joint.field == {}
    assert guide.scales.c < 0.2 * _exact(*data)[1][0, 0].sqrt()  # the mean field's, given all others
    assert math.isfinite(losses[0])
    refused("independent must be", AutoSparseGP, _linear(), families.SVGP(8), independent="c")
    monkeypatch.setattr(start, "couple", lambda *args: torch.linalg.cholesky(-torch.eye(2)))  # a start that ends late
    with pytest.warns(UserWarning, match=r"mode of .* was not found"):
        assert not _step(_counts, families.SVGP(8), _count_data())[0].joint.hyper


def test_a_copy_and_a_loaded_guide_are_the_guide():
    data = _count_data()
    guide, _ = _step(_counts, families.SVGP(8), data, 2)
    loaded, seen = restored(guide, _counts, families.SVGP(8)), []
    for each in (guide, loaded, copy.deepcopy(guide)):
        pyro.set_rng_seed(5)
        seen.append(torch.cat([each.draw(*data)[name].reshape(-1) for name in ("mu", "a", "f", "s")]))
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(seen[2], seen[0])
    svi = SVI(_counts, loaded, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    assert math.isfinite(svi.step(*data))


@pytest.mark.quick("InverseGamma | StudentT | Uniform | Independent")
@pytest.mark.parametrize(
    "prior",
    [
        dist.HalfCauchy(1.0),
        dist.InverseGamma(1.0, 1.0),
        dist.LogNormal(0.0, 10.0),
        dist.StudentT(1.5),
        dist.Uniform(0.0, 1e6),
        dist.HalfCauchy(torch.ones(2)).to_event(1),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_heavy_priors_start_everywhere(prior):
    x, _, y = _data()

    def model(x, y):
        scale = pyro.sample("scale", prior)
        f = pyro.sample("f", GaussianProcess((0.01 + scale.abs().sum()) * kernels.RBF(0.4), x))
        observed(dist.Normal(1.0 + f, NOISE), y)

    start = init_to_centre({"name": "scale", "fn": prior, "infer": {}})
    draws = prior.sample(torch.Size([999])).sort(0).values
    assert ((draws[50] <= start) & (start <= draws[-50])).all()
    _, losses = _step(model, families.SVGP(8), (x, y), 10)
    assert -min(losses) == pytest.approx(-losses[0], abs=2)


@pytest.mark.parametrize("num", [pytest.param(150, marks=pytest.mark.slow), 24])
def test_a_length_far_from_the_data_is_no_plateau(num):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, 1, generator=generator)
    y = torch.sin(12 * x[:, 0]) + 0.2 * torch.randn(num, generator=generator)

    def model(x, y=None):
        length = pyro.sample("length", dist.Uniform(0.01, 100.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        scale = pyro.sample("scale", dist.HalfNormal(2.0)) if num == 150 else 1.0
        f = pyro.sample("f", GaussianProcess(scale**2 * kernels.RBF(length), x))
        observed(dist.Normal(f, noise), y)

    guide, _ = _step(model, families.SVGP(20), (x, y))
    assert 0.1 < guide.median(x, y)["length"] < 0.3 > guide.median(x, y)["noise"]
    if num == 150:
        there = AutoSparseGP(model, families.SVGP(20), start=None)
        lines = fit(model, there, (x, y), steps=100, progress=False).notes
        assert re.match(r"a second start found a mode that is [1-9].* nats higher, at length = 0\.", lines[-1])


def _wide(x, y=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 100.0))
    s = pyro.sample("s", dist.HalfNormal(2.0))
    f = pyro.sample("f", GaussianProcess(s**2 * kernels.RBF(0.4), x))
    observed(dist.Normal(mu + f, NOISE), y)


@pytest.mark.slow  # quick: test_a_fit_says_what_has_not_converged
def test_a_check_names_the_latents_that_have_not_converged():
    x, _, y = _data()
    guide, _ = _step(_wide, families.SVGP(8), (x, 50 + y), 30)
    assert guide.check(x, 50 + y) == []
    guide.together.loc.data += 1.5 * guide.together.root[0, 0]
    guide.together.root *= 0.6
    told = r"'s': the mean is [12].* off, and the interval is 1\.[4-9] times too narrow, .*Train longer"
    assert re.match(told, guide.check()[0])
    apart, _ = _step(_wide, families.SVGP(8), (x, 50 + y), 40, independent=True)
    lines = apart.check(x, 50 + y)
    assert any(re.match(r"'mu': .*[1-9][0-9].\d times too narrow.* Remove independent=True", line) for line in lines)
    point, _ = _step(_wide, families.SVGP(8), (x, 50 + y), 20, point_estimates=["mu"])
    assert re.match(r"'f': .* ([3-9]|1\d)\.\d times too narrow.* 'mu' as known. Remove 'mu' from", point.check()[-1])
    refused(r"training arguments, check\(x, y\)", guide.check, x)
    (line,) = guide.check(x, y.masked_fill(torch.arange(N) == 3, math.nan))
    assert "(1 of 24 values, the first at 3) is not finite" in line
    assert "not the rows" in guide.check(x + 0.1, y)[0]


@pytest.mark.slow  # quick: test_check.py::test_widths_are_compared_where_q_is_normal
def test_a_check_has_the_moments_of_the_posterior(monkeypatch):
    data, seen, lines = _data(), [], Compared.lines
    monkeypatch.setattr(Compared, "lines", lambda self, *args: (seen.append(self), lines(self, *args))[1])
    guide, _ = _step(_linear(), families.SVGP(N, trainable=False), data, 60)
    assert guide.check(*data) == []
    loc, sd = _exact(*data)[0], _exact(*data)[1].diagonal().sqrt()
    for name, rows in {"c": slice(0, 1), "g": slice(1, 1 + GROUPS), "f": slice(1 + GROUPS, None)}.items():
        for moment, expected in zip(moments_of([seen[0].moments(seen[0].best)], torch.ones(1))[name], (loc, sd)):
            torch.testing.assert_close(moment, expected[rows], atol=1e-3, rtol=0)
        mean, wide = seen[0]._of_q()[name]  # by draws, of f at single latents' draws
        assert ((mean - loc[rows]) / sd[rows]).abs().max() < 0.3
        torch.testing.assert_close(wide, sd[rows], atol=0, rtol=0.25)
    monkeypatch.setattr("pyro_sparsegp.guide.check.ALL_ROWS", 12)  # of which the curvature is; the mean is of all
    guide.check(*data)
    mean, sds = moments_of([seen[1].moments(seen[1].best)], torch.ones(1))["c"]
    assert mean.item() == pytest.approx(loc[0].item(), abs=1e-3)
    assert sds.item() == pytest.approx(sd[0].item(), rel=0.1)


def test_a_step_that_gains_nothing_is_not_told(monkeypatch, few_draws):
    """Where Laplace's approximation breaks down at one draw, its slope there is of any size."""
    data = _data()[0], _data()[2]

    def broken(*args):
        found, noise = drawn(*args)
        found[0].slope.add_(1e3)
        return found, noise

    monkeypatch.setattr("pyro_sparsegp.guide.check.drawn", broken)
    guide, _ = _step(_wide, families.SVGP(8), data, 30)
    assert guide.check(*data) == []


def test_a_check_of_points_constant_entries_and_another_dtype(few_draws):
    x, group, y = _data()

    def model(x, group, y=None):
        mu, a = pyro.sample("mu", dist.Normal(0.0, 9.0)), pyro.sample("a", dist.Normal(0.0, 3.0))
        root = pyro.sample("root", dist.LKJCholesky(2, 1.5))
        prior = dist.MultivariateNormal(torch.zeros(2).float(), torch.eye(2).float())
        b = (root @ pyro.sample("b", prior).double())[group % 2]
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        observed(dist.Normal(mu + a * x[:, 0] + f + b, NOISE), y)

    guide, _ = _step(model, families.SVGP(8), (x, group, y), 30, point_estimates=["mu"])
    lines = "".join(guide.check())
    assert "nan" not in lines
    assert re.search(r"'f': the interval is [1-9].* 'mu' as known. Remove 'mu' from point_estimates=", lines)


def test_a_check_finds_a_second_mode_and_missing_inducing_points(few_draws):
    x, _, y = _data()

    def model(x, y=None):
        b = pyro.sample("b", dist.StudentT(5.0, 0.3, 2.0))
        f = pyro.sample("f", GaussianProcess(0.1 * kernels.RBF(0.2), x))
        observed(dist.Normal(b**2 + 3 * f, 0.1), y)

    guide, _ = _step(model, families.SVGP(3, trainable=False), (x, y), 5)
    lines = "".join(guide.check(x, y))
    assert re.search(r"there is a second mode, 0.* nats lower, at b = -|a second start found a mode", lines)
    assert re.search(r"'f': 3 inducing points are too few. They cost about [1-9]", lines)


def test_the_search_can_be_left_out():
    x, _, y = _data()
    guide = AutoSparseGP(
        _wide, families.SVGP(8), init_loc_fn=init_to_value(values={"s": torch.tensor(0.5)}), start=None
    )
    guide(x, y)
    assert guide.together.mean.exp().item() == pytest.approx(0.5)
    assert set(guide.joint.field) == {"mu", "f"}
    outside = {"init_loc_fn": init_to_value(values={"s": torch.tensor(-1.0)})}
    wrong = {
        "start must be": {"start": "map"},
        "independent names": {"independent": ["nosuch"]},
        "starts site 's'": outside,
    }
    for message, options in wrong.items():
        refused(message, prepared, _wide, families.SVGP(8), x, y, **options)


def test_a_fit_says_what_has_not_converged():
    x, _, y = _data()
    fitted = {}
    for independent in (False, True):
        guide = AutoSparseGP(_wide, families.SVGP(8), independent=independent)
        options = {"steps": 100 if independent else 30, "optim": pyro.optim.Adam({"lr": 0.05}), "progress": False}
        fitted[independent] = fit(_wide, guide, (x, 50 + y), **options).notes
    assert fitted[False] == ()
    assert any(re.match(r"'s': .* Remove independent=True", line) for line in fitted[True])


@pytest.mark.quick("SVGP")
@pytest.mark.parametrize("family", [families.SVGP(8), families.SGPR(8)], ids=["SVGP", "SGPR"])
def test_a_mixture_is_a_likelihood_of_a_field(family, few_draws):
    guides, losses = zip(
        *(_step(partial(_counts, _likelihood=of), family, _count_data(), 5) for of in (dist.Poisson, _mixed))
    )
    assert [guide.joint.links["y"] for guide in guides] == [{"rate": "log"}, {"f": "value"}]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-6, atol=0)
    x, _, y = _data()

    def model(x, y=None):
        mu, noise = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("noise", dist.HalfNormal(1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        normals = dist.Normal((mu + f)[:, None], torch.stack([noise, noise + 2.0]))
        observed(dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.9, 0.1])), normals), y)

    y = y + 3 * (torch.arange(N) % 9 == 4)
    guide, _ = _step(model, family, (x, y), 5)  # not log-concave
    assert not any("cannot judge" in line for line in check(guide, (x, y), {}, kind=Glance))


@pytest.mark.quick("prior0 | prior3")
@pytest.mark.parametrize(
    "prior",
    [dist.Uniform(-50.0, 10.0), dist.HalfNormal(10.0), dist.LogNormal(0.0, 10.0), dist.Normal(0.0, 1.0).mask(False)],
)
def test_f_follows_an_intercept_of_another_prior(prior):
    x, _, y = _data()
    y = 5 + y
    is_log = isinstance(prior, dist.LogNormal)  # predictors are affine in its logarithm
    level, into = (dist.Normal(0.0, 10.0), torch.log) if is_log else (prior, torch.as_tensor)

    def model(x, y=None):
        mu = into(pyro.sample("mu", prior))
        f = pyro.sample("f", GaussianProcess(4.0 * kernels.RBF(0.4), x))
        observed(dist.Normal(mu + f, NOISE), y)

    grid, covariance = torch.linspace(-12, 22, 3400), 4.0 * kernels.RBF(0.4)(x) + NOISE**2 * torch.eye(N)
    grid = grid[level.support.check(grid)]
    weights = dist.MultivariateNormal(torch.zeros(N), covariance).log_prob(y - grid[:, None]) + level.log_prob(grid)
    evidence = weights.logsumexp(0).item() + math.log(34 / 3399)
    mean = (weights := weights.softmax(0)) @ grid
    sd = (weights @ (grid - mean).square()).sqrt()
    guide, losses = _step(model, families.SVGP(12), (x, y), 80)
    assert sum(losses[-40:]) / 40 == pytest.approx(-evidence, abs=0.3)
    other = restored(guide, model, families.SVGP(12))
    draws = predict(model, other, x, num_samples=400, joint=False)
    for each in (into(draws["mu"]).reshape(-1), draws["f"].reshape(400, -1)[:, 0]):  # f is what mu leaves
        assert each.std().item() == pytest.approx(sd.item(), rel=0.12)
    assert into(draws["mu"]).mean().item() == pytest.approx(mean.item(), abs=0.2 * sd.item())


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_makes_a_prior_flat_where_data_are(padded):
    x, group, y = _data()

    def model(x, y=None):
        with pyro.plate("groups", GROUPS):
            g = pyro.sample("g", dist.Normal(0.0, 1.0).mask(torch.arange(GROUPS) > 0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        with poutine.mask(mask=group > 0 if padded else group < 3):
            observed(dist.Normal(f + g[group], NOISE), y)

    guide, _ = _step(model, families.SVGP(8), (x, y))
    assert (list(guide.joint.field), guide.joint.hyper) == ((["g", "f"], ()) if padded else (["f"], ("g",)))


@pytest.mark.slow  # quick: test_f_follows_an_intercept_of_another_prior
def test_each_hyperparameter_is_followed_where_predictors_are_nearest_to_linear():
    def model(x, y=None):  # log a + b log(1 + 9x) + f
        a, b = pyro.sample("a", dist.Exponential(1.0)), pyro.sample("b", dist.Exponential(1.0))
        f = pyro.sample("f", GaussianProcess(0.2 * kernels.RBF(0.4), x))
        observed(dist.Poisson(a * (1 + 9 * x[:, 0]) ** b * f.exp()), y)

    x, _, y = _count_data()
    guide, losses = _step(model, families.SVGP(x.clone(), trainable=False), (x, y), 70)
    assert (guide.joint.intercepts, guide.joint.unconstrained) == (("a", "b"), ("a",))
    _, others = _step(model, families.SGPR(x.clone(), trainable=False), (x, y), 70)
    assert sum(losses[30:]) / 40 == pytest.approx(sum(others[30:]) / 40, abs=0.3)


def test_an_intercept_may_have_any_unit():
    x, _, y = _data()

    def model(unit, y=None):
        mu = pyro.sample("mu", dist.StudentT(3.0, 0.0, 10.0 * unit))
        f = pyro.sample("f", GaussianProcess(4.0 * unit**2 * kernels.RBF(0.4), x))
        observed(dist.Normal(mu + f, NOISE * unit), y)

    q = [_step(model, families.SVGP(12), (unit, unit * (5 + y)), 1)[0].together for unit in (0.01, 1.0, 1e5)]
    for each, unit in zip((q[0], q[2]), (0.01, 1e5)):  # of the second the width was 5
        torch.testing.assert_close(each.root, unit * q[1].root, rtol=1e-3, atol=0)
        torch.testing.assert_close(each.mean, unit * q[1].mean, rtol=0.02, atol=0)


@pytest.mark.quick("follows")
@pytest.mark.parametrize("case", ["held", "cut points", "follows"])
def test_f_follows_what_moves_its_likelihood(case, few_draws):
    """Where not what f is beside but f − log r is held as r moves, q(r) is a third as wide as the posterior."""
    x, _, y = _count_data()
    y = (y > 2) + 1 * (y > 8) if case == "cut points" else y

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x, mean=1.0))
        if case == "cut points":
            ordered = [dist.transforms.OrderedTransform()]
            r = pyro.sample("r", dist.TransformedDistribution(dist.Normal(torch.zeros(2), 3.0).to_event(1), ordered))
            return observed(dist.OrderedLogistic(f, r), y)
        r = pyro.sample("r", dist.LogNormal(1.0, 1.0))
        return observed(dist.NegativeBinomial(r, logits=f - r.log() if case == "held" else f), y)

    guide, losses = _step(model, families.SVGP(8), (x, y), 60)
    assert guide.joint.intercepts == ("r",) * (case != "held")
    assert sum(losses[-40:]) / 40 < losses[0] + 0.3
    assert guide.check(x, y) == []


def test_a_latent_that_f_is_multiplied_by_is_a_hyperparameter():
    x, _, y = _data()

    def model(x, y=None):
        k, mu = pyro.sample("k", dist.Normal(1.0, 0.5)), pyro.sample("mu", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        observed(dist.Normal(mu + k * f, NOISE), y)

    guide, _ = _step(model, families.SVGP(12), (x, y), 100)
    assert (guide.joint.hyper, {*guide.joint.field}) == (("k",), {"mu", "f"})
    grid = torch.linspace(-2, 4, 600)
    covariance = grid[:, None, None] ** 2 * kernels.RBF(0.4)(x) + 4 + NOISE**2 * torch.eye(N)
    weights = dist.MultivariateNormal(torch.zeros(N), covariance).log_prob(y) + dist.Normal(1.0, 0.5).log_prob(grid)
    mean = (weights := weights.softmax(0)) @ grid
    sd = (weights @ (grid - mean).square()).sqrt()
    assert guide.together.mean.item() == pytest.approx(mean.item(), abs=0.3 * sd.item())
    assert guide.together.tril.item() == pytest.approx(sd.item(), rel=0.2)

    def product(x, y=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        f, g = (pyro.sample(name, GaussianProcess(kernels.RBF(0.4), x)) for name in "fg")
        observed(dist.Normal(mu + f * g, NOISE), y)

    assert {*_step(product, families.SVGP(6), (x, y))[0].joint.field} == {"mu", "f", "g"}


@pytest.mark.parametrize("is_plain", [True, False])
def test_what_a_prior_is_made_of_is_a_hyperparameter(is_plain):
    x, _, y = _data()

    def model(x, y=None):
        m = pyro.sample("m", dist.Normal(-1.0, 1.0))
        normal = dist.Normal(m, 0.3)  # which is no parameter of what it is transformed to
        s = pyro.sample(
            "s", dist.LogNormal(m, 0.3) if is_plain else dist.TransformedDistribution(normal, [ExpTransform()])
        )
        observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x)), s), y)

    assert _step(model, families.SVGP(6), (x, y))[0].joint.hyper == ("m", "s")


def test_widths_of_a_first_batch_become_those_of_all_rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(10_000, 1, generator=generator)
    y = torch.sin(12 * x[:, 0]) + 0.5 * torch.randn(len(x), generator=generator)

    def model(x, y, size):
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        observed(dist.Normal(f, noise), y, x, size)

    guide, _ = _step(model, families.SVGP(15), (x[:50], y[:50], len(x)))
    first = guide.together.tril.item()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    for rows in torch.randint(len(x), (150, 50), generator=generator):
        svi.step(x[rows], y[rows], len(x))
    # fourteen times that of all rows; steps of R bounded by the gradient, not by its own change, left 0.66 of it
    assert guide.together.tril.item() < 0.45 * first


def test_zeros_from_elsewhere():
    x, _, y = _count_data()

    def model(x, y=None):
        mu, q = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("q", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        observed(dist.ZeroInflatedPoisson((mu + f).exp(), gate_logits=q), y)

    data = x, y * (torch.arange(N) % 4 > 0)
    guide, _ = _step(model, families.SVGP(8), data, 30)
    assert {*guide.joint.field} == {"mu", "q", "f"}
    assert guide.check(*data) == []


@pytest.mark.parametrize("prior", [partial(dist.StudentT, 3.0), pytest.param(dist.Normal, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_a_followed_intercept_stands_large_rates(prior, dtype):
    torch.set_default_dtype(dtype)
    x, _, y = (part.to(dtype) if part.is_floating_point() else part for part in _data())

    def model(x, y=None):
        mu, s = pyro.sample("mu", prior(0.0, 10.0)), pyro.sample("s", dist.HalfNormal(2.0))
        f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.3), x))
        g = pyro.sample("g", GaussianProcess(0.3 * kernels.Matern32(0.1), x))
        observed(dist.Normal(mu + f + g, NOISE), y)

    _, losses = _step(model, families.SVGP(12), (x, y), 80, lr=0.1)
    assert max(losses[-20:]) < losses[0] + 10  # it was 10⁴ and more, or an error of dtypes


@pytest.mark.parametrize("name", ["z", "f", "f alone"])
def test_non_centred_latents_have_the_posterior_of_centred_ones(name):
    x, group, y = _data()

    def model(centred, y=None):
        t = pyro.sample("t", dist.HalfNormal(2.0))
        inside, outside = (t, 1.0) if centred else (torch.tensor(1.0), t)
        of_z, by_z, of_f, by_f = (inside, outside, 1.0, 1.0) if name == "z" else (1.0, 1.0, inside, outside)
        z = torch.zeros(GROUPS)
        if name != "f alone":
            with pyro.plate("groups", GROUPS):
                z = pyro.sample("z", dist.Normal(0.0, of_z))
        f = pyro.sample("f", GaussianProcess(of_f**2 * kernels.RBF(0.4), x))
        observed(dist.Normal(by_f * f + by_z * z[group], NOISE), y)

    family = families.SVGP(8, trainable=False)
    found = [_step(model, family, (centred, y), 20) for centred in (True, False)]
    torch.testing.assert_close(torch.tensor(found[1][1]), torch.tensor(found[0][1]), rtol=1e-5, atol=1e-4)
    if name == "z":  # z is a deterministic site then, in no plate of data
        reparametrised = poutine.reparam(model, config={"z": LocScaleReparam(0.0)})
        assert _step(reparametrised, family, (True, y), 20)[1] == pytest.approx(found[0][1], rel=1e-5)
    assert found[0][0].joint.factors == {}
    assert found[1][0].joint.factors[name[0]]["t"] == pytest.approx([1.0])


def test_a_family_that_does_not_follow_a_factor_says_so():
    def model(outside, x, y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
        f = pyro.sample("f", GaussianProcess((1.0 if outside else s) ** 2 * kernels.RBF(0.4), x))
        observed(dist.Normal(s * f if outside else f, NOISE), y)

    x, _, y = _data()
    AutoSparseGP(model, families.OrthogonalInducing(8, 6))(False, x, y)
    with pytest.warns(UserWarning, match="which its family does not follow"):
        AutoSparseGP(model, families.OrthogonalInducing(8, 6))(True, x, y)


class _Quantile(dist.TorchDistribution):
    """An asymmetric Laplace density that a user wrote: of slopes 0.3/s on its left and 2.7/s on its right."""

    arg_constraints: ClassVar = {"f": constraints.real, "s": constraints.positive}
    support, normal_parameter = constraints.real, "f"

    def __init__(self, f, s, validate_args=None):
        self.f, self.s = torch.broadcast_tensors(f, torch.as_tensor(s))
        super().__init__(self.f.shape, validate_args=validate_args)

    def log_prob(self, value):
        return dist.AsymmetricLaplace(self.f, self.s, 3.0 * torch.ones_like(self.s)).log_prob(value)

    def expected_log_prob(self, value, variance):
        known = dist.AsymmetricLaplace(self.f, self.s, 3.0 * torch.ones_like(self.s))
        return expectation(known, value, variance)


def _spread(x):
    return pyro.sample("g", GaussianProcess(kernels.RBF(0.8), x)).exp()


@pytest.mark.quick("alone-Laplace-family1 | alone-_Quantile-family0 | beside a scale-_Quantile-family1")
@pytest.mark.parametrize("family", [families.SVGP(6, trainable=False), families.Exact()])
@pytest.mark.parametrize("kind", [_Quantile, dist.Laplace])
@pytest.mark.parametrize("spreads", [False, True], ids=["alone", "beside a scale"])
def test_a_closed_expectation_serves_in_a_field(kind, spreads, family, monkeypatch):
    """In the distribution's own parameter, at nodes of another beside it: kinks, too, have no error of nodes."""
    x, _, y = _data()
    seen = []

    def model(x, y=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        observed(kind(mu + f, _spread(x) if spreads else 0.3), y)

    expected = Predictors.expected

    def kept(self, eta, covariance, num_nodes):
        for one, other in [pair for pair in covariance if pair[0] != pair[1]]:  # few steps leave them apart
            covariance[one, other] = 0.6 * (covariance[one, one] * covariance[other, other]).sqrt()
        seen.append((eta, covariance, expected(self, eta, covariance, num_nodes)))
        return seen[-1][-1]

    guide, _ = _step(model, family, (x, y))
    monkeypatch.setattr(Predictors, "expected", kept)
    for num_nodes in (20, 40):
        TraceQuadrature_ELBO(num_nodes).loss(model, guide, x, y)
        eta, covariance, value = seen[-1]
        # a dense sum over standardised predictors, the scale's first
        (own, *others), at = sorted(eta, key=lambda place: place[1] in ("s", "scale")), torch.linspace(-8, 8, 4001)
        mean, variance, scale = eta[own], covariance[own, own], torch.tensor(0.3)
        share = torch.softmax(-0.5 * at**2, 0)
        total, points = 0.0, zip(at[::40], torch.softmax(-0.5 * at[::40] ** 2, 0)) if spreads else [(0.0, 1.0)]
        for t, weight in points:
            moved, rest = mean, variance
            for other in others:
                (across,) = [c for pair, c in covariance.items() if {*pair} == {own, other}]
                sd = covariance[other, other].sqrt()
                moved, rest = mean + across / sd * t, variance - across.square() / sd.square()
                scale = (eta[other] + sd * t).exp()
            each = kind(moved + rest.sqrt() * at[:, None], scale).log_prob(y)
            total = total + weight * (share @ each).sum()
        assert value.item() == pytest.approx(total.item(), abs=1e-3)


@pytest.mark.slow  # quick: test_structure.py::test_kinks_have_exact_expectations_or_are_told_of
def test_a_density_with_kinks_has_the_curvature_of_its_expectation():
    x, _, y = _data()

    def model(x, y=None):
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 1.0))
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        observed(dist.Laplace(mu + f, scale), y)

    guide, _ = _step(model, families.SVGP(6, trainable=False), (x, y))
    nested = _nested(guide, (x, y))
    theta = torch.tensor([-0.6])
    found, (predictors, _) = nested.at(theta), nested.predictors(theta)
    parts = predictors.rows, predictors.residuals, predictors.eta
    rows, rho, level = (part["y", "loc", 0].detach() for part in parts)
    m, root = torch.zeros(7, requires_grad=True), torch.eye(7).requires_grad_()
    optimiser = torch.optim.LBFGS([m, root], max_iter=500, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def minus_bound():
        optimiser.zero_grad()
        sd = ((rows @ root.tril()).square().sum(1) + rho[:, 0].square()).sqrt()
        d = (y - level - rows @ m) / sd
        far = d * (2 * torch.special.ndtr(d) - 1) + 2 * (-0.5 * d**2).exp() / math.sqrt(2 * math.pi)  # E|y − η| / sd
        expected = -(sd * far).sum() / theta.exp() - N * (2 * theta.exp()).log()
        divergence = 0.5 * (root.tril().square().sum() + m @ m - 7) - root.diagonal().abs().log().sum()
        (loss := (divergence - expected).sum()).backward()
        return loss

    optimiser.step(minus_bound)
    prior = dist.LogNormal(-1.0, 1.0).log_prob(theta.exp()) + theta
    assert found.value.item() == pytest.approx((prior - minus_bound()).item(), abs=1e-5)
    covariance = (root.tril() @ root.tril().T).detach()
    torch.testing.assert_close(found.precision.common_covariance, covariance, atol=1e-4, rtol=0)
    slope = (nested.at(theta + 1e-4).value - nested.at(theta - 1e-4).value) / 2e-4
    assert found.slope.item() == pytest.approx(slope.item(), abs=0.01)
    assert guide.check(x, y) == []


def test_a_failed_search_starts_anew():
    data = _count_data()
    guide, _ = _step(_counts, families.SVGP(8), data)
    nested, theta = _nested(guide, data), torch.tensor([-1.0, -0.5])
    expected = nested.tried(theta).value
    nested.last = nested.last[0] + 1e3, nested.last[1]  # whose rates overflow
    torch.testing.assert_close(nested.tried(theta).value, expected)


def test_exact_starts_at_the_noise_of_all_rows(monkeypatch):
    """Some rows, each counted twice, say that there is no noise where f can meet them all."""
    monkeypatch.setattr("pyro_sparsegp.guide.search.MOST_VALUES", 30)
    x = torch.rand(60, 3)
    y = (5 * x[:, 0]).sin() + 0.3 * torch.randn(60)

    def model(x, y=None):
        lengths = pyro.sample("lengths", dist.LogNormal(0.0, 2.0).expand([3]).to_event(1))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 3.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(lengths), x))
        observed(dist.Normal(f, noise), y)

    (guide := AutoSparseGP(model, families.Exact()))(x, y)
    assert 0.2 < guide.median(x, y)["noise"] < 0.5


@pytest.mark.parametrize("moves", [False, True])
def test_exact_is_no_field_of_a_batch_or_of_inputs_that_move(moves):
    x, _, y = _data()

    def model(x, y=None, size=None):
        mu, length = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("length", dist.LogNormal(0.0, 0.3))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x / length if moves else x))
        observed(dist.Normal(mu + f, NOISE), y, x, size)

    guide, loss = AutoSparseGP(model, families.Exact()), TraceQuadrature_ELBO().loss_and_grads
    if moves:
        loss(model, guide, x, y)
        assert not guide.joint.field
        return
    with pytest.raises(ValueError, match=f"trains on all data at once; site 'y' observes 10 of the {N} rows"):
        loss(model, guide, x[:10], y[:10], size=N)
    loss(model, new := AutoSparseGP(model, families.Exact()), x, y)
    assert {*new.joint.field} == {"mu", "f"}


def test_factors_that_leave_rows_out():
    """A density in two factors, each of which is 0 at the other's rows, is that in one."""

    def model(x, y, shares):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x, jitter=1e-8))
        with pyro.plate("data", len(x)):
            for i, share in enumerate(shares):
                pyro.factor(f"part {i}", share * (y * (mu + f) - (mu + f).exp()))

    x, _, y = _count_data()
    shares = torch.ones(1, len(x)), torch.stack([y > 1, y <= 1])
    one, two = (_step(model, families.SVGP(8), (x, y, share), steps=4)[1] for share in shares)
    assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("follows", [True, False])
def test_exact_of_many_rows_follows_an_intercept(follows, monkeypatch):
    """Without a field q(b) is a hyperparameter's, and f is exact given b; where sites are not exact it is told of."""
    monkeypatch.setattr(search, "MOST_VALUES", 20)
    x = torch.rand(40, 1)

    def model(x, y=None):
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        return observed(dist.Normal(b + f, 0.2) if follows else dist.Poisson((b + f).exp()), y)

    y = 1 + torch.sin(6 * x[:, 0]) + 0.2 * torch.randn(40) if follows else torch.ones(40)
    guide = AutoSparseGP(model, families.Exact())
    with nullcontext() if follows else pytest.warns(UserWarning, match="'b' and GP sites .* under Exact.* Take SVGP"):
        guide(x, y)
    if follows:
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
        for _ in range(30):
            svi.step(x, y)
        cover = kernels.RBF(0.3)(x) + 0.04 * torch.eye(40)
        ones = torch.ones(40)
        exact = (1 / 25 + ones @ torch.linalg.solve(cover, ones)) ** -0.5
        drawn = draws_of(guide, "b", x[:1])
        assert guide.joint.hyper == ("b",)
        assert abs(drawn.std() / exact - 1) < 0.25


def test_a_mask_beside_an_enumerated_latent():
    """What a mask leaves out of one site it leaves out of the next one's density, too."""
    x, seen = torch.rand(12, 1), torch.arange(12) % 2 > 0
    one, two = torch.randn(2, 12)

    def model(x, one, two):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("d", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
            with poutine.mask(mask=seen):
                pyro.sample("one", dist.Normal(f + b + 2 * z, 0.3), obs=one)
            pyro.sample("two", dist.Normal(f + b - 2 * z, 1.0), obs=two)

    guide = AutoSparseGP(model, families.SVGP(6))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    for _ in range(10):
        svi.step(x, one, two)
    loss = svi.evaluate_loss(x, one, two)
    guide.eval()
    with torch.no_grad():
        joint = torch.tensor([Trace_ELBO().loss(model, guide, x, one, two) for _ in range(100)])
    assert guide.joint.field
    assert abs(loss - joint.mean()) < 5 * joint.std() / 10


BENT = {
    "relu": lambda f, b, t: dist.Normal(f + torch.relu(b) * t, 0.2),
    "comparison": lambda f, b, t: dist.Normal(f + (b > 0) * t, 0.2),
    "scale": lambda f, b, t: dist.Normal(f + b, torch.where(f + b > 0, 0.3, 1.0)),
}


@pytest.mark.filterwarnings("ignore:the bound changes", "ignore:latents 'b' and GP sites")
@pytest.mark.parametrize("kind", BENT)
def test_what_bends_at_a_kink_is_no_predictor(kind):
    x = torch.linspace(0, 1, 30)[:, None]

    def model(x, y=None):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(0.5 * kernels.RBF(0.2), x))
        return observed(BENT[kind](f, b, x[:, 0]), y)

    for family in (families.SVGP(9), families.SGPR(10)):
        guide = AutoSparseGP(model, family)
        guide(x, torch.sin(6 * x[:, 0]))
        assert not guide.joint.field


def test_what_a_first_call_hid_of_a_predictor_is_told_of():
    x, times, y = torch.rand(12, 1), torch.ones(12), torch.ones(12)

    def model(x, times, y=None):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        return observed(dist.Poisson((f * (1 + times * b)).exp()), y)

    guide = AutoSparseGP(model, families.SVGP(6))
    guide(x, 0 * times, y)
    assert guide.joint.field
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    for _ in range(3):
        svi.step(x, times, y)
    with pytest.warns(UserWarning, match="densities of site 'y' depend on.*Make a new guide"):
        svi.step(x, times, y)


def test_rows_of_a_start_are_none_of_a_pattern(monkeypatch):
    """Of treatments that alternate a start at some rows has both."""
    monkeypatch.setattr(search, "_MOST_ROWS", 40)
    x, treated = torch.rand(120, 1), torch.arange(120) % 2 * 1.0

    def model(x, treated, y=None):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        return observed(dist.Poisson((f * (1 + treated * b)).exp()), y)

    guide = AutoSparseGP(model, families.SVGP(6))
    guide(x, treated, torch.ones(120))
    assert guide.joint.field or guide.joint.hyper


@pytest.mark.parametrize("kind", ["hyperparameter", "member"])
def test_a_latent_below_f(kind):
    """Its prior is a density of f's, as a likelihood is, in the bound, draws and trees."""
    x = torch.linspace(0, 1, 12)[:, None]

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        c = pyro.sample("c", (dist.Normal if kind == "member" else dist.LogNormal)(f.mean(), 0.5))
        return observed(dist.Poisson((f + c).exp() if kind == "member" else c * f.exp()), y)

    y = torch.tensor([1.0, 4, 7, 5, 6, 2, 0, 1, 0, 2, 1, 0])
    guide = AutoSparseGP(model, families.SVGP(x))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    for _ in range(30):
        svi.step(x, y)
    loss = torch.tensor([svi.evaluate_loss(x, y) for _ in range(50)])
    tree = diagnostics.to_datatree(model, guide, x, y, num_samples=300)
    guide.eval()
    with torch.no_grad():
        joint = torch.tensor([Trace_ELBO().loss(model, guide, x, y) for _ in range(100)])
    weights = torch.as_tensor((tree.sample_stats.log_q - tree.sample_stats.lp).values)
    assert guide.joint.field
    for draws in (joint, weights):
        assert abs(loss.mean() - draws.mean()) < 5 * math.hypot(
            draws.std() / len(draws.flatten()) ** 0.5, loss.std() / 7
        )
    if kind == "member":  # given f, which the tree's coefficients are
        f = torch.as_tensor(
            diagnostics.to_datatree(model, guide, x, y, num_samples=5, include_f=True, seed=1).posterior.f.values
        )
        tree = diagnostics.to_datatree(model, guide, x, y, num_samples=5, seed=1)
        prior = dist.Normal(f.mean(-1), 0.5).log_prob(torch.as_tensor(tree.posterior.c.values))
        torch.testing.assert_close(torch.as_tensor(tree.log_prior.c.values), prior, atol=1e-4, rtol=1e-4)


OBSERVED = {
    "difference": lambda f, a, y: (dist.Normal(f, 0.3), y - a),
    "scaled": lambda f, a, y: (dist.StudentT(4.0, torch.zeros(12), 0.2), y - f - a),
}


@pytest.mark.parametrize("kind", OBSERVED)
def test_what_is_observed_may_be_made_of_latents(kind):
    x = torch.linspace(0, 1, 12)[:, None]
    y = torch.sin(5 * x[:, 0])

    def model(x, y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        fn, value = OBSERVED[kind](f, a, y)
        observed(fn, value)

    guide = AutoSparseGP(model, families.SVGP(x))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    for _ in range(10):
        svi.step(x, y)
    loss = svi.evaluate_loss(x, y)
    guide.eval()
    with torch.no_grad():
        joint = torch.tensor([Trace_ELBO().loss(model, guide, x, y) for _ in range(100)])
    assert guide.joint.field.keys() == {"a", "f"}
    assert abs(loss - joint.mean()) < 5 * joint.std() / 10 + 1e-6


@pytest.mark.parametrize("family", [families.SVGP, families.SGPR])
def test_a_posterior_whose_mean_is_made_of_latents(family):
    """f = a + x b + d, of which d is the GP: its posterior counts what a and b may be, as their kernels do."""
    x, new = torch.linspace(0, 1, 12)[:, None], torch.tensor([[0.05], [0.52], [1.2]])
    kernel, y = kernels.RBF(0.3), torch.sin(5 * x[:, 0])

    def model(x, y=None, values=False):
        def mean(x):
            return a + x[..., 0] * (b[0] - b[1])

        a, b = pyro.sample("a", dist.Normal(0.0, 2.0)), pyro.sample("b", dist.Normal(torch.ones(2), 0.5).to_event(1))
        f = pyro.sample("f", GaussianProcess(kernel, 1.0 * x, mean=mean(x) if values else mean))
        pyro.sample("y", dist.Normal(f, 0.2).to_event(1), obs=y)

    guide = AutoSparseGP(model, family(x))
    SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO()).step(x, y)
    exact = conditional(kernel + 4.0 + 0.5 * kernels.Linear(), x, y, 0.2, new)
    posterior = guide.posterior(new)["f"]
    with torch.inference_mode():
        f = guide.posterior(new + 0.0)["f"]
        torch.testing.assert_close((f.mean, f.covariance_matrix), exact, rtol=0, atol=1e-5)
    for f in (posterior, guide.posterior(x)["f"].at(new), guide.posterior(new, values=True)["f"]):
        torch.testing.assert_close((f.mean, f.covariance_matrix), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(posterior.variance, exact[1].diagonal(), rtol=0, atol=1e-5)
    (d,) = posterior.components  # effects are of the kernel's summands alone
    gain = torch.linalg.solve((kernel + 4.0 + 0.5 * kernels.Linear())(x) + 0.04 * torch.eye(12), kernel(x, new)).mT
    torch.testing.assert_close(
        (d.mean, d.covariance_matrix), (gain @ y, kernel(new) - gain @ kernel(x, new)), rtol=0, atol=1e-5
    )
