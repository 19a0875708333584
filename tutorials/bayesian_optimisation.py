# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bayesian optimisation
#
# *Where should the next measurement be, if each is expensive?*
#
# A GP is fitted to the values seen so far, and an acquisition function says where the next measurement is worth most.
# This notebook has two. Expected improvement (Jones, Schonlau and Welch, 1998) follows from the posterior's mean and
# standard deviation. Thompson sampling (Thompson, 1933) minimises one function drawn from the posterior,
# `posterior.paths(1)`. Both have derivatives by the inputs, so gradient steps find their optima. To use BoTorch's
# acquisition functions and optimisers, turn the guide into a BoTorch model by `interop.botorch.Model` ([how
# to](../docs/how-to/bayesian-optimisation.md)).
#
# On the command line: `python tutorials/bayesian_optimisation.py [--rounds 15] [--steps 40] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import math

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch.func import jacfwd, jacrev

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR

options = command_line.options(
    "Where to measure next.",
    device=False,
    rounds=(15, "measurements beyond the first five", 2),
    steps=(40, "training steps after each"),
)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The function
#
# The function is Branin's, scaled to [0, 1]². It has three minima of the same depth. Measurements have noise with
# standard deviation 0.02.


# %%
def branin(x):
    u, v = 15 * x[..., 0] - 5, 15 * x[..., 1]
    value = (
        (v - 5.1 / (4 * math.pi**2) * u**2 + 5 / math.pi * u - 6) ** 2
        + 10 * (1 - 1 / (8 * math.pi)) * u.cos()
        + 10
    )
    return (value - 54.8) / 51.9


lowest = (0.397887 - 54.8) / 51.9


def measure(x):
    return branin(x) + 0.02 * torch.randn(len(x))


def model(x, y=None):
    length = pyro.sample(
        "length", dist.LogNormal(torch.full((2,), -1.0), 0.5).to_event(1)
    )
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-3.5, 0.5))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern52(length), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


# %% [markdown]
# ## The loop
#
# We make a new guide after each measurement. With so few rows all of them can be inducing inputs, and `SGPR` is then
# the exact posterior given its hyperparameters. The acquisition function is evaluated at 500 random places, and
# gradient steps improve the best of them.


# %%
def fitted(x, y):
    guide = AutoSparseGP(model, SGPR(x), point_estimates=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceQuadrature_ELBO(2))
    for _ in range(options.steps):
        svi.step(x, y)
    return guide


def expected_improvement(posterior, best):
    """E[max(best − f, 0)]."""
    gain, spread = best - posterior.mean, posterior.stddev
    z = gain / spread
    return (
        gain * torch.special.ndtr(z) + spread * dist.Normal(0.0, 1.0).log_prob(z).exp()
    )


def next_place(kind, guide, x):
    with torch.no_grad():
        best = guide.posterior(x)["f"].mean.min()
        places = torch.rand(500, 2)
        if kind == "expected improvement":

            def worth(x):
                return expected_improvement(guide.posterior(x)["f"], best)

        else:
            path = guide.posterior(places)["f"].paths(1)

            def worth(x):
                return -path(x)[0]

        place = places[worth(places).argmax()][None].clone()
    for _ in range(10):
        place.requires_grad_()
        (slope,) = torch.autograd.grad(
            worth(place).log().sum()
            if kind == "expected improvement"
            else worth(place).sum(),
            place,
        )
        with torch.no_grad():
            moved = (place + 0.01 * slope / slope.norm().clamp(min=1e-9)).clamp(0, 1)
            place = moved if worth(moved) > worth(place) else place
    return place.detach()


def optimise(kind, seed):
    pyro.set_rng_seed(seed)
    x = torch.rand(5, 2)
    y = measure(x)
    for _ in range(options.rounds):
        new = (
            torch.rand(1, 2)
            if kind == "at random"
            else next_place(kind, fitted(x, y), x)
        )
        x, y = torch.cat([x, new]), torch.cat([y, measure(new)])
    return x, branin(x).cummin(0).values - lowest


kinds = ["at random", "expected improvement", "Thompson sampling"]
regrets, visited = {}, {}
for kind in kinds:
    runs = [optimise(kind, seed) for seed in range(2)]
    visited[kind], regrets[kind] = (
        runs[0][0],
        torch.stack([regret for _, regret in runs]),
    )
    last = [round(regret, 4) for regret in regrets[kind][:, -1].tolist()]
    print(f"{kind:22} regret after {5 + options.rounds} measurements: {last}")

# %%
grid = torch.cartesian_prod(torch.linspace(0, 1, 60), torch.linspace(0, 1, 60))
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
for kind in kinds:
    axes[0].semilogy(
        range(1, regrets[kind].shape[1] + 1),
        regrets[kind].mean(0).clamp(min=1e-4),
        label=kind,
    )
axes[0].set(xlabel="measurements", title="regret, mean of two runs")
axes[0].legend(fontsize=7)
for axis, kind in zip(axes[1:], kinds[1:]):
    axis.contourf(
        *grid.T.reshape(2, 60, 60), branin(grid).reshape(60, 60), 20, cmap="Greys"
    )
    axis.plot(*visited[kind][:5].T, "wo", mec="k", ms=4)
    axis.plot(*visited[kind][5:].T, "r.", ms=6)
    axis.set(title=kind)
figure.tight_layout()
figure.savefig(options.out / "bayesian_optimisation.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## Slope and curvature
#
# Posteriors can be differentiated by their inputs, in forward and in reverse mode. This gives, for example, the
# Hessian of the mean, which Newton's method needs.

# %%
x = visited["expected improvement"]
guide = fitted(x, measure(x))


def mean(place):
    return guide.posterior(place[None])["f"].mean[0]


at = x[branin(x).argmin()]
curvature = jacfwd(jacrev(mean))(at)
print(
    "eigenvalues of the mean's Hessian at the best place:",
    torch.linalg.eigvalsh(curvature).tolist(),
)

# %% [markdown]
# ## The claims, as assertions
#
# Two runs are few, and random search was lucky in one of them. The noise has standard deviation 0.02, so single
# measurements cannot tell regrets of this size apart.

# %%
if options.full:
    for kind in kinds[1:]:
        assert regrets[kind][:, -1].mean() < 0.5 * regrets["at random"][:, -1].mean()
    assert (
        regrets["expected improvement"][:, -1].max() < 0.05
    )  # within 5 % of the function's sd
    assert (
        torch.linalg.eigvalsh(curvature).max() > 0
    )  # the mean is curved upwards there

# %% [markdown]
# ## What to try next
#
# * Draws of whole functions: [predictions](../docs/how-to/predictions.md).
# * Outcomes that are counts or classes: only the likelihood changes ([a gallery](likelihoods.ipynb)).
# * A posterior of the hyperparameters instead of point estimates: leave `point_estimates` out.
