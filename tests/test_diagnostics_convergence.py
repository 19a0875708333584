"""What stock ArviZ is served."""

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.infer
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

from .models import data, refused, regression, train, trained

pytest.importorskip("xarray")
stats = pytest.importorskip("arviz_stats")
plots = pytest.importorskip("arviz_plots")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
pytestmark = pytest.mark.filterwarnings("ignore")  # of ArviZ's own


@pytest.fixture
def pictures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


def test_stock_plots_take_the_trees(pictures):
    x, y = data(num=30)
    guide = trained(regression, SVGP(6), x, y, steps=5)
    tree = diagnostics.to_datatree(regression, guide, x, y, num_samples=25)
    names = ["scale", "length", "noise"]
    plots.plot_dist(tree, var_names="noise")
    plots.plot_ppc_dist(tree)
    plots.plot_khat(stats.loo(tree, pointwise=True))
    assert {"scale", "noise"} <= set(stats.summary(tree, var_names=names).index)
    scores = diagnostics.predictive_scores(regression, guide, x, y, num_samples=5)
    plots.plot_ecdf_pit(scores.tree, group="predictive_scores", var_names="pit", sample_dims=["data"])


def series(t, y=None):
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


def waves(num=8):
    x = torch.linspace(-1, 1, num)
    return x, torch.sin(4 * x) + 0.2 * torch.randn(num)


def fitted(program, **options):
    x, y = waves(20)
    y = torch.poisson((1 + y).exp()) if program is counts else y
    guide = AutoSparseGP(program, SVGP(8))
    train(program, guide, x, y, steps=5, lr=0.05, loss=TraceQuadrature_ELBO(8))
    return diagnostics.to_datatree(program, guide, x, y, **{"seed": 0} | options), guide, x, y


def test_prior_groups():
    x, y = waves(20)
    alone = diagnostics.prior_predictive(series, x, y, num_samples=100, seed=0, include_f=True)
    assert alone.prior["noise"].dims == ("chain", "draw")
    assert alone.prior["f"].dims == alone.prior_predictive["y"].dims == ("chain", "draw", "row")
    assert alone.prior_predictive["y"].shape == (1, 100, 20)
    assert abs(float(np.log(alone.prior["noise"]).mean()) + 1.5) < 4 * 0.3 / 100**0.5
    np.testing.assert_allclose(alone.observed_data["y"], y)
    assert not np.allclose(alone.prior_predictive["y"][0, 0], y)
    residual = (alone.prior_predictive["y"] - alone.prior["f"]) / alone.prior["noise"]
    assert abs(float(residual.std()) - 1) < 0.06
    refused("num_samples", diagnostics.prior_predictive, series, x, num_samples=0)


def test_one_dimension_for_all_draws():
    """Stacked by xarray, stock ArviZ takes it."""
    tree, *_ = fitted(series, num_samples=25)
    flat = tree.map_over_datasets(lambda g: g.stack(sample=["chain", "draw"]) if "draw" in g.dims else g)
    table = stats.summary(flat, kind="stats", sample_dims=["sample"], var_names=["noise"])
    assert float(table["mean"].iloc[0]) == pytest.approx(float(tree.posterior["noise"].mean()), abs=0.01)
    assert diagnostics.psis(flat).khat == diagnostics.psis(tree).khat


def test_counts_and_classes_are_whole_numbers(pictures):
    tree, _, x, y = fitted(counts, num_samples=30, predict=waves(4)[0])
    tree["prior_predictive"] = diagnostics.prior_predictive(counts, x, y, num_samples=5)["prior_predictive"]
    for group in ("observed_data", "posterior_predictive", "prior_predictive", "predictions"):
        assert tree[group]["y"].dtype == np.dtype("int64"), group
    assert tree.posterior["level"].dtype == np.dtype("float32")
    plots.plot_ppc_rootogram(tree)
