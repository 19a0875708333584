"""What a new user is told: each message names what came, and what to write instead."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    fit,
    kernels,
    predict,
)
from pyro_sparsegp.families import SGPR, SVGP, SparseEP

from .models import observed, one_function, prepared, refused

model = one_function(kernels.RBF(0.3), lambda f: dist.Normal(f, 0.1))
classes = one_function(kernels.RBF(0.3), lambda f: dist.Bernoulli(logits=f))
counts = one_function(kernels.RBF(0.3), lambda f: dist.Binomial(3, logits=f))


def data(num=20):
    x = torch.linspace(-1, 1, num)[:, None]
    return x, torch.sin(4 * x[:, 0])


@pytest.mark.parametrize("later", [False, True], ids=["first call", "later step"])
@pytest.mark.parametrize("family", [SVGP(5), SGPR(5)], ids=lambda f: type(f).__name__)
def test_data_that_do_not_fit(family, later):
    """(N, 1) under (N,) would be (N, N) values, of which the plate has N; one row of data would be that of all."""
    x, y = data()
    given = r"site 'y' observes data of shape"
    for bad, match in (
        (y[:, None], rf"{given} \(20, 1\) .* of shape \(20,\),.*y\[:, 0\]"),
        (y[:1], rf"{given} \(1,\) .* of shape \(20,\),.*one value.*y\.expand\(\(20,\)\)"),
        (y[:7], rf"{given} \(7,\) under .* of shape \(20,\)"),
        (y.numpy(), r"site 'y' observes a ndarray.*torch.as_tensor\(y\)"),
    ):
        guide = AutoSparseGP(model, family)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
        if later:
            svi.step(x, y)
        refused(match, svi.step, x, bad)
    AutoSparseGP(model, SVGP(1))(x[:1], y[:1])


def columns(x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
    pyro.sample("y", dist.Normal(f[:, None], 0.1), obs=y)


@pytest.mark.parametrize(
    ("program", "family", "of", "match"),
    [
        (model, SparseEP(5), lambda y: y[:, None], r"site 'y' observes data of shape \(20, 1\)"),
        (columns, SVGP(5), lambda y: y, r"of shape \(20,\) under a distribution of shape \(20, 1\).*the shape of the"),
        (
            classes,
            SVGP(5),
            lambda y: y > 0,
            r"site 'y' .* dtype is torch.bool, which Bernoulli does not.*y\.to\(x\.dtype",
        ),
        (classes, SVGP(5), lambda y: (y > 0).long(), r"site 'y' .* dtype is torch.int64, which Bernoulli"),
        (counts, SVGP(5), lambda y: 4 + 0 * y, r"site 'y' has no density(?!.*Classes count)"),
        (classes, None, lambda y: y, r"Got None\Z"),
    ],
)
def test_data_of_another_kind(program, family, of, match):
    x, y = data()
    refused(match, lambda: AutoSparseGP(program, family)(x, of(y)))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("num", [1, 7])
def test_predictions_by_a_model_that_holds_training_data(num, used):
    """They were those data, or torch's error where the model computes with them."""

    def after(x, y=None):
        seen = model(x, y)
        return pyro.deterministic("double", seen + torch.zeros(len(x))) if used else seen

    x, y = data()
    held = pyro.condition(after, data={"y": y})
    guide = prepared(held, SVGP(5), x)
    new, free = x[:num] + 0.01, pyro.poutine.uncondition(after)
    match = rf"site 'y' observes data of shape \(20,\), and has a distribution of shape \({num},\).*model\(x, y=None\)"
    samples = {"f": torch.zeros(2, 20)}
    refused(match, predict, held, guide, new, num_samples=2)
    refused(match, predict, held, samples, new, data=(x,))
    if not used:
        refused(match, lambda: predict(lambda x: held(x), guide, new, num_samples=2))
        assert predict(free, guide, new, num_samples=2)["y"].shape == (2, num)
    assert predict(free, samples, new, data=(x,))["y"].shape == (2, num)
    assert predict(held, guide, x, num_samples=2)["f"].shape == (2, 20)


def test_a_prediction_at_other_rows_than_a_plate_has():
    def fixed(x, y=None):
        rows = pyro.plate("rows", 20).indices
        return model(x[rows], y)

    x, y = data()
    guide = prepared(fixed, SVGP(5), x, y)
    refused(r"index .*\(index 7 is out of bounds.*pyro.plate\('data', len\(x\)\)", predict, fixed, guide, x[:7])


def test_data_of_a_fit_without_rows():
    x, y = data()
    with pytest.raises(ValueError, match=r"data has no tensor or array with rows\. torch"):
        fit(model, AutoSparseGP(model, SVGP(5)), (x.tolist(), y.tolist()), steps=1)


def test_one_level_for_all_rows_is_no_fault():
    x, y = data()

    def constant(x, y, event_dim=0):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("data", len(x)):
            pyro.deterministic("all", f, event_dim=1)
            pyro.factor("none", torch.zeros(()))
            pyro.sample("y", dist.Normal(f, 0.1).expand(y.shape).to_event(event_dim), obs=y)
            pyro.sample("z", dist.Normal(0.0, 1.0), obs=torch.zeros(()))

    AutoSparseGP(constant, SVGP(5))(x, y)
    match = r"site 'y' .* shape \((2, )?20,?\) under .*take \.to_event away, or move the site out of the plate"
    for own in (y, y.expand(2, -1)):  # Pyro makes N events of N rows
        refused(match, AutoSparseGP(constant, SVGP(5)), x, own, own.dim())


def test_a_guide_that_saw_no_data():
    (x, y), num = data(), 20
    match = r"first call observes nothing.*train it first, svi\.step\(x, y\)"
    refused(match, lambda: AutoSparseGP(model, SVGP(5)).posterior(x[:num]))
    guide = AutoSparseGP(model, SVGP(5))
    refused(match, predict, model, guide, x[:num])
    refused(match, guide, x[:num])
    guide(x, y)  # and it goes on
    assert predict(model, guide, x[:num], num_samples=2)["f"].shape == (2, num)
    refused("3 distinct inputs", AutoSparseGP(model, SVGP(5)), x[:3], y[:3])


@pytest.mark.parametrize("family", [SVGP(5), SGPR(5)])
def test_a_later_step_without_data(family):
    """``svi.step(x)`` in the place of ``svi.step(x, y)`` would draw y from the model, and train on no data."""
    x, y = data()
    guide = AutoSparseGP(model, family)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2))
    for _ in range(3):
        svi.step(x, y)
    before = guide.posterior(x)["f"].mean
    match = r"this step observes nothing, but the first call observed 'y'.*svi\.step\(x, y\)"
    refused(match, svi.step, x)
    assert torch.equal(guide.posterior(x)["f"].mean, before)
    assert math.isfinite(svi.evaluate_loss(x))  # to look is no step
    svi.step(x, y)
    ep = ExpectationPropagation(model, AutoSparseGP(model, SparseEP(5)), pyro.optim.Adam({"lr": 0.02}))
    ep.step(x, y)
    for refine in (ep.step, ep.sweep):
        refused("this step observes nothing", refine, x)
    ep.step(x, y)


def test_a_latent_that_a_state_does_not_have():
    """A prediction draws it from its prior, which is told; training afterwards is refused as it is before."""
    x = torch.rand(20, 1)
    y = torch.sin(6 * x[:, 0])

    def model(x, y=None, noise=None):
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0)) if noise is None else noise
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        return observed(dist.Normal(f, noise), y)

    def before(x, y=None):
        return model(x, y, 0.1)

    old, new = AutoSparseGP(before, SVGP(5)), AutoSparseGP(model, SVGP(5))
    old(x, y)
    new.load_state_dict(old.state_dict())
    with pytest.warns(UserWarning, match=r"site 'noise' is neither a latent site that the guide knows, \['f'\], nor"):
        new.posterior(x)
    svi = pyro.infer.SVI(model, new, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    refused("there is a latent site 'noise', which q does not know", svi.step, x, y)


@pytest.mark.parametrize("as_input", [False, True])
def test_a_latent_of_each_datum(as_input):
    """Independent of f it is told of; as the GP's input it is no rival of f's values."""
    x = torch.rand(20, 1)
    y = torch.sin(6 * x[:, 0])

    def model(x, y=None):
        data = pyro.plate("data", len(x))
        with data:
            e = pyro.sample("e", dist.Normal(x[:, 0], 0.1))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), e[:, None] if as_input else x))
        with data:
            return pyro.sample("y", dist.Normal(f if as_input else f + e, 0.1), obs=y)

    guide = AutoSparseGP(model, SVGP(5), independent=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        svi.step(x, y)
    found = [str(one.message) for one in told if "has a value for each datum" in str(one.message)]
    assert len(found) == (not as_input)


@pytest.mark.filterwarnings("ignore")  # of Pyro's DiscreteHMM
def test_a_chain_of_states_is_no_likelihood_of_single_values():
    x, y = torch.linspace(0, 1, 6)[:, None], torch.randn(6)

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        states = dist.Normal(torch.stack([f, f + 2], -1), 0.3)
        pyro.sample("y", dist.DiscreteHMM(torch.zeros(2), 2 * torch.eye(2), states), obs=y)

    svi = SVI(model, AutoSparseGP(model, SGPR(3)), pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    refused(r"GP site .f. .* does not factorise.* such as SVGP", svi.step, x, y)
