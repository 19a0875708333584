# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Cox processes
#
# *At what rate do events come, and how certain is the rate?*
#
# In a log-Gaussian Cox process the logarithm of the intensity of events is a Gaussian process, log λ = f (Zhu, Yuchi
# and Xie, 2025, appendix A.5). The log likelihood of events xᵢ is Σᵢ f(xᵢ) − ∫ exp f(x) dx. In a Pyro program these
# are two `pyro.factor` terms, with a sum over cells for the integral. The expectation of exp f is known, E[exp f] =
# exp(m + v/2). Any family works. Here we compare inducing points under a Matérn kernel with a deep basis kernel,
# whose features are the outputs of a network. We simulate the events, so the truth is known.
#
# On the command line: `python tutorials/cox_process.py [--device cuda] [--steps 600] [--out DIR]`.

# %% tags=["hide-input"]
import math

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import nn
from torch.distributions import constraints
from tqdm import tqdm

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, WeightSpace

options = command_line.options(
    "Log-intensities of events.", steps=(600, "training steps of each guide")
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## Events
#
# The intensity jumps, and then waves. We draw events by thinning: draw at the highest rate, and keep each event with
# probability λ(x)/max λ.


# %%
def intensity(t):
    return torch.where(t < 4.0, 12.0, 30.0 + 20.0 * torch.sin(3 * t)).where(
        t < 8.0, torch.full_like(t, 4.0)
    )


top, end = 50.0, 10.0
proposed = end * torch.rand(int(torch.poisson(torch.tensor(top * end))), 1)
events = proposed[torch.rand(len(proposed)) < intensity(proposed[:, 0]) / top].to(
    options.device
)
print(f"{len(events)} events in [0, {end:g}]")

# %% [markdown]
# ## The program
#
# The midpoints of the cells are the nodes of the integral. Without events the model has only f at the nodes, so
# `guide.posterior(midpoints, widths)` gives the posterior there.

# %%
num_cells = 200
midpoints = ((torch.arange(num_cells) + 0.5) * end / num_cells)[:, None].to(
    options.device
)
widths = torch.full((num_cells,), end / num_cells).to(options.device)
level = math.log(len(events) / end)


def cox(kernel):
    def model(nodes, weights, events=None):
        x = nodes if events is None else torch.cat([nodes, events])
        f = pyro.sample(
            "f",
            GaussianProcess(kernel(), x, mean=lambda x: x.new_full((len(x),), level)),
        )
        with pyro.plate("window", len(nodes)):
            pyro.factor("none_elsewhere", -weights * f[: len(nodes)].exp())
        if events is not None:
            with pyro.plate("events", len(events)):
                pyro.factor("at_events", f[len(nodes) :])

    return model


network = nn.Sequential(
    nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16)
).to(options.device)
with torch.no_grad():
    network[0].weight.mul_(3.0)


def deep():
    pyro.module("network", network)
    return kernels.DeepBasis(lambda x: network(x / 5 - 1))


def stationary():
    length = pyro.param(
        "length", torch.tensor(1.0).to(events), constraint=constraints.positive
    )
    scale = pyro.param(
        "scale", torch.tensor(1.0).to(events), constraint=constraints.positive
    )
    return scale * kernels.Matern32(length)


# %%
posteriors, coverage = {}, []
for name, kernel, family in [
    ("Matérn-3/2, 30 inducing points", stationary, SVGP(30)),
    ("deep basis, weight space", deep, WeightSpace()),
]:
    model = cox(kernel)
    guide = AutoSparseGP(model, family)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    for _ in tqdm(
        range(options.steps),
        desc=name,
        mininterval=1.0,
        disable=command_line.IN_NOTEBOOK,
    ):
        loss = svi.step(midpoints, widths, events)
    with torch.no_grad():
        q = guide.posterior(midpoints, widths)["f"]
        mean = (q.mean + q.variance / 2).exp()
        inside = (
            dist.Normal(q.mean, q.stddev)
            .cdf(intensity(midpoints[:, 0]).log())
            .sub(0.5)
            .abs()
            < 0.475
        )
    posteriors[name] = q
    coverage.append(inside.double().mean().item())
    print(
        f"{name:32} bound {-loss:8.2f}; events expected {(widths * mean).sum():.1f}; "
        f"mean error of the intensity {(mean - intensity(midpoints[:, 0])).abs().mean():.2f}, "
        f"true one within 95 % intervals at {inside.double().mean():.0%} of the cells"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True)
t = midpoints[:, 0].cpu()
for axis, (name, q) in zip(axes, posteriors.items()):
    mean, spread = q.mean.cpu(), 2 * q.stddev.cpu()
    axis.fill_between(t, (mean - spread).exp(), (mean + spread).exp(), alpha=0.3, lw=0)
    axis.plot(t, (mean + spread.square() / 8).exp(), label="E[exp f]")
    axis.plot(t, intensity(t), "k--", lw=0.8, label="truth")
    axis.plot(
        events[:, 0].cpu(), torch.full((len(events),), -2.0), "|", color="0.4", ms=4
    )
    axis.set(title=name, xlabel="time", ylim=(-4, 75))
axes[0].set_ylabel("events per unit of time")
axes[0].legend(fontsize=8)
figure.tight_layout()
figure.savefig(options.out / "cox_process.png", dpi=110)
print(f"The picture is in {options.out}")

# %% [markdown]
# The intervals of the deep basis are too narrow: its 95 % intervals hold the truth at far fewer than 95 % of the
# cells. The intervals of the Matérn kernel come close to 95 %. The deep basis has few features for both the jump and
# the waves, and its network is a point estimate, so its intervals leave out the uncertainty of the network. The two
# kernels are two *models*. Their bounds say which explains the data better, and not which has right intervals.
#
# In the plane only the cells change: they have midpoints `(M, 2)` and areas `(M,)`. `tests/benchmarks/cox.md` has
# such data, trees in a forest, and also a century of coal-mining disasters.

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert coverage[0] > 0.88  # a kernel with a prior on functions
    assert coverage[1] < 0.95  # a network's features, too narrow

# %% [markdown]
# ## What to try next
#
# * Give the network a last layer of even norm ([deep basis](deep_basis.ipynb)), and look at the coverage.
# * Other densities that Pyro has no distribution for: write a `pyro.factor` of f
#   ([likelihoods](../docs/how-to/likelihoods.md)).
# * Scores and calibration: [diagnostics](diagnostics.ipynb).
