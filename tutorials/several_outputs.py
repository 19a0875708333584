# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Several outputs
#
# *A sensor was off for a while. What do the other sensors say about it?*
#
# Three sensors follow two hidden signals, and the third sensor was off in the middle. If each sensor has a GP of its
# own, the third GP returns to its prior mean in the gap. In a linear model of coregionalisation (Journel and
# Huijbregts, 1978) the outputs are mixtures of shared functions, `A @ f` in the program, so the other two sensors
# fill the gap. Missing values are masked one by one.
#
# On the command line: `python tutorials/several_outputs.py [--steps 100] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide.initialization import init_to_sample

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR

options = command_line.options(
    "Sensors that share signals.",
    device=False,
    steps=(100, "training steps of each guide"),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The sensors

# %%
num = 120
x = torch.linspace(0, 1, num)[:, None]
signals = torch.stack([torch.sin(9 * x[:, 0]), torch.cos(14 * x[:, 0] ** 1.5)])
mixing = torch.tensor([[1.0, 0.2], [0.3, 1.0], [0.8, -0.7]])
truth = (mixing @ signals).mT
Y = truth + 0.1 * torch.randn(num, 3)
off = (x[:, 0] > 0.35) & (x[:, 0] < 0.65)
Y[off, 2] = torch.nan

# %% [markdown]
# ## Two programs
#
# Missing values are NaN. `.mask(seen)` before `.to_event(1)` leaves out single values and keeps the rest of the row.


# %%
def independent(x, y=None, seen=True):
    length = pyro.sample("length", dist.LogNormal(-1.5, 0.5).expand([3, 1]).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(-2.0, 0.5))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f.mT, noise).mask(seen).to_event(1), obs=y)


def coregionalised(x, y=None, seen=True):
    A = pyro.sample("A", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    length = pyro.sample("length", dist.LogNormal(-1.5, 0.5).expand([2, 1]).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(-2.0, 0.5))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample(
            "y", dist.Normal((A @ f).mT, noise).mask(seen).to_event(1), obs=y
        )


# %% [markdown]
# Each observation depends on both functions, so the guide gives them one joint posterior. A starts at a draw from its
# prior. At the prior mean, A = 0, the data would not depend on the functions, and training could not tell them apart.

# %%
found = {}
for title, model in [("independent", independent), ("coregionalised", coregionalised)]:
    pyro.set_rng_seed(2)
    guide = AutoSparseGP(
        model, SGPR(20), init_loc_fn=init_to_sample, point_estimates=True
    )
    svi = SVI(
        model,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.98}),
        TraceQuadrature_ELBO(2),
    )
    for _ in range(options.steps):
        loss = svi.step(x, Y, seen=~Y.isnan())
    with torch.no_grad():
        q = guide.posterior(x)["f"]
        A = guide(x)["A"] if model is coregionalised else torch.eye(3)
        mean, variance = (A @ q.mean).mT, (A.square() @ q.variance).mT
    error = (mean - truth)[off, 2].square().mean().sqrt().item()
    width = variance[off, 2].sqrt().mean().item()
    found[title] = mean, variance.sqrt(), -loss, error, width
    print(
        f"{title:15} bound {-loss:7.1f} nats; in the gap RMSE {error:.3f}, sd {width:.3f}"
    )

# %%
figure, axes = plt.subplots(2, 3, figsize=(13, 5), sharex=True, sharey=True)
t = x[:, 0]
for row, (title, (mean, spread, *_)) in zip(axes, found.items()):
    for sensor, axis in enumerate(row):
        m, s = mean[:, sensor], spread[:, sensor]
        axis.fill_between(t, m - 2 * s, m + 2 * s, alpha=0.4, lw=0)
        axis.plot(t, m)
        axis.plot(t, truth[:, sensor], "k--", lw=0.8)
        axis.plot(t, Y[:, sensor], "k.", ms=2)
        axis.set(title=f"{title}, sensor {sensor + 1}")
figure.tight_layout()
figure.savefig(options.out / "several_outputs.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    one, shared = found["independent"], found["coregionalised"]
    assert shared[3] < 0.3 * one[3]  # the gap is filled,
    assert shared[4] < 0.5 * one[4]  # with less uncertainty,
    assert ((shared[0] - truth).abs() < 3 * shared[1] + 0.05)[
        off, 2
    ].double().mean() > 0.9  # which is not too little

# %% [markdown]
# ## What to try next
#
# * Outputs as rows of one kernel, and several GP sites: [several outputs](../docs/how-to/several-outputs.md).
# * Other missing data: [missing data](../docs/how-to/likelihoods.md#missing-data).
# * Inputs that nobody observed: [latent inputs](latent_inputs.ipynb).
