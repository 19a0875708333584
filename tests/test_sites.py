"""Posteriors from Gaussian sites: closed forms, fixed points, state, errors."""

import copy
import gc
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import MultivariateNormal, constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    CollapsedOrthogonal,
    ComputationAware,
    ConditionalSGPR,
    Exact,
    ExactWeightSpace,
    SemiCollapsedOrthogonal,
    SiteFamily,
    WeightSpace,
)
from pyro_sparsegp.gaussians.sites import Sites, update, within_reach
from pyro_sparsegp.numerics.linalg import NumericalWarning
from pyro_sparsegp.program.reader import Reader

from .models import (
    assert_alike,
    bernoulli,
    conditional,
    data,
    gaussian,
    hermite,
    lbfgs,
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
from .test_theorems import KERNEL, NOISE, evidence, titsias

LIKELIHOODS = {
    "bernoulli": lambda f: dist.Bernoulli(logits=f),
    "poisson": lambda f: dist.Poisson(f.exp()),
    "gamma": lambda f: dist.Gamma(2.0, (-f).exp()),
    "negative_binomial": lambda f: dist.NegativeBinomial(5.0, logits=f),
}

CUT = {
    "student": lambda f: dist.StudentT(3.0, f, 0.2),
    "cauchy": lambda f: dist.Cauchy(f, 0.2),
    "laplace": lambda f: dist.Laplace(f, 0.3),
}

DONE = {"truncated": 0, "halved": 0, "converged": True}


def with_likelihood(likelihood, mean=None):
    return one_function(KERNEL, likelihood, mean=mean)


def observations(name, num=60):
    x, y = data({"bernoulli": bernoulli, "gamma": regression}.get(name, poisson), num)
    return x, y.abs() + 0.1 if name == "gamma" else y


def by_nodes(likelihood, y):
    """E log p(y | f) over f ~ N(mean, variance), by Gauss-Hermite quadrature."""
    nodes, weights = hermite(20)
    return lambda mean, variance: (
        likelihood(mean[:, None] + variance.sqrt()[:, None] * nodes).log_prob(y[:, None]) @ weights
    )


def best_bound(expected, x, z):
    """The bound's maximum over q(u) = N(m, LLᵀ) of inducing points z, by dense algebra and L-BFGS.

    :param expected: E log p(y | f) of each row, a function of the mean and the variance of f.
    """
    tril = torch.linalg.cholesky(KERNEL(z) + 1e-8 * KERNEL.diag(z).mean() * torch.eye(len(z)))
    phi = torch.linalg.solve_triangular(tril, KERNEL(z, x), upper=False).mT
    rest = KERNEL.diag(x) - phi.square().sum(-1)
    loc, below, log_diagonal = (torch.zeros(shape, requires_grad=True) for shape in (len(z), (len(z),) * 2, len(z)))

    def loss():
        root = below.tril(-1) + log_diagonal.exp().diag()
        total = expected(phi @ loc, rest + (phi @ root).square().sum(-1)).sum()
        divergence = 0.5 * (root.square().sum() + loc.square().sum() - len(z)) - log_diagonal.sum()
        return divergence - total

    how = {"max_iter": 400, "history_size": 50, "tolerance_change": 1e-10}
    return -lbfgs(loss, [loc, below, log_diagonal], **how).item()


def learned(x, y=None):
    """Regression with parameters everywhere: a mean, a scale, a length, a noise."""
    length = pyro.param("length", torch.tensor([0.4, 0.8]), constraint=constraints.positive)
    noise = pyro.param("noise", torch.tensor(NOISE), constraint=constraints.positive)
    level = pyro.param("level", torch.tensor(0.3))
    scale = pyro.param("scale", torch.tensor(1.5), constraint=constraints.positive)
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x, mean=lambda x: level + 0.0 * x[:, 0]))
    return observed(dist.Normal(f, noise), y)


def gradients(loss, model, guide, *args):
    """The gradient of a loss by the model's parameters."""
    loss.loss_and_grads(model, guide, *args)
    store = pyro.get_param_store()
    return {name: store._params[name].grad.clone() for name in ("length", "scale", "noise", "level")}


def test_sgpr_is_titsias_bound():
    x, y = data(num=80)
    z = x[:10] + 0.01
    guide = AutoSparseGP(gaussian(KERNEL, NOISE), SGPR(z, trainable=False), independent=True)
    bound = -TraceQuadrature_ELBO(2).loss(guide.model, guide, x, y)
    assert abs(bound - titsias(x, y, z)) < 1e-9 * abs(bound)
    assert guide.site_status == {"f": DONE | {"sites": 80, "exact": True}}
    # The dense posterior, at other inputs.
    new = torch.rand(7, 2)
    q = guide.posterior(new)["f"]
    kzz = KERNEL(z) + 1e-8 * KERNEL.diag(z).mean() * torch.eye(10)
    sigma = torch.linalg.inv(kzz + KERNEL(z, x) @ KERNEL(x, z) / NOISE**2)
    torch.testing.assert_close(q.mean, KERNEL(new, z) @ sigma @ KERNEL(z, x) @ y / NOISE**2, rtol=1e-6, atol=1e-7)
    middle = torch.linalg.inv(kzz) - sigma
    torch.testing.assert_close(
        q.covariance_matrix, KERNEL(new) - KERNEL(new, z) @ middle @ KERNEL(z, new), atol=1e-7, rtol=1e-5
    )


def test_sgpr_gradients_are_the_dense_bounds():
    x, y = data(num=50)
    z = x[:8] + 0.01
    guide = AutoSparseGP(learned, SGPR(z, trainable=False), independent=True)
    found = gradients(TraceQuadrature_ELBO(2), learned, guide, x, y)
    store = pyro.get_param_store()
    parameters = {name: store[name].detach().clone().requires_grad_() for name in found}
    k = parameters["scale"] * kernels.Matern32(parameters["length"])
    q = k(x, z) @ torch.linalg.solve(k(z) + 1e-8 * 1.5 * torch.eye(8), k(z, x))
    variance = parameters["noise"] ** 2
    mean = parameters["level"].expand(50)
    bound = MultivariateNormal(mean, q + variance * torch.eye(50)).log_prob(y)
    (-bound + (k.diag(x).sum() - q.trace()) / (2 * variance)).backward()
    for name, gradient in found.items():
        by_value = parameters[name].grad
        if name != "level":  # the store's leaves are unconstrained logarithms
            by_value = by_value * parameters[name].detach()
        torch.testing.assert_close(gradient, by_value, rtol=1e-5, atol=1e-6)


def test_collapsed_orthogonal_is_the_dense_bound():
    """Paper 1, eq. 30, in dense algebra."""
    x, y = data(num=60)
    z, o = x[:6] + 0.01, x[20:25] - 0.01
    guide = AutoSparseGP(
        gaussian(KERNEL, NOISE, jitter=1e-12), CollapsedOrthogonal(z, o, trainable=False), independent=True
    )
    bound = -TraceQuadrature_ELBO(2).loss(guide.model, guide, x, y)
    identity = torch.eye(60)

    def c(a, b):
        return KERNEL(a, b) - KERNEL(a, z) @ torch.linalg.solve(KERNEL(z), KERNEL(z, b))

    a = KERNEL(x, z) @ torch.linalg.solve(KERNEL(z), KERNEL(z, x)) + NOISE**2 * identity
    cff, cfv, cvv = c(x, x), c(x, o), c(o, o)
    mean = cvv @ torch.linalg.solve(cvv + cfv.mT @ torch.linalg.solve(a, cfv), cfv.mT @ torch.linalg.solve(a, y))
    covariance = cvv @ torch.linalg.solve(cvv + cfv.mT @ cfv / NOISE**2, cvv)
    b = cfv @ torch.linalg.solve(cvv, cfv.mT)
    dense = MultivariateNormal(cfv @ torch.linalg.solve(cvv, mean), a).log_prob(y)
    dense = dense - (cff - b @ torch.linalg.solve(b + NOISE**2 * identity, b)).trace() / (2 * NOISE**2)
    covariance = (covariance + covariance.mT) / 2
    dense = dense - torch.distributions.kl_divergence(
        MultivariateNormal(mean, covariance), MultivariateNormal(torch.zeros(5), cvv)
    )
    assert abs(bound - dense) < 1e-7 * abs(bound)
    alone = AutoSparseGP(gaussian(KERNEL, NOISE), SGPR(z, trainable=False), independent=True)
    union = AutoSparseGP(gaussian(KERNEL, NOISE), SGPR(torch.cat([z, o]), trainable=False), independent=True)
    bounds = [-TraceQuadrature_ELBO(2).loss(g.model, g, x, y) for g in (alone, guide, union)]
    assert bounds == sorted(bounds)
    assert bounds[1] - bounds[0] > 1


def test_exact_weight_space_is_bayesian_linear_regression():
    x, y = data(num=40)
    kernel = kernels.Linear(torch.tensor([1.0, 2.0])) + kernels.Constant(0.7)
    guide = AutoSparseGP(gaussian(kernel, NOISE), ExactWeightSpace(), independent=True)
    bound = -TraceQuadrature_ELBO(2).loss(guide.model, guide, x, y)
    assert abs(bound - evidence(x, y, kernel)) < 1e-9 * abs(bound)
    new = torch.rand(5, 2)
    q, (mean, covariance) = guide.posterior(new)["f"], conditional(kernel, x, y, NOISE, new)
    torch.testing.assert_close(q.mean, mean)
    torch.testing.assert_close(q.covariance_matrix, covariance, atol=1e-9, rtol=1e-6)
    assert len(list(guide.parameters())) == 0
    free, best = maximise(gaussian(kernel, NOISE), WeightSpace(), x, y)
    assert bound - 1e-3 < best <= bound + 1e-6
    assert free.gps.f.basis.sizes == (3,)
    refused("site 'f' has no finite features", prepared, gaussian(KERNEL), ExactWeightSpace(), x, y)


@pytest.mark.quick("poisson | negative_binomial")
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_iterated_sites_reach_the_optimum_of_a_free_posterior(name):
    x, y = observations(name)
    model = with_likelihood(LIKELIHOODS[name])
    z = x[:10] + 0.01
    guide = AutoSparseGP(model, SGPR(z, trainable=False), independent=True)
    elbo = TraceQuadrature_ELBO(20)
    losses = [elbo.loss_and_grads(model, guide, x, y) for _ in range(10)]
    best = best_bound(by_nodes(LIKELIHOODS[name], y), x, z)
    assert abs(-losses[-1] - best) < 1e-4
    assert guide.site_status["f"] == DONE | {"sites": 60, "exact": False}
    assert (
        abs(-elbo.loss(model, AutoSparseGP(model, SGPR(z, trainable=False, updates=25), independent=True), x, y) - best)
        < 1e-3
    )
    # Evaluation leaves q alone.
    with torch.no_grad():
        again = [elbo.loss(model, guide, x, y) for _ in range(3)]
    assert again[0] == again[1] == again[2]
    assert abs(again[0] - losses[-1]) < 1e-5


def test_a_prior_mean_is_a_shift_of_the_likelihood():
    x, y = observations("bernoulli", 30)
    family, losses = SGPR(x[:8] + 0.01, trainable=False), []
    for mean, shift in ((torch.tensor(1.5), 0.0), (None, 1.5)):
        model = with_likelihood(lambda f, shift=shift: dist.Bernoulli(logits=f + shift), mean)
        guide = AutoSparseGP(model, family, independent=True)
        losses.append([TraceQuadrature_ELBO(20).loss_and_grads(model, guide, x, y) for _ in range(15)])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-6, atol=1e-6)


def test_a_site_stays_where_it_is_when_the_prior_mean_moves():
    mean = torch.zeros(5, requires_grad=True)
    old, marginals = Sites.none(torch.rand(5, 1), ()), (torch.randn(5) - mean, torch.ones(5))
    sites = update(old, torch.randn(5), torch.rand(5) + 0.1, marginals, 0.7)
    (slope,) = torch.autograd.grad((mean + sites.linear / sites.precision).sum(), mean)
    torch.testing.assert_close(slope, torch.zeros(5))


def test_counts_far_from_the_prior_do_not_overflow():
    x, _ = data(num=60)
    y = torch.poisson(torch.exp(8 + x[:, 0]))
    model = with_likelihood(LIKELIHOODS["poisson"], mean=torch.tensor(-5.0))
    guide = AutoSparseGP(model, SGPR(40), independent=True)
    elbo = TraceQuadrature_ELBO(20)
    losses = [elbo.loss_and_grads(model, guide, x, y) for _ in range(30)]
    assert torch.tensor(losses).isfinite().all()
    q = guide.posterior(x)["f"]
    assert (q.mean - (8 + x[:, 0])).abs().mean() < 0.2


@pytest.mark.parametrize("actions", ["sparse", "random", "cg", "eigen"])
def test_bernoulli_with_all_actions_is_the_dense_newton_method(actions):
    x, y = observations("bernoulli", 40)
    family = ComputationAware(40, actions, tolerance=0.0, rate=1.0)
    guide = AutoSparseGP(with_likelihood(LIKELIHOODS["bernoulli"]), family, independent=True)
    for _ in range(14):
        guide(x, y)
    k = KERNEL(x)
    mean, variance = torch.zeros(40), k.diagonal()
    nodes, weights = hermite(20)
    for _ in range(40):  # f ← (K⁻¹ + Λ)⁻¹(Λm + ℓ'), Rasmussen and Williams, 2006, algorithm 3.1
        f = mean[:, None] + variance.sqrt()[:, None] * nodes
        p = torch.sigmoid(f)
        gradient, curvature = (y[:, None] - p) @ weights, (p * (1 - p)) @ weights
        gain = torch.linalg.solve(torch.eye(40) + k * curvature, k)
        mean, variance = gain @ (curvature * mean + gradient), gain.diagonal()
    q = guide.posterior(x)["f"]
    torch.testing.assert_close(q.mean, mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(q.variance, variance, atol=1e-6, rtol=1e-6)


def test_masked_rows_are_dropped_rows():
    x, y = data(num=50)
    missing = y.clone()
    missing[::3] = torch.nan

    def masked(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)), poutine.mask(mask=y.isfinite() if y is not None else torch.tensor(True)):
            return pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    kept = missing.isfinite()
    z, new = x[:8] + 0.01, torch.rand(6, 2)
    for family in (SGPR(z, trainable=False), ComputationAware(33, "eigen"), ComputationAware(33, "cg", tolerance=0.0)):
        whole, part = (
            AutoSparseGP(masked, family, independent=True),
            AutoSparseGP(gaussian(KERNEL, NOISE), family, independent=True),
        )
        elbo = TraceQuadrature_ELBO(2)
        assert abs(elbo.loss(masked, whole, x, missing) - elbo.loss(part.model, part, x[kept], y[kept])) < 1e-6
        torch.testing.assert_close(whole.posterior(new)["f"].mean, part.posterior(new)["f"].mean, atol=1e-7, rtol=1e-6)
        assert (whole.gps.f.sites.precision[::3] == 0).all()
    # A block without data is an action without effect.
    y[:] = torch.nan
    y[-1] = 0.0
    guide = AutoSparseGP(masked, ComputationAware(10), independent=True)
    assert math.isfinite(train(masked, guide, x, y, steps=3)[-1])
    assert all(p.isfinite().all() for p in guide.parameters())


def test_two_functions_meet():
    """y = Normal(f, exp g): sites of f average over g, sites of g over f; the fixed point is the mean-field optimum."""
    x, y = data(num=40)
    z = x[:8] + 0.01

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        g = pyro.sample("g", GaussianProcess(0.2 * KERNEL, x, mean=x.new_full((), -1.5)))
        return observed(dist.Normal(f, g.exp()), y)

    guide = AutoSparseGP(model, SGPR(z, trainable=False), independent=True)
    losses = [TraceQuadrature_ELBO(6).loss_and_grads(model, guide, x, y) for _ in range(12)]
    apart = AutoSparseGP(model, SVGP(z, trainable=False, natural=False), independent=True)
    _, best = maximise(model, apart, x, y, num_nodes=6, iterations=35)
    assert abs(-losses[-1] - best) < 0.02
    assert guide.site_status["f"]["exact"]
    assert not guide.site_status["g"]["exact"]
    # One of each kind.
    mixed = AutoSparseGP(model, {"f": ComputationAware(20), "g": SVGP(8)}, independent=True)
    losses = train(model, mixed, x, y, steps=4)
    assert losses[-1] < losses[0]
    assert predict(model, mixed, x[:5], num_samples=3)["y"].shape == (3, 5)


@pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
def test_latents_after_the_process():
    """Noise drawn after f, and a latent for each datum downstream of f."""
    x, y = data(num=30)

    def model(x, y=None, late=True):
        noise = None if late else pyro.sample("noise", dist.LogNormal(-1.5, 0.5))
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        noise = pyro.sample("noise", dist.LogNormal(-1.5, 0.5)) if late else noise
        return observed(dist.Normal(f, noise), y)

    values = []
    for late in (True, False):
        guide = prepared(model, SGPR(x[:8] + 0.01, trainable=False), x, y, late, independent=True)
        pyro.set_rng_seed(3)
        values.append(TraceQuadrature_ELBO(2).loss(model, guide, x, y, late))
    assert abs(values[0] - values[1]) < 1e-9 * abs(values[0])

    def local(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(f, 0.3))
            return pyro.sample("y", dist.Bernoulli(logits=3 * z), obs=y)

    guide = AutoSparseGP(local, SGPR(8), independent=True)
    losses = train(local, guide, x, (y > 0).double(), steps=40, lr=0.1)
    assert sum(losses[-20:]) < sum(losses[:20])
    assert guide.site_status["f"]["exact"]  # given z


def test_outputs_and_several_observed_sites():
    x, y = data(num=40)
    pair = torch.stack([y, 1 - y])

    def model(x, y=None, count=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("count", dist.Poisson(f[0].exp()), obs=count)
            with pyro.plate("outputs", 2):
                return pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    count = torch.poisson(y.exp())
    for family in (SGPR(x[:8] + 0.01, trainable=False), ComputationAware(20, "cg")):
        guide = AutoSparseGP(model, family, independent=True)
        losses = [TraceQuadrature_ELBO(10).loss_and_grads(model, guide, x, pair, count) for _ in range(8)]
        q = guide.posterior(torch.rand(7, 2))["f"]
        assert q.mean.shape == (2, 7)
        assert abs(losses[-1] - losses[-2]) < 1e-4
        if isinstance(family, SGPR):
            _, best = maximise(model, SVGP(x[:8] + 0.01, trainable=False), x, pair, count, num_nodes=10, iterations=60)
            assert abs(-losses[-1] - best) < 1e-3

    def softmax(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
        return observed(dist.Categorical(logits=torch.stack([f[0], f[1], 0 * f[0]], -1)), y)

    labels = (3 * (y - y.min()) / (y.max() - y.min() + 1e-3)).floor()
    guide = AutoSparseGP(softmax, SGPR(x[:8] + 0.01, trainable=False), independent=True)
    losses = [TraceQuadrature_ELBO(8).loss_and_grads(softmax, guide, x, labels) for _ in range(8)]
    assert not guide.site_status["f"]["exact"]
    free = AutoSparseGP(softmax, SVGP(x[:8] + 0.01, trainable=False, natural=False), independent=True)
    _, best = maximise(softmax, free, x, labels, num_nodes=8, iterations=30)
    assert abs(-losses[-1] - best) < 1e-3


def test_likelihoods_that_do_not_fit_are_refused():
    x, y = data(num=30)

    coupled = one_function(KERNEL, lambda f: dist.Normal(f.cumsum(-1) / 10, 0.3))

    def deep(x, y=None):
        inner = pyro.sample("inner", GaussianProcess(KERNEL, x))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), inner[:, None]))
        return observed(dist.Normal(f, 0.3), y)

    message = r"GP site 'f' has the family SGPR.*does not factorise"
    refused(message, prepared, coupled, SGPR(5), x, y, independent=True)
    for on_sites in ("inner", "f"):
        families = {"inner": SVGP(5), "f": SVGP(5), on_sites: ComputationAware(5)}
        message = f"GP site '{on_sites}' has the family ComputationAware.*enter another GP site"
        refused(message, prepared, deep, families, x, y, independent=True)
    prepared(deep, {"inner": SVGP(5), "f": SVGP(5)}, x, y, independent=True)


def test_mini_batches_are_refused():
    x, y = data(num=30)
    families = (SGPR(5), ComputationAware(5, "cg"), ComputationAware(5))
    for family in (*families, SemiCollapsedOrthogonal(5, 5), ConditionalSGPR(5)):
        guide = prepared(regression, family, x, y, independent=True)
        name = family.declared()["name"]
        refused(f"family {name}, which trains on all data at once.*10 of the 30.*SVGP", guide, x[:10], y[:10], size=30)

    def sampled(x, y=None):
        plate = pyro.plate("data", len(x), subsample_size=10)
        f = pyro.sample("f", GaussianProcess(KERNEL, x[plate.indices]))
        with plate:
            return pyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[plate.indices])

    refused("all data at once", prepared, sampled, SGPR(5), x, y, independent=True)


@pytest.mark.parametrize("arguments", [{"rate": 0.0}, {"rate": 1.5}, {"updates": 0}, {"updates": 1.5}])
def test_bad_arguments(arguments):
    refused(f"SGPR's {next(iter(arguments))} must be", SGPR, 5, **arguments)


@pytest.mark.parametrize("family", [SGPR(8), ComputationAware(8, "random")], ids=lambda f: f.__class__)
def test_copies_predict_the_same_and_train_on(family):
    x, y = data(bernoulli, 16)
    new = torch.rand(6, 2)
    guide = trained(bernoulli, family, x, y, steps=2, loss=TraceQuadrature_ELBO(5), independent=True)
    expected = guide.posterior(new)["f"]
    for copied in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        assert_alike(copied.posterior(new)["f"], expected, rtol=0, atol=0)
        assert math.isfinite(train(bernoulli, copied, x, y, steps=1, loss=TraceQuadrature_ELBO(5))[0])
    torch.set_default_dtype(torch.float32)
    guide.float()
    assert set(predict(bernoulli, guide, new.float(), num_samples=2)) >= {"f", "y"}


def test_prediction_uses_the_sites_of_the_final_parameters():
    x, y = data(num=40)
    guide = trained(learned, SGPR(8), x, y, steps=20, independent=True)
    before = guide.gps.f.sites.precision.clone()
    guide.posterior(x[:3])
    noise = pyro.param("noise").detach()
    torch.testing.assert_close(guide.gps.f.sites.precision, (noise**-2).expand(40))
    assert not torch.equal(before, guide.gps.f.sites.precision)


def test_prediction_in_inference_mode_between_steps():
    x, y = data(num=40)
    guide = trained(learned, SGPR(8), x, y, steps=3, independent=True)
    with torch.inference_mode():
        inside = guide.posterior(x[:3])["f"].mean.clone()
    torch.testing.assert_close(inside, guide.posterior(x[:3])["f"].mean.detach())
    assert math.isfinite(train(learned, guide, x, y, steps=3)[-1])


def outliers(likelihood=lambda f: dist.StudentT(3.0, f, 0.2), num=60):
    x, y = data(num=num)
    y[::7] += 4.0
    return with_likelihood(likelihood), x, y


@pytest.mark.quick("0.7")
@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_cut_sites_reach_their_fixed_point(rate):
    model, x, y = outliers()
    z = x[:10] + 0.01
    guide = AutoSparseGP(model, SGPR(z, trainable=False, rate=rate), independent=True)
    losses = [TraceQuadrature_ELBO(20).loss_and_grads(model, guide, x, y) for _ in range(32)]
    best = best_bound(by_nodes(CUT["student"], y), x, z)
    assert abs(-losses[-1] - best) < 1e-3
    assert 0 < guide.site_status["f"]["truncated"] <= 20
    assert (guide.gps.f.sites.precision >= 0).all()
    f = guide.posterior(x)["f"].mean.detach()
    q = guide.posterior(x)["f"]
    sites = q.sites
    nodes, weights = hermite(20)
    at = (f[:, None] + q.stddev.detach()[:, None] * nodes).requires_grad_()
    slope = torch.autograd.grad(dist.StudentT(3.0, at, 0.2).log_prob(y[:, None]).sum(), at)[0] @ weights
    torch.testing.assert_close(sites.linear - sites.precision * f, slope, atol=0.02, rtol=0.02)


@pytest.mark.quick("sparse | cg | random")
@pytest.mark.parametrize(
    ("actions", "name"), [("sparse", "student"), ("cg", "cauchy"), ("eigen", "laplace"), ("random", "student")]
)
def test_projections_of_cut_sites_stay_within_reach(actions, name):
    model, x, y = outliers(CUT[name], 28)
    guide = AutoSparseGP(model, ComputationAware(14, actions), independent=True)
    losses = [TraceQuadrature_ELBO(20).loss_and_grads(model, guide, x, y) for _ in range(20)]
    assert torch.tensor(losses).isfinite().all()
    if actions != "random":  # whose projections see too little for the updates to contract
        assert max(losses[10:]) < losses[0] + 0.01
        assert max(losses[15:]) - min(losses[15:]) < 5
    best = best_bound(by_nodes(CUT[name], y), x, x)
    assert min(losses) > -best - 0.01  # no bound above that of all inputs as inducing points


def test_sites_of_projections_settle_where_some_are_kept_within_reach():
    model, x, y = outliers(CUT["student"], 14)
    guide = prepared(model, ComputationAware(6, "eigen"), x, y, independent=True)
    status = guide.site_status["f"]
    assert status["truncated"] > 0
    assert status["converged"]


@pytest.mark.quick("3")
@pytest.mark.parametrize(("actions", "num"), [("random", 3), ("random", 5)])
def test_updates_that_go_to_and_fro_slow_down_until_sites_settle(actions, num):
    pyro.set_rng_seed(1)
    model, x, y = outliers(CUT["student"], 10)
    guide = prepared(model, ComputationAware(num, actions, rate=1.0), x, y, independent=True)
    assert guide.site_status["f"]["converged"]


def test_sites_that_do_not_settle_are_warned_of_once():
    pyro.set_rng_seed(1)
    model, x, y = outliers(CUT["student"], 10)
    guide = prepared(model, ComputationAware(1, "cg", rate=1.0), x, y, independent=True)
    with pytest.warns(NumericalWarning, match="sites of GP site 'f' did not settle"):
        guide.posterior(x)
    guide.posterior(x)  # a second warning would be an error
    assert not guide.site_status["f"]["converged"]


@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_damping_leaves_where_sites_within_reach_end(rate):
    x, zeros, ones = torch.rand(4, 1), torch.zeros(4), torch.ones(4)
    gradient, curvature = torch.tensor([30.0, -1.0, 2.0, 0.5]), torch.tensor([0.0, 1.0, 2.0, 4.0])
    sites = Sites(x, ones, zeros)
    for _ in range(600):
        sites = within_reach(update(sites, gradient, curvature, (zeros, ones), rate), sites, (zeros, ones))
    spread = (1 + 1 / sites.precision.mean()).sqrt()
    torch.testing.assert_close(sites.precision, torch.cat([30 / (10 * spread)[None], curvature[1:]]))
    torch.testing.assert_close(sites.linear, gradient)


def test_small_steps_raise_the_bound_where_some_curvature_is_cut():
    """Steps with a rate of each row's own lower it here, however small they are."""
    pyro.set_rng_seed(30)
    x = torch.rand(17, 1)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(17)
    y[::4] += 2 * torch.randn(5)
    guide = AutoSparseGP(
        one_function(kernels.Matern32(1.0), lambda f: dist.StudentT(4.0, f, 0.03)), SGPR(x[:5]), independent=True
    )
    guide(x, y)
    assert guide.site_status["f"]["converged"]


def test_a_mask_that_changes_drops_what_was_seen():
    x, y = observations("poisson", 40)

    def model(x, y=None, mask=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)), poutine.mask(mask=torch.tensor(True) if mask is None else mask):
            return pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    half = torch.arange(40) < 20
    for family in (SGPR(x[:8] + 0.01, trainable=False), ComputationAware(10, "cg")):
        seen, fresh = AutoSparseGP(model, family, independent=True), AutoSparseGP(model, family, independent=True)
        elbo = TraceQuadrature_ELBO(20)
        for _ in range(4):
            elbo.loss_and_grads(model, seen, x, y)
        for _ in range(10):
            losses = [elbo.loss_and_grads(model, guide, x, y, half) for guide in (seen, fresh)]
        assert abs(losses[0] - losses[1]) < 1e-3
        assert (seen.gps.f.sites.precision[20:] == 0).all()


class Kinked(dist.Laplace):
    """A Laplace distribution that does not say what its expectation is."""


@pytest.mark.quick("0.01")
@pytest.mark.filterwarnings("ignore:the bound changes by")
@pytest.mark.parametrize("scale", [pytest.param(0.3, marks=pytest.mark.slow), 0.02, 0.01])
def test_kinks(scale):
    """Median regression, against the dense bound with E|y − f| = d(2Φ(d/s) − 1) + 2sφ(d/s), d = y − m, in closed form.

    20 nodes left SGPR some hundred nats short at scales of 0.01 and 0.02. A kinked density that is not declared has
    what nodes give: they claim more than q has, the less the more there are.
    """
    x, _ = data(num=60)
    y = torch.sin(6 * x[:, 0]) + x[:, 1] + dist.Laplace(0.0, scale).sample((60,))
    z = x[:10] + 0.01

    def expected(mean, variance):
        sd, unit = variance.sqrt(), dist.Normal(0.0, 1.0)
        t = (y - mean) / sd
        return -sd * (t * (2 * unit.cdf(t) - 1) + 2 * unit.log_prob(t).exp()) / scale - math.log(2 * scale)

    best, gaps = best_bound(expected, x, z), []
    kinds = [(dist.Laplace, 20), *([(Kinked, 20), (Kinked, 100)] if scale == 0.3 else [])]
    for likelihood, num_nodes in kinds:
        model = with_likelihood(lambda f, likelihood=likelihood: likelihood(f, scale))
        guide, elbo = AutoSparseGP(model, SGPR(z, trainable=False), independent=True), TraceQuadrature_ELBO(num_nodes)
        claimed = [-elbo.loss_and_grads(model, guide, x, y) for _ in range(40)][-1]
        q = guide.posterior(x)["f"]
        bound = (expected(q.mean, q.variance).sum() - q.kl).item()
        gaps.append((best - bound, claimed - bound))
    assert max(map(abs, gaps[0])) < 1e-3
    if scale == 0.3:
        assert gaps[2][0] < 0.5 * gaps[1][0] < 0.1
        assert abs(gaps[2][1]) < 0.1


def test_kinks_around_mixed_outputs():
    """Each parameter has several outputs, and no slope of its own: the sites are those of a free posterior."""
    x, _ = data(num=30)
    mixing, z = torch.tensor([[1.0, 0.8], [-0.5, 1.0]]), x[::3]
    y = mixing @ torch.stack([torch.sin(6 * x[:, 0]), torch.cos(5 * x[:, 1])])

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
        with pyro.plate("outputs", 2, dim=-2):
            observed(dist.Laplace(mixing @ f, 0.3), y)

    losses = [train(model, AutoSparseGP(model, family(z)), x, y, steps=50, lr=0.0)[-1] for family in (SGPR, SVGP)]
    assert losses[0] == pytest.approx(losses[1], abs=0.2)  # what 20 nodes leave at kinks


@pytest.mark.quick("family0 | family2")
@pytest.mark.parametrize("family", [SGPR(8), ComputationAware(8), ComputationAware(8, "cg")])
def test_looking_at_a_guide_does_not_change_it(family):
    x, y = observations("poisson", 24)
    model = with_likelihood(LIKELIHOODS["poisson"])
    runs = []
    for look in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoSparseGP(model, family, independent=True)
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(5))
        losses = []
        for _ in range(2):
            losses.append(svi.step(x, y))
            if look:
                guide(torch.rand(40, 2))
                guide(torch.rand(7, 2))
                guide.posterior(x[:3])
                guide.state_dict()
                svi.evaluate_loss(x, y)
        runs.append(losses)
    assert runs[0] == runs[1]


def test_training_in_eval_mode_reads_sites():
    x, y = observations("poisson", 40)
    model = with_likelihood(LIKELIHOODS["poisson"])
    guides = [AutoSparseGP(model, SGPR(x[:8] + 0.01, trainable=False), independent=True) for _ in range(2)]
    guides[1].eval()
    first, second = ([TraceQuadrature_ELBO(20).loss(model, g, x, y) for _ in range(12)] for g in guides)
    assert abs(first[-1] - second[-1]) < 1e-6


def test_messages_for_data_that_do_not_fit():
    x, y = data(num=30)
    y[3] = torch.inf
    message = "log density of site 'y' is not finite at 1 of 30"
    refused(message, prepared, gaussian(KERNEL), SGPR(5), x, y, independent=True)
    guide = AutoSparseGP(gaussian(KERNEL), ComputationAware(5, "cg"), independent=True)
    with pytest.raises(ValueError, match="has not been called"):
        _ = guide.site_status
    y[3] = 0.0
    guide(x, y)
    guide.float()
    refused(r"call guide\.double\(\)", guide.posterior, x)
    counts = with_likelihood(LIKELIHOODS["poisson"])
    refused("first call needs them", lambda: AutoSparseGP(counts, SGPR(5), independent=True).posterior(x))
    guide = AutoSparseGP(poutine.scale(gaussian(KERNEL), torch.ones(30)), SGPR(5), independent=True)
    refused("'f' has a poutine\\.scale with 30 values", guide, x, y)


class Counted(kernels.Matern52):
    """A kernel that notes the sizes of the matrices asked of it."""

    def __init__(self, asked):
        super().__init__(0.5)
        self.asked = asked

    def __call__(self, x, z=None):
        self.asked.append((len(x), len(x if z is None else z)))
        return super().__call__(x, z)


class CountedWaves(kernels.FeatureKernel):
    """A kernel that notes the numbers of rows at which its features are asked for."""

    def __init__(self, asked):
        self.asked = asked

    def features(self, x):
        self.asked.append(len(x))
        return torch.cat([torch.sin(k * x) for k in range(1, 6)], -1)


@pytest.mark.quick("SGPR | ExactWeightSpace")
@pytest.mark.parametrize(
    ("family", "kernel", "others"),
    [
        (SGPR, Counted, {"inducing": 8}),
        (SemiCollapsedOrthogonal, Counted, {"inducing": 6, "orthogonal": 5}),
        (ConditionalSGPR, Counted, {"inducing": 8}),
        (ExactWeightSpace, CountedWaves, {}),
    ],
)
def test_features_are_made_once_for_all_updates(family, kernel, others, monkeypatch):
    x, y = observations("poisson", 40)
    asked, readings = [], []
    expect = Reader.expect
    monkeypatch.setattr(Reader, "expect", lambda *args: readings.append(1) or expect(*args))

    def during(call, *args):
        asked.clear()
        readings.clear()
        call(*args)
        # The family of which q(w) depends on f at all rows asks for k(X, X) anew.
        return [size for size in asked if size != (40, 40)], len(readings)

    few, many = [], []
    for found, rate, updates in ((few, 0.9, 1), (many, 0.2, 20)):
        model = one_function(kernel(asked), lambda f: dist.Poisson(f.exp()))
        guide = AutoSparseGP(model, family(**others, rate=rate, updates=updates), independent=True)
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO(10))
        svi.step(x, y)
        found.append(during(guide.posterior, x[:5]))
        found.append(during(guide, x, y))
    for (once, updates), (again, more) in zip(few, many):
        assert more > 1.5 * updates
        assert again == once


def test_features_of_a_reading_go_with_it():
    x, y = observations("poisson", 40)
    guide = AutoSparseGP(with_likelihood(LIKELIHOODS["poisson"]), SGPR(7), independent=True)
    with torch.no_grad():
        guide(x, y)
        conditions = guide.kind.given_now(guide, median=True)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (40, 7)]
    assert [len(reading.sites.inputs) for reading in conditions.readings.values()] == [40]


def test_updates_within_a_step_are_those_of_as_many_steps():
    """Nothing of an update before another GP site's stays for the one after it."""
    x, y = data(regression, 40)

    def model(x, y=None):
        f, g = (pyro.sample(name, GaussianProcess(KERNEL, x)) for name in "fg")
        observed(dist.StudentT(3.0, f, g.exp()), y)

    losses = {}
    for updates in (1, 3):
        guide = AutoSparseGP(model, SGPR(x[:10] + 0.01, trainable=False, updates=updates), independent=True)
        elbo = TraceQuadrature_ELBO(10)
        losses[updates] = [elbo.loss_and_grads(model, guide, x, 3 * y) for _ in range(6 // updates)]
    torch.testing.assert_close(losses[3], losses[1][2::3], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("likelihood", [lambda f: dist.Normal(f, NOISE), lambda f: dist.StudentT(3.0, f, NOISE)])
def test_a_scaled_model_has_the_same_posterior(likelihood):
    """Under poutine.scale prior and likelihood have the scale, and so has their bound: q is what it was."""
    x, y = data(regression, 30)
    found = []
    for scale in (1.0, torch.tensor(0.01)):
        guide = AutoSparseGP(
            poutine.scale(with_likelihood(likelihood), scale), SGPR(x[:10], trainable=False), independent=True
        )
        svi = pyro.infer.SVI(guide.model, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO())
        for _ in range(15):
            loss = svi.step(x, y)
        q = guide.posterior(x)["f"]
        found.append((torch.as_tensor(loss / scale), q.mean.detach(), q.variance.detach()))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("told", ["by its kind", "by its slopes"])
def test_a_likelihood_that_is_gaussian_at_first_only(told):
    x, y = data(regression, 40)
    now = []

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        other = dist.StudentT(3.0, f, NOISE) if told == "by its kind" else dist.Normal(f, NOISE + 0.2 * f.sigmoid())
        observed(other if now else dist.Normal(f, NOISE), y)

    bounds = []
    for first in (True, False):
        now.clear()
        guide = AutoSparseGP(model, SGPR(x[:8], trainable=False), independent=True)
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO())
        if first:
            svi.step(x, y)
            assert guide.site_status["f"]["exact"]
        now.append(True)
        bounds.append([svi.step(x, y) for _ in range(40)][-1])
        assert not guide.site_status["f"]["exact"]
    assert bounds[0] < 1.01 * bounds[1]


@pytest.mark.filterwarnings("ignore:the bound changes by")
def test_a_scale_that_grows_with_f_is_met_near_the_mean():
    """Under the whole prior its large scales explain all rows: sites stayed there, some 100 nats short."""
    x = torch.rand(60, 1)
    y = 1.5 * torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(60)
    model = one_function(kernels.RBF(0.3), lambda f: dist.Normal(f, 0.3 + torch.relu(f - 1)))
    losses = [
        train(model, AutoSparseGP(model, family, independent=True), x, y, steps=20)[-1]
        for family in (SGPR(12), SVGP(12))
    ]
    assert losses[0] < losses[1] + 3


# Exact: the posterior of all function values, against dense algebra.


X = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]
NEW = torch.tensor([[-0.2], [0.33], [1.5]], dtype=torch.float64)


@pytest.mark.parametrize(
    "kernel", [2.0 * kernels.RBF(0.3), kernels.Matern32(0.2) + kernels.Constant(), kernels.Linear() * kernels.RBF(1.0)]
)
def test_a_gaussian_likelihood_has_the_evidence_and_the_exact_posterior(kernel):
    y = torch.sin(6 * X[:, 0]) + 0.1 * torch.randn(25, dtype=torch.float64)
    model = gaussian(kernel, 0.1, mean=0.5, jitter=1e-13)
    guide = AutoSparseGP(model, Exact())
    loss = TraceQuadrature_ELBO().loss(model, guide, X, y)
    total = kernel(X) + 0.01 * torch.eye(25, dtype=torch.float64)
    evidence = dist.MultivariateNormal(X.new_full((25,), 0.5), total).log_prob(y)
    assert math.isclose(loss, -evidence, rel_tol=1e-8)
    for rows, rtol in ((NEW, 1e-7), (X, 1e-6)):
        q, (mean, covariance) = guide.posterior(rows)["f"], conditional(kernel, X, y, 0.1, rows, mean=0.5)
        torch.testing.assert_close(q.mean, mean, rtol=rtol, atol=1e-9)
        torch.testing.assert_close(q.covariance_matrix, covariance, rtol=rtol, atol=1e-9)


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
        expected = -evidence(warp(X), y, kernels.Matern32(0.5))
    assert math.isclose(TraceQuadrature_ELBO().loss(model, guide, X, y), expected, rel_tol=1e-8)


def test_more_rows_are_for_other_families():
    assert issubclass(Exact, SiteFamily)
    model, x = gaussian(kernels.RBF(0.3)), torch.rand(4001, 1)
    refused(r"site 'f' has 4001 rows.*SVGP.*ComputationAware", lambda: AutoSparseGP(model, Exact())(x, x[:, 0]))
