"""What stock ArviZ is served: prior groups, one dimension for all draws, whole numbers, plots."""

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.infer
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

from .models import refused, train

stats = pytest.importorskip("arviz_stats")
plots = pytest.importorskip("arviz_plots")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
pytest.importorskip("matplotlib").use("Agg")

pytestmark = pytest.mark.filterwarnings("ignore")  # ArviZ's own


def model(t, y=None):
    x = t[:, None]
    noise = pyro.sample("noise", dist.LogNormal(-1.5, 0.3))
    length = pyro.sample("length", dist.LogNormal(-0.5, 0.3))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x))
    with pyro.plate("row", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def counts(t, y=None):
    x = t[:, None]
    level = pyro.sample("level", dist.Normal(1.0, 0.5))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
    with pyro.plate("row", len(x)):
        return pyro.sample("y", dist.Poisson((level + f).exp()), obs=y)


def data(num=8):
    x = torch.linspace(-1, 1, num)
    return x, torch.sin(4 * x) + 0.2 * torch.randn(num)


def fitted(program, **options):
    x, y = data(20)
    y = torch.poisson((1 + y).exp()) if program is counts else y
    guide = AutoSparseGP(program, SVGP(8))
    train(program, guide, x, y, steps=5, lr=0.05, loss=TraceQuadrature_ELBO(8))
    return diagnostics.to_datatree(program, guide, x, y, **{"seed": 0, "prior": 100} | options), guide, x, y


def test_prior_groups_in_the_same_tree():
    tree, guide, x, y = fitted(model, num_samples=3, predict=data(4)[0], dims={"f_w": ["basis"]}, include_f=True)
    assert tree.prior["noise"].dims == ("chain", "draw")
    assert tree.prior["f"].dims == tree.prior_predictive["y"].dims == ("chain", "draw", "row")
    assert tree.prior_predictive["y"].shape == (1, 100, 20)
    assert abs(float(np.log(tree.prior["noise"]).mean()) + 1.5) < 4 * 0.3 / 100**0.5
    alone = diagnostics.prior_predictive(model, x, y, num_samples=100, seed=0, include_f=True)
    assert tree.prior.to_dataset().equals(alone.prior.to_dataset())
    refused("prior must be a whole number of at least 0, got -1", diagnostics.to_datatree, model, guide, x, y, prior=-1)


def test_one_dimension_for_all_draws():
    """Stacked by xarray, stock ArviZ takes it; what wants chains says so."""
    tree, *_ = fitted(model, num_samples=25, prior=0)
    flat = tree.map_over_datasets(
        lambda group: group.stack(sample=["chain", "draw"]) if "draw" in group.dims else group
    )
    table = stats.summary(flat, kind="stats", sample_dims=["sample"], var_names=["noise"])
    assert float(table["mean"].iloc[0]) == pytest.approx(float(tree.posterior["noise"].mean()), abs=0.01)
    for function in (diagnostics.psis, diagnostics.loo):
        refused('all draws along "sample"', function, flat)


def test_counts_and_classes_are_whole_numbers():
    tree, *_ = fitted(counts, num_samples=30, prior=5, predict=data(4)[0])
    for group in ("observed_data", "posterior_predictive", "prior_predictive", "predictions"):
        assert tree[group]["y"].dtype == np.dtype("int64"), group
    assert tree.posterior["level"].dtype == np.dtype("float32")
    plots.plot_ppc_rootogram(tree)
