"""What stock ArviZ is served: prior groups, one dimension for all draws, whole numbers, every plot."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.infer
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI
from pyro.infer.autoguide.initialization import init_to_median

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, Whitening, kernels
from pyro_sparsegp.families import SVGP

stats = pytest.importorskip("arviz_stats")
plots = pytest.importorskip("arviz_plots")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
pytest.importorskip("matplotlib").use("Agg")

NOT_OURS = (
    "Passing a Dataset as `data_vars`",  # arviz-plots 0.8 under xarray of 2026.4 and newer, whatever the tree
    "DataArray must be 2D, but has dims: ('label',)",  # its plot_parallel where just one draw diverged
)
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


def classes(t, y=None):
    x = t[:, None]
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.4), x))
    with pyro.plate("row", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def data(num=8):
    x = torch.linspace(-1, 1, num)
    return x, torch.sin(4 * x) + 0.2 * torch.randn(num)


def sampled(kernel, num=12, warmup=6, chains=1, **kwargs):
    x, y = data()
    white = poutine.reparam(model, config=Whitening())
    mcmc = MCMC(
        kernel(white, init_strategy=init_to_median(), **kwargs),
        num_samples=num,
        warmup_steps=warmup,
        num_chains=chains,
        disable_progbar=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(x, y)
    return mcmc, x, y


def fitted(program, family=None, steps=60, **options):
    x, y = data(20)
    y = {counts: torch.poisson((1 + y).exp()), classes: (y > 0).to(y)}.get(program, y)
    guide = AutoSparseGP(program, SVGP(8) if family is None else family)
    svi = SVI(program, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(8))
    for _ in range(steps):
        svi.step(x, y)
    options = {"num_samples": 100, "seed": 0, "prior": 100} | options
    return diagnostics.to_datatree(program, guide, x, y, **options), guide, x, y


def test_prior_groups_in_the_same_tree():
    tree, guide, x, y = fitted(
        model, steps=2, num_samples=3, predict=data(4)[0], dims={"f_w": ["basis"]}, include_f=True
    )
    assert tree.prior["noise"].dims == ("chain", "draw")
    assert tree.prior["f"].dims == tree.prior_predictive["y"].dims == ("chain", "draw", "row")
    assert tree.prior_predictive["y"].shape == (1, 100, 20)
    assert abs(float(np.log(tree.prior["noise"]).mean()) + 1.5) < 4 * 0.3 / 100**0.5
    alone = diagnostics.prior_predictive(model, x, y, num_samples=100, seed=0, include_f=True)
    assert tree.prior.to_dataset().equals(alone.prior.to_dataset())
    with pytest.raises(ValueError, match="prior must be a whole number of at least 0, got -1"):
        diagnostics.to_datatree(model, guide, x, y, prior=-1)


def test_one_dimension_for_all_draws():
    """Stacked by xarray, stock ArviZ takes it; what wants chains says so."""
    tree, guide, x, y = fitted(model, steps=5, num_samples=25, prior=0)
    with pytest.raises(ValueError, match=r"no sample_dims=: stack the groups"):
        diagnostics.to_datatree(model, guide, x, y, sample_dims=("sample",))
    flat = tree.map_over_datasets(
        lambda group: group.stack(sample=["chain", "draw"]) if "draw" in group.dims else group
    )
    table = stats.summary(flat, kind="stats", sample_dims=["sample"], var_names=["noise"])
    assert float(table["mean"].iloc[0]) == pytest.approx(float(tree.posterior["noise"].mean()), abs=0.01)
    for function in (diagnostics.psis, diagnostics.loo):
        with pytest.raises(ValueError, match='all draws along "sample"'):
            function(flat)


def test_counts_and_classes_are_whole_numbers():
    tree, *_ = fitted(counts, steps=2, num_samples=30, prior=5, predict=data(4)[0])
    for group in ("observed_data", "posterior_predictive", "prior_predictive", "predictions"):
        assert tree[group]["y"].dtype == np.dtype("int64"), group
    assert tree.posterior["level"].dtype == np.dtype("float32")
    plots.plot_ppc_rootogram(tree)


@pytest.mark.slow  # a minute; the quick tests of this file draw one plot of each group of a tree
def test_every_stock_plot():
    """What trees of PyMC and NumPyro serve."""
    import matplotlib.pyplot as plt

    trees = {"gaussian": fitted(model)[0], "counts": fitted(counts)[0], "classes": fitted(classes)[0]}
    mcmc, x, y = sampled(NUTS, num=100, warmup=100, max_tree_depth=3)  # ArviZ wants few repeats
    trees["nuts"] = diagnostics.to_datatree(model, mcmc, x, y, prior=100)
    options = {
        "plot_bf": {"var_names": "scale"},
        "plot_pair_focus": {"focus_var": "noise"},
        "plot_ppc_pava_residuals": {"x_var": "t"},
    }
    own = {"plot_energy": [], "plot_ppc_rootogram": ["counts"], "plot_bf": ["classes"]}
    own |= {name: ["classes"] for name in ("plot_ppc_pava", "plot_ppc_pava_residuals")}
    own |= {name: ["gaussian", "nuts"] for name in ("plot_lm", "plot_ppc_censored", "plot_dgof", "plot_dgof_dist")}
    of_others = {"plot_collection", "plot_matrix", "plot_compare", "plot_khat", "plot_ecdf_pit"}
    failed, drawn = {}, 0
    for name in sorted(name for name in dir(plots) if name.startswith("plot_") and name not in of_others):
        if not callable(getattr(plots, name)):
            continue
        every = list(trees) if "ppc" in name or "loo" in name else ["gaussian", "nuts"]
        for which in own.get(name, every):
            try:
                getattr(plots, name)(trees[which], **options.get(name, {}))
                drawn += 1
            except Exception as error:
                if not str(error).startswith(NOT_OURS):
                    failed[name, which] = error
            plt.close("all")
    assert not failed
    assert drawn > 50
    plots.plot_khat(diagnostics.loo(trees["gaussian"]))
    plots.plot_compare(diagnostics.compare({"one": trees["gaussian"], "two": trees["gaussian"]}))
