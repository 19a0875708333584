# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which guide when
#
# *How good are the families on the same problems, and what do they cost?*
#
# There are three tasks on simulated data: a sum of two smooth effects with Gaussian noise, counts, and classes. The
# same loop trains each family, but `Exact`, on each task, with the family's defaults. Data that were not seen in
# training judge it. The table has
#
# * the bound in nats (for expectation propagation, log Z),
# * the mean log density of the test data,
# * the share of test data within their 90 % intervals,
# * the CPU seconds of training, and the memory that the guide holds.
#
# `WeightSpace` and `ExactWeightSpace` have another prior, random Fourier features instead of the kernel. Their bounds
# belong to another model and cannot be compared with the others.
#
# On the command line: `python tutorials/which_guide.py [--steps 60] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import time
import warnings

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    diagnostics,
    kernels,
)
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    AdditiveSGPR,
    CollapsedOrthogonal,
    ComputationAware,
    ConditionalSGPR,
    CoupledCovariance,
    CoupledPrecision,
    ExactWeightSpace,
    MeanFieldAdditive,
    OrthogonalInducing,
    OrthogonallyDecoupled,
    SemiCollapsedOrthogonal,
    SiteFamily,
    SparseEP,
    WeightSpace,
)

options = command_line.options(
    "All families but Exact on three tasks.",
    device=False,
    steps=(60, "training steps of each guide", 2),
    every=(1, "train one of so many pairs of a task and a family", 4),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)
warnings.filterwarnings("ignore", message="The expectation|.*are drawn")

# %% [markdown]
# ## The tasks

# %%
num, num_test = 200, 400
inputs = torch.rand(num + num_test, 2)
truth = torch.sin(6 * inputs[:, 0]) + (4 * inputs[:, 1] - 2).square() / 2 - 0.7
tasks = {
    "noise": (
        truth + 0.2 * torch.randn(len(truth)),
        lambda f, scale: dist.Normal(f, scale),
    ),
    "counts": (torch.poisson(truth.exp()), lambda f, scale: dist.Poisson(f.exp())),
    "classes": (
        torch.bernoulli(torch.sigmoid(2 * truth)),
        lambda f, scale: dist.Bernoulli(logits=f),
    ),
}
frequencies = kernels.RandomFourier.draw(kernels.RBF, 40, dim=1)


def smooth(length):
    """One effect's kernel."""
    return kernels.RBF(length)


def features(length):
    """Instead of it, a kernel with finitely many features."""
    return kernels.RandomFourier(frequencies, length)


def program(likelihood, effect=smooth):
    def model(x, y=None):
        size = pyro.sample("size", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        length = pyro.sample(
            "length", dist.LogNormal(torch.full((2,), -1.0), 0.5).to_event(1)
        )
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        kernel = sum(
            (size[d] * effect(length[d])[d] for d in (0, 1)), kernels.Constant(1.0)
        )
        f = pyro.sample("f", GaussianProcess(kernel, x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(f, noise), obs=y)

    return model


# %% [markdown]
# ## The families
#
# Each family has some 20 coefficients, or 10 for each effect.

# %%
families = {
    "SVGP": SVGP(20),
    "OrthogonalInducing": OrthogonalInducing(10, 10),
    "OrthogonallyDecoupled": OrthogonallyDecoupled(10, 10),
    "CoupledPrecision": CoupledPrecision(10),
    "CoupledCovariance": CoupledCovariance(10),
    "MeanFieldAdditive": MeanFieldAdditive(10),
    "WeightSpace": WeightSpace(),
    "SGPR": SGPR(20),
    "CollapsedOrthogonal": CollapsedOrthogonal(10, 10),
    "SemiCollapsedOrthogonal": SemiCollapsedOrthogonal(10, 10),
    "ConditionalSGPR": ConditionalSGPR(20),
    "AdditiveSGPR": AdditiveSGPR(10),
    "ComputationAware": ComputationAware(20),
    "ExactWeightSpace": ExactWeightSpace(),
    "SparseEP": SparseEP(20),
}


def judged(name, family, task):
    y, likelihood = tasks[task]
    model = program(likelihood, features if name.endswith("WeightSpace") else smooth)
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, family, point_estimates=True)
    optim = pyro.optim.Adam({"lr": 0.05})
    by_expectation = name == "SparseEP"
    training = (
        ExpectationPropagation(model, guide, optim)
        if by_expectation
        else SVI(model, guide, optim, TraceQuadrature_ELBO(10))
    )
    train, test = (inputs[:num], y[:num]), (inputs[num:], y[num:])
    training.step(*train)
    start = time.process_time()
    for _ in range(options.steps):
        training.step(*train)
    seconds = time.process_time() - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = diagnostics.predictive_scores(
            model, guide, *test, num_samples=2, probs=(0.9,), seed=0
        )
    return {
        "task": task,
        "family": name,
        "bound": -training.evaluate_loss(*train),
        "test log density": scores.summary.loc["log_score", "mean"],
        "within 90 %": scores.coverage(0.9),
        "CPU seconds": seconds,
        "KiB held": sum(
            t.numel() * t.element_size()
            for t in [*guide.parameters(), *guide.buffers()]
        )
        / 1024,
    }


pairs = [(task, name) for task in tasks for name in families][:: options.every]
table = pd.DataFrame([judged(name, families[name], task) for task, name in pairs])
for task, rows in table.groupby("task", sort=False):
    print(f"\n{task}, {num} rows, {options.steps} steps")
    print(rows.drop(columns="task").set_index("family").round(3).to_string())

# %% [markdown]
# ## Bound and cost
#
# *Families on sites* (orange) compute in every step the best posterior for their hyperparameters, and need all rows for
# it. *Free families* (blue) learn the posterior by natural gradients, and take mini-batches. Expectation propagation
# (green) estimates log p(y), and its estimate is not a bound. The picture leaves out the two families with another
# prior.

# %%
color = {
    name: "C1" if isinstance(family, SiteFamily) else "C0"
    for name, family in families.items()
} | {"SparseEP": "C2"}
same = table[~table.family.str.endswith("WeightSpace")]
figure, axes = plt.subplots(1, 4, figsize=(14, 4), sharey=True)
for axis, (task, rows) in zip(axes, same.groupby("task", sort=False)):
    best = rows.bound[rows.family != "SparseEP"].max()
    axis.barh(
        rows.family,
        (rows.bound - best).clip(lower=-20),
        color=[color[name] for name in rows.family],
    )
    axis.set(title=task, xlabel="nats from the best bound, cut at -20")
seconds = same.groupby("family", sort=False)["CPU seconds"].mean()
axes[3].barh(seconds.index, seconds, color=[color[name] for name in seconds.index])
axes[3].set(title="cost", xlabel=f"CPU seconds of {options.steps} steps")
axes[0].invert_yaxis()
figure.tight_layout()
figure.savefig(options.out / "which_guide.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    at = table.set_index(["task", "family"])
    for task in tasks:
        bound = at.loc[task, "bound"]
        same = bound[
            [
                not name.endswith("WeightSpace") and name != "SparseEP"
                for name in bound.index
            ]
        ]
        assert (
            bound["SGPR"] > same.max() - 15
        )  # the plain choices are close to the best bound,
        assert bound["SVGP"] > same.max() - 15
        score = at.loc[task, "test log density"]
        assert score["SVGP"] > score.max() - 0.1  # and to the best test score
        assert score["SGPR"] > score.max() - 0.1
        assert (
            at.loc[task, "within 90 %"] > 0.8
        ).all()  # and no family is badly calibrated
    noise = at.loc["noise", "bound"]
    assert (
        noise["SGPR"] >= noise["ConditionalSGPR"] - 1
    )  # the tighter bound gains less than a nat

# %% [markdown]
# ## How to choose
#
# On data like these most families differ little. So start with `SVGP`, or with `SGPR` for a `Normal` likelihood. Take
# another family for something that only it gives: intervals for effects one by one (`CoupledPrecision`), intervals that
# are never too narrow (`ComputationAware`), a posterior closer to the exact one for counts and classes (`SparseEP`), or
# known features (`WeightSpace`). The bound of `MeanFieldAdditive` is lower, because it takes the effects as
# independent. [Choose a guide](../docs/how-to/choose-a-guide.md) lists the families by problem.

# %% [markdown]
# ## What to try next
#
# * Larger data: [mini-batches](../docs/how-to/mini-batches.md), and [benchmarks](../docs/explanation/benchmarks.md)
#   on real data.
# * Classes by expectation propagation and by variational inference: [classification](classification.ipynb).
# * Whether to trust a fit: [diagnostics](diagnostics.ipynb).
