# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: one program, four guides, and NUTS
#
# *Do people see a doctor more often when care is free?*
#
# The RAND health insurance experiment gave families insurance plans at random and counted their visits to a doctor.
# Sick people go more often, on a curve that nobody has a formula for: a Gaussian process. Beside it stand an
# intercept, an effect of each plan, and hyperparameters. The data ship with statsmodels.
#
# On the command line: `python tutorials/quickstart.py [--steps 50] [--draws 45] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import time

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI
from pyro.infer.autoguide.initialization import init_to_median

from pyro_sparsegp import (
    AutoSparseGP,
    GaussianProcess,
    TraceQuadrature_ELBO,
    Whitening,
    diagnostics,
    fit,
    kernels,
    predict,
)
from pyro_sparsegp.families import SGPR, SVGP

options = command_line.options(
    "One program under four guides and NUTS, on counts of visits to a doctor.",
    device=False,
    steps=(50, "training steps of each guide"),
    draws=(45, "draws of NUTS, after 45 to warm up"),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The program
#
# An ordinary Pyro program. `f` is one `pyro.sample` site with a value at each level of the disease index, and
# `f[level]` looks up each person's value, as `a[plan]` does for the plans. No line mentions a posterior or inducing
# points.


# %%
def model(level, plan, visits=None, size=None):
    base = pyro.sample("base", dist.Normal(1.0, 0.5))
    spread = pyro.sample("spread", dist.HalfNormal(0.5))
    with pyro.plate("plans", 5):
        a = pyro.sample("a", dist.Normal(0.0, spread))
    sd = pyro.sample("sd", dist.HalfNormal(0.5))
    length = pyro.sample("length", dist.LogNormal(0.5, 0.5))
    f = pyro.sample("f", GaussianProcess(sd**2 * kernels.Matern52(length), illness))
    count = pyro.sample("count", dist.LogNormal(0.0, 1.0))  # small: overdispersed
    logits = base + a[plan] + f[level] - count.log()  # the mean is exp(base + a + f)
    with pyro.plate("people", size or len(level), subsample=level):
        likelihood = dist.NegativeBinomial(count, logits=logits)
        return pyro.sample("visits", likelihood, obs=visits)


# %% [markdown]
# ## The data
#
# 400 people to train on, 1,000 held out, all 20,190 for the end. Plans are numbered by the share of the bill that the
# patient pays: 0, 25, 50, 95 and (for one group) up to 100 per cent.

# %%
frame = sm.datasets.randhie.load_pandas().data
diseases, level = np.unique(frame["disea"], return_inverse=True)
illness = torch.tensor(diseases / 10)[:, None]  # the inputs of f, shape (31, 1)
share, plan = np.unique(frame["lncoins"], return_inverse=True)
everyone = tuple(torch.tensor(np.array(v)) for v in (level, plan, frame["mdvis"]))
order = frame.reset_index(drop=True).sample(1400, random_state=0).index.tolist()
train = [column[order[:400]] for column in everyone]
test = [column[order[400:]] for column in everyone]
print(
    f"{len(illness)} levels of illness; people by plan: {train[1].bincount().tolist()}"
)

# %% [markdown]
# ## Four guides by one argument
#
# | guide | why |
# |---|---|
# | `SVGP(6)` | six inducing points; trains on all rows or on mini-batches |
# | `SGPR(6)` | computes its posterior of f from the likelihood; needs all rows |
# | `SVGP(2)` | too few inducing points, on purpose |
# | `SVGP(6)`, `independent=True` | Pyro's usual mean field, for comparison |

# %%
guides = {
    "SVGP(6)": AutoSparseGP(model, SVGP(6)),
    "SGPR(6)": AutoSparseGP(model, SGPR(6)),
    "SVGP(2)": AutoSparseGP(model, SVGP(2)),
    "mean field": AutoSparseGP(model, SVGP(6), independent=True),
}


# %%
def trained(guide):
    """Train the guide, and judge it: its row of the table."""
    pyro.set_rng_seed(1)
    start = time.time()
    optim = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.05 ** (1 / options.steps)})
    svi = SVI(model, guide, optim, TraceQuadrature_ELBO())
    for _ in range(options.steps):
        svi.step(*train)
    seconds = time.time() - start
    bound = -sum(svi.evaluate_loss(*train) for _ in range(10)) / 10
    scores = diagnostics.predictive_scores(model, guide, *test, num_samples=100)
    score = scores.summary.loc["log_score", "mean"]
    tree = diagnostics.to_datatree(model, guide, *train, num_samples=1000)
    khat = diagnostics.psis(tree).khat
    return bound, score, khat, seconds


def latents(posterior):
    """Joint draws of f and of the other latents."""
    draws = predict(model, posterior, *train[:2], num_samples=500)
    return {name: draws[name].numpy() for name in ("base", "a", "f", "spread", "sd")}


rows = {name: trained(guide) for name, guide in guides.items()}
found = {name: latents(guide) for name, guide in guides.items()}

# %% [markdown]
# ## NUTS on the same program
#
# `Whitening` samples f as independent standard normals, so that the chain mixes. This chain is short: 45 draws show
# the widths, not their second digit.

# %%
start = time.time()
white = poutine.reparam(model, config=Whitening())
kernel = NUTS(
    white,
    init_strategy=init_to_median,
    max_tree_depth=5,
    jit_compile=True,
    ignore_jit_warnings=True,
)
mcmc = MCMC(kernel, options.draws, disable_progbar=True)  # as many to warm up
mcmc.run(*train)
scores = diagnostics.predictive_scores(model, mcmc, *test)
score = scores.summary.loc["log_score", "mean"]
found["NUTS"] = {
    name: draws.numpy()
    for name, draws in predict(model, mcmc, *train[:2]).items()
    if name in found["SVGP(6)"]
}
rows["NUTS"] = (np.nan, score, np.nan, time.time() - start)

# %% [markdown]
# ## Compared

# %%
print(
    f"{'':12}{'bound':>9}{'held-out score':>16}{'k-hat':>8}{'sd of base':>12}{'seconds':>9}"
)
for name, (bound, score, khat, seconds) in rows.items():
    sd = found[name]["base"].std()
    print(f"{name:12}{bound:9.1f}{score:16.3f}{khat:8.2f}{sd:12.2f}{seconds:9.1f}")

# %%
figure, (left, right) = plt.subplots(
    1, 2, figsize=(11, 4.2), width_ratios=[1.3, 1], layout="constrained"
)
colours = dict(zip(found, ["C0", "C2", "C1", "C3", "0.5"]))
x = 10 * illness[:, 0]
for name, draws in found.items():
    low, high = np.quantile(draws["f"], [0.05, 0.95], 0)
    if name == "NUTS":
        left.fill_between(x, low, high, color="0.85", label=name)
    else:
        left.plot(x, low, color=colours[name], label=name)
        left.plot(x, high, color=colours[name])
left.set(xlabel="index of chronic diseases", ylabel="f", title="90 % bands of f")
left.legend(frameon=False)
names = ["base", *(f"plan {i + 1}" for i in range(5)), "spread", "sd"]
for i, (name, draws) in enumerate(found.items()):
    columns = [draws["base"].reshape(-1, 1), draws["a"].reshape(len(draws["a"]), -1)]
    columns += [draws["spread"].reshape(-1, 1), draws["sd"].reshape(-1, 1)]
    low, mid, high = np.quantile(np.concatenate(columns, 1), [0.05, 0.5, 0.95], 0)
    where = np.arange(len(names)) + 0.14 * (i - 2)
    right.errorbar(
        mid, where, xerr=[mid - low, high - mid], fmt="o", ms=3, color=colours[name]
    )
right.set_yticks(range(len(names)), names)
right.invert_yaxis()
right.set_title("90 % intervals of the other latents")
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)
figure.savefig(options.out / "quickstart.png", dpi=110)
print(f"The picture is in {options.out / 'quickstart.png'}")

# %% [markdown]
# ## What to read off
#
# * **The data inform `base + f`, not each alone.** NUTS says so: both are wide. So do the guides, because `base`, the
#   plans' effects and f have one Gaussian posterior together.
# * **The mean field** cannot say so. Its predictions are as good as the others', but its interval of the intercept is
#   several times too narrow. Its bound is lower by some nats, and its k-hat is the largest.
# * **k-hat** says whether weights can correct the guide's draws: below 0.67 they can. It does not see that two
#   inducing points are too few ([why](../docs/explanation/k-hat.md)); the bound does, and so does the band of f.
# * **The guides take a second or two**, and even this short chain of NUTS takes several times as long. f has only 31
#   values here.

# %% [markdown]
# ## All 20,190 people
#
# The same program takes mini-batches: `fit` passes the number of all rows as `size`.

# %%
pyro.set_rng_seed(2)
start = time.time()
guide = AutoSparseGP(model, SVGP(8))
fit(model, guide, everyone, steps=options.steps, batch_size=1024, progress=False)
draws = predict(model, guide, *train[:2], num_samples=1000)
a = draws["a"].reshape(1000, 5)
ratio = (a[:, 0] - a[:, 4]).exp()
low, high = ratio.quantile(torch.tensor([0.025, 0.975])).tolist()
print(f"{time.time() - start:.0f} s")
print("visits under free care, as a multiple of those under the plan that pays least:")
print(f"{ratio.mean():.2f}, 95 % interval {low:.2f} to {high:.2f}")

# %% [markdown]
# ## What was claimed

# %%
if options.full:
    width = {name: draws["base"].std() for name, draws in found.items()}
    assert rows["mean field"][0] < rows["SVGP(6)"][0] - 2  # its bound is lower
    assert width["mean field"] < 0.3 * width["NUTS"]  # and its intercept too certain
    for name in ("SVGP(6)", "SGPR(6)"):
        assert 0.6 < width[name] / width["NUTS"] < 1.7
    assert rows["SVGP(2)"][0] < rows["SVGP(6)"][0] - 3  # too few inducing points
    assert rows["mean field"][2] > rows["SVGP(6)"][2]  # k-hat
    assert all(abs(row[1] - rows["NUTS"][1]) < 0.05 for row in rows.values())
    assert low > 1  # free care is used more

# %% [markdown]
# ## What to try next
#
# * Your own data: [which guide when](../docs/how-to/choose-a-guide.md).
# * What the guide does with intercepts, groups and hyperparameters:
#   [other latents](../docs/how-to/other-latents.md).
# * A sum of effects with a posterior for each: [Mauna Loa](mauna_loa.ipynb), [visits to a doctor](additive.ipynb).
# * Whether to trust a fit: [diagnostics](diagnostics.ipynb).
