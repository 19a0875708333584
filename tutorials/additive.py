# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Generalised additive models
#
# *What affects a count, and how certain is each effect?*
#
# A generalised additive model (GAM) is a sum of effects inside a likelihood: lines, smooth curves, levels of a
# factor, surfaces of two variables. In a Pyro program the smooth part is one GP site whose kernel is a sum of terms.
# The rest is ordinary Pyro. The guide keeps the posterior of every term and the correlations between terms (Adam,
# Durrande and John, 2018, "Scalable GAM using sparse variational Gaussian processes").
#
# The data are the RAND health insurance experiment (20,190 person-years), which ships with statsmodels. The count is
# a person's visits to a doctor in a year. The inputs are the insurance plan and the person's health.
#
# On the command line: `python tutorials/additive.py [--device cuda] [--steps 250] [--people 20190] [--out DIR]`.

# %% tags=["hide-input"]
import command_line  # options of the tutorials, in this folder
import numpy as np
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch
from pyro.infer import SVI
from torch.distributions import constraints

from pyro_sparsegp import (
    AutoSparseGP,
    GaussianProcess,
    TraceQuadrature_ELBO,
    diagnostics,
    kernels,
)
from pyro_sparsegp.families import CoupledPrecision, MeanFieldAdditive

options = command_line.options(
    "Additive models of visits to a doctor.",
    steps=(250, "training steps of each guide"),
    people=(20_190, "rows of the data, at most", 2_000),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The data
#
# The columns are a count (`mdvis`), two numbers (the participation incentive and the number of chronic diseases), two
# factors and two indicators. The factors are columns of codes:
# the coinsurance rate (five values from 0 to 95 per cent) and self-rated health. Numbers are scaled to [0, 1]. A
# fifth of the rows is held out.

# %%
frame = sm.datasets.randhie.load_pandas().data
rates = np.sort(frame["lncoins"].unique())
health = (frame["hlthg"] + 2 * frame["hlthf"] + 3 * frame["hlthp"]).to_numpy()
columns = {
    "chronic diseases": (frame["disea"] / frame["disea"].max()).to_numpy(),
    "incentive payment": (frame["lpi"] / frame["lpi"].max()).to_numpy(),
    "coinsurance": np.searchsorted(rates, frame["lncoins"].to_numpy()),
    "health": health,
    "deductible plan": frame["idp"].to_numpy(),
    "limitation": frame["physlm"].to_numpy(),
}
names = list(columns)
everything = torch.tensor(
    np.stack(list(columns.values()), 1), dtype=torch.float64, device=options.device
)
visits = torch.tensor(
    frame["mdvis"].to_numpy(), dtype=torch.float64, device=options.device
)
order = torch.randperm(len(visits))[: options.people].to(options.device)
held, kept = order[: len(order) // 5], order[len(order) // 5 :]
x, y, x_new, y_new = everything[kept], visits[kept], everything[held], visits[held]
print(
    f"{len(y)} rows to train on, {len(y_new)} held out; {y.mean():.2f} visits on average, variance {y.var():.1f}"
)

# %% [markdown]
# ## The program
#
# The variance is seven times the mean, so the counts are negative binomial. Each summand of the kernel has a name and
# reads the columns in its brackets:
#
# * `Anova(k, 0, 1)` is the kernel of functions whose mean over [0, 1] is zero. Without it a constant could move
#   between the terms and the intercept. Products of such kernels are interactions without the main effects.
# * `Categorical(L)` is a random effect for each of L levels.
# * The intercept and the slopes of the indicators are Pyro sites like any other. (`kernels.Constant` and
#   `kernels.Linear` would do, too.)


# %%
def model(x, y=None, size=None):
    lengths = pyro.param(
        "lengths", 0.5 * x.new_ones(4), constraint=constraints.positive
    )
    scales = pyro.param("scales", x.new_ones(3), constraint=constraints.positive)
    spread = pyro.param("spread", 0.1 * x.new_ones(2), constraint=constraints.positive)

    def smooth(i):
        return kernels.Anova(kernels.Matern52(lengths[i]), 0.0, 1.0)

    kernel = (
        (scales[0] * smooth(0)[0]).named("s(diseases)")
        + (scales[1] * smooth(1)[1]).named("s(incentive)")
        + (scales[2] * smooth(2)[0] * smooth(3)[1]).named("te(diseases, incentive)")
        + (spread[0] * kernels.Categorical(5)[2]).named("coinsurance")
        + (spread[1] * kernels.Categorical(4)[3]).named("health")
    )
    intercept = pyro.sample("intercept", dist.Normal(x.new_tensor(1.0), 2.0))
    slopes = pyro.sample("slopes", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    f = pyro.sample("f", GaussianProcess(kernel, x))
    log_rate = (
        intercept + x[:, 4:] @ slopes + f
    )  # + exposure.log(), if people were observed for different times
    shape = pyro.param("shape", x.new_tensor(1.0), constraint=constraints.positive)
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample(
            "y", dist.NegativeBinomial(shape, logits=log_rate - shape.log()), obs=y
        )


# %% [markdown]
# ## Two guides
#
# `MeanFieldAdditive` takes the terms as independent. `CoupledPrecision` couples them by a low-rank term of the
# precision, in storage and time linear in the number of terms. `inducing` has an entry for each term: 12 points for a
# curve, and 36 for the surface, on regular grids in the columns that the term reads. Terms with finitely many
# features, such as the factors, need no inducing points: they are exact.
#
# We also compare two insurance plans: the ratio of their rates of visits. This needs the joint posterior of both
# effects, because what they share cancels. Pyro's store holds the model's parameters for one guide at a time. So we
# compute each guide's ratio right after its training.


# %%
def contrast(guide):
    """Ratio of rates of poor and excellent health, and a factor up and down for 95 %."""
    levels = x[:2].clone()
    levels[:, 3] = torch.tensor([0.0, 3.0])
    part = guide.posterior(x)["f"].components["health"].at(levels)
    (a, ab), (_, b) = part.covariance_matrix
    return (part.mean[1] - part.mean[0]).exp(), (1.96 * (a + b - 2 * ab).sqrt()).exp()


def fit(family):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family)
    guide(x, y)
    svi = SVI(
        model,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.1 ** (1 / options.steps)}),
        loss,
    )
    for _ in range(options.steps):
        rows = torch.randint(len(x), (500,), device=x.device)
        svi.step(x[rows], y[rows], size=len(x))
    return guide


loss = TraceQuadrature_ELBO(10)
inducing = [12, 12, 36, None, None]
guides = {}
for family in (
    MeanFieldAdditive(inducing, init="grid"),
    CoupledPrecision(inducing, rank=16, init="grid"),
):
    guide = guides[type(family).__name__] = fit(family)
    with torch.no_grad():
        bound = -np.mean([loss.loss(model, guide, x, y) for _ in range(5)])
        ratio, factor = contrast(guide)
    print(
        f"{type(family).__name__:20} bound {bound:.1f}; negative binomial shape {pyro.param('shape').item():.3f}"
    )
    print(
        f"{'':20} poor against excellent health: {ratio:.2f} [{ratio / factor:.2f}, {ratio * factor:.2f}]"
    )

# %% [markdown]
# ## The effects
#
# `components` holds the posterior of each term by its name. `plot_effects` plots all terms in the usual way for GAMs,
# with 95 % intervals and a rug of the inputs. Here `transform=torch.exp` makes them factors of the rate of visits.
# (The bounds of the two guides differ by no more than the noise of mini-batches.)

# %%
posterior = guides["CoupledPrecision"].posterior(x)["f"]
figure = diagnostics.plot_effects(posterior, columns=names, transform=torch.exp)
figure.savefig(options.out / "additive.png", dpi=80)
medians = guides["CoupledPrecision"].median(x, y)
for name, slope in zip(names[4:], medians["slopes"]):
    print(f"{name}: rate times {slope.exp():.2f}")

# %% [markdown]
# ## Correlations between effects
#
# The uncertainty of a sum of effects depends on their correlations. `components` has the joint covariance of all
# effects, and draws them jointly. Here the main effect of the incentive and the interaction are correlated, because
# both depend on the incentive. The other effects are almost uncorrelated.

# %%
person = torch.tensor([[0.6, 0.9, 2.0, 2.0, 0.0, 0.0]]).to(x)
with torch.no_grad():
    parts = posterior.components.at(person)
    covariance = parts.covariance_matrix
    spread = covariance.diagonal().sqrt()
    print("correlations of the effects of one person:", ", ".join(parts.names))
    print(
        np.array2string(
            (covariance / spread / spread[:, None]).cpu().numpy(),
            precision=2,
            suppress_small=True,
        )
    )
    draws = parts.rsample((1000,))
    total = sum(draws.values()).exp()
    print(
        f"all effects of that person: rate times {total.median():.2f}, sd {total.std():.2f}"
    )

# %% [markdown]
# ## Against lines alone
#
# For comparison, statsmodels fits a generalised linear model with the same likelihood: a line for each column, and
# dummies for the factors. The score is the deviance of the held-out rows under a negative binomial with our shape.
# Here curves and their interaction gain almost nothing over lines, because the effects are close to linear. (For data
# with curved effects see `tests/benchmarks/paper0.py`.)


# %%
def deviance(mean):
    ratio = torch.where(y_new > 0, y_new * (y_new.clamp(min=1) / mean).log(), 0.0)
    return (
        (2 * (ratio - (y_new + shape) * ((shape + y_new) / (shape + mean)).log()))
        .mean()
        .item()
    )


shape = pyro.param("shape").item()
with torch.no_grad():
    q = guides["CoupledPrecision"].posterior(x_new)["f"]
    rate = (
        medians["intercept"]
        + x_new[:, 4:] @ medians["slopes"]
        + q.mean
        + q.variance / 2
    ).exp()


def dummies(x):
    x = x.cpu().numpy()
    factors = [
        (x[:, [column]] == np.arange(1, count)).astype(float)
        for column, count in ((2, 5), (3, 4))
    ]
    return sm.add_constant(np.hstack([x[:, [0, 1, 4, 5]], *factors]))


lines = sm.GLM(
    y.cpu().numpy(), dummies(x), family=sm.families.NegativeBinomial(alpha=1 / shape)
).fit()
additive, alone = deviance(rate), deviance(y.mean().expand_as(y_new))
straight = deviance(torch.as_tensor(lines.predict(dummies(x_new))).to(y_new))
print(
    f"deviance a row: additive {additive:.4f}, lines {straight:.4f}, the mean alone {alone:.4f}"
)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert additive < alone - 0.05  # the columns tell something,
    assert abs(additive - straight) < 0.005  # and lines tell nearly all of it

# %% [markdown]
# ## What to try next
#
# * Add an effect of your own, such as a curve for each level of a factor: `Categorical(2)[3] * Anova(...)[0]` ([how
#   to](../docs/how-to/additive.md)).
# * See how `MeanFieldAdditive` and `CoupledPrecision` differ in [the figures of the
#   paper](../docs/explanation/benchmarks.md).
# * Judge the fit: [diagnostics](diagnostics.ipynb).
