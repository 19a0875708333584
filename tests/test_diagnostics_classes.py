"""Scores and coverage of predicted classes, with and without an order."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

from .models import gaussian, one_function, train

pytest.importorskip("xarray")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")

# Three functions go by draws, and Pyro's OrderedLogistic does not map over nodes: the objective says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.func.vmap refuses"),
    pytest.mark.filterwarnings("ignore:.*quadrature:UserWarning"),
]


def softmax_model(x, y=None):
    f = pyro.sample("f", GaussianProcess(4 * kernels.RBF(0.3), x).expand([3]).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Categorical(logits=f.mT), obs=y)


ordered_model = one_function(
    4 * kernels.RBF(0.3), lambda f: dist.OrderedLogistic(2 * f, torch.tensor([-2.0, -0.5, 1.0]))
)


def fitted_classes(model, num=120, steps=18):
    x = torch.rand(num, 1)
    f = GaussianProcess(4 * kernels.RBF(0.3), x).sample((3,))
    likelihood = (
        dist.Categorical(logits=f.mT)
        if model is softmax_model
        else dist.OrderedLogistic(2 * f[0], torch.tensor([-2.0, -0.5, 1.0]))
    )
    y = likelihood.sample()
    size = num // 3
    guide = AutoSparseGP(model, SVGP(12))
    train(model, guide, x[:size], y[:size], steps=steps, lr=0.1, loss=TraceQuadrature_ELBO(4))
    return guide, x[size:], y[size:]


def dense_probabilities(model, guide, x, num=8_000):
    """Of each class, (N, K), by draws from the marginals of f."""
    q = guide.posterior(x)["f"]
    f = (q.mean + q.variance.sqrt() * torch.randn(num, *q.mean.shape)).detach()
    if model is softmax_model:
        return torch.softmax(f, -2).mean(0).mT
    return dist.OrderedLogistic(2 * f, torch.tensor([-2.0, -0.5, 1.0])).probs.mean(0)


@pytest.mark.parametrize("model", [softmax_model, ordered_model])
def test_scores_of_classes(model):
    """Brier and ranked probability scores from dense predictive probabilities, and one class at a time."""
    guide, x, y = fitted_classes(model)
    found = diagnostics.predictive_scores(model, guide, x, y, num_samples=1)
    probs = dense_probabilities(model, guide, x)
    seen = torch.nn.functional.one_hot(y.long(), probs.shape[-1])
    own = probs.gather(-1, y.long()[:, None])[:, 0]
    np.testing.assert_allclose(np.exp(found.pointwise["log_score"].values), own, atol=0.02)
    if model is softmax_model:
        assert (found.method, set(found.pointwise.data_vars)) == ("categorical", {"log_score", "brier", "set_level"})
        np.testing.assert_allclose(found.pointwise["brier"].values, (probs - seen).square().sum(-1), atol=0.03)
        smaller = (probs * (probs > own[:, None] + 1e-9)).sum(-1)
        level = found.pointwise["set_level"].values
    else:
        assert (found.method, set(found.pointwise.data_vars)) == ("ordered", {"log_score", "rps", "pit"})
        rps = (probs.cumsum(-1) - seen.cumsum(-1)).square().sum(-1)
        np.testing.assert_allclose(found.pointwise["rps"].values, rps, atol=0.03)
        numbers = torch.arange(4.0)
        crps = (probs * (numbers - y[:, None]).abs()).sum(-1) - 0.5 * torch.einsum(
            "ni,nj,ij->n", probs, probs, (numbers - numbers[:, None]).abs()
        )
        torch.testing.assert_close(rps, crps)  # of the class number
        smaller, level = (probs.cumsum(-1) * seen).sum(-1) - own, found.pointwise["pit"].values
    assert ((level > smaller.numpy() - 0.05) & (level < (smaller + own).numpy() + 0.05)).all()
    assert found.summary.index[1] == ("brier" if model is softmax_model else "rps")
    assert "coverage_95%" in found.summary.index
    other = diagnostics.predictive_scores(model, guide, x, y, num_samples=1, ordered=model is softmax_model)
    assert other.method == ("ordered" if model is softmax_model else "categorical")


@pytest.mark.parametrize("model", [softmax_model, ordered_model])
def test_coverage_of_classes(model):
    """Sets and intervals of 90 and 95 % hold their share of new observations drawn from the prior."""
    shares = []
    for seed in range(2):
        pyro.set_rng_seed(seed)
        guide, x, y = fitted_classes(model, num=600, steps=18)
        found = diagnostics.predictive_scores(model, guide, x, y, num_samples=1)
        shares.append([found.coverage(prob) for prob in (0.9, 0.95)])
    assert np.abs(np.mean(shares, 0) - [0.9, 0.95]).max() < 0.03, shares


def test_scores_of_classes_without_scores():
    x = torch.rand(20, 1)

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("data", len(x)):
            logits = torch.stack([f, -f, 0 * f], -1)
            return pyro.sample("y", dist.Categorical(logits=torch.stack([logits, logits], -2)).to_event(1), obs=y)

    y = torch.randint(3, (20, 2))
    guide = AutoSparseGP(model, SVGP(5))
    guide(x, y)
    found = diagnostics.predictive_scores(model, guide, x, y, num_samples=2)
    assert list(found.summary.index) == ["log_score"]
    with pytest.raises(ValueError, match=r"no intervals of these observations, only \['log_score'\]"):
        found.coverage(0.9)
    normal = gaussian(kernels.RBF(0.3))
    guide = AutoSparseGP(normal, SVGP(5))
    guide(x, x[:, 0])
    with pytest.raises(ValueError, match="ordered is for classes; the distribution of site 'y' is Normal"):
        diagnostics.predictive_scores(normal, guide, x, x[:, 0], ordered=True)
