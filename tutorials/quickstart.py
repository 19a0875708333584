# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: one model, several guides
#
# *What changes when only the guide changes?*
#
# Weekly CO₂ at Mauna Loa, 1958 to 2001, ships with statsmodels. The model below is an ordinary Pyro program
# with one Gaussian process site; it says nothing of inducing points. Each guide approximates its posterior in
# another way, and only the guide changes.
#
# On the command line: `python tutorials/quickstart.py [--device cuda] [--steps 300] [--out DIR]`.

# %%
import time

import command_line  # what can be said on the command line, beside this file
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive
from tqdm import tqdm

from pyro_sparsegp import (
    AutoSparseGP,
    GaussianProcess,
    TraceQuadrature_ELBO,
    Whitening,
    kernels,
)
from pyro_sparsegp.families import (
    SVGP,
    CoupledCovariance,
    CoupledPrecision,
    MeanFieldAdditive,
    OrthogonalInducing,
)

options = command_line.options(
    "One model, several guides, on the Mauna Loa CO2 series.",
    steps=(300, "training steps of each guide"),
)

# %% [markdown]
# ## Data
#
# Time in years from the middle of the record, ppm standardised; a fifth of the weeks, chosen at random, is held out.

# %%
series = sm.datasets.co2.load_pandas().data["co2"].dropna()
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)
years = torch.tensor(series.index.year + (series.index.day_of_year - 1) / 365.25)
ppm = torch.tensor(series.to_numpy())
middle, level, unit = years.mean(), ppm.mean(), ppm.std()
t = ((years - middle)[:, None]).to(options.device)
y = ((ppm - level) / unit).to(options.device)
held_out = torch.rand(len(t)) < 0.2
train_t, train_y, test_t, test_y = t[~held_out], y[~held_out], t[held_out], y[held_out]

# %% [markdown]
# ## The model
#
# A trend, a yearly cycle whose shape may drift, and weather that lasts months, with priors on all their scales.


# %%
def model(x, y=None, size=None):
    trend = pyro.sample("trend", dist.LogNormal(0.0, 1.0))
    trend_length = pyro.sample("trend_length", dist.LogNormal(3.5, 0.5))  # years
    season = pyro.sample("season", dist.LogNormal(-3.0, 1.0))
    season_shape = pyro.sample("season_shape", dist.LogNormal(0.0, 0.5))
    weather = pyro.sample("weather", dist.LogNormal(-5.0, 1.0))
    weather_length = pyro.sample("weather_length", dist.LogNormal(0.0, 0.5))  # years
    noise = pyro.sample("noise", dist.LogNormal(-3.5, 0.5))
    kernel = (
        kernels.Linear(0.01)
        + trend * kernels.RBF(trend_length)
        + season
        * kernels.Product(kernels.Periodic(season_shape, period=1.0), kernels.RBF(60.0))
        + weather * kernels.Matern32(weather_length)
    )
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


# %% [markdown]
# ## Guides to swap
#
# The first two families place inducing points for the whole function. The others know that the kernel is a sum:
# each term has inducing points of its own, and they differ in how the terms are coupled afterwards.

# %%
families = {
    "SVGP": SVGP(120),
    "OrthogonalInducing": OrthogonalInducing(60, 60),
    "MeanFieldAdditive": MeanFieldAdditive([None, 12, 40, 60]),
    "CoupledPrecision": CoupledPrecision([None, 12, 40, 60]),
    "CoupledCovariance": CoupledCovariance([None, 12, 40, 60]),
}


def fit(name, family):
    """Train a guide; its row of the table."""
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, family, init_scale=0.01)
    # Of hyperparameters and inducing inputs: q takes natural steps of its own. A high rate, falling by a factor of 30.
    optim = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": (1 / 30) ** (1 / options.steps)})
    svi = SVI(model, guide, optim, TraceQuadrature_ELBO(num_nodes=2))
    start = time.time()
    bar = tqdm(
        range(options.steps),
        desc=name,
        mininterval=1.0,
        disable=command_line.IN_NOTEBOOK,
    )
    for step in bar:
        loss = svi.step(train_t, train_y)
        if step % 50 == 49:
            bar.set_postfix(elbo=f"{-loss:.1f}")
    seconds = time.time() - start
    with torch.no_grad():
        elbo = -sum(svi.evaluate_loss(train_t, train_y) for _ in range(20)) / 20
        f = guide.posterior(test_t)["f"]
        noise = guide.median(test_t)["noise"]
        predictive = dist.Normal(f.mean, (f.variance + noise**2).sqrt())
        density = predictive.log_prob(test_y).mean().item()
        rmse = (f.mean - test_y).square().mean().sqrt().item() * unit.item()
        covered = (
            ((test_y - f.mean).abs() < 1.96 * predictive.scale).double().mean().item()
        )
    return guide, (elbo, density, rmse, 100 * covered, seconds)


# %%
guides, rows = {}, {}
for name, family in families.items():
    guides[name], rows[name] = fit(name, family)

heading = f"{'family':20}{'ELBO':>10}{'test log density':>18}{'RMSE (ppm)':>12}{'95% coverage':>14}{'seconds':>9}"
lines = [heading, "-" * len(heading)]
for name, (elbo, density, rmse, covered, seconds) in rows.items():
    lines.append(
        f"{name:20}{elbo:10.1f}{density:18.3f}{rmse:12.3f}{covered:13.1f}%{seconds:9.1f}"
    )
print("\n" + "\n".join(lines))
print(
    "ELBO in nats; test log density a week, of standardised ppm; 20 % of the weeks held out."
)

# %% [markdown]
# ## A picture
#
# Every guide gives the posterior of f anywhere, and of each term of the kernel. The band in the top panel is the
# 95 % interval of f, with a forecast of eight years.
#
# The data determine the sum of the terms far better than the terms: a level can move from one to another. The
# mean field cannot say so, since its terms are independent: its bound is the lowest and its bands below are much too
# narrow. The full coupled covariance shows how uncertain each term really is, and so does `CoupledPrecision`, whose
# storage grows with the number of terms and not with its square.

# %%
COLOURS = dict(zip(families, plt.cm.tab10.colors))


def to_numpy(*tensors):
    return [tensor.detach().cpu().numpy() for tensor in tensors]


def draw():
    figure = plt.figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplot_mosaic(
        [["all", "all", "all"], ["trend", "season", "weather"]], height_ratios=[1.5, 1]
    )
    grid = torch.linspace(t.min().item(), t.max().item() + 8, 1500, device=t.device)[
        :, None
    ]
    axis = axes["all"]
    axis.plot(years, ppm, ".", color="0.6", markersize=2, label="weekly means")
    for name in ("CoupledCovariance", "SVGP"):
        f = guides[name].posterior(grid)["f"]
        x, mean, sd = to_numpy(
            grid[:, 0].cpu() + middle,
            f.mean.cpu() * unit + level,
            f.stddev.cpu() * unit,
        )
        axis.plot(x, mean, color=COLOURS[name], linewidth=1, label=name)
        axis.fill_between(
            x,
            mean - 1.96 * sd,
            mean + 1.96 * sd,
            color=COLOURS[name],
            alpha=0.25,
            linewidth=0,
        )
    axis.axvline(years.max(), color="0.4", linewidth=0.8, linestyle=":")
    axis.set(
        ylabel="CO₂ (ppm)",
        title="Mauna Loa: one Pyro model, guides swapped by one argument",
    )
    axis.legend(loc="upper left", frameon=False)
    spans = {
        "trend": grid,
        "season": torch.linspace(0, 2, 300, device=t.device)[:, None] + 2,
    }
    spans["weather"] = torch.linspace(-5, 5, 400, device=t.device)[:, None]
    for index, (part, span) in enumerate(spans.items(), 1):
        axis = axes[part]
        for name in ("MeanFieldAdditive", "CoupledPrecision", "CoupledCovariance"):
            component = guides[name].posterior(span)["f"].components[index]
            x, mean, sd = to_numpy(
                span[:, 0].cpu() + middle,
                component.mean.cpu() * unit,
                component.stddev.cpu() * unit,
            )
            axis.plot(x, mean, color=COLOURS[name], linewidth=1, label=name)
            axis.fill_between(
                x,
                mean - 1.96 * sd,
                mean + 1.96 * sd,
                color=COLOURS[name],
                alpha=0.2,
                linewidth=0,
            )
        axis.set(title=part, ylabel="ppm", xlabel="year")
        axis.ticklabel_format(useOffset=False)
    axes["season"].legend(frameon=False, fontsize=7, loc="lower left")
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    return figure


with torch.no_grad():
    picture = draw()
picture.savefig(options.out / "quickstart.png", dpi=110)
print(f"The fits are drawn in {options.out / 'quickstart.png'}")

# %% [markdown]
# ## The same program elsewhere
#
# Prior predictive sampling, and NUTS on 30 of the weeks with the function whitened. Nothing of the model changes.

# %%
if command_line.IN_NOTEBOOK:
    few = torch.randperm(len(train_t))[:30]
    prior = Predictive(model, num_samples=3)(train_t[few])["y"]
    print("prior predictive draws:", tuple(prior.shape))
    mcmc = MCMC(
        NUTS(poutine.reparam(model, config=Whitening()), max_tree_depth=6),
        num_samples=100,
        warmup_steps=100,
        disable_progbar=True,
    )
    mcmc.run(train_t[few], train_y[few])
    noise = mcmc.get_samples()["noise"]
    print(
        f"noise by NUTS on 30 weeks: {noise.mean() * unit:.2f} ± {noise.std() * unit:.2f} ppm"
    )

# %% [markdown]
# ## What was claimed

# %%
if options.full:
    bounds = {name: row[0] for name, row in rows.items()}
    densities = [row[1] for row in rows.values()]
    assert (
        min(bounds, key=bounds.get) == "MeanFieldAdditive"
    )  # independent terms cost most
    assert max(densities) - min(densities) < 0.1  # predictions of the sum hardly differ
    with torch.no_grad():
        trend = {
            name: guides[name].posterior(t)["f"].components[1].stddev.mean()
            for name in list(rows)[2:]
        }
    print(
        "mean sd of the trend (ppm):",
        {name: round(float(sd * unit), 2) for name, sd in trend.items()},
    )
    assert (
        trend["MeanFieldAdditive"] < 0.5 * trend["CoupledCovariance"]
    )  # far too sure of a term
    assert (
        trend["CoupledPrecision"] > 0.5 * trend["CoupledCovariance"]
    )  # a low rank holds the level that terms share

# %% [markdown]
# ## What to try next
#
# * Other data of yours: [which guide when](../docs/how-to/choose-a-guide.md) has a row for them.
# * Effects one by one, as here below, and how to make their intervals right: [additive models](additive.ipynb).
# * Whether a fit is to be trusted: [diagnostics](diagnostics.ipynb).
