"""Log scores of predicted classes, with and without an order."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import SVGP

from .models import observed, one_function, refused, trained

pytest.importorskip("xarray")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")

# Three functions go by draws: the objective says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*integrated by Monte Carlo:UserWarning")
CUTS = [-2.0, -0.5, 1.0]


def softmax_model(x, y=None):
    f = pyro.sample("f", GaussianProcess(4 * kernels.RBF(0.3), x).expand([3]).to_event(1))
    return observed(dist.Categorical(logits=f.mT), y)


ordered_model = one_function(4 * kernels.RBF(0.3), lambda f: dist.OrderedLogistic(2 * f, torch.tensor(CUTS)))


def likelihood(model, f):
    return dist.Categorical(logits=f.mT) if model is softmax_model else dist.OrderedLogistic(2 * f, torch.tensor(CUTS))


@pytest.mark.parametrize("model", [softmax_model, ordered_model])
def test_log_scores_of_classes(model):
    """Those of predictive probabilities from joint draws of the functions; there are no intervals."""
    x = torch.rand(120, 1)
    f = GaussianProcess(4 * kernels.RBF(0.3), x).sample((3,) if model is softmax_model else ())
    y = likelihood(model, f).sample()
    guide = trained(model, SVGP(12), x[:40], y[:40], steps=18, lr=0.1, loss=TraceQuadrature_ELBO(4))
    x, y = x[40:], y[40:]
    several = model is softmax_model  # whose functions have one posterior
    q = guide.posterior(x)["f"]
    f = predict(model, guide, x, num_samples=1_000)["f"] if several else q.mean + q.stddev * torch.randn(8_000, 80)
    own = likelihood(model, f.detach()).probs.mean(0).gather(-1, y.long()[:, None])[:, 0]
    found = diagnostics.predictive_scores(model, guide, x, y, num_samples=400 if several else 1)
    np.testing.assert_allclose(np.exp(found.pointwise["log_score"].values), own, atol=0.08 if several else 0.02)
    assert (found.method, list(found.summary.index)) == ("log score", ["log_score"])
    refused(r"no intervals of these observations, only \['log_score'\]", found.coverage, 0.9)
