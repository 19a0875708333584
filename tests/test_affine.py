"""Densities that are normal around affine functions of several inputs' values: their expectations are exact."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, FusedAdam, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SVGP, CoupledPrecision, OrthogonalInducing, OrthogonallyDecoupled

ROWS, SUMS, NOISE = 12, 4, 0.1
KERNEL = kernels.Matern52(0.4)
SEEN = torch.tensor([True, True, False, True])


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(ROWS, 1, generator=generator, dtype=torch.float64).sort(0).values
    mixing = torch.rand(SUMS, ROWS, generator=generator, dtype=torch.float64) / 3
    noise = NOISE * torch.randn(SUMS, generator=generator, dtype=torch.float64)
    return tuple(part.to(dtype) for part in (x, mixing, mixing @ torch.sin(6 * x[:, 0]) + noise))


def correlated(num, dtype=torch.float64):
    lags = torch.arange(num, dtype=dtype)
    return torch.linalg.cholesky(0.8 ** (lags[:, None] - lags).abs())


def aggregated(x, mixing, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("sums", SUMS):
        pyro.sample("y", dist.Normal(f @ mixing.mT + 1, NOISE), obs=y)


def scaled_and_masked(x, mixing, y=None):
    noise = pyro.param("noise", torch.tensor(0.3, dtype=x.dtype))
    gain = pyro.param("gain", torch.ones(SUMS, 1, dtype=x.dtype))
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("sums", SUMS), poutine.scale(scale=2.0), poutine.mask(mask=SEEN):
        pyro.sample("y", dist.Normal(f @ (gain * mixing).mT, noise), obs=y)


def two_blocks(x, mixing, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("blocks", 2):
        loc = (mixing @ f).reshape(2, 2).cumsum(-1)
        pyro.sample("y", dist.MultivariateNormal(loc, scale_tril=NOISE * correlated(2, x.dtype)), obs=y.reshape(2, 2))


def two_sites(x, mixing, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(0.3), x).expand([2]).to_event(1))
    with pyro.plate("sums", SUMS):
        pyro.sample("y", dist.Normal(mixing @ f + mixing @ g[0] - 0.5 * mixing @ g[1], NOISE), obs=y)


def dense(model, posteriors, args):
    """The bound by whole covariances, and the model's own log density at the means."""
    x, mixing, _ = args
    store = dict(pyro.get_param_store().items())
    noise = store.get("noise", NOISE)
    gain = store.get("gain", 1.0)
    matrix = gain * mixing
    if model is two_blocks:
        matrix = matrix.reshape(2, 2, -1).cumsum(1).reshape(SUMS, -1)
        root = NOISE * correlated(2, x.dtype)
        weight = torch.block_diag(*[torch.linalg.inv(root @ root.mT)] * 2)
    elif model is scaled_and_masked:
        weight = torch.diag(2 * SEEN.to(x) / noise**2)
    else:
        weight = torch.eye(SUMS, dtype=x.dtype) / noise**2
    means = {name: q.mean for name, q in posteriors.items()}
    trace = poutine.trace(poutine.condition(model, means)).get_trace(*args)
    trace.compute_log_prob(site_filter=lambda name, site: name == "y")
    total = trace.nodes["y"]["log_prob_sum"]
    factors = {"f": torch.ones(1, dtype=x.dtype), "g": torch.tensor([1.0, -0.5], dtype=x.dtype)}
    for name, q in posteriors.items():
        covariances = q.covariance_matrix.reshape(-1, ROWS, ROWS)
        for factor, covariance in zip(factors[name], covariances):
            total = total - 0.5 * (weight * (factor**2 * matrix @ covariance @ matrix.mT)).sum()
        total = total - q.kl.sum()
    return total


@pytest.mark.parametrize("model", [aggregated, scaled_and_masked, two_blocks, two_sites])
@pytest.mark.parametrize("family", [SVGP(5), OrthogonalInducing(4, 3), OrthogonallyDecoupled(5, 4)], ids=repr)
def test_the_bound_and_its_gradients_are_those_of_whole_covariances(model, family):
    args = data()
    family = type(family)(**{**vars(family), "natural": False})
    guide = AutoSparseGP(model, family)
    svi, elbo = SVI(model, guide, FusedAdam({"lr": 0.05}), TraceQuadrature_ELBO()), TraceQuadrature_ELBO()
    for _ in range(5):
        svi.step(*args)
    parameters = [*guide.parameters(), *(value for _, value in pyro.get_param_store().named_parameters())]
    gradients = []
    for bound in (
        lambda: -elbo.differentiable_loss(model, guide, *args),
        lambda: dense(model, guide.posterior(*args), args),
    ):
        value = bound()
        gradients.append([value, *torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)])
    for ours, whole in zip(*gradients):
        torch.testing.assert_close(ours, whole, rtol=1e-7, atol=1e-7)
    with torch.no_grad():
        assert elbo.loss(model, guide, *args) == pytest.approx(-gradients[1][0].item(), rel=1e-9)


def exact(x, mixing, y):
    """The posterior of f under :func:`aggregated`, and minus the evidence."""
    gram = KERNEL(x)
    whole = mixing @ gram @ mixing.mT + NOISE**2 * torch.eye(SUMS, dtype=x.dtype)
    gain = gram @ mixing.mT @ torch.linalg.inv(whole)
    evidence = dist.MultivariateNormal(torch.ones(SUMS, dtype=x.dtype), whole).log_prob(y)
    return gain @ (y - 1), (gram - gain @ mixing @ gram).diagonal().sqrt(), -evidence


def test_one_step_leads_to_the_exact_posterior():
    args = data()
    guide = AutoSparseGP(aggregated, SVGP(args[0]))
    svi = SVI(aggregated, guide, FusedAdam({"lr": 1e-9}), TraceQuadrature_ELBO())
    svi.step(*args)
    mean, sd, loss = exact(*args)
    with torch.no_grad():
        q = guide.posterior(*args)["f"]
        torch.testing.assert_close(q.mean, mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(q.stddev, sd, rtol=1e-5, atol=1e-6)
    assert svi.evaluate_loss(*args) == pytest.approx(loss.item(), abs=1e-5)


def test_one_step_under_precise_correlated_noise_is_the_collapsed_bound():
    """log N(y; 0, Q + Σ) − ½ tr(Σ⁻¹(K − Q)), of fewer inducing inputs than rows."""
    x = torch.linspace(0, 1, 60, dtype=torch.float64)[:, None]
    root, y = 0.01 * correlated(60), torch.sin(6 * x[:, 0])

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        pyro.sample("y", dist.MultivariateNormal(f, scale_tril=root), obs=y)

    z = torch.linspace(0, 1, 9, dtype=torch.float64)[:, None]
    guide = AutoSparseGP(model, SVGP(z))
    svi = SVI(model, guide, FusedAdam({"lr": 1e-12}), TraceQuadrature_ELBO())
    for _ in range(2):
        svi.step(x, y)
    gram, cross = KERNEL(x), KERNEL(x, z)
    known = cross @ torch.linalg.solve(KERNEL(z), cross.mT)
    noise = root @ root.mT
    bound = dist.MultivariateNormal(torch.zeros(60, dtype=x.dtype), known + noise).log_prob(y)
    bound = bound - 0.5 * torch.linalg.solve(noise, gram - known).trace()
    assert svi.evaluate_loss(x, y) == pytest.approx(-bound.item(), abs=2e-3)  # a jitter of 3e-8


@pytest.mark.parametrize("how", ["float32", "compiled", "fit", "low rank"])
def test_other_ways_of_training_arrive_there(how):
    pyro.set_rng_seed(0)
    dtype = torch.float32 if how == "float32" else torch.float64
    args = data(dtype)
    family = CoupledPrecision(args[0]) if how == "low rank" else SVGP(args[0])
    guide = AutoSparseGP(aggregated, family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "fit":
            fit(aggregated, guide, args, steps=40, progress=False)
        else:
            elbo = TraceQuadrature_ELBO(compile=how == "compiled")
            svi = SVI(aggregated, guide, FusedAdam({"lr": 1e-9}), elbo)
            for _ in range(30):
                svi.step(*args)
    *_, loss = exact(*data())
    found = TraceQuadrature_ELBO().loss(aggregated, guide, *args)
    assert found == pytest.approx(loss.item(), abs=1e-2 if how in ("float32", "fit") else 1e-4)


def curved(x, mixing, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("sums", SUMS):
        pyro.sample("y", dist.Normal(mixing @ f.exp(), NOISE), obs=y)


def noise_of_f(x, mixing, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("sums", SUMS):
        pyro.sample("y", dist.Normal(mixing @ f, (mixing @ f).exp()), obs=y)


def heavy(x, mixing, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("sums", SUMS):
        pyro.sample("y", dist.StudentT(4.0, mixing @ f, NOISE), obs=y)


def beside_a_factor(x, mixing, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("sums", SUMS):
        pyro.sample("y", dist.Normal(mixing @ f, NOISE), obs=y)
    pyro.factor("bend", -(f.square().sum() ** 2))


@pytest.mark.parametrize("model", [curved, noise_of_f, heavy, beside_a_factor])
def test_other_densities_are_drawn_from_and_warned_of(model):
    guide = AutoSparseGP(model, SVGP(5))
    with pytest.warns(UserWarning, match="couples values of the GP site f"):
        guide(*data())
    assert not guide.structure.affine


def test_a_model_that_changes_is_drawn_from():
    """Between two steps its density gets another kind, of which the closed form says nothing."""
    args = data()
    kind = [dist.Normal]

    def model(x, mixing, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("sums", SUMS):
            pyro.sample("y", kind[0](mixing @ f, NOISE), obs=y)

    guide, elbo = AutoSparseGP(model, SVGP(5)), TraceQuadrature_ELBO()
    guide(*args)
    with torch.no_grad():
        assert elbo.loss(model, guide, *args) == elbo.loss(model, guide, *args)
        kind[0] = dist.Laplace
        assert elbo.loss(model, guide, *args) != elbo.loss(model, guide, *args)
