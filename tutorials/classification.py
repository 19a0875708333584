# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Classification, by expectation propagation and by variational inference
#
# *Both approximate the same posterior by a Gaussian. How do they differ, and does it show in predictions?*
#
# The tumours of the Wisconsin data set are benign or malignant. The model is a GP with a Bernoulli likelihood. We
# train the same program in two ways. Variational inference (`SVGP`, `SGPR`) maximises a bound, which minimises the
# divergence KL(q‖p) of the Gaussian q from the posterior p. Expectation propagation (`SparseEP`; Minka, 2001) matches
# moments, one term of the likelihood at a time. Half of the tumours are held out.
#
# On the command line: `python tutorials/classification.py [--steps 60] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import time

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from sklearn.datasets import load_breast_cancer

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    kernels,
    predict,
)
from pyro_sparsegp.distributions import Probit
from pyro_sparsegp.families import SGPR, SVGP, SparseEP

options = command_line.options(
    "Classes by two kinds of inference.",
    device=False,
    steps=(60, "training steps of each guide"),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

tumours = load_breast_cancer()
inputs, label = (
    torch.as_tensor(tumours.data),
    1.0 - torch.as_tensor(tumours.target).double(),
)  # 1 is malignant
order = torch.randperm(len(label))
train, test = order[:285], order[285:]
inputs = ((inputs - inputs[train].mean(0)) / inputs[train].std(0))[
    :, :10
]  # the ten means of each tumour's nuclei

# %% [markdown]
# ## The program
#
# `Probit` means P(y = 1) = Φ(f). The ten measurements share one length scale. The length scale and the variance are
# point estimates.


# %%
def model(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(1.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(1.0, 0.5))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", Probit(f), obs=y)


# %% [markdown]
# ## Three guides

# %%
rows, chances = {}, {}
for title, family in {
    "SVGP": SVGP(40),
    "SGPR": SGPR(40),
    "SparseEP": SparseEP(40, trainable=True),
}.items():
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, family, point_estimates=True)
    optim = pyro.optim.Adam({"lr": 0.1})
    by_expectation = title == "SparseEP"
    training = (
        ExpectationPropagation(model, guide, optim)
        if by_expectation
        else SVI(model, guide, optim, TraceQuadrature_ELBO(15))
    )
    start = time.process_time()
    for _ in range(options.steps):
        training.step(inputs[train], label[train])
    seconds = time.process_time() - start
    with torch.no_grad():
        f = guide.posterior(inputs[test])["f"]
        chance = torch.special.ndtr(f.mean / (1 + f.variance).sqrt())  # E[Φ(f)]
    y = label[test]
    chances[title] = chance
    rows[title] = {
        "objective": -training.evaluate_loss(inputs[train], label[train]),
        "test log density": (y * chance.log() + (1 - y) * (1 - chance).log())
        .mean()
        .item(),
        "accuracy": ((chance > 0.5) == (y > 0.5)).double().mean().item(),
        "Brier score": (chance - y).square().mean().item(),
        "sd of f": f.stddev.mean().item(),
        "scale": predict(model, guide, inputs[test][:2], num_samples=1)["scale"].item(),
        "CPU seconds": seconds,
    }
table = pd.DataFrame(rows).T
print(table.round(3).to_string())

# %% [markdown]
# For `SVGP` and `SGPR` the objective is a lower bound of log p(y). For expectation propagation it is an estimate of
# log p(y), which is higher here. Maximising a bound keeps q away from regions where the posterior is small, so q is
# too narrow, and training then finds a smaller scale. Which method predicts better depends on the data. Here
# predictions hardly differ, as is usual if the classes are well separated.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 4))
edges = torch.linspace(0, 1, 6)
for title, chance in chances.items():
    bins = torch.bucketize(chance, edges[1:-1])
    kept = [b for b in range(5) if (bins == b).sum() >= 5]
    axes[0].plot(
        [chance[bins == b].mean() for b in kept],
        [label[test][bins == b].mean() for b in kept],
        "o-",
        label=title,
    )
axes[0].plot([0, 1], [0, 1], "k--", lw=0.8)
axes[0].set(
    xlabel="predicted chance of malignant",
    ylabel="share that was",
    title="calibration, held out",
)
axes[0].legend(fontsize=8)
axes[1].plot(chances["SGPR"], chances["SparseEP"], "k.", ms=4)
axes[1].plot([0, 1], [0, 1], "k--", lw=0.8)
axes[1].set(xlabel="chance by SGPR", ylabel="by SparseEP", title="tumour by tumour")
figure.tight_layout()
figure.savefig(options.out / "classification.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert (
        table.loc["SparseEP", "objective"] > table.loc["SGPR", "objective"]
    )  # an estimate, above the bound
    assert (
        table.loc["SGPR", "objective"] > table.loc["SVGP", "objective"] - 3
    )  # the same family, the same bound
    assert (table["accuracy"] > 0.9).all()
    assert (
        table["test log density"].max() - table["test log density"].min() < 0.02
    )  # they hardly differ here

# %% [markdown]
# ## What to try next
#
# * How expectation propagation works: [explanation](../docs/explanation/expectation-propagation.md), and
#   [how to train by it](../docs/how-to/expectation-propagation.md).
# * More than two classes: [classes](../docs/how-to/likelihoods.md#classes), [deep GPs](deep_gp.ipynb).
# * Other likelihoods: [a gallery](likelihoods.ipynb).
