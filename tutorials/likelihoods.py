# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A gallery of likelihoods
#
# *Which observations can depend on a GP, and how well does each recover the same function?*
#
# Any distribution in the program can be the likelihood, and nothing has to be registered. Six likelihoods observe one
# function: noise that varies, counts, heavy tails, outliers marked by a discrete latent, ordered grades, and
# measurements cut off at the highest value that the instrument reads. Each is a few lines. The guide and the loop are
# the same for all.
#
# On the command line: `python tutorials/likelihoods.py [--steps 80] [--out DIR] [--short]`.

# %% tags=["hide-input"]
from typing import ClassVar

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

options = command_line.options(
    "One function, six likelihoods.",
    device=False,
    steps=(80, "training steps of each guide"),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

x = torch.sort(torch.rand(150, 1), 0).values
truth = torch.sin(7 * x[:, 0]) + 0.3
kernel = kernels.RBF(0.2)

# %% [markdown]
# ## The programs


# %%
def heteroscedastic(x, y=None):
    """A second GP is the log standard deviation of the noise."""
    f = pyro.sample("f", GaussianProcess(kernel, x))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(0.5), x, mean=-1.5))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, g.exp()), obs=y)


def counts(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Poisson((1.0 + f).exp()), obs=y)


def heavy_tails(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(-1.5, 0.5))
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.StudentT(3.0, f, scale), obs=y)


def outliers(x, y=None):
    """Each row has an indicator, which is summed out."""
    scale = pyro.sample("scale", dist.LogNormal(-1.5, 0.5))
    share = pyro.sample("share", dist.Beta(1.0, 9.0))
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("data", len(x)):
        wrong = pyro.sample(
            "wrong", dist.Bernoulli(share), infer={"enumerate": "parallel"}
        )
        return pyro.sample(
            "y", dist.Normal(f, torch.where(wrong == 1, 3.0, scale)), obs=y
        )


def grade_probabilities(f):
    """P(grade) = σ(8(upper cut − f)) − σ(8(lower cut − f))."""
    below = torch.sigmoid(8 * (torch.tensor([-0.4, 0.3, 0.9]) - f[:, None]))
    edges = torch.cat(
        [torch.zeros_like(below[:, :1]), below, torch.ones_like(below[:, :1])], -1
    )
    return edges.diff(dim=-1).clamp(min=1e-12)


def grades(x, y=None):
    """Four grades: f plus logistic noise, between cut points."""
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Categorical(grade_probabilities(f)), obs=y)


class Censored(dist.TorchDistribution):
    """A normal measurement that is cut off at ``high``: a distribution of our own."""

    arg_constraints: ClassVar = {}
    support = dist.constraints.real

    def __init__(self, loc, scale, high):
        self.normal, self.high = dist.Normal(loc, scale), high
        super().__init__(self.normal.batch_shape, validate_args=False)

    def log_prob(self, value):
        above = (
            torch.special.ndtr((self.normal.loc - self.high) / self.normal.scale)
            .clamp(min=1e-30)
            .log()
        )
        return torch.where(value >= self.high, above, self.normal.log_prob(value))

    def sample(self, sample_shape=()):
        return self.normal.sample(sample_shape).clamp(max=self.high)

    def expand(self, batch_shape, _instance=None):
        return Censored(
            self.normal.loc.expand(batch_shape), self.normal.scale, self.high
        )


def censored(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", Censored(f, 0.2, 0.8), obs=y)


# %% [markdown]
# ## The data, and one loop for all

# %%
noise = torch.randn(len(x))
wild = truth + 0.2 * noise
wild[::10] += 3 * torch.randn(len(wild[::10]))
data = {
    "noise that varies": (heteroscedastic, truth + (0.05 + 0.5 * x[:, 0]) * noise),
    "counts": (counts, torch.poisson((1 + truth).exp())),
    "heavy tails": (heavy_tails, wild),
    "outliers": (outliers, wild),
    "ordered grades": (grades, dist.Categorical(grade_probabilities(truth)).sample()),
    "cut off at 0.8": (censored, (truth + 0.2 * noise).clamp(max=0.8)),
}
found = {}
for title, (model, y) in data.items():
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, SVGP(16))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(12))
    for _ in range(options.steps):
        loss = svi.step(x, y)
    with torch.no_grad():
        posteriors = guide.posterior(x)
    f = posteriors["f"]
    error = (f.mean - truth).square().mean().sqrt().item()
    inside = ((truth - f.mean).abs() < 1.645 * f.stddev).double().mean().item()
    found[title] = f.mean.detach(), f.stddev.detach(), error, inside
    print(
        f"{title:18} loss {loss:7.1f}, RMSE of f {error:.3f}, truth within 90 % intervals {inside:.2f}"
    )
    if "g" in posteriors:
        sizes = posteriors["g"].mean.detach().exp()
naive = wild - truth
print(
    f"the outliers' own RMSE is {naive.square().mean().sqrt():.2f}; noise at both ends: {sizes[0]:.2f}, {sizes[-1]:.2f}"
)

# %%
figure, axes = plt.subplots(2, 3, figsize=(13, 6), sharex=True)
for axis, (title, (_, y)) in zip(axes.flat, data.items()):
    mean, spread, *_ = found[title]
    axis.plot(x[:, 0], y.clamp(-4, 12), "k.", ms=2, alpha=0.5)
    axis.fill_between(x[:, 0], mean - 2 * spread, mean + 2 * spread, alpha=0.4, lw=0)
    axis.plot(x[:, 0], mean)
    axis.plot(x[:, 0], truth, "k--", lw=0.8)
    axis.set(title=title)
figure.tight_layout()
figure.savefig(options.out / "likelihoods.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# Points are the observations, the line with its band is the posterior of f, and dashes are the truth. Where
# measurements are cut off, the posterior of f rises above the highest reading, and its band is wider there. The
# printed share of true values within 90 % intervals comes from one smooth curve, whose errors go together. So it can
# be far from 0.90, although over many curves intervals are right on average.

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    for title, (_, _, error, _) in found.items():
        assert error < 0.25, title  # each finds the function,
    for title in ("heavy tails", "outliers"):
        assert (
            found[title][2] < 0.3 * naive.square().mean().sqrt()
        )  # outliers do not lead astray,
    assert sizes[-1] > 2 * sizes[0]  # the noise is seen to grow,
    mean, spread, *_ = found["cut off at 0.8"]
    assert mean[truth > 1.1].mean() > 0.9  # and f goes above what was read,
    assert (
        spread[truth > 1.1].mean() > 1.3 * spread[truth < 0.5].mean()
    )  # less certain there

# %% [markdown]
# ## What to try next
#
# * How the guide computes expectations, and how your own distribution can:
#   [likelihoods](../docs/how-to/likelihoods.md).
# * The probability that a row is an outlier: [discrete latents](../docs/how-to/discrete-latents.md).
# * Other families: [which guide when](which_guide.ipynb). Classes: [classification](classification.ipynb).
