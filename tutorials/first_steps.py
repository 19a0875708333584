# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps: what a Gaussian process is, and how to fit one
#
# *When did the Nile's flow fall, and by how much?*
#
# You need to know what a prior and a posterior are. You need not have seen a Gaussian process. The data are 100 yearly
# volumes of the Nile at Aswan, 1871 to 1970, and ship with statsmodels.
#
# On the command line: `python tutorials/first_steps.py [--steps 100] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, fit, kernels, predict
from pyro_sparsegp.families import SVGP

options = command_line.options(
    "A first Gaussian process, on the flow of the Nile.",
    device=False,
    steps=(100, "training steps"),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## A Gaussian process is a prior over functions
#
# A line has a slope and an intercept. If you give both a prior, each draw is a line. A Gaussian process needs no
# formula: each draw is a whole function. A *kernel* says how alike the function's values at two inputs are. `RBF`
# makes smooth functions. Its *length scale* is the distance over which the function changes, and its variance says
# how far the function goes up and down.

# %%
grid = torch.linspace(0, 10, 200)[:, None]  # inputs are matrices: rows × columns
priors = {
    "RBF, length 1": kernels.RBF(1.0),
    "RBF, length 3": kernels.RBF(3.0),
    "Matern12, length 3": kernels.Matern12(3.0),  # rough
}
figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
for axis, (name, kernel) in zip(axes, priors.items()):
    draws = GaussianProcess(kernel, grid).sample((3,))  # three functions, (3, 200)
    axis.plot(grid, draws.mT)
    axis.set_title(name)
plt.show()

# %% [markdown]
# ## The data, standardised
#
# Time is in decades since 1871, and flow is standardised: its mean is 0 and its standard deviation 1. Then priors are
# easy to choose, because numbers near 1 are typical.

# %%
flow = sm.datasets.nile.load_pandas().data
year = torch.tensor(flow["year"].to_numpy())
volume = torch.tensor(flow["volume"].to_numpy())
x = (year[:, None] - 1871) / 10
y = (volume - volume.mean()) / volume.std()

# %% [markdown]
# ## The model
#
# The model is an ordinary Pyro program. One `pyro.sample` site, `f`, holds the function's values at all inputs. The
# data scatter around f with standard deviation `noise`. We do not know how smooth f is, so the length scale has a
# prior too: it is a *hyperparameter*, like `sd` and `noise`.


# %%
def model(x, y=None):
    sd = pyro.sample("sd", dist.LogNormal(-0.3, 0.5))
    length = pyro.sample("length", dist.LogNormal(0.7, 0.4))  # about two decades
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    f = pyro.sample("f", GaussianProcess(sd**2 * kernels.RBF(length), x))
    with pyro.plate("years", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


# %% [markdown]
# ## The fit
#
# A *guide* approximates the posterior. This one describes f by its values at 15 *inducing points*, `SVGP(15)`, and
# places the points itself. Two or three points for each length scale are enough. `fit` trains the guide.

# %%
guide = AutoSparseGP(model, SVGP(15))
fit(model, guide, (x, y), steps=options.steps, progress=False)
print(guide.summary())

# %% [markdown]
# Is the posterior right? `check` compares it with a slower and more exact method, and returns a line for each fault
# that it finds. An empty list is good.

# %%
problems = guide.check(x, y)
print(problems)

# %% [markdown]
# ## The answer
#
# `predict` draws from the posterior: here 1,000 functions, each with a value for every year. Compute the quantity
# that you want for each draw. The spread of the results is its uncertainty.

# %%
draws = predict(model, guide, x, num_samples=1000)
f = draws["f"] * volume.std() + volume.mean()  # (1000, 100), in 10⁸ m³ a year
early, late = f[:, year < 1890].mean(1), f[:, year > 1910].mean(1)
fall = (early - late).quantile(torch.tensor([0.05, 0.5, 0.95]))
steepest = year[1:][f.diff(dim=1).argmin(1)]
low, mid, high = steepest.double().quantile(torch.tensor([0.05, 0.5, 0.95]))
print(
    "mean flow before 1890 less that after 1910: {:.0f}, 90 % {:.0f} to {:.0f}".format(
        *fall[[1, 0, 2]]
    )
)
print(f"steepest fall in {mid:.0f}, 90 % interval {low:.0f} to {high:.0f}")

# %%
figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
axis.plot(year, volume, ".", color="0.6", label="data")
low_f, high_f = f.quantile(torch.tensor([0.05, 0.95]), 0)
axis.fill_between(year, low_f, high_f, alpha=0.25, lw=0, label="f, 90 % band")
axis.plot(year, f[:4].mT, color="C0", lw=0.7)
axis.plot([], [], color="C0", lw=0.7, label="four draws of f")
axis.axvspan(low, high, color="C1", alpha=0.15, lw=0, label="steepest fall, 90 %")
axis.set(xlabel="year", ylabel="flow, 10⁸ m³")
axis.legend(frameon=False, fontsize=8)
figure.savefig(options.out / "first_steps.png", dpi=110)
print(f"The picture is in {options.out / 'first_steps.png'}")

# %% [markdown]
# ## Years that were not observed
#
# Ask for other inputs. Beyond the data the band widens until it is the prior's: nothing is known there.

# %%
future = (torch.tensor([[1971.0], [1980.0], [2000.0]]) - 1871) / 10
ahead = predict(model, guide, future, num_samples=1000)
sd = ahead["f"].std(0) * volume.std()
print("sd of f in 1971, 1980 and 2000:", [round(v) for v in sd.tolist()])

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert problems == []
    assert fall[0] > 0  # the flow fell
    assert 1885 < mid < 1910
    assert sd[2] > 1.5 * sd[0]  # less is known later

# %% [markdown]
# ## What to try next
#
# * Counts, classes or outliers? Only the last line of the model changes: [likelihoods](../docs/how-to/likelihoods.md).
# * How to choose priors for length scales: [priors](../docs/how-to/priors.md).
# * Groups and intercepts beside f, and NUTS on the same program: [quickstart](quickstart.ipynb).
# * Another kernel: [kernels and means](../docs/how-to/kernels-and-means.md).
