"""The unchanged model under prior predictive sampling and NUTS, with and without whitening."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Predictive

from pyro_sparsegp import GaussianProcess, Whitening, WhitenReparam, kernels, predict
from pyro_sparsegp.families import SVGP
from pyro_sparsegp.predict import Trained

from .models import data, gaussian, observed, refused, trained


def model(x, y=None, size=None):
    """The README's model."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    return observed(dist.Normal(f, noise), y, x, size)


def test_prior_predictive():
    draws = Predictive(model, num_samples=5)(torch.rand(8, 2))
    assert draws["y"].shape == (5, 8)


def test_whitening_changes_nothing_but_the_coordinates():
    x, y = data(num=10)
    white = poutine.reparam(model, config=Whitening())
    trace = poutine.trace(poutine.condition(white, {"scale": torch.tensor(1.5)})).get_trace(x, y)
    noise, f = trace.nodes["f_whitened"]["value"], trace.nodes["f"]["value"]
    process = GaussianProcess(1.5 * kernels.Matern32(trace.nodes["length"]["value"]), x)
    torch.testing.assert_close(f, process.scale_tril @ noise)
    # log p(ε) − log |L| = log p(f)
    log_det = process.scale_tril.diagonal().log().sum()
    density = trace.nodes["f_whitened"]["fn"].log_prob(noise) - log_det
    torch.testing.assert_close(density, process.log_prob(f))
    # a value given for f is taken back to ε
    with poutine.trace():
        result = WhitenReparam().apply({"name": "f", "fn": process, "value": f, "is_observed": False})
    torch.testing.assert_close(result["value"], f)
    with pytest.raises(ValueError, match="site 'z' is a Normal"):
        WhitenReparam().apply({"name": "z", "fn": dist.Normal(0.0, 1.0), "value": None, "is_observed": False})


def test_whitening_of_several_outputs():
    def several(x):
        pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x).expand([3]).to_event(1))

    trace = poutine.trace(poutine.reparam(several, config=Whitening())).get_trace(torch.rand(4, 2))
    assert trace.nodes["f_whitened"]["value"].shape == trace.nodes["f"]["value"].shape == (3, 4)


def test_predictions_from_draws_are_the_conditional_process():
    x, y = data(num=12)
    new = torch.rand(5, 2)
    sample = {"scale": torch.tensor(1.2), "length": torch.tensor([0.4, 0.6]), "noise": torch.tensor(0.2)}
    kernel = 1.2 * kernels.Matern32(sample["length"])
    f = GaussianProcess(kernel, x).sample()
    many = {name: value.expand(150, *value.shape) for name, value in (sample | {"f": f}).items()}
    draws = predict(model, many, new, data=(x, y))
    exact = GaussianProcess(kernel, new).given(x, f)
    assert draws["f"].shape == draws["y"].shape == (150, 5)
    white = torch.linalg.solve_triangular(exact.scale_tril, (draws["f"] - exact.mean).mT, upper=False)
    torch.testing.assert_close(white.mean(-1), torch.zeros(5), atol=4 / 150**0.5, rtol=0)
    torch.testing.assert_close(white.cov(), torch.eye(5), atol=4 * (2 / 150) ** 0.5, rtol=0)
    assert abs((draws["y"] - draws["f"]).std() - 0.2) < 0.02
    # at the training inputs, the same f comes back
    again = predict(model, many, x, data=(x, y), num_samples=3)
    torch.testing.assert_close(again["f"], f.expand(3, 12), atol=2e-3, rtol=0)
    white = {k: v for k, v in many.items() if k != "f"}
    white["f_whitened"] = torch.linalg.solve(GaussianProcess(kernel, x).scale_tril, f).expand(150, 12)
    known = Trained(model, {k: v[0] for k, v in white.items()}, (x, y), {}, set())
    torch.testing.assert_close(known.known["f"][1], f)


def test_predict_refuses():
    x, y = data(num=12)
    refused("must be an AutoSparseGP guide", predict, model, 3, x)
    refused(r"pass data=\(x, y\)", predict, model, {"f": torch.zeros(2, 12)}, x)
    refused("no draws of GP site 'f'", predict, model, {"scale": torch.ones(2)}, x, data=(x, y))
    refused("an MCMC that has run", lambda: predict(model, MCMC(NUTS(model), num_samples=1), x))
    refused("num_samples", predict, model, {"f": torch.zeros(2, 12)}, x, data=(x, y), num_samples=3)


def test_predict_under_another_likelihood():
    x, y = data(num=12)
    guide = trained(model, SVGP(4), x, y, steps=3)

    def other(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(), x))
        return pyro.sample("positive", dist.Delta((f > 0).double()).to_event(1))

    assert predict(other, guide, x, num_samples=2)["positive"].shape == (2, 12)


def test_hmc_survives_a_failed_cholesky():
    x, _ = data(num=15)
    failures = [0]

    class Fragile(kernels.RBF):
        def __call__(self, x, z=None):
            k = super().__call__(x, z)
            if self.lengthscale > 1.5:
                failures[0] += 1
                return k * torch.nan
            return k

    def fragile(x, y):
        length = pyro.sample("length", dist.LogNormal(-1.0, 0.5))
        f = pyro.sample("f", GaussianProcess(Fragile(length), x))
        observed(dist.Normal(f, 0.2), y)

    pyro.set_rng_seed(1)
    white = poutine.reparam(fragile, config=Whitening())
    start = {"length": torch.tensor(-0.5), "f_whitened": torch.zeros(15)}
    kernel = NUTS(white, max_tree_depth=4)
    mcmc = MCMC(kernel, num_samples=10, warmup_steps=8, initial_params=start, disable_progbar=True)
    mcmc.run(x, x.new_zeros(15))
    assert failures[0] > 0
    assert (mcmc.get_samples()["length"] <= 1.5).all()


def test_a_tree_says_which_transitions_diverged():
    x, y = data(num=6)
    short = gaussian(kernels.RBF(0.4), 0.3)
    mcmc = MCMC(NUTS(short, step_size=1e3, adapt_step_size=False), num_samples=4, warmup_steps=0, disable_progbar=True)
    mcmc.run(x, y)
    diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
    pytest.importorskip("xarray")
    tree = diagnostics.to_datatree(short, mcmc, x, y)
    assert tree.sample_stats["diverging"].dtype == bool
    assert tree.sample_stats["diverging"].shape == (1, 4)
    assert tree.sample_stats["diverging"].all()
