"""Simulation-based calibration, stock plots of trees, and what left."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import kernels
from pyro_sparsegp.families import SGPR, SVGP

from .models import data, one_function, prepared, refused, regression, trained

pytest.importorskip("xarray")
stats = pytest.importorskip("arviz_stats")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")


# Simulation-based calibration.

X = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]


model = one_function(kernels.RBF(0.2), lambda f: dist.Normal(f, 0.3))


def fit_sgpr(x, y):
    return prepared(model, SGPR(10), x, y)


def test_sbc_of_other_seeds_goes_on_and_leaves_what_others_learned():
    options = {"num_samples": 9, "progress": False}
    theirs = pyro.param("theirs", torch.ones(()))
    whole = diagnostics.sbc(model, fit_sgpr, X, num_simulations=4, **options)["prior_sbc"]["f"]
    assert pyro.param("theirs") is theirs
    rest = diagnostics.sbc(model, fit_sgpr, X, num_simulations=2, seed=2, **options)["prior_sbc"]["f"]
    assert whole.dims == ("chain", "draw", "f_dim_0")
    assert whole.shape == (1, 4, 4)
    np.testing.assert_array_equal(whole[:, 2:], rest)


def test_sbc_of_hyperparameters_and_refusals():
    x, _ = data(num=20)

    def fit(x, y):
        return trained(regression, SGPR(6), x, y, steps=2)

    options = {"num_simulations": 2, "num_samples": 9, "progress": False}
    tree = diagnostics.sbc(regression, fit, x, rows=[0, 3, 4], **options)
    assert {name: array.shape for name, array in tree["prior_sbc"].data_vars.items()} == {
        "scale": (1, 2),
        "length": (1, 2, 2),
        "noise": (1, 2),
        "f": (1, 2, 3),
    }
    assert all(((array > 0) & (array < 1)).all() for array in tree["prior_sbc"].data_vars.values())
    refused(r"observed names \['z'\]", diagnostics.sbc, regression, fit, x, observed={"z": "y"}, **options)
    refused("could not be called", diagnostics.sbc, regression, fit, x, observed={"y": "target"}, **options)
    refused("must return a fitted", diagnostics.sbc, regression, lambda x, y: 3, x, **options)
    refused("num_samples must be a whole number of at least 1", diagnostics.sbc, regression, fit, x, num_samples=0)
    refused("takes no processes=: join simulations of other seeds", diagnostics.sbc, regression, fit, x, processes=2)


def test_ranks_tell_where_the_truth_lies():
    """Of data 5 above what the truth gave, all draws are above it; of data 5 below, none."""
    options = {"num_simulations": 2, "num_samples": 9, "rows": 5, "progress": False}
    above = diagnostics.sbc(model, lambda x, y: fit_sgpr(x, y + 5), X, **options)["prior_sbc"]["f"]
    below = diagnostics.sbc(model, lambda x, y: fit_sgpr(x, y - 5), X, **options)["prior_sbc"]["f"]
    assert above.max() < 0.1
    assert below.min() > 0.9


@pytest.fixture
def pictures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pytest.importorskip("arviz_plots")
    yield
    matplotlib.pyplot.close("all")


@pytest.mark.filterwarnings("ignore")
def test_stock_plots_take_the_trees(pictures):
    import arviz_plots

    x, y = data(num=30)
    guide = trained(regression, SVGP(6), x, y, steps=5)
    tree = diagnostics.to_datatree(regression, guide, x, y, num_samples=25)
    names = ["scale", "length", "noise"]
    arviz_plots.plot_dist(tree, var_names=names)
    arviz_plots.plot_forest({"a": tree, "b": tree}, var_names=names)
    arviz_plots.plot_ppc_dist(tree)
    arviz_plots.plot_khat(diagnostics.loo(tree, target="none"))
    assert {"scale", "noise"} <= set(stats.summary(tree, var_names=names).index)
    ranks = diagnostics.sbc(model, fit_sgpr, X, num_simulations=5, num_samples=9, progress=False)
    arviz_plots.plot_ecdf_pit(ranks)
    scores = diagnostics.predictive_scores(regression, guide, x, y, num_samples=5)
    arviz_plots.plot_ecdf_pit(scores.tree, group="predictive_scores", var_names="pit", sample_dims=["data"])


def test_rows_that_are_not_there():
    x, _ = data(num=20)
    for rows in (0, -2, ()):
        with pytest.raises(ValueError, match="sbc's rows must be how many"):
            diagnostics.sbc(model, fit_sgpr, x, rows=rows, num_simulations=1, progress=False)
    for rows in ([100], [0, 20], [-21]):
        with pytest.raises(ValueError, match=r"sbc's rows must be row numbers of site 'f', 0 to 19"):
            diagnostics.sbc(model, fit_sgpr, x, rows=rows, num_simulations=1, progress=False)


@pytest.mark.parametrize("name", ["HMC", "History", "NUTS", "StoppingRule", "add_history", "plot_ribbon", "resample"])
def test_what_left_names_what_takes_its_place(name):
    with pytest.raises(ImportError, match=rf"no {name} any more\. In its place: .*(arviz_|fit)"):
        getattr(diagnostics, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = diagnostics.nonsense
