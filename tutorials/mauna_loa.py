# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Mauna Loa: trend, season and weather apart
#
# *How large is each part of a sum, and how certain is each?*
#
# The data are weekly CO₂ at Mauna Loa, 1958 to 2001, and ship with statsmodels. The model is one Gaussian process
# whose kernel is a sum of named terms. `Anova` makes each term's mean over the time span zero, so a constant cannot
# move from one term to another. This identifies the terms.
#
# On the command line: `python tutorials/mauna_loa.py [--device cuda] [--steps 200] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import time

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch
from pyro.infer import SVI

from pyro_sparsegp import (
    AutoSparseGP,
    GaussianProcess,
    TraceQuadrature_ELBO,
    diagnostics,
    kernels,
)
from pyro_sparsegp.families import CoupledPrecision, MeanFieldAdditive

options = command_line.options(
    "Terms of the Mauna Loa CO2 series.",
    steps=(200, "training steps of each guide"),
    every=(1, "take one of so many weeks", 10),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The model
#
# The terms are a level, a trend over decades, a yearly cycle whose shape may drift, and weather that lasts months.


# %%
def model(x, y=None):
    trend = pyro.sample("trend", dist.LogNormal(0.0, 1.0))
    trend_length = pyro.sample("trend_length", dist.LogNormal(3.0, 0.5))  # years
    season = pyro.sample("season", dist.LogNormal(-3.0, 1.0))
    season_shape = pyro.sample("season_shape", dist.LogNormal(0.0, 0.5))
    weather = pyro.sample("weather", dist.LogNormal(-5.0, 1.0))
    weather_length = pyro.sample("weather_length", dist.LogNormal(0.0, 0.5))  # years
    noise = pyro.sample("noise", dist.LogNormal(-3.5, 0.5))
    smooth = kernels.Anova(kernels.RBF(trend_length), first, last)
    cycle = kernels.Anova(kernels.Periodic(season_shape, period=1.0), 0.0, 1.0)
    rough = kernels.Anova(kernels.Matern32(weather_length), first, last)
    kernel = (
        kernels.Constant(1.0).named("level")
        + (trend * smooth).named("trend")
        + (season * kernels.Product(cycle, kernels.RBF(60.0))).named("season")
        + (weather * rough).named("weather")
    )
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("weeks", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


# %% [markdown]
# ## The data
#
# Time is in years from the middle of the record. CO₂ in ppm is standardised. A fifth of the weeks is held out.

# %%
series = sm.datasets.co2.load_pandas().data["co2"].dropna()[:: options.every]
years = torch.tensor(series.index.year + (series.index.day_of_year - 1) / 365.25)
ppm = torch.tensor(series.to_numpy())
middle, level, unit = years.mean(), ppm.mean(), ppm.std()
t = (years - middle)[:, None].to(options.device)
y = ((ppm - level) / unit).to(options.device)
first, last = t.min().item(), t.max().item()
held_out = torch.rand(len(t)) < 0.2
train, test = (t[~held_out], y[~held_out]), (t[held_out], y[held_out])

# %% [markdown]
# ## Two additive families
#
# Each term has inducing points of its own, so `inducing` has a number for each term. The level has a single feature
# and needs none, `None`. `MeanFieldAdditive` takes the terms as independent. `CoupledPrecision` keeps their
# correlation.

# %%
families = {
    "MeanFieldAdditive": MeanFieldAdditive([None, 12, 40, 60]),
    "CoupledPrecision": CoupledPrecision([None, 12, 40, 60]),
}
guides, bounds = {}, {}
for name, family in families.items():
    pyro.set_rng_seed(1)
    start = time.time()
    guides[name] = guide = AutoSparseGP(model, family, point_estimates=True)
    optim = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.03 ** (1 / options.steps)})
    svi = SVI(model, guide, optim, TraceQuadrature_ELBO(num_nodes=2))
    for _ in range(options.steps):
        svi.step(*train)
    bounds[name] = -svi.evaluate_loss(*train)
    scores = diagnostics.predictive_scores(model, guide, *test, num_samples=1)
    terms = guide.posterior(t)["f"].components
    names = ("trend", "season", "weather")
    sds = {term: (terms[term].stddev.mean() * unit).item() for term in names}
    print(f"{name}: bound {bounds[name]:.1f} nats, {time.time() - start:.0f} s")
    print("  mean sd in ppm:", {term: round(sd, 2) for term, sd in sds.items()})
    print(scores.summary)

# %% [markdown]
# ## The terms
#
# The season is a cycle of ±3 ppm, and its band is too narrow to see. Slow weather and the trend can explain the same
# weeks, so both are uncertain. `CoupledPrecision` shows this by wide bands. The bands of `MeanFieldAdditive` are too
# narrow, because it takes the terms as independent.

# %%
COLOURS = dict(zip(families, ["C3", "C0"]))


def line(low, high, num):
    return torch.linspace(low, high, num)[:, None].to(t)


def band(axis, span, posterior, colour, shift, label=None):
    x = span[:, 0].cpu() + middle
    mean = posterior.mean.cpu() * unit + shift
    sd = posterior.stddev.cpu() * unit
    axis.plot(x, mean, color=colour, lw=1, label=label)
    axis.fill_between(x, mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.25, lw=0)


figure = plt.figure(figsize=(11, 6.4), layout="constrained")
axes = figure.subplot_mosaic(
    [["all", "all", "all"], ["trend", "season", "weather"]], height_ratios=[1.4, 1]
)
with torch.no_grad():
    grid = line(first, last + 8, 1500)
    axes["all"].plot(years, ppm, ".", color="0.6", ms=2, label="weekly means")
    f = guides["CoupledPrecision"].posterior(grid)["f"]
    band(axes["all"], grid, f, "C0", level, "f, with a forecast of eight years")
    axes["all"].axvline(years.max(), color="0.4", lw=0.8, ls=":")
    spans = {"trend": (first, last), "season": (2, 4), "weather": (-5, 5)}
    for term, (low, high) in spans.items():
        span = line(low, high, 300)
        for name, guide in guides.items():
            component = guide.posterior(span)["f"].components[term]
            band(axes[term], span, component, COLOURS[name], 0.0, name)
        axes[term].set(title=term, ylabel="ppm", xlabel="year")
        axes[term].ticklabel_format(useOffset=False)
axes["all"].set(ylabel="CO₂ (ppm)")
axes["all"].legend(frameon=False)
axes["trend"].legend(frameon=False)
for axis in axes.values():
    axis.spines[["top", "right"]].set_visible(False)
figure.savefig(options.out / "mauna_loa.png", dpi=110)
print(f"The picture is in {options.out / 'mauna_loa.png'}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    cycle = guides["CoupledPrecision"].posterior(line(2, 3, 100))["f"]
    cycle = cycle.components["season"]
    assert cycle.mean.abs().max() * unit > 2.5
    assert cycle.stddev.max() * unit < 0.3
    assert bounds["CoupledPrecision"] > bounds["MeanFieldAdditive"]
    assert sds["trend"] > 0.1  # of CoupledPrecision, the last

# %% [markdown]
# ## What to try next
#
# * Drop `Anova` from the terms: their bands become as wide as the level that they share.
# * Effects of several columns, factors and interactions: [additive models](additive.ipynb).
# * Where to measure next: [Bayesian optimisation](bayesian_optimisation.ipynb).
