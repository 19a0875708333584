"""What stock ArviZ is served."""

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.infer
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

from .models import data, regression, train, trained

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


def test_one_dimension_for_all_draws():
    """Stacked by xarray, stock ArviZ takes it."""
    tree, *_ = fitted(series, num_samples=25)
    flat = tree.map_over_datasets(lambda g: g.stack(sample=["chain", "draw"]) if "draw" in g.dims else g)
    table = stats.summary(flat, kind="stats", sample_dims=["sample"], var_names=["noise"])
    assert float(table["mean"].iloc[0]) == pytest.approx(float(tree.posterior["noise"].mean()), abs=0.01)
    assert diagnostics.psis(flat).khat == diagnostics.psis(tree).khat


def test_counts_and_classes_are_whole_numbers(pictures):
    tree, *_ = fitted(counts, num_samples=30, predict=waves(4)[0])
    for group in ("observed_data", "posterior_predictive", "predictions"):
        assert tree[group]["y"].dtype == np.dtype("int64"), group
    assert tree.posterior["level"].dtype == np.dtype("float64")
    plots.plot_ppc_rootogram(tree)
