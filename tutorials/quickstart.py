# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: one program, three guides, and NUTS
#
# *Do people see a doctor more often when care is free?*
#
# The RAND health insurance experiment gave families insurance plans at random and counted their visits to a doctor.
# Sick people go more often. How much more is a curve that nobody has a formula for, so the model takes a Gaussian
# process for it. Beside this curve the model has an intercept, an effect of each plan, and hyperparameters. The data
# ship with statsmodels.
#
# On the command line: `python tutorials/quickstart.py [--draws 2000] [--out DIR] [--short]`. With `--draws` it runs
# NUTS anew, in some minutes. Otherwise it reads draws from the file `quickstart_nuts.npz`.

# %% tags=["hide-input"]
import time
from pathlib import Path

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
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
from pyro_sparsegp.families import SVGP

options = command_line.options(
    "One program under three guides and NUTS, on counts of visits to a doctor.",
    device=False,
    steps=(200, "training steps of each guide"),
    draws=(0, "draws of a new NUTS chain; 0 reads those of the last chain", 0),
    samples=(1000, "draws of each posterior", 50),
    checks=(3, "guides that are checked", 0),
    rows=(20_000, "rows with inputs of their own", 2000),
)
settings = {"steps": options.steps, "progress": False}  # of each fit
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The program
#
# This is an ordinary Pyro program. The site `f` has a value at each level of the index of chronic diseases.
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
# 400 people are for training, and 1,000 are held out. The last section takes all 20,190. Plans are numbered by the
# share of the bill that the patient pays: 0, 25, 50 or 95 per cent. In one plan the share lies between these.

# %%
frame = sm.datasets.randhie.load_pandas().data
diseases, level = np.unique(frame["disea"], return_inverse=True)
illness = torch.tensor(diseases / 10)[:, None]  # the inputs of f, shape (31, 1)
share, plan = np.unique(frame["lncoins"], return_inverse=True)
everyone = tuple(torch.tensor(np.array(v)) for v in (level, plan, frame["mdvis"]))
order = frame.reset_index(drop=True).sample(1400, random_state=0).index.tolist()
train = tuple(column[order[:400]] for column in everyone)
test = tuple(column[order[400 : 400 + options.samples]] for column in everyone)
print(
    f"{len(illness)} levels of illness; people by plan: {train[1].bincount().tolist()}"
)

# %% [markdown]
# ## NUTS, for comparison
#
# The same program runs under NUTS. `Whitening` samples f as independent standard normals, so that the chain mixes. A
# chain of 2,000 draws takes some minutes, so the page reads its draws, every fourth, from a file.


# %%
def run_nuts(num_samples, file):
    start = time.process_time()
    kernel = NUTS(
        poutine.reparam(model, config=Whitening()),
        init_strategy=init_to_median,
        max_tree_depth=5,
        jit_compile=True,
        ignore_jit_warnings=True,
    )
    mcmc = MCMC(kernel, num_samples, warmup_steps=200, disable_progbar=True)
    mcmc.run(*train)
    seconds = time.process_time() - start
    scores = diagnostics.predictive_scores(model, mcmc, *test).summary
    draws = {
        name: value[:: max(1, num_samples // 500)].squeeze().numpy().astype("float32")
        for name, value in predict(model, mcmc, *train[:2]).items()
        if name in ("base", "a", "f", "spread", "sd", "length", "count")
    }
    score = scores.loc["log_score", "mean"]
    np.savez_compressed(file, seconds=seconds, score=score, **draws)


chain = Path(command_line.__file__).parents[1] / "quickstart_nuts.npz"
if options.draws:
    run_nuts(options.draws, chain)
nuts = dict(np.load(chain))

# %% [markdown]
# ## Three guides by one argument
#
# | guide | why |
# |---|---|
# | `SVGP(6)` | six inducing points: enough for this f |
# | `SVGP(2)` | too few inducing points, on purpose |
# | `SVGP(6)`, `independent=True` | Pyro's usual mean field, for comparison |
#
# The first fit of a session also loads parts of PyTorch. So we fit once before the clock starts.

# %%
guides = {
    "SVGP(6)": AutoSparseGP(model, SVGP(6)),
    "SVGP(2)": AutoSparseGP(model, SVGP(2)),
    "mean field": AutoSparseGP(model, SVGP(6), independent=True),
}
fit(model, AutoSparseGP(model, SVGP(6)), train, steps=5, progress=False)


# %%
def trained(guide):
    """Train the guide, and judge it: its row of the table."""
    pyro.set_rng_seed(1)
    start = time.process_time()
    fit(model, guide, train, **settings)
    seconds = time.process_time() - start
    elbo = TraceQuadrature_ELBO(num_particles=10, vectorize_particles=False)
    bound = -elbo.loss(model, guide, *train)
    scores = diagnostics.predictive_scores(model, guide, *test, num_samples=100)
    score = scores.summary.loc["log_score", "mean"]
    khat = diagnostics.psis(
        diagnostics.to_datatree(model, guide, *train, num_samples=options.samples)
    ).khat
    return bound, score, khat, seconds


NAMES = ["base", "a", "f", "spread", "sd"]
rows = {name: trained(guide) for name, guide in guides.items()}
rows["NUTS"] = (np.nan, nuts["score"].item(), np.nan, nuts["seconds"].item())
found = {"NUTS": nuts}
for name, guide in guides.items():
    draws = predict(model, guide, *train[:2], num_samples=options.samples)
    found[name] = {name: draws[name].squeeze().numpy() for name in NAMES}

# %%
print(f"{'':12}{'bound':>9}{'score':>8}{'k-hat':>7}{'sd of base':>12}{'CPU s':>7}")
for name, (bound, score, khat, seconds) in rows.items():
    sd = found[name]["base"].std()
    print(f"{name:12}{bound:9.1f}{score:8.3f}{khat:7.2f}{sd:12.2f}{seconds:7.1f}")

# %% [markdown]
# The bound (ELBO) is in nats, and the score is the mean log density of a held-out person, in nats. For both, higher is
# better. k-hat measures how far the guide is from its target, the best that its own inducing points allow. **For 1,000
# draws a k-hat below 0.67 is good**: importance weights can then correct the draws.
#
# ## The table of latents
#
# `guide.summary()` has each latent's mean, standard deviation and 90 % interval. `guide.check` returns a line for each
# latent whose posterior is wrong, and says what to do.

# %%
print(guides["SVGP(6)"].summary())
for name in list(guides)[: options.checks]:
    print(name, *guides[name].check(*train), sep="\n  ")

# %% [markdown]
# ## What NUTS cannot do: 20,000 rows with inputs of their own
#
# These rows are simulated. Each has an input of its own, so f has 20,000 values, and each gradient of NUTS would
# factorise a matrix of 3 GB. A guide trains on mini-batches instead. `fit` passes the number of all rows as `size`.
# The reference is a guide with four times as many inducing points that takes all rows in each step.


# %%
def many(x, y=None, size=None):
    base = pyro.sample("base", dist.Normal(0.0, 1.0))
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.LogNormal(-2.0, 0.5))
    f = pyro.sample("f", GaussianProcess(sd**2 * kernels.Matern52(length), x))
    with pyro.plate("rows", size or len(x), subsample=x):
        return pyro.sample("y", dist.Poisson((base + f).exp()), obs=y)


def curve(x):
    return torch.sin(12 * x) * torch.exp(-x) + 0.3 * torch.sin(31 * x)


x_many = torch.rand(options.rows, 1)
y_many = torch.poisson(torch.exp(curve(x_many[:, 0])))
pyro.set_rng_seed(2)
sparse = AutoSparseGP(many, SVGP(24))
start = time.process_time()
fit(many, sparse, (x_many, y_many), batch_size=1024, **settings)
seconds = time.process_time() - start
start = time.process_time()
reference = AutoSparseGP(many, SVGP(96))
fit(many, reference, (x_many, y_many), steps=max(2, options.steps // 4), progress=False)
longer = time.process_time() - start
grid = torch.linspace(0, 1, 200)[:, None]
bands = {}
for name, guide in {"reference": reference, "SVGP(24)": sparse}.items():
    draws = predict(many, guide, grid, num_samples=options.samples)
    bands[name] = (draws["base"].reshape(-1, 1) + draws["f"]).exp().numpy()
widths = {name: draws.std(0).mean() for name, draws in bands.items()}
print(f"SVGP(24), mini-batches: {seconds:.0f} CPU s, mean sd {widths['SVGP(24)']:.4f}")
print(f"SVGP(96), all rows: {longer:.0f} CPU s, mean sd {widths['reference']:.4f}")

# %% [markdown]
# ## The picture

# %%
plt.rcParams.update({"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 11})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"legend.frameon": False, "legend.handlelength": 1.2})
figure, axes = plt.subplot_mosaic(
    [["few", "latents"], ["many", "many"]], figsize=(6, 7), layout="constrained"
)
colours = {"NUTS": "0.6", "SVGP(6)": "C0", "SVGP(2)": "C1", "mean field": "C3"}
axis, values = axes["few"], 10 * illness[:, 0]
people = np.bincount(train[0], minlength=len(values))
with np.errstate(invalid="ignore"):  # levels without people
    seen = np.bincount(train[0], train[2].double(), len(values)) / people
axis.scatter(values, seen, 2 * people, color="0.3", alpha=0.6, lw=0, label="data")
for name, draws in found.items():
    rate = np.exp(
        draws["base"].reshape(-1, 1) + draws["a"].mean(1)[:, None] + draws["f"]
    )
    low, high = np.quantile(rate, [0.05, 0.95], 0)
    if name == "NUTS":
        axis.fill_between(values, low, high, color="0.85", label=name)
    else:
        axis.plot(values, low, color=colours[name], label=name)
        axis.plot(values, high, color=colours[name])
axis.set(xlabel="index of chronic diseases", ylim=(0, 10), xlim=(0, 45))
axis.set_title("400 people: visits")
figure.legend(loc="outside upper center", ncols=5, columnspacing=0.8)
axis, names = axes["latents"], ["base", "plan 1", "plan 5", "f(10)", "spread", "sd"]
ten = int((values - 10).abs().argmin())
for i, (name, draws) in enumerate(found.items()):
    columns = [draws["base"], draws["a"][:, 0], draws["a"][:, 4], draws["f"][:, ten]]
    columns = np.stack([*columns, draws["spread"], draws["sd"]], 1)
    low, mid, high = np.quantile(columns, [0.05, 0.5, 0.95], 0)
    place, error = np.arange(len(names)) + 0.18 * (i - 1.5), [mid - low, high - mid]
    axis.errorbar(mid, place, xerr=error, fmt="o", ms=3, color=colours[name])
axis.set_yticks(range(len(names)), names)
axis.invert_yaxis()
axis.set_title("their latents")
axis = axes["many"]
order = x_many[:, 0].argsort().view(-1, 100)
axis.plot(
    x_many[order, 0].mean(1), y_many[order].mean(1), ".", color="0.3", ms=4, alpha=0.5
)
low, high = np.quantile(bands["reference"], [0.05, 0.95], 0)
label = f"reference, {longer:.0f} CPU s"
axis.fill_between(grid[:, 0], low, high, color="0.75", label=label)
low, high = np.quantile(bands["SVGP(24)"], [0.05, 0.95], 0)
label = f"SVGP(24), {seconds:.0f} CPU s"
axis.plot(grid, low, color="C0", lw=1, label=label)
axis.plot(grid, high, color="C0", lw=1)
axis.set(xlabel="x", ylim=(0, 3.2))
axis.set_title("20,000 rows with inputs of their own: mean count")
axis.legend()
figure.savefig(options.out / "quickstart.png", dpi=120, metadata={"Software": None})
print(f"The picture is in {options.out / 'quickstart.png'}")

# %% [markdown]
# ## What to read off
#
# * **The data inform `base + f`, not each alone.** So the intervals of both are wide under NUTS. They are as wide
#   under `SVGP(6)`, because `base`, the plans' effects and f share one Gaussian posterior.
# * **The mean field** treats all latents as independent. Its predictions are as good as the others', but its interval
#   of the intercept is several times too narrow.
# * **k-hat** does not see that two inducing points are too few, because it compares a guide with the best that its own
#   inducing points can do ([more](../docs/explanation/k-hat.md)). The bound and `check` see it.
#
# ## All 20,190 people
#
# How much more often do people see a doctor where care is free?

# %%
pyro.set_rng_seed(2)
guide = AutoSparseGP(model, SVGP(8))
fit(model, guide, everyone, batch_size=1024, **settings)
draws = predict(model, guide, *train[:2], num_samples=options.samples)
a = draws["a"].reshape(-1, 5)
ratio = (a[:, 0] - a[:, 4]).exp()
low, high = ratio.quantile(torch.tensor([0.025, 0.975])).tolist()
print("visits under free care, as a multiple of those under the plan that pays least:")
print(f"{ratio.mean():.2f}, 95 % interval {low:.2f} to {high:.2f}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    width = {name: draws["base"].std() for name, draws in found.items()}
    assert len(nuts["base"]) >= 300
    assert width["mean field"] < 0.3 * width["NUTS"]  # its intercept is too certain
    assert 0.8 < width["SVGP(6)"] / width["NUTS"] < 1.25
    assert rows["SVGP(2)"][0] < rows["SVGP(6)"][0] - 3  # too few inducing points
    assert rows["SVGP(6)"][2] < 0.67  # k-hat
    assert all(abs(row[1] - rows["NUTS"][1]) < 0.05 for row in rows.values())
    assert guides["SVGP(6)"].check(*train) == []
    assert 0.9 < widths["SVGP(24)"] / widths["reference"] < 1.1
    assert low > 1  # free care is used more

# %% [markdown]
# ## What to try next
#
# * New to Gaussian processes: [first steps](first_steps.ipynb).
# * Your own data: [which guide when](../docs/how-to/choose-a-guide.md).
# * What the guide does with intercepts, groups and hyperparameters:
#   [other latents](../docs/how-to/other-latents.md).
# * A sum of effects with a posterior for each: [Mauna Loa](mauna_loa.ipynb), [visits to a doctor](additive.ipynb).
# * Whether to trust a fit: [diagnostics](diagnostics.ipynb).
