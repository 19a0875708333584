# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Computation-aware Gaussian processes
#
# *How much of a posterior's uncertainty comes from too little computation?*
#
# An approximate posterior is uncertain for two reasons: there are few data (*mathematical* uncertainty), and there
# was little computation (*computational* uncertainty). `ComputationAware` (Wenger et al., 2024) counts both. It
# learns from a few weighted sums of the data, Sᵀy, its *projections*. Its variance is the exact posterior's variance
# plus what the projections leave out, so it is never too small. A posterior with inducing points may be too narrow.
# This notebook shows both kinds of uncertainty in one dimension. Then it takes the same family to counts, which the
# paper leaves to future work.
#
# On the command line: `python tutorials/computation_aware.py [--device cuda] [--steps 200] [--out DIR]`.

# %% tags=["hide-input"]
import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import statsmodels.api as sm
import torch
from pyro.infer import SVI
from torch.distributions import constraints
from tqdm import tqdm

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, ComputationAware

options = command_line.options(
    "Mathematical and computational uncertainty.",
    steps=(200, "training steps of each guide"),
)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## A gap in the data
#
# The data are eighty points with a hole in the middle. The hyperparameters are fixed, so the posteriors differ only
# by their approximation. One of the five inducing points lies in the hole.

# %%
pyro.set_rng_seed(0)
x = torch.cat([torch.rand(40, 1), 2 + torch.rand(40, 1)]).to(options.device)
y = torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(80).to(options.device)
grid = torch.linspace(-0.5, 3.5, 400)[:, None].to(options.device)
z = torch.tensor([[0.2], [0.7], [1.5], [2.3], [2.8]]).to(options.device)


def model(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.5), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


families = {
    "5 inducing points": SGPR(z, trainable=False),
    "5 sparse actions": ComputationAware(5),
    "5 residual actions (CG)": ComputationAware(5, "cg"),
    "20 sparse actions": ComputationAware(20),
}
posteriors, ratios = {}, {}
for name, family in families.items():
    guide = AutoSparseGP(model, family)
    elbo = TraceQuadrature_ELBO(num_nodes=2)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo)
    for _ in tqdm(
        range(options.steps),
        desc=name,
        mininterval=1.0,
        disable=command_line.IN_NOTEBOOK,
    ):
        loss = svi.step(x, y)
    with torch.no_grad():
        posteriors[name] = guide.posterior(grid)["f"]
        hole = guide.posterior(torch.tensor([[1.5]]).to(x))["f"]
        ratio = ratios[name] = (hole.variance / hole.mathematical_variance).item()
    print(
        f"{name:25} ELBO {-loss:8.2f}; variance in the hole, over the exact posterior's: {ratio:.2f}"
    )

# %% [markdown]
# `SparsePosterior.mathematical_variance` is the exact posterior's variance, and `computational_variance` is the rest.
# The posterior with inducing points is overconfident where its variance is *below* the exact one (the red line inside
# the blue band). At the inducing point in the hole it claims to know f better than all the data allow.

# %%
figure, axes = plt.subplots(
    1, len(posteriors), figsize=(4.2 * len(posteriors), 3.4), sharey=True
)
for axis, (name, q) in zip(axes, posteriors.items()):
    t, mean = grid[:, 0].cpu(), q.mean.cpu()
    inner, total = (
        2 * variance.sqrt().cpu() for variance in (q.mathematical_variance, q.variance)
    )
    axis.fill_between(
        t, mean - inner, mean + inner, alpha=0.35, label="mathematical (±2 sd)"
    )
    more = torch.maximum(inner, total)
    for sign in (-1, 1):
        label = "and computational" if sign == 1 else None
        axis.fill_between(
            t,
            mean + sign * inner,
            mean + sign * more,
            color="C1",
            alpha=0.35,
            lw=0,
            label=label,
        )
        axis.plot(
            t,
            mean + sign * total,
            color="C3",
            lw=0.7,
            label="claimed" if sign == 1 else None,
        )
    axis.plot(t, mean, color="k", lw=1)
    axis.plot(x[:, 0].cpu(), y.cpu(), ".", color="0.4", ms=3)
    if "inducing" in name:
        axis.plot(
            z[:, 0].cpu(),
            torch.full((5,), -3.2),
            "^",
            color="C3",
            label="inducing points",
        )
    axis.set(title=name, xlabel="x", ylim=(-3.5, 3.5))
axes[0].legend(fontsize=7, loc="upper left")
figure.tight_layout()
figure.savefig(options.out / "computation_aware.png", dpi=110)

# %% [markdown]
# ## Counts
#
# The guide approximates each datum's likelihood by a Gaussian, from derivatives of the model's density. So any
# likelihood that factorises over the data works. The data are yearly sunspot numbers, 1700 to 2008, which ship with
# statsmodels. They are over-dispersed counts.

# %%
spots = sm.datasets.sunspots.load_pandas().data
years = torch.tensor(spots["YEAR"].to_numpy())[:, None].to(options.device)
counts = torch.tensor(spots["SUNACTIVITY"].to_numpy()).round().to(options.device)


def sunspots(x, y=None):
    cycle = pyro.param(
        "cycle", torch.tensor(11.0).to(x), constraint=constraints.positive
    )  # years
    drift = pyro.param(
        "drift", torch.tensor(30.0).to(x), constraint=constraints.positive
    )
    scale = pyro.param(
        "scale", torch.tensor(1.0).to(x), constraint=constraints.positive
    )
    size = pyro.param("size", torch.tensor(10.0).to(x), constraint=constraints.positive)
    level = pyro.param("level", torch.tensor(3.5).to(x))
    kernel = scale * kernels.Product(
        kernels.Periodic(1.0, period=cycle), kernels.Matern32(drift)
    )
    f = pyro.sample(
        "f", GaussianProcess(kernel, x, mean=lambda x: level.expand(len(x)))
    )
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.GammaPoisson(size, size / f.exp()), obs=y)


pyro.clear_param_store()
guide = AutoSparseGP(sunspots, ComputationAware(48))
svi = SVI(sunspots, guide, pyro.optim.Adam({"lr": 0.03}), TraceQuadrature_ELBO())
losses = []
for _ in tqdm(
    range(2 * options.steps),
    desc="sunspots",
    mininterval=1.0,
    disable=command_line.IN_NOTEBOOK,
):
    losses.append(svi.step(years, counts))
print(f"ELBO {-losses[0]:.1f} -> {-losses[-1]:.1f}; sites: {guide.site_status['f']}")
print(f"cycle {pyro.param('cycle').item():.2f} years")

# %%
span = torch.arange(1690.0, 2030.0, 0.5)[:, None].to(options.device)
with torch.no_grad():
    q = guide.posterior(span)["f"]
    mean, total, inner = (
        q.mean.cpu(),
        2 * q.variance.sqrt().cpu(),
        2 * q.mathematical_variance.sqrt().cpu(),
    )
figure, axis = plt.subplots(figsize=(10, 3.4))
t = span[:, 0].cpu()
axis.fill_between(
    t,
    (mean - total).exp(),
    (mean + total).exp(),
    color="C1",
    alpha=0.35,
    lw=0,
    label="and computational",
)
axis.fill_between(
    t,
    (mean - inner).exp(),
    (mean + inner).exp(),
    color="C0",
    alpha=0.45,
    lw=0,
    label="mathematical",
)
axis.plot(t, mean.exp(), color="k", lw=0.8)
axis.plot(years[:, 0].cpu(), counts.cpu(), ".", color="0.3", ms=3)
axis.set(
    xlabel="year", ylabel="sunspots", ylim=(0, 260), title="48 actions for 309 years"
)
axis.legend(fontsize=8, loc="upper left")
figure.tight_layout()
figure.savefig(options.out / "computation_aware_counts.png", dpi=110)
print(f"The pictures are in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert ratios["5 inducing points"] < 0.5  # overconfident in the hole
    assert all(
        ratio > 1 - 1e-6 for name, ratio in ratios.items() if "actions" in name
    )  # never

# %% [markdown]
# ## What to try next
#
# * More actions, other policies: `"eigen"`, `"random"` or
#   [a callable](../docs/explanation/families/computation-aware.md).
# * Inducing points instead of projections: [quickstart](quickstart.ipynb).
# * What k-hat says about such posteriors: [k-hat](../docs/explanation/k-hat.md).
