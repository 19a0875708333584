# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Can this posterior be trusted?
#
# *How far is it from its target, how good are its predictions, and are its intervals right?*
#
# A sparse posterior is an approximation, and the value of the bound does not say how good it is. The module
# `pyro_sparsegp.diagnostics` turns any result (of SVI, expectation propagation or NUTS) into an `xarray.DataTree` in
# ArviZ's schema, so that ArviZ itself can summarise, compare and plot it. The module adds what ArviZ cannot compute:
# importance weights, and scores of predictions with the function integrated out.
#
# The data are the yearly volumes of the Nile, 1871 to 1970, which ship with statsmodels. Every other year is held
# out.
#
# On the command line: `python tutorials/diagnostics.py [--steps 200] [--draws 1000] [--out DIR]`.

# %% tags=["hide-input"]
import warnings

import arviz_base
import arviz_plots
import arviz_stats
import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch
import xarray
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI
from pyro.infer.autoguide.initialization import init_to_median
from tqdm import tqdm

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    Whitening,
    diagnostics,
    kernels,
    predict,
)
from pyro_sparsegp.families import SGPR, SVGP, SparseEP

options = command_line.options(
    "Diagnostics of sparse Gaussian processes.",
    device=False,
    steps=(200, "training steps of each guide, at most", 20),
    draws=(1000, "posterior draws of each guide", 30),
    nuts=(60, "draws of NUTS, and as many to warm up", 50),
    depth=(5, "depth of NUTS's trees, at most", 2),
    simulations=(16, "of the calibration", 2),
)
torch.set_default_dtype(torch.float64)
warnings.filterwarnings(
    "ignore", message="Estimated shape parameter"
)  # the tables below say it
warnings.filterwarnings("ignore", category=FutureWarning, module="arviz_plots")


def show(collection, name):
    collection.savefig(options.out / f"diagnostics_{name}.png", bbox_inches="tight")


# %%
nile = sm.datasets.nile.load_pandas().data
years = torch.tensor(nile["year"].to_numpy(), dtype=torch.float64)[:, None]
volume = torch.tensor(nile["volume"].to_numpy(), dtype=torch.float64)
inputs, volume = (years - 1920) / 25, (volume - volume.mean()) / volume.std()
x, y = inputs[::2], volume[::2]
held_x, held_y = inputs[1::2], volume[1::2]
new = torch.linspace(-2.4, 2.4, 200)[:, None]


def model(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
    noise = pyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("year", len(x)):
        return pyro.sample("volume", dist.Normal(f, noise), obs=y)


# %% [markdown]
# ## Has the optimisation converged?
#
# Look at the losses: we print their mean over the last fifty steps, and over the fifty before. Hyperparameters are
# drawn in each step, so losses are noisy. The family `SparseEP` trains by expectation propagation instead of SVI. Its
# loss is −log Z, and its hyperparameters are points. If the loss has converged, the rest of this page asks whether
# the posterior is good enough.


# %%
def fit(family, seed=0):
    pyro.set_rng_seed(seed)
    guide = AutoSparseGP(
        model, family, independent=True
    )  # hyperparameters by mean field
    if isinstance(family, SparseEP):
        inference = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.03}))
    else:
        inference = SVI(
            model,
            guide,
            pyro.optim.Adam({"lr": 0.03}),
            TraceQuadrature_ELBO(num_nodes=2),
        )
    steps = tqdm(
        range(options.steps), mininterval=1.0, disable=command_line.IN_NOTEBOOK
    )
    losses = torch.tensor([inference.step(x, y) for _ in steps])
    print(f"loss {losses[-100:-50].mean():.2f}, then {losses[-50:].mean():.2f}")
    return guide


guides = {}
for name, family in {
    "SGPR 15": SGPR(15),
    "SGPR 4": SGPR(4),
    "SVGP 15": SVGP(15),
    "EP 15": SparseEP(15),
}.items():
    print(name, end=": ")
    guides[name] = fit(family)

# %% [markdown]
# ## One tree for each posterior

# %%
trees = {}
for name, guide in guides.items():
    trees[name] = diagnostics.to_datatree(
        model,
        guide,
        x,
        y,
        num_samples=options.draws,
        predict=new,
        include_f=False,
        seed=0,
    )
print(", ".join(trees["SGPR 15"].children))
names = ["scale", "length", "noise"]
arviz_stats.summary(trees["SGPR 15"], var_names=names, kind="stats", ci_prob=0.95)

# %% [markdown]
# NUTS draws from the posterior of the same model without a guide. This is possible because there are only 50 rows.
# Its tree has the same groups.

# %%
pyro.set_rng_seed(0)
nuts = MCMC(
    NUTS(
        poutine.reparam(model, config=Whitening()),
        max_tree_depth=options.depth,
        init_strategy=init_to_median(),
    ),
    num_samples=options.nuts,
    warmup_steps=options.nuts,
    disable_progbar=command_line.IN_NOTEBOOK,
)
nuts.run(x, y)
trees["NUTS"] = diagnostics.to_datatree(model, nuts, x, y, predict=new, seed=0)
compared = {
    name: trees[name] for name in ("SGPR 15", "SGPR 4", "SVGP 15", "EP 15", "NUTS")
}
same_length = {  # plots align draws, and leave out a model that has fewer
    name: xarray.DataTree.from_dict(
        {
            group: tree[group]
            .to_dataset()
            .isel(draw=slice(min(options.draws, options.nuts)))
            for group in ("posterior", "predictions")
        }
    )
    for name, tree in compared.items()
}
forest = arviz_plots.plot_forest(same_length, var_names=names, ci_probs=(0.5, 0.95))
forest.add_legend("model")
show(forest, "forest")

# %% [markdown]
# The next picture shows f under variational inference, expectation propagation and NUTS, at three of the new inputs.
# Expectation propagation has points for hyperparameters, while NUTS averages over them, so the two posteriors of f
# may differ. Here their standard deviations are the same on average. (k-hat and leave-one-out, below, treat points as
# known. So they would not show such a difference.)

# %%
overlaid = arviz_plots.plot_dist(
    {name: same_length[name] for name in ("SGPR 15", "EP 15", "NUTS")},
    group="predictions",
    var_names="f",
    coords={"year": [20, 100, 180]},
)
overlaid.add_legend("model")
show(overlaid, "overlaid")
for name, tree in compared.items():
    f = tree["predictions"]["f"]
    print(f"{name}: f has sd {float(f.std(['chain', 'draw']).mean()):.3f} on average")

# %% [markdown]
# ## k-hat: how far from its target?
#
# Draws of the guide's posterior q have importance weights p/q towards a target p. The weights have a tail, and k-hat
# is the shape of this tail. The weights are useful if k-hat is below `good_k`. SVI has the target "vfe". Towards it
# k-hat judges the family and the optimiser, and does not see too few inducing points. Expectation propagation has the
# target "fitc".
#
# We made the guides of SVI with `independent=True`: their hyperparameters are independent of each other, and under
# `SVGP` also of f. This raises k-hat. Under expectation propagation hyperparameters are points, which k-hat does not
# judge. There q of f is equal to its target, because the likelihood is Gaussian. All weights are then equal, and k-hat
# is minus infinity.

# %%
for name in guides:
    print(f"{name:8}", diagnostics.psis(trees[name]))

# %% [markdown]
# ## Draws by their weights, and overconfidence
#
# If k-hat is good, `arviz_base.extract` resamples the draws by their weights, which moves them to the target. As a
# counterexample we take a guide and divide the standard deviations of its hyperparameters by ten. Its k-hat is above
# `good_k`: it is too far from the target.


# %%
def draw_anew(tree):
    weights = diagnostics.psis(tree)
    if weights.khat > weights.good_k:
        print(
            weights, "is too far from the target: train longer, or take a richer family"
        )
        return
    draws = arviz_base.extract(
        tree,
        var_names=names,
        num_samples=options.draws,
        weights=np.exp(weights.log_weights),
        random_seed=0,
    )
    for name in names:
        print(
            f"{name}: mean {float(draws[name].mean()):.2f}, sd {float(draws[name].std()):.2f}"
        )


draw_anew(trees["SGPR 15"])

confident = fit(SGPR(15))
with torch.no_grad():
    for name in names:
        getattr(confident.scales, f"{name}_unconstrained").sub_(
            torch.tensor(10.0).log()
        )
    confident.locs.noise_unconstrained.sub_(0.7)  # and half the noise
tree = diagnostics.to_datatree(
    model, confident, x, y, num_samples=options.draws, predict=new, seed=0
)
draw_anew(tree)

# %% [markdown]
# ## Leave-one-out, and comparison in one call
#
# Given its values at the inducing points, f is still uncertain elsewhere. The trees hold the log likelihood of each
# row, integrated over this uncertainty. So ArviZ's own leave-one-out judges each posterior as it is.

# %%
table = arviz_stats.compare(compared)
table.round(2)

# %%
show(arviz_plots.plot_compare(table), "compare")

# %% [markdown]
# ## How good are predictions?
#
# Log score, CRPS and PIT of the held-out years have a closed form here, given the hyperparameters, so only
# hyperparameters are drawn.

# %%
scores = diagnostics.predictive_scores(model, guides["SGPR 15"], held_x, held_y, seed=0)
print(scores)
surer = diagnostics.predictive_scores(model, confident, held_x, held_y, seed=0)
print("\nthe confident guide:")
print(surer)
show(
    arviz_plots.plot_ecdf_pit(
        scores.tree, group="predictive_scores", var_names="pit", sample_dims=["year"]
    ),
    "pit",
)

# %% [markdown]
# ## The function itself

# %%
f = trees["SGPR 15"].predictions["f"]
low, high = f.quantile([0.025, 0.975], ["chain", "draw"])
figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
axis.fill_between(new[:, 0], low, high, alpha=0.3)
axis.plot(new[:, 0], f.mean(["chain", "draw"]))
axis.plot(x[:, 0], y, ".", color="k")
show(figure, "function")

# %% [markdown]
# ## Simulation-based calibration
#
# Draw the truth and data from the prior, fit a guide to the data, and rank the truth among the draws of its
# posterior. Over many repetitions ranks are uniform if posteriors are right. `SGPR` with twelve inducing points
# passes, and one inducing point does not. Hyperparameters are fixed here to save time.

# %%
grid = torch.linspace(0, 1, 30)[:, None]


def simple(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.2), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def one_point(x, y):
    guide = AutoSparseGP(simple, SVGP(1), independent=True)
    svi = SVI(
        simple, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(num_nodes=2)
    )
    for _ in range(60):
        svi.step(x, y)
    return guide


def enough(x, y):
    guide = AutoSparseGP(simple, SGPR(12), independent=True)
    guide(x, y)
    return guide


def ranks(procedure):
    """Normalised ranks of true function values, (simulations, 4)."""
    found, rows = [], [0, 10, 19, 29]
    for seed in range(options.simulations):
        pyro.set_rng_seed(seed)
        pyro.clear_param_store()
        truth = poutine.trace(simple).get_trace(grid).nodes
        guide = procedure(grid, truth["y"]["value"])
        draws = predict(simple, guide, grid, num_samples=49, joint=False)["f"]
        below = (draws < truth["f"]["value"]).sum(0)[rows]
        found.append((below + torch.rand(len(rows))) / 50)  # uniform, if q is right
    return torch.stack(found)


for name, procedure in {"SGPR 12": enough, "SVGP 1": one_point}.items():
    groups = {"prior_sbc": {"f": ranks(procedure)[None].numpy()}}
    picture = arviz_plots.plot_ecdf_pit(arviz_base.from_dict(groups))
    show(picture, f"sbc_{name.replace(' ', '_')}")

# %% [markdown]
# ## To disk
#
# `to_netcdf` writes a tree into one NetCDF file, and `xarray.open_datatree` reads it.

# %%
trees["SGPR 15"].to_netcdf(options.out / "nile.nc")
print(f"The pictures and the tree are in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert diagnostics.psis(trees["SGPR 15"]).khat < 0.7  # close to its own target,
    assert diagnostics.psis(tree).khat > 0.7  # and a tenth of the spread is flagged,
    assert surer.coverage(0.95) < 0.85 < scores.coverage(0.95)  # by held-out data, too

# %% [markdown]
# ## What to try next
#
# * What each number means, and what to do about a k-hat of 0.9: [how to](../docs/how-to/diagnostics.md) and [what
#   k-hat's target is](../docs/explanation/k-hat.md).
# * Intervals that are never too narrow: [computation-aware GPs](computation_aware.ipynb).
# * Scores of your own model: `predictive_scores` takes any guide, also under expectation propagation, and NUTS.
