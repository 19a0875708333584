"""Data of which some are missing: poutine.mask, and single values of an event."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels
from pyro_sparsegp.families import SGPR, SVGP

from .models import FAMILIES, conditional, draws_of, observed, prepared, refused, train

NOISE = 0.2
KERNEL = kernels.RBF(0.3)[0] + kernels.Linear(1.0)
LIKELIHOODS = {"normal": lambda f: dist.Normal(f, NOISE), "bernoulli": lambda f: dist.Bernoulli(logits=f)}


def model(likelihood):
    def program(x, y=None, mask=None, size=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x, jitter=1e-10))
        with pyro.plate("data", size or len(x), subsample=x), poutine.mask(mask=True if mask is None else mask):
            return pyro.sample("y", LIKELIHOODS[likelihood](f), obs=y)

    return program


def data(likelihood):
    x = torch.rand(30, 2)
    y = torch.sin(6 * x[:, 0]) + NOISE * torch.randn(30)
    y = (y > 0).double() if likelihood == "bernoulli" else y
    mask = (torch.rand(30) < 0.7) & (x[:, 0] < 0.8)
    return x, torch.where(mask, y, torch.nan), mask


def test_obs_mask():
    x, y, mask = data("normal")

    def program(x, y, mask):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, NOISE), obs=y, obs_mask=mask)

    refused(r"'y_unobserved'.*poutine\.mask", AutoSparseGP(program, FAMILIES["SVGP"]), x, y, mask)


def outputs(mask_of):
    def program(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x, jitter=1e-10).expand([2]).to_event(1))
        return observed(mask_of(dist.Normal(f.mT, NOISE), y).to_event(1), y)

    return program


@pytest.fixture
def partly():
    x = torch.rand(20, 2)
    y = torch.stack([torch.sin(6 * x[:, 0]), x[:, 1]], -1)
    y[3, 0], y[5], y[7, 1] = torch.nan, torch.nan, torch.nan
    return x, y


def test_nan_in_an_event_says_what_to_do(partly):
    with pytest.raises(ValueError, match=r"4 of 40 are NaN.*isnan\(\).any\(-1\)\).*\.mask\(~y.isnan\(\)\).to_event"):
        AutoSparseGP(outputs(lambda fn, y: fn), SGPR(8))(*partly)


@pytest.mark.parametrize("family", ["SGPR", "SVGP", "ComputationAwareSparse"])
def test_single_values_of_an_event_are_masked(partly, family):
    x, y = partly
    program = outputs(lambda fn, y: fn if y is None else fn.mask(~y.isnan()))
    guide = AutoSparseGP(program, SGPR(x) if family == "SGPR" else FAMILIES[family])
    assert all(loss < 1e4 for loss in train(program, guide, x, y, steps=3))
    assert all(parameter.isfinite().all() for parameter in guide.parameters())
    if family != "SGPR":
        return
    q = prepared(program, SGPR(x, trainable=False), x, y).posterior(x)["f"]
    for p in range(2):
        known = ~y[:, p].isnan()
        mean, covariance = conditional(KERNEL, x[known], y[known, p], NOISE, x)
        torch.testing.assert_close(q.mean[p], mean, atol=1e-4, rtol=0)
        torch.testing.assert_close(q.variance[p], covariance.diagonal(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["SVGP", "SGPR"])
def test_a_mask_of_the_whole_model(family):
    """One that leaves all out costs nothing and teaches nothing, one of rows would count latents once for each."""
    x, _, rows = data("normal")
    y, program = torch.sin(6 * x[:, 0]), model("normal")
    for mask in (False, torch.tensor(False)):
        nothing = poutine.mask(program, mask=mask)
        assert train(nothing, AutoSparseGP(nothing, FAMILIES[family]), x, y, steps=2) == [0.0, 0.0]
    plain = AutoSparseGP(program, FAMILIES[family])
    everything = AutoSparseGP(poutine.mask(program, mask=torch.tensor(True)), FAMILIES[family])
    losses = []
    for guide in (plain, everything):
        pyro.set_rng_seed(0)
        losses.append(train(guide.model, guide, x, y, steps=2))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    with pytest.raises(ValueError, match=r"site 'f'.*mask of shape \(30,\).*once for each row.*around the observed"):
        AutoSparseGP(poutine.mask(program, mask=rows), FAMILIES[family])(x, y)


def test_an_intercept_beside_a_deterministic_site():
    """It is made of latents, and makes nothing a hyperparameter."""
    x, y, _ = data("normal")

    def program(x, y):
        mu, f = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("f", GaussianProcess(KERNEL, x))
        observed(dist.Normal(pyro.deterministic("eta", mu + f), NOISE), y)

    assert {*prepared(program, FAMILIES["SVGP"], x, y.nan_to_num()).joint.field} == {"mu", "f"}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("what", ["mask", "scale", "mask of the distribution"])
def test_a_mask_made_of_function_values_is_refused(likelihood, what):
    """A run that is held like another has that one's masks, so that a posterior trained at 1.1 for 12.0 nats."""
    x, y, _ = data(likelihood)

    def program(x, y):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        fn, keep = LIKELIHOODS[likelihood](f), f > 0
        around = {"mask": poutine.mask(mask=keep), "scale": poutine.scale(scale=f.exp())}
        with pyro.plate("data", len(x)), around.get(what, poutine.mask(mask=True)):
            pyro.sample("y", fn if what in around else fn.mask(keep), obs=y.nan_to_num())

    for family in (SVGP(5), SGPR(5)):
        message = rf"site 'y': its {what[:5].strip()} depends on function values.*pyro\.factor"
        refused(message, AutoSparseGP(program, family), x, y)


def test_a_factor_under_a_mask():
    x, y, mask = data("normal")

    def program(is_masked):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)), poutine.mask(mask=mask if is_masked else True):
            pyro.factor("y", dist.Normal(f, NOISE).log_prob(y.nan_to_num()) * (1.0 if is_masked else mask))

    losses = [train(program, AutoSparseGP(program, SGPR(5)), how, steps=1) for how in (True, False)]
    assert losses[0] == pytest.approx(losses[1])


def effects(keep, masks, rows=None):
    """Group effects of which a mask leaves some out: the site's, or the distribution's; and of these groups' data."""

    def program(x, group, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.3), x))
        with pyro.plate("groups", 4), poutine.mask(mask=keep if masks == "site" else True):
            prior = dist.Normal(0.0, 1.0)
            a = pyro.sample("a", prior if masks == "site" else prior.mask(keep))
        with poutine.mask(mask=True if rows is None else rows):
            observed(dist.Normal(f + a[group], 0.1), y)

    return program


def test_a_mask_of_a_latent():
    """It leaves out the posterior's density, too, which matters where data touch the latent; a distribution's mask, of
    a flat prior, does not.
    """
    x, group = torch.linspace(0, 1, 40)[:, None], torch.arange(40) % 4
    y = torch.sin(6 * x[:, 0]) + (group - 1.5) * 0.5
    keep = torch.tensor([True, True, False, False])
    for mask in (keep, torch.tensor(False), False):
        refused(r"'a'.*poutine\.mask.*\.mask\(keep\)", AutoSparseGP(effects(mask, "site"), SGPR(x)), x, group, y)
    prepared(effects(keep, "site", group < 2), FAMILIES["Exact"], x, group, y)  # padding, with the rows that it has
    program = effects(keep, "distribution")
    guide = AutoSparseGP(program, FAMILIES["Exact"])
    train(program, guide, x, group, y, steps=100, lr=0.02)
    # Given y = Za + e, e ~ N(0, K + σ²I), a ~ N(0, diag(1, 1, ∞, ∞)).
    design = torch.nn.functional.one_hot(group).to(x)
    weighed = torch.linalg.solve(kernels.Matern32(0.3)(x) + 0.01 * torch.eye(40), torch.cat([design, y[:, None]], 1))
    precision = torch.diag(keep.to(x)) + design.mT @ weighed[:, :4]
    draws = draws_of(guide, "a", x[:2] + 0.01, group[:2])
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    mean = torch.linalg.solve(precision, design.mT @ weighed[:, 4])
    assert ((draws.mean(0) - mean).abs() < 0.3 * sd).all()
    assert ((draws.std(0) / sd).log().abs() < 0.3).all()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_one_output_that_is_missing_at_the_end_follows_the_other(dtype):
    """As test_variational_multitask of GPyTorch's test/examples/test_missing_data.py, whose bound on errors is .3."""
    torch.set_default_dtype(dtype)
    x, new = (torch.linspace(0, 1, num)[:, None] for num in (41, 51))
    truth, noise = (2 * torch.pi * x).sin() * torch.tensor([1.0, -1.0]), 0.2 * torch.randn(41, 2)
    y = (truth + noise).index_put((torch.arange(38, 41), torch.tensor(1)), torch.tensor(torch.nan))

    def model(x, y=None):
        variance, length = (pyro.param(n, torch.tensor(0.693), constraint=constraints.positive) for n in ("v", "l"))
        noise = pyro.param("n", torch.full((2,), 0.693), constraint=constraints.positive)
        f = pyro.sample("f", GaussianProcess(variance * kernels.RBF(length), x))
        loc = f[:, None] * pyro.param("a", torch.tensor([0.7, -0.4]))
        seen = torch.ones_like(loc, dtype=torch.bool) if y is None else ~y.isnan()
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(loc, noise.sqrt()).mask(seen).to_event(1), obs=y)

    guide = AutoSparseGP(model, SVGP(21))
    train(model, guide, x, y, steps=100, lr=0.05)
    found = guide.posterior(new)["f"].mean[:, None] * pyro.param("a")
    assert (found - (2 * torch.pi * new).sin() * torch.tensor([1.0, -1.0])).abs().max() < 0.3
