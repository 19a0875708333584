"""Diagnostics of what was built beside them: expectation propagation, deep bases, several outputs."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ExactWeightSpace, SparseEP

from .models import observed, one_function, prepared, refused

arviz_stats = pytest.importorskip("arviz_stats")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")


gaussian = one_function(kernels.RBF(0.5), lambda f: dist.Normal(f, 0.2))


def data(num=30):
    x = torch.linspace(-1, 1, num)[:, None]
    return x, torch.sin(4 * x[:, 0]) + 0.2 * torch.randn(num)


def test_expectation_propagation_is_judged_by_its_own_target():
    x, y = data()
    guide = AutoSparseGP(gaussian, SparseEP(6))
    ep = ExpectationPropagation(gaussian, guide, pyro.optim.Adam({"lr": 0.0}), damping=1.0)
    for _ in range(5):
        ep.sweep(x, y)
    tree = diagnostics.to_datatree(gaussian, ep, x, y, num_samples=100, seed=0)
    stats = tree["sample_stats"]
    assert tree.sample_stats.attrs["target"] == "fitc"
    assert float((stats["log_q"] - stats["lp"]).std()) < 1e-6  # q is the target, for a Gaussian likelihood
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some observations are influential
        loo = arviz_stats.loo_approximate_posterior(tree, stats["lp"], stats["log_q"])
    covariance = kernels.RBF(0.5)(x) + 0.04 * torch.eye(30)
    precision = covariance.inverse()
    mean, variance = y - precision @ y / precision.diagonal(), 1 / precision.diagonal()
    exact = dist.Normal(mean, variance.sqrt()).log_prob(y).sum()
    assert abs(float(loo.elpd) - exact) < 3


def test_khat_takes_the_guides_own_target():
    """Towards expectation propagation's target its draws have equal weights."""
    x, y = data(80)

    poisson = one_function(kernels.RBF(0.5), lambda f: dist.Poisson(f.exp()))
    for model, seen, tolerance in ((gaussian, y, 1e-5), (poisson, torch.poisson((y + 1).clamp(0)), 0.4)):
        guide = AutoSparseGP(model, SparseEP(6))
        ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.0}), damping=0.7)
        ep.sweep(x, seen, num=20)
        tree = diagnostics.to_datatree(model, ep, x, seen, num_samples=400, seed=0, posterior_predictive=False)
        assert diagnostics.psis(tree).target == "fitc"
        assert float((tree.sample_stats["lp"] - tree.sample_stats["log_q"]).std()) < tolerance


def deep_model():
    """A regression on the features of a small network, and the network."""
    network = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()

    def model(x, y=None):
        pyro.module("network", network)
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(network), x))
        return observed(dist.Normal(f, 0.2), y)

    return model, network


def test_scores_of_several_outputs():
    x, y = data()

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x).expand([2]).to_event(1))
        return observed(dist.Normal(f.mT, 0.2).to_event(1), y)

    guide = AutoSparseGP(model, SVGP(8))
    ys = torch.stack([y, -y], -1)
    guide(x, ys)
    scores = diagnostics.predictive_scores(model, guide, x, ys, num_samples=20)
    found = scores.tree["predictive_scores"]
    assert found["log_score"].shape == (30,)
    assert found["crps"].shape == found["pit"].shape == (30, 2)


def test_a_tree_holds_the_posterior_that_the_guide_predicts_with():
    """Under a variance correction q(w) is that of eq. 12, optimal for integrated densities: of precision 1/(σ² + c)."""
    x, y = data(40)
    num, error = 100, 5 / 100**0.5  # five standard errors of a mean, in standard deviations
    model, network = deep_model()
    guide = prepared(model, ExactWeightSpace(), x, y)
    new = torch.linspace(-1.5, 1.5, 7)[:, None]
    options = {"num_samples": num, "predict": new, "include_f": True, "seed": 0}
    tree = diagnostics.to_datatree(model, guide, x, y, **options)
    phi = network(x).detach()
    c = phi.square().sum(-1).max() - phi.square().sum(-1)
    precision = torch.eye(4) + phi.T @ (phi / (0.04 + c)[:, None])
    mean = torch.linalg.solve(precision, phi.T @ (y / (0.04 + c)))
    spread = torch.linalg.inv(precision).diagonal().sqrt()
    w = torch.as_tensor(tree.posterior["f_w"].values[0])
    assert (((w.mean(0) - mean) / spread).abs() < error).all()
    assert ((w.std(0) / spread - 1).abs() < error / 2**0.5).all()
    vfe = torch.linalg.solve(torch.eye(4) + phi.T @ phi / 0.04, phi.T @ y / 0.04)
    assert (((vfe - mean) / spread).abs() > 0.3).any()  # which training uses, and the tree must not
    for variable, inputs, group in (("f", new, "predictions"), ("f", x, "posterior")):
        found = tree[group][variable].values[0]
        with torch.no_grad():
            q = guide.posterior(inputs)["f"]
            middle, width = q.mean.numpy(), q.stddev.numpy()
        np.testing.assert_allclose(found.mean(0), middle, atol=error * width.max())
        np.testing.assert_allclose(found.std(0) / width, 1, atol=error / 2**0.5)
    labels = torch.sin(4 * new[:, 0])  # new rows keep the level of the training rows
    with torch.no_grad():
        q = guide.posterior(new)["f"]
        expected = dist.Normal(q.mean, (q.variance + 0.04).sqrt()).log_prob(labels)
    scores = diagnostics.predictive_scores(model, guide, new, labels, num_samples=1)
    np.testing.assert_allclose(scores.pointwise["log_score"], expected, rtol=1e-6)
    stats = tree.sample_stats
    assert stats.attrs["target"] == "fitc"
    assert float((stats["lp"] - stats["log_q"]).std()) < 1e-6
    evidence = dist.MultivariateNormal(torch.zeros(40), phi @ phi.T + torch.diag(0.04 + c)).log_prob(y)
    assert abs(float((stats["lp"] - stats["log_q"]).mean()) - float(evidence)) < 1e-6
    assert diagnostics.psis(tree).khat == -np.inf
    inverse = torch.linalg.inv(phi @ phi.T + torch.diag(0.04 + c))
    scale = inverse.diagonal().rsqrt()
    exact = dist.Normal(y - inverse @ y * scale.square(), scale).log_prob(y).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = arviz_stats.loo(tree, reff=1.0)
    assert abs(found.elpd - float(exact)) < 1


def test_factors_are_no_data():
    """A Cox process, whose likelihood is pyro.factor: nothing observed, and diagnostics of f all the same."""
    events, nodes, widths = torch.rand(30, 1), torch.linspace(0.05, 0.95, 10)[:, None], torch.full((10,), 0.1)

    def cox(nodes, widths, events=None, counts=None):
        inputs = nodes if events is None else torch.cat([nodes, events])
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), inputs, mean=3.0))
        with pyro.plate("window", len(nodes)):
            pyro.factor("void", -widths * f[: len(nodes)].exp())
            if counts is not None:
                pyro.sample("counts", dist.Poisson(widths * f[: len(nodes)].exp()), obs=counts)
        if events is not None:
            with pyro.plate("events", len(events)):
                pyro.factor("at", f[len(nodes) :])

    guide = prepared(cox, SVGP(5), nodes, widths, events)
    args = (nodes, widths, events)
    tree = diagnostics.to_datatree(cox, guide, *args, num_samples=25, predict=(nodes, widths), seed=0)
    assert not {"observed_data", "posterior_predictive", "log_likelihood"} & set(tree.children)
    assert list(tree.predictions.data_vars) == ["f"]
    draws = diagnostics.to_datatree(cox, guide, *args, num_samples=5, seed=0, include_f=True)
    assert np.isfinite(draws.sample_stats["lp"]).all()
    assert np.isfinite(diagnostics.psis(tree).khat)
    for calls in (
        lambda: diagnostics.predictive_scores(cox, guide, *args),
        lambda: diagnostics.predictive_scores(cox, guide, *args, var_name="void"),
    ):
        refused(r"pyro\.factor", calls)
    samples = {"f": torch.full((3, 40), 3.0) + 0.1 * torch.randn(3, 40)}
    tree = diagnostics.to_datatree(cox, samples, *args, predict=(nodes, widths))
    assert "observed_data" not in tree.children
    assert list(tree.predictions.data_vars) == ["f"]
    both = AutoSparseGP(cox, SVGP(5))
    counts = torch.ones(10)
    both(nodes, widths, counts=counts)
    tree = diagnostics.to_datatree(cox, both, nodes, widths, counts=counts, num_samples=5)
    for group in ("observed_data", "posterior_predictive", "log_likelihood"):
        assert list(tree[group].data_vars) == ["counts"]
    scores = diagnostics.predictive_scores(cox, both, nodes, widths, counts=counts, num_samples=3)
    assert len(scores.pointwise["log_score"]) == 10


def test_what_stands_in_the_wrong_place_is_named():
    """A guide, its posterior, SVI or a tree where another of them is wanted: what came, and what to give."""
    x, y = data(12)
    guide = AutoSparseGP(gaussian, SVGP(4))
    svi = pyro.infer.SVI(gaussian, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    svi.step(x, y)
    posterior = guide.posterior(x)
    tree = diagnostics.to_datatree(gaussian, guide, x, y, num_samples=2)
    first = "takes the model first.*got AutoSparseGP in its place"
    for call, message in (
        (lambda: diagnostics.to_datatree(guide, gaussian, x, y), first),
        (lambda: diagnostics.predictive_scores(guide, x, y), first),
        (lambda: diagnostics.predictive_scores(svi, guide, x, y), "got SVI in its place"),
        (lambda: diagnostics.to_datatree(gaussian, guide), "cannot call the model: missing.*'x'.*training data"),
        (lambda: diagnostics.to_datatree(gaussian, posterior["f"], x, y), "got Site.*give the guide"),
        (lambda: diagnostics.predictive_scores(gaussian, tree, x, y), "got DataTree"),
        (lambda: diagnostics.psis(guide), r"psis\(to_datatree\(model, guide, x, y\)\), got AutoSparseGP"),
    ):
        refused(message, call)
