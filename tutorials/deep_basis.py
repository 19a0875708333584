# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Deep basis kernels
#
# *Can a network be the kernel, and the posterior still be uncertain?*
#
# A network can be a kernel: k(x, x') = φ(x)ᵀφ(x'), where φ maps D inputs to r features (Zhu, Yuchi and Xie, 2025).
# Such a kernel has rank r, so the GP is Bayesian linear regression on the features. `ExactWeightSpace` computes its
# posterior in time linear in the number of rows. `WeightSpace` trains it by mini-batches under any likelihood.
# Without a correction, the network memorises the data in one feature, and the uncertainty vanishes. The variance
# correction adds c(x) = max k − k(x, x) to the diagonal, so that the prior variance is the same everywhere, and
# uncertainty stays.
#
# On the command line: `python tutorials/deep_basis.py [--device cuda] [--steps 2000] [--out DIR]`.

# %% tags=["hide-input"]
import copy
import math

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ExactWeightSpace, WeightSpace

options = command_line.options(
    "Networks as kernels.", steps=(2000, "training steps of each guide")
)
torch.set_default_dtype(torch.float64)


# %% [markdown]
# ## With and without the correction
#
# The truth is the paper's example: steps with a small ripple, observed at a hundred places with noise. The model
# registers the network with `pyro.module`, as in any Pyro program. A network that you forget to register raises an
# error.
#
# In training the correction is a penalty, Σ c(x)/(2σ²). The features of a new network differ in norm from row to row.
# At σ = 0.1 the penalty is then many times as large as the fit. So training first makes the features small and nearly
# constant, and needs many steps to recover. A last layer that gives the features of all rows one learned norm has c =
# 0 from the first step on. This layer is a part of your network, not of the kernel, and needs r > 1.


# %%
def truth(x):
    steps = [torch.sigmoid(200 * (x + a)) for a in (0.6, 0.0, -0.4)]
    pieces = (
        0.3 * (1 - steps[0]) + 0.9 * (steps[0] - steps[1]) - 0.6 * (steps[1] - steps[2])
    )
    return pieces + 0.01 * torch.sin(50 * torch.sin(10 * x))


def sample(num):
    x = (2 * torch.rand(num, 1) - 1).to(options.device)
    return x, truth(x[:, 0]) + 0.1 * torch.randn(num).to(options.device)


def new_network(rank=32):
    layers = (
        nn.Linear(1, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, rank),
    )
    with torch.no_grad():  # features as short as the steps are, from the start
        for part in layers[0].parameters():
            part.mul_(10)
    return nn.Sequential(*layers).to(options.device)


class EvenRows(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network, self.log_norm = (
            network,
            nn.Parameter(torch.zeros(()).to(options.device)),
        )

    def forward(self, x):
        return self.log_norm.exp() * nn.functional.normalize(self.network(x), dim=-1)


pyro.set_rng_seed(0)
x, y = sample(100)
grid = torch.linspace(-1.2, 1.2, 600)[:, None].to(options.device)

found = {}  # error, standard deviation of f, share of the largest feature direction
figure, axes = plt.subplots(1, 3, figsize=(14, 3.4), sharey=True)
for axis, (name, correction, even) in zip(
    axes,
    [
        ("no correction", False, False),
        ("correction", True, False),
        ("correction, even norm", True, True),
    ],
):
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    network = EvenRows(new_network()) if even else new_network()

    def model(x, y=None, network=network, correction=correction):
        pyro.module("network", network)
        noise = pyro.param(
            "noise", torch.tensor(0.1).to(x), constraint=constraints.positive
        )
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(network, correction), x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = AutoSparseGP(model, ExactWeightSpace())
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 3e-3}), TraceQuadrature_ELBO(2))
    for _ in range(options.steps):
        loss = svi.step(x, y)
    with torch.no_grad():
        q = guide.posterior(grid)["f"]
        spectrum = torch.linalg.svdvals(network(x)).square()
        inside = grid[:, 0].abs() < 1
        error = (q.mean - truth(grid[:, 0]))[inside].square().mean().sqrt()
    found[name] = (
        error.item(),
        q.stddev[inside].median().item(),
        (spectrum[0] / spectrum.sum()).item(),
    )
    print(
        f"{name:21} bound {-loss:8.2f}; RMSE to the truth {error.item():.3f}; noise {pyro.param('noise').item():.3f} "
        f"(truth 0.1); share of the largest feature direction {(spectrum[0] / spectrum.sum()).item():.0%}; median sd "
        f"of f {q.stddev.median().item():.3f}"
    )
    t, mean, spread = grid[:, 0].cpu(), q.mean.cpu(), 2 * q.stddev.cpu()
    axis.fill_between(t, mean - spread, mean + spread, alpha=0.3, lw=0)
    axis.plot(t, mean)
    axis.plot(t, truth(t), "k--", lw=0.8)
    axis.plot(x[:, 0].cpu(), y.cpu(), ".", color="0.4", ms=3)
    axis.set(title=name, ylim=(-1.5, 1.8))
figure.tight_layout()
figure.savefig(options.out / "deep_basis.png", dpi=110)

# %% [markdown]
# With the correction the network uses more than one feature, and f is uncertain, but f is the furthest from the truth.
# With features of one norm the bound is the highest. But f is too certain: its standard deviation, 0.016, is a fifth of
# its error, 0.083. The reason is that c is then 0, so nothing is corrected, and a hundred data determine 32 weights
# well. The posterior of the weights cannot know that the truth is no weighted sum of these features. So the even norm
# makes training easier, and does not make intervals right. If you need intervals, take the correction without the even
# norm, and look at the coverage of held-out data.

# %% [markdown]
# ## Mini-batches, weight decay, rates, early stopping
#
# With many rows take mini-batches. A model that is a `PyroModule` owns its network and its noise, so
# `model.state_dict()` holds all of its parameters. The bound is a module for `torch.optim`, and parameter groups give
# the network weight decay and a learning rate of its own. Call the guide on all rows first: the correction of
# predictions is relative to the inputs of the first call, under the current network.
#
# `natural=False` leaves q(w) to the optimiser, and a step then takes half the time. Natural steps, the default, are
# ahead at first and behind at the end: with `WeightSpace()` this cell ends at a validation NLL (negative log density
# per row, in nats) of -0.86. That of the true function with the true noise is -0.88.

# %%
pyro.set_rng_seed(0)
pyro.clear_param_store()
x, y = sample(20_000)
valid, test = sample(2_000), sample(2_000)


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.network = EvenRows(new_network())
        self.noise = PyroParam(
            torch.tensor(0.3).to(options.device), constraints.positive
        )

    def forward(self, x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(self.network), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, self.noise), obs=y)


model = Regression()
guide = AutoSparseGP(model, WeightSpace(natural=False))
bound = TraceQuadrature_ELBO(2)(model, guide)
bound(x, y)

of_network = {id(p) for p in model.network.parameters()}
rest = [p for p in bound.parameters() if id(p) not in of_network]
optimiser = torch.optim.AdamW(
    [
        {"params": model.network.parameters(), "lr": 3e-3, "weight_decay": 1e-4},
        {"params": rest, "lr": 1e-2, "weight_decay": 0.0},
    ]
)


@torch.no_grad()
def nll(guide, x, y):
    q = guide.posterior(x)["f"]
    variance = q.variance + model.noise**2
    return (
        (
            0.5
            * (
                math.log(2 * math.pi)
                + variance.log()
                + (y - q.mean).square() / variance
            )
        )
        .mean()
        .item()
    )


best, patience = (math.inf, {}), 0
for step in range(options.steps):
    rows = torch.randint(len(x), (256,), device=x.device)
    optimiser.zero_grad()
    bound(x[rows], y[rows], size=len(x)).backward()
    optimiser.step()
    if step % 100 == 99 or step == options.steps - 1:
        score, patience = nll(guide, *valid), patience + 1
        if score < best[0]:
            best, patience = (
                (
                    score,
                    copy.deepcopy(
                        {"model": model.state_dict(), "guide": guide.state_dict()}
                    ),
                ),
                0,
            )
        if patience == 10:
            break
model.load_state_dict(best[1]["model"])
guide.load_state_dict(best[1]["guide"])
print(
    f"stopped after {step + 1} steps; validation NLL {best[0]:.4f}, test NLL {nll(guide, *test):.4f}"
)

# %% [markdown]
# Under `SVI`, a function of a parameter's name gives Pyro's optimiser the same settings.


# %%
def settings(name):
    return (
        {"lr": 3e-3, "weight_decay": 1e-4}
        if "network" in name
        else {"lr": 1e-2, "weight_decay": 0.0}
    )


svi = SVI(model, guide, pyro.optim.AdamW(settings), TraceQuadrature_ELBO(2))
svi.step(x[:256], y[:256], size=len(x))

# %% [markdown]
# ## The exact posterior of all rows
#
# For a Gaussian likelihood the posterior of the weights has a closed form. We keep the network that the mini-batches
# trained. One pass over all rows then gives the posterior. Beyond 32,768 rows the pass goes block by block, so memory
# stays small. If you train this guide, each step is such a pass. In predictions the correction counts as noise of the
# training data, too. Under other likelihoods, such as a Bernoulli, the first prediction integrates the correction out
# of each row's density.

# %%
model.load_state_dict(best[1]["model"])
exact = AutoSparseGP(model, ExactWeightSpace())
exact(x, y)  # a call with data and gradients enabled: it reads the likelihood
print(f"exact posterior, same network: test NLL {nll(exact, *test):.4f}")


# %% [markdown]
# ## Features of your own; deep kernel learning
#
# A kernel with other features is a class with one method. A network *under* a kernel, as in deep kernel learning,
# needs no new class: give the process the network's outputs as its inputs. The inducing points are then in the space
# of these outputs. Let the network take small steps, because q follows it by natural steps. With a learning rate of
# 0.02 training ended in a constant network.


# %%
class Bumps(kernels.FeatureKernel):
    def features(self, x):
        return torch.exp(-0.5 * ((x - torch.linspace(-1, 1, 20).to(x)) / 0.1) ** 2)


def with_bumps(x, y=None):
    f = pyro.sample("f", GaussianProcess(0.5 * Bumps() + kernels.Constant(1.0), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.1), obs=y)


pyro.set_rng_seed(0)
pyro.clear_param_store()  # a second run of this cell makes a new network, which would meet the old one's parameters
under = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2)).to(options.device)


def deep_kernel(x, y=None):
    pyro.module("under", under)
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.1), under(x)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.1), obs=y)


for name, other, family, lr in [
    ("bumps", with_bumps, ExactWeightSpace(), 0.02),
    ("deep kernel", deep_kernel, SVGP(32), 0.005),
]:
    guide = AutoSparseGP(other, family)
    svi = SVI(other, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO(2))
    for _ in range(options.steps // 5):
        loss = svi.step(x[:2000], y[:2000])
    print(f"{name}: bound {-loss:.1f}")
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    plain, corrected, level = found.values()
    assert corrected[2] < plain[2]  # with the correction more features are in use,
    assert corrected[1] > plain[1]  # and f is more uncertain;
    assert level[0] < corrected[0]  # even norms fit better than it,
    assert level[1] < 0.5 * level[0]  # and are too sure;
    assert best[0] < -0.8  # many rows, in mini-batches, come close to the noise

# %% [markdown]
# ## What to try next
#
# * An intensity with such features: [Cox processes](cox_process.ipynb).
# * A million rows: [how to](../docs/how-to/networks.md), and [figures](../docs/explanation/benchmarks.md).
# * Whether intervals are right: `predictive_scores` in [diagnostics](diagnostics.ipynb).
