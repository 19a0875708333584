"""Posteriors as DataTree: what is in it against dense references, its layout, and its way to disk."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from torch.overrides import TorchFunctionMode

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    Whitening,
    kernels,
    predict,
)
from pyro_sparsegp.families import SGPR, SVGP, Exact, ExactWeightSpace, SparseEP, WeightSpace

from .models import (
    FAMILIES,
    bernoulli,
    data,
    estimate,
    gaussian,
    heteroscedastic,
    observed,
    one_function,
    prepared,
    refused,
    regression,
    train,
    trained,
)

xr = pytest.importorskip("xarray")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
DensityReader = pytest.importorskip("pyro_sparsegp.diagnostics.densities").DensityReader
as_source = pytest.importorskip("pyro_sparsegp.diagnostics.sources").as_source
GuideSource = pytest.importorskip("pyro_sparsegp.diagnostics.sources").GuideSource
to_datatree = diagnostics.to_datatree

KERNEL = kernels.Matern32(0.4)


def fitted(model=regression, family=None, steps=5, num=40, **kwargs):
    x, y = data(model, num=num)
    guide = AutoSparseGP(model, SVGP(10) if family is None else family, **kwargs)
    train(model, guide, x, y, steps=steps, lr=0.1)
    return guide, x, y


def densities_of(model, args, functions, held=None):
    """One draw's pointwise densities, the sum of the expected ones, and which GP site each was integrated over."""
    reader = DensityReader(model, args, {}, ["y", "z"])
    stack = {name: (mean[None], variance[None]) for name, (mean, variance) in functions.items()}
    found = reader({name: value[None] for name, value in (held or {}).items()}, stack)
    integrated = {name: value[0] for name, value in found.integrated.items()}
    return integrated, found.towards["vfe"][0], reader.plans["y"].quadratic


def dense_log_evidence(log_density, h, d, num=4001):
    """log ∫ p(y | f) N(f | h, d) df on a fine grid, a value at a time."""
    t = torch.linspace(-12, 12, num)
    f = h + d.sqrt() * t[:, None]
    return torch.logsumexp(log_density(f) + dist.Normal(0.0, 1.0).log_prob(t)[:, None] + math.log(t[1] - t[0]), 0)


def test_groups_dimensions_and_attributes():
    guide, x, y = fitted()
    tree = to_datatree(regression, guide, x, y, num_samples=7, predict=x[:5] + 0.01, include_f=True)
    expected = "posterior posterior_predictive predictions log_likelihood log_prior sample_stats"
    assert set(tree.children) == {*expected.split(), "observed_data", "constant_data", "predictions_constant_data"}
    for group in expected.split():
        assert all(array.dims[:2] == ("chain", "draw") for array in tree[group].data_vars.values())
        assert tree[group].attrs["inference_library"] == "pyro"
    assert tree.posterior["f_w"].dims[2:] == ("f_basis",)
    assert tree.posterior["f"].dims == ("chain", "draw", "data")
    for group in ("posterior_predictive", "log_likelihood", "predictions"):
        assert tree[group]["y"].dims == ("chain", "draw", "data")
    assert tree.predictions["y"].shape == (1, 7, 5)
    assert tree.observed_data["y"].dims == ("data",)
    assert tree.constant_data["x"].dims == ("data", "x_dim_1")
    assert tree.predictions_constant_data["x"].sizes["data"] == 5
    assert "y" not in tree.constant_data
    assert {tree.sample_stats[name].dtype for name in ("lp", "log_q")} == {np.dtype("float64")}
    assert tree.posterior["noise"].dtype == np.dtype("float64")  # the model's
    for group in tree.children.values():
        assert not set(group.data_vars) & set(group.dims)


def test_netcdf_round_trip(tmp_path):
    guide, x, y = fitted()
    tree = to_datatree(regression, guide, x, y, num_samples=5, predict=(x[:3],))
    tree.to_netcdf(tmp_path / "fit.nc")
    with xr.open_datatree(tmp_path / "fit.nc") as back:
        assert back.identical(tree)
        assert '"SVGP"' in back.posterior.attrs["family"]


def test_coords_and_dims_are_named_by_the_user():
    guide, x, y = fitted()

    def labelled(dims, coords=None):
        return to_datatree(regression, guide, x, y, num_samples=3, predict=x[:5], dims=dims, coords=coords)

    dims = {"length": ["column"], "x": ["data", "column"], "f": ["place"]}
    coords = {"column": ["east", "north"], "data": np.arange(40) + 100, "place": np.arange(5) + 1}
    tree = labelled(dims, coords)
    assert list(tree.posterior["length"].coords["column"].values) == ["east", "north"]
    assert tree.log_likelihood["data"].values[0] == tree.observed_data["data"].values[0] == 100
    assert tree.constant_data["x"].dims == ("data", "column")
    assert tree.predictions["place"].values[0] == 1
    refused(r"dims\['length'\] names 2 dimensions", labelled, {"length": ["a", "b"]})


def test_seeds_repeat():
    guide, x, y = fitted()
    tree = to_datatree(regression, guide, x, y, num_samples=4, seed=3)
    state = torch.get_rng_state()
    again = to_datatree(regression, guide, x, y, num_samples=4, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert tree.posterior.equals(again.posterior)


FOURIER = kernels.RandomFourier(kernels.RandomFourier.draw(kernels.RBF, 8, 2), torch.tensor([0.6, 0.8]))
# By name a family, and a kernel that it takes where that is not any.
EVERY = {name: (family, kernels.Matern32(0.4)[0] + kernels.RBF(0.5)[1]) for name, family in FAMILIES.items()}
EVERY |= {"SparseEP": (SparseEP(12), KERNEL)}
EVERY |= {"WeightSpace": (WeightSpace(), FOURIER), "ExactWeightSpace": (ExactWeightSpace(), FOURIER)}


@pytest.mark.quick("SVGP | CoupledPrecision | SGPR | ComputationAwareCG | SparseEP | WeightSpace | ExactWeightSpace")
@pytest.mark.parametrize("name", EVERY)
def test_every_family_exports(name):
    """Draws of w, whose likelihoods have the mean that the posterior's marginals give, and a mean log weight, E[lp −
    log_q], that is the ELBO of what the guide was trained towards.
    """
    (family, kernel), (x, y) = EVERY[name], data(num=40)
    model = gaussian(kernel, 0.3)
    guide = AutoSparseGP(model, family)
    if not guide.kind.has_bound:
        ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.0})).step(x, y)
    else:
        train(model, guide, x, y, steps=5, lr=0.1)
    tree = to_datatree(model, guide, x, y, num_samples=200, predict=x[:5] + 0.01, seed=0)
    assert {"posterior", "log_likelihood", "posterior_predictive", "predictions", "sample_stats"} < {*tree.children}
    densities = np.exp(tree.log_likelihood["y"].values[0])
    scores = diagnostics.predictive_scores(model, guide, x, y, num_samples=1, seed=0).pointwise["log_score"].values
    errors = densities.std(0) / len(densities) ** 0.5
    assert (abs(densities.mean(0) - np.exp(scores)) < 5 * errors + 1e-6).all()
    new = guide.posterior(x[:5] + 0.01)["f"]
    moved = (tree.predictions["f"].values[0].mean(0) - new.mean.detach().numpy()) / new.stddev.detach().numpy()
    assert (abs(moved) < 5 / 200**0.5).all()
    assert diagnostics.psis(tree).khat < np.inf
    if tree.sample_stats.attrs["target"] == "vfe":
        with torch.no_grad():
            bound = -TraceQuadrature_ELBO(4).loss(model, guide, x, y)
        weights = (tree.sample_stats.lp - tree.sample_stats.log_q).values.ravel()
        assert abs(weights.mean() - bound) < 5 * weights.std() / 200**0.5 + 1e-6 * abs(bound)


@pytest.mark.quick("bernoulli")
@pytest.mark.parametrize("model", [bernoulli, heteroscedastic])
def test_the_mean_log_weight_is_the_bound_with_hyperparameters(model):
    guide, x, y = fitted(model)
    tree = to_datatree(model, guide, x, y, num_samples=20, posterior_predictive=False)
    weights = (tree.sample_stats.lp - tree.sample_stats.log_q).values.ravel()
    loss, error = estimate(TraceQuadrature_ELBO(10), model, guide, x, y, num=20)
    assert abs(weights.mean() + loss) < 4 * (weights.std() / 20**0.5 + error)


def test_conditional_moments_are_those_of_the_dense_process():
    """Given coefficients, function values have the mean and variance that conditioning on u = L w gives."""
    x, y = data(num=30)
    model = gaussian(KERNEL, 0.3)
    guide = trained(model, SVGP(x[:6], trainable=False), x, y, steps=20)
    z = guide.gps.f.basis.inputs[0]
    process = GaussianProcess(KERNEL, x)
    for draws in as_source(model, guide, (x, y), {}).draws(4):
        for w, mean, variance in zip(draws.posterior["f_w"], *draws.moments["f"]):
            exact = process.given(z, torch.linalg.cholesky(KERNEL(z)) @ w)
            torch.testing.assert_close(mean, exact.mean, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(variance, exact.variance, atol=1e-5, rtol=1e-5)


class Given(TorchFunctionMode):
    """Standard normal numbers are taken from a list."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.at = numbers, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func not in (torch.randn, torch.randn_like, torch.Tensor.normal_, torch.normal):
            return found
        self.at += found.numel()
        noise = self.numbers[self.at - found.numel() : self.at].reshape(found.shape)
        return args[0] + args[1] * noise if func is torch.normal else noise


def test_binomial_draws_in_blocks_need_no_warning():
    """Torch's own, of an output that it resized; the draws are binomial given f."""
    x, y = data(num=40)
    model = one_function(KERNEL, lambda f: dist.Binomial(5, logits=f))
    guide = trained(model, SVGP(8), x, (y > 0.5) * 5.0, steps=5)
    with warnings.catch_warnings(record=True) as caught:  # one that is raised would lead to a loop of draws
        warnings.simplefilter("always")
        drawn = predict(model, guide, x[:3], num_samples=2000)
    assert [str(each.message) for each in caught] == []
    p = drawn["f"].sigmoid()
    error = (drawn["y"] - 5 * p) / (5 * p * (1 - p)).sqrt()
    assert (error.mean(0).abs() < 5 / 2000**0.5).all()
    assert ((error.square().mean(0) - 1).abs() < 5 * (3 / 2000) ** 0.5).all()


@pytest.mark.quick("family1")
@pytest.mark.parametrize("family", [SVGP(8), SGPR(8)])
def test_draws_in_blocks_are_those_of_a_loop(family, monkeypatch):
    """A program that vmap refuses is run once a draw: the same in distribution, and in value under the same noise."""
    runs = []

    def refusing(x, y=None):
        runs.append(float(x.sum()))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        _ = looped and noise.detach().item()
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        return observed(dist.Normal(f, noise), y)

    looped = False
    x, y = data(num=40)
    guide = trained(refusing, family, x, y, steps=30, lr=0.05)
    found = []
    for looped in (False, True):
        runs.clear()
        tree = to_datatree(refusing, guide, x, y, num_samples=60, predict=x[:3], seed=1)
        assert (len(runs) > 60) == looped
        weights = (tree.sample_stats.lp - tree.sample_stats.log_q).values
        found.append([weights, tree.predictions["f"].values[0, :, 0], tree.posterior["noise"].values])
    for blocks, loop in zip(*found):
        error = 5 * (2 * loop.var() / 60) ** 0.5
        assert abs(blocks.mean() - loop.mean()) < error
        assert abs(blocks.std() - loop.std()) < error
    runs.clear()
    looped = False
    assert predict(refusing, guide, x[:3], num_samples=10)["f"].shape == (10, 3)
    assert len(runs) <= 12
    assert not guide.trace.nodes  # of a mapped run
    noise, make, items = torch.randn(4, 1000), GuideSource.make, GuideSource(guide, (x, y), {}).items(4)

    def given(source, item, *rest):
        with Given(noise[item[""]]):
            return make(source, item, *rest)

    monkeypatch.setattr(GuideSource, "make", given)
    monkeypatch.setattr(GuideSource, "items", lambda source, num: items)
    trees = {}
    for looped in (False, True):
        trees[looped] = to_datatree(refusing, guide, x, y, num_samples=4, predict=x[:3])
    for group in ("posterior", "posterior_predictive", "log_likelihood", "sample_stats", "predictions"):
        xr.testing.assert_allclose(*(tree[group].to_dataset() for tree in trees.values()), rtol=1e-6)


def test_what_a_program_draws_from_a_seed_stays():
    """Frequencies from a generator of the program's own are the same at all draws."""

    def model(x, y=None):
        omega = torch.randn(8, x.shape[-1], generator=torch.Generator().manual_seed(1))
        f = pyro.sample("f", GaussianProcess(kernels.RandomFourier(omega, 0.3), x))
        return observed(dist.Normal(f, 0.2), y)

    x, y = data(num=20)
    guide = prepared(model, ExactWeightSpace(), x, y)
    q = guide.posterior(x)["f"]
    z = (predict(model, guide, x, num_samples=50)["f"] - q.mean) / q.stddev
    assert z.mean(0).abs().max() < 5 / 50**0.5
    assert z.square().mean() < 1.5


def test_what_a_program_draws_from_numpy():
    """One number a draw, and not one a block of draws."""

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        shift = 0.0 if y is not None else np.random.randn()  # noqa: NPY002
        return observed(dist.Normal(f + shift, 0.1), y)

    x, y = data(num=20)
    draws = predict(model, prepared(model, SVGP(4), x, y), x[:5], num_samples=60)
    assert 0.6 < (draws["y"] - draws["f"]).mean(-1).std() < 1.5


LIKELIHOODS = {
    "normal": lambda f: dist.Normal(f, 0.05),
    "bernoulli": lambda f: dist.Bernoulli(logits=4 * f),
    "poisson": lambda f: dist.Poisson((f + 1).exp()),
    "student": lambda f: dist.StudentT(3.0, f, 0.05),
    "scaled": lambda f: dist.Normal(2 * f + 1, 0.3),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("spread", [1e-4, 0.05, 1.0])
def test_integrated_densities(name, spread):
    """Closed form and adaptive quadrature against a fine grid, the residual narrow and wide."""
    model = one_function(KERNEL, LIKELIHOODS[name])
    x, _ = data(num=25)
    h, d = torch.randn(25), spread * (0.5 + torch.rand(25))
    y = LIKELIHOODS[name](h + 0.3 * torch.randn(25)).sample()
    found, total, quadratic = densities_of(model, (x, y), {"f": (h, d)})

    def log_density(f):
        return LIKELIHOODS[name](f).log_prob(y)

    tolerance = {"normal": 1e-6, "scaled": 1e-6}.get(name, 2e-3)
    torch.testing.assert_close(found["y"], dense_log_evidence(log_density, h, d), atol=tolerance, rtol=1e-3)
    assert quadratic == ["f"] * (name in ("normal", "scaled"))
    if name != "student":  # 20 nodes do not see its kink when the residual is wide
        t = torch.linspace(-12, 12, 4001)
        weight = dist.Normal(0.0, 1.0).log_prob(t).exp()[:, None] * (t[1] - t[0])
        expected = (log_density(h + d.sqrt() * t[:, None]) * weight).sum()
        assert abs(total - expected) < 1e-3 * (1 + abs(expected))


@pytest.mark.parametrize("scale", [1e-3, 0.01, 0.1])
@pytest.mark.parametrize("kind", [lambda f, s: dist.StudentT(3.0, f, s), dist.Laplace, dist.Cauchy])
def test_likelihoods_narrow_against_q(kind, scale):
    """Cusps and heavy tails of a tenth of q's width and less, from its middle to a dozen standard deviations off."""
    model = one_function(KERNEL, lambda f: kind(f, scale))
    off = torch.tensor([0.0, 1e-3, 0.3, -1.7, 2.0, 4.1, 5.9, -12.0])
    d = torch.tensor([1.0, 1.0, 4.0, 0.25, 1.0, 1.0, 1.0, 1.0])
    h = torch.randn(8)
    y = h + d.sqrt() * off
    found, _, _ = densities_of(model, (torch.rand(8, 1), y), {"f": (h, d)})
    # Gauss-Legendre in panels that shrink towards the cusp.
    half = torch.logspace(-11, 2, 3000)
    ends = torch.cat([-half.flip(0), half])
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(5))
    f = y + (ends[:-1, None] + ends.diff()[:, None] * (nodes + 1) / 2).flatten()[:, None]
    log_weights = (ends.diff()[:, None] * weights / 2).log().flatten()[:, None]
    exact = torch.logsumexp(kind(f, scale).log_prob(y) + dist.Normal(h, d.sqrt()).log_prob(f) + log_weights, 0)
    torch.testing.assert_close(found["y"], exact, atol=1e-3, rtol=0)


def test_densities_that_are_not_finite_are_named():
    def model(x, y=None, mask=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)), poutine.mask(mask=True if mask is None else mask):
            pyro.sample("y", dist.Gamma(2.0, f.exp(), validate_args=False), obs=y)

    x, y = torch.rand(6, 1), torch.tensor([1.0, 2.0, -1.0, 3.0, float("nan"), 0.5])
    moments = {"f": (torch.zeros(6), torch.ones(6))}
    refused(r"site 'y' .* not finite in 2 of 6 rows, such as rows \[2, 4\]", densities_of, model, (x, y), moments)
    mask = torch.tensor([True, True, False, True, False, True])
    assert densities_of(model, (x, y, mask), moments)[0]["y"].isfinite().all()
    guide = prepared(model, SVGP(3), x, y, mask)
    refused(r"rows \[2, 4\]", diagnostics.predictive_scores, model, guide, x, y, num_samples=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_finite_features_leave_no_residual(dtype):
    """Under a kernel of finite features the value given w is known: the log likelihood is p(y | f) itself, never −∞."""
    torch.set_default_dtype(dtype)
    kernel = kernels.RandomFourier(kernels.RandomFourier.draw(kernels.RBF, 8, 1), torch.tensor([0.4]))

    model = one_function(kernel, lambda f: dist.Poisson(f.exp()))
    x = torch.rand(30, 1)
    y = dist.Poisson((2 * torch.sin(6 * x[:, 0])).exp()).sample()
    guide = trained(model, WeightSpace(), x, y, steps=5)
    tree = to_datatree(model, guide, x, y, num_samples=25, include_f=True, posterior_predictive=False)
    expected = dist.Poisson(torch.as_tensor(tree.posterior["f"].values).double().exp()).log_prob(y.double())
    np.testing.assert_allclose(tree.log_likelihood["y"], expected, atol=2e-3 if dtype == torch.float32 else 1e-5)


def test_integrated_densities_of_two_processes():
    """The mean in closed form at each node of the log noise, against a grid of both."""
    x, y = data(heteroscedastic, num=12)
    held = {"scale": torch.tensor(1.0), "length": torch.tensor([0.5, 0.5])}
    f, g = (torch.randn(12) * 0.3, torch.full((12,), 0.3)), (torch.randn(12) * 0.2 - 1.0, torch.full((12,), 0.2))
    found, _, quadratic = densities_of(heteroscedastic, (x, y), {"f": f, "g": g}, held)
    assert quadratic == ["f"]
    t = torch.linspace(-9, 9, 801)
    log_step = dist.Normal(0.0, 1.0).log_prob(t) + math.log(t[1] - t[0])
    ff = f[0] + f[1].sqrt() * t[:, None, None]
    gg = g[0] + g[1].sqrt() * t[:, None]
    joint = dist.Normal(ff, gg.exp()).log_prob(y) + log_step[:, None, None] + log_step[:, None]
    torch.testing.assert_close(found["y"], torch.logsumexp(joint, (0, 1)), atol=1e-4, rtol=1e-4)


def test_a_sum_is_one_normal():
    """Of two functions, of which one is known and the other is wide beside the noise, in either order."""
    x, _ = data(num=12)

    def model(x, y=None):
        f, g = (pyro.sample(name, GaussianProcess(KERNEL, x)) for name in "fg")
        return observed(dist.Normal(f - 2 * g, 0.01), y)

    known, wide = (torch.randn(12), torch.full((12,), 1e-4)), (torch.randn(12), torch.full((12,), 1.0))
    y = known[0] - 2 * wide[0] + torch.randn(12)
    for f, g in ((known, wide), (wide, known)):
        found, total, quadratic = densities_of(model, (x, y), {"f": f, "g": g})
        mean, variance = f[0] - 2 * g[0], f[1] + 4 * g[1]
        assert quadratic == ["f", "g"]
        torch.testing.assert_close(found["y"], dist.Normal(mean, (variance + 1e-4).sqrt()).log_prob(y))
        expected = dist.Normal(mean, 0.01).log_prob(y) - variance / (2 * 1e-4)
        assert total == pytest.approx(expected.sum().item())


def test_a_narrow_likelihood_beside_another_process():
    """Where it is narrow in f and wide in g, f is integrated adaptively, and g at fixed nodes."""
    x, _ = data(num=12)

    def model(x, y=None):
        g = pyro.sample("g", GaussianProcess(KERNEL, x))
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        return observed(dist.StudentT(3.0, f, 0.01 * g.exp()), y)

    f, g = (torch.randn(12), torch.full((12,), 1.0)), (torch.randn(12) * 0.2, torch.full((12,), 0.2))
    y = f[0] + torch.linspace(-2, 2, 12)
    found, *_ = densities_of(model, (x, y), {"g": g, "f": f})
    t, s = torch.linspace(-6, 6, 20001), torch.linspace(-6, 6, 41)
    step = [dist.Normal(0.0, 1.0).log_prob(part) + math.log(part[1] - part[0]) for part in (t, s)]
    exact = []
    for gs, weight in zip(g[0] + g[1].sqrt() * s[:, None], step[1]):
        of_f = dist.StudentT(3.0, f[0] + f[1].sqrt() * t[:, None], 0.01 * gs.exp()).log_prob(y)
        exact.append(torch.logsumexp(of_f + step[0][:, None], 0) + weight)
    torch.testing.assert_close(found["y"], torch.logsumexp(torch.stack(exact), 0), atol=2e-3, rtol=0)


def test_integrated_densities_of_several_outputs_and_grouped_rows():
    x, _ = data(num=10)
    groups = torch.arange(30) % 10
    y = torch.randn(10, 3)
    z = torch.randn(30)

    def model(x, y, z):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([3]).to_event(1))
        observed(dist.Normal(f.mT, 0.2).to_event(1), y)
        with pyro.plate("more", 30):
            pyro.sample("z", dist.Bernoulli(logits=f[0][groups]), obs=(z > 0).double())

    h, d = torch.randn(3, 10), 0.1 + torch.rand(3, 10)
    found, _, _ = densities_of(model, (x, y, z), {"f": (h, d)})
    dense = dist.Normal(h, (0.04 + d).sqrt()).log_prob(y.mT).sum(0)
    torch.testing.assert_close(found["y"], dense, atol=1e-6, rtol=1e-6)
    binary = (z > 0).double()
    dense = dense_log_evidence(lambda f: dist.Bernoulli(logits=f).log_prob(binary), h[0][groups], d[0][groups])
    torch.testing.assert_close(found["z"], dense, atol=2e-2, rtol=1e-2)  # 128 points for three outputs


def test_masked_rows_are_left_out():
    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)), poutine.mask(mask=True if y is None else ~y.isnan()):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    x, y = data(num=30)
    y[[3, 8]] = torch.nan
    guide = trained(model, SVGP(6), x, y, steps=10)
    tree = to_datatree(model, guide, x, y, num_samples=4, coords={"data": np.arange(30) + 50})
    assert tree.log_likelihood["y"].shape == (1, 4, 28)
    assert tree.log_likelihood["data"].values[3] == 54
    assert tree.posterior_predictive["data"].values[3] == 53
    tree = to_datatree(model, guide, x, y, num_samples=4)
    assert 3 not in tree.log_likelihood["data"].values
    assert 29 in tree.log_likelihood["data"].values
    assert np.isfinite(tree.log_likelihood["y"]).all()


def test_mini_batching_models_are_read_whole():
    def model(x, y=None):
        f_noise = pyro.sample("noise", dist.HalfNormal(1.0))
        plate = pyro.plate("data", len(x), subsample_size=8)
        with plate as rows:
            pass
        f = pyro.sample("f", GaussianProcess(KERNEL, x[rows]))
        with plate:
            pyro.sample("y", dist.Normal(f, f_noise), obs=None if y is None else y[rows])

    x, y = data(num=40)
    guide = trained(model, SVGP(6), x, y, steps=10)
    tree = to_datatree(model, guide, x, y, num_samples=4)
    assert tree.log_likelihood["y"].shape == (1, 4, 40)


@pytest.mark.parametrize("family", [SVGP(10), Exact()], ids=["SVGP", "Exact"])
def test_predictions_share_the_draws_and_are_predict(family):
    """Predictions at new inputs come from the posterior's own draws, and are distributed as ``predict``'s."""

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        return observed(dist.Normal(pyro.sample("mu", dist.Normal(0.0, 0.1)) + f, 0.3), y)

    guide, x, y = fitted(model, family, steps=10)
    new = torch.rand(4, 2)
    tree = to_datatree(guide.model, guide, x, y, num_samples=500, predict=new, seed=0, log_likelihood=False)
    q = guide.posterior(new)["f"]
    f = torch.as_tensor(tree.predictions["f"].values[0]).double()
    torch.testing.assert_close(f.mean(0), q.mean, atol=0.05, rtol=0)
    torch.testing.assert_close(f.T.cov(), q.covariance_matrix, atol=0.05, rtol=0)
    # f given the draw's coefficients has the residual's variance only
    w = torch.as_tensor(tree.posterior["f_w"].values[0]).double()
    explained = f - (q.features[0] @ w.mT).mT
    residual = q.process.variance - q.features[0].square().sum(-1)
    torch.testing.assert_close(explained.var(0), residual, atol=0.05, rtol=0)


def test_mcmc_draws():
    """NUTS' tree has the same groups; the log likelihood is given all other values."""
    x, y = data(num=15)
    kernel = NUTS(poutine.reparam(regression, config=Whitening()))
    mcmc = MCMC(kernel, num_samples=8, warmup_steps=8, disable_progbar=True)
    mcmc.run(x, y)
    tree = to_datatree(regression, mcmc, x, y, predict=x[:3] + 0.1, include_f=True)
    assert tree.posterior["f"].dims == ("chain", "draw", "data")
    assert tree.predictions["y"].shape == (1, 8, 3)
    assert "log_q" not in tree.sample_stats
    values = {name: torch.as_tensor(tree.posterior[name].values[0, 5]) for name in ("scale", "length", "noise", "f")}
    trace = poutine.trace(poutine.condition(regression, values)).get_trace(x, y)
    process, rest = trace.nodes["f"]["fn"], torch.arange(15) != 4
    alone = GaussianProcess(process.kernel, x[4:5]).given(x[rest], values["f"][rest])
    expected = dist.Normal(alone.mean, (alone.variance + values["noise"] ** 2).sqrt()).log_prob(y[4])
    torch.testing.assert_close(tree.log_likelihood["y"].values[0, 5, 4], expected.item(), atol=1e-4, rtol=1e-4)
    samples = {name: value[0] for name, value in mcmc.get_samples(group_by_chain=True).items()}
    assert to_datatree(regression, samples, x, y).posterior["noise"].shape == (1, 8)


def test_refusals():
    guide, x, y = fitted()
    refused("num_samples", to_datatree, regression, guide, x, y, num_samples=0)
    refused("given another", to_datatree, bernoulli, guide, x, y)
    refused("must be an AutoSparseGP guide", to_datatree, regression, 3, x, y)
    refused("give the training", to_datatree, regression, guide, x)
    refused("has not been called", lambda: to_datatree(regression, AutoSparseGP(regression, SVGP(3)), x, y))
    refused("got list", to_datatree, regression, [], x, y)
    svi = pyro.infer.SVI(regression, guide, pyro.optim.Adam({}), TraceQuadrature_ELBO())
    assert to_datatree(regression, svi, x, y, num_samples=2).posterior["noise"].shape == (1, 2)


def test_looking_changes_nothing():
    """A guide in training is as it was after its tree was made, its sites too."""
    guide, x, y = fitted(family=SGPR(8))
    before = {name: value.clone() for name, value in guide.state_dict().items() if isinstance(value, torch.Tensor)}
    assert guide.training
    to_datatree(regression, guide, x, y, num_samples=2)
    assert guide.training
    after = guide.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("model", [regression, bernoulli])
def test_observations_of_the_wrong_shape_are_refused(model):
    guide, x, y = fitted(model, steps=2)
    for wrong in (y[:, None], y[None], y[:1], y[0]):
        for call in (to_datatree, diagnostics.predictive_scores):
            with pytest.raises(ValueError, match=r"site .y. (has observations|observes data) of shape .*(Give|write)"):
                call(model, guide, x, wrong, num_samples=2)
    samples = {"f": torch.zeros(3, 40)}
    plain = one_function(KERNEL, lambda f: dist.Normal(f, 0.2))
    refused("site 'y' has observations", to_datatree, plain, samples, x, y[:, None])


def test_arguments_that_a_tree_cannot_take():
    guide, x, y = fitted(steps=1)
    plain = one_function(KERNEL, lambda f: dist.Normal(f, 0.2))
    for model, result in ((regression, guide), (plain, {"f": torch.zeros(3, 40)})):
        refused("predict= holds obs.* 'y'", to_datatree, model, result, x, y, num_samples=2, predict=(x[:3], y[:3]))

    def slashed(x, y=None):
        f = pyro.sample("gp/f", GaussianProcess(KERNEL, x))
        return observed(dist.Normal(f, 0.2), y)

    other = prepared(slashed, SVGP(5), x, y)
    refused("names containing the '/' character.*'gp/f", to_datatree, slashed, other, x, y, num_samples=2)
