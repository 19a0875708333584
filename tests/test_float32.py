"""float32 beside float64: the jitter and distances of kernel matrices, and guides that change their dtype."""

import copy
import re
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.bases.inducing import InducingPoints
from pyro_sparsegp.families import SGPR, SVGP, CoupledPrecision, Exact, MeanFieldAdditive, OrthogonalInducing, SparseEP
from pyro_sparsegp.gaussians import NaturalGaussian
from pyro_sparsegp.guide.nested import Nested, Optimum
from pyro_sparsegp.inference import ExpectationPropagation
from pyro_sparsegp.numerics.linalg import default_jitter

from .fuzz import CLEAN, run
from .models import additive, data, gaussian, observed, one_function, prepared, restored, train, trained

NOISE = 0.01


def precise_data(length=0.3, num=1000):
    """2-D draws of an RBF process with little noise, in numbers that float32 has, and some of the inputs."""
    x = torch.rand(num, 2).float().double()
    y = GaussianProcess(kernels.RBF(length), x, jitter=1e-10).rsample() + NOISE * torch.randn(num)
    return x, y.float().double(), x[:100]


def bound_and_gradients(x, y, z, start_length, start_noise):
    def learned(x, y=None):
        length = pyro.param("length", x.new_tensor(start_length), constraint=dist.constraints.positive)
        noise = pyro.param("noise", x.new_tensor(start_noise), constraint=dist.constraints.positive)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x))
        observed(dist.Normal(f, noise), y)

    pyro.clear_param_store()
    guide = prepared(learned, SGPR(z), x, y)
    bound = -TraceQuadrature_ELBO(2).differentiable_loss(learned, guide, x, y)
    parameters = [*guide.parameters(), *dict(pyro.get_param_store().named_parameters()).values()]
    gradients = [grad.double() for grad in torch.autograd.grad(bound, parameters)]
    return bound.item(), gradients, guide.posterior(x)["f"].mean.detach().double()


def test_the_bound_its_gradient_and_means_are_those_of_float64():
    """Gradients where they are large: near the data's own length they are a small difference of large numbers, of which
    rounding is a half on some machines.
    """
    x, y, z = precise_data()
    bound, _, mean = bound_and_gradients(x, y, z, 0.3, NOISE)
    single, _, single_mean = bound_and_gradients(x.float(), y.float(), z.float(), 0.3, NOISE)
    assert single == pytest.approx(bound, abs=30)  # 105 at the jitter of 1e-6, of some 2,900
    assert (single_mean - mean).abs().max() < NOISE
    _, gradients, _ = bound_and_gradients(x, y, z, 0.36, 2 * NOISE)
    _, found, _ = bound_and_gradients(x.float(), y.float(), z.float(), 0.36, 2 * NOISE)
    hyperparameters = [(one, other) for one, other in zip(found, gradients) if not other.dim()]
    assert len(hyperparameters) == 2
    for one, other in hyperparameters:
        assert (one - other).abs() < 0.1 * other.abs()  # 0.045 at worst of five draws of the data


def test_a_start_is_as_wide_as_that_of_float64():
    """Where rounding moves F by 1e-3 nats, and its slope by 0.1."""
    rows, found = precise_data(num=200)[:2], []

    def model(x, y):
        return gaussian(pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0)) * kernels.RBF(0.3), NOISE)(x, y)

    for dtype in (torch.float64, torch.float32):
        found.append(prepared(model, SGPR(30), *[part.to(dtype) for part in rows]).together.tril.item())
    assert found[1] == pytest.approx(found[0], rel=0.2)


def test_inducing_features_in_float32():
    x, _, z = precise_data()
    kernel = 2.0 * kernels.RBF(0.5)
    basis = InducingPoints([z.float()], jitter=1e-6)
    single = basis(kernel, None, "f")
    double = InducingPoints([z])(kernel, 1e-6, "f")
    assert single.factor.dtype == torch.float32
    torch.testing.assert_close(single.factor.double(), double.factor, rtol=0, atol=1e-6)
    torch.testing.assert_close(single(x.float())[0].double(), double(x)[0], rtol=0, atol=5e-3)


class Warped(kernels.RBF):
    """A network in float32 takes no other inputs."""

    def __init__(self, network):
        super().__init__(0.5)
        self.network = network

    def scale(self, x):
        return super().scale(self.network(x))


def test_kernels_that_hold_networks_are_left_in_their_dtype():
    x, y = data(num=30, dtype=torch.float32)
    network = torch.nn.Linear(2, 2).float()

    def model(x, y=None):
        pyro.module("network", network)
        return gaussian(Warped(network))(x, y)

    guide = trained(model, SVGP(6), x, y, steps=2)
    assert guide.gps.f.basis.jitter == default_jitter(torch.float32)


CONVERTED = [SVGP(20), OrthogonalInducing(10, 10), MeanFieldAdditive(12), SGPR(20)]


@pytest.mark.quick("double-SVGP | double-SGPR | float-MeanFieldAdditive | double-OrthogonalInducing")
@pytest.mark.parametrize("family", CONVERTED, ids=lambda family: type(family).__name__)
@pytest.mark.parametrize("start", [torch.float32, torch.float64], ids=["double", "float"])
def test_a_conversion_keeps_the_posterior(family, start):
    x, y = data(num=60)
    length = torch.tensor([0.7, 0.7])
    model = gaussian(additive(torch.tensor(1.0), length), 0.2)
    guide = AutoSparseGP(model, family)
    other = torch.float64 if start == torch.float32 else torch.float32
    train(model, guide, x.to(start), y.to(start), steps=10, lr=0.1)
    before = TraceQuadrature_ELBO(2).loss(model, guide, x.to(start), y.to(start))
    q = guide.posterior(x.to(start))["f"]
    guide.to(other)
    after = TraceQuadrature_ELBO(2).loss(model, guide, x.to(other), y.to(other))
    assert after == pytest.approx(before, abs=0.02)
    p = guide.posterior(x.to(other))["f"]
    torch.testing.assert_close(p.mean.double(), q.mean.double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(p.variance.double(), q.variance.double(), rtol=1e-2, atol=1e-5)


def test_a_conversion_comes_after_inducing_inputs_have_moved():
    """Where K_ZZ has the rank 1, values at former inputs have the condition 3e8, too much for float32: means were .44
    off.
    """
    assert run(463).outcome == CLEAN


@pytest.mark.parametrize("family", [SVGP(7), MeanFieldAdditive(6), CoupledPrecision(6)], ids=type)
def test_a_conversion_of_families_beside_an_intercept(family):
    x, y = data(num=40)

    def model(x, y=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()).to(x), 1.0))
        f = pyro.sample("f", GaussianProcess(additive(torch.tensor(1.0), torch.tensor([0.7, 0.7])), x))
        return observed(dist.Normal(f + mu, 0.2), y)

    guide = AutoSparseGP(model, family)
    train(model, guide, x, y, steps=4, lr=0.1)
    q = guide.posterior(x)["f"]
    guide.float()
    p = guide.posterior(x.float())["f"]
    assert ((p.mean.double() - q.mean).abs() < 0.02 * q.variance.sqrt()).all()


@pytest.mark.parametrize("beside", [False, True])
def test_sums_belong_to_the_present_inputs_before_a_conversion(beside):
    x, y = data(num=23)

    def model(x, y=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()).to(x), 1.0)) if beside else 0.0
        f = pyro.sample("f", GaussianProcess(kernels.RBF(3.0) + kernels.RBF(30.0), x))
        return observed(dist.Normal(f + mu, 0.2), y)

    guide = AutoSparseGP(model, SVGP(7))
    train(model, guide, x, y, steps=2, lr=0.1)
    q = guide.posterior(x)["f"]
    guide.float()
    p = guide.posterior(x.float())["f"]
    if not beside:
        inputs = guide.gps.f.basis.inputs[0].detach().flatten()
        torch.testing.assert_close(guide.gps.f.coefficients.inputs, inputs)
    assert ((p.mean.double() - q.mean).abs() < 0.02 * q.variance.sqrt()).all()


def test_a_conversion_keeps_the_sites_of_expectation_propagation():
    x, y = data(num=40)
    model = gaussian(kernels.RBF(0.7))
    guide = AutoSparseGP(model, SparseEP(15))
    ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.0}))
    before = ep.sweep(x.float(), y.float(), num=20)
    guide.double()
    assert ep.evaluate_loss(x, y) == pytest.approx(before, abs=0.02)


def test_states_of_before_keep_their_jitter():
    x, y = data(num=60)
    model = gaussian(kernels.RBF(0.7))
    for dtype in (torch.float32, torch.float64):
        guide = prepared(model, SVGP(20), x.to(dtype), y.to(dtype))
        state = copy.deepcopy(guide.state_dict())
        assert state["_extra_state"]["modules"]["f"]["basis"].pop("jitter") == guide.gps.f.basis.jitter
        for old in (AutoSparseGP(model, SVGP(20)), guide):
            old.load_state_dict(state)
            assert old.gps.f.basis.jitter == default_jitter(dtype)
        new = restored(guide, model, SVGP(20))
        assert new.gps.f.basis.jitter == default_jitter(dtype)


def test_a_joint_posterior_at_rows_is_restored():
    x = torch.linspace(0, 3, 30).float()[:, None]

    def softmax(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), x).expand([3]).to_event(1))
        return observed(dist.Categorical(logits=f.mT), y)

    guide = prepared(softmax, Exact(), x, x[:, 0].floor().clamp(max=2.0))
    means = [each.posterior(x)["f"].mean for each in (guide, restored(guide, softmax, Exact()))]
    torch.testing.assert_close(*means, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*not far above the jitter and rounding")
def test_natural_steps_on_precise_data():
    """Where float32 rounds all variances to their floor, natural steps still see how precise the data are."""
    x = torch.linspace(0, 1, 200)[:, None].float()
    y = (6 * x[:, 0]).sin() + 0.001 * torch.randn(200)

    model = gaussian(kernels.RBF(torch.tensor(0.3)), 0.001)
    guide = AutoSparseGP(model, SVGP(16))
    losses = train(model, guide, x, y.float(), steps=80, lr=0.01, loss=TraceQuadrature_ELBO())
    assert max(losses[60:]) < 0
    assert (guide.posterior(x, y.float())["f"].mean - (6 * x[:, 0]).sin()).abs().max() < 0.01


@pytest.mark.filterwarnings("ignore:I . G of natural steps")
def test_rounding_of_a_precision_moves_no_mean():
    """With noise of 0.001 the mean is where the gradient is 0, whatever float32 leaves of I + G; also where L moves."""
    x, z = torch.rand(150, 5), torch.linspace(0, 1, 22)[:, None]
    lower = torch.linalg.cholesky(kernels.RBF(0.3)(z) + 1e-6 * torch.eye(22))
    phi = torch.cat([torch.linalg.solve(lower, kernels.RBF(0.3)(z, x[:, c : c + 1])).mT for c in range(5)], -1)
    y = torch.sin(6 * x).sum(-1) + 0.001 * torch.randn(150)
    squares = []
    for dtype in (torch.float64, torch.float32):
        module = NaturalGaussian([110], (), torch.zeros((), dtype=dtype), rate=1.0)
        features, values, anchor = (part.to(dtype) for part in (phi, y, torch.block_diag(*[lower] * 5)))
        for step in range(10):
            mean, change = (q := module((1 + 0.001 * step) * anchor)).moments([features])
            fit = (mean - values).square().sum() * 1e6
            (0.5 * (fit + 1e6 * change.sum()) + q.kl()).backward()
        squares.append(fit.item())
    assert squares[1] == pytest.approx(squares[0], rel=0.03)  # 0.08 above where r is kept in the place of m


@pytest.mark.filterwarnings("ignore:.*not far above the jitter and rounding")
@pytest.mark.filterwarnings("ignore::pyro_sparsegp.numerics.linalg.NumericalWarning")  # which says: take float64
@pytest.mark.parametrize("family", [MeanFieldAdditive(22), CoupledPrecision(22)])
def test_low_rank_steps_on_precise_data(family):
    """Where a step's precision has no Cholesky factor in float32, nothing of it is taken; rounding moves no mean."""
    torch.set_default_dtype(torch.float32)
    x = torch.rand(150, 5)
    y = torch.sin(6 * x).sum(-1)
    y = y - y.mean() + 0.003 * torch.randn(150)

    def model(x, y):
        scale = pyro.param("scale", torch.ones(()))
        return gaussian(sum(scale * kernels.RBF(0.3)[c] for c in range(5)), 0.003)(x, y)

    losses = train(model, AutoSparseGP(model, family), x, y, steps=40, lr=1e-4, loss=TraceQuadrature_ELBO())
    assert min(losses) == pytest.approx(losses[-1], abs=25)  # 90 where the mean is found anew of (I + G)m
    assert losses[-1] < -350  # 2e6 with parts of factors


def test_effects_of_a_coupled_precision_keep_their_width():
    """The level that effects share has a precision of 1 beside one of N/s² = 70,000, in 24 bits."""
    x = torch.rand(60, 3)

    precise = gaussian(sum(kernels.Matern52(torch.tensor(0.5).float())[i] for i in range(3)), 0.03)
    guide = AutoSparseGP(precise, CoupledPrecision(8, rank=8))
    y = (4 * x).sin().sum(-1)
    train(precise, guide, x.float(), y.float(), steps=60, lr=0.0, loss=TraceQuadrature_ELBO(2))
    found = guide.posterior(x.float(), x[:, 0].float())["f"].components[0].variance.double()
    parts = [kernels.Matern52(0.5)(part) for part in x.split(1, -1)]
    whole = sum(parts) + 0.03**2 * torch.eye(60)
    exact = (parts[0] - parts[0] @ torch.linalg.solve(whole, parts[0])).diagonal()
    torch.testing.assert_close(found.sqrt(), exact.sqrt(), rtol=0.15, atol=0.0)


@pytest.mark.parametrize("size", [100.0, 300.0])
def test_expectation_propagation_of_data_far_from_the_prior(size):
    """At f = 0 each log p is -(size/0.3)²/2, of which float32's rounding is more than a prior's deviation bends it."""
    x = torch.linspace(0, 1, 60)[:, None]
    y = size * torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(60)
    found, model = [], gaussian(kernels.RBF(0.3), 0.3)
    for dtype in (torch.float64, torch.float32):
        rows = x.to(dtype), y.to(dtype)
        guide = AutoSparseGP(model, SparseEP(rows[0][::4], trainable=False))
        steps = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.0}))
        for _ in range(4):
            loss = steps.step(*rows)
        found.append((guide.posterior(rows[0])["f"].marginals, loss))
    (exact, best), (q, loss) = found
    assert ((q.mean - exact.mean).abs() < 0.05 * exact.stddev).all()
    torch.testing.assert_close(q.stddev.double(), exact.stddev, rtol=1e-3, atol=0)
    assert loss == pytest.approx(best, rel=3e-4)


@pytest.mark.parametrize("family", [SVGP(10), SGPR(10)])
def test_data_as_precise_as_the_jitter_are_told_of(family):
    x = torch.linspace(0, 1, 10)[:, None]
    with pytest.warns(UserWarning, match="noise variance of site .y., 1.0e-08, is not far above the jitter"):
        train(model := gaussian(kernels.RBF(0.2), 1e-4), AutoSparseGP(model, family), x, x[:, 0], steps=1)
    train(model := gaussian(kernels.RBF(0.2), 1e-4, jitter=1e-12), AutoSparseGP(model, family), x, x[:, 0], steps=1)


@pytest.mark.parametrize("family", [SVGP(10), SGPR(10), Exact()])
def test_precise_data_in_float32_are_told_of(family):
    """Rounding of Φ is as large as a noise of 1e-3: the bound is 30 nats low, sd up to 2.7 times."""
    x = torch.linspace(0, 1, 20)[:, None].float()
    with pytest.warns(UserWarning, match="rounding of GP site 'f'.*Take GaussianProcess.* in float64"):
        prepared(gaussian(kernels.RBF(0.2), 1e-3), family, x, x[:, 0])
    prepared(gaussian(kernels.RBF(0.2), 1e-2), family, x, x[:, 0])


@pytest.mark.parametrize(("sds", "told"), [([0.1, 1e3], False), ([0.1, 0.1], True)])
def test_the_jitter_is_that_of_each_output(sds, told):
    """Outputs of sd 1 and 1e4 in one site: the second's jitter is no noise of the first."""
    x, scale = torch.linspace(0, 1, 10)[:, None], torch.tensor([1.0, 1e4])

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(scale**2 * kernels.RBF(0.3), x).to_event(1))
        return observed(dist.Normal(f.mT, torch.tensor(sds)).to_event(1), y)

    y = scale * torch.stack([torch.sin(6 * x[:, 0]), torch.cos(6 * x[:, 0])], -1)
    with pytest.warns(UserWarning, match="not far above the jitter") if told else nullcontext():
        prepared(model, Exact(), x, y)


@pytest.mark.parametrize(("family", "num"), [(SVGP(16), 500), (Exact(), 7)])  # many rows, or many features
def test_draws_at_many_inputs_need_no_warning(family, num, recwarn):
    x, new = torch.rand(200, 1).float(), torch.rand(num, 1).float()
    guide = prepared(gaussian(kernels.Matern32(0.3)), family, x, torch.sin(8 * x[:, 0]))
    guide.posterior(new)["f"].rsample()
    assert [str(each.message) for each in recwarn if "jitter" in str(each.message)] == []


@pytest.mark.parametrize("noise", [0.1, 0.01])
def test_joint_draws_are_as_wide_as_their_marginals(noise):
    """Under Exact what is left of a value is rounding alone: neither it nor the jitter it needs is variance."""
    x, new = torch.rand(2, 200, 2).float()
    kernel, y = kernels.RBF(0.5), torch.sin(8 * x[:, 0])
    model = one_function(kernel, lambda f: dist.Normal(f, noise))
    guide = AutoSparseGP(model, Exact())
    guide(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q, drawn = guide.posterior(new)["f"], predict(model, guide, new, num_samples=500)["f"]
    wide, at = x.double(), new.double()
    gram = kernel(wide) + noise**2 * torch.eye(200, dtype=torch.float64)
    exact = (kernel(at) - kernel(at, wide) @ torch.linalg.solve(gram, kernel(wide, at))).diagonal().sqrt()
    for draws in (drawn, q.rsample((500,))):
        assert abs((draws.std(0) / exact).mean() - 1) < 0.03


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exact_draws_at_its_own_rows(dtype):
    """Where f at the basis' own inputs leaves no residual, no warning and no loop of draws comes of the jitter."""
    x, runs = torch.linspace(0, 1, 30, dtype=dtype)[:, None], []
    kernel, y, noise = kernels.RBF(0.3), torch.sin(8 * x[:, 0]), 0.1

    def model(x, y=None):
        runs.append(len(x))
        return gaussian(kernel, noise)(x, y)

    guide = prepared(model, Exact(), x, y)
    runs.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = guide.posterior(x)["f"]
        draws = [predict(model, guide, x, num_samples=1000)["f"].double(), q.rsample((1000,)).double()]
    assert len(runs) < 100  # for each draw several
    wide = x.double()
    gram = kernel(wide)
    exact = gram - gram @ torch.linalg.solve(gram + noise**2 * torch.eye(30, dtype=torch.float64), gram)
    sd = exact.diagonal().sqrt()
    for each in draws:
        error = ((each.mT.cov() - exact) / (sd * sd[:, None])).abs().max()
        assert error < 5 * (2 / 1000) ** 0.5  # standard errors of a variance


@pytest.mark.slow
@pytest.mark.parametrize("start", [torch.float32, torch.float64])
def test_a_check_in_another_dtype_than_that_of_numbers(start, few_draws):
    """Priors of Python numbers have the default dtype, float64."""
    x = torch.linspace(0, 1, 30, dtype=start)[:, None]
    group, y = torch.arange(30) % 3, (6 * x[:, 0]).sin() + 0.2 * torch.randn(30, dtype=start)

    def model(x, y=None):
        scale, root = pyro.sample("scale", dist.LogNormal(0.0, 0.5)), pyro.sample("root", dist.LKJCholesky(2, 1.0))
        with pyro.plate("groups", 3):
            level = pyro.sample("level", dist.Normal(0.0, 1.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0)) + 0.1 * root[1, 0]
        f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.3), x))
        observed(dist.Normal(f + level[group] + slope, 0.2 * torch.ones(30)), y)

    guide = prepared(model, SVGP(10), x, y)
    assert "level" in guide.joint.field
    guide.float()
    assert not re.search("checked|nan|inf", "".join(guide.check()))


def test_rounded_gradients_leave_the_start_its_width():
    """With 512 inducing points gradients round by 0.15, and one-sided differences were up to 7 times too wide."""
    hessian, start = torch.tensor([[7.0, -12.0], [-12.0, 33.0]]).float(), torch.zeros(2).float()
    nested = Nested.__new__(Nested)
    nested.hyper = SimpleNamespace(units=torch.ones(2).float(), widths=torch.ones(2).float())
    generator = torch.Generator().manual_seed(0)

    def at(theta):
        noise = 0.3 * (torch.rand(2, generator=generator).float() - 0.5)
        return Optimum(theta, start.sum(), -hessian @ theta + noise, start, None, {})

    nested.at = at
    widths = torch.stack([nested.covariance(at(start)).diagonal().sqrt() for _ in range(20)])
    assert (widths / torch.linalg.inv(hessian).diagonal().sqrt()).log().abs().mean() < 0.1


def test_where_f_is_flat_a_hyperparameter_is_as_wide_as_its_prior():
    """Or bends upwards by rounding: a log variance of sd 5 draws e^10, at which factors fail."""
    nested, start = Nested.__new__(Nested), torch.zeros(2)
    nested.hyper = SimpleNamespace(units=torch.ones(2), widths=torch.tensor([0.5, 2.0]))
    nested.at = lambda theta: Optimum(theta, start.sum(), 0.1 * theta, start, None, {})
    assert torch.allclose(nested.covariance(nested.at(start)).diagonal().sqrt(), torch.tensor([0.75, 3.0]))


def test_a_probability_that_saturates_hides_no_predictor():
    """1 - Φ(6) is rounded in float32: such rows showed groups' effects as none of a linear predictor, and their scale
    collapsed to 0.001.
    """
    pyro.set_rng_seed(3)
    x, group = 3 * torch.rand(80, 1).float() - 1.5, torch.arange(80) % 5
    time = torch.cos(2 * x[:, 0]) + 0.5 * torch.randn(80).float()

    def model(x, time):
        base, sigma = pyro.sample("base", dist.Normal(torch.zeros(()).to(x), 2.0)), pyro.sample("sigma", HALF)
        tau = pyro.sample("tau", HALF)
        with pyro.plate("groups", 5):
            effect = pyro.sample("effect", dist.Normal(0.0, tau))
        mean = base + pyro.sample("f", GaussianProcess(kernels.RBF(1.0), x)) + effect[group]
        probs = 1 - dist.Normal(mean, sigma).cdf(time)
        observed(dist.Bernoulli(probs=probs), torch.ones(80).to(x), x)

    guide = AutoSparseGP(model, SVGP(8))
    guide(x, time)  # of predictors that are infinite at x = 0: densities are taken as they are, without a warning
    assert {"f", "effect"} <= {*guide.joint.field}
    assert guide.joint.drawn


HALF = dist.HalfNormal(torch.ones(()).float())
